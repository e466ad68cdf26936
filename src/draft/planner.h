/* The planner: which guesses are worth checking, in expected tokens per millisecond.
 *
 * A set of guesses under the running requests makes the pass n rows long, which costs t(n), and
 * yields one token per request plus, for every guess, the chance that its whole path is accepted.
 * The planner takes the set with the most tokens per millisecond; the empty set is plain decoding.
 * For a given size the best set is that of the most likely paths (a path is never likelier than its
 * beginning, so parents come along), so one sorted list and its prefixes hold the answer.
 *
 *   before drafting   so_planner_lengths   how many tokens to draft, where drafting costs or draws
 *   after drafting    so_planner_choose    which nodes of the trees go into the pass
 *   after the pass    so_planner_observe   what it took, and how many tokens came of it
 *
 * Trees with drawn tokens are taken as they are: their shape was fixed before drawing, and leaving
 * out what was drawn would bias `reject` (rule of sight).
 *
 * Never slower. Estimates can be wrong, so plans are paid for out of a balance, counted in plain
 * passes. It starts at 0.5, earns 0.65 % of a pass with every token and whatever speculation gains
 * (up to sixteen passes), and loses what a plan lost, as far as its drafters were not known well:
 * their bad luck is in the objective already. A plan may risk no more than the balance holds; a
 * drafter without evidence risks all that drafting and checking cost, a well-known one next to
 * nothing. Reading a long prompt for the first guess is an investment: risked whole, weighed as far
 * as it is used up by this step. So a hopeless drafter that costs takes less than a pass once and
 * 0.65 % after that, as probes: one token, every eight at most, or at once after one that was
 * right, so that a drafter that is good again is soon taken back. Guesses scored in shadow cost
 * nothing.
 *
 * Pure arithmetic over memory of its own; no clock, no models. One thread. */
#ifndef SO_DRAFT_PLANNER_H
#define SO_DRAFT_PLANNER_H

#include "draft/curve.h"
#include "token/tree.h"

typedef struct so_planner so_planner;
/* length > 0 fixes the depth of drafts (--spec-length): nothing is weighed then. */
so_planner *so_planner_create(int length);
void so_planner_free(so_planner *p); /* NULL is fine */
so_curve *so_planner_curve(so_planner *p);
double so_planner_balance(const so_planner *p);

/* What else the pass holds. */
typedef struct so_plan_env {
    int other_rows;  /* prompt chunks */
    int max_rows;    /* of the whole pass */
    double draft_ms; /* spent on drafting already, in this step */
    double step_ms;  /* so_planner_lengths: one drafting step of all chains together */
} so_plan_env;

/* What was decided, for traces and for so_planner_observe. */
typedef struct so_plan {
    int n_requests, n_rows;
    double tokens;   /* expected, of all requests */
    double ms;       /* expected, of drafting and pass */
    double plain_ms; /* expected, of the pass without guesses */
    double unsure;   /* in [0,1]: how little is known of the drafters in it */
    bool probe;
} so_plan;

/* A request that is about to draft a chain. */
typedef struct so_plan_chain {
    const float *accept; /* [max_len]: chance at depth 1, 2, … if tested */
    int max_len;
    double node_ms; /* of each guess beyond its row: what checking it costs the host */
    double sure;    /* so_estimate_sure */
    bool shadowed;  /* outcomes become known without tests: never probed */
    bool hopeful;   /* so_estimate_hopeful */
    int length;     /* the answer */
    double once_ms; /* before the first guess: text that the drafter has not read … */
    double horizon; /* … which serves for this many tokens to come; 0: for this step alone */
} so_plan_chain;
void so_planner_lengths(so_planner *p, so_plan_chain *chains, int n, const so_plan_env *env,
                        so_plan *out);

/* What one chain would be worth beside the roots of n requests: the best of its lengths in tokens a
 * millisecond, over that of the roots alone. 1 where no length is, or none may be risked. */
double so_planner_worth(const so_planner *p, const so_plan_chain *c, int n, const so_plan_env *env);

/* A request that has its tree. */
typedef struct so_plan_tree {
    const so_tree *tree;
    const float *accept; /* [n_nodes]: chance of each node if its parent was accepted */
    double node_ms;      /* as in so_plan_chain */
    double sure;
    bool whole;             /* taken as it is: its length was fixed by the user */
    bool keep[SO_TREE_MAX]; /* the answer; the root is always kept */
    int n_keep;             /* nodes kept below the root */
} so_plan_tree;
void so_planner_choose(so_planner *p, so_plan_tree *trees, int n, const so_plan_env *env,
                       so_plan *out);
/* Removes what is not kept; indices change. */
void so_plan_prune(so_tree *t, const bool keep[SO_TREE_MAX]);

/* The plan was carried out: the pass alone took pass_ms and n_tokens were emitted. */
void so_planner_observe(so_planner *p, const so_plan *plan, double pass_ms, int n_tokens);

#endif
