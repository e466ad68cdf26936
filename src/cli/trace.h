/* Traces: one JSON object per engine step, written by `run --trace` and read by `sooth trace`. */
#ifndef SO_CLI_TRACE_H
#define SO_CLI_TRACE_H

#include <stdio.h>

#include "engine/engine.h"

/* so_step_fn; user is the FILE. */
void so_trace_write(void *user, const so_step_info *s);

#endif
