/* From a checkpoint to a model. Finds every tensor under its GGUF name, checks its shape, passes
 * matrices to the backend in the file's layout, and vectors (norms, biases) as float32. If the
 * backend has copied a matrix into a layout of its own, the file's pages are dropped from memory at
 * once.
 *
 * Refuses: a tensor that is missing or has another shape than the hparams require; a tensor that
 * the architecture does not have, because ignoring it would run a different model; NaN or infinity
 * in a vector. Matrices are too large to be checked at load: a NaN in one shows in the first logits
 * (so_pass_check). Errors are sticky in the loader: after the first one, further calls do nothing.
 *
 * Thread: any one thread that has exclusive use of the backend. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/cgroup.h"
#include "base/log.h"
#include "base/map.h"
#include "base/mem.h"
#include "format/quant.h"
#include "model/arch.h"
#include "model/fp8.h"
#include "model/impl.h"
#include "model/names.h"
#include "model/t5.h"
#include "model/vocab_subset.h"
#include "model/weights.h"

struct so_loader {
    so_model *m;
    const so_model_opts *opts;
    so_names names;
    so_map *used;  /* names of the tensors that were loaded */
    so_pool *pool; /* only if matrices are converted */
    bool pack;     /* the backend may repack matrices */
    /* Vectors are collected in `host` and uploaded as one buffer at the end. fix: the views of this
     * buffer; their buf is set at the end. */
    float *host;
    size_t n_host, host_cap;
    so_view **fix;
    int n_fix, fix_cap;
    so_err *err;
    int rc;
};
typedef struct so_loader loader;

enum { MAX_TARGET_HIDDEN = 1 << 16 };

/* Grows an array if it has no room for one more element. */
#define GROW(array, n, cap)                                                 \
    do {                                                                    \
        if ((n) == (cap)) {                                                 \
            (cap) = SO_MAX(64, (cap)*2);                                    \
            (array) = so_realloc((array), (size_t)(cap) * sizeof *(array)); \
        }                                                                   \
    } while (0)

/* "[576, 1536]", in the order that the tools of the file format print. */
static const char *shape_text(const loader *ld, const int64_t *dims, int n, char *buf, size_t cap) {
    bool reversed = so_checkpoint_gguf(ld->m->ck) == NULL;
    size_t len = (size_t)snprintf(buf, cap, "[");
    for (int i = 0; i < n && len < cap; i++)
        len += (size_t)snprintf(buf + len, cap - len, "%s%lld", i ? ", " : "",
                                (long long)dims[reversed ? n - 1 - i : i]);
    if (len < cap)
        snprintf(buf + len, cap - len, "]");
    return buf;
}

static void check_shape(loader *ld, const so_tensor *t, const int64_t *want, int n_want) {
    bool same = true;
    for (int i = 0; i < SO_MAX_DIMS; i++)
        same = same && t->dims[i] == (i < n_want ? want[i] : 1);
    char found[96], expected[96];
    if (!same)
        ld->rc = so_err_set(ld->err, SO_EFORMAT, "%s: tensor %.*s has shape %s; %s is expected",
                            so_checkpoint_path(ld->m->ck), SO_STR_ARG(t->name),
                            shape_text(ld, t->dims, t->n_dims, found, sizeof found),
                            shape_text(ld, want, n_want, expected, sizeof expected));
}

/* Finds the tensor with a GGUF name and checks its shape: k inputs, m outputs; m 0: a vector of
 * k. */
static const so_tensor *find(loader *ld, const char *gguf, int layer, int64_t k, int64_t m,
                             unsigned *flags) {
    char name[SO_NAME_CAP];
    const so_tensor *t = NULL;
    if (ld->rc != 0)
        return NULL;
    const so_name_pair *pair = so_names_resolve(&ld->names, gguf, layer, name);
    SO_ASSERT(pair != NULL);
    if (m > 0 && so_fp8_is(so_checkpoint_tensor(ld->m->ck, name)))
        t = so_checkpoint_tensor(ld->m->ck, name);
    else
        ld->rc = so_checkpoint_require(ld->m->ck, name, &t, ld->err);
    if (ld->rc != 0)
        return NULL;
    *flags = so_checkpoint_gguf(ld->m->ck) ? 0 : pair->flags;
    bool flip = (*flags & SO_NAME_TRANSPOSED) != 0;
    check_shape(ld, t, (int64_t[]){flip ? m : k, flip ? k : m}, m ? 2 : 1);
    so_map_add(ld->used, t->name, 1);
    ld->m->n_params += so_tensor_count(t);
    return ld->rc == 0 ? t : NULL;
}

