/* The roofline of whole passes: what the machine could do, measured between the passes it stands
 * beside, against what they need. */
#ifndef SO_CLI_BENCH_ROOF_H
#define SO_CLI_BENCH_ROOF_H

#include "backend/probe.h"
#include "cli/bench_rig.h"
#include "cli/report.h"
#include "model/work.h"

typedef struct so_roof {
    so_prober *prober;
    size_t near_bytes, far_bytes; /* far 0: the machine does not state its caches */
    double far_gb;                /* reading what no cache holds */
    int n, cap;
    double *read_gb, *mac_giga; /* [cap], one of each so_roof_take */
    so_probe probe;             /* their medians, after so_roof_settle */
} so_roof;

/* For at most `cap` takes. To be closed, also after a failure. */
int so_roof_open(so_roof *r, so_bench_rig *g, int cap, so_err *err);
void so_roof_close(so_roof *r);
so_probe so_roof_take(so_roof *r);
void so_roof_settle(so_roof *r);

/* Milliseconds that w takes at least. */
double so_roof_ms(const so_roof *r, so_work w);
/* One line for people. */
void so_roof_print(const so_roof *r);
/* Adds the roofline of w, and `ms` against it, to a JSON object. */
void so_roof_json(const so_roof *r, so_work w, double ms, json_t *o);

#endif
