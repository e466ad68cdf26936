/* Attention over one page for several queries, in the SIMD operations of rows_x86.h.
 *
 * For scores a lane is a position, for values it is an element of the head. So every sum stays
 * within one lane and is computed in the order of kernels.h. In this file a tile is a group of
 * queries whose sums stay in registers; each loaded vector is used for all queries of a tile. With
 * more queries than one tile holds, F16 pages are converted once for all tiles. Queries are
 * independent of each other, so results are bit-identical for any tile size.
 *
 *   ATTN_SQ    queries per tile of scores, for a page of 32 positions
 *   ATTN_BQ    the same for a Q8_0 cache, whose sums are integers
 *   ATTN_NQ    queries per tile of values
 *   ATTN_NV    vectors of the output per tile of values
 *
 * Included at the end of rows_x86.h. Keeps no state; any thread. */

enum { WIDEN_STEP = 64 }; /* elements of the head converted at a time */

typedef enum kv_kind { KV_F32, KV_F16, KV_Q8 } kv_kind;

/* Bytes per element. */
INLINE size_t kv_bytes(kv_kind t) { return t == KV_F32 ? 4 : t == KV_F16 ? 2 : 1; }

INLINE v16 kv_load(const void *p, size_t i, kv_kind t) {
    return t == KV_F32   ? v_load((const float *)p + i)
           : t == KV_F16 ? v_load_f16((const uint16_t *)p + i)
                         : v_load_i8((const int8_t *)p + i);
}

INLINE v16 kv_load_n(const void *p, size_t i, int n, kv_kind t) {
    return t == KV_F16 ? v_load_f16_n((const uint16_t *)p + i, n)
                       : v_load_n((const float *)p + i, n);
}

/* The next page is prefetched row by row while this one is used: a core has about 16 misses in
 * flight, and prefetching a whole page at once would stall. A row of keys is one element of the
 * head for all positions (four elements with Q8_0), a row of values is one position. */
typedef struct row_prefetch {
    const char *at;
    size_t stride; /* bytes of a row */
    int lines;     /* of 64 bytes, per row */
    bool l1;       /* into L1, else into L2 */
} row_prefetch;

INLINE void prefetch_row(row_prefetch f, int row) {
    const char *at = f.at + (size_t)row * f.stride;
    if (f.l1)
        UNROLL for (int i = 0; i < f.lines; i++) _mm_prefetch(at + 64 * i, _MM_HINT_T0);
    else
        UNROLL for (int i = 0; i < f.lines; i++) _mm_prefetch(at + 64 * i, _MM_HINT_T1);
}

/* Makes l1 a compile-time constant, so that the loops of a tile do not test it. */
INLINE row_prefetch prefetch_to(row_prefetch f, const bool l1) {
    f.l1 = l1;
    return f;
}

/* ---- queries ---- */

static void interleave(const float *const *q, int n, int d, float scale, void *to) {
    float *out = to;
    __m128 s = _mm_set1_ps(scale);
    int i = 0;
    for (; i + 4 <= n; i += 4) {
        int e = 0;
        for (; e + 4 <= d; e += 4) {
            __m128 x[4];
            UNROLL for (int c = 0; c < 4; c++) x[c] = _mm_mul_ps(_mm_loadu_ps(q[i + c] + e), s);
            _MM_TRANSPOSE4_PS(x[0], x[1], x[2], x[3]);
            UNROLL for (int c = 0; c < 4; c++) _mm_storeu_ps(out + (size_t)((e + c) * n + i), x[c]);
        }
        for (; e < d; e++)
            for (int c = 0; c < 4; c++)
                out[e * n + i + c] = q[i + c][e] * scale;
    }
    for (; i < n; i++)
        for (int e = 0; e < d; e++)
            out[e * n + i] = q[i][e] * scale;
}

/* ---- scores ---- */

/* Scores of `n` queries for `rows` elements of the head; sums start at 0 or continue from s. wide:
 * where the keys are stored as floats, for other tiles (NULL: nowhere). */
