/* Declarations shared by the files of the drafter `model`: model.c (requests, chains),
 * model_levels.c (how many levels a pass of chains computes), model_rows.c (a row of logits becomes
 * tokens and probabilities), model_tree.c (trees) and model_beam.c (beam search). Private to them.
 * Thread: the engine thread. */
#ifndef SO_DRAFT_MODEL_IMPL_H
#define SO_DRAFT_MODEL_IMPL_H

#include "base/mem.h"
#include "draft/ahead.h"
#include "draft/model.h"
#include "draft/rows.h"
#include "model/source.h"

enum { SO_MODEL_N_HIDDEN = 64 };

typedef struct so_model_beams so_model_beams; /* model_beam.c */

typedef struct so_model_request {
    so_seq *seq;
    void *inner;
    int32_t *source; /* encoder-decoder models: what the encoder reads */
    int n_source;
    int32_t *text; /* [cap] tokens fed or to be fed; the cache holds a prefix of them */
    int cap;
    int n_agreed;  /* prefix of `text` that is known to equal the request's text */
    int n_checked; /* tokens of the request's text that ids_are_known has checked */
    bool disabled; /* the text has an id outside the vocabulary, or one that gives NaN */
    float *
        hidden; /* [SO_MODEL_N_HIDDEN][d_hidden]: the state of position p is at p % SO_MODEL_N_HIDDEN */
    int hidden_pos[SO_MODEL_N_HIDDEN]; /* the position whose state is stored there; −1: none */
    /* Trees and drafting ahead: the nodes of the open speculation in the draft's cache. */
    int32_t open_tokens[SO_TREE_MAX];
    int open_parents[SO_TREE_MAX]; /* by node; −1: the root */
    int n_open;
    so_model_beams *beams; /* beam search only */
    /* Drafting ahead only (model_ahead.c): */
    int n_ahead_rows; /* of this request in a pass of catch-up */
    int ahead_logit;  /* of the root in the first pass */
} so_model_request;

/* One request's chain in one call. */
typedef struct so_model_chain {
    so_draft_job *job;
    so_model_request *s;
    int node, depth, limit;
    int n_text;           /* tokens of s->text, guesses included */
    const so_tree *inner; /* guesses of the inner drafter, for the first pass */
    int n_guess;          /* of them; 0: none, or they were used */
    so_sample_params inner_sample;
    int n_rows, first_logit; /* in this pass; first_logit −1: still in catch-up */
    int last_row;            /* of this pass, before the rows of add_levels */
    int n_in_vain;           /* levels that were computed and not used */
    double expected;         /* `path` after the levels so far, in model_levels.c */
    double path;             /* chance that the whole chain is accepted, by the job's terms */
    float confidence;        /* of the latest guess */
    bool done, refused;      /* refused: a row was computed and no guess added */
} so_model_chain;

/* A guess of a tree, as the drafter sees it. */
typedef struct so_model_branch {
    int32_t token;
    int16_t parent, depth; /* index of another branch, −1: the root; from 1 */
    int16_t node;          /* in the job's tree; −1: not added */
    int16_t shape;         /* its place in so_model_growth.shape_parent */
    int16_t old;           /* its index before the latest level was added; −1: new */
    int order;             /* of creation */
    int slot;              /* in the draft's cache; −1: not computed */
    float chance;          /* given its parent */
    float confidence;      /* that the planner is told */
    double value;          /* chance of the whole path; with terms, as the planner estimates it */
} so_model_branch;

/* One request's tree in one call; the chain has its limits and its catch-up. */
typedef struct so_model_growth {
    so_model_branch kept[SO_TREE_MAX];
    int n_kept, max_nodes;
    int nodes_before; /* nodes of the job's tree at the start, the root included */
    int width;        /* maximum children of a branch */
    int16_t frontier[SO_TREE_MAX];
    int n_frontier;                        /* branches whose rows the next pass computes */
    int n_level_draws;                     /* draws of this level, to number their random numbers */
    int n_rows;                            /* computed in this call, without catch-up */
    double start_value;                    /* of the root */
    double refused_value;                  /* of the parent of job->refused_depth */
    int16_t shape_parent[SO_TREE_MAX + 1]; /* a fixed shape: node 0 is the root */
    int16_t shape_rank[SO_TREE_MAX + 1];   /* of tree=FILE */
    int n_shape;
} so_model_growth;

