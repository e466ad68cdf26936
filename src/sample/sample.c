/* Logits to a token, as sample.h states it. One row goes through these steps:
 *
 *   1. x = logits; NaN becomes −∞ (never chosen), +∞ the largest float (wins, as in an argmax)
 *   2. x += bias; repetition, presence and frequency penalties over the window
 *   3. temperature 0: the argmax of x, and no more. Else y = (x − max x)/T, so the best has y = 0
 *      and no temperature overflows; the support is every token with y > −∞
 *   4. top-k, then top-p of what is left, then min-p of what is left
 *   5. the token of the support with the largest y + noise, lowest id on ties
 *
 * Cuts look for the border, not for the order: tokens are counted in bins of 1/64 nat below the
 * best, whole bins above the border stay, and only the border's bin is taken in order, from a heap
 * of (y down, id up). Step 5 is exact and still looks at few tokens closely, because a bound on the
 * noise from its leading bits rules out almost all of them (see draw()).
 *
 * Refuses to allocate after creation and to keep state between calls. */
#include "sample/sample.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { N_BINS = 4096, BINS_PER_NAT = 64 };

struct so_sampler {
    int n_vocab;
    float *x;        /* [n_vocab] logits, then y */
    int32_t *ids;    /* [n_vocab] the support, n of them */
    int32_t *border; /* [n_vocab] the heap of a border bin */
    int32_t *seen,
        *wrote; /* [n_vocab] counts in the window: anywhere, in the output; zero at rest */
    int n;
    double weight[N_BINS];
};

void so_sample_defaults(so_sample_params *p) {
    *p = (so_sample_params){
        .temp = 0.8f, .top_p = 1, .repeat_penalty = 1, .repeat_last_n = 64, .seed = 0};
}

static int out_of_range(so_err *err, const char *flag, double value, const char *range) {
    return so_err_set(err, SO_ERANGE, "%s %g: must be %s", flag, value, range);
}

int so_sample_check(const so_sample_params *p, int n_vocab, so_err *err) {
    if (!(p->temp >= 0 && p->temp <= 100))
        return out_of_range(err, "--temp", p->temp, "from 0 to 100");
    if (p->top_k < 0)
        return out_of_range(err, "--top-k", p->top_k, "0 (off) or more");
    if (!(p->top_p >= 0 && p->top_p <= 1))
        return out_of_range(err, "--top-p", p->top_p, "from 0 to 1");
    if (!(p->min_p >= 0 && p->min_p <= 1))
        return out_of_range(err, "--min-p", p->min_p, "from 0 to 1");
    if (!(p->repeat_penalty >= 0.01f && p->repeat_penalty <= 100))
        return out_of_range(err, "--repeat-penalty", p->repeat_penalty, "from 0.01 to 100");
    if (!(p->presence_penalty >= -100 && p->presence_penalty <= 100))
        return out_of_range(err, "--presence-penalty", p->presence_penalty, "from -100 to 100");
    if (!(p->frequency_penalty >= -100 && p->frequency_penalty <= 100))
        return out_of_range(err, "--frequency-penalty", p->frequency_penalty, "from -100 to 100");
    if (p->repeat_last_n < -1)
        return out_of_range(err, "--repeat-last-n", p->repeat_last_n, "-1 (whole context) or more");
    for (int i = 0; i < p->n_bias; i++) {
        if (p->bias[i].token < 0 || p->bias[i].token >= n_vocab)
            return so_err_set(err, SO_ERANGE,
                              "--logit-bias token %d: the vocabulary has ids 0 to %d",
                              p->bias[i].token, n_vocab - 1);
        if (isnan(p->bias[i].bias) || p->bias[i].bias > FLT_MAX)
            return so_err_set(err, SO_ERANGE,
                              "--logit-bias of token %d: must be a finite number or -inf",
                              p->bias[i].token);
    }
    return SO_OK;
}

so_sampler *so_sampler_create(int n_vocab) {
    SO_ASSERT_OP(n_vocab, >, 0);
    so_sampler *s = SO_NEW(so_sampler);
    s->n_vocab = n_vocab;
    s->x = SO_NEW_N(float, n_vocab);
    s->ids = SO_NEW_N(int32_t, n_vocab);
    s->border = SO_NEW_N(int32_t, n_vocab);
    s->seen = SO_NEW_N(int32_t, n_vocab);
    s->wrote = SO_NEW_N(int32_t, n_vocab);
    return s;
}

