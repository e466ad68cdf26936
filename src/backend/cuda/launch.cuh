/* Launching the operations of a pass; launch.cu says how they are grouped. */
#ifndef SO_BACKEND_CUDA_LAUNCH_CUH
#define SO_BACKEND_CUDA_LAUNCH_CUH

#include <string.h>

#include "backend/cuda/persist.cuh"

/* Memory of the backend that the kernels of a pass use. */
typedef struct so_memory {
    __half *half[2];
    size_t half_bytes;          /* of each */
    float *squares, *row_scale; /* of a split norm */
    size_t squares_bytes, row_scale_bytes;
    char *exchange; /* of the persistent kernel */
    size_t exchange_bytes;
    so_scratch scratch;
} so_memory;

/* Whether an operation from number `from` on reads the buffer of v before one overwrites its n rows; at_end
 * is the answer if neither happens. */
bool so_cuda_is_read(const so_op *ops, size_t n_ops, size_t from, so_view v, int n, bool at_end);

/* Whether operation i is an RMS norm of the n rows of width d at `sum`, the result of an addition, and only
 * products read its result, as fp16: it is computed as a split norm then. */
bool so_cuda_is_split_norm(const so_op *ops, size_t n_ops, size_t i, so_view sum, int n, int d);

/* Sets the sizes in `need` to what the list needs. */
void so_cuda_need(const so_queue *q, const so_op *ops, size_t n_ops, so_memory *need);
/* plan: which layers and logits the persistent kernel computes, or NULL. */
void so_cuda_run(const so_queue *q, const so_op *ops, size_t n_ops, const so_memory *m,
                 const so_persist_plan *plan);

#endif
