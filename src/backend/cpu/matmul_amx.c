/* Matrix products over packed K types (pack.h) with AMX: one instruction multiplies two tiles,
 *
 *     C[16 rows][16 outputs] += A[16 rows][64 bytes] · B[16][16 outputs][4 bytes]
 *
 * A are activations as they lie, B words of a packed group. Tiles are dear to store and to look at,
 * so nothing is done with sums before a whole block of 256 elements is in them: weights take the
 * scale of their sub-block beforehand. s · q has up to 14 bits, and so becomes two signed bytes,
 * s · q = 128 · high + low, each with tiles of its own. For every block of 32 output rows
 *
 *   1. the words are multiplied with their scales, once for CHUNK activation rows;
 *   2. groups of 16 activation rows meet them: sixteen products, four tiles of sums;
 *   3. the sums, 16 outputs to a register, go to the float accumulators.
 *
 * The integers are exact and the floats take the canon's order (kernels.h), so the bits are those
 * of every other level. The last group reaches back over rows that are done already, which gives
 * them the same results again. Step 1 takes as long as some twenty rows do with AVX-512, which
 * therefore has narrow batches, and weights that are not packed. Blocks of 32 elements are left to
 * it as well: every 32 elements would need a tile of sums, and a store takes as long as the product
 * before it.
 *
 * Tile registers are set up and given back within each call: threads keep no state. */
#include "backend/cpu/matmul_amx.h"
#include "backend/cpu/words_avx512.h"

#include "backend/cpu/loops_x86.h"
#include "base/mem.h"

#include "backend/cpu/columns_x86.h"

enum {
    ROWS = 16,     /* of activations in a tile */
    CHUNK = 128,   /* activation rows that meet a decoded block */
    MIN_ROWS = 48, /* below: AVX-512 */
    AT_ONCE = CHUNK / ROWS
};

/* ---- tiles ---- */

/* Registers: 0 to 3 sums, 4 activations, 5 to 7 weights. The compiler knows nothing of what they
 * read and write. */
#define TILE_LOAD(t, p, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(p), "r"((long)(stride)) : "memory")
#define TILE_STORE(t, p) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(p), "r"(64L) : "memory")
#define TILE_ZERO(t) __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_DOT(c, a, b) __asm__ volatile("tdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::)
#define TILE_RELEASE __asm__ volatile("tilerelease" ::)

static void shape_tiles(void) {
    struct {
        uint8_t palette, start, zero[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } s = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        s.rows[i] = ROWS;
        s.row_bytes[i] = 64;
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(s));
}

/* ---- weights ---- */

typedef struct amx_block {
    vi low[64], high[64]; /* the words in digits of s · q */
    vi minima[8];         /* as pairs of int16 */
    vf d, dmin;
} amx_block;

/* Rows of an affine map of bytes: bit i of the result is bit `from` of the byte. */
#define BIT(i, from) ((uint64_t)1 << (8 * (7 - (i)) + (from)))
#define AFFINE(v, bits, flip) \
    _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64((long long)(bits)), flip)

/* Bits 0 … n-1 from bit `from` on. */
INLINE uint64_t take(const int n, const int from) {
    uint64_t m = 0;
    UNROLL for (int i = 0; i < n; i++) m |= BIT(i, from + i);
    return m;
}

/* All bits from `first` on, which a sign needs. */
INLINE uint64_t spread(const int first, const int from) {
    uint64_t m = 0;
    UNROLL for (int i = first; i < 8; i++) m |= BIT(i, from);
    return m;
}

/* Word i of the elements 32s … 32s+31 as signed bytes. */
INLINE vi signed_word(so_dtype t, const uint8_t *words, const int s, const int i) {
    const int half = s / 4, quarter = s % 4;
    vi v;
    switch (t) {
    case SO_DTYPE_Q2_K:
        return AFFINE(word_at(words, 8 * half + i), take(2, 2 * quarter), 0);
    case SO_DTYPE_Q3_K: /* − 4 */
        v = AFFINE(word_at(words, 8 * half + i), take(2, 2 * quarter), 0);
        return vi_or(v, AFFINE(word_at(words, 16 + i), spread(2, s), 0xFC));
    case SO_DTYPE_Q4_K:
        return AFFINE(word_at(words, s / 2 * 8 + i), take(4, s % 2 * 4), 0);
    case SO_DTYPE_Q5_K:
        v = AFFINE(word_at(words, s / 2 * 8 + i), take(4, s % 2 * 4), 0);
        return vi_or(v, AFFINE(word_at(words, 32 + i), BIT(4, s), 0));
    default: /* Q6_K, − 32 */
        v = AFFINE(word_at(words, 16 * half + quarter % 2 * 8 + i), take(4, quarter / 2 * 4), 0);
        return vi_or(v, AFFINE(word_at(words, 32 + 8 * half + i),
                               BIT(4, 2 * quarter) | spread(5, 2 * quarter + 1), 0xE0));
    }
}

