/* Scalar matrix products: the contract of kernels.h, one output element at a time.
 *
 * A weight block, packed or not, is decoded once into small integers and used for all activation
 * rows of a chunk. Tests compare every faster level with this code bit by bit, and CPUs that
 * support no faster level run it. Keeps no state; any thread. */
#include "backend/cpu/matmul_scalar.h"

#include <math.h>
#include <string.h>

#include "backend/cpu/pack.h"
#include "base/half.h"
#include "base/mem.h"

enum { CHUNK = 64 }; /* activation rows whose sums are kept at once */

enum { BLOCK_BYTES_MAX = sizeof(so_block_q6_k) };

/* Block b of row r in the file's layout; a packed block is unpacked into `copy`. */
static const uint8_t *block_at(const so_mm *a, so_dtype dtype, long r, int b, uint8_t *copy) {
    if (a->tile_bytes == 0)
        return a->w + (size_t)r * a->row_bytes +
               (size_t)b * (size_t)so_dtype_get((int)dtype)->block_bytes;
    long first = r / SO_PACK_TILE * SO_PACK_TILE;
    so_pack_block(dtype, a->w + (size_t)(r / SO_PACK_TILE) * a->tile_bytes,
                  so_pack_groups(a->m, first), (int)(r - first), b, copy);
    return copy;
}

static float half_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return so_f16_to_f32(h);
}

/* ---- blocks of 32 ---- */

/* element = d·q + m; q is already signed where the type has an offset instead of a minimum */
typedef struct block32 {
    int8_t q[32];
    float d, m;
} block32;

static void nibbles(const uint8_t *qs, int offset, int8_t *q) {
    for (int i = 0; i < 16; i++) {
        q[i] = (int8_t)((qs[i] & 15) - offset);
        q[i + 16] = (int8_t)((qs[i] >> 4) - offset);
    }
}

static void fifth_bits(const uint8_t *qh, int8_t *q) {
    for (int i = 0; i < 32; i++)
        q[i] = (int8_t)(q[i] + ((qh[i / 8] >> (i % 8) & 1) << 4));
}

static inline void decode32(so_dtype dtype, const uint8_t *src, block32 *out) {
    out->d = half_at(src);
    out->m = 0;
    switch (dtype) {
    case SO_DTYPE_Q4_0:
        nibbles(src + offsetof(so_block_q4_0, qs), 8, out->q);
        break;
    case SO_DTYPE_Q4_1:
        nibbles(src + offsetof(so_block_q4_1, qs), 0, out->q);
        out->m = half_at(src + offsetof(so_block_q4_1, m));
        break;
    case SO_DTYPE_Q5_0:
        nibbles(src + offsetof(so_block_q5_0, qs), 16, out->q);
        fifth_bits(src + offsetof(so_block_q5_0, qh), out->q);
        break;
    case SO_DTYPE_Q5_1:
        nibbles(src + offsetof(so_block_q5_1, qs), 0, out->q);
        fifth_bits(src + offsetof(so_block_q5_1, qh), out->q);
        out->m = half_at(src + offsetof(so_block_q5_1, m));
        break;
    default: /* Q8_0 */
        memcpy(out->q, src + offsetof(so_block_q8_0, qs), 32);
    }
}

static inline void chunk32(const so_mm *a, so_dtype dtype, long row, int first, int n, float *acc) {
    bool has_min = dtype == SO_DTYPE_Q4_1 || dtype == SO_DTYPE_Q5_1;
    int n_blocks = a->act.k / 32;
    for (int b = 0; b < n_blocks; b++) {
        uint8_t copy[BLOCK_BYTES_MAX];
        block32 w;
        decode32(dtype, block_at(a, dtype, row, b, copy), &w);
        for (int i = 0; i < n; i++) {
            const int8_t *x = a->act.q + (size_t)(first + i) * (size_t)a->act.k + 32 * b;
            const so_q32 *xb = a->act.blocks32 + (size_t)(first + i) * (size_t)n_blocks + b;
            int32_t isum = 0;
            for (int e = 0; e < 32; e++)
                isum += w.q[e] * x[e];
            acc[i] = fmaf(w.d * xb->d, (float)isum, acc[i]);
            if (has_min)
                acc[i] = fmaf(w.m, xb->s, acc[i]);
        }
    }
}

/* ---- blocks of 256 ---- */

