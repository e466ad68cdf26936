/* The CPU backend: buffers, weights and KV stores in plain memory, and the list of operations.
 *
 * submit() appends the operation (and an upload's bytes) to a list. sync(), or a full list, makes
 * the thread pool run the whole list. Each operation becomes one or two tasks, and every thread
 * computes its part of every task. A task has a barrier before it only if it conflicts with a task
 * since the last barrier: both touch the same memory, and at least one of them writes it. Tasks
 * that split this memory between the threads in the same way do not conflict.
 *
 * A matmul with quantised weights is two tasks: the first quantises the activations into a scratch,
 * which the following matmuls over the same rows (q, k, v; gate, up) reuse. The splits are chosen
 * so that a layer of the Llama family has seven barriers (|), if rope rotates adjacent elements and
 * activations are quantised in blocks of 32:
 *
 *   residual, norm, quantise | q, k, v, rope, cache | attention, quantise | o |
 *   residual, norm, quantise | gate, up, silu, quantise | down |
 *
 * Output columns of products and queries of attention are split in proportion to the threads' speed
 * (balance.c).
 *
 * Making a task can take longer than running it. So the last SO_LISTS lists are kept with
 * their tasks, except those with uploads after their first operation. A list that is submitted
 * again is only compared with the kept one, operation by operation, until it differs or ends.
 *
 * submit and sync allocate nothing once the upload and scratch memory have grown to the size of the
 * largest pass. Weights are borrowed until weight_pack copies them into the packed layout (pack.h).
 * submit cannot fail: a view that exceeds its buffer is a bug and aborts. One thread at a time. */
#include "backend/cpu/cpu.h"
#include "backend/cpu/pack.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/half.h"
#include "base/log.h"
#include "base/mem.h"

enum { UPLOADS_MAX = 16 << 20, UPLOADS_FIRST = 1 << 16 };

static so_cpu *cpu_of(so_backend *b) { return (so_cpu *)b; }

/* ---- memory ---- */

static int map_pages(so_buffer *buf, size_t n_bytes, const char *what, so_err *err) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE), padded;
    errno = ENOMEM;
    if (so_add_size(n_bytes ? n_bytes : 1, page - 1, &padded)) {
        padded &= ~(page - 1);
        void *p = mmap(NULL, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p != MAP_FAILED) {
            *buf = (so_buffer){.data = p, .n_bytes = n_bytes, .map_bytes = padded};
            return 0;
        }
    }
    return so_err_set(err, SO_ENOMEM, "no memory for %s of %zu bytes: %s", what, n_bytes,
                      strerror(errno));
}

static void unmap_pages(so_buffer *buf) {
    if (buf->data)
        munmap(buf->data, buf->map_bytes);
}

static int buffer_create(so_backend *b, size_t n_bytes, so_buffer **out, so_err *err) {
    (void)b;
    so_buffer buf;
    int rc = map_pages(&buf, n_bytes, "a buffer", err);
    if (rc != 0)
        return rc;
    *out = SO_NEW(so_buffer);
    **out = buf;
    return 0;
}

static void flush(so_cpu *b), forget_lists(so_cpu *b);

static void buffer_free(so_backend *b, so_buffer *buf) {
    if (!buf)
        return;
    forget_lists(cpu_of(b)); /* queued operations may still use it */
    unmap_pages(buf);
    free(buf);
}

