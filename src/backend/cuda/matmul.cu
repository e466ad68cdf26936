/* Matrix products on the tensor cores. The contract is in device.cuh, weights are packed in pack.cu.
 *
 * Two kernels compute the same sums, bit for bit:
 *
 *   narrow  Up to 64 rows. A thread block owns R tiles of 16 outputs; each of its 8 warps computes one
 *           of the 8 segments of K. A warp streams its weights and activations through a ring in shared
 *           memory that no other warp touches: each lane copies (cp.async) and reads its own bytes, so
 *           nothing waits but for memory. Weights do not depend on earlier kernels, so the ring is
 *           filled with them before the wait for the kernel before.
 *   wide    More rows. A thread block owns 8 tiles and 64 rows; the warps share weights and rows in
 *           shared memory and go through the segments one after the other.
 *
 * Both end with the same function, which applies factors, bias, activation and residual. */
#include "backend/cuda/device.cuh"

typedef struct mm_args {
    const char *w[SO_MM_GROUP];
    const float *factor[SO_MM_GROUP], *bias[SO_MM_GROUP];
    float *out[SO_MM_GROUP];
    int m[SO_MM_GROUP];
    int first_block[SO_MM_GROUP];            /* of blockIdx.x; INT32_MAX if unused */
    int n, k, n_units, n_products, n_blocks; /* n_blocks: of tiles */
    const __half *x;
    int x_stride, act;
    const float *add;
    float *act_out;
    so_half_rows half_out;
} mm_args;

/* ---- weights to fp16 fragments ---- */

/* a[s]: the A operand of mma number s. */
typedef struct fragments {
    uint32_t a[4][4];
} fragments;

SO_DEVICE uint32_t as_bits(__half2 h) { return *(uint32_t *)&h; }
SO_DEVICE __half2 as_half2(uint32_t u) { return *(__half2 *)&u; }

/* 8 numbers of output g (o = 0) or g + 8 (o = 1), k 8 h … 8 h + 7 of the lane's 16. */
SO_DEVICE void place(fragments &f, int o, int h, const uint32_t *w) {
    for (int i = 0; i < 4; i++)
        f.a[h * 2 + i / 2][o + i % 2 * 2] = w[i];
}

/* 8 int8 of a lane times a scale, plus an offset. */
template <bool OFFSET>
SO_DEVICE void decode_q8(uint32_t *v, uint32_t w0, uint32_t w1, __half2 d, __half2 m) {
    const __half2 bias = as_half2(0x64806480u); /* 1152 = 1024 + 128 */
    for (int i = 0; i < 4; i++) {
        uint32_t u = (i < 2 ? w0 : w1) ^ 0x80808080u;
        __half2 x = __hsub2(as_half2(__byte_perm(u, 0x64646464u, i % 2 ? 0x4342 : 0x4140)), bias);
        v[i] = as_bits(OFFSET ? __hfma2(x, d, m) : __hmul2_rn(x, d));
    }
}

/* 8 unsigned 4-bit numbers: k 2j and 2j+1 at bits 4 j and 16 + 4 j. */
SO_DEVICE void decode_q4(uint32_t *v, uint32_t w, __half2 d, __half2 m) {
    const __half2 bias = as_half2(0x64006400u); /* 1024 */
    for (int j = 0; j < 4; j++) {
        uint32_t u = (w >> 4 * j & 0x000f000fu) | 0x64006400u;
        v[j] = as_bits(__hfma2(__hsub2(as_half2(u), bias), d, m));
    }
}

