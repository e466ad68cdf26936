/* One step of planning. plan.h has the argument; the sections below are its verbs in order.
 *
 * How deep to draft is decided before drafting by averages, which say only whether to begin; once
 * rows are seen, the drafter goes on by the terms it was given. A drafter without evidence gets a
 * fixed depth instead, limited by what may be risked. */
#include "plan/plan.h"

#include <stdlib.h>

#include "base/mem.h"
#include "plan/impl.h"
#include "plan/tuning.h"

enum { DEPTHS = SO_TERMS_DEPTHS, ALL = SO_TERMS_LEVELS };

/* --- begin, enter --- */

static int size_class(int n_requests) {
    int bits = 0;
    for (; n_requests > 0; n_requests /= 2)
        bits++;
    return SO_MIN(bits, SO_PLAN_SIZES - 1);
}

static double rate_of(const so_yield *y) {
    return y->passes.value > 0 ? SO_MAX(1, y->tokens.value / y->passes.value) : 1;
}

/* g: what a request gains in the time of a plain pass. Of the long run and the latest steps the
 * lower one: a price that is too low drafts a little too much, one that is too high ends drafting
 * where it still pays, and with it learning. */
static double running_gain(const so_planner *p, int n_requests) {
    int k = size_class(n_requests);
    return SO_MIN(rate_of(&p->rates[k]), rate_of(&p->rates_now[k]));
}

void so_plan_begin(so_planner *p, const so_plan_room *room) {
    int n = room->n_requests + room->n_reading;
    double ms = so_costs_pass(&p->costs, n), gain = running_gain(p, n);
    p->room = *room;
    p->n_entries = 0;
    p->drafted_ms = p->expected_draft_ms = p->levels_ms = 0;
    p->probing = p->drafted = false;
    p->promised = 0;
    p->n_asked = 0;
    p->plain_ms = so_costs_pass(&p->costs, room->n_requests + room->other_rows);
    p->price = ms > 0 ? n * gain / ms : 0;
    p->plain = room->n_requests > 1 && room->other_rows == 0 && gain < SO_TUNE_PLAIN_GAIN &&
               p->since_plain >= SO_TUNE_PLAIN_EVERY &&
               so_curve_doubt(&p->costs.pass, room->n_requests) > SO_TUNE_PLAIN_DOUBT;
}

void so_plan_enter(so_planner *p, so_plan_request *r, so_tree *tree) {
    SO_ASSERT_OP(p->n_entries, <, p->max_requests);
    so_plan_entry *e = &p->entries[p->n_entries++];
    e->r = r;
    e->tree = tree;
    if (!r)
        return;
    r->tree = tree;
    r->leaf = -1;
    r->levels = 0;
    r->n_refused = 0;
    p->plain &= r->o.length == 0; /* guesses of a fixed length are always in the pass */
}

/* Rows of the pass as the trees are now. */
static int rows_now(const so_planner *p) {
    int rows = p->room.n_requests + p->room.other_rows;
    for (int i = 0; i < p->n_entries; i++)
        rows += p->entries[i].tree->n_nodes - 1;
    return rows;
}

static double max_risk(const so_planner *p) { return SO_MAX(p->account, SO_TUNE_FREE_RISK); }
static double margin(const so_planner *p) {
    int n = p->room.n_requests;
    return n > 1 ? SO_TUNE_BATCH_MARGIN * n : SO_TUNE_MARGIN;
}
static so_mean *shortfall(so_planner *p) { return &p->shortfall[size_class(p->room.n_requests)]; }
/* What a draft for n requests must be expected to gain, beyond the error of the estimates. */
static double must_gain(so_planner *p, int n) {
    return margin(p) + SO_MAX(0, shortfall(p)->value) * n;
}

/* --- ask --- */

/* Whether a drafter has to be asked for at all: its guesses cost, or cannot be left out once they
 * are drawn. */
static bool is_planned(const so_planner *p, const so_plan_set *s, int leaf, const so_tree *tree) {
    const so_drafter *d = s->drafters->leaves[leaf];
    if (d->draws && tree->max_rows > 0)
        return true;
    return d->costs && so_costs_step(&p->costs, s->costs[leaf], 1) >=
                           SO_TUNE_STEP_FREE * so_costs_pass(&p->costs, 1);
}

static double step_ms(const so_planner *p, const so_plan_set *s, int leaf, int chains) {
    return s->costs[leaf] ? so_costs_step(&p->costs, s->costs[leaf], chains) : 0;
}

/* What one more row costs at each depth where every level adds n rows behind `rows` others. t(n)
 * has steps, and a drafter looks one level ahead, so what counts is the least mean cost of the next
 * few rows: a chain must not end at a step that the next levels share. The final choice knows the
 * real costs. */