static int weight_create(so_backend *b, const so_tensor *t, so_weight **out, so_err *err) {
    (void)b;
    const so_dtype_info *info = so_dtype_get((int)t->dtype);
    if (!info || !so_kernels_scalar.matmul[t->dtype])
        return so_err_set(err, SO_EUNSUPPORTED,
                          "tensor %.*s: type %d is not supported by the CPU backend",
                          SO_STR_ARG(t->name), (int)t->dtype);
    int64_t n_cols = t->dims[0], n_rows = so_tensor_rows(t);
    if (n_cols < 1 || n_cols > 1 << 24 || n_rows < 1 || n_rows > INT32_MAX)
        return so_err_set(err, SO_ERANGE,
                          "tensor %.*s: a matrix of %lld rows by %lld columns is out of range",
                          SO_STR_ARG(t->name), (long long)n_rows, (long long)n_cols);
    if (n_cols % info->block_len != 0)
        return so_err_set(
            err, SO_EFORMAT,
            "tensor %.*s: rows of %lld elements are not a multiple of %s's block length %d",
            SO_STR_ARG(t->name), (long long)n_cols, info->name, info->block_len);
    size_t row_bytes = so_dtype_row_bytes(t->dtype, n_cols), bytes;
    if (!so_mul_size(row_bytes, (size_t)n_rows, &bytes) || bytes > t->n_bytes || !t->data)
        return so_err_set(err, SO_EFORMAT,
                          "tensor %.*s: its %zu bytes are fewer than its shape needs",
                          SO_STR_ARG(t->name), t->n_bytes);
    so_weight *w = SO_NEW(so_weight);
    *w = (so_weight){.dtype = t->dtype,
                     .n_cols = (int)n_cols,
                     .n_rows = (long)n_rows,
                     .row_bytes = row_bytes,
                     .data = t->data};
    *out = w;
    return 0;
}

typedef struct pack_job {
    const so_weight *w;
    uint8_t *out;
    size_t tile_bytes;
    _Atomic long next; /* first row that no thread has claimed */
} pack_job;

/* Threads claim rows dynamically: page faults on fresh memory can make one of them much slower. */
static void pack_rows(void *arg, int index, int count) {
    (void)index, (void)count;
    enum { CLAIM = 4 * SO_PACK_TILE };
    pack_job *job = arg;
    const so_weight *w = job->w;
    long begin;
    while ((begin = atomic_fetch_add(&job->next, CLAIM)) < w->n_rows) {
        long end = SO_MIN(begin + CLAIM, w->n_rows);
        for (long r = begin; r < end; r += SO_PACK_TILE)
            so_pack_tile(w->dtype, w->data + (size_t)r * w->row_bytes, w->row_bytes,
                         (int)SO_MIN(SO_PACK_TILE, end - r), w->n_cols,
                         job->out + (size_t)(r / SO_PACK_TILE) * job->tile_bytes);
    }
}

static bool weight_pack(so_backend *b, so_weight *w) {
    size_t bytes;
    if (w->tile_bytes != 0)
        return true;
    /* a matrix smaller than one row group (pack.h) would multiply padding */
    if (w->n_rows < SO_PACK_ROWS || !so_pack_bytes(w->dtype, w->n_cols, w->n_rows, &bytes))
        return false;
    uint8_t *out = so_slab_alloc(&cpu_of(b)->slab, bytes, &w->chunk);
    if (!out)
        return false;
    flush(cpu_of(b));
    size_t tile_bytes = so_pack_tile_bytes(w->dtype, w->n_cols);
    so_pool_run(cpu_of(b)->pool, pack_rows, &(pack_job){w, out, tile_bytes, 0});
    w->data = out;
    w->tile_bytes = tile_bytes;
    return true;
}

static void weight_free(so_backend *b, so_weight *w) {
    if (!w)
        return;
    forget_lists(cpu_of(b)); /* queued operations may still use it */
    if (w->chunk)
        so_slab_release(&cpu_of(b)->slab, w->chunk);
    free(w);
}

static bool shape_ok(const so_kv_shape *s) {
    return s->n_layers > 0 && s->n_layers <= 1 << 16 && s->n_heads_kv > 0 &&
           s->n_heads_kv <= 1 << 16 && s->head_dim > 0 && s->head_dim <= SO_HEAD_DIM_MAX &&
           s->n_pages > 0 && so_kv_dtype_ok(s->dtype);
}

