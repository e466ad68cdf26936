/* One line, redrawn at most twenty times a second and erased at the end.
 *
 * The line is one column shorter than the terminal, whose width is read at each drawing: a line
 * that wraps cannot be erased with "\r\033[K". If the terminal is too narrow, the remaining time is
 * omitted first, then the bar, then the label. The remaining time is shown after one second, when
 * the rate is known. Main thread only. */
#include "cli/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "cli/terminal.h"

enum { MAX_BAR = 30, MIN_BAR = 5, MAX_LINE = 120, REDRAW_NS = 50000000 };

static void erase(void *user) {
    so_progress *p = user;
    fputs("\r\033[K", stderr);
    fflush(stderr);
    p->permille = -1;
}

void so_progress_begin(so_progress *p, const char *label) {
    *p = (so_progress){
        .label = label, .on = so_terminal_takes_control(STDERR_FILENO), .permille = -1};
    p->t_start_ns = so_clock_ns();
    if (p->on)
        so_log_set_hook(erase, p);
    so_progress_set(p, 0);
}

/* The line, at most `room` columns wide: "label [###...]  42%  9 s left". */
static void format_line(const so_progress *p, double done, int room, char line[MAX_LINE + 1]) {
    double s = (double)(so_clock_ns() - p->t_start_ns) * 1e-9;
    char bar[MAX_BAR + 4] = "", left[32] = "", percent[8];
    int n_label = (int)strlen(p->label);
    room = SO_MIN(room, (int)MAX_LINE);
    snprintf(percent, sizeof percent, "%3d%%", (int)(done * 100));
    int n_bar = SO_MIN(room - n_label - (int)strlen(" [] 100%"), (int)MAX_BAR);
    if (n_bar >= MIN_BAR) {
        snprintf(bar, sizeof bar, "[%*s] ", n_bar, "");
        for (int i = 0; i < n_bar; i++)
            bar[1 + i] = i < (int)(done * n_bar) ? '#' : '.';
    }
    if (s > 1 && done > 0 && done < 1)
        snprintf(left, sizeof left, "  %.0f s left", s / done - s);
    int n = n_label + 1 + (int)strlen(bar) + (int)strlen(percent);
    if (n + (int)strlen(left) > room)
        left[0] = '\0';
    snprintf(line, (size_t)room + 1, "%s%s%s%s%s", n <= room ? p->label : "", n <= room ? " " : "",
             bar, percent, left);
}

void so_progress_set(so_progress *p, double done) {
    if (!p->on)
        return;
    done = done < 0 ? 0 : done > 1 ? 1 : done;
    int permille = (int)(done * 1000);
    int64_t now = so_clock_ns();
    if (permille == p->permille || (permille < 1000 && now - p->t_drawn_ns < REDRAW_NS))
        return;
    p->permille = permille;
    p->t_drawn_ns = now;
    char line[MAX_LINE + 1];
    format_line(p, done, so_terminal_columns(STDERR_FILENO, 80) - 1, line);
    fprintf(stderr, "\r\033[K%s", line);
    fflush(stderr);
}

void so_progress_end(so_progress *p) {
    if (p->on) {
        erase(p);
        so_log_set_hook(NULL, NULL);
    }
    p->on = false;
}

void so_progress_callback(void *user, double done) { so_progress_set(user, done); }
