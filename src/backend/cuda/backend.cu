/* The CUDA backend behind backend.h: buffers, weights, stores, and the list of operations of a pass.
 *
 * submit records operations in phases: uploads, then computation, then downloads. An operation that
 * would go back to an earlier part ends the phase. A phase is queued on the stream as one copy of all
 * its uploads, one kernel that spreads them to their buffers, its computation, and copies of results to
 * pinned memory; sync queues the last phase, waits, and copies the results to the caller. A usual pass
 * is one phase. Computation that has been seen before (the same operations on the same buffers) is replayed as a
 * CUDA graph; what changes from pass to pass (tokens, positions, pages, rope) is data in device memory,
 * never an argument of a kernel.
 *
 * Errors stick: the first failed call is reported by the next sync, and by every one after it if the
 * device is lost. One thread at a time, as backend.h says, but not always the same one: a
 * thread's current device is GPU 0 at first, and a call on the wrong device takes memory there. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/launch.cuh"

enum { MAX_GRAPHS = 256, STAGE_FIRST = 1 << 20 };

typedef struct segment { /* of the staged uploads */
    char *dst;
    uint32_t off, n_bytes;
} segment;

typedef struct download {
    const char *src;
    char *dst;
    size_t n_bytes, at; /* at: offset in the pinned results */
} download;

/* What identifies a list of operations: every member that a kernel gets. */
typedef struct signature {
    uint64_t *words;
    size_t n, cap;
} signature;

typedef struct graph {
    signature key;
    uint64_t hash;
    cudaGraphExec_t exec; /* NULL: seen once, or refused */
    bool refused;         /* no graph can be made of it */
    so_persist_plan plan; /* of exec */
    uint64_t used;        /* 0: free */
} graph;

typedef struct host_block {
    char *data;
    size_t cap;
} host_block;

typedef struct cuda_backend {
    so_backend base;
    int device;
    cudaStream_t stream;
    so_queue queue;
    cudaError_t failed;
    const char *failed_at;
    so_op *ops; /* of the phase being recorded, without uploads and downloads */
    size_t n_ops, ops_cap;
    download *downloads; /* since the last sync; the first n_queued are on the stream */
    size_t n_downloads, n_queued, downloads_cap;
    host_block stage, results; /* pinned; filled from the start after each sync */
    char *stage_dev;
    size_t stage_from, stage_len, results_len, stage_dev_cap,
        n_segments; /* stage_from: start of this phase */
    segment *segments;
    size_t segments_cap;
    so_memory memory;
    signature key; /* of the phase being recorded */
    graph graphs[MAX_GRAPHS];
    uint64_t clock;
    char name[256];
} cuda_backend;

/* Remembers the first failure. CUDA also keeps it as the thread's last error, which is cleared here, so that
 * a later call does not report it. */
static void note(cuda_backend *b, cudaError_t e, const char *what) {
    if (e == cudaSuccess)
        return;
    (void)cudaGetLastError();
    if (b->failed == cudaSuccess) {
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
        e = cudaMemsetAsync(buf->data, 0, n_bytes, b->stream); /* before its uploads */
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        cudaFree(buf->data);
        free(buf);
        return so_err_set(err, e == cudaErrorMemoryAllocation ? SO_ENOMEM : SO_EIO,
                          "a buffer of %zu MB on the GPU: %s", n_bytes >> 20,
                          cudaGetErrorString(e));
    }
    buf->n_bytes = n_bytes;
    *out = buf;
    return SO_OK;
}

static void forget(graph *g);
static void drop_graphs(cuda_backend *b) {
    for (int i = 0; i < MAX_GRAPHS; i++)
        forget(&b->graphs[i]);
}

static void queue_phase(cuda_backend *b);

/* Before an object is freed: operations that were submitted may use it, and graphs hold its address. */
static void let_go(cuda_backend *b) {
    cudaSetDevice(b->device);
    if (b->n_ops > 0 || b->n_segments > 0 || b->n_downloads > b->n_queued)
        queue_phase(b);
    cudaStreamSynchronize(b->stream);
    drop_graphs(b);
}

