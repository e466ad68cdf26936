/* Attention over one block of positions for a bundle of queries, over the words of rows_x86.h.
 *
 * Keys and values are read and widened once for several queries: the heads of a group that share
 * them, and rows of a batch that see the same positions. Queries are independent lanes of work, so
 * how they are bundled changes no bit; every sum keeps the canon's order (kernels.h).
 *
 *   ATTN_SQ    queries per tile of scores, against four keys
 *   ATTN_NQ    queries per tile of values
 *   ATTN_NV    words of the output per tile of values
 *
 * The caller sees to it that head dimensions are multiples of 16. Included at the end of
 * rows_x86.h. */

/* Four sums at once by the canon's joining tree: lane i of the result is v_join(v[i]). */
INLINE __m128 v_join4(const v16 *v) {
    __m256 a = _mm256_add_ps(v_low8(v[0]), v_high8(v[0]));
    __m256 b = _mm256_add_ps(v_low8(v[1]), v_high8(v[1]));
    __m256 c = _mm256_add_ps(v_low8(v[2]), v_high8(v[2]));
    __m256 d = _mm256_add_ps(v_low8(v[3]), v_high8(v[3]));
    __m256 ac =
        _mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
    __m256 bd =
        _mm256_add_ps(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31));
    /* lanes 0 and 1 of a, then of b; in the upper half of c, then of d */
    __m256 low = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ac), _mm256_castps_pd(bd)));
    __m256 high = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ac), _mm256_castps_pd(bd)));
    __m256 two = _mm256_add_ps(low, high);
    __m128 ab = _mm256_castps256_ps128(two), cd = _mm256_extractf128_ps(two, 1);
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xDD));
}

/* s[i][j …] for `n` queries and four keys; keys past the last one repeat it. */
INLINE void score_tile(const so_attn_block *b, const float *const *q, int j, int d, float scale,
                       bool half, const int n, float (*s)[SO_ATTN_SCORES]) {
    v16 sum[ATTN_SQ][4];
    const void *k[4];
    UNROLL for (int c = 0; c < 4; c++) k[c] = b->k[SO_MIN(j + c, b->hi - 1)];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int c = 0; c < 4; c++) sum[i][c] = v_set1(0);
    for (int e = 0; e < d; e += 16) {
        v16 key[4];
        UNROLL for (int c = 0; c < 4; c++) key[c] = kv_load(k[c], e, half);
        UNROLL for (int i = 0; i < n; i++) {
            v16 x = v_load(q[i] + e);
            UNROLL for (int c = 0; c < 4; c++) sum[i][c] = v_fma(x, key[c], sum[i][c]);
        }
    }
    UNROLL for (int i = 0; i < n; i++)
        _mm_storeu_ps(s[i] + j, _mm_mul_ps(v_join4(sum[i]), _mm_set1_ps(scale)));
}

INLINE void score_rows(const so_attn_block *b, const so_attn_bundle *u, int first, bool half,
                       const int n, float (*s)[SO_ATTN_SCORES]) {
    for (int j = b->lo; j < b->hi; j += 4)
        score_tile(b, u->q + first, j, u->d, u->scale, half, n, s);
    UNROLL for (int i = 0; i < n; i++) {
        for (int j = 0; j < b->lo; j++)
            s[i][j] = -INFINITY;
        for (int j = b->hi; j < SO_KV_PAGE; j++)
            s[i][j] = -INFINITY;
    }
}

/* The largest of both; where a is NaN, b. */
INLINE float max_of(v16 v, float b) {
    float lanes[16];
    v_store(lanes, v);
    for (int i = 0; i < 16; i++)
        b = lanes[i] > b ? lanes[i] : b;
    return b;
}

/* Scores to weights, and the running maximum and sum of queries first … first+n-1. c: what the
 * outputs so far are multiplied with. */
INLINE void soften(so_attn_bundle *u, int first, int n, float (*s)[SO_ATTN_SCORES], float *c) {
    float old[SO_ATTN_QUERIES], sum[SO_ATTN_QUERIES];
    for (int i = 0; i < n; i++) {
        float *m = &u->m[first + i];
        old[i] = *m;
        v16 top = v_max(v_load(s[i]), v_set1(*m));
        *m = max_of(v_max(v_load(s[i] + 16), top), *m);
        sum[i] = softmax(s[i], *m);
    }
    for (int i = 0; i < n; i += 16) {
        int part = SO_MIN(16, n - i);
        v16 gap = v_sub(v_load_n(old + i, part), v_load_n(u->m + first + i, part));
        v16 factor = v_exp(gap), l = v_load_n(u->l + first + i, part);
        v_store_n(c + i, factor, part);
        v_store_n(u->l + first + i, v_fma(l, factor, v_load_n(sum + i, part)), part);
    }
}

/* `nv` words from element e of the outputs of `n` queries. */
INLINE void value_tile(const so_attn_block *b, float *o, int d, int e, bool half, const int n,
                       const int nv, float (*s)[SO_ATTN_SCORES], const float *c) {
    v16 sum[ATTN_NQ][ATTN_NV];
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int w = 0; w < nv; w++) sum[i][w] =
        v_mul(v_load(o + (size_t)i * (size_t)d + e + 16 * w), v_set1(c[i]));
    for (int j = b->lo; j < b->hi; j++) {
        v16 v[ATTN_NV];
        UNROLL for (int w = 0; w < nv; w++) v[w] = kv_load(b->v[j], e + 16 * w, half);
        UNROLL for (int i = 0; i < n; i++) {
            v16 weight = v_set1(s[i][j]);
            UNROLL for (int w = 0; w < nv; w++) sum[i][w] = v_fma(weight, v[w], sum[i][w]);
        }
    }
    UNROLL for (int i = 0; i < n; i++) UNROLL for (int w = 0; w < nv; w++)
        v_store(o + (size_t)i * (size_t)d + e + 16 * w, sum[i][w]);
}

INLINE void value_rows(const so_attn_block *b, float *o, int d, bool half, const int n,
                       float (*s)[SO_ATTN_SCORES], const float *c) {
    int e = 0;
    for (; e + 16 * ATTN_NV <= d; e += 16 * ATTN_NV)
        value_tile(b, o, d, e, half, n, ATTN_NV, s, c);
    for (; e < d; e += 16)
        value_tile(b, o, d, e, half, n, 1, s, c);
}

INLINE void attn_block(const so_attn_block *b, so_attn_bundle *u, int first, int n, bool half) {
    float s[SO_ATTN_QUERIES][SO_ATTN_SCORES], c[SO_ATTN_QUERIES];
    float *o = u->o + (size_t)first * (size_t)u->d;
    int i = 0;
    for (; i + ATTN_SQ <= n; i += ATTN_SQ)
        score_rows(b, u, first + i, half, ATTN_SQ, s + i);
    for (; i < n; i++)
        score_rows(b, u, first + i, half, 1, s + i);
    soften(u, first, n, s, c);
    for (i = 0; i + ATTN_NQ <= n; i += ATTN_NQ)
        value_rows(b, o + (size_t)i * (size_t)u->d, u->d, half, ATTN_NQ, s + i, c + i);
    for (; i < n; i++)
        value_rows(b, o + (size_t)i * (size_t)u->d, u->d, half, 1, s + i, c + i);
}

static void block_f16(const so_attn_block *b, so_attn_bundle *u, int first, int n) {
    attn_block(b, u, first, n, true);
}
static void block_f32(const so_attn_block *b, so_attn_bundle *u, int first, int n) {
    attn_block(b, u, first, n, false);
}
