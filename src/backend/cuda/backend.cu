/* The CUDA backend behind backend.h: buffers, weights, stores, and the list of operations of a pass.
 *
 * submit records operations in phases: uploads, then computation, then downloads. An operation that
 * would go back to an earlier part ends the phase. A phase is queued on the stream as one copy of all
 * its uploads, one kernel that spreads them to their buffers, its computation, and copies of results to
 * pinned memory; sync queues the last phase, waits, and hands the results over. A usual pass is one
 * phase. Computation that comes again (the same operations on the same buffers) is replayed as a CUDA
 * graph; what changes from pass to pass (tokens, positions, pages, rope) is data in device memory, never
 * an argument of a kernel.
 *
 * Errors stick: the first failed call is reported by the next sync, and by every one after it if the
 * device is lost. One thread at a time, as backend.h says. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/device.cuh"

enum { MAX_GRAPHS = 64, STAGE_FIRST = 1 << 20 };

typedef struct segment { /* of the staged uploads */
    char *dst;
    uint32_t off, n_bytes;
} segment;

typedef struct download {
    const char *src;
    char *dst;
    size_t n_bytes, at; /* at: offset in the pinned results */
} download;

typedef struct graph {
    uint64_t key;
    cudaGraphExec_t exec; /* NULL: seen once */
    uint64_t used;
} graph;

typedef struct host_block {
    char *data;
    size_t cap;
} host_block;

typedef struct cuda_backend {
    so_backend base;
    int device;
    cudaStream_t stream;
    cudaError_t failed;
    const char *failed_at;
    so_op *ops; /* of the phase being recorded, without uploads and downloads */
    size_t n_ops, ops_cap;
    download *downloads; /* since the last sync; the first n_queued are on the stream */
    size_t n_downloads, n_queued, downloads_cap;
    host_block stage, results; /* pinned; filled from the start after each sync */
    char *stage_dev;
    size_t stage_from, stage_len, results_len, stage_dev_cap,
        n_segments; /* stage_from: of this phase */
    segment *segments;
    size_t segments_cap;
    so_split split[2]; /* bfloat16, half */
    size_t split_cap[2], sums_cap, parts_cap;
    float *parts;
    graph graphs[MAX_GRAPHS];
    uint64_t clock;
    char name[256];
} cuda_backend;

static void note(cuda_backend *b, cudaError_t e, const char *what) {
    if (e != cudaSuccess && b->failed == cudaSuccess) {
        b->failed = e;
        b->failed_at = what;
    }
}

#define TRY(b, call) note(b, call, #call)

/* ---- memory ---- */

static int buffer_create(so_backend *base, size_t n_bytes, so_buffer **out, so_err *err) {
    cuda_backend *b = (cuda_backend *)base;
    so_buffer *buf = (so_buffer *)calloc(1, sizeof *buf);
    cudaError_t e = cudaSetDevice(b->device);
    if (e == cudaSuccess)
        e = cudaMalloc(&buf->data, n_bytes);
    if (e == cudaSuccess)
        e = cudaMemset(buf->data, 0, n_bytes);
    if (e != cudaSuccess) {
        free(buf);
        return so_err_set(err, e == cudaErrorMemoryAllocation ? SO_ENOMEM : SO_EIO,
                          "a buffer of %zu MB on the GPU: %s", n_bytes >> 20,
                          cudaGetErrorString(e));
    }
    buf->n_bytes = n_bytes;
    *out = buf;
    return SO_OK;
}

static void drop_graphs(cuda_backend *b) {
    for (int i = 0; i < MAX_GRAPHS; i++)
        if (b->graphs[i].exec)
            cudaGraphExecDestroy(b->graphs[i].exec);
    memset(b->graphs, 0, sizeof b->graphs);
}

static void buffer_free(so_backend *base, so_buffer *buf) {
    cuda_backend *b = (cuda_backend *)base;
    drop_graphs(b); /* they hold its address */
    cudaFree(buf->data);
    free(buf);
}

