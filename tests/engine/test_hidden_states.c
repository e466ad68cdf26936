/* Draft models that read the target's hidden states, in the engine. An echo model (so_shape.h)
 * depends on the hidden state alone, so its guesses show which one it got: for every accepted token
 * it must be the one that the token was sampled from. Whatever a draft reads, the text equals plain
 * decoding's. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "so_cases.h"
#include "so_lossless.h"
#include "so_shape.h"

enum { N_VOCAB = 67, CTX = 192, N_PROMPT = 13, N_PREDICT = 90 };

static void open_target(so_rig *r) {
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = N_VOCAB, .n_ctx = CTX, .seed = 5};
    so_shape_open(r, &shape, &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 1});
}

static void open_draft(so_rig *r, bool echo) {
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = N_VOCAB, .n_ctx = CTX,
                      .d_state = 32,  .echo = echo,  .seed = 5};
    so_shape_open(r, &shape,
                  &(so_rig_opts){
                      .level = SO_CPU_AUTO, .model = {.draft = true}, .max_rows = 8, .n_pages = 1});
}

static so_engine *open_engine(const so_rig *target, const so_rig *draft, int n_parallel) {
    return so_case_engine(target, &(so_case_engine_opts){.draft = draft,
                                                         .n_parallel = n_parallel,
                                                         .n_batch = 5,
                                                         .n_ctx = CTX,
                                                         .draft_temp = -1});
}

static so_request_opts opts_of(const int32_t *prompt, float temp, const char *drafter, int length) {
    so_request_opts o = {.prompt = prompt,
                         .n_prompt = N_PROMPT,
                         .max_tokens = N_PREDICT,
                         .spec = {.drafter = drafter, .length = length}};
    so_sample_defaults(&o.sample);
    o.sample.temp = temp;
    o.sample.seed = 3;
    return o;
}

typedef struct rounds {
    int n, n_without_state; /* n_without_state: the first guess was that of no hidden state */
} rounds;

/* At temperature 0 the likeliest token of the root's hidden state is the root itself. After a guess
 * there is no hidden state, so the next guess is token 0. */
static void on_round(void *user, const so_round *round) {
    rounds *seen = user;
    const so_tree *t = round->tree;
    if (t->n_nodes == 1)
        return;
    if (round->index == 0) { /* the prompt's last token was not sampled */
        assert_int_equal(t->nodes[1].token, 0);
        seen->n_without_state++;
        return;
    }
    assert_int_equal(t->nodes[1].token, t->nodes[0].token);
    if (t->n_nodes > 2)
        assert_int_equal(t->nodes[2].token, 0);
    seen->n++;
}

/* Also if the draft reads several tokens at once, because guesses were accepted. */
static void hidden_states_belong_to_their_tokens(void **state) {
    (void)state;
    so_rig target, echo;
    int32_t prompt[N_PROMPT];
    open_target(&target);
    open_draft(&echo, true);
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, prompt, N_PROMPT);
    for (int length = 1; length <= 3; length++) {
        so_engine *e = open_engine(&target, &echo, 1);
        so_request_opts o = opts_of(prompt, 0, "model", length);
        rounds seen = {0};
        o.on_round = on_round;
        o.user = &seen;
        so_request_free(so_case_finish(e, &o));
        assert_true(seen.n > 10);
        assert_int_equal(seen.n_without_state, 1);
        so_engine_free(e);
    }
    so_rig_close(&target);
    so_rig_close(&echo);
}

static const char *const DRAFTERS[] = {"model", "lookup,model", "model+lookup", "model(ngram)",
                                       "auto"};

/* Greedy and sampled with the same noise, alone and together. */
static void text_equals_plain_decoding(void **state) {
    (void)state;
    so_rig target, drafts[2];
    int32_t prompt[N_PROMPT];
    open_target(&target);
    open_draft(&drafts[0], true);
    open_draft(&drafts[1], false);
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, prompt, N_PROMPT);
    for (int variant = 0; variant < 4; variant++) {
        so_engine *e = open_engine(&target, &drafts[variant % 2], 4);
        so_request *r[2 * SO_LEN(DRAFTERS)], *plain;
        so_request_opts o = opts_of(prompt, variant < 2 ? 0 : 0.9f, NULL, 0);
        so_err err = {0};
        int n, n_want;
        plain = so_case_finish(e, &o);
        const int32_t *want = so_request_output(plain, &n_want);
        assert_int_equal(n_want, N_PREDICT);
        for (size_t i = 0; i < SO_LEN(r); i++) {
            o.spec = (so_spec_opts){.drafter = DRAFTERS[i / 2], .length = i % 2 ? 3 : 0};
            SO_OK_OR_FAIL(so_engine_submit(e, &o, &r[i], &err), err);
        }
        so_case_run(e);
        for (size_t i = 0; i < SO_LEN(r); i++) {
            const int32_t *out = so_request_output(r[i], &n);
            assert_int_equal(n, n_want);
            assert_memory_equal(out, want, (size_t)n * sizeof *out);
            so_request_free(r[i]);
        }
        so_request_free(plain);
        so_engine_free(e);
    }
    so_rig_close(&target);
    so_rig_close(&drafts[0]);
    so_rig_close(&drafts[1]);
}

