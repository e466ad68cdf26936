/* `sooth bench pair`: speed-up of a target with a draft model at given acceptance rates.
 *
 * Acceptance is simulated: with the drafter oracle(alpha,model) the draft model is really run for
 * every guess, and an oracle decides which guesses are right (draft/oracle.c). So the time is that
 * of a pair whose guesses are accepted with probability alpha, although no such pair is at hand;
 * models with random weights will do.
 *
 * For each draft (-md, or several in --spec 'model(A);model(B)'), alpha of ALPHAS (--alpha: this one) and gamma
 * from 1 to --draft-max (8):
 *
 *   1. Random tokens are the prompt, --ctx-size of them (256); encoder-decoder models read them as a
 *      source. The plain continuation is computed once; it is what the oracle knows.
 *   2. Two engines over the same weights, plain and speculative, generate --predict tokens (192)
 *      greedily. The engine with fewer tokens makes the next step. The first rounds are not timed:
 *      the draft processes the prompt there, and a GPU records its graphs.
 *   3. This is done --repeats times (3), each time with other outcomes of the oracle. Before each
 *      repeat, passes of target and draft are timed alone, in the middle of the text.
 *
 * Drafting ahead. With --spec 'async(model,fan=N)', --alpha and --hit-rate, every cell has a third run,
 * alone after the other two, in the speculative engine: async(oracle(alpha,hit=H,model),fan=N), where the
 * hit rate is simulated, too. Both hardware shares must be given with --draft-cores. Passes of the draft
 * over 1 to 32 rows are timed as well, and passes of each model while the other one computes, so that the
 * time of a round can be predicted.
 *
 * Every text must be the plain one; differences are counted and reported. The exit status does not
 * depend on the results. Main thread only. */
#include "cli/bench_pair.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/statistics.h"
#include "cli/progress.h"
#include "cli/spec.h"
#include "cli/teacher.h"
#include "draft/spec.h"
#include "verify/theory.h"

static const double ALPHAS[SO_PAIR_ALPHAS] = {0.6, 0.7, 0.8, 0.9};

enum {
    DEFAULT_PREDICT = 192,
    DEFAULT_BEFORE = 256,
    DEFAULT_REPEATS = 3,
    DEFAULT_GAMMA = 8,
    MAX_REPEATS = 100,
    MAX_DRAFTS = 8,
    SETTLE_ROUNDS = 4, /* of a request, not timed */
    TURNS = 4,         /* of timing passes, per repeat */
    PASSES = 3,        /* of one width in a turn; the first is not timed */
    FEED_ROWS = 64
};

/* Times of one kind of pass over all repeats. */
typedef struct times {
    double *ms;
    int n;
} times;

/* A model and a sequence in which its passes are timed. */
typedef struct clocked {
    so_teacher t;
    times width[SO_PAIR_MAX_ROWS + 1];  /* [n] passes over n rows */
    times levels;                       /* passes over SO_PAIR_LEVELS levels of one row */
    times beside[SO_PAIR_MAX_ROWS + 1]; /* [n] as width, while the other model computes */
} clocked;

/* A request in one of the engines. */
typedef struct mode {
    so_engine *e;
    so_request *r;
    bool decoding; /* its first token was emitted */
    int rounds;    /* since then */
    int64_t n_emitted;
    so_step_info info;
    /* Timed rounds: */
    int64_t n_rounds, n_tokens;
    double ms, draft_ms, pass_ms;
} mode;

typedef struct bench {
    const so_args *a;
    so_bundle b, draft;
    so_engine_opts eo;
    char *names[MAX_DRAFTS]; /* files or names of the drafts */
    int n_drafts;
    int n_all; /* tokens that the plain continuation has */
    uint64_t seed;
    int32_t *prompt, *expected; /* [n_before], [n_all] */
    mode plain, spec;
    clocked target_clock, draft_clock;
    times steps; /* of plain decoding */
    int steps_cap;
    so_pair p;
    so_progress bar;
    so_err err;
} bench;

/* --- options --- */

