/* The roofline of whole passes: the least time that a pass needs at the memory bandwidth and the
 * arithmetic peak of this machine, both measured between the timed passes. */
#ifndef SO_CLI_BENCH_ROOF_H
#define SO_CLI_BENCH_ROOF_H

#include "backend/probe.h"
#include "cli/bench_rig.h"
#include "cli/report.h"
#include "model/work.h"

typedef struct so_roof {
    so_prober *prober;
    bool cached;                     /* the weights fit the last cache level */
    size_t weight_bytes, read_bytes; /* read_bytes: within_bytes or past_bytes, whichever the
                                        roofline uses */
    size_t within_bytes, past_bytes; /* sizes of a buffer that fits the caches (0: unknown) and of
                                        one that does not */
    double within_gb, past_gb;       /* bandwidths in GB/s */
    int n, cap;
    double *read_gb, *mac_giga; /* [cap] results of so_roof_take */
    so_probe probe;             /* their medians, set by so_roof_settle */
} so_roof;

/* For at most `cap` calls of so_roof_take. Close it also after a failure. */
int so_roof_open(so_roof *r, so_bench_rig *g, int cap, so_err *err);
void so_roof_close(so_roof *r);
/* Measures bandwidth and peak once more. */
so_probe so_roof_take(so_roof *r);
/* Computes the medians of all measurements. */
void so_roof_settle(so_roof *r);

/* The minimum time for the work w, in milliseconds. */
double so_roof_ms(const so_roof *r, so_work w);
/* Prints the bandwidths, the peak, and which bandwidth is used: two lines. */
void so_roof_print(const so_roof *r);
/* The bandwidth within the caches; null if it is unknown. */
json_t *so_roof_cache_json(const so_roof *r);
/* Adds the roofline of w, and its ratio to `ms`, to a JSON object. */
void so_roof_json(const so_roof *r, so_work w, double ms, json_t *o);

#endif
