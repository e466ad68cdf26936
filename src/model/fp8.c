/* Finds the scales of an FP8 matrix and multiplies rows by them; fp8.h has the formats.
 *
 * A scale tensor of R × C values divides the matrix into blocks. Where R or C is neither 1 nor the
 * number of rows or columns, config.json states the sides of a block; they cannot be told from the
 * numbers (80 rows in 2 blocks: 40 or 64 each?). Scales may be stored unaligned and as any float
 * type. Any thread; no state. */
#include "model/fp8.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "format/quant.h"

enum { MAX_NAME = 512 };

/* *out: the tensor whose name is that of NAME.weight with another ending; NULL if there is none. An
 * error if there is one of a dtype that cannot be read. */
static int sibling(const so_checkpoint *ck, const so_tensor *w, const char *ending,
                   const so_tensor **out, so_err *err) {
    static const char suffix[] = "weight";
    char name[MAX_NAME];
    so_str n = w->name;
    *out = NULL;
    size_t stem = n.len - SO_MIN(n.len, sizeof suffix - 1);
    if (n.len + strlen(ending) >= sizeof name || memcmp(n.ptr + stem, suffix, n.len - stem) != 0)
        return 0;
    snprintf(name, sizeof name, "%.*s%s", (int)stem, n.ptr, ending);
    so_err why;
    int rc = so_checkpoint_require(ck, name, out, &why);
    if (rc == 0 || rc == SO_ENOTFOUND)
        return 0;
    *err = why;
    return rc;
}

/* The rows and columns of a block, as config.json states them; 0: it does not. */
typedef struct block_size {
    int64_t rows, cols;
} block_size;

static block_size pair_of(const json_t *list) {
    block_size b = {json_integer_value(json_array_get(list, 0)),
                    json_integer_value(json_array_get(list, 1))};
    return json_array_size(list) == 2 && b.rows > 0 && b.cols > 0 ? b : (block_size){0, 0};
}

/* `fp8` has weight_block_size; `compressed-tensors` has groups of layers with a block_structure, or a
 * group_size along the rows. */
static block_size stated_block(const so_checkpoint *ck) {
    const json_t *q = json_object_get(so_checkpoint_config(ck), "quantization_config"), *group;
    const char *name;
    block_size b = pair_of(json_object_get(q, "weight_block_size"));
    json_object_foreach(json_object_get(q, "config_groups"), name, group) {
        const json_t *w = json_object_get(group, "weights");
        if (b.rows == 0)
            b = pair_of(json_object_get(w, "block_structure"));
        if (b.rows == 0 && json_integer_value(json_object_get(w, "group_size")) > 0)
            b = (block_size){1, json_integer_value(json_object_get(w, "group_size"))};
    }
    return b;
}

/* The side of n_blocks blocks that cover n; 0 if the stated side needs another number of them. */
static int64_t side_of(int64_t n, int64_t n_blocks, int64_t stated) {
    if (n_blocks == 1)
        return n;
    if (n_blocks == n)
        return 1;
    return stated > 0 && (n - 1) / stated + 1 == n_blocks ? stated : 0;
}

static float scale_at(const so_tensor *scales, int64_t i) {
    float x;
    so_dequantize_row(scales->dtype,
                      (const char *)scales->data + so_dtype_row_bytes(scales->dtype, 1) * (size_t)i,
                      &x, 1);
    return x;
}

static int check_scales(const so_checkpoint *ck, so_fp8 *m, so_err *err) {
    const so_tensor *s = m->scales, *w = m->w;
    if (!so_dtype_is_float(s->dtype))
        return so_err_set(
            err, SO_EUNSUPPORTED, "%s: tensor %.*s is %s; scales must be F32, F16 or BF16",
            so_checkpoint_path(ck), SO_STR_ARG(s->name), so_dtype_get((int)s->dtype)->name);
    /* a vector has a scale for each row */
    int64_t rows = s->n_dims == 1 ? s->dims[0] : s->dims[1];
    int64_t cols = s->n_dims == 1 ? 1 : s->dims[0];
    block_size b = stated_block(ck);
    m->n_rows = side_of(w->dims[1], rows, b.rows);
    m->n_cols = side_of(w->dims[0], cols, b.cols);
    m->scales_per_row = cols;
    if (s->n_dims > 2 || m->n_rows == 0 || m->n_cols == 0)
        return so_err_set(
            err, SO_EUNSUPPORTED,
            "%s: tensor %.*s has %lld x %lld scales for %lld rows of %lld numbers: neither one for "
            "all, nor one for each row, nor one for each block of %lld x %lld, which config.json "
            "states (0: nothing)",
            so_checkpoint_path(ck), SO_STR_ARG(s->name), (long long)rows, (long long)cols,
            (long long)w->dims[1], (long long)w->dims[0], (long long)b.rows, (long long)b.cols);
    for (int64_t i = 0; i < rows * cols; i++)
        if (!isfinite(scale_at(s, i)))
            return so_err_set(err, SO_EFORMAT,
                              "%s: tensor %.*s holds NaN or infinity at element %lld",
                              so_checkpoint_path(ck), SO_STR_ARG(s->name), (long long)i);
    return 0;
}

int so_fp8_open(const so_checkpoint *ck, const so_tensor *w, so_fp8 *out, so_err *err) {
    const so_tensor *scale = NULL, *inverse = NULL, *unused = NULL;
    SO_ASSERT(so_fp8_is(w));
    if (w->n_dims != 2)
        return so_err_set(err, SO_EFORMAT, "%s: tensor %.*s has %d dimensions; a matrix has two",
                          so_checkpoint_path(ck), SO_STR_ARG(w->name), w->n_dims);
    int rc = sibling(ck, w, "weight_scale", &scale, err);
    if (rc == 0)
        rc = sibling(ck, w, "weight_scale_inv", &inverse, err);
    if (rc == 0)
        rc = sibling(ck, w, "input_scale", &unused, err);
    if (rc != 0)
        return rc;
    if (scale && inverse)
        return so_err_set(err, SO_EFORMAT,
                          "%s: tensor %.*s has both weight_scale and weight_scale_inv",
                          so_checkpoint_path(ck), SO_STR_ARG(w->name));
    *out = (so_fp8){.w = w,
                    .scales = scale ? scale : inverse,
                    .unused = unused,
                    .n_rows = w->dims[1],
                    .n_cols = w->dims[0],
                    .scales_per_row = 1};
    return out->scales ? check_scales(ck, out, err) : 0;
}

void so_fp8_row(const so_fp8 *m, int64_t r, float *dst) {
    int64_t cols = m->w->dims[0];
    so_dequantize_row(m->w->dtype, (const char *)m->w->data + r * cols, dst, cols);
    for (int64_t first = 0; m->scales && first < cols; first += m->n_cols) {
        int64_t end = SO_MIN(first + m->n_cols, cols);
        float scale = scale_at(m->scales, r / m->n_rows * m->scales_per_row + first / m->n_cols);
        for (int64_t c = first; c < end; c++)
            dst[c] *= scale;
    }
}
