/* The prefix tree against a naive one: a list of texts with the time each was last held. An entry
 * holds a number computed from all tokens up to it, as real entries do, so a page in the wrong
 * place is detected. */
#include "fake.h"

#include "kv/prefix.h"

enum { MAX_SEQS = 8, MAX_PAGES = 10, MAX_LEN = MAX_PAGES * SO_KV_PAGE, N_PAGES = 24 };
enum { MAX_NODES = 4 * N_PAGES, N_SYMBOLS = 3 };

/* A text is a list of symbols, one per page. A symbol gives SO_KV_PAGE tokens; only the last ones
 * differ between symbols. */
static int32_t token_of(int symbol, int place) {
    return place < SO_KV_PAGE - 2 ? place : place + 100 * symbol;
}

typedef struct text {
    int symbols[MAX_PAGES];
} text;

typedef struct twin {
    so_seq *seq;
    text t;
    int len;
    int n_shared; /* naive: whole pages held in the tree, … */
    int n_held;   /* … plus one if the sequence was cut within a page of the tree */
} twin;

typedef struct naive_node {
    text t;
    int depth;
    int64_t idle_since;
} naive_node;

typedef struct world {
    fake backend;
    so_kv *kv;
    twin twins[MAX_SEQS];
    int n;
    naive_node nodes[MAX_NODES];
    int n_nodes;
    int64_t clock;
    uint64_t seed;
    uint32_t draws;
    int n_hits, n_evicted, n_full;
} world;

static int draw(world *w, int n) {
    so_rng_key key = {.seed = w->seed, .purpose = SO_RNG_TEST};
    return (int)(so_rng_uniform(&key, w->draws++) * n);
}

static const int32_t *tokens_of(const text *t) {
    static int32_t tokens[MAX_LEN];
    for (int i = 0; i < MAX_LEN; i++)
        tokens[i] = token_of(t->symbols[i / SO_KV_PAGE], i % SO_KV_PAGE);
    return tokens;
}

/* The value that a pass would write for each position. */
static const int64_t *values_of(const text *t) {
    static int64_t values[MAX_LEN];
    uint64_t h = 1;
    const int32_t *tokens = tokens_of(t);
    for (int k = 0; k < MAX_LEN; k++)
        values[k] = (int64_t)(h = (h + (uint64_t)tokens[k] + 7) * 0x100000001B3u);
    return values;
}

static void world_init(world *w, uint64_t seed, int n_pages) {
    so_err err = {0};
    so_kv_shape shape = {2, 3, 8, n_pages, SO_DTYPE_F16};
    memset(w, 0, sizeof *w);
    w->backend.base.vt = &FAKE_VT;
    w->seed = seed;
    SO_OK_OR_FAIL(so_kv_create(&w->backend.base, &shape, &w->kv, &err), err);
    assert_false(so_prefix_enabled(w->kv));
    SO_OK_OR_FAIL(so_prefix_enable(w->kv, &err), err);
    assert_true(so_prefix_enabled(w->kv));
}

static void world_deinit(world *w) {
    while (w->n > 0)
        so_seq_free(w->twins[--w->n].seq);
    so_kv_check(w->kv);
    assert_int_equal(so_kv_available_pages(w->kv), so_kv_get_shape(w->kv)->n_pages);
    so_prefix_clear(w->kv);
    so_kv_check(w->kv);
    assert_int_equal(so_kv_free_pages(w->kv), so_kv_get_shape(w->kv)->n_pages);
    so_kv_free(w->kv);
}

/* --- the naive tree --- */

static bool begins_with(const text *t, const text *with, int depth) {
    return memcmp(t->symbols, with->symbols, (size_t)depth * sizeof t->symbols[0]) == 0;
}

static int naive_find(const world *w, const text *t, int depth) {
    for (int i = 0; i < w->n_nodes; i++)
        if (w->nodes[i].depth == depth && begins_with(t, &w->nodes[i].t, depth))
            return i;
    return -1;
}

static int naive_match(const world *w, const text *t, int max_depth) {
    int depth = 0;
    while (depth < max_depth && naive_find(w, t, depth + 1) >= 0)
        depth++;
    return depth;
}

static bool naive_busy(const world *w, const naive_node *n) {
    for (int i = 0; i < w->n; i++)
        if (w->twins[i].n_held >= n->depth && begins_with(&w->twins[i].t, &n->t, n->depth))
            return true;
    return false;
}

