/* Verification: given a tree of guesses and the target's view of every node, which guesses stand,
 * and which token follows. Pure functions: no KV, no models, no threads, no clock. The proof that
 * the output is the target's own stands beside each function in its .c file.
 *
 *   match    the target's own token at each node decides (greedy is match with an argmax):
 *            bit for bit the plain text
 *   reject   the output is distributed exactly as p
 *   lenient  lossy, and named so: no outcome is likelier than p/L
 *
 * Reading order: match.c (short), reject.c (the proof), chance.c, theory.h. */
#ifndef SO_VERIFY_VERIFY_H
#define SO_VERIFY_VERIFY_H

#include "base/rng.h"
#include "token/tree.h"

typedef enum so_verify_mode { SO_VERIFY_MATCH, SO_VERIFY_REJECT, SO_VERIFY_LENIENT } so_verify_mode;
enum { SO_VERIFY_MODES = 3 };

typedef struct so_verdict {
    int n_accepted;
    int16_t path[SO_TREE_MAX];             /* accepted nodes below the root, in order */
    int32_t token;                         /* one more, after the last accepted node */
    bool bonus;                            /* no proposal was tested after the last accepted one */
    int n_tested;                          /* proposals whose test ran, in order … */
    int16_t tested[SO_TREE_MAX_PROPOSALS]; /* … the last of each node's run may be accepted */
} so_verdict;

/* --- match --- */

/* The target's token after `node`: an argmax, or the draw keyed by seed and position. Called for
 * the root and each accepted node, once, in order. */
typedef int32_t so_verify_choose(void *user, int node);
void so_verify_match(const so_tree *t, so_verify_choose *choose, void *user, so_verdict *out);

/* --- reject and lenient --- */

/* Chance, so that tests can enumerate what production draws. Nothing here keeps state between
 * calls but what the implementation brings. */
typedef struct so_chance so_chance;
struct so_chance {
    /* True with probability min(1, p/q), q > 0. position: of the token being decided; index: of
     * the test among those at this position. */
    bool (*accept)(so_chance *c, uint32_t position, uint32_t index, double p, double q);
    /* An index with probability weight[i]/Σ weight; total > 0 is Σ weight. */
    int32_t (*draw)(so_chance *c, uint32_t position, const double *weight, int n, double total);
    /* Optional: the target's own draw after `node`, by numbers that nothing else uses. Asked in
     * place of its row where nothing was proposed: a draw costs less than a whole distribution. */
    int32_t (*choose)(so_chance *c, int node);
    /* Optional: the number in (0,1) by which `draw` draws at this position. Where it is given, what
     * a rejection leaves need not be written down. */
    double (*uniform)(so_chance *c, uint32_t position);
};

/* Draws keyed by (seed, choice, position, purpose, index): SO_RNG_ACCEPT and SO_RNG_RESIDUAL. */
typedef struct so_chance_keyed {
    so_chance base;
    uint64_t seed;
    uint32_t choice;
} so_chance_keyed;
void so_chance_keyed_init(so_chance_keyed *c, uint64_t seed, uint32_t choice);

/* The target's row after `node`, [n_vocab], valid until the next call. */
typedef const float *so_verify_row(void *user, int node);

/* The row is the target's distribution, as weights: any positive sum, rows of a standardised
 * distribution have 1. lenience 1 is exact; in (0,1) it is `lenient`. scratch: [2][n_vocab]. */
void so_verify_reject(const so_tree *t, so_verify_row *row, void *user, so_chance *chance,
                      double lenience, double *scratch, so_verdict *out);

/* `lenient` at temperature 0. The row holds logits after bias and penalties, before temperature and
 * cuts: x stands where softmax(x) ≥ lenience · max softmax. lenience 1 is greedy. */
void so_verify_lenient_greedy(const so_tree *t, so_verify_row *logits, void *user, double lenience,
                              so_verdict *out);

#endif
