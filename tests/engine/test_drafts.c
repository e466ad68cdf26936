/* Each drafter in the engine, in the situation it is made for: a test fails if its drafter makes no
 * guesses or is never right. Perfect drafts at every length. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "draft/table.h"
#include "engine/engine.h"
#include "so_cases.h"

enum { N_PREDICT = SO_CASE_PREDICT, LENGTH = 5 };

typedef struct fixture {
    so_rig target, draft; /* the same model twice, so that the draft's passes can be counted */
    so_case cases[SO_CASES];
} fixture;

/* --- counting passes --- */

static const so_backend_vt *cpu_vt;
static so_backend_vt counting_vt;
static int n_passes, n_rows; /* of the draft model */

static int counting_sync(so_backend *b, so_err *err) {
    n_passes++;
    return cpu_vt->sync(b, err);
}

static void counting_submit(so_backend *b, const so_op *op) {
    n_rows += op->kind == SO_OP_KV_STORE && op->kv_store.layer == 0 ? op->n : 0;
    cpu_vt->submit(b, op);
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_case_open(&f->target, "llama", &f->draft, "llama", f->cases);
    cpu_vt = f->draft.b->vt;
    counting_vt = *cpu_vt;
    counting_vt.sync = counting_sync;
    counting_vt.submit = counting_submit;
    f->draft.b->vt = &counting_vt;
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    f->draft.b->vt = cpu_vt;
    so_rig_close(&f->target);
    so_rig_close(&f->draft);
    free(f);
    return 0;
}

static so_engine *open_engine(const fixture *f, int n_parallel) {
    return so_case_engine(&f->target, &(so_case_engine_opts){.draft = &f->draft,
                                                             .n_parallel = n_parallel,
                                                             .n_batch = 64,
                                                             .draft_temp = -1});
}

/* Runs one case, checks its text, and returns its statistics. */
static so_request_stats run_case(so_engine *e, const so_case *c, const char *drafter, int length) {
    so_request *r = so_case_submit(e, c, &(so_spec_opts){.drafter = drafter, .length = length});
    so_case_run(e);
    if (!so_case_same(r, c))
        fail_msg("%s, length %d: not the plain text", drafter, length);
    so_request_stats s = *so_request_get_stats(r);
    so_request_free(r);
    return s;
}

/* --- perfect drafts --- */

/* All guesses are accepted at every depth and length, for greedy, match and reject. */
static void test_target_as_its_own_draft_at_every_length(void **state) {
    fixture *f = *state;
    for (int length = 1; length <= 16; length++)
        for (int c = 0; c < SO_CASES; c++) { /* odd cases are greedy */
            so_case_perfect(&f->target, &f->draft, &f->cases[c], SO_VERIFY_MATCH, "model", length);
            so_case_perfect(&f->target, &f->draft, &f->cases[c], SO_VERIFY_REJECT, "model", length);
        }
    so_case_perfect(&f->target, &f->draft, &f->cases[2], SO_VERIFY_REJECT, "model(ngram)", 4);
    so_case_perfect(&f->target, &f->draft, &f->cases[1], SO_VERIFY_MATCH, "model(lookup)", 4);
}

static void test_predicted_text_at_every_length(void **state) {
    fixture *f = *state;
    for (int length = 1; length <= 16; length++)
        for (int c = 0; c < SO_CASES; c++)
            so_case_perfect(&f->target, &f->draft, &f->cases[c], SO_VERIFY_MATCH, "predict",
                            length);
}

/* --- an inner drafter --- */

/* If the inner drafter predicts the draft's samples, one pass of the draft model gives the whole
 * chain. If it is always wrong, it saves no passes. Neither changes a token. (Without one, a greedy
 * chain on a remote backend is one pass.) */
