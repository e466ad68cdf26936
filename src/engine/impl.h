/* What the files of the engine share: engine.c (the step), request.c (submission), schedule.c (who
 * runs), speculate.c and drafters.c (what to guess), verdict.c (what stands), counts.c (what is
 * counted of it), memory.c (whether it fits). Nobody else includes this. A member belongs to the
 * file that is named above it; others may read it. */
#ifndef SO_ENGINE_IMPL_H
#define SO_ENGINE_IMPL_H

#include "base/mem.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "engine/stops.h"
#include "kv/kv.h"
#include "plan/plan.h"

typedef struct so_speculator so_speculator; /* speculate.c */
typedef struct so_verifier so_verifier;     /* verdict.c */
typedef struct so_drafters so_drafters;     /* drafters.c */
typedef struct so_spec_set so_spec_set;     /* drafters.c: the drafters of one spec */

typedef enum so_phase { SO_PHASE_WAITING, SO_PHASE_RUNNING, SO_PHASE_DONE } so_phase;

/* A request's side of speculation; all zero for a request without. */
typedef struct so_speculation {
    so_spec_set *set;
    void *state;           /* the drafters' */
    so_plan_request *plan; /* NULL: it does not speculate, or no longer */
    int length, draft_max, draft_min;
    so_verify_mode verify;
    double lenience;
    int n_told;    /* tokens that the drafters were told of */
    int depth;     /* this step: how deep a draft may go, 0: no draft */
    int max_nodes; /* this step: guesses below the root */
    uint32_t round;
} so_speculation;

/* The scratch of one step. */
typedef struct so_step {
    so_row *rows;      /* [max_rows] */
    so_seq **seqs;     /* [n_parallel] */
    int32_t *path;     /* [max_rows] */
    so_buf piece, out; /* text of a token; what of it is sent */
    so_step_info info;
} so_step;

struct so_request {
    so_engine *e;
    so_request *next; /* in the queue, or among those that run; by rank (schedule.c) */
    so_phase phase;
    int priority;
    int64_t serial; /* of its submission */
    so_finish finish;
    so_err err;
    bool cancelled;

    so_sample_params sample; /* its seed is what all draws are keyed by (nonce.c) */
    uint64_t seed, nonce;    /* as given or drawn; the nonce where has_nonce */
    bool has_nonce;
    bool greedy; /* the backend's argmax is the sampled token */
    int max_tokens;
    bool ignore_end;
    so_event_fn *on_event;
    so_round_fn *on_round;
    void *user;
    so_arena arena; /* bias, stop strings */

    int32_t *tokens; /* prompt and accepted tokens, then room for a path through the tree */
    int n_tokens, n_prompt, max_len;
    so_logprob *logprobs;        /* [max_len − n_prompt][n_logprobs]; NULL: none */
    int n_logprobs;              /* the token's own and the alternatives' */
    so_logprob *prompt_logprobs; /* [n_prompt − 1][n_logprobs]; NULL: none */
    int n_scored;                /* how many of them there are */

    int slot;      /* while it runs: whose these are */
    so_seq *seq;   /* of the slot */
    so_tree *tree; /* of the slot */
    so_detok detok;
    so_stops stops;
    so_speculation spec;

    int n_chunk;     /* this step: rows before the tree */
    int n_score;     /* this step: how many of them, the last ones, tell logprobs of the prompt */
    bool has_tree;   /* this step decides a token */
    int first_score; /* logits of those */
    int first_logit; /* of the tree's root */
    so_verdict verdict;
    int round_accepted;       /* this step: guesses counted as accepted so far */
    double round_rate_before; /* stats.round_rate_sum before this step's round */

    int64_t t_submitted_ns, t_admitted_ns, t_first_ns;
    so_request_stats stats;
};

struct so_engine {
    /* engine.c */
    const so_model *m;
    const so_tokenizer *tok;
    so_engine_opts o;
    so_kv *kv;
    so_pass *pass;
    so_sampler *sampler;
    int n_pages, max_rows, max_guesses; /* guesses: of all requests in one pass */
    int max_scores;                     /* rows of prompts in one pass whose logprobs are wanted */
    so_tree *trees;                     /* [n_parallel] of the slots */
    so_seq **slot_seqs;                 /* [n_parallel] */
    so_engine_stats stats;
    int64_t t_created_ns;
    so_step step;
    /* request.c */
    int n_requests;
    int64_t n_submitted;
    /* schedule.c: by rank */
    so_request *waiting, *running;
    int n_waiting, n_running;
    bool *slot_used;    /* [n_parallel] */
    so_request **order; /* [n_parallel] prompts, this step */
    int64_t n_spare;    /* pages that this step may still spend on guesses */
    /* Absent where opts.max_draft is 0. */
    so_speculator *spec;
    so_verifier *verifier;
};

