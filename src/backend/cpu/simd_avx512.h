/* The SIMD operations that rows_x86.h, matmul_x86.h and packed_x86.h are written in, for 512-bit
 * registers: AVX-512 (F, BW, VL, DQ) with VNNI. The headers that use an operation define its
 * meaning. Included by kernels_avx512.c, and by matmul_amx.c for these operations alone. */
#include "backend/cpu/kernels.h"
#include "backend/cpu/shifts_x86.h"
#include "backend/cpu/simd_x86.h"

#include <immintrin.h>
#include <string.h>

/* ---- sixteen floats ---- */

typedef __m512 v16;

#define v_add _mm512_add_ps
#define v_sub _mm512_sub_ps
#define v_mul _mm512_mul_ps
#define v_div _mm512_div_ps
#define v_min _mm512_min_ps
#define v_max _mm512_max_ps
#define v_fma _mm512_fmadd_ps
#define v_fnma _mm512_fnmadd_ps
#define v_set1 _mm512_set1_ps
#define v_load _mm512_loadu_ps
#define v_store _mm512_storeu_ps
#define v_low8 _mm512_castps512_ps256

SIMD_FN __m256 v_high8(v16 v) { return _mm512_extractf32x8_ps(v, 1); }
SIMD_FN __mmask16 below(int n) { return (__mmask16)((1u << n) - 1); }
SIMD_FN v16 v_load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(below(n), p); }
SIMD_FN void v_store_n(float *p, v16 v, int n) { _mm512_mask_storeu_ps(p, below(n), v); }
SIMD_FN v16 v_select_n(int n, v16 a, v16 b) { return _mm512_mask_mov_ps(b, below(n), a); }
SIMD_FN v16 v_keep_above(v16 x, v16 limit, v16 a) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLE_UQ), a);
}
SIMD_FN v16 f16_to_v16(__m256i h) { return _mm512_cvtph_ps(h); }
SIMD_FN v16 bf16_to_v16(__m256i h) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
SIMD_FN v16 v_load_f16(const uint16_t *p) {
    return f16_to_v16(_mm256_loadu_si256((const void *)p));
}
SIMD_FN v16 v_load_bf16(const uint16_t *p) {
    return bf16_to_v16(_mm256_loadu_si256((const void *)p));
}
SIMD_FN v16 v_load_f16_n(const uint16_t *p, int n) {
    return f16_to_v16(_mm256_maskz_loadu_epi16(below(n), p));
}
SIMD_FN v16 v_load_bf16_n(const uint16_t *p, int n) {
    return bf16_to_v16(_mm256_maskz_loadu_epi16(below(n), p));
}
SIMD_FN v16 v_load_i8(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}

/* Rounds once. So do the other levels: the first of their two multiplications is exact. */
SIMD_FN v16 v_times_pow2(v16 p, v16 t) {
    return _mm512_scalef_ps(p, _mm512_sub_ps(t, _mm512_set1_ps(SO_EXP_MAGIC)));
}

/* ---- sixteen rows of integers ---- */

enum { LANES = 16, FLOAT_NR = 4, FLOAT_NX = 4 };
enum { ATTN_SQ = 12, ATTN_BQ = 8, ATTN_NQ = 6, ATTN_NV = 4 };
typedef __m512i vi;
typedef __m512 vf;

/* LANES rows, `stride` bytes apart. */
typedef struct rowset {
    const uint8_t *p;
    size_t stride;
} rowset;

#define vf_add _mm512_add_ps
#define vf_mul _mm512_mul_ps
#define vf_fma _mm512_fmadd_ps
#define vf_fnma _mm512_fnmadd_ps
#define vf_set1 _mm512_set1_ps
#define vf_load _mm512_loadu_ps
#define vf_store _mm512_storeu_ps
#define vf_from_int _mm512_cvtepi32_ps
#define vi_and _mm512_and_si512
#define vi_or _mm512_or_si512
#define vi_add8 _mm512_add_epi8
#define vi_add32 _mm512_add_epi32
#define vi_sub32 _mm512_sub_epi32
#define vi_set8 _mm512_set1_epi8
#define vi_set32 _mm512_set1_epi32
#define vi_unpack32l _mm512_unpacklo_epi32
#define vi_unpack32h _mm512_unpackhi_epi32
#define vi_unpack64l _mm512_unpacklo_epi64
#define vi_unpack64h _mm512_unpackhi_epi64
#define vi_dot2 _mm512_madd_epi16
#define vi_shl32 _mm512_slli_epi32