/* The scales of a block in one form for all five types:
 *
 *   types with minima (Q2_K Q4_K Q5_K)   element = d·s·q − dmin·m
 *   the others (Q3_K Q6_K)               element = d·s·(q − offset); m holds offset·s, so that
 *                                        Σ s·(q − offset)·x = Σ s·q·x − Σ m·Σx
 *
 * Q4_K and Q5_K have 8 sub-blocks of 32 elements and fill 8 entries; the others have 16 sub-blocks
 * of 16 elements. */
typedef struct k_scales {
    int16_t s[16], m[16];
    float d, dmin;
} k_scales;

static void scales_q2_k(const uint8_t *block, k_scales *k) {
    const uint8_t *scales = block + offsetof(so_block_q2_k, scales);
    for (int j = 0; j < 16; j++) {
        k->s[j] = scales[j] & 15;
        k->m[j] = scales[j] >> 4;
    }
    k->d = half_at(block + offsetof(so_block_q2_k, d));
    k->dmin = half_at(block + offsetof(so_block_q2_k, dmin));
}

static void scales_q3_k(const uint8_t *block, k_scales *k) {
    for (int j = 0; j < 16; j++) {
        k->s[j] = (int16_t)(so_scale_k3(block + offsetof(so_block_q3_k, scales), j) - 32);
        k->m[j] = (int16_t)(4 * k->s[j]);
    }
    k->d = half_at(block + offsetof(so_block_q3_k, d));
    k->dmin = 0;
}

/* Q4_K and Q5_K have the same head. */
static void scales_q4_k(const uint8_t *block, k_scales *k) {
    for (int j = 0; j < 8; j++) {
        int s, m;
        so_scale_min_k4(block + offsetof(so_block_q4_k, scales), j, &s, &m);
        k->s[j] = (int16_t)s;
        k->m[j] = (int16_t)m;
    }
    k->d = half_at(block + offsetof(so_block_q4_k, d));
    k->dmin = half_at(block + offsetof(so_block_q4_k, dmin));
}

static void scales_q6_k(const uint8_t *block, k_scales *k) {
    const int8_t *scales = (const int8_t *)block + offsetof(so_block_q6_k, scales);
    for (int j = 0; j < 16; j++) {
        k->s[j] = scales[j];
        k->m[j] = (int16_t)(32 * scales[j]);
    }
    k->d = half_at(block + offsetof(so_block_q6_k, d));
    k->dmin = 0;
}

typedef struct block256 {
    uint8_t q[256];
    k_scales k;
    bool has_min;
    int sub; /* elements per sub-block */
} block256;

static void quants_q2_k(const so_block_q2_k *b, uint8_t *q) {
    for (int i = 0; i < 256; i++)
        q[i] = b->qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
}

