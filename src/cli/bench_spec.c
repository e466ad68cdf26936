/* `sooth bench spec`: plain and speculative decoding of a file of prompts, compared in one run.
 *
 * Groups of --parallel prompts run in two engines over the same weights, one plain and one
 * speculative. The engine that has emitted fewer tokens makes the next step, so both are at the
 * same place of the text at about the same time, and a slow second of the machine affects both.
 * Steps are timed once every request of the group has emitted its first token, by the clock around
 * the step: drafting, verification and bookkeeping are included. Every group runs --repeats times.
 * With async(X) the engines take turns by group instead: the worker drafts during the passes of its own
 * engine, and would slow down those of the other and have their time as well.
 * The first turn of each prompt is used. The drafter `oracle` needs the plain output, which is
 * generated beforehand, untimed.
 *
 * There is one result per category, in order of appearance, and one for all, whose speed-up is the
 * geometric mean of the categories' speed-ups. plain_pass_ms and spec_pass_ms are the target's
 * passes alone, for formulas over t(n). mean_accepted, alpha and tokens_per_pass are over all
 * rounds of the speculative requests (engine/counts.c). speedup_spread is the standard deviation
 * over groups. `identical` says whether all texts were equal; it is null if --verify does not
 * promise that. The exit status does not depend on the results. Main thread only. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "cli/bench_spec.h"
#include "cli/progress.h"
#include "cli/prompts.h"
#include "cli/report.h"
#include "cli/request.h"
#include "cli/spec.h"
#include "format/describe.h"

enum { DEFAULT_PREDICT = 128, MAX_CATEGORIES = 256 };

typedef struct measure {
    double ms, pass_ms; /* time of whole steps, and of the target's passes alone */
    int64_t tokens, passes;
} measure;

typedef struct category {
    char name[64];
    int n_prompts, n_groups, n_different;
    measure plain, spec;
    double sum, sum_sq;     /* over the speed-ups of groups */
    so_request_stats stats; /* of the speculative requests */
} category;

/* One request of a group in one of the two engines. */
typedef struct answer {
    so_request *req;
    int64_t *n_emitted; /* counter of its engine */
    bool decoding;      /* its first token was emitted */
    so_tokens out;
    so_request_stats stats;
} answer;

typedef struct mode {
    so_engine *e;
    answer *answers; /* [n_parallel] */
    int64_t n_emitted;
    bool more;
    double pass_ms; /* time of the last pass */
    measure m;
} mode;

/* One prompt of the current group. */
typedef struct entry {
    const so_prompt *p;
    so_tokens prompt, expected; /* expected: the plain output, for `oracle` */
} entry;

typedef struct bench {
    const so_args *a;
    so_bundle b;
    so_cli_spec spec;
    mode modes[2]; /* PLAIN, SPEC */
    so_sample_params sample;
    entry *entries; /* [n_parallel] */
    int n_parallel, n_predict, n_repeats;
    bool exact, oracle, ahead, json; /* ahead: drafting ahead */
    category cats[MAX_CATEGORIES];
    int n_cats;
    so_err err;
} bench;

enum { PLAIN, SPEC };

static bool on_event(void *user, const so_event *ev) {
    answer *a = user;
    *a->n_emitted += ev->token != SO_TOKEN_NONE;
    a->decoding = true;
    return true;
}

static int submit(bench *g, int which, int i) {
    const entry *s = &g->entries[i];
    mode *w = &g->modes[which];
    answer *a = &w->answers[i];
    so_request_opts o = {.prompt = s->prompt.ids,
                         .n_prompt = (int)s->prompt.len,
                         .continues = !g->b.chat,
                         .sample = g->sample,
                         .max_tokens = g->n_predict,
                         .on_event = on_event,
                         .user = a};
    so_cli_nonce_read(g->a, &o);
    a->n_emitted = &w->n_emitted;
    a->decoding = false;
    if (which == SPEC) {
        o.spec = g->spec.opts;
        if (g->oracle) {
            o.spec.expected = s->expected.ids;
            o.spec.n_expected = (int)s->expected.len;
        }
    }
    return so_engine_submit(w->e, &o, &a->req, &g->err);
}

