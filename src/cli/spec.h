/* Speculation as the command line states it: which drafter, which draft model, which verifier. */
#ifndef SO_CLI_SPEC_H
#define SO_CLI_SPEC_H

#include "cli/load.h"

enum { SO_CLI_DRAFT_MAX = 16 }; /* --draft-max where it is not given */

typedef struct so_cli_spec {
    so_spec_opts opts; /* drafter NULL: plain decoding */
    so_bundle draft;   /* model NULL: none */
    so_tokens expected;
    bool wants_model; /* the spec names `model` without a file */
    bool may_model;   /* it names `auto`, which takes a draft where there is one */
    bool wants_text;  /* the spec names `predict` or `oracle` */
} so_cli_spec;

/* Checks the options alone, before anything is loaded. 0, or the exit status with the message
 * printed. */
int so_cli_spec_read(const so_args *a, so_cli_spec *out);
/* For commands that cannot tell a drafter the text themselves: it must have been given. */
int so_cli_spec_check_text(const so_args *a, const so_cli_spec *s);
/* Opens the draft model beside the target and completes the engine's options. */
int so_cli_spec_open(const so_args *a, const so_bundle *target, so_cli_spec *s, so_engine_opts *eo);
/* Another drafter for the requests to come, out of what is open; text must stay. SO_EINVAL where it
 * makes no sense or needs a file that was not given at the start; nothing has changed then. */
int so_cli_spec_change(so_cli_spec *s, const char *text, so_err *err);
void so_cli_spec_close(so_cli_spec *s);

#endif
