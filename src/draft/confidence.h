/* A drafter's confidence in a guess before anything was measured. In the long run only the order
 * matters: plan/acceptance.h learns the acceptance of each class of confidence. */
#ifndef SO_DRAFT_CONFIDENCE_H
#define SO_DRAFT_CONFIDENCE_H

/* The continuation of a match of `len` tokens: 0.5 at one token, 0.8 at seven, towards 1. */
static inline float so_draft_confidence(int len) { return (float)(len + 1) / ((float)len + 3); }

/* A token seen `count` times out of `total` after a context. Unseen followers weigh like one more
 * observation, so that a context seen once is trusted less than one seen often. */
static inline float so_draft_count_confidence(double count, double total) {
    return (float)(count / (total + 1));
}

#endif
