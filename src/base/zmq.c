/* Finds the functions of libzmq.so.5 (zmq.h). Refuses a library that lacks one of them, or that was
 * built without CURVE. The dynamic loader returns the same library for each call. Any thread. */
#include "base/zmq.h"

#include <dlfcn.h>

#include "base/mem.h"

#define LIBRARY "libzmq.so.5"

int so_zmq_load(so_zmq *out, so_err *err) {
    so_zmq z;
    const struct {
        const char *name;
        void **fn;
    } table[] = {
        {"zmq_ctx_new", (void **)&z.ctx_new},
        {"zmq_ctx_term", (void **)&z.ctx_term},
        {"zmq_socket", (void **)&z.socket},
        {"zmq_close", (void **)&z.close},
        {"zmq_setsockopt", (void **)&z.setsockopt},
        {"zmq_getsockopt", (void **)&z.getsockopt},
        {"zmq_bind", (void **)&z.bind},
        {"zmq_connect", (void **)&z.connect},
        {"zmq_disconnect", (void **)&z.disconnect},
        {"zmq_send", (void **)&z.send},
        {"zmq_recv", (void **)&z.recv},
        {"zmq_poll", (void **)&z.poll},
        {"zmq_socket_monitor", (void **)&z.socket_monitor},
        {"zmq_has", (void **)&z.has},
        {"zmq_curve_keypair", (void **)&z.curve_keypair},
        {"zmq_curve_public", (void **)&z.curve_public},
        {"zmq_z85_encode", (void **)&z.z85_encode},
        {"zmq_strerror", (void **)&z.strerror},
    };
    void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!lib)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "draft workers need ZeroMQ, which is not installed (%s): install the "
                          "package libzmq5",
                          dlerror());
    for (size_t i = 0; i < SO_LEN(table); i++)
        if (!(*table[i].fn = dlsym(lib, table[i].name)))
            return so_err_set(err, SO_EUNSUPPORTED,
                              LIBRARY " has no function %s: version 4.3 or "
                                      "newer is needed",
                              table[i].name);
    if (z.has("curve") != 1)
        return so_err_set(err, SO_EUNSUPPORTED, LIBRARY " was built without CURVE");
    *out = z;
    return SO_OK;
}
