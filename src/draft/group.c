/* Several drafters as one: alternatives (the first with guesses), or merged into one tree.
 *
 *   a,b   each request goes to a; the requests without guesses then go to b, as one batch
 *   a+b   every drafter adds to the same tree; equal guesses share a node and leave one proposal
 *         each, as the verifier needs (so_tree_add). The node budget is divided equally; what one
 *         member does not use goes to the next.
 *
 * All members observe all accepted tokens, so that any of them can continue. Thread: the engine
 * thread. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/str.h"
#include "draft/drafters.h"

typedef struct pending {
    int job;    /* index in the caller's array */
    int before; /* proposals in its tree before the call */
} pending;

typedef struct group {
    so_drafter base;
    so_drafter *members[SO_GROUP_MAX];
    int n;
    bool first;
    so_draft_job *jobs; /* [jobs_cap] for one member's call */
    pending *pending;   /* [jobs_cap] requests without guesses so far */
    int jobs_cap, n_open;
} group;

typedef struct group_state {
    void *states[SO_GROUP_MAX];
} group_state;

static void group_close(so_drafter *d, void *state) {
    group *g = (group *)d;
    group_state *s = state;
    for (int i = 0; i < g->n; i++)
        g->members[i]->vt->close(g->members[i], s->states[i]);
    g->n_open--;
    free(s);
}

static void reserve(group *g, int n_jobs) {
    if (n_jobs <= g->jobs_cap)
        return;
    g->jobs = so_realloc(g->jobs, (size_t)n_jobs * sizeof *g->jobs);
    g->pending = so_realloc(g->pending, (size_t)n_jobs * sizeof *g->pending);
    g->jobs_cap = n_jobs;
}

static int group_open(so_drafter *d, const so_draft_text *text, void **state, so_err *err) {
    group *g = (group *)d;
    group_state *s = SO_NEW(group_state);
    for (int i = 0; i < g->n; i++) {
        int rc = g->members[i]->vt->open(g->members[i], text, &s->states[i], err);
        if (rc != 0) {
            while (--i >= 0)
                g->members[i]->vt->close(g->members[i], s->states[i]);
            free(s);
            return rc;
        }
    }
    reserve(g, ++g->n_open); /* so that propose allocates nothing */
    *state = s;
    return 0;
}

static void group_observe(so_drafter *d, void *state, const int32_t *tokens, int n) {
    group *g = (group *)d;
    group_state *s = state;
    for (int i = 0; i < g->n; i++)
        so_drafter_observe(g->members[i], s->states[i], tokens, n);
}

static void group_add_hidden(so_drafter *d, void *state, int pos, const float *x) {
    group *g = (group *)d;
    group_state *s = state;
    for (int i = 0; i < g->n; i++)
        so_drafter_add_hidden(g->members[i], s->states[i], pos, x);
}

/* The rows are those of the first member that wants any. */
static void group_add_end_hidden(so_drafter *d, void *state, int pos, int row, const float *x) {
    group *g = (group *)d;
    group_state *s = state;
    for (int i = 0; i < g->n; i++)
        if (g->members[i]->end_rows.inputs == g->base.end_rows.inputs)
            so_drafter_add_end_hidden(g->members[i], s->states[i], pos, row, x);
}

static int propose_first(group *g, so_draft_job *jobs, int n_jobs, so_err *err) {
    int n = n_jobs;
    for (int i = 0; i < n; i++)
        g->pending[i] = (pending){i, jobs[i].tree->n_proposals};
    for (int m = 0; m < g->n && n > 0; m++) {
        for (int i = 0; i < n; i++) {
            g->jobs[i] = jobs[g->pending[i].job];
            g->jobs[i].state = ((group_state *)g->jobs[i].state)->states[m];
        }
        int rc = g->members[m]->vt->propose(g->members[m], g->jobs, n, err), left = 0;
        if (rc != 0)
            return rc;
        for (int i = 0; i < n; i++)
            if (g->jobs[i].tree->n_proposals == g->pending[i].before)
                g->pending[left++] = g->pending[i];
        n = left;
    }
    return 0;
}

