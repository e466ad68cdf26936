/* Chance for production: every number is a function of (seed, choice, position, purpose, index).
 *
 * A position is decided once, in one round: tests after the first failure never run, and the next
 * round begins behind the token that was drawn. So a key is used once, though rounds are not part
 * of it, and no number that decides a test is one that a drafter saw (those have a purpose of their
 * own). A uniform has 32 bits: a probability is met to 2^-32. Pure; any thread. */
#include "base/mem.h"
#include "verify/verify.h"

static double uniform(const so_chance *c, so_rng_purpose purpose, uint32_t position,
                      uint32_t index) {
    const so_chance_keyed *k = (const so_chance_keyed *)c;
    so_rng_key key = {k->seed, k->choice, position, (uint32_t)purpose, 0};
    return so_rng_uniform(&key, index);
}

/* u < 1, so p ≥ q always accepts; u > 0, so p = 0 never does. No division. */
static bool keyed_accept(so_chance *c, uint32_t position, uint32_t index, double p, double q) {
    return uniform(c, SO_RNG_ACCEPT, position, index) * q < p;
}

/* The first index whose running sum passes u·total. A weight of 0 never moves the sum and so is
 * never drawn; where rounding leaves the whole sum short of u·total, the last positive one is. */
static int32_t keyed_draw(so_chance *c, uint32_t position, const double *weight, int n,
                          double total) {
    double at = uniform(c, SO_RNG_RESIDUAL, position, 0) * total, sum = 0;
    int32_t last = -1;
    for (int32_t i = 0; i < n; i++) {
        if (!(weight[i] > 0))
            continue;
        last = i;
        sum += weight[i];
        if (sum > at)
            break;
    }
    SO_ASSERT_OP(last, >=, 0);
    return last;
}

void so_chance_keyed_init(so_chance_keyed *c, uint64_t seed, uint32_t choice) {
    *c = (so_chance_keyed){{keyed_accept, keyed_draw}, seed, choice};
}
