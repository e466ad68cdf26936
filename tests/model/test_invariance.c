/* Row invariance: the logits of a position have the same bits however they are computed. Every
 * comparison is ==, on every logit, against the simplest computation: one row per pass, one thread,
 * scalar kernels.
 *
 * The default run covers the cross product by pairs in about a minute on two cores;
 * SOOTH_TEST_FULL=1 runs all of it. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "format/convert.h"
#include "so_rig.h"
#include "so_shape.h"

/* Wide enough for blocks of 256; two layers, so that the second reads a cache written by the
 * first. */
static const so_shape WIDE = {.d_model = 256,
                              .n_layers = 2,
                              .n_heads = 4,
                              .n_heads_kv = 1,
                              .head_dim = 64,
                              .d_ff = 256,
                              .n_vocab = 261,
                              .n_ctx = 8192,
                              .seed = 1};
/* Three layers, heads of 128, and rows that are no multiple of 8 units of 64. */
static const so_shape DEEP = {.d_model = 320,
                              .n_layers = 3,
                              .n_heads = 6,
                              .n_heads_kv = 2,
                              .head_dim = 128,
                              .d_ff = 704,
                              .n_vocab = 261,
                              .n_ctx = 8192,
                              .seed = 6};
/* So many outputs that a GPU library built with SO_PERSIST_MIN=0 computes the logits with the persistent
 * kernel, in two groups of tiles and two rounds. */
static const so_shape BROAD = {.d_model = 1024,
                               .n_layers = 1,
                               .n_heads = 4,
                               .n_heads_kv = 2,
                               .head_dim = 64,
                               .d_ff = 512,
                               .n_vocab = 18400,
                               .n_ctx = 1024,
                               .seed = 7};
/* Narrow enough for contexts past 4096; no dimension is a multiple of 16. */
static const so_shape THIN = {.d_model = 36,
                              .n_layers = 1,
                              .n_heads = 2,
                              .n_heads_kv = 1,
                              .head_dim = 18,
                              .d_ff = 40,
                              .n_vocab = 67,
                              .n_ctx = 8192,
                              .seed = 2};
/* The embedding of token 5 is NaN. */
static const so_shape SICK = {.d_model = 40,
                              .n_layers = 2,
                              .n_heads = 3,
                              .n_heads_kv = 1,
                              .head_dim = 20,
                              .d_ff = 44,
                              .n_vocab = 67,
                              .n_ctx = 8192,
                              .nan_token = 5,
                              .seed = 4};
/* The same with heads that the kernels process together, four per cache entry. */
static const so_shape SICK_HEADS = {.d_model = 64,
                                    .n_layers = 2,
                                    .n_heads = 4,
                                    .n_heads_kv = 1,
                                    .head_dim = 16,
                                    .d_ff = 48,
                                    .n_vocab = 67,
                                    .n_ctx = 8192,
                                    .nan_token = 5,
                                    .seed = 5};
static const so_shape WINDOWED = {.d_model = 36,
                                  .n_layers = 2,
                                  .n_heads = 3,
                                  .n_heads_kv = 3,
                                  .head_dim = 12,
                                  .d_ff = 40,
                                  .n_vocab = 67,
                                  .n_ctx = 8192,
                                  .window = 45,
                                  .seed = 3};

static const so_dtype DTYPES[] = {SO_DTYPE_F32,  SO_DTYPE_F16,  SO_DTYPE_BF16, SO_DTYPE_Q8_0,
                                  SO_DTYPE_Q4_0, SO_DTYPE_Q4_1, SO_DTYPE_Q5_0, SO_DTYPE_Q5_1,
                                  SO_DTYPE_Q2_K, SO_DTYPE_Q3_K, SO_DTYPE_Q4_K, SO_DTYPE_Q5_K,
                                  SO_DTYPE_Q6_K};
enum { N_DTYPES = sizeof DTYPES / sizeof DTYPES[0] };
static const so_dtype CACHES[] = {SO_DTYPE_F16, SO_DTYPE_F32, SO_DTYPE_Q8_0, SO_DTYPE_BF16};
static int n_caches = 3; /* 4 where the device has BF16 caches */

static void count_caches(void) {
    so_backend *b = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open(so_test_device(), &(so_backend_opts){.n_threads = 1}, &b, &err),
                  err);
    n_caches += b->vt->kv_bf16;
    so_backend_free(b);
}

static char *g_dir, *g_wide, *g_deep, *g_thin, *g_windowed, *g_sick, *g_sick_heads; /* files */

static char *write_in(const char *sub, const so_shape *t) {
    so_err err = {0};
    char *dir = so_path_join(g_dir, sub);
    SO_OK_OR_FAIL(so_dir_create(dir, &err), err);
    char *path = so_shape_write(dir, t);
    free(dir);
    return path;
}

static int setup(void **state) {
    (void)state;
    count_caches();
    g_dir = so_test_tmp();
    g_wide = write_in("wide", &WIDE);
    g_deep = write_in("deep", &DEEP);
    g_thin = write_in("thin", &THIN);
    g_windowed = write_in("windowed", &WINDOWED);
    g_sick = write_in("sick", &SICK);
    g_sick_heads = write_in("sick_heads", &SICK_HEADS);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    free(g_wide);
    free(g_deep);
    free(g_thin);
    free(g_windowed);
    free(g_sick);
    free(g_sick_heads);
    so_test_tmp_free(g_dir);
    return 0;
}

/* The current case, for messages. */
static char g_case[256];
#define CASE(...) snprintf(g_case, sizeof g_case, __VA_ARGS__)

static void same_row(const float *got, const float *want, int n_vocab, int row) {
    if (memcmp(got, want, (size_t)n_vocab * sizeof *got) == 0)
        return;
    for (int i = 0; i < n_vocab; i++)
        if (memcmp(&got[i], &want[i], sizeof *got) != 0)
            fail_msg("%s: row %d, logit %d is %.9g and not %.9g", g_case, row, i, (double)got[i],
                     (double)want[i]);
}