/* One unit of one tile, from shared memory. PART 1: the low parts of F32. */
template <int FMT, int PART> SO_DEVICE void decode(fragments &f, const char *unit, int lane) {
    const uint4 *q = (const uint4 *)unit + lane;
    if (FMT == SO_FMT_F16 || FMT == SO_FMT_F32) {
        for (int i = 0; i < 4; i++) {
            uint4 v = q[i * 32 + PART * 128];
            const uint32_t w[4] = {v.x, v.y, v.z, v.w};
            place(f, i / 2, i % 2, w);
        }
        return;
    }
    const char *scales = unit + so_fmt_numbers(FMT);
    int g = lane / 4, t = lane % 4;
    uint4 raw[2] = {q[0], FMT == SO_FMT_Q4_32_OFF ? q[0] : q[32]};
    for (int o = 0; o < 2; o++)
        for (int h = 0; h < 2; h++) {
            uint32_t v[4];
            if (FMT == SO_FMT_Q8_32 || FMT == SO_FMT_Q8_16) {
                int group = FMT == SO_FMT_Q8_16 ? 2 * h + t / 2 : h;
                __half2 d = __half2half2(((const __half *)scales)[group * 16 + g + 8 * o]);
                decode_q8<false>(v, h ? raw[o].z : raw[o].x, h ? raw[o].w : raw[o].y, d, d);
            } else {
                __half2 s = ((const __half2 *)scales)[h * 16 + g + 8 * o];
                __half2 d = __low2half2(s), m = __high2half2(s);
                if (FMT == SO_FMT_Q4_32_OFF)
                    decode_q4(v, o ? (h ? raw[0].w : raw[0].z) : (h ? raw[0].y : raw[0].x), d, m);
                else
                    decode_q8<true>(v, h ? raw[o].z : raw[o].x, h ? raw[o].w : raw[o].y, d, m);
            }
            place(f, o, h, v);
        }
}

/* ---- what is done with a sum ---- */

/* The product's value: factor, scale of activations, bias. */
SO_DEVICE float value_of(const mm_args &p, int which, int col, float acc) {
    float v = __fmul_rn(__fmul_rn(acc, p.factor[which][col]), 16.0f);
    return p.bias[which] ? __fadd_rn(v, p.bias[which][col]) : v;
}

