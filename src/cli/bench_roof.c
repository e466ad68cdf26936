/* The roofline of whole passes.
 *
 * The threads that run the passes measure two bandwidths (backend/probe.h):
 *   within   over a buffer that fits the last cache level
 *   past     over a buffer several times as large: the bandwidth of memory
 *
 * The roofline of a pass uses `past`, or `within` if the weights fit the last cache level, and the
 * output says which. Measuring over a buffer of the weights' size would not do: if that is a few
 * times the cache, the part that stays cached differs from run to run, and the bandwidth with it,
 * by a factor of up to two. The same holds for the weights themselves, so a pass may be faster than
 * the roofline that uses `past`.
 *
 * The bandwidth that the roofline uses and the rate of multiply-adds are measured once per repeat,
 * the other bandwidth once at the start. Medians are compared with medians: on a machine whose
 * speed drifts, the best of one series and the median of another cannot be compared. Main thread
 * only. */
#include "cli/bench_roof.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/statistics.h"

enum { REMOTE_PAST = 512 << 20 }; /* bytes, past the caches of every GPU */

/* The bandwidth over a buffer of n_bytes, measured once. */
static int measure_once(so_backend *b, size_t n_bytes, double *gb, so_err *err) {
    so_prober *p;
    int rc = n_bytes > 0 ? so_prober_create(b, n_bytes, &p, err) : SO_OK;
    if (rc != SO_OK || n_bytes == 0)
        return rc;
    *gb = so_prober_measure(p).read_gb;
    so_prober_free(p);
    return SO_OK;
}

int so_roof_open(so_roof *r, so_bench_rig *g, int cap, so_err *err) {
    so_backend *b = g->b.backend;
    bool remote = b->vt->remote; /* a GPU: its caches are small, and their size is not queried */
    *r = (so_roof){.cap = cap,
                   .weight_bytes = so_model_weight_bytes(g->b.model),
                   .within_bytes = remote ? 0 : so_probe_bytes_within(),
                   .past_bytes = remote ? (size_t)REMOTE_PAST : so_probe_bytes_past()};
    r->cached = !remote && r->weight_bytes <= so_cpu_cache_bytes();
    r->read_bytes = r->cached ? r->within_bytes : r->past_bytes;
    r->read_gb = SO_NEW_N(double, cap);
    r->mac_giga = SO_NEW_N(double, cap);
    int rc = r->cached ? measure_once(b, r->past_bytes, &r->past_gb, err)
                       : measure_once(b, r->within_bytes, &r->within_gb, err);
    return rc == SO_OK ? so_prober_create(b, r->read_bytes, &r->prober, err) : rc;
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
    *(r->cached ? &r->within_gb : &r->past_gb) = p.read_gb;
    return p;
}

void so_roof_settle(so_roof *r) {
    r->probe = (so_probe){.read_gb = so_median(r->read_gb, r->n),
                          .mac_giga = so_median(r->mac_giga, r->n)};
    *(r->cached ? &r->within_gb : &r->past_gb) = r->probe.read_gb;
}

double so_roof_ms(const so_roof *r, so_work w) {
    return 1e3 * so_probe_floor(&r->probe, w.n_bytes, w.n_macs);
}

void so_roof_print(const so_roof *r) {
    printf("roofline: reading memory %.1f GB/s (%.0f MB, past the caches)", r->past_gb,
           (double)r->past_bytes / 1e6);
    if (r->within_bytes > 0)
        printf(", reading the cache %.1f GB/s (%.0f MB)", r->within_gb,
               (double)r->within_bytes / 1e6);
    printf(", %.0f G multiply-adds/s\nthe limit uses %s: the weights (%.0f MB) %s the last cache\n",
           r->probe.mac_giga, r->cached ? "the cache" : "memory", (double)r->weight_bytes / 1e6,
           r->cached ? "fit" : "do not fit");
}

void so_roof_json(const so_roof *r, so_work w, double ms, json_t *o) {
    double floor_ms = so_roof_ms(r, w);
    json_t *more =
        json_pack("{s:f, s:f, s:f, s:f, s:f, s:I, s:f, s:f, s:o}", "bytes", w.n_bytes, "macs",
                  w.n_macs, "roofline_ms", floor_ms, "roofline_percent", 100 * floor_ms / ms,
                  "read_gb_per_second", r->probe.read_gb, "read_bytes", (json_int_t)r->read_bytes,
                  "peak_gmac_per_second", r->probe.mac_giga, "memory_gb_per_second", r->past_gb,
                  "cache_gb_per_second", so_roof_cache_json(r));
    json_object_update(o, more);
    json_decref(more);
}

json_t *so_roof_cache_json(const so_roof *r) {
    return r->within_bytes > 0 ? json_real(r->within_gb) : json_null();
}
