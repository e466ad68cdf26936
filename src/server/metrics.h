/* Counters and histograms of a server, and their Prometheus text format. Any thread; one lock, held
 * for a few additions at a time. Speculation metrics have the names of vLLM and llama.cpp after the
 * prefix sooth_, so in dashboards written for those only the prefix must be changed. */
#ifndef SO_SERVER_METRICS_H
#define SO_SERVER_METRICS_H

#include "engine/engine.h"

typedef struct so_metrics so_metrics;
so_metrics *so_metrics_create(void);
void so_metrics_free(so_metrics *m);

/* A response was sent. path is a constant of the program, an endpoint's path or "other", never the
 * client's text: the number of time series stays bounded. */
void so_metrics_http(so_metrics *m, const char *path, int status, double seconds);

/* Engine thread. A request of the engine is one choice of an API request. */
void so_metrics_step(so_metrics *m, const so_step_info *s);
/* Adds the difference between `now` and `known`, then copies `now` to `known`. */
void so_metrics_guesses(so_metrics *m, const so_request_stats *now, so_request_stats *known);
void so_metrics_first(so_metrics *m, double seconds); /* time to the first token */
/* n tokens of one step, `seconds` after the previous tokens of the request; negative: they are its
 * first ones. */
void so_metrics_tokens(so_metrics *m, int n, double seconds);
void so_metrics_finish(so_metrics *m, so_finish why, const so_request_stats *s, double seconds);
void so_metrics_refused(so_metrics *m, const char *why); /* why: a constant of the program */

/* Current values, read when /metrics is requested. */
typedef struct so_gauges {
    const char *version, *model;
    const char *state;  /* loading, ready, draining, failed, lost */
    const char *device; /* one line; NULL: not known yet */
    int running, waiting, slots, connections;
    size_t device_free, device_total; /* total 0: the device has no memory of its own */
    so_engine_stats engine;
} so_gauges;
void so_metrics_write(so_metrics *m, const so_gauges *g, so_buf *out);

#endif
