/* Writes heads; see so_heads_file.h. */
#include "so_heads_file.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "so_test.h"

enum { MAX_TENSORS = SO_HEADS_MAX * (2 * SO_HEADS_MAX_LAYERS + 1) + 2 };

typedef struct tensor {
    char name[48], published[48];
    int64_t k, m; /* m 0: a vector */
    const float *data;
} tensor;

typedef struct list {
    tensor at[MAX_TENSORS];
    int n;
} list;

static void put(list *l, const char *name, const char *published, int64_t k, int64_t m) {
    tensor *t = &l->at[l->n++];
    *t = (tensor){.k = k, .m = m};
    snprintf(t->name, sizeof t->name, "%s", name);
    snprintf(t->published, sizeof t->published, "%s", published);
}

static void list_medusa(const so_heads_file *f, int head, list *l) {
    char a[48], b[48];
    for (int j = 0; j < f->n_layers; j++) {
        snprintf(a, sizeof a, "head.%d.blk.%d.weight", head, j);
        snprintf(b, sizeof b, "%d.%d.linear.weight", head, j);
        put(l, a, b, f->d, f->d);
        snprintf(a, sizeof a, "head.%d.blk.%d.bias", head, j);
        snprintf(b, sizeof b, "%d.%d.linear.bias", head, j);
        put(l, a, b, f->d, 0);
    }
}

static void list_blockwise(const so_heads_file *f, int head, list *l) {
    char a[48];
    snprintf(a, sizeof a, "head.%d.up.weight", head);
    put(l, a, "", f->d, f->d_hidden);
    snprintf(a, sizeof a, "head.%d.up.bias", head);
    put(l, a, "", f->d_hidden, 0);
    snprintf(a, sizeof a, "head.%d.down.weight", head);
    put(l, a, "", f->d_hidden, f->d);
}

static void list_all(const so_heads_file *f, list *l) {
    char a[48], b[48];
    l->n = 0;
    if (strcmp(f->kind, "lookahead") == 0) {
        put(l, "look_ahead", "", f->d, f->n_heads);
        l->at[0].data = f->embeddings;
    }
    for (int i = 0; i < f->n_heads; i++) {
        if (strcmp(f->kind, "medusa") == 0)
            list_medusa(f, i, l);
        if (strcmp(f->kind, "blockwise") == 0)
            list_blockwise(f, i, l);
        snprintf(a, sizeof a, "head.%d.output.weight", i);
        snprintf(b, sizeof b, "%d.%d.weight", i, f->n_layers);
        if (f->n_output > 0)
            put(l, a, b, f->d, f->n_output);
    }
    for (int i = 0; i < l->n; i++) {
        if (f->widen && strcmp(l->at[i].name, f->widen) == 0)
            l->at[i].k++;
        if (f->drop && strcmp(l->at[i].name, f->drop) == 0)
            l->at[i--] = l->at[--l->n];
    }
    if (f->extra)
        put(l, f->extra, f->extra, 1, 0);
}

/* The elements of a tensor; the caller frees them. */
static float *fill(const so_heads_file *f, const tensor *t, int64_t *count) {
    uint64_t name = so_hash_bytes(t->name, strlen(t->name));
    so_rng_key key = {.seed = f->seed ^ name, .purpose = SO_RNG_TEST};
    bool zero = f->zero && !strstr(t->name, "output");
    *count = t->k * SO_MAX(t->m, (int64_t)1);
    float *x = SO_NEW_N(float, *count);
    for (int64_t i = 0; i < *count; i++)
        x[i] = t->data ? t->data[i]
               : zero
                   ? 0
                   : (float)((2 * so_rng_uniform(&key, (uint32_t)i) - 1) / sqrt((double)t->k / 3));
    if (f->sicken && strcmp(t->name, f->sicken) == 0)
        x[*count - 1] = INFINITY;
    return x;
}

static void add_registration(const so_draft_target *k, so_gguf_writer *w) {
    so_gguf_writer_str(w, "sooth.draft.target.name", so_str_c(k->name));
    so_gguf_writer_str(w, "sooth.draft.target.vocab_sha256", so_str_c(k->vocab));
    so_gguf_writer_u32(w, "sooth.draft.target.embedding_length", (uint32_t)k->d_model);
    so_gguf_writer_u32(w, "sooth.draft.target.block_count", (uint32_t)k->n_layers);
}

