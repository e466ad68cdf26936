/* Page numbers, reference counts and sequences of the KV cache. kv.h has the contract.
 *
 * Owns: which sequence holds which page, the free list, and the order in which entries are copied.
 * The entries are stored by the backend; the only operation submitted for them is SO_OP_KV_COPY.
 * Does not handle tokens, trees or models: a speculation is a number of nodes, a path is a list of
 * node numbers.
 *
 * The slotted layout is the paged one with fixed tables. A sequence gets all pages of its page run
 * at its first begin; n_pages covers only the positions in use. Code that reads page tables
 * therefore works for both layouts.
 *
 * Invariants (so_kv_check tests them):
 *   1. The reference count of a page is the number of page tables that hold it, plus one if it is
 *      in the prefix tree. A page with count 0 is in the free list exactly once; no other page is
 *      in that list. Slotted: every page of a page run in use has count 1, and the free list holds
 *      the first pages of the other page runs.
 *   2. A table has exactly the pages for len + open positions. Slotted: they are neighbours.
 *   3. While a speculation is open, every page with a slot at or past len has count 1. begin
 *      ensures this by copying; fork asserts that no speculation is open. So writes never reach
 *      another sequence.
 *   4. In a speculation that was extended, or kept in part, each node of the earlier passes follows
 *      a slot from len − 1 up to the one before its own. So every path ends at the committed
 *      positions.
 *
 * A freed page may be handed out again at once although queued operations still read it: the
 * backend runs operations in submission order, so the read comes before the next write.
 *
 * Thread: the owner of the cache. Once a sequence's table has its full size, begin, commit, abort
 * and truncate allocate no memory. */
#include "kv/kv.h"

#include <stdlib.h>
#include <string.h>

#include "kv/impl.h"

enum { NO_PARENT = -2 }; /* −1 is the slot before the first position */

static int check_shape(const so_backend *b, const so_kv_shape *s, so_err *err) {
    bool bf16 = s->dtype == SO_DTYPE_BF16;
    if (bf16 && !b->vt->kv_bf16)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "a KV cache of type BF16 needs a GPU; '%s' has " SO_KV_DTYPES,
                          b->vt->name);
    if (!bf16 && !so_kv_dtype_ok(s->dtype))
        return so_err_set(err, SO_EINVAL, "KV cache type %d: only " SO_KV_DTYPES " are supported",
                          (int)s->dtype);
    if (s->n_layers < 1 || s->n_heads_kv < 1 || s->head_dim < 1)
        return so_err_set(err, SO_EINVAL,
                          "KV cache of %d layers, %d heads, head size %d: each must be at least 1",
                          s->n_layers, s->n_heads_kv, s->head_dim);
    if (s->n_pages < 1 || s->n_pages > INT32_MAX / SO_KV_PAGE)
        return so_err_set(err, SO_ERANGE, "KV cache of %d pages; 1 to %d are possible", s->n_pages,
                          INT32_MAX / SO_KV_PAGE);
    return 0;
}

static int make_tables(so_kv *kv, so_err *err) {
    size_t n = (size_t)kv->shape.n_pages;
    kv->refs = so_try_alloc(n, sizeof *kv->refs);
    kv->free_pages = so_try_alloc(n, sizeof *kv->free_pages);
    if (!kv->refs || !kv->free_pages)
        return so_err_set(err, SO_ENOMEM, "no memory for the tables of %d KV pages",
                          kv->shape.n_pages);
    int step = SO_MAX(1, kv->run_pages);
    kv->n_free = kv->shape.n_pages / step;
    for (int i = 0; i < kv->n_free; i++) /* page 0 on top: handed out in ascending order */
        kv->free_pages[i] = (kv->n_free - 1 - i) * step;
    return SO_OK;
}

static int create(so_backend *b, const so_kv_shape *shape, int run_pages, so_kv **out,
                  so_err *err) {
    int rc = check_shape(b, shape, err);
    if (rc != SO_OK)
        return rc;
    so_kv *kv = SO_NEW(so_kv);
    kv->backend = b;
    kv->shape = *shape;
    kv->run_pages = run_pages;
    rc = make_tables(kv, err);
    if (rc == SO_OK)
        rc = b->vt->kv_create(b, shape, &kv->store, err);
    if (rc == SO_OK)
        rc = b->vt->buffer_create(b, sizeof kv->from + sizeof kv->to, &kv->copies, err);
    if (rc != SO_OK)
        so_kv_free(kv);
    else
        *out = kv;
    return rc;
}

