/* Matrix products with packed weights (pack.h) for x86, written once in the SIMD operations
 * of simd_avx2.h and simd_avx512.h. The arithmetic follows the contract of kernels.h; results are
 * bit-identical to matmul_x86.h.
 *
 * A tile is 32 rows of weights, which are 32 outputs. A column is LANES of these rows, one per
 * 32-bit lane of a vector. A step computes two columns:
 *
 *   rows of the tile   0 … 7      8 … 15     16 … 23    24 … 31
 *   row groups         group 0               group 1
 *   64-byte vectors    column 0              column 1              one step
 *   32-byte vectors    column 0   column 1   column 2   column 3   two steps
 *
 * For every block of the tile the heads (scales and minima, see pack.h) of all columns are
 * converted. Then each step does this:
 *
 *   1. the packed words are decoded to bytes, once, into memory that stays in L1. The bytes are
 *      unsigned; if the type has an offset (8 for Q4_0, 128 for Q8_0, …), it is included. Only the
 *      bytes of Q8_0 without VNNI are signed and have no offset. For a few types and numbers of rows
 *      the words are decoded in step 2 instead (is_direct);
 *   2. activation rows are taken four at a time: four bytes of each are broadcast and multiplied
 *      with both columns, and products are added in integer registers, one output per lane. The
 *      start value of a sum cancels the offset, exactly;
 *   3. the block's sum is added to the float accumulators, which are in L1 too.
 *
 * A block's weights are first touched in the order in which they lie in memory (pack.h), to within a
 * few cache lines; later reads of the same words hit L1.
 *
 * A batch is computed in chunks of CHUNK activation rows; the weights of a tile stay cached
 * meanwhile. The activations of a long prompt do not fit L2. So the batch is divided into spans of
 * as many chunks as fit L2, and each span is multiplied with all weights of the thread before the
 * next.
 *
 * SIMD operations in addition to those of matmul_x86.h:
 *
 *   N_REGISTERS                  vector registers of the level
 *   HAS_VNNI                     1: vi_pmac adds in 32 bits; 0: pairs of products in 16 bits
 *   vi_pmac(p, w, x)             p + w·x, four bytes per lane
 *   vi_pmul(w, x)                w·x, four bytes per lane (only without HAS_VNNI)
 *   vi_pscaled(isum, p, s)       isum + s·p. With HAS_VNNI a lane of p is one sum, which must fit
 *                                int16; without it a lane holds two int16 sums
 *   vi_scale_even, vi_scale_odd  the operand s of vi_pscaled, from a pair of int16 scales
 *   vi_dot2_add(a, m, x)         a + both int16 products of a lane
 *   vi_pairs_u, vi_pairs_s       2·LANES bytes, unsigned or signed, widened to int16
 *   vf_halves(p)                 LANES fp16 numbers converted to floats
 *
 * Why 16 bits suffice for the partial sums of K types. F is the number of words per partial sum, x
 * is within ±127. Without VNNI a lane holds two partial sums of half as many products.
 *
 *   type   F   with VNNI: |Σ (q − offset)·x|    without VNNI: |Σ q·x|
 *   Q2_K   4   4·4·3·127  =  6096               4·2·3·127  =  3048
 *   Q3_K   4   4·4·4·127  =  8128               4·2·19·127 = 19304   (decoded as q + 12)
 *   Q4_K   8   8·4·8·127  = 32512               8·2·15·127 = 30480
 *   Q5_K   4   4·4·16·127 = 32512               4·2·31·127 = 31496
 *   Q6_K   2   2·4·32·127 = 32512               2·2·63·127 = 32004
 *
 * All are below 2^15. Included by matmul_x86.h. Keeps no state; any thread. */

#include "backend/cpu/columns_x86.h"

/* ---- blocks of 32 ---- */

/* Scales and minima of all columns. */
typedef struct phead32 {
    vf d[COLUMNS], m[COLUMNS];
} phead32;

/* Decoded words of two columns. */
typedef struct pblock32 {
    vi w[2][8];
} pblock32;

/* Bit c of every byte, moved to bit 4. */
INLINE vi fifth_bit(vi h, int c) {
    return vi_and(c < 4 ? vi_shl(h, 4 - c) : vi_shr(h, c - 4), vi_set8(16));
}

