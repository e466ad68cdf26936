/* base/statistics.h and base/pick.h against tabulated and hand-computed values. */
#include "so_test.h"

#include <math.h>

#include "base/mem.h"
#include "base/pick.h"
#include "base/statistics.h"

static void test_median(void **state) {
    (void)state;
    double odd[] = {3, 1, 2}, even[] = {4, 1, 3, 2};
    assert_true(so_median(NULL, 0) == 0);
    assert_true(so_median(odd, 3) == 2);
    assert_true(odd[0] == 1); /* sorted */
    assert_true(so_median(even, 4) == 2.5);
}

static void test_chi2_tail(void **state) {
    (void)state;
    static const struct {
        double x;
        int df;
        double p;
    } rows[] = {
        {3.841459, 1, 0.05}, {18.307038, 10, 0.05}, {29.588298, 10, 0.001}, {2.155856, 10, 0.995}};
    for (size_t i = 0; i < SO_LEN(rows); i++)
        assert_true(fabs(so_chi2_tail(rows[i].x, rows[i].df) / rows[i].p - 1) < 1e-5);
    assert_true(fabs(so_chi2_tail(40, 2) / exp(-20) - 1) < 1e-12); /* exact for 2 */
    assert_true(so_chi2_tail(0, 3) == 1);
    assert_true(so_chi2_tail(INFINITY, 3) == 0);
}

static double part(const void *w, int32_t first) {
    double sum = 0;
    for (int i = 0; i < SO_PICK_PART; i++)
        sum += ((const double *)w)[first + i];
    return sum;
}

static double weight(const void *w, int32_t i) { return ((const double *)w)[i]; }

static void test_pick(void **state) {
    (void)state;
    enum { N = 200 };
    double w[N] = {0};
    assert_int_equal(so_pick(w, N, 0, part, weight), -1);
    w[3] = w[70] = w[150] = 1;
    assert_int_equal(so_pick(w, N, 0.5, part, weight), 3);
    assert_int_equal(so_pick(w, N, 1, part, weight), 70);
    assert_int_equal(so_pick(w, N, 1.5, part, weight), 70);
    assert_int_equal(so_pick(w, N, 2.5, part, weight), 150);
    assert_int_equal(so_pick(w, N, 3.5, part, weight), 150); /* the total is below `at` */
    assert_int_equal(so_pick(w, 128, 3.5, part, weight), 70);
    assert_int_equal(so_pick(w, 65, 3.5, part, weight), 3); /* in a part that was skipped */
    assert_int_equal(so_pick(w, 4, 0.5, part, weight), 3);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_median),
        cmocka_unit_test(test_chi2_tail),
        cmocka_unit_test(test_pick),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
