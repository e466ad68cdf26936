/* Matrix products of 17 rows or more, bit-identical to matmul.cu.
 *
 * A thread block computes 128 outputs (16 tiles) of ROWS rows. Unit by unit along K, weights and rows are
 * copied to a ring in shared memory that all warps read. Large blocks read little for each mma: per unit
 * 128 · 128 bytes of weights and ROWS · 128 of rows for 2 · ROWS mma. Two ways to multiply:
 *
 *   mma      4 of the 8 warps lie side by side along the outputs, 2 along the rows; each reads what it
 *            multiplies from shared memory.
 *   wgmma    (compute capability 9.0.) Each warp decodes the weights of 16 outputs, and the tensor cores
 *            read all rows from shared memory themselves. The same k in the same mma in the same order, so
 *            the same bits, which is not documented: the tests compare wide passes with narrow ones.
 *
 * With 16 tiles a matrix has few blocks, so there are several ways to divide K:
 *
 *   alone    The block goes through the 8 segments one after the other and adds each to its total.
 *   cluster  SPLIT = 8 or 4 thread blocks form a cluster. Each puts the sums of its one or two segments
 *            into its shared memory; then each adds those of its share of the rows, in order, and
 *            finishes them.
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
    DEEP_RING =
        216 << 10, /* of a block that has a multiprocessor of compute capability 9.0 to itself */
    MAX_STAGES = 8,
    SUM_STRIDE = OUTPUTS + 4, /* floats of a row of sums; a warp's 32 sums are in different banks */
    SWIZZLE = 1024, /* bytes after which the order of 16-byte pieces that wgmma reads repeats */
};

/* DEEP: with the larger ring. lag: how many units are in use at a time, the last of them by the tensor cores
 * alone. */
template <int FMT, int ROWS, int SPLIT, bool DEEP, bool WGMMA> struct wide_shape {
    static constexpr int unit = so_fmt_unit(FMT),
                         weights = (TILES * unit + SWIZZLE - 1) / SWIZZLE * SWIZZLE,
                         stage = weights + ROWS * SO_UNIT * 2,
                         fit = (DEEP ? DEEP_RING : RING) / stage,
                         stages = fit > MAX_STAGES ? MAX_STAGES : fit,
                         lag = WGMMA && stages > 3 ? 2 : 1,
                         kept = SPLIT == 1 ? 1 : SO_SEGMENTS / SPLIT, /* segments of a block */
        sums = kept * ROWS * SUM_STRIDE * 4;
    static_assert(stages > lag && sums <= RING, "one unit is copied while others are used");
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
    int row0, rank; /* rank: its number in a cluster, 0 if it is alone */
} job;

SO_DEVICE int items_per_block(const mm_args &p) { return combines(p) ? TILES / 2 : TILES; }

template <int ROWS, int SPLIT> SO_DEVICE job job_of(const mm_args &p) {
    int b = blockIdx.x / SPLIT, n_parts = (p.n + ROWS - 1) / ROWS;
    job w;
    w.rank = SPLIT > 1 ? cluster_rank() : 0;
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
    return {p.x.data + (size_t)min(row, p.n - 1) * p.x.stride + threadIdx.x % 8 * 8,
            (p.n - row + 31) / 32};
}

/* Copies unit u of the rows. For mma in the order in which lanes read them, [8 rows][half][lane] 16 bytes;
 * for wgmma row by row, piece c of row r in place c ^ r % 8. Rows that do not exist and what is beyond K
 * become zero. */
