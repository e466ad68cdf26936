/* Logits to a token; sample.h has the contract. One row goes through these steps:
 *
 *   1. x = logits. NaN becomes −∞ (never chosen), +∞ the largest float (wins, as in an argmax).
 *   2. x += bias, then repetition, presence and frequency penalties over the last repeat_last_n
 *      tokens (the window).
 *   3. Temperature 0: the result is the argmax of x. Otherwise y = (x − max x)/T: the best token
 *      has y = 0, so no y overflows to +∞ at any T. The support is the tokens with y > −∞.
 *   4. top-k, then top-p of the remaining tokens, then min-p of the remaining tokens.
 *   5. The result is the token of the support with the largest y + noise, lowest id on ties.
 *
 * Step 4 does not sort. The border of a cut is the y of the last token it keeps. Step 4 first drops
 * tokens below a floor that is certainly under the border of the first cut. Then it counts tokens
 * in bins of 1/64 nat below the best: whole bins above the border stay, and only the bin of the
 * border is taken in order, from a heap of (y descending, id ascending).
 *
 * Step 5 is exact but computes the noise of only a few tokens: a bound from the leading bits of the
 * random number rules out almost all tokens (noise.h). If nothing is cut, not even y is computed
 * for those tokens.
 *
 * Allocates nothing after creation and keeps no state between calls. Any thread, with its own
 * sampler. */
#include "sample/sample.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/mutant.h"
#include "base/pick.h"
#include "sample/noise.h"

enum { N_BINS = 4096, BINS_PER_NAT = 64, PART_MIN = 16, SUBSET_PART = 1024 };

struct so_sampler {
    int n_vocab;
    const so_noise_fns *fns;
    const int32_t *subset; /* [n_vocab] token of each row entry; NULL: entry i is token i */
    uint64_t *subset_bits; /* [n_parts][SUBSET_PART / 64] bit set of `subset` */
    int n_parts;
    const float *row; /* [n_vocab] logits after steps 1 and 2: the caller's row, or x */
    float *x;         /* [n_vocab] */
    float *y;         /* [n_vocab] valid for the tokens in ids */
    float *maxima;    /* [n_vocab / PART_MIN] maxima of parts of the row */
    int32_t *ids;     /* [max of n_vocab, SUBSET_PART] the support, n ids */
    int32_t *border;  /* [n_vocab] heap of the border bin */
    int32_t *seen,
        *generated; /* [n_vocab] counts in the window and in its output part; 0 between calls */
    int n;
    so_scored *top;        /* [n_vocab + 1] of so_sample_logprobs */
    double weight[N_BINS]; /* number or mass of the tokens in each bin */
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
    return so_sampler_create_at_level(n_vocab, so_noise());
}

so_sampler *so_sampler_create_at_level(int n_vocab, const struct so_noise_fns *level) {
    SO_ASSERT_OP(n_vocab, >, 0);
    so_sampler *s = SO_NEW(so_sampler);
    s->n_vocab = n_vocab;
    s->fns = level;
    s->x = SO_NEW_N(float, n_vocab);
    s->y = SO_NEW_N(float, n_vocab);
    s->maxima = SO_NEW_N(float, n_vocab / PART_MIN + 1);
    s->ids = SO_NEW_N(int32_t, SO_MAX(n_vocab, SUBSET_PART));
    s->border = SO_NEW_N(int32_t, n_vocab);
    s->seen = SO_NEW_N(int32_t, n_vocab);
    s->generated = SO_NEW_N(int32_t, n_vocab);
    s->top = SO_NEW_N(so_scored, n_vocab + 1);
    return s;
}

void so_sampler_set_subset(so_sampler *s, const int32_t *subset) {
    SO_ASSERT(!s->subset && subset);
    s->subset = subset;
    s->n_parts = subset[s->n_vocab - 1] / SUBSET_PART + 1;
    s->subset_bits = SO_NEW_N(uint64_t, (size_t)s->n_parts * (SUBSET_PART / 64));
    for (int i = 0; i < s->n_vocab; i++)
        s->subset_bits[subset[i] / 64] |= UINT64_C(1) << subset[i] % 64;
}

