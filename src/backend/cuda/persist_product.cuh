/* Products in the persistent kernel (persist.cu). Consumer warp s computes segment s of all tiles of the
 * block. Activations are handed over by other blocks, so a warp fetches the units of its segment ahead and
 * checks each one before use. The eight sums of an output are added through shared memory.
 *
 * The loop of a product decides the speed of the kernel, and two warps share a scheduler, so what counts is
 * its number of instructions. It is compiled for each format and number of tiles. */
#ifndef SO_BACKEND_CUDA_PERSIST_PRODUCT_CUH
#define SO_BACKEND_CUDA_PERSIST_PRODUCT_CUH

#include "backend/cuda/persist_block.cuh"

/* ---- activations ---- */

/* The units of the warp's segment, fetched ahead into its part of b.x. A lane reads only what it has
 * fetched itself: 8 numbers of each half of a unit, of row lane / 4 and, if NT is 2, of the row 8 below. */
typedef struct feed {
    const char *src; /* the lane's first numbers of unit 0 */
    int below;       /* from a row to the one 8 below, in bytes */
    int count;       /* units */
    uint32_t zero;   /* persist_args.zero */
    bool on[2];      /* whether there are these rows */
} feed;

/* Where the lane's units go. */
template <int NT> SO_DEVICE char *feed_place(void) {
    extern __shared__ __align__(1024) char shared[];
    uint32_t thread = (uint32_t)thread_again();
    return shared + thread / 32 * x_bytes(NT) + thread % 32 * 16;
}

/* to: feed_place. */
template <int NT> SO_DEVICE void fetch_unit(const feed &f, int j, int place, char *to) {
    for (int i = 0; i < NT; i++)
        if (f.on[i]) {
            const char *src = f.src + i * f.below + j * (SO_UNIT * 2);
            so_copy16(to + (place * NT + i) * 1024, src);
            so_copy16(to + (place * NT + i) * 1024 + 512, src + 64);
        }
}

/* With many rows, fetching in vain takes bandwidth: a lane waits until a word of its row's last unit has
 * been handed over. The others are probably there then. */
SO_DEVICE void wait_last(const feed &f) {
    spin s = {};
    if (f.count > 0 && f.on[0])
        while (read1(f.src + (f.count - 1) * (SO_UNIT * 2)) == 0xffffffffu)
            spin_once(&s);
    __syncwarp();
}

template <int NT> SO_DEVICE void feed_begin(const feed &f) {
    char *to = feed_place<NT>();
#pragma unroll
    for (int j = 0; j < depth_of(NT); j++) {
        if (j < f.count)
            fetch_unit<NT>(f, j, j, to);
        so_copy_commit();
    }
}

/* The unit in a place of the feed, as the A operands of its four mma; with one group of rows, as their B
 * operands, the first and third word of each. Rows beyond the last hold arbitrary data. Returns whether a word has not been handed over yet; two numbers are one word. The words that are
 * loaded together belong to different operands. Without the `|` the compiler copies them again for every
 * mma: 150 of the 490 instructions of the loop for 16 tiles. */
template <int NT>
SO_DEVICE bool read_unit(const feed &f, int place, const char *from, uint32_t (*a)[4]) {
    bool empty = false;
#pragma unroll
    for (int i = 0; i < NT; i++) {
        uint32_t x[8];
        bool e = false;
        *(uint4 *)x = *(const uint4 *)(from + (place * NT + i) * 1024);
        *(uint4 *)(x + 4) = *(const uint4 *)(from + (place * NT + i) * 1024 + 512);
#pragma unroll
        for (int s = 0; s < 4; s++) {
            a[s][i] = x[2 * s] | f.zero;
            a[s][2 + i] = x[2 * s + 1] | f.zero;
            e |= x[2 * s] == 0xffffffffu || x[2 * s + 1] == 0xffffffffu;
        }
        empty |= e && f.on[i];
    }
    if (NT == 1) /* these words are not used: any register will do */
        for (int s = 0; s < 4; s++)
            asm volatile("" : "=r"(a[s][1]), "=r"(a[s][3]));
    return empty;
}

/* Fetches unit j again until it has been handed over, and each time also the units after it, which are probably
 * empty as well. Not inlined, to keep the loop of a product short. */
