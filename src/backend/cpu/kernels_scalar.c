/* The scalar reference of every kernel except the matrix products (matmul_scalar.c): the contract
 * of kernels.h in plain C.
 *
 * Written to be read and compared with, not to be fast. The only fused operation is fmaf
 * (the build forbids contraction), so results have the same bits on every machine. Keeps
 * no state; any thread. */
#include <math.h>
#include <string.h>

#include "backend/cpu/kernels.h"
#include "backend/cpu/matmul_scalar.h"
#include "base/half.h"

static float reduce16(float *lane) {
    for (int width = 8; width > 0; width /= 2)
        for (int i = 0; i < width; i++)
            lane[i] += lane[i + width];
    return lane[0];
}

static float exp_ref(float x) {
    x = SO_EXP_MIN > x ? SO_EXP_MIN : x; /* NaN is kept */
    x = SO_EXP_MAX < x ? SO_EXP_MAX : x;
    float t = fmaf(x, SO_EXP_LOG2E, SO_EXP_MAGIC);
    float nf = t - SO_EXP_MAGIC;
    int32_t n = (int32_t)(so_f32_bits(t) - so_f32_bits(SO_EXP_MAGIC));
    float r = fmaf(nf, -SO_EXP_LN2_HI, x);
    r = fmaf(nf, -SO_EXP_LN2_LO, r);
    float p = SO_EXP_C6;
    p = fmaf(p, r, SO_EXP_C5);
    p = fmaf(p, r, SO_EXP_C4);
    p = fmaf(p, r, SO_EXP_C3);
    p = fmaf(p, r, SO_EXP_C2);
    p = fmaf(p, r, 1.0f);
    p = fmaf(p, r, 1.0f);
    int32_t n1 = n >> 1, n2 = n - n1;
    p *= so_bits_f32((uint32_t)(n1 + 127) << 23);
    return p * so_bits_f32((uint32_t)(n2 + 127) << 23);
}

/* Rounds to nearest, ties to even: adding SO_EXP_MAGIC leaves the integer in the low bits. */
static int8_t round_to_int8(float v) {
    v = v > 127.0f ? 127.0f : v;
    v = v < -127.0f ? -127.0f : v;
    return (int8_t)(int32_t)(so_f32_bits(v + SO_EXP_MAGIC) - so_f32_bits(SO_EXP_MAGIC));
}

/* Quantises one block; returns its scale. The bits of |x| are ordered as the numbers are, with
 * infinity and NaN above all others. */
static float quantize(const float *x, int len, int8_t *q) {
    uint32_t max = 0;
    for (int i = 0; i < len; i++) {
        uint32_t a = so_f32_bits(x[i]) & 0x7FFFFFFFu;
        max = a > max ? a : max;
    }
    float amax = so_bits_f32(max);
    if (max >= 0x7F800000u || amax < SO_ACT_TINY) {
        memset(q, 0, (size_t)len);
        return max >= 0x7F800000u ? NAN : 0.0f;
    }
    float inverse = 127.0f / amax;
    for (int i = 0; i < len; i++)
        q[i] = round_to_int8(x[i] * inverse);
    return amax / 127.0f;
}

static int32_t sum_of(const int8_t *q, int len) {
    int32_t sum = 0;
    for (int i = 0; i < len; i++)
        sum += q[i];
    return sum;
}

static void quantize32(const float *x, int k, int8_t *q, so_q32 *blocks) {
    for (int b = 0; b < k / 32; b++) {
        float d = quantize(x + 32 * b, 32, q + 32 * b);
        int32_t sum = sum_of(q + 32 * b, 32);
        blocks[b] = (so_q32){.d = d, .s = d * (float)sum, .sum = sum, .neg8 = -8 * sum};
    }
}

static void sums256(const int8_t *q, so_q256 *b) {
    for (int j = 0; j < 32; j++)
        b->neg32_8[j] = -32 * sum_of(q + 8 * j, 8);
    for (int j = 0; j < 16; j++) {
        b->sum16[j] = (int16_t)sum_of(q + 16 * j, 16);
        b->neg16_16[j] = -16 * b->sum16[j];
    }
    for (int j = 0; j < 8; j++) {
        b->sum32[j] = (int16_t)sum_of(q + 32 * j, 32);
        b->neg8_32[j] = -8 * b->sum32[j];
    }
}

static void quantize256(const float *x, int k, int8_t *q, so_q256 *blocks) {
    for (int b = 0; b < k / 256; b++) {
        blocks[b].d = quantize(x + 256 * b, 256, q + 256 * b);
        sums256(q + 256 * b, &blocks[b]);
    }
}

static void rms_norm(float *out, const float *x, const float *w, int d, float eps) {
    float lane[16] = {0};
    for (int i = 0; i < d; i++)
        lane[i % 16] = fmaf(x[i], x[i], lane[i % 16]);
    float r = 1.0f / sqrtf(reduce16(lane) / (float)d + eps);
    for (int i = 0; i < d; i++)
        out[i] = x[i] * r * w[i];
}

