/* The KV cache against a trivially correct model: a list of values per sequence. Tests that apply
 * to both layouts run on both. */
#include "fake.h"

/* A sequence and its expected content. */

enum { MAX_SEQS = 12, MAX_LEN = 300, N_PAGES = 16, MAX_NODES = 90 };
typedef struct twin {
    so_seq *seq;
    int64_t want[MAX_LEN + MAX_NODES];
    int len;
} twin;
typedef struct world {
    fake backend;
    so_kv *kv;
    twin twins[MAX_SEQS];
    int n;
    int64_t next_value;
    uint32_t draws;
    uint64_t seed;
    int n_full; /* begins and extensions refused for lack of pages or slots */
    int n_extended;
    int n_kept;  /* calls of so_seq_keep that left nodes open */
    int n_total; /* pages that sequences can take */
} world;

static int draw(world *w, int n) { /* 0 … n-1 */
    so_rng_key key = {.seed = w->seed, .purpose = SO_RNG_TEST};
    return (int)(so_rng_uniform(&key, w->draws++) * n);
}

static int64_t *slot_entry(world *w, so_seq *s, int slot) { return fake_entry(w->kv, s, slot); }

static void check_all(world *w) {
    so_kv_check(w->kv);
    for (int i = 0; i < w->n; i++) {
        twin *t = &w->twins[i];
        assert_int_equal(so_seq_len(t->seq), t->len);
        for (int k = 0; k < t->len; k++)
            assert_int_equal(*slot_entry(w, t->seq, k), t->want[k]);
    }
}

/* slot_len 0: paged layout. */
static void world_init_as(world *w, uint64_t seed, int n_pages, int slot_len) {
    memset(w, 0, sizeof *w);
    w->backend.base.vt = &FAKE_VT;
    w->seed = seed;
    so_err err = {0};
    so_kv_shape shape = {2, 3, 8, n_pages, SO_DTYPE_F16};
    int rc = slot_len ? so_kv_create_slotted(&w->backend.base, &shape, slot_len, &w->kv, &err)
                      : so_kv_create(&w->backend.base, &shape, &w->kv, &err);
    SO_OK_OR_FAIL(rc, err);
    w->n_total = so_kv_free_pages(w->kv);
    assert_int_equal(so_kv_get_layout(w->kv), slot_len ? SO_KV_SLOTTED : SO_KV_PAGED);
}

static void world_init(world *w, uint64_t seed, int n_pages) { world_init_as(w, seed, n_pages, 0); }

static twin *world_add(world *w) {
    twin *t = &w->twins[w->n++];
    t->seq = so_seq_create(w->kv);
    t->len = 0;
    return t;
}

static void world_drop(world *w, int i) {
    so_seq_free(w->twins[i].seq);
    w->twins[i] = w->twins[--w->n];
}

static void world_deinit(world *w) {
    while (w->n > 0)
        world_drop(w, w->n - 1);
    so_kv_check(w->kv);
    assert_int_equal(so_kv_free_pages(w->kv), w->n_total);
    so_kv_free(w->kv);
}

/* Begins a speculation of n nodes, or extends the open one, and writes them as a forward pass would.
 * False: refused, nothing has changed. */
static bool reserve(world *w, twin *t, int n, int64_t *written) {
    so_err err = {0};
    int before = so_kv_free_pages(w->kv), open = so_seq_open_nodes(t->seq);
    int64_t need = so_seq_pages_needed(t->seq, n), max = so_seq_max_nodes(t->seq, before);
    int rc = open ? so_seq_extend(t->seq, n, &err) : so_seq_begin(t->seq, n, &err);
    if (rc != 0) {
        assert_int_equal(err.code, SO_ELIMIT);
        assert_int_equal(so_kv_free_pages(w->kv), before);
        assert_int_equal(so_seq_open_nodes(t->seq), open);
        assert_true(n > max);
        w->n_full++;
        return false;
    }
    assert_true(n <= max);
    assert_int_equal(before - so_kv_free_pages(w->kv), need);
    assert_int_equal(so_seq_open_nodes(t->seq), open + n);
    assert_int_equal(so_seq_next_slot(t->seq), t->len + open);
    assert_int_equal(so_seq_next_nodes(t->seq), n);
    so_kv_check(w->kv);
    for (int k = open; k < open + n; k++) {
        int parent = t->len + draw(w, k + 1) - 1; /* any earlier node, or the committed positions */
        so_seq_set_parent(t->seq, t->len + k, parent);
        assert_int_equal(so_seq_parent(t->seq, t->len + k), parent);
        *slot_entry(w, t->seq, t->len + k) = written[k] = ++w->next_value;
    }
    so_kv_check(w->kv);
    return true;
}

