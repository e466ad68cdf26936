/* The public library (sooth.h) over the engine (engine.h): copies parameters, takes the lock, and
 * translates errors and events. It adds no behaviour of its own.
 *
 * One mutex per model guards its backend, so calls on the engines of one model run one at a time.
 * Structs of the caller are read by copy_params(), which copies at most the size that the caller's
 * header had; the other fields keep their defaults. */
#include <sooth.h>

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/registry.h"
#include "engine/bundle.h"
#include "engine/engine.h"

_Static_assert(sizeof(((so_err *)0)->msg) == sizeof(((sooth_error *)0)->message),
               "messages differ");

struct sooth_model {
    so_bundle b;
    pthread_mutex_t lock;
};

struct sooth_engine {
    sooth_model *m;
    so_engine *e;
    so_bundle draft; /* draft.model is NULL: no draft model */
    sooth_request *requests;
    sooth_tree_drafter *tree_drafter;
    void *drafter_user;
};

struct sooth_request {
    sooth_engine *e;
    so_request *r;
    sooth_request *next;
    sooth_event_fn *on_event;
    void *user;
    so_buf text;
    sooth_logprob top[SO_LOGPROBS_MAX]; /* alternatives of the current event */
};

static void lock(const sooth_model *m) {
    pthread_mutex_lock((pthread_mutex_t *)(uintptr_t)&m->lock);
}
static void unlock(const sooth_model *m) {
    pthread_mutex_unlock((pthread_mutex_t *)(uintptr_t)&m->lock);
}

/* Copies an internal error to the caller's struct. Every public function that can fail returns
 * through this function. */
static int report(int rc, const so_err *from, sooth_error *to) {
    if (rc < 0 && to) {
        to->code = rc;
        memcpy(to->message, from->msg, sizeof to->message);
    }
    return rc;
}

/* Copies the caller's struct, as long as its size field says, over the library's defaults. */
static int copy_params(void *dst, size_t dst_size, const void *src, const char *what, so_err *err) {
    size_t size;
    if (!src)
        return SO_OK;
    memcpy(&size, src, sizeof size);
    if (size < sizeof size || size > 4096)
        return so_err_set(err, SO_EINVAL, "%s: size is %zu: call %s_init first", what, size, what);
    memcpy(dst, src, SO_MIN(size, dst_size));
    return SO_OK;
}

static void write_defaults(void *dst, const void *src, size_t src_size, size_t size) {
    memset(dst, 0, size);
    memcpy(dst, src, SO_MIN(size, src_size));
    memcpy(dst, &size, sizeof size);
}

const char *sooth_version(void) { return SO_VERSION; }

/* --- models --- */

static const sooth_model_params MODEL_DEFAULTS = {.size = sizeof(sooth_model_params)};

void sooth_model_params_init_sized(sooth_model_params *p, size_t size) {
    write_defaults(p, &MODEL_DEFAULTS, sizeof *p, size);
}

static int bundle_opts(const sooth_model_params *p, so_bundle_opts *o, so_err *err) {
    so_bundle_defaults(o);
    o->n_threads = p->n_threads;
    o->device = p->device ? p->device : "auto";
    o->draft_device = p->draft_device;
    o->draft_cores = p->draft_cores;
    o->progress = p->progress;
    o->user = p->progress_user;
    if (p->n_threads < 0 || p->n_threads > 256)
        return so_err_set(err, SO_ERANGE, "n_threads %d: must be from 0 to 256", p->n_threads);
    if (p->draft_cores < 0 || p->draft_cores > 256)
        return so_err_set(err, SO_ERANGE, "draft_cores %d: must be from 0 to 256", p->draft_cores);
    if (p->draft_cores > 0 && p->draft_device)
        return so_err_set(err, SO_EINVAL,
                          "draft_cores %d and draft_device '%.40s': set one of them",
                          p->draft_cores, p->draft_device);
    if (p->cpu_level && !so_cpu_level_parse(p->cpu_level, &o->level))
        return so_err_set(err, SO_EINVAL,
                          "cpu_level '%.40s': must be auto, scalar, avx2, avxvnni, avx512 or amx",
                          p->cpu_level);
    o->quantize = p->quantize != NULL;
    if (p->quantize && !so_dtype_parse(p->quantize, &o->dtype))
        return so_err_set(err, SO_EINVAL, "quantize '%.40s': no such type", p->quantize);
    return SO_OK;
}