static int weight_create(so_backend *base, const so_tensor *t, so_weight **out, so_err *err) {
    cuda_backend *b = (cuda_backend *)base;
    so_weight *w = (so_weight *)calloc(1, sizeof *w);
    cudaSetDevice(b->device);
    int rc = so_cuda_weight_pack(w, t, b->stream, err);
    if (rc != SO_OK)
        free(w);
    else
        *out = w;
    return rc;
}

static bool weight_pack(so_backend *b, so_weight *w) {
    (void)b;
    (void)w;
    return true; /* it is on the device already */
}

static void weight_free(so_backend *base, so_weight *w) {
    drop_graphs((cuda_backend *)base);
    cudaFree(w->data);
    cudaFree(w->factor);
    free(w);
}

static int kv_create(so_backend *base, const so_kv_shape *shape, so_kv_store **out, so_err *err) {
    cuda_backend *b = (cuda_backend *)base;
    if (!so_kv_dtype_ok(shape->dtype) || shape->head_dim > 256)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "a KV cache of %s with heads of %d on the GPU; types are " SO_KV_DTYPES
                          ", heads at most 256",
                          so_dtype_get(shape->dtype) ? so_dtype_get(shape->dtype)->name : "?",
                          shape->head_dim);
    so_kv_store *s = (so_kv_store *)calloc(1, sizeof *s);
    s->shape = *shape;
    s->entry = so_kv_entry_bytes(shape->dtype, shape->head_dim);
    size_t n = (size_t)shape->n_pages * shape->n_layers * shape->n_heads_kv * SO_KV_PAGE * s->entry;
    cudaError_t e = cudaSetDevice(b->device);
    if (e == cudaSuccess)
        e = cudaMalloc(&s->k, n + 16);
    if (e == cudaSuccess)
        e = cudaMalloc(&s->v, n + 16);
    if (e != cudaSuccess) {
        cudaFree(s->k);
        free(s);
        return so_err_set(
            err, SO_ENOMEM,
            "a KV cache of %zu MB on the GPU: %s; use a smaller --ctx-size or --parallel", n >> 19,
            cudaGetErrorString(e));
    }
    *out = s;
    return SO_OK;
}

static void kv_free(so_backend *base, so_kv_store *s) {
    drop_graphs((cuda_backend *)base);
    cudaFree(s->k);
    cudaFree(s->v);
    free(s);
}

/* ---- recording ---- */

static void reserve_host(cuda_backend *b, host_block *h, size_t n, size_t keep) {
    if (n <= h->cap)
        return;
    size_t cap = h->cap ? h->cap : STAGE_FIRST;
    while (cap < n)
        cap *= 2;
    char *p = NULL;
    TRY(b, cudaMallocHost(&p, cap));
    if (!p)
        return;
    TRY(b, cudaStreamSynchronize(b->stream)); /* copies may still use the old block */
    if (keep)
        memcpy(p, h->data, keep);
    cudaFreeHost(h->data);
    h->data = p;
    h->cap = cap;
}

static void stage(cuda_backend *b, const so_op *op) {
    size_t n = op->upload.n_bytes, at = (b->stage_len + 15) / 16 * 16;
    reserve_host(b, &b->stage, at + n + 16, b->stage_len);
    if (b->failed != cudaSuccess)
        return;
    memcpy(b->stage.data + at, op->upload.src, n);
    if (b->n_segments == b->segments_cap) {
        b->segments_cap = b->segments_cap ? 2 * b->segments_cap : 32;
        b->segments = (segment *)realloc(b->segments, b->segments_cap * sizeof *b->segments);
    }
    b->segments[b->n_segments++] = {op->upload.dst.buf->data + op->upload.dst.off, (uint32_t)at,
                                    (uint32_t)n};
    b->stage_len = at + n;
}

static void queue_phase(cuda_backend *b);

static void record_download(cuda_backend *b, const so_op *op) {
    if (b->n_downloads == b->downloads_cap) {
        b->downloads_cap = b->downloads_cap ? 2 * b->downloads_cap : 16;
        b->downloads = (download *)realloc(b->downloads, b->downloads_cap * sizeof *b->downloads);
    }
    b->downloads[b->n_downloads++] = {op->download.src.buf->data + op->download.src.off,
                                      (char *)op->download.dst, op->download.n_bytes, 0};
}