INLINE void pheads32(so_dtype dtype, const weight_tile *at, size_t b, phead32 *out) {
    UNROLL for (int c = 0; c < COLUMNS; c++) {
        const uint8_t *head = head_of(dtype, at, b, c < 2 * steps_of(at) ? c : 0);
        out->d[c] = vf_halves(head);
        out->m[c] = has_min32(dtype) ? vf_halves(head + 32) : vf_set1(0);
    }
}

INLINE void pdecode32(so_dtype dtype, const weight_tile *at, size_t b, int step, pblock32 *out) {
    UNROLL for (int j = 0; j < 2; j++) {
        const uint8_t *words = words_of(dtype, at, b, 2 * step + j);
        vi *w = out->w[j];
        if (dtype == SO_DTYPE_Q8_0) {
            UNROLL for (int c = 0; c < 8; c++) w[c] =
                HAS_VNNI ? word_at(words, c) : vi_xor(word_at(words, c), vi_set8((char)0x80));
            continue;
        }
        UNROLL for (int c = 0; c < 4; c++) {
            vi v = word_at(words, c);
            w[c] = vi_and(v, vi_set8(15));
            w[c + 4] = vi_bits(v, 4, 15);
        }
        if (dtype == SO_DTYPE_Q5_0 || dtype == SO_DTYPE_Q5_1) {
            vi high = word_at(words, 4);
            UNROLL for (int c = 0; c < 8; c++) w[c] = vi_or(w[c], fifth_bit(high, c));
        }
    }
}

/* Start value of a block's sum: −offset · Σ x. */
INLINE vi start32(so_dtype dtype, const so_q32 *xb) {
    switch (dtype) {
    case SO_DTYPE_Q4_0:
        return vi_bcast(&xb->neg8);
    case SO_DTYPE_Q5_0:
        return vi_shl32(vi_bcast(&xb->neg8), 1);
    case SO_DTYPE_Q8_0:
        return HAS_VNNI ? vi_shl32(vi_bcast(&xb->neg8), 4) : vi_set32(0);
    default:
        return vi_set32(0);
    }
}

/* Adds Σ q·x over a block to isum, for `n` activation rows that are `stride` bytes apart. */
INLINE void pdots32(so_dtype dtype, const pblock32 *w, const int8_t *x, size_t stride, const int n,
                    vi (*isum)[2]) {
    const int limit = dtype == SO_DTYPE_Q8_0                             ? 1
                      : dtype == SO_DTYPE_Q4_0 || dtype == SO_DTYPE_Q4_1 ? 8
                                                                         : 4;
    vi part[4][2];
    UNROLL for (int c = 0; c < 8; c++) UNROLL for (int i = 0; i < n; i++) {
        vi xb = vi_bcast(x + (size_t)i * stride + 4 * c);
        UNROLL for (int j = 0; j < 2; j++) {
            if (HAS_VNNI)
                isum[i][j] = vi_pmac(isum[i][j], w->w[j][c], xb);
            else if (dtype == SO_DTYPE_Q8_0)
                isum[i][j] = vi_mac_q8(isum[i][j], w->w[j][c], xb);
            else if (c % limit == 0)
                part[i][j] = vi_pmul(w->w[j][c], xb);
            else
                part[i][j] = vi_pmac(part[i][j], w->w[j][c], xb);
            if (!HAS_VNNI && dtype != SO_DTYPE_Q8_0 && (c + 1) % limit == 0)
                isum[i][j] = vi_widen_add(isum[i][j], part[i][j]);
        }
    }
}

/* Makes the compiler read decoded words from memory for each group of four activation rows. With 16
 * registers, gcc 12 keeps them in registers across several groups and spills the sums of each group
 * instead: 64 rows took 1.35 times as long. */
#if N_REGISTERS == 16
#define KEEP_IN_MEMORY(v) __asm__ volatile("" : "+m"(v))
#else
#define KEEP_IN_MEMORY(v) (void)(v)
#endif

/* Adds to acc the products of block b for the `n` activation rows that start at `row`. d and m:
 * scales and minima of the two columns. */
