/* The steps of SO_OP_SAMPLE for one row that the CPU and the GPU share (backend.h says what the
 * operation gives).
 *
 * A cut keeps the first tokens in the order (y descending, token ascending), so its result is a
 * border: the last token that is kept. To find it, tokens are counted in bins of 1/64 nat below the
 * best, as sample/sample.c does, and only the tokens of the border's bin are put into order. The
 * bins' contents are integers, numbers of tokens and masses in units of 2^-43, so they do not
 * depend on the order in which tokens are counted.
 *
 * top-p. The host adds the masses exp(y) in double, in an order of its own. Let S be a partial sum of n
 * tokens in exact arithmetic. A sum of units is at most n units below S, and so_exact_exp differs from
 * exp by at most 3e-10 of it; the host's sum differs from S by at most n · 2^-53 < 1.2e-10 of it. The same
 * holds for the target, top_p times the whole sum. So if the partial sums before and after a token
 * differ from the target by more than n units and 1e-9 of the whole sum (so_sample_margin), the host
 * finds the same border. Otherwise the result is SO_SAMPLE_UNKNOWN and the host decides.
 *
 * Pure functions; any thread. */
#ifndef SO_BACKEND_SAMPLE_ROW_H
#define SO_BACKEND_SAMPLE_ROW_H

#include "backend/backend.h"

enum { SO_SAMPLE_BINS = 4096, SO_SAMPLE_BINS_PER_NAT = 64 };
/* Weights are at most 1, so the sum of a row of SO_SAMPLE_MAX tokens fits into 64 bits. */
#define SO_SAMPLE_UNIT 0x1p-43
#define SO_SAMPLE_PER_UNIT 0x1p43

/* A token with its y; as a border, the last token that the cuts keep. */
typedef struct so_sample_entry {
    float y;
    int32_t token; /* of a border also: SO_SAMPLE_UNKNOWN */
} so_sample_entry;

SO_BOTH bool so_sample_before(so_sample_entry a, so_sample_entry b) {
    return a.y > b.y || (a.y == b.y && a.token < b.token);
}

SO_BOTH int so_sample_bin(float y) {
    float b = -y * SO_SAMPLE_BINS_PER_NAT;
    return b < SO_SAMPLE_BINS - 1 ? (int)b : SO_SAMPLE_BINS - 1;
}

/* A weight in units, rounded down. */
SO_BOTH uint64_t so_sample_units(double weight) {
    return (uint64_t)so_exact_mul(weight, SO_SAMPLE_PER_UNIT);
}

SO_BOTH double so_sample_margin(int n, double total) {
    return so_exact_add((double)n, so_exact_mul(total, 1e-9));
}

/* Whether the host, too, finds that the border of top-p is a token with these partial sums before and
 * after it. The first token of all is always kept. */
SO_BOTH bool so_sample_is_certain(double before, double after, double target, double margin) {
    return (before == 0 || so_exact_add(target, -before) > margin) &&
           so_exact_add(after, -target) > margin;
}

/* Whether the weight of a token is wanted, not a sample; and which token's. */
SO_BOTH bool so_sample_weighs(const so_sample_row *r) { return r->guess != -1; }
SO_BOTH int32_t so_sample_weighed(const so_sample_row *r, int32_t best) {
    return r->guess >= 0 ? r->guess : best;
}

SO_BOTH bool so_sample_cuts_k(const so_sample_row *r, int d) {
    return r->top_k > 0 && r->top_k < d;
}

/* Whether a border has to be found. min-p needs none. */
SO_BOTH bool so_sample_has_border(const so_sample_row *r, int d) {
    return r->inverse > 0 && !so_sample_weighs(r) && (so_sample_cuts_k(r, d) || r->top_p < 1);
}

/* Whether cuts and border leave the token. */
SO_BOTH bool so_sample_keeps(const so_sample_row *r, so_sample_entry border, so_sample_entry e) {
    return e.y > -INFINITY && (double)e.y >= r->least && !so_sample_before(border, e);
}

/* A border that cuts nothing. */
SO_BOTH so_sample_entry so_sample_no_border(void) {
    so_sample_entry e = {-INFINITY, INT32_MAX};
    return e;
}

/* The best score so far, lowest token on ties. */
typedef struct so_sample_leader {
    double score;
    int32_t token;
} so_sample_leader;

SO_BOTH bool so_sample_beats(so_sample_leader a, so_sample_leader b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

/* Whether y + noise may reach the leader's score, whatever the noise. */
SO_BOTH bool so_sample_may_win(float y, so_sample_leader l) {
    return so_exact_add((double)y, 22.88) >= l.score;
}

/* Replaces the leader if the token beats it. The noise of a random number u is at most
 * ln 2 · (1 + leading zeros of ~u), which rules out most tokens without a logarithm; 1e-6 covers
 * rounding. */
SO_BOTH void so_sample_challenge(so_sample_leader *l, so_sample_entry e, uint32_t word) {
    uint32_t v = ~word;
#ifdef __CUDA_ARCH__
    int zeros = __clz((int)v);
#else
    int zeros = v ? __builtin_clz(v) : 32;
#endif
    double bound = so_exact_add(so_exact_mul(0.6931471805599453, (double)(1 + zeros)), 1e-6);
    if (so_exact_add((double)e.y, bound) < l->score)
        return;
    so_sample_leader c = {so_exact_add((double)e.y, so_exact_gumbel(word)), e.token};
    if (so_sample_beats(c, *l))
        *l = c;
}

/* The best token's score: the first leader. Its y is 0. */
SO_BOTH so_sample_leader so_sample_first(const so_sample_row *r, int32_t best) {
    uint32_t w[4];
    so_rng_block(&r->key, (uint32_t)best / 4, w);
    so_sample_leader l = {so_exact_gumbel(w[best % 4]), best};
    return l;
}

/* so_sample_result.mass from a sum of units. */
SO_BOTH double so_sample_mass(uint64_t units, int n) {
    return so_exact_mul(so_exact_mul((double)(units + (uint64_t)n), SO_SAMPLE_UNIT), 1 + 1e-9);
}

#endif
