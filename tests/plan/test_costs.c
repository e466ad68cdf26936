/* Costs: the curve t(n) on simulated machines, drafting levels by chains, round trips to a device,
 * the host's part. */
#include "../draft/rig.h"

#include <math.h>

#include "plan/costs.h"

/* A machine on which a row adds a tenth of a pass. */
static double mild(int n) { return 10 + 1.0 * (n - 1); }

/* --- the curve --- */

static void curve_learns(void **state) {
    (void)state;
    static so_curve c;
    dice d = {.seed = 101};
    c = (so_curve){0};
    assert_true(so_curve_ms(&c, 1) == 0);
    const int ns[] = {1, 2, 4, 8, 16};
    for (int i = 0; i < 400; i++) {
        int n = ns[dice_below(&d, 5)];
        double noise = dice_below(&d, 20) ? 0.97 + 0.06 * dice_uniform(&d) : 5; /* 5 %: five-fold */
        so_curve_observe(&c, n, mild(n) * noise);
    }
    for (int i = 0; i < 5; i++)
        if (fabs(so_curve_ms(&c, ns[i]) / mild(ns[i]) - 1) > 0.08)
            fail_msg("t(%d) = %g, is %g", ns[i], so_curve_ms(&c, ns[i]), mild(ns[i]));
    for (int n = 1; n <= 24; n++) /* elsewhere an estimate, on the low side */
        assert_true(so_curve_ms(&c, n) < 1.08 * mild(n) && so_curve_ms(&c, n) > 0.75 * mild(n));
    for (int n = 1; n < 600; n++)
        assert_true(so_curve_ms(&c, n + 1) >= so_curve_ms(&c, n));
}

/* The first pass of a run is prefill. What it implies for one row depends on an unknown slope, so
 * the first narrow passes must outweigh it at once. */
static void curve_starts_from_prefill(void **state) {
    (void)state;
    for (int k = 1; k <= 4; k++) {
        static so_curve c;
        double slope = 0.06 * k;
        c = (so_curve){0};
        so_curve_observe(&c, 232, 7 * (1 + slope * 231));
        so_curve_observe(&c, 2, 7 * (1 + slope));
        so_curve_observe(&c, 4, 7 * (1 + slope * 3));
        for (int n = 1; n <= 6; n++) {
            double want = 7 * (1 + slope * (n - 1));
            if (fabs(so_curve_ms(&c, n) / want - 1) > 0.12)
                fail_msg("slope %.2f: t(%d) = %g, is %g", slope, n, so_curve_ms(&c, n), want);
        }
    }
}

/* A longer context slows all passes down: measured at one width, learned for all. */
static void curve_follows_drift(void **state) {
    (void)state;
    static so_curve c;
    c = (so_curve){0};
    for (int i = 0; i < 50; i++)
        for (int n = 1; n <= 8; n++)
            so_curve_observe(&c, n, mild(n));
    for (int i = 0; i < 60; i++)
        so_curve_observe(&c, 5, 1.5 * mild(5));
    assert_true(fabs(so_curve_ms(&c, 5) / (1.5 * mild(5)) - 1) < 0.05);
    assert_true(so_curve_ms(&c, 1) > 1.2 * mild(1));
    for (int i = 0; i < 60; i++)
        so_curve_observe(&c, 1, 1.5 * mild(1));
    assert_true(fabs(so_curve_ms(&c, 1) / (1.5 * mild(1)) - 1) < 0.05);
}

static void curve_ignores_nonsense(void **state) {
    (void)state;
    static so_curve c;
    c = (so_curve){0};
    const double odd[] = {0, -1, NAN, INFINITY};
    for (int i = 0; i < 4; i++)
        so_curve_observe(&c, 1, odd[i]);
    so_curve_observe(&c, 0, 5);
    so_curve_observe(&c, -3, 5);
    so_curve_observe(&c, 100000, 5);
    assert_true(so_curve_ms(&c, 1) == 0);
    so_curve_observe(&c, 1, 10);
    so_curve_observe(&c, 2, 1e9); /* a pass never costs more than its rows one by one */
    assert_true(so_curve_ms(&c, 2) <= 25);
    assert_true(so_curve_ms(&c, 100000) > so_curve_ms(&c, 512));
}