static int add_spec(bench *g, so_str text) {
    so_spec s;
    so_err err = {0};
    if (so_spec_parse(text, &s, &err) != SO_OK)
        return so_args_bad(g->a, "%s", err.msg);
    const so_spec_node *n = &s.nodes[s.root];
    if (n->name == SO_SPEC_ASYNC) {
        const so_spec_node *outer = n;
        g->p.is_ahead = true;
        g->p.fan = so_spec_has(outer, SO_SPEC_OPT_FAN) ? (int)outer->opt[SO_SPEC_OPT_FAN] : 8;
        g->p.wait = so_spec_has(outer, SO_SPEC_OPT_WAIT) ? (int)outer->opt[SO_SPEC_OPT_WAIT] : 0;
        n = &s.nodes[outer->first];
    }
    if (n->name != SO_SPEC_MODEL || n->first >= 0)
        return so_args_bad(g->a,
                           "--spec %.*s: bench pair measures draft models; give --spec "
                           "'model(FILE)', 'async(model(FILE),fan=N)' or -md FILE",
                           SO_STR_ARG(text));
    if (g->n_drafts == MAX_DRAFTS)
        return so_args_bad(g->a, "more than %d draft models", MAX_DRAFTS);
    so_str file = so_spec_file(&s, n);
    const char *given = so_args_str(g->a, SO_OPT_DRAFT_MODEL, NULL);
    if (file.len == 0 && !given)
        return so_args_bad(g->a, "--spec model needs a draft model: give -md FILE or --spec "
                                 "'model(FILE)'");
    g->names[g->n_drafts++] = file.len > 0 ? so_strndup(file.ptr, file.len) : so_strdup(given);
    return 0;
}

/* `--spec 'a;b'` and `--spec a --spec b` mean the same. */
static int read_drafts(bench *g) {
    int status = 0;
    for (int i = 0; i < g->a->val[SO_OPT_SPEC].n_given && status == 0; i++)
        for (const char *at = g->a->val[SO_OPT_SPEC].items[i]; at && status == 0;) {
            size_t len = strcspn(at, ";");
            status = add_spec(g, (so_str){at, len});
            at = at[len] ? at + len + 1 : NULL;
        }
    if (status == 0 && g->n_drafts == 0)
        status = add_spec(g, SO_STR("model"));
    return status;
}

/* What is simulated. Drafting ahead needs both rates: they are those of some real pair. */
static int read_rates(bench *g) {
    const so_args *a = g->a;
    so_pair *p = &g->p;
    bool has_alpha = so_args_has(a, SO_OPT_ALPHA), has_hits = so_args_has(a, SO_OPT_HIT_RATE);
    memcpy(p->alphas, ALPHAS, sizeof ALPHAS);
    p->n_alphas = has_alpha ? 1 : (int)SO_PAIR_ALPHAS;
    p->alphas[0] = so_args_float(a, SO_OPT_ALPHA, ALPHAS[0]);
    p->hit_rate = so_args_float(a, SO_OPT_HIT_RATE, 0);
    if (p->is_ahead && (!has_alpha || !has_hits))
        return so_args_bad(a, "drafting ahead is simulated with --alpha and --hit-rate: give both");
    if (has_hits && !p->is_ahead)
        return so_args_bad(a, "--hit-rate is for drafting ahead: give --spec 'async(model,fan=N)'");
    if (p->is_ahead && p->max_gamma > (int)SO_PAIR_MAX_GAMMA)
        return so_args_bad(a, "--draft-max %d: must be at most %d here", p->max_gamma,
                           SO_PAIR_MAX_GAMMA);
    return 0;
}