static void layer_norm(float *out, const float *x, const float *w, const float *b, int d,
                       float eps) {
    float lane[16] = {0}, square[16] = {0};
    for (int i = 0; i < d; i++)
        lane[i % 16] += x[i];
    float mean = reduce16(lane) / (float)d;
    for (int i = 0; i < d; i++)
        square[i % 16] = fmaf(x[i] - mean, x[i] - mean, square[i % 16]);
    float r = 1.0f / sqrtf(reduce16(square) / (float)d + eps);
    for (int i = 0; i < d; i++)
        out[i] = fmaf((x[i] - mean) * r, w[i], b[i]);
}

static void rotate(float *x, const float *table, int n) {
    for (int i = 0; i < n; i += 2) {
        float a = x[i], b = x[i + 1], c = table[i], s = table[i + 1];
        x[i] = a * c - b * s;
        x[i + 1] = a * s + b * c;
    }
}

static void scale_row(float *out, const float *x, float a, long n) {
    for (long i = 0; i < n; i++)
        out[i] = x[i] * a;
}

static void add(float *out, const float *a, const float *b, long n) {
    for (long i = 0; i < n; i++)
        out[i] = a[i] + b[i];
}

static float silu1(float x) { return x / (1.0f + exp_ref(-x)); }

static float gelu1(float x) {
    float u = fmaf(SO_GELU_CUBIC * x * x, x, x);
    return x / (1.0f + exp_ref(SO_GELU_SCALE * u));
}

static void silu_mul(float *out, const float *a, const float *b, long n) {
    for (long i = 0; i < n; i++)
        out[i] = silu1(a[i]) * b[i];
}

static void gelu_mul(float *out, const float *a, const float *b, long n) {
    for (long i = 0; i < n; i++)
        out[i] = gelu1(a[i]) * b[i];
}

static void gelu(float *out, const float *a, long n) {
    for (long i = 0; i < n; i++)
        out[i] = gelu1(a[i]);
}

static void exp_row(float *out, const float *x, long n) {
    for (long i = 0; i < n; i++)
        out[i] = exp_ref(x[i]);
}

static void to_f16(uint16_t *out, const float *x, long n) {
    for (long i = 0; i < n; i++)
        out[i] = so_f32_to_f16(x[i]);
}

static int32_t argmax(const float *x, int d) {
    int best = 0;
    for (int i = 0; i < d; i++) {
        if (!isfinite(x[i]))
            return -1;
        if (x[i] > x[best])
            best = i;
    }
    return best;
}

