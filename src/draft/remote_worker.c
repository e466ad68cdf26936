/* The worker's side of async(model,worker=…): one thread that answers messages and drafts.
 *
 *   1. read all messages that have come; JOB replaces the engine's earlier job, STOP ends it
 *   2. run one job, of the engine whose turn it is, as async_thread.c runs a batch: catch-up, the
 *      rows of the trees, outcomes, levels. Messages are read between the passes
 *   3. again, until there is neither; then wait
 *
 * An engine is a session: its number, what it has sent about its requests, a drafter with a cache. The
 * text of a request is kept here and only grows, so that a job names its length. A session whose
 * messages have a gap has lost something: it is ended, and the engine begins a new one. When all
 * places are taken, one that was silent for a while gives way, else the newcomer is refused.
 *
 * Guesses are points, whatever the mode of verification (remote.h has the reason), so no random
 * number that tests a guess is ever sent here.
 *
 * Refuses engines with another vocabulary, and messages that break a rule of wire.h or name a session,
 * request or token that it does not know. No message can end the worker, and what an engine can make
 * it allocate is bounded by the worker's own limits. Thread: the caller's. */
#include "draft/remote_worker.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "draft/link.h"
#include "draft/model.h"
#include "draft/wire.h"

enum { SESSIONS = 8, PEER = 256, SPARE_REQUESTS = 8, ALIVE_MS = 200 };
static const double SILENT_MS = 10000; /* after which a session gives way to another */

typedef struct request {
    bool used, closed; /* closed: while a job that names it runs */
    uint32_t id;
    so_wire_open open;
    so_bias *bias;
    int32_t *source, *text;
    int n_source, n_text, cap;
    int n_named; /* tokens of its text in the latest job; texts only grow */
    void *state; /* of the drafter; NULL: not opened */
} request;

/* A round of one engine. */
typedef struct job {
    bool waiting; /* to be run */
    bool stopped;
    so_wire_job head;
    so_async_batch batch; /* its jobs, owners unused */
    request **requests;   /* [n_parallel] NULL: not known, skipped */
} job;

typedef struct session {
    bool used;
    uint64_t id;
    unsigned char peer[PEER]; /* ZeroMQ's name for its connection */
    int n_peer;
    uint32_t n_received, n_sent;
    so_drafter *x;
    request *requests; /* [n_requests] */
    int n_requests, n_parallel;
    job jobs[2];        /* one may run while the next waits */
    int running;        /* index of the one that runs; −1: none */
    bool lost;          /* to be ended when that job is over */
    so_async_core core; /* its measured times of levels */
    int64_t t_heard, busy_ns;
} session;

struct so_remote_worker {
    so_remote_worker_opts o;
    so_zmq z;
    void *ctx, *socket, *gate;
    so_link_key key;
    char address[SO_LINK_ADDRESS];
    int stop_fd;
    bool stop;
    session sessions[SESSIONS];
    int turn; /* of the sessions */
    so_wire_msg *in, *out;
    unsigned char *bytes;
    int n_malformed, n_wrong_keys, n_refused; /* so far */
};

/* --- sending --- */

/* The first, second, fourth, … of many. */
static bool worth_a_line(int *n) {
    int now = ++*n;
    return (now & (now - 1)) == 0;
}

static void send_to(so_remote_worker *w, const unsigned char *peer, int n_peer) {
    size_t n = so_wire_write(w->out, w->bytes);
    if (n == 0) {
        so_log(SO_LOG_DEBUG, "a message of type %d cannot be written", w->out->type);
        return;
    }
    /* To an engine that is gone, or does not read, it is dropped. */
    if (w->z.send(w->socket, peer, (size_t)n_peer, SO_ZMQ_SNDMORE | SO_ZMQ_DONTWAIT) >= 0)
        w->z.send(w->socket, w->bytes, n, SO_ZMQ_DONTWAIT);
}

static void send_msg(so_remote_worker *w, session *s, so_wire_type type) {
    w->out->type = type;
    w->out->session = s->id;
    w->out->number = s->n_sent++;
    send_to(w, s->peer, s->n_peer);
}

/* What the message may contain: printable ASCII. */
static void copy_text(char out[SO_WIRE_REASON], const char *text) {
    int n = 0;
    for (; n < SO_WIRE_REASON - 1 && text[n]; n++)
        out[n] = text[n];
    for (int i = 0; i < n; i++)
        if (out[i] < ' ' || out[i] > '~')
            out[i] = '?';
    out[n] = '\0';
}

