/* The estimates of acceptance.h.
 *
 * A request is compared with what the shared cells predicted for the same tests: the ratio r =
 * (accepted / predicted accepted) / (rejected / predicted rejected), with a prior added to every
 * count, multiplies the odds of a new guess. So classes of confidence and depths keep their order, a
 * bad passage lowers all of them, and a request without tests (r = 1) gets the shared estimate.
 * Adding to counts instead of averaging rates keeps r stable near certainty, where ten successes of
 * ten mean little: the odds of that rate would be infinite. There is one ratio for all depths:
 * separate ratios would have independent errors, which multiply along a chain, and the planner
 * would choose the length with the largest error in its favour.
 *
 * Fading counts cannot be both stable and quick: with a memory of fifty tests they need thirty to
 * notice that a drafter has changed. So the outcomes of the last eight first guesses are kept. If the number
 * of successes among them, or among the last four, is less likely than SO_TUNE_CHANGE_ALARM under
 * the estimates of that time, the request's counts restart from the latest outcomes. At a constant
 * rate this happens about once in a hundred tests and costs little: the next eight tests correct
 * it. */
#include "plan/acceptance.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "plan/tuning.h"

enum { RECENT = SO_ACCEPT_RECENT, ALL = SO_ACCEPT_CLASSES };

static double clamp(double x, double lo, double hi) { return x >= lo ? SO_MIN(x, hi) : lo; }
static double odds(double p) { return p / (1 - p); }

void so_accept_shared_init(so_accept_shared *s, int n_drafters) {
    SO_ASSERT_OP(n_drafters, >=, 1);
    *s = (so_accept_shared){.n_drafters = n_drafters};
    s->cells = SO_NEW_N(so_accept_table, n_drafters);
    s->seen = SO_NEW_N(so_accept_table, n_drafters);
    s->confidences = SO_NEW_N(so_confidence_counts, n_drafters);
    s->seen_confidences = SO_NEW_N(so_confidence_counts, n_drafters);
}

void so_accept_shared_deinit(so_accept_shared *s) {
    free(s->cells);
    free(s->seen);
    free(s->confidences);
    free(s->seen_confidences);
    *s = (so_accept_shared){0};
}

void so_accept_init(so_accept *a, so_accept_shared *shared) {
    *a = (so_accept){shared, SO_NEW_N(so_accept_own, shared->n_drafters)};
    for (int d = 0; d < shared->n_drafters; d++)
        a->own[d].prior = SO_TUNE_OWN_PRIOR;
}

void so_accept_deinit(so_accept *a) {
    free(a->own);
    *a = (so_accept){0};
}

/* --- indices into the tables --- */

static int drafter_of(const so_accept *a, int drafter) {
    return SO_MAX(0, SO_MIN(drafter, a->shared->n_drafters - 1));
}
static int rank_of(int rank) { return SO_MAX(0, SO_MIN(rank, SO_ACCEPT_RANKS - 1)); }

static so_accept_cell *cell(so_accept_table *tables, const so_accept *a, const so_accept_key *k,
                            int class) {
    return &tables[drafter_of(a, k->drafter)][so_terms_depth(k->depth)][rank_of(k->rank)][class];
}

/* --- estimates --- */

/* The shared estimate. The drafter's confidence is the prior of depth 1, and each depth is the
 * prior of the next, so that a depth without tests equals the one before it. The prior of a rank is
 * half of the estimate for the rank before it. */
static double at_depth(const so_accept_table *t, int depth, int class, double p) {
    so_accept_cell c = (*t)[depth][0][class];
    double prior = depth == 0 ? SO_TUNE_CONFIDENCE_PRIOR : SO_TUNE_DEPTH_PRIOR;
    return ((double)c.accepted + prior * p) / ((double)c.tested + prior);
}

