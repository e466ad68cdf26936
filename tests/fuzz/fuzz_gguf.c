/* GGUF from arbitrary bytes: whatever opens must be safe to read in full, as heads too. */
#include <stdlib.h>

#include "base/mem.h"
#include "format/describe.h"
#include "format/quant.h"
#include "model/heads.h"
#include "model/vocab_subset.h"

static volatile double sink;

static void read_kv(const so_gguf_kv *kv) {
    double f;
    int64_t v;
    for (uint64_t i = 0; i < kv->n && i < 1000; i++) {
        if (so_gguf_elem_f64(kv, i, &f))
            sink = f;
        if (so_gguf_elem_i64(kv, i, &v))
            sink = (double)v;
        if (kv->strings)
            for (size_t k = 0; k < kv->strings[i].len; k++)
                sink = kv->strings[i].ptr[k];
    }
}

static void describe(const so_gguf_kv *kv) {
    so_buf b = {0};
    so_describe_text(kv->key, 80, &b);
    so_describe_type(kv, &b);
    so_describe_value(kv, 64, &b);
    so_buf_free(&b);
}

static void read_tensor(const so_tensor *t) {
    const so_dtype_info *info = so_dtype_get((int)t->dtype);
    float block[256];
    for (size_t off = 0; off < t->n_bytes; off += (size_t)info->block_bytes) {
        so_dequantize_row(t->dtype, (const char *)t->data + off, block, info->block_len);
        sink = (double)block[0];
    }
}

static void read_heads(const so_gguf *g) {
    so_heads_info info;
    so_err err;
    int32_t *ids = NULL;
    int n;
    if (so_heads_read_gguf(g, &info, &err) == SO_OK)
        SO_ASSERT(info.n_heads >= 1 && info.n_heads <= SO_HEADS_MAX &&
                  info.n_ranks <= SO_HEADS_MAX_RANKS);
    if (so_vocab_subset_read(g, 40, &ids, &n, &err) == SO_OK && ids)
        sink = ids[n - 1];
    free(ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    so_gguf *g;
    so_err err;
    if (so_gguf_open_memory(data, len, "fuzz", &g, &err) != SO_OK)
        return 0;
    for (size_t i = 0; i < so_gguf_n_kv(g); i++) {
        read_kv(so_gguf_kv_at(g, i));
        describe(so_gguf_kv_at(g, i));
    }
    for (size_t i = 0; i < so_gguf_n_tensors(g); i++)
        read_tensor(so_gguf_tensor_at(g, i));
    read_heads(g);
    so_gguf_close(g);
    return 0;
}
