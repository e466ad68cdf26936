/* The packed layout of quantised weights: one per dtype, the same for every CPU level.
 *
 * Sixteen rows form a row group. A word is 64 bytes: four consecutive bytes from the same place of
 * the block of each row, one row per 32 bits:
 *
 *      row 0   row 1   …   row 15
 *     abcd     abcd        abcd
 *
 * Two row groups form a tile. Its groups are interleaved block by block, so that a thread reads its
 * rows as one ascending stream, from the first block of its first tile to the last block of its
 * last. Processors prefetch such a stream best (docs/performance.md):
 *
 *   tile    block 0, block 1, … of all 32 rows; the next tile follows without a gap
 *   block   head of group 0, head of group 1, words of group 0, words of group 1. The two heads
 *           together fill whole cache lines. A tile with one group has padding after its head where
 *           that is needed, so that no word crosses a cache line
 *   head    arrays of 32 bytes, two bytes per row: fp16 d[16]; fp16 m[16] if the type has minima;
 *           for K types then eight arrays, each with the scales of two sub-blocks, one byte per
 *           scale (Q4_K, Q5_K: four arrays of scales, then four of minima; Q2_K: scale in the low
 *           nibble, minimum in the high one; Q3_K: minus 32, signed; Q6_K: signed)
 *   words   in the order in which they are decoded: for each type the number of words and the field
 *           of the file's block (format/blocks.h) that they hold:
 *           Q4_0 Q4_1   4  qs: word c has elements 4c … 4c+3 in the low nibbles and
 *                          4c+16 … 4c+19 in the high ones
 *           Q5_0 Q5_1   4  the same, then one word of fifth bits: bit c of byte b belongs to
 *                          element 4c + b
 *           Q8_0        8  qs with the top bit inverted: unsigned, 128 too large
 *           Q2_K       16  qs
 *           Q3_K        8  hmask, then 16 of qs
 *           Q4_K       32  qs
 *           Q5_K        8  qh, then 32 of qs
 *           Q6_K        8  qh and 16 of ql for elements 0 … 127, then the same for 128 … 255
 *
 * The last tile of a matrix has one group if at most 16 rows are left. A group of fewer than 16 rows
 * is padded with zeros. Packing is lossless: so_pack_block restores the file's block bit by bit.
 * Size: that of the file, plus 4 bytes per block of Q3_K, Q4_K and Q5_K, whose 6-bit scales become
 * bytes. Every CPU level finds heads and words with the functions of this header. Pure functions;
 * any thread. */
#ifndef SO_BACKEND_CPU_PACK_H
#define SO_BACKEND_CPU_PACK_H

#include "format/blocks.h"
#include "format/dtype.h"

enum { SO_PACK_ROWS = 16, SO_PACK_TILE = 32, SO_PACK_WORD = 64 };

/* Bytes of the head, and of the words, of one block of one row group. Compile-time constants if
 * t is one. */
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

/* Row groups of the tile that begins at row `first` of n_rows. */
static inline int so_pack_groups(long n_rows, long first) {
    return n_rows - first > SO_PACK_ROWS ? 2 : 1;
}

/* Bytes of the heads of a block with their padding, and of the whole block, in a tile of `groups`
 * row groups. */
static inline size_t so_pack_heads_bytes(so_dtype t, int groups) {
    return (so_pack_head(t) * (size_t)groups + 63) / 64 * 64;
}
static inline size_t so_pack_block_bytes(so_dtype t, int groups) {
    return so_pack_heads_bytes(t, groups) + so_pack_words(t) * (size_t)groups;
}

/* Offsets in a block, for row `row` of the tile: of the row's d, and of its part of the first word.
 * The row's other fields follow 32 bytes apart in the head, and 64 bytes apart in the words. */
static inline size_t so_pack_head_at(so_dtype t, int row) {
    return (size_t)(row / SO_PACK_ROWS) * so_pack_head(t) + 2 * (size_t)(row % SO_PACK_ROWS);
}
static inline size_t so_pack_words_at(so_dtype t, int groups, int row) {
    return so_pack_heads_bytes(t, groups) + (size_t)(row / SO_PACK_ROWS) * so_pack_words(t) +
           4 * (size_t)(row % SO_PACK_ROWS);
}

/* K types: index of the first of the eight words with the low bits of elements 32s … 32s+31, and of
 * the eight with their high bits (Q3_K, Q5_K, Q6_K). */
static inline int so_pack_low_word(so_dtype t, int s) {
    switch (t) {
    case SO_DTYPE_Q2_K:
        return s / 4 * 8;
    case SO_DTYPE_Q3_K:
        return 8 + s / 4 * 8;
    case SO_DTYPE_Q4_K:
        return s / 2 * 8;
    case SO_DTYPE_Q5_K:
        return 8 + s / 2 * 8;
    default: /* Q6_K */
        return s / 4 * 24 + 8 + s % 2 * 8;
    }
}
static inline int so_pack_high_word(so_dtype t, int s) {
    return t == SO_DTYPE_Q6_K ? s / 4 * 24 : 0;
}

/* Bytes of a tile of 32 rows of n_cols elements; 0 for types that are not packed. */
size_t so_pack_tile_bytes(so_dtype t, int n_cols);
/* Bytes of a matrix; false if they exceed SIZE_MAX or the type is not packed. */
bool so_pack_bytes(so_dtype t, int n_cols, long n_rows, size_t *out);

/* Packs n_rows (1 to 32) rows, which are row_bytes apart. */
void so_pack_tile(so_dtype t, const uint8_t *rows, size_t row_bytes, int n_rows, int n_cols,
                  uint8_t *tile);

/* Restores block `block` of row `row` of a tile of `groups` row groups, as in the file, into
 * out[block_bytes]. */
void so_pack_block(so_dtype t, const uint8_t *tile, int groups, int row, int block, uint8_t *out);

#endif
