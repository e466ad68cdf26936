/* What the files of the engine share: engine.c (requests, admission, the step), speculate.c (what
 * to guess), lengths.c (how much of it, where it costs), verdict.c (what stands), memory.c (whether
 * it fits). Nobody else includes this. */
#ifndef SO_ENGINE_IMPL_H
#define SO_ENGINE_IMPL_H

#include "base/mem.h"
#include "draft/planner.h"
#include "draft/record.h"
#include "draft/shadow.h"
#include "draft/spec.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "engine/stops.h"
#include "kv/kv.h"

typedef enum so_phase { SO_PHASE_WAITING, SO_PHASE_RUNNING, SO_PHASE_DONE } so_phase;

/* Ways to be wrong on purpose (SOOTH_DEBUG=mutant=NAME). */
typedef enum so_mutant {
    SO_MUTANT_NONE,
    SO_MUTANT_ACCEPT_ALL, /* every guess stands */
    SO_MUTANT_KEEP_ROW, /* the cache keeps a rejected guess in place of the last token that stood */
    SO_MUTANT_MOVE_TAIL, /* guesses are checked against the row before their own */
} so_mutant;

/* What rounds of drafts that may stretch come to, smoothed: tokens and time, in plain passes. */
typedef struct so_stretch {
    double tokens, passes;
    int n; /* rounds */
} so_stretch;

enum { SO_CROWDS = 8 }; /* by the bit length of how many requests ran */

/* How guesses come about and are tested decides how often they stand: each way has its own record.
 */
typedef enum so_guessing {
    SO_GUESSING_GREEDY, /* temperature 0 */
    SO_GUESSING_NOISE,  /* points, against the target's draw */
    SO_GUESSING_DRAWN,  /* draws, against its distribution */
    SO_GUESSINGS
} so_guessing;

/* The drafters of one spec, shared by the requests that name it. */
typedef struct so_spec_set so_spec_set;
struct so_spec_set {
    so_spec_set *next;
    char *text; /* in its shortest form */
    so_draft_set drafters;
    uint64_t draft_id; /* of the model in it */
    double draft_word; /* its own, 0: none */
    so_estimate_shared shared[SO_GUESSINGS];
    so_stretch stretches[SO_GUESSINGS];
    bool draws;          /* one of them may draw */
    bool staged;         /* of the form a,b: lengths are fixed when a drafter's turn comes */
    bool failed;         /* has been seen to fail */
    int n_requests;      /* that use it */
    so_draft_job *jobs;  /* [n_parallel], of this step */
    so_request **owners; /* [n_parallel] */
    int n_jobs;
};

/* A request's side of speculation; all zero for a request without. */
typedef struct so_speculation {
    so_spec_set *set;
    void *state; /* the drafter's */
    int length, draft_max, draft_min;
    so_verify_mode verify;
    so_guessing guessing;
    double lenience;
    so_estimate *estimate;
    so_shadow *shadow;
    int n_told;           /* tokens the drafter was told of */
    int n_read;           /* tokens that the drafter that costs has read */
    int depth;            /* this step: how deep to draft, 0: not at all */
    bool stretch;         /* this step: deeper, as long as it pays (so_lengths_more) */
    so_stretch stretches; /* of this request */
    double path, promise; /* of the chain so far: its chance, and the tokens it promises */
    int max_nodes;
    uint32_t round;
} so_speculation;

struct so_request {
    so_engine *e;
    so_request *next; /* in the queue, or among those that run; by rank (schedule.c) */
    so_phase phase;
    int priority;
    int64_t serial; /* of its submission */
    so_finish finish;
    so_err err;
    bool cancelled;

    so_sample_params sample;
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

    int64_t t_submitted_ns, t_admitted_ns, t_first_ns;
    so_request_stats stats;
};

struct so_engine {
    const so_model *m;
    const so_tokenizer *tok;
    so_engine_opts o;
    so_kv *kv;
    so_pass *pass;
    so_sampler *sampler;
    so_request *waiting, *running; /* by rank */
    int n_waiting, n_running, n_requests, n_pages;
    int64_t n_submitted;
    bool *slot_used;    /* [n_parallel] */
    so_tree *trees;     /* [n_parallel] of the slots */
    so_seq **slot_seqs; /* [n_parallel] */
    so_request **order; /* [n_parallel] prompts, this step */
    int64_t n_spare;    /* pages that this step may still spend on guesses */
    so_engine_stats stats;
    so_row *rows;  /* [max_rows] */
    so_seq **seqs; /* [n_parallel] */
    int32_t *path; /* [max_rows] */
    int max_rows;
    int max_scores; /* rows of prompts in one pass whose logprobs are wanted */
    so_buf piece, out;
    int64_t t_created_ns;
    so_step_info info; /* of this step */

