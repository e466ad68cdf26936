/* Every count and rate of engine/counts.c, compared with values computed by hand. A seed fixes the
 * text. A user's drafter follows a script: in each round a number of right guesses, then wrong
 * ones. The tables below state the expected counts. */
#include "so_test.h"

#include <math.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "engine/figures.h"
#include "so_tiny.h"

enum { N_TEXT = 24, END_AT = 10, MAX_ROUNDS = 16, LENGTH = 4, MAX_BANNED = 300 };

typedef struct fixture {
    so_bundle b;
    int32_t prompt[2];
    so_bias bans[MAX_BANNED];
    so_sample_params sample;
    int32_t text[N_TEXT]; /* the model's text; text[END_AT] occurs there for the first time */
    char stop[16];        /* the text of text[END_AT], which does not occur before it */
} fixture;

static void decode(fixture *f, uint64_t seed, int32_t *out) {
    so_engine_opts eo;
    so_err err = {0};
    so_engine *e = NULL;
    so_request *r = NULL;
    so_engine_defaults(f->b.model, &eo);
    SO_OK_OR_FAIL(so_engine_create(f->b.model, f->b.tok, &eo, &e, &err), err);
    f->sample.seed = seed;
    so_request_opts o = {.prompt = f->prompt,
                         .n_prompt = 2,
                         .sample = f->sample,
                         .max_tokens = N_TEXT,
                         .ignore_end = true};
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    SO_OK_OR_FAIL(so_engine_run(e, r, &err), err);
    int n;
    memcpy(out, so_request_output(r, &n), N_TEXT * sizeof *out);
    assert_int_equal(n, N_TEXT);
    so_request_free(r);
    so_engine_free(e);
}

/* True if the token at END_AT and its text do not occur before it. */
static bool has_end(fixture *f) {
    so_buf before = {0};
    so_str piece = so_tokenizer_text(f->b.tok, f->text[END_AT]);
    bool is_new = piece.len > 0 && piece.len < sizeof f->stop;
    for (int i = 0; i < END_AT; i++)
        so_buf_append_str(&before, so_tokenizer_text(f->b.tok, f->text[i]));
    for (int i = 0; i < END_AT; i++)
        is_new &= f->text[i] != f->text[END_AT];
    if (is_new) {
        memcpy(f->stop, piece.ptr, piece.len);
        is_new = !memmem(so_buf_str(&before).ptr, before.len, piece.ptr, piece.len);
    }
    so_buf_free(&before);
    return is_new;
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    char *dir = so_test_tmp(), *path = so_path_join(dir, "tiny.gguf");
    so_bundle_opts bo;
    so_err err = {0};
    so_tiny_write(path, NULL);
    so_bundle_defaults(&bo);
    bo.n_threads = 1;
    SO_OK_OR_FAIL(so_bundle_open(path, &bo, &f->b, &err), err);
    f->prompt[0] = 1;
    f->prompt[1] = 260;
    so_sample_defaults(&f->sample);
    f->sample.temp = 1;
    for (int id = 0; id < 260; id++) /* bans special tokens, bytes and the space; letters remain */
        f->bans[f->sample.n_bias++] = (so_bias){id, -INFINITY};
    f->sample.bias = f->bans;
    for (uint64_t seed = 1; seed < 100; seed++) {
        decode(f, seed, f->text);
        if (has_end(f))
            break;
    }
    assert_true(has_end(f));
    so_tokenizer_add_end(f->b.tok, f->text[END_AT]);
    free(path);
    so_test_tmp_free(dir);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_bundle_close(&f->b);
    free(f);
    return 0;
}

/* --- scripts --- */

typedef enum ending {
    AT_LENGTH, /* max_tokens */
    AT_TOKEN,  /* end token at END_AT */
    AT_STRING, /* its text as a stop string */
    AT_CANCEL, /* the callback cancels with the token at END_AT */
} ending;

