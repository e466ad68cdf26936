/* A step allocates nothing after warm-up, with and without speculation. malloc, calloc and realloc
 * are interposed and counted while `guard` is set: those of all threads, or with `one_thread` those of
 * the engine's, where others belong to the library that carries messages. Sanitizers have their own allocator, so the test
 * is skipped there. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "engine/engine.h"
#include "so_rig.h"
#include "so_worker.h"

#if SO_TEST_SANITIZED || !defined(__GLIBC__)
#define CAN_COUNT 0
static int n_allocations;
static bool guard, one_thread;
static __thread bool engine_thread;
#else
#define CAN_COUNT 1
static int n_allocations;
static volatile bool guard, one_thread;
static __thread bool engine_thread;

static bool counts(void) { return guard && (!one_thread || engine_thread); }

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);

void *malloc(size_t n) {
    n_allocations += counts();
    return __libc_malloc(n);
}
void *calloc(size_t n, size_t size) {
    n_allocations += counts();
    return __libc_calloc(n, size);
}
void *realloc(void *p, size_t n) {
    n_allocations += counts();
    return __libc_realloc(p, n);
}
#endif

enum { N_PROMPT = 12, WARM_UP = 8, N_COUNTED = 24 };

static int guess(void *user, const int32_t *tokens, int n, int n_prompt, int32_t *out, int max) {
    (void)user;
    (void)n_prompt;
    out[0] = tokens[n / 2];
    return max > 0;
}

static so_rig own; /* the draft of async(), on a backend of its own */

/* length 0: the planner decides. */
static void check(const so_rig *r, const char *drafter, float temp, so_verify_mode verify,
                  int n_parallel, int length) {
    so_engine_opts o = {.n_ctx = 240,
                        .n_parallel = n_parallel,
                        .n_batch = 64,
                        .kv_dtype = SO_DTYPE_F32,
                        .max_draft = drafter ? 4 : 0,
                        .draft = drafter && strstr(drafter, "worker=") ? NULL
                                 : drafter && strstr(drafter, "async") ? own.m
                                                                       : r->m,
                        .draft_temp = -1,
                        .user_drafter = guess};
    so_engine *e = NULL;
    so_request *req[4];
    so_err err = {0};
    int32_t prompt[N_PROMPT];
    SO_OK_OR_FAIL(so_engine_create(r->m, NULL, &o, &e, &err), err);
    for (int i = 0; i < n_parallel; i++) {
        so_request_opts ro = {.prompt = prompt, .n_prompt = N_PROMPT, .max_tokens = -1};
        for (int k = 0; k < N_PROMPT; k++)
            prompt[k] = (7 * (k % 5) + i) % r->n_vocab;
        so_sample_defaults(&ro.sample);
        ro.sample.temp = temp;
        ro.sample.repeat_penalty = 1.1f;
        ro.n_logprobs = i % 2 ? 3 : 0;
        ro.spec = (so_spec_opts){.drafter = drafter,
                                 .length = length,
                                 .verify = verify,
                                 .lenience = 0.5,
                                 .expected = prompt,
                                 .n_expected = N_PROMPT};
        SO_OK_OR_FAIL(so_engine_submit(e, &ro, &req[i], &err), err);
    }
    for (int i = 0; i < WARM_UP; i++)
        assert_int_equal(so_engine_step(e, &err), 1);
    n_allocations = 0;
    guard = true;
    int rc = 1;
    for (int i = 0; i < N_COUNTED && rc == 1; i++)
        rc = so_engine_step(e, &err);
    guard = false;
    assert_int_equal(rc, 1);
    if (n_allocations > 0)
        fail_msg("%s, length %d, %s at temperature %g, %d at once: %d allocations in %d steps",
                 drafter ? drafter : "plain", length, so_verify_mode_name(verify), (double)temp,
                 n_parallel, n_allocations, N_COUNTED);
    for (int i = 0; i < n_parallel; i++)
        so_request_free(req[i]);
    so_engine_free(e);
}

static void test_steps_allocate_nothing(void **state) {
    (void)state;
    if (!CAN_COUNT)
        SO_SKIP("this build brings its own malloc");
    static const char *const drafters[] = {
        "none",
        "ngram",
        "ngram(draw)",
        "lookup",
        "corpus",
        "predict",
        "random",
        "oracle(0.5)",
        "user",
        "auto",
        "model",
        "model(ngram)",
        "ngram,model",
        "lookup+random",
        "model+lookup",
        "async(model,wait=1)",
        "async(ngram,wait=1)", /* the first lookup waits for allocations */
    };
    so_rig r;
    so_rig_open(&own, so_test_data("golden/models/llama"),
                &(so_rig_opts){.n_pages = 1, .level = so_cpu_best_level()});
    so_rig_open(&r, so_test_data("golden/models/llama"),
                &(so_rig_opts){.n_pages = 1, .level = so_cpu_best_level()});
    for (int n = 1; n <= 4; n += 3) {
        check(&r, NULL, 0, SO_VERIFY_MATCH, n, 0);
        check(&r, NULL, 0.8f, SO_VERIFY_MATCH, n, 0);
        for (size_t d = 0; d < SO_LEN(drafters); d++)
            for (int length = 0; length <= 2; length += 2) {
                check(&r, drafters[d], 0, SO_VERIFY_MATCH, n, length);
                check(&r, drafters[d], 0.8f, SO_VERIFY_MATCH, n, length);
                check(&r, drafters[d], 0.8f, SO_VERIFY_REJECT, n, length);
                check(&r, drafters[d], 0.8f, SO_VERIFY_LENIENT, n, length);
            }
    }
    so_rig_close(&own);
    so_rig_close(&r);
}

