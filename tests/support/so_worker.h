/* A draft worker in a thread of the test, and a path to it that loses, changes and delays messages. */
#ifndef SO_TEST_WORKER_H
#define SO_TEST_WORKER_H

#include "draft/remote_worker.h"
#include "so_rig.h"

/* Skips the test where ZeroMQ is not installed. */
void so_worker_need_zmq(void);

typedef struct so_worker so_worker;

/* Serves the rig's model, which nothing else may use meanwhile. address NULL: a free port of this
 * host. NULL if it cannot be started: *err says why. */
so_worker *so_worker_start(const so_rig *draft, const char *address, const char *key_file,
                           so_err *err);
const char *so_worker_address(const so_worker *w);
void so_worker_stop(so_worker *w);

typedef enum so_path_fault {
    SO_PATH_DELAY,
    SO_PATH_DROP,
    SO_PATH_TRUNCATE,
    SO_PATH_GARBLE,  /* some bytes are others */
    SO_PATH_REORDER, /* it comes after the next one */
    SO_PATH_REPLAY,  /* it comes twice, the second time later */
    SO_PATH_CUT,     /* connections are closed, with all that is under way */
    SO_PATH_N_FAULTS,
} so_path_fault;

typedef struct so_path_opts {
    uint64_t seed;
    double rate[SO_PATH_N_FAULTS]; /* chance per message */
    double delay_ms;               /* of SO_PATH_DELAY, at most */
    double latency_ms;             /* of every message */
} so_path_opts;

typedef struct so_path so_path;

/* A proxy to the worker at this address. */
so_path *so_path_open(const char *worker, const so_path_opts *o);
const char *so_path_address(const so_path *p);
/* Requests that the worker was told of since the last call, and those with their seed or temperature. */
int so_path_opened(so_path *p, int *n_seeds, int *n_temps);
/* Stops it; adds the faults that happened to happened[SO_PATH_N_FAULTS], and to *n_during those of
 * messages that belong to a round that is being verified. */
void so_path_close(so_path *p, int64_t *happened, int64_t *n_during);

#endif
