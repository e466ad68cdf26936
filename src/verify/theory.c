/* The paper's formulas, and its printed tables to check them against. Nothing is fitted: the tables
 * are inputs of the comparison, never of a formula. Pure functions; any thread.
 *
 * Acceptance rate of `match` with shared noise.
 *   Claim: Σᵢ 1/Σⱼ max(pⱼ/pᵢ, qⱼ/qᵢ).
 *   Why: draft and target take the argmax of log q + g and of log p + g with the same Gumbel noise
 *   g. E_j = exp(−g_j) are independent exponential variables. Token i wins both if
 *   E_j/E_i > max(p_j/p_i, q_j/q_i) for all j ≠ i. Given E_i this has the probability
 *   exp(−E_i Σ_{j≠i} max(…)). Integrating over E_i gives 1/(1 + Σ_{j≠i} max(…)), and the 1 is the
 *   term j = i.
 *
 * Lower bound of this rate.
 *   Claim: (1 − D)/(1 + D).
 *   Why: max(p_j/p_i, q_j/q_i) ≤ max(p_j, q_j)/min(p_i, q_i), so term i is at least
 *   min(p_i, q_i)/Σ_j max(p_j, q_j), and Σ min = 1 − D, Σ max = 1 + D.
 *
 * Acceptance of k proposals from one q.
 *   Claim: 1 − m_k, where m_0 = 1, S_0 = 0, S_{j+1} = S_j + m_j, m_j = Σ max(0, p − S_j q).
 *   Why: let R_j be the part of p that is still to be emitted after j rejections, with mass m_j, so
 *   that R_0 = p. The next proposal is accepted with probability Σ min(R_j/m_j, q), and a rejection
 *   leaves R_{j+1} = max(0, R_j − m_j q), of which m_{j+1}/m_j is the chance of that rejection. By
 *   induction R_j = max(0, p − S_j q), and the chance of k rejections is the product m_k. */
#include "verify/theory.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"

/* A sum instead of (1 − α^(γ+1))/(1 − α): exact at α = 1 and accurate near it. */
double so_theory_expected_tokens(double alpha, int gamma) {
    double e = 1;
    for (int i = 0; i < gamma; i++)
        e = 1 + alpha * e;
    return e;
}

double so_theory_speedup(double alpha, int gamma, double c) {
    return so_theory_expected_tokens(alpha, gamma) / (gamma * c + 1);
}

double so_theory_operations(double alpha, int gamma, double c_hat) {
    return (gamma * c_hat + gamma + 1) / so_theory_expected_tokens(alpha, gamma);
}

double so_theory_memory(double alpha, int gamma) {
    return 1 / so_theory_expected_tokens(alpha, gamma);
}

/* One more guess adds α^(γ+1) tokens and c of time, so γ+1 is better than γ if
 *   α^(γ+1)·(γc + 1) > c·E(γ).
 * From γ to γ+1, left minus right changes by −α^(γ+1)(1−α)(γc + c + 1) ≤ 0. So once γ+1 is not
 * better than γ, no larger γ is. */
/* --- drafting ahead --- */

static double pass_time(const so_theory_ssd *x, int gamma) { return 1 + x->row_cost * gamma; }

static double one_if_0(double x) { return x > 0 ? x : 1; }

double so_theory_beside(double t, double d, double slow, double draft_slow) {
    return d * draft_slow >= t * slow ? t * slow : t + d * draft_slow * (1 - 1 / slow);
}

double so_theory_both(double t, double d, double slow, double draft_slow) {
    bool draft_is_last = d * draft_slow > t * slow;
    return draft_is_last ? so_theory_beside(d, t, draft_slow, slow)
                         : so_theory_beside(t, d, slow, draft_slow);
}

double so_theory_ssd_synchronous(const so_theory_ssd *x, int gamma) {
    return so_theory_expected_tokens(x->alpha, gamma) * one_if_0(x->scaling) /
           (pass_time(x, gamma) + gamma * x->c);
}

double so_theory_ssd_speedup(const so_theory_ssd *x, int gamma) {
    double tokens = so_theory_expected_tokens(x->alpha, gamma), h = x->hit_rate;
    double t = pass_time(x, gamma), d = gamma * x->c * x->fan_cost;
    double f = one_if_0(x->slow), g = one_if_0(x->draft_slow);
    double miss_tokens = x->sync ? tokens : 1;
    double miss = so_theory_beside(x->sync ? t : 1, d, f, g) + (x->sync ? gamma * x->c : 0);
    return (h * tokens + (1 - h) * miss_tokens) / (h * so_theory_both(t, d, f, g) + (1 - h) * miss);
}

int so_theory_ssd_best(const so_theory_ssd *x, int most) {
    int best = 0;
    for (int g = 1; g <= most; g++)
        if (so_theory_ssd_speedup(x, g) > so_theory_ssd_speedup(x, best))
            best = g;
    return best;
}

int so_theory_ssd_best_synchronous(const so_theory_ssd *x, int most) {
    int best = 0;
    for (int g = 1; g <= most; g++)
        if (so_theory_ssd_synchronous(x, g) > so_theory_ssd_synchronous(x, best))
            best = g;
    return best;
}

