/* Making the matrices that a file does not hold ready for use: transposed, some rows of one, or
 * rounded to another dtype. Private to src/model. */
#ifndef SO_MODEL_WEIGHTS_H
#define SO_MODEL_WEIGHTS_H

#include "base/pool.h"
#include "format/dtype.h"

/* t with rows and columns exchanged, float dtypes only; *memory owns the bytes. */
int so_weights_transpose(const so_tensor *t, so_tensor *out, void **memory, so_err *err);

/* The n rows of t that ids names; *memory owns the bytes. */
int so_weights_pick(const so_tensor *t, const int32_t *ids, int n, so_tensor *out, void **memory,
                    so_err *err);

/* t rounded to dtype, rows shared out over the pool. An element that is NaN or infinite, or becomes
 * so by rounding, is an error naming the tensor and its place. */
int so_weights_round(const so_tensor *t, so_dtype dtype, so_pool *pool, so_tensor *out,
                     void **memory, so_err *err);

/* The dtype that rows of n elements can have: `want` where the block divides n, else Q8_0, else
 * F16. */
so_dtype so_weights_fit(so_dtype want, int64_t n);

/* Index of the first NaN or infinity, −1 if there is none. */
int64_t so_weights_nonfinite(const float *x, int64_t n);

#endif
