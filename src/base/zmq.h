/* The functions of libzmq.so.5 that sooth calls, found at run time.
 *
 * Only draft workers need ZeroMQ, so programs are not linked with it: they run without the package,
 * start without loading its dozen libraries, and are built without its headers. The declarations
 * below are those of the manual pages zmq_socket(3), zmq_setsockopt(3) and so on, in the ABI that
 * libzmq.so.5 has had since 2014; tests/base/test_zmq.c compares the numbers with zmq.h where it is
 * installed. Functions return −1 and set errno on failure. */
#ifndef SO_BASE_ZMQ_H
#define SO_BASE_ZMQ_H

#include <stddef.h>

#include "base/err.h"

enum {
    SO_ZMQ_PAIR = 0,
    SO_ZMQ_REP = 4,
    SO_ZMQ_DEALER = 5,
    SO_ZMQ_ROUTER = 6,
    /* flags */
    SO_ZMQ_DONTWAIT = 1,
    SO_ZMQ_SNDMORE = 2,
    SO_ZMQ_POLLIN = 1,
    /* options */
    SO_ZMQ_RCVMORE = 13,
    SO_ZMQ_LINGER = 17,
    SO_ZMQ_RECONNECT_IVL = 18,
    SO_ZMQ_RECONNECT_IVL_MAX = 21,
    SO_ZMQ_MAXMSGSIZE = 22,
    SO_ZMQ_SNDHWM = 23,
    SO_ZMQ_RCVHWM = 24,
    SO_ZMQ_LAST_ENDPOINT = 32,
    SO_ZMQ_ROUTER_MANDATORY = 33,
    SO_ZMQ_IMMEDIATE = 39,
    SO_ZMQ_IPV6 = 42,
    SO_ZMQ_CURVE_SERVER = 47,
    SO_ZMQ_CURVE_PUBLICKEY = 48,
    SO_ZMQ_CURVE_SECRETKEY = 49,
    SO_ZMQ_CURVE_SERVERKEY = 50,
    SO_ZMQ_ZAP_DOMAIN = 55,
    SO_ZMQ_HANDSHAKE_IVL = 66,
    SO_ZMQ_HEARTBEAT_IVL = 75,
    SO_ZMQ_HEARTBEAT_TIMEOUT = 77,
    /* events of a monitor */
    SO_ZMQ_EVENT_CONNECT_RETRIED = 0x0004,
    SO_ZMQ_EVENT_DISCONNECTED = 0x0200,
    SO_ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL = 0x0800,
    SO_ZMQ_EVENT_HANDSHAKE_SUCCEEDED = 0x1000,
    SO_ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL = 0x2000,
    SO_ZMQ_EVENT_HANDSHAKE_FAILED_AUTH = 0x4000,
};

enum { SO_ZMQ_KEY = 41 }; /* a key in Z85, with its end */

typedef struct so_zmq_pollitem {
    void *socket; /* NULL: fd */
    int fd;
    short events, revents;
} so_zmq_pollitem;

typedef struct so_zmq {
    void *(*ctx_new)(void);
    int (*ctx_term)(void *ctx);
    void *(*socket)(void *ctx, int type);
    int (*close)(void *socket);
    int (*setsockopt)(void *socket, int option, const void *value, size_t len);
    int (*getsockopt)(void *socket, int option, void *value, size_t *len);
    int (*bind)(void *socket, const char *address);
    int (*connect)(void *socket, const char *address);
    int (*disconnect)(void *socket, const char *address);
    int (*send)(void *socket, const void *p, size_t len, int flags);
    int (*recv)(void *socket, void *p, size_t len, int flags); /* the length before truncation */
    int (*poll)(so_zmq_pollitem *items, int n, long timeout_ms);
    int (*socket_monitor)(void *socket, const char *address, int events);
    int (*has)(const char *capability);
    int (*curve_keypair)(char *public_key, char *secret_key);
    int (*curve_public)(char *public_key, const char *secret_key);
    char *(*z85_encode)(char *out, const unsigned char *data, size_t len);
    const char *(*strerror)(int code);
} so_zmq;

/* SO_EUNSUPPORTED: the library is not installed; the message names the package. It is never
 * unloaded. Any thread. */
int so_zmq_load(so_zmq *out, so_err *err);

#endif
