/* t(n): milliseconds of a pass with n rows, learned from the passes that are made anyway.
 *
 * t(n) = scale · shape(n). Every pass moves the scale, so that what slows all passes down alike (a
 * longer context, a busy machine) is learned for all n at once; passes of n rows move shape(n). An
 * outlier moves either by a few percent. The curve never falls. Where it was not measured it is
 * guessed, on the hopeful side, since a place thought too dear is never visited: between two
 * measured n a little below the straight line, past the last as steep as before it, and with one
 * point alone each further row costs a tenth of a single-row pass. */
#ifndef SO_DRAFT_CURVE_H
#define SO_DRAFT_CURVE_H

#include "base/err.h"

enum { SO_CURVE_MAX = 512 }; /* rows; longer passes are extrapolated and not learned from */

typedef struct so_curve_point {
    int n;
    double ms, weight; /* weight: passes seen, at most 16 */
} so_curve_point;

/* Zero-initialise. */
typedef struct so_curve {
    double scale;
    double shape[SO_CURVE_MAX + 1];
    double weight[SO_CURVE_MAX + 1];
    double ms[SO_CURVE_MAX + 1]; /* the curve, kept up to date */
    double slope;                /* past SO_CURVE_MAX */
} so_curve;

/* Nonsense (n < 1, times that are not positive numbers) is ignored. */
void so_curve_observe(so_curve *c, int n, double ms);
/* 0 while nothing was measured. */
double so_curve_ms(const so_curve *c, int n);

/* For a cache on disk, which is the caller's. Returns the number of points, at most `cap`. */
int so_curve_export(const so_curve *c, so_curve_point *points, int cap);
/* Old measurements weigh as two passes each: they serve until there are new ones. SO_EINVAL, and
 * nothing changes, on a point that cannot be. */
int so_curve_import(so_curve *c, const so_curve_point *points, int n, so_err *err);

#endif
