/* Matrix products with packed K types (pack.h) on AMX. One instruction multiplies two tile
 * registers and adds the product to a third. In the comments of this file a tile is such a
 * register; the tiles of pack.h, two row groups each, are called weight tiles.
 *
 *     C[16 rows][16 outputs] += A[16 rows][64 bytes] · B[16][16 outputs][4 bytes]
 *
 * A holds activations in their normal layout. B holds 16 decoded words (pack.h) of a column. A
 * column is one row group of the packed weights: 16 rows, which are 16 outputs. C holds integer
 * sums. A block is 256 consecutive elements of all rows of a column. As in packed_x86.h, two
 * columns are computed together, here a whole weight tile.
 *
 * Moving sums from a tile to memory and back is slow, so they stay in tiles for a whole block. Then
 * the scales of its sub-blocks cannot be applied to sums; they are applied to the weights. A scaled
 * weight s · q does not fit a byte (except in Q2_K), so all types hold it as two bytes, the digits
 * low and high. Each digit has its own tile of sums:
 *
 *   Q2_K Q4_K Q5_K   s = 8 · s1 + s0, low = q · s0, high = q · s1. Both fit a byte, so one 16-bit
 *                    multiplication computes the products of two bytes at once
 *   Q3_K Q6_K        s · q = 256 · high + low, the two bytes of a 16-bit product
 *
 * For every block of two columns
 *
 *   1. groups of up to 16 activation rows are multiplied with the digits, a quarter of the block (64
 *      elements) at a time: 4 quarters · 2 columns · 2 digits = 16 instructions, 4 tiles of sums;
 *   2. during the last group, each quarter that has been used is overwritten with the same quarter
 *      of the next block, decoded and scaled. So no tile is loaded right after its bytes were
 *      stored, which would stall, and one buffer suffices: two blocks would not fit L1;
 *   3. the sums of a group are added to the float accumulators, 16 outputs per register, after the
 *      products of the next group have been started.
 *
 * The integers are exact and the floats follow the order of kernels.h, so results are bit-identical
 * to every other level. All groups have the same size. The last one starts early enough to be full,
 * so it may compute some rows a second time, with the same results.
 *
 * The AVX-512 kernels compute everything else: batches too small to pay for the decoding in step 2,
 * weights that are not packed, and types with blocks of 32 elements. Those would need a tile of sums
 * for every 32 elements, and storing it takes as long as the multiplication before it.
 *
 * Tile registers are configured and released within each call: threads keep no state. Any
 * thread. */
#include "backend/cpu/matmul_amx.h"
#include "backend/cpu/simd_avx512.h"

#include "base/loops.h"
#include "base/mem.h"

#include "backend/cpu/columns_x86.h"

_Static_assert(COLUMNS == 2, "the two columns of a weight tile are its row groups");

enum {
    ROWS = 16,                   /* activation rows per tile, at most */
    CHUNK = 128,                 /* activation rows that are multiplied with one decoded block */
    CHUNK_GROUPS = CHUNK / ROWS, /* groups of activation rows in a chunk */
    /* With fewer activation rows AVX-512 is used: */
    MIN_SPLIT = 16, /* for types that split the scale (splits_scale) */
    MIN_WIDE = 24,  /* for the others */
};

/* ---- tiles ---- */

/* Registers: 0 to 3 sums, 4 activations, 5 to 7 weights. The compiler does not track tile
 * registers. */
#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, p) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"(64L) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_DOT_U(c, a, b) __asm__ volatile("tdpbsud %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_RELEASE __asm__ volatile("tilerelease" ::)

static void shape_tiles(int rows) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } s = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        s.rows[i] = (uint8_t)(i < 5 ? rows : 16);
        s.row_bytes[i] = 64;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(s));
}

/* ---- weights ---- */

/* A decoded block of one column: word i of the digits of s · q is low[i] and high[i]. */
typedef struct amx_block {
    vi low[64], high[64];
} amx_block;

/* Types that split the scale into digits; the others split the product. */
INLINE bool splits_scale(so_dtype t) { return has_min256(t); }

/* Matrices of the GF(2) affine instruction. BIT(i) copies bit 0 of a source byte to bit i of the
 * result. MAP(bits, from) reads source bit j + from where the matrix `bits` reads bit j. */
#define BIT(i) ((uint64_t)1 << 8 * (7 - (i)))
#define MAP(bits, from) _mm512_set1_epi64((long long)((uint64_t)(bits) << (from)))

/* Inline assembly, because gcc 12 moves the operands of the intrinsic through the stack. */
INLINE vi affine(vi v, vi bits, const int flip) {
    vi out;
    __asm__("vgf2p8affineqb %3, %2, %1, %0" : "=v"(out) : "v"(v), "v"(bits), "i"(flip));
    return out;
}

