/* `sooth theory`: the gain of speculation by the formulas of verify/theory.h.
 *
 *   sooth theory --alpha A [--gamma G] [--c C]   one point
 *   sooth theory --ssd --alpha A …               drafting ahead (theory_ssd.c)
 *   sooth theory                                 the paper's tables and figures
 *   sooth theory --measure -m M …                tables 3 to 5 for the user's models (measure.c)
 *
 * Each form prints text or, with --json, one object. Without --measure, --svg FILE draws figures
 * 2 to 4 and marks alpha if it is given. All numbers are computed by the program; the paper's own
 * numbers are printed next to them with a label. Main thread only. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "base/str.h"
#include "cli/measure.h"
#include "cli/options.h"
#include "cli/plot.h"
#include "cli/theory_ssd.h"
#include "verify/theory.h"

enum { DEFAULT_GAMMA = 5 };

/* --- one point --- */

typedef struct point {
    double alpha, c, c_hat;
    int gamma;
} point;

typedef struct fact {
    const char *key, *text;
    double value;
} fact;

enum { N_FACTS = 12 };

static void point_facts(const point *p, fact f[N_FACTS]) {
    double match = so_theory_accept_match_bound(p->alpha);
    int best = so_theory_best_gamma(p->alpha, p->c);
    const fact all[N_FACTS] = {
        {"expected_tokens", "tokens per round, equation (1)",
         so_theory_expected_tokens(p->alpha, p->gamma)},
        {"speedup", "speed-up, theorem 3.8", so_theory_speedup(p->alpha, p->gamma, p->c)},
        {"operations", "operations, theorem 3.11",
         so_theory_operations(p->alpha, p->gamma, p->c_hat)},
        {"memory_accesses", "reads of weights and cache, section 3.4",
         so_theory_memory(p->alpha, p->gamma)},
        {"best_gamma", "best gamma, section 3.5", best},
        {"best_speedup", "speed-up with the best gamma", so_theory_speedup(p->alpha, best, p->c)},
        {"oracle_tokens", "tokens per round if an oracle chose gamma",
         so_theory_oracle_tokens(p->alpha)},
        {"oracle_speedup", "speed-up if an oracle chose gamma",
         so_theory_oracle_speedup(p->alpha, p->c)},
        {"reject_acceptance", "acceptance of --verify reject", p->alpha},
        {"match_acceptance_bound", "acceptance of --verify match, at least", match},
        {"match_speedup_bound", "speed-up of --verify match, at least",
         so_theory_speedup(match, p->gamma, p->c)},
        {"rejection_sampling_acceptance_bound", "acceptance of rejection sampling (A.2), at most",
         p->alpha},
    };
    for (int i = 0; i < N_FACTS; i++)
        f[i] = all[i];
}

static void print_point(const point *p) {
    fact f[N_FACTS];
    point_facts(p, f);
    printf("alpha %g, gamma %d, c %g (in operations %g)\n\n", p->alpha, p->gamma, p->c, p->c_hat);
    for (int i = 0; i < N_FACTS; i++)
        printf("  %-48s %.4g\n", f[i].text, f[i].value);
    if (so_theory_best_gamma(p->alpha, p->c) == SO_THEORY_MAX_GAMMA)
        printf("\nThe speed-up grows with gamma without limit; the largest gamma is %d.\n",
               SO_THEORY_MAX_GAMMA);
}

/* JSON has no infinity. */
static json_t *number(double x) { return isfinite(x) ? json_real(x) : json_null(); }

static json_t *point_json(const point *p) {
    fact f[N_FACTS];
    point_facts(p, f);
    json_t *o = json_pack("{s:f,s:i,s:f,s:f}", "alpha", p->alpha, "gamma", p->gamma, "c", p->c,
                          "c_hat", p->c_hat);
    for (int i = 0; i < N_FACTS; i++)
        json_object_set_new(o, f[i].key,
                            strcmp(f[i].key, "best_gamma") == 0
                                ? json_integer((json_int_t)f[i].value)
                                : number(f[i].value));
    return o;
}

/* --- the paper's tables --- */

