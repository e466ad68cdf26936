/* t(n): milliseconds of a pass with n rows, learned from the passes that are made anyway.
 *
 * t(n) = scale · shape(n). What slows all passes down alike (a longer context, a busy neighbour)
 * moves the scale, quickly; what is left over moves shape(n), slowly. shape is kept at knots: every
 * n up to 17, then ever further apart. A knot's value is a mean of what was measured there and of a
 * line through what was measured around it, so that one unlucky pass does not make a place look
 * dear for ever: what is thought dear is never visited again, and nothing would correct it. Where
 * nothing was measured each further row costs a tenth of a single-row pass. The curve never falls.
 */
#ifndef SO_DRAFT_CURVE_H
#define SO_DRAFT_CURVE_H

#include "base/err.h"

enum {
    SO_CURVE_MAX = 512,  /* rows; longer passes are extrapolated and not learned from */
    SO_CURVE_KNOTS = 35, /* 1 … 17, 20 … 512 */
};

typedef struct so_curve_point {
    int n;
    double ms, weight; /* weight: passes seen, at most 64 */
} so_curve_point;

/* Zero-initialise. */
typedef struct so_curve {
    double scale;     /* 0: nothing was measured */
    double errors[3]; /* of the latest passes against scale · shape, as logarithms */
    unsigned n_errors;
    double shape[SO_CURVE_KNOTS], weight[SO_CURVE_KNOTS];
    double knot_ms[SO_CURVE_KNOTS]; /* the curve, kept up to date */
} so_curve;

/* Nonsense (n < 1, times that are not positive numbers) is ignored. */
void so_curve_observe(so_curve *c, int n, double ms);
/* 0 while nothing was measured. */
double so_curve_ms(const so_curve *c, int n);

/* For a cache on disk, which is the caller's. Returns the number of points, at most `cap`. */
int so_curve_export(const so_curve *c, so_curve_point *points, int cap);
/* Old measurements weigh as four passes each at most: they serve until there are new ones.
 * SO_EINVAL, and nothing changes, on a point that cannot be. */
int so_curve_import(so_curve *c, const so_curve_point *points, int n, so_err *err);

#endif