static void row_costs(const so_planner *p, int rows, int n, double ms[DEPTHS]) {
    int ahead = SO_MAX(1, SO_TUNE_LOOK_AHEAD / n);
    double t[DEPTHS + 1];
    for (int d = 0; d <= DEPTHS; d++)
        t[d] = so_costs_pass(&p->costs, rows + n * d);
    for (int d = 0; d < DEPTHS; d++) {
        ms[d] = (t[d + 1] - t[d]) / n;
        for (int k = d + 2; k <= SO_MIN(DEPTHS, d + ahead); k++)
            ms[d] = SO_MIN(ms[d], (t[k] - t[d]) / n / (k - d));
    }
}

/* How often the first guess of a merged drafter is one that nobody made before it. */
static double novelty(const so_plan_set *s, int leaf) {
    const so_mean *m = &s->novelty[leaf];
    return m->n > 0 ? m->value : 0.5;
}

/* The chance that the guesses at the root of the tree all fail; *rank: raised by their number. */
static double left_behind(const so_plan_request *r, int *rank) {
    float chance[SO_TREE_MAX];
    double left = 1;
    if (r->tree->n_proposals == 0)
        return 1;
    so_accept_tree(&r->accept, r->tree, chance);
    for (int i = 1; i < r->tree->n_nodes; i++)
        if (r->tree->nodes[i].parent == 0) {
            left -= (double)chance[i];
            ++*rank;
        }
    return SO_MAX(left, 0);
}

/* The chance that a drafter's first guess is new and is tested, given the guesses in the tree. */
static double reach_of(const so_plan_request *r, int leaf, int *rank) {
    double left = left_behind(r, rank);
    return r->tree->n_proposals > 0 ? left * novelty(r->set, leaf) : left;
}

/* The time to feed the drafter the part of the text that it has not read. */
static double once_ms(const so_planner *p, const so_plan_ask *ask, int leaf) {
    const so_draft_cost *cost = ask->r->set->costs[leaf];
    int unread = ask->n_tokens - 1 - ask->r->n_read[leaf];
    return cost ? so_costs_read(&p->costs, cost) * SO_MAX(unread, 0) : 0;
}

/* The part of reading that is charged to one step. It is paid off over the rest of the answer; but
 * a drafter that was skipped in a fraction f of the steps has to catch up again and again, and is
 * charged at least f of that. */
static double used_up(const so_plan_ask *ask, int leaf) {
    double left = SO_MIN(ask->tokens_left, SO_TUNE_ANSWER);
    double part = SO_MIN(1, SO_TUNE_STEP_TOKENS / SO_MAX(left, SO_TUNE_STEP_TOKENS));
    bool catches_up = ask->r->n_read[leaf] > 0;
    return catches_up ? SO_MAX(part, 1 - ask->r->asked[leaf].value) : part;
}

/* reach, rank: of its first guess. The terms are the request's: a copy is large. */
static so_candidate candidate_of(const so_planner *p, so_plan_ask *ask, int leaf, double reach,
                                 int rank) {
    so_plan_request *r = ask->r;
    so_candidate c = {.ask = ask,
                      .terms = &r->terms,
                      .reach = reach,
                      .rank = rank,
                      .one_call = r->set->drafters->leaves[leaf]->one_call,
                      .check_ms = so_costs_check(&p->costs, r->o.verify),
                      .once_ms = once_ms(p, ask, leaf),
                      .evidence = so_accept_evidence(&r->accept, leaf, rank)};
    so_accept_terms(&r->accept, leaf, rank, c.terms);
    c.terms->start = (float)reach;
    return c;
}

static void set_price(const so_planner *p, so_candidate *c, int leaf, const double row_ms[DEPTHS],
                      double level_ms) {
    for (int d = 0; d < DEPTHS; d++)
        c->terms->row[d] = (float)(p->price * (row_ms[d] + c->check_ms));
    c->terms->level = (float)(p->price * level_ms);
    c->first = c->kept = 0;
    if (c->reach > 0)
        c->first = c->reach * so_accept_option(&c->ask->r->accept, leaf, c->rank, c->terms,
                                               (double)c->terms->row[0] / c->reach, &c->kept);
    c->first -= p->price * c->once_ms * used_up(c->ask, leaf);
    if (c->left_out)
        c->first = c->kept = 0;
    c->path = c->reach;
}

