/* The engine: a set of requests that run together, one forward pass of the target per step.
 *
 *   step:  retire → admit → gather → propose → forward → verify → commit → emit
 *
 * A request's text is its prompt and what was accepted so far. All of it but the last token, the
 * root, must lie in the KV cache before the next token can be told; a step feeds, for each running
 * request, a chunk of what is missing and, once nothing is, a token tree that starts at the root:
 *
 *   cache: t0 t1 t2 │ chunk: t3 t4 │ tree: t5 (root) ─ guesses …
 *
 * Plain decoding is the tree that is a root alone. The target's token after each node decides which
 * guesses stand (verify.h); the accepted path is committed, the rest forgotten.
 *
 * Who runs is decided anew in every step (schedule.c): by priority, then in order of submission.
 * Where cache pages run out, guesses are shed first; then the last in rank is preempted, waits, and
 * is resumed by computing its text again. Pages of texts that stand are kept while nobody needs
 * them, for requests that begin alike (kv/prefix.h); hits change how long the first token takes,
 * and nothing else. So a user can learn from that time that somebody else's prompt began like his:
 * users who must not learn of each other need engines of their own, or no prefix cache.
 *
 * The tokens of a request depend on its prompt, parameters and seed alone: not on neighbours, not
 * on chunk sizes, not on the order of submission, not on being preempted or on what the cache had.
 * With `reject` and `lenient` above temperature 0 that is always true of their distribution, also
 * over seeds that were used before. Of the tokens it is true where guesses depend on the request
 * alone: a fixed length, drafters that learn from nobody else, pages for everyone. Elsewhere each
 * run draws a nonce of its own and reports it (nonce.c). One thread owns an engine. */
#ifndef SO_ENGINE_ENGINE_H
#define SO_ENGINE_ENGINE_H

#include "draft/drafters.h"
#include "kv/kv.h"
#include "model/model.h"
#include "plan/plan.h"
#include "sample/sample.h"
#include "token/tokenizer.h"
#include "verify/verify.h"

typedef struct so_engine so_engine;
typedef struct so_request so_request;

/* One step that ran a pass, for traces. Counts are over all requests of the step. */
typedef struct so_step_info {
    int64_t step;           /* from 0 */
    double t_ms;            /* when it began, since the engine was made */
    double draft_ms;        /* drafting */
    double pass_ms;         /* the target's pass */
    double host_ms;         /* the host behind it: verdicts and commits */
    int n_rows, n_requests; /* requests whose next token was decided */
    so_plan plan;           /* what was expected; all zero where nobody speculates */
    /* Sums of what counts.c counts by request. */
    int drafted, tested, accepted;
    int emitted; /* tokens that became text */
    int ended;   /* requests that ended with an end token, which is no text */
} so_step_info;
typedef void so_step_fn(void *user, const so_step_info *info);

/* What was learned of a model: forgotten at the end, kept if the model is no toy, or always. */
typedef enum so_keep { SO_KEEP_NOTHING, SO_KEEP_WORTHY, SO_KEEP_ALL } so_keep;

typedef struct so_engine_opts {
    int n_ctx;      /* most tokens of one request, prompt and answer */
    int n_parallel; /* most requests that run at once; further ones wait */
    int n_batch;    /* most prompt tokens in one pass */
    int n_pages;    /* of the KV cache; 0: enough for n_parallel requests of n_ctx tokens */
    so_dtype kv_dtype;
    so_kv_layout kv_layout;        /* slotted: fewer pages mean fewer requests at once */
    bool prefix_cache;             /* paged only; ignored for slots */
    int max_draft;                 /* deepest draft of a request; 0: no request may speculate */
    int max_nodes;                 /* most guesses of one request and step; 0: twice max_draft */
    const so_model *draft;         /* for the drafter `model`; NULL: only model(FILE) is known */
    const so_tokenizer *draft_tok; /* of the draft; NULL where tok is */
    float draft_temp;              /* of draft models; negative: the request's own */
    float draft_p_min;    /* a model's draft ends where its likeliest token has less than this */
    uint64_t draft_id;    /* tells this draft from others in what is kept between runs */
    double draft_claimed; /* the agreement that its file claims (docs/formats.md); 0: none */
    so_keep
        keep_costs; /* t(n) and acceptance are read from the cache folder, and written at the end */
    so_draft_fn *user_drafter;           /* the drafter `user`; may be NULL */
    so_draft_tree_fn *user_tree_drafter; /* the same in its other form; at most one is set */
    void *drafter_user;
    so_step_fn *on_step; /* may be NULL */
    void *step_user;
} so_engine_opts;

