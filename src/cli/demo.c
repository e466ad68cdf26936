/* `sooth demo`: answers one prompt twice with the same seed, by plain and by speculative decoding,
 * and compares the speed.
 *
 * On a wide terminal the two answers are side by side, on a narrow one below each other, both
 * printed while they are generated, with tokens coloured by origin. Without a terminal they are
 * plain text. Then follows a table. The exit status is 1 if the texts differ although they must be
 * equal (`lenient`, and `reject` above temperature 0, do not promise that).
 *
 * The time is that of the engine's steps from the second token on, without the time of printing;
 * prefill is not included. A few tokens are decoded beforehand, untimed, so that the first mode
 * does not run with cold caches. The prefix cache is off.
 *
 * Without -m the model is `story`, which comes with the program, else a pulled smollm2. Main thread
 * only; the signal handler sets a flag. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "cli/demo_columns.h"
#include "cli/load.h"
#include "cli/models.h"
#include "cli/report.h"
#include "cli/request.h"
#include "cli/spec.h"
#include "cli/terminal.h"
#include "cli/view.h"

enum { PREDICT = 160, WARM_UP = 8, MIN_ROWS = 12, TABLE_ROWS = 10, TABLE_COLUMNS = 73 };
static const char PROMPT[] =
    "Write a short story for children about an honest fairy who makes a new friend.";

/* For encoder-decoder models: models/ende translates it. */
static const char SOURCE[] =
    "I would like to thank the rapporteur for her excellent report, and I hope that the Commission "
    "will take our proposals into account when it presents its programme for the coming year.";

enum { PLAIN, SPEC };
typedef enum show { SHOW_NOTHING, SHOW_TEXT, SHOW_BELOW, SHOW_BESIDE } show;

/* One of the two answers. */
typedef struct answer {
    so_tokens tokens;
    double ms; /* of the timed steps */
    int timed; /* tokens of the timed steps */
    so_request_stats stats;
} answer;

typedef struct demo {
    const so_args *a;
    so_bundle b;
    so_cli_spec spec;
    so_engine *e;
    so_request_opts base;
    so_tokens prompt;
    const char *text; /* the prompt */
    show show;
    so_columns *columns;
    so_painter painter;
    int which;
    int n_emitted;
    double shown_ms; /* spent on printing in this step */
    bool color, exact;
    answer answers[2];
} demo;

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig) {
    interrupted = 1;
    signal(sig, SIG_DFL);
}

/* --- display --- */

static const char *title(int which) {
    return which == PLAIN ? "plain decoding" : "speculative decoding";
}

static show choose_show(const so_args *a, int *width, int *height) {
    int rows;
    if (so_args_has(a, SO_OPT_JSON))
        return SHOW_NOTHING;
    if (!so_terminal_is(STDOUT_FILENO))
        return SHOW_TEXT;
    if (!so_args_color(a, STDOUT_FILENO) || !so_terminal_size(STDOUT_FILENO, width, &rows) ||
        *width < SO_COLUMNS_MIN_WIDTH || rows < MIN_ROWS + TABLE_ROWS)
        return SHOW_BELOW;
    *height = rows - TABLE_ROWS;
    return SHOW_BESIDE;
}

static void show_event(demo *d, const so_event *ev) {
    switch (d->show) {
    case SHOW_NOTHING:
        break;
    case SHOW_TEXT:
        fwrite(ev->text.ptr, 1, ev->text.len, stdout);
        fflush(stdout);
        break;
    case SHOW_BELOW:
        so_painter_event(&d->painter, ev);
        break;
    case SHOW_BESIDE:
        so_columns_add(d->columns, d->which, ev->text, so_painter_color(ev->origin));
        break;
    }
}

static bool on_event(void *user, const so_event *ev) {
    demo *d = user;
    int64_t t = so_clock_ns();
    d->n_emitted += ev->token != SO_TOKEN_NONE;
    show_event(d, ev);
    d->shown_ms += so_clock_ms_since(t);
    return !interrupted;
}

static void on_round(void *user, const so_round *round) {
    demo *d = user;
    if (d->show == SHOW_BELOW)
        so_painter_round(&d->painter, round);
}

static void begin_answer(demo *d) {
    d->painter.on = d->which == SPEC;
    if (d->show == SHOW_TEXT || d->show == SHOW_BELOW)
        printf("%s%s:%s\n", d->color ? "\033[1m" : "", title(d->which), d->color ? "\033[0m" : "");
    fflush(stdout);
}

static void end_answer(demo *d) {
    if (d->show == SHOW_TEXT)
        fputs("\n\n", stdout);
    if (d->show == SHOW_BELOW) {
        so_painter_end(&d->painter);
        putchar('\n');
    }
}

/* --- the two answers --- */

