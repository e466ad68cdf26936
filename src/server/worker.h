/* The engine thread: loads the model, owns the engine, steps it while there is work and sleeps
 * while there is none. Everybody else talks to it through jobs.
 *
 * No lock is taken while another is held, but for the metrics'. None is held during a step. */
#ifndef SO_SERVER_WORKER_H
#define SO_SERVER_WORKER_H

#include "engine/bundle.h"
#include "server/job.h"
#include "server/metrics.h"

/* What is served. Filled by the load function; whatever it points to outlives the worker. */
typedef struct so_serving {
    const so_bundle *b;
    so_engine_opts eo;       /* on_step is the worker's */
    so_sample_params sample; /* where a request says nothing */
    so_spec_opts spec;       /* the same; drafter NULL: plain decoding */
    int n_room; /* most tokens of a prompt and its answer: the context, or the cache where that is
                   less; set by the worker */
} so_serving;
typedef int so_load_fn(void *user, so_serving *out, so_err *err);

typedef enum so_worker_state {
    SO_WORKER_LOADING,
    SO_WORKER_READY,
    SO_WORKER_FAILED, /* loading did: see so_worker_error */
    SO_WORKER_STOPPED,
} so_worker_state;

typedef struct so_worker_opts {
    so_load_fn *load; /* runs on the engine thread */
    void *load_user;
    int n_queue; /* answers that may wait beyond those that run */
    so_metrics *metrics;
    void (*on_state)(void *user); /* the state has changed; engine thread */
    void *state_user;
} so_worker_opts;

so_worker *so_worker_create(const so_worker_opts *o);
/* Finishes all jobs with an error, ends the thread, frees the engine. */
void so_worker_free(so_worker *w);

so_worker_state so_worker_get_state(so_worker *w);
void so_worker_error(so_worker *w, so_err *out);
/* Valid from READY on, and does not change. */
const so_serving *so_worker_serving(const so_worker *w);

/* Takes a reference. SO_ELIMIT: too many wait, try again in *retry_s seconds. The job's state tells
 * the rest. */
int so_worker_submit(so_worker *w, so_job *job, int *retry_s);
/* All jobs end with this error at the next step, later ones at once. */
void so_worker_end_all(so_worker *w, const char *why);

typedef struct so_worker_load {
    int running, waiting, jobs;
    so_engine_stats engine; /* after the last step */
} so_worker_load;
so_worker_load so_worker_get_load(so_worker *w);

#endif
