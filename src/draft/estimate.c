/* The arithmetic of estimate.h.
 *
 * What the request accepted and rejected is compared with what the shared cells promised for the
 * very same tests: r = (accepted / promised accepted) / (rejected / promised rejected), every count
 * raised by a few, multiplies the odds of a new guess. So levels of confidence and depths keep
 * their order, one bad stretch lowers them all, and a request without tests (r = 1) is the shared
 * estimate. Raising counts, not drawing rates together, keeps r calm near certainty, where ten
 * successes out of ten say little: the odds of a rate would be infinite. One ratio for all depths,
 * because errors multiply along a chain and a plan picks the length that they flatter most.
 *
 * Forgetting alone cannot be both calm and quick: over fifty tests it needs thirty to notice a
 * drafter that has turned. So the outcomes of the last eight first guesses are kept, and when the
 * number of successes among them or among the last four is less likely than ALARM under the
 * estimates of their time, the record starts again from the latest of them. At a constant rate that
 * happens once in some hundred tests and costs little then: the next eight set it right. */
#include "draft/estimate.h"

#include <math.h>

#include "base/mem.h"

static const float SHARED_KEEP = 0.998f, OWN_KEEP = 0.98f; /* per test: 500 and 50 tests */
/* How many tests a prior is worth: the drafter's word against the first depth, and each depth
 * against the next. */
static const double WORD_PRIOR = 8, DEPTH_PRIOR = 32;
/* How many right ones and wrong ones the shared promise is worth against the request's record: at
 * first, and after a turn. */
static const float OWN_PRIOR = 6, DOUBT = 1;
static const double ALARM = 0.005; /* about eight failures at a rate of one half */
static const double MIN_CHANCE = 0.001, MAX_CHANCE = 0.998;
enum { RECENT = SO_ESTIMATE_RECENT };

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
    for (int d = 0; d < SO_ESTIMATE_DRAFTERS; d++)
        e->own[d].prior = OWN_PRIOR;
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
        double prior = k == 0 ? WORD_PRIOR : DEPTH_PRIOR;
        p = (c->accepted + prior * p) / (c->tested + prior);
    }
    return clamp(p, MIN_CHANCE, MAX_CHANCE);
}

/* How the odds of the request compare with what the shared cells promised for the same tests. */
static double own_ratio(const so_estimate_own *o) {
    double right = (double)(o->accepted + o->prior) / (double)(o->expected + o->prior);
    double wrong =
        (double)(o->tested - o->accepted + o->prior) / (double)(o->tested - o->expected + o->prior);
    return right / wrong;
}

double so_estimate_get(const so_estimate *e, int drafter, int depth, double confidence,
                       double guess) {
    int d = drafter_index(drafter), k = depth_index(depth);
    double x = odds(shared_chance(e, d, k, confidence, guess)) * own_ratio(&e->own[d]);
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

static double mean_promise(const so_estimate_own *o, int n) {
    double sum = 0;
    for (int i = 1; i <= n; i++)
        sum += (double)o->promised[(o->n_seen - i) % RECENT];
    return sum / n;
}

/* The last n first guesses went as the estimates they were tested under hardly allow. */
static bool surprising(const so_estimate_own *o, int n) {
    double x = odds(clamp(mean_promise(o, n), MIN_CHANCE, MAX_CHANCE)) * own_ratio(o);
    int hits = __builtin_popcount(o->last & ((1u << n) - 1));
    return tail(hits, n, clamp(x / (1 + x), 0.01, 0.99)) < ALARM;
}

/* Starts the record again when they did: as if eight tests had gone like the last four, since some
 * of the eight are from before the turn, and the shared promise is worth little until it has been
 * right for a while. */
static void notice_change(so_estimate_own *o) {
    if (o->n_seen < RECENT || o->tested <= RECENT ||
        !(surprising(o, RECENT / 2) || surprising(o, RECENT)))
        return;
    o->tested = RECENT;
    o->accepted = 2.0f * (float)__builtin_popcount(o->last & 15);
    o->expected = RECENT * (float)mean_promise(o, RECENT / 2);
    o->prior = DOUBT;
}

static void add_own(so_estimate_own *o, float promised, bool first, bool accepted) {
    o->accepted = o->accepted * OWN_KEEP + (float)accepted;
    o->tested = o->tested * OWN_KEEP + 1;
    o->expected = o->expected * OWN_KEEP + promised;
    o->prior += (1 - OWN_KEEP) * (OWN_PRIOR - o->prior);
    if (!first)
        return;
    o->promised[o->n_seen++ % RECENT] = promised;
    o->last = (uint8_t)(o->last << 1 | accepted);
    notice_change(o);
}

void so_estimate_add(so_estimate *e, int drafter, int depth, double confidence, bool accepted) {
    int d = drafter_index(drafter), k = depth_index(depth);
    int levels[2] = {level_index(confidence), SO_ESTIMATE_LEVELS};
    add_own(&e->own[d], (float)shared_chance(e, d, k, confidence, 0.5), k == 0, accepted);
    for (int i = 0; i < 2 && (i == 0 || levels[1] != levels[0]); i++) {
        so_estimate_cell *c = &e->shared->cells[d][k][levels[i]];
        c->accepted = c->accepted * SHARED_KEEP + (float)accepted;
        c->tested = c->tested * SHARED_KEEP + 1;
        c = &e->shared->seen[d][k][levels[i]];
        c->accepted += (float)accepted;
        c->tested += 1;
    }
}

void so_estimate_skip(so_estimate *e, int drafter, int depth, double confidence) {
    int d = drafter_index(drafter), k = depth_index(depth);
    float chance = (float)so_estimate_get(e, drafter, depth, confidence, 0.5);
    so_estimate_cell *c = &e->shared->cells[d][k][SO_ESTIMATE_LEVELS];
    c->accepted = c->accepted * SHARED_KEEP + chance;
    c->tested = c->tested * SHARED_KEEP + 1;
    c = &e->shared->seen[d][k][SO_ESTIMATE_LEVELS];
    c->accepted += chance;
    c->tested += 1;
}

double so_estimate_sure(const so_estimate *e, int drafter) {
    int d = drafter_index(drafter);
    double n = e->shared->cells[d][0][SO_ESTIMATE_LEVELS].tested;
    n = SO_MAX(n, (double)e->own[d].tested);
    return n / (n + 2);
}

bool so_estimate_hopeful(const so_estimate *e, int drafter) {
    return e->own[drafter_index(drafter)].last & 3;
}

/* What the plan may know of a proposal: of a point its own confidence, of a drawn token how sure
 * its drafter was of the row. */
static double sure_of(const so_tree *t, const so_proposal *q) {
    return (double)(q->kind == SO_Q_POINT ? t->nodes[q->child].accept : t->row_sure[q->row]);
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
            double chance =
                so_estimate_get(e, q->drafter, child->depth, sure_of(t, q), (double)child->accept);
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
            so_estimate_add(e, q->drafter, child->depth, sure_of(t, q), accepted);
    }
}
