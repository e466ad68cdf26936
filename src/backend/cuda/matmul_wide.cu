/* Matrix products of 17 rows or more, bit-identical to matmul.cu.
 *
 * A thread block computes 128 outputs (16 tiles) of ROWS rows. Unit by unit along K, weights and rows are
 * copied to a ring in shared memory that all warps read. ACROSS of the 8 warps lie side by side along the
 * outputs, the others along the rows. A large block reads little: per unit 128 · 128 bytes of weights and
 * ROWS · 128 of rows for 2 · ROWS mma. With 16 tiles a matrix has few blocks, though, so there are two ways
 * to divide K:
 *
 *   alone    The block goes through the 8 segments one after the other and adds each to its total.
 *   cluster  8 thread blocks, one for each segment, form a cluster. Each puts its sums into its shared
 *            memory; then each adds those of an eighth of the rows, in order, and finishes them.
 *
 * Blocks are numbered so that those of the same outputs run at the same time: weights are then read from
 * memory once, and rows stay in L2. At the end sums go through shared memory, so that a thread has four
 * consecutive outputs of several rows; it fetches what is added to all of them before it stores any. */
#include "backend/cuda/matmul.cuh"

enum {
    THREADS = 32 * SO_WARPS,
    TILES = 16, /* of a block */
    OUTPUTS = TILES * SO_TILE,
    RING = 96 << 10, /* fits every GPU, and twice a multiprocessor of compute capability 9.0 */
    MAX_STAGES = 6,
    SUM_STRIDE = OUTPUTS + 4, /* floats of a row of sums; a warp's 32 sums are in different banks */
};

template <int FMT, int ROWS> struct wide_shape {
    static constexpr int unit = so_fmt_unit(FMT), weights = TILES * unit,
                         stage = weights + ROWS * SO_UNIT * 2, fit = RING / stage,
                         stages = fit > MAX_STAGES ? MAX_STAGES : fit, sums = ROWS * SUM_STRIDE * 4;
    static_assert(stages >= 2 && sums <= RING, "one unit is copied while another one is used");
};

/* ---- clusters ---- */

SO_DEVICE int cluster_rank(void) {
    uint32_t r = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
#endif
    return (int)r;
}

SO_DEVICE void cluster_arrive(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

SO_DEVICE void cluster_wait(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

/* Four floats at the address `at` of the shared memory of another block. */
SO_DEVICE float4 cluster_load(const float *at, int rank) {
    float4 v = {0, 0, 0, 0};
#if __CUDA_ARCH__ >= 900
    uint32_t a = (uint32_t)__cvta_generic_to_shared(at), b;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(b) : "r"(a), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(b)
                 : "memory");
#endif
    return v;
}

/* ---- the work of a block ---- */

typedef struct job {
    int first, end; /* items */
    int row0, rank; /* rank: its segment in a cluster, 0 if it is alone */
} job;

SO_DEVICE int items_per_block(const mm_args &p) { return combines(p) ? TILES / 2 : TILES; }

template <int ROWS, bool CLUSTER> SO_DEVICE job job_of(const mm_args &p) {
    int b = CLUSTER ? blockIdx.x / SO_SEGMENTS : blockIdx.x, n_parts = (p.n + ROWS - 1) / ROWS;
    job w;
    w.rank = CLUSTER ? cluster_rank() : 0;
    w.row0 = b % n_parts * ROWS;
    w.first = b / n_parts * items_per_block(p);
    w.end = min(w.first + items_per_block(p), p.n_items);
    return w;
}

/* ---- copies ---- */

/* A unit along K: number u, the j-th of its segment. */
typedef struct unit_ref {
    int u, segment, j;
} unit_ref;

SO_DEVICE unit_ref unit_after(unit_ref c, int n_units) {
    bool last = c.j + 1 == n_units / SO_SEGMENTS + (c.segment < n_units % SO_SEGMENTS);
    return {c.u + 1, c.segment + last, last ? 0 : c.j + 1};
}

/* One tile of the block. */
typedef struct tile_source {
    const char *w;
    so_layout layout;
    so_tile_place place;
} tile_source;

/* If there is no tile in place i, the first one is copied in its stead, and the sums are not used. */
SO_DEVICE tile_source source_of(const mm_args &p, const job &w, int i) {
    tile_ref t = tile_of(p, w.first, w.end, i);
    if (t.which < 0)
        t = tile_of(p, w.first, w.end, 0);
    return {p.w[t.which], p.layout[t.which], place_of(p, t)};
}

template <int FMT> SO_DEVICE const char *unit_at(const tile_source &s, const unit_ref &c) {
    return s.w + (size_t)so_unit_of(s.layout, s.place, c.j, c.segment) * so_fmt_unit(FMT);
}

/* Copies a unit of the tiles. */
template <int FMT> SO_DEVICE void copy_weights(const char *const *from, char *to) {
    constexpr int pieces = so_fmt_unit(FMT) / 16;
#pragma unroll
    for (int n = 0; n < (TILES * pieces + THREADS - 1) / THREADS; n++) {
        int i = threadIdx.x + n * THREADS;
        if (TILES * pieces % THREADS == 0 || i < TILES * pieces)
            so_copy16(to + i * 16, from[i / pieces] + i % pieces * 16);
    }
}

/* The rows that a thread copies: every 32nd, 16 bytes of each unit. */
typedef struct row_source {
    const __half *x; /* the first; the last row of all if it does not exist */
    int n_in;        /* how many of them exist */
} row_source;

SO_DEVICE row_source rows_of(const mm_args &p, int row0) {
    int row = row0 + threadIdx.x / 8;
    return {p.x + (size_t)min(row, p.n - 1) * p.x_stride + threadIdx.x % 8 * 8,
            (p.n - row + 31) / 32};
}

/* Copies unit u of the rows, in the order in which lanes read them: [8 rows][half][lane] 16 bytes. Rows
 * that do not exist and what is beyond K become zero. */
template <int ROWS>
SO_DEVICE void copy_rows(const mm_args &p, const row_source &s, int u, char *to) {
    int r = threadIdx.x / 8, c = threadIdx.x % 8;
    int n_bytes = max(0, min(16, (p.k - u * SO_UNIT - c * 8) * 2));
    const __half *x = s.x + u * SO_UNIT;
    to += r / 8 * 1024 + c / 4 * 512 + (r % 8 * 4 + c % 4) * 16;
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++)
        so_copy16(to + i * 4096, i < s.n_in ? x + (size_t)(32 * i) * p.x_stride : s.x,
                  i < s.n_in ? n_bytes : 0);
}

