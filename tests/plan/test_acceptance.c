/* Estimates of acceptance, and shadow drafts. */
#include "../draft/rig.h"

#include <math.h>

#include "plan/shadow.h"

static so_accept_shared shared;
static so_accept a, b;

enum { N_DRAFTERS = 3 };

static void begin(void) {
    so_accept_deinit(&a);
    so_accept_deinit(&b);
    so_accept_shared_deinit(&shared);
    so_accept_shared_init(&shared, N_DRAFTERS);
    so_accept_init(&a, &shared);
}

static int end(void **state) {
    (void)state;
    so_accept_deinit(&a);
    so_accept_deinit(&b);
    so_accept_shared_deinit(&shared);
    return 0;
}

static void add(so_accept *x, int drafter, int depth, double confidence, bool accepted) {
    so_accept_key k = {drafter, depth, 0, confidence};
    so_accept_add(x, &k, accepted);
}

static double get(const so_accept *x, int drafter, int depth, double confidence) {
    so_accept_key k = {drafter, depth, 0, confidence};
    return so_accept_get(x, &k, 0.5);
}

static void feed(so_accept *e, dice *d, double alpha, int n) {
    for (int i = 0; i < n; i++)
        add(e, 0, 1, 0.5, dice_uniform(d) < alpha);
}

static double now(const so_accept *e) { return get(e, 0, 1, 0.5); }

/* At a constant rate the estimate is unbiased and stable: its error over many tests stays near the
 * deviation of about thirty coin throws. */
static void converges(void **state) {
    (void)state;
    const double alphas[] = {0.05, 0.3, 0.6, 0.9, 0.99};
    for (int k = 0; k < 5; k++) {
        dice d = {.seed = (uint64_t)(81 + k)};
        double mean = 0, dev = 0;
        enum { N = 4000 };
        begin();
        feed(&a, &d, alphas[k], 200);
        for (int i = 0; i < N; i++) {
            feed(&a, &d, alphas[k], 1);
            mean += now(&a) / N;
            dev += pow(now(&a) - alphas[k], 2) / N;
        }
        assert_true(fabs(mean - alphas[k]) < 0.025);
        assert_true(sqrt(dev) < 1.5 * sqrt(alphas[k] * (1 - alphas[k]) / 33) + 0.01);
    }
}

/* The number of tests until the estimate passes a level. */
static int tests_until(so_accept *e, dice *d, double alpha, bool above, double level) {
    for (int i = 1; i <= 200; i++) {
        feed(e, d, alpha, 1);
        if (above ? now(e) > level : now(e) < level)
            return i;
    }
    return 1000;
}

/* A drafter that changes is noticed: bad within 12 tests, good again within 12. */
static void changes_are_noticed(void **state) {
    (void)state;
    int worst_drop = 0, worst_rise = 0;
    for (int run = 0; run < 200; run++) {
        dice d = {.seed = (uint64_t)(1000 + run)};
        begin();
        feed(&a, &d, 0.9, 150);
        worst_drop = SO_MAX(worst_drop, tests_until(&a, &d, 0.02, false, 0.3));
        feed(&a, &d, 0.02, 150);
        worst_rise = SO_MAX(worst_rise, tests_until(&a, &d, 0.9, true, 0.5));
    }
    assert_in_range(worst_drop, 1, 14);
    assert_in_range(worst_rise, 1, 14);
}

static void prior_is_shared(void **state) {
    (void)state;
    dice d = {.seed = 91};
    begin();
    assert_true(fabs(now(&a) - 0.5) < 1e-9); /* the drafter's own confidence */
    assert_true(so_accept_evidence(&a, 0, 0) == 0);
    feed(&a, &d, 0.9, 300);
    so_accept_init(&b, &shared); /* a new request starts from the shared counts */
    assert_true(fabs(now(&b) - 0.9) < 0.06);
    assert_true(so_accept_evidence(&b, 0, 0) > 0.9);
    assert_true(so_accept_evidence(&b, 1, 0) == 0);
    for (int i = 0; i < 10; i++)
        add(&b, 0, 1, 0.5, false);
    assert_true(now(&b) < 0.3); /* and deviates from them */
    assert_true(now(&a) > 0.6);
    /* a depth without tests is estimated like the one before; another drafter is not affected */
    assert_true(fabs(get(&b, 0, 2, 0.5) - now(&b)) < 1e-9);
    assert_true(fabs(get(&b, 1, 1, 0.5) - 0.5) < 1e-9);
}

