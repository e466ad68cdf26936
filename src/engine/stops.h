/* Stop strings over a stream of text. Text that may be the beginning of a stop string is held back;
 * other text is passed on; a complete stop string ends the stream before its first byte. The
 * strings are borrowed. One so_stops per stream. */
#ifndef SO_ENGINE_STOPS_H
#define SO_ENGINE_STOPS_H

#include "base/str.h"

typedef struct so_stops {
    const so_str *strings; /* none may be empty */
    int n_strings;
    so_buf held;
} so_stops;

/* Appends to `out` the text that can no longer become part of a stop string. Returns true if a stop
 * string is complete: then `out` has the text before it, and the stream has ended. */
bool so_stops_push(so_stops *s, so_str piece, so_buf *out);
/* The stream ended otherwise: appends the held text to `out`. */
void so_stops_finish(so_stops *s, so_buf *out);
void so_stops_free(so_stops *s);

#endif
