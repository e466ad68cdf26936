/* The engine thread's side of async(X): dispatch, seal, lookup; and the drafter that lets X draft in
 * the engine's time. async.h has the protocol and the argument for its exactness.
 *
 * Owns cores, states and batches. Never waits for the async thread, except with wait=N, in the drafter
 * `sync`, and when a drafter is freed. A lookup compares the round and the tokens of the whole path, not hashes.
 * After creation of a request nothing here allocates, except a copy of its biases at its first
 * dispatch. Thread: the engine thread. */
#include "draft/async.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/mutant.h"
#include "base/rng.h"
#include "draft/async_impl.h"
#include "draft/remote.h"

static const double WINDOW_PART = 0.1; /* weight of a round in window_ms */
static const double FIRST_WINDOW_MS = 10, MAX_WAIT_MS = 1000;

typedef struct so_async_cached {
    so_drafter base;
    so_async_core *core;
    so_drafter_vt vt; /* of the drafter `sync`, under the name of X */
} so_async_cached;

static so_async_core *core_of(const so_drafter *d) { return ((const so_async_cached *)d)->core; }

/* --- host --- */

int so_async_host_create(const so_async_faults *faults, so_async_host **out, so_err *err) {
    so_async_host *h = SO_NEW(so_async_host);
    pthread_mutex_init(&h->lock, NULL);
    pthread_cond_init(&h->work, NULL);
    pthread_cond_init(&h->idle, NULL);
    h->has_faults = faults != NULL;
    if (faults)
        h->faults = *faults;
    int rc = pthread_create(&h->thread, NULL, so_async_thread_main, h);
    if (rc != 0) {
        pthread_mutex_destroy(&h->lock);
        pthread_cond_destroy(&h->work);
        pthread_cond_destroy(&h->idle);
        free(h);
        return so_err_set(err, SO_ELIMIT, "async: its thread cannot be started: %s", strerror(rc));
    }
    *out = h;
    return SO_OK;
}

void so_async_host_free(so_async_host *h) {
    if (!h)
        return;
    SO_ASSERT(!h->cores);
    atomic_store(&h->halt, true);
    pthread_mutex_lock(&h->lock);
    h->stop = true;
    pthread_cond_broadcast(&h->work);
    pthread_mutex_unlock(&h->lock);
    pthread_join(h->thread, NULL);
    SO_ASSERT(!h->requests);
    pthread_mutex_destroy(&h->lock);
    pthread_cond_destroy(&h->work);
    pthread_cond_destroy(&h->idle);
    free(h);
}

void so_async_lock(so_async_host *h) {
    if (h->depth++ > 0)
        return;
    pthread_mutex_lock(&h->lock);
    h->n_waiting++;
    while (h->busy)
        pthread_cond_wait(&h->idle, &h->lock);
    h->n_waiting--;
    h->busy = true;
    pthread_mutex_unlock(&h->lock);
}

void so_async_unlock(so_async_host *h) {
    if (--h->depth == 0)
        so_async_let_go(h);
}

void so_async_let_go(so_async_host *h) {
    pthread_mutex_lock(&h->lock);
    h->busy = false;
    pthread_cond_broadcast(&h->idle);
    pthread_mutex_unlock(&h->lock);
}

/* --- requests --- */

void so_async_free_state(so_async_state *s) {
    free(s->hidden.x);
    free(s->text);
    free(s->expected);
    free(s->source);
    free(s->own);
    free(s->bias);
    free(s);
}

static void open_hidden(so_async_hidden *h, int width) {
    h->x = width > 0 ? SO_NEW_N(float, SO_ASYNC_STATES *width) : NULL;
    for (int i = 0; i < SO_ASYNC_STATES; i++)
        h->pos[i] = -1;
}

static void async_add_hidden(so_drafter *d, void *state, int pos, const float *x) {
    so_async_hidden *h = &((so_async_state *)state)->hidden;
    size_t width = (size_t)core_of(d)->o.d_hidden;
    if (!h->x)
        return;
    memcpy(h->x + (size_t)(pos % SO_ASYNC_STATES) * width, x, width * sizeof *x);
    h->pos[pos % SO_ASYNC_STATES] = pos;
}

