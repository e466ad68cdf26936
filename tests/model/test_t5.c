/* Encoder-decoder models: logits against Hugging Face transformers in float32 (tests/golden/models:
 * v1.0 with ReLU and a tied output, v1.1 with gated GELU; texts longer than the bias's distances),
 * row invariance with ==, sources that are shared and replaced, and what is refused. */
#include "so_test.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "kv/prefix.h"
#include "model/source.h"
#include "so_rig.h"

enum { N_SOURCES = 3 };

typedef struct expect {
    int32_t *source, *tokens;
    float *logits;
    int n_source, n, n_vocab;
} expect;

static void *read_tensor(const so_map_file *f, const json_t *head, size_t base, const char *name,
                         size_t *n) {
    const json_t *off = json_object_get(json_object_get(head, name), "data_offsets");
    size_t begin = (size_t)json_integer_value(json_array_get(off, 0));
    size_t end = (size_t)json_integer_value(json_array_get(off, 1));
    assert_true(end > begin && base + end <= f->len);
    void *out = so_alloc(end - begin);
    memcpy(out, f->data + base + begin, end - begin);
    *n = (end - begin) / 4;
    return out;
}

static char *folder_of(const char *name) {
    char sub[64];
    snprintf(sub, sizeof sub, "golden/models/%s", name);
    return so_strdup(so_test_data(sub));
}

static expect read_expect(const char *folder) {
    expect e = {0};
    so_err err = {0};
    so_map_file f;
    char *path = so_path_join(folder, "expect.safetensors");
    SO_OK_OR_FAIL(so_file_map(path, &f, &err), err);
    free(path);
    uint64_t head_len;
    memcpy(&head_len, f.data, sizeof head_len);
    json_t *head = json_loadb((const char *)f.data + 8, (size_t)head_len, 0, NULL);
    size_t base = 8 + (size_t)head_len, n_source, n, n_logits;
    e.source = read_tensor(&f, head, base, "source", &n_source);
    e.tokens = read_tensor(&f, head, base, "tokens", &n);
    e.logits = read_tensor(&f, head, base, "logits", &n_logits);
    e.n_source = (int)n_source;
    e.n = (int)n;
    e.n_vocab = (int)(n_logits / n);
    json_decref(head);
    so_file_unmap(&f);
    return e;
}

static void free_expect(expect *e) {
    free(e->source);
    free(e->tokens);
    free(e->logits);
}

/* A rig and its sources. */
typedef struct rig {
    so_rig r;
    so_sources *sources;
} rig;

static void open_rig(rig *r, const char *folder, const so_rig_opts *o) {
    so_err err = {0};
    so_rig_opts wide = *o;
    wide.max_rows = 256;
    so_rig_open(&r->r, folder, &wide);
    SO_OK_OR_FAIL(so_sources_create(r->r.m, 200, N_SOURCES, o->kv_dtype, &r->sources, &err), err);
}

static void close_rig(rig *r) {
    so_sources_free(r->sources);
    so_rig_close(&r->r);
}

static so_seq *new_seq(rig *r, const int32_t *source, int n) {
    so_err err = {0};
    so_seq *s = so_seq_create(r->r.kv);
    SO_OK_OR_FAIL(so_sources_set(r->sources, s, source, n, &err), err);
    return s;
}

/* ---- golden ---- */

static double distance(const expect *e, const float *got) {
    double worst = 0, largest = 0;
    for (int i = 0; i < e->n * e->n_vocab; i++) {
        worst = fmax(worst, fabs((double)got[i] - (double)e->logits[i]));
        largest = fmax(largest, fabs((double)e->logits[i]));
    }
    return worst / largest;
}