static void same(const float *got, const float *want, int n_vocab, int n) {
    for (int i = 0; i < n; i++)
        same_row(got + (size_t)i * (size_t)n_vocab, want + (size_t)i * (size_t)n_vocab, n_vocab, i);
}

static so_rig_opts options(so_dtype dtype, so_cpu_level level, int threads, so_dtype kv_dtype) {
    return (so_rig_opts){.n_threads = threads,
                         .level = level,
                         .kv_dtype = kv_dtype,
                         .n_pages = 300,
                         .max_rows = 300,
                         .model = {.quantize = true, .dtype = dtype}};
}

/* The reference: row by row, one thread, scalar. [n][n_vocab], freed by the caller. */
static float *reference(const char *path, so_rig_opts o, const int32_t *tokens, int n) {
    so_rig r;
    o.level = SO_CPU_SCALAR;
    o.n_threads = 1;
    o.deferred = false;
    so_rig_open(&r, path, &o);
    float *ref = SO_NEW_N(float, n *r.n_vocab);
    so_seq *s = so_seq_create(r.kv);
    so_rig_chunks(&r, s, tokens, n, 1, ref);
    so_seq_free(s);
    so_rig_close(&r);
    return ref;
}

static const char *dtype_name(so_dtype t) { return so_dtype_get(t)->name; }

/* Every dtype × width 1 … 64 × CPU level: w rows after a committed prefix, as in a verifying
 * pass. */
static void widths_of(so_dtype dtype, so_cpu_level level, int threads, const float *ref,
                      const int32_t *tokens, bool all) {
    enum { PREFIX = 30, N = PREFIX + 64 };
    so_rig_opts o = options(dtype, level, threads, SO_DTYPE_F16);
    so_rig r;
    so_rig_open(&r, g_wide, &o);
    float *got = SO_NEW_N(float, N *r.n_vocab);
    so_seq *s = so_seq_create(r.kv);
    CASE("%s %s prefix", dtype_name(dtype), so_cpu_level_name(level));
    so_rig_chunks(&r, s, tokens, PREFIX, 0, got);
    same(got, ref, r.n_vocab, PREFIX);
    for (int w = 1; w <= 64; w++) {
        if (!all && w > 9 && w % 16 > 1 && w % 16 < 15)
            continue;
        CASE("%s %s %d threads width %d", dtype_name(dtype), so_cpu_level_name(level), threads, w);
        so_rig_chain(&r, s, tokens + PREFIX, w, got);
        same(got, ref + PREFIX * r.n_vocab, r.n_vocab, w);
        so_seq_truncate_to(s, PREFIX);
    }
    so_seq_free(s);
    so_rig_close(&r);
    free(got);
}

enum { THIN_BY = SO_TEST_SANITIZED ? 3 : 1 };

static void dtypes_and_widths(void **state) {
    (void)state;
    enum { N = 94 };
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels);
    int32_t tokens[N];
    so_shape_tokens(&WIDE, 11, tokens, N);
    for (int d = 0; d < N_DTYPES; d++) {
        so_rig_opts o = options(DTYPES[d], SO_CPU_SCALAR, 1, SO_DTYPE_F16);
        float *ref = reference(g_wide, o, tokens, N);
        for (int l = 0; l < n_levels; l++)
            for (int t = 1; t <= 4; t++)
                if (so_test_full() || (t == 1 + (d + l) % 4 && (d + l) % THIN_BY == 0))
                    widths_of(DTYPES[d], levels[l], t, ref, tokens,
                              so_test_full() || l == n_levels - 1);
        free(ref);
    }
}

/* Prompt chunks × threads × cache type × CPU level × backend. The dtype rotates, unless the full
 * run is asked for. */
static void chunks_of(so_rig_opts o, const int32_t *tokens, int n, const float *ref) {
    const int chunks[] = {1, 7, 64, 0};
    so_rig r;
    so_rig_open(&r, g_wide, &o);
    float *got = SO_NEW_N(float, n *r.n_vocab);
    for (size_t c = 0; c < SO_LEN(chunks); c++) {
        CASE("%s %s %d threads %s cache%s chunks of %d", dtype_name(o.model.dtype),
             so_cpu_level_name(o.level), o.n_threads, dtype_name(o.kv_dtype),
             o.deferred ? " deferred" : "", chunks[c]);
        so_seq *s = so_seq_create(r.kv);
        so_rig_chunks(&r, s, tokens, n, chunks[c], got);
        same(got, ref, r.n_vocab, n);
        so_seq_free(s);
    }
    so_rig_close(&r);
    free(got);
}

static void chunks_and_threads(void **state) {
    (void)state;
    enum { N = 131 };
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels), turn = 0;
    int32_t tokens[N];
    so_shape_tokens(&WIDE, 12, tokens, N);
    for (int d = 0; d < N_DTYPES; d++)
        for (int kv = 0; kv < n_caches; kv++) {
            if (!so_test_full() && kv == 1 + d % 2)
                continue; /* always F16, the others in rotation */
            so_rig_opts o = options(DTYPES[d], SO_CPU_SCALAR, 1, CACHES[kv]);
            float *ref = NULL;
            for (int l = 0; l < n_levels; l++)
                for (int t = 1; t <= 4; t++)
                    for (int deferred = 0; deferred < 2; deferred++) {
                        /* 31 and 95 are coprime to 48: over the dtypes the rotation reaches every
                         * combination */
                        if (!so_test_full() && turn++ % (SO_TEST_SANITIZED ? 95 : 31) != 0)
                            continue;
                        if (!ref)
                            ref = reference(g_wide, o, tokens, N);
                        so_rig_opts with = o;
                        with.level = levels[l];
                        with.n_threads = t;
                        with.deferred = deferred;
                        chunks_of(with, tokens, N, ref);
                    }
            free(ref);
        }
}

/* Trees. */

enum { MAX_NODES = 256 };

