/* The interface of drafters: sources of guesses, each in a file of its own behind one vtable.
 *
 * A drafter reads the text of a request (prompt and accepted tokens) and adds guesses to the
 * request's token tree, each with a confidence. It makes no decision about the step: the planner
 * (plan/plan.h) sets how deep it may go, either as a fixed depth or as so_draft_terms, with which
 * the drafter decides after each guess whether another one pays. A job has no pointer back to the
 * planner.
 *
 * Rule of sight. `reject` is exact only if drafters and planner keep this rule (the proof is in
 * verify/reject.c):
 *
 *   Whether a proposal is made and tested, in which order, and its distribution q may depend on the
 *   text, on whole rows, and on earlier proposals and their tokens. They must not depend on the
 *   proposal's own sampled token, nor on random numbers that test proposals, in this request or in
 *   an earlier one.
 *
 * So a drafter must not sample a token and then look at the token to decide whether to propose it.
 * The next guess of a chain may depend on that token. Deterministic guesses are SO_Q_POINT; sampled
 * guesses carry the row q that they were sampled from.
 *
 * To add a drafter:
 *   1. a file with the vtable and a create function, declared in draft/drafters.h;
 *   2. the flags of so_drafter. `draws` must be true if guesses are sampled. request_only must be
 *      false if anything but the request and `id` influences the guesses: engine/nonce.c relies on
 *      it;
 *   3. its name in so_spec_name (spec.h), its row in the table of names (spec.c);
 *   4. its case in build.c, or, if it needs a model, in make_drafter of engine/drafters.c (the
 *      engine's so_draft_config.make);
 *   5. a test in tests/draft.
 *
 * Thread: the engine thread; inside async(), whoever holds the drafter (async.h). State per request
 * belongs to the drafter; the engine opens and closes it. */
#ifndef SO_DRAFT_DRAFTER_H
#define SO_DRAFT_DRAFTER_H

#include "base/err.h"
#include "base/rng.h"
#include "sample/sample.h"
#include "token/tree.h"
#include "verify/beam.h"

typedef struct so_drafter so_drafter;
typedef struct so_ahead_job so_ahead_job; /* draft/ahead.h */

/* A request at its start. Pointers are borrowed for the call: a drafter copies what it keeps. */
typedef struct so_draft_text {
    const int32_t *prompt;
    int n_prompt;
    const int32_t *source; /* what the target's encoder reads; NULL: it has none */
    int n_source;
    const int32_t *expected; /* text the user predicts, or NULL */
    int n_expected;
    int max_tokens; /* limit of prompt and output together, for allocation at open */
} so_draft_text;

/* Replaces the random numbers of so_draft_uniform, so that tests can enumerate all outcomes. */
typedef struct so_draft_draws so_draft_draws;
struct so_draft_draws {
    double (*uniform)(so_draft_draws *s, const so_drafter *d, int depth, int draw);
};

/* Chances and prices with which a drafter decides the length of its draft by itself. Filled by the
 * planner (so_plan_set_depths). A chance is the α of a guess at a depth (index 0 is depth 1): the
 * chance that it is accepted, given that it is tested. Prices are in tokens: milliseconds times λ,
 * the running rate of the whole batch in tokens per millisecond (plan/plan.h).
 *
 *   value      of a path: the product of the chances of its guesses, in tokens
 *   extend     draft another level if value · (chance before the row is seen) > row price, and the
 *              sum of these surpluses over all jobs of the call > level price; if it begins another
 *              pass, the surpluses of its levels, beyond their prices, > trip price
 *   join       compute it in the same pass as the level before, rather than when the rows of that one
 *              are known, if also chance that a chain goes on · price of a trip with one level > that
 *              price - hoped trip price
 *   keep       propose a token from a computed row if value · chance > row price. Decided by the
 *              row, before a token is sampled from it (rule of sight)
 *
 * In a tree the value of a later sibling is that of its parent, times the chance that its earlier
 * siblings are rejected, times its own. The row price of a guess is that of the depth that a chain
 * would have with as many guesses. */