static inline float load(const void *p, size_t i, bool half) {
    return half ? so_f16_to_f32(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

static void interleave(const float *const *q, int n, int d, float scale, void *out) {
    for (int i = 0; i < n; i++)
        for (int e = 0; e < d; e++)
            ((float *)out)[e * n + i] = q[i][e] * scale;
}

static inline void scores(const void *k, const float *q, int n, int d, float *s, size_t stride,
                          bool half) {
    for (int i = 0; i < n; i++)
        memset(s + (size_t)i * stride, 0, SO_KV_PAGE * sizeof *s);
    for (int e = 0; e < d; e++, q += n)
        for (int j = 0; j < SO_KV_PAGE; j++) {
            float key = load(k, (size_t)(e * SO_KV_PAGE + j), half);
            for (int i = 0; i < n; i++) {
                float *sum = s + (size_t)i * stride + j;
                *sum = fmaf(q[i], key, *sum);
            }
        }
}

static inline void values(so_attn_page v, const float *p, int n, int d, float *o, bool half) {
    for (int j = 0; j < v.n; j++)
        for (int e = 0; e < d; e++) {
            float value = load(v.at, (size_t)((v.first + j) * d + e), half);
            for (int i = 0; i < n; i++)
                o[i * d + e] = fmaf(p[i * SO_ATTN_CHUNK + j], value, o[i * d + e]);
        }
}

static void scores_f16(so_attn_page k, const void *q, int n, int d, float *s, size_t stride) {
    scores(k.at, q, n, d, s, stride, true);
}
static void scores_f32(so_attn_page k, const void *q, int n, int d, float *s, size_t stride) {
    scores(k.at, q, n, d, s, stride, false);
}
static void values_f16(so_attn_page v, const float *p, int n, int d, float *o) {
    values(v, p, n, d, o, true);
}
static void values_f32(so_attn_page v, const float *p, int n, int d, float *o) {
    values(v, p, n, d, o, false);
}

/* ---- Q8_0 cache ---- */

static uint16_t entry_q8(const float *x, int8_t *q) {
    uint32_t max = 0;
    for (int i = 0; i < SO_QK; i++) {
        uint32_t a = so_f32_bits(x[i]) & 0x7FFFFFFFu;
        max = a > max ? a : max;
    }
    uint16_t half = so_f32_to_f16(so_bits_f32(max) / 127.0f);
    memset(q, 0, SO_QK);
    if (half == 0 || half >= SO_HALF_INF)
        return half == 0 ? 0 : SO_HALF_NAN;
    float inverse = 1.0f / so_f16_to_f32(half);
    for (int i = 0; i < SO_QK; i++)
        q[i] = round_to_int8(x[i] * inverse);
    return half;
}

static void queries_q8(const float *const *q, int n, int d, float scale, void *out) {
    float *block = out;
    for (int e = 0; e < d; e += SO_QK, block += SO_ATTN_FIELDS * n)
        for (int i = 0; i < n; i++) {
            float x[SO_QK] = {0};
            int8_t rounded[SO_QK];
            for (int c = 0; c < SO_QK && e + c < d; c++)
                x[c] = q[i][e + c] * scale;
            block[SO_ATTN_SCALE * n + i] = quantize(x, SO_QK, rounded);
            int32_t start = -128 * sum_of(rounded, SO_QK); /* part of the layout; unused here */
            memcpy(block + SO_ATTN_START * n + i, &start, sizeof start);
            for (int c = 0; c < SO_QK / 4; c++)
                memcpy(block + (SO_ATTN_BYTES + c) * n + i, rounded + 4 * c, 4);
        }
}

static int32_t dot_q8(const so_q8_keys *k, int j, const float *bytes, int n) {
    int32_t sum = 0;
    for (int c = 0; c < SO_QK / 4; c++) {
        int8_t x[4];
        memcpy(x, bytes + c * n, sizeof x);
        for (int e = 0; e < 4; e++)
            sum += x[e] * k->q[c][j][e];
    }
    return sum;
}

static void scores_q8(so_attn_page page, const void *q, int n, int d, float *s, size_t stride) {
    const so_q8_keys *k = page.at;
    const float *block = q;
    for (int e = 0; e < d; e += SO_QK, k++, block += SO_ATTN_FIELDS * n)
        for (int i = 0; i < n; i++)
            for (int j = 0; j < SO_KV_PAGE; j++) {
                float *sum = s + (size_t)i * stride + j;
                float scale = block[SO_ATTN_SCALE * n + i] * so_f16_to_f32(k->d[j]);
                int32_t isum = dot_q8(k, j, block + SO_ATTN_BYTES * n + i, n);
                *sum = fmaf(scale, (float)isum, e == 0 ? 0.0f : *sum);
            }
}

static void values_q8(so_attn_page v, const float *p, int n, int d, float *o) {
    int width = (d + SO_QK - 1) / SO_QK * SO_QK;
    const int8_t *q = v.at;
    const uint16_t *scales = (const void *)(q + SO_KV_PAGE * width);
    for (int j = v.first; j < v.first + v.n; j++)
        for (int e = 0; e < d; e++) {
            float value = so_f16_to_f32(scales[e / SO_QK * SO_KV_PAGE + j]) * q[j * width + e];
            for (int i = 0; i < n; i++)
                o[i * d + e] = fmaf(p[i * SO_ATTN_CHUNK + j - v.first], value, o[i * d + e]);
        }
}

static float softmax_row(float *s, int lo, int hi, float *sum) {
    float m = -INFINITY, lane[16] = {0};
    for (int j = lo; j < hi; j++)
        m = s[j] > m ? s[j] : m;
    for (int j = lo; j < hi; j++) {
        s[j] = exp_ref(s[j] - m);
        lane[j % 16] += s[j];
    }
    *sum = reduce16(lane);
    return m;
}

static void softmax(float *s, int n, int lo, int hi, float *m, float *sum) {
    for (int i = 0; i < n; i++)
        m[i] = softmax_row(s + i * SO_ATTN_CHUNK, lo, hi, &sum[i]);
}

static void merge(float *o, const float *part, float a, float b, int d) {
    for (int e = 0; e < d; e++)
        o[e] = fmaf(part[e], b, o[e] * a);
}

/* ---- for the roofline ---- */

static uint64_t read_all(const uint8_t *p, size_t n) {
    uint64_t sum = 0, word;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        memcpy(&word, p + i, sizeof word);
        sum ^= word;
    }
    for (; i < n; i++)
        sum ^= p[i];
    return sum;
}

static long multiply_all(long n) {
    int32_t sum[4] = {0};
    for (long r = 0; r < n; r++) {
        int32_t w = (int8_t)r;
        for (int i = 0; i < 4; i++) {
            sum[i] += w * (i + 1);
            __asm__ volatile("" : "+r"(sum[i]));
        }
    }
    return 4 * n;
}

#define ENTRY(name, dtype) [dtype] = so_mm_scalar_##name,
const so_kernels so_kernels_scalar = {
    .level = SO_CPU_SCALAR,
    .matmul = {SO_MM_DTYPES(ENTRY)},
    .quantize32 = quantize32,
    .quantize256 = quantize256,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rotate = rotate,
    .scale = scale_row,
    .add = add,
    .silu_mul = silu_mul,
    .gelu_mul = gelu_mul,
    .gelu = gelu,
    .exp = exp_row,
    .to_f16 = to_f16,
    .argmax = argmax,
    .attn_f16 = {interleave, scores_f16, values_f16},
    .attn_f32 = {interleave, scores_f32, values_f32},
    .attn_q8 = {queries_q8, scores_q8, values_q8},
    .entry_q8 = entry_q8,
    .softmax = softmax,
    .merge = merge,
    .read_all = read_all,
    .multiply_all = multiply_all,
};