/* Keeps a random part of the n open nodes, with their parents: first a path, which is committed,
 * then random nodes below its end. Returns the number of nodes that are open then. */
static int keep_some(world *w, twin *t, int n, int64_t *written) {
    int32_t nodes[MAX_NODES];
    int parents[MAX_NODES], place[MAX_NODES], end = -1, n_path = 0, n_kept = 0;
    for (int k = 0; k < n; k++) {
        parents[k] = so_seq_parent(t->seq, t->len + k) - t->len;
        place[k] = -1;
        if (parents[k] == end && n_kept == n_path && draw(w, 3) > 0) {
            end = k;
            n_path++;
        } else if (parents[k] != end && (parents[k] < 0 || place[parents[k]] < n_path)) {
            continue;
        } else if (draw(w, 2)) {
            continue;
        }
        place[k] = n_kept;
        nodes[n_kept++] = k;
    }
    so_seq_keep(t->seq, nodes, n_kept, n_path);
    for (int i = 0; i < n_kept; i++) {
        int before = parents[nodes[i]];
        written[i] = written[nodes[i]];
        if (i < n_path)
            t->want[t->len + i] = written[i];
        else
            assert_int_equal(so_seq_parent(t->seq, t->len + i),
                             t->len + (before < 0 ? -1 : place[before]));
    }
    t->len += n_path;
    memmove(written, written + n_path, (size_t)(n_kept - n_path) * sizeof *written);
    assert_int_equal(so_seq_len(t->seq), t->len);
    assert_int_equal(so_seq_open_nodes(t->seq), n_kept - n_path);
    for (int i = 0; i < n_kept - n_path; i++)
        assert_int_equal(*slot_entry(w, t->seq, t->len + i), written[i]);
    so_kv_check(w->kv);
    w->n_kept += n_kept - n_path > 0;
    return n_kept - n_path;
}

/* One speculation of n nodes, reserved in one or several parts, committed along a random path. What
 * was written before a refused extension can still be committed. */
static void speculate(world *w, twin *t, int n) {
    int64_t written[MAX_NODES];
    int first = draw(w, 2) ? n : 1 + draw(w, n);
    so_seq_reserve_nodes(t->seq, MAX_NODES);
    if (!reserve(w, t, first, written))
        return;
    while (first < n) {
        int more = 1 + draw(w, n - first);
        if (draw(w, 3) == 0 && t->len + first <= MAX_LEN)
            first = keep_some(w, t, first, written);
        if (!reserve(w, t, more, written))
            break;
        w->n_extended++;
        first += more;
    }
    n = first;
    int kind = draw(w, 4), n_path = 0;
    int32_t path[MAX_NODES];
    for (int k = 0; k < n; k++)
        if (kind != 0 && (kind == 1 || draw(w, 3) == 0))
            path[n_path++] = k;
    if (kind == 0)
        so_seq_abort(t->seq);
    else if (kind == 1 && draw(w, 2))
        so_seq_commit_chain(t->seq, n_path);
    else
        so_seq_commit(t->seq, path, n_path);
    for (int k = 0; k < n_path; k++)
        t->want[t->len++] = written[path[k]];
    assert_int_equal(so_seq_open_nodes(t->seq), 0);
}

static void fork_random(world *w) {
    twin *from = &w->twins[draw(w, w->n)], *t = &w->twins[w->n];
    t->len = draw(w, from->len + 1);
    t->seq = so_seq_fork(from->seq, t->len);
    if (!t->seq) { /* no free slot */
        assert_int_equal(so_kv_free_pages(w->kv), 0);
        w->n_full++;
        return;
    }
    memcpy(t->want, from->want, sizeof t->want);
    w->n++;
}

