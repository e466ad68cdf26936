/* sums.h for any CPU, and the choice among levels. */
#include <stdatomic.h>

#include "backend/backend.h"
#include "verify/cpu/sums_body.h"

const so_sums_fns so_sums_scalar = {mass, rest};

static const so_sums_fns *best_level(void) {
#if defined(__x86_64__)
    if (so_cpu_level_usable(SO_CPU_AVX512))
        return &so_sums_avx512;
    if (so_cpu_level_usable(SO_CPU_AVX2))
        return &so_sums_avx2;
#endif
    return &so_sums_scalar;
}

/* Asking the CPU costs as much as a sum does where a hypervisor answers: once. Threads that ask at
 * the same time find the same. */
const so_sums_fns *so_sums(void) {
    static _Atomic(const so_sums_fns *) best;
    const so_sums_fns *f = atomic_load_explicit(&best, memory_order_relaxed);
    if (!f) {
        f = best_level();
        atomic_store_explicit(&best, f, memory_order_relaxed);
    }
    return f;
}
