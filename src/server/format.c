/* See format.h.
 *
 *   object   {envelope, "choices": […], "usage", "seed", "nonce", "timings", "spec"}
 *   stream   data: {envelope, "choices": [{"index", "delta" or "text", …}]}
 *                new text of one choice; with "sooth": {"rounds": true} one event per round
 *            data: {envelope, "choices": [{… "finish_reason"}], "seed", "nonce", "timings", "spec"}
 *                the last event of each choice
 *            data: {envelope, "choices": [], "usage"}
 *                with include_usage
 *            data: [DONE]
 *
 * The envelope is "id", "object", "created", "model", "system_fingerprint".
 *
 * Both forms have the same values: the pieces of a stream, concatenated, equal the object. Events
 * are written member by member, without building a JSON object first, because there is one for each
 * token. An error after the stream has begun is an event {"error": …}, and no [DONE] follows.
 *
 * HTTP threads: so_format_stream under the job's lock, so_format_answer once the job is done. */
#include "server/format.h"

#include <stdlib.h>

#include "token/utf8.h"

static const char *const ORIGINS[] = {[SO_ORIGIN_PLAIN] = "plain",
                                      [SO_ORIGIN_DRAFT] = "draft",
                                      [SO_ORIGIN_CORRECTION] = "correction",
                                      [SO_ORIGIN_BONUS] = "bonus"};

enum { JSON_FLAGS = JSON_COMPACT | JSON_REAL_PRECISION(9) };

static int append(const char *p, size_t n, void *user) {
    so_buf_append(user, p, n);
    return 0;
}

void so_format_json(json_t *o, so_buf *out) {
    json_dump_callback(o, append, out, JSON_FLAGS);
    json_decref(o);
}

static bool is_chat(const so_job *j) { return j->rq.kind == SO_API_CHAT; }

static json_t *string_json(const so_buf *text, size_t from, size_t to) {
    return json_stringn(so_buf_str(text).ptr + from, to - from);
}

json_t *so_format_token(const so_format *f, int32_t id) {
    so_buf text = {0};
    so_utf8_repair(so_tokenizer_text(f->tok, id), &text);
    json_t *s = string_json(&text, 0, text.len);
    so_buf_free(&text);
    return s;
}

/* --- rounds --- */

static json_t *plan_json(const so_plan *p) {
    return json_pack("{s:i, s:i, s:f, s:f, s:f, s:f, s:b}", "requests", p->n_requests, "rows",
                     p->n_rows, "expected_tokens", p->tokens, "expected_ms", p->ms, "plain_ms",
                     p->plain_ms, "uncertainty", p->uncertainty, "probe", p->probe);
}

static void tree_json(const so_format *f, const so_out_round *r, json_t *into) {
    json_t *tree = json_array(), *rejected = json_array();
    for (int i = 0; i < r->n_nodes; i++) {
        const so_out_node *n = &r->nodes[i];
        json_t *chance = n->chance >= 0 ? json_real((double)n->chance) : json_null();
        json_array_append_new(tree, json_pack("{s:i, s:o, s:i, s:b, s:b, s:o}", "id", (int)n->token,
                                              "text", so_format_token(f, n->token), "parent",
                                              (int)n->parent, "accepted", n->accepted, "tested",
                                              n->tested, "chance", chance));
        if (n->tested && !n->accepted)
            json_array_append_new(rejected,
                                  json_pack("{s:i, s:o, s:i}", "id", (int)n->token, "text",
                                            so_format_token(f, n->token), "depth", (int)n->depth));
    }
    json_object_set_new(into, "rejected", rejected);
    json_object_set_new(into, "tree", tree);
}

