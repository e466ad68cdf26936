/* The functions of sums.h, with eight lanes in one register of 512 bits, or in two halves of 256. (gcc 12
 * keeps a compiler vector that is wider than the registers in memory, which took AVX2 ten times as
 * long.) The order of additions is that of the source at every level.
 *
 * Included only by sums_scalar.c, sums_avx2.c and sums_avx512.c. */
#ifdef __AVX2__
#include <immintrin.h>
#endif
#include <string.h>

#include "verify/sums.h"

enum { LANES = 8 };

typedef double d4 __attribute__((vector_size(32)));
typedef int64_t l4 __attribute__((vector_size(32)));

static double joined(const double s[LANES]) {
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

#if defined(__AVX512F__)
typedef __m512d d8;

static inline void widen(const float *x, d8 *out) { *out = _mm512_cvtps_pd(_mm256_loadu_ps(x)); }

static inline void add(d8 *to, const d8 *v) { *to = _mm512_add_pd(*to, *v); }

/* *p ← max(0, *p − scale · *q); 0 for NaN. */
static inline void subtract_positive(d8 *p, double scale, const d8 *q) {
    d8 v = _mm512_sub_pd(*p, _mm512_mul_pd(_mm512_set1_pd(scale), *q));
    *p = _mm512_max_pd(v, _mm512_setzero_pd());
}

/* Entries that are not weights become `other`. */
static inline void replace(d8 *v, double other) {
    __mmask8 in = _mm512_cmp_pd_mask(*v, _mm512_setzero_pd(), _CMP_GE_OQ);
    *v = _mm512_mask_blend_pd(in, _mm512_set1_pd(other), *v);
}

/* *part ← *part + the first four, then + the others. */
static inline void add_halves(d4 *part, const d8 *v) {
    *part += (d4)_mm512_castpd512_pd256(*v);
    *part += (d4)_mm512_extractf64x4_pd(*v, 1);
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

static inline void add(d8 *to, const d8 *v) {
    to->lo += v->lo;
    to->hi += v->hi;
}

static inline void subtract_positive(d8 *p, double scale, const d8 *q) {
    d4 lo = p->lo - scale * q->lo, hi = p->hi - scale * q->hi;
    p->lo = (d4)((l4)lo & (lo > 0));
    p->hi = (d4)((l4)hi & (hi > 0));
}

static inline void replace(d8 *v, double other) {
    d4 fill = {other, other, other, other};
    l4 lo = v->lo >= 0, hi = v->hi >= 0;
    v->lo = (d4)(((l4)v->lo & lo) | ((l4)fill & ~lo));
    v->hi = (d4)(((l4)v->hi & hi) | ((l4)fill & ~hi));
}

static inline void add_halves(d4 *part, const d8 *v) {
    *part += v->lo;
    *part += v->hi;
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

static double joined_sums(d8 s[SUMS], double lane[LANES]) {
    add(&s[0], &s[1]);
    add(&s[2], &s[3]);
    add(&s[0], &s[2]);
    memcpy(lane, &s[0], LANES * sizeof *lane);
    return joined(lane);
}

/* *s ← *s + eight entries of a row. NaN compares as no weight; −0 is one. */
static inline void add_weights(d8 *s, const float *row, double other) {
    d8 v;
    widen(row, &v);
    replace(&v, other);
    add(s, &v);
}

static double mass(const float *row, int n, float other) {
    d8 s[SUMS];
    memset(s, 0, sizeof s);
    double lane[LANES];
    int i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES) {
        add_weights(&s[0], row + i, (double)other);
        add_weights(&s[1], row + i + LANES, (double)other);
        add_weights(&s[2], row + i + 2 * LANES, (double)other);
        add_weights(&s[3], row + i + 3 * LANES, (double)other);
    }
    for (; i < n; i++)
        add_to_first(&s[0], (double)(row[i] >= 0 ? row[i] : other));
    return joined_sums(s, lane);
}

static double residual(const so_residual *r, int n, double *parts) {
    d8 s, v;
    memset(&s, 0, sizeof s);
    double lane[LANES], scale = r->scale;
    int i = 0;
    for (; i + SO_SUMS_PART <= n; i += SO_SUMS_PART) {
        d4 part = {0};
        for (int k = 0; k < SO_SUMS_PART; k += LANES) {
            residual_of(r, i + k, scale, &v);
            add(&s, &v);
            add_halves(&part, &v);
        }
        parts[i / SO_SUMS_PART] = (part[0] + part[1]) + (part[2] + part[3]);
    }
    memcpy(lane, &s, sizeof lane);
    for (; i < n; i++)
        lane[0] += so_residual_at(r, i);
    return joined(lane);
}

static double residual_mass(const so_residual *r, int n) {
    d8 s[SUMS], v[SUMS];
    memset(s, 0, sizeof s);
    double lane[LANES], scale = r->scale;
    int i = 0;
    for (; i + SUMS * LANES <= n; i += SUMS * LANES) {
        residual_of(r, i, scale, &v[0]);
        residual_of(r, i + LANES, scale, &v[1]);
        residual_of(r, i + 2 * LANES, scale, &v[2]);
        residual_of(r, i + 3 * LANES, scale, &v[3]);
        add(&s[0], &v[0]);
        add(&s[1], &v[1]);
        add(&s[2], &v[2]);
        add(&s[3], &v[3]);
    }
    for (; i < n; i++)
        add_to_first(&s[0], so_residual_at(r, i));
    return joined_sums(s, lane);
}
