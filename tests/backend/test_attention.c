/* Attention and the KV store through the backend interface: against a naive double-precision
 * reference; trees against their paths run as chains, bit by bit; windows, compaction, stale pages
 * full of NaN; and the same bits at every CPU level with one to four threads. */
#include "so_test.h"

#include <math.h>
#include <stdlib.h>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "base/half.h"
#include "base/mem.h"
#include "base/rng.h"

enum { LAYERS = 2, LAYER = 1, MAX_ROWS = 64 };

typedef struct shape {
    int heads, heads_kv, d;
    so_dtype dtype;
    int window;
    int n_pages; /* per sequence; the store has twice as many, for two sequences */
} shape;

/* A store with two sequences (page tables interleaved and reversed). All entries start as NaN. */
typedef struct scene {
    shape s;
    so_backend *b;
    so_kv_store *store;
    so_buffer *pages, *in_k, *in_v, *slots, *slots2, *rows, *tails, *q, *out;
    int32_t *table; /* [2][n_pages] */
} scene;

static float value_of(uint32_t what, uint32_t i) {
    so_rng_key key = {.seed = what, .purpose = SO_RNG_TEST};
    return (float)((so_rng_uniform(&key, i) - 0.5) * 3);
}

/* Entry e of K (what 1) or V (what 2), as the model computed it: [heads_kv][d] floats. */
static const float *entry(const shape *s, uint32_t what, int e) {
    enum { CELLS = 80000 };
    static float cells[3][CELLS];
    size_t width = (size_t)(s->heads_kv * s->d), at = (size_t)e * width;
    assert_true(at + width <= CELLS);
    if (cells[what][CELLS - 1] == 0)
        for (uint32_t i = 0; i < CELLS; i++)
            cells[what][i] = value_of(what, i);
    return cells[what] + at;
}

static so_buffer *buffer(so_backend *b, size_t n_bytes) {
    so_buffer *buf = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(b->vt->buffer_create(b, n_bytes, &buf, &err), err);
    return buf;
}

static void upload(so_backend *b, so_buffer *buf, const void *src, size_t n_bytes) {
    so_submit(b, &(so_op){.kind = SO_OP_UPLOAD, .n = 1, .upload = {{buf, 0}, src, n_bytes}});
}

static so_kv_slot place(const scene *z, int seq, int slot) {
    return (so_kv_slot){z->table[seq * z->s.n_pages + slot / SO_KV_PAGE], slot % SO_KV_PAGE};
}

static void store_one(scene *z, so_kv_slot slot, const float *k, const float *v) {
    size_t bytes = (size_t)(z->s.heads_kv * z->s.d) * 4;
    upload(z->b, z->in_k, k, bytes);
    upload(z->b, z->in_v, v, bytes);
    upload(z->b, z->slots, &slot, sizeof slot);
    so_submit(z->b, &(so_op){.kind = SO_OP_KV_STORE,
                             .n = 1,
                             .kv_store = {.store = z->store,
                                          .layer = LAYER,
                                          .k = {z->in_k, 0},
                                          .v = {z->in_v, 0},
                                          .slots = {z->slots, 0}}});
}

/* Stores entry e in a slot of a sequence. */
static void put(scene *z, int seq, int slot, int e) {
    store_one(z, place(z, seq, slot), entry(&z->s, 1, e), entry(&z->s, 2, e));
}

static void poison(scene *z) {
    size_t n = (size_t)(z->s.heads_kv * z->s.d);
    float *nan = SO_NEW_N(float, n);
    for (size_t i = 0; i < n; i++)
        nan[i] = NAN;
    for (int page = 0; page < 2 * z->s.n_pages; page++)
        for (int i = 0; i < SO_KV_PAGE; i++)
            store_one(z, (so_kv_slot){page, i}, nan, nan);
    free(nan);
}

