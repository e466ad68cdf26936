/* The operations of the CPU backend: how each is split over the threads.
 *
 * Work is split by output element only (rows, heads, bytes), never inside a reduction, and the
 * arithmetic is in the kernel table. So no result depends on the number of threads. Every function
 * here runs on all threads at once; each computes the part that belongs to its `index`.
 *
 * Views were checked at submit (ranges.c). Numbers in device memory (ids, rows) are checked here,
 * when they are read; one that is out of range is a bug in the caller and aborts. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "backend/cpu/pack.h"
#include "base/mem.h"
#include "format/quant.h"

static inline void *at(so_view v) { return v.buf->data + v.off; }
static inline float *f32(so_view v) { return at(v); }
static inline const int32_t *i32(so_view v) { return at(v); }

/* ---- data movement ---- */

static void copy_bytes(unsigned char *dst, const unsigned char *src, size_t n, int index,
                       int count) {
    long begin, end;
    so_split((long)n, 4096, index, count, &begin, &end);
    memcpy(dst + begin, src + begin, (size_t)(end - begin));
}

static void upload(const so_cpu *b, const so_op *op, int index, int count) {
    /* src is an offset: the bytes were copied at submit, and b->uploads may have been
     * reallocated */
    const unsigned char *src = b->uploads + (uintptr_t)op->upload.src;
    copy_bytes(at(op->upload.dst), src, op->upload.n_bytes, index, count);
}

static void download(const so_cpu *b, const so_op *op, int index, int count) {
    (void)b;
    copy_bytes(op->download.dst, at(op->download.src), op->download.n_bytes, index, count);
}

/* Row `id` of a weight, converted to floats. */
static void read_row(const so_weight *w, int32_t id, float *out) {
    if (!w->tile_bytes) {
        so_dequantize_row(w->dtype, w->data + (size_t)id * w->row_bytes, out, w->n_cols);
        return;
    }
    const uint8_t *tile = w->data + (size_t)(id / SO_PACK_TILE) * w->tile_bytes;
    int len = so_dtype_get((int)w->dtype)->block_len, row = id % SO_PACK_TILE;
    for (int i = 0; i < w->n_cols / len; i++) {
        uint8_t block[sizeof(so_block_q6_k)]; /* the largest block type */
        so_pack_block(w->dtype, tile, so_pack_groups(w->n_rows, id - row), row, i, block);
        so_dequantize_row(w->dtype, block, out + i * len, len);
    }
}

static void embed(const so_cpu *b, const so_op *op, int index, int count) {
    const so_weight *w = op->embed.w;
    long begin, end;
    so_split(op->n, 1, index, count, &begin, &end);
    for (long i = begin; i < end; i++) {
        int32_t id = i32(op->embed.ids)[i];
        SO_ASSERT_OP(id, >=, 0);
        SO_ASSERT_OP(id, <, w->n_rows);
        float *out = f32(op->embed.out) + i * w->n_cols;
        read_row(w, id, out);
        b->kernels->scale(out, out, op->embed.scale, w->n_cols);
    }
}

static void gather(const so_cpu *b, const so_op *op, int index, int count) {
    (void)b;
    size_t d = (size_t)op->gather.d;
    size_t n_rows = (op->gather.x.buf->n_bytes - op->gather.x.off) / (d * sizeof(float));
    long begin, end;
    so_split(op->n, 1, index, count, &begin, &end);
    for (long i = begin; i < end; i++) {
        int32_t row = i32(op->gather.rows)[i];
        float *out = f32(op->gather.out) + (size_t)i * d;
        SO_ASSERT(row == -1 || (row >= 0 && (size_t)row < n_rows));
        if (row == -1)
            memset(out, 0, d * sizeof(float));
        else
            memcpy(out, f32(op->gather.x) + (size_t)row * d, d * sizeof(float));
    }
}

/* ---- rows ---- */

