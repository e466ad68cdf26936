/* sooth: inference of language models with lossless speculative decoding. This is the only public
 * header; it is valid C11 and C++.
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
 * There are two main objects. A model holds weights, tokenizer and chat template; it never changes
 * after loading. An engine holds a KV cache and the requests that run in it. Link with -lsooth
 * (pkg-config sooth).
 *
 * Errors. A function that can fail returns SOOTH_OK or a negative code. On failure it fills *err
 * with the code and a message that names the object, the value and the remedy, and leaves its other
 * outputs as they were. err may be NULL.
 *
 * Memory. The caller owns what a function creates and frees it with the matching function
 * (sooth_x_create or sooth_x_load: sooth_x_free; sooth_x_init: sooth_x_deinit). Strings and structs
 * that are passed in are copied and need not outlive the call. Free an engine before its model. An
 * engine frees the requests that are left in it.
 *
 * Threads. A model and its engines share one lock. Every function may be called from any thread;
 * calls on the same model or its engines run one at a time, calls on different models run in
 * parallel. A free function must be the last call on its object. Callbacks and drafters run on the
 * thread that is inside sooth_step, sooth_generate or sooth_chat of their engine, with the lock
 * held: they must not call functions on the same model or its engines, or they deadlock. If several
 * threads step one engine, a request's callback may run on any of them.
 *
 * Versions. Every struct that may grow begins with its size, which its _init function sets. A
 * program that was built with an older header keeps working with a newer library. */
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

/* Version of the loaded library, for example "0.1.0"; a static string. It may be newer than the
 * header's SOOTH_VERSION_MAJOR and _MINOR. */
SOOTH_API const char *sooth_version(void);

/* --- errors --- */

enum {
    SOOTH_OK = 0,
    SOOTH_ENOMEM = -1,       /* out of memory */
    SOOTH_EIO = -2,          /* reading or writing failed */
    SOOTH_EFORMAT = -3,      /* malformed data, for example a damaged model file */
    SOOTH_EUNSUPPORTED = -4, /* valid, but not supported here */
    SOOTH_ERANGE = -5,       /* a number is out of range */
    SOOTH_EINVAL = -6,       /* an argument is wrong */
    SOOTH_ENOTFOUND = -7,    /* no such file, or the model lacks a part such as a chat template */
    SOOTH_ELIMIT = -8,       /* a limit is exceeded, for example the context */
    SOOTH_ECANCELLED = -9,
    SOOTH_EMISMATCH = -10 /* two parts do not fit together, for example draft and target */
};

typedef struct sooth_error {
    int code;          /* one of SOOTH_E… */
    char message[512]; /* one sentence in UTF-8, NUL-terminated */
} sooth_error;

/* --- models --- */

typedef struct sooth_model sooth_model;

typedef struct sooth_model_params {
    size_t size;
    int n_threads;         /* at most 256; 0: one per core */
    const char *cpu_level; /* NULL or "auto", "scalar", "avx2", "avxvnni", "avx512", "amx" */
    const char *quantize;  /* quantise weights to this type while loading ("Q8_0", …); NULL: no */
    void (*progress)(void *user, double done); /* called while loading, done from 0 to 1; or NULL */
    void *progress_user;
    const char
        *device; /* "cpu", "cuda", "cuda:N"; NULL or "auto": a GPU if there is one and the model
                           fits, else the CPU. CPU and GPU give different bits */
    const char *draft_device; /* the same for draft models; NULL: as the model */
    int draft_cores; /* cores for draft models alone, the last ones that the process may use; the
                        model has the others. 0: they share all. For spec "async(model)", which
                        drafts while the model verifies, and excludes draft_device:
                            params.draft_cores = 1;        (of the model)
                            params.spec = "async(model)";  (of the request) */
} sooth_model_params;

/* Fills *p with defaults. Call it before setting fields. */
SOOTH_API void sooth_model_params_init_sized(sooth_model_params *p, size_t size);
static inline void sooth_model_params_init(sooth_model_params *p) {
    sooth_model_params_init_sized(p, sizeof *p);
}

/* Loads a model and stores it in *out; the caller frees it with sooth_model_free. path is a GGUF
 * file (the first one of a split model) or a Hugging Face folder. params may be NULL for defaults.
 * params->progress runs on the calling thread.
 * Fails with ENOTFOUND, EIO, EFORMAT, EUNSUPPORTED or ENOMEM for the file, EINVAL or ERANGE for
 * params. */
