/* The paper's tables to the printed digit, where they can be reproduced; the formulas against brute
 * force. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "base/rng.h"
#include "verify/theory.h"

static void near(double a, double b, double tolerance) {
    if (!(fabs(a - b) <= tolerance))
        fail_msg("%.17g is not %.17g", a, b);
}

static bool prints_as(double ours, double printed, int digits) {
    char a[32], b[32];
    snprintf(a, sizeof a, "%.*f", digits, ours);
    snprintf(b, sizeof b, "%.*f", digits, printed);
    return strcmp(a, b) == 0;
}

static void test_expected_tokens(void **state) {
    (void)state;
    near(so_theory_expected_tokens(0.8, 10), (1 - pow(0.8, 11)) / (1 - 0.8), 1e-13);
    near(so_theory_expected_tokens(0, 5), 1, 0);
    near(so_theory_expected_tokens(1, 5), 6, 0);
    near(so_theory_expected_tokens(0.7, 0), 1, 0);
    /* N-gram drafting, four guesses: expected accepted tokens, without the correction or bonus. */
    near(so_theory_expected_tokens(0.5, 4) - 1, 0.94, 0.005);
    near(so_theory_expected_tokens(0.7, 4) - 1, 1.77, 0.005);
    near(so_theory_expected_tokens(0.9, 4) - 1, 3.10, 0.005);
    /* Stratos 1.1.1: more than 4 at 0.8 and 10. */
    assert_true(so_theory_expected_tokens(0.8, 10) > 4);
}

static void test_table1(void **state) {
    (void)state;
    for (int i = 0; i < SO_THEORY_N1; i++) {
        const so_theory_row1 *r = &so_theory_table1[i];
        assert_true(prints_as(so_theory_operations(r->alpha, r->gamma, 0), r->operations, 2));
        assert_true(prints_as(so_theory_speedup(r->alpha, r->gamma, 0), r->speed, 2));
        near(so_theory_memory(r->alpha, r->gamma) * so_theory_expected_tokens(r->alpha, r->gamma),
             1, 1e-15);
    }
}

/* Nine of twelve rows follow from the printed inputs; the others miss the last digit by one. */
static void test_table4(void **state) {
    (void)state;
    const bool comes_out[SO_THEORY_N4] = {1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0};
    for (int i = 0; i < SO_THEORY_N4; i++) {
        const so_theory_row4 *r = &so_theory_table4[i];
        double ours = so_theory_speedup(r->alpha, r->gamma, r->c);
        assert_int_equal(prints_as(ours, r->expected, 1), comes_out[i]);
        near(ours, r->expected, 0.07);
        /* The rounding of the printed α and c explains each of them. */
        double least = so_theory_speedup(r->alpha - 0.005, r->gamma, r->c + 0.005);
        double most = so_theory_speedup(r->alpha + 0.005, r->gamma, r->c - 0.005);
        assert_true(least < r->expected + 0.05 && most > r->expected - 0.05);
    }
}

static void test_bigram(void **state) {
    (void)state;
    assert_true(prints_as(so_theory_speedup(0.2, 3, 0), 1.25, 2));
}

static void test_lenience(void **state) {
    (void)state;
    for (int i = 0; i < SO_THEORY_N_LENIENCE; i++) {
        const so_theory_lenience *r = &so_theory_lenience_rows[i];
        double ours =
            so_theory_speedup(r->alpha_temp0, SO_THEORY_LENIENCE_GAMMA, SO_THEORY_LENIENCE_C);
        assert_true(prints_as(ours, r->speed_temp0, 1));
        /* At temperature 1 no gamma reaches the printed factor with the printed α. */
        int best = so_theory_best_gamma(r->alpha_temp1, SO_THEORY_LENIENCE_C);
        double most = so_theory_speedup(r->alpha_temp1, best, SO_THEORY_LENIENCE_C);
        assert_true(most < r->speed_temp1);
        assert_false(prints_as(most, r->speed_temp1, 1));
    }
}

static void test_best_gamma(void **state) {
    (void)state;
    for (int a = 0; a <= 100; a++)
        for (int k = 0; k <= 60; k++) {
            double alpha = a / 100.0, c = k / 50.0;
            int best = 0;
            for (int g = 1; g <= SO_THEORY_MAX_GAMMA; g++)
                if (so_theory_speedup(alpha, g, c) >
                    so_theory_speedup(alpha, best, c) * (1 + 1e-12))
                    best = g;
            int ours = so_theory_best_gamma(alpha, c);
            near(so_theory_speedup(alpha, ours, c), so_theory_speedup(alpha, best, c),
                 1e-11 * so_theory_speedup(alpha, best, c));
            /* Corollary 3.9: some gamma gains if α > c, none if α < c. */
            if (a * 50 != k * 100)
                assert_int_equal(ours > 0, alpha > c);
            if (alpha > c)
                assert_true(so_theory_speedup(alpha, ours, c) >= (1 + alpha) / (1 + c) - 1e-12);
        }
    assert_int_equal(so_theory_best_gamma(0.8, 0), SO_THEORY_MAX_GAMMA);
    assert_int_equal(so_theory_best_gamma(1, 0.5), SO_THEORY_MAX_GAMMA);
}

