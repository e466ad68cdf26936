/* How kernels ask for inlining and unrolling, which the compilers spell differently. Only for files
 * that hold kernels: the names are short. */
#ifndef SO_BASE_LOOPS_H
#define SO_BASE_LOOPS_H

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

/* A compiler barrier: no load or store moves across it. */
#define KEEP_ORDER __asm__ volatile("" ::: "memory")

#endif
