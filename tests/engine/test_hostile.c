/* Speculation with bad input: drafters that return too many guesses, none, or invalid ones; drafts
 * that do not fit the target; cuts that leave no token. The result is a clear error or the text of
 * plain decoding, never a wrong token. Damaged weights: test_nonfinite.c. */
#include "so_test.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "engine/bundle.h"
#include "so_cases.h"
#include "so_shape.h"

typedef struct fixture {
    so_rig target, draft;
    so_case cases[SO_CASES];
} fixture;

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    so_case_open(&f->target, "llama", &f->draft, "qwen3", f->cases);
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

static so_engine *open_engine(const so_rig *target, const so_rig *draft, so_draft_fn *fn,
                              void *user) {
    return so_case_engine(target, &(so_case_engine_opts){.draft = draft,
                                                         .n_parallel = 1,
                                                         .n_batch = 64,
                                                         .draft_temp = -1,
                                                         .drafter = fn,
                                                         .drafter_user = user});
}

/* --- invalid answers of a user's drafter --- */

typedef struct bad_drafter {
    int n_returned; /* return value; INT_MIN: max */
    int32_t id;     /* the id to guess */
    int n_called;
} bad_drafter;

static int draft_badly(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                       int max) {
    bad_drafter *s = user;
    (void)tokens;
    (void)n_tokens;
    (void)n_prompt;
    s->n_called++;
    for (int i = 0; i < max; i++)
        out[i] = s->id;
    return s->n_returned == INT_MIN ? max : s->n_returned;
}

static void test_invalid_user_drafts(void **state) {
    fixture *f = *state;
    const bad_drafter bad_drafters[] = {{17, 1, 0},
                                        {INT_MAX, 1, 0},
                                        {-1, 1, 0},
                                        {INT_MIN, -1, 0},
                                        {INT_MIN, INT32_MAX, 0},
                                        {INT_MIN, INT32_MIN, 0},
                                        {INT_MIN, 131, 0},
                                        {0, 1, 0},
                                        {INT_MIN, 130, 0}};
    for (size_t i = 0; i < SO_LEN(bad_drafters); i++)
        for (int length = 0; length <= 16; length += 8) {
            bad_drafter s = bad_drafters[i];
            so_engine *e = open_engine(&f->target, NULL, draft_badly, &s);
            for (int c = 0; c < 3; c++) {
                so_request *r = so_case_submit(
                    e, &f->cases[c], &(so_spec_opts){.drafter = "user", .length = length});
                so_case_run(e);
                assert_true(so_case_same(r, &f->cases[c]));
                if (i + 1 < SO_LEN(bad_drafters)) /* all but the last are ignored completely */
                    assert_int_equal(so_request_get_stats(r)->draft_n, 0);
                so_request_free(r);
            }
            assert_true(s.n_called > 0);
            so_engine_free(e);
        }
}

/* Trees with one fault, and one without: the right token between two wrong siblings. */
typedef enum fault {
    SELF,    /* a guess is its own parent */
    FORWARD, /* the parent has a larger index */
    NO_SUCH_NODE,
    TOO_DEEP,
    TOO_MANY,
    NO_FAULT
} fault;

typedef struct tree_maker {
    const so_case *c;
    fault fault;
    int n_called;
} tree_maker;

static int32_t right_token(const so_case *c, int at) { return c->want[SO_MIN(at, c->n_want - 1)]; }

static int make_tree(void *user, const so_draft_query *q, int32_t *ids, int32_t *parents) {
    tree_maker *g = user;
    int at = q->n_tokens - q->n_prompt, n = 0, parent = -1;
    g->n_called++;
    for (int d = 0; d < q->max_depth && n + 3 <= q->max; d++) {
        int32_t right = right_token(g->c, at + d);
        for (int k = 0; k < 3; k++, n++) {
            ids[n] = (right + 1 + (k + 1) % 3) % 100; /* right + 2, right + 3, right + 1 */
            parents[n] = parent;
        }
        ids[n - 2] = right;
        parent = n - 2;
    }
    int last = SO_MAX(n - 1, 0);
    if (g->fault == SELF)
        parents[last] = last;
    else if (g->fault == FORWARD)
        parents[0] = 1;
    else if (g->fault == NO_SUCH_NODE)
        parents[last] = -7;
    else if (g->fault == TOO_DEEP)
        for (n = 0; n < SO_MIN(q->max, q->max_depth + 1); n++)
            parents[n] = n - 1;
    return g->fault == TOO_MANY ? q->max + 1 : n;
}

