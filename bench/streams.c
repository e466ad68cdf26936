/* How fast a core reads packed weights, by the order in which they lie in memory.
 *
 * One activation row is multiplied with 96 MB of Q4_1 in several layouts. Only the addresses differ:
 * all layouts hold the same bytes, and every loop decodes them and computes the same dot products as
 * the product with one row (src/backend/cpu/packed_x86.h). A row group is 16 rows; a block of a group
 * has a head of 64 bytes (scales and minima) and 256 bytes of words. A tile is what is computed at
 * once: one group with 256-bit registers, two with 512-bit registers.
 *
 *   apart      a group has all its heads, then all its words
 *   together   a head lies before its words; the groups of a tile are apart
 *   linear     as src/backend/cpu/pack.h: the groups of a tile are interleaved block by block
 *
 * Each is read without software prefetch, with prefetch of the block 12 KB further on in the order
 * of use into the L1 cache, and the same into the L2 cache. Printed are the best of ROUNDS rounds in
 * which the variants alternate, in GB/s, one thread and all threads (each with weights of its own).
 *
 *     make bench-streams */
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { HEAD = 64, WORDS = 256, BLOCK = HEAD + WORDS, ROWS = 16, LEAD = 12 << 10 };
enum { ROUNDS = 9, TOTAL = 96 << 20, HUGE_PAGE = 2 << 20, MAX_THREADS = 64 };

#define INLINE static inline __attribute__((always_inline))
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")))

typedef enum order { APART, TOGETHER, LINEAR } order;
typedef enum ahead { NOTHING, TO_L1, TO_L2 } ahead;

typedef struct place {
    const uint8_t *head, *words;
} place;

/* Block b of group g of the tile that begins at `tile`; rows have n blocks. */
INLINE place place_of(order o, const uint8_t *tile, int groups, size_t n, size_t b, size_t g) {
    size_t group = n * BLOCK;
    switch (o) {
    case APART:
        return (place){tile + g * group + b * HEAD, tile + g * group + n * HEAD + b * WORDS};
    case TOGETHER:
        return (place){tile + g * group + b * BLOCK, tile + g * group + b * BLOCK + HEAD};
    default:
        tile += b * BLOCK * (size_t)groups;
        return (place){tile + g * HEAD, tile + (size_t)groups * HEAD + g * WORDS};
    }
}

/* Prefetches the block LEAD bytes after block b in the order of use, in this tile or a later one. */
INLINE void fetch(order o, ahead a, const uint8_t *tile, int groups, size_t n, size_t b) {
    size_t to = b + LEAD / ((size_t)groups * BLOCK);
    if (a == NOTHING)
        return;
    tile += to / n * n * BLOCK * (size_t)groups;
    for (size_t g = 0; g < (size_t)groups; g++) {
        place p = place_of(o, tile, groups, n, to % n, g);
        if (a == TO_L1)
            _mm_prefetch((const char *)p.head, _MM_HINT_T0);
        else
            _mm_prefetch((const char *)p.head, _MM_HINT_T1);
        for (int i = 0; i < WORDS; i += 64)
            if (a == TO_L1)
                _mm_prefetch((const char *)p.words + i, _MM_HINT_T0);
            else
                _mm_prefetch((const char *)p.words + i, _MM_HINT_T1);
    }
}

INLINE int load4(const int8_t *p) {
    int v;
    memcpy(&v, p, 4);
    return v;
}

/* ---- one block of 16 rows ---- */

