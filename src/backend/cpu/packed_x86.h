/* Matrix products over packed weights (pack.h) for x86, written once over integer words that the
 * including file defines. The arithmetic is the canon's; the bits are those of matmul_x86.h.
 *
 * A tile is two columns of LANES output rows: two groups of 16 rows where a word has 64 bytes, the
 * halves of one group where it has 32. For every block of the tile
 *
 *   1. the words are decoded to unsigned bytes, once, into memory that stays in the first cache;
 *   2. activation rows are taken four at a time: four bytes are broadcast and meet both columns,
 *      products are added up in integer registers, one output row per lane;
 *   3. the block's sum goes to the float accumulators, which lie in the first cache too.
 *
 * A wide batch goes through in chunks of CHUNK rows; the weights of a tile stay cached meanwhile.
 * A prompt does so in spans of as many chunks as the second cache holds, one span after the other.
 * Offsets of unsigned weights (8 for Q4_0, 128 for Q8_0, …) are undone by the sum that the integer
 * accumulator starts from, which is exact.
 *
 * Words beside those of matmul_x86.h:
 *
 *   HAS_DP                     vi_pmac adds in 32 bits (VNNI); else pairs of products in 16 bits
 *   vi_pmac(p, w, x)           p + w·x, four bytes to a lane
 *   vi_pmul(w, x)              the same from zero (only without HAS_DP)
 *   vi_pscaled(isum, p, s)     isum + s·p; p must fit 16 bits (with HAS_DP: its sum, else each
 * half) vi_scale_even, vi_scale_odd   what vi_pscaled takes, from a pair of int16 scales
 *   vi_dot2_add(a, m, x)       a + both int16 products of a lane
 *   vi_pairs_u, vi_pairs_s     2·LANES bytes widened to int16
 *   vf_halves(p)               LANES halves to floats
 *   COL_GROUP COL_HEAD COL_WORD   where column 1 lies: groups, bytes in heads, bytes in words
 *
 * K types, why 16 bits suffice: Σ over F words of (q − offset)·x stays within 8·4·8·127 (Q4_K),
 * 4·4·16·127 (Q5_K), 2·4·32·127 (Q6_K), 4·4·7·127 (Q3_K: 4 − 19 + 16 …), 4·4·3·127 (Q2_K), all
 * below 2^15. Included by the kernels_*.c of x86 only, after matmul_x86.h's words. */

#include "backend/cpu/columns_x86.h"

/* ---- blocks of 32 ---- */

typedef struct pblock32 {
    vi w[2][8];
    vf d[2], m[2];
} pblock32;

/* Bit c of every byte moved to bit 4. */
INLINE vi fifth_bit(vi h, int c) {
    return vi_and(c < 4 ? vi_shl(h, 4 - c) : vi_shr(h, c - 4), vi_set8(16));
}

