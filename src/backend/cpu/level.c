/* The kernel table of each CPU level. Keeps no state; any thread. */
#include "backend/cpu/cpu.h"

const so_kernels *so_cpu_kernels(so_cpu_level level) {
    static const so_kernels *const tables[SO_CPU_LEVELS] = {
        [SO_CPU_SCALAR] = &so_kernels_scalar,
#if defined(__x86_64__)
        [SO_CPU_AVX2] = &so_kernels_avx2,
        [SO_CPU_AVXVNNI] = &so_kernels_avxvnni,
        [SO_CPU_AVX512] = &so_kernels_avx512,
        [SO_CPU_AMX] = &so_kernels_amx,
#endif
    };
    return so_cpu_level_usable(level) ? tables[level] : NULL;
}
