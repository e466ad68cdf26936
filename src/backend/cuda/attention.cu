/* Attention over the paged cache.
 *
 * A block computes the running sums c mod 16 = blockIdx.z of one row and one KV head, for all query
 * heads of the group (at most 8 at a time). Per chunk of 64 logical positions:
 *
 *   1. keys are copied to shared memory as floats; thread (position, head) computes its score as one
 *      chain over the head dimension;
 *   2. one warp per head: largest score, exp, sum, over the positions seen;
 *   3. thread e adds p_j v_j[e] over the positions in order; then the chunk is merged into the running
 *      sum by m' = max(m, m_c), a = exp(m - m'), b = exp(m_c - m').
 *
 * A second kernel merges the 16 running sums in order and divides. Rows do not meet anywhere. */
#include "backend/cuda/device.cuh"

enum { CHUNK = 64, SPLITS = 16, GROUP = 8, THREADS = 128 };

typedef struct attn_args {
    so_kv_store s;
    int layer, n_heads, window;
    const float *q;
    const so_attn_row *rows;
    const int32_t *pages, *tails;
    float scale;
    float *parts; /* [row][head][SPLITS][head_dim + 2]: o, m, l */
    float *out;
} attn_args;

template <int T> SO_DEVICE float element(const char *entry, int i, int padded) {
    if (T == SO_DTYPE_F32)
        return ((const float *)entry)[i];
    if (T == SO_DTYPE_F16)
        return __half2float(((const __half *)entry)[i]);
    return __fmul_rn(__half2float(((const __half *)(entry + padded))[i / 32]),
                     (float)((const int8_t *)entry)[i]);
}

/* Keys and values of positions from … to-1 to shared memory, as floats. Heads of whole 16-byte units
 * are read by them, all before the first is used. */
template <int T>
SO_DEVICE void load(const so_kv_store &s, const int64_t *where, int from, int to, int d, int padded,
                    int stride, float *keys, float *values) {
    constexpr int UNIT = T == SO_DTYPE_F16 ? 8 : 4;
    if (T != SO_DTYPE_Q8_0 && d % UNIT == 0) {
        int per = d / UNIT, n = (to - from) * per;
        for (int i0 = threadIdx.x; i0 < n; i0 += THREADS * 4) {
            uint4 k[4], v[4];
            for (int u = 0; u < 4; u++) {
                int i = min(i0 + u * THREADS, n - 1);
                size_t at = (size_t)where[from + i / per] + (size_t)(i % per) * 16;
                k[u] = *(const uint4 *)(s.k + at);
                v[u] = *(const uint4 *)(s.v + at);
            }
            for (int u = 0; u < 4 && i0 + u * THREADS < n; u++) {
                int i = i0 + u * THREADS, j = from + i / per, e = i % per * UNIT;
                for (int c = 0; c < UNIT; c++) {
                    keys[j * stride + e + c] = element<T>((const char *)&k[u], c, 0);
                    values[j * d + e + c] = element<T>((const char *)&v[u], c, 0);
                }
            }
        }
        return;
    }
    for (int i = threadIdx.x; i < (to - from) * d; i += THREADS) {
        int j = from + i / d, e = i % d;
        keys[j * stride + e] = element<T>(s.k + where[j], e, padded);
        values[j * d + e] = element<T>(s.v + where[j], e, padded);
    }
}

SO_DEVICE void merge(float m_c, float l_c, float *m, float *l, float *a, float *b) {
    float m2 = isnan(m_c) || isnan(*m) ? NAN : fmaxf(*m, m_c); /* fmaxf drops NaN */
    *a = *m == -INFINITY ? 0 : expf(__fsub_rn(*m, m2));
    *b = expf(__fsub_rn(m_c, m2));
    *l = __fadd_rn(__fmul_rn(*l, *a), __fmul_rn(l_c, *b));
    *m = m2;
}