void so_async_give_hidden(so_async_state *s, const so_async_hidden *h) {
    size_t width = (size_t)s->core->o.d_hidden;
    for (size_t i = 0; i < SO_ASYNC_STATES && h->x; i++)
        if (h->pos[i] >= 0)
            so_drafter_add_hidden(s->core->inner, s->inner, h->pos[i], h->x + i * width);
}

static int async_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    so_async_core *c = core_of(d);
    so_async_state *s = SO_NEW(so_async_state);
    int n_expected = text->expected ? SO_MAX(text->n_expected, 0) : 0;
    int n_source = text->source ? SO_MAX(text->n_source, 0) : 0;
    s->core = c;
    s->refs = 1;
    s->batch = -1;
    s->cap = SO_MAX(text->max_tokens, text->n_prompt) + SO_TREE_MAX + SO_AHEAD_DEPTH;
    s->text = so_try_alloc((size_t)s->cap, sizeof *s->text);
    s->expected = so_try_alloc((size_t)n_expected, sizeof *s->expected);
    s->source = so_try_alloc((size_t)n_source, sizeof *s->source);
    if (!c->inner->vt->ahead_begin)
        s->own = so_try_alloc((size_t)s->cap, sizeof *s->own);
    open_hidden(&s->hidden, c->o.d_hidden);
    if (!s->text || !s->expected || !s->source || (!c->inner->vt->ahead_begin && !s->own)) {
        so_async_free_state(s);
        return so_err_set(err, SO_ENOMEM, "async: no memory for a text of %d tokens",
                          text->max_tokens);
    }
    if (text->n_prompt > 0)
        memcpy(s->text, text->prompt, (size_t)text->n_prompt * sizeof *s->text);
    if (n_expected > 0)
        memcpy(s->expected, text->expected, (size_t)n_expected * sizeof *s->expected);
    s->n_text = s->n_prompt = text->n_prompt;
    if (n_source > 0)
        memcpy(s->source, text->source, (size_t)n_source * sizeof *s->source);
    s->n_expected = n_expected;
    s->n_source = n_source;
    c->opening = s;
    *state = s;
    return SO_OK;
}

/* X opens the request at its first draft, not at submission: then nobody waits for a pass. */
bool so_async_open_inner(so_async_state *s) {
    so_drafter *x = s->core->inner;
    so_err err = {0};
    if (s->opened || s->broken)
        return s->opened;
    so_draft_text text = {.prompt = s->text,
                          .n_prompt = s->n_prompt,
                          .source = s->n_source > 0 ? s->source : NULL,
                          .n_source = s->n_source,
                          .expected = s->expected,
                          .n_expected = s->n_expected,
                          .max_tokens = s->cap - SO_TREE_MAX - SO_AHEAD_DEPTH};
    s->opened = x->vt->open(x, &text, &s->inner, &err) == SO_OK;
    s->broken = !s->opened;
    s->n_own = 0;
    s->n_observed = s->n_prompt;
    if (s->broken)
        so_log(SO_LOG_WARN, "async: %s; the request has no drafts", err.msg);
    return s->opened;
}

/* Queues the state for the async thread. Call with the host's lock. */
static void queue(so_async_state *s) {
    so_async_host *h = s->core->host;
    if (!s->queued) {
        s->next = h->requests;
        h->requests = s;
        s->queued = true;
    }
    pthread_cond_signal(&h->work);
}

static void seal(so_async_core *c, so_async_batch *b);

/* A batch without requests is sealed, so that the async thread gives it up. */
static void async_close(so_drafter *d, void *state) {
    so_async_state *s = state;
    so_async_core *c = s->core;
    (void)d;
    if (--s->refs > 0)
        return;
    if (s->batch >= 0 && c->batches[s->batch].owners[s->job] == s &&
        --c->batches[s->batch].n_open == 0)
        seal(c, &c->batches[s->batch]);
    pthread_mutex_lock(&c->host->lock);
    if (s->batch >= 0 && c->batches[s->batch].status == SO_BATCH_POSTED &&
        c->batches[s->batch].owners[s->job] == s)
        c->batches[s->batch].jobs[s->job].skip = true;
    s->closed = true;
    queue(s);
    pthread_mutex_unlock(&c->host->lock);
}

