/* Logprobs of the engine: they are the log-softmax of the logits row that each token was sampled
 * from, which the test computes again with its own passes. They have the same bits with every
 * drafter, every verifier that keeps the text, and beside any other requests. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "so_cases.h"

enum { N_TOP = 5, N_EACH = N_TOP + 1, N_PREDICT = SO_CASE_PREDICT };

typedef struct fixture {
    so_rig target, draft;
    so_case cases[SO_CASES];
    so_logprob want[SO_CASES][N_PREDICT][N_EACH];
} fixture;

static so_engine *open_engine(const fixture *f, int n_parallel) {
    return so_case_engine(&f->target, &(so_case_engine_opts){.draft = &f->draft,
                                                             .n_parallel = n_parallel,
                                                             .n_batch = n_parallel > 1 ? 5 : 64,
                                                             .draft_temp = -1});
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_case_open(&f->target, "gemma3", &f->draft, "llama", f->cases); /* without logprobs */
    so_engine *e = open_engine(f, 1);
    for (int c = 0; c < SO_CASES; c++) {
        f->cases[c].n_logprobs = N_TOP;
        so_request *r = so_case_submit(e, &f->cases[c], &(so_spec_opts){0});
        so_case_run(e);
        assert_true(so_case_same(r, &f->cases[c])); /* requesting logprobs changes no token */
        int n_each;
        const so_logprob *p = so_request_logprobs(r, &n_each);
        assert_int_equal(n_each, N_EACH);
        memcpy(f->want[c], p, sizeof f->want[c]);
        so_request_free(r);
    }
    so_engine_free(e);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_rig_close(&f->target);
    so_rig_close(&f->draft);
    free(f);
    return 0;
}

/* --- values --- */

/* Computes prompt and answer in a separate sequence. Returns the rows that the answer was sampled
 * from. */
static float *answer_rows(fixture *f, const so_case *c, const int32_t *answer, int n) {
    int32_t text[SO_CASE_PROMPT + N_PREDICT];
    int n_text = c->n_prompt + n;
    size_t n_vocab = (size_t)f->target.n_vocab;
    float *rows = SO_NEW_N(float, (size_t)n_text *n_vocab);
    memcpy(text, c->prompt, sizeof c->prompt);
    memcpy(text + c->n_prompt, answer, (size_t)n * sizeof *answer);
    so_seq *seq = so_seq_create(f->target.kv);
    so_rig_chunks(&f->target, seq, text, n_text, 8, rows);
    so_seq_free(seq);
    memmove(rows, rows + (size_t)(c->n_prompt - 1) * n_vocab, (size_t)n * n_vocab * sizeof *rows);
    return rows;
}

static double log_softmax(const float *row, int n, int token) {
    long double total = 0;
    for (int i = 0; i < n; i++)
        total += expl((long double)row[i]);
    return (double)((long double)row[token] - logl(total));
}

/* The list is sorted, and no token outside it ranks before its last one. */
static void check_top(const float *row, int n, const so_logprob *top) {
    for (int k = 1; k < N_TOP; k++) {
        float a = row[top[k - 1].token], b = row[top[k].token];
        assert_true(a > b || (a == b && top[k - 1].token < top[k].token));
        assert_true(top[k - 1].logprob >= top[k].logprob);
    }
    int before = 0;
    const so_logprob *last = &top[N_TOP - 1];
    for (int i = 0; i < n; i++)
        before += row[i] > row[last->token] || (row[i] == row[last->token] && i < last->token);
    assert_int_equal(before, N_TOP - 1);
}

static void test_values_are_the_rows_log_softmax(void **state) {
    fixture *f = *state;
    int n_vocab = f->target.n_vocab;
    for (int c = 0; c < SO_CASES; c++) {
        float *rows = answer_rows(f, &f->cases[c], f->cases[c].want, N_PREDICT);
        for (int i = 0; i < N_PREDICT; i++) {
            const float *row = rows + (size_t)i * (size_t)n_vocab;
            const so_logprob *p = f->want[c][i];
            assert_int_equal(p[0].token, f->cases[c].want[i]);
            for (int k = 0; k < N_EACH; k++)
                assert_true(fabs((double)p[k].logprob - log_softmax(row, n_vocab, p[k].token)) <
                            1e-6 * (1 + fabs((double)p[k].logprob)));
            check_top(row, n_vocab, p + 1);
            if (so_sample_is_argmax(&f->cases[c].sample))
                assert_int_equal(p[1].token, p[0].token);
        }
        free(rows);
    }
}