void so_sampler_free(so_sampler *s) {
    if (!s)
        return;
    free(s->x);
    free(s->ids);
    free(s->border);
    free(s->seen);
    free(s->wrote);
    free(s);
}

/* --- steps 1 and 2 --- */

static float cleaned(float v) { return isnan(v) ? -INFINITY : v > FLT_MAX ? FLT_MAX : v; }

static int load_row(so_sampler *s, const float *logits, so_err *err) {
    bool all = true, any = false;
    for (int i = 0; i < s->n_vocab; i++)
        all &= fabsf(logits[i]) <= FLT_MAX;
    if (all) { /* the usual row */
        memcpy(s->x, logits, (size_t)s->n_vocab * sizeof *logits);
        return SO_OK;
    }
    for (int i = 0; i < s->n_vocab; i++) {
        any |= isfinite(logits[i]) != 0;
        s->x[i] = cleaned(logits[i]);
    }
    if (!any)
        return so_err_set(err, SO_EINVAL,
                          "the model gave no finite logit (its weights or the file are damaged)");
    return SO_OK;
}

static void penalize(so_sampler *s, const so_sample_params *p, const so_sample_context *ctx) {
    int window = p->repeat_last_n < 0 ? ctx->n_tokens : SO_MIN(p->repeat_last_n, ctx->n_tokens);
    bool off = p->repeat_penalty == 1 && p->presence_penalty == 0 && p->frequency_penalty == 0;
    if (off || window == 0)
        return;
    int first = ctx->n_tokens - window;
    for (int i = first; i < ctx->n_tokens; i++) {
        SO_ASSERT(ctx->tokens[i] >= 0 && ctx->tokens[i] < s->n_vocab);
        s->seen[ctx->tokens[i]]++;
        s->wrote[ctx->tokens[i]] += i >= ctx->n_prompt;
    }
    for (int i = first; i < ctx->n_tokens; i++) {
        int32_t id = ctx->tokens[i];
        if (!s->seen[id])
            continue; /* done at its first place */
        float v = s->x[id] > 0 ? s->x[id] / p->repeat_penalty : s->x[id] * p->repeat_penalty;
        if (s->wrote[id])
            v -= p->presence_penalty + p->frequency_penalty * (float)s->wrote[id];
        s->x[id] = cleaned(v);
        s->seen[id] = s->wrote[id] = 0;
    }
}

/* −1 when every token is at −∞. */
static int32_t argmax(const so_sampler *s) {
    int32_t best = -1;
    float top = -INFINITY;
    for (int i = 0; i < s->n_vocab; i++)
        if (s->x[i] > top) {
            top = s->x[i];
            best = i;
        }
    return best;
}

/* Steps 1 and 2; *best is the argmax. */
static int prepare(so_sampler *s, const so_sample_params *p, const float *logits,
                   const so_sample_context *ctx, int32_t *best, so_err *err) {
    int rc = load_row(s, logits, err);
    if (rc != SO_OK)
        return rc;
    for (int i = 0; i < p->n_bias; i++)
        s->x[p->bias[i].token] = cleaned(s->x[p->bias[i].token] + p->bias[i].bias);
    penalize(s, p, ctx);
    *best = argmax(s);
    if (*best < 0)
        return so_err_set(err, SO_EINVAL, "--logit-bias has banned every token");
    return SO_OK;
}

/* --- steps 3 and 4 --- */

static void scale(so_sampler *s, float temp, int32_t best) {
    double top = s->x[best], inv = 1 / (double)temp;
    int n = 0;
    for (int i = 0; i < s->n_vocab; i++) {
        float y = (float)(((double)s->x[i] - top) * inv);
        s->x[i] = y;
        s->ids[n] = i;
        n += y > -INFINITY;
    }
    s->n = n;
}

static int bin_of(float y) {
    float b = -y * BINS_PER_NAT;
    return b < N_BINS - 1 ? (int)b : N_BINS - 1;
}

static bool comes_before(const so_sampler *s, int32_t a, int32_t b) {
    return s->x[a] > s->x[b] || (s->x[a] == s->x[b] && a < b);
}

static void sift_down(so_sampler *s, int at, int n) {
    int32_t *h = s->border;
    for (;;) {
        int child = 2 * at + 1;
        if (child >= n)
            return;
        if (child + 1 < n && comes_before(s, h[child + 1], h[child]))
            child++;
        if (!comes_before(s, h[child], h[at]))
            return;
        int32_t t = h[at];
        h[at] = h[child];
        h[child] = t;
        at = child;
    }
}

