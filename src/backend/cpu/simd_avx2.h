/* The SIMD operations that rows_x86.h, matmul_x86.h and packed_x86.h are written in, for
 * 256-bit registers: AVX2 with FMA and F16C and, if the including file sets HAS_VNNI, the dot
 * products of AVX-VNNI. The headers that use an operation define its meaning. Included by
 * kernels_avx2.c and kernels_avxvnni.c only. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/shifts_x86.h"
#include "backend/cpu/simd_x86.h"

#include <immintrin.h>
#include <string.h>

/* ---- sixteen floats ---- */

typedef struct v16 {
    __m256 lo, hi;
} v16;

#define BOTH(name, intrinsic) \
    SIMD_FN v16 name(v16 a, v16 b) { return (v16){intrinsic(a.lo, b.lo), intrinsic(a.hi, b.hi)}; }
BOTH(v_add, _mm256_add_ps)
BOTH(v_sub, _mm256_sub_ps)
BOTH(v_mul, _mm256_mul_ps)
BOTH(v_div, _mm256_div_ps)
BOTH(v_min, _mm256_min_ps)
BOTH(v_max, _mm256_max_ps)

SIMD_FN v16 v_fma(v16 a, v16 b, v16 c) {
    return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
SIMD_FN v16 v_fnma(v16 a, v16 b, v16 c) {
    return (v16){_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
SIMD_FN v16 v_set1(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SIMD_FN v16 v_load(const float *p) { return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SIMD_FN void v_store(float *p, v16 v) {
    _mm256_storeu_ps(p, v.lo);
    _mm256_storeu_ps(p + 8, v.hi);
}
SIMD_FN __m256 v_low8(v16 v) { return v.lo; }
SIMD_FN __m256 v_high8(v16 v) { return v.hi; }

/* A mask for lanes first … first+7: all bits set in the lanes below n. */
SIMD_FN __m256i below(int n, int first) {
    static const int32_t table[32] = {-1, -1, -1, -1, -1, -1, -1, -1, -1,
                                      -1, -1, -1, -1, -1, -1, -1, 0};
    return _mm256_loadu_si256((const void *)(table + 16 - n + first));
}
SIMD_FN v16 v_load_n(const float *p, int n) {
    return (v16){_mm256_maskload_ps(p, below(n, 0)), _mm256_maskload_ps(p + 8, below(n, 8))};
}
SIMD_FN void v_store_n(float *p, v16 v, int n) {
    _mm256_maskstore_ps(p, below(n, 0), v.lo);
    _mm256_maskstore_ps(p + 8, below(n, 8), v.hi);
}
SIMD_FN v16 v_select_n(int n, v16 a, v16 b) {
    return (v16){_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(below(n, 0))),
                 _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(below(n, 8)))};
}
SIMD_FN v16 v_keep_above(v16 x, v16 limit, v16 a) {
    return (v16){_mm256_and_ps(_mm256_cmp_ps(x.lo, limit.lo, _CMP_NLE_UQ), a.lo),
                 _mm256_and_ps(_mm256_cmp_ps(x.hi, limit.hi, _CMP_NLE_UQ), a.hi)};
}
SIMD_FN v16 v_load_f16(const uint16_t *p) {
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p + 8)))};
}
SIMD_FN __m256 bf16_8(const uint16_t *p) {
    __m256i u = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(u, 16));
}
SIMD_FN v16 v_load_bf16(const uint16_t *p) { return (v16){bf16_8(p), bf16_8(p + 8)}; }
SIMD_FN v16 v_load_f16_n(const uint16_t *p, int n) {
    uint16_t copy[16] = {0};
    memcpy(copy, p, (size_t)n * sizeof *p);
    return v_load_f16(copy);
}
SIMD_FN v16 v_load_bf16_n(const uint16_t *p, int n) {
    uint16_t copy[16] = {0};
    memcpy(copy, p, (size_t)n * sizeof *p);
    return v_load_bf16(copy);
}
SIMD_FN __m256 i8_8(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
SIMD_FN v16 v_load_i8(const int8_t *p) { return (v16){i8_8(p), i8_8(p + 8)}; }

SIMD_FN __m256 times_pow2(__m256 p, __m256 t) {
    __m256i n =
        _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_castps_si256(_mm256_set1_ps(SO_EXP_MAGIC)));
    __m256i n1 = _mm256_srai_epi32(n, 1), n2 = _mm256_sub_epi32(n, n1);
    __m256i bias = _mm256_set1_epi32(127);
    n1 = _mm256_slli_epi32(_mm256_add_epi32(n1, bias), 23);
    n2 = _mm256_slli_epi32(_mm256_add_epi32(n2, bias), 23);
    return _mm256_mul_ps(_mm256_mul_ps(p, _mm256_castsi256_ps(n1)), _mm256_castsi256_ps(n2));
}
SIMD_FN v16 v_times_pow2(v16 p, v16 t) {
    return (v16){times_pow2(p.lo, t.lo), times_pow2(p.hi, t.hi)};
}