/* Result bits 0 … n-1 are source bits 0 … n-1. */
INLINE uint64_t copy_bits(const int n) {
    uint64_t m = 0;
    UNROLL for (int i = 0; i < n; i++) m |= BIT(i) << i;
    return m;
}

/* Result bits first … 7 are all source bit 0: a sign extension. */
INLINE uint64_t replicate_bit(const int first) {
    uint64_t m = 0;
    UNROLL for (int i = first; i < 8; i++) m |= BIT(i);
    return m;
}

/* Location of 32 elements' bits: words at `low` and, if the type stores some bits apart, at `high`.
 * The matrices low_bits and high_bits extract them. Within a dtype, each of the two varies only in
 * the shift of MAP. */
typedef struct source {
    const uint8_t *low, *high;
    vi low_bits, high_bits;
} source;

INLINE source source_of(so_dtype t, const uint8_t *words, int quarter, const int h) {
    const int s = 2 * quarter + h;
    const uint8_t *low = words + SO_PACK_WORD * so_pack_low_word(t, s);
    const uint8_t *high = words + SO_PACK_WORD * so_pack_high_word(t, s);
    switch (t) {
    case SO_DTYPE_Q2_K:
    case SO_DTYPE_Q3_K:
        return (source){low, high, MAP(copy_bits(2), s % 4 * 2), MAP(replicate_bit(2), s)};
    case SO_DTYPE_Q4_K:
    case SO_DTYPE_Q5_K:
        return (source){low, high, MAP(copy_bits(4), 4 * h), MAP(BIT(4), s)};
    default: /* Q6_K */
        return (source){low, high, MAP(copy_bits(4), quarter % 2 * 4),
                        MAP(BIT(4) | replicate_bit(5) << 1, s % 4 * 2)};
    }
}

/* Decodes word i to bytes, signed if the type has an offset (− 4, − 32). */
INLINE vi decode_word(so_dtype t, const source *from, const int i) {
    vi v = affine(word_at(from->low, i), from->low_bits, 0);
    if (t == SO_DTYPE_Q2_K || t == SO_DTYPE_Q4_K)
        return v;
    const int flip = t == SO_DTYPE_Q3_K ? 0xFC : t == SO_DTYPE_Q6_K ? 0xE0 : 0;
    return vi_or(v, affine(word_at(from->high, i), from->high_bits, flip));
}

/* Digits of s · q = 256 · high + low for signed bytes q and int16 s: multiplies the even and the
 * odd bytes separately and interleaves the bytes of the products. */
INLINE void wide_digits(vi q, vi s, vi *low, vi *high) {
    const __mmask64 odd = 0xAAAAAAAAAAAAAAAAu;
    vi a = _mm512_mullo_epi16(_mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8), s);
    vi b = _mm512_mullo_epi16(_mm512_srai_epi16(q, 8), s);
    *low = _mm512_mask_blend_epi8(odd, a, _mm512_slli_epi16(b, 8));
    *high = _mm512_mask_blend_epi8(odd, _mm512_srli_epi16(a, 8), b);
}

/* Copies the low (or the high) int16 of each 32-bit lane to both halves of the lane. */
INLINE vi dup_low(vi v) {
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 0, 1, 4, 5, 4, 5, 8, 9,
                                                                       8, 9, 12, 13, 12, 13)));
}
INLINE vi dup_high(vi v) {
    return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(_mm_setr_epi8(
                                      2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11, 14, 15, 14, 15)));
}

INLINE int sub_words(so_dtype t) { return sub_is_32(t) ? 8 : 4; }

/* Decodes a quarter of a block, 64 elements of each row of a column, and multiplies it by the
 * scales of its sub-blocks. Issues prefetch batches in between. */
INLINE void decode_quarter(so_dtype t, const uint8_t *head, const uint8_t *words, int quarter,
                           amx_block *out, prefetch *next) {
    const int per = sub_words(t);
    const uint8_t *bytes = head + (has_min256(t) ? 64 : 32) + 256 / per * quarter;
    vi *low = out->low + 16 * quarter, *high = out->high + 16 * quarter;
    UNROLL for (int i = 0; i < 16; i += per) {
        source from = source_of(t, words, quarter, i / 8);
        vi v = has_min256(t) ? vi_pairs_u(bytes + i / (2 * per) * 32)
                             : vi_pairs_s(bytes + i / (2 * per) * 32);
        vi s = i / per % 2 ? dup_high(v) : dup_low(v);
        if (t == SO_DTYPE_Q2_K)
            s = vi_and(s, vi_set8(15));
        vi s0 = vi_and(s, vi_set8(7)), s1 = _mm512_srli_epi16(s, 3);
        UNROLL for (int j = i; j < i + per; j++) {
            vi q = decode_word(t, &from, j % 8);
            if (splits_scale(t)) { /* no product carries into the next byte */
                low[j] = _mm512_mullo_epi16(q, s0);
                high[j] = _mm512_mullo_epi16(q, s1);
            } else {
                wide_digits(q, s, &low[j], &high[j]);
            }
        }
        COMPILER_BARRIER;
        prefetch_batch(next);
    }
}

