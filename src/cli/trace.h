/* Traces: one JSON object per engine step, and before it one per round whose pass held guesses, with
 * its tree; written by `run --trace`. `sooth trace` reads the steps. */
#ifndef SO_CLI_TRACE_H
#define SO_CLI_TRACE_H

#include <stdio.h>

#include "engine/engine.h"

/* so_step_fn; user is the FILE. */
void so_trace_write(void *user, const so_step_info *s);
/* {"round": N, "tree": [{"token", "parent", "chance", "fate"}, …]}: the guesses in the order of the pass;
 * parent −1 is the root. chance: the planner's estimate that the guess is accepted, given that its
 * parent is; null: none. fate: "accepted", "rejected" or "untested". */
void so_trace_write_round(FILE *f, const so_round *round);

#endif
