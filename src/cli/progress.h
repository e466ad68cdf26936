/* Progress on stderr, drawn only when stderr is a terminal; elsewhere these calls do nothing. What
 * is logged meanwhile takes the bar's place, and the bar is drawn again below it. One at a time. */
#ifndef SO_CLI_PROGRESS_H
#define SO_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

typedef struct so_progress {
    const char *label;
    bool on;
    int64_t t_start_ns, t_drawn_ns;
    int permille;
} so_progress;

void so_progress_begin(so_progress *p, const char *label);
void so_progress_set(so_progress *p, double done); /* 0 … 1 */
void so_progress_end(so_progress *p);              /* wipes the line */
/* so_progress_set in the form of a load callback; user is the so_progress. */
void so_progress_callback(void *user, double done);

#endif
