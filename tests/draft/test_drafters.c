/* The small drafters (none, random, oracle, callback) and groups of drafters. */
#include "rig.h"

#include <limits.h>
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <unistd.h>

static void none_is_silent(void **state) {
    (void)state;
    rig r;
    int32_t out[4];
    rig_open(&r, so_none_create(), (int32_t[]){1}, 1);
    assert_int_equal(rig_chain(&r, 4, out), 0);
    rig_close(&r);
}

/* Uniform samples with a uniform row. Chi-square over 1000 cells: mean 999, deviation 45; exceeds
 * 1200 once in 10^5 runs; the seed is fixed. */
static void random_is_uniform(void **state) {
    (void)state;
    enum { DRAWS = 200000 };
    rig r;
    static int hits[RIG_VOCAB];
    int32_t out[8];
    rig_open(&r, so_random_create(), (int32_t[]){1}, 1);
    r.temp = 1;
    for (int i = 0; i < DRAWS / 8; i++) {
        assert_int_equal(rig_chain(&r, 8, out), 8);
        for (int k = 0; k < 8; k++)
            hits[out[k]]++;
    }
    for (int i = 0; i < r.tree.n_proposals; i++)
        assert_int_equal(r.tree.proposals[i].kind, SO_Q_ROW);
    assert_true(so_tree_row(&r.tree, 0)[17] == 1.0f / RIG_VOCAB);
    double chi2 = 0, mean = (double)DRAWS / RIG_VOCAB;
    for (int i = 0; i < RIG_VOCAB; i++)
        chi2 += pow(hits[i] - mean, 2) / mean;
    assert_true(chi2 < 1200);
    r.temp = 0;
    rig_chain(&r, 2, out);
    assert_int_equal(r.tree.proposals[0].kind, SO_Q_POINT);
    rig_close(&r);
}

/* Every position is tested once and right with probability alpha: the accepted fraction is alpha
 * within four standard errors, and consecutive outcomes are uncorrelated. */
static void oracle_is_right_at_its_rate(void **state) {
    (void)state;
    enum { N = 8000 };
    static int32_t text[N];
    dice d = {.seed = 61};
    for (int i = 0; i < N; i++)
        text[i] = dice_below(&d, RIG_VOCAB);
    const double alphas[] = {0, 0.3, 0.6, 0.9, 1};
    for (int a = 0; a < 5; a++) {
        rig r;
        int32_t out[8];
        rig_open_expecting(&r, so_oracle_create(alphas[a], -1, NULL, 0), (int32_t[]){1, 2, 3}, 3,
                           text, N);
        int tested = 0, accepted = 0, both = 0;
        bool before = false;
        for (int at = 0; at + 6 < N;) {
            int n = rig_chain(&r, 5, out), k = 0;
            assert_int_equal(n, 5);
            assert_true(fabs((double)r.tree.proposals[0].confidence - alphas[a]) < 1e-6);
            while (k < n && out[k] == text[at + k]) {
                k++, tested++, accepted++;
                both += before;
                before = true;
            }
            if (k < n) {
                tested++;
                before = false;
                for (int i = k; i < n; i++) /* after a wrong guess all are wrong */
                    assert_int_not_equal(out[i], text[at + i]);
            }
            rig_emit(&r, text + at, k + 1, at % 2);
            at += k + 1;
        }
        double se = sqrt(alphas[a] * (1 - alphas[a]) / tested);
        assert_true(fabs((double)accepted / tested - alphas[a]) <= 4 * se);
        assert_true(fabs((double)both / tested - alphas[a] * alphas[a]) <= 6 * se + 1e-9 ||
                    alphas[a] == 1);
        int32_t wrong = 0;
        rig_emit(&r, &wrong, 1, true);
        rig_emit(&r, &wrong, 1, true);
        assert_int_equal(rig_chain(&r, 5, out), 0); /* the text is not the expected one: no
                                                     * guesses */
        rig_close(&r);
    }
}

/* Callback. */

typedef struct script {
    int n;
    int32_t ids[8];
    int calls, n_tokens, max;
} script;

