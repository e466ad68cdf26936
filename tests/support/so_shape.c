/* Writes tiny random models; see so_shape.h. Weights are uniform with deviation 1.4/sqrt(inputs),
 * norms 1 ± 0.3, so that logits spread and no two rows look alike. */
#include "so_shape.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/gguf.h"
#include "so_test.h"

enum { TENSORS_PER_LAYER = 9 };

typedef struct tensor {
    char name[64];
    int64_t dims[2];
    int n_dims;
} tensor;

static int list_tensors(const so_shape *t, tensor *out) {
    int n = 0;
    int64_t d = t->d_model, q = (int64_t)t->n_heads * t->head_dim;
    int64_t kv = (int64_t)t->n_heads_kv * t->head_dim, ff = t->d_ff;
    out[n++] = (tensor){"token_embd.weight", {d, t->n_vocab}, 2};
    out[n++] = (tensor){"output_norm.weight", {d, 1}, 1};
    out[n++] = (tensor){"output.weight", {d, t->n_vocab}, 2};
    for (int l = 0; l < t->n_layers; l++) {
        const struct {
            const char *name;
            int64_t k, m;
        } layer[TENSORS_PER_LAYER] = {
            {"attn_norm", d, 0}, {"attn_q", d, q},      {"attn_k", d, kv},
            {"attn_v", d, kv},   {"attn_output", q, d}, {"ffn_norm", d, 0},
            {"ffn_gate", d, ff}, {"ffn_up", d, ff},     {"ffn_down", ff, d}};
        for (int i = 0; i < TENSORS_PER_LAYER; i++, n++) {
            snprintf(out[n].name, sizeof out[n].name, "blk.%d.%s.weight", l, layer[i].name);
            out[n].dims[0] = layer[i].k;
            out[n].dims[1] = layer[i].m ? layer[i].m : 1;
            out[n].n_dims = layer[i].m ? 2 : 1;
        }
    }
    if (t->d_state > 0)
        out[n++] = (tensor){"target_state.weight", {t->d_state, d}, 2};
    return n;
}

/* Of a random tensor what an echo needs: x is the state, and nothing is added to it. */
static void fill_echo(const tensor *x, float *data, int64_t count) {
    bool state = strcmp(x->name, "target_state.weight") == 0;
    bool zero = strstr(x->name, "attn_output") || strstr(x->name, "ffn_down") ||
                strcmp(x->name, "token_embd.weight") == 0;
    for (int64_t i = 0; i < count; i++)
        if (state || zero || x->n_dims == 1)
            data[i] = state ? (float)(i / x->dims[0] == i % x->dims[0]) : zero ? 0 : 1;
}

static void fill(const so_shape *t, const tensor *x, uint32_t index, float *data, int64_t count) {
    so_rng_key key = {.seed = t->seed, .choice = index, .purpose = SO_RNG_TEST};
    double width = 1.4 * sqrt(3.0 / (double)x->dims[0]);
    for (int64_t i = 0; i < count; i += 4) {
        uint32_t words[4];
        so_rng_block(&key, (uint32_t)(i / 4), words);
        for (int64_t k = i; k < SO_MIN(i + 4, count); k++) {
            double u = ((double)words[k - i] + 0.5) / 0x1p31 - 1; /* −1 … 1 */
            data[k] = (float)(x->n_dims == 1 ? 1 + 0.3 * u
                              : index == 0   ? u * sqrt(3.0)
                                             : u * width);
        }
    }
    if (t->echo)
        fill_echo(x, data, count);
    if (index == 0 && t->nan_token > 0)
        for (int64_t k = 0; k < x->dims[0]; k++)
            data[t->nan_token * x->dims[0] + k] = NAN;
}

