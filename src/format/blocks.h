/* Layouts of the quantised blocks in GGUF files. This is their only definition, for C and CUDA.
 *
 * A block encodes 32 consecutive elements of a row (SO_QK) or 256 (SO_QK_K). Multi-byte fields are
 * little-endian; d, m and dmin are the bits of fp16 numbers. Blocks may be unaligned in a file, so
 * readers copy a block out before they read its 16-bit fields. docs/formats.md draws every bit;
 * so_dequantize_row is the reference implementation.
 *
 *   Q4_0  x = d·(q − 8)            q 4 bits: low nibbles are elements 0…15, high nibbles 16…31
 *   Q4_1  x = d·q + m
 *   Q5_0  x = d·(q − 16)           fifth bits in qh, bit i for element i
 *   Q5_1  x = d·q + m
 *   Q8_0  x = d·q
 *   Q2_K  x = d·s·q − dmin·m       16 sub-blocks of 16; s and m 4 bits each in one byte
 *   Q3_K  x = d·(s − 32)·(q − 4)   16 sub-blocks of 16; s 6 bits; q's third bit in hmask
 *   Q4_K  x = d·s·q − dmin·m       8 sub-blocks of 32; s and m 6 bits, unpacked by so_scale_min_k4
 *   Q5_K  as Q4_K, fifth bits in qh
 *   Q6_K  x = d·s·(q − 32)         16 sub-blocks of 16; s int8; q's high two bits in qh */
#ifndef SO_FORMAT_BLOCKS_H
#define SO_FORMAT_BLOCKS_H

#include <stdint.h>

enum { SO_QK = 32, SO_QK_K = 256 };

typedef struct so_block_q4_0 {
    uint16_t d;
    uint8_t qs[16];
} so_block_q4_0;

typedef struct so_block_q4_1 {
    uint16_t d, m;
    uint8_t qs[16];
} so_block_q4_1;

typedef struct so_block_q5_0 {
    uint16_t d;
    uint8_t qh[4], qs[16];
} so_block_q5_0;

typedef struct so_block_q5_1 {
    uint16_t d, m;
    uint8_t qh[4], qs[16];
} so_block_q5_1;

typedef struct so_block_q8_0 {
    uint16_t d;
    int8_t qs[32];
} so_block_q8_0;

typedef struct so_block_q2_k {
    uint8_t scales[16]; /* low nibble s, high nibble m */
    uint8_t qs[64];
    uint16_t d, dmin;
} so_block_q2_k;

typedef struct so_block_q3_k {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12]; /* 16 values of 6 bits */
    uint16_t d;
} so_block_q3_k;

typedef struct so_block_q4_k {
    uint16_t d, dmin;
    uint8_t scales[12]; /* 8 pairs of 6 bits */
    uint8_t qs[128];
} so_block_q4_k;

typedef struct so_block_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
} so_block_q5_k;

typedef struct so_block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
} so_block_q6_k;

#ifdef __cplusplus
#define SO_BLOCK_SIZE(type, n) static_assert(sizeof(type) == (n), #type " has padding")
#else
#define SO_BLOCK_SIZE(type, n) _Static_assert(sizeof(type) == (n), #type " has padding")
#endif
SO_BLOCK_SIZE(so_block_q4_0, 18);
SO_BLOCK_SIZE(so_block_q4_1, 20);
SO_BLOCK_SIZE(so_block_q5_0, 22);
SO_BLOCK_SIZE(so_block_q5_1, 24);
SO_BLOCK_SIZE(so_block_q8_0, 34);
SO_BLOCK_SIZE(so_block_q2_k, 84);
SO_BLOCK_SIZE(so_block_q3_k, 110);
SO_BLOCK_SIZE(so_block_q4_k, 144);
SO_BLOCK_SIZE(so_block_q5_k, 176);
SO_BLOCK_SIZE(so_block_q6_k, 210);

/* The 12 scale bytes of Q4_K and Q5_K hold 8 pairs (s, m) of six bits each:
 *   bytes 0…3   s0…s3 in bits 0…5, the top two bits of s4…s7 in bits 6 and 7
 *   bytes 4…7   the same for m
 *   bytes 8…11  the low four bits of s4…s7 (low nibble) and of m4…m7 (high nibble) */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline void
    so_scale_min_k4(const uint8_t *packed, int j, int *s, int *m) {
    if (j < 4) {
        *s = packed[j] & 63;
        *m = packed[j + 4] & 63;
    } else {
        *s = (packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4;
        *m = packed[j + 4] >> 4 | (packed[j] >> 6) << 4;
    }
}

/* The 12 scale bytes of Q3_K hold 16 six-bit values, offset by 32: the low four bits of s0…s7 are
 * the low nibbles of bytes 0…7 and those of s8…s15 the high nibbles; bits 2·(j/4) and 2·(j/4)+1 of
 * byte 8 + j%4 are the top two bits of s_j. */
#ifdef __CUDACC__
__host__ __device__
#endif
    static inline int
    so_scale_k3(const uint8_t *packed, int j) {
    int low = j < 8 ? packed[j] & 15 : packed[j - 8] >> 4;
    int high = packed[8 + j % 4] >> (2 * (j / 4)) & 3;
    return low | high << 4;
}

#endif
