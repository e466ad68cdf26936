/* Requests in, responses out: the glue to libmicrohttpd.
 *
 * A request is answered when its body has been read, also where the answer is an error: a client
 * that is still sending would not see it otherwise. Only a body far too large is cut off. What is
 * kept of bodies, one and all together, is bounded.
 *
 * A connection whose job has nothing to say is suspended, under the job's lock, and resumed by the
 * engine thread, under the same lock: so a wake-up is never lost, and a suspended connection is
 * never freed. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/sha256.h"
#include "server/impl.h"

enum { MAX_BODIES = 8 }; /* times max_body, of all requests */
enum { MAX_DISCARD = 16 << 20, STREAM_BLOCK = 16 << 10 };

const char *so_http_header(const so_exchange *x, const char *name) {
    return MHD_lookup_connection_value(x->conn, MHD_HEADER_KIND, name);
}

so_format so_http_format(const so_server *s) {
    return (so_format){.model = s->o.model,
                       .fingerprint = s->fingerprint,
                       .tok = so_worker_serving(s->worker)->b->tok};
}

/* --- responses --- */

static const char *allowed_origin(const so_exchange *x) {
    const char *origin = so_http_header(x, "Origin"), *cors = x->s->o.cors;
    if (!origin || !cors)
        return NULL;
    return strcmp(cors, "*") == 0 ? "*" : strcmp(cors, origin) == 0 ? cors : NULL;
}

static void add_headers(const so_exchange *x, struct MHD_Response *r, const char *type) {
    const char *origin = allowed_origin(x);
    if (type)
        MHD_add_response_header(r, "Content-Type", type);
    MHD_add_response_header(r, "X-Content-Type-Options", "nosniff");
    if (x->ignored[0])
        MHD_add_response_header(r, "X-Sooth-Ignored", x->ignored);
    if (x->job)
        MHD_add_response_header(r, "X-Request-Id", x->job->id);
    if (origin) {
        MHD_add_response_header(r, "Access-Control-Allow-Origin", origin);
        MHD_add_response_header(r, "Access-Control-Expose-Headers",
                                "X-Sooth-Ignored, X-Request-Id, Retry-After");
        MHD_add_response_header(r, "Vary", "Origin");
    }
    if (so_server_get_state(x->s) == SO_SERVER_DRAINING)
        MHD_add_response_header(r, "Connection", "close");
}

static enum MHD_Result queue(so_exchange *x, int status, struct MHD_Response *r) {
    if (!r)
        return MHD_NO;
    x->status = status;
    if (!x->job)
        so_watch_busy(x->s, x->c, NULL);
    enum MHD_Result ok = MHD_queue_response(x->conn, (unsigned)status, r);
    MHD_destroy_response(r);
    return ok;
}

enum MHD_Result so_http_send(so_exchange *x, int status, const char *type, so_buf *body) {
    struct MHD_Response *r =
        MHD_create_response_from_buffer(body->len, body->data, MHD_RESPMEM_MUST_FREE);
    if (r) {
        add_headers(x, r, type);
        MHD_add_response_header(r, "Cache-Control", "no-store");
    } else {
        free(body->data);
    }
    *body = (so_buf){0};
    return queue(x, status, r);
}

enum MHD_Result so_http_send_static(so_exchange *x, const char *type, so_str body) {
    so_buf policy = {0};
    struct MHD_Response *r = MHD_create_response_from_buffer(body.len, (void *)(uintptr_t)body.ptr,
                                                             MHD_RESPMEM_PERSISTENT);
    if (r) {
        add_headers(x, r, type);
        MHD_add_response_header(r, "Cache-Control", "no-cache");
        so_page_policy(&policy);
        MHD_add_response_header(r, "Content-Security-Policy", policy.data);
        MHD_add_response_header(r, "Referrer-Policy", "no-referrer");
        so_buf_free(&policy);
    }
    return queue(x, 200, r);
}

enum MHD_Result so_http_send_json(so_exchange *x, int status, json_t *o) {
    so_buf body = {0};
    so_format_json(o, &body);
    so_buf_append_char(&body, '\n');
    return so_http_send(x, status, "application/json", &body);
}

enum MHD_Result so_http_send_preflight(so_exchange *x) {
    const char *allow = NULL;
    so_api_error e;
    so_route_find(x->method, x->path, &allow);
    if (!allowed_origin(x)) {
        so_api_fail(&e, 405, "method_not_allowed", NULL, "%.100s takes %s", x->path, allow);
        return so_http_send_error(x, &e);
    }
    struct MHD_Response *r = MHD_create_response_from_buffer(0, NULL, MHD_RESPMEM_PERSISTENT);
    if (r) {
        add_headers(x, r, NULL);
        MHD_add_response_header(r, "Access-Control-Allow-Methods", allow);
        /* Clients add headers of their own (x-stainless-…); whose page it is was checked. */
        const char *asked = so_http_header(x, "Access-Control-Request-Headers");
        MHD_add_response_header(r, "Access-Control-Allow-Headers",
                                asked ? asked : "Authorization, Content-Type");
        MHD_add_response_header(r, "Access-Control-Max-Age", "600");
    }
    return queue(x, 204, r);
}

