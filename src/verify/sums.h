/* Sums over whole rows, as `reject` needs them, one table per instruction level.
 *
 * All levels give the same bits: element i of a row is added to lane i mod 8, in order of i, what
 * is left behind the last whole part to lane 0, and lanes are joined in a fixed order. A part's own
 * sum has four lanes (that of so_chance's draw). One body (cpu/sums_body.h) is compiled for every
 * level. Any thread. */
#ifndef SO_VERIFY_SUMS_H
#define SO_VERIFY_SUMS_H

#include "base/mem.h"
#include "base/pick.h"

enum { SO_SUMS_PART = SO_PICK_PART };

/* r = max(0, p − scale · q): what a rejection leaves. What is no weight in p counts as 0; q has
 * weights alone. */
typedef struct so_rest {
    const float *p, *q;
    double scale;
} so_rest;

static inline double so_rest_at(const so_rest *r, int i) {
    double p = r->p[i] >= 0 ? (double)r->p[i] : 0;
    return SO_MAX(0, p - r->scale * (double)r->q[i]);
}

typedef struct so_sums_fns {
    /* The mass of a row with `other` for what is no weight (negative or NaN). */
    double (*mass)(const float *row, int n, float other);
    /* The mass of r, which is not written down, and that of each whole part: parts[n / 64]. */
    double (*rest)(const so_rest *r, int n, double *parts);
} so_sums_fns;

extern const so_sums_fns so_sums_scalar;
#if defined(__x86_64__)
extern const so_sums_fns so_sums_avx2, so_sums_avx512;
#endif
const so_sums_fns *so_sums(void); /* of the level in use (base/cpu.h) */

#endif
