/* Stop strings over a stream of text: what may still become one is held back, what cannot is let
 * through, and a whole one ends the stream before its first byte. Borrowed strings, one stream. */
#ifndef SO_ENGINE_STOPS_H
#define SO_ENGINE_STOPS_H

#include "base/str.h"

typedef struct so_stops {
    const so_str *strings; /* none is empty */
    int n_strings;
    so_buf held;
} so_stops;

/* Appends to `out` the text that is now certain. True when a stop string is complete: `out` has
 * what stood before it, and the stream is over. */
bool so_stops_push(so_stops *s, so_str piece, so_buf *out);
/* The stream ended otherwise: what is held was plain text after all. */
void so_stops_finish(so_stops *s, so_buf *out);
void so_stops_free(so_stops *s);

#endif