static scene scene_create(const shape *s, so_backend *b) {
    scene z = {.s = *s, .b = b};
    so_err err = {0};
    so_kv_shape ks = {.n_layers = LAYERS,
                      .n_heads_kv = s->heads_kv,
                      .head_dim = s->d,
                      .n_pages = 2 * s->n_pages,
                      .dtype = s->dtype};
    SO_OK_OR_FAIL(b->vt->kv_create(b, &ks, &z.store, &err), err);
    size_t entry_bytes = (size_t)(s->heads_kv * s->d) * 4;
    size_t row_bytes = (size_t)(s->heads * s->d) * 4;
    z.in_k = buffer(b, entry_bytes);
    z.in_v = buffer(b, entry_bytes);
    z.slots = buffer(b, MAX_ROWS * sizeof(so_kv_slot));
    z.slots2 = buffer(b, MAX_ROWS * sizeof(so_kv_slot));
    z.rows = buffer(b, MAX_ROWS * sizeof(so_attn_row));
    z.tails = buffer(b, MAX_ROWS * MAX_ROWS * sizeof(int32_t));
    z.q = buffer(b, MAX_ROWS * row_bytes);
    z.out = buffer(b, MAX_ROWS * row_bytes);
    z.table = SO_NEW_N(int32_t, 2 * s->n_pages);
    for (int i = 0; i < 2 * s->n_pages; i++)
        z.table[i] = (i % 2 ? i : 2 * s->n_pages - 2 - i);
    z.pages = buffer(b, 2 * (size_t)s->n_pages * sizeof(int32_t));
    upload(b, z.pages, z.table, 2 * (size_t)s->n_pages * sizeof(int32_t));
    poison(&z);
    return z;
}

static void scene_free(scene *z) {
    so_buffer *all[] = {z->pages, z->in_k,  z->in_v, z->slots, z->slots2,
                        z->rows,  z->tails, z->q,    z->out};
    for (size_t i = 0; i < SO_LEN(all); i++)
        z->b->vt->buffer_free(z->b, all[i]);
    z->b->vt->kv_free(z->b, z->store);
    free(z->table);
}

/* A row's query is a function of a number, so that the same row can be computed twice. */
static void query(const shape *s, int number, float *out) {
    for (int i = 0; i < s->heads * s->d; i++)
        out[i] = value_of(3, (uint32_t)(number * s->heads * s->d + i));
}

static float scale_of(const shape *s) { return 1.0f / sqrtf((float)s->d); }

/* out[n][heads·d] */
static void attend(scene *z, const so_attn_row *rows, const int *numbers, int n,
                   const int32_t *tails, int n_tails, float *out) {
    size_t width = (size_t)(z->s.heads * z->s.d);
    float *q = SO_NEW_N(float, width *(size_t)n);
    for (int i = 0; i < n; i++)
        query(&z->s, numbers[i], q + (size_t)i * width);
    upload(z->b, z->q, q, width * (size_t)n * 4);
    upload(z->b, z->rows, rows, (size_t)n * sizeof *rows);
    if (n_tails)
        upload(z->b, z->tails, tails, (size_t)n_tails * sizeof *tails);
    so_submit(z->b, &(so_op){.kind = SO_OP_ATTENTION,
                             .n = n,
                             .attention = {.store = z->store,
                                           .layer = LAYER,
                                           .n_heads = z->s.heads,
                                           .out = {z->out, 0},
                                           .q = {z->q, 0},
                                           .rows = {z->rows, 0},
                                           .pages = {z->pages, 0},
                                           .tails = {n_tails ? z->tails : NULL, 0},
                                           .scale = scale_of(&z->s),
                                           .window = z->s.window}});
    so_submit(z->b, &(so_op){.kind = SO_OP_DOWNLOAD,
                             .n = n,
                             .download = {{z->out, 0}, out, width * (size_t)n * 4}});
    so_err err = {0};
    SO_OK_OR_FAIL(z->b->vt->sync(z->b, &err), err);
    free(q);
}

/* A head as rounded in a Q8_0 cache (half) or as a query for one: blocks of 32,
 * the last one shorter. */
static void round_q8(const float *x, int d, bool half, double *out) {
    for (int e = 0; e < d; e += 32) {
        float max = 0;
        int n = SO_MIN(32, d - e);
        for (int i = e; i < e + n; i++)
            max = fmaxf(max, fabsf(x[i]));
        float scale = max / 127.0f, inverse = 127.0f / max;
        if (half) {
            scale = so_f16_to_f32(so_f32_to_f16(scale));
            inverse = 1.0f / scale;
        }
        for (int i = e; i < e + n; i++)
            out[i] =
                max > 0 ? fmin(127, fmax(-127, nearbyint((double)(x[i] * inverse)))) * (double)scale
                        : 0;
    }
}

