/* The engine's side of a draft worker (remote.h).
 *
 *   state        DOWN ──HELLO──► GREETING ──WELCOME──► UP
 *                 ▲                  │                  │
 *                 └── no answer, refused, lost, gap ◄───┘
 *
 * A session is all that worker and engine agree on; when in doubt it is given up, and the next has
 * all requests and texts sent again. Requests remember the session in which they were sent, and how
 * much of their text. Messages of another session or batch, and those that have come before, are
 * dropped silently; malformed ones are logged.
 *
 * What arrives is checked against the jobs before any of it is stored: nodes and tokens exist, no
 * candidate is in the tree already, levels are in order.
 *
 * Owns the connection and two messages, allocated at creation. The engine thread is never here, except
 * to create, free and wake. Async thread; the lock of its host orders the calls of other threads before
 * and after. */
#include "draft/remote.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/mem.h"
#include "draft/link.h"
#include "draft/model.h"
#include "draft/wire.h"

static const double FIRST_GREETING_MS = 50, LAST_GREETING_MS = 5000; /* between greetings */
static const double MISFIT_MS = 30000;  /* until a worker that does not fit is asked again */
static const double SILENT_MS = 5000;   /* a worker that has a job and says nothing is gone */
static const double PATIENCE_MS = 1000; /* until a first greeting without an answer is reported */
static const double LINK_MS = 2 * SO_LINK_RECONNECT_MS; /* without a connection, until a new one */
static const double TRAVEL_PART = 0.1;                  /* weight of a round in travel_ms */

typedef enum link_state { DOWN, GREETING, UP } link_state;

typedef struct remote_request {
    uint32_t id;
    uint64_t session; /* in which the worker was told of it; 0: none */
    int n_sent;       /* tokens of its text that the worker has */
    int n_prompt, max_tokens;
    int32_t *source;
    int n_source;
} remote_request;

typedef struct remote {
    so_drafter base;
    so_remote_engine e;
    uint64_t vocab_hash, draft_id;
    char address[SO_LINK_ADDRESS];
    so_link_key key;
    so_zmq z;
    void *ctx, *socket, *monitor;
    int wake_fd;
    so_wire_msg *in, *out;
    unsigned char *bytes;
    link_state state;
    uint64_t session;
    uint32_t n_sent, n_received; /* messages of the session */
    uint32_t next_request, batch;
    int n_room, n_open;    /* requests that the worker takes at once, and has */
    int n_ctx;             /* tokens of a text that it takes */
    double greeting_ms;    /* wait after the next greeting */
    int64_t t_greet;       /* when to greet; DOWN and GREETING */
    int64_t t_linked;      /* when a message could be sent last, or a connection was begun */
    int64_t t_begun;       /* of the first greeting since it was last UP; 0: none */
    int64_t t_waiting;     /* since when it owes an answer; 0: it owes none */
    bool owes_end;         /* it was told to stop, so ALIVE is no answer any more */
    double travel_ms;      /* of a job and its answer, without the worker's time; running mean */
    bool was_up, reported; /* reported: that it is not UP */
    int n_malformed;
    /* The batch that runs: */
    int sent_jobs[SO_WIRE_JOBS]; /* indices of the jobs that were sent */
    int n_jobs, n_levels;
    int64_t t_sent;
    bool over;
} remote;

/* --- state --- */

static void report_down(remote *r, const char *why) {
    if (r->reported)
        return;
    so_log(SO_LOG_WARN, "draft worker %s %s; continuing without its drafts", r->address, why);
    r->reported = true;
}

static void set_up(remote *r) {
    if (r->reported)
        so_log(SO_LOG_WARN, "draft worker %s drafts%s", r->address, r->was_up ? " again" : "");
    else if (!r->was_up)
        so_log(SO_LOG_INFO, "draft worker %s is connected", r->address);
    r->state = UP;
    r->was_up = true;
    r->reported = false;
    r->t_begun = r->t_waiting = 0;
}

/* The session is given up; greet again after wait_ms. */
static void set_down(remote *r, double wait_ms) {
    r->state = DOWN;
    r->session = 0;
    r->t_waiting = 0;
    r->owes_end = false;
    r->t_greet = so_clock_ns() + (int64_t)(wait_ms * 1e6);
    r->over = true;
}

