/* What the output streams are connected to: a terminal or not, its size, and what may be written to
 * it. Every control sequence of cli/ is guarded by one of these functions, so none ever reaches a
 * file, a pipe or a terminal that cannot interpret it. */
#ifndef SO_CLI_TERMINAL_H
#define SO_CLI_TERMINAL_H

#include <stdbool.h>

/* The descriptor is a terminal, of whatever kind. */
bool so_terminal_is(int fd);
/* A terminal that takes control sequences: TERM is set and not "dumb". */
bool so_terminal_takes_control(int fd);
/* Columns and rows. False, with both left alone, where the size is unknown. */
bool so_terminal_size(int fd, int *columns, int *rows);
/* Columns of the terminal, or `fallback` where fd is none or its width is unknown. */
int so_terminal_columns(int fd, int fallback);

#endif
