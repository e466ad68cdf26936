/* sooth: language models, run fast and exactly. The only public header; C11 and C++.
 *
 *   #include <sooth.h>
 *   #include <stdio.h>
 *   static int show(void *user, const sooth_event *ev) { return fputs(ev->text, stdout) < 0; }
 *   int main(void) {
 *       sooth_error err;
 *       sooth_model *model = NULL;
 *       sooth_engine *engine = NULL;
 *       sooth_message ask = {"user", "Why is the sea blue?"};
 *       int rc = sooth_model_load("model.gguf", NULL, &model, &err);
 *       if (rc == 0) rc = sooth_engine_create(model, NULL, &engine, &err);
 *       if (rc == 0) rc = sooth_chat(engine, &ask, 1, NULL, show, NULL, NULL, &err);
 *       if (rc != 0) fprintf(stderr, "%s\n", err.message);
 *       sooth_engine_free(engine);
 *       sooth_model_free(model);
 *       return rc != 0;
 *   }
 *
 * Two nouns: a model (weights, tokenizer, chat format; immutable) and an engine (a cache of context
 * and the requests that run in it). Link with -lsooth (pkg-config sooth).
 *
 * Errors: functions that can fail return SOOTH_OK or a negative code and fill *err (which may be
 * NULL) with a message that names the thing, the value and the remedy. Outputs are untouched then.
 *
 * Memory: what a function creates is freed by its counterpart (sooth_x_free). Strings and structs
 * passed in are copied; a model must outlive its engines, an engine its requests.
 *
 * Threads: a model and the engines made from it form one family; calls into a family from several
 * threads are safe and take turns. Different families are independent. Callbacks run on the calling
 * thread, in the middle of the call; they must not call back into the same family.
 *
 * Versions: every struct that may grow begins with its size, set by its _init function, so programs
 * built against an older header keep working with a newer library. */
#ifndef SOOTH_H
#define SOOTH_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define SOOTH_API __attribute__((visibility("default")))
#else
#define SOOTH_API
#endif

#define SOOTH_VERSION_MAJOR 0
#define SOOTH_VERSION_MINOR 1

/* "0.1.0": of the library that runs, not of the header. */
SOOTH_API const char *sooth_version(void);

/* --- errors --- */

enum {
    SOOTH_OK = 0,
    SOOTH_ENOMEM = -1,
    SOOTH_EIO = -2,
    SOOTH_EFORMAT = -3,
    SOOTH_EUNSUPPORTED = -4,
    SOOTH_ERANGE = -5,
    SOOTH_EINVAL = -6,
    SOOTH_ENOTFOUND = -7,
    SOOTH_ELIMIT = -8,
    SOOTH_ECANCELLED = -9,
    SOOTH_EMISMATCH = -10
};

typedef struct sooth_error {
    int code;
    char message[512];
} sooth_error;

/* --- models --- */

typedef struct sooth_model sooth_model;

typedef struct sooth_model_params {
    size_t size;
    int n_threads;         /* 0: one per core */
    const char *cpu_level; /* NULL or "auto", "scalar", "avx2", "avxvnni", "avx512", "amx" */
    const char *quantize; /* round weights to this type at load ("Q8_0", …); NULL: as in the file */
    void (*progress)(void *user, double done); /* 0 … 1 while loading takes long; may be NULL */
    void *progress_user;
} sooth_model_params;

SOOTH_API void sooth_model_params_init_sized(sooth_model_params *p, size_t size);
static inline void sooth_model_params_init(sooth_model_params *p) {
    sooth_model_params_init_sized(p, sizeof *p);
}

/* path: a GGUF file (the first of a split one) or a Hugging Face folder. params NULL: defaults. */
SOOTH_API int sooth_model_load(const char *path, const sooth_model_params *params,
                               sooth_model **out, sooth_error *err);
SOOTH_API void sooth_model_free(sooth_model *m); /* NULL is fine */

SOOTH_API const char *sooth_model_arch(const sooth_model *m);
SOOTH_API int64_t sooth_model_n_params(const sooth_model *m);
SOOTH_API int sooth_model_n_vocab(const sooth_model *m);
SOOTH_API int sooth_model_n_ctx(const sooth_model *m); /* the longest context it was made for */
SOOTH_API int sooth_model_has_chat(const sooth_model *m);

/* Text to ids and back. *n is the number of ids (bytes) of the whole result, also when it is more
 * than `cap` and only `cap` were written: call with cap 0 to learn the size. parse_special: control
 * tokens written out in the text become their ids. Detokenised text is not NUL-terminated. */
SOOTH_API int sooth_tokenize(const sooth_model *m, const char *text, size_t text_len,
                             int add_special, int parse_special, int32_t *ids, size_t cap,
                             size_t *n, sooth_error *err);
SOOTH_API int sooth_detokenize(const sooth_model *m, const int32_t *ids, size_t n_ids, char *text,
                               size_t cap, size_t *n, sooth_error *err);

/* --- engines --- */

typedef struct sooth_engine sooth_engine;

