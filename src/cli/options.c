/* The parser of command lines over the table of options (option_table.c).
 *
 * An option of another command is refused with a message that names the commands that have it.
 * Values are checked against the row's type and range; ranges that depend on a model are checked
 * where the model is known. What an option does is up to its command. Main thread only. */
#include "cli/options.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/env.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/str.h"
#include "cli/help.h"
#include "cli/terminal.h"

/* --- messages --- */

static int edit_distance(const char *a, const char *b) {
    enum { MAX = 40 };
    int la = (int)strlen(a), lb = (int)strlen(b), row[MAX + 1];
    if (la > MAX || lb > MAX)
        return MAX;
    for (int j = 0; j <= lb; j++)
        row[j] = j;
    for (int i = 1; i <= la; i++) {
        int diag = row[0];
        row[0] = i;
        for (int j = 1; j <= lb; j++) {
            int sub = diag + (a[i - 1] != b[j - 1]);
            diag = row[j];
            row[j] = SO_MIN(sub, SO_MIN(row[j], row[j - 1]) + 1);
        }
    }
    return row[lb];
}

const char *so_near_miss(const char *word, const char *const *candidates, int n) {
    const char *best = NULL;
    int best_d = 3; /* at most two typing errors */
    for (int i = 0; i < n; i++) {
        int d = edit_distance(word, candidates[i]);
        if (strlen(word) >= 3 && strncmp(word, candidates[i], strlen(word)) == 0)
            d = SO_MIN(d, 1); /* an abbreviation */
        if (d < best_d && d < (int)strlen(candidates[i])) {
            best_d = d;
            best = candidates[i];
        }
    }
    return best;
}

int so_args_bad(const so_args *a, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "sooth %s: ", a->cmd->name);
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n`sooth help %s` shows the options.\n", a->cmd->name);
    va_end(ap);
    return 2;
}

int so_args_fail(const so_args *a, const so_err *err) {
    fprintf(stderr, "sooth %s: %s\n", a->cmd->name, err->msg);
    return 1;
}

/* --- looking up --- */

static bool alias_matches(const char *aliases, so_str name) {
    while (aliases && *aliases) {
        size_t len = strcspn(aliases, " ");
        if (so_str_eq((so_str){aliases, len}, name))
            return true;
        aliases += len + (aliases[len] == ' ');
    }
    return false;
}

/* The row of "--name" or "-name" (without its value), or −1. */
static int find_row(so_str flag) {
    bool is_long = so_str_starts(flag, SO_STR("--"));
    so_str name = {flag.ptr + (is_long ? 2 : 1), flag.len - (is_long ? 2 : 1)};
    for (int i = 0; i < SO_OPT_COUNT; i++) {
        const so_option *o = so_option_at((so_opt)i);
        if (is_long ? so_str_eq_c(name, o->name) || alias_matches(o->aliases, name)
                    : o->letter && so_str_eq_c(name, o->letter))
            return i;
    }
    return -1;
}

static bool bad_flag(so_args *a, so_str flag) {
    const char *names[SO_OPT_COUNT];
    int n = 0;
    char word[64];
    while (flag.len && *flag.ptr == '-')
        flag.ptr++, flag.len--;
    snprintf(word, sizeof word, "%.*s", SO_STR_ARG(flag));
    for (char *p = word; *p; p++)
        *p = *p == '_' ? '-' : (char)tolower((unsigned char)*p);
    for (int i = 0; i < SO_OPT_COUNT; i++)
        if (so_option_at((so_opt)i)->cmds & a->cmd->bit)
            names[n++] = so_option_at((so_opt)i)->name;
    const char *near = so_near_miss(word, names, n);
    a->status = near ? so_args_bad(a, "unknown option '%s%.*s'; did you mean --%s?",
                                   flag.len == 1 ? "-" : "--", SO_STR_ARG(flag), near)
                     : so_args_bad(a, "unknown option '%s%.*s'", flag.len == 1 ? "-" : "--",
                                   SO_STR_ARG(flag));
    return false;
}

