/* SIMD helpers common to all x86 levels: how their functions are declared, and loads of four bytes
 * from one row or from each of four rows. */
#ifndef SO_BACKEND_CPU_SIMD_X86_H
#define SO_BACKEND_CPU_SIMD_X86_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define SIMD_FN static inline __attribute__((always_inline))

SIMD_FN int32_t load4(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}
SIMD_FN __m128i gather4(const uint8_t *p, size_t stride) {
    return _mm_setr_epi32(load4(p), load4(p + stride), load4(p + 2 * stride),
                          load4(p + 3 * stride));
}

#endif
