/* Sums over whole rows for reject.c, one table of functions per CPU level.
 *
 * All levels give the same bits (cpu/sums_body.h, which all levels compile). `mass` uses 32 lanes: entry
 * i is added to lane i mod 32, in order of i. `residual` uses eight lanes for each part, as so_verify_rng's
 * draw does, and adds the lanes of the parts to those of the whole, in order of the parts. Entries after the
 * last whole block go to lane 0, and the lanes are joined in a fixed order. Pure functions; any thread. */
#ifndef SO_VERIFY_SUMS_H
#define SO_VERIFY_SUMS_H

#include "base/mem.h"
#include "base/pick.h"

enum { SO_SUMS_PART = SO_PICK_PART };

/* The residual of a rejection, max(0, p − scale · q). Entries of p that are not weights count as 0;
 * all entries of q must be weights. */
typedef struct so_residual {
    const float *p, *q;
    double scale;
} so_residual;

static inline double so_residual_at(const so_residual *r, int i) {
    double p = r->p[i] >= 0 ? (double)r->p[i] : 0;
    return SO_MAX(0, p - r->scale * (double)r->q[i]);
}

typedef struct so_sums_fns {
    /* The sum of a row, with `other` for entries that are not weights (negative or NaN). */
    double (*mass)(const float *row, int n, float other);
    /* The sum of the residual, and of each whole part of it: parts[n / 64]. Writes no residual. */
    double (*residual)(const so_residual *r, int n, double *parts);
} so_sums_fns;

extern const so_sums_fns so_sums_scalar;
#if defined(__x86_64__)
extern const so_sums_fns so_sums_avx2, so_sums_avx512;
#endif
const so_sums_fns *so_sums(void); /* of the CPU level in use (base/cpu.h) */

#endif
