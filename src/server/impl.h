/* What the files of the server share: server.c (lifecycle), http.c (requests and responses),
 * routes.c (endpoints), watch.c (connections, housekeeping), log.c. Nobody else includes this. */
#ifndef SO_SERVER_IMPL_H
#define SO_SERVER_IMPL_H

#include <microhttpd.h>
#include <stdatomic.h>

#include "base/clock.h"
#include "base/mem.h"
#include "server/format.h"
#include "server/server.h"

/* A connection that waits for a request or receives one is quiet; it may be closed. */
typedef struct so_conn {
    struct so_conn *next, *prev;
    int fd;
    bool busy, closing, told; /* told: its job was cancelled */
    int64_t t_since_ns;       /* quiet: since when */
    so_job *job;              /* busy with this one; a reference */
} so_conn;

struct so_server {
    so_server_opts o;
    so_metrics *metrics;
    so_worker *worker;
    struct MHD_Daemon *daemon;
    int listener, port, event_fd;
    bool on_loopback;
    char key_hash[65];
    char fingerprint[48];
    int64_t created_s;

    pthread_mutex_t lock;
    pthread_cond_t tick;
    /* behind the lock */
    so_conn *conns;
    int n_conns;
    so_job *ended; /* to be logged and freed */
    int n_jobs;    /* alive, on whichever side */
    bool draining, hurried, drained, quit;
    int64_t t_drain_ns;
    pthread_t keeper;
    bool has_keeper;

    _Atomic size_t body_bytes; /* of all requests being received */
};

/* One request, from its first header to the last byte of the response. */
typedef struct so_exchange {
    so_server *s;
    struct MHD_Connection *conn;
    so_conn *c;
    const struct so_route *route; /* NULL: none has this path */
    const char *method, *path;    /* MHD's, as long as the request lives */
    so_buf body;
    size_t n_received, body_counted; /* bytes of it, and those in s->body_bytes */
    so_api_error early;              /* status 0: none; answered when the body has been read */
    so_job *job;
    char ignored[480]; /* for X-Sooth-Ignored */
    int status, retry_s;
    int64_t t_start_ns;
} so_exchange;

typedef enum MHD_Result so_handler(so_exchange *x);
typedef struct so_route {
    const char *method, *path;
    so_handler *handle;
    bool open;  /* without the key */
    bool needs; /* the model: 503 before it is loaded and while draining */
} so_route;

/* --- http.c --- */

enum MHD_Result so_http_handle(void *cls, struct MHD_Connection *conn, const char *url,
                               const char *method, const char *version, const char *data,
                               size_t *n_data, void **con_cls);
void so_http_completed(void *cls, struct MHD_Connection *conn, void **con_cls,
                       enum MHD_RequestTerminationCode why);
/* Responses; each ends the exchange. */
enum MHD_Result so_http_send(so_exchange *x, int status, const char *type, so_buf *body);
enum MHD_Result so_http_send_static(so_exchange *x, const char *type, so_str body);
enum MHD_Result so_http_send_json(so_exchange *x, int status, json_t *o);
enum MHD_Result so_http_send_error(so_exchange *x, const so_api_error *e);
enum MHD_Result so_http_send_preflight(so_exchange *x);
enum MHD_Result so_http_stream(so_exchange *x);
const char *so_http_header(const so_exchange *x, const char *name);
so_format so_http_format(const so_server *s);

/* --- routes.c --- */

/* The route of a path, whatever its method first; *allow lists the methods it has. */
const so_route *so_route_find(const char *method, const char *path, const char **allow);
/* Called again when the job has something to say. */
enum MHD_Result so_route_resume(so_exchange *x);

/* --- watch.c --- */

void so_watch_notify(void *cls, struct MHD_Connection *conn, void **socket_context,
                     enum MHD_ConnectionNotificationCode code);
int so_watch_count(so_server *s);
so_conn *so_watch_conn(struct MHD_Connection *conn);
/* job: what it is busy with, NULL: nothing that could be cancelled. */
void so_watch_busy(so_server *s, so_conn *c, so_job *job);
void so_watch_quiet(so_server *s, so_conn *c);
void *so_watch_run(void *server); /* the housekeeper */
/* A job is about to be submitted; it was not, after all. */
void so_watch_began(so_server *s);
void so_watch_unbegan(so_server *s);
/* A job has ended on both sides (so_job.on_end). */
void so_watch_ended(void *server, so_job *job);

void so_client_name(const struct sockaddr *a, char *out, size_t cap);

/* --- server.c --- */

void so_server_poke(so_server *s); /* the state may have changed */

/* --- log.c --- */

void so_log_exchange(so_server *s, const so_exchange *x);
void so_log_job(so_server *s, const so_job *j);

/* --- page.c --- */

so_str so_page(void);
void so_page_policy(so_buf *out); /* its Content-Security-Policy */

#endif