static void async_preempt(so_drafter *d, void *state) {
    so_async_state *s = state;
    (void)d;
    pthread_mutex_lock(&s->core->host->lock);
    s->preempted = true;
    queue(s);
    pthread_mutex_unlock(&s->core->host->lock);
}

static void update_text(so_async_state *s, const int32_t *tokens, int n) {
    SO_ASSERT(n <= s->cap);
    if (n > s->n_text) {
        memcpy(s->text + s->n_text, tokens + s->n_text, (size_t)(n - s->n_text) * sizeof *s->text);
        s->n_text = n;
    }
}

/* --- seal --- */

/* From here on nothing of this batch is published. */
static void seal(so_async_core *c, so_async_batch *b) {
    if (b->is_sealed)
        return;
    b->is_sealed = true;
    atomic_store(&b->sealed, true);
    b->n_levels = atomic_load(&b->levels);
    if (c->o.remote)
        so_remote_wake(c->inner);
    double ms = so_clock_ms_since(b->t_ns) - c->waited_ms;
    if (b->n_open > 0) /* otherwise no round follows */
        c->window_ms += (c->window_ms > 0 ? WINDOW_PART : 1) * (ms - c->window_ms);
}

static void seal_all(so_async_core *c) {
    for (int i = 0; i < SO_ASYNC_BATCHES; i++)
        seal(c, &c->batches[i]);
}

/* --- lookup --- */

/* The node at which the round ended, and the token after it; −1: the text is not a continuation of
 * the dispatched one. */
static int end_of_round(const so_ahead_job *a, const so_draft_job *job, int32_t *token) {
    int node = 0, at = a->job.n_tokens;
    for (; at < job->n_tokens - 1; at++) {
        node = so_tree_child(&a->tree, node, job->tokens[at]);
        if (node < 0)
            return -1;
    }
    *token = job->tokens[job->n_tokens - 1];
    return at == job->n_tokens - 1 ? node : -1;
}

static so_async_batch *batch_of(const so_async_core *c, const so_draft_job *job) {
    const so_async_state *s = job->state;
    const so_async_batch *b = s->batch >= 0 ? &c->batches[s->batch] : NULL;
    return b && b->owners[s->job] == s && s->round == job->round ? (so_async_batch *)b : NULL;
}

static double uniform_of(const so_ahead_job *a, int outcome, int level, uint32_t draw) {
    const so_draft_job *job = &a->job;
    uint32_t pos = (uint32_t)(so_ahead_root_pos(a, &a->outcomes[outcome]) + level);
    so_rng_key key = {job->seed, job->choice, pos, SO_RNG_DRAFT, job->round};
    return so_rng_uniform(&key, (uint32_t)a->drafter << 12 | ((uint32_t)(outcome + 1) + draw));
}

int32_t so_ahead_sample(const so_ahead_job *a, int outcome, int level) {
    const float *q = so_ahead_q(a, outcome, level);
    int32_t token = so_sample_pick(q, a->tree.n_vocab, uniform_of(a, outcome, level, 0));
    if (SO_MUTANT(ASYNC_BETTER)) { /* the better of two drafts */
        int32_t other = so_sample_pick(q, a->tree.n_vocab, uniform_of(a, outcome, level, 2048));
        token = other >= 0 && q[other] > q[token] ? other : token;
    }
    return token;
}

