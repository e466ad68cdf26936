/* What passes took and what drafters were worth, kept between runs: the planner's curve t(n) and
 * the records of drafters (draft/record.h), one small file for each model shape, CPU, thread count
 * and cache type, under the cache folder. A run that finds its file plans well from the first
 * token; one that does not learns from its own passes, and nothing is measured at load. The text
 * never depends on it, so every failure is silent but for the debug log. */
#ifndef SO_ENGINE_COSTS_H
#define SO_ENGINE_COSTS_H

#include "draft/curve.h"
#include "draft/record.h"
#include "model/model.h"

/* Whose costs they are, as one line. */
void so_costs_key(const so_model *m, so_dtype kv_dtype, so_buf *out);

/* Where they lie: a path in `dir`/costs. Caller frees. */
char *so_costs_path(const char *dir, so_str key);

/* Leaves c and r (which must be empty) alone and gives false where there is no file, or one for
 * another key, or one that makes no sense. */
bool so_costs_read(const char *path, so_str key, so_curve *c, so_records *r);
int so_costs_write(const char *path, so_str key, const so_curve *c, const so_records *r,
                   so_err *err);

#endif
