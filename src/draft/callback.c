/* A user's function as a drafter.
 *
 * The function sees the text and fills an array; it never sees the tree. Ids outside the vocabulary
 * or more of them than were asked for are errors, because they are bugs that would otherwise show
 * as a drafter that never helps. Its cost is measured call by call, so that the planner can treat a
 * slow function like a slow model. No state of ours per request. */
#include <stdlib.h>

#include "base/mem.h"
#include "base/str.h"
#include "draft/drafters.h"

enum { NAME_LEN = 31 };

typedef struct callback {
    so_drafter base;
    so_drafter_vt vt; /* its own, for the name */
    char name[NAME_LEN + 1];
    so_draft_fn *fn;
    void *user;
} callback;

static int callback_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d;
    (void)text;
    (void)err;
    *state = NULL;
    return 0;
}

static void callback_close(so_drafter *d, void *state) {
    (void)d;
    (void)state;
}

static int check(const callback *c, const int32_t *ids, int n, int max, int n_vocab, so_err *err) {
    if (n < 0)
        return so_err_set(err, SO_EINVAL, "drafter %s failed with %d", c->name, n);
    if (n > max)
        return so_err_set(err, SO_ERANGE,
                          "drafter %s proposed %d tokens; at most %d were asked for", c->name, n,
                          max);
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= n_vocab)
            return so_err_set(err, SO_ERANGE,
                              "drafter %s proposed token %d; the vocabulary has %d tokens", c->name,
                              (int)ids[i], n_vocab);
    return 0;
}

static int callback_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    callback *c = (callback *)d;
    for (int j = 0; j < n_jobs; j++) {
        so_draft_job *job = &jobs[j];
        int32_t ids[SO_TREE_MAX];
        int max = SO_MIN(SO_MIN(job->max_nodes, job->max_depth), SO_TREE_MAX - 1);
        if (max < 1)
            continue;
        int n = c->fn(c->user, job->tokens, job->n_tokens, job->n_prompt, ids, max);
        job->n_levels = SO_MAX(n, 1);
        int rc = check(c, ids, n, max, job->tree->n_vocab, err);
        if (rc != 0)
            return rc;
        for (int i = 0, node = 0; i < n && node >= 0; i++)
            node = so_draft_add(job, node, ids[i], SO_Q_POINT, -1, d->index, 0.5f);
    }
    return 0;
}

static void callback_free(so_drafter *d) { free(d); }

so_drafter *so_callback_create(const char *name, so_draft_fn *fn, void *user) {
    callback *c = SO_NEW(callback);
    size_t len = strlen(name);
    memcpy(c->name, name, SO_MIN(len, (size_t)NAME_LEN));
    c->vt = (so_drafter_vt){
        .name = c->name,
        .free = callback_free,
        .open = callback_open,
        .close = callback_close,
        .propose = callback_propose,
    };
    c->base.vt = &c->vt;
    c->base.costs = true;
    c->fn = fn;
    c->user = user;
    return &c->base;
}
