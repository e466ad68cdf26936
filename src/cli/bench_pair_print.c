/* The results of `bench pair`, and what the formulas give from the same run's times.
 *
 * Theory: a round of gamma guesses takes gamma passes of the draft over one row and a pass of the
 * target over gamma + 1 rows, and yields E(alpha, gamma) tokens (equation 1):
 *
 *   speed-up = E · t(1) / (gamma · d + t(gamma+1))       t(n), d: times of passes alone
 *
 * With t(gamma+1) = t(1) this is theorem 3.8 with c = d / t(1), printed as `ideal`. What drafting,
 * verification and bookkeeping take beyond the passes makes the ratio measured / theory smaller
 * than 1. A round that needs fewer trips to the host than passes makes it larger.
 *
 * In a few hundred rounds the tokens per round differ from E by several percent. The ratio is free
 * of that: it compares the measured speed-up, multiplied by E / (tokens per round), with the
 * theory. Main thread only. */
#include <math.h>
#include <stdio.h>

#include "base/mem.h"
#include "base/statistics.h"
#include "cli/bench_pair.h"
#include "cli/report.h"
#include "verify/theory.h"

static const double LIMITS[] = {1.5, 2.5}; /* the range that the literature gives for such pairs */
enum { N_LIMITS = SO_LEN(LIMITS), SEQUENCES = 8, SEQUENCE_TOKENS = 4096 };

double so_pair_theory(const so_pair *p, double alpha, int gamma, double draft_ms) {
    return so_theory_expected_tokens(alpha, gamma) * p->t_ms[1] /
           (gamma * draft_ms + p->t_ms[gamma + 1]);
}

double so_pair_ahead_ms(const so_pair *p, int gamma) {
    return p->draft_n_ms[gamma + 2] + gamma * p->draft_n_ms[p->fan];
}

/* Summary of a cell. */
typedef struct outcome {
    double alpha, tokens, gain, spread, at_alpha, ideal, theory, ratio;
    double draft_ms, pass_ms, other_us; /* a guess; a round */
    int gamma;
} outcome;

static outcome summary_of(so_pair *p, so_pair_cell *c, int a, int gamma) {
    double alpha = p->alphas[a], rounds = (double)c->rounds;
    outcome o = {.alpha = alpha, .gamma = gamma, .tokens = (double)c->tokens / rounds};
    o.gain = so_median(c->gain, p->n_repeats); /* sorts */
    o.spread = (c->gain[p->n_repeats - 1] - c->gain[0]) / 2;
    o.at_alpha = so_median(c->at_alpha, p->n_repeats);
    o.ideal = so_theory_speedup(alpha, gamma, p->draft_ms / p->t_ms[1]);
    o.theory = so_pair_theory(p, alpha, gamma, p->draft_ms);
    o.ratio = o.at_alpha / o.theory;
    o.draft_ms = c->draft_ms / rounds / gamma;
    o.pass_ms = c->pass_ms / rounds;
    o.other_us = 1e3 * c->other_ms / rounds;
    return o;
}

static outcome outcome_of(so_pair *p, int a, int gamma) {
    return summary_of(p, &p->cells[a][gamma], a, gamma);
}

/* The gamma with the highest speed-up, free of the luck of its rounds. */
static outcome best_of(so_pair *p, int a) {
    outcome best = outcome_of(p, a, 1);
    for (int gamma = 2; gamma <= p->max_gamma; gamma++) {
        outcome o = outcome_of(p, a, gamma);
        if (o.at_alpha > best.at_alpha)
            best = o;
    }
    return best;
}

static outcome lowest_ratio(so_pair *p) {
    outcome low = outcome_of(p, 0, 1);
    for (int a = 0; a < p->n_alphas; a++)
        for (int gamma = 1; gamma <= p->max_gamma; gamma++) {
            outcome o = outcome_of(p, a, gamma);
            if (o.ratio < low.ratio)
                low = o;
        }
    return low;
}

static double best_theory(const so_pair *p, double alpha) {
    double best = 0;
    for (int gamma = 1; gamma <= p->max_gamma; gamma++)
        best = SO_MAX(best, so_pair_theory(p, alpha, gamma, p->draft_ms));
    return best;
}