/* What level d (from 1) brings to a candidate beyond its rows; call for d = 1, 2, … in order. */
static double level_gain(so_candidate *c, int d) {
    int k = so_terms_depth(d);
    if (d > c->ask->max_depth)
        return 0;
    c->path *= (double)c->terms->chance[k][ALL];
    return d == 1 ? c->first : SO_MAX(0, c->path - (double)c->terms->row[k]);
}

static int by_gain(const void *a, const void *b) {
    double x = ((const so_candidate *)a)->first, y = ((const so_candidate *)b)->first;
    return (x < y) - (x > y);
}

/* What drafting adds to the pass of this step (so_costs_after_draft); once per step. */
static double after_ms(const so_planner *p, int rows) {
    return p->drafted ? 0 : so_costs_after_draft(&p->costs, rows);
}

/* The depth with the largest gain of the n candidates together; 0 where none pays. *risky: one
 * would pay and may not be risked. */
static int best_depth(so_planner *p, so_candidate *c, int n, double level_ms, bool *risky,
                      double *gain) {
    double total = -p->price * after_ms(p, rows_now(p) + n);
    double best = must_gain(p, n);
    double doubt = 0, once = 0, check = 0;
    int rows = rows_now(p), limit = 0, depth = 0;
    *risky = false;
    for (int i = 0; i < n; i++) {
        doubt += (1 - c[i].evidence) / n;
        once += c[i].once_ms;
        check += c[i].check_ms;
        limit = SO_MAX(limit, c[i].ask->max_depth);
        c[i].path = c[i].reach;
    }
    for (int d = 1; d <= SO_MIN(limit, DEPTHS) && rows + n * d <= p->room.max_rows; d++) {
        for (int i = 0; i < n; i++)
            total += level_gain(&c[i], d);
        total -= d == 1 || !c->one_call ? p->price * level_ms : 0;
        double extra_ms = so_costs_pass(&p->costs, rows + n * d) - so_costs_pass(&p->costs, rows) +
                          d * check + (c->one_call ? 1 : d) * level_ms + once;
        if (total <= best)
            continue;
        if (extra_ms / p->plain_ms * doubt > max_risk(p)) {
            *risky = true;
            continue;
        }
        best = total;
        depth = d;
    }
    *gain = best;
    return depth;
}

/* How many of the n candidates are asked, those with the most to gain, and how deep. Those whose
 * first guess is not worth its row and its reading are left out; where all cannot be risked, half
 * of them may. */
static int best_crowd(so_planner *p, so_candidate *c, int n, double level_ms, int *depth) {
    bool risky = true;
    double gain = 0;
    qsort(c, (size_t)n, sizeof *c, by_gain);
    while (n > 0 && !(c[n - 1].first > 0))
        n--;
    for (*depth = 0; n > 0 && risky; n /= 2)
        if ((*depth = best_depth(p, c, n, level_ms, &risky, &gain)) > 0) {
            p->promised += gain;
            p->n_asked += n;
            return n;
        }
    return 0;
}

/* The answer: on terms where the drafter goes by them and is known, to a fixed depth where not. */
static void grant(so_candidate *c, int depth, int leaf) {
    so_plan_request *r = c->ask->r;
    if (c->evidence < SO_TUNE_KNOWN || !r->set->drafters->leaves[leaf]->on_terms) {
        c->ask->max_depth = SO_MIN(c->ask->max_depth, depth);
    } else {
        r->leaf = r->leaf < 0 ? leaf : r->leaf;
        c->ask->terms = c->terms;
    }
}

/* Whether a probe of a candidate's drafter is due. passes: the cost of the probe, in plain passes.
 * A drafter that is known is probed rarely where a probe would say little: another one drafts in
 * its place, or its guesses are accepted and it is unused because it costs too much. */
static bool is_due(const so_planner *p, const so_candidate *c, int leaf, double passes) {
    double since = p->clock - c->ask->r->set->probed_at[leaf];
    if (c->evidence < SO_TUNE_KNOWN)
        return since >= SO_TUNE_PROBE_EVERY || so_accept_recovers(&c->ask->r->accept, leaf);
    if (c->left_out || c->rank > 0 || (double)c->terms->chance[0][ALL] >= SO_TUNE_PROBE_BELOW)
        return since >= SO_TUNE_PROBE_SELDOM;
    return since >= SO_MAX(SO_TUNE_PROBE_EVERY, passes / SO_TUNE_PROBE_SHARE) ||
           so_accept_recovers(&c->ask->r->accept, leaf);
}

/* No draft of this drafter pays in this step. Drafts one guess for one request to see whether its
 * drafter has become good again, if the account can pay for it: of those that are due, the one
 * whose last probe is longest ago. A point guess needs no row of the pass: the next tokens of the
 * text show whether it was right (shadow.h). */
