/* `sooth calibrate --heads`: the ranks of an answer's tokens in the rows of Medusa or blockwise heads.
 *
 * The target computes an answer; from each of its hidden states the heads guess the tokens after the
 * next one, as they do when they draft (model/heads.h). Each head is counted for itself: it knows
 * nothing of the guesses before its own, and a path's chance is the product of the accuracies.
 * Look-ahead rows need rows of their own behind every token, so they are not measured here; their
 * files state accuracies. Main thread only. */
#include "cli/calibrate.h"
#include "draft/registry.h"

int so_calibrate_heads_open(const char *path, const so_bundle *target, so_calibrate_heads *out,
                            so_err *err) {
    so_calibrate_heads h = {0};
    int rc = so_checkpoint_open(path, SO_CHECKPOINT_ALL, &h.ck, err);
    if (rc == SO_OK)
        rc = so_registry_check_file(h.ck, so_model_hparams(target->model), target->tok, err);
    if (rc == SO_OK)
        rc = so_heads_load(h.ck, target->model, 1, &h.h, err);
    if (rc == SO_OK && so_heads_get_info(h.h)->kind == SO_HEADS_LOOKAHEAD)
        rc = so_err_set(err, SO_EUNSUPPORTED,
                        "%s: look-ahead embeddings are not measured by calibrate; "
                        "lookahead(nodes=N) grows a tree from the accuracies in their file",
                        path);
    if (rc == SO_OK)
        *out = h;
    else
        so_calibrate_heads_close(&h);
    return rc;
}

void so_calibrate_heads_close(so_calibrate_heads *h) {
    so_heads_free(h->h);
    so_checkpoint_close(h->ck);
    *h = (so_calibrate_heads){0};
}

const char *so_calibrate_heads_kind(const so_calibrate_heads *h) {
    return so_heads_kind_name(so_heads_get_info(h->h)->kind);
}

int so_calibrate_heads_rank(so_calibrate_heads *h, const float *state, const int32_t *tokens, int n,
                            int n_ranks, uint8_t *ranks, so_err *err) {
    int rc = so_heads_run(h->h, state, 1, err);
    for (int i = 0; i < n && rc == SO_OK; i++)
        ranks[i] = (uint8_t)so_calibrate_rank(so_heads_subset(h->h), so_heads_logits_len(h->h),
                                              so_heads_logits(h->h, 0, i), tokens[i], n_ranks);
    return rc;
}