int so_kv_create(so_backend *b, const so_kv_shape *shape, so_kv **out, so_err *err) {
    return create(b, shape, 0, out, err);
}

int so_kv_create_slotted(so_backend *b, const so_kv_shape *shape, int run_len, so_kv **out,
                         so_err *err) {
    if (run_len < 1 || run_len > INT32_MAX - SO_KV_PAGE ||
        so_kv_pages_for(run_len) > shape->n_pages)
        return so_err_set(
            err, SO_ERANGE,
            "KV page run of %d positions: must be at least 1 and fit the cache's %d pages "
            "of %d positions",
            run_len, shape->n_pages, SO_KV_PAGE);
    return create(b, shape, so_kv_pages_for(run_len), out, err);
}

void so_kv_free(so_kv *kv) {
    if (!kv)
        return;
    SO_ASSERT(kv->seqs == NULL);
    so_prefix_free(kv->prefix);
    if (kv->copies)
        kv->backend->vt->buffer_free(kv->backend, kv->copies);
    if (kv->store)
        kv->backend->vt->kv_free(kv->backend, kv->store);
    free(kv->refs);
    free(kv->free_pages);
    free(kv);
}

so_kv_store *so_kv_backing(so_kv *kv) { return kv->store; }
const so_kv_shape *so_kv_get_shape(const so_kv *kv) { return &kv->shape; }
so_kv_layout so_kv_get_layout(const so_kv *kv) {
    return kv->run_pages > 0 ? SO_KV_SLOTTED : SO_KV_PAGED;
}

int so_kv_free_pages(const so_kv *kv) { return kv->n_free * SO_MAX(1, kv->run_pages); }
int so_kv_idle_pages(const so_kv *kv) { return kv->prefix ? so_prefix_n_idle(kv->prefix) : 0; }
int so_kv_available_pages(const so_kv *kv) { return so_kv_free_pages(kv) + so_kv_idle_pages(kv); }

size_t so_kv_bytes_per_token(const so_kv_shape *s) {
    return 2 * (size_t)s->n_layers * (size_t)s->n_heads_kv *
           so_kv_entry_bytes(s->dtype, s->head_dim);
}

/* Pages. */

static int32_t page_acquire(so_kv *kv) {
    SO_ASSERT_OP(kv->n_free, >, 0);
    int32_t page = kv->free_pages[--kv->n_free];
    SO_ASSERT_OP(kv->refs[page], ==, 0);
    kv->refs[page] = 1;
    return page;
}

void so_kv_page_acquire_shared(so_kv *kv, int32_t page) {
    SO_ASSERT_OP(kv->refs[page], >, 0);
    if (kv->refs[page]++ == 1 && kv->prefix && so_prefix_holds(kv->prefix, page))
        so_prefix_page_busy(kv->prefix, page);
}

void so_kv_page_release(so_kv *kv, int32_t page) {
    SO_ASSERT_OP(kv->refs[page], >, 0);
    if (--kv->refs[page] == 0)
        kv->free_pages[kv->n_free++] = page;
    else if (kv->refs[page] == 1 && kv->prefix && so_prefix_holds(kv->prefix, page))
        so_prefix_page_idle(kv->prefix, page);
}

/* Page runs (slotted layout). */

static bool acquire_run(so_seq *s) {
    so_kv *kv = s->kv;
    if (s->run_start >= 0)
        return true;
    if (kv->n_free == 0)
        return false;
    s->run_start = kv->free_pages[--kv->n_free];
    so_seq_table_reserve(s, kv->run_pages);
    for (int i = 0; i < kv->run_pages; i++) {
        s->pages[i] = s->run_start + i;
        kv->refs[s->run_start + i] = 1;
    }
    return true;
}

static void release_run(so_seq *s) {
    if (s->run_start < 0)
        return;
    for (int i = 0; i < s->kv->run_pages; i++)
        s->kv->refs[s->run_start + i] = 0;
    s->kv->free_pages[s->kv->n_free++] = s->run_start;
    s->run_start = -1;
}

/* Copies of entries. */

