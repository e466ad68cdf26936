/* Quantisation of rows, the inverse of quant.c. For each block:
 *   1. weight the error of each element x by w = |x| + rms, because errors of large elements matter
 *      more;
 *   2. find a scale (and offset) for each group with the search in fit.c; a group is the whole
 *      block or, for K types, a sub-block;
 *   3. K types: round the groups' scales to 4, 6 or 8 bits relative to one half-precision scale;
 *   4. compute the codes with the scales as stored, not with the scales before rounding.
 * Q8_0 skips the search: its scale is the largest magnitude / 127, so its codes stay within ±127,
 * which integer kernels rely on. Half-precision values are clamped to the finite range, so no input
 * produces an infinite scale. A row of zeros becomes zeros. No allocation, no state; any thread. */
#include <math.h>

#include "base/half.h"
#include "base/mem.h"
#include "format/blocks.h"
#include "format/fit.h"
#include "format/quant.h"

static uint16_t finite_half(float v) {
    v = v > 65504.0f ? 65504.0f : v < -65504.0f ? -65504.0f : v;
    return so_f32_to_f16(v);
}

/* Rounds *v to fp16, so that *v is the value that a reader will decode, and returns the fp16
 * bits. */
static uint16_t store_half(float *v) {
    uint16_t h = finite_half(*v);
    *v = so_f16_to_f32(h);
    return h;
}

static float inverse(float s) { return s != 0 ? 1.0f / s : 0; }

static void weigh(const float *x, float *w, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    float rms = (float)sqrt(sum / n);
    for (int i = 0; i < n; i++)
        w[i] = fabsf(x[i]) + rms + 1e-30f;
}

/* q[i] = (x[i] − m)/s rounded to the nearest integer in [lo, hi] */
static void codes(const float *x, int n, float s, float m, int lo, int hi, int8_t *q) {
    float inv = inverse(s);
    for (int i = 0; i < n; i++)
        q[i] = (int8_t)so_round_to((x[i] - m) * inv, (float)lo, (float)hi);
}

/* 32 codes of four bits: elements 0…15 in the low nibbles, 16…31 in the high ones. */
static void pack_nibbles(const int8_t *q, uint8_t *qs) {
    for (int i = 0; i < 16; i++)
        qs[i] = (uint8_t)((q[i] & 15) | (q[i + 16] & 15) << 4);
}

static void pack_fifth(const int8_t *q, uint8_t *qh) {
    uint32_t bits = 0;
    for (int i = 0; i < 32; i++)
        bits |= (uint32_t)(q[i] >> 4 & 1) << i;
    memcpy(qh, &bits, sizeof bits);
}

static void plain_symmetric(const float *x, int levels, int8_t *q, uint16_t *d) {
    float w[SO_QK];
    weigh(x, w, SO_QK);
    float s = so_fit_symmetric(x, w, SO_QK, levels);
    *d = store_half(&s);
    codes(x, SO_QK, s, 0, -levels, levels - 1, q);
    for (int i = 0; i < SO_QK; i++)
        q[i] = (int8_t)(q[i] + levels);
}

static void plain_affine(const float *x, int q_max, int8_t *q, uint16_t *d, uint16_t *m) {
    float w[SO_QK], s, lo;
    weigh(x, w, SO_QK);
    so_fit_affine(x, w, SO_QK, q_max, 0, &s, &lo);
    *d = store_half(&s);
    *m = store_half(&lo);
    codes(x, SO_QK, s, lo, 0, q_max, q);
}

static void quant_q4_0(const float *x, void *dst) {
    so_block_q4_0 b;
    int8_t q[SO_QK];
    plain_symmetric(x, 8, q, &b.d);
    pack_nibbles(q, b.qs);
    memcpy(dst, &b, sizeof b);
}

static void quant_q4_1(const float *x, void *dst) {
    so_block_q4_1 b;
    int8_t q[SO_QK];
    plain_affine(x, 15, q, &b.d, &b.m);
    pack_nibbles(q, b.qs);
    memcpy(dst, &b, sizeof b);
}

static void quant_q5_0(const float *x, void *dst) {
    so_block_q5_0 b;
    int8_t q[SO_QK];
    plain_symmetric(x, 16, q, &b.d);
    pack_nibbles(q, b.qs);
    pack_fifth(q, b.qh);
    memcpy(dst, &b, sizeof b);
}

static void quant_q5_1(const float *x, void *dst) {
    so_block_q5_1 b;
    int8_t q[SO_QK];
    plain_affine(x, 31, q, &b.d, &b.m);
    pack_nibbles(q, b.qs);
    pack_fifth(q, b.qh);
    memcpy(dst, &b, sizeof b);
}

