/* The verifier's random numbers in production: each is a function of (seed, choice, position,
 * purpose, index), with the purposes SO_RNG_ACCEPT and SO_RNG_RESIDUAL.
 *
 * Within a request no number is used twice, although the round is not part of the key. A round
 * tests guesses at consecutive positions and ends at the first position where none is accepted; the
 * token sampled there decides that position, and the next round begins after it. So a position is
 * tested in one round only, and the guesses tested at it have different indices. Sampled guesses
 * have numbers with a purpose of their own (SO_RNG_DRAFT), so a drafter never sees a number that
 * decides a test. Only those numbers have the round in their key, because a drafter may sample for
 * one position in several rounds (so_draft_uniform).
 *
 * Another request with the same seed needs other numbers. So with `reject` and `lenient` above
 * temperature 0 the seed here is derived from the request's seed and a nonce (engine/nonce.c). With
 * nonce 0 it is the request's seed.
 *
 * A uniform number has 32 bits, so probabilities are exact to 2^-32. Pure functions; any thread. */
#include "base/mem.h"
#include "base/mutant.h"
#include "base/pick.h"
#include "verify/verify.h"

static double uniform(const so_verify_rng *c, so_rng_purpose purpose, uint32_t position,
                      uint32_t index) {
    const so_verify_rng_keyed *k = (const so_verify_rng_keyed *)c;
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

/* Accept if u·q < p. u < 1, so p ≥ q always accepts; u > 0, so p = 0 never does. No division. */
static bool keyed_accept(so_verify_rng *c, uint32_t position, uint32_t index, double p, double q) {
    return uniform(c, SO_RNG_ACCEPT, position, index) * q < p;
}

static double keyed_uniform(so_verify_rng *c, uint32_t position) {
    return uniform(c, SO_RNG_RESIDUAL, position, 0);
}

static double sum_part(const void *weight, int32_t first) {
    const double *w = (const double *)weight + first;
    double s[SO_PICK_LANES] = {0};
    for (int i = 0; i < SO_PICK_PART; i += SO_PICK_LANES)
        for (int k = 0; k < SO_PICK_LANES; k++)
            s[k] += w[i + k];
    return so_pick_joined(s);
}

static double weight_at(const void *weight, int32_t i) { return ((const double *)weight)[i]; }

static int32_t keyed_draw(so_verify_rng *c, uint32_t position, const double *weight, int n,
                          double total) {
    int32_t i = so_pick(weight, n, keyed_uniform(c, position) * total, sum_part, weight_at);
    SO_ASSERT_OP(i, >=, 0);
    return i;
}

void so_verify_rng_keyed_init(so_verify_rng_keyed *c, uint64_t seed, uint32_t choice) {
    *c = (so_verify_rng_keyed){
        {.accept = keyed_accept, .draw = keyed_draw, .uniform = keyed_uniform}, seed, choice};
}
