/* The engine on tiny models: a request has the same tokens as in a plain loop, regardless of other
 * requests; and all endings of a request. The plain loop is written here with pass and sampler. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "so_rig.h"

enum { N_PREDICT = 24, N_CASES = 6, MAX_PROMPT = 90 };

typedef struct request_case {
    int32_t prompt[MAX_PROMPT];
    int n_prompt;
    so_sample_params sample;
    int32_t want[N_PREDICT];
} request_case;

static const char *model_path(const char *name) {
    static char path[4096];
    snprintf(path, sizeof path, "golden/models/%s", name);
    const char *full = so_test_data(path);
    memmove(path, full, strlen(full) + 1);
    return path;
}

static void make_case(int c, int n_vocab, request_case *out) {
    static const so_bias bias[] = {{3, -INFINITY}, {7, 1.5f}};
    static const int lengths[N_CASES] = {1, 5, 33, 64, MAX_PROMPT, 20};
    so_rng_key key = {.seed = 100 + (uint64_t)c, .purpose = SO_RNG_TEST};
    *out = (request_case){.n_prompt = lengths[c]};
    for (int i = 0; i < out->n_prompt; i++)
        out->prompt[i] = (int32_t)(so_rng_uniform(&key, (uint32_t)i) * n_vocab);
    so_sample_defaults(&out->sample);
    out->sample.temp = c % 2 ? 0 : 0.9f;
    out->sample.seed = 11 + (uint64_t)c;
    if (c >= 2) { /* all penalties, a bias, and cuts */
        out->sample.repeat_penalty = 1.2f;
        out->sample.frequency_penalty = 0.1f;
        out->sample.presence_penalty = 0.1f;
        out->sample.repeat_last_n = c == 2 ? -1 : 40;
        out->sample.top_k = c == 4 ? 20 : 0;
        out->sample.top_p = 0.9f;
        out->sample.bias = bias;
        out->sample.n_bias = 2;
    }
}

/* The plain loop: compute the text, sample from the last row, append the token. */
static void plain_loop(so_rig *r, request_case *c) {
    so_err err = {0};
    int32_t text[MAX_PROMPT + N_PREDICT];
    float *logits = SO_NEW_N(float, MAX_PROMPT * r->n_vocab);
    so_sampler *s = so_sampler_create(r->n_vocab);
    so_seq *seq = so_seq_create(r->kv);
    int n = c->n_prompt, fed = 0;
    memcpy(text, c->prompt, sizeof c->prompt);
    for (int i = 0; i < N_PREDICT; i++) {
        so_rig_chain(r, seq, text + fed, n - fed, logits);
        so_sample_context ctx = {text, n, c->n_prompt};
        SO_OK_OR_FAIL(so_sample_token(s, &c->sample, logits + (size_t)(n - fed - 1) * r->n_vocab,
                                      &ctx, &c->want[i], &err),
                      err);
        fed = n;
        text[n++] = c->want[i];
    }
    so_seq_free(seq);
    so_sampler_free(s);
    free(logits);
}

typedef struct collected {
    int32_t tokens[256];
    int n, n_ends;
    int cancel_after; /* 0: never */
} collected;

static bool collect(void *user, const so_event *ev) {
    collected *c = user;
    if (ev->token == SO_TOKEN_NONE) {
        assert_true(ev->finish != SO_FINISH_NONE);
        c->n_ends++;
        return true;
    }
    assert_int_equal(ev->finish, SO_FINISH_NONE);
    c->tokens[c->n++] = ev->token;
    return c->n != c->cancel_after;
}

static so_request_opts opts_of(const request_case *c, collected *out) {
    return (so_request_opts){.prompt = c->prompt,
                             .n_prompt = c->n_prompt,
                             .sample = c->sample,
                             .max_tokens = N_PREDICT,
                             .on_event = collect,
                             .user = out};
}

static so_engine *open_engine(const so_rig *r, int n_parallel, int n_batch, int n_pages) {
    so_engine_opts o = {.n_ctx = 128,
                        .n_parallel = n_parallel,
                        .n_batch = n_batch,
                        .n_pages = n_pages,
                        .kv_dtype = SO_DTYPE_F32};
    so_err err = {0};
    so_engine *e = NULL;
    SO_OK_OR_FAIL(so_engine_create(r->m, NULL, &o, &e, &err), err);
    return e;
}