static void check_golden(const char *folder, const expect *e, const so_rig_opts *o) {
    static const int chunks[] = {0, 1, 7};
    float *got = SO_NEW_N(float, e->n * e->n_vocab);
    rig r;
    open_rig(&r, folder, o);
    assert_int_equal(r.r.n_vocab, e->n_vocab);
    for (size_t c = 0; c < SO_LEN(chunks); c++) {
        so_seq *s = new_seq(&r, e->source, e->n_source);
        so_rig_chunks(&r.r, s, e->tokens, e->n, chunks[c], got);
        double d = distance(e, got);
        if (!(d <= 1e-4))
            fail_msg("%s, chunks of %d: distance %g", so_cpu_level_name(o->level), chunks[c], d);
        if (c == 0)
            printf("%s, %s: distance %.2e\n", folder, so_cpu_level_name(o->level), d);
        so_seq_free(s);
    }
    close_rig(&r);
    free(got);
}

static void golden(void **state) {
    char *folder = folder_of(*state);
    expect e = read_expect(folder);
    check_golden(folder, &e, &(so_rig_opts){.level = SO_CPU_SCALAR});
    check_golden(folder, &e, &(so_rig_opts){.level = so_cpu_best_level()});
    check_golden(folder, &e, &(so_rig_opts){.level = so_cpu_best_level(), .deferred = true});
    free_expect(&e);
    free(folder);
}

/* ---- invariance ---- */

enum { N_SHORT = 70 };

/* One row per pass, one thread, scalar. */
static float *simplest(const char *folder, const expect *e, const so_rig_opts *like) {
    so_rig_opts o = *like;
    o.n_threads = 1;
    o.level = SO_CPU_SCALAR;
    o.deferred = false;
    o.run_len = 0;
    rig r;
    open_rig(&r, folder, &o);
    float *out = SO_NEW_N(float, N_SHORT * e->n_vocab);
    so_seq *s = new_seq(&r, e->source, e->n_source);
    so_rig_chunks(&r.r, s, e->tokens, N_SHORT, 1, out);
    so_seq_free(s);
    close_rig(&r);
    return out;
}

static void check_same(const float *a, const float *b, int n, const char *what) {
    for (int i = 0; i < n; i++)
        if (memcmp(&a[i], &b[i], sizeof *a) != 0)
            fail_msg("%s: logit %d is %a, alone %a", what, i, (double)a[i], (double)b[i]);
}

/* Two sequences with different sources in one pass; the first in a tree with branches:
 *   0 … n-1 the chain, row i also has a sibling that is not accepted */
static void check_tree(rig *r, const expect *e, const float *want) {
    enum { FIRST = 40, DEPTH = 12 };
    so_err err = {0};
    so_seq *seqs[2] = {new_seq(r, e->source, e->n_source), new_seq(r, e->source + 5, 60)};
    so_row rows[2 * DEPTH + 9];
    int n = 0, chain[DEPTH];
    so_rig_chunks(&r->r, seqs[0], e->tokens, FIRST, 16, NULL);
    for (int i = 0; i < DEPTH; i++) {
        int parent = i ? chain[i - 1] : -1;
        rows[n++] = (so_row){.token = (e->tokens[FIRST + i] + 1) % e->n_vocab,
                             .pos = FIRST + i,
                             .parent = parent,
                             .want_logits = true};
        chain[i] = n;
        rows[n++] = (so_row){
            .token = e->tokens[FIRST + i], .pos = FIRST + i, .parent = parent, .want_logits = true};
    }
    for (int i = 0; i < 9; i++, n++)
        rows[n] = (so_row){.token = e->tokens[i],
                           .pos = i,
                           .seq = 1,
                           .parent = i ? n - 1 : -1,
                           .want_logits = true};
    SO_OK_OR_FAIL(so_seq_begin(seqs[0], 2 * DEPTH, &err), err);
    SO_OK_OR_FAIL(so_seq_begin(seqs[1], 9, &err), err);
    SO_OK_OR_FAIL(so_pass_run(r->r.p, &(so_batch){rows, n, seqs, 2}, SO_PASS_LOGITS, &err), err);
    for (int i = 0; i < DEPTH; i++)
        check_same(so_pass_logits(r->r.p, chain[i]), want + (FIRST + i) * e->n_vocab, e->n_vocab,
                   "row of a tree");
    so_seq_commit(seqs[0], chain, DEPTH);
    so_seq_abort(seqs[1]);
    float *rest = SO_NEW_N(float, (N_SHORT - FIRST - DEPTH) * e->n_vocab);
    so_rig_chunks(&r->r, seqs[0], e->tokens + FIRST + DEPTH, N_SHORT - FIRST - DEPTH, 0, rest);
    check_same(rest, want + (FIRST + DEPTH) * e->n_vocab, (N_SHORT - FIRST - DEPTH) * e->n_vocab,
               "after a compacted tree");
    free(rest);
    so_seq_free(seqs[0]);
    so_seq_free(seqs[1]);
}

