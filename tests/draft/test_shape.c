/* Shapes of trees: the trees of the Medusa and SpecInfer descriptions, growth against enumeration of
 * all paths, files, and files that are not trees. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/rng.h"
#include "draft/shape.h"

#define HAS(err, text)                                                   \
    do {                                                                 \
        if (!strstr((err).msg, text))                                    \
            fail_msg("\"%s\" does not contain \"%s\"", (err).msg, text); \
    } while (0)

static void product_counts(void **state) {
    (void)state;
    so_shape s;
    so_err err = {0};
    const int two[] = {2, 2, 2}, three[] = {3, 3, 3, 3, 3},
              huge[] = {64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64, 64};
    assert_int_equal(so_shape_product_count(two, 3), 14);
    assert_int_equal(so_shape_product_count(three, 5), 363);
    assert_true(so_shape_product_count(huge, 12) == INT64_MAX);
    assert_int_equal(so_shape_product_count((int[]){2, 0, 9}, 3), 2);
    SO_OK_OR_FAIL(so_shape_product(two, 3, 64, &s, &err), err);
    assert_int_equal(s.n_nodes, 14);
    assert_int_equal(s.depth, 3);
    SO_OK_OR_FAIL(so_shape_product(three, 5, 64, &s, &err), err); /* pruned to its budget */
    assert_int_equal(s.n_nodes, 64);
    assert_int_equal(s.depth, 4);
    for (int i = 0; i < s.n_nodes; i++) { /* complete levels of 3, 9, 27, then part of the fourth */
        assert_int_equal(s.nodes[i].depth, i < 3 ? 1 : i < 12 ? 2 : i < 39 ? 3 : 4);
        assert_int_equal(s.nodes[i].parent, i / 3 - 1);
        assert_int_equal(s.nodes[i].rank, i % 3);
    }
    so_shape_cut(&s, 5);
    assert_int_equal(s.n_nodes, 5);
    assert_int_equal(s.depth, 2);
}

/* The tree of two guesses from the first head and two from the second: A1 A2 B1 B2 B3 B4. */
static void mask_of_six(void **state) {
    (void)state;
    so_shape s;
    so_err err = {0};
    so_buf b = {0};
    SO_OK_OR_FAIL(so_shape_product((int[]){2, 2}, 2, 64, &s, &err), err);
    so_shape_print_mask(&s, &b);
    assert_string_equal(b.data, "1 0 0 0 0 0\n"
                                "0 1 0 0 0 0\n"
                                "1 0 1 0 0 0\n"
                                "1 0 0 1 0 0\n"
                                "0 1 0 0 1 0\n"
                                "0 1 0 0 0 1\n");
    so_buf_free(&b);
}

/* Four drafts of two tokens in the context (a, b): c e, c f, d g, d h. */
static void depth_first(void **state) {
    (void)state;
    so_shape s;
    so_err err = {0};
    int16_t order[SO_SHAPE_MAX];
    char text[16] = "ab";
    const char names[] = "cdefgh"; /* by level */
    SO_OK_OR_FAIL(so_shape_product((int[]){2, 2}, 2, 64, &s, &err), err);
    so_shape_depth_first(&s, order);
    for (int i = 0; i < s.n_nodes; i++)
        text[2 + i] = names[order[i]];
    assert_string_equal(text, "abcefdgh");
    SO_OK_OR_FAIL(so_shape_product((int[]){1, 1, 1}, 3, 64, &s, &err), err); /* a chain */
    so_shape_depth_first(&s, order);
    for (int i = 0; i < 3; i++)
        assert_int_equal(order[i], i);
}

/* --- growth --- */

static double uniform(uint32_t at) { return so_rng_uniform(&(so_rng_key){.seed = 5}, at); }

static void random_table(so_shape_table *t, uint32_t seed, int depths, int ranks) {
    *t = (so_shape_table){.n_depths = depths, .n_ranks = ranks};
    for (int d = 0; d < depths; d++)
        for (int r = 0; r < ranks; r++)
            t->accuracy[d][r] = uniform(seed * 1000 + (uint32_t)(d * 64 + r)) / (1 + r);
}