static void norm(const so_cpu *b, const so_op *op, int index, int count) {
    size_t d = (size_t)op->norm.d;
    const float *w = f32(op->norm.weight);
    long begin, end;
    so_split(op->n, 1, index, count, &begin, &end);
    for (long i = begin; i < end; i++) {
        float *out = f32(op->norm.out) + (size_t)i * d;
        const float *x = f32(op->norm.x) + (size_t)i * d;
        if (op->kind == SO_OP_RMS_NORM)
            b->kernels->rms_norm(out, x, w, op->norm.d, op->norm.eps);
        else
            b->kernels->layer_norm(out, x, w, f32(op->norm.bias), op->norm.d, op->norm.eps);
    }
}

/* Elements begin … end-1 of all rows taken together. */
static void eltwise_part(const so_cpu *b, const so_op *op, long begin, long end) {
    float *out = f32(op->eltwise.out) + begin;
    const float *x = f32(op->eltwise.a) + begin;
    const float *y =
        op->kind == SO_OP_GELU || op->kind == SO_OP_RELU ? NULL : f32(op->eltwise.b) + begin;
    switch (op->kind) {
    case SO_OP_ADD:
        b->kernels->add(out, x, y, end - begin);
        break;
    case SO_OP_SILU_MUL:
        b->kernels->silu_mul(out, x, y, end - begin);
        break;
    case SO_OP_GELU_MUL:
        b->kernels->gelu_mul(out, x, y, end - begin);
        break;
    case SO_OP_RELU:
        for (long i = 0; i < end - begin; i++)
            out[i] = x[i] < 0 ? 0 : x[i]; /* NaN stays NaN */
        break;
    default:
        b->kernels->gelu(out, x, end - begin);
    }
}

static void eltwise(const so_cpu *b, const so_op *op, int index, int count) {
    long begin, end;
    long grain = op->kind == SO_OP_ADD ? op->eltwise.d : so_cpu_grain(op->eltwise.d);
    so_split((long)op->n * op->eltwise.d, grain, index, count, &begin, &end);
    eltwise_part(b, op, begin, end);
}

void so_cpu_eltwise_columns(const so_cpu *b, const so_op *op, int index, int count) {
    long d = op->eltwise.d, begin, end;
    (void)count;
    so_cpu_split_weighted(b, d, SO_COLUMN_GRAIN, index, &begin, &end);
    for (long i = 0; i < op->n; i++)
        eltwise_part(b, op, i * d + begin, i * d + end);
}

/* Rotates pairs (i, i + d/2) of a head, like kernels->rotate does for adjacent pairs. */
static void rotate_halves(float *x, const float *table, int d) {
    for (int j = 0; j < d / 2; j++) {
        float *y = x + j + d / 2, a = x[j], b = *y, c = table[2 * j], s = table[2 * j + 1];
        x[j] = a * c - b * s;
        *y = a * s + b * c;
    }
}

static void rope(const so_cpu *b, const so_op *op, int index, int count) {
    int n_heads = op->rope.n_heads, d = op->rope.head_dim;
    long begin, end;
    so_split((long)op->n * n_heads, 1, index, count, &begin, &end);
    for (long i = begin; i < end; i++) {
        float *x = f32(op->rope.x) + i * d;
        const float *table = f32(op->rope.table) + i / n_heads * d;
        if (op->rope.halves)
            rotate_halves(x, table, d);
        else
            b->kernels->rotate(x, table, d);
    }
}

/* Only for pairs of adjacent elements: a border between columns never separates them. */
void so_cpu_rope_columns(const so_cpu *b, const so_op *op, int index, int count) {
    long d = op->rope.head_dim, width = op->rope.n_heads * d, begin, end;
    (void)count;
    so_cpu_split_weighted(b, width, SO_COLUMN_GRAIN, index, &begin, &end);
    for (long i = 0; i < op->n; i++)
        for (long j = begin, next; j < end; j = next) {
            next = SO_MIN(end, (j / d + 1) * d);
            b->kernels->rotate(f32(op->rope.x) + i * width + j, f32(op->rope.table) + i * d + j % d,
                               (int)(next - j));
        }
}

static void argmax(const so_cpu *b, const so_op *op, int index, int count) {
    long begin, end;
    so_split(op->n, 1, index, count, &begin, &end);
    for (long i = begin; i < end; i++)
        ((int32_t *)at(op->argmax.out))[i] =
            b->kernels->argmax(f32(op->argmax.x) + i * op->argmax.d, op->argmax.d);
}

