/* The vector operations of noise_x86.h for 256-bit registers (AVX2 with FMA), and the table of that
 * level. A set of lanes is a register whose lanes are all ones or all zeros. */
#include <immintrin.h>
#include <stdint.h>

#define V(op) _mm256_##op
enum { LANES = 8 };

typedef __m256 vf, vm;
typedef __m256i vi;
typedef __m256d vd, md;
typedef __m128 vh;

static inline vm m_none(void) { return _mm256_setzero_ps(); }
static inline vm m_or(vm a, vm b) { return _mm256_or_ps(a, b); }
static inline unsigned m_bits(vm m) { return (unsigned)_mm256_movemask_ps(m); }
static inline vm m_ge(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_GE_OQ); }
static inline vm m_eq(vf a, vf b) { return _mm256_cmp_ps(a, b, _CMP_EQ_OQ); }
static inline vm m_same(vi a, vi b) { return _mm256_castsi256_ps(_mm256_cmpeq_epi32(a, b)); }
static inline md d_gt(vd a, vd b) { return _mm256_cmp_pd(a, b, _CMP_GT_OQ); }
static inline vf f_without(vm m, vf x) { return _mm256_andnot_ps(m, x); }
static inline vd d_within(md m, vd x) { return _mm256_and_pd(x, m); }

static inline vi f_bits(vf x) { return _mm256_castps_si256(x); }
static inline vf f_of(vi x) { return _mm256_castsi256_ps(x); }
static inline vi i_and(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi i_xor(vi a, vi b) { return _mm256_xor_si256(a, b); }
static inline vi i_xor3(vi a, vi b, vi c) { return i_xor(i_xor(a, b), c); }
static inline vi i_odd(vi even, vi odd) { return _mm256_blend_epi32(even, odd, 0xAA); }
static inline vi i_set64(uint32_t x) { return _mm256_set1_epi64x(x); }
static inline vi i_blocks(void) { return _mm256_setr_epi64x(0, 2, 1, 3); }
static inline vh h_load(const float *p) { return _mm_loadu_ps(p); }
static inline void h_store(float *p, vh x) { _mm_storeu_ps(p, x); }

static inline float f_largest(vf x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

static inline vi d_bits(vd x) { return _mm256_castpd_si256(x); }
static inline vd d_of(vi x) { return _mm256_castsi256_pd(x); }
static inline vh h_minus(vh x, float y) { return _mm_sub_ps(x, _mm_set1_ps(y)); }

#include "sample/cpu/noise_x86.h"

static int expand(const float *x, const uint64_t *subset_bits, int n, float *out) {
    return so_noise_scalar.expand(x, subset_bits, n, out);
}

const so_noise_fns so_noise_avx2 = {all_finite, largest, find, candidates, above, weigh, expand};