typedef struct tree {
    int n;
    int32_t token[MAX_NODES], parent[MAX_NODES], depth[MAX_NODES];
} tree;

typedef struct dice {
    uint64_t seed;
    uint32_t n;
} dice;

static int roll(dice *d, int n) {
    so_rng_key key = {.seed = d->seed, .purpose = SO_RNG_TEST};
    return (int)(so_rng_uniform(&key, d->n++) * n);
}

/* Several roots, chains, wide trees: a parent is any earlier node, more often a late one. */
static void grow_tree(tree *t, int n, dice *d, const so_shape *spec) {
    t->n = n;
    for (int i = 0; i < n; i++) {
        int back = 1 + roll(d, roll(d, 3) ? 3 : i + 1);
        t->parent[i] = i - back < -1 ? -1 : i - back;
        t->depth[i] = t->parent[i] < 0 ? 0 : t->depth[t->parent[i]] + 1;
        do
            t->token[i] = roll(d, spec->n_vocab);
        while (spec->nan_token > 0 && t->token[i] == spec->nan_token);
    }
}

/* Node numbers on the path from the root to `node`; returns their number. */
static int path_to(const tree *t, int node, int32_t *path) {
    int n = t->depth[node] + 1;
    for (int i = n - 1; i >= 0; i--, node = t->parent[node])
        path[i] = node;
    return n;
}

/* Computes each node's logits from its path alone, row by row after a fork of s. */
static void run_paths(so_rig *r, so_seq *s, const tree *t, float *want) {
    bool *leaf = SO_NEW_N(bool, t->n);
    memset(leaf, 1, (size_t)t->n);
    for (int i = 0; i < t->n; i++)
        if (t->parent[i] >= 0)
            leaf[t->parent[i]] = false;
    for (int i = 0; i < t->n; i++) {
        int32_t path[MAX_NODES], token;
        if (!leaf[i])
            continue;
        so_seq *f = so_seq_fork(s, so_seq_len(s));
        int n = path_to(t, i, path);
        for (int k = 0; k < n; k++) {
            token = t->token[path[k]];
            so_rig_chain(r, f, &token, 1, want + path[k] * r->n_vocab);
        }
        so_seq_free(f);
    }
    free(leaf);
}

static void tree_rows(const tree *t, int len, int seq, int first, bool logits, so_row *rows) {
    for (int i = 0; i < t->n; i++)
        rows[i] = (so_row){t->token[i], len + t->depth[i], seq,
                           t->parent[i] < 0 ? -1 : first + t->parent[i], .want_logits = logits};
}

static bool is_sick(const tree *t, int node, const so_shape *spec) {
    bool sick = false;
    for (; node >= 0; node = t->parent[node])
        sick |= spec->nan_token > 0 && t->token[node] == spec->nan_token;
    return sick;
}

/* Computes the tree after s in one pass, left open, and compares it with its paths. Rows that
 * follow a NaN token must fail so_pass_check, and no other row may. */
static void score_tree(so_rig *r, so_seq *s, const tree *t, const so_shape *spec,
                       const float *want) {
    so_row rows[MAX_NODES];
    so_err err = {0};
    SO_OK_OR_FAIL(so_seq_begin(s, t->n, &err), err);
    tree_rows(t, so_seq_len(s), 0, 0, true, rows);
    SO_OK_OR_FAIL(so_pass_run(r->p, &(so_batch){rows, t->n, &s, 1}, SO_PASS_LOGITS, &err), err);
    for (int i = 0; i < t->n; i++) {
        if ((so_pass_check(r->p, i, &err) != SO_OK) != is_sick(t, i, spec))
            fail_msg("%s: row %d: %s", g_case, i, err.msg);
        if (!is_sick(t, i, spec))
            same_row(so_pass_logits(r->p, i), want + i * r->n_vocab, r->n_vocab, i);
    }
}

/* The same for trees of n sequences, computed in several passes that extend the speculations: each
 * pass takes some of the next nodes of each tree, and its rows follow rows of the same pass or slots
 * of earlier ones. Left open. */
enum { MAX_TREES = 3 };
static void score_in_passes(so_rig *r, so_seq *const *seqs, const tree *trees, int n, dice *d,
                            float *const *want) {
    int done[MAX_TREES] = {0}, left = 0;
    so_err err = {0};
    for (int s = 0; s < n; s++)
        left += trees[s].n;
    while (left > 0) {
        so_row rows[MAX_TREES * MAX_NODES];
        so_seq *in[MAX_TREES];
        int owner[MAX_TREES * MAX_NODES], node[MAX_TREES * MAX_NODES], n_rows = 0, n_in = 0;
        for (int s = 0; s < n; s++) {
            const tree *t = &trees[s];
            int k = roll(d, 8), first = n_rows, len = so_seq_len(seqs[s]);
            k = SO_MIN(k, t->n - done[s]);
            if (k == 0)
                continue;
            int rc = done[s] ? so_seq_extend(seqs[s], k, &err) : so_seq_begin(seqs[s], k, &err);
            SO_OK_OR_FAIL(rc, err);
            for (int i = done[s]; i < done[s] + k; i++, n_rows++) {
                int up = t->parent[i];
                owner[n_rows] = s;
                node[n_rows] = i;
                rows[n_rows] = (so_row){.token = t->token[i],
                                        .pos = len + t->depth[i],
                                        .seq = n_in,
                                        .parent = up < 0         ? -1
                                                  : up < done[s] ? so_row_after(len + up)
                                                                 : first + up - done[s],
                                        .want_logits = true};
            }
            done[s] += k;
            left -= k;
            in[n_in++] = seqs[s];
        }
        if (n_rows == 0)
            continue;
        SO_OK_OR_FAIL(so_pass_run(r->p, &(so_batch){rows, n_rows, in, n_in}, SO_PASS_LOGITS, &err),
                      err);
        so_kv_check(r->kv);
        for (int i = 0; i < n_rows; i++)
            same_row(so_pass_logits(r->p, i), want[owner[i]] + node[i] * r->n_vocab, r->n_vocab,
                     node[i]);
    }
}

