/* An OpenAI-compatible HTTP server over the engine.
 *
 *   HTTP threads        parse, check, tokenize, format; never run the model (net.c, http.c)
 *     │ jobs  ▲ wake-ups
 *     ▼       │
 *   engine thread       loads the model, steps the engine (worker.h)
 *   housekeeper         clients that disconnect or are slow, log lines of jobs, drains (watch.c)
 *
 * The server listens before the model is loaded, so health checks always get an answer. Until the
 * model is loaded, and while the server drains, requests that need the model get 503 with
 * Retry-After. */
#ifndef SO_SERVER_SERVER_H
#define SO_SERVER_SERVER_H

#include "server/worker.h"

typedef struct so_server_opts {
    const char *host;         /* address or name to listen on */
    int port;                 /* 0: any free one, see so_server_port */
    const char *model;        /* the model's id in the API */
    bool strict_model;        /* requests that name another model get 404 */
    const char *key;          /* API key; NULL: none is needed */
    const char *cors;         /* origin whose pages may call this server, "*": all; NULL: none */
    const char *const *hosts; /* further names accepted in the Host header. Host is checked if there
                                 are any, or on loopback without a key */
    int n_hosts;
    int n_queue;   /* maximum choices (answers) that wait */
    int n_threads; /* HTTP threads */
    int max_connections;
    size_t max_body;
    int timeout_s; /* for a request to arrive, and for a client to read what is sent */
    int drain_s;   /* for running answers to finish after so_server_drain */
    so_load_fn *load;
    void *load_user;
    bool log_json;
    void (*log)(void *user, so_str line); /* one line per request, without LF; may be NULL */
    void *log_user;
} so_server_opts;

void so_server_defaults(so_server_opts *o);

typedef struct so_server so_server;
/* Listens and starts to load the model. Strings in *o must outlive the server. */
int so_server_create(const so_server_opts *o, so_server **out, so_err *err);
/* Ends running answers with an error, closes all connections, joins all threads. */
void so_server_free(so_server *s);
int so_server_port(const so_server *s);

typedef enum so_server_state {
    SO_SERVER_LOADING,
    SO_SERVER_READY,
    SO_SERVER_DRAINING,
    SO_SERVER_DRAINED, /* no request is left: the server can be freed */
    SO_SERVER_FAILED,  /* the model could not be loaded */
    SO_SERVER_LOST,    /* the device failed for good */
} so_server_state;
so_server_state so_server_get_state(so_server *s);
const char *so_server_state_name(so_server_state s);
void so_server_error(so_server *s, so_err *out); /* why it is FAILED or LOST */
/* An eventfd that is readable when the state may have changed: read it, then get the state. */
int so_server_fd(const so_server *s);
/* Refuses new requests and lets running ones finish, for at most drain_s seconds. */
void so_server_drain(so_server *s);

#endif
