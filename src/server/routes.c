/* The endpoints: a table of routes, and the handler of each. A handler is called once the body of
 * its request is complete.
 *
 * Generation: parse → prepare (drafter, template, tokens, lengths) → submit a job → sleep. All
 * other endpoints respond at once. Handlers run on HTTP threads and use only constant parts of the
 * model: tokenizer, chat template, shape. They never run it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/impl.h"
#include "token/utf8.h"

/* --- generation --- */

static bool check_model(const so_exchange *x, const so_job *j, so_api_error *e) {
    const char *name = j->rq.model;
    if (!x->s->o.strict_model || !name || strcmp(name, x->s->o.model) == 0)
        return true;
    return so_api_fail(e, 404, "model_not_found", "model",
                       "this server has no model '%.80s', only '%.80s'", name, x->s->o.model);
}

static bool encode_prompt(const so_serving *sv, so_job *j, int i, so_err *err) {
    const so_api_prompt *p = &j->rq.prompts[i];
    if (j->rq.kind == SO_API_CHAT)
        return so_chat_encode_to(sv->b->chat, j->rq.messages, j->rq.kwargs, j->rq.end,
                                 &j->prompts[i], err) == SO_OK;
    if (p->ids) {
        so_tokens_append(&j->prompts[i], p->ids, p->n_ids);
        return true;
    }
    unsigned flags = SO_ENCODE_PARSE_SPECIAL | (j->rq.add_special ? SO_ENCODE_ADD_SPECIAL : 0u);
    return so_tokenizer_encode(sv->b->tok, p->text, flags, &j->prompts[i], err) == SO_OK;
}

static bool check_prompt_len(const so_serving *sv, const so_tokens *p, const char *field,
                             so_api_error *e) {
    bool source = so_model_hparams(sv->b->model)->n_enc_layers > 0;
    if (p->len == 0)
        return so_api_fail(e, 400, "invalid_prompt", field,
                           "'%s' is empty: the model needs at least one token", field);
    if (source && p->len == 1 && p->ids[0] == so_tokenizer_eos(sv->b->tok))
        return so_api_fail(e, 400, "invalid_prompt", field,
                           "'%s' is empty: the encoder needs a text before the end token", field);
    if (source && p->len > (size_t)sv->eo.n_ctx)
        return so_api_fail(e, 400, "context_length_exceeded", field,
                           "'%s' has %zu tokens, but the encoder reads at most %d: shorten it, or "
                           "raise the server's --ctx-size",
                           field, p->len, sv->eo.n_ctx);
    if (!source && p->len >= (size_t)sv->n_room)
        return so_api_fail(e, 400, "context_length_exceeded", field,
                           "'%s' has %zu tokens, but this server's %s holds %d with the answer: "
                           "shorten it, or raise the server's %s",
                           field, p->len, sv->n_room < sv->eo.n_ctx ? "cache" : "context",
                           sv->n_room, sv->n_room < sv->eo.n_ctx ? "--kv-pages" : "--ctx-size");
    return true;
}

static bool check_prompt(const so_serving *sv, const so_tokens *p, const char *field,
                         so_api_error *e) {
    int n_vocab = so_model_hparams(sv->b->model)->n_vocab;
    if (!check_prompt_len(sv, p, field, e))
        return false;
    for (size_t i = 0; i < p->len; i++)
        if (p->ids[i] < 0 || p->ids[i] >= n_vocab)
            return so_api_fail(e, 400, "invalid_prompt", field,
                               "token %zu of '%s' is %d: the vocabulary has ids 0 to %d", i, field,
                               p->ids[i], n_vocab - 1);
    return true;
}

static bool encode_prompts(const so_serving *sv, so_job *j, so_api_error *e) {
    char field[32];
    so_err err = {0};
    snprintf(field, sizeof field, "%s", j->rq.kind == SO_API_CHAT ? "messages" : "prompt");
    if (j->rq.kind == SO_API_CHAT && !sv->b->chat)
        return so_api_fail(e, 400, "no_chat_template", NULL,
                           "this model has no chat template: use /v1/completions");
    for (int i = 0; i < j->rq.n_prompts; i++) {
        if (j->rq.n_prompts > 1)
            snprintf(field, sizeof field, "prompt[%d]", i);
        if (!encode_prompt(sv, j, i, &err))
            return so_api_fail(e, 400, "invalid_prompt", field, "'%s': %s", field, err.msg);
        if (!check_prompt(sv, &j->prompts[i], field, e))
            return false;
    }
    return true;
}

/* Bounds the logprobs of one response: with `echo` every choice repeats those of the prompt, so a
 * small request could ask for gigabytes. Streamed answer tokens are not counted, since their JSON
 * is freed as it is sent. */
