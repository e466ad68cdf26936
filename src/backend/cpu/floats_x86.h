/* Matrix products with F32, F16 and BF16 weights for x86, in the SIMD operations of rows_x86.h.
 *
 * The contract of kernels.h requires sixteen partial sums along k. A vector therefore holds sixteen
 * consecutive elements of one row, and rows are not interleaved as packed weights are. A tile is
 * four output rows. Activation rows are taken in chunks of CHUNK.
 *
 * If a chunk has more than FLOAT_NX rows, the tile is computed in parts of FLOAT_STEP elements. F16
 * and BF16 weights of a part are converted to float once per chunk, into memory that stays in L1;
 * then the part is multiplied with FLOAT_NX activation rows at a time. Sums are kept in registers
 * within a part and in memory between parts. With FLOAT_NX rows or fewer the weights are converted
 * as they are loaded, without a copy.
 *
 *   FLOAT_NR × FLOAT_NX    output rows × activation rows whose sums fit the registers at once
 *
 * Included by matmul_x86.h. */

enum { FLOAT_ROWS = 4, FLOAT_STEP = 512 };

typedef struct float_tile {
    const uint8_t *rows[FLOAT_ROWS]; /* as in the file; past the end, the last row again */
    _Alignas(64) float copy[FLOAT_ROWS][FLOAT_STEP];
    v16 sums[CHUNK][FLOAT_ROWS];
} float_tile;

/* Four sums at once in the reduction order of lane16: lane i of the result is v_reduce(v[i]). */
INLINE __m128 v_reduce4(const v16 *v) {
    __m256 a = _mm256_add_ps(v_low8(v[0]), v_high8(v[0]));
    __m256 b = _mm256_add_ps(v_low8(v[1]), v_high8(v[1]));
    __m256 c = _mm256_add_ps(v_low8(v[2]), v_high8(v[2]));
    __m256 d = _mm256_add_ps(v_low8(v[3]), v_high8(v[3]));
    __m256 ac =
        _mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
    __m256 bd =
        _mm256_add_ps(_mm256_permute2f128_ps(b, d, 0x20), _mm256_permute2f128_ps(b, d, 0x31));
    /* lanes 0 and 1 of a, then of b; in the upper half those of c, then of d */
    __m256 low = _mm256_castpd_ps(_mm256_unpacklo_pd(_mm256_castps_pd(ac), _mm256_castps_pd(bd)));
    __m256 high = _mm256_castpd_ps(_mm256_unpackhi_pd(_mm256_castps_pd(ac), _mm256_castps_pd(bd)));
    __m256 two = _mm256_add_ps(low, high);
    __m128 ab = _mm256_castps256_ps128(two), cd = _mm256_extractf128_ps(two, 1);
    return _mm_add_ps(_mm_shuffle_ps(ab, cd, 0x88), _mm_shuffle_ps(ab, cd, 0xDD));
}

INLINE v16 weight_load(so_dtype dtype, const uint8_t *row, int i) {
    if (dtype == SO_DTYPE_F32)
        return v_load((const void *)(row + 4 * (size_t)i));
    const void *p = row + 2 * (size_t)i;
    return dtype == SO_DTYPE_F16 ? v_load_f16(p) : v_load_bf16(p);
}

INLINE v16 weight_load_n(so_dtype dtype, const uint8_t *row, int i, int n) {
    if (dtype == SO_DTYPE_F32)
        return v_load_n((const void *)(row + 4 * (size_t)i), n);
    const void *p = row + 2 * (size_t)i;
    return dtype == SO_DTYPE_F16 ? v_load_f16_n(p, n) : v_load_bf16_n(p, n);
}

/* Converts elements e … e+n-1 to float. */
INLINE void float_copy(float_tile *t, so_dtype dtype, int e, int n) {
    for (int r = 0; r < FLOAT_ROWS; r++)
        for (int i = 0; i < n; i += 16)
            v_store(t->copy[r] + i, i + 16 <= n ? weight_load(dtype, t->rows[r], e + i)
                                                : weight_load_n(dtype, t->rows[r], e + i, n - i));
}

/* Multiplies elements e … e+n-1 of the `nr` output rows from r0 with the `nx` activation rows from
 * first + at, and adds the products to t->sums. `copied`: the weights are in t->copy, as floats. */