INLINE void pdecode32(so_dtype dtype, const columns *at, size_t b, pblock32 *out) {
    UNROLL for (int j = 0; j < 2; j++) {
        const uint8_t *head = at->head[j] + b * so_pack_head(dtype);
        const uint8_t *words = at->word[j] + b * so_pack_words(dtype);
        vi *w = out->w[j];
        out->d[j] = vf_halves(head);
        out->m[j] = has_min32(dtype) ? vf_halves(head + 32) : vf_set1(0);
        if (dtype == SO_DTYPE_Q8_0) {
            UNROLL for (int c = 0; c < 8; c++) w[c] =
                HAS_DP ? word_at(words, c) : vi_xor(word_at(words, c), vi_set8((char)0x80));
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

/* −offset · Σ x of a block. */
INLINE vi start32(so_dtype dtype, const so_q32 *xb) {
    switch (dtype) {
    case SO_DTYPE_Q4_0:
        return vi_bcast(&xb->neg8);
    case SO_DTYPE_Q5_0:
        return vi_shl32(vi_bcast(&xb->neg8), 1);
    case SO_DTYPE_Q8_0:
        return HAS_DP ? vi_shl32(vi_bcast(&xb->neg8), 4) : vi_set32(0);
    default:
        return vi_set32(0);
    }
}

/* Σ q·x over a block for `n` activation rows `stride` bytes apart, on top of isum. */
INLINE void pdots32(so_dtype dtype, const pblock32 *w, const int8_t *x, size_t stride, const int n,
                    vi (*isum)[2]) {
    const int limit = dtype == SO_DTYPE_Q8_0                             ? 1
                      : dtype == SO_DTYPE_Q4_0 || dtype == SO_DTYPE_Q4_1 ? 8
                                                                         : 4;
    vi part[4][2];
    UNROLL for (int c = 0; c < 8; c++) UNROLL for (int i = 0; i < n; i++) {
        vi xb = vi_bcast(x + (size_t)i * stride + 4 * c);
        UNROLL for (int j = 0; j < 2; j++) {
            if (HAS_DP)
                isum[i][j] = vi_pmac(isum[i][j], w->w[j][c], xb);
            else if (dtype == SO_DTYPE_Q8_0)
                isum[i][j] = vi_mac_q8(isum[i][j], w->w[j][c], xb);
            else if (c % limit == 0)
                part[i][j] = vi_pmul(w->w[j][c], xb);
            else
                part[i][j] = vi_pmac(part[i][j], w->w[j][c], xb);
            if (!HAS_DP && dtype != SO_DTYPE_Q8_0 && (c + 1) % limit == 0)
                isum[i][j] = vi_flat(isum[i][j], part[i][j]);
        }
    }
}

INLINE void ptile32(const so_mm *a, so_dtype dtype, const pblock32 *w, size_t row, size_t b,
                    const int n, vf (*acc)[2]) {
    size_t k = (size_t)a->act.k, n_blocks = k / 32, at = row * n_blocks + b;
    const so_q32 *xb = a->act.blocks32 + at;
    vi isum[4][2];
    UNROLL for (int i = 0; i < n; i++) isum[i][0] = isum[i][1] =
        start32(dtype, xb + (size_t)i * n_blocks);
    pdots32(dtype, w, a->act.q + 32 * at, k, n, isum);
    UNROLL for (int i = 0; i < n; i++, xb += n_blocks) UNROLL for (int j = 0; j < 2; j++) {
        vf sum = vf_fma(vf_mul(w->d[j], vf_set1(xb->d)), vf_from_int(isum[i][j]), acc[i][j]);
        acc[i][j] = has_min32(dtype) ? vf_fma(w->m[j], vf_set1(xb->s), sum) : sum;
    }
}

INLINE void pchunk32(const so_mm *a, so_dtype dtype, const columns *at, size_t first, int n,
                     vf (*acc)[2]) {
    size_t n_blocks = (size_t)a->act.k / 32;
    for (size_t b = 0; b < n_blocks; b++) {
        pblock32 w;
        fetch_ahead(dtype, at, b, n_blocks);
        if (at->out && b < (size_t)n)
            fetch_result(a, at, first + b);
        pdecode32(dtype, at, b, &w);
        for (int i = 0, size; i < n; i += size) {
            size = tile_size(n - i, 4);
#define TILE(c) ptile32(a, dtype, &w, first + (size_t)i, b, c, acc + i)
            TILE_CASES(size, 4)
#undef TILE
        }
    }
}

/* ---- blocks of 256 ---- */

typedef struct pblock256 {
    vi w[8][2][8];         /* 32 elements each */
    vi s[16][2];           /* scales for vi_pscaled; 8 where sub-blocks have 32 elements */
    vi sp[8][2], mp[8][2]; /* scales and minima as int16 pairs */
    vf d[2], dmin[2];
    fetch next;
} pblock256;

/* Bits `from` and up of every byte moved to bit `to`, under a mask. */
INLINE vi move_bits(vi v, int from, int to, int mask) {
    return vi_and(from < to ? vi_shl(v, to - from) : vi_shr(v, from - to), vi_set8((char)mask));
}

/* Elements 32s … 32s+31 as eight words. */
INLINE void pwords256(so_dtype dtype, const uint8_t *words, const int s, vi *w) {
    const int half = s / 4, quarter = s % 4;
    UNROLL for (int i = 0; i < 8; i++) {
        vi v;
        switch (dtype) {
        case SO_DTYPE_Q2_K:
        case SO_DTYPE_Q3_K:
            v = vi_bits(word_at(words, 8 * half + i), 2 * quarter, 3);
            break;
        case SO_DTYPE_Q4_K:
        case SO_DTYPE_Q5_K:
            v = vi_bits(word_at(words, s / 2 * 8 + i), s % 2 * 4, 15);
            break;
        default: /* Q6_K */
            v = vi_bits(word_at(words, 16 * half + quarter % 2 * 8 + i), quarter / 2 * 4, 15);
            v = vi_or(v, move_bits(word_at(words, 32 + 8 * half + i), 2 * quarter, 4, 48));
        }
        if (dtype == SO_DTYPE_Q5_K)
            v = vi_or(v, move_bits(word_at(words, 32 + i), s, 4, 16));
        if (dtype == SO_DTYPE_Q3_K) /* q + 12, so that the offset is 16 */
            v = vi_add8(vi_or(v, move_bits(word_at(words, 16 + i), s, 2, 4)), vi_set8(12));
        w[i] = v;
    }
}

INLINE void pscales256(so_dtype dtype, const uint8_t *head, const int j, pblock256 *out) {
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

INLINE void pdecode256(so_dtype dtype, const columns *at, size_t b, pblock256 *out) {
    UNROLL for (int j = 0; j < 2; j++)
        pscales256(dtype, at->head[j] + b * so_pack_head(dtype), j, out);
    UNROLL for (int s = 0; s < 8; s++) {
        UNROLL for (int j = 0; j < 2; j++)
            pwords256(dtype, at->word[j] + b * so_pack_words(dtype), s, out->w[s][j]);
        KEEP_ORDER;
        fetch_some(&out->next);
    }
}

/* Where the partial sum of words f·F … of sub-chunk s starts: −offset · Σ x. */
INLINE vi pstart256(so_dtype dtype, const so_q256 *xb, int s, const int f) {
    if (!HAS_DP)
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

/* Σ over pairs of int16 weights and sums of activations. */
INLINE vi psums256(const vi (*pairs)[2], int j, const int16_t *sums, const int n_pairs) {
    vi t = vi_set32(0);
    UNROLL for (int p = 0; p < n_pairs; p++) t =
        vi_dot2_add(t, pairs[p][j], vi_bcast(sums + 2 * p));
    return t;
}

/* What pstart256 takes away from each sub-block is given back here where the type has no offset of
 * its own; without HAS_DP the offset of those that have one is taken here. */
INLINE vi pcorrect256(so_dtype dtype, const pblock256 *w, int j, const so_q256 *xb) {
    if (HAS_DP && sub_is_32(dtype))
        return vi_shl32(psums256(w->sp, j, xb->sum32, 4), dtype == SO_DTYPE_Q4_K ? 3 : 4);
    if (!HAS_DP && (dtype == SO_DTYPE_Q3_K || dtype == SO_DTYPE_Q6_K))
        return vi_sub32(vi_set32(0),
                        vi_shl32(psums256(w->sp, j, xb->sum16, 8), dtype == SO_DTYPE_Q3_K ? 4 : 5));
    return vi_set32(0);
}

/* One sub-chunk of 32 elements for `n` activation rows. */
INLINE void pdots256(const so_mm *a, so_dtype dtype, const pblock256 *w, int s, size_t at,
                     const int n, vi (*isum)[2]) {
    const int F = dtype == SO_DTYPE_Q4_K ? 8 : dtype == SO_DTYPE_Q6_K ? 2 : 4;
    size_t k = (size_t)a->act.k, n_blocks = k / 256;
    const int8_t *x = a->act.q + 256 * at + 32 * s;
    const so_q256 *xb = a->act.blocks256 + at;
    UNROLL for (int f = 0; f < 8 / F; f++) {
        vi part[4][2];
        UNROLL for (int i = 0; i < n; i++) part[i][0] = part[i][1] =
            pstart256(dtype, xb + (size_t)i * n_blocks, s, f);
        UNROLL for (int c = f * F; c < (f + 1) * F; c++) UNROLL for (int i = 0; i < n; i++) {
            vi xv = vi_bcast(x + (size_t)i * k + 4 * c);
            UNROLL for (int j = 0; j < 2; j++) part[i][j] =
                !HAS_DP && c == f * F ? vi_pmul(w->w[s][j][c], xv)
                                      : vi_pmac(part[i][j], w->w[s][j][c], xv);
        }
        int scale = sub_is_32(dtype) ? s : 2 * s + f * F / 4;
        UNROLL for (int i = 0; i < n; i++) UNROLL for (int j = 0; j < 2; j++) isum[i][j] =
            vi_pscaled(isum[i][j], part[i][j], w->s[scale][j]);
    }
}

INLINE void ptile256(const so_mm *a, so_dtype dtype, pblock256 *w, size_t row, size_t b,
                     const int n, vf (*acc)[2]) {
    size_t n_blocks = (size_t)a->act.k / 256, at = row * n_blocks + b;
    const so_q256 *xb = a->act.blocks256 + at;
    vi isum[4][2];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int j = 0; j < 2; j++) isum[i][j] =
        pcorrect256(dtype, w, j, xb + (size_t)i * n_blocks);
    NO_UNROLL for (int s = 0; s < 8; s++) {
        pdots256(a, dtype, w, s, at, n, isum);
        fetch_some(&w->next);
    }
    UNROLL for (int i = 0; i < n; i++, xb += n_blocks) UNROLL for (int j = 0; j < 2; j++) {
        vf dx = vf_set1(xb->d);
        vf sum = vf_fma(vf_mul(w->d[j], dx), vf_from_int(isum[i][j]), acc[i][j]);
        if (has_min256(dtype)) {
            vi m = sub_is_32(dtype) ? psums256(w->mp, j, xb->sum32, 4)
                                    : psums256(w->mp, j, xb->sum16, 8);
            sum = vf_fnma(vf_mul(w->dmin[j], dx), vf_from_int(m), sum);
        }
        acc[i][j] = sum;
    }
}

/* A tile of K types is a function of its own: inlined, the values of a whole block compete for
 * registers with the sums of its inner loop, and gcc 12 spills the sums. */
typedef void ptile256_fn(const so_mm *a, pblock256 *w, size_t row, size_t b, vf (*acc)[2]);

#define PTILE256(name, dtype, n)                                                                  \
    static __attribute__((noinline)) void ptile_##name##_##n(const so_mm *a, pblock256 *w,        \
                                                             size_t row, size_t b, vf(*acc)[2]) { \
        ptile256(a, dtype, w, row, b, n, acc);                                                    \
    }
#define PTILES256(name, dtype)                                                       \
    PTILE256(name, dtype, 1)                                                         \
    PTILE256(name, dtype, 2)                                                         \
    PTILE256(name, dtype, 3)                                                         \
    PTILE256(name, dtype, 4)                                                         \
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

INLINE void pchunk256(const so_mm *a, so_dtype dtype, const columns *at, size_t first, int n,
                      vf (*acc)[2]) {
    for (size_t b = 0; b < (size_t)a->act.k / 256; b++) {
        pblock256 w;
        w.next = fetch_of(dtype, at, b, 8 + 8 * (((size_t)n + 3) / 4));
        pdecode256(dtype, at, b, &w);
        for (int i = 0; i < n; i += 4)
            ptiles_of(dtype)[SO_MIN(4, n - i) - 1](a, &w, first + (size_t)i, b, acc + i);
    }
}

INLINE void packed(const so_mm *a, so_dtype dtype, bool wide, long begin, long end) {
    vf acc[CHUNK][2];
    size_t words_at = so_pack_words_at(dtype, (size_t)a->act.k / (wide ? 256 : 32));
    int span = span_rows(a, CHUNK);
    for (int from = 0; from < a->act.n; from += span)
        for (long r = begin; r < end; r += 2 * LANES) {
            columns at = columns_at(a, words_at, r, end);
            int to = SO_MIN(from + span, a->act.n);
            if (r + 2 * LANES >= end)
                next_columns(a, to < a->act.n ? group_at(a, begin) : NULL, &at);
            for (int first = from; first < to; first += CHUNK) {
                int n = SO_MIN(CHUNK, to - first);
                for (int i = 0; i < n; i++)
                    acc[i][0] = acc[i][1] = vf_set1(0);
                if (wide)
                    pchunk256(a, dtype, &at, (size_t)first, n, acc);
                else
                    pchunk32(a, dtype, &at, (size_t)first, n, acc);
                ptile_store(a, r, end, first, n, (const vf(*)[2])acc);
                at.next = NULL;
            }
        }
}

/* ---- what the level could do at most ---- */

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

/* Ten chains: the latency of one step is five cycles, and two may start in each. */
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
