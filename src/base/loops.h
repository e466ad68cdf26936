/* Inlining and unrolling hints for kernels, which gcc and clang spell differently. The macro names
 * have no prefix, so only kernel files may include this header. */
#ifndef SO_BASE_LOOPS_H
#define SO_BASE_LOOPS_H

#define INLINE static inline __attribute__((always_inline))
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLL /* none: sanitizer checks make unrolled code slow to compile; this halves the time */
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

/* The compiler moves no load or store across it. */
#define COMPILER_BARRIER __asm__ volatile("" ::: "memory")

#endif
