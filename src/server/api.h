/* The API's data: a parsed request, and an error as JSON. No sockets, no models, no threads, so the
 * parser can be fuzzed on its own. */
#ifndef SO_SERVER_API_H
#define SO_SERVER_API_H

#include <jansson.h>

#include "engine/engine.h"
#include "token/chat.h"

/* --- errors (api_error.c) --- */

/* An error response: {"error": {"message","type","param","code"}}. */
typedef struct so_api_error {
    int status;       /* HTTP status */
    const char *code; /* a constant string for programs; NULL: "code" is null */
    char param[96];   /* name of the invalid field; empty: "param" is null */
    char msg[640];
} so_api_error;

/* Fills e and returns false, so that a parser can `return so_api_fail(…)`. param may be NULL. */
bool so_api_fail(so_api_error *e, int status, const char *code, const char *param, const char *fmt,
                 ...) __attribute__((format(printf, 5, 6)));
/* Converts an error of the engine or tokenizer; its code decides between 400, 500 and 503. */
bool so_api_fail_err(so_api_error *e, const so_err *err);
json_t *so_api_error_json(const so_api_error *e);

/* --- parameters that are refused (api_refused.c) --- */

/* false, "", [] or {}. */
bool so_api_is_empty(const json_t *v);
/* Fills e with "'NAME' is not supported by this server: leave it out", followed by `more`. */
bool so_api_refuse(so_api_error *e, const char *name, const char *more);
/* Returns false, with e filled, if the value would change the answer in a way that this server does
 * not support. *known: whether the name is in the table. */
bool so_api_check_refused(const char *name, const json_t *v, bool *known, so_api_error *e);

/* --- requests (api_parse.c) --- */

typedef enum so_api_kind {
    SO_API_COMPLETION = 1,
    SO_API_CHAT = 2,
} so_api_kind;

enum {
    SO_API_MAX_CHOICES = 128, /* n · number of prompts */
    SO_API_MAX_MESSAGES = 4096,
    SO_API_MAX_PRIORITY = 100,
    SO_API_MAX_BAD_WORDS = SO_REQUEST_MAX_BAD_WORDS / 2, /* each has up to two forms */
    SO_API_MAX_LOGPROBS = 1 << 21, /* in one response; as JSON each takes about 100 bytes */
};

typedef struct so_api_prompt {
    so_str text;  /* if ids is NULL */
    int32_t *ids; /* owned */
    size_t n_ids;
} so_api_prompt;

/* The field "speculative". The server's options apply where the field does not set a value. */
typedef struct so_api_spec {
    int enabled;                      /* −1: not set */
    const char *drafter;              /* NULL: not set */
    int length, draft_max, draft_min; /* 0: not set */
    bool has_verify;
    so_verify_mode verify;
    double lenience;
} so_api_spec;

typedef struct so_api_request {
    so_api_kind kind;
    json_t *root;         /* the parsed body; strings below point into it */
    json_t *messages;     /* chat: each content is one string; text parts were joined */
    const json_t *kwargs; /* chat_template_kwargs, or NULL */
    so_api_prompt *prompts;
    int n_prompts;     /* 1 for a chat */
    const char *model; /* as sent by the client; may be NULL */

    so_sample_params sample; /* the parser's defaults, changed by the request; bias is owned */
    bool has_seed, has_nonce;
    uint64_t nonce;
    int max_tokens; /* −1: limited by the context only */
    int min_tokens;
    int n;
    so_str *stops, *bad_words;
    int n_stops, n_bad_words;
    int32_t *stop_tokens;
    size_t n_stop_tokens;
    so_chat_end end;  /* chat: where the prompt ends */
    bool add_special; /* completions: add BOS if the model uses one */
    bool stream, include_usage, echo, ignore_eos, rounds;
    bool logprobs;     /* of the generated tokens */
    int n_top;         /* number of alternatives that are reported for each token */
    so_str prediction; /* the expected text; ptr NULL: none */
    so_api_spec spec;
    so_beam_opts beams;
    int priority;
    so_buf ignored; /* names of unknown fields, separated by ", "; safe in a header */
} so_api_request;

/* Parses a body. On failure *err is filled and *out is empty. Token ids are not checked against the
 * vocabulary, nor lengths against the context: both need a model. */
bool so_api_parse(so_api_kind kind, so_str body, const so_sample_params *defaults,
                  so_api_request *out, so_api_error *err);
void so_api_request_free(so_api_request *r);

/* Reads the fields of beam search from r->root, after all others (api_beam.c). */
bool so_api_read_beams(so_api_request *r, so_api_error *err);

/* /tokenize: {"content": TEXT, "add_special", "parse_special", "with_pieces"}. */
typedef struct so_api_tokenize {
    json_t *root;
    so_str text;
    bool add_special, parse_special, with_pieces;
    so_buf ignored; /* as in so_api_request */
} so_api_tokenize;
bool so_api_parse_tokenize(so_str body, so_api_tokenize *out, so_api_error *err);
void so_api_tokenize_free(so_api_tokenize *t);
/* /detokenize: {"tokens": […]}. On success the caller frees *ignored. */
bool so_api_parse_detokenize(so_str body, so_tokens *out, so_buf *ignored, so_api_error *err);

/* Sets the speculation options of a request (api_spec.c): those of the request, and the server's
 * (deflt) where the request has none. max_draft is the engine's; 0: no request may speculate.
 * `text` owns the drafter's name and must outlive *out. */
bool so_api_choose_spec(const so_api_request *r, const so_spec_opts *deflt, int max_draft,
                        so_buf *text, so_spec_opts *out, so_api_error *err);

#endif
