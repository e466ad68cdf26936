/* Errors as the OpenAI API's JSON. The status decides the type. A message names the field, the
 * value and the remedy, and quotes at most one line of what the client sent. Pure functions. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "server/api.h"
#include "token/utf8.h"

bool so_api_fail(so_api_error *e, int status, const char *code, const char *param, const char *fmt,
                 ...) {
    va_list ap;
    e->status = status;
    e->code = code;
    snprintf(e->param, sizeof e->param, "%s", param ? param : "");
    va_start(ap, fmt);
    vsnprintf(e->msg, sizeof e->msg, fmt, ap);
    va_end(ap);
    return false;
}

/* Messages of the engine name command-line options. Clients know these as fields; the others belong
 * to whoever started the server. */
static const struct {
    const char *option, *field; /* longer options before their beginnings */
} FIELDS[] = {
    {"--spec-length", "speculative.length"},
    {"--spec", "speculative.drafter"},
    {"--draft-max", "speculative.draft_max"},
    {"--draft-min", "speculative.draft_min"},
    {"--verify", "speculative.verify"},
    {"--predict", "max_tokens"},
    {"--logit-bias", "logit_bias"},
    {"--logprobs", "logprobs"},
    {"--beams", "best_of"},
};

static const char *const SERVERS[] = {"--ctx-size", "--kv-pages", "--parallel"};

/* Appends what an option is to a client, and returns its length; 0: no option of the tables is here.
 * field: set to the field. */
static size_t rename_option(const char *at, so_buf *out, const char **field) {
    for (size_t i = 0; i < SO_LEN(FIELDS); i++) {
        size_t n = strlen(FIELDS[i].option);
        if (strncmp(at, FIELDS[i].option, n) != 0)
            continue;
        so_buf_printf(out, "'%s'", FIELDS[i].field);
        *field = FIELDS[i].field;
        return n;
    }
    for (size_t i = 0; i < SO_LEN(SERVERS); i++) {
        size_t n = strlen(SERVERS[i]);
        if (strncmp(at, SERVERS[i], n) != 0)
            continue;
        so_buf_printf(out, "the server's %s", SERVERS[i]);
        return n;
    }
    return 0;
}

/* The parameter at fault is the one that the message names first. */
static bool fail_field(so_api_error *e, const so_err *err) {
    so_buf msg = {0};
    const char *param = NULL;
    for (const char *at = err->msg; *at;) {
        const char *field = NULL;
        size_t n = *at == '-' ? rename_option(at, &msg, &field) : 0;
        if (n == 0)
            so_buf_append(&msg, at, n = 1);
        at += n;
        param = param ? param : field;
    }
    so_api_fail(e, 400, "invalid_value", param, "%s", so_buf_str(&msg).ptr);
    so_buf_free(&msg);
    return false;
}

bool so_api_fail_err(so_api_error *e, const so_err *err) {
    switch (err->code) {
    case SO_ENOMEM:
    case SO_EIO:
    case SO_EFORMAT:
        return so_api_fail(e, 500, "engine_error", NULL, "%s", err->msg);
    case SO_ECANCELLED:
        return so_api_fail(e, 503, "stopping", NULL, "%s", err->msg);
    default:
        return fail_field(e, err);
    }
}

static const char *type_of(int status) {
    switch (status) {
    case 401:
    case 403:
        return "authentication_error";
    case 404:
        return "not_found_error";
    case 429:
        return "rate_limit_error";
    case 503:
        return "unavailable_error";
    case 501: /* caused by the request, not a failure of the server */
    case 505:
        return "invalid_request_error";
    default:
        return status >= 500 ? "server_error" : "invalid_request_error";
    }
}

/* Messages quote clients, and snprintf may have cut a character: invalid UTF-8 is replaced. */
static json_t *text_json(const char *text) {
    so_buf whole = {0};
    so_utf8_repair(so_str_c(text), &whole);
    json_t *s = json_stringn(so_buf_str(&whole).ptr, whole.len);
    so_buf_free(&whole);
    return s;
}

json_t *so_api_error_json(const so_api_error *e) {
    return json_pack("{s:{s:o, s:s, s:o, s:o}}", "error", "message", text_json(e->msg), "type",
                     type_of(e->status), "param", e->param[0] ? text_json(e->param) : json_null(),
                     "code", e->code ? json_string(e->code) : json_null());
}
