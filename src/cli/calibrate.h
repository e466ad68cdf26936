/* `sooth calibrate`: calibrate.c measures and grows a tree, calibrate_show.c shows it as text, JSON,
 * SVG or mask. Main thread. */
#ifndef SO_CLI_CALIBRATE_H
#define SO_CLI_CALIBRATE_H

#include "cli/options.h"
#include "draft/shape.h"

/* Prints the tree as --json, --show, --mask and --svg ask. Returns the exit status. */
int so_calibrate_show(const so_args *a, const so_shape *s, const so_shape_table *t);

#endif
