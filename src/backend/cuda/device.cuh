/* What all CUDA files share: the types behind backend.h's opaque names, the formats of packed
 * weights, and small device helpers.
 *
 * THE ARITHMETIC CONTRACT of this backend. As on the CPU, every output row is a function of its own
 * input row, with a reduction order fixed by index and shape alone. The bits differ from the CPU's,
 * and the same weights in another file type give other bits, but results never depend on the number
 * of rows, their order, or how the work is divided over the GPU.
 *
 *   products    Activations are multiplied by 2^-4 and rounded to fp16 (range ±10^6, 11 bits; what
 *               exceeds the range becomes infinity, which the caller sees as logits that are not
 *               finite). Weights are rounded to fp16 after division by a power of two for each
 *               output (its factor): for quantised types that is scale · q + offset, rounded once;
 *               F32 weights keep two fp16 numbers, high and low. The product is
 *               mma.m16n8k16 with float32 sums; weights may be its A operand and activations B, or
 *               the reverse, which gives the same bits (tests compare). K is divided into units of
 *               64, and the units into 8 segments of equal length, the first ones longer by one if
 *               8 does not divide their number. A segment is one chain of mma, four per unit
 *               (so_fmt states which k each one takes); for F32 four with the high parts, then four
 *               with the low parts. The 8 sums are added in order; the result is multiplied by the
 *               factor, by 2^4 and, after a split norm, by the row's scale; then the bias is added.
 *   norms       256 threads. Thread i adds x·x of elements 4i … 4i+3, 4i+1024 … 4i+1027, …, in order.
 *               The 32 lanes of a warp are added by exchanges with lane xor 16, 8, 4, 2, 1, then the
 *               8 warps in order.
 *   split norm  An RMS norm between a residual addition and products (launch.cu says when): the
 *               addition's kernel writes x · weight as the products' input and, for each 8 elements,
 *               the sum of x·x (pairs (e, e xor 1), then xor 2, then xor 4). A row's scale is
 *               1 / sqrt(sum / d + eps): lane i adds the sums i, i + 32, … in order, the lanes are
 *               added as above. The products' results are multiplied by it.
 *   attention   Chunks of 64 logical positions. In a chunk: the scores; their maximum; exp; the sum
 *               of exp over lanes (positions j and j + 32 first, then xor 16 … 1); the weighted sum
 *               of values as one chain over the positions. Chunk c is merged into running sum
 *               c mod 32. At the end the running sums are weighted by exp(m_i − max m) and added in
 *               order. attention.cu has the two ways of computing scores and values; which one is
 *               used depends on the cache's type and head size.
 *   sampling    Arithmetic and results of the host's sampler (base/exact.h, backend/sample_row.h), so that
 *               the token sampled from a row is the host's.
 *   the rest    One operation per element, rounded as written; exp is CUDA's expf. K and V are
 *               rounded when stored, and every row reads the rounded values.
 *
 * Products and sums that must round as written use the _rn intrinsics, so that the compiler cannot
 * contract them differently in two kernels. */
#ifndef SO_BACKEND_CUDA_DEVICE_CUH
#define SO_BACKEND_CUDA_DEVICE_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

extern "C" {
#define _Noreturn
#include "backend/backend.h"
}

#define SO_DEVICE static __device__ __forceinline__

