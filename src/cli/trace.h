/* Traces: one JSON object per step of the engine, written by `run --trace`, drawn by `trace`. */
#ifndef SO_CLI_TRACE_H
#define SO_CLI_TRACE_H

#include <stdio.h>

#include "engine/engine.h"

/* so_step_fn; user is the FILE. */
void so_trace_write(void *user, const so_step_info *s);

#endif