static void submit(so_backend *base, const so_op *op) {
    cuda_backend *b = (cuda_backend *)base;
    bool has_downloads = b->n_downloads > b->n_queued;
    if (op->kind == SO_OP_DOWNLOAD) {
        record_download(b, op);
        return;
    }
    if (has_downloads || (op->kind == SO_OP_UPLOAD && b->n_ops > 0))
        queue_phase(b);
    if (op->kind == SO_OP_UPLOAD) {
        stage(b, op);
        return;
    }
    if (b->n_ops == b->ops_cap) {
        b->ops_cap = b->ops_cap ? 2 * b->ops_cap : 1024;
        b->ops = (so_op *)realloc(b->ops, b->ops_cap * sizeof *b->ops);
    }
    b->ops[b->n_ops++] = *op;
}

/* ---- running ---- */

static __global__ void spread(const char *from, const segment *list) {
    segment s = list[blockIdx.x];
    const char *src = from + s.off;
    for (uint32_t i = (blockIdx.y * 256 + threadIdx.x) * 4; i < s.n_bytes; i += gridDim.y * 1024) {
        if (i + 4 <= s.n_bytes)
            *(uint32_t *)(s.dst + i) = *(const uint32_t *)(src + i);
        else
            for (uint32_t j = i; j < s.n_bytes; j++)
                s.dst[j] = src[j];
    }
}

static void send_uploads(cuda_backend *b) {
    if (!b->n_segments)
        return;
    size_t list = (b->stage_len + 15) / 16 * 16, end = list + b->n_segments * sizeof(segment),
           largest = 0;
    reserve_host(b, &b->stage, end, b->stage_len);
    if (b->failed != cudaSuccess)
        return;
    memcpy(b->stage.data + list, b->segments, b->n_segments * sizeof(segment));
    if (end > b->stage_dev_cap) { /* earlier phases have read theirs once the stream is idle */
        TRY(b, cudaStreamSynchronize(b->stream));
        cudaFree(b->stage_dev);
        b->stage_dev = NULL;
        TRY(b, cudaMalloc(&b->stage_dev, b->stage.cap));
        b->stage_dev_cap = b->stage_dev ? b->stage.cap : 0;
    }
    if (b->failed != cudaSuccess)
        return;
    for (size_t i = 0; i < b->n_segments; i++)
        largest = b->segments[i].n_bytes > largest ? b->segments[i].n_bytes : largest;
    TRY(b, cudaMemcpyAsync(b->stage_dev + b->stage_from, b->stage.data + b->stage_from,
                           end - b->stage_from, cudaMemcpyHostToDevice, b->stream));
    unsigned y = (unsigned)((largest + 4095) / 4096);
    spread<<<dim3((unsigned)b->n_segments, y < 1    ? 1
                                           : y > 64 ? 64
                                                    : y),
             256, 0, b->stream>>>(b->stage_dev, (const segment *)(b->stage_dev + list));
    b->stage_from = b->stage_len = (end + 15) / 16 * 16;
    b->n_segments = 0;
}

static bool is_bf16(const so_weight *w) { return w->fmt == SO_FMT_BF16 || w->fmt == SO_FMT_F32; }

