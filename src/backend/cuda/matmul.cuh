/* What the kernels for products share: matmul.cu (up to 16 rows) and matmul_wide.cu (more).
 *
 * Work is counted in items. An item is one tile; if two products are combined by a gated activation, it
 * is the tile at the same place of each. */
#ifndef SO_BACKEND_CUDA_MATMUL_CUH
#define SO_BACKEND_CUDA_MATMUL_CUH

#include "backend/cuda/decode.cuh"

typedef struct mm_args {
    const char *w[SO_MM_GROUP];
    const float *factor[SO_MM_GROUP], *bias[SO_MM_GROUP];
    float *out[SO_MM_GROUP];
    int m[SO_MM_GROUP];
    int first_tile[SO_MM_GROUP]; /* number of the product's first tile; INT32_MAX if unused */
    so_layout layout[SO_MM_GROUP];
    int n, k, n_units, n_products, n_items;
    int each, more; /* narrow kernels: items of a block; the first `more` blocks have one more */
    int stages;     /* of a ring in shared memory */
    bool aligned;   /* four consecutive outputs of a row can be stored at once */
    so_half_rows x;
    int act;
    const float *add;
    float *act_out;
    so_half_rows half_out;
    const float *row_scale, *norm;
    float *squares;
} mm_args;

/* a[s]: the A operand of mma number s. */
typedef struct fragments {
    uint32_t a[4][4];
} fragments;

/* One unit of a pair of tiles, from shared memory. */
template <int FMT, int PART>
SO_DEVICE void decode(fragments &f, const char *first, const char *second, int lane) {
    for (int o = 0; o < 2; o++) {
        uint32_t w[8];
        so_decode<FMT, PART>(w, o ? second : first, lane);
        for (int i = 0; i < 8; i++)
            f.a[i / 2][o + i % 2 * 2] = w[i];
    }
}

/* ---- items and tiles ---- */

SO_DEVICE bool combines(const mm_args &p) {
    return p.act == SO_OP_SILU_MUL || p.act == SO_OP_GELU_MUL;
}

typedef struct tile_ref {
    int which, tile; /* which: the product; -1: none */
} tile_ref;

/* The tile in place s of a step over the items first … end-1: places 2 i and 2 i + 1 are pair i. */
SO_DEVICE tile_ref tile_of(const mm_args &p, int first, int end, int s) {
    bool both = combines(p);
    int item = first + (both ? s / 2 : s);
    if (item >= end)
        return {-1, 0};
    if (both)
        return {s % 2, item};
    int which = (item >= p.first_tile[1]) + (item >= p.first_tile[2]);
    return {which, item - p.first_tile[which]};
}

/* Where a tile's units are; n_tiles is 0 if there is no tile. */
SO_DEVICE so_tile_place place_of(const mm_args &p, tile_ref t) {
    so_tile_place none = {0, 0, 0};
    return t.which < 0 ? none : so_place_of(p.layout[t.which], t.tile);
}

/* ---- what is done with a sum ---- */

/* A number that may be absent. */
typedef struct maybe {
    bool is;
    float v;
} maybe;

/* A product's value: factor, scale of activations and of the row, bias. */
SO_DEVICE float value_of(float acc, float factor, maybe scale, maybe bias) {
    float v = __fmul_rn(__fmul_rn(acc, factor), 16.0f);
    if (scale.is)
        v = __fmul_rn(v, scale.v);
    return bias.is ? __fadd_rn(v, bias.v) : v;
}

/* 17 rows or more; instantiated for every format in matmul_wide.cu. */
template <int FMT> void so_cuda_matmul_wide(const so_queue &q, const mm_args &a);

#endif
