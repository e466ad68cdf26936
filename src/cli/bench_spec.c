/* `sooth bench spec`: what speculation gains on a file of prompts, plain and speculative decoding
 * side by side in one run.
 *
 * Prompts are taken --parallel at a time. Each group runs twice in the same engine, plain first for
 * even groups and second for odd ones, so that a slow minute of the machine hits both alike. Only
 * steps in which every request has its prompt behind it are timed, by the clock around the step,
 * and the tokens that they emitted are counted: drafting, checking and bookkeeping are all in it.
 * The first turn of each prompt is used. With `oracle` the plain output is what it is right about,
 * so plain goes first.
 *
 * One result per category, in order of appearance, and one for all: the geometric mean of the
 * categories' speed-ups. speedup_spread is the standard deviation over groups. `identical` says
 * whether every text was the same; it is null where that is not promised. Measures, never judges.
 */
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
#include "cli/spec.h"

enum { DEFAULT_PREDICT = 128, MAX_CATEGORIES = 256 };

typedef struct measure {
    double ms;
    int64_t tokens;
} measure;

typedef struct category {
    char name[64];
    int n_prompts, n_groups, n_different;
    measure plain, spec;
    double sum, sum_sq; /* of the groups' speed-ups */
    int64_t accepted, tested, rounds;
} category;

/* One request of a group; both ways leave their output here. */
typedef struct slot {
    const so_prompt *p;
    so_tokens prompt, plain, spec;
    so_request *req;
    bool decoding; /* its first token is out */
    int64_t *n_emitted;
    so_request_stats stats;
} slot;

typedef struct bench {
    const so_args *a;
    so_bundle b;
    so_cli_spec spec;
    so_engine *e;
    so_sample_params sample;
    slot *slots; /* [n_parallel] */
    int n_parallel, n_predict;
    bool exact, oracle, json;
    category cats[MAX_CATEGORIES];
    int n_cats;
    so_err err;
} bench;

static bool on_event(void *user, const so_event *ev) {
    slot *s = user;
    *s->n_emitted += ev->token != SO_TOKEN_NONE;
    s->decoding = true;
    return true;
}

static int submit(bench *g, slot *s, bool spec, int64_t *n_emitted) {
    so_request_opts o = {.prompt = s->prompt.ids,
                         .n_prompt = (int)s->prompt.len,
                         .continues = !g->b.chat,
                         .sample = g->sample,
                         .max_tokens = g->n_predict,
                         .on_event = on_event,
                         .user = s};
    s->n_emitted = n_emitted;
    s->decoding = false;
    if (spec) {
        o.spec = g->spec.opts;
        if (g->oracle) {
            o.spec.expected = s->plain.ids;
            o.spec.n_expected = (int)s->plain.len;
        }
    }
    return so_engine_submit(g->e, &o, &s->req, &g->err);
}

static bool all_decode(const bench *g, int n) {
    for (int i = 0; i < n; i++)
        if (!g->slots[i].decoding)
            return false;
    return true;
}

static int run_steps(bench *g, int n, int64_t *n_emitted, measure *out) {
    int more = 1;
    while (more > 0) {
        bool timed = all_decode(g, n);
        int64_t before = *n_emitted, t = so_clock_ns();
        more = so_engine_step(g->e, &g->err);
        if (timed) {
            out->ms += so_clock_ms_since(t);
            out->tokens += *n_emitted - before;
        }
    }
    return more;
}

