/* The x86 kernels that compute on rows of activations: quantisation, norms, element-wise
 * operations, argmax; attn_x86.h, included at the end, has attention. Written once in terms of
 * sixteen-lane vectors that simd_avx2.h and simd_avx512.h define:
 *
 *   v16                          sixteen floats: one 512-bit register, or two of 256 bits
 *   v_set1 v_load v_store        whole vectors; v_load_n, v_store_n access only the first n lanes
 *   v_load_f16(_n) v_load_bf16(_n) v_load_i8   the same, converted to float
 *   v_select_n(n, a, b)          lanes below n from a, the others from b
 *   v_keep_above(x, limit, a)    lanes of a where x is above limit or NaN, the others 0
 *   v_add v_sub v_mul v_div v_fma v_fnma v_min v_max   fnma: c − a·b. v_min and v_max return their
 *                                                      second operand if either is NaN
 *   v_times_pow2(p, t)           p · 2^n, n taken from the bits of t (SO_EXP_MAGIC)
 *   v_low8 v_high8               the two halves
 *
 * The arithmetic follows the contract of kernels.h; results are bit-identical to kernels_scalar.c.
 * Included by the x86 kernels_*.c only. Keeps no state; any thread. */
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "backend/cpu/tiles_x86.h"
#include "base/half.h"
#include "base/mem.h"

/* The reduction order of lane16 (kernels.h). */
INLINE float v_reduce(v16 v) {
    __m256 s8 = _mm256_add_ps(v_low8(v), v_high8(v));
    __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
    __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
    return _mm_cvtss_f32(_mm_add_ss(s2, _mm_movehdup_ps(s2)));
}

/* exp for x ≤ SO_EXP_MAX. In lanes below SO_EXP_MIN, exp(0) is computed and then replaced by 0: a
 * result that underflows needs a microcode assist, which takes as long as this function takes for a
 * dozen vectors. */
INLINE v16 v_exp_bounded(v16 given) {
    v16 x = v_keep_above(given, v_set1(SO_EXP_MIN), given);
    v16 t = v_fma(x, v_set1(SO_EXP_LOG2E), v_set1(SO_EXP_MAGIC));
    v16 n = v_sub(t, v_set1(SO_EXP_MAGIC));
    v16 r = v_fnma(n, v_set1(SO_EXP_LN2_HI), x);
    r = v_fnma(n, v_set1(SO_EXP_LN2_LO), r);
    v16 p = v_set1(SO_EXP_C6);
    p = v_fma(p, r, v_set1(SO_EXP_C5));
    p = v_fma(p, r, v_set1(SO_EXP_C4));
    p = v_fma(p, r, v_set1(SO_EXP_C3));
    p = v_fma(p, r, v_set1(SO_EXP_C2));
    p = v_fma(p, r, v_set1(1.0f));
    p = v_fma(p, r, v_set1(1.0f));
    return v_keep_above(given, v_set1(SO_EXP_MIN), v_times_pow2(p, t));
}

/* NaN stays NaN: it is v_min's second operand. */
INLINE v16 v_exp(v16 x) { return v_exp_bounded(v_min(v_set1(SO_EXP_MAX), x)); }

/* ---- activations to int8 ---- */

INLINE uint32_t max_abs_bits(const float *x, int len) {
    __m256i max = _mm256_setzero_si256(), sign = _mm256_set1_epi32(0x7FFFFFFF);
    for (int i = 0; i < len; i += 8)
        max = _mm256_max_epi32(max,
                               _mm256_and_si256(_mm256_loadu_si256((const void *)(x + i)), sign));
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    m = _mm_max_epi32(m, _mm_unpackhi_epi64(m, m));
    m = _mm_max_epi32(m, _mm_srli_epi64(m, 32));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

INLINE __m256i round8(const float *x, __m256 inverse) {
    __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x), inverse);
    v = _mm256_max_ps(_mm256_min_ps(v, _mm256_set1_ps(127.0f)), _mm256_set1_ps(-127.0f));
    return _mm256_cvtps_epi32(v);
}

/* Packs 32 integers to bytes. */
INLINE __m256i pack32(const __m256i *w) {
    __m256i v = _mm256_packs_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
    return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* The eight sums of four consecutive bytes each. */
INLINE __m256i sums8(__m256i v) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), v), _mm256_set1_epi16(1));
}

