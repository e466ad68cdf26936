/* Safetensors files: an eight-byte length, a JSON table, the data. The file is memory-mapped; its
 * whole table is read and checked at open.
 *
 * Tensors of type F32, F16, BF16 and F8_E4M3 are listed with the fastest dimension first, as in so_tensor.
 * Others (integer position ids, boolean masks, float64) are checked too, but listed separately in
 * `skipped` with a reason, for the error message of a model that needs one of them. Tensor data may
 * be unaligned. */
#ifndef SO_FORMAT_SAFETENSORS_H
#define SO_FORMAT_SAFETENSORS_H

#include "base/file.h"
#include "base/mem.h"
#include "format/dtype.h"

typedef struct so_safetensors_skip {
    so_str name;
    const char *reason; /* "dtype I64 is not supported (F32, F16, … are)" */
} so_safetensors_skip;

typedef struct so_safetensors {
    char *path;
    so_map_file map;    /* empty for a file in memory */
    so_tensor *tensors; /* [n_tensors], sorted by data offset */
    size_t n_tensors;
    so_safetensors_skip *skipped; /* [n_skipped] */
    size_t n_skipped;
    so_arena arena;
} so_safetensors;

int so_safetensors_open(const char *path, so_safetensors **out, so_err *err);
/* Opens a file in memory, which must outlive the result. For tests and fuzzing. */
int so_safetensors_open_memory(const void *data, size_t len, const char *name, so_safetensors **out,
                               so_err *err);
void so_safetensors_close(so_safetensors *s);

#endif
