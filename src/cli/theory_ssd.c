/* `sooth theory --ssd`: what drafting ahead, async(model), gains over synchronous drafting, by the
 * formulas of verify/theory.h, each at its own best length.
 *
 * The inputs are numbers that `run --json` and `bench curve` report: alpha, the cost c of a guess and
 * the cost of a row in units of a one-row pass, the hit rate, and how much slower the draft model
 * makes one guess for all outcomes than for one. `bench pair` measures how much target and draft slow
 * each other down. Main thread only. */
#include <jansson.h>
#include <stdio.h>

#include "cli/theory_ssd.h"
#include "verify/theory.h"

enum { MOST = 16 };

static so_theory_ssd read_inputs(const so_args *a) {
    return (so_theory_ssd){.alpha = so_args_float(a, SO_OPT_ALPHA, 0),
                           .c = so_args_float(a, SO_OPT_C, 0),
                           .hit_rate = so_args_float(a, SO_OPT_HIT_RATE, 0.8),
                           .row_cost = so_args_float(a, SO_OPT_ROW_COST, 0),
                           .fan_cost = so_args_float(a, SO_OPT_FAN_COST, 1),
                           .sync = true,
                           .slow = so_args_float(a, SO_OPT_CONTENTION, 1),
                           .draft_slow = so_args_float(a, SO_OPT_DRAFT_CONTENTION, 1),
                           .scaling = so_args_float(a, SO_OPT_SCALING, 1)};
}

static double without_fallback(so_theory_ssd x, int gamma) {
    x.sync = false;
    return so_theory_ssd_speedup(&x, gamma);
}

static int best_without_fallback(so_theory_ssd x) {
    x.sync = false;
    return so_theory_ssd_best(&x, MOST);
}

static void print_text(const so_theory_ssd *x) {
    int sync = so_theory_ssd_best_synchronous(x, MOST), ahead = so_theory_ssd_best(x, MOST);
    int alone = best_without_fallback(*x);
    double base = so_theory_ssd_synchronous(x, sync);
    printf(
        "alpha %g, c %g, hit rate %g, a row costs %g, a guess for all outcomes costs %g of one;\n"
        "beside each other a pass of the target takes %g and one of the draft %g times as long;\n"
        "synchronous drafting is %g times as fast on all cores\n\n"
        "  gamma  synchronous  ahead, misses synchronous  ahead, misses plain\n",
        x->alpha, x->c, x->hit_rate, x->row_cost, x->fan_cost, x->slow, x->draft_slow, x->scaling);
    for (int g = 1; g <= MOST; g++)
        printf("  %5d  %11.3f  %25.3f  %19.3f\n", g, so_theory_ssd_synchronous(x, g),
               so_theory_ssd_speedup(x, g), without_fallback(*x, g));
    printf("\n  best: synchronous %.3f (gamma %d); ahead %.3f (gamma %d), %.3f times as fast; with "
           "plain misses %.3f (gamma %d), %.3f times\n",
           base, sync, so_theory_ssd_speedup(x, ahead), ahead,
           so_theory_ssd_speedup(x, ahead) / base, without_fallback(*x, alone), alone,
           without_fallback(*x, alone) / base);
}

static json_t *mode_json(int gamma, double speedup, double base) {
    return json_pack("{s:i, s:f, s:f}", "best_gamma", gamma, "speedup", speedup, "ratio",
                     speedup / base);
}

static void print_json(const so_theory_ssd *x) {
    int sync = so_theory_ssd_best_synchronous(x, MOST), ahead = so_theory_ssd_best(x, MOST);
    int alone = best_without_fallback(*x);
    double base = so_theory_ssd_synchronous(x, sync);
    json_t *rows = json_array();
    for (int g = 1; g <= MOST; g++)
        json_array_append_new(rows, json_pack("{s:i, s:f, s:f, s:f}", "gamma", g, "synchronous",
                                              so_theory_ssd_synchronous(x, g), "ahead",
                                              so_theory_ssd_speedup(x, g), "ahead_plain_misses",
                                              without_fallback(*x, g)));
    json_t *o =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o, s:o, s:o, s:o}", "alpha", x->alpha,
                  "c", x->c, "hit_rate", x->hit_rate, "row_cost", x->row_cost, "fan_cost",
                  x->fan_cost, "contention", x->slow, "draft_contention", x->draft_slow, "scaling",
                  x->scaling, "rows", rows, "synchronous", mode_json(sync, base, base), "ahead",
                  mode_json(ahead, so_theory_ssd_speedup(x, ahead), base), "ahead_plain_misses",
                  mode_json(alone, without_fallback(*x, alone), base));
    json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(12));
    putchar('\n');
    json_decref(o);
}

int so_theory_ahead(const so_args *a) {
    so_theory_ssd x = read_inputs(a);
    if (!so_args_has(a, SO_OPT_ALPHA))
        return so_args_bad(a, "--ssd needs --alpha, and usually --c");
    if (so_args_has(a, SO_OPT_JSON))
        print_json(&x);
    else
        print_text(&x);
    return 0;
}
