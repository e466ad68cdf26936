/* Scale search for quantisers: the scale (and offset) that make a few integers describe a few
 * floats best. The codes themselves are left to the caller, who rounds again once the scale has
 * been stored in its file format. */
#ifndef SO_FORMAT_FIT_H
#define SO_FORMAT_FIT_H

/* The scale s that minimises Σ w·(x − s·q)² with q integers in [−levels, levels−1]. It may be
 * negative: the code range reaches one further below zero, and the largest element should have that
 * code. */
float so_fit_symmetric(const float *x, const float *w, int n, int levels);

/* s and m that minimise Σ w·(x − s·q − m)² with q in [0, q_max], s ≥ 0 and, if m_not_positive, m ≤
 * 0. */
void so_fit_affine(const float *x, const float *w, int n, int q_max, int m_not_positive, float *s,
                   float *m);

/* Nearest integer to x (ties to even), clamped to [lo, hi]. */
static inline float so_round_to(float x, float lo, float hi) {
    x = x > lo ? x : lo; /* a NaN becomes lo */
    x = x < hi ? x : hi;
    /* adding 1.5·2^23 leaves no fraction bits; exact and branch-free for |x| < 2^22 */
    return (x + 12582912.0f) - 12582912.0f;
}

#endif
