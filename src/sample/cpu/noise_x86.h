/* noise.h for x86, written once over registers whose width the including file knows:
 *
 *   V(op)                    the intrinsic of that width: V(add_ps) is _mm256_add_ps or _mm512_…
 *   LANES                    floats of a register; HALF as many are doubles
 *   vf vi vd vh              floats, integers, doubles; half as many floats
 *   vm, md                   which lanes of floats, of doubles; m_none m_or m_bits (bit i: lane i)
 *   m_ge m_eq m_same d_gt    comparisons: ≥, =, equal integers, > of doubles; NaN is in none
 *   f_without(m, x)          0 in the lanes of m; d_within(m, x): 0 in the others
 *   f_bits f_of i_and i_xor i_odd  floats as integers and back; bitwise; odd lanes from the second
 *   i_set64 h_load h_store   one number in all 64-bit lanes; vh from and to memory
 *   f_largest d_round        over all lanes; to the nearest whole number
 *   d_times_pow2(p, i)       p · 2^i for whole i
 *   i_blocks                 which block of the generator runs in which lane, below
 *
 * Every lane is computed by itself and sums are taken in an order that the width does not change
 * (`weigh`) or that noise.h leaves open (`above`), so bits are those of the scalar twin where it
 * promises them. What is left of a row takes the scalar way.
 *
 * LANES blocks of the generator run beside each other, a block per lane, four words each. Unpacking
 * works within 128 bits; blocks are laid over the lanes so that two rounds of it leave the words
 * of 4 · LANES tokens in order. With eight:
 *
 *     lane      0  1  2  3 | 4  5  6  7
 *     block     0  2  4  6 | 1  3  5  7    words c0 … c3 of each, then unpacked: blocks 0 1, 2 3, …
 *
 * Included by noise_avx2.c and noise_avx512.c only. */
#include <immintrin.h>
#include <math.h>

#include "sample/noise.h"

enum { STEP = 4 * LANES };

static bool all_finite(const float *x, int n) {
    vi full = V(set1_epi32)(0x7F800000);
    vm any = m_none();
    int i = 0;
    for (; i + LANES <= n; i += LANES)
        any = m_or(any, m_same(i_and(f_bits(V(loadu_ps)(x + i)), full), full));
    return !m_bits(any) && so_noise_scalar.all_finite(x + i, n - i);
}

static float largest(const float *x, int n) {
    vf m[4];
    for (int k = 0; k < 4; k++)
        m[k] = V(set1_ps)(-INFINITY);
    int i = 0;
    for (; i + STEP <= n; i += STEP)
        for (int k = 0; k < 4; k++)
            m[k] = V(max_ps)(m[k], V(loadu_ps)(x + i + LANES * k));
    float top = f_largest(V(max_ps)(V(max_ps)(m[0], m[1]), V(max_ps)(m[2], m[3])));
    for (; i < n; i++)
        top = x[i] > top ? x[i] : top;
    return top;
}

static int32_t argmax(const float *x, int n) {
    float top = largest(x, n);
    int i = 0;
    if (top == -INFINITY)
        return -1;
    for (; i + LANES <= n; i += LANES) {
        unsigned mask = m_bits(m_eq(V(loadu_ps)(x + i), V(set1_ps)(top)));
        if (mask)
            return i + __builtin_ctz(mask);
    }
    while (x[i] != top)
        i++;
    return i;
}

/* exp(y) for y ≤ 0 within 1e-6: 2^(i + f) by a polynomial in f, |f| ≤ ½. Below −87: nearly 0. */
static inline vf f_exp(vf y) {
    static const float c[] = {1.5403530e-4f, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f,
                              2.4022651e-1f, 6.9314718e-1f, 1.0f};
    vf t = V(max_ps)(V(mul_ps)(y, V(set1_ps)(1.44269504f)), V(set1_ps)(-126.0f));
    vi i = V(cvtps_epi32)(t);
    vf f = V(sub_ps)(t, V(cvtepi32_ps)(i)), p = V(set1_ps)(c[0]);
    for (int k = 1; k < 7; k++)
        p = V(fmadd_ps)(p, f, V(set1_ps)(c[k]));
    return f_of(V(add_epi32)(f_bits(p), V(slli_epi32)(i, 23)));
}

/* Sums stay in single precision for one call: n is at most some thousands. */
static int above(const so_noise_row *r, int32_t first, int n, float floor, int32_t *ids,
                 double *low) {
    vf top = V(set1_ps)(r->top), inverse = V(set1_ps)(r->inverse);
    vf sum = V(setzero_ps)(), least = V(set1_ps)(floor);
    int n_ids = 0, i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf y = V(mul_ps)(V(sub_ps)(V(loadu_ps)(r->x + first + i), top), inverse);
        vm in = m_ge(y, least);
        sum = V(add_ps)(sum, f_without(in, f_exp(y)));
        for (unsigned mask = m_bits(in); mask; mask &= mask - 1)
            ids[n_ids++] = first + i + __builtin_ctz(mask);
    }
    float lane[LANES];
    V(storeu_ps)(lane, sum);
    for (int k = 0; k < LANES; k++)
        *low += (double)lane[k];
    return n_ids + so_noise_scalar.above(r, first + i, n - i, floor, ids + n_ids, low);
}

/* Low and high halves of the products of all lanes with m. */
static inline void mul_wide(vi c, vi m, vi *low, vi *high) {
    vi even = V(mul_epu32)(c, m), odd = V(mul_epu32)(V(srli_epi64)(c, 32), m);
    *low = i_odd(even, V(slli_epi64)(odd, 32));
    *high = i_odd(V(srli_epi64)(even, 32), odd);
}

