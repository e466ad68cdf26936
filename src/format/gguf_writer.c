/* Writes GGUF v3. Metadata and tensor headers are collected in memory; `begin` writes them with all
 * offsets, and the tensor data follows in the order of the headers.
 *
 * The alignment is always 32, so general.alignment is not copied from a source. The data of a
 * tensor may be written in several pieces; padding is added automatically. Wrong calls (a duplicate
 * name, more data than the tensor has, commit before the last byte) are bugs and abort. Nothing
 * appears at the target path before commit. Only one thread may use a writer. */
#include <stdlib.h>

#include "base/file.h"
#include "base/map.h"
#include "base/mem.h"
#include "format/gguf.h"

enum { ALIGNMENT = 32 };

typedef struct entry {
    char *key;
    so_buf bytes; /* type and value in file format */
} entry;

typedef struct tensor {
    char *name;
    so_dtype dtype;
    int n_dims;
    int64_t dims[SO_MAX_DIMS];
    uint64_t n_bytes;
} tensor;

struct so_gguf_writer {
    entry *kv;
    size_t n_kv, kv_cap;
    tensor *tensors;
    size_t n_tensors, tensors_cap;
    so_map *names;
    so_out_file *out; /* between begin and commit */
    size_t current;   /* index of the tensor being written */
    uint64_t n_done;  /* bytes of it written so far */
};

so_gguf_writer *so_gguf_writer_create(void) {
    so_gguf_writer *w = SO_NEW(so_gguf_writer);
    w->names = so_map_create(64);
    return w;
}

void so_gguf_writer_free(so_gguf_writer *w) {
    if (!w)
        return;
    so_out_abort(w->out);
    for (size_t i = 0; i < w->n_kv; i++) {
        free(w->kv[i].key);
        so_buf_free(&w->kv[i].bytes);
    }
    for (size_t i = 0; i < w->n_tensors; i++)
        free(w->tensors[i].name);
    free(w->kv);
    free(w->tensors);
    so_map_free(w->names);
    free(w);
}

/* An empty buffer for the value of `key`; an earlier value is discarded. */
static so_buf *slot(so_gguf_writer *w, so_str key) {
    SO_ASSERT(w->out == NULL);
    for (size_t i = 0; i < w->n_kv; i++) {
        if (so_str_eq_c(key, w->kv[i].key)) {
            so_buf_clear(&w->kv[i].bytes);
            return &w->kv[i].bytes;
        }
    }
    if (w->n_kv == w->kv_cap) {
        w->kv_cap = w->kv_cap ? w->kv_cap * 2 : 32;
        w->kv = so_realloc(w->kv, w->kv_cap * sizeof *w->kv);
    }
    w->kv[w->n_kv] = (entry){.key = so_strndup(key.ptr, key.len)};
    return &w->kv[w->n_kv++].bytes;
}

static void put_u32(so_buf *b, uint32_t v) { so_buf_append(b, &v, sizeof v); }
static void put_u64(so_buf *b, uint64_t v) { so_buf_append(b, &v, sizeof v); }

static void put_str(so_buf *b, so_str s) {
    put_u64(b, s.len);
    so_buf_append_str(b, s);
}

static void put_array(so_gguf_writer *w, const char *key, so_gguf_type elem, const void *v,
                      size_t n, size_t size) {
    so_buf *b = slot(w, so_str_c(key));
    put_u32(b, SO_GGUF_ARRAY);
    put_u32(b, elem);
    put_u64(b, n);
    so_buf_append(b, v, n * size);
}

static void put_scalar(so_gguf_writer *w, const char *key, so_gguf_type type, const void *v,
                       size_t size) {
    so_buf *b = slot(w, so_str_c(key));
    put_u32(b, type);
    so_buf_append(b, v, size);
}

void so_gguf_writer_copy_kv(so_gguf_writer *w, const so_gguf_kv *kv) {
    if (so_str_eq_c(kv->key, "general.alignment"))
        return;
    so_buf *b = slot(w, kv->key);
    put_u32(b, kv->type);
    if (kv->type == SO_GGUF_ARRAY) {
        put_u32(b, kv->elem);
        put_u64(b, kv->n);
    }
    so_buf_append(b, kv->data, kv->n_bytes);
}

void so_gguf_writer_u32(so_gguf_writer *w, const char *key, uint32_t v) {
    put_scalar(w, key, SO_GGUF_U32, &v, sizeof v);
}

void so_gguf_writer_f32(so_gguf_writer *w, const char *key, float v) {
    put_scalar(w, key, SO_GGUF_F32, &v, sizeof v);
}

void so_gguf_writer_bool(so_gguf_writer *w, const char *key, bool v) {
    uint8_t byte = v;
    put_scalar(w, key, SO_GGUF_BOOL, &byte, sizeof byte);
}

void so_gguf_writer_str(so_gguf_writer *w, const char *key, so_str v) {
    so_buf *b = slot(w, so_str_c(key));
    put_u32(b, SO_GGUF_STRING);
    put_str(b, v);
}

void so_gguf_writer_strs(so_gguf_writer *w, const char *key, const so_str *v, size_t n) {
    so_buf *b = slot(w, so_str_c(key));
    put_u32(b, SO_GGUF_ARRAY);
    put_u32(b, SO_GGUF_STRING);
    put_u64(b, n);
    for (size_t i = 0; i < n; i++)
        put_str(b, v[i]);
}

