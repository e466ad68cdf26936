/* α of a guess (the chance that it is accepted, given that it is tested), learned online by
 * drafter, depth, sibling rank and confidence.
 *
 * Three sources, each the prior of the next:
 *   1. the drafter's own confidence (so_proposal.confidence, so_tree.row_confidence);
 *   2. the outcomes at that confidence in all requests of one mode: counts per drafter, depth, rank
 *      and class of confidence, which fade over about 500 tests;
 *   3. how this request compares with (2): per drafter, fading over about 50 tests, and reset at
 *      once if the last eight tests contradict it. It shifts the odds of (2) at all depths alike.
 *
 * The rank of a guess is the number of siblings tested before it: rank 1 is tested only if rank 0
 * was rejected. A merged drafter that computed a row in this step and refused to guess from it
 * counts as a sibling of the drafters after it: a refusal lowers their expected acceptance as a
 * rejected sibling does.
 *
 * A guess that was not tested is not counted, except points: shadow drafts (shadow.h) score them
 * whether they were tested or not.
 *
 * record.h keeps the counts between runs. Pure arithmetic on plain structs. Thread: the engine
 * thread. */
#ifndef SO_PLAN_ACCEPTANCE_H
#define SO_PLAN_ACCEPTANCE_H

#include "draft/drafter.h"
#include "token/tree.h"
#include "verify/verify.h"

enum {
    SO_ACCEPT_DEPTHS = SO_TERMS_DEPTHS,   /* deeper guesses are counted at this depth */
    SO_ACCEPT_CLASSES = SO_TERMS_CLASSES, /* of confidence, equal parts of [0,1]; one more
                                           * class holds all of them together */
    SO_ACCEPT_RANKS = SO_TERMS_RANKS,     /* later siblings are counted as the last rank */
    SO_ACCEPT_RECENT = 8,                 /* outcomes that can reset a request's own counts */
};

typedef struct so_accept_cell {
    float accepted, tested;
} so_accept_cell;

/* How often a first guess, made or refused, had a confidence of each class: [rank][class]. */
typedef float so_confidence_counts[SO_ACCEPT_RANKS][SO_ACCEPT_CLASSES];

/* The counts of one drafter. */
typedef so_accept_cell so_accept_table[SO_ACCEPT_DEPTHS][SO_ACCEPT_RANKS][SO_ACCEPT_CLASSES + 1];

/* All requests that use a set of drafters in one mode. Zero-initialise. */
typedef struct so_accept_shared {
    so_accept_table *cells;                 /* [n_drafters] prior and tests, fading */
    so_accept_table *seen;                  /* [n_drafters] tests of this run only, for
                                             * so_record_learn */
    so_confidence_counts *confidences;      /* [n_drafters] prior and rows, fading */
    so_confidence_counts *seen_confidences; /* [n_drafters] of this run only, for so_record_learn */
    int n_drafters;
} so_accept_shared;
void so_accept_shared_init(so_accept_shared *s, int n_drafters);
void so_accept_shared_deinit(so_accept_shared *s);

/* One request and one drafter. */
typedef struct so_accept_own {
    float accepted, tested;
    float expected; /* Σ of the chances that (2) predicted for the tested guesses */
    float prior;    /* weight of (2) against these counts, in tests */
    /* The latest guesses of depth 1 and rank 0: */
    float predicted[SO_ACCEPT_RECENT]; /* by (2), newest at n_seen − 1 */
    uint32_t n_seen;
    uint8_t last;           /* outcomes, newest in bit 0 */
    uint8_t refused_before; /* drafters before it that refused their first row in this step */
} so_accept_own;

typedef struct so_accept {
    so_accept_shared *shared;
    so_accept_own *own; /* [n_drafters] */
} so_accept;
void so_accept_init(so_accept *a, so_accept_shared *shared);
void so_accept_deinit(so_accept *a);

/* What the acceptance of a guess is estimated from. */
typedef struct so_accept_key {
    int drafter;
    int depth;         /* from 1 */
    int rank;          /* from 0 */
    double confidence; /* negative: unknown (before drafting) */
} so_accept_key;

/* The chance that a tested guess is accepted. unknown: the prior if k has no confidence. */
double so_accept_get(const so_accept *a, const so_accept_key *k, double unknown);
/* Counts one test and its outcome. */
void so_accept_add(so_accept *a, const so_accept_key *k, bool accepted);
/* Counts the outcome of a drafter's first guess of rank 1 or more also at rank 0, regardless of the
 * siblings before it: an estimate of the drafter's acceptance if it drafted alone. */
void so_accept_add_as_first(so_accept *a, const so_accept_key *k, bool accepted);
/* Counts the confidence of a first guess, made or refused. */
void so_accept_add_confidence(so_accept *a, const so_accept_key *k);
/* Counts a row that was refused (not worth a guess) with its estimated outcome, in the cell for
 * unknown confidence. Otherwise only good rows would be counted there, and the estimate would be
 * too high. reach: the chance that a guess from this row would have been tested. */
void so_accept_add_refused(so_accept *a, const so_accept_key *k, double reach);
/* In [0,1): the amount of evidence about a drafter, from its tests at ranks 0 … rank. */
double so_accept_evidence(const so_accept *a, int drafter, int rank);
/* One of the last two tests of the drafter at depth 1 was accepted: if it was given up, it is worth
 * another try. */
bool so_accept_is_recovering(const so_accept *a, int drafter);
/* Fills the chances of so_draft_terms; rank: of the drafter's first guess. */
void so_accept_terms(const so_accept *a, int drafter, int rank, so_draft_terms *out);
/* Fills the chances of later siblings. */
void so_accept_sibling_terms(const so_accept *a, int drafter, int rank, so_draft_terms *out);
/* E[max(0, chance − price)] of a guess at depth 1 before its row is seen: rows below the price
 * are not kept. *kept: the chance that the guess is kept. t: from so_accept_terms with the same
 * rank. */
double so_accept_first_gain(const so_accept *a, int drafter, int rank, const so_draft_terms *t,
                            double price, double *kept);

/* For each node of a tree the chance that it is accepted, given that its parent was. It is derived
 * from the confidence of a point, and for a sampled token from the confidence of its row, since a
 * plan must not depend on the sampled value (rule of sight, draft/drafter.h). For a first sibling
 * this is α; a later one is tested only if the earlier ones were rejected, which lowers it. */
void so_accept_tree(const so_accept *a, const so_tree *t, float chance[SO_TREE_MAX]);

/* Counts the tests of sampled proposals, independent of the sampled values. Points are counted by
 * shadow.h. */
void so_accept_verdict(so_accept *a, const so_tree *t, const so_verdict *v);

/* The rank of a proposal: the number of siblings with other tokens that were proposed or refused
 * before it. */
int so_accept_rank(const so_accept *a, const so_tree *t, int proposal);
/* The key of a proposal, restricted to what a plan may use: for a point its own confidence, for a
 * sampled token the confidence of its row. */
so_accept_key so_accept_key_of(const so_accept *a, const so_tree *t, int proposal);

#endif
