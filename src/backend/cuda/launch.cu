/* From a list of operations to kernels.
 *
 * Neighbouring operations that share a kernel are taken together: products of the same rows; a product and
 * the addition of its result; two products and the gated activation over them; rope of q and k with the
 * store of k and v. A kernel whose result is the input of the next product also writes it as
 * fp16, so that no extra kernel has to convert it. None of this changes a result: every kernel rounds
 * where the separate ones would. A float32 result that is overwritten before anybody reads it is not
 * stored.
 *
 * One combination has bits of its own: an RMS norm of a sum (product, addition, norm) whose result only
 * products read is a split norm (device.cuh). Whether it is one depends on the kinds of operations and
 * their order alone, never on the number of rows. The product's input must be the result of the operation
 * before it: a draft's product with its target's hidden states is in the list only if some row has them,
 * and a row without them must get the same bits in both lists.
 *
 * The choice of kernels depends only on the list, never on data in device memory, so the kernels of a
 * pass can be captured as a graph. */
#include <pthread.h>

#include "backend/cuda/launch.cuh"

static pthread_mutex_t launching = PTHREAD_MUTEX_INITIALIZER;

void so_cuda_begin_launch(const void *kernel, size_t shared) {
    pthread_mutex_lock(&launching);
    if (shared > 48 << 10)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
}

void so_cuda_end_launch(void) { pthread_mutex_unlock(&launching); }

static char *at(so_view v) { return v.buf ? v.buf->data + v.off : NULL; }
static bool same(so_view a, so_view b) { return a.buf == b.buf && a.off == b.off; }

/* ---- what operations read and write ---- */

typedef struct op_views {
    so_view in[5], out;
    int n_in;
} op_views;

static op_views views_of(const so_op *o) {
    switch (o->kind) {
    case SO_OP_EMBED:
        return {{o->embed.ids}, o->embed.out, 1};
    case SO_OP_GATHER:
        return {{o->gather.x, o->gather.rows}, o->gather.out, 2};
    case SO_OP_RMS_NORM:
    case SO_OP_LAYER_NORM:
        return {{o->norm.x, o->norm.weight, o->norm.bias}, o->norm.out, 3};
    case SO_OP_MATMUL:
        return {{o->matmul.x, o->matmul.bias}, o->matmul.out, 2};
    case SO_OP_ADD:
    case SO_OP_SILU_MUL:
    case SO_OP_GELU_MUL:
        return {{o->eltwise.a, o->eltwise.b}, o->eltwise.out, 2};
    case SO_OP_GELU:
        return {{o->eltwise.a}, o->eltwise.out, 1};
    case SO_OP_ROPE:
        return {{o->rope.x, o->rope.table}, o->rope.x, 2};
    case SO_OP_KV_STORE:
        return {{o->kv_store.k, o->kv_store.v, o->kv_store.slots}, {}, 3};
    case SO_OP_KV_COPY:
        return {{o->kv_copy.from, o->kv_copy.to}, {}, 2};
    case SO_OP_ATTENTION:
        return {{o->attention.q, o->attention.rows, o->attention.pages, o->attention.tails},
                o->attention.out,
                4};
    case SO_OP_ARGMAX:
        return {{o->argmax.x}, o->argmax.out, 1};
    case SO_OP_SAMPLE:
        return {{o->sample.x, o->sample.best, o->sample.rows}, o->sample.out, 3};
    default:
        return {{}, {}, 0};
    }
}

typedef struct op_list {
    const so_op *ops;
    size_t n;
} op_list;

bool so_cuda_is_read(const so_op *ops, size_t n_ops, size_t from, so_view v, int n, bool at_end) {
    for (size_t i = from; i < n_ops; i++) {
        op_views w = views_of(&ops[i]);
        for (int j = 0; j < w.n_in; j++)
            if (w.in[j].buf == v.buf)
                return true;
        if (same(w.out, v) && ops[i].n >= n)
            return false;
    }
    return at_end;
}

/* Whether the n rows at v may be read by operation `from` or later. */
static bool is_read(op_list l, size_t from, so_view v, int n) {
    return so_cuda_is_read(l.ops, l.n, from, v, n, true);
}

/* The same, without the products at operation `from` that read the rows as fp16. */
static bool is_read_as_float(op_list l, size_t from, so_view v, int n) {
    const so_op *first = from < l.n ? &l.ops[from] : NULL;
    while (from < l.n && l.ops[from].kind == SO_OP_MATMUL && same(l.ops[from].matmul.x, v) &&
           l.ops[from].n == n && l.ops[from].matmul.w->k == first->matmul.w->k &&
           !same(l.ops[from].matmul.out, v))
        from++;
    return is_read(l, from, v, n);
}

