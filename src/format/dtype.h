/* The element types of weight files, and so_tensor. Enum values are GGUF's type numbers. */
#ifndef SO_FORMAT_DTYPE_H
#define SO_FORMAT_DTYPE_H

#include "base/err.h"
#include "base/str.h"

typedef enum so_dtype {
    SO_DTYPE_F32 = 0,
    SO_DTYPE_F16 = 1,
    SO_DTYPE_Q4_0 = 2,
    SO_DTYPE_Q4_1 = 3,
    SO_DTYPE_Q5_0 = 6,
    SO_DTYPE_Q5_1 = 7,
    SO_DTYPE_Q8_0 = 8,
    SO_DTYPE_Q2_K = 10,
    SO_DTYPE_Q3_K = 11,
    SO_DTYPE_Q4_K = 12,
    SO_DTYPE_Q5_K = 13,
    SO_DTYPE_Q6_K = 14,
    SO_DTYPE_BF16 = 30,
    SO_DTYPE_F8_E4M3 = 31, /* not in GGUF files: only read, from folders (model/fp8.h) */
    SO_DTYPE_COUNT = 32,   /* one more than the largest; the gaps are unsupported types */
} so_dtype;

typedef struct so_dtype_info {
    const char *name; /* "Q4_K" */
    int block_len;    /* elements per block: 1, 32 or 256 */
    int block_bytes;
} so_dtype_info;

/* NULL if the type is unknown or unsupported. */
const so_dtype_info *so_dtype_get(int dtype);
/* Whether GGUF files and the kernels have it: all but F8_E4M3. */
static inline bool so_dtype_in_gguf(int dtype) {
    return dtype != SO_DTYPE_F8_E4M3 && so_dtype_get(dtype) != NULL;
}
/* A type that weights can be converted to, by name, ignoring case; false if there is none. */
bool so_dtype_parse(const char *name, so_dtype *out);
static inline bool so_dtype_is_float(so_dtype t) {
    return t == SO_DTYPE_F32 || t == SO_DTYPE_F16 || t == SO_DTYPE_BF16;
}

/* Bytes of a row of n elements; n must be a multiple of the block length (asserted). */
size_t so_dtype_row_bytes(so_dtype dtype, int64_t n);

/* A tensor in a file: a name, a shape, and borrowed bytes. dims[0] is the fastest dimension (GGUF's
 * order): a matrix that maps k inputs to m outputs has dims {k, m} and m rows of k elements. */
enum { SO_MAX_DIMS = 4 };
typedef struct so_tensor {
    so_str name;
    so_dtype dtype;
    int n_dims;
    int64_t dims[SO_MAX_DIMS]; /* unused ones are 1 */
    const void *data;
    size_t n_bytes;
} so_tensor;

static inline int64_t so_tensor_rows(const so_tensor *t) {
    return t->dims[1] * t->dims[2] * t->dims[3];
}
static inline int64_t so_tensor_count(const so_tensor *t) { return t->dims[0] * so_tensor_rows(t); }

#endif
