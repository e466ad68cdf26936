/* Matrix products on the tensor cores, and the packing of weights for them.
 *
 * The contract is in device.cuh. Two kernels compute it, with the same bits:
 *
 *   small   up to 32 rows at a time. A block owns one tile of 16 outputs; its 8 warps are the 8 segments
 *           of K, so that every warp streams weights from its own place and no sum crosses blocks.
 *   large   64 rows at a time. A block owns 8 tiles; each warp computes one tile over all segments, one
 *           after the other, and the warps share the rows through shared memory.
 *
 * Weights are read once, as one ascending stream per warp. */
#include <math.h>
#include <stdlib.h>

#include "backend/cuda/device.cuh"

extern "C" {
#include "format/quant.h"
}

/* ---- splitting activations ---- */

static __global__ void split_rows(const float *x, int k, so_split out) {
    so_split_row_any(x + (size_t)blockIdx.x * k, blockIdx.x, k, out);
}

void so_cuda_split(cudaStream_t s, const float *x, int n, int k, const so_split *out) {
    split_rows<<<n, 256, 0, s>>>(x, k, *out);
}

/* ---- products ---- */

typedef struct mm_args {
    const char *w;
    const float *factor, *bias, *add;
    so_split x;
    float *out;
    int m, n, n_steps;
} mm_args;

typedef struct mm_group {
    mm_args p[SO_MM_GROUP];
    int first_tile[SO_MM_GROUP]; /* of the grid; unused ones are past its end */
} mm_group;

SO_DEVICE void mma_f16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

