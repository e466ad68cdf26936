/* Attention of the CPU backend: which queries are computed together, which positions they see, and
 * which thread computes them.
 *
 * A query is one head of one row. The queries of adjacent rows of one sequence and of one group of
 * heads (those with the same KV head) form a block: they read the same keys and values. All
 * queries, block by block, row by row and head by head, form one line:
 *
 *   block 0 (first sequence, group 0)   block 1 (group 1)   …   (next sequence, group 0)   …
 *   |— thread 0 ——————————————————————————————|— thread 1 ————————————————————————————|—
 *
 * Each thread gets a contiguous part of the line, with a number of pages to read that is in
 * proportion to its speed (balance.c). A unit of work is a piece of such a part within one block.
 * It is computed in chunks of SO_ATTN_CHUNK positions. Each chunk gives a partial result (largest
 * score, sum of weights, weighted values), and partial results are merged in ascending order.
 *
 * Two threads whose border is inside a block both read its pages. In long contexts that costs too
 * much: there, if units do not divide evenly among the threads, the chunks of a unit are
 * distributed over the threads instead, their partial results are stored, and the thread that
 * finishes the last chunk of a unit merges them. Borders of chunks are fixed by position, so
 * results are bit-identical for any division into units and threads.
 *
 * Scores are computed for whole pages and all queries of a unit, in slot order; rows on a branch of
 * a tree then pick the scores of their own slots. Positions that a row does not see are masked
 * before the softmax, and their values are not read: they may be NaN. Numbers in device memory
 * (rows, pages, tails) are checked here, when they are read; one that is out of range aborts. Runs
 * on all threads at once. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"

enum {
    PAGE = SO_KV_PAGE,
    CHUNK = SO_ATTN_CHUNK,
    QUERIES = SO_ATTN_QUERIES,
    FLOATS_MAX = 4096, /* queries times head dimension of a unit, at most */
    /* Prefetch distance: with one row, work on a page takes less time than one memory access. */
    PREFETCH_PAGES = 2,
    /* From this position on, reading pages twice costs more than storing partial results. */
    SPLIT_MIN_POS = 1024,
};

static inline void *at(so_view v) { return v.buf->data + v.off; }
static inline float *f32(so_view v) { return at(v); }
static inline const int32_t *i32(so_view v) { return at(v); }

typedef struct unit {
    const so_cpu *b;
    const so_op *op;
    const so_attn_fns *fns;
    const so_act *act; /* quantised results; NULL: not needed */
    const so_attn_row *rows;
    int first_row, n_rows;
    int group, head_kv; /* query heads per KV head; the KV head */
    int skip;           /* heads of the first row that do not belong to the unit */
    int n, d;           /* queries, row by row and head by head; head dimension */
    int from, to;       /* first position of the first and of the last chunk that any row sees */
    int last;           /* last position that any row sees */
    bool prefetch_l1;   /* pages are prefetched into L1, else into L2 */
} unit;

/* The positions lo … hi-1 of a chunk that a row sees, counted from the chunk's first position.
 * Those below `prefix_end` belong to the row's prefix: there the slot equals the position. */
typedef struct span {
    int lo, hi, prefix_end;
} span;

/* A chunk of a unit: its first position, the pages of it that rows see, and the first page that
 * the thread reads afterwards. */
typedef struct chunk {
    int first;
    int page, n_pages, after;
    span spans[QUERIES]; /* of each row */
} chunk;

/* Partial result of one chunk of a unit, or of all chunks so far. */
typedef struct part {
    float *o;     /* [n][d] */
    float *m, *l; /* [n] largest score; sum of weights */
} part;

/* ---- positions, slots and pages ---- */

/* Element i of an int32 array that extends to the end of its buffer. */
static int32_t element(so_view v, int64_t i) {
    SO_ASSERT(v.buf && i >= 0 && (size_t)i < (v.buf->n_bytes - v.off) / sizeof(int32_t));
    return i32(v)[i];
}

/* Index of the first query of the unit's row r; for r = n_rows the number of queries. */
static int first_of(const unit *w, int r) {
    return SO_MIN(SO_MAX(r * w->group - w->skip, 0), w->n);
}

/* Offset of the page that holds slots PAGE·i …, for the unit's KV head. */
static size_t page_of(const unit *w, int i) {
    const so_kv_store *s = w->op->attention.store;
    int page = element(w->op->attention.pages, (int64_t)w->rows[0].page_off + i);
    SO_ASSERT(page >= 0 && page < s->shape.n_pages);
    return so_kv_page(s, w->op->attention.layer, page, w->head_kv);
}

