/* Speculation on tiny models: the text equals plain decoding's (`==`) for every drafter, length,
 * batch and sampling; requests that end in the middle of a round. test_drafts.c: perfect drafts,
 * and what each drafter is good for. tests/cli/test_mutants.c: a faulty engine is detected. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "so_cases.h"
#include "so_lossless.h"
#include "so_rig.h"
#include "so_shape.h"
#include "so_tiny.h"

enum { N_PREDICT = SO_CASE_PREDICT, N_CTX = SO_CASE_CTX, MAX_PROMPT = SO_CASE_PROMPT };

typedef struct fixture {
    so_rig target, draft; /* the draft is another model with the same token ids */
    so_case cases[SO_CASES];
} fixture;

static so_engine *open_engine_at(const fixture *f, const so_rig *draft, int n_parallel, int n_batch,
                                 float draft_temp) {
    return so_case_engine(&f->target, &(so_case_engine_opts){.draft = draft,
                                                             .n_parallel = n_parallel,
                                                             .n_batch = n_batch,
                                                             .draft_temp = draft_temp});
}

static so_engine *open_engine(const fixture *f, const so_rig *draft, int n_parallel, int n_batch) {
    return open_engine_at(f, draft, n_parallel, n_batch, -1);
}

static fixture *open_pair(const char *target, const char *draft) {
    fixture *f = SO_NEW(fixture);
    so_case_open(&f->target, target, &f->draft, draft, f->cases);
    return f;
}

static void close_pair(fixture *f) {
    so_rig_close(&f->target);
    so_rig_close(&f->draft);
    free(f);
}

static int open_fixture(void **state) {
    *state = open_pair("llama", "mistral_window");
    return 0;
}

static int close_fixture(void **state) {
    close_pair(*state);
    return 0;
}

static void check_stats(const so_request *r) {
    const so_request_stats *s = so_request_get_stats(r);
    int tested = 0, accepted = 0;
    for (int i = 0; i < SO_STATS_DEPTHS; i++) {
        tested += s->per_depth[i].tested;
        accepted += s->per_depth[i].accepted;
    }
    assert_int_equal(tested, s->tested_n);
    assert_int_equal(accepted, s->draft_n_accepted);
    assert_true(s->draft_n >= s->draft_n_accepted);
    assert_int_equal(s->rounds + s->draft_n_accepted, s->predicted_n);
}

static const char *const DRAFTERS[] = {"none",
                                       "ngram",
                                       "ngram(draw)",
                                       "lookup",
                                       "corpus",
                                       "predict",
                                       "random",
                                       "oracle(0.6)",
                                       "model",
                                       "model(ngram)",
                                       "lookup,ngram",
                                       "lookup,model",
                                       "model+lookup",
                                       "oracle(0.5)+random+ngram",
                                       "oracle(0.6,model)",
                                       "oracle(0.8,model)+lookup",
                                       "auto",
                                       "model(k=2,nodes=12)",
                                       "model(best)",
                                       "model(k=3)+lookup",
                                       "lookup,model(best,nodes=6)"};

/* Runs all cases, `n_parallel` at once; if several run, each has another drafter and length.
 * Returns the number of texts that differ from plain decoding's. */
static int n_different(const fixture *f, const so_rig *draft, int n_parallel, int first,
                       int length) {
    so_engine *e = open_engine(f, draft, n_parallel, n_parallel == 1 ? 64 : 5);
    so_request *r[SO_CASES];
    int different = 0;
    for (int c = 0; c < SO_CASES; c++) {
        const char *name = DRAFTERS[(first + (n_parallel > 1 ? c : 0)) % (int)SO_LEN(DRAFTERS)];
        so_spec_opts spec = {.drafter = name,
                             .length =
                                 n_parallel > 1 && length ? 1 + (length + 3 * c) % 9 : length};
        r[c] = so_case_submit(e, &f->cases[c], &spec);
    }
    so_case_run(e);
    for (int c = 0; c < SO_CASES; c++) {
        if (!so_case_same(r[c], &f->cases[c]))
            different++;
        else
            check_stats(r[c]);
        so_request_free(r[c]);
    }
    so_engine_free(e);
    return different;
}

