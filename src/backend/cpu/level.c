/* Which instruction levels this CPU has, by name and by table. The compiler's own feature test
 * covers the operating system's part (saved vector state) as well as the CPU's. */
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mem.h"

static const char *const names[] = {"scalar", "avx2", "avxvnni", "avx512", "amx"};

#if defined(__x86_64__)
/* Not every compiler's feature test knows these. Their registers are AVX's. */
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* Leaf 7, subleaf 1, EAX bit 4. */
static bool has_avxvnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

/* Leaf 7: GFNI is ECX bit 8; tiles and their int8 products are EDX bits 24 and 25. The kernel saves
 * tiles only for processes that have asked for it, once, for all their threads. */
static bool has_amx(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 8 & 1) || (d >> 24 & 3) != 3)
        return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

const so_kernels *so_cpu_kernels(so_cpu_level level) {
    if (level == SO_CPU_SCALAR)
        return &so_kernels_scalar;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    if (level == SO_CPU_AVX2 && avx2)
        return &so_kernels_avx2;
    if (level == SO_CPU_AVXVNNI && avx2 && has_avxvnni())
        return &so_kernels_avxvnni;
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vnni");
    if (level == SO_CPU_AVX512 && avx512)
        return &so_kernels_avx512;
    if (level == SO_CPU_AMX && avx512 && has_amx())
        return &so_kernels_amx;
#endif
    return NULL;
}

bool so_cpu_level_usable(so_cpu_level level) { return so_cpu_kernels(level) != NULL; }

so_cpu_level so_cpu_best_level(void) {
    int best = SO_CPU_LEVELS - 1;
    while (!so_cpu_level_usable((so_cpu_level)best))
        best--;
    return (so_cpu_level)best;
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

void so_cpu_name(char out[SO_CPU_NAME_MAX]) {
    memcpy(out, "unknown CPU", sizeof "unknown CPU");
#if defined(__x86_64__)
    unsigned r[12];
    for (unsigned i = 0; i < 3; i++)
        if (!__get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]))
            return;
    memcpy(out, r, sizeof r);
    out[SO_CPU_NAME_MAX - 1] = 0;
    for (char *c = out; *c; c++) /* it goes into lines of text */
        if (*c < ' ' || *c > '~')
            *c = '?';
#endif
}
