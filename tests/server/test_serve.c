/* A server within the test's own process, so that the sanitizers see all threads: wake-ups,
 * cancellations, shutdown. The scripts test the API; this tests memory and threads. */
#include "so_test.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "server/impl.h"
#include "so_tiny.h"

typedef struct rig {
    char *dir;
    so_bundle b;
    so_server *s;
    _Atomic int n_lines; /* log lines */
    bool fail;           /* loading the model fails */
    bool faulty;         /* the device fails while device_fails > 0 */
} rig;

/* --- a device that fails --- */

static const so_backend_vt *real_vt;
static so_backend_vt faulty_vt;
static _Atomic int device_fails; /* that many more syncs fail */

static int faulty_sync(so_backend *b, so_err *err) {
    so_err ignored = {0};
    if (device_fails == 0)
        return real_vt->sync(b, err);
    device_fails--;
    real_vt->sync(b, &ignored);
    return so_err_set(err, SO_EIO, "the GPU failed: injected");
}

static int faulty_memory(so_backend *b, size_t *n_free, size_t *n_total, so_err *err) {
    (void)b;
    (void)err;
    *n_free = 1234567;
    *n_total = 80000000;
    return SO_OK;
}

static void make_faulty(so_backend *b) {
    real_vt = b->vt;
    faulty_vt = *real_vt;
    faulty_vt.sync = faulty_sync;
    faulty_vt.memory = faulty_memory;
    b->vt = &faulty_vt;
}

static int load(void *user, so_serving *out, so_err *err) {
    rig *r = user;
    if (r->fail)
        return so_err_set(err, SO_EIO, "as wanted");
    so_bundle_opts o;
    so_bundle_defaults(&o);
    o.n_threads = 2;
    char *path = so_path_join(r->dir, "tiny.gguf");
    int rc = so_bundle_open(path, &o, &r->b, err);
    free(path);
    if (rc != SO_OK)
        return rc;
    if (r->faulty)
        make_faulty(r->b.backend);
    so_engine_defaults(r->b.model, &out->eo);
    out->eo.n_parallel = 4;
    out->eo.max_draft = 8;
    out->b = &r->b;
    out->sample = r->b.sample;
    out->spec = (so_spec_opts){.drafter = "ngram", .lenience = 1};
    return SO_OK;
}

static void count_line(void *user, so_str line) {
    rig *r = user;
    assert_true(line.len > 0);
    r->n_lines++;
}

static so_server_state wait_while(so_server *s, so_server_state st) {
    struct pollfd p = {.fd = so_server_fd(s), .events = POLLIN};
    while (so_server_get_state(s) == st) {
        uint64_t n;
        assert_int_equal(poll(&p, 1, 120000), 1);
        assert_int_equal(read(p.fd, &n, sizeof n), sizeof n);
    }
    return so_server_get_state(s);
}

static void open_rig(rig *r, const so_server_opts *more) {
    so_server_opts o = *more;
    so_err err = {0};
    r->dir = so_test_tmp();
    char *path = so_path_join(r->dir, "tiny.gguf");
    so_tiny_write(path, NULL);
    free(path);
    o.port = 0;
    o.load = load;
    o.load_user = r;
    o.log = count_line;
    o.log_user = r;
    SO_OK_OR_FAIL(so_server_create(&o, &r->s, &err), err);
}

static void close_rig(rig *r) {
    so_server_free(r->s);
    if (r->faulty)
        r->b.backend->vt = real_vt;
    so_bundle_close(&r->b);
    so_test_tmp_free(r->dir);
}

/* --- a client --- */

