/* Parses request bodies: a table of fields, with a reader function for each kind of value.
 *
 * Bodies are untrusted. A body must be one JSON object. Every known field is checked for type and
 * range, and the error names it. null counts as absent: many clients send it for fields that are
 * not set. A field that would change the answer and cannot be honoured is refused (api_refused.c);
 * an unknown field is ignored and listed. Lists have a maximum length. The JSON library limits
 * nesting to 2048 levels; of duplicate names the last one counts.
 *
 * Pure functions: no models, no clock, no globals. Any thread. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "server/api.h"
#include "token/utf8.h"

enum { BOTH = SO_API_COMPLETION | SO_API_CHAT, MAX_IGNORED = 400, NOT_GIVEN = INT32_MIN };

typedef struct parser {
    so_api_request *r;
    so_api_error *err;
    int max_tokens, max_completion_tokens; /* or NOT_GIVEN */
    int add_prompt;                        /* add_generation_prompt, or NOT_GIVEN */
    int n_logprobs;                        /* completions; −1: not given */
    bool stream_options, continues;
} parser;

typedef struct field field;
typedef bool reader(parser *p, const field *f, const json_t *v);

struct field {
    const char *name;
    int kinds; /* so_api_kind bits */
    reader *read;
    void *(*at)(parser *p); /* where a number, boolean or string is stored; else NULL */
    double min, max;        /* range of a number; for a list, max is the maximum of its length */
};

/* --- error messages --- */

static const char *describe(const json_t *v, char out[64]) {
    switch (json_typeof(v)) {
    case JSON_OBJECT:
        return json_object_size(v) ? "an object" : "an empty object";
    case JSON_ARRAY:
        return json_array_size(v) ? "an array" : "an empty array";
    case JSON_STRING:
        snprintf(out, 64, "the string '%.40s'", json_string_value(v));
        return out;
    case JSON_INTEGER:
        snprintf(out, 64, "%lld", (long long)json_integer_value(v));
        return out;
    case JSON_REAL:
        snprintf(out, 64, "%g", json_real_value(v));
        return out;
    case JSON_TRUE:
        return "true";
    case JSON_FALSE:
        return "false";
    default:
        return "null";
    }
}

static bool bad(parser *p, const char *name, const json_t *v, const char *must) {
    char text[64];
    return so_api_fail(p->err, 400, "invalid_value", name, "'%s' must be %s, but is %s", name, must,
                       describe(v, text));
}

/* --- numbers, booleans, strings --- */

static bool read_float(parser *p, const field *f, const json_t *v) {
    char must[64];
    double x = json_number_value(v);
    if (!json_is_number(v) || !(x >= f->min && x <= f->max)) {
        snprintf(must, sizeof must, "a number from %g to %g", f->min, f->max);
        return bad(p, f->name, v, must);
    }
    *(float *)f->at(p) = (float)x;
    return true;
}

/* Some clients write 5.0 for 5. A real without a fraction counts as whole up to 2^53, above which
 * doubles skip integers. */
static bool take_whole(const json_t *v, int64_t *out) {
    const double most = 9007199254740992.0; /* 2^53 */
    double real = json_number_value(v);
    bool whole = json_is_integer(v) ||
                 (json_is_real(v) && real == floor(real) && real >= -most && real <= most);
    if (whole)
        *out = json_is_integer(v) ? json_integer_value(v) : (int64_t)real;
    return whole;
}

static bool read_int(parser *p, const field *f, const json_t *v) {
    char must[64];
    int64_t x;
    if (!take_whole(v, &x) || (double)x < f->min || (double)x > f->max) {
        snprintf(must, sizeof must, "a whole number from %.0f to %.0f", f->min, f->max);
        return bad(p, f->name, v, must);
    }
    *(int *)f->at(p) = (int)x;
    return true;
}

static bool read_bool(parser *p, const field *f, const json_t *v) {
    if (!json_is_boolean(v))
        return bad(p, f->name, v, "true or false");
    *(bool *)f->at(p) = json_is_true(v);
    return true;
}

/* A string that is used as a C string: without zero bytes. */
static bool take_name(parser *p, const char *name, const json_t *v, const char **out) {
    const char *s = json_string_value(v);
    if (!s || strlen(s) != json_string_length(v))
        return bad(p, name, v, "a string");
    *out = s;
    return true;
}

static bool read_name(parser *p, const field *f, const json_t *v) {
    return take_name(p, f->name, v, f->at(p));
}

static bool read_seed(parser *p, const field *f, const json_t *v) {
    int64_t seed;
    if (!take_whole(v, &seed))
        return bad(p, f->name, v, "a whole number (-1: a random one)");
    p->r->has_seed = seed != -1;
    p->r->sample.seed = (uint64_t)seed;
    return true;
}

