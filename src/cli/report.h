/* Results of requests: as JSON (the fields of `run --json`) and as lines on stderr. */
#ifndef SO_CLI_REPORT_H
#define SO_CLI_REPORT_H

#include <jansson.h>

#include "engine/figures.h"

/* The result of a prompt, over all its turns. */
typedef struct so_report {
    so_buf text; /* answers, separated by line breaks */
    so_tokens tokens;
    json_t *logprobs; /* one item per token; NULL: not requested */
    json_t *best;     /* beam search: the best answers of the last turn; else NULL */
    so_finish finish; /* of the last turn */
    uint64_t seed;
    uint64_t nonce; /* of the last turn, if has_nonce */
    bool has_nonce;
    so_spec_label label; /* drafter and verifier */
    so_request_stats stats;
} so_report;

void so_report_add(so_report *r, const so_request *req, const so_tokenizer *t, so_str text);
void so_report_add_stats(so_report *r, const so_report *from); /* stats and label only */
void so_report_free(so_report *r);
/* {"text","tokens","finish_reason","seed","nonce","timings","spec"} (engine/figures.h). If logprobs
 * were requested, also "logprobs": {"content": [{"token": " sea", "id": 9, "logprob": -0.5,
 * "bytes": [32, 115, …], "top_logprobs": [{"token", "id", "logprob", "bytes"}, …]}, …]}: one item
 * per token, its alternatives in order of decreasing probability. With beam search also "n_best":
 * [{"text", "tokens", "score", "logprob", "finish_reason"}, …], best first: score is logprob, the sum
 * of the log probabilities, with the length penalty. */
json_t *so_report_json(const so_report *r);
/* Prints the best answers of a beam search with their scores on stdout. */
void so_report_print_best(const so_report *r);
/* Prints the object as one line on stdout, flushes, and releases o. */
void so_report_print_json(json_t *o);
/* " (12.3/s)", or "" for a rate that is not known (negative). Returns `out`. */
enum { SO_RATE_TEXT = 32 };
const char *so_report_rate(double rate, char out[SO_RATE_TEXT]);
/* "prompt: 31 tokens, 120 ms (258.3/s); answer: …" on stderr. */
void so_report_print_timings(const so_report *r);
/* Totals of a file of prompts; ms is the elapsed time, since prompts run at the same time. */
void so_report_print_total(const so_report *r, int n_prompts, double ms);

#endif