/* The acceptance of each class of confidence is learned; a bad passage lowers all classes alike. */
static void classes_are_calibrated(void **state) {
    (void)state;
    dice d = {.seed = 92};
    begin();
    for (int i = 0; i < 1000; i++) {
        add(&a, 0, 1, 0.3, dice_uniform(&d) < 0.1); /* confidence 0.3, acceptance 0.1 */
        add(&a, 0, 1, 0.9, dice_uniform(&d) < 0.7);
    }
    double low = get(&a, 0, 1, 0.3), high = get(&a, 0, 1, 0.9);
    assert_true(fabs(low - 0.1) < 0.07 && fabs(high - 0.7) < 0.1);
    double any = get(&a, 0, 1, -1);
    assert_true(any > low && any < high);
    for (int i = 0; i < 30; i++)
        add(&a, 0, 1, 0.9, false);
    assert_true(get(&a, 0, 1, 0.3) < low / 1.5);
    assert_true(get(&a, 0, 1, 0.9) < high / 1.5);
}

static void odd_values_are_harmless(void **state) {
    (void)state;
    begin();
    const double odd[] = {NAN, -3, 7, INFINITY, 0, 1};
    for (size_t i = 0; i < SO_LEN(odd); i++)
        for (int k = 0; k < 50; k++)
            add(&a, 500, 500, odd[i], k % 2);
    for (size_t i = 0; i < SO_LEN(odd); i++) {
        so_accept_key low = {-1, -1, -1, odd[i]}, high = {500, 500, 500, odd[i]};
        double p = so_accept_get(&a, &low, odd[i]);
        assert_true(p > 0 && p < 1);
        p = so_accept_get(&a, &high, odd[i]);
        assert_true(p > 0 && p < 1);
    }
}

/*   root ─ 5 ─ 6        a chain, and a sibling tested after it: half its confidence, since it is
 *        └ 7            tested only if the first one was rejected */
static void tree_chances(void **state) {
    (void)state;
    so_tree t;
    float accept[SO_TREE_MAX];
    begin();
    so_tree_init(&t, 10, 1);
    int first = so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 0, 0.5f);
    int second = so_tree_add(&t, first, 6, SO_Q_POINT, -1, 0, 0.25f);
    int sibling = so_tree_add(&t, 0, 7, SO_Q_POINT, -1, 0, 0.4f);
    so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 1, 0.5f); /* another drafter makes the same guess */
    so_accept_tree(&a, &t, accept);
    assert_float_equal(accept[0], 1, 0);
    assert_float_equal(accept[first], 0.5f, 1e-6);
    assert_float_equal(accept[second], 0.25f, 1e-6);
    assert_float_equal(accept[sibling], 0.5f * 0.4f * 0.5f, 1e-6);
    so_tree_deinit(&t);
}

/* A later sibling has its own estimates, which are learned. */
static void ranks_are_learned(void **state) {
    (void)state;
    dice d = {.seed = 93};
    begin();
    for (int i = 0; i < 1000; i++) {
        so_accept_key first = {0, 1, 0, 0.8}, later = {0, 1, 1, 0.8};
        bool hit = dice_uniform(&d) < 0.7;
        so_accept_add(&a, &first, hit);
        if (!hit)
            so_accept_add(&a, &later, dice_uniform(&d) < 0.2);
    }
    so_accept_key first = {0, 1, 0, 0.8}, later = {0, 1, 1, 0.8};
    assert_true(fabs(so_accept_get(&a, &first, 0.5) - 0.7) < 0.1);
    assert_true(fabs(so_accept_get(&a, &later, 0.5) - 0.2) < 0.08);
}

/* A tested row. */
static void add_row(double confidence, bool accepted) {
    so_accept_key k = {0, 1, 0, confidence};
    so_accept_add_confidence(&a, &k);
    so_accept_add(&a, &k, accepted);
}

