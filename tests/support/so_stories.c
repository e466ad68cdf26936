/* Reads llama2.c's legacy layout: seven int32 (dim, hidden, layers, heads, kv heads, vocabulary,
 * context), then float32 matrices, all layers of one kind after the other; the tokenizer beside it
 * is a maximum length, then (score, length, bytes) per token. Rotary pairs are neighbours, as in
 * GGUF. */
#include "so_stories.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "format/gguf.h"
#include "so_test.h"

typedef struct stories {
    int32_t dim, hidden, layers, heads, heads_kv, vocab, ctx;
} stories;

/* One kind of tensor: `count` layers of it lie together; 0: outside the layers. */
typedef struct kind {
    const char *name;
    int64_t cols, rows; /* rows 0: a vector */
    int count;
} kind;

enum { N_KINDS = 11 };

static void list_kinds(const stories *s, kind out[N_KINDS]) {
    int64_t d = s->dim, kv = d / s->heads * s->heads_kv, ff = s->hidden;
    const kind list[N_KINDS] = {
        {"token_embd", d, s->vocab, 0}, {"attn_norm", d, 0, s->layers},
        {"attn_q", d, d, s->layers},    {"attn_k", d, kv, s->layers},
        {"attn_v", d, kv, s->layers},   {"attn_output", d, d, s->layers},
        {"ffn_norm", d, 0, s->layers},  {"ffn_gate", d, ff, s->layers},
        {"ffn_down", ff, d, s->layers}, {"ffn_up", d, ff, s->layers},
        {"output_norm", d, 0, 0},
    };
    memcpy(out, list, sizeof list);
}

static void metadata(so_gguf_writer *w, const stories *s) {
    so_gguf_writer_str(w, "general.architecture", SO_STR("llama"));
    so_gguf_writer_str(w, "general.name", SO_STR("stories260K"));
    so_gguf_writer_u32(w, "llama.block_count", (uint32_t)s->layers);
    so_gguf_writer_u32(w, "llama.context_length", (uint32_t)s->ctx);
    so_gguf_writer_u32(w, "llama.embedding_length", (uint32_t)s->dim);
    so_gguf_writer_u32(w, "llama.feed_forward_length", (uint32_t)s->hidden);
    so_gguf_writer_u32(w, "llama.attention.head_count", (uint32_t)s->heads);
    so_gguf_writer_u32(w, "llama.attention.head_count_kv", (uint32_t)s->heads_kv);
    so_gguf_writer_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
}

/* Spaces are ▁ in GGUF; <0x0A> and the like are bytes; 0, 1, 2 are unknown, begin and end. */
static void tokenizer(so_gguf_writer *w, const so_map_file *f, int n) {
    static const char space[] = "\xE2\x96\x81";
    so_str *pieces = SO_NEW_N(so_str, n);
    so_buf *text = SO_NEW_N(so_buf, n);
    float *scores = SO_NEW_N(float, n);
    int32_t *types = SO_NEW_N(int32_t, n);
    size_t at = 4;
    for (int i = 0; i < n; i++) {
        int32_t len;
        assert_true(at + 8 <= f->len);
        memcpy(&scores[i], f->data + at, 4);
        memcpy(&len, f->data + at + 4, 4);
        at += 8;
        assert_true(len >= 0 && at + (size_t)len <= f->len);
        const char *bytes = (const char *)f->data + at;
        for (int k = 0; k < len; k++)
            so_buf_append_c(&text[i], bytes[k] == ' ' ? space : (char[]){bytes[k], 0});
        at += (size_t)len;
        pieces[i] = so_buf_str(&text[i]);
        types[i] = i == 0 ? 2 : i < 3 ? 3 : len == 6 && memcmp(bytes, "<0x", 3) == 0 ? 6 : 1;
    }
    const so_str special[] = {SO_STR("<unk>"), SO_STR("<s>"), SO_STR("</s>")};
    memcpy(pieces, special, sizeof special);
    so_gguf_writer_str(w, "tokenizer.ggml.model", SO_STR("llama"));
    so_gguf_writer_strs(w, "tokenizer.ggml.tokens", pieces, (size_t)n);
    so_gguf_writer_f32s(w, "tokenizer.ggml.scores", scores, (size_t)n);
    so_gguf_writer_i32s(w, "tokenizer.ggml.token_type", types, (size_t)n);
    so_gguf_writer_u32(w, "tokenizer.ggml.bos_token_id", 1);
    so_gguf_writer_u32(w, "tokenizer.ggml.eos_token_id", 2);
    so_gguf_writer_bool(w, "tokenizer.ggml.add_bos_token", true);
    for (int i = 0; i < n; i++)
        so_buf_free(&text[i]);
    free(text);
    free(pieces);
    free(scores);
    free(types);
}

static void tensors(so_gguf_writer *w, const kind kinds[N_KINDS]) {
    for (int k = 0; k < N_KINDS; k++)
        for (int l = 0; l < SO_MAX(kinds[k].count, 1); l++) {
            char name[64];
            if (kinds[k].count)
                snprintf(name, sizeof name, "blk.%d.%s.weight", l, kinds[k].name);
            else
                snprintf(name, sizeof name, "%s.weight", kinds[k].name);
            so_gguf_writer_tensor(w, name, SO_DTYPE_F32, kinds[k].rows ? 2 : 1,
                                  (int64_t[]){kinds[k].cols, kinds[k].rows});
        }
}

char *so_stories_write(const char *dir) {
    so_err err = {0};
    so_map_file model, tok;
    stories s;
    kind kinds[N_KINDS];
    const char *src = so_test_shared("stories260K/stories260K.bin");
    if (!src)
        return NULL;
    SO_OK_OR_FAIL(so_file_map(src, &model, &err), err);
    SO_OK_OR_FAIL(so_file_map(so_test_shared("stories260K/tok512.bin"), &tok, &err), err);
    memcpy(&s, model.data, sizeof s);
    assert_true(s.vocab > 0); /* negative: an output matrix of its own, which this file has not */
    list_kinds(&s, kinds);
    char *path = so_path_join(dir, "stories260K.gguf");
    so_gguf_writer *w = so_gguf_writer_create();
    metadata(w, &s);
    tokenizer(w, &tok, s.vocab);
    tensors(w, kinds);
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, &err), err);
    size_t at = sizeof s;
    for (int k = 0; k < N_KINDS; k++)
        for (int l = 0; l < SO_MAX(kinds[k].count, 1); l++) {
            size_t n = (size_t)(kinds[k].cols * SO_MAX(kinds[k].rows, 1)) * sizeof(float);
            assert_true(at + n <= model.len);
            SO_OK_OR_FAIL(so_gguf_writer_data(w, model.data + at, n, &err), err);
            at += n;
        }
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, &err), err);
    so_gguf_writer_free(w);
    so_file_unmap(&model);
    so_file_unmap(&tok);
    return path;
}