/* Vectors. */

static void check_finite(loader *ld, const so_tensor *t, const float *x, int64_t n) {
    int64_t bad = so_weights_nonfinite(x, n);
    if (bad >= 0)
        ld->rc =
            so_err_set(ld->err, SO_EFORMAT, "%s: tensor %.*s holds NaN or infinity at element %lld",
                       so_checkpoint_path(ld->m->ck), SO_STR_ARG(t->name), (long long)bad);
}

/* Reserves n float32 among the vectors, aligned to 64 bytes. The view gets its buffer at the
 * end. */
float *so_loader_reserve(loader *ld, int64_t n, so_view *view) {
    size_t start = (ld->n_host + 15) / 16 * 16, end = start + (size_t)n;
    if (end > ld->host_cap) {
        ld->host_cap = SO_MAX(end, ld->host_cap * 2);
        ld->host = so_realloc(ld->host, ld->host_cap * sizeof *ld->host);
    }
    memset(ld->host + ld->n_host, 0, (start - ld->n_host) * sizeof *ld->host);
    ld->n_host = end;
    view->off = start * sizeof *ld->host;
    GROW(ld->fix, ld->n_fix, ld->fix_cap);
    ld->fix[ld->n_fix++] = view;
    return ld->host + start;
}

void so_loader_vector(loader *ld, const char *gguf, int layer, int64_t n, so_view *out) {
    unsigned flags;
    const so_tensor *t = find(ld, gguf, layer, n, 0, &flags);
    if (!t)
        return;
    float *x = so_loader_reserve(ld, n, out);
    so_dequantize_row(t->dtype, t->data, x, n);
    if (flags & SO_NAME_ADD_ONE)
        for (int64_t i = 0; i < n; i++)
            x[i] += 1;
    check_finite(ld, t, x, n);
    ld->m->weight_bytes += t->n_bytes;
}

float *so_loader_table(loader *ld, const char *gguf, int layer, int64_t k, int64_t m) {
    unsigned flags;
    const so_tensor *t = find(ld, gguf, layer, k, m, &flags);
    m = SO_MAX(m, 1);
    float *x = t ? so_try_alloc((size_t)(k * m), sizeof *x) : NULL;
    if (!t || !x) {
        if (t)
            ld->rc = so_err_set(ld->err, SO_ENOMEM, "no memory for %s", gguf);
        return NULL;
    }
    size_t row_bytes = so_dtype_row_bytes(t->dtype, k);
    for (int64_t i = 0; i < m; i++)
        so_dequantize_row(t->dtype, (const char *)t->data + (size_t)i * row_bytes, x + i * k, k);
    check_finite(ld, t, x, k * m);
    ld->m->weight_bytes += t->n_bytes;
    return x;
}

so_model *so_loader_model(loader *ld) { return ld->m; }
bool so_loader_failed(const loader *ld) { return ld->rc != 0; }

void so_loader_progress(loader *ld, double done) {
    if (ld->opts->progress)
        ld->opts->progress(ld->opts->user, done);
}

static void upload_vectors(loader *ld) {
    so_backend *b = ld->m->backend;
    if (ld->rc != 0 || ld->n_host == 0)
        return;
    size_t n_bytes = ld->n_host * sizeof *ld->host;
    ld->rc = b->vt->buffer_create(b, n_bytes, &ld->m->consts, ld->err);
    if (ld->rc != 0)
        return;
    for (int i = 0; i < ld->n_fix; i++)
        ld->fix[i]->buf = ld->m->consts;
    so_submit(b, &(so_op){.kind = SO_OP_UPLOAD, .upload = {{ld->m->consts, 0}, ld->host, n_bytes}});
    ld->rc = b->vt->sync(b, ld->err);
}

/* Matrices. */

static void keep_memory(so_model *m, void *memory) {
    GROW(m->memory, m->n_memory, m->memory_cap);
    m->memory[m->n_memory++] = memory;
}