static int start(bench *g, int which, int n) {
    mode *w = &g->modes[which];
    w->n_emitted = 0;
    w->m = (measure){0};
    w->more = true;
    for (int i = 0; i < n; i++) {
        int rc = submit(g, which, i);
        if (rc != SO_OK)
            return rc;
    }
    return SO_OK;
}

static bool all_decode(const mode *w, int n) {
    for (int i = 0; i < n; i++)
        if (!w->answers[i].decoding)
            return false;
    return true;
}

static void on_step(void *user, const so_step_info *info) {
    ((mode *)user)->pass_ms = info->pass_ms;
}

static int step(bench *g, mode *w, int n) {
    bool timed = all_decode(w, n);
    int64_t before = w->n_emitted, t = so_clock_ns();
    int more = so_engine_step(w->e, &g->err);
    w->more = more > 0;
    if (timed) {
        w->m.ms += so_clock_ms_since(t);
        w->m.tokens += w->n_emitted - before;
        w->m.pass_ms += w->pass_ms;
        w->m.passes++;
    }
    return SO_MIN(more, 0);
}

/* Copies the answers and frees the requests. Returns rc, or the error of the first failed
 * request. */
static int collect(bench *g, mode *w, int n, int rc) {
    for (int i = 0; i < n; i++) {
        answer *a = &w->answers[i];
        int n_out;
        if (!a->req)
            continue;
        const int32_t *ids = so_request_output(a->req, &n_out);
        a->out.len = 0;
        so_tokens_append(&a->out, ids, (size_t)n_out);
        a->stats = *so_request_get_stats(a->req);
        if (rc == SO_OK)
            rc = so_request_check(a->req, &g->err);
        so_request_free(a->req);
        a->req = NULL;
    }
    return rc;
}

/* Runs the group in one engine, alone. */
static int run_alone(bench *g, int which, int n) {
    mode *w = &g->modes[which];
    int rc = start(g, which, n);
    while (rc == SO_OK && w->more)
        rc = step(g, w, n);
    rc = collect(g, w, n, rc);
    so_engine_settle(w->e);
    return rc;
}

/* Runs the group in both engines. The engine with fewer tokens steps next; at a tie they
 * alternate. */
static int run_group(bench *g, int n) {
    mode *plain = &g->modes[PLAIN], *spec = &g->modes[SPEC], *last = spec;
    if (g->ahead) {
        int rc = run_alone(g, PLAIN, n);
        return rc == SO_OK ? run_alone(g, SPEC, n) : rc;
    }
    int rc = start(g, PLAIN, n);
    if (rc == SO_OK)
        rc = start(g, SPEC, n);
    while (rc == SO_OK && (plain->more || spec->more)) {
        mode *next = plain->n_emitted < spec->n_emitted   ? plain
                     : plain->n_emitted > spec->n_emitted ? spec
                     : last == plain                      ? spec
                                                          : plain;
        if (!next->more)
            next = next == plain ? spec : plain;
        rc = step(g, next, n);
        last = next;
    }
    rc = collect(g, plain, n, rc);
    return collect(g, spec, n, rc);
}

/* The plain output, for `oracle`. */
static int generate_expected(bench *g, int n) {
    mode *w = &g->modes[PLAIN];
    int rc = run_alone(g, PLAIN, n);
    for (int i = 0; i < n && rc == SO_OK; i++) {
        g->entries[i].expected.len = 0;
        so_tokens_append(&g->entries[i].expected, w->answers[i].out.ids, w->answers[i].out.len);
    }
    return rc;
}