/* ---- eight rows of integers ---- */

enum { LANES = 8, FLOAT_NR = 2, FLOAT_NX = 2 };
enum { ATTN_SQ = 2, ATTN_BQ = 2, ATTN_NQ = 2, ATTN_NV = 2 };
typedef __m256i vi;
typedef __m256 vf;

/* LANES rows, `stride` bytes apart. */
typedef struct rowset {
    const uint8_t *p;
    size_t stride;
} rowset;

#define vf_add _mm256_add_ps
#define vf_mul _mm256_mul_ps
#define vf_fma _mm256_fmadd_ps
#define vf_fnma _mm256_fnmadd_ps
#define vf_set1 _mm256_set1_ps
#define vf_load _mm256_loadu_ps
#define vf_store _mm256_storeu_ps
#define vf_from_int _mm256_cvtepi32_ps
#define vi_and _mm256_and_si256
#define vi_or _mm256_or_si256
#define vi_add8 _mm256_add_epi8
#define vi_add32 _mm256_add_epi32
#define vi_sub32 _mm256_sub_epi32
#define vi_set8 _mm256_set1_epi8
#define vi_set32 _mm256_set1_epi32
#define vi_equal8 _mm256_cmpeq_epi8
#define vi_unpack32l _mm256_unpacklo_epi32
#define vi_unpack32h _mm256_unpackhi_epi32
#define vi_unpack64l _mm256_unpacklo_epi64
#define vi_unpack64h _mm256_unpackhi_epi64
#define vi_dot2 _mm256_madd_epi16
#define vi_shl32 _mm256_slli_epi32

SIMD_FN vi vi_shr(vi v, int n) {
    switch (n) { SHIFT_CASES(_mm256_srli_epi16) }
}
SIMD_FN vi vi_shl(vi v, int n) {
    switch (n) { SHIFT_CASES(_mm256_slli_epi16) }
}

SIMD_FN vi vi_lanes(rowset rows, size_t off, int j) {
    __m128i low = _mm_loadu_si128((const void *)(rows.p + off + (size_t)j * rows.stride));
    __m128i high = _mm_loadu_si128((const void *)(rows.p + off + (size_t)(j + 4) * rows.stride));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
}
SIMD_FN vi vi_bcast(const void *p) { return vi_set32(load4(p)); }
SIMD_FN vi vi_gather(rowset rows, size_t off) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(gather4(rows.p + off, rows.stride)),
                                   gather4(rows.p + off + 4 * rows.stride, rows.stride), 1);
}
/* The low 16 bits of every lane, converted from fp16 to float. */
SIMD_FN vf half_of(vi v) {
    v = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(v));
}
SIMD_FN vf vf_half_low(vi v) { return half_of(_mm256_and_si256(v, _mm256_set1_epi32(0xFFFF))); }
SIMD_FN vf vf_half_high(vi v) { return half_of(_mm256_srli_epi32(v, 16)); }

/* Byte c of every lane, copied to all four of its bytes. */
SIMD_FN vi vi_spread_byte(vi v, int c) {
    vi base = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    return _mm256_shuffle_epi8(v, _mm256_add_epi8(base, _mm256_set1_epi8((char)c)));
}

