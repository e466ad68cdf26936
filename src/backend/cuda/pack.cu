/* Weights from a file's blocks to the packed formats of device.cuh.
 *
 * Raw rows are uploaded in parts and packed by two kernels: the first finds each row's factor, the
 * power of two that brings its largest scale or offset below 1, the second writes the tiles. Which
 * format a dtype gets: Q4_0, Q4_1, Q4_K 4 bits with offsets; Q5_1, Q5_K 8 bits with offsets; Q8_0,
 * Q5_0 8 bits; Q6_K, Q3_K 8 bits with groups of 16; Q2_K halves. Integers are kept exactly; scales that
 * are products (K types) are rounded to halves. */
#include <math.h>
#include <string.h>

#include "backend/cuda/device.cuh"

extern "C" {
#include "format/blocks.h"
}

typedef struct element {
    int q;
    float scale, offset; /* x = scale * q + offset */
} element;

SO_DEVICE float half_at(const uint8_t *p) {
    return __half2float(__ushort_as_half((uint16_t)(p[0] | p[1] << 8)));
}

/* 6-bit scale and minimum of sub-block j of Q4_K and Q5_K. */
SO_DEVICE void scale_min(const uint8_t *s, int j, int *sc, int *mn) {
    if (j < 4) {
        *sc = s[j] & 63;
        *mn = s[j + 4] & 63;
    } else {
        *sc = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
        *mn = s[j + 4] >> 4 | (s[j] >> 6) << 4;
    }
}

SO_DEVICE element decode_k(int dtype, const uint8_t *b, int i) {
    element e = {0, 0, 0};
    if (dtype == SO_DTYPE_Q4_K || dtype == SO_DTYPE_Q5_K) {
        float d = half_at(b), dmin = half_at(b + 2);
        int sc, mn, j = i / 32;
        scale_min(b + 4, j, &sc, &mn);
        const uint8_t *qs = b + (dtype == SO_DTYPE_Q5_K ? 48 : 16), *qh = b + 16;
        int v = qs[j / 2 * 32 + i % 32];
        e.q = j % 2 ? v >> 4 : v & 15;
        if (dtype == SO_DTYPE_Q5_K)
            e.q |= (qh[i % 32] >> j & 1) << 4;
        e.scale = d * (float)sc;
        e.offset = -(dmin * (float)mn);
    } else if (dtype == SO_DTYPE_Q6_K) {
        int h = i / 128, k = i % 128;
        int lo = b[64 * h + k % 64], hi = b[128 + 32 * h + k % 32];
        e.q = ((k < 64 ? lo & 15 : lo >> 4) | (hi >> 2 * (k / 32) & 3) << 4) - 32;
        e.scale = half_at(b + 208) * (float)(int8_t)b[192 + i / 16];
    } else if (dtype == SO_DTYPE_Q3_K) {
        const uint8_t *hmask = b, *qs = b + 32, *sc = b + 96;
        int j = i / 16, p = i % 128 / 32, lo = qs[32 * (i / 128) + i % 32] >> 2 * p & 3;
        int s = (j < 8 ? sc[j] & 15 : sc[j - 8] >> 4) | (sc[8 + j % 4] >> 2 * (j / 4) & 3) << 4;
        e.q = (lo | (hmask[i % 32] >> (i / 32) & 1) << 2) - 4;
        e.scale = half_at(b + 108) * (float)(s - 32);
    } else { /* Q2_K */
        const uint8_t *sc = b, *qs = b + 16;
        e.q = qs[32 * (i / 128) + i % 32] >> 2 * (i % 128 / 32) & 3;
        e.scale = half_at(b + 80) * (float)(sc[i / 16] & 15);
        e.offset = -(half_at(b + 82) * (float)(sc[i / 16] >> 4));
    }
    return e;
}

SO_DEVICE element decode_32(int dtype, const uint8_t *b, int i) {
    element e = {0, half_at(b), 0};
    if (dtype == SO_DTYPE_Q8_0) {
        e.q = (int8_t)b[2 + i];
        return e;
    }
    bool has_m = dtype == SO_DTYPE_Q4_1 || dtype == SO_DTYPE_Q5_1,
         five = dtype == SO_DTYPE_Q5_0 || dtype == SO_DTYPE_Q5_1;
    const uint8_t *qh = b + (has_m ? 4 : 2), *qs = qh + (five ? 4 : 0);
    e.q = i < 16 ? qs[i] & 15 : qs[i - 16] >> 4;
    if (five)
        e.q |= (qh[i / 8] >> i % 8 & 1) << 4;
    if (has_m)
        e.offset = half_at(b + 2);
    else if (dtype == SO_DTYPE_Q4_0)
        e.offset = -8.0f * e.scale;
    else
        e.q -= 16;
    return e;
}