/* Quantises 32 values to int8; returns the four sums of eight consecutive results each. */
INLINE __m128i round32(const float *x, __m256 inverse, int8_t *q) {
    __m256i w[4] = {round8(x, inverse), round8(x + 8, inverse), round8(x + 16, inverse),
                    round8(x + 24, inverse)};
    __m256i v = pack32(w);
    _mm256_storeu_si256((void *)q, v);
    __m256i s = sums8(v);
    return _mm_hadd_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
}

INLINE __m128i zero32(int8_t *q) {
    memset(q, 0, 32);
    return _mm_setzero_si128();
}

/* The scale of a block. *inverse: the factor by which its values are multiplied; 0 if all of them
 * become 0. */
INLINE float block_scale(const float *x, int len, float *inverse) {
    uint32_t max = max_abs_bits(x, len);
    float amax = so_bits_f32(max);
    bool finite = max < 0x7F800000u, usable = finite && amax >= SO_ACT_TINY;
    *inverse = usable ? 127.0f / amax : 0.0f;
    return usable ? amax / 127.0f : finite ? 0.0f : NAN;
}

INLINE void quantize_block(const float *x, int8_t *q, so_q32 *block) {
    float inverse, d = block_scale(x, 32, &inverse);
    __m128i s = inverse != 0.0f ? round32(x, _mm256_set1_ps(inverse), q) : zero32(q);
    s = _mm_hadd_epi32(s, s);
    int sum = _mm_cvtsi128_si32(_mm_hadd_epi32(s, s));
    *block = (so_q32){.d = d, .s = d * (float)sum, .sum = sum, .neg8 = -8 * sum};
}

INLINE __m256i add_or_max(__m256i a, __m256i b, const bool add) {
    return add ? _mm256_add_epi32(a, b) : _mm256_max_epi32(a, b);
}

/* The sum or the maximum of each of four vectors of eight. */
INLINE __m128i reduce4(const __m256i *v, const bool add) {
    __m256i ab =
        add_or_max(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]), add);
    __m256i cd =
        add_or_max(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]), add);
    __m256i all = add_or_max(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd), add);
    __m256i swapped = _mm256_permute2x128_si256(all, all, 1);
    return _mm256_castsi256_si128(add_or_max(all, swapped, add));
}

/* Quantises four blocks at once. Returns false, with nothing written, if one of them is tiny or not
 * finite. Clamping to ±127 is not needed: |x| · (127 / max |x|) rounds to less than 127.5. */
INLINE bool quantize_four(const float *x, int8_t *q, so_q32 *blocks) {
    __m256i v[4], sign = _mm256_set1_epi32(0x7FFFFFFF);
    UNROLL for (int b = 0; b < 4; b++) {
        __m256i w[4];
        UNROLL for (int i = 0; i < 4; i++) w[i] =
            _mm256_and_si256(_mm256_loadu_si256((const void *)(x + 32 * b + 8 * i)), sign);
        v[b] = _mm256_max_epi32(_mm256_max_epi32(w[0], w[1]), _mm256_max_epi32(w[2], w[3]));
    }
    __m128i max = reduce4(v, false);
    __m128i tiny = _mm_cmplt_epi32(max, _mm_castps_si128(_mm_set1_ps(SO_ACT_TINY)));
    __m128i large = _mm_cmpgt_epi32(max, _mm_set1_epi32(0x7F7FFFFF));
    if (_mm_movemask_epi8(_mm_or_si128(tiny, large)) != 0)
        return false;
    __m128 amax = _mm_castsi128_ps(max), limit = _mm_set1_ps(127.0f);
    __m128 d = _mm_div_ps(amax, limit);
    float inverse[4];
    _mm_storeu_ps(inverse, _mm_div_ps(limit, amax));
    UNROLL for (int b = 0; b < 4; b++) {
        __m256 by = _mm256_set1_ps(inverse[b]);
        __m256i w[4];
        UNROLL for (int i = 0; i < 4; i++) w[i] =
            _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 32 * b + 8 * i), by));
        v[b] = pack32(w);
        _mm256_storeu_si256((void *)(q + 32 * b), v[b]);
        v[b] = sums8(v[b]);
    }
    __m128i sum = reduce4(v, true);
    __m128i neg8 = _mm_slli_epi32(_mm_sub_epi32(_mm_setzero_si128(), sum), 3);
    __m128 out[4] = {d, _mm_mul_ps(d, _mm_cvtepi32_ps(sum)), _mm_castsi128_ps(sum),
                     _mm_castsi128_ps(neg8)};
    _MM_TRANSPOSE4_PS(out[0], out[1], out[2], out[3]);
    UNROLL for (int b = 0; b < 4; b++) _mm_storeu_ps((float *)(blocks + b), out[b]);
    return true;
}

