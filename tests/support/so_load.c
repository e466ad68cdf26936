/* The load; see so_load.h. Requests come in bursts, so that queues form and drain. */
#include "so_load.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "so_test.h"

enum { N_SHARED = 3, CHECK_EVERY = 8 };

typedef enum fate { RUNS, CANCELLED, CANCELS, FREED } fate; /* CANCELS: in its own callback */

typedef struct job {
    so_request_opts o;
    int32_t *prompt, *want, *got;
    int n_want, n_got;
    fate fate;
    int after; /* tokens (CANCELS) or steps since it came */
    int at;    /* step at which it comes */
    so_request *r;
    bool done;
} job;

struct so_load {
    so_load_opts o;
    job *jobs;
    uint32_t draws;
};

static int below(so_load *l, int n) {
    so_rng_key key = {.seed = l->o.seed, .purpose = SO_RNG_TEST};
    return (int)(so_rng_uniform(&key, l->draws++) * n);
}

/* --- drawing --- */

/* A piece of the source, every second one behind one of three beginnings. */
static void draw_prompt(so_load *l, job *j) {
    int most = l->o.max_prompt, n_shared = 0;
    int n = 1 + below(l, below(l, 3) ? most / 3 : most);
    j->prompt = SO_NEW_N(int32_t, most);
    if (below(l, 2)) {
        int which = below(l, N_SHARED);
        n_shared = (2 + which) * most / 6;
        n = SO_MIN(most, n_shared + n / 3);
        for (int i = 0; i < n_shared; i++)
            j->prompt[i] = l->o.source[(which * 17 + i) % l->o.n_source];
    }
    int from = below(l, l->o.n_source);
    for (int i = n_shared; i < n; i++)
        j->prompt[i] = l->o.source[(from + i) % l->o.n_source];
    j->o.prompt = j->prompt;
    j->o.n_prompt = n;
}

static void draw_sampling(so_load *l, so_sample_params *p) {
    static const so_bias bias[] = {{3, -INFINITY}, {7, 1.5f}};
    static const float temps[] = {0, 0, 0.3f, 0.8f, 1.2f};
    so_sample_defaults(p);
    p->temp = temps[below(l, SO_LEN(temps))];
    p->seed = (uint64_t)below(l, 1000);
    p->choice = (uint32_t)below(l, 3);
    if (below(l, 3) == 0) {
        p->repeat_penalty = 1.2f;
        p->frequency_penalty = 0.1f;
        p->presence_penalty = 0.1f;
        p->repeat_last_n = below(l, 2) ? -1 : 30;
    }
    if (below(l, 3) == 0) {
        p->top_k = 20;
        p->top_p = 0.9f;
    }
    if (below(l, 4) == 0) {
        p->bias = bias;
        p->n_bias = SO_LEN(bias);
    }
}

static void draw_spec(so_load *l, so_spec_opts *s) {
    static const char *const names[] = {NULL,           "none",
                                        "ngram",        "lookup",
                                        "corpus",       "predict",
                                        "random",       "ngram+lookup",
                                        "lookup,ngram", "model",
                                        "model(ngram)", "lookup,model",
                                        "model(best)",  "model(k=2,nodes=10)"};
    int n = (int)SO_LEN(names) - (l->o.with_draft ? 0 : 5);
    s->drafter = names[below(l, n)];
    if (s->drafter)
        s->length = below(l, 2) ? 0 : 1 + below(l, 6);
}

static void draw_job(so_load *l, job *j) {
    static const int priorities[] = {0, 0, 0, 0, 1, -1};
    draw_prompt(l, j);
    draw_sampling(l, &j->o.sample);
    draw_spec(l, &j->o.spec);
    j->o.max_tokens = below(l, 20) ? 1 + below(l, l->o.max_tokens) : 0;
    j->o.ignore_end = below(l, 2);
    j->o.n_logprobs = below(l, 8) ? 0 : 2;
    j->o.priority = priorities[below(l, SO_LEN(priorities))];
    j->fate = below(l, 10) < 7 ? RUNS : (fate)(1 + below(l, 3));
    j->after = 1 + below(l, 12);
    j->want = SO_NEW_N(int32_t, l->o.max_tokens);
    j->got = SO_NEW_N(int32_t, l->o.max_tokens);
}

/* --- alone --- */

static void run_alone(so_engine *e, job *j) {
    so_request_opts o = j->o;
    so_request *r = NULL;
    so_err err = {0};
    o.spec = (so_spec_opts){0};
    SO_OK_OR_FAIL(so_engine_submit(e, &o, &r, &err), err);
    SO_OK_OR_FAIL(so_engine_run(e, r, &err), err);
    const int32_t *out = so_request_output(r, &j->n_want);
    memcpy(j->want, out, (size_t)j->n_want * sizeof *out);
    so_request_free(r);
}