/* A nonce has 53 bits, as in responses. It is a number, or its decimal digits in a string. */
static bool read_nonce(parser *p, const field *f, const json_t *v) {
    int64_t nonce = -1;
    const char *s = json_string_value(v);
    if (s && *s && strlen(s) <= 16 && strspn(s, "0123456789") == json_string_length(v))
        nonce = strtoll(s, NULL, 10);
    if ((!s && !take_whole(v, &nonce)) || nonce < 0 || nonce >= (int64_t)1 << 53)
        return bad(p, f->name, v,
                   "a whole number from 0 to 9007199254740991, as an answer reports it (leave it "
                   "out for a new one)");
    p->r->has_nonce = true;
    p->r->nonce = (uint64_t)nonce;
    return true;
}

static bool read_nothing(parser *p, const field *f, const json_t *v) {
    (void)p;
    (void)f;
    (void)v;
    return true;
}

/* --- values that are refused --- */

static bool refuse(parser *p, const field *f, const json_t *v) {
    return so_api_is_empty(v) || so_api_refuse(p->err, f->name, "");
}

static bool is_string(const json_t *v, const char *word) {
    return json_is_string(v) &&
           so_str_eq_c((so_str){json_string_value(v), json_string_length(v)}, word);
}

static bool read_tool_choice(parser *p, const field *f, const json_t *v) {
    return is_string(v, "none") || is_string(v, "auto") || refuse(p, f, v);
}

static bool read_response_format(parser *p, const field *f, const json_t *v) {
    const json_t *type = json_object_get(v, "type");
    if (!json_is_object(v) || !json_is_string(type))
        return bad(p, f->name, v, "an object with a \"type\"");
    if (is_string(type, "text"))
        return true;
    return so_api_fail(p->err, 400, "unsupported_parameter", "response_format.type",
                       "'response_format' of type '%.40s' is not supported by this server: use "
                       "'text'",
                       json_string_value(type));
}

static bool read_modalities(parser *p, const field *f, const json_t *v) {
    for (size_t i = 0; i < json_array_size(v); i++)
        if (!is_string(json_array_get(v, i), "text"))
            return so_api_fail(p->err, 400, "unsupported_parameter", f->name,
                               "'modalities': only \"text\" is supported by this server");
    return json_is_array(v) || bad(p, f->name, v, "an array");
}

/* --- lists and objects --- */

/* Adds the name of an unknown field to `ignored`, after that of its parent. The list becomes a
 * header, so characters that are not letters, digits, '_', '-' or '.' are replaced by '?'. */
static void note_ignored(parser *p, const char *parent, const char *name) {
    so_buf *b = &p->r->ignored;
    if (b->len > MAX_IGNORED)
        return;
    if (b->len)
        so_buf_append_c(b, ", ");
    if (parent)
        so_buf_printf(b, "%s.", parent);
    if (!*name)
        so_buf_append_char(b, '?');
    for (int i = 0; name[i] && i < 40; i++) {
        char c = name[i];
        bool plain = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                     c == '_' || c == '-' || c == '.';
        so_buf_append_char(b, plain ? c : '?');
    }
}

/* Reads the members of an object by the table. For a nested object, `parent` is its name, and the
 * names in its table begin with it: "speculative.length". */
static bool read_members(parser *p, const field *table, size_t n, const char *parent,
                         const json_t *object) {
    const char *name;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)object, name, v) {
        const field *f = NULL;
        for (size_t i = 0; i < n && !f; i++)
            if (strcmp(table[i].name + (parent ? strlen(parent) + 1 : 0), name) == 0 &&
                (table[i].kinds & (int)p->r->kind))
                f = &table[i];
        bool neutral = false; /* a parameter of api_refused.c, with a value that is accepted */
        if (!f && !parent && !so_api_check_refused(name, v, &neutral, p->err))
            return false;
        if (!f && !neutral)
            note_ignored(p, parent, name);
        else if (f && !json_is_null(v) && !f->read(p, f, v))
            return false;
    }
    return true;
}

/* A string or a list of strings, none of them empty. */
static bool read_strings(parser *p, const field *f, const json_t *v, so_str **out, int *n_out) {
    bool one = json_is_string(v);
    size_t n = one ? 1 : json_array_size(v), most = (size_t)f->max;
    if (!one && !json_is_array(v))
        return bad(p, f->name, v, "a string or an array of strings");
    if (n > most)
        return so_api_fail(p->err, 400, "invalid_value", f->name,
                           "'%s' has %zu strings: at most %zu are allowed", f->name, n, most);
    free(*out);
    *out = SO_NEW_N(so_str, n);
    *n_out = 0;
    for (size_t i = 0; i < n; i++) {
        const json_t *s = one ? v : json_array_get(v, i);
        if (!json_is_string(s) || json_string_length(s) == 0)
            return bad(p, f->name, s, "a string, or an array of strings, none of them empty");
        (*out)[(*n_out)++] = (so_str){json_string_value(s), json_string_length(s)};
    }
    return true;
}