static double option(double price, double *kept) {
    so_draft_terms t;
    so_accept_terms(&a, 0, 0, &t);
    return so_accept_first_gain(&a, 0, 0, &t, price, kept);
}

/* The gain of a first guess beyond a price, before its row is seen: rows below it are not kept. */
static void first_gain_counts_kept_rows(void **state) {
    (void)state;
    begin();
    for (int i = 0; i < 400; i++) {
        add_row(0.3, i % 10 == 0); /* half of the rows: 0.1 */
        add_row(0.9, i % 10 != 0); /* the other half: 0.9 */
    }
    double kept;
    assert_true(fabs(option(0.5, &kept) - 0.5 * 0.4) < 0.03);
    assert_true(fabs(kept - 0.5) < 0.02);
    assert_true(fabs(option(0, &kept) - 0.5) < 0.03);
    assert_true(kept > 0.98);
    assert_true(option(0.95, &kept) < 0.01);
    assert_true(kept < 0.02);
    so_draft_terms t;
    so_accept_terms(&a, 0, 0, &t);
    for (int depth = 1; depth <= 20; depth += 3)
        for (int l = 0; l <= SO_TERMS_CLASSES; l++) {
            double confidence = l == SO_TERMS_CLASSES ? -1 : (l + 0.5) / SO_TERMS_CLASSES;
            so_accept_key k = {0, depth, 0, confidence};
            double want = so_accept_get(&a, &k, 0.7);
            assert_true(fabs(so_terms_chance(&t, depth, confidence) - want) < 1e-6);
        }
}

/* Refused rows count as rows: if only the good half is ever tested, a guess is still good only half
 * of the time. */
static void first_gain_counts_refused_rows(void **state) {
    (void)state;
    double kept;
    begin();
    for (int i = 0; i < 400; i++) {
        so_accept_key k = {0, 1, 0, 0.1};
        so_accept_add_confidence(&a, &k);
        so_accept_add_refused(&a, &k, 1);
        add_row(0.9, i % 10 != 0);
    }
    assert_true(fabs(option(0.5, &kept) - 0.5 * 0.4) < 0.03);
    assert_true(fabs(kept - 0.5) < 0.02);
}

/* Shadow. */

/* Compares a drafter's counts at a depth and rank: tests and accepted guesses. */
static void assert_rank(int drafter, int depth, int rank, int tested, int accepted) {
    const so_accept_cell *c = &shared.cells[drafter][depth - 1][rank][SO_ACCEPT_CLASSES];
    assert_int_equal(lroundf(c->tested), tested);
    assert_int_equal(lroundf(c->accepted), accepted);
}

static void assert_counts(int drafter, int depth, int tested, int accepted) {
    assert_rank(drafter, depth, 0, tested, accepted);
}

static void chain(so_tree *t, const int32_t *tokens, int n, int drafter) {
    so_tree_reset(t, 0, 0);
    for (int i = 0, node = 0; i < n; i++)
        node = so_tree_add(t, node, tokens[i], SO_Q_POINT, -1, drafter, 0.5f);
}

static void begin_shadow(so_shadow *s, so_tree *t) {
    begin();
    memset(s, 0, sizeof *s);
    so_tree_init(t, 100, 1);
}

static void shadow_counts_conditional_tests(void **state) {
    (void)state;
    so_tree t;
    static so_shadow s;
    begin_shadow(&s, &t);
    chain(&t, (int32_t[]){1, 2, 3, 4}, 4, 0);
    so_shadow_add(&s, &a, &t);
    so_shadow_advance(&s, &a, (int32_t[]){1}, 1); /* plain decoding: one token at a time */
    chain(&t, (int32_t[]){2, 9}, 2, 0);
    so_shadow_add(&s, &a, &t);
    so_shadow_advance(&s, &a, (int32_t[]){2}, 1);
    so_shadow_advance(&s, &a, (int32_t[]){7, 8}, 2); /* both chains end here */
    so_shadow_advance(&s, &a, (int32_t[]){4, 4, 4}, 3);
    assert_counts(0, 1, 2, 2);
    assert_counts(0, 2, 2, 1); /* 2 right, 9 wrong */
    assert_counts(0, 3, 1, 0);
    assert_counts(0, 4, 0, 0); /* never tested */
    assert_int_equal(a.own[0].n_seen, 2);
    so_tree_deinit(&t);
}