/* Adds the published guesses of an outcome to the tree; returns their number. */
static int serve(const so_async_cached *d, const so_ahead_job *a, int outcome, int n_levels,
                 so_draft_job *job) {
    const so_ahead_outcome *o = &a->outcomes[outcome];
    int node = 0, n = 0;
    for (int level = 1; level <= SO_MIN(n_levels, SO_AHEAD_DEPTH); level++) {
        int row = -1;
        int32_t token = o->token_at[level - 1];
        if (token < 0 || job->tree->nodes[node].depth >= job->max_depth ||
            job->tree->n_nodes - 1 >= job->max_nodes)
            break;
        if (a->drawn) {
            row = so_tree_new_row(job->tree);
            if (row < 0)
                break;
            memcpy(so_tree_row(job->tree, row), so_ahead_q(a, outcome, level),
                   (size_t)job->tree->n_vocab * sizeof(float));
            job->tree->row_confidence[row] = o->confidence[level - 1];
            token = so_ahead_sample(a, outcome, level);
            if (SO_MUTANT(ASYNC_LATE) && so_tree_row(job->tree, row)[token] < 0.3f)
                break; /* an unlikely guess comes too late */
        }
        node = so_draft_add(job, node, token, so_draft_kind(row), row, d->base.index,
                            o->confidence[level - 1]);
        if (node < 0)
            break;
        n++;
    }
    return n;
}

static int rank_of(const so_ahead_job *a, int outcome) {
    int rank = 0;
    for (int i = 0; i < a->n_outcomes; i++)
        rank += a->outcomes[i].chance > a->outcomes[outcome].chance;
    return SO_MIN(rank, SO_ASYNC_RANKS - 1);
}

static void look_up(so_async_cached *d, so_draft_job *job, so_async_counts *n) {
    so_async_state *s = job->state;
    so_async_core *c = d->core;
    so_async_batch *b = batch_of(c, job);
    int32_t token = -1;
    n->worker_ms += c->spilled_ms;
    c->spilled_ms = 0;
    if (!b || !atomic_load(&b->chosen) || b->jobs[s->job].n_nodes == 0) {
        n->skipped++;
        s->batch = -1;
        return;
    }
    const so_ahead_job *a = &b->jobs[s->job];
    int64_t busy_ns = atomic_load(&b->busy_ns) / b->n;
    b->counted_ns += busy_ns;
    n->worker_ms += (double)busy_ns * 1e-6;
    int node = end_of_round(a, job, &token), found = -1;
    s->batch = -1; /* a draft is served once */
    if (node >= 0)
        found = so_async_learn(&c->estimates, a, node, token);
    if (SO_MUTANT(ASYNC_OTHER_ROUND) && a->n_outcomes > 0)
        found = a->n_outcomes - 1; /* whatever the text */
    n->rounds++;
    n->outcomes += a->n_outcomes;
    n->drafted += a->n_outcomes * SO_MIN(b->n_levels, b->depth);
    n->absent += found < 0;
    if (found < 0)
        return;
    int served = serve(d, a, found, b->n_levels, job);
    n->served += served;
    n->hits += b->n_levels > 0;
    n->late += b->n_levels == 0;
    if (b->n_levels > 0)
        n->by_rank[rank_of(a, found)]++;
}

/* Whether the outcome that occurred is among those that are drafted for. */
static bool is_drafted_for(const so_ahead_job *a, const so_draft_job *job) {
    int32_t token = -1;
    int node = end_of_round(a, job, &token);
    for (int i = 0; i < a->n_outcomes; i++)
        if (a->outcomes[i].node == node && a->outcomes[i].token == token)
            return true;
    return false;
}

/* For wait=N: until the draft of the job's outcome has N guesses; a miss is not waited for. Given up
 * after MAX_WAIT_MS, and after ten times the usual window. Depends on the text alone, besides time. */
static void wait_for_levels(const so_async_core *c, const so_draft_job *job) {
    const so_async_batch *b = batch_of(c, job);
    double limit = SO_MIN(MAX_WAIT_MS, 10 * SO_MAX(c->window_ms, FIRST_WINDOW_MS));
    if (!b || b->is_sealed)
        return;
    int want = SO_MIN(c->o.wait, b->depth);
    while (atomic_load(&b->levels) < want && !atomic_load(&b->over) &&
           so_clock_ms_since(b->t_ns) < limit) {
        if (atomic_load(&b->chosen) &&
            !is_drafted_for(&b->jobs[((so_async_state *)job->state)->job], job))
            return;
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
    }
}

