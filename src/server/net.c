/* Connections: sockets, HTTP/1.1 framing, and the threads that serve them.
 *
 * The server implements HTTP itself. It used libmicrohttpd before. That library answers malformed
 * requests itself, in HTML, some of them twice, and has no hook to change this. Checking requests
 * before the library sees them would need the parser of this server anyway, and filtering the
 * library's output would copy every token once more.
 *
 * There are a few threads (loops), each with an epoll set. A connection belongs to the loop that
 * accepted it. No other thread uses the connection, except through so_net_wake and the members that
 * watch.c guards.
 *
 *   HEAD ──▶ BODY ──▶ WAIT ⇄ WRITE ──▶ HEAD (keep-alive) or LINGER or closed
 *    └─── malformed: one JSON error ─────▶ LINGER
 *
 *   HEAD    collects the head of a request
 *   BODY    reads the body and passes on each piece
 *   WAIT    sleeps until so_net_wake, because the request's job has nothing to send. In this state
 *           the connection is neither polled nor freed; watch.c looks for clients that disconnect
 *   WRITE   sends the response; asks for more of a stream when everything was sent
 *   LINGER  the response was sent and the connection is to be closed, but the client may still be
 *           sending: closing now would reset the connection, and the client might lose the response
 *
 * A request is answered exactly once: after a response the connection continues with the bytes
 * after the request, or reads no further request at all. */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "server/impl.h"

enum {
    THREAD_STACK = 8 << 20, /* JSON and templates are parsed by recursion, to bounded depths */
    MAX_LINGER = 16 << 20,  /* bytes that are read and dropped before a connection is closed */
    ACCEPT_BATCH = 16,
    MAX_EVENTS = 64,
    PAUSE_MS = 50, /* before accepting again, after too many connections or open descriptors */
};

struct so_loop {
    so_server *s;
    pthread_t thread;
    int epoll, event; /* event: an eventfd, readable when `woken` is not empty or `quit` is set */
    bool accepting;
    pthread_mutex_t lock;
    so_conn *woken; /* guarded by the lock */
    bool quit;      /* guarded by the lock */
};

/* --- polling --- */

/* `events` 0 removes the connection from the set: a member would report a hang-up again and
 * again. */
static void poll_for(so_conn *c, uint32_t events) {
    struct epoll_event ev = {.events = events, .data.ptr = c};
    if (events == c->events)
        return;
    int op = events == 0 ? EPOLL_CTL_DEL : c->events == 0 ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
    SO_ASSERT_OP(epoll_ctl(c->loop->epoll, op, c->fd, &ev), ==, 0);
    c->events = events;
}

static void poke(const so_loop *l) {
    uint64_t one = 1;
    if (write(l->event, &one, sizeof one) < 0)
        so_log(SO_LOG_DEBUG, "eventfd: it is readable already");
}

void so_net_wake(so_conn *c) {
    so_loop *l = c->loop;
    pthread_mutex_lock(&l->lock);
    c->next_woken = l->woken;
    l->woken = c;
    pthread_mutex_unlock(&l->lock);
    poke(l);
}

/* --- the life of a connection --- */

static void forget_request(so_conn *c, bool sent) {
    if (c->x)
        so_http_completed(c->x, sent);
    c->x = NULL;
    so_head_free(&c->head);
    so_buf_free(&c->out);
    so_buf_free(&c->body_owned);
    c->out_at = c->body_out_at = 0;
    c->body_out = (so_str){0};
    c->streaming = false;
    c->head_seen = 0;
}

/* Unregisters the connection before it closes the descriptor: watch.c uses the descriptors of
 * registered connections. */
static void close_conn(so_conn *c) {
    int fd = c->fd;
    poll_for(c, 0);
    forget_request(c, false);
    so_buf_free(&c->in);
    so_watch_remove(c->loop->s, c);
    close(fd);
}