static void print_tables(void) {
    puts("Table 1: operations and speed against plain decoding, c = 0\n\n"
         "  alpha  gamma   operations (paper)       speed (paper)");
    for (int i = 0; i < SO_THEORY_N1; i++) {
        const so_theory_row1 *r = &so_theory_table1[i];
        printf("  %5.1f  %5d  %11.2f  (%.2f)  %10.2f  (%.2f)\n", r->alpha, r->gamma,
               so_theory_operations(r->alpha, r->gamma, 0), r->operations,
               so_theory_speedup(r->alpha, r->gamma, 0), r->speed);
    }
    puts("\nTable 4: expected speed-up, from the paper's rounded alpha and c\n\n"
         "  task   draft     temp  gamma  alpha     c   expected  (paper)  measured there");
    for (int i = 0; i < SO_THEORY_N4; i++) {
        const so_theory_row4 *r = &so_theory_table4[i];
        printf("  %-6s %-9s %4d  %5d  %5.2f  %4.2f  %9.2f  (%5.1f)  %14.1f\n", r->task, r->draft,
               r->temp, r->gamma, r->alpha, r->c, so_theory_speedup(r->alpha, r->gamma, r->c),
               r->expected, r->measured);
    }
    printf("\nA bigram table, alpha 0.2, gamma 3, c 0 (section 3.6): %.3f (paper: 1.25)\n",
           so_theory_speedup(0.2, 3, 0));
}

/* The paper gives no gamma for temperature 1; the best one is used. */
static double lenient_speed1(const so_theory_lenience *r) {
    int best = so_theory_best_gamma(r->alpha_temp1, SO_THEORY_LENIENCE_C);
    return so_theory_speedup(r->alpha_temp1, best, SO_THEORY_LENIENCE_C);
}

static double lenient_speed0(const so_theory_lenience *r) {
    return so_theory_speedup(r->alpha_temp0, SO_THEORY_LENIENCE_GAMMA, SO_THEORY_LENIENCE_C);
}

static void print_lenience(void) {
    printf("\nLenience (A.5), c = %g; at temperature 0 gamma is %d, at 1 the best one\n\n"
           "  lenience   alpha, temp 0   speed (paper)   alpha, temp 1   speed (paper)\n",
           SO_THEORY_LENIENCE_C, SO_THEORY_LENIENCE_GAMMA);
    for (int i = 0; i < SO_THEORY_N_LENIENCE; i++) {
        const so_theory_lenience *r = &so_theory_lenience_rows[i];
        printf("  %8.1f  %14.2f  %6.2f   (%.1f)  %14.2f  %6.2f   (%.1f)\n", r->lenience,
               r->alpha_temp0, lenient_speed0(r), r->speed_temp0, r->alpha_temp1, lenient_speed1(r),
               r->speed_temp1);
    }
}

static json_t *table1_json(void) {
    json_t *rows = json_array();
    for (int i = 0; i < SO_THEORY_N1; i++) {
        const so_theory_row1 *r = &so_theory_table1[i];
        json_array_append_new(
            rows, json_pack("{s:f,s:i,s:f,s:f,s:f,s:f}", "alpha", r->alpha, "gamma", r->gamma,
                            "operations", so_theory_operations(r->alpha, r->gamma, 0), "speedup",
                            so_theory_speedup(r->alpha, r->gamma, 0), "paper_operations",
                            r->operations, "paper_speedup", r->speed));
    }
    return rows;
}

static json_t *table4_json(void) {
    json_t *rows = json_array();
    for (int i = 0; i < SO_THEORY_N4; i++) {
        const so_theory_row4 *r = &so_theory_table4[i];
        json_array_append_new(
            rows, json_pack("{s:s,s:s,s:i,s:i,s:f,s:f,s:f,s:f,s:f}", "task", r->task, "draft",
                            r->draft, "temp", r->temp, "gamma", r->gamma, "alpha", r->alpha, "c",
                            r->c, "expected", so_theory_speedup(r->alpha, r->gamma, r->c),
                            "paper_expected", r->expected, "paper_measured", r->measured));
    }
    return rows;
}

static json_t *lenience_json(void) {
    json_t *rows = json_array();
    for (int i = 0; i < SO_THEORY_N_LENIENCE; i++) {
        const so_theory_lenience *r = &so_theory_lenience_rows[i];
        const double alpha[2] = {r->alpha_temp0, r->alpha_temp1};
        const double ours[2] = {lenient_speed0(r), lenient_speed1(r)};
        const double paper[2] = {r->speed_temp0, r->speed_temp1};
        for (int temp = 0; temp < 2; temp++)
            json_array_append_new(rows, json_pack("{s:f,s:i,s:f,s:f,s:f}", "lenience", r->lenience,
                                                  "temp", temp, "alpha", alpha[temp], "speedup",
                                                  ours[temp], "paper_speedup", paper[temp]));
    }
    return rows;
}

/* --- figures --- */

enum { MAX_LINES = 6, N_ALPHAS = 100 }; /* alpha 0, 0.01, … 0.99 */

typedef struct figure {
    const char *key, *title, *param_name;
    const char *corner, *style; /* position of the legend, and how gnuplot joins the points */
    double (*value)(double alpha, double param);
    double y_max;
    int n_lines;
    double params[MAX_LINES];
} figure;

