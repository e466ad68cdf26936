/* Declarations shared by the files of src/model: the loaded model, the pass, and one function
 * per operation, so that a forward pass reads like the diagram at the top of its file. Private to src/model. */
#ifndef SO_MODEL_IMPL_H
#define SO_MODEL_IMPL_H

#include "model/model.h"

/* y = W x + bias. bias.buf is NULL if there is no bias. */
typedef struct so_linear {
    so_weight *w;
    so_view bias;
} so_linear;

typedef struct so_norm {
    so_view weight, bias; /* bias: layer norm only */
} so_norm;

typedef struct so_layer {
    so_norm attn_norm, ffn_norm;
    so_norm q_norm, k_norm;                /* [head_dim]; Qwen3, Gemma 3 */
    so_norm attn_post_norm, ffn_post_norm; /* Gemma 3 */
    so_linear q, k, v, o;
    so_linear gate, up, down; /* GPT-2 has no gate */
    int window;               /* 0: no window */
    bool local_rope;
} so_layer;

struct so_t5; /* the weights of an encoder-decoder model, t5.h */

struct so_model {
    so_checkpoint *ck;
    so_backend *backend;
    so_hparams hp;
    const struct so_arch_info *arch; /* of hp.arch */
    so_weight *embed, *pos_embed;    /* pos_embed: GPT-2 */
    so_linear output;                /* w == embed if tied and without a vocabulary subset */
    so_tensor output_tensor;         /* the whole output matrix as the file has it, for heads */
    int32_t *vocab_subset;   /* [logits_len] tokens of the output rows, ascending; or NULL */
    int logits_len;          /* rows of the output matrix */
    so_linear target_hidden; /* applied to the target's hidden states; w NULL: none */
    int d_target_hidden;     /* width of the target's hidden states */
    so_norm out_norm;
    so_layer *layers;  /* [n_layers] */
    struct so_t5 *t5;  /* NULL: a decoder alone, whose weights are in `layers` */
    so_buffer *consts; /* norm weights and biases, float32 */
    float *inv_freq;   /* [rope_dim/2]; NULL without rope */
    float *inv_freq_local;
    size_t weight_bytes;
    size_t lookup_bytes, output_bytes; /* in weight_bytes: only looked up; the output matrix */
    size_t source_bytes;               /* in weight_bytes: read for a source, not for a pass */
    int64_t n_params;
    so_weight **weights; /* all weights, each once, to be freed */
    int n_weights, weights_cap;
    void **memory; /* weights made at load: transposed, converted or a subset of rows */
    int n_memory, memory_cap;
};

struct so_pass {
    const so_model *model;
    so_backend *backend;
    so_kv *kv;
    int max_rows, max_logits;

    /* Device. Activations: [max_rows][…]. */
    so_view x, h, q, k, v, att, gate, up;
    so_view target_hidden; /* the target's hidden states, [max_rows][d_target_hidden] */
    so_view ids, positions, slots, rows, pages, tails, rope, rope_local;
    so_view cross_rows; /* so_attn_row[max_rows]: the positions of its source that a row sees */
    const struct so_sources *sources; /* of the batch's sequences; NULL: no encoder */
    so_view out_rows, out_x, hidden, logits, argmax, sample, sampled; /* [max_logits][…] */
    so_view guess_ids;  /* int32[logits_len]: token ids of the logits; so_pass_reserve_levels */
    bool has_guess_ids; /* they were uploaded, and no pass has failed since */
    /* Rows with an input of their own (so_row.embedding); made when first needed. */
    so_view inputs;     /* [2 max_rows][d_model]: embeddings of tokens, then the given ones */
    so_view input_rows; /* int32[max_rows]: each row's place in `inputs` */

    /* Host, filled per run. */
    int n, n_out;
    /* Level l begins at row level_row[l] and at output level_out[l]. */
    int n_levels, level_row[SO_PASS_LEVELS + 1], level_out[SO_PASS_LEVELS + 1];
    bool has_host_logits;   /* at least one row's logits are downloaded */
    bool has_target_hidden; /* at least one row of the level has a hidden state of the target */
    unsigned want;
    int32_t *h_ids, *h_positions, *h_out_rows;
    so_kv_slot *h_slots;
    so_attn_row *h_rows, *h_cross_rows;
    int32_t *h_pages, *h_tails;
    int n_pages, pages_cap, n_tails, tails_cap;
    float *h_rope, *h_target_hidden;
    float *h_inputs;               /* [n_inputs][d_model] */
    int32_t *h_input_rows;         /* [n] */
    int n_inputs;                  /* rows of the batch with an input of their own */
    int32_t *seq_n, *seq_page_off; /* per sequence: rows so far; its first entry in h_pages */
    float *h_logits, *h_hidden;
    bool *h_has_logits; /* [max_logits] h_logits holds the row, or will after the sync */
    int32_t *h_argmax;
    so_sample_row *h_sample;
    so_sample_result *h_sampled;
};

/* inv_freq[rope_dim/2] from rope_base or, if local, from rope_base_local. factors: rope_freqs of a
 * GGUF file, may be NULL. */
void so_rope_inv_freq(const so_hparams *hp, bool local, const float *factors, float *inv_freq);
/* table[n][2] = scale · (cos, sin) of the angles pos · inv_freq[n]. */
void so_rope_fill(const float *inv_freq, int n, float scale, int32_t pos, float *table);