static void refuse(so_remote_worker *w, const unsigned char *peer, int n_peer, uint64_t id,
                   so_wire_refusal why, const char *text) {
    w->out->type = SO_WIRE_REFUSED;
    w->out->session = id;
    w->out->number = 0;
    w->out->refused.why = why;
    copy_text(w->out->refused.text, text);
    send_to(w, peer, n_peer);
    so_log(why == SO_WIRE_LOST || !worth_a_line(&w->n_refused) ? SO_LOG_DEBUG : SO_LOG_WARN,
           "an engine is refused: %s", text);
}

/* --- requests --- */

static request *find_request(session *s, uint32_t id) {
    for (int i = 0; i < s->n_requests; i++)
        if (s->requests[i].used && !s->requests[i].closed && s->requests[i].id == id)
            return &s->requests[i];
    return NULL;
}

static void free_request(session *s, request *r) {
    if (r->state)
        s->x->vt->close(s->x, r->state);
    free(r->bias);
    free(r->source);
    free(r->text);
    *r = (request){0};
}

static bool is_named(const job *j, const request *r) {
    for (int i = 0; i < j->batch.n; i++)
        if (j->requests[i] == r)
            return true;
    return false;
}

static bool is_running(const session *s, const request *r) {
    return s->running >= 0 && is_named(&s->jobs[s->running], r);
}

/* A job that waits loses the request; one that runs keeps it to its end. */
static void close_request(session *s, request *r) {
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < s->jobs[k].batch.n && k != s->running; i++)
            if (s->jobs[k].requests[i] == r)
                s->jobs[k].requests[i] = NULL;
    if (is_running(s, r))
        r->closed = true;
    else
        free_request(s, r);
}

static void *copy_of(const void *p, int n, size_t size) {
    void *copy = so_try_alloc((size_t)n, size);
    if (copy && n > 0)
        memcpy(copy, p, (size_t)n * size);
    return copy;
}

static void on_open(session *s, const so_wire_msg *m) {
    request *r = NULL;
    so_err err = {0};
    so_sample_params p = m->open.sample;
    p.bias = m->biases;
    p.n_bias = m->n_biases;
    for (int i = 0; i < s->n_requests && !r; i++)
        r = s->requests[i].used ? NULL : &s->requests[i];
    if (!r || find_request(s, m->open.request) ||
        so_sample_check(&p, s->core.o.n_vocab, &err) != SO_OK) {
        so_log(SO_LOG_DEBUG, "a request is ignored: %s", err.msg[0] ? err.msg : "no room for it");
        return;
    }
    *r = (request){.used = true, .id = m->open.request, .open = m->open};
    r->cap = SO_MIN(m->open.max_tokens, so_drafter_n_ctx(s->x));
    r->n_source = m->n_tokens;
    r->bias = copy_of(m->biases, m->n_biases, sizeof *r->bias);
    r->source = copy_of(m->tokens, m->n_tokens, sizeof *r->source);
    r->text = so_try_alloc((size_t)r->cap, sizeof *r->text);
    r->open.sample.bias = r->bias;
    r->open.sample.n_bias = m->n_biases;
    if (!r->bias || !r->source || !r->text)
        free_request(s, r);
}

/* Texts only grow, so a job that runs never sees a token change. */
static void on_text(session *s, const so_wire_msg *m) {
    request *r = find_request(s, m->text.request);
    if (!r || m->text.at != r->n_text || m->n_tokens > r->cap - r->n_text)
        return;
    memcpy(r->text + r->n_text, m->tokens, (size_t)m->n_tokens * sizeof *r->text);
    r->n_text += m->n_tokens;
}

/* --- jobs --- */

/* false: a token that the draft does not have, or siblings with the same. */
static bool fill_tree(so_ahead_job *a, const so_wire_round *r, int32_t root, int n_vocab) {
    a->tree = (so_tree){.n_vocab = n_vocab};
    so_tree_reset(&a->tree, root, r->n_tokens - 1);
    for (int i = 1; i < r->n_nodes; i++) {
        const so_wire_node *n = &r->nodes[i];
        if (n->token < 0 || n->token >= n_vocab ||
            so_tree_add(&a->tree, n->parent, n->token, SO_Q_POINT, -1, 0, n->confidence) != i)
            return false;
    }
    return true;
}

