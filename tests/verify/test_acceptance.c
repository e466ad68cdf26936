/* Acceptance rates, and the bound of lenience, against the formulas of theory.h. Exact by
 * enumeration where possible. Sampled tests have a fixed seed and a limit of four standard errors
 * (with a random seed one false alarm in 16,000 per comparison). */
#include "so_lossless.h"
#include "so_test.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "verify/theory.h"

enum { V = 5 };
static const float P[V] = {0.35f, 0.25f, 0.2f, 0.15f, 0.05f};
static const float Q[V] = {0.2f, 0.3f, 0.05f, 0.15f, 0.3f};
static double p[V], q[V]; /* the same, with sum 1 in double */

static int setup(void **state) {
    (void)state;
    double sp = 0, sq = 0;
    for (int i = 0; i < V; i++) {
        sp += (double)P[i];
        sq += (double)Q[i];
    }
    for (int i = 0; i < V; i++) {
        p[i] = (double)P[i] / sp;
        q[i] = (double)Q[i] / sq;
    }
    return 0;
}

static void near(double a, double b, double tolerance) {
    if (!(fabs(a - b) <= tolerance))
        fail_msg("%.17g is not %.17g", a, b);
}

/* Chains, or `width` draws at each node, from one row. */
typedef struct iid_drafter {
    int width, depth;
    so_q_kind kind;
} iid_drafter;

static void iid_propose(void *user, const int32_t *text, int n, so_tree *t, so_verify_rng *draws) {
    const iid_drafter *d = user;
    (void)text;
    (void)n;
    for (int node = 0; node < t->n_nodes; node++) {
        if (t->nodes[node].depth >= d->depth)
            continue;
        int row = so_tree_new_row(t);
        memcpy(so_tree_row(t, row), Q, sizeof Q);
        double w[V], total = 1;
        memcpy(w, q, sizeof w);
        for (int k = 0; k < d->width; k++) {
            int32_t x = draws->draw(draws, 0, w, V, total);
            so_tree_add(t, node, x, d->kind, row, 0, 0.5f);
            if (d->kind == SO_Q_ROW_SET) {
                total -= w[x];
                w[x] = 0;
            }
        }
    }
}

static double lenience;
static void lenient_verify(const so_tree *t, so_verify_row *row, void *user, so_verify_rng *rng,
                           double *scratch, so_verdict *out) {
    so_verify_reject(t, row, user, rng, lenience, scratch, out);
}

static so_toy target;
static so_lossless_case iid_case(iid_drafter *d, int n_out) {
    so_toy_init_iid(&target, P, V);
    return (so_lossless_case){
        .name = "iid", .target = &target, .n_out = n_out, .propose = iid_propose, .user = d};
}

/* --- reject --- */

/* Theorem 3.5 and equation (1), exactly. */
static void test_tokens_per_round(void **state) {
    (void)state;
    double alpha = so_theory_accept_reject(p, q, V);
    for (int gamma = 1; gamma <= 5; gamma++) {
        iid_drafter d = {1, gamma, SO_Q_ROW};
        so_lossless_case c = iid_case(&d, 1);
        near(so_lossless_tokens_per_round(&c), so_theory_expected_tokens(alpha, gamma), 1e-12);
    }
    /* More draws per node accept more, without replacement more than with. */
    iid_drafter one = {1, 1, SO_Q_ROW}, with = {2, 1, SO_Q_ROW}, without = {2, 1, SO_Q_ROW_SET};
    so_lossless_case a = iid_case(&one, 1), b = iid_case(&with, 1), c = iid_case(&without, 1);
    assert_true(so_lossless_tokens_per_round(&a) < so_lossless_tokens_per_round(&b));
    assert_true(so_lossless_tokens_per_round(&b) < so_lossless_tokens_per_round(&c));
}

/* k proposals from one row, exactly: the verifier against the formula, and the formula against the
 * walk written out. */