static double tokens_of(double alpha, double gamma) {
    return isinf(gamma) ? so_theory_oracle_tokens(alpha)
                        : so_theory_expected_tokens(alpha, (int)gamma);
}
static double best_gamma_of(double alpha, double c) { return so_theory_best_gamma(alpha, c); }
static double speed_of(double alpha, double gamma) {
    return so_theory_speedup(alpha, (int)gamma, 0);
}
static double operations_of(double alpha, double gamma) {
    return so_theory_operations(alpha, (int)gamma, 0);
}

static const figure figures[] = {
    {.key = "figure2",
     .title = "Figure 2: tokens per round",
     .param_name = "gamma",
     .corner = "left",
     .style = "lines",
     .value = tokens_of,
     .y_max = 12,
     .n_lines = 6,
     .params = {1, 3, 5, 7, 10, INFINITY}},
    {.key = "figure3",
     .title = "Figure 3: best gamma",
     .param_name = "c",
     .corner = "left",
     .style = "steps",
     .value = best_gamma_of,
     .y_max = 32,
     .n_lines = 5,
     .params = {0.01, 0.02, 0.05, 0.1, 0.2}},
    {.key = "figure4_speedup",
     .title = "Figure 4: speed-up, c = 0",
     .param_name = "gamma",
     .corner = "left",
     .style = "lines",
     .value = speed_of,
     .y_max = 12,
     .n_lines = 5,
     .params = {1, 3, 5, 7, 10}},
    {.key = "figure4_operations",
     .title = "Figure 4: operations, c = 0",
     .param_name = "gamma",
     .corner = "right",
     .style = "lines",
     .value = operations_of,
     .y_max = 12,
     .n_lines = 5,
     .params = {1, 3, 5, 7, 10}},
};

static void print_figure(const figure *f) {
    printf("\n%s, by alpha and %s\n\n  alpha", f->title, f->param_name);
    for (int s = 0; s < f->n_lines; s++)
        printf(" %8g", f->params[s]);
    putchar('\n');
    for (int i = 10; i < N_ALPHAS; i += i < 90 ? 10 : 5) {
        printf("  %5.2f", i / (double)N_ALPHAS);
        for (int s = 0; s < f->n_lines; s++)
            printf(" %8.3g", f->value(i / (double)N_ALPHAS, f->params[s]));
        putchar('\n');
    }
}

static json_t *figure_json(const figure *f) {
    json_t *o = json_object(), *x = json_array(), *lines = json_object();
    char name[32];
    for (int i = 0; i < N_ALPHAS; i++)
        json_array_append_new(x, json_real(i / (double)N_ALPHAS));
    for (int s = 0; s < f->n_lines; s++) {
        json_t *y = json_array();
        for (int i = 0; i < N_ALPHAS; i++)
            json_array_append_new(y, number(f->value(i / (double)N_ALPHAS, f->params[s])));
        snprintf(name, sizeof name, "%g", f->params[s]);
        json_object_set_new(lines, name, y);
    }
    json_object_set_new(o, "title", json_string(f->title));
    json_object_set_new(o, "alpha", x);
    json_object_set_new(o, f->param_name, lines);
    return o;
}

/* Distinguishable with colour blindness (Okabe and Ito). */
static const char *const colours[MAX_LINES] = {"#0072b2", "#e69f00", "#009e73",
                                               "#cc79a7", "#d55e00", "#000000"};

static void figure_script(const figure *f, so_buf *b) {
    so_buf_printf(b, "set title '%s'\nset yrange [0:%g]\nset key top %s Left reverse\nplot ",
                  f->title, f->y_max, f->corner);
    for (int s = 0; s < f->n_lines; s++)
        so_buf_printf(b, "%s'-' with %s lw 2 lc rgb '%s' title '%s = %g'", s ? ", " : "", f->style,
                      colours[s], f->param_name, f->params[s]);
    so_buf_append_c(b, "\n");
    for (int s = 0; s < f->n_lines; s++) {
        for (int i = 0; i < N_ALPHAS; i++)
            so_buf_printf(b, "%g %g\n", i / (double)N_ALPHAS,
                          f->value(i / (double)N_ALPHAS, f->params[s]));
        so_buf_append_c(b, "e\n");
    }
}

static int draw_figures(const char *path, const point *mark, so_err *err) {
    so_buf b = {0};
    so_buf_append_c(&b, "set encoding utf8\nset multiplot layout 2,2\n"
                        "set grid lt 1 lc rgb '#dddddd'\nset xlabel 'alpha'\nset xrange [0:1]\n");
    if (mark)
        so_buf_printf(&b, "set arrow from %g, graph 0 to %g, graph 1 nohead dt 2 lc 'black'\n",
                      mark->alpha, mark->alpha);
    for (size_t i = 0; i < SO_LEN(figures); i++)
        figure_script(&figures[i], &b);
    so_buf_append_c(&b, "unset multiplot\n");
    int rc = so_plot_svg(so_buf_str(&b), 1000, 760, path, err);
    so_buf_free(&b);
    return rc;
}

