/* Shadow scoring: what a point guess would have been worth, without testing it.
 *
 * A deterministic guess that costs nothing is right exactly when the text says so later, in every
 * verification mode: with `match` and greedy by definition, with `reject` because a point x is
 * accepted with probability p(x) and the text is drawn from p. So the guesses of each round are
 * kept, tested or not, and compared with the tokens as they come. A drafter that the planner has
 * dropped goes on being measured, and taking it back needs no probe.
 *
 *   propose → so_shadow_watch (the whole tree, before it is pruned) → … → emit → so_shadow_advance
 *
 * Siblings are scored in test order: a guess of rank 1 counts only where the one of rank 0 was
 * wrong, and by itself as what its drafter would have guessed alone. Drawn proposals are left out:
 * their chance is not that of being equal. */
#ifndef SO_PLAN_SHADOW_H
#define SO_PLAN_SHADOW_H

#include "plan/acceptance.h"

enum { SO_SHADOW_TREES = 16, SO_SHADOW_GUESSES = 24 };

typedef struct so_shadow_guess {
    int32_t token;
    float confidence;
    int16_t parent, child; /* nodes of the watched tree */
    uint8_t drafter, depth, rank;
} so_shadow_guess;

typedef struct so_shadow_tree {
    so_shadow_guess guesses[SO_SHADOW_GUESSES];
    int n, at; /* the node the text has reached; −1: over */
} so_shadow_tree;

/* One request. Zero-initialise. */
typedef struct so_shadow {
    so_shadow_tree trees[SO_SHADOW_TREES]; /* a ring: the oldest gives way */
    int next;
} so_shadow;

/* Remembers the first 24 point guesses of a tree whose root is the last token of the text. */
void so_shadow_watch(so_shadow *s, const so_accept *a, const so_tree *t);
/* Tokens that came after that, in order. */
void so_shadow_advance(so_shadow *s, so_accept *a, const int32_t *tokens, int n);

#endif
