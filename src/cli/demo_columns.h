/* Two texts side by side on a terminal, each growing in its own column. See demo_columns.c. */
#ifndef SO_CLI_DEMO_COLUMNS_H
#define SO_CLI_DEMO_COLUMNS_H

#include "base/str.h"

enum { SO_COLUMNS_MIN_WIDTH = 88 }; /* of a terminal; narrower columns are a strain to read */

typedef struct so_columns so_columns;

/* A field of `height` rows under the cursor, which must stand at the beginning of a line; two
 * columns of a terminal of `width` cells. */
so_columns *so_columns_open(int width, int height, const char *left, const char *right);
/* Text at the end of a column (0 or 1), in a colour ("\033[32m"; "" is none), drawn at once. */
void so_columns_add(so_columns *c, int column, so_str text, const char *color);
/* Leaves the cursor at the beginning of the line behind the texts, and frees c. NULL is fine. */
void so_columns_close(so_columns *c);

/* Cells that a text takes in one line; control characters take none. */
int so_columns_width(so_str text);

#endif