/* Some nodes get the NaN token, the root rarely. */
static void sicken(tree *t, dice *d, const so_shape *spec) {
    for (int k = 1 + roll(d, 3); k > 0 && spec->nan_token > 0; k--)
        t->token[roll(d, 4) ? t->n - 1 - roll(d, (t->n + 1) / 2) : roll(d, t->n)] = spec->nan_token;
}

/* Rounds of speculation: a random tree is computed in one pass and compared with its paths, a
 * random path is committed (compaction), and the next round starts from the result. At the end the
 * sequence is compared with one that was never speculated on. If the model has a NaN token, some
 * branches contain it, and none of these is committed. */
static void speculate(const char *path, so_rig_opts o, const so_shape *spec, int rounds,
                      int max_nodes) {
    dice d = {.seed = 100 + (uint64_t)o.n_threads + (uint64_t)o.level};
    so_rig r;
    so_rig_open(&r, path, &o);
    int n_vocab = r.n_vocab;
    float *got = SO_NEW_N(float, MAX_NODES *n_vocab), *want = SO_NEW_N(float, MAX_NODES *n_vocab);
    int32_t kept[4096], more[3] = {1, 2, 3};
    int n_kept = 27;
    so_shape_tokens(spec, 13, kept, n_kept);
    so_seq *s = so_seq_create(r.kv);
    so_rig_chunks(&r, s, kept, n_kept, 0, NULL);
    for (int k = 0; k < rounds; k++) {
        tree t;
        grow_tree(&t, 1 + roll(&d, max_nodes), &d, spec);
        sicken(&t, &d, spec);
        CASE("%s %s %s cache%s round %d of %d nodes", path, so_cpu_level_name(o.level),
             dtype_name(o.kv_dtype), o.deferred ? " deferred" : "", k, t.n);
        run_paths(&r, s, &t, want);
        score_tree(&r, s, &t, spec, want);
        int32_t keep[MAX_NODES];
        int n = path_to(&t, roll(&d, t.n), keep);
        while (n > 0 && is_sick(&t, keep[n - 1], spec))
            n--;
        so_seq_commit(s, keep, n);
        so_kv_check(r.kv);
        for (int i = 0; i < n; i++)
            kept[n_kept++] = t.token[keep[i]];
    }
    CASE("%s %s after %d rounds", path, so_cpu_level_name(o.level), rounds);
    so_seq *plain = so_seq_create(r.kv);
    so_rig_chunks(&r, plain, kept, n_kept, 7, NULL);
    so_rig_chain(&r, plain, more, 3, want);
    so_rig_chain(&r, s, more, 3, got);
    same(got, want, n_vocab, 3);
    so_seq_free(plain);
    so_seq_free(s);
    so_rig_close(&r);
    free(got);
    free(want);
}

/* Passes that come again: a GPU replays them, and may compute them by other kernels than the first
 * time. Chains of 1 to 17 rows and random trees, after prefixes of one page to several chunks. */
static void repeat(const char *path, const so_shape *spec, so_rig_opts o, const int *widths,
                   size_t n_widths) {
    enum { N = 420 };
    static const int prefixes[] = {1, 30, 64, 130, 400};
    int times = so_test_full() && strcmp(so_test_device(), "cpu") != 0 ? 100 : 3;
    int32_t tokens[N];
    dice d = {.seed = 17};
    so_rig r;
    so_shape_tokens(spec, 14, tokens, N);
    so_rig_open(&r, path, &o);
    float *ref = SO_NEW_N(float, N *r.n_vocab), *got = SO_NEW_N(float, MAX_NODES *r.n_vocab);
    so_seq *s = so_seq_create(r.kv);
    so_rig_chunks(&r, s, tokens, N, 140, ref);
    for (size_t c = 0; c < SO_LEN(prefixes); c++) {
        int prefix = prefixes[c];
        for (size_t i = 0; i < n_widths; i++)
            for (int k = 0; k < times; k++) {
                CASE("%s %s width %d after %d, time %d", path, dtype_name(o.model.dtype), widths[i],
                     prefix, k);
                so_seq_truncate_to(s, prefix);
                so_rig_chain(&r, s, tokens + prefix, widths[i], got);
                same(got, ref + prefix * r.n_vocab, r.n_vocab, widths[i]);
            }
        so_seq_truncate_to(s, prefix);
        tree t;
        grow_tree(&t, 3 + roll(&d, 14), &d, spec);
        run_paths(&r, s, &t, got);
        for (int k = 0; k < times; k++) {
            CASE("%s %s tree of %d after %d, time %d", path, dtype_name(o.model.dtype), t.n, prefix,
                 k);
            score_tree(&r, s, &t, spec, got);
            so_seq_abort(s);
        }
        so_seq_truncate_to(s, 0);
        so_rig_chunks(&r, s, tokens, N, 140, NULL);
    }
    so_seq_free(s);
    so_rig_close(&r);
    free(ref);
    free(got);
}

/* The model with v, down and the output matrix in Q6_K, the others in Q4_K. */
static char *write_mixed(const char *model) {
    so_err err = {0};
    so_gguf *g;
    so_convert_source src;
    so_recipe recipe;
    so_convert_report report;
    char *path = so_path_join(g_dir, "mixed.gguf");
    SO_OK_OR_FAIL(so_gguf_open(model, &g, &err), err);
    assert_true(so_recipe_parse("Q4_K_M", &recipe));
    so_convert_from_gguf(g, &src);
    SO_OK_OR_FAIL(so_convert(&src, &recipe, path, NULL, &report, &err), err);
    so_convert_report_free(&report);
    so_convert_source_free(&src);
    so_gguf_close(g);
    return path;
}

