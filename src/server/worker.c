/* See worker.h.
 *
 *   loop:  1. take submitted jobs; sleep here if there is no job at all
 *          2. submit their choices to the engine, forward cancellations
 *          3. one engine step
 *          4. update metrics, free finished requests, wake connections: once per step, not per token
 *
 * An error in one job ends only that job. A failed pass ends the requests that were running, each
 * with the error, and the loop continues. If the device is lost, the state says so. */
#include "server/worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"

struct so_worker {
    so_worker_opts o;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;

    /* guarded by the lock */
    so_worker_state state;
    so_err err;
    so_job *queue; /* submitted jobs, in order */
    int n_live;    /* choices submitted and not finished */
    int n_jobs;
    bool quit;
    bool ending; /* all jobs end with the error `why` */
    char why[160];
    double job_seconds;    /* moving average of a choice's time, for Retry-After */
    so_engine_stats stats; /* after the last step */
    size_t device_free, device_total;

    /* engine thread */
    so_serving serving; /* constant from READY on */
    so_engine *engine;
    so_job *live;        /* jobs submitted to the engine */
    so_step_info step;   /* the last step */
    int64_t t_device_ns; /* when the device was asked for its memory; 0: never */
};

/* --- callbacks of the engine --- */

static bool on_event(void *user, const so_event *ev) {
    so_choice *c = user;
    so_job *j = c->job;
    pthread_mutex_lock(&j->lock);
    so_choice_add_token(c, ev, so_clock_ns());
    so_choice_add_scores(c, ev->req);
    if (ev->finish != SO_FINISH_NONE) {
        c->finish = ev->finish;
        c->err = *so_request_error(ev->req);
        c->stats = *so_request_get_stats(ev->req);
        if (c->t_first_ns) /* the engine counts from submission, the API from arrival */
            c->stats.ttft_ms = (double)(c->t_first_ns - j->t_created_ns) * 1e-6;
        c->label = so_figures_label(ev->req);
        so_choice_trim_round(c);
        c->has_nonce = so_request_nonce(ev->req, &c->nonce);
        so_choice_add_hypotheses(c, ev->req, so_clock_ns());
    }
    pthread_mutex_unlock(&j->lock);
    j->dirty = true;
    return !j->cancelled;
}

static void on_round(void *user, const so_round *round) {
    so_choice *c = user;
    pthread_mutex_lock(&c->job->lock);
    so_choice_add_round(c, round);
    pthread_mutex_unlock(&c->job->lock);
}

static void on_step(void *user, const so_step_info *s) {
    so_worker *w = user;
    w->step = *s;
    so_metrics_step(w->o.metrics, s);
}

/* --- submission to the engine --- */

int so_serving_room(const so_serving *sv, size_t n_prompt) {
    bool source = so_model_hparams(sv->b->model)->n_enc_layers > 0;
    return sv->n_room - (source ? 1 : (int)n_prompt);
}

static void request_opts(const so_worker *w, so_choice *c, so_request_opts *o) {
    so_job *j = c->job;
    const so_api_request *rq = &j->rq;
    const so_tokens *prompt = &j->prompts[c->prompt];
    int room = so_serving_room(&w->serving, prompt->len);
    *o =
        (so_request_opts){.prompt = prompt->ids,
                          .n_prompt = (int)prompt->len,
                          .continues = rq->kind == SO_API_COMPLETION || rq->end == SO_CHAT_CONTINUE,
                          .sample = rq->sample,
                          .max_tokens = rq->max_tokens > room ? -1 : rq->max_tokens,
                          .priority = rq->priority,
                          .ignore_end = rq->ignore_eos,
                          .min_tokens = rq->min_tokens,
                          .stop_tokens = rq->stop_tokens,
                          .n_stop_tokens = (int)rq->n_stop_tokens,
                          .bad_words = j->bad_words,
                          .n_bad_words = j->n_bad_words,
                          .stops = rq->stops,
                          .n_stops = rq->n_stops,
                          .n_logprobs = rq->logprobs ? SO_MAX(rq->n_top, 1) : 0,
                          .score_prompt = so_job_scores(j) && c == so_choice_scorer(c),
                          .spec = j->spec,
                          .beams = rq->beams,
                          .on_event = on_event,
                          .on_round = on_round,
                          .user = c};
    o->sample.seed = j->seed;
    o->has_nonce = rq->has_nonce;
    o->nonce = rq->nonce;
    o->sample.choice = (uint32_t)(c->index % rq->n);
    o->spec.expected = j->expected.ids;
    o->spec.n_expected = (int)j->expected.len;
    int n_vocab = so_model_hparams(w->serving.b->model)->n_vocab;
    c->n_each = o->n_logprobs ? 1 + SO_MIN(o->n_logprobs, n_vocab) : 0; /* as in the engine */
}

