/* Operations on rows that are neither products nor attention: norms, activations, rope, the cache.
 * One block per row, 256 threads, sums in the order of device.cuh. */
#include "backend/cuda/device.cuh"

static __global__ void rms_norm(float *out, const float *x, const float *w, int d, float eps,
                                bool split, so_split to) {
    const float *src = x + (size_t)blockIdx.x * d;
    float s = 0;
    for (int i = threadIdx.x; i < d; i += 256)
        s = __fmaf_rn(src[i], src[i], s);
    float r = __frsqrt_rn(__fadd_rn(__fdiv_rn(so_block_sum(s), (float)d), eps));
    for (int i = threadIdx.x; i < d; i += 256)
        out[(size_t)blockIdx.x * d + i] = __fmul_rn(__fmul_rn(src[i], r), w[i]);
    if (split) {
        __syncthreads();
        so_split_row_any(out + (size_t)blockIdx.x * d, blockIdx.x, d, to);
    }
}

static __global__ void layer_norm(float *out, const float *x, const float *w, const float *b, int d,
                                  float eps) {
    const float *src = x + (size_t)blockIdx.x * d;
    float s = 0, q = 0;
    for (int i = threadIdx.x; i < d; i += 256)
        s = __fadd_rn(s, src[i]);
    float mean = __fdiv_rn(so_block_sum(s), (float)d);
    for (int i = threadIdx.x; i < d; i += 256) {
        float v = __fsub_rn(src[i], mean);
        q = __fmaf_rn(v, v, q);
    }
    float r = __frsqrt_rn(__fadd_rn(__fdiv_rn(so_block_sum(q), (float)d), eps));
    for (int i = threadIdx.x; i < d; i += 256)
        out[(size_t)blockIdx.x * d + i] =
            __fmaf_rn(__fmul_rn(__fsub_rn(src[i], mean), r), w[i], b[i]);
}

SO_DEVICE float gelu(float x) {
    float u = __fmul_rn(0.7978845608f, __fmaf_rn(__fmul_rn(0.044715f, __fmul_rn(x, x)), x, x));
    return __fdiv_rn(x, __fadd_rn(1.0f, expf(__fmul_rn(-2.0f, u))));
}

SO_DEVICE float combine(int kind, float x, const float *b, size_t i) {
    switch (kind) {
    case SO_OP_ADD:
        return __fadd_rn(x, b[i]);
    case SO_OP_SILU_MUL:
        return __fmul_rn(__fdiv_rn(x, __fadd_rn(1.0f, expf(-x))), b[i]);
    case SO_OP_GELU_MUL:
        return __fmul_rn(gelu(x), b[i]);
    default:
        return gelu(x);
    }
}

static __global__ void eltwise(int kind, float *out, const float *a, const float *b, size_t n) {
    size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n)
        out[i] = combine(kind, a[i], b, i);
}

static __global__ void eltwise_split(int kind, float *out, const float *a, const float *b, int d,
                                     so_split to) {
    size_t row = (size_t)blockIdx.x * d;
    for (int i = threadIdx.x; i < d; i += 256)
        out[row + i] = combine(kind, a[row + i], b, row + i);
    __syncthreads();
    so_split_row_any(out + row, blockIdx.x, d, to);
}

static __global__ void gather(float *out, const float *x, const int32_t *rows, int d) {
    for (int i = threadIdx.x; i < d; i += 256)
        out[(size_t)blockIdx.x * d + i] = x[(size_t)rows[blockIdx.x] * d + i];
}

typedef struct rope_args {
    float *x;
    const float *table;
    int n_heads, head_dim;
    bool halves;
} rope_args;

SO_DEVICE void rotate(const rope_args &r) {
    int head_dim = r.head_dim, pairs = head_dim / 2;
    bool halves = r.halves;
    float *row = r.x + (size_t)blockIdx.x * r.n_heads * head_dim;
    const float *t = r.table + (size_t)blockIdx.x * head_dim;
    for (int i = threadIdx.x; i < r.n_heads * pairs; i += 256) {
        int h = i / pairs, p = i % pairs;
        float *a = row + h * head_dim + (halves ? p : 2 * p), *b = a + (halves ? pairs : 1);
        float c = t[2 * p], s = t[2 * p + 1], u = *a, v = *b;
        *a = __fsub_rn(__fmul_rn(u, c), __fmul_rn(v, s));
        *b = __fadd_rn(__fmul_rn(u, s), __fmul_rn(v, c));
    }
}

