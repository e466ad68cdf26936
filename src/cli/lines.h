/* A person's turns: from a terminal with editing, history and paste, or line by line from a pipe.
 *
 * A turn is a line. It goes on over several lines where a line ends in a backslash, between three
 * quotation marks, in pasted text, and where Alt-Enter was pressed. */
#ifndef SO_CLI_LINES_H
#define SO_CLI_LINES_H

#include <signal.h>
#include <stdbool.h>
#include <stdio.h>

#include "base/str.h"

enum { SO_LINES_MAX_TURN = 4 << 20 };

typedef struct so_lines so_lines;

typedef struct so_lines_opts {
    FILE *terminal; /* where the editor draws; NULL: no prompt, no editing */
    bool color;
    char *history; /* the file; NULL: none is kept. Taken over. */
    const char *(*word_at)(
        int i); /* completed by Tab, and so are files behind; NULL past the end */
    const volatile sig_atomic_t *interrupted; /* set by a signal: reading ends */
} so_lines_opts;

typedef enum so_line_end {
    SO_LINE_OK,
    SO_LINE_END,         /* nothing follows */
    SO_LINE_INTERRUPTED, /* what was typed is forgotten */
    SO_LINE_CLEARED,     /* interrupted, and something had been typed */
    SO_LINE_TOO_LONG,    /* more than SO_LINES_MAX_TURN; read and forgotten */
} so_line_end;

/* Reads standard input, all of it; one at a time. */
so_lines *so_lines_open(const so_lines_opts *o);
void so_lines_close(so_lines *l); /* NULL is fine */
/* While an answer is shown, what is typed is kept for the next turn and not echoed into it. */
void so_lines_hush(so_lines *l, bool hush);
/* The next turn into `turn`, without its last line break; may be empty. */
so_line_end so_lines_read(so_lines *l, so_buf *turn);

#endif
