/* async(model,worker=…) in the engine: whatever the worker, the network between, or a stranger does,
 * the text is that of plain decoding, token for token, greedy and with `match`. The faults are those
 * of so_worker.h. test_async_mutants.c has `reject`. */
#include "so_test.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/rng.h"
#include "draft/link.h"
#include "draft/remote.h"
#include "draft/wire.h"
#include "so_cases.h"
#include "so_worker.h"

static so_rig target, draft;
static so_case cases[SO_CASES];

static int open_all(void **state) {
    (void)state;
    so_case_open(&target, "llama", &draft, "llama", cases);
    alarm(600); /* a hang fails */
    return 0;
}

static int close_all(void **state) {
    (void)state;
    so_rig_close(&target);
    so_rig_close(&draft);
    return 0;
}

/* After a step the caller is busy for a while, as a slow target would be. */
static void on_step(void *user, const so_step_info *info) {
    const double *ms = user;
    (void)info;
    if (*ms > 0)
        nanosleep(&(struct timespec){.tv_nsec = (long)(*ms * 1e6)}, NULL);
}

static double busy_ms; /* of the target, per step */

static so_engine *open_engine(int n_parallel, const char *key_file) {
    return so_case_engine(&target, &(so_case_engine_opts){.n_parallel = n_parallel,
                                                          .n_batch = 16,
                                                          .draft_temp = -1,
                                                          .worker_key = key_file,
                                                          .on_step = on_step,
                                                          .step_user = &busy_ms});
}

static char *spec_of(const char *address, const char *options) {
    char text[400];
    snprintf(text, sizeof text, "async(model,worker=%s%s)", address, options);
    return so_strdup(text);
}

/* All cases at once. Returns the sum of their counts. */
static so_async_counts run_all(so_engine *e, const char *spec, int length) {
    so_request *r[SO_CASES];
    so_async_counts sum = {0};
    for (int c = 0; c < SO_CASES; c++)
        r[c] = so_case_submit(e, &cases[c], &(so_spec_opts){.drafter = spec, .length = length});
    so_case_run(e);
    for (int c = 0; c < SO_CASES; c++) {
        if (!so_case_same(r[c], &cases[c]))
            fail_msg("case %d, %s, length %d: the text differs", c, spec, length);
        so_async_counts_add(&sum, &so_request_get_stats(r[c])->async);
        so_request_free(r[c]);
    }
    return sum;
}

/* Runs until drafts are served: a greeting takes a few milliseconds. */
static void run_until_hits(so_engine *e, const char *spec) {
    for (int k = 0; run_all(e, spec, 3).hits == 0; k++)
        assert_true(k < 200);
}

static so_worker *start(const char *address, const char *key_file) {
    so_err err = {0};
    so_worker *w = so_worker_start(&draft, address, key_file, &err);
    if (!w)
        fail_msg("%s", err.msg);
    return w;
}

static void every_option_gives_the_plain_text(void **state) {
    static const char *const OPTIONS[] = {"", ",wait=1", ",wait=2,fan=3", ",fallback=lookup,ngram"};
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    for (size_t i = 0; i < SO_LEN(OPTIONS); i++)
        for (int n_parallel = 1; n_parallel <= 4; n_parallel += 3) {
            char *spec = spec_of(so_worker_address(w), OPTIONS[i]);
            so_engine *e = open_engine(n_parallel, NULL);
            busy_ms = 0.3;
            run_until_hits(e, spec);
            for (int length = 0; length <= 3; length += 3) {
                so_async_counts n = run_all(e, spec, length);
                assert_true(n.hits + n.late + n.absent == n.rounds);
            }
            so_engine_free(e);
            free(spec);
        }
    so_worker_stop(w);
}