/* Whether the worker can draft for it: it has the whole text, which is not shorter than before, and
 * the request comes once. */
static bool is_next_round(const job *j, const request *r, int n_tokens) {
    return r && n_tokens <= r->n_text && n_tokens >= r->open.n_prompt && n_tokens >= r->n_named &&
           !is_named(j, r);
}

static void fill_job(session *s, job *j, const so_wire_round *round, int n_draft) {
    so_ahead_job *a = &j->batch.jobs[j->batch.n];
    request *r = find_request(s, round->request);
    bool ok = is_next_round(j, r, round->n_tokens) &&
              fill_tree(a, round, r->text[round->n_tokens - 1], SO_MIN(s->core.o.n_vocab, n_draft));
    a->tree.n_vocab = s->core.o.n_vocab;
    j->requests[j->batch.n++] = ok ? r : NULL;
    a->n_nodes = a->n_outcomes = 0;
    a->drawn = false;
    a->skip = !ok;
    a->q = NULL;
    a->job = (so_draft_job){.max_nodes = SO_TREE_MAX - 1, .max_depth = j->head.depth};
    if (!ok)
        return;
    r->n_named = round->n_tokens;
    a->sample = r->open.sample;
    a->job.tokens = r->text;
    a->job.n_tokens = round->n_tokens;
    a->job.n_prompt = r->open.n_prompt;
    a->job.tree = &a->tree;
    a->job.seed = a->sample.seed;
    a->job.choice = a->sample.choice;
    a->job.temp = a->sample.temp;
    a->job.sample = &a->sample;
}

static void on_job(session *s, const so_wire_msg *m, int n_draft) {
    job *j = &s->jobs[s->running == 0 ? 1 : 0];
    if (s->running >= 0)
        s->jobs[s->running].stopped = true;
    s->jobs[0].waiting = s->jobs[1].waiting = false;
    j->waiting = true;
    j->stopped = false;
    j->head = m->job;
    j->batch.n = 0;
    j->batch.depth = m->job.depth;
    j->batch.window_ms = (double)m->job.left_ms;
    j->batch.estimates = m->job.estimates;
    j->batch.t_ns = so_clock_ns();
    for (int i = 0; i < m->n_jobs && i < s->n_parallel; i++)
        fill_job(s, j, &m->rounds[i], n_draft);
}

static void on_stop(session *s, uint32_t batch) {
    for (int k = 0; k < 2; k++)
        if (s->jobs[k].head.batch == batch) {
            s->jobs[k].stopped = true;
            s->jobs[k].waiting = false;
        }
}

/* --- sessions --- */

static void end_session(session *s) {
    for (int i = 0; i < s->n_requests; i++)
        if (s->requests[i].used)
            free_request(s, &s->requests[i]);
    for (int k = 0; k < 2; k++) {
        free(s->jobs[k].batch.jobs);
        free(s->jobs[k].requests);
    }
    free(s->requests);
    so_drafter_free(s->x);
    *s = (session){.running = -1};
}

/* Ends it now, or when its job is over. */
static void give_up(session *s) {
    if (s->running >= 0)
        s->lost = s->jobs[s->running].stopped = true;
    else
        end_session(s);
}

static session *find_session(so_remote_worker *w, uint64_t id) {
    for (int i = 0; i < SESSIONS; i++)
        if (w->sessions[i].used && w->sessions[i].id == id)
            return &w->sessions[i];
    return NULL;
}

/* Whether the connection of a session is closed: then a message to it cannot be sent. */
static bool is_gone(so_remote_worker *w, session *s) {
    errno = 0;
    send_msg(w, s, SO_WIRE_ALIVE);
    return errno == EHOSTUNREACH;
}

/* A place for a new session: that of the same connection, a free one, or one that is gone or silent. One
 * with a running job is kept: its drafter is in use. */
static session *take_place(so_remote_worker *w, const unsigned char *peer, int n_peer) {
    session *best = NULL;
    for (int i = 0; i < SESSIONS; i++) {
        session *s = &w->sessions[i];
        if (s->used && s->running < 0 && s->n_peer == n_peer &&
            memcmp(s->peer, peer, (size_t)n_peer) == 0)
            end_session(s);
        if (s->running >= 0)
            continue;
        if (!s->used)
            return s;
        if (!best || s->t_heard < best->t_heard)
            best = s;
    }
    for (int i = 0; i < SESSIONS; i++)
        if (w->sessions[i].running < 0 && is_gone(w, &w->sessions[i]))
            best = &w->sessions[i], best->t_heard = 0;
    if (!best || so_clock_ms_since(best->t_heard) < SILENT_MS)
        return NULL;
    end_session(best);
    return best;
}

