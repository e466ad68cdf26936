/* The answer on stdout as it is made: as it is, or with its guesses (--view). */
#ifndef SO_CLI_VIEW_H
#define SO_CLI_VIEW_H

#include "cli/options.h"
#include "engine/engine.h"

typedef struct so_painter {
    const so_tokenizer *tok;
    bool on;            /* guesses are shown; else the text alone … */
    bool terminal;      /* … without what would steer a terminal; elsewhere byte for byte */
    bool color, rounds; /* rounds: one line per round */
    bool mid_line;      /* stdout shows the beginning of a line */
    so_buf rejected;    /* texts of this round's rejected guesses, to stand before the correction */
    int n_rounds, n_tokens;
    int n_shown;          /* tokens of this round that became text */
    int end_at;           /* where among them an end token was decided; −1: nowhere */
    int32_t end_token;    /* it has no text of its own, so no event tells of it */
    so_origin end_origin; /* how it came to be */
} so_painter;

/* As --view and --no-color state it. */
void so_painter_init(so_painter *v, const so_tokenizer *tok, const so_args *a);
/* Rounds matter to a painter that is on, and do no harm to one that is not. */
void so_painter_round(so_painter *v, const so_round *round);
void so_painter_event(so_painter *v, const so_event *ev);
/* The colour of a token that came to be in this way; "" for plain ones. */
const char *so_painter_color(so_origin o);
/* Ends the answer and its line; the next one starts from round 1. */
void so_painter_end(so_painter *v);
void so_painter_free(so_painter *v);

/* While stdout and stderr are one terminal, what is logged in the middle of an answer begins on a
 * line of its own. Elsewhere nothing is added to either stream. */
void so_painter_guard(so_painter *v);
void so_painter_unguard(void);

#endif
