/* The split of work by thread speed: it follows waiting times, keeps its bounds, covers everything
 * exactly once, and changes no bit of a pass. */
#include "so_test.h"

#include <stdlib.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"
#include "so_rig.h"
#include "so_shape.h"

enum { RUN_NS = 2000000, TURN_NS = 10 };

/* Simulates runs in which thread i needs cost[i] for the same amount of work. */
static void simulate(so_balance *s, const double *cost, int n_runs) {
    for (int run = 0; run < n_runs; run++) {
        double t[SO_BALANCE_MAX], longest = 0;
        for (int i = 0; i < s->count; i++) {
            t[i] = cost[i] * (s->cut[i + 1] - s->cut[i]) / SO_BALANCE_ONE * s->count;
            longest = SO_MAX(longest, t[i]);
        }
        for (int i = 0; i < s->count; i++)
            s->waited[i] = (long)((longest - t[i]) * RUN_NS / TURN_NS);
        so_balance_update(s, (int64_t)(longest * RUN_NS), TURN_NS);
    }
}

static double part_of(const so_balance *s, int i) {
    return (double)(s->cut[i + 1] - s->cut[i]) / SO_BALANCE_ONE;
}

static void test_equal_cores_keep_an_even_split(void **state) {
    (void)state;
    so_balance s = {0};
    so_balance_init(&s, 3);
    so_balance before = s;
    simulate(&s, (double[]){1, 1, 1}, 100);
    assert_memory_equal(s.cut, before.cut, sizeof s.cut);
}

static void test_a_slow_core_gets_less(void **state) {
    (void)state;
    so_balance s = {0};
    so_balance_init(&s, 2);
    simulate(&s, (double[]){1.4, 1}, 120);
    assert_true(part_of(&s, 0) > 0.40 && part_of(&s, 0) < 0.43); /* 1 / 2.4, within 1/128 */
    simulate(&s, (double[]){1, 1}, 120);
    assert_true(part_of(&s, 0) > 0.49 && part_of(&s, 0) < 0.51);
}

/* One thread waits during the whole of every run: half of that counts, and speeds are bounded. */
static void test_the_worst_run_is_bounded(void **state) {
    (void)state;
    so_balance s = {0};
    so_balance_init(&s, 2);
    s.waited[0] = 10 * RUN_NS / TURN_NS;
    so_balance_update(&s, RUN_NS, TURN_NS);
    assert_true(part_of(&s, 0) < 0.53); /* a single run changes little */
    for (int i = 0; i < 1000; i++)
        so_balance_update(&s, RUN_NS, TURN_NS);
    assert_true(part_of(&s, 0) <= 0.81); /* speeds 2 and 1/2 */
}

static void test_split_is_bounded_and_complete(void **state) {
    (void)state;
    so_cpu *b = SO_NEW(so_cpu);
    so_balance_init(&b->balance, 4);
    simulate(&b->balance, (double[]){1.9, 1, 1, 1.6}, 400);
    for (int i = 0; i < 4; i++)
        assert_true(part_of(&b->balance, i) > 0.1 && part_of(&b->balance, i) < 0.5);
    for (long n = 1; n < 700; n += 13) {
        long at = 0, begin, end;
        for (int i = 0; i < 4; i++, at = end) {
            so_cpu_split_weighted(b, n, 32, i, &begin, &end);
            assert_int_equal(begin, at);
            assert_true(begin <= end && (end % 32 == 0 || end == n));
        }
        assert_int_equal(at, n);
    }
    free(b);
}

/* ---- a whole model ---- */

static const so_shape SHAPE = {.d_model = 192,
                               .n_layers = 2,
                               .n_heads = 6,
                               .n_heads_kv = 3,
                               .head_dim = 32,
                               .d_ff = 256,
                               .n_vocab = 261,
                               .n_ctx = 512,
                               .seed = 7};
enum { N_TOKENS = 150, N_THREADS = 3 };

/* cut: borders in 1/16, or NULL for one thread. */
static float *logits_of(const char *path, so_dtype cache, const int *cut) {
    so_rig r;
    int32_t tokens[N_TOKENS];
    so_rig_open(&r, path,
                &(so_rig_opts){.n_threads = cut ? N_THREADS : 1,
                               .level = SO_CPU_AUTO,
                               .kv_dtype = cache,
                               .model = {.quantize = true, .dtype = SO_DTYPE_Q8_0}});
    for (int i = 0; i < N_TOKENS; i++)
        tokens[i] = i * 37 % r.n_vocab;
    so_seq *s = so_seq_create(r.kv);
    float *logits = SO_NEW_N(float, N_TOKENS *r.width);
    int chunks[] = {128, 12, 1, 2, 3, 4};
    for (size_t i = 0, at = 0; i < SO_LEN(chunks); at += (size_t)chunks[i++]) {
        for (int j = 1; cut && j < N_THREADS; j++) /* another split in every pass */
            ((so_cpu *)r.b)->balance.cut[j] = (cut[j] + (int)i % 2) * (SO_BALANCE_ONE / 16);
        so_rig_chain(&r, s, tokens + at, chunks[i], logits + at * (size_t)r.width);
    }
    so_seq_free(s);
    so_rig_close(&r);
    return logits;
}

static void test_split_changes_no_bit(void **state) {
    (void)state;
    static const int CUTS[][N_THREADS] = {{0, 5, 10}, {0, 3, 13}, {0, 0, 9}, {0, 12, 14}};
    char *dir = so_test_tmp(), *path = so_shape_write(dir, &SHAPE);
    so_dtype caches[] = {SO_DTYPE_F16, SO_DTYPE_Q8_0};
    for (size_t c = 0; c < SO_LEN(caches); c++) {
        float *want = logits_of(path, caches[c], NULL);
        for (size_t i = 0; i < SO_LEN(CUTS); i++) {
            float *got = logits_of(path, caches[c], CUTS[i]);
            assert_memory_equal(got, want, (size_t)N_TOKENS * 261 * sizeof *want);
            free(got);
        }
        free(want);
    }
    so_test_tmp_free(dir);
    free(path);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equal_cores_keep_an_even_split),
        cmocka_unit_test(test_a_slow_core_gets_less),
        cmocka_unit_test(test_the_worst_run_is_bounded),
        cmocka_unit_test(test_split_is_bounded_and_complete),
        cmocka_unit_test(test_split_changes_no_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
