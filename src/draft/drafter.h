/* Drafters: cheap guesses as a token tree. One vtable, one file per drafter.
 *
 * A drafter sees the text of a request (prompt and accepted tokens) and adds nodes under the root
 * of its tree, each with a confidence. A job is a bundle of values: it can be queued, handed to
 * another thread or process and answered later; nothing in it leads back to the planner. Of the
 * target it may see the states from which accepted tokens were drawn, never a row that is still to
 * be drawn from, and it must not draw a token and then decide by its value whether to propose it
 * (rule of sight): deterministic guesses are SO_Q_POINT, sampled ones carry the row they were drawn
 * from. One engine thread calls; state per request is the drafter's own, opened and closed by the
 * engine. */
#ifndef SO_DRAFT_DRAFTER_H
#define SO_DRAFT_DRAFTER_H

#include "base/err.h"
#include "base/rng.h"
#include "sample/sample.h"
#include "token/tree.h"

typedef struct so_drafter so_drafter;

/* A request as it begins. Everything is borrowed for the call: a drafter copies what it keeps. */
typedef struct so_draft_text {
    const int32_t *prompt;
    int n_prompt;
    const int32_t *expected; /* text the user predicts, or NULL */
    int n_expected;
    int max_tokens; /* prompt and output together stay within this: memory can be taken at once */
} so_draft_text;

/* Where the numbers of so_draft_uniform come from, so that tests can enumerate what production
 * draws. */
typedef struct so_draft_draws so_draft_draws;
struct so_draft_draws {
    double (*uniform)(so_draft_draws *s, const so_drafter *d, int depth, int draw);
};

/* What guesses are worth to a request and what they cost, as plain values: a drafter decides with
 * them how far to go and needs no way back to whoever planned it. Chances are of a guess at a depth
 * (index 0 is depth 1) to be accepted if its parent was. Prices are in tokens: milliseconds times
 * the running rate of the whole batch (plan/plan.h).
 *
 *   path   the product of the chances of the guesses along a path: its value in tokens
 *   ask    for another level where path · chance-before-the-row > row price, and the sum of what
 *          is above the row prices of all jobs of the call > the price of the level
 *   keep   a row whose path · chance > row price; asked before a token is drawn from it, of the row
 *          alone, never of the draw (rule of sight) */
enum { SO_TERMS_DEPTHS = 16, SO_TERMS_LEVELS = 8 };
typedef struct so_draft_terms {
    float chance[SO_TERMS_DEPTHS][SO_TERMS_LEVELS + 1]; /* by confidence; last: not seen yet */
    float row[SO_TERMS_DEPTHS]; /* of a row of the target's pass, and of testing it */
    float level;                /* of a level of drafting, shared by the jobs of one call */
    float start;                /* path at the root: below 1 where others have guessed before */
} so_draft_terms;

static inline int so_terms_depth(int depth) {
    return depth < 1 ? 0 : depth > SO_TERMS_DEPTHS ? SO_TERMS_DEPTHS - 1 : depth - 1;
}
/* The level of a confidence in [0,1]; SO_TERMS_LEVELS where it is not known (negative or NaN). */
static inline int so_terms_level(double confidence) {
    if (!(confidence >= 0))
        return SO_TERMS_LEVELS;
    return confidence >= 1 ? SO_TERMS_LEVELS - 1 : (int)(confidence * SO_TERMS_LEVELS);
}
static inline double so_terms_chance(const so_draft_terms *t, int depth, double confidence) {
    return (double)t->chance[so_terms_depth(depth)][so_terms_level(confidence)];
}
static inline double so_terms_row(const so_draft_terms *t, int depth) {
    return (double)t->row[so_terms_depth(depth)];
}

/* One request as a drafter sees it. */
typedef struct so_draft_job {
    void *state;           /* what open gave */
    const int32_t *tokens; /* the whole text; the last one is the tree's root */
    int n_tokens, n_prompt;
    so_tree *tree; /* reset to its root; the drafter adds */
    int max_nodes; /* budget below the root, of all drafters of the tree */
    int max_depth;
    const so_draft_terms *terms; /* NULL: as far as the limits go */
    uint64_t seed;               /* of the request */
    uint32_t choice;             /* of the request */
    uint32_t round; /* counts the request's rounds: sampled drafts key their noise by it */
    float temp;     /* of the request: 0 is greedy */
    /* Of the request, for drafters that have logits; NULL: plain, at `temp`. Where the tree has
     * rows, drafts are drawn from rows of their own (`reject`); else they may share the noise of
     * the target's draw (`match`). */
    const so_sample_params *sample;
    so_draft_draws *draws; /* NULL: keyed, as so_draft_uniform says */
    /* Answers beside the tree. */
    int n_levels; /* levels of drafting that were made for this job */
    int n_read;   /* tokens of text that had to be read before the first */
    /* A row that was made and not worth a draw: its depth, 0 for none, and its confidence. */
    int refused_depth;
    float refused_confidence;
} so_draft_job;