/* The lowest alpha at which this pair reaches a speed-up; NAN: none. */
static double alpha_for(const so_pair *p, double limit) {
    double low = 0, high = 1;
    if (best_theory(p, 1) < limit)
        return NAN;
    for (int i = 0; i < 40; i++) {
        double mid = (low + high) / 2;
        if (best_theory(p, mid) < limit)
            low = mid;
        else
            high = mid;
    }
    return high;
}

/* The largest c with which a draft reaches a speed-up at alpha; negative: none does. */
static double c_for(const so_pair *p, double alpha, double limit) {
    double c = -1;
    for (int gamma = 1; gamma <= p->max_gamma; gamma++)
        c = SO_MAX(
            c, (so_theory_expected_tokens(alpha, gamma) / limit - p->t_ms[gamma + 1] / p->t_ms[1]) /
                   gamma);
    return c;
}

/* --- text --- */

static void print_passes(const so_pair *p) {
    printf(
        "Passes alone, after %d tokens: t(n), ms of a pass of the target over n rows.\n\n  n    ",
        p->n_cached);
    for (int n = 1; n <= p->max_gamma + 1; n++)
        printf(" %7d", n);
    printf("\n  ms   ");
    for (int n = 1; n <= p->max_gamma + 1; n++)
        printf(" %7.3f", p->t_ms[n]);
    printf("\n  ratio");
    for (int n = 1; n <= p->max_gamma + 1; n++)
        printf(" %7.3f", p->t_ms[n] / p->t_ms[1]);
    printf("\n\n  draft, a pass over one row: %.3f ms; c = %.3f\n\n", p->draft_ms,
           p->draft_ms / p->t_ms[1]);
}

static void print_grid(so_pair *p) {
    printf(
        "Simulated acceptance. tokens: per round, measured. speed-up: over plain decoding in the "
        "same run\n(+-: half the range over the repeats). ideal: theorem 3.8. theory: the same "
        "with t(n). ratio:\nmeasured / theory for equal tokens per round. draft: ms of a guess. "
        "pass: ms of the target's\npass. other: us of the rest of a round.\n\n"
        "  alpha gamma  tokens  speed-up    +-   ideal  theory   ratio    draft    pass   "
        "other\n");
    for (int a = 0; a < p->n_alphas; a++)
        for (int gamma = 1; gamma <= p->max_gamma; gamma++) {
            outcome o = outcome_of(p, a, gamma);
            printf("  %5.1f %5d %7.2f %9.3f %5.3f %7.3f %7.3f %7.3f %8.3f %7.3f %7.1f\n", o.alpha,
                   o.gamma, o.tokens, o.gain, o.spread, o.ideal, o.theory, o.ratio, o.draft_ms,
                   o.pass_ms, o.other_us);
        }
    putchar('\n');
}

/* JSON has no NaN. */
static bool known(double x) { return isfinite(x) && x >= 0; }

static void print_limits(const so_pair *p) {
    for (int i = 0; i < N_LIMITS; i++) {
        double alpha = alpha_for(p, LIMITS[i]);
        printf("A speed-up of %.1f begins, by theory with gamma up to %d, ", LIMITS[i],
               p->max_gamma);
        if (known(alpha))
            printf("at alpha %.3f with this draft (c %.3f)", alpha, p->draft_ms / p->t_ms[1]);
        else
            printf("at no alpha with this draft (c %.3f)", p->draft_ms / p->t_ms[1]);
        for (int a = 0; a < p->n_alphas; a++) {
            double c = c_for(p, p->alphas[a], LIMITS[i]);
            printf("%s", a ? ", " : ";\n  at alpha ");
            if (known(c))
                printf("%.1f with c <= %.3f", p->alphas[a], c);
            else
                printf("%.1f with no draft", p->alphas[a]);
        }
        puts(".");
    }
    putchar('\n');
}

static void print_host(const so_pair *p) {
    printf("Host: a step of plain decoding takes %.3f ms, its pass alone %.3f, and on the device "
           "%.3f\n(a further level of a pass with %d levels): %.0f us beyond the device time.\n\n",
           p->plain_ms, p->t_ms[1], p->device_ms, SO_PAIR_LEVELS,
           1e3 * (p->plain_ms - p->device_ms));
}

