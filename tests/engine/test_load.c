/* Exactness under load: 200 requests with mixed lengths, temperatures, penalties, drafters,
 * priorities and common prefixes, cancelled and freed at random, in caches that are small enough to
 * force preemption. Every request has the same tokens as when it runs alone. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "so_load.h"
#include "so_rig.h"

enum { N_CTX = 256, N_SOURCE = 300, N_REQUESTS = 200, MAX_PROMPT = 120, MAX_TOKENS = 110 };

typedef struct fixture {
    so_rig target;
    int32_t source[N_SOURCE];
    so_load *load;
} fixture;

static void open_load(fixture *f, const char *model, so_dtype cache, uint64_t seed) {
    char path[64];
    snprintf(path, sizeof path, "golden/models/%s", model);
    so_rig_open(&f->target, so_test_data(path),
                &(so_rig_opts){.level = so_cpu_best_level(), .max_rows = 1, .n_pages = 1});
    so_rng_key key = {.seed = seed, .purpose = SO_RNG_TEST};
    for (int i = 0; i < N_SOURCE; i++) /* periodic, so that lookup and tables find matches */
        f->source[i] =
            (int32_t)(so_rng_uniform(&key, (uint32_t)(i % 23 + i / 150 * 50)) * f->target.n_vocab);
    f->load = so_load_create(&(so_load_opts){.target = f->target.m,
                                             .kv_dtype = cache,
                                             .n_requests = N_REQUESTS,
                                             .n_ctx = N_CTX,
                                             .max_prompt = MAX_PROMPT,
                                             .max_tokens = MAX_TOKENS,
                                             .source = f->source,
                                             .n_source = N_SOURCE,
                                             .with_draft = true,
                                             .seed = seed});
}

static void close_load(fixture *f) {
    so_load_free(f->load);
    so_rig_close(&f->target);
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    open_load(f, "llama", SO_DTYPE_F32, 1);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    close_load(*state);
    free(*state);
    return 0;
}

static so_engine_opts usual(const fixture *f) {
    return (so_engine_opts){.n_ctx = N_CTX,
                            .n_parallel = 8,
                            .n_batch = 64,
                            .kv_dtype = SO_DTYPE_F32,
                            .max_draft = 8,
                            .draft = f->target.m,
                            .draft_temp = -1};
}

static void test_pages(void **state) {
    fixture *f = *state;
    so_load_result got;
    so_engine_opts o = usual(f);
    o.n_pages = 20;
    o.prefix_cache = true;
    so_load_run(f->load, &o, "paged, 20 pages", &got);
    assert_true(got.stats.preemptions > 3 && got.stats.prefix_hits > 1000);
    assert_true(got.stats.accepted > 500 && got.n_cancelled > 10 && got.n_freed > 5);
}

static void test_pages_without_prefixes(void **state) {
    fixture *f = *state;
    so_load_result got;
    so_engine_opts o = usual(f);
    o.n_pages = 20;
    o.n_batch = 7;
    so_load_run(f->load, &o, "paged, no prefixes", &got);
    assert_true(got.stats.preemptions > 3 && got.stats.prefix_hits == 0);
}

static void test_pages_for_all(void **state) {
    fixture *f = *state;
    so_load_result got;
    so_engine_opts o = usual(f);
    o.prefix_cache = true;
    o.n_parallel = 16;
    so_load_run(f->load, &o, "paged, enough", &got); /* preemption only by priority */
    assert_true(got.stats.prefix_hits > 1000);
}

/* The smallest possible cache: exactly the longest request fits. */
static void test_smallest(void **state) {
    fixture *f = *state;
    so_load_result got;
    so_engine_opts o = usual(f);
    o.n_pages = so_kv_pages_for(MAX_PROMPT + MAX_TOKENS);
    o.prefix_cache = true;
    so_load_run(f->load, &o, "paged, smallest", &got);
    assert_true(got.stats.preemptions > 3);
}

/* A slotted cache cannot run out of pages: preemption only by priority. */
static void test_slots(void **state) {
    fixture *f = *state;
    so_load_result got;
    so_engine_opts o = usual(f);
    o.kv_layout = SO_KV_SLOTTED;
    o.n_parallel = 4;
    so_load_run(f->load, &o, "slotted", &got);
    assert_true(got.stats.preemptions > 3);
    assert_int_equal(got.stats.prefix_hits, 0);
}

/* Other model families, seeds and cache types; SOOTH_TEST_FULL=1 runs 40 of them. */
static void test_families(void **state) {
    (void)state;
    static const char *const models[] = {"gemma3", "qwen3", "mistral_window", "qwen2", "llama"};
    static const so_dtype caches[] = {SO_DTYPE_F32, SO_DTYPE_Q8_0};
    int n = so_test_full() ? 40 : 2;
    for (int i = 0; i < n; i++) {
        fixture *f = SO_NEW(fixture);
        so_load_result got;
        open_load(f, models[(size_t)i % SO_LEN(models)], caches[i % 2], (uint64_t)(2 + i));
        so_engine_opts o = usual(f);
        o.kv_dtype = caches[i % 2];
        o.n_pages = 12 + i % 16;
        o.n_batch = 16 << i % 3;
        o.prefix_cache = true;
        so_load_run(f->load, &o, models[(size_t)i % SO_LEN(models)], &got);
        o.kv_layout = SO_KV_SLOTTED;
        o.n_pages = 0;
        o.n_parallel = 3 + i % 5;
        so_load_run(f->load, &o, "slotted", &got);
        close_load(f);
        free(f);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pages),         cmocka_unit_test(test_pages_without_prefixes),
        cmocka_unit_test(test_pages_for_all), cmocka_unit_test(test_smallest),
        cmocka_unit_test(test_slots),         cmocka_unit_test(test_families),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
