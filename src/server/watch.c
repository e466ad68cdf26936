/* The register of connections, and the housekeeper thread that checks them.
 *
 * net.c does not poll a connection whose job is running, and a client that sends one byte a minute
 * never looks idle to it. So every connection is registered here, and while there are any, the
 * housekeeper checks all of them every TICK_MS:
 *
 * - the client has hung up while its job runs: the job is cancelled. Closing only the sending side
 *   counts as hanging up;
 * - no complete request within --timeout, or the client has not read for --timeout: closed;
 * - more than --max-connections: idle connections are closed, the oldest first, so that they cannot
 *   keep new clients out for long.
 *
 * The housekeeper also writes the log lines of jobs, so that the engine thread never waits for the
 * reader of the log, and it detects the end of a drain.
 *
 * It never closes a descriptor: it calls shutdown(), and net.c closes the connection when it sees
 * the end of the stream. A connection in the register has an open descriptor. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/impl.h"

enum { TICK_MS = 200, GRACE_MS = 2000, QUIET_MS = 500, LINGER_MS = 2000 };

void so_client_name(const struct sockaddr *a, char *out, size_t cap) {
    const void *ip = NULL;
    snprintf(out, cap, "-");
    if (a && a->sa_family == AF_INET)
        ip = &((const struct sockaddr_in *)(const void *)a)->sin_addr;
    else if (a && a->sa_family == AF_INET6)
        ip = &((const struct sockaddr_in6 *)(const void *)a)->sin6_addr;
    if (ip)
        inet_ntop(a->sa_family, ip, out, (socklen_t)cap);
}

/* --- the register --- */

/* The kernel's probes detect a peer that vanished without closing its connection. */
static void set_keepalive(int fd, int timeout_s) {
    int on = 1, idle = 30, every = 10, tries = 3, unacked = timeout_s * 1000;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacked, sizeof unacked);
}

static void close_conn(so_conn *c) {
    c->closing = true;
    shutdown(c->fd, SHUT_RDWR);
}

void so_watch_add(so_server *s, so_conn *c) {
    c->t_since_ns = so_clock_ns();
    set_keepalive(c->fd, s->o.timeout_s);
    pthread_mutex_lock(&s->lock);
    c->next = s->conns;
    if (c->next)
        c->next->prev = c;
    s->conns = c;
    s->n_conns++;
    pthread_cond_signal(&s->tick);
    pthread_mutex_unlock(&s->lock);
}

void so_watch_remove(so_server *s, so_conn *c) {
    pthread_mutex_lock(&s->lock);
    *(c->prev ? &c->prev->next : &s->conns) = c->next;
    if (c->next)
        c->next->prev = c->prev;
    s->n_conns--;
    pthread_mutex_unlock(&s->lock);
    if (c->job)
        so_job_release(c->job);
    free(c);
}

so_conn *so_watch_first(so_server *s) {
    pthread_mutex_lock(&s->lock);
    so_conn *c = s->conns;
    pthread_mutex_unlock(&s->lock);
    return c;
}

int so_watch_count(so_server *s) {
    pthread_mutex_lock(&s->lock);
    int n = s->n_conns;
    pthread_mutex_unlock(&s->lock);
    return n;
}

static void set_busy(so_server *s, so_conn *c, bool busy, so_job *job) {
    if (job)
        so_job_acquire(job);
    pthread_mutex_lock(&s->lock);
    so_job *old = c->job;
    c->job = job;
    c->busy = busy;
    c->cancel_sent = false;
    c->t_since_ns = so_clock_ns();
    pthread_mutex_unlock(&s->lock);
    if (old)
        so_job_release(old);
}

void so_watch_busy(so_server *s, so_conn *c, so_job *job) { set_busy(s, c, true, job); }
void so_watch_quiet(so_server *s, so_conn *c) { set_busy(s, c, false, NULL); }

void so_watch_linger(so_server *s, so_conn *c) {
    pthread_mutex_lock(&s->lock);
    c->lingering = true;
    c->t_since_ns = so_clock_ns();
    pthread_mutex_unlock(&s->lock);
}

void so_watch_progress(so_conn *c) { c->t_since_ns = so_clock_ns(); }
void so_watch_blocked(so_conn *c, bool blocked) { c->blocked = blocked; }

