/* One step of planning, in the order of the calls (plan.h). The length of a draft is decided here:
 *
 *   1. value_candidates   for each request: chances by depth (acceptance.h), prices of rows and
 *                         levels (costs.h, times λ), catch-up
 *   2. choose_requests    best_depth gives the depth with the largest expected gain of all requests
 *                         together, within the allowed risk; if the risk is too large,
 *                         choose_requests halves the number of requests
 *   3. set_answer         a known drafter gets terms and decides after each guess; another drafter
 *                         gets the depth of (2)
 *   4. so_plan_choose     trims what was drafted to what pays in this pass
 *
 * Before drafting only averages are known, so (2) mainly decides whether to draft at all; the
 * confidences of the real rows decide the rest. Refuses to prune trees with sampled tokens. Thread:
 * the engine thread. */
#include "plan/plan.h"

#include <stdlib.h>

#include "base/mem.h"
#include "plan/impl.h"
#include "plan/tuning.h"

enum { DEPTHS = SO_TERMS_DEPTHS, ALL = SO_TERMS_CLASSES };

/* --- begin, enter --- */

static double rate_of(const so_yield *y) {
    return y->passes.value > 0 ? SO_MAX(1, y->tokens.value / y->passes.value) : 1;
}

/* g of plan.h: the number of tokens that a request gets in the time of a plain pass; the lower
 * of the slow and the fast mean. A price that is too low makes drafts slightly too long; a price
 * that is too high ends drafting where drafts still pay, and nothing more is learned. */
static double running_gain(const so_planner *p, int n_requests) {
    int k = so_plan_size_class(n_requests);
    return SO_MIN(rate_of(&p->rates[k]), rate_of(&p->rates_now[k]));
}

void so_plan_begin(so_planner *p, const so_plan_step *step) {
    int n = step->n_requests + step->n_prefilling;
    double ms = so_costs_pass(&p->costs, n), gain = running_gain(p, n);
    p->step = *step;
    p->n_entries = 0;
    p->drafted_ms = p->expected_draft_ms = p->levels_ms = 0;
    p->probing = p->drafted = false;
    p->expected_gain = 0;
    p->n_drafting = 0;
    p->plain_ms = so_costs_pass(&p->costs, step->n_requests + step->prompt_rows);
    p->price = ms > 0 ? n * gain / ms : 0;
    p->force_plain = step->n_requests > 1 && step->prompt_rows == 0 && gain < SO_TUNE_PLAIN_GAIN &&
                     p->steps_since_plain >= SO_TUNE_PLAIN_EVERY &&
                     so_curve_std_error(&p->costs.pass, step->n_requests) > SO_TUNE_PLAIN_ERROR;
}

void so_plan_enter(so_planner *p, so_plan_request *r, so_tree *tree) {
    SO_ASSERT_OP(p->n_entries, <, p->max_requests);
    so_plan_entry *e = &p->entries[p->n_entries++];
    e->r = r;
    e->tree = tree;
    if (!r)
        return;
    r->tree = tree;
    r->terms_leaf = -1;
    r->usage = (so_draft_usage){0};
    r->n_refused = 0;
    p->force_plain &= r->o.length == 0; /* drafts of a fixed length are always tested */
}

/* Rows of the pass with the trees as they are now. */
static int rows_now(const so_planner *p) {
    int rows = p->step.n_requests + p->step.prompt_rows;
    for (int i = 0; i < p->n_entries; i++)
        rows += p->entries[i].tree->n_nodes - 1;
    return rows;
}

static double max_risk(const so_planner *p) { return SO_MAX(p->account, SO_TUNE_FREE_RISK); }
static double margin(const so_planner *p) {
    int n = p->step.n_requests;
    return n > 1 ? SO_TUNE_BATCH_MARGIN * n : SO_TUNE_MARGIN;
}
static so_mean *shortfall(so_planner *p) {
    return &p->shortfall[so_plan_size_class(p->step.n_requests)];
}
/* The gain that a draft for n requests must be expected to have, beyond estimation errors. */
static double required_gain(so_planner *p, int n) {
    return margin(p) + SO_MAX(0, shortfall(p)->value) * n;
}

/* --- depths --- */

static bool drafts_ahead(const so_drafter *d) { return d->vt->dispatch != NULL; }

/* Whether the planner must decide about a drafter: its guesses have a cost, or they are sampled and
 * cannot be left out afterwards. */
static bool needs_plan(const so_planner *p, const so_plan_set *s, int leaf, const so_tree *tree) {
    const so_drafter *d = s->drafters->leaves[leaf];
    if (d->draws && tree->max_rows > 0)
        return true;
    return d->has_cost &&
           so_plan_one_guess_ms(p, s, leaf) >= SO_TUNE_LEVEL_FREE * so_costs_pass(&p->costs, 1);
}