static int create_drafter(const so_remote_worker *w, const so_wire_hello *h, session *s,
                          so_err *err) {
    so_model_drafter_opts o = {.n_vocab = h->n_vocab,
                               .d_model = h->d_model,
                               .n_ctx = SO_MIN(h->n_ctx, w->o.n_ctx),
                               .encoder = h->encoder,
                               .n_parallel = s->n_parallel,
                               .n_batch = w->o.n_batch,
                               .max_draft = SO_MIN(h->max_draft, SO_AHEAD_DEPTH),
                               .kv_dtype = w->o.kv_dtype,
                               .prefix_cache = true,
                               .temp = w->o.temp,
                               .p_min = w->o.p_min,
                               .ahead = true};
    return so_model_drafter_create(w->o.model, &o, NULL, &s->x, err);
}

/* NULL: the engine fits. */
static const char *misfit(const so_remote_worker *w, const so_wire_hello *h, so_wire_refusal *why,
                          char *text, size_t cap) {
    *why = SO_WIRE_OTHER;
    if (h->limits != so_wire_limits())
        return "the engine is another version of sooth";
    *why = SO_WIRE_MISFIT;
    if (h->vocab_hash != w->o.vocab_hash) {
        snprintf(text, cap,
                 "the worker's draft model has another vocabulary (%016llx) than the model "
                 "(%016llx)",
                 (unsigned long long)w->o.vocab_hash, (unsigned long long)h->vocab_hash);
        return text;
    }
    if (h->n_vocab / 2 > so_model_hparams(w->o.model)->n_vocab)
        return "the model has more than twice the tokens of the worker's draft model";
    if (h->draft_id && h->draft_id != w->o.draft_id) {
        snprintf(text, cap,
                 "the worker has another draft model (%016llx) than --spec names (%016llx)",
                 (unsigned long long)w->o.draft_id, (unsigned long long)h->draft_id);
        return text;
    }
    return NULL;
}

static void begin_session(so_remote_worker *w, session *s, const so_wire_msg *m,
                          const unsigned char *peer, int n_peer) {
    s->used = true;
    s->id = m->session;
    s->n_peer = n_peer;
    memcpy(s->peer, peer, (size_t)n_peer);
    s->n_received = 1;
    s->n_sent = 0;
    s->running = -1;
    s->core = (so_async_core){.o = {.n_vocab = m->hello.n_vocab}};
    s->n_requests = s->n_parallel + SPARE_REQUESTS;
    s->requests = SO_NEW_N(request, s->n_requests);
    for (int k = 0; k < 2; k++) {
        s->jobs[k].batch.jobs = SO_NEW_N(so_ahead_job, s->n_parallel);
        s->jobs[k].requests = SO_NEW_N(request *, s->n_parallel);
    }
    s->t_heard = so_clock_ns();
    w->out->welcome =
        (so_wire_welcome){w->o.vocab_hash, w->o.draft_id, so_drafter_n_ctx(s->x), s->n_parallel};
    send_msg(w, s, SO_WIRE_WELCOME);
    so_log(SO_LOG_INFO, "an engine has connected: session %016llx", (unsigned long long)s->id);
}

static void on_hello(so_remote_worker *w, const so_wire_msg *m, const unsigned char *peer,
                     int n_peer) {
    char text[SO_WIRE_REASON];
    so_wire_refusal why;
    so_err err = {0};
    const char *wrong = misfit(w, &m->hello, &why, text, sizeof text);
    if (wrong) {
        refuse(w, peer, n_peer, m->session, why, wrong);
        return;
    }
    session *s = take_place(w, peer, n_peer);
    if (!s) {
        snprintf(text, sizeof text, "the worker already serves %d engines", SESSIONS);
        refuse(w, peer, n_peer, m->session, SO_WIRE_FULL, text);
        return;
    }
    s->n_parallel = SO_MIN(m->hello.n_parallel, w->o.n_parallel);
    if (create_drafter(w, &m->hello, s, &err) != SO_OK) {
        *s = (session){.running = -1};
        refuse(w, peer, n_peer, m->session, SO_WIRE_MISFIT, err.msg);
        return;
    }
    begin_session(w, s, m, peer, n_peer);
}

