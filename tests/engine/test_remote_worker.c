/* A draft worker and an engine that breaks the rules between messages (remote_worker.c): each message
 * is well-formed, but does not fit what was sent before. The worker leaves such a request out of the
 * round, and serves this engine and others as before. */
#include "so_test.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "draft/async_impl.h"
#include "draft/link.h"
#include "draft/wire.h"
#include "so_cases.h"
#include "so_worker.h"

enum { N_CTX = 200, ROOM = 500 };

static so_rig draft;
static so_worker *worker;

static int open_all(void **state) {
    so_err err = {0};
    (void)state;
    so_case_model(&draft, "llama");
    alarm(300); /* a hang fails */
    worker = so_worker_start(&draft, NULL, NULL, &err);
    return 0;
}

static int close_all(void **state) {
    (void)state;
    if (worker)
        so_worker_stop(worker);
    so_rig_close(&draft);
    return 0;
}

/* --- the engine --- */

typedef struct engine {
    so_zmq z;
    void *ctx, *socket, *monitor;
    so_wire_msg *m;
    unsigned char *bytes;
    uint32_t n_sent, batch;
} engine;

static void send_msg(engine *e, so_wire_type type) {
    e->m->type = type;
    e->m->session = 5;
    e->m->number = e->n_sent++;
    size_t n = so_wire_write(e->m, e->bytes);
    assert_true(n > 0);
    while (e->z.send(e->socket, e->bytes, n, SO_ZMQ_DONTWAIT) < 0) /* until it is connected */
        usleep(1000);
}

/* The next message that is not ALIVE, into e->m. */
static so_wire_type receive(engine *e) {
    so_err err = {0};
    do {
        so_zmq_pollitem item = {e->socket, 0, SO_ZMQ_POLLIN, 0};
        assert_int_equal(e->z.poll(&item, 1, 60000), 1); /* the worker is alive */
        int n = e->z.recv(e->socket, e->bytes, SO_WIRE_BYTES, SO_ZMQ_DONTWAIT);
        assert_true(n > 0);
        SO_OK_OR_FAIL(so_wire_read(e->bytes, (size_t)n, e->m, &err), err);
    } while (e->m->type == SO_WIRE_ALIVE);
    return e->m->type;
}

static engine *open_engine(void) {
    engine *e = SO_NEW(engine);
    so_err err = {0};
    so_link_key key = {0};
    so_worker_need_zmq();
    assert_non_null(worker);
    SO_OK_OR_FAIL(so_zmq_load(&e->z, &err), err);
    e->ctx = e->z.ctx_new();
    e->m = SO_NEW(so_wire_msg);
    e->bytes = so_alloc(SO_WIRE_BYTES);
    SO_OK_OR_FAIL(so_link_connect(&e->z, e->ctx, so_worker_address(worker), &key, &e->socket,
                                  &e->monitor, &err),
                  err);
    e->m->hello = (so_wire_hello){.limits = so_wire_limits(),
                                  .n_vocab = draft.n_vocab,
                                  .d_model = 32,
                                  .n_ctx = N_CTX,
                                  .n_parallel = 3,
                                  .max_draft = 8};
    send_msg(e, SO_WIRE_HELLO);
    assert_int_equal(receive(e), SO_WIRE_WELCOME);
    return e;
}

static void close_engine(engine *e) {
    send_msg(e, SO_WIRE_BYE);
    e->z.close(e->socket);
    e->z.close(e->monitor);
    e->z.ctx_term(e->ctx);
    free(e->m);
    free(e->bytes);
    free(e);
}

static void send_open(engine *e, uint32_t request, int n_prompt) {
    e->m->open = (so_wire_open){
        .request = request, .max_tokens = SO_MAX(N_CTX, n_prompt), .n_prompt = n_prompt};
    so_sample_defaults(&e->m->open.sample);
    e->m->n_tokens = e->m->n_biases = 0;
    send_msg(e, SO_WIRE_OPEN);
}