static void linger(so_conn *c) {
    c->state = SO_CONN_LINGER;
    c->n_dropped = 0;
    so_watch_linger(c->loop->s, c);
    shutdown(c->fd, SHUT_WR);
}

/* --- responses --- */

static const char *phrase_of(int status) {
    static const struct {
        int status;
        const char *phrase;
    } PHRASES[] = {
        {200, "OK"},
        {204, "No Content"},
        {400, "Bad Request"},
        {401, "Unauthorized"},
        {403, "Forbidden"},
        {404, "Not Found"},
        {405, "Method Not Allowed"},
        {411, "Length Required"},
        {413, "Content Too Large"},
        {414, "URI Too Long"},
        {415, "Unsupported Media Type"},
        {429, "Too Many Requests"},
        {431, "Request Header Fields Too Large"},
        {499, "Client Closed Request"},
        {500, "Internal Server Error"},
        {501, "Not Implemented"},
        {503, "Service Unavailable"},
        {505, "HTTP Version Not Supported"},
    };
    for (size_t i = 0; i < SO_LEN(PHRASES); i++)
        if (PHRASES[i].status == status)
            return PHRASES[i].phrase;
    return "Error";
}

/* "Date: Sun, 06 Nov 1994 08:49:37 GMT": the names do not depend on a locale. */
static void put_date(so_buf *out) {
    static const char days[][4] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
    static const char months[][4] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                     "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    time_t now = time(NULL);
    struct tm t;
    gmtime_r(&now, &t);
    so_buf_printf(out, "Date: %s, %02d %s %d %02d:%02d:%02d GMT\r\n", days[t.tm_wday], t.tm_mday,
                  months[t.tm_mon], t.tm_year + 1900, t.tm_hour, t.tm_min, t.tm_sec);
}

static void put_head(so_conn *c, int status, const so_buf *headers) {
    SO_ASSERT(c->out.len == 0);
    so_buf_printf(&c->out, "HTTP/1.1 %d %s\r\n", status, phrase_of(status));
    put_date(&c->out);
    if (!c->keep_alive)
        so_buf_append_c(&c->out, "Connection: close\r\n");
    else if (c->head.minor == 0)
        so_buf_append_c(&c->out, "Connection: keep-alive\r\n");
    so_buf_append_str(&c->out, so_buf_str(headers));
    c->state = SO_CONN_WRITE;
}

void so_net_reply(so_conn *c, int status, const so_buf *headers, so_buf *owned, so_str constant) {
    bool has_body = status != 204;
    put_head(c, status, headers);
    if (has_body)
        so_buf_printf(&c->out, "Content-Length: %zu\r\n", owned ? owned->len : constant.len);
    so_buf_append_c(&c->out, "\r\n");
    if (owned) {
        c->body_owned = *owned;
        *owned = (so_buf){0};
        c->body_out = so_buf_str(&c->body_owned);
    } else {
        c->body_out = constant;
    }
    if (!has_body || so_head_is(&c->head, "HEAD"))
        c->body_out.len = 0;
}

/* HTTP/1.0 has no chunks: the end of the connection ends the stream. */
void so_net_stream(so_conn *c, const so_buf *headers) {
    c->keep_alive = c->keep_alive && c->head.minor > 0;
    put_head(c, 200, headers);
    so_buf_append_c(&c->out, c->head.minor > 0 ? "Transfer-Encoding: chunked\r\n\r\n" : "\r\n");
    c->streaming = true;
}

void so_net_sleep(so_conn *c) { c->state = SO_CONN_WAIT; }

/* --- writing --- */

