/* Opens files, backend, weights, tokenizer and chat template, in this order, and closes them in
 * reverse. If the chat template cannot be compiled, the model still works with raw prompts: a
 * warning is logged here, and only a chat request fails. Any thread, one at a time per bundle. */
#include "engine/bundle.h"

#include <string.h>

#include <math.h>
#include <stdlib.h>

#include "backend/prefetch.h"
#include "base/env.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/pool.h"
#include "draft/model.h"
#include "draft/registry.h"
#include "plan/choose_draft.h"

void so_bundle_defaults(so_bundle_opts *o) { *o = (so_bundle_opts){.level = SO_CPU_AUTO}; }

/* --- recommended sampling --- */

static bool read_number(const so_checkpoint *ck, const char *json_key, const char *gguf_key,
                        double *out) {
    const so_gguf *g = so_checkpoint_gguf(ck);
    if (g)
        return so_gguf_get_f64(g, gguf_key, out, NULL) == SO_OK;
    const json_t *v = json_object_get(so_checkpoint_generation_config(ck), json_key);
    if (!json_is_number(v))
        return false;
    *out = json_number_value(v);
    return true;
}

void so_bundle_read_sampling(const so_checkpoint *ck, so_sample_params *p) {
    static const struct {
        const char *json, *gguf;
        double min, max;
    } keys[] = {{"temperature", "general.sampling.temp", 0, 100},
                {"top_k", "general.sampling.top_k", 0, 1 << 24},
                {"top_p", "general.sampling.top_p", 0, 1},
                {"min_p", "general.sampling.min_p", 0, 1},
                {"repetition_penalty", "general.sampling.penalty_repeat", 0.01, 100}};
    double v[SO_LEN(keys)] = {(double)p->temp, p->top_k, (double)p->top_p, (double)p->min_p,
                              (double)p->repeat_penalty};
    for (size_t i = 0; i < SO_LEN(keys); i++) {
        double got;
        if (!read_number(ck, keys[i].json, keys[i].gguf, &got))
            continue;
        if (got >= keys[i].min && got <= keys[i].max)
            v[i] = got;
        else
            so_log(SO_LOG_WARN, "%s: generation config: %s is %g, not from %g to %g: ignored",
                   so_checkpoint_path(ck), keys[i].json, got, keys[i].min, keys[i].max);
    }
    p->temp = (float)v[0];
    p->top_k = (int)v[1];
    p->top_p = (float)v[2];
    p->min_p = (float)v[3];
    p->repeat_penalty = (float)v[4];
}

/* eos_token_id of the generation config: one number or a list. */
static void add_end_tokens(const so_checkpoint *ck, so_tokenizer *t) {
    const json_t *eos = json_object_get(so_checkpoint_generation_config(ck), "eos_token_id");
    size_t n = json_is_array(eos) ? json_array_size(eos) : json_is_integer(eos) ? 1 : 0;
    for (size_t i = 0; i < n && i < 64; i++) {
        const json_t *v = json_is_array(eos) ? json_array_get(eos, i) : eos;
        json_int_t id = json_integer_value(v);
        if (json_is_integer(v) && id >= 0 && id < so_tokenizer_n_vocab(t))
            so_tokenizer_add_end(t, (int32_t)id);
    }
}

/* --- opening --- */

static int open_text(so_bundle *b, so_err *err) {
    int rc = so_tokenizer_load(b->ck, &b->tok, err);
    if (rc != SO_OK)
        return rc;
    if (so_tokenizer_n_vocab(b->tok) > so_model_hparams(b->model)->n_vocab)
        return so_err_set(err, SO_EMISMATCH,
                          "%s: the tokenizer has %d tokens, the model's embedding only %d rows",
                          so_checkpoint_path(b->ck), so_tokenizer_n_vocab(b->tok),
                          so_model_hparams(b->model)->n_vocab);
    add_end_tokens(b->ck, b->tok);
    so_err chat_err = {0};
    rc = so_chat_create(b->tok, &b->chat, &chat_err);
    if (rc != SO_OK && rc != SO_ENOTFOUND)
        so_log(SO_LOG_WARN, "%s: chat template: %s; only raw prompts work",
               so_checkpoint_path(b->ck), chat_err.msg);
    return SO_OK;
}

static int open_named(const so_bundle_opts *o, const char *device, so_backend **out, so_err *err) {
    so_backend_opts bo = {.n_threads = o->n_threads, .level = o->level, .warn_slow = true};
    if (o->draft_cores > 0 && !o->shares_core)
        bo.n_cores = so_cpu_count() - o->draft_cores;
    return so_backend_open(device, &bo, out, err);
}

