/* Measured limits of the machine under a backend: memory bandwidth and multiply-add rate, the
 * two sides of the roofline that benchmarks print next to their results. */
#ifndef SO_BACKEND_PROBE_H
#define SO_BACKEND_PROBE_H

#include "backend/backend.h"

/* A buffer that is read repeatedly. On the CPU it is in huge pages where the kernel provides them,
 * like packed weights. Its size decides which level of cache serves the reads: pass the size of the
 * weights whose read time the result is compared with, or a size larger than every cache. `b` must
 * outlive the prober; backends that cannot be measured (deferred) are refused. */
typedef struct so_prober so_prober;
int so_prober_create(so_backend *b, size_t n_bytes, so_prober **out, so_err *err);
void so_prober_free(so_prober *p); /* NULL is allowed */
/* Reads the buffer until the caches have settled, then times reads of it, plain and with prefetch
 * (the faster counts), and a short run of multiply-adds. Machine speed drifts, so measure between
 * the runs that the figures are compared with. */
so_probe so_prober_measure(so_prober *p);

/* The best of several measurements, with a buffer of n_bytes. */
int so_backend_probe(so_backend *b, size_t n_bytes, so_probe *out, so_err *err);

/* Bytes of the last cache level, as the system reports it; 0 if it does not report it. */
size_t so_cpu_cache_bytes(void);

/* Buffer sizes for the two bandwidths that benchmarks report: within the caches and past them. A
 * buffer of a size in between is partly cached, and how much of it changes from run to run. */
size_t so_probe_bytes_within(void); /* half of the last cache level; 0: its size is unknown */
size_t so_probe_bytes_past(void);   /* eight times the last cache level, within bounds */

/* Lower bound on run time in seconds: max(bytes / bandwidth, multiply-adds / peak rate). */
static inline double so_probe_floor(const so_probe *p, double n_bytes, double n_macs) {
    double read = n_bytes / (p->read_gb * 1e9), compute = n_macs / (p->mac_giga * 1e9);
    return read > compute ? read : compute;
}

#endif
