/* Fixed shapes of token trees: which ranked guesses of a drafter form a tree, without tokens.
 *
 *        root              node 0: parent −1, rank 0    the most likely token
 *       /    \             node 1: parent  0, rank 0    the most likely token after node 0
 *      0      2            node 2: parent −1, rank 1    the second most likely token
 *      |                   node 3: parent  0, rank 2
 *     1  3
 *
 * A node's rank is the place of its token in the drafter's order, from 0: with points the i-th most
 * likely token of the parent's row, with sampled guesses the i-th draw. Parents come before their
 * children, so the first n nodes of a shape are a shape, too. Grown shapes are ordered by the chance
 * of their paths: their first n nodes are the best shape of n nodes.
 *
 * A shape depends on calibration, never on the tokens of a request, so it keeps the rule of sight
 * (draft/drafter.h). Values only; any thread. */
#ifndef SO_DRAFT_SHAPE_H
#define SO_DRAFT_SHAPE_H

#include "base/err.h"
#include "base/str.h"
#include "token/tree.h"

enum { SO_SHAPE_MAX = SO_TREE_MAX - 1, SO_SHAPE_DEPTHS = 16, SO_SHAPE_RANKS = 64 };

typedef struct so_shape_node {
    int16_t parent; /* a node before this one; −1: the root */
    int16_t rank;   /* differs from those of its siblings; below SO_SHAPE_RANKS */
    int16_t depth;  /* from 1 */
    float chance;   /* estimated, that the whole path is accepted; −1: unknown */
} so_shape_node;

typedef struct so_shape {
    int n_nodes; /* without the root; at least 1 */
    int depth;   /* of the deepest node */
    so_shape_node nodes[SO_SHAPE_MAX];
} so_shape;

/* How often the guess of a rank is right at a depth, on held-out text. */
typedef struct so_shape_table {
    int n_depths, n_ranks;
    int64_t n_positions;                              /* that were counted at depth 1 */
    double accuracy[SO_SHAPE_DEPTHS][SO_SHAPE_RANKS]; /* [depth − 1][rank] */
} so_shape_table;

/* Nodes of the Cartesian product of these widths, without the root: w₀ + w₀·w₁ + … INT64_MAX if it is
 * larger than that. Widths of 0 or less count as 0. */
int64_t so_shape_product_count(const int *widths, int n_depths);
/* The Cartesian product, level by level, cut after `budget` nodes. SO_ERANGE: a width of 0 or above
 * SO_SHAPE_RANKS, no depth or more than SO_SHAPE_DEPTHS, a budget below 1 or above SO_SHAPE_MAX. */
int so_shape_product(const int *widths, int n_depths, int budget, so_shape *out, so_err *err);
/* Adds the node with the most likely path until the budget is used or no path has a chance above 0. A
 * path's chance is the product of the accuracies of its nodes. SO_ERANGE: as above, or a table with an
 * accuracy that is not in [0,1], or without any above 0. */
int so_shape_grow(const so_shape_table *table, int budget, so_shape *out, so_err *err);
/* Removes all nodes after the first n. */
void so_shape_cut(so_shape *s, int n);

/* The expected number of accepted guesses; NAN if a chance is unknown. */
double so_shape_expected(const so_shape *s);
/* The nodes in depth-first order, siblings by rank: [n_nodes]. */
void so_shape_depth_first(const so_shape *s, int16_t *order);
/* The dense mask of tree attention, one line of 0 and 1 per node: a node attends to itself and to its
 * ancestors. For inspection; the engine passes lists of ancestors. */
void so_shape_print_mask(const so_shape *s, so_buf *out);

/* --- files: JSON, docs/formats.md --- */

enum { SO_SHAPE_MAX_BYTES = 1 << 20 };
/* SO_EFORMAT or SO_ERANGE: the message has `name`, the node and what is wrong with it. `table` (may be
 * NULL): the accuracies, n_depths 0 if the file has none. */
int so_shape_parse(so_str json, const char *name, so_shape *out, so_shape_table *table,
                   so_err *err);
int so_shape_read(const char *path, so_shape *out, so_shape_table *table, so_err *err);
/* drafter: what the tree was calibrated for, for readers only ("model", "medusa"). table may be NULL.
 */
void so_shape_print(const so_shape *s, const so_shape_table *table, const char *drafter,
                    so_buf *out);

#endif
