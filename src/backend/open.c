/* Opens a backend by name. Callers pass a name and options and never see the implementation. To add
 * a backend that is linked into the program, add a row to the table. `cuda` and `cuda:N` are not in
 * the table: their name has a number, and their library is loaded at run time (cuda_load.c). Keeps
 * no state; any thread. */
#include <stdio.h>
#include <stdlib.h>
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

/* Reads "cuda" and "cuda:N"; false: something else. */
static bool parse_cuda(const char *name, int *device) {
    *device = 0;
    if (!name || strncmp(name, "cuda", 4) != 0)
        return false;
    size_t n_digits = name[4] == ':' ? strspn(name + 5, "0123456789") : 0;
    if (n_digits > 0 && n_digits <= 6)
        *device = (int)strtol(name + 5, NULL, 10);
    return name[4] == '\0' || (n_digits > 0 && n_digits <= 6 && name[5 + n_digits] == '\0');
}

int so_backend_open(const char *name, const so_backend_opts *o, so_backend **out, so_err *err) {
    char known[64] = "";
    size_t len = 0;
    int device;
    if (parse_cuda(name, &device))
        return so_backend_cuda_create(device, out, err);
    for (size_t i = 0; i < SO_LEN(backends); i++) {
        if (!name || strcmp(name, backends[i].name) == 0)
            return backends[i].create(o, out, err);
        len +=
            (size_t)snprintf(known + len, sizeof known - len, i ? ", %s" : "%s", backends[i].name);
        SO_ASSERT_OP(len, <, sizeof known);
    }
    return so_err_set(err, SO_EINVAL,
                      "unknown backend '%.40s'; use one of %s, cuda or cuda:N "
                      "(N: number of a GPU, from 0)",
                      name, known);
}

void so_backend_free(so_backend *b) {
    if (b)
        b->vt->free(b);
}
