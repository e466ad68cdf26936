/* Products in the persistent kernel (persist.cu). Consumer warp s computes segment s of all tiles of the
 * block. Activations are handed over by other blocks, so a warp fetches the units of its segment ahead and
 * checks each one before use. The eight sums of an output are added through shared memory. */
#ifndef SO_BACKEND_CUDA_PERSIST_PRODUCT_CUH
#define SO_BACKEND_CUDA_PERSIST_PRODUCT_CUH

#include "backend/cuda/persist_block.cuh"

/* ---- activations ---- */

/* The units of the warp's segment, fetched ahead into its part of b.x. A lane reads only what it has
 * fetched itself: 8 numbers of each half of a unit, of row lane / 4 and, if NT is 2, of the row 8 below. */
typedef struct feed {
    const char *src; /* the lane's first numbers of unit 0 */
    char *at;        /* where they go */
    int below;       /* from a row to the one 8 below, in bytes */
    int count;       /* units */
    bool on[2];      /* whether there are these rows */
    bool resident;   /* all units fit: they are fetched once for all matrices */
} feed;

template <int NT> SO_DEVICE void fetch_unit(const feed &f, int j, int slot) {
    for (int i = 0; i < NT; i++)
        if (f.on[i]) {
            const char *src = f.src + i * f.below + j * (SO_UNIT * 2);
            so_copy16(f.at + (slot * NT + i) * 1024, src);
            so_copy16(f.at + (slot * NT + i) * 1024 + 512, src + 64);
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
#pragma unroll
    for (int j = 0; j < DEPTH; j++) {
        if (j < f.count)
            fetch_unit<NT>(f, j, j);
        so_copy_commit();
    }
}

/* The unit in a slot of the feed: x[i] of row group i. Rows that do not exist hold anything. */
template <int NT> SO_DEVICE void read_unit(const feed &f, int slot, uint32_t (*x)[8]) {
    for (int i = 0; i < NT; i++)
        for (int h = 0; h < 2; h++)
            *(uint4 *)&x[i][4 * h] = *(const uint4 *)(f.at + (slot * NT + i) * 1024 + h * 512);
}

/* Two numbers are handed over as one word. */
template <int NT> SO_DEVICE bool is_empty(const feed &f, const uint32_t (*x)[8]) {
    bool e[2] = {false, false};
    for (int i = 0; i < NT; i++)
        for (int j = 0; j < 8; j++)
            e[i] |= x[i][j] == 0xffffffffu;
    return (e[0] && f.on[0]) || (e[1] && f.on[1]);
}

/* Fetches unit j again until it has been handed over, and those after it, which are probably empty, too.
 * Not inlined, to keep the loop of a product short. */
template <int NT> static __device__ __noinline__ void poll_unit(feed f, int j, int slot) {
    spin s = {};
    uint32_t x[NT][8];
    do {
#pragma unroll 1
        for (int i = 0, to = slot; i < DEPTH && j + i < f.count; i++) {
            fetch_unit<NT>(f, j + i, to);
            to = to + 1 == DEPTH ? 0 : to + 1;
        }
        so_copy_commit();
        so_copy_wait<0>();
        read_unit<NT>(f, slot, x);
        spin_once(&s);
    } while (is_empty<NT>(f, x));
}

/* Unit j, when it has been fetched and handed over; then the one DEPTH further is fetched. */
template <int NT> SO_DEVICE void take_unit(const feed &f, int j, int slot, uint32_t (*x)[8]) {
    so_copy_wait<DEPTH - 1>();
    read_unit<NT>(f, slot, x);
    if (is_empty<NT>(f, x)) {
        poll_unit<NT>(f, j, slot);
        read_unit<NT>(f, slot, x);
    }
    __syncwarp();
    if (!f.resident && j + DEPTH < f.count)
        fetch_unit<NT>(f, j + DEPTH, slot);
    so_copy_commit();
}

/* ---- products ---- */

enum { BATCH = 4 }; /* tiles whose weights are in registers at once */

/* acc[r] += tile r times a unit of the rows, for n tiles. */
template <int NT, int N>
SO_DEVICE void multiply_units(float (*acc)[4], const uint32_t (*w)[8], const uint32_t (*x)[8],
                              int n) {
#pragma unroll
    for (int s = 0; s < 4; s++) {
        const uint32_t a[4] = {x[0][2 * s], NT > 1 ? x[NT - 1][2 * s] : 0u, x[0][2 * s + 1],
                               NT > 1 ? x[NT - 1][2 * s + 1] : 0u};
#pragma unroll
        for (int r = 0; r < N; r++)
            if (r < n)
                so_mma(acc[r], a, w[r][2 * s], w[r][2 * s + 1]);
    }
}

/* acc[r] += the block's tile r times the rows, the warp's segment. The loop runs with two warps on a
 * scheduler, so every instruction in it counts. */
template <int NT, int R>
SO_DEVICE void multiply(block &b, const so_persist_matrix &m, const feed &f, bool first,
                        float (*acc)[4]) {
    constexpr int unit_bytes = UNIT_BYTES, su = SLOT / UNIT_BYTES;
    int tiles = tiles_of(m), n_units = m.layout.n_units, full = n_units / 8, rem = n_units % 8,
        passed = 0, in_slot = 0, slot = 0;
    if (tiles == 0)
        return;
    bool fetched = !first && f.resident;
    if (!first && !f.resident)
        feed_begin<NT>(f);
    wait_slot(b);
    const char *at = b.ring + b.slot * SLOT + b.warp * unit_bytes;
#pragma unroll 1
    for (int j = 0; j < full; j++) {
        uint32_t x[NT][8];
        if (fetched)
            read_unit<NT>(f, slot, x);
        else
            take_unit<NT>(f, j, slot, x);
        slot = slot + 1 == DEPTH ? 0 : slot + 1;
#pragma unroll
        for (int r0 = 0; r0 < R; r0 += BATCH)
            if (r0 < tiles) {
                uint32_t w[BATCH][8];
#pragma unroll
                for (int r = 0; r < BATCH && r0 + r < R; r++)
                    if (r0 + r < tiles) {
                        if (in_slot == su) {
                            next_slot(b);
                            wait_slot(b);
                            at = b.ring + b.slot * SLOT + b.warp * unit_bytes;
                            in_slot = 0;
                            passed++;
                        }
                        so_decode<SO_FMT_F16, 0>(w[r], at, b.lane);
                        at += 8 * unit_bytes;
                        in_slot += 8;
                    }
                multiply_units<NT, (R < BATCH ? R : BATCH)>(acc + r0, w, x, tiles - r0);
            }
    }
    if (rem > 0) { /* the last round */
        bool on = b.warp < rem;
        uint32_t x[NT][8];
        if (on && fetched)
            read_unit<NT>(f, slot, x);
        else if (on)
            take_unit<NT>(f, full, slot, x);
#pragma unroll
        for (int r = 0; r < R; r++)
            if (r < tiles) {
                int unit = in_slot + r * rem + min(b.warp, rem - 1);
                for (; unit >= su; unit -= su, in_slot -= su, passed++) {
                    next_slot(b);
                    wait_slot(b);
                }
                uint32_t w[1][8];
                so_decode<SO_FMT_F16, 0>(w[0], b.ring + b.slot * SLOT + unit * unit_bytes, b.lane);
                if (on)
                    multiply_units<NT, 1>(acc + r, w, x, 1);
            }
    }
    for (int end = (tiles * n_units + su - 1) / su; passed < end; passed++) {
        next_slot(b);
        if (passed + 1 < end)
            wait_slot(b);
    }
}

/* Where the warp's sums of tile `tile` are; float2 for each lane: outputs 2t and 2t+1 of row g. */
template <int NT> SO_DEVICE char *sums_at(const block &b, int warp, int tile) {
    return b.x + warp * (DEPTH * NT * 1024) + tile * (NT * 256);
}

template <int NT> SO_DEVICE void put_sums(const block &b, int tile0, int n, const float (*acc)[4]) {
    for (int r = 0; r < n; r++)
        for (int i = 0; i < NT; i++)
            *(float2 *)(sums_at<NT>(b, b.warp, tile0 + r) + i * 256 + b.lane * 8) =
                make_float2(acc[r][2 * i], acc[r][2 * i + 1]);
}

/* What the helper has fetched for the results of a product: numbers of the block's outputs, in the order
 * of its tiles. */
struct ahead {
    float factor[SO_MAX_TILES * SO_TILE], bias[SO_MAX_TILES * SO_TILE], norm[SO_MAX_ADD * SO_TILE];
    float residual[SO_PERSIST_ROWS][SO_MAX_ADD * SO_TILE];
    float scale[SO_PERSIST_ROWS];
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
template <class F> SO_DEVICE void each_result(const block &b, int n_tiles, F f) {
#pragma unroll 1
    for (int i = threadIdx.x; i < n_tiles * b.n * 4; i += CONSUMERS * 32) {
        int tile = b.n == 1 ? i / 4 : i / 4 / b.n;
        f(tile, i / 4 - tile * b.n, i % 4);
    }
}

template <int NT>
SO_DEVICE void finish_qkv(const block &b, const so_persist_work &w, const ahead &h) {
    int n0 = tiles_of(w.product.m[0]), n1 = n0 + tiles_of(w.product.m[1]),
        n2 = n1 + tiles_of(w.product.m[2]);
    bool scaled = w.product.squares;
    each_result(b, n2, [&](int tile, int row, int t) {
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
    each_result(b, tiles_of(m), [&](int r, int row, int t) {
        int col = (first + r) * SO_TILE + 2 * t, at = r * SO_TILE + 2 * t;
        float2 v = result_of<NT>(b, h, scaled, m.bias, r, row, t),
               old = *(const float2 *)&h.residual[row][at];
        v.x = __fadd_rn(old.x, v.x);
        v.y = __fadd_rn(old.y, v.y);
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
        *(float2 *)(w.product.residual + (size_t)row * width + col) = v;
    });
}

template <int NT>
SO_DEVICE void finish_gated(const block &b, const so_persist_work &w, const ahead &h) {
    const so_persist_matrix &gate = w.product.m[0], &up = w.product.m[1];
    int first = first_of(gate), tiles = tiles_of(gate);
    bool scaled = w.product.squares;
    each_result(b, tiles, [&](int r, int row, int t) {
        int col = (first + r) * SO_TILE + 2 * t;
        float2 g = result_of<NT>(b, h, scaled, gate.bias, r, row, t),
               u = result_of<NT>(b, h, scaled, up.bias, tiles + r, row, t);
        give_halves(w.product.out[0], (size_t)row * w.product.out_stride + col * 2,
                    so_combine(w.product.act, g.x, u.x), so_combine(w.product.act, g.y, u.y));
    });
}

template <int NT>
SO_DEVICE void run_product(const persist_args &p, block &b, const so_persist_work &w, int number) {
    int n_units = w.product.m[0].layout.n_units, from = so_first_unit(n_units, b.warp),
        stride = w.product.x ? w.product.x_stride : p.x_stride;
    feed f;
    f.src = (w.product.x ? w.product.x : p.x) + (size_t)(b.lane / 4) * stride +
            from * (SO_UNIT * 2) + b.lane % 4 * 16;
    f.at = b.x + b.warp * (DEPTH * NT * 1024) + b.lane * 16;
    f.below = 8 * stride;
    f.count = so_first_unit(n_units, b.warp + 1) - from;
    f.on[0] = b.lane / 4 < b.n;
    f.on[1] = NT > 1 && b.lane / 4 + 8 < b.n;
    f.resident = (n_units + 7) / 8 <= DEPTH;
    if (!has_tiles(w)) {
        sync_helper();
        return;
    }
    if (b.n > 2 && w.product.x)
        wait_last(f);
    feed_begin<NT>(f);
    bool any = tiles_of(w.product.m[0]) > 0;
    if (w.kind == SO_PERSIST_GATED) {
        float acc[2 * SO_MAX_GATED][4] = {};
        int tiles = tiles_of(w.product.m[0]);
        multiply<NT, SO_MAX_GATED>(b, w.product.m[0], f, true, acc);
        multiply<NT, SO_MAX_GATED>(b, w.product.m[1], f, false, acc + SO_MAX_GATED);
        so_copy_wait<0>();
#pragma unroll
        for (int r = 0; r < SO_MAX_GATED; r++)
            if (r < tiles) {
                put_sums<NT>(b, r, 1, acc + r);
                put_sums<NT>(b, tiles + r, 1, acc + SO_MAX_GATED + r);
            }
    } else if (w.kind == SO_PERSIST_QKV) {
        float acc[SO_MAX_Q + 2 * SO_MAX_KV][4] = {};
        int q = tiles_of(w.product.m[0]), kt = tiles_of(w.product.m[1]),
            vt = tiles_of(w.product.m[2]);
        multiply<NT, SO_MAX_Q>(b, w.product.m[0], f, true, acc);
        multiply<NT, SO_MAX_KV>(b, w.product.m[1], f, !any, acc + SO_MAX_Q);
        multiply<NT, SO_MAX_KV>(b, w.product.m[2], f, !any && kt == 0, acc + SO_MAX_Q + SO_MAX_KV);
        so_copy_wait<0>();
#pragma unroll
        for (int r = 0; r < SO_MAX_Q; r++)
            if (r < q)
                put_sums<NT>(b, r, 1, acc + r);
#pragma unroll
        for (int r = 0; r < SO_MAX_KV; r++) {
            if (r < kt)
                put_sums<NT>(b, q + r, 1, acc + SO_MAX_Q + r);
            if (r < vt)
                put_sums<NT>(b, q + kt + r, 1, acc + SO_MAX_Q + SO_MAX_KV + r);
        }
    } else {
        float acc[SO_MAX_ADD][4] = {};
        multiply<NT, SO_MAX_ADD>(b, w.product.m[0], f, true, acc);
        so_copy_wait<0>();
#pragma unroll
        for (int r = 0; r < SO_MAX_ADD; r++)
            if (r < tiles_of(w.product.m[0]))
                put_sums<NT>(b, r, 1, acc + r);
    }
    sync_helper();
    const ahead &h = b.ahead_of[number % 2];
    if (w.kind == SO_PERSIST_GATED)
        finish_gated<NT>(b, w, h);
    else if (w.kind == SO_PERSIST_QKV)
        finish_qkv<NT>(b, w, h);
    else
        finish_add<NT>(b, w, h);
    sync_consumers(); /* the sums have been read: b.x is free */
}

#endif