static void buffer_free(so_backend *base, so_buffer *buf) {
    cuda_backend *b = (cuda_backend *)base;
    let_go(b);
    cudaFree(buf->data);
    free(buf);
}

static int weight_create(so_backend *base, const so_tensor *t, so_weight **out, so_err *err) {
    cuda_backend *b = (cuda_backend *)base;
    so_weight *w = (so_weight *)calloc(1, sizeof *w);
    cudaSetDevice(b->device);
    int rc = so_cuda_weight_pack(w, t, b->queue.n_sms, b->stream, err);
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
    if (!w)
        return;
    let_go((cuda_backend *)base);
    cudaFree(w->data);
    cudaFree(w->factor);
    free(w);
}

static int kv_create(so_backend *base, const so_kv_shape *shape, so_kv_store **out, so_err *err) {
    cuda_backend *b = (cuda_backend *)base;
    bool known = so_kv_dtype_ok(shape->dtype) || shape->dtype == SO_DTYPE_BF16;
    if (!known || shape->head_dim > 256 || shape->head_dim % 2 != 0)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "a KV cache of %s with heads of %d on the GPU; types are " SO_KV_DTYPES
                          " and BF16, heads even and at most 256",
                          so_dtype_get(shape->dtype) ? so_dtype_get(shape->dtype)->name : "?",
                          shape->head_dim);
    if (!so_cuda_heads_fit(shape, b->queue.shared_block))
        return so_err_set(
            err, SO_EUNSUPPORTED,
            "heads of %d in a KV cache of %s need more shared memory than the %d KB that this GPU "
            "gives a thread block; use --kv-type f16 or --device cpu",
            shape->head_dim, so_dtype_get(shape->dtype)->name, b->queue.shared_block >> 10);
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
        (void)cudaGetLastError();
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
    let_go((cuda_backend *)base);
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
    TRY(b, cudaSetDevice(b->device)); /* the thread may be a new one */
    TRY(b, cudaMallocHost((void **)&p, cap));
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

static void put_op(signature *s, const so_op *o);

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
    put_op(&b->key, op);
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

/* Replaces *p by n zeroed bytes if it has fewer; true if it did. */
static bool reserve_device(cuda_backend *b, void **p, size_t *cap, size_t n) {
    if (n <= *cap)
        return false;
    cudaFree(*p); /* waits for the kernels that use it */
    *p = NULL;
    *cap = 0;
    TRY(b, cudaMalloc(p, n));
    if (*p) {
        TRY(b, cudaMemsetAsync(*p, 0, n, b->stream));
        *cap = n;
    }
    return true;
}

/* Memory for the kernels of the list, before anything is launched or captured. */
static void reserve_memory(cuda_backend *b) {
    so_memory need, *m = &b->memory;
    so_cuda_need(&b->queue, b->ops, b->n_ops, &need);
    size_t cap = m->half_bytes;
    bool grown = reserve_device(b, (void **)&m->half[0], &cap, need.half_bytes);
    grown |= reserve_device(b, (void **)&m->half[1], &m->half_bytes, need.half_bytes);
    grown |= reserve_device(b, &m->scratch.counters, &m->scratch.counter_bytes,
                            need.scratch.counter_bytes);
    grown |= reserve_device(b, (void **)&m->scratch.parts, &m->scratch.parts_bytes,
                            need.scratch.parts_bytes);
    grown |= reserve_device(b, (void **)&m->squares, &m->squares_bytes, need.squares_bytes);
    grown |= reserve_device(b, (void **)&m->row_scale, &m->row_scale_bytes, need.row_scale_bytes);
    grown |= reserve_device(b, (void **)&m->exchange, &m->exchange_bytes, need.exchange_bytes);
    if (!m->half[0] || !m->half[1])
        m->half_bytes = 0; /* one allocation failed: try both again */
    if (grown)
        drop_graphs(b);
}

/* ---- graphs ---- */

static void put(signature *s, uint64_t v) {
    if (s->n == s->cap) {
        s->cap = s->cap ? 2 * s->cap : 4096;
        s->words = (uint64_t *)realloc(s->words, s->cap * sizeof *s->words);
    }
    s->words[s->n++] = v;
}

static void put_view(signature *s, so_view v) {
    put(s, v.buf ? (uint64_t)(uintptr_t)(v.buf->data + v.off) : 0);
}

