/* min_tokens, stop tokens and bad words (engine/restrict.c): the rules hold, and the text under
 * speculation is that of plain decoding, with `==`. */
#include "so_test.h"

#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "engine/figures.h"
#include "so_cases.h"
#include "so_tiny.h"

enum { N_PREDICT = 40 };

typedef struct fixture {
    char *dir;
    so_bundle b;
    so_engine *e;
} fixture;

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_bundle_opts bo;
    so_engine_opts o;
    so_err err = {0};
    f->dir = so_test_tmp();
    char *path = so_path_join(f->dir, "tiny.gguf");
    so_tiny_write(path, NULL);
    so_bundle_defaults(&bo);
    bo.n_threads = 1;
    SO_OK_OR_FAIL(so_bundle_open(path, &bo, &f->b, &err), err);
    so_engine_defaults(f->b.model, &o);
    o.max_draft = 8;
    o.draft = f->b.model; /* the target as its own draft: every guess is likely */
    SO_OK_OR_FAIL(so_engine_create(f->b.model, f->b.tok, &o, &f->e, &err), err);
    free(path);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_engine_free(f->e);
    so_bundle_close(&f->b);
    so_test_tmp_free(f->dir);
    free(f);
    return 0;
}

static const int32_t PROMPT[] = {1, 5, 6, 5};

static so_request_opts request(const fixture *f, float temp, uint64_t seed) {
    so_request_opts o = {.prompt = PROMPT,
                         .n_prompt = SO_LEN(PROMPT),
                         .sample = f->b.sample,
                         .max_tokens = N_PREDICT,
                         .ignore_end = true};
    o.sample.temp = temp;
    o.sample.seed = seed;
    return o;
}

static void run(const fixture *f, const so_request_opts *o, so_tokens *out, so_finish *why) {
    so_request *r = so_case_finish(f->e, o);
    int n;
    const int32_t *ids = so_request_output(r, &n);
    out->len = 0;
    so_tokens_append(out, ids, (size_t)n);
    *why = so_request_finish(r);
    assert_int_equal(so_request_error(r)->code, SO_OK);
    so_request_free(r);
}

/* Plain decoding into *plain; every drafter and length must give the same tokens. */
static void check_same(const fixture *f, so_request_opts o, so_tokens *plain, so_finish *why) {
    static const so_spec_opts SPECS[] = {
        {.drafter = "ngram", .length = 4},       {.drafter = "lookup,ngram"},
        {.drafter = "random", .length = 3},      {.drafter = "model", .length = 1},
        {.drafter = "model", .length = 8},       {.drafter = "model+ngram", .length = 4},
        {.drafter = "oracle(0.7)", .length = 4}, {.drafter = "predict", .length = 8},
    };
    so_tokens got = {0};
    so_finish got_why;
    so_tokens free_text = {0};
    so_request_opts unrestricted = request(f, o.sample.temp, o.sample.seed);
    run(f, &unrestricted, &free_text, &got_why);
    o.spec = (so_spec_opts){0};
    run(f, &o, plain, why);
    for (size_t i = 0; i < SO_LEN(SPECS); i++) {
        o.spec = SPECS[i];
        o.spec.expected = free_text.ids; /* guesses that break the rules */
        o.spec.n_expected = (int)free_text.len;
        run(f, &o, &got, &got_why);
        if (got.len != plain->len || memcmp(got.ids, plain->ids, got.len * sizeof *got.ids) != 0)
            fail_msg("%s, length %d: not the plain text", SPECS[i].drafter, SPECS[i].length);
        assert_int_equal(got_why, *why);
    }
    so_tokens_free(&got);
    so_tokens_free(&free_text);
}

static int find(const so_tokens *t, int32_t id) {
    for (size_t i = 0; i < t->len; i++)
        if (t->ids[i] == id)
            return (int)i;
    return -1;
}

static void test_stop_tokens(void **state) {
    const fixture *f = *state;
    so_tokens free_text = {0}, got = {0};
    so_finish why;
    for (int seed = 0; seed < 4; seed++) {
        so_request_opts o = request(f, seed ? 0.9f : 0, (uint64_t)seed);
        run(f, &o, &free_text, &why);
        int32_t stops[] = {free_text.ids[12], free_text.ids[20]};
        o.stop_tokens = stops;
        o.n_stop_tokens = 2;
        check_same(f, o, &got, &why);
        int a = find(&free_text, stops[0]), b = find(&free_text, stops[1]);
        assert_int_equal(why, SO_FINISH_STOP);
        assert_int_equal(got.len, SO_MIN(a, b));
        assert_memory_equal(got.ids, free_text.ids, got.len * sizeof *got.ids);
    }
    so_tokens_free(&free_text);
    so_tokens_free(&got);
}

