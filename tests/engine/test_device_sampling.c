/* Sampling on the device: on a remote backend the tokens of a request are the same whether the
 * backend samples (SO_OP_SAMPLE) or the host does, for every sampler and mode; and logits are
 * downloaded only where the device cannot decide. Runs over the deferred backend, or the one that
 * SOOTH_DEVICE names; `remote` is switched off to make the host sample. */
#include "so_test.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "so_cases.h"
#include "so_shape.h"

enum { N_VOCAB = 131, N_PREDICT = SO_CASE_PREDICT, N_CASES = 12 };

static so_rig target, draft;
static so_case cases[N_CASES];
static const so_bias BIAS[] = {{5, 2}, {9, -1}};

/* What cases[c] is: known to the device, and with cuts. */
static bool is_known(int c) { return c < 8; }
static bool has_cuts(int c) { return c >= 3 && c < 8; }

static void make_case(int c) {
    so_case *x = &cases[c];
    so_sample_params *p = &x->sample;
    x->n_prompt = 5 + 3 * c;
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 40 + (uint64_t)c, x->prompt, x->n_prompt);
    so_sample_defaults(p);
    p->seed = 77 + (uint64_t)c;
    p->choice = (uint32_t)c % 2;
    p->temp = c == 1 ? 3 : c == 2 ? 0.02f : 0.9f;
    p->top_k = c == 3 || c == 6 ? 12 : c == 7 ? 1 : 0;
    p->top_p = c == 4 || c == 6 ? 0.8f : 1;
    p->min_p = c == 5 || c == 6 ? 0.1f : 0;
    if (c == 8)
        p->frequency_penalty = 0.5f;
    if (c == 9)
        p->bias = BIAS, p->n_bias = 2;
    if (c == 10)
        x->n_logprobs = 3;
    if (c == 11) /* lenient: the others do not use the logits of a greedy request */
        p->temp = 0, p->repeat_penalty = 1.2f;
}

/* --- counting --- */

static const so_backend_vt *vt;
static so_backend_vt watched;
static int n_sample_ops, n_logits_rows, n_since_sync, fail_fetch;

static void watch_submit(so_backend *b, const so_op *op) {
    n_sample_ops += op->kind == SO_OP_SAMPLE;
    if (op->kind == SO_OP_DOWNLOAD && op->download.n_bytes % (N_VOCAB * sizeof(float)) == 0)
        n_logits_rows += (int)(op->download.n_bytes / (N_VOCAB * sizeof(float)));
    n_since_sync++;
    vt->submit(b, op);
}

static int watch_sync(so_backend *b, so_err *err) {
    bool fetch = n_since_sync == 1;
    n_since_sync = 0;
    int rc = vt->sync(b, err);
    return fetch && fail_fetch ? so_err_set(err, SO_EIO, "the fetch failed") : rc;
}

static void watch(bool remote) {
    watched = *vt;
    watched.submit = watch_submit;
    watched.sync = watch_sync;
    watched.remote = remote;
    target.b->vt = &watched;
    n_sample_ops = n_logits_rows = n_since_sync = fail_fetch = 0;
}

static void open_model(so_rig *r, uint64_t seed) {
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = N_VOCAB, .n_ctx = 128,
                      .seed = seed};
    so_shape_open(
        r, &shape,
        &(so_rig_opts){.deferred = true, .level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 4});
}

static int open_all(void **state) {
    (void)state;
    open_model(&target, 1);
    open_model(&draft, 2);
    vt = target.b->vt;
    watch(false);
    for (int c = 0; c < N_CASES; c++)
        make_case(c);
    so_case_plain(&target, cases, N_CASES);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    target.b->vt = vt;
    so_rig_close(&target);
    so_rig_close(&draft);
    return 0;
}

static so_engine *open_engine(int n_parallel) {
    return so_case_engine(
        &target, &(so_case_engine_opts){
                     .draft = &draft, .n_parallel = n_parallel, .n_batch = 64, .draft_temp = -1});
}

/* --- one request --- */

typedef struct answer {
    int32_t tokens[N_PREDICT];
    int n;
    int n_corrections; /* rounds with guesses that ended with a rejection */
} answer;

static void on_round(void *user, const so_round *r) {
    ((answer *)user)->n_corrections += r->tree->n_nodes > 1 && !r->verdict->bonus;
}

static answer run_case(const so_case *c, const so_spec_opts *spec, bool remote) {
    answer a = {0};
    watch(remote);
    so_engine *e = open_engine(1);
    so_request_opts o = so_case_opts(c, spec);
    o.has_nonce = true;
    o.nonce = 5;
    o.on_round = on_round;
    o.user = &a;
    so_request *r = so_case_finish(e, &o);
    const int32_t *out = so_request_output(r, &a.n);
    assert_int_equal(so_request_finish(r), SO_FINISH_LENGTH);
    memcpy(a.tokens, out, (size_t)a.n * sizeof *out);
    so_request_free(r);
    so_engine_free(e);
    return a;
}