/* 4096 (or the model's context, if shorter), 1, 256, 0, F16, pages with the prefix cache, and no
 * speculation. */
void so_engine_defaults(const so_model *m, so_engine_opts *o);

/* t may be NULL: then there is no text, no end token and no stop string, only ids. Model and
 * tokenizer must outlive the engine, and so must the draft's. */
int so_engine_create(const so_model *m, const so_tokenizer *t, const so_engine_opts *opts,
                     so_engine **out, so_err *err);
void so_engine_free(so_engine *e); /* all requests must be freed */

typedef enum so_finish {
    SO_FINISH_NONE,      /* waiting or running */
    SO_FINISH_STOP,      /* an end token or a stop string */
    SO_FINISH_LENGTH,    /* max_tokens, or the context is full */
    SO_FINISH_CANCELLED, /* by the caller */
    SO_FINISH_ERROR,     /* see so_request_error */
} so_finish;
const char *so_finish_name(so_finish f); /* "stop", "length", … as the OpenAI API names them */

/* How a token came to be. */
typedef enum so_origin {
    SO_ORIGIN_PLAIN,      /* no guess was checked in its round */
    SO_ORIGIN_DRAFT,      /* a guess that stood */
    SO_ORIGIN_CORRECTION, /* the target's word where the guesses were wrong */
    SO_ORIGIN_BONUS,      /* the target's word after all guesses stood */
} so_origin;

/* One token, or the end of a request (token SO_TOKEN_NONE, finish set, text what was held back). */
typedef struct so_event {
    so_request *req;
    int32_t token;
    so_origin origin;
    so_str text; /* whole UTF-8 sequences, possibly none; valid during the call */
    so_finish finish;
    const so_logprob *logprobs; /* as so_request_logprobs has them; NULL: none wanted */
} so_event;
/* False cancels the request. The request must not be freed in the call. */
typedef bool so_event_fn(void *user, const so_event *ev);

/* A round before its tokens are emitted: what was guessed, and what stands. */
typedef struct so_round {
    so_request *req;
    int index; /* from 0 */
    const so_tree *tree;
    const so_verdict *verdict;
} so_round;
typedef void so_round_fn(void *user, const so_round *round);

const char *so_verify_mode_name(so_verify_mode m);
/* "match", "reject" or "lenient=L"; false where it is none of them. *lenience is 1 but for the
 * last, whose range submission checks. */
bool so_verify_mode_parse(const char *text, so_verify_mode *mode, double *lenience);
/* The same for people: "lenient=0.3, lossy"; a lenience of 1 loses nothing. */
enum { SO_VERIFY_TEXT = 32 };
void so_verify_mode_print(so_verify_mode mode, double lenience, char out[SO_VERIFY_TEXT]);

/* How a request speculates. All zero: not at all. */
typedef struct so_spec_opts {
    const char *drafter; /* the language of --spec (draft/spec.h), or `user`; NULL: none */
    int length;          /* guesses per round; 0: the planner decides */
    int draft_max;       /* most guesses per round; 0: as many as the engine allows */
    int draft_min;       /* shorter drafts are dropped, where that cannot bias the output */
    so_verify_mode verify;
    double lenience;         /* for SO_VERIFY_LENIENT: in (0,1] */
    const int32_t *expected; /* for `predict` and `oracle`; copied */
    int n_expected;
} so_spec_opts;

typedef struct so_request_opts {
    const int32_t *prompt; /* copied */
    int n_prompt;
    bool continues;          /* the answer goes on in the prompt's text: keep a leading space */
    so_sample_params sample; /* copied, bias included */
    bool has_nonce;          /* replay a run by its seed and nonce; else the engine chooses one */
    uint64_t nonce;
    int max_tokens; /* −1: until the model ends or the context is full */
    int priority;   /* higher ones run first and are preempted last; 0 is the usual */
    bool ignore_end;
    const so_str *stops; /* copied */
    int n_stops;
    int n_logprobs;    /* logprobs of each token and of this many alternatives; 0: none at all */
    bool score_prompt; /* the same of the prompt's own tokens, which are all computed for it */
    so_spec_opts spec;
    so_event_fn *on_event; /* may be NULL */
    so_round_fn *on_round; /* may be NULL */
    void *user;
} so_request_opts;

enum { SO_REQUEST_MAX_STOPS = 64 };

