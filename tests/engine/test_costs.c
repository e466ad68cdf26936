/* Costs kept between runs: what is written is read back, and nothing else is believed. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "engine/costs.h"

static const so_str KEY = SO_STR("llama layers 2 on some CPU");

static void test_round_trip(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_costs_path(dir, KEY);
    static so_curve a, b;
    so_records kept = {0}, back = {0};
    so_err err = {0};
    so_record *rec = so_records_touch(&kept, "model 0123456789abcdef");
    rec->step_ms = 0.375;
    rec->cells[0][3] = (so_estimate_cell){2.5f, 4};
    rec->cells[15][SO_ESTIMATE_LEVELS] = (so_estimate_cell){0, 512};
    so_records_touch(&kept, "lookup");
    a = b = (so_curve){0};
    assert_false(so_costs_read(path, KEY, &b, &back)); /* nothing there yet */
    for (int i = 0; i < 9; i++)
        for (int n = 1; n <= 9; n += 2)
            so_curve_observe(&a, n, 4 + 0.25 * n);
    SO_OK_OR_FAIL(so_costs_write(path, KEY, &a, &kept, &err), err);
    SO_OK_OR_FAIL(so_costs_write(path, KEY, &a, &kept, &err), err); /* over an old one */
    assert_true(so_costs_read(path, KEY, &b, &back));
    for (int n = 1; n <= 9; n++)
        assert_true(fabs(so_curve_ms(&b, n) / so_curve_ms(&a, n) - 1) < 0.05);
    assert_int_equal(back.n, 2);
    assert_string_equal(back.items[0]->name, "lookup");
    assert_memory_equal(back.items[1], rec, sizeof *rec);
    so_records_free(&kept);
    so_records_free(&back);
    free(path);
    so_test_tmp_free(dir);
}

static void put(const char *path, const char *text, size_t len) {
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, len, f), len);
    fclose(f);
}

#define LINES "sooth costs 3\nllama layers 2 on some CPU\n"

static void test_nothing_else_is_believed(void **state) {
    (void)state;
    static const char *const bad[] = {
        "",
        "sooth costs 3\n",
        "sooth costs 2\nllama layers 2 on some CPU\n1 4 9\n",
        "sooth costs 3\nllama layers 3 on some CPU\n1 4 9\n", /* somebody else's */
        LINES,
        LINES "1 4\n",
        LINES "0 4 9\n",
        LINES "1 -4 9\n",
        LINES "1 nan 9\n",
        LINES "1 inf 9\n",
        LINES "1 4 0\n",
        LINES "100000 4 9\n",
        LINES "1 4 9\nand so on\n",
        LINES "drafter lookup 0\n", /* no curve */
        LINES "1 4 9\ndrafter lookup\n",
        LINES "1 4 9\ndrafter lookup -1\n",
        LINES "1 4 9\ndrafter lookup nan\n",
        LINES "1 4 9\ndrafter LOOKUP 0\n",
        LINES "1 4 9\ndrafter model 0\n1 1 1 1\n",
        LINES "1 4 9\ndrafter lookup 0\ndrafter lookup 0\n", /* twice */
        LINES "1 4 9\ndrafter lookup 0\n0 1 1 1\n",
        LINES "1 4 9\ndrafter lookup 0\n17 1 1 1\n",
        LINES "1 4 9\ndrafter lookup 0\n1 -1 1 1\n",
        LINES "1 4 9\ndrafter lookup 0\n1 9 1 1\n",
        LINES "1 4 9\ndrafter lookup 0\n1 1 2 1\n", /* more accepted than tested */
        LINES "1 4 9\ndrafter lookup 0\n1 1 1 inf\n",
        LINES "1 4 9\ndrafter lookup 0\n1 1 1 513\n",
        LINES "1 4 9\ndrafter lookup 0\n1 1 1 1 1\n",
        LINES "1 4 9\ndrafter lookup 0\n1 1 1 1", /* cut off */
    };
    char *dir = so_test_tmp(), *path = so_path_join(dir, "costs.txt");
    static so_curve c;
    so_records none = {0};
    c = (so_curve){0};
    so_curve_observe(&c, 1, 7);
    double before = so_curve_ms(&c, 1);
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        put(path, bad[i], strlen(bad[i]));
        if (so_costs_read(path, KEY, &c, &none))
            fail_msg("believed: %s", bad[i]);
        assert_int_equal(none.n, 0);
    }
    static const char nul[] = LINES "1 4 9\n\0";
    put(path, nul, sizeof nul - 1);
    assert_false(so_costs_read(path, KEY, &c, &none));
    assert_true(so_curve_ms(&c, 1) == before);
    put(path, LINES "1 4 9\n", strlen(LINES "1 4 9\n")); /* the tests above can fail */
    assert_true(so_costs_read(path, KEY, &c, &none));
    free(path);
    so_test_tmp_free(dir);
}

static void test_unwritable(void **state) {
    (void)state;
    static so_curve c;
    so_records none = {0};
    so_err err = {0};
    c = (so_curve){0};
    so_curve_observe(&c, 1, 7);
    assert_int_not_equal(so_costs_write("/dev/null/costs/x.txt", KEY, &c, &none, &err), SO_OK);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_nothing_else_is_believed),
        cmocka_unit_test(test_unwritable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
