/* What all CUDA files share: the types behind backend.h's opaque names, the formats of packed
 * weights, and small device helpers.
 *
 * THE ARITHMETIC CONTRACT of this backend. As on the CPU, every output row is a function of its own
 * input row with a reduction order fixed by shape alone; the bits differ from the CPU's, and between
 * weight formats, but never with the number of rows, their order or the launch configuration.
 *
 *   activations   a row is scaled by a power of two (largest magnitude just below 2^14) and split into
 *                 two halves-precision numbers, hi = half(x), lo = half(x - hi); BF16 weights use
 *                 bfloat16 for both and no scale. hi + lo has at least 16 correct bits.
 *   matmul        mma.m16n8k16 with weights as A (16 outputs x 16 k) and rows as B (16 k x 8 rows).
 *                 K is cut into 8 segments of ceil(steps / 8) steps of 16. Within a segment one chain:
 *                 step by step, hi then lo. Quantised formats run the chain over one group of 16 or 32
 *                 k from zero and add it by acc = fma(scale, dot, acc), then, if the format has
 *                 offsets, acc = fma(offset, sum of the group's x, acc). Segments are added in order.
 *                 The result is (acc * row factor of the weight) * 2^e of the row, plus the bias.
 *   norms, softmax  sums by thread-strided partial sums and a fixed tree over a fixed thread count.
 *   attention     chunks of 64 logical positions; chunk c is merged into running sum c mod 16, the 16
 *                 are merged in order. Positions not seen enter no sum.
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

/* Formats of packed weights. A tile is 16 outputs; a step is 16 k. The fragment of a lane is what
 * mma.m16n8k16 wants of matrix A: outputs g and g + 8 (g = lane / 4), k 2t, 2t+1, 2t+8, 2t+9
 * (t = lane % 4).
 *
 *   BF16, F16   [tile][step][lane] 8 numbers, 16 bytes
 *   F32         the same twice: hi and lo as bfloat16
 *   Q8          [tile][pair of steps] { [lane] 16 int8 in fragment order; [16] scales }
 *   Q4          [tile][pair of steps] { [lane] 16 unsigned 4-bit numbers; [16] scales and offsets }
 *
 * Scales and offsets are halves, relative to the row's factor. GROUP is 32 or 16 k; with 16 a pair of
 * steps has two lists of scales. */
typedef enum so_fmt {
    SO_FMT_BF16,
    SO_FMT_F16,
    SO_FMT_F32,
    SO_FMT_Q8_32,
    SO_FMT_Q8_16,
    SO_FMT_Q8_32_OFF,
    SO_FMT_Q4_32_OFF,
    SO_FMT_COUNT
} so_fmt;

enum { SO_TILE = 16, SO_STEP = 16, SO_SEGMENTS = 8, SO_WARPS = 8 };

struct so_buffer {
    char *data;
    size_t n_bytes;
};

struct so_weight {
    so_fmt fmt;
    so_dtype dtype;
    int m, k, n_steps; /* n_steps: of 16 k, even for quantised formats */
    char *data;
    float *factor; /* [m] row factors, a power of two each; NULL: all 1 */
};

struct so_kv_store {
    so_kv_shape shape;
    size_t entry; /* bytes of one head's entry, K or V */
    char *k, *v;  /* [page][layer][head][SO_KV_PAGE] entries */
};

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

/* Sum over a block of 256 threads, the same in all of them. */
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

SO_DEVICE float so_block_max(float v) {
    __shared__ float part[8];
    v = so_warp_max(v);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    float s = part[0];
    for (int i = 1; i < 8; i++)
        s = fmaxf(s, part[i]);
    __syncthreads();
    return s;
}

/* Activations of one product, split for the tensor cores. */
typedef struct so_split {
    uint4 *frag;  /* [row / 8][step][lane] {hi, lo} */
    float *scale; /* [row] 2^e */
    float *sums;  /* [row][k / 32] sums of each 32 scaled values */
    bool bf16;
} so_split;

/* Splits one row; all 256 threads of a block. */
template <bool BF16>
SO_DEVICE void so_split_row(const float *src, int row, int k, const so_split &out) {
    int n_steps = (k + 31) / 32 * 2, g = row % 8;
    float up = 1, down = 1;
    if (!BF16) {
        float m = 0;
        for (int i = threadIdx.x; i < k; i += 256)
            m = fmaxf(m, fabsf(src[i]));
        m = so_block_max(m);
        int e = 0;
        if (m > 0 && isfinite(m))
            frexpf(m, &e);
        e = max(-100, min(100, 14 - e));
        up = ldexpf(1, e);
        down = ldexpf(1, -e);
    }
    uint16_t *frag = (uint16_t *)(out.frag + (size_t)(row / 8) * n_steps * 32);
    for (int i = threadIdx.x; i < n_steps * 16; i += 256) {
        float v = i < k ? __fmul_rn(src[i], up) : 0.0f;
        int step = i / 16, kr = i % 16, lane = g * 4 + kr % 8 / 2;
        uint16_t *at = frag + ((size_t)step * 32 + lane) * 8 + kr / 8 * 2 + kr % 2;
        if (BF16) {
            __nv_bfloat16 hi = __float2bfloat16_rn(v),
                          lo = __float2bfloat16_rn(v - __bfloat162float(hi));
            at[0] = __bfloat16_as_ushort(hi);
            at[4] = __bfloat16_as_ushort(lo);
        } else {
            __half hi = __float2half_rn(v), lo = __float2half_rn(v - __half2float(hi));
            at[0] = __half_as_ushort(hi);
            at[4] = __half_as_ushort(lo);
            float s = so_warp_sum(v); /* 32 consecutive elements are the lanes of one warp */
            if (i % 32 == 0)
                out.sums[(size_t)row * (n_steps / 2) + i / 32] = s;
        }
    }
    if (threadIdx.x == 0)
        out.scale[row] = down;
}

SO_DEVICE void so_split_row_any(const float *src, int row, int k, const so_split &out) {
    if (out.bf16)
        so_split_row<true>(src, row, k, out);
    else
        so_split_row<false>(src, row, k, out);
}

/* Launchers; each queues its kernels on the stream. Where `split` is not NULL the kernel also splits
 * the rows it makes, for the products that follow. */
enum { SO_MM_GROUP = 3 };
typedef struct so_product {
    const so_weight *w;
    const float *bias, *add; /* or NULL; add: out = add + x·wᵀ */
    float *out;
} so_product;

void so_cuda_split(cudaStream_t s, const float *x, int n, int k, const so_split *out);
/* Products of the same rows with weights of one format. */
void so_cuda_matmul(cudaStream_t s, const so_product *list, int n_products, const so_split *x,
                    int n);
int so_cuda_weight_pack(so_weight *w, const so_tensor *t, cudaStream_t s, so_err *err);
void so_cuda_embed(cudaStream_t s, const so_weight *w, const int32_t *ids, float scale, int n,
                   float *out);
void so_cuda_op(cudaStream_t s, const so_op *op, const so_split *split);
/* Rope of q and of k, then the store of k and v. */
void so_cuda_rope_store(cudaStream_t s, const so_op *q, const so_op *k, const so_op *store);
void so_cuda_attention(cudaStream_t s, const so_op *op, float *parts, const so_split *split);
size_t so_cuda_attention_bytes(int n, int n_heads, int head_dim);

#endif
