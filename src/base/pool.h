/* A fixed pool of threads that run one function together.
 *
 * so_pool_run calls fn(arg, index, count) once on every thread and returns when all calls have
 * returned. The calling thread takes part with index 0. Inside fn, so_pool_barrier waits for all
 * threads. A waiting thread spins for a while, then sleeps in the kernel. A pool with one thread
 * per core is bound to the cores; pool.c has the reasons and the measurements.
 *
 * Work must be split by output element, never inside one reduction, so that results do not depend
 * on `count`. Only one thread may call so_pool_run at a time. During a job every
 * thread's floating-point control register is set to round-to-nearest with denormals kept. */
#ifndef SO_BASE_POOL_H
#define SO_BASE_POOL_H

#include "base/err.h"

typedef struct so_pool so_pool;
typedef void so_pool_fn(void *arg, int index, int count);

int so_pool_create(int n_threads, so_pool **out, so_err *err); /* 1 … 256 */
/* Cores of the process's affinity mask, by their order in it. n 0: all of them. */
typedef struct so_core_range {
    int first, n;
} so_core_range;
/* A pool on these cores only. Each thread is bound to one if there are as many threads as cores. */
int so_pool_create_on(so_core_range cores, int n_threads, so_pool **out, so_err *err);
void so_pool_free(so_pool *p);
int so_pool_count(const so_pool *p);
void so_pool_run(so_pool *p, so_pool_fn *fn, void *arg);
/* Waits for all threads of the job. Returns how long this thread waited, in spins of about
 * so_pool_spin_ns each, or −1 if it slept. */
int so_pool_barrier(so_pool *p);
double so_pool_spin_ns(const so_pool *p); /* 0 if the pool does not spin */

/* The number of cores this process may use: the affinity mask, limited by cgroup CPU quotas. */
int so_cpu_count(void);

/* The items [*begin, *end) of n that thread `index` of `count` computes. The parts are contiguous,
 * start at multiples of `grain` and differ in size by at most one grain. */
static inline void so_split(long n, long grain, int index, int count, long *begin, long *end) {
    long blocks = (n + grain - 1) / grain;
    *begin = blocks * index / count * grain;
    *end = blocks * (index + 1) / count * grain;
    if (*begin > n)
        *begin = n;
    if (*end > n)
        *end = n;
}

#endif
