/* `sooth prove`, part 2: is the text that `reject` samples distributed as the model's own? */
#ifndef SO_CLI_PROVE_REJECT_H
#define SO_CLI_PROVE_REJECT_H

#include "engine/bundle.h"
#include "engine/engine.h"

/* How many texts are sampled in one test: fewer of a larger model. */
int so_prove_reject_texts(const so_bundle *b);

typedef struct so_prove_reject so_prove_reject;

/* One engine and one teacher for all tests; the bundle must stay. eo: as the command line has it.
 */
int so_prove_reject_open(const so_bundle *b, const so_engine_opts *eo, int length,
                         so_prove_reject **out, so_err *err);
void so_prove_reject_close(so_prove_reject *v); /* NULL is fine */

/* One test: a chi-square and its degrees of freedom, and what was guessed on the way. chi2 is
 * infinite where a text was sampled that the model cannot say. */
typedef struct so_prove_result {
    double chi2;
    int df;
    int64_t n_drafted, n_accepted;
} so_prove_result;
/* Where texts are sampled, with guesses of which drafter. */
typedef struct so_prove_case {
    const char *drafter;
    const so_tokens *text; /* of which the prompt is made; not empty */
    bool favour;           /* a few tokens are the whole prompt, and all that may follow */
    uint64_t seed;         /* the first of them; cases should be 2^8 apart */
} so_prove_case;
int so_prove_reject_test(so_prove_reject *v, const so_prove_case *c, so_prove_result *out,
                         so_err *err);

#endif
