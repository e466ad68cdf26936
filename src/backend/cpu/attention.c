/* Attention of the CPU backend: which queries go together, and which positions they see.
 *
 * A unit of work is a run of rows of one sequence times the heads of one group, all of which read
 * the same keys and values. Blocks of 32 positions are walked in ascending order; where every row
 * of the unit sees the whole block in the same slots it is read once for all of them, else row by
 * row (the last blocks of a chain, branches of a tree, the near end of a window). Rows are bundled
 * only as far as every thread still gets several units. Queries are independent, so bundles change
 * no bit. Numbers in device memory are looked at here for the first time; one out of range aborts.
 */
#include <math.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"

enum { OUTPUT_MAX = 4096, UNITS_PER_THREAD = 4 };

static inline void *at(so_view v) { return v.buf->data + v.off; }
static inline float *f32(so_view v) { return at(v); }
static inline const int32_t *i32(so_view v) { return at(v); }

/* Element i of an int32 array that runs to its buffer's end. */
static int32_t element(so_view v, int64_t i) {
    SO_ASSERT(v.buf && i >= 0 && (size_t)i < (v.buf->n_bytes - v.off) / sizeof(int32_t));
    return i32(v)[i];
}

/* Points the block at its entries: positions first … first+31, of which lo … hi-1 are seen. */
static void find_block(const so_op *op, const so_attn_row *row, int head_kv, int first,
                       so_attn_block *block) {
    const so_kv_store *s = op->attention.store;
    int known = -1; /* page slot last looked up */
    size_t base = 0;
    for (int j = block->lo; j < block->hi; j++) {
        int slot = first + j;
        if (slot >= row->n_prefix)
            slot = element(op->attention.tails, (int64_t)row->tail_off + slot - row->n_prefix);
        if (slot / SO_KV_PAGE != known) {
            known = slot / SO_KV_PAGE;
            int page = element(op->attention.pages, (int64_t)row->page_off + known);
            SO_ASSERT(page >= 0 && page < s->shape.n_pages);
            base = so_kv_entry(s, op->attention.layer, page, head_kv, 0);
        }
        SO_ASSERT_OP(slot, >=, 0);
        size_t entry = base + (size_t)(slot % SO_KV_PAGE) * s->entry_bytes;
        block->k[j] = s->k.data + entry;
        block->v[j] = s->v.data + entry;
    }
}

typedef struct unit {
    const so_attn_row *rows;
    int first_row, n_rows;
    int first_head, n_heads, head_kv;
} unit;

/* First position that a row sees. */
static int begin_of(const so_op *op, const so_attn_row *row) {
    int window = op->attention.window;
    return window > 0 && row->pos >= window ? row->pos - window + 1 : 0;
}

/* Whether all rows see positions first … first+31, in slots of the same numbers. */
static bool shared(const so_op *op, const unit *u, int first) {
    for (int r = 0; r < u->n_rows; r++) {
        const so_attn_row *row = &u->rows[r];
        int last = SO_MIN(row->n_prefix - 1, row->pos);
        if (begin_of(op, row) > first || first + SO_KV_PAGE - 1 > last)
            return false;
    }
    return true;
}

/* One block for queries first … first+n-1, by the level's own kernel or one query at a time. */
static void attend_block(const so_kernels *k, const so_attn_fns *fns, const so_attn_block *block,
                         so_attn_bundle *u, int first, int n) {
    if (fns->block && u->d % 16 == 0) {
        fns->block(block, u, first, n);
        return;
    }
    for (int i = first; i < first + n; i++) {
        float p[SO_KV_PAGE], c;
        float m = fns->scores(block, u->q[i], u->d, u->scale, u->m[i], p);
        float sum = k->softmax(p, m), gap = u->m[i] - m;
        k->exp(&c, &gap, 1);
        u->l[i] = fmaf(u->l[i], c, sum);
        fns->values(block, p, c, u->d, u->o + (size_t)i * (size_t)u->d);
        u->m[i] = m;
    }
}