static const void *keys_at(const unit *w, int i) {
    return w->op->attention.store->k.data + page_of(w, i);
}

static const void *values_at(const unit *w, int i) {
    return w->op->attention.store->v.data + page_of(w, i);
}

/* Slot of a position after the row's prefix. */
static int tail_slot(const unit *w, const so_attn_row *row, int pos) {
    int slot = element(w->op->attention.tails, (int64_t)row->tail_off + pos - row->n_prefix);
    SO_ASSERT_OP(slot, >=, 0);
    return slot;
}

/* First position that a row sees. */
static int first_seen(const so_op *op, const so_attn_row *row) {
    int window = op->attention.window;
    return window > 0 && row->pos >= window ? row->pos - window + 1 : 0;
}

static span span_of(const so_op *op, const so_attn_row *row, int first) {
    int lo = SO_MAX(first_seen(op, row) - first, 0), hi = SO_MIN(row->pos - first + 1, CHUNK);
    if (lo >= hi)
        return (span){0, 0, 0};
    return (span){lo, hi, SO_MIN(SO_MAX(row->n_prefix - first, lo), hi)};
}

/* The page read PREFETCH_PAGES steps after the i-th one. The order is: all keys of a chunk, its
 * values, then the keys of the next chunk. */
static const void *prefetch_target(const unit *w, const chunk *c, int i) {
    i += PREFETCH_PAGES;
    if (i < c->n_pages)
        return keys_at(w, c->page + i);
    if (i < 2 * c->n_pages)
        return values_at(w, c->page + i - c->n_pages);
    return keys_at(w, SO_MIN(c->after + i - 2 * c->n_pages, w->last / PAGE));
}

static so_attn_page page_part(const unit *w, const void *at, const void *next, int first, int n) {
    return (so_attn_page){at, next, w->prefetch_l1, first, n};
}

/* ---- scores ---- */

/* Chunk without tree branches: slot order is position order, so scores need no reordering. */
static void score_chain(const unit *w, const void *q, const chunk *c, float *s) {
    float *to = s + (c->page * PAGE - c->first);
    for (int i = 0; i < c->n_pages; i++, to += PAGE) {
        so_attn_page k = page_part(w, keys_at(w, c->page + i), prefetch_target(w, c, i), 0, PAGE);
        w->fns->scores(k, q, w->n, w->d, to, CHUNK);
    }
}

/* Copies the scores that rows need from the scores [n][PAGE] of the page with slots PAGE·page …;
 * with scores NULL only returns whether any row needs the page. */
static bool pick_scores(const unit *w, const chunk *c, int page, const float *scores, float *s) {
    bool any = false;
    for (int r = 0; r < w->n_rows; r++)
        for (int j = c->spans[r].lo; j < c->spans[r].hi; j++) {
            int pos = c->first + j;
            int slot = j < c->spans[r].prefix_end ? pos : tail_slot(w, &w->rows[r], pos);
            if (slot / PAGE != page)
                continue;
            any = true;
            if (!scores)
                return true;
            for (int i = first_of(w, r); i < first_of(w, r + 1); i++)
                s[i * CHUNK + j] = scores[i * PAGE + slot % PAGE];
        }
    return any;
}

static void score_tree(const unit *w, const void *q, const chunk *c, float *s) {
    int low = INT32_MAX, high = 0;
    for (int r = 0; r < w->n_rows; r++)
        for (int j = c->spans[r].lo; j < c->spans[r].hi; j++) {
            int pos = c->first + j;
            int slot = j < c->spans[r].prefix_end ? pos : tail_slot(w, &w->rows[r], pos);
            low = SO_MIN(low, slot);
            high = SO_MAX(high, slot);
        }
    float scores[QUERIES * PAGE];
    for (int page = low / PAGE; page <= high / PAGE; page++)
        if (pick_scores(w, c, page, NULL, s)) {
            so_attn_page k = page_part(w, keys_at(w, page), values_at(w, page), 0, PAGE);
            w->fns->scores(k, q, w->n, w->d, scores, PAGE);
            pick_scores(w, c, page, scores, s);
        }
}

