/* noise.h for x86, written once for both register widths. The including file defines:
 *
 *   V(op)                    the intrinsic of that width: V(add_ps) is _mm256_add_ps or _mm512_…
 *   LANES                    floats per register; HALF as many doubles
 *   vf vi vd vh              floats, integers, doubles; half as many floats
 *   vm, md                   sets of float, of double lanes; m_none m_or m_bits (bit i: lane i)
 *   m_ge m_eq m_same d_gt    comparisons: ≥, =, equal integers, > of doubles; false for NaN
 *   f_without(m, x)          x with 0 in the lanes of m; d_within(m, x): 0 in the other lanes
 *   f_bits f_of i_and i_xor  floats as integers and back; bitwise; i_xor3: of three
 *   i_odd                    even lanes from the first argument, odd lanes from the second
 *   i_set64 h_load h_store   one number in all 64-bit lanes; vh from and to memory
 *   f_largest                the largest of all lanes
 *   d_bits d_of h_minus      doubles as integers and back; vh minus one number
 *   i_blocks                 which generator block runs in which lane, see below
 *
 * Every lane is computed independently. Sums use an order that does not depend on the width
 * (`weigh`) or that noise.h leaves open (`above`). So results are bit-identical to the scalar level
 * where noise.h requires it. The elements after the last whole register go through the scalar
 * functions.
 *
 * HALF blocks of the generator run in parallel, one in each 64-bit lane. A block is four 32-bit
 * numbers, c0 … c3, one per token. Unpacking works within 128 bits, so blocks are assigned to lanes
 * such that unpacking leaves the numbers of 2 · LANES tokens in order. With four blocks:
 *
 *     lane      0  1 | 2  3
 *     block     0  2 | 1  3    c0 … c3 of each; after unpacking: blocks 0 1, 2 3
 *
 * Included only by noise_avx2.c and noise_avx512.c. */
#include <immintrin.h>
#include <math.h>

#include "base/loops.h"
#include "sample/noise.h"

enum { STEP = 4 * LANES, HALF = LANES / 2 };

static bool all_finite(const float *x, int n, float *top) {
    vi full = V(set1_epi32)(0x7F800000);
    vf m[2] = {V(set1_ps)(-INFINITY), V(set1_ps)(-INFINITY)};
    vm any = m_none();
    float tail_top;
    int i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int k = 0; k < 2; k++) {
            vf v = V(loadu_ps)(x + i + LANES * k);
            any = m_or(any, m_same(i_and(f_bits(v), full), full));
            m[k] = V(max_ps)(m[k], v);
        }
    bool all = so_noise_scalar.all_finite(x + i, n - i, &tail_top) && !m_bits(any);
    float best = f_largest(V(max_ps)(m[0], m[1]));
    *top = tail_top > best ? tail_top : best;
    return all;
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

static int32_t find(const float *x, int n, float value) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) {
        unsigned mask = m_bits(m_eq(V(loadu_ps)(x + i), V(set1_ps)(value)));
        if (mask)
            return i + __builtin_ctz(mask);
    }
    return i + so_noise_scalar.find(x + i, n - i, value);
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

/* The sum of one call is kept in single precision, which is enough: a call has at most 1024
 * elements or needs only an estimate (so_sample_prob_estimate). */
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

/* Constants of the generator's rounds, in all lanes. In the first two rounds most of the four
 * 32-bit values are equal in all blocks, so their results are computed once here. */
typedef struct rounds {
    vi index, second, third;  /* XORed with the value that differs between blocks */
    vi fixed;                 /* a value that is equal in all blocks */
    vi key[SO_RNG_ROUNDS][2]; /* round keys from the third round on */
} rounds;

