/* Types and functions that the files of the engine share:
 *
 *   engine.c      creation, the step, emitting tokens, the end of a request
 *   request.c     submission, and the results of a request
 *   beam.c        beam search (its data: beam.h); beam_draft.c: its guesses
 *   schedule.c    which requests run, their rows and pages
 *   speculate.c   the draft of a step; reports to drafters and planner
 *   drafters.c    the drafters that requests name
 *   verifier.c    which guesses are accepted; logprobs
 *   nonce.c       which nonce a request has, and the key made from it and the seed
 *   counts.c      counts and rates
 *   restrict.c    forbidden tokens and stop tokens of a request
 *   memory.c      the warning about too little memory
 *
 * Only these files include this header, some through drafters.h; sooth.c, bundle.c, figures.c and
 * stops.c do without it. The members of so_engine are grouped by the file that maintains them.
 * Exceptions: engine.c allocates and frees all of them; schedule.c, speculate.c and counts.c also
 * update `stats` and `step.info`. Engine thread. */
#ifndef SO_ENGINE_IMPL_H
#define SO_ENGINE_IMPL_H

#include "base/mem.h"
#include "engine/bundle.h"
#include "engine/engine.h"
#include "engine/stops.h"
#include "kv/kv.h"
#include "model/source.h"
#include "plan/plan.h"

typedef struct so_speculator so_speculator; /* speculate.c */
typedef struct so_verifier so_verifier;     /* verifier.c */
typedef struct so_drafters so_drafters;     /* drafters.c */
typedef struct so_spec_set so_spec_set;     /* drafters.c: the drafters of one spec */
typedef struct so_beams so_beams;           /* beam.h */

typedef enum so_phase { SO_PHASE_WAITING, SO_PHASE_RUNNING, SO_PHASE_DONE } so_phase;

/* Speculation of one request; all zero if it does not speculate. */
typedef struct so_speculation {
    so_spec_set *set;
    void *state;           /* per-request data of the drafters */
    so_plan_request *plan; /* NULL: does not speculate, or has ended */
    int length, draft_max, draft_min;
    so_verify_mode verify;
    double lenience;
    int n_observed;  /* tokens that drafters and planner have seen */
    int depth;       /* this step: greatest depth of the draft; 0: no draft */
    int max_nodes;   /* this step: maximum number of guesses */
    int n_reserved;  /* this step: rows for guesses; what these leave is for end rows */
    bool asked_ends; /* this step: a drafter that wants end rows was asked for guesses */
    int n_ends;      /* this step: nodes that have end rows (ends.h) */
    int16_t ends[SO_ENDS_MAX];
    uint32_t round;
    bool promised; /* the next round must test the sampled guesses that are drafted ahead for it */
} so_speculation;

/* restrict.c: what a request forbids, and what ends it. All in the request's arena. */
typedef struct so_restriction {
    int min_tokens;
    int32_t *stops, *ends; /* stop tokens; all tokens that would end the answer, for min_tokens */
    int n_stops, n_ends;
    so_tokens *words; /* forbidden sequences */
    int n_words;
    so_bias *bias; /* the request's own n_bias, then n_ends + n_words more */
} so_restriction;

/* Buffers of one step, reused by the next. */
typedef struct so_step {
    so_row *rows;           /* [max_rows] */
    so_sample_row *samples; /* [max_rows] of the rows with the same index */
    so_seq **seqs;          /* [n_parallel] */
    int32_t *path;          /* [max_rows] */
    so_buf piece, out;      /* text of a token; the part of it that is emitted */
    so_step_info info;
} so_step;

struct so_request {
    so_engine *e;
    so_request *next; /* in the queue or in the list of running requests, by rank */
    so_phase phase;
    int priority;
    int64_t serial; /* number of its submission */
    so_finish finish;
    so_err err;
    bool cancelled;

    so_sample_params sample;      /* its seed is the key of all random numbers (nonce.c) */
    uint64_t seed, nonce;         /* as given or chosen; the nonce is valid if has_nonce */
    bool has_nonce, hashed_nonce; /* hashed: from the request, so that it must lose no guess */
    bool greedy;                  /* the sampled token is the argmax that the backend computes */
    /* The backend samples from the rows of a pass, or weighs a guess; logits are downloaded only if
     * that is not enough (verifier.c). */
    bool on_device;
    int max_tokens;
    bool ignore_end;
    so_restriction restricted;
    so_event_fn *on_event;
    so_round_fn *on_round;
    void *user;
    so_arena arena; /* stop strings, and all of `restricted` */

    int32_t *source; /* encoder-decoder models: the text that the encoder reads; else NULL */
    int n_source;
    int32_t *tokens; /* prompt and accepted tokens, then room for a path through the tree */
    int n_tokens, n_prompt, max_len;
    int max_slots;               /* most positions in the cache: max_len, or more with beams */
    so_logprob *logprobs;        /* [max_len − n_prompt][n_logprobs]; NULL: none */
    int n_logprobs;              /* 1 + alternatives; 0: none */
    so_logprob *prompt_logprobs; /* [n_prompt − 1][n_logprobs]; NULL: none */
    int n_scored;                /* prompt logprobs computed so far */