/* The group once, plain or with guesses. */
static int run_group(bench *g, int n, bool spec, measure *out) {
    int64_t n_emitted = 0;
    int rc = SO_OK;
    for (int i = 0; i < n && rc == SO_OK; i++)
        rc = submit(g, &g->slots[i], spec, &n_emitted);
    if (rc == SO_OK)
        rc = run_steps(g, n, &n_emitted, out);
    for (int i = 0; i < n; i++) {
        slot *s = &g->slots[i];
        if (!s->req)
            continue;
        int n_out;
        const int32_t *ids = so_request_output(s->req, &n_out);
        so_tokens *to = spec ? &s->spec : &s->plain;
        to->len = 0;
        so_tokens_append(to, ids, (size_t)n_out);
        if (spec)
            s->stats = *so_request_get_stats(s->req);
        so_request_free(s->req);
        s->req = NULL;
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

static void book(bench *g, int n, measure plain, measure spec) {
    category *c = find_category(g, g->slots[0].p);
    c->n_prompts += n;
    c->plain.ms += plain.ms;
    c->plain.tokens += plain.tokens;
    c->spec.ms += spec.ms;
    c->spec.tokens += spec.tokens;
    if (plain.tokens > 0 && spec.tokens > 0 && spec.ms > 0 && plain.ms > 0) {
        double gain = (double)spec.tokens / spec.ms * plain.ms / (double)plain.tokens;
        c->sum += gain;
        c->sum_sq += gain * gain;
        c->n_groups++;
    }
    for (int i = 0; i < n; i++) {
        const slot *s = &g->slots[i];
        c->n_different += !same(&s->plain, &s->spec);
        c->accepted += s->stats.draft_n_accepted;
        c->tested += s->stats.tested_n;
        c->rounds += s->stats.rounds;
    }
}

static int encode(bench *g, const so_prompt *p, slot *s) {
    s->p = p;
    s->prompt.len = 0;
    return so_cli_encode(&g->b, so_args_has(g->a, SO_OPT_RAW), p->turns[0], &s->prompt, &g->err);
}

/* Groups are of one category, so that its figures are its own. */
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
    for (int at = 0, group = 0; at < p->n && rc == SO_OK; group++) {
        int n = group_size(g, p, at);
        for (int i = 0; i < n && rc == SO_OK; i++)
            rc = encode(g, &p->items[at + i], &g->slots[i]);
        measure m[2] = {{0, 0}, {0, 0}};
        bool spec_first = group % 2 == 1 && !g->oracle;
        for (int k = 0; k < 2 && rc == SO_OK; k++)
            rc = run_group(g, n, spec_first != (k == 1), &m[spec_first != (k == 1)]);
        if (rc == SO_OK)
            book(g, n, m[0], m[1]);
        at += n;
        so_progress_set(&bar, (double)at / p->n);
    }
    so_progress_end(&bar);
    return rc;
}

/* --- results --- */

static double rate(measure m) { return m.ms > 0 ? 1000.0 * (double)m.tokens / m.ms : 0; }

static double speedup(const category *c) {
    return rate(c->plain) > 0 ? rate(c->spec) / rate(c->plain) : 0;
}

static double spread(const category *c) {
    double mean = c->n_groups ? c->sum / c->n_groups : 0;
    double var = c->n_groups > 1 ? (c->sum_sq - c->sum * mean) / (c->n_groups - 1) : 0;
    return sqrt(SO_MAX(var, 0));
}

static json_t *number(double x, bool known) { return known ? json_real(x) : json_null(); }

static void print_category(const bench *g, const category *c, double gain) {
    double mean = c->rounds ? (double)c->accepted / (double)c->rounds : 0;
    double alpha = c->tested ? (double)c->accepted / (double)c->tested : 0;
    if (g->json) {
        so_report_print_json(
            json_pack("{s:s, s:i, s:f, s:f, s:f, s:f, s:o, s:o, s:o}", "category", c->name,
                      "prompts", c->n_prompts, "plain_tps", rate(c->plain), "spec_tps",
                      rate(c->spec), "speedup", gain, "speedup_spread", spread(c), "mean_accepted",
                      number(mean, c->rounds > 0), "alpha", number(alpha, c->tested > 0),
                      "identical", g->exact ? json_boolean(c->n_different == 0) : json_null()));
        return;
    }
    printf("%-16s %5d %9.2f %9.2f %7.2fx %6.2f %8.2f %6.2f  %s\n", c->name, c->n_prompts,
           rate(c->plain), rate(c->spec), gain, spread(c), mean, alpha,
           !g->exact        ? "not promised"
           : c->n_different ? "DIFFERENT"
                            : "identical");
}

static void add_up(category *all, const category *c) {
    all->n_prompts += c->n_prompts;
    all->n_groups += c->n_groups;
    all->n_different += c->n_different;
    all->plain.ms += c->plain.ms;
    all->plain.tokens += c->plain.tokens;
    all->spec.ms += c->spec.ms;
    all->spec.tokens += c->spec.tokens;
    all->sum += c->sum;
    all->sum_sq += c->sum_sq;
    all->accepted += c->accepted;
    all->tested += c->tested;
    all->rounds += c->rounds;
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
    if (status == 0)
        status = so_cli_open(g->a, &g->b);
    if (status == 0)
        status = so_cli_engine_opts(g->a, &g->b, &eo);
    if (status == 0)
        status = so_cli_spec_open(g->a, &g->b, &g->spec, &eo);
    if (status != 0)
        return status;
    g->n_parallel = eo.n_parallel;
    g->slots = SO_NEW_N(slot, g->n_parallel);
    if (so_engine_create(g->b.model, g->b.tok, &eo, &g->e, &g->err) != SO_OK)
        return so_args_fail(g->a, &g->err);
    so_sample_defaults(&g->sample);
    g->sample.temp = (float)so_args_float(g->a, SO_OPT_TEMP, 0);
    g->sample.seed = (uint64_t)so_args_int(g->a, SO_OPT_SEED, 0);
    g->exact = g->spec.opts.verify == SO_VERIFY_MATCH ||
               (g->spec.opts.verify == SO_VERIFY_REJECT && g->sample.temp == 0);
    g->oracle = strstr(g->spec.opts.drafter, "oracle") != NULL;
    return 0;
}

int so_bench_spec(const so_args *a) {
    bench *g = SO_NEW(bench);
    so_prompts prompts = {0};
    g->a = a;
    g->json = so_args_has(a, SO_OPT_JSON);
    g->n_predict = (int)so_args_int(a, SO_OPT_PREDICT, DEFAULT_PREDICT);
    int status = 0;
    if (!so_args_has(a, SO_OPT_PROMPTS))
        status = so_args_bad(a, "bench spec needs prompts: --prompts FILE.jsonl");
    else if (g->n_predict < 1)
        status = so_args_bad(a, "--predict %d: must be 1 or more here", g->n_predict);
    else if (so_prompts_read(so_args_str(a, SO_OPT_PROMPTS, ""), &prompts, &g->err) != SO_OK)
        status = so_args_fail(a, &g->err);
    if (status == 0)
        status = open_bench(g);
    if (status == 0 && run_all(g, &prompts) < 0)
        status = so_args_fail(a, &g->err);
    else if (status == 0)
        print_results(g);
    so_engine_free(g->e);
    for (int i = 0; g->slots && i < g->n_parallel; i++) {
        so_tokens_free(&g->slots[i].prompt);
        so_tokens_free(&g->slots[i].plain);
        so_tokens_free(&g->slots[i].spec);
    }
    free(g->slots);
    so_cli_spec_close(&g->spec);
    so_bundle_close(&g->b);
    so_prompts_free(&prompts);
    free(g);
    return status;
}
