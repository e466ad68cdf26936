/* Counter-based random numbers: Philox-4x32-10 (Salmon et al., SC 2011).
 *
 * A random number is a pure function of its key and index, so a sampled token never depends on call
 * order, batch slot or thread. Two requests with the same seed get the same noise at the same
 * position, with or without speculation; this makes seed-exact verification (match) possible.
 * Rejection sampling needs the opposite: guesses must be independent of the numbers that test them.
 * So for `reject` and `lenient` above temperature 0 the seed in all keys of a request is derived
 * from its own seed and a nonce (engine/nonce.c). Otherwise it is the request's seed. */
#ifndef SO_BASE_RNG_H
#define SO_BASE_RNG_H

#include "base/exact.h"

/* What a random number is used for. Numbers for different purposes are independent. */
typedef enum so_rng_purpose {
    SO_RNG_TOKEN = 0,    /* noise or uniform number that samples a token */
    SO_RNG_ACCEPT = 1,   /* the test of a guess by rejection */
    SO_RNG_RESIDUAL = 2, /* the correction after a rejected guess */
    SO_RNG_DRAFT = 3,    /* a guess sampled by a drafter */
    SO_RNG_TEST = 4,     /* inputs of tests and benchmarks */
    SO_RNG_NONCE = 5,    /* a seed derived from a seed and a nonce (engine/nonce.c) */
} so_rng_purpose;

typedef struct so_rng_key {
    uint64_t seed;
    uint32_t choice;   /* index of the answer, for requests with n > 1 answers */
    uint32_t position; /* of the sampled token in the context */
    uint32_t purpose;  /* so_rng_purpose */
    uint32_t round;    /* SO_RNG_DRAFT: number of the request's round; other purposes: 0 */
} so_rng_key;

/* The generator's constants, for kernels that compute many blocks at once. */
#define SO_RNG_ROUNDS 10
#define SO_RNG_MUL0 0xD2511F53u
#define SO_RNG_MUL1 0xCD9E8D57u
#define SO_RNG_KEY0 0x9E3779B9u
#define SO_RNG_KEY1 0xBB67AE85u

/* Four independent 32-bit numbers for one (key, index). The 128-bit counter is (index, position,
 * choice, purpose and round) and the 64-bit key is the seed, so every field passes through all ten
 * Philox rounds. */
SO_BOTH void so_rng_block(const so_rng_key *key, uint32_t index, uint32_t out[4]) {
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

/* Uniform in (0,1), never 0 or 1: (32-bit number + 0.5) / 2^32, exact in double. */
double so_rng_uniform(const so_rng_key *key, uint32_t index);

/* A seed from the system's random source, for requests without one. */
uint64_t so_rng_system_seed(void);

#endif
