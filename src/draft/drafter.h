/* Drafters: cheap guesses as a token tree. One vtable, one file per drafter.
 *
 * A drafter sees the text of a request (prompt and accepted tokens) and adds nodes under the root
 * of its tree, each with an expected acceptance. It never sees the target's logits, and it must not
 * decide whether to propose by looking at a drawn token's value (rule of sight, design.md section
 * 2): deterministic guesses are SO_Q_POINT, sampled ones carry the row they were drawn from. One
 * engine thread calls; state per request is the drafter's own, opened and closed by the engine. */
#ifndef SO_DRAFT_DRAFTER_H
#define SO_DRAFT_DRAFTER_H

#include "base/err.h"
#include "base/rng.h"
#include "token/tree.h"

typedef struct so_drafter so_drafter;

/* One request as a drafter sees it. */
typedef struct so_draft_job {
    void *state;           /* what open gave */
    const int32_t *tokens; /* the whole text; the last one is the tree's root */
    int n_tokens, n_prompt;
    so_tree *tree; /* reset to its root; the drafter adds */
    int max_nodes; /* budget below the root */
    int max_depth;
    uint64_t seed;   /* of the request */
    uint32_t choice; /* of the request */
    uint32_t round;  /* counts the request's rounds: sampled drafts key their noise by it */
    float temp;      /* of the request: 0 is greedy */
} so_draft_job;

typedef struct so_drafter_vt {
    const char *name;
    void (*free)(so_drafter *d);
    /* Required. State for a request with this prompt; `expected` is text the user predicts (or
     * NULL). */
    int (*open)(so_drafter *d, const int32_t *prompt, int n_prompt, const int32_t *expected,
                int n_expected, void **state, so_err *err);
    void (*close)(so_drafter *d, void *state);
    /* Required. Adds to each job's tree what it can; adding nothing is fine. */
    int (*propose)(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err);
    /* Optional. Tokens that were accepted, in order, after each round (from any drafter). */
    void (*observe)(so_drafter *d, void *state, const int32_t *tokens, int n);
    /* Cost of one drafted node in milliseconds, 0 for tables. Optional. */
    double (*cost_ms)(const so_drafter *d);
} so_drafter_vt;

struct so_drafter {
    const so_drafter_vt *vt;
    int index; /* its number in so_proposal.drafter */
};

void so_drafter_free(so_drafter *d); /* NULL is fine */

#endif
