/* Dequantisation of every dtype, block by block, in the simplest code that is bit-identical to the
 * GGUF reference.
 *
 * Each block is copied out of the file first, because blocks may be unaligned. The order of the two
 * products (d·s, then times q) is part of the contract: kernels use the same order, and the golden
 * test compares bits. No allocation, no state; any thread. */
#include "format/quant.h"

#include "base/half.h"
#include "base/mem.h"
#include "format/blocks.h"

static void dequant_f16(const unsigned char *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, sizeof h);
        dst[i] = so_f16_to_f32(h);
    }
}

static void dequant_bf16(const unsigned char *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        uint16_t h;
        memcpy(&h, src + 2 * i, sizeof h);
        dst[i] = so_bf16_to_f32(h);
    }
}

/* Without the scale, which is in another tensor. */
static void dequant_e4m3(const unsigned char *src, float *dst, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        dst[i] = so_e4m3_to_f32(src[i]);
}

static void block_q4_0(const void *src, float *y) {
    so_block_q4_0 b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)((b.qs[i] & 15) - 8);
        y[i + 16] = d * (float)((b.qs[i] >> 4) - 8);
    }
}

static void block_q4_1(const void *src, float *y) {
    so_block_q4_1 b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d), m = so_f16_to_f32(b.m);
    for (int i = 0; i < 16; i++) {
        y[i] = d * (float)(b.qs[i] & 15) + m;
        y[i + 16] = d * (float)(b.qs[i] >> 4) + m;
    }
}

static void block_q5_0(const void *src, float *y) {
    so_block_q5_0 b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d);
    uint32_t qh;
    memcpy(&qh, b.qh, sizeof qh);
    for (int i = 0; i < 16; i++) {
        int lo = (b.qs[i] & 15) | (int)(qh >> i & 1) << 4;
        int hi = b.qs[i] >> 4 | (int)(qh >> (i + 16) & 1) << 4;
        y[i] = d * (float)(lo - 16);
        y[i + 16] = d * (float)(hi - 16);
    }
}

static void block_q5_1(const void *src, float *y) {
    so_block_q5_1 b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d), m = so_f16_to_f32(b.m);
    uint32_t qh;
    memcpy(&qh, b.qh, sizeof qh);
    for (int i = 0; i < 16; i++) {
        int lo = (b.qs[i] & 15) | (int)(qh >> i & 1) << 4;
        int hi = b.qs[i] >> 4 | (int)(qh >> (i + 16) & 1) << 4;
        y[i] = d * (float)lo + m;
        y[i + 16] = d * (float)hi + m;
    }
}

static void block_q8_0(const void *src, float *y) {
    so_block_q8_0 b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d);
    for (int i = 0; i < 32; i++)
        y[i] = d * (float)b.qs[i];
}

/* Q2_K and Q3_K share the order of their two-bit values: each half of 128 elements has 32 bytes,
 * and bit pair j of those bytes holds elements 32·j … 32·j+31 of the half. */
static int two_bits(const uint8_t *qs, int i) {
    int half = i / 128, pair = i % 128 / 32;
    return qs[32 * half + i % 32] >> (2 * pair) & 3;
}

static void block_q2_k(const void *src, float *y) {
    so_block_q2_k b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d), dmin = so_f16_to_f32(b.dmin);
    for (int j = 0; j < 16; j++) {
        float s = d * (float)(b.scales[j] & 15), m = dmin * (float)(b.scales[j] >> 4);
        for (int i = 16 * j; i < 16 * j + 16; i++)
            y[i] = s * (float)two_bits(b.qs, i) - m;
    }
}

static void block_q3_k(const void *src, float *y) {
    so_block_q3_k b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d);
    for (int j = 0; j < 16; j++) {
        float s = d * (float)(so_scale_k3(b.scales, j) - 32);
        for (int i = 16 * j; i < 16 * j + 16; i++) {
            int high = b.hmask[i % 32] >> (i / 32) & 1;
            y[i] = s * (float)((two_bits(b.qs, i) | high << 2) - 4);
        }
    }
}

