/* Matrix products for x86, written once in terms of SIMD operations that simd_avx2.h and
 * simd_avx512.h define. This file multiplies weights in the file's layout; it includes floats_x86.h
 * for float weights and packed_x86.h for packed ones.
 *
 * In this file a tile is LANES rows of weights (in packed_x86.h it is 32). Their blocks are
 * transposed while they are decoded, so that a vector holds four consecutive elements of each row,
 * one row per 32-bit lane:
 *
 *      row 0   row 1   …   row 7         one vector: elements 4c … 4c+3 of every row of the tile
 *     abcd     abcd        abcd
 *
 * One broadcast of four activation bytes is then multiplied with all rows at once. Each lane sums
 * one row; nothing is added across lanes. A block is decoded once and used for all activation rows
 * of a chunk. If fewer than LANES rows are left, the last tile starts earlier so as to be full, and
 * the rows that belong to the tile before are not stored. A matrix of fewer than LANES rows is left
 * to the scalar kernel, which gives the same bits. The SIMD operations:
 *
 *   vi, vf                     LANES 32-bit integers, LANES floats
 *   rowset                     address and stride of the LANES rows of a tile
 *   vi_lanes(rows, off, j)     16 bytes at `off` of each of the rows j, j + 4, j + 8, …
 *   vi_gather(rows, off)       the 4 bytes at `off` of every row
 *   vi_and vi_or vi_add8 vi_add32 vi_sub32 vi_equal8 vi_shl vi_shr (16-bit)
 *   vi_bcast(p)                the 4 bytes at p in every lane
 *   vi_spread_byte(v, c)       byte c of every lane, four times
 *   vi_mac(p, w, x)            p + w·x, w unsigned and x signed bytes, four per lane. With 32-byte
 *                              vectors p holds 16-bit sums, which stay exact for MAC_LIMIT(b) calls
 *                              in a row if w has b bits
 *   vi_widen_add(isum, p)      isum + p, with p widened to 32-bit sums
 *   vi_mac_q8(isum, w, x)      isum + w·x for Q8_0 weights plus Q8_OFFSET (0 where w is signed)
 *   vi_scale(v, j, is_signed)  byte j of every lane, in the form of vi_scaled's operand s
 *   vi_scaled(isum, p, s)      isum + p·s, with p widened as above
 *   vi_pair(v, j, is_signed)   bytes 2j and 2j + 1 of every lane as two int16
 *   vi_dot2(m, x)              Σ of both int16 products in a lane
 *
 * Included by the x86 kernels_*.c only, after rows_x86.h. Keeps no state; any thread. */

#define BLOCK_BYTES(dtype)                              \
    ((dtype) == SO_DTYPE_Q4_0   ? sizeof(so_block_q4_0) \
     : (dtype) == SO_DTYPE_Q4_1 ? sizeof(so_block_q4_1) \
     : (dtype) == SO_DTYPE_Q5_0 ? sizeof(so_block_q5_0) \
     : (dtype) == SO_DTYPE_Q5_1 ? sizeof(so_block_q5_1) \
     : (dtype) == SO_DTYPE_Q8_0 ? sizeof(so_block_q8_0) \
     : (dtype) == SO_DTYPE_Q2_K ? sizeof(so_block_q2_k) \
     : (dtype) == SO_DTYPE_Q3_K ? sizeof(so_block_q3_k) \
     : (dtype) == SO_DTYPE_Q4_K ? sizeof(so_block_q4_k) \
     : (dtype) == SO_DTYPE_Q5_K ? sizeof(so_block_q5_k) \
                                : sizeof(so_block_q6_k))

#include "backend/cpu/matmul_scalar.h"

_Static_assert(SO_MM_GRAIN % LANES == 0, "a thread's rows must end with a tile");
enum { CHUNK = 64 }; /* activation rows whose sums are kept at once */

/* Loads 16 bytes of every row and transposes them into four vectors. */
INLINE void transpose16(rowset rows, size_t off, vi *out) {
    vi a = vi_lanes(rows, off, 0), b = vi_lanes(rows, off, 1);
    vi c = vi_lanes(rows, off, 2), d = vi_lanes(rows, off, 3);
    vi ab0 = vi_unpack32l(a, b), ab1 = vi_unpack32h(a, b);
    vi cd0 = vi_unpack32l(c, d), cd1 = vi_unpack32h(c, d);
    out[0] = vi_unpack64l(ab0, cd0);
    out[1] = vi_unpack64h(ab0, cd0);
    out[2] = vi_unpack64l(ab1, cd1);
    out[3] = vi_unpack64h(ab1, cd1);
}