static int scripted(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                    int max) {
    script *s = user;
    assert_int_equal(tokens[0], 1);
    assert_int_equal(n_prompt, 2);
    s->calls++;
    s->n_tokens = n_tokens;
    s->max = max;
    memcpy(out, s->ids, (size_t)SO_MAX(0, SO_MIN(s->n, max)) * sizeof *out);
    return s->n;
}

static void callback_proposes_points(void **state) {
    (void)state;
    rig r;
    int32_t out[8];
    script s = {3, {5, 6, 7}, 0, 0, 0};
    rig_open(&r, so_callback_create("mine", scripted, &s), (int32_t[]){1, 2}, 2);
    assert_string_equal(r.d->vt->name, "mine");
    assert_tokens(out, rig_chain(&r, 4, out), s.ids, 3);
    assert_int_equal(r.tree.proposals[2].kind, SO_Q_POINT);
    assert_int_equal(s.n_tokens, 2);
    assert_int_equal(s.max, 4);
    assert_true(r.d->has_cost);
    rig_chain(&r, 0, out); /* no budget, no call */
    assert_int_equal(s.calls, 1);
    rig_close(&r);
}

/* At most 8 guesses, 4 deep. */
typedef struct tree_script {
    int n;
    int32_t ids[8], parents[8];
    int calls;
    bool keep_parents; /* does not write parents */
} tree_script;

static int scripted_tree(void *user, const so_draft_query *q, int32_t *ids, int32_t *parents) {
    tree_script *s = user;
    int n = SO_MAX(0, SO_MIN(s->n, q->max));
    assert_int_equal(q->n_tokens, 2);
    assert_int_equal(q->n_prompt, 2);
    assert_int_equal(q->max, 8);
    assert_int_equal(q->max_depth, 4);
    s->calls++;
    memcpy(ids, s->ids, (size_t)n * sizeof *ids);
    if (!s->keep_parents)
        memcpy(parents, s->parents, (size_t)n * sizeof *parents);
    return s->n;
}

static void callback_proposes_a_tree(void **state) {
    (void)state;
    rig r;
    so_err err = {0};
    tree_script s = {.n = 6, .ids = {5, 6, 7, 8, 9, 5}, .parents = {-1, 0, 1, 0, -1, -1}};
    static const int16_t parents[] = {-1, 0, 1, 2, 1, 0}, depths[] = {0, 1, 2, 3, 2, 1};
    rig_open(&r, so_callback_create_tree("mine", scripted_tree, &s), (int32_t[]){1, 2}, 2);
    so_draft_job job = rig_job(&r, 8, 4);
    SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
    so_tree_check(&r.tree);
    assert_int_equal(r.tree.n_nodes, 6); /* the same token twice under one parent is one node */
    assert_int_equal(r.tree.n_proposals, 6);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(r.tree.nodes[i].parent, parents[i]);
        assert_int_equal(r.tree.nodes[i].depth, depths[i]);
    }
    assert_true(so_tree_all_points(&r.tree));
    s = (tree_script){.n = 3, .ids = {5, 6, 7}, .keep_parents = true};
    job = rig_job(&r, 8, 4);
    SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
    assert_int_equal(r.tree.nodes[3].depth, 3); /* parents were not written: a chain */
    assert_int_equal(s.calls, 1);
    job = rig_job(&r, 8, 0);
    SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
    assert_int_equal(s.calls, 1); /* no depth, no call */
    rig_close(&r);
}

/* Checks the warning of a call; a second invalid answer is logged at debug level only. */
static void expect_warning(rig *r, const char *says) {
    char line[512] = "";
    so_err err = {0};
    FILE *log = tmpfile();
    int old = dup(2);
    dup2(fileno(log), 2);
    for (int i = 0; i < 2; i++) {
        so_draft_job job = rig_job(r, 8, 4);
        assert_int_equal(r->d->vt->propose(r->d, &job, 1, &err), 0);
    }
    dup2(old, 2);
    close(old);
    rewind(log);
    assert_non_null(fgets(line, sizeof line, log));
    if (!strstr(line, says) || !strstr(line, "drafter a name") || !strstr(line, "must be"))
        fail_msg("'%s' does not say '%s'", line, says);
    assert_null(fgets(line, sizeof line, log));
    assert_int_equal(r->tree.n_nodes, 1);
    fclose(log);
}