/* Scratch for split rows and for parts of attention, before anything is launched or captured. */
static void reserve_scratch(cuda_backend *b) {
    size_t frag[2] = {0, 0}, sums = 0, parts = 0, rows = 0;
    for (size_t i = 0; i < b->n_ops; i++) {
        const so_op *op = &b->ops[i];
        size_t n = ((size_t)op->n + 63) / 64 * 64;
        if (op->kind == SO_OP_MATMUL) {
            const so_weight *w = op->matmul.w;
            size_t f = n / 8 * w->n_steps * 32 * sizeof(uint4),
                   s = n * (w->n_steps / 2) * sizeof(float);
            int which = !is_bf16(w);
            frag[which] = f > frag[which] ? f : frag[which];
            sums = s > sums ? s : sums;
            rows = n > rows ? n : rows;
        } else if (op->kind == SO_OP_ATTENTION) {
            size_t p = so_cuda_attention_bytes(op->n, op->attention.n_heads,
                                               op->attention.store->shape.head_dim);
            parts = p > parts ? p : parts;
        }
    }
    bool grown = false;
    for (int i = 0; i < 2; i++)
        if (frag[i] > b->split_cap[i]) {
            cudaFree(b->split[i].frag);
            TRY(b, cudaMalloc(&b->split[i].frag, frag[i]));
            TRY(b, cudaMemset(b->split[i].frag, 0, frag[i]));
            b->split_cap[i] = frag[i];
            grown = true;
        }
    if (sums + rows * sizeof(float) > b->sums_cap) {
        b->sums_cap = sums + rows * sizeof(float);
        for (int i = 0; i < 2; i++) {
            cudaFree(b->split[i].scale);
            TRY(b, cudaMalloc(&b->split[i].scale, b->sums_cap));
        }
        grown = true;
    }
    for (int i = 0; i < 2; i++) {
        b->split[i].sums = b->split[i].scale + rows;
        b->split[i].bf16 = i == 0;
    }
    if (parts > b->parts_cap) {
        cudaFree(b->parts);
        TRY(b, cudaMalloc(&b->parts, parts));
        b->parts_cap = parts;
        grown = true;
    }
    if (grown)
        drop_graphs(b);
}

static char *at(so_view v) { return v.buf->data + v.off; }
static bool same(so_view a, so_view b) { return a.buf == b.buf && a.off == b.off; }

/* Which rows are split now. */
typedef struct split_status {
    const char *x;
    int kind, n;
} split_status;

/* The split that the products after operation i want of its result `out`; NULL: no product follows. */
static const so_split *wanted(cuda_backend *b, size_t i, so_view out, int d, split_status *st) {
    const so_op *next = i + 1 < b->n_ops ? &b->ops[i + 1] : NULL;
    if (!next || next->kind != SO_OP_MATMUL || next->n != b->ops[i].n ||
        !same(next->matmul.x, out) || next->matmul.w->k != d)
        return NULL;
    *st = {at(out), !is_bf16(next->matmul.w), next->n};
    return &b->split[st->kind];
}

/* Whether operation `next` adds the product's result to a row in place. */
static bool adds(const so_op *next, const so_op *product) {
    return next->kind == SO_OP_ADD && next->n == product->n &&
           same(next->eltwise.b, product->matmul.out) && same(next->eltwise.out, next->eltwise.a) &&
           next->eltwise.d == product->matmul.w->m;
}

/* Products of the same rows, of one format, that do not overwrite them; returns how many operations
 * were taken. An addition after the last is part of it. */
static size_t launch_products(cuda_backend *b, size_t i, split_status *st) {
    const so_op *op = &b->ops[i];
    const so_weight *w = op->matmul.w;
    int kind = !is_bf16(w), n_products = 0;
    so_product list[SO_MM_GROUP];
    if (st->x != at(op->matmul.x) || st->kind != kind || st->n != op->n)
        so_cuda_split(b->stream, (const float *)at(op->matmul.x), op->n, w->k, &b->split[kind]);
    *st = {at(op->matmul.x), kind, op->n};
    size_t taken = 0;
    for (; n_products < SO_MM_GROUP && i + taken < b->n_ops; taken++) {
        const so_op *o = &b->ops[i + taken];
        if (o->kind != SO_OP_MATMUL || o->n != op->n || !same(o->matmul.x, op->matmul.x) ||
            o->matmul.w->fmt != w->fmt || same(o->matmul.out, o->matmul.x))
            break;
        list[n_products++] = {o->matmul.w,
                              o->matmul.bias.buf ? (const float *)at(o->matmul.bias) : NULL, NULL,
                              (float *)at(o->matmul.out)};
    }
    if (n_products == 0) { /* it overwrites its own rows */
        list[n_products++] = {w, op->matmul.bias.buf ? (const float *)at(op->matmul.bias) : NULL,
                              NULL, (float *)at(op->matmul.out)};
        taken = 1;
        st->x = NULL;
    }
    const so_op *last = &b->ops[i + taken - 1],
                *next = i + taken < b->n_ops ? &b->ops[i + taken] : NULL;
    if (next && adds(next, last)) {
        so_product *p = &list[n_products - 1];
        p->add = p->out = (float *)at(next->eltwise.out);
        taken++;
        if ((const char *)p->out == st->x)
            st->x = NULL;
    }
    so_cuda_matmul(b->stream, list, n_products, &b->split[kind], op->n);
    return taken;
}