/* Siblings are counted as they would be tested: in order, until one is right. */
static void shadow_counts_siblings_in_order(void **state) {
    (void)state;
    so_tree t;
    static so_shadow s;
    begin_shadow(&s, &t);
    so_tree_add(&t, 0, 4, SO_Q_POINT, -1, 0, 0.5f);
    so_tree_add(&t, 0, 6, SO_Q_POINT, -1, 1, 0.5f);
    so_tree_add(&t, 0, 4, SO_Q_POINT, -1, 1, 0.5f); /* the same guess as the first drafter */
    so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 1, 0.5f);
    so_tree_add(&t, 0, 7, SO_Q_POINT, -1, 1, 0.5f);
    int row = so_tree_new_row(&t);
    so_tree_add(&t, 0, 5, SO_Q_ROW, row, 2, 0.5f);
    so_shadow_add(&s, &a, &t);
    so_shadow_advance(&s, &a, (int32_t[]){5}, 1);
    assert_counts(0, 1, 1, 0);
    assert_rank(1, 1, 1, 2, 0); /* 6 after 4, and 4 after 6: both wrong */
    assert_rank(1, 1, 2, 1, 1); /* 5 right, 7 not reached */
    assert_rank(1, 1, 0, 1, 0); /* 6, its first guess, without the others */
    assert_counts(2, 1, 0, 0);  /* sampled: not scored by equality */
    so_tree_deinit(&t);
}

/* A guess after a drafter that refused its row counts as a later sibling, and also at rank 0. */
static void shadow_counts_refusals_before(void **state) {
    (void)state;
    so_tree t;
    static so_shadow s;
    begin_shadow(&s, &t);
    a.own[1].refused_before = 1;
    chain(&t, (int32_t[]){4, 5}, 2, 1);
    so_shadow_add(&s, &a, &t);
    so_shadow_advance(&s, &a, (int32_t[]){4, 6}, 2);
    assert_rank(1, 1, 1, 1, 1);
    assert_rank(1, 1, 0, 1, 1); /* its acceptance without the other */
    assert_rank(1, 2, 0, 1, 0);
    so_tree_deinit(&t);
}

/* Two drafters with one guess: each is counted at its own confidence. */
static void shadow_keeps_confidences_apart(void **state) {
    (void)state;
    so_tree t;
    static so_shadow s;
    begin_shadow(&s, &t);
    so_tree_reset(&t, 0, 0);
    so_tree_add(&t, 0, 4, SO_Q_POINT, -1, 0, 0.2f);
    so_tree_add(&t, 0, 4, SO_Q_POINT, -1, 1, 0.9f);
    so_shadow_add(&s, &a, &t);
    so_shadow_advance(&s, &a, (int32_t[]){4}, 1);
    for (int drafter = 0; drafter < 2; drafter++)
        for (int l = 0; l < SO_ACCEPT_CLASSES; l++) {
            bool counted = l == so_terms_class(drafter ? 0.9 : 0.2);
            assert_true((shared.cells[drafter][0][0][l].tested > 0) == counted);
        }
    so_tree_deinit(&t);
}

/* Two drafters with one point: the better estimate counts, in either order, and what remains for
 * other siblings follows from it. */