/* Runs r to its end. Steps that begin after the first token are timed. */
static int run_request(demo *d, so_request *r, answer *w, so_err *err) {
    int rc = SO_OK;
    d->n_emitted = 0;
    while (rc == SO_OK && so_request_finish(r) == SO_FINISH_NONE) {
        int before = d->n_emitted;
        int64_t t = so_clock_ns();
        d->shown_ms = 0;
        rc = SO_MIN(so_engine_step(d->e, err), 0);
        if (before > 0) {
            w->ms += so_clock_ms_since(t) - d->shown_ms;
            w->timed += d->n_emitted - before;
        }
        if (interrupted)
            so_request_cancel(r);
    }
    return rc == SO_OK ? so_request_check(r, err) : rc;
}

static int run_answer(demo *d, int which, so_err *err) {
    answer *w = &d->answers[which];
    so_request *r = NULL;
    so_request_opts o = d->base;
    o.prompt = d->prompt.ids;
    o.n_prompt = (int)d->prompt.len;
    o.continues = !d->b.chat;
    o.on_event = on_event;
    o.on_round = on_round;
    o.user = d;
    if (which == SPEC)
        o.spec = d->spec.opts;
    d->which = which;
    begin_answer(d);
    int rc = so_engine_submit(d->e, &o, &r, err);
    if (rc == SO_OK)
        rc = run_request(d, r, w, err);
    if (rc == SO_OK) {
        int n;
        const int32_t *ids = so_request_output(r, &n);
        so_tokens_append(&w->tokens, ids, (size_t)n);
        w->stats = *so_request_get_stats(r);
    }
    so_request_free(r);
    end_answer(d);
    return rc;
}

static int warm_up(demo *d, so_err *err) {
    so_request *r = NULL;
    so_request_opts o = d->base;
    o.prompt = d->prompt.ids;
    o.n_prompt = (int)d->prompt.len;
    o.max_tokens = o.max_tokens < 0 ? WARM_UP : SO_MIN(o.max_tokens, WARM_UP);
    int rc = so_engine_submit(d->e, &o, &r, err);
    if (rc == SO_OK)
        rc = so_engine_run(d->e, r, err);
    so_request_free(r);
    return rc;
}

/* --- results --- */

static double rate(const answer *w) { return w->ms > 0 ? 1000.0 * w->timed / w->ms : 0; }

static double speedup(const demo *d) {
    return rate(&d->answers[PLAIN]) > 0 ? rate(&d->answers[SPEC]) / rate(&d->answers[PLAIN]) : 0;
}

static bool same_text(const demo *d) {
    const so_tokens *a = &d->answers[PLAIN].tokens, *b = &d->answers[SPEC].tokens;
    return a->len == b->len &&
           (a->len == 0 || memcmp(a->ids, b->ids, a->len * sizeof *a->ids) == 0);
}

static void print_json(const demo *d) {
    so_rates r = so_stats_rates(&d->answers[SPEC].stats);
    so_report_print_json(json_pack(
        "{s:f, s:o, s:f, s:f, s:f, s:o, s:i, s:s, s:f, s:I, s:s}", "speedup", speedup(d),
        "identical", d->exact ? json_boolean(same_text(d)) : json_null(), "plain_tps",
        rate(&d->answers[PLAIN]), "spec_tps", rate(&d->answers[SPEC]), "tokens_per_pass",
        r.tokens_per_pass, "alpha",
        d->answers[SPEC].stats.tested_n ? json_real(r.alpha) : json_null(), "tokens",
        (int)d->answers[SPEC].tokens.len, "drafter", d->spec.opts.drafter, "temp",
        (double)d->base.sample.temp, "seed", (json_int_t)d->base.sample.seed, "prompt", d->text));
}

static void print_row(const demo *d, int which, bool narrow) {
    const answer *w = &d->answers[which];
    so_rates r = so_stats_rates(&w->stats);
    if (narrow) {
        printf("%-11s %9.1f %8.2fx\n", which == PLAIN ? "plain" : "speculative", rate(w),
               which == PLAIN ? 1.0 : speedup(d));
        return;
    }
    printf("%-22s %6zu %10.1f %12.2f ", title(which), w->tokens.len, rate(w), r.tokens_per_pass);
    if (w->stats.tested_n > 0)
        printf("%8.2f ", r.alpha);
    else
        printf("%8s ", "-");
    printf("%8.2fx\n", which == PLAIN ? 1.0 : speedup(d));
}

static void print_table(const demo *d) {
    if (d->show != SHOW_TEXT && d->color)
        printf("%saccepted\033[0m, %sfrom the model\033[0m%s\n\n",
               so_painter_color(SO_ORIGIN_DRAFT), so_painter_color(SO_ORIGIN_BONUS),
               d->show == SHOW_BELOW ? ", \033[9;31mrejected\033[0m" : "");
    bool narrow = so_terminal_columns(STDOUT_FILENO, TABLE_COLUMNS) < TABLE_COLUMNS;
    if (narrow)
        printf("%-11s %9s %9s\n", "", "tokens/s", "speed-up");
    else
        printf("%-22s %6s %10s %12s %8s %9s\n", "", "tokens", "tokens/s", "tokens/pass", "alpha",
               "speed-up");
    print_row(d, PLAIN, narrow);
    print_row(d, SPEC, narrow);
    if (d->exact)
        printf("identical: %s\n", same_text(d) ? "yes" : "NO");
    else
        printf("identical: not promised by --verify %s\n",
               so_verify_mode_name(d->spec.opts.verify));
}

