/* The suffix index against a search through the whole text. */
#include "rig.h"

#include <time.h>

#include "draft/suffix.h"

/* Longest suffix of query[0..m) that occurs in text[0..n); *end: its latest end. */
static int naive_find(const int32_t *text, int n, const int32_t *query, int m, int *end) {
    int best = 0;
    *end = 0;
    for (int e = n; e >= 1; e--) {
        int len = 0;
        while (len < e && len < m && text[e - 1 - len] == query[m - 1 - len])
            len++;
        if (len > best)
            best = len, *end = e;
    }
    return best;
}

static so_suffix *create(int cap) {
    so_suffix *s = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_suffix_create(cap, &s, &err), err);
    return s;
}

static void equals_naive_search(void **state) {
    (void)state;
    enum { N = 300 };
    dice d = {.seed = 11};
    for (int round = 0; round < 200; round++) {
        int32_t text[N];
        int alphabet = 2 + dice_below(&d, 12), n = 1 + dice_below(&d, N), copy = dice_below(&d, 3);
        so_suffix *s = create(n);
        for (int i = 0; i < n; i++) {
            /* half of the rounds copy earlier parts, so that long matches occur */
            if (copy && i > 20 && dice_below(&d, 4))
                text[i] = text[i - 1 - dice_below(&d, copy) * 7 - 10];
            else
                text[i] = dice_below(&d, alphabet);
            assert_true(so_suffix_add(s, text[i]));
            int end, want_end, want = naive_match(text, i + 1, &want_end);
            assert_int_equal(so_suffix_match(s, &end), want);
            if (want > 0)
                assert_int_equal(end, want_end);
        }
        assert_false(so_suffix_add(s, 1));
        assert_int_equal(so_suffix_len(s), n);
        so_suffix_free(s);
    }
}

static void cursor_equals_naive_search(void **state) {
    (void)state;
    enum { N = 200 };
    dice d = {.seed = 12};
    for (int round = 0; round < 100; round++) {
        int32_t text[N], query[N];
        int alphabet = 2 + dice_below(&d, 6);
        so_suffix *s = create(N);
        so_suffix_cursor c = {0};
        for (int i = 0; i < N; i++) {
            text[i] = dice_below(&d, alphabet);
            so_suffix_add(s, text[i]);
        }
        for (int i = 0; i < N; i++) {
            /* occasionally a token that is not in the text */
            query[i] = dice_below(&d, 20) ? dice_below(&d, alphabet) : 99;
            so_suffix_step(s, &c, query[i]);
            int end, want = naive_find(text, N, query, i + 1, &end);
            assert_int_equal(c.len, want);
            if (want > 0)
                assert_int_equal(so_suffix_end(s, &c), end);
        }
        int from = dice_below(&d, N), len = N - from;
        assert_int_equal(so_suffix_prefix(s, text + from, len), len);
        text[from] = 99;
        assert_int_equal(so_suffix_prefix(s, text + from, len), 0);
        so_suffix_free(s);
    }
}

/* In a loop the length is exact and the position valid, though perhaps not the latest. */
static void loops_match_truly(void **state) {
    (void)state;
    enum { N = 3000 };
    static int32_t text[N];
    for (int period = 1; period <= 5; period++) {
        so_suffix *s = create(N);
        for (int i = 0; i < N; i++) {
            text[i] = i % 1000 == 999 ? 77 : i % period;
            so_suffix_add(s, text[i]);
            int end, want_end, len = so_suffix_match(s, &end);
            if (i % 50 == 0 || i % 1000 < 10)
                assert_int_equal(len, naive_match(text, i + 1, &want_end));
            assert_true(end <= i);
            for (int k = 0; k < len; k++)
                assert_int_equal(text[end - 1 - k], text[i - k]);
        }
        so_suffix_free(s);
    }
}

/* Half a million tokens of loops: a quadratic search would take hours. */
static void time_is_linear(void **state) {
    (void)state;
    enum { N = 500000 };
    clock_t start = clock();
    for (int kind = 0; kind < 3; kind++) {
        so_suffix *s = create(N);
        dice d = {.seed = 13};
        for (int i = 0; i < N; i++)
            so_suffix_add(s, kind == 0 ? 5 : kind == 1 ? i % 3 : dice_below(&d, 2));
        so_suffix_free(s);
    }
    assert_true((double)(clock() - start) / CLOCKS_PER_SEC < 60);
}

static void clearing_forgets(void **state) {
    (void)state;
    so_suffix *s = create(8);
    int end;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 8; i++) {
            assert_true(so_suffix_add(s, i % 4));
            assert_int_equal(so_suffix_match(s, &end), i < 4 ? 0 : i - 3);
        }
        assert_false(so_suffix_add(s, 0));
        so_suffix_clear(s);
        assert_int_equal(so_suffix_len(s), 0);
        assert_int_equal(so_suffix_match(s, &end), 0);
    }
    so_suffix_free(s);
}

static void bad_sizes(void **state) {
    (void)state;
    so_suffix *s = NULL;
    so_err err = {0};
    assert_int_equal(so_suffix_create(0, &s, &err), SO_ERANGE);
    assert_int_equal(so_suffix_create(-5, &s, &err), SO_ERANGE);
    assert_int_equal(so_suffix_create(INT32_MAX, &s, &err), SO_ERANGE);
    assert_null(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_naive_search), cmocka_unit_test(cursor_equals_naive_search),
        cmocka_unit_test(loops_match_truly),   cmocka_unit_test(time_is_linear),
        cmocka_unit_test(clearing_forgets),    cmocka_unit_test(bad_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
