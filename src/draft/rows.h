/* Logits rows of a drafter that has logits for a vocabulary subset only: which sampler reads them,
 * which token a column is, how probable it is. Used by draft models and by heads.
 *
 * Rows are sampled at their own, narrow width. Where token ids matter they are expanded to the target's
 * vocabulary: for bias and penalties, which name ids, and for the q row that the verifier reads.
 * Thread: the engine thread; inside async(), whoever holds the drafter (async.h). */
#ifndef SO_DRAFT_ROWS_H
#define SO_DRAFT_ROWS_H

#include "draft/drafter.h"

/* What reads the rows of one drafter. All pointers are borrowed. */
typedef struct so_draft_rows {
    int n_vocab; /* of the target */
    int n_subset;
    const int32_t *subset;     /* [n_subset] ascending ids; NULL: 0, 1, … */
    so_sampler *wide, *narrow; /* for the target's vocabulary; for the subset */
    float *logits; /* [n_vocab] SO_DRAFT_EXCLUDED outside the subset; overwritten within it */
} so_draft_rows;

/* The logit of a token outside the subset: finite, since the sampler is slow with infinite logits, and
 * so low that neither bias nor temperature can make the token likely. */
#define SO_DRAFT_EXCLUDED (-1e30f)

/* A row in the form in which it is sampled. ids: the tokens of the columns; NULL: column i is token i. */
typedef struct so_draft_row {
    const float *logits;
    so_sampler *sampler;
    const int32_t *ids;
    int n;
} so_draft_row;

/* The row in the form in which it is sampled with p. */
so_draft_row so_draft_row_of(const so_draft_rows *r, const so_sample_params *p,
                             const float *logits);
float so_draft_row_largest(const float *row, int n); /* of probabilities */
/* Expands the probabilities of a row to the target's vocabulary. */
void so_draft_row_widen(const so_draft_rows *r, const so_draft_row *row, const float *probs,
                        float *out);
/* The probability of the token at a column of `row`, by the softmax of `logits`. */
float so_draft_row_chance(const so_draft_rows *r, const float *logits, const so_draft_row *row,
                          int32_t at);
/* The confidence in a token with probability `chance` that noise selected, `lead` before the
 * second. */
float so_draft_noisy_confidence(float chance, double lead);
#define SO_DRAFT_LEAD_SLOPE 0.6 /* of its logistic fit */
/* The chances of the n best tokens of a row that noise selected: the first, of probability `first`, has
 * the confidence above; the others share what is left, by the slope with which a lead counts there. */
void so_draft_noisy_chances(const so_scored *top, int n, float first, float *chance);
/* The request's sampling parameters, or defaults at its temperature. */
so_sample_params so_draft_params(const so_draft_job *job);

#endif
