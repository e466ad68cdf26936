/* Conversion of weight rows to float and back: the scalar reference implementation of every dtype,
 * against which kernels are tested. Deterministic, no allocation; any thread. */
#ifndef SO_FORMAT_QUANT_H
#define SO_FORMAT_QUANT_H

#include "format/dtype.h"

/* dst[n] = the n elements at src. n is a multiple of the block length; src may be unaligned. */
void so_dequantize_row(so_dtype dtype, const void *src, float *dst, int64_t n);

/* Writes src[n] as dtype to dst. The caller must have rejected NaN and infinity. */
void so_quantize_row(so_dtype dtype, const float *src, void *dst, int64_t n);

#endif
