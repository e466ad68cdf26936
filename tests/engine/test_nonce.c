/* The nonce of requests with `reject`: which requests have one, when it is hashed from the request
 * and from which inputs, and that a replay gives the same text. `match`, greedy and plain requests
 * do not depend on it. test_seed_reuse.c tests that it makes reused seeds exact. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "draft/table.h"
#include "so_cases.h"
#include "so_shape.h"

enum { N_VOCAB = 40, N_CTX = 96, N_PROMPT = 10, N_PREDICT = 12 };

typedef struct fixture {
    so_rig target, draft, hidden_draft; /* hidden_draft reads the target's hidden states */
    int32_t prompt[N_PROMPT];
    char *dir;
} fixture;

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = N_VOCAB, .n_ctx = N_CTX, .seed = 3};
    so_rig_opts o = {.max_rows = 8, .n_pages = 4};
    so_shape_open(&f->target, &shape, &o);
    so_shape_tokens(&shape, 9, f->prompt, N_PROMPT);
    shape.n_layers = 1;
    shape.seed = 4;
    so_shape_open(&f->draft, &shape, &o);
    shape.d_state = shape.d_model;
    o.model.draft = true;
    so_shape_open(&f->hidden_draft, &shape, &o);
    f->dir = so_test_tmp();
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_rig_close(&f->target);
    so_rig_close(&f->draft);
    so_rig_close(&f->hidden_draft);
    so_test_tmp_free(f->dir);
    free(f);
    return 0;
}

static int guess_nothing(void *user, const int32_t *tokens, int n, int n_prompt, int32_t *out,
                         int max) {
    (void)user;
    (void)tokens;
    (void)n;
    (void)n_prompt;
    (void)out;
    (void)max;
    return 0;
}

static so_engine_opts engine_opts(const fixture *f) {
    return (so_engine_opts){.n_ctx = N_CTX,
                            .n_parallel = 1,
                            .n_batch = 16,
                            .kv_dtype = SO_DTYPE_F32,
                            .prefix_cache = true,
                            .max_draft = 16,
                            .draft = f->draft.m,
                            .draft_id = 77,
                            .draft_temp = -1,
                            .user_drafter = guess_nothing};
}

static so_engine *open_engine(const fixture *f, const so_engine_opts *o) {
    so_err err = {0};
    so_engine *e = NULL;
    SO_OK_OR_FAIL(so_engine_create(f->target.m, NULL, o, &e, &err), err);
    return e;
}

static so_request_opts request_opts(const fixture *f, const char *drafter, int length) {
    so_request_opts o = {
        .prompt = f->prompt,
        .n_prompt = N_PROMPT,
        .max_tokens = N_PREDICT,
        .spec = {.drafter = drafter, .length = length, .verify = SO_VERIFY_REJECT}};
    so_sample_defaults(&o.sample);
    o.sample.temp = 1.2f;
    o.sample.seed = 5;
    return o;
}

static bool nonce_of(so_engine *e, const so_request_opts *o, uint64_t *out) {
    so_err err = {0};
    so_request *r = NULL;
    SO_OK_OR_FAIL(so_engine_submit(e, o, &r, &err), err);
    assert_int_equal(so_request_seed(r), o->sample.seed); /* the seed as given, not the key */
    bool has = so_request_nonce(r, out);
    so_request_free(r);
    return has;
}

static uint64_t nonce_or_fail(so_engine *e, const so_request_opts *o) {
    uint64_t nonce = 0;
    assert_true(nonce_of(e, o, &nonce));
    return nonce;
}

/* --- when it is hashed --- */

/* True if two equal requests have the same nonce. */
static bool is_hashed(const fixture *f, const so_engine_opts *eo, const char *drafter, int length) {
    so_engine *e = open_engine(f, eo);
    so_request_opts o = request_opts(f, drafter, length);
    uint64_t a = nonce_or_fail(e, &o), b = nonce_or_fail(e, &o);
    assert_true(a > 0 && a < (uint64_t)1 << 53 && b > 0 && b < (uint64_t)1 << 53);
    so_engine_free(e);
    return a == b;
}

