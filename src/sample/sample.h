/* Logits to a token: bias, penalties, temperature, top-k, top-p and min-p, in that order, then
 * sampling.
 *
 * The token is argmax(logit/T + Gumbel noise) over the tokens that are left, with noise keyed by
 * (seed, choice, position). This has the same distribution as sampling from the softmax, and for
 * one seed it gives the same token in any batch. Temperature 0 is the argmax, lowest id on ties.
 *
 * Pure functions over scratch memory that the caller owns (so_sampler). No models, no KV cache. Any
 * thread, with its own sampler. */
#ifndef SO_SAMPLE_SAMPLE_H
#define SO_SAMPLE_SAMPLE_H

#include "backend/backend.h"
#include "base/err.h"
#include "base/rng.h"

typedef struct so_bias {
    int32_t token;
    float bias;
} so_bias;

typedef struct so_sample_params {
    float temp;
    int top_k;                                                 /* 0: off */
    float top_p, min_p;                                        /* 1 and 0: off */
    float repeat_penalty, presence_penalty, frequency_penalty; /* 1, 0, 0: off */
    int repeat_last_n;                                         /* −1: whole context; 0: off */
    const so_bias *bias;
    int n_bias;
    uint64_t seed;
    uint32_t choice; /* see so_rng_key */
} so_sample_params;

void so_sample_defaults(so_sample_params *p);
/* Checks all ranges. The message names the command line option. */
int so_sample_check(const so_sample_params *p, int n_vocab, so_err *err);

typedef struct so_sampler so_sampler;
so_sampler *so_sampler_create(int n_vocab);
/* For tests: uses the given CPU level of sample/noise.h instead of the one in use. */
struct so_noise_fns;
so_sampler *so_sampler_create_at_level(int n_vocab, const struct so_noise_fns *level);
/* For draft models with a vocabulary subset: entry i of a row is the logit of token subset[i].
 * subset: ascending, [n_vocab of the sampler], owned by the caller, must outlive the sampler.
 * Results are indices into the row. Noise is keyed by token id, so the result is the index of the
 * token that a row of the whole vocabulary would give with −∞ for all other tokens. Bias and
 * penalties must be off. */
void so_sampler_set_subset(so_sampler *s, const int32_t *subset);
/* The last index i with subset[i] ≤ token, of n ascending ids; 0 if there is none. */
int32_t so_sample_subset_index(const int32_t *subset, int n, int32_t token);
void so_sampler_free(so_sampler *s);

/* The tokens before the position to be sampled. The repetition penalty applies to prompt and
 * output, the presence and frequency penalties to the output only. */
typedef struct so_sample_context {
    const int32_t *tokens;
    int n_tokens, n_prompt;
} so_sample_context;

/* Samples the token of position ctx->n_tokens. SO_EINVAL if no logit is finite. */
int so_sample_token(so_sampler *s, const so_sample_params *p, const float *logits,
                    const so_sample_context *ctx, int32_t *out, so_err *err);
/* As so_sample_token. *lead: the winner's score (with noise) minus the second best, at most
 * SO_SAMPLE_LEAD_MAX. Another row gives the same token if no score, relative to the winner's, rises
 * by *lead or more. */
enum { SO_SAMPLE_LEAD_MAX = 3 };
int so_sample_token_lead(so_sampler *s, const so_sample_params *p, const float *logits,
                         const so_sample_context *ctx, int32_t *out, double *lead, so_err *err);
/* The k indices with the largest scores, best first, lower index first on ties, and the scores: logit
 * after bias and penalties at temperature 0, with noise above. The first is the token of
 * so_sample_token; the others would follow if the ones before were banned after the cuts. *n: their
 * number, less than k if fewer tokens are left. k from 1 to SO_SAMPLE_TOP_MAX. */
enum { SO_SAMPLE_TOP_MAX = 64 };
typedef struct so_scored {
    double score;
    int32_t id;
} so_scored;
int so_sample_top(so_sampler *s, const so_sample_params *p, const float *logits,
                  const so_sample_context *ctx, int k, so_scored *out, int *n, so_err *err);
/* The distribution from which so_sample_token samples, after all transforms, up to rounding:
 * probs[n_vocab]. Temperature 0 is a point mass. */
int so_sample_distribution(so_sampler *s, const so_sample_params *p, const float *logits,
                           const so_sample_context *ctx, float *probs, so_err *err);
/* The same up to a common factor, which is cheaper: weights[n_vocab]. */
int so_sample_weights(so_sampler *s, const so_sample_params *p, const float *logits,
                      const so_sample_context *ctx, float *weights, so_err *err);
/* The logits after bias and penalties, before temperature, top-k, top-p and min-p: out[n_vocab], may
 * be `logits`. Input of `lenient` at temperature 0. */
int so_sample_adjusted(so_sampler *s, const so_sample_params *p, const float *logits,
                       const so_sample_context *ctx, float *out, so_err *err);
/* True if the token is the argmax of the unchanged row: temperature 0, no bias, no penalty. */
bool so_sample_is_argmax(const so_sample_params *p);
/* True if a backend can sample with these parameters (SO_OP_SAMPLE): no bias, no penalty. *row: what
 * it needs to sample the token of `position`. The result is so_sample_token's, or unknown. */
bool so_sample_on_device(const so_sample_params *p, int position, so_sample_row *row);
/* Whether top-k, top-p or min-p may drop tokens. */
bool so_sample_has_cuts(const so_sample_params *p, int n_vocab);
/* A lower bound of the probability of the guess that `r` is the answer for (so_sample_row.guess);
 * the parameters have no cuts. */
double so_sample_prob_at_least(const so_sample_params *p, const so_sample_result *r);
/* The index at which the running sum of weights exceeds u · total, u in (0,1). Never an index with
 * weight 0. −1 if the total is 0. */
int32_t so_sample_pick(const float *weights, int n, double u);
/* The Gumbel noise of a token at a position. */
double so_sample_noise(const so_sample_params *p, int position, int32_t token);
/* The log-softmax of a token before any transform. */
double so_sample_logprob(const float *logits, int n_vocab, int32_t token);
/* The softmax probability of a token, with a relative error of a few 1e-4 and in a tenth of the
 * time of the exact one. For planning, never for choosing a token. No logit may be NaN or +∞. */
float so_sample_prob_estimate(so_sampler *s, const float *logits, int32_t token);

/* A token and its log-softmax, computed in double and rounded once; never infinite. */
typedef struct so_logprob {
    int32_t token;
    float logprob;
} so_logprob;

enum { SO_LOGPROBS_MAX = 20 };

/* out[0]: `token`. out[1 … n_top]: the most likely tokens before any transform, best first, lower
 * id first on ties. n_top ≤ n_vocab. The bits depend only on the row. */
void so_sample_logprobs(so_sampler *s, const float *logits, int32_t token, int n_top,
                        so_logprob *out);

/* The k likeliest tokens for beam search, with their log-probabilities in double: best first, lower
 * id first on ties. Returns their number, at most k and n_vocab. Bias is added after the softmax,
 * without normalising again, as Hugging Face's processors do in beam search; tokens at −∞ are left
 * out. Everything else in *p must be off. */
int so_sample_continuations(so_sampler *s, const so_sample_params *p, const float *logits, int k,
                            so_scored *out);

#endif