static int submit_choice(so_worker *w, so_choice *c, so_err *err) {
    so_request_opts o;
    request_opts(w, c, &o);
    const so_request *first = so_choice_scorer(c)->req;
    if (first && !o.has_nonce) /* choices of a prompt share a nonce and differ by sample.choice */
        o.has_nonce = so_request_nonce(first, &o.nonce);
    int rc = so_engine_submit(w->engine, &o, &c->req, err);
    if (rc == SO_ELIMIT && c->job->spec_is_default && o.spec.drafter) {
        /* The draft model's context is too short, and the request did not ask for the draft. */
        o.spec = (so_spec_opts){0};
        rc = so_engine_submit(w->engine, &o, &c->req, err);
    }
    return rc;
}

static void set_error(so_job *j, const so_err *err) {
    pthread_mutex_lock(&j->lock);
    if (j->err.status == 0)
        so_api_fail_err(&j->err, err);
    pthread_mutex_unlock(&j->lock);
}

/* All choices or none: if one is refused, those submitted before it are dropped. */
static void start_job(so_worker *w, so_job *j) {
    so_err err = {0};
    int rc = SO_OK;
    for (int i = 0; i < j->n_choices && rc == SO_OK; i++)
        if (!so_choice_shares(&j->choices[i]))
            rc = submit_choice(w, &j->choices[i], &err);
    if (rc != SO_OK) {
        set_error(j, &err);
        for (int i = 0; i < j->n_choices; i++) {
            so_request_free(j->choices[i].req);
            j->choices[i].req = NULL;
        }
        j->n_done = j->n_choices;
    }
    pthread_mutex_lock(&j->lock);
    j->state = SO_JOB_ACCEPTED;
    j->t_accepted_ns = so_clock_ns();
    pthread_mutex_unlock(&j->lock);
    j->dirty = true;
}

static void cancel_requests(so_job *j) {
    for (int i = 0; i < j->n_choices; i++)
        if (j->choices[i].req)
            so_request_cancel(j->choices[i].req);
}

static void pass_on_cancels(so_worker *w, bool ending, const char *why) {
    for (so_job *j = w->live; j; j = j->next) {
        pthread_mutex_lock(&j->lock);
        if (ending && j->err.status == 0)
            so_api_fail(&j->err, 503, "stopping", NULL, "%s", why);
        pthread_mutex_unlock(&j->lock);
        if (j->cancelled || ending)
            cancel_requests(j);
    }
}

/* --- after a step --- */

static void count_tokens(so_worker *w, so_choice *c) {
    int n = c->n_tokens - c->n_counted;
    if (n == 0)
        return;
    if (c->n_counted == 0)
        so_metrics_first(w->o.metrics, (double)(c->t_last_ns - c->job->t_created_ns) * 1e-9);
    so_metrics_tokens(w->o.metrics, n,
                      c->n_counted ? (double)(c->t_last_ns - c->t_counted_ns) * 1e-9 : -1);
    c->n_counted = c->n_tokens;
    c->t_counted_ns = c->t_last_ns;
}

static void end_choice(so_worker *w, so_choice *c) {
    double seconds = so_clock_ms_since(c->job->t_created_ns) * 1e-3;
    so_metrics_finish(w->o.metrics, c->finish, &c->stats, seconds);
    so_request_free(c->req);
    c->req = NULL;
    c->counted_end = true;
    c->job->n_done++;
    pthread_mutex_lock(&w->lock);
    w->n_live--;
    double busy = (c->stats.prompt_ms + c->stats.predicted_ms) * 1e-3;
    w->job_seconds += 0.1 * (busy - w->job_seconds);
    pthread_mutex_unlock(&w->lock);
}