static void count_line(void *user) { ++*(int *)user; }

static void test_user_trees(void **state) {
    fixture *f = *state;
    for (int kind = 0; kind <= NO_FAULT; kind++)
        for (int length = 0; length <= 5; length += 5) {
            tree_maker g = {.fault = (fault)kind};
            int n_lines = 0;
            so_engine *e =
                so_case_engine(&f->target, &(so_case_engine_opts){.n_parallel = 1,
                                                                  .n_batch = 64,
                                                                  .draft_temp = -1,
                                                                  .tree_drafter = make_tree,
                                                                  .drafter_user = &g});
            so_log_set_level(SO_LOG_WARN);
            so_log_set_hook(count_line, &n_lines);
            for (int c = 0; c < 4; c++) {
                g.c = &f->cases[c];
                so_request *r =
                    so_case_submit(e, g.c, &(so_spec_opts){.drafter = "user", .length = length});
                so_case_run(e);
                assert_true(so_case_same(r, g.c));
                const so_request_stats *s = so_request_get_stats(r);
                if (kind != NO_FAULT && (kind != TOO_DEEP || length > 0))
                    assert_int_equal(s->draft_n, 0);
                else if (length > 0) /* one accepted in every round but the last */
                    assert_true(s->draft_n_accepted >= s->rounds - 1 &&
                                s->tested_n > s->draft_n_accepted);
                so_request_free(r);
            }
            so_log_set_hook(NULL, NULL);
            so_log_set_level(SO_LOG_ERROR);
            assert_true(g.n_called > 0);
            if (kind == NO_FAULT || length > 0)
                assert_int_equal(n_lines, kind != NO_FAULT); /* one warning in all */
            so_engine_free(e);
        }
}

/* The predicted text is longer than max_tokens and the draft length allow; it is cut to them. */
static void test_draft_longer_than_the_budget(void **state) {
    fixture *f = *state;
    const so_case *c = &f->cases[1];
    for (int max = 0; max <= 6; max++) {
        so_engine *e = open_engine(&f->target, NULL, NULL, NULL);
        so_request_opts o = so_case_opts(c, &(so_spec_opts){.drafter = "predict", .length = 16});
        o.max_tokens = max;
        so_request *r = so_case_finish(e, &o);
        so_case_expect(r, c->want, max);
        assert_int_equal(so_request_get_stats(r)->draft_n, SO_MAX(max - 1, 0));
        so_request_free(r);
        so_engine_free(e);
    }
}

/* --- cuts --- */

/* A cut that would leave no token keeps the likeliest one, so the text is greedy. */
static void test_cuts_that_leave_one_token(void **state) {
    fixture *f = *state;
    static const so_verify_mode modes[] = {SO_VERIFY_MATCH, SO_VERIFY_REJECT, SO_VERIFY_LENIENT};
    static const char *const drafters[] = {NULL, "model", "random", "ngram(draw)+model"};
    so_case c = f->cases[1]; /* greedy, no penalties */
    for (int cut = 0; cut < 4; cut++) {
        c.sample.temp = 1.5f;
        c.sample.top_p = cut == 0 ? 0 : cut == 1 ? 1e-30f : 1;
        c.sample.min_p = cut == 2 ? 1 : 0;
        c.sample.top_k = cut == 3 ? 1 : 0;
        for (size_t d = 0; d < SO_LEN(drafters); d++)
            for (size_t m = 0; m < (drafters[d] ? SO_LEN(modes) : 1); m++) {
                so_engine *e = open_engine(&f->target, &f->draft, NULL, NULL);
                so_spec_opts spec = {.drafter = drafters[d],
                                     .length = drafters[d] ? 3 : 0,
                                     .verify = modes[m],
                                     .lenience = 0.2};
                so_request *r = so_case_submit(e, &c, &spec);
                so_case_run(e);
                assert_true(so_case_same(r, &c));
                so_request_free(r);
                so_engine_free(e);
            }
    }
}

/* --- refusals --- */

static void expect_refusal(so_engine *e, const so_case *c, so_spec_opts spec, int code,
                           const char *part) {
    so_request_opts o = so_case_opts(c, &spec);
    so_err err = {0};
    so_request *r = NULL;
    int rc = so_engine_submit(e, &o, &r, &err);
    if (rc != code || r || !strstr(err.msg, part))
        fail_msg("%d, '%s'; wanted %d, '%s'", rc, err.msg, code, part);
}

