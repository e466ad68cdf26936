/* Estimates of acceptance, and shadow scoring. */
#include "rig.h"

#include <math.h>

#include "draft/shadow.h"

static so_estimate_shared shared;

static void feed(so_estimate *e, dice *d, double alpha, int n) {
    for (int i = 0; i < n; i++)
        so_estimate_add(e, 0, 1, 0.5, dice_uniform(d) < alpha);
}

static double now(const so_estimate *e) { return so_estimate_get(e, 0, 1, 0.5, 0.5); }

/* At a constant rate the estimate is unbiased and calm: its error over many tests stays near the
 * deviation of some thirty coin throws. */
static void converges(void **state) {
    (void)state;
    const double alphas[] = {0.05, 0.3, 0.6, 0.9, 0.99};
    for (int a = 0; a < 5; a++) {
        so_estimate e;
        dice d = {.seed = (uint64_t)(81 + a)};
        double mean = 0, dev = 0;
        enum { N = 4000 };
        memset(&shared, 0, sizeof shared);
        so_estimate_init(&e, &shared);
        feed(&e, &d, alphas[a], 200);
        for (int i = 0; i < N; i++) {
            feed(&e, &d, alphas[a], 1);
            mean += now(&e) / N;
            dev += pow(now(&e) - alphas[a], 2) / N;
        }
        assert_true(fabs(mean - alphas[a]) < 0.025);
        assert_true(sqrt(dev) < 1.5 * sqrt(alphas[a] * (1 - alphas[a]) / 33) + 0.01);
    }
}

/* How many tests until the estimate is past a level. */
static int tests_until(so_estimate *e, dice *d, double alpha, bool above, double level) {
    for (int i = 1; i <= 200; i++) {
        feed(e, d, alpha, 1);
        if (above ? now(e) > level : now(e) < level)
            return i;
    }
    return 1000;
}

/* A drafter that turns is noticed: bad within 12 tests, good again within 12. */
static void turns_are_noticed(void **state) {
    (void)state;
    int worst_drop = 0, worst_rise = 0;
    for (int run = 0; run < 200; run++) {
        so_estimate e;
        dice d = {.seed = (uint64_t)(1000 + run)};
        memset(&shared, 0, sizeof shared);
        so_estimate_init(&e, &shared);
        feed(&e, &d, 0.9, 150);
        worst_drop = SO_MAX(worst_drop, tests_until(&e, &d, 0.02, false, 0.3));
        feed(&e, &d, 0.02, 150);
        worst_rise = SO_MAX(worst_rise, tests_until(&e, &d, 0.9, true, 0.5));
    }
    assert_in_range(worst_drop, 1, 14);
    assert_in_range(worst_rise, 1, 14);
}

static void prior_is_shared(void **state) {
    (void)state;
    so_estimate a, b;
    dice d = {.seed = 91};
    memset(&shared, 0, sizeof shared);
    so_estimate_init(&a, &shared);
    assert_true(fabs(now(&a) - 0.5) < 1e-9); /* the drafter's own word */
    assert_true(so_estimate_sure(&a, 0) == 0);
    feed(&a, &d, 0.9, 300);
    so_estimate_init(&b, &shared); /* a new request starts from what was learned */
    assert_true(fabs(now(&b) - 0.9) < 0.06);
    assert_true(so_estimate_sure(&b, 0) > 0.9);
    assert_true(so_estimate_sure(&b, 1) == 0);
    for (int i = 0; i < 10; i++)
        so_estimate_add(&b, 0, 1, 0.5, false);
    assert_true(now(&b) < 0.3); /* and goes its own way */
    assert_true(now(&a) > 0.6);
    /* a depth never tested is thought of like the one before, another drafter is not */
    assert_true(fabs(so_estimate_get(&b, 0, 2, 0.5, 0.5) - now(&b)) < 1e-9);
    assert_true(fabs(so_estimate_get(&b, 1, 1, 0.5, 0.5) - 0.5) < 1e-9);
}

