/* Logits to a token: bias, penalties, temperature, top-k, top-p, min-p, in that order, then a draw.
 *
 * The draw is argmax(logit/T + Gumbel noise keyed by seed and position) over the tokens left: the
 * same distribution as sampling from the softmax, and the same token for the same seed whatever ran
 * beside it. Temperature 0 is the argmax, lowest id on ties. Pure functions over scratch memory
 * that the caller owns; no models, no KV, any thread with its own sampler. */
#ifndef SO_SAMPLE_SAMPLE_H
#define SO_SAMPLE_SAMPLE_H

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
    uint32_t choice;
} so_sample_params;

void so_sample_defaults(so_sample_params *p);
/* Ranges; the message names the flag. */
int so_sample_check(const so_sample_params *p, int n_vocab, so_err *err);

typedef struct so_sampler so_sampler;
so_sampler *so_sampler_create(int n_vocab);
/* For tests: at a level of sample/noise.h instead of the one in use. */
struct so_noise_fns;
so_sampler *so_sampler_create_as(int n_vocab, const struct so_noise_fns *level);
/* For rows that have logits for some tokens alone: place i stands for token names[i], ascending,
 * the caller's array of n_vocab. What comes back is places still; noise goes by names, so the place
 * is that of the token which a row of the whole vocabulary would give, its other tokens at −∞. Bias
 * and penalties have no place in such a row. */
void so_sampler_set_names(so_sampler *s, const int32_t *names);
/* The last place of n ascending names whose name is at most that; 0 where none is. */
int32_t so_sample_place(const int32_t *names, int n, int32_t name);
void so_sampler_free(so_sampler *s);

/* The context a position is sampled in: everything before it. Repetition looks at prompt and
 * output, presence and frequency at the output only. */
typedef struct so_sample_context {
    const int32_t *tokens;
    int n_tokens, n_prompt;
} so_sample_context;

/* Draws the token of position ctx->n_tokens. SO_EINVAL when no logit is finite. */
int so_sample_token(so_sampler *s, const so_sample_params *p, const float *logits,
                    const so_sample_context *ctx, int32_t *out, so_err *err);
/* The same token, and by how much its score, noise and all, is above that of the next one, at most
 * SO_SAMPLE_LEAD_MAX: by how much another row may differ and still give this token. */
enum { SO_SAMPLE_LEAD_MAX = 3 };
int so_sample_token_lead(so_sampler *s, const so_sample_params *p, const float *logits,
                         const so_sample_context *ctx, int32_t *out, double *lead, so_err *err);
/* The whole distribution of that position after all transforms, probs[n_vocab]: what
 * so_sample_token draws from, up to rounding. Temperature 0 is a point mass. */
int so_sample_distribution(so_sampler *s, const so_sample_params *p, const float *logits,
                           const so_sample_context *ctx, float *probs, so_err *err);
/* The same up to a common factor, for less: weights. */
int so_sample_weights(so_sampler *s, const so_sample_params *p, const float *logits,
                      const so_sample_context *ctx, float *weights, so_err *err);
/* The logits after bias and penalties, before temperature and cuts, out[n_vocab]; out may be
 * logits: what `lenient` compares at temperature 0. */
int so_sample_adjusted(so_sampler *s, const so_sample_params *p, const float *logits,
                       const so_sample_context *ctx, float *out, so_err *err);
/* True where the token is the argmax of the row as it is: temperature 0, no bias, no penalty. */
bool so_sample_is_argmax(const so_sample_params *p);
/* The index at which the running sum of weights passes u · total, u in (0,1): never one of weight
 * 0. −1 when there is no mass. */
int32_t so_sample_pick(const float *weights, int n, double u);
/* The Gumbel noise of one token at one position. */
double so_sample_noise(const so_sample_params *p, int position, int32_t token);
/* log-softmax of one token before any transform. */
double so_sample_logprob(const float *logits, int n_vocab, int32_t token);
/* The chance that a softmax gives to a token, to a few parts in ten thousand and in a tenth of the
 * time: for plans, never for a token. No logit is NaN or +∞. */
float so_sample_chance(so_sampler *s, const float *logits, int32_t token);

/* A token and its log-softmax, rounded once from double; never infinite. */
typedef struct so_logprob {
    int32_t token;
    float logprob;
} so_logprob;

enum { SO_LOGPROBS_MAX = 20 };

/* out[0]: the token itself; out[1 … n_top]: the likeliest tokens before any transform, best first,
 * lower id first on ties. n_top is at most n_vocab. A function of the row alone, to the bit. */
void so_sample_logprobs(so_sampler *s, const float *logits, int32_t token, int n_top,
                        so_logprob *out);

#endif