static void test_lenience_out_of_range(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->target, NULL, NULL, NULL);
    const double bad[] = {0, -0.5, 1.0000001, 2, INFINITY, -INFINITY, NAN};
    for (size_t i = 0; i < SO_LEN(bad); i++)
        for (int c = 0; c < 2; c++)
            expect_refusal(
                e, &f->cases[c],
                (so_spec_opts){.drafter = "ngram", .verify = SO_VERIFY_LENIENT, .lenience = bad[i]},
                SO_ERANGE, "--verify lenient=");
    so_engine_free(e);
}

static void test_lengths_out_of_range(void **state) {
    fixture *f = *state;
    so_engine *e = open_engine(&f->target, NULL, NULL, NULL);
    const int bad[] = {-1, INT_MIN, 17, 1 << 20, INT_MAX};
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        char part[64];
        snprintf(part, sizeof part, "--spec-length %d", bad[i]);
        expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = "ngram", .length = bad[i]},
                       SO_ERANGE, part);
        snprintf(part, sizeof part, "--draft-max %d", bad[i]);
        expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = "ngram", .draft_max = bad[i]},
                       SO_ERANGE, part);
        snprintf(part, sizeof part, "--draft-min %d", bad[i]);
        expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = "ngram", .draft_min = bad[i]},
                       SO_ERANGE, part);
    }
    so_engine_free(e);
    so_engine_opts o;
    so_engine_defaults(f->target.m, &o);
    const int bad_max[] = {-1, SO_MAX_DRAFT + 1, INT_MAX, INT_MIN};
    for (size_t i = 0; i < SO_LEN(bad_max); i++) {
        so_err err = {0};
        so_engine *none = NULL;
        o.max_draft = bad_max[i];
        assert_int_equal(so_engine_create(f->target.m, NULL, &o, &none, &err), SO_ERANGE);
        assert_non_null(strstr(err.msg, "--draft-max"));
        assert_null(none);
    }
}

static void test_drafts_that_do_not_fit(void **state) {
    fixture *f = *state;
    static const so_shape SMALL = {SO_SHAPE_SMALL, .n_layers = 1, .n_vocab = 67, .n_ctx = 128};
    so_rig other;
    so_shape_open(&other, &SMALL,
                  &(so_rig_opts){.level = SO_CPU_AUTO, .max_rows = 8, .n_pages = 4});
    so_engine *e = open_engine(&f->target, &other, NULL, NULL);
    expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = "model"}, SO_EMISMATCH,
                   "the target has 131 token ids, the draft 67");
    char *dir = so_test_tmp(), *path = so_path_join(dir, "garbage.gguf");
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs("this is no model", file);
    fclose(file);
    so_buf spec = {0};
    so_buf_printf(&spec, "model(%s)", path);
    expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = spec.data}, SO_EFORMAT,
                   "garbage.gguf");
    so_buf_clear(&spec);
    so_buf_printf(&spec, "model(%s)", dir); /* a folder without a model */
    expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = spec.data}, SO_ENOTFOUND, dir);
    expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = "ngram,model(/no/such/file.gguf)"},
                   SO_ENOTFOUND, "/no/such/file.gguf");
    expect_refusal(e, &f->cases[0], (so_spec_opts){.drafter = ""}, SO_EINVAL, "");
    so_buf_free(&spec);
    free(path);
    so_test_tmp_free(dir);
    /* a refused request leaves nothing in the engine: the next one runs */
    so_request *r = so_case_submit(e, &f->cases[0], &(so_spec_opts){.drafter = "ngram"});
    so_case_run(e);
    assert_true(so_case_same(r, &f->cases[0]));
    so_request_free(r);
    so_engine_free(e);
    so_rig_close(&other);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_invalid_user_drafts),
        cmocka_unit_test(test_user_trees),
        cmocka_unit_test(test_draft_longer_than_the_budget),
        cmocka_unit_test(test_cuts_that_leave_one_token),
        cmocka_unit_test(test_lenience_out_of_range),
        cmocka_unit_test(test_lengths_out_of_range),
        cmocka_unit_test(test_drafts_that_do_not_fit),
    };
    so_log_set_level(SO_LOG_ERROR); /* failing drafters would log warnings */
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
