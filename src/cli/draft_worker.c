/* `sooth draft-worker`: runs a draft model for engines in other processes (draft/remote_worker.h), or
 * makes the key that both sides need if they are on different hosts.
 *
 * SIGTERM and SIGINT end it at once with exit status 0; engines that use it go on without its drafts.
 * Events are logged on standard error, one line each; nothing is written to standard output. Main
 * thread. */
#include <stdio.h>
#include <unistd.h>

#include "base/log.h"
#include "cli/load.h"
#include "cli/service.h"
#include "draft/link.h"
#include "draft/model.h"
#include "draft/registry.h"
#include "draft/remote_worker.h"

enum { DEFAULT_PARALLEL = 8, DEFAULT_CTX = 4096 };

static int context(const so_args *a, const so_bundle *b) {
    int most = so_model_hparams(b->model)->n_ctx_train;
    int n = (int)so_args_int(a, SO_OPT_CTX, most < DEFAULT_CTX ? most : DEFAULT_CTX);
    return n == 0 || n > most ? most : n;
}

static int serve(const so_args *a, const char *address, const so_bundle *b, int signals) {
    so_remote_worker *w = NULL;
    so_err err = {0};
    so_remote_worker_opts o = {
        .model = b->model,
        .vocab_hash = so_draft_vocab_hash(b->tok),
        .draft_id = so_registry_id(b->ck),
        .address = address,
        .key_file = so_args_str(a, SO_OPT_KEY, NULL),
        .n_ctx = context(a, b),
        .n_parallel = (int)so_args_int(a, SO_OPT_PARALLEL, DEFAULT_PARALLEL),
        .n_batch = (int)so_args_int(a, SO_OPT_BATCH, 256),
        .kv_dtype = so_cli_kv_dtype(a),
        .temp = (float)so_args_float(a, SO_OPT_DRAFT_TEMP, -1),
        .p_min = (float)so_args_float(a, SO_OPT_DRAFT_P_MIN, 0),
    };
    if (so_remote_worker_create(&o, &w, &err) != SO_OK)
        return so_args_fail(a, &err);
    so_service_notify("READY=1");
    fprintf(stderr, "sooth draft-worker: ready at %s\n", so_remote_worker_address(w));
    so_remote_worker_run(w, signals);
    so_service_notify("STOPPING=1");
    so_remote_worker_free(w);
    return 0;
}

static int make_key(const so_args *a) {
    so_err err = {0};
    const char *path = so_args_str(a, SO_OPT_MAKE_KEY, NULL);
    if (so_link_make_key(path, &err) != SO_OK)
        return so_args_fail(a, &err);
    fprintf(stderr,
            "sooth draft-worker: %s is the key: give it to the worker with --key and to engines "
            "with --worker-key\n",
            path);
    return 0;
}

static int run(const so_args *a) {
    const char *address = so_args_str(a, SO_OPT_LISTEN, "tcp://127.0.0.1:7077");
    so_bundle b = {0};
    so_zmq z;
    so_err err = {0};
    if (so_link_check(address, so_args_has(a, SO_OPT_KEY), &err) != SO_OK)
        return so_args_bad(a, "--listen: %s", err.msg);
    if (so_zmq_load(&z, &err) != SO_OK)
        return so_args_fail(a, &err);
    if (!so_args_has(a, SO_OPT_VERBOSE))
        so_log_set_level(SO_LOG_INFO);
    int signals = so_service_signals();
    int status = so_cli_open(a, &b);
    if (status == 0)
        status = serve(a, address, &b, signals);
    close(signals);
    so_bundle_close(&b);
    return status;
}

int so_cmd_draft_worker(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_WORKER, argc, argv))
        return a.status;
    int status = so_args_has(&a, SO_OPT_MAKE_KEY) ? make_key(&a) : run(&a);
    so_args_free(&a);
    return status;
}