static void naive_shrink(world *w, twin *t, int n_held, int n_shared) {
    while (t->n_held > n_held) {
        int at = naive_find(w, &t->t, t->n_held);
        assert_true(at >= 0);
        naive_node *n = &w->nodes[at];
        t->n_held--;
        if (!naive_busy(w, n))
            n->idle_since = ++w->clock;
    }
    t->n_shared = SO_MIN(t->n_shared, n_shared);
}

static void naive_evict(world *w, int64_t n) {
    for (; n > 0; n--) {
        int oldest = -1;
        for (int i = 0; i < w->n_nodes; i++)
            if (!naive_busy(w, &w->nodes[i]) &&
                (oldest < 0 || w->nodes[i].idle_since < w->nodes[oldest].idle_since))
                oldest = i;
        assert_true(oldest >= 0);
        w->nodes[oldest] = w->nodes[--w->n_nodes];
        w->n_evicted++;
    }
}

/* --- operations on both --- */

static void take(world *w, twin *t, int n) {
    int want = t->len == t->n_shared * SO_KV_PAGE
                   ? SO_MAX(0, naive_match(w, &t->t, n / SO_KV_PAGE) - t->n_shared)
                   : 0;
    assert_int_equal(so_prefix_take(t->seq, tokens_of(&t->t), n), want * SO_KV_PAGE);
    t->n_shared += want;
    t->n_held = SO_MAX(t->n_held, t->n_shared);
    t->len += want * SO_KV_PAGE;
    w->n_hits += want;
}

static void append(world *w, twin *t, int n) {
    so_err err = {0};
    int64_t need = so_seq_pages_needed(t->seq, n), n_free = so_kv_free_pages(w->kv);
    if (so_seq_begin(t->seq, n, &err) != SO_OK) {
        assert_true(need > n_free + so_kv_idle_pages(w->kv));
        w->n_full++;
        return;
    }
    naive_evict(w, SO_MAX(0, need - n_free));
    naive_shrink(w, t, t->len / SO_KV_PAGE, t->len / SO_KV_PAGE);
    const int64_t *values = values_of(&t->t);
    for (int i = t->len; i < t->len + n; i++)
        *fake_entry(w->kv, t->seq, i) = values[i];
    so_seq_commit_chain(t->seq, n);
    t->len += n;
}

static void offer(world *w, twin *t, int n) {
    so_prefix_offer(t->seq, tokens_of(&t->t), n);
    for (; (t->n_shared + 1) * SO_KV_PAGE <= n; t->n_shared++)
        if (naive_find(w, &t->t, t->n_shared + 1) < 0)
            w->nodes[w->n_nodes++] = (naive_node){t->t, t->n_shared + 1, 0};
    t->n_held = SO_MAX(t->n_held, t->n_shared);
}

static void cut(world *w, twin *t, int len) {
    so_seq_truncate_to(t->seq, len);
    naive_shrink(w, t, so_kv_pages_for(len), len / SO_KV_PAGE);
    t->len = len;
}

static void drop(world *w, int i) {
    so_seq_free(w->twins[i].seq);
    naive_shrink(w, &w->twins[i], 0, 0);
    w->twins[i] = w->twins[--w->n];
}

static twin *add(world *w, const text *t) {
    twin *s = &w->twins[w->n++];
    *s = (twin){.seq = so_seq_create(w->kv), .t = *t};
    return s;
}

static text random_text(world *w) {
    text t;
    for (int i = 0; i < MAX_PAGES; i++)
        t.symbols[i] = draw(w, N_SYMBOLS);
    return t;
}

static void check_all(world *w) {
    so_kv_check(w->kv);
    int n_idle = 0, idle;
    for (int i = 0; i < w->n_nodes; i++) {
        const naive_node *n = &w->nodes[i];
        int len = n->depth * SO_KV_PAGE;
        assert_int_equal(so_prefix_match(w->kv, tokens_of(&n->t), len, &idle), len);
        n_idle += !naive_busy(w, n);
    }
    assert_int_equal(so_kv_idle_pages(w->kv), n_idle);
    text t = random_text(w);
    assert_int_equal(so_prefix_match(w->kv, tokens_of(&t), MAX_LEN, &idle),
                     naive_match(w, &t, MAX_PAGES) * SO_KV_PAGE);
    for (int i = 0; i < w->n; i++) {
        const twin *s = &w->twins[i];
        const int64_t *values = values_of(&s->t);
        assert_int_equal(so_seq_len(s->seq), s->len);
        for (int k = 0; k < s->len; k++)
            assert_int_equal(*fake_entry(w->kv, s->seq, k), values[k]);
    }
}