/* Your own drafter: writes at most `max` ids that may follow `tokens`, one after the other, to
 * `out` and returns how many; negative means it failed. Guesses cost or save time and never change
 * the text: the model checks every one of them. An answer with more guesses or with ids that are
 * not in the vocabulary is refused with a warning on standard error, and the request goes on
 * without it. Called from sooth_step. */
typedef int sooth_drafter(void *user, const int32_t *tokens, int n_tokens, int n_prompt,
                          int32_t *out, int max);

/* The same for a tree of guesses, where several tokens may come next. ids[i] follows the guess
 * parents[i], an earlier one, or the text itself where that is -1:
 *
 *          the text                        i         0   1   2
 *          /      \                        ids[i]    A   B   C
 *         A        B                       parents   -1  -1   1
 *                  C
 *
 * Another parent, or guesses that lie further ahead than max_depth, are refused in the same way.
 * Siblings are tried in order: the likeliest first. */
typedef struct sooth_draft {
    size_t size;
    const int32_t *tokens; /* the prompt, and the text so far */
    int n_tokens, n_prompt;
    int max;          /* guesses at most */
    int max_depth;    /* how many of them may follow each other */
    int32_t *ids;     /* [max] to fill */
    int32_t *parents; /* [max] to fill; before the call a chain: i - 1 */
} sooth_draft;
typedef int sooth_tree_drafter(void *user, const sooth_draft *draft);

typedef struct sooth_engine_params {
    size_t size;
    int n_ctx;               /* most tokens of one request; 0: the model's own, at most 4096 */
    int n_parallel;          /* most requests at once */
    int n_batch;             /* most prompt tokens in one pass; never changes what is generated */
    int kv_f32;              /* keep the cache in 32-bit floats instead of 16; see kv_type */
    int max_draft;           /* most guesses per step and request; 0: no speculation at all */
    const char *draft_model; /* a file or folder, for the drafter "model"; NULL: none */
    float draft_temp;        /* temperature of the draft model; negative: the request's */
    sooth_drafter *drafter;  /* the drafter "user"; NULL: none */
    void *drafter_user;
    const char *kv_layout; /* "paged" (NULL): shared pages; "slotted": a place for each request */
    int kv_pages; /* of the cache, 32 tokens each; 0: enough for all. With fewer, requests give way
                     to each other and are resumed, with the same text */
    const char *kv_type; /* "f16", "f32" or "q8_0", which takes half the room of f16 and rounds
                            more; NULL: as kv_f32 says */
    sooth_tree_drafter *tree_drafter; /* the drafter "user" in its other form; set at most one */
} sooth_engine_params;

SOOTH_API void sooth_engine_params_init_sized(sooth_engine_params *p, size_t size);
static inline void sooth_engine_params_init(sooth_engine_params *p) {
    sooth_engine_params_init_sized(p, sizeof *p);
}

SOOTH_API int sooth_engine_create(sooth_model *m, const sooth_engine_params *params,
                                  sooth_engine **out, sooth_error *err);
SOOTH_API void sooth_engine_free(sooth_engine *e); /* frees what requests are left, too */

/* --- generating --- */

typedef struct sooth_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY bans the token */
} sooth_bias;

/* A negative number in a field marked * means: what the model's authors recommend, else off (for
 * the temperature: 0.8). */
typedef struct sooth_params {
    size_t size;
    int max_tokens;       /* -1: until the model ends or the context is full */
    int has_seed;         /* 0: a random seed, reported in the result */
    uint64_t seed;        /* the same seed gives the same text, unless the result has a nonce */
    float temp;           /* *; 0 takes the likeliest token */
    int top_k;            /* *; 0: off */
    float top_p;          /* *; 1: off */
    float min_p;          /* *; 0: off */
    float repeat_penalty; /* *; 1: off */
    float presence_penalty, frequency_penalty;
    int repeat_last_n; /* window of the penalties; -1: whole context */
    const sooth_bias *bias;
    size_t n_bias;
    const char *const *stop; /* strings that end the text before them */
    size_t n_stop;
    int ignore_end;     /* go on after the model's end token */
    const char *spec;   /* who guesses, as in `sooth run --spec`, or "user"; NULL: nobody */
    int spec_length;    /* guesses per round; 0: as many as pay */
    const char *verify; /* "match" (the same text as without), "reject", "lenient=L"; NULL: match */
    int logprobs;       /* tell the logprob of each token and of this many likeliest; 0: none */
    const char *prediction; /* the text you expect, for spec "predict"; NULL: none */
    int priority;           /* higher ones run first and give way last; 0 is the usual */
    int has_nonce;          /* 0: a nonce is chosen where one is needed; see sooth_result.nonce */
    uint64_t nonce;
} sooth_params;

SOOTH_API void sooth_params_init_sized(sooth_params *p, size_t size);
static inline void sooth_params_init(sooth_params *p) { sooth_params_init_sized(p, sizeof *p); }

typedef struct sooth_message {
    const char *role; /* "system", "user", "assistant" */
    const char *content;
} sooth_message;

