/* Printing of help texts. Everything shown comes from the tables of commands and options.
 *
 *   wide terminal                                     narrower than SPLIT columns
 *     -c, --ctx-size N            Context length        -c, --ctx-size N
 *                                 in tokens                     Context length in tokens
 *
 * tools/man.py reads the wide form: a row's head begins in column 2 or 6, its text after two or
 * more spaces or on the next line. Main thread only. */
#include "cli/help.h"

#include <ctype.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "base/str.h"
#include "cli/options.h"
#include "cli/terminal.h"

enum { WIDTH = 80, MAX_WIDTH = 100, MIN_WIDTH = 20, SPLIT = 70, NAME_COLUMN = 17 };

typedef struct page {
    FILE *out;
    int width;
    int column; /* where the text of an option begins */
    bool color;
} page;

static page open_page(FILE *out, bool color) {
    int width = so_terminal_columns(fileno(out), WIDTH);
    width = SO_MAX(SO_MIN(width, (int)MAX_WIDTH), (int)MIN_WIDTH);
    return (page){out, width, width < SPLIT ? 8 : 30, color};
}

/* Words of `text`, the first at column `at`, lines after the first indented to `indent`. */
static void print_wrapped(const page *p, const char *text, int at, int indent) {
    bool first = true; /* in its line */
    while (*text) {
        int len = (int)strcspn(text, " ");
        if (!first && at + 1 + len > p->width) {
            fprintf(p->out, "\n%*s", indent, "");
            at = indent;
            first = true;
        }
        fprintf(p->out, "%s%.*s", first ? "" : " ", len, text);
        at += len + !first;
        first = false;
        text += len + (text[len] == ' ');
    }
    fputc('\n', p->out);
}

/* A heading and its text, to the right of the heading or below it. */
static void print_row(const page *p, const char *head, const char *text, int column) {
    int len = (int)strlen(head);
    if (len + 2 > column) {
        fprintf(p->out, "%s\n%*s", head, column, "");
    } else {
        fprintf(p->out, "%-*s", column, head);
    }
    print_wrapped(p, text, column, column);
}

static void print_title(const page *p, const char *title) {
    fprintf(p->out, "\n%s%s:%s\n", p->color ? "\033[1m" : "", title, p->color ? "\033[0m" : "");
}

/* --- the overview --- */

static void print_group(const page *p, const char *title, so_command_group group) {
    print_title(p, title);
    for (int i = 0; so_command_at(i); i++) {
        const so_command *c = so_command_at(i);
        char head[32];
        snprintf(head, sizeof head, "  %s", c->name);
        if (c->group == group)
            print_row(p, head, c->summary, p->width < SPLIT ? 8 : NAME_COLUMN);
    }
}

void so_help_overview(FILE *f) {
    page p = open_page(f, so_args_color(NULL, fileno(f)));
    print_wrapped(&p, "sooth runs language models faster without changing their output.", 0, 0);
    fputs("\nUsage: sooth COMMAND [options]\n", f);
    print_group(&p, "Commands for using models", SO_GROUP_USE);
    print_group(&p, "Commands for measuring", SO_GROUP_MEASURE);
    print_title(&p, "Help topics");
    for (int i = 0; so_topic_at(i); i++) {
        char head[32];
        snprintf(head, sizeof head, "  %s", so_topic_at(i)->name);
        print_row(&p, head, so_topic_at(i)->summary, p.width < SPLIT ? 8 : NAME_COLUMN);
    }
    fputc('\n', f);
    print_wrapped(&p, "`sooth help NAME` shows the options of a command, or a topic.", 0, 0);
    print_wrapped(&p, "Exit status: 0 success, 1 failure, 2 wrong usage.", 0, 0);
}

/* --- one command --- */

static void print_option(const page *p, so_opt id, int cmd_bit) {
    const so_option *o = so_option_at(id);
    const char *default_text = so_option_default(id, cmd_bit);
    so_buf head = {0}, text = {0};
    if (o->letter)
        so_buf_printf(&head, "  -%s, --%s", o->letter, o->name);
    else
        so_buf_printf(&head, "      --%s", o->name);
    if (o->value)
        so_buf_printf(&head, o->type == SO_TYPE_OPTIONAL ? "[=%s]" : " %s", o->value);
    so_buf_append_c(&text, so_option_help(id, cmd_bit));
    if (o->type == SO_TYPE_CHOICE)
        so_buf_printf(&text, " (%s; default: %s)", o->choices, default_text);
    else if (default_text)
        so_buf_printf(&text, " (default: %s)", default_text);
    print_row(p, head.data, text.data, p->column);
    so_buf_free(&head);
    so_buf_free(&text);
}

static void print_usage(const page *p, const so_command *cmd) {
    const char *lead = "Usage:";
    for (const char *u = cmd->usage; *u; lead = "      ") {
        size_t len = strcspn(u, "\n");
        so_buf line = {0};
        so_buf_printf(&line, "sooth %s %.*s", cmd->name, (int)len, u);
        fprintf(p->out, "%s ", lead);
        print_wrapped(p, line.data, 7, 11);
        so_buf_free(&line);
        u += len + (u[len] == '\n');
    }
}

/* Lines of "head\ttext"; one without '\t' is a heading. */
static void print_rows(const page *p, const char *line) {
    while (*line) {
        size_t end = strcspn(line, "\n"), head = strcspn(line, "\t\n");
        so_buf name = {0}, text = {0};
        so_buf_printf(&name, "%s%.*s", head < end ? "  " : "", (int)head, line);
        if (head < end) {
            so_buf_append(&text, line + head + 1, end - head - 1);
            print_row(p, name.data, text.data, p->column);
        } else {
            print_title(p, name.data);
        }
        so_buf_free(&name);
        so_buf_free(&text);
        line += end + (line[end] == '\n');
    }
}

void so_help_command(const so_command *cmd, bool color) {
    page p = open_page(stdout, color);
    const char *group = "";
    so_buf summary = {0};
    print_usage(&p, cmd);
    so_buf_printf(&summary, "%c%s.", toupper((unsigned char)cmd->summary[0]), cmd->summary + 1);
    putchar('\n');
    print_wrapped(&p, summary.data, 0, 0);
    so_buf_free(&summary);
    if (cmd->args) {
        print_title(&p, "WHAT");
        print_rows(&p, cmd->args);
    }
    for (int i = 0; i < SO_OPT_COUNT; i++) {
        const so_option *o = so_option_at((so_opt)i);
        if (!(o->cmds & cmd->bit))
            continue;
        if (strcmp(group, o->group) != 0)
            print_title(&p, o->group);
        group = o->group;
        print_option(&p, (so_opt)i, cmd->bit);
    }
}

/* --- topics --- */

void so_help_topic(const so_topic *t, bool color) {
    page p = open_page(stdout, color);
    for (const char *line = t->intro; *line;) {
        size_t end = strcspn(line, "\n");
        so_buf text = {0};
        so_buf_append(&text, line, end);
        print_wrapped(&p, text.data, 0, 0);
        so_buf_free(&text);
        line += end + (line[end] == '\n');
        if (*line)
            putchar('\n');
    }
    print_rows(&p, t->rows);
}
