/* The /commands of `sooth chat`: one row each in a table. A name may be shortened to any prefix
 * that is unique. A line is a command if only letters follow the slash up to a space or the end of
 * the line, so "/usr/bin …" is an ordinary turn; "//help" sends "/help" to the model. Main thread
 * only. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/chat.h"

typedef struct command {
    const char *name, *arg, *help; /* arg NULL: no argument; in brackets: optional */
    void (*run)(so_session *s, const char *arg);
} command;

static const char *or_none(const char *text) { return text && *text ? text : "none"; }

/* --- the conversation --- */

static void do_system(so_session *s, const char *arg) {
    so_err err = {0};
    bool off = strcmp(arg, "-") == 0;
    if (*arg && so_dialog_set_system(&s->dialog, so_str_c(off ? "" : arg), &err) != SO_OK)
        so_chat_print(s, "%s", err.msg);
    else
        so_chat_print(s, "system message: %s", or_none(so_dialog_system(&s->dialog).ptr));
}

static void do_reset(so_session *s, const char *arg) {
    (void)arg;
    so_dialog_clear(&s->dialog);
    so_chat_print(s, "new conversation");
}

/* The beginning of a turn on one line, for messages. */
static void quote(so_str text, char out[64]) {
    size_t n = 0, len;
    for (size_t i = 0; i < text.len && n < 48; i += len) {
        len = 1;
        while (i + len < text.len && ((unsigned char)text.ptr[i + len] & 0xC0) == 0x80)
            len++;
        bool control = (unsigned char)text.ptr[i] < 0x20 || text.ptr[i] == 0x7F;
        memcpy(out + n, control ? " " : text.ptr + i, control ? 1 : len);
        n += control ? 1 : len;
    }
    snprintf(out + n, 64 - n, "%s", n < text.len ? "…" : "");
}

static void do_undo(so_session *s, const char *arg) {
    char turn[64];
    (void)arg;
    if (so_dialog_ends_with(&s->dialog, "assistant"))
        so_dialog_pop(&s->dialog);
    if (!so_dialog_ends_with(&s->dialog, "user")) {
        so_chat_print(s, "there is no turn to remove");
        return;
    }
    quote(so_dialog_last(&s->dialog), turn);
    so_dialog_pop(&s->dialog);
    so_chat_print(s, "removed: %s", turn);
}

/* Keeps the old answer if no new one was generated. */
static void do_retry(so_session *s, const char *arg) {
    so_buf old = {0};
    bool answered = so_dialog_ends_with(&s->dialog, "assistant");
    (void)arg;
    if (answered) {
        so_buf_append_str(&old, so_dialog_last(&s->dialog));
        so_dialog_pop(&s->dialog);
    }
    if (!so_dialog_ends_with(&s->dialog, "user")) {
        so_chat_print(s, "there is nothing to answer yet");
        so_buf_free(&old);
        return;
    }
    if (s->base.sample.temp <= 0)
        so_chat_print(
            s, "at temperature 0 the answer is always the same; set /temp 0.8 for another one");
    else if (!s->seed_set && s->n_answers > 0)
        s->base.sample.seed = so_cli_new_seed();
    if (!so_chat_answer(s) && answered)
        so_dialog_add(&s->dialog, "assistant", so_buf_str(&old), NULL);
    so_buf_free(&old);
}

/* --- settings --- */

static void do_temp(so_session *s, const char *arg) {
    char *end;
    double x = strtod(arg, &end);
    if (*arg && (end == arg || *end || !(x >= 0 && x <= 100)))
        so_chat_print(s, "/temp '%.40s': must be a number from 0 to 100", arg);
    else if (*arg)
        s->base.sample.temp = (float)x;
    so_chat_print(s, "temperature: %g", (double)s->base.sample.temp);
}

static void do_seed(so_session *s, const char *arg) {
    char *end;
    errno = 0;
    long long n = strtoll(arg, &end, 10);
    if (*arg && (end == arg || *end || errno || n < 0)) {
        so_chat_print(s, "/seed '%.40s': must be a whole number, 0 or more", arg);
        return;
    }
    if (*arg) {
        s->base.sample.seed = (uint64_t)n;
        s->seed_set = true;
    }
    so_chat_print(s, "seed: %llu", (unsigned long long)s->base.sample.seed);
}

