/* A median and a chi-square test, for measurements and tests. No state; any thread. */
#ifndef SO_BASE_STATISTICS_H
#define SO_BASE_STATISTICS_H

/* The median of v[n], which is sorted in place; the mean of the middle two if n is even, 0 if n is
 * 0. */
double so_median(double *v, int n);
/* P(X ≥ x) for X chi-square distributed with df ≥ 1 degrees of freedom. */
double so_chi2_tail(double x, int df);

#endif
