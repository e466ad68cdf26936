/* The memory ranges that each operation reads and writes. They have two uses. At submit,
 * so_cpu_ranges checks that every view is inside its buffer; a violation is a bug in the caller and
 * aborts. And cpu.c omits the barrier between two operations whose ranges do not conflict. A range
 * may be larger than the memory that is accessed, but not smaller: a barrier could be missing. Pure
 * functions; called by the thread that submits. */
#include "backend/cpu/cpu.h"
#include "base/mem.h"

typedef struct list {
    so_range *out;
    int n;
} list;

static void put(list *l, so_view v, size_t n_bytes, bool write) {
    SO_ASSERT(v.buf != NULL);
    SO_ASSERT(v.off % sizeof(float) == 0);
    if (!so_in_range(v.off, n_bytes, v.buf->n_bytes))
        so_panic(__FILE__, __LINE__,
                 "view of %zu bytes at offset %zu exceeds its buffer of %zu bytes", n_bytes, v.off,
                 v.buf->n_bytes);
    SO_ASSERT_OP(l->n, <, SO_OP_RANGES);
    l->out[l->n++] = (so_range){v.buf, v.off, v.off + n_bytes, write, 0, 0};
}

/* n rows of d four-byte elements */
static void put_rows(list *l, so_view v, long n, long d, bool write) {
    size_t bytes;
    SO_ASSERT(n >= 0 && d > 0);
    SO_ASSERT(so_mul_size((size_t)n, (size_t)d, &bytes) && so_mul_size(bytes, 4, &bytes));
    put(l, v, bytes, write);
}

/* As put_rows; the range is split evenly into `parts` parts. */
static void put_parts(list *l, so_view v, long n, long d, bool write, long parts) {
    put_rows(l, v, n, d, write);
    l->out[l->n - 1].parts = parts;
}

/* As put_rows; each row is split by columns. */
static void put_columns(list *l, so_view v, long n, long d, bool write) {
    put_rows(l, v, n, d, write);
    l->out[l->n - 1].columns = d;
}

/* From the view to the end of the buffer: for arrays whose length the operation does not state. */
static void put_to_end(list *l, so_view v) {
    SO_ASSERT(v.buf != NULL);
    SO_ASSERT_OP(v.off, <=, v.buf->n_bytes);
    put(l, v, v.buf->n_bytes - v.off, false);
}

/* The whole KV cache. */
static void put_store(list *l, const so_kv_store *s, bool write) {
    SO_ASSERT(s != NULL);
    SO_ASSERT_OP(l->n, <, SO_OP_RANGES);
    l->out[l->n++] = (so_range){s, 0, SIZE_MAX, write, 0, 0};
}

/* A range that is read by all threads must not overlap the written range: a thread would read what
 * another one is writing. */
static void assert_disjoint(const list *l, int written, int read) {
    const so_range *w = &l->out[written], *r = &l->out[read];
    SO_ASSERT(w->owner != r->owner || w->end <= r->begin || r->end <= w->begin);
}

static void norm_ranges(list *l, const so_op *op) {
    put_parts(l, op->norm.out, op->n, op->norm.d, true, op->n);
    put_rows(l, op->norm.weight, 1, op->norm.d, false);
    if (op->kind == SO_OP_LAYER_NORM)
        put_rows(l, op->norm.bias, 1, op->norm.d, false);
    for (int i = 1; i < l->n; i++)
        assert_disjoint(l, 0, i);
    put_parts(l, op->norm.x, op->n, op->norm.d, false, op->n); /* may be `out` itself */
}

static void matmul_ranges(list *l, const so_op *op) {
    const so_weight *w = op->matmul.w;
    SO_ASSERT(w != NULL);
    put_rows(l, op->matmul.out, op->n, w->n_rows, true);
    put_rows(l, op->matmul.x, op->n, w->n_cols, false);
    if (op->matmul.bias.buf)
        put_rows(l, op->matmul.bias, 1, w->n_rows, false);
    for (int i = 1; i < l->n; i++)
        assert_disjoint(l, 0, i);
}

static void attention_ranges(list *l, const so_op *op) {
    const so_kv_store *s = op->attention.store;
    put_store(l, s, false);
    SO_ASSERT_OP(op->attention.n_heads % s->shape.n_heads_kv, ==, 0);
    SO_ASSERT(op->attention.layer >= 0 && op->attention.layer < s->shape.n_layers);
    long d = (long)op->attention.n_heads * s->shape.head_dim;
    put_rows(l, op->attention.out, op->n, d, true);
    put_rows(l, op->attention.q, op->n, d, false);
    put(l, op->attention.rows, (size_t)op->n * sizeof(so_attn_row), false);
    put_to_end(l, op->attention.pages);
    if (op->attention.tails.buf) /* absent if all rows are chains */
        put_to_end(l, op->attention.tails);
    if (!op->attention.bias.buf)
        return;
    SO_ASSERT(op->attention.reach >= 0 && op->attention.reach < 1 << 24);
    put_rows(l, op->attention.bias, op->attention.n_heads, 2L * op->attention.reach + 1, false);
    put_rows(l, op->attention.query_pos, op->n, 1, false);
}

