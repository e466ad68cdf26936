/* How the x86 kernels ask for inlining and unrolling, which the compilers spell differently. */
#ifndef SO_BACKEND_CPU_LOOPS_X86_H
#define SO_BACKEND_CPU_LOOPS_X86_H

#define INLINE static inline __attribute__((always_inline))
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLL /* halves the time to compile, which is long with every access checked */
#elif defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#if defined(__clang__)
#define NO_UNROLL _Pragma("nounroll")
#else
#define NO_UNROLL _Pragma("GCC unroll 1")
#endif

/* No access to memory moves across this line: compilers think nothing of fetching all at once. */
#define KEEP_ORDER __asm__ volatile("" ::: "memory")

#endif