static category *find_category(bench *g, const so_prompt *p) {
    const char *name = json_string_value(p->category);
    name = name ? name : "none";
    for (int i = 0; i < g->n_cats; i++)
        if (strncmp(g->cats[i].name, name, sizeof g->cats[i].name - 1) == 0)
            return &g->cats[i];
    category *c = &g->cats[SO_MIN(g->n_cats, MAX_CATEGORIES - 1)];
    g->n_cats = SO_MIN(g->n_cats + 1, MAX_CATEGORIES);
    snprintf(c->name, sizeof c->name, "%s", name);
    return c;
}

static bool same(const so_tokens *a, const so_tokens *b) {
    return a->len == b->len &&
           (a->len == 0 || memcmp(a->ids, b->ids, a->len * sizeof *a->ids) == 0);
}

static void add_measure(measure *sum, measure m) {
    sum->ms += m.ms;
    sum->pass_ms += m.pass_ms;
    sum->tokens += m.tokens;
    sum->passes += m.passes;
}

static void count_group(bench *g, int n) {
    category *c = find_category(g, g->entries[0].p);
    measure plain = g->modes[PLAIN].m, spec = g->modes[SPEC].m;
    add_measure(&c->plain, plain);
    add_measure(&c->spec, spec);
    if (plain.tokens > 0 && spec.tokens > 0 && spec.ms > 0 && plain.ms > 0) {
        double gain = (double)spec.tokens / spec.ms * plain.ms / (double)plain.tokens;
        c->sum += gain;
        c->sum_sq += gain * gain;
        c->n_groups++;
    }
    for (int i = 0; i < n; i++) {
        const answer *a = &g->modes[SPEC].answers[i];
        c->n_different += !same(&g->modes[PLAIN].answers[i].out, &a->out);
        so_stats_add(&c->stats, &a->stats);
    }
}

static int encode(bench *g, const so_prompt *p, entry *s) {
    s->p = p;
    s->prompt.len = 0;
    return so_cli_encode(&g->b, so_args_has(g->a, SO_OPT_RAW), p->turns[0], &s->prompt, &g->err);
}

/* All prompts of a group have the same category. */
static int group_size(const bench *g, const so_prompts *p, int at) {
    int n = 1;
    while (n < g->n_parallel && at + n < p->n &&
           json_equal(p->items[at].category, p->items[at + n].category) ==
               (p->items[at].category != NULL))
        n++;
    return n;
}

static int run_all(bench *g, const so_prompts *p) {
    so_progress bar;
    int rc = SO_OK;
    so_progress_begin(&bar, "bench spec");
    for (int at = 0, n; at < p->n && rc == SO_OK; at += n) {
        n = group_size(g, p, at);
        for (int i = 0; i < n && rc == SO_OK; i++)
            rc = encode(g, &p->items[at + i], &g->entries[i]);
        if (rc == SO_OK && g->oracle)
            rc = generate_expected(g, n);
        for (int k = 0; k < g->n_repeats && rc == SO_OK; k++) {
            rc = run_group(g, n);
            if (rc == SO_OK)
                count_group(g, n);
            so_progress_set(&bar, (at + (double)n * (k + 1) / g->n_repeats) / p->n);
        }
        find_category(g, g->entries[0].p)->n_prompts += n;
    }
    so_progress_end(&bar);
    return rc;
}

/* --- results --- */

static double rate(measure m) { return m.ms > 0 ? 1000.0 * (double)m.tokens / m.ms : 0; }

static double pass_ms(measure m) { return m.passes > 0 ? m.pass_ms / (double)m.passes : 0; }

static double speedup(const category *c) {
    return rate(c->plain) > 0 ? rate(c->spec) / rate(c->plain) : 0;
}

static double spread(const category *c) {
    double mean = c->n_groups ? c->sum / c->n_groups : 0;
    double var = c->n_groups > 1 ? (c->sum_sq - c->sum * mean) / (c->n_groups - 1) : 0;
    return sqrt(SO_MAX(var, 0));
}

static json_t *number(double x, bool known) { return known ? json_real(x) : json_null(); }