static void one_point_twice_has_the_better_chance(void **state) {
    (void)state;
    so_tree t;
    static so_shadow s;
    float chance[SO_TREE_MAX];
    begin_shadow(&s, &t);
    for (int i = 0; i < 400; i++) {
        so_accept_add(&a, &(so_accept_key){0, 1, 0, 0.5}, i % 10 < 3);
        so_accept_add(&a, &(so_accept_key){1, 1, 0, 0.5}, i % 10 < 9);
    }
    double low = so_accept_get(&a, &(so_accept_key){0, 1, 0, 0.5}, 0.5);
    double high = so_accept_get(&a, &(so_accept_key){1, 1, 0, 0.5}, 0.5);
    double other = so_accept_get(&a, &(so_accept_key){2, 1, 1, 0.5}, 0.5);
    assert_true(low < 0.35 && high > 0.85);
    for (int first = 0; first < 2; first++) {
        so_tree_reset(&t, 0, 0);
        so_tree_add(&t, 0, 4, SO_Q_POINT, -1, first, 0.5f);
        so_tree_add(&t, 0, 4, SO_Q_POINT, -1, !first, 0.5f);
        so_tree_add(&t, 0, 5, SO_Q_POINT, -1, 2, 0.5f);
        so_accept_tree(&a, &t, chance);
        assert_true(fabs((double)chance[1] - high) < 1e-6);
        assert_true(fabs((double)chance[2] - (1 - high) * other) < 1e-6);
    }
    so_tree_deinit(&t);
}

static void shadow_forgets_the_oldest(void **state) {
    (void)state;
    so_tree t;
    static so_shadow s;
    begin();
    memset(&s, 0, sizeof s);
    so_tree_init(&t, 300, 1);
    int32_t tokens[250];
    for (int i = 0; i < 250; i++)
        tokens[i] = i;
    for (int round = 0; round < 100; round++) {
        chain(&t, tokens, 250, 0); /* longer than what is stored */
        so_shadow_add(&s, &a, &t);
        so_tree_reset(&t, 0, 0);
        so_shadow_add(&s, &a, &t); /* an empty tree takes no place */
    }
    so_shadow_advance(&s, &a, tokens, 250);
    assert_true(shared.cells[0][0][0][SO_ACCEPT_CLASSES].tested > SO_SHADOW_TREES - 1);
    assert_true(shared.cells[0][0][0][SO_ACCEPT_CLASSES].tested <= SO_SHADOW_TREES);
    so_tree_deinit(&t);
}

static void verdict_counts_drawn_tokens(void **state) {
    (void)state;
    so_tree t;
    static so_verdict v;
    begin();
    so_tree_init(&t, 10, 4);
    int row = so_tree_new_row(&t);
    int x = so_tree_add(&t, 0, 5, SO_Q_ROW, row, 0, 0.5f);
    so_tree_add(&t, 0, 6, SO_Q_ROW, row, 0, 0.5f);
    so_tree_add(&t, 0, 5, SO_Q_ROW, row, 1, 0.5f);
    int y = so_tree_add(&t, x, 7, SO_Q_ROW, row, 0, 0.5f);
    so_tree_add(&t, y, 8, SO_Q_POINT, -1, 0, 0.5f);
    /* 5 rejected, 6 rejected, 5 of the other drafter accepted, 7 accepted, the point 8 rejected */
    v = (so_verdict){.n_accepted = 2, .path = {(int16_t)x, (int16_t)y}, .n_tested = 5};
    for (int i = 0; i < 5; i++)
        v.tested[i] = (int16_t)i;
    so_accept_verdict(&a, &t, &v);
    assert_rank(0, 1, 0, 1, 0);
    assert_rank(0, 1, 1, 1, 0);
    assert_rank(1, 1, 1, 1, 1);
    assert_counts(0, 2, 1, 1);
    assert_counts(0, 3, 0, 0);
    so_tree_deinit(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(converges),
        cmocka_unit_test(changes_are_noticed),
        cmocka_unit_test(prior_is_shared),
        cmocka_unit_test(classes_are_calibrated),
        cmocka_unit_test(odd_values_are_harmless),
        cmocka_unit_test(tree_chances),
        cmocka_unit_test(ranks_are_learned),
        cmocka_unit_test(first_gain_counts_kept_rows),
        cmocka_unit_test(first_gain_counts_refused_rows),
        cmocka_unit_test(shadow_counts_conditional_tests),
        cmocka_unit_test(shadow_counts_siblings_in_order),
        cmocka_unit_test(shadow_counts_refusals_before),
        cmocka_unit_test(shadow_keeps_confidences_apart),
        cmocka_unit_test(one_point_twice_has_the_better_chance),
        cmocka_unit_test(shadow_forgets_the_oldest),
        cmocka_unit_test(verdict_counts_drawn_tokens),
    };
    return cmocka_run_group_tests(tests, NULL, end);
}
