/* How packed weights are prefetched by software, chosen for the processor by measurement.
 *
 * Which distance is best, and whether software prefetch helps at all, differs between processors by
 * a factor of up to 1.5 (docs/performance.md). So the first start measures: products with one row
 * over the packed weights, with every candidate in turn, about 10 ms in all. The result is kept in a
 * small text file in the folder of the costs, one per processor, level and thread count:
 *
 *   sooth prefetch 1
 *   KEY                          processor, level, threads and version, in one line
 *   blocks32 LEAD CACHE AGREED   bytes ahead (0: no prefetch), cache (1 or 2)
 *   blocks256 LEAD CACHE AGREED
 *   end
 *
 * AGREED counts the measurements in a row that gave this result. After SO_PREFETCH_AGREED of them
 * nothing is measured any more; until then every start measures again. A measurement that a busy
 * neighbour disturbed therefore costs speed for one run only. The choice never changes a result. A
 * file that is missing, damaged or of another machine is ignored and overwritten. */
#ifndef SO_BACKEND_PREFETCH_H
#define SO_BACKEND_PREFETCH_H

#include "backend/backend.h"
#include "base/str.h"

enum { SO_PREFETCH_AGREED = 2 };

/* Applies the kept choice, or measures and keeps the result. cache_dir: the cache folder; NULL: the
 * result is not kept. Does nothing on backends other than cpu, on the scalar level, which does not
 * prefetch, and if the backend has packed fewer weights than a measurement needs. Nothing else may
 * use the backend meanwhile. */
void so_prefetch_choose(so_backend *b, const char *cache_dir);

/* What is used and why, for people: "blocks of 32: 12 KB ahead into L1, …". Appends nothing for
 * backends other than cpu. */
void so_prefetch_describe(const so_backend *b, so_buf *out);

#endif
