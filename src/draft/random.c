/* Uniform guesses: the baseline for every drafter, and the planner's worst case.
 *
 * All guesses share one q row of 1/n. If the tree has no rows or the request is greedy they are
 * points, which is exact for any guess that does not depend on the verifier's random numbers; these
 * draws have keys of their own. No state. */
#include <stdlib.h>

#include "base/mem.h"
#include "draft/drafters.h"

static int random_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    (void)d;
    (void)text;
    (void)err;
    *state = NULL;
    return 0;
}

static void random_close(so_drafter *d, void *state) {
    (void)d;
    (void)state;
}

static int uniform_row(const so_draft_job *job) {
    int row = job->temp > 0 ? so_tree_new_row(job->tree) : -1;
    for (int i = 0; row >= 0 && i < job->tree->n_vocab; i++)
        so_tree_row(job->tree, row)[i] = 1.0f / (float)job->tree->n_vocab;
    return row;
}

static int random_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    (void)err;
    for (int j = 0; j < n_jobs; j++) {
        const so_draft_job *job = &jobs[j];
        if (job->max_depth < 1 || job->max_nodes < 1)
            continue;
        int row = uniform_row(job), n_vocab = job->tree->n_vocab;
        for (int node = 0, depth = 1; node >= 0; depth++) {
            int32_t token = (int32_t)(so_draft_uniform(d, job, depth, 0) * n_vocab);
            node = so_draft_add(job, node, SO_MIN(token, n_vocab - 1), so_draft_kind(row), row,
                                d->index, 1.0f / (float)n_vocab);
        }
    }
    return 0;
}

static void random_free(so_drafter *d) { free(d); }

static const so_drafter_vt RANDOM_VT = {
    .name = "random",
    .free = random_free,
    .open = random_open,
    .close = random_close,
    .propose = random_propose,
};

so_drafter *so_random_create(void) {
    so_drafter *d = SO_NEW(so_drafter);
    d->vt = &RANDOM_VT;
    d->draws = true;
    d->request_only = true;
    return d;
}