template <int NT> static __device__ __noinline__ void poll_unit(feed f, int j, int place) {
    spin s = {};
    uint32_t a[4][4];
    char *to = feed_place<NT>();
    do {
#pragma unroll 1
        for (int i = 0, k = place; i < depth_of(NT) && j + i < f.count; i++) {
            fetch_unit<NT>(f, j + i, k, to);
            k = k + 1 == depth_of(NT) ? 0 : k + 1;
        }
        so_copy_commit();
        so_copy_wait<0>();
        spin_once(&s);
    } while (__any_sync(0xffffffffu, read_unit<NT>(f, place, to, a)));
}

/* Units j … j + P - 1, when they have been fetched and handed over; then those depth_of(NT) further are
 * fetched. */
template <int NT, int P>
SO_DEVICE void take_units(const feed &f, int j, int *place, uint32_t (*a)[4][4]) {
    int at[P];
    bool empty = false;
    char *to = feed_place<NT>();
    so_copy_wait<depth_of(NT) - P>();
#pragma unroll
    for (int p = 0; p < P; p++) {
        at[p] = p == 0 ? *place : at[p - 1] + 1 == depth_of(NT) ? 0 : at[p - 1] + 1;
        empty |= read_unit<NT>(f, at[p], to, a[p]);
    }
    if (__any_sync(0xffffffffu, empty))
#pragma unroll
        for (int p = 0; p < P; p++)
            if (p == 0 || __any_sync(0xffffffffu, read_unit<NT>(f, at[p], to, a[p]))) {
                poll_unit<NT>(f, j + p, at[p]);
                read_unit<NT>(f, at[p], to, a[p]);
            }
#pragma unroll
    for (int p = 0; p < P; p++) {
        if (j + p + depth_of(NT) < f.count)
            fetch_unit<NT>(f, j + p + depth_of(NT), at[p], to);
        so_copy_commit();
    }
    *place = at[P - 1] + 1 == depth_of(NT) ? 0 : at[P - 1] + 1;
}

/* ---- products ----
 *
 * A product's tiles are those of all its matrices; slot_entries says how they come through the ring. */

/* Tiles whose weights are in registers at once: as many as leave nothing to be kept in memory. */
__host__ __device__ constexpr int batch_of(int nt) { return nt == 1 ? 4 : 2; }

/* With up to 8 rows, two tiles are the A operand of an mma and the rows its B operand, else a tile is the B
 * operand. The bits are the same; with tiles as A there are half as many mma and half as many sums, so that
 * everything stays in registers. fp16 weights have to be moved there from where they are loaded, which
 * costs less. */
__host__ __device__ constexpr bool pairs_tiles(int nt) { return nt == 1; }
__host__ __device__ constexpr int n_sums(int nt, int tiles) {
    return pairs_tiles(nt) ? (tiles + 1) / 2 : tiles;
}

/* acc += a unit of n tiles from number t0 on, which is even. */
template <int NT, int N>
SO_DEVICE void multiply_unit(const uint32_t (*a)[4], const uint32_t (*w)[8], int t0,
                             float (*acc)[4]) {
#pragma unroll
    for (int s = 0; s < 4; s++)
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (!pairs_tiles(NT)) {
                so_mma(acc[t0 + i], a[s], w[i][2 * s], w[i][2 * s + 1]);
            } else if (i % 2 == 0) {
                int other = i + 1 < N ? i + 1 : i;
                uint32_t pair[4] = {w[i][2 * s], w[other][2 * s], w[i][2 * s + 1],
                                    w[other][2 * s + 1]};
                so_mma(acc[(t0 + i) / 2], pair, a[s][0], a[s][2]);
            }
        }
}

/* Loads and decodes N tiles of round p, from number t0 on. */
template <int FMT, int T, int P, int N>
SO_DEVICE void load_tiles(reader &r, int p, int t0, uint32_t (*w)[8]) {
    constexpr int S = slot_entries(FMT), UNIT = so_fmt_unit(FMT);
#pragma unroll
    for (int i = 0; i < N; i++) {
        int q = p * T + t0 + i;
        if (q % S == 0)
            wait_slot(r);
        so_decode<FMT, 0>(
            w[i], r.ring + r.warp * UNIT + r.slot * SLOT + q % S * (SO_SEGMENTS * UNIT), r.lane);
        if (q % S == S - 1 || q == P * T - 1)
            next_slot(r);
    }
}