/* What the connection itself tells. A lost connection alone ends no session: ZeroMQ connects again,
 * and the numbers of messages show whether something is missing. */
static void read_events(remote *r) {
    for (int e; (e = so_link_event(&r->z, r->monitor)) != 0;) {
        if (r->state == UP && e == SO_ZMQ_EVENT_HANDSHAKE_SUCCEEDED)
            set_up(r);
        else if (e == SO_ZMQ_EVENT_CONNECT_RETRIED)
            report_down(r, "cannot be reached: nobody listens there");
        else if (e == SO_ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL ||
                 e == SO_ZMQ_EVENT_HANDSHAKE_FAILED_AUTH ||
                 e == SO_ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL)
            report_down(r, "refuses the connection: is it a draft worker, with the same key?");
        else if (e == SO_ZMQ_EVENT_DISCONNECTED && r->was_up)
            report_down(r, "is not connected any more");
    }
}

/* --- sending --- */

static bool send_msg(remote *r, so_wire_type type) {
    r->out->type = type;
    r->out->session = r->session;
    r->out->number = r->n_sent;
    size_t n = so_wire_write(r->out, r->bytes);
    if (n == 0)
        return false;
    if (r->z.send(r->socket, r->bytes, n, SO_ZMQ_DONTWAIT) < 0)
        return false;
    r->n_sent++;
    r->t_linked = so_clock_ns();
    return true;
}

/* Nothing can be sent. ZeroMQ is given the time for its longest interval. */
static void wait_for_link(remote *r) {
    if (so_clock_ms_since(r->t_linked) < LINK_MS)
        return;
    so_link_reconnect(&r->z, r->socket, r->address);
    r->t_linked = so_clock_ns();
}

static void greet(remote *r) {
    so_wire_hello *h = &r->out->hello;
    int64_t now = so_clock_ns();
    while (getrandom(&r->session, sizeof r->session, 0) != sizeof r->session || r->session == 0)
        ;
    r->n_sent = r->n_received = 0;
    r->n_open = 0;
    *h = (so_wire_hello){.vocab_hash = r->vocab_hash,
                         .draft_id = r->draft_id,
                         .limits = so_wire_limits(),
                         .n_vocab = r->e.n_vocab,
                         .d_model = r->e.d_model,
                         .n_ctx = r->e.n_ctx,
                         .n_parallel = r->e.n_parallel,
                         .max_draft = r->e.max_draft,
                         .encoder = r->e.encoder};
    bool sent = send_msg(r, SO_WIRE_HELLO);
    double wait_ms = sent ? r->greeting_ms : FIRST_GREETING_MS / 5; /* not connected yet */
    r->state = GREETING;
    r->t_greet = now + (int64_t)(wait_ms * 1e6);
    if (sent)
        r->greeting_ms = SO_MIN(2 * r->greeting_ms, LAST_GREETING_MS);
    else
        wait_for_link(r);
    if (r->t_begun == 0)
        r->t_begun = now;
    else if (so_clock_ms_since(r->t_begun) > PATIENCE_MS)
        report_down(r, "does not answer");
}

static bool send_request(remote *r, remote_request *s, const so_ahead_job *a) {
    so_wire_msg *m = r->out;
    int n_bias = a->sample.n_bias;
    s->id = r->next_request++;
    m->open = (so_wire_open){s->id, s->max_tokens, s->n_prompt, a->sample};
    if (a->drawn) { /* nothing that a guess is tested with */
        m->open.sample.temp = 0;
        m->open.sample.seed = 0;
    }
    m->n_tokens = s->n_source;
    memcpy(m->tokens, s->source, (size_t)s->n_source * sizeof *m->tokens);
    m->n_biases = n_bias;
    if (n_bias > 0)
        memcpy(m->biases, a->sample.bias, (size_t)n_bias * sizeof *m->biases);
    if (!send_msg(r, SO_WIRE_OPEN))
        return false;
    s->session = r->session;
    s->n_sent = 0;
    r->n_open++;
    return true;
}

