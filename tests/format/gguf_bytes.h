/* Builds GGUF files byte by byte, also invalid ones, which so_gguf_writer refuses to write. */
#ifndef GGUF_BYTES_H
#define GGUF_BYTES_H

#include "base/str.h"
#include "format/gguf.h"

static inline void g_u32(so_buf *b, uint32_t v) { so_buf_append(b, &v, sizeof v); }
static inline void g_u64(so_buf *b, uint64_t v) { so_buf_append(b, &v, sizeof v); }

static inline void g_str(so_buf *b, const char *s) {
    g_u64(b, strlen(s));
    so_buf_append_c(b, s);
}

static inline void g_head(so_buf *b, uint32_t version, uint64_t n_tensors, uint64_t n_kv) {
    so_buf_append_c(b, "GGUF");
    g_u32(b, version);
    g_u64(b, n_tensors);
    g_u64(b, n_kv);
}

static inline void g_kv_u32(so_buf *b, const char *key, uint32_t v) {
    g_str(b, key);
    g_u32(b, SO_GGUF_U32);
    g_u32(b, v);
}

static inline void g_kv_u16(so_buf *b, const char *key, uint16_t v) {
    g_str(b, key);
    g_u32(b, SO_GGUF_U16);
    so_buf_append(b, &v, sizeof v);
}

static inline void g_kv_str(so_buf *b, const char *key, const char *v) {
    g_str(b, key);
    g_u32(b, SO_GGUF_STRING);
    g_str(b, v);
}

static inline void g_array(so_buf *b, const char *key, uint32_t elem, uint64_t n) {
    g_str(b, key);
    g_u32(b, SO_GGUF_ARRAY);
    g_u32(b, elem);
    g_u64(b, n);
}

static inline void g_tensor(so_buf *b, const char *name, uint32_t type, uint64_t d0, uint64_t d1,
                            uint64_t offset) {
    g_str(b, name);
    g_u32(b, 2);
    g_u64(b, d0);
    g_u64(b, d1);
    g_u32(b, type);
    g_u64(b, offset);
}

/* Zeros up to the next multiple of `align`, then n more. */
static inline void g_data(so_buf *b, size_t align, size_t n) {
    while (b->len % align != 0)
        so_buf_append_char(b, '\0');
    for (size_t i = 0; i < n; i++)
        so_buf_append_char(b, (char)i);
}

#endif