void so_gguf_writer_i32s(so_gguf_writer *w, const char *key, const int32_t *v, size_t n) {
    put_array(w, key, SO_GGUF_I32, v, n, sizeof *v);
}

void so_gguf_writer_f32s(so_gguf_writer *w, const char *key, const float *v, size_t n) {
    put_array(w, key, SO_GGUF_F32, v, n, sizeof *v);
}

void so_gguf_writer_tensor(so_gguf_writer *w, const char *name, so_dtype dtype, int n_dims,
                           const int64_t *dims) {
    SO_ASSERT(w->out == NULL);
    SO_ASSERT(n_dims >= 1 && n_dims <= SO_MAX_DIMS);
    if (w->n_tensors == w->tensors_cap) {
        w->tensors_cap = w->tensors_cap ? w->tensors_cap * 2 : 64;
        w->tensors = so_realloc(w->tensors, w->tensors_cap * sizeof *w->tensors);
    }
    tensor *t = &w->tensors[w->n_tensors];
    *t = (tensor){.name = so_strdup(name), .dtype = dtype, .n_dims = n_dims};
    int64_t rows = 1;
    for (int i = 0; i < n_dims; i++) {
        SO_ASSERT_OP(dims[i], >=, 1);
        t->dims[i] = dims[i];
        rows *= i > 0 ? dims[i] : 1;
    }
    t->n_bytes = so_dtype_row_bytes(dtype, dims[0]) * (uint64_t)rows;
    SO_ASSERT(so_map_add(w->names, so_str_c(t->name), (int64_t)w->n_tensors));
    w->n_tensors++;
}

static uint64_t padded(uint64_t n) { return (n + ALIGNMENT - 1) & ~(uint64_t)(ALIGNMENT - 1); }

static int write_padding(so_gguf_writer *w, so_err *err) {
    static const unsigned char zeros[ALIGNMENT];
    uint64_t at = so_out_tell(w->out);
    return so_out_write(w->out, zeros, (size_t)(padded(at) - at), err);
}

static int write_kv(so_gguf_writer *w, so_err *err) {
    int rc = SO_OK;
    for (size_t i = 0; i < w->n_kv && rc == SO_OK; i++) {
        const entry *e = &w->kv[i];
        if (e->bytes.full)
            return so_err_set(err, SO_ELIMIT, "metadata key %s: value larger than 1 GiB", e->key);
        so_buf key = {0};
        put_str(&key, so_str_c(e->key));
        rc = so_out_write(w->out, key.data, key.len, err);
        if (rc == SO_OK)
            rc = so_out_write(w->out, e->bytes.data, e->bytes.len, err);
        so_buf_free(&key);
    }
    return rc;
}

static int write_tensor_table(so_gguf_writer *w, so_err *err) {
    so_buf b = {0};
    uint64_t offset = 0;
    for (size_t i = 0; i < w->n_tensors; i++) {
        const tensor *t = &w->tensors[i];
        put_str(&b, so_str_c(t->name));
        put_u32(&b, (uint32_t)t->n_dims);
        for (int d = 0; d < t->n_dims; d++)
            put_u64(&b, (uint64_t)t->dims[d]);
        put_u32(&b, (uint32_t)t->dtype);
        put_u64(&b, offset);
        offset += padded(t->n_bytes);
    }
    int rc = so_out_write(w->out, b.data, b.len, err);
    so_buf_free(&b);
    return rc;
}

int so_gguf_writer_begin(so_gguf_writer *w, const char *path, so_err *err) {
    SO_ASSERT(w->out == NULL);
    int rc = so_out_begin(path, &w->out, err);
    if (rc != SO_OK)
        return rc;
    so_buf head = {0};
    so_buf_append_c(&head, "GGUF");
    put_u32(&head, 3);
    put_u64(&head, w->n_tensors);
    put_u64(&head, w->n_kv);
    rc = so_out_write(w->out, head.data, head.len, err);
    so_buf_free(&head);
    if (rc == SO_OK)
        rc = write_kv(w, err);
    if (rc == SO_OK)
        rc = write_tensor_table(w, err);
    if (rc == SO_OK)
        rc = write_padding(w, err);
    return rc;
}

int so_gguf_writer_data(so_gguf_writer *w, const void *data, size_t n_bytes, so_err *err) {
    SO_ASSERT(w->out != NULL);
    SO_ASSERT_OP(w->current, <, w->n_tensors);
    const tensor *t = &w->tensors[w->current];
    SO_ASSERT_OP(n_bytes, <=, t->n_bytes - w->n_done);
    int rc = so_out_write(w->out, data, n_bytes, err);
    if (rc != SO_OK)
        return rc;
    w->n_done += n_bytes;
    if (w->n_done < t->n_bytes)
        return SO_OK;
    w->current++;
    w->n_done = 0;
    return write_padding(w, err);
}

int so_gguf_writer_commit(so_gguf_writer *w, so_err *err) {
    SO_ASSERT(w->out != NULL);
    SO_ASSERT_OP(w->current, ==, w->n_tensors);
    so_out_file *out = w->out;
    w->out = NULL;
    return so_out_commit(out, err);
}