template <int T> static __global__ void __launch_bounds__(THREADS) attend(attn_args p) {
    extern __shared__ float shared[];
    int row = blockIdx.x, d = p.s.shape.head_dim, per = p.n_heads / p.s.shape.n_heads_kv;
    int groups = (per + GROUP - 1) / GROUP, kv = blockIdx.y / groups,
        first_head = blockIdx.y % groups * GROUP;
    int heads = min(GROUP, per - first_head), padded = (d + 31) / 32 * 32, stride = d + 1;
    float *keys = shared, *values = keys + CHUNK * stride, *qs = values + CHUNK * d,
          *ps = qs + GROUP * d, *stat = ps + GROUP * CHUNK; /* stat: m_c, l_c, a, b by head */
    int64_t *where = (int64_t *)(stat + 4 * GROUP); /* byte offset of each position's entry */
    so_attn_row r = p.rows[row];
    int lo = p.window > 0 ? max(0, r.pos - p.window + 1) : 0, n_seen = r.pos + 1;
    for (int i = threadIdx.x; i < heads * d; i += THREADS)
        qs[i] = __fmul_rn(
            p.q[((size_t)row * p.n_heads + kv * per + first_head + i / d) * d + i % d], p.scale);
    float o[GROUP * 2], m[GROUP], l[GROUP]; /* this thread's elements e = threadIdx.x + 128 i */
    for (int h = 0; h < GROUP; h++) {
        o[h] = o[h + GROUP] = 0;
        m[h] = -INFINITY;
        l[h] = 0;
    }
    int n_chunks = (n_seen + CHUNK - 1) / CHUNK;
    for (int c = blockIdx.z; c < n_chunks; c += SPLITS) {
        int base = c * CHUNK, from = max(lo - base, 0), to = min(n_seen - base, CHUNK);
        if (from >= to)
            continue;
        __syncthreads();
        for (int j = threadIdx.x; j < to; j += THREADS) {
            int pos = base + j,
                slot = pos < r.n_prefix ? pos : p.tails[r.tail_off + pos - r.n_prefix];
            int page = p.pages[r.page_off + slot / SO_KV_PAGE];
            where[j] =
                (int64_t)(((((size_t)page * p.s.shape.n_layers + p.layer) * p.s.shape.n_heads_kv +
                            kv) *
                               SO_KV_PAGE +
                           slot % SO_KV_PAGE) *
                          p.s.entry);
        }
        __syncthreads();
        load<T>(p.s, where, from, to, d, padded, stride, keys, values);
        __syncthreads();
        for (int i = threadIdx.x; i < heads * CHUNK; i += THREADS) {
            int j = i % CHUNK, h = i / CHUNK;
            if (j < from || j >= to)
                continue;
            float s = 0;
            for (int e = 0; e < d; e++)
                s = __fmaf_rn(qs[h * d + e], keys[j * stride + e], s);
            ps[h * CHUNK + j] = s;
        }
        __syncthreads();
        for (int h = threadIdx.x / 32; h < heads; h += THREADS / 32) {
            int lane = threadIdx.x % 32;
            bool a = lane >= from && lane < to, b = lane + 32 >= from && lane + 32 < to;
            float x = a ? ps[h * CHUNK + lane] : -INFINITY,
                  y = b ? ps[h * CHUNK + lane + 32] : -INFINITY;
            float top = so_warp_max(fmaxf(x, y));
            bool sick = so_warp_max((a && isnan(x)) || (b && isnan(y)) ? 1.0f : 0.0f) > 0;
            if (sick)
                top = NAN;
            x = a ? expf(__fsub_rn(x, top)) : 0;
            y = b ? expf(__fsub_rn(y, top)) : 0;
            if (a)
                ps[h * CHUNK + lane] = x;
            if (b)
                ps[h * CHUNK + lane + 32] = y;
            float sum = so_warp_sum(__fadd_rn(x, y));
            if (lane == 0) {
                stat[h] = top;
                stat[GROUP + h] = sum;
            }
        }
        __syncthreads();
        float part[GROUP * 2];
        for (int h = 0; h < GROUP * 2; h++)
            part[h] = 0;
        for (int i = 0, e = threadIdx.x; e < d; e += THREADS, i++)
            for (int j = from; j < to; j++) {
                float v = values[j * d + e];
                for (int h = 0; h < heads; h++)
                    part[i * GROUP + h] = __fmaf_rn(ps[h * CHUNK + j], v, part[i * GROUP + h]);
            }
        for (int h = 0; h < heads; h++) {
            float a, b;
            merge(stat[h], stat[GROUP + h], &m[h], &l[h], &a, &b);
            for (int i = 0; i < 2; i++)
                o[i * GROUP + h] =
                    __fmaf_rn(part[i * GROUP + h], b, __fmul_rn(o[i * GROUP + h], a));
        }
    }
    for (int h = 0; h < heads; h++) {
        float *out =
            p.parts +
            (((size_t)row * p.n_heads + kv * per + first_head + h) * SPLITS + blockIdx.z) * (d + 2);
        for (int i = 0, e = threadIdx.x; e < d; e += THREADS, i++)
            out[e] = o[i * GROUP + h];
        if (threadIdx.x == 0) {
            out[d] = m[h];
            out[d + 1] = l[h];
        }
    }
}