static void repeated_passes(void **state) {
    (void)state;
    static const so_dtype dtypes[] = {SO_DTYPE_F16,  SO_DTYPE_Q8_0, SO_DTYPE_Q4_0, SO_DTYPE_BF16,
                                      SO_DTYPE_Q4_1, SO_DTYPE_Q6_K, SO_DTYPE_F32};
    static const int widths[] = {1, 2, 3, 5, 8, 9, 12, 16, 17};
    for (size_t i = 0; i < SO_LEN(dtypes); i++) {
        so_rig_opts o = options(dtypes[i], so_cpu_best_level(), 2, SO_DTYPE_F16);
        size_t n = so_test_full() || strcmp(so_test_device(), "cpu") != 0 ? SO_LEN(widths) : 3;
        repeat(g_wide, &WIDE, o, widths, n);
        repeat(g_deep, &DEEP, o, widths, n);
    }
    if (strcmp(so_test_device(), "cpu") == 0)
        return;
    char *broad = write_in("broad", &BROAD);
    so_rig_opts o = options(SO_DTYPE_F16, so_cpu_best_level(), 2, SO_DTYPE_F16);
    repeat(broad, &BROAD, o, widths, SO_LEN(widths));
    char *mixed = write_mixed(broad);
    o.model.quantize = false;
    repeat(mixed, &BROAD, o, widths, SO_LEN(widths));
    free(mixed);
    free(broad);
}

static void trees_and_compaction(void **state) {
    (void)state;
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels), turn = 0;
    for (int l = 0; l < n_levels; l++)
        for (int kv = 0; kv < n_caches; kv++)
            for (int d = 0; d < N_DTYPES; d++) {
                if (!so_test_full() && (d + l + kv) % (4 * THIN_BY) != 0)
                    continue;
                so_rig_opts o = options(DTYPES[d], levels[l], 1 + turn % 4, CACHES[kv]);
                o.deferred = turn++ % 3 == 2;
                speculate(g_wide, o, &WIDE, 6, 24);
                speculate(g_windowed, o, &WINDOWED, 12, 48);
            }
    so_rig_opts o = options(SO_DTYPE_F32, so_cpu_best_level(), 2, SO_DTYPE_F16);
    speculate(g_thin, o, &THIN, 4, MAX_NODES);
}

/* Rounds of speculations that are extended: every node has the bits of its path, in whichever pass it
 * is computed and whichever sequences are in the pass. A random path of each tree is committed; at
 * the end the sequences equal ones that were never speculated on. */
static void extend(const char *path, so_rig_opts o, const so_shape *spec, int rounds,
                   int max_nodes) {
    dice d = {.seed = 400 + (uint64_t)o.n_threads + (uint64_t)o.level};
    so_rig r;
    so_rig_open(&r, path, &o);
    int32_t *kept[MAX_TREES], n_kept[MAX_TREES], more[3] = {1, 2, 3};
    so_seq *seqs[MAX_TREES];
    float *want[MAX_TREES], *got = SO_NEW_N(float, 3 * r.n_vocab);
    for (int s = 0; s < MAX_TREES; s++) {
        kept[s] = SO_NEW_N(int32_t, 4096);
        want[s] = SO_NEW_N(float, MAX_NODES *r.n_vocab);
        n_kept[s] = s * 17; /* the first starts with an empty cache */
        so_shape_tokens(spec, 19 + (uint64_t)s, kept[s], n_kept[s]);
        seqs[s] = so_seq_create(r.kv);
        so_seq_reserve_nodes(seqs[s], MAX_NODES);
        if (n_kept[s] > 0)
            so_rig_chunks(&r, seqs[s], kept[s], n_kept[s], 0, NULL);
    }
    for (int k = 0; k < rounds; k++) {
        tree trees[MAX_TREES];
        int n = 1 + roll(&d, MAX_TREES), first = roll(&d, MAX_TREES - n + 1);
        for (int s = first; s < first + n; s++) {
            grow_tree(&trees[s], 1 + roll(&d, max_nodes), &d, spec);
            run_paths(&r, seqs[s], &trees[s], want[s]);
        }
        CASE("%s %s %s cache%s%s extended, round %d", path, so_cpu_level_name(o.level),
             dtype_name(o.kv_dtype), o.deferred ? " deferred" : "", o.run_len ? " slotted" : "", k);
        score_in_passes(&r, seqs + first, trees + first, n, &d, want + first);
        for (int s = first; s < first + n; s++) {
            int32_t keep[MAX_NODES];
            int n_keep = path_to(&trees[s], roll(&d, trees[s].n), keep);
            so_seq_commit(seqs[s], keep, n_keep);
            for (int i = 0; i < n_keep; i++)
                kept[s][n_kept[s]++] = trees[s].token[keep[i]];
        }
        so_kv_check(r.kv);
    }
    for (int s = 0; s < MAX_TREES; s++) {
        so_seq *plain = so_seq_create(r.kv);
        so_rig_chunks(&r, plain, kept[s], n_kept[s], 7, NULL);
        so_rig_chain(&r, plain, more, 3, want[s]);
        so_rig_chain(&r, seqs[s], more, 3, got);
        same(got, want[s], r.n_vocab, 3);
        so_seq_free(plain);
        so_seq_free(seqs[s]);
        free(want[s]);
        free(kept[s]);
    }
    so_rig_close(&r);
    free(got);
}

static void extended_speculations(void **state) {
    (void)state;
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels), turn = 0;
    for (int l = 0; l < n_levels; l++)
        for (int kv = 0; kv < n_caches; kv++)
            for (int d = 0; d < N_DTYPES; d++) {
                if (!so_test_full() && (d + l + kv) % (6 * THIN_BY) != 0)
                    continue;
                so_rig_opts o = options(DTYPES[d], levels[l], 1 + turn % 4, CACHES[kv]);
                o.deferred = turn % 3 == 2;
                o.run_len = turn % 2 ? 800 : 0;
                turn++;
                extend(g_wide, o, &WIDE, 4, 24);
                extend(g_windowed, o, &WINDOWED, 8, 40);
            }
    for (int slotted = 0; slotted < 2; slotted++) {
        so_rig_opts o = options(SO_DTYPE_F32, so_cpu_best_level(), 2, SO_DTYPE_F16);
        o.run_len = slotted ? 1200 : 0;
        extend(g_thin, o, &THIN, 4, MAX_NODES);
    }
}