void so_sampler_free(so_sampler *s) {
    if (!s)
        return;
    free(s->x);
    free(s->y);
    free(s->maxima);
    free(s->ids);
    free(s->border);
    free(s->seen);
    free(s->generated);
    free(s->top);
    free(s->subset_bits);
    free(s);
}

/* --- steps 1 and 2 --- */

static float cleaned(float v) { return isnan(v) ? -INFINITY : v > FLT_MAX ? FLT_MAX : v; }

/* change: bias or penalties will modify the row. A finite row without changes, the usual case, is
 * read in place; *top is then its largest logit. */
static int load_row(so_sampler *s, const float *logits, bool change, float *top, so_err *err) {
    bool any = false;
    s->row = s->x;
    if (s->fns->all_finite(logits, s->n_vocab, top)) {
        if (change)
            memcpy(s->x, logits, (size_t)s->n_vocab * sizeof *logits);
        else
            s->row = logits;
        return SO_OK;
    }
    for (int i = 0; i < s->n_vocab; i++) {
        any |= isfinite(logits[i]) != 0;
        s->x[i] = cleaned(logits[i]);
    }
    if (!any)
        return so_err_set(err, SO_EINVAL,
                          "no logit is finite: the weights of the model are damaged");
    return SO_OK;
}

static bool has_penalties(const so_sample_params *p) {
    bool off = p->repeat_penalty == 1 && p->presence_penalty == 0 && p->frequency_penalty == 0;
    return !off && p->repeat_last_n != 0;
}

static void penalize(so_sampler *s, const so_sample_params *p, const so_sample_context *ctx) {
    int window = p->repeat_last_n < 0 ? ctx->n_tokens : SO_MIN(p->repeat_last_n, ctx->n_tokens);
    int first = ctx->n_tokens - window;
    for (int i = first; i < ctx->n_tokens; i++) {
        SO_ASSERT(ctx->tokens[i] >= 0 && ctx->tokens[i] < s->n_vocab);
        s->seen[ctx->tokens[i]]++;
        s->generated[ctx->tokens[i]] += i >= ctx->n_prompt;
    }
    for (int i = first; i < ctx->n_tokens; i++) {
        int32_t id = ctx->tokens[i];
        if (!s->seen[id])
            continue; /* already done at an earlier occurrence */
        float v = s->x[id] > 0 ? s->x[id] / p->repeat_penalty : s->x[id] * p->repeat_penalty;
        if (s->generated[id])
            v -= p->presence_penalty + p->frequency_penalty * (float)s->generated[id];
        s->x[id] = cleaned(v);
        s->seen[id] = s->generated[id] = 0;
    }
}

/* Steps 1 and 2. *best: the argmax. */
static int prepare(so_sampler *s, const so_sample_params *p, const float *logits,
                   const so_sample_context *ctx, int32_t *best, so_err *err) {
    float top;
    bool change = p->n_bias > 0 || has_penalties(p);
    SO_ASSERT(!(change && s->subset));
    int rc = load_row(s, logits, change, &top, err);
    if (rc != SO_OK)
        return rc;
    for (int i = 0; i < p->n_bias; i++)
        s->x[p->bias[i].token] = cleaned(s->x[p->bias[i].token] + p->bias[i].bias);
    if (has_penalties(p))
        penalize(s, p, ctx);
    if (s->row == s->x)
        top = s->fns->largest(s->row, s->n_vocab);
    if (top == -INFINITY)
        return so_err_set(err, SO_EINVAL, "--logit-bias has banned every token");
    *best = s->fns->find(s->row, s->n_vocab, top);
    return SO_OK;
}

/* --- steps 3 and 4 --- */

static so_noise_row noise_row(const so_sampler *s, const so_sample_params *p, int32_t best) {
    double inverse = 1 / (double)p->temp;
    return (so_noise_row){.x = s->row,
                          .top = s->row[best],
                          .inverse = (float)SO_MIN(inverse, (double)SO_NOISE_INVERSE_MAX)};
}