template <int ROWS, bool WGMMA>
SO_DEVICE void copy_rows(const mm_args &p, const row_source &s, int u, char *to) {
    int r = threadIdx.x / 8, c = threadIdx.x % 8;
    int n_bytes = max(0, min(16, (p.k - u * SO_UNIT - c * 8) * 2));
    const __half *x = s.x + u * SO_UNIT;
    to += r / 8 * 1024;
    to += WGMMA ? r % 8 * 128 + (c ^ r % 8) * 16 : c / 4 * 512 + (r % 8 * 4 + c % 4) * 16;
#pragma unroll
    for (int i = 0; i < ROWS / 32; i++)
        so_copy16(to + i * 4096, i < s.n_in ? x + (size_t)(32 * i) * p.x.stride : s.x,
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

/* ---- products by wgmma ---- */

/* What cp.async wrote becomes visible to wgmma, after a barrier also that of other threads. */
SO_DEVICE void publish_copies(void) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/* How wgmma finds the rows of a unit in shared memory: groups of 8 rows 1024 bytes apart, 128 bytes of
 * each row, their pieces in the order of copy_rows. */
SO_DEVICE uint64_t rows_descriptor(const char *rows) {
    uint64_t at = (uint32_t)__cvta_generic_to_shared(rows);
    return (at & 0x3ffff) >> 4 | 1ull << 16 | (uint64_t)(SWIZZLE >> 4) << 32 | 1ull << 62;
}

/* acc += 16 outputs of the warp (64 of the 4 warps) times ROWS rows, 16 k. Between wgmma_begin and
 * wgmma_wait nothing else may touch acc or a. */
#define D8(i)                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
        "+f"(d[i + 6]), "+f"(d[i + 7])
#define D16(i) D8(i), D8(i + 8)
template <int ROWS> SO_DEVICE void wgmma(float (*acc)[4], const uint32_t *a, uint64_t rows) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    float *d = acc[0];
    if constexpr (ROWS == 32)
        asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
                     "{%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
                     : D16(0)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
    else if constexpr (ROWS == 64)
        asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
                     "{%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
                     : D16(0), D16(16)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
    else
        asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
                     "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
                     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
                     "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
                     "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63}, "
                     "{%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
                     : D16(0), D16(16), D16(32), D16(48)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(rows));
#endif
}
#undef D8
#undef D16

SO_DEVICE void wgmma_begin(void) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

SO_DEVICE void wgmma_commit(void) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

/* Waits until all products have been added. */
SO_DEVICE void wgmma_wait(void) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#endif
}

/* Keeps the compiler from moving what computes or reads these registers across this place. */
template <int N> SO_DEVICE void settle(uint32_t *r) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(r[i])::"memory");
}
template <int N> SO_DEVICE void settle(float *r) {
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(r[i])::"memory");
}

/* Waits for the products that multiply_all has begun. */
template <int ROWS> SO_DEVICE void finish_products(float (*acc)[4]) {
    wgmma_wait();
    settle<ROWS / 2>(acc[0]);
}

/* acc += a pair of tiles times all rows, one unit. The tensor cores may still be multiplying when this
 * returns, so that the next unit is copied and decoded meanwhile; call finish_products before acc is read.
 * f: the weights being multiplied. The tensor cores read these registers until the wait. The compiler does
 * not know that and would decode the next weights into them, so `f & zero` keeps them in use until then
 * (zero is 0, but the compiler cannot tell). */
template <int FMT, int PART, int ROWS>
SO_DEVICE void multiply_all(float (*acc)[4], fragments &f, const char *pair, const char *rows,
                            int lane, uint32_t zero) {
    fragments next;
    decode<FMT, PART>(next, pair, pair + so_fmt_unit(FMT), lane);
    settle<16>(&next.a[0][0]);
    finish_products<ROWS>(acc);
#pragma unroll
    for (int i = 0; i < 16; i++)
        f.a[i / 4][i % 4] = (f.a[i / 4][i % 4] & zero) | next.a[i / 4][i % 4];
    uint64_t at = rows_descriptor(rows);
    settle<16>(&f.a[0][0]);
    wgmma_begin();
#pragma unroll
    for (int s = 0; s < 4; s++)
        wgmma<ROWS>(acc, f.a[s], at + s * 2); /* 32 bytes further */
    wgmma_commit();
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
    if (p.aligned) {
        so_put_half4(p.half_out, row, c.col, v);
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
template <int ROWS, int SPLIT> SO_DEVICE float4 sum4(const float *at) {
    constexpr int n = SPLIT > 1 ? SO_SEGMENTS : 1, each = n / SPLIT;
    float4 v[n], s;
#pragma unroll
    for (int i = 0; i < n; i++)
        v[i] = SPLIT > 1 ? cluster_load(at + i % each * ROWS * SUM_STRIDE, i / each)
                         : *(const float4 *)at;
    s = v[0];
#pragma unroll
    for (int i = 1; i < n; i++)
        s = make_float4(__fadd_rn(s.x, v[i].x), __fadd_rn(s.y, v[i].y), __fadd_rn(s.z, v[i].z),
                        __fadd_rn(s.w, v[i].w));
    return s;
}

/* sums: [ROWS][SUM_STRIDE]. A thread has the same outputs of rows `from`, `from` + step, … */
template <int ROWS, int SPLIT>
SO_DEVICE void finish_block(const mm_args &p, const job &w, const float *sums) {
    constexpr int BATCH = SPLIT > 1 ? 1 : 4, n_rows = ROWS / SPLIT;
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
            values_of(p, c, scale[i], sum4<ROWS, SPLIT>(sums + r * SUM_STRIDE), v);
            if (both)
                values_of(p, d, scale[i], sum4<ROWS, SPLIT>(sums + r * SUM_STRIDE + SO_TILE), u);
            finish4(p, c, row0 + r, v, u, add[i]);
        }
    }
}