SOOTH_API int sooth_model_load(const char *path, const sooth_model_params *params,
                               sooth_model **out, sooth_error *err);
/* Frees a model; NULL is allowed. All its engines must have been freed. */
SOOTH_API void sooth_model_free(sooth_model *m);

/* Properties of a model. The string belongs to the model. */
SOOTH_API const char *sooth_model_arch(const sooth_model *m); /* "llama", "qwen2", … */
SOOTH_API int64_t sooth_model_n_params(const sooth_model *m);
SOOTH_API int sooth_model_n_vocab(const sooth_model *m);
SOOTH_API int sooth_model_n_ctx(const sooth_model *m);    /* longest context, in tokens */
SOOTH_API int sooth_model_has_chat(const sooth_model *m); /* 1: sooth_chat works; 0: no template */

/* Convert text to token ids and back. *n is set to the length of the whole result (ids or bytes).
 * At most cap of them are written; call with cap 0 to learn the length, then ids or text may be
 * NULL.
 *   add_special     add the tokens that the model wants around a text, such as BOS
 *   parse_special   control tokens that are spelled out in the text become their ids
 * Detokenised text is not NUL-terminated. sooth_detokenize fails with ERANGE for an id outside the
 * vocabulary. */
SOOTH_API int sooth_tokenize(const sooth_model *m, const char *text, size_t text_len,
                             int add_special, int parse_special, int32_t *ids, size_t cap,
                             size_t *n, sooth_error *err);
SOOTH_API int sooth_detokenize(const sooth_model *m, const int32_t *ids, size_t n_ids, char *text,
                               size_t cap, size_t *n, sooth_error *err);

/* --- engines --- */

typedef struct sooth_engine sooth_engine;

/* A drafter of the caller's own, for spec "user". It guesses the tokens that follow tokens[0 …
 * n_tokens): the first n_prompt are the prompt, the others the text so far. It writes at most `max`
 * ids to `out`, in order, and returns their number; a negative number means that it failed.
 *
 * The model verifies every guess. With verify "match" the text is the same as without guesses; they
 * only change how long it takes (see sooth_params.verify). If the drafter fails, returns more than
 * max, or returns an id outside the vocabulary, its guesses are ignored, a warning is logged to
 * standard error, and the request continues without them. */
typedef int sooth_drafter(void *user, const int32_t *tokens, int n_tokens, int n_prompt,
                          int32_t *out, int max);

/* The same for a tree of guesses, in which several tokens may compete for one position. ids[i]
 * follows the guess parents[i], which must have a smaller index, or the text itself if parents[i]
 * is -1:
 *
 *          the text                        i         0   1   2
 *          /      \                        ids[i]    A   B   C
 *         A        B                       parents   -1  -1   1
 *                  C
 *
 * Siblings are verified in order: put the likeliest first. Guesses are ignored with a warning, as
 * above, if a parent is invalid or a guess is deeper than max_depth. */
typedef struct sooth_draft {
    size_t size;
    const int32_t *tokens; /* [n_tokens] prompt and text so far; valid during the call */
    int n_tokens, n_prompt;
    int max;          /* maximum number of guesses */
    int max_depth;    /* maximum depth of a guess */
    int32_t *ids;     /* [max], to be filled */
    int32_t *parents; /* [max], to be filled; preset to a chain: i - 1 */
} sooth_draft;
/* Returns the number of guesses, or a negative number if it failed. */
typedef int sooth_tree_drafter(void *user, const sooth_draft *draft);