static bool read_stop(parser *p, const field *f, const json_t *v) {
    return read_strings(p, f, v, &p->r->stops, &p->r->n_stops);
}

static bool read_bad_words(parser *p, const field *f, const json_t *v) {
    return read_strings(p, f, v, &p->r->bad_words, &p->r->n_bad_words);
}

static bool read_bias(parser *p, const field *f, const json_t *v) {
    const char *key;
    json_t *bias;
    if (!json_is_object(v))
        return bad(p, f->name, v, "an object of token ids and biases");
    so_bias *list = SO_NEW_N(so_bias, json_object_size(v));
    int n = 0;
    free((void *)(uintptr_t)p->r->sample.bias);
    p->r->sample.bias = list;
    json_object_foreach((json_t *)(uintptr_t)v, key, bias) {
        char *end;
        long id = strtol(key, &end, 10);
        double x = json_number_value(bias);
        if (*key < '0' || *key > '9' || *end || id > INT32_MAX)
            return so_api_fail(p->err, 400, "invalid_value", f->name,
                               "'logit_bias': '%.40s' is not a token id", key);
        if (!json_is_number(bias) || !(x >= -1000 && x <= 1000))
            return so_api_fail(p->err, 400, "invalid_value", f->name,
                               "'logit_bias' of token %ld must be a number from -1000 to 1000", id);
        list[n++] = (so_bias){(int32_t)id, (float)x};
    }
    p->r->sample.n_bias = n;
    return true;
}

static bool read_logprobs(parser *p, const field *f, const json_t *v) {
    if (p->r->kind == SO_API_CHAT) {
        if (!json_is_boolean(v))
            return bad(p, f->name, v, "true or false");
        p->r->logprobs = json_is_true(v);
        return true;
    }
    if (json_is_boolean(v)) { /* as in chat */
        p->n_logprobs = json_is_true(v) ? 0 : -1;
        return true;
    }
    return read_int(p, f, v);
}

/* The text of a content part {"type": "text", "text"}; NULL: refused. */
static const json_t *take_part(parser *p, const char *at, const json_t *part) {
    const json_t *type = json_object_get(part, "type"), *s = json_object_get(part, "text");
    const char *key;
    json_t *v;
    if (json_is_string(type) && !is_string(type, "text")) {
        so_api_fail(p->err, 400, "unsupported_parameter", at,
                    "'%s' is of type '%.40s': this server supports only text", at,
                    json_string_value(type));
        return NULL;
    }
    if (!json_is_string(s) || (type && !json_is_string(type))) {
        so_api_fail(p->err, 400, "invalid_value", at,
                    "'%s' must be {\"type\": \"text\", \"text\": a string}", at);
        return NULL;
    }
    json_object_foreach((json_t *)(uintptr_t)part, key, v) {
        if (v != type && v != s && !json_is_null(v))
            note_ignored(p, at, key);
    }
    return s;
}

/* A string, or the texts of an array of parts, joined by line breaks; a new reference. */
static json_t *join_parts(parser *p, const char *name, const json_t *v) {
    char at[96];
    if (json_is_string(v))
        return json_incref((json_t *)(uintptr_t)v);
    if (!json_is_array(v)) {
        bad(p, name, v, "a string or an array of parts");
        return NULL;
    }
    so_buf text = {0};
    bool ok = true;
    for (size_t i = 0; i < json_array_size(v) && ok; i++) {
        snprintf(at, sizeof at, "%.60s[%zu]", name, i);
        const json_t *s = take_part(p, at, json_array_get(v, i));
        ok = s != NULL;
        if (ok && i > 0)
            so_buf_append_char(&text, '\n');
        if (ok)
            so_buf_append(&text, json_string_value(s), json_string_length(s));
    }
    json_t *joined = ok ? json_stringn(so_buf_str(&text).ptr, text.len) : NULL;
    so_buf_free(&text);
    return joined;
}

/* --- messages and prompts --- */

/* Checks the members of a message other than role and content. A message from a response of this
 * server may be sent back unchanged: its further members are null, empty or ignored. */
static bool read_message_extras(parser *p, const char *at, const json_t *m) {
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)m, key, v) {
        bool call = strcmp(key, "tool_calls") == 0 || strcmp(key, "function_call") == 0;
        bool known = strcmp(key, "role") == 0 || strcmp(key, "content") == 0;
        if (json_is_null(v) || known || (call && so_api_is_empty(v)))
            continue;
        if (call)
            return so_api_fail(p->err, 400, "unsupported_parameter", at,
                               "'%s.%s' is not supported by this server", at, key);
        if (strcmp(key, "name") != 0)
            note_ignored(p, at, key);
        else if (!json_is_string(v))
            return so_api_fail(p->err, 400, "invalid_value", at, "'%s.name' must be a string", at);
    }
    return true;
}

