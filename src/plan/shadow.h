/* Shadow drafts: scores point guesses against the text that follows, without testing them.
 *
 * A deterministic guess is correct exactly if the text continues with it, in every verification
 * mode: with `match` and greedy by definition, with `reject` because a point x is accepted with
 * probability p(x) and the text is sampled from p. So the guesses of each round are kept, tested or
 * not, and compared with the tokens as they are decided. A free drafter that the planner does not
 * use is still measured, and using it again needs no probe.
 *
 *   propose → so_shadow_add (the whole tree, before it is pruned) → … → emit → so_shadow_advance
 *
 * Siblings are scored in test order: a guess of rank 1 counts only if the one of rank 0 was wrong.
 * In addition it counts at rank 0, as what its drafter would have guessed without the others.
 * Sampled proposals are not scored: their acceptance is not the chance of being equal to the
 * text. */
#ifndef SO_PLAN_SHADOW_H
#define SO_PLAN_SHADOW_H

#include "plan/acceptance.h"

enum { SO_SHADOW_TREES = 16, SO_SHADOW_GUESSES = 24 };

typedef struct so_shadow_guess {
    int32_t token;
    float confidence;
    int16_t parent, child; /* nodes of the tree */
    uint8_t drafter, depth, rank;
} so_shadow_guess;

typedef struct so_shadow_tree {
    so_shadow_guess guesses[SO_SHADOW_GUESSES];
    int n, at; /* at: the node that the text has reached; −1: the text deviates from the tree */
} so_shadow_tree;

/* One request. Zero-initialise. */
typedef struct so_shadow {
    so_shadow_tree trees[SO_SHADOW_TREES]; /* a ring: a new tree replaces the oldest */
    int next;
} so_shadow;

/* Keeps the first 24 point guesses of a tree whose root is the last token of the text. */
void so_shadow_add(so_shadow *s, const so_accept *a, const so_tree *t);
/* Scores the trees against the tokens that follow, in order. */
void so_shadow_advance(so_shadow *s, so_accept *a, const int32_t *tokens, int n);

#endif
