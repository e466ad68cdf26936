/* Scale search for quantisers: finds the scale (and offset) with which small integers approximate a
 * group of floats best, among the candidates of fit.c. It returns no codes: the caller rounds the
 * scale to the file format first and then computes the codes with the rounded scale. */
#ifndef SO_FORMAT_FIT_H
#define SO_FORMAT_FIT_H

/* The scale s that minimises Σ w·(x − s·q)² with q integers in [−levels, levels−1]. s may be
 * negative: the range has one more negative code, and the sign is chosen so that the element of
 * largest magnitude can use it. n must be a multiple of 4. */
float so_fit_symmetric(const float *x, const float *w, int n, int levels);

/* The s and m that minimise Σ w·(x − s·q − m)² with q integers in [0, q_max], s ≥ 0 and, if
 * m_not_positive, m ≤ 0. n must be a multiple of 4. */
void so_fit_affine(const float *x, const float *w, int n, int q_max, int m_not_positive, float *s,
                   float *m);

/* Nearest integer to x (ties to even), clamped to [lo, hi]. */
static inline float so_round_to(float x, float lo, float hi) {
    x = x > lo ? x : lo; /* NaN becomes lo */
    x = x < hi ? x : hi;
    /* adding 1.5·2^23 rounds away the fraction bits; exact and branch-free for |x| < 2^22 */
    return (x + 12582912.0f) - 12582912.0f;
}

#endif