static int read_numbers(bench *g) {
    const so_args *a = g->a;
    so_pair *p = &g->p;
    p->n_predict = (int)so_args_int(a, SO_OPT_PREDICT, DEFAULT_PREDICT);
    p->n_repeats = (int)so_args_int(a, SO_OPT_REPEATS, DEFAULT_REPEATS);
    p->max_gamma = (int)so_args_int(a, SO_OPT_DRAFT_MAX, DEFAULT_GAMMA);
    p->n_before = (int)so_args_int(a, SO_OPT_CTX, DEFAULT_BEFORE);
    g->seed = (uint64_t)so_args_int(a, SO_OPT_SEED, 0);
    if (p->n_predict < 8 || p->n_predict > 1 << 20)
        return so_args_bad(a, "--predict %d: must be from 8 to %d here", p->n_predict, 1 << 20);
    if (p->n_repeats > MAX_REPEATS)
        return so_args_bad(a, "--repeats %d: must be at most %d here", p->n_repeats, MAX_REPEATS);
    if (p->max_gamma > SO_PAIR_MAX_GAMMA)
        return so_args_bad(a, "--draft-max %d: must be at most %d here", p->max_gamma,
                           SO_PAIR_MAX_GAMMA);
    if (p->n_before < 2)
        return so_args_bad(a, "--ctx-size %d: must be at least 2 here", p->n_before);
    static const so_opt fixed[] = {SO_OPT_TEMP, SO_OPT_SPEC_LENGTH, SO_OPT_PROMPTS,
                                   SO_OPT_PARALLEL};
    for (size_t i = 0; i < SO_LEN(fixed); i++)
        if (so_args_has(a, fixed[i]))
            return so_args_bad(a,
                               "bench pair decodes one random prompt greedily, with every "
                               "length up to --draft-max: remove --%s",
                               so_option_at(fixed[i])->name);
    /* A request ends a round past what is timed. */
    g->n_all = p->n_predict + (SETTLE_ROUNDS + 2) * (p->max_gamma + 1);
    return 0;
}

/* --- passes alone --- */

static int clock_open(bench *g, const so_model *m, int most, clocked *c) {
    int n = TURNS * (PASSES - 1) * g->p.n_repeats;
    int widest = SO_MAX(most, (int)SO_PAIR_LEVELS);
    so_teacher_opts o = {.n_pages = so_kv_pages_for(g->p.n_cached + widest) + 2,
                         .max_rows = SO_MAX((int)FEED_ROWS, widest),
                         .max_logits = widest,
                         .kv_dtype = g->eo.kv_dtype,
                         .max_source = g->p.has_source ? g->p.n_before : 0};
    for (int k = 0; k <= most; k++)
        c->width[k].ms = SO_NEW_N(double, n), c->beside[k].ms = SO_NEW_N(double, n);
    c->levels.ms = SO_NEW_N(double, n);
    int rc = so_teacher_open(&c->t, m, &o, &g->err);
    if (rc == SO_OK)
        rc = so_teacher_read(&c->t, c->t.seq, g->prompt, g->p.n_before, &g->err);
    for (int at = 0, k; at < g->p.n_cached && rc == SO_OK; at += k) {
        k = SO_MIN(g->p.n_cached - at, g->p.n_before);
        rc = so_teacher_feed(&c->t, c->t.seq, g->prompt, k, 0, &g->err);
    }
    return rc;
}

static void clock_close(clocked *c) {
    for (int k = 0; k <= SO_PAIR_MAX_ROWS; k++)
        free(c->width[k].ms), free(c->beside[k].ms);
    free(c->levels.ms);
    so_teacher_close(&c->t);
    *c = (clocked){0};
}

/* One row, and further levels of one row each that the device feeds itself. */
static int run_levels(bench *g, so_teacher *t) {
    for (int i = 0; i < SO_PAIR_LEVELS; i++)
        t->rows[i] = (so_row){.token = i ? SO_ROW_GUESS : g->prompt[0],
                              .pos = g->p.n_cached + i,
                              .parent = i - 1,
                              .want_logits = true};
    so_batch batch = {.rows = t->rows, .n_rows = SO_PAIR_LEVELS, .seqs = &t->seq, .n_seqs = 1};
    int rc = so_seq_begin(t->seq, SO_PAIR_LEVELS, &g->err);
    return rc == SO_OK ? so_pass_run(t->pass, &batch, SO_PASS_ARGMAX, &g->err) : rc;
}