INLINE AVX2 void block_avx2(place p, const int8_t *x, __m256 *acc) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int j = 0; j < 2; j++) {
        __m256i part = _mm256_setzero_si256();
        for (int c = 0; c < 4; c++) {
            __m256i v = _mm256_loadu_si256((const void *)(p.words + 64 * c + 32 * j));
            __m256i a = _mm256_maddubs_epi16(_mm256_and_si256(v, low),
                                             _mm256_set1_epi32(load4(x + 4 * c)));
            __m256i b = _mm256_maddubs_epi16(_mm256_and_si256(_mm256_srli_epi16(v, 4), low),
                                             _mm256_set1_epi32(load4(x + 16 + 4 * c)));
            part = _mm256_add_epi16(part, _mm256_add_epi16(a, b));
        }
        __m256 sum = _mm256_cvtepi32_ps(_mm256_madd_epi16(part, _mm256_set1_epi16(1)));
        __m256 d = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p.head + 16 * j)));
        __m256 m = _mm256_cvtph_ps(_mm_loadu_si128((const void *)(p.head + 32 + 16 * j)));
        acc[j] = _mm256_fmadd_ps(m, _mm256_set1_ps(0.5f), _mm256_fmadd_ps(d, sum, acc[j]));
    }
}

INLINE AVX512 void block_avx512(place p, const int8_t *x, __m512 *acc) {
    const __m512i low = _mm512_set1_epi8(15);
    __m512i part = _mm512_setzero_si512();
    for (int c = 0; c < 4; c++) {
        __m512i v = _mm512_loadu_si512((const void *)(p.words + 64 * c));
        part = _mm512_dpbusd_epi32(part, _mm512_and_si512(v, low),
                                   _mm512_set1_epi32(load4(x + 4 * c)));
        part = _mm512_dpbusd_epi32(part, _mm512_and_si512(_mm512_srli_epi16(v, 4), low),
                                   _mm512_set1_epi32(load4(x + 16 + 4 * c)));
    }
    __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)p.head));
    __m512 m = _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(p.head + 32)));
    *acc = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(part), *acc);
    *acc = _mm512_fmadd_ps(m, _mm512_set1_ps(0.5f), *acc);
}

/* ---- whole matrices ---- */

typedef struct job {
    const uint8_t *w;
    const int8_t *x; /* [n_blocks · 32] */
    float *out;
    size_t n_blocks, n_tiles;
} job;

/* One function for each set of constants. acc: a register holds 8 or 16 rows. */
#define LOOP(name, isa, vec, zero, store, per_group, block, o, a, groups)                     \
    static isa void name(const job *j) {                                                      \
        const uint8_t *tile = j->w;                                                           \
        float *out = j->out;                                                                  \
        for (size_t t = 0; t < j->n_tiles / groups; t++) {                                    \
            vec acc[groups * per_group];                                                      \
            for (int i = 0; i < groups * per_group; i++)                                      \
                acc[i] = zero();                                                              \
            for (size_t b = 0; b < j->n_blocks; b++) {                                        \
                fetch(o, a, tile, groups, j->n_blocks, b);                                    \
                for (size_t g = 0; g < groups; g++)                                           \
                    block(place_of(o, tile, groups, j->n_blocks, b, g), j->x + 32 * b,        \
                          acc + g * per_group);                                               \
            }                                                                                 \
            for (int i = 0; i < groups * per_group; i++, out += ROWS / per_group)             \
                store(out, acc[i]);                                                           \
            tile += j->n_blocks * BLOCK * groups;                                             \
        }                                                                                     \
    }
