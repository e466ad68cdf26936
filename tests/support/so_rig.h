/* A model with everything it needs to run, for tests: checkpoint, backend, weights, cache, pass. */
#ifndef SO_RIG_H
#define SO_RIG_H

#include "model/model.h"

typedef struct so_rig_opts {
    bool deferred;
    int n_threads; /* 0: one */
    so_cpu_level level;
    so_dtype kv_dtype; /* SO_DTYPE_F32 is 0, the default */
    int n_pages;       /* 0: 64 */
    int max_rows;      /* 0: 128 */
    int run_len;       /* slotted cache with page runs for so many positions; 0: paged */
    so_model_opts model;
} so_rig_opts;

typedef struct so_rig {
    so_checkpoint *ck;
    so_backend *b;
    so_model *m;
    so_kv *kv;
    so_pass *p;
    int n_vocab;
    int width; /* of its logits: n_vocab, or less of a draft */
} so_rig;

/* Fails the test on any error. */
void so_rig_open(so_rig *r, const char *path, const so_rig_opts *opts);
void so_rig_close(so_rig *r);

/* Appends tokens to s as one chain and commits it. logits: [n][width], or NULL. */
void so_rig_chain(so_rig *r, so_seq *s, const int32_t *tokens, int n, float *logits);
/* The same in chunks of `chunk` rows; 0: whole. */
void so_rig_chunks(so_rig *r, so_seq *s, const int32_t *tokens, int n, int chunk, float *logits);

/* SOOTH_TEST_FULL=1 asks for whole cross products instead of a covering part of them. */
/* The backend that model tests run on: $SOOTH_DEVICE, or cpu. */
const char *so_test_device(void);
bool so_test_on_gpu(void);
/* Skips a test of encoder-decoder models where they do not run. */
void so_test_skip_encoders(void);
bool so_test_full(void);

/* The levels this CPU has, scalar first. */
int so_rig_levels(so_cpu_level *out);

#endif