enum { N_LENGTHS = 4 };
static const int LENGTHS[N_LENGTHS] = {1, 4, 16, 0};

/* Runs every drafter with every length (turn −1), or with one length each, which changes from
 * drafter to drafter. Takes every `step`-th drafter from `first` on. */
static void check_alone(const fixture *f, const char *name, int turn, int first, int step) {
    for (int d = first; d < (int)SO_LEN(DRAFTERS); d += step)
        for (int k = 0; k < N_LENGTHS; k++)
            if ((turn < 0 || k == (d + d / N_LENGTHS + turn) % N_LENGTHS) &&
                n_different(f, &f->draft, 1, d, LENGTHS[k]) != 0)
                fail_msg("%s, %s, length %d: not the plain text", name, DRAFTERS[d], LENGTHS[k]);
}

static void check_together(const fixture *f, const char *name, int first, int step) {
    for (int d = first; d < (int)SO_LEN(DRAFTERS); d += step)
        for (int length = 0; length <= 5; length += 5)
            if (n_different(f, &f->target, 4, d, length) != 0)
                fail_msg("%s, mixed from %s, length %d: not the plain text", name, DRAFTERS[d],
                         length);
}

static void test_same_text_alone(void **state) { check_alone(*state, "llama", -1, 0, 1); }

static void test_same_text_together(void **state) { check_together(*state, "llama", 0, 2); }

/* --- other families --- */

/* A sliding window and norms of queries and keys (Gemma 3), norms alone (Qwen 3), learned positions
 * (GPT-2). Drafts come from another family, then from the target itself. */
static void test_other_families(void **state) {
    (void)state;
    static const char *const names[] = {"gemma3", "qwen3", "gpt2"};
    for (int i = 0; i < (int)SO_LEN(names); i++) {
        fixture *f = open_pair(names[i], "llama");
        check_alone(f, names[i], i, 0, 1);
        check_together(f, names[i], i, 4);
        for (int c = i; c < SO_CASES; c += 3) {
            so_case_perfect(&f->target, &f->target, &f->cases[c], SO_VERIFY_MATCH, "model", 4);
            so_case_perfect(&f->target, &f->target, &f->cases[c], SO_VERIFY_REJECT, "model", 3);
        }
        close_pair(f);
    }
}

/* A draft with logits for a vocabulary subset only: the ids whose bit is set. */
static void open_subset_draft(so_rig *r, const so_shape *s, const unsigned char *bits) {
    so_shape subset = *s;
    subset.vocab_mask = bits;
    subset.n_vocab_mask = (s->n_vocab + 7) / 8;
    so_shape_open(r, &subset,
                  &(so_rig_opts){
                      .level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 4, .model = {.draft = true}});
}

/* A draft that is the target with a vocabulary subset: the text equals plain decoding's with every
 * drafter. If the subset contains all tokens of the text, every guess is accepted, greedy and with
 * the target's noise. */