/* n rows; 0: the levels. */
static int time_passes(bench *g, clocked *c, int n, times *out) {
    int rc = SO_OK;
    for (int i = 0; i < PASSES && rc == SO_OK; i++) {
        int64_t t = so_clock_ns();
        rc = n > 0 ? so_teacher_rows(&c->t, c->t.seq, g->prompt, n, 0, SO_PASS_ARGMAX, &g->err)
                   : run_levels(g, &c->t);
        double ms = so_clock_ms_since(t);
        if (so_seq_open_nodes(c->t.seq) > 0)
            so_seq_abort(c->t.seq);
        if (i > 0)
            out->ms[out->n++] = ms;
    }
    return rc;
}

/* Rows of the draft's widest pass that is timed. */
static int draft_widths(const bench *g) {
    return g->p.is_ahead ? SO_MIN((int)SO_PAIR_MAX_ROWS, g->p.n_before) : 1;
}

/* A model that computes passes over n rows in a thread of its own, until it is told to stop. */
typedef struct neighbour {
    bench *g;
    so_teacher *t;
    int n;
    atomic_bool stop;
    atomic_int n_passes;
    int rc;
    so_err err;
} neighbour;

static void *compute(void *arg) {
    neighbour *b = arg;
    while (!atomic_load(&b->stop) && b->rc == SO_OK) {
        b->rc = so_teacher_rows(b->t, b->t->seq, b->g->prompt, b->n, 0, SO_PASS_ARGMAX, &b->err);
        if (so_seq_open_nodes(b->t->seq) > 0)
            so_seq_abort(b->t->seq);
        atomic_fetch_add(&b->n_passes, 1);
    }
    return NULL;
}

/* Passes of c over n rows while the other model computes passes over n_other rows. */
static int time_beside(bench *g, clocked *c, int n, clocked *other, int n_other) {
    neighbour b = {.g = g, .t = &other->t, .n = n_other};
    pthread_t thread;
    if (pthread_create(&thread, NULL, compute, &b) != 0)
        return so_err_set(&g->err, SO_ELIMIT, "a thread cannot be started");
    while (atomic_load(&b.n_passes) == 0)
        sched_yield();
    int rc = time_passes(g, c, n, &c->beside[n]);
    atomic_store(&b.stop, true);
    pthread_join(thread, NULL);
    if (rc == SO_OK && b.rc != SO_OK)
        rc = so_err_set(&g->err, b.rc, "%s", b.err.msg);
    return rc;
}

static int time_all_beside(bench *g) {
    clocked *t = &g->target_clock, *d = &g->draft_clock;
    int most = SO_MIN(g->p.max_gamma + 1, g->p.n_before), fan = SO_MIN(g->p.fan, draft_widths(g));
    int rc = SO_OK;
    for (int n = 1; n <= most && rc == SO_OK; n++)
        rc = time_beside(g, t, n, d, fan);
    return rc == SO_OK ? time_beside(g, d, fan, t, (most + 1) / 2) : rc;
}

static int time_all_passes(bench *g) {
    clocked *t = &g->target_clock, *d = &g->draft_clock;
    int most = SO_MIN(g->p.max_gamma + 1, g->p.n_before), rc = SO_OK;
    for (int turn = 0; turn < TURNS && rc == SO_OK; turn++) {
        for (int n = 1; n <= most && rc == SO_OK; n++)
            rc = time_passes(g, t, n, &t->width[n]);
        if (rc == SO_OK)
            rc = time_passes(g, t, 0, &t->levels);
        for (int n = 1; n <= draft_widths(g) && rc == SO_OK; n++)
            rc = time_passes(g, d, n, &d->width[n]);
        if (rc == SO_OK)
            rc = time_passes(g, d, 0, &d->levels);
        if (rc == SO_OK && g->p.is_ahead)
            rc = time_all_beside(g);
    }
    return rc;
}

static double median_of(times *t) { return so_median(t->ms, t->n); }

/* The time of a further level. */
static double device_ms(clocked *c) {
    return (median_of(&c->levels) - median_of(&c->width[1])) / (SO_PAIR_LEVELS - 1);
}

/* --- decoding --- */

