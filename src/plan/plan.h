/* The planner: decides which guesses are made and which go into the target's pass.
 *
 * Where the length of a draft is decided:
 *
 *   so_plan_set_depths     before drafting: which requests draft, and how deep. From the estimated
 *                          acceptance (acceptance.h), the costs (costs.h) and λ. A drafter with
 *                          so_drafter.uses_terms that is known well (SO_TUNE_KNOWN) gets
 *                          so_draft_terms and decides after each guess (draft/model.c), in a tree
 *                          also how many siblings (draft/model_tree.c); every
 *                          other drafter gets a fixed depth. Free drafters go as deep as the
 *                          request's limits allow.
 *   so_plan_keep_guesses   after an alternative of `a,b`: whether the free guesses of a stay, or
 *                          are dropped because b is expected to gain more.
 *   so_plan_choose         after drafting: which nodes of all trees go into the pass (select.h).
 *   so_plan_ahead_depth    after that: whether the next round is drafted ahead (draft/async.h), and how
 *                          deep. The methods with and without are compared by the clock (compare.h).
 *                          Drafts of a fixed length are always made ahead, without a comparison.
 *
 * The aim is the most tokens per unit of time in the long run. Time therefore has a price: λ, the
 * running rate of the whole batch in tokens per millisecond. Each step takes the guesses that
 * maximise
 *
 *   E[tokens] − λ · E[ms]
 *
 * A guess adds its value to E[tokens]: the chance that its whole path is accepted (for a later
 * sibling: that the earlier ones are rejected and this one is accepted). One comparison answers
 * every question:
 *
 *   draft another level?                    value before its row is seen > λ · (level + row)
 *   make another round trip for it?         the same, of all levels of the trip > λ · trip
 *   test a guess that was drafted?          value > λ · row: the level is already paid
 *   whose guesses go into the pass?         the largest values of all requests (select.h)
 *   free guesses or those of a model?       the larger gain
 *   draft at all in this step?              gain of all requests together > required gain
 *
 * The required gain is what the estimates must promise before a draft is started: 2 % of a token
 * for one request, 4 % of a token per request in a batch, plus the shortfall, the running mean by
 * which such promises were too high (required_gain in plan.c).
 *
 * λ = n · g / t(n). n is the number of requests, including those in prefill, because time costs
 * them as much. g is the number of tokens that a request gets in the time of one plain pass. It is
 * a running mean over steps, kept per class of batch size (1, 2-3, 4-7, … requests). There are a
 * slow and a fast mean; the lower one counts, and never less than 1. The unit of time in g is the
 * plain pass, so a slow minute of the machine does not change g. The best rate of the step itself
 * would be the wrong price: it makes drafts too short in easy passages and too long in hard ones.
 *
 * All chains drafted in one level share its cost. On a device several levels share a round trip,
 * which has a cost of its own (trip.h); where each level is a trip (sampled guesses, trees), both
 * costs are counted for each. Catch-up before the first guess is an investment; each step is charged
 * the part of it that it uses up.
 *
 * The loss against plain decoding is bounded by an exploration account, counted in plain passes:
 *
 *   start      half a pass
 *   income     0.65 % of a pass for each token of a request, and the time that a speculative step
 *              saved; at most sixteen passes are kept
 *   expenses   the time that a speculative step lost, times the uncertainty about its drafters. A
 *              loss with well-known drafters is bad luck, and the estimates already include it. A
 *              probe is charged in full
 *   limit      the extra time of a plan, times its uncertainty, must not exceed the account (a risk
 *              of 2 % of a pass is always allowed). A probe must not cost more than the account
 *
 * A drafter whose drafts do not pay is probed from time to time: one guess for one request. A probe
 * is due
 *
 *   at once            after a correct guess
 *   after 8 tokens     otherwise; for a well-known drafter later, if probes would take more than
 *                      2 % of the time
 *   after 64 tokens    and not earlier, even after a correct guess, if the drafter is well known and
 *                      either accurate but too slow, or another drafter is used in its place, or,
 *                      with several requests, it would be too slow even if it were right in half of
 *                      the cases in which it is wrong
 *                      (later, if probes would take more than 0.5 % of the time)
 *   after 512 tokens   if drafts would not pay even if nearly every guess were accepted
 *
 * While no drafter is in use, the 0.65 % are the only income, so they bound the cost of all probes.
 * Free guesses are scored as shadow drafts and need no probes.
 *
 * Order of calls in one step:
 *
 *   so_plan_begin            number of requests, rows of prefill
 *   so_plan_enter            each request that decides a token, with its tree
 *   so_plan_set_depths       for each stage of drafters: how deep, with which terms
 *   so_plan_observe_draft    what drafting took
 *   so_plan_keep_guesses     after each alternative: keep its guesses, or go on to the next one
 *   so_plan_choose           which nodes go into the pass; the trees are pruned
 *   so_plan_ahead_depth      per request: dispatch to a drafter that drafts ahead
 *   so_plan_observe_verdict  which guesses were accepted, per request
 *   so_plan_end              what the pass took
 *
 * Trees with sampled tokens are never pruned. A decision made after sampling could depend on a
 * sampled value, which would bias `reject` (rule of sight, draft/drafter.h).
 *
 * Owns all that is learned (costs.h, acceptance.h) and keeps it between runs (store.h). Reads no
 * clock and runs no model. Thread: the engine thread. */
