/* A folder's tensors and metadata in GGUF's conventions; see convert.h and names.h.
 *
 * Owns the conversion of stored forms (the three flags of names.h) and the metadata keys, written
 * so that hparams_gguf.c reads back the same shape. Refuses models with a property that GGUF has no
 * key for. read_rows may be called from many threads: it only reads. */
#include "model/convert.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "format/quant.h"
#include "model/arch.h"
#include "model/fp8.h"
#include "model/impl.h"
#include "model/names.h"

typedef struct entry {
    const so_tensor *src; /* NULL: the rope factors */
    unsigned flags;
    so_fp8 fp8; /* if src is F8_E4M3 */
} entry;

typedef struct source {
    so_checkpoint *ck;
    so_hparams hp;
    const so_arch_info *arch;
    so_convert_tensor *tensors;
    entry *entries;
    size_t n, cap;
    float *rope_factors; /* [rope_dim/2], llama3 only */
    so_arena names;
} source;

/* Tensors. */

static void add(source *s, const char *name, const so_tensor *t, unsigned flags) {
    if (s->n == s->cap) {
        s->cap = SO_MAX(64, s->cap * 2);
        s->tensors = so_realloc(s->tensors, s->cap * sizeof *s->tensors);
        s->entries = so_realloc(s->entries, s->cap * sizeof *s->entries);
    }
    bool flip = (flags & SO_NAME_TRANSPOSED) != 0;
    s->entries[s->n] = (entry){.src = t, .flags = flags};
    s->tensors[s->n++] =
        (so_convert_tensor){.name = so_arena_strndup(&s->names, name, strlen(name)),
                            .dtype = t->dtype,
                            .n_dims = t->n_dims,
                            .dims = {t->dims[flip ? 1 : 0], t->dims[flip ? 0 : 1], 1, 1},
                            .data = flags ? NULL : t->data};
}

static int add_all(source *s, const so_names *names, int layer, so_err *err) {
    int rc = 0;
    const so_name_pair *table = layer >= 0 ? names->layer : names->global;
    int count = layer >= 0 ? names->n_layer : names->n_global;
    for (int i = 0; i < count && rc == 0; i++) {
        char file[SO_NAME_CAP], gguf[SO_NAME_CAP];
        const so_name_pair *pair = so_names_resolve(names, table[i].gguf, layer, file);
        const so_tensor *t = so_checkpoint_tensor(s->ck, file);
        unsigned flags = pair->flags;
        if (!t || (s->hp.tied && strcmp(pair->gguf, "output.weight") == 0))
            continue;
        if (!s->arch->permuted_gguf)
            flags &= ~(unsigned)SO_NAME_ROTATED;
        if (layer >= 0)
            snprintf(gguf, sizeof gguf, "blk.%d.%s", layer, pair->gguf);
        else
            snprintf(gguf, sizeof gguf, "%s", pair->gguf);
        add(s, gguf, t, flags);
        if (so_fp8_is(t))
            rc = so_fp8_open(s->ck, t, &s->entries[s->n - 1].fp8, err);
    }
    return rc;
}

/* The divisors of Llama 3's rope scaling. GGUF stores them as a tensor. */
static void add_rope_factors(source *s) {
    so_hparams plain = s->hp;
    int n = s->hp.rope_dim / 2;
    if (s->hp.rope_scaling != SO_ROPE_SCALING_LLAMA3)
        return;
    float *scaled = SO_NEW_N(float, n);
    s->rope_factors = SO_NEW_N(float, n);
    plain.rope_scaling = SO_ROPE_SCALING_NONE;
    so_rope_inv_freq(&plain, false, NULL, s->rope_factors);
    so_rope_inv_freq(&s->hp, false, NULL, scaled);
    for (int i = 0; i < n; i++)
        s->rope_factors[i] /= scaled[i];
    free(scaled);
    so_tensor t = {
        .dtype = SO_DTYPE_F32, .n_dims = 1, .dims = {n, 1, 1, 1}, .data = s->rope_factors};
    add(s, "rope_freqs.weight", &t, 0);
    s->entries[s->n - 1].src = NULL;
}

/* Rows. */

/* The folder's row that becomes row r of GGUF's q or k: rope pairs (i, i + half) become
 * neighbours. */
static int64_t unrotated(int64_t r, int head_dim) {
    int64_t head = r / head_dim, within = r % head_dim;
    return head * head_dim + within % 2 * (head_dim / 2) + within / 2;
}

static void read_elements(const so_tensor *t, int64_t first, int64_t n, float *dst) {
    const unsigned char *p = (const unsigned char *)t->data;
    p += so_dtype_row_bytes(t->dtype, 1) * (size_t)first;
    so_dequantize_row(t->dtype, p, dst, n);
}

