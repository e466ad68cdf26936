/* The functions of sums.h, with eight lanes as compiler vectors. The compiler maps them to one
 * register of 512 bits, two of 256 or four of 128, by the including file's instruction set. The
 * order of additions is that of the source at every level.
 *
 * Included only by sums_scalar.c, sums_avx2.c and sums_avx512.c. */
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <string.h>

#include "verify/sums.h"

enum { LANES = 8 };

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef double d4 __attribute__((vector_size(32)));
typedef double d8 __attribute__((vector_size(64)));
typedef int64_t l8 __attribute__((vector_size(64)));

static double joined(const double s[LANES]) {
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

/* *out ← eight floats. */
static inline void widen(const float *x, d8 *out) {
#if defined(__AVX512F__)
    *out = (d8)_mm512_cvtps_pd(_mm256_loadu_ps(x));
#elif defined(__AVX2__)
    __m256d half[2] = {_mm256_cvtps_pd(_mm_loadu_ps(x)), _mm256_cvtps_pd(_mm_loadu_ps(x + 4))};
    memcpy(out, half, sizeof half);
#else
    f8 v;
    memcpy(&v, x, sizeof v);
    *out = __builtin_convertvector(v, d8);
#endif
}

/* *v ← max(0, *v); 0 for NaN. */
static inline void make_positive(d8 *v) {
#if defined(__AVX512F__)
    *v = (d8)_mm512_max_pd((__m512d)*v, _mm512_setzero_pd());
#elif defined(__AVX2__)
    __m256d half[2];
    memcpy(half, v, sizeof half);
    half[0] = _mm256_max_pd(half[0], _mm256_setzero_pd());
    half[1] = _mm256_max_pd(half[1], _mm256_setzero_pd());
    memcpy(v, half, sizeof half);
#else
    *v = (d8)((l8)*v & (*v > 0));
#endif
}

/* *out ← max(0, p − scale · q) of eight entries; 0 for an entry of p that is no weight. */
static inline void residual_of(const so_residual *r, int i, double scale, d8 *out) {
    d8 p, q;
    widen(r->p + i, &p);
    widen(r->q + i, &q);
    *out = p - scale * q;
    make_positive(out);
}

enum { SUMS = 4 }; /* of eight lanes: with one, each addition would wait for the one before */

static double joined_sums(const d8 s[SUMS], double lane[LANES]) {
    d8 all = (s[0] + s[1]) + (s[2] + s[3]);
    memcpy(lane, &all, sizeof all);
    return joined(lane);
}

/* *s ← *s + eight entries of a row. NaN compares as no weight; −0 is one. */
static inline void add_weights(d8 *s, const float *row, double other) {
    d8 v;
    widen(row, &v);
    l8 in = v >= 0;
    d8 fill = {other, other, other, other, other, other, other, other};
    *s += (d8)(((l8)v & in) | ((l8)fill & ~in));
}

static double mass(const float *row, int n, float other) {
    d8 s[SUMS] = {{0}};
    double lane[LANES];
    int i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES) {
        add_weights(&s[0], row + i, (double)other);
        add_weights(&s[1], row + i + LANES, (double)other);
        add_weights(&s[2], row + i + 2 * LANES, (double)other);
        add_weights(&s[3], row + i + 3 * LANES, (double)other);
    }
    for (; i < n; i++)
        s[0][0] += (double)(row[i] >= 0 ? row[i] : other);
    return joined_sums(s, lane);
}

static double residual(const so_residual *r, int n, double *parts) {
    d8 s = {0}, v;
    double lane[LANES], scale = r->scale;
    int i = 0;
    for (; i + SO_SUMS_PART <= n; i += SO_SUMS_PART) {
        d4 part = {0};
        for (int k = 0; k < SO_SUMS_PART; k += LANES) {
            residual_of(r, i + k, scale, &v);
            s += v;
            part += __builtin_shufflevector(v, v, 0, 1, 2, 3);
            part += __builtin_shufflevector(v, v, 4, 5, 6, 7);
        }
        parts[i / SO_SUMS_PART] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    memcpy(lane, &s, sizeof lane);
    for (; i < n; i++)
        lane[0] += so_residual_at(r, i);
    return joined(lane);
}

static double residual_mass(const so_residual *r, int n) {
    d8 s[SUMS] = {{0}}, v[SUMS];
    double lane[LANES], scale = r->scale;
    int i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES) {
        residual_of(r, i, scale, &v[0]);
        residual_of(r, i + LANES, scale, &v[1]);
        residual_of(r, i + 2 * LANES, scale, &v[2]);
        residual_of(r, i + 3 * LANES, scale, &v[3]);
        s[0] += v[0];
        s[1] += v[1];
        s[2] += v[2];
        s[3] += v[3];
    }
    for (; i < n; i++)
        s[0][0] += so_residual_at(r, i);
    return joined_sums(s, lane);
}