/* --- receiving --- */

static void handle(so_remote_worker *w, session *s, const so_wire_msg *m) {
    switch (m->type) {
    case SO_WIRE_OPEN:
        on_open(s, m);
        break;
    case SO_WIRE_TEXT:
        on_text(s, m);
        break;
    case SO_WIRE_JOB:
        on_job(s, m, so_model_hparams(w->o.model)->n_vocab);
        break;
    case SO_WIRE_STOP:
        on_stop(s, m->batch);
        break;
    case SO_WIRE_BYE:
        give_up(s);
        break;
    case SO_WIRE_CLOSE: {
        request *r = find_request(s, m->request);
        if (r)
            close_request(s, r);
        break;
    }
    default: /* a worker's message, sent back */
        break;
    }
}

/* A message of an engine that is known. It may come over a new connection. */
static void on_message(so_remote_worker *w, const so_wire_msg *m, const unsigned char *peer,
                       int n_peer) {
    session *s = find_session(w, m->session);
    if (!s && m->type == SO_WIRE_HELLO) {
        on_hello(w, m, peer, n_peer);
        return;
    }
    if (s && m->number < s->n_received)
        return; /* it has come before */
    if (!s || m->number > s->n_received) {
        refuse(w, peer, n_peer, m->session, SO_WIRE_LOST, "the session is not known, or has a gap");
        if (s)
            give_up(s);
        return;
    }
    s->n_received++;
    s->t_heard = so_clock_ns();
    s->n_peer = n_peer;
    memcpy(s->peer, peer, (size_t)n_peer);
    handle(w, s, m);
}

/* Reads one message of one frame; false: none has come. */
static bool receive(so_remote_worker *w) {
    unsigned char peer[PEER];
    so_err err = {0};
    int n_peer = w->z.recv(w->socket, peer, sizeof peer, SO_ZMQ_DONTWAIT);
    if (n_peer < 0)
        return false;
    int n = w->z.recv(w->socket, w->bytes, SO_WIRE_BYTES, SO_ZMQ_DONTWAIT);
    int n_frames = 1 + so_link_drop_frames(&w->z, w->socket);
    if (n_peer > PEER || n < 0)
        return true;
    int rc = n_frames > 1 ? so_err_set(&err, SO_EFORMAT, "a message of %d frames", n_frames)
                          : so_wire_read(w->bytes, (size_t)n, w->in, &err);
    if (rc == SO_EUNSUPPORTED)
        refuse(w, peer, n_peer, 0, SO_WIRE_OTHER, "the engine is another version of sooth");
    else if (rc != SO_OK && worth_a_line(&w->n_malformed))
        so_log(SO_LOG_WARN, "%s is ignored; the worker goes on (%d so far)", err.msg,
               w->n_malformed);
    else if (rc == SO_OK)
        on_message(w, w->in, peer, n_peer);
    return true;
}

/* Waits up to timeout_ms (−1: for ever) for a first message, then handles all that have come. */
static void serve_messages(so_remote_worker *w, long timeout_ms) {
    so_zmq_pollitem items[] = {{w->socket, 0, SO_ZMQ_POLLIN, 0},
                               {NULL, w->stop_fd, SO_ZMQ_POLLIN, 0},
                               {w->gate, 0, SO_ZMQ_POLLIN, 0}};
    if (w->z.poll(items, w->gate ? 3 : 2, timeout_ms) < 0 && errno != EINTR)
        w->stop = true; /* the descriptor of stop_fd is closed */
    w->stop |= (items[1].revents & SO_ZMQ_POLLIN) != 0;
    if (w->gate && !so_link_answer(&w->z, w->gate, &w->key) && worth_a_line(&w->n_wrong_keys))
        so_log(SO_LOG_WARN, "an engine with another key is refused (%d so far)", w->n_wrong_keys);
    for (int i = 0; i < 1000 && receive(w); i++)
        ;
}

/* --- drafting --- */

static bool goes_on(so_remote_worker *w, const job *j) {
    serve_messages(w, 0);
    return !j->stopped && !w->stop;
}