static void walk_blocks(const so_cpu *b, const so_op *op, const unit *w, so_attn_bundle *u) {
    const so_attn_fns *fns = op->attention.store->shape.dtype == SO_DTYPE_F16
                                 ? &b->kernels->attn_f16
                                 : &b->kernels->attn_f32;
    int from = INT32_MAX, to = 0;
    for (int r = 0; r < w->n_rows; r++) {
        from = SO_MIN(from, begin_of(op, &w->rows[r]));
        to = SO_MAX(to, w->rows[r].pos);
    }
    for (int first = from / SO_KV_PAGE * SO_KV_PAGE; first <= to; first += SO_KV_PAGE) {
        so_attn_block block = {.lo = 0, .hi = SO_KV_PAGE};
        if (shared(op, w, first)) {
            find_block(op, &w->rows[0], w->head_kv, first, &block);
            attend_block(b->kernels, fns, &block, u, 0, u->n);
            continue;
        }
        for (int r = 0; r < w->n_rows; r++) {
            const so_attn_row *row = &w->rows[r];
            int begin = begin_of(op, row);
            if (begin >= first + SO_KV_PAGE || row->pos < first)
                continue;
            block.lo = SO_MAX(begin - first, 0);
            block.hi = SO_MIN(row->pos - first + 1, SO_KV_PAGE);
            find_block(op, row, w->head_kv, first, &block);
            attend_block(b->kernels, fns, &block, u, r * w->n_heads, w->n_heads);
        }
    }
}

static void attend(const so_cpu *b, const so_op *op, const unit *w) {
    int d = op->attention.store->shape.head_dim, n_heads = op->attention.n_heads;
    float o[OUTPUT_MAX];
    so_attn_bundle u = {.n = w->n_rows * w->n_heads, .d = d, .scale = op->attention.scale, .o = o};
    memset(o, 0, (size_t)u.n * (size_t)d * sizeof o[0]);
    for (int i = 0; i < u.n; i++) {
        size_t row = (size_t)(w->first_row + i / w->n_heads);
        size_t head = (size_t)(w->first_head + i % w->n_heads);
        u.q[i] = f32(op->attention.q) + (row * (size_t)n_heads + head) * (size_t)d;
        u.m[i] = -INFINITY;
    }
    walk_blocks(b, op, w, &u);
    for (int i = 0; i < u.n; i++) {
        float *out = f32(op->attention.out) + (u.q[i] - f32(op->attention.q));
        float inverse = 1.0f / u.l[i];
        for (int e = 0; e < d; e++)
            out[e] = o[i * d + e] * inverse;
    }
}

/* Rows that may form a unit with the row at `first`: neighbours of the same sequence. */
static int run_of_rows(const so_attn_row *rows, int first, int n, int most) {
    int end = first;
    for (; end < n && end - first < most; end++) {
        const so_attn_row *row = &rows[end];
        SO_ASSERT(row->pos >= 0 && row->n_prefix >= 0 && row->page_off >= 0 && row->tail_off >= 0);
        if (row->page_off != rows[first].page_off)
            break;
    }
    return end - first;
}

/* Units are dealt out in turn: later rows see more, so runs of them would be uneven. */
void so_cpu_attention(const so_cpu *b, const so_op *op, int index, int count) {
    const so_kv_shape *shape = &op->attention.store->shape;
    const so_attn_row *rows = at(op->attention.rows);
    int group = op->attention.n_heads / shape->n_heads_kv;
    int queries = SO_MIN(SO_ATTN_QUERIES, OUTPUT_MAX / shape->head_dim);
    int heads = SO_MIN(group, queries), most = queries / heads;
    long spread = (long)op->n * shape->n_heads_kv / ((long)UNITS_PER_THREAD * count);
    most = (int)SO_MAX(1, SO_MIN((long)most, spread));
    long i = 0;
    for (int first = 0, n_rows; first < op->n; first += n_rows) {
        n_rows = run_of_rows(rows, first, op->n, most);
        for (int head = 0; head < op->attention.n_heads;) {
            int left = group - head % group;
            unit w = {rows + first, first, n_rows, head, SO_MIN(heads, left), head / group};
            if (i++ % count == index)
                attend(b, op, &w);
            head += w.n_heads;
        }
    }
}