static double at_rank(const so_accept_table *t, int depth, int rank, int class, double p) {
    for (int r = 1; r <= rank_of(rank); r++) {
        so_accept_cell c = (*t)[depth][r][class];
        p = ((double)c.accepted + SO_TUNE_SIBLING_PRIOR * SO_TUNE_SIBLING_FACTOR * p) /
            ((double)c.tested + SO_TUNE_SIBLING_PRIOR);
    }
    return clamp(p, SO_TUNE_CHANCE_MIN, SO_TUNE_CHANCE_MAX);
}

static double shared_chance(const so_accept *a, const so_accept_key *k, double unknown) {
    const so_accept_table *t = &a->shared->cells[drafter_of(a, k->drafter)];
    double p = clamp(k->confidence >= 0 ? k->confidence : unknown, 0, 1);
    int class = so_terms_class(k->confidence), depth = so_terms_depth(k->depth);
    for (int d = 0; d <= depth; d++)
        p = at_depth(t, d, class, p);
    return at_rank(t, depth, k->rank, class, p);
}

/* The odds of the request relative to what the shared cells predicted for the same tests. */
static double own_ratio(const so_accept_own *o) {
    double right = (double)(o->accepted + o->prior) / (double)(o->expected + o->prior);
    double wrong =
        (double)(o->tested - o->accepted + o->prior) / (double)(o->tested - o->expected + o->prior);
    return right / wrong;
}

static double shift(double chance, double ratio) {
    double x = odds(chance) * ratio;
    return clamp(x / (1 + x), SO_TUNE_CHANCE_MIN, SO_TUNE_CHANCE_MAX);
}

double so_accept_get(const so_accept *a, const so_accept_key *k, double unknown) {
    return shift(shared_chance(a, k, unknown), own_ratio(&a->own[drafter_of(a, k->drafter)]));
}

double so_accept_evidence(const so_accept *a, int drafter, int rank) {
    int d = drafter_of(a, drafter);
    double n = (double)a->own[d].tested;
    for (int r = 0; r <= rank_of(rank); r++)
        n = SO_MAX(n, (double)a->shared->cells[d][0][r][ALL].tested);
    return n / (n + SO_TUNE_EVIDENCE);
}

bool so_accept_is_recovering(const so_accept *a, int drafter) {
    return a->own[drafter_of(a, drafter)].last & 3;
}

/* so_accept_get for all depths and classes at once; each depth builds on the previous one. */
void so_accept_terms(const so_accept *a, int drafter, int rank, so_draft_terms *out) {
    const so_accept_table *t = &a->shared->cells[drafter_of(a, drafter)];
    double ratio = own_ratio(&a->own[drafter_of(a, drafter)]);
    for (int l = 0; l <= ALL; l++) {
        double p = l == ALL ? SO_TUNE_UNKNOWN_CHANCE : (l + 0.5) / SO_ACCEPT_CLASSES;
        for (int d = 0; d < SO_ACCEPT_DEPTHS; d++) {
            p = at_depth(t, d, l, p);
            out->chance[d][l] = (float)shift(at_rank(t, d, d == 0 ? rank : 0, l, p), ratio);
        }
    }
}

void so_accept_sibling_terms(const so_accept *a, int drafter, int rank, so_draft_terms *out) {
    const so_accept_table *t = &a->shared->cells[drafter_of(a, drafter)];
    double ratio = own_ratio(&a->own[drafter_of(a, drafter)]);
    for (int r = 1; r < SO_TERMS_RANKS; r++)
        for (int l = 0; l <= ALL; l++) {
            double p = l == ALL ? SO_TUNE_UNKNOWN_CHANCE : (l + 0.5) / SO_ACCEPT_CLASSES;
            for (int d = 0; d < SO_ACCEPT_DEPTHS; d++) {
                p = at_depth(t, d, l, p);
                double x = at_rank(t, d, (d == 0 ? rank : 0) + r, l, p);
                out->sibling[r - 1][d][l] = (float)shift(x, ratio);
            }
        }
}

