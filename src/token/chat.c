/* Conversations to prompts: the tokenizer's own template with the variables that transformers
 * passes.
 *
 * A chat is immutable and borrows its tokenizer; render and encode may run on any thread. Nothing
 * is guessed: a tokenizer without a template is an error that says so, never a default format. */
#include "token/chat.h"

#include <stdlib.h>

#include "base/mem.h"

struct so_chat {
    const so_tokenizer *tok;
    so_template *tmpl;
};

int so_chat_create(const so_tokenizer *t, so_chat **out, so_err *err) {
    so_str source = so_tokenizer_chat_template(t);
    so_template *tmpl = NULL;
    if (!source.len)
        return so_err_set(err, SO_ENOTFOUND,
                          "the model carries no chat template; use --raw to prompt it as it is");
    int rc = so_template_compile(source, &tmpl, err);
    if (rc)
        return rc;
    *out = SO_NEW(so_chat);
    **out = (so_chat){t, tmpl};
    return 0;
}

void so_chat_free(so_chat *c) {
    if (!c)
        return;
    so_template_free(c->tmpl);
    free(c);
}

/* A special token's text; a model without it leaves the variable undefined. */
static void set_token(json_t *vars, const char *name, const so_tokenizer *t, int32_t id) {
    if (id == SO_TOKEN_NONE)
        return;
    so_str piece = so_tokenizer_piece(t, id);
    json_t *s = json_stringn(piece.ptr, piece.len);
    if (s)
        json_object_set_new(vars, name, s);
}

static json_t *variables(const so_chat *c, const json_t *messages, const json_t *extra,
                         bool add_generation_prompt) {
    json_t *vars = json_object();
    json_object_set_new(vars, "tools", json_null());
    json_object_set_new(vars, "documents", json_null());
    set_token(vars, "bos_token", c->tok, so_tokenizer_bos(c->tok));
    set_token(vars, "eos_token", c->tok, so_tokenizer_eos(c->tok));
    if (extra)
        json_object_update(vars, (json_t *)extra);
    json_object_set(vars, "messages", (json_t *)messages);
    json_object_set_new(vars, "add_generation_prompt", json_boolean(add_generation_prompt));
    return vars;
}

static int check_messages(const json_t *messages, const json_t *extra, so_err *err) {
    if (!json_is_array(messages))
        return so_err_set(err, SO_EINVAL, "messages must be an array");
    for (size_t i = 0; i < json_array_size(messages); i++) {
        const json_t *m = json_array_get(messages, i);
        if (!json_is_object(m))
            return so_err_set(err, SO_EINVAL, "messages[%zu] must be an object", i);
        if (!json_is_string(json_object_get(m, "role")))
            return so_err_set(err, SO_EINVAL, "messages[%zu] needs a string \"role\"", i);
    }
    if (extra && !json_is_object(extra))
        return so_err_set(err, SO_EINVAL, "template variables must be an object");
    return 0;
}

int so_chat_render(const so_chat *c, const json_t *messages, const json_t *extra,
                   bool add_generation_prompt, so_buf *out, so_err *err) {
    int rc = check_messages(messages, extra, err);
    if (rc)
        return rc;
    json_t *vars = variables(c, messages, extra, add_generation_prompt);
    rc = so_template_render(c->tmpl, vars, 0, out, err);
    json_decref(vars);
    return rc;
}

/* BOS goes in front where the model wants one and the template wrote none. It is put there by hand:
 * SO_ENCODE_ADD_SPECIAL would also put an EOS behind the prompt of models that add one. */
int so_chat_encode(const so_chat *c, const json_t *messages, const json_t *extra, so_tokens *out,
                   so_err *err) {
    so_buf text = {0};
    int rc = so_chat_render(c, messages, extra, true, &text, err);
    if (rc == 0) {
        int32_t bos = so_tokenizer_bos(c->tok);
        size_t before = out->len;
        bool has_bos = bos == SO_TOKEN_NONE ||
                       so_str_starts(so_buf_str(&text), so_tokenizer_piece(c->tok, bos));
        if (!has_bos && so_tokenizer_adds_bos(c->tok))
            so_tokens_push(out, bos);
        rc = so_tokenizer_encode(c->tok, so_buf_str(&text), SO_ENCODE_PARSE_SPECIAL, out, err);
        if (rc)
            out->len = before;
    }
    so_buf_free(&text);
    return rc;
}