static void print_memory(const so_pair *p) {
    const double gb = 1e-9, tokens = (double)SEQUENCES * SEQUENCE_TOKENS;
    printf("Memory, GB: weights %.2f + %.2f (draft); cache of %d sequences of %d tokens%s %.2f + "
           "%.2f; together %.2f.\n",
           gb * p->weights, gb * p->draft_weights, SEQUENCES, SEQUENCE_TOKENS,
           p->has_source ? " and sources of as many" : "", gb * tokens * p->kv_token,
           gb * tokens * p->draft_kv_token,
           gb * (p->weights + p->draft_weights + tokens * (p->kv_token + p->draft_kv_token)));
    if (p->device_used > 0)
        printf("In use on the device in this run: %.2f; without weights and caches %.2f.\n",
               gb * p->device_used,
               gb * (p->device_used - p->weights - p->draft_weights - p->own_caches));
    putchar('\n');
}

static void print_best(so_pair *p) {
    outcome low = lowest_ratio(p);
    printf("  alpha  best gamma  speed-up  theory   ratio\n");
    for (int a = 0; a < p->n_alphas; a++) {
        outcome o = best_of(p, a);
        printf("  %5.1f  %10d  %8.3f %7.3f %7.3f\n", o.alpha, o.gamma, o.at_alpha, o.theory,
               o.ratio);
    }
    printf("  lowest ratio %.3f (alpha %.1f, gamma %d); texts %s\n", low.ratio, low.alpha,
           low.gamma, p->n_different ? "DIFFER from plain decoding" : "as with plain decoding");
}

/* --- drafting ahead --- */

/* Rounds of one length: predicted from the passes alone and from the hit rate of the run, measured. */
typedef struct ahead_row {
    outcome sync, ahead;
    double hit_rate, hidden, sync_ms, ahead_ms, expected_sync_ms, expected_ahead_ms;
    double alone_ms; /* expected without contention */
} ahead_row;

static double round_ms(const so_pair_cell *c) {
    return (c->draft_ms + c->pass_ms + c->other_ms) / (double)c->rounds;
}

static double slow_of(const so_pair *p, int gamma) {
    return p->beside_ms[gamma + 1] / p->t_ms[gamma + 1];
}
static double draft_slow_of(const so_pair *p) { return p->draft_beside_ms / p->draft_n_ms[p->fan]; }

/* h: of the run. A miss stops the draft after its level, on average half of one. */
static double expected_ms(const so_pair *p, int gamma, double h, double f, double g) {
    double t = p->t_ms[gamma + 1], d = so_pair_ahead_ms(p, gamma);
    double rest = d * g > t * f ? p->draft_n_ms[p->fan] / 2 : 0;
    double miss = so_theory_beside(t, d, f, g) + rest + gamma * p->draft_ms;
    return h * so_theory_both(t, d, f, g) + (1 - h) * miss;
}

static ahead_row ahead_of(so_pair *p, int gamma) {
    so_pair_cell *c = &p->ahead[gamma];
    double h = c->looked_up > 0 ? (double)c->hits / (double)c->looked_up : 0;
    return (ahead_row){.sync = outcome_of(p, 0, gamma),
                       .ahead = summary_of(p, c, 0, gamma),
                       .hit_rate = h,
                       .hidden = c->worker_ms / (c->worker_ms + c->draft_ms),
                       .sync_ms = round_ms(&p->cells[0][gamma]),
                       .ahead_ms = round_ms(c),
                       .expected_sync_ms = p->t_ms[gamma + 1] + gamma * p->draft_ms,
                       .expected_ahead_ms =
                           expected_ms(p, gamma, h, slow_of(p, gamma), draft_slow_of(p)),
                       .alone_ms = expected_ms(p, gamma, h, 1, 1)};
}

static int best_ahead(so_pair *p) {
    int best = 1;
    for (int gamma = 2; gamma <= p->max_gamma; gamma++)
        if (ahead_of(p, gamma).ahead.at_alpha > ahead_of(p, best).ahead.at_alpha)
            best = gamma;
    return best;
}

