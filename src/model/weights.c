/* Transposes matrices, picks rows and converts matrices to another dtype at load; weights.h has the
 * contract.
 *
 * The conversion works row by row through float32, so the result does not depend on the number of
 * threads. Sizes come from the file, so a failed allocation is an error, not an abort. One caller
 * at a time per pool. */
#include "model/weights.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "base/mem.h"
#include "format/quant.h"

/* Allocates a zeroed tensor of the given shape under t's name. */
static int make_like(const so_tensor *t, so_dtype dtype, int64_t cols, int64_t rows, so_tensor *out,
                     void **memory, so_err *err) {
    size_t n_bytes;
    bool fits = so_mul_size(so_dtype_row_bytes(dtype, cols), (size_t)rows, &n_bytes);
    void *data = fits ? so_try_aligned(n_bytes) : NULL;
    if (!data)
        return so_err_set(err, SO_ENOMEM, "no memory for tensor %.*s as %s", SO_STR_ARG(t->name),
                          so_dtype_get(dtype)->name);
    *out = (so_tensor){.name = t->name,
                       .dtype = dtype,
                       .n_dims = 2,
                       .dims = {cols, rows, 1, 1},
                       .data = data,
                       .n_bytes = n_bytes};
    *memory = data;
    return 0;
}

int so_weights_transpose(const so_tensor *t, so_tensor *out, void **memory, so_err *err) {
    if (!so_dtype_is_float(t->dtype))
        return so_err_set(err, SO_EUNSUPPORTED, "tensor %.*s is %s and cannot be transposed",
                          SO_STR_ARG(t->name), so_dtype_get(t->dtype)->name);
    int64_t cols = t->dims[0], rows = t->dims[1];
    int rc = make_like(t, t->dtype, rows, cols, out, memory, err);
    if (rc != 0)
        return rc;
    size_t size = so_dtype_row_bytes(t->dtype, 1);
    const unsigned char *src = t->data;
    unsigned char *dst = *memory;
    for (int64_t c = 0; c < cols; c++)
        for (int64_t r = 0; r < rows; r++)
            memcpy(dst + (size_t)(c * rows + r) * size, src + (size_t)(r * cols + c) * size, size);
    return 0;
}

int so_weights_pick(const so_tensor *t, const int32_t *ids, int n, so_tensor *out, void **memory,
                    so_err *err) {
    int rc = make_like(t, t->dtype, t->dims[0], n, out, memory, err);
    size_t size = so_dtype_row_bytes(t->dtype, t->dims[0]);
    for (int i = 0; i < n && rc == 0; i++)
        memcpy((char *)*memory + (size_t)i * size, (const char *)t->data + (size_t)ids[i] * size,
               size);
    return rc;
}

static uint32_t exponent_full(float x) { return (so_f32_bits(x) & 0x7F800000u) == 0x7F800000u; }

/* Called for every logits row, so it must be fast. Blocks of constant length without an early exit
 * let the compiler vectorise (with an unknown length, gcc at -O2 does not). */
int64_t so_weights_nonfinite(const float *x, int64_t n) {
    enum { BLOCK = 256 };
    int64_t i = 0;
    for (; i + BLOCK <= n; i += BLOCK) {
        uint32_t any = 0;
        for (int k = 0; k < BLOCK; k++)
            any |= exponent_full(x[i + k]);
        if (any)
            break;
    }
    for (; i < n; i++)
        if (exponent_full(x[i]))
            return i;
    return -1;
}

so_dtype so_weights_fit(so_dtype want, int64_t n) {
    if (n % so_dtype_get(want)->block_len == 0)
        return want;
    return n % so_dtype_get(SO_DTYPE_Q8_0)->block_len == 0 ? SO_DTYPE_Q8_0 : SO_DTYPE_F16;
}

typedef struct round_job {
    const so_tensor *src, *dst;
    const so_fp8 *fp8;   /* of src; NULL: it has no scales of its own */
    _Atomic int64_t bad; /* lowest flat index of a non-finite element; −1: none */
} round_job;

static void note_bad(round_job *job, int64_t at) {
    int64_t old = atomic_load(&job->bad);
    while ((old < 0 || at < old) && !atomic_compare_exchange_weak(&job->bad, &old, at))
        ;
}

static void round_rows(void *arg, int index, int count) {
    round_job *job = arg;
    int64_t cols = job->src->dims[0], rows = job->src->dims[1];
    size_t src_bytes = so_dtype_row_bytes(job->src->dtype, cols);
    size_t dst_bytes = so_dtype_row_bytes(job->dst->dtype, cols);
    unsigned char *dst = (unsigned char *)(uintptr_t)job->dst->data;
    float *row = so_alloc((size_t)cols * sizeof *row);
    long begin, end;
    so_split((long)rows, 1, index, count, &begin, &end);
    for (long r = begin; r < end; r++) {
        if (job->fp8)
            so_fp8_row(job->fp8, r, row);
        else
            so_dequantize_row(job->src->dtype, (const char *)job->src->data + (size_t)r * src_bytes,
                              row, cols);
        int64_t bad = so_weights_nonfinite(row, cols);
        if (bad >= 0) {
            note_bad(job, r * cols + bad);
            break;
        }
        so_quantize_row(job->dst->dtype, row, dst + (size_t)r * dst_bytes, cols);
        /* a value, or a block scale, above 65504 becomes infinite as F16 */
        so_dequantize_row(job->dst->dtype, dst + (size_t)r * dst_bytes, row, cols);
        bad = so_weights_nonfinite(row, cols);
        if (bad >= 0) {
            note_bad(job, r * cols + bad);
            break;
        }
    }
    free(row);
}

int so_weights_convert(const so_tensor *t, const so_fp8 *fp8, so_dtype dtype, so_pool *pool,
                       so_tensor *out, void **memory, so_err *err) {
    int rc = make_like(t, dtype, t->dims[0], so_tensor_rows(t), out, memory, err);
    if (rc != 0)
        return rc;
    round_job job = {.src = t, .dst = out, .fp8 = fp8, .bad = -1};
    so_pool_run(pool, round_rows, &job);
    if (job.bad < 0)
        return 0;
    free(*memory);
    *memory = NULL;
    return so_err_set(
        err, SO_EFORMAT,
        "tensor %.*s holds NaN, infinity or a value past the range of %s at row %lld, "
        "column %lld",
        SO_STR_ARG(t->name), so_dtype_get(dtype)->name, (long long)(job.bad / t->dims[0]),
        (long long)(job.bad % t->dims[0]));
}
