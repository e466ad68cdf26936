/* Packed weights to fp16 operands of mma; device.cuh has the formats. */
#ifndef SO_BACKEND_CUDA_DECODE_CUH
#define SO_BACKEND_CUDA_DECODE_CUH

#include "backend/cuda/device.cuh"

SO_DEVICE uint32_t so_bits_of(__half2 h) { return *(uint32_t *)&h; }
SO_DEVICE __half2 so_half2_of(uint32_t u) { return *(__half2 *)&u; }

/* 8 int8 of a lane times a scale, plus an offset. */
template <bool OFFSET>
SO_DEVICE void so_decode_q8(uint32_t *v, uint32_t w0, uint32_t w1, __half2 d, __half2 m) {
    const __half2 bias = so_half2_of(0x64806480u); /* 1152 = 1024 + 128 */
    for (int i = 0; i < 4; i++) {
        uint32_t u = (i < 2 ? w0 : w1) ^ 0x80808080u;
        __half2 x =
            __hsub2(so_half2_of(__byte_perm(u, 0x64646464u, i % 2 ? 0x4342 : 0x4140)), bias);
        v[i] = so_bits_of(OFFSET ? __hfma2(x, d, m) : __hmul2_rn(x, d));
    }
}

/* 8 unsigned 4-bit numbers: k 2j and 2j+1 at bits 4 j and 16 + 4 j. */
SO_DEVICE void so_decode_q4(uint32_t *v, uint32_t w, __half2 d, __half2 m) {
    const __half2 bias = so_half2_of(0x64006400u); /* 1024 */
    for (int j = 0; j < 4; j++) {
        uint32_t u = (w >> 4 * j & 0x000f000fu) | 0x64006400u;
        v[j] = so_bits_of(__hfma2(__hsub2(so_half2_of(u), bias), d, m));
    }
}

/* The lane's 16 numbers of one unit of a tile, from shared memory: v[0 … 3] of the first half, v[4 … 7] of
 * the second. PART 1: the low parts of F32. */
template <int FMT, int PART> SO_DEVICE void so_decode(uint32_t *v, const char *unit, int lane) {
    int g = lane / 4, t = lane % 4;
    const char *scales = unit + so_fmt_numbers(FMT);
    if (FMT == SO_FMT_F16 || FMT == SO_FMT_F32) {
        *(uint4 *)v = ((const uint4 *)unit)[lane + PART * 64];
        *(uint4 *)(v + 4) = ((const uint4 *)unit)[lane + 32 + PART * 64];
        return;
    }
    uint32_t raw[4];
    if (FMT == SO_FMT_Q4_32_OFF)
        *(uint2 *)raw = ((const uint2 *)unit)[lane];
    else
        *(uint4 *)raw = ((const uint4 *)unit)[lane];
    for (int h = 0; h < 2; h++) {
        if (FMT == SO_FMT_Q8_32 || FMT == SO_FMT_Q8_16) {
            int group = FMT == SO_FMT_Q8_16 ? 2 * h + t / 2 : h;
            __half2 d = __half2half2(((const __half *)scales)[group * SO_TILE + g]);
            so_decode_q8<false>(v + 4 * h, raw[2 * h], raw[2 * h + 1], d, d);
        } else {
            __half2 s = ((const __half2 *)scales)[h * SO_TILE + g];
            __half2 d = __low2half2(s), m = __high2half2(s);
            if (FMT == SO_FMT_Q4_32_OFF)
                so_decode_q4(v + 4 * h, raw[h], d, m);
            else
                so_decode_q8<true>(v + 4 * h, raw[2 * h], raw[2 * h + 1], d, m);
        }
    }
}

#endif
