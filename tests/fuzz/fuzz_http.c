/* Requests from anybody: bytes to a parsed request or an error, as the HTTP handlers do it. Checks
 * what must hold of whatever is accepted, and that what is refused says why. */
#include <stdlib.h>

#include "base/mem.h"
#include "server/api.h"
#include "server/format.h"
#include "token/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_error(const so_api_error *e) {
    SO_ASSERT(e->status >= 400 && e->status < 600);
    SO_ASSERT(e->msg[0] != '\0');
    so_buf out = {0};
    so_format_json(so_api_error_json(e), &out);
    SO_ASSERT(out.len > 0 && so_utf8_valid_len(so_buf_str(&out)) == out.len);
    so_buf_free(&out);
}

static void check_request(const so_api_request *r) {
    SO_ASSERT(r->n >= 1 && r->n_prompts >= 1 && r->n * r->n_prompts <= SO_API_MAX_CHOICES);
    SO_ASSERT(r->kind == SO_API_CHAT ? r->messages != NULL : r->prompts != NULL);
    SO_ASSERT(r->max_tokens >= -1 && r->sample.top_k >= 0);
    SO_ASSERT(r->n_top >= 0 && r->n_top <= SO_LOGPROBS_MAX && (r->logprobs || r->n_top == 0));
    SO_ASSERT(r->sample.temp >= 0 && r->sample.top_p >= 0 && r->sample.top_p <= 1);
    SO_ASSERT(r->n_stops <= SO_REQUEST_MAX_STOPS);
    for (int i = 0; i < r->n_stops; i++)
        SO_ASSERT(r->stops[i].len > 0);
    for (size_t i = 0; i < r->ignored.len; i++) /* goes into a header */
        SO_ASSERT(r->ignored.data[i] >= ' ' && r->ignored.data[i] < 127);
}

static void parse(so_api_kind kind, so_str body) {
    so_sample_params defaults;
    so_api_request r;
    so_api_error e = {0};
    so_spec_opts spec, deflt = {.drafter = "auto", .lenience = 1};
    so_buf text = {0};
    so_sample_defaults(&defaults);
    if (!so_api_parse(kind, body, &defaults, &r, &e)) {
        check_error(&e);
        return;
    }
    check_request(&r);
    if (!so_api_choose_spec(&r, &deflt, 16, &text, &spec, &e))
        check_error(&e);
    so_buf_free(&text);
    so_api_request_free(&r);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    /* a copy of the exact size: reading past its end is seen */
    char *copy = so_alloc(size);
    so_api_error e = {0};
    so_api_tokenize t;
    so_tokens ids = {0};
    so_buf ignored = {0};
    memcpy(copy, data, size);
    so_str body = {copy, size};
    parse(SO_API_CHAT, body);
    parse(SO_API_COMPLETION, body);
    if (so_api_parse_tokenize(body, &t, &e))
        so_api_tokenize_free(&t);
    else
        check_error(&e);
    if (!so_api_parse_detokenize(body, &ids, &ignored, &e))
        check_error(&e);
    so_buf_free(&ignored);
    so_tokens_free(&ids);
    free(copy);
    return 0;
}