#ifndef SO_PLAN_PLAN_H
#define SO_PLAN_PLAN_H

#include "draft/spec.h"
#include "plan/costs.h"
#include "plan/record.h"

typedef struct so_planner so_planner;
typedef struct so_plan_set so_plan_set;         /* the drafters of one spec */
typedef struct so_plan_request so_plan_request; /* one request's estimates */

so_planner *so_planner_create(int max_requests); /* maximum number of requests in one step */
/* NULL is fine. Free its sets and requests first. */
void so_planner_free(so_planner *p);

/* Reads and writes what was learned (store.h). Load before creating the first set. Failures only go
 * to the debug log. */
void so_planner_load(so_planner *p, const char *path, so_str key);
void so_planner_save(so_planner *p, const char *path, so_str key);
int so_planner_n_passes(const so_planner *p); /* passes of this run */
so_costs *so_planner_costs(so_planner *p);
double so_planner_account(const so_planner *p); /* the exploration account, in plain passes */

/* The drafters must outlive the set. */
so_plan_set *so_plan_set_create(so_planner *p, const so_draft_set *drafters);
/* Free its requests first. What was observed in them goes into the records. */
void so_plan_set_free(so_plan_set *s);

typedef struct so_plan_request_opts {
    so_plan_mode mode;
    so_verify_mode verify;
    int length;   /* > 0: drafts of this fixed length, without planning */
    int n_source; /* tokens of a source, which draft models read before their first draft */
} so_plan_request_opts;
so_plan_request *so_plan_request_create(so_plan_set *s, const so_plan_request_opts *o);
void so_plan_request_free(so_plan_request *r); /* NULL is fine */
/* Tokens that were appended to the text, in order. */
void so_plan_request_observe(so_plan_request *r, const int32_t *tokens, int n);
/* The drafters have released their caches: the next draft needs a full catch-up. */
void so_plan_request_preempted(so_plan_request *r);

/* The decision of a step, for traces. */
typedef struct so_plan {
    int n_requests, n_rows;
    double tokens;      /* expected, all requests together */
    double ms;          /* expected, drafting and pass */
    double plain_ms;    /* expected, the same pass without guesses */
    double uncertainty; /* in [0,1]: how little evidence there is about its drafters */
    bool probe;
} so_plan;

typedef struct so_plan_step {
    int n_requests;   /* that decide a token */
    int n_prefilling; /* that are still in prefill */
    int prompt_rows;  /* rows of prefill in the pass */
    int max_rows;     /* limit of the whole pass */
} so_plan_step;
void so_plan_begin(so_planner *p, const so_plan_step *step);
/* r NULL: the request does not speculate. tree: only its root. */
void so_plan_enter(so_planner *p, so_plan_request *r, so_tree *tree);

/* One request before a stage of drafting: limits in, depth and terms out. */
typedef struct so_plan_query {
    so_plan_request *r;
    int n_tokens;    /* length of its text */
    int tokens_left; /* tokens that it may still produce */
    int max_depth;   /* in: the limit; out: how deep to draft, 0: do not draft */
    int max_nodes;   /* out, of a tree: how many guesses; 0: up to the request's limit */
    const so_draft_terms *terms; /* out; NULL: draft to max_depth */
} so_plan_query;
/* Decides the depth of each query. All requests are of one set; `stage` is its next stage. */
void so_plan_set_depths(so_planner *p, int stage, so_plan_query *queries, int n);
/* The jobs of the requests with a depth above 0, in order, as the drafter returned them; ms: time
 * of the drafter's call, or -1 if it says nothing about the next ones. */
void so_plan_observe_draft(so_planner *p, int stage, so_plan_query *queries,
                           const so_draft_job *jobs, int n, double ms);
/* After all stages of an alternative: returns whether the request's guesses stay. If not, the tree
 * is reset to its root and the next alternative drafts. query: as for the next stage. */
bool so_plan_keep_guesses(so_planner *p, const so_plan_query *query, int alternative);

const so_plan *so_plan_choose(so_planner *p);
/* Rows of the pass that belong neither to prompts nor to trees (engine/ends.h): the time that they
 * would add; and, after so_plan_choose, the plan with that many of them. */
double so_plan_rows_ms(const so_planner *p, int rows);
const so_plan *so_plan_add_rows(so_planner *p, int rows);
/* The depth to which the request's next round is drafted during this step's pass, and looked up in that
 * round; 0: it is not. Decided before the dispatch and not changed until the lookup: the time that
 * drafting takes may depend on sampled tokens, so it must not decide whether they are tested (rule of
 * sight, draft/drafter.h). query: of the next round. */
int so_plan_ahead_depth(so_planner *p, int stage, const so_plan_query *query);
/* ms: the host's time for the verdict. r NULL: the request does not speculate. */
void so_plan_observe_verdict(so_planner *p, so_plan_request *r, const so_tree *tree,
                             const so_verdict *v, so_verify_mode mode, double ms);
/* pass_ms: of the pass, step_ms: of the whole step; -1 if they say nothing about the next ones. */
void so_plan_end(so_planner *p, double pass_ms, double step_ms, int n_tokens);

#endif
