/* An extended Kalman filter over two numbers: log c(1) and f of trip.h.
 *
 *   measured    y = log(ms / g(n)) = log c(1) + log(L − (L − P) · f / g(n)) + noise
 *   drift       log c(1) by the machine's speed, like the curves (curve.c); f by very little
 *
 * With one ratio of L to P only a sum of the two is measured. Their covariance remembers that: the
 * first call with another ratio moves both. Innovations beyond three deviations are clipped, as in
 * curve.c: an interruption is one spike. */
#include "plan/trip.h"

#include <math.h>

#include "base/mem.h"
#include "plan/tuning.h"

static double clamp(double x, double lo, double hi) { return x < lo ? lo : SO_MIN(x, hi); }

void so_trip_start(so_trip *t) {
    if (t->var_fixed > 0)
        return;
    *t = (so_trip){.fixed_part = SO_TUNE_TRIP_FIXED,
                   .var_fixed = SO_TUNE_TRIP_FIXED_SPREAD * SO_TUNE_TRIP_FIXED_SPREAD};
}

void so_trip_import(so_trip *t, double fixed_part, double error) {
    if (error > SO_TUNE_TRIP_FIXED_SPREAD) { /* less is known than the prior says */
        *t = (so_trip){0};
        so_trip_start(t);
        return;
    }
    error = SO_MAX(error, SO_TUNE_TRIP_OLD_ERROR);
    *t = (so_trip){.fixed_part = clamp(fixed_part, 0, SO_TUNE_TRIP_FIXED_MAX),
                   .var_fixed = error * error};
}

double so_trip_hoped_part(const so_trip *t) {
    return SO_MIN(t->fixed_part + so_trip_error(t), SO_TUNE_TRIP_FIXED_MAX);
}

double so_trip_error(const so_trip *t) { return sqrt(t->var_fixed); }

/* f(n) = T / c(n). The ratio is an estimate, too: below 1 it is an error. */
static double part_of(const so_trip *t, double ratio) {
    return SO_MIN(t->fixed_part / SO_MAX(ratio, 1), SO_TUNE_TRIP_FIXED_MAX);
}

double so_trip_factor(const so_trip *t, int trips, int levels, double ratio) {
    return levels - (levels - trips) * part_of(t, ratio);
}

/* The factor if f is its prior. The slope of y by f is taken there: taken at the current f it turns with
 * each update, and f drifts to 0 in thousands of calls with one ratio, which say nothing about it. */
static double at_prior(int trips, int levels, double ratio) {
    double part = SO_MIN(SO_TUNE_TRIP_FIXED / SO_MAX(ratio, 1), SO_TUNE_TRIP_FIXED_MAX);
    return levels - (levels - trips) * part;
}

void so_trip_observe(so_trip *t, int trips, int levels, double ratio, double ms, double noise) {
    if (!(t->var_fixed > 0) || !(ms > 0) || !isfinite(ms) || !isfinite(ratio) || trips < 1 ||
        levels < trips)
        return;
    double factor = so_trip_factor(t, trips, levels, ratio);
    double slope = -(levels - trips) / SO_MAX(ratio, 1) / at_prior(trips, levels, ratio);
    double y = log(ms / SO_MAX(ratio, 1));
    if (!t->measured) {
        t->log_ms = y - log(factor);
        t->var_ms = 1;
        t->measured = true;
    }
    t->var_ms += SO_TUNE_SPEED_DRIFT * SO_TUNE_SPEED_DRIFT;
    t->var_fixed += SO_TUNE_RATIO_DRIFT * SO_TUNE_TRIP_FIXED_SPREAD * SO_TUNE_TRIP_FIXED_SPREAD;
    double with_ms = t->var_ms + slope * t->cov, with_fixed = t->cov + slope * t->var_fixed;
    double sum = with_ms + slope * with_fixed + noise, limit = SO_TUNE_OUTLIER * sqrt(sum);
    double error = clamp(y - t->log_ms - log(factor), -limit, limit);
    t->log_ms += with_ms / sum * error;
    t->fixed_part = clamp(t->fixed_part + with_fixed / sum * error, 0, SO_TUNE_TRIP_FIXED_MAX);
    t->var_ms -= with_ms * with_ms / sum;
    t->var_fixed -= with_fixed * with_fixed / sum;
    t->cov -= with_ms * with_fixed / sum;
    t->var_fixed = clamp(t->var_fixed, SO_TUNE_TRIP_ERROR_MIN * SO_TUNE_TRIP_ERROR_MIN, 1);
}
