/* Which outcomes async() drafts for: the likeliest ones by what rounds have taught, at most as many as
 * asked for, and never one twice. */
#include "rig.h"

#include "base/mem.h"
#include "draft/async_impl.h"

enum { N_CANDIDATES = SO_AHEAD_CANDIDATES };

static so_async_core core;
static so_async_batch batch;
static so_ahead_job jobs[2];

/* A chain of two guesses with confidence 0.9; candidate k after node i is the token 100·i + k, with
 * half the chance of the one before. */
static void make_job(so_ahead_job *a) {
    static so_tree t;
    so_tree_init(&t, 1000, 0);
    so_tree_reset(&t, 1, 10);
    int node = so_tree_add(&t, 0, 901, SO_Q_POINT, -1, 0, 0.9f);
    so_tree_add(&t, node, 902, SO_Q_POINT, -1, 0, 0.9f);
    memset(a, 0, sizeof *a);
    a->tree.n_nodes = t.n_nodes;
    a->tree.n_proposals = t.n_proposals;
    a->tree.n_vocab = t.n_vocab;
    memcpy(a->tree.nodes, t.nodes, (size_t)t.n_nodes * sizeof *t.nodes);
    memcpy(a->tree.proposals, t.proposals, (size_t)t.n_proposals * sizeof *t.proposals);
    so_tree_deinit(&t);
    a->n_nodes = 3;
    for (int i = 0; i < 3; i++) {
        a->n_candidates[i] = N_CANDIDATES;
        for (int k = 0; k < N_CANDIDATES; k++)
            a->candidates[i][k] = (so_ahead_candidate){100 * i + k, k < 20 ? 0.5f / (1 << k) : 0};
    }
}

static void choose(int n, int fan) {
    memset(&core, 0, sizeof core);
    core.o.fan_out = fan;
    batch.jobs = jobs;
    batch.n = n;
    batch.depth = 4;
    batch.window_ms = 10;
    so_async_choose(&core, &batch, 0);
}

static bool has(const so_ahead_job *a, int node, int32_t token) {
    int n = 0;
    for (int i = 0; i < a->n_outcomes; i++)
        n += a->outcomes[i].node == node && a->outcomes[i].token == token;
    assert_in_range(n, 0, 1);
    return n == 1;
}

static void all_different(const so_ahead_job *a) {
    for (int i = 0; i < a->n_outcomes; i++)
        assert_true(has(a, a->outcomes[i].node, a->outcomes[i].token));
}

/* Before a round was seen: guesses with confidence 0.9 are mostly accepted, so the bonus tokens are
 * likely, and earlier candidates are likelier than later ones. */
static void begins_with_priors(void **state) {
    (void)state;
    so_async_estimates_init(&batch.estimates);
    make_job(&jobs[0]);
    choose(1, 6);
    assert_int_equal(jobs[0].n_outcomes, 6);
    all_different(&jobs[0]);
    assert_true(has(&jobs[0], 2, 200));
    for (int i = 0; i < 3; i++)
        for (int k = 1; k < 6; k++)
            assert_true(!has(&jobs[0], i, 100 * i + k) || has(&jobs[0], i, 100 * i + k - 1));
}

/* The token is usually the fourth candidate, or one far down the row: those are drafted for. */
static void learns_which_candidates_are_right(void **state) {
    (void)state;
    so_async_estimates_init(&batch.estimates);
    make_job(&jobs[0]);
    for (int i = 0; i < 300; i++)
        so_async_learn(&batch.estimates, &jobs[0], 0, i % 4 < 3 ? 3 : 36 + i / 4 % 12);
    choose(1, 20);
    all_different(&jobs[0]);
    assert_int_equal(jobs[0].outcomes[0].node, 0);
    assert_int_equal(jobs[0].outcomes[0].token, 3);
    int n_far = 0;
    for (int k = 36; k < 48; k++)
        n_far += has(&jobs[0], 0, k);
    assert_int_equal(n_far, 12);
    assert_int_equal(so_async_learn(&batch.estimates, &jobs[0], 0, 3), 0);
    assert_int_equal(so_async_learn(&batch.estimates, &jobs[0], 0, 700), -1);
}

/* The number is chosen by time: with levels that take as long as the window, fewer outcomes. And
 * requests share them by their chances, each within its limit. */
static void fans_out_within_the_time(void **state) {
    int n[2];
    (void)state;
    so_async_estimates_init(&batch.estimates);
    for (int slow = 0; slow < 2; slow++) {
        make_job(&jobs[0]);
        memset(&core, 0, sizeof core);
        batch.jobs = jobs;
        batch.n = 1;
        batch.depth = 4;
        batch.window_ms = 10;
        for (int i = 0; i < 50;
             i++) /* a level over n outcomes takes 0.1 + 0.01·n, or 0.5 + 0.5·n */
            so_async_observe_level(&core, 1 + i % 16,
                                   slow ? 0.5 + 0.5 * (1 + i % 16) : 0.1 + 0.01 * (1 + i % 16));
        so_async_choose(&core, &batch, 0);
        n[slow] = jobs[0].n_outcomes;
        all_different(&jobs[0]);
    }
    assert_in_range(n[0], 24, SO_AHEAD_OUTCOMES);
    assert_in_range(n[1], 1, 12);
    make_job(&jobs[0]);
    make_job(&jobs[1]);
    choose(2, 5);
    assert_int_equal(jobs[0].n_outcomes, 5);
    assert_int_equal(jobs[1].n_outcomes, 5);
    jobs[1].skip = true;
    jobs[1].n_outcomes = 0;
    choose(2, 5);
    assert_int_equal(jobs[1].n_outcomes, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(begins_with_priors),
        cmocka_unit_test(learns_which_candidates_are_right),
        cmocka_unit_test(fans_out_within_the_time),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
