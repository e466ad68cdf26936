/* What a pass takes at least, counted from the model's shapes: the side of the roofline that is not
 * the machine's. */
#ifndef SO_MODEL_WORK_H
#define SO_MODEL_WORK_H

#include "model/model.h"

typedef struct so_work {
    double n_bytes; /* weights and cache entries read once, logits written once */
    double n_macs;  /* multiply-adds of matrices and of attention */
} so_work;

/* One pass over a chain of n_rows behind n_ctx positions, the last n_logits rows with logits. What
 * stays in the nearest caches is not counted: activations, and the looked-up rows of an embedding
 * that is not the output matrix as well. */
so_work so_model_work(const so_model *m, so_dtype kv_dtype, int n_ctx, int n_rows, int n_logits);

#endif
