/* The persistent kernel for weights of 4 bits alone (persist.cu has the whole picture). */
#include "backend/cuda/persist_kernel.cuh"

so_persist_kernel so_persist_q4(int n, int head_dim) { return kernel_of<SET_Q4>(n, head_dim); }
