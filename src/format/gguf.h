/* GGUF files (v2 and v3, little-endian), single or split, memory-mapped.
 *
 * so_gguf_open checks everything: counts against the file's size, every length, every tensor's
 * range, type, alignment and overlap, duplicate keys and names. After it succeeds, every pointer
 * below refers to bytes inside the file. docs/formats.md has the layout byte by byte. An open file
 * is read-only and may be used from any thread. */
#ifndef SO_FORMAT_GGUF_H
#define SO_FORMAT_GGUF_H

#include "base/file.h"
#include "format/dtype.h"

typedef enum so_gguf_type {
    SO_GGUF_U8 = 0,
    SO_GGUF_I8 = 1,
    SO_GGUF_U16 = 2,
    SO_GGUF_I16 = 3,
    SO_GGUF_U32 = 4,
    SO_GGUF_I32 = 5,
    SO_GGUF_F32 = 6,
    SO_GGUF_BOOL = 7,
    SO_GGUF_STRING = 8,
    SO_GGUF_ARRAY = 9,
    SO_GGUF_U64 = 10,
    SO_GGUF_I64 = 11,
    SO_GGUF_F64 = 12,
} so_gguf_type;

/* One metadata entry. A scalar has n = 1 and elem = type. Arrays of arrays are not decoded; only
 * their bytes are available. */
typedef struct so_gguf_kv {
    so_str key;
    so_gguf_type type; /* SO_GGUF_ARRAY for arrays */
    so_gguf_type elem;
    uint64_t n;
    const unsigned char *data; /* unaligned little-endian elements; strings: length, bytes, … */
    const so_str *strings;     /* [n] for strings and arrays of strings, else NULL */
    size_t n_bytes;
} so_gguf_kv;

typedef struct so_gguf so_gguf;

/* Opens a file. For the first part of a split file (…-00001-of-00003.gguf) it opens all parts. */
int so_gguf_open(const char *path, so_gguf **out, so_err *err);
/* Opens a file in memory, which must outlive the result. For tests and fuzzing; rejects split
 * files. */
int so_gguf_open_memory(const void *data, size_t len, const char *name, so_gguf **out, so_err *err);
void so_gguf_close(so_gguf *g);
/* so_file_drop for the part that contains p. */
void so_gguf_drop(const so_gguf *g, const void *p, size_t len);

const char *so_gguf_path(const so_gguf *g);
uint32_t so_gguf_version(const so_gguf *g);
size_t so_gguf_file_bytes(const so_gguf *g); /* of all parts */
size_t so_gguf_n_kv(const so_gguf *g);
const so_gguf_kv *so_gguf_kv_at(const so_gguf *g, size_t i);
const so_gguf_kv *so_gguf_find(const so_gguf *g, const char *key); /* NULL if absent */
size_t so_gguf_n_tensors(const so_gguf *g);
const so_tensor *so_gguf_tensor_at(const so_gguf *g, size_t i);
const so_tensor *so_gguf_tensor(const so_gguf *g, const char *name); /* NULL if absent */

/* Typed reads of scalars. SO_ENOTFOUND if the key is absent; SO_EFORMAT, naming key and type, if
 * the type is wrong. Any integer type and bool convert to i64 if the value fits; any float or
 * integer type converts to f64. */
int so_gguf_get_i64(const so_gguf *g, const char *key, int64_t *out, so_err *err);
int so_gguf_get_f64(const so_gguf *g, const char *key, double *out, so_err *err);
int so_gguf_get_bool(const so_gguf *g, const char *key, bool *out, so_err *err);
int so_gguf_get_str(const so_gguf *g, const char *key, so_str *out, so_err *err);
/* Element i of a numeric array or scalar; false if i is out of range or the type is not numeric. */
bool so_gguf_elem_f64(const so_gguf_kv *kv, uint64_t i, double *out);
bool so_gguf_elem_i64(const so_gguf_kv *kv, uint64_t i, int64_t *out);

const char *so_gguf_type_name(so_gguf_type t);

/* Writing: first all metadata and tensor headers, then so_gguf_writer_begin, then the data of each
 * tensor in order, in one or more pieces, then commit. Alignment is 32. Uses so_out_file: a failed
 * or aborted write leaves no file behind. */
typedef struct so_gguf_writer so_gguf_writer;
so_gguf_writer *so_gguf_writer_create(void);
void so_gguf_writer_free(so_gguf_writer *w); /* aborts an unfinished file */
/* This and the functions below replace an earlier value of the same key. */
void so_gguf_writer_copy_kv(so_gguf_writer *w, const so_gguf_kv *kv);
void so_gguf_writer_u32(so_gguf_writer *w, const char *key, uint32_t v);
void so_gguf_writer_f32(so_gguf_writer *w, const char *key, float v);
void so_gguf_writer_bool(so_gguf_writer *w, const char *key, bool v);
void so_gguf_writer_str(so_gguf_writer *w, const char *key, so_str v);
void so_gguf_writer_strs(so_gguf_writer *w, const char *key, const so_str *v, size_t n);
void so_gguf_writer_i32s(so_gguf_writer *w, const char *key, const int32_t *v, size_t n);
void so_gguf_writer_f32s(so_gguf_writer *w, const char *key, const float *v, size_t n);
void so_gguf_writer_tensor(so_gguf_writer *w, const char *name, so_dtype dtype, int n_dims,
                           const int64_t *dims);
int so_gguf_writer_begin(so_gguf_writer *w, const char *path, so_err *err);
int so_gguf_writer_data(so_gguf_writer *w, const void *data, size_t n_bytes, so_err *err);
int so_gguf_writer_commit(so_gguf_writer *w, so_err *err);

#endif
