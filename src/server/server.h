/* An OpenAI-compatible HTTP server over the engine.
 *
 *   HTTP threads        parse, check, encode, format; never compute
 *     │ jobs  ▲ wake
 *     ▼       │
 *   engine thread       loads the model, steps the engine (worker.h)
 *   housekeeper         gone and slow clients, the log, the end of a drain (watch.c)
 *
 * It listens before the model is loaded, so that health checks have something to ask: until then
 * and while it drains, requests get 503 with Retry-After. */
#ifndef SO_SERVER_SERVER_H
#define SO_SERVER_SERVER_H

#include "server/worker.h"

typedef struct so_server_opts {
    const char *host;         /* an address or a name */
    int port;                 /* 0: any, see so_server_port */
    const char *model;        /* its id in the API */
    bool strict_model;        /* other names get 404 */
    const char *key;          /* NULL: everybody may ask */
    const char *cors;         /* allowed origin, "*": all; NULL: none but our own */
    const char *const *hosts; /* names by which a server on loopback may be asked, beside its own */
    int n_hosts;
    int n_queue;   /* answers that may wait */
    int n_threads; /* for HTTP */
    int max_connections;
    size_t max_body;
    int timeout_s; /* for a request to arrive, for a client to take what is sent */
    int drain_s;   /* how long running answers may take after so_server_drain */
    so_load_fn *load;
    void *load_user;
    bool log_json;
    void (*log)(void *user, so_str line); /* a line per request, without its end; may be NULL */
    void *log_user;
} so_server_opts;

void so_server_defaults(so_server_opts *o);

typedef struct so_server so_server;
/* Listens and begins to load. Strings of *o are borrowed. */
int so_server_create(const so_server_opts *o, so_server **out, so_err *err);
/* Ends everything at once. */
void so_server_free(so_server *s);
int so_server_port(const so_server *s);

typedef enum so_server_state {
    SO_SERVER_LOADING,
    SO_SERVER_READY,
    SO_SERVER_DRAINING,
    SO_SERVER_DRAINED, /* nothing is left to do: free it */
    SO_SERVER_FAILED,  /* the model could not be loaded */
} so_server_state;
so_server_state so_server_get_state(so_server *s);
const char *so_server_state_name(so_server_state s);
void so_server_error(so_server *s, so_err *out); /* of FAILED */
/* Readable whenever the state may have changed (an eventfd: read it, then ask). */
int so_server_fd(const so_server *s);
/* Refuses new work, lets what runs finish. */
void so_server_drain(so_server *s);

/* Tells a service manager, if there is one (NOTIFY_SOCKET): "READY=1", "STOPPING=1", …. */
void so_notify(const char *state);

#endif