static so_kv_slot slot_at(const so_seq *s, int slot) {
    return (so_kv_slot){s->pages[slot / SO_KV_PAGE], slot % SO_KV_PAGE};
}

static void copies_flush(so_kv *kv) {
    if (kv->n_pending == 0)
        return;
    size_t n_bytes = (size_t)kv->n_pending * sizeof(so_kv_slot);
    so_view from = {kv->copies, 0}, to = {kv->copies, sizeof kv->from};
    so_submit(kv->backend, &(so_op){.kind = SO_OP_UPLOAD, .upload = {from, kv->from, n_bytes}});
    so_submit(kv->backend, &(so_op){.kind = SO_OP_UPLOAD, .upload = {to, kv->to, n_bytes}});
    so_submit(
        kv->backend,
        &(so_op){.kind = SO_OP_KV_COPY, .n = kv->n_pending, .kv_copy = {kv->store, from, to}});
    kv->n_pending = 0;
}

static void copies_add(so_kv *kv, so_kv_slot from, so_kv_slot to) {
    kv->from[kv->n_pending] = from;
    kv->to[kv->n_pending] = to;
    if (++kv->n_pending == SO_KV_COPY_CAP)
        copies_flush(kv);
}

/* Sequences. */

void so_seq_table_reserve(so_seq *s, int n) {
    if (n <= s->pages_cap)
        return;
    int cap = SO_MAX(n, s->pages_cap * 2);
    s->pages = so_realloc(s->pages, (size_t)cap * sizeof *s->pages);
    s->pages_cap = cap;
}

/* Sets the length and releases the pages that start at or past it. */
static void table_shrink(so_seq *s, int len) {
    int keep = so_kv_pages_for(len);
    while (s->n_pages > keep && s->kv->run_pages == 0)
        so_kv_page_release(s->kv, s->pages[--s->n_pages]);
    s->n_pages = keep;
    s->n_shared = SO_MIN(s->n_shared, len / SO_KV_PAGE);
    s->len = len;
}

so_seq *so_seq_create(so_kv *kv) {
    so_seq *s = SO_NEW(so_seq);
    s->kv = kv;
    s->run_start = -1;
    s->next = kv->seqs;
    if (s->next)
        s->next->prev = s;
    kv->seqs = s;
    return s;
}

void so_seq_reserve(so_seq *s, int n) { so_seq_table_reserve(s, so_kv_pages_for(n)); }

void so_seq_reserve_nodes(so_seq *s, int n) {
    SO_ASSERT_OP(s->open, ==, 0);
    if (n <= s->parents_cap)
        return;
    s->parents = so_realloc(s->parents, (size_t)n * sizeof *s->parents);
    s->moved = so_realloc(s->moved, (size_t)n * sizeof *s->moved);
    s->parents_cap = n;
}

void so_seq_clear(so_seq *s) {
    s->open = s->n_computed = 0;
    table_shrink(s, 0);
    release_run(s);
    so_seq_set_source(s, NULL);
}

void so_seq_set_source(so_seq *s, so_source *source) {
    SO_ASSERT_OP(s->len, ==, 0);
    SO_ASSERT_OP(s->open, ==, 0);
    if (source)
        source->n_users++;
    if (s->source)
        s->source->n_users--;
    s->source = source;
}

so_source *so_seq_get_source(const so_seq *s) { return s->source; }

void so_seq_free(so_seq *s) {
    if (!s)
        return;
    so_seq_clear(s);
    if (s->prev)
        s->prev->next = s->next;
    else
        s->kv->seqs = s->next;
    if (s->next)
        s->next->prev = s->prev;
    free(s->pages);
    free(s->parents);
    free(s->moved);
    free(s);
}

so_kv *so_seq_kv(const so_seq *s) { return s->kv; }
int so_seq_len(const so_seq *s) { return s->len; }
int so_seq_open_nodes(const so_seq *s) { return s->open; }
int so_seq_next_slot(const so_seq *s) { return s->len + s->n_computed; }
int so_seq_next_nodes(const so_seq *s) { return s->open - s->n_computed; }

const int32_t *so_seq_pages(const so_seq *s, int *n_pages) {
    *n_pages = s->n_pages;
    return s->pages;
}

