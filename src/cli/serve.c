/* `sooth serve`: starts the server with the options, and stops it on a signal.
 *
 * SIGTERM and SIGINT drain the server: new requests get status 503, running ones finish (within
 * --drain-timeout), and the program ends with 0. A second signal ends it at once, unless it follows
 * the first within SAME_SIGNAL_MS: some supervisors (`timeout` among them) signal a program and
 * then its process group. The model is loaded on the server's engine thread while the socket
 * already answers /health; the exit status is 1 or 2 if it cannot be loaded. Requests are logged on
 * standard output, everything else on standard error. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/env.h"
#include "base/mem.h"
#include "cli/load.h"
#include "cli/request.h"
#include "cli/service.h"
#include "cli/spec.h"
#include "server/server.h"

enum { DEFAULT_PARALLEL = 8, SAME_SIGNAL_MS = 250 };

typedef struct job {
    const so_args *a;
    so_bundle b;
    so_cli_spec spec;
    int status; /* of loading; the message has been printed */
} job;

/* Loads the model; runs on the engine thread. */
static int load(void *user, so_serving *out, so_err *err) {
    job *j = user;
    j->status = so_cli_open(j->a, &j->b);
    if (j->status == 0)
        j->status = so_cli_engine_opts(j->a, &j->b, &out->eo);
    if (j->status == 0)
        j->status = so_cli_spec_open(j->a, &j->b, &j->spec, &out->eo);
    if (j->status != 0)
        return so_err_set(err, SO_EINVAL, "the model was not loaded");
    out->eo.n_parallel = (int)so_args_int(j->a, SO_OPT_PARALLEL, DEFAULT_PARALLEL);
    /* Requests may turn speculation on even if the default is none; --no-spec forbids it. */
    if (!out->eo.max_draft && !so_args_has(j->a, SO_OPT_NO_SPEC))
        out->eo.max_draft = (int)so_args_int(j->a, SO_OPT_DRAFT_MAX, SO_CLI_DRAFT_MAX);
    out->b = &j->b;
    out->sample = j->b.sample;
    so_cli_sampling_read(j->a, &out->sample);
    out->spec = j->spec.opts;
    return SO_OK;
}

static void write_line(void *user, so_str line) {
    (void)user;
    flockfile(stdout); /* several threads log */
    fwrite(line.ptr, 1, line.len, stdout);
    putchar('\n');
    fflush(stdout);
    funlockfile(stdout);
}

/* --alias, or the file's name: "draft-q4_0" for "models/smollm2/draft-q4_0.gguf". */
static char *model_name(const so_args *a) {
    const char *alias = so_args_str(a, SO_OPT_ALIAS, NULL);
    const char *path = so_args_str(a, SO_OPT_MODEL, "");
    size_t len = strlen(path);
    if (alias)
        return so_strdup(alias);
    while (len > 1 && path[len - 1] == '/')
        len--;
    size_t at = len;
    while (at > 0 && path[at - 1] != '/')
        at--;
    if (len - at > 5 && memcmp(path + len - 5, ".gguf", 5) == 0)
        len -= 5;
    return so_strndup(path + at, len - at);
}

static void read_server(const so_args *a, so_server_opts *o) {
    so_server_defaults(o);
    o->host = so_args_str(a, SO_OPT_HOST, o->host);
    o->port = (int)so_args_int(a, SO_OPT_PORT, o->port);
    o->key = so_args_str(a, SO_OPT_API_KEY, so_env_api_key());
    o->cors = so_args_str(a, SO_OPT_CORS, NULL);
    o->hosts = a->val[SO_OPT_ALLOW_HOST].items;
    o->n_hosts = a->val[SO_OPT_ALLOW_HOST].n_given;
    o->strict_model = so_args_has(a, SO_OPT_STRICT_MODEL);
    o->n_queue = (int)so_args_int(a, SO_OPT_QUEUE, o->n_queue);
    o->n_threads = (int)so_args_int(a, SO_OPT_HTTP_THREADS, o->n_threads);
    o->max_connections = (int)so_args_int(a, SO_OPT_MAX_CONNECTIONS, o->max_connections);
    o->max_body = (size_t)so_args_int(a, SO_OPT_MAX_BODY, (int64_t)o->max_body);
    o->timeout_s = (int)so_args_int(a, SO_OPT_TIMEOUT, o->timeout_s);
    o->drain_s = (int)so_args_int(a, SO_OPT_DRAIN_TIMEOUT, o->drain_s);
    o->log = write_line;
    o->log_json = so_args_has(a, SO_OPT_JSON);
}