/* `second`: the sum of the second product at the same place, if they are combined. */
SO_DEVICE void finish(const mm_args &p, int which, int row, int col, float acc, float second) {
    if (row >= p.n || col >= p.m[which])
        return;
    size_t at = (size_t)row * p.m[which] + col;
    float v = value_of(p, which, col, acc);
    if (p.act != SO_OP_COUNT) {
        float u = 0;
        if (p.act != SO_OP_GELU) {
            u = value_of(p, 1, col, second);
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
}

SO_DEVICE bool combines(const mm_args &p) {
    return p.act == SO_OP_SILU_MUL || p.act == SO_OP_GELU_MUL;
}

SO_DEVICE int n_tiles(const mm_args &p, int which) { return (p.m[which] + SO_TILE - 1) / SO_TILE; }

/* Which product and tile a block of R tiles has as its tile r. Combined products take half of the tiles
 * each. */
typedef struct tile_ref {
    int which, tile;
} tile_ref;

template <int R> SO_DEVICE tile_ref tile_of(const mm_args &p, int block, int r) {
    constexpr int HALF = R > 1 ? R / 2 : 1;
    if (combines(p))
        return {r / HALF, block * HALF + r % HALF};
    int which = (block >= p.first_block[1]) + (block >= p.first_block[2]);
    return {which, (block - p.first_block[which]) * R + r};
}

SO_DEVICE const char *tile_data(const mm_args &p, tile_ref t, int unit_bytes) {
    int last = n_tiles(p, t.which) - 1;
    return p.w[t.which] + (size_t)min(t.tile, last) * p.n_units * unit_bytes;
}

/* ---- up to 64 rows ---- */

/* Sizes of a narrow kernel. RESIDENT: the rows stay in shared memory while tiles go by; otherwise they come
 * with the weights, again for every block of tiles. */
template <int FMT, int NT, int R, bool RESIDENT> struct narrow_shape {
    static constexpr int unit = so_fmt_unit(FMT), stage = R * unit + (RESIDENT ? 0 : NT * 1024);
    /* Bytes of the ring, as measured on an H200: with more, the first reads of activations wait behind
     * weights; with less, the weights of the next kernel are not read early enough. */
    static constexpr int budget = FMT > SO_FMT_F32 ? 48 << 10
                                  : NT > 1         ? (RESIDENT ? 64 : 96) << 10
                                  : !RESIDENT      ? 120 << 10
                                  : R == 1         ? 64 << 10
                                                   : 96 << 10;
    static constexpr int fit = budget / (SO_WARPS * stage);
    static constexpr int stages = fit < 2 ? 2 : fit > 8 ? 8 : fit;
    static constexpr int ring = SO_WARPS * stages * stage, parts = SO_WARPS * R * NT * 512;
    /* with many rows each block has its tiles only, and their sums take the place of the ring */
    static constexpr bool once = NT >= 4;
    static int shared(int n_units) {
        return once ? (ring > parts ? ring : parts) : ring + rows(n_units) + parts;
    }
    static int rows(int n_units) {
        return RESIDENT ? (n_units + SO_SEGMENTS - 1) / SO_SEGMENTS * SO_WARPS * NT * 1024 : 0;
    }
};

/* Goes through the weights of one warp: unit by unit, tiles by tiles. */
template <int FMT, int R> struct weight_cursor {
    const char *at[R];
    int block, left; /* units left of these tiles */
};

template <int FMT, int R>
SO_DEVICE void cursor_set(weight_cursor<FMT, R> &c, const mm_args &p, int from, int count) {
    c.left = count;
    for (int r = 0; r < R; r++)
        c.at[r] = tile_data(p, tile_of<R>(p, c.block, r), so_fmt_unit(FMT)) +
                  (size_t)from * so_fmt_unit(FMT);
}

template <int FMT, int NT, int R, bool RESIDENT>
static __global__ void __launch_bounds__(256) narrow(const __grid_constant__ mm_args p) {
    typedef narrow_shape<FMT, NT, R, RESIDENT> Z;
    extern __shared__ __align__(128) char shared[];
    so_start_next();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int per = (p.n_units + SO_SEGMENTS - 1) / SO_SEGMENTS, from = min(warp * per, p.n_units),
        count = min(from + per, p.n_units) - from;
    char *ring = shared + warp * Z::stages * Z::stage,
         *rows = shared + Z::ring + warp * per * NT * 1024;
    float *part =
        (float *)(shared + (Z::once ? 0 : Z::ring) + (RESIDENT ? SO_WARPS * per * NT * 1024 : 0));
    weight_cursor<FMT, R> ahead;
    ahead.block = blockIdx.x;
    if (count > 0)
        cursor_set(ahead, p, from, count);
    auto copy_weights = [&](char *to) { /* the next unit, if there is one */
                                        if (count == 0 || ahead.block >= p.n_blocks)
                                            return;
                                        for (int r = 0; r < R; r++) {
                                            for (int b = lane * 16; b < Z::unit; b += 512)
                                                so_copy16(to + r * Z::unit + b, ahead.at[r] + b);
                                            ahead.at[r] += Z::unit;
                                        }
                                        if (--ahead.left == 0) {
                                            ahead.block += gridDim.x;
                                            if (ahead.block < p.n_blocks)
                                                cursor_set(ahead, p, from, count);
                                        }
    };
    auto copy_rows =
        [&](int i, char *to) { /* of unit `from` + i */
                               for (int j = 0; j < NT; j++) {
                                   int row = blockIdx.y * NT * 8 + j * 8 + g;
                                   const __half *src = p.x + (size_t)min(row, p.n - 1) * p.x_stride;
                                   for (int h = 0; h < 2; h++) {
                                       int k0 = (from + i) * SO_UNIT + h * 32 + t * 8;
                                       so_copy16(to + j * 1024 + h * 512 + lane * 16, src + k0,
                                                 row < p.n ? max(0, min(16, (p.k - k0) * 2)) : 0);
                                   }
                               }
        };
    for (int i = 0; i < Z::stages; i++) {
        copy_weights(ring + i * Z::stage);
        so_copy_commit();
    }
    auto place_of = [&](int i, char *stage) { /* where the rows of unit i go */
                                              return RESIDENT ? rows + i * NT * 1024
                                                              : stage + R * Z::unit;
    };
    so_wait_prior();
    for (int i = 0; i < Z::stages && count > 0 && (i < count || !RESIDENT); i++)
        copy_rows(i % count, place_of(i % count, ring + i * Z::stage));
    so_copy_commit();
    so_copy_wait<0>();
    int slot = 0, next_rows = count == 0 ? 0 : RESIDENT ? Z::stages : Z::stages % count;
#pragma unroll 1
    for (int block = blockIdx.x; block < p.n_blocks; block += gridDim.x) {
        float acc[R][NT][4] = {};
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            so_copy_wait<Z::stages - 1>();
            __syncwarp();
            char *stage = ring + slot * Z::stage, *x = place_of(i, stage);
            uint32_t b[NT][8];
            for (int j = 0; j < NT; j++)
                for (int h = 0; h < 2; h++)
                    *(uint4 *)&b[j][h * 4] = *(const uint4 *)(x + j * 1024 + h * 512 + lane * 16);
            for (int r = 0; r < R; r++) {
                fragments f;
                decode<FMT, 0>(f, stage + r * Z::unit, lane);
                for (int s = 0; s < 4; s++)
                    for (int j = 0; j < NT; j++)
                        so_mma(acc[r][j], f.a[s], b[j][2 * s], b[j][2 * s + 1]);
                if (FMT == SO_FMT_F32) {
                    decode<FMT, 1>(f, stage + r * Z::unit, lane);
                    for (int s = 0; s < 4; s++)
                        for (int j = 0; j < NT; j++)
                            so_mma(acc[r][j], f.a[s], b[j][2 * s], b[j][2 * s + 1]);
                }
            }
            __syncwarp();
            copy_weights(stage);
            if (next_rows < count) {
                copy_rows(next_rows, place_of(next_rows, stage));
                next_rows = next_rows + 1 == count && !RESIDENT ? 0 : next_rows + 1;
            }
            so_copy_commit();
            slot = slot + 1 == Z::stages ? 0 : slot + 1;
        }
        if (Z::once)
            so_copy_wait<0>();
        __syncthreads(); /* the sums of the tiles before have been read */
        for (int r = 0; r < R; r++)
            for (int j = 0; j < NT; j++)
                *(float4 *)&part[((warp * R + r) * NT + j) * 128 + lane * 4] =
                    make_float4(acc[r][j][0], acc[r][j][1], acc[r][j][2], acc[r][j][3]);
        __syncthreads();
        auto sum = [&](int r, int i) {
            float v = part[r * NT * 128 + i];
            for (int s = 1; s < SO_SEGMENTS; s++)
                v = __fadd_rn(v, part[(s * R + r) * NT * 128 + i]);
            return v;
        };
        constexpr int HALF = R > 1 ? R / 2 : 1;
        int tiles = combines(p) ? HALF : R;
        for (int i = threadIdx.x; i < tiles * NT * 128; i += 256) {
            /* thread → output fastest, so that a row's results are stored together */
            int r = i / (NT * 128), e = i % (NT * 128), col = e % 16, row = e / 16;
            int at = row / 8 * 128 + (col % 8 * 4 + row % 8 / 2) * 4 + col / 8 * 2 + row % 2;
            tile_ref ref = tile_of<R>(p, block, r);
            finish(p, ref.which, blockIdx.y * NT * 8 + row, ref.tile * SO_TILE + col, sum(r, at),
                   combines(p) ? sum(r + HALF, at) : 0.0f);
        }
    }
    so_copy_wait<0>();
}

/* ---- more rows ---- */

enum { WIDE_TILES = 8, WIDE_ROWS = 64, WIDE_STAGES = 3 };

template <int FMT> struct wide_shape {
    static constexpr int unit = so_fmt_unit(FMT), stage = WIDE_TILES * unit + WIDE_ROWS * 128;
    static constexpr int shared = WIDE_STAGES * stage;
};

/* Warp (a, b), 4 × 2: tiles a and a + 4 of the block, rows 32 b … 32 b + 31. With combined products
 * tile a is of the first and a + 4 of the second, at the same place. */
template <int FMT>
static __global__ void __launch_bounds__(256) wide(const __grid_constant__ mm_args p) {
    typedef wide_shape<FMT> Z;
    extern __shared__ __align__(128) char shared[];
    so_start_next();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, a = warp / 2, b = warp % 2;
    int per = (p.n_units + SO_SEGMENTS - 1) / SO_SEGMENTS, row0 = blockIdx.y * WIDE_ROWS;
    so_wait_prior();
    auto load = [&](int u, int buf) {
        char *to = shared + buf * Z::stage;
        if (u < p.n_units) {
            for (int i = threadIdx.x; i < WIDE_TILES * (Z::unit / 16); i += 256) {
                int tile = i / (Z::unit / 16), c = i % (Z::unit / 16);
                const char *src = tile_data(p, tile_of<WIDE_TILES>(p, blockIdx.x, tile), Z::unit) +
                                  (size_t)u * Z::unit;
                so_copy16(to + tile * Z::unit + c * 16, src + c * 16);
            }
            for (int i = threadIdx.x; i < WIDE_ROWS * 8; i += 256) { /* in the order of use */
                int r = i / 8, c = i % 8, row = row0 + r, k0 = u * SO_UNIT + c * 8;
                const __half *src = p.x + (size_t)min(row, p.n - 1) * p.x_stride + k0;
                so_copy16(to + WIDE_TILES * Z::unit + r / 8 * 1024 + c / 4 * 512 +
                              (r % 8 * 4 + c % 4) * 16,
                          src, row < p.n ? max(0, min(16, (p.k - k0) * 2)) : 0);
            }
        }
        so_copy_commit();
    };
    float total[2][4][4] = {}, acc[2][4][4] = {};
    for (int u = 0; u < WIDE_STAGES - 1; u++)
        load(u, u);
    int segment = 0, buf = 0;
#pragma unroll 1
    for (int u = 0; u < p.n_units; u++) {
        so_copy_wait<WIDE_STAGES - 2>();
        __syncthreads();
        load(u + WIDE_STAGES - 1, buf == 0 ? WIDE_STAGES - 1 : buf - 1);
        if (u == (segment + 1) * per) {
            for (int r = 0; r < 2; r++)
                for (int j = 0; j < 4; j++)
                    for (int c = 0; c < 4; c++) {
                        total[r][j][c] =
                            segment ? __fadd_rn(total[r][j][c], acc[r][j][c]) : acc[r][j][c];
                        acc[r][j][c] = 0;
                    }
            segment++;
        }
        const char *stage = shared + buf * Z::stage, *rows = stage + WIDE_TILES * Z::unit;
        fragments f[2];
        for (int part = 0; part < (FMT == SO_FMT_F32 ? 2 : 1); part++) {
            for (int r = 0; r < 2; r++)
                if (part == 0)
                    decode<FMT, 0>(f[r], stage + (a + 4 * r) * Z::unit, lane);
                else
                    decode<FMT, 1>(f[r], stage + (a + 4 * r) * Z::unit, lane);
            for (int j = 0; j < 4; j++) {
                uint32_t x[8];
                for (int h = 0; h < 2; h++)
                    *(uint4 *)&x[h * 4] =
                        *(const uint4 *)(rows + (b * 4 + j) * 1024 + h * 512 + lane * 16);
                for (int s = 0; s < 4; s++)
                    for (int r = 0; r < 2; r++)
                        so_mma(acc[r][j], f[r].a[s], x[2 * s], x[2 * s + 1]);
            }
        }
        buf = buf + 1 == WIDE_STAGES ? 0 : buf + 1;
    }
    so_copy_wait<0>();
    for (int s = segment; s < SO_SEGMENTS; s++) /* the last segment, then zeros for empty ones */
        for (int r = 0; r < 2; r++)
            for (int j = 0; j < 4; j++)
                for (int c = 0; c < 4; c++) {
                    float v = s == segment ? acc[r][j][c] : 0.0f;
                    total[r][j][c] = s ? __fadd_rn(total[r][j][c], v) : v;
                }
    bool both = combines(p);
    for (int r = 0; r < (both ? 1 : 2); r++) {
        tile_ref ref = tile_of<WIDE_TILES>(p, blockIdx.x, a + 4 * r);
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < 4; c++)
                finish(p, ref.which, row0 + (b * 4 + j) * 8 + lane % 4 * 2 + c % 2,
                       ref.tile * SO_TILE + lane / 4 + c / 2 * 8, total[r][j][c], total[1][j][c]);
    }
}