/* ---- matmul ---- */

size_t so_cpu_scratch_bytes(const so_weight *w, int n) {
    int block = so_dtype_get((int)w->dtype)->block_len;
    if (block == 1)
        return 0;
    size_t per_block = block == 32 ? 32 + sizeof(so_q32) : 256 + sizeof(so_q256), bytes;
    if (!so_mul_size(per_block, (size_t)(w->n_cols / block), &bytes) ||
        !so_mul_size(bytes, (size_t)n, &bytes))
        return SIZE_MAX;
    return bytes;
}

so_act so_cpu_activations(const so_cpu *b, const so_op *op) {
    const so_weight *w = op->matmul.w;
    so_act act = {.n = op->n, .k = w->n_cols, .x = f32(op->matmul.x)};
    size_t q_bytes = (size_t)op->n * (size_t)w->n_cols; /* a multiple of 32 */
    if (so_dtype_is_float(w->dtype))
        return act;
    unsigned char *scratch = b->scratch[b->list->scratch_of[op - b->list->ops]].data;
    act.q = (int8_t *)scratch;
    if (so_dtype_get((int)w->dtype)->block_len == 32)
        act.blocks32 = (so_q32 *)(scratch + q_bytes);
    else
        act.blocks256 = (so_q256 *)(scratch + q_bytes);
    return act;
}

/* Quantises this thread's part of x. Parts begin at multiples of `grain` elements. */
static void quantize(const so_cpu *b, const so_op *op, long grain, int index, int count) {
    so_act act = so_cpu_activations(b, op);
    int len = act.blocks32 ? 32 : 256;
    long begin, end;
    so_split((long)act.n * act.k, grain, index, count, &begin, &end);
    size_t first = (size_t)begin, n = (size_t)(end - begin);
    /* rows are contiguous, so a run of blocks may cross from one row into the next */
    const size_t step = (size_t)1 << 20;
    for (size_t done = 0; done < n; done += step) {
        int part = (int)SO_MIN(step, n - done);
        size_t i = first + done;
        if (len == 32)
            b->kernels->quantize32(act.x + i, part, act.q + i, act.blocks32 + i / 32);
        else
            b->kernels->quantize256(act.x + i, part, act.q + i, act.blocks256 + i / 256);
    }
}

void so_cpu_quantize(const so_cpu *b, const so_op *op, int index, int count) {
    quantize(b, op, so_cpu_grain(op->matmul.w->n_cols), index, count);
}

void so_cpu_quantize_rows(const so_cpu *b, const so_op *op, int index, int count) {
    quantize(b, op, op->matmul.w->n_cols, index, count);
}

void so_cpu_quantize_columns(const so_cpu *b, const so_op *op, int index, int count) {
    so_act act = so_cpu_activations(b, op);
    long begin, end;
    (void)count;
    so_cpu_split_weighted(b, act.k, SO_COLUMN_GRAIN, index, &begin, &end);
    for (long i = 0; i < act.n; i++) {
        long from = i * act.k + begin;
        b->kernels->quantize32(act.x + from, (int)(end - begin), act.q + from,
                               act.blocks32 + from / 32);
    }
}

/* How the rows of a weight matrix are split. Two thirds of them are assigned before the product
 * runs ("static"), one contiguous part per thread. The others are claimed in pieces as threads
 * become free: two cores never run at the same speed for long (load on the sibling hyperthread, a
 * busy host), and all threads wait for the last one. All rows of a small matrix are static. */
enum { MM_UNIT = SO_COLUMN_GRAIN, MM_PIECES = 8 /* per thread */, MM_SMALL = 1 << 20 };

static long static_rows(const so_weight *w, int count) {
    size_t bytes = (size_t)w->n_rows * w->row_bytes;
    if (count == 1 || w->n_rows < 4L * MM_UNIT * count || bytes / (size_t)count < MM_SMALL)
        return w->n_rows;
    return w->n_rows * 2 / 3 / MM_UNIT * MM_UNIT;
}

_Static_assert(MM_UNIT % SO_MM_GRAIN == 0, "a thread's rows must end with a tile");