/* Reads n_tokens and `finish` without the job's lock: only this thread writes them. */
static void sweep_job(so_worker *w, so_job *j) {
    for (int i = 0; i < j->n_choices; i++) {
        so_choice *c = &j->choices[i];
        count_tokens(w, c);
        if (c->req)
            so_metrics_guesses(w->o.metrics, so_request_get_stats(c->req), &c->counted);
        if (c->finish != SO_FINISH_NONE && !c->counted_end)
            end_choice(w, c);
    }
    if (j->dirty)
        so_job_notify(j, &w->step, j->n_done == j->n_choices);
    j->dirty = false;
}

static void sweep(so_worker *w) {
    for (so_job **at = &w->live; *at;) {
        so_job *j = *at;
        sweep_job(w, j);
        if (j->n_done < j->n_choices) {
            at = &j->next;
            continue;
        }
        *at = j->next;
        pthread_mutex_lock(&w->lock);
        w->n_jobs--;
        pthread_mutex_unlock(&w->lock);
        so_job_release(j);
    }
}

/* --- the loop --- */

/* Moves submitted jobs to the live list. False: the thread is to end. */
static bool take(so_worker *w, bool *ending, char why[160]) {
    pthread_mutex_lock(&w->lock);
    while (!w->queue && !w->live && !w->quit)
        pthread_cond_wait(&w->wake, &w->lock);
    so_job *fresh = w->queue;
    w->queue = NULL;
    *ending = w->ending;
    memcpy(why, w->why, sizeof w->why);
    bool go_on = !w->quit || w->live || fresh;
    pthread_mutex_unlock(&w->lock);
    so_job **at = &w->live;
    while (*at)
        at = &(*at)->next;
    *at = fresh;
    for (so_job *j = fresh; j; j = j->next) {
        int n = j->n_choices;
        start_job(w, j);
        if (j->n_done == n) { /* refused by the engine: its choices never run */
            pthread_mutex_lock(&w->lock);
            w->n_live -= n;
            pthread_mutex_unlock(&w->lock);
        }
    }
    return go_on;
}

/* Here and not when metrics are read, because only this thread may use the backend. */
static void publish_memory(so_worker *w) {
    so_backend *b = so_model_backend(w->serving.b->model);
    size_t n_free = 0, n_total = 0;
    so_err err = {0};
    if (!b->vt->memory || (w->t_device_ns && so_clock_ms_since(w->t_device_ns) < 1000))
        return;
    w->t_device_ns = so_clock_ns();
    if (b->vt->memory(b, &n_free, &n_total, &err) != SO_OK)
        return;
    pthread_mutex_lock(&w->lock);
    w->device_free = n_free;
    w->device_total = n_total;
    pthread_mutex_unlock(&w->lock);
}

static void publish_stats(so_worker *w) {
    so_engine_stats s;
    so_engine_get_stats(w->engine, &s);
    pthread_mutex_lock(&w->lock);
    w->stats = s;
    pthread_mutex_unlock(&w->lock);
    publish_memory(w);
}

static void set_state(so_worker *w, so_worker_state s, const so_err *err) {
    pthread_mutex_lock(&w->lock);
    w->state = s;
    if (err)
        w->err = *err;
    pthread_mutex_unlock(&w->lock);
    w->o.on_state(w->o.state_user);
}

static void step(so_worker *w) {
    so_err err = {0}, lost = {0};
    if (so_engine_step(w->engine, &err) >= 0)
        return;
    so_log(SO_LOG_ERROR, "a pass failed: %s", err.msg);
    if (so_worker_get_state(w) == SO_WORKER_LOST ||
        so_engine_check_device(w->engine, &lost) == SO_OK)
        return;
    so_log(SO_LOG_ERROR, "the device is lost: %s; restart the server", lost.msg);
    set_state(w, SO_WORKER_LOST, &lost);
}

static void serve(so_worker *w) {
    char why[160];
    bool ending;
    while (take(w, &ending, why)) {
        pass_on_cancels(w, ending, why);
        if (w->live)
            step(w);
        publish_stats(w); /* before sweep(), which wakes clients that may read them */
        sweep(w);
    }
}

static int room_of(so_worker *w) {
    int64_t cache = (int64_t)w->stats.pages_total * SO_KV_PAGE;
    return (int)SO_MIN(cache, w->serving.eo.n_ctx);
}

/* The server's --spec may name files. A request that never runs makes the engine open them, so a
 * bad file fails the start and not the first client's request. */
