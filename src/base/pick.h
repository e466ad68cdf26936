/* Weighted random choice: the first index at which the running sum of weights exceeds `at`, where
 * at = u · (sum of all weights) and u is a random number in (0,1).
 *
 * A part of SO_PICK_PART weights is skipped as a whole if the running sum stays at or below `at`.
 * The caller computes a part's sum in several SIMD lanes, because in a single running sum each
 * addition waits for the one before. Callers that add in the same order get the same index. A
 * weight ≤ 0 (or NaN) is never chosen. If rounding leaves the total sum at or below `at`, the last
 * weight > 0 is chosen. Returns −1 if there is none.
 *
 * Always inlined, so that the two function arguments cost no calls. Pure; any thread. */
#ifndef SO_BASE_PICK_H
#define SO_BASE_PICK_H

#include <stdint.h>

enum { SO_PICK_PART = 64, SO_PICK_LANES = 8 };

/* The sum of lanes in the order that all callers with doubles use. */
static inline double so_pick_joined(const double s[SO_PICK_LANES]) {
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

/* Returns the weight at i (`weight`), or the sum of the part that begins at i (`part`). */
typedef double so_pick_fn(const void *w, int32_t i);

__attribute__((always_inline)) static inline int32_t so_pick(const void *w, int n, double at,
                                                             so_pick_fn *part, so_pick_fn *weight) {
    double sum = 0, x;
    int32_t first = 0, last = -1;
    for (; first + SO_PICK_PART < n && sum + (x = part(w, first)) <= at; first += SO_PICK_PART)
        sum += x;
    for (int32_t i = first; i < n && !(sum > at); i++)
        if ((x = weight(w, i)) > 0) {
            last = i;
            sum += x;
        }
    for (int32_t i = first; last < 0 && i > 0; i--)
        if (weight(w, i - 1) > 0)
            last = i - 1;
    return last;
}

#endif
