/* A request's beam search: data of beam.c and, with speculation, beam_draft.c. Private to the
 * engine. */
#ifndef SO_ENGINE_BEAM_H
#define SO_ENGINE_BEAM_H

#include "engine/impl.h"

/* What the engine knows of a node of the search. */
typedef struct so_beam_state {
    int32_t slot;  /* in the cache; −1: not cached */
    int32_t row;   /* this pass: its row among those of the request's nodes; −1: none */
    int32_t logit; /* this pass: its logits row among the request's; −1: none */
    int32_t key;   /* this pass: what a guess after this node has as its parent; INT32_MIN: none */
    uint32_t mark; /* of list_tree */
    int32_t n_children;
} so_beam_state;

struct so_beams {
    so_beam_opts o;
    so_beam_search search;
    so_beam_state *states; /* [cap] by node */
    so_logprob *tops;      /* [cap][n_top] likeliest tokens after each node whose row was read */
    int n_top, cap;
    int32_t *tree; /* [cap] the base, then all nodes of live hypotheses below it, ascending */
    int n_tree;
    int32_t *kept; /* [kept_cap] scratch of keep() */
    int kept_cap;
    uint32_t mark;
    so_scored *items; /* [width][row_len] continuations of the live hypotheses */
    int row_len, n_items[SO_BEAM_MAX];
    bool scored[SO_BEAM_MAX]; /* their continuations are known */
    int32_t *text;            /* [max_len] scratch */
    so_detok detok;           /* at the end of the prompt */

    /* This step. */
    so_beam_guess guesses[SO_TREE_MAX]; /* level by level */
    int guess_logits[SO_TREE_MAX];
    int n_guesses, n_levels, n_logits;
    int n_pending;                          /* nodes that must still be computed after this pass */
    int n_done_steps, n_tested, n_accepted; /* of the pass: steps of the search; levels */
    bool usual;                             /* its time says how long such a pass takes */
    double draft_ms;

    /* beam_draft.c; draft_state is NULL without a draft. */
    so_drafter *drafter;
    void *draft_state;
    int32_t *ends;                          /* [n_ends] tokens that end a hypothesis */
    int n_ends, width, length, most_levels; /* width: candidates of a level; length: fixed, or 0 */
    bool drafted;                           /* it has made guesses before */

    int64_t n_steps; /* of the search */
    so_beam_result *results;
    int n_results;
};

#endif
