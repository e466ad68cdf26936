/* Beam search: which hypotheses live on and which have finished. The algorithm is that of
 * GenerationMixin._beam_search in Hugging Face transformers 5; beam.c states it in steps.
 *
 * A hypothesis is a path in a tree of nodes, one node for each token:
 *
 *   0: root ─┬─ 1 "cat" ─┬─ 3 "sat"        live      the hypotheses that the search continues
 *            │           └─ 4 end token    done      a finished hypothesis
 *            └─ 2 "dog" ─── 5 "ran"        live
 *
 * The root is the last token of the prompt. Nodes are numbered in order of creation, so a parent
 * comes before its children, and they are never renumbered.
 *
 * Scores are sums of log-probabilities in double. The caller computes them (so_sample_continuations)
 * and decides which tokens end a hypothesis. No models, no cache, no threads of its own. */
#ifndef SO_VERIFY_BEAM_H
#define SO_VERIFY_BEAM_H

#include "sample/sample.h"

enum { SO_BEAM_MAX = 64 }; /* hypotheses at a time */

/* When the search ends, once there are `width` finished hypotheses. */
typedef enum so_early_stop {
    SO_EARLY_STOP_NO,    /* the best live one, at its current length, is worse than all of them */
    SO_EARLY_STOP_YES,   /* at once */
    SO_EARLY_STOP_NEVER, /* as NO, but with a positive penalty at the greatest length */
} so_early_stop;

typedef struct so_beam_rule {
    int width;             /* 1 to SO_BEAM_MAX; 1 is greedy decoding: the first end ends it */
    double length_penalty; /* final score: sum / length^penalty, the end token counted */
    so_early_stop early_stop;
    int max_depth; /* tokens of the longest hypothesis */
} so_beam_rule;

typedef enum so_beam_end {
    SO_BEAM_GOES_ON,
    SO_BEAM_END_TOKEN, /* the last token of the hypothesis is an end token */
    SO_BEAM_STOP_STRING,
    SO_BEAM_FULL, /* max_depth, or the search was cut */
} so_beam_end;

typedef struct so_beam_node {
    int32_t token, parent; /* −1: the root */
    int32_t depth;         /* tokens of the hypothesis; 0: the root */
    float logprob;         /* of the token */
    double score;          /* sum of the log-probabilities of the path */
} so_beam_node;

typedef struct so_beam_done {
    double score; /* with the length penalty */
    int32_t node;
    so_beam_end why;
} so_beam_done;

typedef struct so_beam_search {
    so_beam_rule rule;
    so_beam_node *nodes;
    int n_nodes, cap;
    int32_t live[SO_BEAM_MAX]; /* nodes, best first */
    int n_live;
    so_beam_done done[SO_BEAM_MAX]; /* best first */
    int n_done;
    int depth; /* of the live ones */
    bool ended;
} so_beam_search;

void so_beam_init(so_beam_search *s, const so_beam_rule *rule, int32_t root_token);
void so_beam_deinit(so_beam_search *s);

/* A candidate of speculation: a draft model's guess of a hypothesis that will live on. parent: index
 * of another guess, or −1 − i for the live hypothesis i. depth: level, from 1; guesses of a level
 * come before those of the next. */
typedef struct so_beam_guess {
    int32_t token, parent, depth;
    double score; /* expected sum */
} so_beam_guess;

/* The continuations of one live hypothesis: tokens and log-probabilities, best first, lower id
 * first on ties. */
typedef struct so_beam_row {
    const so_scored *items;
    int n;
} so_beam_row;

/* How many continuations of each hypothesis a step needs, if n_ends tokens end a hypothesis: no
 * other one can be among the results. */
int so_beam_row_len(int width, int n_ends);

/* Whether the hypothesis that `token` continues after `parent` has finished, and why. */
typedef so_beam_end so_beam_ends_fn(void *user, int32_t parent, int32_t token);

/* One step: rows[i] are the continuations of live[i]. Not after the search has ended. */
void so_beam_step(so_beam_search *s, const so_beam_row *rows, so_beam_ends_fn *ends, void *user);
/* Ends the search now: the live hypotheses count as finished at their present length. */
void so_beam_cut(so_beam_search *s);
/* Copies the tokens of the hypothesis that ends in `node`; returns their number, its depth. */
int so_beam_tokens(const so_beam_search *s, int32_t node, int32_t *out);

#endif
