/* A drafter of known quality, for measurements: right with probability alpha at every position.
 *
 * It gets the target's plain output as `expected`. Whether it is right at a position is keyed by
 * (seed, choice, position) and not by the round: no guess after the first wrong one of a chain is
 * tested, and the next chain starts after that position, so every position is tested once. The
 * outcomes are then independent with probability alpha, as the formulas assume. A wrong guess is a
 * token that differs from the right one; guesses after a wrong one are wrong, too. Once the output
 * differs from the expected text, the oracle makes no guesses. Guesses are points.
 *
 * Cost of a draft model. With an inner drafter, `oracle(0.8,model)`, every draft first runs the
 * draft model for as many guesses as the oracle will make, and then replaces its guesses. So a draft
 * takes the model's time, catch-up and rollback included, while acceptance is simulated: this
 * measures what a pair of models would gain at a given alpha, when no pair with this alpha is at
 * hand. The model's cache is taken as that of the replaced guesses (so_drafter_vt.replace), as if it
 * had guessed them. If the model stops early, so does the oracle.
 *
 * Drafting ahead. `async(oracle(0.8,hit=0.7,model),fan=8)` simulates a hit rate, too. The model drafts
 * ahead as usual (model_ahead.c), for as many outcomes, in the same passes. The oracle knows how the
 * round will end. With probability `hit`, keyed by the position, it makes this end the model's likeliest
 * candidate, and otherwise removes it from the candidates; all others get the lowest chance. The guesses
 * of the draft for this end are replaced by guesses that are right with probability alpha, as in the
 * engine's time, and the model is fed them, so that its cache has what is accepted. With a number of
 * outcomes that async() chooses itself (no fan=) one would suffice: give the number that the real pair
 * needs for its hit rate. Guesses are points, in `reject`, too. Thread: who holds the drafter. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/ahead.h"
#include "draft/drafters.h"

typedef struct oracle {
    so_drafter base;
    double alpha, hit;
    so_drafter *model;  /* run for its cost; NULL: none */
    int n_vocab;        /* of its trees */
    so_draft_job *jobs; /* [jobs_cap] of the model */
    int jobs_cap, n_open;
    so_ahead_job *ahead; /* [ahead_cap] the model's part of drafting ahead */
    int ahead_cap;
} oracle;

typedef struct oracle_state {
    int32_t *expected;
    int n_expected, n_prompt;
    int n_same; /* output tokens equal to the expected ones */
    int n_seen; /* output tokens */
    /* With a model: */
    void *model;
    so_tree tree; /* of its guesses, which are not used */
    so_sample_params greedy;
} oracle_state;

static void feed(oracle_state *s, const int32_t *tokens, int n) {
    for (int i = 0; i < n; i++, s->n_seen++)
        if (s->n_same == s->n_seen && s->n_seen < s->n_expected &&
            tokens[i] == s->expected[s->n_seen])
            s->n_same++;
}

static void free_state(oracle_state *s) {
    so_tree_deinit(&s->tree);
    free(s->expected);
    free(s);
}

static int open_model(oracle *o, oracle_state *s, const so_draft_text *text, so_err *err) {
    if (!o->model)
        return SO_OK;
    so_tree_init(&s->tree, o->n_vocab, 0);
    int rc = o->model->vt->open(o->model, text, &s->model, err);
    if (rc == SO_OK && ++o->n_open > o->jobs_cap) { /* here, so that propose allocates nothing */
        o->jobs_cap = o->n_open;
        o->jobs = so_realloc(o->jobs, (size_t)o->jobs_cap * sizeof *o->jobs);
    }
    return rc;
}

static int oracle_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    int n = text->expected ? SO_MAX(text->n_expected, 0) : 0;
    oracle_state *s = SO_NEW(oracle_state);
    s->expected = so_try_alloc((size_t)n, sizeof *s->expected);
    int rc = s->expected
                 ? open_model((oracle *)d, s, text, err)
                 : so_err_set(err, SO_ENOMEM, "oracle: no memory for %d expected tokens", n);
    if (rc != SO_OK) {
        free_state(s);
        return rc;
    }
    if (n > 0)
        memcpy(s->expected, text->expected, (size_t)n * sizeof *s->expected);
    s->n_expected = n;
    s->n_prompt = text->n_prompt;
    *state = s;
    return SO_OK;
}

