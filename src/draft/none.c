/* The drafter without guesses, so that plain decoding is not a special case. */
#include <stdlib.h>

#include "base/mem.h"
#include "draft/drafters.h"

static void none_free(so_drafter *d) { free(d); }

static int none_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d;
    (void)text;
    (void)err;
    *state = NULL;
    return 0;
}

static void none_close(so_drafter *d, void *state) {
    (void)d;
    (void)state;
}

static int none_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)d;
    (void)jobs;
    (void)n_jobs;
    (void)err;
    return 0;
}

static const so_drafter_vt NONE_VT = {
    .name = "none",
    .free = none_free,
    .open = none_open,
    .close = none_close,
    .propose = none_propose,
};

so_drafter *so_none_create(void) {
    so_drafter *d = SO_NEW(so_drafter);
    d->vt = &NONE_VT;
    d->never_guesses = true;
    d->request_only = true;
    return d;
}