static void test_vocab_subset_draft(void **state) {
    (void)state;
    fixture *f = SO_NEW(fixture);
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = 67, .n_ctx = 512, .seed = 21};
    unsigned char some[9] = {0x5A, 0xC3, 0x0F, 0, 0xFF, 0x81, 0x7E, 0x11, 0x04};
    so_rig own;
    so_shape_open(&f->target, &shape,
                  &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 4});
    open_subset_draft(&f->draft, &shape, some);
    assert_int_equal(f->draft.width, 31);
    for (int c = 0; c < SO_CASES; c++)
        so_case_make(c, shape.n_vocab, &f->cases[c]);
    so_case_plain(&f->target, f->cases, SO_CASES);
    check_alone(f, "narrow draft", -1, 8, 1);
    for (int d = 8; d < (int)SO_LEN(DRAFTERS); d += 2)
        assert_int_equal(n_different(f, &f->draft, 4, d, 5), 0);
    for (int c = 0; c < SO_CASES; c++) {
        unsigned char all[9] = {0};
        if (f->cases[c].sample.top_p < 1)
            continue; /* with fewer tokens the nucleus of top-p differs */
        for (int i = 0; i < f->cases[c].n_want; i++)
            all[f->cases[c].want[i] / 8] |= (unsigned char)(1 << f->cases[c].want[i] % 8);
        open_subset_draft(&own, &shape, all);
        assert_true(own.width <= SO_CASE_PREDICT);
        for (int k = 1; k <= 7; k += 3)
            so_case_perfect(&f->target, &own, &f->cases[c], SO_VERIFY_MATCH, "model", k);
        so_rig_close(&own);
    }
    close_pair(f);
}

/* An inner drafter saves passes of the draft model and changes no token: the draft's guesses are
 * the same, so the rounds are too. */
static void test_inner_drafter_changes_nothing(void **state) {
    fixture *f = *state;
    for (int c = 0; c < SO_CASES; c++) {
        int draft_n[2], accepted[2];
        for (int k = 0; k < 2; k++) {
            so_engine *e = open_engine(f, &f->draft, 1, 64);
            so_spec_opts spec = {.drafter = k ? "model(oracle(0.7))" : "model(oracle(0))",
                                 .length = 5,
                                 .verify = SO_VERIFY_REJECT};
            so_request_opts o = so_case_opts(&f->cases[c], &spec);
            o.has_nonce = true; /* a hashed nonce would depend on the drafter's name */
            o.nonce = 1;
            so_request *r = so_case_finish(e, &o);
            draft_n[k] = so_request_get_stats(r)->draft_n;
            accepted[k] = so_request_get_stats(r)->draft_n_accepted;
            so_request_free(r);
            so_engine_free(e);
        }
        assert_int_equal(draft_n[0], draft_n[1]);
        assert_int_equal(accepted[0], accepted[1]);
    }
}

/* --- reject and lenient --- */

/* With a fixed drafter and length the same seed gives the same text, alone and beside others. */
static void test_reject_is_reproducible(void **state) {
    fixture *f = *state;
    int32_t first[SO_CASES][N_PREDICT];
    for (int variant = 0; variant < 2; variant++) {
        so_engine *e = open_engine(f, &f->draft, variant ? 4 : 1, variant ? 7 : 64);
        so_request *r[SO_CASES];
        so_spec_opts spec = {.drafter = "model", .length = 4, .verify = SO_VERIFY_REJECT};
        for (int c = 0; c < SO_CASES; c++)
            r[c] = so_case_submit(e, &f->cases[c], &spec);
        so_case_run(e);
        for (int c = 0; c < SO_CASES; c++) {
            int n;
            const int32_t *out = so_request_output(r[c], &n);
            assert_int_equal(n, N_PREDICT);
            check_stats(r[c]);
            if (f->cases[c].sample.temp == 0)
                assert_true(so_case_same(r[c], &f->cases[c]));
            if (variant == 0)
                memcpy(first[c], out, sizeof first[c]);
            else
                assert_memory_equal(first[c], out, sizeof first[c]);
            so_request_free(r[c]);
        }
        so_engine_free(e);
    }
}

#if SO_TEST_SANITIZED
enum { TOP = 3, DEPTH = 2, N_TEXTS = 9, N_DRAWS = 480 };
#else
enum { TOP = 3, DEPTH = 3, N_TEXTS = 27, N_DRAWS = 2400 };
#endif

/* Probabilities of all texts of DEPTH tokens under plain sampling, the first token least
 * significant. `tokens` has the tokens of each text. */