/* Adds the bias of each row's distances, after the scores were brought into order of position. */
static void add_bias(const unit *w, const chunk *c, float *s) {
    int reach = w->op->attention.reach;
    for (int r = 0; r < w->n_rows; r++) {
        int before = c->first - element(w->op->attention.query_pos, (int64_t)w->first_row + r);
        for (int i = first_of(w, r); i < first_of(w, r + 1); i++) {
            long head = (long)w->head_kv * w->group + (i + w->skip) % w->group;
            const float *bias = f32(w->op->attention.bias) + head * (2L * reach + 1) + reach;
            for (int j = c->spans[r].lo; j < c->spans[r].hi; j++)
                s[i * CHUNK + j] += bias[SO_MIN(SO_MAX(before + j, -reach), reach)];
        }
    }
}

/* ---- values ---- */

/* Adds values of the prefix positions from … to-1 of the chunk, for the queries i … end_i-1. */
static void prefix_values(const unit *w, const chunk *c, int from, int to, int i, int end_i,
                          const float *p, float *o) {
    for (int j = from, end; j < to; j = end) {
        end = SO_MIN(to, (j / PAGE + 1) * PAGE);
        int page = (c->first + j) / PAGE;
        const void *next = prefetch_target(w, c, c->n_pages + page - c->page);
        so_attn_page v = page_part(w, values_at(w, page), next, j % PAGE, end - j);
        w->fns->values(v, p + i * CHUNK + j, end_i - i, w->d, o + i * w->d);
    }
}

static void tail_values(const unit *w, const chunk *c, int r, const float *p, float *o) {
    int i = first_of(w, r), n = first_of(w, r + 1) - i;
    for (int j = c->spans[r].prefix_end; j < c->spans[r].hi; j++) {
        int slot = tail_slot(w, &w->rows[r], c->first + j);
        const void *page = values_at(w, slot / PAGE);
        so_attn_page v = page_part(w, page, page, slot % PAGE, 1);
        w->fns->values(v, p + i * CHUNK + j, n, w->d, o + i * w->d);
    }
}

/* Positions that all rows see in the same slots are added once for all queries. Positions before
 * and after them are added row by row, so that each row still adds in ascending order. */
static void sum_values(const unit *w, const chunk *c, const float *p, float *o) {
    int lo = 0, hi = CHUNK;
    for (int r = 0; r < w->n_rows; r++) {
        lo = SO_MAX(lo, c->spans[r].lo);
        hi = SO_MIN(hi, c->spans[r].prefix_end);
    }
    if (lo >= hi)
        lo = hi = 0;
    for (int r = 0; r < w->n_rows; r++)
        prefix_values(w, c, c->spans[r].lo, lo, first_of(w, r), first_of(w, r + 1), p, o);
    prefix_values(w, c, lo, hi, 0, w->n, p, o);
    for (int r = 0; r < w->n_rows; r++) {
        prefix_values(w, c, SO_MAX(c->spans[r].lo, hi), c->spans[r].prefix_end, first_of(w, r),
                      first_of(w, r + 1), p, o);
        tail_values(w, c, r, p, o);
    }
}

/* ---- chunks ---- */

/* q: from fns->queries. after: first position of the chunk that the thread computes next; if there
 * is none, of the unit's last chunk. */
static void attend_chunk(const unit *w, const void *q, int first, int after, part out) {
    float s[QUERIES * CHUNK];
    chunk c = {.first = first, .after = after / PAGE};
    int lo = CHUNK, hi = 0;
    bool tails = false;
    for (int r = 0; r < w->n_rows; r++) {
        span sp = c.spans[r] = span_of(w->op, &w->rows[r], first);
        tails |= sp.prefix_end < sp.hi;
        if (sp.lo < sp.hi)
            lo = SO_MIN(lo, sp.lo);
        hi = SO_MAX(hi, sp.hi);
    }
    c.page = (first + SO_MIN(lo, hi)) / PAGE;
    c.n_pages = (first + hi + PAGE - 1) / PAGE - c.page;
    if (tails)
        score_tree(w, q, &c, s);
    else
        score_chain(w, q, &c, s);
    if (w->op->attention.bias.buf)
        add_bias(w, &c, s);
    for (int r = 0; r < w->n_rows; r++) {
        int i = first_of(w, r), n = first_of(w, r + 1) - i;
        span sp = c.spans[r];
        if (sp.lo < sp.hi)
            w->b->kernels->softmax(s + i * CHUNK, n, sp.lo, sp.hi, out.m + i, out.l + i);
    }
    memset(out.o, 0, (size_t)(w->n * w->d) * sizeof *out.o);
    sum_values(w, &c, s, out.o);
}