static void quantize32(const float *x, int k, int8_t *q, so_q32 *blocks) {
    _Static_assert(sizeof(so_q32) == 16, "a block is stored as four numbers");
    for (int b = 0, n; b < k / 32; b += n, x += 32 * n, q += 32 * n) {
        n = k / 32 - b >= 4 && quantize_four(x, q, blocks + b) ? 4 : 1;
        if (n == 1)
            quantize_block(x, q, blocks + b);
    }
}

/* Writes the tables of sums for values 32j … 32j+31 of a block. s8: the sums of each group
 * of eight. */
INLINE void sums32(__m128i s8, int j, so_q256 *b) {
    __m128i zero = _mm_setzero_si128(), s16 = _mm_hadd_epi32(s8, s8);
    _mm_storeu_si128((void *)(b->neg32_8 + 4 * j), _mm_slli_epi32(_mm_sub_epi32(zero, s8), 5));
    _mm_storel_epi64((void *)(b->neg16_16 + 2 * j), _mm_slli_epi32(_mm_sub_epi32(zero, s16), 4));
    int low = _mm_cvtsi128_si32(s16), high = _mm_extract_epi32(s16, 1);
    b->sum16[2 * j] = (int16_t)low;
    b->sum16[2 * j + 1] = (int16_t)high;
    b->sum32[j] = (int16_t)(low + high);
    b->neg8_32[j] = -8 * (low + high);
}

static void quantize256(const float *x, int k, int8_t *q, so_q256 *blocks) {
    for (int b = 0; b < k / 256; b++) {
        float inverse;
        blocks[b].d = block_scale(x, 256, &inverse);
        for (int j = 0; j < 8; j++, x += 32, q += 32)
            sums32(inverse != 0.0f ? round32(x, _mm256_set1_ps(inverse), q) : zero32(q), j,
                   &blocks[b]);
    }
}

/* ---- norms ---- */

static void rms_norm(float *out, const float *x, const float *w, int d, float eps) {
    v16 sum = v_set1(0);
    int i = 0;
    for (; i + 16 <= d; i += 16)
        sum = v_fma(v_load(x + i), v_load(x + i), sum);
    if (i < d) {
        v16 v = v_load_n(x + i, d - i);
        sum = v_select_n(d - i, v_fma(v, v, sum), sum);
    }
    v16 r = v_set1(1.0f / sqrtf(v_reduce(sum) / (float)d + eps));
    for (i = 0; i + 16 <= d; i += 16)
        v_store(out + i, v_mul(v_mul(v_load(x + i), r), v_load(w + i)));
    if (i < d)
        v_store_n(out + i, v_mul(v_mul(v_load_n(x + i, d - i), r), v_load_n(w + i, d - i)), d - i);
}

INLINE float sum_of_squares_around(const float *x, int d, v16 mean) {
    v16 sum = v_set1(0);
    int i = 0;
    for (; i + 16 <= d; i += 16) {
        v16 v = v_sub(v_load(x + i), mean);
        sum = v_fma(v, v, sum);
    }
    if (i < d) {
        v16 v = v_sub(v_load_n(x + i, d - i), mean);
        sum = v_select_n(d - i, v_fma(v, v, sum), sum);
    }
    return v_reduce(sum);
}

static void layer_norm(float *out, const float *x, const float *w, const float *b, int d,
                       float eps) {
    v16 sum = v_set1(0);
    int i = 0;
    for (; i + 16 <= d; i += 16)
        sum = v_add(sum, v_load(x + i));
    if (i < d)
        sum = v_select_n(d - i, v_add(sum, v_load_n(x + i, d - i)), sum);
    v16 mean = v_set1(v_reduce(sum) / (float)d);
    v16 r = v_set1(1.0f / sqrtf(sum_of_squares_around(x, d, mean) / (float)d + eps));
    for (i = 0; i < d; i += 16) {
        int n = SO_MIN(16, d - i);
        v16 v = v_mul(v_sub(v_load_n(x + i, n), mean), r);
        v_store_n(out + i, v_fma(v, v_load_n(w + i, n), v_load_n(b + i, n)), n);
    }
}

/* ---- element by element ---- */

INLINE v16 silu1(v16 x) {
    v16 minus = v_sub(v_set1(-0.0f), x); /* −0 − x is −x, also for zeros */
    return v_div(x, v_add(v_set1(1.0f), v_exp(minus)));
}

