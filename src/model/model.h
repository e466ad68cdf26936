/* A loaded model (so_model: weights, immutable) and what runs it (so_pass: scratch memory and
 * results of one forward pass at a time). The forward code is a straight list of so_submit calls,
 * one file per architecture family.
 *
 * Threads. A model may be read by several threads. A pass and the model's backend are used by one
 * thread at a time; so_pass_submit, so_pass_wait, so_model_load and so_model_free use the
 * backend. */
#ifndef SO_MODEL_MODEL_H
#define SO_MODEL_MODEL_H

#include "backend/backend.h"
#include "kv/kv.h"
#include "model/hparams.h"

typedef struct so_model so_model;
typedef struct so_pass so_pass;

typedef struct so_model_opts {
    bool quantize; /* convert matrices to `dtype` at load */
    so_dtype dtype;
    bool no_pack; /* keep the matrices in the file's layout; same results, slower */
    bool draft;   /* accept files that can only be drafts (vocabulary subset, hidden states) */
    /* Called with the progress, 0 … 1, during a long load; may be NULL. */
    void (*progress)(void *user, double done);
    void *user;
} so_model_opts;

/* The caller keeps ck open until the model is freed: the weights may be in its mapping. */
int so_model_load(so_checkpoint *ck, so_backend *b, const so_model_opts *opts, so_model **out,
                  so_err *err);
void so_model_free(so_model *m);
const so_hparams *so_model_hparams(const so_model *m);
so_backend *so_model_backend(const so_model *m);
const so_checkpoint *so_model_checkpoint(const so_model *m);
size_t so_model_weight_bytes(const so_model *m);
/* Of them, those that are read for a source and not for a pass. */
size_t so_model_source_bytes(const so_model *m);
int64_t so_model_n_params(const so_model *m);
/* The length of a logits row: the size of the vocabulary subset, or n_vocab if the model has logits
 * for every token. And the subset itself, ascending token ids; NULL: every token. */
int so_model_logits_len(const so_model *m);
const int32_t *so_model_vocab_subset(const so_model *m);
/* The width of the target's hidden states that a draft model reads in addition to tokens
 * (docs/formats.md); 0: none. */
int so_model_d_target_hidden(const so_model *m);

/* One row of a batch. The k-th row of a sequence (in batch order) is written to slot
 * so_seq_next_slot + k. pos = len + depth in the tree. parent: index in the batch of the row that this
 * one follows; −1 if it follows the committed context; so_row_after(slot) if it follows a node of an
 * earlier pass of the same speculation (so_seq_extend). A parent comes before its children and
 * belongs to the same sequence.
 *
 * token SO_ROW_GUESS: the argmax of the parent's logits, which the host does not see before
 * so_pass_wait. Such rows come after all others and form levels: the i-th row of a level follows
 * the i-th row with want_logits of the level before. Results are those of one pass per level. */
enum { SO_ROW_GUESS = INT32_MIN };
enum { SO_PASS_LEVELS = 32 }; /* of a batch, at most; rows without SO_ROW_GUESS form one */
typedef struct so_row {
    int32_t token, pos, seq, parent;
    bool want_logits;
    bool logits_to_host; /* with want_logits: its logits are downloaded, as with SO_PASS_LOGITS */
    /* With want_logits: what the backend samples for the row (SO_PASS_SAMPLE); NULL: the argmax. */
    const so_sample_row *sample;
    /* The target's hidden state from which the token was sampled, [so_model_d_target_hidden]; NULL:
     * not known. Only for models that read hidden states. */
    const float *target_hidden;
    /* [d_model] The row's input to the first layer, in place of its token's embedding; NULL: none.
     * The token is checked but not read. */
    const float *embedding;
} so_row;

static inline int32_t so_row_after(int slot) { return -2 - slot; }

typedef struct so_batch {
    const so_row *rows;
    int n_rows;
    /* Indexed by rows[i].seq; each has as many rows as its latest begin or extend reserved nodes. */
    so_seq *const *seqs;
    int n_seqs;
} so_batch;

/* SO_PASS_LOGITS: the logits of all rows with want_logits are downloaded. SO_PASS_SAMPLE: the
 * backend samples from these rows, and their argmax is computed too; at most SO_SAMPLE_MAX logits.
 * Models with a vocabulary subset can only have the argmax weighed (SO_SAMPLE_BEST). */
enum { SO_PASS_LOGITS = 1, SO_PASS_ARGMAX = 2, SO_PASS_HIDDEN = 4, SO_PASS_SAMPLE = 8 };

/* max_rows: maximum rows of a batch. max_logits: maximum rows with want_logits. */
int so_pass_create(const so_model *m, so_kv *kv, int max_rows, int max_logits, so_pass **out,
                   so_err *err);
void so_pass_free(so_pass *p);

/* Memory for batches with SO_ROW_GUESS. Their first submit calls it, too; a caller that has another
 * way calls it before, to see whether the device has the memory. */
int so_pass_reserve_levels(so_pass *p, so_err *err);

/* Queues the operations of a batch. The batch is not read after the call. Rows, tokens, positions
 * and parents are checked first; if an error is returned, nothing was queued. want: SO_PASS_… bits,
 * the results of the rows with want_logits. The caller may do other work until so_pass_wait, but
 * must not submit a second pass on the same backend: an error would be reported to the wrong
 * pass. */
int so_pass_submit(so_pass *p, const so_batch *batch, unsigned want, so_err *err);
/* Waits for the submitted batch. Its results are readable only after this call. */
int so_pass_wait(so_pass *p, so_err *err);
/* so_pass_submit, then so_pass_wait. */
int so_pass_run(so_pass *p, const so_batch *batch, unsigned want, so_err *err);

/* Results of the last pass for the i-th row with want_logits, valid until the next pass. Damaged
 * weights can make a row NaN or infinite. This does not fail the pass, because the other rows are
 * correct; so the caller must check a row before using it. */
int so_pass_check(const so_pass *p, int i, so_err *err); /* SO_EFORMAT; names the model's file */
int so_pass_check_all(const so_pass *p, so_err *err);
const float *so_pass_logits(const so_pass *p, int i); /* [so_model_logits_len] */
/* The same for a row whose logits may still be on the device: they are downloaded first, which is a
 * round trip. For batches of one level. NULL: the device failed. */
const float *so_pass_fetch_logits(so_pass *p, int i, so_err *err);
const so_sample_result *so_pass_sampled(const so_pass *p, int i);
int32_t so_pass_argmax(const so_pass *p, int i);      /* a token id; −1: the row is not finite */
const float *so_pass_hidden(const so_pass *p, int i); /* [d_model], after the last norm */

#endif