/* acc += P rounds of the T tiles. */
template <int NT, int FMT, int T, int P>
SO_DEVICE void multiply_rounds(reader &r, const uint32_t (*a)[4][4], float (*acc)[4]) {
    constexpr int N = batch_of(NT), LAST = T % N ? T % N : N;
    uint32_t w[N][8];
#pragma unroll
    for (int p = 0; p < P; p++)
#pragma unroll
        for (int t0 = 0; t0 < T; t0 += N)
            if (t0 + N <= T) {
                load_tiles<FMT, T, P, N>(r, p, t0, w);
                multiply_unit<NT, N>(a[p], w, t0, acc);
            } else {
                load_tiles<FMT, T, P, LAST>(r, p, t0, w);
                multiply_unit<NT, LAST>(a[p], w, t0, acc);
            }
}

/* The last round, if 8 does not divide the number of units: only the first `rem` warps have a unit. */
template <int NT, int FMT, int T>
SO_DEVICE void multiply_rest(reader &r, const feed &f, int n_units, int place, float (*acc)[4]) {
    constexpr int S = slot_entries(FMT), UNIT = so_fmt_unit(FMT);
    int rem = n_units % 8;
    bool on = r.warp < rem;
    uint32_t a[1][4][4] = {}, w[2][8] = {};
    if (on)
        take_units<NT, 1>(f, n_units / 8, &place, a);
#pragma unroll
    for (int q = 0; q < T; q++) {
        if (q % S == 0)
            wait_slot(r);
        if (on) {
            so_decode<FMT, 0>(w[q % 2], r.ring + r.slot * SLOT + (q % S * rem + r.warp) * UNIT,
                              r.lane);
            if (!pairs_tiles(NT))
                multiply_unit<NT, 1>(a[0], w + q % 2, q, acc);
            else if (q % 2 == 1 || q == T - 1)
                multiply_unit<NT, 2>(a[0], w, q / 2 * 2, acc);
        }
        if (q % S == S - 1 || q == T - 1)
            next_slot(r);
    }
}

/* Where a warp's sums of tile `tile` are; float2 for each lane: outputs 2t and 2t+1 of row g. */
template <int NT> SO_DEVICE char *sums_at(const block &b, int warp, int tile) {
    static_assert(SO_MAX_TILES * NT * 256 <= x_bytes(NT),
                  "the sums use the memory of the warp's rows");
    return b.x + warp * x_bytes(NT) + tile * (NT * 256);
}

/* The sums of tile q, [row][output]. If tiles are multiplied in pairs, a lane has output g of rows 2t and 2t + 1. */
template <int NT> SO_DEVICE void put_sums(const float *acc, int q, int lane, char *sums) {
    if constexpr (pairs_tiles(NT)) {
        float *to = (float *)sums + lane % 4 * 16 + lane / 4;
        to[0] = acc[q % 2 * 2];
        to[8] = acc[q % 2 * 2 + 1];
    } else {
        for (int i = 0; i < NT; i++)
            *(float2 *)(sums + i * 256 + lane * 8) = make_float2(acc[2 * i], acc[2 * i + 1]);
    }
}

/* The product of T tiles and the rows, the warp's segment of it, to `sums`. */
template <int NT, int FMT, int T>
SO_DEVICE void multiply(reader &r, const feed &f, int n_units, char *sums) {
    constexpr int P = rounds_at_once(FMT, T);
    float acc[n_sums(NT, T)][4] = {};
    uint32_t a[P][4][4];
    int j = 0, full = n_units / 8, place = 0;
#pragma unroll 1
    for (; j + P <= full; j += P) {
        take_units<NT, P>(f, j, &place, a);
        set_multiplying(r, true);
        multiply_rounds<NT, FMT, T, P>(r, a, acc);
    }
    if constexpr (P > 1)
#pragma unroll 1
        for (; j < full; j++) {
            take_units<NT, 1>(f, j, &place, a);
            multiply_rounds<NT, FMT, T, 1>(r, a, acc);
        }
    if (n_units % 8 > 0)
        multiply_rest<NT, FMT, T>(r, f, n_units, place, acc);
    set_multiplying(r, false);
    so_copy_wait<0>();
    __syncwarp();
#pragma unroll
    for (int q = 0; q < T; q++)
        put_sums<NT>(acc[pairs_tiles(NT) ? q / 2 : q], q, r.lane, sums + q * (NT * 256));
}

