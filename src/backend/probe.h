/* What the machine under a CPU backend can do at most, measured: the two sides of the roofline that
 * benchmarks print beside their figures. */
#ifndef SO_BACKEND_PROBE_H
#define SO_BACKEND_PROBE_H

#include "backend/backend.h"

typedef struct so_probe {
    double read_gb;  /* 10^9 bytes per second, all threads reading */
    double mac_giga; /* 10^9 int8 multiply-adds per second, all threads, nothing else */
} so_probe;

/* b must come from so_backend_cpu_create. Reads n_bytes (a multiple of the threads' shares is not
 * needed) a few times and takes the best: the working set decides which cache answers, so give that
 * of what is compared. */
int so_backend_cpu_probe(so_backend *b, size_t n_bytes, so_probe *out, so_err *err);

/* The least time of work on both sides, in seconds: max(bytes / bandwidth, operations / peak). */
static inline double so_probe_floor(const so_probe *p, double n_bytes, double n_macs) {
    double read = n_bytes / (p->read_gb * 1e9), compute = n_macs / (p->mac_giga * 1e9);
    return read > compute ? read : compute;
}

#endif