    int slot; /* while it runs: its place, 0 … n_parallel − 1, which owns seq and tree */
    so_seq *seq;
    so_tree *tree;
    so_detok detok;
    so_stops stops;
    so_speculation spec;
    so_beams *beams; /* NULL: no beam search */

    int n_chunk;     /* this step: prompt rows before the tree */
    int n_score;     /* this step: rows at the end of the chunk whose logprobs are wanted */
    bool has_tree;   /* this step decides a token; never with beams */
    int n_beam_rows; /* this step, with beams: rows of hypotheses, without guesses */
    int first_score; /* index in the pass of the first logits row of n_score */
    int first_logit; /* index in the pass of the root's logits row */
    so_verdict verdict;
    int round_accepted;       /* this step: accepted guesses counted so far */
    double round_rate_before; /* stats.round_rate_sum before this round */

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
    so_sources *sources; /* encoder-decoder models; else NULL */
    so_sampler *sampler;
    int n_pages, max_rows, max_guesses; /* max_guesses: of all requests in one pass */
    int max_scores;                     /* maximum prompt rows in a pass that are scored */
    int max_beam_rows;  /* of all beam searches in a pass, beyond one row of each request */
    so_tree *trees;     /* [n_parallel], one per place of a running request */
    so_seq **slot_seqs; /* [n_parallel], the same */
    so_engine_stats stats;
    unsigned n_failed_seen; /* so_backend.n_failed when the cache was last known to be intact */
    int64_t t_created_ns;
    so_step step;
    /* request.c */
    int n_requests;
    int64_t n_submitted;
    /* schedule.c; both lists are ordered by rank */
    so_request *waiting, *running;
    int n_waiting, n_running;
    bool *slot_used;       /* [n_parallel] */
    so_request **order;    /* [n_parallel] requests in prefill, this step */
    int64_t n_spare_pages; /* pages that guesses may still take in this step */
    int beam_rows_left;    /* of max_beam_rows in this step */
    /* NULL if opts.max_draft is 0. */
    so_speculator *spec;
    so_verifier *verifier;
};

/* --- engine.c --- */

/* Ends a request and emits its last event, with the text that was held back, unless a stop string
 * ended it. */
void so_engine_finish(so_request *r, so_finish why, bool stop_string);
/* Adds one token to the text and emits it. Returns false if the request ended with it. */
bool so_engine_append(so_request *r, int32_t token, so_origin origin);

/* --- schedule.c --- */

/* Puts a new or preempted request into the queue. */
void so_schedule_enqueue(so_request *r);
/* Takes a request out of the queue or out of its place and releases its cache pages. Its phase is
 * then DONE. */
void so_schedule_retire(so_request *r);
/* Empties the cache: all running requests go back into the queue and will be computed again. */
void so_schedule_restart(so_engine *e);
void so_schedule_admit(so_engine *e);
/* Decides the rows of this step: sets n_chunk, n_score and has_tree, and resets the trees to their
 * roots. Preempts requests until the pages suffice. */
void so_schedule_gather(so_engine *e);
/* Reserves pages for guesses of r in this step. Returns how many of the `want` guesses fit. */
int so_schedule_reserve(so_request *r, int want);
/* Whether r may use more pages than a context needs, as beams may. */
bool so_schedule_exceeds_context(const so_request *r);
/* Whether the cache has the pages of a whole context for each place, so that no guess is dropped and no
 * request preempted for lack of pages. Beams may take more. */
bool so_schedule_has_all_pages(const so_engine *e);
/* Whether r will run in the next step with the pages that it then asks for, whatever is submitted until
 * then, provided that spec.promised is set (schedule.c, promises). */
bool so_schedule_can_promise(const so_request *r);

/* --- speculate.c --- */

/* Maximum number of guesses of all requests in one pass. */
int so_speculate_max_guesses(const so_engine *e);
so_speculator *so_speculate_create(so_engine *e);
void so_speculate_free(so_engine *e);
/* Checks o and opens the drafters of r, whose prompt and limits are set. */
int so_speculate_open(so_request *r, const so_spec_opts *o, so_err *err);
/* r has finished: closes its drafters' data and its plan. */
void so_speculate_close(so_request *r);
/* r is being freed: closes it if it is still open, and gives up its set of drafters. */
void so_speculate_release(so_request *r);
const char *so_speculate_name(const so_request *r); /* its spec in the shortest form */
/* The root of its drafters; NULL: none. */
const so_drafter *so_speculate_drafter(const so_request *r);
/* r has been admitted: if its drafts are sampled, its tree gets memory for their distributions. */
void so_speculate_admit(so_request *r);
/* r is preempted: its drafters release what they can rebuild. */
void so_speculate_preempt(so_request *r);
/* Around drafting with a model outside async(): keeps the async thread off the backend (draft/async.h). */
void so_speculate_lock(so_engine *e);
void so_speculate_unlock(so_engine *e);
/* Plans and drafts: fills the trees of this step and prunes them. */
void so_speculate_step(so_engine *e);
/* The next token of the text was sampled from the logits row of `node`: drafters that read hidden
 * states get that row's hidden state. */