static void open_states(session *s, job *j) {
    for (int i = 0; i < j->batch.n; i++) {
        so_ahead_job *a = &j->batch.jobs[i];
        request *r = j->requests[i];
        so_err err = {0};
        if (!r) {
            a->skip = true;
            continue;
        }
        so_draft_text text = {.prompt = r->text,
                              .n_prompt = r->open.n_prompt,
                              .source = r->n_source > 0 ? r->source : NULL,
                              .n_source = r->n_source,
                              .max_tokens = r->cap};
        if (!r->state && s->x->vt->open(s->x, &text, &r->state, &err) != SO_OK) {
            so_log(SO_LOG_WARN, "a request has no drafts: %s", err.msg);
            r->state = NULL;
            a->skip = true;
        }
        a->job.state = r->state;
    }
}

static uint32_t micros(int64_t ns) { return (uint32_t)SO_MIN(ns / 1000, (int64_t)UINT32_MAX); }

/* NaN becomes 0. */
static float in_unit(float x) { return x > 0 ? SO_MIN(x, 1) : 0; }

static void send_outcomes(so_remote_worker *w, session *s, const job *j) {
    so_wire_msg *m = w->out;
    m->batch = j->head.batch;
    m->busy_us = micros(s->busy_ns);
    m->n_jobs = j->batch.n;
    for (int i = 0; i < j->batch.n; i++) {
        const so_ahead_job *a = &j->batch.jobs[i];
        so_wire_fan *f = &m->fans[i];
        f->n_nodes = a->skip ? 0 : a->n_nodes;
        f->n_outcomes = a->skip ? 0 : a->n_outcomes;
        memcpy(f->n_candidates, a->n_candidates, sizeof f->n_candidates);
        memcpy(f->candidates, a->candidates, sizeof f->candidates);
        for (int k = 0; k < f->n_nodes; k++)
            for (int c = 0; c < f->n_candidates[k]; c++)
                f->candidates[k][c].chance = in_unit(a->candidates[k][c].chance);
        for (int k = 0; k < f->n_outcomes; k++) {
            f->outcomes[k].node = a->outcomes[k].node;
            f->outcomes[k].candidate = a->outcomes[k].candidate;
            f->outcomes[k].chance = in_unit(a->outcomes[k].chance);
        }
    }
    send_msg(w, s, SO_WIRE_OUTCOMES);
}

static void send_level(so_remote_worker *w, session *s, const job *j, int level) {
    so_wire_msg *m = w->out;
    m->batch = j->head.batch;
    m->busy_us = micros(s->busy_ns);
    m->level = level;
    m->n_jobs = j->batch.n;
    for (int i = 0; i < j->batch.n; i++) {
        const so_ahead_job *a = &j->batch.jobs[i];
        so_wire_guesses *g = &m->guesses[i];
        g->n = a->n_outcomes;
        for (int k = 0; k < g->n; k++) {
            g->at[k].token = a->outcomes[k].token_at[level - 1];
            g->at[k].confidence = in_unit(a->outcomes[k].confidence[level - 1]);
        }
    }
    send_msg(w, s, SO_WIRE_LEVEL);
}

static void report(session *s, job *j, const so_err *err) {
    s->x->vt->ahead_abort(s->x, j->batch.jobs, j->batch.n);
    so_log(s->core.failed ? SO_LOG_DEBUG : SO_LOG_WARN, "%s; a round has no drafts", err->msg);
    s->core.failed = true;
}

/* Catch-up and the rows of the trees; false: no drafts. */
static bool begin_job(so_remote_worker *w, session *s, job *j) {
    so_err err = {0};
    int64_t t_alive = so_clock_ns();
    open_states(s, j);
    for (bool first = true;; first = false) {
        int64_t t = so_clock_ns();
        int rc = s->x->vt->ahead_begin(s->x, j->batch.jobs, j->batch.n, first, &err);
        s->busy_ns += so_clock_ns() - t;
        if (rc < 0)
            report(s, j, &err);
        if (rc <= 0)
            return rc == 0;
        if (so_clock_ms_since(t_alive) > ALIVE_MS) {
            send_msg(w, s, SO_WIRE_ALIVE);
            t_alive = so_clock_ns();
        }
        if (!goes_on(w, j))
            return false;
    }
}

