/* Opens the model that the command line names, and converts options for the engine. Prints errors
 * itself, so that all commands report errors in the same way. Main thread, or the engine thread of
 * `serve`. */
#include "cli/load.h"

#include <stdlib.h>
#include <strings.h>

#include "base/log.h"
#include "base/pool.h"
#include "cli/models.h"
#include "cli/progress.h"
#include "draft/spec.h"

enum { DEVICE_NAME = 32 };

/* Whether the spec has an async() that runs here, not in a worker. device: what its device= says. */
static bool drafts_ahead(const char *text, char device[DEVICE_NAME]) {
    so_spec spec;
    bool any = false;
    if (so_spec_parse(so_str_c(text), &spec, NULL) != SO_OK)
        return false;
    for (int i = 0; i < spec.n_nodes; i++) {
        const so_spec_node *n = &spec.nodes[i];
        any |= n->name == SO_SPEC_ASYNC && n->worker_len == 0;
        if (n->device_len > 0)
            snprintf(device, DEVICE_NAME, "%.*s", SO_STR_ARG(so_spec_device(&spec, n)));
    }
    return any;
}

/* Where drafts run: --draft-device, --draft-cores, or device= of async(). A GPU is a device of its own.
 * With a model on a GPU the draft has the whole CPU, otherwise it gets cores (one by default). */
static int draft_opts(const so_args *a, char named[DEVICE_NAME], so_bundle_opts *o) {
    bool ahead = drafts_ahead(so_args_str(a, SO_OPT_SPEC, "auto"), named);
    o->draft_device = so_args_str(a, SO_OPT_DRAFT_DEVICE, NULL);
    if (named[0] && o->draft_device && strcmp(named, o->draft_device) != 0)
        return so_args_bad(a, "--draft-device %s and device=%s in --spec: name one device",
                           o->draft_device, named);
    bool on_gpu = strncmp(named, "cuda", 4) == 0 || strncmp(o->device, "cuda", 4) == 0;
    if (named[0] && on_gpu && !so_args_has(a, SO_OPT_DRAFT_CORES))
        o->draft_device = named;
    o->draft_cores = (int)so_args_int(a, SO_OPT_DRAFT_CORES, ahead && !o->draft_device ? -1 : 0);
    if (o->draft_cores > 0 && strncmp(named, "cuda", 4) == 0)
        return so_args_bad(a, "--draft-cores %d and device=%s in --spec: name one of them",
                           o->draft_cores, named);
    if (o->draft_cores > 0 && o->draft_device)
        return so_args_bad(a, "--draft-cores and --draft-device exclude each other");
    return 0;
}

/* A draft worker runs its model where an engine would run a draft. */
static int worker_opts(so_bundle_opts *o, so_backend **own, so_err *err) {
    int n = o->draft_cores, all = so_cpu_count();
    so_backend_opts bo = {
        .n_threads = n, .level = o->level, .first_core = all - n, .n_cores = n, .warn_slow = true};
    o->draft = true;
    o->draft_cores = 0;
    if (n == 0)
        return SO_OK;
    if (n > all)
        return so_err_set(err, SO_ERANGE, "--draft-cores %d: this process may use %d cores", n,
                          all);
    int rc = so_backend_open("cpu", &bo, own, err);
    if (rc == SO_OK)
        so_cpu_level_set(o->level);
    o->backend = *own;
    return rc;
}

static int bundle_opts(const so_args *a, char draft_device[DEVICE_NAME], so_bundle_opts *o) {
    so_bundle_defaults(o);
    o->n_threads = (int)so_args_int(a, SO_OPT_THREADS, 0);
    so_cpu_level_parse(so_args_str(a, SO_OPT_CPU_LEVEL, "auto"), &o->level);
    o->device = so_args_str(a, SO_OPT_DEVICE, "auto");
    int status = draft_opts(a, draft_device, o);
    if (status != 0)
        return status;
    const char *type = so_args_str(a, SO_OPT_QUANTIZE, NULL);
    o->quantize = type != NULL;
    if (type && !so_dtype_parse(type, &o->dtype))
        return so_args_bad(
            a, "--quantize '%.40s': unknown type; try Q8_0, Q6_K, Q5_K, Q4_K or Q4_0", type);
    return 0;
}

