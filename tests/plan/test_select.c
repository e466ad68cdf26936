/* The selection of guesses, compared with all possible sets. */
#include "../draft/rig.h"

#include <math.h>

#include "plan/select.h"

static double flat(int n) { return 10 + 0.3 * (n - 1); }        /* memory-bound */
static double mild(int n) { return 10 + 1.0 * (n - 1); }        /* a tenth per row */
static double steep(int n) { return 10 + 4.0 * (n - 1); }       /* nearly no gain in batching */
static double steps(int n) { return 10 + 3.0 * ((n - 1) / 4); } /* kernels of four rows */
typedef double cost(int n);
static cost *const MACHINES[] = {flat, mild, steep, steps};
enum { N_MACHINES = 4, N_TREES = 2 };

static void teach(so_costs *c, cost *t, int max) {
    for (int i = 0; i < 8; i++)
        for (int n = 1; n <= max; n++)
            so_costs_observe_pass(c, n, t(n), false);
}

/* A random tree with random values, each below its parent's. */
static void random_tree(dice *d, so_tree *t, float *value, int n) {
    so_tree_reset(t, 0, 0);
    value[0] = 1;
    for (int i = 1; i <= n; i++) {
        int parent = dice_below(d, t->n_nodes);
        int node = so_tree_add(t, parent, i, SO_Q_POINT, -1, 0, 0.5f);
        value[node] = value[parent] * (float)dice_uniform(d);
    }
}

/* The value of a set of nodes; false if a parent is missing. */
static bool sum_set(const so_tree *t, const float *value, unsigned set, double *sum) {
    for (int i = 1; i < t->n_nodes; i++) {
        int parent = t->nodes[i].parent;
        if (!(set >> (i - 1) & 1))
            continue;
        if (parent > 0 && !(set >> (parent - 1) & 1))
            return false;
        *sum += (double)value[i];
    }
    return true;
}

/* Two requests with trees of up to five guesses: no set of nodes is better than the chosen one. */
static void choice_equals_brute_force(void **state) {
    (void)state;
    dice d = {.seed = 102};
    so_tree trees[N_TREES];
    float value[N_TREES][SO_TREE_MAX];
    static so_costs c;
    so_selection s = {0};
    for (int i = 0; i < N_TREES; i++)
        so_tree_init(&trees[i], 50, 0);
    for (int round = 0; round < 400; round++) {
        c = (so_costs){0};
        teach(&c, MACHINES[round % N_MACHINES], 16);
        int base = 2 + dice_below(&d, 3);
        double test_ms = dice_below(&d, 2) * 0.2;
        so_selection_limits l = {.price = (0.5 + dice_uniform(&d)) * 2 / so_costs_pass(&c, 2),
                                 .max_risk = 1e9,
                                 .max_rows = 12 - dice_below(&d, 6)};
        so_selection_clear(&s);
        for (int i = 0; i < N_TREES; i++) {
            random_tree(&d, &trees[i], value[i], dice_below(&d, 6));
            for (int k = 1; k < trees[i].n_nodes; k++)
                so_selection_add(&s, (so_guess){value[i][k], -1, (float)test_ms, i, k});
        }
        so_sum sum = {.tokens = 2, .rows = base};
        int n = so_selection_choose(&s, &c, &l, &sum);
        double base_ms = so_costs_pass(&c, base), best = 0;
        double got =
            sum.tokens - 2 - l.price * (so_costs_pass(&c, sum.rows) + sum.test_ms - base_ms);
        for (unsigned a = 0; a < 1u << (trees[0].n_nodes - 1); a++)
            for (unsigned b = 0; b < 1u << (trees[1].n_nodes - 1); b++) {
                int k = __builtin_popcount(a) + __builtin_popcount(b);
                double tokens = 0;
                if (base + k <= l.max_rows && sum_set(&trees[0], value[0], a, &tokens) &&
                    sum_set(&trees[1], value[1], b, &tokens)) {
                    double ms = so_costs_pass(&c, base + k) + k * test_ms - base_ms;
                    best = SO_MAX(best, tokens - l.price * ms);
                }
            }
        assert_true(got >= best - 1e-5);
        assert_int_equal(n, sum.rows - base);
        bool keep[N_TREES][SO_TREE_MAX] = {{true}, {true}};
        for (int k = 0; k < n; k++) {
            const so_guess *g = so_selection_get(&s, k);
            assert_true(keep[g->owner][trees[g->owner].nodes[g->node].parent]); /* parents first */
            keep[g->owner][g->node] = true;
        }
        so_costs_deinit(&c);
    }
    for (int i = 0; i < N_TREES; i++)
        so_tree_deinit(&trees[i]);
    so_selection_deinit(&s);
}

static void risk_and_margin_limit_the_choice(void **state) {
    (void)state;
    static so_costs c;
    so_selection s = {0};
    c = (so_costs){0};
    teach(&c, mild, 8);
    so_selection_limits l = {.price = 0.1, .max_risk = 0.15, .max_rows = 8};
    for (int evidence = 0; evidence <= 1; evidence++) {
        so_selection_clear(&s);
        for (int i = 0; i < 4; i++)
            so_selection_add(&s, (so_guess){0.9f, (float)evidence, 0, i, 1});
        so_sum sum = {.tokens = 4, .rows = 1};
        assert_int_equal(so_selection_choose(&s, &c, &l, &sum), evidence ? 4 : 1);
    }
    so_selection_clear(&s);
    so_selection_add(&s, (so_guess){0.15f, 1, 0, 0, 1}); /* gains 0.05 */
    so_sum sum = {.tokens = 1, .rows = 1};
    l.margin = 0.08;
    assert_int_equal(so_selection_choose(&s, &c, &l, &sum), 0);
    so_selection_deinit(&s);
    so_costs_deinit(&c);
}

static void odd_values_are_harmless(void **state) {
    (void)state;
    static so_costs c;
    so_selection s = {0};
    const float odd[] = {NAN, -INFINITY, INFINITY, -1, 0, 2};
    so_selection_limits l = {.price = 0.01, .max_risk = 1e9, .max_rows = 64};
    c = (so_costs){0};
    for (int known = 0; known < 2; known++) {
        so_selection_clear(&s);
        for (size_t i = 0; i < SO_LEN(odd); i++)
            so_selection_add(&s, (so_guess){odd[i], -1, 0, (int)i, 1});
        so_sum sum = {.tokens = 1, .rows = 1};
        assert_int_equal(so_selection_choose(&s, &c, &l, &sum), known ? 2 : 0);
        assert_true(isfinite(sum.tokens));
        teach(&c, mild, 4);
    }
    so_selection_deinit(&s);
    so_costs_deinit(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(choice_equals_brute_force),
        cmocka_unit_test(risk_and_margin_limit_the_choice),
        cmocka_unit_test(odd_values_are_harmless),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