static int dial(const rig *r) {
    struct sockaddr_in a = {.sin_family = AF_INET,
                            .sin_port = htons((uint16_t)so_server_port(r->s)),
                            .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(fd >= 0);
    assert_int_equal(connect(fd, (const struct sockaddr *)&a, sizeof a), 0);
    return fd;
}

static void send_request(int fd, const char *path, const char *body) {
    char head[256];
    int n = snprintf(head, sizeof head,
                     "POST %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: "
                     "%zu\r\n\r\n",
                     path, strlen(body));
    assert_int_equal(send(fd, head, (size_t)n, MSG_NOSIGNAL), n);
    assert_int_equal(send(fd, body, strlen(body), MSG_NOSIGNAL), strlen(body));
}

/* Receives until the server closes the connection. */
static void receive_all(int fd, so_buf *out) {
    char part[4096];
    for (ssize_t n; (n = recv(fd, part, sizeof part, 0)) > 0;)
        so_buf_append(out, part, (size_t)n);
    close(fd);
}

static void get_answer(const rig *r, const char *path, const char *body, so_buf *out) {
    int fd = dial(r);
    send_request(fd, path, body);
    receive_all(fd, out);
}

#define TEXT "/v1/completions"
#define GOOD                                                                                      \
    "{\"prompt\": \"the sea\", \"ignore_eos\": true, \"max_tokens\": 20, \"seed\": 3, \"n\": 2, " \
    "\"logprobs\": 2, \"sooth\": {\"rounds\": true}"

/* The texts of all choices: they must not depend on other requests. */
static void texts_of(const so_buf *answer, so_buf *out) {
    const char *body = strstr(so_buf_str(answer).ptr, "\r\n\r\n");
    json_error_t e;
    assert_non_null(body);
    json_t *o = json_loads(body + 4, 0, &e), *c;
    size_t i;
    if (!o)
        fail_msg("%s in %s", e.text, body);
    json_array_foreach(json_object_get(o, "choices"), i, c)
        so_buf_printf(out, "%s|", json_string_value(json_object_get(c, "text")));
    json_decref(o);
}

static void get_texts(const rig *r, so_buf *out) {
    so_buf answer = {0};
    get_answer(r, TEXT, GOOD "}", &answer);
    texts_of(&answer, out);
    so_buf_free(&answer);
}

typedef struct client {
    pthread_t thread;
    const rig *r;
    int index, n_rounds;
    so_str want;
} client;

/* In turn: not streamed, streamed, hang up at once, hang up in the middle, invalid. */
static void *run_client(void *arg) {
    client *c = arg;
    char part[64];
    for (int i = 0; i < c->n_rounds; i++) {
        so_buf out = {0};
        int fd;
        switch ((c->index + i) % 5) {
        case 0:
            get_texts(c->r, &out);
            if (!so_str_eq(so_buf_str(&out), c->want))
                fail_msg("%s instead of %s", out.data, c->want.ptr);
            break;
        case 1:
            get_answer(c->r, TEXT, GOOD ", \"stream\": true}", &out);
            assert_non_null(strstr(so_buf_str(&out).ptr, "data: [DONE]"));
            break;
        case 2:
            fd = dial(c->r);
            send_request(fd, TEXT, GOOD "}");
            close(fd);
            break;
        case 3:
            fd = dial(c->r);
            send_request(fd, TEXT, GOOD ", \"stream\": true}");
            recv(fd, part, sizeof part, 0);
            close(fd);
            break;
        default:
            get_answer(c->r, "/metrics", "", &out);
            get_answer(c->r, TEXT, "{\"prompt\": 5}", &out);
            assert_non_null(strstr(so_buf_str(&out).ptr, " 400 "));
        }
        so_buf_free(&out);
    }
    return NULL;
}

static void run_clients(const rig *r, so_str want, int n_rounds) {
    client clients[8];
    for (int i = 0; i < (int)SO_LEN(clients); i++) {
        clients[i] = (client){.r = r, .index = i, .n_rounds = n_rounds, .want = want};
        assert_int_equal(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]), 0);
    }
    for (int i = 0; i < (int)SO_LEN(clients); i++)
        pthread_join(clients[i].thread, NULL);
}

/* --- tests --- */

