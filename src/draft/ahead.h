/* Drafting ahead: while the target verifies a round, a drafter guesses how the round will end and
 * drafts the next round for each of these ends. async.h describes the whole; this header has the
 * values that are exchanged.
 *
 *   tree of round r          root ─ x1 ─ x2        the guesses that the target verifies
 *   outcome                  (node, token): the accepted path ends at `node` and `token` follows,
 *                            as a correction or as a bonus
 *   draft of an outcome      the guesses of round r+1 if that outcome occurs
 *
 *   root ─ x1 ─ x2           outcome (0, a): x1 is rejected, a follows      draft a1 a2 a3
 *    │     │     └ c         outcome (1, b): x2 is rejected, b follows      draft b1 b2 b3
 *    │     └ b               outcome (2, c): both are accepted, c follows   draft c1 c2 c3
 *    └ a
 *
 * One pass of the draft model computes a level of all drafts together. */
#ifndef SO_DRAFT_AHEAD_H
#define SO_DRAFT_AHEAD_H

#include "draft/drafter.h"

enum {
    SO_AHEAD_OUTCOMES = 64,   /* most outcomes of a job */
    SO_AHEAD_DEPTH = 16,      /* longest draft of an outcome */
    SO_AHEAD_NODES = 24,      /* nodes of the round's tree that are considered, the root included */
    SO_AHEAD_CANDIDATES = 48, /* most tokens that are considered after a node */
};

typedef struct so_ahead_candidate {
    int32_t token;
    float chance; /* given that the accepted path ends at its node: the drafter's own estimate */
} so_ahead_candidate;

typedef struct so_ahead_outcome {
    int node; /* of the round's tree */
    int32_t token;
    int candidate; /* its number among those of its node */
    float chance;  /* of the whole outcome, as it was estimated */
    /* [level − 1]. token −1: the draft ends before this level. Sampled guesses have no token here:
     * their q rows are in so_ahead_job.q, and both sides sample from them (so_ahead_sample). */
    int32_t token_at[SO_AHEAD_DEPTH];
    float confidence[SO_AHEAD_DEPTH];
    /* The drafter's own: what it guessed, the slot of the latest row, its logits, the token that the
     * next row feeds. */
    int32_t sampled[SO_AHEAD_DEPTH];
    int slot, logit;
    int32_t last;
    bool done;
} so_ahead_outcome;

/* One request in one round. The engine thread fills it, then the async thread has it alone until the
 * batch is over; of published levels nothing changes any more. */
typedef struct so_ahead_job {
    so_draft_job job; /* of the coming round: its number, text so far, limits, keys */
    so_tree tree;     /* the tree of the round that is verified; without q rows */
    so_sample_params sample;
    bool drawn; /* guesses are sampled (`reject`): they carry q rows */
    bool skip;  /* the request has ended, or its drafter cannot draft for it */
    float *q;   /* drawn: [q_outcomes][q_depth][n_vocab]; q_outcomes: as many as fit */
    int q_depth, q_outcomes;
    int drafter; /* its index in proposals and in the keys of random numbers */
    /* Set by ahead_begin: the candidates after each of the first n_nodes nodes, likeliest first. */
    int n_nodes;
    int n_candidates[SO_AHEAD_NODES];
    so_ahead_candidate candidates[SO_AHEAD_NODES][SO_AHEAD_CANDIDATES];
    /* Set between ahead_begin and the first level. */
    int n_outcomes;
    so_ahead_outcome outcomes[SO_AHEAD_OUTCOMES];
    int first_slot; /* the drafter's own: slot of the root */
} so_ahead_job;

static inline float *so_ahead_q(const so_ahead_job *a, int outcome, int level) {
    return a->q + (size_t)(outcome * a->q_depth + level - 1) * (size_t)a->tree.n_vocab;
}
/* Position of the new root if the outcome occurs: the length of the text before it. */
static inline int so_ahead_root_pos(const so_ahead_job *a, const so_ahead_outcome *o) {
    return a->job.n_tokens + a->tree.nodes[o->node].depth;
}
/* The token that is sampled from the q row of a level. A function of the row and the keys of the
 * coming round, so both threads get the same one. Each outcome has numbers of its own
 * (async.h, step 4). */
int32_t so_ahead_sample(const so_ahead_job *a, int outcome, int level);

#endif