/* Rope of q, rope of k, store of that k, one after the other. */
static bool is_rope_store(const cuda_backend *b, size_t i) {
    const so_op *o = &b->ops[i];
    return i + 2 < b->n_ops && o[0].kind == SO_OP_ROPE && o[1].kind == SO_OP_ROPE &&
           o[2].kind == SO_OP_KV_STORE && o[0].n == o[1].n && o[1].n == o[2].n &&
           same(o[1].rope.x, o[2].kv_store.k) && !same(o[0].rope.x, o[1].rope.x);
}

/* Neighbouring operations that share a kernel are taken together. This never changes a result: fused
 * kernels round where the separate ones do. */
static void launch(cuda_backend *b) {
    split_status st = {};
    for (size_t i = 0; i < b->n_ops; i++) {
        const so_op *op = &b->ops[i];
        if (op->n == 0)
            continue;
        if (op->kind == SO_OP_MATMUL) {
            i += launch_products(b, i, &st) - 1;
            continue;
        }
        st.x = NULL;
        if (is_rope_store(b, i)) {
            so_cuda_rope_store(b->stream, op, op + 1, op + 2);
            i += 2;
        } else if (op->kind == SO_OP_EMBED) {
            so_cuda_embed(b->stream, op->embed.w, (const int32_t *)at(op->embed.ids),
                          op->embed.scale, op->n, (float *)at(op->embed.out));
        } else if (op->kind == SO_OP_ATTENTION) {
            so_cuda_attention(b->stream, op, b->parts,
                              wanted(b, i, op->attention.out,
                                     op->attention.n_heads * op->attention.store->shape.head_dim,
                                     &st));
        } else if (op->kind == SO_OP_RMS_NORM) {
            so_cuda_op(b->stream, op, wanted(b, i, op->norm.out, op->norm.d, &st));
        } else if (op->kind == SO_OP_SILU_MUL || op->kind == SO_OP_GELU_MUL ||
                   op->kind == SO_OP_GELU) {
            so_cuda_op(b->stream, op, wanted(b, i, op->eltwise.out, op->eltwise.d, &st));
        } else {
            so_cuda_op(b->stream, op, NULL);
        }
    }
}

static uint64_t hash(uint64_t h, const void *p, size_t n) {
    for (size_t i = 0; i < n; i++)
        h = (h ^ ((const uint8_t *)p)[i]) * 1099511628211u;
    return h;
}

static uint64_t key_of(const cuda_backend *b) {
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < b->n_ops; i++)
        h = hash(h, &b->ops[i], sizeof b->ops[i]);
    return h;
}

static graph *find_graph(cuda_backend *b, uint64_t key) {
    graph *oldest = &b->graphs[0];
    for (int i = 0; i < MAX_GRAPHS; i++) {
        if (b->graphs[i].key == key)
            return &b->graphs[i];
        if (b->graphs[i].used < oldest->used)
            oldest = &b->graphs[i];
    }
    if (oldest->exec)
        cudaGraphExecDestroy(oldest->exec);
    *oldest = {key, NULL, 0};
    return oldest;
}

static void run_list(cuda_backend *b) {
    uint64_t key = key_of(b);
    graph *g = find_graph(b, key);
    bool seen = g->used > 0;
    g->used = ++b->clock;
    if (!seen || b->n_ops < 8) {
        launch(b);
        return;
    }
    if (!g->exec) {
        cudaGraph_t made = NULL;
        TRY(b, cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal));
        launch(b);
        TRY(b, cudaStreamEndCapture(b->stream, &made));
        if (made) {
            TRY(b, cudaGraphInstantiate(&g->exec, made, 0));
            cudaGraphDestroy(made);
        }
    }
    if (g->exec)
        TRY(b, cudaGraphLaunch(g->exec, b->stream));
}

