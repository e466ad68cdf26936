/* Launching the operations of a pass; launch.cu says how they are grouped. */
#ifndef SO_BACKEND_CUDA_LAUNCH_CUH
#define SO_BACKEND_CUDA_LAUNCH_CUH

#include <string.h>

#include "backend/cuda/device.cuh"

/* Memory of the backend that the kernels of a pass use. */
typedef struct so_memory {
    __half *half[2];
    size_t half_bytes; /* of each */
    so_scratch scratch;
} so_memory;

/* Sets the sizes in `need` to what the list needs. */
void so_cuda_need(const so_op *ops, size_t n_ops, so_memory *need);
void so_cuda_run(const so_queue *q, const so_op *ops, size_t n_ops, const so_memory *m);

#endif