/* ---- products ---- */

typedef struct tile_sums {
    vi low[ROWS], high[ROWS];
} tile_sums;

/* Multiplies a group of activation rows with a quarter of a block of both columns. Adds to the four
 * tiles of sums: 0 and 1 are low and high of column 0, 2 and 3 those of column 1. */
INLINE void dots(so_dtype t, const int8_t *x, size_t stride, const amx_block *w, int quarter) {
    const int i = 16 * quarter;
    TILE_LOAD(4, x + 64 * quarter, stride);
    TILE_LOAD(5, w[0].low + i, 64);
    TILE_DOT_U(0, 4, 5);
    TILE_LOAD(6, w[0].high + i, 64);
    if (splits_scale(t))
        TILE_DOT_U(1, 4, 6);
    else
        TILE_DOT(1, 4, 6);
    TILE_LOAD(7, w[1].low + i, 64);
    TILE_DOT_U(2, 4, 7);
    TILE_LOAD(5, w[1].high + i, 64);
    if (splits_scale(t))
        TILE_DOT_U(3, 4, 5);
    else
        TILE_DOT(3, 4, 5);
}

/* Activation rows in groups of equal size; the last group may overlap the one before. */
typedef struct groups {
    int n, rows;
} groups;

INLINE groups groups_of(int n) {
    int count = (n + ROWS - 1) / ROWS;
    return (groups){count, (n + count - 1) / count};
}

INLINE int first_row(const so_mm *a, groups g, int i) {
    return SO_MIN(g.rows * i, a->act.n - g.rows);
}

/* Sums of group i of a chunk for block b, stored in c but not yet added to the accumulators. */
typedef struct pending_sums {
    size_t b;
    int i;
    const tile_sums *c;
} pending_sums;

/* What the float accumulation needs of a block of one column. */
typedef struct heads {
    vf d, dmin;
    vi minima[8]; /* as pairs of int16 */
} heads;

INLINE heads heads_of(so_dtype t, const uint8_t *head) {
    const int n_pairs = sub_is_32(t) ? 4 : 8;
    heads h = {.d = vf_halves(head)};
    if (!has_min256(t))
        return h;
    h.dmin = vf_halves(head + 32);
    UNROLL for (int p = 0; p < n_pairs; p++) h.minima[p] =
        sub_is_32(t) ? vi_pairs_u(head + 192 + 32 * p) : vi_shr(vi_pairs_u(head + 64 + 32 * p), 4);
    return h;
}

INLINE void add_sums(const so_mm *a, so_dtype t, const weight_tile *at, groups g, int first,
                     pending_sums s, vf (*acc)[COLUMNS], prefetch *next) {
    const int n_pairs = sub_is_32(t) ? 4 : 8, bits = splits_scale(t) ? 3 : 8;
    size_t n_blocks = (size_t)a->act.k / 256;
    const so_q256 *x = a->act.blocks256 + (size_t)first_row(a, g, first + s.i) * n_blocks + s.b;
    heads h[2];
    UNROLL for (int j = 0; j < 2; j++) h[j] = heads_of(t, head_of(t, at, s.b, j));
    acc += g.rows * s.i;
    for (int i = 0; i < g.rows; i++, x += n_blocks) {
        const int16_t *pairs = sub_is_32(t) ? x->sum32 : x->sum16;
        vf dx = vf_set1(x->d);
        UNROLL for (int j = 0; j < 2; j++) {
            vi sum = vi_add32(vi_shl32(s.c[j].high[i], bits), s.c[j].low[i]), m = vi_set32(0);
            vf f = vf_fma(vf_mul(h[j].d, dx), vf_from_int(sum), acc[i][j]);
            if (has_min256(t)) {
                UNROLL for (int p = 0; p < n_pairs; p++) m =
                    vi_dot2_add(m, h[j].minima[p], vi_bcast(pairs + 2 * p));
                f = vf_fnma(vf_mul(h[j].dmin, dx), vf_from_int(m), f);
            }
            acc[i][j] = f;
        }
        prefetch_batch(next);
    }
}