static inline void set_rounds(const so_rng_key *key, rounds *r) {
    uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
    uint64_t b = (uint64_t)SO_RNG_MUL1 * key->choice;
    uint32_t c0 = (uint32_t)(b >> 32) ^ key->position ^ k0;
    uint64_t a = (uint64_t)SO_RNG_MUL0 * c0;
    r->index = i_set64(key->purpose << 28 ^ key->round ^ k1);
    k0 += SO_RNG_KEY0;
    k1 += SO_RNG_KEY1;
    r->second = i_set64((uint32_t)b ^ k0);
    r->third = i_set64((uint32_t)(a >> 32) ^ k1);
    r->fixed = i_set64((uint32_t)a);
    for (int i = 2; i < SO_RNG_ROUNDS; i++) {
        r->key[i][0] = i_set64(k0 += SO_RNG_KEY0);
        r->key[i][1] = i_set64(k1 += SO_RNG_KEY1);
    }
}

/* Moves the upper half of each 64-bit lane to the lower half. A shuffle, because shifts compete
 * with multiplications for the same port. */
static inline vi upper(vi x) { return V(shuffle_epi32)(x, (_MM_PERM_ENUM)0xF5); }

/* The random numbers of HALF blocks, one block in each 64-bit lane, in the order of their tokens.
 * During the rounds a number is the lower half of its lane; the upper half is undefined, since
 * multiplications ignore it. */
static inline void block_words(const rounds *r, uint32_t block, vi w[2]) {
    vi mul0 = i_set64(SO_RNG_MUL0), mul1 = i_set64(SO_RNG_MUL1);
    vi c3 = V(mul_epu32)(V(add_epi64)(i_set64(block), i_blocks()), mul0);
    vi c1 = V(mul_epu32)(i_xor(upper(c3), r->index), mul1);
    vi c0 = i_xor(upper(c1), r->second), c2 = i_xor(c3, r->third);
    c3 = r->fixed;
    UNROLL for (int i = 2; i < SO_RNG_ROUNDS; i++) {
        vi a = V(mul_epu32)(c0, mul0), b = V(mul_epu32)(c2, mul1);
        c0 = i_xor3(upper(b), c1, r->key[i][0]);
        c2 = i_xor3(upper(a), c3, r->key[i][1]);
        c1 = b;
        c3 = a;
    }
    vi p = i_odd(c0, V(slli_epi64)(c1, 32)), q = i_odd(c2, V(slli_epi64)(c3, 32));
    w[0] = V(unpacklo_epi64)(p, q);
    w[1] = V(unpackhi_epi64)(p, q);
}

/* Upper bound of the noise for a 32-bit random number. */
static inline vf bound_of(vi word) {
    vi v = V(srli_epi32)(i_xor(word, V(set1_epi32)(-1)), 8);
    vf bits = V(cvtepi32_ps)(f_bits(V(cvtepi32_ps)(v)));
    return V(fmadd_ps)(bits, V(set1_ps)(SO_NOISE_SLOPE), V(set1_ps)(SO_NOISE_START));
}

static inline vf y_of(const so_noise_row *r, vf x) {
    return V(mul_ps)(V(sub_ps)(x, V(set1_ps)(r->top)), V(set1_ps)(r->inverse));
}

/* Bit i: token i of STEP may reach `least`. In most cases no token can. To find this out quickly,
 * one bound is computed for every four tokens, from their largest logit and their largest random
 * number: the score of a token grows with both. */