static void check_invariance(const char *folder, const expect *e, const so_rig_opts *o,
                             const float *want) {
    static const int chunks[] = {0, 1, 33};
    float *got = SO_NEW_N(float, N_SHORT * e->n_vocab);
    rig r;
    open_rig(&r, folder, o);
    for (size_t c = 0; c < SO_LEN(chunks); c++) {
        so_seq *s = new_seq(&r, e->source, e->n_source);
        so_rig_chunks(&r.r, s, e->tokens, N_SHORT, chunks[c], got);
        check_same(got, want, N_SHORT * e->n_vocab, so_cpu_level_name(o->level));
        so_seq_free(s);
    }
    check_tree(&r, e, want);
    close_rig(&r);
    free(got);
}

static void invariance(void **state) {
    static const so_dtype dtypes[] = {SO_DTYPE_F32,  SO_DTYPE_F16,  SO_DTYPE_BF16,
                                      SO_DTYPE_Q8_0, SO_DTYPE_Q4_0, SO_DTYPE_Q5_1};
    static const so_dtype caches[] = {SO_DTYPE_F16, SO_DTYPE_F32, SO_DTYPE_Q8_0};
    char *folder = folder_of(*state);
    expect e = read_expect(folder);
    so_cpu_level levels[SO_CPU_LEVELS];
    int n_levels = so_rig_levels(levels);
    for (size_t d = 0; d < SO_LEN(dtypes); d++)
        for (size_t c = 0; c < SO_LEN(caches); c++) {
            so_rig_opts o = {.kv_dtype = caches[c],
                             .model = {.quantize = d > 0, .dtype = dtypes[d]}};
            float *want = simplest(folder, &e, &o);
            for (int l = 0; l < n_levels; l++) {
                o.level = levels[l];
                o.n_threads = 1 + (int)((d + c + (size_t)l) % 4);
                o.deferred = (d + c) % 2;
                o.run_len = (c + (size_t)l) % 2 ? 200 : 0;
                o.model.no_pack = l == 1;
                check_invariance(folder, &e, &o, want);
            }
            free(want);
        }
    free_expect(&e);
    free(folder);
}

/* ---- sources ---- */

static void shared_and_replaced(void **state) {
    (void)state;
    char *folder = folder_of("t5_v11");
    expect e = read_expect(folder);
    rig r;
    so_err err = {0};
    open_rig(&r, folder, &(so_rig_opts){.level = so_cpu_best_level()});
    float *first = SO_NEW_N(float, 20 * e.n_vocab), *again = SO_NEW_N(float, 20 * e.n_vocab);
    so_seq *a = new_seq(&r, e.source, 100), *b = new_seq(&r, e.source, 100);
    so_source *of_a = so_seq_get_source(a);
    assert_ptr_equal(of_a, so_seq_get_source(b));
    assert_int_equal(of_a->n_users, 2);
    so_rig_chunks(&r.r, a, e.tokens, 20, 0, first);
    so_seq *fork = so_seq_fork(a, 5);
    assert_int_equal(of_a->n_users, 3);
    so_rig_chunks(&r.r, fork, e.tokens + 5, 15, 0, again);
    check_same(again, first + 5 * e.n_vocab, 15 * e.n_vocab, "a fork");
    so_seq *c = new_seq(&r, e.source, 99), *d = new_seq(&r, e.source + 1, 99);
    so_seq *extra = so_seq_create(r.r.kv);
    assert_int_equal(so_sources_set(r.sources, extra, e.source, 7, &err), SO_ELIMIT);
    so_seq_free(c);
    so_seq_free(d);
    so_seq_free(fork);
    so_seq_free(b);
    so_seq_clear(a);
    assert_int_equal(of_a->n_users, 0);
    SO_OK_OR_FAIL(so_sources_set(r.sources, extra, e.source, 7, &err),
                  err); /* replaces the oldest */
    so_seq_clear(extra);
    for (int i = 0; i < N_SOURCES; i++) { /* so that the text has to be read again */
        SO_OK_OR_FAIL(so_sources_set(r.sources, extra, e.source + i, 11 + i, &err), err);
        so_seq_clear(extra);
    }
    int64_t serial = of_a->serial;
    SO_OK_OR_FAIL(so_sources_set(r.sources, a, e.source, 100, &err), err);
    assert_true(so_seq_get_source(a)->serial > serial);
    so_rig_chunks(&r.r, a, e.tokens, 20, 3, again);
    check_same(again, first, 20 * e.n_vocab, "a text that was read again");
    so_seq_free(a);
    so_seq_free(extra);
    close_rig(&r);
    free(first);
    free(again);
    free_expect(&e);
    free(folder);
}

