/* The /commands of `sooth chat`: one row each, found by any beginning of the name that is no
 * beginning of another. A line is a command where letters follow the slash up to a space or the
 * end, so "/usr/bin …" is a turn like any other, and "//help" says "/help" to the model. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/chat.h"

typedef struct command {
    const char *name, *arg, *help; /* arg NULL: it takes none; in brackets: it may be left out */
    void (*run)(so_session *s, const char *arg);
} command;

static const char *or_none(const char *text) { return text && *text ? text : "none"; }

/* --- what is said --- */

static void do_system(so_session *s, const char *arg) {
    so_err err = {0};
    bool off = strcmp(arg, "-") == 0;
    if (*arg && so_dialog_set_system(&s->dialog, so_str_c(off ? "" : arg), &err) != SO_OK)
        so_chat_say(s, "%s", err.msg);
    else
        so_chat_say(s, "system message: %s", or_none(so_dialog_system(&s->dialog).ptr));
}

static void do_reset(so_session *s, const char *arg) {
    (void)arg;
    so_dialog_clear(&s->dialog);
    so_chat_say(s, "a new conversation");
}

/* The beginning of a turn, on one line, to say which one is meant. */
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
        so_chat_say(s, "there is no turn to take back");
        return;
    }
    quote(so_dialog_last(&s->dialog), turn);
    so_dialog_pop(&s->dialog);
    so_chat_say(s, "taken back: %s", turn);
}

/* Where there is no new answer, the old one stays. */
static void do_retry(so_session *s, const char *arg) {
    so_buf old = {0};
    bool answered = so_dialog_ends_with(&s->dialog, "assistant");
    (void)arg;
    if (answered) {
        so_buf_append_str(&old, so_dialog_last(&s->dialog));
        so_dialog_pop(&s->dialog);
    }
    if (!so_dialog_ends_with(&s->dialog, "user")) {
        so_chat_say(s, "there is nothing to answer yet");
        so_buf_free(&old);
        return;
    }
    if (s->base.sample.temp <= 0)
        so_chat_say(s, "at temperature 0 the answer stays the same; /temp 0.8 makes it vary");
    else if (!s->chose_seed && s->n_answers > 0)
        s->base.sample.seed = so_cli_new_seed();
    if (!so_chat_answer(s) && answered)
        so_dialog_add(&s->dialog, "assistant", so_buf_str(&old), NULL);
    so_buf_free(&old);
}

/* --- how it is said --- */

static void do_temp(so_session *s, const char *arg) {
    char *end;
    double x = strtod(arg, &end);
    if (*arg && (end == arg || *end || !(x >= 0 && x <= 100)))
        so_chat_say(s, "/temp '%.40s': must be a number from 0 to 100", arg);
    else if (*arg)
        s->base.sample.temp = (float)x;
    so_chat_say(s, "temperature: %g", (double)s->base.sample.temp);
}

static void do_seed(so_session *s, const char *arg) {
    char *end;
    errno = 0;
    long long n = strtoll(arg, &end, 10);
    if (*arg && (end == arg || *end || errno || n < 0)) {
        so_chat_say(s, "/seed '%.40s': must be a whole number from 0", arg);
        return;
    }
    if (*arg) {
        s->base.sample.seed = (uint64_t)n;
        s->chose_seed = true;
    }
    so_chat_say(s, "seed: %llu", (unsigned long long)s->base.sample.seed);
}

static void do_spec(so_session *s, const char *arg) {
    so_err err = {0};
    char *text = so_strdup(arg);
    if (*arg && so_cli_spec_change(&s->spec, text, &err) != SO_OK) {
        so_chat_say(s, "%s", err.msg);
        free(text);
        return;
    }
    if (*arg) {
        free(s->spec_text);
        s->spec_text = text;
    } else {
        free(text);
    }
    so_chat_say(s, "drafter: %s", or_none(s->spec.opts.drafter));
}

static void do_view(so_session *s, const char *arg) {
    bool rounds = strcmp(arg, "rounds") == 0;
    if (*arg && !rounds && strcmp(arg, "on") != 0 && strcmp(arg, "off") != 0) {
        so_chat_say(s, "/view '%.40s': must be on, off or rounds", arg);
        return;
    }
    s->painter.on = *arg ? strcmp(arg, "off") != 0 : !s->painter.on;
    s->painter.rounds = s->painter.on && rounds;
    so_chat_say(s, "view: %s%s",
                s->painter.rounds ? "rounds"
                : s->painter.on   ? "on"
                                  : "off",
                s->painter.on && !s->painter.color ? "; {stood} [-fell-] [+the model's own word+]"
                : s->painter.on ? "; green stood, red fell, blue is the model's own word"
                                : "");
}

/* Tokens of the conversation as the model would see it. */
static size_t context_tokens(const so_session *s) {
    so_tokens tokens = {0};
    so_dialog_encode(&s->dialog, s->b.chat, &tokens, NULL);
    size_t n = tokens.len;
    so_tokens_free(&tokens);
    return n;
}