static void test_when_the_nonce_is_hashed(void **state) {
    const fixture *f = *state;
    static const struct {
        const char *drafter;
        int length;
        bool hashed;
    } cases[] = {{"model", 4, true},          {"model", 0, false}, /* learned lengths */
                 {"auto", 4, true},           {"lookup,ngram(draw),model", 4, true},
                 {"predict", 4, true},        {"random+model(ngram)", 4, true},
                 {"ngram", 0, false},         {"corpus", 4, false}, /* reads other texts */
                 {"lookup,corpus", 4, false}, {"model(corpus)", 4, false},
                 {"user", 4, false}}; /* may read anything */
    so_engine_opts eo = engine_opts(f);
    for (size_t i = 0; i < SO_LEN(cases); i++)
        if (is_hashed(f, &eo, cases[i].drafter, cases[i].length) != cases[i].hashed)
            fail_msg("%s, length %d: hashed is not %d", cases[i].drafter, cases[i].length,
                     cases[i].hashed);
    eo.draft = f->hidden_draft.m; /* cached pages depend on other requests' hidden states */
    assert_false(is_hashed(f, &eo, "model", 4));
    assert_true(is_hashed(f, &eo, "ngram", 4));
}

/* Hashed only if other requests can never cost a guess, by pages or by the guesses of one pass. */
static void test_neighbours(void **state) {
    const fixture *f = *state;
    so_engine_opts eo = engine_opts(f);
    eo.n_pages = 2; /* a single request shares no pages */
    assert_true(is_hashed(f, &eo, "model", 4));
    eo.n_parallel = 3;
    eo.n_pages = 8; /* three requests may need nine */
    assert_false(is_hashed(f, &eo, "model", 4));
    eo.n_pages = 9;
    assert_true(is_hashed(f, &eo, "model", 4));
    eo.n_pages = 0;
    assert_true(is_hashed(f, &eo, "model", 16));
    assert_true(is_hashed(f, &eo, "random+model", 16)); /* 32 nodes for each request */
    eo.kv_layout = SO_KV_SLOTTED;
    eo.n_pages = 6; /* two slots */
    assert_true(is_hashed(f, &eo, "model", 4));
}

/* Beams may take the pages of guesses, so a request that comes beside them has a random nonce, and they wait for
 * requests with a hashed one. */
static void test_beams(void **state) {
    const fixture *f = *state;
    so_err err = {0};
    so_engine_opts eo = engine_opts(f);
    eo.n_parallel = 2;
    so_engine *e = open_engine(f, &eo);
    so_request_opts sampled = request_opts(f, "model", 4), wide = sampled;
    wide.spec = (so_spec_opts){0};
    wide.sample.temp = 0;
    so_beam_opts_defaults(&wide.beams);
    wide.beams.width = 8;
    so_request *first = NULL, *beams = NULL;
    SO_OK_OR_FAIL(so_engine_submit(e, &sampled, &first, &err), err);
    SO_OK_OR_FAIL(so_engine_submit(e, &wide, &beams, &err), err);
    uint64_t hashed = 0, a = nonce_or_fail(e, &sampled), b = nonce_or_fail(e, &sampled);
    assert_true(so_request_nonce(first, &hashed));
    assert_true(a != b && a != hashed && b != hashed);
    while (so_request_finish(first) == SO_FINISH_NONE) {
        assert_true(so_engine_step(e, &err) >= 0);
        assert_true(so_request_get_stats(beams)->queue_ms == 0); /* not admitted yet */
    }
    so_case_run(e);
    assert_true(so_request_finish(beams) != SO_FINISH_ERROR);
    assert_true(so_request_get_stats(beams)->queue_ms > 0);
    so_request_free(first);
    so_request_free(beams);
    assert_true(nonce_or_fail(e, &sampled) == hashed);
    so_engine_free(e);
}

/* --- what is hashed --- */

static void count_table(const char *path, int32_t token) {
    so_table_counter *counter = NULL;
    so_table *t = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_table_counter_create(1, N_VOCAB, &counter, &err), err);
    SO_OK_OR_FAIL(so_table_counter_add(counter, (int32_t[]){1, token}, 2, &err), err);
    SO_OK_OR_FAIL(so_table_counter_finish(counter, 0, &t, &err), err);
    SO_OK_OR_FAIL(so_table_save(t, path, &err), err);
    so_table_free(t);
}

