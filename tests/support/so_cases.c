/* Cases for tests of speculation; see so_cases.h. Prompts repeat themselves, so that tables have
 * something to find. */
#include "so_cases.h"

#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "so_test.h"

void so_case_model(so_rig *r, const char *name) {
    char path[512];
    snprintf(path, sizeof path, "golden/models/%s", name);
    so_rig_open(r, so_test_data(path),
                &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 4});
}

void so_case_make(int c, int n_vocab, so_case *out) {
    static const so_bias bias[] = {{3, -INFINITY}, {7, 1.5f}};
    so_rng_key key = {.seed = 100 + (uint64_t)c, .purpose = SO_RNG_TEST};
    *out = (so_case){.n_prompt = 8 + 7 * c};
    for (int i = 0; i < out->n_prompt; i++)
        out->prompt[i] = (int32_t)(so_rng_uniform(&key, (uint32_t)(i % 9)) * n_vocab);
    so_sample_defaults(&out->sample);
    out->sample.temp = c % 2 ? 0 : c == 4 ? 0.3f : 0.9f;
    out->sample.seed = 11 + (uint64_t)c;
    if (c >= 2 && c < 5) { /* every penalty, a bias, and cuts */
        out->sample.repeat_penalty = 1.2f;
        out->sample.frequency_penalty = 0.1f;
        out->sample.presence_penalty = 0.1f;
        out->sample.repeat_last_n = c == 2 ? -1 : 20;
        out->sample.top_k = c == 4 ? 20 : 0;
        out->sample.top_p = 0.9f;
        out->sample.bias = bias;
        out->sample.n_bias = 2;
    }
}

so_engine *so_case_engine(const so_rig *target, const so_case_engine_opts *o) {
    so_engine_opts eo = {.n_ctx = o->n_ctx ? o->n_ctx : SO_CASE_CTX,
                         .n_parallel = o->n_parallel,
                         .n_pages = o->n_pages,
                         .n_batch = o->n_batch,
                         .kv_dtype = SO_DTYPE_F32,
                         .max_draft = 16,
                         .draft = o->draft ? o->draft->m : NULL,
                         .draft_temp = o->draft_temp,
                         .user_drafter = o->drafter,
                         .user_tree_drafter = o->tree_drafter,
                         .drafter_user = o->drafter_user,
                         .async_faults = o->async_faults,
                         .worker_key = o->worker_key,
                         .on_step = o->on_step,
                         .step_user = o->step_user};
    so_err err = {0};
    so_engine *e = NULL;
    SO_OK_OR_FAIL(so_engine_create(target->m, NULL, &eo, &e, &err), err);
    return e;
}

so_request_opts so_case_opts(const so_case *c, const so_spec_opts *spec) {
    so_request_opts o = {.prompt = c->prompt,
                         .n_prompt = c->n_prompt,
                         .sample = c->sample,
                         .max_tokens = SO_CASE_PREDICT,
                         .n_logprobs = c->n_logprobs,
                         .spec = *spec};
    if (o.spec.drafter && !o.spec.expected) {
        o.spec.expected = c->want;
        o.spec.n_expected = c->n_want;
    }
    return o;
}

static so_request *submit(so_engine *e, const so_request_opts *o) {
    so_err err = {0};
    so_request *r = NULL;
    SO_OK_OR_FAIL(so_engine_submit(e, o, &r, &err), err);
    return r;
}

so_request *so_case_submit(so_engine *e, const so_case *c, const so_spec_opts *spec) {
    so_request_opts o = so_case_opts(c, spec);
    return submit(e, &o);
}

so_request *so_case_finish(so_engine *e, const so_request_opts *o) {
    so_request *r = submit(e, o);
    so_case_run(e);
    return r;
}

void so_case_run(so_engine *e) {
    so_err err = {0};
    int more = 1;
    while (more > 0)
        more = so_engine_step(e, &err);
    if (more < 0)
        fail_msg("step: %s", err.msg);
}

void so_case_open(so_rig *target, const char *target_name, so_rig *draft, const char *draft_name,
                  so_case cases[SO_CASES]) {
    so_case_model(target, target_name);
    so_case_model(draft, draft_name);
    for (int c = 0; c < SO_CASES; c++)
        so_case_make(c, target->n_vocab, &cases[c]);
    so_case_plain(target, cases, SO_CASES);
}

void so_case_plain(const so_rig *target, so_case *cases, int n) {
    so_engine *e = so_case_engine(
        target, &(so_case_engine_opts){.n_parallel = 1, .n_batch = 64, .draft_temp = -1});
    for (int c = 0; c < n; c++) {
        so_request *r = so_case_submit(e, &cases[c], &(so_spec_opts){0});
        so_case_run(e);
        const int32_t *out = so_request_output(r, &cases[c].n_want);
        assert_int_equal(cases[c].n_want, SO_CASE_PREDICT);
        assert_int_equal(so_request_get_stats(r)->rounds, SO_CASE_PREDICT);
        memcpy(cases[c].want, out, sizeof cases[c].want);
        so_request_free(r);
    }
    so_engine_free(e);
}

void so_case_expect(const so_request *r, const int32_t *want, int n) {
    int n_out;
    const int32_t *out = so_request_output(r, &n_out);
    assert_int_equal(n_out, n);
    assert_memory_equal(out, want, (size_t)n * sizeof *out);
}

bool so_case_same(const so_request *r, const so_case *c) {
    int n;
    const int32_t *out = so_request_output(r, &n);
    return so_request_finish(r) == SO_FINISH_LENGTH && n == c->n_want &&
           memcmp(out, c->want, (size_t)n * sizeof *out) == 0;
}

void so_case_perfect(const so_rig *target, const so_rig *draft, const so_case *c,
                     so_verify_mode verify, const char *drafter, int length) {
    so_engine *e = so_case_engine(
        target,
        &(so_case_engine_opts){.draft = draft, .n_parallel = 1, .n_batch = 64, .draft_temp = -1});
    so_spec_opts spec = {.drafter = drafter, .length = length, .verify = verify};
    so_request *r = so_case_submit(e, c, &spec);
    so_case_run(e);
    const so_request_stats *s = so_request_get_stats(r);
    assert_int_equal(s->predicted_n, SO_CASE_PREDICT);
    assert_int_equal(s->draft_n, s->draft_n_accepted);
    assert_int_equal(s->rounds, (SO_CASE_PREDICT + length) / (length + 1));
    for (int k = 0; k < SO_STATS_DEPTHS; k++)
        assert_int_equal(s->per_depth[k].tested, s->per_depth[k].accepted);
    assert_true(s->per_depth[SO_MIN(length, SO_CASE_PREDICT - 1) - 1].tested > 0);
    if (verify == SO_VERIFY_MATCH || c->sample.temp == 0)
        assert_true(so_case_same(r, c));
    so_request_free(r);
    so_engine_free(e);
}
