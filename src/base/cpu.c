/* CPU feature detection.
 *
 * __builtin_cpu_supports checks both the CPU and the operating system (which must save the vector
 * registers). Features that it does not cover are read with cpuid.
 *
 * Detection runs once, because under a hypervisor cpuid traps and then costs more than some
 * kernels. Threads that detect at the same time store the same value, so no lock is needed. */
#include "base/cpu.h"

#include <stdatomic.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "base/err.h"
#include "base/mem.h"

static const char *const names[] = {"scalar", "avx2", "avxvnni", "avx512", "amx"};

static _Atomic int in_use = SO_CPU_AUTO;

#if defined(__x86_64__)
static bool has_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* Leaf 7, subleaf 1, EAX bit 4. */
static bool has_avxvnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

/* Leaf 7: GFNI is ECX bit 8; AMX-TILE and AMX-INT8 are EDX bits 24 and 25. The kernel saves tile
 * registers only for processes that requested it; one request covers all threads. */
static bool has_amx(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* ARCH_REQ_XCOMP_PERM */
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 8 & 1) || (d >> 24 & 3) != 3)
        return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

/* A bit mask of usable levels: bit i is set if level i is usable. */
static unsigned detect(void) {
    unsigned levels = 1u << SO_CPU_SCALAR;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c())
        return levels;
    levels |= 1u << SO_CPU_AVX2;
    if (has_avxvnni())
        levels |= 1u << SO_CPU_AVXVNNI;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni")) {
        levels |= 1u << SO_CPU_AVX512;
        if (has_amx())
            levels |= 1u << SO_CPU_AMX;
    }
#endif
    return levels;
}

static unsigned usable(void) {
    static _Atomic unsigned detected; /* 0: not detected yet */
    unsigned levels = atomic_load_explicit(&detected, memory_order_relaxed);
    if (levels == 0) {
        levels = detect();
        atomic_store_explicit(&detected, levels, memory_order_relaxed);
    }
    return levels;
}

bool so_cpu_level_usable(so_cpu_level level) { return level >= 0 && (usable() >> level & 1); }

so_cpu_level so_cpu_best_level(void) { return (so_cpu_level)(31 - __builtin_clz(usable())); }

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

void so_cpu_level_set(so_cpu_level level) {
    SO_ASSERT(level == SO_CPU_AUTO || so_cpu_level_usable(level));
    atomic_store_explicit(&in_use, (int)level, memory_order_relaxed);
}

so_cpu_level so_cpu_level_in_use(void) {
    int level = atomic_load_explicit(&in_use, memory_order_relaxed);
    return level == SO_CPU_AUTO ? so_cpu_best_level() : (so_cpu_level)level;
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
    for (char *c = out; *c; c++) /* the name is printed in single-line output */
        if (*c < ' ' || *c > '~')
            *c = '?';
#endif
}
