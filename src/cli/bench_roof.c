/* The roofline of whole passes.
 *
 * The threads that run the passes measure two bandwidths:
 *   weights   over a buffer of the weights' size, at most the size of the other buffer. Passes read
 *             the weights from the same level of memory, which may be a cache. The roofline uses
 *             this bandwidth.
 *   memory    over twice the size of the last cache level, once at the start: the bandwidth of
 *             memory. A larger buffer would give the same result.
 *
 * The first bandwidth and the peak are measured once per repeat, after the caches hold the buffer,
 * as passes are timed after others of the same width. Medians are compared with medians: on a
 * machine whose speed drifts, the best of one series and the median of another cannot be compared.
 * Main thread only. */
#include "cli/bench_roof.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/statistics.h"

enum { MAX_UNKNOWN = 512 << 20 }; /* maximum bytes to read if cache sizes are unknown */

static int measure_memory(so_roof *r, so_backend *b, so_err *err) {
    so_prober *p;
    int rc = so_prober_create(b, r->memory_bytes, &p, err);
    if (rc != SO_OK)
        return rc;
    r->memory_gb = so_prober_measure(p).read_gb;
    so_prober_free(p);
    return SO_OK;
}

int so_roof_open(so_roof *r, so_bench_rig *g, int cap, so_err *err) {
    bool remote = g->b.backend->vt->remote; /* its caches are smaller than MAX_UNKNOWN */
    size_t weights = so_model_weight_bytes(g->b.model), cache = remote ? 0 : so_cpu_cache_bytes();
    *r = (so_roof){.cap = cap, .memory_bytes = 2 * cache};
    r->weight_bytes = SO_MIN(weights, cache > 0 ? r->memory_bytes : (size_t)MAX_UNKNOWN);
    r->read_gb = SO_NEW_N(double, cap);
    r->mac_giga = SO_NEW_N(double, cap);
    int rc = cache > 0 ? measure_memory(r, g->b.backend, err) : SO_OK;
    return rc == SO_OK ? so_prober_create(g->b.backend, r->weight_bytes, &r->prober, err) : rc;
}

void so_roof_close(so_roof *r) {
    so_prober_free(r->prober);
    free(r->read_gb);
    free(r->mac_giga);
    *r = (so_roof){0};
}

so_probe so_roof_take(so_roof *r) {
    SO_ASSERT_OP(r->n, <, r->cap);
    so_probe p = so_prober_measure(r->prober);
    r->read_gb[r->n] = p.read_gb;
    r->mac_giga[r->n++] = p.mac_giga;
    return p;
}

void so_roof_settle(so_roof *r) {
    r->probe = (so_probe){.read_gb = so_median(r->read_gb, r->n),
                          .mac_giga = so_median(r->mac_giga, r->n)};
}

double so_roof_ms(const so_roof *r, so_work w) {
    return 1e3 * so_probe_floor(&r->probe, w.n_bytes, w.n_macs);
}

void so_roof_print(const so_roof *r) {
    printf("roofline: reading %.0f MB (the size of the weights) %.1f GB/s, %.0f G multiply-adds/s",
           (double)r->weight_bytes / 1e6, r->probe.read_gb, r->probe.mac_giga);
    if (r->memory_bytes > 0)
        printf("; reading %.0f MB (past the caches) %.1f GB/s", (double)r->memory_bytes / 1e6,
               r->memory_gb);
    printf("\n");
}

void so_roof_json(const so_roof *r, so_work w, double ms, json_t *o) {
    double floor_ms = so_roof_ms(r, w);
    json_t *more =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:o}", "bytes", w.n_bytes, "macs", w.n_macs,
                  "roofline_ms", floor_ms, "roofline_percent", 100 * floor_ms / ms,
                  "read_gb_per_second", r->probe.read_gb, "read_bytes", (json_int_t)r->weight_bytes,
                  "peak_gmac_per_second", r->probe.mac_giga, "memory_gb_per_second",
                  r->memory_bytes > 0 ? json_real(r->memory_gb) : json_null());
    json_object_update(o, more);
    json_decref(more);
}
