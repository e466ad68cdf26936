/* A draw by weight: the first index whose running sum passes `at`, which is u · (sum of all), u in
 * (0,1).
 *
 * Whole parts of SO_PICK_PART weights are passed over by their sums, which have several lanes; one
 * running sum would wait for each of its additions. The lanes belong to the caller, and the same
 * lanes give the same index to the bit. A weight that is not above 0 is never drawn; where rounding
 * leaves the whole sum short of `at`, the last one above 0 is. −1 where there is none.
 *
 * Always inlined, so that the two functions cost no calls. Pure; any thread. */
#ifndef SO_BASE_PICK_H
#define SO_BASE_PICK_H

#include <stdint.h>

enum { SO_PICK_PART = 64 };

/* Of weights w: the i-th, or the sum of the part that begins at i. */
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
