/* Online estimates of acceptance: how likely is this guess, from this drafter, at this depth, to be
 * accepted, given that it is tested?
 *
 * Three sources, each the prior of the next:
 *   1. the drafter's own confidence (so_node.accept);
 *   2. what that confidence was worth in all requests: counts per drafter, depth and level of
 *      confidence, forgotten over some five hundred tests;
 *   3. how this request compares: per drafter, forgotten over some fifty tests, and at once when
 *      the last eight tests contradict it. It shifts the odds of (2), at all depths alike.
 * A guess that was not tested says nothing and is not counted. Pure arithmetic; plain structs; one
 * thread. */
#ifndef SO_DRAFT_ESTIMATE_H
#define SO_DRAFT_ESTIMATE_H

#include "token/tree.h"
#include "verify/verify.h"

enum {
    SO_ESTIMATE_DRAFTERS = 32, /* numbers of drafters; higher ones share the last */
    SO_ESTIMATE_DEPTHS = 16,   /* deeper guesses count as this deep */
    SO_ESTIMATE_LEVELS = 8,    /* of confidence; one more holds all of them together */
    SO_ESTIMATE_RECENT = 8,    /* outcomes that may overthrow a request's record */
};

typedef struct so_estimate_cell {
    float accepted, tested;
} so_estimate_cell;

/* Across requests. Zero-initialise. */
typedef struct so_estimate_shared {
    so_estimate_cell cells[SO_ESTIMATE_DRAFTERS][SO_ESTIMATE_DEPTHS][SO_ESTIMATE_LEVELS + 1];
    /* Tests alone: no prior, nothing forgotten; for so_record_learn. */
    so_estimate_cell seen[SO_ESTIMATE_DRAFTERS][SO_ESTIMATE_DEPTHS][SO_ESTIMATE_LEVELS + 1];
} so_estimate_shared;

/* One request, one drafter. */
typedef struct so_estimate_own {
    float accepted, tested;
    float expected; /* Σ of what (2) said about the tested guesses */
    float prior;    /* what (2) is worth against the record, in tests */
    /* of the latest first guesses: */
    float promised[SO_ESTIMATE_RECENT]; /* what (2) said, newest at n_seen − 1 */
    uint32_t n_seen;
    uint8_t last; /* how they went, newest in bit 0 */
} so_estimate_own;
typedef struct so_estimate {
    so_estimate_shared *shared;
    so_estimate_own own[SO_ESTIMATE_DRAFTERS];
} so_estimate;

void so_estimate_init(so_estimate *e, so_estimate_shared *shared);

/* The chance that a tested guess is accepted; confidence < 0: not known yet (before drafting),
 * then `guess` is what to think of a drafter never seen. depth from 1. */
double so_estimate_get(const so_estimate *e, int drafter, int depth, double confidence,
                       double guess);
/* A test and its outcome. */
void so_estimate_add(so_estimate *e, int drafter, int depth, double confidence, bool accepted);
/* A row that was not worth a draw: counts as its estimate where confidence is not known, so that
 * what was tested alone does not flatter the drafter. */
void so_estimate_skip(so_estimate *e, int drafter, int depth, double confidence);
/* In [0,1): how much evidence stands behind the estimates of a drafter at depth 1. */
double so_estimate_sure(const so_estimate *e, int drafter);
/* One of the last two tests of a drafter at depth 1 went well: was it given up, it is worth
 * another.
 */
bool so_estimate_hopeful(const so_estimate *e, int drafter);

/* For each node of a tree the chance that it is accepted given that its parent was: of a point with
 * its own confidence, of a drawn token by drafter, depth and so_tree.row_sure (rule of sight: the
 * plan may not look at what was drawn). A later sibling is tested only if the earlier ones were
 * rejected. */
void so_estimate_tree(const so_estimate *e, const so_tree *t, float accept[SO_TREE_MAX]);

/* Counts the tests of drawn proposals, without regard to what was drawn. Points are not counted
 * here but by shadow.h, which knows their outcome whether they were tested or not. */
void so_estimate_verdict(so_estimate *e, const so_tree *t, const so_verdict *v);

#endif