/* ---- rows as fp16 ---- */

/* Which rows are available as fp16. There are two buffers: a kernel reads one and may write the other. */
typedef struct half_status {
    const char *x; /* NULL: none */
    int n, d, buf;
    bool scaled; /* the first half of a split norm: results are to be multiplied by row_scale */
} half_status;

typedef struct launcher {
    const so_queue *q;
    const so_memory *m;
    op_list l;
    half_status h;
} launcher;

static so_half_rows half_rows(const launcher *a, int n, int buf, int d) {
    return {a->m->half[buf], (d + SO_UNIT - 1) / SO_UNIT * SO_UNIT,
            a->q->wgmma && n > SO_NARROW && d % 32 == 0};
}

/* Where the kernel that makes the n rows of width d at `out` also writes them as fp16; data is NULL if
 * operation i is not a product of these rows. */
static so_half_rows wanted(launcher *a, size_t i, so_view out, int n, int d) {
    const so_op *next = i < a->l.n ? &a->l.ops[i] : NULL;
    a->h.x = NULL;
    if (!next || next->kind != SO_OP_MATMUL || next->n != n || !same(next->matmul.x, out) ||
        next->matmul.w->k != d)
        return {};
    a->h = {at(out), n, d, !a->h.buf, false};
    return half_rows(a, n, a->h.buf, d);
}

/* ---- products ---- */

static bool is_product_of(const so_op *o, const so_op *first) {
    return o->kind == SO_OP_MATMUL && o->n == first->n && same(o->matmul.x, first->matmul.x) &&
           o->matmul.w->fmt == first->matmul.w->fmt && o->matmul.w->k == first->matmul.w->k &&
           !same(o->matmul.out, o->matmul.x) &&
           (o == first || !same(o->matmul.out, first->matmul.out));
}

/* Products i, i+1 and the gated activation over them. */
static bool is_gated(op_list l, size_t i) {
    const so_op *o = &l.ops[i];
    if (i + 2 >= l.n || !is_product_of(o, o) || !is_product_of(o + 1, o))
        return false;
    return (o[2].kind == SO_OP_SILU_MUL || o[2].kind == SO_OP_GELU_MUL) && o[2].n == o->n &&
           same(o[2].eltwise.a, o[0].matmul.out) && same(o[2].eltwise.b, o[1].matmul.out) &&
           !same(o[0].matmul.out, o[1].matmul.out) && o[2].eltwise.d == o[0].matmul.w->m &&
           o[0].matmul.w->m == o[1].matmul.w->m;
}

static so_product product_of(const so_op *o) {
    return {o->matmul.w, (const float *)at(o->matmul.bias), (float *)at(o->matmul.out)};
}

/* The address of the n rows at `out`, or NULL if no operation from `after` on reads them. */
static float *kept(op_list l, so_view out, int n, size_t after) {
    return is_read(l, after, out, n) ? (float *)at(out) : NULL;
}

static size_t launch_gated(launcher *a, size_t i, so_products *p) {
    const so_op *o = &a->l.ops[i];
    so_view out = o[2].eltwise.out;
    p->list[0] = product_of(o);
    p->list[1] = product_of(o + 1);
    p->n_products = 2;
    p->act = o[2].kind;
    p->list[0].out = same(out, o[0].matmul.out) ? NULL : kept(a->l, o[0].matmul.out, o->n, i + 3);
    p->list[1].out = same(out, o[1].matmul.out) ? NULL : kept(a->l, o[1].matmul.out, o->n, i + 3);
    p->half_out = wanted(a, i + 3, out, o->n, o[2].eltwise.d);
    bool keep = !p->half_out.data || is_read_as_float(a->l, i + 3, out, o->n);
    p->act_out = keep ? (float *)at(out) : NULL;
    so_cuda_matmul(*a->q, p);
    return 3;
}

static bool adds(const so_op *next, const so_op *product) {
    return next->kind == SO_OP_ADD && next->n == product->n &&
           same(next->eltwise.b, product->matmul.out) && same(next->eltwise.out, next->eltwise.a) &&
           !same(next->eltwise.a, product->matmul.out) && next->eltwise.d == product->matmul.w->m;
}

/* Rope of q, rope of k, store of that k, one after the other. */
static bool is_rope_store(op_list l, size_t i) {
    const so_op *o = &l.ops[i];
    return i + 2 < l.n && o[0].kind == SO_OP_ROPE && o[1].kind == SO_OP_ROPE &&
           o[2].kind == SO_OP_KV_STORE && o[0].n == o[1].n && o[1].n == o[2].n &&
           same(o[1].rope.x, o[2].kv_store.k) && !same(o[0].rope.x, o[1].rope.x) &&
           !same(o[1].rope.x, o[2].kv_store.v) && !same(o[0].rope.x, o[2].kv_store.v) &&
           o[1].rope.n_heads == o[2].kv_store.store->shape.n_heads_kv &&
           o[1].rope.head_dim == o[2].kv_store.store->shape.head_dim;
}