static void oracle_close(so_drafter *d, void *state) {
    oracle *o = (oracle *)d;
    oracle_state *s = state;
    if (o->model) {
        o->model->vt->close(o->model, s->model);
        o->n_open--;
    }
    free_state(s);
}

static void oracle_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    const oracle *o = (const oracle *)d;
    oracle_state *s = state;
    feed(s, tokens, n);
    if (o->model)
        so_drafter_observe(o->model, s->model, tokens, n);
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

/* Feeds tokens that came without observe. Returns how many expected tokens follow; 0: none, or the
 * output is not the expected one. */
static int n_known(const so_draft_job *job) {
    oracle_state *s = job->state;
    int seen = s->n_prompt + s->n_seen;
    if (job->n_tokens > seen)
        feed(s, job->tokens + seen, job->n_tokens - seen);
    return s->n_same == s->n_seen ? s->n_expected - s->n_seen : 0;
}

/* Adds a chain of at most n guesses. Returns their number; `tokens` gets them. */
static int add_chain(const oracle *o, const so_draft_job *job, int n, int32_t *tokens) {
    const oracle_state *s = job->state;
    bool right = true; /* so far in this chain */
    for (int node = 0, i = 0; i < n; i++) {
        int pos = s->n_prompt + s->n_seen + i;
        int32_t token = s->expected[s->n_seen + i];
        if (token < 0 || token >= job->tree->n_vocab)
            return i;
        right = right && keyed(job, pos, 0) < o->alpha;
        if (!right)
            token = other_token(job, pos, token);
        node = so_draft_add(job, node, token, SO_Q_POINT, -1, o->base.index, (float)o->alpha);
        if (node < 0)
            return i;
        tokens[i] = token;
    }
    return n;
}

/* Guesses that the model has to make for a job; 0: it is not run. */
static int n_wanted(const so_draft_job *job) {
    int n = SO_MIN(SO_MIN(job->max_depth, job->max_nodes - (job->tree->n_nodes - 1)),
                   SO_TREE_MAX - job->tree->n_nodes);
    return SO_MAX(SO_MIN(n, n_known(job)), 0);
}

static int propose_with_model(oracle *o, so_draft_job *jobs, int n_jobs, so_err *err) {
    int32_t tokens[SO_TREE_MAX];
    int n = 0;
    SO_ASSERT(n_jobs <= o->jobs_cap);
    for (int i = 0; i < n_jobs; i++) {
        oracle_state *s = jobs[i].state;
        int want = n_wanted(&jobs[i]);
        so_tree_reset(&s->tree, 0, 0);
        if (want == 0)
            continue;
        o->jobs[n] = so_draft_inner_job(&jobs[i], s->model, &s->tree, &s->greedy);
        o->jobs[n].max_depth = o->jobs[n].max_nodes = want;
        n++;
    }
    int rc = n > 0 ? o->model->vt->propose(o->model, o->jobs, n, err) : SO_OK;
    for (int i = 0, k = 0; i < n_jobs && rc == SO_OK; i++) {
        oracle_state *s = jobs[i].state;
        if (k == n || o->jobs[k].tree != &s->tree)
            continue;
        jobs[i].n_levels = o->jobs[k].n_levels;
        jobs[i].n_catch_up = o->jobs[k].n_catch_up;
        jobs[i].n_passes = o->jobs[k].n_passes;
        jobs[i].levels_per_pass = o->jobs[k].levels_per_pass;
        k++;
        int n_guesses = add_chain(o, &jobs[i], s->tree.n_nodes - 1, tokens);
        so_drafter_replace(o->model, s->model, tokens, n_guesses);
    }
    return rc;
}

static int oracle_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    int32_t tokens[SO_TREE_MAX];
    if (((oracle *)d)->model)
        return propose_with_model((oracle *)d, jobs, n_jobs, err);
    for (int i = 0; i < n_jobs; i++)
        add_chain((const oracle *)d, &jobs[i], SO_MIN(n_known(&jobs[i]), SO_TREE_MAX), tokens);
    return SO_OK;
}