/* What confidence is worth is learned per level, and a bad stretch lowers all levels alike. */
static void levels_are_calibrated(void **state) {
    (void)state;
    so_estimate e;
    dice d = {.seed = 92};
    memset(&shared, 0, sizeof shared);
    so_estimate_init(&e, &shared);
    for (int i = 0; i < 1000; i++) {
        so_estimate_add(&e, 0, 1, 0.3, dice_uniform(&d) < 0.1); /* says 0.3, is 0.1 */
        so_estimate_add(&e, 0, 1, 0.9, dice_uniform(&d) < 0.7);
    }
    double low = so_estimate_get(&e, 0, 1, 0.3, 0.5), high = so_estimate_get(&e, 0, 1, 0.9, 0.5);
    assert_true(fabs(low - 0.1) < 0.07 && fabs(high - 0.7) < 0.1);
    double any = so_estimate_get(&e, 0, 1, -1, 0.5);
    assert_true(any > low && any < high);
    for (int i = 0; i < 30; i++)
        so_estimate_add(&e, 0, 1, 0.9, false);
    assert_true(so_estimate_get(&e, 0, 1, 0.3, 0.5) < low / 1.5);
    assert_true(so_estimate_get(&e, 0, 1, 0.9, 0.5) < high / 1.5);
}

static void odd_values_are_harmless(void **state) {
    (void)state;
    so_estimate e;
    memset(&shared, 0, sizeof shared);
    so_estimate_init(&e, &shared);
    const double odd[] = {NAN, -3, 7, INFINITY, 0, 1};
    for (size_t i = 0; i < SO_LEN(odd); i++)
        for (int k = 0; k < 50; k++)
            so_estimate_add(&e, 500, 500, odd[i], k % 2);
    for (size_t i = 0; i < SO_LEN(odd); i++) {
        double p = so_estimate_get(&e, -1, -1, odd[i], odd[i]);
        assert_true(p > 0 && p < 1);
        p = so_estimate_get(&e, 500, 500, odd[i], odd[i]);
        assert_true(p > 0 && p < 1);
    }
}

/*   root ─ 5 ─ 6        a chain, and a sibling tested after it */
static void tree_chances(void **state) {
    (void)state;
    so_estimate e;
    so_tree t;
    float accept[SO_TREE_MAX];
    memset(&shared, 0, sizeof shared);
    so_estimate_init(&e, &shared);
    so_tree_init(&t, 10, 1);
    int a = so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 0, 0.5f);
    int b = so_tree_add(&t, a, 6, SO_Q_POINT, -1, 0, 0.25f);
    int c = so_tree_add(&t, 0, 7, SO_Q_POINT, -1, 0, 0.4f);
    so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 1, 0.5f); /* another drafter agrees */
    so_estimate_tree(&e, &t, accept);
    assert_float_equal(accept[0], 1, 0);
    assert_float_equal(accept[a], 0.5f, 1e-6);
    assert_float_equal(accept[b], 0.25f, 1e-6);
    assert_float_equal(accept[c], 0.5f * 0.4f, 1e-6);
    so_tree_deinit(&t);
}

/* Shadow. */

/* Tests of a drafter at a depth that were counted, and how many went well. */
static void assert_counts(int drafter, int depth, int tested, int accepted) {
    const so_estimate_cell *c = &shared.cells[drafter][depth - 1][SO_ESTIMATE_LEVELS];
    assert_int_equal(lroundf(c->tested), tested);
    assert_int_equal(lroundf(c->accepted), accepted);
}

static void chain(so_tree *t, const int32_t *tokens, int n, int drafter) {
    so_tree_reset(t, 0, 0);
    for (int i = 0, node = 0; i < n; i++)
        node = so_tree_add(t, node, tokens[i], SO_Q_POINT, -1, drafter, 0.5f);
}

static void begin_shadow(so_shadow *s, so_estimate *e, so_tree *t) {
    memset(&shared, 0, sizeof shared);
    memset(s, 0, sizeof *s);
    so_estimate_init(e, &shared);
    so_tree_init(t, 100, 1);
}

static void shadow_counts_conditional_tests(void **state) {
    (void)state;
    so_estimate e;
    so_tree t;
    static so_shadow s;
    begin_shadow(&s, &e, &t);
    chain(&t, (int32_t[]){1, 2, 3, 4}, 4, 0);
    so_shadow_watch(&s, &t);
    so_shadow_advance(&s, &e, (int32_t[]){1}, 1); /* plain decoding: one token at a time */
    chain(&t, (int32_t[]){2, 9}, 2, 0);
    so_shadow_watch(&s, &t);
    so_shadow_advance(&s, &e, (int32_t[]){2}, 1);
    so_shadow_advance(&s, &e, (int32_t[]){7, 8}, 2); /* both chains end here */
    so_shadow_advance(&s, &e, (int32_t[]){4, 4, 4}, 3);
    assert_counts(0, 1, 2, 2);
    assert_counts(0, 2, 2, 1); /* 2 right, 9 wrong */
    assert_counts(0, 3, 1, 0);
    assert_counts(0, 4, 0, 0); /* never tested */
    assert_int_equal(e.own[0].n_seen, 2);
    so_tree_deinit(&t);
}