/* Formats of packed weights. A tile is 8 outputs; a unit is 64 consecutive k. so_layout says where the
 * units are. An mma multiplies two tiles as rows 0 … 7 and 8 … 15 of its A operand, or one tile as its
 * B operand. Lane (g, t) = (lane / 4, lane % 4) of a warp holds output g of each tile and,
 * for each half h of the unit, 8 consecutive k from 32 h + 8 t on. Mma 2 h takes the first four of
 * these k, mma 2 h + 1 the last four: two of them as the instruction's k = 2t, 2t+1, the next two as
 * 2t+8, 2t+9. So a lane's 8 activations are 16 consecutive bytes of a row-major row, and a warp reads
 * 64 consecutive bytes of each of 8 rows.
 *
 *   F16    [2 halves][lane] 16 bytes: 8 numbers
 *   F32    two units of F16: high parts, low parts
 *   Q8     [lane] 16 unsigned bytes, 8 of each half; then scales
 *   Q4     [lane] 8 bytes: 8 unsigned 4-bit numbers of each half; then scales
 *
 * The scales follow the unit's numbers as fp16: for each output those of its groups of k, one after the
 * other. Formats with offsets store pairs (scale, offset). Formats without have signed numbers, stored
 * plus 128, and the offset is -128 scales. A small integer q in the low bits of an fp16 number is
 * the number q · 2^-24 (a subnormal), so scales are stored times 2^24 and one fused multiply-add makes a
 * weight: (q · 2^-24) · scale + offset. The factor of an output keeps its scales below 2^15. */
typedef enum so_fmt {
    SO_FMT_F16,
    SO_FMT_F32,
    SO_FMT_Q8_32,     /* groups of 32 k */
    SO_FMT_Q8_16,     /* groups of 16 k */
    SO_FMT_Q8_32_OFF, /* groups of 32 k, with offsets */
    SO_FMT_Q4_32_OFF,
    SO_FMT_COUNT
} so_fmt;

/* Shared memory that a thread block must be able to use; compute capability 8.6 has this much. */
enum { SO_SHARED_MIN = 99 << 10 };
enum { SO_TILE = 8, SO_UNIT = 64, SO_SEGMENTS = 8, SO_WARPS = 8 };
enum { SO_NARROW = 16 }; /* rows up to which products are those of matmul.cu or persist.cu */

__host__ __device__ constexpr int so_fmt_numbers(int f) {
    return f == SO_FMT_F16 ? 1024 : f == SO_FMT_F32 ? 2048 : f == SO_FMT_Q4_32_OFF ? 256 : 512;
}
/* What is added to a number so that it is stored without sign. */
__host__ __device__ constexpr int so_fmt_zero(int f) {
    return f == SO_FMT_Q8_32 || f == SO_FMT_Q8_16 ? 128 : 0;
}
/* Bytes of a unit of a tile, scales included. */
__host__ __device__ constexpr int so_fmt_unit(int f) {
    return so_fmt_numbers(f) + (f <= SO_FMT_F32 ? 0 : f == SO_FMT_Q8_32 ? 32 : 64);
}

struct so_buffer {
    char *data;
    size_t n_bytes;
};

/* The order of a matrix's units in memory. The tiles are divided between as many owners as the GPU has
 * multiprocessors, to within one. The units of an owner are consecutive, so that a persistent thread
 * block reads one stream (persist.cu). Within it, round j has the j-th unit of every segment, tile by
 * tile:
 *
 *   round 0: tile 0, segments 0 … 7; tile 1, segments 0 … 7; …     round 1: …
 *
 * If 8 does not divide the number of units, the last round has only the first `rem` segments. */
typedef struct so_layout {
    int n_tiles, n_units;
    int each, more; /* tiles of an owner; the first `more` owners have one more */
} so_layout;

static __host__ __device__ __forceinline__ so_layout so_layout_make(int n_tiles, int n_units,
                                                                    int n_owners) {
    return {n_tiles, n_units, n_tiles / n_owners, n_tiles % n_owners};
}

/* First tile of an owner. */
static __host__ __device__ __forceinline__ int so_first_tile(const so_layout &l, int owner) {
    return owner * l.each + (owner < l.more ? owner : l.more);
}

/* First unit of a segment. */
static __host__ __device__ __forceinline__ int so_first_unit(int n_units, int segment) {
    int full = n_units / 8, rem = n_units % 8;
    return segment * full + (segment < rem ? segment : rem);
}

/* Where the units of a tile are: unit j of segment s is number so_unit_of(place, j, s) of the matrix. */
typedef struct so_tile_place {
    int first, n_tiles, r; /* the owner's first unit and number of tiles; the tile among them */
} so_tile_place;

