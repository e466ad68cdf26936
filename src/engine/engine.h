/* The engine: requests that run together, with one forward pass of the target per step.
 *
 *   step:  retire → admit → gather → propose → forward → verify → commit → emit
 *
 * The text of a request is its prompt and the tokens accepted so far. Its last token is the root:
 * all tokens before the root must be in the KV cache before the next token can be decided. For each
 * running request a step feeds a chunk of the tokens that are not cached yet and, once only the
 * root is left, a token tree that starts at the root:
 *
 *   cache: t0 t1 t2 │ chunk: t3 t4 │ tree: t5 (root) ─ guesses …
 *
 * Plain decoding is a tree without guesses. The target's output after each node decides which
 * guesses are accepted (verify.h). The accepted path is committed to the cache, the other nodes are
 * dropped.
 *
 * Scheduling (schedule.c) is decided anew in every step, by priority and then by order of
 * submission. If cache pages run out, guesses are dropped first; then the last request in rank is
 * preempted. It returns to the queue and is resumed by recomputing its text. Pages of accepted text
 * stay in the prefix tree (kv/prefix.h) until their memory is needed. A hit changes only the time
 * to the first token. That time reveals whether another prompt began in the same way: users who
 * must not learn this need separate engines or no prefix cache.
 *
 * The tokens of a request depend only on its prompt, parameters and seed: not on other requests,
 * chunk sizes, order of submission, preemption or the content of the cache. With `reject` and
 * `lenient` above temperature 0 this always holds for the distribution, even if a seed is used
 * again. For the tokens themselves it holds if the guesses depend on the request alone: fixed
 * length, drafters that do not learn from other requests, enough pages for all requests. Otherwise
 * each run has a random nonce, which it reports (nonce.c).
 *
 * One thread owns an engine and its requests and makes all calls below. */
#ifndef SO_ENGINE_ENGINE_H
#define SO_ENGINE_ENGINE_H

#include "draft/async.h"
#include "draft/drafters.h"
#include "kv/kv.h"
#include "model/model.h"
#include "plan/plan.h"
#include "sample/sample.h"
#include "token/tokenizer.h"
#include "verify/beam.h"
#include "verify/verify.h"

typedef struct so_engine so_engine;
typedef struct so_request so_request;

/* One step that ran a pass, for traces. Counts are sums over the requests of the step. */
typedef struct so_step_info {
    int64_t step;           /* from 0 */
    double t_ms;            /* start of the step, since the engine was created */
    double encode_ms;       /* encoder-decoder models: time of reading source texts */
    double draft_ms;        /* time in drafters */
    double draft_encode_ms; /* part of it: draft models reading source texts */
    double pass_ms;         /* time of the target's pass */
    double host_ms;         /* verification and commits after the pass */
    int n_rows, n_requests; /* n_requests: those whose next token was decided */
    so_plan plan;           /* expected values; all zero if no request speculates */
    /* Counted by counts.c. */
    int drafted, tested, accepted;
    int emitted; /* tokens added to texts */
    int ended;   /* end tokens, which are not part of a text */
    /* Drafting ahead (draft/async.h): rounds of this step that looked for a draft; that found one;
     * guesses that had been made for all outcomes; the time of drafting them, which passed
     * during the step before. */
    int looked_up, hits, drafted_ahead, served;
    double ahead_ms;
} so_step_info;
typedef void so_step_fn(void *user, const so_step_info *info);

/* Whether costs and acceptance rates are kept in the cache folder between runs. NOTHING: neither
 * read nor saved. Otherwise read when the engine is created, and saved when it is freed after
 * enough passes (speculate.c); with LARGE_MODELS only for models above a minimum size. */
typedef enum so_keep { SO_KEEP_NOTHING, SO_KEEP_LARGE_MODELS, SO_KEEP_ALL } so_keep;