static int async_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    so_async_core *c = core_of(d);
    int64_t t = so_clock_ns();
    (void)err;
    for (int i = 0; i < n_jobs && c->o.wait > 0; i++)
        wait_for_levels(c, &jobs[i]);
    c->waited_ms = c->o.wait > 0 ? so_clock_ms_since(t) : 0;
    seal_all(c);
    c->waited_ms = 0;
    for (int i = 0; i < n_jobs; i++) {
        so_async_counts n = {0};
        look_up((so_async_cached *)d, &jobs[i], &n);
        so_async_counts_add(&((so_async_state *)jobs[i].state)->counts, &n);
        so_async_counts_add(&core_of(d)->host->totals, &n);
        jobs[i].n_levels = 0;
    }
    return SO_OK;
}

/* --- dispatch --- */

/* The biases of a request never change; the copy outlives the request. */
static bool copy_bias(so_async_state *s, const so_sample_params *p) {
    if (p->n_bias == 0 || s->bias)
        return true;
    s->bias = so_try_alloc((size_t)p->n_bias, sizeof *s->bias);
    if (s->bias)
        memcpy(s->bias, p->bias, (size_t)p->n_bias * sizeof *s->bias);
    return s->bias != NULL;
}

static void copy_tree(so_tree *to, const so_tree *t) {
    *to = (so_tree){.n_nodes = t->n_nodes,
                    .n_proposals = t->n_proposals,
                    .root_pos = t->root_pos,
                    .n_vocab = t->n_vocab};
    memcpy(to->nodes, t->nodes, (size_t)t->n_nodes * sizeof *t->nodes);
    memcpy(to->proposals, t->proposals, (size_t)t->n_proposals * sizeof *t->proposals);
}

static void fill_job(so_async_core *c, so_async_batch *b, const so_draft_job *job) {
    so_async_state *s = job->state;
    so_ahead_job *a = &b->jobs[b->n];
    update_text(s, job->tokens, job->n_tokens);
    if (!job->sample || !copy_bias(s, job->sample))
        return;
    a->job = *job;
    copy_tree(&a->tree, job->tree);
    a->sample = *job->sample;
    a->sample.bias = s->bias;
    a->job.sample = &a->sample;
    a->job.tokens = s->text;
    a->job.tree = &a->tree;
    a->job.terms = NULL;
    a->job.draws = NULL;
    a->job.max_nodes = SO_TREE_MAX - 1;
    a->job.state = NULL; /* X's own, set by the async thread */
    a->drawn = job->tree->max_rows > 0;
    a->skip = false;
    a->q = NULL;
    a->drafter = c->index;
    a->n_nodes = a->n_outcomes = 0;
    b->owners[b->n] = s;
    b->n_open++;
    if (s->hidden.x) {
        size_t floats = SO_ASYNC_STATES * (size_t)c->o.d_hidden;
        memcpy(b->hidden[b->n].x, s->hidden.x, floats * sizeof(float));
        memcpy(b->hidden[b->n].pos, s->hidden.pos, sizeof s->hidden.pos);
    }
    b->depth = SO_MAX(b->depth, SO_MIN(job->max_depth, SO_AHEAD_DEPTH));
    s->job = b->n++;
    s->round = job->round;
}

static int take_batch(so_async_core *c) {
    int free_one = -1;
    for (int i = 0; i < SO_ASYNC_BATCHES; i++) {
        so_async_batch *b = &c->batches[i];
        if (b->status != SO_BATCH_RUNNING) {
            b->status = SO_BATCH_FREE;
            free_one = i;
        }
    }
    return free_one;
}

/* Empties a batch. The time spent on it after it was sealed has not been counted yet. */
static void clear_batch(so_async_core *c, so_async_batch *b) {
    c->spilled_ms += (double)(atomic_load(&b->busy_ns) - b->counted_ns) * 1e-6;
    b->n = b->n_open = b->depth = b->n_levels = 0;
    b->counted_ns = 0;
    b->is_sealed = false;
    atomic_store(&b->busy_ns, 0);
    atomic_store(&b->sealed, false);
    atomic_store(&b->chosen, false);
    atomic_store(&b->levels, 0);
    atomic_store(&b->over, false);
}