SO_DEVICE element decode(int dtype, const uint8_t *row, int i) {
    switch (dtype) {
    case SO_DTYPE_Q4_0:
        return decode_32(dtype, row + i / 32 * 18, i % 32);
    case SO_DTYPE_Q4_1:
        return decode_32(dtype, row + i / 32 * 20, i % 32);
    case SO_DTYPE_Q5_0:
        return decode_32(dtype, row + i / 32 * 22, i % 32);
    case SO_DTYPE_Q5_1:
        return decode_32(dtype, row + i / 32 * 24, i % 32);
    case SO_DTYPE_Q8_0:
        return decode_32(dtype, row + i / 32 * 34, i % 32);
    case SO_DTYPE_Q2_K:
        return decode_k(dtype, row + i / 256 * 84, i % 256);
    case SO_DTYPE_Q3_K:
        return decode_k(dtype, row + i / 256 * 110, i % 256);
    case SO_DTYPE_Q4_K:
        return decode_k(dtype, row + i / 256 * 144, i % 256);
    case SO_DTYPE_Q5_K:
        return decode_k(dtype, row + i / 256 * 176, i % 256);
    default:
        return decode_k(dtype, row + i / 256 * 210, i % 256);
    }
}

SO_DEVICE float float_at(int dtype, const uint8_t *row, int i) {
    if (dtype == SO_DTYPE_F32) {
        float f;
        memcpy(&f, row + 4 * (size_t)i, 4);
        return f;
    }
    if (dtype == SO_DTYPE_F16)
        return half_at(row + 2 * (size_t)i);
    if (dtype == SO_DTYPE_BF16)
        return __uint_as_float((uint32_t)(row[2 * (size_t)i] | row[2 * (size_t)i + 1] << 8) << 16);
    element e = decode(dtype, row, i);
    return e.scale * (float)e.q + e.offset;
}

/* One block of 256 threads per row. */
static __global__ void find_factor(int dtype, const uint8_t *raw, size_t row_bytes, int k,
                                   float *factor) {
    const uint8_t *row = raw + blockIdx.x * row_bytes;
    float m = 0;
    for (int i = threadIdx.x * 16; i < k; i += 256 * 16) {
        element e = decode(dtype, row, i);
        m = fmaxf(m, fmaxf(fabsf(e.scale), fabsf(e.offset)));
    }
    m = so_block_max(m);
    int x = 0;
    if (m > 0 && isfinite(m))
        frexpf(m, &x);
    if (threadIdx.x == 0)
        factor[blockIdx.x] = ldexpf(1, x);
}

typedef struct pack_args {
    so_fmt fmt;
    int dtype, n_rows, k, n_steps;
    const uint8_t *raw;
    size_t row_bytes, pair_bytes, lane_bytes;
    const float *factor; /* of the part's rows */
    char *out;           /* of the part's first tile */
} pack_args;

