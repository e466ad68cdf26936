/* What a drafter believes about a guess before anything was measured. Only the order matters in the
 * long run: plan/acceptance.h learns what each level of confidence is worth. */
#ifndef SO_DRAFT_CONFIDENCE_H
#define SO_DRAFT_CONFIDENCE_H

/* The continuation of a match of `len` tokens: 0.5 at one token, 0.8 at six, towards 1. */
static inline float so_draft_confidence(int len) { return (float)(len + 1) / ((float)len + 3); }

/* A token seen `count` times out of `total` after a context: unseen futures weigh like one more
 * observation, so that a context seen once is not trusted like one seen often. */
static inline float so_draft_count_confidence(double count, double total) {
    return (float)(count / (total + 1));
}

#endif
