/* `sooth run`: answers one prompt, streamed, or a file of prompts, several at a time.
 *
 * Both use the same loop over jobs. A job is a conversation: its turns are answered in order, each as
 * one request with the whole conversation as its prompt. At most --parallel jobs run at a time.
 * Results are printed in the order of the file. A prompt that fails (because it is too long, say)
 * is reported, the others continue, and the exit status is 1.
 *
 * Ctrl-C cancels the running requests and prints their text so far; the exit status is 130. A
 * second Ctrl-C ends the program at once. Main thread only; the signal handler sets a flag. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "cli/dialog.h"
#include "cli/load.h"
#include "cli/progress.h"
#include "cli/prompts.h"
#include "cli/report.h"
#include "cli/request.h"
#include "cli/spec.h"
#include "cli/terminal.h"
#include "cli/trace.h"
#include "cli/view.h"
#include "format/describe.h"

enum { MAX_PROMPT_BYTES = 64 << 20 };

typedef struct runner runner;

typedef struct job {
    runner *run;
    const so_prompt *p;
    int turn;
    so_dialog dialog; /* with a chat template: the conversation so far */
    so_buf raw;       /* without: the text so far */
    so_request *req;
    so_buf answer; /* to the current turn */
    so_report total;
    json_t *turns; /* results by turn, if there are several */
    bool done;
    so_err err;
} job;

struct runner {
    const so_args *a;
    so_bundle b;
    so_engine *e;
    so_request_opts base; /* options of every request */
    const char *system;
    bool chat, json, stream;
    so_cli_spec spec;
    so_painter painter;
    FILE *trace;     /* NULL: no trace */
    so_progress bar; /* for a file of prompts, if stdout is not a terminal */
    job *jobs;
    int n_jobs, n_started, n_printed, n_failed;
    so_report total; /* counts of all jobs */
};

static volatile sig_atomic_t interrupted;

static void on_interrupt(int sig) {
    interrupted = 1;
    signal(sig, SIG_DFL);
}

static int check_logprobs(const so_args *a) {
    if (so_args_int(a, SO_OPT_LOGPROBS, 0) > 0 && !so_args_has(a, SO_OPT_JSON))
        return so_args_bad(a, "--logprobs needs --json, whose result contains them");
    return 0;
}

/* --- conversations --- */

/* The tokens of the conversation up to the current turn. */
static int encode_turn(job *j, so_tokens *out, so_err *err) {
    so_str text = j->p->turns[j->turn];
    if (!j->run->chat) {
        so_buf_append_str(&j->raw, text);
        return so_tokenizer_encode(j->run->b.tok, so_buf_str(&j->raw), SO_ENCODE_ADD_SPECIAL, out,
                                   err);
    }
    const char *system = j->p->system ? j->p->system : j->run->system;
    int rc = so_dialog_set_system(&j->dialog, so_str_c(system ? system : ""), err);
    if (rc == SO_OK)
        rc = so_dialog_add(&j->dialog, "user", text, err);
    return rc == SO_OK ? so_dialog_encode(&j->dialog, j->run->b.chat, out, err) : rc;
}

/* Called at the last event. Ends the line, so that messages after the answer begin on a new one. A
 * failure before the first token leaves stdout empty. */
static void end_line(const job *j, so_finish why) {
    if (why != SO_FINISH_ERROR || j->answer.len > 0)
        so_painter_end(&j->run->painter);
}

static bool on_event(void *user, const so_event *ev) {
    job *j = user;
    so_buf_append_str(&j->answer, ev->text);
    if (j->run->stream) {
        so_painter_event(&j->run->painter, ev);
        if (ev->finish != SO_FINISH_NONE)
            end_line(j, ev->finish);
    }
    return !interrupted;
}

static void on_round(void *user, const so_round *round) {
    runner *r = ((job *)user)->run;
    if (r->painter.on)
        so_painter_round(&r->painter, round);
    if (r->trace)
        so_trace_write_round(r->trace, round);
}

static void fail_job(job *j) {
    j->done = true;
    j->run->n_failed++;
}