static void kv_ranges(list *l, const so_op *op) {
    if (op->kind == SO_OP_KV_COPY) {
        put_store(l, op->kv_copy.store, true);
        put(l, op->kv_copy.from, (size_t)op->n * sizeof(so_kv_slot), false);
        put(l, op->kv_copy.to, (size_t)op->n * sizeof(so_kv_slot), false);
        return;
    }
    const so_kv_store *s = op->kv_store.store;
    put_store(l, s, true);
    SO_ASSERT(op->kv_store.layer >= 0 && op->kv_store.layer < s->shape.n_layers);
    long d = (long)s->shape.n_heads_kv * s->shape.head_dim;
    put_columns(l, op->kv_store.k, op->n, d, false);
    put_columns(l, op->kv_store.v, op->n, d, false);
    /* Threads split Q8_0 entries by blocks (cache.c). If the last block of a head is padded, blocks
     * are not split at the same elements as columns. */
    if (s->shape.dtype == SO_DTYPE_Q8_0 && s->shape.head_dim % SO_COLUMN_GRAIN != 0)
        l->out[l->n - 1].columns = l->out[l->n - 2].columns = 0;
    put(l, op->kv_store.slots, (size_t)op->n * sizeof(so_kv_slot), false);
}

/* Residual additions are split by rows, like the norm that follows; other operations are split into
 * small parts. */
static void eltwise_ranges(list *l, const so_op *op) {
    int d = op->eltwise.d;
    long parts = op->kind == SO_OP_ADD ? op->n : (long)op->n * (d / so_cpu_grain(d));
    if (op->kind != SO_OP_GELU && op->kind != SO_OP_RELU)
        put_parts(l, op->eltwise.b, op->n, d, false, parts);
    put_parts(l, op->eltwise.out, op->n, d, true, parts);
    put_parts(l, op->eltwise.a, op->n, d, false, parts);
}

int so_cpu_ranges(const so_op *op, so_range *out) {
    list l = {out, 0};
    SO_ASSERT_OP(op->n, >=, 0);
    switch (op->kind) {
    case SO_OP_UPLOAD:
        put(&l, op->upload.dst, op->upload.n_bytes, true);
        break;
    case SO_OP_DOWNLOAD:
        put(&l, op->download.src, op->download.n_bytes, false);
        break;
    case SO_OP_EMBED:
        put_parts(&l, op->embed.out, op->n, op->embed.w->n_cols, true, op->n);
        put_rows(&l, op->embed.ids, op->n, 1, false);
        assert_disjoint(&l, 0, 1);
        break;
    case SO_OP_GATHER:
        put_parts(&l, op->gather.out, op->n, op->gather.d, true, op->n);
        put_to_end(&l, op->gather.x);
        put_rows(&l, op->gather.rows, op->n, 1, false);
        break;
    case SO_OP_RMS_NORM:
    case SO_OP_LAYER_NORM:
        norm_ranges(&l, op);
        break;
    case SO_OP_MATMUL:
        matmul_ranges(&l, op);
        break;
    case SO_OP_ADD:
    case SO_OP_SILU_MUL:
    case SO_OP_GELU_MUL:
    case SO_OP_GELU:
    case SO_OP_RELU:
        eltwise_ranges(&l, op);
        break;
    case SO_OP_ROPE:
        SO_ASSERT_OP(op->rope.head_dim % 2, ==, 0);
        put_parts(&l, op->rope.x, op->n, (long)op->rope.n_heads * op->rope.head_dim, true,
                  (long)op->n * op->rope.n_heads);
        put_rows(&l, op->rope.table, op->n, op->rope.head_dim, false);
        break;
    case SO_OP_KV_STORE:
    case SO_OP_KV_COPY:
        kv_ranges(&l, op);
        break;
    case SO_OP_ATTENTION:
        attention_ranges(&l, op);
        break;
    case SO_OP_ARGMAX:
        put_rows(&l, op->argmax.out, op->n, 1, true);
        put_rows(&l, op->argmax.x, op->n, op->argmax.d, false);
        break;
    case SO_OP_SAMPLE:
        SO_ASSERT_OP(op->sample.d, <=, SO_SAMPLE_MAX);
        put(&l, op->sample.out, (size_t)op->n * sizeof(so_sample_result), true);
        put_rows(&l, op->sample.x, op->n, op->sample.d, false);
        put_rows(&l, op->sample.best, op->n, 1, false);
        put(&l, op->sample.rows, (size_t)op->n * sizeof(so_sample_row), false);
        break;
    case SO_OP_COUNT:
        so_panic(__FILE__, __LINE__, "unknown operation kind");
    }
    return l.n;
}