INLINE void decode(so_dtype t, const weight_tile *at, size_t b, int quarter, amx_block *w,
                   prefetch *next) {
    UNROLL for (int j = 0; j < 2; j++)
        decode_quarter(t, head_of(t, at, b, j), words_of(t, at, b, j), quarter, &w[j], next);
}

INLINE void zero_tiles(void) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
}

INLINE void store_tiles(tile_sums *c) {
    TILE_STORE(0, c[0].low);
    TILE_STORE(1, c[0].high);
    TILE_STORE(2, c[1].low);
    TILE_STORE(3, c[1].high);
}

/* Multiplies groups first … first+n-1 with all blocks of both columns. */
INLINE void chunk(const so_mm *a, so_dtype t, const weight_tile *at, groups g, int first, int n,
                  vf (*acc)[COLUMNS]) {
    size_t k = (size_t)a->act.k, n_blocks = k / 256;
    const int n_batches = 2 * 64 / sub_words(t); /* of prefetch, per decoded block */
    amx_block w[2];
    tile_sums c[2][2];
    pending_sums last = {.i = -1};
    prefetch next = prefetch_of_block(t, at, 0, (size_t)n_batches);
    NO_UNROLL for (int p = 0; p < 4; p++) decode(t, at, 0, p, w, &next);
    for (size_t b = 0, buf = 0; b < n_blocks; b++) {
        bool more = b + 1 < n_blocks;
        if (more)
            next = prefetch_of_block(t, at, b + 1, (size_t)(n_batches + g.rows * n));
        for (int i = 0; i < n; i++, buf ^= 1) {
            const int8_t *x = a->act.q + (size_t)first_row(a, g, first + i) * k + 256 * b;
            zero_tiles();
            NO_UNROLL for (int p = 0; p < 4; p++) {
                dots(t, x, k, w, p);
                if (more && i == n - 1)
                    decode(t, at, b + 1, p, w, &next);
            }
            if (last.i >= 0)
                add_sums(a, t, at, g, first, last, acc, &next);
            store_tiles(c[buf]);
            last = (pending_sums){b, i, c[buf]};
        }
    }
    add_sums(a, t, at, g, first, last, acc, &next);
}

INLINE void product(const so_mm *a, so_dtype t, long begin, long end) {
    vf acc[CHUNK][COLUMNS];
    groups g = groups_of(a->act.n);
    int span = span_rows(a, CHUNK) / ROWS;
    shape_tiles(g.rows);
    for (int from = 0; from < g.n; from += span)
        for (long r = begin; r < end; r += SO_PACK_TILE) {
            int to = SO_MIN(from + span, g.n);
            weight_tile at = weight_tile_at(a, r, begin, end, to < g.n);
            for (int i = from; i < to; i += CHUNK_GROUPS) {
                int n = SO_MIN((int)CHUNK_GROUPS, to - i);
                for (int j = 0; j < g.rows * n; j++)
                    acc[j][0] = acc[j][1] = vf_set1(0);
                chunk(a, t, &at, g, i, n, acc);
                for (int j = 0; j < n; j++)
                    ptile_store(a, r, end, first_row(a, g, i + j), g.rows,
                                (const vf(*)[COLUMNS])acc + g.rows * j);
                at.prefetch.lead = 0; /* the next chunk reads the same weights, now cached */
            }
        }
    TILE_RELEASE;
}

#define AMX_PRODUCT(name, dtype)                                                       \
    void so_mm_amx_##name(const so_mm *a, long begin, long end) {                      \
        if (a->tile_bytes && a->act.n >= (splits_scale(dtype) ? MIN_SPLIT : MIN_WIDE)) \
            product(a, dtype, begin, end);                                             \
        else                                                                           \
            so_kernels_avx512.matmul[dtype](a, begin, end);                            \
    }
SO_MM_K_DTYPES(AMX_PRODUCT)

/* ---- roofline: peak rate of the level ---- */

long so_amx_multiply_all(long n) {
    static const int8_t zeros[1024];
    shape_tiles(ROWS);
    TILE_LOAD(4, zeros, 64);
    TILE_LOAD(6, zeros, 64);
    TILE_LOAD(7, zeros, 64);
    long steps = n / 8; /* so that a call takes about as long as at other levels */
    for (long r = 0; r < steps; r++) {
        TILE_ZERO(0); /* breaks the dependency on the previous sum */
        TILE_DOT(0, 4, 6);
        TILE_ZERO(1);
        TILE_DOT(1, 4, 7);
    }
    TILE_RELEASE;
    return steps * 2 * ROWS * 16 * 64;
}