static void start_turn(job *j) {
    so_tokens tokens = {0};
    int rc = encode_turn(j, &tokens, &j->err);
    if (rc == SO_OK) {
        so_request_opts o = j->run->base;
        o.prompt = tokens.ids;
        o.n_prompt = (int)SO_MIN(tokens.len, (size_t)INT32_MAX);
        o.continues = !j->run->chat;
        o.on_event = on_event;
        o.on_round = j->run->painter.on || j->run->trace ? on_round : NULL;
        o.user = j;
        so_buf_clear(&j->answer);
        rc = so_engine_submit(j->run->e, &o, &j->req, &j->err);
    }
    so_tokens_free(&tokens);
    if (rc != SO_OK)
        fail_job(j);
}

static json_t *turn_json(const so_report *t) {
    json_t *o = so_report_json(t);
    json_object_del(o, "seed");
    return o;
}

static void raw_answer(job *j) {
    so_buf_append_str(&j->raw, so_buf_str(&j->answer));
    so_buf_append_char(&j->raw, '\n');
}

/* Records the answer of a finished request and starts the next turn, if there is one. */
static void end_turn(job *j) {
    bool failed = so_request_finish(j->req) == SO_FINISH_ERROR;
    if (failed) {
        j->err = *so_request_error(j->req);
    } else {
        so_report one = {0};
        so_report_add(&one, j->req, j->run->b.tok, so_buf_str(&j->answer));
        so_report_add(&j->total, j->req, j->run->b.tok, so_buf_str(&j->answer));
        if (j->p->n_turns > 1) {
            j->turns = j->turns ? j->turns : json_array();
            json_array_append_new(j->turns, turn_json(&one));
        }
        so_report_free(&one);
    }
    so_request_free(j->req);
    j->req = NULL;
    if (failed) {
        fail_job(j);
    } else if (++j->turn == j->p->n_turns || interrupted) {
        j->done = true;
    } else {
        if (j->run->chat)
            so_dialog_add(&j->dialog, "assistant", so_buf_str(&j->answer), NULL);
        else
            raw_answer(j);
        start_turn(j);
    }
}

/* --- output --- */

static void name_job(const job *j, json_t *o) {
    if (j->p->id)
        json_object_set(o, "id", (json_t *)(uintptr_t)j->p->id);
    if (j->p->category)
        json_object_set(o, "category", (json_t *)(uintptr_t)j->p->category);
}

static void print_result(const job *j) {
    json_t *o = json_object();
    json_t *result = j->err.code
                         ? json_pack("{s:o}", "error", so_describe_json_text(so_str_c(j->err.msg)))
                         : so_report_json(&j->total);
    name_job(j, o);
    json_object_update(o, result);
    json_decref(result);
    if (j->turns)
        json_object_set(o, "turns", j->turns);
    so_report_print_json(o);
}

static void print_text(const job *j) {
    const char *id = json_string_value(j->p->id);
    if (j->run->stream)
        return; /* printed while it was generated */
    if (so_args_has(j->run->a, SO_OPT_PROMPTS)) {
        fputs("### ", stdout);
        if (id)
            so_view_print(so_str_c(id));
        else
            printf("line %d", j->p->line);
        putchar('\n');
    }
    if (j->run->base.beams.n_best > 1) {
        so_report_print_best(&j->total);
    } else {
        so_view_print(so_buf_str(&j->total.text));
        putchar('\n');
    }
    fflush(stdout);
}

static bool wants_timings(const runner *r) {
    return (so_terminal_is(STDERR_FILENO) && !r->bar.on) || so_args_has(r->a, SO_OPT_VERBOSE);
}

/* Reports that an answer was cut. Without -n only a full context cuts answers. */
static void note_full_context(const job *j) {
    const runner *r = j->run;
    int n_ctx = so_engine_n_ctx(r->e), most = so_model_hparams(r->b.model)->n_ctx_train;
    if (j->total.finish != SO_FINISH_LENGTH || r->base.max_tokens >= 0)
        return;
    fprintf(stderr, "the answer was cut: the context of %d tokens is full (-n N limits answers",
            n_ctx);
    if (n_ctx < most)
        fprintf(stderr, ", -c N sets a context of up to %d", most);
    fputs(")\n", stderr);
}

/* With --json, a failed prompt of a file prints a line with the error, so that output lines match
 * prompts; a single failed prompt leaves stdout empty. */