/* Formats of weights that a kernel can have. */
enum {
    SET_F16 = 1 << SO_FMT_F16,
    SET_Q4 = 1 << SO_FMT_Q4_32_OFF,
    SET_QUANT = 1 << SO_FMT_Q4_32_OFF | 1 << SO_FMT_Q8_32 | 1 << SO_FMT_Q8_16,
};
__host__ __device__ constexpr bool one_format(int set) { return (set & (set - 1)) == 0; }

/* The same as a function that is called: with more than 8 rows, the loops of several formats, inlined into one
 * kernel, take minutes to compile. Saving registers for the call takes about a microsecond. Returns the slot and
 * the phase of the ring after it: 2 · slot + phase. */
template <int NT, int FMT, int T>
static __device__ __noinline__ int multiply_called(reader r, feed f, int n_units, char *sums) {
    multiply<NT, FMT, T>(r, f, n_units, sums);
    return 2 * r.slot + (int)r.phase;
}

/* The next smaller number of tiles that the loop is compiled for. */
__host__ __device__ constexpr int fewer_tiles(int n) {
    int less = n - 1;
    while (less > 0 && padded_tiles(less) != less)
        less--;
    return less;
}

/* multiply for a number of tiles that is known only here. */
template <int NT, int SET, int FMT, int T>
SO_DEVICE void multiply_tiles(reader &r, const feed &f, int n_units, int tiles, char *sums) {
    if (tiles != T) {
        if constexpr (T > 1)
            multiply_tiles<NT, SET, FMT, fewer_tiles(T)>(r, f, n_units, tiles, sums);
    } else if constexpr (one_format(SET) || NT == 1) {
        multiply<NT, FMT, T>(r, f, n_units, sums);
    } else {
        int at = multiply_called<NT, FMT, T>(r, f, n_units, sums);
        r.slot = at / 2;
        r.phase = at % 2;
    }
}

/* The same for a format that is known only here, one of SET. */
template <int NT, int SET, int MOST, int FMT = 0>
SO_DEVICE void multiply_any(reader &r, const feed &f, int n_units, int fmt, int tiles, char *sums) {
    if constexpr (SET >> FMT & 1)
        if (fmt == FMT)
            multiply_tiles<NT, SET, FMT, MOST>(r, f, n_units, tiles, sums);
    if constexpr (SET >> (FMT + 1) != 0)
        multiply_any<NT, SET, MOST, FMT + 1>(r, f, n_units, fmt, tiles, sums);
}

/* MOST: the largest number of tiles. */
template <int NT, int SET, int MOST>
SO_DEVICE void multiply_part(reader &r, const feed &f, int n_units, int fmt, int n_tiles,
                             char *sums) {
    if (n_tiles == 0)
        return;
    feed_begin<NT>(f);
    multiply_any<NT, SET, MOST>(r, f, n_units, fmt, padded_tiles(n_tiles), sums);
}

/* What the helper has fetched for the results of a product: numbers of the block's outputs, in the order
 * of its tiles. */
struct ahead {
    float factor[SO_MAX_TILES * SO_TILE], bias[SO_MAX_TILES * SO_TILE], norm[SO_MAX_ADD * SO_TILE];
    float scale[SO_PERSIST_ROWS];
};

/* The residual of the block's outputs. All additions have the same tiles, so it stays here from the first to the
 * last of them. */
struct residual {
    float of[SO_PERSIST_ROWS][SO_MAX_ADD * SO_TILE];
};