static bool send_text(remote *r, remote_request *s, const so_ahead_job *a) {
    so_wire_msg *m = r->out;
    while (s->n_sent < a->job.n_tokens) {
        m->text = (so_wire_text){s->id, s->n_sent};
        m->n_tokens = SO_MIN(a->job.n_tokens - s->n_sent, SO_WIRE_TOKENS);
        memcpy(m->tokens, a->job.tokens + s->n_sent, (size_t)m->n_tokens * sizeof *m->tokens);
        if (!send_msg(r, SO_WIRE_TEXT))
            return false;
        s->n_sent += m->n_tokens;
    }
    return true;
}

static void write_round(so_wire_round *to, uint32_t id, const so_ahead_job *a) {
    const so_tree *t = &a->tree;
    *to = (so_wire_round){.request = id, .n_tokens = a->job.n_tokens, .n_nodes = t->n_nodes};
    for (int i = 0; i < t->n_nodes; i++)
        to->nodes[i] = (so_wire_node){.token = t->nodes[i].token, .parent = t->nodes[i].parent};
    for (int i = t->n_proposals - 1; i >= 0; i--) /* the first of a node counts */
        to->nodes[t->proposals[i].child].confidence =
            SO_MIN(SO_MAX(t->proposals[i].confidence, 0), 1);
}

/* Whether the worker has room for the text, has the request or room for it, and a message has room
 * for its source and biases. */
static bool can_send(const remote *r, const remote_request *s, const so_ahead_job *a) {
    return a->job.n_tokens <= SO_MIN(s->max_tokens, r->n_ctx) &&
           (s->session == r->session || (r->n_open < r->n_room && s->n_source <= SO_WIRE_TOKENS &&
                                         a->sample.n_bias <= SO_WIRE_BIASES));
}

/* Tells the worker of the batch; false: it cannot be told. */
static bool send_batch(remote *r, so_async_core *c, so_async_batch *b) {
    so_wire_msg *m = r->out;
    r->n_jobs = r->n_levels = 0;
    r->over = false;
    for (int i = 0; i < b->n && r->n_jobs < SO_WIRE_JOBS; i++) {
        so_ahead_job *a = &b->jobs[i];
        remote_request *s = a->job.state;
        if (a->skip || !can_send(r, s, a))
            continue;
        if ((s->session != r->session && !send_request(r, s, a)) || !send_text(r, s, a))
            return false;
        write_round(&m->rounds[r->n_jobs], s->id, a);
        r->sent_jobs[r->n_jobs++] = i;
        a->drawn = false; /* points */
    }
    if (r->n_jobs == 0)
        return false;
    double left_ms = b->window_ms - so_clock_ms_since(b->t_ns) - r->travel_ms;
    m->n_jobs = r->n_jobs;
    m->job = (so_wire_job){.batch = ++r->batch,
                           .depth = SO_MAX(b->depth, 1),
                           .fan = c->o.fan_out,
                           .left_ms = (float)SO_MIN(SO_MAX(left_ms, 0), 1e6),
                           .estimates = b->estimates};
    r->t_sent = so_clock_ns();
    if (!send_msg(r, SO_WIRE_JOB))
        return false;
    if (r->t_waiting == 0)
        r->t_waiting = r->t_sent;
    return true;
}

/* --- what comes --- */

static bool take_fan(so_ahead_job *a, const so_wire_fan *f) {
    if (f->n_nodes > SO_MIN(a->tree.n_nodes, SO_AHEAD_NODES))
        return false;
    for (int i = 0; i < f->n_nodes; i++)
        for (int k = 0; k < f->n_candidates[i]; k++) {
            int32_t token = f->candidates[i][k].token;
            if (token >= a->tree.n_vocab || so_tree_child(&a->tree, i, token) >= 0)
                return false;
        }
    a->n_nodes = f->n_nodes;
    memcpy(a->n_candidates, f->n_candidates, sizeof a->n_candidates);
    memcpy(a->candidates, f->candidates, sizeof a->candidates);
    a->n_outcomes = f->n_outcomes;
    for (int i = 0; i < f->n_outcomes; i++) {
        int node = f->outcomes[i].node, candidate = f->outcomes[i].candidate;
        so_ahead_outcome *o = &a->outcomes[i];
        *o = (so_ahead_outcome){.node = node,
                                .token = f->candidates[node][candidate].token,
                                .candidate = candidate,
                                .chance = f->outcomes[i].chance};
        for (int k = 0; k < SO_AHEAD_DEPTH; k++)
            o->token_at[k] = -1;
    }
    return true;
}

