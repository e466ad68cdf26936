/* Two texts side by side on a terminal, each growing in its own column. See demo_columns.c. */
#ifndef SO_CLI_DEMO_COLUMNS_H
#define SO_CLI_DEMO_COLUMNS_H

#include "base/str.h"

enum { SO_COLUMNS_MIN_WIDTH = 88 }; /* narrower terminals show the texts one below the other */

typedef struct so_columns so_columns;

/* Opens an area of `height` rows below the cursor, which must be at the beginning of a line. It has
 * two columns, titled `left` and `right`, which divide the `width` cells of the terminal. */
so_columns *so_columns_open(int width, int height, const char *left, const char *right);
/* Appends text to a column (0 or 1) in a colour ("\033[32m", or "" for none) and draws it. */
void so_columns_add(so_columns *c, int column, so_str text, const char *color);
/* Moves the cursor to the beginning of the line after the texts, and frees c. NULL is allowed. */
void so_columns_close(so_columns *c);

/* Number of cells of a text in one line; a control character takes one, a line break none. */
int so_columns_width(so_str text);

#endif