static int kv_create(so_backend *b, const so_kv_shape *s, so_kv_store **out, so_err *err) {
    (void)b;
    if (!shape_ok(s))
        return so_err_set(
            err, SO_ERANGE,
            "KV cache of %d layers, %d heads of %d, %d pages, type %d is out of range", s->n_layers,
            s->n_heads_kv, s->head_dim, s->n_pages, (int)s->dtype);
    so_kv_store *store = SO_NEW(so_kv_store);
    store->shape = *s;
    store->entry_bytes = so_kv_entry_bytes(s->dtype, s->head_dim);
    size_t bytes = store->entry_bytes * SO_KV_PAGE * (size_t)s->n_heads_kv;
    size_t n_runs = ((size_t)s->n_pages + SO_KV_RUN - 1) / SO_KV_RUN;
    if (!so_mul_size(bytes, (size_t)s->n_layers, &bytes) ||
        !so_mul_size(bytes, n_runs * SO_KV_RUN, &bytes))
        bytes = SIZE_MAX;
    int rc = map_pages(&store->k, bytes, "the K cache", err);
    if (rc == 0)
        rc = map_pages(&store->v, bytes, "the V cache", err);
    if (rc != 0) {
        unmap_pages(&store->k);
        free(store);
        return rc;
    }
    /* Advice only; small pages work too, but cost a TLB miss for every page of a head. */
    madvise(store->k.data, store->k.map_bytes, MADV_HUGEPAGE);
    madvise(store->v.data, store->v.map_bytes, MADV_HUGEPAGE);
    *out = store;
    return 0;
}

static void kv_free(so_backend *b, so_kv_store *s) {
    if (!s)
        return;
    forget_lists(cpu_of(b)); /* queued operations may still use it */
    unmap_pages(&s->k);
    unmap_pages(&s->v);
    free(s);
}

/* ---- the list ---- */

static void run_tasks(void *arg, int index, int count) {
    so_cpu *b = arg;
    long waited = 0, max = b->list->wait_max;
    for (int i = 0; i < b->n_tasks; i++) {
        const so_task *t = &b->list->tasks[i];
        if (t->barrier) {
            int n_spins = so_pool_barrier(b->pool);
            if (t->weighted)
                waited += n_spins < 0 ? max : SO_MIN(n_spins, max);
        }
        t->fn(b, &b->list->ops[t->op], index, count);
    }
    b->balance.waited[index] = waited;
}

/* Runs the list and measures how long threads wait (balance.c). The waiting time that counts at one
 * barrier is capped at wait_max: half of the mean time between two barriers when the list was last
 * run. */
static void run_list(so_cpu *b) {
    int64_t t = so_clock_ns();
    double spin_ns = so_pool_spin_ns(b->pool);
    if (!b->matches)
        b->list->wait_max = 0;
    so_pool_run(b->pool, run_tasks, b);
    t = so_clock_ns() - t;
    so_balance_update(&b->balance, t, spin_ns);
    int n_barriers = 1;
    for (int i = 0; i < b->n_tasks; i++)
        n_barriers += b->list->tasks[i].barrier;
    b->list->wait_max = spin_ns > 0 ? (long)((double)t / spin_ns / (2 * n_barriers)) : 0;
}

static bool grow_scratch(so_cpu *b, so_scratch *s) {
    if (s->need <= s->n_bytes)
        return true;
    /* On failure the old scratch stays: lists that were run before can still use it. */
    void *data = so_try_aligned(s->need);
    if (!data) {
        so_err_set(&b->err, SO_ENOMEM, "no memory for %zu bytes of quantised activations", s->need);
        return false;
    }
    free(s->data);
    s->data = data;
    s->n_bytes = s->need;
    return true;
}

static void rebuild_tasks(so_cpu *b);

static void flush(so_cpu *b) {
    if (b->matches && b->n_ops != b->list->n_ops)
        rebuild_tasks(b);
    if (b->matches)
        b->n_tasks = b->list->n_tasks;
    bool ok =
        b->err.code == 0 && grow_scratch(b, &b->scratch[0]) && grow_scratch(b, &b->scratch[1]);
    if (b->n_tasks > 0 && ok)
        run_list(b);
    if (b->n_ops > 0) {
        b->list->n_ops = ok && b->uploads_len == 0 ? b->n_ops : 0;
        b->list->n_tasks = b->n_tasks;
        b->list->run = ++b->n_runs;
    }
    b->matches = false;
    b->n_ops = b->n_tasks = b->n_open = 0;
    b->uploads_len = 0;
    b->scratch[0].need = b->scratch[1].need = 0;
    b->quantized.owner = NULL;
}

