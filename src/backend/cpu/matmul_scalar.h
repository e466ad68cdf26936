/* The scalar matrix products, so_mm_scalar_f32 … so_mm_scalar_q6_k. */
#ifndef SO_BACKEND_CPU_MATMUL_SCALAR_H
#define SO_BACKEND_CPU_MATMUL_SCALAR_H

#include "backend/cpu/kernels.h"

#define DECLARE(name, dtype) so_mm_fn so_mm_scalar_##name;
SO_MM_DTYPES(DECLARE)
#undef DECLARE

#endif