static void probe(so_planner *p, so_candidate *c, int n, int leaf, double level_ms) {
    int rows = rows_now(p);
    const so_candidate *best = NULL;
    for (int i = 0; i < n && rows < p->room.max_rows; i++) {
        const so_candidate *x = &c[i];
        double extra_ms = level_ms + x->once_ms;
        if (x->ask->r->tree->max_rows > 0)
            extra_ms +=
                so_costs_pass(&p->costs, rows + 1) - so_costs_pass(&p->costs, rows) + x->check_ms;
        double passes = extra_ms / p->plain_ms;
        if (is_due(p, x, leaf, passes) && passes <= p->account &&
            (!best || x->ask->r->probed_at < best->ask->r->probed_at))
            best = x;
    }
    if (!best)
        return;
    best->ask->max_depth = 1;
    best->ask->r->probed_at = best->ask->r->set->probed_at[leaf] = p->clock;
    so_smooth(&best->ask->r->asked[leaf], 1, SO_TUNE_ASKED_PART);
    p->probing = true;
}

/* What a chain of a drafter is expected to gain for a request, the levels shared with the other
 * requests of its set. reach, rank: of its first guess. */
static double chain_gain(const so_planner *p, so_plan_ask ask, int leaf, double reach, int rank) {
    const so_plan_request *r = ask.r;
    double row_ms[DEPTHS], best = 0;
    int n = 0;
    for (int i = 0; i < p->n_entries; i++)
        n += p->entries[i].r && p->entries[i].r->set == r->set;
    double level_ms = step_ms(p, r->set, leaf, n) / n, total = 0;
    if (r->silent[leaf])
        return 0;
    row_costs(p, rows_now(p) - (r->tree->n_nodes - 1), 1, row_ms);
    so_candidate c = candidate_of(p, &ask, leaf, reach, rank);
    set_price(p, &c, leaf, row_ms, level_ms);
    for (int d = 1; d <= SO_MIN(ask.max_depth, DEPTHS); d++) {
        total += level_gain(&c, d) - (d == 1 || !c.one_call ? p->price * level_ms : 0);
        best = SO_MAX(best, total);
    }
    return best;
}

/* `a+b`, before a is asked: whether b alone gains more than both. */
static bool later_is_better_alone(const so_planner *p, const so_plan_ask *ask, int stage) {
    const so_plan_set *s = ask->r->set;
    const so_draft_stage *own = &s->drafters->stages[stage];
    int leaf = own->drafter->index;
    so_accept_key first = {leaf, 1, 0, -1};
    double gain = -1;
    for (int i = stage + 1; i < s->drafters->n_stages; i++) {
        int next = s->drafters->stages[i].drafter->index;
        if (s->drafters->stages[i].alternative != own->alternative || !s->costs[next] ||
            so_accept_evidence(&ask->r->accept, next, 0) < SO_TUNE_KNOWN)
            continue;
        if (gain < 0)
            gain = chain_gain(p, *ask, leaf, 1, 0);
        double fails = 1 - so_accept_get(&ask->r->accept, &first, SO_TUNE_UNKNOWN_CHANCE);
        double more = chain_gain(p, *ask, next, fails * novelty(s, next), 1);
        if (chain_gain(p, *ask, next, 1, 0) > gain + more)
            return true;
    }
    return false;
}

/* Values the candidates. The cost of a row depends on how many first guesses are kept, and how many
 * are kept depends on the cost of a row: three iterations settle both. */
static void weigh(const so_planner *p, so_candidate *c, int n, int stage, double level_ms) {
    int leaf = c->ask->r->set->drafters->stages[stage].drafter->index;
    double row_ms[DEPTHS], kept = n;
    for (int i = 0; i < n; i++) {
        const so_plan_request *r = c[i].ask->r;
        bool alone = r->tree->n_proposals == 0 && r->n_refused == 0;
        bool left_out = alone && later_is_better_alone(p, c[i].ask, stage);
        int rank = r->n_refused;
        double reach = reach_of(r, leaf, &rank);
        c[i] = candidate_of(p, c[i].ask, leaf, reach, rank);
        c[i].left_out = left_out;
    }
    for (int turn = 0; turn < (n > 1 ? 3 : 1); turn++) {
        row_costs(p, rows_now(p), SO_MAX(1, (int)(kept + 0.5)), row_ms);
        kept = 0;
        for (int i = 0; i < n; i++) {
            set_price(p, &c[i], leaf, row_ms, level_ms);
            kept += c[i].kept;
        }
    }
}

