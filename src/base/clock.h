/* Monotonic time in nanoseconds. */
#ifndef SO_BASE_CLOCK_H
#define SO_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t so_clock_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static inline double so_clock_ms_since(int64_t t_ns) {
    return (double)(so_clock_ns() - t_ns) * 1e-6;
}

#endif
