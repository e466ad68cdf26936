/* The token tree: shape, shared nodes, sampling order, limits, pruning, and so_tree_check. */
#include "so_test.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/rng.h"
#include "token/tree.h"

static void test_shape(void **state) {
    (void)state;
    so_tree t;
    so_tree_init(&t, 100, 0);
    so_tree_reset(&t, 7, 41);
    assert_int_equal(t.root_pos, 41);
    int cat = so_tree_add(&t, 0, 1, SO_Q_POINT, -1, 0, 0.5f);
    int sat = so_tree_add(&t, cat, 2, SO_Q_POINT, -1, 0, 0.25f);
    int dog = so_tree_add(&t, 0, 3, SO_Q_POINT, -1, 0, 0.125f);
    assert_int_equal(cat, 1);
    assert_int_equal(sat, 2);
    assert_int_equal(dog, 3);
    assert_int_equal(t.nodes[sat].parent, cat);
    assert_int_equal(t.nodes[sat].depth, 2);
    assert_int_equal(so_tree_child(&t, 0, 3), dog);
    assert_int_equal(so_tree_child(&t, cat, 3), -1);
    so_tree_check(&t);
    so_tree_reset(&t, 9, 0);
    assert_int_equal(t.n_nodes, 1);
    assert_int_equal(so_tree_child(&t, 0, 1), -1);
    so_tree_check(&t);
    so_tree_deinit(&t);
}

/* Two guesses of one token share a node; both proposals are kept, in sampling order. */
static void test_merge(void **state) {
    (void)state;
    so_tree t;
    so_tree_init(&t, 10, 2);
    so_tree_reset(&t, 0, 0);
    int r0 = so_tree_new_row(&t), r1 = so_tree_new_row(&t);
    assert_int_equal(so_tree_new_row(&t), -1);
    assert_ptr_equal(so_tree_row(&t, r1), so_tree_row(&t, r0) + 10);
    int a = so_tree_add(&t, 0, 4, SO_Q_ROW, r0, 0, 0.25f);
    int b = so_tree_add(&t, 0, 5, SO_Q_ROW, r0, 0, 0.5f);
    int c = so_tree_add(&t, 0, 4, SO_Q_ROW, r1, 1, 0.75f);
    assert_int_equal(a, c);
    assert_int_not_equal(a, b);
    assert_int_equal(t.n_nodes, 3);
    assert_int_equal(t.n_proposals, 3);
    int want_child[] = {a, b, a}, want_drafter[] = {0, 0, 1}, n = 0;
    for (int i = t.nodes[0].first; i >= 0; i = t.proposals[i].next, n++) {
        assert_int_equal(t.proposals[i].child, want_child[n]);
        assert_int_equal(t.proposals[i].drafter, want_drafter[n]);
        assert_true(t.proposals[i].confidence ==
                    0.25f * (float)(n + 1)); /* each proposal has its own confidence */
    }
    assert_int_equal(n, 3);
    so_tree_check(&t);
    so_tree_deinit(&t);
}

static void test_full(void **state) {
    (void)state;
    so_tree t;
    so_tree_init(&t, 1000, 1);
    so_tree_reset(&t, 0, 0);
    int row = so_tree_new_row(&t);
    for (int i = 1; i < SO_TREE_MAX; i++)
        assert_int_equal(so_tree_add(&t, i - 1, 1, SO_Q_ROW, row, 0, 0), i);
    assert_int_equal(so_tree_add(&t, 0, 2, SO_Q_ROW, row, 0, 0), -1); /* no node left */
    assert_int_equal(t.n_proposals, SO_TREE_MAX - 1);
    while (t.n_proposals < SO_TREE_MAX_PROPOSALS)
        assert_int_equal(so_tree_add(&t, 0, 1, SO_Q_ROW, row, 0, 0), 1);
    assert_int_equal(so_tree_add(&t, 0, 1, SO_Q_ROW, row, 0, 0), -1); /* no proposal left */
    assert_int_equal(t.n_nodes, SO_TREE_MAX);
    assert_int_equal(t.nodes[SO_TREE_MAX - 1].depth, SO_TREE_MAX - 1);
    so_tree_check(&t);
    so_tree_deinit(&t);
}

static void test_random(void **state) {
    (void)state;
    so_tree t;
    so_tree_init(&t, 6, 8);
    so_rng_key key = {.seed = 5, .purpose = SO_RNG_TEST};
    for (uint32_t round = 0, k = 0; round < 200; round++) {
        so_tree_reset(&t, 0, (int)round);
        int n = (int)(so_rng_uniform(&key, k++) * 600);
        while (so_tree_new_row(&t) >= 0)
            ;
        for (int i = 0; i < n; i++) {
            int parent = (int)(so_rng_uniform(&key, k++) * t.n_nodes);
            int32_t token = (int32_t)(so_rng_uniform(&key, k++) * 6);
            int row = (int)(so_rng_uniform(&key, k++) * 9) - 1;
            so_tree_add(&t, parent, token, row < 0 ? SO_Q_POINT : SO_Q_ROW, row, row + 1, 0.5f);
        }
        so_tree_check(&t);
    }
    so_tree_deinit(&t);
}