static void add_error_headers(const so_exchange *x, int status, struct MHD_Response *r) {
    const char *allow = NULL;
    char seconds[16];
    if (status == 429 || status == 503) {
        snprintf(seconds, sizeof seconds, "%d", x->retry_s > 0 ? x->retry_s : 2);
        MHD_add_response_header(r, "Retry-After", seconds);
    }
    if (status == 401)
        MHD_add_response_header(r, "WWW-Authenticate", "Bearer");
    if (status == 413)
        MHD_add_response_header(r, "Connection", "close");
    if (status == 405) {
        so_route_find(x->method, x->path, &allow);
        MHD_add_response_header(r, "Allow", allow);
    }
}

enum MHD_Result so_http_send_error(so_exchange *x, const so_api_error *e) {
    so_buf body = {0};
    so_format_json(so_api_error_json(e), &body);
    so_buf_append_char(&body, '\n');
    struct MHD_Response *r =
        MHD_create_response_from_buffer(body.len, body.data, MHD_RESPMEM_MUST_FREE);
    if (r) {
        add_headers(x, r, "application/json");
        add_error_headers(x, e->status, r);
    }
    return queue(x, e->status, r);
}

/* --- streams --- */

typedef struct stream {
    so_job *job;
    struct MHD_Connection *conn;
    so_format format;
} stream;

static ssize_t read_stream(void *cls, uint64_t pos, char *to, size_t max) {
    stream *st = cls;
    so_job *j = st->job;
    (void)pos;
    pthread_mutex_lock(&j->lock);
    if (j->out_at == j->out.len && !j->out_done) {
        so_buf_clear(&j->out);
        j->out_at = 0;
        j->out_done = so_format_stream(&st->format, j, &j->out);
    }
    size_t n = SO_MIN(max, j->out.len - j->out_at);
    if (n > 0) {
        memcpy(to, j->out.data + j->out_at, n);
        j->out_at += n;
    } else if (!j->out_done) {
        j->asleep = true;
        MHD_suspend_connection(st->conn);
    }
    bool over = n == 0 && j->out_done;
    pthread_mutex_unlock(&j->lock);
    return over ? MHD_CONTENT_READER_END_OF_STREAM : (ssize_t)n;
}

static void free_stream(void *cls) {
    stream *st = cls;
    so_job_release(st->job);
    free(st);
}

enum MHD_Result so_http_stream(so_exchange *x) {
    stream *st = SO_NEW(stream);
    *st = (stream){.job = x->job, .conn = x->conn, .format = so_http_format(x->s)};
    so_job_acquire(x->job);
    struct MHD_Response *r = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, STREAM_BLOCK,
                                                               read_stream, st, free_stream);
    if (r) {
        add_headers(x, r, "text/event-stream; charset=utf-8");
        MHD_add_response_header(r, "Cache-Control", "no-cache");
        MHD_add_response_header(r, "X-Accel-Buffering", "no"); /* nginx: pass on at once */
    } else {
        free_stream(st);
    }
    return queue(x, 200, r);
}

/* --- who may ask --- */

/* Equal hashes, compared without leaving early: time tells nothing of the key. */
static bool has_key(const so_exchange *x) {
    const char *auth = so_http_header(x, "Authorization");
    if (!auth || strncasecmp(auth, "Bearer ", 7) != 0)
        return false;
    auth += 7;
    auth += strspn(auth, " ");
    so_sha256 h;
    char hex[65];
    unsigned char diff = 0;
    so_sha256_init(&h);
    so_sha256_add(&h, auth, strlen(auth));
    so_sha256_hex(&h, hex);
    for (int i = 0; i < 64; i++)
        diff |= (unsigned char)(hex[i] ^ x->s->key_hash[i]);
    return diff == 0;
}

/* A page of another site may send requests from a visitor's browser to a server that only the
 * visitor can reach; the browser says whose page it was. */
static bool is_foreign(const so_exchange *x) {
    const char *origin = so_http_header(x, "Origin"), *host = so_http_header(x, "Host");
    if (!origin || allowed_origin(x))
        return false;
    const char *at = strstr(origin, "://");
    return !at || !host || strcasecmp(at + 3, host) != 0;
}

/* The name in a Host header, without port, brackets and the dot at its end. */
static so_str name_in(const char *host) {
    so_str s = so_str_c(host);
    if (host[0] == '[' && strchr(host, ']')) {
        s = (so_str){host + 1, strcspn(host + 1, "]")};
    } else {
        s.len = strcspn(host, ":");
        s.len -= s.len > 0 && host[s.len - 1] == '.';
    }
    return s;
}