static const char *const LONG_NAME = "a name that is much longer than the room";

static void callback_errors_are_told(void **state) {
    (void)state;
    const struct {
        script s;
        const char *says;
    } cases[] = {
        {{.n = -3}, "returned -3: must be the number of guesses, 0 where there are none"},
        {{.n = 7}, "returned 7 guesses: must be at most 4"},
        {{.n = INT_MAX}, "returned 2147483647 guesses"},
        {{.n = 2, .ids = {1, RIG_VOCAB}}, "guess 1 is token 1000: must be from 0 to 999"},
        {{.n = 2, .ids = {1, -1}}, "guess 1 is token -1"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        rig r;
        script s = cases[i].s;
        rig_open(&r, so_callback_create(LONG_NAME, scripted, &s), (int32_t[]){1, 2}, 2);
        expect_warning(&r, cases[i].says);
        rig_close(&r);
    }
}

static void callback_tree_errors_are_told(void **state) {
    (void)state;
    const struct {
        tree_script s;
        const char *says;
    } cases[] = {
        {{.n = -1}, "returned -1"},
        {{.n = 9}, "returned 9 guesses: must be at most 8"},
        {{.n = 1, .ids = {5}, .parents = {0}}, "guess 0 has the parent 0"},
        {{.n = 2, .ids = {5, 6}, .parents = {-1, 1}}, "guess 1 has the parent 1"},
        {{.n = 3, .ids = {5, 6, 7}, .parents = {-1, 2, 0}}, "guess 1 has the parent 2"},
        {{.n = 2, .ids = {5, 6}, .parents = {-1, -2}}, "guess 1 has the parent -2"},
        {{.n = 2, .ids = {5, 6}, .parents = {-1, INT32_MIN}}, "the parent -2147483648"},
        {{.n = 2, .ids = {5, 6}, .parents = {-1, INT32_MAX}}, "must be an earlier guess, or -1"},
        {{.n = 5, .ids = {5, 6, 7, 8, 9}, .keep_parents = true},
         "guess 4 is 5 tokens ahead of the text: must be at most 4"},
        {{.n = 2, .ids = {5, 1 << 20}, .parents = {-1, 0}}, "guess 1 is token 1048576"},
    };
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        rig r;
        tree_script s = cases[i].s;
        rig_open(&r, so_callback_create_tree(LONG_NAME, scripted_tree, &s), (int32_t[]){1, 2}, 2);
        expect_warning(&r, cases[i].says);
        rig_close(&r);
    }
}

static int late(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                int max) {
    (void)tokens;
    (void)n_tokens;
    (void)n_prompt;
    (void)max;
    out[0] = 5;
    return *(int *)user;
}

/* Every answer (valid, empty, invalid) counts as a level of drafting: the planner charges its
 * time. */
static void callback_time_is_charged(void **state) {
    (void)state;
    for (int n = -1; n <= 1; n++) {
        rig r;
        so_err err = {0};
        rig_open(&r, so_callback_create("late", late, &n), (int32_t[]){1, 2}, 2);
        so_draft_job job = rig_job(&r, 4, 4);
        SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
        assert_int_equal(r.tree.n_nodes, n == 1 ? 2 : 1);
        assert_true(r.d->has_cost);
        assert_int_equal(job.n_levels, 1);
        rig_close(&r);
    }
}

/* An invalid answer for one request does not affect the others. */
static void callback_errors_are_of_one_request(void **state) {
    (void)state;
    rig r[2];
    so_err err = {0};
    script s = {.n = 5, .ids = {5, 6, 7, 8, 9}};
    so_drafter *d = so_callback_create("mine", scripted, &s);
    for (int i = 0; i < 2; i++)
        rig_open(&r[i], d, (int32_t[]){1, 2}, 2);
    so_draft_job jobs[2] = {rig_job(&r[0], 4, 4), rig_job(&r[1], 5, 5)};
    SO_OK_OR_FAIL(d->vt->propose(d, jobs, 2, &err), err);
    assert_int_equal(r[0].tree.n_nodes, 1); /* at most four allowed, five returned */
    assert_int_equal(r[1].tree.n_nodes, 6);
    rig_end(&r[0]);
    rig_close(&r[1]);
}

