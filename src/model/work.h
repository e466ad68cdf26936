/* The least work of a pass, counted from the model's shapes: the model's side of a roofline
 * estimate. */
#ifndef SO_MODEL_WORK_H
#define SO_MODEL_WORK_H

#include "model/model.h"

typedef struct so_work {
    double n_bytes; /* weights and cache entries read once, logits written once */
    double n_macs;  /* multiply-adds of matrices and of attention */
} so_work;

/* One pass over a chain of n_rows after n_ctx positions; the last n_logits rows have logits. Data
 * that stays in the processor's caches is not counted: activations, and the rows looked up in an
 * embedding that is not also the output matrix. */
so_work so_model_work(const so_model *m, so_dtype kv_dtype, int n_ctx, int n_rows, int n_logits);

/* Encoder-decoder models: the encoder reads a source of n tokens, and its keys and values for the
 * decoder are computed. */
so_work so_model_source_work(const so_model *m, int n);

#endif
