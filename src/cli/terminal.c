/* See terminal.h. The size is asked for on each call: it changes when a window is resized. */
#include "cli/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include "base/env.h"

bool so_terminal_is(int fd) { return isatty(fd) == 1; }

bool so_terminal_takes_control(int fd) { return so_terminal_is(fd) && !so_env_dumb_terminal(); }

bool so_terminal_size(int fd, int *columns, int *rows) {
    struct winsize w;
    if (ioctl(fd, TIOCGWINSZ, &w) != 0 || w.ws_col == 0 || w.ws_row == 0)
        return false;
    *columns = w.ws_col;
    *rows = w.ws_row;
    return true;
}

int so_terminal_columns(int fd, int fallback) {
    int columns = fallback, rows;
    so_terminal_size(fd, &columns, &rows);
    return columns;
}
