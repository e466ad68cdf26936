/* The draft model's own cache: a request that finds no pages gets no draft and does not affect
 * others, a preempted request releases its pages, and pages of a text serve texts with the same
 * prefix. */
#include "so_test.h"

#include <string.h>

#include "base/mem.h"
#include "draft/model.h"
#include "so_rig.h"

enum { N_TEXT = 40, N_JOBS = 3, DEPTH = 4 };

typedef struct fixture {
    so_rig r;
    so_drafter *d;
    so_tree trees[N_JOBS];
    void *states[N_JOBS];
    int32_t texts[N_JOBS][2 * N_TEXT];
} fixture;

static const so_backend_vt *cpu_vt;
static so_backend_vt counting_vt;
static int n_rows; /* rows that the draft computed, in all layers */

static void counting_submit(so_backend *b, const so_op *op) {
    if (op->kind == SO_OP_KV_STORE)
        n_rows += op->n;
    cpu_vt->submit(b, op);
}

/* extra: ids of the target that the draft does not have. */
static void open_drafter_for(fixture *f, int extra, int n_pages, so_kv_layout layout,
                             bool prefixes) {
    so_err err = {0};
    so_rig_open(&f->r, so_test_data("golden/models/llama"),
                &(so_rig_opts){.level = so_cpu_best_level(), .max_rows = 1, .n_pages = 1});
    cpu_vt = f->r.b->vt;
    counting_vt = *cpu_vt;
    counting_vt.submit = counting_submit;
    f->r.b->vt = &counting_vt;
    so_model_drafter_opts o = {.n_vocab = f->r.n_vocab + extra,
                               .n_ctx = 2 * N_TEXT,
                               .n_parallel = N_JOBS,
                               .n_batch = 64,
                               .max_draft = DEPTH,
                               .kv_layout = layout,
                               .n_pages = n_pages,
                               .prefix_cache = prefixes,
                               .temp = -1};
    SO_OK_OR_FAIL(so_model_drafter_create(f->r.m, &o, NULL, &f->d, &err), err);
    for (int i = 0; i < N_JOBS; i++) {
        for (int k = 0; k < 2 * N_TEXT; k++)
            f->texts[i][k] = (k < SO_KV_PAGE ? 3 * k : 5 * k + i) % f->r.n_vocab;
        so_tree_init(&f->trees[i], f->r.n_vocab + extra, extra ? DEPTH : 0);
        so_draft_text text = {.prompt = f->texts[i], .n_prompt = N_TEXT, .max_tokens = 2 * N_TEXT};
        SO_OK_OR_FAIL(f->d->vt->open(f->d, &text, &f->states[i], &err), err);
    }
    n_rows = 0;
}

static void open_drafter(fixture *f, int n_pages, so_kv_layout layout, bool prefixes) {
    open_drafter_for(f, 0, n_pages, layout, prefixes);
}

static void close_drafter(fixture *f) {
    for (int i = 0; i < N_JOBS; i++) {
        f->d->vt->close(f->d, f->states[i]);
        so_tree_deinit(&f->trees[i]);
    }
    so_drafter_free(f->d);
    f->r.b->vt = cpu_vt;
    so_rig_close(&f->r);
}

/* Drafts for requests from … to-1 together; returns how many got a full draft. */
static int propose(fixture *f, int from, int to) {
    so_draft_job jobs[N_JOBS];
    so_err err = {0};
    int n_whole = 0;
    for (int i = from; i < to; i++) {
        so_tree_reset(&f->trees[i], f->texts[i][N_TEXT - 1], N_TEXT - 1);
        jobs[i - from] = (so_draft_job){.state = f->states[i],
                                        .tokens = f->texts[i],
                                        .n_tokens = N_TEXT,
                                        .n_prompt = N_TEXT,
                                        .tree = &f->trees[i],
                                        .max_nodes = DEPTH,
                                        .max_depth = DEPTH};
    }
    SO_OK_OR_FAIL(f->d->vt->propose(f->d, jobs, to - from, &err), err);
    for (int i = from; i < to; i++) {
        int n = f->trees[i].n_nodes - 1;
        assert_true(n == 0 || n == DEPTH);
        n_whole += n == DEPTH;
    }
    return n_whole;
}