double so_accept_first_gain(const so_accept *a, int drafter, int rank, const so_draft_terms *t,
                            double price, double *kept) {
    const float *counts = a->shared->confidences[drafter_of(a, drafter)][rank_of(rank)];
    double all = (double)t->chance[0][ALL] - price;
    double weight = 0, gain = 0, above = 0;
    for (int l = 0; l < SO_ACCEPT_CLASSES; l++) {
        double n = (double)counts[l], x = (double)t->chance[0][l] - price;
        gain += n * SO_MAX(0, x);
        above += x > 0 ? n : 0;
        weight += n;
    }
    /* The weight of the observed distribution of confidences grows with its counts. */
    double known = weight / (weight + SO_TUNE_CONFIDENCE_PRIOR),
           each = weight > 0 ? known / weight : 0;
    *kept = each * above + (1 - known) * (all > 0);
    return each * gain + (1 - known) * SO_MAX(0, all);
}

/* --- learning --- */

/* Probability of `hits` successes in n ≤ 8 tests, or of a count further from the mean on the same
 * side. */
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

static double mean_predicted(const so_accept_own *o, int n) {
    double sum = 0;
    for (int i = 1; i <= n; i++)
        sum += (double)o->predicted[(o->n_seen - i) % RECENT];
    return sum / n;
}

/* Whether the outcomes of the last n first guesses are very unlikely under their estimates. */
static bool surprising(const so_accept_own *o, int n) {
    double p = clamp(mean_predicted(o, n), SO_TUNE_CHANCE_MIN, SO_TUNE_CHANCE_MAX);
    double x = odds(p) * own_ratio(o);
    int hits = __builtin_popcount(o->last & ((1u << n) - 1));
    return tail(hits, n, clamp(x / (1 + x), 0.01, 0.99)) < SO_TUNE_CHANGE_ALARM;
}

/* Restarts the request's counts after a surprise: as if eight tests had gone like the last four
 * (some of the last eight are from before the change), and with little weight for the shared estimate
 * until it has been right for a while. */
static void notice_change(so_accept_own *o) {
    if (o->n_seen < RECENT || o->tested <= RECENT ||
        !(surprising(o, RECENT / 2) || surprising(o, RECENT)))
        return;
    o->tested = RECENT;
    o->accepted = 2.0f * (float)__builtin_popcount(o->last & 15);
    o->expected = RECENT * (float)mean_predicted(o, RECENT / 2);
    o->prior = SO_TUNE_CHANGED_PRIOR;
}

static void add_own(so_accept_own *o, float predicted, bool first, bool accepted) {
    o->accepted = o->accepted * SO_TUNE_OWN_KEEP + (float)accepted;
    o->tested = o->tested * SO_TUNE_OWN_KEEP + 1;
    o->expected = o->expected * SO_TUNE_OWN_KEEP + predicted;
    o->prior += (1 - SO_TUNE_OWN_KEEP) * (SO_TUNE_OWN_PRIOR - o->prior);
    if (!first)
        return;
    o->predicted[o->n_seen++ % RECENT] = predicted;
    o->last = (uint8_t)(o->last << 1 | accepted);
    notice_change(o);
}

/* tests: 1, or less if it is not certain that the guess would have been tested. */
static void count(so_accept *a, const so_accept_key *k, int class, double accepted, double tests) {
    so_accept_cell *c = cell(a->shared->cells, a, k, class);
    c->accepted = c->accepted * SO_TUNE_SHARED_KEEP + (float)accepted;
    c->tested = c->tested * SO_TUNE_SHARED_KEEP + (float)tests;
    c = cell(a->shared->seen, a, k, class);
    c->accepted += (float)accepted;
    c->tested += (float)tests;
}

static void count_outcome(so_accept *a, const so_accept_key *k, bool accepted) {
    int class = so_terms_class(k->confidence);
    if (class != ALL)
        count(a, k, class, accepted, 1);
    count(a, k, ALL, accepted, 1);
}

void so_accept_add(so_accept *a, const so_accept_key *k, bool accepted) {
    bool first = so_terms_depth(k->depth) == 0 && k->rank <= 0;
    add_own(&a->own[drafter_of(a, k->drafter)], (float)shared_chance(a, k, 0.5), first, accepted);
    count_outcome(a, k, accepted);
}

