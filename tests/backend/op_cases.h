/* One list of operation cases with their data, for any backend. The cross-level test, the
 * row-invariance test, the comparison with double precision and the packed-weight test all use it.
 *
 * A case has `n` rows of random input. op_run computes rows first … first+n-1 as one submitted
 * operation; a row's output may depend on that row alone. */
#ifndef OP_CASES_H
#define OP_CASES_H

#include "so_test.h"

#include <math.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "base/half.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/blocks.h"
#include "format/quant.h"

typedef struct op_case {
    so_op_kind kind;
    so_dtype dtype; /* of the weight */
    int n, d, m;    /* rows; columns in; columns out of a matmul or rows of an embedding */
    bool flag;      /* matmul: with a bias; rope: halves */
    int heads;      /* rope */
} op_case;

/* Sizes: 1 and 7 are below every vector width, 576 is SmolLM2's, 577 leaves a partial vector. */
#define FLOAT_MATMULS(t)                                                \
    {SO_OP_MATMUL, t, 3, 1, 1, 0, 0}, {SO_OP_MATMUL, t, 9, 7, 5, 1, 0}, \
        {SO_OP_MATMUL, t, 17, 576, 33, 0, 0}, {                         \
        SO_OP_MATMUL, t, 64, 577, 18, 1, 0                              \
    }
#define BLOCK_MATMULS(t)                                                    \
    {SO_OP_MATMUL, t, 3, 32, 1, 0, 0}, {SO_OP_MATMUL, t, 64, 96, 15, 1, 0}, \
        {SO_OP_MATMUL, t, 70, 576, 35, 0, 0}, {                             \
        SO_OP_MATMUL, t, 5, 1536, 64, 1, 0                                  \
    }
#define K_MATMULS(t)                                                            \
    {SO_OP_MATMUL, t, 3, 256, 1, 0, 0}, {SO_OP_MATMUL, t, 64, 512, 15, 1, 0}, { \
        SO_OP_MATMUL, t, 70, 768, 35, 0, 0                                      \
    }
#define ROW_OPS(kind)                                                                  \
    {kind, 0, 2, 1, 0, 0, 0}, {kind, 0, 5, 7, 0, 0, 0}, {kind, 0, 64, 576, 0, 0, 0}, { \
        kind, 0, 9, 577, 0, 0, 0                                                       \
    }

static const op_case op_cases[] = {
    FLOAT_MATMULS(SO_DTYPE_F32),
    FLOAT_MATMULS(SO_DTYPE_F16),
    FLOAT_MATMULS(SO_DTYPE_BF16),
    BLOCK_MATMULS(SO_DTYPE_Q4_0),
    BLOCK_MATMULS(SO_DTYPE_Q4_1),
    BLOCK_MATMULS(SO_DTYPE_Q5_0),
    BLOCK_MATMULS(SO_DTYPE_Q5_1),
    BLOCK_MATMULS(SO_DTYPE_Q8_0),
    K_MATMULS(SO_DTYPE_Q2_K),
    K_MATMULS(SO_DTYPE_Q3_K),
    K_MATMULS(SO_DTYPE_Q4_K),
    K_MATMULS(SO_DTYPE_Q5_K),
    K_MATMULS(SO_DTYPE_Q6_K),
    {SO_OP_EMBED, SO_DTYPE_F32, 5, 7, 11, 0, 0},
    {SO_OP_EMBED, SO_DTYPE_BF16, 5, 577, 11, 0, 0},
    {SO_OP_EMBED, SO_DTYPE_Q8_0, 64, 576, 100, 0, 0},
    {SO_OP_EMBED, SO_DTYPE_Q6_K, 9, 256, 100, 0, 0},
    ROW_OPS(SO_OP_GATHER),
    ROW_OPS(SO_OP_RMS_NORM),
    ROW_OPS(SO_OP_LAYER_NORM),
    ROW_OPS(SO_OP_ADD),
    ROW_OPS(SO_OP_SILU_MUL),
    ROW_OPS(SO_OP_GELU_MUL),
    ROW_OPS(SO_OP_GELU),
    ROW_OPS(SO_OP_ARGMAX),
    {SO_OP_ROPE, 0, 33, 64, 0, 0, 9},
    {SO_OP_ROPE, 0, 33, 64, 0, 1, 9},
    {SO_OP_ROPE, 0, 5, 2, 0, 0, 1},
    {SO_OP_ROPE, 0, 5, 6, 0, 1, 3},
};