/* Keeps the tokens, in order, up to and including the one at which their weights reach `target`.
 * by_mass: a token weighs exp(y); else each weighs 1. At least one token stays. */
static void cut(so_sampler *s, double target, bool by_mass) {
    double sum = 0;
    int last = 0, n_kept = 0, n_border = 0;
    while (last < N_BINS - 1 && sum + s->weight[last] < target)
        sum += s->weight[last++];
    for (int i = 0; i < s->n; i++) {
        int bin = bin_of(s->x[s->ids[i]]);
        if (bin < last)
            s->ids[n_kept++] = s->ids[i];
        else if (bin == last)
            s->border[n_border++] = s->ids[i];
    }
    for (int i = n_border / 2; i-- > 0;)
        sift_down(s, i, n_border);
    while (n_border > 0 && (sum < target || n_kept == 0)) {
        int32_t id = s->border[0];
        s->ids[n_kept++] = id;
        sum += by_mass ? exp((double)s->x[id]) : 1;
        s->border[0] = s->border[--n_border];
        sift_down(s, 0, n_border);
    }
    s->n = n_kept;
}

static void cut_top_k(so_sampler *s, int k) {
    memset(s->weight, 0, sizeof s->weight);
    for (int i = 0; i < s->n; i++)
        s->weight[bin_of(s->x[s->ids[i]])] += 1;
    cut(s, k, false);
}

static void cut_top_p(so_sampler *s, double top_p) {
    double total = 0;
    memset(s->weight, 0, sizeof s->weight);
    for (int i = 0; i < s->n; i++) {
        float y = s->x[s->ids[i]];
        s->weight[bin_of(y)] += exp((double)y);
    }
    for (int i = 0; i < N_BINS; i++)
        total += s->weight[i];
    cut(s, top_p * total, true);
}

static void cut_min_p(so_sampler *s, double min_p) {
    double least = log(min_p); /* p ≥ min_p · p_best, and the best has y = 0 */
    int n_kept = 0;
    for (int i = 0; i < s->n; i++)
        if ((double)s->x[s->ids[i]] >= least)
            s->ids[n_kept++] = s->ids[i];
    s->n = n_kept;
}

static void transform(so_sampler *s, const so_sample_params *p, int32_t best) {
    scale(s, p->temp, best);
    if (p->top_k > 0 && p->top_k < s->n)
        cut_top_k(s, p->top_k);
    if (p->top_p < 1)
        cut_top_p(s, p->top_p);
    if (p->min_p > 0)
        cut_min_p(s, p->min_p);
}

/* --- step 5 --- */

static so_rng_key token_key(const so_sample_params *p, int position) {
    return (so_rng_key){.seed = p->seed,
                        .choice = p->choice,
                        .position = (uint32_t)position,
                        .purpose = SO_RNG_TOKEN};
}

static double gumbel(uint32_t word) { return -log(-log(((double)word + 0.5) * 0x1p-32)); }

double so_sample_noise(const so_sample_params *p, int position, int32_t token) {
    so_rng_key key = token_key(p, position);
    uint32_t w[4];
    so_rng_block(&key, (uint32_t)token / 4, w);
    return gumbel(w[token % 4]);
}

/* The argmax of y + noise. With 1 − u = (v + ½)/2³², v = 2³² − 1 − word, and −log u ≥ 1 − u, the
 * noise is at most −log(1 − u) ≤ ln 2 · (1 + clz(v)), and never above 22.88. A token whose bound
 * stays below the best score so far cannot win, and neither logarithm is taken for it. The margin
 * covers rounding; equal scores are compared, so ties still go to the lowest id. */
static int32_t draw(const so_sampler *s, const so_sample_params *p, int position, int32_t best) {
    static const double ln2 = 0.6931471805599453, most = 22.88, margin = 1e-6;
    so_rng_key key = token_key(p, position);
    uint32_t w[4], block = UINT32_MAX;
    int32_t winner = best;
    double top = (double)s->x[best] + so_sample_noise(p, position, best);
    for (int i = 0; i < s->n; i++) {
        int32_t id = s->ids[i];
        double y = s->x[id];
        if (y + most < top || id == best)
            continue;
        if ((uint32_t)id / 4 != block) {
            block = (uint32_t)id / 4;
            so_rng_block(&key, block, w);
        }
        uint32_t word = w[id % 4], v = ~word;
        int zeros = v ? __builtin_clz(v) : 32;
        if (y + ln2 * (1 + zeros) + margin < top)
            continue;
        double score = y + gumbel(word);
        if (score > top || (score == top && id < winner)) {
            top = score;
            winner = id;
        }
    }
    return winner;
}

