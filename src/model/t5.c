/* T5: an encoder that reads the whole source text at once, and a decoder that attends to it. Parts
 * in brackets exist in v1.1 (and Flan-T5) only; v1.0 has relu(up) instead of gelu(gate)·up.
 *
 *   encoder, each layer                          decoder, each layer
 *   x ─┬─ rms ─ q, k, v ─ attention ─ o ─(+)     x ─┬─ rms ─ q, k, v ─ cache ─ attention ─ o ─(+)
 *      └───────────────────────────────┘            └──────────────────────────────────────┘
 *                                                x ─┬─ rms ─ q ─ attention to the source ─ o ─(+)
 *                                                   └──────────────────────────────────────┘
 *   x ─┬─ rms ─ [gate,] up ─ act ─ down ─(+)     x ─┬─ rms ─ [gate,] up ─ act ─ down ─(+)
 *      └─────────────────────────────────┘          └─────────────────────────────────┘
 *
 * Differences from the decoders of other files:
 *   - Scores are not divided by √head_dim; heads·head_dim may differ from d_model.
 *   - No rope. The score of a key gets a bias that depends on its distance, one table for the
 *     encoder's layers and one for the decoder's. The attention to the source has none.
 *   - A row of the encoder attends to all positions, so its layers are computed for the whole text:
 *     a text cannot be divided into chunks. The keys and values of its output, one pair for each
 *     layer of the decoder, are computed once per text and kept (source.c).
 *   - If the output matrix is the embedding, logits are multiplied by 1/√d_model. The factor is
 *     part of the last norm's weight.
 * Values of the MLP may exceed the range of F16; all activations here are float32.
 *
 * Row invariance. The encoder's result is a function of its text alone, because each text has its
 * own pass. Rows of the decoder are computed as in llama.c; what they read of the source is fixed
 * before the pass. Same threads as pass.c. */
#include "model/t5.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "model/arch.h"
#include "model/source.h"

/* ---- the shape ---- */

enum { MAX_BUCKETS = 4096, MAX_DISTANCE = 1 << 20 };

static void read_feed_forward(so_fields *f, so_hparams *hp) {
    so_str act = so_fields_str(f, "feed_forward_proj");
    hp->gated = so_str_eq_c(act, "gated-gelu");
    if (!hp->gated && act.len > 0 && !so_str_eq_c(act, "relu"))
        so_fields_fail(f, SO_EUNSUPPORTED,
                       "%sfeed_forward_proj '%.*s' is not supported; 'relu' and 'gated-gelu' are",
                       f->prefix, SO_STR_ARG(act));
}

void so_config_read_t5(so_fields *f, so_hparams *hp, const so_arch_info *a) {
    hp->n_vocab = (int)so_fields_int(f, "vocab_size", 1, SO_MAX_VOCAB, 32128);
    hp->d_model = (int)so_fields_int(f, "d_model", 1, SO_MAX_WIDTH, SO_FIELD_REQUIRED);
    hp->head_dim = (int)so_fields_int(f, "d_kv", 1, SO_MAX_HEAD_DIM, 64);
    hp->d_ff = (int)so_fields_int(f, "d_ff", 1, SO_MAX_FF, SO_FIELD_REQUIRED);
    hp->n_enc_layers = (int)so_fields_int(f, "num_layers", 1, SO_MAX_LAYERS, SO_FIELD_REQUIRED);
    hp->n_layers = (int)so_fields_int(f, "num_decoder_layers", 1, SO_MAX_LAYERS, hp->n_enc_layers);
    hp->n_heads = (int)so_fields_int(f, "num_heads", 1, SO_MAX_HEADS, SO_FIELD_REQUIRED);
    hp->n_heads_kv = hp->n_heads;
    hp->n_ctx_train = (int)so_fields_int(f, "n_positions", 1, SO_MAX_CTX, a->defaults.n_ctx);
    hp->rel_buckets = (int)so_fields_int(f, "relative_attention_num_buckets", 1, MAX_BUCKETS, 32);
    hp->rel_distance =
        (int)so_fields_int(f, "relative_attention_max_distance", 1, MAX_DISTANCE, 128);
    hp->norm_eps = (float)so_fields_num(f, "layer_norm_epsilon", 1e-30, 1, 1e-6);
    hp->decoder_start = (int)so_fields_int(f, "decoder_start_token_id", 0, SO_MAX_VOCAB, 0);
    read_feed_forward(f, hp);
}

