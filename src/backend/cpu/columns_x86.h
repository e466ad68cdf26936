/* Where the two columns of a tile of packed weights lie (packed_x86.h says what they are), what is
 * fetched while they are used, and how their results are stored. Over the words of the including
 * file. */
#include "backend/cpu/pack.h"

INLINE bool has_min32(so_dtype t) { return t == SO_DTYPE_Q4_1 || t == SO_DTYPE_Q5_1; }

INLINE bool has_min256(so_dtype t) {
    return t == SO_DTYPE_Q2_K || t == SO_DTYPE_Q4_K || t == SO_DTYPE_Q5_K;
}

/* Sub-blocks of 32 elements; else of 16. */
INLINE bool sub_is_32(so_dtype t) { return t == SO_DTYPE_Q4_K || t == SO_DTYPE_Q5_K; }

/* `next`: the tile that comes after this one, NULL: nothing is to be fetched. Its groups are
 * next_bytes long, and their words begin at next_words. */
typedef struct columns {
    const uint8_t *head[2], *word[2];
    const uint8_t *next;
    size_t next_bytes, next_words;
    float *out; /* [n][m], at the tile's first row; NULL: they are near */
} columns;

/* Memory answers after the time of a whole tile: part `b` of what lies behind this one is fetched
 * while block `b` is used. A core has some 16 requests under way at most, and a fetch beyond them
 * holds up everything behind it, so those of a large block are strewn over its use. */
typedef struct fetch {
    const char *at, *end;
    size_t lines; /* at once */
} fetch;

/* To be fetched in `times` strokes; NULL: nothing. */
INLINE fetch fetch_from(const uint8_t *p, size_t n_bytes, size_t times) {
    const char *at = (const char *)p;
    return p ? (fetch){at, at + n_bytes, (n_bytes / 64 + times - 1) / times} : (fetch){0};
}

INLINE fetch fetch_of(so_dtype dtype, const columns *at, size_t b, size_t times) {
    const size_t part = (so_pack_head(dtype) + so_pack_words(dtype)) * (2 * LANES / SO_PACK_ROWS);
    return fetch_from(at->next ? at->next + b * part : NULL, part, times);
}

INLINE void fetch_some(fetch *f) {
    const char *p = f->at;
    for (size_t i = 0; i < f->lines && p < f->end; i++, p += 64)
        _mm_prefetch(p, _MM_HINT_T1);
    f->at = p;
}

/* Groups that a tile is made of. */
enum { TILE_GROUPS = 2 * LANES / SO_PACK_ROWS };

/* Bytes of weights that lie between what is used and what is fetched. To the first cache, which
 * holds them besides all else that a block of 32 needs, whatever the length of a row is. */
enum { FETCH_LEAD = 12 << 10 };

INLINE void fetch_block(so_dtype dtype, const uint8_t *heads, const uint8_t *words, size_t b) {
    _mm_prefetch((const char *)heads + b * so_pack_head(dtype), _MM_HINT_T0);
    UNROLL for (size_t i = 0; i < so_pack_words(dtype); i += 64)
        _mm_prefetch((const char *)words + b * so_pack_words(dtype) + i, _MM_HINT_T0);
}

/* While block b of n is used: the one that comes FETCH_LEAD later, of this tile or the next. */
INLINE void fetch_ahead(so_dtype dtype, const columns *at, size_t b, size_t n) {
    const size_t part = (so_pack_head(dtype) + so_pack_words(dtype)) * TILE_GROUPS;
    const uint8_t *heads = at->head[0], *words = at->word[0];
    size_t bytes = (size_t)(at->head[1] - heads), to = b + FETCH_LEAD / part;
    if (!at->next || to >= 2 * n)
        return;
    if (to >= n) {
        heads = at->next;
        words = heads + at->next_words;
        bytes = at->next_bytes;
        to -= n;
    }
    UNROLL for (size_t j = 0; j < TILE_GROUPS; j++)
        fetch_block(dtype, heads + j * bytes, words + j * bytes, to);
}

/* Results of so many bytes lie in no near cache when they are written again. */
enum { FAR_BYTES = 128 << 10 };

/* The lines that a row of results will lie in: asked for early, since a core that waits for them
 * holds no more than some dozens of stores, and to be written. Where the processor does not know
 * the instruction, it does nothing. */
INLINE void fetch_result(const so_mm *a, const columns *at, size_t row) {
    const char *p = (const char *)(at->out + row * (size_t)a->m);
    UNROLL for (size_t i = 0; i < 2 * LANES * sizeof(float);
                i += 64) __asm__ volatile("prefetchw %0" : : "m"(p[i]));
}

/* Activation rows that meet all weights before the next ones do: their rounded values, with the
 * tables beside them (as large again for K types), should stay in the second cache. */
INLINE int span_rows(const so_mm *a, int chunk) {
    enum { BYTES = 1 << 20 };
    return (int)SO_MAX(BYTES / (2L * chunk * a->act.k), 1L) * chunk;
}

INLINE const uint8_t *group_at(const so_mm *a, long r) {
    return a->w + (size_t)(r / SO_PACK_ROWS) * a->group_bytes;
}

INLINE bool is_far(const so_mm *a) {
    return (size_t)a->act.n * (size_t)a->m * sizeof(float) >= FAR_BYTES;
}

INLINE columns columns_at(const so_mm *a, size_t words_at, long r, long end) {
    const uint8_t *g = group_at(a, r), *g1 = g;
    if (COL_GROUP && r + SO_PACK_ROWS < end)
        g1 = g + a->group_bytes; /* else the first group twice, of which one result is dropped */
    return (columns){{g, g1 + COL_HEAD},
                     {g + words_at, g1 + words_at + COL_WORD},
                     g + a->group_bytes * TILE_GROUPS,
                     a->group_bytes,
                     words_at,
                     is_far(a) ? a->out + r : NULL};
}

/* After the last tile of a thread's rows: the first of them again, or another matrix. */
INLINE void next_columns(const so_mm *a, const uint8_t *again, columns *at) {
    at->next = again ? again : a->next;
    if (!again) {
        at->next_bytes = a->next_bytes;
        at->next_words = a->next_words;
    }
}

INLINE vi word_at(const uint8_t *words, int i) { return vi_load(words + SO_PACK_WORD * i); }

/* Rows r … of a tile; those from `end` on are padding or belong to another thread. */
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
