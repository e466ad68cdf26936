/* Runs gnuplot with the script as its standard input and the SVG as its standard output.
 *
 * Both are unnamed files, not pipes: a gnuplot that ends early can neither kill the program with
 * SIGPIPE nor block it. The path is not part of the script, so it needs no quoting. This file does
 * not depend on what is drawn. Main thread only. */
#include "cli/plot.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/process.h"

static const char FONT[] = "DejaVu Sans,Helvetica,sans-serif";

/* An unnamed file with the whole script, positioned at its start; NULL with errno set. */
static FILE *script_file(so_str script, int width, int height) {
    FILE *f = tmpfile();
    if (!f)
        return NULL;
    fprintf(f, "set terminal svg size %d,%d dynamic background '#ffffff' font '%s,12'\n", width,
            height, FONT);
    fwrite(script.ptr, 1, script.len, f);
    if (fflush(f) != 0 || ferror(f) || fseek(f, 0, SEEK_SET) != 0) {
        fclose(f);
        return NULL;
    }
    return f;
}

static int draw(int in_fd, int out_fd, so_err *err) {
    static const char *const argv[] = {"gnuplot", "-d", "-", NULL}; /* -d: no start-up file */
    const so_process gnuplot = {.argv = argv,
                                .role = "draws the plots",
                                .package = "gnuplot-nox",
                                .in = in_fd,
                                .out = out_fd,
                                .err = STDERR_FILENO};
    int status, rc = so_process_run(&gnuplot, &status, err);
    if (rc == SO_OK && status != 0)
        rc = so_err_set(err, SO_EIO, "gnuplot failed with status %d", status);
    return rc;
}

static int save(FILE *svg, const char *path, so_err *err) {
    so_out_file *out;
    char block[16384];
    size_t n;
    rewind(svg);
    int rc = so_out_begin(path, &out, err);
    if (rc != SO_OK)
        return rc;
    while (rc == SO_OK && (n = fread(block, 1, sizeof block, svg)) > 0)
        rc = so_out_write(out, block, n, err);
    if (rc == SO_OK && (ferror(svg) || so_out_tell(out) == 0))
        rc = so_err_set(err, SO_EIO, "gnuplot wrote no plot for %s", path);
    if (rc == SO_OK)
        return so_out_commit(out, err);
    so_out_abort(out);
    return rc;
}

int so_plot_svg(so_str script, int width, int height, const char *path, so_err *err) {
    FILE *in = script_file(script, width, height), *svg = tmpfile();
    int rc = in && svg
                 ? draw(fileno(in), fileno(svg), err)
                 : so_err_set(err, SO_EIO, "cannot write a scratch file: %s", strerror(errno));
    if (rc == SO_OK)
        rc = save(svg, path, err);
    if (in)
        fclose(in);
    if (svg)
        fclose(svg);
    return rc;
}
