/* What the words of all x86 levels begin with: four bytes of a row, and those of four rows as
 * lanes. */
#ifndef SO_BACKEND_CPU_LANES_X86_H
#define SO_BACKEND_CPU_LANES_X86_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define WORD static inline __attribute__((always_inline))

WORD int32_t load4(const uint8_t *p) {
    int32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}
WORD __m128i gather4(const uint8_t *p, size_t stride) {
    return _mm_setr_epi32(load4(p), load4(p + stride), load4(p + 2 * stride),
                          load4(p + 3 * stride));
}

#endif
