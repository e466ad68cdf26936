/* Damaged weights: one token's embedding is NaN, in the target or in the draft. A row that plain
 * decoding would never have computed does not matter, however it was guessed. If plain decoding
 * itself reaches the token, the request ends with an error that names the cause, after the tokens
 * that were right. Other requests are not affected in either case. */
#include "so_test.h"

#include <limits.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/mem.h"
#include "so_cases.h"
#include "so_shape.h"

enum { N_CASES = 4, N_PREDICT = SO_CASE_PREDICT, N_VOCAB = 131 };

typedef struct fixture {
    so_rig sound;
    so_case cases[N_CASES]; /* greedy, sampled, greedy with penalties, sampled with cuts */
} fixture;

/* The same weights each time, except for the embedding of nan_token; 0: none. */
static void open_model(so_rig *r, int32_t nan_token) {
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2,          .n_vocab = N_VOCAB,
                      .n_ctx = 128,   .nan_token = nan_token, .seed = 1};
    so_shape_open(r, &shape, &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 4});
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    open_model(&f->sound, 0);
    for (int c = 0; c < N_CASES; c++) {
        so_case *x = &f->cases[c];
        x->n_prompt = 9 + 4 * c;
        so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 3 + (uint64_t)c, x->prompt, x->n_prompt);
        so_sample_defaults(&x->sample);
        x->sample.temp = c % 2 ? 0.7f : 0;
        x->sample.seed = 8 + (uint64_t)c;
        x->sample.repeat_penalty = c == 2 ? 1.2f : 1;
        x->sample.top_k = c == 3 ? 12 : 0;
    }
    so_case_plain(&f->sound, f->cases, N_CASES);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_rig_close(&f->sound);
    free(f);
    return 0;
}

static so_engine *open_engine(const so_rig *target, const so_rig *draft, int n_parallel,
                              so_draft_fn *fn, void *user) {
    return so_case_engine(target, &(so_case_engine_opts){.draft = draft,
                                                         .n_parallel = n_parallel,
                                                         .n_batch = 32,
                                                         .draft_temp = -1,
                                                         .drafter = fn,
                                                         .drafter_user = user});
}

/* Number of the first n tokens of a case that come before `token`; n if it does not occur. */
static int n_before(const so_case *c, int32_t token, int n) {
    int i = 0;
    while (i < n && c->want[i] != token)
        i++;
    return i;
}

static bool in_prompt_of(const so_case *c, int32_t token) {
    bool found = false;
    for (int i = 0; i < c->n_prompt; i++)
        found |= c->prompt[i] == token;
    return found;
}

/* A token that occurs in the answer of case `only`, before its end, and in no other prompt or
 * answer; for −1 one that no case contains. */
static int32_t find_token(const fixture *f, int only) {
    for (int32_t t = 1; t < N_VOCAB; t++) {
        bool fits = true;
        for (int c = 0; c < N_CASES && fits; c++) {
            int at = n_before(&f->cases[c], t, N_PREDICT);
            fits = !in_prompt_of(&f->cases[c], t) &&
                   (c == only ? at < N_PREDICT - 1 : at == N_PREDICT);
        }
        if (fits)
            return t;
    }
    fail_msg("no token for case %d", only);
    return 0;
}

/* --- guesses --- */

typedef struct guesser {
    const fixture *f;
    int32_t nan_token;
    int right; /* right guesses before nan_token */
} guesser;

/* Identifies the case by its prompt. */
static int guess(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                 int max) {
    const guesser *g = user;
    for (int c = 0; c < N_CASES; c++) {
        const so_case *x = &g->f->cases[c];
        if (n_prompt != x->n_prompt || tokens[0] != x->prompt[0])
            continue;
        for (int i = 0; i < max; i++) {
            int at = n_tokens - n_prompt + i;
            out[i] = i % (g->right + 1) < g->right && at < x->n_want ? x->want[at] : g->nan_token;
        }
        return max;
    }
    return 0;
}

/* nan_token is guessed in every step and never accepted: the text equals plain decoding's, alone
 * and beside other requests, also on pages that earlier requests used. */
