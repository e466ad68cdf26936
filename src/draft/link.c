/* Addresses, keys and sockets of draft workers (link.h). Knows nothing of messages but their maximum
 * length. Each socket belongs to one thread at a time. */
#include "draft/link.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "draft/wire.h"

#define KEY_MARK "sooth-worker-key-1 "
#define ZAP_ADDRESS "inproc://zeromq.zap.01"
enum { MAX_KEY_FILE = 256 };
enum { QUEUE = 64 }; /* messages of one peer; more wait in the kernel's buffers, or are not sent */
enum { RECONNECT_MS = 20, GOODBYE_MS = 100, HEARTBEAT_MS = 1000, SILENCE_MS = 3000 };

/* --- keys --- */

int so_link_make_key(const char *path, so_err *err) {
    so_zmq z;
    char public[SO_ZMQ_KEY], secret[SO_ZMQ_KEY], line[MAX_KEY_FILE];
    int rc = so_zmq_load(&z, err);
    if (rc != SO_OK)
        return rc;
    if (z.curve_keypair(public, secret) != 0)
        return so_err_set(err, SO_EIO, "a key cannot be made: %s", z.strerror(errno));
    int n = snprintf(line, sizeof line, KEY_MARK "%s\n", secret);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno == EEXIST)
        return so_err_set(err, SO_EIO, "%s exists already: remove it, or name another file", path);
    if (fd < 0)
        return so_err_set(err, SO_EIO, "%s: %s", path, strerror(errno));
    bool ok = write(fd, line, (size_t)n) == n && fsync(fd) == 0;
    int code = errno;
    close(fd);
    if (!ok)
        unlink(path);
    return ok ? SO_OK : so_err_set(err, SO_EIO, "%s: %s", path, strerror(code));
}

int so_link_read_key(const so_zmq *z, const char *path, so_link_key *out, so_err *err) {
    static const size_t MARK = sizeof KEY_MARK - 1, LINE = MARK + SO_ZMQ_KEY - 1;
    so_buf text = {.max = MAX_KEY_FILE};
    struct stat st;
    so_link_key key = {.set = true};
    int rc = so_file_read(path, MAX_KEY_FILE, &text, err);
    if (rc == SO_OK && (text.len < LINE || memcmp(text.data, KEY_MARK, MARK) != 0 ||
                        (text.len > LINE && text.data[LINE] != '\n')))
        rc =
            so_err_set(err, SO_EFORMAT,
                       "%s is not a key: make one with `sooth draft-worker --make-key FILE`", path);
    if (rc == SO_OK)
        memcpy(key.secret, text.data + MARK, SO_ZMQ_KEY - 1);
    so_buf_free(&text);
    if (rc == SO_OK && z->curve_public(key.public, key.secret) != 0)
        rc = so_err_set(err, SO_EFORMAT, "%s is damaged: its key is not valid", path);
    if (rc == SO_OK && stat(path, &st) == 0 && (st.st_mode & 077))
        so_log(SO_LOG_WARN, "%s can be read by other users: chmod 600 it", path);
    if (rc == SO_OK)
        *out = key;
    return rc;
}

/* --- addresses --- */

static bool is_loopback(so_str host) {
    struct in_addr v4;
    char text[64];
    if (host.len >= sizeof text)
        return false;
    memcpy(text, host.ptr, host.len);
    text[host.len] = '\0';
    return strcmp(text, "localhost") == 0 || strcmp(text, "[::1]") == 0 ||
           (inet_pton(AF_INET, text, &v4) == 1 && (ntohl(v4.s_addr) >> 24) == 127);
}

static bool is_port(const char *p) {
    char *end;
    if (strcmp(p, "*") == 0)
        return true;
    long v = strtol(p, &end, 10);
    return *p >= '0' && *p <= '9' && *end == '\0' && v >= 0 && v <= 65535;
}

int so_link_check(const char *address, bool has_key, so_err *err) {
    bool ipc = strncmp(address, "ipc://", 6) == 0 && address[6];
    bool tcp = strncmp(address, "tcp://", 6) == 0 && !strchr(address, ';');
    const char *colon = tcp ? strrchr(address + 6, ':') : NULL;
    if (strlen(address) >= SO_LINK_ADDRESS ||
        !(ipc || (colon && colon > address + 6 && is_port(colon + 1))))
        return so_err_set(err, SO_EINVAL,
                          "the worker's address '%.80s': must be tcp://HOST:PORT or ipc://PATH",
                          address);
    if (ipc && (address[6] == '@' || strcmp(address + 6, "*") == 0))
        return so_err_set(err, SO_EINVAL,
                          "the worker's address '%.80s' names no file, so its permissions cannot "
                          "decide who may connect: name one, as in ipc:///run/user/1000/sooth",
                          address);
    so_str host = {address + 6, tcp ? (size_t)(colon - address - 6) : 0};
    if (tcp && !has_key && !is_loopback(host))
        return so_err_set(
            err, SO_EINVAL,
            "the worker's address '%.80s' is not a loopback address, so it needs a key: make "
            "one with `sooth draft-worker --make-key FILE`, and give it to both sides",
            address);
    return SO_OK;
}

