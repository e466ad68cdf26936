/* The lossless suite: does speculation leave the distribution of the text as it was?
 *
 * The target is a toy whose next-token distributions are small enough to list. A case names a toy,
 * a drafter and a verifier, and may send the toy's rows through the sampling pipeline, each in the
 * context of its own path. Questions that can be asked of it:
 *
 *   so_lossless_gap     every outcome of every draw and test is enumerated, with its probability,
 *                       round after round, until n_out tokens are out: the largest difference from
 *                       plain sampling over all texts. Exact, up to the rounding of doubles.
 *   so_lossless_chi2    the same by sampling, with the production source of chance: p-value.
 *   so_lossless_check   fails the running test where the gap passes SO_LOSSLESS_TOLERANCE.
 *   so_lossless_count_different   `match`: for how many seeds the text is not plain sampling's.
 *
 * A drafter that draws does so through the chance it is given, so that enumeration sees its draws.
 * A real so_drafter asks so_draft_uniform; so_lossless_real answers it, and enumerates by moving
 * each answer u from 0 to 1 through the intervals in which it decides the same token. How wide an
 * interval is, is measured on the drafter itself, not taken from the row it declares. */
#ifndef SO_LOSSLESS_H
#define SO_LOSSLESS_H

#include "base/statistics.h"
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

/* What a verifier may get wrong about a path's context: mutants. */
typedef enum so_lossless_slip {
    SO_SLIP_NONE,
    SO_SLIP_ROUND,  /* penalties see the text before the round, not the path */
    SO_SLIP_OUTPUT, /* the prompt counts as output */
} so_lossless_slip;

typedef void so_lossless_watch(void *watcher, const so_tree *t, const so_verdict *v,
                               const int32_t *text, int n);

typedef struct so_lossless_case {
    const char *name;
    const so_toy *target;
    int n_out;
    /* Adds guesses to the tree, whose root is text[n−1]. draws NULL: see next_draft. */
    void (*propose)(void *user, const int32_t *text, int n, so_tree *t, so_verify_rng *draws);
    void *user;
    /* Both optional. A request begins with this text; tokens that a round emitted. */
    void (*begin)(void *user, const int32_t *text, int n, uint64_t seed);
    void (*observe)(void *user, const int32_t *tokens, int n);
    /* NULL: so_verify_reject, exact. */
    void (*verify)(const so_tree *t, so_verify_row *row, void *user, so_verify_rng *chance,
                   double *scratch, so_verdict *out);
    /* NULL: the toy's rows are distributions. Else their logarithms are logits. */
    const so_sample_params *sample;
    so_lossless_slip slip;
    const int32_t *prompt; /* NULL: the token 0 alone */
    int n_prompt;
    /* Both or neither, for drafters that enumerate their own draws: the chance of what propose
     * added last, and a step to the next draft; false: all have been seen. */
    double (*draft_weight)(void *user);
    bool (*next_draft)(void *user);
    /* Optional: sees every round that is played. */
    so_lossless_watch *watch;
    void *watcher;
} so_lossless_case;

/* The target's rows, those behind the pipeline remembered. */
typedef struct so_lossless_rows so_lossless_rows;
so_lossless_rows *so_lossless_rows_create(const so_lossless_case *c);
void so_lossless_rows_free(so_lossless_rows *r);
/* Valid until the next call. */
const float *so_lossless_rows_get(so_lossless_rows *r, const int32_t *text, int n);
/* The token that plain sampling draws after a text (p: c->sample with a seed of its own). n_round:
 * where the round began that asks, for slips; 0: nobody slips. */
int32_t so_lossless_rows_token(so_lossless_rows *r, const so_sample_params *p, const int32_t *text,
                               int n, int n_round);
/* The prompt; its length. */
int so_lossless_prompt(const so_lossless_case *c, int32_t *text);
/* The distribution of the first n_out tokens, [n_vocab^n_out], the first token most significant. */
void so_lossless_plain(const so_lossless_case *c, double *dist);
void so_lossless_enumerate(const so_lossless_case *c, double *dist);
int so_lossless_n_texts(const so_lossless_case *c);

double so_lossless_gap(const so_lossless_case *c);
/* Expected length of the first round, by enumeration. */
double so_lossless_tokens_per_round(const so_lossless_case *c);
void so_lossless_check(const so_lossless_case *c);
double so_lossless_chi2(const so_lossless_case *c, int n_draws, uint64_t seed);

/* The text up to and including `node`; returns its length. */
int so_toy_path(const so_tree *t, int node, const int32_t *text, int n, int32_t *out);

/* --- real drafters --- */

enum { SO_SWEEP_MAX = 64 };

/* Answers so_draft_uniform, one answer at a time through all it can decide. */
typedef struct so_sweep {
    so_draft_draws base;
    int n, at, n_known;
    struct {
        double lo, width, u;
        int32_t outcome; /* the token, −1: nothing was proposed */
    } choice[SO_SWEEP_MAX];
} so_sweep;

/* A real drafter as a case's propose, begin, observe and user. */
typedef struct so_lossless_real {
    so_drafter *drafter;
    int max_nodes, max_depth;
    float temp;
    const int32_t *expected; /* for drafters that are told the text, else NULL */
    int n_expected;
    const so_draft_terms *terms; /* as in so_draft_job */
    /* Zero-initialise the rest. */
    void *state;
    uint64_t seed;
    uint32_t round;
    int n_refused, n_followed; /* jobs with a row that was not drawn from; with a second guess */
    so_sample_params sample;
    bool has_sample;
    int n_prompt;
    so_sweep sweep;
    so_tree *probe;
} so_lossless_real;
/* Takes prompt and sampling from the case as it is then. */
void so_lossless_use(so_lossless_case *c, so_lossless_real *r);
void so_lossless_real_end(so_lossless_real *r);

/* `match`, with keyed draws and trees without rows: the texts of n_seeds requests of n tokens, the
 * penalties and cuts of c->sample applied along each path. */
int so_lossless_count_different(const so_lossless_case *c, int n, int n_seeds, uint64_t seed);

#endif
