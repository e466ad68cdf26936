/* Norms, activations, gather, rope, the cache and argmax. (Embeddings are in pack.cu.) Norms: one thread
 * block per row, 256 threads, sums in the order of device.cuh. No kernel of a list writes uploaded data
 * (rope tables, slots), so kernels may read it before they wait for the previous kernel. */
#include "backend/cuda/device.cuh"

/* Element 4 (threadIdx.x + 256 j) + i of a row. */
SO_DEVICE int element_of(int j, int i) { return 4 * ((int)threadIdx.x + 256 * j) + i; }
SO_DEVICE int n_turns(int d) { return (d + 1023) / 1024; }

typedef struct norm_args {
    float *out; /* or NULL */
    const float *x, *w, *b;
    int d;
    float eps;
    so_half_rows half;
} norm_args;

/* Writes f(x) for each element of the block's row. */
template <class F> SO_DEVICE void put_row(const norm_args &p, const float *src, F f) {
    for (int j = 0; j < n_turns(p.d); j++)
        for (int i = 0; i < 4; i++) {
            int e = element_of(j, i);
            if (e >= p.d)
                continue;
            float v = f(so_load(src + e), e);
            if (p.out)
                p.out[(size_t)blockIdx.x * p.d + e] = v;
            so_put_half(p.half, blockIdx.x, e, v);
        }
}

/* Sum of f(x) over the block's row, in the contract's order. */
template <class F> SO_DEVICE float sum_row(const norm_args &p, const float *src, F f) {
    float s = 0;
    for (int j = 0; j < n_turns(p.d); j++)
        for (int i = 0; i < 4; i++)
            if (element_of(j, i) < p.d)
                s = f(so_load(src + element_of(j, i)), s);
    return so_block_sum(s);
}

static __global__ void rms_norm(norm_args p) {
    so_start_next();
    so_wait_prior();
    const float *src = p.x + (size_t)blockIdx.x * p.d;
    float s = sum_row(p, src, [](float x, float a) { return __fmaf_rn(x, x, a); });
    float r = __frsqrt_rn(__fadd_rn(__fdiv_rn(s, (float)p.d), p.eps));
    put_row(p, src, [&](float x, int e) { return __fmul_rn(__fmul_rn(x, r), p.w[e]); });
}

/* Rows whose length is a multiple of 4 and at most 8192: kept in registers. Same bits. */
static __global__ void rms_norm_4(norm_args p) {
    so_start_next();
    const float4 *src = (const float4 *)(p.x + (size_t)blockIdx.x * p.d);
    float4 v[8], w[8];
    float s = 0;
    int n = p.d / 4;
#pragma unroll
    for (int j = 0; j < 8; j++)
        if ((int)threadIdx.x + 256 * j < n)
            w[j] = ((const float4 *)p.w)[threadIdx.x + 256 * j];
    so_wait_prior();
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (j * 256 < n) {
            int e = threadIdx.x + 256 * j;
            v[j] = e < n ? so_load(src + e) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
    for (int j = 0; j < 8; j++)
        if ((int)threadIdx.x + 256 * j < n) {
            s = __fmaf_rn(v[j].x, v[j].x, s);
            s = __fmaf_rn(v[j].y, v[j].y, s);
            s = __fmaf_rn(v[j].z, v[j].z, s);
            s = __fmaf_rn(v[j].w, v[j].w, s);
        }
    float r = __frsqrt_rn(__fadd_rn(__fdiv_rn(so_block_sum(s), (float)p.d), p.eps));
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int e = threadIdx.x + 256 * j;
        if (e >= n)
            continue;
        float4 o;
        o.x = __fmul_rn(__fmul_rn(v[j].x, r), w[j].x);
        o.y = __fmul_rn(__fmul_rn(v[j].y, r), w[j].y);
        o.z = __fmul_rn(__fmul_rn(v[j].z, r), w[j].z);
        o.w = __fmul_rn(__fmul_rn(v[j].w, r), w[j].w);
        if (p.out)
            ((float4 *)(p.out + (size_t)blockIdx.x * p.d))[e] = o;
        so_put_half4(p.half, blockIdx.x, 4 * e, (const float *)&o);
    }
}

/* One warp per row. */
static __global__ void row_scale(const float *squares, int d, float eps, float *scale) {
    so_start_next();
    so_wait_prior();
    const float *row = squares + (size_t)blockIdx.x * (d / SO_TILE);
    float r = so_row_scale(d, eps, [&](int i) { return so_load(row + i); });
    if (threadIdx.x == 0)
        scale[blockIdx.x] = r;
}

void so_cuda_row_scale(const so_queue &q, const float *squares, int n, int d, float eps,
                       float *scale) {
    so_launch(q, row_scale, dim3((unsigned)n), 32, 0, squares, d, eps, scale);
}

