/* The numbers of base/zmq.h are those of the library's own header, and a message goes through. */
#include "so_test.h"

#include <string.h>

#include "base/zmq.h"

#if __has_include(<zmq.h>)
#include <zmq.h>
#define SAME(name) assert_int_equal(SO_##name, name)

static void numbers_are_those_of_the_header(void **state) {
    (void)state;
    SAME(ZMQ_PAIR), SAME(ZMQ_REP), SAME(ZMQ_DEALER), SAME(ZMQ_ROUTER);
    SAME(ZMQ_DONTWAIT), SAME(ZMQ_SNDMORE), SAME(ZMQ_POLLIN), SAME(ZMQ_RCVMORE);
    SAME(ZMQ_LINGER), SAME(ZMQ_RECONNECT_IVL), SAME(ZMQ_RECONNECT_IVL_MAX), SAME(ZMQ_MAXMSGSIZE);
    SAME(ZMQ_SNDHWM), SAME(ZMQ_RCVHWM), SAME(ZMQ_LAST_ENDPOINT), SAME(ZMQ_IMMEDIATE),
        SAME(ZMQ_ROUTER_MANDATORY);
    SAME(ZMQ_IPV6), SAME(ZMQ_CURVE_SERVER), SAME(ZMQ_CURVE_PUBLICKEY), SAME(ZMQ_CURVE_SECRETKEY);
    SAME(ZMQ_CURVE_SERVERKEY), SAME(ZMQ_ZAP_DOMAIN), SAME(ZMQ_HANDSHAKE_IVL);
    SAME(ZMQ_HEARTBEAT_IVL), SAME(ZMQ_HEARTBEAT_TIMEOUT), SAME(ZMQ_EVENT_CONNECT_RETRIED);
    SAME(ZMQ_EVENT_DISCONNECTED), SAME(ZMQ_EVENT_HANDSHAKE_SUCCEEDED);
    SAME(ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL), SAME(ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL);
    SAME(ZMQ_EVENT_HANDSHAKE_FAILED_AUTH);
    assert_int_equal(sizeof(so_zmq_pollitem), sizeof(zmq_pollitem_t));
    assert_int_equal(offsetof(so_zmq_pollitem, revents), offsetof(zmq_pollitem_t, revents));
}
#else
static void numbers_are_those_of_the_header(void **state) {
    (void)state;
    SO_SKIP("zmq.h is not installed");
}
#endif

static void a_message_goes_through(void **state) {
    so_zmq z;
    so_err err = {0};
    char got[8] = {0};
    (void)state;
    if (so_zmq_load(&z, &err) != SO_OK) {
        assert_non_null(strstr(err.msg, "libzmq5"));
        SO_SKIP("%s", err.msg);
    }
    void *ctx = z.ctx_new();
    void *a = z.socket(ctx, SO_ZMQ_PAIR), *b = z.socket(ctx, SO_ZMQ_PAIR);
    assert_int_equal(z.bind(a, "inproc://test"), 0);
    assert_int_equal(z.connect(b, "inproc://test"), 0);
    assert_int_equal(z.send(b, "hello", 5, 0), 5);
    assert_int_equal(z.recv(a, got, sizeof got, 0), 5);
    assert_string_equal(got, "hello");
    assert_int_equal(z.close(a) | z.close(b) | z.ctx_term(ctx), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(numbers_are_those_of_the_header),
        cmocka_unit_test(a_message_goes_through),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
