/* The token tree of one request in one step: drafters add guesses, one forward pass scores them,
 * the verifier accepts a path.
 *
 *        0: "the"            node 0 is the root: the last token of the text, not yet in the cache
 *       /       \
 *    1: "cat"  3: "dog"      children are guesses for the next position
 *      |
 *    2: "sat"                a parent has a lower index than its children; depth increases by one
 *
 * A chain is a tree without siblings; plain decoding is a root alone. A guess is recorded as a
 * proposal: the distribution q it was sampled from, for the verifier, and the confidence of its
 * drafter, for the planner. Two drafters that guess the same token share a node and have two
 * proposals, because `reject` mode must test each: testing a shared child once biases the output.
 * The proposals of a parent are in the order in which they were sampled. */
#ifndef SO_TOKEN_TREE_H
#define SO_TOKEN_TREE_H

#include "base/err.h"

#include <stdint.h>

enum { SO_TREE_MAX = 257, SO_TREE_MAX_PROPOSALS = 512 }; /* the root and 256 guesses */

typedef enum so_q_kind {
    SO_Q_POINT,   /* a deterministic choice: q is 1 on the token */
    SO_Q_ROW,     /* sampled from q, independently of the other proposals of this parent */
    SO_Q_ROW_SET, /* sampled from q without replacement: the tokens of earlier SO_Q_ROW_SET
                     proposals of this parent with the same row are excluded, q is renormalised */
} so_q_kind;

typedef struct so_proposal {
    int16_t child; /* node with the token */
    int16_t next;  /* next proposal of the same parent, in sampling order; −1 at the end */
    int16_t row;   /* q row, for SO_Q_ROW and SO_Q_ROW_SET; else −1 */
    uint8_t kind;  /* so_q_kind */
    uint8_t drafter;
    float confidence; /* in [0,1]: the drafter's, given that the parent is accepted */
} so_proposal;

typedef struct so_node {
    int32_t token;
    int16_t parent, depth; /* −1 and 0 for the root */
    int16_t first, last;   /* proposals for this node's children; −1: none */
    float
        chance; /* that it is accepted, given its parent: the planner's estimate, for traces; −1: none */
} so_node;

typedef struct so_tree {
    int n_nodes, n_proposals;
    int root_pos; /* position of the root in the text */
    so_node nodes[SO_TREE_MAX];
    so_proposal proposals[SO_TREE_MAX_PROPOSALS];
    int n_vocab, n_rows, max_rows;
    float *q; /* [max_rows][n_vocab] */
    /* The drafter's confidence in a token sampled from this row. It depends only on the row, not on
     * the sampled token, so the planner may decide by it (rule of sight, draft/drafter.h). −1: not
     * set. */
    float row_confidence[SO_TREE_MAX_PROPOSALS];
} so_tree;

/* max_rows: 0 if all proposals are SO_Q_POINT. */
void so_tree_init(so_tree *t, int n_vocab, int max_rows);
void so_tree_deinit(so_tree *t);
void so_tree_reset(so_tree *t, int32_t root_token, int root_pos);

/* Adds a proposal of `token` under `parent`, and the child node if the parent has none with that
 * token. Returns the child, or −1 with nothing added if the tree is full. */
int so_tree_add(so_tree *t, int parent, int32_t token, so_q_kind kind, int row, int drafter,
                float confidence);
/* A new q row, uninitialised; −1 if all are used. */
int so_tree_new_row(so_tree *t);
/* True if no proposal was sampled: then removing proposals does not bias the output. */
static inline bool so_tree_all_points(const so_tree *t) {
    for (int i = 0; i < t->n_proposals; i++)
        if (t->proposals[i].kind != SO_Q_POINT)
            return false;
    return true;
}

static inline float *so_tree_row(const so_tree *t, int row) {
    return t->q + (size_t)row * (size_t)t->n_vocab;
}
/* The child of `parent` with `token`, or −1. */
int so_tree_child(const so_tree *t, int parent, int32_t token);
/* Removes the nodes with keep false, and their proposals; indices change. `keep` must include the
 * root and the parent of every kept node. */
void so_tree_prune(so_tree *t, const bool keep[SO_TREE_MAX]);
/* Aborts if parents, depths, lists of proposals or counts are inconsistent. */
void so_tree_check(const so_tree *t);

#endif