static bool check_logprobs(const so_serving *sv, const so_job *j, so_api_error *e) {
    const so_api_request *rq = &j->rq;
    int64_t n_tokens = 0;
    for (int i = 0; i < rq->n_prompts; i++) {
        int64_t n = (int64_t)j->prompts[i].len, room = so_serving_room(sv, j->prompts[i].len);
        int64_t answer = rq->max_tokens < 0 ? room : SO_MIN(room, rq->max_tokens);
        n_tokens += (rq->echo ? n : 0) + (rq->stream ? 0 : answer);
    }
    int64_t total = n_tokens * rq->n * (1 + rq->n_top);
    if (!rq->logprobs || total <= SO_API_MAX_LOGPROBS)
        return true;
    return so_api_fail(e, 400, "invalid_value", "logprobs",
                       "%d answers with 'logprobs' of %d alternatives may have %lld values: at "
                       "most %d are allowed; lower n, max_tokens or the alternatives",
                       j->n_choices, rq->n_top, (long long)total, SO_API_MAX_LOGPROBS);
}

static bool encode_prediction(const so_serving *sv, so_job *j, so_api_error *e) {
    so_err err = {0};
    if (!j->rq.prediction.ptr || !j->spec.drafter)
        return true;
    if (so_tokenizer_encode(sv->b->tok, j->rq.prediction, 0, &j->expected, &err) != SO_OK)
        return so_api_fail(e, 400, "invalid_value", "prediction", "'prediction': %s", err.msg);
    return true;
}

/* Tokenizes each word twice: without a space in front, as at the start of a text, and with one, as
 * after another word. */
static bool encode_bad_words(const so_serving *sv, so_job *j, so_api_error *e) {
    so_err err = {0};
    j->bad_words = SO_NEW_N(so_tokens, 2 * j->rq.n_bad_words);
    for (int i = 0; i < 2 * j->rq.n_bad_words; i++) {
        so_buf text = {0};
        so_str word = j->rq.bad_words[i / 2];
        while (word.len > 0 && word.ptr[0] == ' ') {
            word.ptr++;
            word.len--;
        }
        so_buf_append_c(&text, i % 2 ? " " : "");
        so_buf_append_str(&text, word);
        so_tokens *to = &j->bad_words[j->n_bad_words];
        int rc =
            so_tokenizer_encode(sv->b->tok, so_buf_str(&text), SO_ENCODE_PARSE_SPECIAL, to, &err);
        so_buf_free(&text);
        if (rc != SO_OK)
            return so_api_fail(e, 400, "invalid_value", "bad_words", "'bad_words': %s", err.msg);
        j->n_bad_words += to->len > 0;
    }
    return true;
}

static bool check_stop_tokens(const so_serving *sv, const so_job *j, so_api_error *e) {
    int n_vocab = so_model_hparams(sv->b->model)->n_vocab;
    for (size_t i = 0; i < j->rq.n_stop_tokens; i++)
        if (j->rq.stop_tokens[i] >= n_vocab)
            return so_api_fail(e, 400, "invalid_value", "stop_token_ids",
                               "'stop_token_ids' has %d: the vocabulary has ids 0 to %d",
                               j->rq.stop_tokens[i], n_vocab - 1);
    return true;
}

static bool prepare(so_exchange *x, so_job *j, so_api_error *e) {
    const so_serving *sv = so_worker_serving(x->s->worker);
    int most = sv->eo.n_parallel + x->s->o.n_queue;
    if (j->n_choices > most)
        return so_api_fail(e, 400, "invalid_value", "n",
                           "%d answers at once are more than this server can queue (%d)",
                           j->n_choices, most);
    j->spec_is_default = !j->rq.spec.drafter && j->rq.spec.enabled != 1;
    return check_model(x, j, e) &&
           so_api_choose_spec(&j->rq, &sv->spec, sv->eo.max_draft, &j->spec_text, &j->spec, e) &&
           encode_prompts(sv, j, e) && check_stop_tokens(sv, j, e) && encode_bad_words(sv, j, e) &&
           check_logprobs(sv, j, e) && encode_prediction(sv, j, e);
}

static void wake(void *user) { so_net_wake(user); }

/* Fills *e. rc: what so_worker_submit returned. */
static void fail_submit(const so_exchange *x, int rc, so_api_error *e) {
    const so_server *s = x->s;
    if (rc == SO_ECANCELLED) { /* the drain timeout expired while the request was parsed */
        so_api_fail(e, 503, "stopping", NULL, "the server is shutting down");
        so_metrics_refused(s->metrics, "not_ready");
        return;
    }
    so_api_fail(e, 429, "queue_full", NULL,
                "the queue is full: try again in %d s (--queue %d, --parallel %d)", x->retry_s,
                s->o.n_queue, so_worker_serving(s->worker)->eo.n_parallel);
    so_metrics_refused(s->metrics, "queue_full");
}