/* Each change alters one input that guesses or text depend on. */
enum { N_CHANGES = 27 };
static void change(int i, so_engine_opts *eo, so_request_opts *o) {
    static const so_bias bias[] = {{3, 1}, {3, 2}};
    static const so_str stop = SO_STR("x"), other = SO_STR("y");
    static int32_t text[N_PROMPT] = {7, 7, 7, 7, 7, 7, 7, 7, 7, 7};
    switch (i) {
    case 0:
        o->prompt = text;
        break;
    case 1:
        o->n_prompt--;
        break;
    case 2:
        o->sample.temp = 1.1f;
        break;
    case 3:
        o->sample.top_k = 5;
        break;
    case 4:
        o->sample.top_p = 0.9f;
        break;
    case 5:
        o->sample.min_p = 0.1f;
        break;
    case 6:
        o->sample.repeat_penalty = 1.1f;
        break;
    case 7:
        o->sample.presence_penalty = 0.1f;
        break;
    case 8:
        o->sample.frequency_penalty = 0.1f;
        break;
    case 9:
        o->sample.repeat_last_n = 7;
        break;
    case 10:
        o->sample.bias = &bias[0], o->sample.n_bias = 1;
        break;
    case 11:
        o->sample.bias = &bias[1], o->sample.n_bias = 1;
        break;
    case 12:
        o->max_tokens--;
        break;
    case 13:
        o->max_tokens = -1;
        break;
    case 14:
        o->ignore_end = true;
        break;
    case 15:
        o->stops = &stop, o->n_stops = 1;
        break;
    case 16:
        o->stops = &other, o->n_stops = 1;
        break;
    case 17:
        o->spec.drafter = "predict,ngram";
        break;
    case 18:
        o->spec.length = 3;
        break;
    case 19:
        o->spec.draft_max = 8;
        break;
    case 20:
        o->spec.draft_min = 2;
        break;
    case 21:
        o->spec.verify = SO_VERIFY_LENIENT, o->spec.lenience = 1;
        break;
    case 22:
        o->spec.verify = SO_VERIFY_LENIENT, o->spec.lenience = 0.5;
        break;
    case 23:
        o->spec.expected = text, o->spec.n_expected = 5;
        break;
    case 24:
        eo->draft_id = 78;
        break;
    case 25:
        eo->draft_temp = 0.5f;
        break;
    case 26:
        eo->draft_p_min = 0.2f;
        break;
    }
}

static void test_every_input_is_hashed(void **state) {
    const fixture *f = *state;
    uint64_t seen[N_CHANGES + 1];
    for (int i = -1; i < N_CHANGES; i++) {
        so_engine_opts eo = engine_opts(f);
        so_request_opts o = request_opts(f, "predict,model", 4);
        change(i, &eo, &o);
        so_engine *e = open_engine(f, &eo);
        seen[i + 1] = nonce_or_fail(e, &o);
        if (seen[i + 1] != nonce_or_fail(e, &o))
            fail_msg("change %d: not hashed", i);
        so_engine_free(e);
        for (int k = -1; k < i; k++)
            if (seen[k + 1] == seen[i + 1])
                fail_msg("changes %d and %d have one nonce", k, i);
    }
}

/* A table may have been counted from an earlier answer: its content is hashed, not its name. */
static void test_table_contents_are_hashed(void **state) {
    const fixture *f = *state;
    char *path = so_path_join(f->dir, "words.tbl"), spec[512];
    uint64_t nonce[3];
    snprintf(spec, sizeof spec, "unigram(\"%s\")", path);
    for (int i = 0; i < 3; i++) {
        count_table(path, i == 1 ? 3 : 2);
        so_engine_opts eo = engine_opts(f);
        so_engine *e = open_engine(f, &eo);
        so_request_opts o = request_opts(f, spec, 4);
        nonce[i] = nonce_or_fail(e, &o);
        so_engine_free(e);
    }
    assert_true(nonce[0] != nonce[1] && nonce[0] == nonce[2]);
    free(path);
}