INLINE void transpose32(rowset rows, size_t off, vi *out) {
    transpose16(rows, off, out);
    transpose16(rows, off + 16, out + 4);
}

INLINE vi vi_bits(vi v, int shift, uint8_t mask) {
    return vi_and(vi_shr(v, shift), vi_set8((char)mask));
}

/* ---- tiles ---- */

typedef struct tile {
    rowset rows;
    long first; /* row in lane 0 */
    int skip;   /* leading lanes that are not stored */
} tile;

INLINE tile tile_at(const so_mm *a, long r, long end) {
    tile t = {.first = SO_MIN(r, end - LANES)};
    t.first = SO_MAX(t.first, 0);
    t.skip = (int)(r - t.first);
    t.rows = (rowset){a->w + (size_t)t.first * a->row_bytes, a->row_bytes};
    return t;
}

/* Prefetches part `b` of the memory after the tile, which the next tile reads. */
INLINE void prefetch_next(const tile *t, int b, size_t block_bytes) {
    const uint8_t *next = t->rows.p + LANES * (t->rows.stride + block_bytes * (size_t)b);
    for (size_t i = 0; i < LANES * block_bytes; i += 64)
        _mm_prefetch((const char *)next + i, _MM_HINT_T0);
}

INLINE void tile_store(const so_mm *a, const tile *t, int first, int n, const vf *acc) {
    vf bias = vf_set1(0);
    if (a->bias)
        bias = vf_load(a->bias + t->first);
    for (int i = 0; i < n; i++) {
        float lanes[LANES];
        vf v = a->bias ? vf_add(acc[i], bias) : acc[i];
        float *out = a->out + (size_t)(first + i) * (size_t)a->m + (size_t)t->first;
        vf_store(t->skip ? lanes : out, v);
        if (t->skip)
            memcpy(out + t->skip, lanes + t->skip, (size_t)(LANES - t->skip) * sizeof(float));
    }
}

/* ---- blocks of 32 ---- */

typedef struct block32 {
    vi q[8];
    vf d, m;
} block32;

INLINE void nibbles(rowset rows, size_t off, vi *q) {
    transpose16(rows, off, q);
    UNROLL for (int i = 0; i < 4; i++) {
        q[i + 4] = vi_bits(q[i], 4, 15);
        q[i] = vi_bits(q[i], 0, 15);
    }
}

/* Bits 4c … 4c+3 of every row's 32 become bit 4 of the four bytes of vector c. */
INLINE void fifth_bits(vi qh, vi *q) {
    UNROLL for (int c = 0; c < 8; c++) {
        vi byte = vi_spread_byte(qh, c / 2);
        vi bit = vi_set32((int)(0x08040201u << (4 * (c % 2))));
        q[c] = vi_or(q[c], vi_and(vi_equal8(vi_and(byte, bit), bit), vi_set8(16)));
    }
}

INLINE void decode32(so_dtype dtype, rowset rows, size_t off, block32 *w) {
    vi head = vi_gather(rows, off); /* d, and m if the type has one */
    w->d = vf_half_low(head);
    w->m = vf_half_high(head);
    switch (dtype) {
    case SO_DTYPE_Q4_0:
        nibbles(rows, off + offsetof(so_block_q4_0, qs), w->q);
        break;
    case SO_DTYPE_Q4_1:
        nibbles(rows, off + offsetof(so_block_q4_1, qs), w->q);
        break;
    case SO_DTYPE_Q5_0:
        nibbles(rows, off + offsetof(so_block_q5_0, qs), w->q);
        fifth_bits(vi_gather(rows, off + offsetof(so_block_q5_0, qh)), w->q);
        break;
    case SO_DTYPE_Q5_1:
        nibbles(rows, off + offsetof(so_block_q5_1, qs), w->q);
        fifth_bits(vi_gather(rows, off + offsetof(so_block_q5_1, qh)), w->q);
        break;
    default: /* Q8_0 */
        transpose32(rows, off + offsetof(so_block_q8_0, qs), w->q);
        UNROLL for (int i = 0; i < 8; i++) w->q[i] = vi_add8(w->q[i], vi_set8((char)Q8_OFFSET));
    }
}

