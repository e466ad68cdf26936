/* Tiles of packed weights (pack.h): where the columns of a tile are (packed_x86.h draws them), what
 * is prefetched while a tile is used, and how its results are written. Uses the SIMD operations of
 * simd_avx2.h and simd_avx512.h. Included by packed_x86.h and matmul_amx.c. */
#include "backend/cpu/pack.h"

INLINE bool has_min32(so_dtype t) { return t == SO_DTYPE_Q4_1 || t == SO_DTYPE_Q5_1; }

INLINE bool has_min256(so_dtype t) {
    return t == SO_DTYPE_Q2_K || t == SO_DTYPE_Q4_K || t == SO_DTYPE_Q5_K;
}

/* Whether sub-blocks have 32 elements; else they have 16. */
INLINE bool sub_is_32(so_dtype t) { return t == SO_DTYPE_Q4_K || t == SO_DTYPE_Q5_K; }

/* Columns of LANES rows in a tile. A step multiplies two of them: the whole tile with 64-byte
 * vectors, one of its row groups with 32-byte vectors. */
enum { COLUMNS = SO_PACK_TILE / LANES, STEPS = COLUMNS / 2 };

typedef struct weight_tile {
    const uint8_t *at;   /* its first block */
    int groups;          /* row groups: 2, or 1 at the end of a matrix */
    size_t left;         /* bytes from `at` to the end of the rows that the thread computes */
    const uint8_t *next; /* what the thread reads after these rows; NULL: nothing */
    so_prefetch prefetch;
    float *out; /* results to prefetch: [n][m], from the tile's first row on; NULL: none */
} weight_tile;

/* Steps that the tile needs: one per group with 32-byte vectors, else one. */
INLINE int steps_of(const weight_tile *at) { return STEPS == 2 ? at->groups : 1; }

/* First row of column c. With 64-byte vectors and a tile of one group, both columns are that group,
 * and the result of the second is not stored. */
INLINE int column_row(const weight_tile *at, int c) {
    return STEPS == 1 && at->groups == 1 ? 0 : c * LANES;
}

INLINE const uint8_t *block_of(so_dtype dtype, const weight_tile *at, size_t b) {
    return at->at + b * so_pack_block_bytes(dtype, at->groups);
}
INLINE const uint8_t *head_of(so_dtype dtype, const weight_tile *at, size_t b, int c) {
    return block_of(dtype, at, b) + so_pack_head_at(dtype, column_row(at, c));
}
INLINE const uint8_t *words_of(so_dtype dtype, const weight_tile *at, size_t b, int c) {
    return block_of(dtype, at, b) + so_pack_words_at(dtype, at->groups, column_row(at, c));
}

/* The prefetches issued while one block is used: as many bytes as the block has, `lead` bytes ahead
 * of it (so_prefetch). A core can have about 16 cache misses in flight; one more prefetch stalls
 * all later instructions. The prefetches of a large block are therefore issued in several
 * batches. */
typedef struct prefetch {
    const char *at, *end; /* what is left to prefetch */
    size_t n_bytes;       /* per batch */
    bool l1;
} prefetch;

/* The address that the thread reads `lead` bytes after the start of block b; NULL: none. */
INLINE const uint8_t *ahead_of(so_dtype dtype, const weight_tile *at, size_t b) {
    size_t done = b * so_pack_block_bytes(dtype, at->groups), to = done + at->prefetch.lead;
    if (at->prefetch.lead == 0)
        return NULL;
    if (to < at->left)
        return at->at + to;
    return at->next ? at->next + (to - at->left) : NULL;
}

INLINE prefetch prefetch_of_block(so_dtype dtype, const weight_tile *at, size_t b,
                                  size_t n_batches) {
    size_t n_bytes = so_pack_block_bytes(dtype, at->groups);
    const char *p = (const char *)ahead_of(dtype, at, b);
    size_t lines = (n_bytes / 64 + n_batches - 1) / n_batches;
    return p ? (prefetch){p, p + n_bytes, 64 * lines, at->prefetch.l1} : (prefetch){0};
}