static void random_operation(world *w) {
    int what = draw(w, 12);
    twin *t = w->n > 0 ? &w->twins[draw(w, w->n)] : NULL;
    if (!t || (what == 0 && w->n < MAX_SEQS)) {
        text x = random_text(w);
        t = add(w, &x);
        take(w, t, draw(w, MAX_LEN + 1));
    } else if (what == 1) {
        drop(w, (int)(t - w->twins));
    } else if (what == 2) {
        cut(w, t, draw(w, t->len + 1));
    } else if (what == 3) {
        take(w, t, draw(w, MAX_LEN + 1));
    } else if (what <= 6) {
        offer(w, t, draw(w, 3) ? t->len : draw(w, t->len + 1));
    } else {
        int n = 1 + draw(w, draw(w, 3) ? 2 * SO_KV_PAGE : 8);
        if (t->len + n <= MAX_LEN)
            append(w, t, n);
    }
}

static void random_operations(void **state) {
    (void)state;
    int n_hits = 0, n_evicted = 0, n_full = 0;
    for (uint64_t seed = 1; seed <= 12; seed++) {
        world *w = SO_NEW(world);
        world_init(w, seed, N_PAGES);
        for (int i = 0; i < 1500; i++) {
            random_operation(w);
            check_all(w);
        }
        n_hits += w->n_hits;
        n_evicted += w->n_evicted;
        n_full += w->n_full;
        world_deinit(w);
        free(w);
    }
    assert_true(n_hits > 100 && n_evicted > 100 && n_full > 10);
}

/* --- the statements of prefix.h, one by one --- */

static void hit_is_by_reference(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 8);
    text x = {{0, 1, 2, 0}};
    twin *a = add(&w, &x);
    append(&w, a, 70);
    offer(&w, a, 70); /* two whole pages; the third is not full */
    twin *b = add(&w, &x);
    take(&w, b, 70);
    assert_int_equal(b->len, 64);
    assert_int_equal(so_kv_free_pages(w.kv), 5);
    append(&w, b, 6);
    assert_int_equal(so_kv_free_pages(w.kv), 4);
    assert_int_equal(w.backend.n_copies, 0);
    assert_ptr_equal(fake_entry(w.kv, a->seq, 63), fake_entry(w.kv, b->seq, 63));
    assert_ptr_not_equal(fake_entry(w.kv, a->seq, 64), fake_entry(w.kv, b->seq, 64));
    check_all(&w);
    world_deinit(&w);
}

/* Two sequences computed the same page; one of the two copies is released. */
static void equal_pages_become_one(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 8);
    text x = {{0, 1}};
    twin *a = add(&w, &x), *b = add(&w, &x);
    append(&w, a, 64);
    append(&w, b, 64);
    assert_int_equal(so_kv_free_pages(w.kv), 4);
    offer(&w, a, 64);
    offer(&w, b, 64);
    assert_int_equal(so_kv_free_pages(w.kv), 6);
    assert_ptr_equal(fake_entry(w.kv, a->seq, 0), fake_entry(w.kv, b->seq, 0));
    check_all(&w);
    world_deinit(&w);
}

static void truncation_leaves_the_tree(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 8);
    text x = {{0, 1, 2}};
    twin *a = add(&w, &x);
    append(&w, a, 96);
    offer(&w, a, 96);
    cut(&w, a, 40); /* within the second page */
    int idle;
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&x), 96, &idle), 96);
    assert_int_equal(idle, 1);
    naive_shrink(&w, a, 1, 1); /* the naive tree finds pages by their text, which changes */
    a->t.symbols[1] = 2;       /* after the tokens that all texts have in common */
    append(&w, a, 24);
    assert_int_equal(w.backend.n_copies, 8); /* its own copy of the part it keeps */
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&x), 96, &idle), 96);
    offer(&w, a, 64);
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&a->t), 96, &idle), 64);
    check_all(&w);
    world_deinit(&w);
}