static void quants_q3_k(const so_block_q3_k *b, uint8_t *q) {
    for (int i = 0; i < 256; i++) {
        int low = b->qs[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3;
        int high = b->hmask[i % 32] >> (i / 32) & 1;
        q[i] = (uint8_t)(low | high << 2);
    }
}

static void quants_q4_k(const uint8_t *qs, uint8_t *q) {
    for (int i = 0; i < 256; i++)
        q[i] = qs[i / 64 * 32 + i % 32] >> (i % 64 / 32 * 4) & 15;
}

static void quants_q5_k(const so_block_q5_k *b, uint8_t *q) {
    quants_q4_k(b->qs, q);
    for (int i = 0; i < 256; i++)
        q[i] = (uint8_t)(q[i] | (b->qh[i % 32] >> (i / 32) & 1) << 4);
}

static void quants_q6_k(const so_block_q6_k *b, uint8_t *q) {
    for (int i = 0; i < 256; i++) {
        int half = i / 128, quarter = i % 128 / 32, l = i % 32;
        int low = b->ql[64 * half + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
        int high = b->qh[32 * half + l] >> (2 * quarter) & 3;
        q[i] = (uint8_t)(low | high << 4);
    }
}

static inline void decode256(so_dtype dtype, const uint8_t *src, block256 *out) {
    union {
        so_block_q2_k q2;
        so_block_q3_k q3;
        so_block_q4_k q4;
        so_block_q5_k q5;
        so_block_q6_k q6;
    } b;
    memcpy(&b, src, (size_t)so_dtype_get(dtype)->block_bytes);
    out->has_min = dtype == SO_DTYPE_Q2_K || dtype == SO_DTYPE_Q4_K || dtype == SO_DTYPE_Q5_K;
    out->sub = dtype == SO_DTYPE_Q4_K || dtype == SO_DTYPE_Q5_K ? 32 : 16;
    switch (dtype) {
    case SO_DTYPE_Q2_K:
        quants_q2_k(&b.q2, out->q);
        scales_q2_k(src, &out->k);
        break;
    case SO_DTYPE_Q3_K:
        quants_q3_k(&b.q3, out->q);
        scales_q3_k(src, &out->k);
        break;
    case SO_DTYPE_Q4_K:
        quants_q4_k(b.q4.qs, out->q);
        scales_q4_k(src, &out->k);
        break;
    case SO_DTYPE_Q5_K:
        quants_q5_k(&b.q5, out->q);
        scales_q4_k(src, &out->k);
        break;
    default: /* Q6_K */
        quants_q6_k(&b.q6, out->q);
        scales_q6_k(src, &out->k);
    }
}

static float dot256(const block256 *w, const int8_t *x, const so_q256 *xb, float acc) {
    const int16_t *sums = w->sub == 16 ? xb->sum16 : xb->sum32;
    int32_t isum = 0, msum = 0;
    for (int j = 0; j < 256 / w->sub; j++) {
        int32_t part = 0;
        for (int e = 0; e < w->sub; e++)
            part += w->q[w->sub * j + e] * x[w->sub * j + e];
        isum += w->k.s[j] * part;
        msum += w->k.m[j] * sums[j];
    }
    if (!w->has_min)
        return fmaf(w->k.d * xb->d, (float)(isum - msum), acc);
    acc = fmaf(w->k.d * xb->d, (float)isum, acc);
    return fmaf(-(w->k.dmin * xb->d), (float)msum, acc);
}

static inline void chunk256(const so_mm *a, so_dtype dtype, long row, int first, int n,
                            float *acc) {
    int n_blocks = a->act.k / 256;
    for (int b = 0; b < n_blocks; b++) {
        uint8_t copy[BLOCK_BYTES_MAX];
        block256 w;
        decode256(dtype, block_at(a, dtype, row, b, copy), &w);
        for (int i = 0; i < n; i++) {
            size_t at = (size_t)(first + i) * (size_t)n_blocks + (size_t)b;
            acc[i] = dot256(&w, a->act.q + 256 * at, a->act.blocks256 + at, acc[i]);
        }
    }
}

/* ---- float weights ---- */

static inline float weight_at(so_dtype dtype, const uint8_t *row, int i) {
    float f;
    uint16_t h;
    if (dtype == SO_DTYPE_F32) {
        memcpy(&f, row + 4 * (size_t)i, sizeof f);
        return f;
    }
    memcpy(&h, row + 2 * (size_t)i, sizeof h);
    return dtype == SO_DTYPE_F16 ? so_f16_to_f32(h) : so_bf16_to_f32(h);
}

static inline void chunk_float(const so_mm *a, so_dtype dtype, const uint8_t *row, int first, int n,
                               float *acc) {
    for (int i = 0; i < n; i++) {
        const float *x = a->act.x + (size_t)(first + i) * (size_t)a->act.k;
        float lane[16] = {0};
        for (int e = 0; e < a->act.k; e++)
            lane[e % 16] = fmaf(weight_at(dtype, row, e), x[e], lane[e % 16]);
        for (int width = 8; width > 0; width /= 2)
            for (int l = 0; l < width; l++)
                lane[l] += lane[l + width];
        acc[i] = lane[0];
    }
}

/* ---- one function per dtype ---- */

static inline void rows(const so_mm *a, so_dtype dtype, long begin, long end) {
    for (long r = begin; r < end; r++) {
        for (int first = 0; first < a->act.n; first += CHUNK) {
            int n = SO_MIN(CHUNK, a->act.n - first);
            float acc[CHUNK] = {0};
            if (so_dtype_is_float(dtype))
                chunk_float(a, dtype, a->w + (size_t)r * a->row_bytes, first, n, acc);
            else if (so_dtype_get(dtype)->block_len == 32)
                chunk32(a, dtype, r, first, n, acc);
            else
                chunk256(a, dtype, r, first, n, acc);
            for (int i = 0; i < n; i++)
                a->out[(size_t)(first + i) * (size_t)a->m + (size_t)r] =
                    a->bias ? acc[i] + a->bias[r] : acc[i];
        }
    }
}

#define MATMUL(name, dtype) \
    void so_mm_scalar_##name(const so_mm *a, long begin, long end) { rows(a, dtype, begin, end); }
SO_MM_DTYPES(MATMUL)