static int descending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? 1 : x > y ? -1 : 0;
}

/* The chances of all paths of the table, the most likely first. */
static int all_paths(const so_shape_table *t, double *out) {
    int n = 0, from = 0;
    for (int r = 0; r < t->n_ranks; r++)
        out[n++] = t->accuracy[0][r];
    for (int d = 1; d < t->n_depths; d++) {
        int to = n;
        for (int i = from; i < to; i++)
            for (int r = 0; r < t->n_ranks; r++)
                out[n++] = out[i] * t->accuracy[d][r];
        from = to;
    }
    qsort(out, (size_t)n, sizeof *out, descending);
    return n;
}

static void growth_finds_the_most_likely_paths(void **state) {
    (void)state;
    enum { DEPTHS = 4, RANKS = 5 };
    static double paths[RANKS + 25 + 125 + 625];
    so_shape s, smaller;
    so_shape_table t;
    so_err err = {0};
    for (uint32_t seed = 0; seed < 20; seed++) {
        random_table(&t, seed, DEPTHS, RANKS);
        all_paths(&t, paths);
        for (int budget = 1; budget <= 256; budget = budget * 2 + 1 > 256 ? 257 : budget * 2 + 1) {
            SO_OK_OR_FAIL(so_shape_grow(&t, budget, &s, &err), err);
            assert_int_equal(s.n_nodes, budget);
            for (int i = 0; i < budget; i++)
                assert_true(fabs((double)s.nodes[i].chance - paths[i]) < 1e-6);
        }
        SO_OK_OR_FAIL(so_shape_grow(&t, 100, &s, &err), err);
        SO_OK_OR_FAIL(so_shape_grow(&t, 30, &smaller, &err), err);
        so_shape_cut(&s, 30); /* the first nodes are the best smaller shape */
        assert_int_equal(s.depth, smaller.depth);
        assert_memory_equal(s.nodes, smaller.nodes, 30 * sizeof *s.nodes);
        double sum = 0;
        for (int i = 0; i < 30; i++)
            sum += (double)s.nodes[i].chance;
        assert_true(fabs(so_shape_expected(&s) - sum) < 1e-6);
    }
}

/* The shape follows the accuracies: a second guess is worth a branch where it is right often. */
static void growth_is_asymmetric(void **state) {
    (void)state;
    so_shape s;
    so_err err = {0};
    so_shape_table t = {.n_depths = 3, .n_ranks = 2};
    const double a[3][2] = {{0.7, 0.2}, {0.6, 0.1}, {0.5, 0.05}};
    for (int d = 0; d < 3; d++)
        for (int r = 0; r < 2; r++)
            t.accuracy[d][r] = a[d][r];
    SO_OK_OR_FAIL(so_shape_grow(&t, 5, &s, &err), err);
    /* 0.7, 0.7·0.6 = 0.42, 0.42·0.5 = 0.21, 0.2, 0.2·0.6 = 0.12; the next would be 0.07 */
    const int parents[] = {-1, 0, 1, -1, 3}, ranks[] = {0, 0, 0, 1, 0};
    assert_int_equal(s.n_nodes, 5);
    for (int i = 0; i < 5; i++) {
        assert_int_equal(s.nodes[i].parent, parents[i]);
        assert_int_equal(s.nodes[i].rank, ranks[i]);
    }
    SO_OK_OR_FAIL(so_shape_grow(&t, 256, &s, &err), err);
    assert_int_equal(s.n_nodes, 14); /* nothing is left to add */
    t.accuracy[0][1] = t.accuracy[1][1] = t.accuracy[2][1] = 0;
    SO_OK_OR_FAIL(so_shape_grow(&t, 256, &s, &err), err);
    assert_int_equal(s.n_nodes, 3); /* what was never right is left out */
}

