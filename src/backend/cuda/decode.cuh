/* Packed weights to fp16 operands of mma; device.cuh has the formats. */
#ifndef SO_BACKEND_CUDA_DECODE_CUH
#define SO_BACKEND_CUDA_DECODE_CUH

#include "backend/cuda/device.cuh"

SO_DEVICE uint32_t so_bits_of(__half2 h) { return *(uint32_t *)&h; }
SO_DEVICE __half2 so_half2_of(uint32_t u) { return *(__half2 *)&u; }

/* Four unsigned bytes times a scale, plus an offset. */
SO_DEVICE void so_decode_q8(uint32_t *v, uint32_t w, __half2 d, __half2 m) {
    v[0] = so_bits_of(__hfma2(so_half2_of(__byte_perm(w, 0, 0x4140)), d, m));
    v[1] = so_bits_of(__hfma2(so_half2_of(__byte_perm(w, 0, 0x4342)), d, m));
}

/* 8 unsigned 4-bit numbers: k 2j and 2j+1 at bits 4 j and 16 + 4 j. Those at odd j are 16 times as large
 * when they are taken where they are, which a smaller scale makes up for. */
SO_DEVICE void so_decode_q4(uint32_t *v, uint32_t w, __half2 d, __half2 m) {
    __half2 d16 = __hmul2_rn(d, so_half2_of(0x2c002c00u)); /* 1/16 */
    for (int j = 0; j < 4; j += 2) {
        uint32_t u = w >> 4 * j;
        v[j] = so_bits_of(__hfma2(so_half2_of(u & 0x000f000fu), d, m));
        v[j + 1] = so_bits_of(__hfma2(so_half2_of(u & 0x00f000f0u), d16, m));
    }
}

/* The offset of a format without offsets: -128 scales. */
SO_DEVICE __half2 so_zero_offset(__half2 d) {
    return __hmul2_rn(d, so_half2_of(0x80808080u)); /* -2^-17, a subnormal */
}

/* The lane's 16 numbers of one unit of a tile, from shared memory: v[0 … 3] of the first half, v[4 … 7] of
 * the second. PART 1: the low parts of F32. */
template <int FMT, int PART> SO_DEVICE void so_decode(uint32_t *v, const char *unit, int lane) {
    const char *scales = unit + so_fmt_numbers(FMT);
    if (FMT == SO_FMT_F16 || FMT == SO_FMT_F32) {
        *(uint4 *)v = ((const uint4 *)unit)[lane + PART * 64];
        *(uint4 *)(v + 4) = ((const uint4 *)unit)[lane + 32 + PART * 64];
        return;
    }
    uint32_t raw[4], s[2]; /* s: what half h needs */
    if (FMT == SO_FMT_Q4_32_OFF)
        *(uint2 *)raw = ((const uint2 *)unit)[lane];
    else
        *(uint4 *)raw = ((const uint4 *)unit)[lane];
    if (FMT == SO_FMT_Q8_32)
        s[0] = s[1] = ((const uint32_t *)scales)[lane / 4];
    else
        *(uint2 *)s = ((const uint2 *)scales)[lane / 4];
    for (int h = 0; h < 2; h++) {
        /* scale and offset, or the scales of two groups */
        __half2 p = so_half2_of(s[h]), d = __low2half2(p), m = __high2half2(p);
        if (FMT == SO_FMT_Q8_32 && h == 1)
            d = m;
        if (FMT == SO_FMT_Q8_16)
            d = so_half2_of(__byte_perm(s[h], 0, lane & 2 ? 0x3232 : 0x1010));
        if (FMT == SO_FMT_Q8_32 || FMT == SO_FMT_Q8_16)
            m = so_zero_offset(d);
        if (FMT == SO_FMT_Q4_32_OFF) {
            so_decode_q4(v + 4 * h, raw[h], d, m);
        } else {
            so_decode_q8(v + 4 * h, raw[2 * h], d, m);
            so_decode_q8(v + 4 * h + 2, raw[2 * h + 1], d, m);
        }
    }
}

#endif
