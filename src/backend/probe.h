/* What the machine under a CPU backend can do at most, measured: the two sides of the roofline that
 * benchmarks print beside their figures. */
#ifndef SO_BACKEND_PROBE_H
#define SO_BACKEND_PROBE_H

#include "backend/backend.h"

typedef struct so_probe {
    double read_gb;  /* 10^9 bytes per second, all threads reading */
    double mac_giga; /* 10^9 int8 multiply-adds per second, all threads, nothing else */
} so_probe;

/* A buffer to read from again and again, in pages like those of packed weights. b must outlive it;
 * a backend other than cpu is refused. The size decides which cache answers: give that of what is
 * compared, or one that no cache holds. */
typedef struct so_prober so_prober;
int so_prober_create(so_backend *b, size_t n_bytes, so_prober **out, so_err *err);
void so_prober_free(so_prober *p); /* NULL is fine */
/* Once through the buffer, after it was gone through until the caches settled, and a millisecond or
 * so of multiplying: figures of this moment, to be taken between the runs that they stand beside.
 */
so_probe so_prober_take(so_prober *p);

/* The best of a few, for a buffer of n_bytes. */
int so_backend_probe(so_backend *b, size_t n_bytes, so_probe *out, so_err *err);

/* Bytes of the last cache level of this machine, as it states it; 0 where it does not. */
size_t so_cpu_cache_bytes(void);

/* The least time of work on both sides, in seconds: max(bytes / bandwidth, operations / peak). */
static inline double so_probe_floor(const so_probe *p, double n_bytes, double n_macs) {
    double read = n_bytes / (p->read_gb * 1e9), compute = n_macs / (p->mac_giga * 1e9);
    return read > compute ? read : compute;
}

#endif