static void send_text(engine *e, uint32_t request, int at, int n) {
    e->m->text = (so_wire_text){request, at};
    e->m->n_tokens = n;
    for (int i = 0; i < n; i++)
        e->m->tokens[i] = (int32_t)((at + i) * 7 % draft.n_vocab);
    send_msg(e, SO_WIRE_TEXT);
}

typedef struct named {
    uint32_t request;
    int n_tokens;
} named;

static void send_job(engine *e, const named *rounds, int n) {
    e->m->job = (so_wire_job){.batch = ++e->batch, .depth = 3, .fan = 4, .left_ms = 10};
    so_async_estimates_init(&e->m->job.estimates);
    e->m->n_jobs = n;
    for (int i = 0; i < n; i++) {
        e->m->rounds[i] = (so_wire_round){rounds[i].request, rounds[i].n_tokens, 2, {{0}}};
        e->m->rounds[i].nodes[0].parent = -1;
        e->m->rounds[i].nodes[1] = (so_wire_node){9, 0, 0.5f};
    }
    send_msg(e, SO_WIRE_JOB);
}

/* Until the batch is over: which of its requests were drafted for. */
static void wait_for_end(engine *e, bool *drafted, int n) {
    memset(drafted, 0, (size_t)n * sizeof *drafted);
    for (;;) {
        so_wire_type type = receive(e);
        if (e->m->batch != e->batch)
            continue;
        if (type == SO_WIRE_DONE)
            return;
        assert_true(type == SO_WIRE_OUTCOMES || type == SO_WIRE_LEVEL);
        assert_int_equal(e->m->n_jobs, n);
        for (int i = 0; i < n && type == SO_WIRE_OUTCOMES; i++)
            drafted[i] = e->m->fans[i].n_nodes > 0;
    }
}

static bool is_drafted(engine *e, uint32_t request, int n_tokens) {
    bool drafted;
    send_job(e, &(named){request, n_tokens}, 1);
    wait_for_end(e, &drafted, 1);
    return drafted;
}

/* A request as it should be. */
static void serves(engine *e, uint32_t request) {
    send_open(e, request, 4);
    send_text(e, request, 0, 20);
    assert_true(is_drafted(e, request, 20));
    send_text(e, request, 20, 3);
    assert_true(is_drafted(e, request, 23));
    e->m->request = request;
    send_msg(e, SO_WIRE_CLOSE);
}

/* --- what is left out --- */

static void a_text_that_shrinks(void **state) {
    (void)state;
    engine *e = open_engine();
    static const int LATER[] = {99, 40, 3, 1};
    for (uint32_t i = 0; i < SO_LEN(LATER); i++) {
        send_open(e, i, 1);
        send_text(e, i, 0, 100);
        assert_true(is_drafted(e, i, 100));
        assert_false(is_drafted(e, i, LATER[i]));
        assert_true(is_drafted(e, i, 100));
        e->m->request = i;
        send_msg(e, SO_WIRE_CLOSE);
    }
    serves(e, 10);
    close_engine(e);
}

static void a_request_that_comes_twice(void **state) {
    (void)state;
    bool drafted[3];
    engine *e = open_engine();
    for (uint32_t i = 1; i <= 2; i++) {
        send_open(e, i, 1);
        send_text(e, i, 0, 30);
    }
    send_job(e, (named[]){{1, 5}, {2, 30}, {1, 9}}, 3);
    wait_for_end(e, drafted, 3);
    assert_true(drafted[0] && drafted[1] && !drafted[2]);
    serves(e, 10);
    close_engine(e);
}