typedef struct sooth_engine_params {
    size_t size;
    int n_ctx;      /* maximum tokens of a request, prompt included; 0: the model's, up to 4096 */
    int n_parallel; /* maximum requests that run at once; further ones queue */
    int n_batch;    /* maximum prompt tokens in one pass; never changes the text */
    int kv_f32;     /* 1: KV cache in 32-bit floats, 0: 16-bit; ignored if kv_type is set */
    int max_draft;  /* maximum guesses in a row, from 1 to 64; 0: no speculation in this engine */
    const char *draft_model; /* file or folder, for the drafter "model"; NULL: the best draft that
                                is registered for this model, if one is installed */
    float draft_temp;        /* temperature of the draft model; negative: the request's */
    sooth_drafter *drafter;  /* the drafter "user"; NULL: none */
    void *drafter_user;      /* passed to drafter or tree_drafter */
    const char *kv_layout;   /* "paged" (NULL): requests share pages; "slotted": each request has a
                                fixed part of the cache */
    int kv_pages; /* size of the cache in pages of 32 tokens; 0: room for n_parallel requests of
                     n_ctx tokens. With fewer pages requests are preempted and resumed, with the
                     same text */
    const char *kv_type; /* "f16", "f32", "q8_0" or, on a GPU, "bf16"; q8_0 needs half the memory of
                            f16 and rounds more. NULL: kv_f32 decides */
    sooth_tree_drafter *tree_drafter; /* the drafter "user" as a tree; set this or drafter */
    const char *worker_key;           /* file with the key of draft workers, which specs name as in
                               "async(model,worker=tcp://HOST:PORT)"; NULL: workers of this host */
} sooth_engine_params;

/* Fills *p with defaults. Call it before setting fields. */
SOOTH_API void sooth_engine_params_init_sized(sooth_engine_params *p, size_t size);
static inline void sooth_engine_params_init(sooth_engine_params *p) {
    sooth_engine_params_init_sized(p, sizeof *p);
}

/* Creates an engine and stores it in *out; the caller frees it with sooth_engine_free. m must
 * outlive it. params may be NULL for defaults.
 * Fails with ERANGE or EINVAL for params, ELIMIT or ENOMEM for the cache, and as sooth_model_load
 * for a draft model that is named; EMISMATCH if that draft was made for another target. */
SOOTH_API int sooth_engine_create(sooth_model *m, const sooth_engine_params *params,
                                  sooth_engine **out, sooth_error *err);
/* Frees an engine and the requests that are left in it; NULL is allowed. */
SOOTH_API void sooth_engine_free(sooth_engine *e);

/* --- generating --- */

typedef struct sooth_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY bans the token */
} sooth_bias;

/* In a field marked with *, a negative number selects the value that the model's authors recommend.
 * If they recommend none, temp is 0.8 and the other fields marked with * are off. */
typedef struct sooth_params {
    size_t size;
    int max_tokens;       /* -1: until the model's end token or the end of the context */
    int has_seed;         /* 0: a random seed, which the result reports */
    uint64_t seed;        /* the same seed gives the same text, unless the result has a nonce */
    float temp;           /* *; 0: always the likeliest token (greedy) */
    int top_k;            /* *; 0: off */
    float top_p;          /* *; 1: off */
    float min_p;          /* *; 0: off */
    float repeat_penalty; /* *; 1: off */
    float presence_penalty, frequency_penalty;
    int repeat_last_n;      /* tokens that the penalties look back; -1: all */
    const sooth_bias *bias; /* [n_bias], at most 100000 */
    size_t n_bias;
    const char *const *stop; /* [n_stop], at most 64 strings; the text ends before the first one
                                that occurs in it */
    size_t n_stop;
    int ignore_end;     /* 1: continue after the model's end token */
    const char *spec;   /* drafters, in the syntax of `sooth run --spec`, or "user"; NULL: none */
    int spec_length;    /* guesses in a row per round; 0: the planner decides */
    const char *verify; /* "match" (NULL): the same text as without guesses; "reject": the same
                           distribution; "lenient=L", "typical=E": lossy, L and E in (0,1] */
    int logprobs;       /* from 1 to 20: report the logprob of each token and of this many likeliest
                           tokens; 0: none */
    const char *prediction; /* text that the caller expects, for spec "predict"; NULL: none */
    int priority;           /* higher ones run first and are preempted last; the default is 0 */
    int has_nonce;          /* 0: the engine chooses a nonce if it needs one; see sooth_result */
    uint64_t nonce;
    /* Beam search, by the rules of Hugging Face's generate (docs/beam.md). It does not sample: temp
     * must be 0 or negative, and there are no penalties. Its tokens are emitted at the end. */
    int beams;             /* hypotheses at a time, from 1 to 64; 0: no beam search */
    int n_best;            /* results in sooth_result.best, from 1 to beams; 0: 1 */
    double length_penalty; /* score: sum of logprobs / length^length_penalty; from -10 to 10; the
                              default is 1 */
    int early_stopping;    /* one of SOOTH_EARLY_STOPPING_… */
    int beam_candidates;   /* with a draft model: guesses at each step, at least beams; 0: twice */
} sooth_params;