/* How the backend uses a matrix. A matrix that is only used for row lookups stays in the file,
 * since a pass reads few of its rows. */
typedef enum purpose { MULTIPLIED, LOOKED_UP } purpose;

/* Converts the tensor to another dtype if the options ask for it. *memory owns the tensor's bytes
 * before the call (unless NULL) and after it. */
static void convert_weight(loader *ld, so_tensor *t, void **memory) {
    so_dtype dtype = t->dtype;
    if (ld->rc != 0 || !ld->opts->quantize)
        return;
    dtype = so_weights_fit(ld->opts->dtype, t->dims[0]);
    if (dtype == t->dtype)
        return;
    so_tensor converted;
    void *own = NULL;
    ld->rc = so_weights_convert(t, NULL, dtype, ld->pool, &converted, &own, ld->err);
    if (ld->rc != 0) {
        so_err_prefix(ld->err, "%s", so_checkpoint_path(ld->m->ck));
        return;
    }
    free(*memory);
    *memory = own;
    *t = converted;
}

/* memory: owns t's bytes; NULL if the file or the model owns them. Ownership passes to this
 * function. */
static void make_weight(loader *ld, so_tensor t, void *memory, bool may_round, purpose use,
                        so_weight **out) {
    so_model *m = ld->m;
    if (may_round)
        convert_weight(ld, &t, &memory);
    if (ld->rc == 0)
        ld->rc = m->backend->vt->weight_create(m->backend, &t, out, ld->err);
    if (ld->rc != 0) {
        free(memory);
        return;
    }
    GROW(m->weights, m->n_weights, m->weights_cap);
    m->weights[m->n_weights++] = *out;
    m->weight_bytes += t.n_bytes;
    if (use == LOOKED_UP)
        m->lookup_bytes += t.n_bytes;
    if (use == MULTIPLIED && ld->pack && m->backend->vt->weight_pack(m->backend, *out)) {
        so_checkpoint_drop(m->ck, t.data, t.n_bytes);
        free(memory);
    } else if (memory) {
        keep_memory(m, memory);
    }
}

/* A matrix of 8-bit floats as another type. */
static void convert_fp8(loader *ld, const so_tensor *t, so_tensor *out, void **memory) {
    so_dtype want = ld->opts->quantize ? ld->opts->dtype : SO_DTYPE_Q8_0;
    so_fp8 fp8;
    ld->rc = so_fp8_open(ld->m->ck, t, &fp8, ld->err);
    if (ld->rc != 0)
        return;
    ld->rc = so_weights_convert(t, &fp8, so_weights_fit(want, t->dims[0]), ld->pool, out, memory,
                                ld->err);
    if (ld->rc != 0)
        so_err_prefix(ld->err, "%s", so_checkpoint_path(ld->m->ck));
    if (fp8.scales)
        so_map_add(ld->used, fp8.scales->name, 1);
    if (fp8.unused)
        so_map_add(ld->used, fp8.unused->name, 1);
    so_checkpoint_drop(ld->m->ck, t->data, t->n_bytes);
}

/* Finds a matrix; transposes it if the file stores it transposed, and converts 8-bit floats.
 * *memory: the bytes, if they are not those of the file; with NULL the model keeps them. */
static bool find_matrix(loader *ld, const char *gguf, int layer, int64_t k, int64_t m,
                        so_tensor *out, void **memory) {
    unsigned flags;
    void *own = NULL;
    const so_tensor *t = find(ld, gguf, layer, k, m, &flags);
    if (!t)
        return false;
    *out = *t;
    if (flags & SO_NAME_TRANSPOSED)
        ld->rc = so_weights_transpose(t, out, &own, ld->err);
    else if (so_fp8_is(t))
        convert_fp8(ld, t, out, &own);
    if (ld->rc != 0)
        return false;
    if (memory)
        *memory = own;
    else if (own)
        keep_memory(ld->m, own);
    return true;
}

static void matrix(loader *ld, const char *gguf, int layer, int64_t k, int64_t m, so_weight **out) {
    so_tensor t;
    void *memory;
    if (find_matrix(ld, gguf, layer, k, m, &t, &memory))
        make_weight(ld, t, memory, true, MULTIPLIED, out);
}

