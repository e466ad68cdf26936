/* N-gram drafting: orders 4 down to 2 with back-off; each guess becomes part of the next context.
 *
 * Counts come from the request's own prompt and accepted tokens, never from rejected guesses. The
 * guess is the most frequent follower of the longest known context. It is a point: the counts are
 * not its q, because an argmax was not sampled from them, and using them as q would bias `reject`.
 * With `draw` the guess is sampled from the counts of that context and carries exactly that row;
 * if the tree has no rows or the request is greedy, it is the argmax again. Thread: the engine
 * thread. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "draft/confidence.h"
#include "draft/counts.h"
#include "draft/drafters.h"

enum { DEFAULT_WINDOW = 8192 };

typedef struct ngram {
    so_drafter base;
    so_ngram_params params;
} ngram;

typedef struct ngram_state {
    so_counts *counts;
    int n_seen;
} ngram_state;

static void feed(ngram_state *s, const int32_t *tokens, int n) {
    for (int i = 0; i < n; i++)
        so_counts_add(s->counts, tokens[i]);
    s->n_seen += n;
}

static int ngram_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    const ngram *g = (const ngram *)d;
    ngram_state *s = SO_NEW(ngram_state);
    int want = SO_MAX(SO_MAX(text->max_tokens, text->n_prompt), 1);
    int rc = so_counts_create(g->params.max_order, SO_MIN(want, g->params.window), &s->counts, err);
    if (rc != 0) {
        free(s);
        return so_err_prefix(err, "ngram");
    }
    feed(s, text->prompt, text->n_prompt);
    *state = s;
    return 0;
}

static void ngram_close(so_drafter *d, void *state) {
    (void)d;
    ngram_state *s = state;
    so_counts_free(s->counts);
    free(s);
}

static void ngram_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    (void)d;
    feed(state, tokens, n);
}

/* A shorter context is weaker evidence. */
static float order_weight(int order) { return order == 4 ? 1.0f : order == 3 ? 0.85f : 0.65f; }

typedef struct drawing {
    float *row;
    int n_vocab;
    double total, target; /* the sample is the follower that takes the running count past target */
    double sum;
    int32_t token;
} drawing;

static bool draw_visit(void *user, int32_t token, int32_t count) {
    drawing *w = user;
    if (token < 0 || token >= w->n_vocab) {
        w->token = -1; /* an id outside this vocabulary: no distribution */
        return false;
    }
    w->row[token] = (float)(count / w->total);
    if (w->sum <= w->target)
        w->token = token;
    w->sum += count;
    return true;
}

/* Fills a new q row with the context's counts and samples from it. −1: no row is left. */
static int draw_row(const ngram *g, const so_draft_job *job, const so_follow *f, int depth,
                    int32_t *token) {
    const ngram_state *s = job->state;
    int row = so_tree_new_row(job->tree);
    if (row < 0)
        return -1;
    drawing w = {
        .row = so_tree_row(job->tree, row), .n_vocab = job->tree->n_vocab, .total = f->total};
    w.target = so_draft_uniform(&g->base, job, depth, 0) * w.total;
    memset(w.row, 0, (size_t)job->tree->n_vocab * sizeof *w.row);
    so_counts_each(s->counts, f->id, draw_visit, &w);
    *token = w.token;
    return row;
}

/* Adds one guess below `node`; the confidence of a sampled one depends on the counts alone. */
static int extend(const ngram *g, so_draft_job *job, int node, const so_follow *f, int32_t *token) {
    bool draw = g->params.draw && job->temp > 0;
    int row = -1;
    *token = f->best;
    if (draw)
        row = draw_row(g, job, f, job->tree->nodes[node].depth + 1, token);
    float confidence = row < 0 ? so_draft_count_confidence(f->best_count, f->total)
                               : so_draft_count_confidence(f->total, f->total);
    return so_draft_add(job, node, *token, so_draft_kind(row), row, g->base.index,
                        confidence * order_weight(f->order));
}

static void propose_one(const ngram *g, so_draft_job *job) {
    ngram_state *s = job->state;
    if (job->n_tokens > s->n_seen)
        feed(s, job->tokens + s->n_seen, job->n_tokens - s->n_seen);
    int32_t tail[2 * SO_COUNTS_MAX_ORDER]; /* the last tokens of text and guess */
    int n = SO_MIN(job->n_tokens, SO_COUNTS_MAX_ORDER - 1);
    memcpy(tail, job->tokens + job->n_tokens - n, (size_t)n * sizeof *tail);
    for (int node = 0; node >= 0;) {
        so_follow f = so_counts_find(s->counts, tail, n);
        int32_t token;
        if (!f.order || job->tree->nodes[node].depth >= job->max_depth)
            return;
        node = extend(g, job, node, &f, &token);
        if (n == SO_COUNTS_MAX_ORDER - 1)
            memmove(tail, tail + 1, (size_t)--n * sizeof *tail);
        tail[n++] = token;
    }
}

static int ngram_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)err;
    for (int i = 0; i < n_jobs; i++)
        propose_one((const ngram *)d, &jobs[i]);
    return 0;
}

static void ngram_free(so_drafter *d) { free(d); }

static const so_drafter_vt NGRAM_VT = {
    .name = "ngram",
    .free = ngram_free,
    .open = ngram_open,
    .close = ngram_close,
    .propose = ngram_propose,
    .observe = ngram_observe,
};

so_drafter *so_ngram_create(const so_ngram_params *p) {
    ngram *g = SO_NEW(ngram);
    g->base.vt = &NGRAM_VT;
    g->base.recorded = true;
    g->base.draws = p && p->draw;
    g->base.request_only = true;
    g->params = p ? *p : (so_ngram_params){0};
    if (g->params.max_order == 0)
        g->params.max_order = SO_COUNTS_MAX_ORDER;
    if (g->params.window == 0)
        g->params.window = DEFAULT_WINDOW;
    int options[] = {g->params.max_order, g->params.window, g->params.draw};
    if (options[0] != SO_COUNTS_MAX_ORDER || options[1] != DEFAULT_WINDOW || options[2])
        g->base.id = so_hash_bytes(options, sizeof options);
    return &g->base;
}