/* --- the command --- */

static void print_paper(void) {
    print_tables();
    print_lenience();
    for (size_t i = 0; i < SO_LEN(figures); i++)
        print_figure(&figures[i]);
}

static json_t *paper_json(void) {
    json_t *o = json_object();
    json_object_set_new(o, "table1", table1_json());
    json_object_set_new(o, "table4", table4_json());
    json_object_set_new(o, "bigram_speedup", json_real(so_theory_speedup(0.2, 3, 0)));
    json_object_set_new(o, "lenience", lenience_json());
    for (size_t i = 0; i < SO_LEN(figures); i++)
        json_object_set_new(o, figures[i].key, figure_json(&figures[i]));
    return o;
}

static void print_json(json_t *o) {
    json_dumpf(o, stdout, JSON_COMPACT | JSON_REAL_PRECISION(12));
    putchar('\n');
    json_decref(o);
}

/* Refuses options that apply only with, or only without, --measure. */
static int check_measure(const so_args *a) {
    static const so_opt with[] = {
        SO_OPT_MODEL,   SO_OPT_DRAFT_MODEL, SO_OPT_QUANTIZE,    SO_OPT_CTX,  SO_OPT_KV_TYPE,
        SO_OPT_THREADS, SO_OPT_CPU_LEVEL,   SO_OPT_BATCH,       SO_OPT_FILE, SO_OPT_RAW,
        SO_OPT_PROMPTS, SO_OPT_PARALLEL,    SO_OPT_PREDICT,     SO_OPT_SEED, SO_OPT_TEMP,
        SO_OPT_SPEC,    SO_OPT_DEVICE,      SO_OPT_DRAFT_DEVICE};
    static const so_opt without[] = {SO_OPT_ALPHA, SO_OPT_C, SO_OPT_C_HAT, SO_OPT_SVG};
    bool measure = so_args_has(a, SO_OPT_MEASURE);
    for (size_t i = 0; i < SO_LEN(with) && !measure; i++)
        if (so_args_has(a, with[i]))
            return so_args_bad(a, "options about models, drafters and prompts need --measure");
    for (size_t i = 0; i < SO_LEN(without) && measure; i++)
        if (so_args_has(a, without[i]))
            return so_args_bad(a, "--measure measures alpha and c and draws no figure: remove "
                                  "--alpha, --c, --c-hat and --svg");
    return 0;
}

static int run(const so_args *a) {
    int status = check_measure(a);
    if (status != 0)
        return status;
    if (so_args_has(a, SO_OPT_MEASURE))
        return so_theory_measure(a);
    static const so_opt needs_ssd[] = {SO_OPT_HIT_RATE,   SO_OPT_ROW_COST,         SO_OPT_FAN_COST,
                                       SO_OPT_CONTENTION, SO_OPT_DRAFT_CONTENTION, SO_OPT_SCALING};
    if (so_args_has(a, SO_OPT_SSD))
        return so_theory_ahead(a);
    for (size_t i = 0; i < SO_LEN(needs_ssd); i++)
        if (so_args_has(a, needs_ssd[i]))
            return so_args_bad(a, "--%s needs --ssd", so_option_at(needs_ssd[i])->name);
    bool one = so_args_has(a, SO_OPT_ALPHA);
    const so_opt needs_alpha[] = {SO_OPT_GAMMA, SO_OPT_C, SO_OPT_C_HAT};
    for (size_t i = 0; i < SO_LEN(needs_alpha); i++)
        if (!one && so_args_has(a, needs_alpha[i]))
            return so_args_bad(a, "--gamma, --c and --c-hat need --alpha");
    double c = so_args_float(a, SO_OPT_C, 0);
    point p = {so_args_float(a, SO_OPT_ALPHA, 0), c, so_args_float(a, SO_OPT_C_HAT, c),
               (int)so_args_int(a, SO_OPT_GAMMA, DEFAULT_GAMMA)};
    const char *svg = so_args_str(a, SO_OPT_SVG, NULL);
    so_err err = {0};
    if (svg && draw_figures(svg, one ? &p : NULL, &err) != SO_OK)
        return so_args_fail(a, &err);
    if (so_args_has(a, SO_OPT_JSON))
        print_json(one ? point_json(&p) : paper_json());
    else if (one)
        print_point(&p);
    else
        print_paper();
    return 0;
}

int so_cmd_theory(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_THEORY, argc, argv))
        return a.status;
    int status = run(&a);
    so_args_free(&a);
    return status;
}