INLINE void score_tile(const void *k, int rows, row_prefetch next, const float *q, int stride_q,
                       kv_kind t, float *wide, bool start, const int n, float *s, size_t stride) {
    v16 sum[12][2];
    UNROLL for (int i = 0; i < n; i++) {
        sum[i][0] = start ? v_set1(0) : v_load(s + (size_t)i * stride);
        sum[i][1] = start ? v_set1(0) : v_load(s + (size_t)i * stride + 16);
    }
    NO_UNROLL for (int e = 0; e < rows; e++, q += stride_q) {
        v16 low = kv_load(k, (size_t)e * SO_KV_PAGE, t);
        v16 high = kv_load(k, (size_t)e * SO_KV_PAGE + 16, t);
        prefetch_row(next, e);
        if (wide) {
            v_store(wide + e * SO_KV_PAGE, low);
            v_store(wide + e * SO_KV_PAGE + 16, high);
        }
        UNROLL for (int i = 0; i < n; i++) {
            v16 x = v_set1(q[i]);
            sum[i][0] = v_fma(x, low, sum[i][0]);
            sum[i][1] = v_fma(x, high, sum[i][1]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) {
        v_store(s + (size_t)i * stride, sum[i][0]);
        v_store(s + (size_t)i * stride + 16, sum[i][1]);
    }
}

/* q holds stride_q queries for each element of the head; the first `n` of them are used. */
INLINE void score_tiles(const void *k, int rows, row_prefetch next, const float *q, int stride_q,
                        int n, kv_kind t, float *wide, bool start, float *s, size_t stride) {
    for (int i = 0, size; i < n; i += size) {
        size = tile_size(n - i, ATTN_SQ);
        float *to = s + (size_t)i * stride;
#define TILE_TO(l1, c) \
    score_tile(k, rows, prefetch_to(next, l1), q + i, stride_q, t, wide, start, c, to, stride)
#define TILE(c) next.l1 ? TILE_TO(true, c) : TILE_TO(false, c)
        TILE_CASES(size, ATTN_SQ)
#undef TILE
#undef TILE_TO
    }
}

static void scores_f32(so_attn_page k, const void *q, int n, int d, float *s, size_t stride) {
    row_prefetch next = {k.next, SO_KV_PAGE * sizeof(float), 2, k.next_l1};
    score_tiles(k.at, d, next, q, n, n, KV_F32, NULL, true, s, stride);
}

/* With several tiles, the first one stores the converted keys, and the others read them. The stores
 * cost little: they run while the first tile waits for its sums. */
static void scores_f16(so_attn_page k, const void *q, int n, int d, float *s, size_t stride) {
    float wide[WIDEN_STEP * SO_KV_PAGE] __attribute__((aligned(64)));
    const uint16_t *from = k.at;
    row_prefetch next = {k.next, SO_KV_PAGE * sizeof(uint16_t), 1, k.next_l1}, none = {0};
    if (n <= ATTN_SQ) {
        score_tiles(from, d, next, q, n, n, KV_F16, NULL, true, s, stride);
        return;
    }
    const int first = tile_size(n, ATTN_SQ);
    for (int e = 0; e < d; e += WIDEN_STEP, next.at += WIDEN_STEP * next.stride) {
        int rows = SO_MIN(WIDEN_STEP, d - e);
        const float *at = (const float *)q + (size_t)(e * n);
        score_tiles(from + e * SO_KV_PAGE, rows, next, at, n, first, KV_F16, wide, e == 0, s,
                    stride);
        score_tiles(wide, rows, none, at + first, n, n - first, KV_F32, NULL, e == 0,
                    s + (size_t)first * stride, stride);
    }
}

/* ---- softmax ---- */

INLINE float max_lane(v16 v) {
    __m256 m8 = _mm256_max_ps(v_low8(v), v_high8(v));
    __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
    __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}

/* In the vectors that hold elements lo … hi-1 of a row of scores, sets all other lanes to
 * −infinity. Returns the largest score of lo … hi-1. */
INLINE float mask_row(float *s, int lo, int hi) {
    int from = lo / 16 * 16, last = (hi - 1) / 16 * 16;
    v16 none = v_set1(-INFINITY), top = none;
    v_store(s + from, v_select_n(lo - from, none, v_load(s + from)));
    v_store(s + last, v_select_n(hi - last, v_load(s + last), none));
    for (int j = from; j < hi; j += 16)
        top = v_max(v_load(s + j), top); /* a NaN score does not change top */
    return max_lane(top);
}

/* The maxima of all queries are computed first, so that the exp of a query does not wait for its
 * own maximum. */
static void softmax(float *s, int n, int lo, int hi, float *m, float *sum) {
    for (int i = 0; i < n; i++)
        m[i] = mask_row(s + i * SO_ATTN_CHUNK, lo, hi);
    for (int i = 0; i < n; i++, s += SO_ATTN_CHUNK) {
        v16 top = v_set1(m[i]), l = v_set1(0);
        for (int j = lo / 16 * 16; j < hi; j += 16) {
            v16 p = v_exp_bounded(v_sub(v_load(s + j), top));
            v_store(s + j, p);
            l = v_add(l, p);
        }
        sum[i] = v_reduce(l);
    }
}

/* ---- values ---- */

/* The values of a page, from some element of the head on, and the page to prefetch, with next_bytes
 * bytes per element. */
typedef struct value_source {
    const void *v;
    size_t stride; /* elements between positions */
    int n_pos;
    kv_kind t;
    const float *scale; /* KV_Q8: per 32 elements, SO_KV_PAGE scales, one per position */
    const char *next;
    size_t next_stride, next_bytes;
    bool next_l1;
    float *wide; /* where values are stored as floats, WIDEN_STEP to a position; NULL: nowhere */
} value_source;

/* Number of cache lines of `nv` vectors of the next page. */
INLINE int lines_of(size_t bytes, int nv) {
    return bytes == 0 ? 0 : SO_MAX(1, nv * 16 * (int)bytes / 64);
}

/* Adds values to `nv` vectors, from element e on, of the outputs of `n` queries. */
INLINE void value_tile(value_source a, int e, const float *p, int d, const bool l1, const int n,
                       const int nv, float *o) {
    row_prefetch next = {a.next + (size_t)e * a.next_bytes, a.next_stride,
                         lines_of(a.next_bytes, nv), l1};
    const char *v = (const char *)a.v + (size_t)e * kv_bytes(a.t);
    const float *scale = a.t == KV_Q8 ? a.scale + e / SO_QK * SO_KV_PAGE : NULL;
    v16 sum[12][ATTN_NV];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int w = 0; w < nv; w++) sum[i][w] =
        v_load(o + (size_t)(i * d + e + 16 * w));
    NO_UNROLL for (int j = 0; j < a.n_pos; j++) {
        v16 x[ATTN_NV];
        UNROLL for (int w = 0; w < nv; w++) {
            x[w] = kv_load(v, (size_t)j * a.stride + (size_t)(16 * w), a.t);
            if (a.t == KV_Q8)
                x[w] = v_mul(x[w], v_set1(scale[w / 2 * SO_KV_PAGE + j]));
            if (a.wide)
                v_store(a.wide + j * WIDEN_STEP + e + 16 * w, x[w]);
        }
        prefetch_row(next, j);
        UNROLL for (int i = 0; i < n; i++) {
            v16 weight = v_set1(p[i * SO_ATTN_CHUNK + j]);
            UNROLL for (int w = 0; w < nv; w++) sum[i][w] = v_fma(weight, x[w], sum[i][w]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int w = 0; w < nv; w++)
        v_store(o + (size_t)(i * d + e + 16 * w), sum[i][w]);
}

/* Adds values to the whole vectors of elements 0 … width-1, for `n` queries. */
INLINE void value_row(value_source a, const float *p, int d, int width, const bool l1, const int n,
                      float *o) {
    int e = 0;
    for (; e + 16 * ATTN_NV <= width; e += 16 * ATTN_NV)
        value_tile(a, e, p, d, l1, n, ATTN_NV, o);
    for (; e + 16 <= width; e += 16)
        value_tile(a, e, p, d, l1, n, 1, o);
}

INLINE void value_tiles(value_source a, const float *p, int n, int d, int width, float *o) {
    for (int i = 0, size; i < n; i += size) {
        size = tile_size(n - i, ATTN_NQ);
        const float *weights = p + (size_t)(i * SO_ATTN_CHUNK);
#define TILE_TO(l1, c) value_row(a, weights, d, width, l1, c, o + (size_t)(i * d))
#define TILE(c) a.next_l1 ? TILE_TO(true, c) : TILE_TO(false, c)
        TILE_CASES(size, ATTN_NQ)
#undef TILE
#undef TILE_TO
    }
}

/* value_tiles for at most WIDEN_STEP elements of each position. With several tiles of queries, the
 * first one stores the converted values, and the others read them. */
INLINE void value_tiles_widened(value_source a, const float *p, int n, int d, int width, float *o) {
    float wide[SO_KV_PAGE * WIDEN_STEP] __attribute__((aligned(64)));
    int first = tile_size(n, ATTN_NQ);
    if (first == n) {
        value_tiles(a, p, n, d, width, o);
        return;
    }
    a.wide = wide;
    value_tiles(a, p, first, d, width, o);
    value_source rest = {.v = wide, .stride = WIDEN_STEP, .n_pos = a.n_pos, .t = KV_F32};
    value_tiles(rest, p + first * SO_ATTN_CHUNK, n - first, d, width, o + (size_t)(first * d));
}

/* Adds values to the `n_tail` elements after the last whole vector; v and o point to the first. */
INLINE void value_tail(const void *v, size_t stride_v, int n_pos, const float *p, int n, int d,
                       int n_tail, kv_kind t, float *o) {
    for (int i = 0; n_tail && i < n; i++) {
        v16 sum = v_load_n(o + (size_t)(i * d), n_tail);
        for (int j = 0; j < n_pos; j++)
            sum = v_fma(v_set1(p[i * SO_ATTN_CHUNK + j]),
                        kv_load_n(v, (size_t)j * stride_v, n_tail, t), sum);
        v_store_n(o + (size_t)(i * d), sum, n_tail);
    }
}

static void values_f32(so_attn_page v, const float *p, int n, int d, float *o) {
    const float *from = (const float *)v.at + (size_t)(v.first * d);
    value_source a = {.v = from,
                      .stride = (size_t)d,
                      .n_pos = v.n,
                      .t = KV_F32,
                      .next = v.next,
                      .next_stride = (size_t)d * sizeof(float),
                      .next_bytes = sizeof(float),
                      .next_l1 = v.next_l1};
    value_tiles(a, p, n, d, d, o);
    int e = d / 16 * 16;
    value_tail(from + e, (size_t)d, v.n, p, n, d, d - e, KV_F32, o + e);
}

static void values_f16(so_attn_page v, const float *p, int n, int d, float *o) {
    const uint16_t *from = (const uint16_t *)v.at + (size_t)(v.first * d);
    int whole = d / 16 * 16;
    value_tail(from + whole, (size_t)d, v.n, p, n, d, d - whole, KV_F16, o + whole);
    for (int e = 0; e < whole; e += WIDEN_STEP) {
        value_source a = {.v = from + e,
                          .stride = (size_t)d,
                          .n_pos = v.n,
                          .t = KV_F16,
                          .next = (const char *)v.next + (size_t)e * sizeof(uint16_t),
                          .next_stride = (size_t)d * sizeof(uint16_t),
                          .next_bytes = sizeof(uint16_t),
                          .next_l1 = v.next_l1};
        value_tiles_widened(a, p, n, d, SO_MIN(WIDEN_STEP, whole - e), o + e);
    }
}

static void merge(float *o, const float *part, float a, float b, int d) {
    int e = 0;
    for (; e + 16 <= d; e += 16)
        v_store(o + e, v_fma(v_load(part + e), v_set1(b), v_mul(v_load(o + e), v_set1(a))));
    if (e < d) {
        v16 old = v_mul(v_load_n(o + e, d - e), v_set1(a));
        v_store_n(o + e, v_fma(v_load_n(part + e, d - e), v_set1(b), old), d - e);
    }
}

#include "backend/cpu/attn_q8_x86.h"
