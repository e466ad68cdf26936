/* The drafters that requests name, by spec. See drafters.c; speculate.c asks them. */
#ifndef SO_ENGINE_DRAFTERS_H
#define SO_ENGINE_DRAFTERS_H

#include "engine/impl.h"

/* The drafters of one spec, shared by the requests that name it. */
struct so_spec_set {
    so_spec_set *next;
    char *text; /* in its shortest form */
    so_draft_set drafters;
    so_plan_set *plan;
    int width;   /* chains that a tree may hold: as many as drafters are merged into it */
    int n_users; /* requests */
    bool failed; /* has been seen to fail */
    /* This step: */
    so_request **requests; /* [n_parallel] that have no guesses yet */
    so_plan_ask *asks;     /* [n_parallel] about them */
    so_draft_job *jobs;    /* [n_parallel] of one stage */
};

so_drafters *so_drafters_create(so_engine *e, so_planner *planner);
void so_drafters_free(so_drafters *d); /* NULL is fine */
/* The set of a spec, made if there is none; "user" is the caller's own drafter. */
int so_drafters_find(so_drafters *d, const char *spec, so_spec_set **out, so_err *err);
so_spec_set *so_drafters_sets(const so_drafters *d); /* the first; then set->next */

#endif