SO_DEVICE void mma_bf16(float *c, const uint32_t *a, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__host__ __device__ constexpr bool fmt_quantised(int f) { return f >= SO_FMT_Q8_32; }
__host__ __device__ constexpr int fmt_lane_bytes(int f) {
    return f == SO_FMT_Q4_32_OFF ? 8 : f == SO_FMT_F32 ? 64 : 16 * (fmt_quantised(f) ? 1 : 2);
} /* of a pair of steps */
__host__ __device__ constexpr int fmt_scale_bytes(int f) {
    return f == SO_FMT_Q8_32                                                     ? 32
           : f == SO_FMT_Q8_16 || f == SO_FMT_Q8_32_OFF || f == SO_FMT_Q4_32_OFF ? 64
                                                                                 : 0;
}
__host__ __device__ constexpr int fmt_pair_bytes(int f) {
    return 32 * fmt_lane_bytes(f) + fmt_scale_bytes(f);
} /* of a tile */

/* 16 int8 of a lane, as two fragments of halves. */
SO_DEVICE void unpack_q8(uint4 q, uint32_t a[2][4]) {
    const uint32_t w[4] = {q.x, q.y, q.z, q.w};
    const __half2 off = __half2half2(__ushort_as_half(0x6480)); /* 1152 = 1024 + 128 */
    for (int i = 0; i < 4; i++) {
        uint32_t u = w[i] ^ 0x80808080u;
        uint32_t lo = __byte_perm(u, 0x64006400u, 0x7150), hi = __byte_perm(u, 0x64006400u, 0x7352);
        __half2 p = __hsub2(*(__half2 *)&lo, off), r = __hsub2(*(__half2 *)&hi, off);
        a[i / 2][i % 2 * 2] = *(uint32_t *)&p;
        a[i / 2][i % 2 * 2 + 1] = *(uint32_t *)&r;
    }
}

/* 16 numbers of 4 bits, number 2j + i of a step at bit 4j + 16i of its word. */
SO_DEVICE void unpack_q4(uint2 q, uint32_t a[2][4]) {
    const uint32_t w[2] = {q.x, q.y};
    const __half2 off = __half2half2(__ushort_as_half(0x6400)); /* 1024 */
    for (int s = 0; s < 2; s++)
        for (int j = 0; j < 4; j++) {
            uint32_t u = (w[s] >> 4 * j & 0x000f000fu) | 0x64006400u;
            __half2 p = __hsub2(*(__half2 *)&u, off);
            a[s][j] = *(uint32_t *)&p;
        }
}

/* A pair of steps of one tile: weights from `w`, rows from b(step, j), added to acc[NT]. */
template <int FMT, int NT, class B>
SO_DEVICE void pair_of_steps(const char *w, int lane, B b, const float *sums, int sums_stride,
                             float (*acc)[4]) {
    if (!fmt_quantised(FMT)) {
        for (int s = 0; s < 2; s++) {
            if (FMT == SO_FMT_F32) {
                uint4 h = *(const uint4 *)(w + (s * 64 + lane) * 16),
                      l = *(const uint4 *)(w + (s * 64 + 32 + lane) * 16);
                const uint32_t ah[4] = {h.x, h.y, h.z, h.w}, al[4] = {l.x, l.y, l.z, l.w};
                for (int j = 0; j < NT; j++) {
                    uint4 v = b(s, j);
                    mma_bf16(acc[j], ah, v.x, v.y);
                    mma_bf16(acc[j], ah, v.z, v.w);
                    mma_bf16(acc[j], al, v.x, v.y);
                }
                continue;
            }
            uint4 q = *(const uint4 *)(w + (s * 32 + lane) * 16);
            const uint32_t a[4] = {q.x, q.y, q.z, q.w};
            for (int j = 0; j < NT; j++) {
                uint4 v = b(s, j);
                if (FMT == SO_FMT_BF16) {
                    mma_bf16(acc[j], a, v.x, v.y);
                    mma_bf16(acc[j], a, v.z, v.w);
                } else {
                    mma_f16(acc[j], a, v.x, v.y);
                    mma_f16(acc[j], a, v.z, v.w);
                }
            }
        }
        return;
    }
    uint32_t a[2][4];
    if (FMT == SO_FMT_Q4_32_OFF)
        unpack_q4(*(const uint2 *)(w + lane * 8), a);
    else
        unpack_q8(*(const uint4 *)(w + lane * 16), a);
    const __half *sc = (const __half *)(w + 32 * fmt_lane_bytes(FMT));
    int g = lane / 4, t = lane % 4;
    constexpr int groups = FMT == SO_FMT_Q8_16 ? 2 : 1;
    for (int k = 0; k < groups; k++) {
        float d0 = __half2float(sc[k * 16 + g]), d1 = __half2float(sc[k * 16 + g + 8]);
        for (int j = 0; j < NT; j++) {
            float dot[4] = {0, 0, 0, 0};
            for (int s = groups == 2 ? k : 0; s < (groups == 2 ? k + 1 : 2); s++) {
                uint4 v = b(s, j);
                mma_f16(dot, a[s], v.x, v.y);
                mma_f16(dot, a[s], v.z, v.w);
            }
            acc[j][0] = __fmaf_rn(d0, dot[0], acc[j][0]);
            acc[j][1] = __fmaf_rn(d0, dot[1], acc[j][1]);
            acc[j][2] = __fmaf_rn(d1, dot[2], acc[j][2]);
            acc[j][3] = __fmaf_rn(d1, dot[3], acc[j][3]);
        }
    }
    if (FMT == SO_FMT_Q8_32_OFF || FMT == SO_FMT_Q4_32_OFF) {
        float o0 = __half2float(sc[16 + g]), o1 = __half2float(sc[16 + g + 8]);
        for (int j = 0; j < NT; j++) {
            const float *s0 = sums + (size_t)(j * 8 + 2 * t) * sums_stride;
            float a0 = s0[0], a1 = s0[sums_stride];
            acc[j][0] = __fmaf_rn(o0, a0, acc[j][0]);
            acc[j][1] = __fmaf_rn(o0, a1, acc[j][1]);
            acc[j][2] = __fmaf_rn(o1, a0, acc[j][2]);
            acc[j][3] = __fmaf_rn(o1, a1, acc[j][3]);
        }
    }
}

/* Writes one number: factor of the weight's row, scale of the activation's row, bias, residual. */
SO_DEVICE void finish(const mm_args &p, int row, int col, float acc) {
    if (row >= p.n || col >= p.m)
        return;
    float v = acc;
    if (p.factor)
        v = __fmul_rn(v, p.factor[col]);
    v = __fmul_rn(v, p.x.scale[row]);
    if (p.bias)
        v = __fadd_rn(v, p.bias[col]);
    size_t at = (size_t)row * p.m + col;
    if (p.add)
        v = __fadd_rn(p.add[at], v);
    p.out[at] = v;
}

template <int FMT, int NT>
static __global__ void __launch_bounds__(256) mm_small(const __grid_constant__ mm_group group) {
    __shared__ float part[SO_WARPS][NT][128];
    int which = (blockIdx.y >= group.first_tile[1]) + (blockIdx.y >= group.first_tile[2]);
    const mm_args &p = group.p[which];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32,
        tile = blockIdx.y - group.first_tile[which], first = blockIdx.x * NT;
    int pairs = p.n_steps / 2, per = (p.n_steps + 15) / 16; /* pairs of a segment */
    int from = min(warp * per, pairs), to = min(from + per, pairs);
    const char *w = p.w + ((size_t)tile * pairs + from) * fmt_pair_bytes(FMT);
    const uint4 *x = p.x.frag + ((size_t)first * p.n_steps + 2 * from) * 32 + lane;
    const float *sums = p.x.sums + (size_t)first * 8 * pairs + from;
    float acc[NT][4] = {};
#pragma unroll 4
    for (int i = from; i < to; i++) {
        pair_of_steps<FMT, NT>(
            w, lane, [&](int s, int j) { return x[((size_t)j * p.n_steps + s) * 32]; }, sums, pairs,
            acc);
        w += fmt_pair_bytes(FMT);
        x += 64;
        sums++;
    }
    for (int j = 0; j < NT; j++)
        *(float4 *)&part[warp][j][lane * 4] =
            make_float4(acc[j][0], acc[j][1], acc[j][2], acc[j][3]);
    __syncthreads();
    for (int i = threadIdx.x; i < NT * 128; i += 256) {
        int j = i / 128, l = i % 128 / 4, c = i % 4;
        float v = part[0][j][i % 128];
        for (int s = 1; s < SO_SEGMENTS; s++)
            v = __fadd_rn(v, part[s][j][i % 128]);
        finish(p, (first + j) * 8 + l % 4 * 2 + c % 2, tile * SO_TILE + l / 4 + c / 2 * 8, v);
    }
}

enum { LARGE_NT = 8, LARGE_PAIRS = 2 }; /* 64 rows; pairs of steps staged at once */

template <int FMT> static __global__ void __launch_bounds__(256) mm_large(mm_args p) {
    __shared__ uint4 stage[2][LARGE_PAIRS][2][LARGE_NT][32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * LARGE_NT;
    int tile = blockIdx.y * SO_WARPS + warp, n_tiles = (p.m + SO_TILE - 1) / SO_TILE;
    int pairs = p.n_steps / 2, per = (p.n_steps + 15) / 16, n_frags = (p.n + 7) / 8;
    bool on = tile < n_tiles;
    const char *w = p.w + (size_t)min(tile, n_tiles - 1) * pairs * fmt_pair_bytes(FMT);
    const float *sums = p.x.sums + (size_t)first * 8 * pairs;
    float total[LARGE_NT][4] = {}, acc[LARGE_NT][4] = {};
    auto load = [&](int from, int buf) {
        for (int i = threadIdx.x; i < LARGE_PAIRS * 2 * LARGE_NT * 32; i += 256) {
            int l = i % 32, j = i / 32 % LARGE_NT, s = i / 32 / LARGE_NT;
            int step = min(2 * from + s, p.n_steps - 1), f = min(first + j, n_frags - 1);
            uint32_t dst = (uint32_t)__cvta_generic_to_shared(&stage[buf][s / 2][s % 2][j][l]);
            const uint4 *src = p.x.frag + ((size_t)f * p.n_steps + step) * 32 + l;
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src));
        }
        asm volatile("cp.async.commit_group;");
    };
    load(0, 0);
    int segment = 0;
    for (int from = 0, buf = 0; from < pairs; from += LARGE_PAIRS, buf ^= 1) {
        if (from + LARGE_PAIRS < pairs)
            load(from + LARGE_PAIRS, buf ^ 1);
        else
            asm volatile("cp.async.commit_group;");
        asm volatile("cp.async.wait_group 1;");
        __syncthreads();
        for (int i = from; i < min(from + LARGE_PAIRS, pairs); i++) {
            if (i == (segment + 1) * per) {
                for (int j = 0; j < LARGE_NT; j++)
                    for (int c = 0; c < 4; c++) {
                        total[j][c] = segment ? __fadd_rn(total[j][c], acc[j][c]) : acc[j][c];
                        acc[j][c] = 0;
                    }
                segment++;
            }
            pair_of_steps<FMT, LARGE_NT>(
                w + (size_t)i * fmt_pair_bytes(FMT), lane,
                [&](int s, int j) { return stage[buf][i - from][s][j][lane]; }, sums + i, pairs,
                acc);
        }
        __syncthreads();
    }
    for (int s = segment; s < SO_SEGMENTS; s++) /* the last one, and empty ones, which add zero */
        for (int j = 0; j < LARGE_NT; j++)
            for (int c = 0; c < 4; c++) {
                float v = s == segment ? acc[j][c] : 0.0f;
                total[j][c] = s ? __fadd_rn(total[j][c], v) : v;
            }
    if (on)
        for (int j = 0; j < LARGE_NT; j++)
            for (int c = 0; c < 4; c++)
                finish(p, (first + j) * 8 + lane % 4 * 2 + c % 2,
                       tile * SO_TILE + lane / 4 + c / 2 * 8, total[j][c]);
}