/* Gets a page run for f and copies the first len entries of s into it. */
static bool fork_by_copy(const so_seq *s, so_seq *f, int len) {
    if (len > 0 && !acquire_run(f))
        return false;
    for (int i = 0; i < len; i++)
        copies_add(s->kv, slot_at(s, i), slot_at(f, i));
    copies_flush(s->kv);
    return true;
}

static void fork_by_sharing(const so_seq *s, so_seq *f, int n_pages) {
    so_seq_table_reserve(f, n_pages);
    for (int i = 0; i < n_pages; i++) {
        f->pages[i] = s->pages[i];
        so_kv_page_acquire_shared(s->kv, f->pages[i]);
    }
}

so_seq *so_seq_fork(so_seq *s, int len) {
    SO_ASSERT_OP(s->open, ==, 0);
    SO_ASSERT_OP(len, >=, 0);
    SO_ASSERT_OP(len, <=, s->len);
    so_seq *f = so_seq_create(s->kv);
    so_seq_set_source(f, s->source);
    if (s->kv->run_pages == 0) {
        fork_by_sharing(s, f, so_kv_pages_for(len));
    } else if (!fork_by_copy(s, f, len)) {
        so_seq_free(f);
        return NULL;
    }
    f->len = len;
    f->n_pages = so_kv_pages_for(len);
    f->n_shared = SO_MIN(s->n_shared, len / SO_KV_PAGE);
    return f;
}

void so_seq_truncate_to(so_seq *s, int new_len) {
    SO_ASSERT_OP(s->open, ==, 0);
    SO_ASSERT_OP(new_len, >=, 0);
    if (new_len < s->len)
        table_shrink(s, new_len);
}

/* Speculation. */

static bool last_page_shared(const so_seq *s) {
    return s->len % SO_KV_PAGE != 0 && s->kv->refs[s->pages[s->len / SO_KV_PAGE]] > 1;
}

/* Replaces the partly filled last page of s by a copy that only s holds. */
static void last_page_unshare(so_seq *s) {
    so_kv *kv = s->kv;
    int last = s->len / SO_KV_PAGE;
    int32_t old = s->pages[last], fresh = page_acquire(kv);
    for (int i = 0; i < s->len % SO_KV_PAGE; i++)
        copies_add(kv, (so_kv_slot){old, i}, (so_kv_slot){fresh, i});
    copies_flush(kv);
    s->pages[last] = fresh;
    so_kv_page_release(kv, old);
}

int64_t so_seq_pages_needed(const so_seq *s, int n_nodes) {
    int64_t pages = ((int64_t)s->len + s->open + n_nodes + SO_KV_PAGE - 1) / SO_KV_PAGE;
    if (s->kv->run_pages > 0)
        return s->run_start < 0 ? s->kv->run_pages : 0;
    return pages - s->n_pages + last_page_shared(s);
}

int64_t so_seq_max_nodes(const so_seq *s, int64_t n_pages) {
    int64_t pages = s->n_pages + n_pages - last_page_shared(s);
    if (s->kv->run_pages > 0)
        pages = s->run_start >= 0 || n_pages >= s->kv->run_pages ? s->kv->run_pages : 0;
    return pages * SO_KV_PAGE - s->len - s->open;
}

/* Both give the sequence its pages for n_nodes more positions, after those of an open
 * speculation. */
static int grow_in_run(so_seq *s, int n_nodes, so_err *err) {
    const so_kv *kv = s->kv;
    int64_t run_len = (int64_t)kv->run_pages * SO_KV_PAGE;
    int used = s->len + s->open;
    if ((int64_t)used + n_nodes > run_len)
        return so_err_set(err, SO_ELIMIT,
                          "KV page run is full: %d more positions after %d exceed its %lld",
                          n_nodes, used, (long long)run_len);
    if (!acquire_run(s))
        return so_err_set(err, SO_ELIMIT, "KV cache is full: all %d page runs are in use",
                          kv->shape.n_pages / kv->run_pages);
    s->n_pages = so_kv_pages_for(used + n_nodes);
    return SO_OK;
}