/* Groups. */

static int constant(void *user, const int32_t *tokens, int n_tokens, int n_prompt, int32_t *out,
                    int max) {
    (void)tokens;
    (void)n_tokens;
    (void)n_prompt;
    const int32_t *ids = user; /* ended by −1 */
    int n = 0;
    for (; n < max && ids[n] >= 0; n++)
        out[n] = ids[n];
    return n;
}

static so_drafter *fixed(const int32_t *ids, int index) {
    so_drafter *d = so_callback_create("fixed", constant, (void *)(uintptr_t)ids);
    d->index = index;
    return d;
}

static const int32_t NOTHING[] = {-1}, ABC[] = {1, 2, 3, -1}, ABX[] = {1, 2, 9, 8, -1};

static void first_that_proposes(void **state) {
    (void)state;
    rig r;
    int32_t out[8];
    so_drafter *members[] = {fixed(NOTHING, 0), fixed(ABX, 1), fixed(ABC, 2)};
    rig_open(&r, so_group_create(members, 3, true), (int32_t[]){1}, 1);
    assert_tokens(out, rig_chain(&r, 8, out), ABX, 4);
    assert_int_equal(r.tree.proposals[0].drafter, 1);
    rig_close(&r);
}

/* In one call each request uses the first member that has guesses for it. */
static void first_works_per_request(void **state) {
    (void)state;
    rig a, b;
    so_err err = {0};
    so_drafter *members[] = {so_lookup_create(NULL), so_predict_create()};
    members[0]->index = 0;
    members[1]->index = 1;
    so_drafter *g = so_group_create(members, 2, true);
    const int32_t expected[] = {70, 71, 72};
    rig_open_expecting(&a, g, (int32_t[]){1, 2, 3, 4}, 4, expected, 3);
    rig_open_expecting(&b, g, (int32_t[]){1, 2, 3, 1, 2}, 5, expected, 3);
    so_draft_job jobs[] = {rig_job(&a, 8, 8), rig_job(&b, 2, 2)};
    SO_OK_OR_FAIL(g->vt->propose(g, jobs, 2, &err), err);
    assert_int_equal(a.tree.n_nodes, 4);
    assert_int_equal(a.tree.nodes[1].token, 70);
    assert_int_equal(a.tree.proposals[0].drafter, 1);
    assert_int_equal(b.tree.n_nodes, 3);
    assert_int_equal(b.tree.nodes[1].token, 3);
    assert_int_equal(b.tree.proposals[0].drafter, 0);
    rig_end(&a);
    rig_close(&b);
}

/*      1 ─ 2 ─ 3      one drafter, both drafters on 1 and 2
 *           └─ 9 ─ 8                                         */
static void merged_into_one_tree(void **state) {
    (void)state;
    rig r;
    so_err err = {0};
    so_drafter *members[] = {fixed(ABC, 0), fixed(ABX, 1)};
    rig_open(&r, so_group_create(members, 2, false), (int32_t[]){1}, 1);
    so_draft_job job = rig_job(&r, 20, 20);
    SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
    so_tree_check(&r.tree);
    assert_int_equal(r.tree.n_nodes, 6);
    assert_int_equal(r.tree.n_proposals, 7); /* each guess made by both has two proposals */
    assert_int_equal(r.tree.nodes[4].token, 9);
    assert_int_equal(r.tree.nodes[4].parent, 2);
    /* the node budget is divided: half for the first, what is left for the second */
    job = rig_job(&r, 4, 20);
    SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
    assert_int_equal(r.tree.n_nodes, 5);
    assert_int_equal(r.tree.nodes[3].token, 9);
    rig_close(&r);
}

/* If the node budget is used up, a point may join an existing node; a sampled token may not,
 * because it would then be tested for its value. */