static bool is_name(so_str s, const char *name) {
    return s.len == strlen(name) && strncasecmp(s.ptr, name, s.len) == 0;
}

static bool is_loopback_name(so_str s) {
    static const char LOCAL[] = "localhost";
    char text[64];
    struct in_addr v4;
    struct in6_addr v6;
    size_t n = sizeof LOCAL - 1;
    if (s.len >= n && strncasecmp(s.ptr + s.len - n, LOCAL, n) == 0)
        return s.len == n || s.ptr[s.len - n - 1] == '.'; /* every name under it is ours, too */
    snprintf(text, sizeof text, "%.*s", (int)SO_MIN(s.len, sizeof text - 1), s.ptr);
    if (inet_pton(AF_INET, text, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    return inet_pton(AF_INET6, text, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

/* A name of another site can be made to lead to this machine after its page was loaded (DNS
 * rebinding): to the browser our server is then part of that site, and Origin and Host agree. So a
 * server that only this machine can reach is asked by a name of this machine, or by one that it was
 * told. With a key there is nothing to gain: the page does not have it. */
static bool has_foreign_host(const so_exchange *x) {
    const so_server *s = x->s;
    const char *host = so_http_header(x, "Host");
    if (!host || !s->on_loopback || s->o.key)
        return false;
    so_str name = name_in(host);
    bool known = is_loopback_name(name) || is_name(name, s->o.host);
    for (int i = 0; i < s->o.n_hosts && !known; i++)
        known = is_name(name, s->o.hosts[i]);
    return !known;
}

static enum MHD_Result count_length(void *cls, enum MHD_ValueKind kind, const char *name,
                                    const char *value) {
    (void)kind;
    (void)value;
    *(int *)cls += strcasecmp(name, "Content-Length") == 0;
    return MHD_YES;
}

/* Where a body ends must be told once: a proxy in front may believe the other of two lengths, and
 * take what follows for a request. */
static bool has_clear_end(const so_exchange *x) {
    int n = 0;
    MHD_get_connection_values(x->conn, MHD_HEADER_KIND, count_length, &n);
    return n + (so_http_header(x, "Transfer-Encoding") != NULL) <= 1;
}

static bool is_encoded(const so_exchange *x) {
    const char *coding = so_http_header(x, "Content-Encoding");
    return coding && strcasecmp(coding, "identity") != 0;
}

/* What can be said before the body is read. */
static void check_early(so_exchange *x, const char *version) {
    so_api_error *e = &x->early;
    const char *allow = NULL, *length = so_http_header(x, "Content-Length");
    const so_server_opts *o = &x->s->o;
    x->route = so_route_find(x->method, x->path, &allow);
    if (!has_clear_end(x))
        so_api_fail(e, 400, "ambiguous_length", NULL, "the request states its length twice");
    else if (length && strtoull(length, NULL, 10) > o->max_body)
        so_api_fail(e, 413, "body_too_large", NULL,
                    "the body has %.20s bytes: this server takes at most %zu (--max-body)", length,
                    o->max_body);
    else if (!so_http_header(x, "Host") && strcmp(version, MHD_HTTP_VERSION_1_1) == 0)
        so_api_fail(e, 400, "missing_host", NULL, "the request has no Host header");
    else if (has_foreign_host(x))
        so_api_fail(e, 403, "foreign_host", NULL,
                    "Host '%.80s' is not a name of this server, which listens for this machine "
                    "alone; --allow-host NAME allows it",
                    so_http_header(x, "Host"));
    else if (!allow)
        so_api_fail(e, 404, "unknown_path", NULL, "there is no %.100s here", x->path);
    else if (is_foreign(x))
        so_api_fail(e, 403, "foreign_origin", NULL,
                    "requests from pages of other sites (Origin: %.80s) are not allowed; the "
                    "server's --cors can allow them",
                    so_http_header(x, "Origin"));
    else if (!x->route)
        so_api_fail(e, 405, "method_not_allowed", NULL, "%.100s takes %s, not %.16s", x->path,
                    allow, x->method);
    else if (is_encoded(x))
        so_api_fail(e, 415, "unsupported_encoding", NULL,
                    "Content-Encoding '%.40s': send the body as it is",
                    so_http_header(x, "Content-Encoding"));
    else if (o->key && !x->route->open && !has_key(x))
        so_api_fail(e, 401, "invalid_api_key", NULL,
                    "give the server's key as 'Authorization: Bearer KEY'");
    if (e->status)
        so_metrics_refused(x->s->metrics, "bad_http");
}

/* --- requests --- */

/* A proxy may be asked with the whole address, and pass it on so. */
static const char *path_of(const char *url) {
    if (strncasecmp(url, "http://", 7) != 0)
        return url;
    const char *path = strchr(url + 7, '/');
    return path ? path : "/";
}

static so_exchange *begin(so_server *s, struct MHD_Connection *conn, const char *url,
                          const char *method, const char *version) {
    so_exchange *x = SO_NEW(so_exchange);
    *x = (so_exchange){.s = s,
                       .conn = conn,
                       .c = so_watch_conn(conn),
                       .method = method,
                       .path = path_of(url),
                       .t_start_ns = so_clock_ns()};
    x->body.max = s->o.max_body;
    check_early(x, version);
    return x;
}

/* What all requests hold, with n bytes more. */
static size_t count_bytes(so_exchange *x, size_t n) {
    x->body_counted += n;
    return atomic_fetch_add(&x->s->body_bytes, n) + n;
}

/* False: enough, the connection is to be closed. */
static bool take_body(so_exchange *x, const char *data, size_t n) {
    so_server *s = x->s;
    x->n_received += n;
    if (x->n_received > s->o.max_body + MAX_DISCARD)
        return false;
    if (x->early.status)
        return true;
    if (x->n_received > s->o.max_body)
        so_api_fail(&x->early, 413, "body_too_large", NULL,
                    "the body has more than %zu bytes, which is what this server takes "
                    "(--max-body)",
                    s->o.max_body);
    else if (count_bytes(x, n) > MAX_BODIES * s->o.max_body)
        so_api_fail(&x->early, 503, "overloaded", NULL,
                    "the server is receiving too much at once: try again");
    else
        so_buf_append(&x->body, data, n);
    return true;
}

/* An error that need not wait for the body: it is not worth reading to its end, nobody knows where
 * that is, or the client asks before it sends. */
static bool is_answered_early(const so_exchange *x) {
    const char *length = so_http_header(x, "Content-Length");
    const char *expect = so_http_header(x, "Expect");
    if (!x->early.status)
        return false;
    return (length && strtoull(length, NULL, 10) > MAX_DISCARD) || !has_clear_end(x) ||
           (expect && strcasecmp(expect, "100-continue") == 0);
}

static bool check_state(so_exchange *x, so_api_error *e) {
    switch (so_server_get_state(x->s)) {
    case SO_SERVER_READY:
        return true;
    case SO_SERVER_LOADING:
        return so_api_fail(e, 503, "loading", NULL, "the model is being loaded: try again");
    case SO_SERVER_FAILED:
        return so_api_fail(e, 503, "failed", NULL, "the model could not be loaded");
    default:
        return so_api_fail(e, 503, "draining", NULL, "the server is about to stop");
    }
}

static enum MHD_Result answer(so_exchange *x) {
    so_api_error e;
    if (x->early.status)
        return so_http_send_error(x, &x->early);
    if (x->route->needs && !check_state(x, &e)) {
        so_metrics_refused(x->s->metrics, "not_ready");
        return so_http_send_error(x, &e);
    }
    return x->route->handle(x);
}

enum MHD_Result so_http_handle(void *cls, struct MHD_Connection *conn, const char *url,
                               const char *method, const char *version, const char *data,
                               size_t *n_data, void **con_cls) {
    so_exchange *x = *con_cls;
    if (!x) {
        *con_cls = x = begin(cls, conn, url, method, version);
        return is_answered_early(x) ? so_http_send_error(x, &x->early) : MHD_YES;
    }
    if (x->job)
        return so_route_resume(x);
    if (*n_data > 0) {
        bool ok = take_body(x, data, *n_data);
        *n_data = 0;
        return ok ? MHD_YES : MHD_NO;
    }
    return answer(x);
}

void so_http_completed(void *cls, struct MHD_Connection *conn, void **con_cls,
                       enum MHD_RequestTerminationCode why) {
    so_server *s = cls;
    so_exchange *x = *con_cls;
    (void)conn;
    if (!x)
        return;
    if (why != MHD_REQUEST_TERMINATED_COMPLETED_OK)
        x->status = 499; /* nobody is there to read it */
    so_watch_quiet(s, x->c);
    atomic_fetch_sub(&s->body_bytes, x->body_counted);
    so_metrics_http(s->metrics, x->route ? x->route->path : "other", x->status,
                    so_clock_ms_since(x->t_start_ns) * 1e-3);
    if (x->job) {
        pthread_mutex_lock(&x->job->lock);
        x->job->status = x->status;
        bool done = x->job->state == SO_JOB_DONE;
        pthread_mutex_unlock(&x->job->lock);
        if (!done)
            x->job->cancelled = true; /* ends at the next step */
        so_job_release(x->job);
    } else {
        so_log_exchange(s, x);
    }
    so_buf_free(&x->body);
    free(x);
    *con_cls = NULL;
}
