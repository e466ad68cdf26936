/* Packs weights from a file's blocks into the formats of device.cuh, and reads rows of packed embeddings.
 *
 * Raw rows are uploaded in parts. A first kernel computes each row's factor, a power of two by which its
 * numbers are divided: for formats of integers the one that brings the largest |scale| below 2^-9, so that
 * it can be stored times 2^24 (device.cuh), and the largest |offset| below 2^15; for formats of fp16 numbers
 * the one that brings the largest number below 2^15. A second kernel writes the tiles. Types of the file and
 * their formats:
 *
 *   F32                   F32: high and low part
 *   F16, BF16, Q2_K       F16
 *   Q4_0, Q4_1, Q4_K      4-bit integers with offsets
 *   Q5_1, Q5_K            8-bit integers with offsets
 *   Q5_0, Q8_0            8-bit integers
 *   Q3_K, Q6_K            8-bit integers, groups of 16
 *
 * Quantised integers are stored exactly, except those of Q2_K, which becomes fp16 numbers. The scales and
 * offsets of K types are products and are rounded to fp16. */
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

SO_DEVICE float block_max(float v) {
    __shared__ float part[8];
    v = so_warp_max(v);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < 8; i++)
        v = fmaxf(v, part[i]);
    return v;
}

enum { SCALE_BITS = 24 }; /* integers enter the multiply-add as q · 2^-24 */

/* One thread block of 256 threads per row. */
static __global__ void find_factor(so_fmt fmt, int dtype, const uint8_t *raw, size_t row_bytes,
                                   int k, float *factor) {
    const uint8_t *row = raw + blockIdx.x * row_bytes;
    float m = 0; /* to be below 2^15 */
    if (fmt <= SO_FMT_F32) {
        for (int i = threadIdx.x; i < k; i += 256)
            m = fmaxf(m, fabsf(float_at(dtype, row, i)));
    } else {
        for (int i = threadIdx.x * 16; i < k; i += 256 * 16) {
            element e = decode(dtype, row, i);
            m = fmaxf(m, fmaxf(ldexpf(fabsf(e.scale), SCALE_BITS), fabsf(e.offset)));
        }
    }
    m = block_max(m);
    int x = 0;
    if (m > 0 && isfinite(m))
        frexpf(m, &x);
    if (threadIdx.x == 0)
        factor[blockIdx.x] = ldexpf(1, max(-120, min(120, x - 15)));
}

typedef struct pack_args {
    so_fmt fmt;
    int dtype, n_rows, k, tile0; /* tile0: first tile of this part */
    so_layout layout;
    const uint8_t *raw;
    size_t row_bytes;
    const float *factor; /* of the rows of this part */
    char *out;           /* the whole matrix */
} pack_args;

/* Scales of one unit; 32 threads. */
SO_DEVICE void pack_scales(const pack_args &p, int tile, int unit, char *out) {
    __half *scales = (__half *)(out + so_fmt_numbers(p.fmt));
    bool offsets = p.fmt == SO_FMT_Q8_32_OFF || p.fmt == SO_FMT_Q4_32_OFF;
    int group = p.fmt == SO_FMT_Q8_16 ? 16 : 32, n_groups = SO_UNIT / group;
    for (int i = threadIdx.x; i < n_groups * SO_TILE; i += 32) {
        int r = tile * SO_TILE + i / n_groups, k0 = unit * SO_UNIT + i % n_groups * group;
        element e = {0, 0, 0};
        float inv = 1;
        if (r < p.n_rows && k0 < p.k) {
            e = decode(p.dtype, p.raw + (size_t)r * p.row_bytes, k0);
            inv = 1 / p.factor[r];
        }
        scales[offsets ? 2 * i : i] = __float2half_rn(ldexpf(e.scale * inv, SCALE_BITS));
        if (offsets)
            scales[2 * i + 1] = __float2half_rn(e.offset * inv);
    }
}

/* One warp per tile and unit; thread i writes what lane i reads. */
static __global__ void pack_tiles(pack_args p) {
    int tile = blockIdx.y, unit = blockIdx.x, lane = threadIdx.x;
    so_tile_place place = so_place_of(p.layout, p.tile0 + tile);
    char *out = p.out + (size_t)so_unit_at(p.layout, place, unit) * so_fmt_unit(p.fmt);
    uint32_t q4[2] = {0, 0};
    int r = tile * SO_TILE + lane / 4;
    for (int j = 0; j < 16; j++) {
        int i = unit * SO_UNIT + j / 8 * 32 + lane % 4 * 8 + j % 8;
        bool in = r < p.n_rows && i < p.k;
        const uint8_t *row = p.raw + (size_t)(in ? r : 0) * p.row_bytes;
        if (p.fmt == SO_FMT_Q4_32_OFF) {
            q4[j / 8] |= (in ? (uint32_t)decode(p.dtype, row, i).q : 0u)
                         << (4 * (j % 8 / 2) + 16 * (j % 2));
        } else if (p.fmt > SO_FMT_F32) {
            out[lane * 16 + j] = (char)((in ? decode(p.dtype, row, i).q : 0) + so_fmt_zero(p.fmt));
        } else {
            float v = in ? float_at(p.dtype, row, i) / p.factor[r] : 0;
            __half hi = __float2half_rn(v);
            __half *at = (__half *)out + (j / 8 * 32 + lane) * 8 + j % 8;
            *at = hi;
            if (p.fmt == SO_FMT_F32)
                at[512] = __float2half_rn(isfinite(v) ? v - __half2float(hi) : 0);
        }
    }
    if (p.fmt == SO_FMT_Q4_32_OFF)
        *(uint2 *)(out + lane * 8) = make_uint2(q4[0], q4[1]);
    if (p.fmt > SO_FMT_F32)
        pack_scales(p, tile, unit, out);
}