/* The results of outputs 2t and 2t + 1 of the block's tile. */
template <int NT>
SO_DEVICE float2 result_of(const block &b, const ahead &h, bool scaled, bool biased, int tile,
                           int row, int t) {
    int at = row / 8 * 256 + (row % 8 * 4 + t) * 8;
    float2 v = *(const float2 *)(sums_at<NT>(b, 0, tile) + at);
#pragma unroll
    for (int s = 1; s < SO_SEGMENTS; s++) {
        float2 u = *(const float2 *)(sums_at<NT>(b, s, tile) + at);
        v.x = __fadd_rn(v.x, u.x);
        v.y = __fadd_rn(v.y, u.y);
    }
    float2 f = *(const float2 *)&h.factor[tile * SO_TILE + 2 * t];
    v.x = __fmul_rn(__fmul_rn(v.x, f.x), 16.0f);
    v.y = __fmul_rn(__fmul_rn(v.y, f.y), 16.0f);
    if (scaled) {
        v.x = __fmul_rn(v.x, h.scale[row]);
        v.y = __fmul_rn(v.y, h.scale[row]);
    }
    if (biased) {
        float2 c = *(const float2 *)&h.bias[tile * SO_TILE + 2 * t];
        v.x = __fadd_rn(v.x, c.x);
        v.y = __fadd_rn(v.y, c.y);
    }
    return v;
}

/* Calls f(tile, row, t) for t = 0 … 3 of all rows of n_tiles tiles; the four are adjacent lanes. */
template <int NT, class F> SO_DEVICE void each_result(const block &b, int n_tiles, F f) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n_tiles * NT * 32; i += CONSUMERS * 32)
        if (i / 4 % (NT * 8) < b.n)
            f(i / (NT * 32), i / 4 % (NT * 8), i % 4);
}

template <int NT>
SO_DEVICE void finish_qkv(const block &b, const so_persist_work &w, const ahead &h) {
    int n0 = tiles_of(w.product.m[0]), n1 = n0 + tiles_of(w.product.m[1]),
        n2 = n1 + tiles_of(w.product.m[2]);
    bool scaled = w.product.squares;
    each_result<NT>(b, n2, [&](int tile, int row, int t) {
        int i = (tile >= n0) + (tile >= n1);
        const so_persist_matrix &m = w.product.m[i];
        int col = (first_of(m) + tile - (i == 0 ? 0 : i == 1 ? n0 : n1)) * SO_TILE + 2 * t;
        float2 v = result_of<NT>(b, h, scaled, m.bias, tile, row, t);
        give_floats(w.product.out[i], ((size_t)row * m.layout.n_tiles * SO_TILE + col) * 4, v.x,
                    v.y);
    });
}

template <int NT>
SO_DEVICE void finish_add(const block &b, const so_persist_work &w, const ahead &h) {
    const so_persist_matrix &m = w.product.m[0];
    int first = first_of(m), width = m.layout.n_tiles * SO_TILE;
    bool scaled = w.product.squares, normed = w.product.norm;
    each_result<NT>(b, tiles_of(m), [&](int r, int row, int t) {
        int col = (first + r) * SO_TILE + 2 * t, at = r * SO_TILE + 2 * t;
        float2 v = result_of<NT>(b, h, scaled, m.bias, r, row, t),
               *sum = (float2 *)&b.residual->of[row][at];
        v.x = __fadd_rn(sum->x, v.x);
        v.y = __fadd_rn(sum->y, v.y);
        *sum = v;
        if (normed) {
            float2 g = *(const float2 *)&h.norm[at];
            give_halves(w.product.out[0], (size_t)row * w.product.out_stride + col * 2,
                        __fmul_rn(v.x, g.x), __fmul_rn(v.y, g.y));
            float q = __fadd_rn(__fmul_rn(v.x, v.x), __fmul_rn(v.y, v.y));
            unsigned mask = 0xfu << (threadIdx.x & 28);
            q = __fadd_rn(q, __shfl_xor_sync(mask, q, 1));
            q = __fadd_rn(q, __shfl_xor_sync(mask, q, 2));
            if (t == 0)
                give_float(w.product.squares_out, ((size_t)row * m.layout.n_tiles + first + r) * 4,
                           q);
        }
        if (w.product.last)
            *(float2 *)(w.product.residual + (size_t)row * width + col) = v;
    });
}