/* A banned token and a strongly favoured one change the text but not the logprobs. */
static void test_bias_does_not_show(void **state) {
    fixture *f = *state;
    const so_logprob *plain = f->want[1][0];
    int32_t first = plain[1].token, unlikely = first == 90 ? 91 : 90;
    so_case c = f->cases[1];
    float *row = answer_rows(f, &c, c.want, 1);
    for (int variant = 0; variant < 2; variant++) {
        const so_bias bias = variant ? (so_bias){unlikely, 1000} : (so_bias){first, -INFINITY};
        c.sample.bias = &bias;
        c.sample.n_bias = 1;
        so_engine *e = open_engine(f, 1);
        so_request *r = so_case_submit(e, &c, &(so_spec_opts){.drafter = "model", .length = 3});
        so_case_run(e);
        int n_each;
        const so_logprob *p = so_request_logprobs(r, &n_each);
        assert_int_equal(p[0].token, variant ? unlikely : plain[2].token);
        assert_true(fabs((double)p[0].logprob - log_softmax(row, f->target.n_vocab, p[0].token)) <
                    1e-4);
        assert_memory_equal(p + 1, plain + 1, N_TOP * sizeof *p);
        so_request_free(r);
        so_engine_free(e);
    }
    free(row);
}

/* --- the same bits --- */

static bool same_logprobs(const fixture *f, int c, const so_request *r) {
    int n_each;
    const so_logprob *p = so_request_logprobs(r, &n_each);
    return n_each == N_EACH && so_case_same(r, &f->cases[c]) &&
           memcmp(p, f->want[c], sizeof f->want[c]) == 0;
}

static const char *const DRAFTERS[] = {"ngram", "lookup",  "random",       "oracle(0.6)",
                                       "model", "predict", "model+lookup", "auto"};

static void test_same_with_speculation(void **state) {
    fixture *f = *state;
    static const struct {
        so_verify_mode mode;
        bool greedy_only; /* exact only at temperature 0 */
    } verifiers[] = {{SO_VERIFY_MATCH, false}, {SO_VERIFY_REJECT, true}, {SO_VERIFY_LENIENT, true}};
    static const int lengths[] = {1, 6, 0};
    for (size_t v = 0; v < SO_LEN(verifiers); v++)
        for (size_t d = 0; d < SO_LEN(DRAFTERS); d++) {
            so_engine *e = open_engine(f, 1);
            for (int c = 0; c < SO_CASES; c++) {
                if (verifiers[v].greedy_only && f->cases[c].sample.temp > 0)
                    continue;
                so_spec_opts spec = {.drafter = DRAFTERS[d],
                                     .length = lengths[(d + (size_t)c) % SO_LEN(lengths)],
                                     .verify = verifiers[v].mode,
                                     .lenience = 1};
                so_request *r = so_case_submit(e, &f->cases[c], &spec);
                so_case_run(e);
                if (!same_logprobs(f, c, r))
                    fail_msg("%s, %s, case %d: not the plain logprobs", DRAFTERS[d],
                             so_verify_mode_name(spec.verify), c);
                so_request_free(r);
            }
            so_engine_free(e);
        }
}

