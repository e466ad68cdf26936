/* Request options from the command line: sampling, length, stop texts, prompt. */
#ifndef SO_CLI_REQUEST_H
#define SO_CLI_REQUEST_H

#include "cli/load.h"

/* Fills *out, which must be zero, with the model's recommended sampling and the options that
 * override it; without --seed the seed is random. Prompt, speculation and callbacks are not set.
 * Returns 0, or the exit status with the message printed; free *out in both cases. */
int so_cli_request_read(const so_args *a, const so_bundle *b, so_request_opts *out);
void so_cli_request_free(so_request_opts *o);
/* Overrides *s with the sampling options, except seed and bias. */
void so_cli_sampling_read(const so_args *a, so_sample_params *s);
/* Reads --nonce. */
void so_cli_nonce_read(const so_args *a, so_request_opts *o);
/* For commands with a prompt as argument: makes the argument the value of --prompt. Returns 0, or 2
 * with a message printed if both are given. */
int so_cli_prompt_argument(so_args *a);
/* A random seed below 2^53, so that JSON readers that use doubles keep it exactly. */
uint64_t so_cli_new_seed(void);

#endif