/* The draft is the target, so every guess that is served is right, and nearly every round is hit. */
static void a_perfect_draft_is_hit(void **state) {
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    char *spec = spec_of(so_worker_address(w), ",wait=3");
    so_engine *e = open_engine(1, NULL);
    run_until_hits(e, spec);
    for (int c = 0; c < SO_CASES; c++) {
        so_request *r = so_case_submit(e, &cases[c], &(so_spec_opts){.drafter = spec, .length = 3});
        so_case_run(e);
        const so_request_stats *s = so_request_get_stats(r);
        assert_true(so_case_same(r, &cases[c]));
        assert_true(s->draft_n_accepted == s->tested_n);
        assert_in_range(s->rounds, 1, SO_CASE_PREDICT / 2);
        assert_true(s->async.hits >= s->rounds - 3);
        so_request_free(r);
    }
    so_engine_free(e);
    free(spec);
    so_worker_stop(w);
}

/* Each kind of fault alone, then all together; the target takes no time, or several milliseconds. */
static void faults_change_no_token(void **state) {
    static const char *const NAMES[] = {"delayed",   "dropped",  "truncated", "garbled",
                                        "reordered", "replayed", "cut"};
    int64_t happened[SO_PATH_N_FAULTS] = {0}, n_during = 0, all = 0;
    int hits = 0;
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    int least = SO_TEST_SANITIZED ? 16 : 32; /* more where drafts are seldom in time */
    for (int k = 0; k < least || (hits <= 50 && k < 8 * least); k++) {
        so_path_opts o = {.seed = 40 + (uint64_t)k, .delay_ms = 0.5 * (k % 11)};
        if (k % 8 < SO_PATH_N_FAULTS)
            o.rate[k % 8] = k % 8 == SO_PATH_CUT ? 0.02 : 0.15;
        for (int i = 0; k % 8 == SO_PATH_N_FAULTS && i < SO_PATH_N_FAULTS; i++)
            o.rate[i] = i == SO_PATH_CUT ? 0.01 : 0.04;
        so_path *p = so_path_open(so_worker_address(w), &o);
        char *spec = spec_of(so_path_address(p), k % 3 == 2 ? ",fallback=ngram" : "");
        so_engine *e = open_engine(1 + k % 4, NULL);
        busy_ms = k % 3 == 0 ? 2 : 0.6;
        for (int i = 0; i < 3; i++)
            hits += run_all(e, spec, i % 2 ? 3 : 0).hits;
        so_engine_free(e);
        so_path_close(p, happened, &n_during);
        free(spec);
    }
    for (int i = 0; i < SO_PATH_N_FAULTS; i++) {
        print_message("%s %d\n", NAMES[i], (int)happened[i]);
        assert_true(happened[i] > 0);
        all += happened[i];
    }
    print_message("%d faults, %d in rounds; %d hits\n", (int)all, (int)n_during, hits);
    assert_true(all >= (SO_TEST_SANITIZED ? 200 : 500) && n_during >= 100 && hits > 50);
    so_worker_stop(w);
}

/* A worker that ends in the middle of rounds, and another at its address: drafts are served again. */
static void a_worker_may_end_and_come_back(void **state) {
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    char *address = so_strdup(so_worker_address(w)), *spec = spec_of(address, "");
    so_engine *e = open_engine(2, NULL);
    busy_ms = 0.6;
    for (int k = 0; k < 4; k++) {
        so_request *r[SO_CASES];
        so_err err = {0};
        run_until_hits(e, spec);
        for (int c = 0; c < SO_CASES; c++)
            r[c] = so_case_submit(e, &cases[c], &(so_spec_opts){.drafter = spec, .length = 3});
        for (int i = 0; i < 3 + k; i++)
            so_engine_step(e, &err);
        so_worker_stop(w);
        for (int i = 0; i < 5; i++)
            so_engine_step(e, &err);
        w = start(address, NULL);
        so_case_run(e);
        for (int c = 0; c < SO_CASES; c++) {
            assert_true(so_case_same(r[c], &cases[c]));
            so_request_free(r[c]);
        }
    }
    run_until_hits(e, spec);
    so_engine_free(e);
    so_worker_stop(w);
    free(spec);
    free(address);
}