static void test_many_clients(void **state) {
    (void)state;
    rig r = {0};
    so_server_opts o;
    so_buf want = {0};
    so_server_defaults(&o);
    o.log_json = true;
    open_rig(&r, &o);
    assert_int_equal(wait_while(r.s, SO_SERVER_LOADING), SO_SERVER_READY);
    get_texts(&r, &want);
    run_clients(&r, so_buf_str(&want), SO_TEST_SANITIZED ? 10 : 25);
    so_server_drain(r.s);
    assert_int_equal(wait_while(r.s, SO_SERVER_DRAINING), SO_SERVER_DRAINED);
    assert_true(r.n_lines > 8);
    so_buf_free(&want);
    close_rig(&r);
}

static void *send_repeatedly(void *arg) {
    const rig *r = arg;
    struct timeval limit = {.tv_sec = 120};
    for (int i = 0; i < 3; i++) {
        so_buf out = {0};
        int fd = dial(r);
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
        send_request(fd, TEXT, GOOD ", \"stream\": true, \"max_tokens\": 200}");
        receive_all(fd, &out);
        so_buf_free(&out);
        if (so_server_get_state(r->s) != SO_SERVER_READY)
            break;
    }
    return NULL;
}

/* Drained with timeout 0 while answers run: every sleeping connection is woken, and nothing leaks
 * or is used after free. */
static void test_sudden_end(void **state) {
    (void)state;
    for (int round = 0; round < 4; round++) {
        rig r = {0};
        so_server_opts o;
        pthread_t threads[6];
        so_server_defaults(&o);
        o.drain_s = 0;
        open_rig(&r, &o);
        assert_int_equal(wait_while(r.s, SO_SERVER_LOADING), SO_SERVER_READY);
        for (int i = 0; i < 6; i++)
            assert_int_equal(pthread_create(&threads[i], NULL, send_repeatedly, &r), 0);
        usleep(20000 + 15000u * (unsigned)round);
        so_server_drain(r.s);
        assert_int_equal(wait_while(r.s, SO_SERVER_DRAINING), SO_SERVER_DRAINED);
        /* join the clients before the server is freed */
        for (int i = 0; i < 6; i++)
            pthread_join(threads[i], NULL);
        close_rig(&r);
    }
}

static void test_free_while_loading(void **state) {
    (void)state;
    rig r = {0};
    so_server_opts o;
    so_err err = {0};
    so_server_defaults(&o);
    open_rig(&r, &o);
    close_rig(&r); /* possibly while loading */
    r = (rig){.fail = true};
    open_rig(&r, &o);
    assert_int_equal(wait_while(r.s, SO_SERVER_LOADING), SO_SERVER_FAILED);
    so_server_error(r.s, &err);
    assert_string_equal(err.msg, "as wanted");
    so_buf out = {0};
    get_answer(&r, TEXT, GOOD "}", &out);
    assert_non_null(strstr(so_buf_str(&out).ptr, " 503 "));
    so_buf_free(&out);
    close_rig(&r);
}

/* A request whose job reaches the worker after so_worker_end_all gets 503, not the 429 of a full
 * queue. */
static void test_submitted_after_end(void **state) {
    (void)state;
    rig r = {0};
    so_server_opts o;
    so_buf out = {0};
    so_server_defaults(&o);
    open_rig(&r, &o);
    assert_int_equal(wait_while(r.s, SO_SERVER_LOADING), SO_SERVER_READY);
    so_worker_end_all(r.s->worker, "as wanted");
    get_answer(&r, TEXT, GOOD "}", &out);
    assert_non_null(strstr(so_buf_str(&out).ptr, " 503 "));
    assert_non_null(strstr(out.data, "\"stopping\""));
    assert_null(strstr(out.data, "queue"));
    so_buf_free(&out);
    close_rig(&r);
}

static void get(const rig *r, const char *path, so_buf *out) {
    int fd = dial(r);
    char head[128];
    int n = snprintf(head, sizeof head,
                     "GET %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", path);
    assert_int_equal(send(fd, head, (size_t)n, MSG_NOSIGNAL), n);
    so_buf_clear(out);
    receive_all(fd, out);
}

static void need(const so_buf *out, const char *text) {
    if (!strstr(so_buf_str(out).ptr, text))
        fail_msg("no '%s' in %.400s", text, so_buf_str(out).ptr);
}

/* A failed pass ends its requests with the cause, streamed or not, and the server goes on. When the
 * device is lost, requests are refused with the reason, and /health and /metrics say so. */