static bool on_event(void *user, const so_event *ev) {
    mode *m = user;
    m->n_emitted += ev->token != SO_TOKEN_NONE;
    m->decoding = true;
    return true;
}

static void on_step(void *user, const so_step_info *info) { ((mode *)user)->info = *info; }

/* gamma 0: plain. */
static int start(bench *g, mode *m, double alpha, int gamma, bool ahead, uint64_t seed) {
    char drafter[96];
    so_request_opts o = {.prompt = g->prompt,
                         .n_prompt = g->p.n_before,
                         .max_tokens = g->n_all,
                         .ignore_end = true,
                         .on_event = on_event,
                         .user = m};
    so_sample_defaults(&o.sample);
    o.sample.temp = 0;
    o.sample.seed = seed;
    if (gamma > 0) {
        snprintf(drafter, sizeof drafter, "oracle(%g,model)", alpha);
        if (ahead)
            snprintf(drafter, sizeof drafter, "async(fan=%d,wait=%d,oracle(%g,hit=%g,model))",
                     g->p.fan, g->p.wait ? g->p.wait : gamma, alpha, g->p.hit_rate);
        o.spec = (so_spec_opts){
            .drafter = drafter, .length = gamma, .expected = g->expected, .n_expected = g->n_all};
    }
    *m = (mode){.e = m->e};
    return so_engine_submit(m->e, &o, &m->r, &g->err);
}

static int step(bench *g, mode *m, times *steps) {
    int64_t before = m->n_emitted, t = so_clock_ns();
    bool decoding = m->decoding;
    int more = so_engine_step(m->e, &g->err);
    double ms = so_clock_ms_since(t);
    if (more < 0)
        return more;
    if (decoding && ++m->rounds > SETTLE_ROUNDS) {
        m->n_rounds++;
        m->n_tokens += m->n_emitted - before;
        m->ms += ms;
        m->draft_ms += m->info.draft_ms;
        m->pass_ms += m->info.pass_ms;
        if (steps && steps->n < g->steps_cap)
            steps->ms[steps->n++] = ms;
    }
    return so_request_check(m->r, &g->err);
}

static bool finish(bench *g, mode *m) {
    int n = 0;
    const int32_t *out = so_request_output(m->r, &n);
    bool same = n <= g->n_all && memcmp(out, g->expected, (size_t)n * sizeof *out) == 0;
    so_request_free(m->r);
    m->r = NULL;
    return same;
}

static int generate_expected(bench *g) {
    int rc = start(g, &g->plain, 0, 0, false, g->seed), n = 0;
    if (rc == SO_OK)
        rc = so_engine_run(g->plain.e, g->plain.r, &g->err);
    const int32_t *out = rc == SO_OK ? so_request_output(g->plain.r, &n) : NULL;
    if (rc == SO_OK && n != g->n_all)
        rc = so_err_set(&g->err, SO_ELIMIT, "the target generated %d tokens instead of %d", n,
                        g->n_all);
    if (rc == SO_OK)
        memcpy(g->expected, out, (size_t)n * sizeof *out);
    so_request_free(g->plain.r);
    g->plain.r = NULL;
    return rc;
}

/* Adds a run to its cell. plain_ms: per token, in the same cell. */
static void add_run(so_pair_cell *c, int repeat, const mode *m, double plain_ms, double expected) {
    double per_round = (double)m->n_tokens / (double)m->n_rounds;
    c->gain[repeat] = plain_ms / (m->ms / (double)m->n_tokens);
    c->at_alpha[repeat] = c->gain[repeat] * expected / per_round;
    c->rounds += m->n_rounds;
    c->tokens += m->n_tokens;
    c->draft_ms += m->draft_ms;
    c->pass_ms += m->pass_ms;
    c->other_ms += m->ms - m->draft_ms - m->pass_ms;
}