/* How often the first guess of a merged drafter is not among those made before it. */
static double novelty(const so_plan_set *s, int leaf) {
    const so_mean *m = &s->novelty[leaf];
    return m->n > 0 ? m->value : 0.5;
}

/* The chance that all guesses at the root of the tree are rejected; *rank is increased by their
 * number. */
static double chance_all_fail(const so_plan_request *r, int *rank) {
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
    double left = chance_all_fail(r, rank);
    return r->tree->n_proposals > 0 ? left * novelty(r->set, leaf) : left;
}

/* reach, rank: of the drafter's first guess. The terms are stored in the request, because a copy is
 * large. */
static so_candidate candidate_of(const so_planner *p, so_plan_query *query, int leaf, double reach,
                                 int rank) {
    so_plan_request *r = query->r;
    so_candidate c = {.query = query,
                      .terms = &r->terms,
                      .reach = reach,
                      .rank = rank,
                      .tree = r->set->drafters->leaves[leaf]->tree_nodes > 0,
                      .check_ms = so_costs_check(&p->costs, r->o.verify),
                      .catch_up_ms = so_plan_catch_up_ms(p, query, leaf),
                      .evidence = so_accept_evidence(&r->accept, leaf, rank)};
    so_accept_terms(&r->accept, leaf, rank, c.terms);
    if (c.tree)
        so_accept_sibling_terms(&r->accept, leaf, rank, c.terms);
    c.terms->start_value = (float)reach;
    return c;
}

static void set_price(const so_planner *p, so_candidate *c, int leaf, const double row_ms[DEPTHS],
                      const so_level_costs *costs) {
    for (int d = 0; d < DEPTHS; d++)
        c->terms->row_price[d] = (float)(p->price * (row_ms[d] + c->check_ms));
    c->terms->level_price = (float)(p->price * costs->level_ms);
    c->terms->trip_price = (float)(p->price * costs->trip_ms);
    c->terms->hoped_trip_price = (float)(p->price * costs->hoped_trip_ms);
    c->first_gain = c->keep_chance = 0;
    if (c->reach > 0)
        c->first_gain = c->reach * so_accept_first_gain(
                                       &c->query->r->accept, leaf, c->rank, c->terms,
                                       (double)c->terms->row_price[0] / c->reach, &c->keep_chance);
    c->first_gain -= p->price * c->catch_up_ms * so_plan_catch_up_part(c->query, leaf);
    if (c->left_out)
        c->first_gain = c->keep_chance = 0;
    c->path = c->reach;
}

/* What the siblings of a chain's guess at depth index k gain, without their children. path: the value
 * of the guess's parent. */
static double siblings_gain(const so_candidate *c, int k, double path) {
    double left = path * (1 - (double)c->terms->chance[k][ALL]), gain = 0;
    for (int rank = 1; c->tree && rank < SO_TERMS_RANKS; rank++) {
        double x = (double)c->terms->sibling[rank - 1][k][ALL];
        gain += SO_MAX(0, left * x - (double)c->terms->row_price[k]);
        left *= 1 - x;
    }
    return gain;
}

/* The gain of level d (from 1) for a candidate, beyond the cost of its rows. Call for d = 1, 2, …
 * in order. */
static double level_gain(so_candidate *c, int d) {
    int k = so_terms_depth(d);
    if (d > c->query->max_depth)
        return 0;
    double more = siblings_gain(c, k, c->path);
    c->path *= (double)c->terms->chance[k][ALL];
    return more + (d == 1 ? c->first_gain : SO_MAX(0, c->path - (double)c->terms->row_price[k]));
}

static int by_gain(const void *a, const void *b) {
    double x = ((const so_candidate *)a)->first_gain, y = ((const so_candidate *)b)->first_gain;
    return (x < y) - (x > y);
}

/* The time that drafting adds to the pass of this step (so_costs_after_draft); once per step. */
static double after_draft_ms(const so_planner *p, int rows) {
    return p->drafted ? 0 : so_costs_after_draft(&p->costs, rows);
}

/* The depth with the largest gain of the n candidates together; 0: none pays. *risky: a depth would
 * pay but exceeds the allowed risk. */
static int best_depth(so_planner *p, so_candidate *c, int n, const so_level_costs *costs,
                      bool *risky, double *gain) {
    double total = -p->price * after_draft_ms(p, rows_now(p) + n);
    double best = required_gain(p, n);
    double uncertainty = 0, catch_up = 0, check = 0;
    int rows = rows_now(p), limit = 0, depth = 0;
    *risky = false;
    for (int i = 0; i < n; i++) {
        uncertainty += (1 - c[i].evidence) / n;
        catch_up += c[i].catch_up_ms;
        check += c[i].check_ms;
        limit = SO_MAX(limit, c[i].query->max_depth);
        c[i].path = c[i].reach;
    }
    for (int d = 1; d <= SO_MIN(limit, DEPTHS) && rows + n * d <= p->step.max_rows; d++) {
        for (int i = 0; i < n; i++)
            total += level_gain(&c[i], d);
        total -= p->price * so_level_costs_next(costs, d);
        double extra_ms = so_costs_pass(&p->costs, rows + n * d) - so_costs_pass(&p->costs, rows) +
                          d * check + so_level_costs_sum(costs, d) + catch_up;
        if (total <= best)
            continue;
        if (extra_ms / p->plain_ms * uncertainty > max_risk(p)) {
            *risky = true;
            continue;
        }
        best = total;
        depth = d;
    }
    *gain = best;
    return depth;
}