    /* speculation; all of it absent where opts.max_draft is 0 */
    int max_guesses; /* in one pass, of all requests */
    so_mutant mutant;
    so_planner *planner;
    so_buf costs_key; /* empty: costs are not kept */
    int n_new_costs;  /* passes learned from */
    so_records records;
    so_plan plan;            /* of this step; n_requests 0: nobody speculates */
    int n_trees, other_rows; /* of this step: requests that get a token, rows of prompts */
    double lengths_ms;       /* of this step: what planned drafts will take; 0: none was planned */
    bool rests;              /* of this step: nobody drafts where that costs */
    double unpaid_ms;        /* of drafting, in steps that were not judged */
    int turn;                /* steps, round and round: when the other way is tried */
    so_stretch drafted[SO_CROWDS], undrafted[SO_CROWDS]; /* steps with such drafts, and without */
    uint64_t draft_id;                                   /* of the draft model that was made last */
    double draft_word;                                   /* of the same */
    so_spec_set *sets;
    so_corpus *corpus;
    so_bundle *bundles;  /* opened for model(FILE) */
    char **bundle_paths; /* by which they were named */
    int n_bundles;
    so_plan_tree *plan_trees;   /* [n_parallel] */
    so_plan_chain *plan_chains; /* [n_parallel] */
    so_request **plan_owners;   /* [n_parallel] */
    float *chain_accept;        /* [n_parallel][max_draft] */
    float *tree_accept;         /* [n_parallel][SO_TREE_MAX] */
    float *row;                 /* [n_vocab] a standardised row */
    double *scratch;            /* [2][n_vocab] */
    double draw_ms;             /* of a token without guesses, smoothed */
    double check_ms[3];         /* by so_verify_mode: what a guess adds to that, smoothed */
    double priced_ms;           /* t(1) when that and drafting were measured, smoothed */
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
void so_speculate_init(so_engine *e);
void so_speculate_deinit(so_engine *e);
/* Checks o and opens the drafter; r has its prompt and limits. */
int so_speculate_open(so_request *r, const so_spec_opts *o, so_err *err);
void so_speculate_close(so_request *r);
void so_speculate_release(so_request *r);
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
/* The pass is over and verdicts are known. */
void so_speculate_observe(so_engine *e, double pass_ms);

/* --- lengths.c --- */

/* Lengths of sets that are asked as one, into spec.depth. */
void so_lengths_plan(so_engine *e);
/* Before all others: whether drafts that cost are made at all in this step. */
void so_lengths_begin(so_engine *e);
/* What a guess of r costs the host beyond its row. */
double so_lengths_check_ms(const so_engine *e, const so_request *r);
/* The step is over: what its pass took, and how many tokens came of it. */
void so_lengths_observe(so_engine *e, double pass_ms, int n_tokens);
/* For the sets of the form a,b: so_draft_limit and so_draft_judge; user is the engine. */
void so_lengths_limit(void *user, so_draft_job *jobs, int n_jobs, const so_drafter *member);
/* The planner has chosen from r's tree: keeps count of what drafts come to. */
void so_lengths_learn(so_request *r, const so_plan_tree *chosen);
/* so_draft_ask for requests whose drafts may stretch. */
bool so_lengths_draw(so_draft_job *job, const so_drafter *d, int depth, double sure);
bool so_lengths_more(so_draft_job *job, const so_drafter *d, int depth, double sure);
bool so_lengths_judge(void *user, const so_draft_job *job, const so_drafter *by);

/* --- memory.c --- */

/* Warns where the caches, the draft's included (NULL: none), may outgrow the memory there is. */
void so_memory_warn(const so_engine *e, const so_model *draft);

/* --- verdict.c --- */

/* r->verdict from the pass; an error is left in r->err and ends the walk where it happened. */
void so_verdict_reach(so_request *r);
void so_verdict_count(so_request *r);
/* Notes the logprobs of the next token of r, which the pass told after `node`. */
void so_verdict_logprobs(so_request *r, int node, int32_t token);
/* Notes the logprobs of the prompt that the pass told; an error is left in r->err. */
void so_verdict_score(so_request *r);

#endif