static void submit(so_exchange *x, so_job *j) {
    so_server *s = x->s;
    so_api_error e;
    snprintf(j->client, sizeof j->client, "%s", x->c->client);
    j->wake = wake;
    j->wake_user = x->c;
    j->on_end = so_watch_job_end;
    j->on_end_user = s;
    j->path = x->route->path;
    j->t_created_ns = x->t_start_ns;
    so_watch_job_begin(s);
    int rc = so_worker_submit(s->worker, j, &x->retry_s);
    if (rc != SO_OK) {
        fail_submit(x, rc, &e);
        j->on_end = NULL;
        so_job_release(j);
        so_watch_job_abandon(s);
        so_http_send_error(x, &e);
        return;
    }
    x->job = j;
    so_watch_busy(s, x->c, j);
    so_route_resume(x);
}

static void note_ignored(so_exchange *x, const so_buf *names) {
    snprintf(x->ignored, sizeof x->ignored, "%s", so_buf_str(names).ptr);
}

static void generate(so_exchange *x, so_api_kind kind) {
    const so_serving *sv = so_worker_serving(x->s->worker);
    so_api_request rq;
    so_api_error e;
    if (!so_api_parse(kind, so_buf_str(&x->body), &sv->sample, &rq, &e)) {
        so_metrics_refused(x->s->metrics, "bad_request");
        so_http_send_error(x, &e);
        return;
    }
    so_buf_free(&x->body); /* parsed: not needed while the answer is computed */
    note_ignored(x, &rq.ignored);
    so_job *j = so_job_create(&rq);
    if (!prepare(x, j, &e)) {
        so_metrics_refused(x->s->metrics, "bad_request");
        so_job_free(j);
        so_http_send_error(x, &e);
        return;
    }
    submit(x, j);
}

static void completions(so_exchange *x) { generate(x, SO_API_COMPLETION); }
static void chat(so_exchange *x) { generate(x, SO_API_CHAT); }

static void answer_whole(so_exchange *x) {
    so_api_error e;
    so_buf body = {0};
    so_format f = so_http_format(x->s);
    if (so_format_error(x->job, &e)) {
        so_http_send_error(x, &e);
        return;
    }
    so_format_answer(&f, x->job, &body);
    so_http_send(x, 200, "application/json", &body);
}

void so_route_resume(so_exchange *x) {
    so_job *j = x->job;
    so_api_error e;
    pthread_mutex_lock(&j->lock);
    bool done = j->state == SO_JOB_DONE;
    bool failed = done && so_format_error(j, &e);
    bool stream = j->rq.stream && !failed && j->state != SO_JOB_WAITING;
    if (!done && !stream) {
        j->asleep = true;
        so_net_sleep(x->c);
    }
    pthread_mutex_unlock(&j->lock);
    if (failed)
        so_http_send_error(x, &e);
    else if (stream)
        so_http_stream(x);
    else if (done)
        answer_whole(x);
}

/* --- the model --- */

static json_t *model_json(const so_server *s) {
    bool ready = so_worker_get_state(s->worker) == SO_WORKER_READY;
    json_t *o = json_pack("{s:s, s:s, s:I, s:s}", "id", s->o.model, "object", "model", "created",
                          (json_int_t)s->created_s, "owned_by", "sooth");
    if (!ready)
        return o;
    const so_serving *sv = so_worker_serving(s->worker);
    const so_hparams *hp = so_model_hparams(sv->b->model);
    json_object_set_new(o, "meta",
                        json_pack("{s:i, s:i, s:i, s:I, s:I}", "n_ctx", sv->eo.n_ctx, "n_ctx_train",
                                  hp->n_ctx_train, "n_vocab", hp->n_vocab, "n_params",
                                  (json_int_t)so_model_n_params(sv->b->model), "weight_bytes",
                                  (json_int_t)so_model_weight_bytes(sv->b->model)));
    return o;
}

static void models(so_exchange *x) {
    so_http_send_json(x, 200,
                      json_pack("{s:s, s:[o]}", "object", "list", "data", model_json(x->s)));
}

static void one_model(so_exchange *x) {
    so_api_error e;
    const char *name = x->path + strlen("/v1/models/");
    if (strcmp(name, x->s->o.model) == 0) {
        so_http_send_json(x, 200, model_json(x->s));
        return;
    }
    so_api_fail(&e, 404, "model_not_found", "model",
                "this server has no model '%.80s', only '%.80s'", name, x->s->o.model);
    so_http_send_error(x, &e);
}