/* --- jobs --- */

void so_watch_job_begin(so_server *s) {
    pthread_mutex_lock(&s->lock);
    s->n_jobs++;
    pthread_mutex_unlock(&s->lock);
}

void so_watch_job_abandon(so_server *s) {
    pthread_mutex_lock(&s->lock);
    s->n_jobs--;
    pthread_mutex_unlock(&s->lock);
}

void so_watch_job_end(void *server, so_job *job) {
    so_server *s = server;
    pthread_mutex_lock(&s->lock);
    job->next = s->ended;
    s->ended = job;
    pthread_cond_signal(&s->tick);
    pthread_mutex_unlock(&s->lock);
}

/* --- the housekeeper thread --- */

static bool hung_up(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL));
}

/* Under the lock. */
static void check_conn(so_server *s, so_conn *c, int64_t now) {
    if (c->closing)
        return;
    if (c->busy && c->job && !c->cancel_sent && hung_up(c->fd)) {
        c->cancel_sent = true;
        c->job->cancelled = true; /* the engine ends it at the next step */
    }
    int64_t limit_ms = c->lingering ? LINGER_MS : s->o.timeout_s * 1000LL;
    if ((!c->busy || c->blocked) && now - c->t_since_ns > limit_ms * 1000000)
        close_conn(c);
}

/* Under the lock. Walks from the oldest connection to the newest. A connection that became idle
 * less than QUIET_MS ago is kept: it may be about to send its request. */
static void close_excess(so_server *s, int64_t now) {
    int excess = s->n_conns - s->o.max_connections, n = 0;
    so_conn *last = s->conns;
    for (so_conn *c = s->conns; c; c = c->next) {
        last = c;
        n += c->closing;
    }
    for (so_conn *c = last; c && n < excess; c = c->prev)
        if (!c->busy && !c->closing && now - c->t_since_ns > QUIET_MS * 1000000LL) {
            close_conn(c);
            so_metrics_refused(s->metrics, "connections");
            n++;
        }
}

static void write_log(so_server *s, so_job *list) {
    int n = 0;
    for (so_job *j = list, *next; j; j = next, n++) {
        next = j->next;
        so_log_job(s, j);
        so_job_free(j);
    }
    pthread_mutex_lock(&s->lock);
    s->n_jobs -= n;
    pthread_mutex_unlock(&s->lock);
}

/* After the drain timeout running answers are ended with an error; clients then have GRACE_MS to
 * receive it. */
static void check_drain(so_server *s) {
    bool hurry = false, over = false;
    pthread_mutex_lock(&s->lock);
    if (s->draining && !s->drained) {
        int64_t late_ms = (so_clock_ns() - s->t_drain_ns) / 1000000 - s->o.drain_s * 1000LL;
        hurry = late_ms >= 0 && !s->hurried;
        over = s->n_jobs == 0 || late_ms > GRACE_MS;
        s->hurried |= hurry;
        s->drained = over;
    }
    pthread_mutex_unlock(&s->lock);
    if (hurry)
        so_worker_end_all(s->worker, "the server stopped before the answer was complete");
    if (over)
        so_server_signal(s);
}

/* Sleeps for one tick, or until signalled if there are no connections and no drain. */
static void wait_tick(so_server *s) {
    struct timespec until;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_nsec += TICK_MS * 1000000L;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    if (s->conns || s->draining)
        pthread_cond_timedwait(&s->tick, &s->lock, &until);
    else
        pthread_cond_wait(&s->tick, &s->lock);
}

void *so_watch_run(void *server) {
    so_server *s = server;
    pthread_mutex_lock(&s->lock);
    for (int64_t t_looked = 0; !s->quit || s->ended;) {
        if (!s->ended && !s->quit)
            wait_tick(s);
        so_job *ended = s->ended;
        s->ended = NULL;
        int64_t now = so_clock_ns();
        if (now - t_looked >= TICK_MS * 1000000LL) {
            for (so_conn *c = s->conns; c; c = c->next)
                check_conn(s, c, now);
            close_excess(s, now);
            t_looked = now;
        }
        pthread_mutex_unlock(&s->lock);
        write_log(s, ended);
        check_drain(s);
        pthread_mutex_lock(&s->lock);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}