static __host__ __device__ __forceinline__ so_tile_place so_place_of(const so_layout &l, int tile) {
    int longer = l.more * (l.each + 1);
    int owner = tile < longer ? tile / (l.each + 1) : l.more + (tile - longer) / l.each;
    int first = so_first_tile(l, owner);
    return {first * l.n_units, l.each + (owner < l.more), tile - first};
}

static __host__ __device__ __forceinline__ int so_unit_of(const so_layout &l, so_tile_place t,
                                                          int j, int s) {
    int full = l.n_units / 8, rem = l.n_units % 8;
    return t.first + (j < full ? (j * t.n_tiles + t.r) * 8 : full * t.n_tiles * 8 + t.r * rem) + s;
}

/* Unit u of a tile, counted along k. */
static __host__ __device__ __forceinline__ int so_unit_at(const so_layout &l, so_tile_place t,
                                                          int u) {
    int full = l.n_units / 8, rem = l.n_units % 8, longer = rem * (full + 1);
    int s = u < longer ? u / (full + 1) : rem + (u - longer) / (full > 0 ? full : 1);
    return so_unit_of(l, t, u - so_first_unit(l.n_units, s), s);
}

struct so_weight {
    so_fmt fmt;
    so_dtype dtype;
    int m, k, n_units;
    so_layout layout;
    char *data;
    float *factor; /* [m] a power of two for each output */
};

struct so_kv_store {
    so_kv_shape shape;
    size_t entry; /* bytes of one head's entry, K or V */
    char *k, *v;  /* [page][layer][head][SO_KV_PAGE] entries */
};

/* ---- order between kernels ----
 *
 * On compute capability 9 a kernel may start before the previous one has ended (programmatic
 * dependent launch). Every kernel calls so_start_next first and so_wait_prior before it touches
 * anything that another kernel writes; before that it may read only weights and uploaded data.
 * Activations are read through L2 (so_load), since an SM's L1 may hold lines from before the wait. */
SO_DEVICE void so_start_next(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
SO_DEVICE void so_wait_prior(void) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <class T> SO_DEVICE T so_load(const T *p) { return __ldcg(p); }

/* Where kernels are queued, and how. */
typedef struct so_queue {
    cudaStream_t stream;
    bool overlap; /* programmatic dependent launch */
    bool persist; /* layers may be one persistent kernel (persist.cu) */
    bool cluster; /* the GPU has clusters of thread blocks */
    bool wgmma;   /* the GPU and the library have products by wgmma */
    int n_sms;
    int shared_block, shared_sm; /* shared memory in bytes: of a block, of an SM */
} so_queue;

/* Before and after the launch of a kernel with `shared` bytes of dynamic shared memory. More than 48 KB must be
 * allowed first, which is a setting of the kernel, not of the launch. Two backends on one GPU may launch
 * the same kernel from two threads, so a lock keeps both steps together. */
void so_cuda_begin_launch(const void *kernel, size_t shared);
void so_cuda_end_launch(void);

/* cluster: thread blocks of a cluster, along x. */
template <class... P, class... A>
static void so_launch_clusters(const so_queue &q, unsigned cluster, void (*kernel)(P...), dim3 grid,
                               unsigned threads, size_t shared, A... args) {
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute a[2] = {};
    unsigned n = 0;
    if (q.overlap) {
        a[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        a[n++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
        a[n].id = cudaLaunchAttributeClusterDimension;
        a[n].val.clusterDim.x = cluster;
        a[n].val.clusterDim.y = a[n].val.clusterDim.z = 1;
        n++;
    }
    c.gridDim = grid;
    c.blockDim = dim3(threads);
    c.dynamicSmemBytes = shared;
    c.stream = q.stream;
    c.attrs = a;
    c.numAttrs = n;
    so_cuda_begin_launch((const void *)kernel, shared);
    cudaLaunchKernelEx(&c, kernel, P(args)...); /* errors: cudaGetLastError, once per phase */
    so_cuda_end_launch();
}

template <class... P, class... A>
static void so_launch(const so_queue &q, void (*kernel)(P...), dim3 grid, unsigned threads,
                      size_t shared, A... args) {
    so_launch_clusters(q, 1, kernel, grid, threads, shared, args...);
}

/* ---- helpers ---- */

/* 16 bytes from global to shared memory, past L1; the last 16 - n_bytes are zero. */
SO_DEVICE void so_copy16(void *dst, const void *src, int n_bytes = 16) {
    uint32_t d = (uint32_t)__cvta_generic_to_shared(dst);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(d), "l"(src), "r"(n_bytes)
                 : "memory");
}
SO_DEVICE void so_copy_commit(void) { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> SO_DEVICE void so_copy_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

SO_DEVICE void so_mma(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

SO_DEVICE float so_warp_sum(float v) {
    for (int w = 16; w; w >>= 1)
        v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, w));
    return v;
}

SO_DEVICE float so_warp_max(float v) {
    for (int w = 16; w; w >>= 1)
        v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, w));
    return v;
}