static void assert_same(const answer *a, const answer *b, int c, const char *what) {
    if (a->n != b->n || memcmp(a->tokens, b->tokens, sizeof a->tokens) != 0)
        fail_msg("case %d, %s: the device's text is not the host's", c, what);
}

static void test_plain(void **state) {
    (void)state;
    for (int c = 0; c < N_CASES; c++) {
        answer host = run_case(&cases[c], &(so_spec_opts){0}, false);
        assert_int_equal(n_sample_ops, 0);
        assert_int_equal(n_logits_rows, N_PREDICT);
        answer device = run_case(&cases[c], &(so_spec_opts){0}, true);
        assert_same(&device, &host, c, "plain");
        assert_int_equal(n_sample_ops, is_known(c) ? N_PREDICT : 0);
        assert_int_equal(n_logits_rows, is_known(c) ? 0 : N_PREDICT);
    }
}

static void test_match(void **state) {
    (void)state;
    static const char *const specs[] = {"oracle(0.7)", "model", "random", "model+oracle(0.5)"};
    for (int c = 0; c < N_CASES; c++)
        for (size_t k = 0; k < SO_LEN(specs); k++) {
            so_spec_opts spec = {.drafter = specs[k], .length = 1 + (c + (int)k) % 5};
            answer host = run_case(&cases[c], &spec, false);
            answer device = run_case(&cases[c], &spec, true);
            assert_same(&device, &host, c, specs[k]);
            assert_memory_equal(device.tokens, cases[c].want, sizeof device.tokens);
            assert_int_equal(n_sample_ops > 0, is_known(c));
            if (is_known(c))
                assert_int_equal(n_logits_rows, 0);
        }
}

/* A row is downloaded where a guess is rejected, or, with cuts, where a guess is tested. */
static void test_reject(void **state) {
    (void)state;
    static const char *const specs[] = {"oracle(0.7)", "model", "random", "model+oracle(0.5)"};
    int n_saved = 0;
    for (int c = 0; c < N_CASES; c++)
        for (size_t k = 0; k < SO_LEN(specs); k++)
            for (int lenient = 0; lenient < 2; lenient++) {
                so_spec_opts spec = {.drafter = specs[k],
                                     .length = 1 + (c + (int)k) % 5,
                                     .verify = lenient ? SO_VERIFY_LENIENT : SO_VERIFY_REJECT,
                                     .lenience = 0.5};
                answer host = run_case(&cases[c], &spec, false);
                int n_host_rows = n_logits_rows;
                answer device = run_case(&cases[c], &spec, true);
                assert_same(&device, &host, c, specs[k]);
                assert_int_equal(device.n_corrections, host.n_corrections);
                assert_int_equal(n_sample_ops > 0, is_known(c));
                if (!is_known(c))
                    continue;
                assert_true(n_logits_rows <= n_host_rows);
                n_saved += n_host_rows - n_logits_rows;
                if (!has_cuts(c) && !strchr(specs[k], '+'))
                    assert_int_equal(n_logits_rows, device.n_corrections);
            }
    assert_true(n_saved > 0);
}

/* --- several requests --- */

/* Requests of every kind in one pass: each as alone, and only the rows of those that need logits are
 * downloaded. */
static void test_mixed_batch(void **state) {
    (void)state;
    watch(true);
    so_engine *e = open_engine(N_CASES);
    so_request *r[N_CASES];
    for (int c = 0; c < N_CASES; c++)
        r[c] = so_case_submit(e, &cases[c], &(so_spec_opts){0});
    so_case_run(e);
    int n_need = 0;
    for (int c = 0; c < N_CASES; c++) {
        assert_true(so_case_same(r[c], &cases[c]));
        n_need += is_known(c) ? 0 : N_PREDICT;
        so_request_free(r[c]);
    }
    so_engine_free(e);
    assert_true(n_sample_ops > 0);
    assert_int_equal(n_logits_rows, n_need);
}

/* The download of a row fails: its request ends with the error, and the next one is computed as
 * usual. */
static void test_failed_fetch(void **state) {
    (void)state;
    watch(true);
    so_engine *e = open_engine(1);
    so_spec_opts spec = {.drafter = "oracle(0)", .length = 3, .verify = SO_VERIFY_REJECT};
    so_request_opts o = so_case_opts(&cases[0], &spec);
    o.has_nonce = true;
    fail_fetch = 1;
    so_request *r = so_case_finish(e, &o);
    assert_int_equal(so_request_finish(r), SO_FINISH_ERROR);
    so_err err = {0};
    assert_int_equal(so_request_check(r, &err), SO_EIO);
    so_request_free(r);
    fail_fetch = 0;
    r = so_case_submit(e, &cases[0], &(so_spec_opts){0});
    so_case_run(e);
    assert_true(so_case_same(r, &cases[0]));
    so_request_free(r);
    so_engine_free(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),        cmocka_unit_test(test_match),
        cmocka_unit_test(test_reject),       cmocka_unit_test(test_mixed_batch),
        cmocka_unit_test(test_failed_fetch),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