so_load *so_load_create(const so_load_opts *o) {
    so_load *l = SO_NEW(so_load);
    so_engine_opts eo = {
        .n_ctx = o->n_ctx, .n_parallel = 1, .n_batch = 256, .kv_dtype = o->kv_dtype};
    so_engine *e = NULL;
    so_err err = {0};
    l->o = *o;
    l->jobs = SO_NEW_N(job, o->n_requests);
    SO_OK_OR_FAIL(so_engine_create(o->target, o->tok, &eo, &e, &err), err);
    for (int i = 0, at = 0; i < o->n_requests; i++) {
        job *j = &l->jobs[i];
        draw_job(l, j);
        if (below(l, 5) == 0)
            at += below(l, 12);
        j->at = at;
        run_alone(e, j);
        j->o.spec.expected = j->want;
        j->o.spec.n_expected = below(l, 3) ? j->n_want : j->n_want / 2;
    }
    so_engine_free(e);
    return l;
}

void so_load_free(so_load *l) {
    for (int i = 0; i < l->o.n_requests; i++) {
        free(l->jobs[i].prompt);
        free(l->jobs[i].want);
        free(l->jobs[i].got);
    }
    free(l->jobs);
    free(l);
}

/* --- together --- */

static bool on_event(void *user, const so_event *ev) {
    job *j = user;
    if (ev->finish != SO_FINISH_NONE)
        return j->done = true;
    j->got[j->n_got++] = ev->token;
    return j->fate != CANCELS || j->n_got < j->after;
}

static void check_job(const job *j, int i, bool whole, const char *name) {
    bool same = j->n_got <= j->n_want && (!whole || j->n_got == j->n_want) &&
                memcmp(j->got, j->want, (size_t)j->n_got * sizeof *j->got) == 0;
    if (!same)
        fail_msg("%s: request %d (%s) has %d tokens, alone %d, and they differ", name, i,
                 j->o.spec.drafter ? j->o.spec.drafter : "plain", j->n_got, j->n_want);
}

static void end_job(job *j, int i, const char *name, so_load_result *out) {
    so_finish why = so_request_finish(j->r);
    if (why == SO_FINISH_ERROR)
        fail_msg("%s: request %d: %s", name, i, so_request_error(j->r)->msg);
    check_job(j, i, why != SO_FINISH_CANCELLED, name);
    *(why == SO_FINISH_CANCELLED ? &out->n_cancelled : &out->n_whole) += 1;
    so_request_free(j->r);
    j->r = NULL;
}

/* What happens to requests before step number `step`; how many are still to be answered. */
static int before_step(so_load *l, so_engine *e, int step, const char *name, so_load_result *out) {
    int n_open = 0;
    so_err err = {0};
    for (int i = 0; i < l->o.n_requests; i++) {
        job *j = &l->jobs[i];
        if (j->at == step) {
            so_request_opts o = j->o;
            o.on_event = on_event;
            o.user = j;
            SO_OK_OR_FAIL(so_engine_submit(e, &o, &j->r, &err), err);
        }
        if (j->r && j->done)
            end_job(j, i, name, out);
        if (j->r && j->fate == CANCELLED && step >= j->at + j->after)
            so_request_cancel(j->r);
        if (j->r && j->fate == FREED && step >= j->at + j->after) {
            check_job(j, i, false, name);
            so_request_free(j->r);
            j->r = NULL;
            out->n_freed++;
        }
        n_open += j->r || j->at > step;
    }
    return n_open;
}

void so_load_run(so_load *l, const so_engine_opts *eo, const char *name, so_load_result *out) {
    so_engine *e = NULL;
    so_err err = {0};
    int64_t t = so_clock_ns();
    *out = (so_load_result){0};
    for (int i = 0; i < l->o.n_requests; i++) {
        l->jobs[i].n_got = 0;
        l->jobs[i].done = false;
    }
    SO_OK_OR_FAIL(so_engine_create(l->o.target, l->o.tok, eo, &e, &err), err);
    for (int step = 0; before_step(l, e, step, name, out) > 0; step++) {
        if (so_engine_step(e, &err) < 0)
            fail_msg("%s: step %d: %s", name, step, err.msg);
        if (step % CHECK_EVERY == 0)
            so_engine_check(e);
    }
    so_engine_check(e);
    so_engine_get_stats(e, &out->stats);
    const so_engine_stats *s = &out->stats;
    print_message("%s: %d whole, %d cancelled, %d freed; %lld passes of %.1f rows, %lld "
                  "preemptions, %lld of %lld prompt tokens cached, %lld of %lld guesses stood, "
                  "%.1f s\n",
                  name, out->n_whole, out->n_cancelled, out->n_freed, (long long)s->steps,
                  (double)s->rows_sum / (double)s->steps, (long long)s->preemptions,
                  (long long)s->prefix_hits, (long long)s->prefix_queried, (long long)s->accepted,
                  (long long)s->drafted, so_clock_ms_since(t) / 1e3);
    assert_int_equal(s->pages_used + s->running + s->waiting, 0);
    assert_int_equal(out->n_whole + out->n_cancelled + out->n_freed, l->o.n_requests);
    so_engine_free(e);
}
