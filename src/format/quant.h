/* Rows of weights to float and back: the scalar, obviously right version of every dtype. Kernels
 * are checked against it. Deterministic, no allocation, any thread. */
#ifndef SO_FORMAT_QUANT_H
#define SO_FORMAT_QUANT_H

#include "format/dtype.h"

/* dst[n] = src; n is a multiple of the block length. src needs no alignment. */
void so_dequantize_row(so_dtype dtype, const void *src, float *dst, int64_t n);

/* dst = src[n] rounded to dtype. NaN and infinity are the caller's to refuse. */
void so_quantize_row(so_dtype dtype, const float *src, void *dst, int64_t n);

#endif
