/* The arithmetic of estimate.h.
 *
 * The request's own record a/n is compared with what the shared cells promised for the very same
 * tests, m = expected/n. The ratio of their odds, r = (a/(1−a)) / (m/(1−m)) with a drawn towards m
 * by a few tests' worth, multiplies the odds of a new guess. So levels of confidence keep their
 * order, one bad stretch lowers them all, and a request without tests (r = 1) is the shared
 * estimate.
 *
 * Forgetting alone cannot be both calm and quick: over fifty tests it needs thirty to notice a
 * drafter that has turned. So the last eight outcomes are kept as bits, and when the number of
 * successes among them or among the last four is less likely than ALARM under the current estimate,
 * on its side, the record starts again from the latest of them. At a constant rate that happens
 * once in some hundred tests and costs little then: the next eight set it right. */
#include "draft/estimate.h"

#include <math.h>

#include "base/mem.h"

static const double SHARED_KEEP = 0.998, OWN_KEEP = 0.98; /* per test: 500 and 50 tests */
/* How many tests a prior is worth: the drafter's word against the shared cells, these against the
 * request's first depth, and each depth of the request against the next. */
static const double SHARED_PRIOR = 8, OWN_PRIOR = 2, DEPTH_PRIOR = 32;
static const double ALARM = 0.004; /* eight failures at a rate of one half */
static const double MIN_CHANCE = 0.001, MAX_CHANCE = 0.998;
static const float STALE = 0.1f;
enum { RECENT = 8 };

static double clamp(double x, double lo, double hi) { return x >= lo ? SO_MIN(x, hi) : lo; }

static int drafter_index(int drafter) {
    return SO_MAX(0, SO_MIN(drafter, SO_ESTIMATE_DRAFTERS - 1));
}
static int depth_index(int depth) { return SO_MAX(0, SO_MIN(depth - 1, SO_ESTIMATE_DEPTHS - 1)); }
static int level_index(double confidence) {
    if (!(confidence >= 0))
        return SO_ESTIMATE_LEVELS;
    return (int)(clamp(confidence, 0, 0.9999) * SO_ESTIMATE_LEVELS);
}

void so_estimate_init(so_estimate *e, so_estimate_shared *shared) {
    *e = (so_estimate){.shared = shared};
}

static double odds(double p) { return p / (1 - p); }

/* Shared estimate of depths 0 … depth: each is the prior of the next, the drafter's word of the
 * first, so that a depth never tested is thought of like the one before it. */
static double shared_chance(const so_estimate *e, int drafter, int depth, double confidence,
                            double guess) {
    double p = clamp(confidence >= 0 ? confidence : guess, 0, 1);
    int level = level_index(confidence);
    for (int k = 0; k <= depth; k++) {
        const so_estimate_cell *c = &e->shared->cells[drafter][k][level];
        p = (c->accepted + SHARED_PRIOR * p) / (c->tested + SHARED_PRIOR);
    }
    return clamp(p, MIN_CHANCE, MAX_CHANCE);
}

/* The odds ratio of the request against the shared cells, likewise from depth to depth. */
static double own_ratio(const so_estimate *e, int drafter, int depth) {
    double ratio = 1;
    for (int k = 0; k <= depth; k++) {
        const so_estimate_own *o = &e->own[drafter][k];
        if (!(o->tested > 0))
            continue;
        double promised = clamp(o->expected / o->tested, MIN_CHANCE, MAX_CHANCE);
        double x = odds(promised) * ratio, prior = k == 0 ? OWN_PRIOR : DEPTH_PRIOR;
        double own = (o->accepted + prior * x / (1 + x)) / (o->tested + prior);
        ratio = odds(clamp(own, MIN_CHANCE, MAX_CHANCE)) / odds(promised);
    }
    return ratio;
}

double so_estimate_get(const so_estimate *e, int drafter, int depth, double confidence,
                       double guess) {
    int d = drafter_index(drafter), k = depth_index(depth);
    double x = odds(shared_chance(e, d, k, confidence, guess)) * own_ratio(e, d, k);
    return clamp(x / (1 + x), MIN_CHANCE, MAX_CHANCE);
}

/* Chance of `hits` successes in n ≤ 8 tests or a count still further from the mean. */
static double tail(int hits, int n, double p) {
    double term = pow(1 - p, n), sum = 0;
    bool low = hits < p * n;
    for (int k = 0; k <= n; k++) {
        if (low ? k <= hits : k >= hits)
            sum += term;
        term *= (double)(n - k) / (k + 1) * odds(p);
    }
    return sum;
}