INLINE v16 gelu1(v16 x) {
    v16 u = v_fma(v_mul(v_mul(v_set1(SO_GELU_CUBIC), x), x), x, x);
    return v_div(x, v_add(v_set1(1.0f), v_exp(v_mul(v_set1(SO_GELU_SCALE), u))));
}

INLINE v16 add1(v16 x, v16 y) { return v_add(x, y); }
INLINE v16 silu_mul1(v16 x, v16 y) { return v_mul(silu1(x), y); }
INLINE v16 gelu_mul1(v16 x, v16 y) { return v_mul(gelu1(x), y); }

#define ELTWISE2(name)                                                                             \
    static void name(float *out, const float *a, const float *b, long n) {                         \
        long i = 0;                                                                                \
        for (; i + 16 <= n; i += 16)                                                               \
            v_store(out + i, name##1(v_load(a + i), v_load(b + i)));                               \
        int n_tail = (int)(n - i);                                                                 \
        if (n_tail)                                                                                \
            v_store_n(out + i, name##1(v_load_n(a + i, n_tail), v_load_n(b + i, n_tail)), n_tail); \
    }
ELTWISE2(add)
ELTWISE2(silu_mul)
ELTWISE2(gelu_mul)

#define ELTWISE1(name, fn)                                           \
    static void name(float *out, const float *a, long n) {           \
        long i = 0;                                                  \
        for (; i + 16 <= n; i += 16)                                 \
            v_store(out + i, fn(v_load(a + i)));                     \
        int n_tail = (int)(n - i);                                   \
        if (n_tail)                                                  \
            v_store_n(out + i, fn(v_load_n(a + i, n_tail)), n_tail); \
    }
ELTWISE1(gelu, gelu1)
ELTWISE1(exp_row, v_exp)

/* Four pairs per register. `own`: products of each element with cos; `other`: products of the other
 * element of its pair with sin. */
static void rotate(float *x, const float *table, int n) {
    int i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 v = _mm256_loadu_ps(x + i), t = _mm256_loadu_ps(table + i);
        __m256 own = _mm256_mul_ps(v, _mm256_moveldup_ps(t));
        __m256 other = _mm256_mul_ps(_mm256_permute_ps(v, 0xB1), _mm256_movehdup_ps(t));
        _mm256_storeu_ps(x + i, _mm256_addsub_ps(own, other));
    }
    for (; i < n; i += 2) {
        float a = x[i], b = x[i + 1], c = table[i], s = table[i + 1];
        x[i] = a * c - b * s;
        x[i + 1] = a * s + b * c;
    }
}

static void scale_row(float *out, const float *x, float a, long n) {
    long i = 0;
    for (; i + 16 <= n; i += 16)
        v_store(out + i, v_mul(v_load(x + i), v_set1(a)));
    int n_tail = (int)(n - i);
    if (n_tail)
        v_store_n(out + i, v_mul(v_load_n(x + i, n_tail), v_set1(a)), n_tail);
}

static void to_f16(uint16_t *out, const float *x, long n) {
    long i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((void *)(out + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; i++)
        out[i] = so_f32_to_f16(x[i]);
}

static int32_t argmax(const float *x, int d) {
    v16 max = v_set1(-INFINITY), nonfinite = v_set1(0); /* 0 · x is NaN where x is not finite */
    int i = 0;
    for (; i + 16 <= d; i += 16) {
        v16 v = v_load(x + i);
        max = v_max(v, max);
        nonfinite = v_fma(v, v_set1(0), nonfinite);
    }
    float lanes[16], m = -INFINITY, bad = v_reduce(nonfinite);
    v_store(lanes, max);
    for (int j = 0; j < 16; j++)
        m = lanes[j] > m ? lanes[j] : m;
    for (; i < d; i++) {
        m = x[i] > m ? x[i] : m;
        bad = fmaf(x[i], 0, bad);
    }
    if (bad != 0)
        return -1;
    __m256 wanted = _mm256_set1_ps(m);
    for (i = 0; i + 8 <= d; i += 8) {
        int hit = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), wanted, _CMP_EQ_OQ));
        if (hit)
            return i + __builtin_ctz((unsigned)hit);
    }
    for (; i < d; i++)
        if (x[i] == m)
            return i;
    return -1; /* not reached: m is an element of x */
}

#include "backend/cpu/attn_x86.h"
