/* The kernel table of AVX2 with FMA and F16C. */
#define HAS_VNNI 0
#include "backend/cpu/simd_avx2.h"

#include "backend/cpu/rows_x86.h"

#include "backend/cpu/matmul_x86.h"

const so_kernels so_kernels_avx2 = {.level = SO_CPU_AVX2, ROW_KERNELS, MATMULS};
