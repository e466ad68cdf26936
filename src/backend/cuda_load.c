/* Opens the CUDA backend, which is a library of its own (libsooth_cuda.so), so that the program runs
 * unchanged on machines without a GPU and builds without CUDA.
 *
 * The library is searched for in the program's folder, in ../lib from there, and where the dynamic
 * loader looks. It is loaded once and never unloaded, because the CUDA driver in it keeps threads
 * running. Any thread may call this. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "backend/cpu/cpu.h"
#include "base/log.h"

#define LIBRARY "libsooth_cuda.so"

typedef int create_fn(int device, so_backend **out, so_err *err);

/* Writes the path of `tail` in the program's folder to `out`. Returns false if the folder is not
 * known or the path does not fit. */
static bool beside_program(const char *tail, char *out, size_t cap) {
    ssize_t n = readlink("/proc/self/exe", out, cap - 1);
    if (n <= 0)
        return false;
    out[n] = '\0';
    char *slash = strrchr(out, '/');
    if (!slash || (size_t)(slash - out) + strlen(tail) + 2 > cap)
        return false;
    memcpy(slash + 1, tail, strlen(tail) + 1);
    return true;
}

static void *load(char *why, size_t why_cap) {
    static const char *const TAILS[] = {LIBRARY, "../lib/" LIBRARY};
    char path[4096];
    for (int i = 0; i < 2; i++) {
        if (!beside_program(TAILS[i], path, sizeof path) || access(path, F_OK) != 0)
            continue;
        void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (lib)
            return lib;
        snprintf(why, why_cap, "%s", dlerror());
        return NULL;
    }
    void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        snprintf(why, why_cap, "%s", dlerror());
    return lib;
}

static int create(int device, so_backend **out, so_err *err) {
    char why[300];
    void *lib = load(why, sizeof why);
    if (!lib)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "the GPU library could not be loaded: %s; build it with `make cuda`",
                          why);
    create_fn *fn = NULL;
    *(void **)&fn = dlsym(lib, "so_cuda_backend_create");
    const unsigned *abi = dlsym(lib, "so_cuda_abi");
    if (!fn || !abi || *abi != SO_BACKEND_ABI)
        return so_err_set(err, SO_EUNSUPPORTED,
                          LIBRARY " is from another version of sooth; build it with `make cuda`");
    return fn(device, out, err);
}

int so_backend_cuda_create(int device, so_backend **out, so_err *err) {
    so_err why = {0};
    int rc = create(device, out, &why);
    if (rc == SO_OK && (*out)->note)
        so_log(SO_LOG_DEBUG, "cuda:%d: %s", device, (*out)->note);
    if (rc == SO_OK)
        return rc;
    return so_err_set(err, rc, "cuda:%d: %.400s (--device cpu needs no GPU)", device, why.msg);
}