static void do_stats(so_session *s, const char *arg) {
    const so_request_stats *t = &s->total.stats;
    (void)arg;
    so_chat_say(s, "answers: %d, %d tokens in %.1f s (%.1f/s), %.2f per pass", s->n_answers,
                t->predicted_n, t->predicted_ms / 1000,
                t->predicted_ms > 0 ? 1000.0 * t->predicted_n / t->predicted_ms : 0,
                t->rounds ? so_stats_rates(t).tokens_per_pass : 0);
    so_chat_say(s, "prompts: %d tokens in %.1f s, %d of them known from before", t->prompt_n,
                t->prompt_ms / 1000, t->cached_n);
    so_chat_say(s, "guesses: %d made, %d tested, %d accepted (alpha %.2f); drafter: %s", t->draft_n,
                t->tested_n, t->draft_n_accepted, t->tested_n ? so_stats_rates(t).alpha : 0,
                or_none(s->spec.opts.drafter));
    so_chat_say(s, "context: %zu of %d tokens; temperature: %g; seed: %llu", context_tokens(s),
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
        so_chat_say(s, "%.200s exists and is not of this conversation: choose another name", arg);
    else if (so_dialog_save(&s->dialog, arg, &err) != SO_OK)
        so_chat_say(s, "%s", err.msg);
    else {
        set_file(s, arg);
        so_chat_say(s, "saved %zu messages to %s", so_dialog_len(&s->dialog), arg);
    }
}

static void do_load(so_session *s, const char *arg) {
    so_err err = {0};
    if (strcmp(arg, "-") == 0)
        so_chat_say(s, "/load needs the name of a file");
    else if (so_dialog_load(&s->dialog, arg, &err) != SO_OK)
        so_chat_say(s, "%s", err.msg);
    else {
        set_file(s, arg);
        so_chat_say(s, "loaded %zu messages%s", so_dialog_len(&s->dialog),
                    so_dialog_ends_with(&s->dialog, "user") ? "; /retry answers the last one" : "");
    }
}

static void do_quit(so_session *s, const char *arg) {
    (void)arg;
    s->leave = true;
}

/* --- finding --- */

static void do_help(so_session *s, const char *arg);

static const command table[] = {
    {"/help", NULL, "this list", do_help},
    {"/system", "[TEXT]", "the message put before the conversation; - removes it", do_system},
    {"/temp", "[X]", "temperature; 0 takes the likeliest word", do_temp},
    {"/seed", "[N]", "seed of the noise: the same seed gives the same answer", do_seed},
    {"/spec", "[NAME]", "who guesses: none, lookup, ngram, model, auto, a,b …", do_spec},
    {"/view", "[on|off|rounds]", "show what was guessed, and what stood", do_view},
    {"/retry", NULL, "answer the last turn again, with another seed", do_retry},
    {"/undo", NULL, "take back the last turn and its answer", do_undo},
    {"/reset", NULL, "begin a new conversation; the system message stays", do_reset},
    {"/stats", NULL, "figures of this session", do_stats},
    {"/save", "FILE", "write the conversation as JSON", do_save},
    {"/load", "FILE", "go on with a saved conversation", do_load},
    {"/quit", NULL, "leave, like Ctrl-D", do_quit},
};

static void do_help(so_session *s, const char *arg) {
    (void)arg;
    for (size_t i = 0; i < SO_LEN(table); i++) {
        char left[64];
        snprintf(left, sizeof left, "%s %s", table[i].name, table[i].arg ? table[i].arg : "");
        so_chat_say(s, "  %-24s %s", left, table[i].help);
    }
    so_chat_say(s, "A turn goes on after a line that ends in \\, between \"\"\" and \"\"\", and "
                   "after Alt-Enter.");
    so_chat_say(s, "A beginning of a name will do, as in /v on. // begins a turn with a slash.");
}

const char *so_chat_command_at(int i) {
    return i >= 0 && i < (int)SO_LEN(table) ? table[i].name : NULL;
}

/* The one command with this beginning; else says why there is none. */
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
        so_chat_say(s, "%s could be %s", name, several.data);
    } else if (n == 0) {
        const char *near = so_near_miss(name, names, SO_LEN(table));
        so_chat_say(s,
                    "there is no %s%s%s%s; /help lists the commands, // begins a turn with a "
                    "slash",
                    name, near ? "; did you mean " : "", near ? near : "", near ? "?" : "");
    }
    so_buf_free(&several);
    return n == 1 ? found : NULL;
}

/* The slash and the letters behind it; 0 where the line is no command. */
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
        so_chat_say(s, "%s takes nothing behind it", c->name);
    else if (c->arg && c->arg[0] != '[' && !*arg)
        so_chat_say(s, "%s needs %s", c->name, c->arg);
    else
        c->run(s, arg);
    free(arg);
    return true;
}