template <int NT>
SO_DEVICE void finish_out(const block &b, const so_persist_work &w, const ahead &h) {
    const so_persist_matrix &m = w.product.m[0];
    int first = first_of(m), width = m.layout.n_tiles * SO_TILE;
    each_result<NT>(b, tiles_of(m), [&](int tile, int row, int t) {
        *(float2 *)(w.product.result + (size_t)row * width + (first + tile) * SO_TILE + 2 * t) =
            result_of<NT>(b, h, false, m.bias, tile, row, t);
    });
}

template <int NT>
SO_DEVICE void finish_gated(const block &b, const so_persist_work &w, const ahead &h) {
    const so_persist_matrix &gate = w.product.m[0], &up = w.product.m[1];
    int first = first_of(gate), tiles = tiles_of(gate);
    bool scaled = w.product.squares;
    each_result<NT>(b, tiles, [&](int r, int row, int t) {
        int col = (first + r) * SO_TILE + 2 * t;
        float2 g = result_of<NT>(b, h, scaled, gate.bias, r, row, t),
               u = result_of<NT>(b, h, scaled, up.bias, tiles + r, row, t);
        give_halves(w.product.out[0], (size_t)row * w.product.out_stride + col * 2,
                    so_combine(w.product.act, g.x, u.x), so_combine(w.product.act, g.y, u.y));
    });
}

/* The warp's part of all sums of a product. If v has a format of its own, it is multiplied first, and its sums
 * wait in b.side until those of q and k have freed the memory of the activations. */
template <int NT, int SET>
SO_DEVICE void multiply_all(block &b, const so_persist_work &w, const feed &f, int n_units) {
    int n_tiles = __shfl_sync(0xffffffffu, tiles_of_all(w), 0),
        fmt = __shfl_sync(0xffffffffu, w.product.m[0].fmt, 0), n_side = 0;
    char *sums = sums_at<NT>(b, b.warp, 0), *side = b.side + b.warp * (SO_MAX_KV * NT * 256);
    if (!one_format(SET) && w.kind == SO_PERSIST_QKV && w.product.m[2].fmt != fmt) {
        n_side = __shfl_sync(0xffffffffu, tiles_of(w.product.m[2]), 0);
        multiply_part<NT, SET, SO_MAX_KV>(
            b.r, f, n_units, __shfl_sync(0xffffffffu, w.product.m[2].fmt, 0), n_side, side);
        n_tiles -= n_side;
    }
    multiply_part<NT, SET, SO_MAX_TILES>(b.r, f, n_units, fmt, n_tiles, sums);
    __syncwarp();
    for (int i = b.lane; i < n_side * NT * 64; i += 32)
        ((float *)(sums + n_tiles * NT * 256))[i] = ((const float *)side)[i];
}

template <int NT, int SET>
SO_DEVICE void run_product(const persist_args &p, block &b, const so_persist_work &w) {
    int n_units = __shfl_sync(0xffffffffu, w.product.m[0].layout.n_units, 0),
        from = so_first_unit(n_units, b.warp),
        stride = w.product.x ? w.product.x_stride : p.x_stride;
    if (tiles_of_all(w) == 0) {
        sync_helper();
        return;
    }
    feed f;
    f.src = (w.product.x ? w.product.x : p.x) + (size_t)(b.lane / 4) * stride +
            from * (SO_UNIT * 2) + b.lane % 4 * 16;
    f.below = 8 * stride;
    f.zero = p.zero;
    f.count = so_first_unit(n_units, b.warp + 1) - from;
    f.on[0] = b.lane / 4 < b.n;
    f.on[1] = NT > 1 && b.lane / 4 + 8 < b.n;
    if (b.n > 2 && w.product.x)
        wait_last(f);
    multiply_all<NT, SET>(b, w, f, n_units);
    sync_helper();
    const ahead &h = b.ahead_of[w.number % AHEAD];
    if (w.number == p.lost && blockIdx.x == 0)
        ; /* a fault for tests */
    else if (w.kind == SO_PERSIST_GATED)
        finish_gated<NT>(b, w, h);
    else if (w.kind == SO_PERSIST_QKV)
        finish_qkv<NT>(b, w, h);
    else if (w.kind == SO_PERSIST_OUT)
        finish_out<NT>(b, w, h);
    else
        finish_add<NT>(b, w, h);
    sync_consumers(); /* the sums have been read: b.x is free */
}

#endif