typedef struct trace {
    const char *name;
    ending how;
    int max_tokens, length;
    struct {
        int right, wrong; /* guesses; right −1: the drafter fails */
    } rounds[MAX_ROUNDS];
    int siblings; /* wrong guesses that are verified before each scripted one */
    /* Computed by hand: */
    int want_rounds, drafts, asked, drafted, tested, accepted, predicted;
    double tokens_per_pass, round_rate;
    struct {
        int tested, accepted;
    } per_depth[LENGTH + 1];
} trace;

/* Positions of the text are counted from 0; the token at 10 is the end. "|" separates guesses from
 * the target's token, × is a wrong guess. K is the fixed length. */
static const trace TRACES[] = {
    /* 0 1 ×|2 → 3 tokens; no guesses → 1; 4 5 6 7|8 → 5; 9 END: 9 is the last of the text, and the
     * guesses 11 12 after the end are dropped before the pass */
    {"an end token between accepted guesses",
     AT_TOKEN,
     20,
     LENGTH,
     {{2, 1}, {0, 0}, {4, 0}, {4, 0}},
     .want_rounds = 4,
     .drafts = 3,
     .asked = 4,
     .drafted = 3 + 0 + 4 + 2,
     .tested = 3 + 0 + 4 + 2,
     .accepted = 2 + 0 + 4 + 2,
     .predicted = 10,
     .tokens_per_pass = 11.0 / 4,
     .round_rate = (0.5 + 0 + 1 + 0.5) / 4,
     .per_depth = {{3, 3}, {3, 3}, {2, 1}, {1, 1}}},
    /* the same, but the token that completes the string is counted as a token of the answer */
    {"a stop string between accepted guesses",
     AT_STRING,
     20,
     LENGTH,
     {{2, 1}, {0, 0}, {4, 0}, {4, 0}},
     .want_rounds = 4,
     .drafts = 3,
     .asked = 4,
     .drafted = 11,
     .tested = 9,
     .accepted = 8,
     .predicted = 11,
     .tokens_per_pass = 11.0 / 4,
     .round_rate = 0.5,
     .per_depth = {{3, 3}, {3, 3}, {2, 1}, {1, 1}}},
    {"a caller who cancels between accepted guesses",
     AT_CANCEL,
     20,
     LENGTH,
     {{2, 1}, {0, 0}, {4, 0}, {4, 0}},
     .want_rounds = 4,
     .drafts = 3,
     .asked = 4,
     .drafted = 11,
     .tested = 9,
     .accepted = 8,
     .predicted = 11,
     .tokens_per_pass = 11.0 / 4,
     .round_rate = 0.5,
     .per_depth = {{3, 3}, {3, 3}, {2, 1}, {1, 1}}},
    /* 0 1 2 3|4; 5 6 7 8|9; END: the wrong guesses × × after the end are dropped before the pass */
    {"wrong guesses after the end token",
     AT_TOKEN,
     20,
     LENGTH,
     {{4, 0}, {4, 0}, {1, 2}},
     .want_rounds = 3,
     .drafts = 3,
     .asked = 3,
     .drafted = 9,
     .tested = 9,
     .accepted = 9,
     .predicted = 10,
     .tokens_per_pass = 11.0 / 3,
     .round_rate = (1 + 1 + 0.25) / 3,
     .per_depth = {{3, 3}, {2, 2}, {2, 2}, {2, 2}}},
    /* 0 1 2|3; 4 5|6; 7 8 9 ×|END: the end token is sampled, not guessed */
    {"an end token of the model's own",
     AT_TOKEN,
     20,
     LENGTH,
     {{3, 0}, {2, 0}, {3, 1}},
     .want_rounds = 3,
     .drafts = 3,
     .asked = 3,
     .drafted = 9,
     .tested = 9,
     .accepted = 8,
     .predicted = 10,
     .tokens_per_pass = 11.0 / 3,
     .round_rate = (0.75 + 0.5 + 0.75) / 3,
     .per_depth = {{3, 3}, {3, 3}, {2, 2}, {1, 0}}},
    {"nothing guessed, an end token",
     AT_TOKEN,
     20,
     LENGTH,
     {{0, 0}},
     .want_rounds = 11,
     .drafts = 0,
     .asked = 11,
     .drafted = 0,
     .tested = 0,
     .accepted = 0,
     .predicted = 10,
     .tokens_per_pass = 1,
     .round_rate = 0},
    {"plain decoding, an end token",
     AT_TOKEN,
     20,
     0,
     {{0, 0}},
     .want_rounds = 11,
     .predicted = 10,
     .tokens_per_pass = 1,
     .round_rate = -1},
    /* 0 1 2 3|4; three tokens are left, so at most two guesses: 5 6|7 */
    {"max_tokens shortens what is asked for",
     AT_LENGTH,
     8,
     LENGTH,
     {{4, 0}, {4, 0}},
     .want_rounds = 2,
     .drafts = 2,
     .asked = 2,
     .drafted = 6,
     .tested = 6,
     .accepted = 6,
     .predicted = 8,
     .tokens_per_pass = 4,
     .round_rate = 1,
     .per_depth = {{2, 2}, {2, 2}, {1, 1}, {1, 1}}},
    /* 0 1 2 3|4; no guess is possible for the last token: that round has no rate */
    {"max_tokens leaves nothing to ask for",
     AT_LENGTH,
     6,
     LENGTH,
     {{4, 0}, {4, 0}},
     .want_rounds = 2,
     .drafts = 1,
     .asked = 1,
     .drafted = 4,
     .tested = 4,
     .accepted = 4,
     .predicted = 6,
     .tokens_per_pass = 3,
     .round_rate = 1,
     .per_depth = {{1, 1}, {1, 1}, {1, 1}, {1, 1}}},
    /* 0 1|2; 3 4|5: half of the 4 asked for; 6 7|8: all of the 2 that max_tokens leaves room for */
    {"drafts shorter than the fixed length",
     AT_LENGTH,
     9,
     LENGTH,
     {{2, 0}, {2, 0}, {2, 0}},
     .want_rounds = 3,
     .drafts = 3,
     .asked = 3,
     .drafted = 6,
     .tested = 6,
     .accepted = 6,
     .predicted = 9,
     .tokens_per_pass = 3,
     .round_rate = (0.5 + 0.5 + 1) / 3,
     .per_depth = {{3, 3}, {3, 3}}},
    /* a round whose drafter failed asked for 4 and got 0; then 1 of the 2 asked for is accepted */
    {"a drafter that fails",
     AT_LENGTH,
     4,
     LENGTH,
     {{-1, 0}, {1, 1}, {0, 0}},
     .want_rounds = 3,
     .drafts = 1,
     .asked = 2,
     .drafted = 2,
     .tested = 2,
     .accepted = 1,
     .predicted = 4,
     .tokens_per_pass = 4.0 / 3,
     .round_rate = (0 + 0.5) / 2,
     .per_depth = {{1, 1}, {1, 0}}},
    /* At each depth a wrong sibling is verified first. 0 1|2: 4 nodes, 4 tests. 3 … 6|7: 8 nodes, 8
     * tests. 8 9 END 11: 6 nodes, those at depths 1 to 3. */
    {"a tree",
     AT_TOKEN,
     20,
     LENGTH,
     {{2, 0}, {4, 0}, {4, 0}},
     .siblings = 1,
     .want_rounds = 3,
     .drafts = 3,
     .asked = 3,
     .drafted = 4 + 8 + 6,
     .tested = 4 + 8 + 6,
     .accepted = 2 + 4 + 3,
     .predicted = 10,
     .tokens_per_pass = 11.0 / 3,
     .round_rate = (0.5 + 1 + 0.75) / 3,
     .per_depth = {{6, 3}, {6, 3}, {4, 2}, {2, 1}}},
};