enum {
    SOOTH_EARLY_STOPPING_FALSE = 0, /* end when no live hypothesis is likely to become better */
    SOOTH_EARLY_STOPPING_TRUE = 1,  /* end as soon as there are `beams` results */
    SOOTH_EARLY_STOPPING_NEVER = 2  /* end when no live hypothesis can become better */
};

/* Fills *p with defaults. Call it before setting fields. */
SOOTH_API void sooth_params_init_sized(sooth_params *p, size_t size);
static inline void sooth_params_init(sooth_params *p) { sooth_params_init_sized(p, sizeof *p); }

typedef struct sooth_message {
    const char *role;    /* "system", "user", "assistant"; UTF-8 */
    const char *content; /* UTF-8 */
} sooth_message;

/* Counts and times of one request. A round is one pass of the model that decides tokens of this
 * request. */
typedef struct sooth_timings {
    int prompt_n, predicted_n;      /* tokens of the prompt; of the answer */
    double prompt_ms, predicted_ms; /* admission to first token; first token to the end */
    int rounds;                     /* without speculation one per token */
    int draft_n, draft_n_accepted;  /* guesses in passes; those accepted into the answer */
    int tested_n; /* guesses that were verified: not those below a rejected guess, nor after the end
                     of the answer */
    double draft_ms, verify_ms; /* time in drafters; time of the model's passes in the rounds */
} sooth_timings;

/* Rates of speculation; negative if nothing was counted. src/engine/counts.c defines each;
 * docs/speculation.md has a table. */
typedef struct sooth_metrics {
    double tokens_per_pass; /* tokens of the answer, with an end token, per round; plain: 1 */
    double mean_accepted;   /* accepted guesses per round */
    double alpha;           /* accepted / tested guesses */
    double acceptance_rate; /* accepted / guesses in passes, tested or not */
    double round_rate;      /* mean of accepted/k over the rounds that asked for k guesses */
} sooth_metrics;

typedef enum sooth_finish {
    SOOTH_FINISH_NONE = 0,      /* still queued or running */
    SOOTH_FINISH_STOP = 1,      /* the model's end token or a stop string */
    SOOTH_FINISH_LENGTH = 2,    /* max_tokens, or the context is full */
    SOOTH_FINISH_CANCELLED = 3, /* a callback returned non-zero */
    SOOTH_FINISH_ERROR = 4      /* sooth_request_result returns the error */
} sooth_finish;

/* A token and the natural logarithm of its probability under the model itself: before bias,
 * penalties, temperature and cuts. Speculation does not change its bits. */
typedef struct sooth_logprob {
    int32_t token;
    float logprob;
} sooth_logprob;

/* One token, or the end of a request (token is -1 and finish is set). All pointers are valid only
 * during the callback. */
typedef struct sooth_event {
    size_t size;
    int32_t token;
    const char *text; /* whole UTF-8 characters, NUL-terminated; empty while a character is
                         incomplete or a stop string may have begun */
    size_t text_len;
    sooth_finish finish;
    int origin; /* 0: no guess was verified, 1: accepted guess, 2: correction of a rejected guess,
                   3: bonus token after all guesses were accepted */
    /* If params.logprobs was set: */
    float logprob;            /* of the token */
    const sooth_logprob *top; /* [n_top] likeliest tokens at this position, best first */
    size_t n_top;
    /* At the end of the request, else NULL: */
    const sooth_timings *timings;
    const sooth_metrics *metrics;
} sooth_event;

/* Returns 0 to continue; any other value cancels the request. */
typedef int sooth_event_fn(void *user, const sooth_event *ev);

/* One result of a beam search. */
typedef struct sooth_hypothesis {
    char *text; /* [text_len + 1], NUL-terminated */
    size_t text_len;
    int32_t *tokens; /* [n_tokens], without an end token */
    size_t n_tokens;
    double score, logprob; /* logprob: the sum, of which score is made with the length penalty */
    sooth_finish finish;   /* STOP or LENGTH */
} sooth_hypothesis;