static void random_operation(world *w) {
    int what = draw(w, 20);
    if (w->n == 0 || (what == 0 && w->n < MAX_SEQS)) {
        world_add(w);
    } else if (what <= 2 && w->n < MAX_SEQS) {
        fork_random(w);
    } else if (what <= 3) {
        world_drop(w, draw(w, w->n));
    } else if (what <= 5) {
        twin *t = &w->twins[draw(w, w->n)];
        int to = draw(w, t->len + 40);
        so_seq_truncate_to(t->seq, to);
        t->len = SO_MIN(t->len, to);
    } else {
        twin *t = &w->twins[draw(w, w->n)];
        int n = 1 + draw(w, draw(w, 4) ? 8 : MAX_NODES);
        if (t->len + n <= MAX_LEN)
            speculate(w, t, n);
    }
}

static void check_random_operations(int slot_len) {
    int n_full = 0, n_copies = 0, n_extended = 0, n_kept = 0;
    for (uint64_t seed = 1; seed <= 20; seed++) {
        world *w = SO_NEW(world);
        world_init_as(w, seed, N_PAGES, slot_len);
        for (int i = 0; i < 4000; i++) {
            random_operation(w);
            check_all(w);
        }
        n_full += w->n_full;
        n_copies += w->backend.n_copies;
        n_extended += w->n_extended;
        n_kept += w->n_kept;
        world_deinit(w);
        free(w);
    }
    /* the random walk must have covered these cases */
    assert_true(n_full > 10);
    assert_true(n_copies > 1000);
    assert_true(n_extended > 1000);
    assert_true(n_kept > 1000);
}

static void random_operations(void **state) {
    (void)state;
    check_random_operations(0);
}

static void random_operations_slotted(void **state) {
    (void)state;
    check_random_operations(100); /* four slots of four pages */
}

static void append(world *w, twin *t, int n) {
    so_err err = {0};
    SO_OK_OR_FAIL(so_seq_begin(t->seq, n, &err), err);
    for (int k = 0; k < n; k++)
        t->want[t->len + k] = *slot_entry(w, t->seq, t->len + k) = ++w->next_value;
    so_seq_commit_chain(t->seq, n);
    t->len += n;
}

/* The pages of a slot are neighbours, regardless of other sequences; shrinking only changes a
 * number. */
static void slots_are_contiguous(void **state) {
    (void)state;
    world w;
    world_init_as(&w, 1, 14, 130); /* two slots of five pages; four pages are unused */
    twin *a = world_add(&w), *b = world_add(&w), *c = world_add(&w);
    assert_int_equal(so_kv_free_pages(w.kv), 10); /* no pages are taken before the first begin */
    for (int i = 0; i < 13; i++) {
        append(&w, a, 10);
        append(&w, b, 9);
    }
    assert_int_equal(so_kv_free_pages(w.kv), 0);
    for (int i = 0; i < 130; i++)
        assert_ptr_equal(slot_entry(&w, a->seq, i), slot_entry(&w, a->seq, 0) + i);
    int64_t *first = slot_entry(&w, a->seq, 0), kept = *slot_entry(&w, a->seq, 100);
    so_seq_truncate_to(a->seq, 40);
    a->len = 40;
    assert_int_equal(so_kv_free_pages(w.kv), 0);
    assert_ptr_equal(slot_entry(&w, a->seq, 0), first);
    assert_int_equal(first[100], kept); /* not written to */
    so_err err = {0};
    assert_int_equal(so_seq_begin(c->seq, 1, &err), SO_ELIMIT);
    assert_non_null(strstr(err.msg, "all 2 page runs"));
    assert_int_equal(so_seq_begin(a->seq, 121, &err), SO_ELIMIT); /* the slot has 160 positions */
    assert_non_null(strstr(err.msg, "121 more positions after 40"));
    append(&w, a, 120);
    assert_int_equal(w.backend.n_copies, 0);
    check_all(&w);
    world_deinit(&w);
}

static void slots_fork_by_copy(void **state) {
    (void)state;
    world w;
    world_init_as(&w, 1, 9, 96);
    twin *a = world_add(&w);
    append(&w, a, 70);
    for (int i = 0; i < 2; i++) {
        twin *f = &w.twins[w.n++];
        *f = *a;
        f->len = 50;
        f->seq = so_seq_fork(a->seq, 50);
        assert_int_equal(w.backend.n_copies, 50 * (i + 1));
        append(&w, f, 30);
        check_all(&w);
    }
    assert_null(so_seq_fork(a->seq, 50)); /* there are three slots */
    so_seq *empty = so_seq_fork(a->seq, 0);
    assert_non_null(empty);
    so_seq_free(empty);
    check_all(&w);
    world_deinit(&w);
}

