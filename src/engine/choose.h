/* Which of several registered drafts to take: the one with the greatest expected speed-up on this
 * machine, by what it says of its agreement and what its runs here showed (record.h). One that says
 * nothing is tried once. */
#ifndef SO_ENGINE_CHOOSE_H
#define SO_ENGINE_CHOOSE_H

#include "draft/registry.h"
#include "model/model.h"

/* Moves it to the front; without anything measured of this target the order stays. */
void so_choose_first(const so_model *target, so_registry_found *f);

#endif