static bool wrong_command(so_args *a, const so_option *o) {
    so_buf who = {0};
    for (int i = 0; so_command_at(i); i++)
        if (so_command_at(i)->bit & o->cmds)
            so_buf_printf(&who, "%s%s", who.len ? ", " : "", so_command_at(i)->name);
    a->status = so_args_bad(a, "--%s is not an option of this command (it belongs to: %s)", o->name,
                            who.len ? who.data : "none");
    so_buf_free(&who);
    return false;
}

/* --- values --- */

static bool bad_value(so_args *a, const so_option *o, const char *text) {
    const char *kind = o->type == SO_TYPE_INT ? "a whole number" : "a number";
    if (o->type == SO_TYPE_CHOICE || o->type == SO_TYPE_OPTIONAL)
        a->status = so_args_bad(a, "--%s '%.80s': must be one of %s", o->name, text, o->choices);
    else if (o->type == SO_TYPE_SEED)
        a->status = so_args_bad(a,
                                "--%s '%.80s': must be a whole number from 0 to %lld, or -1 for "
                                "a random one",
                                o->name, text, (long long)INT64_MAX);
    else
        a->status = so_args_bad(a, "--%s '%.80s': must be %s from %g to %.16g", o->name, text, kind,
                                o->min, o->max);
    return false;
}

static bool is_choice(const char *choices, const char *text) {
    size_t len = strlen(text);
    for (const char *c = choices; *c;) {
        size_t n = strcspn(c, "|");
        if (n == len && strncasecmp(c, text, n) == 0)
            return true;
        c += n + (c[n] == '|');
    }
    return false;
}

static bool starts_number(const char *text) {
    const char *p = text + (*text == '-' || *text == '+');
    return isdigit((unsigned char)*p) || (*p == '.' && isdigit((unsigned char)p[1]));
}

static bool parse_value(so_args *a, int id, const char *text) {
    const so_option *o = so_option_at((so_opt)id);
    char *end = NULL;
    errno = 0;
    switch (o->type) {
    case SO_TYPE_OPTIONAL:
        if (text && !is_choice(o->choices, text))
            return bad_value(a, o, text);
        break;
    case SO_TYPE_FLAG:
    case SO_TYPE_TEXT:
    case SO_TYPE_LIST:
        break;
    case SO_TYPE_CHOICE:
        if (!is_choice(o->choices, text))
            return bad_value(a, o, text);
        break;
    case SO_TYPE_INT:
        a->val[id].i = strtoll(text, &end, 10);
        if (!starts_number(text) || *end || errno || (double)a->val[id].i < o->min ||
            (double)a->val[id].i > o->max)
            return bad_value(a, o, text);
        break;
    case SO_TYPE_FLOAT:
        a->val[id].f = strtod(text, &end);
        if (!starts_number(text) || *end || !isfinite(a->val[id].f) || a->val[id].f < o->min ||
            a->val[id].f > o->max)
            return bad_value(a, o, text);
        break;
    case SO_TYPE_SEED: /* −1 counts as not given */
        a->val[id].i = strtoll(text, &end, 10);
        if (!starts_number(text) || *end || errno || a->val[id].i < -1)
            return bad_value(a, o, text);
        break;
    }
    return true;
}

static void take(so_args *a, int id, const char *text) {
    int n = ++a->val[id].n_given;
    a->val[id].text = text;
    if (so_option_at((so_opt)id)->type == SO_TYPE_LIST) {
        a->val[id].items = so_realloc(a->val[id].items, (size_t)n * sizeof *a->val[id].items);
        a->val[id].items[n - 1] = text;
    }
    if (so_option_at((so_opt)id)->type == SO_TYPE_SEED && a->val[id].i == -1)
        a->val[id].n_given = 0;
}