/* name: without ".weight". The bias is loaded only if `bias` is set. */
void so_loader_linear(loader *ld, const char *name, int layer, int64_t k, int64_t m, bool bias,
                      so_linear *out) {
    char full[64];
    snprintf(full, sizeof full, "%s.weight", name);
    matrix(ld, full, layer, k, m, &out->w);
    snprintf(full, sizeof full, "%s.bias", name);
    if (bias)
        so_loader_vector(ld, full, layer, m, &out->bias);
}

/* q, k and v in one matrix (GPT-2): three runs of rows, which become three matrices. */
static void load_qkv(loader *ld, int layer, so_layer *w) {
    const so_hparams *hp = &ld->m->hp;
    int64_t d = hp->d_model, d_q = (int64_t)hp->n_heads * hp->head_dim;
    int64_t d_kv = (int64_t)hp->n_heads_kv * hp->head_dim;
    so_linear *parts[] = {&w->q, &w->k, &w->v};
    const int64_t rows[] = {d_q, d_kv, d_kv}, first[] = {0, d_q, d_q + d_kv};
    so_tensor t;
    if (!find_matrix(ld, "attn_qkv.weight", layer, d, d_q + 2 * d_kv, &t, NULL))
        return;
    size_t row_bytes = so_dtype_row_bytes(t.dtype, d);
    for (int i = 0; i < 3; i++) {
        so_tensor part = t;
        part.dims[1] = rows[i];
        part.n_bytes = row_bytes * (size_t)rows[i];
        part.data = (const char *)t.data + row_bytes * (size_t)first[i];
        make_weight(ld, part, NULL, true, MULTIPLIED, &parts[i]->w);
    }
    so_loader_vector(ld, "attn_qkv.bias", layer, d_q + 2 * d_kv, &w->q.bias);
    for (int i = 1; i < 3 && ld->rc == 0; i++) {
        parts[i]->bias.off = w->q.bias.off + (size_t)first[i] * sizeof(float);
        GROW(ld->fix, ld->n_fix, ld->fix_cap);
        ld->fix[ld->n_fix++] = &parts[i]->bias;
    }
}

/* Layers. */

static void load_attention(loader *ld, int l, so_layer *w) {
    const so_hparams *hp = &ld->m->hp;
    const so_arch_info *a = ld->m->arch;
    int64_t d = hp->d_model, d_q = (int64_t)hp->n_heads * hp->head_dim;
    int64_t d_kv = (int64_t)hp->n_heads_kv * hp->head_dim;
    so_loader_vector(ld, "attn_norm.weight", l, d, &w->attn_norm.weight);
    if (a->layer_norm)
        so_loader_vector(ld, "attn_norm.bias", l, d, &w->attn_norm.bias);
    if (a->fused_qkv) {
        load_qkv(ld, l, w);
    } else {
        so_loader_linear(ld, "attn_q", l, d, d_q, hp->bias_qkv, &w->q);
        so_loader_linear(ld, "attn_k", l, d, d_kv, hp->bias_qkv, &w->k);
        so_loader_linear(ld, "attn_v", l, d, d_kv, hp->bias_qkv, &w->v);
    }
    if (hp->qk_norm) {
        so_loader_vector(ld, "attn_q_norm.weight", l, hp->head_dim, &w->q_norm.weight);
        so_loader_vector(ld, "attn_k_norm.weight", l, hp->head_dim, &w->k_norm.weight);
    }
    so_loader_linear(ld, "attn_output", l, d_q, d, hp->bias_out, &w->o);
    if (a->post_norms)
        so_loader_vector(ld, "post_attention_norm.weight", l, d, &w->attn_post_norm.weight);
}

static void load_mlp(loader *ld, int l, so_layer *w) {
    const so_hparams *hp = &ld->m->hp;
    const so_arch_info *a = ld->m->arch;
    int64_t d = hp->d_model, d_ff = hp->d_ff;
    so_loader_vector(ld, "ffn_norm.weight", l, d, &w->ffn_norm.weight);
    if (a->layer_norm)
        so_loader_vector(ld, "ffn_norm.bias", l, d, &w->ffn_norm.bias);
    if (a->gated_mlp)
        so_loader_linear(ld, "ffn_gate", l, d, d_ff, hp->bias_mlp, &w->gate);
    so_loader_linear(ld, "ffn_up", l, d, d_ff, hp->bias_mlp, &w->up);
    so_loader_linear(ld, "ffn_down", l, d_ff, d, hp->bias_mlp, &w->down);
    if (a->post_norms)
        so_loader_vector(ld, "post_ffw_norm.weight", l, d, &w->ffn_post_norm.weight);
}