INLINE int offset32(so_dtype dtype) {
    return dtype == SO_DTYPE_Q4_0   ? 8
           : dtype == SO_DTYPE_Q5_0 ? 16
           : dtype == SO_DTYPE_Q8_0 ? Q8_OFFSET
                                    : 0;
}

/* Σ q·x over a block, for `n` activation rows that are `stride` bytes apart. */
INLINE void dots32(so_dtype dtype, const block32 *w, const int8_t *x, size_t stride, const int n,
                   vi *isum) {
    const int limit = MAC_LIMIT(dtype == SO_DTYPE_Q4_0 || dtype == SO_DTYPE_Q4_1 ? 4 : 5);
    vi part[4];
    UNROLL for (int i = 0; i < n; i++) isum[i] = part[i] = vi_set32(0);
    UNROLL for (int c = 0; c < 8; c++) {
        UNROLL for (int i = 0; i < n; i++) {
            vi xb = vi_bcast(x + (size_t)i * stride + 4 * c);
            if (dtype == SO_DTYPE_Q8_0)
                isum[i] = vi_mac_q8(isum[i], w->q[c], xb);
            else
                part[i] = vi_mac(part[i], w->q[c], xb);
            if (dtype != SO_DTYPE_Q8_0 && (c + 1) % limit == 0) {
                isum[i] = vi_widen_add(isum[i], part[i]);
                part[i] = vi_set32(0);
            }
        }
    }
}

INLINE void step32(const so_mm *a, so_dtype dtype, const block32 *w, int row, int b, const int n,
                   vf *acc) {
    size_t k = (size_t)a->act.k, n_blocks = k / 32, at = (size_t)row * n_blocks + (size_t)b;
    const so_q32 *xb = a->act.blocks32 + at;
    bool has_min = dtype == SO_DTYPE_Q4_1 || dtype == SO_DTYPE_Q5_1;
    vi isum[4];
    dots32(dtype, w, a->act.q + 32 * at, k, n, isum);
    UNROLL for (int i = 0; i < n; i++, xb += n_blocks) {
        if (offset32(dtype))
            isum[i] = vi_sub32(isum[i], vi_set32(offset32(dtype) * xb->sum));
        acc[i] = vf_fma(vf_mul(w->d, vf_set1(xb->d)), vf_from_int(isum[i]), acc[i]);
        if (has_min)
            acc[i] = vf_fma(w->m, vf_set1(xb->s), acc[i]);
    }
}

INLINE void chunk32(const so_mm *a, so_dtype dtype, const tile *t, int first, int n, vf *acc) {
    size_t block_bytes = BLOCK_BYTES(dtype);
    for (int b = 0; b < a->act.k / 32; b++) {
        block32 w;
        prefetch_next(t, b, block_bytes);
        decode32(dtype, t->rows, (size_t)b * block_bytes, &w);
        int i = 0;
        for (; i + 4 <= n; i += 4)
            step32(a, dtype, &w, first + i, b, 4, acc + i);
        if (n - i == 3)
            step32(a, dtype, &w, first + i, b, 3, acc + i);
        else if (n - i == 2)
            step32(a, dtype, &w, first + i, b, 2, acc + i);
        else if (n - i == 1)
            step32(a, dtype, &w, first + i, b, 1, acc + i);
    }
}

/* ---- blocks of 256 ---- */

typedef struct block256 {
    vi q[64]; /* 8 vectors per 32 elements */
    vi s[16]; /* scales, a vector for each sub-block */
    vi m[8];  /* minima, a vector per two sub-blocks; scales if the type has no minima */
    vf d, dmin;
} block256;

/* s, m: the scales and minima as bytes, those of sub-blocks 4i … 4i+3 in vector i. */
INLINE void spread_scales(block256 *w, const vi *s, const vi *m, const int n_sub, bool is_signed) {
    UNROLL for (int j = 0; j < n_sub; j++) w->s[j] = vi_scale(s[j / 4], j % 4, is_signed);
    UNROLL for (int j = 0; j < n_sub / 2; j++) w->m[j] = vi_pair(m[j / 2], j % 2, is_signed);
}