static const char *op_name(so_op_kind kind) {
    static const char *const names[SO_OP_COUNT] = {
        "upload",   "download", "embed",     "gather",   "rms_norm", "layer_norm",
        "matmul",   "add",      "silu_mul",  "gelu_mul", "gelu",     "rope",
        "kv_store", "kv_copy",  "attention", "argmax",   "sample",
    };
    return names[kind];
}

/* ---- random data ---- */

typedef struct noise {
    so_rng_key key;
    uint32_t at;
} noise;

static noise noise_of(uint64_t seed) {
    return (noise){.key = {.seed = seed, .purpose = SO_RNG_TEST}};
}

static uint32_t noise_u32(noise *z) {
    uint32_t w[4];
    so_rng_block(&z->key, z->at++, w);
    return w[0];
}

/* Approximately normal with deviation 1: a sum of four uniforms. */
static float noise_normal(noise *z) {
    uint32_t w[4];
    so_rng_block(&z->key, z->at++, w);
    double sum = 0;
    for (int i = 0; i < 4; i++)
        sum += w[i] / 4294967296.0 - 0.5;
    return (float)(sum * 1.7320508);
}

static float *noise_floats(noise *z, size_t n) {
    float *x = so_alloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = noise_normal(z);
    return x;
}

static void put_half(unsigned char *block, size_t off, float value) {
    uint16_t h = so_f32_to_f16(value);
    memcpy(block + off, &h, sizeof h);
}

/* A block of random bits, except that its scales are small numbers. */
static void noise_block(noise *z, so_dtype t, unsigned char *p) {
    int bytes = so_dtype_get((int)t)->block_bytes;
    for (int i = 0; i < bytes; i++)
        p[i] = (unsigned char)noise_u32(z);
    float a = noise_normal(z) * 0.01f, b = noise_normal(z) * 0.05f;
    switch (t) {
    case SO_DTYPE_F32: {
        float f = noise_normal(z);
        memcpy(p, &f, sizeof f);
        break;
    }
    case SO_DTYPE_F16:
        put_half(p, 0, noise_normal(z));
        break;
    case SO_DTYPE_BF16: {
        uint16_t h = so_f32_to_bf16(noise_normal(z));
        memcpy(p, &h, sizeof h);
        break;
    }
    case SO_DTYPE_Q4_1:
    case SO_DTYPE_Q5_1:
    case SO_DTYPE_Q4_K:
    case SO_DTYPE_Q5_K:
        put_half(p, 0, a);
        put_half(p, 2, b);
        break;
    case SO_DTYPE_Q2_K:
        put_half(p, offsetof(so_block_q2_k, d), a);
        put_half(p, offsetof(so_block_q2_k, dmin), b);
        break;
    case SO_DTYPE_Q3_K:
        put_half(p, offsetof(so_block_q3_k, d), a);
        break;
    case SO_DTYPE_Q6_K:
        put_half(p, offsetof(so_block_q6_k, d), a);
        break;
    default: /* Q4_0 Q5_0 Q8_0 */
        put_half(p, 0, a);
    }
}

/* ---- a case with its data ---- */

typedef struct op_data {
    op_case c;
    unsigned char *weight_bytes; /* one byte off alignment, as in files */
    so_tensor tensor;
    float *a, *b;         /* [n][width] */
    float *weight, *bias; /* of norms and matmul */
    float *table;         /* rope */
    int32_t *ids;
    int width, out_width; /* floats per row */
} op_data;