static void print_ahead(so_pair *p) {
    printf(
        "Drafting ahead, %d outcomes, hit rate %.2f (simulated). sync, ahead: speed-up over plain "
        "decoding for\nequal tokens per round. ms: of a round, measured and predicted from passes: "
        "T + gamma d with a\nsynchronous draft; after a hit until T and D are done, both slowed "
        "while "
        "they overlap (`slow`: a pass\nof the target beside the draft, over its time alone; the "
        "draft's: %.3f); after a miss T beside D, and\ngamma d. alone: predicted without that. T = "
        "t(gamma + 1), d = %.3f ms, D: the tree's rows and gamma\nlevels of %d rows (%.3f ms "
        "each). "
        "pass, draft: ms of the target's pass and of waiting and drafting in\na round. hidden: of "
        "all drafting time.\n\n"
        "  gamma    sync      ms predicted   ahead      ms predicted   alone  slow    pass   draft "
        "  "
        "    D  hits hidden\n",
        p->fan, p->hit_rate, draft_slow_of(p), p->draft_ms, p->fan, p->draft_n_ms[p->fan]);
    for (int gamma = 1; gamma <= p->max_gamma; gamma++) {
        ahead_row r = ahead_of(p, gamma);
        printf(
            "  %5d %7.3f %7.3f %9.3f %7.3f %7.3f %9.3f %7.3f %5.3f %7.3f %7.3f %7.3f %5.2f %6.2f\n",
            gamma, r.sync.at_alpha, r.sync_ms, r.expected_sync_ms, r.ahead.at_alpha, r.ahead_ms,
            r.expected_ahead_ms, r.alone_ms, slow_of(p, gamma), r.ahead.pass_ms,
            r.ahead.draft_ms * gamma, so_pair_ahead_ms(p, gamma), r.hit_rate, r.hidden);
    }
    outcome sync = best_of(p, 0);
    ahead_row r = ahead_of(p, best_ahead(p));
    printf("\n  best: synchronous %.3f (gamma %d), ahead %.3f (gamma %d): %.3f times as fast\n\n",
           sync.at_alpha, sync.gamma, r.ahead.at_alpha, r.ahead.gamma,
           r.ahead.at_alpha / sync.at_alpha);
}

static json_t *ahead_json(so_pair *p) {
    json_t *rows = json_array();
    outcome sync = best_of(p, 0);
    ahead_row best = ahead_of(p, best_ahead(p));
    for (int gamma = 1; gamma <= p->max_gamma; gamma++) {
        ahead_row r = ahead_of(p, gamma);
        json_array_append_new(
            rows, json_pack("{s:i,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f}",
                            "gamma", gamma, "sync_speedup", r.sync.at_alpha, "sync_ms", r.sync_ms,
                            "sync_expected_ms", r.expected_sync_ms, "speedup", r.ahead.at_alpha,
                            "speedup_spread", r.ahead.spread, "ms", r.ahead_ms, "expected_ms",
                            r.expected_ahead_ms, "expected_alone_ms", r.alone_ms, "contention",
                            slow_of(p, gamma), "draft_ahead_ms", so_pair_ahead_ms(p, gamma),
                            "hit_rate", r.hit_rate, "hidden", r.hidden, "pass_ms", r.ahead.pass_ms,
                            "waited_ms", r.ahead.draft_ms * gamma));
    }
    return json_pack("{s:b,s:f,s:i,s:f,s:f,s:o,s:i,s:i,s:f}", "simulated_hits", 1, "hit_rate",
                     p->hit_rate, "fan", p->fan, "level_ms", p->draft_n_ms[p->fan],
                     "draft_contention", draft_slow_of(p), "rows", rows, "best_sync_gamma",
                     sync.gamma, "best_gamma", best.ahead.gamma, "ratio",
                     best.ahead.at_alpha / sync.at_alpha);
}

void so_pair_print(so_pair *p, const char *device) {
    printf("Target %s, draft %s, %s.\n%d tokens after %s%d, %d repeats. The draft model is run for "
           "every guess; whether a guess is right is simulated.\n\n",
           p->target, p->draft, device, p->n_predict, p->has_source ? "a source of " : "",
           p->n_before, p->n_repeats);
    print_passes(p);
    print_grid(p);
    if (p->is_ahead)
        print_ahead(p);
    print_limits(p);
    print_host(p);
    print_memory(p);
    print_best(p);
    putchar('\n');
    fflush(stdout);
}

