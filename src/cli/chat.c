/* `sooth chat`: a conversation in the model's chat template.
 *
 * The loop reads a turn, executes it if it is a command, and otherwise appends it to the
 * conversation and generates the answer. On a terminal there is a prompt, line editing and a
 * history. From a pipe each line is a turn, and with --json each answer is one JSON object, so that
 * a script can hold a conversation.
 *
 * Answers go to stdout; messages of commands, figures and errors go to stderr.
 *
 * Ctrl-C stops the running answer; the text so far stays in the conversation. At the prompt it
 * discards the line. It ends the program only if turns come from a pipe.
 *
 * When the conversation no longer fits the context, the oldest exchanges are hidden from the model
 * until half of the context is free: the prefix that remains is then stable for many turns, and the
 * prefix cache can reuse it. A message reports this each time. Saved conversations are complete.
 *
 * Main thread only. Signal handlers set flags. */
#include "cli/chat.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/env.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "cli/terminal.h"
#include "format/describe.h"

enum { ANSWER_TOKENS = 256 }; /* kept free for an answer if --predict sets no limit */

static volatile sig_atomic_t interrupted, ended;

static void on_interrupt(int sig) {
    (void)sig;
    interrupted = 1;
}

static void on_end(int sig) {
    ended = sig;
    interrupted = 1;
}

static void watch_signals(void) {
    struct sigaction sa = {.sa_handler = on_interrupt}; /* no SA_RESTART: read() must return */
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
    sa.sa_handler = on_end;
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGHUP, &sa, NULL);
}

/* --- messages --- */

void so_chat_print(const so_session *s, const char *fmt, ...) {
    bool dim = so_args_color(s->a, STDERR_FILENO);
    va_list ap;
    va_start(ap, fmt);
    fputs(dim ? "\033[2m" : "", stderr);
    vfprintf(stderr, fmt, ap);
    fputs(dim ? "\033[0m\n" : "\n", stderr);
    va_end(ap);
}

static void fail_answer(so_session *s, const so_err *err) {
    s->n_failed++;
    if (s->json)
        so_report_print_json(
            json_pack("{s:o}", "error", so_describe_json_text(so_str_c(err->msg))));
    fprintf(stderr, "sooth chat: %s\n", err->msg);
}

/* One dim line with the time of the answer and the tokens per pass. The rate excludes the first
 * pass and its tokens, because its time counts as prefill. */
static void print_figures(const so_session *s, const so_report *r) {
    const so_request_stats *t = &r->stats;
    char rate[64] = "", gained[64] = "";
    int later = t->predicted_n - s->n_first;
    if (s->json || (!so_terminal_is(STDERR_FILENO) && !so_args_has(s->a, SO_OPT_VERBOSE)))
        return;
    if (later > 0 && t->predicted_ms > 0)
        snprintf(rate, sizeof rate, ", then %.1f/s", 1000.0 * later / t->predicted_ms);
    if (strcmp(r->label.drafter, "none") != 0 && t->rounds > 0)
        snprintf(gained, sizeof gained, "; %.2f tokens per pass",
                 so_stats_rates(t).tokens_per_pass);
    so_chat_print(s, "  %d token%s, first after %.2f s%s%s", t->predicted_n,
                  t->predicted_n == 1 ? "" : "s", t->prompt_ms / 1000, rate, gained);
}

/* --- answering --- */

static bool on_event(void *user, const so_event *ev) {
    so_session *s = user;
    so_buf_append_str(&s->answer, ev->text);
    if (!s->json)
        so_painter_event(&s->painter, ev);
    return !interrupted;
}

static void on_round(void *user, const so_round *round) {
    so_session *s = user;
    if (!s->json)
        so_painter_round(&s->painter, round);
}

/* The tokens of the conversation; hides the oldest exchanges if it does not fit the context. */
static int encode(so_session *s, so_tokens *out, so_err *err) {
    int n_ctx = so_engine_n_ctx(s->e), hidden = 0;
    int want = s->base.max_tokens >= 0 ? s->base.max_tokens : ANSWER_TOKENS;
    int room = n_ctx - SO_MIN(want, n_ctx / 4);
    int rc = so_dialog_encode(&s->dialog, s->b.chat, out, err);
    if (rc == SO_OK && (int64_t)out->len > room)
        while (rc == SO_OK && (int64_t)out->len > n_ctx / 2 && so_dialog_hide_oldest(&s->dialog)) {
            hidden++;
            out->len = 0;
            rc = so_dialog_encode(&s->dialog, s->b.chat, out, err);
        }
    if (rc == SO_OK && hidden > 0)
        so_chat_print(
            s,
            "the conversation no longer fits the context of %d tokens: the oldest %d exchange%s "
            "hidden from the model now (/reset starts a new one; -c N sets a longer context)",
            n_ctx, hidden, hidden == 1 ? " is" : "s are");
    if (rc == SO_OK && (int64_t)out->len >= n_ctx)
        rc = so_err_set(err, SO_ELIMIT,
                        "this turn alone has %zu tokens and the context %d: shorten it, or start "
                        "with -c N (this model: up to %d)",
                        out->len, n_ctx, so_model_hparams(s->b.model)->n_ctx_train);
    return rc;
}

