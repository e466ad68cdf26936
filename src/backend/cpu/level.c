/* Which instruction levels this CPU has, by name and by table. The compiler's own feature test
 * covers the operating system's part (saved vector state) as well as the CPU's. */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"

static const char *const names[] = {"scalar", "avx2", "avx512"};

const so_kernels *so_cpu_kernels(so_cpu_level level) {
    if (level == SO_CPU_SCALAR)
        return &so_kernels_scalar;
    return NULL;
}

so_cpu_level so_cpu_best_level(void) {
    if (so_cpu_kernels(SO_CPU_AVX512))
        return SO_CPU_AVX512;
    return so_cpu_kernels(SO_CPU_AVX2) ? SO_CPU_AVX2 : SO_CPU_SCALAR;
}

const char *so_cpu_level_name(so_cpu_level level) {
    if (level == SO_CPU_AUTO)
        return "auto";
    SO_ASSERT(level >= 0 && (size_t)level < SO_LEN(names));
    return names[level];
}

bool so_cpu_level_parse(const char *name, so_cpu_level *out) {
    for (int i = -1; i < (int)SO_LEN(names); i++)
        if (strcmp(name, so_cpu_level_name((so_cpu_level)i)) == 0) {
            *out = (so_cpu_level)i;
            return true;
        }
    return false;
}