/* --- JSON --- */

static json_t *number(double x) { return known(x) ? json_real(x) : json_null(); }

static json_t *cell_json(const outcome *o) {
    return json_pack("{s:f,s:i,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f,s:f}", "alpha", o->alpha,
                     "gamma", o->gamma, "tokens_per_round", o->tokens, "speedup", o->gain,
                     "speedup_spread", o->spread, "speedup_at_alpha", o->at_alpha, "ideal",
                     o->ideal, "theory", o->theory, "ratio", o->ratio, "draft_ms", o->draft_ms,
                     "pass_ms", o->pass_ms, "other_us", o->other_us);
}

static json_t *limits_json(const so_pair *p) {
    json_t *all = json_array();
    for (int i = 0; i < N_LIMITS; i++) {
        json_t *c = json_array();
        for (int a = 0; a < p->n_alphas; a++)
            json_array_append_new(c, json_pack("{s:f,s:o}", "alpha", p->alphas[a], "max_c",
                                               number(c_for(p, p->alphas[a], LIMITS[i]))));
        json_array_append_new(all, json_pack("{s:f,s:o,s:o}", "speedup", LIMITS[i], "alpha",
                                             number(alpha_for(p, LIMITS[i])), "by_alpha", c));
    }
    return all;
}

static json_t *memory_json(const so_pair *p) {
    double tokens = (double)SEQUENCES * SEQUENCE_TOKENS;
    return json_pack("{s:f,s:f,s:i,s:i,s:f,s:f,s:o}", "weight_bytes", p->weights,
                     "draft_weight_bytes", p->draft_weights, "sequences", SEQUENCES,
                     "sequence_tokens", SEQUENCE_TOKENS, "kv_bytes", tokens * p->kv_token,
                     "draft_kv_bytes", tokens * p->draft_kv_token, "device_used_bytes",
                     p->device_used > 0 ? json_real(p->device_used) : json_null());
}

void so_pair_print_json(so_pair *p, const char *device) {
    json_t *cells = json_array(), *best = json_array(), *passes = json_array();
    for (int n = 1; n <= p->max_gamma + 1; n++)
        json_array_append_new(passes, json_pack("{s:i,s:f}", "n", n, "ms", p->t_ms[n]));
    for (int a = 0; a < p->n_alphas; a++) {
        for (int gamma = 1; gamma <= p->max_gamma; gamma++) {
            outcome o = outcome_of(p, a, gamma);
            json_array_append_new(cells, cell_json(&o));
        }
        outcome o = best_of(p, a);
        json_array_append_new(best, cell_json(&o));
    }
    json_t *o =
        json_pack("{s:s,s:s,s:s,s:b,s:i,s:i,s:i,s:i}", "target", p->target, "draft", p->draft,
                  "device", device, "simulated_acceptance", 1, "ctx", p->n_before, "predict",
                  p->n_predict, "repeats", p->n_repeats, "passes_after", p->n_cached);
    json_object_set_new(o, "identical", json_boolean(p->n_different == 0));
    json_object_set_new(o, "c", json_real(p->draft_ms / p->t_ms[1]));
    json_object_set_new(o, "draft_pass_ms", json_real(p->draft_ms));
    json_object_set_new(o, "plain_step_ms", json_real(p->plain_ms));
    json_object_set_new(o, "device_ms", json_real(p->device_ms));
    json_object_set_new(o, "draft_device_ms", json_real(p->draft_device_ms));
    json_object_set_new(o, "host_us", json_real(1e3 * (p->plain_ms - p->device_ms)));
    json_object_set_new(o, "passes", passes);
    json_object_set_new(o, "cells", cells);
    json_object_set_new(o, "best", best);
    json_object_set_new(o, "limits", limits_json(p));
    json_object_set_new(o, "memory", memory_json(p));
    if (p->is_ahead)
        json_object_set_new(o, "ahead", ahead_json(p));
    so_report_print_json(o);
}