/* GGUF has no key for the distance from which all share a bucket: all released models use 128. */
void so_t5_read_gguf(so_fields *f, so_hparams *hp) {
    hp->n_enc_layers = hp->n_layers;
    hp->n_layers = (int)so_fields_int(f, "decoder_block_count", 1, SO_MAX_LAYERS, hp->n_enc_layers);
    hp->rel_buckets = (int)so_fields_int(f, "attention.relative_buckets_count", 1, MAX_BUCKETS, 32);
    hp->rel_distance = 128;
    hp->decoder_start = (int)so_fields_int(f, "decoder_start_token_id", 0, SO_MAX_VOCAB, 0);
    hp->gated = so_gguf_tensor(f->gguf, "enc.blk.0.ffn_gate.weight") != NULL;
}

void so_t5_finish(so_fields *f, so_hparams *hp) {
    if (hp->n_heads_kv != hp->n_heads)
        so_fields_fail(f, SO_EUNSUPPORTED, "%d heads with %d key/value heads: T5 has no groups",
                       hp->n_heads, hp->n_heads_kv);
    if (hp->rel_buckets % 4 != 0 || hp->rel_distance <= hp->rel_buckets / 2)
        so_fields_fail(f, SO_EFORMAT,
                       "%d buckets of relative positions up to a distance of %d: a multiple of 4, "
                       "and a distance above half of it, are expected",
                       hp->rel_buckets, hp->rel_distance);
    if (hp->decoder_start >= hp->n_vocab)
        so_fields_fail(f, SO_ERANGE, "decoder_start_token_id %d is outside the vocabulary of %d",
                       hp->decoder_start, hp->n_vocab);
    hp->attn_scale = 1;
}

/* ---- names in folders ---- */

static const struct {
    const char *gguf, *enc, *dec;
} layer_names[] = {
    {"attn_norm", "layer.0.layer_norm", "layer.0.layer_norm"},
    {"attn_q", "layer.0.SelfAttention.q", "layer.0.SelfAttention.q"},
    {"attn_k", "layer.0.SelfAttention.k", "layer.0.SelfAttention.k"},
    {"attn_v", "layer.0.SelfAttention.v", "layer.0.SelfAttention.v"},
    {"attn_o", "layer.0.SelfAttention.o", "layer.0.SelfAttention.o"},
    {"attn_rel_b", "layer.0.SelfAttention.relative_attention_bias",
     "layer.0.SelfAttention.relative_attention_bias"},
    {"cross_attn_norm", NULL, "layer.1.layer_norm"},
    {"cross_attn_q", NULL, "layer.1.EncDecAttention.q"},
    {"cross_attn_k", NULL, "layer.1.EncDecAttention.k"},
    {"cross_attn_v", NULL, "layer.1.EncDecAttention.v"},
    {"cross_attn_o", NULL, "layer.1.EncDecAttention.o"},
    {"ffn_norm", "layer.1.layer_norm", "layer.2.layer_norm"},
    {"ffn_gate", "layer.1.DenseReluDense.wi_0", "layer.2.DenseReluDense.wi_0"},
    {"ffn_up", "layer.1.DenseReluDense.wi_1", "layer.2.DenseReluDense.wi_1"},
    {"ffn_up_plain", "layer.1.DenseReluDense.wi", "layer.2.DenseReluDense.wi"},
    {"ffn_down", "layer.1.DenseReluDense.wo", "layer.2.DenseReluDense.wo"},
};

/* In GGUF files v1.0's only input matrix is called ffn_up; this code calls it ffn_up_plain in
 * folders, where its name differs from v1.1's. */
static bool folder_name(const char *gguf, char *buf, size_t cap) {
    static const char *const ends[][2] = {
        {"token_embd.weight", "shared.weight"},
        {"output.weight", "lm_head.weight"},
        {"enc.output_norm.weight", "encoder.final_layer_norm.weight"},
        {"dec.output_norm.weight", "decoder.final_layer_norm.weight"}};
    for (size_t i = 0; i < SO_LEN(ends); i++)
        if (strcmp(gguf, ends[i][0]) == 0)
            return snprintf(buf, cap, "%s", ends[i][1]) > 0;
    int layer = -1, used = 0;
    bool dec = strncmp(gguf, "dec.", 4) == 0;
    if (sscanf(gguf + 4, "blk.%d.%n", &layer, &used) != 1 || used == 0)
        return false;
    const char *rest = gguf + 4 + used;
    size_t len = strcspn(rest, ".");
    for (size_t i = 0; i < SO_LEN(layer_names); i++) {
        const char *name = dec ? layer_names[i].dec : layer_names[i].enc;
        if (name && strlen(layer_names[i].gguf) == len &&
            strncmp(layer_names[i].gguf, rest, len) == 0)
            return snprintf(buf, cap, "%s.block.%d.%s%s", dec ? "decoder" : "encoder", layer, name,
                            rest + len) > 0;
    }
    return false;
}