/* --- the loop --- */

/* Handles a change of the server's state; true when it has stopped. */
static bool on_state(const so_args *a, so_server *s, bool *announced) {
    so_server_state st = so_server_get_state(s);
    if (st == SO_SERVER_READY && !*announced) {
        *announced = true;
        so_service_notify("READY=1");
        const char *host = so_args_str(a, SO_OPT_HOST, "127.0.0.1");
        bool v6 = strchr(host, ':') != NULL;
        fprintf(stderr, "sooth serve: ready at http://%s%s%s:%d\n", v6 ? "[" : "", host,
                v6 ? "]" : "", so_server_port(s));
    }
    return st == SO_SERVER_FAILED || st == SO_SERVER_DRAINED;
}

/* Handles a signal; true when the program must end now. While the model is loading there are no
 * requests to wait for. *t_first_ns is 0 before the first signal. */
static bool on_signal(so_server *s, int fd, int64_t *t_first_ns) {
    struct signalfd_siginfo info;
    if (read(fd, &info, sizeof info) != sizeof info)
        return false;
    if (so_server_get_state(s) == SO_SERVER_LOADING)
        return true;
    if (*t_first_ns)
        return so_clock_ms_since(*t_first_ns) > SAME_SIGNAL_MS;
    *t_first_ns = so_clock_ns();
    so_service_notify("STOPPING=1");
    fprintf(stderr, "sooth serve: stopping after the running answers are finished\n");
    so_server_drain(s);
    return false;
}

static int watch(const so_args *a, so_server *s, int signals) {
    struct pollfd fds[] = {{.fd = so_server_fd(s), .events = POLLIN},
                           {.fd = signals, .events = POLLIN}};
    bool announced = false;
    int64_t t_first_ns = 0;
    for (;;) {
        uint64_t n;
        if (poll(fds, 2, -1) < 0 && errno != EINTR)
            return 1;
        if ((fds[0].revents & POLLIN) && read(fds[0].fd, &n, sizeof n) > 0 &&
            on_state(a, s, &announced))
            return so_server_get_state(s) == SO_SERVER_FAILED;
        if ((fds[1].revents & POLLIN) && on_signal(s, signals, &t_first_ns))
            _exit(1);
    }
}

static int serve(const so_args *a) {
    job j = {.a = a};
    so_server_opts o;
    so_server *s = NULL;
    so_err err = {0};
    int status = so_cli_spec_read(a, &j.spec);
    if (status == 0)
        status = so_cli_spec_check_text(a, &j.spec);
    if (status != 0)
        return status;
    read_server(a, &o);
    if (o.key && !*o.key)
        return so_args_bad(a, "--api-key '': must not be empty");
    if (o.cors && !*o.cors)
        return so_args_bad(a,
                           "--cors '': must not be empty; leave it out to allow no other origin");
    char *name = model_name(a);
    if (!*name) {
        free(name);
        return so_args_bad(a, "--alias '': must not be empty");
    }
    o.model = name;
    o.load = load;
    o.load_user = &j;
    int signals = so_service_signals();
    if (so_server_create(&o, &s, &err) != SO_OK) {
        status = so_args_fail(a, &err);
    } else {
        status = watch(a, s, signals);
        if (status != 0)
            so_server_error(s, &err);
        so_server_free(s);
        if (status != 0 && j.status == 0) /* else the message was printed by load() */
            status = so_args_fail(a, &err);
        else if (status != 0)
            status = j.status;
    }
    close(signals);
    free(name);
    so_cli_spec_close(&j.spec);
    so_bundle_close(&j.b);
    return status;
}

int so_cmd_serve(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_SERVE, argc, argv))
        return a.status;
    int status = so_args_has(&a, SO_OPT_MODEL)
                     ? serve(&a)
                     : so_args_bad(&a, "-m MODEL is missing; `sooth pull` lists models to try");
    so_args_free(&a);
    return status;
}
