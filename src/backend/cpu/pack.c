/* Packing and its inverse, as pack.h draws the layouts. Both walk the same table, so that a field
 * is described once. Speed matters a little (a model is packed whenever it is loaded): the inner
 * loops copy 32-bit units. */
#include "backend/cpu/pack.h"

#include <string.h>

#include "base/mem.h"

/* Where the parts of a file's block lie. */
typedef struct layout {
    int half[2], n_halves; /* byte offsets of d and of the minimum */
    int scales;            /* offset of packed sub-block scales; −1: none */
    struct {
        int off, n_units;
    } words[2];    /* runs of 4-byte units */
    int bits;      /* offset of the fifth bits of Q5_0 and Q5_1; −1: none */
    uint32_t flip; /* xored into every unit */
} layout;

#define OFF(type, field) (int)offsetof(so_block_##type, field)

static const layout layouts[SO_DTYPE_COUNT] = {
    [SO_DTYPE_Q4_0] = {{OFF(q4_0, d)}, 1, -1, {{OFF(q4_0, qs), 4}}, -1, 0},
    [SO_DTYPE_Q4_1] = {{OFF(q4_1, d), OFF(q4_1, m)}, 2, -1, {{OFF(q4_1, qs), 4}}, -1, 0},
    [SO_DTYPE_Q5_0] = {{OFF(q5_0, d)}, 1, -1, {{OFF(q5_0, qs), 4}}, OFF(q5_0, qh), 0},
    [SO_DTYPE_Q5_1] = {{OFF(q5_1, d), OFF(q5_1, m)}, 2, -1, {{OFF(q5_1, qs), 4}}, OFF(q5_1, qh), 0},
    [SO_DTYPE_Q8_0] = {{OFF(q8_0, d)}, 1, -1, {{OFF(q8_0, qs), 8}}, -1, 0x80808080u},
    [SO_DTYPE_Q2_K] =
        {{OFF(q2_k, d), OFF(q2_k, dmin)}, 2, OFF(q2_k, scales), {{OFF(q2_k, qs), 16}}, -1, 0},
    [SO_DTYPE_Q3_K] =
        {{OFF(q3_k, d)}, 1, OFF(q3_k, scales), {{OFF(q3_k, qs), 16}, {OFF(q3_k, hmask), 8}}, -1, 0},
    [SO_DTYPE_Q4_K] =
        {{OFF(q4_k, d), OFF(q4_k, dmin)}, 2, OFF(q4_k, scales), {{OFF(q4_k, qs), 32}}, -1, 0},
    [SO_DTYPE_Q5_K] = {{OFF(q5_k, d), OFF(q5_k, dmin)},
                       2,
                       OFF(q5_k, scales),
                       {{OFF(q5_k, qs), 32}, {OFF(q5_k, qh), 8}},
                       -1,
                       0},
    [SO_DTYPE_Q6_K] =
        {{OFF(q6_k, d)}, 1, OFF(q6_k, scales), {{OFF(q6_k, ql), 32}, {OFF(q6_k, qh), 16}}, -1, 0},
};

size_t so_pack_group_bytes(so_dtype t, int n_cols) {
    size_t words = so_pack_words(t);
    if (words == 0)
        return 0;
    size_t n_blocks = (size_t)(n_cols / so_dtype_get((int)t)->block_len);
    return so_pack_words_at(t, n_blocks) + words * n_blocks;
}

/* ---- fifth bits: bit 4c + b of the file becomes bit c of byte b ---- */

static uint32_t bits_pack(uint32_t x) {
    uint32_t out = 0;
    for (int b = 0; b < 4; b++) {
        uint32_t t = x >> b & 0x11111111u; /* every fourth bit, pushed together */
        t = (t | t >> 3) & 0x03030303u;
        t = (t | t >> 6) & 0x000F000Fu;
        t = (t | t >> 12) & 0xFFu;
        out |= t << (8 * b);
    }
    return out;
}

static uint32_t bits_unpack(uint32_t x) {
    uint32_t out = 0;
    for (int b = 0; b < 4; b++) {
        uint32_t t = x >> (8 * b) & 0xFFu;
        t = (t | t << 12) & 0x000F000Fu;
        t = (t | t << 6) & 0x03030303u;
        t = (t | t << 3) & 0x11111111u;
        out |= t << b;
    }
    return out;
}

/* ---- sub-block scales: sixteen bytes per row ---- */

static void scales_take(so_dtype t, const uint8_t *packed, uint8_t *s) {
    switch (t) {
    case SO_DTYPE_Q3_K:
        for (int j = 0; j < 16; j++)
            s[j] = (uint8_t)(so_scale_k3(packed, j) - 32);
        break;
    case SO_DTYPE_Q4_K:
    case SO_DTYPE_Q5_K:
        for (int j = 0; j < 8; j++) {
            int scale, min;
            so_scale_min_k4(packed, j, &scale, &min);
            s[j] = (uint8_t)scale;
            s[8 + j] = (uint8_t)min;
        }
        break;
    default: /* Q2_K, Q6_K */
        memcpy(s, packed, 16);
    }
}