/* The number of calls of vi_mac after which 16-bit sums are still exact: a call adds two products
 * to each sum, and a product with a b-bit weight is at most (2^b − 1)·127. */
#define MAC_LIMIT(bits) ((bits) == 4 ? 8 : (bits) == 5 ? 4 : 2)
SIMD_FN vi vi_mac(vi p, vi w, vi x) { return _mm256_add_epi16(p, _mm256_maddubs_epi16(w, x)); }
SIMD_FN vi vi_widen_add(vi isum, vi p) {
    return _mm256_add_epi32(isum, _mm256_madd_epi16(p, _mm256_set1_epi16(1)));
}
SIMD_FN vi vi_scaled(vi isum, vi p, vi s) {
    return _mm256_add_epi32(isum, _mm256_madd_epi16(p, s));
}

/* Widens bytes a and b of every lane to two int16. */
SIMD_FN vi bytes_to_pair(vi v, int a, int b, bool is_signed) {
    /* the byte goes to the high half of the int16 and is shifted down, with or without the sign */
    vi at = _mm256_set1_epi32((int)(0x00800080u | (unsigned)a << 8 | (unsigned)b << 24));
    vi lane = _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x04000400, 0x08000800, 0x0C000C00));
    v = _mm256_shuffle_epi8(v, _mm256_add_epi8(at, lane));
    return is_signed ? _mm256_srai_epi16(v, 8) : _mm256_srli_epi16(v, 8);
}
SIMD_FN vi vi_scale(vi v, int j, bool is_signed) { return bytes_to_pair(v, j, j, is_signed); }
SIMD_FN vi vi_pair(vi v, int j, bool is_signed) {
    return bytes_to_pair(v, 2 * j, 2 * j + 1, is_signed);
}

/* Signed weights: |w| is multiplied by x · sign(w). 2·128·127 still fits 16 bits. */
enum { Q8_OFFSET = 0 };
SIMD_FN vi vi_mac_q8(vi isum, vi w, vi x) {
    vi p = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return vi_widen_add(isum, p);
}

/* Packed weights: a column is half a row group. */
#define N_REGISTERS 16
#define vi_load(p) _mm256_loadu_si256((const void *)(p))
#define vi_xor _mm256_xor_si256
#define vi_pairs_u(p) _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(p)))
#define vi_pairs_s(p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(p)))
#define vf_halves(p) _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p)))
#define vi_pmul _mm256_maddubs_epi16
#if HAS_VNNI
/* A lane of p is one sum, which fits the low half of the lane. vi_pscaled multiplies the high half
 * by zero. */
#define vi_pmac _mm256_dpbusd_avx_epi32
#define vi_pscaled _mm256_dpwssd_avx_epi32
#define vi_dot2_add _mm256_dpwssd_avx_epi32
#define vi_scale_even(v) _mm256_and_si256(v, _mm256_set1_epi32(0xFFFF))
#define vi_scale_odd(v) _mm256_srli_epi32(v, 16)
#else
/* Inline assembly keeps each product next to its addition: gcc 12 would otherwise compute many
 * products ahead and spill all of them. */
SIMD_FN vi vi_pmac(vi p, vi w, vi x) {
    vi t;
    __asm__("vpmaddubsw %[x], %[w], %[t]\n\tvpaddw %[t], %[p], %[p]"
            : [p] "+x"(p), [t] "=&x"(t)
            : [w] "x"(w), [x] "x"(x));
    return p;
}
#define vi_pscaled vi_scaled
SIMD_FN vi vi_dot2_add(vi a, vi m, vi x) { return _mm256_add_epi32(a, _mm256_madd_epi16(m, x)); }
SIMD_FN vi pick_bytes(vi v, int low, int high) {
    vi at = _mm256_broadcastsi128_si256(
        _mm_add_epi8(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12),
                     _mm_set1_epi16((short)(low | high << 8))));
    return _mm256_shuffle_epi8(v, at);
}
#define vi_scale_even(v) pick_bytes(v, 0, 1)
#define vi_scale_odd(v) pick_bytes(v, 2, 3)
#endif
