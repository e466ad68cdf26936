/* Lookup in the request's own text, across requests, and in the text that the user expects. */
#include "rig.h"

#include "draft/suffix.h"

static void continues_the_longest_latest_match(void **state) {
    (void)state;
    dice d = {.seed = 51};
    for (int round = 0; round < 40; round++) {
        rig r;
        int min_len = 1 + dice_below(&d, 4), alphabet = 3 + dice_below(&d, 20);
        int32_t first = 0, out[16];
        rig_open(&r, so_lookup_create(&(so_lookup_params){.min_len = min_len}), &first, 1);
        while (r.n < 250) {
            int32_t more[3];
            for (int i = 0; i < 3; i++)
                more[i] = dice_below(&d, alphabet);
            rig_emit(&r, more, 1 + dice_below(&d, 3), dice_below(&d, 2));
            int end, len = naive_match(r.text, r.n, &end), n = rig_chain(&r, 10, out);
            if (len < min_len) {
                assert_int_equal(n, 0);
                continue;
            }
            assert_int_equal(n, 10);
            for (int i = 0; i < n; i++) /* past its end the guess repeats */
                assert_int_equal(out[i], end + i < r.n ? r.text[end + i] : out[end + i - r.n]);
            for (int i = 2; i <= n; i++)
                assert_true(r.tree.proposals[i - 1].confidence >
                            r.tree.proposals[i - 2].confidence);
        }
        rig_close(&r);
    }
}

static void longer_matches_are_trusted_more(void **state) {
    (void)state;
    int32_t prompt[60], out[4];
    float before = 0;
    for (int len = 2; len < 20; len++) {
        rig r;
        for (int i = 0; i < 30; i++)
            prompt[i] = 100 + i;
        for (int i = 0; i < len; i++)
            prompt[30 + i] = 100 + i + 5;
        rig_open(&r, so_lookup_create(NULL), prompt, 30 + len);
        assert_int_equal(rig_chain(&r, 1, out), 1);
        assert_int_equal(out[0], 100 + len + 5);
        assert_true(r.tree.proposals[0].confidence > before);
        before = r.tree.proposals[0].confidence;
        rig_close(&r);
    }
}

/* A function of 200 tokens is repeated with 8 names changed: at least 2.5 tokens per pass. */
static void code_edit(void **state) {
    (void)state;
    int32_t code[200], edited[200], out[16];
    dice d = {.seed = 52};
    for (int i = 0; i < 200; i++)
        edited[i] = code[i] = dice_below(&d, 60);
    for (int i = 12; i < 200; i += 25)
        edited[i] = 500 + i;
    rig r;
    rig_open(&r, so_lookup_create(NULL), code, 200);
    int passes = 0;
    for (int at = 0; at < 200; passes++) {
        int n = rig_chain(&r, 8, out), k = 0;
        while (k < n && at + k < 200 && out[k] == edited[at + k])
            k++;
        k = SO_MIN(k + 1, 200 - at);
        rig_emit(&r, edited + at, k, true);
        at += k;
    }
    assert_true(200.0 / passes >= 2.5);
    rig_close(&r);
}

static void long_texts_keep_their_latest_half(void **state) {
    (void)state;
    rig r;
    int32_t out[4], token = 0;
    dice d = {.seed = 53};
    so_lookup_params p = {.max_tokens = 64};
    rig_open(&r, so_lookup_create(&p), (int32_t[]){1, 2, 3, 4}, 4);
    for (int i = 0; i < 1000; i++) {
        token = 10 + dice_below(&d, 900);
        rig_emit(&r, &token, 1, true);
    }
    rig_emit(&r, (int32_t[]){1, 2}, 2, true); /* removed from the index long ago */
    assert_int_equal(rig_chain(&r, 2, out), 0);
    rig_emit(&r, r.text + r.n - 20, 3, true); /* still in the index */
    assert_int_equal(rig_chain(&r, 2, out), 2);
    assert_int_equal(out[0], r.text[r.n - 20]);
    rig_close(&r);
}

static void budget_is_kept(void **state) {
    (void)state;
    rig r;
    so_err err = {0};
    rig_open(&r, so_lookup_create(NULL), (int32_t[]){1, 2, 1, 2, 1, 2}, 6);
    int cases[][3] = {{0, 5, 0}, {5, 0, 0}, {3, 5, 3}, {5, 3, 3}, {255, 1000, 255}, {1, 1, 1}};
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_draft_job job = rig_job(&r, cases[i][0], cases[i][1]);
        SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
        assert_int_equal(r.tree.n_nodes - 1, cases[i][2]);
    }
    rig_close(&r);
}

/* Corpus. */

static so_corpus *corpus(size_t bytes) {
    so_corpus *c = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_corpus_create(bytes, &c, &err), err);
    return c;
}