static void put_two(signature *s, uint32_t a, uint32_t b) { put(s, (uint64_t)a << 32 | b); }

static uint32_t bits_of(float f) {
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static void put_op(signature *s, const so_op *o) {
    put_two(s, (uint32_t)o->kind, (uint32_t)o->n);
    switch (o->kind) {
    case SO_OP_EMBED:
        put_view(s, o->embed.out);
        put_view(s, o->embed.ids);
        put(s, (uint64_t)(uintptr_t)o->embed.w);
        put(s, bits_of(o->embed.scale));
        break;
    case SO_OP_GATHER:
        put_view(s, o->gather.out);
        put_view(s, o->gather.x);
        put_view(s, o->gather.rows);
        put(s, (uint64_t)o->gather.d);
        break;
    case SO_OP_RMS_NORM:
    case SO_OP_LAYER_NORM:
        put_view(s, o->norm.out);
        put_view(s, o->norm.x);
        put_view(s, o->norm.weight);
        put_view(s, o->norm.bias);
        put_two(s, (uint32_t)o->norm.d, bits_of(o->norm.eps));
        break;
    case SO_OP_MATMUL:
        put_view(s, o->matmul.out);
        put_view(s, o->matmul.x);
        put_view(s, o->matmul.bias);
        put(s, (uint64_t)(uintptr_t)o->matmul.w);
        break;
    case SO_OP_ADD:
    case SO_OP_SILU_MUL:
    case SO_OP_GELU_MUL:
    case SO_OP_GELU:
        put_view(s, o->eltwise.out);
        put_view(s, o->eltwise.a);
        if (o->kind != SO_OP_GELU)
            put_view(s, o->eltwise.b);
        put(s, (uint64_t)o->eltwise.d);
        break;
    case SO_OP_ROPE:
        put_view(s, o->rope.x);
        put_view(s, o->rope.table);
        put_two(s, (uint32_t)o->rope.n_heads, (uint32_t)o->rope.head_dim << 1 | o->rope.halves);
        break;
    case SO_OP_KV_STORE:
        put(s, (uint64_t)(uintptr_t)o->kv_store.store);
        put(s, (uint64_t)o->kv_store.layer);
        put_view(s, o->kv_store.k);
        put_view(s, o->kv_store.v);
        put_view(s, o->kv_store.slots);
        break;
    case SO_OP_KV_COPY:
        put(s, (uint64_t)(uintptr_t)o->kv_copy.store);
        put_view(s, o->kv_copy.from);
        put_view(s, o->kv_copy.to);
        break;
    case SO_OP_ATTENTION:
        put(s, (uint64_t)(uintptr_t)o->attention.store);
        put_two(s, (uint32_t)o->attention.layer, (uint32_t)o->attention.n_heads);
        put_view(s, o->attention.out);
        put_view(s, o->attention.q);
        put_view(s, o->attention.rows);
        put_view(s, o->attention.pages);
        put_view(s, o->attention.tails);
        put_two(s, bits_of(o->attention.scale), (uint32_t)o->attention.window);
        break;
    case SO_OP_ARGMAX:
        put_view(s, o->argmax.out);
        put_view(s, o->argmax.x);
        put(s, (uint64_t)o->argmax.d);
        break;
    case SO_OP_SAMPLE:
        put_view(s, o->sample.out);
        put_view(s, o->sample.x);
        put_view(s, o->sample.best);
        put_view(s, o->sample.rows);
        put(s, (uint64_t)o->sample.d);
        break;
    default:
        break;
    }
}

static uint64_t hash_of(const signature *s) {
    uint64_t h = 14695981039346656037u;
    for (size_t i = 0; i < s->n; i++) {
        h = (h ^ s->words[i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h;
}

static void forget(graph *g) {
    if (g->exec)
        cudaGraphExecDestroy(g->exec);
    so_persist_plan_free(&g->plan);
    free(g->key.words);
    memset(g, 0, sizeof *g);
}

/* The graph of the recorded list; a new one replaces the one unused for longest. */
static graph *find_graph(cuda_backend *b) {
    uint64_t h = hash_of(&b->key);
    graph *oldest = &b->graphs[0];
    for (int i = 0; i < MAX_GRAPHS; i++) {
        graph *g = &b->graphs[i];
        if (g->used && g->hash == h && g->key.n == b->key.n &&
            memcmp(g->key.words, b->key.words, b->key.n * sizeof *b->key.words) == 0)
            return g;
        if (g->used < oldest->used)
            oldest = g;
    }
    forget(oldest);
    oldest->hash = h;
    for (size_t i = 0; i < b->key.n; i++)
        put(&oldest->key, b->key.words[i]);
    return oldest;
}

/* The list as a graph; NULL if that fails, for example for lack of memory. A launch that is refused during the
 * capture leaves a graph without that kernel, which must not be used. */
static cudaGraphExec_t capture(cuda_backend *b, so_persist_plan *plan) {
    cudaGraph_t made = NULL;
    cudaGraphExec_t exec = NULL;
    so_persist_plan_make(&b->queue, b->ops, b->n_ops, b->memory.exchange, b->memory.exchange_bytes,
                         plan);
    if (cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) {
        (void)cudaGetLastError();
        return NULL;
    }
    so_cuda_run(&b->queue, b->ops, b->n_ops, &b->memory, plan);
    bool whole = cudaGetLastError() == cudaSuccess;
    whole &= cudaStreamEndCapture(b->stream, &made) == cudaSuccess;
    if (whole && cudaGraphInstantiate(&exec, made, 0) != cudaSuccess)
        exec = NULL;
    if (made)
        cudaGraphDestroy(made);
    (void)cudaGetLastError();
    return exec;
}

/* Beyond this many rows a pass takes longer than its launches. */
enum { SHORT_PASS = 64 };
/* Lists of fewer operations are launched kernel by kernel. */
enum { MIN_GRAPH = 8 };

static bool is_short(const so_op *ops, size_t n_ops) {
    int most = 0;
    for (size_t i = 0; i < n_ops; i++)
        most = ops[i].n > most ? ops[i].n : most;
    return most <= SHORT_PASS;
}

/* A list is captured when it comes for the second time: most lists of prompt chunks come only once. Very short
 * ones, such as copies within the cache, are never captured, so only their first time is unusual. */
static void run_list(cuda_backend *b) {
    graph *g = find_graph(b);
    bool seen = g->used > 0, captures = b->n_ops >= MIN_GRAPH;
    g->used = ++b->clock;
    if (!g->exec && !g->refused && (!seen || captures) && is_short(b->ops, b->n_ops))
        b->base.n_unusual++;
    if (!seen || !captures || g->refused) {
        so_cuda_run(&b->queue, b->ops, b->n_ops, &b->memory, NULL);
        return;
    }
    if (!g->exec)
        g->exec = capture(b, &g->plan);
    if (!g->exec && g->plan.n_runs > 0) { /* without the persistent kernel, from now on */
        so_persist_plan_free(&g->plan);
        b->queue.persist = false;
        g->exec = capture(b, &g->plan);
    }
    g->refused = !g->exec;
    if (g->exec)
        TRY(b, cudaGraphLaunch(g->exec, b->stream));
    else
        so_cuda_run(&b->queue, b->ops, b->n_ops, &b->memory, NULL);
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
        reserve_memory(b);
        send_uploads(b);
    }
    if (b->failed == cudaSuccess && b->n_ops > 0)
        run_list(b);
    if (b->failed == cudaSuccess)
        TRY(b, cudaGetLastError());
    if (b->failed == cudaSuccess)
        queue_downloads(b);
    b->n_ops = b->key.n = 0;
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
    cudaSetDevice(b->device);
    drop_graphs(b);
    for (int i = 0; i < 2; i++)
        cudaFree(b->memory.half[i]);
    cudaFree(b->memory.scratch.counters);
    cudaFree(b->memory.scratch.parts);
    cudaFree(b->memory.squares);
    cudaFree(b->memory.row_scale);
    cudaFree(b->memory.exchange);
    cudaFree(b->stage_dev);
    cudaFreeHost(b->stage.data);
    cudaFreeHost(b->results.data);
    if (b->stream)
        cudaStreamDestroy(b->stream);
    free(b->ops);
    free(b->key.words);
    free(b->downloads);
    free(b->segments);
    free(b);
}

/* ---- limits ---- */

static int memory(so_backend *base, size_t *free_bytes, size_t *total_bytes, so_err *err) {
    cudaError_t e = cudaSetDevice(((cuda_backend *)base)->device);
    if (e == cudaSuccess)
        e = cudaMemGetInfo(free_bytes, total_bytes);
    if (e == cudaSuccess)
        return SO_OK;
    (void)cudaGetLastError();
    return so_err_set(err, SO_EIO, "cannot ask the GPU for its memory: %s", cudaGetErrorString(e));
}

static __global__ void read_all(const uint4 *p, size_t n, uint4 *sink) {
    uint4 x = {0, 0, 0, 0};
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = __ldcs(p + i);
        x.x ^= v.x ^ v.y;
        x.y ^= v.z ^ v.w;
    }
    if (x.x == 0x12345678 && x.y == 0x9abcdef0) /* never; keeps the loads */
        *sink = x;
}

enum { PROBE_MMA = 1 << 12 };

static __global__ void multiply_all(float *sink) {
    float c[4][4] = {};
    uint32_t a[4] = {threadIdx.x, 1, 2, 3};
    for (int i = 0; i < PROBE_MMA; i++)
        for (int j = 0; j < 4; j++)
            so_mma(c[j], a, i, j);
    if (c[0][0] + c[1][1] + c[2][2] + c[3][3] == 12345.0f)
        *sink = c[0][0];
}

static int probe(so_backend *base, size_t n_bytes, so_probe *out, so_err *err) {
    cuda_backend *b = (cuda_backend *)base;
    char *data = NULL;
    cudaEvent_t t[3] = {};
    cudaError_t e = cudaSetDevice(b->device);
    if (e == cudaSuccess)
        e = cudaMalloc(&data, n_bytes + 16);
    if (e == cudaSuccess)
        e = cudaMemsetAsync(data, 1, n_bytes + 16, b->stream);
    for (int i = 0; i < 3 && e == cudaSuccess; i++)
        e = cudaEventCreate(&t[i]);
    unsigned blocks = (unsigned)b->queue.n_sms * 8;
    if (e == cudaSuccess) {
        read_all<<<blocks, 256, 0, b->stream>>>((uint4 *)data, n_bytes / 16, (uint4 *)data);
        cudaEventRecord(t[0], b->stream);
        read_all<<<blocks, 256, 0, b->stream>>>((uint4 *)data, n_bytes / 16, (uint4 *)data);
        cudaEventRecord(t[1], b->stream);
        multiply_all<<<blocks, 256, 0, b->stream>>>((float *)data);
        cudaEventRecord(t[2], b->stream);
        e = cudaEventSynchronize(t[2]);
    }
    float read_ms = 0, mma_ms = 0;
    if (e == cudaSuccess)
        e = cudaEventElapsedTime(&read_ms, t[0], t[1]);
    if (e == cudaSuccess)
        e = cudaEventElapsedTime(&mma_ms, t[1], t[2]);
    for (int i = 0; i < 3; i++)
        if (t[i])
            cudaEventDestroy(t[i]);
    cudaFree(data);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        return so_err_set(err, e == cudaErrorMemoryAllocation ? SO_ENOMEM : SO_EIO,
                          "cannot measure the GPU: %s", cudaGetErrorString(e));
    }
    *out = {(double)n_bytes / read_ms * 1e-6,
            (double)blocks * 8 * PROBE_MMA * 4 * 2048 / mma_ms * 1e-6};
    return SO_OK;
}

static const so_backend_vt VT = {"cuda",      true,          free_backend, buffer_create,
                                 buffer_free, weight_create, weight_pack,  weight_free,
                                 kv_create,   kv_free,       submit,       sync,
                                 describe,    probe,         memory,       true};

/* CUDA reports a missing driver and an old one by the same code. */
static int no_gpu(cudaError_t e, so_err *err) {
    int driver = 0, runtime = 0;
    (void)cudaGetLastError();
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (e == cudaErrorInsufficientDriver && driver == 0)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "no NVIDIA driver is installed (libcuda.so.1 is missing)");
    if (e == cudaErrorInsufficientDriver)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "the NVIDIA driver is too old: it has CUDA %d.%d, and this build needs "
                          "%d.%d; update the driver",
                          driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (e == cudaSuccess || e == cudaErrorNoDevice)
        return so_err_set(
            err, SO_EUNSUPPORTED,
            "the NVIDIA driver finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES");
    return so_err_set(err, SO_EUNSUPPORTED, "no usable GPU: %s", cudaGetErrorString(e));
}