/* Copies of the embedding, and a bias of the cross-attention that old files have and no version
 * of the model reads. */
static bool ignored(so_str name) {
    static const char *const names[] = {
        "encoder.embed_tokens.weight", "decoder.embed_tokens.weight",
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        "dec.blk.0.cross_attn_rel_b.weight"};
    for (size_t i = 0; i < SO_LEN(names); i++)
        if (so_str_eq_c(name, names[i]))
            return true;
    return false;
}

/* ---- loading ---- */

int so_t5_bucket(int distance, bool both, int n_buckets, int max_distance) {
    int base = 0, n = SO_MAX(-distance, 0);
    if (both) {
        n_buckets /= 2;
        base = distance > 0 ? n_buckets : 0;
        n = abs(distance);
    }
    int exact = n_buckets / 2;
    if (n < exact)
        return base + n;
    /* logarithmic up to max_distance. The reference computes with floats; 1e-6 puts exact powers
     * on the same side, for all shapes up to 128 buckets and distances up to 1,500 */
    double part = log((double)n / exact) / log((double)max_distance / exact);
    return base + SO_MIN(n_buckets - 1, exact + (int)(part * (n_buckets - exact) + 1e-6));
}

static void load_bias(so_loader *ld, const char *name, bool both, so_view *out) {
    const so_hparams *hp = &so_loader_model(ld)->hp;
    int reach = hp->rel_distance;
    float *table = so_loader_table(ld, name, -1, hp->n_heads, hp->rel_buckets);
    if (!table)
        return;
    float *x = so_loader_reserve(ld, (int64_t)hp->n_heads * (2 * reach + 1), out);
    for (int head = 0; head < hp->n_heads; head++)
        for (int i = -reach; i <= reach; i++)
            *x++ = table[so_t5_bucket(i, both, hp->rel_buckets, reach) * hp->n_heads + head];
    free(table);
}

static bool in_folder(const so_loader *ld, const so_model *m) {
    (void)ld;
    return so_checkpoint_gguf(m->ck) == NULL;
}

static void linear(so_loader *ld, const char *side, int layer, const char *name, int64_t k,
                   int64_t m, so_linear *out) {
    char full[64];
    snprintf(full, sizeof full, "%s.blk.%d.%s", side, layer, name);
    so_loader_linear(ld, full, -1, k, m, false, out);
}

static void norm(so_loader *ld, const char *side, int layer, const char *name, so_norm *out) {
    char full[64];
    snprintf(full, sizeof full, "%s.blk.%d.%s.weight", side, layer, name);
    so_loader_vector(ld, full, -1, so_loader_model(ld)->hp.d_model, &out->weight);
}

/* The matrices that make the decoder's keys and values of a source. */
static void load_cross(so_loader *ld, int l, int64_t d, int64_t d_q, so_t5_layer *w) {
    so_model *m = so_loader_model(ld);
    size_t before = m->weight_bytes;
    linear(ld, "dec", l, "cross_attn_k", d, d_q, &w->cross_k);
    linear(ld, "dec", l, "cross_attn_v", d, d_q, &w->cross_v);
    m->source_bytes += m->weight_bytes - before;
}

static void load_layer(so_loader *ld, bool dec, int l, so_t5_layer *w) {
    const so_model *m = so_loader_model(ld);
    const so_hparams *hp = &m->hp;
    const char *side = dec ? "dec" : "enc";
    int64_t d = hp->d_model, d_q = (int64_t)hp->n_heads * hp->head_dim;
    norm(ld, side, l, "attn_norm", &w->attn_norm);
    linear(ld, side, l, "attn_q", d, d_q, &w->q);
    linear(ld, side, l, "attn_k", d, d_q, &w->k);
    linear(ld, side, l, "attn_v", d, d_q, &w->v);
    linear(ld, side, l, "attn_o", d_q, d, &w->o);
    if (dec) {
        norm(ld, side, l, "cross_attn_norm", &w->cross_norm);
        linear(ld, side, l, "cross_attn_q", d, d_q, &w->cross_q);
        load_cross(ld, l, d, d_q, w);
        linear(ld, side, l, "cross_attn_o", d_q, d, &w->cross_o);
    }
    norm(ld, side, l, "ffn_norm", &w->ffn_norm);
    if (hp->gated)
        linear(ld, side, l, "ffn_gate", d, hp->d_ff, &w->gate);
    linear(ld, side, l, !hp->gated && in_folder(ld, m) ? "ffn_up_plain" : "ffn_up", d, hp->d_ff,
           &w->up);
    linear(ld, side, l, "ffn_down", hp->d_ff, d, &w->down);
}

