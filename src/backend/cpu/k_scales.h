/* The scales of a K block in one form for all five types and all levels: exact small integers.
 *
 *   types with minima (Q2_K Q4_K Q5_K)   element = d·s·q − dmin·m
 *   the others (Q3_K Q6_K)               element = d·s·(q − offset); m holds offset·s, so that
 *                                        Σ s·(q − offset)·x = Σ s·q·x − Σ m·Σx
 *
 * Q4_K and Q5_K have 8 sub-blocks of 32 and fill 8 entries, the others 16 of 16. Block bytes may
 * lie anywhere: everything is copied out first. */
#ifndef SO_BACKEND_CPU_K_SCALES_H
#define SO_BACKEND_CPU_K_SCALES_H

#include <string.h>

#include "base/half.h"
#include "format/blocks.h"

typedef struct so_k_scales {
    int16_t s[16], m[16];
    float d, dmin;
} so_k_scales;

static inline float so_k_half(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return so_f16_to_f32(h);
}

static inline void so_k_scales_q2_k(const uint8_t *block, so_k_scales *k) {
    const uint8_t *scales = block + offsetof(so_block_q2_k, scales);
    for (int j = 0; j < 16; j++) {
        k->s[j] = scales[j] & 15;
        k->m[j] = scales[j] >> 4;
    }
    k->d = so_k_half(block + offsetof(so_block_q2_k, d));
    k->dmin = so_k_half(block + offsetof(so_block_q2_k, dmin));
}

static inline void so_k_scales_q3_k(const uint8_t *block, so_k_scales *k) {
    for (int j = 0; j < 16; j++) {
        k->s[j] = (int16_t)(so_scale_k3(block + offsetof(so_block_q3_k, scales), j) - 32);
        k->m[j] = (int16_t)(4 * k->s[j]);
    }
    k->d = so_k_half(block + offsetof(so_block_q3_k, d));
    k->dmin = 0;
}

/* Q4_K and Q5_K begin alike. */
static inline void so_k_scales_q4_k(const uint8_t *block, so_k_scales *k) {
    for (int j = 0; j < 8; j++) {
        int s, m;
        so_scale_min_k4(block + offsetof(so_block_q4_k, scales), j, &s, &m);
        k->s[j] = (int16_t)s;
        k->m[j] = (int16_t)m;
    }
    k->d = so_k_half(block + offsetof(so_block_q4_k, d));
    k->dmin = so_k_half(block + offsetof(so_block_q4_k, dmin));
}

static inline void so_k_scales_q6_k(const uint8_t *block, so_k_scales *k) {
    const int8_t *scales = (const int8_t *)block + offsetof(so_block_q6_k, scales);
    for (int j = 0; j < 16; j++) {
        k->s[j] = scales[j];
        k->m[j] = (int16_t)(32 * scales[j]);
    }
    k->d = so_k_half(block + offsetof(so_block_q6_k, d));
    k->dmin = 0;
}

#endif
