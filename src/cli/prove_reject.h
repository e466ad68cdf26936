/* `sooth prove`, part 2: tests that texts sampled with `reject` have the model's distribution. */
#ifndef SO_CLI_PROVE_REJECT_H
#define SO_CLI_PROVE_REJECT_H

#include "engine/bundle.h"
#include "engine/engine.h"

/* Number of texts sampled in one test; smaller for larger models. */
int so_prove_reject_texts(const so_bundle *b);

typedef struct so_prove_reject so_prove_reject;

/* Opens one engine and one teacher for all tests; the bundle must outlive them. eo: engine options
 * of the command line. */
int so_prove_reject_open(const so_bundle *b, const so_engine_opts *eo, int length,
                         so_prove_reject **out, so_err *err);
void so_prove_reject_close(so_prove_reject *v); /* NULL is allowed */

/* Result of one test: chi-square, degrees of freedom, and counts of guesses. chi2 is infinite if a
 * sampled text has probability 0 under the model. */
typedef struct so_prove_result {
    double chi2;
    int df;
    int64_t n_drafted, n_accepted;
} so_prove_result;
/* One test: prompt and drafter. */
typedef struct so_prove_case {
    const char *drafter;
    const so_tokens *text; /* source of the prompt; not empty */
    bool favour;           /* the prompt consists of TOP_K tokens, and only these may follow */
    uint64_t seed;         /* first seed; the seeds of two cases should differ by at least 2^8 */
} so_prove_case;
int so_prove_reject_test(so_prove_reject *v, const so_prove_case *c, so_prove_result *out,
                         so_err *err);

#endif
