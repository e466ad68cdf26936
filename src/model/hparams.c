/* The shape of a model: the part common to both sources (GGUF metadata, config.json).
 *
 * Owns the checks between fields. Allocates nothing from the shape. Every factor of a shape is
 * bounded (fields.h), so products of an accepted shape fit 64 bits. Any thread. */
#include "model/hparams.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "base/file.h"
#include "base/mem.h"
#include "model/arch.h"
#include "model/t5.h"

static void check_heads(so_fields *f, const so_hparams *hp) {
    if (hp->n_heads % hp->n_heads_kv != 0)
        so_fields_fail(f, SO_EFORMAT, "%d attention heads cannot share %d key/value heads evenly",
                       hp->n_heads, hp->n_heads_kv);
    if (hp->rope_dim != 0 && hp->head_dim % 2 != 0)
        so_fields_fail(f, SO_EFORMAT, "head size %d is odd, and rotary positions need pairs",
                       hp->head_dim);
    if (hp->rope_dim != 0 && hp->rope_dim != hp->head_dim)
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "%d of %d dimensions of a head are rotated: partial rotary embedding is not "
                       "supported",
                       hp->rope_dim, hp->head_dim);
}

void so_hparams_finish(so_fields *f, so_hparams *hp) {
    if (f->rc != 0)
        return;
    check_heads(f, hp);
    if (so_arch_get(hp->arch)->encoder)
        so_t5_finish(f, hp);
    if (hp->attn_scale == 0)
        hp->attn_scale = (float)(1 / sqrt((double)hp->head_dim));
    hp->embed_scale = so_arch_get(hp->arch)->scaled_embed ? sqrtf((float)hp->d_model) : 1.0f;
    if (hp->rope_scaling == SO_ROPE_SCALING_LLAMA3 && !(hp->rope_high > hp->rope_low))
        so_fields_fail(f, SO_EFORMAT,
                       "rope scaling: high_freq_factor %g must be above low_freq_factor %g",
                       (double)hp->rope_high, (double)hp->rope_low);
    if (hp->window == 0)
        hp->window_pattern = 0;
}

void so_hparams_set_pattern(so_fields *f, so_hparams *hp, const bool *full) {
    int period = 0;
    for (int i = 0; i < hp->n_layers && period == 0; i++)
        period = full[i] ? i + 1 : 0;
    for (int i = 0; i < hp->n_layers && period > 0; i++)
        if (full[i] != ((i + 1) % period == 0)) {
            so_fields_fail(f, SO_EUNSUPPORTED,
                           "layer %d breaks the pattern of sliding and full attention (every %d-th "
                           "full), and only regular patterns are supported",
                           i, period);
            return;
        }
    hp->window_pattern = period;
    if (period == 1) /* every layer is full */
        hp->window = 0;
}

/* Older folders omit tie_word_embeddings if it is the class default, and the defaults differ
 * between classes. In such folders the presence of a separate output matrix decides. */
static bool config_silent_on_tying(const json_t *config) {
    const json_t *text = json_object_get(config, "text_config");
    return !json_object_get(config, "tie_word_embeddings") &&
           !json_object_get(text, "tie_word_embeddings");
}

int so_hparams_read(const so_checkpoint *ck, so_hparams *out, so_err *err) {
    const so_gguf *g = so_checkpoint_gguf(ck);
    if (g)
        return so_hparams_from_gguf(g, out, err);
    const json_t *config = so_checkpoint_config(ck);
    char *file = so_path_join(so_checkpoint_path(ck), "config.json");
    int rc = config ? so_hparams_from_json(config, file, out, err)
                    : so_err_set(err, SO_ENOTFOUND,
                                 "%s is missing: the shape of a model is read "
                                 "from it",
                                 file);
    if (rc == 0 && config_silent_on_tying(config) && so_checkpoint_n_tensors(ck) > 0)
        out->tied = !so_checkpoint_tensor(ck, "lm_head.weight") &&
                    !so_checkpoint_tensor(ck, "language_model.lm_head.weight");
    free(file);
    return rc;
}

int64_t so_hparams_kv_bytes_per_token(const so_hparams *hp, so_dtype kv_dtype) {
    return 2 * (int64_t)hp->n_layers * hp->n_heads_kv *
           (int64_t)so_kv_entry_bytes(kv_dtype, hp->head_dim);
}