static void a_length_that_the_text_has_not(void **state) {
    (void)state;
    engine *e = open_engine();
    send_open(e, 1, 10);
    assert_false(is_drafted(e, 1, 1)); /* no text at all */
    send_text(e, 1, 0, 30);
    assert_false(is_drafted(e, 1, 31));
    assert_false(is_drafted(e, 1, 1 << 24));
    assert_false(is_drafted(e, 1, 9)); /* less than the prompt */
    assert_false(is_drafted(e, 7, 30));
    assert_true(is_drafted(e, 1, 30));
    serves(e, 10);
    close_engine(e);
}

/* Longer than the context, with a gap, or behind the end of the request: none of it is taken. */
static void a_text_that_does_not_fit(void **state) {
    (void)state;
    engine *e = open_engine();
    send_open(e, 1, 1);
    send_text(e, 1, 5, 10);
    assert_false(is_drafted(e, 1, 5));
    send_text(e, 1, 0, N_CTX + 1);
    assert_false(is_drafted(e, 1, N_CTX));
    send_text(e, 1, 0, N_CTX - 1);
    send_text(e, 1, N_CTX - 1, 2);
    assert_false(is_drafted(e, 1, N_CTX));
    assert_true(is_drafted(e, 1, N_CTX - 9));
    send_text(e, 1, N_CTX - 1, 1);
    is_drafted(e, 1, N_CTX); /* there may be no room for a guess */
    send_text(e, 1, N_CTX, 1);
    assert_false(is_drafted(e, 1, N_CTX + 1));
    send_open(e, 2, ROOM); /* a prompt longer than the context */
    send_text(e, 2, 0, ROOM);
    assert_false(is_drafted(e, 2, ROOM));
    serves(e, 10);
    close_engine(e);
}

static void a_request_that_is_opened_twice(void **state) {
    (void)state;
    engine *e = open_engine();
    send_open(e, 1, 1);
    send_text(e, 1, 0, 30);
    send_open(e, 1, 25);
    assert_true(is_drafted(e, 1, 20));  /* the first counts */
    for (uint32_t i = 20; i < 120; i++) /* more than there is room for */
        send_open(e, i, 1);
    send_text(e, 119, 0, 30);
    assert_false(is_drafted(e, 119, 30));
    assert_true(is_drafted(e, 1, 30));
    close_engine(e);
}

/* While a job runs, or before it does: the request is closed, opened again with the same number, and
 * the whole engine leaves. */
static void a_request_that_is_closed_in_its_job(void **state) {
    bool drafted[2];
    (void)state;
    for (int k = 0; k < 20; k++) {
        engine *e = open_engine();
        for (uint32_t i = 1; i <= 2; i++) {
            send_open(e, i, 1);
            send_text(e, i, 0, N_CTX - 20);
        }
        send_job(e, (named[]){{1, N_CTX - 20}, {2, N_CTX - 20}}, 2);
        if (k % 2)
            send_job(e, (named[]){{2, N_CTX - 20}, {1, N_CTX - 20}}, 2);
        usleep(300 * (useconds_t)(k % 7));
        e->m->request = 1;
        send_msg(e, SO_WIRE_CLOSE);
        if (k % 3 == 0) {
            send_open(e, 1, 1);
            send_text(e, 1, 0, 5);
            assert_true(is_drafted(e, 1, 5));
        } else if (k % 3 == 1) {
            send_job(e, (named[]){{1, 9}, {2, N_CTX - 20}}, 2);
            wait_for_end(e, drafted, 2);
            assert_true(!drafted[0] && drafted[1]);
        }
        close_engine(e);
    }
    engine *e = open_engine();
    serves(e, 1);
    close_engine(e);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_text_that_shrinks),
        cmocka_unit_test(a_request_that_comes_twice),
        cmocka_unit_test(a_length_that_the_text_has_not),
        cmocka_unit_test(a_text_that_does_not_fit),
        cmocka_unit_test(a_request_that_is_opened_twice),
        cmocka_unit_test(a_request_that_is_closed_in_its_job),
    };
    return cmocka_run_group_tests(tests, open_all, close_all);
}