/* What a text took. */
typedef struct sooth_timings {
    int prompt_n, predicted_n;
    double prompt_ms, predicted_ms;
    int rounds;                    /* passes of the model that decided tokens */
    int draft_n, draft_n_accepted; /* guesses that went into a pass, that stand in the answer */
    int tested_n; /* guesses whose test ran: none behind the first wrong one or the answer's end */
    double draft_ms, verify_ms; /* drafting; the model's passes over those rounds */
} sooth_timings;

/* What guessing gained; negative where nothing was counted. docs/speculation.md defines each. */
typedef struct sooth_metrics {
    double tokens_per_pass; /* tokens of the answer, an end token included, per round; plain: 1 */
    double mean_accepted;   /* accepted guesses per round */
    double alpha;           /* accepted of the tested guesses */
    double acceptance_rate; /* accepted of all guesses */
    double round_rate;      /* mean of accepted/k over the rounds that asked for k guesses */
} sooth_metrics;

typedef enum sooth_finish {
    SOOTH_FINISH_NONE = 0,
    SOOTH_FINISH_STOP = 1,      /* the model's end token or a stop string */
    SOOTH_FINISH_LENGTH = 2,    /* max_tokens, or the context is full */
    SOOTH_FINISH_CANCELLED = 3, /* a callback said so */
    SOOTH_FINISH_ERROR = 4
} sooth_finish;

/* A token and the logarithm of its probability by the model itself, before bias, penalties,
 * temperature and cuts. The same bits with and without speculation. */
typedef struct sooth_logprob {
    int32_t token;
    float logprob;
} sooth_logprob;

/* One token, or the end of the text (token -1, finish set). */
typedef struct sooth_event {
    size_t size;
    int32_t token;
    const char *text; /* whole UTF-8 characters, possibly none; NUL-terminated; valid in the call */
    size_t text_len;
    sooth_finish finish;
    int origin; /* 0: plain, 1: a guess that stood, 2: a correction, 3: after all guesses stood */
    /* With params.logprobs: */
    float logprob;            /* of the token */
    const sooth_logprob *top; /* the likeliest tokens in its place, best first; NULL: none */
    size_t n_top;
    /* With the end of the text, else NULL: */
    const sooth_timings *timings;
    const sooth_metrics *metrics;
} sooth_event;

/* Return 0 to go on, anything else to cancel. */
typedef int sooth_event_fn(void *user, const sooth_event *ev);

typedef struct sooth_result {
    size_t size;
    char *text; /* NUL-terminated; may hold further NULs */
    size_t text_len;
    int32_t *tokens; /* without an end token */
    size_t n_tokens;
    sooth_finish finish;
    uint64_t seed;
    sooth_timings timings;
    float *logprobs;    /* [n_tokens]; NULL: none wanted */
    sooth_logprob *top; /* [n_tokens][n_top] */
    size_t n_top;
    sooth_metrics metrics;
    /* With verify "reject" or "lenient=L" above temperature 0 the text depends on the seed and on a
     * nonce of at most 53 bits, or a seed used twice would bias it. Where guesses depend on the
     * request alone (spec_length above 0, and a drafter that learns from no other request) the
     * nonce is a hash of the request: the same request gives the same text. Otherwise it is new
     * each time. Seed and nonce in the params of an equal request replay the text, as far as its
     * guesses come out the same: for debugging, not for sampling. */
    int has_nonce; /* 0: the seed alone decides */
    uint64_t nonce;
} sooth_result;

SOOTH_API void sooth_result_init_sized(sooth_result *r, size_t size);
static inline void sooth_result_init(sooth_result *r) { sooth_result_init_sized(r, sizeof *r); }
SOOTH_API void sooth_result_deinit(sooth_result *r); /* frees what it points to */

/* Continues the text as it is. params, on_event and result may be NULL; result must be initialised.
 * A cancelled text is no error: result.finish tells. */
SOOTH_API int sooth_generate(sooth_engine *e, const char *prompt, const sooth_params *params,
                             sooth_event_fn *on_event, void *user, sooth_result *result,
                             sooth_error *err);
/* Answers a conversation in the model's own chat format. */
SOOTH_API int sooth_chat(sooth_engine *e, const sooth_message *messages, size_t n_messages,
                         const sooth_params *params, sooth_event_fn *on_event, void *user,
                         sooth_result *result, sooth_error *err);

/* --- many requests at once --- */

typedef struct sooth_request sooth_request;

/* Enqueues; the callback is called from sooth_step. Exactly one of prompt and messages is set. */
SOOTH_API int sooth_submit(sooth_engine *e, const char *prompt, const sooth_message *messages,
                           size_t n_messages, const sooth_params *params, sooth_event_fn *on_event,
                           void *user, sooth_request **out, sooth_error *err);
/* One pass over all running requests. 1: more to do, 0: nothing left, negative: it failed. */
SOOTH_API int sooth_step(sooth_engine *e, sooth_error *err);
SOOTH_API sooth_finish sooth_request_finish(const sooth_request *r);
/* What there is so far; SOOTH_E… when the request ended with an error. */
SOOTH_API int sooth_request_result(const sooth_request *r, sooth_result *result, sooth_error *err);
SOOTH_API void sooth_request_free(sooth_request *r); /* NULL is fine; a running one is cancelled */

#ifdef __cplusplus
}
#endif

#endif