/* Inputs that change no token, and inputs that are part of every key. */
static void test_inputs_that_are_not_hashed(void **state) {
    const fixture *f = *state;
    so_engine_opts eo = engine_opts(f);
    so_engine *e = open_engine(f, &eo);
    so_request_opts o = request_opts(f, "model(ngram)", 4);
    uint64_t nonce = nonce_or_fail(e, &o);
    so_engine_free(e);
    o.priority = 3;
    o.n_logprobs = 2;
    o.continues = true;
    o.sample.seed = 6;
    o.sample.choice = 1;
    eo.n_parallel = 4;
    eo.n_batch = 7;
    eo.prefix_cache = false;
    e = open_engine(f, &eo);
    assert_true(nonce_or_fail(e, &o) == nonce);
    so_engine_free(e);
}

/* --- which requests have one, and replay --- */

static void run(so_engine *e, const so_request_opts *o, int32_t out[N_PREDICT], uint64_t *nonce,
                bool *has) {
    int n;
    so_request *r = so_case_finish(e, o);
    const int32_t *text = so_request_output(r, &n);
    assert_int_equal(n, N_PREDICT);
    memcpy(out, text, N_PREDICT * sizeof *out);
    *has = so_request_nonce(r, nonce);
    so_request_free(r);
}

/* `match`, temperature 0 and no drafter: no nonce, and a given one changes nothing. */
static void test_seed_alone(void **state) {
    const fixture *f = *state;
    so_engine_opts eo = engine_opts(f);
    so_engine *e = open_engine(f, &eo);
    static const struct {
        const char *drafter;
        so_verify_mode verify;
        bool greedy;
    } cases[] = {{NULL, SO_VERIFY_MATCH, false},     {NULL, SO_VERIFY_REJECT, false},
                 {"none", SO_VERIFY_REJECT, false},  {"model", SO_VERIFY_MATCH, false},
                 {"corpus", SO_VERIFY_MATCH, false}, {"model", SO_VERIFY_REJECT, true},
                 {NULL, SO_VERIFY_MATCH, true}};
    int32_t plain[2][N_PREDICT], text[N_PREDICT];
    uint64_t nonce;
    bool has;
    for (int greedy = 0; greedy < 2; greedy++) {
        so_request_opts o = request_opts(f, NULL, 0);
        o.sample.temp = greedy ? 0 : o.sample.temp;
        run(e, &o, plain[greedy], &nonce, &has);
    }
    for (size_t i = 0; i < 2 * SO_LEN(cases); i++) {
        so_request_opts o = request_opts(f, cases[i / 2].drafter, 0);
        o.spec.verify = cases[i / 2].verify;
        o.sample.temp = cases[i / 2].greedy ? 0 : o.sample.temp;
        o.has_nonce = i % 2;
        o.nonce = 123;
        run(e, &o, text, &nonce, &has);
        assert_false(has);
        assert_memory_equal(text, plain[cases[i / 2].greedy], sizeof text);
    }
    so_engine_free(e);
}

/* With fixed lengths a replay with the reported nonce gives the same text, on another engine and
 * beside other requests too; another nonce gives another text. */
static void test_replay(void **state) {
    const fixture *f = *state;
    static const char *const drafters[] = {"model", "lookup,model", "corpus", "random"};
    for (size_t i = 0; i < SO_LEN(drafters); i++) {
        so_engine_opts eo = engine_opts(f);
        so_engine *e = open_engine(f, &eo);
        so_request_opts o = request_opts(f, drafters[i], 3);
        int32_t first[N_PREDICT], second[N_PREDICT], other[N_PREDICT];
        uint64_t nonce, again;
        bool has;
        run(e, &o, first, &nonce, &has);
        assert_true(has);
        so_engine_free(e);
        eo.n_parallel = 4;
        e = open_engine(f, &eo);
        o.has_nonce = true;
        o.nonce = nonce;
        run(e, &o, second, &again, &has);
        assert_true(has && again == nonce);
        assert_memory_equal(first, second, sizeof first);
        o.nonce = nonce ^ 1;
        run(e, &o, other, &again, &has);
        assert_true(again == (nonce ^ 1));
        assert_memory_not_equal(first, other, sizeof first);
        so_engine_free(e);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_when_the_nonce_is_hashed),
        cmocka_unit_test(test_neighbours),
        cmocka_unit_test(test_beams),
        cmocka_unit_test(test_every_input_is_hashed),
        cmocka_unit_test(test_table_contents_are_hashed),
        cmocka_unit_test(test_inputs_that_are_not_hashed),
        cmocka_unit_test(test_seed_alone),
        cmocka_unit_test(test_replay),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