/* Cores of their own for drafts: the last ones this process may use. */
static int open_draft_cores(const so_bundle_opts *o, so_backend **out, so_err *err) {
    int all = so_cpu_count();
    so_backend_opts bo = {.n_threads = o->draft_cores,
                          .level = o->level,
                          .first_core = all - o->draft_cores,
                          .n_cores = o->shares_core ? 0 : o->draft_cores};
    return so_backend_open("cpu", &bo, out, err);
}

/* With one core for everything the drafts share it. */
static void share_one_core(so_bundle_opts *o) {
    if (o->draft_cores < 0 && so_cpu_count() == 1)
        so_log(SO_LOG_WARN,
               "this process may use one core only: drafts compete with the model for it");
    o->shares_core = o->draft_cores < 0 && so_cpu_count() == 1;
    o->draft_cores = abs(o->draft_cores);
}

static int check_cores(const so_bundle_opts *o, so_err *err) {
    int all = so_cpu_count(), n_threads = SO_MAX(o->n_threads, 1);
    if (o->draft_cores == 0 || o->shares_core || o->draft_cores + n_threads <= all)
        return SO_OK;
    return so_err_set(
        err, SO_ERANGE,
        "%d core%s for drafts (draft cores) and %d thread%s for the model need %d cores, but this "
        "process may use %d: lower one of them",
        o->draft_cores, o->draft_cores == 1 ? "" : "s", n_threads, n_threads == 1 ? "" : "s",
        o->draft_cores + n_threads, all);
}

/* Whether weights of this size leave room for a cache in the device's memory. Packed weights of K
 * types may need up to 1.3 times the bytes of the file. */
static bool fits(so_backend *b, size_t weight_bytes) {
    enum { ROOM = 1 << 30 };
    size_t free_bytes, total_bytes;
    so_err err = {0};
    if (!b->vt->memory || b->vt->memory(b, &free_bytes, &total_bytes, &err) != SO_OK)
        return false;
    bool ok = free_bytes > ROOM && (free_bytes - ROOM) / 13 * 10 >= weight_bytes;
    if (!ok)
        so_log(SO_LOG_INFO,
               "the CPU is used: weights of %zu MiB do not fit a GPU with %zu MiB free",
               weight_bytes >> 20, free_bytes >> 20);
    return ok;
}

static size_t file_bytes(const so_checkpoint *ck) {
    size_t n = 0;
    for (size_t i = 0; i < so_checkpoint_n_tensors(ck); i++)
        n += so_checkpoint_tensor_at(ck, i)->n_bytes;
    return n;
}

static bool is_auto(const char *device) { return device && strcmp(device, "auto") == 0; }

static int open_device(const so_bundle_opts *o, const char *device, const so_checkpoint *ck,
                       so_backend **out, so_err *err) {
    if (!is_auto(device))
        return open_named(o, device, out, err);
    so_err why = {0};
    if (open_named(o, "cuda", out, &why) != SO_OK)
        so_log(SO_LOG_DEBUG, "the CPU is used: %s", why.msg);
    else if (fits(*out, file_bytes(ck)))
        return SO_OK;
    else
        so_backend_free(*out);
    *out = NULL;
    return open_named(o, "cpu", out, err);
}

/* Loads the weights. With `auto`, the CPU is used if the GPU's memory does not suffice after all, or
 * if the GPU lacks an operation that the model needs. */
static int load_model(const so_bundle_opts *o, const so_model_opts *mo, so_bundle *b, so_err *err) {
    int rc = so_model_load(b->ck, b->backend, mo, &b->model, err);
    if ((rc != SO_ENOMEM && rc != SO_EUNSUPPORTED) || !b->backend->vt->remote)
        return rc;
    if (b->shares_backend || !is_auto(o->device)) {
        if (rc == SO_EUNSUPPORTED)
            return rc;
        so_err why = *err;
        return so_err_set(err, rc,
                          "%.300s; a file of %zu MiB does not fit this device: use a smaller "
                          "--quantize, or --%sdevice cpu",
                          why.msg, file_bytes(b->ck) >> 20, o->draft ? "draft-" : "");
    }
    so_log(SO_LOG_INFO, "the CPU is used: %s", err->msg);
    so_backend_free(b->backend);
    b->backend = NULL;
    rc = open_named(o, "cpu", &b->backend, err);
    return rc == SO_OK ? so_model_load(b->ck, b->backend, mo, &b->model, err) : rc;
}

