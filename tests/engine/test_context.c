/* The ends of the target's and the draft's context: drafts get shorter before either end, the
 * target's last position is decoded without guesses, and the text equals plain decoding's up to the
 * end. A request that cannot fit either model is refused at submission, with the numbers. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/mem.h"
#include "so_cases.h"
#include "so_shape.h"

enum { CTX = 96, DRAFT_CTX = 40, N_PROMPT = 21 };

typedef struct fixture {
    so_rig target;
    so_rig same_weights;  /* the target's weights, a shorter context: every guess is accepted */
    so_rig other_weights; /* other weights, a shorter context */
    so_rig longer;        /* the target's weights, a longer context */
    int32_t prompt[CTX];
    int32_t want[2][CTX]; /* greedy and sampled, from N_PROMPT tokens to the end */
} fixture;

static void open_shape(so_rig *r, int n_ctx, uint64_t seed) {
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = 67, .n_ctx = n_ctx, .seed = seed};
    so_shape_open(r, &shape, &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 1});
}

static so_engine *open_engine(const fixture *f, const so_rig *draft) {
    return so_case_engine(
        &f->target,
        &(so_case_engine_opts){
            .draft = draft, .n_parallel = 1, .n_batch = 64, .n_ctx = CTX, .draft_temp = -1});
}

static so_request_opts opts_of(const fixture *f, int n_prompt, bool sampled) {
    so_request_opts o = {.prompt = f->prompt, .n_prompt = n_prompt, .max_tokens = -1};
    so_sample_defaults(&o.sample);
    o.sample.temp = sampled ? 0.9f : 0;
    o.sample.seed = 5;
    return o;
}

static so_request *run(so_engine *e, const so_request_opts *o) {
    so_request *r = so_case_finish(e, o);
    assert_int_equal(so_request_finish(r), SO_FINISH_LENGTH);
    return r;
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    open_shape(&f->target, CTX, 1);
    open_shape(&f->same_weights, DRAFT_CTX, 1);
    open_shape(&f->other_weights, DRAFT_CTX, 2);
    open_shape(&f->longer, 4 * CTX, 1);
    so_shape_tokens(&(so_shape){.n_vocab = 67}, 9, f->prompt, CTX);
    so_engine *e = open_engine(f, NULL);
    for (int variant = 0; variant < 2; variant++) {
        so_request_opts o = opts_of(f, N_PROMPT, variant == 1);
        so_request *r = run(e, &o);
        int n;
        const int32_t *out = so_request_output(r, &n);
        assert_int_equal(n, CTX - N_PROMPT);
        memcpy(f->want[variant], out, (size_t)n * sizeof *out);
        so_request_free(r);
    }
    so_engine_free(e);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_rig_close(&f->target);
    so_rig_close(&f->same_weights);
    so_rig_close(&f->other_weights);
    so_rig_close(&f->longer);
    free(f);
    return 0;
}

/* --- lengths near an end --- */

typedef struct watcher {
    int length, draft_ctx; /* draft_ctx: longest text that the draft can follow */
    bool all_accepted;     /* every guess must be accepted */
    int n_plain;           /* rounds without guesses */
} watcher;

/* The draft computes a text of n tokens and all guesses but the last. The target computes n tokens
 * and all guesses, and the token after them must still fit its context. */
static int expected_guesses(const watcher *w, int n) {
    int limit = SO_MIN(w->length, SO_MIN(w->draft_ctx - n + 1, CTX - n - 1));
    return SO_MAX(limit, 0);
}

static void on_round(void *user, const so_round *round) {
    watcher *w = user;
    int n_out;
    so_request_output(round->req, &n_out);
    int guesses = round->tree->n_nodes - 1, want = expected_guesses(w, N_PROMPT + n_out);
    if (guesses != want)
        fail_msg("%d guesses after %d tokens; %d fit", guesses, N_PROMPT + n_out, want);
    if (w->all_accepted)
        assert_int_equal(round->verdict->n_accepted, guesses);
    w->n_plain += guesses == 0;
}

static void check_lengths(const fixture *f, const so_rig *draft, int draft_ctx, bool all_accepted) {
    for (int variant = 0; variant < 2; variant++)
        for (int length = 1; length <= 16; length += length < 3 ? 1 : 13) {
            watcher w = {.length = length, .draft_ctx = draft_ctx, .all_accepted = all_accepted};
            so_engine *e = open_engine(f, draft);
            so_request_opts o = opts_of(f, N_PROMPT, variant == 1);
            o.spec = (so_spec_opts){.drafter = "model", .length = length};
            o.on_round = on_round;
            o.user = &w;
            so_request *r = run(e, &o);
            so_case_expect(r, f->want[variant], CTX - N_PROMPT);
            if (draft_ctx < CTX) /* beyond its context every round has no guesses */
                assert_true(w.n_plain >= CTX - draft_ctx - 2);
            so_request_free(r);
            so_engine_free(e);
        }
}