static void health(so_exchange *x) {
    so_server_state s = so_server_get_state(x->s);
    so_worker_usage l = so_worker_get_usage(x->s->worker);
    json_t *o = json_pack("{s:s, s:i, s:i}", "status", so_server_state_name(s), "running",
                          l.running, "waiting", l.waiting);
    if (s == SO_SERVER_LOST) {
        so_err err = {0};
        so_server_error(x->s, &err);
        json_object_set_new(o, "error", json_string(err.msg));
    }
    so_http_send_json(x, s == SO_SERVER_READY ? 200 : 503, o);
}

static json_t *sampling_json(const so_sample_params *p) {
    return json_pack("{s:f, s:i, s:f, s:f, s:f, s:i, s:f, s:f}", "temperature", (double)p->temp,
                     "top_k", p->top_k, "top_p", (double)p->top_p, "min_p", (double)p->min_p,
                     "repeat_penalty", (double)p->repeat_penalty, "repeat_last_n", p->repeat_last_n,
                     "presence_penalty", (double)p->presence_penalty, "frequency_penalty",
                     (double)p->frequency_penalty);
}

static json_t *spec_json(const so_serving *sv) {
    const so_spec_opts *o = &sv->spec;
    return json_pack("{s:s, s:i, s:s, s:i, s:b}", "drafter", o->drafter ? o->drafter : "none",
                     "length", o->length, "verify", so_verify_mode_name(o->verify), "draft_max",
                     sv->eo.max_draft, "draft_model", sv->eo.draft != NULL);
}

static void describe_device(const so_server *s, so_buf *out) {
    const so_backend *b = so_model_backend(so_worker_serving(s->worker)->b->model);
    b->vt->describe(b, out);
}

static json_t *device_json(const so_server *s) {
    so_worker_usage l = so_worker_get_usage(s->worker);
    so_buf name = {0};
    describe_device(s, &name);
    json_t *o = json_pack("{s:s}", "name", so_buf_str(&name).ptr);
    so_buf_free(&name);
    if (l.device_total > 0) {
        json_object_set_new(o, "memory_bytes", json_integer((json_int_t)l.device_total));
        json_object_set_new(o, "memory_free_bytes", json_integer((json_int_t)l.device_free));
    }
    return o;
}

static void props(so_exchange *x) {
    const so_serving *sv = so_worker_serving(x->s->worker);
    so_str tmpl = so_tokenizer_chat_template(sv->b->tok);
    json_t *text = json_stringn(tmpl.ptr, tmpl.len);
    so_http_send_json(
        x, 200,
        json_pack("{s:o, s:s, s:s, s:o, s:i, s:i, s:I, s:o, s:o, s:o}", "model", model_json(x->s),
                  "build", SO_VERSION, "system_fingerprint", x->s->fingerprint, "device",
                  device_json(x->s), "parallel", sv->eo.n_parallel, "queue", x->s->o.n_queue,
                  "max_body", (json_int_t)x->s->o.max_body, "sampling", sampling_json(&sv->sample),
                  "speculative", spec_json(sv), "chat_template", text ? text : json_null()));
}

/* --- text and ids --- */

static json_t *piece_json(const so_tokenizer *t, int32_t id) {
    so_buf text = {0};
    so_utf8_repair(so_tokenizer_text(t, id), &text);
    json_t *o = json_pack("{s:i, s:o}", "id", (int)id, "piece",
                          json_stringn(so_buf_str(&text).ptr, text.len));
    so_buf_free(&text);
    return o;
}

static void tokenize(so_exchange *x) {
    const so_tokenizer *tok = so_worker_serving(x->s->worker)->b->tok;
    so_api_tokenize rq;
    so_api_error e;
    so_err err = {0};
    so_tokens ids = {0};
    if (!so_api_parse_tokenize(so_buf_str(&x->body), &rq, &e)) {
        so_http_send_error(x, &e);
        return;
    }
    unsigned flags = (rq.add_special ? SO_ENCODE_ADD_SPECIAL : 0u) |
                     (rq.parse_special ? SO_ENCODE_PARSE_SPECIAL : 0u);
    int rc = so_tokenizer_encode(tok, rq.text, flags, &ids, &err);
    json_t *list = json_array();
    for (size_t i = 0; i < ids.len; i++)
        json_array_append_new(list, rq.with_pieces ? piece_json(tok, ids.ids[i])
                                                   : json_integer(ids.ids[i]));
    note_ignored(x, &rq.ignored);
    so_tokens_free(&ids);
    so_api_tokenize_free(&rq);
    if (rc == SO_OK) {
        so_http_send_json(x, 200, json_pack("{s:o}", "tokens", list));
        return;
    }
    json_decref(list);
    so_api_fail_err(&e, &err);
    so_http_send_error(x, &e);
}