static void chain_moves_nothing(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 8);
    twin *t = world_add(&w);
    append(&w, t, 70);
    assert_int_equal(so_kv_free_pages(w.kv), 5);
    so_err err = {0};
    SO_OK_OR_FAIL(so_seq_begin(t->seq, 40, &err), err);
    assert_int_equal(so_kv_free_pages(w.kv), 4);
    so_seq_commit(t->seq, (int32_t[]){0, 1, 2}, 3);
    assert_int_equal(w.backend.n_copy_ops, 0);
    assert_int_equal(so_kv_free_pages(w.kv), 5);
    t->len += 3;
    so_kv_check(w.kv);
    world_deinit(&w);
}

static void truncate_frees_page_at_border(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 8);
    twin *t = world_add(&w);
    append(&w, t, 65);
    assert_int_equal(so_kv_free_pages(w.kv), 5);
    so_seq_truncate_to(t->seq, 64); /* page 2 starts exactly at 64 */
    assert_int_equal(so_kv_free_pages(w.kv), 6);
    so_seq_truncate_to(t->seq, 1000); /* never extends */
    assert_int_equal(so_seq_len(t->seq), 64);
    t->len = 64;
    check_all(&w);
    world_deinit(&w);
}

static void fork_copies_on_write(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 8);
    twin *a = world_add(&w);
    append(&w, a, 70);
    twin *b = &w.twins[w.n++];
    *b = *a;
    b->len = 50;
    b->seq = so_seq_fork(a->seq, 50);
    assert_int_equal(so_kv_free_pages(w.kv), 5); /* shared until written */
    append(&w, b, 3);
    assert_int_equal(w.backend.n_copies, 18);
    assert_int_equal(so_kv_free_pages(w.kv), 4);
    append(&w, a, 3); /* only a holds its page 9 again: nothing is copied */
    assert_int_equal(w.backend.n_copies, 18);
    check_all(&w);
    /* a fork at a page border shares whole pages and never copies */
    twin *c = &w.twins[w.n++];
    *c = *a;
    c->len = 64;
    c->seq = so_seq_fork(a->seq, 64);
    append(&w, c, 3);
    assert_int_equal(w.backend.n_copies, 18);
    check_all(&w);
    world_deinit(&w);
}

static void full_changes_nothing(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 3);
    twin *a = world_add(&w);
    append(&w, a, 40);
    so_seq *b = so_seq_fork(a->seq, 40);
    so_err err = {0};
    /* one page is free; b needs it for its copy of the last page and one more for position 64 */
    assert_int_equal(so_seq_begin(b, 25, &err), SO_ELIMIT);
    assert_non_null(strstr(err.msg, "25 more positions after 40 need 2 pages"));
    assert_int_equal(so_seq_open_nodes(b), 0);
    so_kv_check(w.kv);
    assert_int_equal(so_seq_begin(b, INT32_MAX, &err), SO_ELIMIT);
    SO_OK_OR_FAIL(so_seq_begin(b, 24, &err), err);
    so_seq_free(b); /* aborts the open speculation */
    check_all(&w);
    world_deinit(&w);
}

/* An extension is as atomic as begin: what was reserved before stays open and can be committed. */
static void extension_is_refused_whole(void **state) {
    (void)state;
    for (int slotted = 0; slotted < 2; slotted++) {
        world w;
        int64_t written[MAX_NODES];
        world_init_as(&w, 1, 3, slotted ? 96 : 0);
        twin *t = world_add(&w);
        append(&w, t, 40);
        so_seq_reserve_nodes(t->seq, MAX_NODES);
        assert_true(reserve(&w, t, 30, written));
        assert_int_equal(so_seq_max_nodes(t->seq, so_kv_free_pages(w.kv)), 26);
        assert_false(reserve(&w, t, 27, written));
        so_err err = {0};
        assert_int_equal(so_seq_extend(t->seq, 27, &err), SO_ELIMIT);
        assert_non_null(strstr(err.msg, "27 more positions after 70"));
        assert_true(reserve(&w, t, 26, written));
        so_seq_commit(t->seq, (int32_t[]){3, 29, 30, 55}, 4);
        const int kept[] = {3, 29, 30, 55};
        for (int k = 0; k < 4; k++)
            t->want[t->len++] = written[kept[k]];
        check_all(&w);
        world_deinit(&w);
    }
}