/* system, user or assistant; `developer` is an alias of system. NULL: refused. */
static const char *take_role(parser *p, const char *at, const json_t *m) {
    static const char *const roles[] = {"system", "user", "assistant"};
    const json_t *role = json_object_get(m, "role");
    if (!json_is_string(role)) {
        so_api_fail(p->err, 400, "invalid_value", at, "'%s' needs a string \"role\"", at);
        return NULL;
    }
    for (size_t i = 0; i < SO_LEN(roles); i++)
        if (is_string(role, roles[i]))
            return roles[i];
    if (is_string(role, "developer"))
        return "system";
    so_api_fail(p->err, 400, "unsupported_value", at,
                "'%s.role' is '%.40s': must be system, developer, user or assistant", at,
                json_string_value(role));
    return NULL;
}

/* Appends a message in the form that templates expect: the content is one string. */
static bool read_message(parser *p, size_t i, const json_t *m) {
    char at[48];
    snprintf(at, sizeof at, "messages[%zu]", i);
    if (!json_is_object(m))
        return bad(p, at, m, "an object with \"role\" and \"content\"");
    const json_t *content = json_object_get(m, "content"), *name = json_object_get(m, "name");
    const char *who = take_role(p, at, m);
    if (!who || !read_message_extras(p, at, m))
        return false;
    snprintf(at, sizeof at, "messages[%zu].content", i);
    if (!content || json_is_null(content))
        return so_api_fail(p->err, 400, "invalid_value", at,
                           "'%s' must be a string or an array of text parts", at);
    json_t *text = join_parts(p, at, content);
    if (!text)
        return false;
    json_t *out = json_pack("{s:s, s:o}", "role", who, "content", text);
    if (json_is_string(name))
        json_object_set(out, "name", (json_t *)(uintptr_t)name);
    json_array_append_new(p->r->messages, out);
    return true;
}

static bool read_messages(parser *p, const field *f, const json_t *v) {
    size_t n = json_array_size(v);
    if (!json_is_array(v) || n == 0)
        return bad(p, f->name, v, "an array of at least one message");
    if (n > SO_API_MAX_MESSAGES)
        return so_api_fail(p->err, 400, "invalid_value", f->name,
                           "'messages' has %zu items: at most %d are allowed", n,
                           SO_API_MAX_MESSAGES);
    json_decref(p->r->messages);
    p->r->messages = json_array();
    for (size_t i = 0; i < n; i++)
        if (!read_message(p, i, json_array_get(v, i)))
            return false;
    return true;
}

static bool read_kwargs(parser *p, const field *f, const json_t *v) {
    if (!json_is_object(v))
        return bad(p, f->name, v, "an object of template variables");
    if (json_object_get(v, "messages") || json_object_get(v, "add_generation_prompt"))
        return so_api_fail(p->err, 400, "unsupported_value", f->name,
                           "'chat_template_kwargs' must not set messages or "
                           "add_generation_prompt: they are fields of their own");
    p->r->kwargs = v;
    return true;
}

static bool read_ids(parser *p, const char *name, const json_t *v, int32_t **out, size_t *n) {
    *n = json_array_size(v);
    *out = SO_NEW_N(int32_t, *n);
    for (size_t i = 0; i < *n; i++) {
        int64_t id;
        if (!take_whole(json_array_get(v, i), &id) || id < 0 || id > INT32_MAX) {
            free(*out);
            *out = NULL;
            return bad(p, name, json_array_get(v, i), "a list of token ids, whole numbers from 0");
        }
        (*out)[i] = (int32_t)id;
    }
    return true;
}

static bool read_stop_ids(parser *p, const field *f, const json_t *v) {
    if (!json_is_array(v) || json_array_size(v) > SO_REQUEST_MAX_STOPS)
        return so_api_fail(p->err, 400, "invalid_value", f->name,
                           "'%s' must be an array of at most %d token ids", f->name,
                           SO_REQUEST_MAX_STOPS);
    free(p->r->stop_tokens);
    p->r->n_stop_tokens = 0;
    return read_ids(p, f->name, v, &p->r->stop_tokens, &p->r->n_stop_tokens);
}

static bool read_one_prompt(parser *p, const field *f, const json_t *v) {
    so_api_prompt *to = &p->r->prompts[p->r->n_prompts];
    if (json_is_string(v))
        to->text = (so_str){json_string_value(v), json_string_length(v)};
    else if (!json_is_array(v))
        return bad(p, f->name, v, "a string, an array of strings or of token ids");
    else if (!read_ids(p, f->name, v, &to->ids, &to->n_ids))
        return false;
    p->r->n_prompts++;
    return true;
}