enum {
    SMALL_FRAGS = 24
}; /* up to 192 rows: more blocks with 32 rows each are faster than few with 64 */

template <int FMT> static void launch(cudaStream_t s, const mm_group &g, int n_products) {
    unsigned tiles = 0, frags = (unsigned)((g.p[0].n + 7) / 8);
    mm_group all = g;
    for (int i = 0; i < SO_MM_GROUP; i++) {
        all.first_tile[i] = (int)tiles;
        if (i < n_products)
            tiles += (unsigned)((g.p[i].m + SO_TILE - 1) / SO_TILE);
        else
            all.first_tile[i] = INT32_MAX;
    }
    if (frags == 1)
        mm_small<FMT, 1><<<dim3(1, tiles), 256, 0, s>>>(all);
    else if (frags == 2)
        mm_small<FMT, 2><<<dim3(1, tiles), 256, 0, s>>>(all);
    else if (frags <= SMALL_FRAGS)
        mm_small<FMT, 4><<<dim3((frags + 3) / 4, tiles), 256, 0, s>>>(all);
    else
        for (int i = 0; i < n_products; i++) {
            unsigned t = (unsigned)((g.p[i].m + SO_TILE - 1) / SO_TILE);
            mm_large<FMT><<<dim3((frags + LARGE_NT - 1) / LARGE_NT, (t + SO_WARPS - 1) / SO_WARPS),
                            256, 0, s>>>(g.p[i]);
        }
}