INLINE void float_part(float_tile *t, const so_mm *a, so_dtype dtype, bool copied, int r0, int e,
                       int n, int first, int at, const int nr, const int nx) {
    const uint8_t *w[FLOAT_NR];
    const float *x[FLOAT_NX];
    v16 sum[FLOAT_NR][FLOAT_NX];
    UNROLL for (int r = 0; r < nr; r++) {
        w[r] = copied ? (const uint8_t *)t->copy[r0 + r] : t->rows[r0 + r];
        UNROLL for (int i = 0; i < nx; i++) sum[r][i] = t->sums[at + i][r0 + r];
    }
    UNROLL for (int i = 0; i < nx; i++) x[i] =
        a->act.x + (size_t)(first + at + i) * (size_t)a->act.k + e;
    const so_dtype as = copied ? SO_DTYPE_F32 : dtype;
    int begin = copied ? 0 : e, k = 0;
    for (; k + 16 <= n; k += 16) {
        v16 xv[FLOAT_NX];
        UNROLL for (int i = 0; i < nx; i++) xv[i] = v_load(x[i] + k);
        UNROLL for (int r = 0; r < nr; r++) {
            v16 wv = weight_load(as, w[r], begin + k);
            UNROLL for (int i = 0; i < nx; i++) sum[r][i] = v_fma(wv, xv[i], sum[r][i]);
        }
    }
    UNROLL for (int r = 0; r < nr; r++) {
        v16 wv = k < n ? weight_load_n(as, w[r], begin + k, n - k) : v_set1(0);
        UNROLL for (int i = 0; i < nx; i++) {
            if (k < n)
                sum[r][i] =
                    v_select_n(n - k, v_fma(wv, v_load_n(x[i] + k, n - k), sum[r][i]), sum[r][i]);
            t->sums[at + i][r0 + r] = sum[r][i];
        }
    }
}

INLINE void float_store(const float_tile *t, const so_mm *a, long r, long end, int first, int n) {
    int valid = (int)SO_MIN((long)FLOAT_ROWS, end - r);
    for (int i = 0; i < n; i++) {
        float v[FLOAT_ROWS], *out = a->out + (size_t)(first + i) * (size_t)a->m + (size_t)r;
        _mm_storeu_ps(v, v_reduce4(t->sums[i]));
        for (int j = 0; j < valid; j++)
            out[j] = a->bias ? v[j] + a->bias[r + j] : v[j];
    }
}

/* Multiplies all activation rows of a chunk with elements e … e+n-1 of the tile. */
INLINE void float_rows(float_tile *t, const so_mm *a, so_dtype dtype, bool copied, int e, int n,
                       int first, int n_x) {
    UNROLL for (int r = 0; r < FLOAT_ROWS; r += FLOAT_NR) {
        int i = 0;
        for (; i + FLOAT_NX <= n_x; i += FLOAT_NX)
            float_part(t, a, dtype, copied, r, e, n, first, i, FLOAT_NR, FLOAT_NX);
        if (FLOAT_NX > 3 && n_x - i == 3)
            float_part(t, a, dtype, copied, r, e, n, first, i, FLOAT_NR, 3);
        else if (FLOAT_NX > 2 && n_x - i == 2)
            float_part(t, a, dtype, copied, r, e, n, first, i, FLOAT_NR, 2);
        else if (n_x - i == 1)
            float_part(t, a, dtype, copied, r, e, n, first, i, FLOAT_NR, 1);
    }
}

INLINE void floats(const so_mm *a, so_dtype dtype, long begin, long end) {
    float_tile t;
    int k = a->act.k;
    for (long r = begin; r < end; r += FLOAT_ROWS) {
        for (int j = 0; j < FLOAT_ROWS; j++)
            t.rows[j] = a->w + (size_t)SO_MIN(r + j, end - 1) * a->row_bytes;
        for (int first = 0; first < a->act.n; first += CHUNK) {
            int n_x = SO_MIN(CHUNK, a->act.n - first);
            bool copied = dtype != SO_DTYPE_F32 && n_x > FLOAT_NX;
            for (int i = 0; i < n_x; i++)
                UNROLL for (int j = 0; j < FLOAT_ROWS; j++) t.sums[i][j] = v_set1(0);
            for (int e = 0, n; e < k; e += n) {
                n = SO_MIN(n_x > FLOAT_NX ? FLOAT_STEP : k, k - e);
                if (copied) {
                    float_copy(&t, dtype, e, n);
                    float_rows(&t, a, dtype, true, e, n, first, n_x);
                } else {
                    float_rows(&t, a, dtype, false, e, n, first, n_x);
                }
            }
            float_store(&t, a, r, end, first, n_x);
        }
    }
}
