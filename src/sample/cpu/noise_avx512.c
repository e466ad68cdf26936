/* The vector operations of noise_x86.h for 512-bit registers (AVX-512 F, DQ), and the table of that
 * level. A set of lanes is a mask register. */
#include <immintrin.h>
#include <stdint.h>

#define V(op) _mm512_##op
enum { LANES = 16 };

typedef __m512 vf;
typedef __m512i vi;
typedef __m512d vd;
typedef __m256 vh;
typedef __mmask16 vm;
typedef __mmask8 md;

static inline vm m_none(void) { return 0; }
static inline vm m_or(vm a, vm b) { return a | b; }
static inline unsigned m_bits(vm m) { return m; }
static inline vm m_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline vm m_eq(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
static inline vm m_same(vi a, vi b) { return _mm512_cmpeq_epi32_mask(a, b); }
static inline md d_gt(vd a, vd b) { return _mm512_cmp_pd_mask(a, b, _CMP_GT_OQ); }
static inline vf f_without(vm m, vf x) { return _mm512_maskz_mov_ps((vm)~m, x); }
static inline vd d_within(md m, vd x) { return _mm512_maskz_mov_pd(m, x); }

static inline vi f_bits(vf x) { return _mm512_castps_si512(x); }
static inline vf f_of(vi x) { return _mm512_castsi512_ps(x); }
static inline vi i_and(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi i_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
static inline vi i_xor3(vi a, vi b, vi c) { return _mm512_ternarylogic_epi32(a, b, c, 0x96); }
static inline vi i_odd(vi even, vi odd) { return _mm512_mask_blend_epi32(0xAAAA, even, odd); }
static inline vi i_set64(uint32_t x) { return _mm512_set1_epi64(x); }
static inline vi i_blocks(void) { return _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); }
static inline vh h_load(const float *p) { return _mm256_loadu_ps(p); }
static inline void h_store(float *p, vh x) { _mm256_storeu_ps(p, x); }

static inline float f_largest(vf x) { return _mm512_reduce_max_ps(x); }

static inline vi d_bits(vd x) { return _mm512_castpd_si512(x); }
static inline vd d_of(vi x) { return _mm512_castsi512_pd(x); }
static inline vh h_minus(vh x, float y) { return _mm256_sub_ps(x, _mm256_set1_ps(y)); }

#include "sample/cpu/noise_x86.h"

static int expand(const float *x, const uint64_t *subset_bits, int n, float *out) {
    const float *from = x;
    vf never = _mm512_set1_ps(-INFINITY);
    for (int k = 0; k < n; k++)
        for (int i = 0; i < 64; i += LANES) {
            vm in = (vm)(subset_bits[k] >> i);
            _mm512_storeu_ps(out + 64 * k + i, _mm512_mask_expandloadu_ps(never, in, from));
            from += __builtin_popcount(in);
        }
    return (int)(from - x);
}

const so_noise_fns so_noise_avx512 = {all_finite, largest, find, candidates, above, weigh, expand};