static void test_min_tokens(void **state) {
    const fixture *f = *state;
    so_tokens free_text = {0}, got = {0};
    so_finish why;
    for (int seed = 0; seed < 4; seed++) {
        so_request_opts o = request(f, seed ? 0.9f : 0, (uint64_t)seed);
        run(f, &o, &free_text, &why);
        o.stop_tokens = free_text.ids; /* all of these would end it before its fifth token */
        o.n_stop_tokens = 4;
        o.min_tokens = 17;
        check_same(f, o, &got, &why);
        assert_true(got.len >= 17);
        for (int i = 0; i < o.n_stop_tokens; i++)
            assert_int_equal(find(&got, o.stop_tokens[i]), -1);
        o.stop_tokens = NULL;
        o.n_stop_tokens = 0;
        o.ignore_end = false; /* the model's own end token */
        o.sample.temp = 3;
        check_same(f, o, &got, &why);
        assert_true(got.len >= 17);
    }
    so_tokens_free(&free_text);
    so_tokens_free(&got);
}

static void test_min_tokens_and_stop_strings(void **state) {
    const fixture *f = *state;
    so_tokens free_text = {0}, got = {0};
    so_finish why;
    so_request_opts o = request(f, 0, 1);
    run(f, &o, &free_text, &why);
    so_str stop = so_tokenizer_text(f->b.tok, free_text.ids[3]);
    o.stops = &stop;
    o.n_stops = 1;
    run(f, &o, &got, &why);
    assert_int_equal(why, SO_FINISH_STOP);
    assert_true(got.len <= 4);
    o.min_tokens = 9;
    check_same(f, o, &got, &why);
    assert_true(got.len > 9 || why == SO_FINISH_LENGTH);
    so_tokens_free(&free_text);
    so_tokens_free(&got);
}

static bool contains(const so_tokens *t, const so_tokens *word) {
    for (size_t i = 0; i + word->len <= t->len; i++)
        if (memcmp(t->ids + i, word->ids, word->len * sizeof *word->ids) == 0)
            return true;
    return false;
}

static void test_bad_words(void **state) {
    const fixture *f = *state;
    so_tokens free_text = {0}, got = {0};
    so_finish why;
    for (int seed = 0; seed < 4; seed++) {
        so_request_opts o = request(f, seed ? 0.9f : 0, (uint64_t)seed);
        run(f, &o, &free_text, &why);
        so_tokens words[] = {{free_text.ids + 2, 1, 1},
                             {free_text.ids + 7, 2, 2},
                             {free_text.ids + 15, 3, 3},
                             {free_text.ids + 1, 2, 2}};
        o.bad_words = words;
        o.n_bad_words = SO_LEN(words);
        check_same(f, o, &got, &why);
        assert_int_equal(got.len, N_PREDICT);
        for (int i = 0; i < o.n_bad_words; i++) {
            assert_true(contains(&free_text, &words[i]));
            assert_false(contains(&got, &words[i]));
        }
        /* the first token of a word of two is allowed, at the end of the prompt as well */
        int32_t pair[] = {PROMPT[3], free_text.ids[0]};
        so_tokens across = {pair, 2, 2};
        o.bad_words = &across;
        o.n_bad_words = 1;
        check_same(f, o, &got, &why);
        assert_int_equal(got.ids[0], free_text.ids[0]);
    }
    so_tokens_free(&free_text);
    so_tokens_free(&got);
}

/* `reject` and `lenient` test guesses against the restricted row: the rules hold for every seed,
 * and at temperature 0 `reject` gives the plain text. */
static void test_reject_obeys(void **state) {
    const fixture *f = *state;
    so_tokens free_text = {0}, plain = {0}, got = {0};
    so_finish why;
    for (int seed = 0; seed < 30; seed++) {
        so_request_opts o = request(f, seed ? 1.5f : 0, (uint64_t)seed);
        run(f, &o, &free_text, &why);
        so_tokens words[] = {{free_text.ids + 2, 1, 1}, {free_text.ids + 7, 2, 2}};
        o.bad_words = words;
        o.n_bad_words = SO_LEN(words);
        o.stop_tokens = free_text.ids + 4;
        o.n_stop_tokens = 3;
        o.min_tokens = 20;
        run(f, &o, &plain, &why);
        o.spec = (so_spec_opts){.drafter = seed % 2 ? "model" : "ngram(draw)",
                                .length = 4,
                                .verify = seed % 3 < 2 ? SO_VERIFY_REJECT : SO_VERIFY_LENIENT,
                                .lenience = 0.5};
        run(f, &o, &got, &why);
        assert_true(got.len >= 20);
        assert_false(contains(&got, &words[0]) || contains(&got, &words[1]));
        for (int i = 0; i < o.n_stop_tokens; i++)
            assert_int_equal(find(&got, o.stop_tokens[i]), -1);
        if (seed == 0) {
            assert_int_equal(got.len, plain.len);
            assert_memory_equal(got.ids, plain.ids, got.len * sizeof *got.ids);
        }
    }
    so_tokens_free(&free_text);
    so_tokens_free(&plain);
    so_tokens_free(&got);
}