/* How many of the n candidates draft (those with the most to gain), and how deep. Candidates whose
 * first guess is not worth its row and catch-up are left out. If the risk of all is too large, half
 * of them are tried. */
static int choose_requests(so_planner *p, so_candidate *c, int n, const so_level_costs *costs,
                           int *depth) {
    bool risky = true;
    double gain = 0;
    qsort(c, (size_t)n, sizeof *c, by_gain);
    while (n > 0 && !(c[n - 1].first_gain > 0))
        n--;
    for (*depth = 0; n > 0 && risky; n /= 2)
        if ((*depth = best_depth(p, c, n, costs, &risky, &gain)) > 0) {
            p->expected_gain += gain;
            p->n_drafting += n;
            return n;
        }
    return 0;
}

/* Terms if the drafter is known and uses them, otherwise a fixed depth. */
static void set_answer(so_candidate *c, int depth, int leaf) {
    so_plan_request *r = c->query->r;
    if (c->evidence < SO_TUNE_KNOWN || !r->set->drafters->leaves[leaf]->uses_terms) {
        c->query->max_depth = c->query->max_nodes = SO_MIN(c->query->max_depth, depth);
    } else {
        r->terms_leaf = r->terms_leaf < 0 ? leaf : r->terms_leaf;
        c->query->terms = c->terms;
    }
}

/* Whether drafts for all n candidates would pay, against plain decoding, with this acceptance at
 * every depth. */
static bool would_pay(so_planner *p, const so_candidate *c, int n, const so_level_costs *costs,
                      double chance) {
    double price = p->price / running_gain(p, p->step.n_requests + p->step.n_prefilling);
    double total = -price * after_draft_ms(p, rows_now(p) + n), path = 1, row_ms[DEPTHS];
    so_plan_row_costs(p, rows_now(p), n, row_ms);
    for (int d = 0; d < DEPTHS; d++) {
        path *= chance;
        total += n * (path - price * (row_ms[d] + c->check_ms));
        total -= price * so_level_costs_next(costs, d + 1);
        if (total > required_gain(p, n))
            return true;
    }
    return false;
}

/* Whether a probe of a candidate's drafter is due. passes: the cost of the probe in plain passes. A
 * known drafter is probed rarely if a probe would show little: another drafter is used in its place
 * or before it, its guesses are accepted and only its cost is too high, or drafts for all n
 * candidates would not pay even if half of the rejected guesses were accepted. */
static bool probe_is_due(so_planner *p, const so_candidate *c, int n, int leaf, double passes,
                         const so_level_costs *costs) {
    double since = p->token_clock - c->query->r->set->probed_at[leaf];
    if (since < SO_TUNE_PROBE_HOPELESS_EVERY && !would_pay(p, c, n, costs, SO_TUNE_BEST_CHANCE))
        return false; /* probed later all the same: its measured costs may be wrong */
    if (c->evidence < SO_TUNE_KNOWN)
        return since >= SO_TUNE_PROBE_EVERY || so_accept_is_recovering(&c->query->r->accept, leaf);
    double chance = (double)c->terms->chance[0][ALL];
    if (c->left_out || c->rank > 0 || chance >= SO_TUNE_PROBE_BELOW ||
        (n > 1 && !would_pay(p, c, n, costs, (1 + chance) / 2)))
        return since >= SO_MAX(SO_TUNE_PROBE_RARELY_EVERY, passes / SO_TUNE_PROBE_RARELY_MAX);
    return since >= SO_MAX(SO_TUNE_PROBE_EVERY, passes / SO_TUNE_PROBE_TIME_MAX) ||
           so_accept_is_recovering(&c->query->r->accept, leaf);
}

/* Called if no draft of this drafter pays in this step. If the account can pay for it, one request
 * drafts one guess, to see whether the drafter has improved: of the requests that are due, the one
 * whose last probe is the oldest. A point guess needs no row of the pass: the next tokens of the
 * text show whether it was right (shadow.h). */