INLINE void scales_q2_k(rowset rows, size_t off, block256 *w) {
    vi s[4], m[4], head = vi_gather(rows, off + offsetof(so_block_q2_k, d));
    transpose16(rows, off + offsetof(so_block_q2_k, scales), m);
    UNROLL for (int i = 0; i < 4; i++) {
        s[i] = vi_bits(m[i], 0, 15);
        m[i] = vi_bits(m[i], 4, 15);
    }
    spread_scales(w, s, m, 16, false);
    w->d = vf_half_low(head);
    w->dmin = vf_half_high(head);
}

/* Only 12 bytes of packed scales may be read; a copy pads them to the 16 that transpose16 loads. */
INLINE void scales_q3_k(rowset rows, size_t off, block256 *w) {
    uint8_t copy[LANES][16];
    for (int r = 0; r < LANES; r++) {
        memcpy(copy[r], rows.p + (size_t)r * rows.stride + off + offsetof(so_block_q3_k, scales),
               12);
        memset(copy[r] + 12, 0, 4);
    }
    vi u[4], s[4];
    transpose16((rowset){copy[0], 16}, 0, u);
    UNROLL for (int i = 0; i < 4; i++) {
        vi low = vi_bits(u[i % 2], i / 2 * 4, 15), high = vi_shl(vi_bits(u[2], 2 * i, 3), 4);
        s[i] = vi_add8(vi_or(low, high), vi_set8(-32));
    }
    spread_scales(w, s, s, 16, true);
    w->d = vf_half_high(vi_gather(rows, off + offsetof(so_block_q3_k, d) - 2));
}

/* Q4_K and Q5_K have the same head: 16 bytes of d, dmin and packed scales. */
INLINE void scales_q4_k(rowset rows, size_t off, block256 *w) {
    vi u[4], s[2], m[2];
    transpose16(rows, off, u);
    s[0] = vi_bits(u[1], 0, 63);
    m[0] = vi_bits(u[2], 0, 63);
    s[1] = vi_or(vi_bits(u[3], 0, 15), vi_bits(u[1], 2, 48));
    m[1] = vi_or(vi_bits(u[3], 4, 15), vi_bits(u[2], 2, 48));
    spread_scales(w, s, m, 8, false);
    w->d = vf_half_low(u[0]);
    w->dmin = vf_half_high(u[0]);
}

INLINE void scales_q6_k(rowset rows, size_t off, block256 *w) {
    vi s[4];
    transpose16(rows, off + offsetof(so_block_q6_k, scales), s);
    spread_scales(w, s, s, 16, true);
    w->d = vf_half_high(vi_gather(rows, off + offsetof(so_block_q6_k, d) - 2));
}

INLINE void quants_q2_k(rowset rows, size_t off, vi *q) {
    for (int half = 0; half < 2; half++, q += 32) {
        vi t[8];
        transpose32(rows, off + offsetof(so_block_q2_k, qs) + 32 * (size_t)half, t);
        UNROLL for (int i = 0; i < 32; i++) q[i] = vi_bits(t[i % 8], i / 8 * 2, 3);
    }
}

INLINE void quants_q3_k(rowset rows, size_t off, vi *q) {
    vi high[8];
    quants_q2_k(rows, off + offsetof(so_block_q3_k, qs) - offsetof(so_block_q2_k, qs), q);
    transpose32(rows, off + offsetof(so_block_q3_k, hmask), high);
    UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 0; i < 8; i++) q[8 * j + i] =
        vi_or(q[8 * j + i], vi_shl(vi_bits(high[i], j, 1), 2));
}

INLINE void quants_q4_k(rowset rows, size_t off, vi *q) {
    for (int j = 0; j < 4; j++, q += 16) {
        transpose32(rows, off + 32 * (size_t)j, q);
        UNROLL for (int i = 0; i < 8; i++) {
            q[i + 8] = vi_bits(q[i], 4, 15);
            q[i] = vi_bits(q[i], 0, 15);
        }
    }
}

