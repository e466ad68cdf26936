/* The engine thread: loads the model, owns the engine, steps it while there is work and sleeps
 * otherwise. Other threads reach the engine only through jobs.
 *
 * The worker's lock is never held during a step, nor while another lock is taken. */
#ifndef SO_SERVER_WORKER_H
#define SO_SERVER_WORKER_H

#include "engine/bundle.h"
#include "server/job.h"
#include "server/metrics.h"

/* The loaded model and its settings. Filled by the load function; the objects that its members
 * point to must outlive the worker. */
typedef struct so_serving {
    const so_bundle *b;
    so_engine_opts eo;       /* on_step is set by the worker */
    so_sample_params sample; /* defaults for requests */
    so_spec_opts spec;       /* default for requests; drafter NULL: plain decoding */
    int n_room; /* maximum tokens of a sequence: the context, or the KV cache if that is
                                smaller. Set by the worker */
} so_serving;
/* How many tokens an answer may have after a prompt of n tokens. An encoder-decoder model has its
 * prompt elsewhere, and its answer begins with a start token. */
int so_serving_room(const so_serving *sv, size_t n_prompt);
/* Loads the model and fills *out. */
typedef int so_load_fn(void *user, so_serving *out, so_err *err);

typedef enum so_worker_state {
    SO_WORKER_LOADING,
    SO_WORKER_READY,
    SO_WORKER_FAILED, /* the model could not be loaded: see so_worker_error */
    SO_WORKER_LOST,   /* the device failed for good: every request fails; see so_worker_error */
    SO_WORKER_STOPPED,
} so_worker_state;

typedef struct so_worker_opts {
    so_load_fn *load; /* runs on the engine thread */
    void *load_user;
    int n_queue; /* maximum number of choices that wait, in addition to the n_parallel that run. A
                    choice is one of the n answers of a request */
    so_metrics *metrics;
    void (*on_state)(void *user); /* called on the engine thread when the state has changed */
    void *state_user;
} so_worker_opts;

so_worker *so_worker_create(const so_worker_opts *o);
/* Ends all jobs with an error, joins the thread, frees the engine. */
void so_worker_free(so_worker *w);

so_worker_state so_worker_get_state(so_worker *w);
void so_worker_error(so_worker *w, so_err *out);
/* Valid and constant from READY on. */
const so_serving *so_worker_serving(const so_worker *w);

/* Takes a reference to the job. Returns SO_ELIMIT if the queue is full: try again in *retry_s
 * seconds; SO_ECANCELLED after so_worker_end_all. */
int so_worker_submit(so_worker *w, so_job *job, int *retry_s);
/* Cancels all jobs at the next step: each ends with status 503 and the message `why`, unless it
 * has failed before. No new jobs are accepted. */
void so_worker_end_all(so_worker *w, const char *why);

typedef struct so_worker_usage {
    int running, waiting; /* choices */
    int jobs;
    so_engine_stats engine; /* after the last step */
    /* Bytes of the device's own memory, queried at most once a second; total 0: it has none. */
    size_t device_free, device_total;
} so_worker_usage;
so_worker_usage so_worker_get_usage(so_worker *w);

#endif