static void test_hierarchical_saves_passes(void **state) {
    fixture *f = *state;
    for (int c = 0; c < SO_CASES; c++) {
        static const char *const specs[] = {"model", "model(predict)", "model(oracle(0))"};
        int passes[SO_LEN(specs)], rounds[SO_LEN(specs)];
        bool together = cpu_vt->remote && so_sample_is_argmax(&f->cases[c].sample);
        for (size_t k = 0; k < SO_LEN(specs); k++) {
            so_engine *e = open_engine(f, 1);
            n_passes = 0;
            rounds[k] = run_case(e, &f->cases[c], specs[k], LENGTH).rounds;
            passes[k] = n_passes;
            so_engine_free(e);
        }
        assert_int_equal(rounds[0], N_PREDICT / (LENGTH + 1));
        assert_int_equal(rounds[1], rounds[0]);
        assert_int_equal(rounds[2], rounds[0]);
        assert_int_equal(passes[0], (together ? 1 : LENGTH) * rounds[0]);
        assert_int_equal(passes[1], rounds[0]);
        assert_int_equal(passes[2], LENGTH * rounds[0]);
    }
}

/* --- simulated acceptance --- */

typedef struct draft_work {
    so_request_stats s;
    int passes, rows; /* of the draft model */
} draft_work;

static draft_work work_of(const so_rig *target, const so_rig *draft, const so_case *c,
                          const char *spec) {
    draft_work w;
    so_engine *e = so_case_engine(
        target,
        &(so_case_engine_opts){.draft = draft, .n_parallel = 1, .n_batch = 64, .draft_temp = -1});
    n_passes = n_rows = 0;
    w.s = run_case(e, c, spec, LENGTH);
    w.passes = n_passes;
    w.rows = n_rows;
    so_engine_free(e);
    return w;
}

/* oracle(P,model) makes the passes and computes the rows of a draft model whose guesses are accepted
 * with probability P, although its own guesses are other ones. At 1 these are the passes and rows
 * of a perfect draft. At 0 every round feeds the correction, then all guesses but the last. */
static void check_cost(const fixture *f, const so_rig *other, const so_case *k) {
    bool together = counting_vt.remote && so_sample_is_argmax(&k->sample);
    draft_work perfect = work_of(&f->target, &f->draft, k, "model");
    draft_work all = work_of(&f->target, other, k, "oracle(1,model)");
    draft_work none = work_of(&f->target, other, k, "oracle(0,model)");
    draft_work some = work_of(&f->target, other, k, "oracle(0.5,model)");
    assert_int_equal(all.s.rounds, perfect.s.rounds);
    assert_int_equal(all.passes, perfect.passes);
    assert_int_equal(all.rows, perfect.rows);
    assert_int_equal(none.s.draft_n_accepted, 0);
    assert_int_equal(none.s.rounds, N_PREDICT);
    assert_int_equal(none.passes, together ? none.s.drafted_rounds : none.s.draft_n);
    assert_int_equal(none.rows, k->n_prompt - 1 + none.s.draft_n);
    /* A draft that is accepted whole leaves its last guess to be fed, if a draft follows. */
    int n_whole = some.s.per_depth[LENGTH - 1].accepted;
    int more = some.rows - (k->n_prompt - 1 + some.s.draft_n);
    assert_in_range(some.s.draft_n_accepted, 1, some.s.tested_n - 1);
    assert_true(more == n_whole || more == n_whole - 1);
}

/* With a pass for each level, and with levels together (draft/model.c). */
static void test_oracle_takes_the_cost_of_a_model(void **state) {
    fixture *f = *state;
    so_rig other;
    so_case_model(&other, "qwen3");
    other.b->vt = &counting_vt;
    for (int c = 0; c < 2 * SO_CASES; c++) {
        counting_vt.remote = cpu_vt->remote || c >= SO_CASES;
        check_cost(f, &other, &f->cases[c % SO_CASES]);
    }
    counting_vt.remote = cpu_vt->remote;
    other.b->vt = cpu_vt;
    so_rig_close(&other);
}

/* --- earlier requests --- */

