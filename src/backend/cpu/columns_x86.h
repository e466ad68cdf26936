/* Tiles of packed weights: where the two columns of a tile are (packed_x86.h defines them), what is
 * prefetched while a tile is used, and how its results are written. Uses the SIMD operations of
 * simd_avx2.h and simd_avx512.h. Included by packed_x86.h and matmul_amx.c. */
#include "backend/cpu/pack.h"

INLINE bool has_min32(so_dtype t) { return t == SO_DTYPE_Q4_1 || t == SO_DTYPE_Q5_1; }

INLINE bool has_min256(so_dtype t) {
    return t == SO_DTYPE_Q2_K || t == SO_DTYPE_Q4_K || t == SO_DTYPE_Q5_K;
}

/* Whether sub-blocks have 32 elements; else they have 16. */
INLINE bool sub_is_32(so_dtype t) { return t == SO_DTYPE_Q4_K || t == SO_DTYPE_Q5_K; }

/* One tile: the addresses of the heads and words (pack.h) of its two columns. `next` is the tile to
 * prefetch while this one is used, NULL: none. A row group of `next` has next_bytes bytes, and its
 * words begin at offset next_words. */
typedef struct weight_tile {
    const uint8_t *head[2], *word[2];
    const uint8_t *next;
    size_t next_bytes, next_words;
    float *out; /* results to prefetch: [n][m], from the tile's first row on; NULL: none */
} weight_tile;

/* Memory latency is about the compute time of one tile, so part b of the next tile is prefetched
 * while block b is used. A core can have about 16 cache misses in flight; one more prefetch stalls
 * all later instructions. The prefetches of a large block are therefore issued in several batches
 * while the block is used. */
typedef struct prefetch {
    const char *at, *end;
    size_t lines; /* per batch */
} prefetch;

/* Prepares to prefetch n_bytes at p in `n_batches` batches; p NULL: nothing. */
INLINE prefetch prefetch_start(const uint8_t *p, size_t n_bytes, size_t n_batches) {
    const char *at = (const char *)p;
    return p ? (prefetch){at, at + n_bytes, (n_bytes / 64 + n_batches - 1) / n_batches}
             : (prefetch){0};
}

INLINE prefetch prefetch_of_block(so_dtype dtype, const weight_tile *at, size_t b,
                                  size_t n_batches) {
    const size_t part = (so_pack_head(dtype) + so_pack_words(dtype)) * (2 * LANES / SO_PACK_ROWS);
    return prefetch_start(at->next ? at->next + b * part : NULL, part, n_batches);
}

INLINE void prefetch_batch(prefetch *f) {
    const char *p = f->at;
    for (size_t i = 0; i < f->lines && p < f->end; i++, p += 64)
        _mm_prefetch(p, _MM_HINT_T1);
    f->at = p;
}

/* Row groups per tile. */
enum { TILE_GROUPS = 2 * LANES / SO_PACK_ROWS };

/* Prefetch distance in bytes of weights. The weights are prefetched into L1. It has room for so
 * many bytes in addition to the other data of blocks of 32, for any length of a row. */
enum { PREFETCH_LEAD = 12 << 10 };

INLINE void prefetch_block(so_dtype dtype, const uint8_t *heads, const uint8_t *words, size_t b) {
    _mm_prefetch((const char *)heads + b * so_pack_head(dtype), _MM_HINT_T0);
    UNROLL for (size_t i = 0; i < so_pack_words(dtype); i += 64)
        _mm_prefetch((const char *)words + b * so_pack_words(dtype) + i, _MM_HINT_T0);
}

/* While block b of n is used: prefetches the block PREFETCH_LEAD bytes later, in this
 * tile or the next. */
