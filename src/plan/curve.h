/* t(n): milliseconds of a pass with n rows, learned from the passes that are made anyway.
 *
 * A Kalman filter over log t(n) at knots: every n up to 17, then ever further apart. What slows all
 * passes down alike (a longer context, a busy neighbour) is common noise, large: one pass tells
 * about all widths. How widths compare is a random walk from knot to knot around a first guess, a
 * tenth of a single-row pass for each further row, and changes slowly. So the covariance knows what
 * is known: a width never tried follows its neighbours, ratios of widths tried in turn are learned
 * even while the machine's speed wanders, and a single unlucky pass moves nothing far. How noisy
 * the clock is, is learned too. The curve never falls. */
#ifndef SO_PLAN_CURVE_H
#define SO_PLAN_CURVE_H

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
    double log_ms[SO_CURVE_KNOTS];
    double cov[SO_CURVE_KNOTS][SO_CURVE_KNOTS];
    double noise;                   /* variance of a pass; 0: nothing was measured */
    double weight[SO_CURVE_KNOTS];  /* passes seen */
    int last;                       /* knot of the latest pass */
    double knot_ms[SO_CURVE_KNOTS]; /* the curve, kept up to date */
} so_curve;

/* Nonsense (n < 1, times that are not positive numbers) is ignored. */
void so_curve_observe(so_curve *c, int n, double ms);
/* 0 while nothing was measured. */
double so_curve_ms(const so_curve *c, int n);
/* How uncertain t(n) is against the time of the latest pass: deviation of the logarithm. */
double so_curve_doubt(const so_curve *c, int n);

/* For a cache on disk, which is the caller's. Returns the number of points, at most `cap`. */
int so_curve_export(const so_curve *c, so_curve_point *points, int cap);
/* Old measurements weigh as sixteen passes each at most: they serve until there are new ones.
 * SO_EINVAL, and nothing changes, on a point that cannot be. */
int so_curve_import(so_curve *c, const so_curve_point *points, int n, so_err *err);

#endif
