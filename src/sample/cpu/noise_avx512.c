/* noise.h with 512-bit registers: sixteen blocks of the generator beside each other, laid over the
 * lanes so that unpacking leaves the words of 64 tokens in order (noise_avx2.c has the drawing):
 *
 *     lane      0  1  2  3 | 4  5  6  7 | 8  9 10 11 | 12 13 14 15
 *     block     0  4  8 12 | 1  5  9 13 | 2  6 10 14 |  3  7 11 15
 *
 * `weigh` has the eight lanes of its sum in one register: the bits are those of the other levels.
 * What is left of a row takes the scalar way. */
#include <immintrin.h>
#include <math.h>

#include "sample/noise.h"

enum { STEP = 64 };

static bool all_finite(const float *x, int n) {
    __m512i full = _mm512_set1_epi32(0x7F800000);
    __mmask16 any = 0;
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i bits = _mm512_and_si512(_mm512_loadu_si512(x + i), full);
        any |= _mm512_cmpeq_epi32_mask(bits, full);
    }
    return !any && so_noise_scalar.all_finite(x + i, n - i);
}

static float largest(const float *x, int n) {
    __m512 m[4];
    for (int k = 0; k < 4; k++)
        m[k] = _mm512_set1_ps(-INFINITY);
    int i = 0;
    for (; i + STEP <= n; i += STEP)
        for (int k = 0; k < 4; k++)
            m[k] = _mm512_max_ps(m[k], _mm512_loadu_ps(x + i + 16 * k));
    float top =
        _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3])));
    for (; i < n; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

static int32_t argmax(const float *x, int n) {
    float top = largest(x, n);
    int i = 0;
    if (top == -INFINITY)
        return -1;
    for (; i + 16 <= n; i += 16) {
        unsigned mask = _mm512_cmp_ps_mask(_mm512_loadu_ps(x + i), _mm512_set1_ps(top), _CMP_EQ_OQ);
        if (mask)
            return i + __builtin_ctz(mask);
    }
    while (x[i] != top)
        i++;
    return i;
}

/* As noise_avx2.c's exp8. */
static inline __m512 exp16(__m512 y) {
    static const float c[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                              2.4022651e-1f, 6.9314718e-1f, 1.0f};
    __m512 t =
        _mm512_max_ps(_mm512_mul_ps(y, _mm512_set1_ps(1.44269504f)), _mm512_set1_ps(-126.0f));
    __m512i i = _mm512_cvtps_epi32(t);
    __m512 f = _mm512_sub_ps(t, _mm512_cvtepi32_ps(i)), p = _mm512_set1_ps(c[0]);
    for (int k = 1; k < 7; k++)
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c[k]));
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(i, 23)));
}

static int above(const so_noise_row *r, int32_t first, int n, float floor, int32_t *ids,
                 double *low) {
    __m512 top = _mm512_set1_ps(r->top), inverse = _mm512_set1_ps(r->inverse);
    __m512 sum = _mm512_setzero_ps(), least = _mm512_set1_ps(floor);
    int n_ids = 0, i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 x = _mm512_loadu_ps(r->x + first + i);
        __m512 y = _mm512_mul_ps(_mm512_sub_ps(x, top), inverse);
        __mmask16 in = _mm512_cmp_ps_mask(y, least, _CMP_GE_OQ);
        sum = _mm512_mask_add_ps(sum, (__mmask16)~in, sum, exp16(y));
        for (unsigned mask = in; mask; mask &= mask - 1)
            ids[n_ids++] = first + i + __builtin_ctz(mask);
    }
    float lane[16];
    _mm512_storeu_ps(lane, sum);
    for (int k = 0; k < 16; k++)
        *low += (double)lane[k];
    return n_ids + so_noise_scalar.above(r, first + i, n - i, floor, ids + n_ids, low);
}

/* Low and high halves of sixteen products with m. */
static inline void mul_wide(__m512i c, __m512i m, __m512i *low, __m512i *high) {
    __m512i even = _mm512_mul_epu32(c, m), odd = _mm512_mul_epu32(_mm512_srli_epi64(c, 32), m);
    *low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    *high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
}

