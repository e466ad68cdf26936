/* The kernel table of AVX2 with AVX-VNNI, for processors that have these dot products but no
 * AVX-512. Packed weights become faster; everything else is as on AVX2. */
#define HAS_VNNI 1
#include "backend/cpu/simd_avx2.h"

#include "backend/cpu/rows_x86.h"

#include "backend/cpu/matmul_x86.h"

const so_kernels so_kernels_avxvnni = {.level = SO_CPU_AVXVNNI, ROW_KERNELS, MATMULS};
