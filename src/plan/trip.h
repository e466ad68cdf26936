/* The fixed cost of a round trip to a device, apart from the cost of the levels drafted in it.
 *
 * On a device a draft model makes several levels of guesses in one round trip, a pass
 * (draft/model_levels.c). A trip has a fixed cost T (launches, copies, waiting), and each of its
 * levels costs l(n) for n chains:
 *
 *   ms = P · T + L · l(n)          P trips with L levels together
 *
 * costs.h keeps c(n) = T + l(n), a trip of one level, as a curve. Here the fixed part of it is
 * learned, f = T / c(1). With g(n) = c(n) / c(1):
 *
 *   ms = c(n) · (L − (L − P) · f / g(n))
 *
 * f needs calls with different ratios of levels to trips. While all calls have one ratio, f stays
 * at its prior and c(n) takes what is left, so that the measured calls are predicted correctly and
 * the others by the prior. f is a ratio of times, so it does not change with the machine's speed.
 *
 * Where every level is a trip (P = L), on CPUs, f does not matter and is 0. Thread: the engine
 * thread. */
#ifndef SO_PLAN_TRIP_H
#define SO_PLAN_TRIP_H

#include <stdbool.h>

/* Zero-initialise: every level is a trip, f is 0 and stays 0. */
typedef struct so_trip {
    double fixed_part; /* f */
    double log_ms;     /* of a trip of one level, with one chain; for this filter alone */
    double var_fixed, var_ms, cov;
    bool measured;
} so_trip;

/* Starts from the prior, unless it has been started. */
void so_trip_start(so_trip *t);
/* Starts from an earlier run: f and its standard error. */
void so_trip_import(so_trip *t, double fixed_part, double error);
double so_trip_error(const so_trip *t); /* standard error of f; 0: it was not started */
/* f plus its error. Whether levels share a trip is decided by it: where they do not, nothing is learned
 * of f, so an estimate that is too low would never be corrected. The error grows until they do. */
double so_trip_hoped_part(const so_trip *t);

/* The factor of c(n) in the time of a call; ratio: g(n). */
double so_trip_factor(const so_trip *t, int trips, int levels, double ratio);
/* noise: variance of log ms of one call. */
void so_trip_observe(so_trip *t, int trips, int levels, double ratio, double ms, double noise);

#endif