/* The decoder's last norm, times the factor of the logits. */
static void load_out_norm(so_loader *ld, so_model *m) {
    int d = m->hp.d_model;
    float factor = m->hp.tied ? (float)(1 / sqrt((double)d)) : 1;
    float *table = so_loader_table(ld, "dec.output_norm.weight", -1, d, 0);
    if (!table)
        return;
    float *x = so_loader_reserve(ld, d, &m->out_norm.weight);
    for (int i = 0; i < d; i++)
        x[i] = table[i] * factor;
    free(table);
}

static void load_side(so_loader *ld, bool dec, int first, int n, so_t5_layer *layers) {
    const so_hparams *hp = &so_loader_model(ld)->hp;
    for (int l = 0; l < n && !so_loader_failed(ld); l++) {
        load_layer(ld, dec, l, &layers[l]);
        so_loader_progress(ld, (first + l + 1.0) / (hp->n_enc_layers + hp->n_layers + 1.0));
    }
}

static void load(so_loader *ld) {
    so_model *m = so_loader_model(ld);
    int n_enc = m->hp.n_enc_layers, n = m->hp.n_layers;
    so_t5 *t = m->t5 = SO_NEW(so_t5);
    size_t before = m->weight_bytes;
    t->enc = SO_NEW_N(so_t5_layer, n_enc);
    t->dec = SO_NEW_N(so_t5_layer, n);
    load_bias(ld, "enc.blk.0.attn_rel_b.weight", true, &t->enc_bias);
    load_side(ld, false, 0, n_enc, t->enc);
    so_loader_vector(ld, "enc.output_norm.weight", -1, m->hp.d_model, &t->enc_out_norm.weight);
    m->source_bytes = m->weight_bytes - before;
    load_bias(ld, "dec.blk.0.attn_rel_b.weight", false, &t->dec_bias);
    load_side(ld, true, n_enc, n, t->dec);
    load_out_norm(ld, m);
}

void so_t5_free(so_t5 *t) {
    if (!t)
        return;
    free(t->enc);
    free(t->dec);
    free(t);
}

/* ---- the encoder ---- */

static void submit_norm(const so_t5_pass *p, const so_norm *w) {
    const so_hparams *hp = &p->model->hp;
    so_submit(p->model->backend, &(so_op){.kind = SO_OP_RMS_NORM,
                                          .n = p->n,
                                          .norm = {.out = p->h,
                                                   .x = p->x,
                                                   .weight = w->weight,
                                                   .d = hp->d_model,
                                                   .eps = hp->norm_eps}});
}

static void submit_linear(const so_t5_pass *p, so_view out, so_view x, const so_linear *w) {
    so_submit(p->model->backend,
              &(so_op){.kind = SO_OP_MATMUL, .n = p->n, .matmul = {out, x, w->bias, w->w}});
}

static void submit_eltwise(const so_t5_pass *p, so_op_kind kind, so_view out, so_view a, so_view b,
                           int d) {
    so_submit(p->model->backend, &(so_op){.kind = kind, .n = p->n, .eltwise = {out, a, b, d}});
}

static void submit_store(const so_t5_pass *p, so_kv_store *store, int layer, so_view slots) {
    so_submit(
        p->model->backend,
        &(so_op){.kind = SO_OP_KV_STORE, .n = p->n, .kv_store = {store, layer, p->k, p->v, slots}});
}