static void long_paths_go_out_in_order(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 40);
    twin *t = world_add(&w);
    append(&w, t, 5);
    so_err err = {0};
    enum { N = 900 };
    SO_OK_OR_FAIL(so_seq_begin(t->seq, N, &err), err);
    int64_t first = w.next_value + 1;
    for (int k = 0; k < N; k++)
        *slot_entry(&w, t->seq, 5 + k) = ++w.next_value;
    int32_t path[N];
    for (int k = 0; k < N - 1; k++)
        path[k] = k + 1;
    so_seq_commit(t->seq, path, N - 1);
    assert_int_equal(w.backend.n_copies, N - 1);
    assert_true(w.backend.n_copy_ops > 1);
    for (int k = 0; k < N - 1; k++)
        assert_int_equal(*slot_entry(&w, t->seq, 5 + k), first + k + 1);
    t->len = 5; /* positions from 5 on were checked here */
    so_seq_truncate_to(t->seq, 5);
    check_all(&w);
    world_deinit(&w);
}

static void bad_shapes(void **state) {
    (void)state;
    fake f = {.base.vt = &FAKE_VT};
    so_kv *kv = NULL;
    so_err err = {0};
    so_kv_shape good = {2, 3, 8, 4, SO_DTYPE_F16}, s;
    s = good, s.dtype = SO_DTYPE_Q4_0;
    assert_int_equal(so_kv_create(&f.base, &s, &kv, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "F16, F32 and Q8_0"));
    s = good, s.dtype = SO_DTYPE_BF16;
    assert_int_equal(so_kv_create(&f.base, &s, &kv, &err), SO_EUNSUPPORTED);
    s = good, s.n_heads_kv = 0;
    assert_int_equal(so_kv_create(&f.base, &s, &kv, &err), SO_EINVAL);
    s = good, s.n_pages = 0;
    assert_int_equal(so_kv_create(&f.base, &s, &kv, &err), SO_ERANGE);
    s = good, s.n_pages = INT32_MAX / 2;
    assert_int_equal(so_kv_create(&f.base, &s, &kv, &err), SO_ERANGE);
    s = good, s.n_layers = 666; /* the backend has no memory */
    assert_int_equal(so_kv_create(&f.base, &s, &kv, &err), SO_ENOMEM);
    assert_int_equal(so_kv_create_slotted(&f.base, &good, 129, &kv, &err), SO_ERANGE);
    assert_int_equal(so_kv_create_slotted(&f.base, &good, 0, &kv, &err), SO_ERANGE);
    assert_int_equal(so_kv_create_slotted(&f.base, &good, INT32_MAX, &kv, &err), SO_ERANGE);
    assert_null(kv);
    so_kv_free(NULL);
}

/* Known sizes: Llama-3.2-1B and 3B in F16. */
static void bytes_per_token(void **state) {
    (void)state;
    assert_int_equal(so_kv_bytes_per_token(&(so_kv_shape){16, 8, 64, 1, SO_DTYPE_F16}), 32768);
    assert_int_equal(so_kv_bytes_per_token(&(so_kv_shape){28, 8, 128, 1, SO_DTYPE_F16}), 114688);
    assert_int_equal(so_kv_bytes_per_token(&(so_kv_shape){16, 8, 64, 1, SO_DTYPE_F32}), 65536);
    assert_int_equal(so_kv_bytes_per_token(&(so_kv_shape){16, 8, 64, 1, SO_DTYPE_Q8_0}), 17408);
    /* the last block of a head is stored whole */
    assert_int_equal(so_kv_bytes_per_token(&(so_kv_shape){1, 1, 80, 1, SO_DTYPE_Q8_0}), 2 * 3 * 34);
    assert_int_equal(so_kv_pages_for(0), 0);
    assert_int_equal(so_kv_pages_for(32), 1);
    assert_int_equal(so_kv_pages_for(33), 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations),
        cmocka_unit_test(random_operations_slotted),
        cmocka_unit_test(slots_are_contiguous),
        cmocka_unit_test(slots_fork_by_copy),
        cmocka_unit_test(chain_moves_nothing),
        cmocka_unit_test(truncate_frees_page_at_border),
        cmocka_unit_test(fork_copies_on_write),
        cmocka_unit_test(full_changes_nothing),
        cmocka_unit_test(extension_is_refused_whole),
        cmocka_unit_test(long_paths_go_out_in_order),
        cmocka_unit_test(bad_shapes),
        cmocka_unit_test(bytes_per_token),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