/* Sum over a thread block of 256 threads, the same in all of them. */
SO_DEVICE float so_block_sum(float v) {
    __shared__ float part[8];
    v = so_warp_sum(v);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    float s = part[0];
    for (int i = 1; i < 8; i++)
        s = __fadd_rn(s, part[i]);
    __syncthreads();
    return s;
}

/* A row's scale in a split norm, from its d / 8 sums of squares; one warp. */
template <class F> SO_DEVICE float so_row_scale(int d, float eps, F square) {
    enum { BATCH = 16 }; /* read at once: a row of 4096 takes one trip to L2 */
    float s = 0;
    for (int i0 = threadIdx.x % 32; i0 < d / SO_TILE; i0 += 32 * BATCH) {
        float v[BATCH];
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            v[j] = i0 + 32 * j < d / SO_TILE ? square(i0 + 32 * j) : 0;
#pragma unroll
        for (int j = 0; j < BATCH; j++)
            if (i0 + 32 * j < d / SO_TILE)
                s = __fadd_rn(s, v[j]);
    }
    return __frsqrt_rn(__fadd_rn(__fdiv_rn(so_warp_sum(s), (float)d), eps));
}

SO_DEVICE float so_gelu(float x) {
    float u = __fmul_rn(0.7978845608f, __fmaf_rn(__fmul_rn(0.044715f, __fmul_rn(x, x)), x, x));
    return __fdiv_rn(x, __fadd_rn(1.0f, expf(__fmul_rn(-2.0f, u))));
}

/* SO_OP_ADD, SO_OP_SILU_MUL, SO_OP_GELU_MUL or SO_OP_GELU of one element. */
SO_DEVICE float so_combine(int kind, float a, float b) {
    switch (kind) {
    case SO_OP_ADD:
        return __fadd_rn(a, b);
    case SO_OP_SILU_MUL:
        return __fmul_rn(__fdiv_rn(a, __fadd_rn(1.0f, expf(-a))), b);
    case SO_OP_GELU_MUL:
        return __fmul_rn(so_gelu(a), b);
    default:
        return so_gelu(a);
    }
}

/* ---- activations as products read them ---- */

/* Row-major fp16; a row has `stride` numbers, the width rounded up to SO_UNIT. What lies between
 * width and stride is never read.
 *
 * The k that mma number s of a unit takes (so_fmt) are not consecutive, but wgmma wants them to be. For it
 * each 32 numbers of a row are stored in another order: number 8 t + 2 p + e in place 8 p + 2 t + e, for
 * t and p from 0 to 3. */
typedef struct so_half_rows {
    __half *data; /* NULL: not needed */
    int stride;
    bool wgmma; /* in that order; the width is a multiple of 32 */
} so_half_rows;

SO_DEVICE __half so_activation(float x) { return __float2half_rn(__fmul_rn(x, 0x1p-4f)); }