static __global__ void rope(rope_args r) { rotate(r); }

/* ---- cache ---- */

SO_DEVICE size_t entry_at(const so_kv_store &s, int layer, so_kv_slot slot, int head) {
    return ((((size_t)slot.page * s.shape.n_layers + layer) * s.shape.n_heads_kv + head) *
                SO_KV_PAGE +
            slot.place) *
           s.entry;
}

/* One warp for one head of a row, K (even jobs) or V. Q8_0 entries: int8[d], then a half for each block
 * of 32. */
SO_DEVICE void write_entry(const so_kv_store &s, int layer, const float *k, const float *v,
                           const so_kv_slot *slots, int job) {
    int row = blockIdx.x, d = s.shape.head_dim, lane = threadIdx.x % 32, head = job / 2;
    const float *src = (job % 2 ? v : k) + ((size_t)row * s.shape.n_heads_kv + head) * d;
    char *dst = (job % 2 ? s.v : s.k) + entry_at(s, layer, slots[row], head);
    for (int i0 = 0; i0 < d; i0 += 32) {
        int i = i0 + lane;
        float x = i < d ? src[i] : 0;
        if (s.shape.dtype == SO_DTYPE_F32) {
            if (i < d)
                ((float *)dst)[i] = x;
        } else if (s.shape.dtype == SO_DTYPE_F16) {
            if (i < d)
                ((__half *)dst)[i] = __float2half_rn(x);
        } else {
            int padded = (d + 31) / 32 * 32;
            float m = so_warp_max(isfinite(x) ? fabsf(x) : INFINITY);
            __half h = __float2half_rn(__fdiv_rn(m, 127.0f));
            float scale = __half2float(h);
            bool bad = !isfinite(scale);
            float q = bad || scale == 0 ? 0 : rintf(__fmul_rn(x, __fdiv_rn(1.0f, scale)));
            ((int8_t *)dst)[i] = (int8_t)fmaxf(-127.0f, fminf(127.0f, q));
            if (lane == 0)
                ((__half *)(dst + padded))[i0 / 32] = bad ? __ushort_as_half(0x7E00) : h;
        }
    }
}

static __global__ void kv_write(so_kv_store s, int layer, const float *k, const float *v,
                                const so_kv_slot *slots) {
    int job = threadIdx.x / 32 + blockIdx.y * 8;
    if (job < 2 * s.shape.n_heads_kv)
        write_entry(s, layer, k, v, slots, job);
}

/* One block per row. */
static __global__ void rope_store(rope_args q, rope_args k, so_kv_store s, int layer,
                                  const float *v, const so_kv_slot *slots) {
    rotate(q);
    rotate(k);
    __syncthreads();
    for (int job = threadIdx.x / 32; job < 2 * s.shape.n_heads_kv; job += 8)
        write_entry(s, layer, k.x, v, slots, job);
}

/* Entries one after the other, in order: a later copy may read what an earlier one wrote. */
static __global__ void kv_copy(so_kv_store s, const so_kv_slot *from, const so_kv_slot *to, int n) {
    int layer = blockIdx.x, head = blockIdx.y;
    for (int i = 0; i < n; i++) {
        size_t a = entry_at(s, layer, from[i], head), b = entry_at(s, layer, to[i], head);
        for (size_t j = threadIdx.x * 2; j < s.entry; j += blockDim.x * 2) {
            *(uint16_t *)(s.k + b + j) = *(const uint16_t *)(s.k + a + j);
            *(uint16_t *)(s.v + b + j) = *(const uint16_t *)(s.v + a + j);
        }
        __syncthreads();
    }
}

/* ---- argmax ---- */