/* Two pages each, and five in all: the third gets no draft until another is preempted. */
static void check_shortage(so_kv_layout layout) {
    fixture f;
    open_drafter(&f, layout == SO_KV_PAGED ? 5 : 6, layout, false);
    assert_true(so_drafter_cache_fraction(f.d, N_TEXT) * 3 > 1 - 1e-9);
    assert_int_equal(propose(&f, 0, 3), 2);
    assert_int_equal(f.trees[2].n_nodes, 1);
    assert_int_equal(propose(&f, 2, 3), 0);
    so_drafter_preempt(f.d, f.states[0]);
    assert_int_equal(propose(&f, 2, 3), 1);
    assert_int_equal(propose(&f, 0, 2), 1); /* now the first gets none */
    close_drafter(&f);
}

static void test_shortage(void **state) {
    (void)state;
    check_shortage(SO_KV_PAGED);
}

static void test_shortage_of_slots(void **state) { /* two slots of three pages */
    (void)state;
    check_shortage(SO_KV_SLOTTED);
}

/* The second text starts like the first: its first page is reused; preemption keeps it. */
static void test_prefixes(void **state) {
    (void)state;
    fixture f;
    int layers, cold, warm;
    open_drafter(&f, 0, SO_KV_PAGED, true);
    layers = so_model_hparams(f.r.m)->n_layers;
    assert_int_equal(propose(&f, 0, 1), 1);
    cold = n_rows / layers;
    so_drafter_preempt(f.d, f.states[0]);
    n_rows = 0;
    assert_int_equal(propose(&f, 1, 2), 1);
    warm = n_rows / layers;
    assert_int_equal(cold - warm, SO_KV_PAGE);
    n_rows = 0;
    assert_int_equal(propose(&f, 0, 1), 1); /* its own page is reused, too */
    assert_int_equal(n_rows / layers, warm);
    close_drafter(&f);
}

/* A target with more ids than its draft, as with padded vocabularies: in every sampling mode a
 * guess is a token of the draft, and its row has probability 0 elsewhere. */
/* A tree with two guesses of another drafter, of which n_same are the same as the draft's: no row
 * is computed for a guess that does not fit. */
static void test_full_trees(void **state) {
    (void)state;
    fixture f;
    so_err err = {0};
    open_drafter(&f, 0, SO_KV_PAGED, false);
    int layers = so_model_hparams(f.r.m)->n_layers;
    assert_int_equal(propose(&f, 0, 1), 1);
    so_tree *t = &f.trees[0];
    int32_t own[2] = {t->nodes[1].token, t->nodes[2].token};
    for (int n_same = 0; n_same <= 2; n_same++)
        for (int room = 0; room <= 2; room++) {
            so_tree_reset(t, f.texts[0][N_TEXT - 1], N_TEXT - 1);
            for (int k = 0, node = 0; k < 2; k++)
                node =
                    so_tree_add(t, node, k < n_same ? own[k] : own[k] + 1, SO_Q_POINT, -1, 1, 0.5f);
            so_draft_job job = {.state = f.states[0],
                                .tokens = f.texts[0],
                                .n_tokens = N_TEXT,
                                .n_prompt = N_TEXT,
                                .tree = t,
                                .max_nodes = 2 + room,
                                .max_depth = DEPTH};
            n_rows = 0;
            SO_OK_OR_FAIL(f.d->vt->propose(f.d, &job, 1, &err), err);
            assert_int_equal(t->n_nodes, 3 + room);
            assert_int_equal(job.n_levels, room > 0 ? n_same + room : 0);
            assert_int_equal(n_rows / layers, job.n_levels);
        }
    close_drafter(&f);
}

