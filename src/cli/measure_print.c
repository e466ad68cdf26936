/* Prints the measurements as tables, each with an explanation of its columns, or as one JSON object
 * (keys in docs/speculation.md). Values that were not measured are a dash or null, never zero. */
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "cli/measure.h"
#include "cli/report.h"
#include "format/describe.h"

/* --- text --- */

/* A number in `width` columns, or a dash. */
static void put(double x, int width, int digits) {
    if (isfinite(x))
        printf(" %*.*f", width, digits, x);
    else
        printf(" %*s", width, "-");
}

static int name_width(const so_measure *m) {
    int width = 8;
    for (int k = 0; k < m->n_drafters; k++)
        width = SO_MAX(width, (int)strlen(m->drafters[k].name) + 1);
    return SO_MIN(width, 40);
}

static void put_name(const so_measure *m, const so_measure_drafter *d, int temp, int width) {
    char name[64];
    snprintf(name, sizeof name, "%.38s%s", d->name, d->counted ? "*" : "");
    printf("  %-*s %4g", width, name, (double)m->temps[temp]);
}

static const char *kind_of(const so_measure_drafter *d, const so_measure_result *r) {
    if (d->knows_text)
        return "told";
    return r->n_drawn == 0 ? "point" : (double)r->n_drawn < r->alpha.n ? "mixed" : "drawn";
}

static void print_table3(const so_measure *m, int width) {
    printf(
        "Table 3: acceptance. alpha: mean of sum min(p,q) over the positions with a guess (p(x) "
        "for a point;\nright or wrong for a drafter that gets the text). match: acceptance of "
        "--verify match there.\n+-: one standard error over texts. covered: fraction of positions "
        "with a guess.\n\n  %-*s temp  kind   alpha     +-   match     +-  covered\n",
        width, "drafter");
    for (int t = 0; t < m->n_temps; t++)
        for (int k = 0; k < m->n_drafters; k++) {
            const so_measure_drafter *d = &m->drafters[k];
            const so_measure_result *r = &d->results[t];
            if (r->covered.k == 0)
                continue;
            put_name(m, d, t, width);
            printf(" %5s", r->alpha.n > 0 ? kind_of(d, r) : "-");
            put(so_ratio_value(&r->alpha), 7, 4);
            put(so_ratio_error(&r->alpha), 6, 4);
            put(so_ratio_value(&r->match), 7, 4);
            put(so_ratio_error(&r->match), 6, 4);
            put(so_ratio_value(&r->covered), 8, 3);
            putchar('\n');
        }
}

static void print_passes(const so_measure *m) {
    printf("\nt(n): milliseconds of one pass over n rows after %d cached tokens, and ratio to n = "
           "1.\n\n  n    ",
           m->n_cached);
    for (int n = 1; n <= m->max_gamma + 1; n += n < 5 ? 1 : 4)
        printf(" %6d", n);
    printf("\n  ms   ");
    for (int n = 1; n <= m->max_gamma + 1; n += n < 5 ? 1 : 4)
        put(m->t_ms[n] > 0 ? m->t_ms[n] : NAN, 6, 2);
    printf("\n  ratio");
    for (int n = 1; n <= m->max_gamma + 1; n += n < 5 ? 1 : 4)
        put(m->t_ms[1] > 0 ? m->t_ms[n] / m->t_ms[1] : NAN, 6, 2);
    putchar('\n');
}

static double timed_alpha(const so_measure_result *r) {
    return r->n_tested > 0 ? (double)r->n_accepted / (double)r->n_tested : NAN;
}

static void print_table4(const so_measure *m, int width) {
    printf("\nTable 4: speed-up over plain decoding with --verify match. timed: alpha in the timed "
           "runs.\nc: time of one guess / time of a pass over one token. ideal: theorem 3.8. "
           "predicted: the same with\nthe measured t(n) and the time of sampling. measured: with "
           "gamma fixed. planned: with the planner.\n+-: one standard error over texts.\n\n"
           "  %-*s temp gamma  alpha  timed       c  ideal  predicted  measured     +-  planned"
           "     +-\n",
           width, "drafter");
    for (int t = 0; t < m->n_temps; t++)
        for (int k = 0; k < m->n_drafters; k++) {
            const so_measure_result *r = &m->drafters[k].results[t];
            if (r->gamma == 0)
                continue;
            put_name(m, &m->drafters[k], t, width);
            printf(" %5d", r->gamma);
            put(so_ratio_value(&r->match), 6, 2);
            put(timed_alpha(r), 6, 2);
            put(r->draft_ms / m->t_ms[1], 7, 4);
            put(r->ideal, 6, 2);
            put(r->predicted, 10, 2);
            put(so_ratio_value(&r->fixed), 9, 2);
            put(so_ratio_error(&r->fixed), 6, 2);
            put(so_ratio_value(&r->planned), 8, 2);
            put(so_ratio_error(&r->planned), 6, 2);
            puts(r->n_different ? "  DIFFERENT TEXT" : "");
        }
}