/* Merges query i of the next chunk's partial result into `all`. */
static void merge_query(const unit *w, int i, const float *factor, part all, part next) {
    float a = factor[2 * i], b = factor[2 * i + 1];
    all.m[i] = next.m[i] > all.m[i] ? next.m[i] : all.m[i];
    all.l[i] = all.l[i] * a + next.l[i] * b;
    w->b->kernels->merge(all.o + i * w->d, next.o + i * w->d, a, b, w->d);
}

static void merge(const unit *w, int first, part all, part next) {
    float factor[2 * QUERIES];
    for (int i = 0; i < w->n; i++) {
        float m = next.m[i] > all.m[i] ? next.m[i] : all.m[i];
        factor[2 * i] = all.m[i] - m;
        factor[2 * i + 1] = next.m[i] - m;
    }
    w->b->kernels->exp(factor, factor, 2L * w->n);
    for (int r = 0; r < w->n_rows; r++) {
        span sp = span_of(w->op, &w->rows[r], first);
        for (int i = first_of(w, r); sp.lo < sp.hi && i < first_of(w, r + 1); i++)
            merge_query(w, i, factor, all, next);
    }
}

static size_t query_at(const unit *w, int i) {
    i += w->skip;
    size_t row = (size_t)(w->first_row + i / w->group);
    size_t head = (size_t)(w->head_kv * w->group + i % w->group);
    return (row * (size_t)w->op->attention.n_heads + head) * (size_t)w->d;
}

static void load_queries(const unit *w, void *q) {
    const float *from[QUERIES];
    for (int i = 0; i < w->n; i++)
        from[i] = f32(w->op->attention.q) + query_at(w, i);
    w->fns->queries(from, w->n, w->d, w->op->attention.scale, q);
}

static void part_init(const unit *w, part all) {
    memset(all.o, 0, (size_t)(w->n * w->d) * sizeof *all.o);
    memset(all.l, 0, (size_t)w->n * sizeof *all.l);
    for (int i = 0; i < w->n; i++)
        all.m[i] = -INFINITY;
}

static void finish(const unit *w, part all) {
    for (int i = 0; i < w->n; i++) {
        float *out = f32(w->op->attention.out) + query_at(w, i);
        w->b->kernels->scale(out, all.o + i * w->d, 1.0f / all.l[i], w->d);
    }
    for (int r = 0; w->act && r < w->n_rows; r++) { /* heads of a row are contiguous */
        size_t at = query_at(w, first_of(w, r));
        int n = (first_of(w, r + 1) - first_of(w, r)) * w->d;
        w->b->kernels->quantize32(f32(w->op->attention.out) + at, n, w->act->q + at,
                                  w->act->blocks32 + at / SO_QK);
    }
}

static void attend(const unit *w) {
    float q[FLOATS_MAX], o[2][FLOATS_MAX], m[2][QUERIES], l[2][QUERIES];
    part all = {o[0], m[0], l[0]}, next = {o[1], m[1], l[1]};
    load_queries(w, q);
    part_init(w, all);
    memset(m[1], 0, sizeof m[1]); /* for rows that see nothing of a chunk */
    for (int first = w->from; first <= w->to; first += CHUNK) {
        attend_chunk(w, q, first, SO_MIN(first + CHUNK, w->to), next);
        merge(w, first, all, next);
    }
    finish(w, all);
}

/* ---- split at chunks ---- */

static size_t part_floats(int n, int d) { return (size_t)n * (size_t)(d + 2); }

/* The i-th partial result of the operation; those of one unit are adjacent. */
static part part_at(const unit *w, long i, size_t floats) {
    float *p = w->b->attn->floats + (size_t)i * floats;
    size_t n = (size_t)w->n;
    return (part){p + 2 * n, p, p + n};
}

static void merge_parts(const unit *w, long first_part, size_t floats) {
    float o[FLOATS_MAX], m[QUERIES], l[QUERIES];
    part all = {o, m, l};
    part_init(w, all);
    for (int first = w->from; first <= w->to; first += CHUNK)
        merge(w, first, all, part_at(w, first_part++, floats));
    finish(w, all);
}

