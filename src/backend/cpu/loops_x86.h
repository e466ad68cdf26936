/* How the x86 kernels ask for inlining and unrolling, which the compilers spell differently; and
 * tiles, whose size must be a constant for their sums to stay in registers. */
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

/* Runs TILE(n) for the constant n that equals `size`, 1 … 12. */
#define TILE_CASES(size, most) \
    switch (size) {            \
        TILE_CASE(1, most)     \
        TILE_CASE(2, most)     \
        TILE_CASE(3, most)     \
        TILE_CASE(4, most)     \
        TILE_CASE(5, most)     \
        TILE_CASE(6, most)     \
        TILE_CASE(7, most)     \
        TILE_CASE(8, most)     \
        TILE_CASE(9, most)     \
        TILE_CASE(10, most)    \
        TILE_CASE(11, most)    \
        TILE_CASE(12, most)    \
    }
#define TILE_CASE(n, most) \
    case n:                \
        if (n <= most)     \
            TILE(n);       \
        break;

/* Tiles of even size: how many of the `left` rows or queries the next one takes. */
INLINE int tile_size(int left, int most) {
    int tiles = (left + most - 1) / most;
    return (left + tiles - 1) / tiles;
}

#endif