/* A head of an entry as rounded in the cache. */
static void round_entry(const shape *s, const float *x, double *out) {
    if (s->dtype == SO_DTYPE_Q8_0)
        round_q8(x, s->d, true, out);
    for (int i = 0; i < s->d && s->dtype != SO_DTYPE_Q8_0; i++)
        out[i] = s->dtype == SO_DTYPE_F16 ? so_f16_to_f32(so_f32_to_f16(x[i])) : x[i];
}

static void round_query(const shape *s, const float *x, double *out) {
    float scaled[128] = {0};
    for (int i = 0; i < s->d; i++)
        scaled[i] = x[i] * scale_of(s), out[i] = scaled[i];
    if (s->dtype == SO_DTYPE_Q8_0)
        round_q8(scaled, s->d, false, out);
}

/* One head of the expected output of the row at position pos, which sees begin … pos. */
static void reference_head(const shape *s, const float *q, int kv_off, int begin, int pos,
                           const int *entries, double *out) {
    double x[128], kv[128], max = -INFINITY, sum = 0, *score = SO_NEW_N(double, pos + 1);
    round_query(s, q, x);
    for (int p = begin; p <= pos; p++) {
        round_entry(s, entry(s, 1, entries[p]) + kv_off, kv);
        score[p] = 0;
        for (int i = 0; i < s->d; i++)
            score[p] += x[i] * kv[i];
        max = fmax(max, score[p]);
    }
    for (int i = 0; i < s->d; i++)
        out[i] = 0;
    for (int p = begin; p <= pos; p++) {
        double w = exp(score[p] - max);
        sum += w;
        round_entry(s, entry(s, 2, entries[p]) + kv_off, kv);
        for (int i = 0; i < s->d; i++)
            out[i] += w * kv[i];
    }
    for (int i = 0; i < s->d; i++)
        out[i] /= sum;
    free(score);
}

/* The expected output of the row at position pos; entries[p] is the entry at position p. */
static void reference(const shape *s, int number, int pos, const int *entries, double *out) {
    float *q = SO_NEW_N(float, s->heads * s->d);
    int begin = s->window && pos >= s->window ? pos - s->window + 1 : 0;
    query(s, number, q);
    for (int h = 0; h < s->heads; h++)
        reference_head(s, q + h * s->d, h / (s->heads / s->heads_kv) * s->d, begin, pos, entries,
                       out + h * s->d);
    free(q);
}

static void assert_close(const shape *s, int pos, const float *got, const double *want) {
    for (int i = 0; i < s->heads * s->d; i++)
        if (!(fabs((double)got[i] - want[i]) <= 4e-6))
            fail_msg("heads %d/%d d %d %s window %d pos %d: element %d is %.8g, not %.8g", s->heads,
                     s->heads_kv, s->d, so_dtype_get((int)s->dtype)->name, s->window, pos, i,
                     (double)got[i], want[i]);
}

static void assert_same(const char *what, const float *got, const float *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (so_f32_bits(got[i]) != so_f32_bits(want[i]))
            fail_msg("%s: element %zu is %.9g, not %.9g", what, i, (double)got[i], (double)want[i]);
}

static so_backend *cpu(int n_threads, so_cpu_level level) {
    so_backend *b = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open("cpu", &(so_backend_opts){.n_threads = n_threads, .level = level},
                                  &b, &err),
                  err);
    return b;
}

static const shape shapes[] = {
    {4, 2, 16, SO_DTYPE_F16, 0, 4},  {4, 2, 16, SO_DTYPE_F32, 0, 4},
    {3, 1, 7, SO_DTYPE_F16, 0, 4},   {2, 2, 33, SO_DTYPE_F32, 20, 4},
    {2, 1, 64, SO_DTYPE_F16, 33, 4}, {2, 1, 64, SO_DTYPE_F16, 32, 4},
    {1, 1, 1, SO_DTYPE_F16, 1, 4},   {9, 3, 80, SO_DTYPE_F16, 64, 4},
};