void so_plan_ask_stage(so_planner *p, int stage, so_plan_ask *asks, int n) {
    so_candidate *c = p->candidates;
    int m = 0, depth = 0, asked = 0;
    if (n == 0)
        return;
    const so_plan_set *s = asks[0].r->set;
    int leaf = s->drafters->stages[stage].drafter->index;
    for (int i = 0; i < n; i++) {
        so_plan_request *r = asks[i].r;
        asks[i].terms = NULL;
        r->accept.own[leaf].refused_before = (uint8_t)r->n_refused;
        if (r->o.length == 0 && asks[i].max_depth > 0 && is_planned(p, s, leaf, r->tree))
            c[m++].ask = &asks[i];
    }
    if (m == 0)
        return;
    double level_ms = step_ms(p, s, leaf, m);
    /* Without a cost curve the first pass is plain. */
    bool may = p->plain_ms > 0 && !p->plain;
    if (may) {
        weigh(p, c, m, stage, level_ms);
        asked = best_crowd(p, c, m, level_ms, &depth);
    }
    for (int i = 0; i < m; i++) {
        if (i < asked)
            grant(&c[i], depth, leaf);
        else
            c[i].ask->max_depth = 0;
        if (may)
            so_smooth(&c[i].ask->r->asked[leaf], i < asked, SO_TUNE_ASKED_PART);
    }
    if (asked == 0 && may)
        probe(p, c, m, leaf, level_ms);
}

/* --- drafted --- */

/* The first proposal of a drafter at the root; −1: none. *is_new: nobody made that guess before. */
static int first_proposal(const so_tree *t, int leaf, bool *is_new) {
    for (int i = t->nodes[0].first; i >= 0; i = t->proposals[i].next)
        if (t->proposals[i].drafter == leaf) {
            *is_new = true;
            for (int k = t->nodes[0].first; k != i; k = t->proposals[k].next)
                *is_new &= t->proposals[k].child != t->proposals[i].child;
            return i;
        }
    return -1;
}

/* The first guess of a merged drafter: whether it is a new one, and how sure of it the drafter is;
 * also as if it had been alone. */
static void learn_first(so_plan_request *r, int leaf) {
    const so_tree *t = r->tree;
    bool is_new;
    int i = first_proposal(t, leaf, &is_new);
    if (i < 0)
        return;
    if (i != t->nodes[0].first)
        so_smooth(&r->set->novelty[leaf], is_new, SO_TUNE_YIELD_PART);
    so_accept_key k = so_accept_key_of(&r->accept, t, i);
    so_accept_row(&r->accept, &k);
    if (k.rank > 0)
        so_accept_row(&r->accept, &(so_accept_key){leaf, 1, 0, k.confidence});
}

/* A row that a drafter made and did not find worth a guess. */
static void learn_refusal(so_plan_request *r, int leaf, const so_draft_job *job) {
    so_accept_key k = {leaf, job->refused_depth, 0, (double)job->refused_confidence};
    double reach = 1;
    if (k.depth == 1) { /* it has none of the guesses in the tree */
        k.rank = r->n_refused++;
        reach = left_behind(r, &k.rank);
        so_accept_row(&r->accept, &k);
        if (k.rank > 0)
            so_accept_row(&r->accept, &(so_accept_key){leaf, 1, 0, k.confidence});
    }
    so_accept_skip(&r->accept, &k, reach);
}

void so_plan_drafted(so_planner *p, int stage, so_plan_ask *asks, const so_draft_job *jobs, int n,
                     double ms) {
    so_draft_usage u = {.ms = ms};
    if (n == 0)
        return;
    so_plan_set *s = asks[0].r->set;
    int leaf = s->drafters->stages[stage].drafter->index;
    for (int i = 0; i < n; i++) {
        const so_draft_job *job = &jobs[i];
        so_plan_request *r = asks[i].r;
        learn_first(r, leaf);
        r->silent[leaf] = job->n_levels == 0;
        if (job->n_levels == 0)
            continue;
        u.chains++;
        u.levels = SO_MAX(u.levels, job->n_levels);
        u.lag = SO_MAX(u.lag, job->n_read);
        u.read += job->n_read;
        r->n_read[leaf] = asks[i].n_tokens;
        if (r->leaf == leaf)
            r->levels = job->n_levels;
        if (job->refused_depth > 0)
            learn_refusal(r, leaf, job);
    }
    p->drafted_ms += ms;
    if (!s->costs[leaf])
        return;
    p->drafted |= u.levels > 0;
    so_costs_observe_draft(&p->costs, s->costs[leaf], &u);
    double levels_ms = u.levels * step_ms(p, s, leaf, SO_MAX(u.chains, 1));
    p->levels_ms += levels_ms;
    p->expected_draft_ms += levels_ms + u.read * so_costs_read(&p->costs, s->costs[leaf]);
}