/* Of drafting ahead: the hit rate, the part of all drafting time that passes hid, and the part of the
 * guesses that were made and not used. */
static json_t *ahead_json(const so_request_stats *s) {
    const so_async_counts *n = &s->async;
    double all_ms = n->worker_ms + s->draft_ms, hits = so_stats_rates(s).hit_rate;
    json_t *ranks = json_array();
    for (int i = 0; i < SO_ASYNC_RANKS; i++)
        json_array_append_new(ranks, json_integer(n->by_rank[i]));
    return json_pack("{s:o, s:o, s:o, s:i, s:i, s:o}", "hit_rate", number(hits, hits >= 0),
                     "hidden", number(n->worker_ms / all_ms, all_ms > 0), "wasted",
                     number(1 - (double)n->served / n->drafted, n->drafted > 0), "rounds",
                     n->rounds + n->skipped, "off", n->off, "hits_by_rank", ranks);
}

static void print_ahead(const category *c) {
    const so_async_counts *n = &c->stats.async;
    double all_ms = n->worker_ms + c->stats.draft_ms;
    if (n->rounds + n->skipped > 0)
        printf("%16s drafting ahead: hit rate %.2f (%d rounds, %d without), %.0f %% of drafting "
               "time hidden, %.0f %% of guesses wasted\n",
               "", SO_MAX(so_stats_rates(&c->stats).hit_rate, 0), n->rounds + n->skipped, n->off,
               all_ms > 0 ? 100 * n->worker_ms / all_ms : 0,
               n->drafted > 0 ? 100 - 100.0 * n->served / n->drafted : 0);
}

static void print_category(const bench *g, const category *c, double gain) {
    so_rates x = so_stats_rates(&c->stats);
    if (g->json) {
        so_report_print_json(json_pack(
            "{s:o, s:i, s:f, s:f, s:o, s:f, s:o, s:o, s:o, s:f, s:f, s:o, s:o*}", "category",
            so_describe_json_text(so_str_c(c->name)), "prompts", c->n_prompts, "plain_tps",
            rate(c->plain), "spec_tps", rate(c->spec), "speedup", number(gain, gain > 0),
            "speedup_spread", spread(c), "mean_accepted",
            number(x.mean_accepted, x.mean_accepted >= 0), "alpha", number(x.alpha, x.alpha >= 0),
            "identical", g->exact ? json_boolean(c->n_different == 0) : json_null(),
            "plain_pass_ms", pass_ms(c->plain), "spec_pass_ms", pass_ms(c->spec), "tokens_per_pass",
            number(x.tokens_per_pass, x.tokens_per_pass >= 0), "async",
            g->ahead ? ahead_json(&c->stats) : NULL));
        return;
    }
    printf("%-16s %5d %9.2f %9.2f %7.2fx %6.2f %8.2f %6.2f  %s\n", c->name, c->n_prompts,
           rate(c->plain), rate(c->spec), gain, spread(c), SO_MAX(x.mean_accepted, 0),
           SO_MAX(x.alpha, 0),
           !g->exact        ? "not promised"
           : c->n_different ? "DIFFERENT"
                            : "identical");
    print_ahead(c);
}

static void add_up(category *all, const category *c) {
    all->n_prompts += c->n_prompts;
    all->n_groups += c->n_groups;
    all->n_different += c->n_different;
    add_measure(&all->plain, c->plain);
    add_measure(&all->spec, c->spec);
    all->sum += c->sum;
    all->sum_sq += c->sum_sq;
    so_stats_add(&all->stats, &c->stats);
}

static void print_results(const bench *g) {
    category all = {.name = "all"};
    double logs = 0;
    int n = 0;
    if (!g->json)
        printf("%-16s %5s %9s %9s %8s %6s %8s %6s\n", "category", "n", "plain/s", "spec/s", "gain",
               "+-", "accepted", "alpha");
    for (int i = 0; i < g->n_cats; i++) {
        print_category(g, &g->cats[i], speedup(&g->cats[i]));
        add_up(&all, &g->cats[i]);
        if (speedup(&g->cats[i]) > 0) {
            logs += log(speedup(&g->cats[i]));
            n++;
        }
    }
    print_category(g, &all, n ? exp(logs / n) : 0);
}