/* ---- launching ---- */

/* Divides the tiles into blocks of r. */
static void set_blocks(mm_args *a, int r) {
    a->n_blocks = 0;
    if (a->act == SO_OP_SILU_MUL || a->act == SO_OP_GELU_MUL) {
        a->n_blocks = ((a->m[0] + SO_TILE - 1) / SO_TILE + r / 2 - 1) / (r / 2);
        return;
    }
    for (int i = 0; i < SO_MM_GROUP; i++) {
        a->first_block[i] = i < a->n_products ? a->n_blocks : INT32_MAX;
        if (i < a->n_products)
            a->n_blocks += ((a->m[i] + SO_TILE - 1) / SO_TILE + r - 1) / r;
    }
}

enum { SHARED_SM = 228 << 10 }; /* of an SM, with 1 KB for each block */

template <int FMT, int NT, int R, bool RESIDENT>
static void launch_narrow(const so_queue &q, mm_args a) {
    typedef narrow_shape<FMT, NT, R, RESIDENT> Z;
    set_blocks(&a, R);
    /* Formats that take arithmetic to decode have several blocks on an SM. Others have one, and leave
     * room for a block of the next kernel, which starts to read its weights meanwhile. */
    int shared = Z::shared(a.n_units), per_sm = SHARED_SM / (shared + 1024);
    per_sm = FMT <= SO_FMT_F32 || per_sm < 1 ? 1 : per_sm > 4 ? 4 : per_sm;
    int most = Z::once ? a.n_blocks : q.n_sms * per_sm;
    so_launch(q, narrow<FMT, NT, R, RESIDENT>,
              dim3((unsigned)(a.n_blocks < most ? a.n_blocks : most),
                   (unsigned)((a.n + NT * 8 - 1) / (NT * 8))),
              256, (size_t)shared, a);
}