/* Whether the kernels run on the GPU, which becomes the thread's current device. */
static int check_device(int device, const cudaDeviceProp *p, so_err *err) {
    if (p->major < 8)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "%s has compute capability %d.%d; 8.0 or newer is needed", p->name,
                          p->major, p->minor);
    if (p->sharedMemPerBlockOptin < SO_SHARED_MIN)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "%s gives a thread block %zu KB of shared memory; the kernels need %d",
                          p->name, p->sharedMemPerBlockOptin >> 10, SO_SHARED_MIN >> 10);
    cudaFuncAttributes any;
    cudaError_t e = cudaSetDevice(device);
    if (e == cudaSuccess)
        e = cudaFuncGetAttributes(&any, (const void *)spread);
    if (e == cudaSuccess)
        return SO_OK;
    (void)cudaGetLastError();
    if (e == cudaErrorNoKernelImageForDevice || e == cudaErrorInvalidDeviceFunction)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "the GPU library was not built for %s, which has compute capability "
                          "%d.%d; build it with `make cuda CUDA_ARCHS=%d%d`",
                          p->name, p->major, p->minor, p->major, p->minor);
    return so_err_set(err, SO_EIO, "%s: %s", p->name, cudaGetErrorString(e));
}

/* For tests; see persist.cuh. */
extern "C" __attribute__((visibility("default"))) int so_cuda_lost_product = -1;