/* ---- the kernel ---- */

template <int N> SO_DEVICE void take(float *total, float *acc, bool first) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        total[i] = first ? acc[i] : __fadd_rn(total[i], acc[i]);
        acc[i] = 0;
    }
}

/* Puts a warp's sums of pair q of tiles into shared memory. */
template <int GROUPS>
SO_DEVICE void store_sums(float *sums, float (*acc)[4], int pair, int row, int lane) {
#pragma unroll
    for (int j = 0; j < GROUPS; j++)
#pragma unroll
        for (int c = 0; c < 4; c++)
            sums[(row + j * SO_TILE + lane % 4 * 2 + c % 2) * SUM_STRIDE +
                 (pair * 2 + c / 2) * SO_TILE + lane / 4] = acc[j][c];
}

template <int FMT, int ROWS, int SPLIT, bool DEEP, bool WGMMA>
SO_DEVICE void run_block(const mm_args &p) {
    typedef wide_shape<FMT, ROWS, SPLIT, DEEP, WGMMA> Z;
    constexpr int ACROSS = WGMMA ? SO_WARPS : 4, PAIRS = TILES / 2 / ACROSS,
                  GROUPS = ROWS / SO_TILE / (SO_WARPS / ACROSS), N = PAIRS * GROUPS * 4,
                  EACH = SO_SEGMENTS / SPLIT;
    extern __shared__ __align__(SWIZZLE) char memory[];
    __shared__ tile_source tiles[TILES];
    __shared__ const char *where[Z::stages][TILES]; /* the next units to be copied */
    char *shared = memory + (0u - (uint32_t)__cvta_generic_to_shared(memory)) % SWIZZLE;
    so_start_next();
    int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32,
        a = warp % ACROSS, b = warp / ACROSS;
    job w = job_of<ROWS, SPLIT>(p);
    int first = w.rank * EACH, from = so_first_unit(p.n_units, first),
        end = so_first_unit(p.n_units, first + EACH);
    if (threadIdx.x < TILES)
        tiles[threadIdx.x] = source_of(p, w, threadIdx.x);
    unit_ref next = {from, first, 0}; /* the unit after those in `where` */
    for (int i = 0; i < Z::stages; i++, next = unit_after(next, p.n_units))
        if (threadIdx.x < TILES && next.u < end)
            where[i][threadIdx.x] = unit_at<FMT>(tiles[threadIdx.x], next);
    __syncthreads();
    for (int i = 0; i < Z::stages - Z::lag && from + i < end; i++)
        copy_weights<FMT>(where[i], shared + i * Z::stage);
    so_copy_commit();
    row_source rows = rows_of(p, w.row0);
    so_wait_prior();
    for (int i = 0; i < Z::stages - Z::lag; i++) {
        if (from + i < end)
            copy_rows<ROWS, WGMMA>(p, rows, from + i, shared + i * Z::stage + Z::weights);
        so_copy_commit();
    }
    uint32_t zero = (uint32_t)p.n >> 31;
    bool idle = w.row0 + b * GROUPS * SO_TILE >= p.n; /* none of the warp's rows exists */
    float acc[PAIRS][GROUPS][4] = {}, total[PAIRS][GROUPS][4] = {};
    fragments f = {};
    int segment = first, slot = 0;
    if (WGMMA)
        finish_products<ROWS>(acc[0]); /* none yet: it defines acc before the loop */
#pragma unroll 1
    for (int u = from; u < end; u++) {
        so_copy_wait<Z::stages - Z::lag - 1>();
        if (WGMMA)
            publish_copies();
        __syncthreads();
        int ahead = u + Z::stages - Z::lag,
            free = slot < Z::lag ? slot + Z::stages - Z::lag : slot - Z::lag;
        if (ahead < end) {
            char *to = shared + free * Z::stage;
            copy_weights<FMT>(where[free], to);
            copy_rows<ROWS, WGMMA>(p, rows, ahead, to + Z::weights);
            if (threadIdx.x < TILES && next.u < end)
                where[slot][threadIdx.x] = unit_at<FMT>(tiles[threadIdx.x], next);
            next = unit_after(next, p.n_units);
        }
        so_copy_commit();
        if (EACH > 1 && u == so_first_unit(p.n_units, segment + 1)) {
            if (WGMMA)
                finish_products<ROWS>(acc[0]);
            take<N>(&total[0][0][0], &acc[0][0][0], segment == first);
            segment++;
        }
        const char *at = shared + slot * Z::stage;
        const char *pairs = at + a * PAIRS * 2 * Z::unit, *x = at + Z::weights + b * GROUPS * 1024;
        if (WGMMA) {
            multiply_all<FMT, 0, ROWS>(acc[0], f, pairs, x, lane, zero);
            if (FMT == SO_FMT_F32)
                multiply_all<FMT, 1, ROWS>(acc[0], f, pairs, x, lane, zero);
            if (Z::lag == 1)
                finish_products<ROWS>(acc[0]);
        } else if (!idle) {
            multiply<FMT, 0, PAIRS, GROUPS>(acc, pairs, x, lane, zero);
            if (FMT == SO_FMT_F32)
                multiply<FMT, 1, PAIRS, GROUPS>(acc, pairs, x, lane, zero);
        }
        slot = slot + 1 == Z::stages ? 0 : slot + 1;
    }
    if (WGMMA)
        finish_products<ROWS>(acc[0]);
        /* The last segment, and zeros for those without units. A block of a cluster with two segments keeps
     * them apart: the first in total, the second in acc. */
#pragma unroll 1
    for (int s = segment; s < first + EACH - (SPLIT > 1); s++)
        take<N>(&total[0][0][0], &acc[0][0][0], s == first);
    so_copy_wait<0>();
    __syncthreads(); /* all warps have read the ring; the sums take its place */
    float *sums = (float *)shared;
#pragma unroll
    for (int q = 0; q < PAIRS; q++) {
        int pair = a * PAIRS + q, row = b * GROUPS * SO_TILE;
        if (EACH > 1)
            store_sums<GROUPS>(sums, total[q], pair, row, lane);
        if (SPLIT > 1)
            store_sums<GROUPS>(sums + (EACH - 1) * ROWS * SUM_STRIDE, acc[q], pair, row, lane);
    }
    if (SPLIT > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    finish_block<ROWS, SPLIT>(p, w, sums);
    if (SPLIT > 1) { /* other blocks read this one's sums */
        cluster_arrive();
        cluster_wait();
    }
}

/* Quantised rows are multiples of 32 long, so where there is wgmma they are always in its order. */
SO_DEVICE constexpr bool is_used(int fmt, bool wgmma) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    return wgmma || fmt <= SO_FMT_F32;
#else
    return !wgmma;
#endif
}