/* Each submits one operation of a diagram, over the p->n rows of the batch. */
static inline void so_do_embed(so_pass *p, so_view out, so_view ids, const so_weight *w,
                               float scale) {
    so_submit(p->backend, &(so_op){.kind = SO_OP_EMBED, .n = p->n, .embed = {out, ids, w, scale}});
}

static inline void so_do_rms_norm(so_pass *p, so_view out, so_view x, const so_norm *w) {
    const so_hparams *hp = &p->model->hp;
    so_submit(
        p->backend,
        &(so_op){
            .kind = SO_OP_RMS_NORM,
            .n = p->n,
            .norm = {
                .out = out, .x = x, .weight = w->weight, .d = hp->d_model, .eps = hp->norm_eps}});
}

/* p->x = the inputs of the first layer: embeddings of the tokens, or what rows bring themselves. */
void so_pass_inputs(so_pass *p);

/* Normalises each head of x[n][n_heads][head_dim] separately. */
static inline void so_do_head_norm(so_pass *p, so_view x, int n_heads, const so_norm *w) {
    const so_hparams *hp = &p->model->hp;
    so_submit(
        p->backend,
        &(so_op){
            .kind = SO_OP_RMS_NORM,
            .n = p->n * n_heads,
            .norm = {
                .out = x, .x = x, .weight = w->weight, .d = hp->head_dim, .eps = hp->norm_eps}});
}

static inline void so_do_layer_norm(so_pass *p, so_view out, so_view x, const so_norm *w) {
    const so_hparams *hp = &p->model->hp;
    so_submit(p->backend,
              &(so_op){.kind = SO_OP_LAYER_NORM,
                       .n = p->n,
                       .norm = {out, x, w->weight, w->bias, hp->d_model, hp->norm_eps}});
}

static inline void so_do_linear(so_pass *p, so_view out, so_view x, const so_linear *w) {
    so_submit(p->backend,
              &(so_op){.kind = SO_OP_MATMUL, .n = p->n, .matmul = {out, x, w->bias, w->w}});
}

static inline void so_do_eltwise(so_pass *p, so_op_kind kind, so_view out, so_view a, so_view b,
                                 int d) {
    so_submit(p->backend, &(so_op){.kind = kind, .n = p->n, .eltwise = {out, a, b, d}});
}

static inline void so_do_add(so_pass *p, so_view x, so_view y) { /* x += y */
    so_do_eltwise(p, SO_OP_ADD, x, x, y, p->model->hp.d_model);
}

static inline void so_do_rope(so_pass *p, so_view x, int n_heads, const so_layer *w) {
    const so_hparams *hp = &p->model->hp;
    so_view table = w->local_rope ? p->rope_local : p->rope;
    so_submit(p->backend, &(so_op){.kind = SO_OP_ROPE,
                                   .n = p->n,
                                   .rope = {x, table, n_heads, hp->head_dim, hp->rope_halves}});
}

/* Stores k and v of this pass in the cache, then att = attention of q over the positions each row
 * sees. bias: of scores by distance, see SO_OP_ATTENTION; without a buffer there is none. */
static inline void so_do_biased_attention(so_pass *p, int layer, int window, so_view bias) {
    const so_hparams *hp = &p->model->hp;
    so_kv_store *store = so_kv_backing(p->kv);
    so_submit(p->backend, &(so_op){.kind = SO_OP_KV_STORE,
                                   .n = p->n,
                                   .kv_store = {store, layer, p->k, p->v, p->slots}});
    so_submit(p->backend, &(so_op){.kind = SO_OP_ATTENTION,
                                   .n = p->n,
                                   .attention = {.store = store,
                                                 .layer = layer,
                                                 .n_heads = hp->n_heads,
                                                 .out = p->att,
                                                 .q = p->q,
                                                 .rows = p->rows,
                                                 .pages = p->pages,
                                                 .tails = p->tails,
                                                 .scale = hp->attn_scale,
                                                 .window = window,
                                                 .bias = bias,
                                                 .query_pos = bias.buf ? p->positions : bias,
                                                 .reach = bias.buf ? hp->rel_distance : 0}});
}

static inline void so_do_attention(so_pass *p, int layer) {
    so_do_biased_attention(p, layer, p->model->layers[layer].window, (so_view){0});
}

/* The last norm and the output matrix, for the rows with want_logits. */
void so_pass_output(so_pass *p);

/* For so_arch_info.load (load.c). Names are GGUF's; layer −1: outside the layers. After the first
 * error of a load these functions do nothing. */
typedef struct so_loader so_loader;
so_model *so_loader_model(so_loader *ld);
bool so_loader_failed(const so_loader *ld);
/* name: without ".weight"; k inputs, m outputs. */
void so_loader_linear(so_loader *ld, const char *name, int layer, int64_t k, int64_t m, bool bias,
                      so_linear *out);
void so_loader_vector(so_loader *ld, const char *gguf, int layer, int64_t n, so_view *out);
/* A small matrix as float32, to compute from: [m][k]; m 0: a vector of k. NULL after an error. Freed by the caller. */
float *so_loader_table(so_loader *ld, const char *gguf, int layer, int64_t k, int64_t m);
/* Room for n float32 among the vectors, to be filled in; the view is valid after the load. */
float *so_loader_reserve(so_loader *ld, int64_t n, so_view *view);
void so_loader_progress(so_loader *ld, double done);

#endif
