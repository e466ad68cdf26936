/* The model and the engine options of the command line, for all commands that run a model. */
#ifndef SO_CLI_LOAD_H
#define SO_CLI_LOAD_H

#include "cli/options.h"
#include "engine/bundle.h"
#include "engine/engine.h"

/* Opens the model of -m with a progress bar. Returns 0, or the exit status with the message
 * printed. */
int so_cli_open(const so_args *a, so_bundle *out);
/* Engine options: context, cache, batch size, number of sequences. */
int so_cli_engine_opts(const so_args *a, const so_bundle *b, so_engine_opts *out);
so_dtype so_cli_kv_dtype(const so_args *a); /* value of --kv-type */
/* The tokens of one prompt as in `sooth run`: in the model's chat template, unless it has none or
 * `raw` is set. */
int so_cli_encode(const so_bundle *b, bool raw, so_str text, so_tokens *out, so_err *err);

#endif