/* One block of 256 threads per row. */
static __global__ void join(attn_args p, bool split, so_split to) {
    int row = blockIdx.x, d = p.s.shape.head_dim, width = p.n_heads * d;
    int n_chunks = (p.rows[row].pos + CHUNK) / CHUNK, n = min(SPLITS, n_chunks);
    for (int i = threadIdx.x; i < width; i += 256) {
        const float *part = p.parts + ((size_t)row * p.n_heads + i / d) * SPLITS * (d + 2);
        float m = -INFINITY, l = 0, o = 0;
        for (int s = 0; s < n; s++) {
            const float *q = part + (size_t)s * (d + 2);
            if (q[d] == -INFINITY)
                continue;
            float a, b;
            merge(q[d], q[d + 1], &m, &l, &a, &b);
            o = __fmaf_rn(q[i % d], b, __fmul_rn(o, a));
        }
        p.out[(size_t)row * width + i] = __fmul_rn(o, __fdiv_rn(1.0f, l));
    }
    if (split) {
        __syncthreads();
        so_split_row_any(p.out + (size_t)row * width, row, width, to);
    }
}

size_t so_cuda_attention_bytes(int n, int n_heads, int head_dim) {
    return (size_t)n * (size_t)n_heads * SPLITS * (size_t)(head_dim + 2) * sizeof(float);
}

void so_cuda_attention(cudaStream_t s, const so_op *op, float *parts, const so_split *split) {
    const so_kv_store *st = op->attention.store;
    int d = st->shape.head_dim, per = op->attention.n_heads / st->shape.n_heads_kv;
    attn_args p = {*st,
                   op->attention.layer,
                   op->attention.n_heads,
                   op->attention.window,
                   (const float *)(op->attention.q.buf->data + op->attention.q.off),
                   (const so_attn_row *)(op->attention.rows.buf->data + op->attention.rows.off),
                   (const int32_t *)(op->attention.pages.buf->data + op->attention.pages.off),
                   (const int32_t *)(op->attention.tails.buf->data + op->attention.tails.off),
                   op->attention.scale,
                   parts,
                   (float *)(op->attention.out.buf->data + op->attention.out.off)};
    size_t shared =
        ((size_t)CHUNK * (2 * d + 1) + GROUP * d + GROUP * CHUNK + 4 * GROUP) * sizeof(float) +
        CHUNK * sizeof(int64_t) + 8;
    dim3 grid((unsigned)op->n, (unsigned)(st->shape.n_heads_kv * ((per + GROUP - 1) / GROUP)),
              SPLITS);
    void (*fn)(attn_args) = st->shape.dtype == SO_DTYPE_F32   ? attend<SO_DTYPE_F32>
                            : st->shape.dtype == SO_DTYPE_F16 ? attend<SO_DTYPE_F16>
                                                              : attend<SO_DTYPE_Q8_0>;
    cudaFuncSetAttribute((const void *)fn, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         (int)shared);
    fn<<<grid, THREADS, shared, s>>>(p);
    join<<<(unsigned)op->n, 256, 0, s>>>(p, split != NULL, split ? *split : so_split{});
}
