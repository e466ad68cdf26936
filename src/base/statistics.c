/* The median and the chi-square tail probability (see statistics.h). */
#include "base/statistics.h"

#include <math.h>
#include <stdlib.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double so_median(double *v, int n) {
    if (n == 0)
        return 0;
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* Q(a, x), the upper regularised gamma function: 1 minus the series of P for x < a + 1, else
 * Lentz's continued fraction of Q. */
static double gamma_q(double a, double x) {
    double lead = exp(a * log(x) - x - lgamma(a));
    if (x < a + 1) {
        double term = 1 / a, sum = term;
        for (int k = 1; k < 10000 && term > sum * 1e-16; k++)
            sum += term *= x / (a + k);
        return 1 - lead * sum;
    }
    double b = x + 1 - a, c = 1e300 /* infinity */, d = 1 / b, h = d;
    for (int k = 1; k < 10000; k++) {
        double an = -k * (k - a);
        b += 2;
        d = 1 / (an * d + b);
        c = b + an / c;
        h *= d * c;
        if (fabs(d * c - 1) < 1e-15)
            break;
    }
    return lead * h;
}

double so_chi2_tail(double x, int df) {
    if (!(x > 0))
        return 1;
    return isfinite(x) ? gamma_q(df / 2.0, x / 2) : 0;
}
