/* SVG plots made by gnuplot, which is found on PATH and needed for nothing else. */
#ifndef SO_CLI_PLOT_H
#define SO_CLI_PLOT_H

#include "base/err.h"
#include "base/str.h"

/* Runs a gnuplot script and writes its SVG to `path`; the script sets neither terminal nor output.
 * An existing file is replaced only by a complete one. If gnuplot is missing, the error names
 * the package to install. */
int so_plot_svg(so_str script, int width, int height, const char *path, so_err *err);

#endif