static void print_job(job *j) {
    runner *r = j->run;
    bool many = so_args_has(r->a, SO_OPT_PROMPTS), failed = j->err.code != SO_OK;
    if (r->json && (many || !failed))
        print_result(j);
    else if (!r->json && !failed)
        print_text(j);
    if (failed && many)
        fprintf(stderr, "sooth run: line %d: %s\n", j->p->line, j->err.msg);
    else if (failed)
        so_args_fail(r->a, &j->err);
    else if (wants_timings(r)) {
        note_full_context(j);
        so_report_print_timings(&j->total);
    }
    if (!failed)
        so_report_add_stats(&r->total, &j->total);
}

static void free_job(job *j) {
    so_request_free(j->req);
    so_dialog_free(&j->dialog);
    json_decref(j->turns);
    so_buf_free(&j->raw);
    so_buf_free(&j->answer);
    so_report_free(&j->total);
}

/* --- the loop --- */

static int start_jobs(runner *r, int most) {
    int running = 0;
    for (int i = r->n_printed; i < r->n_started; i++)
        running += !r->jobs[i].done;
    for (; running < most && r->n_started < r->n_jobs && !interrupted; r->n_started++) {
        start_turn(&r->jobs[r->n_started]);
        running += !r->jobs[r->n_started].done;
    }
    return running;
}

static void run_jobs(runner *r, int n_parallel) {
    so_err err = {0};
    int64_t t = so_clock_ns();
    if (!r->stream && !so_terminal_is(STDOUT_FILENO) && r->n_jobs > 1)
        so_progress_begin(&r->bar, "prompts");
    while (start_jobs(r, n_parallel) > 0) {
        so_engine_step(r->e, &err); /* a failed pass ends its requests with the error */
        for (int i = r->n_printed; i < r->n_started; i++) {
            job *j = &r->jobs[i];
            if (j->req && interrupted)
                so_request_cancel(j->req);
            if (j->req && so_request_finish(j->req) != SO_FINISH_NONE)
                end_turn(j);
        }
        while (r->n_printed < r->n_started && r->jobs[r->n_printed].done)
            print_job(&r->jobs[r->n_printed++]);
        so_progress_set(&r->bar, (double)r->n_printed / r->n_jobs);
    }
    so_progress_end(&r->bar);
    while (r->n_printed < r->n_started) /* jobs that failed before they ran */
        print_job(&r->jobs[r->n_printed++]);
    if (r->n_jobs > 1 && wants_timings(r))
        so_report_print_total(&r->total, r->n_printed - r->n_failed, so_clock_ms_since(t));
}

static void decide_format(runner *r) {
    r->chat = !so_args_has(r->a, SO_OPT_RAW) && r->b.chat;
    if (!r->chat && !so_args_has(r->a, SO_OPT_RAW))
        so_log(SO_LOG_INFO, "the model has no chat template: the prompt is continued as it is");
    if (!r->chat && r->system)
        so_log(SO_LOG_WARN, "--system is ignored: the prompt is continued without a chat template");
}

static void open_painter(runner *r) {
    so_painter_init(&r->painter, r->b.tok, r->a);
    if (r->stream || !r->painter.on)
        return;
    so_log(SO_LOG_WARN,
           "--view is ignored: it shows one streamed answer and cannot be used with %s",
           r->json ? "--json" : "--prompts");
    r->painter.on = false;
}

static int open_trace(runner *r, so_engine_opts *eo) {
    const char *path = so_args_str(r->a, SO_OPT_TRACE, NULL);
    so_err err = {0};
    if (!path)
        return 0;
    r->trace = fopen(path, "w");
    if (!r->trace) {
        so_err_set(&err, SO_EIO, "--trace %.200s: %s", path, strerror(errno));
        return so_args_fail(r->a, &err);
    }
    eo->on_step = so_trace_write;
    eo->step_user = r->trace;
    return 0;
}

/* An incomplete trace is an error; closing the file detects a full disk. */
static int close_trace(const runner *r, int status) {
    so_err err = {0};
    bool lost = r->trace && ferror(r->trace);
    if (r->trace && fclose(r->trace) != 0)
        lost = true;
    if (!lost || status != 0)
        return status;
    so_err_set(&err, SO_EIO, "--trace %.200s: could not be written completely",
               so_args_str(r->a, SO_OPT_TRACE, ""));
    return so_args_fail(r->a, &err);
}