static int submit(so_session *s, so_request **out, so_err *err) {
    so_tokens tokens = {0};
    int rc = encode(s, &tokens, err);
    if (rc == SO_OK) {
        so_request_opts o = s->base;
        o.spec = s->spec.opts;
        o.prompt = tokens.ids;
        o.n_prompt = (int)tokens.len;
        if (o.max_tokens >= 0)
            o.max_tokens = SO_MIN(o.max_tokens, so_engine_n_ctx(s->e) - o.n_prompt);
        o.on_event = on_event;
        o.on_round = s->painter.on ? on_round : NULL;
        o.user = s;
        rc = so_engine_submit(s->e, &o, out, err);
    }
    so_tokens_free(&tokens);
    return rc;
}

/* Reports why an answer ended early. */
static void print_end(const so_session *s, so_finish why, int n_context) {
    int n_ctx = so_engine_n_ctx(s->e);
    if (why == SO_FINISH_CANCELLED && s->answer.len == 0)
        so_chat_print(s, "stopped before the first token");
    else if (why == SO_FINISH_CANCELLED && s->interactive)
        so_chat_print(s, "stopped; /retry answers again, /undo removes the turn");
    else if (why == SO_FINISH_LENGTH && n_context >= n_ctx - 1)
        so_chat_print(s, "the answer was cut: the context of %d tokens is full", n_ctx);
    else if (why == SO_FINISH_LENGTH && s->interactive)
        so_chat_print(s, "the answer was cut: --predict is reached");
}

/* Appends the answer to the conversation and adds its counts to the totals. Returns false if the
 * answer was stopped before its first token; then it is not appended. */
static bool record_answer(so_session *s, const so_request *req) {
    so_report one = {0};
    int n;
    so_report_add(&one, req, s->b.tok, so_buf_str(&s->answer));
    so_report_add_stats(&s->total, &one);
    s->total.seed = one.seed;
    s->total.nonce = one.nonce;
    s->total.has_nonce = one.has_nonce;
    s->base.has_nonce = false; /* --nonce applies to the first answer only */
    s->n_answers++;
    s->seed_set = false;
    so_request_output(req, &n);
    bool kept = s->answer.len > 0 || one.finish != SO_FINISH_CANCELLED;
    if (kept)
        so_dialog_add(&s->dialog, "assistant", so_buf_str(&s->answer), NULL);
    print_end(s, one.finish, one.stats.prompt_n + n);
    print_figures(s, &one);
    if (s->json)
        so_report_print_json(so_report_json(&one));
    so_report_free(&one);
    return kept;
}

bool so_chat_answer(so_session *s) {
    so_request *req = NULL;
    so_err err = {0};
    so_buf_clear(&s->answer);
    s->n_first = 0;
    so_lines_set_echo(s->lines, false);
    int rc = submit(s, &req, &err);
    while (rc == SO_OK && so_request_finish(req) == SO_FINISH_NONE) {
        so_engine_step(s->e, &err); /* a failed pass ends the request with the error */
        if (s->n_first == 0)
            so_request_output(req, &s->n_first);
        if (interrupted)
            so_request_cancel(req);
    }
    if (!s->json &&
        (s->answer.len > 0 || (rc == SO_OK && so_request_finish(req) != SO_FINISH_ERROR)))
        so_painter_end(&s->painter);
    if (rc == SO_OK)
        rc = so_request_check(req, &err);
    bool kept = rc == SO_OK && record_answer(s, req);
    if (rc != SO_OK)
        fail_answer(s, &err);
    so_request_free(req);
    so_lines_set_echo(s->lines, true);
    return kept;
}

/* --- the loop --- */

static void take_turn(so_session *s, so_str turn) {
    so_err err = {0};
    if (turn.len == 0 || so_chat_command(s, turn))
        return;
    if (so_dialog_ends_with(&s->dialog, "user")) { /* only a loaded conversation can end so */
        so_dialog_pop(&s->dialog);
        so_chat_print(s, "the unanswered turn before this one is removed");
    }
    if (so_str_starts(turn, SO_STR("//"))) /* an escaped slash */
        turn.ptr++, turn.len--;
    if (so_dialog_add(&s->dialog, "user", turn, &err) != SO_OK)
        fail_answer(s, &err);
    else if (!so_chat_answer(s))
        so_dialog_pop(&s->dialog);
}