static void try_probe(so_planner *p, so_candidate *c, int n, int leaf,
                      const so_level_costs *costs) {
    int rows = rows_now(p);
    const so_candidate *best = NULL;
    for (int i = 0; i < n && rows < p->step.max_rows; i++) {
        const so_candidate *x = &c[i];
        double extra_ms = so_level_costs_sum(costs, 1) + x->catch_up_ms;
        if (x->query->r->tree->max_rows > 0)
            extra_ms +=
                so_costs_pass(&p->costs, rows + 1) - so_costs_pass(&p->costs, rows) + x->check_ms;
        double passes = extra_ms / p->plain_ms;
        if (probe_is_due(p, x, n, leaf, passes, costs) && passes <= p->account &&
            (!best || x->query->r->probed_at < best->query->r->probed_at))
            best = x;
    }
    if (!best)
        return;
    best->query->max_depth = best->query->max_nodes = 1;
    best->query->r->probed_at = best->query->r->set->probed_at[leaf] = p->token_clock;
    so_smooth(&best->query->r->use_rate[leaf], 1, SO_TUNE_USE_PART);
    p->probing = true;
}

/* The expected gain of a drafter's chain for one request, with the level cost divided among the
 * requests of its set. reach, rank: of its first guess. *depth (may be NULL): at which it is reached. */
static double chain_gain(const so_planner *p, so_plan_query query, int leaf, double reach, int rank,
                         int *depth) {
    const so_plan_request *r = query.r;
    double row_ms[DEPTHS], best = 0, total = 0;
    int n = 0;
    for (int i = 0; i < p->n_entries; i++)
        n += p->entries[i].r && p->entries[i].r->set == r->set;
    so_level_costs costs = so_plan_level_costs(p, r->set, leaf, n, r->per_trip[leaf]);
    costs.trip_ms /= n;
    costs.level_ms /= n;
    if (r->gave_no_rows[leaf] && !drafts_ahead(r->set->drafters->leaves[leaf]))
        return 0;
    so_plan_row_costs(p, rows_now(p) - (r->tree->n_nodes - 1), 1, row_ms);
    so_candidate c = candidate_of(p, &query, leaf, reach, rank);
    set_price(p, &c, leaf, row_ms, &costs);
    for (int d = 1; d <= SO_MIN(query.max_depth, DEPTHS); d++) {
        total += level_gain(&c, d) - p->price * so_level_costs_next(&costs, d);
        if (total <= best)
            continue;
        best = total;
        if (depth)
            *depth = d;
    }
    return best;
}

/* For `a+b`, before a drafts: whether b without a gains more than both. */
static bool later_gains_more_alone(const so_planner *p, const so_plan_query *query, int stage) {
    const so_plan_set *s = query->r->set;
    const so_draft_stage *own = &s->drafters->stages[stage];
    int leaf = own->drafter->index;
    so_accept_key first = {leaf, 1, 0, -1};
    double gain = -1;
    for (int i = stage + 1; i < s->drafters->n_stages; i++) {
        int next = s->drafters->stages[i].drafter->index;
        if (s->drafters->stages[i].alternative != own->alternative || !s->costs[next] ||
            so_accept_evidence(&query->r->accept, next, 0) < SO_TUNE_KNOWN)
            continue;
        if (gain < 0)
            gain = chain_gain(p, *query, leaf, 1, 0, NULL);
        double fails = 1 - so_accept_get(&query->r->accept, &first, SO_TUNE_UNKNOWN_CHANCE);
        double more = chain_gain(p, *query, next, fails * novelty(s, next), 1, NULL);
        if (chain_gain(p, *query, next, 1, 0, NULL) > gain + more)
            return true;
    }
    return false;
}

/* Values the candidates. The cost of a row depends on how many first guesses are kept, and the
 * number kept depends on the cost of a row: three iterations are enough for both. */
static void value_candidates(const so_planner *p, so_candidate *c, int n, int stage,
                             const so_level_costs *costs) {
    int leaf = c->query->r->set->drafters->stages[stage].drafter->index;
    double row_ms[DEPTHS], kept = n;
    for (int i = 0; i < n; i++) {
        const so_plan_request *r = c[i].query->r;
        bool alone = r->tree->n_proposals == 0 && r->n_refused == 0;
        bool left_out = alone && later_gains_more_alone(p, c[i].query, stage);
        int rank = r->n_refused;
        double reach = reach_of(r, leaf, &rank);
        c[i] = candidate_of(p, c[i].query, leaf, reach, rank);
        c[i].left_out = left_out;
    }
    for (int k = 0; k < (n > 1 ? 3 : 1); k++) {
        so_plan_row_costs(p, rows_now(p), SO_MAX(1, (int)(kept + 0.5)), row_ms);
        kept = 0;
        for (int i = 0; i < n; i++) {
            set_price(p, &c[i], leaf, row_ms, costs);
            kept += c[i].keep_chance;
        }
    }
    for (int i = 0; i < n && c[i].tree; i++)
        c[i].terms->branch_price =
            (float)(p->price * so_plan_branch_ms(p, c[i].query->r->set, leaf, n));
}

