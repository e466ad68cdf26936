/* The async thread: runs the batches of a host, those of the drafter that was created last first. async.h
 * describes the whole.
 *
 *   1. take a posted batch
 *   2. X.ahead_begin: catch-up, the rows of the tree, candidates
 *   3. choose the outcomes; publish them (`chosen`)
 *   4. for each level: X.ahead_rows; publish; X.ahead_draw. Points are drawn before the level is
 *      published, sampled guesses after (async.h, step 3)
 *   5. stop when the batch is sealed, or all drafts have their full depth
 *
 * It holds the drafters for one pass at a time, and checks that the batch is not sealed after each
 * time it gets hold of them: the engine seals before X drafts in its time, which moves X's caches.
 *
 * A drafter without ahead_… functions is asked for one chain after each node of the tree: its first
 * guess is the outcome's token, unless the tree has it there. Its guesses are points.
 *
 * A batch that fails, or is given up, leaves the engine without drafts for a round and nothing else.
 * Async thread. */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/rng.h"
#include "draft/async_impl.h"
#include "draft/remote.h"

enum { MAX_Q_FLOATS = 32 << 20, Q_OUTCOMES = 16 }; /* q rows of a batch; per request */

/* --- faults of tests --- */

static double fault_uniform(so_async_host *h) {
    so_rng_key key = {.seed = h->faults.seed, .purpose = SO_RNG_TEST};
    return so_rng_uniform(&key, h->n_draws++);
}

static bool fault(so_async_host *h, double rate) {
    if (!h->has_faults || !(rate > 0) || fault_uniform(h) >= rate)
        return false;
    if (h->faults.happened)
        ++*h->faults.happened;
    return true;
}