static void op_data_weight(op_data *o, noise *z, int64_t rows) {
    const so_dtype_info *info = so_dtype_get((int)o->c.dtype);
    size_t row_bytes = so_dtype_row_bytes(o->c.dtype, o->c.d), bytes = row_bytes * (size_t)rows;
    o->weight_bytes = so_alloc(bytes + 1);
    for (size_t i = 0; i < bytes; i += (size_t)info->block_bytes)
        noise_block(z, o->c.dtype, o->weight_bytes + 1 + i);
    o->tensor = (so_tensor){.name = SO_STR("test.weight"),
                            .dtype = o->c.dtype,
                            .n_dims = 2,
                            .dims = {o->c.d, rows, 1, 1},
                            .data = o->weight_bytes + 1,
                            .n_bytes = bytes};
}

static op_data op_data_create(const op_case *c, uint64_t seed) {
    noise z = noise_of(seed);
    op_data o = {.c = *c};
    size_t n = (size_t)c->n;
    o.width = c->kind == SO_OP_ROPE ? c->heads * c->d : c->d;
    o.out_width = c->kind == SO_OP_MATMUL ? c->m : c->kind == SO_OP_ARGMAX ? 1 : o.width;
    o.a = noise_floats(&z, n * (size_t)o.width);
    o.b = noise_floats(&z, n * (size_t)o.width);
    o.weight = noise_floats(&z, (size_t)c->d);
    o.bias = noise_floats(&z, (size_t)SO_MAX(c->d, c->m));
    o.table = noise_floats(&z, n * (size_t)c->d);
    o.ids = SO_NEW_N(int32_t, n);
    for (size_t i = 0; i < n; i++)
        o.ids[i] =
            (int32_t)(noise_u32(&z) % (unsigned)SO_MAX(c->kind == SO_OP_EMBED ? c->m : c->n, 1));
    for (size_t i = 1; i < n && c->kind == SO_OP_GATHER; i += 4)
        o.ids[i] = -1;
    if (c->kind == SO_OP_MATMUL || c->kind == SO_OP_EMBED)
        op_data_weight(&o, &z, c->m);
    if (c->kind == SO_OP_ARGMAX) { /* ties, and a NaN in every third row */
        for (size_t i = 0; i < n * (size_t)o.width; i++)
            o.a[i] = roundf(o.a[i] * 2);
        for (size_t i = 1; i < n; i += 3)
            o.a[i * (size_t)o.width + noise_u32(&z) % (unsigned)o.width] = NAN;
    }
    return o;
}

static void op_data_free(op_data *o) {
    free(o->weight_bytes);
    free(o->a);
    free(o->b);
    free(o->weight);
    free(o->bias);
    free(o->table);
    free(o->ids);
}

/* ---- running ---- */

/* Buffers of one run, freed together. */
typedef struct op_bench {
    so_backend *b;
    so_buffer *bufs[16];
    int n;
} op_bench;

static so_view op_buffer(op_bench *w, const void *src, size_t bytes) {
    so_err err = {0};
    SO_OK_OR_FAIL(w->b->vt->buffer_create(w->b, bytes, &w->bufs[w->n], &err), err);
    so_view v = {w->bufs[w->n++], 0};
    if (src)
        so_submit(w->b, &(so_op){.kind = SO_OP_UPLOAD, .n = 1, .upload = {v, src, bytes}});
    return v;
}

static void op_bench_free(op_bench *w) {
    for (int i = 0; i < w->n; i++)
        w->b->vt->buffer_free(w->b, w->bufs[i]);
}

