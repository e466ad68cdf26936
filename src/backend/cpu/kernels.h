/* The kernels of the CPU backend: one table per CPU level, and the arithmetic contract that all
 * levels follow.
 *
 * THE ARITHMETIC CONTRACT. The results for a row are bit-identical at every level, for any number
 * of rows, any other rows in the batch, and any thread count. So the order of all float operations
 * is fixed here; a level chooses only the instructions. `lane16(v)` is the sum of v in sixteen
 * lanes: element i is added to lane i mod 16, in ascending i, by acc = fma(a, b, acc) if it is a
 * product a · b, else by acc + v_i. After its last element a lane keeps its value (by a select,
 * never by adding 0·x). The lanes are reduced as
 *
 *     for width = 8, 4, 2, 1:  lane[i] += lane[i + width], i < width;   the sum is lane[0]
 *
 *   activations   are quantised in blocks of 32 (for weights of type Q4_0 … Q8_0) or 256 (K types).
 *                 a = max |x|; d = a / 127; q = x · (127 / a), rounded to nearest, ties to even,
 *                 and clamped to ±127, so that −128 never occurs. a < 2^-100 gives d = 0, q = 0; a
 *                 block with NaN or infinity gives d = NaN, q = 0.
 *   Q4_0 … Q8_0   per block, ascending: acc = fma(d_w · d_x, (float)isum, acc), isum the exact
 *                 integer Σ q_w q_x; Q4_1 and Q5_1 then acc = fma(m_w, d_x · (float)Σ q_x, acc).
 *   K types       per block of 256, ascending: acc = fma(d_w · d_x, (float)isum, acc), isum the
 *                 exact Σ_j s_j Σ q_w q_x over its sub-blocks; where the type has minima
 *                 acc = fma(−(dmin_w · d_x), (float)Σ_j m_j Σ q_x, acc).
 *                 |isum| ≤ 128 · 63 · 127 · 256 fits 32 bits.
 *   F32 F16 BF16  lane16 over the k products weight · activation. Weights are first converted to
 *                 float, which is exact.
 *   bias          is added last, with one float addition.
 *   norms         lane16 sums; r = 1 / sqrt(sum / d + eps); x · r · w, or fma((x − mean) · r, w, b)
 *   exp           as the comment at SO_EXP_MIN below states, operation by operation.
 *   silu, gelu    x / (1 + exp(−x)); gelu (tanh form) = x / (1 + exp(−2u)),
 *                 u = √(2/π) · fma(0.044715 · x², x, x)
 *   attention     q' = q · scale. A score is one sum over the head dimension, ascending:
 *                 acc = fma(q', k, acc). Positions are divided into chunks of 128 (0 … 127,
 *                 128 … 255, …). In a chunk only the positions that the row attends to are used:
 *                 m_c = their largest score, p = exp(score − m_c), l_c = lane16(p) by position,
 *                 o_c = fma(p, v, o_c) ascending from 0. Chunks are merged in ascending order, from
 *                 m = −inf, l = 0, o = 0: m' = max(m, m_c), a = exp(m − m'), b = exp(m_c − m'),
 *                 l = l · a + l_c · b (two products, one sum), o = fma(o_c, b, o · a). The result
 *                 is o · (1 / l). Positions that the row does not attend to may hold NaN; their
 *                 values are in no sum.
 *   Q8_0 cache    Entries are quantised on write in blocks of 32 along the head, the last block
 *                 padded with zeros: a = max |x|; d = a / 127 as fp16; q = x · (1 / d), rounded to
 *                 nearest even and clamped to ±127. d = 0 gives q = 0; NaN, infinity or a d above
 *                 the largest fp16 number gives d = NaN, q = 0. Queries q' are quantised like
 *                 activations in blocks of 32. A score is computed block by block, ascending:
 *                 acc = fma(d_q · d_k, (float)isum, acc), isum the exact integer Σ q_q q_k. Values
 *                 are d · q, which is exact. Everything else is as above.
 *
 * Packed copies of a weight (pack.h) follow the same contract.
 *
 * To add a CPU level:
 *   1. base/cpu.h and cpu.c: its value, its name, how it is detected, and when it is the best. The
 *      names are also listed in cli/option_table.c (--cpu-level) and engine/sooth.c;
 *   2. kernels_X.c with its table, declared below;
 *   3. level.c: the table's row. tests/backend compares every usable level with the scalar one and
 *      needs no change;
 *   4. Makefile: the compiler flags of files *_X.c. Only these files may use its intrinsics;
 *   5. optional: sample/cpu/noise_X.c and verify/cpu/sums_X.c. */
#ifndef SO_BACKEND_CPU_KERNELS_H
#define SO_BACKEND_CPU_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "backend/backend.h"
#include "format/blocks.h"

/* The fields of a block of quantised activations other than its int8 values. Some kernels use
 * unsigned weights, which are too large by an offset. Those kernels start a sum at neg8, neg16 or
 * neg32, which cancels the offset. */
typedef struct so_q32 {
    float d, s;        /* s = d · (float)sum */
    int32_t sum, neg8; /* −8 · sum */
} so_q32;

