/* The choice of levels on simulated machines: it ends at the best number, whatever the costs of rows
 * and the acceptance, wastes little until then, and follows a change. */
#include "so_test.h"

#include <math.h>

#include "base/mem.h"
#include "base/rng.h"
#include "plan/beam_levels.h"

typedef struct machine {
    double plain_ms, level_ms; /* a pass; each level of draft and rows */
    double alpha;
    uint32_t draws;
} machine;

static double uniform(machine *m) {
    so_rng_key key = {.seed = 5, .purpose = SO_RNG_TEST};
    return so_rng_uniform(&key, m->draws++);
}

static double cost(const machine *m, int n) { return m->plain_ms + n * m->level_ms; }

/* Steps per ms with n levels. */
static double rate(const machine *m, int n) {
    double sum = 1;
    for (int i = 1; i <= n; i++)
        sum += pow(m->alpha, i);
    return sum / cost(m, n);
}

/* Returns the steps per ms of n passes. */
static double run(so_beam_levels *b, machine *m, int n, int most) {
    double ms = 0, steps = 0;
    for (int i = 0; i < n; i++) {
        int levels = so_beam_levels_choose(b, 4, 8, most), accepted = 0;
        assert_true(levels >= 0 && levels <= most);
        while (accepted < levels && uniform(m) < m->alpha)
            accepted++;
        double took = cost(m, levels) * (0.9 + 0.2 * uniform(m));
        so_beam_levels_observe(b, levels, SO_MIN(accepted + 1, levels), accepted, took);
        ms += took;
        steps += 1 + accepted;
    }
    return steps / ms;
}

static double best_rate(const machine *m, int most) {
    double best = 0;
    for (int n = 0; n <= most; n++)
        best = fmax(best, rate(m, n));
    return best;
}

static void test_best(void **state) {
    (void)state;
    for (int a = 0; a <= 9; a++)
        for (int c = 0; c < 5; c++) {
            machine m = {.plain_ms = 10, .level_ms = 0.5 * (1 << c), .alpha = 0.1 * a};
            so_beam_levels b = {0};
            run(&b, &m, 100, SO_BEAM_LEVELS);
            double got = run(&b, &m, 1000, SO_BEAM_LEVELS), want = best_rate(&m, SO_BEAM_LEVELS);
            if (got < 0.88 * want)
                fail_msg("alpha %g, %g ms per level: %g of %g", m.alpha, m.level_ms, got, want);
        }
}

/* Levels that cost as much as a pass and are never accepted: hardly tried. */
static void test_useless(void **state) {
    (void)state;
    machine m = {.plain_ms = 10, .level_ms = 20, .alpha = 0};
    so_beam_levels b = {0};
    assert_true(run(&b, &m, 50, SO_BEAM_LEVELS) > 0.8 * rate(&m, 0));
}

static void test_change(void **state) {
    (void)state;
    machine m = {.plain_ms = 10, .level_ms = 1, .alpha = 0.9};
    so_beam_levels b = {0};
    run(&b, &m, 300, SO_BEAM_LEVELS);
    m.alpha = 0.05;
    m.level_ms = 8;
    run(&b, &m, 600, SO_BEAM_LEVELS);
    assert_true(run(&b, &m, 400, SO_BEAM_LEVELS) > 0.85 * best_rate(&m, SO_BEAM_LEVELS));
    assert_int_equal(so_beam_levels_choose(&b, 4, 8, 0), 0);
    so_beam_levels_choose(&b, 2, 8, 4); /* another width: starts again */
    assert_int_equal(b.n[0], 0);
    so_beam_levels_observe(&b, SO_BEAM_LEVELS + 1, 3, 3,
                           1); /* a longer fixed draft is not learned */
    assert_int_equal(b.tested[0] == 0, 1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_best),
        cmocka_unit_test(test_useless),
        cmocka_unit_test(test_change),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