/* --- engine.c --- */

/* Ends a request: the last event carries what was held back, unless a stop string swallowed it. */
void so_engine_finish(so_request *r, so_finish why, bool stop_string);

/* --- schedule.c --- */

/* Into the queue; from there it is admitted, and where it is preempted it comes back to it. */
void so_schedule_enqueue(so_request *r);
/* Gives back what a request holds, in any phase. It is done then. */
void so_schedule_retire(so_request *r);
void so_schedule_admit(so_engine *e);
/* How many rows everyone gets in this step, and the pages for them: n_chunk, has_tree, and trees
 * that are roots. May preempt. */
void so_schedule_gather(so_engine *e);
/* For how many of the `want` guesses of r there are pages; they are set aside. */
int so_schedule_room(so_request *r, int want);

/* --- speculate.c --- */

/* How many guesses of all requests one pass may hold. */
int so_speculate_max_guesses(const so_engine *e);
so_speculator *so_speculate_create(so_engine *e);
void so_speculate_free(so_engine *e);
/* Checks o and opens the drafter; r has its prompt and limits. */
int so_speculate_open(so_request *r, const so_spec_opts *o, so_err *err);
void so_speculate_close(so_request *r);
void so_speculate_release(so_request *r);
const char *so_speculate_name(const so_request *r); /* its spec in the shortest form */
/* Of all its drafters together; NULL: none. */
const so_drafter *so_speculate_drafter(const so_request *r);
/* r got its tree: gives it rows where its drafts are drawn. */
void so_speculate_admit(so_request *r);
/* r is preempted: its drafter gives back what it can rebuild. */
void so_speculate_park(so_request *r);
/* Plans, drafts and chooses: fills the trees of this step. */
void so_speculate_step(so_engine *e);
/* The token that comes next into the text was drawn from the row of `node`: where drafters read
 * states, they are told that one. */
void so_speculate_state(so_request *r, int node);
bool so_speculate_reads_states(const so_request *r);
/* The tokens since the last call are the request's own: drafter and estimates learn of them. */
void so_speculate_tell(so_request *r);
/* A verdict was reached, and the host took ms for it. */
void so_speculate_verdict(so_request *r, so_verify_mode mode, double ms);
/* The pass is over and verdicts are known. */
void so_speculate_observe(so_engine *e, double pass_ms);

/* --- nonce.c --- */

/* The seed that draws are keyed by; nonce 0: the seed itself. */
uint64_t so_nonce_key(uint64_t seed, uint64_t nonce);
/* r is open: decides whether it needs a nonce and which, and sets the seed of its draws. */
void so_nonce_choose(so_request *r, const so_request_opts *o);

/* --- memory.c --- */

/* Warns where the caches, the draft's included (NULL: none), may outgrow the memory there is. */
void so_memory_warn(const so_engine *e, const so_model *draft);

/* --- counts.c --- */

/* A round of r is about to be emitted: its tree and verdict are known. */
void so_counts_begin(so_request *r);
/* The walk of the round has come to `depth`: the tests there, and the guess that stood. */
void so_counts_depth(so_request *r, int depth);
/* A token came into the text; an end token ended it. */
void so_counts_token(so_request *r);
void so_counts_end_token(so_request *r);

/* --- verdict.c --- */

so_verifier *so_verdict_create(int n_vocab);
void so_verdict_free(so_verifier *v);
/* r->verdict from the pass; an error is left in r->err and ends the walk where it happened. */
void so_verdict_reach(so_request *r);
/* Notes the logprobs of the next token of r, which the pass told after `node`. */
void so_verdict_logprobs(so_request *r, int node, int32_t token);
/* Notes the logprobs of the prompt that the pass told; an error is left in r->err. */
void so_verdict_score(so_request *r);

#endif