/* "up to ~60 % higher than the improvement factor with a fixed γ" */
static void test_oracle(void **state) {
    (void)state;
    double most = 0;
    for (int a = 50; a <= 95; a++)
        for (int k = 1; k <= 20; k++) {
            double alpha = a / 100.0, c = k / 200.0;
            double fixed = so_theory_speedup(alpha, so_theory_best_gamma(alpha, c), c);
            double ratio = so_theory_oracle_speedup(alpha, c) / fixed;
            assert_true(ratio > 1);
            most = fmax(most, ratio);
        }
    near(most, 1.6, 0.05);
    near(so_theory_oracle_tokens(0.75), 4, 0);
    near(so_theory_oracle_speedup(0.75, 0), 4, 0);
    assert_true(isinf(so_theory_oracle_tokens(1)));
}

static void random_row(uint64_t seed, uint32_t at, int n, double zeros, double *row) {
    so_rng_key key = {.seed = seed, .position = at, .purpose = SO_RNG_TEST};
    double total = 0;
    for (int i = 0; i < n; i++) {
        double u = so_rng_uniform(&key, (uint32_t)(2 * i));
        bool zero = i > 0 && so_rng_uniform(&key, (uint32_t)(2 * i + 1)) < zeros;
        total += row[i] = zero ? 0 : -log(u);
    }
    for (int i = 0; i < n; i++)
        row[i] /= total;
}

/* The formula evaluated directly, term by term. */
static double match_as_written(const double *p, const double *q, int n) {
    double a = 0;
    for (int i = 0; i < n; i++) {
        double races = 0;
        for (int j = 0; j < n && p[i] > 0 && q[i] > 0; j++)
            races += fmax(p[j] / p[i], q[j] / q[i]);
        a += races > 0 ? 1 / races : 0;
    }
    return a;
}

static void test_match_formula(void **state) {
    (void)state;
    enum { N = 500 };
    static double p[N], q[N];
    for (uint64_t seed = 0; seed < 60; seed++) {
        random_row(seed, 0, N, seed % 3 ? 0.4 : 0, p);
        random_row(seed, 1, N, seed % 2 ? 0.4 : 0, q);
        for (int i = 0; i < N && seed % 5 == 0; i++) /* equal ratios, and unequal by a million */
            q[i] = i % 7 ? p[i] : p[i] * 1e-6;
        near(so_theory_accept_match(p, q, N), match_as_written(p, q, N), 1e-12);
    }
}

/* Order of the methods, and the bound, over random pairs. */
static void test_acceptances(void **state) {
    (void)state;
    for (uint64_t seed = 0; seed < 2000; seed++) {
        double p[6], q[6];
        int n = 2 + (int)(seed % 5);
        random_row(seed, 0, n, seed % 3 ? 0.3 : 0, p);
        random_row(seed, 1, n, seed % 3 ? 0.3 : 0, q);
        double reject = so_theory_accept_reject(p, q, n), match = so_theory_accept_match(p, q, n);
        assert_true(so_theory_accept_rejection_sampling(p, q, n) <= reject + 1e-15);
        assert_true(match <= reject + 1e-15);
        assert_true(match >= so_theory_accept_match_bound(reject) - 1e-15);
        double before = reject;
        for (double l = 0.9; l > 0.05; l -= 0.1) {
            double lenient = so_theory_accept_lenient(p, q, n, l);
            assert_true(lenient >= before - 1e-15 && lenient <= 1 + 1e-15);
            before = lenient;
        }
        near(so_theory_accept_match(p, p, n), 1, 1e-14);
        near(so_theory_accept_reject(p, p, n), 1, 1e-14);
    }
    double p[] = {0.5, 0.5, 0}, q[] = {0, 0, 1};
    near(so_theory_accept_reject(p, q, 3), 0, 0);
    near(so_theory_accept_match(p, q, 3), 0, 0);
    near(so_theory_accept_rejection_sampling(p, q, 3), 0, 0);
    double half[] = {0.5, 0.5}, sharp[] = {0.75, 0.25};
    near(so_theory_accept_reject(half, sharp, 2), 0.75, 0);
    near(so_theory_accept_rejection_sampling(half, sharp, 2), 0.5, 0);
    near(so_theory_accept_match(half, sharp, 2), 1 / (1 + 1.) + 1 / (1 + 3.), 1e-15);
    near(so_theory_accept_match_bound(0.75), 0.6, 1e-15);
}

