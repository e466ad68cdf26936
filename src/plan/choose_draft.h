/* Chooses among several registered drafts: the one with the largest expected speed-up on this
 * machine, from its claimed agreement and its record (record.h). A draft with neither a claim nor a
 * usable record is preferred until its record has SO_TUNE_CHOICE_TESTS tested first guesses. */
#ifndef SO_PLAN_CHOOSE_DRAFT_H
#define SO_PLAN_CHOOSE_DRAFT_H

#include "draft/registry.h"
#include "model/model.h"
#include "plan/record.h"

/* Returns the index of the draft with the largest expected speed-up, the first of equals. */
int so_choose_draft(const so_records *r, const so_costs *c, const so_registry_found *f,
                    const so_model *target);

/* Moves the chosen draft to the front. The order stays if nothing was measured for this target with
 * this cache type. */
void so_choose_first(const so_model *target, so_dtype kv_dtype, so_registry_found *f);

#endif