typedef struct player {
    const fixture *f;
    const trace *t;
    int n_calls, n_rounds, n_tokens;
    so_step_info sum;
    so_request_stats at_end; /* copied in the last event */
} player;

static int play(void *user, const so_draft_query *q, int32_t *ids, int32_t *parents) {
    player *p = user;
    int at = q->n_tokens - q->n_prompt, n = 0, parent = -1;
    int right = p->t->rounds[p->n_rounds].right, wrong = p->t->rounds[p->n_rounds].wrong;
    p->n_calls++;
    if (right < 0)
        return -1;
    for (int d = 0; d < SO_MIN(right + wrong, q->max_depth); d++) {
        for (int k = 0; k < p->t->siblings; k++, n++) {
            ids[n] = 4 + k; /* banned, so it is never accepted */
            parents[n] = parent;
        }
        ids[n] = d < right ? p->f->text[at + d] : 3;
        parents[n] = parent;
        parent = n++;
    }
    return n;
}

static void on_round(void *user, const so_round *round) {
    (void)round;
    ((player *)user)->n_rounds++;
}

static bool on_event(void *user, const so_event *ev) {
    player *p = user;
    if (ev->token == SO_TOKEN_NONE)
        p->at_end = *so_request_get_stats(ev->req);
    else
        p->n_tokens++;
    return p->t->how != AT_CANCEL || p->n_tokens <= END_AT;
}