/* The digits of s · q for bytes q and int16 s: products of the even and the odd bytes, and their
 * bits 0 … 6 and 7 … put together again. */
INLINE void digits(vi q, vi s, bool has_sign, vi *low, vi *high) {
    const vi even = _mm512_set1_epi16(0x00FF), seven = vi_set8(0x7F);
    vi a = has_sign ? _mm512_srai_epi16(_mm512_slli_epi16(q, 8), 8) : vi_and(q, even);
    vi b = has_sign ? _mm512_srai_epi16(q, 8) : _mm512_srli_epi16(q, 8);
    a = _mm512_mullo_epi16(a, s);
    b = _mm512_mullo_epi16(b, s);
    *low = vi_and(_mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAAu, a, _mm512_slli_epi16(b, 8)), seven);
    *high = _mm512_mask_blend_epi8(0xAAAAAAAAAAAAAAAAu, _mm512_srli_epi16(a, 7),
                                   _mm512_slli_epi16(b, 1));
}

/* Both int16 of a lane from its low or its high one. */
INLINE vi twice_low(vi v) { return vi_or(vi_scale_even(v), vi_shl32(v, 16)); }
INLINE vi twice_high(vi v) {
    v = vi_scale_odd(v);
    return vi_or(v, vi_shl32(v, 16));
}

INLINE void decode_block(so_dtype t, const uint8_t *head, const uint8_t *words, amx_block *out) {
    const uint8_t *bytes = head + (has_min256(t) ? 64 : 32);
    const int n_pairs = sub_is_32(t) ? 4 : 8;
    const int per = 64 / (2 * n_pairs); /* words of a sub-block */
    out->d = vf_halves(head);
    out->dmin = has_min256(t) ? vf_halves(head + 32) : vf_set1(0);
    UNROLL for (int p = 0; p < n_pairs; p++) {
        vi v = has_min256(t) ? vi_pairs_u(bytes + 32 * p) : vi_pairs_s(bytes + 32 * p);
        if (has_min256(t))
            out->minima[p] = sub_is_32(t) ? vi_pairs_u(bytes + 128 + 32 * p) : vi_shr(v, 4);
        if (t == SO_DTYPE_Q2_K)
            v = vi_and(v, vi_set8(15));
        vi scale[2] = {twice_low(v), twice_high(v)};
        UNROLL for (int i = 2 * p * per; i < 2 * (p + 1) * per; i++)
            digits(signed_word(t, words, i / 8, i % 8), scale[i / per % 2], !has_min256(t),
                   &out->low[i], &out->high[i]);
    }
}

/* ---- products ---- */

typedef struct tile_sums {
    vi low[ROWS], high[ROWS];
} tile_sums;

/* A group of rows with a block of both columns. */
INLINE void dots(const int8_t *x, size_t stride, const amx_block *w, tile_sums *out) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int i = 0; i < 64; i += 16, x += 64) {
        TILE_LOAD(4, x, stride);
        TILE_LOAD(5, w[0].low + i, 64);
        TILE_DOT(0, 4, 5);
        TILE_LOAD(6, w[0].high + i, 64);
        TILE_DOT(1, 4, 6);
        TILE_LOAD(7, w[1].low + i, 64);
        TILE_DOT(2, 4, 7);
        TILE_LOAD(5, w[1].high + i, 64);
        TILE_DOT(3, 4, 5);
    }
    TILE_STORE(0, out[0].low);
    TILE_STORE(1, out[0].high);
    TILE_STORE(2, out[1].low);
    TILE_STORE(3, out[1].high);
}