/* Call before freeing an object that stored operations may name: a new object could get its
 * address, and a stored list would then wrongly match. */
static void forget_lists(so_cpu *b) {
    flush(b);
    for (int i = 0; i < SO_LISTS; i++)
        b->lists[i].n_ops = 0;
}

static bool overlap(const so_range *a, const so_range *b) {
    return a->owner == b->owner && a->begin < b->end && b->begin < a->end;
}

static bool same(const so_range *a, const so_range *b) {
    return a->owner == b->owner && a->begin == b->begin && a->end == b->end;
}

/* Every thread touches the same part of the range in both tasks. */
static bool split_alike(const so_range *a, const so_range *b) {
    return (a->parts > 0 || a->columns > 0) && a->parts == b->parts && a->columns == b->columns &&
           same(a, b);
}

static bool conflicts(const so_cpu *b, const so_range *ranges, int n) {
    for (int i = 0; i < n; i++)
        for (int j = 0; j < b->n_open; j++)
            if ((ranges[i].write || b->open[j].write) && overlap(&ranges[i], &b->open[j]) &&
                !split_alike(&ranges[i], &b->open[j]))
                return true;
    return false;
}

/* Whether so_cpu_split_weighted decides each thread's part of the task, so that the time waited
 * after it measures the threads' speed. (Attention over more than a thousand positions may be split
 * at chunks instead; that affects one barrier of seven.) */
static bool is_weighted(const so_cpu *b, so_task_fn *fn, const so_op *op) {
    if (fn == so_cpu_quantize_columns || fn == so_cpu_eltwise_columns || fn == so_cpu_rope_columns)
        return true;
    if (fn == so_cpu_tasks[SO_OP_MATMUL])
        return so_cpu_matmul_is_static(op->matmul.w, so_pool_count(b->pool));
    return fn == so_cpu_attention || fn == so_cpu_kv_store;
}

static void push(so_cpu *b, so_task_fn *fn, const so_range *ranges, int n) {
    bool barrier = b->n_open + n > SO_RANGES_MAX || conflicts(b, ranges, n);
    bool weighted = b->n_open > 0 && b->open_weighted;
    if (barrier)
        b->n_open = 0;
    b->open_weighted =
        (b->n_open == 0 || b->open_weighted) && is_weighted(b, fn, &b->list->ops[b->n_ops - 1]);
    memcpy(b->open + b->n_open, ranges, (size_t)n * sizeof ranges[0]);
    b->n_open += n;
    b->list->tasks[b->n_tasks++] =
        (so_task){.fn = fn, .op = b->n_ops - 1, .barrier = barrier, .weighted = weighted};
}

/* The last write to exactly this range since the last barrier; NULL: none. */
static const so_range *last_write(const so_cpu *b, const so_range *r) {
    for (int i = b->n_open - 1; i >= 0; i--)
        if (b->open[i].write && same(&b->open[i], r))
            return &b->open[i];
    return NULL;
}

/* If no block of activations spans two heads, the thread that computed the attention of a query can
 * quantise the result at once. Returns false where that is not possible. */
static bool quantize_in_attention(so_cpu *b, const so_op *op, const so_range *x, so_range scratch) {
    so_task *last = b->n_tasks > 0 ? &b->list->tasks[b->n_tasks - 1] : NULL;
    if (!last || last->fn != so_cpu_attention || last->op + 1 != op - b->list->ops)
        return false;
    const so_op *before = op - 1;
    so_range out = {.owner = before->attention.out.buf, .begin = before->attention.out.off};
    out.end = out.begin + (x->end - x->begin);
    long width = (long)before->attention.n_heads * before->attention.store->shape.head_dim;
    if (!same(&out, x) || before->n != op->n || width != op->matmul.w->n_cols ||
        before->attention.store->shape.head_dim % SO_COLUMN_GRAIN != 0 ||
        conflicts(b, &scratch, 1) || b->n_open == SO_RANGES_MAX)
        return false;
    last->fn = so_cpu_attention_quantized;
    b->open[b->n_open++] = scratch;
    return true;
}

