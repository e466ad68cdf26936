/* The planner's file: what is written is read back; any invalid file is ignored. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "draft/drafters.h"
#include "plan/store.h"

static const so_str KEY = SO_STR("llama layers 2 on some CPU");

static void test_round_trip(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_store_path(dir, KEY);
    static so_costs a, b;
    so_records kept = {0}, back = {0};
    so_err err = {0};
    const char *why = NULL;
    a = b = (so_costs){0};
    so_record *rec = so_records_touch(&kept, "model 0123456789abcdef");
    rec->level_points[0] = (so_curve_point){1, 0.375, 8};
    rec->level_points[1] = (so_curve_point){4, 0.5, 2};
    rec->n_level_points = 2;
    rec->catch_up_ms = (so_mean){0.0625, 1};
    rec->trip_fixed_part = 0.625;
    rec->trip_error = 0.03125;
    rec->cells[0][0][3] = (so_accept_cell){2.5f, 4};
    rec->cells[15][2][SO_ACCEPT_CLASSES] = (so_accept_cell){0, 512};
    rec->confidences[0][7] = 12.5f;
    rec->confidences[2][0] = 512;
    so_records_touch(&kept, "lookup");
    so_compare_kept methods = {.key = 0x0123456789abcdef, .base = SO_METHOD_SYNC},
                    older = {.key = 7};
    methods.pairs[0][1] = (so_compare_kept_pair){2.5, {{20, 30}, {25, 31}}, 0.75, 0.125};
    methods.pairs[1][2] = (so_compare_kept_pair){8, {{99, 3}, {1, 2}}, 4, 0};
    so_records_keep(&kept, &methods);
    so_records_keep(&kept, &older);
    so_records_keep(&kept, &methods);                        /* again the first */
    assert_false(so_store_read(path, KEY, &b, &back, &why)); /* no file yet */
    assert_non_null(why);
    for (int i = 0; i < 9; i++)
        for (int n = 1; n <= 9; n += 2)
            so_costs_observe_pass(&a, n, 4 + 0.25 * n, false);
    a.draw_ms = (so_mean){0.125, 9};
    a.check_ms[SO_VERIFY_REJECT] = (so_mean){0.25, 9};
    SO_OK_OR_FAIL(so_store_write(path, KEY, &a, &kept, &err), err);
    SO_OK_OR_FAIL(so_store_write(path, KEY, &a, &kept, &err), err); /* over an existing file */
    assert_true(so_store_read(path, KEY, &b, &back, &why));
    assert_null(why);
    for (int n = 1; n <= 9; n++)
        assert_true(fabs(so_costs_pass(&b, n) / so_costs_pass(&a, n) - 1) < 0.05);
    assert_true(b.draw_ms.value == 0.125);
    assert_true(so_costs_check(&b, SO_VERIFY_REJECT) == 0.25);
    assert_true(so_costs_check(&b, SO_VERIFY_MATCH) == 0);
    assert_int_equal(back.n, 2);
    assert_string_equal(back.items[0]->name, "lookup");
    assert_memory_equal(back.items[1], rec, sizeof *rec);
    assert_int_equal(back.n_compared, 2);
    assert_memory_equal(&back.compared[0], &methods, sizeof methods);
    assert_memory_equal(so_records_compared(&back, 7), &older, sizeof older);
    assert_null(so_records_compared(&back, 8));
    for (uint64_t i = 100; i < 120; i++)
        so_records_keep(&back, &(so_compare_kept){.key = i});
    assert_int_equal(back.n_compared, SO_RECORDS_COMPARED);
    assert_non_null(so_records_compared(&back, 119));
    assert_null(so_records_compared(&back, 100));
    so_records_free(&kept);
    so_records_free(&back);
    so_costs_deinit(&a);
    so_costs_deinit(&b);
    free(path);
    so_test_tmp_free(dir);
}

static void put(const char *path, const char *text, size_t len) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, len, f), len);
    fclose(f);
}

#define LINES "sooth plan 1\nllama layers 2 on some CPU\n"
#define PASS LINES "pass 1 4 9\n"
#define METHODS PASS "methods 0123456789abcdef 1\n"
#define LOOKUP PASS "drafter lookup\n"

