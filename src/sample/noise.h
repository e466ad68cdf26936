/* The loops over the whole vocabulary that sampling needs, one table of functions per CPU level.
 *
 * `above` and `candidates` only preselect. `above` drops tokens that a cut would drop anyway.
 * `candidates` returns the tokens that may win, using an upper bound on their noise. sample.c then
 * compares exact scores (y + noise; y is defined in sample.c). So CPU levels may preselect
 * different tokens, but never give a different result.
 *
 * The bound: let g be the leading 24 bits of ~u, where u is the token's 32-bit random number. The
 * noise is at most −log(g / 2²⁴). For g = 2^e · (1 + m), log2 g ≥ e + m, and e + m can be read off
 * the bits of (float)g.
 *
 * The results of `weigh` become probabilities, so they are bit-identical at all levels: exp is a
 * polynomial in double (base/exact.h), and sums use eight lanes by index, added in a fixed order.
 *
 * Pure functions; any thread. */
#ifndef SO_SAMPLE_NOISE_H
#define SO_SAMPLE_NOISE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/rng.h"

typedef struct so_noise_row {
    const float *x;     /* logits, none of them NaN or +∞ */
    float top, inverse; /* the largest logit; 1 / temperature, at most SO_NOISE_INVERSE_MAX */
    so_rng_key key;
    uint32_t block; /* index of the generator block that holds the random numbers of x[0] … x[3] */
} so_noise_row;

/* Upper limit of `inverse`. Keeps 0 · inverse from being NaN. A larger value would only sharpen the
 * bound. */
#define SO_NOISE_INVERSE_MAX 1e30f
#define SO_NOISE_MAX 22.9f               /* upper limit of the noise */
#define SO_NOISE_SLOPE (-0x1.62e43p-24f) /* −ln 2 / 2²³ */
#define SO_NOISE_START 104.66523f        /* (127 + 24) · ln 2, rounded up */
#define SO_NOISE_MARGIN 1e-3f            /* 100 times the total rounding error */

typedef struct so_noise_fns {
    /* Returns whether all x are finite. *top: the largest if so, else undefined. */
    bool (*all_finite)(const float *x, int n, float *top);
    float (*largest)(const float *x, int n); /* x holds no NaN */
    /* The first index of `value`, which must be present. */
    int32_t (*find)(const float *x, int n, float value);
    /* Of the tokens first … first + n - 1, writes the ids of those whose score may reach `least` to
     * ids[n], ascending, and returns how many there are. first is a multiple of 4. */
    int (*candidates)(const so_noise_row *r, int32_t first, int n, float least, int32_t *ids);
    /* Of the tokens first … first + n - 1, writes the ids of those with y ≥ floor to ids,
     * ascending, and returns how many there are. y = (x − top) · inverse, in single precision. Adds
     * Σ exp(y) of the other tokens to *low, with a relative error of 1e-4. */
    int (*above)(const so_noise_row *r, int32_t first, int n, float floor, int32_t *ids,
                 double *low);
    /* out[i] = exp(y) in single precision, y = (x − top) · inverse rounded to single. Returns the
     * sum. x ≤ top, no NaN; −∞ gives 0. */
    double (*weigh)(const float *x, int n, double top, double inverse, float *out);
    /* Expands a row of a vocabulary subset: for each bit of subset_bits[n], lowest first, writes
     * the next element of x if the bit is set, else −∞, to out[64 · n]. Returns how many elements
     * of x were used. */
    int (*expand)(const float *x, const uint64_t *subset_bits, int n, float *out);
} so_noise_fns;

enum { SO_NOISE_LANES = 8 };

extern const so_noise_fns so_noise_scalar;
#if defined(__x86_64__)
extern const so_noise_fns so_noise_avx2, so_noise_avx512;
#endif
const so_noise_fns *so_noise(void); /* of the CPU level in use (base/cpu.h) */

#endif
