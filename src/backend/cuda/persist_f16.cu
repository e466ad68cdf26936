/* The persistent kernel for fp16 weights (persist.cu has the whole picture). */
#include "backend/cuda/persist_kernel.cuh"

so_persist_kernel so_persist_f16(int n, int head_dim) { return kernel_of<SET_F16>(n, head_dim); }
