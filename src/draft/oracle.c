/* A drafter of known quality, for measurements: right with probability alpha at every position.
 *
 * It gets the target's plain output as `expected`. Whether it is right at a position is keyed by
 * (seed, choice, position) and not by the round: no guess after the first wrong one of a chain is
 * tested, and the next chain starts after that position, so every position is tested once. The
 * outcomes are then independent with probability alpha, as the formulas assume. A wrong guess is a
 * token that differs from the right one; guesses after a wrong one are wrong, too. Once the output
 * differs from the expected text, the oracle makes no guesses. Guesses are points. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/drafters.h"

typedef struct oracle {
    so_drafter base;
    double alpha;
} oracle;

typedef struct oracle_state {
    int32_t *expected;
    int n_expected, n_prompt;
    int n_same; /* output tokens equal to the expected ones */
    int n_seen; /* output tokens */
} oracle_state;

static void feed(oracle_state *s, const int32_t *tokens, int n) {
    for (int i = 0; i < n; i++, s->n_seen++)
        if (s->n_same == s->n_seen && s->n_seen < s->n_expected &&
            tokens[i] == s->expected[s->n_seen])
            s->n_same++;
}

static int oracle_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d;
    int n = text->expected ? SO_MAX(text->n_expected, 0) : 0;
    oracle_state *s = SO_NEW(oracle_state);
    s->expected = so_try_alloc((size_t)n, sizeof *s->expected);
    if (!s->expected) {
        free(s);
        return so_err_set(err, SO_ENOMEM, "oracle: no memory for %d expected tokens", n);
    }
    if (n > 0)
        memcpy(s->expected, text->expected, (size_t)n * sizeof *s->expected);
    s->n_expected = n;
    s->n_prompt = text->n_prompt;
    *state = s;
    return 0;
}

static void oracle_close(so_drafter *d, void *state) {
    (void)d;
    oracle_state *s = state;
    free(s->expected);
    free(s);
}

static void oracle_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    (void)d;
    feed(state, tokens, n);
}

/* Random number for the outcome or replacement at a position; independent of the round. */
static double keyed(const so_draft_job *job, int position, uint32_t index) {
    so_rng_key key = {job->seed, job->choice, (uint32_t)position, SO_RNG_DRAFT, 0};
    return so_rng_uniform(&key, index);
}

static int32_t other_token(const so_draft_job *job, int position, int32_t token) {
    int n_vocab = job->tree->n_vocab;
    int step = 1 + (int)(keyed(job, position, 1) * (n_vocab - 1));
    return (int32_t)(((int64_t)token + SO_MIN(step, n_vocab - 1)) % n_vocab);
}

static void propose_one(const oracle *o, so_draft_job *job) {
    oracle_state *s = job->state;
    int seen = s->n_prompt + s->n_seen;
    if (job->n_tokens > seen)
        feed(s, job->tokens + seen, job->n_tokens - seen);
    bool right = true; /* so far in this chain */
    for (int node = 0, i = s->n_seen; s->n_same == s->n_seen && node >= 0 && i < s->n_expected;
         i++) {
        int32_t token = s->expected[i];
        if (token < 0 || token >= job->tree->n_vocab)
            return;
        right = right && keyed(job, s->n_prompt + i, 0) < o->alpha;
        if (!right)
            token = other_token(job, s->n_prompt + i, token);
        node = so_draft_add(job, node, token, SO_Q_POINT, -1, o->base.index, (float)o->alpha);
    }
}

static int oracle_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)err;
    for (int i = 0; i < n_jobs; i++)
        propose_one((const oracle *)d, &jobs[i]);
    return 0;
}

static void oracle_free(so_drafter *d) { free(d); }

static const so_drafter_vt ORACLE_VT = {
    .name = "oracle",
    .free = oracle_free,
    .open = oracle_open,
    .close = oracle_close,
    .propose = oracle_propose,
    .observe = oracle_observe,
};

so_drafter *so_oracle_create(double alpha) {
    SO_ASSERT(alpha >= 0 && alpha <= 1);
    oracle *o = SO_NEW(oracle);
    o->base.vt = &ORACLE_VT;
    o->base.request_only = true;
    o->alpha = alpha;
    return &o->base;
}