/* Heads that are whole blocks of 32, and heads that are not. */
static const shape shapes_q8[] = {
    {4, 2, 32, SO_DTYPE_Q8_0, 0, 4},  {3, 1, 7, SO_DTYPE_Q8_0, 0, 4},
    {2, 1, 64, SO_DTYPE_Q8_0, 33, 4}, {1, 1, 1, SO_DTYPE_Q8_0, 1, 4},
    {9, 3, 80, SO_DTYPE_Q8_0, 64, 4}, {2, 2, 128, SO_DTYPE_Q8_0, 0, 4},
};

/* ---- a chain ---- */

static void chain_at(so_backend *b, const shape *s, const int *contexts, size_t n) {
    scene z = scene_create(s, b);
    int most = contexts[n - 1];
    int *entries = SO_NEW_N(int, most);
    float *got = SO_NEW_N(float, s->heads * s->d);
    double *want = SO_NEW_N(double, s->heads * s->d);
    for (int i = 0; i < most; i++)
        entries[i] = i;
    int filled = 0;
    for (size_t c = 0; c < n; c++) {
        while (filled < contexts[c])
            put(&z, 1, filled, filled), filled++;
        int pos = contexts[c] - 1;
        so_attn_row row = {pos, pos + 1, s->n_pages, 0};
        attend(&z, &row, &pos, 1, NULL, 0, got);
        reference(s, pos, pos, entries, want);
        assert_close(s, pos, got, want);
    }
    free(entries);
    free(got);
    free(want);
    scene_free(&z);
}

static void chains(void **state) {
    (void)state;
    static const int contexts[] = {1, 2, 16, 31, 32, 33, 63, 64, 65, 100};
    so_backend *b = cpu(1, SO_CPU_SCALAR);
    for (size_t i = 0; i < SO_LEN(shapes); i++)
        chain_at(b, &shapes[i], contexts, SO_LEN(contexts));
    for (size_t i = 0; i < SO_LEN(shapes_q8); i++)
        chain_at(b, &shapes_q8[i], contexts, SO_LEN(contexts));
    so_backend_free(b);
}

static void long_chains(void **state) {
    (void)state;
    static const int contexts[] = {255, 256, 257, 4095, 4096, 4097};
    so_backend *b = cpu(2, SO_CPU_AUTO);
    shape s = {2, 1, 8, SO_DTYPE_F16, 0, 130};
    chain_at(b, &s, contexts, SO_LEN(contexts));
    s.window = 1000, s.dtype = SO_DTYPE_F32;
    chain_at(b, &s, contexts, SO_LEN(contexts));
    s.window = 0, s.dtype = SO_DTYPE_Q8_0;
    chain_at(b, &s, contexts, SO_LEN(contexts));
    so_backend_free(b);
}

/* ---- trees, levels, thread counts, compaction ---- */

/* A tree of nodes after `prefix` positions, node i in slot prefix + i of sequence 0:
 *
 *   0 ─┬─ 1 ─── 3 ─── 6 ─── 7 …       (a long branch that crosses a page border)
 *      └─ 2 ─┬─ 4
 *            └─ 5 */
enum { NODES = 40 };
static int parent_of(int node) {
    static const int first[] = {-1, 0, 0, 1, 2, 2, 3};
    return node < (int)SO_LEN(first) ? first[node] : node - 1;
}

/* Entry of a node; entries below `prefix` belong to the prefix. */
static int node_entry(int prefix, int node) { return prefix + node; }

typedef struct tree {
    so_attn_row rows[NODES];
    int32_t tails[NODES * NODES];
    int numbers[NODES], n_tails;
} tree;

static int path_to(int node, int *path) {
    int n = 0;
    for (int i = node; i >= 0; i = parent_of(i))
        n++;
    for (int i = node, at = n; i >= 0; i = parent_of(i))
        path[--at] = i;
    return n;
}

static void tree_build(tree *t, int prefix) {
    t->n_tails = 0;
    for (int i = 0; i < NODES; i++) {
        int path[NODES], n = path_to(i, path);
        t->rows[i] = (so_attn_row){prefix + n - 1, prefix, 0, t->n_tails};
        t->numbers[i] = i;
        for (int j = 0; j < n; j++)
            t->tails[t->n_tails++] = prefix + path[j];
    }
}