/* Sends `out` and `body_out`. 1: all sent, 0: the socket is full, −1: the client is gone. */
static int flush(so_conn *c) {
    for (;;) {
        struct iovec parts[2] = {{c->out.data + c->out_at, c->out.len - c->out_at},
                                 {(char *)(uintptr_t)c->body_out.ptr + c->body_out_at,
                                  c->body_out.len - c->body_out_at}};
        struct msghdr m = {.msg_iov = parts, .msg_iovlen = 2};
        if (parts[0].iov_len + parts[1].iov_len == 0)
            return 1;
        ssize_t n = sendmsg(c->fd, &m, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
        size_t from_out = SO_MIN((size_t)n, parts[0].iov_len);
        c->out_at += from_out;
        c->body_out_at += (size_t)n - from_out;
        so_watch_progress(c);
    }
}

/* Puts the next piece of a stream into `out`. False: there is none yet, the connection sleeps. */
static bool take_more(so_conn *c) {
    bool chunks = c->head.minor > 0;
    so_str piece;
    so_buf_clear(&c->out);
    c->out_at = 0;
    so_http_more more = so_http_read_stream(c->x, &piece);
    if (more == SO_HTTP_SLEEP) {
        c->state = SO_CONN_WAIT;
        return false;
    }
    if (chunks && piece.len > 0)
        so_buf_printf(&c->out, "%zx\r\n", piece.len);
    so_buf_append_str(&c->out, piece);
    if (chunks && piece.len > 0)
        so_buf_append_c(&c->out, "\r\n");
    if (more == SO_HTTP_END) {
        so_buf_append_c(&c->out, chunks ? "0\r\n\r\n" : "");
        c->streaming = false;
    }
    return true;
}

static void finish(so_conn *c) {
    bool whole = c->body.state == SO_BODY_DONE && c->in_at == c->in.len;
    bool keep_alive = c->keep_alive;
    forget_request(c, true);
    if (keep_alive)
        c->state = SO_CONN_HEAD;
    else if (whole)
        c->state = SO_CONN_CLOSED;
    else
        linger(c);
}

/* This and the other steps return true if drive() is to continue with the new state of c. */
static bool step_write(so_conn *c) {
    int rc = flush(c);
    if (rc < 0) {
        c->state = SO_CONN_CLOSED;
        return true;
    }
    so_watch_blocked(c, rc == 0);
    if (rc == 0) {
        poll_for(c, EPOLLOUT);
        return false;
    }
    if (c->streaming)
        return take_more(c);
    finish(c);
    return true;
}

/* --- reading --- */

/* Receives into `in`. False: nothing to receive, the connection is polled. */
static bool receive(so_conn *c) {
    char data[16 << 10];
    ssize_t n;
    if (c->in_at > 0)
        memmove(c->in.data, c->in.data + c->in_at, c->in.len - c->in_at);
    c->in.len -= c->in_at;
    c->in_at = 0;
    do
        n = recv(c->fd, data, sizeof data, 0);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        if (c->in.len == 0)
            so_buf_free(&c->in); /* idle connections hold no buffer */
        poll_for(c, EPOLLIN);
        return false;
    }
    if (n > 0)
        so_buf_append(&c->in, data, (size_t)n);
    else
        c->state = SO_CONN_CLOSED;
    return true;
}

static so_str unread(const so_conn *c) {
    so_str in = so_buf_str(&c->in);
    return (so_str){in.ptr + c->in_at, in.len - c->in_at};
}

/* Responds to a malformed request. The connection is closed afterwards, because it is unknown where
 * the next request begins. */
static void refuse(so_conn *c, const so_api_error *err) {
    c->keep_alive = false;
    c->body = (so_body){0};
    if (!c->x)
        c->x = so_http_begin_bad(c->loop->s, c);
    so_http_refuse(c->x, err);
}

static bool is_too_long(so_conn *c, so_str in, so_api_error *err) {
    if (in.len < SO_HEAD_MAX)
        return false;
    if (memchr(in.ptr, '\n', SO_HEAD_MAX))
        so_api_fail(err, 431, "headers_too_large", NULL,
                    "the headers have more than %d bytes, the maximum of this server", SO_HEAD_MAX);
    else
        so_api_fail(err, 414, "uri_too_long", NULL,
                    "the request line has more than %d bytes, the maximum of this server",
                    SO_HEAD_MAX);
    refuse(c, err);
    return true;
}

