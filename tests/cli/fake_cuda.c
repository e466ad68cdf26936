/* A GPU library for tests/cli/test_device.py: a GPU with 64 MiB, of which nothing can be had, or the
 * failure that FAKE_GPU names. */
#include <stdlib.h>
#include <string.h>

#include "backend/backend.h"

static void free_backend(so_backend *b) { free(b); }

static int no_buffer(so_backend *b, size_t n_bytes, so_buffer **out, so_err *err) {
    (void)b;
    (void)out;
    return so_err_set(err, SO_ENOMEM, "a buffer of %zu MB on the GPU: out of memory",
                      n_bytes >> 20);
}

static int no_weight(so_backend *b, const so_tensor *t, so_weight **out, so_err *err) {
    (void)b;
    (void)out;
    return so_err_set(err, SO_ENOMEM, "%.*s: cannot place weights on the GPU: out of memory",
                      SO_STR_ARG(t->name));
}

static int sync(so_backend *b, so_err *err) {
    (void)b;
    (void)err;
    return SO_OK;
}

static int memory(so_backend *b, size_t *n_free, size_t *n_total, so_err *err) {
    (void)b;
    (void)err;
    *n_free = 10 << 20;
    *n_total = 64 << 20;
    return SO_OK;
}

static void describe(const so_backend *b, so_buf *out) {
    (void)b;
    so_buf_append_c(out, "fake");
}

static const so_backend_vt VT = {.name = "cuda",
                                 .remote = true,
                                 .free = free_backend,
                                 .buffer_create = no_buffer,
                                 .weight_create = no_weight,
                                 .sync = sync,
                                 .describe = describe,
                                 .memory = memory};

#ifndef FAKE_ABI
#define FAKE_ABI SO_BACKEND_ABI
#endif
__attribute__((visibility("default"))) const unsigned so_cuda_abi = FAKE_ABI;

__attribute__((visibility("default"))) int so_cuda_backend_create(int device, so_backend **out,
                                                                  so_err *err) {
    const char *fault = getenv("FAKE_GPU");
    if (fault)
        return so_err_set(err, SO_EUNSUPPORTED, "%s", fault);
    if (device > 0)
        return so_err_set(err, SO_ENOTFOUND, "GPU %d does not exist; this machine has 1", device);
    *out = calloc(1, sizeof **out);
    (*out)->vt = &VT;
    (*out)->note = "this GPU has no persistent kernel";
    return SO_OK;
}
