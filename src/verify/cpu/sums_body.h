/* The functions of sums.h, with eight lanes in one register of 512 bits, or in two halves of 256. (gcc 12
 * keeps a compiler vector that is wider than the registers in memory, which took AVX2 ten times as
 * long.) The order of additions is that of the source at every level.
 *
 * Additions are written as 1 · a + b, which has the bits of a + b: conversions and additions wait for the same
 * two units of a core, and the units that multiply are idle (docs/log, entry 54). The compiler must
 * not know that the factor is 1, or it would make them additions again.
 *
 * Included only by sums_scalar.c, sums_avx2.c and sums_avx512.c. */
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <string.h>

#include "verify/sums.h"

enum { LANES = SO_PICK_LANES };

typedef double d4 __attribute__((vector_size(32)));
typedef int64_t l4 __attribute__((vector_size(32)));

#if defined(__AVX512F__)
typedef __m512d d8;

static inline void widen(const float *x, d8 *out) { *out = _mm512_cvtps_pd(_mm256_loadu_ps(x)); }

static inline void add(d8 *to, const d8 *v) {
    d8 one = _mm512_set1_pd(1);
    __asm__("" : "+v"(one));
    *to = _mm512_fmadd_pd(*v, one, *to);
}

/* *p ← max(0, *p − scale · *q); 0 for NaN. */
static inline void subtract_positive(d8 *p, double scale, const d8 *q) {
    d8 v = _mm512_mul_pd(_mm512_set1_pd(-scale), *q);
    add(&v, p);
    *p = _mm512_max_pd(v, _mm512_setzero_pd());
}

/* Sixteen entries of a row, eight for each sum; those that are not weights count as `other`. NaN compares
 * as no weight; −0 is one. */
static inline void add_weights(d8 s[2], const float *row, double other) {
    __mmask16 in = _mm512_cmp_ps_mask(_mm512_loadu_ps(row), _mm512_setzero_ps(), _CMP_GE_OQ);
    d8 fill = _mm512_set1_pd(other);
    d8 lo = _mm512_mask_cvtps_pd(fill, (__mmask8)in, _mm256_loadu_ps(row));
    d8 hi = _mm512_mask_cvtps_pd(fill, (__mmask8)(in >> LANES), _mm256_loadu_ps(row + LANES));
    add(&s[0], &lo);
    add(&s[1], &hi);
}

/* so_pick_joined */
static inline double joined(const d8 *v) {
    d8 s = _mm512_add_pd(*v, _mm512_permute_pd(*v, 0x55));
    s = _mm512_add_pd(s, _mm512_permutex_pd(s, 0x4e));
    return _mm512_cvtsd_f64(_mm512_add_pd(s, _mm512_shuffle_f64x2(s, s, 0x4e)));
}
#else
typedef struct d8 {
    d4 lo, hi;
} d8;

static inline void widen(const float *x, d8 *out) {
#if defined(__AVX2__)
    out->lo = (d4)_mm256_cvtps_pd(_mm_loadu_ps(x));
    out->hi = (d4)_mm256_cvtps_pd(_mm_loadu_ps(x + 4));
#else
    out->lo = (d4){(double)x[0], (double)x[1], (double)x[2], (double)x[3]};
    out->hi = (d4){(double)x[4], (double)x[5], (double)x[6], (double)x[7]};
#endif
}

static inline void add4(d4 *to, const d4 *v) {
#if defined(__AVX2__)
    d4 one = {1, 1, 1, 1};
    __asm__("" : "+x"(one));
    *to = (d4)_mm256_fmadd_pd((__m256d)*v, (__m256d)one, (__m256d)*to);
#else
    *to += *v;
#endif
}

static inline void add(d8 *to, const d8 *v) {
    add4(&to->lo, &v->lo);
    add4(&to->hi, &v->hi);
}

static inline void subtract_positive(d8 *p, double scale, const d8 *q) {
    d4 lo = -scale * q->lo, hi = -scale * q->hi;
    add4(&lo, &p->lo);
    add4(&hi, &p->hi);
    p->lo = (d4)((l4)lo & (lo > 0));
    p->hi = (d4)((l4)hi & (hi > 0));
}

static inline void replace(d8 *v, double other) {
    d4 fill = {other, other, other, other};
    l4 lo = v->lo >= 0, hi = v->hi >= 0;
    v->lo = (d4)(((l4)v->lo & lo) | ((l4)fill & ~lo));
    v->hi = (d4)(((l4)v->hi & hi) | ((l4)fill & ~hi));
}

static inline void add_weights(d8 s[2], const float *row, double other) {
    for (int k = 0; k < 2; k++) {
        d8 v;
        widen(row + k * LANES, &v);
        replace(&v, other);
        add(&s[k], &v);
    }
}

static inline double joined(const d8 *v) {
    double lane[LANES];
    memcpy(lane, v, sizeof lane);
    return so_pick_joined(lane);
}
#endif

/* *out ← max(0, p − scale · q) of eight entries; 0 for an entry of p that is no weight. */
static inline void residual_of(const so_residual *r, int i, double scale, d8 *out) {
    d8 q;
    widen(r->p + i, out);
    widen(r->q + i, &q);
    subtract_positive(out, scale, &q);
}

static inline void add_to_first(d8 *s, double x) {
    double first;
    memcpy(&first, s, sizeof first);
    first += x;
    memcpy(s, &first, sizeof first);
}

enum { SUMS = 4 }; /* of eight lanes: with one, each addition would wait for the one before */

static double joined_sums(d8 s[SUMS]) {
    add(&s[0], &s[1]);
    add(&s[2], &s[3]);
    add(&s[0], &s[2]);
    return joined(&s[0]);
}

static double mass(const float *row, int n, float other) {
    d8 s[SUMS];
    memset(s, 0, sizeof s);
    int i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES) {
        add_weights(&s[0], row + i, (double)other);
        add_weights(&s[2], row + i + 2 * LANES, (double)other);
    }
    for (; i < n; i++)
        add_to_first(&s[0], (double)(row[i] >= 0 ? row[i] : other));
    return joined_sums(s);
}

static double residual(const so_residual *r, int n, double *parts) {
    d8 s, part, v;
    memset(&s, 0, sizeof s);
    double scale = r->scale;
    int i = 0;
    for (; i + SO_SUMS_PART <= n; i += SO_SUMS_PART) {
        residual_of(r, i, scale, &part);
        for (int k = LANES; k < SO_SUMS_PART; k += LANES) {
            residual_of(r, i + k, scale, &v);
            add(&part, &v);
        }
        add(&s, &part);
        parts[i / SO_SUMS_PART] = joined(&part);
    }
    for (; i < n; i++)
        add_to_first(&s, so_residual_at(r, i));
    return joined(&s);
}