/* Nobody listens: no drafts, no delay, the same text. */
static void nobody_may_listen(void **state) {
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    char *spec = spec_of(so_worker_address(w), "");
    so_worker_stop(w);
    so_engine *e = open_engine(2, NULL);
    busy_ms = 0;
    int64_t t = so_clock_ns();
    so_async_counts n = run_all(e, spec, 3);
    assert_int_equal(n.rounds, 0);
    assert_true(so_clock_ms_since(t) < (SO_TEST_SANITIZED ? 10000 : 2000));
    so_engine_free(e);
    free(spec);
}

static void two_engines_share_a_worker(void **state) {
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    char *spec = spec_of(so_worker_address(w), "");
    so_engine *e[2] = {open_engine(2, NULL), open_engine(3, NULL)};
    busy_ms = 0.6;
    for (int k = 0; k < 3; k++)
        for (int i = 0; i < 2; i++)
            run_until_hits(e[i], spec);
    for (int i = 0; i < 2; i++)
        so_engine_free(e[i]);
    so_worker_stop(w);
    free(spec);
}

/* Requests that end in the middle: cancelled, or freed while the worker may have them. */
static void requests_may_end_at_any_time(void **state) {
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    char *spec = spec_of(so_worker_address(w), "");
    busy_ms = 0.2;
    for (int k = 0; k < 30; k++) {
        so_engine *e = open_engine(3, NULL);
        so_request *r[SO_CASES];
        so_err err = {0};
        for (int c = 0; c < SO_CASES; c++)
            r[c] = so_case_submit(e, &cases[c], &(so_spec_opts){.drafter = spec});
        for (int step = 0; step < k; step++)
            so_engine_step(e, &err);
        so_request_cancel(r[0]);
        so_request_free(r[2]);
        so_request_free(r[4]);
        so_case_run(e);
        for (int c = 1; c < SO_CASES; c += 2)
            assert_true(so_case_same(r[c], &cases[c]));
        for (int c = 0; c < SO_CASES; c++)
            if (c != 2 && c != 4)
                so_request_free(r[c]);
        so_engine_free(e);
    }
    so_worker_stop(w);
    free(spec);
}

/* With `match` the worker shares the target's noise; where guesses are tested against random numbers it
 * learns none of them. */
static void the_worker_is_told_no_numbers_that_test_guesses(void **state) {
    static const so_verify_mode MODES[] = {SO_VERIFY_MATCH, SO_VERIFY_REJECT, SO_VERIFY_LENIENT};
    int64_t happened[SO_PATH_N_FAULTS] = {0}, n_during = 0;
    (void)state;
    so_worker_need_zmq();
    so_worker *w = start(NULL, NULL);
    so_path *p = so_path_open(so_worker_address(w), &(so_path_opts){0});
    char *spec = spec_of(so_path_address(p), "");
    so_engine *e = open_engine(2, NULL);
    busy_ms = 0.6;
    run_until_hits(e, spec);
    for (size_t i = 0; i < SO_LEN(MODES); i++) {
        int n_seeds = 0, n_temps = 0, n = 0;
        so_path_opened(p, &n_seeds, &n_temps);
        for (; n == 0; n = so_path_opened(p, &n_seeds, &n_temps)) {
            so_case c = cases[0]; /* temperature 0.9 */
            so_request *r = so_case_submit(
                e, &c, &(so_spec_opts){.drafter = spec, .verify = MODES[i], .lenience = 0.5});
            so_case_run(e);
            so_request_free(r);
        }
        assert_int_equal(n_seeds, MODES[i] == SO_VERIFY_MATCH ? n : 0);
        assert_int_equal(n_temps, MODES[i] == SO_VERIFY_MATCH ? n : 0);
    }
    so_engine_free(e);
    so_path_close(p, happened, &n_during);
    so_worker_stop(w);
    free(spec);
}

/* Something that answers every message, but is no worker of this version; then some that greet as one:
 * to jobs they answer nonsense, that they are alive, or that nothing is drafted. */
typedef enum answer { OTHER_VERSION, ECHO, NOISE, NONSENSE, N_ANSWERS, ALIVE, NOTHING } answer;

enum { SHORT_CTX = 40 };

