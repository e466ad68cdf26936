/* The persistent kernel for quantised weights of several formats, or of 8 bits (persist.cu has the whole
 * picture). */
#include "backend/cuda/persist_kernel.cuh"

so_persist_kernel so_persist_quant(int n, int head_dim) {
    return kernel_of<SET_QUANT>(n, head_dim);
}