/* Computes all nodes of the tree into out[NODES][…]. */
static void tree_run(scene *z, const tree *t, int prefix, float *out) {
    for (int i = 0; i < prefix; i++)
        put(z, 0, i, i);
    for (int i = 0; i < NODES; i++)
        put(z, 0, prefix + i, node_entry(prefix, i));
    attend(z, t->rows, t->numbers, NODES, t->tails, t->n_tails, out);
}

static void check_paths(scene *z, int prefix, const float *all) {
    size_t width = (size_t)(z->s.heads * z->s.d);
    float *got = SO_NEW_N(float, width);
    double *want = SO_NEW_N(double, width);
    int entries[1200];
    for (int i = 0; i < prefix; i++)
        put(z, 1, i, i), entries[i] = i;
    for (int node = 0; node < NODES; node++) {
        int path[NODES], n = path_to(node, path);
        for (int j = 0; j < n; j++) {
            entries[prefix + j] = node_entry(prefix, path[j]);
            put(z, 1, prefix + j, entries[prefix + j]);
        }
        so_attn_row row = {prefix + n - 1, prefix + n, z->s.n_pages, 0};
        attend(z, &row, &node, 1, NULL, 0, got);
        assert_same("a path as a chain", got, all + (size_t)node * width, width);
        reference(&z->s, node, prefix + n - 1, entries, want);
        assert_close(&z->s, prefix + n - 1, got, want);
    }
    free(got);
    free(want);
}

/* Moves the accepted path into place: slot prefix + path[j] → prefix + j, ascending. */
static void check_compaction(scene *z, int prefix, const float *all) {
    size_t width = (size_t)(z->s.heads * z->s.d);
    int path[NODES], last = NODES - 1, n = path_to(last, path);
    so_kv_slot from[NODES], to[NODES];
    float *got = SO_NEW_N(float, width);
    for (int j = 0; j < n; j++) {
        from[j] = place(z, 0, prefix + path[j]);
        to[j] = place(z, 0, prefix + j);
    }
    upload(z->b, z->slots, from, (size_t)n * sizeof from[0]);
    upload(z->b, z->slots2, to, (size_t)n * sizeof to[0]);
    so_submit(z->b, &(so_op){.kind = SO_OP_KV_COPY,
                             .n = n,
                             .kv_copy = {z->store, {z->slots, 0}, {z->slots2, 0}}});
    so_attn_row row = {prefix + n - 1, prefix + n, 0, 0};
    attend(z, &row, &last, 1, NULL, 0, got);
    assert_same("after compaction", got, all + (size_t)last * width, width);
    free(got);
}

static void check_alone(scene *z, const tree *t, const float *all) {
    size_t width = (size_t)(z->s.heads * z->s.d);
    float *got = SO_NEW_N(float, width);
    for (int node = 0; node < NODES; node++) {
        attend(z, &t->rows[node], &node, 1, t->tails, t->n_tails, got);
        assert_same("a row alone", got, all + (size_t)node * width, width);
    }
    free(got);
}

static void tree_on(so_backend *b, const shape *s, int prefix, float *out) {
    scene z = scene_create(s, b);
    tree t;
    tree_build(&t, prefix);
    tree_run(&z, &t, prefix, out);
    check_alone(&z, &t, out);
    check_paths(&z, prefix, out);
    check_compaction(&z, prefix, out);
    scene_free(&z);
}

/* A tree after each prefix: 2 to 4 threads at every level give the same bits as the scalar kernels.
 * Returns a hash of these bits. */
