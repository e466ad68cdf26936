/* Unigram encoding against an exhaustive search, and what files from outside may hold: precompiled
 * charsmaps, scores, vocabularies. Ids of the reference library are in test_tokenizer.c. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "token/charsmap.h"
#include "token/tokenizer.h"
#include "token/unigram.h"

enum { N_PIECES = 14 };
static const char *const piece_texts[N_PIECES] = {"<unk>", "a",  "b",   "c",    "ab",  "bc",   "ca",
                                                  "abc",   "aa", "aab", "bcab", "cab", "abab", "x"};

static so_unigram *make(const double *scores, const uint8_t *skipped) {
    static so_str pieces[N_PIECES];
    so_unigram_options o = {
        .n_vocab = N_PIECES, .pieces = pieces, .scores = scores, .skipped = skipped};
    for (int i = 0; i < N_PIECES; i++)
        pieces[i] = so_str_c(piece_texts[i]);
    for (int i = 0; i < 256; i++)
        o.byte_ids[i] = -1;
    so_unigram *u;
    so_err err;
    SO_OK_OR_FAIL(so_unigram_create(&o, &u, &err), err);
    return u;
}

/* The largest sum over all divisions of the text; `d`, which is no piece, costs `unknown`. */
static double best_sum(const char *text, const double *scores, double unknown) {
    double best = *text ? -1e30 : 0;
    if (!*text)
        return 0;
    for (int i = 1; i < N_PIECES; i++) {
        size_t n = strlen(piece_texts[i]);
        if (strncmp(text, piece_texts[i], n) == 0)
            best = fmax(best, scores[i] + best_sum(text + n, scores, unknown));
    }
    if (*text == 'd')
        best = fmax(best, unknown + best_sum(text + 1, scores, unknown));
    return best;
}

static void likeliest(void **state) {
    (void)state;
    static const uint8_t skipped[N_PIECES] = {1};
    for (uint32_t round = 0; round < 400; round++) {
        so_rng_key key = {.seed = round, .purpose = SO_RNG_TEST};
        double scores[N_PIECES], least = 0, sum = 0;
        char text[13] = {0};
        for (int i = 0; i < N_PIECES; i++) {
            scores[i] = -10 * so_rng_uniform(&key, (uint32_t)i);
            least = fmin(least, scores[i]);
        }
        for (uint32_t i = 0; i < 12; i++)
            text[i] = "abcd"[(int)(4 * so_rng_uniform(&key, 100 + i))];
        so_unigram *u = make(scores, skipped);
        so_tokens ids = {0};
        so_err err;
        SO_OK_OR_FAIL(so_unigram_encode(u, so_str_c(text), &ids, &err), err);
        for (size_t i = 0; i < ids.len; i++)
            sum += ids.ids[i] == 0 ? 0 : scores[ids.ids[i]];
        for (const char *p = text; *p; p++)
            sum += *p == 'd' ? least - 10 : 0;
        assert_true(fabs(sum - best_sum(text, scores, least - 10)) < 1e-9);
        so_tokens_free(&ids);
        so_unigram_free(u);
    }
}

static void refused_vocabularies(void **state) {
    (void)state;
    static char longest[SO_UNIGRAM_MAX_PIECE + 2];
    memset(longest, 'a', sizeof longest - 1);
    so_str pieces[2] = {SO_STR("<unk>"), so_str_c(longest)};
    const uint8_t skipped[2] = {1, 0};
    so_unigram *u = NULL;
    so_err err;
    double scores[2] = {0, -1};
    so_unigram_options o = {.n_vocab = 2, .pieces = pieces, .scores = scores, .skipped = skipped};
    assert_int_equal(so_unigram_create(&o, &u, &err), SO_ELIMIT);
    assert_non_null(strstr(err.msg, "token 1 has 1025 bytes"));
    pieces[1] = SO_STR("a");
    scores[1] = (double)NAN;
    assert_int_equal(so_unigram_create(&o, &u, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "score of token 1"));
    scores[1] = -1;
    o.unk = -1;
    assert_int_equal(so_unigram_create(&o, &u, &err), SO_EUNSUPPORTED);
    assert_null(u);
}

/* A text without a space of a million characters. */
static void long_text(void **state) {
    (void)state;
    static const uint8_t skipped[N_PIECES] = {1};
    double scores[N_PIECES];
    for (int i = 0; i < N_PIECES; i++)
        scores[i] = -i;
    so_unigram *u = make(scores, skipped);
    so_buf text = {0};
    for (int i = 0; i < 500000; i++)
        so_buf_append_c(&text, "ab");
    so_tokens ids = {0};
    so_err err;
    SO_OK_OR_FAIL(so_unigram_encode(u, so_buf_str(&text), &ids, &err), err);
    assert_true(ids.len >= 250000);
    so_tokens_free(&ids);
    so_buf_free(&text);
    so_unigram_free(u);
}