bool so_cpu_matmul_is_static(const so_weight *w, int count) {
    return static_rows(w, count) == w->n_rows;
}

static long piece_rows(const so_weight *w, int count) {
    long units = (w->n_rows - static_rows(w, count)) / MM_UNIT;
    return SO_MAX(units / (MM_PIECES * count), 1L) * MM_UNIT;
}

/* Claims a piece: returns its first row, or n_rows if none is left. */
static long claim_rows(const so_cpu *b, const so_op *op, int count) {
    const so_weight *w = op->matmul.w;
    long n_static = static_rows(w, count);
    if (n_static == w->n_rows)
        return n_static;
    long i =
        atomic_fetch_add_explicit(&b->list->claimed[op - b->list->ops], 1, memory_order_relaxed);
    return SO_MIN(n_static + i * piece_rows(w, count), w->n_rows);
}

/* Sets mm->next to the tile of `row`, which the thread reads next. NULL if w is not packed. */
static void set_prefetch(so_mm *mm, const so_weight *w, long row) {
    mm->next = NULL;
    if (w->tile_bytes && row < w->n_rows)
        mm->next = w->data + (size_t)(row / SO_PACK_TILE) * w->tile_bytes;
}

/* Sets mm->next to this thread's part of the next matrix in the list; NULL: none, or not packed. */
static void set_prefetch_matrix(so_mm *mm, const so_cpu *b, const so_op *op, int index, int count) {
    mm->next = NULL;
    for (op++; op < b->list->ops + b->n_ops; op++)
        if (op->kind == SO_OP_MATMUL) {
            long begin, end;
            so_cpu_split_weighted(b, static_rows(op->matmul.w, count), MM_UNIT, index, &begin,
                                  &end);
            if (begin < end)
                set_prefetch(mm, op->matmul.w, begin);
            return;
        }
}

static void matmul(const so_cpu *b, const so_op *op, int index, int count) {
    const so_weight *w = op->matmul.w;
    so_mm mm = {
        .act = so_cpu_activations(b, op),
        .w = w->data,
        .row_bytes = w->row_bytes,
        .tile_bytes = w->tile_bytes,
        .prefetch = b->prefetch[so_prefetch_class(so_dtype_get((int)w->dtype)->block_len, op->n)],
        .m = w->n_rows,
        .bias = op->matmul.bias.buf ? f32(op->matmul.bias) : NULL,
        .out = f32(op->matmul.out),
    };
    long begin, end;
    so_cpu_split_weighted(b, static_rows(w, count), MM_UNIT, index, &begin, &end);
    while (begin < end) {
        /* the next piece is claimed before it is needed, so that it can be prefetched meanwhile */
        long next = claim_rows(b, op, count);
        if (next < w->n_rows)
            set_prefetch(&mm, w, next);
        else
            set_prefetch_matrix(&mm, b, op, index, count);
        b->kernels->matmul[w->dtype](&mm, begin, end);
        begin = next;
        end = SO_MIN(next + piece_rows(w, count), w->n_rows);
    }
}

so_task_fn *const so_cpu_tasks[SO_OP_COUNT] = {
    [SO_OP_UPLOAD] = upload,
    [SO_OP_DOWNLOAD] = download,
    [SO_OP_EMBED] = embed,
    [SO_OP_GATHER] = gather,
    [SO_OP_RMS_NORM] = norm,
    [SO_OP_LAYER_NORM] = norm,
    [SO_OP_MATMUL] = matmul,
    [SO_OP_ADD] = eltwise,
    [SO_OP_SILU_MUL] = eltwise,
    [SO_OP_GELU_MUL] = eltwise,
    [SO_OP_GELU] = eltwise,
    [SO_OP_RELU] = eltwise,
    [SO_OP_ROPE] = rope,
    [SO_OP_KV_STORE] = so_cpu_kv_store,
    [SO_OP_KV_COPY] = so_cpu_kv_copy,
    [SO_OP_ATTENTION] = so_cpu_attention,
    [SO_OP_ARGMAX] = argmax,
    [SO_OP_SAMPLE] = so_cpu_sample,
};