static void run_loop(so_session *s) {
    so_buf turn = {0};
    for (so_line_end end = SO_LINE_OK; end != SO_LINE_END && !s->quit && !ended;) {
        interrupted = 0;
        end = so_lines_read(s->lines, &turn);
        if (end == SO_LINE_OK)
            take_turn(s, so_buf_str(&turn));
        else if (end == SO_LINE_TOO_LONG)
            fprintf(stderr, "sooth chat: a turn of more than %d MB is ignored\n",
                    SO_LINES_MAX_TURN >> 20);
        else if (end == SO_LINE_INTERRUPTED && s->interactive)
            so_chat_print(s, "Ctrl-D or /quit ends the program");
        if (interrupted && !s->interactive)
            break;
    }
    so_buf_free(&turn);
}

/* --- opening --- */

/* Path of the history file; NULL: no history. */
static char *history_path(const so_args *a) {
    so_err err = {0};
    char *dir = so_args_has(a, SO_OPT_NO_HISTORY) ? NULL : so_env_state_dir(), *path = NULL;
    if (!dir)
        return NULL;
    mode_t old = umask(077);
    if (so_dir_create(dir, &err) == SO_OK)
        path = so_path_join(dir, "chat_history");
    else
        so_log(SO_LOG_WARN, "the history cannot be saved: %s", err.msg);
    umask(old);
    free(dir);
    return path;
}

/* The stream for prompt and line editor: the stream of the answers, unless that is not a terminal
 * or JSON is written to it; then stderr. NULL: no terminal is usable. */
static FILE *terminal_of(const so_session *s) {
    if (!so_terminal_is(STDIN_FILENO))
        return NULL;
    if (!s->json && so_terminal_is(STDOUT_FILENO))
        return stdout;
    return so_terminal_is(STDERR_FILENO) ? stderr : NULL;
}

static void open_lines(so_session *s) {
    so_lines_opts o = {
        .terminal = terminal_of(s), .word_at = so_chat_command_at, .interrupted = &interrupted};
    s->interactive = o.terminal != NULL;
    if (s->interactive) {
        o.color = so_args_color(s->a, fileno(o.terminal));
        o.history = history_path(s->a);
        so_chat_print(s, "/help lists the commands; Ctrl-C stops an answer; Ctrl-D quits");
    }
    s->lines = so_lines_open(&o);
}

static int open_session(so_session *s) {
    const so_args *a = s->a;
    so_engine_opts eo;
    so_err err = {0};
    int status = so_cli_spec_read(a, &s->spec);
    if (status == 0)
        status = so_cli_spec_check_text(a, &s->spec);
    if (status == 0)
        status = so_cli_open(a, &s->b);
    if (status == 0 && !s->b.chat) {
        so_err_set(&err, SO_EUNSUPPORTED,
                   "%.200s has no chat template, so it cannot hold a conversation; `sooth run` "
                   "continues a text as it is",
                   so_args_str(a, SO_OPT_MODEL, ""));
        status = so_args_fail(a, &err);
    }
    if (status == 0)
        status = so_cli_request_read(a, &s->b, &s->base);
    if (status == 0)
        status = so_cli_engine_opts(a, &s->b, &eo);
    if (status == 0)
        status = so_cli_spec_open(a, &s->b, &s->spec, &eo);
    if (status != 0)
        return status;
    if (eo.max_draft == 0) /* /spec may turn speculation on later */
        eo.max_draft = SO_CLI_DRAFT_MAX;
    eo.keep_costs = SO_KEEP_LARGE_MODELS;
    int rc = so_dialog_set_system(&s->dialog, so_str_c(so_args_str(a, SO_OPT_SYSTEM, "")), &err);
    if (rc == SO_OK)
        rc = so_engine_create(s->b.model, s->b.tok, &eo, &s->e, &err);
    return rc == SO_OK ? 0 : so_args_fail(a, &err);
}

static void close_session(so_session *s) {
    so_lines_close(s->lines);
    so_engine_free(s->e);
    so_painter_free(&s->painter);
    so_dialog_free(&s->dialog);
    so_cli_request_free(&s->base);
    so_cli_spec_close(&s->spec);
    so_bundle_close(&s->b);
    so_buf_free(&s->answer);
    so_report_free(&s->total);
    free(s->spec_text);
    free(s->file);
}

/* Threads started while opening the session block SIGCONT and SIGWINCH: a signal delivered to one
 * of them would not interrupt the main thread's read(). */
static int open_with_signals_blocked(so_session *s) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCONT);
    sigaddset(&set, SIGWINCH);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    int status = open_session(s);
    pthread_sigmask(SIG_UNBLOCK, &set, NULL);
    return status;
}

int so_cmd_chat(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_CHAT, argc, argv))
        return a.status;
    so_session s = {.a = &a, .json = so_args_has(&a, SO_OPT_JSON)};
    int status = open_with_signals_blocked(&s);
    if (status == 0) {
        so_painter_init(&s.painter, s.b.tok, &a);
        watch_signals();
        open_lines(&s);
        so_painter_guard(&s.painter);
        run_loop(&s);
        so_painter_unguard();
        if (ended)
            status = 128 + ended;
        else if (!s.interactive)
            status = interrupted ? 130 : s.n_failed > 0;
    }
    close_session(&s);
    so_args_free(&a);
    return status;
}