static so_fmt format_of(so_dtype t) {
    switch (t) {
    case SO_DTYPE_F32:
        return SO_FMT_F32;
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

enum { PART_BYTES = 64 << 20 };

int so_cuda_weight_pack(so_weight *w, const so_tensor *t, int n_sms, cudaStream_t s, so_err *err) {
    w->fmt = format_of(t->dtype);
    w->dtype = t->dtype;
    w->k = (int)t->dims[0];
    w->m = (int)so_tensor_rows(t);
    w->n_units = (w->k + SO_UNIT - 1) / SO_UNIT;
    size_t row_bytes = so_dtype_row_bytes(t->dtype, w->k),
           tiles = (size_t)(w->m + SO_TILE - 1) / SO_TILE;
    size_t tile_bytes = (size_t)w->n_units * so_fmt_unit(w->fmt);
    w->layout = so_layout_make((int)tiles, w->n_units, n_sms);
    size_t per = PART_BYTES / row_bytes / SO_TILE * SO_TILE;
    per = per < SO_TILE ? SO_TILE : per > 65535 * SO_TILE ? 65535 * SO_TILE : per; /* grid's y */
    uint8_t *raw = NULL;
    cudaError_t e = cudaMalloc(&w->data, tiles * tile_bytes);
    if (e == cudaSuccess)
        e = cudaMalloc(&raw, (per < (size_t)w->m ? per : (size_t)w->m) * row_bytes + 16);
    if (e == cudaSuccess)
        e = cudaMalloc(&w->factor, tiles * SO_TILE * sizeof(float));
    for (size_t r = 0; e == cudaSuccess && r < (size_t)w->m; r += per) {
        size_t n = (size_t)w->m - r < per ? (size_t)w->m - r : per;
        e = cudaMemcpyAsync(raw, (const char *)t->data + r * row_bytes, n * row_bytes,
                            cudaMemcpyHostToDevice, s);
        find_factor<<<(unsigned)n, 256, 0, s>>>(w->fmt, t->dtype, raw, row_bytes, w->k,
                                                w->factor + r);
        pack_args p = {w->fmt,    t->dtype, (int)n,    w->k,          (int)(r / SO_TILE),
                       w->layout, raw,      row_bytes, w->factor + r, w->data};
        pack_tiles<<<dim3((unsigned)w->n_units, (unsigned)((n + SO_TILE - 1) / SO_TILE)), 32, 0,
                     s>>>(p);
        if (e == cudaSuccess)
            e = cudaStreamSynchronize(s);
    }
    if (e == cudaSuccess)
        e = cudaGetLastError();
    cudaFree(raw);
    if (e == cudaSuccess)
        return SO_OK;
    (void)cudaGetLastError(); /* else the next pass would report it */
    cudaFree(w->data);
    cudaFree(w->factor);
    return so_err_set(err, e == cudaErrorMemoryAllocation ? SO_ENOMEM : SO_EIO,
                      "%.*s: cannot place %zu MiB of weights on the GPU: %s", SO_STR_ARG(t->name),
                      tiles * tile_bytes >> 20, cudaGetErrorString(e));
}

/* ---- rows of an embedding ---- */

SO_DEVICE float packed_at(const so_weight &w, int row, int i) {
    int r = row % SO_TILE, lane = r * 4 + i % 32 / 8, j = i % SO_UNIT / 32 * 8 + i % 8;
    int place = so_unit_at(w.layout, so_place_of(w.layout, row / SO_TILE), i / SO_UNIT);
    const char *unit = w.data + (size_t)place * so_fmt_unit(w.fmt);
    if (w.fmt <= SO_FMT_F32) {
        const __half *at = (const __half *)unit + (j / 8 * 32 + lane) * 8 + j % 8;
        float v = __half2float(at[0]);
        return w.fmt == SO_FMT_F32 ? __fadd_rn(v, __half2float(at[512])) : v;
    }
    const __half *sc = (const __half *)(unit + so_fmt_numbers(w.fmt));
    bool four = w.fmt == SO_FMT_Q4_32_OFF, off = four || w.fmt == SO_FMT_Q8_32_OFF;
    int group = w.fmt == SO_FMT_Q8_16 ? 16 : 32;
    int q =
        four
            ? (int)(((const uint32_t *)unit)[lane * 2 + j / 8] >> (4 * (j % 8 / 2) + 16 * (j % 2)) &
                    15)
            : (int)(uint8_t)unit[lane * 16 + j] - so_fmt_zero(w.fmt);
    int at = r * (SO_UNIT / group) + i % SO_UNIT / group;
    float v = __fmul_rn(ldexpf((float)q, -SCALE_BITS), __half2float(sc[off ? 2 * at : at]));
    return off ? __fadd_rn(v, __half2float(sc[2 * at + 1])) : v;
}

static __global__ void embed_rows(so_weight w, const int32_t *ids, float scale, float *out) {
    so_start_next();
    so_wait_prior();
    int row = so_load(ids + blockIdx.x), i = blockIdx.y * 256 + threadIdx.x;
    if (i < w.k)
        out[(size_t)blockIdx.x * w.k + i] =
            __fmul_rn(__fmul_rn(packed_at(w, row, i), w.factor[row]), scale);
}

void so_cuda_embed(const so_queue &q, const so_op *op) {
    const so_weight *w = op->embed.w;
    so_launch(q, embed_rows, dim3((unsigned)op->n, (unsigned)((w->k + 255) / 256)), 256, 0, *w,
              (const int32_t *)(op->embed.ids.buf->data + op->embed.ids.off), op->embed.scale,
              (float *)(op->embed.out.buf->data + op->embed.out.off));
}