/* Tells a client that sent "Expect: 100-continue" to send the body. `out` is empty here. */
static void say_continue(so_conn *c) {
    static const char text[] = "HTTP/1.1 100 Continue\r\n\r\n";
    if (send(c->fd, text, sizeof text - 1, MSG_NOSIGNAL) != (ssize_t)sizeof text - 1)
        c->state = SO_CONN_CLOSED;
}

static void begin_request(so_conn *c) {
    const char *expect = so_head_get(&c->head, "Expect");
    bool expects_continue = expect && strcasecmp(expect, "100-continue") == 0 && c->head.minor > 0;
    c->keep_alive = c->head.keep_alive;
    so_body_init(&c->body, &c->head);
    c->state = SO_CONN_BODY;
    c->x = so_http_begin(c->loop->s, c, expects_continue);
    if (c->state == SO_CONN_BODY && expects_continue && c->body.state != SO_BODY_DONE &&
        unread(c).len == 0)
        say_continue(c);
}

static bool step_head(so_conn *c) {
    so_api_error err;
    while (unread(c).len > 0 && strchr("\r\n", *unread(c).ptr) && *unread(c).ptr)
        c->in_at++; /* RFC 9112, 2.2: ignore empty lines before a request */
    so_str in = unread(c);
    size_t n = so_head_find(in, c->head_seen);
    c->head_seen = n ? 0 : in.len;
    if (n == 0 || n > SO_HEAD_MAX) {
        if (is_too_long(c, in, &err))
            return true;
        if (so_head_may_begin(in))
            return receive(c);
        so_api_fail(&err, 400, "invalid_http", NULL,
                    "the request is not HTTP; this server has no TLS: use http://, not https://");
        refuse(c, &err);
        return true;
    }
    c->in_at += n;
    if (so_head_parse((so_str){in.ptr, n}, &c->head, &err))
        begin_request(c);
    else
        refuse(c, &err);
    return true;
}

static bool step_body(so_conn *c) {
    so_api_error err;
    so_str piece;
    if (c->body.state == SO_BODY_DONE) {
        so_http_answer(c->x);
        return c->state != SO_CONN_WAIT;
    }
    if (unread(c).len == 0)
        return receive(c);
    if (!so_body_read(&c->body, so_buf_str(&c->in), &c->in_at, &piece, &err))
        refuse(c, &err);
    else if (piece.len > 0)
        so_http_receive(c->x, piece);
    return true;
}

static bool step_linger(so_conn *c) {
    c->n_dropped += c->in.len - c->in_at;
    c->in_at = c->in.len;
    if (c->n_dropped > MAX_LINGER)
        c->state = SO_CONN_CLOSED;
    return c->state == SO_CONN_CLOSED || receive(c);
}

static void drive(so_conn *c) {
    for (bool go_on = true; go_on;) {
        switch (c->state) {
        case SO_CONN_HEAD:
            go_on = step_head(c);
            break;
        case SO_CONN_BODY:
            go_on = step_body(c);
            break;
        case SO_CONN_WRITE:
            go_on = step_write(c);
            break;
        case SO_CONN_LINGER:
            go_on = step_linger(c);
            break;
        case SO_CONN_WAIT:
            go_on = false;
            break;
        case SO_CONN_CLOSED:
            close_conn(c);
            return;
        }
    }
    if (c->state == SO_CONN_WAIT)
        poll_for(c, 0);
}

/* --- a loop --- */

static void set_accepting(so_loop *l, bool on) {
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = l->s};
    if (on != l->accepting)
        SO_ASSERT_OP(epoll_ctl(l->epoll, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, l->s->listener, &ev),
                     ==, 0);
    l->accepting = on;
}

/* Accepts up to twice --max-connections: above --max-connections watch.c closes idle connections,
 * the oldest first. Further clients wait in the kernel's queue. */
