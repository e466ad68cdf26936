/* What guesses take in this step of the planner, in milliseconds: rows of the target's pass, levels,
 * branches and catch-up of drafters. plan.c weighs them against the value of the guesses. From
 * costs.h; changes nothing. Thread: the engine thread. */
#include "plan/impl.h"
#include "plan/tuning.h"

so_level_costs so_plan_level_costs(const so_planner *p, const so_plan_set *s, int leaf, int chains,
                                   int per_trip) {
    const so_draft_cost *d = s->costs[leaf];
    so_level_costs l = {.per_trip = per_trip};
    if (!d)
        return l;
    l.trip_ms = so_costs_trip(&p->costs, d);
    l.level_ms = so_costs_level(&p->costs, d, chains);
    l.hoped_trip_ms = so_costs_trip_hoped(&p->costs, d);
    if (s->drafters->leaves[leaf]->flat_cost)
        l = (so_level_costs){.trip_ms = l.trip_ms + l.level_ms, .per_trip = SO_TERMS_DEPTHS};
    return l;
}

double so_plan_one_guess_ms(const so_planner *p, const so_plan_set *s, int leaf) {
    so_level_costs l = so_plan_level_costs(p, s, leaf, 1, 1);
    return so_level_costs_sum(&l, 1);
}

double so_plan_usage_ms(const so_planner *p, const so_plan_set *s, int leaf,
                        const so_draft_usage *u) {
    return s->costs[leaf] ? so_costs_usage(&p->costs, s->costs[leaf], u) : 0;
}

/* t(n) has jumps and a drafter looks only one level ahead. So the cost is the least mean cost of the
 * next few rows: a chain must not end at a jump whose cost the next levels share. so_plan_choose uses
 * the exact costs. */
void so_plan_row_costs(const so_planner *p, int rows, int n, double ms[SO_TERMS_DEPTHS]) {
    int ahead = SO_MAX(1, SO_TUNE_LOOK_AHEAD / n);
    double t[SO_TERMS_DEPTHS + 1];
    for (int d = 0; d <= SO_TERMS_DEPTHS; d++)
        t[d] = so_costs_pass(&p->costs, rows + n * d);
    for (int d = 0; d < SO_TERMS_DEPTHS; d++) {
        ms[d] = (t[d + 1] - t[d]) / n;
        for (int k = d + 2; k <= SO_MIN(SO_TERMS_DEPTHS, d + ahead); k++)
            ms[d] = SO_MIN(ms[d], (t[k] - t[d]) / n / (k - d));
    }
}

double so_plan_catch_up_ms(const so_planner *p, const so_plan_query *query, int leaf) {
    const so_draft_cost *cost = query->r->set->costs[leaf];
    int read = query->r->n_prefilled[leaf], unread = query->n_tokens - 1 - read;
    unread += read == 0 ? query->r->o.n_source : 0;
    return cost ? so_costs_catch_up(&p->costs, cost) * SO_MAX(unread, 0) : 0;
}

/* The cost is divided among the steps of the rest of the answer. But a drafter that was skipped in a
 * fraction f of the steps has to catch up again and again, and is charged at least the fraction f of
 * the cost. */
double so_plan_catch_up_part(const so_plan_query *query, int leaf) {
    double left = SO_MIN(query->tokens_left, SO_TUNE_ANSWER_TOKENS);
    double part = SO_MIN(1, SO_TUNE_STEP_TOKENS / SO_MAX(left, SO_TUNE_STEP_TOKENS));
    bool has_prefilled = query->r->n_prefilled[leaf] > 0;
    return has_prefilled ? SO_MAX(part, 1 - query->r->use_rate[leaf].value) : part;
}

double so_plan_branch_ms(const so_planner *p, const so_plan_set *s, int leaf, int n) {
    double before = so_plan_level_costs(p, s, leaf, n, 1).level_ms;
    return (so_plan_level_costs(p, s, leaf, n + SO_TUNE_BRANCHES, 1).level_ms - before) /
           SO_TUNE_BRANCHES;
}