/* Whether the method of this step leaves a drafter out. */
static bool is_off(const so_plan_request *r, const so_drafter *d) {
    const so_plan_set *s = r->set;
    if (r->o.length > 0 || !s->may_be_ahead)
        return false;
    return s->method == SO_METHOD_PLAIN || (s->method == SO_METHOD_SYNC && drafts_ahead(d));
}

void so_plan_set_depths(so_planner *p, int stage, so_plan_query *queries, int n) {
    so_candidate *c = p->candidates;
    int m = 0, depth = 0, chosen = 0, per_trip = DEPTHS;
    if (n == 0)
        return;
    const so_plan_set *s = queries[0].r->set;
    int leaf = s->drafters->stages[stage].drafter->index;
    for (int i = 0; i < n; i++)
        if (is_off(queries[i].r, s->drafters->stages[stage].drafter))
            queries[i].max_depth = 0;
    for (int i = 0; i < n; i++) {
        so_plan_request *r = queries[i].r;
        queries[i].terms = NULL;
        queries[i].max_nodes = 0;
        r->accept.own[leaf].refused_before = (uint8_t)r->n_refused;
        if (drafts_ahead(s->drafters->leaves[leaf]) && r->o.length == 0)
            queries[i].max_depth = SO_MIN(queries[i].max_depth, r->ahead_depth);
        else if (r->o.length == 0 && queries[i].max_depth > 0 && needs_plan(p, s, leaf, r->tree))
            c[m++].query = &queries[i];
    }
    if (m == 0)
        return;
    for (int i = 0; i < m; i++) /* if one needs a trip for each level, all get them */
        per_trip = SO_MIN(per_trip, c[i].query->r->per_trip[leaf]);
    so_level_costs costs = so_plan_level_costs(p, s, leaf, m, per_trip);
    /* Without a cost curve the first pass is plain. */
    bool may = p->plain_ms > 0 && !p->force_plain;
    if (may) {
        value_candidates(p, c, m, stage, &costs);
        chosen = choose_requests(p, c, m, &costs, &depth);
    }
    for (int i = 0; i < m; i++) {
        if (i < chosen)
            set_answer(&c[i], depth, leaf);
        else
            c[i].query->max_depth = 0;
        if (may)
            so_smooth(&c[i].query->r->use_rate[leaf], i < chosen, SO_TUNE_USE_PART);
    }
    if (chosen == 0 && may)
        try_probe(p, c, m, leaf, &costs);
}

/* --- after drafting --- */

/* A drafter's first proposal at the root; −1: none. *is_new: no earlier drafter made this guess. */
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

/* Learns from a drafter's first guess: whether it is new among merged drafters, and its confidence,
 * counted at its rank and also at rank 0. */
static void observe_first_guess(so_plan_request *r, int leaf) {
    const so_tree *t = r->tree;
    bool is_new;
    int i = first_proposal(t, leaf, &is_new);
    if (i < 0)
        return;
    if (i != t->nodes[0].first)
        so_smooth(&r->set->novelty[leaf], is_new, SO_TUNE_YIELD_PART);
    so_accept_key k = so_accept_key_of(&r->accept, t, i);
    so_accept_add_confidence(&r->accept, &k);
    if (k.rank > 0)
        so_accept_add_confidence(&r->accept, &(so_accept_key){leaf, 1, 0, k.confidence});
}

/* Learns from a row that a drafter computed but did not find worth a guess. */
static void observe_refusal(so_plan_request *r, int leaf, const so_draft_job *job) {
    so_accept_key k = {leaf, job->refused_depth, 0, (double)job->refused_confidence};
    double reach = 1;
    if (k.depth == 1) { /* none of the guesses in the tree is its own */
        k.rank = r->n_refused++;
        reach = chance_all_fail(r, &k.rank);
        so_accept_add_confidence(&r->accept, &k);
        if (k.rank > 0)
            so_accept_add_confidence(&r->accept, &(so_accept_key){leaf, 1, 0, k.confidence});
    }
    so_accept_add_refused(&r->accept, &k, reach);
}