static void test_several_proposals(void **state) {
    (void)state;
    double r[V], mass, last = 0;
    memcpy(r, p, sizeof r);
    for (int k = 1; k <= 6; k++) {
        iid_drafter d = {k, 1, SO_Q_ROW};
        so_lossless_case c = iid_case(&d, 1);
        double a = so_theory_accept_several(p, q, V, k), left = 1;
        near(so_lossless_tokens_per_round(&c), 1 + a, 1e-12);
        assert_true(a > last);
        last = a;
        memcpy(r, p, sizeof r);
        for (int j = 0; j < k; j++) {
            left *= 1 - so_theory_accept_reject(r, q, V);
            mass = 0;
            for (int i = 0; i < V; i++)
                mass += r[i] = fmax(0, r[i] - q[i]);
            for (int i = 0; i < V; i++)
                r[i] /= mass;
        }
        near(a, 1 - left, 1e-12);
    }
    near(so_theory_accept_several(p, q, V, 1), so_theory_accept_reject(p, q, V), 1e-15);
    near(so_theory_accept_several(p, p, V, 3), 1, 1e-15);
    near(so_theory_accept_several(p, q, V, 0), 0, 0);
    const double one[V] = {1}, other[V] = {0, 1};
    near(so_theory_accept_several(one, other, V, 8), 0, 0);
}

static const float *iid_row(void *user, int node) {
    (void)node;
    return user;
}

static int32_t inverse(const double *w, int n, double u) {
    int32_t i = 0;
    while (i < n - 1 && (u -= w[i]) >= 0)
        i++;
    return i;
}

/* The same with the production random source: accepted over tested, tokens per round. */
static void test_reject_measured(void **state) {
    (void)state;
    enum { GAMMA = 5, ROUNDS = 200000 };
    double alpha = so_theory_accept_reject(p, q, V), scratch[2 * V];
    long tested = 0, accepted = 0;
    so_tree *t = SO_NEW(so_tree);
    so_tree_init(t, V, GAMMA);
    for (int i = 0; i < ROUNDS; i++) {
        so_rng_key key = {.seed = (uint64_t)i, .purpose = SO_RNG_DRAFT};
        so_verify_rng_keyed rng;
        so_verdict v;
        so_verify_rng_keyed_init(&rng, (uint64_t)i, 0);
        so_tree_reset(t, 0, 0);
        for (int k = 0, node = 0; k < GAMMA; k++) {
            int row = so_tree_new_row(t);
            memcpy(so_tree_row(t, row), Q, sizeof Q);
            int32_t x = inverse(q, V, so_rng_uniform(&key, (uint32_t)k));
            node = so_tree_add(t, node, x, SO_Q_ROW, row, 0, 0.5f);
        }
        so_verify_reject(t, iid_row, (void *)(uintptr_t)P, &rng.base, 1, scratch, &v);
        tested += v.n_tested;
        accepted += v.n_accepted;
    }
    double measured = (double)accepted / (double)tested;
    double per_round = 1 + (double)accepted / ROUNDS,
           want = so_theory_expected_tokens(alpha, GAMMA);
    print_message("reject: alpha %.4f, formula %.4f; tokens per round %.4f, formula %.4f\n",
                  measured, alpha, per_round, want);
    near(measured, alpha, 4 * sqrt(alpha * (1 - alpha) / (double)tested));
    near(per_round / want, 1, 0.01);
    so_tree_deinit(t);
    free(t);
}

/* --- match --- */

static int32_t gumbel_argmax(const double *w, uint64_t seed, uint32_t position) {
    so_rng_key key = {.seed = seed, .position = position, .purpose = SO_RNG_TOKEN};
    int32_t best = 0;
    double most = -INFINITY;
    for (int32_t i = 0; i < V; i++) {
        double z = log(w[i]) - log(-log(so_rng_uniform(&key, (uint32_t)i)));
        if (z > most) {
            most = z;
            best = i;
        }
    }
    return best;
}

typedef struct seeded {
    const so_tree *t;
    uint64_t seed;
} seeded;

static int32_t seeded_choice(void *user, int node) {
    const seeded *s = user;
    return gumbel_argmax(p, s->seed, (uint32_t)(s->t->root_pos + s->t->nodes[node].depth + 1));
}

/* Draft and target share the noise. The text is that of plain sampling, token for token, and the
 * acceptance rate is that of the formula. */
