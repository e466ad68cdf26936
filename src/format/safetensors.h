/* Safetensors files: an eight-byte length, a JSON table, the data. Read whole at open,
 * memory-mapped.
 *
 * Tensors of F32, F16 and BF16 are listed with their dimensions in our order (fastest first).
 * Others (integer position ids, boolean masks, float64) are checked like the rest but kept apart
 * with the reason, so that a model which needs one can say what is wrong with it. Data is aligned
 * to one byte only: the format promises nothing. */
#ifndef SO_FORMAT_SAFETENSORS_H
#define SO_FORMAT_SAFETENSORS_H

#include "base/file.h"
#include "base/mem.h"
#include "format/dtype.h"

typedef struct so_safetensors_skip {
    so_str name;
    const char *reason; /* "dtype I64 is not supported (F32, F16 and BF16 are)" */
} so_safetensors_skip;

typedef struct so_safetensors {
    char *path;
    so_map_file map;    /* empty for a file from memory */
    so_tensor *tensors; /* [n_tensors], in the order of their data */
    size_t n_tensors;
    so_safetensors_skip *skipped; /* [n_skipped] */
    size_t n_skipped;
    so_arena arena;
} so_safetensors;

int so_safetensors_open(const char *path, so_safetensors **out, so_err *err);
/* The same from memory, which must outlive the result; for tests and fuzzing. */
int so_safetensors_open_memory(const void *data, size_t len, const char *name, so_safetensors **out,
                               so_err *err);
void so_safetensors_close(so_safetensors *s);

#endif