/* Corrupts each structural field once: so_tree_check must abort. */

enum { N_LIES = 15 };

static void tell(so_tree *t, int lie) {
    switch (lie) {
    case 0:
        t->nodes[2].parent = 2;
        break;
    case 1:
        t->nodes[2].depth = 1;
        break;
    case 2:
        t->nodes[3].token = t->nodes[1].token;
        break; /* two siblings, one token */
    case 3:
        t->nodes[1].token = 10;
        break;
    case 4:
        t->nodes[0].last = t->nodes[0].first;
        break;
    case 5:
        t->nodes[0].first = -1;
        break;
    case 6:
        t->proposals[0].next = 0;
        break; /* a cycle */
    case 7:
        t->proposals[1].child = 3;
        break; /* not a child of its parent */
    case 8:
        t->proposals[2].row = -1;
        break;
    case 9:
        t->proposals[0].row = 0;
        break; /* a point mass with a row */
    case 10:
        t->proposals[3].child = t->proposals[2].child;
        break; /* sampled twice, and a node without a proposal */
    case 11:
        t->n_proposals++;
        break;
    case 12:
        t->n_nodes++;
        break;
    case 13:
        t->nodes[0].depth = 1;
        break;
    case 14:
        t->n_rows = t->max_rows + 1;
        break;
    default:
        fail();
    }
}

static void build(so_tree *t) {
    so_tree_init(t, 10, 1);
    so_tree_reset(t, 0, 0);
    int row = so_tree_new_row(t);
    so_tree_add(t, 0, 1, SO_Q_POINT, -1, 0, 0.5f);
    so_tree_add(t, 1, 2, SO_Q_POINT, -1, 0, 0.5f);
    so_tree_add(t, 0, 3, SO_Q_ROW_SET, row, 0, 0.5f);
    so_tree_add(t, 0, 4, SO_Q_ROW_SET, row, 0, 0.5f);
}

static bool aborts(int lie) {
    pid_t pid = fork();
    if (pid == 0) {
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        so_tree t;
        build(&t);
        if (lie >= 0)
            tell(&t, lie);
        so_tree_check(&t);
        _exit(0);
    }
    int status = 0;
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

static void test_walker(void **state) {
    (void)state;
    assert_false(aborts(-1));
    for (int lie = 0; lie < N_LIES; lie++)
        if (!aborts(lie))
            fail_msg("lie %d passed the walker", lie);
}

static int below(uint32_t *at, int n) {
    so_rng_key key = {.seed = 104, .purpose = SO_RNG_TEST};
    return (int)(so_rng_uniform(&key, (*at)++) * n);
}

/* Prunes random trees: some nodes with two proposals, some removed with their subtrees. */
static void test_prune(void **state) {
    (void)state;
    so_tree t;
    uint32_t at = 0;
    so_tree_init(&t, 300, 2);
    for (int round = 0; round < 300; round++) {
        so_tree_reset(&t, 0, 0);
        for (int i = 1, n = below(&at, 60); i <= n; i++)
            so_tree_add(&t, below(&at, t.n_nodes), i, SO_Q_POINT, -1, 0, 0.5f);
        for (int i = 0; i < 10 && t.n_nodes > 1; i++) {
            int k = 1 + below(&at, t.n_nodes - 1);
            so_tree_add(&t, t.nodes[k].parent, t.nodes[k].token, SO_Q_POINT, -1, 1, 0.5f);
        }
        so_tree before = t;
        bool keep[SO_TREE_MAX] = {true};
        int n = 1, n_proposals = 0;
        for (int i = 1; i < t.n_nodes; i++)
            n += keep[i] = keep[t.nodes[i].parent] && below(&at, 3) > 0;
        so_tree_prune(&t, keep);
        so_tree_check(&t);
        assert_int_equal(t.n_nodes, n);
        for (int i = 0; i < before.n_proposals; i++)
            n_proposals += keep[before.proposals[i].child];
        assert_int_equal(t.n_proposals, n_proposals);
        for (int i = 0, k = 0; i < before.n_nodes; i++)
            if (keep[i])
                assert_int_equal(t.nodes[k++].token, before.nodes[i].token);
    }
    so_tree_deinit(&t);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shape),  cmocka_unit_test(test_merge),  cmocka_unit_test(test_full),
        cmocka_unit_test(test_random), cmocka_unit_test(test_walker), cmocka_unit_test(test_prune),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
