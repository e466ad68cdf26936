/* Which outcomes of a round are drafted ahead.
 *
 *   P(outcome) = P(the accepted path reaches its node) · P(it ends there) · P(this token follows)
 *
 * The first two come from the acceptance of guesses by confidence, the third from how often the
 * candidate with this number and chance has been the token. All are counts of earlier rounds that
 * fade; before any round they are priors. With one acceptance rate α for all guesses, P falls
 * geometrically with the depth of the node, α^i (1 − α), except for the bonus after the last guess,
 * α^γ: the geometric allocation of the paper on speculative speculative decoding. Here each guess
 * has a rate of its own.
 *
 * How many. More outcomes are hit more often, but make each level slower, so that fewer levels are
 * ready in time. With a + b·F the time of a level over F outcomes and W the time that is left, the
 * likeliest F outcomes are worth
 *
 *   H(F) · Σ_{k ≤ L} β^k      H: the sum of their probabilities, L = W / (a + b·F), at most the depth
 *                             that was asked for; β: the acceptance of a guess
 *
 * and the best F is taken. Everything here is known before a guess of the coming round is sampled
 * (async.h, step 2). */
#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "draft/async_impl.h"

static const float KEEP = 0.995f;        /* of the counts, per observation */
static const double FIT_KEEP = 0.95;     /* of the regression, per level */
static const double PRIOR_ACCEPT = 0.75; /* weight 4 */
static const float PRIOR_TOKEN = 4;      /* weight */
/* Before a level was measured: share of the window that one takes, and the growth per outcome. */
static const double PRIOR_LEVEL = 0.2, PRIOR_SLOPE = 0.03;
enum { MIN_FITS = 4 };

void so_async_estimates_init(so_async_estimates *e) {
    for (int c = 0; c < SO_ASYNC_CLASSES; c++) {
        float p = (float)(PRIOR_ACCEPT * (0.5 + (c + 0.5) / (2 * SO_ASYNC_CLASSES)));
        float chance = 0.75f / (float)(1 << c);
        e->accept[c] = (so_async_rate){4 * p, 4};
        for (int bonus = 0; bonus < 2; bonus++)
            for (int k = 0; k < SO_ASYNC_PLACES; k++)
                e->token[bonus][k][c] = (so_async_rate){PRIOR_TOKEN * chance, PRIOR_TOKEN};
    }
}

static void count(so_async_rate *r, bool yes) {
    r->yes = r->yes * KEEP + (yes ? 1 : 0);
    r->all = r->all * KEEP + 1;
}

static double rate(const so_async_rate *r) { return (double)r->yes / (double)r->all; }

static int class_of(double x) {
    int c = (int)(x * SO_ASYNC_CLASSES);
    return c < 0 ? 0 : SO_MIN(c, SO_ASYNC_CLASSES - 1);
}

static const so_proposal *first_proposal_of(const so_tree *t, int node) {
    for (int i = t->nodes[t->nodes[node].parent].first; i >= 0; i = t->proposals[i].next)
        if (t->proposals[i].child == node)
            return &t->proposals[i];
    return NULL;
}

/* The chance that a guess is accepted once its parent is. */
static int accept_class(const so_tree *t, int node) {
    const so_proposal *p = first_proposal_of(t, node);
    return class_of(p ? (double)p->confidence : 0);
}

/* 0: above one half, 1: above one quarter, … */
static int token_class(const so_ahead_candidate *c) {
    int k = 0;
    while (k + 1 < SO_ASYNC_CLASSES && c->chance * (float)(2 << k) <= 1)
        k++;
    return k;
}

/* 0 to 7, then 8-11, 12-19, 20-35 and 36-… */
static int place_of(int candidate) {
    int place = 8;
    for (int at = 12, n = 8; candidate >= at && place + 1 < SO_ASYNC_PLACES; at += n, n *= 2)
        place++;
    return candidate < 8 ? candidate : place;
}

static so_async_rate *rate_of(so_async_estimates *e, bool bonus, const so_ahead_candidate *c,
                              int candidate) {
    return &e->token[bonus][place_of(candidate)][token_class(c)];
}

int so_async_learn(so_async_estimates *e, const so_ahead_job *a, int node, int32_t token) {
    const so_tree *t = &a->tree;
    bool bonus = t->nodes[node].first < 0;
    int found = -1;
    for (int i = node; i > 0; i = t->nodes[i].parent)
        count(&e->accept[accept_class(t, i)], true);
    for (int i = t->nodes[node].first; i >= 0; i = t->proposals[i].next)
        if (first_proposal_of(t, t->proposals[i].child) == &t->proposals[i])
            count(&e->accept[accept_class(t, t->proposals[i].child)], false);
    for (int k = 0; node < a->n_nodes && k < a->n_candidates[node]; k++) {
        const so_ahead_candidate *c = &a->candidates[node][k];
        count(rate_of(e, bonus, c, k), c->token == token);
    }
    for (int i = 0; i < a->n_outcomes && found < 0; i++)
        if (a->outcomes[i].node == node && a->outcomes[i].token == token)
            found = i;
    return found;
}

/* --- the choice --- */

typedef struct option {
    so_ahead_job *a;
    int node, candidate;
    float chance;
} option;

static int by_chance(const void *x, const void *y) {
    const option *a = x, *b = y;
    if (a->chance != b->chance)
        return a->chance > b->chance ? -1 : 1;
    if (a->a != b->a)
        return a->a < b->a ? -1 : 1;
    return a->node != b->node ? a->node - b->node : a->candidate - b->candidate;
}

