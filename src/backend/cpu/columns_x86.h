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

typedef struct columns {
    const uint8_t *head[2], *word[2];
    const uint8_t *next; /* what block 0 fetches ahead, into the second cache; NULL: nothing */
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

/* All of it at once, and into the first cache: a tile of blocks of 32 fits it. */
INLINE void fetch_ahead(so_dtype dtype, const columns *at, size_t b) {
    fetch f = fetch_of(dtype, at, b, 1);
    for (; f.at < f.end; f.at += 64)
        _mm_prefetch(f.at, _MM_HINT_T0);
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

INLINE columns columns_at(const so_mm *a, size_t words_at, long r, long end) {
    const uint8_t *g = group_at(a, r), *g1 = g;
    if (COL_GROUP && r + SO_PACK_ROWS < end)
        g1 = g + a->group_bytes; /* else the first group twice, of which one result is dropped */
    return (columns){{g, g1 + COL_HEAD},
                     {g + words_at, g1 + words_at + COL_WORD},
                     g + a->group_bytes * (2 * LANES / SO_PACK_ROWS)};
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