INLINE void quants_q5_k(rowset rows, size_t off, vi *q) {
    vi high[8];
    quants_q4_k(rows, off + offsetof(so_block_q5_k, qs), q);
    transpose32(rows, off + offsetof(so_block_q5_k, qh), high);
    UNROLL for (int j = 0; j < 8; j++) UNROLL for (int i = 0; i < 8; i++) q[8 * j + i] =
        vi_or(q[8 * j + i], vi_shl(vi_bits(high[i], j, 1), 4));
}

INLINE void quants_q6_k(rowset rows, size_t off, vi *q) {
    for (int half = 0; half < 2; half++, q += 32) {
        vi low[16], high[8];
        transpose32(rows, off + 64 * (size_t)half, low);
        transpose32(rows, off + 64 * (size_t)half + 32, low + 8);
        transpose32(rows, off + offsetof(so_block_q6_k, qh) + 32 * (size_t)half, high);
        UNROLL for (int i = 0; i < 32; i++) q[i] = vi_or(
            vi_bits(low[i % 16], i / 16 * 4, 15), vi_shl(vi_bits(high[i % 8], i / 8 * 2, 3), 4));
    }
}

INLINE void decode256(so_dtype dtype, rowset rows, size_t off, block256 *w) {
    switch (dtype) {
    case SO_DTYPE_Q2_K:
        scales_q2_k(rows, off, w);
        quants_q2_k(rows, off, w->q);
        break;
    case SO_DTYPE_Q3_K:
        scales_q3_k(rows, off, w);
        quants_q3_k(rows, off, w->q);
        break;
    case SO_DTYPE_Q4_K:
        scales_q4_k(rows, off, w);
        quants_q4_k(rows, off + offsetof(so_block_q4_k, qs), w->q);
        break;
    case SO_DTYPE_Q5_K:
        scales_q4_k(rows, off, w);
        quants_q5_k(rows, off, w->q);
        break;
    default: /* Q6_K */
        scales_q6_k(rows, off, w);
        quants_q6_k(rows, off, w->q);
    }
}

INLINE int bits_of_k(so_dtype dtype) {
    return dtype == SO_DTYPE_Q6_K ? 6 : dtype == SO_DTYPE_Q5_K ? 5 : 4;
}

/* Σ_j s_j Σ q·x over a block of 256 for `n` activation rows. */
INLINE void dots256(so_dtype dtype, const block256 *w, const int8_t *x, size_t stride, const int n,
                    vi *isum) {
    const int sub = dtype == SO_DTYPE_Q4_K || dtype == SO_DTYPE_Q5_K ? 8 : 4; /* vectors */
    const int limit = SO_MIN(sub, MAC_LIMIT(bits_of_k(dtype)));
    UNROLL for (int i = 0; i < n; i++) isum[i] = vi_set32(0);
    for (int c0 = 0; c0 < 64; c0 += sub) {
        vi part[4];
        UNROLL for (int i = 0; i < n; i++) part[i] = vi_set32(0);
        UNROLL for (int c = 0; c < sub; c++) {
            UNROLL for (int i = 0; i < n; i++) {
                vi xb = vi_bcast(x + (size_t)i * stride + 4 * (c0 + c));
                part[i] = vi_mac(part[i], w->q[c0 + c], xb);
                if ((c + 1) % limit == 0) {
                    isum[i] = vi_scaled(isum[i], part[i], w->s[c0 / sub]);
                    part[i] = vi_set32(0);
                }
            }
        }
    }
}