/* Checks everything that can be checked; the message names numbers and flags. */
int so_engine_submit(so_engine *e, const so_request_opts *o, so_request **out, so_err *err);
void so_request_cancel(so_request *r); /* takes effect at the next step */
void so_request_free(so_request *r);   /* NULL is fine; a running one is dropped */

/* One pass. 1: there is more to do, 0: nothing left, negative: the pass failed and every running
 * request has finished with that error. */
int so_engine_step(so_engine *e, so_err *err);
/* Steps until r has finished; a request's own error is returned as such. */
int so_engine_run(so_engine *e, so_request *r, so_err *err);

enum { SO_STATS_DEPTHS = 64, SO_MAX_DRAFT = 64 };

typedef struct so_request_stats {
    int prompt_n, predicted_n;
    int end_n;                      /* 1: an end token, which is not in predicted_n, ended it */
    int cached_n;                   /* of the prompt: taken from the prefix cache */
    int preempted_n;                /* how often it had to give way */
    double queue_ms;                /* from submission to admission, the first one */
    double prompt_ms, predicted_ms; /* from admission to the first token, from there to the end */
    int rounds;                     /* passes that decided a token */
    int draft_n, draft_n_accepted;  /* guesses that went into a pass, that stand in the answer */
    double draft_ms;       /* drafting for those rounds, calls for several requests counted whole */
    double verify_ms;      /* the target's passes of those rounds, shared ones counted whole */
    int tested_n;          /* guesses whose test decided something of the answer */
    int drafted_rounds;    /* rounds with guesses */
    int asked_rounds;      /* rounds that asked for guesses … */
    double round_rate_sum; /* … and the sum over them of accepted/k, k being how many */
    struct {
        int tested, accepted;
    } per_depth[SO_STATS_DEPTHS]; /* from depth 1; deeper ones count in the last */
} so_request_stats;

/* The engine as a whole: what there is now, and counts since it was made. The last four are sums of
 * the steps'. */
typedef struct so_engine_stats {
    int running, waiting;
    int pages_total, pages_used, pages_cached; /* used by requests; kept for prefixes alone */
    int rows;                                  /* of the last pass */
    int64_t steps, rows_sum;                   /* passes, and their rows */
    int64_t preemptions;
    int64_t prefix_queried, prefix_hits; /* prompt tokens looked for, and found */
    int64_t drafted, tested, accepted, emitted;
} so_engine_stats;
/* Between steps, by the thread that owns the engine. */
void so_engine_get_stats(const so_engine *e, so_engine_stats *out);
/* Walks queue, places and cache; aborts with both values on a breach. Between steps. */
void so_engine_check(const so_engine *e);

/* What the counts come to, as counts.c defines it; −1 where nothing was counted. */
typedef struct so_rates {
    double tokens_per_pass, mean_accepted; /* with and without the target's own token */
    double alpha;                          /* accepted of the tested */
    double acceptance_rate;                /* accepted of the drafted */
    double round_rate; /* mean of accepted/k over the rounds that asked for k guesses */
} so_rates;
so_rates so_stats_rates(const so_request_stats *s);
void so_stats_add(so_request_stats *to, const so_request_stats *s);

so_finish so_request_finish(const so_request *r);
const so_err *so_request_error(const so_request *r);
/* The error it ended with, or SO_OK. */
int so_request_check(const so_request *r, so_err *err);
const so_request_stats *so_request_get_stats(const so_request *r);
uint64_t so_request_seed(const so_request *r);
/* The nonce that its draws are keyed by beside the seed (nonce.c), at most 53 bits. False where the
 * seed alone decides: `match`, temperature 0, no drafter. */
bool so_request_nonce(const so_request *r, uint64_t *out);
/* The accepted tokens without the prompt and without an end token. */
const int32_t *so_request_output(const so_request *r, int *n);
/* For each of them so_sample_logprobs' list, *n_each long: the token, then the likeliest. NULL
 * where none were asked for. */
const so_logprob *so_request_logprobs(const so_request *r, int *n_each);
/* The same for the prompt's tokens from the second on, once the first token or the end has been
 * told. NULL where they were not asked for. */
const so_logprob *so_request_prompt_logprobs(const so_request *r, int *n_each);
void *so_request_user(const so_request *r);
/* The spec in its shortest form, "none" without one; and how guesses are checked. */
const char *so_request_drafter(const so_request *r);
so_verify_mode so_request_verify(const so_request *r, double *lenience);

int so_engine_n_ctx(const so_engine *e);

#endif
