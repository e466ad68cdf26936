/* Converts a model to a GGUF file whose weights have other dtypes.
 *
 * The source is a list of tensors and two functions. A GGUF file (so_convert_from_gguf) and a
 * Hugging Face folder, whose names and row order the model layer maps, therefore use the same code.
 */
#ifndef SO_FORMAT_CONVERT_H
#define SO_FORMAT_CONVERT_H

#include "format/gguf.h"
#include "format/recipe.h"

typedef struct so_convert_tensor {
    const char *name; /* the GGUF name, unique */
    so_dtype dtype;   /* in the source */
    int n_dims;
    int64_t dims[SO_MAX_DIMS];
    const void *data; /* source bytes, copied if the dtype is unchanged; NULL: always use rows() */
} so_convert_tensor;

typedef struct so_convert_source {
    const char *path; /* for messages */
    const so_convert_tensor *tensors;
    size_t n_tensors;
    /* Writes the model's metadata to w; file type and quantisation version are added later. */
    int (*metadata)(void *user, so_gguf_writer *w, so_err *err);
    /* dst = rows [first, first + n) of tensor i as floats, [n][dims[0]]. */
    int (*rows)(void *user, size_t i, int64_t first, int64_t n, float *dst, so_err *err);
    void *user;
} so_convert_source;

/* Makes a source of an open GGUF file, which must stay open. */
void so_convert_from_gguf(const so_gguf *g, so_convert_source *out);
void so_convert_source_free(so_convert_source *s); /* only for so_convert_from_gguf */

typedef struct so_convert_opts {
    int n_threads;                             /* 0: one thread */
    void (*progress)(void *user, double done); /* 0 … 1; may be NULL */
    void *user;
} so_convert_opts;

/* A tensor that was written as `dtype` because its row length is not a multiple of the block length
 * of the wanted dtype. */
typedef struct so_convert_fallback {
    char *tensor;
    int64_t row_len;
    so_dtype wanted, dtype;
} so_convert_fallback;

typedef struct so_convert_report {
    uint64_t bytes_in, bytes_out;     /* of tensor data */
    size_t n_tensors[SO_DTYPE_COUNT]; /* written, by dtype */
    size_t n_requantised;             /* tensors that the source has in another quantised dtype */
    so_convert_fallback *fallbacks;
    size_t n_fallbacks;
} so_convert_report;

/* Writes the converted model to out_path; on failure out_path is unchanged. Refuses to overwrite
 * its own input, NaN and infinite weights, and weights outside F16's range if F16 is the target;
 * the message names tensor and element. `report` may be NULL. */
int so_convert(const so_convert_source *src, const so_recipe *recipe, const char *out_path,
               const so_convert_opts *opts, so_convert_report *report, so_err *err);
void so_convert_report_free(so_convert_report *r);

#endif
