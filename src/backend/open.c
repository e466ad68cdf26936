/* Opens a backend by name. Callers pass a name and options and never see the implementation. To add
 * a backend that is linked into the program, add a row to the table. `cuda` and `cuda:N` are not in
 * the table: their name has a number, and their library is loaded at run time (cuda_load.c). Keeps
 * no state; any thread. */
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
    int device = 0;
    char end;
    if (name && (strcmp(name, "cuda") == 0 || sscanf(name, "cuda:%d%c", &device, &end) == 1))
        return so_backend_cuda_create(device, out, err);
    for (size_t i = 0; i < SO_LEN(backends); i++) {
        if (!name || strcmp(name, backends[i].name) == 0)
            return backends[i].create(o, out, err);
        len +=
            (size_t)snprintf(known + len, sizeof known - len, i ? ", %s" : "%s", backends[i].name);
        SO_ASSERT_OP(len, <, sizeof known);
    }
    return so_err_set(err, SO_EINVAL, "unknown backend '%.40s'; use one of %s, cuda or cuda:N",
                      name, known);
}

void so_backend_free(so_backend *b) {
    if (b)
        b->vt->free(b);
}