static void test_drafts_shorten_before_the_drafts_end(void **state) {
    fixture *f = *state;
    check_lengths(f, &f->same_weights, DRAFT_CTX, true);
    check_lengths(f, &f->other_weights, DRAFT_CTX, false);
}

static void test_drafts_shorten_before_the_targets_end(void **state) {
    fixture *f = *state;
    check_lengths(f, &f->target, CTX, true);
    check_lengths(f, &f->longer, CTX, true);
}

/* With the planner, and with a second drafter that takes over, the text is the same. */
static void test_planned_and_mixed(void **state) {
    fixture *f = *state;
    static const char *const specs[] = {"model", "model,lookup", "ngram+model", "model(lookup)"};
    for (size_t s = 0; s < SO_LEN(specs); s++)
        for (int variant = 0; variant < 2; variant++) {
            so_engine *e = open_engine(f, s % 2 ? &f->same_weights : &f->other_weights);
            so_request_opts o = opts_of(f, N_PROMPT, variant == 1);
            o.spec = (so_spec_opts){.drafter = specs[s], .length = s == 1 ? 4 : 0};
            so_request *r = run(e, &o);
            so_case_expect(r, f->want[variant], CTX - N_PROMPT);
            so_request_free(r);
            so_engine_free(e);
        }
}

/* A prompt that leaves room for one or two tokens. */
static void test_last_position_is_decoded_plainly(void **state) {
    fixture *f = *state;
    for (int left = 1; left <= 2; left++) {
        so_engine *e = open_engine(f, &f->longer);
        so_request_opts o = opts_of(f, CTX - left, false);
        o.spec = (so_spec_opts){.drafter = "model", .length = 8};
        so_request *r = run(e, &o);
        const so_request_stats *s = so_request_get_stats(r);
        assert_int_equal(s->predicted_n, left);
        assert_int_equal(s->draft_n, left - 1);
        so_request_free(r);
        so_engine_free(e);
    }
}

/* --- refusals --- */

/* part: expected in the message; NULL: the request must be accepted. */
static void expect(so_engine *e, const so_request_opts *o, const char *part) {
    so_err err = {0};
    so_request *r = NULL;
    int rc = so_engine_submit(e, o, &r, &err);
    if (!part) {
        SO_OK_OR_FAIL(rc, err);
        so_request_free(r);
        return;
    }
    assert_int_equal(rc, SO_ELIMIT);
    assert_null(r);
    if (!strstr(err.msg, part))
        fail_msg("'%s' does not say '%s'", err.msg, part);
}

static void test_both_lengths_are_checked(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(f, &f->same_weights);
    so_request_opts o = opts_of(f, N_PROMPT, false);
    o.max_tokens = CTX - N_PROMPT;
    expect(e, &o, NULL);
    o.max_tokens++;
    expect(e, &o, "--predict 76 after a prompt of 21 tokens does not fit the context of 96");
    o.max_tokens = INT32_MAX;
    expect(e, &o, "--ctx-size");
    o.spec = (so_spec_opts){.drafter = "model", .length = 4};
    o.max_tokens = DRAFT_CTX - N_PROMPT;
    expect(e, &o, NULL);
    o.max_tokens++;
    expect(e, &o, "--predict 20 after a prompt of 21 tokens does not fit the draft model's");
    expect(e, &o, "context of 40");
    expect(e, &o, "--spec model,lookup");
    o.spec.drafter = "model,lookup";
    expect(e, &o, NULL);
    o.spec.drafter = "model+ngram";
    expect(e, &o, NULL);
    o.spec.drafter = "model(lookup)"; /* the inner drafter drafts for the draft model only */
    expect(e, &o, "draft model's");
    o.spec.drafter = "model";
    o.max_tokens = -1;
    expect(e, &o, NULL);
    o.n_prompt = DRAFT_CTX;
    expect(e, &o, NULL);
    o.n_prompt = DRAFT_CTX + 1;
    expect(e, &o, "the prompt has 41 tokens, the draft model's context 40");
    so_engine_free(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_drafts_shorten_before_the_drafts_end),
        cmocka_unit_test(test_drafts_shorten_before_the_targets_end),
        cmocka_unit_test(test_planned_and_mixed),
        cmocka_unit_test(test_last_position_is_decoded_plainly),
        cmocka_unit_test(test_both_lengths_are_checked),
    };
    so_log_set_level(SO_LOG_ERROR); /* drafts with a shorter context would log warnings */
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