/* A block with more than one segment keeps their sums and those of the present one in registers: with 128
 * rows there is room for one block on a multiprocessor, otherwise for two. */
template <int FMT, int ROWS, int SPLIT, bool DEEP, bool WGMMA>
static __global__ void __launch_bounds__(THREADS, DEEP || (ROWS > 64 && SPLIT == 1) ? 1 : 2)
    wide(const __grid_constant__ mm_args p) {
    if constexpr (is_used(FMT, WGMMA))
        run_block<FMT, ROWS, SPLIT, DEEP, WGMMA>(p);
}

/* ---- launching ---- */

static int n_blocks(const mm_args &a, int rows) {
    int items = a.act == SO_OP_SILU_MUL || a.act == SO_OP_GELU_MUL ? TILES / 2 : TILES;
    return (a.n_items + items - 1) / items * ((a.n + rows - 1) / rows);
}

template <int FMT, int ROWS, int SPLIT, bool WGMMA, bool DEEP = false>
static void launch_wide(const so_queue &q, const mm_args &a) {
    typedef wide_shape<FMT, ROWS, SPLIT, DEEP, WGMMA> Z;
    int ring = Z::stages * Z::stage, shared = ring > Z::sums ? ring : Z::sums;
    so_launch_clusters(q, SPLIT, wide<FMT, ROWS, SPLIT, DEEP, WGMMA>,
                       dim3((unsigned)(n_blocks(a, ROWS) * SPLIT)), THREADS,
                       (size_t)(shared + SWIZZLE), a);
}