static void quant_q8_0(const float *x, void *dst) {
    so_block_q8_0 b;
    float amax = 0;
    for (int i = 0; i < SO_QK; i++)
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    float d = amax / 127.0f;
    b.d = store_half(&d);
    codes(x, SO_QK, d, 0, -127, 127, b.qs);
    memcpy(dst, &b, sizeof b);
}

/* Scales and offsets of all groups of a 256-element block, as integers relative to two fp16
 * numbers: an element of group j is d·s[j]·q − dmin·m[j]. */
typedef struct affine_k {
    uint16_t d, dmin;
    uint8_t s[16], m[16];
    float ds[16], dm[16]; /* d·s and dmin·m as a reader computes them */
} affine_k;

static void fit_affine_k(const float *x, int group, int q_max, int s_max, affine_k *k) {
    int n = SO_QK_K / group;
    float w[SO_QK_K], s[16], m[16], s_top = 0, m_top = 0;
    weigh(x, w, SO_QK_K);
    for (int j = 0; j < n; j++) {
        so_fit_affine(x + j * group, w + j * group, group, q_max, 1, &s[j], &m[j]);
        s_top = SO_MAX(s_top, s[j]);
        m_top = SO_MAX(m_top, -m[j]);
    }
    float d = s_top / (float)s_max, dmin = m_top / (float)s_max;
    k->d = store_half(&d);
    k->dmin = store_half(&dmin);
    for (int j = 0; j < n; j++) {
        k->s[j] = (uint8_t)so_round_to(s[j] * inverse(d), 0, (float)s_max);
        k->m[j] = (uint8_t)so_round_to(-m[j] * inverse(dmin), 0, (float)s_max);
        k->ds[j] = d * (float)k->s[j];
        k->dm[j] = dmin * (float)k->m[j];
    }
}

static void affine_codes(const float *x, int group, int q_max, const affine_k *k, int8_t *q) {
    for (int j = 0; j < SO_QK_K / group; j++)
        codes(x + j * group, group, k->ds[j], -k->dm[j], 0, q_max, q + j * group);
}

/* The order of two-bit codes in Q2_K and Q3_K (see two_bits in quant.c). */
static void pack_two_bits(const int8_t *q, uint8_t *qs) {
    memset(qs, 0, 64);
    for (int i = 0; i < SO_QK_K; i++)
        qs[32 * (i / 128) + i % 32] |= (uint8_t)((q[i] & 3) << (2 * (i % 128 / 32)));
}

static void quant_q2_k(const float *x, void *dst) {
    so_block_q2_k b;
    affine_k k;
    int8_t q[SO_QK_K];
    fit_affine_k(x, 16, 3, 15, &k);
    affine_codes(x, 16, 3, &k, q);
    for (int j = 0; j < 16; j++)
        b.scales[j] = (uint8_t)(k.s[j] | k.m[j] << 4);
    pack_two_bits(q, b.qs);
    b.d = k.d;
    b.dmin = k.dmin;
    memcpy(dst, &b, sizeof b);
}

/* The inverse of so_scale_min_k4. */
static void pack_scale_min(const affine_k *k, uint8_t *packed) {
    for (int j = 0; j < 4; j++) {
        packed[j] = (uint8_t)(k->s[j] | k->s[j + 4] >> 4 << 6);
        packed[j + 4] = (uint8_t)(k->m[j] | k->m[j + 4] >> 4 << 6);
        packed[j + 8] = (uint8_t)((k->s[j + 4] & 15) | (k->m[j + 4] & 15) << 4);
    }
}

static void pack_nibbles_k(const int8_t *q, uint8_t *qs) {
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++)
            qs[32 * j + i] = (uint8_t)((q[64 * j + i] & 15) | (q[64 * j + 32 + i] & 15) << 4);
}

static void quant_q4_k(const float *x, void *dst) {
    so_block_q4_k b;
    affine_k k;
    int8_t q[SO_QK_K];
    fit_affine_k(x, 32, 15, 63, &k);
    affine_codes(x, 32, 15, &k, q);
    pack_scale_min(&k, b.scales);
    pack_nibbles_k(q, b.qs);
    b.d = k.d;
    b.dmin = k.dmin;
    memcpy(dst, &b, sizeof b);
}

static void quant_q5_k(const float *x, void *dst) {
    so_block_q5_k b;
    affine_k k;
    int8_t q[SO_QK_K];
    fit_affine_k(x, 32, 31, 63, &k);
    affine_codes(x, 32, 31, &k, q);
    pack_scale_min(&k, b.scales);
    pack_nibbles_k(q, b.qs);
    memset(b.qh, 0, sizeof b.qh);
    for (int i = 0; i < SO_QK_K; i++)
        b.qh[i % 32] |= (uint8_t)((q[i] >> 4 & 1) << (i / 32));
    b.d = k.d;
    b.dmin = k.dmin;
    memcpy(dst, &b, sizeof b);
}