typedef struct stranger {
    answer kind;
    so_zmq z;
    void *ctx, *socket;
    int stop_fd;
    char address[SO_LINK_ADDRESS];
    unsigned char bytes[1 << 16];
    so_wire_msg *msg;
    uint32_t n_sent;
    atomic_int n_jobs, longest; /* longest: text of a job */
    atomic_int n_again;         /* greetings after a job */
    pthread_t thread;
} stranger;

/* To a greeting WELCOME; to a job outcomes that the tree does not have, or tokens that no model has. */
static size_t nonsense(stranger *s, size_t n) {
    so_wire_msg *m = s->msg;
    so_err err = {0};
    if (so_wire_read(s->bytes, n, m, &err) != SO_OK)
        return 0;
    m->batch = m->job.batch;
    m->n_jobs = SO_MAX(m->n_jobs, 1);
    memset(m->fans, 0, sizeof m->fans[0] * (size_t)m->n_jobs);
    for (int i = 0; i < m->n_jobs; i++) {
        so_wire_fan *f = &m->fans[i];
        f->n_nodes = f->n_outcomes = f->n_candidates[0] = 1;
        f->candidates[0][0] = (so_ahead_candidate){m->number % 3 ? 1 << 30 : 1, 0.5f};
    }
    if (m->type == SO_WIRE_HELLO)
        m->welcome = (so_wire_welcome){.n_ctx = 100, .n_parallel = 4};
    m->type = m->type == SO_WIRE_HELLO ? SO_WIRE_WELCOME : SO_WIRE_OUTCOMES;
    return so_wire_write(m, s->bytes);
}

/* To a greeting WELCOME, with a short context; to a job that it is alive, or outcomes with
 * nothing in them. */
static size_t idle(stranger *s, size_t n) {
    so_wire_msg *m = s->msg;
    so_err err = {0};
    if (so_wire_read(s->bytes, n, m, &err) != SO_OK ||
        (m->type != SO_WIRE_HELLO && m->type != SO_WIRE_JOB))
        return 0;
    if (m->type == SO_WIRE_HELLO) {
        atomic_fetch_add(&s->n_again, s->n_jobs > 0);
        s->n_sent = 0;
        m->welcome = (so_wire_welcome){.n_ctx = SHORT_CTX, .n_parallel = 4};
        m->type = SO_WIRE_WELCOME;
    } else {
        atomic_fetch_add(&s->n_jobs, 1);
        for (int i = 0; i < m->n_jobs; i++)
            s->longest = SO_MAX(s->longest, m->rounds[i].n_tokens);
        m->batch = m->job.batch;
        m->busy_us = 0;
        m->type = s->kind == ALIVE ? SO_WIRE_ALIVE : SO_WIRE_OUTCOMES;
        memset(m->fans, 0, sizeof m->fans[0] * (size_t)m->n_jobs);
    }
    m->number = s->n_sent++;
    return so_wire_write(m, s->bytes);
}

static void *stranger_main(void *user) {
    stranger *s = user;
    so_zmq_pollitem items[] = {{s->socket, 0, SO_ZMQ_POLLIN, 0},
                               {NULL, s->stop_fd, SO_ZMQ_POLLIN, 0}};
    unsigned char peer[256];
    while (s->z.poll(items, 2, -1) >= 0 && !items[1].revents) {
        int n_peer = s->z.recv(s->socket, peer, sizeof peer, SO_ZMQ_DONTWAIT);
        if (n_peer < 0)
            continue;
        int n = s->z.recv(s->socket, s->bytes, sizeof s->bytes, SO_ZMQ_DONTWAIT);
        size_t len = (size_t)SO_MAX(n, 0);
        if (s->kind == OTHER_VERSION)
            s->bytes[4] = 9;
        for (size_t i = 0; s->kind == NOISE && i < len; i++)
            s->bytes[i] = (unsigned char)(s->bytes[i] * 31 + i);
        if (s->kind == NONSENSE)
            len = nonsense(s, len);
        if (s->kind > N_ANSWERS && (len = idle(s, len)) == 0)
            continue;
        s->z.send(s->socket, peer, (size_t)n_peer, SO_ZMQ_SNDMORE | SO_ZMQ_DONTWAIT);
        s->z.send(s->socket, s->bytes, len, SO_ZMQ_DONTWAIT);
    }
    return NULL;
}

