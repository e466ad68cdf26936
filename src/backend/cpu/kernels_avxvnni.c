/* Kernels for AVX2 with AVX-VNNI, the dot products of processors that have no AVX-512: packed
 * weights gain, everything else is as on AVX2. */
#define HAS_DP 1
#include "backend/cpu/words_avx2.h"

#include "backend/cpu/rows_x86.h"

#include "backend/cpu/matmul_x86.h"

const so_kernels so_kernels_avxvnni = {.level = SO_CPU_AVXVNNI, ROW_KERNELS, MATMULS};