/* All outcomes of a job with their probabilities; at most `cap`, those of the first nodes. */
static int list_options(so_async_estimates *e, so_ahead_job *a, option *out, int cap) {
    double reach[SO_AHEAD_NODES] = {1}, ends[SO_AHEAD_NODES];
    const so_tree *t = &a->tree;
    int n = 0;
    for (int i = 0; i < t->n_nodes && i < SO_AHEAD_NODES; i++)
        ends[i] = 1;
    for (int i = 1; i < t->n_nodes && i < SO_AHEAD_NODES; i++) {
        int parent = t->nodes[i].parent;
        double p = rate(&e->accept[accept_class(t, i)]);
        reach[i] = reach[parent] * p;
        ends[parent] = SO_MAX(ends[parent] - p, 0.02);
    }
    for (int i = 0; i < a->n_nodes; i++) {
        bool bonus = t->nodes[i].first < 0;
        for (int k = 0; k < a->n_candidates[i] && n < cap; k++) {
            const so_ahead_candidate *c = &a->candidates[i][k];
            double p = rate(rate_of(e, bonus, c, k));
            out[n++] = (option){a, i, k, (float)(reach[i] * ends[i] * p)};
        }
    }
    return n;
}

static void take(const option *o) {
    so_ahead_job *a = o->a;
    so_ahead_outcome *to = &a->outcomes[a->n_outcomes++];
    *to = (so_ahead_outcome){.node = o->node,
                             .token = a->candidates[o->node][o->candidate].token,
                             .candidate = o->candidate,
                             .chance = o->chance,
                             .last = a->candidates[o->node][o->candidate].token};
    for (int k = 0; k < SO_AHEAD_DEPTH; k++)
        to->token_at[k] = -1;
}

void so_async_observe_level(so_async_core *c, int n, double ms) {
    double *sums[] = {&c->fit_n, &c->fit_x, &c->fit_y, &c->fit_xx, &c->fit_xy};
    double add[] = {1, n, ms, (double)n * n, n * ms};
    for (int i = 0; i < 5; i++)
        *sums[i] = *sums[i] * FIT_KEEP + add[i];
}

/* The time of a level over n outcomes. */
static double level_ms(const so_async_core *c, double window_ms, int n) {
    if (c->fit_n < MIN_FITS)
        return PRIOR_LEVEL * window_ms * (1 + PRIOR_SLOPE * n);
    double mean = c->fit_y / c->fit_n, at = c->fit_x / c->fit_n;
    double var = c->fit_xx / c->fit_n - at * at, cov = c->fit_xy / c->fit_n - at * mean;
    double slope = var > 0.25 ? cov / var : 0; /* all levels had the same width */
    slope =
        SO_MIN(SO_MAX(slope, PRIOR_SLOPE * mean / (1 + PRIOR_SLOPE * at)), mean / SO_MAX(at, 1));
    return SO_MAX(mean + slope * (n - at), 0.05 * mean);
}

static double mean_acceptance(const so_async_estimates *e) {
    double yes = 0, all = 0;
    for (int c = 0; c < SO_ASYNC_CLASSES; c++) {
        yes += (double)e->accept[c].yes;
        all += (double)e->accept[c].all;
    }
    return yes / all;
}

/* The number of outcomes, of n in descending order of their chances. */
static int fan_out(const so_async_core *c, const so_async_batch *b, const option *o, int n,
                   double left_ms) {
    double hit = 0, best = -1, beta = mean_acceptance(&b->estimates);
    int most = 1;
    for (int f = 1; f <= n; f++) {
        double levels = left_ms / level_ms(c, b->window_ms, f);
        hit += (double)o[f - 1].chance;
        levels = SO_MIN(SO_MAX(levels, 0.25), (double)b->depth);
        double value =
            hit * (1 - pow(beta, levels)); /* Σ β^k up to a factor, for any real number */
        if (value > best) {
            best = value;
            most = f;
        }
    }
    return most;
}

void so_async_choose(const so_async_core *c, so_async_batch *b, double spent_ms) {
    option options[2048];
    int n = 0, n_jobs = 0;
    for (int i = 0; i < b->n; i++)
        n_jobs += !b->jobs[i].skip;
    for (int i = 0; i < b->n && n_jobs > 0; i++) {
        int cap = SO_MIN((int)SO_LEN(options) / n_jobs, (int)SO_LEN(options) - n);
        b->jobs[i].n_outcomes = 0;
        if (!b->jobs[i].skip)
            n += list_options(&b->estimates, &b->jobs[i], options + n, SO_MAX(cap, 0));
    }
    qsort(options, (size_t)n, sizeof *options, by_chance);
    int each = c->o.fan_out > 0 ? SO_MIN(c->o.fan_out, SO_AHEAD_OUTCOMES) : SO_AHEAD_OUTCOMES;
    int left =
        c->o.fan_out > 0 ? each * n_jobs : fan_out(c, b, options, n, b->window_ms - spent_ms);
    for (int i = 0; i < n && left > 0; i++) {
        so_ahead_job *a = options[i].a;
        if (a->n_outcomes >= (a->drawn ? SO_MIN(each, a->q_outcomes) : each))
            continue;
        take(&options[i]);
        left--;
    }
}