/* Every architecture, not only the one that so_shape writes. */
static void trees_of_every_architecture(void **state) {
    (void)state;
    static const char *const names[] = {
        "llama3_rope", "llama_linear_bias", "mistral_window", "qwen2_yarn", "qwen3", "gemma3",
        "gpt2"};
    const so_shape golden = {.n_vocab = 131};
    for (size_t i = 0; i < SO_LEN(names); i++) {
        char folder[4096], sub[64];
        snprintf(sub, sizeof sub, "golden/models/%s", names[i]);
        snprintf(folder, sizeof folder, "%s", so_test_data(sub));
        so_rig_opts o = {.level = so_cpu_best_level(), .n_threads = 2, .deferred = i % 2 == 1};
        o.kv_dtype = CACHES[i % n_caches];
        speculate(folder, o, &golden, 8, 20);
    }
}

/* A guess that gives NaN affects only the rows that follow it, neither other rows of its pass nor
 * later ones through the cache. */
static void sick_branches(void **state) {
    (void)state;
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels);
    for (int l = 0; l < n_levels; l++)
        for (int kv = 0; kv < n_caches; kv++) {
            so_rig_opts o = options(SO_DTYPE_F32, levels[l], 1 + (l + kv) % 4, CACHES[kv]);
            o.model.quantize = false;
            o.deferred = (l + kv) % 3 == 2;
            speculate(g_sick, o, &SICK, 12, 24);
            speculate(g_sick_heads, o, &SICK_HEADS, 12, 48);
        }
}

/* Neighbours: the rows of a sequence among prompt chunks and trees of others, some of them with
 * NaN, interleaved in any order, on pages that still hold NaN from earlier use. */

enum { N_OTHERS = 5, OTHER_ROWS = 20 };

/* Fills every page of the cache with NaN and releases them. */
static void poison(so_rig *r) {
    int32_t tokens[256];
    for (int i = 0; i < 256; i++)
        tokens[i] = SICK.nan_token;
    so_seq *s = so_seq_create(r->kv);
    while (so_kv_free_pages(r->kv) >= 256 / SO_KV_PAGE)
        so_rig_chain(r, s, tokens, 256, NULL);
    so_seq_free(s);
}

/* Interleaves the rows of all sequences at random; each sequence keeps its own order. */
static int interleave(dice *d, const tree *trees, so_seq *const *seqs, int n_seqs, so_row *rows,
                      int32_t *place) {
    int next[1 + N_OTHERS] = {0}, at[1 + N_OTHERS][MAX_NODES], n = 0, left = 0;
    for (int s = 0; s < n_seqs; s++)
        left += trees[s].n;
    while (left > 0) {
        int s = roll(d, n_seqs);
        int i = next[s];
        if (i == trees[s].n)
            continue;
        int parent = trees[s].parent[i];
        rows[n] = (so_row){trees[s].token[i], so_seq_len(seqs[s]) + trees[s].depth[i], s,
                           parent < 0 ? -1 : at[s][parent], .want_logits = s == 0};
        if (s == 0)
            place[i] = n;
        at[s][i] = n++;
        next[s]++;
        left--;
    }
    return n;
}

static void neighbours_of(so_rig_opts o, int rounds) {
    dice d = {.seed = 200 + (uint64_t)o.n_threads};
    so_rig r;
    so_rig_open(&r, g_sick, &o);
    poison(&r);
    int32_t tokens[40], place[MAX_NODES];
    so_shape_tokens(&SICK, 14, tokens, 40);
    so_seq *seqs[1 + N_OTHERS];
    for (int s = 0; s < 1 + N_OTHERS; s++) {
        seqs[s] = so_seq_create(r.kv);
        so_rig_chunks(&r, seqs[s], tokens, s == 0 ? 33 : 1 + roll(&d, 40), 0, NULL);
    }
    float *want = SO_NEW_N(float, MAX_NODES *r.n_vocab);
    for (int k = 0; k < rounds; k++) {
        tree trees[1 + N_OTHERS];
        so_row rows[MAX_NODES];
        so_err err = {0};
        for (int s = 0; s < 1 + N_OTHERS; s++) {
            grow_tree(&trees[s], 1 + roll(&d, OTHER_ROWS), &d, &SICK);
            if (s > 0 && roll(&d, 2)) /* a neighbour with NaN */
                trees[s].token[roll(&d, trees[s].n)] = SICK.nan_token;
        }
        CASE("%s %s %d threads neighbours round %d", so_cpu_level_name(o.level),
             dtype_name(o.kv_dtype), o.n_threads, k);
        run_paths(&r, seqs[0], &trees[0], want);
        for (int s = 0; s < 1 + N_OTHERS; s++)
            SO_OK_OR_FAIL(so_seq_begin(seqs[s], trees[s].n, &err), err);
        int n = interleave(&d, trees, seqs, 1 + N_OTHERS, rows, place);
        so_batch batch = {rows, n, seqs, 1 + N_OTHERS};
        SO_OK_OR_FAIL(so_pass_run(r.p, &batch, SO_PASS_LOGITS, &err), err);
        for (int i = 0; i < trees[0].n; i++)
            same_row(so_pass_logits(r.p, i), want + i * r.n_vocab, r.n_vocab, i);
        for (int s = 0; s < 1 + N_OTHERS; s++)
            so_seq_abort(seqs[s]);
    }
    for (int s = 0; s < 1 + N_OTHERS; s++)
        so_seq_free(seqs[s]);
    so_rig_close(&r);
    free(want);
}