static inline uint64_t candidate_mask(const so_noise_row *r, const rounds *g, int32_t id,
                                      vf least) {
    const float *x = r->x + id;
    vf high = V(max_ps)(V(loadu_ps)(x), V(loadu_ps)(x + LANES));
    vf higher = V(max_ps)(V(loadu_ps)(x + 2 * LANES), V(loadu_ps)(x + 3 * LANES));
    vf y = y_of(r, V(max_ps)(high, higher));
    vi w[4];
    uint64_t mask = 0;
    if (!m_bits(m_ge(V(add_ps)(y, V(set1_ps)(SO_NOISE_MAX)), least)))
        return 0;
    block_words(g, r->block + (uint32_t)id / 4, w);
    block_words(g, r->block + (uint32_t)id / 4 + HALF, w + 2);
    vf bound = bound_of(V(max_epu32)(V(max_epu32)(w[0], w[1]), V(max_epu32)(w[2], w[3])));
    if (!m_bits(m_ge(V(add_ps)(y, bound), least)))
        return 0;
    for (int k = 0; k < 4; k++)
        mask |= (uint64_t)m_bits(
                    m_ge(V(add_ps)(y_of(r, V(loadu_ps)(x + LANES * k)), bound_of(w[k])), least))
                << (LANES * k);
    return mask;
}

static int candidates(const so_noise_row *r, int32_t first, int n, float least, int32_t *ids) {
    vf bar = V(set1_ps)(least - SO_NOISE_MARGIN);
    rounds g;
    set_rounds(&r->key, &g);
    int n_ids = 0, i = 0;
    for (; i + STEP <= n; i += STEP)
        for (uint64_t mask = candidate_mask(r, &g, first + i, bar); mask; mask &= mask - 1)
            ids[n_ids++] = first + i + __builtin_ctzll(mask);
    return n_ids + so_noise_scalar.candidates(r, first + i, n - i, least, ids + n_ids);
}

/* Bit-identical to so_exact_exp (base/exact.h). */
static inline vd d_exp(vd y) {
    static const double c[SO_EXACT_EXP_N] = SO_EXACT_EXP_TERMS;
    vd least = V(set1_pd)(SO_EXACT_EXP_MIN);
    md in = d_gt(y, least);
    y = V(max_pd)(y, least);
    /* Adding 1.5 · 2⁵² rounds to an integer, which is then in the low bits. */
    vd whole = V(set1_pd)(0x1.8p52), t = V(add_pd)(V(mul_pd)(y, V(set1_pd)(SO_EXACT_LOG2E)), whole);
    vd i = V(sub_pd)(t, whole);
    vd r = V(fnmadd_pd)(i, V(set1_pd)(SO_EXACT_LN2_HIGH), y);
    r = V(fnmadd_pd)(i, V(set1_pd)(SO_EXACT_LN2_LOW), r);
    vd p = V(set1_pd)(c[0]);
    for (int k = 1; k < SO_EXACT_EXP_N; k++)
        p = V(fmadd_pd)(p, r, V(set1_pd)(c[k]));
    return d_within(in, d_of(V(add_epi64)(d_bits(p), V(slli_epi64)(d_bits(t), 52))));
}

/* plain (temperature 1): y is the difference of two floats rounded to float, which needs no
 * doubles. Either the difference is exact in double, or x is so small compared with `top` that both
 * computations give −top. */
static inline double weigh_as(const float *x, int n, double top, double inverse, float *out,
                              bool plain) {
    enum { N_SUMS = SO_NOISE_LANES / HALF };
    vd t = V(set1_pd)(top), v = V(set1_pd)(inverse), sum[N_SUMS];
    int i = 0;
    for (int k = 0; k < N_SUMS; k++)
        sum[k] = V(setzero_pd)();
    for (; i + SO_NOISE_LANES <= n; i += SO_NOISE_LANES)
        for (int k = 0; k < N_SUMS; k++) {
            vh l = h_load(x + i + HALF * k), y;
            if (plain)
                y = h_minus(l, (float)top);
            else
                y = V(cvtpd_ps)(V(mul_pd)(V(sub_pd)(V(cvtps_pd)(l), t), v));
            vh w = V(cvtpd_ps)(d_exp(V(cvtps_pd)(y)));
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

static double weigh(const float *x, int n, double top, double inverse, float *out) {
    bool plain = inverse == 1 && (double)(float)top == top;
    return plain ? weigh_as(x, n, top, 1, out, true) : weigh_as(x, n, top, inverse, out, false);
}
