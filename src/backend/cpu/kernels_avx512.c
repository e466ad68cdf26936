/* The kernel tables of AVX-512 (F, BW, VL, DQ) with VNNI, and of AMX, which differs only in the
 * products of K types and in multiply_all (matmul_amx.c). */
#include "backend/cpu/simd_avx512.h"

#include "backend/cpu/rows_x86.h"

#include "backend/cpu/matmul_x86.h"

#include "backend/cpu/matmul_amx.h"

const so_kernels so_kernels_avx512 = {.level = SO_CPU_AVX512, ROW_KERNELS, MATMULS};

#define AMX_ENTRY(name, dtype) [dtype] = so_mm_amx_##name,
const so_kernels so_kernels_amx = {
    .level = SO_CPU_AMX,
    ROW_KERNELS,
    .matmul = {SO_MM_PLAIN_DTYPES(MM_ENTRY) SO_MM_K_DTYPES(AMX_ENTRY)},
    .multiply_all = so_amx_multiply_all,
};
