/* What is counted of a request's rounds, and the rates that follow from it. The only place where
 * these are defined; docs/speculation.md ("Metrics") has the same as a table, and
 * tests/engine/test_counts.c computes them by hand.
 *
 *   rounds             passes that decided a token of the answer
 *   asked (k)          how deep a draft the round asked for; 0: for none
 *   draft_n            guesses that went into a pass
 *   tested_n           guesses whose test decided something of the answer
 *   draft_n_accepted   those of them that stood
 *   predicted_n        tokens of the answer, without an end token
 *   end_n              1 where an end token ended it
 *
 *   tokens_per_pass    (predicted_n + end_n) / rounds: the passes that plain decoding needs for the
 *                      same answer over those that were made, so 1 without speculation
 *   mean_accepted      draft_n_accepted / rounds
 *   alpha              draft_n_accepted / tested_n
 *   acceptance_rate    draft_n_accepted / draft_n
 *   round_rate         mean of accepted/k over the rounds with k > 0
 *
 * What lies behind the end of an answer (an end token, a stop string, a caller who cancels) is
 * counted nowhere: neither as accepted nor as tested, as if the draft had ended there. Plain
 * decoding would never have come to it, and how well two models agree behind the end of a text
 * says nothing about the text. It biases nothing: whether a test is counted depends on the tokens
 * before it, never on its outcome. An end token that was guessed does count, as the pass it saved.
 *
 * So tests are counted one depth at a time, as tokens are emitted: before that nobody knows where
 * a stop string ends. Everything is counted before the event that it belongs to. Engine thread. */
#include "engine/impl.h"

/* k: the fixed length, as far as the request's limits leave room for it; without one the depth that
 * the planner put into the pass. */
static int asked(const so_request *r) {
    int depth = 0;
    if (!r->spec.plan)
        return 0;
    if (r->spec.length > 0)
        return r->spec.depth;
    for (int i = 1; i < r->tree->n_nodes; i++)
        depth = SO_MAX(depth, r->tree->nodes[i].depth);
    return depth;
}

static int depth_slot(int depth) { return SO_MIN(depth, SO_STATS_DEPTHS) - 1; }

void so_counts_begin(so_request *r) {
    so_request_stats *s = &r->stats;
    int n = r->tree->n_nodes - 1;
    s->rounds++;
    s->draft_n += n;
    s->drafted_rounds += n > 0;
    s->asked_rounds += asked(r) > 0;
    r->e->step.info.drafted += n;
    r->round_accepted = 0;
    r->round_rate_before = s->round_rate_sum;
}

static void count_accepted(so_request *r, int depth) {
    so_request_stats *s = &r->stats;
    s->per_depth[depth_slot(depth)].accepted++;
    s->draft_n_accepted++;
    r->e->step.info.accepted++;
    r->round_accepted++;
    if (asked(r) > 0) /* not in steps of 1/k: rounds that are all right shall come to 1 exactly */
        s->round_rate_sum = r->round_rate_before + (double)r->round_accepted / asked(r);
}

void so_counts_depth(so_request *r, int depth) {
    const so_verdict *v = &r->verdict;
    const so_tree *t = r->tree;
    int n = 0;
    for (int i = 0; i < v->n_tested; i++)
        n += t->nodes[t->proposals[v->tested[i]].child].depth == depth;
    r->stats.per_depth[depth_slot(depth)].tested += n;
    r->stats.tested_n += n;
    r->e->step.info.tested += n;
    if (depth <= v->n_accepted)
        count_accepted(r, depth);
}

void so_counts_token(so_request *r) {
    r->stats.predicted_n++;
    r->e->step.info.emitted++;
}

void so_counts_end_token(so_request *r) {
    r->stats.end_n++;
    r->e->step.info.ended++;
}

/* --- rates --- */

static double rate(double a, double b) { return b > 0 ? a / b : -1; }

so_rates so_stats_rates(const so_request_stats *s) {
    return (so_rates){.tokens_per_pass = rate(s->predicted_n + s->end_n, s->rounds),
                      .mean_accepted = rate(s->draft_n_accepted, s->rounds),
                      .alpha = rate(s->draft_n_accepted, s->tested_n),
                      .acceptance_rate = rate(s->draft_n_accepted, s->draft_n),
                      .round_rate = rate(s->round_rate_sum, s->asked_rounds)};
}

void so_stats_add(so_request_stats *to, const so_request_stats *s) {
    to->prompt_n += s->prompt_n;
    to->predicted_n += s->predicted_n;
    to->end_n += s->end_n;
    to->cached_n += s->cached_n;
    to->preempted_n += s->preempted_n;
    to->queue_ms += s->queue_ms;
    to->prompt_ms += s->prompt_ms;
    to->predicted_ms += s->predicted_ms;
    to->rounds += s->rounds;
    to->draft_n += s->draft_n;
    to->draft_n_accepted += s->draft_n_accepted;
    to->draft_ms += s->draft_ms;
    to->verify_ms += s->verify_ms;
    to->tested_n += s->tested_n;
    to->drafted_rounds += s->drafted_rounds;
    to->asked_rounds += s->asked_rounds;
    to->round_rate_sum += s->round_rate_sum;
    for (int i = 0; i < SO_STATS_DEPTHS; i++) {
        to->per_depth[i].tested += s->per_depth[i].tested;
        to->per_depth[i].accepted += s->per_depth[i].accepted;
    }
}