static void read_row(const entry *e, int64_t r, float *dst) {
    int64_t cols = e->src->dims[0];
    if (so_fp8_is(e->src))
        so_fp8_row(&e->fp8, r, dst);
    else
        read_elements(e->src, r * cols, cols, dst);
}

static void rows_transposed(const so_tensor *t, int64_t first, int64_t n, float *dst) {
    int64_t cols = t->dims[1];
    float column[256];
    for (int64_t c = 0; c < cols; c++)
        for (int64_t at = 0; at < n; at += 256) {
            int64_t part = SO_MIN(n - at, 256);
            read_elements(t, c * t->dims[0] + first + at, part, column);
            for (int64_t r = 0; r < part; r++)
                dst[(at + r) * cols + c] = column[r];
        }
}

static int read_rows(void *user, size_t i, int64_t first, int64_t n, float *dst, so_err *err) {
    const source *s = user;
    const entry *e = &s->entries[i];
    int64_t cols = s->tensors[i].dims[0];
    (void)err;
    if (!e->src) {
        memcpy(dst, s->rope_factors, (size_t)cols * sizeof *dst);
    } else if (e->flags & SO_NAME_TRANSPOSED) {
        rows_transposed(e->src, first, n, dst);
    } else if (e->flags & SO_NAME_ROTATED && e->src->n_dims == 1) {
        for (int64_t at = 0; at < cols; at++)
            read_elements(e->src, unrotated(at, s->hp.head_dim), 1, dst + at);
    } else {
        for (int64_t r = first; r < first + n; r++)
            read_row(e, e->flags & SO_NAME_ROTATED ? unrotated(r, s->hp.head_dim) : r,
                     dst + (r - first) * cols);
    }
    for (int64_t k = 0; (e->flags & SO_NAME_ADD_ONE) && k < n * cols; k++)
        dst[k] += 1;
    return 0;
}

/* Metadata. */

typedef struct writer {
    so_gguf_writer *w;
    const so_arch_info *arch;
} writer;

static const char *key_of(const writer *w, const char *key, char buf[96]) {
    snprintf(buf, 96, "%s.%s", w->arch->names[0], key);
    return buf;
}
static void put_int(const writer *w, const char *key, int v) {
    char buf[96];
    so_gguf_writer_u32(w->w, key_of(w, key, buf), (uint32_t)v);
}
static void put_num(const writer *w, const char *key, float v) {
    char buf[96];
    so_gguf_writer_f32(w->w, key_of(w, key, buf), v);
}
static void put_str(const writer *w, const char *key, const char *v) {
    char buf[96];
    so_gguf_writer_str(w->w, key_of(w, key, buf), so_str_c(v));
}

static void put_shape(const writer *w, const so_hparams *hp) {
    put_int(w, "block_count", hp->n_layers);
    put_int(w, "context_length", hp->n_ctx_train);
    put_int(w, "embedding_length", hp->d_model);
    put_int(w, "feed_forward_length", hp->d_ff);
    put_int(w, "attention.head_count", hp->n_heads);
    put_int(w, "attention.head_count_kv", hp->n_heads_kv);
    put_int(w, "attention.key_length", hp->head_dim);
    put_int(w, "attention.value_length", hp->head_dim);
    put_int(w, "vocab_size", hp->n_vocab);
    put_num(w, so_arch_eps_key(w->arch), hp->norm_eps);
    if (hp->attn_scale != (float)(1 / sqrt((double)hp->head_dim)))
        put_num(w, "attention.scale", hp->attn_scale);
    if (hp->window > 0)
        put_int(w, "attention.sliding_window", hp->window);
    if (hp->window > 0 && w->arch->window == SO_WINDOW_PATTERN)
        put_int(w, "attention.sliding_window_pattern", hp->window_pattern);
}