/* 16 groups of 16 elements, x = d·s[j]·(q − levels) with integer scales s and q in [0, 2·levels).
 * The scale of largest magnitude becomes −s_levels. Returns d as fp16. */
static uint16_t symmetric_k(const float *x, int levels, int s_levels, int8_t *s, int8_t *q) {
    float w[SO_QK_K], fs[16], top = 0;
    weigh(x, w, SO_QK_K);
    for (int j = 0; j < 16; j++) {
        fs[j] = so_fit_symmetric(x + 16 * j, w + 16 * j, 16, levels);
        top = fabsf(fs[j]) > fabsf(top) ? fs[j] : top;
    }
    float d = top / (float)-s_levels;
    uint16_t half = store_half(&d);
    for (int j = 0; j < 16; j++) {
        s[j] = (int8_t)so_round_to(fs[j] * inverse(d), (float)-s_levels, (float)(s_levels - 1));
        codes(x + 16 * j, 16, d * (float)s[j], 0, -levels, levels - 1, q + 16 * j);
    }
    for (int i = 0; i < SO_QK_K; i++)
        q[i] = (int8_t)(q[i] + levels);
    return half;
}

/* The inverse of so_scale_k3; s in [−32, 31]. */
static void pack_scale_k3(const int8_t *s, uint8_t *packed) {
    memset(packed, 0, 12);
    for (int j = 0; j < 16; j++) {
        int v = s[j] + 32;
        packed[j % 8] |= (uint8_t)((v & 15) << (j < 8 ? 0 : 4));
        packed[8 + j % 4] |= (uint8_t)(v >> 4 << (2 * (j / 4)));
    }
}

static void quant_q3_k(const float *x, void *dst) {
    so_block_q3_k b;
    int8_t s[16], q[SO_QK_K];
    b.d = symmetric_k(x, 4, 32, s, q);
    pack_scale_k3(s, b.scales);
    pack_two_bits(q, b.qs);
    memset(b.hmask, 0, sizeof b.hmask);
    for (int i = 0; i < SO_QK_K; i++)
        b.hmask[i % 32] |= (uint8_t)((q[i] >> 2 & 1) << (i / 32));
    memcpy(dst, &b, sizeof b);
}

static void quant_q6_k(const float *x, void *dst) {
    so_block_q6_k b;
    int8_t q[SO_QK_K];
    b.d = symmetric_k(x, 32, 128, b.scales, q);
    memset(b.ql, 0, sizeof b.ql);
    memset(b.qh, 0, sizeof b.qh);
    for (int i = 0; i < SO_QK_K; i++) {
        int half = i / 128, k = i % 128;
        b.ql[64 * half + k % 64] |= (uint8_t)((q[i] & 15) << (4 * (k / 64)));
        b.qh[32 * half + k % 32] |= (uint8_t)(q[i] >> 4 << (2 * (k / 32)));
    }
    memcpy(dst, &b, sizeof b);
}

static void quant_16(so_dtype dtype, const float *src, unsigned char *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t h = dtype == SO_DTYPE_F16 ? so_f32_to_f16(src[i]) : so_f32_to_bf16(src[i]);
        memcpy(dst + 2 * i, &h, sizeof h);
    }
}

typedef void quant_fn(const float *x, void *dst);

void so_quantize_row(so_dtype dtype, const float *src, void *dst, int64_t n) {
    static quant_fn *const fns[SO_DTYPE_COUNT] = {
        [SO_DTYPE_Q4_0] = quant_q4_0, [SO_DTYPE_Q4_1] = quant_q4_1, [SO_DTYPE_Q5_0] = quant_q5_0,
        [SO_DTYPE_Q5_1] = quant_q5_1, [SO_DTYPE_Q8_0] = quant_q8_0, [SO_DTYPE_Q2_K] = quant_q2_k,
        [SO_DTYPE_Q3_K] = quant_q3_k, [SO_DTYPE_Q4_K] = quant_q4_k, [SO_DTYPE_Q5_K] = quant_q5_k,
        [SO_DTYPE_Q6_K] = quant_q6_k,
    };
    const so_dtype_info *info = so_dtype_get((int)dtype);
    SO_ASSERT(info != NULL);
    SO_ASSERT_OP(n % info->block_len, ==, 0);
    if (dtype == SO_DTYPE_F32)
        memcpy(dst, src, (size_t)n * sizeof *src);
    else if (so_dtype_is_float(dtype))
        quant_16(dtype, src, dst, n);
    else
        for (int64_t i = 0; i < n / info->block_len; i++)
            fns[dtype](src + i * info->block_len, (unsigned char *)dst + i * info->block_bytes);
}
