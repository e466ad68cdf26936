/* Products of packed K types with AMX tiles, for the kernel table in kernels_avx512.c. */
#ifndef SO_BACKEND_CPU_MATMUL_AMX_H
#define SO_BACKEND_CPU_MATMUL_AMX_H

#include "backend/cpu/kernels.h"

#define SO_AMX_DECLARE(name, dtype) so_mm_fn so_mm_amx_##name;
SO_MM_K_DTYPES(SO_AMX_DECLARE)
#undef SO_AMX_DECLARE

long so_amx_multiply_all(long n);

#endif