enum { N_SEEDS = SO_TEST_SANITIZED ? 150 : 1200, N_SHORT = 5 };

/* Counts each token at each of the first positions, over many seeds. */
static void count(so_engine *e, const int32_t *prompt, const char *drafter, int length,
                  uint64_t first_seed, int hist[N_SHORT][N_VOCAB]) {
    memset(hist, 0, N_SHORT * sizeof *hist);
    for (uint64_t s = 0; s < N_SEEDS; s++) {
        so_request_opts o = opts_of(prompt, 0.9f, drafter, length);
        int n;
        o.spec.verify = SO_VERIFY_REJECT;
        o.max_tokens = N_SHORT;
        o.sample.seed = first_seed + s;
        so_request *r = so_case_finish(e, &o);
        const int32_t *out = so_request_output(r, &n);
        assert_int_equal(n, N_SHORT);
        for (int i = 0; i < n; i++)
            hist[i][out[i]]++;
        so_request_free(r);
    }
}

/* The output of `reject` has plain decoding's distribution, whatever the draft reads. */
static void reject_is_exact(void **state) {
    (void)state;
    static int plain[N_SHORT][N_VOCAB], got[N_SHORT][N_VOCAB];
    static const struct {
        const char *drafter;
        int length;
    } variants[] = {{"model", 2}, {"model", 0}, {"model+lookup", 2}};
    so_rig target, draft;
    int32_t prompt[N_PROMPT];
    open_target(&target);
    open_draft(&draft, false);
    so_shape_tokens(&(so_shape){.n_vocab = N_VOCAB}, 8, prompt, N_PROMPT);
    so_engine *e = open_engine(&target, &draft, 1);
    count(e, prompt, NULL, 0, 1, plain);
    for (size_t w = 0; w < SO_LEN(variants); w++) {
        count(e, prompt, variants[w].drafter, variants[w].length, (w + 1) * 100000, got);
        for (int i = 0; i < N_SHORT; i++) {
            double chi2 = 0;
            int df = -1;
            for (int v = 0; v < N_VOCAB; v++) {
                double a = plain[i][v], b = got[i][v];
                df += a + b > 0;
                chi2 += a + b > 0 ? (a - b) * (a - b) / (a + b) : 0;
            }
            if (so_chi2_tail(chi2, df) < 1e-6)
                fail_msg("%s, place %d: chi-square %g of %d", variants[w].drafter, i, chi2, df);
        }
    }
    so_engine_free(e);
    so_rig_close(&target);
    so_rig_close(&draft);
}

static void another_width_is_refused(void **state) {
    (void)state;
    so_rig target, draft;
    int32_t prompt[N_PROMPT] = {0};
    open_target(&target);
    so_shape shape = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = N_VOCAB,
                      .n_ctx = CTX,   .d_state = 64, .seed = 5};
    so_shape_open(&draft, &shape, &(so_rig_opts){.level = SO_CPU_AUTO, .model = {.draft = true}});
    so_engine *e = open_engine(&target, &draft, 1);
    so_request_opts o = opts_of(prompt, 0, "model", 1);
    so_request *r = NULL;
    so_err err = {0};
    assert_int_equal(so_engine_submit(e, &o, &r, &err), SO_EMISMATCH);
    assert_non_null(strstr(err.msg, "takes hidden states of width 64; the target's have width 32"));
    so_engine_free(e);
    so_rig_close(&target);
    so_rig_close(&draft);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hidden_states_belong_to_their_tokens),
        cmocka_unit_test(text_equals_plain_decoding),
        cmocka_unit_test(reject_is_exact),
        cmocka_unit_test(another_width_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