static void enumerate(fixture *f, const so_case *c, so_sampler *s, double *dist,
                      int32_t tokens[N_TEXTS][DEPTH]) {
    int n_vocab = f->target.n_vocab;
    float *logits = SO_NEW_N(float, (MAX_PROMPT + DEPTH) * n_vocab),
          *row = SO_NEW_N(float, n_vocab);
    for (int t = 0; t < N_TEXTS; t++) {
        int32_t text[MAX_PROMPT + DEPTH];
        int n = c->n_prompt, rest = t;
        memcpy(text, c->prompt, sizeof c->prompt);
        dist[t] = 1;
        for (int k = 0; k < DEPTH; k++) {
            so_seq *seq = so_seq_create(f->target.kv);
            so_err err = {0};
            so_rig_chunks(&f->target, seq, text, n, 8, logits);
            so_seq_free(seq);
            so_sample_context ctx = {text, n, c->n_prompt};
            SO_OK_OR_FAIL(so_sample_distribution(s, &c->sample,
                                                 logits + (size_t)(n - 1) * (size_t)n_vocab, &ctx,
                                                 row, &err),
                          err);
            int nth = rest % TOP;
            int32_t id = -1;
            rest /= TOP;
            while (nth >= 0)
                nth -= row[++id] > 0;
            dist[t] *= (double)row[id];
            tokens[t][k] = text[n++] = id;
        }
    }
    free(logits);
    free(row);
}

/* The whole path of the engine, from drafted rows to emitted tokens: over many seeds the texts have
 * plain sampling's distribution. False alarm: one in a million. */
static void test_reject_distribution(void **state) {
    fixture *f = *state;
    static const char *const drafters[] = {"model+random"};
    so_case c = f->cases[0];
    c.sample.temp = 1.5f;
    c.sample.top_k = TOP;
    c.sample.frequency_penalty = 0.5f;
    so_sampler *s = so_sampler_create(f->target.n_vocab);
    double dist[N_TEXTS];
    int32_t tokens[N_TEXTS][DEPTH];
    enumerate(f, &c, s, dist, tokens);
    so_sampler_free(s);
    for (size_t d = 0; d < SO_LEN(drafters); d++) {
        so_engine *e = open_engine_at(f, &f->target, 8, 64, 0.6f); /* near p, but not equal */
        int count[N_TEXTS] = {0}, found = 0, accepted = 0;
        for (int i = 0; i < N_DRAWS; i += 8) {
            so_request *r[8];
            for (int k = 0; k < 8; k++) {
                so_request_opts o = {
                    .prompt = c.prompt,
                    .n_prompt = c.n_prompt,
                    .sample = c.sample,
                    .max_tokens = DEPTH,
                    .spec = {.drafter = drafters[d], .length = 2, .verify = SO_VERIFY_REJECT}};
                so_err err = {0};
                o.sample.seed = 1000 * d + (uint64_t)(i + k);
                SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[k], &err), err);
            }
            so_case_run(e);
            for (int k = 0; k < 8; k++) {
                int n;
                const int32_t *out = so_request_output(r[k], &n);
                for (int t = 0; t < N_TEXTS; t++)
                    if (memcmp(out, tokens[t], sizeof tokens[t]) == 0) {
                        count[t]++;
                        found++;
                    }
                accepted += so_request_get_stats(r[k])->draft_n_accepted;
                so_request_free(r[k]);
            }
        }
        assert_int_equal(found, N_DRAWS);
        assert_true(accepted > N_DRAWS / 2);
        double chi2 = 0;
        for (int t = 0; t < N_TEXTS; t++) {
            double expected = dist[t] * N_DRAWS;
            assert_true(expected > 5);
            chi2 += (count[t] - expected) * (count[t] - expected) / expected;
        }
        if (so_chi2_tail(chi2, N_TEXTS - 1) < 1e-6)
            fail_msg("%s: chi-square %g of %d degrees of freedom", drafters[d], chi2, N_TEXTS - 1);
        so_engine_free(e);
    }
}

