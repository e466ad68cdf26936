/* What run and bench share: the model and engine options that the command line states. */
#ifndef SO_CLI_LOAD_H
#define SO_CLI_LOAD_H

#include "cli/options.h"
#include "engine/bundle.h"
#include "engine/engine.h"

/* Opens the model of -m with a progress bar. 0, or the exit status with the message printed. */
int so_cli_open(const so_args *a, so_bundle *out);
/* Engine options: context, cache, batch size, parallel. */
int so_cli_engine_opts(const so_args *a, const so_bundle *b, so_engine_opts *out);
so_dtype so_cli_kv_dtype(const so_args *a); /* of --kv-type */
/* The tokens of one prompt as `run` would feed it: in the model's chat format, where it has one and
 * `raw` does not forbid it. */
int so_cli_encode(const so_bundle *b, bool raw, so_str text, so_tokens *out, so_err *err);

#endif