/* --- sockets --- */

static void set_int(const so_zmq *z, void *s, int option, int v) {
    z->setsockopt(s, option, &v, sizeof v);
}

static void set_common(const so_zmq *z, void *s, const char *address) {
    int64_t max_bytes = SO_WIRE_BYTES;
    z->setsockopt(s, SO_ZMQ_MAXMSGSIZE, &max_bytes, sizeof max_bytes);
    set_int(z, s, SO_ZMQ_LINGER, 0);
    set_int(z, s, SO_ZMQ_SNDHWM, QUEUE);
    set_int(z, s, SO_ZMQ_RCVHWM, QUEUE);
    set_int(z, s, SO_ZMQ_IPV6, strchr(address, '[') != NULL);
    set_int(z, s, SO_ZMQ_HEARTBEAT_IVL, HEARTBEAT_MS);
    set_int(z, s, SO_ZMQ_HEARTBEAT_TIMEOUT, SILENCE_MS);
    set_int(z, s, SO_ZMQ_HANDSHAKE_IVL, SILENCE_MS);
}

static int fail_socket(const so_zmq *z, void **s, const char *what, const char *address,
                       so_err *err) {
    int code = errno;
    if (*s)
        z->close(*s);
    *s = NULL;
    return so_err_set(err, SO_EIO, "%s %.80s: %s", what, address, z->strerror(code));
}

/* ipc sockets are files: only the owner may connect. */
static int bind_private(const so_zmq *z, void *s, const char *address) {
    mode_t old = umask(0077);
    int rc = z->bind(s, address), code = errno;
    umask(old);
    errno = code;
    return rc;
}

/* ZeroMQ removes whatever has the name of a socket file; only an old socket may be removed. */
static int check_path(const char *address, so_err *err) {
    struct stat st;
    const char *path = address + 6;
    if (strncmp(address, "ipc://", 6) == 0 && lstat(path, &st) == 0 && !S_ISSOCK(st.st_mode))
        return so_err_set(err, SO_EIO, "%s exists and is no socket: name another file", path);
    return SO_OK;
}

int so_link_listen(const so_zmq *z, void *ctx, const char *address, const so_link_key *key,
                   void **out, void **gate, so_err *err) {
    *gate = *out = NULL;
    int rc = check_path(address, err);
    if (rc != SO_OK)
        return rc;
    *out = z->socket(ctx, SO_ZMQ_ROUTER);
    if (!*out)
        return fail_socket(z, out, "cannot open", address, err);
    set_common(z, *out, address);
    set_int(z, *out, SO_ZMQ_ROUTER_MANDATORY, 1); /* sending fails if the client is gone */
    if (key->set) {
        *gate = z->socket(ctx, SO_ZMQ_REP);
        if (!*gate || z->bind(*gate, ZAP_ADDRESS) != 0)
            return fail_socket(z, out, "cannot guard", address, err);
        set_int(z, *out, SO_ZMQ_CURVE_SERVER, 1);
        z->setsockopt(*out, SO_ZMQ_CURVE_SECRETKEY, key->secret, SO_ZMQ_KEY);
        z->setsockopt(*out, SO_ZMQ_ZAP_DOMAIN, "sooth", 5);
    }
    return bind_private(z, *out, address) == 0
               ? SO_OK
               : fail_socket(z, out, "cannot listen on", address, err);
}

/* A question has the frames version, number, domain, address, identity, mechanism and the client's
 * public key in binary; the answer version, number, status, text, user, metadata (RFC 27). */