static void bad_arguments(void **state) {
    (void)state;
    so_shape s;
    so_err err = {0};
    so_shape_table t = {.n_depths = 1, .n_ranks = 1, .accuracy = {{0.5}}};
    assert_int_equal(so_shape_product((int[]){2, 0, 2}, 3, 64, &s, &err), SO_ERANGE);
    HAS(err, "width 0 at depth 2");
    assert_int_equal(so_shape_product((int[]){65}, 1, 64, &s, &err), SO_ERANGE);
    assert_int_equal(so_shape_product((int[]){2}, 0, 64, &s, &err), SO_ERANGE);
    assert_int_equal(so_shape_product((int[]){2}, 1, 0, &s, &err), SO_ERANGE);
    assert_int_equal(so_shape_product((int[]){2}, 1, 257, &s, &err), SO_ERANGE);
    HAS(err, "257 nodes");
    assert_int_equal(so_shape_grow(&t, 0, &s, &err), SO_ERANGE);
    t.accuracy[0][0] = NAN;
    assert_int_equal(so_shape_grow(&t, 4, &s, &err), SO_ERANGE);
    t.accuracy[0][0] = 0;
    assert_int_equal(so_shape_grow(&t, 4, &s, &err), SO_ERANGE);
    HAS(err, "ever right");
    t.n_depths = 17;
    assert_int_equal(so_shape_grow(&t, 4, &s, &err), SO_ERANGE);
    t.n_depths = 1;
    t.n_ranks = 65;
    assert_int_equal(so_shape_grow(&t, 4, &s, &err), SO_ERANGE);
}

/* --- files --- */

static void file_round_trip(void **state) {
    (void)state;
    static so_shape_table t, back_table;
    so_shape s, back;
    so_err err = {0};
    so_buf b = {0}, again = {0};
    random_table(&t, 77, 4, 10);
    t.n_positions = 12345;
    SO_OK_OR_FAIL(so_shape_grow(&t, 64, &s, &err), err);
    so_shape_print(&s, &t, "model", &b);
    SO_OK_OR_FAIL(so_shape_parse(so_buf_str(&b), "t.json", &back, &back_table, &err), err);
    assert_int_equal(back.depth, s.depth);
    assert_int_equal(back.n_nodes, s.n_nodes);
    assert_memory_equal(back.nodes, s.nodes, (size_t)s.n_nodes * sizeof *s.nodes);
    assert_true(back_table.n_positions == 12345 && back_table.n_ranks == 10);
    so_shape_print(&back, &back_table, "model", &again);
    assert_string_equal(again.data, b.data);
    SO_OK_OR_FAIL(so_shape_product((int[]){2, 3}, 2, 64, &s, &err), err);
    so_buf_clear(&b); /* without chances and accuracies */
    so_shape_print(&s, NULL, "model", &b);
    SO_OK_OR_FAIL(so_shape_parse(so_buf_str(&b), "t.json", &back, &back_table, &err), err);
    assert_int_equal(back_table.n_depths, 0);
    assert_true(isnan(so_shape_expected(&back)));
    assert_int_equal(back.n_nodes, 8);
    assert_int_equal(so_shape_read("/nonexistent/tree.json", &back, NULL, &err), SO_ENOTFOUND);
    so_buf_free(&b);
    so_buf_free(&again);
}