INLINE void prefetch_ahead(so_dtype dtype, const weight_tile *at, size_t b, size_t n) {
    const size_t part = (so_pack_head(dtype) + so_pack_words(dtype)) * TILE_GROUPS;
    const uint8_t *heads = at->head[0], *words = at->word[0];
    size_t bytes = (size_t)(at->head[1] - heads), to = b + PREFETCH_LEAD / part;
    if (!at->next || to >= 2 * n)
        return;
    if (to >= n) {
        heads = at->next;
        words = heads + at->next_words;
        bytes = at->next_bytes;
        to -= n;
    }
    UNROLL for (size_t j = 0; j < TILE_GROUPS; j++)
        prefetch_block(dtype, heads + j * bytes, words + j * bytes, to);
}

/* Results of this size or more are assumed to be no longer in L1 and L2 when they are written. */
enum { UNCACHED_BYTES = 128 << 10 };

/* Prefetches the cache lines of one row of results, for writing. A core buffers only a few dozen
 * stores and stalls when all of them wait for their cache lines. A processor without prefetchw
 * ignores the instruction. */
INLINE void prefetch_result(const so_mm *a, const weight_tile *at, size_t row) {
    const char *p = (const char *)(at->out + row * (size_t)a->m);
    UNROLL for (size_t i = 0; i < 2 * LANES * sizeof(float);
                i += 64) __asm__ volatile("prefetchw %0" : : "m"(p[i]));
}

/* Number of activation rows in a span: a span is multiplied with all weights before the next one.
 * Its quantised values and block tables (of the same size for K types) should stay in L2. */
INLINE int span_rows(const so_mm *a, int chunk) {
    enum { BYTES = 1 << 20 };
    return (int)SO_MAX(BYTES / (2L * chunk * a->act.k), 1L) * chunk;
}

INLINE const uint8_t *group_at(const so_mm *a, long r) {
    return a->w + (size_t)(r / SO_PACK_ROWS) * a->group_bytes;
}

INLINE bool results_uncached(const so_mm *a) {
    return (size_t)a->act.n * (size_t)a->m * sizeof(float) >= UNCACHED_BYTES;
}

INLINE weight_tile weight_tile_at(const so_mm *a, size_t words_at, long r, long end) {
    const uint8_t *g = group_at(a, r), *g1 = g;
    if (COL_GROUP && r + SO_PACK_ROWS < end)
        g1 = g + a->group_bytes; /* otherwise group 0 twice; the second result is dropped */
    return (weight_tile){{g, g1 + COL_HEAD},
                         {g + words_at, g1 + words_at + COL_WORD},
                         g + a->group_bytes * TILE_GROUPS,
                         a->group_bytes,
                         words_at,
                         results_uncached(a) ? a->out + r : NULL};
}

/* Sets the tile to prefetch during the last tile of a thread's rows: `again`, the first tile of the
 * same rows, or if that is NULL the next matrix. */
INLINE void set_next_tile(const so_mm *a, const uint8_t *again, weight_tile *at) {
    at->next = again ? again : a->next;
    if (!again) {
        at->next_bytes = a->next_bytes;
        at->next_words = a->next_words;
    }
}

INLINE vi word_at(const uint8_t *words, int i) { return vi_load(words + SO_PACK_WORD * i); }

/* Stores the results of a tile that begins at row r. Rows from `end` on are padding or
 * belong to another thread. */
INLINE void ptile_store(const so_mm *a, long r, long end, int first, int n, const vf (*acc)[2]) {
    UNROLL for (int j = 0; j < 2; j++) {
        long row = r + (long)LANES * j;
        int valid = (int)SO_MIN((long)LANES, end - row);
        if (valid <= 0)
            continue;
        float lanes[LANES] = {0};
        if (a->bias)
            memcpy(lanes, a->bias + row, (size_t)valid * sizeof(float));
        vf bias = vf_load(lanes);
        float *out = a->out + (size_t)first * (size_t)a->m + (size_t)row;
        for (int i = 0; i < n; i++, out += a->m) {
            vf v = a->bias ? vf_add(acc[i][j], bias) : acc[i][j];
            vf_store(valid == LANES ? out : lanes, v);
            if (valid < LANES)
                memcpy(out, lanes, (size_t)valid * sizeof(float));
        }
    }
}