static void test_fewer_ids_than_the_target(void **state) {
    (void)state;
    enum { EXTRA = 64 };
    const so_bias bias[] = {{3, 1.0f}};
    fixture f;
    so_err err = {0};
    open_drafter_for(&f, EXTRA, 0, SO_KV_PAGED, false);
    for (int mode = 0; mode < 6; mode++) { /* greedy, noise, rows; each with and without a bias */
        so_sample_params p;
        so_tree *t = &f.trees[0];
        so_sample_defaults(&p);
        p.temp = mode / 2 > 0 ? 0.8f : 0;
        p.bias = bias;
        p.n_bias = mode % 2;
        t->max_rows = mode / 2 == 2 ? DEPTH : 0;
        so_tree_reset(t, f.texts[0][N_TEXT - 1], N_TEXT - 1);
        so_draft_job job = {.state = f.states[0],
                            .tokens = f.texts[0],
                            .n_tokens = N_TEXT,
                            .n_prompt = N_TEXT,
                            .tree = t,
                            .max_nodes = DEPTH,
                            .max_depth = DEPTH,
                            .temp = p.temp,
                            .sample = &p};
        SO_OK_OR_FAIL(f.d->vt->propose(f.d, &job, 1, &err), err);
        assert_int_equal(t->n_nodes, DEPTH + 1);
        for (int i = 1; i <= DEPTH; i++)
            assert_in_range(t->nodes[i].token, 0, f.r.n_vocab - 1);
        for (int i = 0; i < t->n_rows; i++)
            for (int k = 0; k < EXTRA; k++)
                assert_true(so_tree_row(t, i)[f.r.n_vocab + k] == 0);
    }
    f.trees[0].max_rows = DEPTH;
    close_drafter(&f);
}

/* `model+model(FILE)`: two drafts add to one tree, and each drafts as long as its own terms say,
 * whatever the other one has drafted. A guess is made while start · chance^depth > price: three
 * guesses from 1, two from 1/2. */
static void test_merged_models(void **state) {
    (void)state;
    static const float starts[][2] = {{1, 1}, {1, 0.5f}, {0.5f, 1}};
    fixture f, g;
    so_err err = {0};
    open_drafter(&f, 0, SO_KV_PAGED, false);
    g = f;
    so_rig_open(&g.r, so_test_data("golden/models/qwen2"),
                &(so_rig_opts){.level = so_cpu_best_level(), .max_rows = 1, .n_pages = 1});
    so_model_drafter_opts o = {.n_vocab = f.r.n_vocab,
                               .n_ctx = 2 * N_TEXT,
                               .n_parallel = 1,
                               .n_batch = 64,
                               .max_draft = 2 * DEPTH,
                               .temp = -1};
    so_draft_text text = {.prompt = f.texts[0], .n_prompt = N_TEXT, .max_tokens = 2 * N_TEXT};
    SO_OK_OR_FAIL(so_model_drafter_create(g.r.m, &o, NULL, &g.d, &err), err);
    SO_OK_OR_FAIL(g.d->vt->open(g.d, &text, &g.states[0], &err), err);
    g.d->index = 1;
    for (size_t i = 0; i < SO_LEN(starts); i++) {
        int n_made[2] = {0};
        so_tree_reset(&f.trees[0], f.texts[0][N_TEXT - 1], N_TEXT - 1);
        for (int k = 0; k < 2; k++) {
            so_draft_terms terms = {.level_price = 0.05f, .start_value = starts[i][k]};
            for (int d = 0; d < SO_TERMS_DEPTHS; d++) {
                terms.row_price[d] = 0.1f;
                for (int l = 0; l <= SO_TERMS_CLASSES; l++)
                    terms.chance[d][l] = 0.6f;
            }
            so_draft_job job = {.state = k ? g.states[0] : f.states[0],
                                .tokens = f.texts[0],
                                .n_tokens = N_TEXT,
                                .n_prompt = N_TEXT,
                                .tree = &f.trees[0],
                                .max_nodes = 4 * DEPTH,
                                .max_depth = 2 * DEPTH,
                                .terms = &terms};
            so_drafter *d = k ? g.d : f.d;
            SO_OK_OR_FAIL(d->vt->propose(d, &job, 1, &err), err);
            assert_int_equal(job.n_levels, starts[i][k] == 1 ? 3 : 2);
        }
        for (int k = 0; k < f.trees[0].n_proposals; k++)
            n_made[f.trees[0].proposals[k].drafter]++;
        for (int k = 0; k < 2; k++)
            assert_int_equal(n_made[k], starts[i][k] == 1 ? 3 : 2);
    }
    g.d->vt->close(g.d, g.states[0]);
    so_drafter_free(g.d);
    so_rig_close(&g.r);
    close_drafter(&f);
}