void so_cuda_matmul(cudaStream_t s, const so_product *list, int n_products, const so_split *x,
                    int n) {
    mm_group g;
    for (int i = 0; i < n_products; i++) {
        const so_weight *w = list[i].w;
        g.p[i] = {w->data, w->factor, list[i].bias, list[i].add, *x, list[i].out,
                  w->m,    n,         w->n_steps};
    }
    switch (list[0].w->fmt) {
    case SO_FMT_BF16:
        launch<SO_FMT_BF16>(s, g, n_products);
        break;
    case SO_FMT_F16:
        launch<SO_FMT_F16>(s, g, n_products);
        break;
    case SO_FMT_F32:
        launch<SO_FMT_F32>(s, g, n_products);
        break;
    case SO_FMT_Q8_32:
        launch<SO_FMT_Q8_32>(s, g, n_products);
        break;
    case SO_FMT_Q8_16:
        launch<SO_FMT_Q8_16>(s, g, n_products);
        break;
    case SO_FMT_Q8_32_OFF:
        launch<SO_FMT_Q8_32_OFF>(s, g, n_products);
        break;
    case SO_FMT_Q4_32_OFF:
        launch<SO_FMT_Q4_32_OFF>(s, g, n_products);
        break;
    case SO_FMT_COUNT:
        break;
    }
}
