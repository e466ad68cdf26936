/* Estimates the memory a model needs, from its header alone: nothing is loaded or allocated. Any
 * thread. */
#ifndef SO_MODEL_BUDGET_H
#define SO_MODEL_BUDGET_H

#include "model/hparams.h"

typedef struct so_budget {
    so_hparams hp;
    int64_t n_params;
    int64_t weight_bytes;
    bool estimated; /* no weight file: n_params, weight_bytes follow from config.json */
    int64_t ctx;    /* tokens of one sequence */
    int64_t kv_bytes_per_token, kv_bytes_per_seq, kv_bytes; /* kv_bytes: all sequences */
    int n_sources; /* encoder-decoder models: source texts of up to ctx tokens that are kept */
    int64_t source_bytes; /* their keys and values */
} so_budget;

/* ctx 0: the context length the model was trained for. A longer context is allowed; the caller may
 * warn. */
int so_budget_of(const so_checkpoint *ck, int64_t ctx, int n_seqs, so_dtype kv_dtype,
                 so_budget *out, so_err *err);

#endif