int sooth_model_load(const char *path, const sooth_model_params *params, sooth_model **out,
                     sooth_error *err) {
    so_err e = {0};
    so_bundle_opts o;
    so_bundle b;
    sooth_model_params p = MODEL_DEFAULTS;
    int rc = copy_params(&p, sizeof p, params, "sooth_model_params", &e);
    if (rc == SO_OK)
        rc = bundle_opts(&p, &o, &e);
    if (rc == SO_OK)
        rc = so_bundle_open(path, &o, &b, &e);
    if (rc != SO_OK)
        return report(rc, &e, err);
    sooth_model *m = SO_NEW(sooth_model);
    m->b = b;
    pthread_mutex_init(&m->lock, NULL);
    *out = m;
    return SOOTH_OK;
}

void sooth_model_free(sooth_model *m) {
    if (!m)
        return;
    so_bundle_close(&m->b);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

const char *sooth_model_arch(const sooth_model *m) {
    return so_model_hparams(m->b.model)->arch_name;
}
int64_t sooth_model_n_params(const sooth_model *m) { return so_model_n_params(m->b.model); }
int sooth_model_n_vocab(const sooth_model *m) { return so_model_hparams(m->b.model)->n_vocab; }
int sooth_model_n_ctx(const sooth_model *m) { return so_model_hparams(m->b.model)->n_ctx_train; }
int sooth_model_has_chat(const sooth_model *m) { return m->b.chat != NULL; }

int sooth_tokenize(const sooth_model *m, const char *text, size_t text_len, int add_special,
                   int parse_special, int32_t *ids, size_t cap, size_t *n, sooth_error *err) {
    so_err e = {0};
    so_tokens t = {0};
    unsigned flags =
        (add_special ? SO_ENCODE_ADD_SPECIAL : 0u) | (parse_special ? SO_ENCODE_PARSE_SPECIAL : 0u);
    int rc = so_tokenizer_encode(m->b.tok, (so_str){text, text_len}, flags, &t, &e);
    if (rc == SO_OK) {
        if (SO_MIN(cap, t.len) > 0)
            memcpy(ids, t.ids, SO_MIN(cap, t.len) * sizeof *ids);
        *n = t.len;
    }
    so_tokens_free(&t);
    return report(rc, &e, err);
}

int sooth_detokenize(const sooth_model *m, const int32_t *ids, size_t n_ids, char *text, size_t cap,
                     size_t *n, sooth_error *err) {
    so_err e = {0};
    so_buf b = {0};
    for (size_t i = 0; i < n_ids; i++)
        if (ids[i] < 0 || ids[i] >= so_tokenizer_n_vocab(m->b.tok))
            return report(so_err_set(&e, SO_ERANGE, "id %zu is %d: the vocabulary has 0 to %d", i,
                                     ids[i], so_tokenizer_n_vocab(m->b.tok) - 1),
                          &e, err);
    so_tokenizer_decode(m->b.tok, ids, n_ids, false, &b);
    if (SO_MIN(cap, b.len) > 0)
        memcpy(text, b.data, SO_MIN(cap, b.len));
    *n = b.len;
    so_buf_free(&b);
    return SOOTH_OK;
}

/* --- engines --- */

static const sooth_engine_params ENGINE_DEFAULTS = {.size = sizeof(sooth_engine_params),
                                                    .n_parallel = 1,
                                                    .n_batch = 256,
                                                    .max_draft = 16,
                                                    .draft_temp = -1};

void sooth_engine_params_init_sized(sooth_engine_params *p, size_t size) {
    write_defaults(p, &ENGINE_DEFAULTS, sizeof *p, size);
}

/* Opens the draft that params name, or the best one registered for the model, if there is any. */
static int open_draft(const sooth_model *m, const sooth_engine_params *p, so_dtype kv_dtype,
                      so_bundle *out, so_err *err) {
    if (p->draft_model)
        return so_bundle_open_draft(p->draft_model, &m->b, NULL, out, err);
    if (p->max_draft > 0)
        so_bundle_find_draft(&m->b, kv_dtype, out);
    return SO_OK;
}

static int cache_type(const sooth_engine_params *p, so_dtype *out, so_err *err) {
    *out = p->kv_f32 ? SO_DTYPE_F32 : SO_DTYPE_F16;
    if (p->kv_type &&
        (!so_dtype_parse(p->kv_type, out) || (!so_kv_dtype_ok(*out) && *out != SO_DTYPE_BF16)))
        return so_err_set(err, SO_EINVAL, "kv_type '%.40s': must be f16, f32, q8_0 or bf16",
                          p->kv_type);
    return SO_OK;
}

static int cache_opts(const sooth_engine_params *p, so_engine_opts *o, so_err *err) {
    const char *layout = p->kv_layout ? p->kv_layout : "paged";
    bool slotted = strcmp(layout, "slotted") == 0;
    if (!slotted && strcmp(layout, "paged") != 0)
        return so_err_set(err, SO_EINVAL, "kv_layout '%.40s': must be paged or slotted", layout);
    if (p->kv_pages < 0)
        return so_err_set(err, SO_ERANGE, "kv_pages %d: must not be negative", p->kv_pages);
    o->kv_layout = slotted ? SO_KV_SLOTTED : SO_KV_PAGED;
    o->n_pages = p->kv_pages;
    return cache_type(p, &o->kv_dtype, err);
}

static int draft_tree(void *user, const so_draft_query *q, int32_t *ids, int32_t *parents) {
    const sooth_engine *s = user;
    sooth_draft d = {.size = sizeof d,
                     .tokens = q->tokens,
                     .n_tokens = q->n_tokens,
                     .n_prompt = q->n_prompt,
                     .max = q->max,
                     .max_depth = q->max_depth,
                     .ids = ids,
                     .parents = parents};
    return s->tree_drafter(s->drafter_user, &d);
}

static int drafter_opts(const sooth_engine_params *p, sooth_engine *s, so_engine_opts *o,
                        so_err *err) {
    if (p->drafter && p->tree_drafter)
        return so_err_set(err, SO_EINVAL, "drafter and tree_drafter are both set: set one");
    o->user_drafter = p->drafter;
    o->drafter_user = p->drafter_user;
    if (p->tree_drafter) {
        s->tree_drafter = p->tree_drafter;
        s->drafter_user = p->drafter_user;
        o->user_tree_drafter = draft_tree;
        o->drafter_user = s;
    }
    return SO_OK;
}

/* Translates params, except for the draft model. */
static int engine_opts(const sooth_engine_params *params, sooth_engine *s, sooth_engine_params *p,
                       so_engine_opts *o, so_err *err) {
    *p = ENGINE_DEFAULTS;
    int rc = copy_params(p, sizeof *p, params, "sooth_engine_params", err);
    so_engine_defaults(s->m->b.model, o);
    if (p->n_ctx != 0)
        o->n_ctx = p->n_ctx;
    o->n_parallel = p->n_parallel;
    o->n_batch = p->n_batch;
    o->max_draft = p->max_draft;
    o->keep_costs = SO_KEEP_LARGE_MODELS;
    o->draft_temp = p->draft_temp;
    o->worker_key = p->worker_key;
    if (rc == SO_OK)
        rc = cache_opts(p, o, err);
    return rc == SO_OK ? drafter_opts(p, s, o, err) : rc;
}

int sooth_engine_create(sooth_model *m, const sooth_engine_params *params, sooth_engine **out,
                        sooth_error *err) {
    so_err e = {0};
    so_engine_opts o;
    sooth_engine_params p;
    sooth_engine *s = SO_NEW(sooth_engine);
    s->m = m;
    int rc = engine_opts(params, s, &p, &o, &e);
    lock(m);
    if (rc == SO_OK)
        rc = open_draft(m, &p, o.kv_dtype, &s->draft, &e);
    o.draft_backend = m->b.draft_backend;
    o.draft = s->draft.model;
    o.draft_tok = s->draft.tok;
    o.draft_id = s->draft.ck ? so_registry_id(s->draft.ck) : 0;
    o.draft_claimed_agreement = s->draft.ck ? so_registry_agreement(s->draft.ck) : 0;
    if (rc == SO_OK)
        rc = so_engine_create(m->b.model, m->b.tok, &o, &s->e, &e);
    if (rc != SO_OK)
        so_bundle_close(&s->draft);
    unlock(m);
    if (rc != SO_OK) {
        free(s);
        return report(rc, &e, err);
    }
    *out = s;
    return SOOTH_OK;
}

void sooth_engine_free(sooth_engine *s) {
    if (!s)
        return;
    while (s->requests)
        sooth_request_free(s->requests);
    lock(s->m);
    so_engine_free(s->e);
    so_bundle_close(&s->draft);
    unlock(s->m);
    free(s);
}

/* --- requests --- */

static const sooth_params PARAM_DEFAULTS = {.size = sizeof(sooth_params),
                                            .max_tokens = -1,
                                            .temp = -1,
                                            .top_k = -1,
                                            .top_p = -1,
                                            .min_p = -1,
                                            .repeat_penalty = -1,
                                            .repeat_last_n = 64,
                                            .length_penalty = 1};

void sooth_params_init_sized(sooth_params *p, size_t size) {
    write_defaults(p, &PARAM_DEFAULTS, sizeof *p, size);
}

static so_sample_params sampling(const sooth_model *m, const sooth_params *p) {
    so_sample_params s = m->b.sample;
    s.seed = p->has_seed ? p->seed : so_rng_system_seed() >> 11; /* 53 bits, as in the CLI */
    s.temp = p->temp < 0 ? s.temp : p->temp;
    s.top_k = p->top_k < 0 ? s.top_k : p->top_k;
    s.top_p = p->top_p < 0 ? s.top_p : p->top_p;
    s.min_p = p->min_p < 0 ? s.min_p : p->min_p;
    s.repeat_penalty = p->repeat_penalty < 0 ? s.repeat_penalty : p->repeat_penalty;
    s.presence_penalty = p->presence_penalty;
    s.frequency_penalty = p->frequency_penalty;
    s.repeat_last_n = p->repeat_last_n;
    return s;
}

/* Copies the alternatives of one token and returns their number. */
static size_t copy_top(const so_request *r, const so_logprob *from, sooth_logprob *to) {
    int n_each;
    so_request_logprobs(r, &n_each);
    for (int i = 1; i < n_each; i++)
        to[i - 1] = (sooth_logprob){from[i].token, from[i].logprob};
    return (size_t)n_each - 1;
}

static sooth_timings timings_of(const so_request_stats *s) {
    return (sooth_timings){.prompt_n = s->prompt_n,
                           .predicted_n = s->predicted_n,
                           .prompt_ms = s->prompt_ms,
                           .predicted_ms = s->predicted_ms,
                           .rounds = s->rounds,
                           .draft_n = s->draft_n,
                           .draft_n_accepted = s->draft_n_accepted,
                           .tested_n = s->tested_n,
                           .draft_ms = s->draft_ms,
                           .verify_ms = s->verify_ms};
}

static sooth_metrics metrics_of(const so_request_stats *s) {
    so_rates x = so_stats_rates(s);
    return (sooth_metrics){x.tokens_per_pass, x.mean_accepted, x.alpha, x.acceptance_rate,
                           x.round_rate};
}

static bool on_event(void *user, const so_event *ev) {
    sooth_request *r = user;
    so_buf_append_str(&r->text, ev->text);
    sooth_event out = {.size = sizeof out,
                       .token = ev->token,
                       .text = ev->text.ptr,
                       .text_len = ev->text.len,
                       .finish = (sooth_finish)ev->finish,
                       .origin = (int)ev->origin};
    if (ev->logprobs) {
        out.logprob = ev->logprobs->logprob;
        out.n_top = copy_top(ev->req, ev->logprobs, r->top);
        out.top = r->top;
    }
    const so_request_stats *stats = so_request_get_stats(ev->req);
    sooth_timings timings = timings_of(stats);
    sooth_metrics metrics = metrics_of(stats);
    if (ev->finish != SO_FINISH_NONE) {
        out.timings = &timings;
        out.metrics = &metrics;
    }
    return !r->on_event || r->on_event(r->user, &out) == 0;
}

static int encode_chat(const sooth_model *m, const sooth_message *messages, size_t n,
                       so_tokens *out, so_err *err) {
    if (!m->b.chat)
        return so_err_set(err, SO_ENOTFOUND, "this model has no chat template: use sooth_generate");
    json_t *list = json_array();
    int rc = SO_OK;
    for (size_t i = 0; i < n && rc == SO_OK; i++) {
        json_t *o =
            messages[i].role && messages[i].content
                ? json_pack("{s:s, s:s}", "role", messages[i].role, "content", messages[i].content)
                : NULL;
        if (!o)
            rc = so_err_set(err, SO_EINVAL, "message %zu: role and content must be valid UTF-8", i);
        else
            json_array_append_new(list, o);
    }
    if (rc == SO_OK)
        rc = so_chat_encode(m->b.chat, list, NULL, out, err);
    json_decref(list);
    return rc;
}

static int encode(const sooth_model *m, const char *prompt, const sooth_message *messages,
                  size_t n_messages, so_tokens *out, so_err *err) {
    if (!prompt == !messages)
        return so_err_set(err, SO_EINVAL, "set exactly one of prompt and messages");
    if (messages)
        return encode_chat(m, messages, n_messages, out, err);
    return so_tokenizer_encode(m->b.tok, so_str_c(prompt), SO_ENCODE_ADD_SPECIAL, out, err);
}

/* Beam search does not sample: recommended values are replaced, the caller's own are checked by the
 * engine. */
static int beams(const sooth_params *p, so_request_opts *o, so_err *err) {
    if (p->early_stopping < SOOTH_EARLY_STOPPING_FALSE ||
        p->early_stopping > SOOTH_EARLY_STOPPING_NEVER)
        return so_err_set(err, SO_ERANGE, "early_stopping %d: must be from 0 to 2",
                          p->early_stopping);
    o->beams = (so_beam_opts){.width = p->beams,
                              .n_best = p->n_best ? p->n_best : 1,
                              .length_penalty = p->length_penalty,
                              .early_stop = (so_early_stop)p->early_stopping,
                              .candidates = p->beam_candidates};
    if (p->beams != 0 && p->temp < 0)
        o->sample.temp = 0;
    if (p->beams != 0 && p->repeat_penalty < 0)
        o->sample.repeat_penalty = 1;
    return SO_OK;
}

static int speculation(const sooth_params *p, so_spec_opts *o, so_err *err) {
    const char *v = p->verify ? p->verify : "match";
    o->drafter = p->spec;
    o->length = p->spec_length;
    if (!so_verify_mode_parse(v, &o->verify, &o->lenience))
        return so_err_set(err, SO_EINVAL,
                          "verify '%.40s': must be match, reject, lenient=L or typical=E", v);
    return SO_OK;
}

static int submit(sooth_engine *s, sooth_request *req, const so_tokens *prompt, bool continues,
                  const sooth_params *p, so_err *err) {
    so_request_opts o = {.prompt = prompt->ids,
                         .n_prompt = (int)SO_MIN(prompt->len, (size_t)INT32_MAX),
                         .continues = continues,
                         .sample = sampling(s->m, p),
                         .has_nonce = p->has_nonce != 0,
                         .nonce = p->nonce,
                         .max_tokens = p->max_tokens,
                         .priority = p->priority,
                         .ignore_end = p->ignore_end != 0,
                         .n_logprobs = p->logprobs,
                         .on_event = on_event,
                         .user = req};
    if (p->n_stop > SO_REQUEST_MAX_STOPS || p->n_bias > 100000)
        return so_err_set(err, SO_ELIMIT, "%zu stop strings, %zu biases: at most %d and 100000",
                          p->n_stop, p->n_bias, SO_REQUEST_MAX_STOPS);
    int rc = speculation(p, &o.spec, err);
    if (rc == SO_OK)
        rc = beams(p, &o, err);
    if (rc != SO_OK)
        return rc;
    so_str stops[SO_REQUEST_MAX_STOPS];
    for (size_t i = 0; i < p->n_stop; i++)
        stops[i] = so_str_c(p->stop[i]);
    so_tokens expected = {0};
    if (p->prediction)
        rc = so_tokenizer_encode(s->m->b.tok, so_str_c(p->prediction), 0, &expected, err);
    if (rc != SO_OK) {
        so_tokens_free(&expected);
        return rc;
    }
    o.spec.expected = expected.ids;
    o.spec.n_expected = (int)SO_MIN(expected.len, (size_t)INT32_MAX);
    so_bias *bias = SO_NEW_N(so_bias, p->n_bias);
    for (size_t i = 0; i < p->n_bias; i++)
        bias[i] = (so_bias){p->bias[i].token, p->bias[i].bias};
    o.stops = stops;
    o.n_stops = (int)p->n_stop;
    o.sample.bias = bias;
    o.sample.n_bias = (int)p->n_bias;
    lock(s->m);
    rc = so_engine_submit(s->e, &o, &req->r, err);
    unlock(s->m);
    free(bias);
    so_tokens_free(&expected);
    return rc;
}

int sooth_submit(sooth_engine *s, const char *prompt, const sooth_message *messages,
                 size_t n_messages, const sooth_params *params, sooth_event_fn *fn, void *user,
                 sooth_request **out, sooth_error *err) {
    so_err e = {0};
    so_tokens tokens = {0};
    sooth_params p = PARAM_DEFAULTS;
    sooth_request *req = SO_NEW(sooth_request);
    req->e = s;
    req->on_event = fn;
    req->user = user;
    int rc = copy_params(&p, sizeof p, params, "sooth_params", &e);
    if (rc == SO_OK)
        rc = encode(s->m, prompt, messages, n_messages, &tokens, &e);
    if (rc == SO_OK)
        rc = submit(s, req, &tokens, prompt != NULL, &p, &e);
    so_tokens_free(&tokens);
    if (rc != SO_OK) {
        free(req);
        return report(rc, &e, err);
    }
    lock(s->m);
    req->next = s->requests;
    s->requests = req;
    unlock(s->m);
    *out = req;
    return SOOTH_OK;
}

int sooth_step(sooth_engine *s, sooth_error *err) {
    so_err e = {0};
    lock(s->m);
    int rc = so_engine_step(s->e, &e);
    unlock(s->m);
    return report(rc, &e, err);
}

sooth_finish sooth_request_finish(const sooth_request *r) {
    lock(r->e->m);
    sooth_finish f = (sooth_finish)so_request_finish(r->r);
    unlock(r->e->m);
    return f;
}

void sooth_request_free(sooth_request *r) {
    if (!r)
        return;
    sooth_engine *s = r->e;
    lock(s->m);
    sooth_request **at = &s->requests;
    while (*at != r)
        at = &(*at)->next;
    *at = r->next;
    so_request_free(r->r);
    unlock(s->m);
    so_buf_free(&r->text);
    free(r);
}

/* --- results --- */

void sooth_result_init_sized(sooth_result *r, size_t size) {
    static const sooth_result empty = {.size = sizeof(sooth_result)};
    write_defaults(r, &empty, sizeof *r, size);
}

/* True if the caller's struct, whose header may be older, has the logprobs fields. */
static bool has_logprobs(const sooth_result *r) {
    return r->size >= offsetof(sooth_result, n_top) + sizeof r->n_top;
}

static bool has_best(const sooth_result *r) {
    return r->size >= offsetof(sooth_result, n_best) + sizeof r->n_best;
}

void sooth_result_deinit(sooth_result *r) {
    free(r->text);
    free(r->tokens);
    if (has_logprobs(r)) {
        free(r->logprobs);
        free(r->top);
    }
    if (has_best(r)) {
        for (size_t i = 0; i < r->n_best; i++) {
            free(r->best[i].text);
            free(r->best[i].tokens);
        }
        free(r->best);
    }
    sooth_result_init_sized(r, r->size);
}

static void fill_best(const so_request *r, sooth_result *out) {
    int n = so_request_n_best(r);
    if (n == 0)
        return;
    out->n_best = (size_t)n;
    out->best = SO_NEW_N(sooth_hypothesis, n);
    for (int i = 0; i < n; i++) {
        const so_beam_result *b = so_request_result(r, i);
        sooth_hypothesis *h = &out->best[i];
        h->text_len = b->text.len;
        h->text = so_alloc(b->text.len + 1);
        memcpy(h->text, so_buf_str(&b->text).ptr, b->text.len);
        h->text[b->text.len] = '\0';
        h->n_tokens = (size_t)b->n_tokens;
        h->tokens = SO_NEW_N(int32_t, b->n_tokens);
        memcpy(h->tokens, b->tokens, h->n_tokens * sizeof *h->tokens);
        h->score = b->score;
        h->logprob = b->sum;
        h->finish = (sooth_finish)b->finish;
    }
}

static void fill_logprobs(const so_request *r, sooth_result *out) {
    int n_each;
    const so_logprob *from = so_request_logprobs(r, &n_each);
    if (!from)
        return;
    out->n_top = (size_t)n_each - 1;
    out->logprobs = SO_NEW_N(float, out->n_tokens);
    out->top = SO_NEW_N(sooth_logprob, out->n_tokens * out->n_top);
    for (size_t i = 0; i < out->n_tokens; i++, from += n_each) {
        out->logprobs[i] = from->logprob;
        copy_top(r, from, out->top + i * out->n_top);
    }
}

static void fill_result(const sooth_request *r, sooth_result *out) {
    const so_request_stats *st = so_request_get_stats(r->r);
    int n;
    const int32_t *ids = so_request_output(r->r, &n);
    out->text = so_alloc(r->text.len + 1);
    memcpy(out->text, so_buf_str(&r->text).ptr, r->text.len);
    out->text[r->text.len] = '\0';
    out->text_len = r->text.len;
    out->n_tokens = (size_t)n;
    out->tokens = SO_NEW_N(int32_t, n);
    memcpy(out->tokens, ids, (size_t)n * sizeof *ids);
    out->finish = (sooth_finish)so_request_finish(r->r);
    out->seed = so_request_seed(r->r);
    out->has_nonce = so_request_nonce(r->r, &out->nonce);
    out->timings = timings_of(st);
    out->metrics = metrics_of(st);
    out->hit_rate = so_stats_rates(st).hit_rate;
    if (has_logprobs(out))
        fill_logprobs(r->r, out);
    if (has_best(out))
        fill_best(r->r, out);
}

int sooth_request_result(const sooth_request *r, sooth_result *result, sooth_error *err) {
    so_err e = {0};
    size_t size = result->size;
    /* The first version of the struct ended with `timings`. A smaller size was never
     * initialised. */
    if (size < offsetof(sooth_result, timings) + sizeof result->timings || size > 4096)
        return report(
            so_err_set(&e, SO_EINVAL, "result: size is %zu: call sooth_result_init first", size),
            &e, err);
    lock(r->e->m);
    int rc = so_request_check(r->r, &e);
    if (rc == SO_OK) {
        sooth_result full = {.size = size};
        fill_result(r, &full);
        sooth_result_deinit(result);
        memcpy(result, &full, SO_MIN(size, sizeof full));
    }
    unlock(r->e->m);
    return report(rc, &e, err);
}

/* --- blocking calls --- */

static int run_to_end(sooth_engine *s, sooth_request *r, sooth_result *result, sooth_error *err) {
    int rc = SOOTH_OK;
    while (rc >= 0 && sooth_request_finish(r) == SOOTH_FINISH_NONE)
        rc = sooth_step(s, err);
    sooth_result local;
    sooth_result_init(&local);
    if (rc >= 0)
        rc = sooth_request_result(r, result ? result : &local, err);
    sooth_result_deinit(&local);
    sooth_request_free(r);
    return rc;
}

int sooth_generate(sooth_engine *s, const char *prompt, const sooth_params *params,
                   sooth_event_fn *fn, void *user, sooth_result *result, sooth_error *err) {
    sooth_request *r;
    int rc = sooth_submit(s, prompt, NULL, 0, params, fn, user, &r, err);
    return rc == SOOTH_OK ? run_to_end(s, r, result, err) : rc;
}

int sooth_chat(sooth_engine *s, const sooth_message *messages, size_t n_messages,
               const sooth_params *params, sooth_event_fn *fn, void *user, sooth_result *result,
               sooth_error *err) {
    sooth_request *r;
    int rc = sooth_submit(s, NULL, messages, n_messages, params, fn, user, &r, err);
    return rc == SOOTH_OK ? run_to_end(s, r, result, err) : rc;
}
