/* The options for speculation: drafter, draft model, verifier. */
#ifndef SO_CLI_SPEC_H
#define SO_CLI_SPEC_H

#include "cli/load.h"

enum { SO_CLI_DRAFT_MAX = 16 }; /* default of --draft-max */

typedef struct so_cli_spec {
    so_spec_opts opts; /* drafter NULL: plain decoding */
    so_bundle draft;   /* model NULL: none */
    so_tokens expected;
    bool wants_model; /* the spec names `model` without a file */
    bool takes_model; /* the spec names `auto`, which uses a draft model if there is one */
    bool wants_text;  /* the spec names `predict` or `oracle` */
    int n_nodes;      /* largest node budget that the spec names; 0: none */
} so_cli_spec;

/* Checks the options before any file is opened. Returns 0, or the exit status with the message
 * printed. */
int so_cli_spec_read(const so_args *a, so_cli_spec *out);
/* Checks that --prediction is given if a drafter needs it; for commands that do not generate the
 * expected text themselves. */
int so_cli_spec_check_text(const so_args *a, const so_cli_spec *s);
/* Opens the draft model, if any, and completes the engine options. */
int so_cli_spec_open(const so_args *a, const so_bundle *target, so_cli_spec *s, so_engine_opts *eo);
/* Opens the draft model of -md with a progress bar. One with another vocabulary than the target's,
 * or registered for another target, is refused with a message that names both files and the
 * difference. 0, or the exit status with the message printed. */
int so_cli_open_draft(const so_args *a, const so_bundle *target, so_bundle *out);
int so_cli_open_draft_named(const so_args *a, const so_bundle *target, const char *name,
                            so_bundle *out);
/* Prints that `option` ("--spec model") needs a draft model and none is registered; returns 2. */
int so_cli_no_draft(const so_args *a, const char *option);
/* Changes the drafter of later requests to `text`, which must stay valid. SO_EINVAL, with nothing
 * changed, if the spec is wrong, or needs a draft model or an expected text that is not open. */
int so_cli_spec_change(so_cli_spec *s, const char *text, so_err *err);
void so_cli_spec_close(so_cli_spec *s);

#endif