static void neighbours(void **state) {
    (void)state;
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels), turn = 0;
    for (int l = 0; l < n_levels; l++)
        for (int kv = 0; kv < n_caches; kv++)
            for (int t = 1; t <= 4; t++, turn++) {
                so_rig_opts o = options(SO_DTYPE_F32, levels[l], t, CACHES[kv]);
                o.model.quantize = false;
                o.n_pages = 40; /* all of them are filled with NaN first */
                o.deferred = turn % 3 == 1;
                if (so_test_full() || turn % (2 * THIN_BY) == 0)
                    neighbours_of(o, so_test_full() ? 12 : 3);
            }
}

/* NaN from earlier use of a page must not reach a row: compared with a clean cache. */
static void stale_pages(void **state) {
    (void)state;
    enum { N = 70 };
    int32_t tokens[N];
    so_shape_tokens(&SICK, 15, tokens, N);
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels);
    for (int l = 0; l < n_levels; l++)
        for (int kv = 0; kv < n_caches; kv++) {
            so_rig_opts o = options(SO_DTYPE_F32, levels[l], 2, CACHES[kv]);
            o.model.quantize = false;
            o.n_pages = 10;
            float *ref = reference(g_sick, o, tokens, N);
            so_rig r;
            so_rig_open(&r, g_sick, &o);
            float *got = SO_NEW_N(float, N *r.n_vocab);
            poison(&r);
            const int chunks[] = {1, 7, 0};
            for (size_t c = 0; c < SO_LEN(chunks); c++) {
                CASE("%s %s cache stale pages chunks of %d", so_cpu_level_name(levels[l]),
                     dtype_name(o.kv_dtype), chunks[c]);
                so_seq *s = so_seq_create(r.kv);
                so_rig_chunks(&r, s, tokens, N, chunks[c], got);
                same(got, ref, r.n_vocab, N);
                so_seq_free(s);
            }
            so_rig_close(&r);
            free(got);
            free(ref);
        }
}

/* Forks: what a branch writes after the fork must not reach the trunk's page, and both continue as
 * if alone. Branches fork within pages and on page borders, then both grow alternately. */
static void forks_of(so_rig_opts o, const int32_t *trunk, const int32_t *branch,
                     const float *want) {
    enum { N = 80, TURNS = 4 };
    static const int at[] = {1, 31, 32, 33, 50, 63, 64, 65, 79, 80};
    so_rig r;
    so_rig_open(&r, g_thin, &o);
    size_t row = (size_t)r.n_vocab;
    float *alone = SO_NEW_N(float, TURNS *r.n_vocab), *got = SO_NEW_N(float, TURNS *r.n_vocab);
    for (size_t i = 0; i < SO_LEN(at); i++) {
        CASE("%s %s cache%s fork at %d", so_cpu_level_name(o.level), dtype_name(o.kv_dtype),
             o.deferred ? " deferred" : "", at[i]);
        so_seq *plain = so_seq_create(r.kv), *s = so_seq_create(r.kv);
        so_rig_chunks(&r, plain, trunk, at[i], 0, NULL);
        so_rig_chunks(&r, plain, branch, TURNS, 1, alone);
        so_rig_chunks(&r, s, trunk, N, 7, NULL);
        so_seq *f = so_seq_fork(s, at[i]);
        for (int t = 0; t < TURNS; t++) {
            so_rig_chain(&r, f, branch + t, 1, got);
            same_row(got, alone + (size_t)t * row, r.n_vocab, t);
            so_rig_chain(&r, s, trunk + N + t, 1, got);
            same_row(got, want + (size_t)(N + t) * row, r.n_vocab, N + t);
            so_kv_check(r.kv);
        }
        so_seq_free(f);
        so_seq_free(s);
        so_seq_free(plain);
    }
    so_rig_close(&r);
    free(alone);
    free(got);
}

static void forked_pages(void **state) {
    (void)state;
    enum { N = 84 };
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels);
    int32_t trunk[N], branch[4];
    so_shape_tokens(&THIN, 17, trunk, N);
    so_shape_tokens(&THIN, 18, branch, 4);
    for (int kv = 0; kv < n_caches; kv++) {
        so_rig_opts o = options(SO_DTYPE_F32, SO_CPU_SCALAR, 1, CACHES[kv]);
        o.model.quantize = false;
        float *want = reference(g_thin, o, trunk, N);
        for (int l = 0; l < n_levels; l++) {
            o.level = levels[l];
            o.n_threads = 1 + (l + kv) % 4;
            o.deferred = (l + kv) % 2 == 0;
            forks_of(o, trunk, branch, want);
        }
        free(want);
    }
}

/* Contexts around page and block borders, built in chunks, then continued by one row, five rows,
 * and a tree, also from a fork. */
static void borders_of(so_rig_opts o, const char *path, const so_shape *spec, const int32_t *tokens,
                       const float *ref, const int *contexts, int n_contexts) {
    enum { W = 5 };
    so_rig r;
    so_rig_open(&r, path, &o);
    float *got = SO_NEW_N(float, 64 * r.n_vocab), *want = SO_NEW_N(float, 64 * r.n_vocab);
    so_seq *s = so_seq_create(r.kv);
    dice d = {.seed = 300};
    for (int c = 0; c < n_contexts; c++) {
        int ctx = contexts[c];
        CASE("%s %s %s cache context %d", path, so_cpu_level_name(o.level), dtype_name(o.kv_dtype),
             ctx);
        so_seq_truncate_to(s, ctx);
        int have = so_seq_len(s);
        so_rig_chunks(&r, s, tokens + have, ctx - have, 64, NULL);
        for (int w = 1; w <= W; w += W - 1) {
            so_seq *f = so_seq_fork(s, ctx);
            so_rig_chain(&r, f, tokens + ctx, w, got);
            same(got, ref + (size_t)ctx * (size_t)r.n_vocab, r.n_vocab, w);
            so_seq_free(f);
        }
        tree t;
        grow_tree(&t, 12, &d, spec);
        run_paths(&r, s, &t, want);
        score_tree(&r, s, &t, spec, want);
        so_seq_abort(s);
    }
    so_seq_free(s);
    so_rig_close(&r);
    free(got);
    free(want);
}