static so_op op_make(op_bench *w, const op_data *o, int first, int n, const so_weight *weight) {
    size_t d4 = (size_t)o->width * 4, n4 = (size_t)n * d4, skip = (size_t)first * (size_t)o->width;
    size_t dim4 = (size_t)o->c.d * 4;
    so_op op = {.kind = o->c.kind, .n = n};
    so_view out = op_buffer(w, NULL, (size_t)n * (size_t)o->out_width * 4);
    so_view x = op_buffer(w, o->a + skip, n4);
    switch (o->c.kind) {
    case SO_OP_EMBED:
        op.embed.out = out, op.embed.w = weight, op.embed.scale = 1.5f;
        op.embed.ids = op_buffer(w, o->ids + first, (size_t)n * 4);
        break;
    case SO_OP_GATHER:
        op.gather.out = out, op.gather.d = o->c.d;
        op.gather.x = op_buffer(w, o->a, (size_t)o->c.n * d4);
        op.gather.rows = op_buffer(w, o->ids + first, (size_t)n * 4);
        break;
    case SO_OP_RMS_NORM:
    case SO_OP_LAYER_NORM:
        op.norm.out = out, op.norm.x = x, op.norm.d = o->c.d, op.norm.eps = 1e-5f;
        op.norm.weight = op_buffer(w, o->weight, dim4);
        op.norm.bias = op_buffer(w, o->bias, dim4);
        break;
    case SO_OP_MATMUL:
        op.matmul.out = out, op.matmul.x = x, op.matmul.w = weight;
        if (o->c.flag)
            op.matmul.bias = op_buffer(w, o->bias, (size_t)o->c.m * 4);
        break;
    case SO_OP_ROPE: /* in place */
        op.rope.x = x, op.rope.head_dim = o->c.d, op.rope.n_heads = o->c.heads;
        op.rope.halves = o->c.flag;
        op.rope.table = op_buffer(w, o->table + (size_t)first * (size_t)o->c.d, (size_t)n * dim4);
        break;
    case SO_OP_ARGMAX:
        op.argmax.out = out, op.argmax.x = x, op.argmax.d = o->c.d;
        break;
    default:
        op.eltwise.out = out, op.eltwise.a = x, op.eltwise.d = o->c.d;
        op.eltwise.b = op_buffer(w, o->b + skip, n4);
    }
    return op;
}

/* The output of an operation from op_make. */
static so_view op_result(const so_op *op) {
    return op->kind == SO_OP_ROPE ? op->rope.x : op->norm.out; /* `out` is first in all others */
}

/* Rows first … first+n-1 of the case into out[n][out_width]. */
static inline void op_run(so_backend *b, const op_data *o, int first, int n, float *out) {
    op_bench w = {.b = b};
    so_err err = {0};
    so_weight *weight = NULL;
    if (o->tensor.data)
        SO_OK_OR_FAIL(b->vt->weight_create(b, &o->tensor, &weight, &err), err);
    so_op op = op_make(&w, o, first, n, weight);
    so_submit(b, &op);
    so_submit(b, &(so_op){.kind = SO_OP_DOWNLOAD,
                          .n = n,
                          .download = {op_result(&op), out, (size_t)n * (size_t)o->out_width * 4}});
    SO_OK_OR_FAIL(b->vt->sync(b, &err), err);
    op_bench_free(&w);
    b->vt->weight_free(b, weight);
}

/* Compares floats bit by bit; NaN equals NaN of any payload. */
static void assert_same_floats(const op_case *c, const char *what, const float *got,
                               const float *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (so_f32_bits(got[i]) != so_f32_bits(want[i]) && !(isnan(got[i]) && isnan(want[i])))
            fail_msg("%s %s d=%d m=%d n=%d, %s: element %zu is %.9g (%08x), not %.9g (%08x)",
                     op_name(c->kind), so_dtype_get((int)c->dtype)->name, c->d, c->m, c->n, what, i,
                     (double)got[i], so_f32_bits(got[i]), (double)want[i], so_f32_bits(want[i]));
}

#endif