/* Whether there are the rows of a product as fp16. */
static bool has_rows(const launcher *a, const so_op *op) {
    return a->h.x == at(op->matmul.x) && a->h.n == op->n && a->h.d == op->matmul.w->k;
}

/* Whether they are still to be scaled. The persistent kernel cannot begin with such rows. */
static bool has_scaled_rows(const launcher *a, const so_op *op) {
    return has_rows(a, op) && a->h.scaled;
}

/* The rows of a product as fp16. */
static so_half_rows rows_of(launcher *a, const so_op *op) {
    int k = op->matmul.w->k;
    if (!has_rows(a, op)) {
        a->h = {at(op->matmul.x), op->n, k, !a->h.buf, false};
        so_cuda_to_half(*a->q, (const float *)a->h.x, op->n, k, half_rows(a, op->n, a->h.buf, k));
    }
    return half_rows(a, op->n, a->h.buf, k);
}

bool so_cuda_is_split_norm(const so_op *ops, size_t n_ops, size_t i, so_view sum, int n, int d) {
    op_list l = {ops, n_ops};
    const so_op *o = &l.ops[i];
    return i + 1 < l.n && o->kind == SO_OP_RMS_NORM && o->n == n && same(o->norm.x, sum) &&
           !same(o->norm.out, sum) && o->norm.d == d && d % SO_TILE == 0 &&
           o[1].kind == SO_OP_MATMUL && o[1].n == n && same(o[1].matmul.x, o->norm.out) &&
           o[1].matmul.w->k == d && !is_read_as_float(l, i + 1, o->norm.out, n);
}

/* Returns how many operations were taken. */
static size_t launch_products(launcher *a, size_t i) {
    const so_op *op = &a->l.ops[i], *end = a->l.ops + a->l.n;
    so_products p = {};
    p.n = op->n;
    p.x = rows_of(a, op);
    p.row_scale = a->h.scaled ? a->m->row_scale : NULL;
    p.act = SO_OP_COUNT;
    if (is_gated(a->l, i))
        return launch_gated(a, i, &p);
    size_t taken = 0;
    while (p.n_products < SO_MM_GROUP && op + taken < end && is_product_of(op + taken, op) &&
           !is_gated(a->l, i + taken))
        p.list[p.n_products++] = product_of(op + taken++);
    if (p.n_products == 0) { /* it overwrites its own rows */
        p.list[p.n_products++] = product_of(op);
        taken = 1;
        a->h.x = NULL;
    }
    so_product *last = &p.list[p.n_products - 1];
    const so_op *prior = op + taken - 1, *next = op + taken;
    bool added = next < end && adds(next, prior);
    for (int j = 0; j < p.n_products && added; j++) /* no product writes what is added to */
        added = (const char *)p.list[j].out != at(next->eltwise.a);
    if (added && !is_read(a->l, i + taken + 1, prior->matmul.out, op->n)) {
        p.add = last->out = (float *)at(next->eltwise.out);
        if ((const char *)last->out == a->h.x)
            a->h.x = NULL;
        taken++;
        const so_op *norm = op + taken;
        if (p.n_products == 1 && i > 0 && same(views_of(op - 1).out, op->matmul.x) &&
            so_cuda_is_split_norm(a->l.ops, a->l.n, i + taken, next->eltwise.out, op->n,
                                  last->w->m)) {
            p.norm = (const float *)at(norm->norm.weight);
            p.squares = a->m->squares;
            p.half_out = wanted(a, i + taken + 1, norm->norm.out, op->n, norm->norm.d);
            a->h.scaled = true;
            so_cuda_matmul(*a->q, &p);
            so_cuda_row_scale(*a->q, p.squares, op->n, norm->norm.d, norm->norm.eps,
                              a->m->row_scale);
            return taken + 1;
        }
    } else if (next < end && p.n_products == 1 && next->kind == SO_OP_GELU && next->n == op->n &&
               same(next->eltwise.a, prior->matmul.out) && next->eltwise.d == last->w->m) {
        so_view out = next->eltwise.out;
        p.act = SO_OP_GELU;
        last->out = same(out, prior->matmul.out)
                        ? NULL
                        : kept(a->l, prior->matmul.out, op->n, i + taken + 1);
        p.half_out = wanted(a, i + taken + 1, out, op->n, last->w->m);
        bool keep = !p.half_out.data || is_read_as_float(a->l, i + taken + 1, out, op->n);
        p.act_out = keep ? (float *)at(out) : NULL;
        taken++;
    }
    so_cuda_matmul(*a->q, &p);
    return taken;
}