INLINE void prefetch_batch(prefetch *f) {
    const char *p = f->at, *end = SO_MIN(p + f->n_bytes, f->end);
    if (f->l1)
        for (; p < end; p += 64)
            _mm_prefetch(p, _MM_HINT_T0);
    else
        for (; p < end; p += 64)
            _mm_prefetch(p, _MM_HINT_T1);
    f->at = p;
}

/* Issues all prefetches for a block of 32 elements at once, since it has few cache lines. The empty
 * assembly keeps gcc from computing each address once for both branches, in a register of its
 * own. */
INLINE void prefetch_ahead(so_dtype dtype, const weight_tile *at, size_t b) {
    const size_t n_bytes = so_pack_block_bytes(dtype, 2);
    const char *p = (const char *)ahead_of(dtype, at, b);
    if (!p)
        return;
    if (at->prefetch.l1) {
        __asm__("" : "+r"(p));
        UNROLL for (size_t i = 0; i < n_bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T0);
    } else {
        __asm__("" : "+r"(p));
        UNROLL for (size_t i = 0; i < n_bytes; i += 64) _mm_prefetch(p + i, _MM_HINT_T1);
    }
}

/* If a product has this many bytes of results or more, their cache lines are assumed to have left
 * L1 and L2 since they were last used. */
enum { UNCACHED_BYTES = 128 << 10 };

/* Prefetches the cache lines of one row of results, for writing. A core buffers only a few dozen
 * stores and stalls when all of them wait for their cache lines. A processor without prefetchw
 * ignores the instruction. */
INLINE void prefetch_result(const so_mm *a, const weight_tile *at, size_t row) {
    const char *p = (const char *)(at->out + row * (size_t)a->m);
    UNROLL for (size_t i = 0; i < SO_PACK_TILE * sizeof(float);
                i += 64) __asm__ volatile("prefetchw %0" : : "m"(p[i]));
}

/* Number of activation rows in a span (packed_x86.h). The span's quantised values and its block
 * tables (for K types about as large as the values) should stay in L2. */
INLINE int span_rows(const so_mm *a, int chunk) {
    enum { BYTES = 1 << 20 };
    return (int)SO_MAX(BYTES / (2L * chunk * a->act.k), 1L) * chunk;
}

INLINE const uint8_t *packed_at(const so_mm *a, long r) {
    return a->w + (size_t)(r / SO_PACK_TILE) * a->tile_bytes;
}

INLINE bool results_uncached(const so_mm *a) {
    return (size_t)a->act.n * (size_t)a->m * sizeof(float) >= UNCACHED_BYTES;
}

/* The tile that begins at row r. The thread computes rows begin … end-1. `again`: after them it
 * reads the same rows once more, for the next span. */
INLINE weight_tile weight_tile_at(const so_mm *a, long r, long begin, long end, bool again) {
    size_t n_tiles = (size_t)((end - r + SO_PACK_TILE - 1) / SO_PACK_TILE);
    return (weight_tile){packed_at(a, r),
                         so_pack_groups(a->m, r),
                         n_tiles * a->tile_bytes,
                         again ? packed_at(a, begin) : a->next,
                         a->prefetch,
                         results_uncached(a) ? a->out + r : NULL};
}

INLINE vi word_at(const uint8_t *words, int i) { return vi_load(words + SO_PACK_WORD * i); }

/* Stores the results of the tile that begins at row r, for activation rows first … first+n-1. Rows
 * from `end` on are padding or belong to another thread, and are not stored. */
INLINE void ptile_store(const so_mm *a, long r, long end, int first, int n,
                        const vf (*acc)[COLUMNS]) {
    UNROLL for (int j = 0; j < COLUMNS; j++) {
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