static void on_step(void *user, const so_step_info *s) {
    player *p = user;
    p->sum.n_requests += s->n_requests;
    p->sum.drafted += s->drafted;
    p->sum.tested += s->tested;
    p->sum.accepted += s->accepted;
    p->sum.emitted += s->emitted;
    p->sum.ended += s->ended;
    assert_true(s->pass_ms > 0 && s->host_ms >= 0);
}

/* want −1 means "nothing was counted", which JSON shows as null. */
static void expect_number(const json_t *o, const char *name, double want) {
    const json_t *got = json_object_get(o, name);
    assert_non_null(got);
    if (want < 0)
        assert_true(json_is_null(got));
    else if (json_number_value(got) != want)
        fail_msg("%s is %.17g, not %.17g", name, json_number_value(got), want);
}

static double ratio(double a, double b) { return b > 0 ? a / b : -1; }

static void check_json(const trace *t, const so_request *r) {
    const so_request_stats *s = so_request_get_stats(r);
    so_spec_label who = so_figures_label(r);
    json_t *spec = so_figures_spec(&who, s), *timings = so_figures_timings(s);
    expect_number(timings, "predicted_n", t->predicted);
    expect_number(timings, "draft_n", t->drafted);
    expect_number(timings, "draft_n_accepted", t->accepted);
    expect_number(spec, "rounds", t->want_rounds);
    expect_number(spec, "tokens_per_pass", t->tokens_per_pass);
    expect_number(spec, "mean_accepted", ratio(t->accepted, t->want_rounds));
    expect_number(spec, "alpha", ratio(t->accepted, t->tested));
    expect_number(spec, "acceptance_rate", ratio(t->accepted, t->drafted));
    expect_number(spec, "round_rate", t->round_rate);
    expect_number(spec, "verify_ms", s->verify_ms);
    const json_t *depths = json_object_get(spec, "per_depth");
    for (size_t i = 0; i <= LENGTH; i++) {
        const json_t *at = json_array_get(depths, i);
        assert_int_equal(json_integer_value(json_object_get(at, "tested")), t->per_depth[i].tested);
        assert_int_equal(json_integer_value(json_object_get(at, "accepted")),
                         t->per_depth[i].accepted);
    }
    json_decref(spec);
    json_decref(timings);
}

