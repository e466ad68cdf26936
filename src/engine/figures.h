/* The figures of a request as JSON, under the names that `run --json`, `bench` and the server's
 * answers share. Rates are null where nothing was measured, never 0 or NaN. Pure functions. */
#ifndef SO_ENGINE_FIGURES_H
#define SO_ENGINE_FIGURES_H

#include <jansson.h>

#include "engine/engine.h"

/* Who guessed and how guesses were checked; the name is cut, if longer. */
typedef struct so_spec_label {
    char drafter[64];
    so_verify_mode verify;
    double lenience;
} so_spec_label;

so_spec_label so_figures_label(const so_request *r);

/* The nonce of a request (nonce.c), null where it has none. */
json_t *so_figures_nonce(bool has, uint64_t nonce);
/* {"prompt_n","cache_n","queue_ms","prompt_ms","predicted_n","predicted_ms",
 * "predicted_per_second","draft_n","draft_n_accepted"}; cache_n: prompt tokens that were in the
 * prefix cache already, as llama.cpp calls them. */
json_t *so_figures_timings(const so_request_stats *s);
/* {"drafter","verify","rounds","tokens_per_pass","mean_accepted","alpha","acceptance_rate",
 * "round_rate","draft_ms","verify_ms","per_depth":[{"tested","accepted"}, …]}, and "lossy": true
 * where the text may differ from the model's own. counts.c defines each. */
json_t *so_figures_spec(const so_spec_label *who, const so_request_stats *s);
/* One position as the OpenAI API has it but for the id: p[0] is the token, the others its
 * alternatives. `token` shows bytes that are no UTF-8 as U+FFFD; `bytes` has them as they are. */
json_t *so_figures_logprobs(const so_tokenizer *t, const so_logprob *p, int n_each);

#endif