/* --- drafting ahead --- */

/* The end of the round that the job's tree is verified in: index in `expected` of the token after the
 * accepted path, and its node; −1: not known. */
static int end_of_round(const so_ahead_job *a, int *node) {
    const oracle_state *s = a->job.state;
    int known = n_known(&a->job), at = s->n_seen, child; /* n_known moves n_seen */
    *node = 0;
    if (known == 0)
        return -1;
    while (at < s->n_expected && (child = so_tree_child(&a->tree, *node, s->expected[at])) >= 0) {
        *node = child;
        at++;
    }
    return at < s->n_expected ? at : -1;
}

static void start_ahead(const so_ahead_job *a, so_ahead_job *model) {
    const oracle_state *s = a->job.state;
    *model = *a;
    model->job.tree = &model->tree;
    model->job.sample = &model->sample;
    model->job.state = a->skip ? NULL : s->model;
    if (a->drawn)
        model->sample.temp = model->job.temp = 0;
    model->drawn = false;
}

/* The model's candidates, with the round's end as the first one after its node, or without it. */
static void set_candidates(const oracle *o, so_ahead_job *a, so_ahead_job *model) {
    const oracle_state *s = a->job.state;
    int node, at = end_of_round(a, &node);
    bool hit = at >= 0 && node < model->n_nodes && keyed(&a->job, s->n_prompt + at, 2) < o->hit;
    for (int i = 0; i < model->n_nodes; i++)
        for (int k = 0; k < model->n_candidates[i]; k++) {
            so_ahead_candidate *c = &model->candidates[i][k];
            c->chance = 0;
            if (at >= 0 && i == node && c->token == s->expected[at])
                c->token = other_token(&a->job, s->n_prompt + at, c->token);
        }
    if (hit) {
        model->candidates[node][0] = (so_ahead_candidate){s->expected[at], 1};
        model->n_candidates[node] = SO_MAX(model->n_candidates[node], 1);
    }
    a->n_nodes = model->n_nodes;
    memcpy(a->n_candidates, model->n_candidates, sizeof a->n_candidates);
    memcpy(a->candidates, model->candidates, sizeof a->candidates);
}

static int oracle_ahead_begin(so_drafter *d, so_ahead_job *jobs, int n, bool first, so_err *err) {
    oracle *o = (oracle *)d;
    if (n > o->ahead_cap) {
        o->ahead = so_realloc(o->ahead, (size_t)n * sizeof *o->ahead);
        o->ahead_cap = n;
    }
    for (int i = 0; i < n && first; i++) {
        start_ahead(&jobs[i], &o->ahead[i]);
        jobs[i].drawn = false;
    }
    int rc = o->model->vt->ahead_begin(o->model, o->ahead, n, first, err);
    for (int i = 0; i < n && rc == 0; i++) {
        jobs[i].skip |= o->ahead[i].skip;
        if (!jobs[i].skip)
            set_candidates(o, &jobs[i], &o->ahead[i]);
    }
    return rc;
}

static int oracle_ahead_rows(so_drafter *d, so_ahead_job *jobs, int n, int level, so_err *err) {
    oracle *o = (oracle *)d;
    for (int i = 0; i < n && level == 1; i++) {
        o->ahead[i].n_outcomes = jobs[i].n_outcomes;
        memcpy(o->ahead[i].outcomes, jobs[i].outcomes, sizeof jobs[i].outcomes);
    }
    return o->model->vt->ahead_rows(o->model, o->ahead, n, level, err);
}

/* The guess of a level of the draft for the round's end; −1: the expected text has none. */
static int32_t guess_at(const oracle *o, const so_draft_job *job, int end, int level) {
    const oracle_state *s = job->state;
    bool right = true;
    if (end + level >= s->n_expected)
        return -1;
    for (int k = 1; k <= level; k++)
        right = right && keyed(job, s->n_prompt + end + k, 0) < o->alpha;
    int32_t token = s->expected[end + level];
    return right ? token : other_token(job, s->n_prompt + end + level, token);
}