typedef struct so_engine_opts {
    int n_ctx;      /* maximum tokens of one request, prompt and answer */
    int n_parallel; /* maximum requests that run at once; further ones queue */
    int n_batch;    /* maximum prompt tokens in one pass */
    int n_pages;    /* size of the KV cache; 0: room for n_parallel requests of n_ctx tokens */
    so_dtype kv_dtype;
    so_kv_layout kv_layout;        /* slotted: with fewer pages fewer requests run at once */
    bool prefix_cache;             /* for paged caches; ignored for slotted ones */
    int max_draft;                 /* greatest depth of a draft; 0: no request may speculate */
    int max_nodes;                 /* maximum guesses per request and step; 0: twice max_draft */
    const so_model *draft;         /* for the drafter `model`; NULL: only model(FILE) works */
    const so_tokenizer *draft_tok; /* of the draft; NULL if the target has none */
    so_backend *draft_backend;     /* what model(FILE) is opened on; NULL: the target's backend */
    float draft_temp;              /* temperature of draft models; negative: the request's */
    float draft_p_min; /* a draft ends where the probability of its likeliest token is below this */
    const char *worker_key; /* file with the key of draft workers (draft/link.h); NULL: none */
    uint64_t draft_id;      /* identifies the draft in records kept on disk */
    double draft_claimed_agreement; /* stated in the draft's file (docs/formats.md); 0: none */
    so_keep keep_costs;
    so_draft_fn *user_drafter;           /* the drafter `user` as a chain; may be NULL */
    so_draft_tree_fn *user_tree_drafter; /* or as a tree; at most one of the two is set */
    void *drafter_user;
    const so_async_faults *async_faults; /* for tests of async(): what goes wrong; NULL: nothing */
    so_step_fn *on_step;                 /* may be NULL */
    void *step_user;
} so_engine_opts;

/* Defaults: n_ctx 4096 (or the model's context, if shorter), n_parallel 1, n_batch 256, n_pages 0,
 * F16, paged with the prefix cache, no speculation. */
void so_engine_defaults(const so_model *m, so_engine_opts *o);

/* t may be NULL: then events have ids but no text, and there are no end tokens and stop strings.
 * Models and tokenizers, the draft's included, are borrowed and must outlive the engine. */
int so_engine_create(const so_model *m, const so_tokenizer *t, const so_engine_opts *opts,
                     so_engine **out, so_err *err);
void so_engine_free(so_engine *e); /* NULL is allowed; all requests must have been freed */

typedef enum so_finish {
    SO_FINISH_NONE,      /* queued or running */
    SO_FINISH_STOP,      /* an end token or a stop string */
    SO_FINISH_LENGTH,    /* max_tokens, or the context is full */
    SO_FINISH_CANCELLED, /* by the caller */
    SO_FINISH_ERROR,     /* see so_request_error */
} so_finish;
const char *so_finish_name(so_finish f); /* "stop", "length", … as the OpenAI API names them */

/* Where a token came from. */
typedef enum so_origin {
    SO_ORIGIN_PLAIN,      /* sampled in a round without guesses */
    SO_ORIGIN_DRAFT,      /* an accepted guess */
    SO_ORIGIN_CORRECTION, /* sampled by the target where the guesses were rejected */
    SO_ORIGIN_BONUS,      /* sampled by the target after all guesses were accepted */
} so_origin;

/* One token, or the end of a request: then token is SO_TOKEN_NONE, finish is set, and text is what
 * had been held back. */
typedef struct so_event {
    so_request *req;
    int32_t token;
    so_origin origin;
    so_str text; /* whole UTF-8 characters, possibly none; valid during the call */
    so_finish finish;
    const so_logprob *logprobs; /* of the token, as in so_request_logprobs; NULL: not requested */
} so_event;
/* Returns false to cancel the request. It must not free the request. */
typedef bool so_event_fn(void *user, const so_event *ev);

/* A round before its tokens are emitted: its guesses and the verdict on them. */
typedef struct so_round {
    so_request *req;
    int index; /* from 0 */
    const so_tree *tree;
    const so_verdict *verdict;
} so_round;
typedef void so_round_fn(void *user, const so_round *round);

const char *so_verify_mode_name(so_verify_mode m);
/* Parses "match", "reject" or "lenient=L"; returns false for anything else. *lenience is L, or 1
 * for the other modes; so_engine_submit checks its range. */
bool so_verify_mode_parse(const char *text, so_verify_mode *mode, double *lenience);
/* Prints a mode for people, for example "lenient=0.3, lossy"; a lenience of 1 is not lossy. */
enum { SO_VERIFY_TEXT = 32 };
/* Whether the text may differ from plain decoding's in more than its random choices. */
bool so_verify_mode_is_lossy(so_verify_mode mode, double lenience);
void so_verify_mode_print(so_verify_mode mode, double lenience, char out[SO_VERIFY_TEXT]);

