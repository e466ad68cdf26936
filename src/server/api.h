/* The API's own shapes: a request as its JSON states it, and an error as its JSON shows it. Nothing
 * here knows of sockets, models or threads, so that the parser can be fuzzed as it is. */
#ifndef SO_SERVER_API_H
#define SO_SERVER_API_H

#include <jansson.h>

#include "engine/engine.h"

/* --- errors (api_error.c) --- */

/* One answer that is an error: {"error": {"message","type","param","code"}}. */
typedef struct so_api_error {
    int status;       /* of HTTP */
    const char *code; /* a word for programs; NULL: null */
    char param[96];   /* the field at fault; empty: null */
    char msg[640];
} so_api_error;

/* Fills e and returns false, so that readers can `return so_api_fail(…)`. param may be NULL. */
bool so_api_fail(so_api_error *e, int status, const char *code, const char *param, const char *fmt,
                 ...) __attribute__((format(printf, 5, 6)));
/* An error of the engine or tokenizer, which is the client's fault or ours by its code. */
bool so_api_fail_err(so_api_error *e, const so_err *err);
json_t *so_api_error_json(const so_api_error *e);

/* --- requests (api_parse.c) --- */

typedef enum so_api_kind {
    SO_API_COMPLETION = 1,
    SO_API_CHAT = 2,
} so_api_kind;

enum {
    SO_API_MAX_CHOICES = 128, /* n times the number of prompts */
    SO_API_MAX_MESSAGES = 4096,
    SO_API_MAX_PRIORITY = 100,
    SO_API_MAX_LOGPROBS =
        1 << 21, /* in one piece of JSON: some hundred bytes each, while it is made */
};

typedef struct so_api_prompt {
    so_str text;  /* where ids is NULL */
    int32_t *ids; /* owned */
    size_t n_ids;
} so_api_prompt;

/* "speculative": what a request says of it; the server's own settings fill the rest. */
typedef struct so_api_spec {
    int enabled;                      /* −1: not said */
    const char *drafter;              /* NULL: not said */
    int length, draft_max, draft_min; /* 0: not said */
    bool has_verify;
    so_verify_mode verify;
    double lenience;
} so_api_spec;

typedef struct so_api_request {
    so_api_kind kind;
    json_t *root;         /* what strings below point into */
    json_t *messages;     /* chat: contents are strings */
    const json_t *kwargs; /* chat_template_kwargs, or NULL */
    so_api_prompt *prompts;
    int n_prompts;     /* 1 for a chat */
    const char *model; /* as the client names it; may be NULL */

    so_sample_params sample; /* over the defaults given to the parser; bias is owned */
    bool has_seed, has_nonce;
    uint64_t nonce;
    int max_tokens; /* −1: until the model ends */
    int n;
    so_str *stops;
    int n_stops;
    bool stream, include_usage, echo, ignore_eos, rounds;
    bool logprobs;     /* of the tokens themselves … */
    int n_top;         /* … and of this many alternatives */
    so_str prediction; /* ptr NULL: none */
    so_api_spec spec;
    int priority;
    so_buf ignored; /* names of unknown fields, ", " between two; harmless in a header */
} so_api_request;

/* Reads a body. On failure *err is filled, *out empty. Ids are not checked against a vocabulary,
 * the length not against a context: that needs a model. */
bool so_api_parse(so_api_kind kind, so_str body, const so_sample_params *defaults,
                  so_api_request *out, so_api_error *err);
void so_api_request_free(so_api_request *r);

/* {"content": TEXT, "add_special", "parse_special", "with_pieces"} of /tokenize. */
typedef struct so_api_tokenize {
    json_t *root;
    so_str text;
    bool add_special, parse_special, with_pieces;
    so_buf ignored; /* as above */
} so_api_tokenize;
bool so_api_parse_tokenize(so_str body, so_api_tokenize *out, so_api_error *err);
void so_api_tokenize_free(so_api_tokenize *t);
/* {"tokens": […]} of /detokenize. On success *ignored is the caller's to free. */
bool so_api_parse_detokenize(so_str body, so_tokens *out, so_buf *ignored, so_api_error *err);

/* How a request speculates (api_spec.c): its own words over the server's. max_draft: the engine's;
 * 0: it cannot speculate. `text` owns the drafter's name and must outlive *out. */
bool so_api_choose_spec(const so_api_request *r, const so_spec_opts *deflt, int max_draft,
                        so_buf *text, so_spec_opts *out, so_api_error *err);

#endif
