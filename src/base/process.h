/* Other programs: started without a shell, waited for, their output handed on as it comes. */
#ifndef SO_BASE_PROCESS_H
#define SO_BASE_PROCESS_H

#include <stddef.h>

#include "base/err.h"

enum { SO_PROCESS_NULL = -1 }; /* instead of a descriptor: /dev/null */

typedef struct so_process {
    const char *const *argv; /* ends with NULL; argv[0] is looked for on PATH */
    const char *role;        /* "draws the plots": said where it is missing */
    const char *package;     /* Debian's, to install then */
    int in, out, err;        /* descriptors of ours that become its 0, 1 and 2 */
} so_process;

/* Runs it to its end. *status: what it exited with, 128 + n where signal n ended it. SO_ENOTFOUND
 * where it is not installed; a status other than 0 is no error here. */
int so_process_run(const so_process *p, int *status, so_err *err);

/* Takes a piece of output; an error ends the program and is handed on. */
typedef int so_process_sink(void *user, const void *bytes, size_t n, so_err *err);
/* The same with its standard output (p->out does not matter) going to the sink. */
int so_process_read(const so_process *p, so_process_sink *sink, void *user, int *status,
                    so_err *err);

#endif
