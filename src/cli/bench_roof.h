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
    size_t weight_bytes; /* size of the buffer for weights (bench_roof.c) */
    size_t memory_bytes; /* size of the buffer for memory; 0: cache sizes are unknown */
    double memory_gb;    /* bandwidth of memory, past all caches, in GB/s */
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
/* One line of text. */
void so_roof_print(const so_roof *r);
/* Adds the roofline of w, and its ratio to `ms`, to a JSON object. */
void so_roof_json(const so_roof *r, so_work w, double ms, json_t *o);

#endif