INLINE void ptile32(const so_mm *a, so_dtype dtype, const pblock32 *w, const vf *d, const vf *m,
                    size_t row, size_t b, const int n, vf (*acc)[COLUMNS]) {
    size_t k = (size_t)a->act.k, n_blocks = k / 32, at = row * n_blocks + b;
    const so_q32 *xb = a->act.blocks32 + at;
    vi isum[4][2];
    UNROLL for (int i = 0; i < n; i++) isum[i][0] = isum[i][1] =
        start32(dtype, xb + (size_t)i * n_blocks);
    pdots32(dtype, w, a->act.q + 32 * at, k, n, isum);
    UNROLL for (int i = 0; i < n; i++, xb += n_blocks) UNROLL for (int j = 0; j < 2; j++) {
        vf sum = vf_fma(vf_mul(d[j], vf_set1(xb->d)), vf_from_int(isum[i][j]), acc[i][j]);
        acc[i][j] = has_min32(dtype) ? vf_fma(m[j], vf_set1(xb->s), sum) : sum;
    }
}

INLINE void pchunk32(const so_mm *a, so_dtype dtype, const weight_tile *at, size_t first, int n,
                     vf (*acc)[COLUMNS]) {
    for (size_t b = 0; b < (size_t)a->act.k / 32; b++) {
        phead32 h;
        prefetch_ahead(dtype, at, b);
        if (at->out && b < (size_t)n)
            prefetch_result(a, at, first + b);
        pheads32(dtype, at, b, &h);
        NO_UNROLL for (int step = 0; step < steps_of(at); step++) {
            const vf *d = h.d + 2 * step, *m = h.m + 2 * step;
            pblock32 w;
            pdecode32(dtype, at, b, step, &w);
            if (n == 1) {
                ptile32(a, dtype, &w, d, m, first, b, 1, (vf(*)[COLUMNS])(acc[0] + 2 * step));
                continue;
            }
            pblock32 words = w;
            for (int i = 0, size; i < n; i += size) {
                KEEP_IN_MEMORY(words);
                size = tile_size(n - i, 4);
                vf(*sums)[COLUMNS] = (vf(*)[COLUMNS])(acc[i] + 2 * step);
#define TILE(c) ptile32(a, dtype, &words, d, m, first + (size_t)i, b, c, sums)
                TILE_CASES(size, 4)
#undef TILE
            }
        }
    }
}

/* ---- blocks of 256 ---- */

/* The heads of two columns. Types with sub-blocks of 32 elements fill only the first half of each
 * array. */
typedef struct phead256 {
    vi s[16][2];           /* scales for vi_pscaled, one per sub-block */
    vi sp[8][2], mp[8][2]; /* scales and minima as int16 pairs, for two sub-blocks */
    vf d[2], dmin[2];
} phead256;

/* A block: the heads of all columns and the words of the two columns of one step. */
typedef struct pblock256 {
    vi w[8][2][8];           /* decoded: [32 elements][column][word] */
    const uint8_t *words[2]; /* packed, by column */
    phead256 heads[STEPS];
    int step;
    prefetch next; /* what is prefetched while the block is used */
} pblock256;

/* Bits `from` and up of every byte, moved to bit `to` and masked. */
INLINE vi move_bits(vi v, int from, int to, int mask) {
    return vi_and(from < to ? vi_shl(v, to - from) : vi_shr(v, from - to), vi_set8((char)mask));
}

/* Decodes word i of elements 32s … 32s+31. */
INLINE vi pword256(so_dtype dtype, const uint8_t *words, const int s, const int i) {
    const int quarter = s % 4;
    const uint8_t *low = words + SO_PACK_WORD * so_pack_low_word(dtype, s);
    const uint8_t *high = words + SO_PACK_WORD * so_pack_high_word(dtype, s);
    vi v, h = word_at(high, i);
    switch (dtype) {
    case SO_DTYPE_Q2_K:
    case SO_DTYPE_Q3_K:
        v = vi_bits(word_at(low, i), 2 * quarter, 3);
        break;
    case SO_DTYPE_Q4_K:
    case SO_DTYPE_Q5_K:
        v = vi_bits(word_at(low, i), s % 2 * 4, 15);
        break;
    default: /* Q6_K */
        v = vi_bits(word_at(low, i), quarter / 2 * 4, 15);
        v = vi_or(v, move_bits(h, 2 * quarter, 4, 48));
    }
    if (dtype == SO_DTYPE_Q5_K)
        v = vi_or(v, move_bits(h, s, 4, 16));
    if (dtype == SO_DTYPE_Q3_K) /* q + 12, so that the offset is 16 */
        v = vi_add8(vi_or(v, move_bits(h, s, 2, 4)), vi_set8(12));
    return v;
}

