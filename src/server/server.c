/* The server's lifecycle: the listening socket, the threads, the states, and the shutdown.
 *
 * Shutdown order:
 *   1. the engine ends all jobs with an error, which wakes every sleeping connection
 *   2. the HTTP threads end and all connections are closed (net.c frees no sleeping connection)
 *   3. the engine thread ends
 *   4. the housekeeper writes the last log lines and ends
 *
 * so_server_create and so_server_free belong to the thread that owns the server; the other
 * functions may be called from any thread. */
#include "server/server.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/sha256.h"
#include "server/impl.h"

void so_server_defaults(so_server_opts *o) {
    *o = (so_server_opts){.host = "127.0.0.1",
                          .port = 8080,
                          .model = "model",
                          .n_queue = 64,
                          .n_threads = 4,
                          .max_connections = 512,
                          .max_body = 1 << 20,
                          .timeout_s = 60,
                          .drain_s = 30};
}

/* --- states --- */

so_server_state so_server_get_state(so_server *s) {
    pthread_mutex_lock(&s->lock);
    bool draining = s->draining, drained = s->drained;
    pthread_mutex_unlock(&s->lock);
    so_worker_state w = so_worker_get_state(s->worker);
    if (w == SO_WORKER_FAILED)
        return SO_SERVER_FAILED;
    if (drained)
        return SO_SERVER_DRAINED;
    if (draining)
        return SO_SERVER_DRAINING;
    if (w == SO_WORKER_LOST)
        return SO_SERVER_LOST;
    return w == SO_WORKER_LOADING ? SO_SERVER_LOADING : SO_SERVER_READY;
}

const char *so_server_state_name(so_server_state s) {
    static const char *const names[] = {"loading",  "ready",  "draining",
                                        "draining", "failed", "lost"};
    return names[s];
}

void so_server_error(so_server *s, so_err *out) { so_worker_error(s->worker, out); }
int so_server_fd(const so_server *s) { return s->event_fd; }
int so_server_port(const so_server *s) { return s->port; }

void so_server_signal(so_server *s) {
    uint64_t one = 1;
    if (write(s->event_fd, &one, sizeof one) < 0)
        so_log(SO_LOG_DEBUG, "eventfd: %s", strerror(errno)); /* full, hence readable already */
}

static void on_state(void *user) { so_server_signal(user); }

void so_server_drain(so_server *s) {
    pthread_mutex_lock(&s->lock);
    if (!s->draining) {
        s->draining = true;
        s->t_drain_ns = so_clock_ns();
    }
    pthread_cond_signal(&s->tick);
    pthread_mutex_unlock(&s->lock);
}

/* Names the hardware as far as it decides the bits of the logits. All CPUs give the same bits, with
 * any number of threads. Other devices differ from the CPU and may differ from each other. */
static void print_device(const so_serving *sv, so_buf *out) {
    const so_backend *b = so_model_backend(sv->b->model);
    so_buf_append_c(out, b->vt->name);
    if (strcmp(b->vt->name, "cpu") != 0) {
        so_buf_append_char(out, ' ');
        b->vt->describe(b, out);
    }
}

/* A hash of the version, the vocabulary, the model's shape and size, the type of the KV cache and
 * the device. Servers of one model file with equal fingerprints give equal texts for equal seeds.
 * The weights themselves are not hashed: that would read the whole file at every start. */
static void make_fingerprint(so_server *s, const so_serving *sv) {
    const so_hparams *hp = so_model_hparams(sv->b->model);
    so_buf b = {0};
    so_buf_printf(&b, "%s %016llx %d %d %d %zu %lld %d on ", SO_VERSION,
                  (unsigned long long)so_tokenizer_hash(sv->b->tok), hp->n_layers, hp->d_model,
                  hp->n_vocab, so_model_weight_bytes(sv->b->model),
                  (long long)so_model_n_params(sv->b->model), (int)sv->eo.kv_dtype);
    print_device(sv, &b);
    snprintf(s->fingerprint, sizeof s->fingerprint, "sooth-%s-%08x", SO_VERSION,
             (unsigned)so_hash_bytes(b.data, b.len));
    so_buf_free(&b);
}

static int load(void *user, so_serving *out, so_err *err) {
    so_server *s = user;
    int rc = s->o.load(s->o.load_user, out, err);
    if (rc == SO_OK)
        make_fingerprint(s, out);
    return rc;
}

/* --- the socket --- */

static bool is_loopback(const struct sockaddr *a) {
    const struct sockaddr_in *v4 = (const void *)a;
    const struct sockaddr_in6 *v6 = (const void *)a;
    return a->sa_family == AF_INET6 ? IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)
                                    : ntohl(v4->sin_addr.s_addr) >> 24 == 127;
}