static void print_table5(const so_measure *m, int width) {
    printf(
        "\nTable 5: lenience (A.5; lossy below 1). a: alpha by lenience. speed: speed-up predicted "
        "from it\nwith the measured t(n) and the best gamma.\n\n  %-*s temp",
        width, "drafter");
    for (int i = 0; i < 2 * SO_MEASURE_LENIENCES; i++) {
        char head[32];
        snprintf(head, sizeof head, "%s %g", i < SO_MEASURE_LENIENCES ? "a" : "speed",
                 so_measure_leniences[i % SO_MEASURE_LENIENCES]);
        printf(" %*s", i < SO_MEASURE_LENIENCES ? 6 : 9, head);
    }
    putchar('\n');
    for (int t = 0; t < m->n_temps; t++)
        for (int k = 0; k < m->n_drafters; k++) {
            const so_measure_result *r = &m->drafters[k].results[t];
            if (r->lenient[0].n == 0)
                continue;
            put_name(m, &m->drafters[k], t, width);
            for (int i = 0; i < SO_MEASURE_LENIENCES; i++)
                put(so_ratio_value(&r->lenient[i]), 6, 3);
            for (int i = 0; i < SO_MEASURE_LENIENCES; i++)
                put(r->lenient_gamma[i] ? r->lenient_speed[i] : NAN, 9, 2);
            putchar('\n');
        }
}

/* Only for drafters with sampled guesses. */
static void print_several(const so_measure *m, int width) {
    bool any = false;
    for (int t = 0; t < m->n_temps; t++)
        for (int k = 0; k < m->n_drafters; k++) {
            const so_measure_result *r = &m->drafters[k].results[t];
            if (r->several[0].n == 0)
                continue;
            if (!any)
                printf("\nSeveral proposals: chance that --verify reject accepts one of k samples "
                       "from one row.\nown: measured with the drafter's own samples, k of "
                       "--spec 'model(k=K)'.\n\n  %-*s temp    own    k=1    k=2    k=3    k=4    "
                       "k=5    k=6    k=7    k=8\n",
                       width, "drafter");
            any = true;
            put_name(m, &m->drafters[k], t, width);
            put(so_ratio_value(&r->any), 6, 4);
            for (int i = 0; i < SO_MEASURE_PROPOSALS; i++)
                put(so_ratio_value(&r->several[i]), 6, 4);
            putchar('\n');
        }
}

static void print_text(const so_measure *m, bool complete) {
    int width = name_width(m);
    bool counted = false;
    if (!complete)
        puts("Interrupted; these are the results so far.\n");
    for (int t = 0; t < m->n_temps && m->got_texts[t] > 0; t++)
        printf("%s %lld tokens in %d texts at temperature %g",
               t ? "," : "Text generated by the target:", (long long)m->got_tokens[t],
               m->got_texts[t], (double)m->temps[t]);
    if (m->got_texts[0] > 0)
        puts(".\n");
    print_table3(m, width);
    print_passes(m);
    print_table4(m, width);
    print_table5(m, width);
    print_several(m, width);
    for (int k = 0; k < m->n_drafters; k++)
        counted |= m->drafters[k].counted;
    if (counted)
        puts("\n  * counted from one half of the texts, measured on the other");
}

/* --- JSON --- */

static json_t *number(double x) { return isfinite(x) ? json_real(x) : json_null(); }