static void detokenize(so_exchange *x) {
    const so_tokenizer *tok = so_worker_serving(x->s->worker)->b->tok;
    so_tokens ids = {0};
    so_api_error e = {0};
    so_buf text = {0}, whole = {0}, ignored = {0};
    bool ok = so_api_parse_detokenize(so_buf_str(&x->body), &ids, &ignored, &e);
    for (size_t i = 0; i < ids.len && ok; i++)
        if (ids.ids[i] >= so_tokenizer_n_vocab(tok))
            ok = so_api_fail(&e, 400, "invalid_value", "tokens",
                             "token %zu is %d: the vocabulary has ids 0 to %d", i, ids.ids[i],
                             so_tokenizer_n_vocab(tok) - 1);
    if (ok)
        so_tokenizer_decode(tok, ids.ids, ids.len, true, &text);
    so_utf8_repair(so_buf_str(&text), &whole);
    json_t *o = json_pack("{s:o}", "content", json_stringn(so_buf_str(&whole).ptr, whole.len));
    note_ignored(x, &ignored);
    so_tokens_free(&ids);
    so_buf_free(&ignored);
    so_buf_free(&text);
    so_buf_free(&whole);
    if (ok) {
        so_http_send_json(x, 200, o);
        return;
    }
    json_decref(o);
    so_http_send_error(x, &e);
}

/* --- metrics, page, preflight --- */

static void metrics(so_exchange *x) {
    so_server *s = x->s;
    so_buf body = {0}, device = {0};
    so_worker_usage l = so_worker_get_usage(s->worker);
    so_worker_state st = so_worker_get_state(s->worker);
    bool ready = st == SO_WORKER_READY || st == SO_WORKER_LOST;
    if (ready)
        describe_device(s, &device);
    so_gauges g = {.version = SO_VERSION,
                   .model = s->o.model,
                   .state = so_server_state_name(so_server_get_state(s)),
                   .device = ready ? so_buf_str(&device).ptr : NULL,
                   .device_free = l.device_free,
                   .device_total = l.device_total,
                   .running = l.running,
                   .waiting = l.waiting,
                   .slots = ready ? so_worker_serving(s->worker)->eo.n_parallel : 0,
                   .connections = so_watch_count(s),
                   .engine = l.engine};
    so_metrics_write(s->metrics, &g, &body);
    so_buf_free(&device);
    so_http_send(x, 200, "text/plain; version=0.0.4; charset=utf-8", &body);
}

static void page(so_exchange *x) { so_http_send_static(x, "text/html; charset=utf-8", so_page()); }

/* A browser sends this before it lets a page of another origin make a request. */
static void preflight(so_exchange *x) { so_http_send_preflight(x); }

static const so_route ROUTES[] = {
    {"POST", "/v1/chat/completions", chat, false, true},
    {"POST", "/v1/completions", completions, false, true},
    {"GET", "/v1/models", models, false, false},
    {"GET", "/v1/models/", one_model, false, false}, /* followed by a name */
    {"GET", "/health", health, true, false},
    {"GET", "/metrics", metrics, false, false},
    {"GET", "/props", props, false, true},
    {"POST", "/tokenize", tokenize, false, true},
    {"POST", "/detokenize", detokenize, false, true},
    {"GET", "/", page, true, false},
};
static const so_route PREFLIGHT = {"OPTIONS", "preflight", preflight, true, false};

const so_route *so_route_find(const char *method, const char *path, const char **allow) {
    const so_route *r = NULL;
    for (size_t i = 0; i < SO_LEN(ROUTES) && !r; i++) {
        size_t n = strlen(ROUTES[i].path);
        bool prefix = n > 1 && ROUTES[i].path[n - 1] == '/';
        if (prefix ? strncmp(path, ROUTES[i].path, n) == 0 : strcmp(path, ROUTES[i].path) == 0)
            r = &ROUTES[i];
    }
    *allow = !r ? NULL : strcmp(r->method, "GET") == 0 ? "GET, HEAD" : "POST";
    if (r && strcmp(method, "OPTIONS") == 0)
        return &PREFLIGHT;
    bool head = r && strcmp(method, "HEAD") == 0 && strcmp(r->method, "GET") == 0;
    return r && (head || strcmp(method, r->method) == 0) ? r : NULL;
}
