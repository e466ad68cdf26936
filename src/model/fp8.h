/* Matrices of 8-bit floats (E4M3) in Hugging Face folders.
 *
 * Their values are the numbers times scales that another tensor holds: NAME.weight_scale (of the
 * formats compressed-tensors and fbgemm_fp8) or NAME.weight_scale_inv (of the format fp8; despite its
 * name it is a factor, too) for NAME.weight. One scale belongs to the whole matrix, to
 * a row, or to a block of rows and columns.
 *
 * No kernel multiplies such numbers: they are converted while loading, to Q8_0 if no other type is
 * asked for. docs/decisions.md has the reason. Private to src/model. */
#ifndef SO_MODEL_FP8_H
#define SO_MODEL_FP8_H

#include "format/checkpoint.h"

typedef struct so_fp8 {
    const so_tensor *w;
    const so_tensor *scales; /* NULL: all are 1 */
    const so_tensor *unused; /* NAME.input_scale, for activations; NULL: none */
    int64_t n_rows, n_cols;  /* of a block that shares a scale */
    int64_t scales_per_row;  /* of blocks */
} so_fp8;

static inline bool so_fp8_is(const so_tensor *t) { return t && t->dtype == SO_DTYPE_F8_E4M3; }

/* Finds the scales of w and checks their shape and values. */
int so_fp8_open(const so_checkpoint *ck, const so_tensor *w, so_fp8 *out, so_err *err);

/* dst[w.dims[0]] = row r. */
void so_fp8_row(const so_fp8 *m, int64_t r, float *dst);

#endif