/* Starts the record again when the last four or eight outcomes contradict it: as if eight tests had
 * gone like the last four, since some of the eight are from before the turn. */
static bool notice_change(so_estimate_own *o) {
    double p = clamp((o->accepted + 0.5) / (o->tested + 1), 0.01, 0.99);
    int four = __builtin_popcount(o->last & 15), eight = __builtin_popcount(o->last);
    if (o->n_last < RECENT || o->tested <= RECENT ||
        (tail(four, RECENT / 2, p) >= ALARM && tail(eight, RECENT, p) >= ALARM))
        return false;
    o->expected *= RECENT / o->tested;
    o->accepted = 2.0f * (float)four;
    o->tested = RECENT;
    return true;
}

/* What was learned of greater depths before the turn no longer holds, and little is tested there
 * after it: they follow the first again. */
static void forget_deeper(so_estimate_own own[SO_ESTIMATE_DEPTHS], int depth) {
    for (int k = depth + 1; k < SO_ESTIMATE_DEPTHS; k++) {
        own[k].accepted *= STALE;
        own[k].tested *= STALE;
        own[k].expected *= STALE;
    }
}

void so_estimate_add(so_estimate *e, int drafter, int depth, double confidence, bool accepted) {
    int d = drafter_index(drafter), k = depth_index(depth);
    int levels[2] = {level_index(confidence), SO_ESTIMATE_LEVELS};
    so_estimate_own *o = &e->own[d][k];
    double promised = shared_chance(e, d, k, confidence, 0.5);
    o->accepted = (float)(o->accepted * OWN_KEEP + accepted);
    o->tested = (float)(o->tested * OWN_KEEP + 1);
    o->expected = (float)(o->expected * OWN_KEEP + promised);
    o->last = (uint8_t)(o->last << 1 | accepted);
    o->n_last = (uint8_t)SO_MIN(o->n_last + 1, RECENT);
    if (notice_change(o))
        forget_deeper(e->own[d], k);
    for (int i = 0; i < 2 && (i == 0 || levels[1] != levels[0]); i++) {
        so_estimate_cell *c = &e->shared->cells[d][k][levels[i]];
        c->accepted = (float)(c->accepted * SHARED_KEEP + accepted);
        c->tested = (float)(c->tested * SHARED_KEEP + 1);
    }
}

double so_estimate_sure(const so_estimate *e, int drafter) {
    int d = drafter_index(drafter);
    double n = e->shared->cells[d][0][SO_ESTIMATE_LEVELS].tested;
    n = SO_MAX(n, e->own[d][0].tested);
    return n / (n + 2);
}

bool so_estimate_hopeful(const so_estimate *e, int drafter) {
    return e->own[drafter_index(drafter)][0].last & 3;
}

void so_estimate_tree(const so_estimate *e, const so_tree *t, float accept[SO_TREE_MAX]) {
    for (int i = 0; i < t->n_nodes; i++)
        accept[i] = i == 0 ? 1.0f : 0.0f;
    for (int i = 0; i < t->n_nodes; i++) {
        double left = 1; /* chance that the test is reached */
        for (int p = t->nodes[i].first; p >= 0; p = t->proposals[p].next) {
            const so_proposal *q = &t->proposals[p];
            const so_node *child = &t->nodes[q->child];
            bool point = q->kind == SO_Q_POINT;
            double chance = so_estimate_get(e, q->drafter, child->depth,
                                            point ? (double)child->accept : -1, child->accept);
            float *a = &accept[q->child];
            if (point && *a > 0) { /* rejected once, a point is rejected again: the better counts */
                *a = (float)SO_MAX((double)*a, left * chance);
                continue;
            }
            *a += (float)(left * chance);
            left *= 1 - chance;
        }
    }
}

void so_estimate_verdict(so_estimate *e, const so_tree *t, const so_verdict *v) {
    bool on_path[SO_TREE_MAX] = {false};
    bool taken[SO_TREE_MAX] = {false}; /* nodes whose accepted child has been counted */
    for (int i = 0; i < v->n_accepted; i++)
        on_path[v->path[i]] = true;
    for (int i = v->n_tested - 1; i >= 0; i--) { /* the last test of a node is the accepted one */
        const so_proposal *q = &t->proposals[v->tested[i]];
        const so_node *child = &t->nodes[q->child];
        bool accepted = on_path[q->child] && !taken[child->parent];
        taken[child->parent] = true;
        if (q->kind != SO_Q_POINT)
            so_estimate_add(e, q->drafter, child->depth, -1, accepted);
    }
}