static void second_request_hits(void **state) {
    (void)state;
    so_corpus *c = corpus(1 << 20);
    so_drafter *d = so_corpus_drafter_create(c, 0);
    int32_t answer[] = {50, 51, 52, 53, 54, 55}, out[8];
    rig a, b;
    rig_open(&a, d, (int32_t[]){1, 2, 3}, 3);
    assert_int_equal(rig_chain(&a, 8, out), 0);
    rig_emit(&a, answer, 6, true);
    assert_int_equal(rig_chain(&a, 8, out), 0);  /* its own text is not in the store */
    rig_open(&b, d, (int32_t[]){7, 1, 2, 3}, 4); /* runs at the same time as the first */
    assert_int_equal(rig_chain(&b, 8, out), 0);
    rig_end(&a);
    assert_tokens(out, rig_chain(&b, 8, out), answer, 6); /* ends with the stored text */
    rig_emit(&b, answer, 2, false);
    assert_tokens(out, rig_chain(&b, 3, out), answer + 2, 3);
    rig_emit(&b, (int32_t[]){9}, 1, true);
    assert_int_equal(rig_chain(&b, 8, out), 0);
    rig_close(&b);
    so_corpus_free(c);
}

static void cap_is_held_and_the_oldest_go(void **state) {
    (void)state;
    enum { CAP = 1 << 18, LEN = 100 };
    so_corpus *c = corpus(CAP);
    so_drafter *d = so_corpus_drafter_create(c, 0);
    int32_t text[LEN], out[8];
    size_t most = 0;
    for (int doc = 0; doc < 200; doc++) {
        for (int i = 0; i < LEN; i++)
            text[i] = (doc * 31 + i * 7 + i * i % 13 * doc) % RIG_VOCAB;
        so_corpus_add(c, text, LEN);
        most = SO_MAX(most, so_corpus_tokens(c));
        assert_true(so_corpus_bytes(c) <= CAP);
    }
    assert_true(most > 5 * LEN && most < 200 * LEN);
    rig r;
    rig_open(&r, d, text, LEN / 2); /* the last text is there */
    assert_tokens(out, rig_chain(&r, 8, out), text + LEN / 2, 8);
    rig_end(&r);
    for (int i = 0; i < LEN; i++)
        text[i] = i * 7 % RIG_VOCAB; /* the first is not */
    rig_open(&r, d, text, 20);
    assert_int_equal(rig_chain(&r, 8, out), 0);
    rig_close(&r);
    so_corpus_free(c);
}

static void repeated_beginnings_are_stored_once(void **state) {
    (void)state;
    so_corpus *c = corpus(1 << 22);
    int32_t text[600];
    for (int i = 0; i < 600; i++)
        text[i] = i;
    so_corpus_add(c, text, 500);
    size_t before = so_corpus_tokens(c);
    so_corpus_add(c, text, 500);
    so_corpus_add(c, text + 100, 300);
    assert_int_equal(so_corpus_tokens(c), before);
    text[500] = 999;
    so_corpus_add(c, text, 510);
    assert_int_equal(so_corpus_tokens(c), before + 64 + 10 + 1);
    so_corpus_free(c);
}

/* The store finds what a search through all stored texts finds, for any order of additions. */
static void corpus_equals_naive_search(void **state) {
    (void)state;
    enum { DOCS = 12, LEN = 60 };
    dice dd = {.seed = 54};
    for (int round = 0; round < 20; round++) {
        so_corpus *c = corpus(1 << 20);
        so_drafter *d = so_corpus_drafter_create(c, 2);
        int32_t docs[DOCS][LEN], out[8], first = 0;
        int n_docs = 0;
        rig r;
        rig_open(&r, d, &first, 1);
        for (int step = 0; step < 150; step++) {
            if (n_docs < DOCS && dice_below(&dd, 10) == 0) {
                for (int i = 0; i < LEN; i++)
                    docs[n_docs][i] = i == 0 ? 700 + n_docs : dice_below(&dd, 4);
                so_corpus_add(c, docs[n_docs++], LEN);
            }
            int32_t token = dice_below(&dd, 4);
            rig_emit(&r, &token, 1, dice_below(&dd, 2));
            int best = 0, n = rig_chain(&r, 1, out);
            bool ok = false;
            for (int k = 0; k < n_docs; k++)
                for (int e = 1; e <= LEN; e++) {
                    int len = 0;
                    while (len < e && len < r.n && docs[k][e - 1 - len] == r.text[r.n - 1 - len])
                        len++;
                    if (len >= best && len >= 2) {
                        best = len; /* the latest of equals */
                        ok = e == LEN ? n == 0 : n == 1 && out[0] == docs[k][e];
                    }
                }
            assert_true(best >= 2 ? ok : n == 0);
        }
        rig_close(&r);
        so_corpus_free(c);
    }
}