int so_sample_token(so_sampler *s, const so_sample_params *p, const float *logits,
                    const so_sample_context *ctx, int32_t *out, so_err *err) {
    int32_t best;
    int rc = prepare(s, p, logits, ctx, &best, err);
    if (rc != SO_OK)
        return rc;
    if (p->temp == 0) {
        *out = best;
        return SO_OK;
    }
    transform(s, p, best);
    *out = draw(s, p, ctx->n_tokens, best);
    return SO_OK;
}

int so_sample_distribution(so_sampler *s, const so_sample_params *p, const float *logits,
                           const so_sample_context *ctx, float *probs, so_err *err) {
    int32_t best;
    int rc = prepare(s, p, logits, ctx, &best, err);
    if (rc != SO_OK)
        return rc;
    memset(probs, 0, (size_t)s->n_vocab * sizeof *probs);
    if (p->temp == 0) {
        probs[best] = 1;
        return SO_OK;
    }
    transform(s, p, best);
    double total = 0;
    for (int i = 0; i < s->n; i++)
        total += exp((double)s->x[s->ids[i]]);
    for (int i = 0; i < s->n; i++)
        probs[s->ids[i]] = (float)(exp((double)s->x[s->ids[i]]) / total);
    return SO_OK;
}

int so_sample_adjusted(so_sampler *s, const so_sample_params *p, const float *logits,
                       const so_sample_context *ctx, float *out, so_err *err) {
    int32_t best;
    int rc = prepare(s, p, logits, ctx, &best, err);
    if (rc == SO_OK)
        memcpy(out, s->x, (size_t)s->n_vocab * sizeof *out);
    return rc;
}

bool so_sample_is_argmax(const so_sample_params *p) {
    bool penalties =
        p->repeat_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0;
    return p->temp == 0 && p->n_bias == 0 && !(penalties && p->repeat_last_n != 0);
}

int32_t so_sample_pick(const float *weights, int n, double u) {
    double total = 0, sum = 0;
    int32_t last = -1;
    for (int i = 0; i < n; i++)
        total += (double)weights[i];
    for (int32_t i = 0; i < n; i++) {
        if (!(weights[i] > 0))
            continue;
        last = i;
        sum += (double)weights[i];
        if (sum > u * total)
            break;
    }
    return last;
}

/* --- logprobs --- */

/* log Σ exp of a row is top + rest. Kept apart: beside a large logit the rest would be rounded. */
typedef struct norm {
    double top, rest;
} norm;

static norm norm_of(const float *logits, int n_vocab) {
    double top = -INFINITY, total = 0;
    for (int i = 0; i < n_vocab; i++)
        top = fmax(top, (double)cleaned(logits[i]));
    if (top == -INFINITY)
        return (norm){0, 0}; /* no mass: every token stays at −∞ */
    for (int i = 0; i < n_vocab; i++)
        total += exp((double)cleaned(logits[i]) - top);
    return (norm){top, log(total)};
}

double so_sample_logprob(const float *logits, int n_vocab, int32_t token) {
    norm z = norm_of(logits, n_vocab);
    return (double)cleaned(logits[token]) - z.top - z.rest;
}

/* Insertion into a short sorted list: almost every token is turned away at the last place. Logits
 * are compared, not logprobs: rounding must not turn an order into a tie. */
static void find_top(const float *logits, int n_vocab, int n_top, so_logprob *top) {
    int n = 0;
    for (int32_t id = 0; id < n_vocab; id++) {
        float x = cleaned(logits[id]);
        if (n == n_top && !(x > top[n - 1].logprob))
            continue;
        int at = n < n_top ? n++ : n - 1;
        for (; at > 0 && x > top[at - 1].logprob; at--)
            top[at] = top[at - 1];
        top[at] = (so_logprob){id, x};
    }
}

void so_sample_logprobs(const float *logits, int n_vocab, int32_t token, int n_top,
                        so_logprob *out) {
    SO_ASSERT(token >= 0 && token < n_vocab && n_top >= 0 && n_top <= n_vocab);
    norm z = norm_of(logits, n_vocab);
    out[0].token = token;
    if (n_top > 0)
        find_top(logits, n_vocab, n_top, out + 1);
    for (int i = 0; i <= n_top; i++) {
        double x = (double)cleaned(logits[out[i].token]) - z.top - z.rest;
        out[i].logprob = (float)fmax(x, (double)-FLT_MAX);
    }
}
