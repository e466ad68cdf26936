/* Writes log lines to stderr. A line is formatted into a buffer and written with one call, so that
 * lines of two threads never interleave. Lines over about 1200 bytes are truncated. */
#include "base/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static _Atomic int max_level = SO_LOG_WARN;
static struct {
    void (*fn)(void *user);
    void *user;
} hook;

void so_log_set_level(so_log_level level) { atomic_store(&max_level, (int)level); }

void so_log_set_hook(void (*fn)(void *user), void *user) {
    hook.fn = fn;
    hook.user = user;
}

void so_log(so_log_level level, const char *fmt, ...) {
    static const char *const names[] = {"error", "warning", "info", "debug"};
    if ((int)level > atomic_load(&max_level))
        return;
    char line[1200];
    int n = snprintf(line, sizeof line, "sooth: %s: ", names[level]);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line + n, sizeof line - (size_t)n - 1, fmt, ap);
    va_end(ap);
    if (hook.fn)
        hook.fn(hook.user);
    fprintf(stderr, "%s\n", line);
}
