/* The table of backends by name. Callers pass a name and options and never see the implementation;
 * adding a backend is one row in this table. Keeps no state; any thread may call it. */
#include <stdio.h>
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"

static const struct {
    const char *name;
    int (*create)(const so_backend_opts *o, so_backend **out, so_err *err);
} backends[] = {
    {"cpu", so_backend_cpu_create}, /* the default */
    {"deferred", so_backend_deferred_create},
};

int so_backend_open(const char *name, const so_backend_opts *o, so_backend **out, so_err *err) {
    char known[64] = "";
    size_t len = 0;
    for (size_t i = 0; i < SO_LEN(backends); i++) {
        if (!name || strcmp(name, backends[i].name) == 0)
            return backends[i].create(o, out, err);
        len +=
            (size_t)snprintf(known + len, sizeof known - len, i ? ", %s" : "%s", backends[i].name);
        SO_ASSERT_OP(len, <, sizeof known);
    }
    return so_err_set(err, SO_EINVAL, "unknown backend '%.40s'; use one of %s", name, known);
}

void so_backend_free(so_backend *b) {
    if (b)
        b->vt->free(b);
}
