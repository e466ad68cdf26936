/* Rows of drafters with a vocabulary subset (rows.h). Makes no guesses and keeps no state of a
 * request. */
#include "draft/rows.h"

#include <math.h>
#include <string.h>

#include "base/mem.h"

static so_draft_row narrow_row(const so_draft_rows *r, const float *logits) {
    return (so_draft_row){logits, r->narrow, r->subset, r->n_subset};
}

static so_draft_row wide_row(const so_draft_rows *r, const float *logits) {
    if (r->n_subset == r->n_vocab)
        return narrow_row(r, logits);
    for (int i = 0; i < r->n_subset; i++)
        r->logits[r->subset ? r->subset[i] : i] = logits[i];
    return (so_draft_row){r->logits, r->wide, NULL, r->n_vocab};
}

/* Whether the row must be indexed by token ids: bias and penalties name ids. (So does noise, but
 * the narrow sampler knows the ids of its columns.) */
static bool needs_ids(so_sample_params p) {
    p.temp = 0;
    return !so_sample_is_argmax(&p);
}

so_draft_row so_draft_row_of(const so_draft_rows *r, const so_sample_params *p,
                             const float *logits) {
    return needs_ids(*p) ? wide_row(r, logits) : narrow_row(r, logits);
}

/* Separate lanes, so that the compiler vectorises the loop. */
float so_draft_row_largest(const float *row, int n) {
    enum { LANES = 16 };
    float m[LANES] = {0}, best = 0;
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            m[k] = row[i + k] > m[k] ? row[i + k] : m[k];
    for (; i < n; i++)
        best = SO_MAX(best, row[i]);
    for (int k = 0; k < LANES; k++)
        best = SO_MAX(best, m[k]);
    return best;
}

void so_draft_row_widen(const so_draft_rows *r, const so_draft_row *row, const float *probs,
                        float *out) {
    if (row->n == r->n_vocab) {
        memcpy(out, probs, (size_t)row->n * sizeof *out);
        return;
    }
    memset(out, 0, (size_t)r->n_vocab * sizeof *out);
    for (int i = 0; i < row->n; i++)
        out[row->ids ? row->ids[i] : i] = probs[i];
}

float so_draft_row_chance(const so_draft_rows *r, const float *logits, const so_draft_row *row,
                          int32_t at) {
    /* The column of a wide row is a token, which may be outside the subset. */
    if (row->n > r->n_subset && r->subset) {
        int32_t token = at;
        at = so_sample_subset_index(r->subset, r->n_subset, token);
        if (r->subset[at] != token)
            return 0;
    }
    return at < r->n_subset ? so_sample_prob_estimate(r->narrow, logits, at) : 0;
}

/* From the token's probability and from its lead over the second token with the noise included. The
 * target adds the same noise to its own row, so a large lead mostly holds there too. Both together
 * rank an accepted guess above a rejected one in 76 of 100 pairs, the probability alone in 71 (3,300
 * guesses for SmolLM2, temperature 1; a logistic fit). */
float so_draft_noisy_confidence(float chance, double lead) {
    double q = SO_MIN(SO_MAX((double)chance, 1e-4), 1 - 1e-4);
    return (float)(1 / (1 + exp(0.6 - SO_DRAFT_LEAD_SLOPE * lead - 0.18 * log(q / (1 - q)))));
}

void so_draft_noisy_chances(const so_scored *top, int n, float first, float *chance) {
    double sum = 0, lead = (double)SO_SAMPLE_LEAD_MAX;
    if (n > 1)
        lead = SO_MIN(top[0].score - top[1].score, lead);
    chance[0] = so_draft_noisy_confidence(first, lead);
    for (int i = 1; i <= n; i++) /* the last one counts twice, for the tokens after it */
        sum += exp(SO_DRAFT_LEAD_SLOPE * (top[SO_MIN(i, n - 1)].score - top[0].score));
    for (int i = 1; i < n; i++)
        chance[i] = (float)((1 - (double)chance[0]) *
                            exp(SO_DRAFT_LEAD_SLOPE * (top[i].score - top[0].score)) / sum);
}

so_sample_params so_draft_params(const so_draft_job *job) {
    so_sample_params p;
    if (job->sample)
        return *job->sample;
    so_sample_defaults(&p);
    p.temp = job->temp;
    p.seed = job->seed;
    p.choice = job->choice;
    return p;
}