SIMD_FN vi vi_equal8(vi a, vi b) { return _mm512_movm_epi8(_mm512_cmpeq_epi8_mask(a, b)); }
SIMD_FN vi vi_shr(vi v, int n) {
    switch (n) { SHIFT_CASES(_mm512_srli_epi16) }
}
SIMD_FN vi vi_shl(vi v, int n) {
    switch (n) { SHIFT_CASES(_mm512_slli_epi16) }
}

SIMD_FN vi vi_lanes(rowset rows, size_t off, int j) {
    vi v = _mm512_castsi128_si512(
        _mm_loadu_si128((const void *)(rows.p + off + (size_t)j * rows.stride)));
    v = _mm512_inserti32x4(
        v, _mm_loadu_si128((const void *)(rows.p + off + (size_t)(j + 4) * rows.stride)), 1);
    v = _mm512_inserti32x4(
        v, _mm_loadu_si128((const void *)(rows.p + off + (size_t)(j + 8) * rows.stride)), 2);
    return _mm512_inserti32x4(
        v, _mm_loadu_si128((const void *)(rows.p + off + (size_t)(j + 12) * rows.stride)), 3);
}
SIMD_FN vi vi_bcast(const void *p) { return vi_set32(load4(p)); }
SIMD_FN vi vi_gather(rowset rows, size_t off) {
    vi v = _mm512_castsi128_si512(gather4(rows.p + off, rows.stride));
    v = _mm512_inserti32x4(v, gather4(rows.p + off + 4 * rows.stride, rows.stride), 1);
    v = _mm512_inserti32x4(v, gather4(rows.p + off + 8 * rows.stride, rows.stride), 2);
    return _mm512_inserti32x4(v, gather4(rows.p + off + 12 * rows.stride, rows.stride), 3);
}
SIMD_FN vf vf_half_low(vi v) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v)); }
SIMD_FN vf vf_half_high(vi v) { return vf_half_low(_mm512_srli_epi32(v, 16)); }

/* Byte c of every lane, copied to all four of its bytes. */
SIMD_FN vi vi_spread_byte(vi v, int c) {
    vi base =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
    return _mm512_shuffle_epi8(v, _mm512_add_epi8(base, _mm512_set1_epi8((char)c)));
}

/* Sums have 32 bits. There is no limit; 8 is the largest number of vectors in a sub-block. */
#define MAC_LIMIT(bits) ((void)(bits), 8)
#define vi_mac _mm512_dpbusd_epi32
#define vi_widen_add _mm512_add_epi32
SIMD_FN vi vi_scaled(vi isum, vi p, vi s) {
    return _mm512_add_epi32(isum, _mm512_mullo_epi32(p, s));
}

/* vi_scale widens byte j of every lane to int32; vi_pair widens bytes 2j and 2j + 1 to two
 * int16. */
SIMD_FN vi vi_scale(vi v, int j, bool is_signed) {
    v = _mm512_sll_epi32(v, _mm_cvtsi32_si128(24 - 8 * j));
    return is_signed ? _mm512_srai_epi32(v, 24) : _mm512_srli_epi32(v, 24);
}
SIMD_FN vi vi_pair(vi v, int j, bool is_signed) {
    vi at = _mm512_set1_epi32(
        (int)(0x00800080u | (unsigned)(2 * j) << 8 | (unsigned)(2 * j + 1) << 24));
    vi lane = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 0x04000400, 0x08000800, 0x0C000C00));
    v = _mm512_shuffle_epi8(v, _mm512_add_epi8(at, lane));
    return is_signed ? _mm512_srai_epi16(v, 8) : _mm512_srli_epi16(v, 8);
}

/* Signed weights become unsigned by an offset, which is subtracted from the block's sum. */
enum { Q8_OFFSET = 128 };
#define vi_mac_q8 vi_mac

/* Packed weights: a column is a row group. vi_pscaled uses the low half of a lane of p, in which
 * the sum fits; the high half is multiplied by zero. */
#define HAS_VNNI 1
#define N_REGISTERS 32
#define vi_load(p) _mm512_loadu_si512((const void *)(p))
#define vi_xor _mm512_xor_si512
#define vi_pmac _mm512_dpbusd_epi32
#define vi_pmul(w, x) _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x)
#define vi_pscaled _mm512_dpwssd_epi32
#define vi_dot2_add _mm512_dpwssd_epi32
#define vi_pairs_u(p) _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(p)))
#define vi_pairs_s(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const void *)(p)))
#define vi_scale_even(v) _mm512_and_si512(v, _mm512_set1_epi32(0xFFFF))
#define vi_scale_odd(v) _mm512_srli_epi32(v, 16)
#define vf_halves(p) _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p)))
