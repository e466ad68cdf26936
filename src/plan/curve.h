/* t(n): milliseconds of a pass over n rows, learned from the passes that are made anyway.
 *
 * A Kalman filter over log t(n) at knots: every n up to 17, then at growing distances. Effects that
 * slow down all passes alike (a longer context, other processes) are modelled as large common
 * noise, so that one pass informs about all widths n. The ratios between widths are a random walk
 * from knot to knot around a prior (each further row adds a tenth of a one-row pass) and change
 * slowly. So a width that was never tried follows its neighbours, ratios of widths that alternate
 * are learned even while the machine's speed changes, and one unlucky pass changes no estimate
 * much. The noise of one measurement is learned too. The curve never decreases. */
#ifndef SO_PLAN_CURVE_H
#define SO_PLAN_CURVE_H

#include "base/err.h"

enum {
    SO_CURVE_MAX = 512,  /* rows; longer passes are extrapolated and not learned from */
    SO_CURVE_KNOTS = 35, /* 1 … 17, 20 … 512 */
};

typedef struct so_curve_point {
    int n;
    double ms, weight; /* weight: number of passes, at most 64 */
} so_curve_point;

/* Zero-initialise. */
typedef struct so_curve {
    double log_ms[SO_CURVE_KNOTS];
    double cov[SO_CURVE_KNOTS][SO_CURVE_KNOTS];
    double noise;                   /* variance of the log of one pass; 0: nothing was measured */
    double weight[SO_CURVE_KNOTS];  /* number of passes */
    int last;                       /* knot of the latest pass */
    double knot_ms[SO_CURVE_KNOTS]; /* the curve, updated with every pass */
} so_curve;

/* Invalid values (n < 1, times that are not positive and finite) are ignored. */
void so_curve_observe(so_curve *c, int n, double ms);
/* 0 while nothing was measured. */
double so_curve_ms(const so_curve *c, int n);
/* Standard error of log t(n), relative to the width of the latest pass. */
double so_curve_std_error(const so_curve *c, int n);

/* For a file, which the caller writes. Returns the number of points, at most `cap`. */
int so_curve_export(const so_curve *c, so_curve_point *points, int cap);
/* Imported points weigh at most sixteen passes each, so that new measurements soon replace them.
 * SO_EINVAL, and nothing changes, if a point is invalid. */
int so_curve_import(so_curve *c, const so_curve_point *points, int n, so_err *err);

#endif