static stranger *start_stranger(answer kind) {
    stranger *s = SO_NEW(stranger);
    so_err err = {0};
    size_t n = sizeof s->address;
    s->kind = kind;
    s->msg = SO_NEW(so_wire_msg);
    SO_OK_OR_FAIL(so_zmq_load(&s->z, &err), err);
    s->ctx = s->z.ctx_new();
    s->socket = s->z.socket(s->ctx, SO_ZMQ_ROUTER);
    s->stop_fd = eventfd(0, EFD_CLOEXEC);
    assert_int_equal(s->z.bind(s->socket, "tcp://127.0.0.1:*"), 0);
    s->z.getsockopt(s->socket, SO_ZMQ_LAST_ENDPOINT, s->address, &n);
    assert_int_equal(pthread_create(&s->thread, NULL, stranger_main, s), 0);
    return s;
}

static void stop_stranger(stranger *s) {
    int zero = 0;
    assert_int_equal(eventfd_write(s->stop_fd, 1), 0);
    pthread_join(s->thread, NULL);
    s->z.setsockopt(s->socket, SO_ZMQ_LINGER, &zero, sizeof zero);
    s->z.close(s->socket);
    s->z.ctx_term(s->ctx);
    close(s->stop_fd);
    free(s->msg);
    free(s);
}

static void strangers_are_no_workers(void **state) {
    (void)state;
    so_worker_need_zmq();
    for (int kind = 0; kind < N_ANSWERS; kind++) {
        stranger *s = start_stranger((answer)kind);
        char *spec = spec_of(s->address, "");
        so_engine *e = open_engine(2, NULL);
        busy_ms = 0.6;
        for (int k = 0; k < 4; k++)
            assert_int_equal(run_all(e, spec, k % 2 ? 3 : 0).hits, 0);
        so_engine_free(e);
        free(spec);
        stop_stranger(s);
    }
}

/* With wait=N the engine waits for a worker that says that it is alive and nothing else: not longer
 * from round to round, and not for ever. */
static void a_worker_that_is_only_alive_is_given_up(void **state) {
    (void)state;
    so_worker_need_zmq();
    stranger *s = start_stranger(ALIVE);
    char *spec = spec_of(s->address, ",wait=1");
    so_engine *e = open_engine(1, NULL);
    int n_jobs = 0;
    busy_ms = 0;
    int64_t t = so_clock_ns();
    while (s->n_again == 0) {
        so_request *r = so_case_submit(e, &cases[0], &(so_spec_opts){.drafter = spec, .length = 3});
        so_case_run(e);
        assert_true(so_case_same(r, &cases[0]));
        so_request_free(r);
        assert_true(so_clock_ms_since(t) < 20000);
        n_jobs = s->n_jobs;
    }
    /* 100 ms each, for 5 s; 8 if they became 1 s */
    assert_true(n_jobs >= (SO_TEST_SANITIZED ? 1 : 12));
    so_engine_free(e);
    free(spec);
    stop_stranger(s);
}

/* Texts that are longer than the worker's context are kept from it. */
static void a_context_may_be_short(void **state) {
    (void)state;
    so_worker_need_zmq();
    stranger *s = start_stranger(NOTHING);
    char *spec = spec_of(s->address, "");
    so_engine *e = open_engine(2, NULL);
    so_async_counts n = {0};
    busy_ms = 0.6;
    while (s->longest < SHORT_CTX)
        n = run_all(e, spec, 3);
    n = run_all(e, spec, 3);
    assert_int_equal(s->longest, SHORT_CTX);
    assert_int_equal(n.rounds, 0); /* nothing was drafted */
    assert_true(n.skipped > 0);
    so_engine_free(e);
    free(spec);
    stop_stranger(s);
}

