/* Plots as SVG files, drawn by gnuplot, which is found on PATH and needed for nothing else. */
#ifndef SO_CLI_PLOT_H
#define SO_CLI_PLOT_H

#include "base/err.h"
#include "base/str.h"

/* Runs a gnuplot script and leaves its SVG under `path`; the script sets neither terminal nor
 * output. A file that was there before is replaced only by a finished one. Errors name the package
 * to install where gnuplot is missing. */
int so_plot_svg(so_str script, int width, int height, const char *path, so_err *err);

#endif