INLINE void pscales256(so_dtype dtype, const uint8_t *head, const int j, phead256 *out) {
    const uint8_t *pairs = head + (has_min256(dtype) ? 64 : 32);
    const int n_pairs = sub_is_32(dtype) ? 4 : 8;
    out->d[j] = vf_halves(head);
    out->dmin[j] = has_min256(dtype) ? vf_halves(head + 32) : vf_set1(0);
    UNROLL for (int p = 0; p < n_pairs; p++) {
        vi v = dtype == SO_DTYPE_Q3_K || dtype == SO_DTYPE_Q6_K ? vi_pairs_s(pairs + 32 * p)
                                                                : vi_pairs_u(pairs + 32 * p);
        vi m = sub_is_32(dtype) ? vi_pairs_u(pairs + 128 + 32 * p) : vi_shr(v, 4);
        if (dtype == SO_DTYPE_Q2_K)
            v = vi_and(v, vi_set8(15));
        out->sp[p][j] = v;
        out->mp[p][j] = m;
        out->s[2 * p][j] = vi_scale_even(v);
        out->s[2 * p + 1][j] = vi_scale_odd(v);
    }
}

INLINE void pheads256(so_dtype dtype, const weight_tile *at, size_t b, pblock256 *out) {
    NO_UNROLL for (int step = 0; step < steps_of(at); step++) UNROLL for (int j = 0; j < 2; j++)
        pscales256(dtype, head_of(dtype, at, b, 2 * step + j), j, &out->heads[step]);
}

/* Decodes the words of two columns. With 64-byte vectors the columns have different words, and the
 * first column is decoded before the second. With 32-byte vectors they are halves of the same words
 * and are decoded alternately, 32 elements at a time. */
INLINE void pdecode256(so_dtype dtype, pblock256 *out) {
    /* Copied: after each compiler barrier gcc would load the members again. */
    const uint8_t *words[2] = {out->words[0], out->words[1]};
    UNROLL for (int i = 0; i < 16; i++) {
        const int s = STEPS == 1 ? i % 8 : i / 2, j = STEPS == 1 ? i / 8 : i % 2;
        UNROLL for (int c = 0; c < 8; c++) out->w[s][j][c] = pword256(dtype, words[j], s, c);
        if (STEPS == 2 && j == 0)
            continue;
        COMPILER_BARRIER;
        prefetch_batch(&out->next);
    }
}

/* Start value of partial sum f of elements 32 s … 32 s + 31: −offset · Σ x over its F words (see
 * the table at the top). */
INLINE vi pstart256(so_dtype dtype, const so_q256 *xb, int s, const int f) {
    if (!HAS_VNNI)
        return vi_set32(0);
    switch (dtype) {
    case SO_DTYPE_Q4_K:
        return vi_bcast(&xb->neg8_32[s]);
    case SO_DTYPE_Q3_K:
    case SO_DTYPE_Q5_K:
        return vi_bcast(&xb->neg16_16[2 * s + f]);
    case SO_DTYPE_Q6_K:
        return vi_bcast(&xb->neg32_8[4 * s + f]);
    default: /* Q2_K */
        return vi_set32(0);
    }
}

/* Σ of sub-block scales or minima times the activation sums of the sub-blocks; both come as pairs of
 * int16. */
INLINE vi psums256(const vi (*pairs)[2], int j, const int16_t *sums, const int n_pairs) {
    vi t = vi_set32(0);
    UNROLL for (int p = 0; p < n_pairs; p++) t =
        vi_dot2_add(t, pairs[p][j], vi_bcast(sums + 2 * p));
    return t;
}