static int grow_pages(so_seq *s, int n_nodes, so_err *err) {
    so_kv *kv = s->kv;
    int64_t need = so_seq_pages_needed(s, n_nodes);
    if (need > so_kv_available_pages(kv))
        return so_err_set(err, SO_ELIMIT,
                          "KV cache is full: %d more positions after %d need %lld pages of %d "
                          "positions, and %d of %d pages are free",
                          n_nodes, s->len + s->open, (long long)need, SO_KV_PAGE,
                          so_kv_available_pages(kv), kv->shape.n_pages);
    if (need > kv->n_free)
        so_prefix_evict(kv->prefix, (int)need - kv->n_free);
    if (last_page_shared(s))
        last_page_unshare(s);
    int pages = so_kv_pages_for(s->len + s->open + n_nodes);
    so_seq_table_reserve(s, pages);
    while (s->n_pages < pages)
        s->pages[s->n_pages++] = page_acquire(kv);
    return SO_OK;
}

static int grow(so_seq *s, int n_nodes, so_err *err) {
    SO_ASSERT_OP(n_nodes, >, 0);
    int rc = s->kv->run_pages > 0 ? grow_in_run(s, n_nodes, err) : grow_pages(s, n_nodes, err);
    if (rc != SO_OK)
        return rc;
    s->n_computed = s->open;
    s->open += n_nodes;
    for (int i = s->n_computed; i < SO_MIN(s->open, s->parents_cap); i++)
        s->parents[i] = NO_PARENT;
    return SO_OK;
}

int so_seq_begin(so_seq *s, int n_nodes, so_err *err) {
    SO_ASSERT_OP(s->open, ==, 0);
    return grow(s, n_nodes, err);
}

int so_seq_extend(so_seq *s, int n_nodes, so_err *err) {
    SO_ASSERT_OP(s->open, >, 0);
    SO_ASSERT_OP(n_nodes, <=, s->parents_cap - s->open);
    for (int i = s->n_computed; i < s->open; i++)
        SO_ASSERT_OP(s->parents[i], !=, NO_PARENT);
    return grow(s, n_nodes, err);
}

void so_seq_set_parent(so_seq *s, int slot, int parent) {
    SO_ASSERT(slot >= s->len && slot < s->len + s->open);
    SO_ASSERT(parent >= s->len - 1 && parent < slot);
    if (slot - s->len < s->parents_cap)
        s->parents[slot - s->len] = parent;
}

int so_seq_parent(const so_seq *s, int slot) {
    SO_ASSERT(slot >= s->len && slot < s->len + SO_MIN(s->open, s->parents_cap));
    SO_ASSERT_OP(s->parents[slot - s->len], !=, NO_PARENT);
    return s->parents[slot - s->len];
}

void so_seq_commit(so_seq *s, const int32_t *path, int n_path) {
    SO_ASSERT_OP(n_path, <=, s->open);
    int32_t before = -1;
    for (int i = 0; i < n_path; i++) {
        SO_ASSERT_OP(path[i], >, before);
        SO_ASSERT_OP(path[i], <, s->open);
        before = path[i];
        if (path[i] != i)
            copies_add(s->kv, slot_at(s, s->len + path[i]), slot_at(s, s->len + i));
    }
    copies_flush(s->kv);
    s->open = s->n_computed = 0;
    table_shrink(s, s->len + n_path);
}

/* The place among nodes[0 … n) of the node that nodes[n] follows; −1: the committed positions. */
static int kept_parent(const so_seq *s, const int32_t *nodes, int n) {
    int parent = so_seq_parent(s, s->len + nodes[n]) - s->len, low = 0, high = n;
    while (low < high) {
        int mid = low + (high - low) / 2;
        if (nodes[mid] < parent)
            low = mid + 1;
        else
            high = mid;
    }
    SO_ASSERT(parent < 0 || (low < n && nodes[low] == parent));
    return parent < 0 ? -1 : low;
}

void so_seq_keep(so_seq *s, const int32_t *nodes, int n, int n_path) {
    int32_t before = -1;
    SO_ASSERT(n_path >= 0 && n_path <= n && n <= s->open && s->open <= s->parents_cap);
    for (int i = 0; i < n; i++) { /* parents of later nodes are still where they were */
        SO_ASSERT_OP(nodes[i], >, before);
        SO_ASSERT_OP(nodes[i], <, s->open);
        before = nodes[i];
        int parent = kept_parent(s, nodes, i);
        SO_ASSERT(i < n_path ? parent == i - 1 : parent >= n_path - 1);
        if (nodes[i] != i)
            copies_add(s->kv, slot_at(s, s->len + nodes[i]), slot_at(s, s->len + i));
        s->moved[i] = s->len + parent;
    }
    copies_flush(s->kv);
    for (int i = n_path; i < n; i++)
        s->parents[i - n_path] = s->moved[i];
    int len = s->len + n_path;
    table_shrink(s, s->len + n);
    s->len = len;
    s->open = s->n_computed = n - n_path;
}