/* How a request speculates. All zero: no speculation. */
typedef struct so_spec_opts {
    const char *drafter; /* in the syntax of --spec (draft/spec.h), or `user`; NULL: none */
    int length;          /* fixed depth of drafts; 0: the planner decides */
    int draft_max;       /* greatest depth of a draft; 0: the engine's max_draft */
    int draft_min;       /* drafts with fewer guesses are dropped if that cannot bias the output */
    so_verify_mode verify;
    double lenience;         /* for SO_VERIFY_LENIENT: in (0,1] */
    const int32_t *expected; /* for `predict` and `oracle`; copied */
    int n_expected;
} so_spec_opts;

/* Beam search (beam.c), by the rules of verify/beam.h. All zero: none. It needs temperature 0 and no
 * penalties; its tokens are emitted at the end. With width 1 it is greedy decoding with a score. */
enum { SO_BEAM_MAX_CANDIDATES = SO_TREE_MAX - 1 };
typedef struct so_beam_opts {
    int width;  /* hypotheses, from 1 to SO_BEAM_MAX; 0: no beam search */
    int n_best; /* results, from 1 to width */
    double length_penalty;
    so_early_stop early_stop;
    int candidates; /* guesses of each level of speculation, at least width; 0: twice the width */
} so_beam_opts;
void so_beam_opts_defaults(so_beam_opts *o); /* no beam search; the values to start from */

typedef struct so_request_opts {
    const int32_t *prompt; /* copied */
    int n_prompt;
    bool continues;          /* the answer continues the prompt's text: keep a leading space */
    so_sample_params sample; /* copied, bias included */
    bool has_nonce;          /* true: replay with `nonce`; false: the engine chooses one */
    uint64_t nonce;
    int max_tokens; /* −1: until an end token or the end of the context */
    int priority;   /* higher ones run first and are preempted last; the default is 0 */
    bool ignore_end;
    int min_tokens;      /* no end token, stop token or stop string before this many tokens */
    const so_str *stops; /* copied */
    int n_stops;
    /* Tokens that end the answer as an end token does, also with ignore_end; copied. */
    const int32_t *stop_tokens;
    int n_stop_tokens;
    const so_tokens *bad_words; /* token sequences that the answer never contains; copied */
    int n_bad_words;
    int n_logprobs;    /* report logprobs of each token and this many alternatives; 0: none */
    bool score_prompt; /* also of the prompt's tokens, which are then all computed */
    so_spec_opts spec;
    so_beam_opts beams;
    so_event_fn *on_event; /* may be NULL */
    so_round_fn *on_round; /* may be NULL */
    void *user;
} so_request_opts;

/* Checks the beams of o, and that its other options allow them; part of so_engine_submit. */
int so_beams_check(const so_request_opts *o, so_err *err);

enum { SO_REQUEST_MAX_STOPS = 64, SO_REQUEST_MAX_BAD_WORDS = 256 };

/* Checks a request, allocates what it will need and queues it. The caller frees *out. On failure
 * nothing is queued; the message names the numbers and flags. */
int so_engine_submit(so_engine *e, const so_request_opts *o, so_request **out, so_err *err);
void so_request_cancel(so_request *r); /* takes effect at the next step */
void so_request_free(so_request *r);   /* NULL is allowed; a running one ends without an event */

/* Runs one step. Returns 1 if there is more to do, 0 if no request is left, or a negative code if
 * the pass failed: then every running request has finished with that error. */
int so_engine_step(so_engine *e, so_err *err);
/* After a failed step: an error if the device is lost, so that every later step will fail, too. */
int so_engine_check_device(so_engine *e, so_err *err);
/* Waits until nothing works on the drafts' backend, if no request is left: then the caller may. */
void so_engine_settle(so_engine *e);
/* Steps until r has finished. Returns the error that r or a pass failed with. */
int so_engine_run(so_engine *e, so_request *r, so_err *err);

enum { SO_STATS_DEPTHS = 64, SO_MAX_DRAFT = 64 };