INLINE void step256(const so_mm *a, so_dtype dtype, const block256 *w, int row, int b, const int n,
                    vf *acc) {
    size_t k = (size_t)a->act.k, n_blocks = k / 256, at = (size_t)row * n_blocks + (size_t)b;
    const so_q256 *xb = a->act.blocks256 + at;
    bool wide = dtype == SO_DTYPE_Q4_K || dtype == SO_DTYPE_Q5_K;
    const int n_pairs = wide ? 4 : 8;
    vi isum[4];
    dots256(dtype, w, a->act.q + 256 * at, k, n, isum);
    UNROLL for (int i = 0; i < n; i++, xb += n_blocks) {
        const int16_t *sums = wide ? xb->sum32 : xb->sum16;
        vi msum = vi_set32(0);
        UNROLL for (int j = 0; j < n_pairs; j++) msum =
            vi_add32(msum, vi_dot2(w->m[j], vi_bcast(sums + 2 * j)));
        vf dx = vf_set1(xb->d);
        if (dtype == SO_DTYPE_Q6_K)
            isum[i] = vi_sub32(isum[i], vi_shl32(msum, 5));
        if (dtype == SO_DTYPE_Q3_K)
            isum[i] = vi_sub32(isum[i], vi_shl32(msum, 2));
        acc[i] = vf_fma(vf_mul(w->d, dx), vf_from_int(isum[i]), acc[i]);
        if (dtype != SO_DTYPE_Q6_K && dtype != SO_DTYPE_Q3_K)
            acc[i] = vf_fnma(vf_mul(w->dmin, dx), vf_from_int(msum), acc[i]);
    }
}

INLINE void chunk256(const so_mm *a, so_dtype dtype, const tile *t, int first, int n, vf *acc) {
    size_t block_bytes = BLOCK_BYTES(dtype);
    for (int b = 0; b < a->act.k / 256; b++) {
        block256 w;
        prefetch_next(t, b, block_bytes);
        decode256(dtype, t->rows, (size_t)b * block_bytes, &w);
        int i = 0;
        for (; i + 4 <= n; i += 4)
            step256(a, dtype, &w, first + i, b, 4, acc + i);
        if (n - i == 3)
            step256(a, dtype, &w, first + i, b, 3, acc + i);
        else if (n - i == 2)
            step256(a, dtype, &w, first + i, b, 2, acc + i);
        else if (n - i == 1)
            step256(a, dtype, &w, first + i, b, 1, acc + i);
    }
}

INLINE void quantized(const so_mm *a, so_dtype dtype, bool wide, long begin, long end) {
    vf acc[CHUNK];
    SO_ASSERT_OP(end, >=, LANES);
    for (long r = begin; r < end; r += LANES) {
        tile t = tile_at(a, r, end);
        for (int first = 0; first < a->act.n; first += CHUNK) {
            int n = SO_MIN(CHUNK, a->act.n - first);
            for (int i = 0; i < n; i++)
                acc[i] = vf_set1(0);
            if (wide)
                chunk256(a, dtype, &t, first, n, acc);
            else
                chunk32(a, dtype, &t, first, n, acc);
            tile_store(a, &t, first, n, acc);
        }
    }
}

#include "backend/cpu/floats_x86.h"
#include "backend/cpu/packed_x86.h"

/* ---- one function per dtype ---- */

#define MATMUL(name, dtype)                                                           \
    static void mm_##name(const so_mm *a, long begin, long end) {                     \
        if (dtype == SO_DTYPE_F32 || dtype == SO_DTYPE_F16 || dtype == SO_DTYPE_BF16) \
            floats(a, dtype, begin, end);                                             \
        else if (a->tile_bytes)                                                       \
            packed(a, dtype, dtype >= SO_DTYPE_Q2_K, begin, end);                     \
        else if (a->m < LANES)                                                        \
            so_mm_scalar_##name(a, begin, end);                                       \
        else                                                                          \
            quantized(a, dtype, dtype >= SO_DTYPE_Q2_K, begin, end);                  \
    }
SO_MM_DTYPES(MATMUL)

#define MM_ENTRY(name, dtype) [dtype] = mm_##name,
#define MATMULS .matmul = {SO_MM_DTYPES(MM_ENTRY)}, .multiply_all = multiply_all
#define ROW_KERNELS                                                                             \
    .quantize32 = quantize32, .quantize256 = quantize256, .rms_norm = rms_norm,                 \
    .layer_norm = layer_norm, .rotate = rotate, .scale = scale_row, .add = add,                 \
    .silu_mul = silu_mul, .gelu_mul = gelu_mul, .gelu = gelu, .exp = exp_row, .to_f16 = to_f16, \
    .argmax = argmax, .attn_f16 = {interleave, scores_f16, values_f16},                         \
    .attn_f32 = {interleave, scores_f32, values_f32},                                           \
    .attn_q8 = {queries_q8, scores_q8, values_q8}, .entry_q8 = entry_q8, .softmax = softmax,    \
    .merge = merge, .read_all = read_all