/* With a key, and with another one; the file is the owner's alone. */
static void keys_decide(void **state) {
    char *dir, files[2][300];
    so_err err = {0};
    struct stat st;
    (void)state;
    so_worker_need_zmq();
    dir = so_test_tmp();
    for (int i = 0; i < 2; i++) {
        snprintf(files[i], sizeof files[i], "%s/key%d", dir, i);
        SO_OK_OR_FAIL(so_link_make_key(files[i], &err), err);
        assert_int_equal(stat(files[i], &st), 0);
        assert_int_equal(st.st_mode & 0777, 0600);
        assert_int_equal(so_link_make_key(files[i], &err), SO_EIO); /* it exists */
    }
    so_worker *w = start(NULL, files[0]);
    char *spec = spec_of(so_worker_address(w), "");
    busy_ms = 0.6;
    for (int i = 2; i >= 0; i--) {
        so_engine *e = open_engine(2, i == 2 ? NULL : files[i]);
        if (i == 0)
            run_until_hits(e, spec);
        for (int k = 0; i > 0 && k < 5; k++)
            assert_int_equal(run_all(e, spec, 3).rounds, 0);
        so_engine_free(e);
    }
    so_worker_stop(w);
    free(spec);
    so_test_tmp_free(dir);
}

/* Whether the worker lets a client in that has this pair and knows the worker's public key. */
static bool lets_in(const so_worker *w, const so_link_key *own, const char *public) {
    so_zmq z;
    so_err err = {0};
    int zero = 0, event = 0;
    SO_OK_OR_FAIL(so_zmq_load(&z, &err), err);
    void *ctx = z.ctx_new(), *s = z.socket(ctx, SO_ZMQ_DEALER),
         *monitor = z.socket(ctx, SO_ZMQ_PAIR);
    z.setsockopt(s, SO_ZMQ_LINGER, &zero, sizeof zero);
    z.setsockopt(s, SO_ZMQ_CURVE_SERVERKEY, public, SO_ZMQ_KEY);
    z.setsockopt(s, SO_ZMQ_CURVE_PUBLICKEY, own->public, SO_ZMQ_KEY);
    z.setsockopt(s, SO_ZMQ_CURVE_SECRETKEY, own->secret, SO_ZMQ_KEY);
    assert_int_equal(z.socket_monitor(s, "inproc://test",
                                      SO_ZMQ_EVENT_HANDSHAKE_SUCCEEDED |
                                          SO_ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                                          SO_ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                                          SO_ZMQ_EVENT_HANDSHAKE_FAILED_AUTH),
                     0);
    assert_int_equal(z.connect(monitor, "inproc://test"), 0);
    assert_int_equal(z.connect(s, so_worker_address(w)), 0);
    while ((event = so_link_event(&z, monitor)) == 0)
        assert_int_equal(z.poll(&(so_zmq_pollitem){monitor, 0, SO_ZMQ_POLLIN, 0}, 1, 60000), 1);
    z.close(s);
    z.close(monitor);
    z.ctx_term(ctx);
    return event == SO_ZMQ_EVENT_HANDSHAKE_SUCCEEDED;
}

/* The worker's public key is not enough: a client needs the secret half, too. */
static void the_public_key_lets_nobody_in(void **state) {
    char *dir, file[300], other[300];
    so_err err = {0};
    so_link_key key = {0}, other_key = {0};
    so_zmq z;
    (void)state;
    so_worker_need_zmq();
    dir = so_test_tmp();
    snprintf(file, sizeof file, "%s/key", dir);
    snprintf(other, sizeof other, "%s/other", dir);
    SO_OK_OR_FAIL(so_zmq_load(&z, &err), err);
    SO_OK_OR_FAIL(so_link_make_key(file, &err), err);
    SO_OK_OR_FAIL(so_link_make_key(other, &err), err);
    SO_OK_OR_FAIL(so_link_read_key(&z, file, &key, &err), err);
    SO_OK_OR_FAIL(so_link_read_key(&z, other, &other_key, &err), err);
    so_worker *w = start(NULL, file);
    assert_true(lets_in(w, &key, key.public));
    assert_false(lets_in(w, &other_key, key.public));
    assert_false(lets_in(w, &other_key, other_key.public));
    assert_true(lets_in(w, &key, key.public));
    so_worker_stop(w);
    so_test_tmp_free(dir);
}

