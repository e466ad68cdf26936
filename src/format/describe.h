/* What a checkpoint holds, in words and in JSON, for `sooth inspect` and for anyone who asks. All
 * text from the file is made harmless: valid UTF-8, and on a terminal no control characters. */
#ifndef SO_FORMAT_DESCRIBE_H
#define SO_FORMAT_DESCRIBE_H

#include "format/checkpoint.h"

typedef struct so_description {
    char format[24];   /* "GGUF v3", "safetensors" */
    char arch[64];     /* general.architecture, or model_type; "unknown" where the file has none */
    uint64_t n_params; /* elements of all tensors */
    uint64_t tensor_bytes;
    struct {
        size_t n_tensors;
        uint64_t n_params, n_bytes;
    } by_dtype[SO_DTYPE_COUNT];
} so_description;

void so_describe(const so_checkpoint *ck, so_description *out);

/* One object: path, format, arch, parameters, bytes, types, tensors [{name, dtype, shape, bytes}]
 * and metadata. Shapes are in the file's own order (GGUF: fastest first; safetensors: slowest
 * first). Arrays of more than 64 values become {"type", "length", "first"}. Caller decrefs. */
json_t *so_describe_json(const so_checkpoint *ck);

/* A JSON string of s, with U+FFFD for every byte that is not UTF-8. */
json_t *so_describe_json_text(so_str s);

/* The value of a metadata entry on one line of about `width` characters. */
void so_describe_value(const so_gguf_kv *kv, size_t width, so_buf *out);
/* "i32", "string[49152]" */
void so_describe_type(const so_gguf_kv *kv, so_buf *out);

/* s as one line of printable UTF-8, at most max_chars characters and then "…". */
void so_describe_text(so_str s, size_t max_chars, so_buf *out);

#endif