void so_plan_observe_draft(so_planner *p, int stage, so_plan_query *queries,
                           const so_draft_job *jobs, int n, double ms) {
    so_draft_usage u = {.ms = ms};
    if (n == 0)
        return;
    so_plan_set *s = queries[0].r->set;
    int leaf = s->drafters->stages[stage].drafter->index;
    for (int i = 0; i < n; i++) {
        const so_draft_job *job = &jobs[i];
        so_plan_request *r = queries[i].r;
        observe_first_guess(r, leaf);
        r->gave_no_rows[leaf] = job->n_levels == 0;
        if (job->n_levels == 0)
            continue;
        u.chains += SO_MAX(1, (job->n_level_rows + job->n_levels - 1) / job->n_levels);
        u.levels = SO_MAX(u.levels, job->n_levels);
        u.passes = SO_MAX(u.passes, job->n_passes);
        u.max_catch_up = SO_MAX(u.max_catch_up, job->n_catch_up);
        u.n_catch_up += job->n_catch_up;
        r->n_prefilled[leaf] = queries[i].n_tokens;
        r->per_trip[leaf] = SO_MAX(job->levels_per_pass, 1);
        if (r->terms_leaf == leaf)
            r->usage =
                (so_draft_usage){.chains = 1, .levels = job->n_levels, .passes = job->n_passes};
        if (job->refused_depth > 0)
            observe_refusal(r, leaf, job);
    }
    if (!s->costs[leaf]) {
        p->drafted_ms += SO_MAX(ms, 0);
        return;
    }
    p->drafted |= u.levels > 0;
    so_costs_observe_draft(&p->costs, s->costs[leaf], &u);
    double levels_ms = so_plan_usage_ms(p, s, leaf, &u);
    double expected_ms = levels_ms + u.n_catch_up * so_costs_catch_up(&p->costs, s->costs[leaf]);
    p->levels_ms += levels_ms;
    p->expected_draft_ms += expected_ms;
    p->drafted_ms += ms > 0 ? ms : expected_ms;
}

/* --- keep or go on --- */

/* The gain of the point guesses of a tree, beyond the cost of their rows. */
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
    so_selection_limits l = {.price = p->price, .max_risk = 1e9, .max_rows = p->step.max_rows};
    double before = so_costs_pass(&p->costs, sum.rows);
    so_selection_choose(&p->selection, &p->costs, &l, &sum);
    return sum.tokens - p->price * (so_costs_pass(&p->costs, sum.rows) + sum.test_ms - before);
}

/* The mean gain of a paid drafter's rounds at the current price; 0: too few rounds. */
static double yield_gain(const so_planner *p, const so_plan_request *r, int leaf) {
    const so_yield *own = &r->yields[leaf], *all = &r->set->yields[r->o.mode][leaf];
    if (all->tokens.n < SO_TUNE_YIELD_ROUNDS)
        return 0;
    double w = (double)own->tokens.n / (own->tokens.n + SO_TUNE_YIELD_ROUNDS);
    double tokens = w * own->tokens.value + (1 - w) * all->tokens.value;
    double passes = w * own->passes.value + (1 - w) * all->passes.value;
    return tokens - p->price * p->plain_ms * passes;
}

/* The expected gain of a paid drafter for a request, in place of the guesses in its tree. 0 if it
 * would not be used. */
static double gain_of_stage(so_planner *p, const so_plan_query *query, int leaf) {
    const so_plan_request *r = query->r;
    int n = p->step.n_requests, rows = rows_now(p) - (r->tree->n_nodes - 1);
    double best =
        chain_gain(p, *query, leaf, 1, 0, NULL) - p->price * after_draft_ms(p, rows_now(p) + n) / n;
    double evidence = so_accept_evidence(&r->accept, leaf, 0);
    double ms = so_costs_pass(&p->costs, rows + 1) - so_costs_pass(&p->costs, rows) +
                so_plan_one_guess_ms(p, r->set, leaf) + so_plan_catch_up_ms(p, query, leaf);
    if (best <= required_gain(p, n) / n || ms / p->plain_ms * (1 - evidence) > max_risk(p))
        return 0;
    return evidence >= SO_TUNE_KNOWN ? SO_MAX(best, yield_gain(p, r, leaf)) : best;
}

/* Whether a paid drafter of a later alternative is expected to gain more than the free guesses in
 * the tree. */
static bool paid_stage_gains_more(so_planner *p, const so_plan_query *query, int alternative) {
    const so_draft_set *d = query->r->set->drafters;
    double have = -1;
    for (int i = 0; i < d->n_stages; i++) {
        int leaf = d->stages[i].drafter->index;
        if (d->stages[i].alternative <= alternative || !query->r->set->costs[leaf])
            continue;
        if (have < 0)
            have = gain_of_points(p, query->r);
        if (gain_of_stage(p, query, leaf) > have)
            return true;
    }
    return false;
}

static bool first_guess_is_bad(const so_plan_request *r) {
    const so_proposal *q = &r->tree->proposals[0];
    so_accept_key k = {q->drafter, 1, 0, (double)q->confidence};
    return so_accept_evidence(&r->accept, q->drafter, 0) >= SO_TUNE_KNOWN &&
           so_accept_get(&r->accept, &k, SO_TUNE_UNKNOWN_CHANCE) < SO_TUNE_FREE_CHANCE_MIN;
}

/* Guesses of a paid drafter stay: their cost is spent, and so_plan_choose trims them. */
static bool has_paid_guesses(const so_plan_request *r) {
    for (int i = 0; i < r->tree->n_proposals; i++)
        if (r->set->costs[r->tree->proposals[i].drafter])
            return true;
    return false;
}