/* Lenience 1 is exact. A very small lenience accepts more guesses of a drafter that is often
 * wrong. */
static void test_lenience(void **state) {
    fixture *f = *state;
    for (int c = 1; c < SO_CASES; c += 2) { /* temperature 0 */
        int accepted[2];
        for (int k = 0; k < 2; k++) {
            so_engine *e = open_engine(f, &f->draft, 1, 64);
            so_spec_opts spec = {.drafter = "random",
                                 .length = 3,
                                 .verify = SO_VERIFY_LENIENT,
                                 .lenience = k ? 1e-30 : 1};
            so_request *r = so_case_submit(e, &f->cases[c], &spec);
            so_case_run(e);
            accepted[k] = so_request_get_stats(r)->draft_n_accepted;
            if (k == 0)
                assert_true(so_case_same(r, &f->cases[c]));
            so_request_free(r);
            so_engine_free(e);
        }
        assert_true(accepted[1] > accepted[0]);
    }
}

/* --- endings --- */

typedef struct watcher {
    int n_tokens, n_rounds, most_per_round, stop_after;
    int this_round;
} watcher;

static bool on_token(void *user, const so_event *ev) {
    watcher *w = user;
    if (ev->token == SO_TOKEN_NONE)
        return true;
    w->n_tokens++;
    w->this_round++;
    w->most_per_round = SO_MAX(w->most_per_round, w->this_round);
    return w->n_tokens != w->stop_after;
}

static void on_round(void *user, const so_round *round) {
    watcher *w = user;
    assert_int_equal(round->index, w->n_rounds);
    w->n_rounds++;
    w->this_round = 0;
}

static void count_emitted(void *user, const so_step_info *info) { *(int *)user += info->emitted; }

static void test_multi_token_output(void **state) {
    fixture *f = *state;
    int n_emitted = 0;
    so_engine *e = so_case_engine(&f->target, &(so_case_engine_opts){.n_parallel = 1,
                                                                     .n_batch = 64,
                                                                     .draft_temp = -1,
                                                                     .on_step = count_emitted,
                                                                     .step_user = &n_emitted});
    const so_case *c = &f->cases[1];
    for (int stop_after = 0; stop_after < 8; stop_after += 3) {
        watcher w = {.stop_after = stop_after};
        n_emitted = 0;
        so_request_opts o = so_case_opts(c, &(so_spec_opts){.drafter = "predict", .length = 5});
        o.on_event = on_token;
        o.on_round = on_round;
        o.user = &w;
        so_request *r = so_case_finish(e, &o);
        int n = stop_after ? stop_after : N_PREDICT; /* further tokens of the round are dropped */
        so_case_expect(r, c->want, n);
        assert_int_equal(w.n_tokens, n);
        assert_int_equal(n_emitted, n);
        assert_int_equal(w.most_per_round, SO_MIN(n, 6));
        so_request_free(r);
    }
    so_engine_free(e);
}

/* At the end of the context drafts are shortened, and the last position is decoded without
 * guesses. */
static void test_context_end(void **state) {
    fixture *f = *state;
    for (int pass = 0; pass < 2; pass++) {
        int32_t want[N_CTX];
        int n_want = 0;
        for (int length = 0; length <= 16; length += 8) {
            so_engine *e = open_engine(f, &f->draft, 1, 64);
            const so_case *c = &f->cases[pass ? 5 : 2];
            so_request_opts o = so_case_opts(
                c, &(so_spec_opts){.drafter = length ? "model" : NULL, .length = length});
            o.max_tokens = -1;
            so_request *r = so_case_finish(e, &o);
            int n;
            const int32_t *out = so_request_output(r, &n);
            assert_int_equal(so_request_finish(r), SO_FINISH_LENGTH);
            assert_int_equal(n, N_CTX - c->n_prompt);
            if (length == 0)
                memcpy(want, out, (size_t)(n_want = n) * sizeof *out);
            else
                assert_memory_equal(want, out, (size_t)n_want * sizeof *out);
            so_request_free(r);
            so_engine_free(e);
        }
    }
}