void so_accept_add_as_first(so_accept *a, const so_accept_key *k, bool accepted) {
    count_outcome(a, &(so_accept_key){k->drafter, 1, 0, k->confidence}, accepted);
}

void so_accept_add_confidence(so_accept *a, const so_accept_key *k) {
    int drafter = drafter_of(a, k->drafter), rank = rank_of(k->rank);
    int class = so_terms_class(k->confidence);
    if (class == ALL)
        return;
    for (int l = 0; l < SO_ACCEPT_CLASSES; l++)
        a->shared->confidences[drafter][rank][l] *= SO_TUNE_SHARED_KEEP;
    a->shared->confidences[drafter][rank][class]++;
    a->shared->seen_confidences[drafter][rank][class]++;
}

void so_accept_add_refused(so_accept *a, const so_accept_key *k, double reach) {
    count(a, k, ALL, reach * so_accept_get(a, k, 0.5), reach);
}

/* --- trees --- */

int so_accept_rank(const so_accept *a, const so_tree *t, int proposal) {
    int child = t->proposals[proposal].child, rank = 0;
    if (t->nodes[child].parent == 0)
        rank = a->own[drafter_of(a, t->proposals[proposal].drafter)].refused_before;
    if (t->nodes[t->nodes[child].parent].first == proposal)
        return rank;
    bool seen[SO_TREE_MAX] = {false};
    for (int i = t->nodes[t->nodes[child].parent].first; i != proposal; i = t->proposals[i].next) {
        int other = t->proposals[i].child;
        rank += other != child && !seen[other];
        seen[other] = true;
    }
    return rank;
}

so_accept_key so_accept_key_of(const so_accept *a, const so_tree *t, int proposal) {
    const so_proposal *q = &t->proposals[proposal];
    return (so_accept_key){
        q->drafter, t->nodes[q->child].depth, so_accept_rank(a, t, proposal),
        (double)(q->kind == SO_Q_POINT ? q->confidence : t->row_confidence[q->row])};
}

void so_accept_tree(const so_accept *a, const so_tree *t, float chance[SO_TREE_MAX]) {
    for (int i = 0; i < t->n_nodes; i++)
        chance[i] = i == 0 ? 1.0f : 0.0f;
    for (int i = 0; i < t->n_nodes; i++) {
        double left = 1; /* chance that the test is reached */
        for (int p = t->nodes[i].first; p >= 0; p = t->proposals[p].next) {
            const so_proposal *q = &t->proposals[p];
            so_accept_key k = so_accept_key_of(a, t, p);
            double x = so_accept_get(a, &k, (double)q->confidence), before = chance[q->child];
            /* A point proposed twice counts once, with the higher estimate. left + before is the
             * chance that its other siblings are rejected. */
            double add = left * x;
            if (q->kind == SO_Q_POINT && before > 0)
                add = SO_MAX(0, (left + before) * x - before);
            chance[q->child] += (float)add;
            left = SO_MAX(0, left - add);
        }
    }
}

void so_accept_verdict(so_accept *a, const so_tree *t, const so_verdict *v) {
    bool on_path[SO_TREE_MAX] = {false};
    bool taken[SO_TREE_MAX] = {false}; /* nodes whose accepted child was counted */
    for (int i = 0; i < v->n_accepted; i++)
        on_path[v->path[i]] = true;
    for (int i = v->n_tested - 1; i >= 0; i--) { /* only a node's last test can have accepted */
        const so_proposal *q = &t->proposals[v->tested[i]];
        int parent = t->nodes[q->child].parent;
        bool accepted = on_path[q->child] && !taken[parent];
        taken[parent] = true;
        if (q->kind == SO_Q_POINT)
            continue;
        so_accept_key k = so_accept_key_of(a, t, v->tested[i]);
        so_accept_add(a, &k, accepted);
    }
}
