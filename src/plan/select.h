/* Selects the guesses of one pass: the set that maximises
 *
 *   Σ value − price · (t(rows) − t(base rows) + Σ ms)
 *
 * over all sets that contain the parents of their members. `value` is the chance that a guess's
 * whole path is accepted, `price` is λ of plan.h. A child's value never exceeds its parent's, so
 * for a given size the best set is that of the largest values, and it contains all parents. The
 * answer is therefore a prefix of one sorted list. All prefixes are scanned, because t(n) has
 * steps.
 *
 * Pure arithmetic over its own memory. Thread: the engine thread. */
#ifndef SO_PLAN_SELECT_H
#define SO_PLAN_SELECT_H

#include "plan/costs.h"

typedef struct so_guess {
    float value;
    float evidence; /* depth 1: evidence about the drafter (so_accept_evidence); else −1 */
    float ms;       /* cost of the test beyond the row */
    int owner, node;
} so_guess;

/* Guesses in a heap; grows and is reused from step to step. Zero-initialise. */
typedef struct so_selection {
    so_guess *guesses; /* [cap]; after so_selection_choose the chosen ones are at the end, the
                        * best one last */
    int n, cap;
} so_selection;
void so_selection_deinit(so_selection *s);
void so_selection_clear(so_selection *s);
/* Guesses with a value below SO_TUNE_MIN_VALUE or NaN are left out; values above 1 count as 1. */
void so_selection_add(so_selection *s, so_guess g);

/* Totals of a set. */
typedef struct so_sum {
    double tokens, test_ms, evidence;
    int rows, n_evidence;
} so_sum;
void so_sum_add(so_sum *sum, const so_guess *g);
/* In [0,1]: 1 − mean evidence about its drafters. */
double so_sum_uncertainty(const so_sum *sum);

typedef struct so_selection_limits {
    double price;    /* λ: tokens per millisecond */
    double margin;   /* minimum gain in tokens: below it no guess is chosen */
    double max_risk; /* in plain passes: (extra time / plain time) · uncertainty */
    int max_rows;    /* limit of the whole pass */
} so_selection_limits;

/* Before the call *sum holds the totals of the rows that are in the pass anyway; the chosen guesses
 * are added. Returns the number n of chosen guesses; so_selection_get(s, k), k < n, returns them,
 * the best first. */
int so_selection_choose(so_selection *s, const so_costs *c, const so_selection_limits *l,
                        so_sum *sum);
const so_guess *so_selection_get(const so_selection *s, int k);

#endif