/* The words of LANES blocks, in the order of their tokens. */
static inline void block_words(const so_rng_key *key, uint32_t block, vi w[4]) {
    vi c0 = V(add_epi32)(V(set1_epi32)((int)block), i_blocks());
    vi c1 = V(set1_epi32)((int)key->position);
    vi c2 = V(set1_epi32)((int)key->choice);
    vi c3 = V(set1_epi32)((int)(key->purpose << 28 ^ key->round));
    uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
    for (int r = 0; r < SO_RNG_ROUNDS; r++, k0 += SO_RNG_KEY0, k1 += SO_RNG_KEY1) {
        vi a_low, a_high, b_low, b_high;
        mul_wide(c0, i_set64(SO_RNG_MUL0), &a_low, &a_high);
        mul_wide(c2, i_set64(SO_RNG_MUL1), &b_low, &b_high);
        c0 = i_xor(i_xor(b_high, c1), V(set1_epi32)((int)k0));
        c2 = i_xor(i_xor(a_high, c3), V(set1_epi32)((int)k1));
        c1 = b_low;
        c3 = a_low;
    }
    vi p = V(unpacklo_epi32)(c0, c1), q = V(unpacklo_epi32)(c2, c3);
    vi s = V(unpackhi_epi32)(c0, c1), t = V(unpackhi_epi32)(c2, c3);
    w[0] = V(unpacklo_epi64)(p, q);
    w[1] = V(unpackhi_epi64)(p, q);
    w[2] = V(unpacklo_epi64)(s, t);
    w[3] = V(unpackhi_epi64)(s, t);
}

/* Bit i: token i of STEP may reach `least`. */
static inline uint64_t hopes(const so_noise_row *r, int32_t id, vf least) {
    vf y[4], top = V(set1_ps)(r->top), inverse = V(set1_ps)(r->inverse);
    vm near = m_none();
    uint64_t mask = 0;
    for (int k = 0; k < 4; k++) {
        y[k] = V(mul_ps)(V(sub_ps)(V(loadu_ps)(r->x + id + LANES * k), top), inverse);
        near = m_or(near, m_ge(V(add_ps)(y[k], V(set1_ps)(SO_NOISE_MOST)), least));
    }
    if (!m_bits(near))
        return 0;
    vi w[4], ones = V(set1_epi32)(-1);
    block_words(&r->key, (uint32_t)id / 4, w);
    for (int k = 0; k < 4; k++) {
        vi v = V(srli_epi32)(i_xor(w[k], ones), 8);
        vf bits = V(cvtepi32_ps)(f_bits(V(cvtepi32_ps)(v)));
        vf bound = V(fmadd_ps)(bits, V(set1_ps)(SO_NOISE_SLOPE), V(set1_ps)(SO_NOISE_START));
        mask |= (uint64_t)m_bits(m_ge(V(add_ps)(y[k], bound), least)) << (LANES * k);
    }
    return mask;
}

static int hopeful(const so_noise_row *r, int32_t first, int n, float least, int32_t *ids) {
    vf bar = V(set1_ps)(least - SO_NOISE_MARGIN);
    int n_ids = 0, i = 0;
    for (; i + STEP <= n; i += STEP)
        for (uint64_t mask = hopes(r, first + i, bar); mask; mask &= mask - 1)
            ids[n_ids++] = first + i + __builtin_ctzll(mask);
    return n_ids + so_noise_scalar.hopeful(r, first + i, n - i, least, ids + n_ids);
}

/* so_noise_scalar's exp_of. */
static inline vd d_exp(vd y) {
    static const double c[SO_NOISE_N_TERMS] = SO_NOISE_EXP_TERMS;
    vd least = V(set1_pd)(SO_NOISE_LEAST);
    md in = d_gt(y, least);
    y = V(max_pd)(y, least);
    vd i = d_round(V(mul_pd)(y, V(set1_pd)(SO_NOISE_LOG2E)));
    vd r = V(fnmadd_pd)(i, V(set1_pd)(SO_NOISE_LN2_HIGH), y);
    r = V(fnmadd_pd)(i, V(set1_pd)(SO_NOISE_LN2_LOW), r);
    vd p = V(set1_pd)(c[0]);
    for (int k = 1; k < SO_NOISE_N_TERMS; k++)
        p = V(fmadd_pd)(p, r, V(set1_pd)(c[k]));
    return d_within(in, d_times_pow2(p, i));
}

static double weigh(const float *x, int n, double top, double inverse, float *out) {
    enum { HALF = LANES / 2, N_SUMS = SO_NOISE_LANES / HALF };
    vd t = V(set1_pd)(top), v = V(set1_pd)(inverse), sum[N_SUMS];
    int i = 0;
    for (int k = 0; k < N_SUMS; k++)
        sum[k] = V(setzero_pd)();
    for (; i + SO_NOISE_LANES <= n; i += SO_NOISE_LANES)
        for (int k = 0; k < N_SUMS; k++) {
            vd y = V(mul_pd)(V(sub_pd)(V(cvtps_pd)(h_load(x + i + HALF * k)), t), v);
            vh w = V(cvtpd_ps)(d_exp(V(cvtps_pd)(V(cvtpd_ps)(y))));
            sum[k] = V(add_pd)(sum[k], V(cvtps_pd)(w));
            h_store(out + i + HALF * k, w);
        }
    double lane[SO_NOISE_LANES];
    for (int k = 0; k < N_SUMS; k++)
        V(storeu_pd)(lane + HALF * k, sum[k]);
    so_noise_scalar.weigh(x + i, n - i, top, inverse, out + i);
    for (; i < n; i++)
        lane[i % SO_NOISE_LANES] += (double)out[i];
    return ((lane[0] + lane[4]) + (lane[1] + lane[5])) +
           ((lane[2] + lane[6]) + (lane[3] + lane[7]));
}