/* --- keeps --- */

/* What the points of a tree gain beyond their rows. */
static double gain_of_points(so_planner *p, const so_plan_request *r) {
    float chance[SO_TREE_MAX], value[SO_TREE_MAX] = {1};
    const so_tree *t = r->tree;
    so_sum sum = {.rows = rows_now(p) - (t->n_nodes - 1)};
    double check = so_costs_check(&p->costs, r->o.verify);
    so_accept_tree(&r->accept, t, chance);
    so_selection_clear(&p->selection);
    for (int i = 1; i < t->n_nodes; i++) {
        value[i] = value[t->nodes[i].parent] * chance[i];
        so_selection_add(&p->selection, (so_guess){value[i], -1, (float)check, 0, i});
    }
    so_selection_limits l = {.price = p->price, .max_risk = 1e9, .max_rows = p->room.max_rows};
    double before = so_costs_pass(&p->costs, sum.rows);
    so_selection_choose(&p->selection, &p->costs, &l, &sum);
    return sum.tokens - p->price * (so_costs_pass(&p->costs, sum.rows) + sum.test_ms - before);
}

/* What rounds of a paid drafter have gained, at today's price; 0: there were too few. */
static double yield_gain(const so_planner *p, const so_plan_request *r, int leaf) {
    const so_yield *own = &r->yields[leaf], *all = &r->set->yields[r->o.mode][leaf];
    if (all->tokens.n < SO_TUNE_YIELD_ROUNDS)
        return 0;
    double w = (double)own->tokens.n / (own->tokens.n + SO_TUNE_YIELD_ROUNDS);
    double tokens = w * own->tokens.value + (1 - w) * all->tokens.value;
    double passes = w * own->passes.value + (1 - w) * all->passes.value;
    return tokens - p->price * p->plain_ms * passes;
}

/* What a paid drafter is expected to gain for a request in place of the guesses in its tree. 0
 * where it would not be asked. */
static double gain_of_stage(so_planner *p, const so_plan_ask *ask, int leaf) {
    const so_plan_request *r = ask->r;
    int n = p->room.n_requests, rows = rows_now(p) - (r->tree->n_nodes - 1);
    double best = chain_gain(p, *ask, leaf, 1, 0) - p->price * after_ms(p, rows_now(p) + n) / n;
    double evidence = so_accept_evidence(&r->accept, leaf, 0);
    double ms = so_costs_pass(&p->costs, rows + 1) - so_costs_pass(&p->costs, rows) +
                step_ms(p, r->set, leaf, 1) + once_ms(p, ask, leaf);
    if (best <= must_gain(p, n) / n || ms / p->plain_ms * (1 - evidence) > max_risk(p))
        return 0;
    return evidence >= SO_TUNE_KNOWN ? SO_MAX(best, yield_gain(p, r, leaf)) : best;
}

/* Whether a drafter of a later alternative that costs is expected to gain more than the free
 * guesses in the tree. */
static bool is_outdone(so_planner *p, const so_plan_ask *ask, int alternative) {
    const so_draft_set *d = ask->r->set->drafters;
    double have = -1;
    for (int i = 0; i < d->n_stages; i++) {
        int leaf = d->stages[i].drafter->index;
        if (d->stages[i].alternative <= alternative || !ask->r->set->costs[leaf])
            continue;
        if (have < 0)
            have = gain_of_points(p, ask->r);
        if (gain_of_stage(p, ask, leaf) > have)
            return true;
    }
    return false;
}

static bool is_hopeless(const so_plan_request *r) {
    const so_proposal *q = &r->tree->proposals[0];
    so_accept_key k = {q->drafter, 1, 0, (double)q->confidence};
    return so_accept_evidence(&r->accept, q->drafter, 0) >= SO_TUNE_KNOWN &&
           so_accept_get(&r->accept, &k, SO_TUNE_UNKNOWN_CHANCE) < SO_TUNE_HOPELESS;
}

/* Whether a paid drafter has guessed: what it guessed is paid for, and so_plan_choose trims it. */
static bool has_paid_guesses(const so_plan_request *r) {
    for (int i = 0; i < r->tree->n_proposals; i++)
        if (r->set->costs[r->tree->proposals[i].drafter])
            return true;
    return false;
}

/* Guesses that are sent away are watched all the same, so that a drafter that has become good again
 * is taken back. */