void so_speculate_observe_hidden(so_request *r, int node);
bool so_speculate_reads_hidden(const so_request *r);
/* Tells drafters and planner the tokens added to the text since the last call. */
void so_speculate_observe_tokens(so_request *r);
/* The guesses of r have been verified, which took the host ms milliseconds. */
void so_speculate_observe_round(so_request *r, so_verify_mode mode, double ms);
/* The pass is over and all its guesses have been verified. n_unusual: of the backend before it. */
void so_speculate_observe_pass(so_engine *e, double pass_ms, unsigned n_unusual);

/* --- request.c --- */

/* For messages: what is in the cache before an answer, "a prompt of N tokens" or, after a source
 * text, "the start token". */
typedef char so_begin_text[48];
const char *so_request_begin_text(const so_engine *e, int n_prompt, so_begin_text buf);

/* --- beam.c; open to tree_size, admit and release do nothing for requests without beams --- */

/* The longest text of a request with beams, and the positions that it may need in the cache. */
int so_beams_room(const so_engine *e, const so_request_opts *o, int *max_len, int *max_slots,
                  so_err *err);
void so_beams_open(so_request *r, const so_request_opts *o);
void so_beams_free(so_request *r);
/* Positions of the tree that follows the committed text, its last token included; 1 without
 * beams. */
int so_beams_tree_size(const so_request *r);
/* r got its place, or loses it. */
void so_beams_admit(so_request *r);
void so_beams_release(so_request *r);
/* The chunk of r completes its text: sets n_beam_rows within e->beam_rows_left. */
void so_beams_gather(so_request *r);
/* Adds the rows of r from `at` on, after its chunk; returns the end. */
int so_beams_add_rows(so_request *r, int seq, int at);
int so_beams_n_logits(const so_request *r); /* of these rows */
/* Uses the results of the pass and updates the cache. An error is stored in r->err. */
void so_beams_take(so_request *r);
bool so_beams_ended(const so_request *r);
/* Emits the best hypothesis and ends the request; CANCELLED: the best one so far. */
void so_beams_finish(so_request *r, so_finish why);

/* --- beam_draft.c; nothing for requests without beams --- */

int so_beams_open_draft(so_request *r, so_spec_set *set, const so_draft_text *text,
                        const so_spec_opts *o, so_err *err);
void so_beams_close_draft(so_request *r);
void so_beams_preempt(so_request *r);
/* The guesses of this step, of all requests with beams. */
void so_beams_propose(so_engine *e);
void so_beams_observe_pass(so_engine *e, double pass_ms);

/* --- nonce.c --- */

/* The key made from seed and nonce; for nonce 0 the seed itself. */
uint64_t so_nonce_key(uint64_t seed, uint64_t nonce);
/* r is open: decides whether it needs a nonce and which, and sets its key. */
void so_nonce_choose(so_request *r, const so_request_opts *o);

/* --- restrict.c --- */

int so_restrict_check(const so_request_opts *o, int n_vocab, so_err *err);
void so_restrict_open(so_request *r, const so_request_opts *o);
/* Whether some row of r may have forbidden tokens. */
bool so_restrict_any(const so_request *r);
/* The sampling parameters at a position: those of r, and a bias of −∞ for each forbidden token.
 * Valid until the next call for r. */
so_sample_params so_restrict_at(const so_request *r, const so_sample_context *ctx);
/* Whether the token ends the answer. */
bool so_restrict_ends(const so_request *r, int32_t token);
/* Whether stop strings are looked for in the text of the latest token. */
bool so_restrict_may_stop(const so_request *r);

/* --- memory.c --- */

/* Logs a warning if the caches, the draft's included (NULL: none), may outgrow the available
 * memory. */
void so_memory_warn(const so_engine *e, const so_model *draft);

/* --- counts.c --- */

/* Call before a round of r is emitted; its tree and verdict are known. */
void so_counts_begin(so_request *r);
/* Counts the guesses verified at `depth`, and the accepted one, before its token is emitted. */
void so_counts_depth(so_request *r, int depth);
/* A token was added to the text; an end token ended it. */
void so_counts_token(so_request *r);
void so_counts_end_token(so_request *r);

/* --- verifier.c --- */

so_verifier *so_verifier_create(int n_vocab);
void so_verifier_free(so_verifier *v);
/* r is open: decides whether the backend samples for it. */
void so_verifier_open(so_request *r);
/* Sets in `row`, the row of `node` in the next pass, what the verifier needs of its logits.
 * *sample: memory for the parameters. Returns SO_PASS_… bits. */
unsigned so_verifier_want(const so_request *r, int node, so_sample_row *sample, so_row *row);
/* Sets r->verdict from the results of the pass. An error is stored in r->err and ends the walk at
 * the node where it occurred. */
void so_verifier_run(so_request *r);
/* Stores the logprobs of the next token of r, which was sampled from the logits row of `node`. */
void so_verifier_token_logprobs(so_request *r, int node, int32_t token);
/* Stores the logprobs of this step's prompt rows. An error is stored in r->err. */
void so_verifier_prompt_logprobs(so_request *r);

#endif