static void free_prompts(so_api_request *r) {
    for (int i = 0; r->prompts && i < r->n_prompts; i++)
        free(r->prompts[i].ids);
    free(r->prompts);
    r->prompts = NULL;
    r->n_prompts = 0;
}

/* "text", ["text", …], [1, 2, …] or [[1, 2], …]. */
static bool read_prompt(parser *p, const field *f, const json_t *v) {
    const json_t *first = json_array_get(v, 0);
    bool many = json_is_array(v) && (json_is_string(first) || json_is_array(first));
    size_t n = many ? json_array_size(v) : 1;
    if (json_is_array(v) && json_array_size(v) == 0)
        return bad(p, f->name, v, "a string, an array of strings or of token ids");
    if (n > SO_API_MAX_CHOICES)
        return so_api_fail(p->err, 400, "invalid_value", f->name,
                           "'prompt' has %zu prompts: at most %d are allowed", n,
                           SO_API_MAX_CHOICES);
    free_prompts(p->r);
    p->r->prompts = SO_NEW_N(so_api_prompt, n);
    for (size_t i = 0; i < n; i++)
        if (!read_one_prompt(p, f, many ? json_array_get(v, i) : v))
            return false;
    return true;
}

/* --- prediction and speculation --- */

static bool read_prediction(parser *p, const field *f, const json_t *v) {
    const json_t *type = json_object_get(v, "type"), *content = json_object_get(v, "content");
    if (!json_is_object(v) || !is_string(type, "content") || !content)
        return bad(p, f->name, v, "{\"type\": \"content\", \"content\": the text you expect}");
    json_t *text = join_parts(p, "prediction.content", content);
    if (!text)
        return false;
    /* The root keeps the string alive. */
    json_object_set_new((json_t *)(uintptr_t)v, "content", text);
    p->r->prediction = (so_str){json_string_value(text), json_string_length(text)};
    return true;
}

static bool read_verify(parser *p, const field *f, const json_t *v) {
    so_api_spec *s = &p->r->spec;
    const char *text = json_string_value(v);
    s->has_verify = true;
    if (!text || json_string_length(v) != strlen(text) ||
        !so_verify_mode_parse(text, &s->verify, &s->lenience) ||
        !(s->lenience > 0 && s->lenience <= 1))
        return bad(p, f->name, v,
                   "match, reject, lenient=L or typical=E with a number above 0 and at most 1");
    return true;
}

static bool read_enabled(parser *p, const field *f, const json_t *v) {
    if (!json_is_boolean(v))
        return bad(p, f->name, v, "true or false");
    p->r->spec.enabled = json_is_true(v);
    return true;
}

static void *at_drafter(parser *p) { return &p->r->spec.drafter; }
static void *at_length(parser *p) { return &p->r->spec.length; }
static void *at_draft_max(parser *p) { return &p->r->spec.draft_max; }
static void *at_draft_min(parser *p) { return &p->r->spec.draft_min; }

static bool read_speculative(parser *p, const field *f, const json_t *v) {
    static const field table[] = {
        {"speculative.enabled", BOTH, read_enabled, NULL, 0, 0},
        {"speculative.drafter", BOTH, read_name, at_drafter, 0, 0},
        {"speculative.length", BOTH, read_int, at_length, 0, SO_MAX_DRAFT},
        {"speculative.draft_max", BOTH, read_int, at_draft_max, 0, SO_MAX_DRAFT},
        {"speculative.draft_min", BOTH, read_int, at_draft_min, 0, SO_MAX_DRAFT},
        {"speculative.verify", BOTH, read_verify, NULL, 0, 0},
    };
    if (json_is_boolean(v)) {
        p->r->spec.enabled = json_is_true(v);
        return true;
    }
    if (!json_is_object(v))
        return bad(p, f->name, v, "an object, true or false");
    return read_members(p, table, SO_LEN(table), "speculative", v);
}

static void *at_include_usage(parser *p) { return &p->r->include_usage; }

static bool read_stream_options(parser *p, const field *f, const json_t *v) {
    static const field table[] = {
        {"stream_options.include_usage", BOTH, read_bool, at_include_usage, 0, 0},
        {"stream_options.include_obfuscation", BOTH, read_nothing, NULL, 0, 0},
    };
    if (!json_is_object(v))
        return bad(p, f->name, v, "an object");
    p->stream_options = true;
    return read_members(p, table, SO_LEN(table), "stream_options", v);
}

static void *at_rounds(parser *p) { return &p->r->rounds; }

static bool read_sooth(parser *p, const field *f, const json_t *v) {
    static const field table[] = {{"sooth.rounds", BOTH, read_bool, at_rounds, 0, 0}};
    if (!json_is_object(v))
        return bad(p, f->name, v, "an object");
    return read_members(p, table, SO_LEN(table), "sooth", v);
}