static bool take_outcomes(remote *r, so_async_batch *b) {
    const so_wire_msg *m = r->in;
    double travel_ms = so_clock_ms_since(r->t_sent) - (double)m->busy_us * 1e-3;
    if (atomic_load(&b->chosen) || m->n_jobs != r->n_jobs)
        return false;
    for (int i = 0; i < r->n_jobs; i++)
        if (!take_fan(&b->jobs[r->sent_jobs[i]], &m->fans[i])) {
            for (int k = 0; k <= i; k++)
                b->jobs[r->sent_jobs[k]].n_outcomes = 0;
            return false;
        }
    r->greeting_ms = FIRST_GREETING_MS; /* it is of use */
    r->travel_ms += TRAVEL_PART * (SO_MAX(travel_ms, 0) - r->travel_ms);
    atomic_store(&b->chosen, true);
    return true;
}

static bool take_level(remote *r, so_async_batch *b) {
    const so_wire_msg *m = r->in;
    if (!atomic_load(&b->chosen) || m->n_jobs != r->n_jobs || m->level != r->n_levels + 1)
        return false;
    for (int i = 0; i < r->n_jobs; i++) {
        const so_ahead_job *a = &b->jobs[r->sent_jobs[i]];
        const so_wire_guesses *g = &m->guesses[i];
        if (g->n != a->n_outcomes)
            return false;
        for (int k = 0; k < g->n; k++)
            if (g->at[k].token >= a->tree.n_vocab)
                return false;
    }
    for (int i = 0; i < r->n_jobs; i++) {
        so_ahead_job *a = &b->jobs[r->sent_jobs[i]];
        for (int k = 0; k < a->n_outcomes; k++) {
            a->outcomes[k].token_at[m->level - 1] = m->guesses[i].at[k].token;
            a->outcomes[k].confidence[m->level - 1] = m->guesses[i].at[k].confidence;
        }
    }
    atomic_store(&b->levels, m->level);
    r->n_levels = m->level;
    return true;
}

static void on_refused(remote *r) {
    const so_wire_refused *f = &r->in->refused;
    char why[SO_WIRE_REASON + 16];
    snprintf(why, sizeof why, "refuses: %s", f->text);
    if (f->why == SO_WIRE_LOST) { /* it was restarted, or a message was lost */
        set_down(r, 0);
        return;
    }
    report_down(r, why);
    set_down(r, f->why == SO_WIRE_FULL ? LAST_GREETING_MS : MISFIT_MS);
}

static void complain(remote *r, const char *what) {
    r->n_malformed++;
    so_log(r->n_malformed > 1 ? SO_LOG_DEBUG : SO_LOG_WARN,
           "draft worker %s sent %s; continuing without its drafts in this round", r->address,
           what);
}

/* A message of the session. b NULL: no batch runs. */
static void handle(remote *r, so_async_batch *b) {
    const so_wire_msg *m = r->in;
    bool mine = b && m->batch == r->batch && !r->over, ok = true;
    if (m->type == SO_WIRE_WELCOME && r->state == GREETING) {
        r->n_room = m->welcome.n_parallel;
        r->n_ctx = m->welcome.n_ctx;
        set_up(r);
    } else if (m->type == SO_WIRE_REFUSED) {
        on_refused(r);
    }
    if (m->type == SO_WIRE_OUTCOMES && mine)
        ok = take_outcomes(r, b);
    else if (m->type == SO_WIRE_LEVEL && mine)
        ok = take_level(r, b);
    else if (m->type == SO_WIRE_DONE && mine)
        r->over = true;
    if (mine && (m->type == SO_WIRE_OUTCOMES || m->type == SO_WIRE_LEVEL))
        atomic_store(&b->busy_ns, (int64_t)m->busy_us * 1000);
    if (!ok) {
        r->over = true;
        complain(r, "drafts that do not fit the round");
    }
}

/* A worker that reads a long text says ALIVE between its passes. One that was told to stop ends its
 * job after the pass, so it owes more than that: otherwise it would be waited for without end. */
static void count_answer(remote *r) {
    if (r->in->type == SO_WIRE_ALIVE && r->owes_end)
        return;
    r->t_waiting = 0;
    r->owes_end = false;
}