/* --- setting up --- */

static int open_bench(bench *g) {
    so_engine_opts eo;
    int status = so_cli_spec_read(g->a, &g->spec);
    if (status == 0 && !g->spec.opts.drafter)
        status = so_args_bad(g->a, "bench spec compares with plain decoding: --spec must name a "
                                   "drafter");
    if (status == 0) {
        g->oracle = strstr(g->spec.opts.drafter, "oracle") != NULL;
        g->ahead = strstr(g->spec.opts.drafter, "async") != NULL;
        status = g->oracle ? 0 : so_cli_spec_check_text(g->a, &g->spec);
    }
    if (status == 0)
        status = so_cli_open(g->a, &g->b);
    if (status == 0)
        status = so_cli_engine_opts(g->a, &g->b, &eo);
    if (status == 0)
        status = so_cli_spec_open(g->a, &g->b, &g->spec, &eo);
    if (status != 0)
        return status;
    g->n_parallel = eo.n_parallel;
    g->entries = SO_NEW_N(entry, g->n_parallel);
    for (int i = 0; i < 2; i++) {
        g->modes[i].answers = SO_NEW_N(answer, g->n_parallel);
        eo.on_step = on_step;
        eo.step_user = &g->modes[i];
        if (so_engine_create(g->b.model, g->b.tok, &eo, &g->modes[i].e, &g->err) != SO_OK)
            return so_args_fail(g->a, &g->err);
    }
    so_sample_defaults(&g->sample);
    g->sample.temp = (float)so_args_float(g->a, SO_OPT_TEMP, 0);
    g->sample.seed = (uint64_t)so_args_int(g->a, SO_OPT_SEED, 0);
    g->exact = g->spec.opts.verify == SO_VERIFY_MATCH ||
               (g->spec.opts.verify == SO_VERIFY_REJECT && g->sample.temp == 0);
    return 0;
}

static void close_modes(bench *g) {
    for (int w = 0; w < 2; w++) {
        so_engine_free(g->modes[w].e);
        for (int i = 0; g->modes[w].answers && i < g->n_parallel; i++)
            so_tokens_free(&g->modes[w].answers[i].out);
        free(g->modes[w].answers);
    }
    for (int i = 0; g->entries && i < g->n_parallel; i++) {
        so_tokens_free(&g->entries[i].prompt);
        so_tokens_free(&g->entries[i].expected);
    }
    free(g->entries);
}

int so_bench_spec(const so_args *a) {
    bench *g = SO_NEW(bench);
    so_prompts prompts = {0};
    g->a = a;
    g->json = so_args_has(a, SO_OPT_JSON);
    g->n_predict = (int)so_args_int(a, SO_OPT_PREDICT, DEFAULT_PREDICT);
    g->n_repeats = (int)so_args_int(a, SO_OPT_REPEATS, 1);
    int status = 0;
    if (!so_args_has(a, SO_OPT_PROMPTS))
        status = so_args_bad(a, "bench spec needs prompts: --prompts FILE.jsonl");
    else if (g->n_predict < 2)
        status = so_args_bad(a, "--predict %d: must be at least 2; the first token is not timed",
                             g->n_predict);
    else if (so_prompts_read(so_args_str(a, SO_OPT_PROMPTS, ""), &prompts, &g->err) != SO_OK)
        status = so_args_fail(a, &g->err);
    if (status == 0)
        status = open_bench(g);
    if (status == 0 && run_all(g, &prompts) < 0)
        status = so_args_fail(a, &g->err);
    else if (status == 0)
        print_results(g);
    close_modes(g);
    so_cli_spec_close(&g->spec);
    so_bundle_close(&g->b);
    so_prompts_free(&prompts);
    free(g);
    return status;
}