static void async_dispatch(so_drafter *d, const so_draft_job *jobs, int n) {
    so_async_core *c = core_of(d);
    so_async_host *h = c->host;
    seal_all(c);
    pthread_mutex_lock(&h->lock);
    int k = take_batch(c);
    pthread_mutex_unlock(&h->lock);
    for (int i = 0; i < n; i++)
        ((so_async_state *)jobs[i].state)->batch = k;
    if (k < 0)
        return; /* both batches are in use: the next round is a miss */
    so_async_batch *b = &c->batches[k];
    clear_batch(c, b);
    b->estimates = c->estimates;
    b->window_ms = c->window_ms > 0 ? c->window_ms : FIRST_WINDOW_MS;
    b->t_ns = so_clock_ns();
    for (int i = 0; i < n && b->n < c->o.n_parallel; i++)
        fill_job(c, b, &jobs[i]);
    pthread_mutex_lock(&h->lock);
    b->status = b->n > 0 ? SO_BATCH_POSTED : SO_BATCH_FREE;
    pthread_cond_signal(&h->work);
    pthread_mutex_unlock(&h->lock);
}

/* --- the drafter `cached` --- */

static void release_core(so_async_core *c) {
    so_async_host *h = c->host;
    if (--c->refs > 0)
        return;
    seal_all(c);
    pthread_mutex_lock(&h->lock);
    pthread_cond_broadcast(&h->idle); /* to the async thread, if it waits for the drafters */
    while (take_batch(c) < 0 || c->batches[0].status != c->batches[1].status)
        pthread_cond_wait(&h->idle, &h->lock); /* until the async thread has given back its batch */
    so_async_core **at = &h->cores;
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    pthread_mutex_unlock(&h->lock);
    so_async_lock(h);
    so_async_serve_requests(h, c);
    so_drafter_free(c->inner);
    so_async_unlock(h);
    for (int i = 0; i < SO_ASYNC_BATCHES; i++) {
        free(c->batches[i].jobs);
        free(c->batches[i].owners);
        for (int k = 0; k < c->o.n_parallel; k++)
            free(c->batches[i].hidden[k].x);
        free(c->batches[i].hidden);
        free(c->batches[i].q);
    }
    so_tree_deinit(&c->scratch);
    free(c);
}

static void async_free(so_drafter *d) {
    release_core(core_of(d));
    free(d);
}

static int async_n_ctx(const so_drafter *d) { return so_drafter_n_ctx(core_of(d)->inner); }

static double async_cache_fraction(const so_drafter *d, int n_tokens) {
    return so_drafter_cache_fraction(core_of(d)->inner, n_tokens);
}

static const so_drafter_vt CACHED_VT = {
    .name = "async",
    .free = async_free,
    .open = async_open,
    .close = async_close,
    .propose = async_propose,
    .n_ctx = async_n_ctx,
    .cache_fraction = async_cache_fraction,
    .preempt = async_preempt,
    .add_hidden = async_add_hidden,
    .dispatch = async_dispatch,
};

void so_async_set_index(so_drafter *cached, so_drafter *sync, int inner) {
    core_of(cached)->index = cached->index;
    core_of(cached)->inner->index = inner;
    if (sync)
        sync->index = inner;
}

bool so_async_is(const so_drafter *d) { return d->vt == &CACHED_VT; }

void so_async_counts_add(so_async_counts *to, const so_async_counts *n) {
    to->rounds += n->rounds;
    to->hits += n->hits;
    to->late += n->late;
    to->absent += n->absent;
    to->skipped += n->skipped;
    to->off += n->off;
    to->outcomes += n->outcomes;
    to->drafted += n->drafted;
    to->served += n->served;
    to->worker_ms += n->worker_ms;
    for (int i = 0; i < SO_ASYNC_RANKS; i++)
        to->by_rank[i] += n->by_rank[i];
}

const so_async_counts *so_async_totals(const so_async_host *h) { return &h->totals; }

void so_async_get_counts(const so_drafter *cached, const void *state, so_async_counts *out) {
    SO_ASSERT(so_async_is(cached));
    *out = ((const so_async_state *)state)->counts;
}