static void test_nothing_else_is_believed(void **state) {
    (void)state;
    static const char *const bad[] = {
        "",
        "sooth plan 1\n",
        "sooth costs 3\nllama layers 2 on some CPU\n1 4 9\n",          /* an older version */
        "sooth plan 1\nllama layers 3 on some CPU\npass 1 4 9\nend\n", /* another model */
        LINES "end\n",
        LINES "pass 1 4\nend\n",
        LINES "pass 0 4 9\nend\n",
        LINES "pass 1 -4 9\nend\n",
        LINES "pass 1 nan 9\nend\n",
        LINES "pass 1 inf 9\nend\n",
        LINES "pass 1 4 0\nend\n",
        LINES "pass 100000 4 9\nend\n",
        LINES "drafter lookup\nend\n", /* no curve */
        PASS,                          /* no end: truncated between two lines */
        PASS "end",
        PASS "end\nend\n",
        PASS "and so on\nend\n",
        PASS "pass 1 4 9\nend\n", /* twice */
        PASS "draw\nend\n",
        PASS "draw -1\nend\n",
        PASS "draw 1\ndraw 1\nend\n",
        PASS "check 4 1\nend\n",
        PASS "check 1 nan\nend\n",
        PASS "cell 1 0 1 1 1\nend\n", /* without a drafter */
        PASS "drafter\nend\n",
        PASS "drafter LOOKUP\nend\n",
        PASS "drafter model 0\nend\n",
        LOOKUP "drafter lookup\nend\n", /* twice */
        LOOKUP "pass 2 5 9\nend\n",     /* after a drafter */
        LOOKUP "read -1\nend\n",
        LOOKUP "trip 0.5\nend\n",
        LOOKUP "trip 0.96 0.1\nend\n",
        LOOKUP "trip -0.1 0.1\nend\n",
        LOOKUP "trip nan 0.1\nend\n",
        LOOKUP "trip 0.5 0\nend\n",
        LOOKUP "trip 0.5 1.5\nend\n",
        LOOKUP "trip 0.5 0.1\ntrip 0.5 0.1\nend\n", /* twice */
        PASS "trip 0.5 0.1\nend\n",                 /* without a drafter */
        LOOKUP "step 0 1 1\nend\n",
        LOOKUP "step 1 nan 1\nend\n",
        LOOKUP "step 2 1 1\nstep 1 1 1\nend\n",
        LOOKUP "cell 0 0 1 1 1\nend\n",
        LOOKUP "cell 17 0 1 1 1\nend\n",
        LOOKUP "cell 1 -1 1 1 1\nend\n",
        LOOKUP "cell 1 3 1 1 1\nend\n",
        LOOKUP "cell 1 0 -1 1 1\nend\n",
        LOOKUP "cell 1 0 9 1 1\nend\n",
        LOOKUP "cell 1 0 1 2 1\nend\n", /* more accepted than tested */
        LOOKUP "cell 1 0 1 1 inf\nend\n",
        LOOKUP "cell 1 0 1 1 513\nend\n",
        LOOKUP "cell 1 0 1 1 1 1\nend\n",
        LOOKUP "cell 4294967297 0 1 1 1\nend\n",
        LOOKUP "cell 1.5 0 1 1 1\nend\n",
        LOOKUP "cell 1 0 1 1 1\ncell 1 0 1 1 1\nend\n", /* twice */
        PASS "methods 0123456789abcde 1\nend\n",
        PASS "methods 0123456789abcdef 3\nend\n",
        METHODS "methods 0123456789abcdef 1\nend\n", /* twice */
        PASS "pair 0 1 2 20 30 20 30 1 0.1\nend\n",  /* of nothing */
        METHODS "pair 1 1 2 20 30 20 30 1 0.1\nend\n",
        METHODS "pair 2 3 2 20 30 20 30 1 0.1\nend\n",
        METHODS "pair 0 1 0 20 30 20 30 1 0.1\nend\n",
        METHODS "pair 0 1 33 20 30 20 30 1 0.1\nend\n",
        METHODS "pair 0 1 2 20 0 20 30 1 0.1\nend\n",
        METHODS "pair 0 1 2 20 30 20 30 0 0.1\nend\n",
        METHODS "pair 0 1 2 20 30 20 30 1 nan\nend\n",
        LOOKUP "methods 0123456789abcdef 1\nend\n", /* after a drafter */
        LOOKUP "rows 3 0 1\nend\n",
        LOOKUP "rows 0 8 1\nend\n",
        LOOKUP "rows 0 0 0\nend\n",
        LOOKUP "rows 0 0 513\nend\n",
        LOOKUP "rows 0 0 1\nrows 0 0 1\nend\n",
        LOOKUP "cell 1 0 1 1 1", /* truncated in a line */
    };
    char *dir = so_test_tmp(), *path = so_path_join(dir, "costs.txt");
    static so_costs c;
    so_records none = {0};
    const char *why = NULL;
    c = (so_costs){0};
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        put(path, bad[i], strlen(bad[i]));
        if (so_store_read(path, KEY, &c, &none, &why))
            fail_msg("accepted: %s", bad[i]);
        assert_non_null(why);
        assert_int_equal(none.n, 0);
        assert_true(so_costs_pass(&c, 1) == 0);
    }
    static const char nul[] = PASS "\0end\n";
    put(path, nul, sizeof nul - 1);
    assert_false(so_store_read(path, KEY, &c, &none, &why));
    assert_true(so_costs_pass(&c, 1) == 0);
    put(path, PASS "end\n",
        strlen(PASS "end\n")); /* a valid file is read: the cases above fail for their defect */
    assert_true(so_store_read(path, KEY, &c, &none, &why));
    so_costs_deinit(&c);
    free(path);
    so_test_tmp_free(dir);
}

static void test_unwritable(void **state) {
    (void)state;
    static so_costs c;
    so_records none = {0};
    so_err err = {0};
    c = (so_costs){0};
    so_costs_observe_pass(&c, 1, 7, false);
    assert_int_not_equal(so_store_write("/dev/null/costs/x.txt", KEY, &c, &none, &err), SO_OK);
    so_costs_deinit(&c);
}

/* Drafters with other options have records of their own. */
static void test_names(void **state) {
    (void)state;
    so_drafter *d[] = {so_ngram_create(NULL), so_ngram_create(&(so_ngram_params){.draw = true}),
                       so_ngram_create(&(so_ngram_params){.max_order = 3}), so_lookup_create(NULL)};
    enum { N = SO_LEN(d) * SO_PLAN_MODES };
    char names[N][SO_RECORD_NAME];
    for (int i = 0; i < N; i++) {
        assert_true(
            so_record_name(d[i / SO_PLAN_MODES], (so_plan_mode)(i % SO_PLAN_MODES), names[i]));
        assert_true(so_record_is_name(names[i]));
        for (int k = 0; k < i; k++)
            assert_string_not_equal(names[i], names[k]);
    }
    for (size_t i = 0; i < SO_LEN(d); i++)
        so_drafter_free(d[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_nothing_else_is_believed),
        cmocka_unit_test(test_unwritable),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