int so_theory_best_gamma(double alpha, double c) {
    int gamma = 0;
    double tokens = 1, gain = alpha; /* E(γ), α^(γ+1) */
    while (gamma < SO_THEORY_MAX_GAMMA && gain * (gamma * c + 1) > c * tokens) {
        gamma++;
        tokens += gain;
        gain *= alpha;
    }
    return gamma;
}

double so_theory_oracle_tokens(double alpha) { return 1 / (1 - alpha); }

/* A round drafts α/(1−α) tokens on average and emits one more: 1/(1−α) over 1 + cα/(1−α). */
double so_theory_oracle_speedup(double alpha, double c) { return 1 / (1 - alpha + c * alpha); }

double so_theory_accept_reject(const double *p, const double *q, int n) {
    return so_theory_accept_lenient(p, q, n, 1);
}

double so_theory_accept_several(const double *p, const double *q, int n, int k) {
    double mass = 1, scale = 0;
    for (int j = 0; j < k; j++) {
        scale += mass;
        mass = 0;
        for (int i = 0; i < n; i++)
            mass += fmax(0, p[i] - scale * q[i]);
    }
    return 1 - mass;
}

double so_theory_accept_rejection_sampling(const double *p, const double *q, int n) {
    double least = 1;
    for (int i = 0; i < n; i++)
        if (p[i] > 0)
            least = fmin(least, q[i] / p[i]);
    return least;
}

double so_theory_accept_lenient(const double *p, const double *q, int n, double lenience) {
    double a = 0;
    for (int i = 0; i < n; i++)
        a += fmin(p[i] / lenience, q[i]);
    return a;
}

/* With the tokens sorted by descending p/q, max(pⱼ/pᵢ, qⱼ/qᵢ) is the first ratio for all j up to i
 * and the second for all j after it. So the inner sum is two running sums, and the time is that of
 * sorting. */
typedef struct racer {
    double ratio, p, q;
} racer;

static int by_ratio_down(const void *a, const void *b) {
    double x = ((const racer *)a)->ratio, y = ((const racer *)b)->ratio;
    return (x < y) - (x > y);
}

double so_theory_accept_match(const double *p, const double *q, int n) {
    racer *r = SO_NEW_N(racer, n);
    int n_racers = 0;
    double before = 0, after = 0, a = 0; /* Σ p up to i, Σ q after i */
    for (int i = 0; i < n; i++)
        if (p[i] > 0 || q[i] > 0)
            r[n_racers++] = (racer){q[i] > 0 ? p[i] / q[i] : INFINITY, p[i], q[i]};
    qsort(r, (size_t)n_racers, sizeof *r, by_ratio_down);
    for (int i = 0; i < n_racers; i++)
        r[i].ratio = before += r[i].p; /* from here on the field holds Σ p up to i */
    for (int i = n_racers - 1; i >= 0; i--) {
        if (r[i].p > 0 && r[i].q > 0)
            a += 1 / (r[i].ratio / r[i].p + after / r[i].q);
        after += r[i].q;
    }
    free(r);
    return a;
}

double so_theory_accept_match_bound(double alpha) { return alpha / (2 - alpha); }

/* --- printed values --- */

const so_theory_row1 so_theory_table1[SO_THEORY_N1] = {
    {0.6, 2, 1.53, 1.96}, {0.7, 3, 1.58, 2.53}, {0.8, 2, 1.23, 2.44},
    {0.8, 5, 1.63, 3.69}, {0.9, 2, 1.11, 2.71}, {0.9, 10, 1.60, 6.86},
};

/* With the rounded α of the table the fifth, sixth and twelfth rows give 2.35, 1.93 and 1.54, which
 * do not round to the printed values. The other rows do. */
const so_theory_row4 so_theory_table4[SO_THEORY_N4] = {
    {"EnDe", "T5-small", 0, 7, 0.75, 0.02, 3.2, 3.4},
    {"EnDe", "T5-base", 0, 7, 0.80, 0.04, 3.3, 2.8},
    {"EnDe", "T5-large", 0, 7, 0.82, 0.11, 2.5, 1.7},
    {"EnDe", "T5-small", 1, 7, 0.62, 0.02, 2.3, 2.6},
    {"EnDe", "T5-base", 1, 5, 0.68, 0.04, 2.4, 2.4},
    {"EnDe", "T5-large", 1, 3, 0.71, 0.11, 2.0, 1.4},
    {"CNNDM", "T5-small", 0, 5, 0.65, 0.02, 2.4, 3.1},
    {"CNNDM", "T5-base", 0, 5, 0.73, 0.04, 2.6, 3.0},
    {"CNNDM", "T5-large", 0, 3, 0.74, 0.11, 2.0, 2.2},
    {"CNNDM", "T5-small", 1, 5, 0.53, 0.02, 1.9, 2.3},
    {"CNNDM", "T5-base", 1, 3, 0.55, 0.04, 1.8, 2.2},
    {"CNNDM", "T5-large", 1, 3, 0.56, 0.11, 1.6, 1.7},
};

const so_theory_lenience so_theory_lenience_rows[SO_THEORY_N_LENIENCE] = {
    {1.0, 0.75, 3.3, 0.62, 2.5},
    {0.5, 0.75, 3.3, 0.71, 3.1},
    {0.3, 0.80, 3.9, 0.76, 3.6},
    {0.1, 0.87, 4.9, 0.84, 5.0},
};
