/* Real models: a request has the same tokens alone, beside other requests, and with any prompt
 * chunk size. */
#include "so_test.h"

#include <stdlib.h>

#include "base/mem.h"
#include "engine/bundle.h"
#include "engine/engine.h"

enum { N = 4, N_PREDICT = 12 };

static const char *const PROMPTS[N] = {
    "Why is the sea blue?", "def fib(n):\n    ", "Der Fluss ist lang und tief, aber",
    "List the numbers from one to ten, then say which of them are prime, and explain why the "
    "others "
    "are not. Write one line for each number, and do not leave any of them out."};

static so_request_opts opts_of(int i, const so_tokens *prompt) {
    so_request_opts o = {.prompt = prompt->ids,
                         .n_prompt = (int)prompt->len,
                         .max_tokens = N_PREDICT,
                         .ignore_end = true};
    so_sample_defaults(&o.sample);
    o.sample.temp = i % 2 ? 0 : 0.9f;
    o.sample.repeat_penalty = i > 1 ? 1.1f : 1;
    o.sample.seed = (uint64_t)i;
    return o;
}

/* out[i]: the tokens of prompt i. At most n_parallel requests run at once. */
static void run_all(const so_bundle *b, int n_parallel, int n_batch, int32_t out[N][N_PREDICT]) {
    so_err err = {0};
    so_engine *e = NULL;
    so_engine_opts o;
    so_request *reqs[N];
    so_engine_defaults(b->model, &o);
    o.n_ctx = 128;
    o.n_parallel = n_parallel;
    o.n_batch = n_batch;
    SO_OK_OR_FAIL(so_engine_create(b->model, b->tok, &o, &e, &err), err);
    for (int i = 0; i < N; i++) {
        so_tokens t = {0};
        SO_OK_OR_FAIL(
            so_tokenizer_encode(b->tok, so_str_c(PROMPTS[i]), SO_ENCODE_ADD_SPECIAL, &t, &err),
            err);
        so_request_opts ro = opts_of(i, &t);
        SO_OK_OR_FAIL(so_engine_submit(e, &ro, &reqs[i], &err), err);
        so_tokens_free(&t);
    }
    for (int i = 0; i < N; i++) {
        int n;
        SO_OK_OR_FAIL(so_engine_run(e, reqs[i], &err), err);
        const int32_t *ids = so_request_output(reqs[i], &n);
        assert_int_equal(n, N_PREDICT);
        memcpy(out[i], ids, sizeof out[i]);
    }
    for (int i = 0; i < N; i++)
        so_request_free(reqs[i]);
    so_engine_free(e);
}

static void check(const char *name) {
    const char *path = so_test_model(name);
    if (!path)
        SO_SKIP("model %s is not here (sooth pull %s)", name, name);
    so_bundle_opts bo;
    so_bundle b;
    so_err err = {0};
    so_bundle_defaults(&bo);
    SO_OK_OR_FAIL(so_bundle_open(path, &bo, &b, &err), err);
    int32_t alone[N][N_PREDICT], together[N][N_PREDICT];
    run_all(&b, 1, 256, alone);
    run_all(&b, N, 5, together);
    assert_memory_equal(alone, together, sizeof alone);
    so_bundle_close(&b);
}

static void test_smollm2(void **state) {
    (void)state;
    check("smollm2");
}

static void test_gemma3(void **state) {
    (void)state;
    check("gemma3-270m");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_smollm2),
        cmocka_unit_test(test_gemma3),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
