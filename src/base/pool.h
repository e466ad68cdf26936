/* A fixed team of threads that run one function together.
 *
 * so_pool_run calls fn(arg, index, count) once on every thread of the team, the caller being index
 * 0, and returns when all have returned. Within fn, so_pool_barrier joins the team. Waiting spins
 * for a while, then sleeps in the kernel, and a team that fills the cores is bound to them, so that
 * a busy neighbour costs its share of the machine and no more. Work must be split by output element
 * only, never inside one reduction, so that results do not depend on `count` (row invariance). One
 * caller at a time. Every thread sets its floating-point control word to round-to-nearest with
 * denormals kept. */
#ifndef SO_BASE_POOL_H
#define SO_BASE_POOL_H

#include "base/err.h"

typedef struct so_pool so_pool;
typedef void so_pool_fn(void *arg, int index, int count);

int so_pool_create(int n_threads, so_pool **out, so_err *err); /* 1 … 256 */
void so_pool_free(so_pool *p);
int so_pool_count(const so_pool *p);
void so_pool_run(so_pool *p, so_pool_fn *fn, void *arg);
/* How long the member waited, in turns of the waiting loop of about so_pool_turn_ns; -1: it slept.
 */
int so_pool_barrier(so_pool *p);
double so_pool_turn_ns(const so_pool *p); /* 0 where nobody spins */

/* Cores this process may run on (affinity mask and cgroup considered by the kernel). */
int so_cpu_count(void);

/* [*begin, *end) of n items for member `index` of `count`; contiguous, differing by at most one
 * `grain`, borders at multiples of `grain`. */
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