int so_cli_open(const so_args *a, so_bundle *out) {
    so_bundle_opts o;
    so_err err = {0};
    so_progress bar;
    char *path = NULL;
    const char *name = so_args_str(a, SO_OPT_MODEL, NULL);
    if (!name)
        return so_args_bad(a, "-m MODEL is missing; `sooth pull` lists models to try");
    char draft_device[DEVICE_NAME] = "";
    int status = bundle_opts(a, draft_device, &o);
    if (status != 0)
        return status;
    if (so_model_resolve(name, &path, &err) != SO_OK)
        return so_args_fail(a, &err);
    so_backend *own = NULL;
    if (a->cmd->bit == SO_CMD_WORKER && worker_opts(&o, &own, &err) != SO_OK) {
        free(path);
        return so_args_fail(a, &err);
    }
    so_progress_begin(&bar, "loading");
    o.progress = so_progress_callback;
    o.user = &bar;
    int rc = so_bundle_open(path, &o, out, &err);
    so_progress_end(&bar);
    free(path);
    if (rc == SO_OK && own)
        out->draft_backend = own; /* closed with the bundle */
    else
        so_backend_free(own);
    return rc == SO_OK ? 0 : so_args_fail(a, &err);
}

so_dtype so_cli_kv_dtype(const so_args *a) {
    so_dtype t = SO_DTYPE_F16;
    so_dtype_parse(so_args_str(a, SO_OPT_KV_TYPE, "f16"), &t); /* the option table has checked it */
    return t;
}

int so_cli_engine_opts(const so_args *a, const so_bundle *b, so_engine_opts *out) {
    int max_ctx = so_model_hparams(b->model)->n_ctx_train;
    so_engine_defaults(b->model, out);
    int64_t ctx = so_args_int(a, SO_OPT_CTX, out->n_ctx);
    if (ctx > max_ctx || ctx == 1)
        return so_args_bad(
            a, "--ctx-size %lld: must be from 2 to %d for this model, or 0 for the maximum",
            (long long)ctx, max_ctx);
    out->draft_backend = b->draft_backend;
    out->n_ctx = ctx == 0 ? max_ctx : (int)ctx;
    out->n_parallel = (int)so_args_int(a, SO_OPT_PARALLEL, 1);
    out->n_batch = (int)so_args_int(a, SO_OPT_BATCH, out->n_batch);
    out->kv_dtype = so_cli_kv_dtype(a);
    if (strcasecmp(so_args_str(a, SO_OPT_KV_LAYOUT, "paged"), "slotted") == 0)
        out->kv_layout = SO_KV_SLOTTED;
    out->n_pages = (int)so_args_int(a, SO_OPT_KV_PAGES, 0);
    /* Commands that measure must compute every prompt, also when it repeats an earlier one. */
    out->prefix_cache = !so_args_has(a, SO_OPT_NO_PREFIX_CACHE) &&
                        !(a->cmd->bit & (SO_CMD_BENCH | SO_CMD_PROVE | SO_CMD_THEORY));
    return 0;
}

int so_cli_encode(const so_bundle *b, bool raw, so_str text, so_tokens *out, so_err *err) {
    if (raw || !b->chat)
        return so_tokenizer_encode(b->tok, text, SO_ENCODE_ADD_SPECIAL, out, err);
    json_t *messages =
        json_pack("[{s:s, s:o}]", "role", "user", "content", json_stringn(text.ptr, text.len));
    if (!messages)
        return so_err_set(err, SO_EINVAL, "the prompt is not valid UTF-8");
    int rc = so_chat_encode(b->chat, messages, NULL, out, err);
    json_decref(messages);
    return rc;
}