/* ---- products ---- */

/* acc += PAIRS pairs of tiles times GROUPS groups of 8 rows, one unit; PART as in so_decode.
 *
 * An A operand is four consecutive registers from two tiles. If no arithmetic decodes the weights, the
 * compiler copies all four again before almost every mma. The exclusive or with `zero`, which is 0 but
 * unknown to the compiler, makes it put each weight into its place once. */
template <int FMT, int PART, int PAIRS, int GROUPS>
SO_DEVICE void multiply(float (*acc)[GROUPS][4], const char *tiles, const char *rows, int lane,
                        uint32_t zero) {
    fragments f[PAIRS];
#pragma unroll
    for (int q = 0; q < PAIRS; q++) {
        decode<FMT, PART>(f[q], tiles + 2 * q * so_fmt_unit(FMT),
                          tiles + (2 * q + 1) * so_fmt_unit(FMT), lane);
#pragma unroll
        for (int i = 0; i < 16 && FMT <= SO_FMT_F32; i++)
            f[q].a[i / 4][i % 4] ^= zero;
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        uint32_t x[GROUPS][4];
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
            *(uint4 *)x[j] = *(const uint4 *)(rows + j * 1024 + h * 512 + lane * 16);
#pragma unroll
        for (int s = 0; s < 2; s++)
#pragma unroll
            for (int q = 0; q < PAIRS; q++)
#pragma unroll
                for (int j = 0; j < GROUPS; j++)
                    so_mma(acc[q][j], f[q].a[2 * h + s], x[j][2 * s], x[j][2 * s + 1]);
    }
}

/* ---- what is done with the sums ---- */

/* Four consecutive outputs of a product. */
typedef struct columns {
    int which, col, m;
    float factor[4], bias[4], norm[4];
} columns;

SO_DEVICE columns columns_of(const mm_args &p, int which, int col) {
    columns c;
    c.which = which;
    c.col = col;
    c.m = p.m[which];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        bool in = col + i < c.m;
        c.factor[i] = in ? p.factor[which][col + i] : 0;
        c.bias[i] = in && p.bias[which] ? p.bias[which][col + i] : 0;
        c.norm[i] = in && p.norm ? p.norm[col + i] : 0;
    }
    return c;
}

SO_DEVICE float4 load4(const mm_args &p, const columns &c, const float *at) {
    if (p.aligned)
        return so_load((const float4 *)at);
    float v[4];
    for (int i = 0; i < 4; i++)
        v[i] = c.col + i < c.m ? so_load(at + i) : 0;
    return make_float4(v[0], v[1], v[2], v[3]);
}