static void shadow_scores_each_drafter_alone(void **state) {
    (void)state;
    so_estimate e;
    so_tree t;
    static so_shadow s;
    begin_shadow(&s, &e, &t);
    so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 0, 0.5f);
    so_tree_add(&t, 0, 6, SO_Q_POINT, -1, 1, 0.5f);
    so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 1, 0.5f);
    so_tree_add(&t, 0, 7, SO_Q_POINT, -1, 1, 0.5f);
    int row = so_tree_new_row(&t);
    so_tree_add(&t, 0, 5, SO_Q_ROW, row, 2, 0.5f);
    so_shadow_watch(&s, &t);
    so_shadow_advance(&s, &e, (int32_t[]){5}, 1);
    assert_counts(0, 1, 1, 1);
    assert_counts(1, 1, 2, 1); /* 6 wrong, 5 right, 7 not reached */
    assert_int_equal(e.own[1].last, 1);
    assert_counts(2, 1, 0, 0); /* drawn: not by equality */
    so_tree_deinit(&t);
}

static void shadow_forgets_the_oldest(void **state) {
    (void)state;
    so_estimate e;
    so_tree t;
    static so_shadow s;
    memset(&shared, 0, sizeof shared);
    memset(&s, 0, sizeof s);
    so_estimate_init(&e, &shared);
    so_tree_init(&t, 300, 1);
    int32_t tokens[250];
    for (int i = 0; i < 250; i++)
        tokens[i] = i;
    for (int round = 0; round < 100; round++) {
        chain(&t, tokens, 250, 0); /* longer than what is kept */
        so_shadow_watch(&s, &t);
        so_tree_reset(&t, 0, 0);
        so_shadow_watch(&s, &t); /* nothing proposed takes no place */
    }
    so_shadow_advance(&s, &e, tokens, 250);
    assert_true(shared.cells[0][0][SO_ESTIMATE_LEVELS].tested > SO_SHADOW_TREES - 1);
    assert_true(shared.cells[0][0][SO_ESTIMATE_LEVELS].tested <= SO_SHADOW_TREES);
    so_tree_deinit(&t);
}

static void verdict_counts_drawn_tokens(void **state) {
    (void)state;
    so_estimate e;
    so_tree t;
    static so_verdict v;
    memset(&shared, 0, sizeof shared);
    so_estimate_init(&e, &shared);
    so_tree_init(&t, 10, 4);
    int row = so_tree_new_row(&t);
    int a = so_tree_add(&t, 0, 5, SO_Q_ROW, row, 0, 0.5f);
    so_tree_add(&t, 0, 6, SO_Q_ROW, row, 0, 0.5f);
    so_tree_add(&t, 0, 5, SO_Q_ROW, row, 1, 0.5f);
    int b = so_tree_add(&t, a, 7, SO_Q_ROW, row, 0, 0.5f);
    so_tree_add(&t, b, 8, SO_Q_POINT, -1, 0, 0.5f);
    /* 5 rejected, 6 rejected, 5 of the other drafter accepted, 7 accepted, the point 8 rejected */
    v = (so_verdict){.n_accepted = 2, .path = {(int16_t)a, (int16_t)b}, .n_tested = 5};
    for (int i = 0; i < 5; i++)
        v.tested[i] = (int16_t)i;
    so_estimate_verdict(&e, &t, &v);
    assert_counts(0, 1, 2, 0);
    assert_counts(1, 1, 1, 1);
    assert_counts(0, 2, 1, 1);
    assert_counts(0, 3, 0, 0);
    so_tree_deinit(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(converges),
        cmocka_unit_test(turns_are_noticed),
        cmocka_unit_test(prior_is_shared),
        cmocka_unit_test(levels_are_calibrated),
        cmocka_unit_test(odd_values_are_harmless),
        cmocka_unit_test(tree_chances),
        cmocka_unit_test(shadow_counts_conditional_tests),
        cmocka_unit_test(shadow_scores_each_drafter_alone),
        cmocka_unit_test(shadow_forgets_the_oldest),
        cmocka_unit_test(verdict_counts_drawn_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