typedef struct sooth_result {
    size_t size;
    char *text; /* [text_len + 1], NUL-terminated; it may contain further NULs */
    size_t text_len;
    int32_t *tokens; /* [n_tokens], without an end token */
    size_t n_tokens;
    sooth_finish finish;
    uint64_t seed;
    sooth_timings timings;
    float *logprobs;    /* [n_tokens]; NULL if params.logprobs was 0 */
    sooth_logprob *top; /* [n_tokens][n_top], best first */
    size_t n_top;
    sooth_metrics metrics;
    /* With any verify but "match", above temperature 0 the text depends on the seed and on a
     * nonce of at most 53 bits: with the seed alone, using a seed twice would bias the second text.
     * The nonce is a hash of the request, so that equal requests give equal texts, if the guesses
     * depend on nothing but the request: spec_length is above 0; the cache has room for the guesses
     * of all requests; and no drafter depends on other requests, on the caller or on the clock
     * (corpus, draft models that read the target's hidden states, user, async). Otherwise the nonce
     * is random. To replay a text, put its seed and nonce into the params of an equal request. The
     * texts are equal as long as the guesses are; replaying is meant for debugging, not for
     * sampling. */
    int has_nonce; /* 0: the text depends on the seed alone */
    uint64_t nonce;
    sooth_hypothesis *best; /* [n_best] of a beam search, best first: the first is `text` */
    size_t n_best;
    double
        hit_rate; /* of "async": rounds that found a draft that was made ahead / rounds that looked
                        for one; negative: none did */
} sooth_result;

/* Makes *r empty. Call it before r is first passed to a function. */
SOOTH_API void sooth_result_init_sized(sooth_result *r, size_t size);
static inline void sooth_result_init(sooth_result *r) { sooth_result_init_sized(r, sizeof *r); }
/* Frees what *r points to and makes it empty again. */
SOOTH_API void sooth_result_deinit(sooth_result *r);

/* Generates a continuation of `prompt` and returns when it is finished. The prompt is tokenized with
 * add_special and without parse_special (sooth_tokenize): control tokens that are spelled out in it
 * are plain text. It steps the whole engine, so requests that were submitted before make progress
 * too.
 *   params     NULL: defaults
 *   on_event   called for each token and at the end; NULL: not called
 *   result     receives the text; must be initialised, and its old content is freed; NULL: not
 *              wanted
 * If the callback cancels the request, that is not a failure: the function returns SOOTH_OK and
 * result->finish is SOOTH_FINISH_CANCELLED. Fails with EINVAL, ERANGE or ELIMIT for the prompt and
 * params, or with the error of the request. */
SOOTH_API int sooth_generate(sooth_engine *e, const char *prompt, const sooth_params *params,
                             sooth_event_fn *on_event, void *user, sooth_result *result,
                             sooth_error *err);
/* The same for a conversation, which is formatted by the model's chat template. Fails with
 * ENOTFOUND if the model has none. */
SOOTH_API int sooth_chat(sooth_engine *e, const sooth_message *messages, size_t n_messages,
                         const sooth_params *params, sooth_event_fn *on_event, void *user,
                         sooth_result *result, sooth_error *err);

/* --- many requests at once --- */

typedef struct sooth_request sooth_request;

/* Checks a request, queues it and stores it in *out; the caller frees it with sooth_request_free.
 * Set exactly one of prompt and messages. on_event may be NULL; it is called from sooth_step, never
 * from here. Fails as sooth_generate and sooth_chat do; then nothing is queued. */
SOOTH_API int sooth_submit(sooth_engine *e, const char *prompt, const sooth_message *messages,
                           size_t n_messages, const sooth_params *params, sooth_event_fn *on_event,
                           void *user, sooth_request **out, sooth_error *err);
/* Runs one pass over all running requests and calls their callbacks. Returns 1 if there is more to
 * do, 0 if no request is left, or a negative code if the pass failed: then every running request
 * has ended with that error. The error of a single request is returned by sooth_request_result. */
SOOTH_API int sooth_step(sooth_engine *e, sooth_error *err);
/* How the request ended; SOOTH_FINISH_NONE while it is queued or runs. */
SOOTH_API sooth_finish sooth_request_finish(const sooth_request *r);
/* Copies what the request has generated so far to *result, which must be initialised; its old
 * content is freed. If the request ended with an error, returns that error and leaves *result
 * unchanged. */
SOOTH_API int sooth_request_result(const sooth_request *r, sooth_result *result, sooth_error *err);
/* Frees a request; NULL is allowed. One that is queued or runs is dropped without a last event. */
SOOTH_API void sooth_request_free(sooth_request *r);

#ifdef __cplusplus
}
#endif

#endif
