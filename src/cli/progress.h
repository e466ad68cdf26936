/* A progress bar on stderr, drawn only if stderr is a terminal that supports control sequences;
 * elsewhere these functions do nothing. A log line written meanwhile replaces the bar, which is
 * drawn again below it. At most one bar at a time; main thread only. */
#ifndef SO_CLI_PROGRESS_H
#define SO_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct so_progress {
    const char *label;
    bool on; /* the bar is drawn */
    int64_t t_start_ns, t_drawn_ns;
    int permille; /* as drawn last; −1: nothing is drawn */
} so_progress;

void so_progress_begin(so_progress *p, const char *label);
void so_progress_set(so_progress *p, double done); /* 0 … 1 */
void so_progress_end(so_progress *p);              /* erases the line */
/* so_progress_set in the form of a load callback; user is the so_progress. */
void so_progress_callback(void *user, double done);

#endif