/* Round k, which produced the tokens [from, to). */
static json_t *round_json(const so_format *f, const so_choice *c, int k, int from, int to) {
    const so_out_round *r = c->rounds[k];
    json_t *o = json_pack("{s:i}", "round", k), *tokens = json_array();
    for (int i = from; i < to; i++)
        json_array_append_new(tokens, json_pack("{s:i, s:o, s:s}", "id", (int)c->tokens[i].id,
                                                "text", so_format_token(f, c->tokens[i].id),
                                                "origin", ORIGINS[c->tokens[i].origin]));
    json_object_set_new(o, "tokens", tokens);
    tree_json(f, r, o);
    json_object_set_new(o, "plan", plan_json(&r->plan));
    json_object_set_new(o, "draft_ms", json_real(r->draft_ms));
    json_object_set_new(o, "pass_ms", json_real(r->pass_ms));
    return o;
}

/* One past the last token of round k. */
static int round_end(const so_choice *c, int k, int from) {
    while (from < c->ready_tokens && c->tokens[from].round <= (uint32_t)k)
        from++;
    return from;
}

/* --- parts of a response --- */

static json_t *usage_json(const so_job *j) {
    so_job_totals t = so_job_total(j);
    return json_pack("{s:i, s:i, s:i, s:{s:i}, s:{s:i, s:i}}", "prompt_tokens", t.prompt_tokens,
                     "completion_tokens", t.completion_tokens, "total_tokens",
                     t.prompt_tokens + t.completion_tokens, "prompt_tokens_details",
                     "cached_tokens", t.cached_tokens, "completion_tokens_details",
                     "accepted_prediction_tokens", t.prediction_accepted,
                     "rejected_prediction_tokens", t.prediction_rejected);
}

static json_t *nonce_json(const so_choice *c) { return so_figures_nonce(c->has_nonce, c->nonce); }

static void add_figures(json_t *o, const so_job *j, const so_spec_label *label,
                        const so_request_stats *s) {
    json_object_set_new(o, "seed", json_integer((json_int_t)j->seed));
    json_object_set_new(o, "nonce", nonce_json(&j->choices[0]));
    json_object_set_new(o, "timings", so_figures_timings(s));
    json_object_set_new(o, "spec", so_figures_spec(label, s));
}

static json_t *envelope(const so_format *f, const so_job *j, const char *object) {
    return json_pack("{s:s, s:s, s:I, s:s, s:s}", "id", j->id, "object", object, "created",
                     (json_int_t)j->created_s, "model", f->model, "system_fingerprint",
                     f->fingerprint);
}

void so_format_prompt(const so_format *f, const so_choice *c, so_buf *out) {
    const so_job *j = c->job;
    const so_api_prompt *p = &j->rq.prompts[c->prompt];
    if (!j->rq.echo)
        return;
    if (!p->ids) {
        so_buf_append_str(out, p->text);
        return;
    }
    so_buf text = {0};
    so_tokenizer_decode(f->tok, p->ids, p->n_ids, true, &text);
    so_utf8_repair(so_buf_str(&text), out);
    so_buf_free(&text);
}

/* --- one object --- */

static json_t *choice_json(const so_format *f, so_choice *c) {
    json_t *o = json_pack("{s:i}", "index", c->index);
    if (is_chat(c->job)) {
        json_object_set_new(o, "message",
                            json_pack("{s:s, s:o, s:n}", "role", "assistant", "content",
                                      string_json(&c->text, 0, c->text.len), "refusal"));
    } else {
        so_buf text = {0};
        so_format_prompt(f, c, &text);
        so_buf_append_str(&text, so_buf_str(&c->text));
        json_object_set_new(o, "text", string_json(&text, 0, text.len));
        so_buf_free(&text);
    }
    json_object_set_new(o, "logprobs",
                        so_format_logprobs(f, c, so_job_scores(c->job), 0, c->n_tokens));
    json_object_set_new(o, "finish_reason", json_string(so_finish_name(c->finish)));
    if (c->job->rq.beams.width > 0)
        json_object_set_new(o, "score", json_real(c->score));
    if (c->job->rq.n_prompts > 1) /* otherwise it is only next to "seed" */
        json_object_set_new(o, "nonce", nonce_json(c));
    if (!c->job->rq.rounds)
        return o;
    json_t *rounds = json_array();
    for (int k = 0, from = 0, to; k < c->n_rounds; k++, from = to) {
        to = round_end(c, k, from);
        json_array_append_new(rounds, round_json(f, c, k, from, to));
    }
    json_object_set_new(o, "sooth", json_pack("{s:o}", "rounds", rounds));
    return o;
}