static int check_spec(so_worker *w, so_err *err) {
    const int32_t token = 0;
    so_request *r = NULL;
    so_request_opts o = {.prompt = &token,
                         .n_prompt = 1,
                         .sample = w->serving.sample,
                         .max_tokens = 0,
                         .spec = w->serving.spec};
    int rc = so_engine_submit(w->engine, &o, &r, err);
    so_request_free(r);
    return rc;
}

static void *run(void *arg) {
    so_worker *w = arg;
    so_err err = {0};
    int rc = w->o.load(w->o.load_user, &w->serving, &err);
    w->serving.eo.on_step = on_step;
    w->serving.eo.step_user = w;
    if (rc == SO_OK)
        rc = so_engine_create(w->serving.b->model, w->serving.b->tok, &w->serving.eo, &w->engine,
                              &err);
    if (rc == SO_OK && (rc = check_spec(w, &err)) != SO_OK) {
        so_engine_free(w->engine);
        w->engine = NULL;
    }
    if (rc != SO_OK) {
        err.code = rc;
        set_state(w, SO_WORKER_FAILED, &err);
        return NULL;
    }
    publish_stats(w);
    w->serving.n_room = room_of(w);
    set_state(w, SO_WORKER_READY, NULL);
    serve(w);
    so_engine_free(w->engine);
    set_state(w, SO_WORKER_STOPPED, NULL);
    return NULL;
}

/* --- called by other threads --- */

so_worker *so_worker_create(const so_worker_opts *o) {
    so_worker *w = SO_NEW(so_worker);
    w->o = *o;
    w->job_seconds = 1;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    SO_ASSERT_OP(pthread_create(&w->thread, NULL, run, w), ==, 0);
    return w;
}

void so_worker_free(so_worker *w) {
    if (!w)
        return;
    so_worker_end_all(w, "the server is stopping");
    pthread_mutex_lock(&w->lock);
    w->quit = true;
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
    pthread_join(w->thread, NULL);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

so_worker_state so_worker_get_state(so_worker *w) {
    pthread_mutex_lock(&w->lock);
    so_worker_state s = w->state;
    pthread_mutex_unlock(&w->lock);
    return s;
}

void so_worker_error(so_worker *w, so_err *out) {
    pthread_mutex_lock(&w->lock);
    *out = w->err;
    pthread_mutex_unlock(&w->lock);
}

const so_serving *so_worker_serving(const so_worker *w) { return &w->serving; }

/* Seconds until a place in the queue may be free, from 1 to 60: the mean time of a choice, times
 * the number of unfinished choices plus one, divided by the number that run in parallel. */
static int estimate_wait(const so_worker *w) {
    double s = w->job_seconds * (w->n_live + 1) / w->serving.eo.n_parallel;
    return s < 1 ? 1 : s > 60 ? 60 : (int)s;
}

int so_worker_submit(so_worker *w, so_job *j, int *retry_s) {
    int rc;
    j->worker = w;
    so_job_acquire(j);
    pthread_mutex_lock(&w->lock);
    *retry_s = estimate_wait(w);
    if (w->ending) {
        rc = SO_ECANCELLED;
    } else if (w->n_live + j->n_choices > w->serving.eo.n_parallel + w->o.n_queue) {
        rc = SO_ELIMIT;
    } else {
        so_job **at = &w->queue;
        while (*at)
            at = &(*at)->next;
        *at = j;
        w->n_live += j->n_choices;
        w->n_jobs++;
        pthread_cond_signal(&w->wake);
        rc = SO_OK;
    }
    pthread_mutex_unlock(&w->lock);
    if (rc != SO_OK)
        so_job_release(j); /* the caller still has its own reference */
    return rc;
}

void so_worker_end_all(so_worker *w, const char *why) {
    pthread_mutex_lock(&w->lock);
    w->ending = true;
    snprintf(w->why, sizeof w->why, "%s", why);
    pthread_cond_signal(&w->wake);
    pthread_mutex_unlock(&w->lock);
}

so_worker_usage so_worker_get_usage(so_worker *w) {
    pthread_mutex_lock(&w->lock);
    so_worker_usage l = {.running = w->stats.running,
                         .jobs = w->n_jobs,
                         .engine = w->stats,
                         .device_free = w->device_free,
                         .device_total = w->device_total};
    l.waiting = SO_MAX(w->n_live - l.running, 0); /* includes jobs not yet taken */
    pthread_mutex_unlock(&w->lock);
    return l;
}