/* --- the table of fields --- */

static void *at_model(parser *p) { return &p->r->model; }
static void *at_max_tokens(parser *p) { return &p->max_tokens; }
static void *at_max_completion(parser *p) { return &p->max_completion_tokens; }
static void *at_temp(parser *p) { return &p->r->sample.temp; }
static void *at_top_p(parser *p) { return &p->r->sample.top_p; }
static void *at_top_k(parser *p) { return &p->r->sample.top_k; }
static void *at_min_p(parser *p) { return &p->r->sample.min_p; }
static void *at_repeat(parser *p) { return &p->r->sample.repeat_penalty; }
static void *at_repeat_last(parser *p) { return &p->r->sample.repeat_last_n; }
static void *at_presence(parser *p) { return &p->r->sample.presence_penalty; }
static void *at_frequency(parser *p) { return &p->r->sample.frequency_penalty; }
static void *at_n(parser *p) { return &p->r->n; }
static void *at_stream(parser *p) { return &p->r->stream; }
static void *at_logprobs(parser *p) { return &p->n_logprobs; }
static void *at_top_logprobs(parser *p) { return &p->r->n_top; }
static void *at_echo(parser *p) { return &p->r->echo; }
static void *at_ignore_eos(parser *p) { return &p->r->ignore_eos; }
static void *at_priority(parser *p) { return &p->r->priority; }

static void *at_min_tokens(parser *p) { return &p->r->min_tokens; }
static void *at_continues(parser *p) { return &p->continues; }
static void *at_add_special(parser *p) { return &p->r->add_special; }

static bool read_add_prompt(parser *p, const field *f, const json_t *v) {
    if (!json_is_boolean(v))
        return bad(p, f->name, v, "true or false");
    p->add_prompt = json_is_true(v);
    return true;
}

static const field FIELDS[] = {
    {"model", BOTH, read_name, at_model, 0, 0},
    {"messages", SO_API_CHAT, read_messages, NULL, 0, 0},
    {"chat_template_kwargs", SO_API_CHAT, read_kwargs, NULL, 0, 0},
    {"prompt", SO_API_COMPLETION, read_prompt, NULL, 0, 0},
    {"max_tokens", BOTH, read_int, at_max_tokens, -1, INT32_MAX},
    {"n_predict", BOTH, read_int, at_max_tokens, -1, INT32_MAX},
    {"max_new_tokens", BOTH, read_int, at_max_tokens, -1, INT32_MAX},
    {"max_completion_tokens", BOTH, read_int, at_max_completion, -1, INT32_MAX},
    {"temperature", BOTH, read_float, at_temp, 0, 100},
    {"top_p", BOTH, read_float, at_top_p, 0, 1},
    {"top_k", BOTH, read_int, at_top_k, -1, 1 << 24},
    {"min_p", BOTH, read_float, at_min_p, 0, 1},
    {"repeat_penalty", BOTH, read_float, at_repeat, 0.01, 100},
    {"repetition_penalty", BOTH, read_float, at_repeat, 0.01, 100},
    {"repeat_last_n", BOTH, read_int, at_repeat_last, -1, 1 << 24},
    {"presence_penalty", BOTH, read_float, at_presence, -100, 100},
    {"frequency_penalty", BOTH, read_float, at_frequency, -100, 100},
    {"logit_bias", BOTH, read_bias, NULL, 0, 0},
    {"seed", BOTH, read_seed, NULL, 0, 0},
    {"nonce", BOTH, read_nonce, NULL, 0, 0},
    {"n", BOTH, read_int, at_n, 1, SO_API_MAX_CHOICES},
    {"min_tokens", BOTH, read_int, at_min_tokens, 0, INT32_MAX},
    {"min_new_tokens", BOTH, read_int, at_min_tokens, 0, INT32_MAX},
    {"stop", BOTH, read_stop, NULL, 0, SO_REQUEST_MAX_STOPS},
    {"stop_token_ids", BOTH, read_stop_ids, NULL, 0, 0},
    {"bad_words", BOTH, read_bad_words, NULL, 0, SO_API_MAX_BAD_WORDS},
    {"continue_final_message", SO_API_CHAT, read_bool, at_continues, 0, 0},
    {"add_generation_prompt", SO_API_CHAT, read_add_prompt, NULL, 0, 0},
    {"add_special_tokens", SO_API_COMPLETION, read_bool, at_add_special, 0, 0},
    {"stream", BOTH, read_bool, at_stream, 0, 0},
    {"stream_options", BOTH, read_stream_options, NULL, 0, 0},
    {"logprobs", BOTH, read_logprobs, at_logprobs, 0, SO_LOGPROBS_MAX},
    {"top_logprobs", SO_API_CHAT, read_int, at_top_logprobs, 0, SO_LOGPROBS_MAX},
    {"echo", SO_API_COMPLETION, read_bool, at_echo, 0, 0},
    {"ignore_eos", BOTH, read_bool, at_ignore_eos, 0, 0},
    {"prediction", BOTH, read_prediction, NULL, 0, 0},
    {"speculative", BOTH, read_speculative, NULL, 0, 0},
    {"sooth", BOTH, read_sooth, NULL, 0, 0},
    {"priority", BOTH, read_int, at_priority, -SO_API_MAX_PRIORITY, SO_API_MAX_PRIORITY},
    {"user", BOTH, read_nothing, NULL, 0, 0},
    {"store", BOTH, read_nothing, NULL, 0, 0},
    {"metadata", BOTH, read_nothing, NULL, 0, 0},
    {"service_tier", BOTH, read_nothing, NULL, 0, 0},
    {"parallel_tool_calls", BOTH, read_nothing, NULL, 0, 0},
    {"tool_choice", BOTH, read_tool_choice, NULL, 0, 0},
    {"function_call", BOTH, read_tool_choice, NULL, 0, 0},
    {"response_format", BOTH, read_response_format, NULL, 0, 0},
    {"modalities", BOTH, read_modalities, NULL, 0, 0},
    {"use_beam_search", BOTH, read_nothing, NULL, 0, 0}, /* these four: api_beam.c */
    {"best_of", BOTH, read_nothing, NULL, 0, 0},
    {"length_penalty", BOTH, read_nothing, NULL, 0, 0},
    {"early_stopping", BOTH, read_nothing, NULL, 0, 0},
};

