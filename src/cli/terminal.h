/* What the output streams are connected to: a terminal or not, its size, and what may be written to
 * it. Every control sequence of cli/ is guarded by one of these functions, so none ever reaches a
 * file, a pipe or a terminal that cannot interpret it. */
#ifndef SO_CLI_TERMINAL_H
#define SO_CLI_TERMINAL_H

#include <stdbool.h>

/* Whether the descriptor is a terminal of any kind. */
bool so_terminal_is(int fd);
/* Whether it is a terminal that supports control sequences: TERM is set and not "dumb". */
bool so_terminal_takes_control(int fd);
/* Sets columns and rows. Returns false, with both unchanged, if the size is unknown. */
bool so_terminal_size(int fd, int *columns, int *rows);
/* Columns of the terminal, or `fallback` if fd is not a terminal or its width is unknown. */
int so_terminal_columns(int fd, int fallback);

#endif