/* Reads one message; false: none has come. */
static bool receive(remote *r, so_async_batch *b) {
    so_err err = {0};
    int n = r->z.recv(r->socket, r->bytes, SO_WIRE_BYTES, SO_ZMQ_DONTWAIT);
    if (n < 0)
        return false;
    int n_frames = 1 + so_link_drop_frames(&r->z, r->socket);
    int rc = n_frames > 1 ? so_err_set(&err, SO_EFORMAT, "a message of %d frames", n_frames)
                          : so_wire_read(r->bytes, (size_t)n, r->in, &err);
    if (rc == SO_EUNSUPPORTED && r->state == GREETING) {
        report_down(r, "is another version of sooth");
        set_down(r, MISFIT_MS);
    } else if (rc != SO_OK) {
        complain(r, err.msg);
    } else if (r->session != 0 && r->in->session == r->session &&
               (r->in->type == SO_WIRE_REFUSED || r->in->number >= r->n_received)) {
        r->n_received = r->in->number + 1;
        count_answer(r);
        handle(r, b);
    } else if (r->in->type == SO_WIRE_REFUSED && r->in->session == 0 && r->state == GREETING) {
        on_refused(r); /* by a worker that could not read the greeting */
    }
    return true;
}

/* --- a batch --- */

static bool is_over(const remote *r, const so_async_batch *b) {
    return r->over || atomic_load(&b->sealed);
}

/* Waits for a message, the seal, or until t_ns; then reads what has come. */
static void wait_until(remote *r, so_async_batch *b, int64_t t_ns) {
    int64_t left_ms = (t_ns - so_clock_ns()) / 1000000 + 1;
    so_zmq_pollitem items[] = {{r->socket, 0, SO_ZMQ_POLLIN, 0},
                               {NULL, r->wake_fd, SO_ZMQ_POLLIN, 0},
                               {r->monitor, 0, SO_ZMQ_POLLIN, 0}};
    uint64_t n;
    r->z.poll(items, (int)SO_LEN(items), (long)SO_MAX(left_ms, 0));
    if (items[1].revents & SO_ZMQ_POLLIN && read(r->wake_fd, &n, sizeof n) < 0)
        so_log(SO_LOG_DEBUG, "draft worker: %s", strerror(errno));
    read_events(r);
    for (int i = 0; i < 1000 && receive(r, b); i++)
        ;
}

/* Whether the worker is there; if not, it is greeted when it is time. Its answer is awaited only as
 * long as nothing is known to be wrong: with wait=N the engine waits for the batch to end. */
static bool is_up(remote *r, so_async_batch *b) {
    r->over = false;
    wait_until(r, NULL, 0);
    while (r->state != UP && !atomic_load(&b->sealed)) {
        if (so_clock_ns() >= r->t_greet)
            greet(r);
        if (r->reported)
            break;
        wait_until(r, NULL, r->t_greet);
    }
    return r->state == UP && !atomic_load(&b->sealed);
}

static bool is_silent(const remote *r) {
    return r->t_waiting != 0 && so_clock_ms_since(r->t_waiting) > SILENT_MS;
}

void so_remote_run(so_async_core *c, so_async_batch *b) {
    remote *r = (remote *)c->inner;
    if (atomic_load(&b->sealed))
        return;            /* its requests may be gone */
    so_async_open_jobs(b); /* sends nothing yet */
    if (!is_up(r, b))
        return;
    if (!send_batch(r, c, b)) {
        if (r->n_jobs > 0)
            set_down(r, 0); /* part of it may have been sent */
        return;
    }
    while (!is_over(r, b) && !is_silent(r))
        wait_until(r, b,
                   r->t_waiting ? r->t_waiting + (int64_t)(SILENT_MS * 1e6)
                                : so_clock_ns() + (int64_t)(SILENT_MS * 1e6));
    if (r->state == UP && !r->over) {
        r->out->batch = r->batch;
        r->out->busy_us = 0;
        r->owes_end = true;
        if (!send_msg(r, SO_WIRE_STOP))
            set_down(r, 0);
    }
    if (is_silent(r)) {
        report_down(r, "does not answer");
        set_down(r, r->greeting_ms);
    }
}

void so_remote_wake(so_drafter *d) {
    uint64_t one = 1;
    ssize_t n = write(((remote *)d)->wake_fd, &one, sizeof one);
    (void)n; /* it fails only if it has been woken 2^64 − 1 times */
}