#define LOOP2(name, o, a, groups) \
    LOOP(name##_2, AVX2, __m256, _mm256_setzero_ps, _mm256_storeu_ps, 2, block_avx2, o, a, groups)
#define LOOP5(name, o, a, groups)                                                              \
    LOOP(name##_5, AVX512, __m512, _mm512_setzero_ps, _mm512_storeu_ps, 1, block_avx512, o, a, \
         groups)

/* The variants: name, order, prefetch, row groups of a tile. */
#define VARIANTS(X)                     \
    X(apart1, APART, NOTHING, 1)        \
    X(apart1_l1, APART, TO_L1, 1)       \
    X(apart2, APART, NOTHING, 2)        \
    X(apart2_l1, APART, TO_L1, 2)       \
    X(together2, TOGETHER, NOTHING, 2)  \
    X(together2_l1, TOGETHER, TO_L1, 2) \
    X(linear2, LINEAR, NOTHING, 2)      \
    X(linear2_l1, LINEAR, TO_L1, 2)     \
    X(linear2_l2, LINEAR, TO_L2, 2)
VARIANTS(LOOP2)
VARIANTS(LOOP5)

typedef void loop_fn(const job *j);
typedef struct variant {
    const char *name;
    loop_fn *avx2, *avx512;
} variant;
#define ROW(name, o, a, groups) {#name, name##_2, name##_5},
static const variant variants[] = {VARIANTS(ROW)};
enum { N_VARIANTS = sizeof variants / sizeof variants[0] };

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

typedef struct worker {
    pthread_t thread;
    pthread_barrier_t *barrier;
    int core;
    job j;
    bool wide;
    double best[N_VARIANTS]; /* of the first worker: all threads together */
} worker;

static void *work(void *arg) {
    worker *w = arg;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(w->core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set); /* without it the figures vary more */
    for (int r = -1; r < ROUNDS; r++)
        for (int v = 0; v < N_VARIANTS; v++) {
            pthread_barrier_wait(w->barrier);
            double t = now();
            (w->wide ? variants[v].avx512 : variants[v].avx2)(&w->j);
            pthread_barrier_wait(w->barrier);
            t = now() - t;
            if (r >= 0 && (w->best[v] == 0 || t < w->best[v]))
                w->best[v] = t;
        }
    return NULL;
}

/* fp16 numbers of normal size in the heads would not matter: all layouts read the same bytes. */
static uint8_t *weights(size_t n_bytes) {
    uint8_t *p = mmap(NULL, n_bytes + HUGE_PAGE, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    p += -(uintptr_t)p & (HUGE_PAGE - 1);
    madvise(p, n_bytes, MADV_HUGEPAGE);
    memset(p, 0x35, n_bytes);
    return p;
}

static void measure(const uint8_t *w, int n_threads, int k, bool wide) {
    static worker workers[MAX_THREADS];
    static int8_t x[1 << 16];
    pthread_barrier_t barrier;
    size_t n_blocks = (size_t)k / 32, part = (size_t)TOTAL / (size_t)n_threads;
    size_t n_tiles = part / (n_blocks * BLOCK) / 2 * 2;
    float *out = calloc((size_t)n_threads * n_tiles * ROWS, sizeof *out);
    pthread_barrier_init(&barrier, NULL, (unsigned)n_threads);
    for (int i = 0; i < n_threads; i++) {
        workers[i] = (worker){.barrier = &barrier, .core = i, .wide = wide};
        workers[i].j = (job){w + part * (size_t)i, x, out + (size_t)i * n_tiles * ROWS, n_blocks,
                             n_tiles};
        pthread_create(&workers[i].thread, NULL, work, &workers[i]);
    }
    for (int i = 0; i < n_threads; i++)
        pthread_join(workers[i].thread, NULL);
    printf("%-7d %5d", n_threads, k);
    for (int v = 0; v < N_VARIANTS; v++)
        printf(" %12.1f", (double)(n_tiles * n_blocks * BLOCK) * n_threads / workers[0].best[v] / 1e9);
    printf("\n");
    pthread_barrier_destroy(&barrier);
    free(out);
}

int main(void) {
    long n_cores = sysconf(_SC_NPROCESSORS_ONLN);
    int n_threads = (int)(n_cores < MAX_THREADS ? n_cores : MAX_THREADS);
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) {
        fprintf(stderr, "this program needs AVX2\n");
        return 1;
    }
    bool wide = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
    uint8_t *w = weights(TOTAL + (1 << 20)); /* prefetches run past the end */
    if (!w) {
        perror("96 MB of weights");
        return 1;
    }
    printf("%d MB, best of %d, GB/s, %s\nthreads     k", TOTAL >> 20, ROUNDS,
           wide ? "512-bit registers" : "256-bit registers");
    for (int v = 0; v < N_VARIANTS; v++)
        printf(" %12s", variants[v].name);
    printf("\n");
    for (int threads = 1;; threads = n_threads) {
        measure(w, threads, 576, wide);
        measure(w, threads, 1536, wide);
        measure(w, threads, 8960, wide);
        if (threads == n_threads)
            return 0;
    }
}