/* Start value of the sum over a block. With HAS_VNNI, pstart256 has subtracted an offset for all
 * types but Q2_K. In Q4_K and Q5_K it serves only to keep partial sums within 16 bits, so it is
 * added back here. Without HAS_VNNI the offset of Q3_K and Q6_K is subtracted here. */
INLINE vi pcorrect256(so_dtype dtype, const phead256 *h, int j, const so_q256 *xb) {
    if (HAS_VNNI && sub_is_32(dtype))
        return vi_shl32(psums256(h->sp, j, xb->sum32, 4), dtype == SO_DTYPE_Q4_K ? 3 : 4);
    if (!HAS_VNNI && (dtype == SO_DTYPE_Q3_K || dtype == SO_DTYPE_Q6_K))
        return vi_sub32(vi_set32(0),
                        vi_shl32(psums256(h->sp, j, xb->sum16, 8), dtype == SO_DTYPE_Q3_K ? 4 : 5));
    return vi_set32(0);
}

/* Adds the scaled products of elements 32 s … 32 s + 31 of a block to isum, for `n` activation
 * rows. direct: the words are not decoded yet. */
INLINE void pdots256(const so_mm *a, so_dtype dtype, const pblock256 *w, const phead256 *h, int s,
                     size_t at, const int n, const bool direct, vi (*isum)[2]) {
    const int F = dtype == SO_DTYPE_Q4_K ? 8 : dtype == SO_DTYPE_Q6_K ? 2 : 4;
    size_t k = (size_t)a->act.k, n_blocks = k / 256;
    const int8_t *x = a->act.q + 256 * at + 32 * s;
    const so_q256 *xb = a->act.blocks256 + at;
    UNROLL for (int f = 0; f < 8 / F; f++) {
        vi part[4][2];
        UNROLL for (int i = 0; i < n; i++) part[i][0] = part[i][1] =
            pstart256(dtype, xb + (size_t)i * n_blocks, s, f);
        UNROLL for (int c = f * F; c < (f + 1) * F; c++) {
            vi word[2];
            UNROLL for (int j = 0; j < 2; j++) word[j] =
                direct ? pword256(dtype, w->words[j], s, c) : w->w[s][j][c];
            UNROLL for (int i = 0; i < n; i++) {
                vi xv = vi_bcast(x + (size_t)i * k + 4 * c);
                UNROLL for (int j = 0; j < 2; j++) part[i][j] =
                    !HAS_VNNI && c == f * F ? vi_pmul(word[j], xv)
                                            : vi_pmac(part[i][j], word[j], xv);
            }
        }
        int scale = sub_is_32(dtype) ? s : 2 * s + f * F / 4;
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int j = 0; j < 2; j++) isum[i][j] =
            vi_pscaled(isum[i][j], part[i][j], h->s[scale][j]);
    }
}

/* Adds a block's sum for column j and one activation row to acc. */
INLINE vf pfinish256(so_dtype dtype, const phead256 *h, int j, const so_q256 *xb, vi isum, vf acc) {
    vf dx = vf_set1(xb->d), sum = vf_fma(vf_mul(h->d[j], dx), vf_from_int(isum), acc);
    if (!has_min256(dtype))
        return sum;
    vi m = sub_is_32(dtype) ? psums256(h->mp, j, xb->sum32, 4) : psums256(h->mp, j, xb->sum16, 8);
    return vf_fnma(vf_mul(h->dmin[j], dx), vf_from_int(m), sum);
}

INLINE void ptile256(const so_mm *a, so_dtype dtype, pblock256 *w, size_t row, size_t b,
                     const int n, const bool direct, vf (*acc)[COLUMNS]) {
    const phead256 *h = &w->heads[w->step];
    size_t n_blocks = (size_t)a->act.k / 256, at = row * n_blocks + b;
    const so_q256 *xb = a->act.blocks256 + at;
    vi isum[4][2];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int j = 0; j < 2; j++) isum[i][j] =
        pcorrect256(dtype, h, j, xb + (size_t)i * n_blocks);
    if (direct) { /* not a loop: if gcc 12 unrolls one, it spills the sums */
#define DOTS(s)                                     \
    pdots256(a, dtype, w, h, s, at, n, true, isum); \
    COMPILER_BARRIER;                               \
    prefetch_batch(&w->next);
        DOTS(0) DOTS(1) DOTS(2) DOTS(3) DOTS(4) DOTS(5) DOTS(6) DOTS(7)
#undef DOTS
    } else {
        NO_UNROLL for (int s = 0; s < 8; s++) {
            pdots256(a, dtype, w, h, s, at, n, false, isum);
            prefetch_batch(&w->next);
        }
    }
    UNROLL for (int i = 0; i < n; i++, xb += n_blocks) UNROLL for (int j = 0; j < 2; j++)
        acc[i][j] = pfinish256(dtype, h, j, xb, isum[i][j], acc[i][j]);
}

