/* What the requests of a command share, as its options state it: sampling, lengths, stops. */
#ifndef SO_CLI_REQUEST_H
#define SO_CLI_REQUEST_H

#include "cli/load.h"

/* Fills out (all zero before) with the model's own sampling and what the options lay over it; a
 * seed that was not given is drawn. Prompt, speculation and callbacks are left alone. 0, or the
 * exit status with the message printed; to be freed in both cases. */
int so_cli_request_read(const so_args *a, const so_bundle *b, so_request_opts *out);
void so_cli_request_free(so_request_opts *o);
/* The same for sampling without seed and bias: what the options say is laid over *s. */
void so_cli_sampling_read(const so_args *a, so_sample_params *s);
/* --nonce alone. */
void so_cli_nonce_read(const so_args *a, so_request_opts *o);
/* A seed that survives JSON readers which keep numbers as doubles. */
uint64_t so_cli_new_seed(void);

#endif
