/* How likely a guess is to be accepted, given that it is tested: learned online by drafter, depth,
 * sibling rank and confidence.
 *
 * Three sources, each the prior of the next:
 *   1. the drafter's own confidence (so_proposal.confidence, so_tree.row_sure);
 *   2. what that confidence was worth in all requests of one mode: counts per drafter, depth, rank
 *      and level of confidence, which fade over some five hundred tests;
 *   3. how this request compares: per drafter, fading over some fifty tests, and at once when the
 *      last eight tests contradict it. It shifts the odds of (2) at all depths alike.
 * The rank of a guess is the number of siblings tested before it: rank 1 is tested only where rank
 * 0 was rejected. A merged drafter that made a row in this step and refused it counts as a sibling
 * of those asked after it: a refusal lowers what to expect of them as a rejected sibling does.
 * A guess that was not tested says nothing and is not counted, but for points: they
 * are scored in shadow (shadow.h), whether they were tested or not.
 *
 * What was counted is kept between runs by record.h. Pure arithmetic; plain structs; one thread. */
#ifndef SO_PLAN_ACCEPTANCE_H
#define SO_PLAN_ACCEPTANCE_H

#include "draft/drafter.h"
#include "token/tree.h"
#include "verify/verify.h"

enum {
    SO_ACCEPT_DEPTHS = SO_TERMS_DEPTHS, /* deeper guesses count as this deep */
    SO_ACCEPT_LEVELS = SO_TERMS_LEVELS, /* of confidence; one more holds all of them together */
    SO_ACCEPT_RANKS = 3,                /* later siblings count as the last */
    SO_ACCEPT_RECENT = 8,               /* outcomes that may overturn a request's record */
};

typedef struct so_accept_cell {
    float accepted, tested;
} so_accept_cell;

/* How often a first guess had which confidence, whether it was tested or refused: [rank][level]. */
typedef float so_accept_rows[SO_ACCEPT_RANKS][SO_ACCEPT_LEVELS];

/* One drafter. */
typedef so_accept_cell so_accept_table[SO_ACCEPT_DEPTHS][SO_ACCEPT_RANKS][SO_ACCEPT_LEVELS + 1];

/* All requests that use a set of drafters in one mode. Zero-initialise. */
typedef struct so_accept_shared {
    so_accept_table *cells;    /* [n_drafters] prior and tests, fading */
    so_accept_table *seen;     /* [n_drafters] tests alone, for so_record_learn */
    so_accept_rows *rows;      /* [n_drafters] fading */
    so_accept_rows *seen_rows; /* [n_drafters] for so_record_learn */
    int n_drafters;
} so_accept_shared;
void so_accept_shared_init(so_accept_shared *s, int n_drafters);
void so_accept_shared_deinit(so_accept_shared *s);

/* One request, one drafter. */
typedef struct so_accept_own {
    float accepted, tested;
    float expected; /* Σ of what (2) predicted for the tested guesses */
    float prior;    /* what (2) is worth against this record, in tests */
    /* of the latest guesses of depth 1 and rank 0: */
    float predicted[SO_ACCEPT_RECENT]; /* by (2), newest at n_seen − 1 */
    uint32_t n_seen;
    uint8_t last;           /* outcomes, newest in bit 0 */
    uint8_t refused_before; /* drafters that refused their first row in this step before it */
} so_accept_own;

typedef struct so_accept {
    so_accept_shared *shared;
    so_accept_own *own; /* [n_drafters] */
} so_accept;
void so_accept_init(so_accept *a, so_accept_shared *shared);
void so_accept_deinit(so_accept *a);

/* What a guess is known by. */
typedef struct so_accept_key {
    int drafter;
    int depth;         /* from 1 */
    int rank;          /* from 0 */
    double confidence; /* negative: not known yet (before drafting) */
} so_accept_key;

/* The chance that a tested guess is accepted. unknown: what to expect of a drafter never seen,
 * where the confidence is not known. */
double so_accept_get(const so_accept *a, const so_accept_key *k, double unknown);
/* A test and its outcome. */
void so_accept_add(so_accept *a, const so_accept_key *k, bool accepted);
/* The outcome of a drafter's first guess of rank 1 or more, whatever became of those before it:
 * counts as rank 0, which says what the drafter would be worth alone. */
void so_accept_add_alone(so_accept *a, const so_accept_key *k, bool accepted);
/* A first guess was made with this confidence, or would have been, had it been worth it. */
void so_accept_row(so_accept *a, const so_accept_key *k);
/* A row that was not worth a guess: counts as its estimate where confidence is not known, so that
 * the tested ones alone do not flatter the drafter. reach: the chance of its test. */
void so_accept_skip(so_accept *a, const so_accept_key *k, double reach);
/* In [0,1): how much evidence stands behind the estimates of a drafter up to a rank. */
double so_accept_evidence(const so_accept *a, int drafter, int rank);
/* One of the last two tests of a drafter at depth 1 went well: if it was given up, it is worth
 * another try. */
bool so_accept_recovers(const so_accept *a, int drafter);
/* The table of chances for so_draft_terms. */
void so_accept_terms(const so_accept *a, int drafter, int rank, so_draft_terms *out);
/* E[max(0, chance − price)] of a guess at depth 1 before its row is seen: rows below the price are
 * not kept. *kept: the chance that it will be. t: from so_accept_terms with the same rank. */
double so_accept_option(const so_accept *a, int drafter, int rank, const so_draft_terms *t,
                        double price, double *kept);

/* For each node of a tree the chance that it is accepted given that its parent was: of a point with
 * its own confidence, of a drawn token with that of its row (rule of sight: a plan may not look at
 * what was drawn). A later sibling is tested only if the earlier ones were rejected. */
void so_accept_tree(const so_accept *a, const so_tree *t, float chance[SO_TREE_MAX]);

/* Counts the tests of drawn proposals, without regard to what was drawn. Points are left to
 * shadow.h. */
void so_accept_verdict(so_accept *a, const so_tree *t, const so_verdict *v);

/* The rank of a proposal: how many siblings with other tokens were proposed before it, or refused.
 */
int so_accept_rank(const so_accept *a, const so_tree *t, int proposal);
/* What a plan may know of a proposal: of a point its own confidence, of a drawn token how sure its
 * drafter was of the row. */
so_accept_key so_accept_key_of(const so_accept *a, const so_tree *t, int proposal);

#endif
