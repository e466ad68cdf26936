/* The kernel table of AVX2 with the dot products of AVX-VNNI, for processors without AVX-512.
 * Products with packed weights and scores of a Q8_0 cache use them; everything else is as on
 * AVX2. */
#define HAS_VNNI 1
#include "backend/cpu/simd_avx2.h"

#include "backend/cpu/rows_x86.h"

#include "backend/cpu/matmul_x86.h"

const so_kernels so_kernels_avxvnni = {.level = SO_CPU_AVXVNNI, ROW_KERNELS, MATMULS};
