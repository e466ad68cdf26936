/* What the files of the planner share: plan.c (one step), learn.c (sets, requests, what is kept).
 * Nobody else includes this. */
#ifndef SO_PLAN_IMPL_H
#define SO_PLAN_IMPL_H

#include "plan/plan.h"
#include "plan/select.h"
#include "plan/shadow.h"
#include "plan/smooth.h"

/* What rounds of a drafter that costs have brought beyond the plain token, and taken beyond the
 * plain pass, in plain passes. */
typedef struct so_yield {
    so_mean tokens, passes;
} so_yield;

struct so_plan_set {
    so_planner *p;
    const so_draft_set *drafters;
    so_draft_cost **costs; /* [n_leaves]; NULL: the drafter is free */
    so_accept_shared shared[SO_PLAN_MODES];
    so_yield *yields[SO_PLAN_MODES]; /* [n_leaves] */
    double *probed_at;               /* [n_leaves]: so_planner.clock */
    so_mean *novelty; /* [n_leaves]: of a merged member: how often its first guess is a new one */
};

struct so_plan_request {
    so_plan_set *set;
    so_plan_request_opts o;
    so_accept accept;
    so_shadow shadow;
    so_yield *yields; /* [n_leaves] */
    int *n_read;      /* [n_leaves] tokens of the text that a drafter that costs has read */
    bool *silent;     /* [n_leaves] was asked last time and made no row */
    so_mean *asked;   /* [n_leaves] how often a drafter was asked when it could be */
    double probed_at; /* so_planner.clock */
    /* this step: */
    so_tree *tree;
    so_draft_terms terms; /* of the drafter that is being weighed or asked */
    int leaf;             /* the drafter that costs and was given terms; −1: none */
    int levels;           /* that it made */
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

/* A request whose draft is being weighed. */
typedef struct so_candidate {
    so_plan_ask *ask;
    double reach;    /* chance that its first guess is new and is tested */
    double first;    /* gain of the first guess beyond its row, less the step's share of reading */
    bool one_call;   /* a level costs once, however deep */
    double kept;     /* chance that the first guess will be kept */
    double path;     /* value of the chain so far */
    double check_ms; /* of a tested guess */
    double once_ms;  /* text to read first */
    double evidence;
    int rank;      /* of its first guess, among siblings */
    bool left_out; /* a drafter merged with it does better alone */
    so_draft_terms *terms;
} so_candidate;

enum { SO_PLAN_SIZES = 11 }; /* sizes of batches, by the bit length of the number of requests */

struct so_planner {
    so_costs costs;
    so_records records;
    int n_passes;
    int max_requests;
    double account; /* in plain passes */
    double clock;   /* tokens per request, since the beginning */
    /* Tokens of a request, and plain passes, per step: in the long run, and of late. */
    so_yield rates[SO_PLAN_SIZES], rates_now[SO_PLAN_SIZES];
    so_mean shortfall[SO_PLAN_SIZES]; /* what drafts brought less than was expected, per request */
    so_selection selection;
    so_candidate *candidates; /* [max_requests] */
    so_plan_entry *entries;   /* [max_requests] */
    /* this step: */
    int n_entries;
    so_plan_room room;
    double price; /* λ: tokens per millisecond */
    double plain_ms;
    double drafted_ms, expected_draft_ms; /* by the clock; by what is known */
    double levels_ms;                     /* of the latter: without reading */
    bool drafted;                         /* by a drafter that costs */
    double promised;                      /* gain that was expected of it */
    int n_asked;                          /* requests of which it was */
    bool probing;
    bool plain;      /* decoded plainly, to see what that takes */
    int since_plain; /* steps */
    so_plan plan;
};

#endif
