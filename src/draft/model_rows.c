/* Rows of a draft model: views of draft/rows.h, and what is particular to draft models (their own
 * temperature; a row that cannot be used). Makes no guesses and keeps no state of a request. Thread:
 * the engine thread. */
#include "base/log.h"
#include "draft/model_impl.h"

static so_draft_rows rows_of(const so_model_drafter *md) {
    return (so_draft_rows){md->o.n_vocab, md->n_subset, md->subset,
                           md->wide,      md->narrow,   md->logits};
}

so_model_row so_model_row_of(const so_model_drafter *md, const so_sample_params *p,
                             const float *logits) {
    so_draft_rows r = rows_of(md);
    return so_draft_row_of(&r, p, logits);
}

float so_model_row_largest(const float *row, int n) { return so_draft_row_largest(row, n); }

void so_model_row_widen(const so_model_drafter *md, const so_model_row *row, const float *probs,
                        float *out) {
    so_draft_rows r = rows_of(md);
    so_draft_row_widen(&r, row, probs, out);
}

so_sample_params so_model_params(const so_model_drafter *md, const so_draft_job *job) {
    so_sample_params p = so_draft_params(job);
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

float so_model_row_chance(const so_model_drafter *md, const float *logits, const so_model_row *row,
                          int32_t at) {
    so_draft_rows r = rows_of(md);
    return so_draft_row_chance(&r, logits, row, at);
}
