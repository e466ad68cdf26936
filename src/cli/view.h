/* Prints an answer on stdout while it is generated: the text alone, or with its guesses (--view).
 * Main thread only. */
#ifndef SO_CLI_VIEW_H
#define SO_CLI_VIEW_H

#include "cli/options.h"
#include "engine/engine.h"

typedef struct so_painter {
    const so_tokenizer *tok;
    bool on;            /* guesses are shown */
    bool terminal;      /* stdout is a terminal: control characters are replaced */
    bool color, rounds; /* rounds: one line per round */
    bool mid_line;      /* the last character printed was not a line break */
    so_buf rejected;    /* text of this round's rejected guesses, printed before the correction */
    int n_rounds, n_tokens;
    int n_shown; /* tokens of this round that were printed */
    /* An end token has no text, so no event reports it: */
    int end_at; /* its index among the tokens of the round; −1: none */
    int32_t end_token;
    so_origin end_origin; /* accepted guess, correction or bonus */
} so_painter;

/* Reads --view and --no-color. */
void so_painter_init(so_painter *v, const so_tokenizer *tok, const so_args *a);
/* Notes the verdict of a round before its events. Does nothing if the view is off. */
void so_painter_round(so_painter *v, const so_round *round);
void so_painter_event(so_painter *v, const so_event *ev);
/* The colour of a token by its origin; "" for plain decoding. */
const char *so_painter_color(so_origin o);
/* Ends the answer and its line; the next answer starts with round 1. */
void so_painter_end(so_painter *v);
void so_painter_free(so_painter *v);

/* A text on stdout: byte for byte into a file or pipe; on a terminal control characters other than
 * line breaks and tabs are written as \xNN, so that no text controls the terminal. */
void so_view_print(so_str text);

/* While stdout and stderr are the same terminal, log lines written during an answer begin on a new
 * line. Otherwise nothing is added to either stream. */
void so_painter_guard(so_painter *v);
void so_painter_unguard(void);

#endif