/* --- a whole body --- */

static bool load_object(so_str body, json_t **out, so_api_error *err) {
    json_error_t e;
    size_t valid = so_utf8_valid_len(body);
    if (valid < body.len)
        return so_api_fail(err, 400, "invalid_json", NULL,
                           "the body is not valid UTF-8: byte 0x%02X at offset %zu",
                           (unsigned char)body.ptr[valid], valid);
    *out = json_loadb(body.ptr ? body.ptr : "", body.len, JSON_ALLOW_NUL, &e);
    if (!*out)
        return so_api_fail(err, 400, "invalid_json", NULL,
                           "the body is not valid JSON: %.200s (line %d, column %d)", e.text,
                           e.line, e.column);
    if (!json_is_object(*out)) {
        json_decref(*out);
        *out = NULL;
        return so_api_fail(err, 400, "invalid_json", NULL, "the body must be a JSON object");
    }
    return true;
}

/* Where the prompt of a chat ends. */
static bool choose_end(parser *p) {
    so_api_request *r = p->r;
    const json_t *last = json_array_get(r->messages, json_array_size(r->messages) - 1);
    r->end = p->continues ? SO_CHAT_CONTINUE : p->add_prompt == 0 ? SO_CHAT_AS_IS : SO_CHAT_ASK;
    if (p->continues && p->add_prompt == 1)
        return so_api_fail(p->err, 400, "invalid_value", "continue_final_message",
                           "'continue_final_message' and 'add_generation_prompt' cannot both be "
                           "true");
    if (p->continues && !is_string(json_object_get(last, "role"), "assistant"))
        return so_api_fail(p->err, 400, "invalid_value", "continue_final_message",
                           "'continue_final_message': the last message must be the assistant's");
    return true;
}

/* Checks that involve several fields, and defaults that depend on others. */
static bool finish(parser *p) {
    so_api_request *r = p->r;
    bool chat = r->kind == SO_API_CHAT;
    if (chat ? !r->messages : r->n_prompts == 0)
        return so_api_fail(p->err, 400, "missing_required_parameter", chat ? "messages" : "prompt",
                           "'%s' is required", chat ? "messages" : "prompt");
    if (p->stream_options && !r->stream)
        return so_api_fail(p->err, 400, "invalid_value", "stream_options",
                           "'stream_options' is only allowed when 'stream' is true");
    if (chat && r->n_top > 0 && !r->logprobs)
        return so_api_fail(p->err, 400, "invalid_value", "top_logprobs",
                           "'top_logprobs' needs 'logprobs': true");
    if (!chat && p->n_logprobs >= 0) {
        r->logprobs = true;
        r->n_top = p->n_logprobs;
    }
    r->max_tokens = p->max_completion_tokens != NOT_GIVEN ? p->max_completion_tokens
                    : p->max_tokens != NOT_GIVEN          ? p->max_tokens
                    : chat                                ? -1
                                                          : 16; /* the OpenAI API's default */
    r->n_prompts = chat ? 1 : r->n_prompts;
    if (r->n * r->n_prompts > SO_API_MAX_CHOICES)
        return so_api_fail(p->err, 400, "invalid_value", "n",
                           "'n' times the number of prompts is %d: at most %d are allowed",
                           r->n * r->n_prompts, SO_API_MAX_CHOICES);
    if (r->max_tokens >= 0 && r->min_tokens > r->max_tokens)
        return so_api_fail(p->err, 400, "invalid_value", "min_tokens",
                           "'min_tokens' is %d, above 'max_tokens', which is %d", r->min_tokens,
                           r->max_tokens);
    if (r->sample.top_k < 0)
        r->sample.top_k = 0;
    return so_api_read_beams(r, p->err) && (!chat || choose_end(p));
}