static int run_demo(demo *d) {
    so_err err = {0};
    int width = 0, height = 0, rc = warm_up(d, &err);
    d->show = choose_show(d->a, &width, &height);
    so_painter_init(&d->painter, d->b.tok, d->a);
    d->color = d->painter.color;
    signal(SIGINT, on_interrupt);
    signal(SIGTERM, on_interrupt);
    if (rc == SO_OK && d->show != SHOW_NOTHING)
        printf("%s> %s%s\n\n", d->color ? "\033[1m" : "", d->text, d->color ? "\033[0m" : "");
    if (rc == SO_OK && d->show == SHOW_BESIDE)
        d->columns = so_columns_open(width, height, title(PLAIN), title(SPEC));
    for (int i = PLAIN; i <= SPEC && rc == SO_OK && !interrupted; i++)
        rc = run_answer(d, i, &err);
    so_columns_close(d->columns);
    so_painter_free(&d->painter);
    if (rc != SO_OK)
        return so_args_fail(d->a, &err);
    if (interrupted)
        return 130;
    if (d->show == SHOW_NOTHING)
        print_json(d);
    else
        print_table(d);
    return d->exact && !same_text(d);
}

/* --- setup --- */

/* -m, or the default model. */
static int choose_model(so_args *a, char **path) {
    so_err err = {0};
    if (so_args_has(a, SO_OPT_MODEL))
        return 0;
    if (!so_model_embedded(path) && so_model_resolve("smollm2", path, NULL) != SO_OK) {
        so_err_set(&err, SO_ENOTFOUND,
                   "no model found: run `sooth pull smollm2` (98 MB), or give -m MODEL");
        return so_args_fail(a, &err);
    }
    a->val[SO_OPT_MODEL].text = *path;
    a->val[SO_OPT_MODEL].n_given = 1;
    so_log(SO_LOG_INFO, "model: %s", *path);
    return 0;
}

static int open_demo(demo *d) {
    const so_args *a = d->a;
    so_engine_opts eo;
    so_err err = {0};
    d->text = so_args_str(a, SO_OPT_PROMPT, PROMPT);
    if (!*d->text)
        return so_args_bad(a, "the prompt is empty");
    int status = so_cli_spec_read(a, &d->spec);
    if (status == 0 && !d->spec.opts.drafter)
        status = so_args_bad(a, "demo compares with plain decoding: --spec must name a drafter");
    if (status == 0)
        status = so_cli_spec_check_text(a, &d->spec);
    if (status == 0)
        status = so_cli_open(a, &d->b);
    if (status == 0)
        status = so_cli_request_read(a, &d->b, &d->base);
    if (status == 0)
        status = so_cli_engine_opts(a, &d->b, &eo);
    if (status == 0)
        status = so_cli_spec_open(a, &d->b, &d->spec, &eo);
    if (status != 0)
        return status;
    if (so_model_hparams(d->b.model)->n_enc_layers > 0)
        d->text = so_args_str(a, SO_OPT_PROMPT, SOURCE);
    d->base.max_tokens = (int)so_args_int(a, SO_OPT_PREDICT, PREDICT);
    d->base.sample.temp = (float)so_args_float(a, SO_OPT_TEMP, 0);
    d->exact = d->spec.opts.verify == SO_VERIFY_MATCH ||
               (d->spec.opts.verify == SO_VERIFY_REJECT && !(d->base.sample.temp > 0));
    eo.prefix_cache = false;
    if (so_cli_encode(&d->b, false, so_str_c(d->text), &d->prompt, &err) != SO_OK ||
        so_engine_create(d->b.model, d->b.tok, &eo, &d->e, &err) != SO_OK)
        return so_args_fail(a, &err);
    return 0;
}

int so_cmd_demo(int argc, char **argv) {
    so_args a;
    char *path = NULL;
    if (!so_args_parse(&a, SO_CMD_DEMO, argc, argv))
        return a.status;
    demo *d = SO_NEW(demo);
    d->a = &a;
    int status = so_cli_prompt_argument(&a);
    if (status == 0)
        status = choose_model(&a, &path);
    if (status == 0)
        status = open_demo(d);
    if (status == 0)
        status = run_demo(d);
    so_cli_request_free(&d->base);
    so_engine_free(d->e);
    so_cli_spec_close(&d->spec);
    so_bundle_close(&d->b);
    so_tokens_free(&d->prompt);
    for (int i = 0; i < 2; i++)
        so_tokens_free(&d->answers[i].tokens);
    free(d);
    free(path);
    so_args_free(&a);
    return status;
}
