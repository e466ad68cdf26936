/* A load for engines: many requests that come, are cancelled, preempted and answered together, each
 * with the tokens it has alone. Everything is drawn from a seed. */
#ifndef SO_LOAD_H
#define SO_LOAD_H

#include "engine/engine.h"

typedef struct so_load so_load;

typedef struct so_load_opts {
    const so_model *target;
    const so_tokenizer *tok; /* may be NULL */
    so_dtype kv_dtype;
    int n_requests, n_ctx, max_prompt, max_tokens;
    const int32_t *source; /* prompts are pieces of it */
    int n_source;
    bool with_draft; /* the engines will have a draft model */
    uint64_t seed;
} so_load_opts;

/* Draws the requests and runs each alone: plainly, from an empty cache. */
so_load *so_load_create(const so_load_opts *o);
void so_load_free(so_load *l);

typedef struct so_load_result {
    int n_whole, n_cancelled, n_freed; /* requests by how they ended */
    so_engine_stats stats;             /* of the engine, at the end */
} so_load_result;

/* Runs all of them in an engine of these options. Fails the test where a token differs, a page is
 * not given back or an invariant is broken. */
void so_load_run(so_load *l, const so_engine_opts *eo, const char *name, so_load_result *out);

#endif
