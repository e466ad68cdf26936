/* The planner: how much to guess, in one currency.
 *
 * The aim is the most tokens per unit of time in the long run. So a millisecond has a price: λ, the
 * running rate of the whole batch in tokens per millisecond, which is what the time would bring
 * otherwise. In each step the planner takes the guesses for which
 *
 *   E[tokens] − λ · E[ms]
 *
 * is largest. A guess's share of E[tokens] is its value, the chance that its whole path is accepted
 * (of a later sibling: that the earlier ones fail and this one stands). The same comparison answers
 * every question:
 *
 *   ask     draft another level?        value before its row is seen > λ · (level + row)
 *   keep    test what was drafted?      value > λ · row: the level is paid for by then
 *   which   whose guess goes in?        the largest values, of all requests (select.h)
 *   who     free guesses or a model's?  the larger gain
 *   begin   draft at all?               the gain of all requests together > 0
 *
 * λ is n · g / t(n) for n requests, those that still read their prompts among them, because time
 * costs them as much: g, the tokens that a request gains in the time of a plain pass, is a running
 * mean per size of the batch, never below 1. Measured against t(n) as the cost curve
 * has it at that moment, it does not follow the machine's slow minutes. A step's own best rate
 * would be the wrong price: it keeps easy passages short and hard ones long.
 *
 * The cost of a level is shared by all chains that are drafted in it. Reading a text before the
 * first guess is an investment, weighed by the part of it that a step uses up.
 *
 * Never slower. Estimates can be wrong, so what is tried without evidence is paid for out of an
 * account, counted in plain passes. It starts at half a pass, earns 0.65 % of a pass with every
 * token and whatever speculation gains (up to sixteen), and loses what a plan lost as far as its
 * drafters were not known well: the bad luck of the others is in the estimates already. A plan may
 * risk no more than the account holds. A drafter that was given up is probed with one guess every
 * eight tokens at most, and no more than 2 % of the time, or at once after a guess that was right;
 * alone it has only what tokens earn for that. Free guesses are scored in shadow and need no
 * probes.
 *
 * One step:
 *
 *   so_plan_begin     how many requests, how many rows beside them
 *   so_plan_enter     each request that decides a token, with its tree
 *   so_plan_ask_stage for each stage of drafters: how deep, and on what terms
 *   so_plan_drafted   what drafting took
 *   so_plan_keeps     after each alternative: whether its guesses stay or the next one is asked
 *   so_plan_choose    which nodes go into the pass; trees are pruned
 *   so_plan_verdict   what became of them, request by request
 *   so_plan_end       what the pass took
 *
 * Trees with drawn tokens are taken as they are: whether a token is drawn is decided before it is,
 * and leaving out what was drawn would bias `reject` (rule of sight).
 *
 * Owns all it learns (costs.h, acceptance.h) and keeps it between runs (store.h). No clock, no
 * models. One thread. */
#ifndef SO_PLAN_PLAN_H
#define SO_PLAN_PLAN_H

#include "draft/spec.h"
#include "plan/costs.h"
#include "plan/record.h"

typedef struct so_planner so_planner;
typedef struct so_plan_set so_plan_set;         /* the drafters of one spec */
typedef struct so_plan_request so_plan_request; /* a request's side of planning */

so_planner *so_planner_create(int max_requests); /* that take part in one step */
void so_planner_free(so_planner *p);             /* NULL is fine; sets and requests must be gone */

/* What was learned, from and to a file (store.h). Reading comes before the first set. Both are
 * silent but for the debug log. */
void so_planner_load(so_planner *p, const char *path, so_str key);
void so_planner_save(so_planner *p, const char *path, so_str key);
int so_planner_n_passes(const so_planner *p); /* learned from in this run */
so_costs *so_planner_costs(so_planner *p);
double so_planner_account(const so_planner *p); /* in plain passes */

/* The drafters must outlive the set. */
so_plan_set *so_plan_set_create(so_planner *p, const so_draft_set *drafters);
void so_plan_set_free(so_plan_set *s); /* its requests must be gone; what they showed is kept */

typedef struct so_plan_request_opts {
    so_plan_mode mode;
    so_verify_mode verify;
    int length; /* > 0: drafts of this length, and nothing is weighed */
} so_plan_request_opts;
so_plan_request *so_plan_request_create(so_plan_set *s, const so_plan_request_opts *o);
void so_plan_request_free(so_plan_request *r); /* NULL is fine */
/* Tokens that came into the text, in order. */
void so_plan_request_told(so_plan_request *r, const int32_t *tokens, int n);
/* The drafters have forgotten the text and must read it again. */
void so_plan_request_parked(so_plan_request *r);

/* What was decided, for traces. */
typedef struct so_plan {
    int n_requests, n_rows;
    double tokens;   /* expected, of all requests */
    double ms;       /* expected, of drafting and pass */
    double plain_ms; /* expected, of the pass without guesses */
    double doubt;    /* in [0,1]: how little is known of the drafters in it */
    bool probe;
} so_plan;

typedef struct so_plan_room {
    int n_requests; /* that decide a token */
    int n_reading;  /* that are still at their prompts */
    int other_rows; /* of prompts */
    int max_rows;   /* of the whole pass */
} so_plan_room;
void so_plan_begin(so_planner *p, const so_plan_room *room);
/* r NULL: the request does not speculate. tree: reset to its root. */
void so_plan_enter(so_planner *p, so_plan_request *r, so_tree *tree);

/* A question about one request, and the answer. */
typedef struct so_plan_ask {
    so_plan_request *r;
    int n_tokens;                /* of its text */
    int tokens_left;             /* that it may still get */
    int max_depth;               /* in: the limit; out: how deep to draft, 0: not at all */
    const so_draft_terms *terms; /* out; NULL: as deep as max_depth says */
} so_plan_ask;
/* Requests of one set before the drafter of `stage` gets them. */
void so_plan_ask_stage(so_planner *p, int stage, so_plan_ask *asks, int n);
/* The jobs of those that were given a depth, in order, as the drafter left them. */
void so_plan_drafted(so_planner *p, int stage, so_plan_ask *asks, const so_draft_job *jobs, int n,
                     double ms);
/* After the stages of an alternative: whether the request's guesses stay. If not, the tree is a
 * root again and the next alternative is asked. ask: as for the next stage. */
bool so_plan_keeps(so_planner *p, const so_plan_ask *ask, int alternative);

const so_plan *so_plan_choose(so_planner *p);
/* ms: what the host took for the verdict. r NULL: a request that does not speculate. */
void so_plan_verdict(so_planner *p, so_plan_request *r, const so_tree *tree, const so_verdict *v,
                     so_verify_mode mode, double ms);
void so_plan_end(so_planner *p, double pass_ms, int n_tokens);

#endif
