/* Results as JSON (the fields of `run --json`) and as the line at the end of a run. */
#ifndef SO_CLI_REPORT_H
#define SO_CLI_REPORT_H

#include <jansson.h>

#include "engine/figures.h"

/* What a prompt's turns add up to. */
typedef struct so_report {
    so_buf text; /* answers, a line break between two */
    so_tokens tokens;
    json_t *logprobs; /* a list over the tokens; NULL: none wanted */
    so_finish finish; /* of the last turn */
    uint64_t seed;
    uint64_t nonce; /* of the last turn, where it has one */
    bool has_nonce;
    so_spec_label who;
    so_request_stats stats;
} so_report;

void so_report_add(so_report *r, const so_request *req, const so_tokenizer *t, so_str text);
void so_report_add_stats(so_report *r, const so_report *from); /* the counts alone */
void so_report_free(so_report *r);
/* {"text","tokens","finish_reason","seed","nonce","timings","spec"} (engine/figures.h), and where
 * logprobs were wanted "logprobs": {"content": [{"token": " sea", "id": 9, "logprob": -0.5,
 * "bytes": [32, 115, …], "top_logprobs": [{"token", "id", "logprob", "bytes"}, …]}, …]} one item
 * per token, alternatives best first. */
json_t *so_report_json(const so_report *r);
/* One line per JSON object on stdout, flushed; takes over o. */
void so_report_print_json(json_t *o);
/* "prompt 31 tokens, 120 ms (258/s); answer …" on stderr. */
void so_report_print_timings(const so_report *r);
/* What all prompts of a file took together, ms by the clock: they overlap. */
void so_report_print_total(const so_report *r, int n_prompts, double ms);

#endif
