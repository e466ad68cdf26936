/* Counts the work of a pass; work.h has the contract. Doubles are exact here: no pass on today's
 * machines reaches 2^53 operations.
 *
 * The count is a lower bound on purpose. Weights are read once for any number of rows, and every
 * cache position once for all rows and heads that see it. Norms, rotations and activation functions
 * count as free. An encoder's weights, and those that make keys and values of a source, are not read
 * by a pass; the keys and values of a source count as free. Weights count with their size before packing, which adds a little for some types
 * (backend/cpu/pack.h). Pure; any thread. */
#include "model/work.h"

#include "base/mem.h"
#include "model/arch.h"
#include "model/impl.h"

static double all_heads(const so_hparams *hp) { return (double)hp->n_heads * hp->head_dim; }

/* Attention of a sequence to itself, and the feed-forward part; also a layer of an encoder. */
static double self_macs(const so_model *m) {
    const so_hparams *hp = &m->hp;
    double d = hp->d_model, d_kv = (double)hp->n_heads_kv * hp->head_dim;
    int n_mlp = (hp->n_enc_layers > 0 ? hp->gated : m->arch->gated_mlp) ? 3 : 2;
    return d * (2 * all_heads(hp) + 2 * d_kv) + n_mlp * d * hp->d_ff;
}

static double layer_macs(const so_model *m) {
    const so_hparams *hp = &m->hp;
    /* attention to the source: queries, and the output */
    double source = hp->n_enc_layers > 0 ? 2.0 * hp->d_model * all_heads(hp) : 0;
    return self_macs(m) + source;
}

/* Positions that the rows see, themselves included: *once counts each once, *summed sums over
 * rows. */
static void count_seen(int window, int n_ctx, int n_rows, double *once, double *summed) {
    *once = *summed = 0;
    for (int i = 0; i < n_rows; i++) {
        int seen = n_ctx + i + 1;
        *summed += window > 0 ? SO_MIN(seen, window) : seen;
    }
    *once = window > 0 ? SO_MIN(n_ctx + n_rows, window + n_rows - 1) : n_ctx + n_rows;
}

so_work so_model_work(const so_model *m, so_dtype kv_dtype, int n_ctx, int n_rows, int n_logits) {
    const so_hparams *hp = &m->hp;
    double entry = 2.0 * (double)so_kv_entry_bytes(kv_dtype, hp->head_dim) * hp->n_heads_kv;
    so_work w = {.n_bytes = (double)(m->weight_bytes - m->lookup_bytes - m->source_bytes)};
    if (n_logits == 0)
        w.n_bytes -= (double)m->output_bytes;
    w.n_bytes += (double)n_logits * m->logits_len * (double)sizeof(float);
    w.n_macs = (double)n_logits * m->logits_len * hp->d_model;
    for (int l = 0; l < hp->n_layers; l++) {
        double once, summed;
        count_seen(m->layers ? m->layers[l].window : 0, n_ctx, n_rows, &once, &summed);
        w.n_bytes += once * entry;
        w.n_macs += n_rows * layer_macs(m) + 2 * summed * hp->n_heads * hp->head_dim;
    }
    return w;
}

so_work so_model_source_work(const so_model *m, int n) {
    const so_hparams *hp = &m->hp;
    double rows = n, d_q = all_heads(hp);
    so_work w = {.n_bytes = (double)m->source_bytes};
    w.n_macs = hp->n_enc_layers * (rows * self_macs(m) + 2 * rows * rows * d_q);
    w.n_macs += hp->n_layers * rows * 2 * hp->d_model * d_q; /* keys and values for the decoder */
    return w;
}