enum { SO_TERMS_DEPTHS = 16, SO_TERMS_CLASSES = 8, SO_TERMS_RANKS = 3 };
typedef struct so_draft_terms {
    /* By depth and class of confidence; the last class: before the row is seen. */
    float chance[SO_TERMS_DEPTHS][SO_TERMS_CLASSES + 1];
    float row_price[SO_TERMS_DEPTHS]; /* one more row of the target's pass, and its verification */
    float level_price;                /* one level of drafting, shared by the jobs of one call */
    float trip_price;                 /* one pass, beyond its levels; 0 on CPUs */
    float hoped_trip_price;           /* as high as it may be (plan/trip.h) */
    float start_value; /* value of the root: below 1 if other drafters' guesses are tested first */
    /* For drafters of trees: the chances of later siblings, by rank from 1 (the last one: all later
     * ranks too), and the price of one more branch in a level. */
    float sibling[SO_TERMS_RANKS - 1][SO_TERMS_DEPTHS][SO_TERMS_CLASSES + 1];
    float branch_price;
} so_draft_terms;

static inline int so_terms_depth(int depth) {
    return depth < 1 ? 0 : depth > SO_TERMS_DEPTHS ? SO_TERMS_DEPTHS - 1 : depth - 1;
}
/* The class of a confidence: [0,1] is divided into equal parts. SO_TERMS_CLASSES if it is unknown
 * (negative or NaN). */
static inline int so_terms_class(double confidence) {
    if (!(confidence >= 0))
        return SO_TERMS_CLASSES;
    return confidence >= 1 ? SO_TERMS_CLASSES - 1 : (int)(confidence * SO_TERMS_CLASSES);
}
static inline double so_terms_chance(const so_draft_terms *t, int depth, double confidence) {
    return (double)t->chance[so_terms_depth(depth)][so_terms_class(confidence)];
}
static inline double so_terms_sibling(const so_draft_terms *t, int rank, int depth,
                                      double confidence) {
    if (rank == 0)
        return so_terms_chance(t, depth, confidence);
    int r = (rank < SO_TERMS_RANKS ? rank : SO_TERMS_RANKS - 1) - 1;
    return (double)t->sibling[r][so_terms_depth(depth)][so_terms_class(confidence)];
}
/* A level that is a pass of its own. */
static inline double so_terms_pass(const so_draft_terms *t) {
    return (double)t->trip_price + (double)t->level_price;
}
static inline double so_terms_row(const so_draft_terms *t, int depth) {
    return (double)t->row_price[so_terms_depth(depth)];
}

/* One request in one call of a drafter. */
typedef struct so_draft_job {
    void *state;           /* as returned by open */
    const int32_t *tokens; /* the whole text; the last token is the tree's root */
    int n_tokens, n_prompt;
    so_tree *tree; /* root only, or with guesses of earlier drafters; the drafter adds to it */
    int max_nodes; /* limit of nodes below the root, guesses of earlier drafters included */
    int max_depth;
    const so_draft_terms *terms; /* NULL: draft up to the limits */
    uint64_t seed; /* the request's seed, combined with its nonce if it has one (engine/nonce.c) */
    uint32_t choice; /* of the request */
    uint32_t round;  /* number of the request's round, for the key in so_draft_uniform */
    float temp;      /* of the request; 0 is greedy */
    /* Sampling parameters of the request, for drafters that have logits; NULL: defaults at `temp`.
     * If the tree has room for q rows, guesses are sampled from the drafter's own rows (`reject`);
     * otherwise they may use the same noise as the target's sample (`match`). */
    const so_sample_params *sample;
    /* The target's cache with the whole text but the root, for drafters that compute rows of the target;
     * NULL: it lacks more than the root. To be left as it was found. */
    struct so_seq *seq;
    so_draft_draws *draws; /* NULL: so_draft_uniform computes the numbers from their keys */
    /* Results besides the tree. */
    int n_levels;        /* levels drafted for this job */
    int n_level_rows;    /* of trees: rows computed in these levels; 0: one per level */
    int n_catch_up;      /* tokens of catch-up before the first level, of a source, too */
    int n_passes;        /* of a draft model that drafts chains, with levels of this job */
    int levels_per_pass; /* most levels of this job that a pass could have had; 0 or 1: one */
    /* A row that was computed but not worth a guess: its depth (0: none) and its confidence. */
    int refused_depth;
    float refused_confidence;
} so_draft_job;