/* ptile256 for 1 to 4 activation rows, as functions that are not inlined. Inlined, the values of a
 * whole block compete for registers with the sums of the inner loop, and gcc 12 spills the sums. */
typedef void ptile256_fn(const so_mm *a, pblock256 *w, size_t row, size_t b, vf (*acc)[COLUMNS]);

#define PTILE256(name, dtype, n, direct)                                                         \
    static __attribute__((noinline)) void ptile_##name(const so_mm *a, pblock256 *w, size_t row, \
                                                       size_t b, vf(*acc)[COLUMNS]) {            \
        ptile256(a, dtype, w, row, b, n, direct, acc);                                           \
    }
#define PTILES256(name, dtype)                                                       \
    PTILE256(name##_1, dtype, 1, false)                                              \
    PTILE256(name##_2, dtype, 2, false)                                              \
    PTILE256(name##_3, dtype, 3, false)                                              \
    PTILE256(name##_4, dtype, 4, false)                                              \
    static ptile256_fn *const ptiles_##name[] = {ptile_##name##_1, ptile_##name##_2, \
                                                 ptile_##name##_3, ptile_##name##_4};
PTILES256(q2_k, SO_DTYPE_Q2_K)
PTILES256(q3_k, SO_DTYPE_Q3_K)
PTILES256(q4_k, SO_DTYPE_Q4_K)
PTILES256(q5_k, SO_DTYPE_Q5_K)
PTILES256(q6_k, SO_DTYPE_Q6_K)

INLINE ptile256_fn *const *ptiles_of(so_dtype dtype) {
    return dtype == SO_DTYPE_Q2_K   ? ptiles_q2_k
           : dtype == SO_DTYPE_Q3_K ? ptiles_q3_k
           : dtype == SO_DTYPE_Q4_K ? ptiles_q4_k
           : dtype == SO_DTYPE_Q5_K ? ptiles_q5_k
                                    : ptiles_q6_k;
}

/* Three or four activation rows need each decoded word only once. With 32 registers it is then decoded where
 * it is used, if that takes few instructions: Q4_K 1.1 to 1.2 times as fast, Q2_K 1.3 times, Q6_K slower. One
 * or two rows wait for memory, which is read faster when one column is decoded after the other. */
INLINE bool is_direct(so_dtype dtype, int n) {
    return N_REGISTERS == 32 && (n == 3 || n == 4) &&
           (dtype == SO_DTYPE_Q2_K || dtype == SO_DTYPE_Q4_K || dtype == SO_DTYPE_Q5_K);
}
#if N_REGISTERS == 32
PTILE256(direct_q2_k_3, SO_DTYPE_Q2_K, 3, true)
PTILE256(direct_q2_k_4, SO_DTYPE_Q2_K, 4, true)
PTILE256(direct_q4_k_3, SO_DTYPE_Q4_K, 3, true)
PTILE256(direct_q4_k_4, SO_DTYPE_Q4_K, 4, true)
PTILE256(direct_q5_k_3, SO_DTYPE_Q5_K, 3, true)
PTILE256(direct_q5_k_4, SO_DTYPE_Q5_K, 4, true)

INLINE ptile256_fn *direct_of(so_dtype dtype, int n) {
    switch (dtype) {
    case SO_DTYPE_Q2_K:
        return n == 3 ? ptile_direct_q2_k_3 : ptile_direct_q2_k_4;
    case SO_DTYPE_Q4_K:
        return n == 3 ? ptile_direct_q4_k_3 : ptile_direct_q4_k_4;
    default:
        return n == 3 ? ptile_direct_q5_k_3 : ptile_direct_q5_k_4;
    }
}
#else
#define direct_of(dtype, n) ptiles_of(dtype)[0] /* not reached */
#endif

INLINE void pchunk256(const so_mm *a, so_dtype dtype, const weight_tile *at, size_t first, int n,
                      vf (*acc)[COLUMNS]) {
    const bool direct = is_direct(dtype, n);
    const size_t decoding = direct       ? 0
                            : STEPS == 1 ? 16
                                         : 8 * (size_t)steps_of(at),
                 n_batches = decoding + 8 * (size_t)steps_of(at) * (((size_t)n + 3) / 4);
    for (size_t b = 0; b < (size_t)a->act.k / 256; b++) {
        pblock256 w;
        w.next = prefetch_of_block(dtype, at, b, n_batches);
        pheads256(dtype, at, b, &w);
        NO_UNROLL for (w.step = 0; w.step < steps_of(at); w.step++) {
            vf(*sums)[COLUMNS] = (vf(*)[COLUMNS])(acc[0] + 2 * w.step);
            UNROLL for (int j = 0; j < 2; j++) w.words[j] = words_of(dtype, at, b, 2 * w.step + j);
            if (direct) {
                direct_of(dtype, n)(a, &w, first, b, sums);
                continue;
            }
            pdecode256(dtype, &w);
            for (int i = 0; i < n; i += 4)
                ptiles_of(dtype)[SO_MIN(4, n - i) - 1](a, &w, first + (size_t)i, b, sums + i);
        }
    }
}

INLINE void packed(const so_mm *a, so_dtype dtype, bool wide, long begin, long end) {
    vf acc[CHUNK][COLUMNS];
    int span = span_rows(a, CHUNK);
    for (int from = 0; from < a->act.n; from += span)
        for (long r = begin; r < end; r += SO_PACK_TILE) {
            int to = SO_MIN(from + span, a->act.n);
            weight_tile at = weight_tile_at(a, r, begin, end, to < a->act.n);
            for (int first = from; first < to; first += CHUNK) {
                int n = SO_MIN(CHUNK, to - first);
                for (int i = 0; i < n; i++)
                    UNROLL for (int j = 0; j < COLUMNS; j++) acc[i][j] = vf_set1(0);
                if (wide)
                    pchunk256(a, dtype, &at, (size_t)first, n, acc);
                else
                    pchunk32(a, dtype, &at, (size_t)first, n, acc);
                ptile_store(a, r, end, first, n, (const vf(*)[COLUMNS])acc);
                at.prefetch.lead = 0; /* the next chunk reads the same tile, which is cached */
            }
        }
}

/* ---- roofline: peak rates of the level ---- */

static uint64_t read_all(const uint8_t *p, size_t n) {
    vi sum[4];
    UNROLL for (int i = 0; i < 4; i++) sum[i] = vi_set32(0);
    size_t at = 0, step = 4 * sizeof(vi);
    for (; at + step <= n; at += step)
        UNROLL for (size_t i = 0; i < 4; i++) sum[i] =
            vi_xor(sum[i], vi_load(p + at + i * sizeof(vi)));
    uint64_t lanes[sizeof(vi) / 8], all = 0;
    vi joined = vi_xor(vi_xor(sum[0], sum[1]), vi_xor(sum[2], sum[3]));
    memcpy(lanes, &joined, sizeof lanes);
    for (size_t i = 0; i < SO_LEN(lanes); i++)
        all ^= lanes[i];
    for (; at < n; at++)
        all ^= p[at];
    return all;
}

/* Ten independent sums: a VNNI multiply-add has a latency of five cycles, and two may start per
 * cycle. Without VNNI fewer would do. */
static long multiply_all(long n) {
    vi sum[10], w = vi_set8(3), x = vi_set8(1);
    UNROLL for (int i = 0; i < 10; i++) sum[i] = vi_set32(i);
    for (long r = 0; r < n; r++) {
        __asm__ volatile("" : "+v"(w), "+v"(x));
        UNROLL for (int i = 0; i < 10; i++) sum[i] = vi_pmac(sum[i], w, x);
    }
    UNROLL for (int i = 0; i < 10; i++) __asm__ volatile("" : : "v"(sum[i]));
    return n * 10 * (long)sizeof(vi);
}