/* All at once, with different drafters, lengths and numbers of logprobs; some request none. */
static void test_same_beside_other_requests(void **state) {
    fixture *f = *state;
    for (int turn = 0; turn < 4; turn++) {
        so_engine *e = open_engine(f, 4);
        so_request *r[SO_CASES];
        for (int c = 0; c < SO_CASES; c++) {
            so_case wanted = f->cases[c];
            wanted.n_logprobs = (c + turn) % 3 == 0 ? 0 : (c + turn) % 3 == 1 ? N_TOP : 1;
            so_spec_opts spec = {.drafter = DRAFTERS[(3 * turn + c) % (int)SO_LEN(DRAFTERS)],
                                 .length = (turn + c) % 4};
            r[c] = so_case_submit(e, &wanted, &spec);
        }
        so_case_run(e);
        for (int c = 0; c < SO_CASES; c++) {
            int n_each;
            const so_logprob *p = so_request_logprobs(r[c], &n_each);
            assert_true(so_case_same(r[c], &f->cases[c]));
            assert_int_equal(n_each, (c + turn) % 3 == 0 ? 0 : (c + turn) % 3 == 1 ? N_EACH : 2);
            assert_int_equal(p != NULL, n_each > 0);
            for (int i = 0; p && i < N_PREDICT; i++)
                assert_memory_equal(p + (size_t)i * n_each, f->want[c][i],
                                    (size_t)n_each * sizeof *p);
            so_request_free(r[c]);
        }
        so_engine_free(e);
    }
}

/* --- events, limits --- */

typedef struct collected {
    so_logprob got[N_PREDICT][N_EACH];
    int n;
} collected;

static bool collect(void *user, const so_event *ev) {
    collected *l = user;
    assert_int_equal(ev->logprobs != NULL, ev->token != SO_TOKEN_NONE);
    if (ev->logprobs)
        memcpy(l->got[l->n++], ev->logprobs, sizeof l->got[0]);
    return true;
}

static void test_events_carry_them(void **state) {
    fixture *f = *state;
    const so_case *c = &f->cases[2];
    so_engine *e = open_engine(f, 1);
    collected l = {.n = 0};
    so_request_opts o = {.prompt = c->prompt,
                         .n_prompt = c->n_prompt,
                         .sample = c->sample,
                         .max_tokens = N_PREDICT,
                         .n_logprobs = N_TOP,
                         .on_event = collect,
                         .user = &l,
                         .spec = {.drafter = "model", .length = 4}};
    so_err err = {0};
    so_request *r = NULL;
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    so_case_run(e);
    assert_int_equal(l.n, N_PREDICT);
    assert_memory_equal(l.got, f->want[2], sizeof l.got);
    so_request_free(r);
    for (int n = -1; n <= SO_LOGPROBS_MAX + 1; n += SO_LOGPROBS_MAX + 2) {
        char part[32];
        o.n_logprobs = n;
        r = NULL;
        snprintf(part, sizeof part, "--logprobs %d", n);
        assert_int_equal(so_engine_submit(e, &o, &r, &err), SO_ERANGE);
        assert_non_null(strstr(err.msg, part));
        assert_null(r);
    }
    so_engine_free(e);
}

/* --- logprobs of the prompt --- */

enum { TEXT = SO_CASE_PROMPT + N_PREDICT };

typedef struct scored {
    int32_t text[TEXT]; /* a case's prompt and answer */
    int n;
    so_logprob want[TEXT - 1][N_EACH];
} scored;

/* Expected values from the test's own passes: row i scores token i + 1. */
static void make_scored(fixture *f, const so_case *c, scored *s) {
    size_t n_vocab = (size_t)f->target.n_vocab;
    float *rows = SO_NEW_N(float, (size_t)TEXT *n_vocab);
    so_sampler *sampler = so_sampler_create(f->target.n_vocab);
    so_seq *seq = so_seq_create(f->target.kv);
    s->n = c->n_prompt + N_PREDICT;
    memcpy(s->text, c->prompt, (size_t)c->n_prompt * sizeof *s->text);
    memcpy(s->text + c->n_prompt, c->want, sizeof c->want);
    so_rig_chunks(&f->target, seq, s->text, s->n, 7, rows);
    for (int i = 0; i + 1 < s->n; i++)
        so_sample_logprobs(sampler, rows + (size_t)i * n_vocab, s->text[i + 1], N_TOP, s->want[i]);
    /* an answer's token has the same logprobs as the same token in a prompt */
    assert_memory_equal(s->want[c->n_prompt - 1], f->want[c - f->cases], sizeof f->want[0]);
    so_seq_free(seq);
    so_sampler_free(sampler);
    free(rows);
}

