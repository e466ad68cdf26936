/* The search of select.h over a heap: at most max_rows guesses are taken from it, so the others
 * need not be sorted. Equal values are ordered by owner, then node, so that parents precede
 * children and the order is a function of the input. The risk of a set is its cost beyond a plain
 * pass times the uncertainty about its drafters; for known drafters only the objective counts. */
#include "plan/select.h"

#include <stdlib.h>

#include "plan/tuning.h"

void so_selection_deinit(so_selection *s) {
    free(s->guesses);
    *s = (so_selection){0};
}

void so_selection_clear(so_selection *s) { s->n = 0; }

void so_selection_add(so_selection *s, so_guess g) {
    if (!(g.value >= SO_TUNE_MIN_VALUE))
        return;
    g.value = SO_MIN(g.value, 1.0f);
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 256;
        s->guesses = so_realloc(s->guesses, (size_t)s->cap * sizeof *s->guesses);
    }
    s->guesses[s->n++] = g;
}

static bool before(const so_guess *a, const so_guess *b) {
    if (a->value != b->value)
        return a->value > b->value;
    return a->owner != b->owner ? a->owner < b->owner : a->node < b->node;
}

static void sift_down(so_guess *h, int n, int i) {
    so_guess g = h[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && before(&h[child + 1], &h[child]))
            child++;
        if (before(&g, &h[child]))
            break;
        h[i] = h[child];
    }
    h[i] = g;
}

static void heapify(so_selection *s) {
    for (int i = s->n / 2 - 1; i >= 0; i--)
        sift_down(s->guesses, s->n, i);
}

/* Moves the best of the n guesses of the heap to the place after the shrunken heap: the k-th best
 * of N (from 0) ends up at index N − 1 − k. */
static const so_guess *pop(so_selection *s, int n) {
    so_guess top = s->guesses[0];
    s->guesses[0] = s->guesses[n - 1];
    s->guesses[n - 1] = top;
    if (n > 1)
        sift_down(s->guesses, n - 1, 0);
    return &s->guesses[n - 1];
}

void so_sum_add(so_sum *sum, const so_guess *g) {
    sum->tokens += (double)g->value;
    sum->test_ms += (double)g->ms;
    sum->rows++;
    if (g->evidence >= 0) {
        sum->evidence += (double)g->evidence;
        sum->n_evidence++;
    }
}

double so_sum_uncertainty(const so_sum *sum) {
    return sum->n_evidence > 0 ? 1 - sum->evidence / sum->n_evidence : 1;
}

int so_selection_choose(so_selection *s, const so_costs *c, const so_selection_limits *l,
                        so_sum *sum) {
    double base_ms = so_costs_pass(c, sum->rows) + sum->test_ms, base = sum->tokens;
    double best = l->margin;
    so_sum at = *sum;
    int chosen = 0;
    if (!(base_ms > 0)) /* unknown costs: a plain pass first */
        return 0;
    heapify(s);
    for (int k = 0; k < s->n && at.rows < l->max_rows; k++) {
        so_sum_add(&at, pop(s, s->n - k));
        double extra_ms = so_costs_pass(c, at.rows) + at.test_ms - base_ms;
        double gain = at.tokens - base - l->price * extra_ms;
        if (gain <= best || extra_ms / base_ms * so_sum_uncertainty(&at) > l->max_risk)
            continue;
        best = gain;
        chosen = k + 1;
        *sum = at;
    }
    return chosen;
}

const so_guess *so_selection_get(const so_selection *s, int k) { return &s->guesses[s->n - 1 - k]; }