static void run_together(so_engine *e, const request_case *cases, int n, int delay) {
    collected got[N_CASES];
    memset(got, 0, sizeof got);
    so_request *reqs[N_CASES];
    so_err err = {0};
    for (int i = 0; i < n; i++) {
        so_request_opts o = opts_of(&cases[i], &got[i]);
        SO_OK_OR_FAIL(so_engine_submit(e, &o, &reqs[i], &err), err);
        for (int k = 0; k < delay; k++) /* the next request arrives while this one runs */
            assert_true(so_engine_step(e, &err) >= 0);
    }
    int more = 1;
    while (more > 0)
        more = so_engine_step(e, &err);
    assert_int_equal(more, 0);
    for (int i = 0; i < n; i++) {
        int n_out;
        const int32_t *out = so_request_output(reqs[i], &n_out);
        assert_int_equal(so_request_finish(reqs[i]), SO_FINISH_LENGTH);
        assert_int_equal(n_out, N_PREDICT);
        assert_memory_equal(out, cases[i].want, sizeof cases[i].want);
        assert_int_equal(got[i].n, N_PREDICT);
        assert_int_equal(got[i].n_ends, 1);
        assert_memory_equal(got[i].tokens, cases[i].want, sizeof cases[i].want);
        assert_int_equal(so_request_get_stats(reqs[i])->rounds, N_PREDICT);
        so_request_free(reqs[i]);
    }
}

static void check_same_tokens(const char *model, bool deferred) {
    so_rig r;
    so_rig_open(&r, model_path(model), &(so_rig_opts){.level = SO_CPU_AUTO, .deferred = deferred});
    static request_case cases[N_CASES];
    for (int c = 0; c < N_CASES; c++) {
        make_case(c, r.n_vocab, &cases[c]);
        plain_loop(&r, &cases[c]);
    }
    static const struct {
        int n_parallel, n_batch, n_pages, delay;
    } variants[] = {
        {1, 256, 0, 0}, {1, 1, 0, 0}, {1, 7, 0, 0}, {6, 256, 0, 0}, {6, 5, 0, 0},
        {3, 64, 0, 2},  {6, 3, 0, 3}, {6, 32, 5, 0} /* pages for one or two requests */};
    for (size_t w = 0; w < SO_LEN(variants); w++) {
        so_engine *e =
            open_engine(&r, variants[w].n_parallel, variants[w].n_batch, variants[w].n_pages);
        run_together(e, cases, N_CASES, variants[w].delay);
        so_engine_free(e);
    }
    so_rig_close(&r);
}

static void test_same_tokens_alone_and_together(void **state) {
    (void)state;
    check_same_tokens("llama", false);
}

static void test_same_tokens_sliding_window(void **state) {
    (void)state;
    check_same_tokens("gemma3", false);
}

static void test_same_tokens_deferred(void **state) {
    (void)state;
    check_same_tokens("qwen2", true);
}

/* --- endings --- */

typedef struct fixture {
    so_rig r;
    request_case c;
} fixture;

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_rig_open(&f->r, model_path("llama"), &(so_rig_opts){.level = SO_CPU_AUTO});
    make_case(1, f->r.n_vocab, &f->c);
    plain_loop(&f->r, &f->c);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_rig_close(&f->r);
    free(f);
    return 0;
}

static void test_ends_at_context(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->r, 1, 256, 0);
    collected got = {0};
    so_request_opts o = opts_of(&f->c, &got);
    so_request *r;
    so_err err = {0};
    o.max_tokens = -1;
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    SO_OK_OR_FAIL(so_engine_run(e, r, &err), err);
    assert_int_equal(so_request_finish(r), SO_FINISH_LENGTH);
    assert_int_equal(got.n, 128 - f->c.n_prompt);
    assert_memory_equal(got.tokens, f->c.want, sizeof f->c.want);
    so_request_free(r);
    so_engine_free(e);
}

static void test_zero_tokens(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->r, 1, 2, 0);
    collected got = {0};
    so_request_opts o = opts_of(&f->c, &got);
    so_request *r;
    so_err err = {0};
    o.max_tokens = 0;
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    SO_OK_OR_FAIL(so_engine_run(e, r, &err), err);
    assert_int_equal(so_request_finish(r), SO_FINISH_LENGTH);
    assert_int_equal(got.n, 0);
    so_request_free(r);
    so_engine_free(e);
}

static void test_cancel(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->r, 1, 256, 0);
    collected got[3] = {{.cancel_after = 4}, {.n = 0}, {.n = 0}};
    so_request *r[3];
    so_err err = {0};
    for (int i = 0; i < 3; i++) {
        so_request_opts o = opts_of(&f->c, &got[i]);
        SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[i], &err), err);
    }
    so_request_cancel(r[1]); /* while it is queued */
    SO_OK_OR_FAIL(so_engine_run(e, r[0], &err), err);
    assert_int_equal(so_request_finish(r[0]), SO_FINISH_CANCELLED);
    assert_int_equal(got[0].n, 4);
    assert_int_equal(so_request_finish(r[1]), SO_FINISH_CANCELLED);
    assert_int_equal(got[1].n, 0);
    assert_int_equal(got[1].n_ends, 1);
    SO_OK_OR_FAIL(so_engine_run(e, r[2], &err), err);
    assert_memory_equal(got[2].tokens, f->c.want, sizeof f->c.want);
    so_request_free(r[0]);
    so_request_free(r[1]);
    so_request_free(r[2]);
    so_engine_free(e);
}

