/* Logprobs in the API's two forms: a list of objects for chat, and parallel lists for
 * /v1/completions, where with `echo` the prompt's tokens come first.
 *
 * Offsets count characters of the text as shown, prompt included. The first token of a prompt has
 * no logprob (null), since nothing precedes it. The values depend only on the logits rows, so the
 * lists of a stream, concatenated, equal those of the whole response. HTTP thread, under the job's
 * lock or once the job is done. */
#include "base/mem.h"
#include "server/format.h"
#include "token/utf8.h"

typedef struct lists {
    const so_format *f;
    int n_top, n_each;
    size_t chars; /* of text before the next token */
    json_t *tokens, *values, *tops, *offsets;
} lists;

static size_t count_chars(const char *p, size_t n) {
    size_t chars = 0;
    for (size_t i = 0; i < n; i++)
        chars += ((unsigned char)p[i] & 0xC0) != 0x80;
    return chars;
}

/* Tokens that are incomplete characters all have the text U+FFFD: only the likeliest is shown. */
static void add_top(const so_format *f, const so_logprob *p, json_t *top) {
    json_t *name = so_format_token(f, p->token);
    const char *text = json_string_value(name);
    if (!json_object_getn(top, text, json_string_length(name)))
        json_object_setn_new(top, text, json_string_length(name), json_real((double)p->logprob));
    json_decref(name);
}

/* Adds a token and its alternatives; if the token is not one of them, it is added to them. p NULL:
 * the token has no logprobs. */
static void add_token(lists *l, int32_t token, const so_logprob *p) {
    json_t *top = p ? json_object() : json_null();
    for (int k = 1; p && k <= l->n_top && k < l->n_each; k++)
        add_top(l->f, &p[k], top);
    if (p && l->n_top > 0)
        add_top(l->f, p, top);
    json_array_append_new(l->tokens, so_format_token(l->f, token));
    json_array_append_new(l->values, p ? json_real((double)p->logprob) : json_null());
    json_array_append_new(l->tops, top);
    json_array_append_new(l->offsets, json_integer((json_int_t)l->chars));
}

/* Whether token i of the prompt is part of the echoed text. A BOS that the tokenizer added in front
 * of a text prompt is not. */
static bool is_shown(const lists *l, const so_choice *c, size_t i) {
    const so_job *j = c->job;
    return i > 0 || j->rq.prompts[c->prompt].ids || !j->rq.add_special ||
           !so_tokenizer_adds_bos(l->f->tok) ||
           j->prompts[c->prompt].ids[0] != so_tokenizer_bos(l->f->tok);
}

static void add_prompt(lists *l, so_choice *c) {
    const so_tokens *t = &c->job->prompts[c->prompt];
    const so_logprob *scores = so_choice_scorer(c)->scores;
    so_detok detok = {.t = l->f->tok, .special = true};
    so_buf text = {0}, shown = {0};
    so_format_prompt(l->f, c, &shown);
    c->echo_chars = count_chars(shown.data, shown.len);
    for (size_t i = 0; i < t->len; i++) {
        add_token(l, t->ids[i], i ? scores + (i - 1) * (size_t)l->n_each : NULL);
        so_buf_clear(&text);
        if (is_shown(l, c, i))
            so_detok_push(&detok, t->ids[i], &text);
        l->chars += count_chars(text.data, text.len);
        l->chars = SO_MIN(l->chars, c->echo_chars);
    }
    so_buf_free(&text);
    so_buf_free(&shown);
}

static void add_answer(lists *l, const so_choice *c, int from, int to) {
    size_t at = from > 0 ? c->tokens[from - 1].text_end : 0;
    l->chars = c->echo_chars + count_chars(c->text.data, at);
    for (int i = from; i < to; i++) {
        const so_logprob *p = c->logprobs + (size_t)i * (size_t)c->n_each;
        add_token(l, p->token, p);
        l->chars += count_chars(c->text.data + at, c->tokens[i].text_end - at);
        at = c->tokens[i].text_end;
    }
}

static json_t *plain(const so_format *f, so_choice *c, bool prompt, int from, int to) {
    lists l = {.f = f,
               .n_top = c->job->rq.n_top,
               .n_each = c->n_each,
               .tokens = json_array(),
               .values = json_array(),
               .tops = json_array(),
               .offsets = json_array()};
    if (prompt)
        add_prompt(&l, c);
    add_answer(&l, c, from, to);
    return json_pack("{s:o, s:o, s:o, s:o}", "tokens", l.tokens, "token_logprobs", l.values,
                     "top_logprobs", l.tops, "text_offset", l.offsets);
}

static json_t *chat(const so_format *f, const so_choice *c, int from, int to) {
    json_t *list = json_array();
    int n_each = SO_MIN(1 + c->job->rq.n_top, c->n_each);
    for (int i = from; i < to; i++)
        json_array_append_new(
            list, so_figures_logprobs(f->tok, c->logprobs + (size_t)i * (size_t)c->n_each, n_each));
    return json_pack("{s:o, s:n}", "content", list, "refusal");
}

json_t *so_format_logprobs(const so_format *f, so_choice *c, bool prompt, int from, int to) {
    if (!c->job->rq.logprobs)
        return json_null();
    return c->job->rq.kind == SO_API_CHAT ? chat(f, c, from, to) : plain(f, c, prompt, from, to);
}