void so_format_answer(const so_format *f, so_job *j, so_buf *out) {
    so_job_totals t = so_job_total(j);
    json_t *o = envelope(f, j, is_chat(j) ? "chat.completion" : "text_completion");
    json_t *choices = json_array();
    for (int i = 0; i < j->n_choices; i++)
        json_array_append_new(choices, choice_json(f, &j->choices[i]));
    json_object_set_new(o, "choices", choices);
    json_object_set_new(o, "usage", usage_json(j));
    add_figures(o, j, &t.label, &t.stats);
    so_format_json(o, out);
    so_buf_append_char(out, '\n');
}

bool so_format_error(const so_job *j, so_api_error *out) {
    if (j->err.status != 0) {
        *out = j->err;
        return true;
    }
    for (int i = 0; i < j->n_choices; i++) {
        const so_choice *c = &j->choices[i];
        if (c->finish == SO_FINISH_ERROR) {
            so_api_fail_err(out, &c->err);
            return true;
        }
        if (c->finish == SO_FINISH_CANCELLED) {
            so_api_fail(out, 499, "cancelled", NULL, "the request was cancelled");
            return true;
        }
    }
    return false;
}

/* --- streams --- */

static void put_value(json_t *v, so_buf *out) {
    json_dump_callback(v, append, out, JSON_ENCODE_ANY | JSON_FLAGS);
    json_decref(v);
}

static void put_member(const char *name, json_t *v, so_buf *out) {
    so_buf_printf(out, ",\"%s\":", name);
    put_value(v, out);
}

/* The envelope, formatted once per job: it is most of the bytes of an event. */
static void put_head(const so_format *f, so_job *j, so_buf *out) {
    if (j->head.len == 0) {
        so_format_json(envelope(f, j, is_chat(j) ? "chat.completion.chunk" : "text_completion"),
                       &j->head);
        j->head.len--; /* drop the closing brace */
    }
    so_buf_append_c(out, "data: ");
    so_buf_append(out, j->head.data, j->head.len);
}

/* An event with one choice; the JSON values are released when it is written. */
typedef struct chunk {
    json_t *text; /* new text; NULL: none */
    json_t *logprobs, *round;
    const char *finish; /* set in the last event of the choice */
} chunk;

static void put_delta(const so_choice *c, json_t *text, so_buf *out) {
    const char *comma = text && !c->began ? "," : "";
    so_buf_printf(out, "\"delta\":{%s%s", c->began ? "" : "\"role\":\"assistant\"", comma);
    if (text) {
        so_buf_append_c(out, "\"content\":");
        put_value(text, out);
    }
    so_buf_append_char(out, '}');
}

static void put_chunk(const so_format *f, so_choice *c, const chunk *k, so_buf *out) {
    so_job *j = c->job;
    put_head(f, j, out);
    so_buf_printf(out, ",\"choices\":[{\"index\":%d,", c->index);
    if (is_chat(j)) {
        put_delta(c, k->text, out);
    } else {
        so_buf_append_c(out, "\"text\":");
        put_value(k->text ? k->text : json_string(""), out);
    }
    put_member("logprobs", k->logprobs ? k->logprobs : json_null(), out);
    put_member("finish_reason", k->finish ? json_string(k->finish) : json_null(), out);
    if (k->finish && j->rq.beams.width > 0)
        put_member("score", json_real(c->score), out);
    so_buf_append_c(out, "}]");
    if (j->rq.include_usage)
        so_buf_append_c(out, ",\"usage\":null");
    if (k->round)
        put_member("sooth", k->round, out);
    if (k->finish) {
        put_member("seed", json_integer((json_int_t)j->seed), out);
        put_member("nonce", nonce_json(c), out);
        put_member("timings", so_figures_timings(&c->stats), out);
        put_member("spec", so_figures_spec(&c->label, &c->stats), out);
    }
    so_buf_append_c(out, "}\n\n");
}