bool so_plan_keeps(so_planner *p, const so_plan_ask *ask, int alternative) {
    so_plan_request *r = ask->r;
    so_tree *t = r->tree;
    r->n_refused = 0; /* of the next alternative */
    if (t->n_proposals == 0)
        return false;
    if (r->o.length > 0 || !(p->plain_ms > 0) || !so_tree_all_points(t) || has_paid_guesses(r) ||
        !(is_hopeless(r) || is_outdone(p, ask, alternative)))
        return true;
    so_shadow_watch(&r->shadow, &r->accept, t);
    so_tree_reset(t, t->nodes[0].token, t->root_pos);
    return false;
}

/* --- choose --- */

/* The guesses of one tree: into *sum, if it must be taken as it is, or among those to choose from.
 */
static void gather(so_planner *p, int owner, so_sum *sum) {
    so_plan_entry *e = &p->entries[owner];
    const so_tree *t = e->tree;
    float value[SO_TREE_MAX] = {1};
    bool whole = e->r && (e->r->o.length > 0 || !so_tree_all_points(t));
    for (int i = 0; i < t->n_nodes; i++)
        e->keep[i] = i == 0 || whole;
    e->n_keep = whole ? t->n_nodes - 1 : 0;
    if (!e->r || t->n_proposals == 0)
        return;
    so_accept_tree(&e->r->accept, t, e->chance);
    double check = so_costs_check(&p->costs, e->r->o.verify);
    double evidence = so_accept_evidence(&e->r->accept, t->proposals[0].drafter, 0);
    for (int i = 1; i < t->n_nodes; i++) {
        value[i] = value[t->nodes[i].parent] * e->chance[i];
        so_guess g = {value[i], t->nodes[i].depth == 1 ? (float)evidence : -1, (float)check, owner,
                      i};
        if (whole)
            so_sum_add(sum, &g);
        else
            so_selection_add(&p->selection, g);
    }
}

/* What drafts that cost have brought in this step, against what was expected of them. Begun on
 * averages, they are begun where the averages flatter most, and costs that nobody knows of are in
 * it too. */
static void learn_shortfall(so_planner *p, int rows) {
    double gain = -p->price * (p->levels_ms + so_costs_after_draft(&p->costs, rows));
    int kept = 0;
    so_mean *m = shortfall(p);
    if (!p->drafted || p->probing || !(p->promised > 0) || p->room.other_rows > 0) {
        m->value *= p->drafted ? 1 : SO_TUNE_SHORTFALL_KEEP;
        return;
    }
    for (int i = 0; i < p->n_entries; i++) {
        const so_plan_entry *e = &p->entries[i];
        const so_tree *t = e->tree;
        float value[SO_TREE_MAX] = {1};
        if (!e->r || t->n_proposals == 0 || !e->r->set->costs[t->proposals[0].drafter])
            continue;
        kept += e->n_keep;
        gain -= p->price * e->n_keep * so_costs_check(&p->costs, e->r->o.verify);
        for (int k = 1; k < t->n_nodes; k++) {
            value[k] = value[t->nodes[k].parent] * e->chance[k];
            gain += e->keep[k] ? (double)value[k] : 0;
        }
    }
    gain -= p->price * (so_costs_pass(&p->costs, rows) - so_costs_pass(&p->costs, rows - kept));
    so_smooth(m, (p->promised - gain) / p->n_asked, SO_TUNE_SHORTFALL_PART);
}

/* What a drafter that costs has brought with this round. */
static void learn_yield(so_planner *p, const so_plan_entry *e) {
    so_plan_request *r = e->r;
    const so_tree *t = e->tree;
    float value[SO_TREE_MAX] = {1};
    double tokens = 0;
    int rows = p->room.n_requests + p->room.other_rows;
    if (!r || r->leaf < 0 || r->levels == 0 || p->probing || !(p->plain_ms > 0))
        return;
    bool refused = t->n_proposals == 0 || t->proposals[0].drafter != r->leaf;
    int kept = refused ? 0 : e->n_keep; /* what another drafter guessed then is not its yield */
    for (int i = 1; i < t->n_nodes && !refused; i++) {
        value[i] = value[t->nodes[i].parent] * e->chance[i];
        tokens += e->keep[i] ? (double)value[i] : 0;
    }
    double ms = so_costs_pass(&p->costs, rows + kept) - p->plain_ms +
                r->levels * step_ms(p, r->set, r->leaf, 1) +
                kept * so_costs_check(&p->costs, r->o.verify);
    so_yield *own = &r->yields[r->leaf], *all = &r->set->yields[r->o.mode][r->leaf];
    so_smooth(&own->tokens, tokens, SO_TUNE_OWN_YIELD_PART);
    so_smooth(&own->passes, ms / p->plain_ms, SO_TUNE_OWN_YIELD_PART);
    so_smooth(&all->tokens, tokens, SO_TUNE_YIELD_PART);
    so_smooth(&all->passes, ms / p->plain_ms, SO_TUNE_YIELD_PART);
}