typedef struct so_q256 {
    float d;
    int16_t sum16[16], sum32[8]; /* of each 16 and each 32 values */
    int32_t neg8_32[8];          /* −8 times the sum of each 32 values */
    int32_t neg16_16[16];        /* −16 times the sum of each 16 */
    int32_t neg32_8[32];         /* −32 times the sum of each 8 */
} so_q256;

/* Activations of one matmul: x for float weights; q and one of the block tables for quantised
 * ones. */
typedef struct so_act {
    int n, k;
    const float *x;     /* [n][k] */
    int8_t *q;          /* [n][k] */
    so_q32 *blocks32;   /* [n][k / 32] */
    so_q256 *blocks256; /* [n][k / 256] */
} so_act;

/* How packed weights are prefetched: `lead` bytes (a multiple of 64) ahead of those in use, into
 * the L1 or the L2 cache. 0: no software prefetch; the processor's own prefetcher does better.
 * Never changes a result. */
typedef struct so_prefetch {
    uint32_t lead;
    bool l1;
} so_prefetch;

/* One product out[n][m] = act · wᵀ + bias. */
typedef struct so_mm {
    so_act act;
    const uint8_t *w; /* [m] rows of row_bytes, any alignment; or packed tiles of 32 rows */
    size_t row_bytes;
    size_t tile_bytes; /* of a packed tile (pack.h), w aligned to 64; 0: not packed */
    long m;
    const float *bias;    /* [m] or NULL */
    const uint8_t *next;  /* packed weights that this thread reads after these rows; NULL: none */
    so_prefetch prefetch; /* how w and `next` are prefetched, if w is packed */
    float *out;
} so_mm;
/* Multiplies all activation rows with rows begin … end-1 of w. begin is a multiple of SO_MM_GRAIN;
 * so is end, unless it is m. */
typedef void so_mm_fn(const so_mm *a, long begin, long end);
enum { SO_MM_GRAIN = 32 };

/* The dtypes that have a matmul; X(name, dtype). */
#define SO_MM_PLAIN_DTYPES(X) \
    X(f32, SO_DTYPE_F32)      \
    X(f16, SO_DTYPE_F16)      \
    X(bf16, SO_DTYPE_BF16)    \
    X(q4_0, SO_DTYPE_Q4_0)    \
    X(q4_1, SO_DTYPE_Q4_1)    \
    X(q5_0, SO_DTYPE_Q5_0)    \
    X(q5_1, SO_DTYPE_Q5_1)    \
    X(q8_0, SO_DTYPE_Q8_0)
#define SO_MM_K_DTYPES(X)  \
    X(q2_k, SO_DTYPE_Q2_K) \
    X(q3_k, SO_DTYPE_Q3_K) \
    X(q4_k, SO_DTYPE_Q4_K) \
    X(q5_k, SO_DTYPE_Q5_K) \
    X(q6_k, SO_DTYPE_Q6_K)
#define SO_MM_DTYPES(X) SO_MM_PLAIN_DTYPES(X) SO_MM_K_DTYPES(X)

/* Attention over one page of one head of a KV cache. Keys are transposed within the page, so that
 * sixteen scores fill one register and no sum runs across lanes. Layout of a page, with D the head
 * dimension:
 *
 *   F32, F16   keys k[D][SO_KV_PAGE]; values v[SO_KV_PAGE][D]
 *   Q8_0       D rounded up to a multiple of 32. Keys: D / 32 times so_q8_keys. Values:
 *              int8[SO_KV_PAGE][D], then their scales as fp16, [D / 32][SO_KV_PAGE] */
typedef struct so_q8_keys {
    int8_t q[SO_QK / 4][SO_KV_PAGE][4]; /* four consecutive elements of the head together */
    uint16_t d[SO_KV_PAGE];             /* scales, fp16 */
} so_q8_keys;

/* A page or a part of it. Kernels prefetch `next`, a page that is read later (NULL: none), into the
 * L1 or the L2 cache. */
typedef struct so_attn_page {
    const void *at, *next;
    bool next_l1;
    int first, n; /* positions of the part; `scores` ignores them and covers the whole page */
} so_attn_page;

enum { SO_ATTN_CHUNK = 128, SO_ATTN_QUERIES = 36 };
typedef struct so_attn_fns {
    /* Writes n queries times `scale` in the layout that `scores` reads, into at most n · max(d,
     * SO_ATTN_FIELDS) 32-bit values. */
    void (*queries)(const float *const *q, int n, int d, float scale, void *out);
    /* s[i · stride + j] = Σ_e q[i][e] · k[j][e] for the whole page */
    void (*scores)(so_attn_page k, const void *q, int n, int d, float *s, size_t stride);
    /* o[i][d] += Σ_j p[i][j] · v[j][d], j < v.n ascending; rows of p are SO_ATTN_CHUNK apart */
    void (*values)(so_attn_page v, const float *p, int n, int d, float *o);
} so_attn_fns;