/* --- refusals --- */

static void expect_refusal(so_engine *e, const so_case *c, so_spec_opts spec, const char *part) {
    so_request_opts o = {.prompt = c->prompt,
                         .n_prompt = c->n_prompt,
                         .sample = c->sample,
                         .max_tokens = 4,
                         .spec = spec};
    so_err err = {0};
    so_request *r = NULL;
    assert_true(so_engine_submit(e, &o, &r, &err) < 0);
    assert_null(r);
    if (!strstr(err.msg, part))
        fail_msg("'%s' does not say '%s'", err.msg, part);
}

static void test_config_validation(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(f, NULL, 1, 64);
    const so_case *c = &f->cases[0];
    expect_refusal(e, c, (so_spec_opts){.drafter = "model"}, "--draft-model");
    expect_refusal(e, c, (so_spec_opts){.drafter = "modle"}, "modle");
    expect_refusal(e, c, (so_spec_opts){.drafter = "model(/no/such/file.gguf)"}, "/no/such");
    expect_refusal(e, c, (so_spec_opts){.drafter = "model(k=0)"}, "a whole number from 1 to 64");
    expect_refusal(e, c, (so_spec_opts){.drafter = "ngram", .length = -1}, "--spec-length -1");
    expect_refusal(e, c, (so_spec_opts){.drafter = "ngram", .length = 17}, "--spec-length 17");
    expect_refusal(e, c,
                   (so_spec_opts){.drafter = "ngram", .verify = SO_VERIFY_LENIENT, .lenience = 1.5},
                   "lenient=1.5");
    expect_refusal(e, c, (so_spec_opts){.drafter = "ngram", .verify = SO_VERIFY_LENIENT},
                   "lenient=0");
    so_engine_free(e);
}

static void count_line(void *user) { ++*(int *)user; }

/* A budget above the engine's is refused; one above the cache's room is reduced, with one message. */
static void test_tree_budgets(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(f, &f->draft, 1, 64);
    expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = "model(best,nodes=33)"},
                   "--draft-nodes 33");
    so_engine_free(e);
    so_engine_opts o;
    so_err err = {0};
    so_engine_defaults(f->target.m, &o);
    o.n_ctx = 64;
    o.n_pages = 2;
    o.max_draft = 8;
    o.max_nodes = 200;
    o.draft = f->draft.m;
    SO_OK_OR_FAIL(so_engine_create(f->target.m, NULL, &o, &e, &err), err);
    int n_lines = 0;
    so_log_set_hook(count_line, &n_lines);
    for (int i = 0; i < 2; i++) {
        so_case c = f->cases[0];
        c.n_prompt = SO_MIN(c.n_prompt, 8);
        so_spec_opts spec = {.drafter = "model(best,nodes=200)", .length = 8};
        so_request_opts ro = {.prompt = c.prompt,
                              .n_prompt = c.n_prompt,
                              .sample = c.sample,
                              .max_tokens = 12,
                              .spec = spec};
        so_request *r = NULL;
        SO_OK_OR_FAIL(so_engine_submit(e, &ro, &r, &err), err);
        so_case_run(e);
        assert_true(so_request_get_stats(r)->draft_n > 0);
        so_request_free(r);
    }
    so_log_set_hook(NULL, NULL);
    assert_int_equal(n_lines, 1);
    so_engine_free(e);
}

