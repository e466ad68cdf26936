/* 16-bit floats in plain C, IEEE half (F16) and bfloat16, and those of 8 bits (E4M3). Conversions round to nearest even. Those
 * of F16 are bit-identical to the instructions vcvtps2ph and vcvtph2ps, so a kernel may use these
 * functions or the instructions. */
#ifndef SO_BASE_HALF_H
#define SO_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline float so_bits_f32(uint32_t u) {
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline uint32_t so_f32_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float so_f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 0x3FFu;
    if (exp == 31)
        return so_bits_f32(sign | 0x7F800000u | man << 13 | (man ? 0x400000u : 0));
    if (exp == 0) /* zero or subnormal: man · 2^-24 is exact */
        return so_bits_f32(sign | so_f32_bits((float)man * 0x1p-24f));
    return so_bits_f32(sign | (exp + 112) << 23 | man << 13);
}

static inline uint16_t so_f32_to_f16(float f) {
    uint32_t u = so_f32_bits(f), sign = u >> 16 & 0x8000u, a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u) /* NaN, made quiet */
        return (uint16_t)(sign | 0x7E00u | (a >> 13 & 0x3FFu));
    if (a >= 0x477FF000u) /* rounds to more than the largest finite half: infinity */
        return (uint16_t)(sign | 0x7C00u);
    if (a < 0x38800000u) { /* subnormal half: adding 0.5 makes the FPU round at bit 2^-24 */
        float r = so_bits_f32(a) + 0.5f;
        return (uint16_t)(sign | (so_f32_bits(r) - 0x3F000000u));
    }
    uint32_t odd = a >> 13 & 1;
    return (uint16_t)(sign | (a - 0x38000000u + 0xFFFu + odd) >> 13);
}

static inline float so_bf16_to_f32(uint16_t h) { return so_bits_f32((uint32_t)h << 16); }

static inline uint16_t so_f32_to_bf16(float f) {
    uint32_t u = so_f32_bits(f);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7FFFu + (u >> 16 & 1)) >> 16);
}

/* E4M3 without infinities: 4 bits of exponent, bias 7; 3 of mantissa; at most 448; 0x7F is NaN. */
static inline float so_e4m3_to_f32(uint8_t v) {
    uint32_t sign = (uint32_t)(v & 0x80u) << 24, exp = v >> 3 & 15u, man = v & 7u;
    if ((v & 0x7Fu) == 0x7Fu)
        return so_bits_f32(sign | 0x7FC00000u);
    if (exp == 0)
        return so_bits_f32(sign | so_f32_bits((float)man * 0x1p-9f));
    return so_bits_f32(sign | (exp + 120) << 23 | man << 20);
}

#endif