static json_t *acceptance_json(const so_measure *m, const so_measure_drafter *d, int t) {
    const so_measure_result *r = &d->results[t];
    json_t *lenience = json_array();
    for (int i = 0; i < SO_MEASURE_LENIENCES && r->lenient[i].n > 0; i++)
        json_array_append_new(
            lenience,
            json_pack("{s:f, s:o, s:o, s:o, s:o}", "lenience", so_measure_leniences[i], "alpha",
                      number(so_ratio_value(&r->lenient[i])), "alpha_error",
                      number(so_ratio_error(&r->lenient[i])), "gamma",
                      r->lenient_gamma[i] ? json_integer(r->lenient_gamma[i]) : json_null(),
                      "speedup", number(r->lenient_gamma[i] ? r->lenient_speed[i] : NAN)));
    json_t *several = json_array();
    for (int i = 0; i < SO_MEASURE_PROPOSALS && r->several[i].n > 0; i++)
        json_array_append_new(several, json_pack("{s:i, s:o, s:o}", "k", i + 1, "acceptance",
                                                 number(so_ratio_value(&r->several[i])), "error",
                                                 number(so_ratio_error(&r->several[i]))));
    return json_pack(
        "{s:o, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:I, s:i, s:b, s:o, s:o, s:o, s:o}",
        "drafter", so_describe_json_text(so_str_c(d->name)), "temp", (double)m->temps[t], "kind",
        r->alpha.n > 0 ? json_string(kind_of(d, r)) : json_null(), "alpha",
        number(so_ratio_value(&r->alpha)), "alpha_error", number(so_ratio_error(&r->alpha)),
        "match", number(so_ratio_value(&r->match)), "match_error",
        number(so_ratio_error(&r->match)), "covered", number(so_ratio_value(&r->covered)), "tokens",
        (json_int_t)r->covered.n, "guesses", (json_int_t)r->covered.a, "texts", r->covered.k,
        "counted", d->counted, "lenience", lenience, "proposals", several, "own_acceptance",
        number(so_ratio_value(&r->any)), "own_error", number(so_ratio_error(&r->any)));
}

static json_t *speed_json(const so_measure *m, const so_measure_drafter *d, int t) {
    const so_measure_result *r = &d->results[t];
    return json_pack(
        "{s:s, s:f, s:i, s:o, s:o, s:o, s:f, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:i, s:I, s:o}",
        "drafter", d->name, "temp", (double)m->temps[t], "gamma", r->gamma, "alpha",
        number(so_ratio_value(&r->match)), "timed_alpha", number(timed_alpha(r)), "covered",
        number(so_ratio_value(&r->covered)), "draft_ms", r->draft_ms, "c",
        number(r->draft_ms / m->t_ms[1]), "ideal", number(r->ideal), "predicted",
        number(r->predicted), "measured", number(so_ratio_value(&r->fixed)), "measured_error",
        number(so_ratio_error(&r->fixed)), "planned", number(so_ratio_value(&r->planned)),
        "planned_error", number(so_ratio_error(&r->planned)), "texts", r->n_texts, "tokens",
        (json_int_t)r->n_tokens, "identical",
        r->n_texts ? json_boolean(r->n_different == 0) : json_null());
}

static json_t *passes_json(const so_measure *m) {
    json_t *list = json_array();
    for (int n = 1; n <= m->max_gamma + 1 && m->t_ms[n] > 0; n++)
        json_array_append_new(list, json_pack("{s:i, s:f, s:f}", "n", n, "ms", m->t_ms[n], "ratio",
                                              m->t_ms[n] / m->t_ms[1]));
    return list;
}

static void print_json(const so_measure *m, bool complete) {
    json_t *texts = json_array(), *accept = json_array(), *speed = json_array();
    for (int t = 0; t < m->n_temps; t++) {
        if (m->got_texts[t] > 0)
            json_array_append_new(texts,
                                  json_pack("{s:f, s:I, s:i, s:f}", "temp", (double)m->temps[t],
                                            "tokens", (json_int_t)m->got_tokens[t], "texts",
                                            m->got_texts[t], "sample_ms", m->sample_ms[t]));
        for (int k = 0; k < m->n_drafters; k++) {
            if (m->drafters[k].results[t].covered.k > 0)
                json_array_append_new(accept, acceptance_json(m, &m->drafters[k], t));
            if (m->drafters[k].results[t].gamma > 0)
                json_array_append_new(speed, speed_json(m, &m->drafters[k], t));
        }
    }
    so_report_print_json(json_pack("{s:b, s:I, s:i, s:o, s:o, s:o, s:o}", "complete", complete,
                                   "seed", (json_int_t)m->seed, "behind", m->n_cached, "texts",
                                   texts, "passes", passes_json(m), "acceptance", accept, "speed",
                                   speed));
}

void so_measure_print(const so_measure *m, bool complete) {
    if (so_args_has(m->a, SO_OPT_JSON))
        print_json(m, complete);
    else
        print_text(m, complete);
}
