/* What the files of the server share. Private to src/server:
 *
 *   server.c      lifecycle: listen, start and stop the threads, the server's state
 *   net.c         connections: sockets, HTTP framing, the threads that serve them
 *   http_parse.c  pure parsers of request heads and bodies
 *   http.c        one request: access checks, body limits, response headers
 *   routes.c      the endpoints
 *   watch.c       the housekeeper: clients that disconnect or are too slow, log lines of jobs,
 *                 drains
 *   log.c         the access log
 *   page.c        the page at /
 *
 * A request goes net.c → http.c → routes.c → job.h → worker.c (the engine thread), and its answer
 * comes back as job.h → format.c → http.c → net.c.
 *
 * Locks: a loop's lock may be taken under a job's, and the metrics' under the server's. No other
 * two locks are held together. */
#ifndef SO_SERVER_IMPL_H
#define SO_SERVER_IMPL_H

#include <stdatomic.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/mem.h"
#include "server/format.h"
#include "server/http_parse.h"
#include "server/server.h"

typedef struct so_exchange so_exchange;
typedef struct so_loop so_loop;

typedef enum so_conn_state { /* net.c has a drawing */
                             SO_CONN_HEAD,
                             SO_CONN_BODY,
                             SO_CONN_WAIT,
                             SO_CONN_WRITE,
                             SO_CONN_LINGER,
                             SO_CONN_CLOSED,
} so_conn_state;

/* A client's connection. */
typedef struct so_conn {
    /* constant */
    int fd;
    so_loop *loop;
    char client[64]; /* the client's address */

    /* watch.c, guarded by the server's lock. A connection is busy from the end of a request to the
     * end of its response. A connection that is not busy may be closed if it is idle for too
     * long. */
    struct so_conn *next, *prev;
    bool busy, lingering;
    bool closing;               /* shutdown() was called on fd */
    bool cancel_sent;           /* the client disconnected, and its job was cancelled */
    so_job *job;                /* the job of the request; a reference */
    _Atomic int64_t t_since_ns; /* when it was accepted, became busy, idle or lingering, or sent its
                                   last byte, whichever is latest */
    _Atomic bool blocked;       /* the socket is full: the client does not read */

    /* net.c, only on the thread of `loop` */
    so_conn_state state;
    uint32_t events; /* polled for; 0: not in the epoll set */
    struct so_conn *next_woken;
    so_buf in;                  /* received bytes */
    size_t in_at;               /* number of bytes of `in` that have been parsed */
    size_t head_seen;           /* number of bytes after in_at known to hold no end of a head */
    so_head head;               /* of the current request */
    so_body body;               /* its body's framing */
    so_exchange *x;             /* the current request; NULL: none */
    bool keep_alive;            /* the connection stays open after the response */
    bool streaming;             /* more of the response comes from so_http_read_stream */
    so_buf out;                 /* response head, or a piece of a stream */
    so_str body_out;            /* response body, sent after `out` */
    so_buf body_owned;          /* its memory, unless it is constant */
    size_t out_at, body_out_at; /* bytes sent of each */
    size_t n_dropped;           /* LINGER: bytes read and dropped */
} so_conn;

struct so_server {
    so_server_opts o;
    so_metrics *metrics;
    so_worker *worker;
    so_loop *loops;
    int n_loops;
    int listener, port, event_fd;
    bool on_loopback;
    char key_hash[65];
    char fingerprint[48];
    int64_t created_s;

    pthread_mutex_t lock;
    pthread_cond_t tick; /* wakes the housekeeper */
    /* guarded by the lock */
    so_conn *conns; /* all connections, the newest first */
    int n_conns;
    so_job *ended; /* jobs to be logged and freed */
    int n_jobs;    /* jobs that exist, running or not yet logged */
    bool draining;
    bool hurried; /* the drain timeout has passed, running answers were ended */
    bool drained;
    bool quit;
    int64_t t_drain_ns;

    pthread_t housekeeper;
    _Atomic size_t body_bytes; /* of all request bodies being received */
};

/* One request, from its head to the last byte of the response. */
struct so_exchange {
    so_server *s;
    so_conn *c;
    const struct so_route *route; /* NULL: no endpoint has this path and method */
    const char *method, *path;    /* in c->head; "-" for a malformed request */
    so_buf body;
    size_t n_received;        /* bytes of the body so far */
    size_t body_counted;      /* bytes of this body that are included in s->body_bytes */
    so_api_error early_error; /* found in the head, sent after the body was read; status 0: none */
    so_job *job;              /* generation; NULL: answered at once */
    char ignored[480];        /* for the header X-Sooth-Ignored */
    int status;               /* of the response; 499: it could not be sent */
    int retry_s;              /* for Retry-After; 0: the default */
    int64_t t_start_ns;
};