/* --- the drafter `sync` --- */

static int sync_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    so_async_state *s = core_of(d)->opening;
    (void)text;
    (void)err;
    SO_ASSERT(s != NULL && s->refs == 1);
    s->refs++;
    core_of(d)->opening = NULL;
    *state = s;
    return SO_OK;
}

/* Seals first: X's caches move on, so the async thread must not continue a batch. */
static int sync_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    so_async_core *c = core_of(d);
    int rc = SO_OK, n = 0;
    seal_all(c);
    so_async_lock(c->host);
    for (int i = 0; i < n_jobs; i++) {
        so_async_state *s = jobs[i].state;
        update_text(s, jobs[i].tokens, jobs[i].n_tokens);
        n += so_async_open_inner(s);
        if (s->opened)
            so_async_give_hidden(s, &s->hidden);
    }
    for (int i = 0; i < n_jobs && n == n_jobs; i++)
        jobs[i].state = ((so_async_state *)jobs[i].state)->inner;
    if (n == n_jobs)
        rc = c->inner->vt->propose(c->inner, jobs, n_jobs, err);
    so_async_unlock(c->host);
    return rc;
}

static void sync_preempt(so_drafter *d, void *state) { /* `cached` has done it */
    (void)d;
    (void)state;
}

static const so_drafter_vt SYNC_VT = {
    .free = async_free,
    .open = sync_open,
    .close = async_close,
    .propose = sync_propose,
    .n_ctx = async_n_ctx,
    .cache_fraction = async_cache_fraction,
    .preempt = sync_preempt,
};

/* --- creation --- */

static so_async_cached *create_one(so_async_core *c, const so_drafter_vt *vt) {
    so_async_cached *d = SO_NEW(so_async_cached);
    d->base.vt = vt;
    d->base.draws = c->inner->draws && c->inner->vt->ahead_begin != NULL;
    d->base.id = c->inner->id;
    d->base.asynchronous = true;
    d->base.size = c->inner->size;
    d->base.claimed_agreement = c->inner->claimed_agreement;
    d->core = c;
    c->refs++;
    return d;
}

void so_async_create(so_async_host *h, const so_async_opts *o, so_drafter **cached,
                     so_drafter **sync) {
    so_async_core *c = SO_NEW(so_async_core);
    c->host = h;
    c->o = *o;
    c->inner = o->inner;
    so_async_estimates_init(&c->estimates);
    so_tree_init(&c->scratch, o->n_vocab, 0);
    for (int i = 0; i < SO_ASYNC_BATCHES; i++) {
        c->batches[i].jobs = SO_NEW_N(so_ahead_job, o->n_parallel);
        c->batches[i].owners = SO_NEW_N(so_async_state *, o->n_parallel);
        c->batches[i].hidden = SO_NEW_N(so_async_hidden, o->n_parallel);
        for (int k = 0; k < o->n_parallel; k++)
            open_hidden(&c->batches[i].hidden[k], o->d_hidden);
        c->batches[i].is_sealed = true;
    }
    *cached = &create_one(c, &CACHED_VT)->base;
    (*cached)->wants_target_hidden = o->d_hidden > 0;
    *sync = NULL;
    if (o->sync) {
        so_async_cached *d = create_one(c, &SYNC_VT);
        d->vt = SYNC_VT;
        d->vt.name = o->inner->vt->name;
        d->base.vt = &d->vt;
        d->base.draws = o->inner->draws;
        d->base.has_cost = o->inner->has_cost;
        d->base.is_model = o->inner->is_model;
        d->base.backend = o->inner->backend;
        d->base.recorded = o->inner->recorded;
        d->base.uses_terms = o->inner->uses_terms;
        d->base.levels_per_pass = o->inner->levels_per_pass;
        d->base.tree_nodes = o->inner->tree_nodes;
        *sync = &d->base;
    }
    pthread_mutex_lock(&h->lock);
    c->next = h->cores;
    h->cores = c;
    pthread_mutex_unlock(&h->lock);
}
