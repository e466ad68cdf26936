/* The drafters that requests name, by spec. See drafters.c; speculate.c calls them. */
#ifndef SO_ENGINE_DRAFTERS_H
#define SO_ENGINE_DRAFTERS_H

#include "engine/impl.h"
#include "plan/beam_levels.h"

/* The drafters of one spec, shared by all requests that name it. */
struct so_spec_set {
    so_spec_set *next;
    char *text; /* the spec in its shortest form */
    so_draft_set drafters;
    so_plan_set *plan;
    int n_users;                /* requests that use it */
    bool failed;                /* has failed before: further failures are logged at debug level */
    so_beam_levels beam_levels; /* of its beam searches */
    bool off;                   /* failed on the target's device: not asked again */
    /* This step: */
    so_request **requests; /* [n_parallel] requests that have no kept guesses yet */
    so_plan_query *asks;   /* [n_parallel] queries to the planner about them */
    so_draft_job *jobs;    /* [n_parallel] drafting jobs of one stage */
};

so_drafters *so_drafters_create(so_engine *e, so_planner *planner);
void so_drafters_free(so_drafters *d); /* NULL is allowed */
/* Finds the set of a spec or creates it. The spec "user" is the caller's own drafter. */
int so_drafters_find(so_drafters *d, const char *spec, so_spec_set **out, so_err *err);
/* The most guesses that the drafters of a set can merge into one tree of this depth. */
int so_drafters_max_nodes(const so_spec_set *s, int depth);
/* Lookups of all async() drafters so far. */
so_async_counts so_drafters_async(const so_drafters *d);
/* Whether there is an async thread that runs passes on one of our backends. */
bool so_drafters_has_async_thread(const so_drafters *d);
/* Around calls of drafters that may share a backend with those of async(). */
void so_drafters_lock(so_drafters *d);
void so_drafters_unlock(so_drafters *d);
so_spec_set *so_drafters_sets(const so_drafters *d); /* the first set; further ones by set->next */

#endif