static void curve_is_kept(void **state) {
    (void)state;
    static so_curve a, b;
    so_curve_point points[SO_CURVE_MAX];
    so_err err = {0};
    a = b = (so_curve){0};
    for (int i = 0; i < 20; i++)
        for (int n = 1; n <= 20; n += 3)
            so_curve_observe(&a, n, mild(n));
    int k = so_curve_export(&a, points, SO_CURVE_MAX);
    assert_int_equal(k, 7);
    SO_OK_OR_FAIL(so_curve_import(&b, points, k, &err), err);
    for (int n = 1; n <= 40; n++)
        assert_true(fabs(so_curve_ms(&a, n) / so_curve_ms(&b, n) - 1) < 0.03);
    for (int i = 0; i < 12; i++)
        so_curve_observe(&b, 4, 2 * mild(4)); /* another machine: learned soon */
    assert_true(so_curve_ms(&b, 4) > 1.6 * mild(4));
    assert_int_equal(so_curve_export(&a, points, 2), 2);
    const so_curve_point bad[] = {{0, 1, 1},   {513, 1, 1}, {1, 0, 1},       {1, -1, 1},
                                  {1, NAN, 1}, {1, 1, NAN}, {1, INFINITY, 1}};
    double before = so_curve_ms(&a, 3);
    for (size_t i = 0; i < SO_LEN(bad); i++)
        assert_int_equal(so_curve_import(&a, &bad[i], 1, &err), SO_EINVAL);
    assert_true(so_curve_ms(&a, 3) == before);
}

/* --- drafters --- */

static void call(so_costs *c, so_draft_cost *d, int chains, int levels, int read, double ms) {
    so_draft_usage u = {
        .chains = chains, .levels = levels, .n_catch_up = read, .max_catch_up = read, .ms = ms};
    so_costs_observe_draft(c, d, &u);
}

/* A level costs more for several chains, and catch-up is separated from drafting. */
static void draft_levels_by_chains(void **state) {
    (void)state;
    static so_costs c;
    c = (so_costs){0};
    so_draft_cost *d = so_costs_drafter(&c, "model", 0.1);
    assert_ptr_equal(so_costs_drafter(&c, "model", 0.5), d);
    assert_true(so_costs_level(&c, d, 1) == 0); /* nothing was measured */
    for (int i = 0; i < 8; i++)
        so_costs_observe_pass(&c, 1, 10, false);
    double prior = so_costs_level(&c, d, 1);
    assert_true(prior > 1 && prior < 2); /* by size, plus a constant */
    for (int i = 0; i < 40; i++) {
        call(&c, d, 1, 4, 1, 4 * 2.0);
        call(&c, d, 8, 2, 1, 2 * 5.0);
    }
    call(&c, d, 1, 1, 100, 2.0 + 100 * 0.25);
    assert_true(fabs(so_costs_level(&c, d, 1) / 2 - 1) < 0.08);
    assert_true(fabs(so_costs_level(&c, d, 8) / 5 - 1) < 0.08);
    assert_true(so_costs_level(&c, d, 4) > 2 && so_costs_level(&c, d, 4) < 5);
    assert_true(fabs(so_costs_catch_up(&c, d) / 0.25 - 1) < 0.05);
    for (int i = 0; i < 20; i++)
        call(&c, d, 1, 1, 30, 1000); /* something else took the time */
    assert_true(so_costs_catch_up(&c, d) == so_costs_level(&c, d, 1));
    so_costs_deinit(&c);
}

/* The costs of an unused drafter follow the machine when it becomes twice as fast. */
static void unused_drafters_follow_the_speed(void **state) {
    (void)state;
    static so_costs c;
    c = (so_costs){0};
    so_draft_cost *d = so_costs_drafter(&c, "model", 0.1);
    for (int i = 0; i < 40; i++) {
        so_costs_observe_pass(&c, 1, 20, false);
        call(&c, d, 1, 2, 1, 8);
    }
    double slow = so_costs_level(&c, d, 1);
    for (int i = 0; i < 100; i++)
        so_costs_observe_pass(&c, 1, 10, false);
    assert_true(fabs(so_costs_level(&c, d, 1) / (slow / 2) - 1) < 0.1);
    so_costs_deinit(&c);
}

/* --- round trips --- */

static const double TRIP_MS = 0.11, LEVEL_MS = 0.04;

/* A drafter on a device of some speed. */
typedef struct device {
    so_costs c;
    so_draft_cost *d;
    dice r;
    double pace;
    bool spikes; /* one call in twenty takes five times as long */
} device;

static void device_open(device *v, double pace) {
    *v = (device){.r = {.seed = 21}, .pace = pace};
    v->d = so_costs_drafter(&v->c, "model", 0.1);
    so_trip_start(&v->d->trip);
    for (int i = 0; i < 8; i++)
        so_costs_observe_pass(&v->c, 1, 0.5 * pace, false);
}

static double true_ms(int passes, int levels) { return passes * TRIP_MS + levels * LEVEL_MS; }

/* n calls in turns with a and with b levels, with 5 % of noise, in one round trip each. */
static void device_calls(device *v, int n, int a, int b) {
    for (int k = 0; k < n; k++) {
        int levels = k % 2 ? b : a;
        double ms = v->pace * true_ms(1, levels) * (0.95 + 0.1 * dice_uniform(&v->r));
        ms *= v->spikes && dice_below(&v->r, 20) == 0 ? 5 : 1;
        so_draft_usage u = {
            .chains = 1, .levels = levels, .passes = 1, .max_catch_up = 1, .ms = ms};
        so_costs_observe_draft(&v->c, v->d, &u);
    }
}