/* The words of sixteen blocks, in the order of their tokens. */
static inline void words64(const so_rng_key *key, uint32_t block, __m512i w[4]) {
    __m512i c0 =
        _mm512_add_epi32(_mm512_set1_epi32((int)block),
                         _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i c1 = _mm512_set1_epi32((int)key->position);
    __m512i c2 = _mm512_set1_epi32((int)key->choice);
    __m512i c3 = _mm512_set1_epi32((int)(key->purpose << 28 ^ key->round));
    uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
    for (int r = 0; r < SO_RNG_ROUNDS; r++, k0 += SO_RNG_KEY0, k1 += SO_RNG_KEY1) {
        __m512i a_low, a_high, b_low, b_high;
        mul_wide(c0, _mm512_set1_epi64(SO_RNG_MUL0), &a_low, &a_high);
        mul_wide(c2, _mm512_set1_epi64(SO_RNG_MUL1), &b_low, &b_high);
        c0 = _mm512_xor_si512(_mm512_xor_si512(b_high, c1), _mm512_set1_epi32((int)k0));
        c2 = _mm512_xor_si512(_mm512_xor_si512(a_high, c3), _mm512_set1_epi32((int)k1));
        c1 = b_low;
        c3 = a_low;
    }
    __m512i p = _mm512_unpacklo_epi32(c0, c1), q = _mm512_unpacklo_epi32(c2, c3);
    __m512i s = _mm512_unpackhi_epi32(c0, c1), t = _mm512_unpackhi_epi32(c2, c3);
    w[0] = _mm512_unpacklo_epi64(p, q);
    w[1] = _mm512_unpackhi_epi64(p, q);
    w[2] = _mm512_unpacklo_epi64(s, t);
    w[3] = _mm512_unpackhi_epi64(s, t);
}

/* Bit i: token i of 64 may reach `least`. */
static inline uint64_t mask64(const so_noise_row *r, int32_t id, __m512 least) {
    __m512 y[4], top = _mm512_set1_ps(r->top), inverse = _mm512_set1_ps(r->inverse);
    unsigned near = 0;
    uint64_t mask = 0;
    for (int k = 0; k < 4; k++) {
        y[k] = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(r->x + id + 16 * k), top), inverse);
        near |= _mm512_cmp_ps_mask(_mm512_add_ps(y[k], _mm512_set1_ps(SO_NOISE_MOST)), least,
                                   _CMP_GE_OQ);
    }
    if (!near)
        return 0;
    __m512i w[4], ones = _mm512_set1_epi32(-1);
    words64(&r->key, (uint32_t)id / 4, w);
    for (int k = 0; k < 4; k++) {
        __m512i v = _mm512_srli_epi32(_mm512_xor_si512(w[k], ones), 8);
        __m512 bits = _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepi32_ps(v)));
        __m512 bound =
            _mm512_fmadd_ps(bits, _mm512_set1_ps(SO_NOISE_SLOPE), _mm512_set1_ps(SO_NOISE_START));
        __mmask16 hope = _mm512_cmp_ps_mask(_mm512_add_ps(y[k], bound), least, _CMP_GE_OQ);
        mask |= (uint64_t)hope << (16 * k);
    }
    return mask;
}

static int hopeful(const so_noise_row *r, int32_t first, int n, float least, int32_t *ids) {
    __m512 bar = _mm512_set1_ps(least - SO_NOISE_MARGIN);
    int n_ids = 0, i = 0;
    for (; i + STEP <= n; i += STEP)
        for (uint64_t mask = mask64(r, first + i, bar); mask; mask &= mask - 1)
            ids[n_ids++] = first + i + __builtin_ctzll(mask);
    return n_ids + so_noise_scalar.hopeful(r, first + i, n - i, least, ids + n_ids);
}

/* so_noise_scalar's exp_of, eight at a time. */
static inline __m512d exp8(__m512d y) {
    static const double c[SO_NOISE_N_TERMS] = SO_NOISE_EXP_TERMS;
    __m512d least = _mm512_set1_pd(SO_NOISE_LEAST);
    __mmask8 in = _mm512_cmp_pd_mask(y, least, _CMP_GT_OQ);
    y = _mm512_max_pd(y, least);
    __m512d i = _mm512_roundscale_pd(_mm512_mul_pd(y, _mm512_set1_pd(SO_NOISE_LOG2E)),
                                     _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512d r = _mm512_fnmadd_pd(i, _mm512_set1_pd(SO_NOISE_LN2_HIGH), y);
    r = _mm512_fnmadd_pd(i, _mm512_set1_pd(SO_NOISE_LN2_LOW), r);
    __m512d p = _mm512_set1_pd(c[0]);
    for (int k = 1; k < SO_NOISE_N_TERMS; k++)
        p = _mm512_fmadd_pd(p, r, _mm512_set1_pd(c[k]));
    __m512i shift = _mm512_slli_epi64(_mm512_cvtpd_epi64(i), 52);
    p = _mm512_castsi512_pd(_mm512_add_epi64(_mm512_castpd_si512(p), shift));
    return _mm512_maskz_mov_pd(in, p);
}

static double weigh(const float *x, int n, double top, double inverse, float *out) {
    __m512d t = _mm512_set1_pd(top), v = _mm512_set1_pd(inverse), sum = _mm512_setzero_pd();
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m512d y = _mm512_mul_pd(_mm512_sub_pd(_mm512_cvtps_pd(_mm256_loadu_ps(x + i)), t), v);
        __m256 w = _mm512_cvtpd_ps(exp8(_mm512_cvtps_pd(_mm512_cvtpd_ps(y))));
        sum = _mm512_add_pd(sum, _mm512_cvtps_pd(w));
        _mm256_storeu_ps(out + i, w);
    }
    double lane[SO_NOISE_LANES];
    _mm512_storeu_pd(lane, sum);
    so_noise_scalar.weigh(x + i, n - i, top, inverse, out + i);
    for (; i < n; i++)
        lane[i % SO_NOISE_LANES] += (double)out[i];
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
           ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}

const so_noise_fns so_noise_avx512 = {all_finite, largest, argmax, hopeful, above, weigh};
