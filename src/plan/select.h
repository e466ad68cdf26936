/* The best set of guesses for one pass: the one that maximises
 *
 *   Σ value − price · (t(rows) − t(base rows) + Σ ms)
 *
 * over all sets that contain the parents of their members. `value` is the chance of a guess's whole
 * path, `price` the tokens that a millisecond is worth (λ of plan.h). A child's value never exceeds
 * its parent's, so for a given size the best set is that of the largest values, and it contains its
 * parents: one sorted list and its prefixes hold the answer. All prefixes are scanned, because t(n)
 * has steps.
 *
 * Pure arithmetic over memory of its own. One thread. */
#ifndef SO_PLAN_SELECT_H
#define SO_PLAN_SELECT_H

#include "plan/costs.h"

typedef struct so_guess {
    float value;
    float evidence; /* for guesses of depth 1: what is known of the drafter; else −1 */
    float ms;       /* what testing it costs beyond its row */
    int owner, node;
} so_guess;

/* Guesses in a heap; growing, reused from step to step. Zero-initialise. */
typedef struct so_selection {
    so_guess *guesses; /* [cap]; the chosen ones end up at the back, the best one last */
    int n, cap;
} so_selection;
void so_selection_deinit(so_selection *s);
void so_selection_clear(so_selection *s);
/* Values that are not positive numbers are left out; above 1 counts as 1. */
void so_selection_add(so_selection *s, so_guess g);

/* What a set comes to. */
typedef struct so_sum {
    double tokens, test_ms, evidence;
    int rows, n_evidence;
} so_sum;
void so_sum_add(so_sum *sum, const so_guess *g);
/* In [0,1]: how little is known of the drafters in it. */
double so_sum_doubt(const so_sum *sum);

typedef struct so_selection_limits {
    double price;    /* tokens per millisecond */
    double margin;   /* least gain in tokens for which anything is chosen */
    double max_risk; /* in plain passes: (extra time / plain time) · doubt */
    int max_rows;    /* of the whole pass */
} so_selection_limits;

/* Chooses: *sum holds what is in the pass in any case, and then also what was chosen. How many;
 * so_selection_get(s, k), k below that, are they, the best first. */
int so_selection_choose(so_selection *s, const so_costs *c, const so_selection_limits *l,
                        so_sum *sum);
const so_guess *so_selection_get(const so_selection *s, int k);

#endif