static double call_ms(const device *v, int passes, int levels) {
    so_draft_usage u = {.chains = 1, .levels = levels, .passes = passes};
    return so_costs_usage(&v->c, v->d, &u);
}

static void is_within(const char *what, double ms, double want, double error) {
    if (fabs(ms / want - 1) > error)
        fail_msg("%s: %g ms, is %g", what, ms, want);
}

/* Calls with different numbers of levels tell the trip from its levels, also if some calls are
 * interrupted. */
static void trips_are_told_from_levels(void **state) {
    (void)state;
    static const int LEVELS[][2] = {{1, 2}, {1, 6}, {2, 4}};
    static device v;
    for (size_t i = 0; i < 2 * SO_LEN(LEVELS); i++) {
        const int *levels = LEVELS[i / 2];
        device_open(&v, 1);
        v.spikes = i % 2;
        device_calls(&v, 400, levels[0], levels[1]);
        v.spikes = false; /* an interruption counts until the next calls */
        device_calls(&v, 20, levels[0], levels[1]);
        is_within("trip", so_costs_trip(&v.c, v.d), TRIP_MS, i % 2 ? 0.1 : 0.05);
        is_within("level", so_costs_level(&v.c, v.d, 1), LEVEL_MS, 0.15);
        is_within("one level", call_ms(&v, 1, 1), true_ms(1, 1), 0.05);
        is_within("twelve levels", call_ms(&v, 1, 12), true_ms(1, 12), 0.1);
        is_within("three trips", call_ms(&v, 3, 3), true_ms(3, 3), 0.05);
        so_costs_deinit(&v.c);
    }
}

/* While every call has one ratio of levels to trips, that call is predicted correctly, the trip stays
 * at its prior, and the first calls with another ratio correct it. */
static void one_ratio_leaves_the_prior(void **state) {
    (void)state;
    static device v;
    for (int levels = 1; levels <= 4; levels++) {
        device_open(&v, 1);
        device_calls(&v, 200, levels, levels);
        double part = v.d->trip.fixed_part;
        is_within("the same call", call_ms(&v, 1, levels), true_ms(1, levels), 0.05);
        assert_true(part > 0.35 && part < 0.65);
        assert_true(so_costs_trip(&v.c, v.d) > 0 && so_costs_level(&v.c, v.d, 1) > 0);
        device_calls(&v, 6, levels + 4, levels + 4);
        is_within("a longer call", call_ms(&v, 1, levels + 4), true_ms(1, levels + 4), 0.1);
        is_within("trip", so_costs_trip(&v.c, v.d), TRIP_MS, 0.25);
        so_costs_deinit(&v.c);
    }
}

/* A trip begins with the first level and after each `per_trip` of them. */
static void levels_share_trips(void **state) {
    (void)state;
    const so_level_costs l = {.trip_ms = 10, .level_ms = 1, .per_trip = 3};
    const double sums[] = {11, 12, 13, 24, 25, 26, 37};
    double sum = 0;
    for (int d = 1; d <= (int)SO_LEN(sums); d++) {
        sum += so_level_costs_next(&l, d);
        assert_true(fabs(sum - sums[d - 1]) < 1e-9);
        assert_true(fabs(so_level_costs_sum(&l, d) - sums[d - 1]) < 1e-9);
    }
}

/* What an earlier run knew less well than the prior does not count; what it knew exactly is believed
 * with some error, so that it can be corrected. */
static void imported_trips(void **state) {
    (void)state;
    so_trip t;
    so_trip_import(&t, 0.1, 0.6);
    assert_true(t.fixed_part == 0.5 && so_trip_error(&t) < 0.21);
    so_trip_import(&t, 0.1, 1e-9);
    assert_true(t.fixed_part == 0.1 && so_trip_error(&t) > 0.01);
    so_trip_import(&t, 7, 0.1);
    assert_true(t.fixed_part < 1);
}

/* Hours of drafts of one length, on a steady machine, do not move the fixed part either; and where levels
 * never share a trip, the hoped part grows until they would. */
static void the_prior_stays(void **state) {
    (void)state;
    static device v;
    for (int levels = 1; levels <= 8; levels *= 2) {
        device_open(&v, 1);
        double before = so_trip_hoped_part(&v.d->trip);
        device_calls(&v, 20000, levels, levels);
        if (fabs(v.d->trip.fixed_part - 0.5) > 0.1)
            fail_msg("%d levels: fixed part %.3f", levels, v.d->trip.fixed_part);
        if (levels == 1)
            assert_true(before < 0.75 && so_trip_hoped_part(&v.d->trip) > 0.9);
        so_costs_deinit(&v.c);
    }
}

