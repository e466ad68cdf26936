/* Every drafter of this folder through the lossless suite: with `reject` the text is distributed as
 * the target's, by enumeration where the drafter is deterministic, by sampling with its own keyed
 * draws where it is not. */
#include "rig.h"
#include "so_lossless.h"

#include "draft/spec.h"

static so_drafter *from_spec(const char *text, int n_vocab, so_corpus **corpus, so_draft_set *set) {
    so_spec s;
    so_err err = {0};
    so_draft_config cfg = {.n_vocab = n_vocab, .corpus = corpus};
    SO_OK_OR_FAIL(so_spec_parse(so_str_c(text), &s, &err), err);
    SO_OK_OR_FAIL(so_spec_build(&s, &cfg, set, &err), err);
    return set->root;
}

static so_lossless_case begin(const char *name, const so_toy *target, int n_out,
                              so_lossless_real *r) {
    so_lossless_case c = {.name = name, .target = target, .n_out = n_out};
    so_lossless_use(&c, r);
    return c;
}

/* Points: the expected distribution to the last bit of a double. */
static void points_are_exact(void **state) {
    (void)state;
    const char *specs[] = {"none",
                           "ngram",
                           "lookup(min=1)",
                           "predict",
                           "oracle(0.5)",
                           "lookup(min=1),ngram",
                           "ngram+lookup(min=1)",
                           "ngram+predict+oracle(0.3)"};
    const int32_t expected[] = {2, 1, 0, 2, 1, 1};
    so_toy target;
    so_toy_init(&target, 3, 7, 0.2, 1);
    for (size_t i = 0; i < SO_LEN(specs); i++)
        for (int gamma = 1; gamma <= 8; gamma += i == 6 || i == 7 ? 3 : 1) {
            so_draft_set set;
            so_lossless_real r = {.drafter = from_spec(specs[i], 3, NULL, &set),
                                  .max_nodes = gamma,
                                  .max_depth = gamma,
                                  .temp = 1,
                                  .expected = expected,
                                  .n_expected = 6};
            so_lossless_case c = begin(specs[i], &target, 3, &r);
            so_lossless_check(&c);
            so_lossless_real_end(&r);
            so_draft_set_deinit(&set);
        }
}

/* Draws: 50,000 texts of three tokens each. A correct drafter fails once in a million. */
static void draws_are_exact(void **state) {
    (void)state;
    const char *specs[] = {"random", "ngram(draw)", "ngram(draw)+random", "random+lookup(min=1)",
                           "lookup(min=2),random"};
    so_toy target;
    so_toy_init(&target, 3, 8, 0.2, 1);
    for (size_t i = 0; i < SO_LEN(specs); i++)
        for (int gamma = 1; gamma <= 4; gamma += 3) {
            so_draft_set set;
            so_lossless_real r = {.drafter = from_spec(specs[i], 3, NULL, &set),
                                  .max_nodes = 2 * gamma,
                                  .max_depth = gamma,
                                  .temp = 1};
            so_lossless_case c = begin(specs[i], &target, 3, &r);
            double p = so_lossless_chi2(&c, 50000, 900 + i);
            if (p < SO_LOSSLESS_FALSE_ALARM)
                fail_msg("%s, gamma %d: p = %g", specs[i], gamma, p);
            so_lossless_real_end(&r);
            so_draft_set_deinit(&set);
        }
}

/* Tables and a corpus, which need a file or earlier texts. */
static void tables_and_corpus_are_exact(void **state) {
    (void)state;
    so_toy target;
    so_err err = {0};
    so_toy_init(&target, 3, 9, 0.2, 1);
    for (int order = 1; order <= 2; order++)
        for (int draw = 0; draw <= 1; draw++) {
            so_table_counter *counter = NULL;
            so_table *t = NULL;
            SO_OK_OR_FAIL(so_table_counter_create(order, 3, &counter, &err), err);
            SO_OK_OR_FAIL(
                so_table_counter_add(counter, (int32_t[]){0, 1, 0, 2, 1, 1, 0, 1, 2, 0}, 10, &err),
                err);
            SO_OK_OR_FAIL(so_table_counter_finish(counter, 0, &t, &err), err);
            so_lossless_real r = {.drafter = so_table_drafter_create(t, draw),
                                  .max_nodes = 3,
                                  .max_depth = 3,
                                  .temp = 1};
            so_lossless_case c = begin("table", &target, 3, &r);
            if (draw)
                assert_true(so_lossless_chi2(&c, 50000, 950) >= SO_LOSSLESS_FALSE_ALARM);
            else
                so_lossless_check(&c);
            so_lossless_real_end(&r);
            so_drafter_free(r.drafter);
        }
    so_corpus *corpus = NULL;
    so_draft_set set;
    so_lossless_real r = {.drafter = from_spec("corpus(min=1,mb=1)", 3, &corpus, &set),
                          .max_nodes = 4,
                          .max_depth = 4,
                          .temp = 1};
    so_corpus_add(corpus, (int32_t[]){0, 1, 2, 0, 0, 1, 1, 2}, 8);
    so_lossless_case c = begin("corpus", &target, 3, &r);
    /* by sampling: it learns from each finished text, so no two runs are alike */
    assert_true(so_lossless_chi2(&c, 50000, 960) >= SO_LOSSLESS_FALSE_ALARM);
    so_lossless_real_end(&r);
    so_draft_set_deinit(&set);
    so_corpus_free(corpus);
}

/* What the comment of ngram.c warns of: the argmax with the counts as its q. The suite sees it. */
static void counts_as_q_of_an_argmax(void *user, const int32_t *text, int n, so_tree *t,
                                     so_chance *draws) {
    (void)user;
    (void)text;
    (void)n;
    (void)draws;
    int row = so_tree_new_row(t);
    memcpy(so_tree_row(t, row), (float[]){0.6f, 0.3f, 0.1f}, 3 * sizeof(float));
    so_tree_add(t, 0, 0, SO_Q_ROW, row, 0, 0.5f);
}

static void suite_notices_a_biased_drafter(void **state) {
    (void)state;
    so_toy target;
    so_toy_init(&target, 3, 8, 0.2, 1);
    so_lossless_case c = {
        .name = "mutant", .target = &target, .n_out = 2, .propose = counts_as_q_of_an_argmax};
    assert_true(so_lossless_gap(&c) > 1e-3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(points_are_exact),
        cmocka_unit_test(draws_are_exact),
        cmocka_unit_test(tables_and_corpus_are_exact),
        cmocka_unit_test(suite_notices_a_biased_drafter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