static void not_a_tree(void **state) {
    (void)state;
    static const struct {
        const char *text, *says;
    } cases[] = {
        {"", "line"},
        {"[]", "sooth_tree"},
        {"{\"sooth_tree\": 2}", "sooth_tree"},
        {"{\"sooth_tree\": 1}", "1 to 256 nodes; it has 0"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[]}", "it has 0"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[7]}", "node 0: parent"},
        /* a node that is its own parent; two that are each other's */
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":0,\"rank\":0}]}", "a cycle"},
        {"{\"sooth_tree\":1,\"depth\":2,\"nodes\":[{\"parent\":1,\"rank\":0},{\"parent\":0,"
         "\"rank\":0}]}",
         "node 0: parent 1 is not an earlier node (a cycle"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":-2,\"rank\":0}]}", "parent must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":99999999999,\"rank\":0}]}",
         "parent must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":-1,\"rank\":64}]}", "rank must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":-1,\"rank\":-1}]}", "rank must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":-1,\"rank\":0.5}]}", "rank must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":-1,\"rank\":0},{\"parent\":-1,"
         "\"rank\":0}]}",
         "node 1: an earlier child of the root has rank 0"},
        {"{\"sooth_tree\":1,\"depth\":2,\"nodes\":[{\"parent\":-1,\"rank\":0},{\"parent\":0,"
         "\"rank\":3},{\"parent\":0,\"rank\":3}]}",
         "node 2: an earlier child of node 0 has rank 3"},
        {"{\"sooth_tree\":1,\"depth\":2,\"nodes\":[{\"parent\":-1,\"rank\":0}]}",
         "depth must be that of the deepest node, 1"},
        {"{\"sooth_tree\":1,\"depth\":0,\"nodes\":[{\"parent\":-1,\"rank\":0}]}", "depth must"},
        {"{\"sooth_tree\":1,\"nodes\":[{\"parent\":-1,\"rank\":0}]}", "depth must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":-1,\"rank\":0,\"chance\":1.5}]}",
         "chance must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"nodes\":[{\"parent\":-1,\"rank\":0,\"chance\":\"x\"}]}",
         "chance must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"accuracy\":[[0.5],[0.5,0.1]],\"nodes\":[{\"parent\":-1,"
         "\"rank\":0}]}",
         "accuracy of depth 2"},
        {"{\"sooth_tree\":1,\"depth\":1,\"accuracy\":[[2]],\"nodes\":[{\"parent\":-1,\"rank\":0}]}",
         "accuracy of depth 1"},
        {"{\"sooth_tree\":1,\"depth\":1,\"accuracy\":[[]],\"nodes\":[{\"parent\":-1,\"rank\":0}]}",
         "accuracy must"},
        {"{\"sooth_tree\":1,\"depth\":1,\"positions\":-1,\"nodes\":[{\"parent\":-1,\"rank\":0}]}",
         "positions"},
        {"{\"sooth_tree\":1,\"sooth_tree\":1}", "duplicate"},
    };
    so_shape s = {.n_nodes = 42};
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_err err = {0};
        assert_true(so_shape_parse(so_str_c(cases[i].text), "t.json", &s, NULL, &err) < 0);
        HAS(err, "t.json");
        HAS(err, cases[i].says);
        assert_int_equal(s.n_nodes, 42); /* untouched on failure */
    }
}

/* Too many nodes, too deep, too long. */
static void too_large(void **state) {
    (void)state;
    so_shape s;
    so_err err = {0};
    so_buf b = {0};
    for (int chain = 0; chain < 2; chain++) {
        so_buf_clear(&b);
        so_buf_append_c(&b, "{\"sooth_tree\":1,\"depth\":1,\"nodes\":[");
        for (int i = 0; i < (chain ? 17 : 257); i++)
            so_buf_printf(&b, "%s{\"parent\":%d,\"rank\":0}", i ? "," : "", i - 1);
        so_buf_append_c(&b, "]}");
        assert_true(so_shape_parse(so_buf_str(&b), "t", &s, NULL, &err) < 0);
        HAS(err, chain ? "deeper than 16" : "it has 257");
    }
    while (b.len <= SO_SHAPE_MAX_BYTES)
        so_buf_append_c(&b, "                ");
    assert_int_equal(so_shape_parse(so_buf_str(&b), "t", &s, NULL, &err), SO_ELIMIT);
    so_buf_free(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(product_counts),
        cmocka_unit_test(mask_of_six),
        cmocka_unit_test(depth_first),
        cmocka_unit_test(growth_finds_the_most_likely_paths),
        cmocka_unit_test(growth_is_asymmetric),
        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(file_round_trip),
        cmocka_unit_test(not_a_tree),
        cmocka_unit_test(too_large),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
