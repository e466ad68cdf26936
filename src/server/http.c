/* Requests and responses: which requests are allowed, and the headers of every response.
 *
 * A response, an error included, is sent only after the request's body has been read, because many
 * clients do not read a response while they are sending. There are two exceptions: errors sent to a
 * client that waits for "100 Continue", and bodies longer than --max-body. The memory for bodies is
 * bounded, for one request (--max-body) and for all requests together.
 *
 * A connection sleeps while its job has nothing to send. It starts to sleep under the job's lock,
 * and the engine thread wakes it under the same lock, so a wake-up is never lost. All functions run
 * on the thread of the connection. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/sha256.h"
#include "server/impl.h"

enum { MAX_BODIES = 8 }; /* all bodies together may have MAX_BODIES · max_body bytes */
enum { STREAM_BLOCK = 16 << 10 };

const char *so_http_header(const so_exchange *x, const char *name) {
    return so_head_get(&x->c->head, name);
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

static void add(so_buf *headers, const char *name, const char *value) {
    so_buf_printf(headers, "%s: %s\r\n", name, value);
}

static void add_headers(const so_exchange *x, so_buf *h, const char *type) {
    const char *origin = allowed_origin(x);
    if (type)
        add(h, "Content-Type", type);
    add(h, "X-Content-Type-Options", "nosniff");
    if (x->ignored[0])
        add(h, "X-Sooth-Ignored", x->ignored);
    if (x->job)
        add(h, "X-Request-Id", x->job->id);
    if (origin) {
        add(h, "Access-Control-Allow-Origin", origin);
        add(h, "Access-Control-Expose-Headers", "X-Sooth-Ignored, X-Request-Id, Retry-After");
        add(h, "Vary", "Origin");
    }
}

/* Called before the head of the response is written, which states whether the connection closes. */
static void begin_response(so_exchange *x, int status) {
    x->status = status;
    if (so_server_get_state(x->s) == SO_SERVER_DRAINING)
        x->c->keep_alive = false;
    if (!x->job)
        so_watch_busy(x->s, x->c, NULL);
}

static void reply(so_exchange *x, int status, so_buf *headers, so_buf *owned, so_str fixed) {
    begin_response(x, status);
    so_net_reply(x->c, status, headers, owned, fixed);
    so_buf_free(headers);
}

void so_http_send(so_exchange *x, int status, const char *type, so_buf *body) {
    so_buf h = {0};
    add_headers(x, &h, type);
    add(&h, "Cache-Control", "no-store");
    reply(x, status, &h, body, (so_str){0});
}

void so_http_send_static(so_exchange *x, const char *type, so_str body) {
    so_buf h = {0}, policy = {0};
    add_headers(x, &h, type);
    add(&h, "Cache-Control", "no-cache");
    so_page_policy(&policy);
    add(&h, "Content-Security-Policy", policy.data);
    add(&h, "Referrer-Policy", "no-referrer");
    so_buf_free(&policy);
    reply(x, 200, &h, NULL, body);
}

void so_http_send_json(so_exchange *x, int status, json_t *o) {
    so_buf body = {0};
    so_format_json(o, &body);
    so_buf_append_char(&body, '\n');
    so_http_send(x, status, "application/json", &body);
}

void so_http_send_preflight(so_exchange *x) {
    const char *allow = NULL;
    so_api_error e;
    so_buf h = {0};
    so_route_find(x->method, x->path, &allow);
    if (!allowed_origin(x)) {
        so_api_fail(&e, 405, "method_not_allowed", NULL, "%.100s supports only %s", x->path, allow);
        so_http_send_error(x, &e);
        return;
    }
    add_headers(x, &h, NULL);
    add(&h, "Access-Control-Allow-Methods", allow);
    /* Clients send their own headers (x-stainless-…). All are allowed: the origin was checked. */
    const char *asked = so_http_header(x, "Access-Control-Request-Headers");
    add(&h, "Access-Control-Allow-Headers", asked ? asked : "Authorization, Content-Type");
    add(&h, "Access-Control-Max-Age", "600");
    reply(x, 204, &h, NULL, (so_str){0});
}

static void add_error_headers(so_exchange *x, int status, so_buf *h) {
    const char *allow = NULL;
    if (status == 429 || status == 503)
        so_buf_printf(h, "Retry-After: %d\r\n", x->retry_s > 0 ? x->retry_s : 2);
    if (status == 401)
        add(h, "WWW-Authenticate", "Bearer");
    if (status == 413)
        x->c->keep_alive = false;
    if (status == 405) {
        so_route_find(x->method, x->path, &allow);
        add(h, "Allow", allow);
    }
}

void so_http_send_error(so_exchange *x, const so_api_error *e) {
    so_buf body = {0}, h = {0};
    so_format_json(so_api_error_json(e), &body);
    so_buf_append_char(&body, '\n');
    add_headers(x, &h, "application/json");
    add_error_headers(x, e->status, &h);
    reply(x, e->status, &h, &body, (so_str){0});
}

/* --- streams --- */

so_http_more so_http_read_stream(so_exchange *x, so_str *piece) {
    so_job *j = x->job;
    so_format f = so_http_format(x->s);
    pthread_mutex_lock(&j->lock);
    if (j->out_at == j->out.len && !j->out_done) {
        so_buf_clear(&j->out);
        j->out_at = 0;
        j->out_done = so_format_stream(&f, j, &j->out);
    }
    size_t n = SO_MIN((size_t)STREAM_BLOCK, j->out.len - j->out_at);
    *piece = (so_str){so_buf_str(&j->out).ptr + j->out_at, n};
    j->out_at += n;
    j->asleep = n == 0 && !j->out_done;
    so_http_more more = j->asleep                                ? SO_HTTP_SLEEP
                        : j->out_done && j->out_at == j->out.len ? SO_HTTP_END
                                                                 : SO_HTTP_MORE;
    pthread_mutex_unlock(&j->lock);
    return more;
}

void so_http_stream(so_exchange *x) {
    so_buf h = {0};
    add_headers(x, &h, "text/event-stream; charset=utf-8");
    add(&h, "Cache-Control", "no-cache");
    add(&h, "X-Accel-Buffering", "no"); /* nginx: do not buffer */
    begin_response(x, 200);
    so_net_stream(x->c, &h);
    so_buf_free(&h);
}

/* --- access --- */

/* Compares hashes in constant time, so that timing reveals nothing about the key. */
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

/* Whether the request comes from a web page of another site. Such a page can make a visitor's
 * browser send requests to a server that only the visitor can reach. The browser then sends the
 * page's site as Origin. */
static bool has_foreign_origin(const so_exchange *x) {
    const char *origin = so_http_header(x, "Origin"), *host = so_http_header(x, "Host");
    if (!origin || allowed_origin(x))
        return false;
    const char *at = strstr(origin, "://");
    return !at || !host || strcasecmp(at + 3, host) != 0;
}

/* The name in a Host header, without port, brackets and trailing dot; the whole header if it is not
 * of the form NAME or NAME:PORT. */
static so_str name_in(const char *host) {
    bool bracket = host[0] == '[' && strchr(host, ']');
    so_str s = {host + bracket, strcspn(host + bracket, bracket ? "]" : ":")};
    const char *port = s.ptr + s.len + bracket;
    if (*port && (*port != ':' || port[1 + strspn(port + 1, "0123456789")]))
        return so_str_c(host);
    s.len -= !bracket && s.len > 0 && s.ptr[s.len - 1] == '.';
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
        return s.len == n || s.ptr[s.len - n - 1] == '.'; /* names under localhost are loopback */
    snprintf(text, sizeof text, "%.*s", (int)SO_MIN(s.len, sizeof text - 1), s.ptr);
    if (inet_pton(AF_INET, text, &v4) == 1)
        return ntohl(v4.s_addr) >> 24 == 127;
    return inet_pton(AF_INET6, text, &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

/* Whether the Host header has a name that is not this machine's: the sign of DNS rebinding. In that
 * attack a site, once its page is loaded, changes its DNS entry to the address of this machine. The
 * browser then treats this server as part of the site, and Origin and Host agree. So a server on
 * loopback without a key accepts only names of this machine and those of --allow-host. With a key
 * the check is not needed, because the page does not have the key. With --allow-host any server
 * checks. */
static bool has_foreign_host(const so_exchange *x) {
    const so_server *s = x->s;
    const char *host = so_http_header(x, "Host");
    if (!host || (s->o.n_hosts == 0 && (!s->on_loopback || s->o.key)))
        return false;
    so_str name = name_in(host);
    bool known = is_loopback_name(name) || is_name(name, s->o.host);
    for (int i = 0; i < s->o.n_hosts && !known; i++)
        known = is_name(name, s->o.hosts[i]);
    return !known;
}

static bool is_encoded(const so_exchange *x) {
    const char *coding = so_http_header(x, "Content-Encoding");
    return coding && strcasecmp(coding, "identity") != 0;
}

/* Whether the request may have a body, but does not state its length. By RFC 9112 the body is empty,
 * but the client may have meant otherwise. */
static bool lacks_length(const so_head *h) {
    return (so_head_is(h, "POST") || so_head_is(h, "PUT") || so_head_is(h, "PATCH")) &&
           !h->chunked && !so_head_get(h, "Content-Length");
}

/* Everything that can be checked before the body is read. */
static void check_early(so_exchange *x) {
    so_api_error *e = &x->early_error;
    const char *allow = NULL;
    const so_head *head = &x->c->head;
    const so_server_opts *o = &x->s->o;
    x->route = so_route_find(x->method, x->path, &allow);
    if (head->length > o->max_body)
        so_api_fail(e, 413, "body_too_large", NULL,
                    "the body has %llu bytes; this server accepts at most %zu (--max-body)",
                    (unsigned long long)head->length, o->max_body);
    else if (!so_http_header(x, "Host") && head->minor > 0)
        so_api_fail(e, 400, "missing_host", NULL, "the request has no Host header");
    else if (has_foreign_host(x))
        so_api_fail(e, 403, "foreign_host", NULL,
                    "Host '%.80s' is not a name that this server accepts; start the server with "
                    "--allow-host NAME to allow this name",
                    so_http_header(x, "Host"));
    else if (!allow)
        so_api_fail(e, 404, "unknown_path", NULL, "this server has no path %.100s", x->path);
    else if (has_foreign_origin(x))
        so_api_fail(e, 403, "foreign_origin", NULL,
                    "requests from pages of other sites (Origin: %.80s) are refused; start the "
                    "server with --cors ORIGIN to allow them",
                    so_http_header(x, "Origin"));
    else if (!x->route)
        so_api_fail(e, 405, "method_not_allowed", NULL, "%.100s supports only %s, not %.16s",
                    x->path, allow, x->method);
    else if (is_encoded(x))
        so_api_fail(e, 415, "unsupported_encoding", NULL,
                    "Content-Encoding '%.40s' is not supported: send the body uncompressed",
                    so_http_header(x, "Content-Encoding"));
    else if (o->key && !x->route->no_key && !has_key(x))
        so_api_fail(e, 401, "invalid_api_key", NULL,
                    "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'");
    else if (lacks_length(head))
        so_api_fail(e, 411, "length_required", NULL,
                    "the request does not state the length of its body: send Content-Length");
    if (e->status)
        so_metrics_refused(x->s->metrics, "bad_http");
}

/* --- requests --- */

static so_exchange *create(so_server *s, so_conn *c, const char *method, const char *path) {
    so_exchange *x = SO_NEW(so_exchange);
    *x = (so_exchange){.s = s, .c = c, .method = method, .path = path, .t_start_ns = so_clock_ns()};
    x->body.max = s->o.max_body;
    return x;
}

so_exchange *so_http_begin(so_server *s, so_conn *c, bool expects_continue) {
    so_exchange *x = create(s, c, c->head.method, c->head.path);
    check_early(x);
    c->keep_alive = c->keep_alive && !lacks_length(&c->head); /* a body may follow */
    if (x->early_error.status && (expects_continue || c->head.length > x->s->o.max_body)) {
        /* The client waits for an answer before it sends the body, or the body is too large to be
         * read. */
        c->keep_alive = c->keep_alive && c->body.state == SO_BODY_DONE;
        so_http_send_error(x, &x->early_error);
    }
    return x;
}

so_exchange *so_http_begin_bad(so_server *s, so_conn *c) { return create(s, c, "-", "-"); }

void so_http_refuse(so_exchange *x, const so_api_error *e) {
    so_metrics_refused(x->s->metrics, "bad_http");
    so_http_send_error(x, e);
}

/* Adds n to the number of body bytes of all requests; returns the new number. */
static size_t count_bytes(so_exchange *x, size_t n) {
    x->body_counted += n;
    return atomic_fetch_add(&x->s->body_bytes, n) + n;
}

static void keep_piece(so_exchange *x, so_str piece) {
    so_server *s = x->s;
    if (x->n_received > s->o.max_body)
        so_api_fail(&x->early_error, 413, "body_too_large", NULL,
                    "the body has more than %zu bytes, the maximum of this server (--max-body)",
                    s->o.max_body);
    else if (count_bytes(x, piece.len) > MAX_BODIES * s->o.max_body)
        so_api_fail(&x->early_error, 503, "overloaded", NULL,
                    "the server is receiving too many bytes at once: try again later");
    else
        so_buf_append_str(&x->body, piece);
}

/* After an early error the body is read to its end, so that the connection can stay open, unless
 * the body is too long. */
void so_http_receive(so_exchange *x, so_str piece) {
    x->n_received += piece.len;
    if (!x->early_error.status)
        keep_piece(x, piece);
    if (x->early_error.status && x->n_received > x->s->o.max_body) {
        x->c->keep_alive = false;
        so_http_send_error(x, &x->early_error);
    }
}

static bool check_state(so_exchange *x, so_api_error *e) {
    so_err err = {0};
    switch (so_server_get_state(x->s)) {
    case SO_SERVER_READY:
        return true;
    case SO_SERVER_LOADING:
        return so_api_fail(e, 503, "loading", NULL, "the model is being loaded: try again later");
    case SO_SERVER_FAILED:
        return so_api_fail(e, 503, "failed", NULL, "the model could not be loaded");
    case SO_SERVER_LOST:
        so_server_error(x->s, &err);
        return so_api_fail(e, 503, "device_lost", NULL,
                           "the server's device is lost: %s; the server must be restarted",
                           err.msg);
    default:
        return so_api_fail(e, 503, "draining", NULL, "the server is shutting down");
    }
}

void so_http_answer(so_exchange *x) {
    so_api_error e;
    if (x->early_error.status) {
        so_http_send_error(x, &x->early_error);
    } else if (x->route->needs_model && !check_state(x, &e)) {
        so_metrics_refused(x->s->metrics, "not_ready");
        so_http_send_error(x, &e);
    } else {
        x->route->handle(x);
    }
}

void so_http_resume(so_exchange *x) { so_route_resume(x); }

void so_http_completed(so_exchange *x, bool sent) {
    so_server *s = x->s;
    if (!sent)
        x->status = 499; /* the client disconnected before the response was sent */
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
            x->job->cancelled = true; /* the engine ends the job at the next step */
        so_job_release(x->job);
    } else {
        so_log_exchange(s, x);
    }
    so_buf_free(&x->body);
    free(x);
}
