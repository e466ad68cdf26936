/* Lookups in an open GGUF file and conversions of its metadata. so_gguf_open has checked that every
 * value lies within the file. Elements may be unaligned, so each is copied out. Any thread. */
#include <inttypes.h>

#include "format/gguf_impl.h"

const char *so_gguf_path(const so_gguf *g) { return g->path; }
uint32_t so_gguf_version(const so_gguf *g) { return g->version; }
size_t so_gguf_file_bytes(const so_gguf *g) { return g->file_bytes; }
size_t so_gguf_n_kv(const so_gguf *g) { return g->n_kv; }
size_t so_gguf_n_tensors(const so_gguf *g) { return g->n_tensors; }

const so_gguf_kv *so_gguf_kv_at(const so_gguf *g, size_t i) {
    SO_ASSERT_OP(i, <, g->n_kv);
    return &g->kv[i];
}

const so_tensor *so_gguf_tensor_at(const so_gguf *g, size_t i) {
    SO_ASSERT_OP(i, <, g->n_tensors);
    return &g->tensors[i];
}

const so_gguf_kv *so_gguf_find(const so_gguf *g, const char *key) {
    int64_t i;
    return so_map_get(g->kv_index, so_str_c(key), &i) ? &g->kv[i] : NULL;
}

const so_tensor *so_gguf_tensor(const so_gguf *g, const char *name) {
    int64_t i;
    return so_map_get(g->tensor_index, so_str_c(name), &i) ? &g->tensors[i] : NULL;
}

#define READ(T, p, i) \
    T v;              \
    memcpy(&v, (p) + (i) * sizeof v, sizeof v)

bool so_gguf_elem_i64(const so_gguf_kv *kv, uint64_t i, int64_t *out) {
#define CASE(tag, T)          \
    case tag: {               \
        READ(T, kv->data, i); \
        *out = (int64_t)v;    \
        return true;          \
    }
    if (i >= kv->n)
        return false;
    switch (kv->elem) {
        CASE(SO_GGUF_U8, uint8_t)
        CASE(SO_GGUF_BOOL, uint8_t)
        CASE(SO_GGUF_I8, int8_t)
        CASE(SO_GGUF_U16, uint16_t)
        CASE(SO_GGUF_I16, int16_t)
        CASE(SO_GGUF_U32, uint32_t)
        CASE(SO_GGUF_I32, int32_t)
        CASE(SO_GGUF_I64, int64_t)
    case SO_GGUF_U64: {
        READ(uint64_t, kv->data, i);
        if (v > INT64_MAX)
            return false;
        *out = (int64_t)v;
        return true;
    }
    default:
        return false;
    }
#undef CASE
}

bool so_gguf_elem_f64(const so_gguf_kv *kv, uint64_t i, double *out) {
    if (i >= kv->n)
        return false;
    if (kv->elem == SO_GGUF_F32) {
        READ(float, kv->data, i);
        *out = (double)v;
        return true;
    }
    if (kv->elem == SO_GGUF_F64) {
        READ(double, kv->data, i);
        *out = v;
        return true;
    }
    if (kv->elem == SO_GGUF_U64) {
        READ(uint64_t, kv->data, i);
        *out = (double)v;
        return true;
    }
    int64_t whole;
    if (!so_gguf_elem_i64(kv, i, &whole))
        return false;
    *out = (double)whole;
    return true;
}

static int absent(const so_gguf *g, const char *key, so_err *err) {
    return so_err_set(err, SO_ENOTFOUND, "%s: metadata key %s is missing", g->path, key);
}

static int wrong_type(const so_gguf *g, const so_gguf_kv *kv, const char *want, so_err *err) {
    return so_err_set(err, SO_EFORMAT, "%s: metadata key %.*s is of type %s, expected %s", g->path,
                      SO_STR_ARG(kv->key), so_gguf_type_name(kv->type), want);
}

int so_gguf_get_i64(const so_gguf *g, const char *key, int64_t *out, so_err *err) {
    const so_gguf_kv *kv = so_gguf_find(g, key);
    if (!kv)
        return absent(g, key, err);
    if (kv->type == SO_GGUF_ARRAY || !so_gguf_elem_i64(kv, 0, out)) {
        if (kv->type == SO_GGUF_U64)
            return so_err_set(err, SO_EFORMAT, "%s: metadata key %s does not fit in 63 bits",
                              g->path, key);
        return wrong_type(g, kv, "an integer", err);
    }
    return SO_OK;
}

int so_gguf_get_f64(const so_gguf *g, const char *key, double *out, so_err *err) {
    const so_gguf_kv *kv = so_gguf_find(g, key);
    if (!kv)
        return absent(g, key, err);
    if (kv->type == SO_GGUF_ARRAY || !so_gguf_elem_f64(kv, 0, out))
        return wrong_type(g, kv, "a number", err);
    return SO_OK;
}

int so_gguf_get_bool(const so_gguf *g, const char *key, bool *out, so_err *err) {
    int64_t v;
    int rc = so_gguf_get_i64(g, key, &v, err);
    if (rc != SO_OK)
        return rc;
    if (v != 0 && v != 1)
        return so_err_set(err, SO_EFORMAT, "%s: metadata key %s is %" PRId64 ", expected 0 or 1",
                          g->path, key, v);
    *out = v == 1;
    return SO_OK;
}

int so_gguf_get_str(const so_gguf *g, const char *key, so_str *out, so_err *err) {
    const so_gguf_kv *kv = so_gguf_find(g, key);
    if (!kv)
        return absent(g, key, err);
    if (kv->type != SO_GGUF_STRING)
        return wrong_type(g, kv, "a string", err);
    *out = kv->strings[0];
    return SO_OK;
}