static void load_layers(loader *ld) {
    so_model *m = ld->m;
    m->layers = SO_NEW_N(so_layer, m->hp.n_layers);
    if (m->arch->load) {
        m->arch->load(ld);
        return;
    }
    for (int l = 0; l < m->hp.n_layers && ld->rc == 0; l++) {
        so_layer *w = &m->layers[l];
        bool local = so_hparams_layer_local(&m->hp, l);
        w->window = local ? m->hp.window : 0;
        w->local_rope = local && m->hp.rope_base_local > 0;
        load_attention(ld, l, w);
        load_mlp(ld, l, w);
        so_loader_progress(ld, (l + 1.0) / (m->hp.n_layers + 1.0));
    }
}

/* The output matrix, or only its rows for the vocabulary subset. `whole`: the embedding, used if
 * tied. */
static void load_output(loader *ld, const so_tensor *whole) {
    so_model *m = ld->m;
    so_tensor t, part;
    void *memory = NULL;
    if (ld->rc != 0)
        return;
    if (m->hp.tied)
        t = *whole;
    else if (!find_matrix(ld, "output.weight", -1, m->hp.d_model, m->hp.n_vocab, &t, NULL))
        return;
    part = m->output_tensor = t;
    if (m->vocab_subset)
        ld->rc = so_weights_pick(&t, m->vocab_subset, m->logits_len, &part, &memory, ld->err);
    if (ld->rc == 0)
        make_weight(ld, part, memory, true, MULTIPLIED, &m->output.w);
}

/* The matrix from the target's hidden states to the draft's embedding. The file states its width;
 * draft/model.c compares it with the target's. */
static void load_target_hidden(loader *ld) {
    so_model *m = ld->m;
    const so_tensor *t = so_checkpoint_tensor(m->ck, SO_TARGET_HIDDEN_TENSOR);
    if (!t || !so_checkpoint_gguf(m->ck) || !m->arch->reads_target_hidden || ld->rc != 0)
        return;
    if (!ld->opts->draft) {
        ld->rc = so_err_set(ld->err, SO_EUNSUPPORTED,
                            "%s: needs another model's hidden states (" SO_TARGET_HIDDEN_TENSOR
                            "): it is a draft for that model; give it with -md",
                            so_checkpoint_path(m->ck));
        return;
    }
    if (t->dims[0] > MAX_TARGET_HIDDEN) {
        ld->rc = so_err_set(ld->err, SO_ELIMIT,
                            "%s: " SO_TARGET_HIDDEN_TENSOR
                            " takes hidden states of %lld numbers; at most %d are supported",
                            so_checkpoint_path(m->ck), (long long)t->dims[0], MAX_TARGET_HIDDEN);
        return;
    }
    m->d_target_hidden = (int)t->dims[0];
    matrix(ld, SO_TARGET_HIDDEN_TENSOR, -1, m->d_target_hidden, m->hp.d_model, &m->target_hidden.w);
}

/* The tensors outside the layers: embeddings, the last norm, the output matrix. */
static void load_ends(loader *ld) {
    so_model *m = ld->m;
    int64_t d = m->hp.d_model;
    size_t before = m->weight_bytes;
    bool shared = m->hp.tied && !m->vocab_subset;
    so_tensor embd = {0}, t;
    if (find_matrix(ld, "token_embd.weight", -1, d, m->hp.n_vocab, &embd, NULL))
        make_weight(ld, embd, NULL, true, shared ? MULTIPLIED : LOOKED_UP, &m->embed);
    m->output_bytes = m->weight_bytes - before; /* correct if shared; overwritten below if not */
    m->output_tensor = embd;                    /* the same */
    /* not converted: positions are only looked up, so a smaller matrix would save nothing */
    if (m->arch->learned_positions &&
        find_matrix(ld, "position_embd.weight", -1, d, m->hp.n_ctx_train, &t, NULL))
        make_weight(ld, t, NULL, false, LOOKED_UP, &m->pos_embed);
    if (m->arch->layer_norm)
        so_loader_vector(ld, "output_norm.bias", -1, d, &m->out_norm.bias);
    if (!m->arch->encoder) /* else t5.c */
        so_loader_vector(ld, "output_norm.weight", -1, d, &m->out_norm.weight);
    if (shared) {
        m->output.w = m->embed;
        return;
    }
    before = m->weight_bytes;
    load_output(ld, &embd);
    m->output_bytes = m->weight_bytes - before;
}