static so_request *submit_scored(so_engine *e, const scored *s, int max_tokens, int priority) {
    so_request_opts o = {.prompt = s->text,
                         .n_prompt = s->n,
                         .max_tokens = max_tokens,
                         .priority = priority,
                         .n_logprobs = N_TOP,
                         .score_prompt = true,
                         .spec = {.drafter = "ngram", .length = 3}};
    so_err err = {0};
    so_request *r = NULL;
    so_sample_defaults(&o.sample);
    o.sample.temp = 0;
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    return r;
}

static void check_scored(so_request *r, const scored *s) {
    int n_each;
    const so_logprob *p = so_request_prompt_logprobs(r, &n_each);
    assert_int_equal(so_request_finish(r), SO_FINISH_LENGTH);
    assert_int_equal(n_each, N_EACH);
    assert_memory_equal(p, s->want, (size_t)(s->n - 1) * sizeof s->want[0]);
    so_request_free(r);
}

static so_engine *open_scoring(const fixture *f, int n_parallel, int n_batch, int n_pages,
                               so_kv_layout layout) {
    so_engine_opts o;
    so_engine *e = NULL;
    so_err err = {0};
    so_engine_defaults(f->target.m, &o);
    o.n_ctx = SO_CASE_CTX;
    o.kv_dtype = SO_DTYPE_F32;
    o.n_parallel = n_parallel;
    o.n_batch = n_batch;
    o.n_pages = n_pages;
    o.kv_layout = layout;
    o.max_draft = 4;
    SO_OK_OR_FAIL(so_engine_create(f->target.m, NULL, &o, &e, &err), err);
    return e;
}

/* With an empty and a filled prefix tree, beside other requests, in chunks of any size, in small
 * caches. */
static void test_prompts_are_scored(void **state) {
    fixture *f = *state;
    scored *s = SO_NEW_N(scored, SO_CASES);
    static const int batches[] = {1, 5, 40, 256};
    for (int c = 0; c < SO_CASES; c++)
        make_scored(f, &f->cases[c], &s[c]);
    for (size_t b = 0; b < SO_LEN(batches); b++)
        for (int variant = 0; variant < 4; variant++) {
            so_engine *e = open_scoring(f, variant ? 3 : 1, batches[b], variant == 2 ? 5 : 0,
                                        variant == 3 ? SO_KV_SLOTTED : SO_KV_PAGED);
            for (int turn = 0; turn < 2; turn++) {
                so_request *r[SO_CASES];
                for (int c = 0; c < SO_CASES; c++)
                    r[c] = submit_scored(e, &s[c], (c + turn) % 3 * 8, 0);
                so_case_run(e);
                so_engine_check(e);
                for (int c = 0; c < SO_CASES; c++)
                    check_scored(r[c], &s[c]);
            }
            so_engine_free(e);
        }
    free(s);
}

/* A request that is preempted during its prompt continues its scores, with and without pages left
 * in the prefix tree. */
static void test_scores_survive_preemption(void **state) {
    fixture *f = *state;
    scored *s = SO_NEW_N(scored, 2);
    make_scored(f, &f->cases[0], &s[0]);
    make_scored(f, &f->cases[1], &s[1]);
    for (int n_pages = 3; n_pages <= 9; n_pages += 3)
        for (int steps = 1; steps <= (s[0].n - 2) / 5; steps++) { /* five rows per step */
            so_engine *e = open_scoring(f, 1, 5, n_pages, SO_KV_PAGED);
            so_engine_stats stats;
            so_err err = {0};
            so_request *low = submit_scored(e, &s[0], 4, 0);
            for (int i = 0; i < steps; i++)
                assert_int_equal(so_engine_step(e, &err), 1);
            so_request *high = submit_scored(e, &s[1], 4, 1);
            so_case_run(e);
            so_engine_get_stats(e, &stats);
            assert_int_equal(stats.preemptions, 1);
            check_scored(low, &s[0]);
            check_scored(high, &s[1]);
            so_engine_free(e);
        }
    free(s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values_are_the_rows_log_softmax),
        cmocka_unit_test(test_bias_does_not_show),
        cmocka_unit_test(test_same_with_speculation),
        cmocka_unit_test(test_same_beside_other_requests),
        cmocka_unit_test(test_events_carry_them),
        cmocka_unit_test(test_prompts_are_scored),
        cmocka_unit_test(test_scores_survive_preemption),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
