/* Packing of quantised weights and its inverse; pack.h shows the layouts. Both use one table, so
 * that each field is described once. A model is packed at every load, so speed matters a little:
 * the inner loops transpose four 32-bit units of four rows at a time. Pure functions; any
 * thread. */
#include "backend/cpu/pack.h"

#include <string.h>

#include "base/mem.h"

/* The fields of a block in the file. */
typedef struct layout {
    int half[2], n_halves; /* byte offsets of d and of the minimum */
    int scales;            /* offset of packed sub-block scales; −1: none */
    struct {
        int off, n_units;
    } words[4];    /* runs of 4-byte units, in packed order */
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
        {{OFF(q3_k, d)}, 1, OFF(q3_k, scales), {{OFF(q3_k, hmask), 8}, {OFF(q3_k, qs), 16}}, -1, 0},
    [SO_DTYPE_Q4_K] =
        {{OFF(q4_k, d), OFF(q4_k, dmin)}, 2, OFF(q4_k, scales), {{OFF(q4_k, qs), 32}}, -1, 0},
    [SO_DTYPE_Q5_K] = {{OFF(q5_k, d), OFF(q5_k, dmin)},
                       2,
                       OFF(q5_k, scales),
                       {{OFF(q5_k, qh), 8}, {OFF(q5_k, qs), 32}},
                       -1,
                       0},
    [SO_DTYPE_Q6_K] = {{OFF(q6_k, d)},
                       1,
                       OFF(q6_k, scales),
                       {{OFF(q6_k, qh), 8},
                        {OFF(q6_k, ql), 16},
                        {OFF(q6_k, qh) + 32, 8},
                        {OFF(q6_k, ql) + 64, 16}},
                       -1,
                       0},
};

size_t so_pack_tile_bytes(so_dtype t, int n_cols) {
    if (so_pack_words(t) == 0)
        return 0;
    return so_pack_block_bytes(t, 2) * (size_t)(n_cols / so_dtype_get((int)t)->block_len);
}

bool so_pack_bytes(so_dtype t, int n_cols, long n_rows, size_t *out) {
    size_t tile = so_pack_tile_bytes(t, n_cols), n_tiles = (size_t)n_rows / SO_PACK_TILE, last = 0;
    int rest = (int)(n_rows % SO_PACK_TILE);
    if (rest > 0)
        last = so_pack_block_bytes(t, so_pack_groups(rest, 0)) *
               (size_t)(n_cols / so_dtype_get((int)t)->block_len);
    return tile > 0 && so_mul_size(n_tiles, tile, out) && so_add_size(*out, last, out);
}

/* ---- fifth bits: bit 4c + b of the file becomes bit c of byte b ---- */