SO_DEVICE void store4(const mm_args &p, const columns &c, float *at, const float *v) {
    if (p.aligned) {
        *(float4 *)at = make_float4(v[0], v[1], v[2], v[3]);
        return;
    }
    for (int i = 0; i < 4; i++)
        if (c.col + i < c.m)
            at[i] = v[i];
}

SO_DEVICE void store_half4(const mm_args &p, const columns &c, int row, const float *v) {
    if (!p.half_out.data)
        return;
    if (p.aligned) {
        __half2 a = __halves2half2(so_activation(v[0]), so_activation(v[1])),
                b = __halves2half2(so_activation(v[2]), so_activation(v[3]));
        *(uint2 *)(p.half_out.data + (size_t)row * p.half_out.stride + c.col) =
            make_uint2(so_bits_of(a), so_bits_of(b));
        return;
    }
    for (int i = 0; i < 4; i++)
        if (c.col + i < c.m)
            so_put_half(p.half_out, row, c.col + i, v[i]);
}

/* Values of one row from their sums. */
SO_DEVICE void values_of(const mm_args &p, const columns &c, float scale, float4 sum, float *v) {
    const float s[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        v[i] = value_of(s[i], c.factor[i], {p.row_scale != NULL, scale},
                        {p.bias[c.which] != NULL, c.bias[i]});
}

/* Finishes four outputs of one row. v, u: of the first and, if two products are combined, of the second;
 * add: what is added to v. */
SO_DEVICE void finish4(const mm_args &p, const columns &c, int row, float *v, const float *u,
                       float4 add) {
    size_t at = (size_t)row * c.m + c.col;
    if (p.act != SO_OP_COUNT) {
        if (p.act != SO_OP_GELU && p.out[1])
            store4(p, c, p.out[1] + at, u);
        if (p.out[c.which])
            store4(p, c, p.out[c.which] + at, v);
#pragma unroll
        for (int i = 0; i < 4; i++)
            v[i] = so_combine(p.act, v[i], u[i]);
        if (p.act_out)
            store4(p, c, p.act_out + at, v);
        store_half4(p, c, row, v);
        return;
    }
    if (p.add && c.which == p.n_products - 1) {
        v[0] = __fadd_rn(add.x, v[0]);
        v[1] = __fadd_rn(add.y, v[1]);
        v[2] = __fadd_rn(add.z, v[2]);
        v[3] = __fadd_rn(add.w, v[3]);
    }
    if (p.out[c.which])
        store4(p, c, p.out[c.which] + at, v);
    if (!p.norm)
        return;
    float x[4], q[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[i] = __fmul_rn(v[i], c.norm[i]);
        q[i] = __fmul_rn(v[i], v[i]);
    }
    store_half4(p, c, row, x);
    /* the next thread has the other half of the tile: a norm's width is a multiple of 8 */
    float sum = __fadd_rn(__fadd_rn(q[0], q[1]), __fadd_rn(q[2], q[3]));
    sum = __fadd_rn(sum, __shfl_xor_sync(3u << (threadIdx.x & 30), sum, 1));
    if (threadIdx.x % 2 == 0)
        p.squares[(size_t)row * (c.m / SO_TILE) + c.col / SO_TILE] = sum;
}

/* Four sums of the block, or of the segments of its cluster added in order. */
template <bool CLUSTER> SO_DEVICE float4 sum4(const float *at) {
    constexpr int n = CLUSTER ? SO_SEGMENTS : 1;
    float4 v[n], s;
#pragma unroll
    for (int i = 0; i < n; i++)
        v[i] = CLUSTER ? cluster_load(at, i) : *(const float4 *)at;
    s = v[0];
#pragma unroll
    for (int i = 1; i < n; i++)
        s = make_float4(__fadd_rn(s.x, v[i].x), __fadd_rn(s.y, v[i].y), __fadd_rn(s.z, v[i].z),
                        __fadd_rn(s.w, v[i].w));
    return s;
}

/* sums: [ROWS][SUM_STRIDE]. A thread has the same outputs of rows `from`, `from` + step, … */
template <int ROWS, bool CLUSTER>
SO_DEVICE void finish_block(const mm_args &p, const job &w, const float *sums) {
    constexpr int BATCH = CLUSTER ? 1 : 4, n_rows = CLUSTER ? ROWS / SO_SEGMENTS : ROWS;
    bool both = combines(p);
    int quads = OUTPUTS / (both ? 8 : 4), quad = threadIdx.x % quads, step = THREADS / quads;
    tile_ref t = tile_of(p, w.first, w.end, both ? quad / 2 * 2 : quad / 2);
    int col = t.tile * SO_TILE + quad % 2 * 4,
        place = both ? quad / 2 * 16 + quad % 2 * 4 : quad * 4;
    if (t.which < 0 || col >= p.m[t.which])
        return;
    columns c = columns_of(p, t.which, col), d = columns_of(p, both ? 1 : t.which, col);
    bool adds = p.add && t.which == p.n_products - 1;
    int row0 = w.row0 + w.rank * n_rows, end = min(n_rows, p.n - row0);
    sums += w.rank * n_rows * SUM_STRIDE + place;
#pragma unroll 1
    for (int from = threadIdx.x / quads; from < end; from += BATCH * step) {
        float4 add[BATCH] = {};
        float scale[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int row = row0 + min(from + i * step, end - 1);
            scale[i] = p.row_scale ? so_load(p.row_scale + row) : 1;
            if (adds)
                add[i] = load4(p, c, p.add + (size_t)row * c.m + col);
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            int r = from + i * step;
            if (r >= end)
                break;
            float v[4], u[4] = {};
            values_of(p, c, scale[i], sum4<CLUSTER>(sums + r * SUM_STRIDE), v);
            if (both)
                values_of(p, d, scale[i], sum4<CLUSTER>(sums + r * SUM_STRIDE + SO_TILE), u);
            finish4(p, c, row0 + r, v, u, add[i]);
        }
    }
}

/* ---- the kernel ---- */

/* A block that is alone keeps its sums and those of the segment in registers: with 128 rows there is room
 * for one block on a multiprocessor, otherwise for two. */
template <int FMT, int ROWS, int ACROSS, bool CLUSTER>
static __global__ void __launch_bounds__(THREADS, ROWS > 64 && !CLUSTER ? 1 : 2)
    wide(const __grid_constant__ mm_args p) {
    typedef wide_shape<FMT, ROWS> Z;
    constexpr int PAIRS = TILES / 2 / ACROSS, GROUPS = ROWS / SO_TILE / (SO_WARPS / ACROSS);
    extern __shared__ __align__(128) char shared[];
    __shared__ tile_source tiles[TILES];
    __shared__ const char *where[Z::stages][TILES]; /* the next units to be copied */
    so_start_next();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32,
        a = warp % ACROSS, b = warp / ACROSS;
    job w = job_of<ROWS, CLUSTER>(p);
    int from = CLUSTER ? so_first_unit(p.n_units, w.rank) : 0,
        end = CLUSTER ? so_first_unit(p.n_units, w.rank + 1) : p.n_units;
    if (threadIdx.x < TILES)
        tiles[threadIdx.x] = source_of(p, w, threadIdx.x);
    unit_ref next = {from, w.rank, 0}; /* the unit after those in `where` */
    for (int i = 0; i < Z::stages; i++, next = unit_after(next, p.n_units))
        if (threadIdx.x < TILES && next.u < end)
            where[i][threadIdx.x] = unit_at<FMT>(tiles[threadIdx.x], next);
    __syncthreads();
    for (int i = 0; i < Z::stages - 1 && from + i < end; i++)
        copy_weights<FMT>(where[i], shared + i * Z::stage);
    so_copy_commit();
    row_source rows = rows_of(p, w.row0);
    so_wait_prior();
    for (int i = 0; i < Z::stages - 1; i++) {
        if (from + i < end)
            copy_rows<ROWS>(p, rows, from + i, shared + i * Z::stage + Z::weights);
        so_copy_commit();
    }
    uint32_t zero = (uint32_t)p.n >> 31;
    bool idle = w.row0 + b * GROUPS * SO_TILE >= p.n; /* none of the warp's rows exists */
    float acc[PAIRS][GROUPS][4] = {}, total[PAIRS][GROUPS][4] = {};
    int segment = 0, slot = 0;
#pragma unroll 1
    for (int u = from; u < end; u++) {
        so_copy_wait<Z::stages - 2>();
        __syncthreads();
        int ahead = u + Z::stages - 1, free = slot == 0 ? Z::stages - 1 : slot - 1;
        if (ahead < end) {
            char *to = shared + free * Z::stage;
            copy_weights<FMT>(where[free], to);
            copy_rows<ROWS>(p, rows, ahead, to + Z::weights);
            if (threadIdx.x < TILES && next.u < end)
                where[slot][threadIdx.x] = unit_at<FMT>(tiles[threadIdx.x], next);
            next = unit_after(next, p.n_units);
        }
        so_copy_commit();
        if (!CLUSTER && u == so_first_unit(p.n_units, segment + 1)) {
#pragma unroll
            for (int i = 0; i < PAIRS * GROUPS * 4; i++) {
                float *s = &acc[0][0][i], *t = &total[0][0][i];
                *t = segment ? __fadd_rn(*t, *s) : *s;
                *s = 0;
            }
            segment++;
        }
        if (!idle) {
            const char *at = shared + slot * Z::stage;
            const char *pairs = at + a * PAIRS * 2 * Z::unit,
                       *x = at + Z::weights + b * GROUPS * 1024;
            multiply<FMT, 0, PAIRS, GROUPS>(acc, pairs, x, lane, zero);
            if (FMT == SO_FMT_F32)
                multiply<FMT, 1, PAIRS, GROUPS>(acc, pairs, x, lane, zero);
        }
        slot = slot + 1 == Z::stages ? 0 : slot + 1;
    }
#pragma unroll 1
    for (int s = CLUSTER ? SO_SEGMENTS : segment; s < SO_SEGMENTS; s++) /* zeros for empty ones */
#pragma unroll
        for (int i = 0; i < PAIRS * GROUPS * 4; i++) {
            float *t = &total[0][0][i], v = s == segment ? (&acc[0][0][i])[0] : 0.0f;
            *t = s ? __fadd_rn(*t, v) : v;
        }
    so_copy_wait<0>();
    __syncthreads(); /* all warps have read the ring; the sums take its place */
    float *sums = (float *)shared;
#pragma unroll
    for (int q = 0; q < PAIRS; q++)
#pragma unroll
        for (int j = 0; j < GROUPS; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                int row = (b * GROUPS + j) * SO_TILE + lane % 4 * 2 + c % 2,
                    col = ((a * PAIRS + q) * 2 + c / 2) * SO_TILE + lane / 4;
                sums[row * SUM_STRIDE + col] = CLUSTER ? acc[q][j][c] : total[q][j][c];
            }
    if (CLUSTER) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    finish_block<ROWS, CLUSTER>(p, w, sums);
    if (CLUSTER) { /* other blocks read this one's sums */
        cluster_arrive();
        cluster_wait();
    }
}

/* ---- launching ---- */

static int n_blocks(const mm_args &a, int rows) {
    int items = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL ? TILES / 2 : TILES;
    return (a.n_items + items - 1) / items * ((a.n + rows - 1) / rows);
}

template <int FMT, int ROWS, int ACROSS, bool CLUSTER>
static void launch_wide(const so_queue &q, const mm_args &a) {
    typedef wide_shape<FMT, ROWS> Z;
    int ring = Z::stages * Z::stage, shared = ring > Z::sums ? ring : Z::sums;
    so_launch_clusters(q, CLUSTER ? SO_SEGMENTS : 1, wide<FMT, ROWS, ACROSS, CLUSTER>,
                       dim3((unsigned)(n_blocks(a, ROWS) * (CLUSTER ? SO_SEGMENTS : 1))), THREADS,
                       (size_t)shared, a);
}

/* Whether clusters take less time, which is counted in segments: that of the multiprocessor with the most
 * blocks. Adding the sums of a cluster takes about as long as ADDING units. */
enum { ADDING = 2 };
static bool clusters_pay(const so_queue &q, const mm_args &a, int rows) {
    int blocks = n_blocks(a, rows), units = (a.n_units + SO_SEGMENTS - 1) / SO_SEGMENTS;
    int alone = (blocks + q.n_sms - 1) / q.n_sms * SO_SEGMENTS * units,
        split = (blocks * SO_SEGMENTS + q.n_sms - 1) / q.n_sms * (units + ADDING);
    return q.cluster && split < alone;
}

template <int FMT, int ROWS, int ACROSS>
static void launch_rows(const so_queue &q, const mm_args &a) {
    if (clusters_pay(q, a, ROWS))
        launch_wide<FMT, ROWS, ACROSS, true>(q, a);
    else
        launch_wide<FMT, ROWS, ACROSS, false>(q, a);
}

template <int FMT> void so_cuda_matmul_wide(const so_queue &q, const mm_args &a) {
    if (a.n > 64)
        launch_rows<FMT, 128, 4>(q, a);
    else if (a.n > 32)
        launch_rows<FMT, 64, 4>(q, a);
    else
        launch_rows<FMT, 32, 4>(q, a);
}

template void so_cuda_matmul_wide<SO_FMT_F16>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_F32>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q8_32>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q8_16>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q8_32_OFF>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q4_32_OFF>(const so_queue &, const mm_args &);