/* ---- charsmaps ---- */

enum { N_UNITS = 2048 };

static void put_unit(so_buf *b, int at, uint32_t unit) {
    for (int i = 0; i < 4; i++)
        b->data[4 + 4 * at + i] = (char)(unit >> 8 * i & 0xFF);
}

/* "A" → "xyz", "ﬁ" → "fi". */
static void build_map(so_buf *b, so_str texts) {
    static const char zeros[4 + 4 * N_UNITS];
    so_buf_clear(b);
    so_buf_append(b, zeros, sizeof zeros);
    so_buf_append_str(b, texts);
    uint32_t size = 4 * N_UNITS;
    for (int i = 0; i < 4; i++)
        b->data[i] = (char)(size >> 8 * i & 0xFF);
    put_unit(b, 0, 256u << 10);
    put_unit(b, 256 ^ 'A', 'A' | 256 | (256u ^ 'A' ^ 1500) << 10);
    put_unit(b, 1500, 0 | 1u << 31);
    put_unit(b, 256 ^ 0xEF, 0xEF | (256u ^ 0xEF ^ 512) << 10);
    put_unit(b, 512 ^ 0xAC, 0xAC | (512u ^ 0xAC ^ 768) << 10);
    put_unit(b, 768 ^ 0x81, 0x81 | 256 | (768u ^ 0x81 ^ 1600) << 10);
    put_unit(b, 1600, 4 | 1u << 31);
}

static void check_map(const so_buf *bytes, const char *in, const char *want) {
    so_charsmap *map;
    so_err err;
    so_buf out = {0};
    SO_OK_OR_FAIL(so_charsmap_read(so_buf_str(bytes), &map, &err), err);
    so_charsmap_apply(map, so_str_c(in), &out);
    assert_string_equal(out.data ? out.data : "", want);
    so_buf_free(&out);
    so_charsmap_free(map);
}

static void charsmaps(void **state) {
    (void)state;
    so_buf b = {0};
    build_map(&b, (so_str){"xyz\0fi", 7});
    check_map(&b, "", "");
    check_map(&b, "BA\xEF\xAC\x81n", "Bxyzfin");
    check_map(&b, "A\xCC\x81!", "xyz!"); /* a cluster of three bytes is replaced as a whole */
    check_map(&b, "A\xCC\x81\xCC\x81\xCC\x81", "xyz\xCC\x81\xCC\x81\xCC\x81");
    check_map(&b, "\xEF\xAC\x82", "\xEF\xAC\x82");
    so_buf_free(&b);
}

/* One long cluster of characters with a long replacement each: the work ends when the output is
 * full. Without that end it takes a minute. */
static void full_output(void **state) {
    (void)state;
    enum { N_MARKS = 200000, N_TEXT = 8 << 20 };
    so_charsmap *map;
    so_err err;
    so_buf bytes = {0}, texts = {0}, in = {0}, out = {.max = 1000};
    for (int i = 0; i < N_TEXT; i++)
        so_buf_append_char(&texts, 'x');
    build_map(&bytes, so_buf_str(&texts));
    put_unit(&bytes, 256 ^ 0xCC, 0xCC | 256 | (256u ^ 0xCC ^ 1500) << 10);
    so_buf_append_c(&in, "e");
    for (int i = 0; i < N_MARKS; i++)
        so_buf_append_c(&in, "\xCC\x81");
    SO_OK_OR_FAIL(so_charsmap_read(so_buf_str(&bytes), &map, &err), err);
    int64_t start = so_clock_ns();
    so_charsmap_apply(map, so_buf_str(&in), &out);
    assert_true(out.full);
    assert_true(so_clock_ms_since(start) < 5000);
    so_charsmap_free(map);
    so_buf_free(&bytes);
    so_buf_free(&texts);
    so_buf_free(&in);
    so_buf_free(&out);
}

static void check_refused(const so_buf *b, size_t len, const char *why) {
    so_charsmap *map = NULL;
    so_err err;
    assert_int_not_equal(so_charsmap_read((so_str){b->data, len}, &map, &err), 0);
    if (!strstr(err.msg, why))
        fail_msg("\"%s\" does not say \"%s\"", err.msg, why);
    assert_null(map);
}

