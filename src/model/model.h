/* A loaded model (weights, immutable) and a pass (the scratch memory of forward passes, one per
 * thread of control). Forward code is straight-line, one file per family, over so_submit. */
#ifndef SO_MODEL_MODEL_H
#define SO_MODEL_MODEL_H

#include "backend/backend.h"
#include "kv/kv.h"
#include "model/hparams.h"

typedef struct so_model so_model;
typedef struct so_pass so_pass;

typedef struct so_model_opts {
    bool quantize; /* round 2-D weights to `dtype` at load */
    so_dtype dtype;
    bool no_pack; /* leave matrices as they lie in the file; the same results, slower */
    bool draft;   /* may be one that can say only some of its tokens; else such a file is refused */
    /* Called with 0 … 1 while loading takes long; may be NULL. */
    void (*progress)(void *user, double done);
    void *user;
} so_model_opts;

/* The checkpoint stays open (its mapping holds the weights) until the model is freed. */
int so_model_load(so_checkpoint *ck, so_backend *b, const so_model_opts *opts, so_model **out,
                  so_err *err);
void so_model_free(so_model *m);
const so_hparams *so_model_hparams(const so_model *m);
so_backend *so_model_backend(const so_model *m);
size_t so_model_weight_bytes(const so_model *m);
int64_t so_model_n_params(const so_model *m);
/* How many tokens it can say, which is the width of its logits, and their ids, ascending; NULL: all
 * of the vocabulary. */
int so_model_n_said(const so_model *m);
const int32_t *so_model_said(const so_model *m);
/* Width of the target's states that a draft reads beside tokens (docs/formats.md); 0: none. */
int so_model_d_state(const so_model *m);

/* One row of a batch. The k-th row of a sequence (in batch order) is written to slot len + k.
 * pos = len + depth in the tree. parent: index, within the batch, of the row this one follows; −1
 * where it follows the committed context. A parent stands before its children, in the same
 * sequence. */
typedef struct so_row {
    int32_t token, pos, seq, parent;
    bool want_logits;
    /* The target's state from which the token was drawn, [so_model_d_state]; NULL: not known. Only
     * where the model reads states. */
    const float *state;
} so_row;

typedef struct so_batch {
    const so_row *rows;
    int n_rows;
    so_seq *const
        *seqs; /* rows[i].seq indexes this; each has an open speculation of its row count */
    int n_seqs;
} so_batch;

enum { SO_PASS_LOGITS = 1, SO_PASS_ARGMAX = 2, SO_PASS_HIDDEN = 4 };

/* max_rows: the widest batch; max_logits: the most rows that want logits at once. */
int so_pass_create(const so_model *m, so_kv *kv, int max_rows, int max_logits, so_pass **out,
                   so_err *err);
void so_pass_free(so_pass *p);

/* Queues the operations of a batch, which is not looked at again. Rows, tokens, positions and
 * parents are checked (SO_EINVAL names the row), and nothing is queued where that fails. want:
 * SO_PASS_… bits, for the rows with want_logits. The caller may do other work until so_pass_wait,
 * but submit no second pass on the same backend: a failure would be reported to the wrong one. */
int so_pass_submit(so_pass *p, const so_batch *batch, unsigned want, so_err *err);
/* Waits for the submitted batch; its results can be read from here on, and not before. */
int so_pass_wait(so_pass *p, so_err *err);
/* Both in a row. */
int so_pass_run(so_pass *p, const so_batch *batch, unsigned want, so_err *err);

/* Results of the last pass for the i-th row that wanted logits; valid until the next one. Damaged
 * weights may give a row that is not finite: the pass does not fail by it, because what other rows
 * say is right all the same. Whoever goes by a row checks it first. */
int so_pass_check(const so_pass *p, int i, so_err *err); /* SO_EFORMAT names the model's file */
int so_pass_check_all(const so_pass *p, so_err *err);
const float *so_pass_logits(const so_pass *p, int i); /* [so_model_n_said] */
int32_t so_pass_argmax(const so_pass *p, int i);      /* an id; −1 where the row is not finite */
const float *so_pass_hidden(const so_pass *p, int i); /* [d_model], after the last norm */

#endif
