/* noise.h with 256-bit registers. Eight blocks of the generator run beside each other, a block per
 * lane; which lane has which block is chosen so that two rounds of unpacking leave the words of 32
 * tokens in order:
 *
 *     lane      0  1  2  3 | 4  5  6  7
 *     block     0  2  4  6 | 1  3  5  7      words c0 … c3 of each, then unpacked: blocks 0 1, 2 3,
 * …
 *
 * What is left of a row takes the scalar way. */
#include <immintrin.h>
#include <math.h>

#include "sample/noise.h"

enum { STEP = 32 };

static bool all_finite(const float *x, int n) {
    __m256i full = _mm256_set1_epi32(0x7F800000), any = _mm256_setzero_si256();
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256i bits = _mm256_and_si256(_mm256_loadu_si256((const void *)(x + i)), full);
        any = _mm256_or_si256(any, _mm256_cmpeq_epi32(bits, full));
    }
    return _mm256_testz_si256(any, any) && so_noise_scalar.all_finite(x + i, n - i);
}

static float largest(const float *x, int n) {
    __m256 m[4];
    for (int k = 0; k < 4; k++)
        m[k] = _mm256_set1_ps(-INFINITY);
    int i = 0;
    for (; i + STEP <= n; i += STEP)
        for (int k = 0; k < 4; k++)
            m[k] = _mm256_max_ps(m[k], _mm256_loadu_ps(x + i + 8 * k));
    m[0] = _mm256_max_ps(_mm256_max_ps(m[0], m[1]), _mm256_max_ps(m[2], m[3]));
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(m[0]), _mm256_extractf128_ps(m[0], 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    float top = _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
    for (; i < n; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

static int32_t argmax(const float *x, int n) {
    float top = largest(x, n);
    int i = 0;
    if (top == -INFINITY)
        return -1;
    for (; i + 8 <= n; i += 8) {
        __m256 same = _mm256_cmp_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(top), _CMP_EQ_OQ);
        unsigned mask = (unsigned)_mm256_movemask_ps(same);
        if (mask)
            return i + __builtin_ctz(mask);
    }
    while (x[i] != top)
        i++;
    return i;
}

/* exp(y) for y ≤ 0 within 1e-6: 2^(i + f) by a polynomial in f, |f| ≤ ½. Below −87: nearly 0. */
static inline __m256 exp8(__m256 y) {
    static const float c[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                              2.4022651e-1f, 6.9314718e-1f, 1.0f};
    __m256 t =
        _mm256_max_ps(_mm256_mul_ps(y, _mm256_set1_ps(1.44269504f)), _mm256_set1_ps(-126.0f));
    __m256i i = _mm256_cvtps_epi32(t);
    __m256 f = _mm256_sub_ps(t, _mm256_cvtepi32_ps(i)), p = _mm256_set1_ps(c[0]);
    for (int k = 1; k < 7; k++)
        p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(c[k]));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(i, 23)));
}

/* Sums stay in single precision for one call: n is at most some thousands. */
static int above(const so_noise_row *r, int32_t first, int n, float floor, int32_t *ids,
                 double *low) {
    __m256 top = _mm256_set1_ps(r->top), inverse = _mm256_set1_ps(r->inverse);
    __m256 sum = _mm256_setzero_ps(), least = _mm256_set1_ps(floor);
    int n_ids = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 x = _mm256_loadu_ps(r->x + first + i);
        __m256 y = _mm256_mul_ps(_mm256_sub_ps(x, top), inverse);
        __m256 in = _mm256_cmp_ps(y, least, _CMP_GE_OQ);
        sum = _mm256_add_ps(sum, _mm256_andnot_ps(in, exp8(y)));
        for (unsigned mask = (unsigned)_mm256_movemask_ps(in); mask; mask &= mask - 1)
            ids[n_ids++] = first + i + __builtin_ctz(mask);
    }
    float lane[8];
    _mm256_storeu_ps(lane, sum);
    for (int k = 0; k < 8; k++)
        *low += (double)lane[k];
    return n_ids + so_noise_scalar.above(r, first + i, n - i, floor, ids + n_ids, low);
}

/* Low and high halves of eight products with m. */
static inline void mul_wide(__m256i c, __m256i m, __m256i *low, __m256i *high) {
    __m256i even = _mm256_mul_epu32(c, m), odd = _mm256_mul_epu32(_mm256_srli_epi64(c, 32), m);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
}

/* The words of eight blocks, in the order of their tokens. */
static inline void words32(const so_rng_key *key, uint32_t block, __m256i w[4]) {
    __m256i c0 =
        _mm256_add_epi32(_mm256_set1_epi32((int)block), _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7));
    __m256i c1 = _mm256_set1_epi32((int)key->position);
    __m256i c2 = _mm256_set1_epi32((int)key->choice);
    __m256i c3 = _mm256_set1_epi32((int)(key->purpose << 28 ^ key->round));
    uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
    for (int r = 0; r < SO_RNG_ROUNDS; r++, k0 += SO_RNG_KEY0, k1 += SO_RNG_KEY1) {
        __m256i a_low, a_high, b_low, b_high;
        mul_wide(c0, _mm256_set1_epi64x(SO_RNG_MUL0), &a_low, &a_high);
        mul_wide(c2, _mm256_set1_epi64x(SO_RNG_MUL1), &b_low, &b_high);
        c0 = _mm256_xor_si256(_mm256_xor_si256(b_high, c1), _mm256_set1_epi32((int)k0));
        c2 = _mm256_xor_si256(_mm256_xor_si256(a_high, c3), _mm256_set1_epi32((int)k1));
        c1 = b_low;
        c3 = a_low;
    }
    __m256i p = _mm256_unpacklo_epi32(c0, c1), q = _mm256_unpacklo_epi32(c2, c3);
    __m256i s = _mm256_unpackhi_epi32(c0, c1), t = _mm256_unpackhi_epi32(c2, c3);
    w[0] = _mm256_unpacklo_epi64(p, q);
    w[1] = _mm256_unpackhi_epi64(p, q);
    w[2] = _mm256_unpacklo_epi64(s, t);
    w[3] = _mm256_unpackhi_epi64(s, t);
}