extern "C" __attribute__((visibility("default"))) const unsigned so_cuda_abi = SO_BACKEND_ABI;

extern "C" __attribute__((visibility("default"))) int
so_cuda_backend_create(int device, so_backend **out, so_err *err) {
    int n = 0;
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess || n == 0)
        return no_gpu(e, err);
    if (device < 0 || device >= n)
        return so_err_set(err, SO_ENOTFOUND, "GPU %d does not exist; this machine has %d", device,
                          n);
    cudaDeviceProp p;
    e = cudaGetDeviceProperties(&p, device);
    int rc = e == cudaSuccess ? check_device(device, &p, err) : SO_OK;
    if (rc != SO_OK)
        return rc;
#ifdef SO_SHARED_LIMIT /* for tests: a GPU with less shared memory */
    p.sharedMemPerBlockOptin = SO_SHARED_LIMIT;
    p.sharedMemPerMultiprocessor = SO_SHARED_LIMIT + 1024;
#endif
    cuda_backend *b = (cuda_backend *)calloc(1, sizeof *b);
    b->base.vt = &VT;
    b->device = device;
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking);
    if (e != cudaSuccess) {
        (void)cudaGetLastError();
        free(b);
        return so_err_set(err, SO_EIO, "GPU %d: %s", device, cudaGetErrorString(e));
    }
    b->queue = {b->stream,
                p.major >= 9,
                false,
                p.major >= 9,
                false,
                p.multiProcessorCount,
                (int)p.sharedMemPerBlockOptin,
                (int)p.sharedMemPerMultiprocessor};
#ifdef SO_WGMMA
    b->queue.wgmma = p.major == 9 && p.minor == 0;
#endif
    b->queue.persist = p.major >= 9 && so_persist_usable(&b->queue);
    if (p.major < 9)
        b->base.note =
            "layers are separate kernels: one kernel for all needs compute capability 9.0";
    else if (!b->queue.persist)
        b->base.note = "layers are separate kernels: one kernel for all needs more shared memory";
    snprintf(b->name, sizeof b->name, "cuda:%d %s, %d SMs, %zu GiB", device, p.name,
             p.multiProcessorCount, p.totalGlobalMem >> 30);
    *out = &b->base;
    return SO_OK;
}