/* Requests that differ in a restriction alone have different random numbers (nonce.c). */
static void test_nonces_differ(void **state) {
    const fixture *f = *state;
    int32_t stop = 7;
    so_tokens word = {&stop, 1, 1};
    uint64_t nonces[4];
    for (int i = 0; i < 4; i++) {
        so_request_opts o = request(f, 1, 5);
        o.max_tokens = 4;
        o.spec = (so_spec_opts){.drafter = "ngram(draw)", .length = 2, .verify = SO_VERIFY_REJECT};
        o.min_tokens = i == 1 ? 2 : 0;
        o.stop_tokens = &stop;
        o.n_stop_tokens = i == 2;
        o.bad_words = &word;
        o.n_bad_words = i == 3;
        so_request *r = so_case_finish(f->e, &o);
        assert_true(so_request_nonce(r, &nonces[i]));
        so_request_free(r);
        for (int k = 0; k < i; k++)
            assert_true(nonces[k] != nonces[i]);
    }
}

static void expect_refusal(const fixture *f, const so_request_opts *o, const char *part) {
    so_err err = {0};
    so_request *r = NULL;
    assert_true(so_engine_submit(f->e, o, &r, &err) < 0);
    assert_null(r);
    if (!strstr(err.msg, part))
        fail_msg("'%s' does not mention '%s'", err.msg, part);
}

static void test_refusals(void **state) {
    const fixture *f = *state;
    so_request_opts o = request(f, 0, 0);
    int32_t id = 1 << 30;
    so_tokens word = {&id, 1, 1};
    o.min_tokens = -1;
    expect_refusal(f, &o, "min_tokens");
    o.min_tokens = 0;
    o.stop_tokens = &id;
    o.n_stop_tokens = 1;
    expect_refusal(f, &o, "stop token");
    o.n_stop_tokens = 0;
    o.bad_words = &word;
    o.n_bad_words = 1;
    expect_refusal(f, &o, "bad word 1");
    word.len = 0;
    expect_refusal(f, &o, "empty");
}

/* A rate needs tokens after the first round; the time to the first token is told apart from it. */
static void test_rates(void **state) {
    const fixture *f = *state;
    so_request_stats sum = {0};
    for (int n = 0; n < 4; n++) {
        so_request_opts o = request(f, 0, 0);
        o.max_tokens = n;
        so_request *r = so_case_finish(f->e, &o);
        const so_request_stats *s = so_request_get_stats(r);
        double rate = so_stats_rates(s).tokens_per_second;
        assert_int_equal(s->first_n, n > 0);
        if (n < 2)
            assert_true(rate < 0);
        else
            assert_true(rate == 1000.0 * (n - 1) / s->predicted_ms);
        json_t *t = so_figures_timings(s);
        assert_true(json_is_null(json_object_get(t, "predicted_per_second")) == (n < 2));
        assert_true(json_is_null(json_object_get(t, "ttft_ms")) == (n == 0));
        json_decref(t);
        so_stats_add(&sum, s);
        if (n > 0)
            assert_true(sum.ttft_ms > 0 && sum.ttft_ms <= s->ttft_ms);
        so_request_free(r);
    }
    /* all tokens in one speculative round */
    int32_t expected[3];
    so_tokens free_text = {0};
    so_finish why;
    so_request_opts o = request(f, 0, 0);
    run(f, &o, &free_text, &why);
    memcpy(expected, free_text.ids, sizeof expected);
    o.max_tokens = 3;
    o.spec =
        (so_spec_opts){.drafter = "predict", .length = 4, .expected = expected, .n_expected = 3};
    so_request *r = so_case_finish(f->e, &o);
    assert_int_equal(so_request_get_stats(r)->predicted_n, 3);
    assert_int_equal(so_request_get_stats(r)->rounds, 1);
    assert_true(so_stats_rates(so_request_get_stats(r)).tokens_per_second < 0);
    so_request_free(r);
    so_tokens_free(&free_text);
}

/* A long spec is reported whole. */
static void test_label_is_whole(void **state) {
    const fixture *f = *state;
    so_buf spec = {0};
    for (int i = 1; i <= 12; i++)
        so_buf_printf(&spec, "%slookup(min=%d)", i > 1 ? "," : "", i + 10);
    so_request_opts o = request(f, 0, 0);
    o.max_tokens = 2;
    o.spec = (so_spec_opts){.drafter = spec.data, .length = 2};
    so_request *r = so_case_finish(f->e, &o);
    so_spec_label label = so_figures_label(r);
    assert_string_equal(label.drafter, so_request_drafter(r));
    assert_string_equal(label.drafter, spec.data);
    so_request_free(r);
    so_buf_free(&spec);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stop_tokens),
        cmocka_unit_test(test_min_tokens),
        cmocka_unit_test(test_min_tokens_and_stop_strings),
        cmocka_unit_test(test_bad_words),
        cmocka_unit_test(test_reject_obeys),
        cmocka_unit_test(test_nonces_differ),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_rates),
        cmocka_unit_test(test_label_is_whole),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