static void scales_put(so_dtype t, const uint8_t *s, uint8_t *packed) {
    switch (t) {
    case SO_DTYPE_Q3_K:
        memset(packed, 0, 12);
        for (int j = 0; j < 16; j++) {
            int v = (s[j] + 32) & 63;
            packed[j % 8] |= (uint8_t)((v & 15) << (j / 8 * 4));
            packed[8 + j % 4] |= (uint8_t)(v >> 4 << (2 * (j / 4)));
        }
        break;
    case SO_DTYPE_Q4_K:
    case SO_DTYPE_Q5_K:
        for (int j = 0; j < 4; j++) {
            packed[j] = (uint8_t)(s[j] | s[4 + j] >> 4 << 6);
            packed[4 + j] = (uint8_t)(s[8 + j] | s[12 + j] >> 4 << 6);
            packed[8 + j] = (uint8_t)((s[4 + j] & 15) | (s[12 + j] & 15) << 4);
        }
        break;
    default:
        memcpy(packed, s, 16);
    }
}

/* ---- one block of one row ---- */

static void head_put(so_dtype t, const layout *l, const uint8_t *src, int row, uint8_t *head) {
    for (int h = 0; h < l->n_halves; h++)
        memcpy(head + 32 * h + 2 * row, src + l->half[h], 2);
    if (l->scales < 0)
        return;
    uint8_t s[16];
    scales_take(t, src + l->scales, s);
    uint8_t *pairs = head + 32 * l->n_halves + 2 * row;
    for (int p = 0; p < 8; p++)
        memcpy(pairs + 32 * p, s + 2 * p, 2);
}

static void words_put(const layout *l, const uint8_t *src, int row, uint8_t *words) {
    uint8_t *dst = words + 4 * row;
    uint32_t unit;
    for (int run = 0; run < 2; run++)
        for (int i = 0; i < l->words[run].n_units; i++, dst += SO_PACK_WORD) {
            memcpy(&unit, src + l->words[run].off + 4 * i, sizeof unit);
            unit ^= l->flip;
            memcpy(dst, &unit, sizeof unit);
        }
    if (l->bits >= 0) {
        memcpy(&unit, src + l->bits, sizeof unit);
        unit = bits_pack(unit);
        memcpy(dst, &unit, sizeof unit);
    }
}

void so_pack_group(so_dtype t, const uint8_t *rows, size_t row_bytes, int n_rows, int n_cols,
                   uint8_t *group) {
    const layout *l = &layouts[t];
    const so_dtype_info *info = so_dtype_get((int)t);
    int n_blocks = n_cols / info->block_len;
    uint8_t *words = group + so_pack_words_at(t, (size_t)n_blocks);
    if (n_rows < SO_PACK_ROWS)
        memset(group, 0, so_pack_group_bytes(t, n_cols));
    for (int b = 0; b < n_blocks; b++) {
        const uint8_t *src = rows + (size_t)b * (size_t)info->block_bytes;
        for (int r = 0; r < n_rows; r++, src += row_bytes) {
            head_put(t, l, src, r, group + (size_t)b * so_pack_head(t));
            words_put(l, src, r, words + (size_t)b * so_pack_words(t));
        }
    }
}

void so_pack_block(so_dtype t, const uint8_t *group, int n_cols, int row, int block, uint8_t *out) {
    const layout *l = &layouts[t];
    int n_blocks = n_cols / so_dtype_get((int)t)->block_len;
    const uint8_t *head = group + (size_t)block * so_pack_head(t);
    const uint8_t *src = group + so_pack_words_at(t, (size_t)n_blocks) +
                         (size_t)block * so_pack_words(t) + 4 * (size_t)row;
    uint32_t unit;
    for (int h = 0; h < l->n_halves; h++)
        memcpy(out + l->half[h], head + 32 * h + 2 * row, 2);
    if (l->scales >= 0) {
        uint8_t s[16];
        for (int p = 0; p < 8; p++)
            memcpy(s + 2 * p, head + 32 * l->n_halves + 32 * p + 2 * row, 2);
        scales_put(t, s, out + l->scales);
    }
    for (int run = 0; run < 2; run++)
        for (int i = 0; i < l->words[run].n_units; i++, src += SO_PACK_WORD) {
            memcpy(&unit, src, sizeof unit);
            unit ^= l->flip;
            memcpy(out + l->words[run].off + 4 * i, &unit, sizeof unit);
        }
    if (l->bits >= 0) {
        memcpy(&unit, src, sizeof unit);
        unit = bits_unpack(unit);
        memcpy(out + l->bits, &unit, sizeof unit);
    }
}
