/* `run --view`: the answer with its guesses, as it is made. */
#ifndef SO_CLI_VIEW_H
#define SO_CLI_VIEW_H

#include "engine/engine.h"

typedef struct so_painter {
    const so_tokenizer *tok;
    bool color, rounds; /* rounds: one line per round */
    so_buf rejected;    /* texts of this round's rejected guesses, to stand before the correction */
    int n_rounds, n_tokens;
} so_painter;

void so_painter_round(so_painter *v, const so_round *round);
void so_painter_event(so_painter *v, const so_event *ev);
void so_painter_end(so_painter *v);
void so_painter_free(so_painter *v);

#endif
