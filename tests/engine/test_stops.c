/* Stop strings: for any division into pieces, the output is the text before the first stop string,
 * and nothing that may belong to a stop string is passed on early. */
#include "so_test.h"

#include "base/mem.h"
#include "base/rng.h"
#include "engine/stops.h"

static uint32_t pick(uint32_t i, uint32_t below) {
    so_rng_key key = {.seed = 5, .purpose = SO_RNG_TEST};
    uint32_t w[4];
    so_rng_block(&key, i, w);
    return w[0] % below;
}

/* The expected length: everything before the earliest stop string. */
static size_t ref_end(so_str text, const so_str *stops, int n) {
    for (size_t i = 0; i < text.len; i++)
        for (int s = 0; s < n; s++)
            if (so_str_starts((so_str){text.ptr + i, text.len - i}, stops[s]))
                return i;
    return text.len;
}

static void test_random_texts_and_pieces(void **state) {
    (void)state;
    const so_str stops[] = {SO_STR("aab"), SO_STR("ba"), SO_STR("ccccb"), SO_STR("abcab")};
    uint32_t k = 0;
    for (int trial = 0; trial < 3000; trial++) {
        char text[40];
        size_t len = 1 + pick(k++, sizeof text - 1);
        for (size_t i = 0; i < len; i++)
            text[i] = "abcc"[pick(k++, 4)];
        int n_stops = (int)pick(k++, SO_LEN(stops) + 1);
        so_stops s = {.strings = stops, .n_strings = n_stops};
        so_buf out = {0};
        size_t want = ref_end((so_str){text, len}, stops, n_stops);
        bool hit = false;
        for (size_t at = 0; at < len && !hit;) {
            size_t most = 1 + pick(k++, 5), n = SO_MIN(most, len - at);
            hit = so_stops_push(&s, (so_str){text + at, n}, &out);
            at += n;
            assert_true(out.len <= want); /* nothing of a stop string was passed on */
        }
        assert_true(hit == (want < len));
        if (!hit)
            so_stops_finish(&s, &out);
        assert_int_equal(out.len, want);
        assert_memory_equal(out.data ? out.data : "", text, want);
        so_buf_free(&out);
        so_stops_free(&s);
    }
}

static void test_lets_through_what_cannot_match(void **state) {
    (void)state;
    const so_str stops[] = {SO_STR("</s>")};
    so_stops s = {.strings = stops, .n_strings = 1};
    so_buf out = {0};
    assert_false(so_stops_push(&s, SO_STR("a </"), &out));
    assert_string_equal(out.data, "a ");
    assert_false(so_stops_push(&s, SO_STR("b> <"), &out));
    assert_string_equal(out.data, "a </b> ");
    assert_true(so_stops_push(&s, SO_STR("/s> more"), &out));
    assert_string_equal(out.data, "a </b> ");
    so_buf_free(&out);
    so_stops_free(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_texts_and_pieces),
        cmocka_unit_test(test_lets_through_what_cannot_match),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