static int run_all(runner *r, const so_prompts *prompts, int n_parallel) {
    r->jobs = SO_NEW_N(job, r->n_jobs);
    for (int i = 0; i < r->n_jobs; i++) {
        r->jobs[i].run = r;
        r->jobs[i].p = &prompts->items[i];
    }
    signal(SIGINT, on_interrupt);
    signal(SIGTERM, on_interrupt);
    if (r->stream)
        so_painter_guard(&r->painter);
    run_jobs(r, n_parallel);
    so_painter_unguard();
    return interrupted ? 130 : r->n_failed ? 1 : 0;
}

static int run_prompts(const so_args *a, const so_prompts *prompts) {
    runner r = {.a = a,
                .system = so_args_str(a, SO_OPT_SYSTEM, NULL),
                .json = so_args_has(a, SO_OPT_JSON),
                .n_jobs = prompts->n};
    so_engine_opts eo;
    so_err err = {0};
    int status = check_logprobs(a);
    if (status == 0)
        status = so_cli_spec_read(a, &r.spec);
    if (status == 0)
        status = so_cli_spec_check_text(a, &r.spec);
    if (status == 0)
        status = so_cli_open(a, &r.b);
    if (status != 0)
        return status;
    decide_format(&r);
    status = so_cli_request_read(a, &r.b, &r.base);
    r.stream = !r.json && !so_args_has(a, SO_OPT_PROMPTS) && r.base.beams.n_best <= 1;
    open_painter(&r);
    if (status == 0)
        status = so_cli_engine_opts(a, &r.b, &eo);
    if (status == 0)
        status = so_cli_spec_open(a, &r.b, &r.spec, &eo);
    r.base.spec = r.spec.opts;
    if (status == 0)
        status = open_trace(&r, &eo);
    if (status == 0 && so_engine_create(r.b.model, r.b.tok, &eo, &r.e, &err) != SO_OK)
        status = so_args_fail(a, &err);
    if (status == 0)
        status = run_all(&r, prompts, eo.n_parallel);
    for (int i = 0; r.jobs && i < r.n_jobs; i++)
        free_job(&r.jobs[i]);
    free(r.jobs);
    so_cli_request_free(&r.base);
    so_engine_free(r.e);
    status = close_trace(&r, status);
    so_painter_free(&r.painter);
    so_cli_spec_close(&r.spec);
    so_bundle_close(&r.b);
    return status;
}

static int read_prompt(const so_args *a, so_buf *text, so_prompts *out) {
    so_err err = {0};
    int n_sources = so_args_has(a, SO_OPT_PROMPT) + so_args_has(a, SO_OPT_FILE) +
                    so_args_has(a, SO_OPT_PROMPTS);
    if (n_sources > 1)
        return so_args_bad(a, "give one of PROMPT (or --prompt), --file and --prompts");
    if (so_args_has(a, SO_OPT_PROMPTS)) {
        int rc = so_prompts_read(so_args_str(a, SO_OPT_PROMPTS, ""), out, &err);
        return rc == SO_OK ? 0 : so_args_fail(a, &err);
    }
    if (n_sources == 0 && so_terminal_is(STDIN_FILENO))
        return so_args_bad(a, "no prompt: give PROMPT, -f FILE or standard input");
    if (so_args_has(a, SO_OPT_PROMPT)) {
        so_buf_append_c(text, so_args_str(a, SO_OPT_PROMPT, ""));
    } else {
        const char *path = so_args_str(a, SO_OPT_FILE, "-");
        if (so_file_read(path, MAX_PROMPT_BYTES, text, &err) != SO_OK)
            return so_args_fail(a, &err);
    }
    if (text->len == 0)
        return so_args_bad(a, "the prompt is empty");
    so_prompts_single(so_buf_str(text), NULL, out);
    return 0;
}

int so_cmd_run(int argc, char **argv) {
    so_args a;
    so_buf text = {.max = MAX_PROMPT_BYTES};
    so_prompts prompts = {0};
    if (!so_args_parse(&a, SO_CMD_RUN, argc, argv))
        return a.status;
    int status = so_cli_prompt_argument(&a);
    if (status == 0 && !so_args_has(&a, SO_OPT_MODEL))
        status = so_args_bad(&a, "-m MODEL is missing; `sooth pull` lists models to try");
    if (status == 0)
        status = read_prompt(&a, &text, &prompts);
    if (status == 0)
        status = run_prompts(&a, &prompts);
    so_prompts_free(&prompts);
    so_buf_free(&text);
    so_args_free(&a);
    return status;
}