/* Only a draft with default options is the same in the next run. */
static void test_recorded(void **state) {
    (void)state;
    static const struct {
        uint64_t id;
        float temp, p_min;
        bool recorded;
    } cases[] = {{7, -1, 0, true}, {0, -1, 0, false}, {7, 0.5f, 0, false}, {7, -1, 0.5f, false}};
    so_rig r;
    so_err err = {0};
    so_rig_open(&r, so_test_data("golden/models/llama"),
                &(so_rig_opts){.level = so_cpu_best_level(), .max_rows = 1, .n_pages = 1});
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_model_drafter_opts o = {.n_vocab = r.n_vocab,
                                   .n_ctx = N_TEXT,
                                   .n_parallel = 1,
                                   .n_batch = 8,
                                   .max_draft = DEPTH,
                                   .id = cases[i].id,
                                   .temp = cases[i].temp,
                                   .p_min = cases[i].p_min};
        so_drafter *d = NULL;
        SO_OK_OR_FAIL(so_model_drafter_create(r.m, &o, NULL, &d, &err), err);
        assert_true(d->recorded == cases[i].recorded);
        so_drafter_free(d);
    }
    so_rig_close(&r);
}

/* What an encoder reads is catch-up, once for each request. */
static void sources_are_catch_up(void **state) {
    (void)state;
    enum { N_SOURCE = 9 };
    static fixture f;
    so_err err = {0};
    so_test_skip_encoders();
    so_rig_open(&f.r, so_test_data("golden/models/t5_v11"),
                &(so_rig_opts){.level = so_cpu_best_level(), .max_rows = 1, .n_pages = 1});
    so_model_drafter_opts o = {.n_vocab = f.r.n_vocab,
                               .n_ctx = 2 * N_TEXT,
                               .n_parallel = 1,
                               .n_batch = 64,
                               .max_draft = DEPTH,
                               .encoder = true,
                               .temp = -1};
    int32_t source[N_SOURCE] = {5, 6, 7, 8, 9, 10, 11, 12, 1};
    so_draft_text text = {.prompt = f.texts[0],
                          .n_prompt = 1,
                          .source = source,
                          .n_source = N_SOURCE,
                          .max_tokens = 2 * N_TEXT};
    SO_OK_OR_FAIL(so_model_drafter_create(f.r.m, &o, NULL, &f.d, &err), err);
    SO_OK_OR_FAIL(f.d->vt->open(f.d, &text, &f.states[0], &err), err);
    so_tree_init(&f.trees[0], f.r.n_vocab, 0);
    for (int n = 2; n < 5; n++) {
        so_tree_reset(&f.trees[0], f.texts[0][n - 1], n - 1);
        so_draft_job job = {.state = f.states[0],
                            .tokens = f.texts[0],
                            .n_tokens = n,
                            .n_prompt = 1,
                            .tree = &f.trees[0],
                            .max_nodes = 1,
                            .max_depth = 1};
        SO_OK_OR_FAIL(f.d->vt->propose(f.d, &job, 1, &err), err);
        assert_int_equal(job.n_levels, 1);
        assert_int_equal(job.n_catch_up, n == 2 ? 1 + N_SOURCE : 0);
    }
    f.d->vt->close(f.d, f.states[0]);
    so_tree_deinit(&f.trees[0]);
    so_drafter_free(f.d);
    so_rig_close(&f.r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shortage),        cmocka_unit_test(test_shortage_of_slots),
        cmocka_unit_test(test_prefixes),        cmocka_unit_test(test_full_trees),
        cmocka_unit_test(test_merged_models),   cmocka_unit_test(test_recorded),
        cmocka_unit_test(sources_are_catch_up), cmocka_unit_test(test_fewer_ids_than_the_target)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