/* Q4_K and Q5_K: each group of 64 elements has 32 bytes. The low nibbles are elements 0…31, the
 * high nibbles elements 32…63. */
static void block_q4_k(const void *src, float *y) {
    so_block_q4_k b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d), dmin = so_f16_to_f32(b.dmin);
    for (int j = 0; j < 8; j++) {
        int s, m;
        so_scale_min_k4(b.scales, j, &s, &m);
        float ds = d * (float)s, dm = dmin * (float)m;
        for (int i = 0; i < 32; i++)
            y[32 * j + i] = ds * (float)(b.qs[32 * (j / 2) + i] >> (4 * (j % 2)) & 15) - dm;
    }
}

static void block_q5_k(const void *src, float *y) {
    so_block_q5_k b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d), dmin = so_f16_to_f32(b.dmin);
    for (int j = 0; j < 8; j++) {
        int s, m;
        so_scale_min_k4(b.scales, j, &s, &m);
        float ds = d * (float)s, dm = dmin * (float)m;
        for (int i = 0; i < 32; i++) {
            int low = b.qs[32 * (j / 2) + i] >> (4 * (j % 2)) & 15, high = b.qh[i] >> j & 1;
            y[32 * j + i] = ds * (float)(low | high << 4) - dm;
        }
    }
}

/* Q6_K: each half of 128 elements has 64 bytes with the lower four bits of its elements (0…63 in the
 * low nibbles, 64…127 in the high nibbles) and 32 bytes with the upper two bits, bit pair j for
 * elements 32·j … 32·j+31. */
static void block_q6_k(const void *src, float *y) {
    so_block_q6_k b;
    memcpy(&b, src, sizeof b);
    float d = so_f16_to_f32(b.d);
    for (int i = 0; i < SO_QK_K; i++) {
        int half = i / 128, k = i % 128;
        int low = b.ql[64 * half + k % 64] >> (4 * (k / 64)) & 15;
        int high = b.qh[32 * half + k % 32] >> (2 * (k / 32)) & 3;
        y[i] = d * (float)b.scales[i / 16] * (float)((low | high << 4) - 32);
    }
}

typedef void block_fn(const void *src, float *y);

void so_dequantize_row(so_dtype dtype, const void *src, float *dst, int64_t n) {
    static block_fn *const fns[SO_DTYPE_COUNT] = {
        [SO_DTYPE_Q4_0] = block_q4_0, [SO_DTYPE_Q4_1] = block_q4_1, [SO_DTYPE_Q5_0] = block_q5_0,
        [SO_DTYPE_Q5_1] = block_q5_1, [SO_DTYPE_Q8_0] = block_q8_0, [SO_DTYPE_Q2_K] = block_q2_k,
        [SO_DTYPE_Q3_K] = block_q3_k, [SO_DTYPE_Q4_K] = block_q4_k, [SO_DTYPE_Q5_K] = block_q5_k,
        [SO_DTYPE_Q6_K] = block_q6_k,
    };
    const so_dtype_info *info = so_dtype_get((int)dtype);
    SO_ASSERT(info != NULL);
    SO_ASSERT_OP(n % info->block_len, ==, 0);
    if (dtype == SO_DTYPE_F32)
        memcpy(dst, src, (size_t)n * sizeof *dst);
    else if (dtype == SO_DTYPE_F16)
        dequant_f16(src, dst, n);
    else if (dtype == SO_DTYPE_BF16)
        dequant_bf16(src, dst, n);
    else if (dtype == SO_DTYPE_F8_E4M3)
        dequant_e4m3(src, dst, n);
    else
        for (int64_t i = 0; i < n / info->block_len; i++)
            fns[dtype]((const unsigned char *)src + i * info->block_bytes,
                       dst + i * info->block_len);
}