static void begin_choice(const so_format *f, so_choice *c, so_buf *out) {
    so_buf text = {0};
    json_t *logprobs = NULL;
    if (c->job->rq.kind == SO_API_COMPLETION)
        so_format_prompt(f, c, &text);
    if (so_job_scores(c->job))
        logprobs = so_format_logprobs(f, c, true, 0, 0);
    if (is_chat(c->job) || text.len)
        put_chunk(f, c, &(chunk){.text = string_json(&text, 0, text.len), .logprobs = logprobs},
                  out);
    c->began = true;
    so_buf_free(&text);
}

/* Writes the tokens up to `to` and the text that they complete. k: their round; −1: rounds are not
 * shown. */
static void put_tokens(const so_format *f, so_choice *c, int to, int k, so_buf *out) {
    int from = c->tokens_sent;
    size_t end = to > from ? c->tokens[to - 1].text_end : c->text_sent;
    json_t *logprobs =
        c->job->rq.logprobs && to > from ? so_format_logprobs(f, c, false, from, to) : NULL;
    if (end == c->text_sent && !logprobs && k < 0) {
        c->tokens_sent = to; /* their text is still held back: a later token brings it */
        return;
    }
    put_chunk(f, c,
              &(chunk){.text = string_json(&c->text, c->text_sent, end),
                       .logprobs = logprobs,
                       .round = k >= 0 ? round_json(f, c, k, from, to) : NULL},
              out);
    c->tokens_sent = to;
    c->text_sent = end;
}

static void end_choice(const so_format *f, so_choice *c, so_buf *out) {
    if (c->text_sent < c->ready_text) {
        put_chunk(f, c, &(chunk){.text = string_json(&c->text, c->text_sent, c->ready_text)}, out);
        c->text_sent = c->ready_text;
    }
    put_chunk(f, c, &(chunk){.finish = so_finish_name(c->finish)}, out);
    c->ended = true;
}

static void advance(const so_format *f, so_choice *c, so_buf *out) {
    if (so_job_scores(c->job) && !so_choice_scorer(c)->scored)
        return; /* the prompt's logprobs come first and are not known yet */
    if (!c->began)
        begin_choice(f, c, out);
    if (c->job->rq.rounds) {
        for (; c->rounds_sent < c->ready_rounds; c->rounds_sent++) {
            int k = c->rounds_sent;
            put_tokens(f, c, round_end(c, k, c->tokens_sent), k, out);
            free(c->rounds[k]);
            c->rounds[k] = NULL;
        }
    } else if (c->tokens_sent < c->ready_tokens) {
        put_tokens(f, c, c->ready_tokens, -1, out);
    }
    if (c->ready_end && !c->ended)
        end_choice(f, c, out);
}

static void end_stream(const so_format *f, so_job *j, so_buf *out) {
    if (j->rq.include_usage) {
        put_head(f, j, out);
        so_buf_append_c(out, ",\"choices\":[]");
        put_member("usage", usage_json(j), out);
        so_buf_append_c(out, "}\n\n");
    }
    so_buf_append_c(out, "data: [DONE]\n\n");
}

bool so_format_stream(const so_format *f, so_job *j, so_buf *out) {
    so_api_error err;
    if (so_format_error(j, &err)) {
        so_buf_append_c(out, "data: ");
        so_format_json(so_api_error_json(&err), out);
        so_buf_append_c(out, "\n\n");
        return true;
    }
    for (int i = 0; i < j->n_choices; i++)
        if (!j->choices[i].ended)
            advance(f, &j->choices[i], out);
    if (j->state != SO_JOB_DONE)
        return false;
    end_stream(f, j, out);
    return true;
}
