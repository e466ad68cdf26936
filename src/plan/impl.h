/* Internal to the planner: shared by plan.c (one step), price.c (what guesses take), method.c (when
 * to draft ahead) and learn.c (sets, requests, records). Not included elsewhere. */
#ifndef SO_PLAN_IMPL_H
#define SO_PLAN_IMPL_H

#include "plan/compare.h"
#include "plan/plan.h"
#include "plan/select.h"
#include "plan/shadow.h"
#include "plan/smooth.h"

enum { SO_PLAN_SIZES = 11 }; /* batch sizes, by the bit length of the number of requests */

/* Rounds of a drafter with a cost: expected tokens of their guesses beyond the plain token, and
 * time beyond the plain pass (in plain passes). Also used for the running rates. */
typedef struct so_yield {
    so_mean tokens, passes;
} so_yield;

struct so_plan_set {
    so_planner *p;
    const so_draft_set *drafters;
    so_draft_cost **costs; /* [n_leaves]; NULL: the drafter is free */
    so_accept_shared shared[SO_PLAN_MODES];
    so_yield *yields[SO_PLAN_MODES]; /* [n_leaves] */
    double *probed_at;               /* [n_leaves] value of so_planner.token_clock */
    so_mean *novelty;                /* [n_leaves] in a+b: how often the first guess is a new one */
    bool may_be_ahead, may_be_sync;  /* it has a stage that drafts ahead; and another one */
    int ahead_alternative;           /* of the stage that drafts ahead; -1: none */
    so_method method, next_method;   /* of this step and of the next one; if it may be ahead */
    so_compare compare[SO_PLAN_MODES][SO_PLAN_SIZES];
};

struct so_plan_request {
    so_plan_set *set;
    so_plan_request_opts o;
    so_accept accept;
    so_shadow shadow;
    so_yield *yields;   /* [n_leaves] */
    int *n_prefilled;   /* [n_leaves] tokens of the text in the cache of a drafter with a cost */
    bool *gave_no_rows; /* [n_leaves] the last call made no row */
    int *per_trip;      /* [n_leaves] most levels of a round trip, as of the last call */
    so_mean *use_rate;  /* [n_leaves] how often the drafter was used when it could be */
    double probed_at;   /* value of so_planner.token_clock */
    /* In this step: */
    so_tree *tree;
    so_draft_terms terms; /* of the drafter that is being valued or used */
    int terms_leaf;       /* the drafter with a cost that was given terms; −1: none */
    so_draft_usage usage; /* levels that it drafted, and their passes */
    int ahead_depth;      /* of the drafts made ahead for this step, decided in the step before */
    int n_refused;        /* drafters of this alternative that refused their first row */
};

/* A request in a step. */
typedef struct so_plan_entry {
    so_plan_request *r; /* NULL: does not speculate */
    so_tree *tree;
    float chance[SO_TREE_MAX];
    bool keep[SO_TREE_MAX];
    int n_keep;
} so_plan_entry;

/* A request for which the gain of one drafter is being estimated. */
typedef struct so_candidate {
    so_plan_query *query;
    double reach; /* chance that its first guess is new and is tested */
    /* Gain of the first guess, less the cost of its row and this step's part of the catch-up. */
    double first_gain;
    bool tree;          /* the drafter adds siblings */
    double keep_chance; /* chance that the first guess will be kept */
    double path;        /* value of the chain up to the current depth */
    double check_ms;    /* of one tested guess */
    double catch_up_ms; /* time of the catch-up before the first guess */
    double evidence;
    int rank;      /* of its first guess, among siblings */
    bool left_out; /* excluded: a later drafter of the same a+b gains more alone */
    so_draft_terms *terms;
} so_candidate;

struct so_planner {
    so_costs costs;
    so_records records;
    int n_passes;
    int max_requests;
    double account;     /* exploration account (plan.h), in plain passes */
    double token_clock; /* tokens per request since the start */
    /* Tokens and plain passes per step and request: long run, and latest steps. */
    so_yield rates[SO_PLAN_SIZES], rates_now[SO_PLAN_SIZES];
    so_mean shortfall[SO_PLAN_SIZES]; /* gain expected before minus after drafting, per request */
    so_selection selection;
    so_candidate *candidates; /* [max_requests] */
    so_plan_entry *entries;   /* [max_requests] */
    /* In this step: */
    int n_entries;
    so_plan_step step;
    double price; /* λ: tokens per millisecond */
    double plain_ms;
    double drafted_ms, expected_draft_ms; /* measured; expected from costs */
    double levels_ms;                     /* part of expected_draft_ms without catch-up */
    bool drafted;                         /* a drafter with a cost ran */
    double expected_gain;                 /* expected gain of these drafts */
    int n_drafting;                       /* requests that draft with a drafter that has a cost */
    bool probing;
    bool force_plain; /* decode plainly, to measure what that takes */
    int steps_since_plain;
    so_plan plan;
};

/* --- price.c --- */

/* What the levels of a call with this many chains cost. A cost that is the same for any depth
 * (so_drafter.flat_cost) is booked as one trip, whose levels are free. */
so_level_costs so_plan_level_costs(const so_planner *p, const so_plan_set *s, int leaf, int chains,
                                   int per_trip);
/* The time of one guess for one request. */
double so_plan_one_guess_ms(const so_planner *p, const so_plan_set *s, int leaf);
/* The time of the levels of a call, without catch-up. */
double so_plan_usage_ms(const so_planner *p, const so_plan_set *s, int leaf,
                        const so_draft_usage *u);
/* The time of one more branch in a level that n requests share. */
double so_plan_branch_ms(const so_planner *p, const so_plan_set *s, int leaf, int n);
/* The cost of one more row at each depth, if every level adds n rows to a pass that has `rows`
 * already. */
void so_plan_row_costs(const so_planner *p, int rows, int n, double ms[SO_TERMS_DEPTHS]);
/* The time of the drafter's catch-up; a source is part of the first one. */
double so_plan_catch_up_ms(const so_planner *p, const so_plan_query *query, int leaf);
/* The part of it that is charged to one step. */
double so_plan_catch_up_part(const so_plan_query *query, int leaf);

/* --- method.c --- */

int so_plan_size_class(int n_requests); /* below SO_PLAN_SIZES */
/* The method of the next step of each set. A mixed set follows its last request. */
void so_plan_choose_methods(so_planner *p);
/* gain: g of plan.h. */
void so_plan_observe_method(so_planner *p, double gain, double step_ms, int n_tokens);

#endif
