/* The packed layout of quantised weights: one per dtype, the same for every CPU level.
 *
 * Sixteen rows form a row group. Packing only reorders the bytes of the file's blocks within a
 * group: one 64-byte word holds four consecutive bytes of each row, one row per 32 bits:
 *
 *      row 0   row 1   …   row 15
 *     abcd     abcd        abcd
 *
 * A group starts with the heads of its blocks (scales and minima), one after the other and padded
 * to 64 bytes as a whole. The words of its blocks follow:
 *
 *   head    fp16 d[16]; if the type has a minimum, fp16 m[16]; for K types then the sub-block
 *           scales as bytes, [8 pairs][16 rows][2], in the order 0 … 15 (Q4_K, Q5_K: 8 scales, then
 *           8 minima; Q2_K: scale in the low, minimum in the high nibble; Q3_K: minus 32, signed)
 *   words   Q4_0 Q4_1   4  nibbles, as in the file: low ones elements 4c … 4c+3, high ones +16
 *           Q5_0 Q5_1   4  nibbles, then one word of fifth bits: bit c of byte b is element 4c + b
 *           Q8_0        8  bytes with the top bit inverted: unsigned, 128 too large
 *           Q2_K       16  qs
 *           Q3_K       16  qs, then 8 of hmask
 *           Q4_K       32  qs
 *           Q5_K       32  qs, then 8 of qh
 *           Q6_K       32  ql, then 16 of qh
 *
 * A last group of fewer rows is padded with zeros. Packing is lossless: so_pack_block restores the
 * file's block bit by bit. Size: that of the file, plus 4 bytes per block of Q3_K, Q4_K and Q5_K,
 * whose packed scales are expanded to bytes. Pure functions; any thread. */
#ifndef SO_BACKEND_CPU_PACK_H
#define SO_BACKEND_CPU_PACK_H

#include "format/blocks.h"
#include "format/dtype.h"

enum { SO_PACK_ROWS = 16, SO_PACK_WORD = 64 };

/* Bytes of one block's head, and of its words, in a group. Compile-time constants if dtype is
 * one. */
static inline size_t so_pack_head(so_dtype t) {
    switch (t) {
    case SO_DTYPE_Q4_0:
    case SO_DTYPE_Q5_0:
    case SO_DTYPE_Q8_0:
        return 32;
    case SO_DTYPE_Q4_1:
    case SO_DTYPE_Q5_1:
        return 64;
    case SO_DTYPE_Q3_K:
    case SO_DTYPE_Q6_K:
        return 32 + 256;
    case SO_DTYPE_Q2_K:
    case SO_DTYPE_Q4_K:
    case SO_DTYPE_Q5_K:
        return 64 + 256;
    default:
        return 0; /* float types are not packed */
    }
}

static inline size_t so_pack_words(so_dtype t) {
    switch (t) {
    case SO_DTYPE_Q4_0:
    case SO_DTYPE_Q4_1:
        return 4 * SO_PACK_WORD;
    case SO_DTYPE_Q5_0:
    case SO_DTYPE_Q5_1:
        return 5 * SO_PACK_WORD;
    case SO_DTYPE_Q8_0:
        return 8 * SO_PACK_WORD;
    case SO_DTYPE_Q2_K:
        return 16 * SO_PACK_WORD;
    case SO_DTYPE_Q3_K:
        return 24 * SO_PACK_WORD;
    case SO_DTYPE_Q4_K:
        return 32 * SO_PACK_WORD;
    case SO_DTYPE_Q5_K:
        return 40 * SO_PACK_WORD;
    case SO_DTYPE_Q6_K:
        return 48 * SO_PACK_WORD;
    default:
        return 0;
    }
}

/* Offset of the words in a group of n_blocks blocks per row. */
static inline size_t so_pack_words_at(so_dtype t, size_t n_blocks) {
    return (so_pack_head(t) * n_blocks + 63) / 64 * 64;
}

/* Bytes of one group of rows of n_cols elements; 0 for types that are not packed. */
size_t so_pack_group_bytes(so_dtype t, int n_cols);

/* Packs n_rows (1 to 16) rows, which are row_bytes apart. */
void so_pack_group(so_dtype t, const uint8_t *rows, size_t row_bytes, int n_rows, int n_cols,
                   uint8_t *group);

/* Restores block `block` of row `row` of a group, as in the file, into out[block_bytes]. */
void so_pack_block(so_dtype t, const uint8_t *group, int n_cols, int row, int block, uint8_t *out);

#endif