bool so_link_answer(const so_zmq *z, void *gate, const so_link_key *key) {
    char number[256], frame[256], public[SO_ZMQ_KEY] = "";
    unsigned char client[32] = {0};
    int n_number = 0, more = 1, n_client = 0, n = 0;
    for (int i = 0; more; i++) {
        size_t size = sizeof more;
        n = z->recv(gate, frame, sizeof frame, SO_ZMQ_DONTWAIT);
        if (n < 0)
            return true; /* no question */
        if (i == 1) {
            n_number = SO_MIN(n, (int)sizeof number);
            memcpy(number, frame, (size_t)n_number);
        } else if (i == 6) {
            n_client = n;
            memcpy(client, frame, (size_t)SO_MIN(n, (int)sizeof client));
        }
        z->getsockopt(gate, SO_ZMQ_RCVMORE, &more, &size);
    }
    bool ok = n_client == 32 && z->z85_encode(public, client, 32) != NULL &&
              memcmp(public, key->public, SO_ZMQ_KEY) == 0;
    z->send(gate, "1.0", 3, SO_ZMQ_SNDMORE);
    z->send(gate, number, (size_t)n_number, SO_ZMQ_SNDMORE);
    z->send(gate, ok ? "200" : "400", 3, SO_ZMQ_SNDMORE);
    z->send(gate, "", 0, SO_ZMQ_SNDMORE);
    z->send(gate, "", 0, SO_ZMQ_SNDMORE);
    z->send(gate, "", 0, 0);
    return ok;
}

static int open_monitor(const so_zmq *z, void *ctx, void *s, void **monitor) {
    enum {
        EVENTS = SO_ZMQ_EVENT_CONNECT_RETRIED | SO_ZMQ_EVENT_DISCONNECTED |
                 SO_ZMQ_EVENT_HANDSHAKE_SUCCEEDED | SO_ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL |
                 SO_ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | SO_ZMQ_EVENT_HANDSHAKE_FAILED_AUTH
    };
    static const char ADDRESS[] = "inproc://events";
    *monitor = z->socket(ctx, SO_ZMQ_PAIR);
    if (!*monitor)
        return -1;
    set_int(z, *monitor, SO_ZMQ_LINGER, 0);
    return z->socket_monitor(s, ADDRESS, EVENTS) == 0 ? z->connect(*monitor, ADDRESS) : -1;
}

int so_link_connect(const so_zmq *z, void *ctx, const char *address, const so_link_key *key,
                    void **out, void **monitor, so_err *err) {
    *monitor = NULL;
    *out = z->socket(ctx, SO_ZMQ_DEALER);
    if (!*out)
        return fail_socket(z, out, "cannot open", address, err);
    set_common(z, *out, address);
    set_int(z, *out, SO_ZMQ_LINGER, GOODBYE_MS);
    set_int(z, *out, SO_ZMQ_IMMEDIATE, 1); /* without a connection nothing is queued */
    set_int(z, *out, SO_ZMQ_RECONNECT_IVL, RECONNECT_MS);
    set_int(z, *out, SO_ZMQ_RECONNECT_IVL_MAX, SO_LINK_RECONNECT_MS);
    if (key->set) {
        z->setsockopt(*out, SO_ZMQ_CURVE_SERVERKEY, key->public, SO_ZMQ_KEY);
        z->setsockopt(*out, SO_ZMQ_CURVE_PUBLICKEY, key->public, SO_ZMQ_KEY);
        z->setsockopt(*out, SO_ZMQ_CURVE_SECRETKEY, key->secret, SO_ZMQ_KEY);
    }
    if (open_monitor(z, ctx, *out, monitor) != 0 || z->connect(*out, address) != 0) {
        if (*monitor)
            z->close(*monitor);
        *monitor = NULL;
        return fail_socket(z, out, "cannot connect to", address, err);
    }
    return SO_OK;
}

void so_link_reconnect(const so_zmq *z, void *socket, const char *address) {
    z->disconnect(socket, address);
    if (z->connect(socket, address) != 0)
        so_log(SO_LOG_DEBUG, "draft worker: cannot connect to %.80s: %s", address,
               z->strerror(errno));
}

int so_link_drop_frames(const so_zmq *z, void *socket) {
    int more = 0, n = 0;
    size_t size = sizeof more;
    for (; z->getsockopt(socket, SO_ZMQ_RCVMORE, &more, &size) == 0 && more; n++) {
        char frame[8];
        z->recv(socket, frame, sizeof frame, SO_ZMQ_DONTWAIT);
    }
    return n;
}

int so_link_event(const so_zmq *z, void *monitor) {
    unsigned char event[6], where[8];
    if (z->recv(monitor, event, sizeof event, SO_ZMQ_DONTWAIT) != (int)sizeof event)
        return 0;
    z->recv(monitor, where, sizeof where, SO_ZMQ_DONTWAIT);
    return event[0] | event[1] << 8;
}
