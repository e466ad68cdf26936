/* Writing a model as GGUF with its weights rounded to other dtypes.
 *
 * The source is a list of tensors and two functions, so that a GGUF file (below) and a Hugging Face
 * folder, whose names and row order the model layer maps, feed the same code. */
#ifndef SO_FORMAT_CONVERT_H
#define SO_FORMAT_CONVERT_H

#include "format/gguf.h"
#include "format/recipe.h"

typedef struct so_convert_tensor {
    const char *name; /* GGUF's, unique */
    so_dtype dtype;   /* in the source */
    int n_dims;
    int64_t dims[SO_MAX_DIMS];
    const void
        *data; /* the source's bytes, copied where the dtype stays; NULL: always through rows */
} so_convert_tensor;

typedef struct so_convert_source {
    const char *path; /* for messages */
    const so_convert_tensor *tensors;
    size_t n_tensors;
    /* Puts the model's metadata into w; file type and quantisation version are added afterwards. */
    int (*metadata)(void *user, so_gguf_writer *w, so_err *err);
    /* dst = rows [first, first + n) of tensor i as floats, [n][dims[0]]. */
    int (*rows)(void *user, size_t i, int64_t first, int64_t n, float *dst, so_err *err);
    void *user;
} so_convert_source;

/* An open GGUF file as a source; it borrows g. */
void so_convert_from_gguf(const so_gguf *g, so_convert_source *out);
void so_convert_source_free(so_convert_source *s); /* of so_convert_from_gguf */

typedef struct so_convert_opts {
    int n_threads;                             /* 0: one */
    void (*progress)(void *user, double done); /* 0 … 1; may be NULL */
    void *user;
} so_convert_opts;

typedef struct so_convert_fallback {
    char *tensor;
    int64_t row_len;
    so_dtype wanted, dtype;
} so_convert_fallback;

typedef struct so_convert_report {
    uint64_t bytes_in, bytes_out;     /* of tensors */
    size_t n_tensors[SO_DTYPE_COUNT]; /* written, by dtype */
    size_t n_requantised; /* tensors that were quantised before: their first loss stays */
    so_convert_fallback *fallbacks;
    size_t n_fallbacks;
} so_convert_report;

/* All or nothing: on failure out_path is as it was. Refuses to write over its own input, NaN and
 * infinite weights, and weights beyond F16's range where F16 is the target, naming tensor and
 * element. `report` may be NULL. */
int so_convert(const so_convert_source *src, const so_recipe *recipe, const char *out_path,
               const so_convert_opts *opts, so_convert_report *report, so_err *err);
void so_convert_report_free(so_convert_report *r);

#endif