static uint64_t levels_agree(const shape *s, const int *prefixes, size_t n_prefixes, int team) {
    uint64_t hash = 0;
    for (size_t p = 0; p < n_prefixes; p++) {
        size_t n = (size_t)(NODES * s->heads * s->d);
        float *want = SO_NEW_N(float, n), *got = SO_NEW_N(float, n);
        so_backend *scalar = cpu(1, SO_CPU_SCALAR);
        tree_on(scalar, s, prefixes[p], want);
        hash = hash * 31 + so_hash_bytes(want, n * sizeof(float));
        for (int level = SO_CPU_SCALAR; level < SO_CPU_LEVELS; level++) {
            if (!so_cpu_level_usable((so_cpu_level)level))
                continue;
            so_backend *b = cpu(2 + (team + (int)p) % 3, (so_cpu_level)level);
            tree_on(b, s, prefixes[p], got);
            assert_same(so_cpu_level_name((so_cpu_level)level), got, want, n);
            so_backend_free(b);
        }
        so_backend_free(scalar);
        free(want);
        free(got);
    }
    return hash;
}

static void trees(void **state) {
    (void)state;
    static const int prefixes[2][3] = {{0, 31, 33}, {1, 32, 50}};
    uint64_t hash = 0;
    for (size_t i = 0; i < SO_LEN(shapes); i++)
        hash = hash * 31 + levels_agree(&shapes[i], prefixes[i % 2], 3, (int)i);
    /* The same on every machine and compiler. Only a change of the arithmetic contract may change
     * it (the last one: scores as one chain, chunks of 128). */
    if (hash != 0xca0b8225a040ff71u)
        fail_msg("the hash is %#llx", (unsigned long long)hash);
}

static void trees_q8(void **state) {
    (void)state;
    static const int prefixes[2][3] = {{0, 31, 33}, {1, 32, 50}};
    uint64_t hash = 0;
    for (size_t i = 0; i < SO_LEN(shapes_q8); i++)
        hash = hash * 31 + levels_agree(&shapes_q8[i], prefixes[i % 2], 3, (int)i);
    if (hash != 0x31d45fee441308c0u) /* as above */
        fail_msg("the hash is %#llx", (unsigned long long)hash);
}

/* Trees across the border of a chunk. */
static void chunks(void **state) {
    (void)state;
    static const shape wide[] = {{9, 3, 64, SO_DTYPE_F16, 0, 10},
                                 {2, 1, 80, SO_DTYPE_F32, 150, 10},
                                 {4, 4, 23, SO_DTYPE_F16, 0, 10},
                                 {9, 3, 64, SO_DTYPE_Q8_0, 0, 10},
                                 {4, 2, 40, SO_DTYPE_Q8_0, 150, 10}};
    static const int prefixes[] = {SO_ATTN_CHUNK - 3, 2 * SO_ATTN_CHUNK - 6};
    for (size_t i = 0; i < SO_LEN(wide); i++)
        levels_agree(&wide[i], prefixes, SO_LEN(prefixes), (int)i);
}

/* Contexts so long that units are split at chunks: some units stay whole, the others are split. */
static void long_trees(void **state) {
    (void)state;
    static const shape long_shapes[] = {{3, 3, 8, SO_DTYPE_F16, 0, 37},
                                        {6, 3, 8, SO_DTYPE_Q8_0, 0, 37}};
    static const int prefix = 1100;
    for (size_t i = 0; i < SO_LEN(long_shapes); i++)
        levels_agree(&long_shapes[i], &prefix, 1, (int)i);
}

static void bad_stores(void **state) {
    (void)state;
    so_backend *b = cpu(1, SO_CPU_SCALAR);
    so_kv_store *store = NULL;
    so_err err = {0};
    so_kv_shape s = {1, 1, 64, 1, SO_DTYPE_Q4_0};
    assert_int_equal(b->vt->kv_create(b, &s, &store, &err), SO_ERANGE);
    s = (so_kv_shape){60000, 60000, 1024, INT32_MAX, SO_DTYPE_F16};
    assert_int_equal(b->vt->kv_create(b, &s, &store, &err), SO_ENOMEM);
    assert_non_null(strstr(err.msg, "bytes"));
    s = (so_kv_shape){1, 1, 4096, 1, SO_DTYPE_F16};
    assert_int_equal(b->vt->kv_create(b, &s, &store, &err), SO_ERANGE);
    assert_null(store);
    so_backend_free(b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chains),     cmocka_unit_test(long_chains), cmocka_unit_test(trees),
        cmocka_unit_test(trees_q8),   cmocka_unit_test(chunks),      cmocka_unit_test(long_trees),
        cmocka_unit_test(bad_stores),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