static void test_free_while_running(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->r, 2, 256, 0);
    collected got[2];
    memset(got, 0, sizeof got);
    so_request *r[2];
    so_err err = {0};
    for (int i = 0; i < 2; i++) {
        so_request_opts o = opts_of(&f->c, &got[i]);
        SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[i], &err), err);
    }
    assert_int_equal(so_engine_step(e, &err), 1);
    so_request_free(r[0]);
    SO_OK_OR_FAIL(so_engine_run(e, r[1], &err), err);
    assert_memory_equal(got[1].tokens, f->c.want, sizeof f->c.want);
    so_request_free(r[1]);
    so_engine_free(e);
}

static void test_request_error_leaves_others_running(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->r, 2, 256, 0);
    collected got[2];
    memset(got, 0, sizeof got);
    so_request *r[2];
    so_err err = {0};
    so_bias *ban = SO_NEW_N(so_bias, f->r.n_vocab);
    for (int i = 0; i < f->r.n_vocab; i++)
        ban[i] = (so_bias){i, -INFINITY};
    so_request_opts o = opts_of(&f->c, &got[0]);
    o.sample.bias = ban;
    o.sample.n_bias = f->r.n_vocab;
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[0], &err), err);
    o = opts_of(&f->c, &got[1]);
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[1], &err), err);
    SO_OK_OR_FAIL(so_engine_run(e, r[1], &err), err);
    assert_int_equal(so_request_finish(r[0]), SO_FINISH_ERROR);
    assert_int_equal(so_request_error(r[0])->code, SO_EINVAL);
    assert_memory_equal(got[1].tokens, f->c.want, sizeof f->c.want);
    so_request_free(r[0]);
    so_request_free(r[1]);
    so_engine_free(e);
    free(ban);
}

static void expect_refusal(so_engine *e, const so_request_opts *o, int code, const char *part) {
    so_err err = {0};
    so_request *r = NULL;
    assert_int_equal(so_engine_submit(e, o, &r, &err), code);
    assert_null(r);
    if (!strstr(err.msg, part))
        fail_msg("'%s' does not say '%s'", err.msg, part);
}

static void test_submission_is_checked(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->r, 1, 256, 0), *small = open_engine(&f->r, 1, 256, 1);
    collected got = {0};
    so_request_opts o = opts_of(&f->c, &got), good = o;
    static int32_t longer[128];
    o.prompt = longer;
    o.n_prompt = 128;
    expect_refusal(e, &o, SO_ELIMIT, "128 tokens, the context 128");
    expect_refusal(e, &o, SO_ELIMIT, "--ctx-size");
    o.n_prompt = 0;
    expect_refusal(e, &o, SO_EINVAL, "empty");
    int32_t outside = f->r.n_vocab;
    o.prompt = &outside;
    o.n_prompt = 1;
    expect_refusal(e, &o, SO_ERANGE, "vocabulary");
    o = good;
    o.max_tokens = -2;
    expect_refusal(e, &o, SO_ERANGE, "--predict -2");
    o = good;
    o.sample.top_p = 2;
    expect_refusal(e, &o, SO_ERANGE, "--top-p");
    o = good;
    o.stops = &(so_str){"", 0};
    o.n_stops = 1;
    expect_refusal(e, &o, SO_EINVAL, "stop string 1");
    o = good;
    o.max_tokens = 60;
    expect_refusal(small, &o, SO_ELIMIT, "cache pages");
    so_engine_free(e);
    so_engine_free(small);
}

static void test_options_are_checked(void **state) {
    fixture *f = *state;
    so_err err = {0};
    so_engine *e = NULL;
    so_engine_opts o;
    so_engine_defaults(f->r.m, &o);
    int max_ctx = so_model_hparams(f->r.m)->n_ctx_train;
    o.n_ctx = max_ctx + 1;
    assert_int_equal(so_engine_create(f->r.m, NULL, &o, &e, &err), SO_ERANGE);
    assert_non_null(strstr(err.msg, "--ctx-size"));
    o.n_ctx = max_ctx;
    o.n_parallel = 0;
    assert_int_equal(so_engine_create(f->r.m, NULL, &o, &e, &err), SO_ERANGE);
    assert_null(e);
}

int main(void) {
#define WITH_FIXTURE(t) cmocka_unit_test_setup_teardown(t, open_fixture, close_fixture)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_tokens_alone_and_together),
        cmocka_unit_test(test_same_tokens_sliding_window),
        cmocka_unit_test(test_same_tokens_deferred),
        WITH_FIXTURE(test_ends_at_context),
        WITH_FIXTURE(test_zero_tokens),
        WITH_FIXTURE(test_cancel),
        WITH_FIXTURE(test_free_while_running),
        WITH_FIXTURE(test_request_error_leaves_others_running),
        WITH_FIXTURE(test_submission_is_checked),
        WITH_FIXTURE(test_options_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