typedef struct so_request_stats {
    int prompt_n, predicted_n;
    int end_n;                      /* 1: ended by an end token, which predicted_n excludes */
    int first_n;                    /* of predicted_n: tokens of the first round */
    int cached_n;                   /* prompt tokens taken from the prefix cache */
    int preempted_n;                /* times it was preempted */
    double queue_ms;                /* from submission to the first admission */
    double prompt_ms, predicted_ms; /* admission to first token; first token to the end */
    double ttft_ms;                 /* from submission to the first token */
    int rounds;                     /* passes that decided a token */
    int draft_n, draft_n_accepted;  /* guesses in passes; those accepted into the answer */
    double draft_ms;    /* time in drafters; a call for several requests counts in full for each */
    double verify_ms;   /* time of the target's passes; a shared pass counts in full for each */
    int tested_n;       /* guesses verified before the end of the answer (counts.c) */
    int drafted_rounds; /* rounds with guesses */
    int asked_rounds;   /* rounds that asked for guesses (counts.c) */
    double round_rate_sum; /* sum over asked rounds of accepted/k, with k guesses asked for */
    struct {
        int tested, accepted;
    } per_depth[SO_STATS_DEPTHS]; /* [0]: depth 1; the last one also counts greater depths */
    so_async_counts async;        /* of all async drafters, when the request has ended */
} so_request_stats;

/* The whole engine: its current status, and counts since it was created. The last line has sums of
 * so_step_info. */
typedef struct so_engine_stats {
    int running, waiting;
    int pages_total, pages_used, pages_cached; /* cached: by the prefix cache alone */
    int rows;                                  /* of the last pass */
    int64_t steps, rows_sum;                   /* passes, and the sum of their rows */
    int64_t preemptions;
    int64_t prefix_queried, prefix_hits; /* prompt tokens looked up in the prefix cache; found */
    int64_t drafted, tested, accepted, emitted;
} so_engine_stats;
/* Call between steps. */
void so_engine_get_stats(const so_engine *e, so_engine_stats *out);
/* Checks the invariants of queue, places and cache; aborts on a violation. For tests, between
 * steps. */
void so_engine_check(const so_engine *e);

/* Rates, as counts.c defines them; −1 if nothing was counted. */
typedef struct so_rates {
    double tokens_per_pass, mean_accepted; /* per round: tokens; accepted guesses */
    double alpha;                          /* accepted / tested */
    double acceptance_rate;                /* accepted / guesses in passes, tested or not */
    double round_rate;        /* mean of accepted/k over the rounds that asked for k guesses */
    double hit_rate;          /* async: hits / rounds that looked for a draft */
    double tokens_per_second; /* tokens after the first round, whose time is the prompt's */
} so_rates;
so_rates so_stats_rates(const so_request_stats *s);
void so_stats_add(so_request_stats *to, const so_request_stats *s);

so_finish so_request_finish(const so_request *r);
const so_err *so_request_error(const so_request *r);
/* Returns the error that the request ended with, or SO_OK. */
int so_request_check(const so_request *r, so_err *err);
const so_request_stats *so_request_get_stats(const so_request *r);
uint64_t so_request_seed(const so_request *r);
/* The nonce, of at most 53 bits, that random numbers are keyed by together with the seed (nonce.c).
 * Returns false if they are keyed by the seed alone: `match`, temperature 0, or no drafter. */
bool so_request_nonce(const so_request *r, uint64_t *out);
/* The generated tokens, without an end token. Like all pointers returned here, it belongs to the
 * request. */
const int32_t *so_request_output(const so_request *r, int *n);
/* [n][*n_each]: for each output token the token itself, then the likeliest ones, best first. NULL
 * if not requested. */
const so_logprob *so_request_logprobs(const so_request *r, int *n_each);
/* The same for the prompt's tokens, from the second one on; complete with the first event. NULL if
 * not requested. */
const so_logprob *so_request_prompt_logprobs(const so_request *r, int *n_each);
void *so_request_user(const so_request *r);

/* One of the best hypotheses of a finished beam search, best first; the first is the request's
 * output. */
typedef struct so_beam_result {
    int32_t *tokens; /* [n_tokens] without an end token */
    int n_tokens;
    so_buf text;
    double score, sum;    /* with the length penalty; sum of the log-probabilities */
    so_finish finish;     /* STOP or LENGTH */
    so_logprob *logprobs; /* as so_request_logprobs; NULL: not requested */
} so_beam_result;
int so_request_n_best(const so_request *r); /* 0: no beam search, or no result */
const so_beam_result *so_request_result(const so_request *r, int i);
int so_request_beam_width(const so_request *r); /* 0: no beam search */

/* The drafters in the shortest form of --spec, or "none"; and the verification mode. */
const char *so_request_drafter(const so_request *r);
so_verify_mode so_request_verify(const so_request *r, double *lenience);

int so_engine_n_ctx(const so_engine *e);

#endif