/* GGUF files of Llama 3 state a divisor for each rope frequency. */
static const float *load_rope_factors(loader *ld, float *buf) {
    const so_tensor *t = so_checkpoint_tensor(ld->m->ck, "rope_freqs.weight");
    int64_t n = ld->m->hp.rope_dim / 2;
    if (!t || ld->rc != 0)
        return NULL;
    so_map_add(ld->used, t->name, 1);
    check_shape(ld, t, &n, 1);
    if (ld->rc != 0)
        return NULL;
    so_dequantize_row(t->dtype, t->data, buf, n);
    check_finite(ld, t, buf, n);
    for (int64_t i = 0; i < n && ld->rc == 0; i++)
        if (!(buf[i] > 0))
            ld->rc = so_err_set(ld->err, SO_ERANGE,
                                "%s: rope_freqs.weight[%lld] is %g; more than 0 is expected",
                                so_checkpoint_path(ld->m->ck), (long long)i, (double)buf[i]);
    return buf;
}

static void load_rope(loader *ld) {
    so_model *m = ld->m;
    int n = m->hp.rope_dim / 2;
    if (n == 0 || ld->rc != 0)
        return;
    float *buf = SO_NEW_N(float, n);
    const float *factors = load_rope_factors(ld, buf);
    m->inv_freq = SO_NEW_N(float, n);
    so_rope_inv_freq(&m->hp, false, factors, m->inv_freq);
    if (m->hp.rope_base_local > 0) {
        m->inv_freq_local = SO_NEW_N(float, n);
        so_rope_inv_freq(&m->hp, true, NULL, m->inv_freq_local);
    }
    free(buf);
}

/* A tensor that was not loaded means that the file's model is not the one its metadata claims. */
static void check_leftovers(loader *ld) {
    const so_checkpoint *ck = ld->m->ck;
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck) && ld->rc == 0; i++) {
        so_str name = so_checkpoint_tensor_at(ck, i)->name;
        int64_t seen;
        if (so_map_get(ld->used, name, &seen) || so_names_ignored(name) ||
            (ld->m->arch->ignored && ld->m->arch->ignored(name)))
            continue;
        if (ld->m->hp.tied && (so_str_eq_c(name, "lm_head.weight") ||
                               so_str_eq_c(name, "language_model.lm_head.weight")))
            continue; /* a copy of the embedding */
        ld->rc = so_err_set(ld->err, SO_EUNSUPPORTED,
                            "%s: tensor %.*s is not part of architecture '%s'; the file holds a "
                            "variant that is not supported",
                            so_checkpoint_path(ck), SO_STR_ARG(name), ld->m->hp.arch_name);
    }
}

/* Whether there is memory for the backend's own copy of the weights, with a reserve for the cache.
 * If not, the model runs from the file's layout. */
static bool room_to_pack(const loader *ld) {
    const so_checkpoint *ck = ld->m->ck;
    size_t need = 64 << 20, available = so_mem_available();
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++) {
        const so_tensor *t = so_checkpoint_tensor_at(ck, i);
        if (!so_dtype_is_float(t->dtype) || ld->opts->quantize)
            need += t->n_bytes + t->n_bytes / 8;
    }
    if (need <= available)
        return true;
    so_log(SO_LOG_WARN,
           "%s: packing the weights needs %zu MB and %zu MB are available; using the file's own "
           "layout, with the same results but slower",
           so_checkpoint_path(ck), need >> 20, available >> 20);
    return false;
}

static bool has_fp8(const so_checkpoint *ck) {
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++)
        if (so_fp8_is(so_checkpoint_tensor_at(ck, i)))
            return true;
    return false;
}

/* The embedding and output matrices come first: they include the largest matrix, and while a matrix
 * is repacked both copies take memory. */