static __global__ void layer_norm(norm_args p) {
    so_start_next();
    so_wait_prior();
    const float *src = p.x + (size_t)blockIdx.x * p.d;
    float mean =
        __fdiv_rn(sum_row(p, src, [](float x, float a) { return __fadd_rn(a, x); }), (float)p.d);
    float q = sum_row(p, src, [&](float x, float a) {
        float v = __fsub_rn(x, mean);
        return __fmaf_rn(v, v, a);
    });
    float r = __frsqrt_rn(__fadd_rn(__fdiv_rn(q, (float)p.d), p.eps));
    put_row(p, src, [&](float x, int e) {
        return __fmaf_rn(__fmul_rn(__fsub_rn(x, mean), r), p.w[e], p.b[e]);
    });
}

static __global__ void eltwise(int kind, float *out, const float *a, const float *b, int d,
                               so_half_rows half) {
    so_start_next();
    so_wait_prior();
    int e = blockIdx.y * 256 + threadIdx.x;
    if (e >= d)
        return;
    size_t i = (size_t)blockIdx.x * d + e;
    float v = so_combine(kind, so_load(a + i), b ? so_load(b + i) : 0);
    if (out)
        out[i] = v;
    so_put_half(half, blockIdx.x, e, v);
}

static __global__ void to_half(const float *x, int d, so_half_rows half) {
    so_start_next();
    so_wait_prior();
    int e = blockIdx.y * 256 + threadIdx.x;
    if (e < d)
        so_put_half(half, blockIdx.x, e, so_load(x + (size_t)blockIdx.x * d + e));
}

static dim3 by_element(int n, int d) { return dim3((unsigned)n, (unsigned)((d + 255) / 256)); }

void so_cuda_to_half(const so_queue &q, const float *x, int n, int d, so_half_rows out) {
    so_launch(q, to_half, by_element(n, d), 256, 0, x, d, out);
}

static __global__ void gather(float *out, const float *x, const int32_t *rows, int d) {
    so_start_next();
    so_wait_prior();
    int e = blockIdx.y * 256 + threadIdx.x, row = so_load(rows + blockIdx.x);
    if (e < d)
        out[(size_t)blockIdx.x * d + e] = row < 0 ? 0.0f : so_load(x + (size_t)row * d + e);
}

typedef struct rope_args {
    float *x;
    const float *table;
    int n_heads, head_dim;
    bool halves;
} rope_args;

enum { MAX_PAIRS = 4 }; /* pairs of a head that a lane rotates: heads of at most 256 */

/* The lane's numbers of a row's table; they were uploaded before the list. */
SO_DEVICE void load_angles(const rope_args &r, int row, float2 *angles) {
#pragma unroll
    for (int j = 0; j < MAX_PAIRS; j++) {
        int i = threadIdx.x % 32 + 32 * j;
        if (i < r.head_dim / 2)
            angles[j] = so_load((const float2 *)(r.table + (size_t)row * r.head_dim) + i);
    }
}

/* One warp for one head of one row. */
SO_DEVICE void rotate_head(const rope_args &r, int row, int head, const float2 *angles,
                           float *shared) {
    float *x = r.x + ((size_t)row * r.n_heads + head) * r.head_dim;
    int pairs = r.head_dim / 2;
#pragma unroll
    for (int j = 0; j < MAX_PAIRS; j++) {
        int i = threadIdx.x % 32 + 32 * j, a = r.halves ? i : 2 * i, b = a + (r.halves ? pairs : 1);
        if (i >= pairs)
            continue;
        float2 t = angles[j];
        float u = so_load(x + a), v = so_load(x + b);
        float y = __fsub_rn(__fmul_rn(u, t.x), __fmul_rn(v, t.y)),
              z = __fadd_rn(__fmul_rn(u, t.y), __fmul_rn(v, t.x));
        x[a] = y;
        x[b] = z;
        if (shared) {
            shared[a] = y;
            shared[b] = z;
        }
    }
}

static __global__ void rope(rope_args r) {
    so_start_next();
    int head = blockIdx.y * 8 + threadIdx.x / 32;
    float2 angles[MAX_PAIRS];
    load_angles(r, blockIdx.x, angles);
    so_wait_prior();
    if (head < r.n_heads)
        rotate_head(r, blockIdx.x, head, angles, NULL);
}

/* ---- cache ---- */

SO_DEVICE size_t entry_at(const so_kv_store &s, int layer, so_kv_slot slot, int head) {
    return ((((size_t)slot.page * s.shape.n_layers + layer) * s.shape.n_heads_kv + head) *
                SO_KV_PAGE +
            slot.place) *
           s.entry;
}