/* Into how many blocks K should be divided. Time is counted in units of the multiprocessor with the most
 * blocks; what every block does before and after them takes about as long as OVERHEAD units, or
 * CLUSTER_OVERHEAD with clusters, and is hidden by other blocks from the third round on. */
enum { OVERHEAD = 5, CLUSTER_OVERHEAD = 10 };
static int split_of(const so_queue &q, const mm_args &a, int rows) {
    int blocks = n_blocks(a, rows), units = (a.n_units + SO_SEGMENTS - 1) / SO_SEGMENTS, best = 1;
    int least = OVERHEAD + (blocks + q.n_sms - 1) / q.n_sms * SO_SEGMENTS * units;
    if (!q.cluster || blocks > 2 * q.n_sms) /* many blocks: only the sums would be more work */
        return 1;
    for (int split = 8; split >= 4; split /= 2) {
        if (split == 4 && rows > 64)
            break;
        /* two blocks fit a multiprocessor, but clusters do not fill the GPU */
        int at_once = 2 * q.n_sms * 9 / 10, rounds = (blocks * split + at_once - 1) / at_once,
            time = CLUSTER_OVERHEAD * (rounds < 2 ? rounds : 2) +
                   (blocks * split + q.n_sms - 1) / q.n_sms * (SO_SEGMENTS / split) * units;
        if (time < least) {
            least = time;
            best = split;
        }
    }
    return best;
}

template <int FMT, int ROWS, bool WGMMA>
static void launch_rows(const so_queue &q, const mm_args &a) {
    int split = split_of(q, a, ROWS);
    if (split == 8)
        return launch_wide<FMT, ROWS, 8, WGMMA>(q, a);
    if constexpr (ROWS <= 64)
        if (split == 4)
            return launch_wide<FMT, ROWS, 4, WGMMA>(q, a);
    if constexpr (WGMMA)
        if ((ROWS > 64 || n_blocks(a, ROWS) <= q.n_sms) && DEEP_RING + SWIZZLE <= q.shared_block)
            return launch_wide<FMT, ROWS, 1, WGMMA, true>(q, a);
    launch_wide<FMT, ROWS, 1, WGMMA>(q, a);
}

template <int FMT, bool WGMMA> static void launch(const so_queue &q, const mm_args &a) {
    if (a.n > 64)
        launch_rows<FMT, 128, WGMMA>(q, a);
    else if (a.n > 32)
        launch_rows<FMT, 64, WGMMA>(q, a);
    else
        launch_rows<FMT, 32, WGMMA>(q, a);
}

template <int FMT> void so_cuda_matmul_wide(const so_queue &q, const mm_args &a) {
#ifdef SO_WGMMA
    if (a.x.wgmma)
        return launch<FMT, true>(q, a);
#endif
    launch<FMT, false>(q, a);
}

template void so_cuda_matmul_wide<SO_FMT_F16>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_F32>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q8_32>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q8_16>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q8_32_OFF>(const so_queue &, const mm_args &);
template void so_cuda_matmul_wide<SO_FMT_Q4_32_OFF>(const so_queue &, const mm_args &);
