/* The drafters `medusa`, `blockwise` and `lookahead`: heads over the target's hidden states. See
 * heads.c. */
#ifndef SO_DRAFT_HEADS_H
#define SO_DRAFT_HEADS_H

#include "draft/spec.h"
#include "kv/kv.h"
#include "model/heads.h"

typedef struct so_heads_drafter_opts {
    int n_parallel; /* requests that draft at the same time */
    int max_draft;  /* deepest draft */
    uint64_t id;    /* so_drafter.id */
    /* The tree; without k, best and nodes: chains. */
    int k;     /* children of a node */
    bool best; /* the most likely paths within the budget */
    int nodes; /* budget, 1 to SO_TREE_MAX − 1; without the others: the tree grown from the accuracies
                  in the heads' file. 0: chains */
    so_fixed_tree tree; /* of tree=FILE */
    int ends;           /* lookahead: rows on so many ends of each tree; 0: a pass of their own */
    int n_ctx;          /* of the engine; look-ahead rows stay within its pages. 0: not limited */
} so_heads_drafter_opts;

/* Sets the options of trees that a spec names, and reads its tree file; budget: of a tree that names
 * none. */
int so_heads_opts_from_spec(const so_spec *s, const so_spec_node *n, int budget,
                            so_heads_drafter_opts *o, so_err *err);

/* The rows of so_heads_load that the drafter needs for so many requests. */
int so_heads_drafter_rows(const so_heads_info *info, int n_parallel);

/* The heads and the target must outlive the drafter. kv: the target's cache, which `lookahead` computes
 * its rows in. */
int so_heads_drafter_create(so_heads *h, const so_model *target, so_kv *kv,
                            const so_heads_drafter_opts *o, so_drafter **out, so_err *err);

#endif