/* A request with beam search in one call. The drafter continues the live hypotheses with candidates of
 * its own, `width` at each level. */
typedef struct so_draft_beams {
    void *state;
    const int32_t *tokens; /* the text that all hypotheses share; the last token is tree[0] */
    int n_tokens;
    const so_beam_search *search;
    const int32_t *tree; /* nodes of the live hypotheses below the common text, ascending */
    int n_tree;
    const so_beam_row *known; /* [n_live] continuations of live hypotheses; n is 0: not known yet */
    const int32_t *ends;      /* tokens that end a hypothesis, never guessed */
    int n_ends, width, max_levels;
    /* Results: level by level, best first. */
    so_beam_guess *guesses; /* [SO_TREE_MAX] */
    int n_guesses, n_levels;
} so_draft_beams;

/* Rows that a drafter wants in the target's pass, on ends of the tree that the pass verifies
 * (engine/ends.h). Their hidden states arrive with add_end_hidden. */
enum { SO_ENDS_MAX = 8 };
typedef struct so_end_rows {
    const float *inputs; /* [n][d_model], in place of embeddings */
    int n;               /* rows below one end, a chain; 0: none */
    int n_ends;          /* most ends of a tree that get them */
} so_end_rows;

typedef struct so_drafter_vt {
    const char *name;
    void (*free)(so_drafter *d);
    /* Required. Creates the state of a request. */
    int (*open)(so_drafter *d, const so_draft_text *text, void **state, so_err *err);
    void (*close)(so_drafter *d, void *state);
    /* Required. Adds guesses to each job's tree, which may already have guesses of other drafters;
     * adding none is allowed. Tokens that the drafter did not get through observe are in the job's
     * text. */
    int (*propose)(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err);
    /* Optional. Guesses for beam search, of one request. Its state is used for nothing else. */
    int (*propose_beams)(so_drafter *d, so_draft_beams *job, so_err *err);
    /* Optional. Accepted tokens, in order, after each round, whichever drafter guessed them. */
    void (*observe)(so_drafter *d, void *state, const int32_t *tokens, int n);
    /* Optional. The target's hidden state (after its last norm) from which the token at position
     * `pos` of the text was sampled. Called as tokens are accepted, if wants_target_hidden. */
    void (*add_hidden)(so_drafter *d, void *state, int pos, const float *x);
    /* Optional. After add_hidden with this position: the hidden state of row `row`, from 0, of its end
     * rows below the row from which that token was sampled. In order, all or none. */
    void (*add_end_hidden)(so_drafter *d, void *state, int pos, int row, const float *x);
    /* Optional. The longest text that the drafter can continue, 0: any. */
    int (*n_ctx)(const so_drafter *d);
    /* Optional. The fraction of the drafter's own KV cache (shared by all requests) that a text of
     * n tokens needs; 0: no cache. Requests that do not fit get no guesses. */
    double (*cache_fraction)(const so_drafter *d, int n_tokens);
    /* Optional. The guesses of the last call are replaced by `tokens`: the drafter treats what it
     * computed for its own guesses as if it belonged to these. Then the next call takes as long as if
     * it had guessed them, but its guesses mean nothing. For `oracle`, which runs a draft model for
     * its cost alone. */
    void (*replace)(so_drafter *d, void *state, const int32_t *tokens, int n);
    /* Optional. The request was preempted: release memory that can be rebuilt from its text. */
    void (*preempt)(so_drafter *d, void *state);
    /* Optional, all or none: drafts for guessed outcomes of a round (ahead.h), for `async`. begin:
     * catch-up and the candidates of each job; 1: more catch-up is needed, call again with first
     * false. rows: one level of all outcomes, with the q rows of sampled guesses; 0: no outcome goes
     * on. draw: the guesses of that level, of the jobs with this `drawn`. abort: after an error. */
    int (*ahead_begin)(so_drafter *d, so_ahead_job *jobs, int n, bool first, so_err *err);
    int (*ahead_rows)(so_drafter *d, so_ahead_job *jobs, int n, int level, so_err *err);
    void (*ahead_draw)(so_drafter *d, so_ahead_job *jobs, int n, int level, bool drawn);
    void (*ahead_abort)(so_drafter *d, so_ahead_job *jobs, int n);
    /* Optional. The guesses of the coming pass are chosen (job.tree): whoever drafts ahead may begin.
     * The jobs are those of the next round; nothing they point to may be kept but `state`. */
    void (*dispatch)(so_drafter *d, const so_draft_job *jobs, int n);
} so_drafter_vt;