/* Sums over the request, over its steps, and of the engine. */
static void check_sums(const trace *t, const so_engine *e, const player *p,
                       const so_request_stats *s) {
    so_engine_stats all;
    so_engine_get_stats(e, &all);
    assert_int_equal(s->rounds, t->want_rounds);
    assert_int_equal(s->drafted_rounds, t->drafts);
    assert_int_equal(s->asked_rounds, t->asked);
    assert_int_equal(s->tested_n, t->tested);
    assert_int_equal(s->end_n, t->how == AT_TOKEN);
    assert_int_equal(p->sum.n_requests, t->want_rounds);
    assert_int_equal(p->sum.drafted, t->drafted);
    assert_int_equal(p->sum.tested, t->tested);
    assert_int_equal(p->sum.accepted, t->accepted);
    assert_int_equal(p->sum.emitted, t->predicted);
    assert_int_equal(p->sum.ended, t->how == AT_TOKEN);
    assert_int_equal(all.drafted, t->drafted);
    assert_int_equal(all.tested, t->tested);
    assert_int_equal(all.accepted, t->accepted);
    assert_int_equal(all.emitted, t->predicted);
}

static so_engine *open_engine(fixture *f, player *p) {
    so_engine_opts eo;
    so_err err = {0};
    so_engine *e = NULL;
    so_engine_defaults(f->b.model, &eo);
    eo.max_draft = 16;
    eo.user_tree_drafter = play;
    eo.drafter_user = p;
    eo.on_step = on_step;
    eo.step_user = p;
    SO_OK_OR_FAIL(so_engine_create(f->b.model, f->b.tok, &eo, &e, &err), err);
    return e;
}

static void run_trace(fixture *f, const trace *t) {
    player p = {.f = f, .t = t};
    so_err err = {0};
    so_engine *e = open_engine(f, &p);
    so_str stop = so_str_c(f->stop);
    so_request *r = NULL;
    so_request_opts o = {.prompt = f->prompt,
                         .n_prompt = 2,
                         .sample = f->sample,
                         .max_tokens = t->max_tokens,
                         .ignore_end = t->how != AT_TOKEN,
                         .stops = &stop,
                         .n_stops = t->how == AT_STRING,
                         .spec = {.drafter = t->length ? "user" : NULL, .length = t->length},
                         .on_event = on_event,
                         .on_round = on_round,
                         .user = &p};
    print_message("# %s\n", t->name);
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    SO_OK_OR_FAIL(so_engine_run(e, r, &err), err);
    int n;
    const int32_t *out = so_request_output(r, &n);
    assert_int_equal(n, t->predicted);
    assert_memory_equal(out, f->text, (size_t)n * sizeof *out);
    assert_int_equal(p.n_calls, t->asked);
    assert_int_equal(p.n_tokens, t->predicted);
    check_sums(t, e, &p, so_request_get_stats(r));
    check_json(t, r);
    assert_memory_equal(&p.at_end, so_request_get_stats(r), sizeof p.at_end);
    so_request_free(r);
    so_engine_free(e);
}

static void test_traces(void **state) {
    for (size_t i = 0; i < SO_LEN(TRACES); i++)
        run_trace(*state, &TRACES[i]);
}

/* Rates of several requests are computed from the sums of their counts. */
static void test_sums(void **state) {
    (void)state;
    so_request_stats a = {.predicted_n = 10,
                          .end_n = 1,
                          .rounds = 4,
                          .draft_n = 11,
                          .draft_n_accepted = 8,
                          .tested_n = 9,
                          .asked_rounds = 4,
                          .round_rate_sum = 2,
                          .verify_ms = 3};
    so_request_stats b = {.predicted_n = 9, .rounds = 9, .asked_rounds = 1, .verify_ms = 4};
    so_stats_add(&a, &b);
    so_rates x = so_stats_rates(&a);
    assert_true(x.tokens_per_pass == 20.0 / 13 && x.mean_accepted == 8.0 / 13);
    assert_true(x.alpha == 8.0 / 9 && x.acceptance_rate == 8.0 / 11 && x.round_rate == 2.0 / 5);
    assert_true(a.verify_ms == 7);
    x = so_stats_rates(&(so_request_stats){0});
    assert_true(x.tokens_per_pass == -1 && x.mean_accepted == -1 && x.alpha == -1 &&
                x.acceptance_rate == -1 && x.round_rate == -1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_traces),
        cmocka_unit_test(test_sums),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