/* One option at argv[*i]. If its value is the next argument, moves *i to it. */
static bool parse_option(so_args *a, int argc, char **argv, int *i) {
    const char *arg = argv[*i], *eq = strchr(arg, '=');
    so_str flag = {arg, eq ? (size_t)(eq - arg) : strlen(arg)};
    int id = find_row(flag);
    if (id < 0)
        return bad_flag(a, flag);
    const so_option *o = so_option_at((so_opt)id);
    if (!(o->cmds & a->cmd->bit))
        return wrong_command(a, o);
    const char *text = eq ? eq + 1 : NULL;
    if (o->type == SO_TYPE_FLAG && text) {
        a->status = so_args_bad(a, "--%s takes no value, got '%.80s'", o->name, text);
        return false;
    }
    if (o->type > SO_TYPE_OPTIONAL && !text) {
        if (*i + 1 >= argc) {
            a->status = so_args_bad(a, "--%s needs a value (%s)", o->name, o->value);
            return false;
        }
        text = argv[++*i];
    }
    if (!parse_value(a, id, text))
        return false;
    take(a, id, text);
    return true;
}

static bool check_positionals(so_args *a) {
    if (a->n_pos > a->cmd->max_pos) {
        bool prompt = a->cmd->bit & (SO_CMD_RUN | SO_CMD_DEMO);
        a->status = so_args_bad(a, "unexpected argument '%.80s'%s", a->pos[a->cmd->max_pos],
                                prompt ? "; put a prompt of several words in quotes" : "");
        return false;
    }
    if (a->n_pos < a->cmd->min_pos) {
        a->status = so_args_bad(a, "too few arguments; usage: sooth %s %.*s", a->cmd->name,
                                (int)strcspn(a->cmd->usage, "\n"), a->cmd->usage);
        return false;
    }
    return true;
}

bool so_args_parse(so_args *a, int cmd_bit, int argc, char **argv) {
    *a = (so_args){.cmd = so_command_by_bit(cmd_bit), .pos = SO_NEW_N(const char *, argc)};
    SO_ASSERT(a->cmd != NULL);
    bool ok = true, only_args = false;
    for (int i = 1; i < argc && ok; i++) {
        if (!only_args && strcmp(argv[i], "--") == 0)
            only_args = true;
        else if (!only_args && argv[i][0] == '-' && argv[i][1] != '\0')
            ok = parse_option(a, argc, argv, &i);
        else
            a->pos[a->n_pos++] = argv[i];
    }
    if (ok && a->val[SO_OPT_HELP].n_given) {
        so_help_command(a->cmd, so_args_color(a, STDOUT_FILENO));
        a->status = 0;
        ok = false;
    }
    ok = ok && check_positionals(a);
    if (ok && a->val[SO_OPT_VERBOSE].n_given)
        so_log_set_level(a->val[SO_OPT_VERBOSE].n_given > 1 ? SO_LOG_DEBUG : SO_LOG_INFO);
    if (!ok)
        so_args_free(a);
    return ok;
}

void so_args_free(so_args *a) {
    for (int i = 0; i < SO_OPT_COUNT; i++) {
        free(a->val[i].items);
        a->val[i].items = NULL;
    }
    free(a->pos);
    a->pos = NULL;
}

bool so_args_has(const so_args *a, so_opt id) { return a->val[id].n_given > 0; }

const char *so_args_str(const so_args *a, so_opt id, const char *fallback) {
    return so_args_has(a, id) ? a->val[id].text : fallback;
}

int64_t so_args_int(const so_args *a, so_opt id, int64_t fallback) {
    return so_args_has(a, id) ? a->val[id].i : fallback;
}

double so_args_float(const so_args *a, so_opt id, double fallback) {
    return so_args_has(a, id) ? a->val[id].f : fallback;
}

bool so_args_color(const so_args *a, int fd) {
    return so_terminal_takes_control(fd) && !so_env_no_color() &&
           !(a && so_args_has(a, SO_OPT_NO_COLOR));
}