/* Whether a draft that was made ahead waits in a later alternative. If its guesses are sampled, it must
 * be looked up: what the choice between alternatives is made from was measured while they were
 * sampled, so the choice could depend on them (draft/drafter.h, the rule of sight). */
static bool must_look_up(const so_plan_request *r, int alternative) {
    return r->o.mode == SO_PLAN_DRAWN && r->set->method == SO_METHOD_AHEAD &&
           r->set->ahead_alternative > alternative;
}

static void drop_guesses(so_plan_request *r) {
    so_tree *t = r->tree;
    if (so_tree_all_points(t))
        so_shadow_add(&r->shadow, &r->accept, t);
    so_tree_reset(t, t->nodes[0].token, t->root_pos);
}

/* Guesses that are dropped still become a shadow draft, so that a drafter that has improved is used
 * again. */
bool so_plan_keep_guesses(so_planner *p, const so_plan_query *query, int alternative) {
    so_plan_request *r = query->r;
    so_tree *t = r->tree;
    r->n_refused = 0; /* for the next alternative */
    if (t->n_proposals == 0)
        return false;
    if (r->o.length > 0)
        return true;
    if (!must_look_up(r, alternative) &&
        (!(p->plain_ms > 0) || !so_tree_all_points(t) || has_paid_guesses(r) ||
         !(first_guess_is_bad(r) || paid_stage_gains_more(p, query, alternative))))
        return true;
    drop_guesses(r);
    return false;
}

/* --- choose --- */

/* The guesses of one tree: into *sum if the tree must stay whole, otherwise into the selection. */
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
        e->tree->nodes[i].chance = e->chance[i];
        so_guess g = {value[i], t->nodes[i].depth == 1 ? (float)evidence : -1, (float)check, owner,
                      i};
        if (whole)
            so_sum_add(sum, &g);
        else
            so_selection_add(&p->selection, g);
    }
}

/* Learns the shortfall of drafts with a cost: the gain expected before drafting minus the gain
 * expected now that the guesses are known. Drafts are started where averages are too optimistic, so
 * the difference is positive in the mean; unknown costs are part of it too. */
static void learn_shortfall(so_planner *p, int rows) {
    double gain = -p->price * (p->levels_ms + so_costs_after_draft(&p->costs, rows));
    int kept = 0;
    so_mean *m = shortfall(p);
    if (!p->drafted || p->probing || !(p->expected_gain > 0) || p->step.prompt_rows > 0) {
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
    so_smooth(m, (p->expected_gain - gain) / p->n_drafting, SO_TUNE_SHORTFALL_PART);
}

/* Learns the yield of a round of a paid drafter: expected tokens and passes beyond plain
 * decoding. */
static void learn_yield(so_planner *p, const so_plan_entry *e) {
    so_plan_request *r = e->r;
    const so_tree *t = e->tree;
    float value[SO_TREE_MAX] = {1};
    double tokens = 0;
    int rows = p->step.n_requests + p->step.prompt_rows;
    if (!r || r->terms_leaf < 0 || r->usage.levels == 0 || p->probing || !(p->plain_ms > 0))
        return;
    bool refused = t->n_proposals == 0 || t->proposals[0].drafter != r->terms_leaf;
    int kept = refused ? 0 : e->n_keep; /* guesses of another drafter are not its yield */
    for (int i = 1; i < t->n_nodes && !refused; i++) {
        value[i] = value[t->nodes[i].parent] * e->chance[i];
        tokens += e->keep[i] ? (double)value[i] : 0;
    }
    double ms = so_costs_pass(&p->costs, rows + kept) - p->plain_ms +
                so_plan_usage_ms(p, r->set, r->terms_leaf, &r->usage) +
                kept * so_costs_check(&p->costs, r->o.verify);
    so_yield *own = &r->yields[r->terms_leaf], *all = &r->set->yields[r->o.mode][r->terms_leaf];
    so_smooth(&own->tokens, tokens, SO_TUNE_OWN_YIELD_PART);
    so_smooth(&own->passes, ms / p->plain_ms, SO_TUNE_OWN_YIELD_PART);
    so_smooth(&all->tokens, tokens, SO_TUNE_YIELD_PART);
    so_smooth(&all->passes, ms / p->plain_ms, SO_TUNE_YIELD_PART);
}

/* Points are trimmed when they are there. Sampled guesses are not, so their depth is chosen now; at least
 * one, or nothing would be learned about them. */
int so_plan_ahead_depth(so_planner *p, int stage, const so_plan_query *query) {
    so_plan_request *r = query->r;
    int leaf = r->set->drafters->stages[stage].drafter->index, depth = 1;
    if (r->o.length > 0)
        return query->max_depth;
    r->ahead_depth = 0;
    if (r->set->next_method != SO_METHOD_AHEAD || query->max_depth <= 0)
        return 0;
    if (r->tree->max_rows > 0 && p->plain_ms > 0)
        chain_gain(p, *query, leaf, 1, 0, &depth);
    else
        depth = query->max_depth;
    return r->ahead_depth = SO_MIN(depth, query->max_depth);
}

const so_plan *so_plan_choose(so_planner *p) {
    int n = p->n_entries;
    so_sum sum = {.tokens = n, .rows = p->step.n_requests + p->step.prompt_rows};
    so_selection_limits l = {.price = p->price,
                             .margin = p->drafted ? 0 : margin(p), /* drafting is paid for */
                             .max_risk = max_risk(p),
                             .max_rows = p->step.max_rows};
    so_selection_clear(&p->selection);
    for (int i = 0; i < n; i++) {
        if (p->entries[i].r)
            so_shadow_add(&p->entries[i].r->shadow, &p->entries[i].r->accept, p->entries[i].tree);
        gather(p, i, &sum);
    }
    int chosen = p->force_plain ? 0 : so_selection_choose(&p->selection, &p->costs, &l, &sum);
    for (int k = 0; k < chosen; k++) {
        const so_guess *g = so_selection_get(&p->selection, k);
        p->entries[g->owner].keep[g->node] = true;
        p->entries[g->owner].n_keep++;
    }
    /* Drafting counts with its expected time if that is lower: a slow moment of the machine says
     * nothing about the plan. */
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
                        .uncertainty = so_sum_uncertainty(&sum),
                        .probe = p->probing};
    for (int i = 0; i < n; i++) {
        learn_yield(p, &p->entries[i]);
        if (p->entries[i].n_keep < p->entries[i].tree->n_nodes - 1)
            so_tree_prune(p->entries[i].tree, p->entries[i].keep);
    }
    so_plan_choose_methods(p);
    return &p->plan;
}