static void test_unaccepted_nonfinite_guess_changes_nothing(void **state) {
    fixture *f = *state;
    so_rig damaged;
    guesser g = {.f = f, .nan_token = find_token(f, -1)};
    open_model(&damaged, g.nan_token);
    for (int n_parallel = 1; n_parallel <= N_CASES; n_parallel += N_CASES - 1) {
        so_engine *e = open_engine(&damaged, NULL, n_parallel, guess, &g);
        for (int variant = 0; variant < 12; variant++) {
            so_request *r[N_CASES];
            g.right = variant % 4;
            for (int c = 0; c < N_CASES; c++) {
                so_spec_opts spec = {.drafter = "user", .length = (int[]){1, 3, 7}[variant / 4]};
                f->cases[c].n_logprobs = (c + variant) % 3;
                r[c] = so_case_submit(e, &f->cases[c], &spec);
            }
            so_case_run(e);
            for (int c = 0; c < N_CASES; c++) {
                assert_true(so_case_same(r[c], &f->cases[c]));
                assert_true(so_request_get_stats(r[c])->draft_n >= N_PREDICT / 2);
                so_request_free(r[c]);
            }
        }
        so_engine_free(e);
    }
    so_rig_close(&damaged);
}

/* With `reject`, nan_token is accepted with the probability that the target gives it. If and only
 * if it is accepted, its request ends after it. Each run samples anew, because with a user's
 * drafter the nonce is random. */
static void test_accepted_nonfinite_guess_ends_its_request(void **state) {
    fixture *f = *state;
    so_rig damaged;
    int n_ended = 0, n_whole = 0;
    guesser g = {.f = f, .nan_token = find_token(f, -1)};
    open_model(&damaged, g.nan_token);
    so_engine *e = open_engine(&damaged, NULL, 2, guess, &g);
    for (int seed = 0; seed < 300; seed++) {
        so_case *c = &f->cases[1], hot = *c;
        hot.sample.seed = (uint64_t)seed;
        so_request *r = so_case_submit(
            e, &hot, &(so_spec_opts){.drafter = "user", .length = 2, .verify = SO_VERIFY_REJECT});
        so_request *beside = so_case_submit(e, c, &(so_spec_opts){0});
        so_case_run(e);
        int n, n_nan = 0;
        const int32_t *out = so_request_output(r, &n);
        for (int i = 0; i < n; i++)
            n_nan += out[i] == g.nan_token;
        bool ended = so_request_finish(r) == SO_FINISH_ERROR;
        bool last = n == N_PREDICT && out[n - 1] == g.nan_token; /* no row after it is needed */
        assert_int_equal(n_nan, ended || last);
        assert_true(ended ? out[n - 1] == g.nan_token : n == N_PREDICT);
        n_ended += ended;
        n_whole += !ended;
        assert_true(so_case_same(beside, c));
        so_request_free(r);
        so_request_free(beside);
    }
    assert_true(n_ended > 0 && n_whole > 0);
    so_engine_free(e);
    so_rig_close(&damaged);
}

/* --- the text itself --- */

static void expect_error_after(const so_request *r, const so_case *c, int32_t token) {
    assert_int_equal(so_request_finish(r), SO_FINISH_ERROR);
    assert_int_equal(so_request_error(r)->code, SO_EFORMAT);
    assert_non_null(strstr(so_request_error(r)->msg, "logits are not finite; the weights of"));
    so_case_expect(r, c->want, n_before(c, token, N_PREDICT) + 1);
}

/* Plain decoding reaches nan_token: the same tokens and then the same error with every drafter, and
 * other requests are not affected. */