typedef struct so_model_drafter {
    so_drafter base;
    const so_model *m;
    so_model_drafter_opts o;
    so_drafter *inner;
    so_kv *kv;
    so_pass *pass;
    so_sources *sources;       /* encoder-decoder models; else NULL */
    so_sampler *wide, *narrow; /* for the target's vocabulary; for the subset */
    int n_ctx, n_vocab;        /* of the draft */
    const int32_t *subset; /* [n_subset] ids with logits that the target has, too; NULL: 0, 1, … */
    int n_subset;
    int d_hidden; /* width of the target's hidden states that the draft takes; 0: none */
    int max_rows, max_logits; /* of a pass */
    so_model_chain *chains;   /* [n_parallel] */
    so_draft_job *inner_jobs; /* [n_parallel] */
    so_tree *inner_trees;     /* [n_parallel] */
    int32_t *path;            /* [max_rows] nodes that a pass commits */
    so_row *rows;             /* [max_rows] */
    so_seq **seqs;            /* [n_parallel] */
    float *logits;            /* [n_vocab of the target] SO_DRAFT_EXCLUDED outside the subset */
    float *probs;             /* [n_vocab of the target] */
    bool weighed;             /* the pass gives the argmax and its weight, and no logits */
    bool no_levels;           /* no memory for passes of several levels */
    bool warned;              /* about NaN or Inf */
    /* Trees only: */
    so_model_growth *growths;    /* [n_parallel] */
    so_model_branch *candidates; /* of one level, and the branches they join */
    int n_candidates;
    int max_frontier; /* rows of one request in a pass: independent of other requests */
    /* Beam search only; NULL until it is first needed. */
    so_pass *beam_pass;
    so_row *beam_batch;                     /* [beam_rows] */
    int beam_rows, beam_logits, beam_nodes; /* of a pass; open nodes of a sequence */
} so_model_drafter;

/* --- model_rows.c --- */

/* A row of the draft's logits in the form in which it is sampled. If the draft has logits only for
 * a vocabulary subset (so_model_vocab_subset), its rows have the width of the subset and are
 * sampled at that width, unless bias or penalties name tokens; q is 0 outside the subset. */
typedef so_draft_row so_model_row;

/* The row of a pass in the form in which it is sampled with p. */
so_model_row so_model_row_of(const so_model_drafter *md, const so_sample_params *p,
                             const float *logits);
float so_model_row_largest(const float *row, int n); /* of probabilities */
/* Expands the probabilities of a row to the target's vocabulary. */
void so_model_row_widen(const so_model_drafter *md, const so_model_row *r, const float *probs,
                        float *out);
so_sample_params so_model_params(const so_model_drafter *md, const so_draft_job *job);
/* Whether a row can be used. at_root: it follows the text itself, not a guess. */
bool so_model_row_is_finite(so_model_drafter *md, so_model_request *s, int logit, bool at_root);
/* The probability of the token at a column of r, by the draft's own softmax. */
float so_model_row_chance(const so_model_drafter *md, const float *logits, const so_model_row *r,
                          int32_t at);

/* --- model.c --- */

/* The target's state for the token at `pos`; NULL: unknown, or no longer kept. */
const float *so_model_hidden_of(const so_model_drafter *md, const so_model_request *s, int pos);

/* Starts a draft: checks the job and brings the cache to its text. Fills *c; false: no guesses for
 * this request. */
bool so_model_begin_chain(so_model_drafter *md, so_draft_job *job, so_model_chain *c);
/* The rows of one chain within the budget: missing tokens, then the inner drafter's chain. */
int so_model_add_rows(so_model_drafter *md, so_model_chain *c, int seq, int at, int *n_logits,
                      int *budget);

/* New guesses that the job's tree can take. */
int so_model_tree_room(const so_draft_job *job);

/* Truncates the cache to where it agrees with the text, of which the last token is never cached, and
 * takes shared pages. */
void so_model_sync_text(so_model_request *s, const int32_t *tokens, int n);
/* Whether all tokens of the text are in the draft's vocabulary, and its encoder has read the source,
 * if it has one. */
bool so_model_knows(const so_model_drafter *md, so_model_request *s, const int32_t *tokens, int n);

/* --- model_levels.c --- */

/* so_drafter.levels_per_pass. */
int so_model_levels_per_pass(const so_model_drafter *md);
/* Whether the argmax of a row, on a remote backend, is the guess of each chain. */
bool so_model_argmax_is_guess(const so_model_drafter *md, int n);
/* The number of levels of the next pass. Sets job->levels_per_pass. */
int so_model_levels_together(so_model_drafter *md, int n);
/* The expected gain of another guess beyond its row price, before its row is computed; ≤ 0: it does
 * not pay. */
double so_model_next_gain(const so_model_chain *c);
/* Ends all chains if another pass does not pay. */
void so_model_end_unprofitable(so_model_drafter *md, int n);

/* --- model_beam.c --- */

int so_model_propose_beams(so_drafter *d, so_draft_beams *job, so_err *err);
void so_model_beams_free(so_model_beams *b); /* NULL is fine */

/* --- model_ahead.c: the ahead_… functions of so_drafter_vt --- */

int so_model_ahead_begin(so_drafter *d, so_ahead_job *jobs, int n, bool first, so_err *err);
int so_model_ahead_rows(so_drafter *d, so_ahead_job *jobs, int n, int level, so_err *err);
void so_model_ahead_draw(so_drafter *d, so_ahead_job *jobs, int n, int level, bool drawn);
void so_model_ahead_abort(so_drafter *d, so_ahead_job *jobs, int n);

/* --- model_tree.c --- */

/* Grows the trees of the n chains that have begun. After an error the speculations are left open. */
int so_model_tree_propose(so_model_drafter *md, int n, so_err *err);
/* Commits the path that was accepted in the latest round. */
void so_model_tree_settle(so_model_request *s, const so_draft_job *job);

#endif
