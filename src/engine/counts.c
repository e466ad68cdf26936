/* Counts of a request's rounds, and the rates derived from them. They are defined only here;
 * docs/speculation.md ("Metrics") repeats them as a table, and tests/engine/test_counts.c checks
 * them against values computed by hand.
 *
 *   rounds             passes that decided a token of the answer
 *   asked (k)          depth of the draft that the round asked for; 0: none
 *   draft_n            guesses that were in a pass
 *   tested_n           guesses that were verified: not those below a rejected guess, nor after
 *                      the end of the answer
 *   draft_n_accepted   accepted ones among them
 *   predicted_n        tokens of the answer, without an end token
 *   end_n              1 if an end token ended the answer
 *
 *   tokens_per_pass    (predicted_n + end_n) / rounds: the number of passes that plain decoding
 *                      needs for this answer, divided by the passes made; 1 without speculation
 *   mean_accepted      draft_n_accepted / rounds
 *   alpha              draft_n_accepted / tested_n: estimates α, the chance that a guess is
 *                      accepted, given that it is tested
 *   acceptance_rate    draft_n_accepted / draft_n: not α. draft_n includes guesses that were
 *                      never tested (below a rejected guess, or after the end of the answer), so
 *                      this rate is at most alpha
 *   round_rate         mean of accepted/k over the rounds with k > 0
 *   hit_rate           async.hits / (async.rounds + async.skipped): of the rounds that looked for a
 *                      draft that was made ahead (draft/async.h), those that found one
 *   tokens_per_second  (predicted_n − first_n) / predicted_ms: predicted_ms begins with the first
 *                      token, so the tokens of the first round have no time in it
 *
 * Guesses after the end of an answer (end token, stop string, cancellation) are counted neither as
 * accepted nor as tested, as if the draft had ended there. Plain decoding would never have reached
 * them, and how well two models agree after the end of a text is irrelevant for the text. This
 * causes no bias: whether a guess is counted depends on the tokens before it, never on its own
 * verdict. A guessed end token is counted, because it saved a pass.
 *
 * For this reason guesses are counted one depth at a time while tokens are emitted: only then is it
 * known where a stop string ends. Each count is updated before the event that it belongs to. Engine
 * thread. */
#include "engine/impl.h"

/* k: the fixed length, limited by the request's room for guesses; without a fixed length the depth
 * of the tree in the pass. */
static int asked_depth(const so_request *r) {
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
    s->asked_rounds += asked_depth(r) > 0;
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
    if (asked_depth(r) > 0) /* not a sum of 1/k: a fully accepted round adds exactly 1 */
        s->round_rate_sum = r->round_rate_before + (double)r->round_accepted / asked_depth(r);
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
    r->stats.first_n += r->stats.rounds == 1;
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
                      .hit_rate = rate(s->async.hits, s->async.rounds + s->async.skipped),
                      .round_rate = rate(s->round_rate_sum, s->asked_rounds),
                      .tokens_per_second =
                          s->predicted_n > s->first_n
                              ? rate(1000.0 * (s->predicted_n - s->first_n), s->predicted_ms)
                              : -1};
}

void so_stats_add(so_request_stats *to, const so_request_stats *s) {
    if (s->predicted_n > 0) /* the earliest of all */
        to->ttft_ms = to->predicted_n ? SO_MIN(to->ttft_ms, s->ttft_ms) : s->ttft_ms;
    to->prompt_n += s->prompt_n;
    to->first_n += s->first_n;
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
    so_async_counts_add(&to->async, &s->async);
    for (int i = 0; i < SO_STATS_DEPTHS; i++) {
        to->per_depth[i].tested += s->per_depth[i].tested;
        to->per_depth[i].accepted += s->per_depth[i].accepted;
    }
}