/* --- the drafter --- */

static int remote_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    remote_request *s = SO_NEW(remote_request);
    (void)d;
    s->n_prompt = text->n_prompt;
    s->max_tokens = SO_MAX(text->max_tokens, SO_MAX(text->n_prompt, 1));
    s->n_source = text->n_source;
    s->source = so_try_alloc((size_t)text->n_source, sizeof *s->source);
    if (!s->source) {
        free(s);
        return so_err_set(err, SO_ENOMEM, "no memory for %d tokens", text->n_source);
    }
    if (text->n_source > 0)
        memcpy(s->source, text->source, (size_t)text->n_source * sizeof *s->source);
    *state = s;
    return SO_OK;
}

/* A request that comes back is sent anew. */
static void remote_preempt(so_drafter *d, void *state) {
    remote *r = (remote *)d;
    remote_request *s = state;
    if (s->session != 0 && s->session == r->session && r->state == UP) {
        r->out->request = s->id;
        r->n_open--;
        if (!send_msg(r, SO_WIRE_CLOSE))
            set_down(r, 0);
    }
    s->session = 0;
}

static void remote_close(so_drafter *d, void *state) {
    remote_request *s = state;
    remote_preempt(d, s);
    free(s->source);
    free(s);
}

/* It drafts ahead only. */
static int remote_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)d;
    (void)err;
    for (int i = 0; i < n_jobs; i++)
        jobs[i].n_levels = 0;
    return SO_OK;
}

static void remote_free(so_drafter *d) {
    remote *r = (remote *)d;
    if (!r->was_up && r->t_begun != 0 && so_clock_ms_since(r->t_begun) > PATIENCE_MS / 5)
        report_down(r, "did not answer");
    if (r->state == UP)
        send_msg(r, SO_WIRE_BYE);
    if (r->socket)
        r->z.close(r->socket);
    if (r->monitor)
        r->z.close(r->monitor);
    if (r->ctx)
        r->z.ctx_term(r->ctx);
    if (r->wake_fd >= 0)
        close(r->wake_fd);
    free(r->in);
    free(r->out);
    free(r->bytes);
    free(r);
}

static const so_drafter_vt REMOTE_VT = {
    .name = "model",
    .free = remote_free,
    .open = remote_open,
    .close = remote_close,
    .propose = remote_propose,
    .preempt = remote_preempt,
};

bool so_remote_is(const so_drafter *d) { return d->vt == &REMOTE_VT; }

static int open_link(remote *r, so_err *err) {
    int rc = so_zmq_load(&r->z, err);
    if (rc == SO_OK && r->e.key_file)
        rc = so_link_read_key(&r->z, r->e.key_file, &r->key, err);
    if (rc == SO_OK)
        rc = so_link_check(r->address, r->key.set, err);
    r->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (rc == SO_OK && r->wake_fd < 0)
        rc = so_err_set(err, SO_EIO, "an eventfd: %s", strerror(errno));
    if (rc != SO_OK)
        return rc;
    r->ctx = r->z.ctx_new();
    r->t_linked = so_clock_ns();
    return so_link_connect(&r->z, r->ctx, r->address, &r->key, &r->socket, &r->monitor, err);
}

int so_remote_create(const so_remote_engine *e, so_str address, uint64_t draft_id, so_drafter **out,
                     so_err *err) {
    remote *r = SO_NEW(remote);
    r->base.vt = &REMOTE_VT;
    r->e = *e;
    r->vocab_hash = so_draft_vocab_hash(e->tok);
    r->draft_id = draft_id;
    r->greeting_ms = FIRST_GREETING_MS;
    r->wake_fd = -1;
    snprintf(r->address, sizeof r->address, "%.*s", (int)SO_MIN(address.len, sizeof r->address),
             address.ptr);
    r->base.id =
        so_hash_bytes(r->address, strlen(r->address)); /* a worker elsewhere has other times */
    r->in = SO_NEW(so_wire_msg);
    r->out = SO_NEW(so_wire_msg);
    r->bytes = so_alloc(SO_WIRE_BYTES);
    int rc = open_link(r, err);
    if (rc == SO_OK)
        *out = &r->base;
    else
        remote_free(&r->base);
    return rc;
}
