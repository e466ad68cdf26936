/* The two statistics that commands and tests share. Pure; any thread. */
#ifndef SO_BASE_STATISTICS_H
#define SO_BASE_STATISTICS_H

/* Sorts v; the mean of the middle two where n is even, 0 where it is 0. */
double so_median(double *v, int n);
/* P(X ≥ x) for a chi-square X of df ≥ 1 degrees of freedom. */
double so_chi2_tail(double x, int df);

#endif