static void longest_idle_goes_first(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 6);
    text x = {{0, 0}}, y = {{1, 1}}, z = {{2, 2, 2}};
    int idle;
    for (int i = 0; i < 2; i++) {
        twin *t = add(&w, i ? &y : &x);
        append(&w, t, 64);
        offer(&w, t, 64);
        drop(&w, 0);
    }
    twin *t = add(&w, &x); /* x is used again: y is now the longest idle */
    take(&w, t, 64);
    drop(&w, 0);
    assert_int_equal(so_kv_free_pages(w.kv), 2);
    t = add(&w, &z);
    append(&w, t, 80);
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&y), 64, &idle), 32); /* last page evicted */
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&x), 64, &idle), 64);
    append(&w, t, 80); /* evicts the first page of y, then the last of x */
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&y), 64, &idle), 0);
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&x), 64, &idle), 32);
    check_all(&w);
    world_deinit(&w);
}

/* Pages held by sequences are never evicted, however many pages are needed. */
static void held_pages_stay(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 4);
    text x = {{0, 0}}, y = {{1, 1, 1}};
    twin *a = add(&w, &x), *b = add(&w, &y);
    so_err err = {0};
    append(&w, a, 64);
    offer(&w, a, 64);
    assert_int_equal(so_seq_begin(b->seq, 65, &err), SO_ELIMIT);
    assert_non_null(strstr(err.msg, "2 of 4 pages are free"));
    append(&w, b, 64);
    check_all(&w);
    world_deinit(&w);
}

/* A page that a fork also holds is not added: the fork may lack the tree's pages before it. */
static void forks_and_the_tree(void **state) {
    (void)state;
    world w;
    world_init(&w, 1, 12);
    text x = {{0, 1, 2}};
    int idle;
    twin *a = add(&w, &x), *b = add(&w, &x);
    append(&w, a, 32);
    offer(&w, a, 32);
    append(&w, b, 64);
    so_seq *f = so_seq_fork(b->seq, 64);
    so_prefix_offer(b->seq, tokens_of(&x), 64); /* takes a's first page; its second is shared */
    so_kv_check(w.kv);
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&x), 64, &idle), 32);
    so_seq_free(f);
    so_prefix_offer(b->seq, tokens_of(&x), 64);
    assert_int_equal(so_prefix_match(w.kv, tokens_of(&x), 64, &idle), 64);
    f = so_seq_fork(b->seq, 50); /* its pages are in the tree: nothing is copied until it writes */
    so_seq_free(a->seq);
    so_seq_free(b->seq);
    so_kv_check(w.kv);
    so_err err = {0};
    SO_OK_OR_FAIL(so_seq_begin(f, 4, &err), err);
    so_seq_abort(f);
    assert_int_equal(w.backend.n_copies, 18);
    so_kv_check(w.kv);
    so_seq_free(f);
    w.n = 0;
    world_deinit(&w);
}

static void slots_share_nothing(void **state) {
    (void)state;
    fake f = {.base.vt = &FAKE_VT};
    so_kv *kv = NULL;
    so_err err = {0};
    so_kv_shape shape = {2, 3, 8, 8, SO_DTYPE_F16};
    SO_OK_OR_FAIL(so_kv_create_slotted(&f.base, &shape, 64, &kv, &err), err);
    assert_int_equal(so_prefix_enable(kv, &err), SO_EUNSUPPORTED);
    so_seq *s = so_seq_create(kv);
    text x = {{0, 1}};
    int idle;
    SO_OK_OR_FAIL(so_seq_begin(s, 64, &err), err);
    so_seq_commit_chain(s, 64);
    so_prefix_offer(s, tokens_of(&x), 64); /* neither has an effect */
    assert_int_equal(so_prefix_match(kv, tokens_of(&x), 64, &idle), 0);
    so_seq_free(s);
    so_kv_free(kv);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_operations),       cmocka_unit_test(hit_is_by_reference),
        cmocka_unit_test(equal_pages_become_one),  cmocka_unit_test(truncation_leaves_the_tree),
        cmocka_unit_test(longest_idle_goes_first), cmocka_unit_test(held_pages_stay),
        cmocka_unit_test(forks_and_the_tree),      cmocka_unit_test(slots_share_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