/* The third run of a cell. Alone, because the draft's cores work during its passes. */
static int run_ahead(bench *g, int a, int gamma, int repeat, double plain_ms, uint64_t seed) {
    so_pair_cell *c = &g->p.ahead[gamma];
    mode *m = &g->spec;
    int rc = start(g, m, g->p.alphas[a], gamma, true, seed);
    while (rc == SO_OK && m->n_tokens < g->p.n_predict)
        rc = step(g, m, NULL);
    if (rc != SO_OK)
        return rc;
    add_run(c, repeat, m, plain_ms, so_theory_expected_tokens(g->p.alphas[a], gamma));
    so_request_cancel(m->r); /* the counts are those of a request that has ended */
    while (rc == SO_OK && so_request_finish(m->r) == SO_FINISH_NONE)
        rc = SO_MIN(so_engine_step(m->e, &g->err), SO_OK);
    const so_async_counts *n = &so_request_get_stats(m->r)->async;
    c->looked_up += n->rounds + n->skipped;
    c->hits += n->hits;
    c->worker_ms += n->worker_ms;
    g->p.n_different += !finish(g, m);
    so_engine_settle(m->e);
    return rc;
}

static int run_cell(bench *g, int a, int gamma, int repeat) {
    so_pair_cell *c = &g->p.cells[a][gamma];
    double alpha = g->p.alphas[a];
    mode *plain = &g->plain, *spec = &g->spec;
    uint64_t seed = g->seed + 1000 * (uint64_t)repeat + (uint64_t)(a * SO_PAIR_MAX_GAMMA + gamma);
    int rc = start(g, plain, 0, 0, false, seed);
    if (rc == SO_OK)
        rc = start(g, spec, alpha, gamma, false, seed);
    while (rc == SO_OK && (plain->n_tokens < g->p.n_predict || spec->n_tokens < g->p.n_predict)) {
        bool plain_is_next =
            spec->n_tokens >= g->p.n_predict ||
            (plain->n_tokens < g->p.n_predict && plain->n_emitted <= spec->n_emitted);
        rc = plain_is_next ? step(g, plain, &g->steps) : step(g, spec, NULL);
    }
    if (rc == SO_OK) {
        double plain_ms = plain->ms / (double)plain->n_tokens;
        add_run(c, repeat, spec, plain_ms, so_theory_expected_tokens(alpha, gamma));
        g->p.n_different += !finish(g, plain);
        g->p.n_different += !finish(g, spec);
        if (g->p.is_ahead)
            rc = run_ahead(g, a, gamma, repeat, plain_ms, seed);
    }
    so_request_free(plain->r);
    so_request_free(spec->r);
    plain->r = spec->r = NULL;
    return rc;
}

static int measure(bench *g) {
    int rc = SO_OK, n = g->p.n_repeats * g->p.n_alphas * g->p.max_gamma, done = 0;
    char label[64];
    const char *base = strrchr(g->p.draft, '/');
    snprintf(label, sizeof label, "%.40s", base ? base + 1 : g->p.draft);
    so_progress_begin(&g->bar, label);
    for (int repeat = 0; repeat < g->p.n_repeats && rc == SO_OK; repeat++) {
        rc = time_all_passes(g);
        for (int a = 0; a < g->p.n_alphas; a++)
            for (int gamma = 1; gamma <= g->p.max_gamma && rc == SO_OK; gamma++) {
                rc = run_cell(g, a, gamma, repeat);
                so_progress_set(&g->bar, (double)++done / n);
            }
    }
    so_progress_end(&g->bar);
    return rc;
}

static void take_times(bench *g) {
    so_pair *p = &g->p;
    for (int n = 1; n <= p->max_gamma + 1; n++)
        p->t_ms[n] = median_of(&g->target_clock.width[n]);
    for (int n = 1; n <= draft_widths(g); n++)
        p->draft_n_ms[n] = median_of(&g->draft_clock.width[n]);
    for (int n = 1; n <= p->max_gamma + 1 && p->is_ahead; n++)
        p->beside_ms[n] = median_of(&g->target_clock.beside[n]);
    if (p->is_ahead)
        p->draft_beside_ms = median_of(&g->draft_clock.beside[SO_MIN(p->fan, draft_widths(g))]);
    p->draft_ms = p->draft_n_ms[1];
    p->device_ms = device_ms(&g->target_clock);
    p->draft_device_ms = device_ms(&g->draft_clock);
    p->plain_ms = median_of(&g->steps);
}