/* Drafting ahead against synchronous drafting at equal gamma: never more than twice as fast, equal
 * without hits, and with every draft hidden the time of a pass is all that counts. */
static void test_drafting_ahead(void **state) {
    (void)state;
    for (int a = 1; a < 10; a++)
        for (int k = 0; k <= 10; k++)
            for (int g = 1; g <= 8; g++) {
                so_theory_ssd x = {.alpha = a / 10.0,
                                   .c = 0.05 * k,
                                   .hit_rate = k / 10.0,
                                   .row_cost = 0.05,
                                   .fan_cost = 1.2,
                                   .sync = true};
                double sync = so_theory_ssd_synchronous(&x, g),
                       ahead = so_theory_ssd_speedup(&x, g);
                assert_true(ahead <= 2 * sync * (1 + 1e-12));
                x.hit_rate = 0;
                assert_float_equal(so_theory_ssd_speedup(&x, g), sync, 1e-12);
            }
    so_theory_ssd x = {.alpha = 0.8, .c = 0.1, .hit_rate = 1, .fan_cost = 1, .sync = true};
    assert_float_equal(so_theory_ssd_speedup(&x, 5), so_theory_expected_tokens(0.8, 5), 1e-12);
    x.c = 0.4; /* a draft takes two passes */
    assert_float_equal(so_theory_ssd_speedup(&x, 5), so_theory_expected_tokens(0.8, 5) / 2, 1e-12);
    x = (so_theory_ssd){
        .alpha = 0.8, .c = 0.3, .hit_rate = 0.75, .row_cost = 0.05, .fan_cost = 1.3};
    double tokens = so_theory_expected_tokens(0.8, 3);
    double time = 0.75 * 1.17 + 0.25; /* hits take gamma · c · fan_cost, which exceeds the pass */
    assert_true(fabs(so_theory_ssd_speedup(&x, 3) - (0.75 * tokens + 0.25) / time) < 1e-12);
    assert_int_equal(so_theory_ssd_best(&x, 16), 3);
    assert_int_equal(so_theory_ssd_best_synchronous(&x, 16), 3);
}

static bool is_same(double a, double b) { return fabs(a - b) < 1e-12; }

/* Two streams that share one resource take at least the sum of what they take alone; contention of 2 is
 * drafting and verifying in turn. */
static void contention_slows_what_overlaps(void **state) {
    (void)state;
    for (int d = 0; d <= 30; d++) {
        double draft = 0.1 * d;
        assert_true(is_same(so_theory_both(1, draft, 1, 1), SO_MAX(1, draft)));
        assert_true(is_same(so_theory_both(1, draft, 2, 2), 1 + draft));
        assert_true(is_same(so_theory_beside(1, draft, 2, 2), SO_MIN(1 + draft, 2)));
        assert_true(
            is_same(so_theory_both(1, draft, 1.5, 1.2), so_theory_both(draft, 1, 1.2, 1.5)));
    }
    /* The draft takes 0.4 · 1.25 = 0.5; in it the target does 0.5 / 1.6 of its work. */
    assert_true(is_same(so_theory_beside(1, 0.4, 1.6, 1.25), 0.5 + 1 - 0.5 / 1.6));
    so_theory_ssd x = {.alpha = 0.8, .c = 0.3, .hit_rate = 1, .row_cost = 0.05, .fan_cost = 1};
    x.sync = true;
    x.slow = x.draft_slow = 2;
    for (int g = 1; g <= 8; g++) {
        x.scaling = 0;
        double one = so_theory_ssd_synchronous(&x, g);
        assert_true(is_same(so_theory_ssd_speedup(&x, g), one));
        x.scaling = 1.7;
        assert_true(is_same(so_theory_ssd_synchronous(&x, g), 1.7 * one));
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_expected_tokens),
        cmocka_unit_test(test_table1),
        cmocka_unit_test(test_table4),
        cmocka_unit_test(test_bigram),
        cmocka_unit_test(test_lenience),
        cmocka_unit_test(test_best_gamma),
        cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_acceptances),
        cmocka_unit_test(test_match_formula),
        cmocka_unit_test(test_drafting_ahead),
        cmocka_unit_test(contention_slows_what_overlaps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