/* Appends the task that quantises x. If x was written since the last barrier, the task uses the
 * split of that write, so that no barrier is needed. */
static void push_quantize_task(so_cpu *b, const so_op *op, int block, so_range scratch,
                               so_range x) {
    int k = op->matmul.w->n_cols;
    so_task_fn *fn = so_cpu_quantize;
    const so_range *w = last_write(b, &x);
    if (block == SO_COLUMN_GRAIN && quantize_in_attention(b, op, &x, scratch))
        return;
    if (w && w->parts == op->n) {
        fn = so_cpu_quantize_rows;
        x.parts = op->n;
    } else if (w && w->columns == k && block == SO_COLUMN_GRAIN) {
        fn = so_cpu_quantize_columns;
        x.columns = k;
    } else {
        x.parts = (long)op->n * (k / so_cpu_grain(k));
    }
    push(b, fn, (so_range[]){scratch, x}, 2);
}

static so_range scratch_range(so_cpu *b, bool write) {
    return (so_range){.owner = &b->scratch[b->scratch_at], .end = 1, .write = write};
}

/* First half of a matmul with quantised weights: appends the task that quantises its activations,
 * unless the scratch already holds them, and adds the scratch to the operation's `ranges`, which
 * must have room for it (ranges[1] is x). Returns the new number of ranges. */
static int push_quantize(so_cpu *b, const so_op *op, so_range *ranges, int n) {
    int block = so_dtype_get((int)op->matmul.w->dtype)->block_len;
    if (block == 1)
        return n;
    so_range x = ranges[1];
    bool reuse = b->quantized.owner && same(&b->quantized, &x) && b->quantized_n == op->n &&
                 b->quantized_block == block;
    if (!reuse)
        b->scratch_at = 1 - b->scratch_at;
    so_scratch *scratch = &b->scratch[b->scratch_at];
    scratch->need = SO_MAX(scratch->need, so_cpu_scratch_bytes(op->matmul.w, op->n));
    b->list->scratch_of[op - b->list->ops] = (uint8_t)b->scratch_at;
    if (!reuse) {
        push_quantize_task(b, op, block, scratch_range(b, true), x);
        b->quantized = x;
        b->quantized_n = op->n;
        b->quantized_block = block;
    }
    ranges[n] = scratch_range(b, false);
    return n + 1;
}

/* Returns the task function of the operation and sets how its ranges are split. An operation that
 * supports several splits gets the one with which its input was written, so that no barrier is
 * needed. Residual additions are always split by rows, like the norm that follows: a row stays with
 * one thread from layer to layer. */
static so_task_fn *choose_task(const so_cpu *b, const so_op *op, so_range *ranges, int n) {
    const so_range *w = NULL;
    switch (op->kind) {
    case SO_OP_MATMUL:
        if (so_cpu_matmul_is_static(op->matmul.w, so_pool_count(b->pool)))
            ranges[0].columns = op->matmul.w->n_rows;
        break;
    case SO_OP_ROPE:
        w = last_write(b, &ranges[0]);
        if (op->rope.halves || (w && w->parts == ranges[0].parts))
            break;
        ranges[0].parts = 0;
        ranges[0].columns = (long)op->rope.n_heads * op->rope.head_dim;
        return so_cpu_rope_columns;
    case SO_OP_SILU_MUL:
    case SO_OP_GELU_MUL:
    case SO_OP_GELU:
    case SO_OP_RELU:
        for (int i = 0; i < n && !(w && w->columns == op->eltwise.d); i++)
            w = last_write(b, &ranges[i]);
        if (!w || w->columns != op->eltwise.d)
            break;
        for (int i = 0; i < n; i++) {
            ranges[i].parts = 0;
            ranges[i].columns = op->eltwise.d;
        }
        return so_cpu_eltwise_columns;
    default:
        break;
    }
    return so_cpu_tasks[op->kind];
}