/* Step 3: fills ids with the tokens whose y, computed to within SO_NOISE_MARGIN, is at least
 * `floor`, and computes their exact y. Returns the approximate mass Σ exp(y) of the other
 * tokens. */
static double gather(so_sampler *s, const so_sample_params *p, int32_t best, double floor) {
    enum { PART = 1024 };
    so_noise_row r = noise_row(s, p, best);
    double top = r.top, inverse = 1 / (double)p->temp, low = 0;
    s->n = 0;
    for (int32_t first = 0; first < s->n_vocab; first += PART) {
        int32_t *ids = s->ids + s->n;
        int n = s->fns->above(&r, first, SO_MIN(PART, s->n_vocab - first), (float)floor, ids, &low);
        int kept = 0;
        for (int i = 0; i < n; i++) {
            int32_t id = ids[i];
            s->y[id] = so_exact_y(s->row[id], top, inverse);
            ids[kept] = id;
            kept += s->y[id] > -INFINITY;
        }
        s->n += kept;
    }
    return low;
}

static int bin_of(float y) {
    float b = -y * BINS_PER_NAT;
    return b < N_BINS - 1 ? (int)b : N_BINS - 1;
}

static bool comes_before(const so_sampler *s, int32_t a, int32_t b) {
    return s->y[a] > s->y[b] || (s->y[a] == s->y[b] && a < b);
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

/* Keeps the tokens, in descending order of y, up to and including the one at which the sum of
 * weights reaches `target`; at least one. by_mass: a token weighs exp(y), otherwise 1. Returns the
 * smallest distance between `target` and a partial sum. */
static double cut(so_sampler *s, double target, bool by_mass) {
    double sum = 0, near;
    int last = 0, n_kept = 0, n_border = 0;
    while (last < N_BINS - 1 && sum + s->weight[last] < target)
        sum += s->weight[last++];
    near = fmin(fabs(target - sum), fabs(sum + s->weight[last] - target));
    for (int i = 0; i < s->n; i++) {
        int bin = bin_of(s->y[s->ids[i]]);
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
        sum += by_mass ? exp((double)s->y[id]) : 1;
        near = fmin(near, fabs(target - sum));
        s->border[0] = s->border[--n_border];
        sift_down(s, 0, n_border);
    }
    s->n = n_kept;
    return near;
}

static void cut_top_k(so_sampler *s, int k) {
    memset(s->weight, 0, sizeof s->weight);
    for (int i = 0; i < s->n; i++)
        s->weight[bin_of(s->y[s->ids[i]])] += 1;
    cut(s, k, false);
}

/* `low`: the mass of the tokens that gather left out, with a relative error of 1e-4; the cut would
 * drop them in any case. Returns false if a partial sum is so close to the target mass that this
 * error could move the border; ids are invalid then. */
static bool cut_top_p(so_sampler *s, double top_p, double low) {
    double total = 0;
    memset(s->weight, 0, sizeof s->weight);
    for (int i = 0; i < s->n; i++) {
        float y = s->y[s->ids[i]];
        s->weight[bin_of(y)] += exp((double)y);
    }
    for (int i = 0; i < N_BINS; i++)
        total += s->weight[i];
    total += low;
    double near = cut(s, top_p * total, true);
    return low == 0 || near > 1e-4 * low + 1e-9 * total;
}

/* min-p keeps tokens with p ≥ min_p · p_best, and the best has y = 0. */
static double least_y(const so_sample_params *p) {
    return p->min_p > 0 ? log((double)p->min_p) : -INFINITY;
}

static void cut_min_p(so_sampler *s, double least) {
    int n_kept = 0;
    for (int i = 0; i < s->n; i++)
        if ((double)s->y[s->ids[i]] >= least)
            s->ids[n_kept++] = s->ids[i];
    s->n = n_kept;
}

bool so_sample_has_cuts(const so_sample_params *p, int n_vocab) {
    return (p->top_k > 0 && p->top_k < n_vocab) || p->top_p < 1 || p->min_p > 0;
}

static int descending(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

/* A y that at least k tokens reach: the k-th largest of the maxima of more than k parts. */
static double floor_of_k(so_sampler *s, const so_sample_params *p, int32_t best) {
    int k = p->top_k, part = s->n_vocab / 8 / k, n_parts = 0;
    if (part < PART_MIN)
        return -INFINITY;
    for (int i = 0; i + part <= s->n_vocab; i += part)
        s->maxima[n_parts++] = s->fns->largest(s->row + i, part);
    qsort(s->maxima, (size_t)n_parts, sizeof *s->maxima, descending);
    double y = (double)so_exact_y(s->maxima[k - 1], s->row[best], 1 / (double)p->temp);
    return y * (1 + 1e-6) - SO_NOISE_MARGIN;
}

/* A floor below which no token survives the first cut. For top-p: even if all tokens had the mass
 * exp(floor), their sum would be less than the mass that is cut off (the best token alone has mass
 * 1). */
static double floor_of(so_sampler *s, const so_sample_params *p, int32_t best) {
    if (!(1 / (double)p->temp < (double)SO_NOISE_INVERSE_MAX))
        return -INFINITY;
    if (p->top_k > 0 && p->top_k < s->n_vocab)
        return floor_of_k(s, p, best);
    if (p->top_p < 1)
        return log((1 - (double)p->top_p) * 0.99 / s->n_vocab);
    return p->min_p > 0 ? log((double)p->min_p) - (double)SO_NOISE_MARGIN : -INFINITY;
}

/* Steps 3 and 4. */
static void transform(so_sampler *s, const so_sample_params *p, int32_t best) {
    bool by_k = p->top_k > 0 && p->top_k < s->n_vocab;
    double low = gather(s, p, best, floor_of(s, p, best));
    if (by_k && p->top_k < s->n)
        cut_top_k(s, p->top_k);
    if (p->top_p < 1 && !cut_top_p(s, p->top_p, by_k ? 0 : low)) {
        gather(s, p, best, -INFINITY);
        cut_top_p(s, p->top_p, 0);
    }
    if (p->min_p > 0)
        cut_min_p(s, least_y(p));
}

/* --- step 5 --- */

static so_rng_key token_key(const so_sample_params *p, int position) {
    return (so_rng_key){.seed = p->seed,
                        .choice = p->choice,
                        .position = SO_MUTANT(TOKEN_POSITION) ? 0 : (uint32_t)position,
                        .purpose = SO_RNG_TOKEN};
}

static int32_t token_of(const so_sampler *s, int32_t index) {
    return s->subset ? s->subset[index] : index;
}

double so_sample_noise(const so_sample_params *p, int position, int32_t token) {
    so_rng_key key = token_key(p, position);
    uint32_t w[4];
    so_rng_block(&key, (uint32_t)token / 4, w);
    return so_exact_gumbel(w[token % 4]);
}

/* The best score so far (lowest id on ties), and the second best of the tokens examined. */
typedef struct leader {
    double score, second;
    int32_t id;
} leader;

static void challenge(leader *l, double score, int32_t id) {
    if (score > l->score || (score == l->score && id < l->id))
        *l = (leader){score, l->score, id};
    else if (id != l->id)
        l->second = SO_MAX(l->second, score);
}

/* Step 5 after cuts. Skips a token that could not win with the largest possible noise, or with the
 * largest noise that the leading bits of its 32-bit random number u allow: ln 2 · (1 + clz(~u)).
 * The margin covers rounding. */
static leader draw_cut(const so_sampler *s, const so_sample_params *p, int position, int32_t best,
                       double slack) {
    static const double ln2 = 0.6931471805599453, most = 22.88, margin = 1e-6;
    so_rng_key key = token_key(p, position);
    uint32_t w[4], block = UINT32_MAX;
    double noise = so_sample_noise(p, position, token_of(s, best));
    leader l = {(double)s->y[best] + noise, -INFINITY, best};
    for (int i = 0; i < s->n; i++) {
        int32_t id = s->ids[i];
        double y = s->y[id];
        if (y + most < l.score - slack || id == best)
            continue;
        int32_t token = token_of(s, id);
        if ((uint32_t)token / 4 != block) {
            block = (uint32_t)token / 4;
            so_rng_block(&key, block, w);
        }
        uint32_t word = w[token % 4], v = ~word;
        int zeros = v ? __builtin_clz(v) : 32;
        if (y + ln2 * (1 + zeros) + margin >= l.score - slack)
            challenge(&l, y + so_exact_gumbel(word), id);
    }
    return l;
}

/* The arguments of step 5 over the whole vocabulary. */
typedef struct draw_args {
    so_noise_row r;
    const so_sample_params *p;
    double slack;
    int position;
} draw_args;

/* Compares the candidates among entries first … first + n - 1 with the leader. r.x[0] is token
 * `origin`. */
static void challenge_part(so_sampler *s, const draw_args *w, int32_t origin, int32_t first, int n,
                           leader *l) {
    int n_ids = s->fns->candidates(&w->r, first, n, (float)(l->score - w->slack), s->ids);
    for (int i = 0; i < n_ids; i++) {
        int32_t id = origin + s->ids[i];
        float y = so_exact_y(w->r.x[s->ids[i]], w->r.top, 1 / (double)w->p->temp);
        if (y > -INFINITY)
            challenge(l, (double)y + so_sample_noise(w->p, w->position, id), id);
    }
}

/* In parts of growing size: the leader's score rises early, so even in a flat row only the first
 * part yields many candidates. */
static void challenge_all(so_sampler *s, const draw_args *w, leader *l) {
    for (int32_t first = 0, part = 256; first < s->n_vocab; first += part, part *= 2)
        challenge_part(s, w, 0, first, SO_MIN(part, s->n_vocab - first), l);
}

/* With a vocabulary subset. The generator produces the noise of neighbouring token ids together, in
 * the subset or not. So the row is expanded to token ids, one part at a time, which keeps the
 * expanded part in the first-level cache. */
static void challenge_subset(so_sampler *s, const draw_args *given, leader *l) {
    float wide[SUBSET_PART];
    const float *row = s->row;
    draw_args w = *given;
    w.r.x = wide;
    for (int i = 0; i < s->n_parts; i++) {
        row += s->fns->expand(row, s->subset_bits + i * (SUBSET_PART / 64), SUBSET_PART / 64, wide);
        w.r.block = (uint32_t)i * (SUBSET_PART / 4);
        challenge_part(s, &w, i * SUBSET_PART, 0, SUBSET_PART, l);
    }
}

int32_t so_sample_subset_index(const int32_t *subset, int n, int32_t token) {
    int32_t at = 0;
    while (n > 1) {
        int half = n / 2;
        at += subset[at + half] <= token ? half : 0;
        n -= half;
    }
    return at;
}

/* Step 5 without cuts. */
static leader draw_all(so_sampler *s, const so_sample_params *p, int position, int32_t best,
                       double slack) {
    draw_args w = {noise_row(s, p, best), p, slack, position};
    int32_t token = token_of(s, best);
    leader l = {so_sample_noise(p, position, token), -INFINITY, token};
    w.r.key = token_key(p, position);
    if (!s->subset) {
        challenge_all(s, &w, &l);
        return l;
    }
    challenge_subset(s, &w, &l);
    l.id = so_sample_subset_index(s->subset, s->n_vocab, l.id);
    return l;
}

/* `slack`: tokens within this distance of the best score are examined too, so that `second` is
 * exact. */
static int draw(so_sampler *s, const so_sample_params *p, const float *logits,
                const so_sample_context *ctx, double slack, leader *out, so_err *err) {
    int32_t best;
    int rc = prepare(s, p, logits, ctx, &best, err);
    if (rc != SO_OK)
        return rc;
    if (p->temp == 0) {
        *out = (leader){0, -INFINITY, best};
    } else if (!so_sample_has_cuts(p, s->n_vocab)) {
        *out = draw_all(s, p, ctx->n_tokens, best, slack);
    } else {
        transform(s, p, best);
        *out = draw_cut(s, p, ctx->n_tokens, best, slack);
    }
    return SO_OK;
}

int so_sample_token(so_sampler *s, const so_sample_params *p, const float *logits,
                    const so_sample_context *ctx, int32_t *out, so_err *err) {
    leader l;
    int rc = draw(s, p, logits, ctx, 0, &l, err);
    if (rc == SO_OK)
        *out = l.id;
    return rc;
}

int so_sample_token_lead(so_sampler *s, const so_sample_params *p, const float *logits,
                         const so_sample_context *ctx, int32_t *out, double *lead, so_err *err) {
    leader l;
    int rc = draw(s, p, logits, ctx, SO_SAMPLE_LEAD_MAX, &l, err);
    if (rc != SO_OK)
        return rc;
    *out = l.id;
    *lead = fmin(l.score - l.second, SO_SAMPLE_LEAD_MAX);
    return rc;
}

/* Puts a token into the ordered list of the best k. */
static void insert_scored(so_scored *top, int k, int *n, double score, int32_t id) {
    int at = *n;
    if (at == k && !(score > top[k - 1].score))
        return;
    at = SO_MIN(at, k - 1);
    *n = SO_MIN(*n + 1, k);
    for (; at > 0 && score > top[at - 1].score; at--)
        top[at] = top[at - 1];
    top[at] = (so_scored){score, id};
}

/* The best k of the support with noise. A token that cannot reach the k-th best score, by the leading
 * bits of its random number (draw_cut), is skipped. Ids must be in ascending order. */
static void top_with_noise(so_sampler *s, const so_sample_params *p, int position, int k,
                           so_scored *top, int *n) {
    static const double ln2 = 0.6931471805599453, margin = 1e-6;
    so_rng_key key = token_key(p, position);
    uint32_t w[4], block = UINT32_MAX;
    for (int i = 0; i < s->n; i++) {
        int32_t id = s->ids[i], token = token_of(s, id);
        double y = (double)s->y[id];
        if ((uint32_t)token / 4 != block) {
            block = (uint32_t)token / 4;
            so_rng_block(&key, block, w);
        }
        uint32_t v = ~w[token % 4];
        int zeros = v ? __builtin_clz(v) : 32;
        if (*n == k && y + ln2 * (1 + zeros) + margin < top[k - 1].score)
            continue;
        insert_scored(top, k, n, y + so_exact_gumbel(w[token % 4]), id);
    }
}

static int by_id(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

int so_sample_top(so_sampler *s, const so_sample_params *p, const float *logits,
                  const so_sample_context *ctx, int k, so_scored *out, int *n, so_err *err) {
    int32_t best;
    SO_ASSERT(k >= 1 && k <= SO_SAMPLE_TOP_MAX);
    int rc = prepare(s, p, logits, ctx, &best, err);
    if (rc != SO_OK)
        return rc;
    *n = 0;
    if (p->temp == 0) {
        for (int i = 0; i < s->n_vocab; i++)
            if (s->row[i] > -INFINITY)
                insert_scored(out, k, n, (double)s->row[i], i);
        return SO_OK;
    }
    transform(s, p, best);
    if (so_sample_has_cuts(p,
                           s->n_vocab)) /* cuts change the order of ids; ties go to the lower id */
        qsort(s->ids, (size_t)s->n, sizeof *s->ids, by_id);
    top_with_noise(s, p, ctx->n_tokens, k, out, n);
    return SO_OK;
}

/* Without cuts there is no list of ids: the whole row is weighed. */
static double weigh_all(const so_sampler *s, const so_sample_params *p, int32_t best,
                        float *weights) {
    return s->fns->weigh(s->row, s->n_vocab, s->row[best], 1 / (double)p->temp, weights);
}

static void scale_all(const so_sampler *s, double total, float *probs) {
    enum { BLOCK = 64 };
    float scale = (float)(1 / total);
    int i = 0;
    for (; i + BLOCK <= s->n_vocab; i += BLOCK) /* constant length, so that it is vectorised */
        for (int k = 0; k < BLOCK; k++)
            probs[i + k] *= scale;
    for (; i < s->n_vocab; i++)
        probs[i] *= scale;
}

static int weigh(so_sampler *s, const so_sample_params *p, const float *logits,
                 const so_sample_context *ctx, float *weights, double *total, so_err *err) {
    int32_t best;
    int rc = prepare(s, p, logits, ctx, &best, err);
    if (rc != SO_OK)
        return rc;
    if (p->temp > 0 && !so_sample_has_cuts(p, s->n_vocab)) {
        *total = weigh_all(s, p, best, weights);
        return SO_OK;
    }
    memset(weights, 0, (size_t)s->n_vocab * sizeof *weights);
    *total = 1;
    if (p->temp == 0) {
        weights[best] = 1;
        return SO_OK;
    }
    transform(s, p, best);
    double sum = 0;
    for (int i = 0; i < s->n; i++)
        sum += exp((double)s->y[s->ids[i]]);
    for (int i = 0; i < s->n; i++)
        weights[s->ids[i]] = (float)(exp((double)s->y[s->ids[i]]) / sum);
    return SO_OK;
}

int so_sample_weights(so_sampler *s, const so_sample_params *p, const float *logits,
                      const so_sample_context *ctx, float *weights, so_err *err) {
    double total;
    return weigh(s, p, logits, ctx, weights, &total, err);
}

int so_sample_distribution(so_sampler *s, const so_sample_params *p, const float *logits,
                           const so_sample_context *ctx, float *probs, so_err *err) {
    double total;
    int rc = weigh(s, p, logits, ctx, probs, &total, err);
    if (rc == SO_OK && total != 1)
        scale_all(s, total, probs);
    return rc;
}

int so_sample_adjusted(so_sampler *s, const so_sample_params *p, const float *logits,
                       const so_sample_context *ctx, float *out, so_err *err) {
    int32_t best;
    int rc = prepare(s, p, logits, ctx, &best, err);
    if (rc == SO_OK && out != s->row)
        memcpy(out, s->row, (size_t)s->n_vocab * sizeof *out);
    return rc;
}

bool so_sample_is_argmax(const so_sample_params *p) {
    return p->temp == 0 && p->n_bias == 0 && !has_penalties(p);
}

bool so_sample_on_device(const so_sample_params *p, int position, so_sample_row *row) {
    *row = (so_sample_row){.key = token_key(p, position),
                           .inverse = p->temp > 0 ? 1 / (double)p->temp : 0,
                           .top_p = (double)p->top_p,
                           .least = least_y(p),
                           .top_k = p->top_k,
                           .guess = -1};
    return p->n_bias == 0 && !has_penalties(p);
}

double so_sample_prob_at_least(const so_sample_params *p, const so_sample_result *r) {
    double y = (double)so_exact_y(r->logit, (double)r->top, 1 / (double)p->temp);
    return (double)(float)so_exact_exp(y) / r->mass;
}

enum { PICK_LANES = 8 };

static double pick_part(const void *weights, int32_t first) {
    const float *w = (const float *)weights + first;
    double s[PICK_LANES] = {0};
    for (int i = 0; i < SO_PICK_PART; i += PICK_LANES)
        for (int k = 0; k < PICK_LANES; k++)
            s[k] += (double)w[i + k];
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

static double pick_weight(const void *weights, int32_t i) {
    return (double)((const float *)weights)[i];
}

int32_t so_sample_pick(const float *weights, int n, double u) {
    double total = 0;
    int32_t i = 0;
    for (; i + SO_PICK_PART <= n; i += SO_PICK_PART)
        total += pick_part(weights, i);
    for (; i < n; i++)
        total += (double)weights[i];
    return so_pick(weights, n, u * total, pick_part, pick_weight);
}

/* --- logprobs --- */

/* log Σ exp of a row is top + log_sum. The two are kept apart, because adding a small log_sum to a
 * large logit would round it. */
typedef struct norm {
    double top, log_sum;
} norm;

static norm norm_of(const float *logits, int n_vocab) {
    double top = -INFINITY, total = 0;
    for (int i = 0; i < n_vocab; i++)
        top = fmax(top, (double)cleaned(logits[i]));
    if (top == -INFINITY)
        return (norm){0, 0}; /* no mass: the logprob of every token is −∞ */
    for (int i = 0; i < n_vocab; i++)
        total += exp((double)cleaned(logits[i]) - top);
    return (norm){top, log(total)};
}

double so_sample_logprob(const float *logits, int n_vocab, int32_t token) {
    norm z = norm_of(logits, n_vocab);
    return (double)cleaned(logits[token]) - z.top - z.log_sum;
}

float so_sample_prob_estimate(so_sampler *s, const float *logits, int32_t token) {
    so_noise_row r = {.x = logits, .top = s->fns->largest(logits, s->n_vocab), .inverse = 1};
    double total = 0;
    if (!(r.top > -INFINITY))
        return 0;
    s->fns->above(&r, 0, s->n_vocab, INFINITY, s->ids, &total);
    return (float)SO_MIN(exp((double)(logits[token] - r.top)) / total, 1.0);
}

/* Insertion into a short sorted list; almost every token fails the comparison with the last entry.
 * Compares logits, stored in `score` for now: rounding must not turn an order into a tie. Returns the
 * length of the list: tokens at −∞ are left out if `finite`. */
static int find_top(const float *logits, int n_vocab, int n_top, bool finite, so_scored *top) {
    int n = 0;
    for (int32_t id = 0; id < n_vocab; id++) {
        double x = (double)cleaned(logits[id]);
        if ((n == n_top && !(x > top[n - 1].score)) || (finite && x == -INFINITY))
            continue;
        int at = n < n_top ? n++ : n - 1;
        for (; at > 0 && x > top[at - 1].score; at--)
            top[at] = top[at - 1];
        top[at] = (so_scored){x, id};
    }
    return n;
}

static norm norm_at_level(so_sampler *s, const float *logits) {
    float best;
    if (!s->fns->all_finite(logits, s->n_vocab, &best))
        return norm_of(logits, s->n_vocab);
    return (norm){(double)best, log(s->fns->weigh(logits, s->n_vocab, (double)best, 1, s->y))};
}

void so_sample_logprobs(so_sampler *s, const float *logits, int32_t token, int n_top,
                        so_logprob *out) {
    so_scored *top = s->top;
    SO_ASSERT(token >= 0 && token < s->n_vocab && n_top >= 0 && n_top <= s->n_vocab);
    norm z = norm_at_level(s, logits);
    top[0] = (so_scored){(double)cleaned(logits[token]), token};
    if (n_top > 0)
        find_top(logits, s->n_vocab, n_top, false, top + 1);
    for (int i = 0; i <= n_top; i++)
        out[i] = (so_logprob){top[i].id,
                              (float)fmax(top[i].score - z.top - z.log_sum, (double)-FLT_MAX)};
}

int so_sample_continuations(so_sampler *s, const so_sample_params *p, const float *logits, int k,
                            so_scored *out) {
    norm z = norm_at_level(s, logits);
    if (p->n_bias > 0) {
        memmove(s->x, logits, (size_t)s->n_vocab * sizeof *logits);
        for (int i = 0; i < p->n_bias; i++)
            s->x[p->bias[i].token] += p->bias[i].bias;
        logits = s->x;
    }
    int n = find_top(logits, s->n_vocab, SO_MIN(k, s->n_vocab), true, out);
    for (int i = 0; i < n; i++)
        out[i].score = out[i].score - z.top - z.log_sum;
    return n;
}