static void warn_open(const so_server *s) {
    if (!s->on_loopback && !s->o.key)
        so_log(SO_LOG_WARN,
               "--host %.100s without a key: anyone who can reach this address can use the "
               "server; set --api-key or SOOTH_API_KEY",
               s->o.host);
}

static int open_listener(const struct addrinfo *a, int *port) {
    struct sockaddr_storage at = {0};
    socklen_t len = sizeof at;
    int on = 1;
    int fd = socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on); /* a restart can bind at once */
    if (bind(fd, a->ai_addr, a->ai_addrlen) != 0 || listen(fd, SOMAXCONN) != 0 ||
        getsockname(fd, (struct sockaddr *)&at, &len) != 0) {
        int e = errno;
        close(fd);
        errno = e;
        return -1;
    }
    *port =
        ntohs(at.ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)(const void *)&at)->sin6_port
                                       : ((const struct sockaddr_in *)(const void *)&at)->sin_port);
    return fd;
}

static int listen_at(so_server *s, so_err *err) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE}, *list = NULL;
    char port[16];
    snprintf(port, sizeof port, "%d", s->o.port);
    int rc = getaddrinfo(s->o.host, port, &hints, &list);
    if (rc != 0)
        return so_err_set(err, SO_EINVAL, "--host '%.100s': %s", s->o.host, gai_strerror(rc));
    for (const struct addrinfo *a = list; a && s->listener < 0; a = a->ai_next) {
        s->listener = open_listener(a, &s->port);
        s->on_loopback = is_loopback(a->ai_addr);
    }
    int e = errno;
    freeaddrinfo(list);
    if (s->listener < 0)
        return so_err_set(err, SO_EIO, "cannot listen on %.100s port %d: %s%s", s->o.host,
                          s->o.port, strerror(e),
                          e == EADDRINUSE ? " (another server? choose another --port)" : "");
    warn_open(s);
    return SO_OK;
}

/* Raises the limit of open files, and lowers max_connections if the limit is still too small. */
static void fit_descriptors(so_server *s) {
    enum { OTHERS = 128 }; /* descriptors that are not connections */
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r) != 0)
        return;
    r.rlim_cur = r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r);
    rlim_t room = r.rlim_max > OTHERS ? r.rlim_max - OTHERS : 1;
    if (r.rlim_max != RLIM_INFINITY && (rlim_t)s->o.max_connections * 2 > room) {
        s->o.max_connections = SO_MAX(1, (int)(room / 2));
        so_log(SO_LOG_WARN, "--max-connections is lowered to %d: the limit of open files is %llu",
               s->o.max_connections, (unsigned long long)r.rlim_max);
    }
}

/* --- threads --- */

static void start_worker(so_server *s) {
    so_worker_opts w = {.load = load,
                        .load_user = s,
                        .n_queue = s->o.n_queue,
                        .metrics = s->metrics,
                        .on_state = on_state,
                        .state_user = s};
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&s->tick, &attr);
    pthread_condattr_destroy(&attr);
    s->worker = so_worker_create(&w);
    SO_ASSERT_OP(pthread_create(&s->housekeeper, NULL, so_watch_run, s), ==, 0);
}

int so_server_create(const so_server_opts *o, so_server **out, so_err *err) {
    so_server *s = SO_NEW(so_server);
    s->o = *o;
    s->listener = -1;
    s->created_s = (int64_t)time(NULL);
    int rc = listen_at(s, err);
    if (rc != SO_OK) {
        free(s);
        return rc;
    }
    if (o->key) {
        so_sha256 h;
        so_sha256_init(&h);
        so_sha256_add(&h, o->key, strlen(o->key));
        so_sha256_hex(&h, s->key_hash);
    }
    s->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    pthread_mutex_init(&s->lock, NULL);
    s->metrics = so_metrics_create();
    fit_descriptors(s);
    start_worker(s);
    rc = so_net_start(s, err);
    if (rc != SO_OK) {
        so_server_free(s);
        return rc;
    }
    *out = s;
    return SO_OK;
}

static void wait_for_jobs(so_server *s) {
    struct timespec ms = {.tv_nsec = 1000000};
    so_worker_end_all(s->worker, "the server is stopping");
    while (so_worker_get_usage(s->worker).jobs > 0)
        nanosleep(&ms, NULL);
}

void so_server_free(so_server *s) {
    if (!s)
        return;
    wait_for_jobs(s);
    so_net_stop(s);
    so_worker_free(s->worker);
    pthread_mutex_lock(&s->lock);
    s->quit = true;
    pthread_cond_signal(&s->tick);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->housekeeper, NULL);
    if (s->listener >= 0)
        close(s->listener);
    close(s->event_fd);
    so_metrics_free(s->metrics);
    pthread_cond_destroy(&s->tick);
    pthread_mutex_destroy(&s->lock);
    free(s);
}