/* --- setting up --- */

static so_kv_shape kv_shape(const so_model *m, so_dtype dtype) {
    const so_hparams *hp = so_model_hparams(m);
    return (so_kv_shape){.n_layers = hp->n_layers,
                         .n_heads_kv = hp->n_heads_kv,
                         .head_dim = hp->head_dim,
                         .dtype = dtype};
}

/* Bytes of one more token of text, and of one more token of a source. */
static double token_bytes(const so_model *m, so_dtype dtype) {
    so_kv_shape text = kv_shape(m, dtype);
    double source = (double)so_sources_bytes(so_model_hparams(m), SO_KV_PAGE, 1, dtype);
    return (double)so_kv_bytes_per_token(&text) + source / SO_KV_PAGE;
}

/* Bytes in use on the target's device, by other programs, too; 0: not known. */
static double used_bytes(const bench *g) {
    so_backend *b = g->b.backend;
    size_t left, total;
    so_err err = {0};
    if (!b->vt->memory || b->vt->memory(b, &left, &total, &err) != SO_OK)
        return 0;
    return (double)(total - left);
}

static void take_memory(bench *g) {
    so_pair *p = &g->p;
    p->weights = (double)so_model_weight_bytes(g->b.model);
    p->draft_weights = (double)so_model_weight_bytes(g->draft.model);
    p->kv_token = token_bytes(g->b.model, g->eo.kv_dtype);
    p->draft_kv_token = token_bytes(g->draft.model, g->eo.kv_dtype);
    p->device_used = used_bytes(g);
    /* Two engines and the timed sequence; a cache of the draft for each alpha and that sequence. */
    double len = (double)so_kv_pages_for(g->eo.n_ctx) * SO_KV_PAGE;
    p->own_caches = len * (2 * p->kv_token + p->n_alphas * p->draft_kv_token) +
                    p->n_cached * (p->kv_token + p->draft_kv_token);
}

static int check_context(bench *g, const so_model *m, const char *name) {
    int has = so_model_hparams(m)->n_ctx_train;
    if (g->eo.n_ctx <= has)
        return 0;
    return so_args_bad(g->a,
                       "%.200s has a context of %d tokens, and %d are needed: lower --ctx-size, "
                       "--predict or --draft-max",
                       name, has, g->eo.n_ctx);
}

static int open_target(bench *g) {
    int status = so_cli_open(g->a, &g->b);
    if (status == 0)
        status = so_cli_engine_opts(g->a, &g->b, &g->eo);
    if (status != 0)
        return status;
    so_pair *p = &g->p;
    p->target = so_args_str(g->a, SO_OPT_MODEL, "");
    p->has_source = so_model_hparams(g->b.model)->n_enc_layers > 0;
    int n_before = p->has_source ? 1 : p->n_before; /* in the cache; 1: the start token */
    p->n_cached = n_before + p->n_predict / 2;
    g->eo.n_ctx = SO_MAX(p->n_before, n_before + g->n_all + 1);
    g->eo.n_parallel = 1;
    g->eo.n_pages = 0;
    g->eo.prefix_cache = true; /* the prompt is not timed */
    status = check_context(g, g->b.model, p->target);
    if (status != 0)
        return status;
    g->prompt = SO_NEW_N(int32_t, SO_MAX(p->n_before, (int)SO_PAIR_MAX_GAMMA + 1));
    g->expected = SO_NEW_N(int32_t, g->n_all);
    for (int i = 0; i < SO_MAX(p->n_before, (int)SO_PAIR_MAX_GAMMA + 1); i++) {
        so_rng_key key = {.seed = 20, .position = (uint32_t)i, .purpose = SO_RNG_TEST};
        g->prompt[i] = (int32_t)(so_rng_uniform(&key, 0) * so_model_hparams(g->b.model)->n_vocab);
    }
    so_engine_opts eo = g->eo;
    eo.on_step = on_step;
    eo.step_user = &g->plain;
    int rc = so_engine_create(g->b.model, g->b.tok, &eo, &g->plain.e, &g->err);
    if (rc == SO_OK)
        rc = generate_expected(g);
    return rc == SO_OK ? 0 : so_args_fail(g->a, &g->err);
}

