/* A process that drafts ahead for engines elsewhere: the worker's side of async(model,worker=…). See
 * remote_worker.c. */
#ifndef SO_DRAFT_REMOTE_WORKER_H
#define SO_DRAFT_REMOTE_WORKER_H

#include "format/dtype.h"
#include "model/model.h"

typedef struct so_remote_worker so_remote_worker;

typedef struct so_remote_worker_opts {
    const so_model *model; /* the draft; must outlive the worker, which alone uses its backend */
    uint64_t vocab_hash;   /* so_draft_vocab_hash of its tokenizer */
    uint64_t draft_id;     /* so_registry_id of its file */
    const char *address;   /* to listen on */
    const char *key_file;  /* NULL: none */
    int n_ctx, n_parallel; /* of one engine */
    int n_batch;           /* maximum tokens of one catch-up pass */
    so_dtype kv_dtype;
    float temp, p_min; /* as so_model_drafter_opts */
} so_remote_worker_opts;

/* Listens from here on. */
int so_remote_worker_create(const so_remote_worker_opts *o, so_remote_worker **out, so_err *err);
const char *so_remote_worker_address(const so_remote_worker *w); /* with the port it got */
/* Serves engines until stop_fd is readable. */
void so_remote_worker_run(so_remote_worker *w, int stop_fd);
void so_remote_worker_free(so_remote_worker *w); /* NULL is fine */

#endif
