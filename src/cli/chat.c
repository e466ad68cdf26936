/* `sooth chat`: a conversation in the model's own chat format.
 *
 * The loop: read a turn, carry it out if it is a command, else put it behind the conversation and
 * answer. Typed at a terminal there is a prompt, editing and history; from a pipe each line is a
 * turn, and with --json each answer an object, so a script can hold a conversation.
 *
 * Answers go to stdout. All else (what commands say, figures, errors) goes to stderr.
 *
 * Ctrl-C stops the answer that is being made; what was said so far stays in the conversation. At
 * the prompt it forgets the line. It ends the program only where nobody sits at a terminal.
 *
 * A conversation longer than the context loses its oldest exchanges from the model's sight, down to
 * half of the context at once, so that what remains is a stable beginning again for many turns (the
 * cache lives on that). This is said each time, and a saved conversation is whole. */
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
#include "format/describe.h"

enum { ROOM = 256 }; /* tokens kept free for an answer whose length is not limited */

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
    struct sigaction sa = {.sa_handler = on_interrupt}; /* no SA_RESTART: reading must end */
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
    sa.sa_handler = on_end;
    sigaction(SIGTERM, &sa, NULL);
    sigaction(SIGHUP, &sa, NULL);
}

/* --- saying --- */

void so_chat_say(const so_session *s, const char *fmt, ...) {
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

/* One dim line: what it took, and what guessing gained. The rate leaves out the first pass with its
 * tokens, whose time is the prompt's. */
static void say_figures(const so_session *s, const so_report *r) {
    const so_request_stats *t = &r->stats;
    char rate[64] = "", gained[64] = "";
    int later = t->predicted_n - s->n_first;
    if (s->json || (isatty(STDERR_FILENO) != 1 && !so_args_has(s->a, SO_OPT_VERBOSE)))
        return;
    if (later > 0 && t->predicted_ms > 0)
        snprintf(rate, sizeof rate, ", then %.1f/s", 1000.0 * later / t->predicted_ms);
    if (strcmp(r->who.drafter, "none") != 0 && t->rounds > 0)
        snprintf(gained, sizeof gained, "; %.2f tokens per pass",
                 so_stats_rates(t).tokens_per_pass);
    so_chat_say(s, "  %d token%s, first after %.2f s%s%s", t->predicted_n,
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

/* The conversation's tokens, with the oldest exchanges hidden as far as needed. */
static int encode(so_session *s, so_tokens *out, so_err *err) {
    int n_ctx = so_engine_n_ctx(s->e), hidden = 0;
    int want = s->base.max_tokens >= 0 ? s->base.max_tokens : ROOM;
    int room = n_ctx - SO_MIN(want, n_ctx / 4);
    int rc = so_dialog_encode(&s->dialog, s->b.chat, out, err);
    if (rc == SO_OK && (int64_t)out->len > room)
        while (rc == SO_OK && (int64_t)out->len > n_ctx / 2 && so_dialog_hide_oldest(&s->dialog)) {
            hidden++;
            out->len = 0;
            rc = so_dialog_encode(&s->dialog, s->b.chat, out, err);
        }
    if (rc == SO_OK && hidden > 0)
        so_chat_say(
            s,
            "the conversation no longer fits the %d tokens of context: the model does not "
            "see the oldest %d exchange%s any more (/reset begins anew; -c gives more room)",
            n_ctx, hidden, hidden == 1 ? "" : "s");
    if (rc == SO_OK && (int64_t)out->len >= n_ctx)
        rc = so_err_set(err, SO_ELIMIT,
                        "this turn alone takes %zu tokens and the context holds %d: shorten it, or "
                        "start with -c N (this model: up to %d)",
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

/* How it ended, where that is not plain. */
static void say_end(const so_session *s, so_finish why, int n_context) {
    int n_ctx = so_engine_n_ctx(s->e);
    if (why == SO_FINISH_CANCELLED && s->answer.len == 0)
        so_chat_say(s, "stopped before the first word");
    else if (why == SO_FINISH_CANCELLED && s->person)
        so_chat_say(s, "stopped; /retry answers again, /undo takes the turn back");
    else if (why == SO_FINISH_LENGTH && n_context >= n_ctx - 1)
        so_chat_say(s, "cut: the context of %d tokens is full", n_ctx);
    else if (why == SO_FINISH_LENGTH && s->person)
        so_chat_say(s, "cut: --predict allows no more");
}

/* Puts the answer behind the conversation, if there is one, and counts it. */
static bool book(so_session *s, const so_request *req) {
    so_report one = {0};
    int n;
    so_report_add(&one, req, s->b.tok, so_buf_str(&s->answer));
    so_report_add_stats(&s->total, &one);
    s->total.seed = one.seed;
    s->total.nonce = one.nonce;
    s->total.has_nonce = one.has_nonce;
    s->base.has_nonce = false; /* it was for one answer */
    s->n_answers++;
    s->chose_seed = false;
    so_request_output(req, &n);
    bool said = s->answer.len > 0 || one.finish != SO_FINISH_CANCELLED;
    if (said)
        so_dialog_add(&s->dialog, "assistant", so_buf_str(&s->answer), NULL);
    say_end(s, one.finish, one.stats.prompt_n + n);
    say_figures(s, &one);
    if (s->json)
        so_report_print_json(so_report_json(&one));
    so_report_free(&one);
    return said;
}

bool so_chat_answer(so_session *s) {
    so_request *req = NULL;
    so_err err = {0};
    so_buf_clear(&s->answer);
    s->n_first = 0;
    so_lines_hush(s->lines, true);
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
    bool said = rc == SO_OK && book(s, req);
    if (rc != SO_OK)
        fail_answer(s, &err);
    so_request_free(req);
    so_lines_hush(s->lines, false);
    return said;
}

/* --- the loop --- */

static void take_turn(so_session *s, so_str turn) {
    so_err err = {0};
    if (turn.len == 0 || so_chat_command(s, turn))
        return;
    if (so_dialog_ends_with(&s->dialog, "user")) { /* of a loaded conversation */
        so_dialog_pop(&s->dialog);
        so_chat_say(s, "the unanswered turn before this one is dropped");
    }
    if (so_str_starts(turn, SO_STR("//"))) /* a slash that is meant */
        turn.ptr++, turn.len--;
    if (so_dialog_add(&s->dialog, "user", turn, &err) != SO_OK)
        fail_answer(s, &err);
    else if (!so_chat_answer(s))
        so_dialog_pop(&s->dialog);
}

static void talk(so_session *s) {
    so_buf turn = {0};
    for (so_line_end end = SO_LINE_OK; end != SO_LINE_END && !s->leave && !ended;) {
        interrupted = 0;
        end = so_lines_read(s->lines, &turn);
        if (end == SO_LINE_OK)
            take_turn(s, so_buf_str(&turn));
        else if (end == SO_LINE_TOO_LONG)
            fprintf(stderr, "sooth chat: a turn of more than %d MB is left out\n",
                    SO_LINES_MAX_TURN >> 20);
        else if (end == SO_LINE_INTERRUPTED && s->person)
            so_chat_say(s, "Ctrl-D or /quit leaves");
        if (interrupted && !s->person)
            break;
    }
    so_buf_free(&turn);
}

/* --- opening --- */

/* Where the history is kept; NULL: nowhere. */
static char *history_path(const so_args *a) {
    so_err err = {0};
    char *dir = so_args_has(a, SO_OPT_NO_HISTORY) ? NULL : so_env_state_dir(), *path = NULL;
    if (!dir)
        return NULL;
    mode_t old = umask(077);
    if (so_dir_create(dir, &err) == SO_OK)
        path = so_path_join(dir, "chat_history");
    else
        so_log(SO_LOG_WARN, "no history is kept: %s", err.msg);
    umask(old);
    free(dir);
    return path;
}

/* Drawn where the answers go, unless those are JSON or piped on. */
static FILE *terminal_of(const so_session *s) {
    if (isatty(STDIN_FILENO) != 1)
        return NULL;
    if (!s->json && isatty(STDOUT_FILENO) == 1)
        return stdout;
    return isatty(STDERR_FILENO) == 1 ? stderr : NULL;
}

static void open_lines(so_session *s) {
    so_lines_opts o = {
        .terminal = terminal_of(s), .word_at = so_chat_command_at, .interrupted = &interrupted};
    s->person = o.terminal != NULL;
    if (s->person) {
        o.color = so_args_color(s->a, fileno(o.terminal));
        o.history = history_path(s->a);
        so_chat_say(s, "/help lists the commands; Ctrl-C stops an answer; Ctrl-D leaves");
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
                   "%.200s has no chat template, so nobody knows how it would be talked with; "
                   "`sooth run` continues a text as it is",
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
    if (eo.max_draft == 0) /* /spec may ask for guesses later */
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

/* Threads made meanwhile keep out of the terminal's affairs: a signal that one of them took would
 * not end the main thread's read. */
static int open_apart(so_session *s) {
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
    int status = open_apart(&s);
    if (status == 0) {
        so_painter_init(&s.painter, s.b.tok, &a);
        watch_signals();
        open_lines(&s);
        so_painter_guard(&s.painter);
        talk(&s);
        so_painter_unguard();
        if (ended)
            status = 128 + ended;
        else if (!s.person)
            status = interrupted ? 130 : s.n_failed > 0;
    }
    close_session(&s);
    so_args_free(&a);
    return status;
}