static void submit_fails(so_engine *e, const char *spec, const char *why) {
    so_request_opts o = so_case_opts(&cases[0], &(so_spec_opts){.drafter = spec});
    so_request *r = NULL;
    so_err err = {0};
    assert_true(so_engine_submit(e, &o, &r, &err) < 0);
    if (!strstr(err.msg, why))
        fail_msg("%s: %s", spec, err.msg);
}

static void bad_addresses_are_refused(void **state) {
    (void)state;
    so_worker_need_zmq();
    so_engine *e = open_engine(1, NULL);
    submit_fails(e, "async(model,worker=tcp://10.0.0.1:7070)", "needs a key");
    submit_fails(e, "async(model,worker=tcp://example.org:7070)", "needs a key");
    submit_fails(e, "async(model,worker=7070)", "must be tcp://HOST:PORT");
    submit_fails(e, "async(model,worker=tcp://127.0.0.1)", "must be tcp://HOST:PORT");
    submit_fails(e, "async(model,worker=tcp://127.0.0.1:x)", "must be tcp://HOST:PORT");
    submit_fails(e, "async(model,worker=tcp://127.0.0.1:70707)", "must be tcp://HOST:PORT");
    submit_fails(e, "async(model,worker=ipc://@sooth)", "names no file");
    submit_fails(e, "async(model,worker=ipc://*)", "names no file");
    submit_fails(e, "async(ngram,worker=tcp://127.0.0.1:7070)", "a worker runs `model`");
    submit_fails(e, "async(model,worker=tcp://127.0.0.1:7070,fallback=sync)", "without sync");
    submit_fails(e, "async(model(/none.gguf),worker=tcp://127.0.0.1:7070)", "/none.gguf");
    so_engine_free(e);
    static const char *const NO_FILES[] = {"ipc://@sooth", "ipc://*"};
    for (size_t i = 0; i < SO_LEN(NO_FILES); i++) {
        so_err err = {0};
        assert_null(so_worker_start(&draft, NO_FILES[i], NULL, &err));
        assert_non_null(strstr(err.msg, "names no file"));
    }
    e = open_engine(1, "/none/key");
    submit_fails(e, "async(model,worker=tcp://127.0.0.1:7070)", "/none/key");
    so_engine_free(e);
}

/* What the planner keeps of a worker's times is kept by its address. */
static void each_address_has_its_own_times(void **state) {
    static const char *const addresses[] = {"tcp://127.0.0.1:9", "tcp://127.0.0.1:10",
                                            "tcp://127.0.0.1:9"};
    const so_remote_engine engine = {.n_vocab = 8, .n_ctx = 8, .n_parallel = 1, .max_draft = 2};
    uint64_t ids[3];
    (void)state;
    for (int i = 0; i < 3; i++) {
        so_drafter *d = NULL;
        so_err err = {0};
        SO_OK_OR_FAIL(so_remote_create(&engine, so_str_c(addresses[i]), 0, &d, &err), err);
        ids[i] = d->id;
        so_drafter_free(d);
    }
    assert_true(ids[0] == ids[2] && ids[0] != ids[1] && ids[0] != 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_option_gives_the_plain_text),
        cmocka_unit_test(a_perfect_draft_is_hit),
        cmocka_unit_test(faults_change_no_token),
        cmocka_unit_test(a_worker_may_end_and_come_back),
        cmocka_unit_test(nobody_may_listen),
        cmocka_unit_test(two_engines_share_a_worker),
        cmocka_unit_test(requests_may_end_at_any_time),
        cmocka_unit_test(the_worker_is_told_no_numbers_that_test_guesses),
        cmocka_unit_test(strangers_are_no_workers),
        cmocka_unit_test(a_worker_that_is_only_alive_is_given_up),
        cmocka_unit_test(a_context_may_be_short),
        cmocka_unit_test(keys_decide),
        cmocka_unit_test(the_public_key_lets_nobody_in),
        cmocka_unit_test(bad_addresses_are_refused),
        cmocka_unit_test(each_address_has_its_own_times),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