static void put_rope(const writer *w, const so_hparams *hp) {
    if (hp->rope_dim == 0)
        return;
    put_int(w, "rope.dimension_count", hp->rope_dim);
    put_num(w, "rope.freq_base", hp->rope_base);
    if (hp->rope_base_local > 0)
        put_num(w, "rope.freq_base_swa", hp->rope_base_local);
    if (hp->rope_scaling != SO_ROPE_SCALING_LINEAR && hp->rope_scaling != SO_ROPE_SCALING_YARN)
        return; /* llama3 scaling is stored as a tensor */
    put_num(w, "rope.scaling.factor", hp->rope_factor);
    put_str(w, "rope.scaling.type", hp->rope_scaling == SO_ROPE_SCALING_YARN ? "yarn" : "linear");
    if (hp->rope_scaling != SO_ROPE_SCALING_YARN)
        return;
    double derived = 1 + 0.1 * log(SO_MAX(1.0, (double)hp->rope_factor));
    put_int(w, "rope.scaling.original_context_length", hp->rope_ctx_orig);
    put_num(w, "rope.scaling.attn_factor", (float)((double)hp->rope_attn_factor / derived));
    put_num(w, "rope.scaling.yarn_beta_fast", hp->rope_beta_fast);
    put_num(w, "rope.scaling.yarn_beta_slow", hp->rope_beta_slow);
}

static void put_json(so_gguf_writer *w, const char *key, const json_t *j) {
    char *text = j ? json_dumps(j, JSON_COMPACT) : NULL;
    if (text)
        so_gguf_writer_str(w, key, so_str_c(text));
    free(text);
}

static void put_tokenizer(so_gguf_writer *w, const so_checkpoint *ck) {
    const json_t *stated = so_checkpoint_tokenizer_config(ck);
    json_t *config = stated ? json_copy((json_t *)(uintptr_t)stated) : json_object();
    so_str template = so_checkpoint_template_file(ck);
    if (template.len > 0) /* a template file overrides the config */
        json_object_set_new(config, "chat_template", json_stringn(template.ptr, template.len));
    put_json(w, "tokenizer.huggingface.json", so_checkpoint_tokenizer(ck));
    put_json(w, "tokenizer.huggingface.config.json", config);
    put_json(w, "tokenizer.huggingface.generation_config.json",
             so_checkpoint_generation_config(ck));
    json_decref(config);
}

static int write_metadata(void *user, so_gguf_writer *gw, so_err *err) {
    const source *s = user;
    writer w = {gw, s->arch};
    (void)err;
    so_gguf_writer_str(gw, "general.architecture", so_str_c(s->arch->names[0]));
    put_shape(&w, &s->hp);
    put_rope(&w, &s->hp);
    put_tokenizer(gw, s->ck);
    return 0;
}

/* Opening. */

/* Loads the model once: checks every name and shape with the code that runs it. */
static int check_loads(so_checkpoint *ck, so_err *err) {
    so_backend *b;
    so_model *m = NULL;
    int rc =
        so_backend_open(NULL, &(so_backend_opts){.n_threads = 1, .level = SO_CPU_AUTO}, &b, err);
    if (rc != 0)
        return rc;
    rc = so_model_load(ck, b, NULL, &m, err);
    so_model_free(m);
    so_backend_free(b);
    return rc;
}

static int check_expressible(const so_checkpoint *ck, const so_hparams *hp, so_err *err) {
    if (so_arch_get(hp->arch)->encoder)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "%s: folders of architecture '%s' are not converted to GGUF yet: run the "
                          "folder itself, with --quantize to make it smaller",
                          so_checkpoint_path(ck), hp->arch_name);
    if (so_arch_get(hp->arch)->window == SO_WINDOW_SWITCHED && hp->window > 0)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "%s: GGUF has no key for the sliding window of %d of architecture '%s'",
                          so_checkpoint_path(ck), hp->window, hp->arch_name);
    return 0;
}

int so_model_convert_source(so_checkpoint *ck, so_convert_source *out, so_err *err) {
    so_hparams hp;
    int rc = check_loads(ck, err);
    if (rc == 0)
        rc = so_hparams_read(ck, &hp, err);
    if (rc == 0)
        rc = check_expressible(ck, &hp, err);
    if (rc != 0)
        return rc;
    source *s = SO_NEW(source);
    so_names names;
    s->ck = ck;
    s->hp = hp;
    s->arch = so_arch_get(hp.arch);
    so_names_init(&names, ck, &hp);
    rc = add_all(s, &names, -1, err);
    add_rope_factors(s);
    for (int l = 0; l < hp.n_layers && rc == 0; l++)
        rc = add_all(s, &names, l, err);
    *out = (so_convert_source){.path = so_checkpoint_path(ck),
                               .tensors = s->tensors,
                               .n_tensors = s->n,
                               .metadata = write_metadata,
                               .rows = read_rows,
                               .user = s};
    if (rc != 0)
        so_model_convert_source_free(out);
    return rc;
}

void so_model_convert_source_free(so_convert_source *out) {
    source *s = out->user;
    if (!s)
        return;
    free(s->tensors);
    free(s->entries);
    free(s->rope_factors);
    so_arena_free(&s->names);
    free(s);
    *out = (so_convert_source){0};
}
