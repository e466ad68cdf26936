/* Runs other programs without a shell, waits for them, and streams their output to a function. */
#ifndef SO_BASE_PROCESS_H
#define SO_BASE_PROCESS_H

#include <stddef.h>
#include <sys/types.h>

#include "base/err.h"

enum { SO_PROCESS_NULL = -1 }; /* as a descriptor: /dev/null */

typedef struct so_process {
    const char *const *argv; /* ends with NULL; argv[0] is searched in PATH */
    const char *role;        /* "draws the plots": for the message if the program is missing */
    const char *package;     /* the Debian package that has it, for the same message */
    int in, out, err;        /* our descriptors that become its 0, 1 and 2 */
    /* For callers that handle SIGINT themselves, else NULL. SIGINT is then blocked in the program,
     * and *child is its process id while it runs and 0 otherwise, so that a signal handler can end
     * it. */
    _Atomic(pid_t) *child;
} so_process;

/* Runs the program and waits for it. *status is its exit status, or 128 + n if signal n ended it; a
 * status other than 0 is not an error here. SO_ENOTFOUND: the program is not installed. */
int so_process_run(const so_process *p, int *status, so_err *err);

/* Receives a piece of output. An error kills the program and becomes the result. */
typedef int so_process_sink(void *user, const void *bytes, size_t n, so_err *err);
/* As so_process_run, but standard output goes to the sink (p->out is ignored). */
int so_process_read(const so_process *p, so_process_sink *sink, void *user, int *status,
                    so_err *err);

#endif
