/* Verification: given a tree of guesses and the target's output for its nodes, decide which guesses
 * are accepted and which token follows them.
 *
 *   mode      claim                                                   proof
 *   match     the text is bit for bit that of plain decoding          match.c, steps 1 to 3
 *   reject    the text has exactly the target's distribution p        reject.c, steps 1 to 8
 *   lenient   lossy, with a lenience L, 0 < L ≤ 1:
 *             above temperature 0 no token is more likely than p/L    reject.c, "Lenient"
 *             at temperature 0 no token is less than L times as       match.c, "lenient at
 *             likely as the argmax                                    temperature 0"
 *
 *   typical   lossy, with a threshold E, 0 < E ≤ 1: above     typical.c
 *             temperature 0 every token is the target's own
 *             sample, or has p of at least min(E, √E·e^−H(p));
 *             at temperature 0 it is match
 *
 * Greedy decoding is match with an argmax. p is the target's distribution after all sampling
 * transforms (temperature, top-k, …), the "standardised" one of Leviathan et al.
 *
 * Pure functions over the tree, the target's rows and a source of random numbers. No KV cache, no
 * models, no clock, no state between calls. Any thread, with its own scratch memory.
 *
 * Reading order: match.c (short), reject.c (the proof), rng.c, theory.h. */
#ifndef SO_VERIFY_VERIFY_H
#define SO_VERIFY_VERIFY_H

#include "base/rng.h"
#include "token/tree.h"

typedef enum so_verify_mode {
    SO_VERIFY_MATCH,
    SO_VERIFY_REJECT,
    SO_VERIFY_LENIENT,
    SO_VERIFY_TYPICAL,
} so_verify_mode;
enum { SO_VERIFY_MODES = 4 };

typedef struct so_verdict {
    int n_accepted;
    int16_t path[SO_TREE_MAX]; /* accepted nodes in order, without the root */
    int32_t token;             /* the correction or bonus after the last accepted node */
    bool bonus;                /* `token` is a bonus: the last accepted node had no proposals */
    /* The proposals that were tested, in order. Of those that follow one node, only the last can
     * have been accepted. */
    int n_tested;
    int16_t tested[SO_TREE_MAX_PROPOSALS];
} so_verdict;

/* --- match --- */

/* Returns the target's own token after `node`: the argmax, or the token sampled with the noise of
 * (seed, choice, position). Called once for the root and once for each accepted node, in order. */
typedef int32_t so_verify_choose(void *user, int node);
void so_verify_match(const so_tree *t, so_verify_choose *choose, void *user, so_verdict *out);

/* --- reject and lenient --- */

/* The source of random decisions. An interface, so that tests can enumerate all outcomes that
 * production samples. The verifier keeps no random state of its own. */
typedef struct so_verify_rng so_verify_rng;
struct so_verify_rng {
    /* Returns true with probability min(1, p/q), q > 0. position: of the token to be decided;
     * index: number of the test among those at this position. */
    bool (*accept)(so_verify_rng *c, uint32_t position, uint32_t index, double p, double q);
    /* Returns index i with probability weight[i]/total. total is Σ weight, > 0. */
    int32_t (*draw)(so_verify_rng *c, uint32_t position, const double *weight, int n, double total);
    /* Optional: samples the target's token after `node` with random numbers that nothing else uses.
     * Called instead of asking for the row when `node` has no proposals: sampling one token costs
     * less than computing a whole distribution. */
    int32_t (*choose)(so_verify_rng *c, int node);
    /* Optional: the random number in (0,1) that `draw` uses at this position. If given, a residual
     * need not be written to memory to be sampled from (reject.c). */
    double (*uniform)(so_verify_rng *c, uint32_t position);
    /* Optional: a lower bound of the target's probability of the first proposal's token after
     * `node`, 0 if none is known. If the bound alone accepts the proposal, so would the probability
     * itself (`accept` must be monotone in p and give the same answer twice), and the row is not
     * asked for. */
    double (*first_at_least)(so_verify_rng *c, int node);
};

/* The production source: each number is a function of (seed, choice, position, purpose, index),
 * with purposes SO_RNG_ACCEPT and SO_RNG_RESIDUAL. */
typedef struct so_verify_rng_keyed {
    so_verify_rng base;
    uint64_t seed;
    uint32_t choice;
} so_verify_rng_keyed;
void so_verify_rng_keyed_init(so_verify_rng_keyed *c, uint64_t seed, uint32_t choice);

/* Returns the target's row after `node`, [n_vocab], valid until the next call. */
typedef const float *so_verify_row(void *user, int node);

/* The row holds the target's distribution p as weights with any positive sum (1 for a row that is
 * already normalised). lenience: 1 is exact, below 1 is `lenient`. scratch: [2][n_vocab]. */
void so_verify_reject(const so_tree *t, so_verify_row *row, void *user, so_verify_rng *rng,
                      double lenience, double *scratch, so_verdict *out);

/* `typical` above temperature 0. The row holds the target's distribution as for so_verify_reject; choose
 * samples the target's token where the round ends. */
void so_verify_typical(const so_tree *t, so_verify_row *row, so_verify_choose *choose, void *user,
                       double threshold, so_verdict *out);

/* `lenient` at temperature 0. The row holds logits after bias and penalties, before all other
 * transforms (so_sample_adjusted). Token x is accepted if softmax(x) ≥ lenience · max softmax. lenience 1 is greedy. */
void so_verify_lenient_greedy(const so_tree *t, so_verify_row *logits, void *user, double lenience,
                              so_verdict *out);

#endif
