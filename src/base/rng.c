/* Philox-4x32-10 (see rng.h). The 128-bit counter is (index, position, choice, purpose and round)
 * and the 64-bit key is the seed, so every field passes through all ten Philox rounds. No state;
 * any thread. */
#include "base/rng.h"

#include <stdio.h>
#include <sys/random.h>
#include <time.h>

void so_rng_block(const so_rng_key *key, uint32_t index, uint32_t out[4]) {
    uint32_t c0 = index, c1 = key->position, c2 = key->choice;
    uint32_t c3 = key->purpose << 28 ^ key->round;
    uint32_t k0 = (uint32_t)key->seed, k1 = (uint32_t)(key->seed >> 32);
    for (int r = 0; r < SO_RNG_ROUNDS; r++) {
        uint64_t a = (uint64_t)SO_RNG_MUL0 * c0, b = (uint64_t)SO_RNG_MUL1 * c2;
        uint32_t n0 = (uint32_t)(b >> 32) ^ c1 ^ k0, n2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        c0 = n0;
        c2 = n2;
        k0 += SO_RNG_KEY0;
        k1 += SO_RNG_KEY1;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

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