bool so_api_parse(so_api_kind kind, so_str body, const so_sample_params *defaults,
                  so_api_request *out, so_api_error *err) {
    so_api_request r = {
        .kind = kind, .n = 1, .sample = *defaults, .spec = {.enabled = -1}, .add_special = true};
    parser p = {.r = &r,
                .err = err,
                .max_tokens = NOT_GIVEN,
                .max_completion_tokens = NOT_GIVEN,
                .add_prompt = NOT_GIVEN,
                .n_logprobs = -1};
    r.sample.bias = NULL;
    r.sample.n_bias = 0;
    *out = (so_api_request){0};
    if (!load_object(body, &r.root, err))
        return false;
    if (!read_members(&p, FIELDS, SO_LEN(FIELDS), NULL, r.root) || !finish(&p)) {
        so_api_request_free(&r);
        return false;
    }
    *out = r;
    return true;
}

void so_api_request_free(so_api_request *r) {
    free_prompts(r);
    free(r->stops);
    free(r->bad_words);
    free(r->stop_tokens);
    free((void *)(uintptr_t)r->sample.bias);
    json_decref(r->messages);
    json_decref(r->root);
    so_buf_free(&r->ignored);
    *r = (so_api_request){0};
}

/* --- /tokenize and /detokenize --- */

static bool small_bool(const json_t *root, const char *name, bool *out, so_api_error *err) {
    const json_t *v = json_object_get(root, name);
    if (v && !json_is_null(v)) {
        if (!json_is_boolean(v))
            return so_api_fail(err, 400, "invalid_value", name, "'%s' must be true or false", name);
        *out = json_is_true(v);
    }
    return true;
}

static void note_others(const json_t *root, const char *const *names, size_t n, so_buf *out) {
    so_api_request r = {0};
    parser p = {.r = &r};
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)(uintptr_t)root, key, v) {
        bool known = false;
        for (size_t i = 0; i < n; i++)
            known |= strcmp(key, names[i]) == 0;
        if (!known)
            note_ignored(&p, NULL, key);
    }
    *out = r.ignored;
}

void so_api_tokenize_free(so_api_tokenize *t) {
    json_decref(t->root);
    so_buf_free(&t->ignored);
    *t = (so_api_tokenize){0};
}

bool so_api_parse_tokenize(so_str body, so_api_tokenize *out, so_api_error *err) {
    static const char *const names[] = {"content",       "prompt",      "add_special",
                                        "parse_special", "with_pieces", "model"};
    so_api_tokenize t = {.parse_special = true};
    *out = (so_api_tokenize){0};
    if (!load_object(body, &t.root, err))
        return false;
    const json_t *text = json_object_get(t.root, "content");
    text = text ? text : json_object_get(t.root, "prompt"); /* vLLM's name */
    bool ok = json_is_string(text) ||
              so_api_fail(err, 400, "invalid_value", "content", "'content' must be a string");
    ok = ok && small_bool(t.root, "add_special", &t.add_special, err) &&
         small_bool(t.root, "parse_special", &t.parse_special, err) &&
         small_bool(t.root, "with_pieces", &t.with_pieces, err);
    if (!ok) {
        so_api_tokenize_free(&t);
        return false;
    }
    note_others(t.root, names, SO_LEN(names), &t.ignored);
    t.text = (so_str){json_string_value(text), json_string_length(text)};
    *out = t;
    return true;
}

bool so_api_parse_detokenize(so_str body, so_tokens *out, so_buf *ignored, so_api_error *err) {
    static const char *const names[] = {"tokens", "model"};
    so_api_request none = {0};
    parser p = {.r = &none, .err = err};
    json_t *root;
    int32_t *ids = NULL;
    size_t n = 0;
    if (!load_object(body, &root, err))
        return false;
    const json_t *v = json_object_get(root, "tokens");
    bool ok = json_is_array(v) ? read_ids(&p, "tokens", v, &ids, &n)
                               : so_api_fail(err, 400, "invalid_value", "tokens",
                                             "'tokens' must be an array of token ids");
    if (ok) {
        so_tokens_append(out, ids, n);
        note_others(root, names, SO_LEN(names), ignored);
    }
    json_decref(root);
    free(ids);
    return ok;
}