/* Where number i of a row is. Those of a pair (2 j, 2 j + 1) stay together. */
SO_DEVICE __half *so_half_at(const so_half_rows &h, int row, int i) {
    int place = h.wgmma ? (i & ~30) | (i & 6) << 2 | (i & 24) >> 2 : i;
    return h.data + (size_t)row * h.stride + place;
}
SO_DEVICE void so_put_half(const so_half_rows &h, int row, int i, float x) {
    if (h.data)
        *so_half_at(h, row, i) = so_activation(x);
}
/* Two numbers, i even. */
SO_DEVICE void so_put_half2(const so_half_rows &h, int row, int i, float x, float y) {
    if (h.data)
        *(__half2 *)so_half_at(h, row, i) = __halves2half2(so_activation(x), so_activation(y));
}
/* Four numbers, i a multiple of 4. */
SO_DEVICE void so_put_half4(const so_half_rows &h, int row, int i, const float *v) {
    if (!h.data)
        return;
    if (h.wgmma) {
        so_put_half2(h, row, i, v[0], v[1]);
        so_put_half2(h, row, i + 2, v[2], v[3]);
        return;
    }
    __half2 pair[2] = {__halves2half2(so_activation(v[0]), so_activation(v[1])),
                       __halves2half2(so_activation(v[2]), so_activation(v[3]))};
    *(uint2 *)so_half_at(h, row, i) = *(uint2 *)pair;
}

/* ---- launchers; each queues its kernels ---- */

/* Memory of the backend that operations use one after the other. */
typedef struct so_scratch {
    void *counters; /* zero before and after every kernel */
    float *parts;
    size_t counter_bytes, parts_bytes;
} so_scratch;

/* Sets the two sizes to what an operation needs. */
void so_cuda_scratch_need(const so_op *op, so_scratch *need);

enum { SO_MM_GROUP = 3 };
typedef struct so_product {
    const so_weight *w;
    const float *bias; /* or NULL */
    float *out;        /* or NULL: not wanted */
} so_product;

/* Products of the same rows with weights of one format, and what is done with the results. */
typedef struct so_products {
    so_product list[SO_MM_GROUP];
    int n_products, n;
    so_half_rows x;
    const float *add; /* not NULL: the last product's result is added to this */
    int act; /* SO_OP_SILU_MUL, SO_OP_GELU_MUL: act(first, second) → act_out; SO_OP_GELU: of
                         the only one; SO_OP_COUNT: none */
    float *act_out; /* or NULL */
    so_half_rows half_out;
    const float *row_scale; /* not NULL: results are multiplied by row_scale[row] */
    const float
        *norm; /* not NULL: half_out is (result of the addition) · norm[col], and the sums of
                               squares go to squares [row][m / 8] */
    float *squares;
} so_products;

void so_cuda_matmul(const so_queue &q, const so_products *p);
void so_cuda_to_half(const so_queue &q, const float *x, int n, int d, so_half_rows out);
/* The second half of a split norm: scale[row] from the sums of squares. */
void so_cuda_row_scale(const so_queue &q, const float *squares, int n, int d, float eps,
                       float *scale);
int so_cuda_weight_pack(so_weight *w, const so_tensor *t, int n_sms, cudaStream_t s, so_err *err);
void so_cuda_embed(const so_queue &q, const so_op *op);
/* Norms, elementwise operations, gather, rope, stores, argmax. Norms and elementwise operations also
 * write `half`; `keep`: their float32 results are wanted. */
void so_cuda_op(const so_queue &q, const so_op *op, so_half_rows half, bool keep,
                const so_scratch *s);
/* sample.cu: SO_OP_SAMPLE, and what it needs (0 for other operations). */
void so_cuda_sample(const so_queue &q, const so_op *op, const so_scratch *s);
void so_cuda_sample_need(const so_op *op, so_scratch *need);
/* Rope of q and of k, then the store of k and v. */
void so_cuda_rope_store(const so_queue &q, const so_op *rope_q, const so_op *rope_k,
                        const so_op *store);
/* Whether attention over such a cache fits into the shared memory of a block. */
bool so_cuda_heads_fit(const so_kv_shape *s, int shared_block);
void so_cuda_attention(const so_queue &q, const so_op *op, so_half_rows half, bool keep,
                       const so_scratch *s);

#endif