static uint32_t bits_pack(uint32_t x) {
    uint32_t out = 0;
    for (int b = 0; b < 4; b++) {
        uint32_t t = x >> b & 0x11111111u; /* every fourth bit, then compacted */
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

/* The eight scales, then the eight minima, as so_scale_min_k4 decodes them one by one. */
static void scales_unpack_k4(const uint8_t *packed, uint8_t *s) {
    uint32_t in[3], out[4];
    memcpy(in, packed, sizeof in);
    out[0] = in[0] & 0x3F3F3F3Fu;
    out[1] = (in[2] & 0x0F0F0F0Fu) | (in[0] >> 2 & 0x30303030u);
    out[2] = in[1] & 0x3F3F3F3Fu;
    out[3] = (in[2] >> 4 & 0x0F0F0F0Fu) | (in[1] >> 2 & 0x30303030u);
    memcpy(s, out, sizeof out);
}

static void scales_unpack(so_dtype t, const uint8_t *packed, uint8_t *s) {
    switch (t) {
    case SO_DTYPE_Q3_K:
        for (int j = 0; j < 16; j++)
            s[j] = (uint8_t)(so_scale_k3(packed, j) - 32);
        break;
    case SO_DTYPE_Q4_K:
    case SO_DTYPE_Q5_K:
        scales_unpack_k4(packed, s);
        break;
    default: /* Q2_K, Q6_K */
        memcpy(s, packed, 16);
    }
}

static void scales_pack(so_dtype t, const uint8_t *s, uint8_t *packed) {
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

/* ---- one block of n_rows rows, row_bytes apart ---- */

static void heads_put(so_dtype t, const layout *l, const uint8_t *src, size_t row_bytes, int n_rows,
                      uint8_t *head) {
    for (int r = 0; r < n_rows; r++, src += row_bytes, head += 2) {
        for (int h = 0; h < l->n_halves; h++)
            memcpy(head + 32 * h, src + l->half[h], 2);
        if (l->scales < 0)
            continue;
        uint8_t s[16], *pairs = head + 32 * l->n_halves;
        scales_unpack(t, src + l->scales, s);
        for (int p = 0; p < 8; p++)
            memcpy(pairs + 32 * p, s + 2 * p, 2);
    }
}

typedef uint32_t unit4 __attribute__((vector_size(16)));

/* Packs four units of each of four rows. */
static inline void put4x4(const uint8_t *src, size_t row_bytes, unit4 flip, uint8_t *dst) {
    unit4 r[4], lo[2], hi[2];
    for (int i = 0; i < 4; i++)
        memcpy(&r[i], src + (size_t)i * row_bytes, sizeof r[i]);
    for (int i = 0; i < 2; i++) {
        lo[i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 0, 4, 1, 5) ^ flip;
        hi[i] = __builtin_shufflevector(r[2 * i], r[2 * i + 1], 2, 6, 3, 7) ^ flip;
    }
    r[0] = __builtin_shufflevector(lo[0], lo[1], 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(lo[0], lo[1], 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(hi[0], hi[1], 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(hi[0], hi[1], 2, 3, 6, 7);
    for (int i = 0; i < 4; i++)
        memcpy(dst + SO_PACK_WORD * i, &r[i], sizeof r[i]);
}

/* Packs n_units units, a multiple of four, of every row. */
static void run_put(const uint8_t *src, size_t row_bytes, int n_rows, int n_units, uint32_t flip,
                    uint8_t *dst) {
    unit4 flips = {flip, flip, flip, flip};
    for (int i = 0; i < n_units; i += 4, src += 16, dst += 4 * SO_PACK_WORD) {
        int r = 0;
        for (; r + 4 <= n_rows; r += 4)
            put4x4(src + (size_t)r * row_bytes, row_bytes, flips, dst + 4 * r);
        for (; r < n_rows; r++)
            for (int u = 0; u < 4; u++) {
                uint32_t unit;
                memcpy(&unit, src + (size_t)r * row_bytes + 4 * u, sizeof unit);
                unit ^= flip;
                memcpy(dst + SO_PACK_WORD * u + 4 * r, &unit, sizeof unit);
            }
    }
}

static void bits_put(const uint8_t *src, size_t row_bytes, int n_rows, uint8_t *dst) {
    for (int r = 0; r < n_rows; r++) {
        uint32_t unit;
        memcpy(&unit, src + (size_t)r * row_bytes, sizeof unit);
        unit = bits_pack(unit);
        memcpy(dst + 4 * r, &unit, sizeof unit);
    }
}

static void words_put(const layout *l, const uint8_t *src, size_t row_bytes, int n_rows,
                      uint8_t *dst) {
    for (size_t run = 0; run < SO_LEN(l->words); run++) {
        run_put(src + l->words[run].off, row_bytes, n_rows, l->words[run].n_units, l->flip, dst);
        dst += l->words[run].n_units * SO_PACK_WORD;
    }
    if (l->bits >= 0)
        bits_put(src + l->bits, row_bytes, n_rows, dst);
}

/* One block of a row group. */
static void block_put(so_dtype t, const uint8_t *src, size_t row_bytes, int n_rows, uint8_t *head,
                      uint8_t *words) {
    const layout *l = &layouts[t];
    if (n_rows < SO_PACK_ROWS) {
        memset(head, 0, so_pack_head(t));
        memset(words, 0, so_pack_words(t));
    }
    heads_put(t, l, src, row_bytes, n_rows, head);
    words_put(l, src, row_bytes, n_rows, words);
}

void so_pack_tile(so_dtype t, const uint8_t *rows, size_t row_bytes, int n_rows, int n_cols,
                  uint8_t *tile) {
    const so_dtype_info *info = so_dtype_get((int)t);
    int groups = so_pack_groups(n_rows, 0);
    size_t head = so_pack_head(t) * (size_t)groups, padding = so_pack_heads_bytes(t, groups) - head;
    for (int b = 0; b < n_cols / info->block_len; b++, rows += info->block_bytes) {
        for (int g = 0; g < groups; g++) {
            int first = g * SO_PACK_ROWS;
            block_put(t, rows + (size_t)first * row_bytes, row_bytes,
                      SO_MIN(SO_PACK_ROWS, n_rows - first), tile + so_pack_head_at(t, first),
                      tile + so_pack_words_at(t, groups, first));
        }
        memset(tile + head, 0, padding);
        tile += so_pack_block_bytes(t, groups);
    }
}

void so_pack_block(so_dtype t, const uint8_t *tile, int groups, int row, int block, uint8_t *out) {
    const layout *l = &layouts[t];
    const uint8_t *at = tile + (size_t)block * so_pack_block_bytes(t, groups);
    const uint8_t *head = at + so_pack_head_at(t, row);
    const uint8_t *src = at + so_pack_words_at(t, groups, row);
    uint32_t unit;
    for (int h = 0; h < l->n_halves; h++)
        memcpy(out + l->half[h], head + 32 * h, 2);
    if (l->scales >= 0) {
        uint8_t s[16];
        for (int p = 0; p < 8; p++)
            memcpy(s + 2 * p, head + 32 * l->n_halves + 32 * p, 2);
        scales_pack(t, s, out + l->scales);
    }
    for (size_t run = 0; run < SO_LEN(l->words); run++)
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