static void test_nonfinite_token_in_the_text(void **state) {
    fixture *f = *state;
    static const char *const drafters[] = {NULL, "predict", "random", "lookup,ngram", "user"};
    static const so_verify_mode modes[] = {SO_VERIFY_MATCH, SO_VERIFY_REJECT, SO_VERIFY_LENIENT};
    for (int affected = 0; affected < N_CASES; affected++) {
        so_rig damaged;
        guesser g = {.f = f, .nan_token = find_token(f, affected), .right = 2};
        open_model(&damaged, g.nan_token);
        so_engine *e = open_engine(&damaged, NULL, N_CASES, guess, &g);
        for (int k = 0; k < 10; k++) {
            so_request *r[N_CASES];
            so_spec_opts spec = {.drafter = drafters[k / 2], .length = drafters[k / 2] ? 3 : 0};
            for (int c = 0; c < N_CASES; c++) {
                f->cases[c].n_logprobs = (c + k) % 2; /* greedy by argmax only, and with logits */
                spec.lenience = 1;
                spec.verify = f->cases[c].sample.temp > 0 ? SO_VERIFY_MATCH : modes[k % 3];
                r[c] = so_case_submit(e, &f->cases[c], &spec);
            }
            so_case_run(e);
            for (int c = 0; c < N_CASES; c++) {
                if (c == affected)
                    expect_error_after(r[c], &f->cases[c], g.nan_token);
                else
                    assert_true(so_case_same(r[c], &f->cases[c]));
                so_request_free(r[c]);
            }
        }
        so_engine_free(e);
        so_rig_close(&damaged);
    }
}

/* In the prompt: an error before the first token, also if the prompt takes several passes. */
static void test_nonfinite_token_in_the_prompt(void **state) {
    fixture *f = *state;
    so_rig damaged;
    int32_t token = f->cases[3].prompt[2];
    open_model(&damaged, token);
    so_engine *e = so_case_engine(
        &damaged, &(so_case_engine_opts){.n_parallel = 2, .n_batch = 4, .draft_temp = -1});
    assert_false(in_prompt_of(&f->cases[0], token) ||
                 n_before(&f->cases[0], token, N_PREDICT) < 24);
    for (int k = 0; k < 2; k++) {
        so_spec_opts spec = {.drafter = k ? "ngram" : NULL};
        so_request *failing = so_case_submit(e, &f->cases[3], &spec);
        so_request *good = so_case_submit(e, &f->cases[0], &spec);
        so_case_run(e);
        int n;
        so_request_output(failing, &n);
        assert_int_equal(n, 0);
        assert_int_equal(so_request_error(failing)->code, SO_EFORMAT);
        assert_true(so_case_same(good, &f->cases[0]));
        so_request_free(failing);
        so_request_free(good);
    }
    so_engine_free(e);
    so_rig_close(&damaged);
}

/* --- the draft --- */

/* The draft's embedding of a token is NaN: the request whose text contains it has no drafts after
 * it, the other keeps its drafts, and all texts are the same. */
static void test_nonfinite_draft(void **state) {
    fixture *f = *state;
    for (int variant = 0; variant < 2; variant++) {
        so_rig draft;
        so_case *affected = &f->cases[variant];
        int32_t token = variant ? affected->prompt[3] : find_token(f, 0);
        open_model(&draft, token);
        so_engine *e = open_engine(&f->sound, &draft, 2, NULL, NULL);
        for (int verify = 0; verify < 2; verify++) {
            so_spec_opts spec = {.drafter = "model",
                                 .length = 2,
                                 .verify = verify && !variant ? SO_VERIFY_REJECT : SO_VERIFY_MATCH};
            so_request *r = so_case_submit(e, affected, &spec);
            so_request *beside = so_case_submit(e, &f->cases[2], &spec);
            so_case_run(e);
            int n = so_request_get_stats(r)->draft_n, at = n_before(affected, token, N_PREDICT);
            assert_true(so_case_same(r, affected));
            assert_true(so_case_same(beside, &f->cases[2]));
            assert_true(variant ? n == 0 : n > at / 2 && n <= at + 2);
            assert_int_equal(so_request_get_stats(beside)->draft_n, 2 * N_PREDICT / 3);
            so_request_free(r);
            so_request_free(beside);
        }
        so_engine_free(e);
        so_rig_close(&draft);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_unaccepted_nonfinite_guess_changes_nothing),
        cmocka_unit_test(test_accepted_nonfinite_guess_ends_its_request),
        cmocka_unit_test(test_nonfinite_token_in_the_text),
        cmocka_unit_test(test_nonfinite_token_in_the_prompt),
        cmocka_unit_test(test_nonfinite_draft),
    };
    so_log_set_level(SO_LOG_ERROR); /* damaged drafts would log warnings */
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
