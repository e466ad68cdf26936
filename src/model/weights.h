/* Creates matrices that the file does not hold in the needed form: transposed, a selection of rows,
 * or converted to another dtype. Private to src/model. */
#ifndef SO_MODEL_WEIGHTS_H
#define SO_MODEL_WEIGHTS_H

#include "base/pool.h"
#include "format/dtype.h"
#include "model/fp8.h"

/* t transposed, float dtypes only. *memory owns the bytes. */
int so_weights_transpose(const so_tensor *t, so_tensor *out, void **memory, so_err *err);

/* The n rows ids[i] of t. *memory owns the bytes. */
int so_weights_pick(const so_tensor *t, const int32_t *ids, int n, so_tensor *out, void **memory,
                    so_err *err);

/* t converted to dtype; fp8: its scales if it is F8_E4M3, else NULL. The pool's threads split the rows. An element that is NaN or infinite,
 * before or after the conversion, is an error that names the tensor, row and column. */
int so_weights_convert(const so_tensor *t, const so_fp8 *fp8, so_dtype dtype, so_pool *pool,
                       so_tensor *out, void **memory, so_err *err);

/* The dtype for rows of n elements: `want` if its block length divides n, else Q8_0, else F16. */
so_dtype so_weights_fit(so_dtype want, int64_t n);

/* Index of the first NaN or infinity, −1 if there is none. */
int64_t so_weights_nonfinite(const float *x, int64_t n);

#endif
