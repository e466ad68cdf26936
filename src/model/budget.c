/* Memory estimate of a model; budget.h has the contract.
 *
 * Weights: the sizes of the file's tensors. For a folder with only a config.json they follow from
 * the shape and the dtype that the config names. Cache: 2·layers·kv_heads·head_dim·size bytes per
 * token and sequence; source texts of encoder-decoder models have pages of their own (source.h). Scratch memory of passes is left out: it is small compared with weights and
 * cache, and depends on the batch. so_hparams_read bounds the shape, so sizes of weights fit 64
 * bits; the size of the cache is checked for overflow. Any thread. */
#include "model/budget.h"

#include <string.h>

#include "base/mem.h"
#include "format/blocks.h"
#include "model/arch.h"
#include "model/fp8.h"
#include "model/source.h"

/* An encoder-decoder model (t5.c): a decoder's layer has the attention to the source, too. */
static int64_t count_t5_params(const so_hparams *hp) {
    int64_t d = hp->d_model, attention = 4 * d * hp->n_heads * hp->head_dim;
    int64_t mlp = (hp->gated ? 3 : 2) * d * hp->d_ff;
    int64_t n = hp->n_enc_layers * (attention + mlp + 2 * d);
    n += hp->n_layers * (2 * attention + mlp + 3 * d);
    n += 2 * (int64_t)hp->n_heads * hp->rel_buckets + 2 * d;
    return n + (int64_t)hp->n_vocab * d * (hp->tied ? 1 : 2);
}

/* Parameters of all matrices and vectors, including biases. */
static int64_t count_params(const so_hparams *hp) {
    if (hp->n_enc_layers > 0)
        return count_t5_params(hp);
    int64_t d = hp->d_model, q = (int64_t)hp->n_heads * hp->head_dim;
    int64_t kv = (int64_t)hp->n_heads_kv * hp->head_dim, ff = hp->d_ff;
    const so_arch_info *a = so_arch_get(hp->arch);
    int64_t n_gates = a->gated_mlp ? 1 : 0, norm = a->layer_norm ? 2 * d : d;
    int64_t layer = 2 * d * q + 2 * d * kv + (2 + n_gates) * d * ff;
    layer += (a->post_norms ? 4 : 2) * norm + (hp->qk_norm ? 2 * (int64_t)hp->head_dim : 0);
    layer += (hp->bias_qkv ? q + 2 * kv : 0) + (hp->bias_out ? d : 0);
    layer += hp->bias_mlp ? (1 + n_gates) * ff + d : 0;
    int64_t n = hp->n_layers * layer + (int64_t)hp->n_vocab * d * (hp->tied ? 1 : 2) + norm;
    return a->learned_positions ? n + (int64_t)hp->n_ctx_train * d : n;
}

/* Bytes per weight for a folder without weight files. */
static int64_t config_dtype_bytes(const json_t *config) {
    const char *name = json_string_value(json_object_get(config, "torch_dtype"));
    if (!name)
        name = json_string_value(json_object_get(config, "dtype"));
    return name && strcmp(name, "float32") == 0 ? 4 : 2;
}

static void count_weights(const so_checkpoint *ck, so_budget *b) {
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++) {
        const so_tensor *t = so_checkpoint_tensor_at(ck, i);
        b->n_params += so_tensor_count(t);
        b->weight_bytes +=
            (int64_t)(so_fp8_is(t) ? t->n_bytes / 32 * sizeof(so_block_q8_0) : t->n_bytes);
    }
    b->estimated = so_checkpoint_n_tensors(ck) == 0;
    if (b->estimated) {
        b->n_params = count_params(&b->hp);
        b->weight_bytes = b->n_params * config_dtype_bytes(so_checkpoint_config(ck));
    }
}

int so_budget_of(const so_checkpoint *ck, int64_t ctx, int n_seqs, so_dtype kv_dtype,
                 so_budget *out, so_err *err) {
    so_budget b = {0};
    int rc = so_hparams_read(ck, &b.hp, err);
    if (rc != SO_OK)
        return rc;
    if (ctx < 0 || ctx > (int64_t)1 << 32 || n_seqs < 1 || n_seqs > 1 << 20)
        return so_err_set(
            err, SO_ERANGE,
            "cannot budget %d sequences of %lld tokens: at most 1048576 sequences of 4294967296 "
            "tokens are supported",
            n_seqs, (long long)ctx);
    count_weights(ck, &b);
    b.ctx = ctx ? ctx : b.hp.n_ctx_train;
    b.kv_bytes_per_token = so_hparams_kv_bytes_per_token(&b.hp, kv_dtype);
    if (__builtin_mul_overflow(b.kv_bytes_per_token, b.ctx, &b.kv_bytes_per_seq) ||
        __builtin_mul_overflow(b.kv_bytes_per_seq, (int64_t)n_seqs, &b.kv_bytes))
        return so_err_set(err, SO_ERANGE, "%s: the cache for %d sequences of %lld tokens overflows",
                          so_checkpoint_path(ck), n_seqs, (long long)b.ctx);
    b.n_sources = b.hp.n_enc_layers > 0 ? n_seqs + SO_SOURCES_SPARE : 0;
    b.source_bytes = so_sources_bytes(&b.hp, b.ctx, b.n_sources, kv_dtype);
    if (b.source_bytes == INT64_MAX)
        return so_err_set(err, SO_ERANGE, "%s: %d source texts of %lld tokens overflow",
                          so_checkpoint_path(ck), b.n_sources, (long long)b.ctx);
    *out = b;
    return SO_OK;
}