static void check_pair(const char *target, const char *draft, const char *part) {
    so_bundle a = {0}, b = {0};
    so_bundle_opts bo;
    so_err err = {0};
    so_bundle_defaults(&bo);
    bo.n_threads = 1;
    SO_OK_OR_FAIL(so_bundle_open(target, &bo, &a, &err), err);
    bo.backend = a.backend;
    SO_OK_OR_FAIL(so_bundle_open(draft, &bo, &b, &err), err);
    so_engine_opts o;
    so_engine *e = NULL;
    so_engine_defaults(a.model, &o);
    o.max_draft = 8;
    o.draft = b.model;
    o.draft_tok = b.tok;
    SO_OK_OR_FAIL(so_engine_create(a.model, a.tok, &o, &e, &err), err);
    so_case c = {.prompt = {1, 5, 6, 5}, .n_prompt = 4, .sample = a.sample};
    if (part) {
        expect_refusal(e, &c, (so_spec_opts){.drafter = "model"}, part);
    } else {
        so_request *r = so_case_submit(e, &c, &(so_spec_opts){.drafter = "model", .length = 4});
        so_case_run(e);
        assert_int_equal(so_request_get_stats(r)->draft_n_accepted,
                         so_request_get_stats(r)->draft_n);
        so_request_free(r);
    }
    so_engine_free(e);
    so_bundle_close(&b);
    so_bundle_close(&a);
}

/* Many specs with one draft file: it is opened once, so the limit on files is not reached. */
static void test_one_file_many_specs(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_path_join(dir, "0.gguf");
    so_bundle a = {0};
    so_bundle_opts bo;
    so_err err = {0};
    so_tiny_write(path, NULL);
    so_bundle_defaults(&bo);
    bo.n_threads = 1;
    SO_OK_OR_FAIL(so_bundle_open(path, &bo, &a, &err), err);
    so_engine_opts o;
    so_engine *e = NULL;
    so_engine_defaults(a.model, &o);
    o.max_draft = 4;
    SO_OK_OR_FAIL(so_engine_create(a.model, a.tok, &o, &e, &err), err);
    so_case c = {.prompt = {1, 5, 6, 5}, .n_prompt = 4, .sample = a.sample};
    for (int i = 1; i <= 12; i++) {
        so_buf spec = {0};
        so_buf_printf(&spec, "model(%s),lookup(min=%d)", path, i);
        so_request *r = so_case_submit(e, &c, &(so_spec_opts){.drafter = spec.data, .length = 2});
        so_case_run(e);
        assert_true(so_request_get_stats(r)->draft_n_accepted > 0);
        so_request_free(r);
        so_buf_free(&spec);
    }
    so_engine_free(e);
    so_bundle_close(&a);
    free(path);
    so_test_tmp_free(dir);
}

static void test_draft_target_tokenizer_mismatch(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *names[4];
    static const so_tiny_opts kinds[4] = {
        {.temp = 0}, {.other_vocab = true}, {.other_end = true}, {.no_chat = true}};
    for (int i = 0; i < 4; i++) {
        char name[32];
        snprintf(name, sizeof name, "%d.gguf", i);
        names[i] = so_path_join(dir, name);
        so_tiny_write(names[i], &kinds[i]);
    }
    check_pair(names[0], names[1], "in the target and 'ea' in the draft");
    check_pair(names[0], names[2], "end token");
    check_pair(names[0], names[3], NULL);
    for (int i = 0; i < 4; i++)
        free(names[i]);
    so_test_tmp_free(dir);
}

/* Encoder-decoder models: the prompts are what the encoders read. */
static int open_encoders(void **state) {
    *state = open_pair("t5_v11", "t5_v10");
    return 0;
}

