/* Chance for production: every number is a function of (seed, choice, position, purpose, index).
 *
 * A position is decided once, in one round: tests after the first failure never run, and the next
 * round begins behind the token that was drawn. So a key is used once, though rounds are not part
 * of it, and no number that decides a test is one that a drafter saw (those have a purpose of their
 * own). That holds within one request; another request with the same seed needs numbers of its own,
 * so the seed here is one that the engine made from the request's and a nonce (engine/nonce.c). A
 * uniform has 32 bits: a probability is met to 2^-32. Pure; any thread. */
#include "base/mem.h"
#include "base/mutant.h"
#include "base/pick.h"
#include "verify/verify.h"

static double uniform(const so_chance *c, so_rng_purpose purpose, uint32_t position,
                      uint32_t index) {
    const so_chance_keyed *k = (const so_chance_keyed *)c;
    so_rng_key key = {k->seed, k->choice, position, (uint32_t)purpose, 0};
    if (SO_MUTANT(CONSTANT_SEED))
        key.seed = 1;
    if (SO_MUTANT(DROP_CHOICE))
        key.choice = 0;
    if (SO_MUTANT(DROP_POSITION))
        key.position = 0;
    if (SO_MUTANT(REUSE_DRAFT) && purpose == SO_RNG_ACCEPT)
        key.purpose = SO_RNG_DRAFT;
    if (SO_MUTANT(REUSE_ACCEPT) && purpose == SO_RNG_RESIDUAL)
        key.purpose = SO_RNG_ACCEPT;
    return so_rng_uniform(&key, index);
}

/* u < 1, so p ≥ q always accepts; u > 0, so p = 0 never does. No division. */
static bool keyed_accept(so_chance *c, uint32_t position, uint32_t index, double p, double q) {
    return uniform(c, SO_RNG_ACCEPT, position, index) * q < p;
}

static double keyed_uniform(so_chance *c, uint32_t position) {
    return uniform(c, SO_RNG_RESIDUAL, position, 0);
}

static double sum_part(const void *weight, int32_t first) {
    const double *w = (const double *)weight + first;
    double s[4] = {0};
    for (int i = 0; i < SO_PICK_PART; i += 4)
        for (int k = 0; k < 4; k++)
            s[k] += w[i + k];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

static double weight_at(const void *weight, int32_t i) { return ((const double *)weight)[i]; }

static int32_t keyed_draw(so_chance *c, uint32_t position, const double *weight, int n,
                          double total) {
    int32_t i = so_pick(weight, n, keyed_uniform(c, position) * total, sum_part, weight_at);
    SO_ASSERT_OP(i, >=, 0);
    return i;
}

void so_chance_keyed_init(so_chance_keyed *c, uint64_t seed, uint32_t choice) {
    *c = (so_chance_keyed){
        {.accept = keyed_accept, .draw = keyed_draw, .uniform = keyed_uniform}, seed, choice};
}
