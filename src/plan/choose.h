/* Which of several registered drafts to take: the one with the greatest expected speed-up on this
 * machine, by the agreement that its file claims and what its runs here showed (record.h). One that
 * claims nothing is tried once. */
#ifndef SO_PLAN_CHOOSE_H
#define SO_PLAN_CHOOSE_H

#include "draft/registry.h"
#include "model/model.h"

/* Moves it to the front; without anything measured of this target with this type of cache the order
 * stays. */
void so_choose_first(const so_model *target, so_dtype kv_dtype, so_registry_found *f);

#endif