double so_plan_rows_ms(const so_planner *p, int rows) {
    int base = p->step.n_requests + p->step.prompt_rows;
    return rows > 0 ? so_costs_pass(&p->costs, base + rows) - so_costs_pass(&p->costs, base) : 0;
}

const so_plan *so_plan_add_rows(so_planner *p, int rows) {
    so_plan *plan = &p->plan;
    if (rows > 0)
        plan->ms +=
            so_costs_pass(&p->costs, plan->n_rows + rows) - so_costs_pass(&p->costs, plan->n_rows);
    plan->n_rows += rows;
    return plan;
}

/* --- verdict, end --- */

void so_plan_observe_verdict(so_planner *p, so_plan_request *r, const so_tree *tree,
                             const so_verdict *v, so_verify_mode mode, double ms) {
    so_costs_observe_verdict(&p->costs, mode, v, ms);
    if (r)
        so_accept_verdict(&r->accept, tree, v);
}

/* Updates the exploration account (plan.h). Uses times of the cost curve, not of the clock, because
 * the account judges the decision, and a page fault says nothing about the decision. A loss is
 * weighted by the uncertainty about the drafters: a loss with a well-known drafter is bad luck, and
 * the estimates already include it. */
static void update_account(so_planner *p, double tokens) {
    const so_plan *plan = &p->plan;
    double gain = plan->ms > plan->plain_ms ? tokens - plan->ms / plan->plain_ms : 0;
    if (gain < 0 && !plan->probe)
        gain *= plan->uncertainty;
    double sum = p->account + SO_TUNE_ACCOUNT_EARN * tokens + gain;
    p->account = SO_MAX(SO_TUNE_ACCOUNT_MIN, SO_MIN(sum, SO_TUNE_ACCOUNT_MAX));
    p->token_clock += tokens;
}

static void learn_rate(so_yield *y, double tokens, double passes, double part) {
    so_smooth(&y->tokens, tokens, part);
    so_smooth(&y->passes, SO_MIN(passes, SO_TUNE_RATE_MAX_PASSES), part);
}

void so_plan_end(so_planner *p, double pass_ms, double step_ms, int n_tokens) {
    const so_plan *plan = &p->plan;
    if (plan->plain_ms > 0 && plan->n_requests > 0) {
        double tokens = (double)n_tokens / plan->n_requests;
        int k = so_plan_size_class(plan->n_requests);
        update_account(p, tokens);
        if (p->step.prompt_rows == 0) { /* steps with prefill say little about the rate */
            learn_rate(&p->rates[k], tokens, plan->ms / plan->plain_ms, SO_TUNE_RATE_PART);
            learn_rate(&p->rates_now[k], tokens, plan->ms / plan->plain_ms, SO_TUNE_RATE_NOW_PART);
        }
    }
    bool was_plain = plan->n_rows == p->step.n_requests + p->step.prompt_rows && !p->drafted;
    p->steps_since_plain = was_plain || p->force_plain ? 0 : p->steps_since_plain + 1;
    so_costs_observe_pass(&p->costs, plan->n_rows, pass_ms, p->drafted);
    so_plan_observe_method(p, running_gain(p, p->step.n_requests), step_ms, n_tokens);
    p->n_passes++;
}
