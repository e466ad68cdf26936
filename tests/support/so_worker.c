/* See so_worker.h. Each has a thread of its own that alone uses its sockets; an eventfd ends it. */
#include "so_worker.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "base/zmq.h"
#include "draft/link.h"
#include "draft/wire.h"
#include "so_test.h"

void so_worker_need_zmq(void) {
    so_zmq z;
    so_err err = {0};
    if (so_zmq_load(&z, &err) != SO_OK)
        SO_SKIP("%s", err.msg);
}

/* What the library does by itself looks like races: it synchronises its threads in ways that the
 * thread sanitizer does not see. */
const char *__tsan_default_suppressions(void);
__attribute__((visibility("default"))) const char *__tsan_default_suppressions(void) {
    return "called_from_lib:libzmq.so\n";
}

/* --- the worker --- */

struct so_worker {
    so_remote_worker *w;
    pthread_t thread;
    int stop_fd;
};

static void *worker_main(void *user) {
    so_worker *w = user;
    so_remote_worker_run(w->w, w->stop_fd);
    return NULL;
}

so_worker *so_worker_start(const so_rig *draft, const char *address, const char *key_file,
                           so_err *err) {
    so_worker *w = SO_NEW(so_worker);
    so_remote_worker_opts o = {.model = draft->m,
                               .draft_id = 77,
                               .address = address ? address : "tcp://127.0.0.1:*",
                               .key_file = key_file,
                               .n_ctx = 4096,
                               .n_parallel = 3, /* fewer than some engines have */
                               .n_batch = 16,
                               .kv_dtype = SO_DTYPE_F32,
                               .temp = -1};
    if (so_remote_worker_create(&o, &w->w, err) != SO_OK) {
        free(w);
        return NULL;
    }
    w->stop_fd = eventfd(0, EFD_CLOEXEC);
    assert_int_equal(pthread_create(&w->thread, NULL, worker_main, w), 0);
    return w;
}

const char *so_worker_address(const so_worker *w) { return so_remote_worker_address(w->w); }

void so_worker_stop(so_worker *w) {
    assert_int_equal(eventfd_write(w->stop_fd, 1), 0);
    pthread_join(w->thread, NULL);
    close(w->stop_fd);
    so_remote_worker_free(w->w);
    free(w);
}

/* --- the path --- */

enum { HELD = 256, MESSAGE = 1 << 16, PEER = 256 };

typedef struct held {
    int64_t t_ns; /* when it goes on; 0: unused */
    bool to_worker;
    size_t n;
    unsigned char *bytes; /* [MESSAGE] */
} held;

struct so_path {
    so_path_opts o;
    so_zmq z;
    void *ctx, *front, *back;
    char worker[SO_LINK_ADDRESS], address[SO_LINK_ADDRESS];
    unsigned char peer[PEER];
    int n_peer, stop_fd;
    held held[HELD];
    unsigned char *bytes;
    uint32_t n_draws;
    int64_t happened[SO_PATH_N_FAULTS], n_during;
    so_wire_msg *msg;
    atomic_int n_opened, n_seeds, n_temps;
    pthread_t thread;
};

static double uniform(so_path *p) {
    so_rng_key key = {.seed = p->o.seed, .purpose = SO_RNG_TEST};
    return so_rng_uniform(&key, p->n_draws++);
}

static void open_sockets(so_path *p) {
    int zero = 0;
    p->front = p->z.socket(p->ctx, SO_ZMQ_ROUTER);
    p->back = p->z.socket(p->ctx, SO_ZMQ_DEALER);
    p->z.setsockopt(p->front, SO_ZMQ_LINGER, &zero, sizeof zero);
    p->z.setsockopt(p->back, SO_ZMQ_LINGER, &zero, sizeof zero);
    /* After a cut the port may still be in use for a moment. */
    for (int i = 0; p->z.bind(p->front, p->address) != 0; i++) {
        assert_true(i < 5000);
        usleep(1000);
    }
    assert_int_equal(p->z.connect(p->back, p->worker), 0);
    p->n_peer = 0;
}

static void close_sockets(so_path *p) {
    p->z.close(p->front);
    p->z.close(p->back);
}

static void deliver(so_path *p, bool to_worker, const void *bytes, size_t n) {
    if (to_worker) {
        p->z.send(p->back, bytes, n, SO_ZMQ_DONTWAIT);
    } else if (p->n_peer > 0 && p->z.send(p->front, p->peer, (size_t)p->n_peer,
                                          SO_ZMQ_SNDMORE | SO_ZMQ_DONTWAIT) >= 0) {
        p->z.send(p->front, bytes, n, SO_ZMQ_DONTWAIT);
    }
}

static void hold(so_path *p, bool to_worker, const void *bytes, size_t n, double ms) {
    for (int i = 0; i < HELD; i++)
        if (p->held[i].t_ns == 0) {
            p->held[i].t_ns = so_clock_ns() + (int64_t)(ms * 1e6) + 1;
            p->held[i].to_worker = to_worker;
            p->held[i].n = n;
            memcpy(p->held[i].bytes, bytes, n);
            return;
        }
}

/* Delivers what is due, the oldest first; returns the milliseconds until the next is. */
static long release(so_path *p) {
    for (;;) {
        held *first = NULL;
        for (int i = 0; i < HELD; i++)
            if (p->held[i].t_ns != 0 && (!first || p->held[i].t_ns < first->t_ns))
                first = &p->held[i];
        if (!first)
            return -1;
        int64_t left = first->t_ns - so_clock_ns();
        if (left > 0)
            return left > 1000000 ? (long)(left / 1000000) : 0;
        deliver(p, first->to_worker, first->bytes, first->n);
        first->t_ns = 0;
    }
}