static void test_failing_device(void **state) {
    (void)state;
    rig r = {.faulty = true};
    so_server_opts o;
    so_buf out = {0}, before = {0}, after = {0};
    so_server_defaults(&o);
    open_rig(&r, &o);
    assert_int_equal(wait_while(r.s, SO_SERVER_LOADING), SO_SERVER_READY);
    get_texts(&r, &before);
    for (int stream = 0; stream < 2; stream++) {
        device_fails = 1;
        so_buf_clear(&out);
        get_answer(&r, TEXT, stream ? GOOD ", \"stream\": true}" : GOOD "}", &out);
        need(&out, "the GPU failed: injected");
        if (!stream)
            need(&out, " 500 ");
        get(&r, "/health", &out);
        need(&out, " 200 ");
        so_buf_clear(&after);
        get_texts(&r, &after);
        assert_string_equal(so_buf_str(&before).ptr, so_buf_str(&after).ptr);
    }
    get(&r, "/metrics", &out);
    need(&out, "sooth_device_memory_bytes 80000000\n");
    need(&out, "sooth_device_memory_free_bytes 1234567\n");
    need(&out, "threads 2\"} 1\n"); /* of sooth_device_info */
    get(&r, "/props", &out);
    need(&out, "\"memory_free_bytes\":1234567");
    device_fails = 1 << 30;
    so_buf_clear(&out);
    get_answer(&r, TEXT, GOOD "}", &out);
    need(&out, "the GPU failed: injected");
    assert_int_equal(wait_while(r.s, SO_SERVER_READY), SO_SERVER_LOST);
    for (int i = 0; i < 2; i++) {
        so_buf_clear(&out);
        get_answer(&r, TEXT, GOOD "}", &out);
        need(&out, " 503 ");
        need(&out, "\"device_lost\"");
        need(&out, "the GPU failed: injected");
    }
    get(&r, "/health", &out);
    need(&out, " 503 ");
    need(&out, "\"lost\"");
    need(&out, "\"the GPU failed: injected\"");
    get(&r, "/metrics", &out);
    need(&out, "sooth_state{state=\"lost\"} 1");
    so_server_drain(r.s);
    device_fails = 0;
    so_buf_free(&out);
    so_buf_free(&before);
    so_buf_free(&after);
    close_rig(&r);
}

/* --- a job without a server --- */

static void count_wake(void *user) { (*(int *)user)++; }

/* New tokens wake a stream each time it sleeps; a job without `stream` is woken once, at its end. */
static void test_unstreamed_jobs_wake_once(void **state) {
    (void)state;
    static const char *const bodies[] = {"{\"prompt\": \"x\"}",
                                         "{\"prompt\": \"x\", \"stream\": true}"};
    for (int stream = 0; stream < 2; stream++) {
        so_sample_params sample;
        so_api_request rq;
        so_api_error err;
        so_step_info step = {0};
        int n_wakes = 0;
        so_sample_defaults(&sample);
        assert_true(so_api_parse(SO_API_COMPLETION, so_str_c(bodies[stream]), &sample, &rq, &err));
        so_job *j = so_job_create(&rq);
        j->wake = count_wake;
        j->wake_user = &n_wakes;
        for (int i = 0; i < 5; i++) {
            j->asleep = true;
            so_job_notify(j, &step, false);
            assert_int_equal(j->asleep, !stream);
        }
        assert_int_equal(n_wakes, stream ? 5 : 0);
        j->asleep = true;
        so_job_notify(j, &step, true);
        assert_int_equal(n_wakes, stream ? 6 : 1);
        so_job_notify(j, &step, true); /* already awake: not woken again */
        assert_int_equal(n_wakes, stream ? 6 : 1);
        so_job_release(j);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_clients),       cmocka_unit_test(test_sudden_end),
        cmocka_unit_test(test_free_while_loading), cmocka_unit_test(test_submitted_after_end),
        cmocka_unit_test(test_failing_device),     cmocka_unit_test(test_unstreamed_jobs_wake_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