static void test_corpus_hits_on_the_second_request(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(f, 1);
    for (int c = 0; c < SO_CASES; c++) {
        so_request_stats first = run_case(e, &f->cases[c], "corpus", LENGTH);
        so_request_stats second = run_case(e, &f->cases[c], "corpus", LENGTH);
        assert_true(second.draft_n_accepted > first.draft_n_accepted);
        assert_int_equal(second.rounds, N_PREDICT / (LENGTH + 1));
    }
    so_engine_free(e);
    e = open_engine(f, 1); /* the corpus belongs to the engine: a new one is empty */
    assert_int_equal(run_case(e, &f->cases[1], "corpus", LENGTH).draft_n_accepted, 0);
    so_engine_free(e);
}

/* --- tables from files --- */

static char *write_table(const char *dir, int order, int n_vocab, const so_case *c) {
    so_table_counter *counter = NULL;
    so_table *t = NULL;
    so_err err = {0};
    char name[16];
    snprintf(name, sizeof name, "%d.tbl", order);
    char *path = so_path_join(dir, name);
    SO_OK_OR_FAIL(so_table_counter_create(order, n_vocab, &counter, &err), err);
    SO_OK_OR_FAIL(so_table_counter_add(counter, c->prompt + c->n_prompt - 1, 1, &err), err);
    SO_OK_OR_FAIL(so_table_counter_add(counter, c->want, (size_t)c->n_want, &err), err);
    SO_OK_OR_FAIL(so_table_counter_finish(counter, 0, &t, &err), err);
    SO_OK_OR_FAIL(so_table_save(t, path, &err), err);
    so_table_free(t);
    return path;
}

/* A table counted from the text that will be generated is right at some positions. */
static void test_tables_from_files(void **state) {
    fixture *f = *state;
    for (int c = 0; c < SO_CASES; c++)
        for (int order = 1; order <= 2; order++) {
            char *dir = so_test_tmp(), spec[600];
            char *path = write_table(dir, order, f->target.n_vocab, &f->cases[c]);
            snprintf(spec, sizeof spec, "%s(%s)", order == 1 ? "unigram" : "bigram", path);
            so_engine *e = open_engine(f, 1);
            so_request_stats s = run_case(e, &f->cases[c], spec, 3);
            assert_true(s.draft_n > 0 && s.draft_n_accepted > 0);
            if (order == 2) /* bigrams depend on the previous token, not only on frequency */
                assert_true(s.rounds <= N_PREDICT * 2 / 3);
            so_engine_free(e);
            free(path);
            so_test_tmp_free(dir);
        }
}

/* --- continuous batching --- */

/* Requests arrive while others run; some speculate, some do not, some wait for a slot. */
static void test_speculative_with_continuous_batching(void **state) {
    fixture *f = *state;
    static const char *const drafters[SO_CASES] = {"model",       NULL,           "lookup,ngram",
                                                   "oracle(0.6)", "random+model", NULL};
    so_engine *e = open_engine(f, 3);
    so_request *r[2 * SO_CASES];
    so_err err = {0};
    for (int i = 0; i < 2 * SO_CASES; i++) {
        const char *name = drafters[(i + i / SO_CASES) % SO_CASES];
        so_spec_opts spec = {.drafter = name, .length = name ? i % 6 : 0};
        r[i] = so_case_submit(e, &f->cases[i % SO_CASES], &spec);
        for (int k = 0; k < i % 4; k++)
            assert_true(so_engine_step(e, &err) >= 0);
    }
    so_case_run(e);
    int accepted = 0;
    for (int i = 0; i < 2 * SO_CASES; i++) {
        assert_true(so_case_same(r[i], &f->cases[i % SO_CASES]));
        accepted += so_request_get_stats(r[i])->draft_n_accepted;
        so_request_free(r[i]);
    }
    assert_true(accepted > N_PREDICT);
    so_engine_free(e);
}

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_target_as_its_own_draft_at_every_length),
        cmocka_unit_test(test_predicted_text_at_every_length),
        cmocka_unit_test(test_hierarchical_saves_passes),
        cmocka_unit_test(test_oracle_takes_the_cost_of_a_model),
        cmocka_unit_test(test_corpus_hits_on_the_second_request),
        cmocka_unit_test(test_tables_from_files),
        cmocka_unit_test(test_speculative_with_continuous_batching),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
