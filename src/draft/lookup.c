/* Prompt lookup: finds the longest suffix of the text that occurred before and proposes what
 * followed it there. With an encoder-decoder model the source text counts as text before.
 *
 * One suffix index per request over prompt and accepted tokens. A continuation that reaches the
 * end of the text starts over from its first token, so that a loop goes on. Memory is bounded: a
 * text that outgrows the index is indexed again from its latest half. Proposes one chain of points,
 * so it is exact with every verifier. Thread: the engine thread. */
#include <stdlib.h>

#include "base/mem.h"
#include "base/str.h"
#include "draft/confidence.h"
#include "draft/drafters.h"
#include "draft/suffix.h"

enum { DEFAULT_MIN = 2, DEFAULT_TOKENS = 1 << 18 };

typedef struct lookup {
    so_drafter base;
    int min_len, max_tokens;
} lookup;

typedef struct lookup_state {
    so_suffix *index;
    int n_seen;
} lookup_state;

/* Keeps the latest half, so that re-indexing costs constant time per token on average. */
static void forget_half(so_suffix *index) {
    int len = so_suffix_len(index), keep = len / 2;
    const int32_t *tokens = so_suffix_tokens(index);
    so_suffix_clear(index);
    for (int i = 0; i < keep; i++) /* tokens are read before the index overwrites them */
        so_suffix_add(index, tokens[len - keep + i]);
}

static void feed_index(lookup_state *s, const int32_t *tokens, int n) {
    for (int i = 0; i < n; i++) {
        if (!so_suffix_add(s->index, tokens[i])) {
            forget_half(s->index);
            so_suffix_add(s->index, tokens[i]);
        }
    }
}

static void feed(lookup_state *s, const int32_t *tokens, int n) {
    feed_index(s, tokens, n);
    s->n_seen += n;
}

static void lookup_close(so_drafter *d, void *state) {
    (void)d;
    lookup_state *s = state;
    so_suffix_free(s->index);
    free(s);
}

static int lookup_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    const lookup *l = (const lookup *)d;
    lookup_state *s = SO_NEW(lookup_state);
    int64_t want = SO_MAX(SO_MAX(text->max_tokens, text->n_prompt), 2) + (int64_t)text->n_source;
    int rc = so_suffix_create((int)SO_MIN(want, l->max_tokens), &s->index, err);
    if (rc != 0) {
        free(s);
        return so_err_prefix(err, "lookup");
    }
    feed_index(s, text->source, text->n_source);
    feed(s, text->prompt, text->n_prompt);
    *state = s;
    return 0;
}

static void lookup_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    (void)d;
    feed(state, tokens, n);
}

static void propose_one(const lookup *l, so_draft_job *job) {
    lookup_state *s = job->state;
    if (job->n_tokens > s->n_seen)
        feed(s, job->tokens + s->n_seen, job->n_tokens - s->n_seen);
    int end, len = so_suffix_match(s->index, &end);
    if (len < l->min_len)
        return;
    const int32_t *text = so_suffix_tokens(s->index);
    int n = so_suffix_len(s->index), period = n - end, node = 0;
    for (int i = 0; node >= 0; i++)
        node = so_draft_add(job, node, text[end + i % period], SO_Q_POINT, -1, l->base.index,
                            so_draft_confidence(len + i));
}

static int lookup_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)err;
    for (int i = 0; i < n_jobs; i++)
        propose_one((const lookup *)d, &jobs[i]);
    return 0;
}

static void lookup_free(so_drafter *d) { free(d); }

static const so_drafter_vt LOOKUP_VT = {
    .name = "lookup",
    .free = lookup_free,
    .open = lookup_open,
    .close = lookup_close,
    .propose = lookup_propose,
    .observe = lookup_observe,
};

so_drafter *so_lookup_create(const so_lookup_params *p) {
    lookup *l = SO_NEW(lookup);
    l->base.vt = &LOOKUP_VT;
    l->base.recorded = true;
    l->base.request_only = true;
    l->min_len = p && p->min_len > 0 ? p->min_len : DEFAULT_MIN;
    l->max_tokens = SO_MAX(2, p && p->max_tokens > 0 ? p->max_tokens : DEFAULT_TOKENS);
    if (l->min_len != DEFAULT_MIN)
        l->base.id = so_hash_bytes(&l->min_len, sizeof l->min_len);
    return &l->base;
}