INLINE void add_sums(so_dtype t, const amx_block *w, const tile_sums *c, const so_q256 *x,
                     size_t n_blocks, vf (*acc)[2]) {
    const int n_pairs = sub_is_32(t) ? 4 : 8;
    for (int i = 0; i < ROWS; i++, x += n_blocks) {
        const int16_t *pairs = sub_is_32(t) ? x->sum32 : x->sum16;
        vf dx = vf_set1(x->d);
        UNROLL for (int j = 0; j < 2; j++) {
            vi sum = vi_add32(vi_shl32(c[j].high[i], 7), c[j].low[i]), m = vi_set32(0);
            vf f = vf_fma(vf_mul(w[j].d, dx), vf_from_int(sum), acc[i][j]);
            if (has_min256(t)) {
                UNROLL for (int p = 0; p < n_pairs; p++) m =
                    vi_dot2_add(m, w[j].minima[p], vi_bcast(pairs + 2 * p));
                f = vf_fnma(vf_mul(w[j].dmin, dx), vf_from_int(m), f);
            }
            acc[i][j] = f;
        }
    }
}

/* The rows of group i; the last one ends with the last row. */
INLINE int first_row(const so_mm *a, int i) { return SO_MIN(ROWS * i, a->act.n - ROWS); }

/* Groups `first` … of rows with all blocks of a tile. */
INLINE void chunk(const so_mm *a, so_dtype t, const columns *at, int first, int n, vf (*acc)[2]) {
    size_t k = (size_t)a->act.k, n_blocks = k / 256;
    amx_block w[2];
    tile_sums c[2][2];
    for (size_t b = 0; b < n_blocks; b++) {
        fetch next = fetch_of(t, at, b, (size_t)n);
        UNROLL for (int j = 0; j < 2; j++) decode_block(t, at->head[j] + b * so_pack_head(t),
                                                        at->word[j] + b * so_pack_words(t), &w[j]);
        for (int i = 0; i <= n; i++) { /* sums are used one group later, when they are there */
            if (i < n)
                dots(a->act.q + (size_t)first_row(a, first + i) * k + 256 * b, k, w, c[i & 1]);
            fetch_some(&next);
            if (i > 0)
                add_sums(t, w, c[~i & 1],
                         a->act.blocks256 + (size_t)first_row(a, first + i - 1) * n_blocks + b,
                         n_blocks, acc + ROWS * (i - 1));
        }
    }
}

INLINE void product(const so_mm *a, so_dtype t, long begin, long end) {
    vf acc[CHUNK][2];
    size_t words_at = so_pack_words_at(t, (size_t)a->act.k / 256);
    int n_groups = (a->act.n + ROWS - 1) / ROWS, span = span_rows(a, CHUNK) / ROWS;
    shape_tiles();
    for (int from = 0; from < n_groups; from += span)
        for (long r = begin; r < end; r += 2 * LANES) {
            columns at = columns_at(a, words_at, r, end);
            int to = SO_MIN(from + span, n_groups);
            if (r + 2 * LANES >= end)
                at.next = to < n_groups ? group_at(a, begin) : a->next;
            for (int i = from; i < to; i += AT_ONCE) {
                int n = SO_MIN((int)AT_ONCE, to - i);
                for (int j = 0; j < ROWS * n; j++)
                    acc[j][0] = acc[j][1] = vf_set1(0);
                chunk(a, t, &at, i, n, acc);
                for (int j = 0; j < n; j++)
                    ptile_store(a, r, end, first_row(a, i + j), ROWS,
                                (const vf(*)[2])acc + ROWS * j);
                at.next = NULL;
            }
        }
    TILE_RELEASE;
}

#define AMX_PRODUCT(name, dtype)                                  \
    void so_mm_amx_##name(const so_mm *a, long begin, long end) { \
        if (a->group_bytes && a->act.n >= MIN_ROWS)               \
            product(a, dtype, begin, end);                        \
        else                                                      \
            so_kernels_avx512.matmul[dtype](a, begin, end);       \
    }
SO_MM_K_DTYPES(AMX_PRODUCT)

/* ---- what the level could do at most ---- */

long so_amx_multiply_all(long n) {
    static const int8_t zeros[1024];
    shape_tiles();
    TILE_LOAD(4, zeros, 64);
    TILE_LOAD(6, zeros, 64);
    TILE_LOAD(7, zeros, 64);
    long steps = n / 8; /* so that a call takes about as long as at other levels */
    for (long r = 0; r < steps; r++) {
        TILE_ZERO(0); /* no sum waits for the one before */
        TILE_DOT(0, 4, 6);
        TILE_ZERO(1);
        TILE_DOT(1, 4, 7);
    }
    TILE_RELEASE;
    return steps * 2 * ROWS * 16 * 64;
}