static void wait_ms(so_async_host *h, double ms) {
    int64_t end = so_clock_ns() + (int64_t)(ms * 1e6);
    while (so_clock_ns() < end && !atomic_load(&h->halt))
        nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

static void fault_delay(so_async_host *h) {
    if (fault(h, h->faults.delay_rate))
        wait_ms(h, h->faults.delay_ms);
    if (fault(h, h->faults.stop_rate))
        wait_ms(h, h->faults.stop_ms);
}

/* Random tokens in place of a batch's guesses and outcomes. */
static void fault_nonsense(so_async_host *h, so_async_batch *b) {
    if (!fault(h, h->faults.nonsense_rate))
        return;
    for (int i = 0; i < b->n; i++)
        for (int k = 0; k < b->jobs[i].n_outcomes; k++) {
            so_ahead_job *a = &b->jobs[i];
            for (int level = 0; !a->drawn && level < SO_AHEAD_DEPTH; level++)
                a->outcomes[k].token_at[level] =
                    (int32_t)((fault_uniform(h) * 2 - 0.5) * a->tree.n_vocab);
        }
}

/* --- holding the drafters --- */

/* Gets hold of the drafters; the engine goes first. */
static void hold(so_async_host *h) {
    pthread_mutex_lock(&h->lock);
    while (h->busy || h->n_waiting > 0)
        pthread_cond_wait(&h->idle, &h->lock);
    h->busy = true;
    pthread_mutex_unlock(&h->lock);
}

/* The engine may wait for the end of a sealed batch while it has the drafters itself (release_core in
 * async.c), so the wait ends when the batch is sealed. */
static bool hold_unless_sealed(so_async_host *h, const so_async_batch *b) {
    if (atomic_load(&b->sealed))
        return false;
    pthread_mutex_lock(&h->lock);
    while ((h->busy || h->n_waiting > 0) && !atomic_load(&b->sealed))
        pthread_cond_wait(&h->idle, &h->lock);
    bool held = !atomic_load(&b->sealed);
    h->busy |= held;
    pthread_mutex_unlock(&h->lock);
    return held;
}

static void close_state(so_async_state *s) {
    so_drafter *x = s->core->inner;
    if (s->opened)
        x->vt->close(x, s->inner);
    so_async_free_state(s);
}

/* Takes out the first request, with what it asks for. Until then the engine may add to it; after
 * that a closed one belongs to the caller, and a preempted one may be queued again. */
static so_async_state *take_request(so_async_host *h, const so_async_core *only, bool *closed) {
    pthread_mutex_lock(&h->lock);
    so_async_state **at = &h->requests;
    while (*at && only && (*at)->core != only)
        at = &(*at)->next;
    so_async_state *s = *at;
    if (s) {
        *at = s->next;
        *closed = s->closed;
        s->queued = s->preempted = false;
    }
    pthread_mutex_unlock(&h->lock);
    return s;
}

void so_async_serve_requests(so_async_host *h, const so_async_core *only) {
    bool closed = false;
    for (so_async_state *s; (s = take_request(h, only, &closed)) != NULL;) {
        if (closed)
            close_state(s);
        else if (s->opened)
            so_drafter_preempt(s->core->inner, s->inner);
    }
}

/* --- a batch of a drafter that drafts ahead --- */

/* Memory for the q rows of sampled guesses, for both batches when it is first needed. */
static void allocate_rows(so_async_core *c, int depth) {
    size_t least = (size_t)c->o.n_vocab * (size_t)depth;
    size_t all = (size_t)c->o.n_parallel * Q_OUTCOMES * least;
    for (int i = 0; i < SO_ASYNC_BATCHES; i++) {
        so_async_batch *b = &c->batches[i];
        if (b->q_floats >= least)
            continue;
        free(b->q);
        b->q_floats = SO_MAX(SO_MIN(all, (size_t)MAX_Q_FLOATS), least);
        b->q = so_try_alloc(b->q_floats, sizeof *b->q);
        b->q_floats = b->q ? b->q_floats : 0;
    }
}

/* Divides it equally. */
static void give_rows(so_async_core *c, so_async_batch *b) {
    int n = 0, depth = SO_MIN(b->depth, SO_AHEAD_DEPTH);
    size_t chain = (size_t)c->o.n_vocab * (size_t)depth, at = 0;
    for (int i = 0; i < b->n; i++)
        n += b->jobs[i].drawn && !b->jobs[i].skip;
    if (n > 0)
        allocate_rows(c, SO_AHEAD_DEPTH);
    for (int i = 0; i < b->n; i++) {
        so_ahead_job *a = &b->jobs[i];
        if (!a->drawn || a->skip)
            continue;
        size_t n_chains = b->q_floats / (size_t)n / chain;
        a->q = b->q + at;
        a->q_depth = depth;
        a->q_outcomes = (int)SO_MIN(n_chains, (size_t)SO_AHEAD_OUTCOMES);
        a->skip = a->q_outcomes == 0;
        at += (size_t)a->q_outcomes * chain;
    }
}

void so_async_open_jobs(so_async_batch *b) {
    for (int i = 0; i < b->n; i++) {
        so_ahead_job *a = &b->jobs[i];
        if (!a->skip && !so_async_open_inner(b->owners[i]))
            a->skip = true;
        a->job.state = a->skip ? NULL : b->owners[i]->inner;
    }
}

static void report(so_async_core *c, const so_err *err) {
    so_log(c->failed ? SO_LOG_DEBUG : SO_LOG_WARN,
           "async: %s; continuing without its drafts in this round", err->msg);
    c->failed = true;
}

static void release(so_async_core *c, so_async_batch *b, int64_t t) {
    atomic_fetch_add(&b->busy_ns, so_clock_ns() - t);
    so_async_let_go(c->host);
}

/* Step 2; false: no drafts. */
static bool begin(so_async_core *c, so_async_batch *b) {
    so_err err = {0};
    for (bool first = true;; first = false) {
        if (!hold_unless_sealed(c->host, b))
            return false;
        int64_t t = so_clock_ns();
        if (first) {
            so_async_open_jobs(b);
            for (int i = 0; i < b->n; i++)
                if (!b->jobs[i].skip)
                    so_async_give_hidden(b->owners[i], &b->hidden[i]);
            give_rows(c, b);
        }
        int rc = c->inner->vt->ahead_begin(c->inner, b->jobs, b->n, first, &err);
        if (rc < 0) {
            c->inner->vt->ahead_abort(c->inner, b->jobs, b->n);
            report(c, &err);
        }
        release(c, b, t);
        if (rc <= 0)
            return rc == 0;
    }
}

static int n_outcomes(const so_async_batch *b) {
    int n = 0;
    for (int i = 0; i < b->n; i++)
        n += b->jobs[i].skip ? 0 : b->jobs[i].n_outcomes;
    return n;
}

/* Step 4 for one level; false: the batch is over. */
static bool draft_level(so_async_core *c, so_async_batch *b, int level) {
    so_drafter *x = c->inner;
    so_err err = {0};
    fault_delay(c->host);
    if (!hold_unless_sealed(c->host, b))
        return false;
    int64_t t = so_clock_ns();
    int n = n_outcomes(b), rc = x->vt->ahead_rows(x, b->jobs, b->n, level, &err);
    if (rc > 0) {
        x->vt->ahead_draw(x, b->jobs, b->n, level, false);
        if (level == 1)
            fault_nonsense(c->host, b);
        atomic_store(&b->levels, level);
        x->vt->ahead_draw(x, b->jobs, b->n, level, true);
        so_async_observe_level(c, n, so_clock_ms_since(t));
    } else if (rc < 0) {
        x->vt->ahead_abort(x, b->jobs, b->n);
        report(c, &err);
    }
    release(c, b, t);
    return rc > 0;
}

static void run_ahead(so_async_core *c, so_async_batch *b) {
    so_async_host *h = c->host;
    fault_delay(h);
    if (!begin(c, b) || fault(h, h->faults.abandon_rate))
        return;
    so_async_choose(c, b, so_clock_ms_since(b->t_ns));
    atomic_store(&b->chosen, true);
    for (int level = 1; level <= b->depth; level++)
        if (!draft_level(c, b, level) || fault(h, h->faults.abandon_rate))
            return;
}

/* --- a batch of any other drafter --- */

static int write_path(const so_ahead_job *a, so_async_state *s, int node) {
    int n = a->job.n_tokens + a->tree.nodes[node].depth;
    memcpy(s->own + s->n_own, a->job.tokens + s->n_own,
           (size_t)(a->job.n_tokens - s->n_own) * sizeof *s->own);
    s->n_own = a->job.n_tokens;
    for (int i = node, at = n; i > 0; i = a->tree.nodes[i].parent)
        s->own[--at] = a->tree.nodes[i].token;
    return n;
}

/* The guesses of X's first chain after a node become an outcome and its draft. */
static void take_chain(so_ahead_job *a, int node, const so_tree *t) {
    if (t->nodes[0].first < 0)
        return;
    const so_proposal *p = &t->proposals[t->nodes[0].first];
    int32_t token = t->nodes[p->child].token;
    if (so_tree_child(&a->tree, node, token) >= 0)
        return;
    a->candidates[node][0] = (so_ahead_candidate){token, p->confidence};
    a->n_candidates[node] = 1;
    so_ahead_outcome *o = &a->outcomes[a->n_outcomes++];
    *o = (so_ahead_outcome){.node = node, .token = token, .chance = p->confidence};
    for (int k = 0; k < SO_AHEAD_DEPTH; k++)
        o->token_at[k] = -1;
    for (int k = 0, at = p->child; k < SO_AHEAD_DEPTH && t->nodes[at].first >= 0; k++) {
        p = &t->proposals[t->nodes[at].first];
        at = p->child;
        o->token_at[k] = t->nodes[at].token;
        o->confidence[k] = p->confidence;
    }
}

/* Greedy in `reject` (so_draft_inner_job). */
static int draft_chains(so_async_core *c, so_ahead_job *a, so_async_state *s, so_err *err) {
    so_drafter *x = c->inner;
    int rc = SO_OK;
    a->n_nodes = SO_MIN(a->tree.n_nodes, SO_AHEAD_NODES);
    if (a->job.n_tokens > s->n_observed)
        so_drafter_observe(x, s->inner, a->job.tokens + s->n_observed,
                           a->job.n_tokens - s->n_observed);
    s->n_observed = a->job.n_tokens;
    for (int node = 0; node < a->n_nodes && rc == SO_OK; node++) {
        int n = write_path(a, s, node);
        so_draft_job job = a->job;
        so_sample_params greedy = a->sample;
        so_tree_reset(&c->scratch, s->own[n - 1], n - 1);
        job.tokens = s->own;
        job.n_tokens = n;
        job.tree = &c->scratch;
        job.max_depth = SO_AHEAD_DEPTH;
        if (a->drawn) {
            greedy.temp = job.temp = 0;
            job.sample = &greedy;
        }
        a->n_candidates[node] = 0;
        rc = x->vt->propose(x, &job, 1, err);
        if (rc == SO_OK)
            take_chain(a, node, &c->scratch);
    }
    a->drawn = false; /* points */
    return rc;
}

static void run_chains(so_async_core *c, so_async_batch *b) {
    so_async_host *h = c->host;
    so_err err = {0};
    int rc = SO_OK;
    fault_delay(h);
    if (!hold_unless_sealed(h, b))
        return;
    int64_t t = so_clock_ns();
    so_async_open_jobs(b);
    for (int i = 0; i < b->n && rc == SO_OK; i++)
        if (!b->jobs[i].skip)
            rc = draft_chains(c, &b->jobs[i], b->owners[i], &err);
    if (rc < 0)
        report(c, &err);
    release(c, b, t);
    if (rc < 0 || fault(h, h->faults.abandon_rate))
        return;
    fault_nonsense(h, b);
    atomic_store(&b->chosen, true);
    atomic_store(&b->levels, b->depth);
}

/* --- the thread --- */

static so_async_batch *next_batch(so_async_host *h, so_async_core **core) {
    for (so_async_core *c = h->cores; c; c = c->next)
        for (int i = 0; i < SO_ASYNC_BATCHES; i++)
            if (c->batches[i].status == SO_BATCH_POSTED) {
                *core = c;
                return &c->batches[i];
            }
    return NULL;
}

static void run(so_async_core *c, so_async_batch *b) {
    if (c->o.remote)
        so_remote_run(c, b);
    else if (c->inner->vt->ahead_begin)
        run_ahead(c, b);
    else
        run_chains(c, b);
    atomic_store(&b->over, true);
}

void *so_async_thread_main(void *host) {
    so_async_host *h = host;
    so_async_core *c = NULL;
    pthread_mutex_lock(&h->lock);
    while (!h->stop) {
        so_async_batch *b = next_batch(h, &c);
        if (h->requests) {
            pthread_mutex_unlock(&h->lock);
            hold(h);
            so_async_serve_requests(h, NULL);
            so_async_let_go(h);
            pthread_mutex_lock(&h->lock);
        } else if (b) {
            b->status = SO_BATCH_RUNNING;
            pthread_mutex_unlock(&h->lock);
            run(c, b);
            pthread_mutex_lock(&h->lock);
            b->status = SO_BATCH_DONE;
            pthread_cond_broadcast(&h->idle);
        } else {
            pthread_cond_wait(&h->work, &h->lock);
        }
    }
    pthread_mutex_unlock(&h->lock);
    return NULL;
}