/* Small models fit a cache, where prefetching matters little. */
static void choose_prefetch(const so_bundle *b) {
    static const size_t MIN_WEIGHT_BYTES = 32 << 20;
    char *dir = so_env_cache_dir();
    if (so_model_weight_bytes(b->model) >= MIN_WEIGHT_BYTES)
        so_prefetch_choose(b->backend, dir);
    free(dir);
}

int so_bundle_open(const char *path, const so_bundle_opts *opts, so_bundle *out, so_err *err) {
    so_bundle b = {0};
    so_bundle_opts own = *opts, *o = &own;
    share_one_core(o);
    so_model_opts mo = {.quantize = o->quantize,
                        .dtype = o->dtype,
                        .draft = o->draft,
                        .progress = o->progress,
                        .user = o->user};
    int rc = check_cores(o, err);
    if (rc == SO_OK)
        rc = so_checkpoint_open(path, SO_CHECKPOINT_ALL, &b.ck, err);
    b.shares_backend = o->backend != NULL;
    b.backend = o->backend;
    if (rc == SO_OK && !b.shares_backend) {
        rc = open_device(o, o->device, b.ck, &b.backend, err);
        if (rc == SO_OK)
            so_cpu_level_set(o->level); /* for sample/ and verify/ */
    }
    if (rc == SO_OK)
        rc = load_model(o, &mo, &b, err);
    if (rc == SO_OK && o->draft_cores > 0)
        rc = open_draft_cores(o, &b.draft_backend, err);
    if (rc == SO_OK && o->draft_device && !b.draft_backend)
        rc = open_device(o, o->draft_device, b.ck, &b.draft_backend, err);
    if (rc == SO_OK)
        rc = open_text(&b, err);
    if (rc == SO_OK && !b.shares_backend)
        choose_prefetch(&b);
    if (rc != SO_OK) {
        so_bundle_close(&b);
        return rc;
    }
    so_sample_defaults(&b.sample);
    so_bundle_read_sampling(b.ck, &b.sample);
    *out = b;
    return SO_OK;
}

/* --- drafts --- */

int so_bundle_open_draft(const char *path, const so_bundle *target, const so_bundle_opts *o,
                         so_bundle *out, so_err *err) {
    so_bundle b = {0};
    so_bundle_opts own;
    so_bundle_defaults(&own);
    own.backend = target->draft_backend ? target->draft_backend : target->backend;
    own.draft = true;
    if (o) {
        own.progress = o->progress;
        own.user = o->user;
    }
    int rc = so_bundle_open(path, &own, &b, err);
    if (rc == SO_OK)
        rc = so_registry_check_file(b.ck, so_model_hparams(target->model), target->tok, err);
    if (rc == SO_OK)
        *out = b;
    else
        so_bundle_close(&b);
    return rc;
}

bool so_bundle_find_draft(const so_bundle *target, so_dtype kv_dtype, so_bundle *out) {
    so_registry_found found;
    bool opened = false;
    so_registry_search(target->ck, so_model_hparams(target->model), target->tok, SO_REGISTRY_MODEL,
                       &found);
    if (found.n > 1)
        so_choose_first(target->model, kv_dtype, &found);
    for (int i = 0; i < found.n && !opened; i++) {
        so_err err = {0};
        so_bundle b = {0};
        int rc = so_bundle_open_draft(found.paths[i], target, NULL, &b, &err);
        if (rc == SO_OK) /* the registration in its file may be wrong */
            rc = so_draft_check_tokenizers(target->tok, b.tok, &err);
        opened = rc == SO_OK;
        if (opened) {
            so_log(SO_LOG_INFO, "draft model: %s", found.paths[i]);
            *out = b;
            continue;
        }
        so_bundle_close(&b);
        so_log(SO_LOG_DEBUG, "%s is passed over: %s", found.paths[i], err.msg);
    }
    so_registry_found_free(&found);
    return opened;
}

void so_bundle_close(so_bundle *b) {
    so_chat_free(b->chat);
    so_tokenizer_free(b->tok);
    so_model_free(b->model);
    if (b->backend && !b->shares_backend)
        so_backend_free(b->backend);
    so_backend_free(b->draft_backend);
    so_checkpoint_close(b->ck);
    *b = (so_bundle){0};
}