static void do_spec(so_session *s, const char *arg) {
    so_err err = {0};
    char *text = so_strdup(arg);
    if (*arg && so_cli_spec_change(&s->spec, text, &err) != SO_OK) {
        so_chat_print(s, "%s", err.msg);
        free(text);
        return;
    }
    if (*arg) {
        free(s->spec_text);
        s->spec_text = text;
    } else {
        free(text);
    }
    so_chat_print(s, "drafter: %s", or_none(s->spec.opts.drafter));
}

static void do_view(so_session *s, const char *arg) {
    bool rounds = strcmp(arg, "rounds") == 0;
    if (*arg && !rounds && strcmp(arg, "on") != 0 && strcmp(arg, "off") != 0) {
        so_chat_print(s, "/view '%.40s': must be on, off or rounds", arg);
        return;
    }
    s->painter.on = *arg ? strcmp(arg, "off") != 0 : !s->painter.on;
    s->painter.rounds = s->painter.on && rounds;
    so_chat_print(s, "view: %s%s",
                  s->painter.rounds ? "rounds"
                  : s->painter.on   ? "on"
                                    : "off",
                  s->painter.on && !s->painter.color
                      ? "; {accepted} [-rejected-] [+from the model+]"
                  : s->painter.on ? "; green: accepted, red: rejected, blue: from the model"
                                  : "");
}

/* Number of tokens in the visible conversation. */
static size_t context_tokens(const so_session *s) {
    so_tokens tokens = {0};
    so_dialog_encode(&s->dialog, s->b.chat, &tokens, NULL);
    size_t n = tokens.len;
    so_tokens_free(&tokens);
    return n;
}

static void do_stats(so_session *s, const char *arg) {
    const so_request_stats *t = &s->total.stats;
    char rate[SO_RATE_TEXT];
    (void)arg;
    so_chat_print(s, "answers: %d, %d tokens in %.1f s%s, %.2f per pass", s->n_answers,
                  t->predicted_n, t->predicted_ms / 1000,
                  so_report_rate(so_stats_rates(t).tokens_per_second, rate),
                  t->rounds ? so_stats_rates(t).tokens_per_pass : 0);
    so_chat_print(s, "prompts: %d tokens in %.1f s, %d of them from the prefix cache", t->prompt_n,
                  t->prompt_ms / 1000, t->cached_n);
    so_chat_print(s, "guesses: %d made, %d tested, %d accepted (alpha %.2f); drafter: %s",
                  t->draft_n, t->tested_n, t->draft_n_accepted,
                  t->tested_n ? so_stats_rates(t).alpha : 0, or_none(s->spec.opts.drafter));
    so_chat_print(s, "context: %zu of %d tokens; temperature: %g; seed: %llu", context_tokens(s),
                  so_engine_n_ctx(s->e), (double)s->base.sample.temp,
                  (unsigned long long)s->base.sample.seed);
}

/* --- files --- */

static void set_file(so_session *s, const char *path) {
    char *copy = so_strdup(path);
    free(s->file);
    s->file = copy;
}

static void do_save(so_session *s, const char *arg) {
    so_err err = {0};
    if (so_file_exists(arg) && (!s->file || strcmp(s->file, arg) != 0))
        so_chat_print(s, "%.200s exists and was not saved or loaded here: choose another name",
                      arg);
    else if (so_dialog_save(&s->dialog, arg, &err) != SO_OK)
        so_chat_print(s, "%s", err.msg);
    else {
        set_file(s, arg);
        so_chat_print(s, "saved %zu messages to %s", so_dialog_len(&s->dialog), arg);
    }
}

static void do_load(so_session *s, const char *arg) {
    so_err err = {0};
    if (strcmp(arg, "-") == 0)
        so_chat_print(s, "/load needs a file name");
    else if (so_dialog_load(&s->dialog, arg, &err) != SO_OK)
        so_chat_print(s, "%s", err.msg);
    else {
        set_file(s, arg);
        so_chat_print(s, "loaded %zu messages%s", so_dialog_len(&s->dialog),
                      so_dialog_ends_with(&s->dialog, "user") ? "; /retry answers the last one"
                                                              : "");
    }
}

static void do_quit(so_session *s, const char *arg) {
    (void)arg;
    s->quit = true;
}