/* This thread's chunks of unit `number`. The chunks of all split units are numbered consecutively;
 * chunk i belongs to thread i mod count. */
static void attend_split(const unit *w, int number, long first_part, size_t floats, int index,
                         int count) {
    float q[FLOATS_MAX];
    int n_chunks = (w->to - w->from) / CHUNK + 1, done = 0;
    for (int c = 0; c < n_chunks; c++) {
        if ((first_part + c) % count != index)
            continue;
        if (done++ == 0)
            load_queries(w, q);
        attend_chunk(w, q, w->from + c * CHUNK, SO_MIN(w->from + (c + count) * CHUNK, w->to),
                     part_at(w, first_part + c, floats));
    }
    _Atomic int *n_done = &w->b->attn->n_done[number];
    if (done > 0 && atomic_fetch_add(n_done, done) + done == n_chunks) {
        merge_parts(w, first_part, floats);
        atomic_store(n_done, 0);
    }
}

/* ---- units ---- */

typedef struct assignment {
    int max_queries; /* per unit, at most */
    /* Either: this thread computes the queries that begin at pages work … end_work-1 of the line,
     * which counts the pages that each query reads. */
    long work, end_work;
    /* Or: units are assigned to threads round-robin, and those from n_whole on are split into
     * chunks. */
    bool split;
    long n_whole;
} assignment;

/* Number of rows from `first` on that belong to the same sequence and may form units together. */
static int run_of_rows(const so_attn_row *rows, int first, int n) {
    int end = first;
    for (; end < n; end++) {
        const so_attn_row *row = &rows[end];
        SO_ASSERT(row->pos >= 0 && row->n_prefix >= 0 && row->page_off >= 0 && row->tail_off >= 0);
        if (row->page_off != rows[first].page_off)
            break;
    }
    return end - first;
}

static long divide_up(long a, long b) { return (a + b - 1) / b; }

static int group_of(const so_op *op) {
    return op->attention.n_heads / op->attention.store->shape.n_heads_kv;
}

static long count_units(const so_op *op, int max_queries) {
    const so_attn_row *rows = at(op->attention.rows);
    int n_kv = op->attention.store->shape.n_heads_kv, n = 0;
    long units = 0;
    for (int first = 0; first < op->n; first += n) {
        n = run_of_rows(rows, first, op->n);
        units += n_kv * divide_up((long)n * group_of(op), max_queries);
    }
    return units;
}

/* Whether a round-robin assignment of units gives no thread more than 9/8 of the average. */
static bool is_balanced(long units, int count) {
    return divide_up(units, count) * count * 8 <= units * 9;
}

/* Whether the partial results of all chunks fit into b->attn. */
static bool can_split(const so_cpu *b, const so_op *op, long units, int max_queries, int last) {
    int d = op->attention.store->shape.head_dim;
    size_t parts = (size_t)units * (size_t)(last / CHUNK + 1);
    size_t room = SO_ATTN_SPLIT_BYTES / sizeof(float) / part_floats(max_queries, d);
    return b->attn->floats && units <= SO_ATTN_SPLIT_UNITS && parts <= room;
}

/* Pages that one query of the row reads. */
static long pages_of(const so_op *op, const so_attn_row *row) {
    return row->pos / PAGE - first_seen(op, row) / PAGE + 1;
}

/* With one sequence, only the units are split that remain after every thread got the same number of
 * whole ones, since merging moves partial results between cores. Units of several sequences
 * differ in length: all of them are split. */
static assignment make_assignment(const so_cpu *b, const so_op *op, int index, int count) {
    const so_attn_row *rows = at(op->attention.rows);
    assignment p = {.max_queries =
                        SO_MIN(QUERIES, FLOATS_MAX / op->attention.store->shape.head_dim)};
    int last = 0;
    long pages = 0;
    for (int i = 0; i < op->n; i++) {
        last = SO_MAX(last, rows[i].pos);
        pages += pages_of(op, &rows[i]) * op->attention.n_heads;
    }
    so_cpu_split_weighted(b, pages, 1, index, &p.work, &p.end_work);
    if (last >= SPLIT_MIN_POS) {
        long units = count_units(op, p.max_queries);
        p.split = !is_balanced(units, count) && can_split(b, op, units, p.max_queries, last);
        p.n_whole = run_of_rows(rows, 0, op->n) == op->n ? units / count * count : 0;
    }
    return p;
}