static void bad_corpus(void **state) {
    (void)state;
    so_corpus *c = NULL;
    so_err err = {0};
    assert_int_equal(so_corpus_create(1000, &c, &err), SO_ERANGE);
    assert_int_equal(so_corpus_create(0, &c, &err), SO_ERANGE);
    c = corpus(1 << 17);
    int32_t *big = SO_NEW_N(int32_t, 100000); /* longer than the store: only its end is kept */
    for (int i = 0; i < 100000; i++)
        big[i] = i % 997;
    so_corpus_add(c, big, 100000);
    assert_true(so_corpus_tokens(c) > 0 && so_corpus_bytes(c) <= 1 << 17);
    so_corpus_add(c, big, 0);
    free(big);
    so_corpus_free(c);
}

/* Predict. */

static int passes(rig *r, const int32_t *output, int n_output, int k) {
    int n_passes = 0;
    int32_t out[64];
    for (int at = 0; at < n_output; n_passes++) {
        int n = rig_chain(r, k, out), hit = 0;
        while (hit < n && at + hit < n_output && out[hit] == output[at + hit])
            hit++;
        hit = SO_MIN(hit + 1, n_output - at);
        rig_emit(r, output + at, hit, n_passes % 2);
        at += hit;
    }
    return n_passes;
}

static void expected_text_is_followed(void **state) {
    (void)state;
    int32_t text[150];
    dice d = {.seed = 55};
    for (int i = 0; i < 150; i++)
        text[i] = dice_below(&d, 30);
    for (int k = 1; k <= 16; k++)
        for (int n = 1; n <= 150; n += 37) {
            rig r;
            rig_open_expecting(&r, so_predict_create(), (int32_t[]){1, 2}, 2, text, n);
            assert_int_equal(passes(&r, text, n, k), (n + k) / (k + 1)); /* ⌈n/(k+1)⌉ */
            rig_close(&r);
        }
}

/* Replaced, inserted, removed and moved parts: the position is found again within a few tokens. */
static void edits_are_survived(void **state) {
    (void)state;
    int32_t text[200], out[64];
    dice d = {.seed = 56};
    for (int i = 0; i < 200; i++)
        text[i] = dice_below(&d, 100);
    int32_t edited[300];
    int n = 0;
    for (int i = 0; i < 30; i++)
        edited[n++] = text[i];
    edited[n++] = 900; /* one replaced */
    for (int i = 31; i < 60; i++)
        edited[n++] = text[i];
    for (int i = 0; i < 7; i++)
        edited[n++] = 901 + i; /* seven inserted */
    for (int i = 60; i < 90; i++)
        edited[n++] = text[i];
    for (int i = 120; i < 200; i++) /* the thirty tokens before 120 are removed */
        edited[n++] = text[i];
    for (int i = 90; i < 120; i++) /* … and appended */
        edited[n++] = text[i];
    rig r;
    rig_open_expecting(&r, so_predict_create(), (int32_t[]){1}, 1, text, 200);
    int n_passes = passes(&r, edited, n, 9);
    /* at most: full rounds, plus for each of the four edits the broken round and the search */
    assert_true(n_passes <= n / 10 + 1 + 2 + 8 + 5 + 5);
    /* after a replaced token the guess continues behind it immediately */
    rig_end(&r);
    so_drafter *d2 = r.d;
    rig_open_expecting(&r, d2, (int32_t[]){1}, 1, text, 200);
    rig_emit(&r, edited, 31, true);
    assert_tokens(out, rig_chain(&r, 4, out), text + 31, 4);
    rig_close(&r);
}

static void lost_text_is_silent(void **state) {
    (void)state;
    int32_t text[50], out[8];
    for (int i = 0; i < 50; i++)
        text[i] = i;
    rig r;
    rig_open_expecting(&r, so_predict_create(), (int32_t[]){1}, 1, text, 50);
    rig_emit(&r, (int32_t[]){900, 901, 902, 903}, 4, true);
    assert_int_equal(rig_chain(&r, 4, out), 0);
    rig_emit(&r, (int32_t[]){40, 41, 42}, 3, true); /* three tokens find a distant position */
    assert_tokens(out, rig_chain(&r, 4, out), text + 43, 4);
    rig_emit(&r, text + 43, 7, true);
    assert_int_equal(rig_chain(&r, 4, out), 0); /* the end */
    rig_close(&r);
    rig_open(&r, so_predict_create(), (int32_t[]){1}, 1); /* no expected text */
    assert_int_equal(rig_chain(&r, 4, out), 0);
    rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(continues_the_longest_latest_match),
        cmocka_unit_test(longer_matches_are_trusted_more),
        cmocka_unit_test(code_edit),
        cmocka_unit_test(long_texts_keep_their_latest_half),
        cmocka_unit_test(budget_is_kept),
        cmocka_unit_test(second_request_hits),
        cmocka_unit_test(cap_is_held_and_the_oldest_go),
        cmocka_unit_test(repeated_beginnings_are_stored_once),
        cmocka_unit_test(corpus_equals_naive_search),
        cmocka_unit_test(bad_corpus),
        cmocka_unit_test(expected_text_is_followed),
        cmocka_unit_test(edits_are_survived),
        cmocka_unit_test(lost_text_is_silent),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