/* Quantised activations are stale once their source is written. */
static void forget_stale(so_cpu *b, const so_range *ranges, int n) {
    for (int i = 0; i < n; i++)
        if (ranges[i].write && b->quantized.owner && overlap(&ranges[i], &b->quantized))
            b->quantized.owner = NULL;
}

/* Copies an upload's bytes: directly to their destination if no operation precedes it (returns
 * false: nothing is left to do), else into the list's upload memory. */
static bool keep_upload(so_cpu *b, so_op *op) {
    size_t n_bytes = op->upload.n_bytes;
    if (n_bytes > UPLOADS_MAX - b->uploads_len)
        flush(b);
    if (b->n_ops == 0) {
        memcpy(op->upload.dst.buf->data + op->upload.dst.off, op->upload.src, n_bytes);
        return false;
    }
    size_t need = b->uploads_len + n_bytes;
    if (need > b->uploads_cap) {
        b->uploads_cap = SO_MAX(need, 2 * b->uploads_cap);
        b->uploads = so_realloc(b->uploads, b->uploads_cap);
    }
    memcpy(b->uploads + b->uploads_len, op->upload.src, n_bytes);
    op->upload.src = (const void *)(uintptr_t)b->uploads_len; /* an offset: the memory may move */
    b->uploads_len = need;
    return true;
}

/* Appends an operation and its tasks to the list. */
static void append(so_cpu *b, const so_op *given) {
    so_range ranges[SO_OP_RANGES + 1];
    so_op *op = &b->list->ops[b->n_ops];
    int n = so_cpu_ranges(given, ranges);
    if (op != given)
        *op = *given;
    atomic_store_explicit(&b->list->claimed[b->n_ops++], 0, memory_order_relaxed);
    so_task_fn *fn = choose_task(b, op, ranges, n);
    if (op->kind == SO_OP_MATMUL)
        n = push_quantize(b, op, ranges, n);
    if (op->kind == SO_OP_ATTENTION) /* memory for partial results (attention.c) */
        ranges[n++] = (so_range){.owner = b->attn, .begin = 0, .end = 1, .write = true};
    push(b, fn, ranges, n);
    forget_stale(b, ranges, n);
}

/* The list differs from the stored one after all: makes the tasks of all operations so far. */
static void rebuild_tasks(so_cpu *b) {
    int n = b->n_ops;
    b->matches = false;
    for (b->n_ops = 0; b->n_ops < n;)
        append(b, &b->list->ops[b->n_ops]);
}

static bool same_view(const so_view *a, const so_view *b) {
    return a->buf == b->buf && a->off == b->off;
}

static bool same_float(float a, float b) { return so_f32_bits(a) == so_f32_bits(b); }

