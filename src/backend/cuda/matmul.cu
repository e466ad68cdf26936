/* Matrix products on the tensor cores. The contract is in device.cuh, weights are packed in pack.cu.
 *
 * Two kernels compute the same sums, bit for bit:
 *
 *   narrow  Up to 64 rows. The items (see below) are divided evenly between the thread blocks, to
 *           within one. A block goes through its items in steps of up to P pairs of tiles.
 *           Each of its 8 warps computes one of the 8 segments of K. A warp streams its weights and
 *           activations through its own ring in shared memory, so warps wait for memory but not for
 *           each other. Weights do not depend on earlier kernels, so the ring is filled with weights
 *           before so_wait_prior.
 *   wide    More rows. A thread block owns 8 pairs of tiles and 64 rows; the warps share weights and rows
 *           in shared memory and go through the segments one after the other.
 *
 * Work is counted in items. An item is one tile; if two products are combined by a gated activation, it
 * is the tile at the same place of each. Both kernels end with the same functions, which apply factors,
 * bias, activation and residual. */
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
    int stages;     /* of the ring of a narrow kernel */
    const __half *x;
    int x_stride, act;
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

/* acc += a pair of tiles times the rows of NT groups of 8, one unit. */
template <int FMT, int NT>
SO_DEVICE void multiply(float (*acc)[4], const char *first, const char *second,
                        const uint32_t (*x)[8], int lane) {
    fragments f;
    decode<FMT, 0>(f, first, second, lane);
    for (int s = 0; s < 4; s++)
        for (int j = 0; j < NT; j++)
            so_mma(acc[j], f.a[s], x[j][2 * s], x[j][2 * s + 1]);
    if (FMT != SO_FMT_F32)
        return;
    decode<FMT, 1>(f, first, second, lane);
    for (int s = 0; s < 4; s++)
        for (int j = 0; j < NT; j++)
            so_mma(acc[j], f.a[s], x[j][2 * s], x[j][2 * s + 1]);
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

/* The product's value: factor, scale of activations and of the row, bias. */
SO_DEVICE float value_of(const mm_args &p, int which, int row, int col, float acc) {
    float v = __fmul_rn(__fmul_rn(acc, p.factor[which][col]), 16.0f);
    if (p.row_scale)
        v = __fmul_rn(v, so_load(p.row_scale + row));
    return p.bias[which] ? __fadd_rn(v, p.bias[which][col]) : v;
}

/* Output `o` of a tile. `second`: the sum of the second product at the same place, if they are combined.
 * STEP: the lanes of outputs o and o + 1 of the same row differ by it. */
template <int STEP>
SO_DEVICE void finish(const mm_args &p, tile_ref t, int o, int row, float acc, float second) {
    int which = t.which, col = t.tile * SO_TILE + o;
    if (which < 0 || row >= p.n || col >= p.m[which])
        return;
    size_t at = (size_t)row * p.m[which] + col;
    float v = value_of(p, which, row, col, acc);
    if (p.act != SO_OP_COUNT) {
        float u = 0;
        if (p.act != SO_OP_GELU) {
            u = value_of(p, 1, row, col, second);
            if (p.out[1])
                p.out[1][at] = u;
        }
        if (p.out[which])
            p.out[which][at] = v;
        v = so_combine(p.act, v, u);
        if (p.act_out)
            p.act_out[at] = v;
        so_put_half(p.half_out, row, col, v);
        return;
    }
    if (p.add && which == p.n_products - 1)
        v = __fadd_rn(so_load(p.add + at), v);
    if (p.out[which])
        p.out[which][at] = v;
    if (p.norm) { /* all 8 outputs of the tile are here: a norm's width is a multiple of 8 */
        so_put_half(p.half_out, row, col, __fmul_rn(v, p.norm[col]));
        unsigned mask = STEP == 1 ? 0xffu << (threadIdx.x & 24) : 0x11111111u << (threadIdx.x & 3);
        float q = __fmul_rn(v, v);
        for (int i = 1; i < 8; i *= 2)
            q = __fadd_rn(q, __shfl_xor_sync(mask, q, i * STEP));
        if (o == 0)
            p.squares[(size_t)row * (p.m[which] / SO_TILE) + t.tile] = q;
    }
}

/* ---- up to 64 rows ---- */

/* RESIDENT: the activation rows stay in shared memory for all steps; otherwise each step copies them
 * again, together with the weights. */
template <int FMT, int NT, int P, bool RESIDENT> struct narrow_shape {
    static constexpr int unit = so_fmt_unit(FMT), stage = 2 * P * unit + (RESIDENT ? 0 : NT * 1024);
    static constexpr int parts = SO_WARPS * P * NT * 512;
    /* with many rows a block has one step, and its sums take the place of the ring */
    static constexpr bool once = NT >= 4;
    static int rows(int n_units) {
        return RESIDENT ? (n_units + SO_SEGMENTS - 1) / SO_SEGMENTS * SO_WARPS * NT * 1024 : 0;
    }
    static int shared(int n_units, int stages) {
        int ring = SO_WARPS * stages * stage;
        return once ? (ring > parts ? ring : parts) : ring + rows(n_units) + parts;
    }
};

/* The part of the work that a thread block and a warp have. */
typedef struct share {
    int item, n_items, n_steps, step; /* of the block; step: items per step */
    int from, count;                  /* units of the warp */
} share;

template <int P> SO_DEVICE share share_of(const mm_args &p, int warp) {
    share a;
    a.item = blockIdx.x * p.each + min((int)blockIdx.x, p.more);
    a.n_items = p.each + (blockIdx.x < p.more);
    a.n_steps = combines(p) ? (a.n_items + P - 1) / P : (a.n_items + 2 * P - 1) / (2 * P);
    a.step = a.n_steps > 1 ? (a.n_items + a.n_steps - 1) / a.n_steps : a.n_items;
    a.from = so_first_unit(p.n_units, warp);
    a.count = so_first_unit(p.n_units, warp + 1) - a.from;
    return a;
}

/* First item of a step. */
SO_DEVICE int step_item(const share &a, int i) { return a.item + min(i * a.step, a.n_items); }

/* Goes through the weights of one warp: step by step, unit by unit. */
template <int FMT, int P> struct weight_cursor {
    const char *at[2 * P]; /* NULL: no tile */
    int round[2 * P];      /* from one unit of the segment to the next, in bytes */
    int last[2 * P];       /* the same, if the next one is in a round that lacks segments */
    int step, left;        /* units left of this step */
};

template <int FMT, int P>
SO_DEVICE void cursor_set(weight_cursor<FMT, P> &c, const mm_args &p, const share &a) {
    constexpr int unit = so_fmt_unit(FMT);
    int first = step_item(a, c.step), end = step_item(a, c.step + 1), rem = p.n_units % SO_SEGMENTS;
    c.left = a.count;
    for (int s = 0; s < 2 * P; s++) {
        tile_ref t = tile_of(p, first, end, s);
        so_tile_place at = place_of(p, t);
        c.at[s] = t.which < 0
                      ? NULL
                      : p.w[t.which] +
                            (size_t)so_unit_of(p.layout[t.which], at, 0, threadIdx.x / 32) * unit;
        c.round[s] = at.n_tiles * SO_SEGMENTS * unit;
        c.last[s] = c.round[s] - at.r * (SO_SEGMENTS - rem) * unit;
    }
}

/* Copies the warp's next units, if there are any. */
template <int FMT, int P>
SO_DEVICE void copy_weights(weight_cursor<FMT, P> &c, const mm_args &p, const share &a, char *to,
                            int lane) {
    constexpr int unit = so_fmt_unit(FMT);
    if (a.count == 0 || c.step >= a.n_steps)
        return;
    for (int s = 0; s < 2 * P; s++) {
        if (!c.at[s])
            continue;
        for (int b = lane * 16; b < unit; b += 512)
            so_copy16(to + s * unit + b, c.at[s] + b);
        /* the last unit of a longer segment is in a round that lacks the shorter ones */
        c.at[s] += c.left == 2 && a.count > p.n_units / SO_SEGMENTS ? c.last[s] : c.round[s];
    }
    if (--c.left == 0 && ++c.step < a.n_steps)
        cursor_set(c, p, a);
}

/* Copies unit u of the block's rows. */
template <int NT> SO_DEVICE void copy_rows(const mm_args &p, int u, char *to, int lane) {
    for (int j = 0; j < NT; j++) {
        int row = blockIdx.y * NT * 8 + j * 8 + lane / 4;
        const __half *src = p.x + (size_t)min(row, p.n - 1) * p.x_stride;
        for (int h = 0; h < 2; h++) {
            int k0 = u * SO_UNIT + h * 32 + lane % 4 * 8;
            so_copy16(to + j * 1024 + h * 512 + lane * 16, src + k0,
                      row < p.n ? max(0, min(16, (p.k - k0) * 2)) : 0);
        }
    }
}

/* Waits until all groups of copies but the last n have arrived. */
SO_DEVICE void copy_wait(int n) {
    switch (n) {
    case 1:
        return so_copy_wait<1>();
    case 2:
        return so_copy_wait<2>();
    case 3:
        return so_copy_wait<3>();
    case 4:
        return so_copy_wait<4>();
    case 5:
        return so_copy_wait<5>();
    case 6:
        return so_copy_wait<6>();
    case 7:
        return so_copy_wait<7>();
    default:
        return so_copy_wait<0>();
    }
}
enum { MAX_STAGES = 8 };

/* Adds the segments of a step and finishes its outputs. part: [warp][P][NT][lane][4]. */
template <int NT, int P>
SO_DEVICE void finish_step(const mm_args &p, int first, int end, const float *part) {
    bool both = combines(p);
    auto sum = [&](int pair, int at) {
        float v = part[pair * NT * 128 + at];
        for (int s = 1; s < SO_SEGMENTS; s++)
            v = __fadd_rn(v, part[(s * P + pair) * NT * 128 + at]);
        return v;
    };
    for (int i = threadIdx.x; i < (end - first) * NT * 64; i += 256) {
        /* consecutive threads store consecutive outputs of a row */
        int place = i / (NT * 64), e = i % (NT * 64), o = e % 8, r = e / 8;
        int at = r / 8 * 128 + (o * 4 + r % 8 / 2) * 4 + r % 2, row = blockIdx.y * NT * 8 + r;
        tile_ref t = tile_of(p, first, end, both ? 2 * place : place);
        if (both)
            finish<1>(p, t, o, row, sum(place, at), sum(place, at + 2));
        else
            finish<1>(p, t, o, row, sum(place / 2, at + place % 2 * 2), 0);
    }
}

template <int FMT, int NT, int P, bool RESIDENT>
static __global__ void __launch_bounds__(256) narrow(const __grid_constant__ mm_args p) {
    typedef narrow_shape<FMT, NT, P, RESIDENT> Z;
    extern __shared__ __align__(128) char shared[];
    so_start_next();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, ring_bytes = p.stages * Z::stage;
    share a = share_of<P>(p, warp);
    int per = (p.n_units + SO_SEGMENTS - 1) / SO_SEGMENTS, fills = a.count * a.n_steps, filled = 0,
        unit = 0;
    char *ring = shared + warp * ring_bytes,
         *rows = shared + SO_WARPS * ring_bytes + warp * per * NT * 1024;
    float *part = (float *)(shared + (Z::once ? 0 : SO_WARPS * ring_bytes) +
                            (RESIDENT ? SO_WARPS * per * NT * 1024 : 0));
    weight_cursor<FMT, P> ahead;
    ahead.step = 0;
    if (a.count > 0)
        cursor_set(ahead, p, a);
    for (int i = 0; i < p.stages; i++) {
        copy_weights(ahead, p, a, ring + i * Z::stage, lane);
        so_copy_commit();
    }
    auto fill_rows = [&](char *stage) { /* of the next stage */
                                        if (filled < (RESIDENT ? a.count : fills))
                                            copy_rows<NT>(p, a.from + unit,
                                                          RESIDENT ? rows + unit * NT * 1024
                                                                   : stage + 2 * P * Z::unit,
                                                          lane);
                                        filled++;
                                        unit = unit + 1 == a.count ? 0 : unit + 1;
    };
    so_wait_prior();
    for (int i = 0; i < p.stages; i++) {
        fill_rows(ring + i * Z::stage);
        so_copy_commit();
    }
    int slot = 0;
#pragma unroll 1
    for (int step = 0; step < a.n_steps; step++) {
        int first = step_item(a, step), end = step_item(a, step + 1);
        int n_pairs = combines(p) ? end - first : (end - first + 1) / 2;
        float acc[P][NT][4] = {};
#pragma unroll 1
        for (int i = 0; i < a.count; i++) {
            copy_wait(p.stages - 1);
            __syncwarp();
            char *stage = ring + slot * Z::stage;
            const char *at = RESIDENT ? rows + i * NT * 1024 : stage + 2 * P * Z::unit;
            uint32_t x[NT][8];
            for (int j = 0; j < NT; j++)
                for (int h = 0; h < 2; h++)
                    *(uint4 *)&x[j][h * 4] = *(const uint4 *)(at + j * 1024 + h * 512 + lane * 16);
#pragma unroll
            for (int q = 0; q < P; q++)
                if (q < n_pairs)
                    multiply<FMT, NT>(acc[q], stage + 2 * q * Z::unit,
                                      stage + (2 * q + 1) * Z::unit, x, lane);
            __syncwarp();
            copy_weights(ahead, p, a, stage, lane);
            fill_rows(stage);
            so_copy_commit();
            slot = slot + 1 == p.stages ? 0 : slot + 1;
        }
        if (Z::once)
            so_copy_wait<0>();
        __syncthreads(); /* the sums of the step before have been read */
        for (int q = 0; q < P; q++)
            for (int j = 0; j < NT; j++)
                *(float4 *)&part[((warp * P + q) * NT + j) * 128 + lane * 4] =
                    make_float4(acc[q][j][0], acc[q][j][1], acc[q][j][2], acc[q][j][3]);
        __syncthreads();
        finish_step<NT, P>(p, first, end, part);
    }
    so_copy_wait<0>();
}

/* ---- more rows ---- */

enum { WIDE_PAIRS = 8, WIDE_ROWS = 64 };

template <int FMT> struct wide_shape {
    static constexpr int unit = so_fmt_unit(FMT), stage = 2 * WIDE_PAIRS * unit + WIDE_ROWS * 128;
};

/* The tiles of a block. */
typedef struct wide_tiles {
    const char *w[2 * WIDE_PAIRS]; /* NULL: none */
    so_tile_place at[2 * WIDE_PAIRS];
} wide_tiles;

/* Copies unit u of the block's tiles and rows, the rows in the order of use. */
template <int FMT>
SO_DEVICE void copy_wide(const mm_args &p, const wide_tiles &tiles, int u, char *to) {
    typedef wide_shape<FMT> Z;
    if (u < p.n_units) {
        for (int i = threadIdx.x; i < 2 * WIDE_PAIRS * (Z::unit / 16); i += 256) {
            int s = i / (Z::unit / 16), c = i % (Z::unit / 16);
            if (tiles.w[s])
                so_copy16(to + s * Z::unit + c * 16,
                          tiles.w[s] + (size_t)so_unit_at(p.layout[0], tiles.at[s], u) * Z::unit +
                              c * 16);
        }
        for (int i = threadIdx.x; i < WIDE_ROWS * 8; i += 256) {
            int r = i / 8, c = i % 8, row = blockIdx.y * WIDE_ROWS + r, k0 = u * SO_UNIT + c * 8;
            const __half *src = p.x + (size_t)min(row, p.n - 1) * p.x_stride + k0;
            so_copy16(to + 2 * WIDE_PAIRS * Z::unit + r / 8 * 1024 + c / 4 * 512 +
                          (r % 8 * 4 + c % 4) * 16,
                      src, row < p.n ? max(0, min(16, (p.k - k0) * 2)) : 0);
        }
    }
    so_copy_commit();
}

/* Warp (a, b), 4 × 2: pairs 2 a and 2 a + 1 of the block, rows 32 b … 32 b + 31. */
template <int FMT>
static __global__ void __launch_bounds__(256) wide(const __grid_constant__ mm_args p) {
    typedef wide_shape<FMT> Z;
    extern __shared__ __align__(128) char shared[];
    so_start_next();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, a = warp / 2, b = warp % 2;
    bool both = combines(p);
    int row0 = blockIdx.y * WIDE_ROWS, first = blockIdx.x * WIDE_PAIRS * (both ? 1 : 2),
        end = min(first + WIDE_PAIRS * (both ? 1 : 2), p.n_items);
    __shared__ wide_tiles tiles;
    if (threadIdx.x < 2 * WIDE_PAIRS) {
        tile_ref t = tile_of(p, first, end, threadIdx.x);
        tiles.w[threadIdx.x] = t.which < 0 ? NULL : p.w[t.which];
        tiles.at[threadIdx.x] = place_of(p, t);
    }
    __syncthreads();
    so_wait_prior();
    float total[2][4][4] = {}, acc[2][4][4] = {};
    for (int u = 0; u < p.stages - 1; u++)
        copy_wide<FMT>(p, tiles, u, shared + u * Z::stage);
    int segment = 0, buf = 0;
#pragma unroll 1
    for (int u = 0; u < p.n_units; u++) {
        copy_wait(p.stages - 2);
        __syncthreads();
        copy_wide<FMT>(p, tiles, u + p.stages - 1,
                       shared + (buf == 0 ? p.stages - 1 : buf - 1) * Z::stage);
        if (u == so_first_unit(p.n_units, segment + 1)) {
            for (int r = 0; r < 2; r++)
                for (int j = 0; j < 4; j++)
                    for (int c = 0; c < 4; c++) {
                        total[r][j][c] =
                            segment ? __fadd_rn(total[r][j][c], acc[r][j][c]) : acc[r][j][c];
                        acc[r][j][c] = 0;
                    }
            segment++;
        }
        const char *stage = shared + buf * Z::stage,
                   *rows = stage + 2 * WIDE_PAIRS * Z::unit + b * 4 * 1024;
        uint32_t x[4][8];
        for (int j = 0; j < 4; j++)
            for (int h = 0; h < 2; h++)
                *(uint4 *)&x[j][h * 4] = *(const uint4 *)(rows + j * 1024 + h * 512 + lane * 16);
        for (int r = 0; r < 2; r++) {
            const char *at = stage + (2 * a + r) * 2 * Z::unit;
            multiply<FMT, 4>(acc[r], at, at + Z::unit, x, lane);
        }
        buf = buf + 1 == p.stages ? 0 : buf + 1;
    }
    so_copy_wait<0>();
    for (int s = segment; s < SO_SEGMENTS; s++) /* the last segment, then zeros for empty ones */
        for (int r = 0; r < 2; r++)
            for (int j = 0; j < 4; j++)
                for (int c = 0; c < 4; c++) {
                    float v = s == segment ? acc[r][j][c] : 0.0f;
                    total[r][j][c] = s ? __fadd_rn(total[r][j][c], v) : v;
                }
    for (int r = 0; r < 2; r++)
        for (int place = 0; place < (both ? 1 : 2); place++) {
            tile_ref t = tile_of(p, first, end, (2 * a + r) * 2 + place);
            for (int j = 0; j < 4; j++)
                for (int c = 0; c < 2; c++) {
                    int i = (b * 4 + j) * 8 + lane % 4 * 2 + c;
                    finish<4>(p, t, lane / 4, row0 + i, total[r][j][c + 2 * place],
                              total[r][j][c + 2]);
                }
        }
}

/* ---- launching ---- */

enum {
    QUANT_RING = 48 << 10,
    FEW_RING = 64 << 10,
    RESIDENT_RING = 96 << 10,
    STREAM_RING = 96 << 10,
};

/* The number of stages for a ring of `budget` bytes; 0 if not even two fit into
 * a block's shared memory. */
static int stages_for(const so_queue &q, int stage_bytes, int others, int budget) {
    int most = (q.shared_block - others) / (SO_WARPS * stage_bytes),
        n = budget / (SO_WARPS * stage_bytes);
    n = n < 2 ? 2 : n;
    n = n > most ? most : n;
    return n < 2 ? 0 : n > MAX_STAGES ? MAX_STAGES : n;
}

/* False if it does not fit into shared memory. */
template <int FMT, int NT, int P, bool RESIDENT>
static bool launch_narrow(const so_queue &q, mm_args a, int budget) {
    typedef narrow_shape<FMT, NT, P, RESIDENT> Z;
    a.stages = stages_for(q, Z::stage, Z::once ? 0 : Z::rows(a.n_units) + Z::parts, budget);
    if (a.stages == 0)
        return false;
    bool both = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL;
    int shared = Z::shared(a.n_units, a.stages), per_sm = q.shared_sm / (shared + 1024),
        most = both ? P : 2 * P, blocks = (a.n_items + most - 1) / most;
    /* Formats that take arithmetic to decode have several blocks on an SM. Others have one, and leave
     * room for a block of the next kernel, which starts to read its weights meanwhile. */
    per_sm = FMT <= SO_FMT_F32 || per_sm < 1 ? 1 : per_sm > 4 ? 4 : per_sm;
    if (!Z::once && blocks > q.n_sms * per_sm)
        blocks = q.n_sms * per_sm;
    else if (!Z::once && FMT <= SO_FMT_F32) /* a block for each SM, if there are items */
        blocks = a.n_items < q.n_sms ? a.n_items : q.n_sms;
    a.each = a.n_items / blocks;
    a.more = a.n_items % blocks;
    so_launch(q, narrow<FMT, NT, P, RESIDENT>,
              dim3((unsigned)blocks, (unsigned)((a.n + NT * 8 - 1) / (NT * 8))), 256,
              (size_t)shared, a);
    return true;
}

/* Up to 16 rows. The budgets of rings are measured on an H200: with more, the first reads of activations
 * wait behind weights; with less, the weights of the next kernel are not read early enough. */
template <int FMT, int NT> static void launch_few(const so_queue &q, const mm_args &a) {
    bool both = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL;
    int places = (both ? 2 : 1) * ((a.n_items + q.n_sms - 1) / q.n_sms);
    bool done = false;
    if (FMT > SO_FMT_F32) {
        done = both || places > 8 ? launch_narrow<FMT, NT, 2, true>(q, a, QUANT_RING)
                                  : launch_narrow<FMT, NT, 1, true>(q, a, QUANT_RING);
    } else {
        done = places <= 2 ? launch_narrow<FMT, NT, 1, true>(q, a, FEW_RING)
                           : launch_narrow<FMT, NT, 2, true>(q, a, RESIDENT_RING);
    }
    if (!done && !launch_narrow<FMT, NT, 2, false>(q, a, STREAM_RING))
        launch_narrow<FMT, 1, 1, false>(q, a, 0); /* fits every GPU */
}

/* 17 rows or more: each block computes one step (more in the last fallback). */
template <int FMT> static void launch_many(const so_queue &q, mm_args a) {
    typedef wide_shape<FMT> Z;
    bool both = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL;
    if (a.n > 64) {
        a.stages = q.shared_block / Z::stage;
        a.stages = a.stages > 3 ? 3 : a.stages;
        int most = both ? WIDE_PAIRS : 2 * WIDE_PAIRS;
        so_launch(q, wide<FMT>,
                  dim3((unsigned)((a.n_items + most - 1) / most),
                       (unsigned)((a.n + WIDE_ROWS - 1) / WIDE_ROWS)),
                  256, (size_t)(a.stages * Z::stage), a);
        return;
    }
    if (a.n > 32 && FMT != SO_FMT_F32 && /* whose ring would not fit */
            launch_narrow < FMT,
        FMT == SO_FMT_F32 ? 4 : 8, 2, false > (q, a, STREAM_RING))
        return;
    if (!launch_narrow<FMT, 4, 2, false>(q, a, STREAM_RING))
        launch_narrow<FMT, 1, 1, false>(q, a, 0);
}

template <int FMT> static void launch(const so_queue &q, const mm_args &a) {
    if (a.n > 16)
        launch_many<FMT>(q, a);
    else if (a.n > 8)
        launch_few<FMT, 2>(q, a);
    else
        launch_few<FMT, 1>(q, a);
}

void so_cuda_matmul(const so_queue &q, const so_products *p) {
    mm_args a = {};
    for (int i = 0; i < SO_MM_GROUP; i++)
        a.first_tile[i] = INT32_MAX;
    for (int i = 0; i < p->n_products; i++) {
        const so_weight *w = p->list[i].w;
        a.w[i] = w->data;
        a.factor[i] = w->factor;
        a.bias[i] = p->list[i].bias;
        a.out[i] = p->list[i].out;
        a.m[i] = w->m;
        a.first_tile[i] = a.n_items;
        a.layout[i] = w->layout;
        a.n_items += (w->m + SO_TILE - 1) / SO_TILE;
    }
    if (p->act == SO_OP_SILU_MUL || p->act == SO_OP_GELU_MUL)
        a.n_items /= 2;
    a.n = p->n;
    a.k = p->list[0].w->k;
    a.n_units = p->list[0].w->n_units;
    a.n_products = p->n_products;
    a.x = p->x.data;
    a.x_stride = p->x.stride;
    a.act = p->act;
    a.add = p->add;
    a.act_out = p->act_out;
    a.half_out = p->half_out;
    a.row_scale = p->row_scale;
    a.norm = p->norm;
    a.squares = p->squares;
    switch (p->list[0].w->fmt) {
    case SO_FMT_F16:
        return launch<SO_FMT_F16>(q, a);
    case SO_FMT_F32:
        return launch<SO_FMT_F32>(q, a);
    case SO_FMT_Q8_32:
        return launch<SO_FMT_Q8_32>(q, a);
    case SO_FMT_Q8_16:
        return launch<SO_FMT_Q8_16>(q, a);
    case SO_FMT_Q8_32_OFF:
        return launch<SO_FMT_Q8_32_OFF>(q, a);
    case SO_FMT_Q4_32_OFF:
        return launch<SO_FMT_Q4_32_OFF>(q, a);
    case SO_FMT_COUNT:
        return;
    }
}
