/* Connections, and what must be looked after while nobody asks.
 *
 * A suspended connection is not polled by the HTTP library, and one that trickles bytes never looks
 * idle to it. So every connection is registered here, and a housekeeper looks at them a few times a
 * second, as long as there are any:
 *
 * - busy with a job and hung up: the job is cancelled (a client that closes its sending side counts
 *   as gone);
 * - quiet for too long: closed, since no request came, or not all of it;
 * - too many: those that were quiet for longest are closed, so that a crowd of idle connections
 *   keeps nobody out for long.
 *
 * It also writes the log lines of jobs, which end on either side, so that the engine thread never
 * waits for whoever reads the log; and it notices when a drain is over. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "server/impl.h"

enum { TICK_MS = 200, GRACE_MS = 2000, QUIET_MS = 500 };

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

/* A peer that vanished without a word is found out by the kernel's probes. */
static void set_keepalive(int fd, int timeout_s) {
    int on = 1, idle = 30, every = 10, tries = 3, unacked = timeout_s * 1000;
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &every, sizeof every);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacked, sizeof unacked);
}

/* shutdown() and not close(): the descriptor is the library's, which sees the end and closes it. */
static void close_conn(so_conn *c) {
    c->closing = true;
    shutdown(c->fd, SHUT_RDWR);
}

static void add_conn(so_server *s, struct MHD_Connection *conn, void **context) {
    const union MHD_ConnectionInfo *i =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_CONNECTION_FD);
    so_conn *c = SO_NEW(so_conn);
    c->fd = i ? i->connect_fd : -1;
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
    *context = c;
}

static void remove_conn(so_server *s, so_conn *c) {
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

void so_watch_notify(void *cls, struct MHD_Connection *conn, void **context,
                     enum MHD_ConnectionNotificationCode code) {
    if (code == MHD_CONNECTION_NOTIFY_STARTED)
        add_conn(cls, conn, context);
    else if (*context)
        remove_conn(cls, *context);
}

so_conn *so_watch_conn(struct MHD_Connection *conn) {
    const union MHD_ConnectionInfo *i =
        MHD_get_connection_info(conn, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
    SO_ASSERT(i && i->socket_context);
    return i->socket_context;
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
    c->told = false;
    c->t_since_ns = so_clock_ns();
    pthread_mutex_unlock(&s->lock);
    if (old)
        so_job_release(old);
}

void so_watch_busy(so_server *s, so_conn *c, so_job *job) { set_busy(s, c, true, job); }
void so_watch_quiet(so_server *s, so_conn *c) { set_busy(s, c, false, NULL); }

/* --- jobs --- */

void so_watch_began(so_server *s) {
    pthread_mutex_lock(&s->lock);
    s->n_jobs++;
    pthread_mutex_unlock(&s->lock);
}

void so_watch_unbegan(so_server *s) {
    pthread_mutex_lock(&s->lock);
    s->n_jobs--;
    pthread_mutex_unlock(&s->lock);
}

void so_watch_ended(void *server, so_job *job) {
    so_server *s = server;
    pthread_mutex_lock(&s->lock);
    job->next = s->ended;
    s->ended = job;
    pthread_cond_signal(&s->tick);
    pthread_mutex_unlock(&s->lock);
}

/* --- the housekeeper --- */

static bool hung_up(int fd) {
    struct pollfd p = {.fd = fd, .events = POLLRDHUP};
    return poll(&p, 1, 0) > 0 && (p.revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL));
}

/* Under the lock: a connection in the register is open. */
static void look_at(so_server *s, so_conn *c, int64_t now) {
    if (c->closing)
        return;
    if (c->busy) {
        if (c->job && !c->told && hung_up(c->fd)) {
            c->told = true;
            c->job->cancelled = true; /* ends at the next step */
        }
    } else if (now - c->t_since_ns > (int64_t)s->o.timeout_s * 1000000000) {
        close_conn(c);
    }
}

/* Under the lock. Newcomers have a moment to say what they want; the list has the newest first. */
static void thin_out(so_server *s, int64_t now) {
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

/* When their time is up running answers are ended, and get a moment to be sent so. */
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
        so_server_poke(s);
}

/* Sleeps a tick, or until something happens where there is nothing to look at. */
static void rest(so_server *s) {
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
            rest(s);
        so_job *ended = s->ended;
        s->ended = NULL;
        int64_t now = so_clock_ns();
        if (now - t_looked >= TICK_MS * 1000000LL) {
            for (so_conn *c = s->conns; c; c = c->next)
                look_at(s, c, now);
            thin_out(s, now);
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