static void open_cell(const bench *g, so_pair_cell *c) {
    *c = (so_pair_cell){.gain = SO_NEW_N(double, g->p.n_repeats),
                        .at_alpha = SO_NEW_N(double, g->p.n_repeats)};
}

static void close_cell(so_pair_cell *c) {
    free(c->gain);
    free(c->at_alpha);
    *c = (so_pair_cell){0};
}

static int open_draft(bench *g, const char *name) {
    int status = so_cli_open_draft_named(g->a, &g->b, name, &g->draft);
    if (status == 0)
        status = check_context(g, g->draft.model, name);
    if (status != 0)
        return status;
    so_pair *p = &g->p;
    so_engine_opts eo = g->eo;
    eo.max_draft = p->max_gamma;
    eo.draft = g->draft.model;
    eo.draft_tok = g->draft.tok;
    eo.draft_temp = -1;
    eo.on_step = on_step;
    eo.step_user = &g->spec;
    p->draft = name;
    p->n_different = 0;
    for (int gamma = 0; gamma <= p->max_gamma; gamma++) {
        for (int a = 0; a < p->n_alphas; a++)
            open_cell(g, &p->cells[a][gamma]);
        open_cell(g, &p->ahead[gamma]);
    }
    g->steps_cap = p->n_alphas * p->max_gamma * p->n_repeats * (p->n_predict + 1);
    g->steps.ms = SO_NEW_N(double, g->steps_cap);
    int rc = so_engine_create(g->b.model, g->b.tok, &eo, &g->spec.e, &g->err);
    if (rc == SO_OK)
        rc = clock_open(g, g->b.model, p->max_gamma + 1, &g->target_clock);
    if (rc == SO_OK)
        rc = clock_open(g, g->draft.model, SO_MAX(draft_widths(g), p->max_gamma + 1),
                        &g->draft_clock);
    return rc == SO_OK ? 0 : so_args_fail(g->a, &g->err);
}

static void close_draft(bench *g) {
    for (int gamma = 0; gamma <= SO_PAIR_MAX_GAMMA; gamma++) {
        for (int a = 0; a < SO_PAIR_ALPHAS; a++)
            close_cell(&g->p.cells[a][gamma]);
        close_cell(&g->p.ahead[gamma]);
    }
    free(g->steps.ms);
    g->steps = (times){0};
    clock_close(&g->target_clock);
    clock_close(&g->draft_clock);
    so_engine_free(g->spec.e);
    g->spec = (mode){0};
    so_bundle_close(&g->draft);
    g->draft = (so_bundle){0};
}

static int measure_draft(bench *g, const char *name) {
    int status = open_draft(g, name);
    if (status == 0 && measure(g) != SO_OK)
        status = so_args_fail(g->a, &g->err);
    if (status == 0) {
        so_buf device = {0};
        take_times(g);
        take_memory(g);
        g->b.backend->vt->describe(g->b.backend, &device);
        so_buf_append_char(&device, '\0');
        if (so_args_has(g->a, SO_OPT_JSON))
            so_pair_print_json(&g->p, device.data);
        else
            so_pair_print(&g->p, device.data);
        so_buf_free(&device);
    }
    close_draft(g);
    return status;
}

int so_bench_pair(const so_args *a) {
    bench *g = SO_NEW(bench);
    g->a = a;
    int status = read_numbers(g);
    if (status == 0)
        status = read_drafts(g);
    if (status == 0)
        status = read_rates(g);
    if (status == 0)
        status = open_target(g);
    for (int i = 0; i < g->n_drafts && status == 0; i++)
        status = measure_draft(g, g->names[i]);
    so_engine_free(g->plain.e);
    so_bundle_close(&g->b);
    for (int i = 0; i < g->n_drafts; i++)
        free(g->names[i]);
    free(g->prompt);
    free(g->expected);
    free(g);
    return status;
}