/* Bit i: token i of 32 may reach `least`. */
static inline unsigned mask32(const so_noise_row *r, int32_t id, __m256 least) {
    __m256 y[4], top = _mm256_set1_ps(r->top), inverse = _mm256_set1_ps(r->inverse);
    unsigned near = 0, mask = 0;
    for (int k = 0; k < 4; k++) {
        y[k] = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(r->x + id + 8 * k), top), inverse);
        near |= (unsigned)_mm256_movemask_ps(
            _mm256_cmp_ps(_mm256_add_ps(y[k], _mm256_set1_ps(SO_NOISE_MOST)), least, _CMP_GE_OQ));
    }
    if (!near)
        return 0;
    __m256i w[4], ones = _mm256_set1_epi32(-1);
    words32(&r->key, (uint32_t)id / 4, w);
    for (int k = 0; k < 4; k++) {
        __m256i v = _mm256_srli_epi32(_mm256_xor_si256(w[k], ones), 8);
        __m256 bits = _mm256_cvtepi32_ps(_mm256_castps_si256(_mm256_cvtepi32_ps(v)));
        __m256 bound =
            _mm256_fmadd_ps(bits, _mm256_set1_ps(SO_NOISE_SLOPE), _mm256_set1_ps(SO_NOISE_START));
        __m256 hope = _mm256_cmp_ps(_mm256_add_ps(y[k], bound), least, _CMP_GE_OQ);
        mask |= (unsigned)_mm256_movemask_ps(hope) << (8 * k);
    }
    return mask;
}

static int hopeful(const so_noise_row *r, int32_t first, int n, float least, int32_t *ids) {
    __m256 bar = _mm256_set1_ps(least - SO_NOISE_MARGIN);
    int n_ids = 0, i = 0;
    for (; i + STEP <= n; i += STEP)
        for (unsigned mask = mask32(r, first + i, bar); mask; mask &= mask - 1)
            ids[n_ids++] = first + i + __builtin_ctz(mask);
    return n_ids + so_noise_scalar.hopeful(r, first + i, n - i, least, ids + n_ids);
}

/* so_noise_scalar's exp_of, four at a time. */
static inline __m256d exp4(__m256d y) {
    static const double c[SO_NOISE_N_TERMS] = SO_NOISE_EXP_TERMS;
    __m256d least = _mm256_set1_pd(SO_NOISE_LEAST), in = _mm256_cmp_pd(y, least, _CMP_GT_OQ);
    y = _mm256_max_pd(y, least);
    __m256d i = _mm256_round_pd(_mm256_mul_pd(y, _mm256_set1_pd(SO_NOISE_LOG2E)),
                                _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256d r = _mm256_fnmadd_pd(i, _mm256_set1_pd(SO_NOISE_LN2_HIGH), y);
    r = _mm256_fnmadd_pd(i, _mm256_set1_pd(SO_NOISE_LN2_LOW), r);
    __m256d p = _mm256_set1_pd(c[0]);
    for (int k = 1; k < SO_NOISE_N_TERMS; k++)
        p = _mm256_fmadd_pd(p, r, _mm256_set1_pd(c[k]));
    __m256i shift = _mm256_slli_epi64(_mm256_cvtepi32_epi64(_mm256_cvtpd_epi32(i)), 52);
    p = _mm256_castsi256_pd(_mm256_add_epi64(_mm256_castpd_si256(p), shift));
    return _mm256_and_pd(p, in);
}

static inline __m128 weigh4(const float *x, __m256d top, __m256d inverse, __m256d *sum) {
    __m256d y = _mm256_mul_pd(_mm256_sub_pd(_mm256_cvtps_pd(_mm_loadu_ps(x)), top), inverse);
    __m128 w = _mm256_cvtpd_ps(exp4(_mm256_cvtps_pd(_mm256_cvtpd_ps(y))));
    *sum = _mm256_add_pd(*sum, _mm256_cvtps_pd(w));
    return w;
}

static double weigh(const float *x, int n, double top, double inverse, float *out) {
    __m256d t = _mm256_set1_pd(top), v = _mm256_set1_pd(inverse);
    __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_storeu_ps(out + i, weigh4(x + i, t, v, &low));
        _mm_storeu_ps(out + i + 4, weigh4(x + i + 4, t, v, &high));
    }
    double lane[SO_NOISE_LANES];
    _mm256_storeu_pd(lane, low);
    _mm256_storeu_pd(lane + 4, high);
    so_noise_scalar.weigh(x + i, n - i, top, inverse, out + i);
    for (; i < n; i++)
        lane[i % SO_NOISE_LANES] += (double)out[i];
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
           ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

const so_noise_fns so_noise_avx2 = {all_finite, largest, argmax, hopeful, above, weigh};