/* ---- the list ---- */

/* Launches an operation other than a product that makes rows of width d at `out`. */
static void launch_rows(launcher *a, size_t i, so_view out, int d) {
    const so_op *op = &a->l.ops[i];
    so_half_rows half = wanted(a, i + 1, out, op->n, d);
    bool keep = !half.data || is_read_as_float(a->l, i + 1, out, op->n);
    if (op->kind == SO_OP_ATTENTION)
        so_cuda_attention(*a->q, op, half, keep, &a->m->scratch);
    else
        so_cuda_op(*a->q, op, half, keep, &a->m->scratch);
}

static const so_persist_run *find_run(const so_persist_plan *plan, size_t i) {
    for (int j = 0; plan && j < plan->n_runs; j++)
        if (plan->run[j].first_op == i)
            return &plan->run[j];
    return NULL;
}

void so_cuda_run(const so_queue *q, const so_op *ops, size_t n_ops, const so_memory *m,
                 const so_persist_plan *plan) {
    /* Kernels may read weights before the previous kernel has ended. The weights of norms are in buffers
     * and may have been uploaded just now, so the first kernel starts after the uploads. */
    so_queue in_order = *q;
    in_order.overlap = false;
    launcher a = {&in_order, m, {ops, n_ops}, {NULL, 0, 0, 0, false}};
    for (size_t i = 0; i < n_ops; i++) {
        const so_op *op = &ops[i];
        if (i > 0)
            a.q = q;
        if (op->n == 0)
            continue;
        const so_persist_run *run = find_run(plan, i);
        if (run && !has_scaled_rows(&a, op)) {
            so_persist_launch(*a.q, run, rows_of(&a, op));
            a.h.x = NULL;
            i += run->n_ops - 1;
            continue;
        }
        switch (op->kind) {
        case SO_OP_MATMUL:
            i += launch_products(&a, i) - 1;
            continue;
        case SO_OP_ATTENTION:
            launch_rows(&a, i, op->attention.out,
                        op->attention.n_heads * op->attention.store->shape.head_dim);
            continue;
        case SO_OP_RMS_NORM:
        case SO_OP_LAYER_NORM:
            launch_rows(&a, i, op->norm.out, op->norm.d);
            continue;
        case SO_OP_ADD:
        case SO_OP_SILU_MUL:
        case SO_OP_GELU_MUL:
        case SO_OP_GELU:
            launch_rows(&a, i, op->eltwise.out, op->eltwise.d);
            continue;
        default:
            break;
        }
        a.h.x = NULL;
        if (is_rope_store(a.l, i)) {
            so_cuda_rope_store(*a.q, op, op + 1, op + 2);
            i += 2;
        } else if (op->kind == SO_OP_EMBED) {
            so_cuda_embed(*a.q, op);
        } else if (op->kind == SO_OP_SAMPLE) {
            so_cuda_sample(*a.q, op, &m->scratch);
        } else {
            so_cuda_op(*a.q, op, {}, true, &m->scratch);
        }
    }
}

static void grow(size_t *most, size_t n) { *most = n > *most ? n : *most; }

void so_cuda_need(const so_queue *q, const so_op *ops, size_t n_ops, so_memory *need) {
    memset(need, 0, sizeof *need);
    need->exchange_bytes = q->persist ? so_persist_need(q, ops, n_ops) : 0;
    for (size_t i = 0; i < n_ops; i++) {
        so_scratch s;
        so_cuda_scratch_need(&ops[i], &s);
        grow(&need->scratch.counter_bytes, s.counter_bytes);
        grow(&need->scratch.parts_bytes, s.parts_bytes);
        so_cuda_sample_need(&ops[i], &s);
        grow(&need->scratch.counter_bytes, s.counter_bytes);
        grow(&need->scratch.parts_bytes, s.parts_bytes);
        if (ops[i].kind == SO_OP_MATMUL)
            grow(&need->half_bytes,
                 (size_t)ops[i].n * (size_t)ops[i].matmul.w->n_units * SO_UNIT * sizeof(__half));
        if (ops[i].kind == SO_OP_RMS_NORM) {
            grow(&need->squares_bytes,
                 (size_t)ops[i].n * (size_t)(ops[i].norm.d / SO_TILE) * sizeof(float));
            grow(&need->row_scale_bytes, (size_t)ops[i].n * sizeof(float));
        }
    }
}