/* One block of 32 threads per tile and pair of steps; a thread is a lane. */
static __global__ void pack_tiles(pack_args p) {
    int tile = blockIdx.y, pair = blockIdx.x, lane = threadIdx.x;
    char *out = p.out + ((size_t)tile * (p.n_steps / 2) + pair) * p.pair_bytes;
    uint32_t q4[2] = {0, 0};
    for (int s = 0; s < 2; s++)
        for (int idx = 0; idx < 8; idx++) {
            int r = tile * SO_TILE + lane / 4 + idx / 2 % 2 * 8,
                i = (pair * 2 + s) * SO_STEP + lane % 4 * 2 + idx / 4 * 8 + idx % 2;
            bool in = r < p.n_rows && i < p.k;
            const uint8_t *row = p.raw + (size_t)(in ? r : 0) * p.row_bytes;
            if (p.fmt == SO_FMT_Q4_32_OFF) {
                q4[s] |= (in ? (uint32_t)decode(p.dtype, row, i).q : 0u)
                         << (4 * (idx / 2) + 16 * (idx % 2));
            } else if (p.fmt >= SO_FMT_Q8_32) {
                out[lane * 16 + s * 8 + idx] = (char)(in ? decode(p.dtype, row, i).q : 0);
            } else {
                float v = in ? float_at(p.dtype, row, i) : 0;
                if (p.fmt == SO_FMT_F16) {
                    ((__half *)out)[(s * 32 + lane) * 8 + idx] = __float2half_rn(v);
                } else {
                    __nv_bfloat16 hi = __float2bfloat16_rn(v);
                    size_t at = p.fmt == SO_FMT_F32 ? (size_t)(s * 64 + lane) * 8 + idx
                                                    : (size_t)(s * 32 + lane) * 8 + idx;
                    ((__nv_bfloat16 *)out)[at] = hi;
                    if (p.fmt == SO_FMT_F32)
                        ((__nv_bfloat16 *)out)[at + 256] =
                            __float2bfloat16_rn(v - __bfloat162float(hi));
                }
            }
        }
    if (p.fmt == SO_FMT_Q4_32_OFF)
        *(uint2 *)(out + lane * 8) = make_uint2(q4[0], q4[1]);
    if (p.fmt < SO_FMT_Q8_32)
        return;
    int r = tile * SO_TILE + lane % 16, list = lane / 16;
    bool in = r < p.n_rows && pair * 32 < p.k;
    const uint8_t *row = p.raw + (size_t)(in ? r : 0) * p.row_bytes;
    float inv = in ? 1 / p.factor[r] : 1;
    __half *scales = (__half *)(out + 32 * p.lane_bytes);
    if (p.fmt == SO_FMT_Q8_16) {
        scales[lane] =
            __float2half_rn(in ? decode(p.dtype, row, pair * 32 + list * 16).scale * inv : 0);
    } else {
        element e = {0, 0, 0};
        if (in)
            e = decode(p.dtype, row, pair * 32);
        if (list == 0)
            scales[lane] = __float2half_rn(e.scale * inv);
        else if (p.fmt != SO_FMT_Q8_32)
            scales[lane] = __float2half_rn(e.offset * inv);
    }
}

static so_fmt format_of(so_dtype t) {
    switch (t) {
    case SO_DTYPE_F32:
        return SO_FMT_F32;
    case SO_DTYPE_BF16:
        return SO_FMT_BF16;
    case SO_DTYPE_Q4_0:
    case SO_DTYPE_Q4_1:
    case SO_DTYPE_Q4_K:
        return SO_FMT_Q4_32_OFF;
    case SO_DTYPE_Q5_1:
    case SO_DTYPE_Q5_K:
        return SO_FMT_Q8_32_OFF;
    case SO_DTYPE_Q8_0:
    case SO_DTYPE_Q5_0:
        return SO_FMT_Q8_32;
    case SO_DTYPE_Q6_K:
    case SO_DTYPE_Q3_K:
        return SO_FMT_Q8_16;
    default:
        return SO_FMT_F16;
    }
}

static size_t lane_bytes(so_fmt f) {
    return f == SO_FMT_Q4_32_OFF ? 8 : f == SO_FMT_F32 ? 64 : f >= SO_FMT_Q8_32 ? 16 : 32;
}
static size_t pair_bytes(so_fmt f) {
    return 32 * lane_bytes(f) + (f == SO_FMT_Q8_32 ? 32 : f > SO_FMT_Q8_32 ? 64 : 0);
}

enum { PART_BYTES = 64 << 20 };