static void loader_run(loader *ld) {
    bool fp8 = has_fp8(ld->m->ck);
    if (fp8 && !ld->opts->quantize)
        so_log(SO_LOG_INFO, "%s: 8-bit floats are converted to Q8_0; --quantize names another type",
               so_checkpoint_path(ld->m->ck));
    if (ld->opts->quantize || fp8)
        ld->rc = so_pool_create(so_cpu_count(), &ld->pool, ld->err);
    ld->pack = !ld->opts->no_pack && room_to_pack(ld);
    load_ends(ld);
    load_target_hidden(ld);
    if (ld->rc == 0)
        load_layers(ld);
    load_rope(ld);
    check_leftovers(ld);
    upload_vectors(ld);
    if (ld->rc == 0 && ld->opts->progress)
        ld->opts->progress(ld->opts->user, 1);
}

/* Reads the vocabulary subset. Only a draft may have one: the tokens of a target are not verified
 * by any other model. */
static int read_vocab_subset(so_model *m, const so_model_opts *opts, so_err *err) {
    int n_vocab = m->hp.n_vocab;
    int rc = so_vocab_subset_read(so_checkpoint_gguf(m->ck), n_vocab, &m->vocab_subset,
                                  &m->logits_len, err);
    if (rc != 0 || !m->vocab_subset || opts->draft)
        return rc;
    return so_err_set(err, SO_EUNSUPPORTED,
                      "%s: has logits for only %d of its %d tokens (" SO_VOCAB_SUBSET_KEY
                      "): it is a draft for another model; give it with -md",
                      so_checkpoint_path(m->ck), m->logits_len, n_vocab);
}

int so_model_load(so_checkpoint *ck, so_backend *b, const so_model_opts *opts, so_model **out,
                  so_err *err) {
    static const so_model_opts none = {0};
    so_model *m = SO_NEW(so_model);
    m->ck = ck;
    m->backend = b;
    opts = opts ? opts : &none;
    int rc = so_hparams_read(ck, &m->hp, err);
    if (rc == 0)
        m->arch = so_arch_get(m->hp.arch);
    if (rc == 0)
        rc = read_vocab_subset(m, opts, err);
    if (rc == 0 && m->arch->encoder && !b->vt->encoder_ops)
        rc = so_err_set(err, SO_EUNSUPPORTED,
                        "%s: encoder-decoder models (%s) do not run on the device '%s' yet: use "
                        "--device cpu",
                        so_checkpoint_path(ck), m->hp.arch_name, b->vt->name);
    if (rc == 0) {
        loader ld = {.m = m, .opts = opts, .err = err};
        ld.used = so_map_create(so_checkpoint_n_tensors(ck));
        so_names_init(&ld.names, ck, &m->hp);
        loader_run(&ld);
        rc = ld.rc;
        so_map_free(ld.used);
        so_pool_free(ld.pool);
        free(ld.host);
        free(ld.fix);
    }
    if (rc != 0)
        so_model_free(m);
    else
        *out = m;
    return rc;
}

void so_model_free(so_model *m) {
    if (!m)
        return;
    so_backend *b = m->backend;
    for (int i = 0; i < m->n_weights; i++)
        b->vt->weight_free(b, m->weights[i]);
    if (m->consts)
        b->vt->buffer_free(b, m->consts);
    for (int i = 0; i < m->n_memory; i++)
        free(m->memory[i]);
    free(m->memory);
    free(m->weights);
    free(m->layers);
    so_t5_free(m->t5);
    free(m->vocab_subset);
    free(m->inv_freq);
    free(m->inv_freq_local);
    free(m);
}

const so_hparams *so_model_hparams(const so_model *m) { return &m->hp; }
so_backend *so_model_backend(const so_model *m) { return m->backend; }
const so_checkpoint *so_model_checkpoint(const so_model *m) { return m->ck; }
size_t so_model_weight_bytes(const so_model *m) { return m->weight_bytes; }
size_t so_model_source_bytes(const so_model *m) { return m->source_bytes; }
int64_t so_model_n_params(const so_model *m) { return m->n_params; }
int so_model_logits_len(const so_model *m) { return m->logits_len; }
const int32_t *so_model_vocab_subset(const so_model *m) { return m->vocab_subset; }

int so_model_d_target_hidden(const so_model *m) { return m->d_target_hidden; }