/* A draft worker: what the engine's thread does is the same as for a draft of its own. */
static void test_a_worker_costs_the_engine_no_allocation(void **state) {
    (void)state;
    if (!CAN_COUNT)
        SO_SKIP("this build brings its own malloc");
    so_worker_need_zmq();
    so_rig r;
    so_err err = {0};
    char spec[200];
    const so_rig_opts o = {.n_pages = 1, .level = so_cpu_best_level()};
    so_rig_open(&own, so_test_data("golden/models/llama"), &o);
    so_rig_open(&r, so_test_data("golden/models/llama"), &o);
    so_worker *w = so_worker_start(&own, NULL, NULL, &err);
    assert_non_null(w);
    snprintf(spec, sizeof spec, "async(wait=1,model,worker=%s)", so_worker_address(w));
    one_thread = engine_thread = true;
    for (int n = 1; n <= 4; n += 3)
        for (int length = 0; length <= 2; length += 2) {
            check(&r, spec, 0, SO_VERIFY_MATCH, n, length);
            check(&r, spec, 0.8f, SO_VERIFY_MATCH, n, length);
            check(&r, spec, 0.8f, SO_VERIFY_REJECT, n, length);
        }
    one_thread = engine_thread = false;
    so_worker_stop(w);
    so_rig_close(&own);
    so_rig_close(&r);
}

/* Admission, preemption, resumption and the end of requests allocate nothing either: submission
 * allocates what they need. */
static void check_scheduling(const so_rig *r, so_kv_layout layout) {
    static const char *const drafters[] = {NULL, "ngram", "lookup", "model", "random"};
    enum { N = 10 };
    so_engine_opts o = {.n_ctx = 240,
                        .n_parallel = 3,
                        .n_batch = 64,
                        .n_pages = layout == SO_KV_PAGED ? 9 : 0,
                        .kv_dtype = SO_DTYPE_F32,
                        .kv_layout = layout,
                        .prefix_cache = true,
                        .max_draft = 4,
                        .draft = r->m,
                        .draft_temp = -1};
    so_engine *e = NULL;
    so_request *req[N];
    so_engine_stats before, after;
    so_err err = {0};
    int32_t prompt[40];
    SO_OK_OR_FAIL(so_engine_create(r->m, NULL, &o, &e, &err), err);
    for (int i = 0; i < N; i++) {
        so_request_opts ro = {.prompt = prompt, .n_prompt = 20 + 2 * i, .max_tokens = 90};
        for (int k = 0; k < 40; k++)
            prompt[k] = (7 * (k % 5) + i / 3) % r->n_vocab;
        so_sample_defaults(&ro.sample);
        ro.priority = i % 4 == 3;
        ro.spec = (so_spec_opts){.drafter = drafters[i % 5], .length = 2};
        SO_OK_OR_FAIL(so_engine_submit(e, &ro, &req[i], &err), err);
        if (i == 0)
            assert_int_equal(so_engine_step(e, &err), 1);
    }
    for (int i = 0; i < 2 * WARM_UP; i++)
        assert_int_equal(so_engine_step(e, &err), 1);
    so_engine_get_stats(e, &before);
    n_allocations = 0;
    guard = true;
    int rc = 1;
    while (rc == 1)
        rc = so_engine_step(e, &err);
    guard = false;
    so_engine_get_stats(e, &after);
    assert_int_equal(rc, 0);
    assert_int_equal(n_allocations, 0);
    if (layout == SO_KV_PAGED)
        assert_true(after.preemptions > before.preemptions);
    for (int i = 0; i < N; i++)
        so_request_free(req[i]);
    so_engine_free(e);
}

static void test_scheduling_allocates_nothing(void **state) {
    (void)state;
    if (!CAN_COUNT)
        SO_SKIP("this build brings its own malloc");
    so_rig r;
    so_rig_open(&r, so_test_data("golden/models/llama"),
                &(so_rig_opts){.n_pages = 1, .level = so_cpu_best_level()});
    check_scheduling(&r, SO_KV_PAGED);
    check_scheduling(&r, SO_KV_SLOTTED);
    so_rig_close(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_a_worker_costs_the_engine_no_allocation),
        cmocka_unit_test(test_scheduling_allocates_nothing)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
