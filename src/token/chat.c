/* Renders conversations with the tokenizer's own template and the variables that transformers
 * passes. The text of a control token becomes its id only where the template wrote it: the same
 * text in a message, a tool or another variable is encoded as ordinary text, so a user cannot forge
 * a turn.
 *
 * There is no default format: a tokenizer without a template is an error. A so_chat is immutable
 * and borrows its tokenizer; any thread may render and encode. */
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

/* Sets a variable to the text of a special token; a model without it leaves it undefined. */
static void set_token(json_t *vars, const char *name, const so_tokenizer *t, int32_t id) {
    if (id == SO_TOKEN_NONE)
        return;
    so_str piece = so_tokenizer_piece(t, id);
    json_t *s = json_stringn(piece.ptr, piece.len);
    if (s)
        json_object_set_new(vars, name, s);
}

/* The variables that are not the caller's data. */
static json_t *own_variables(const so_chat *c, bool add_generation_prompt) {
    json_t *vars = json_object();
    json_object_set_new(vars, "tools", json_null());
    json_object_set_new(vars, "documents", json_null());
    set_token(vars, "bos_token", c->tok, so_tokenizer_bos(c->tok));
    set_token(vars, "eos_token", c->tok, so_tokenizer_eos(c->tok));
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

static int render(const so_chat *c, const json_t *messages, const json_t *extra,
                  bool add_generation_prompt, so_buf *out, so_buf *from_data, so_err *err) {
    int rc = check_messages(messages, extra, err);
    if (rc)
        return rc;
    json_t *vars = own_variables(c, add_generation_prompt);
    json_t *data = extra ? json_copy((json_t *)extra) : json_object();
    json_object_set(data, "messages", (json_t *)messages);
    json_object_del(data, "add_generation_prompt");
    rc = so_template_render_traced(c->tmpl, vars, data, 0, out, from_data, err);
    json_decref(vars);
    json_decref(data);
    return rc;
}

int so_chat_render(const so_chat *c, const json_t *messages, const json_t *extra,
                   bool add_generation_prompt, so_buf *out, so_err *err) {
    return render(c, messages, extra, add_generation_prompt, out, NULL, err);
}

static bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

/* Cuts the text after the last message, found by its content without surrounding space, which
 * templates may trim. The content's trailing space is kept if the template kept it. */
static int cut_after_last(const json_t *messages, so_buf *text, so_err *err) {
    const json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    const json_t *content = json_object_get(last, "content");
    const char *p = json_string_value(content), *at = NULL;
    size_t n = json_string_length(content), n_trail = 0;
    while (n > 0 && is_space(*p)) {
        p++;
        n--;
    }
    while (n > n_trail && is_space(p[n - 1 - n_trail]))
        n_trail++;
    n -= n_trail;
    if (n == 0)
        return so_err_set(err, SO_EINVAL, "the last message has no text to continue");
    for (size_t i = text->len >= n ? text->len - n + 1 : 0; i-- > 0 && !at;)
        if (memcmp(text->data + i, p, n) == 0)
            at = text->data + i;
    if (!at)
        return so_err_set(err, SO_EINVAL,
                          "the chat template changes the text of the last message, so it cannot "
                          "be continued");
    size_t end = (size_t)(at - text->data) + n;
    if (text->len - end >= n_trail && memcmp(text->data + end, p + n, n_trail) == 0)
        end += n_trail;
    text->len = end;
    return 0;
}

/* Adds BOS in front if the model requires one and the template wrote none. Not done by
 * SO_ENCODE_ADD_SPECIAL, which would also append EOS for models that add one. */
int so_chat_encode_to(const so_chat *c, const json_t *messages, const json_t *extra,
                      so_chat_end end, so_tokens *out, so_err *err) {
    so_buf text = {0}, from_data = {0};
    int rc = render(c, messages, extra, end == SO_CHAT_ASK, &text, &from_data, err);
    if (rc == 0 && end == SO_CHAT_CONTINUE)
        rc = cut_after_last(messages, &text, err);
    if (rc == 0) {
        int32_t bos = so_tokenizer_bos(c->tok);
        size_t before = out->len;
        so_str piece = so_tokenizer_piece(c->tok, bos);
        bool has_bos =
            bos == SO_TOKEN_NONE || (so_str_starts(so_buf_str(&text), piece) &&
                                     !memchr(from_data.data, 1, SO_MIN(piece.len, from_data.len)));
        if (!has_bos && so_tokenizer_adds_bos(c->tok))
            so_tokens_push(out, bos);
        rc = so_tokenizer_encode_traced(c->tok, so_buf_str(&text), (const uint8_t *)from_data.data,
                                        out, err);
        if (rc)
            out->len = before;
    }
    so_buf_free(&text);
    so_buf_free(&from_data);
    return rc;
}

int so_chat_encode(const so_chat *c, const json_t *messages, const json_t *extra, so_tokens *out,
                   so_err *err) {
    return so_chat_encode_to(c, messages, extra, SO_CHAT_ASK, out, err);
}