/* --- the table --- */

static void do_help(so_session *s, const char *arg);

static const command table[] = {
    {"/help", NULL, "show this list", do_help},
    {"/system", "[TEXT]", "set the system message; - removes it", do_system},
    {"/temp", "[X]", "set the temperature; 0 selects the most likely token", do_temp},
    {"/seed", "[N]", "set the random seed: same seed, same answer", do_seed},
    {"/spec", "[NAME]", "set the drafters, as --spec: none, auto, ngram …", do_spec},
    {"/view", "[on|off|rounds]", "mark accepted and rejected tokens", do_view},
    {"/retry", NULL, "answer the last turn again, with another seed", do_retry},
    {"/undo", NULL, "remove the last turn and its answer", do_undo},
    {"/reset", NULL, "start a new conversation; keeps the system message", do_reset},
    {"/stats", NULL, "show the figures of this session", do_stats},
    {"/save", "FILE", "write the conversation as JSON", do_save},
    {"/load", "FILE", "continue a saved conversation", do_load},
    {"/quit", NULL, "end the program, like Ctrl-D", do_quit},
};

static void do_help(so_session *s, const char *arg) {
    (void)arg;
    for (size_t i = 0; i < SO_LEN(table); i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", table[i].name, table[i].arg ? table[i].arg : "");
        so_chat_print(s, "  %-24s %s", left, table[i].help);
    }
    so_chat_print(s, "A turn continues on the next line after a \\ at the end of a line, between");
    so_chat_print(s, "\"\"\" and \"\"\", and after Alt-Enter.");
    so_chat_print(
        s, "Names may be shortened, as in /v on. A turn that begins with / is typed with //.");
}

const char *so_chat_command_at(int i) {
    return i >= 0 && i < (int)SO_LEN(table) ? table[i].name : NULL;
}

/* The command with this prefix. If there is none or more than one, prints a message and returns
 * NULL. */
static const command *find(const so_session *s, const char *name) {
    const command *found = NULL;
    const char *names[SO_LEN(table)];
    so_buf several = {0};
    int n = 0;
    for (size_t i = 0; i < SO_LEN(table); i++) {
        names[i] = table[i].name;
        if (strncmp(table[i].name, name, strlen(name)) != 0)
            continue;
        found = &table[i];
        so_buf_printf(&several, "%s%s", n++ ? ", " : "", table[i].name);
    }
    if (n > 1) {
        so_chat_print(s, "%s could be %s", name, several.data);
    } else if (n == 0) {
        const char *near = so_near_miss(name, names, SO_LEN(table));
        so_chat_print(
            s,
            "unknown command %s%s%s%s; /help lists the commands, and // sends a turn that "
            "begins with /",
            name, near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    }
    so_buf_free(&several);
    return n == 1 ? found : NULL;
}

/* Length of "/name" at the start of the line; 0 if the line is not a command. */
static size_t name_len(so_str turn) {
    size_t n = 1;
    if (turn.len < 2 || turn.ptr[0] != '/')
        return 0;
    while (n < turn.len && isalpha((unsigned char)turn.ptr[n]))
        n++;
    bool ends = n == turn.len || isspace((unsigned char)turn.ptr[n]);
    return ends && n > 1 && n < 32 ? n : 0;
}

bool so_chat_command(so_session *s, so_str turn) {
    size_t n = name_len(turn);
    if (n == 0)
        return false;
    char name[32];
    snprintf(name, sizeof name, "%.*s", (int)n, turn.ptr);
    const command *c = find(s, strcmp(name, "/exit") == 0 ? "/quit" : name);
    if (!c)
        return true;
    so_str rest = {turn.ptr + n, turn.len - n};
    while (rest.len && isspace((unsigned char)rest.ptr[0]))
        rest.ptr++, rest.len--;
    while (rest.len && isspace((unsigned char)rest.ptr[rest.len - 1]))
        rest.len--;
    char *arg = so_strndup(rest.ptr, rest.len);
    if (!c->arg && *arg)
        so_chat_print(s, "%s takes no argument", c->name);
    else if (c->arg && c->arg[0] != '[' && !*arg)
        so_chat_print(s, "%s needs %s", c->name, c->arg);
    else
        c->run(s, arg);
    free(arg);
    return true;
}