static void encoder_layer(const so_t5_pass *p, const so_t5_layer *w) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;
    submit_norm(p, &w->attn_norm);
    submit_linear(p, p->q, p->h, &w->q);
    submit_linear(p, p->k, p->h, &w->k);
    submit_linear(p, p->v, p->h, &w->v);
    submit_store(p, p->own, 0, p->slots);
    so_submit(m->backend, &(so_op){.kind = SO_OP_ATTENTION,
                                   .n = p->n,
                                   .attention = {.store = p->own,
                                                 .n_heads = hp->n_heads,
                                                 .out = p->att,
                                                 .q = p->q,
                                                 .rows = p->rows,
                                                 .pages = p->pages,
                                                 .scale = hp->attn_scale,
                                                 .bias = m->t5->enc_bias,
                                                 .query_pos = p->positions,
                                                 .reach = hp->rel_distance}});
    submit_linear(p, p->h, p->att, &w->o);
    submit_eltwise(p, SO_OP_ADD, p->x, p->x, p->h, hp->d_model);
    submit_norm(p, &w->ffn_norm);
    submit_linear(p, p->up, p->h, &w->up);
    if (hp->gated) {
        submit_linear(p, p->gate, p->h, &w->gate);
        submit_eltwise(p, SO_OP_GELU_MUL, p->up, p->gate, p->up, hp->d_ff);
    } else {
        submit_eltwise(p, SO_OP_RELU, p->up, p->up, (so_view){0}, hp->d_ff);
    }
    submit_linear(p, p->h, p->up, &w->down);
    submit_eltwise(p, SO_OP_ADD, p->x, p->x, p->h, hp->d_model);
}

void so_t5_encode(const so_t5_pass *p) {
    const so_model *m = p->model;
    so_submit(m->backend,
              &(so_op){.kind = SO_OP_EMBED, .n = p->n, .embed = {p->x, p->ids, m->embed, 1}});
    for (int l = 0; l < m->hp.n_enc_layers; l++)
        encoder_layer(p, &m->t5->enc[l]);
    submit_norm(p, &m->t5->enc_out_norm);
    for (int l = 0; l < m->hp.n_layers; l++) {
        submit_linear(p, p->k, p->h, &m->t5->dec[l].cross_k);
        submit_linear(p, p->v, p->h, &m->t5->dec[l].cross_v);
        submit_store(p, p->cross, l, p->cross_slots);
    }
}

/* ---- the decoder ---- */

static void cross_attention(so_pass *p, int layer) {
    const so_hparams *hp = &p->model->hp;
    so_submit(p->backend, &(so_op){.kind = SO_OP_ATTENTION,
                                   .n = p->n,
                                   .attention = {.store = so_sources_store(p->sources),
                                                 .layer = layer,
                                                 .n_heads = hp->n_heads,
                                                 .out = p->att,
                                                 .q = p->q,
                                                 .rows = p->cross_rows,
                                                 .pages = so_sources_pages(p->sources),
                                                 .scale = hp->attn_scale}});
}

static void forward(so_pass *p) {
    const so_model *m = p->model;
    const so_hparams *hp = &m->hp;

    so_do_embed(p, p->x, p->ids, m->embed, 1);
    for (int l = 0; l < hp->n_layers; l++) {
        const so_t5_layer *w = &m->t5->dec[l];

        so_do_rms_norm(p, p->h, p->x, &w->attn_norm);
        so_do_linear(p, p->q, p->h, &w->q);
        so_do_linear(p, p->k, p->h, &w->k);
        so_do_linear(p, p->v, p->h, &w->v);
        so_do_biased_attention(p, l, 0, m->t5->dec_bias);
        so_do_linear(p, p->h, p->att, &w->o);
        so_do_add(p, p->x, p->h);

        so_do_rms_norm(p, p->h, p->x, &w->cross_norm);
        so_do_linear(p, p->q, p->h, &w->cross_q);
        cross_attention(p, l);
        so_do_linear(p, p->h, p->att, &w->cross_o);
        so_do_add(p, p->x, p->h);

        so_do_rms_norm(p, p->h, p->x, &w->ffn_norm);
        so_do_linear(p, p->up, p->h, &w->up);
        if (hp->gated) {
            so_do_linear(p, p->gate, p->h, &w->gate);
            so_do_eltwise(p, SO_OP_GELU_MUL, p->up, p->gate, p->up, hp->d_ff);
        } else {
            so_do_eltwise(p, SO_OP_RELU, p->up, p->up, (so_view){0}, hp->d_ff);
        }
        so_do_linear(p, p->h, p->up, &w->down);
        so_do_add(p, p->x, p->h);
    }
    so_pass_output(p);
}

static const so_name_pair GLOBALS[] = {{"token_embd.weight", "shared.weight", 0}};

const so_arch_info so_arch_t5 = {
    .names = {"t5"},
    .aliases = {"mt5"},
    .classes = {"T5ForConditionalGeneration", "MT5ForConditionalGeneration"},
    .forward = forward,
    .encoder = true,
    .load = load,
    .folder_name = folder_name,
    .ignored = ignored,
    .global_names = GLOBALS,
    .n_global_names = SO_LEN(GLOBALS),
    .hf_prefix = "",
    .hf_layers = "",
    .read_config = so_config_read_t5,
    .defaults = {.n_ctx = 512, .tied = true},
};