void so_seq_commit_chain(so_seq *s, int n) {
    SO_ASSERT_OP(n, >=, 0);
    SO_ASSERT_OP(n, <=, s->open);
    s->open = s->n_computed = 0;
    table_shrink(s, s->len + n);
}

void so_seq_abort(so_seq *s) { so_seq_commit_chain(s, 0); }

/* Checks. */

static void check_parents(const so_seq *s) {
    SO_ASSERT_OP(s->n_computed, >=, 0);
    SO_ASSERT_OP(s->n_computed, <=, s->open);
    SO_ASSERT(s->n_computed == 0 || s->open <= s->parents_cap);
    for (int i = 0; i < SO_MIN(s->open, s->parents_cap); i++) {
        if (s->parents[i] == NO_PARENT && i >= s->n_computed)
            continue;
        SO_ASSERT_OP(s->parents[i], >=, s->len - 1);
        SO_ASSERT_OP(s->parents[i], <, s->len + i);
    }
}

static void check_seq(const so_kv *kv, const so_seq *s, int32_t *counts) {
    SO_ASSERT(s->kv == kv);
    SO_ASSERT(s->prev ? s->prev->next == s : kv->seqs == s);
    SO_ASSERT_OP(s->len, >=, 0);
    SO_ASSERT_OP(s->open, >=, 0);
    SO_ASSERT_OP(s->n_pages, ==, so_kv_pages_for(s->len + s->open));
    check_parents(s);
    SO_ASSERT_OP(s->n_shared * SO_KV_PAGE, <=, s->len);
    SO_ASSERT(s->run_start >= 0 || kv->run_pages == 0 || s->n_pages == 0);
    for (int i = 0; i < s->n_pages; i++) {
        SO_ASSERT_OP(s->pages[i], >=, 0);
        SO_ASSERT_OP(s->pages[i], <, kv->shape.n_pages);
        SO_ASSERT(i >= s->n_shared || so_prefix_holds(kv->prefix, s->pages[i]));
        SO_ASSERT(kv->run_pages == 0 || s->pages[i] == s->run_start + i);
        counts[s->pages[i]] += kv->run_pages == 0;
        if (s->open > 0 && (i + 1) * SO_KV_PAGE > s->len)
            SO_ASSERT_OP(kv->refs[s->pages[i]], ==, 1);
    }
    for (int i = 0; s->run_start >= 0 && i < kv->run_pages; i++)
        counts[s->run_start + i]++;
}

/* Pages with count 0 are in the free list, each once. */
static void check_free(const so_kv *kv, int32_t *counts) {
    int n = kv->shape.n_pages, step = SO_MAX(1, kv->run_pages), n_unused = 0;
    for (int i = 0; i + step <= n; i += step)
        n_unused += counts[i] == 0;
    SO_ASSERT_OP(kv->n_free, ==, n_unused);
    for (int i = 0; i < kv->n_free; i++) {
        int32_t page = kv->free_pages[i];
        SO_ASSERT_OP(page, >=, 0);
        SO_ASSERT_OP(page, <=, n - step);
        SO_ASSERT_OP(page % step, ==, 0);
        SO_ASSERT_OP(counts[page], ==, 0); /* marked below: a page listed twice fails here */
        counts[page] = -1;
    }
}

void so_kv_check(const so_kv *kv) {
    int n = kv->shape.n_pages;
    int32_t *counts = SO_NEW_N(int32_t, n);
    SO_ASSERT_OP(kv->n_pending, ==, 0);
    for (const so_seq *s = kv->seqs; s; s = s->next)
        check_seq(kv, s, counts);
    if (kv->prefix)
        so_prefix_check(kv->prefix, counts);
    for (int i = 0; i < n; i++)
        SO_ASSERT_OP(kv->refs[i], ==, counts[i]);
    check_free(kv, counts);
    free(counts);
}