static void queue_downloads(cuda_backend *b) {
    size_t end = b->results_len;
    for (size_t i = b->n_queued; i < b->n_downloads; i++) {
        b->downloads[i].at = end;
        end += (b->downloads[i].n_bytes + 15) / 16 * 16;
    }
    reserve_host(b, &b->results, end, b->results_len);
    for (size_t i = b->n_queued; b->failed == cudaSuccess && i < b->n_downloads; i++)
        TRY(b, cudaMemcpyAsync(b->results.data + b->downloads[i].at, b->downloads[i].src,
                               b->downloads[i].n_bytes, cudaMemcpyDeviceToHost, b->stream));
    b->results_len = end;
    b->n_queued = b->n_downloads;
}

static void queue_phase(cuda_backend *b) {
    if (b->failed == cudaSuccess) {
        TRY(b, cudaSetDevice(b->device));
        reserve_scratch(b);
        send_uploads(b);
    }
    if (b->failed == cudaSuccess && b->n_ops > 0)
        run_list(b);
    if (b->failed == cudaSuccess)
        TRY(b, cudaGetLastError());
    if (b->failed == cudaSuccess)
        queue_downloads(b);
    b->n_ops = 0;
}

static int sync(so_backend *base, so_err *err) {
    cuda_backend *b = (cuda_backend *)base;
    queue_phase(b);
    if (b->failed == cudaSuccess)
        TRY(b, cudaStreamSynchronize(b->stream));
    for (size_t i = 0; b->failed == cudaSuccess && i < b->n_downloads; i++)
        memcpy(b->downloads[i].dst, b->results.data + b->downloads[i].at, b->downloads[i].n_bytes);
    b->n_segments = b->stage_from = b->stage_len = b->results_len = b->n_downloads = b->n_queued =
        0;
    if (b->failed == cudaSuccess)
        return SO_OK;
    int rc = so_err_set(err, SO_EIO, "the GPU failed: %s (%s)", cudaGetErrorString(b->failed),
                        b->failed_at);
    if (cudaStreamSynchronize(b->stream) == cudaSuccess)
        b->failed = cudaSuccess; /* the device still works, and so may the next pass */
    return rc;
}

static void describe(const so_backend *base, so_buf *out) {
    so_buf_append_c(out, ((const cuda_backend *)base)->name);
}

static void free_backend(so_backend *base) {
    cuda_backend *b = (cuda_backend *)base;
    drop_graphs(b);
    for (int i = 0; i < 2; i++) {
        cudaFree(b->split[i].frag);
        cudaFree(b->split[i].scale);
    }
    cudaFree(b->parts);
    cudaFree(b->stage_dev);
    cudaFreeHost(b->stage.data);
    cudaFreeHost(b->results.data);
    if (b->stream)
        cudaStreamDestroy(b->stream);
    free(b->ops);
    free(b->downloads);
    free(b->segments);
    free(b);
}

static const so_backend_vt VT = {"cuda",        free_backend, buffer_create, buffer_free,
                                 weight_create, weight_pack,  weight_free,   kv_create,
                                 kv_free,       submit,       sync,          describe};

extern "C" __attribute__((visibility("default"))) int
so_cuda_backend_create(int device, so_backend **out, so_err *err) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess)
        return so_err_set(err, SO_EUNSUPPORTED, "no usable GPU: %s", cudaGetErrorString(e));
    if (device < 0 || device >= n)
        return so_err_set(err, SO_ENOTFOUND, "GPU %d does not exist; this machine has %d", device,
                          n);
    cudaDeviceProp p;
    e = cudaGetDeviceProperties(&p, device);
    if (e == cudaSuccess && p.major < 8)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "%s has compute capability %d.%d; 8.0 or newer is needed", p.name,
                          p.major, p.minor);
    cuda_backend *b = (cuda_backend *)calloc(1, sizeof *b);
    b->base.vt = &VT;
    b->device = device;
    if (e == cudaSuccess)
        e = cudaSetDevice(device);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);
    if (e != cudaSuccess) {
        free(b);
        return so_err_set(err, SO_EIO, "GPU %d: %s", device, cudaGetErrorString(e));
    }
    snprintf(b->name, sizeof b->name, "cuda:%d %s, %d SMs, %zu GiB", device, p.name,
             p.multiProcessorCount, p.totalGlobalMem >> 30);
    *out = &b->base;
    return SO_OK;
}