static int propose_merged(group *g, so_draft_job *jobs, int n_jobs, so_err *err) {
    for (int m = 0; m < g->n; m++) {
        for (int i = 0; i < n_jobs; i++) {
            int used = jobs[i].tree->n_nodes - 1, left = SO_MAX(jobs[i].max_nodes - used, 0);
            g->jobs[i] = jobs[i];
            g->jobs[i].state = ((group_state *)jobs[i].state)->states[m];
            g->jobs[i].max_nodes = used + (left + g->n - m - 1) / (g->n - m);
        }
        int rc = g->members[m]->vt->propose(g->members[m], g->jobs, n_jobs, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

static int group_propose(so_drafter *d, so_draft_job *jobs, int n_jobs, so_err *err) {
    group *g = (group *)d;
    reserve(g, n_jobs);
    return g->first ? propose_first(g, jobs, n_jobs, err) : propose_merged(g, jobs, n_jobs, err);
}

static void group_free(so_drafter *d) {
    group *g = (group *)d;
    for (int i = 0; i < g->n; i++)
        so_drafter_free(g->members[i]);
    free(g->jobs);
    free(g->pending);
    free(g);
}

/* The longest context of its members; 0 (any length) if one of them has no limit. */
static int group_n_ctx(const so_drafter *d) {
    const group *g = (const group *)d;
    int most = 0;
    for (int i = 0; i < g->n; i++) {
        int n = so_drafter_n_ctx(g->members[i]);
        if (n == 0)
            return 0;
        most = SO_MAX(most, n);
    }
    return most;
}

/* The largest fraction of its members. */
static double group_cache_fraction(const so_drafter *d, int n_tokens) {
    const group *g = (const group *)d;
    double most = 0;
    for (int i = 0; i < g->n; i++)
        most = SO_MAX(most, so_drafter_cache_fraction(g->members[i], n_tokens));
    return most;
}

static void group_preempt(so_drafter *d, void *state) {
    group *g = (group *)d;
    for (int i = 0; i < g->n; i++)
        so_drafter_preempt(g->members[i], ((group_state *)state)->states[i]);
}

#define GROUP_VT(NAME)                                                              \
    {                                                                               \
        .name = NAME, .free = group_free, .open = group_open, .close = group_close, \
        .propose = group_propose, .observe = group_observe, .n_ctx = group_n_ctx,   \
        .cache_fraction = group_cache_fraction, .preempt = group_preempt,           \
        .add_hidden = group_add_hidden, .add_end_hidden = group_add_end_hidden      \
    }
static const so_drafter_vt FIRST_VT = GROUP_VT("first");
static const so_drafter_vt MERGED_VT = GROUP_VT("merged");

so_drafter *so_group_create(so_drafter *const *members, int n, bool first) {
    SO_ASSERT(n >= 1 && n <= SO_GROUP_MAX);
    group *g = SO_NEW(group);
    g->base.vt = first ? &FIRST_VT : &MERGED_VT;
    memcpy(g->members, members, (size_t)n * sizeof *members);
    g->n = n;
    g->first = first;
    for (int i = 0; i < n; i++) {
        g->base.draws |= members[i]->draws;
        g->base.has_cost |= members[i]->has_cost;
        g->base.wants_target_hidden |= members[i]->wants_target_hidden;
        if (g->base.end_rows.n == 0)
            g->base.end_rows = members[i]->end_rows;
        const char *name = members[i]->vt->name;
        uint64_t ids[] = {g->base.id, members[i]->id, so_hash_bytes(name, strlen(name))};
        g->base.id = so_hash_bytes(ids, sizeof ids);
    }
    return &g->base;
}

bool so_group_is(const so_drafter *d) { return d->vt == &FIRST_VT || d->vt == &MERGED_VT; }
bool so_group_is_first(const so_drafter *d) { return d->vt == &FIRST_VT; }
int so_group_size(const so_drafter *d) { return so_group_is(d) ? ((const group *)d)->n : 1; }

so_drafter *so_group_member(const so_drafter *d, int i) {
    SO_ASSERT(so_group_is(d) && i >= 0 && i < so_group_size(d));
    return ((const group *)d)->members[i];
}

void *so_group_member_state(const so_drafter *d, void *state, int i) {
    SO_ASSERT(so_group_is(d) && i >= 0 && i < so_group_size(d));
    return ((group_state *)state)->states[i];
}
