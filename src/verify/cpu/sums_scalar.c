/* sums.h for any CPU, and the selection of the level. */
#include "base/cpu.h"
#include "verify/cpu/sums_body.h"

const so_sums_fns so_sums_scalar = {mass, residual};

const so_sums_fns *so_sums(void) {
    static const so_sums_fns *const tables[SO_CPU_LEVELS] = {
        [SO_CPU_SCALAR] = &so_sums_scalar,
#if defined(__x86_64__)
        [SO_CPU_AVX2] = &so_sums_avx2,
        [SO_CPU_AVXVNNI] = &so_sums_avx2,
        [SO_CPU_AVX512] = &so_sums_avx512,
        [SO_CPU_AMX] = &so_sums_avx512,
#endif
    };
    return tables[so_cpu_level_in_use()];
}