/* Compares only the members that the kind uses; others, and padding, may hold anything. */
static bool same_op(const so_op *a, const so_op *b) {
#define SAME(member) (a->member == b->member)
#define SAME_VIEW(member) same_view(&a->member, &b->member)
#define SAME_FLOAT(member) same_float(a->member, b->member)
    if (a->kind != b->kind || a->n != b->n)
        return false;
    switch (a->kind) {
    case SO_OP_UPLOAD:
        return SAME_VIEW(upload.dst) && SAME(upload.src) && SAME(upload.n_bytes);
    case SO_OP_DOWNLOAD:
        return SAME_VIEW(download.src) && SAME(download.dst) && SAME(download.n_bytes);
    case SO_OP_EMBED:
        return SAME_VIEW(embed.out) && SAME_VIEW(embed.ids) && SAME(embed.w) &&
               SAME_FLOAT(embed.scale);
    case SO_OP_GATHER:
        return SAME_VIEW(gather.out) && SAME_VIEW(gather.x) && SAME_VIEW(gather.rows) &&
               SAME(gather.d);
    case SO_OP_RMS_NORM:
    case SO_OP_LAYER_NORM:
        return SAME_VIEW(norm.out) && SAME_VIEW(norm.x) && SAME_VIEW(norm.weight) && SAME(norm.d) &&
               SAME_FLOAT(norm.eps) && (a->kind == SO_OP_RMS_NORM || SAME_VIEW(norm.bias));
    case SO_OP_MATMUL:
        return SAME_VIEW(matmul.out) && SAME_VIEW(matmul.x) && SAME(matmul.w) &&
               SAME(matmul.bias.buf) && (!a->matmul.bias.buf || SAME(matmul.bias.off));
    case SO_OP_ADD:
    case SO_OP_SILU_MUL:
    case SO_OP_GELU_MUL:
    case SO_OP_GELU:
    case SO_OP_RELU:
        return SAME_VIEW(eltwise.out) && SAME_VIEW(eltwise.a) && SAME(eltwise.d) &&
               (a->kind == SO_OP_GELU || a->kind == SO_OP_RELU || SAME_VIEW(eltwise.b));
    case SO_OP_ROPE:
        return SAME_VIEW(rope.x) && SAME_VIEW(rope.table) && SAME(rope.n_heads) &&
               SAME(rope.head_dim) && SAME(rope.halves);
    case SO_OP_KV_STORE:
        return SAME(kv_store.store) && SAME(kv_store.layer) && SAME_VIEW(kv_store.k) &&
               SAME_VIEW(kv_store.v) && SAME_VIEW(kv_store.slots);
    case SO_OP_KV_COPY:
        return SAME(kv_copy.store) && SAME_VIEW(kv_copy.from) && SAME_VIEW(kv_copy.to);
    case SO_OP_ATTENTION:
        return SAME(attention.store) && SAME(attention.layer) && SAME(attention.n_heads) &&
               SAME_VIEW(attention.out) && SAME_VIEW(attention.q) && SAME_VIEW(attention.rows) &&
               SAME_VIEW(attention.pages) && SAME_VIEW(attention.tails) &&
               SAME_FLOAT(attention.scale) && SAME(attention.window) && SAME_VIEW(attention.bias) &&
               (!a->attention.bias.buf ||
                (SAME_VIEW(attention.query_pos) && SAME(attention.reach)));
    case SO_OP_ARGMAX:
        return SAME_VIEW(argmax.out) && SAME_VIEW(argmax.x) && SAME(argmax.d);
    case SO_OP_SAMPLE:
        return SAME_VIEW(sample.out) && SAME_VIEW(sample.x) && SAME_VIEW(sample.best) &&
               SAME_VIEW(sample.rows) && SAME(sample.d);
    case SO_OP_COUNT:
        break;
    }
    return false;
#undef SAME
#undef SAME_VIEW
#undef SAME_FLOAT
}

/* The stored list that begins with this operation, else the least recently run one. */
static void choose_list(so_cpu *b, const so_op *first) {
    b->list = b->lists;
    for (so_list *l = b->lists; l < b->lists + SO_LISTS; l++) {
        b->matches = l->n_ops > 0 && same_op(&l->ops[0], first);
        if (b->matches || l->run < b->list->run)
            b->list = l;
        if (b->matches)
            break;
    }
}

static void submit(so_backend *base, const so_op *given) {
    so_cpu *b = cpu_of(base);
    so_op op = *given;
    if (b->n_ops == SO_OPS_MAX)
        flush(b);
    if (op.kind == SO_OP_UPLOAD) {
        so_range ranges[SO_OP_RANGES];
        so_cpu_ranges(given, ranges);
        if (op.upload.n_bytes == 0 || !keep_upload(b, &op))
            return;
    } else if (op.n == 0 && op.kind != SO_OP_DOWNLOAD) {
        return;
    }
    if (b->n_ops == 0)
        choose_list(b, &op);
    if (b->matches && (b->n_ops == b->list->n_ops || !same_op(&b->list->ops[b->n_ops], &op)))
        rebuild_tasks(b);
    if (!b->matches) {
        append(b, &op);
        return;
    }
    atomic_store_explicit(&b->list->claimed[b->n_ops++], 0, memory_order_relaxed);
}

