/* One line, redrawn at most twenty times a second. The bar shows the time left only after a second
 * has passed, when the rate means something. */
#include "cli/progress.h"

#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"

enum { WIDTH = 30 };

static void wipe(void *user) {
    so_progress *p = user;
    fputs("\r\033[K", stderr);
    p->permille = -1;
}

void so_progress_begin(so_progress *p, const char *label) {
    *p = (so_progress){.label = label, .on = isatty(STDERR_FILENO) == 1, .permille = -1};
    p->t_start_ns = so_clock_ns();
    if (p->on)
        so_log_set_hook(wipe, p);
    so_progress_set(p, 0);
}

void so_progress_set(so_progress *p, double done) {
    if (!p->on)
        return;
    done = done < 0 ? 0 : done > 1 ? 1 : done;
    int permille = (int)(done * 1000);
    int64_t now = so_clock_ns();
    if (permille == p->permille || (permille < 1000 && now - p->t_drawn_ns < 50000000))
        return;
    p->permille = permille;
    p->t_drawn_ns = now;
    char bar[WIDTH + 1];
    for (int i = 0; i < WIDTH; i++)
        bar[i] = i < (int)(done * WIDTH) ? '#' : '.';
    bar[WIDTH] = '\0';
    double s = (double)(now - p->t_start_ns) * 1e-9;
    fprintf(stderr, "\r\033[K%s [%s] %3d%%", p->label, bar, permille / 10);
    if (s > 1 && done > 0 && done < 1)
        fprintf(stderr, "  %.0f s left", s / done - s);
    fflush(stderr);
}

void so_progress_end(so_progress *p) {
    if (p->on) {
        wipe(p);
        so_log_set_hook(NULL, NULL);
    }
    p->on = false;
}

void so_progress_callback(void *user, double done) { so_progress_set(user, done); }