static void hostile_charsmaps(void **state) {
    (void)state;
    so_buf b = {0};
    build_map(&b, (so_str){"xyz\0fi", 7});
    check_refused(&b, 3, "of 3 bytes");
    check_refused(&b, 4, "states a trie");
    check_refused(&b, 4 * N_UNITS, "states a trie");
    b.data[0] = 2; /* not a multiple of 4 */
    check_refused(&b, b.len, "states a trie");
    build_map(&b, SO_STR("ab\xFF"));
    check_refused(&b, b.len, "byte 2 of the replacements is not UTF-8");
    build_map(&b, SO_STR("\xC3\xA4"));
    put_unit(&b, 1500, 1 | 1u << 31);        /* inside a character */
    put_unit(&b, 1600, 1u << 30 | 1u << 31); /* past the end */
    check_map(&b, "A\xEF\xAC\x81", "A\xEF\xAC\x81");
    for (int at = 0; at < N_UNITS; at++) /* every unit leads far outside, then to itself */
        put_unit(&b, at, 0xFFFFFF00u);
    check_map(&b, "Aa\xEF\xAC\x81", "Aa\xEF\xAC\x81");
    for (int at = 0; at < N_UNITS; at++)
        put_unit(&b, at, (uint32_t)(at & 0xFF));
    check_map(&b, "Aa\xEF\xAC\x81", "Aa\xEF\xAC\x81");
    so_buf_free(&b);
}

/* ---- files ---- */

static int load(const char *json, so_tokenizer **t, so_err *err) {
    char *dir = so_test_tmp(), *path = so_path_join(dir, "tokenizer.json");
    so_out_file *out;
    SO_OK_OR_FAIL(so_out_begin(path, &out, err), *err);
    SO_OK_OR_FAIL(so_out_write(out, json, strlen(json), err), *err);
    SO_OK_OR_FAIL(so_out_commit(out, err), *err);
    int rc = so_tokenizer_open(path, t, err);
    free(path);
    so_test_tmp_free(dir);
    return rc;
}

static void hostile_json(void **state) {
    (void)state;
    static const struct {
        const char *json, *why;
    } cases[] = {
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":{\"a\":1}}}", "not an array"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[]}}", "is empty"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\"]]}}", "entry 0"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\",\"b\"]]}}", "entry 0"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":7,\"vocab\":[[\"a\",0]]}}", "unk_id"},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0]]}}", "unk_id: is missing"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\",0]]},\"normalizer\":"
         "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"A!\"}}",
         "is not base64"},
        {"{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"a\",0]]},\"normalizer\":"
         "{\"type\":\"Precompiled\",\"precompiled_charsmap\":\"/////w==\"}}",
         "precompiled charsmap of 4 bytes"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_tokenizer *t = NULL;
        so_err err;
        assert_int_not_equal(load(cases[i].json, &t, &err), 0);
        if (!strstr(err.msg, cases[i].why))
            fail_msg("\"%s\" does not say \"%s\"", err.msg, cases[i].why);
        assert_null(t);
    }
}

/* Text that spells a control token never becomes its id unless asked. */
static void control_tokens(void **state) {
    (void)state;
    so_tokenizer *t;
    so_err err;
    SO_OK_OR_FAIL(
        load("{\"model\":{\"type\":\"Unigram\",\"unk_id\":0,\"vocab\":[[\"<unk>\",0],"
             "[\"</s>\",0],[\"<\",-1],[\"/\",-2],[\"s\",-2],[\">\",-2]]},\"added_tokens\":"
             "[{\"id\":1,\"content\":\"</s>\",\"special\":true}]}",
             &t, &err),
        err);
    so_tokens ids = {0};
    SO_OK_OR_FAIL(so_tokenizer_encode(t, SO_STR("</s>"), 0, &ids, &err), err);
    assert_int_equal(ids.len, 4);
    SO_OK_OR_FAIL(so_tokenizer_encode(t, SO_STR("</s>"), SO_ENCODE_PARSE_SPECIAL, &ids, &err), err);
    assert_int_equal(ids.len, 5);
    assert_int_equal(ids.ids[4], 1);
    so_tokens_free(&ids);
    so_tokenizer_free(t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(likeliest),         cmocka_unit_test(refused_vocabularies),
        cmocka_unit_test(long_text),         cmocka_unit_test(charsmaps),
        cmocka_unit_test(hostile_charsmaps), cmocka_unit_test(full_output),
        cmocka_unit_test(hostile_json),      cmocka_unit_test(control_tokens),
    };
    return cmocka_run_group_tests_name("unigram", tests, NULL, NULL);
}
