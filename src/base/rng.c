/* Random numbers that are not computed in inner loops; the generator itself is in rng.h. No state;
 * any thread. */
#include "base/rng.h"

#include <stdio.h>
#include <sys/random.h>
#include <time.h>

double so_rng_uniform(const so_rng_key *key, uint32_t index) {
    uint32_t w[4];
    so_rng_block(key, index / 4, w);
    return ((double)w[index % 4] + 0.5) * 0x1p-32;
}

uint64_t so_rng_system_seed(void) {
    uint64_t seed;
    if (getrandom(&seed, sizeof seed, 0) == (ssize_t)sizeof seed)
        return seed;
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * 1000000007u ^ (uint64_t)ts.tv_nsec;
}