static void drawn_tokens_do_not_join_a_full_tree(void **state) {
    (void)state;
    rig r;
    rig_open(&r, so_none_create(), (int32_t[]){1}, 1);
    so_draft_job job = rig_job(&r, 1, 4);
    int row = so_tree_new_row(&r.tree);
    assert_int_equal(so_draft_add(&job, 0, 7, SO_Q_POINT, -1, 0, 0.5f), 1);
    assert_int_equal(so_draft_add(&job, 0, 7, SO_Q_POINT, -1, 1, 0.5f), 1);
    assert_int_equal(so_draft_add(&job, 0, 7, SO_Q_ROW, row, 2, 0.5f), -1);
    assert_int_equal(so_draft_add(&job, 0, 8, SO_Q_POINT, -1, 1, 0.5f), -1);
    assert_int_equal(so_draft_add(&job, 0, RIG_VOCAB, SO_Q_POINT, -1, 1, 0.5f), -1);
    assert_int_equal(so_draft_add(&job, 0, -1, SO_Q_POINT, -1, 1, 0.5f), -1);
    rig_close(&r);
}

/* Two sampling drafters at one position are independent: equal tokens as often as chance. */
static void drafters_draw_independently(void **state) {
    (void)state;
    rig r;
    so_err err = {0};
    so_drafter *members[] = {so_random_create(), so_random_create()};
    members[0]->index = 3;
    members[1]->index = 4;
    rig_open(&r, so_group_create(members, 2, false), (int32_t[]){1}, 1);
    r.temp = 1;
    int same = 0;
    for (int i = 0; i < 20000; i++) {
        so_draft_job job = rig_job(&r, 2, 1);
        SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
        assert_int_equal(r.tree.n_proposals, 2);
        same += r.tree.n_nodes == 2;
    }
    assert_in_range(same, 4, 44); /* 20 expected, deviation 4.5 */
    rig_close(&r);
}

/* Memory is allocated when a request opens: thousands of rounds leave the heap unchanged. */
static void rounds_take_no_memory(void **state) {
    (void)state;
    so_corpus *c = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_corpus_create(1 << 20, &c, &err), err);
    so_drafter *members[] = {
        so_predict_create(), so_lookup_create(&(so_lookup_params){.max_tokens = 512}),
        so_corpus_drafter_create(c, 0),
        so_ngram_create(&(so_ngram_params){.window = 100, .draw = true}), so_random_create()};
    int32_t expected[100], out[4];
    dice d = {.seed = 62};
    for (int i = 0; i < 100; i++)
        expected[i] = dice_below(&d, 50);
    rig r;
    rig_open_expecting(&r, so_group_create(members, 5, false), expected, 10, expected, 100);
    r.temp = 1;
    size_t before = 0;
    for (int i = 0; i < 3000; i++) {
        so_draft_job job = rig_job(&r, 40, 8);
        SO_OK_OR_FAIL(r.d->vt->propose(r.d, &job, 1, &err), err);
        so_tree_check(&r.tree);
        for (int k = 0; k < 2; k++)
            out[k] = dice_below(&d, 20);
        rig_emit(&r, out, 2, true);
        if (i == 0)
            before = mallinfo2().uordblks;
    }
    assert_int_equal(mallinfo2().uordblks, before);
    rig_close(&r);
    so_corpus_free(c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(none_is_silent),
        cmocka_unit_test(random_is_uniform),
        cmocka_unit_test(oracle_is_right_at_its_rate),
        cmocka_unit_test(callback_proposes_points),
        cmocka_unit_test(callback_proposes_a_tree),
        cmocka_unit_test(callback_errors_are_told),
        cmocka_unit_test(callback_tree_errors_are_told),
        cmocka_unit_test(callback_errors_are_of_one_request),
        cmocka_unit_test(callback_time_is_charged),
        cmocka_unit_test(first_that_proposes),
        cmocka_unit_test(first_works_per_request),
        cmocka_unit_test(merged_into_one_tree),
        cmocka_unit_test(drawn_tokens_do_not_join_a_full_tree),
        cmocka_unit_test(drafters_draw_independently),
        cmocka_unit_test(rounds_take_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
