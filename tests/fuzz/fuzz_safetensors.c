/* Safetensors from arbitrary bytes: whatever opens must be safe to read in full. */
#include <stdlib.h>

#include "format/quant.h"
#include "format/safetensors.h"

static volatile double sink;

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    so_safetensors *s;
    so_err err;
    if (so_safetensors_open_memory(data, len, "fuzz", &s, &err) != SO_OK)
        return 0;
    for (size_t i = 0; i < s->n_tensors; i++) {
        const so_tensor *t = &s->tensors[i];
        size_t size = so_dtype_row_bytes(t->dtype, 1);
        for (size_t off = 0; off < t->n_bytes; off += size) {
            float v;
            so_dequantize_row(t->dtype, (const char *)t->data + off, &v, 1);
            sink = (double)v;
        }
        for (size_t k = 0; k < t->name.len; k++)
            sink = t->name.ptr[k];
    }
    so_safetensors_close(s);
    return 0;
}