/* One warp writes one head's entry; Q8_0 entries: int8[d], then a half for each block of 32. */
template <class F> SO_DEVICE void write_entry(const so_kv_store &s, char *dst, F value) {
    int d = s.shape.head_dim, lane = threadIdx.x % 32;
    for (int i0 = 0; i0 < d; i0 += 32) {
        int i = i0 + lane;
        float x = i < d ? value(i) : 0;
        if (s.shape.dtype == SO_DTYPE_F32) {
            if (i < d)
                ((float *)dst)[i] = x;
        } else if (s.shape.dtype == SO_DTYPE_F16) {
            if (i < d)
                ((__half *)dst)[i] = __float2half_rn(x);
        } else if (s.shape.dtype == SO_DTYPE_BF16) {
            if (i < d)
                ((__nv_bfloat16 *)dst)[i] = __float2bfloat16_rn(x);
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

typedef struct store_args {
    so_kv_store s;
    int layer;
    const float *k, *v;
    const so_kv_slot *slots;
} store_args;

SO_DEVICE so_kv_slot slot_of(const store_args &a, int row) {
    int2 v = so_load((const int2 *)a.slots + row);
    return {v.x, v.y};
}

/* K (job even) or V of head job / 2. */
SO_DEVICE void store_head(const store_args &a, int row, so_kv_slot slot, int job) {
    const float *src =
        (job % 2 ? a.v : a.k) + ((size_t)row * a.s.shape.n_heads_kv + job / 2) * a.s.shape.head_dim;
    char *dst = (job % 2 ? a.s.v : a.s.k) + entry_at(a.s, a.layer, slot, job / 2);
    write_entry(a.s, dst, [&](int i) { return so_load(src + i); });
}

static __global__ void kv_write(store_args a) {
    so_start_next();
    so_wait_prior();
    int job = threadIdx.x / 32 + blockIdx.y * 8;
    if (job < 2 * a.s.shape.n_heads_kv)
        store_head(a, blockIdx.x, slot_of(a, blockIdx.x), job);
}

/* One warp for one head: rotates a head of q; or rotates a head of k and stores it; or stores v. */
static __global__ void rope_store(rope_args q, rope_args k, store_args a) {
    __shared__ float rows[8][256];
    so_start_next();
    int head = blockIdx.y * 8 + threadIdx.x / 32, row = blockIdx.x;
    float *mine = rows[threadIdx.x / 32];
    float2 angles[MAX_PAIRS];
    load_angles(head < q.n_heads ? q : k, row, angles);
    so_kv_slot slot = slot_of(a, row);
    so_wait_prior();
    if (head < q.n_heads) {
        rotate_head(q, row, head, angles, NULL);
        return;
    }
    head -= q.n_heads;
    if (head < k.n_heads) {
        rotate_head(k, row, head, angles, mine);
        __syncwarp();
        write_entry(a.s, a.s.k + entry_at(a.s, a.layer, slot, head),
                    [&](int i) { return mine[i]; });
    } else if (head < 2 * k.n_heads) {
        store_head(a, row, slot, 2 * (head - k.n_heads) + 1);
    }
}

/* Entries one after the other, in order: a later copy may read what an earlier one wrote. */
static __global__ void kv_copy(so_kv_store s, const so_kv_slot *from, const so_kv_slot *to, int n) {
    so_start_next();
    so_wait_prior();
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

/* A candidate as one number: the larger the better. Finite floats in their order, then lower indices
 * first. A value that is not finite beats all, and stays recognisable. */
SO_DEVICE unsigned long long rank_of(float v, int i) {
    uint32_t u = __float_as_uint(v);
    u = u >> 31 ? ~u : u | 0x80000000u;
    if (!isfinite(v))
        u = 0xffffffffu;
    return (unsigned long long)u << 32 | (0xffffffffu - (uint32_t)i);
}

enum { ARGMAX_SPLITS = 32 };

/* Each block takes a part of a row; the one that ends last takes the best of the parts. */
static __global__ void argmax(int32_t *out, const float *x, int d, unsigned long long *best,
                              unsigned *arrived) {
    __shared__ unsigned long long warps[8];
    so_start_next();
    so_wait_prior();
    const float *row = x + (size_t)blockIdx.x * d;
    unsigned long long top = 0;
    for (int i = blockIdx.y * 256 + threadIdx.x; i < d; i += ARGMAX_SPLITS * 256) {
        float v = so_load(row + i);
        unsigned long long r = rank_of(v == 0 ? 0.0f : v, i);
        top = r > top ? r : top;
    }
    for (int w = 16; w; w >>= 1) {
        unsigned long long o = __shfl_xor_sync(0xffffffffu, top, w);
        top = o > top ? o : top;
    }
    if (threadIdx.x % 32 == 0)
        warps[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int i = 0; i < 8; i++)
        top = warps[i] > top ? warps[i] : top;
    atomicMax(best + blockIdx.x, top);
    __threadfence();
    if (atomicAdd(arrived + blockIdx.x, 1) != ARGMAX_SPLITS - 1)
        return;
    __threadfence();
    top = atomicExch(best + blockIdx.x, 0ull);
    arrived[blockIdx.x] = 0;
    out[blockIdx.x] =
        (uint32_t)(top >> 32) == 0xffffffffu ? -1 : (int32_t)(0xffffffffu - (uint32_t)top);
}

/* ---- launching ---- */

template <class T> static T *host_at(so_view v) {
    return v.buf ? (T *)(v.buf->data + v.off) : NULL;
}

static rope_args rope_of(const so_op *op) {
    return {host_at<float>(op->rope.x), host_at<float>(op->rope.table), op->rope.n_heads,
            op->rope.head_dim, op->rope.halves};
}

static store_args store_of(const so_op *op) {
    return {*op->kv_store.store, op->kv_store.layer, host_at<float>(op->kv_store.k),
            host_at<float>(op->kv_store.v), host_at<so_kv_slot>(op->kv_store.slots)};
}

static dim3 by_head(int n, int heads) { return dim3((unsigned)n, (unsigned)((heads + 7) / 8)); }

void so_cuda_rope_store(const so_queue &q, const so_op *rope_q, const so_op *rope_k,
                        const so_op *store) {
    so_launch(q, rope_store, by_head(rope_q->n, rope_q->rope.n_heads + 2 * rope_k->rope.n_heads),
              256, 0, rope_of(rope_q), rope_of(rope_k), store_of(store));
}

static void launch_norm(const so_queue &q, const so_op *op, so_half_rows half, bool keep) {
    norm_args p = {keep ? host_at<float>(op->norm.out) : NULL,
                   host_at<float>(op->norm.x),
                   host_at<float>(op->norm.weight),
                   host_at<float>(op->norm.bias),
                   op->norm.d,
                   op->norm.eps,
                   half};
    bool quads = p.d % 4 == 0 && p.d <= 8192 && ((uintptr_t)p.x | (uintptr_t)p.out) % 16 == 0 &&
                 (uintptr_t)p.w % 16 == 0;
    so_launch(q,
              op->kind == SO_OP_LAYER_NORM ? layer_norm
              : quads                      ? rms_norm_4
                                           : rms_norm,
              dim3((unsigned)op->n), 256, 0, p);
}

void so_cuda_op(const so_queue &q, const so_op *op, so_half_rows half, bool keep,
                const so_scratch *s) {
    unsigned n = (unsigned)op->n;
    switch (op->kind) {
    case SO_OP_RMS_NORM:
    case SO_OP_LAYER_NORM:
        launch_norm(q, op, half, keep);
        break;
    case SO_OP_ADD:
    case SO_OP_SILU_MUL:
    case SO_OP_GELU_MUL:
    case SO_OP_GELU:
        so_launch(q, eltwise, by_element(op->n, op->eltwise.d), 256, 0, (int)op->kind,
                  keep ? host_at<float>(op->eltwise.out) : (float *)NULL,
                  host_at<float>(op->eltwise.a),
                  op->kind == SO_OP_GELU ? (float *)NULL : host_at<float>(op->eltwise.b),
                  op->eltwise.d, half);
        break;
    case SO_OP_GATHER:
        so_launch(q, gather, by_element(op->n, op->gather.d), 256, 0,
                  host_at<float>(op->gather.out), host_at<float>(op->gather.x),
                  host_at<int32_t>(op->gather.rows), op->gather.d);
        break;
    case SO_OP_ROPE:
        so_launch(q, rope, by_head(op->n, op->rope.n_heads), 256, 0, rope_of(op));
        break;
    case SO_OP_KV_STORE:
        so_launch(q, kv_write, by_head(op->n, 2 * op->kv_store.store->shape.n_heads_kv), 256, 0,
                  store_of(op));
        break;
    case SO_OP_KV_COPY:
        so_launch(q, kv_copy,
                  dim3((unsigned)op->kv_copy.store->shape.n_layers,
                       (unsigned)op->kv_copy.store->shape.n_heads_kv),
                  128, 0, *op->kv_copy.store, host_at<so_kv_slot>(op->kv_copy.from),
                  host_at<so_kv_slot>(op->kv_copy.to), op->n);
        break;
    case SO_OP_ARGMAX:
        so_launch(q, argmax, dim3(n, ARGMAX_SPLITS), 256, 0, host_at<int32_t>(op->argmax.out),
                  host_at<float>(op->argmax.x), op->argmax.d, (unsigned long long *)s->counters,
                  (unsigned *)((unsigned long long *)s->counters + n));
        break;
    default:
        break;
    }
}
