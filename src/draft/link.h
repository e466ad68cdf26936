/* Connections between engines and draft workers: addresses, keys, sockets.
 *
 * An address is tcp://HOST:PORT or ipc://PATH. Without a key only addresses of this host are
 * accepted: loopback, and ipc, where the file's permissions decide (0700). A key is a file that both
 * sides have. It holds the secret half of a CURVE pair, which serves both as the worker's key and as
 * the engine's: an engine accepts only a worker that has it, and the worker only engines that have
 * it. ZeroMQ encrypts with it, and drops what is replayed or changed on the path. */
#ifndef SO_DRAFT_LINK_H
#define SO_DRAFT_LINK_H

#include "base/zmq.h"

enum { SO_LINK_ADDRESS = 256 /* bytes, with the end */, SO_LINK_RECONNECT_MS = 2000 };

typedef struct so_link_key {
    bool set; /* false: no key */
    char secret[SO_ZMQ_KEY], public[SO_ZMQ_KEY];
} so_link_key;

/* Creates the file, which must not exist, readable for its owner only. */
int so_link_make_key(const char *path, so_err *err);
int so_link_read_key(const so_zmq *z, const char *path, so_link_key *out, so_err *err);
/* Checks the form, that ipc names a file, and that an address beyond this host has a key. */
int so_link_check(const char *address, bool has_key, so_err *err);

/* A ROUTER that listens. With a key, *gate is the socket on which ZeroMQ asks whether a client may
 * connect, to be answered by so_link_answer when it is readable; otherwise NULL. */
int so_link_listen(const so_zmq *z, void *ctx, const char *address, const so_link_key *key,
                   void **out, void **gate, so_err *err);
/* Answers one question; false: a client had another key. */
bool so_link_answer(const so_zmq *z, void *gate, const so_link_key *key);
/* A DEALER that connects, and connects again with growing intervals of up to SO_LINK_RECONNECT_MS when
 * the connection is lost. *monitor receives its events, for so_link_event. */
int so_link_connect(const so_zmq *z, void *ctx, const char *address, const so_link_key *key,
                    void **out, void **monitor, so_err *err);
/* Begins anew. ZeroMQ does not connect again after bytes that break its protocol. */
void so_link_reconnect(const so_zmq *z, void *socket, const char *address);
/* Reads the remaining frames of a message and drops them; returns how many there were. */
int so_link_drop_frames(const so_zmq *z, void *socket);
/* The next event of a monitor; 0: none. */
int so_link_event(const so_zmq *z, void *monitor);

#endif
