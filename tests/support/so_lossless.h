/* The lossless suite: does speculation leave the distribution of the text as it was?
 *
 * The target is a toy whose next-token distributions are small enough to list. A case names a toy,
 * a drafter and a verifier; three questions can be asked of it:
 *
 *   so_lossless_gap     every outcome of every draw and test is enumerated, with its probability,
 *                       round after round, until n_out tokens are out: the largest difference from
 *                       plain sampling over all texts. Exact, up to the rounding of doubles.
 *   so_lossless_chi2    the same by sampling, with the production source of chance: p-value.
 *   so_lossless_check   fails the running test where the gap passes SO_LOSSLESS_TOLERANCE.
 *
 * A drafter that draws does so through the chance it is given, so that enumeration sees its draws.
 * A real so_drafter keys its own noise: so_lossless_real wraps it; ask for the gap where it is
 * deterministic and for chi2 in any case. */
#ifndef SO_LOSSLESS_H
#define SO_LOSSLESS_H

#include "draft/drafter.h"
#include "token/tree.h"
#include "verify/verify.h"

#define SO_LOSSLESS_TOLERANCE 1e-12
/* Chance that a correct case fails so_lossless_chi2 >= this, for one case and one seed. */
#define SO_LOSSLESS_FALSE_ALARM 1e-6

enum { SO_TOY_MAX_VOCAB = 8, SO_TOY_MAX_TEXT = 64, SO_LOSSLESS_MAX_OUT = 4 };

/* A language model as a table: the row after a text depends on its last two tokens. */
typedef struct so_toy {
    int n_vocab;
    float rows[SO_TOY_MAX_VOCAB][SO_TOY_MAX_VOCAB][SO_TOY_MAX_VOCAB];
} so_toy;

/* Rows from a seed. zeros: chance that an entry is 0 (one always stays); sharp: 1 is even-handed,
 * higher has clearer favourites. */
void so_toy_init(so_toy *m, int n_vocab, uint64_t seed, double zeros, double sharp);
/* q between the target (closeness 1) and a toy of its own (0). */
void so_toy_init_near(so_toy *m, const so_toy *target, double closeness, uint64_t seed,
                      double zeros);
/* The same row after every text: guesses are then accepted independently of each other. */
void so_toy_init_iid(so_toy *m, const float *row, int n_vocab);
const float *so_toy_row(const so_toy *m, const int32_t *text, int n);

typedef struct so_lossless_case {
    const char *name;
    const so_toy *target;
    int n_out;
    /* Adds guesses to the tree, whose root is text[n−1]. */
    void (*propose)(void *user, const int32_t *text, int n, so_tree *t, so_chance *draws);
    void *user;
    /* Both optional. A request begins with this text; tokens that a round emitted. */
    void (*begin)(void *user, const int32_t *text, int n, uint64_t seed);
    void (*observe)(void *user, const int32_t *tokens, int n);
    /* NULL: so_verify_reject, exact. */
    void (*verify)(const so_tree *t, so_verify_row *row, void *user, so_chance *chance,
                   double *scratch, so_verdict *out);
} so_lossless_case;

/* The distribution of the first n_out tokens, [n_vocab^n_out], the first token most significant. */
void so_lossless_plain(const so_lossless_case *c, double *dist);
void so_lossless_enumerate(const so_lossless_case *c, double *dist);
int so_lossless_n_texts(const so_lossless_case *c);

double so_lossless_gap(const so_lossless_case *c);
/* Expected length of the first round, by enumeration. */
double so_lossless_tokens_per_round(const so_lossless_case *c);
void so_lossless_check(const so_lossless_case *c);
double so_lossless_chi2(const so_lossless_case *c, int n_draws, uint64_t seed);

/* P(a chi-square of df degrees of freedom is at least x). */
double so_chi2_tail(double x, int df);

/* The text up to and including `node`; returns its length. */
int so_toy_path(const so_tree *t, int node, const int32_t *text, int n, int32_t *out);

/* A real drafter as a case's propose, begin, observe and user. */
typedef struct so_lossless_real {
    so_drafter *drafter;
    int max_nodes, max_depth;
    float temp;
    const int32_t *expected; /* for drafters that are told the text, else NULL */
    int n_expected;
    void *state; /* zero-initialise the rest */
    uint64_t seed;
    uint32_t round;
} so_lossless_real;
void so_lossless_use(so_lossless_case *c, so_lossless_real *r);
void so_lossless_real_end(so_lossless_real *r);

#endif
