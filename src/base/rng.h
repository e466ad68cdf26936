/* Counter-based randomness: Philox-4x32-10 (Salmon et al., SC 2011).
 *
 * A draw is a pure function of its key, so that a sampled token never depends on call order, batch
 * slot or thread. Two requests with the same seed draw the same noise at the same position, with or
 * without speculation: that is what makes the seed-exact level possible. Where guesses are tested
 * by rejection that would be wrong, and the seed of a key is made from the request's seed and a
 * nonce (engine/nonce.c). */
#ifndef SO_BASE_RNG_H
#define SO_BASE_RNG_H

#include <stdint.h>

/* What a number is drawn for: draws for different purposes are independent. */
typedef enum so_rng_purpose {
    SO_RNG_TOKEN = 0, /* the noise or uniform that picks a token */
    SO_RNG_ACCEPT = 1,
    SO_RNG_RESIDUAL = 2,
    SO_RNG_DRAFT = 3,
    SO_RNG_TEST = 4,
    SO_RNG_NONCE = 5, /* a seed made from a seed and a nonce (engine/nonce.c) */
} so_rng_purpose;

typedef struct so_rng_key {
    uint64_t seed;
    uint32_t choice;   /* n of `n` answers to one request */
    uint32_t position; /* of the token being drawn, counted from the first of the context */
    uint32_t purpose;  /* so_rng_purpose */
    uint32_t round;    /* 0 but where drafting must differ from round to round */
} so_rng_key;

/* The generator's constants, for kernels that run many blocks beside each other. */
#define SO_RNG_ROUNDS 10
#define SO_RNG_MUL0 0xD2511F53u
#define SO_RNG_MUL1 0xCD9E8D57u
#define SO_RNG_KEY0 0x9E3779B9u
#define SO_RNG_KEY1 0xBB67AE85u

/* Four independent words for one (key, index). */
void so_rng_block(const so_rng_key *key, uint32_t index, uint32_t out[4]);

/* Uniform in (0,1), 32 bits, never 0 or 1: (word + 0.5) / 2^32, exact in double. */
double so_rng_uniform(const so_rng_key *key, uint32_t index);

/* A seed for requests that name none: from the system's random source. */
uint64_t so_rng_system_seed(void);

#endif