static bool run_level(so_remote_worker *w, session *s, job *j, int level) {
    so_err err = {0};
    int64_t t = so_clock_ns();
    int n = 0;
    for (int i = 0; i < j->batch.n; i++)
        n += j->batch.jobs[i].skip ? 0 : j->batch.jobs[i].n_outcomes;
    int rc = s->x->vt->ahead_rows(s->x, j->batch.jobs, j->batch.n, level, &err);
    if (rc > 0)
        s->x->vt->ahead_draw(s->x, j->batch.jobs, j->batch.n, level, false);
    so_async_observe_level(&s->core, n, so_clock_ms_since(t));
    s->busy_ns += so_clock_ns() - t;
    if (rc > 0)
        send_level(w, s, j, level);
    else if (rc < 0)
        report(s, j, &err);
    return rc > 0;
}

static void draft(so_remote_worker *w, session *s, job *j) {
    if (!begin_job(w, s, j) || !goes_on(w, j))
        return;
    s->core.o.fan_out = j->head.fan;
    so_async_choose(&s->core, &j->batch, so_clock_ms_since(j->batch.t_ns));
    send_outcomes(w, s, j);
    for (int level = 1; level <= j->batch.depth; level++)
        if (!goes_on(w, j) || !run_level(w, s, j, level))
            return;
}

static void run_job(so_remote_worker *w, session *s) {
    s->running = s->jobs[0].waiting ? 0 : 1;
    job *j = &s->jobs[s->running];
    j->waiting = false;
    s->busy_ns = 0;
    draft(w, s, j);
    s->running = -1;
    for (int i = 0; i < s->n_requests; i++)
        if (s->requests[i].closed)
            free_request(s, &s->requests[i]);
    w->out->batch = j->head.batch;
    w->out->busy_us = micros(s->busy_ns);
    send_msg(w, s, SO_WIRE_DONE);
    if (s->lost)
        end_session(s);
}

/* The session whose turn it is among those with a job. */
static session *next_session(so_remote_worker *w) {
    for (int i = 0; i < SESSIONS; i++) {
        session *s = &w->sessions[(w->turn + i) % SESSIONS];
        if (s->used && (s->jobs[0].waiting || s->jobs[1].waiting)) {
            w->turn = (w->turn + i + 1) % SESSIONS;
            return s;
        }
    }
    return NULL;
}

void so_remote_worker_run(so_remote_worker *w, int stop_fd) {
    w->stop_fd = stop_fd;
    w->stop = false;
    while (!w->stop) {
        session *s = next_session(w);
        if (s)
            run_job(w, s);
        serve_messages(w, next_session(w) ? 0 : -1);
    }
}

/* --- creation --- */

const char *so_remote_worker_address(const so_remote_worker *w) { return w->address; }

static int open_link(so_remote_worker *w, so_err *err) {
    size_t n = sizeof w->address;
    int rc = so_zmq_load(&w->z, err);
    if (rc == SO_OK && w->o.key_file)
        rc = so_link_read_key(&w->z, w->o.key_file, &w->key, err);
    if (rc == SO_OK)
        rc = so_link_check(w->o.address, w->key.set, err);
    if (rc != SO_OK)
        return rc;
    w->ctx = w->z.ctx_new();
    rc = so_link_listen(&w->z, w->ctx, w->o.address, &w->key, &w->socket, &w->gate, err);
    if (rc == SO_OK && w->z.getsockopt(w->socket, SO_ZMQ_LAST_ENDPOINT, w->address, &n) != 0)
        snprintf(w->address, sizeof w->address, "%s", w->o.address);
    return rc;
}

int so_remote_worker_create(const so_remote_worker_opts *o, so_remote_worker **out, so_err *err) {
    so_remote_worker *w = SO_NEW(so_remote_worker);
    w->o = *o;
    for (int i = 0; i < SESSIONS; i++)
        w->sessions[i].running = -1;
    w->in = SO_NEW(so_wire_msg);
    w->out = SO_NEW(so_wire_msg);
    w->bytes = so_alloc(SO_WIRE_BYTES);
    int rc = open_link(w, err);
    if (rc == SO_OK)
        *out = w;
    else
        so_remote_worker_free(w);
    return rc;
}

void so_remote_worker_free(so_remote_worker *w) {
    if (!w)
        return;
    for (int i = 0; i < SESSIONS; i++)
        if (w->sessions[i].used)
            end_session(&w->sessions[i]);
    if (w->socket)
        w->z.close(w->socket);
    if (w->gate)
        w->z.close(w->gate);
    if (w->ctx)
        w->z.ctx_term(w->ctx);
    free(w->in);
    free(w->out);
    free(w->bytes);
    free(w);
}