static void test_match_measured(void **state) {
    (void)state;
    enum { GAMMA = 4, TEXT = 400000 };
    double alpha = so_theory_accept_match(p, q, V);
    long tested = 0, accepted = 0;
    so_tree *t = SO_NEW(so_tree);
    so_tree_init(t, V, 0);
    for (int at = 0; at < TEXT;) {
        so_verdict v;
        so_tree_reset(t, 0, at);
        for (int k = 0, node = 0; k < GAMMA; k++)
            node = so_tree_add(t, node, gumbel_argmax(q, 9, (uint32_t)(at + k + 1)), SO_Q_POINT, -1,
                               0, 0.5f);
        so_verify_match(t, seeded_choice, &(seeded){t, 9}, &v);
        for (int i = 0; i < v.n_accepted; i++)
            assert_int_equal(t->nodes[v.path[i]].token,
                             gumbel_argmax(p, 9, (uint32_t)(at + i + 1)));
        assert_int_equal(v.token, gumbel_argmax(p, 9, (uint32_t)(at + v.n_accepted + 1)));
        tested += v.n_tested;
        accepted += v.n_accepted;
        at += v.n_accepted + 1;
    }
    double measured = (double)accepted / (double)tested;
    print_message("match: alpha %.4f, formula %.4f, at least %.4f; reject has %.4f\n", measured,
                  alpha, so_theory_accept_match_bound(so_theory_accept_reject(p, q, V)),
                  so_theory_accept_reject(p, q, V));
    near(measured, alpha, 4 * sqrt(alpha * (1 - alpha) / (double)tested));
    so_tree_deinit(t);
    free(t);
}

/* --- lenient --- */

/* One proposal: s = min(q, p/L) + (1 − Σ min(q, p/L))·norm(max(0, p − q)), and A.5's acceptance. */
static void test_lenient_exact(void **state) {
    (void)state;
    iid_drafter d = {1, 1, SO_Q_ROW};
    so_lossless_case c = iid_case(&d, 1);
    c.verify = lenient_verify;
    for (lenience = 1; lenience > 0.05; lenience -= 0.15) {
        double s[V], b = so_theory_accept_lenient(p, q, V, lenience);
        double a = so_theory_accept_reject(p, q, V), beyond = 0, variation = 0;
        so_lossless_enumerate(&c, s);
        near(so_lossless_tokens_per_round(&c), 1 + b, 1e-12);
        for (int i = 0; i < V; i++) {
            double l = fmin(q[i], p[i] / lenience);
            near(s[i], l + (1 - b) * fmax(0, p[i] - q[i]) / (1 - a), 1e-12);
            assert_true(s[i] <= p[i] / lenience + 1e-12);
            variation += fabs(s[i] - p[i]) / 2;
            beyond += fmax(0, l - p[i]); /* no residual can compensate this */
        }
        near(variation, beyond, 1e-12);
        assert_int_equal(variation > 1e-3, lenience < 0.9);
    }
}

/* Chains, and several proposals of either kind: no token is more likely than p/L. */
static void test_lenient_bound(void **state) {
    (void)state;
    const iid_drafter shapes[] = {{1, 3, SO_Q_ROW}, {3, 1, SO_Q_ROW}, {3, 1, SO_Q_ROW_SET}};
    bool tight = false;
    for (size_t i = 0; i < SO_LEN(shapes); i++)
        for (lenience = 1; lenience > 0.05; lenience -= 0.15) {
            iid_drafter d = shapes[i];
            so_lossless_case c = iid_case(&d, 1);
            double s[V];
            c.verify = lenient_verify;
            so_lossless_enumerate(&c, s);
            for (int x = 0; x < V; x++) {
                assert_true(s[x] <= p[x] / lenience + 1e-12);
                tight |= lenience < 0.8 && s[x] > p[x] / lenience - 1e-12;
            }
        }
    assert_true(tight); /* the bound is attained, so no smaller one holds */
}

/* The suite that all exact modes pass must detect lenience as a difference. */
static void test_lenient_is_lossy(void **state) {
    (void)state;
    iid_drafter d = {1, 2, SO_Q_ROW};
    so_lossless_case c = iid_case(&d, 2);
    c.verify = lenient_verify;
    lenience = 1;
    so_lossless_check(&c);
    lenience = 0.5;
    assert_true(so_lossless_gap(&c) > 1e-3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens_per_round), cmocka_unit_test(test_several_proposals),
        cmocka_unit_test(test_reject_measured),  cmocka_unit_test(test_match_measured),
        cmocka_unit_test(test_lenient_exact),    cmocka_unit_test(test_lenient_bound),
        cmocka_unit_test(test_lenient_is_lossy),
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