typedef struct so_drafter_vt {
    const char *name;
    void (*free)(so_drafter *d);
    /* Required. State for a request. */
    int (*open)(so_drafter *d, const so_draft_text *text, void **state, so_err *err);
    void (*close)(so_drafter *d, void *state);
    /* Required. Adds to each job's tree what it can, below what others have put there; adding
     * nothing is fine. Tokens that observe has not told are caught up on from the job's text. */
    int (*propose)(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err);
    /* Optional. Tokens that were accepted, in order, after each round (from any drafter). */
    void (*observe)(so_drafter *d, void *state, const int32_t *tokens, int n);
    /* Optional. The target's state, behind its last norm, from which the token at place `pos` of
     * the text was drawn; told as tokens are accepted, to drafters that read states. */
    void (*read_state)(so_drafter *d, void *state, int pos, const float *x);
    /* The longest text it can follow, 0 for any. Behind it the drafter is silent. Optional. */
    int (*n_ctx)(const so_drafter *d);
    /* What part of a KV cache of its own, shared by all requests, a text of n tokens takes; 0 for
     * no cache. Where it is full, the drafter is silent for whom there is no room. Optional. */
    double (*share)(const so_drafter *d, int n_tokens);
    /* Optional. The request pauses: what can be rebuilt from its text is given back. */
    void (*park)(so_drafter *d, void *state);
} so_drafter_vt;

struct so_drafter {
    const so_drafter_vt *vt;
    int index;         /* its number in so_proposal.drafter */
    bool draws;        /* where the tree has rows, it may draw: lengths are fixed before it does */
    bool costs;        /* drafting takes time that has to be weighed */
    bool on_terms;     /* goes by the job's terms; others are given a depth */
    bool one_call;     /* what it costs does not grow with the depth */
    bool reads_states; /* wants the target's states (read_state) */
    bool silent;       /* never guesses */
    bool is_model;     /* a draft model: kept only where `id` is known */
    bool lasting;      /* what it was worth is worth knowing in the next run, under its name */
    bool by_request;   /* guesses depend on the request and on what `id` names, on nothing else: no
                          other request, no clock, no function of the caller's */
    uint64_t id;       /* tells it from others of its kind: by its file, its options, the drafter
                          inside; 0: the usual one, or of a model: not known */
    /* Of a model: */
    double size;    /* of the target's weights that its own are */
    double claimed; /* the agreement with its target that its file claims; 0: none */
};

void so_drafter_free(so_drafter *d); /* NULL is fine */
int so_drafter_n_ctx(const so_drafter *d);
double so_drafter_share(const so_drafter *d, int n_tokens);
void so_drafter_park(so_drafter *d, void *state);
void so_drafter_observe(so_drafter *d, void *state, const int32_t *tokens, int n);
void so_drafter_read_state(so_drafter *d, void *state, int pos, const float *x);

/* so_tree_add within the job's budget of nodes and depth and within the vocabulary. The child, or
 * −1 where the chain ends. */
int so_draft_add(const so_draft_job *job, int parent, int32_t token, so_q_kind kind, int row,
                 int drafter, float confidence);
/* The uniform that decides draw number `draw` (0 to 4095) of the guess at `depth`. Keyed by the
 * drafter too, so that what two drafters draw at one place is independent. */
double so_draft_uniform(const so_drafter *d, const so_draft_job *job, int depth, int draw);
/* A guess that no model made, labelled so that every verifier stays exact: drawn from `row` where
 * the tree has rows, else a point (a single proposal checked as a point is exact however it was
 * come by; it is only accepted less often). */
static inline so_q_kind so_draft_kind(int row) { return row < 0 ? SO_Q_POINT : SO_Q_ROW; }

#endif