static void metadata(const so_shape *t, so_gguf_writer *w) {
    so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
    so_gguf_writer_u32(w, "llama.block_count", (uint32_t)t->n_layers);
    so_gguf_writer_u32(w, "llama.context_length", (uint32_t)t->n_ctx);
    so_gguf_writer_u32(w, "llama.embedding_length", (uint32_t)t->d_model);
    so_gguf_writer_u32(w, "llama.feed_forward_length", (uint32_t)t->d_ff);
    so_gguf_writer_u32(w, "llama.attention.head_count", (uint32_t)t->n_heads);
    so_gguf_writer_u32(w, "llama.attention.head_count_kv", (uint32_t)t->n_heads_kv);
    so_gguf_writer_u32(w, "llama.attention.key_length", (uint32_t)t->head_dim);
    so_gguf_writer_u32(w, "llama.attention.value_length", (uint32_t)t->head_dim);
    so_gguf_writer_u32(w, "llama.vocab_size", (uint32_t)t->n_vocab);
    so_gguf_writer_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    if (t->window)
        so_gguf_writer_u32(w, "llama.attention.sliding_window", (uint32_t)t->window);
}

static void add_vocab_mask(const so_shape *t, so_gguf_writer *w) {
    size_t size = t->vocab_mask_type == SO_GGUF_U8 ? 1 : 4;
    so_gguf_writer_copy_kv(w, &(so_gguf_kv){.key = SO_STR("sooth.draft.output_mask"),
                                            .type = SO_GGUF_ARRAY,
                                            .elem = t->vocab_mask_type,
                                            .n = (uint64_t)t->n_vocab_mask,
                                            .data = t->vocab_mask,
                                            .n_bytes = size * (size_t)t->n_vocab_mask});
}

/* The spec's harm; returns the new count. */
static int harm(const so_shape *t, tensor *list, int n) {
    int kept = 0;
    for (int i = 0; i < n; i++) {
        if (t->drop && strcmp(list[i].name, t->drop) == 0)
            continue;
        if (t->shorten && strcmp(list[i].name, t->shorten) == 0)
            list[i].dims[0]--;
        list[kept++] = list[i];
    }
    if (t->extra) {
        list[kept] = (tensor){.dims = {1, 1}, .n_dims = 1};
        snprintf(list[kept++].name, sizeof list[0].name, "%s", t->extra);
    }
    return kept;
}

char *so_shape_write(const char *dir, const so_shape *t) {
    so_err err = {0};
    tensor *list = SO_NEW_N(tensor, 5 + TENSORS_PER_LAYER * t->n_layers);
    int n = harm(t, list, list_tensors(t, list));
    char *path = so_path_join(dir, "shape.gguf");
    so_gguf_writer *w = so_gguf_writer_create();
    metadata(t, w);
    if (t->vocab_mask)
        add_vocab_mask(t, w);
    for (int i = 0; i < n; i++)
        so_gguf_writer_tensor(w, list[i].name, SO_DTYPE_F32, list[i].n_dims, list[i].dims);
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, &err), err);
    for (int i = 0; i < n; i++) {
        int64_t count = list[i].dims[0] * list[i].dims[1];
        float *data = SO_NEW_N(float, count);
        fill(t, &list[i], (uint32_t)i, data, count);
        if (t->sicken && strcmp(list[i].name, t->sicken) == 0)
            data[count - 1] = INFINITY;
        SO_OK_OR_FAIL(so_gguf_writer_data(w, data, (size_t)count * sizeof *data, &err), err);
        free(data);
    }
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, &err), err);
    so_gguf_writer_free(w);
    free(list);
    return path;
}

void so_shape_open(so_rig *r, const so_shape *t, const so_rig_opts *o) {
    char *dir = so_test_tmp(), *path = so_shape_write(dir, t);
    so_rig_open(r, path, o);
    free(path);
    so_test_tmp_free(dir);
}

void so_shape_tokens(const so_shape *t, uint64_t seed, int32_t *out, int n) {
    so_rng_key key = {.seed = seed, .purpose = SO_RNG_TEST};
    for (int i = 0; i < n; i++) {
        out[i] = (int32_t)(so_rng_uniform(&key, (uint32_t)i) * t->n_vocab);
        if (t->nan_token > 0 && out[i] == t->nan_token)
            out[i]--;
    }
}
