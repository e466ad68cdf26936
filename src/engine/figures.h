/* Counts and rates of a request as JSON, under the names that `run --json`, `bench` and the
 * server's answers share. A rate is null if nothing was measured, never 0 or NaN. Pure functions;
 * the caller owns the JSON. */
#ifndef SO_ENGINE_FIGURES_H
#define SO_ENGINE_FIGURES_H

#include <jansson.h>

#include "draft/spec.h"
#include "engine/engine.h"

/* Names the drafters and the verification mode. drafter: as so_spec_print writes it, which may be
 * longer than the text that was parsed ("draw" becomes "draw=1") but never twice as long. */
typedef struct so_spec_label {
    char drafter[2 * SO_SPEC_MAX_TEXT];
    so_verify_mode verify;
    double lenience;
} so_spec_label;

so_spec_label so_figures_label(const so_request *r);

/* The nonce of a request (nonce.c), or null if it has none. */
json_t *so_figures_nonce(bool has, uint64_t nonce);
/* {"prompt_n","cache_n","queue_ms","prompt_ms","ttft_ms","predicted_n","predicted_ms",
 * "predicted_per_second","draft_n","draft_n_accepted"}. cache_n: prompt tokens that were in the
 * prefix cache; the name is llama.cpp's. ttft_ms: time to the first token, the shortest of several
 * requests, null without a token. predicted_per_second: null if all tokens came with the first
 * round. */
json_t *so_figures_timings(const so_request_stats *s);
/* {"drafter","verify","rounds","tokens_per_pass","mean_accepted","alpha","acceptance_rate",
 * "round_rate","draft_ms","verify_ms","per_depth":[{"tested","accepted"}, …]}, and "lossy": true if
 * the distribution of the text may differ from the model's (lenient). counts.c defines each. */
json_t *so_figures_spec(const so_spec_label *who, const so_request_stats *s);
/* One position in the form of the OpenAI API, plus the id. p[0] is the token, the others are its
 * alternatives. `token` replaces invalid UTF-8 with U+FFFD; `bytes` has the original bytes. */
json_t *so_figures_logprobs(const so_tokenizer *t, const so_logprob *p, int n_each);

#endif