static void cut(so_path *p) {
    close_sockets(p);
    for (int i = 0; i < HELD; i++)
        p->held[i].t_ns = 0;
    open_sockets(p);
}

/* Messages of a round under way: JOB, STOP, OUTCOMES, LEVEL, DONE. */
static bool is_during(const unsigned char *bytes, size_t n) {
    int type = n > 8 ? bytes[8] : 0;
    return type == SO_WIRE_JOB || type == SO_WIRE_STOP || type >= SO_WIRE_OUTCOMES;
}

static void pass_on(so_path *p, bool to_worker, unsigned char *bytes, size_t n) {
    int kind = 0;
    double u = uniform(p);
    for (; kind < SO_PATH_N_FAULTS && u >= p->o.rate[kind]; kind++)
        u -= p->o.rate[kind];
    double ms = p->o.latency_ms;
    if (kind < SO_PATH_N_FAULTS) {
        p->happened[kind]++;
        p->n_during += is_during(bytes, n);
    }
    switch (kind) {
    case SO_PATH_DELAY:
    case SO_PATH_REORDER:
        ms += uniform(p) * p->o.delay_ms;
        break;
    case SO_PATH_DROP:
        return;
    case SO_PATH_TRUNCATE:
        n = (size_t)(uniform(p) * (double)n);
        break;
    case SO_PATH_GARBLE:
        for (int i = 0; i < 3 && n > 0; i++)
            bytes[(size_t)(uniform(p) * (double)n)] = (unsigned char)(uniform(p) * 256);
        break;
    case SO_PATH_REPLAY:
        hold(p, to_worker, bytes, n, ms + uniform(p) * p->o.delay_ms);
        break;
    case SO_PATH_CUT:
        cut(p);
        return;
    default:
        break;
    }
    if (ms > 0)
        hold(p, to_worker, bytes, n, ms);
    else
        deliver(p, to_worker, bytes, n);
}

/* Counts requests that the worker is told of, and those of which it learns the seed or the temperature. */
static void look(so_path *p, size_t n) {
    so_err err = {0};
    if (so_wire_read(p->bytes, n, p->msg, &err) != SO_OK || p->msg->type != SO_WIRE_OPEN)
        return;
    atomic_fetch_add(&p->n_seeds, p->msg->open.sample.seed != 0);
    atomic_fetch_add(&p->n_temps, p->msg->open.sample.temp != 0);
    atomic_fetch_add(&p->n_opened, 1);
}

int so_path_opened(so_path *p, int *n_seeds, int *n_temps) {
    int n = atomic_exchange(&p->n_opened, 0);
    *n_seeds = atomic_exchange(&p->n_seeds, 0);
    *n_temps = atomic_exchange(&p->n_temps, 0);
    return n;
}

static bool forward(so_path *p, bool to_worker) {
    if (to_worker) {
        unsigned char peer[PEER];
        int n = p->z.recv(p->front, peer, sizeof peer, SO_ZMQ_DONTWAIT);
        if (n <= 0)
            return false;
        memcpy(p->peer, peer, (size_t)n);
        p->n_peer = n;
    }
    int n = p->z.recv(to_worker ? p->front : p->back, p->bytes, MESSAGE, SO_ZMQ_DONTWAIT);
    if (n < 0)
        return false;
    assert_true(n <= MESSAGE);
    if (to_worker)
        look(p, (size_t)n);
    pass_on(p, to_worker, p->bytes, (size_t)n);
    return true;
}

static void *path_main(void *user) {
    so_path *p = user;
    for (;;) {
        long ms = release(p);
        so_zmq_pollitem items[] = {{p->front, 0, SO_ZMQ_POLLIN, 0},
                                   {p->back, 0, SO_ZMQ_POLLIN, 0},
                                   {NULL, p->stop_fd, SO_ZMQ_POLLIN, 0}};
        p->z.poll(items, 3, ms);
        if (items[2].revents)
            return NULL;
        while (forward(p, true) || forward(p, false))
            ;
    }
}

so_path *so_path_open(const char *worker, const so_path_opts *o) {
    so_path *p = SO_NEW(so_path);
    so_err err = {0};
    size_t n = sizeof p->address;
    SO_OK_OR_FAIL(so_zmq_load(&p->z, &err), err);
    p->o = *o;
    p->ctx = p->z.ctx_new();
    p->stop_fd = eventfd(0, EFD_CLOEXEC);
    p->bytes = so_alloc(MESSAGE);
    p->msg = SO_NEW(so_wire_msg);
    for (int i = 0; i < HELD; i++)
        p->held[i].bytes = so_alloc(MESSAGE);
    snprintf(p->worker, sizeof p->worker, "%s", worker);
    snprintf(p->address, sizeof p->address, "tcp://127.0.0.1:*");
    open_sockets(p);
    p->z.getsockopt(p->front, SO_ZMQ_LAST_ENDPOINT, p->address, &n);
    assert_int_equal(pthread_create(&p->thread, NULL, path_main, p), 0);
    return p;
}

const char *so_path_address(const so_path *p) { return p->address; }

void so_path_close(so_path *p, int64_t *happened, int64_t *n_during) {
    assert_int_equal(eventfd_write(p->stop_fd, 1), 0);
    pthread_join(p->thread, NULL);
    for (int i = 0; i < SO_PATH_N_FAULTS; i++)
        happened[i] += p->happened[i];
    *n_during += p->n_during;
    close_sockets(p);
    p->z.ctx_term(p->ctx);
    close(p->stop_fd);
    free(p->bytes);
    free(p->msg);
    for (int i = 0; i < HELD; i++)
        free(p->held[i].bytes);
    free(p);
}
