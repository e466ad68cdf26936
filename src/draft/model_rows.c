/* Rows of a draft model: which sampler reads them, which token a column is, how probable it is.
 *
 * A draft may have logits for a subset of the vocabulary only. Its rows are then narrow, and are
 * expanded to the target's vocabulary where token ids matter: for bias and penalties, and for the q
 * row that the verifier reads. Makes no guesses and keeps no state of a request. Thread: the engine
 * thread. */
#include <math.h>
#include <string.h>

#include "base/log.h"
#include "draft/model_impl.h"

static so_model_row narrow_row(const so_model_drafter *md, const float *logits) {
    return (so_model_row){logits, md->narrow, md->subset, md->n_subset};
}

static so_model_row wide_row(const so_model_drafter *md, const float *logits) {
    if (md->n_subset == md->o.n_vocab)
        return narrow_row(md, logits);
    for (int i = 0; i < md->n_subset; i++)
        md->logits[md->subset ? md->subset[i] : i] = logits[i];
    return (so_model_row){md->logits, md->wide, NULL, md->o.n_vocab};
}

/* Whether the row must be indexed by token ids: bias and penalties name ids. (So does noise, but
 * the narrow sampler knows the ids of its columns.) */
static bool needs_ids(so_sample_params p) {
    p.temp = 0;
    return !so_sample_is_argmax(&p);
}

so_model_row so_model_row_of(const so_model_drafter *md, const so_sample_params *p,
                             const float *logits) {
    return needs_ids(*p) ? wide_row(md, logits) : narrow_row(md, logits);
}

/* Separate lanes, so that the compiler vectorises the loop. */
float so_model_row_largest(const float *row, int n) {
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

/* Expands the probabilities of a row to the target's vocabulary. */
void so_model_row_widen(const so_model_drafter *md, const so_model_row *r, const float *probs,
                        float *out) {
    if (r->n == md->o.n_vocab) {
        memcpy(out, probs, (size_t)r->n * sizeof *out);
        return;
    }
    memset(out, 0, (size_t)md->o.n_vocab * sizeof *out);
    for (int i = 0; i < r->n; i++)
        out[r->ids ? r->ids[i] : i] = probs[i];
}

so_sample_params so_model_params(const so_model_drafter *md, const so_draft_job *job) {
    so_sample_params p;
    if (job->sample) {
        p = *job->sample;
    } else {
        so_sample_defaults(&p);
        p.temp = job->temp;
        p.seed = job->seed;
        p.choice = job->choice;
    }
    if (p.temp > 0 && md->o.temp >= 0)
        p.temp = md->o.temp;
    return p;
}

/* NaN or Inf in a row ends its chain. If the row follows the text itself, not a guess, all later
 * rows will have them too: the drafter is disabled for this request. */
bool so_model_row_is_finite(so_model_drafter *md, so_model_request *s, int logit, bool at_root) {
    so_err err = {0};
    if (so_pass_check(md->pass, logit, &err) == SO_OK)
        return true;
    s->disabled |= at_root;
    if (!md->warned)
        so_log(SO_LOG_WARN, "draft model: %s; it makes no guesses after such a token", err.msg);
    md->warned = true;
    return false;
}

/* Confidence in a token that noise selected: from its probability, and from its lead over the
 * second token with the noise included. The target adds the same noise to its own row, so a large
 * lead mostly holds there too. Both together rank an accepted guess above a rejected one in 76 of
 * 100 pairs, the probability alone in 71 (3,300 guesses for SmolLM2, temperature 1; a logistic
 * fit). */
float so_model_noisy_confidence(float chance, double lead) {
    double q = SO_MIN(SO_MAX((double)chance, 1e-4), 1 - 1e-4);
    return (float)(1 / (1 + exp(0.6 - SO_MODEL_LEAD_SLOPE * lead - 0.18 * log(q / (1 - q)))));
}

/* The probability of the token at a column of r, by the draft's own softmax. */
float so_model_row_chance(const so_model_drafter *md, const float *logits, const so_model_row *r,
                          int32_t at) {
    /* The column of a wide row is a token, which may be outside the subset. */
    if (r->n > md->n_subset && md->subset) {
        int32_t token = at;
        at = so_sample_subset_index(md->subset, md->n_subset, token);
        if (md->subset[at] != token)
            return 0;
    }
    return at < md->n_subset ? so_sample_prob_estimate(md->narrow, logits, at) : 0;
}