static void contexts_around_borders(void **state) {
    (void)state;
    enum { N = 4102 };
    static const int contexts[] = {1, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097};
    so_cpu_level levels[8];
    int n_levels = so_rig_levels(levels);
    int32_t *tokens = SO_NEW_N(int32_t, N);
    so_shape_tokens(&THIN, 16, tokens, N);
    for (int kv = 0; kv < n_caches; kv++) {
        if (CACHES[kv] == SO_DTYPE_F32 && !so_test_full())
            continue; /* like F16 except for the loads */
        so_rig_opts o = options(SO_DTYPE_F32, SO_CPU_SCALAR, 1, CACHES[kv]);
        o.model.quantize = false;
        float *ref = reference(g_thin, o, tokens, N);
        for (int l = 0; l < n_levels; l++) {
            o.level = levels[l];
            o.n_threads = 1 + (l + kv) % 4;
            o.deferred = (l + kv) % 2 == 1;
            borders_of(o, g_thin, &THIN, tokens, ref, contexts, (int)SO_LEN(contexts));
        }
        free(ref);
        ref = reference(g_windowed, o, tokens, 270);
        o.level = so_cpu_best_level();
        borders_of(o, g_windowed, &WINDOWED, tokens, ref, contexts, 7);
        free(ref);
    }
    free(tokens);
}

/* Rows after thousands of positions, where a thread block of a GPU visits several chunks for each of its items:
 * chains, trees and several sequences in one pass. Each pass three times: a GPU computes a list of operations that
 * it has seen before with the persistent kernel. */
static void rows_far_back(const char *path, const so_shape *spec, int n_prefix) {
    enum { WIDEST = 20, TIMES = 3 };
    static const int widths[] = {1, 2, 5, 8, 9, 16, 20};
    so_rig_opts o = options(SO_DTYPE_F16, so_cpu_best_level(), 2, SO_DTYPE_F16);
    dice d = {.seed = 500 + (uint64_t)n_prefix};
    so_rig r;
    o.n_pages = so_kv_pages_for(n_prefix) + 64;
    so_rig_open(&r, path, &o);
    int32_t *tokens = SO_NEW_N(int32_t, n_prefix + WIDEST);
    float *want[MAX_TREES], *got = SO_NEW_N(float, WIDEST *r.n_vocab);
    so_shape_tokens(spec, 17, tokens, n_prefix + WIDEST);
    so_seq *s = so_seq_create(r.kv), *seqs[MAX_TREES];
    so_rig_chunks(&r, s, tokens, n_prefix, 256, NULL);
    for (int k = 0; k < MAX_TREES; k++) {
        want[k] = SO_NEW_N(float, MAX_NODES *r.n_vocab);
        seqs[k] = so_seq_fork(s, n_prefix - k * n_prefix / 5);
        so_seq_reserve_nodes(seqs[k], MAX_NODES);
    }
    so_rig_chunks(&r, s, tokens + n_prefix, WIDEST, 1, want[0]);
    for (size_t i = 0; i < SO_LEN(widths) * TIMES; i++) {
        int w = widths[i / TIMES];
        CASE("%s: %d rows after %d, time %d", path, w, n_prefix, (int)i % TIMES);
        so_seq_truncate_to(s, n_prefix);
        so_rig_chain(&r, s, tokens + n_prefix, w, got);
        same(got, want[0], r.n_vocab, w);
    }
    for (int k = 0; k < 6 * TIMES; k++) {
        static tree trees[MAX_TREES];
        for (int i = 0; i < MAX_TREES && k % TIMES == 0; i++) {
            grow_tree(&trees[i], 1 + roll(&d, 6), &d, spec);
            run_paths(&r, seqs[i], &trees[i], want[i]);
        }
        CASE("%s: trees after %d, time %d", path, n_prefix, k);
        score_tree(&r, seqs[0], &trees[0], spec, want[0]);
        so_seq_abort(seqs[0]);
        score_in_passes(&r, seqs, trees, MAX_TREES, &d, want);
        for (int i = 0; i < MAX_TREES; i++)
            so_seq_abort(seqs[i]);
    }
    for (int i = 0; i < MAX_TREES; i++) {
        so_seq_free(seqs[i]);
        free(want[i]);
    }
    so_seq_free(s);
    so_rig_close(&r);
    free(tokens);
    free(got);
}

static void long_contexts(void **state) {
    (void)state;
    bool cpu = strcmp(so_test_device(), "cpu") == 0;
    so_shape shape = DEEP;
    shape.window = 2500; /* begins within a chunk of 64 positions */
    char *windowed = write_in("long_window", &shape);
    if (cpu) { /* no length is special there */
        rows_far_back(windowed, &shape, SO_TEST_SANITIZED ? 300 : 2600);
    } else {
        static const int lengths[] = {2047, 2049, 2176, 4096, 4200, 7000};
        for (size_t i = 0; i < SO_LEN(lengths); i++) {
            rows_far_back(g_deep, &DEEP, lengths[i]);
            rows_far_back(g_wide, &WIDE, lengths[i]);
            rows_far_back(windowed, &shape, lengths[i]);
        }
    }
    free(windowed);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(dtypes_and_widths),
        cmocka_unit_test(chunks_and_threads),
        cmocka_unit_test(repeated_passes),
        cmocka_unit_test(trees_and_compaction),
        cmocka_unit_test(extended_speculations),
        cmocka_unit_test(trees_of_every_architecture),
        cmocka_unit_test(neighbours),
        cmocka_unit_test(stale_pages),
        cmocka_unit_test(forked_pages),
        cmocka_unit_test(contexts_around_borders),
        cmocka_unit_test(long_contexts),
        cmocka_unit_test(sick_branches),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