static void metadata(const so_heads_file *f, so_gguf_writer *w) {
    const struct {
        const char *key;
        int value;
    } counts[] = {{"sooth.heads.count", f->n_heads},
                  {"sooth.heads.layers", f->n_layers},
                  {"sooth.heads.hidden", f->d_hidden},
                  {"sooth.heads.ranks", f->n_ranks}};
    so_gguf_writer_str(w, "general.architecture", SO_STR(SO_HEADS_ARCH));
    if (!f->no_key || strcmp(f->no_key, "sooth.heads.kind") != 0)
        so_gguf_writer_str(w, "sooth.heads.kind", so_str_c(f->kind));
    for (size_t i = 0; i < SO_LEN(counts); i++)
        if (!f->no_key || strcmp(f->no_key, counts[i].key) != 0)
            so_gguf_writer_u32(w, counts[i].key, (uint32_t)counts[i].value);
    if (f->accuracy)
        so_gguf_writer_f32s(w, "sooth.heads.accuracy", f->accuracy,
                            (size_t)(f->n_accuracy ? f->n_accuracy : f->n_heads * f->n_ranks));
    if (f->mask)
        so_gguf_writer_copy_kv(w, &(so_gguf_kv){.key = SO_STR("sooth.draft.output_mask"),
                                                .type = SO_GGUF_ARRAY,
                                                .elem = SO_GGUF_U8,
                                                .n = (uint64_t)f->n_mask,
                                                .data = f->mask,
                                                .n_bytes = (size_t)f->n_mask});
    if (f->registered)
        add_registration(f->registered, w);
}

void so_heads_write(const char *path, const so_heads_file *f) {
    list l;
    so_err err = {0};
    so_gguf_writer *w = so_gguf_writer_create();
    list_all(f, &l);
    metadata(f, w);
    for (int i = 0; i < l.n; i++)
        so_gguf_writer_tensor(w, l.at[i].name, SO_DTYPE_F32, l.at[i].m ? 2 : 1,
                              (int64_t[]){l.at[i].k, SO_MAX(l.at[i].m, (int64_t)1)});
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, &err), err);
    for (int i = 0; i < l.n; i++) {
        int64_t count;
        float *x = fill(f, &l.at[i], &count);
        SO_OK_OR_FAIL(so_gguf_writer_data(w, x, (size_t)count * sizeof *x, &err), err);
        free(x);
    }
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, &err), err);
    so_gguf_writer_free(w);
}

static FILE *create(const char *dir, const char *name) {
    char *path = so_path_join(dir, name);
    FILE *out = fopen(path, "wb");
    assert_non_null(out);
    free(path);
    return out;
}

void so_heads_write_folder(const char *dir, const so_heads_file *f) {
    list l;
    so_buf head = {0};
    size_t at = 0;
    list_all(f, &l);
    FILE *config = create(dir, "config.json"), *out = create(dir, "model.safetensors");
    fprintf(config, "{\"medusa_num_heads\": %d, \"medusa_num_layers\": %d}", f->n_heads,
            f->n_layers);
    fclose(config);
    for (int i = 0; i < l.n; i++) {
        const tensor *t = &l.at[i];
        size_t n_bytes = (size_t)(t->k * SO_MAX(t->m, (int64_t)1)) * sizeof(float);
        so_buf_printf(&head, "%s\"%s\": {\"dtype\": \"F32\", \"shape\": [", i ? ", " : "{",
                      t->published);
        if (t->m)
            so_buf_printf(&head, "%lld, ", (long long)t->m);
        so_buf_printf(&head, "%lld], \"data_offsets\": [%zu, %zu]}", (long long)t->k, at,
                      at + n_bytes);
        at += n_bytes;
    }
    so_buf_append_c(&head, "}");
    uint64_t len = head.len;
    fwrite(&len, sizeof len, 1, out);
    fwrite(head.data, 1, head.len, out);
    for (int i = 0; i < l.n; i++) {
        int64_t count;
        float *x = fill(f, &l.at[i], &count);
        fwrite(x, sizeof *x, (size_t)count, out);
        free(x);
    }
    fclose(out);
    so_buf_free(&head);
}
