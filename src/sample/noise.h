/* What drawing a token looks at for every token of the vocabulary, one table per instruction level.
 *
 * None of it decides: `above` leaves out what a cut leaves out anyway, `hopeful` names the tokens
 * that may win, by a bound that is never too low, and sample.c compares their exact scores. So
 * levels may differ in what they name and never in the token. The bound: with g the leading 24 bits
 * of ~word, a token's noise is at most −log(g / 2²⁴), and log2 g ≥ e + m for g = 2^e · (1 + m),
 * which is read off the bits of (float)g.
 *
 * `weigh` is the exception: its numbers become probabilities, so all levels give the same bits. exp
 * is a polynomial of its own in double, and sums run in eight lanes by index, joined in order.
 * Any thread. */
#ifndef SO_SAMPLE_NOISE_H
#define SO_SAMPLE_NOISE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/rng.h"

typedef struct so_noise_row {
    const float *x;     /* logits, none of them NaN or +∞ */
    float top, inverse; /* the largest logit; 1 / temperature, at most SO_NOISE_INVERSE_MAX */
    so_rng_key key;
    uint32_t block; /* of the generator, whose words are the noise of x[0] … x[3] */
} so_noise_row;

/* Keeps 0 · inverse and what follows from being NaN; larger ones are only a sharper bound. */
#define SO_NOISE_INVERSE_MAX 1e30f
#define SO_NOISE_MOST 22.9f              /* no noise is larger */
#define SO_NOISE_SLOPE (-0x1.62e43p-24f) /* −ln 2 / 2²³ */
#define SO_NOISE_START 104.66523f        /* (127 + 24) · ln 2, rounded up */
#define SO_NOISE_MARGIN 1e-3f            /* rounding in all of it is a hundredth of this */

typedef struct so_noise_fns {
    /* Whether all are finite; *top is the largest then, and anything else where not. */
    bool (*survey)(const float *x, int n, float *top);
    float (*largest)(const float *x, int n); /* no NaN */
    /* The first index that holds `value`, which is there. */
    int32_t (*find)(const float *x, int n, float value);
    /* Ids of first … first + n - 1, first a multiple of 4, that may score `least` or more;
     * ascending. ids[n]. Gives their number. */
    int (*hopeful)(const so_noise_row *r, int32_t first, int n, float least, int32_t *ids);
    /* Ids of first … first + n - 1 with y ≥ floor, ascending, y = (x − top) · inverse rounded as it
     * comes. Adds the sum of exp(y) of the others to *low, to a relative error of 1e-4. */
    int (*above)(const so_noise_row *r, int32_t first, int n, float floor, int32_t *ids,
                 double *low);
    /* out[i] = exp(y) in single precision, y = (x − top) · inverse rounded to single, as
     * so_noise_weight has it; gives the sum. x ≤ top, none NaN; −∞ weighs 0. */
    double (*weigh)(const float *x, int n, double top, double inverse, float *out);
    /* out[64 · n]: the next number of x for every bit that is set in said[n], lowest first, −∞ for
     * the others. Gives how many were taken. */
    int (*widen)(const float *x, const uint64_t *said, int n, float *out);
} so_noise_fns;

/* exp(y) for y ≤ 0 to 3e-10, 0 below −700: 2^i · P(r), y = i · ln 2 + r, |r| ≤ ln 2 / 2. */
#define SO_NOISE_LOG2E 0x1.71547652b82fep+0
#define SO_NOISE_LN2_HIGH 0x1.62e42fefa39efp-1
#define SO_NOISE_LN2_LOW 0x1.abc9e3b39803fp-56
#define SO_NOISE_LEAST (-700.0)
/* 1/8! … 1/1!, 1 */
#define SO_NOISE_EXP_TERMS                                                                         \
    {                                                                                              \
        0x1.a01a01a01a01ap-16, 0x1.a01a01a01a01ap-13, 0x1.6c16c16c16c17p-10, 0x1.1111111111111p-7, \
            0x1.5555555555555p-5, 0x1.5555555555555p-3, 0x1p-1, 0x1p+0, 0x1p+0                     \
    }
enum { SO_NOISE_N_TERMS = 9, SO_NOISE_LANES = 8 };

extern const so_noise_fns so_noise_scalar;
#if defined(__x86_64__)
extern const so_noise_fns so_noise_avx2, so_noise_avx512;
#endif
const so_noise_fns *so_noise(void); /* of the level in use (base/cpu.h) */

#endif