static void check_refused_pair(const char *target, const char *draft, const char *why) {
    so_rig t, d;
    so_err err = {0};
    so_request *r = NULL;
    static const int32_t prompt[2] = {5, 6};
    so_case_model(&t, target);
    so_case_model(&d, draft);
    so_engine *e =
        so_case_engine(&t, &(so_case_engine_opts){.draft = &d, .n_parallel = 1, .n_batch = 8});
    so_request_opts o = {
        .prompt = prompt, .n_prompt = 2, .max_tokens = 3, .spec = {.drafter = "model"}};
    so_sample_defaults(&o.sample);
    assert_int_equal(so_engine_submit(e, &o, &r, &err), SO_EMISMATCH);
    if (!strstr(err.msg, why))
        fail_msg("\"%s\" does not say \"%s\"", err.msg, why);
    so_engine_free(e);
    so_rig_close(&t);
    so_rig_close(&d);
}

static void test_one_with_an_encoder(void **state) {
    (void)state;
    check_refused_pair("t5_v11", "llama", "the target has an encoder and the draft model has none");
    check_refused_pair("llama", "t5_v11", "the draft model has an encoder and the target has none");
}

static void check_refused_source(so_engine *e, const int32_t *prompt, int n, const char *why) {
    so_request_opts o = {.prompt = prompt, .n_prompt = n, .max_tokens = 3};
    so_request *r = NULL;
    so_err err = {0};
    so_sample_defaults(&o.sample);
    assert_int_not_equal(so_engine_submit(e, &o, &r, &err), SO_OK);
    if (!strstr(err.msg, why))
        fail_msg("\"%s\" does not say \"%s\"", err.msg, why);
}

static void test_bad_sources(void **state) {
    fixture *f = *state;
    int32_t prompt[N_CTX + 1] = {0};
    so_engine *e = open_engine(f, NULL, 1, 8);
    check_refused_source(e, prompt, 0, "the source text is empty: the encoder needs a text");
    check_refused_source(e, prompt, N_CTX + 1, "raise --ctx-size");
    prompt[1] = f->target.n_vocab;
    check_refused_source(e, prompt, 2, "token 1 of the source text");
    prompt[1] = 1;
    so_request_opts o = {.prompt = prompt, .n_prompt = N_CTX, .max_tokens = 3};
    so_request *r = NULL;
    so_err err = {0};
    so_sample_defaults(&o.sample);
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err); /* exactly as long as fits */
    SO_OK_OR_FAIL(so_engine_run(e, r, &err), err);
    assert_int_equal(so_request_get_stats(r)->predicted_n, 3);
    assert_int_equal(so_request_get_stats(r)->prompt_n, N_CTX);
    so_request_free(r);
    so_engine_free(e);
}

int main(int argc, char **argv) {
    if (argc > 1)
        cmocka_set_test_filter(argv[1]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_text_alone),
        cmocka_unit_test(test_same_text_together),
        cmocka_unit_test(test_other_families),
        cmocka_unit_test(test_vocab_subset_draft),
        cmocka_unit_test(test_inner_drafter_changes_nothing),
        cmocka_unit_test(test_reject_is_reproducible),
        cmocka_unit_test(test_reject_distribution),
        cmocka_unit_test(test_lenience),
        cmocka_unit_test(test_multi_token_output),
        cmocka_unit_test(test_context_end),
        cmocka_unit_test(test_config_validation),
        cmocka_unit_test(test_tree_budgets),
        cmocka_unit_test(test_draft_target_tokenizer_mismatch),
        cmocka_unit_test(test_one_file_many_specs),
    };
    const struct CMUnitTest encoders[] = {
        cmocka_unit_test(test_same_text_alone),
        cmocka_unit_test(test_same_text_together),
        cmocka_unit_test(test_reject_is_reproducible),
        cmocka_unit_test(test_one_with_an_encoder),
        cmocka_unit_test(test_bad_sources),
    };
    int failed = cmocka_run_group_tests(tests, open_fixture, close_fixture);
    if (so_test_on_gpu()) {
        puts("skip: encoder-decoder models do not run on a GPU yet");
        return failed;
    }
    return failed + cmocka_run_group_tests_name("encoders", encoders, open_encoders, close_fixture);
}
