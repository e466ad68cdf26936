/* The gain of speculation as formulas, from Leviathan, Kalman, Matias, "Fast Inference from
 * Transformers via Speculative Decoding" (2023); each names its equation or theorem. Also the
 * acceptance rate of seed-exact matching, which is not in the paper. Pure functions in double; any
 * thread.
 *
 *   alpha  α, the chance that a guess is accepted, given that it is tested
 *   gamma  guesses per round
 *   c      time of one draft step over time of one target pass (c_hat: the same in operations)
 *   L      lenience
 *   D      distance of p and q, 1 − Σ min(p, q) (definition 3.2) */
#ifndef SO_VERIFY_THEORY_H
#define SO_VERIFY_THEORY_H

#include <stdbool.h>

/* The longest chain that fits a tree; the best gamma is capped here. */
enum { SO_THEORY_MAX_GAMMA = 255 };

/* Equation (1): expected tokens per round, 1 … gamma+1, including the correction or bonus token.
 * alpha 1 gives gamma+1. */
double so_theory_expected_tokens(double alpha, int gamma);
/* Theorem 3.8: time of plain decoding over time of speculative decoding. */
double so_theory_speedup(double alpha, int gamma, double c);
/* Theorem 3.11: operations of speculative decoding over operations of plain decoding. */
double so_theory_operations(double alpha, int gamma, double c_hat);
/* Section 3.4: reads of weights and KV cache, over those of plain decoding. */
double so_theory_memory(double alpha, int gamma);

/* Section 3.5: the gamma with the highest speed-up, the smallest if several are equal, 0 if none
 * beats plain decoding. With c = 0 a longer draft is always better, and the result is the cap. */
int so_theory_best_gamma(double alpha, double c);
/* Section 3.5: with an oracle that drafts exactly the guesses that will be accepted. */
double so_theory_oracle_tokens(double alpha); /* infinite at alpha 1 */
double so_theory_oracle_speedup(double alpha, double c);

/* Drafting ahead (draft/async.h): a draft for the end of a round is made while the target verifies the
 * round. Times in units of t(1), the target's pass over one row. */
typedef struct so_theory_ssd {
    double alpha, c;
    double hit_rate; /* h: the draft of the round's outcome is ready */
    double row_cost; /* t(n) = 1 + row_cost · (n − 1) */
    double fan_cost; /* time of one guess for all outcomes, over c; at least 1 */
    bool sync;       /* a miss is drafted synchronously, or not at all */
    /* Contention, for example for the bandwidth of one memory: the time of a pass of the target while
     * the draft works, over its time alone; and the draft's while the target works. 0: 1. */
    double slow, draft_slow;
    /* Synchronous drafting can have all cores for each model in turn: how much faster passes are with all
     * of them than with one model's part. 0: 1. */
    double scaling;
} so_theory_ssd;
/* Time of work that takes t alone, if other work, which takes d alone, begins with it and slows it by
 * `slow` while both run; the other one is slowed by draft_slow. */
double so_theory_beside(double t, double d, double slow, double draft_slow);
/* Time until both are done; without contention max(t, d). */
double so_theory_both(double t, double d, double slow, double draft_slow);
/* With T = t(gamma+1) and d = gamma · c · fan_cost, a hit takes until both are done, which is max(T, d)
 * without contention. A miss takes T beside d, and gamma · c with a synchronous draft; without one t(1)
 * beside d. Tokens per time of all rounds, against plain decoding. */
double so_theory_ssd_speedup(const so_theory_ssd *x, int gamma);
/* Drafting between the passes: rounds take T + gamma · c, divided by `scaling`. */
double so_theory_ssd_synchronous(const so_theory_ssd *x, int gamma);
/* The gamma up to `most` with the highest speed-up; the smallest if several are equal. */
int so_theory_ssd_best(const so_theory_ssd *x, int most);
int so_theory_ssd_best_synchronous(const so_theory_ssd *x, int most);

/* α of one guess, from the two distributions p and q, [n], each with sum 1. */

/* `reject`, theorem 3.5: Σ min(p, q) = 1 − D. */
double so_theory_accept_reject(const double *p, const double *q, int n);
/* `reject` with k proposals drawn independently from one q (Stratos, "iterative speculative
 * sampling"): the chance that one of them is accepted. k = 1 is so_theory_accept_reject. */
double so_theory_accept_several(const double *p, const double *q, int n, int k);
/* Plain rejection sampling, A.2: min q/p over the support of p. */
double so_theory_accept_rejection_sampling(const double *p, const double *q, int n);
/* `lenient`, A.5: Σ min(p/L, q). */
double so_theory_accept_lenient(const double *p, const double *q, int n, double lenience);
/* `match` with shared Gumbel noise: Σᵢ 1/Σⱼ max(pⱼ/pᵢ, qⱼ/qᵢ). */
double so_theory_accept_match(const double *p, const double *q, int n);
/* A lower bound of so_theory_accept_match, (1−D)/(1+D). alpha is the acceptance rate of `reject`
 * for the same p and q, 1 − D. */
double so_theory_accept_match_bound(double alpha);

/* --- the paper's printed inputs and results, for comparison with ours --- */

typedef struct so_theory_row1 {
    double alpha;
    int gamma;
    double operations, speed; /* printed, c = c_hat = 0 */
} so_theory_row1;
enum { SO_THEORY_N1 = 6 };
extern const so_theory_row1 so_theory_table1[SO_THEORY_N1];

typedef struct so_theory_row4 {
    const char *task, *draft;
    int temp, gamma;
    double alpha, c, expected, measured; /* printed; alpha is rounded to two digits */
} so_theory_row4;
enum { SO_THEORY_N4 = 12 };
extern const so_theory_row4 so_theory_table4[SO_THEORY_N4];

typedef struct so_theory_lenience {
    double lenience;
    double alpha_temp0, speed_temp0; /* printed, gamma 8 */
    double alpha_temp1, speed_temp1; /* printed, gamma not given */
} so_theory_lenience;
enum { SO_THEORY_N_LENIENCE = 4, SO_THEORY_LENIENCE_GAMMA = 8 };
#define SO_THEORY_LENIENCE_C 0.015
extern const so_theory_lenience so_theory_lenience_rows[SO_THEORY_N_LENIENCE];

#endif
