/* Reads the turns of a conversation: from a terminal with line editing, history and paste, or line
 * by line from a pipe.
 *
 * A turn is one line. It continues on the next line after a backslash at the end of a line, between
 * triple double quotes, in pasted text, and after Alt-Enter. */
#ifndef SO_CLI_LINES_H
#define SO_CLI_LINES_H

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/str.h"

enum { SO_LINES_MAX_TURN = 4 << 20 };

typedef struct so_lines so_lines;

typedef struct so_lines_opts {
    FILE *terminal; /* stream of the editor; NULL: no prompt and no editing */
    bool color;
    char *history; /* path of the history, owned; NULL: no history */
    /* Words that Tab completes at the start of a line (file names after it); NULL past the end. */
    const char *(*word_at)(int i);
    const volatile sig_atomic_t *interrupted; /* set by a signal handler: stop reading */
} so_lines_opts;

typedef enum so_line_end {
    SO_LINE_OK,
    SO_LINE_END,         /* end of input */
    SO_LINE_INTERRUPTED, /* by a signal; the line is discarded */
    SO_LINE_CLEARED,     /* the same, and the line was not empty */
    SO_LINE_TOO_LONG,    /* more than SO_LINES_MAX_TURN bytes; read and discarded */
} so_line_end;

/* Reads standard input; at most one at a time. Main thread only. */
so_lines *so_lines_open(const so_lines_opts *o);
void so_lines_close(so_lines *l); /* NULL is allowed */
/* Turns the terminal's echo off while an answer is printed: keys typed meanwhile do not appear in
 * it and belong to the next turn. */
void so_lines_set_echo(so_lines *l, bool on);
/* Reads the next turn, without its last line break; it may be empty. */
so_line_end so_lines_read(so_lines *l, so_buf *turn);

#endif