struct so_drafter {
    const so_drafter_vt *vt;
    int index;       /* its number in so_proposal.drafter */
    bool draws;      /* samples its guesses if the tree has rows */
    bool has_cost;   /* drafting takes time that the planner must weigh; otherwise it is free */
    bool uses_terms; /* can follow so_draft_job.terms. The planner gives terms only to drafters that
                        can and are known well, and a fixed depth to all others */
    bool flat_cost;  /* its cost does not grow with the depth */
    int levels_per_pass;      /* most levels of greedy chains in one pass; 0 or 1: each is a pass */
    int tree_nodes;           /* maximum nodes of its trees; 0: it drafts chains */
    bool wants_target_hidden; /* needs the target's hidden states (add_hidden) */
    so_end_rows end_rows;     /* only if it wants the target's hidden states */
    bool never_guesses;       /* `none` */
    bool asynchronous; /* part of async(): it locks what it shares with its thread by itself */
    bool is_model;     /* a draft model: recorded only if `id` is known */
    bool recorded;     /* its acceptance is kept between runs (plan/record.h) */
    bool request_only; /* guesses depend on the request and on what `id` identifies, and on nothing
                          else: no other request, no clock, no user function */
    uint64_t id;       /* hash of file, options and inner drafter, to tell drafters of one kind
                          apart; 0: default options, or for a model: unknown */
    /* Draft models only: */
    const struct so_backend *backend; /* it runs on this */
    double size;                      /* its weights in bytes, relative to the target's */
    double claimed_agreement;         /* agreement with the target stated in its file; 0: none */
};

void so_drafter_free(so_drafter *d); /* NULL is fine */
int so_drafter_n_ctx(const so_drafter *d);
double so_drafter_cache_fraction(const so_drafter *d, int n_tokens);
void so_drafter_preempt(so_drafter *d, void *state);
void so_drafter_observe(so_drafter *d, void *state, const int32_t *tokens, int n);
void so_drafter_add_hidden(so_drafter *d, void *state, int pos, const float *x);
void so_drafter_add_end_hidden(so_drafter *d, void *state, int pos, int row, const float *x);
void so_drafter_replace(so_drafter *d, void *state, const int32_t *tokens, int n);

/* so_tree_add within the job's limits of nodes and depth and within the vocabulary. Returns the
 * child, or −1: the chain ends here. */
int so_draft_add(const so_draft_job *job, int parent, int32_t token, so_q_kind kind, int row,
                 int drafter, float confidence);
/* The uniform random number for draw number `draw` (0 to 4095) of the guess at `depth`: a function
 * of (seed, choice, position, SO_RNG_DRAFT, round) and the drafter's index. With the index, two
 * drafters sample independently at one position; with the round, so do two rounds. */
double so_draft_uniform(const so_drafter *d, const so_draft_job *job, int depth, int draw);
/* The job of an inner drafter with this state, which drafts for the drafter of `job` into a tree of
 * its own. `greedy` is storage for the job's sampling parameters. In `reject` the inner drafter
 * drafts greedily: with the target's noise its guesses would depend on numbers that later decide
 * tokens. */
so_draft_job so_draft_inner_job(const so_draft_job *job, void *state, so_tree *tree,
                                so_sample_params *greedy);
/* The kind of a guess that no model made: SO_Q_ROW if it was sampled from `row`, otherwise a point.
 * A single proposal that is verified as a point is exact however it was chosen, provided that no
 * random number that tests it took part in the choice (verify/reject.c, step 3). */
static inline so_q_kind so_draft_kind(int row) { return row < 0 ? SO_Q_POINT : SO_Q_ROW; }

#endif