/* Keeps the rows in shared memory if they fit. */
template <int FMT, int NT, int R> static void launch_rows(const so_queue &q, const mm_args &a) {
    typedef narrow_shape<FMT, NT, R, true> Z;
    if (Z::shared(a.n_units) <= SO_SHARED_BYTES)
        launch_narrow<FMT, NT, R, true>(q, a);
    else
        launch_narrow<FMT, NT, R, false>(q, a);
}

/* Whether every SM has a block if blocks have r tiles. */
static bool enough(const so_queue &q, const mm_args &a, int r) {
    int tiles = 0;
    for (int i = 0; i < a.n_products; i++)
        tiles += (a.m[i] + SO_TILE - 1) / SO_TILE;
    return tiles >= q.n_sms * r;
}

template <int FMT> static void launch(const so_queue &q, mm_args a) {
    bool combined = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL;
    if (a.n > 64) {
        set_blocks(&a, WIDE_TILES);
        so_launch(q, wide<FMT>,
                  dim3((unsigned)a.n_blocks, (unsigned)((a.n + WIDE_ROWS - 1) / WIDE_ROWS)), 256,
                  wide_shape<FMT>::shared, a);
    } else if (a.n > 32 && FMT != SO_FMT_F32) { /* whose ring would not fit */
        launch_narrow<FMT, FMT == SO_FMT_F32 ? 4 : 8, 2, false>(q, a);
    } else if (a.n > 16) {
        launch_narrow<FMT, 4, 2, false>(q, a);
    } else if (a.n > 8) {
        if (combined || enough(q, a, 4))
            launch_rows<FMT, 2, 2>(q, a);
        else
            launch_rows<FMT, 2, 1>(q, a);
    } else {
        if (combined || enough(q, a, 4))
            launch_rows<FMT, 1, 2>(q, a);
        else
            launch_rows<FMT, 1, 1>(q, a);
    }
}

void so_cuda_matmul(const so_queue &q, const so_products *p) {
    mm_args a = {};
    for (int i = 0; i < p->n_products; i++) {
        const so_weight *w = p->list[i].w;
        a.w[i] = w->data;
        a.factor[i] = w->factor;
        a.bias[i] = p->list[i].bias;
        a.out[i] = p->list[i].out;
        a.m[i] = w->m;
    }
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