static int cpu_sync(so_backend *base, so_err *err) {
    so_cpu *b = cpu_of(base);
    flush(b);
    int code = b->err.code;
    if (code != 0 && err)
        *err = b->err;
    b->err.code = 0;
    return code;
}

static void cpu_free(so_backend *base) {
    so_cpu *b = cpu_of(base);
    so_pool_free(b->pool);
    free(b->lists);
    free(b->uploads);
    free(b->scratch[0].data);
    free(b->scratch[1].data);
    free(b->attn->floats);
    free(b->attn);
    free(b);
}

static void cpu_describe(const so_backend *base, so_buf *out) {
    const so_cpu *b = (const so_cpu *)base;
    char name[SO_CPU_NAME_MAX];
    so_cpu_name(name);
    so_buf_printf(out, "%s, %s, threads %d", name, so_cpu_level_name(b->kernels->level),
                  so_pool_count(b->pool));
}

static const so_backend_vt cpu_vt = {
    .name = "cpu",
    .free = cpu_free,
    .buffer_create = buffer_create,
    .buffer_free = buffer_free,
    .weight_create = weight_create,
    .weight_pack = weight_pack,
    .weight_free = weight_free,
    .kv_create = kv_create,
    .kv_free = kv_free,
    .submit = submit,
    .sync = cpu_sync,
    .describe = cpu_describe,
    .encoder_ops = true,
};

static void warn_slow(const so_backend_opts *o) {
    so_cpu_level best = so_cpu_best_level();
    int cores = so_cpu_count();
    if (o->level == SO_CPU_SCALAR && best != SO_CPU_SCALAR)
        so_log(
            SO_LOG_WARN,
            "CPU level scalar is many times slower than level %s, which this CPU supports; results "
            "are the same",
            so_cpu_level_name(best));
    else if (best == SO_CPU_SCALAR)
        so_log(SO_LOG_WARN,
               "this CPU lacks AVX2, which the fast kernels need: scalar kernels give the "
               "same results but are many times slower");
    if (o->n_threads > cores)
        so_log(SO_LOG_WARN, "%d threads on %d cores: the same results, slower than with %d",
               o->n_threads, cores, cores);
}

int so_backend_cpu_create(const so_backend_opts *o, so_backend **out, so_err *err) {
    so_cpu_level best = so_cpu_best_level();
    const so_kernels *kernels = so_cpu_kernels(o->level == SO_CPU_AUTO ? best : o->level);
    if (!kernels)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "this CPU does not support level %s; the best level it supports is %s",
                          so_cpu_level_name(o->level), so_cpu_level_name(best));
    so_pool *pool = NULL;
    int all = o->n_cores > 0 ? o->n_cores : so_cpu_count();
    so_core_range cores = {o->first_core, o->n_cores};
    int rc = so_pool_create_on(cores, o->n_threads == 0 ? all : o->n_threads, &pool, err);
    if (rc != 0)
        return rc;
    if (o->warn_slow)
        warn_slow(o);
    so_cpu *b = SO_NEW(so_cpu);
    b->base.vt = &cpu_vt;
    b->kernels = kernels;
    b->pool = pool;
    so_cpu_prefetch_init(b);
    so_balance_init(&b->balance, so_pool_count(pool));
    b->list = b->lists = SO_NEW_N(so_list, SO_LISTS); /* backed by memory on first use */
    b->attn = SO_NEW(so_attn_split);
    b->attn->floats = so_try_alloc(SO_ATTN_SPLIT_BYTES, 1); /* backed by memory on first use */
    b->uploads_cap = UPLOADS_FIRST;
    b->uploads = so_realloc(NULL, b->uploads_cap);
    *out = &b->base;
    return 0;
}