static void accept_some(so_loop *l) {
    so_server *s = l->s;
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        struct sockaddr_storage from = {0};
        socklen_t len = sizeof from;
        int on = 1;
        if (so_watch_count(s) >= 2 * s->o.max_connections) {
            set_accepting(l, false);
            return;
        }
        int fd = accept4(s->listener, (struct sockaddr *)&from, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ECONNABORTED && errno != EINTR)
                set_accepting(l, false); /* no descriptors: try again later */
            return;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        so_conn *c = SO_NEW(so_conn);
        *c = (so_conn){.fd = fd, .loop = l, .state = SO_CONN_HEAD};
        so_client_name((const struct sockaddr *)&from, c->client, sizeof c->client);
        so_watch_add(s, c);
        drive(c);
    }
}

/* Resumes woken connections. False: the loop is to end. */
static bool take_woken(so_loop *l) {
    uint64_t n;
    if (read(l->event, &n, sizeof n) < 0)
        so_log(SO_LOG_DEBUG, "eventfd: nothing to read");
    pthread_mutex_lock(&l->lock);
    so_conn *c = l->woken;
    l->woken = NULL;
    bool quit = l->quit;
    pthread_mutex_unlock(&l->lock);
    for (so_conn *next; c && !quit; c = next) {
        next = c->next_woken;
        if (c->streaming)
            c->state = SO_CONN_WRITE;
        else
            so_http_resume(c->x);
        drive(c);
    }
    return !quit;
}

static void *run_loop(void *arg) {
    so_loop *l = arg;
    struct epoll_event events[MAX_EVENTS];
    set_accepting(l, true);
    for (bool go_on = true; go_on;) {
        int n = epoll_wait(l->epoll, events, MAX_EVENTS, l->accepting ? -1 : PAUSE_MS);
        bool woken = false, accepting = l->accepting;
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == l)
                woken = true;
            else if (events[i].data.ptr == l->s)
                accept_some(l);
            else
                drive(events[i].data.ptr);
        }
        if (woken)
            go_on = take_woken(l);
        if (!accepting && go_on)
            set_accepting(l, true);
    }
    return NULL;
}

/* --- start and stop --- */

static int start_loop(so_server *s, so_loop *l) {
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = l};
    pthread_attr_t attr;
    *l = (so_loop){.s = s,
                   .epoll = epoll_create1(EPOLL_CLOEXEC),
                   .event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
    if (l->epoll < 0 || l->event < 0 || epoll_ctl(l->epoll, EPOLL_CTL_ADD, l->event, &ev) != 0) {
        close(l->epoll);
        close(l->event);
        return -1;
    }
    pthread_mutex_init(&l->lock, NULL);
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, THREAD_STACK);
    SO_ASSERT_OP(pthread_create(&l->thread, &attr, run_loop, l), ==, 0);
    pthread_attr_destroy(&attr);
    return 0;
}

int so_net_start(so_server *s, so_err *err) {
    s->loops = SO_NEW_N(so_loop, s->o.n_threads);
    for (; s->n_loops < s->o.n_threads; s->n_loops++)
        if (start_loop(s, &s->loops[s->n_loops]) != 0)
            return so_err_set(err, SO_EIO, "cannot poll connections: %s", strerror(errno));
    return SO_OK;
}

void so_net_stop(so_server *s) {
    for (int i = 0; i < s->n_loops; i++) {
        pthread_mutex_lock(&s->loops[i].lock);
        s->loops[i].quit = true;
        pthread_mutex_unlock(&s->loops[i].lock);
        poke(&s->loops[i]);
    }
    for (int i = 0; i < s->n_loops; i++)
        pthread_join(s->loops[i].thread, NULL);
    for (so_conn *c; (c = so_watch_first(s));)
        close_conn(c);
    for (int i = 0; i < s->n_loops; i++) {
        close(s->loops[i].epoll);
        close(s->loops[i].event);
        pthread_mutex_destroy(&s->loops[i].lock);
    }
    free(s->loops);
}
