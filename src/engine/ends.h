/* Look-ahead rows on the ends of trees, for drafters with so_drafter.end_rows (PaSS).
 *
 * A round ends at a node of its tree: the guesses up to it are accepted and none of its children is. The
 * target's row of that node decides the next token; rows below it with learned inputs guess the tokens
 * after that one, as if they were what follows. Which node it will be is not known before the pass, so
 * the rows hang on the likeliest ends:
 *
 *   text … root ─ x1 ─ x2            the tree that the pass verifies
 *           │      └ e1 ─ e2         used if x1 is accepted and x2 is not
 *           └ e1 ─ e2                used if x1 is rejected
 *
 * The rows are reserved with the tree and never committed, so the cache keeps none of them, and no row of
 * the tree attends to them. They have the room that guesses leave.
 *
 * Whether a round's drafter has guesses depends on where the round before ended, and on its tree; the
 * random numbers that test them are new (verify/reject.c, steps 7 and 8). The ends are chosen by the
 * confidences in the tree, not by what the planner has learned, so that with a fixed length the guesses
 * depend on the request alone (nonce.c).
 *
 * Thread: the engine thread. */
#ifndef SO_ENGINE_ENDS_H
#define SO_ENGINE_ENDS_H

#include "engine/impl.h"

/* Most rows that a request's drafters hang on a tree; 0: none. */
int so_ends_max_rows(const so_request *r);
/* The tree of this step is final: chooses its ends. room: rows that the request has left. Returns the number
 * of rows. */
int so_ends_choose(so_request *r, int room);
/* Adds the rows after those of the tree, whose root is row `root` of the step; at: the first free one.
 * Returns the index after the last. */
int so_ends_add_rows(so_request *r, int seq, int root, int at);
/* The next token was sampled from the row of `node`: the drafters get the states of the rows below it. */
void so_ends_observe(so_request *r, int node);

#endif