const so_plan *so_plan_choose(so_planner *p) {
    int n = p->n_entries;
    so_sum sum = {.tokens = n, .rows = p->room.n_requests + p->room.other_rows};
    so_selection_limits l = {.price = p->price,
                             .margin = p->drafted ? 0 : margin(p), /* a draft is paid for */
                             .max_risk = max_risk(p),
                             .max_rows = p->room.max_rows};
    so_selection_clear(&p->selection);
    for (int i = 0; i < n; i++) {
        if (p->entries[i].r)
            so_shadow_watch(&p->entries[i].r->shadow, &p->entries[i].r->accept, p->entries[i].tree);
        gather(p, i, &sum);
    }
    int chosen = p->plain ? 0 : so_selection_choose(&p->selection, &p->costs, &l, &sum);
    for (int k = 0; k < chosen; k++) {
        const so_guess *g = so_selection_get(&p->selection, k);
        p->entries[g->owner].keep[g->node] = true;
        p->entries[g->owner].n_keep++;
    }
    /* The clock's bad luck is nobody's fault: drafting counts with what it should have taken. */
    double draft_ms = p->drafted_ms;
    if (p->expected_draft_ms > 0)
        draft_ms = SO_MIN(draft_ms, p->expected_draft_ms);
    if (p->drafted)
        draft_ms += so_costs_after_draft(&p->costs, sum.rows);
    learn_shortfall(p, sum.rows);
    p->plan = (so_plan){.n_requests = n,
                        .n_rows = sum.rows,
                        .tokens = sum.tokens,
                        .ms = so_costs_pass(&p->costs, sum.rows) + sum.test_ms + draft_ms,
                        .plain_ms = p->plain_ms,
                        .doubt = so_sum_doubt(&sum),
                        .probe = p->probing};
    for (int i = 0; i < n; i++) {
        learn_yield(p, &p->entries[i]);
        if (p->entries[i].n_keep < p->entries[i].tree->n_nodes - 1)
            so_tree_prune(p->entries[i].tree, p->entries[i].keep);
    }
    return &p->plan;
}

/* --- verdict, end --- */

void so_plan_verdict(so_planner *p, so_plan_request *r, const so_tree *tree, const so_verdict *v,
                     so_verify_mode mode, double ms) {
    so_costs_observe_verdict(&p->costs, mode, v, ms);
    if (r)
        so_accept_verdict(&r->accept, tree, v);
}

/* The account is kept with the times of the cost curve, not with the clock's: what counts is the
 * decision, and a page fault is not its fault. Nor is bad luck the fault of a drafter that is known
 * well: losses count as far as it was in doubt, and the estimates see to the rest. */
static void settle(so_planner *p, double tokens) {
    const so_plan *plan = &p->plan;
    double gain = plan->ms > plan->plain_ms ? tokens - plan->ms / plan->plain_ms : 0;
    if (gain < 0 && !plan->probe)
        gain *= plan->doubt;
    double sum = p->account + SO_TUNE_ACCOUNT_EARN * tokens + gain;
    p->account = SO_MAX(SO_TUNE_ACCOUNT_MIN, SO_MIN(sum, SO_TUNE_ACCOUNT_MAX));
    p->clock += tokens;
}

static void learn_rate(so_yield *y, double tokens, double passes, double part) {
    so_smooth(&y->tokens, tokens, part);
    so_smooth(&y->passes, SO_MIN(passes, SO_TUNE_RATE_LONGEST), part);
}

void so_plan_end(so_planner *p, double pass_ms, int n_tokens) {
    const so_plan *plan = &p->plan;
    if (plan->plain_ms > 0 && plan->n_requests > 0) {
        double tokens = (double)n_tokens / plan->n_requests;
        int k = size_class(plan->n_requests);
        settle(p, tokens);
        if (p->room.other_rows == 0) { /* a step that reads a prompt says little about the rate */
            learn_rate(&p->rates[k], tokens, plan->ms / plan->plain_ms, SO_TUNE_RATE_PART);
            learn_rate(&p->rates_now[k], tokens, plan->ms / plan->plain_ms, SO_TUNE_RATE_NOW_PART);
        }
    }
    bool was_plain = plan->n_rows == p->room.n_requests + p->room.other_rows && !p->drafted;
    p->since_plain = was_plain || p->plain ? 0 : p->since_plain + 1;
    so_costs_observe_pass(&p->costs, plan->n_rows, pass_ms, p->drafted);
    p->n_passes++;
}
