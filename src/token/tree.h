/* The token tree: what every drafter proposes, one forward pass scores and the verifier walks.
 *
 *        0: "the"            node 0 is the root: the last token of the text, known and not yet fed
 *       /       \
 *    1: "cat"  3: "dog"      children are guesses for the next position
 *      |
 *    2: "sat"                a parent stands before its children; depth grows by one
 *
 * A chain is a tree of width one; plain decoding is a root alone. A guess is recorded as a
 * proposal: what the token was drawn from (q), for the verifier, and how sure its drafter is, for
 * the planner. Two drafters
 * that guess the same token share a node and leave two proposals, because in `reject` mode each
 * must be tested (design: testing a merged child once biases the output). Proposals of one parent
 * keep draw order. */
#ifndef SO_TOKEN_TREE_H
#define SO_TOKEN_TREE_H

#include "base/err.h"

#include <stdint.h>

enum { SO_TREE_MAX = 256, SO_TREE_MAX_PROPOSALS = 512 };

typedef enum so_q_kind {
    SO_Q_POINT,   /* a deterministic choice: q is 1 on the token */
    SO_Q_ROW,     /* drawn from q, independently of the other draws at this parent */
    SO_Q_ROW_SET, /* drawn from q without the tokens that earlier SO_Q_ROW_SET proposals of this
                     parent with the same row drew, renormalised (sampling without replacement) */
} so_q_kind;

typedef struct so_proposal {
    int16_t child; /* node that holds the token */
    int16_t next;  /* next proposal of the same parent, in draw order; −1 at the end */
    int16_t row;   /* q row, for SO_Q_ROW and SO_Q_ROW_SET; else −1 */
    uint8_t kind;  /* so_q_kind */
    uint8_t drafter;
    float confidence; /* in [0,1]: how sure the drafter is of this guess, if its parent stands */
} so_proposal;

typedef struct so_node {
    int32_t token;
    int16_t parent, depth; /* −1 and 0 for the root */
    int16_t first, last;   /* proposals for this node's children; −1: none */
} so_node;

typedef struct so_tree {
    int n_nodes, n_proposals;
    int root_pos; /* position of the root in the text */
    so_node nodes[SO_TREE_MAX];
    so_proposal proposals[SO_TREE_MAX_PROPOSALS];
    int n_vocab, n_rows, max_rows;
    float *q; /* [max_rows][n_vocab] */
    /* How sure a drafter is of whatever it draws from a row: a function of the row and of nothing
     * else, so that plans may look at it (rule of sight). −1: nobody said. */
    float row_sure[SO_TREE_MAX_PROPOSALS];
} so_tree;

/* max_rows 0 for drafters that only make point proposals. */
void so_tree_init(so_tree *t, int n_vocab, int max_rows);
void so_tree_deinit(so_tree *t);
void so_tree_reset(so_tree *t, int32_t root_token, int root_pos);

/* Adds a proposal of `token` under `parent`, making the child node if the parent has none with that
 * token. The child, or −1 (and nothing added) when the tree is full. */
int so_tree_add(so_tree *t, int parent, int32_t token, so_q_kind kind, int row, int drafter,
                float confidence);
/* A fresh q row, contents undefined; −1 when all are used. */
int so_tree_new_row(so_tree *t);
/* No proposal was drawn: leaving some out biases nothing. */
static inline bool so_tree_all_points(const so_tree *t) {
    for (int i = 0; i < t->n_proposals; i++)
        if (t->proposals[i].kind != SO_Q_POINT)
            return false;
    return true;
}

static inline float *so_tree_row(const so_tree *t, int row) {
    return t->q + (size_t)row * (size_t)t->n_vocab;
}
/* The child of `parent` that holds `token`, or −1. */
int so_tree_child(const so_tree *t, int parent, int32_t token);
/* Removes the nodes that are not kept, and their proposals; indices change. The root is kept, and
 * so is the parent of every node that is. */
void so_tree_prune(so_tree *t, const bool keep[SO_TREE_MAX]);
/* Aborts if parents, depths, proposal lists or counts contradict each other. */
void so_tree_check(const so_tree *t);

#endif