/* The same decoder tokens after different sources are different prefixes. */
static void prefixes_by_source(void **state) {
    (void)state;
    char *folder = folder_of("t5_v10");
    expect e = read_expect(folder);
    rig r;
    so_err err = {0};
    open_rig(&r, folder, &(so_rig_opts){.level = so_cpu_best_level()});
    SO_OK_OR_FAIL(so_prefix_enable(r.r.kv, &err), err);
    so_seq *a = new_seq(&r, e.source, 50);
    so_rig_chunks(&r.r, a, e.tokens, 64, 0, NULL);
    so_prefix_offer(a, e.tokens, 64);
    so_seq *other = new_seq(&r, e.source, 51), *same = new_seq(&r, e.source, 50);
    assert_int_equal(so_prefix_take(other, e.tokens, 64), 0);
    assert_int_equal(so_prefix_take(same, e.tokens, 64), 64);
    so_kv_check(r.r.kv);
    float *got = SO_NEW_N(float, e.n_vocab), *want = SO_NEW_N(float, e.n_vocab);
    so_rig_chain(&r.r, same, e.tokens + 64, 1, got);
    so_rig_chain(&r.r, a, e.tokens + 64, 1, want);
    check_same(got, want, e.n_vocab, "after a shared prefix");
    so_seq_free(a);
    so_seq_free(other);
    so_seq_free(same);
    so_kv_check(r.r.kv);
    close_rig(&r);
    free(got);
    free(want);
    free_expect(&e);
    free(folder);
}

static void no_source(void **state) {
    (void)state;
    char *folder = folder_of("t5_v10");
    rig r;
    so_err err = {0};
    open_rig(&r, folder, &(so_rig_opts){0});
    so_seq *s = so_seq_create(r.r.kv);
    so_row row = {.token = 0, .parent = -1};
    SO_OK_OR_FAIL(so_seq_begin(s, 1, &err), err);
    assert_int_equal(so_pass_run(r.r.p, &(so_batch){&row, 1, &s, 1}, 0, &err), SO_EINVAL);
    assert_non_null(strstr(err.msg, "sequence 0 has no source text"));
    so_seq_free(s);
    close_rig(&r);
    free(folder);
}

static void not_on_a_gpu(void **state) {
    (void)state;
    so_test_skip_encoders();
}

int main(void) {
    static char v10[] = "t5_v10", v11[] = "t5_v11";
    const struct CMUnitTest tests[] = {
        {"golden v1.0", golden, NULL, NULL, v10},
        {"golden v1.1", golden, NULL, NULL, v11},
        {"invariance v1.0", invariance, NULL, NULL, v10},
        {"invariance v1.1", invariance, NULL, NULL, v11},
        cmocka_unit_test(shared_and_replaced),
        cmocka_unit_test(prefixes_by_source),
        cmocka_unit_test(no_source),
    };
    const struct CMUnitTest skipped[] = {cmocka_unit_test(not_on_a_gpu)};
    if (so_test_on_gpu())
        return cmocka_run_group_tests_name("t5", skipped, NULL, NULL);
    return cmocka_run_group_tests_name("t5", tests, NULL, NULL);
}
