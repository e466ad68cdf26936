/* Describes a checkpoint as text and as JSON, for `sooth inspect` and other callers. Text from the
 * file is sanitised: always valid UTF-8, and without control characters where it is printed. */
#ifndef SO_FORMAT_DESCRIBE_H
#define SO_FORMAT_DESCRIBE_H

#include "format/checkpoint.h"

typedef struct so_description {
    char format[24];   /* "GGUF v3", "safetensors" */
    char arch[64];     /* general.architecture or model_type; "unknown" if the file has neither */
    uint64_t n_params; /* elements of all tensors */
    uint64_t tensor_bytes;
    struct {
        size_t n_tensors;
        uint64_t n_params, n_bytes;
    } by_dtype[SO_DTYPE_COUNT];
} so_description;

void so_describe(const so_checkpoint *ck, so_description *out);

/* One object: path, format, arch, parameters, bytes, types, tensors [{name, dtype, shape, bytes}]
 * and metadata. Shapes are in the file's order (GGUF: fastest dimension first; safetensors: slowest
 * first). Arrays of more than 64 values become {"type", "length", "first"}. Caller decrefs. */
json_t *so_describe_json(const so_checkpoint *ck);

/* A JSON string of s, with U+FFFD for every byte that is not valid UTF-8. */
json_t *so_describe_json_text(so_str s);

/* The value of a metadata entry on one line of about `width` characters. */
void so_describe_value(const so_gguf_kv *kv, size_t width, so_buf *out);
/* The type of a metadata entry: "i32", "string[49152]". */
void so_describe_type(const so_gguf_kv *kv, so_buf *out);

/* s as one line of printable UTF-8, truncated to max_chars characters plus "…". */
void so_describe_text(so_str s, size_t max_chars, so_buf *out);

#endif