/* The device becomes twice as fast in the middle, and the target's passes show it: the costs of the
 * drafter follow, used or not, and the fixed part stays as it is. */
static void trips_follow_the_speed(void **state) {
    (void)state;
    static device v;
    for (int used = 0; used < 2; used++) {
        device_open(&v, 2);
        for (int k = 0; k < 100; k++) {
            so_costs_observe_pass(&v.c, 1, 1, false);
            device_calls(&v, 2, 1, 4);
        }
        is_within("slow trip", so_costs_trip(&v.c, v.d), 2 * TRIP_MS, 0.1);
        double part = v.d->trip.fixed_part;
        v.pace = 1;
        for (int k = 0; k < 100; k++) {
            so_costs_observe_pass(&v.c, 1, 0.5, false);
            device_calls(&v, used ? 2 : 0, 1, 4);
        }
        is_within("trip", so_costs_trip(&v.c, v.d), TRIP_MS, 0.1);
        is_within("fixed part", v.d->trip.fixed_part, part, used ? 0.1 : 0);
        so_costs_deinit(&v.c);
    }
}

/* Without round trips the cost of a level is the time divided by the levels, however few passes an
 * inner drafter left. */
static void levels_without_trips(void **state) {
    (void)state;
    static so_costs c;
    c = (so_costs){0};
    so_draft_cost *d = so_costs_drafter(&c, "model", 0.1);
    for (int i = 0; i < 50; i++) {
        so_costs_observe_pass(&c, 1, 10, false);
        so_costs_observe_draft(
            &c, d, &(so_draft_usage){.chains = 1, .levels = 4, .passes = 1 + i % 4, .ms = 8});
    }
    assert_true(so_costs_trip(&c, d) == 0);
    is_within("level", so_costs_level(&c, d, 1), 2, 0.02);
    so_costs_deinit(&c);
}

/* Several chains: their levels cost more, the trip does not. */
static void trips_of_several_chains(void **state) {
    (void)state;
    static device v;
    device_open(&v, 1);
    for (int k = 0; k < 400; k++) {
        int chains = k % 2 ? 8 : 1, levels = 1 + k / 2 % 4;
        double ms = TRIP_MS + levels * (chains == 8 ? 2 * LEVEL_MS : LEVEL_MS);
        so_costs_observe_draft(
            &v.c, v.d,
            &(so_draft_usage){.chains = chains, .levels = levels, .passes = 1, .ms = ms});
    }
    is_within("trip", so_costs_trip(&v.c, v.d), TRIP_MS, 0.07);
    is_within("level of one", so_costs_level(&v.c, v.d, 1), LEVEL_MS, 0.15);
    is_within("level of eight", so_costs_level(&v.c, v.d, 8), 2 * LEVEL_MS, 0.15);
    so_costs_deinit(&v.c);
}

static void host_costs(void **state) {
    (void)state;
    static so_costs c;
    static so_verdict none, one = {.n_accepted = 1, .n_tested = 2};
    c = (so_costs){0};
    for (int i = 0; i < 50; i++) {
        so_costs_observe_verdict(&c, SO_VERIFY_MATCH, &none, 0.1);
        so_costs_observe_verdict(&c, SO_VERIFY_REJECT, &one, 0.2 + 2 * 0.3);
        so_costs_observe_verdict(&c, SO_VERIFY_MATCH, &one, 0.15);
    }
    so_costs_observe_verdict(&c, SO_VERIFY_REJECT, &one, 1000); /* an interruption */
    assert_true(fabs(c.draw_ms.value - 0.1) < 0.01);
    assert_true(so_costs_check(&c, SO_VERIFY_REJECT) < 0.4);
    assert_true(so_costs_check(&c, SO_VERIFY_REJECT) > 0.29);
    assert_true(so_costs_check(&c, SO_VERIFY_MATCH) == 0);
    so_costs_deinit(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(curve_learns),
        cmocka_unit_test(curve_starts_from_prefill),
        cmocka_unit_test(curve_follows_drift),
        cmocka_unit_test(curve_ignores_nonsense),
        cmocka_unit_test(curve_is_kept),
        cmocka_unit_test(draft_levels_by_chains),
        cmocka_unit_test(unused_drafters_follow_the_speed),
        cmocka_unit_test(trips_are_told_from_levels),
        cmocka_unit_test(one_ratio_leaves_the_prior),
        cmocka_unit_test(the_prior_stays),
        cmocka_unit_test(levels_share_trips),
        cmocka_unit_test(imported_trips),
        cmocka_unit_test(trips_follow_the_speed),
        cmocka_unit_test(levels_without_trips),
        cmocka_unit_test(trips_of_several_chains),
        cmocka_unit_test(host_costs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