/* Layout of n queries for a Q8_0 cache: for each block of 32 elements, SO_ATTN_FIELDS fields of n
 * 32-bit values, one value per query. The constants are indices of fields. */
enum {
    SO_ATTN_SCALE = 0,   /* float d_q */
    SO_ATTN_START = 1,   /* int32 −128 · Σ q, for kernels whose keys must be unsigned */
    SO_ATTN_BYTES = 2,   /* first of eight fields; a value holds four int8 elements */
    SO_ATTN_FIELDS = 10, /* fields per block */
};

typedef struct so_kernels {
    so_cpu_level level;
    so_mm_fn *matmul[SO_DTYPE_COUNT];
    /* k values into k / 32 or k / 256 blocks */
    void (*quantize32)(const float *x, int k, int8_t *q, so_q32 *blocks);
    void (*quantize256)(const float *x, int k, int8_t *q, so_q256 *blocks);
    void (*rms_norm)(float *out, const float *x, const float *w, int d, float eps);
    void (*layer_norm)(float *out, const float *x, const float *w, const float *b, int d,
                       float eps);
    /* (x, y) → (x·cos − y·sin, x·sin + y·cos) for n / 2 pairs of adjacent elements, every product
     * rounded; table: cos and sin of each pair */
    void (*rotate)(float *x, const float *table, int n);
    void (*scale)(float *out, const float *x, float a, long n);
    void (*add)(float *out, const float *a, const float *b, long n);
    void (*silu_mul)(float *out, const float *a, const float *b, long n);
    void (*gelu_mul)(float *out, const float *a, const float *b, long n);
    void (*gelu)(float *out, const float *a, long n);
    void (*exp)(float *out, const float *x, long n); /* also for attention.c and tests */
    void (*to_f16)(uint16_t *out, const float *x, long n);
    int32_t (*argmax)(const float *x, int d); /* -1: an element is not finite */
    so_attn_fns attn_f16, attn_f32, attn_q8;
    /* Quantises 32 values of an entry of a Q8_0 cache; returns d as fp16. */
    uint16_t (*entry_q8)(const float *x, int8_t *q);
    /* For each of n queries, whose rows of s are SO_ATTN_CHUNK apart: m[i] = the largest of
     * s[lo … hi-1], s[lo … hi-1] = exp(s − m[i]), sum[i] = lane16(s[lo … hi-1]). May overwrite
     * other elements of the row. */
    void (*softmax)(float *s, int n, int lo, int hi, float *m, float *sum);
    void (*merge)(float *o, const float *part, float a, float b, int d); /* o = part·b + o·a */
    /* For the roofline. read_all reads n bytes and returns some function of them. multiply_all runs
     * n iterations of int8 multiply-adds at the level's peak rate and returns the number of
     * multiply-adds. */
    uint64_t (*read_all)(const uint8_t *p, size_t n);
    long (*multiply_all)(long n);
} so_kernels;

extern const so_kernels so_kernels_scalar;
#if defined(__x86_64__)
extern const so_kernels so_kernels_avx2, so_kernels_avxvnni, so_kernels_avx512, so_kernels_amx;
#endif

/* exp(x), within 1 ulp: x = n·ln 2 + r, |r| ≤ ln 2 / 2; 2^n · (1 + r + r²·P(r)); P has a relative
 * error of 3e-9 (fitted by least squares, reweighted to reduce the largest error). The operations,
 * without the prefix SO_EXP_:
 *
 *   1. x below MIN gives 0, x above MAX gives infinity; NaN is kept
 *   2. t = fma(x, LOG2E, MAGIC), MAGIC = 1.5·2^23; n = t − MAGIC, an integer
 *   3. r = fma(n, −LN2_HI, x); r = fma(n, −LN2_LO, r)
 *   4. p = C6; p = fma(p, r, c) for c = C5, C4, C3, C2, 1, 1
 *   5. the result is p · 2^n, rounded once; it may be subnormal. Without an instruction for that,
 *      2^n is applied in two factors, 2^floor(n / 2) first, which is exact */
#define SO_EXP_MIN (-104.0f) /* below: result is 0 */
#define SO_EXP_MAX 89.0f     /* above: result is infinity */
#define SO_EXP_LOG2E 0x1.715476p+0f
#define SO_EXP_MAGIC 0x1.8p23f
#define SO_EXP_LN2_HI 0x1.62e43p-1f
#define SO_EXP_LN2_LO -0x1.05c61p-29f
#define SO_EXP_C2 0x1.fffffcp-2f
#define SO_EXP_C3 0x1.555492p-3f
#define SO_EXP_C4 0x1.5558f2p-5f
#define SO_EXP_C5 0x1.123a2p-7f
#define SO_EXP_C6 0x1.6a23dp-10f

#define SO_GELU_CUBIC 0.044715f
#define SO_GELU_SCALE -0x1.988454p+0f /* −2·√(2/π) */

#define SO_HALF_INF 0x7C00
#define SO_HALF_NAN 0x7E00

#define SO_ACT_TINY 0x1p-100f /* blocks whose largest magnitude is below this are zero */

#endif
