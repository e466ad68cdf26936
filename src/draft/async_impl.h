/* Shared by async.c (engine thread), async_thread.c (async thread) and async_choose.c (which
 * outcomes); and by the two sides of a draft worker (wire.h, remote.c, remote_worker.c), which use
 * batches and estimates.
 *
 * Lock order: a thread that holds host->lock may take no other; holding the drafters (busy) is not a
 * lock but a state that host->lock guards. */
#ifndef SO_DRAFT_ASYNC_IMPL_H
#define SO_DRAFT_ASYNC_IMPL_H

#include <pthread.h>
#include <stdatomic.h>

#include "draft/ahead.h"
#include "draft/async.h"

typedef struct so_async_core so_async_core;   /* one async(X) */
typedef struct so_async_state so_async_state; /* one of its requests */
typedef struct so_async_batch so_async_batch; /* the jobs of one dispatch */

/* Hidden states of the target for the latest tokens; those of the last finished round matter most. */
enum { SO_ASYNC_STATES = 16 };
typedef struct so_async_hidden {
    float *x; /* [SO_ASYNC_STATES][d_hidden]; NULL: X reads none */
    int pos[SO_ASYNC_STATES];
} so_async_hidden;

enum { SO_ASYNC_BATCHES = 2, SO_ASYNC_CLASSES = 8, SO_ASYNC_PLACES = 12 };

/* Counts with a prior; they fade. */
typedef struct so_async_rate {
    float yes, all;
} so_async_rate;

/* How rounds have ended, learned by the engine thread at each lookup. Copied into each batch. */
typedef struct so_async_estimates {
    so_async_rate accept[SO_ASYNC_CLASSES]; /* by confidence: a tested guess is accepted */
    /* By bonus or correction, place of the candidate in its row and class of its chance: it is the
     * token. Far places are counted together, and classes of chances are powers of two. */
    so_async_rate token[2][SO_ASYNC_PLACES][SO_ASYNC_CLASSES];
} so_async_estimates;

typedef enum so_batch_status {
    SO_BATCH_FREE,
    SO_BATCH_POSTED,  /* waits for the async thread */
    SO_BATCH_RUNNING, /* the async thread has it */
    SO_BATCH_DONE,
} so_batch_status;

struct so_async_batch {
    so_batch_status status; /* guarded by host->lock */
    so_ahead_job *jobs;     /* [n_parallel] */
    so_async_state **owners;
    so_async_hidden *hidden; /* [n_parallel] copies, as of the dispatch */
    int n, depth;
    int n_open;       /* engine thread: requests in it that have not ended */
    double window_ms; /* expected time until the engine seals it */
    int64_t t_ns;     /* of the dispatch */
    so_async_estimates estimates;
    float *q; /* of all jobs; allocated by the async thread when first needed */
    size_t q_floats;
    atomic_bool sealed;   /* by the engine: what is not published yet never will be */
    atomic_bool chosen;   /* by the async thread: the outcomes are fixed */
    atomic_int levels;    /* by the async thread: published levels */
    atomic_bool over;     /* by the async thread: nothing more will be published */
    int n_levels;         /* engine thread: `levels` when it was sealed */
    bool is_sealed;       /* engine thread */
    atomic_llong busy_ns; /* time of drafting, of the async thread or the draft worker */
    int64_t counted_ns;   /* engine thread: the part of it that requests have counted */
};

struct so_async_state {
    so_async_core *core;
    /* Guarded by host->lock: */
    so_async_state *next; /* in host->requests */
    bool queued, closed, preempted;
    /* Engine thread. `text` is append-only: the async thread reads the part that its job names. */
    int refs;
    int32_t *text, *expected, *source;
    so_bias *bias;
    int cap, n_text, n_prompt, n_expected, n_source;
    int batch, job;         /* of the latest dispatch; −1: none */
    uint32_t round;         /* that it drafts for */
    so_async_hidden hidden; /* the state of position p is at p % SO_ASYNC_STATES */
    so_async_counts counts;
    /* Whoever holds the drafter: */
    void *inner;
    bool opened, broken;
    int32_t *own; /* [cap] the text and a path, for drafters without ahead_… functions */
    int n_own, n_observed;
};

struct so_async_core {
    so_async_host *host;
    so_async_core *next; /* in host->cores; guarded by host->lock */
    so_drafter *inner;
    so_async_opts o;
    int index; /* of the drafter `cached` */
    int refs;
    so_async_batch batches[SO_ASYNC_BATCHES];
    /* Engine thread: */
    so_async_state *opening; /* the state that `cached` has opened last, for `sync` */
    so_async_estimates estimates;
    double window_ms;  /* from dispatch to seal, without waits of wait=N; running mean */
    double waited_ms;  /* of wait=N, in the lookup that is under way */
    double spilled_ms; /* of drafting, after the batch was sealed */
    /* Async thread: the time of a level over n outcomes is a + b·n; sums of a fading regression. */
    double fit_n, fit_x, fit_y, fit_xx, fit_xy;
    so_tree scratch;
    bool failed;
};

struct so_async_host {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t work, idle;
    so_async_core *cores;     /* newest first */
    so_async_state *requests; /* to be closed or preempted by the async thread */
    bool stop;
    so_async_counts totals; /* engine thread: of all requests */
    bool busy;              /* someone holds the drafters */
    int depth;              /* engine thread: nested so_async_lock */
    int n_waiting; /* engine threads that wait for them; the async thread lets them go first */
    bool has_faults;
    so_async_faults faults;
    uint32_t n_draws; /* of the faults; async thread */
    atomic_bool halt; /* ends a fault's sleep */
};

/* --- async.c --- */

/* Ends holding the drafters. Any thread that holds them. */
void so_async_let_go(so_async_host *h);
/* Opens the request in X; false: X cannot draft for it. Holder of the drafter. */
bool so_async_open_inner(so_async_state *s);
/* Gives X the hidden states of a request that it has opened. Holder of the drafter. */
void so_async_give_hidden(so_async_state *s, const so_async_hidden *h);
void so_async_free_state(so_async_state *s);

/* --- async_thread.c --- */

void *so_async_thread_main(void *host);
/* Closes and preempts the requests in host->requests: all, which only the async thread may do,
 * between batches; or those of one core that has no batch any more. Holder of the drafters, without
 * the lock. */
void so_async_serve_requests(so_async_host *h, const so_async_core *only);
/* Opens the requests of a batch in X; those that X cannot draft for are skipped. Holder of the
 * drafters. */
void so_async_open_jobs(so_async_batch *b);

/* --- async_choose.c --- */

void so_async_estimates_init(so_async_estimates *e);
/* A round ended at `node` with `token`: learns from it. Returns the outcome's number, or −1. */
int so_async_learn(so_async_estimates *e, const so_ahead_job *a, int node, int32_t token);
/* Chooses the outcomes of all jobs of a batch that is `spent_ms` old. */
void so_async_choose(const so_async_core *c, so_async_batch *b, double spent_ms);
/* A level over n outcomes took ms. */
void so_async_observe_level(so_async_core *c, int n, double ms);

#endif
