/* Counters and histograms of a server, and their Prometheus text form. One lock, held for a few
 * additions at a time; any thread. Names of speculation end as vLLM's and llama.cpp's do, so that
 * dashboards written for those need only another prefix. */
#ifndef SO_SERVER_METRICS_H
#define SO_SERVER_METRICS_H

#include "engine/engine.h"

typedef struct so_metrics so_metrics;
so_metrics *so_metrics_create(void);
void so_metrics_free(so_metrics *m);

/* A response was sent; path is one of the server's own words ("other" for unknown ones), not the
 * client's, and lives as long as the program. */
void so_metrics_http(so_metrics *m, const char *path, int status, double seconds);

/* Of requests (choices) of the engine. */
void so_metrics_step(so_metrics *m, const so_step_info *s);
/* What a request's stats have beyond those that were counted before, which they become. */
void so_metrics_guesses(so_metrics *m, const so_request_stats *now, so_request_stats *known);
void so_metrics_first(so_metrics *m, double seconds);         /* after arrival */
void so_metrics_tokens(so_metrics *m, int n, double seconds); /* since the ones before */
void so_metrics_finish(so_metrics *m, so_finish why, const so_request_stats *s, double seconds);
void so_metrics_refused(so_metrics *m, const char *why); /* a word of the program */

/* What is the case now, rather than how often it was. */
typedef struct so_gauges {
    const char *version, *model;
    const char *state; /* loading, ready, draining, failed */
    int running, waiting, slots, connections;
    so_engine_stats engine;
} so_gauges;
void so_metrics_write(so_metrics *m, const so_gauges *g, so_buf *out);

#endif