typedef void so_handler(so_exchange *x);
typedef struct so_route {
    const char *method, *path;
    so_handler *handle;
    bool no_key;      /* allowed without the API key */
    bool needs_model; /* 503 while the model is loading and while the server drains */
} so_route;

/* --- net.c --- */

/* Serves s->listener with s->o.n_threads threads. */
int so_net_start(so_server *s, so_err *err);
/* Ends the threads and closes all connections. No job may be running. */
void so_net_stop(so_server *s);

/* A handler calls exactly one of the next three functions, once. `headers` holds whole lines. The
 * body is `owned`, which is taken over, or else `constant`, which lives as long as the program. */
void so_net_reply(so_conn *c, int status, const so_buf *headers, so_buf *owned, so_str constant);
/* Status 200 with a body that so_http_read_stream supplies. */
void so_net_stream(so_conn *c, const so_buf *headers);
/* No response yet: so_http_resume is called after so_net_wake. */
void so_net_sleep(so_conn *c);

/* Any thread; exactly once for each sleep. */
void so_net_wake(so_conn *c);

/* --- http.c: called by net.c on the connection's thread --- */

/* Begins the request in c->head. expects_continue: the client waits for a response before it sends
 * the body. May respond at once. */
so_exchange *so_http_begin(so_server *s, so_conn *c, bool expects_continue);
/* Begins a request whose head could not be parsed; so_http_refuse responds to it. */
so_exchange *so_http_begin_bad(so_server *s, so_conn *c);
/* A piece of the body. May respond at once; the rest of the body is then discarded. */
void so_http_receive(so_exchange *x, so_str piece);
/* The body is complete: respond. */
void so_http_answer(so_exchange *x);
/* The connection was woken before its response began. */
void so_http_resume(so_exchange *x);
/* Responds to a malformed request. */
void so_http_refuse(so_exchange *x, const so_api_error *e);
/* The next piece of a stream, valid until the next call. END may come with a last piece. */
typedef enum so_http_more { SO_HTTP_MORE, SO_HTTP_SLEEP, SO_HTTP_END } so_http_more;
so_http_more so_http_read_stream(so_exchange *x, so_str *piece);
/* Ends and frees the request. sent: the whole response was sent. */
void so_http_completed(so_exchange *x, bool sent);

/* --- http.c: responses, for handlers --- */

void so_http_send(so_exchange *x, int status, const char *type, so_buf *body);
void so_http_send_static(so_exchange *x, const char *type, so_str body);
void so_http_send_json(so_exchange *x, int status, json_t *o);
void so_http_send_error(so_exchange *x, const so_api_error *e);
void so_http_send_preflight(so_exchange *x);
void so_http_stream(so_exchange *x);
const char *so_http_header(const so_exchange *x, const char *name); /* NULL: not sent */
so_format so_http_format(const so_server *s);

/* --- routes.c --- */

/* NULL: no such path, or another method. *allow lists the methods of the path; NULL: no such path.
 */
const so_route *so_route_find(const char *method, const char *path, const char **allow);
/* Responds if the job of x has something to send, else puts the connection to sleep. */
void so_route_resume(so_exchange *x);

/* --- watch.c --- */

void so_watch_add(so_server *s, so_conn *c);
void so_watch_remove(so_server *s, so_conn *c); /* frees it */
so_conn *so_watch_first(so_server *s);          /* any connection that is left; NULL: none */
int so_watch_count(so_server *s);
/* A job was submitted, or a response without a job begins: until so_watch_quiet the connection
 * counts as busy. If the client disconnects, the job is cancelled. job may be NULL. */
void so_watch_busy(so_server *s, so_conn *c, so_job *job);
/* The response has ended. */
void so_watch_quiet(so_server *s, so_conn *c);
/* The connection is to be closed once the client has stopped sending. */
void so_watch_linger(so_server *s, so_conn *c);
void so_watch_progress(so_conn *c); /* bytes were sent */
void so_watch_blocked(so_conn *c, bool blocked);
void *so_watch_run(void *server);        /* the housekeeper thread */
void so_watch_job_begin(so_server *s);   /* call before a job is submitted */
void so_watch_job_abandon(so_server *s); /* the submission failed */
/* so_job.on_end: the last reference was released. The housekeeper logs and frees the job. */
void so_watch_job_end(void *server, so_job *job);

void so_client_name(const struct sockaddr *a, char *out, size_t cap);

/* --- server.c --- */

void so_server_signal(so_server *s); /* makes so_server_fd readable: the state may have changed */

/* --- log.c --- */

void so_log_exchange(so_server *s, const so_exchange *x);
void so_log_job(so_server *s, const so_job *j);

/* --- page.c --- */

so_str so_page(void);
void so_page_policy(so_buf *out); /* its Content-Security-Policy */

#endif