/* Sets the range of chunks that the unit's rows see. */
static void set_range(unit *w) {
    w->from = INT32_MAX, w->to = w->last = 0;
    for (int r = 0; r < w->n_rows; r++) {
        w->from = SO_MIN(w->from, first_seen(w->op, &w->rows[r]) / CHUNK * CHUNK);
        w->to = SO_MAX(w->to, w->rows[r].pos / CHUNK * CHUNK);
        w->last = SO_MAX(w->last, w->rows[r].pos);
    }
}

/* The unit with queries first … first+n-1 of a block. */
static unit unit_of(unit block, int first, int n) {
    const so_attn_row *rows = at(block.op->attention.rows);
    block.first_row += first / block.group;
    block.rows = rows + block.first_row;
    block.skip = first % block.group;
    block.n = n;
    block.n_rows = (int)divide_up(block.skip + n, block.group);
    set_range(&block);
    return block;
}

typedef struct walker {
    assignment p;
    int index, count;
    long done;      /* pages of all earlier blocks */
    int number;     /* of the next unit */
    long next_part; /* index of the next free partial result */
} walker;

/* Number of the block's queries that begin before page `work` of the line. */
static int queries_before(const walker *t, const unit *block, long work) {
    long before = t->done;
    int n = 0;
    for (int r = 0; r < block->n_rows; r++) {
        long pages = pages_of(block->op, &block->rows[r]);
        n += (int)SO_MIN(divide_up(SO_MAX(work - before, 0), pages), block->group);
        before += pages * block->group;
    }
    return n;
}

static void run_unit(walker *t, const unit *w) {
    size_t floats = part_floats(t->p.max_queries, w->d);
    int number = t->number++;
    if (!t->p.split || number < t->p.n_whole) {
        if (!t->p.split || number % t->count == t->index)
            attend(w);
        return;
    }
    attend_split(w, number, t->next_part, floats, t->index, t->count);
    t->next_part += (w->to - w->from) / CHUNK + 1;
}

/* Runs this thread's part of a block in units of nearly equal size. If units are split, visits all
 * of the block; run_unit then picks what the thread computes. */
static void run_block(walker *t, const unit *block) {
    int first = 0, end = block->n;
    if (!t->p.split) {
        first = queries_before(t, block, t->p.work);
        end = queries_before(t, block, t->p.end_work);
    }
    for (int n; first < end; first += n) {
        n = (int)divide_up(end - first, divide_up(end - first, t->p.max_queries));
        unit w = unit_of(*block, first, n);
        run_unit(t, &w);
    }
    for (int r = 0; r < block->n_rows; r++)
        t->done += pages_of(block->op, &block->rows[r]) * block->group;
}

static void attention(const so_cpu *b, const so_op *op, const so_act *act, int index, int count) {
    const so_kv_shape *shape = &op->attention.store->shape;
    const so_attn_row *rows = at(op->attention.rows);
    walker t = {.p = make_assignment(b, op, index, count), .index = index, .count = count};
    unit block = {.b = b, .op = op, .act = act, .d = shape->head_dim, .group = group_of(op)};
    block.fns = shape->dtype == SO_DTYPE_F16    ? &b->kernels->attn_f16
                : shape->dtype == SO_DTYPE_Q8_0 ? &b->kernels->attn_q8
                                                : &b->kernels->attn_f32;
    /* What was measured for weights holds for keys and values too, except with one row, which does so
     * little with a page that L2 was faster on all processors tried (docs/log, entries 42 and 45). */
    so_prefetch measured = b->prefetch[so_prefetch_class(SO_QK, 2)];
    block.prefetch_l1 = op->n > 1 && measured.lead > 0 && measured.l1;
    for (int first = 0; first < op->n; first += block.n_rows) {
        block.rows = rows + first;
        block.first_row = first;
        block.n_rows = run_of_rows(rows, first, op->n);
        block.n = block.n_rows * block.group;
        for (block.head_kv = 0; block.head_kv < shape->n_heads_kv; block.head_kv++)
            run_block(&t, &block);
    }
}

void so_cpu_attention(const so_cpu *b, const so_op *op, int index, int count) {
    attention(b, op, NULL, index, count);
}

void so_cpu_attention_quantized(const so_cpu *b, const so_op *op, int index, int count) {
    so_act act = so_cpu_activations(b, op + 1);
    attention(b, op, &act, index, count);
}
