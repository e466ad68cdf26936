/* Whether drafts are made among several requests: the way that has been seen to be faster, and a
 * look at the other one now and then. The engine is a bare struct: only what the judgement reads is
 * set. */
#include "so_test.h"

#include "engine/impl.h"

static so_engine e;

/* One step of n requests in which drafting, where it is allowed, takes `passes` plain passes for
 * `tokens` tokens a request. True if drafts were made. */
static bool step(int n, double tokens, double passes, int other_rows) {
    e.n_trees = n;
    e.other_rows = other_rows;
    so_lengths_begin(&e);
    bool drafted = !e.rests;
    e.lengths_ms = drafted ? 1 : 0;
    e.info.draft_ms = 1;
    e.plan = (so_plan){.n_requests = n, .plain_ms = 10};
    so_lengths_observe(&e, drafted ? 10 * passes - 1 : 10, drafted ? (int)(n * tokens) : n);
    return drafted;
}

static int count(int steps, int n, double tokens, double passes) {
    int drafted = 0;
    for (int i = 0; i < steps; i++)
        drafted += step(n, tokens, passes, 0);
    return drafted;
}

static int setup(void **state) {
    (void)state;
    e = (so_engine){0};
    return 0;
}

static void test_loses_and_rests(void **state) {
    (void)state;
    count(200, 8, 1.25, 1.4);
    int drafted = count(2560, 8, 1.25, 1.4);
    assert_in_range(drafted, 40, 160); /* looks, and nothing else: 8 of 256 */
}

static void test_gains_and_goes_on(void **state) {
    (void)state;
    count(200, 8, 1.5, 1.2);
    int drafted = count(2560, 8, 1.5, 1.2);
    assert_in_range(drafted, 2400, 2520); /* the plain way is looked at, too */
}

/* What has become good is taken back, what has become bad left, within some rounds of looks. */
static void test_follows_a_turn(void **state) {
    (void)state;
    count(1000, 8, 1.25, 1.4);
    count(256 * 12, 8, 1.75, 1.2);
    assert_true(count(256, 8, 1.75, 1.2) > 200);
    count(300, 8, 1.25, 1.6);
    assert_true(count(256, 8, 1.25, 1.6) < 50);
}

static void test_alone_is_left_alone(void **state) {
    (void)state;
    assert_int_equal(count(1000, 1, 1, 3), 1000);
}

/* Crowds of other sizes are judged by themselves. */
static void test_sizes(void **state) {
    (void)state;
    count(1000, 8, 1.25, 1.4);
    assert_int_equal(count(16, 2, 2, 1.2), 16);
    count(16, 2, 2, 1.2);
    assert_true(count(256, 2, 2, 1.2) > 240);
    assert_true(count(256, 8, 1.25, 1.4) < 20);
}

/* Reading a prompt for the first guess happens beside other prompts, and is paid for all the same.
 */
static int count_with_prompts(double unpaid_ms) {
    int drafted = 0;
    for (int i = 0; i < 2000; i++) {
        bool prompt = i % 4 == 0, now = step(4, 1.25, 1.1, prompt ? 100 : 0);
        if (prompt && now)
            e.unpaid_ms += unpaid_ms;
        drafted += now;
    }
    return drafted;
}

static void test_hidden_costs(void **state) {
    (void)state;
    assert_true(count_with_prompts(0) > 1800);
    setup(state);
    assert_true(count_with_prompts(20) < 400);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_loses_and_rests, setup),
        cmocka_unit_test_setup(test_gains_and_goes_on, setup),
        cmocka_unit_test_setup(test_follows_a_turn, setup),
        cmocka_unit_test_setup(test_alone_is_left_alone, setup),
        cmocka_unit_test_setup(test_sizes, setup),
        cmocka_unit_test_setup(test_hidden_costs, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