static void take_level(const oracle *o, so_ahead_job *a, so_ahead_job *model, int level) {
    const oracle_state *s = a->job.state;
    int node, end = end_of_round(a, &node);
    for (int k = 0; k < a->n_outcomes; k++) {
        so_ahead_outcome *from = &model->outcomes[k], *to = &a->outcomes[k];
        if (from->done)
            continue;
        if (end >= 0 && to->node == node && to->token == s->expected[end]) {
            int32_t token = guess_at(o, &a->job, end, level);
            from->done = token < 0;
            from->last = from->sampled[level - 1] = from->token_at[level - 1] = token;
            from->confidence[level - 1] = (float)o->alpha;
        }
        to->token_at[level - 1] = from->token_at[level - 1];
        to->confidence[level - 1] = from->confidence[level - 1];
    }
}

static void oracle_ahead_draw(so_drafter *d, so_ahead_job *jobs, int n, int level, bool drawn) {
    oracle *o = (oracle *)d;
    if (drawn)
        return;
    o->model->vt->ahead_draw(o->model, o->ahead, n, level, false);
    for (int i = 0; i < n; i++)
        if (!jobs[i].skip && !o->ahead[i].skip)
            take_level(o, &jobs[i], &o->ahead[i], level);
}

static void oracle_ahead_abort(so_drafter *d, so_ahead_job *jobs, int n) {
    const oracle *o = (const oracle *)d;
    o->model->vt->ahead_abort(o->model, o->ahead, n);
    for (int i = 0; i < n; i++)
        jobs[i].skip = true;
}

/* --- what the model needs --- */

static void oracle_add_hidden(so_drafter *d, void *state, int pos, const float *x) {
    const oracle *o = (const oracle *)d;
    if (o->model)
        so_drafter_add_hidden(o->model, ((oracle_state *)state)->model, pos, x);
}

static void oracle_preempt(so_drafter *d, void *state) {
    const oracle *o = (const oracle *)d;
    if (o->model)
        so_drafter_preempt(o->model, ((oracle_state *)state)->model);
}

static int oracle_n_ctx(const so_drafter *d) {
    const oracle *o = (const oracle *)d;
    return o->model ? so_drafter_n_ctx(o->model) : 0;
}

static double oracle_cache_fraction(const so_drafter *d, int n_tokens) {
    const oracle *o = (const oracle *)d;
    return o->model ? so_drafter_cache_fraction(o->model, n_tokens) : 0;
}

static void oracle_free(so_drafter *d) {
    oracle *o = (oracle *)d;
    so_drafter_free(o->model);
    free(o->jobs);
    free(o->ahead);
    free(o);
}

#define COMMON                                                                             \
    .name = "oracle", .free = oracle_free, .open = oracle_open, .close = oracle_close,     \
    .propose = oracle_propose, .observe = oracle_observe, .add_hidden = oracle_add_hidden, \
    .n_ctx = oracle_n_ctx, .cache_fraction = oracle_cache_fraction, .preempt = oracle_preempt
static const so_drafter_vt ORACLE_VT = {COMMON};

static const so_drafter_vt AHEAD_VT = {
    COMMON,
    .ahead_begin = oracle_ahead_begin,
    .ahead_rows = oracle_ahead_rows,
    .ahead_draw = oracle_ahead_draw,
    .ahead_abort = oracle_ahead_abort,
};

so_drafter *so_oracle_create(double alpha, double hit, so_drafter *model, int n_vocab) {
    SO_ASSERT(alpha >= 0 && alpha <= 1);
    oracle *o = SO_NEW(oracle);
    bool ahead = hit >= 0 && model && model->vt->ahead_begin;
    o->base.vt = ahead ? &AHEAD_VT : &ORACLE_VT;
    o->hit = hit;
    o->base.request_only = !model || model->request_only;
    o->alpha = alpha;
    o->model = model;
    o->n_vocab = n_vocab;
    if (model) { /* its costs are the model's; its acceptance is never recorded */
        o->base.has_cost = o->base.is_model = true;
        o->base.backend = model->backend;
        o->base.size = model->size;
        o->base.levels_per_pass = model->levels_per_pass;
        o->base.id = model->id;
        o->base.wants_target_hidden = model->wants_target_hidden;
    }
    return &o->base;
}