static __global__ void argmax(int32_t *out, const float *x, int d) {
    __shared__ float best[256];
    __shared__ int32_t where[256];
    __shared__ int bad;
    const float *row = x + (size_t)blockIdx.x * d;
    float m = -INFINITY;
    int32_t at_ = INT32_MAX;
    if (threadIdx.x == 0)
        bad = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < d; i += 256) {
        float v = row[i];
        if (!isfinite(v))
            bad = 1;
        if (v > m) {
            m = v;
            at_ = i;
        }
    }
    best[threadIdx.x] = m;
    where[threadIdx.x] = at_;
    __syncthreads();
    for (int w = 128; w; w >>= 1) {
        if (threadIdx.x < w) {
            float v = best[threadIdx.x + w];
            int32_t o = where[threadIdx.x + w];
            if (v > best[threadIdx.x] || (v == best[threadIdx.x] && o < where[threadIdx.x])) {
                best[threadIdx.x] = v;
                where[threadIdx.x] = o;
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0)
        out[blockIdx.x] = bad ? -1 : where[0];
}

template <class T> static T *host_at(so_view v) { return (T *)(v.buf->data + v.off); }

static rope_args rope_of(const so_op *op) {
    return {host_at<float>(op->rope.x), host_at<float>(op->rope.table), op->rope.n_heads,
            op->rope.head_dim, op->rope.halves};
}

void so_cuda_rope_store(cudaStream_t s, const so_op *q, const so_op *k, const so_op *store) {
    rope_store<<<(unsigned)q->n, 256, 0, s>>>(
        rope_of(q), rope_of(k), *store->kv_store.store, store->kv_store.layer,
        host_at<float>(store->kv_store.v), host_at<so_kv_slot>(store->kv_store.slots));
}

void so_cuda_op(cudaStream_t s, const so_op *op, const so_split *split) {
    unsigned n = (unsigned)op->n;
    const so_split none = {};
    switch (op->kind) {
    case SO_OP_RMS_NORM:
        rms_norm<<<n, 256, 0, s>>>(host_at<float>(op->norm.out), host_at<float>(op->norm.x),
                                   host_at<float>(op->norm.weight), op->norm.d, op->norm.eps,
                                   split != NULL, split ? *split : none);
        break;
    case SO_OP_LAYER_NORM:
        layer_norm<<<n, 256, 0, s>>>(host_at<float>(op->norm.out), host_at<float>(op->norm.x),
                                     host_at<float>(op->norm.weight), host_at<float>(op->norm.bias),
                                     op->norm.d, op->norm.eps);
        break;
    case SO_OP_ADD:
    case SO_OP_SILU_MUL:
    case SO_OP_GELU_MUL:
    case SO_OP_GELU: {
        size_t all = (size_t)n * op->eltwise.d;
        if (split) {
            eltwise_split<<<n, 256, 0, s>>>(
                op->kind, host_at<float>(op->eltwise.out), host_at<float>(op->eltwise.a),
                op->kind == SO_OP_GELU ? NULL : host_at<float>(op->eltwise.b), op->eltwise.d,
                *split);
            break;
        }
        eltwise<<<(unsigned)((all + 255) / 256), 256, 0, s>>>(
            op->kind, host_at<float>(op->eltwise.out), host_at<float>(op->eltwise.a),
            op->kind == SO_OP_GELU ? NULL : host_at<float>(op->eltwise.b), all);
        break;
    }
    case SO_OP_GATHER:
        gather<<<n, 256, 0, s>>>(host_at<float>(op->gather.out), host_at<float>(op->gather.x),
                                 host_at<int32_t>(op->gather.rows), op->gather.d);
        break;
    case SO_OP_ROPE:
        rope<<<n, 256, 0, s>>>(rope_of(op));
        break;
    case SO_OP_KV_STORE:
        kv_write<<<dim3(n, (unsigned)(2 * op->kv_store.store->shape.n_heads_kv + 7) / 8), 256, 0,
                   s>>>(*op->kv_store.store, op->kv_store.layer, host_at<float>(op->kv_store.k),
                        host_at<float>(op->kv_store.v), host_at<so_kv_slot>(op->kv_store.slots));
        break;
    case SO_OP_KV_COPY:
        kv_copy<<<dim3((unsigned)op->kv_copy.store->shape.n_layers,
                       (unsigned)op->kv_copy.store->shape.n_heads_kv),
                  128, 0, s>>>(*op->kv_copy.store, host_at<so_kv_slot>(op->kv_copy.from),
                               host_at<so_kv_slot>(op->kv_copy.to), op->n);
        break;
    case SO_OP_ARGMAX:
        argmax<<<n, 256, 0, s>>>(host_at<int32_t>(op->argmax.out), host_at<float>(op->argmax.x),
                                 op->argmax.d);
        break;
    default:
        break;
    }
}