int so_cuda_weight_pack(so_weight *w, const so_tensor *t, cudaStream_t s, so_err *err) {
    w->fmt = format_of(t->dtype);
    w->dtype = t->dtype;
    w->k = (int)t->dims[0];
    w->m = (int)so_tensor_rows(t);
    w->n_steps = (w->k + 31) / 32 * 2;
    size_t row_bytes = so_dtype_row_bytes(t->dtype, w->k),
           tiles = (size_t)(w->m + SO_TILE - 1) / SO_TILE;
    size_t tile_bytes = (size_t)(w->n_steps / 2) * pair_bytes(w->fmt);
    size_t per = PART_BYTES / row_bytes / SO_TILE * SO_TILE;
    per = per < SO_TILE ? SO_TILE : per;
    uint8_t *raw = NULL;
    cudaError_t e = cudaMalloc(&w->data, tiles * tile_bytes);
    if (e == cudaSuccess)
        e = cudaMalloc(&raw, (per < (size_t)w->m ? per : (size_t)w->m) * row_bytes + 16);
    bool quantised = w->fmt >= SO_FMT_Q8_32;
    if (e == cudaSuccess && quantised)
        e = cudaMalloc(&w->factor, (size_t)w->m * sizeof(float));
    for (size_t r = 0; e == cudaSuccess && r < (size_t)w->m; r += per) {
        size_t n = (size_t)w->m - r < per ? (size_t)w->m - r : per;
        e = cudaMemcpyAsync(raw, (const char *)t->data + r * row_bytes, n * row_bytes,
                            cudaMemcpyHostToDevice, s);
        if (quantised)
            find_factor<<<(unsigned)n, 256, 0, s>>>(t->dtype, raw, row_bytes, w->k, w->factor + r);
        pack_args p = {w->fmt,
                       t->dtype,
                       (int)n,
                       w->k,
                       w->n_steps,
                       raw,
                       row_bytes,
                       pair_bytes(w->fmt),
                       lane_bytes(w->fmt),
                       quantised ? w->factor + r : NULL,
                       w->data + r / SO_TILE * tile_bytes};
        pack_tiles<<<dim3((unsigned)w->n_steps / 2, (unsigned)((n + SO_TILE - 1) / SO_TILE)), 32, 0,
                     s>>>(p);
        if (e == cudaSuccess)
            e = cudaStreamSynchronize(s);
    }
    if (e == cudaSuccess)
        e = cudaGetLastError();
    cudaFree(raw);
    if (e == cudaSuccess)
        return SO_OK;
    cudaFree(w->data);
    cudaFree(w->factor);
    return so_err_set(err, e == cudaErrorMemoryAllocation ? SO_ENOMEM : SO_EIO,
                      "%.*s: %zu MB of weights on the GPU: %s", SO_STR_ARG(t->name),
                      tiles * tile_bytes >> 20, cudaGetErrorString(e));
}

/* ---- rows of an embedding ---- */

static __global__ void embed_rows(so_weight w, const int32_t *ids, float scale, float *out) {
    int row = ids[blockIdx.x], r = row % SO_TILE;
    size_t pair = w.fmt == SO_FMT_Q4_32_OFF ? 320
                  : w.fmt == SO_FMT_F32     ? 2048
                  : w.fmt == SO_FMT_Q8_32   ? 544
                  : w.fmt > SO_FMT_Q8_32    ? 576
                                            : 1024;
    const char *tile = w.data + (size_t)(row / SO_TILE) * (w.n_steps / 2) * pair;
    for (int i = threadIdx.x; i < w.k; i += blockDim.x) {
        const char *p = tile + (size_t)(i / 32) * pair;
        int s = i / 16 % 2, kr = i % 16, lane = r % 8 * 4 + kr % 8 / 2,
            idx = kr / 8 * 4 + r / 8 * 2 + kr % 2;
        float v;
        if (w.fmt == SO_FMT_F16) {
            v = __half2float(((const __half *)p)[(s * 32 + lane) * 8 + idx]);
        } else if (w.fmt == SO_FMT_BF16) {
            v = __bfloat162float(((const __nv_bfloat16 *)p)[(s * 32 + lane) * 8 + idx]);
        } else if (w.fmt == SO_FMT_F32) {
            const __nv_bfloat16 *b = (const __nv_bfloat16 *)p + (s * 64 + lane) * 8 + idx;
            v = __fadd_rn(__bfloat162float(b[0]), __bfloat162float(b[256]));
        } else {
            bool four = w.fmt == SO_FMT_Q4_32_OFF;
            const __half *sc = (const __half *)(p + (four ? 256 : 512));
            int q = four ? (int)(((const uint32_t *)p)[lane * 2 + s] >>
                                     (4 * (idx / 2) + 16 * (idx % 2)) &
                                 15)
                         : (int)(int8_t)p[lane * 16 + s * 8 + idx];
            v = __fmul_rn((float)q, __half2float(sc[r + (w.fmt == SO_FMT_Q8_16 ? s * 16 : 0)]));
            if (four || w.fmt == SO_FMT_Q8_32_OFF)
                v = __fadd_rn(v, __half2float(sc[16 + r]));
            v = __fmul_rn(v, w.factor[row]);
        }
        out[(size_t)blockIdx.x * w.k + i] = __fmul_rn(v, scale);
    }
}

void so_cuda_embed(cudaStream_t s, const so_weight *w, const int32_t *ids, float scale, int n,
                   float *out) {
    embed_rows<<<n, 256, 0, s>>>(*w, ids, scale, out);
}
