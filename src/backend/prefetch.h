/* How packed weights are prefetched by software, chosen for the processor by measurement.
 *
 * Processors differ in which prefetch distance is best and in whether software prefetch helps at
 * all. Products with several rows differ from those with one: on Zen 4 all choices are nearly equal
 * with one row, and the worst is three times slower than the best with eight (docs/performance.md).
 * So the first start measures, for about 20 ms: it multiplies four rows, then one, with the packed
 * weights, trying each candidate in turn. The result is kept in a small text file in the cache
 * folder, below costs/, one per processor, CPU level, thread count and version of sooth:
 *
 *   sooth prefetch 2
 *   KEY                               processor, level, threads and version, in one line
 *   blocks32 LEAD CACHE AGREED        for types with blocks of 32 (Q4_0 … Q8_0), one row
 *   blocks256 LEAD CACHE AGREED       for types with blocks of 256 (K types), one row
 *   blocks32rows LEAD CACHE AGREED    the same for several rows
 *   blocks256rows LEAD CACHE AGREED
 *   end
 *
 *   LEAD     prefetch distance in bytes; 0: no software prefetch
 *   CACHE    cache level to prefetch into, 1 or 2
 *   AGREED   number of consecutive measurements that gave this result
 *
 * A choice is settled once SO_PREFETCH_AGREED measurements agree. Until all are settled, every
 * start measures again, so a measurement disturbed by other load costs speed for one run only. The
 * choice never changes a result. A file that is missing, damaged or of another machine is ignored
 * and overwritten. */
#ifndef SO_BACKEND_PREFETCH_H
#define SO_BACKEND_PREFETCH_H

#include "backend/backend.h"
#include "base/str.h"

enum { SO_PREFETCH_AGREED = 2 };

/* Applies the kept choice if it is settled; otherwise measures, applies the result and keeps it.
 * Call it after the weights were packed. With too few packed weights to measure, the default stays.
 * cache_dir: the cache folder; NULL: nothing is read or kept. Does nothing on backends other than
 * cpu, and on the scalar level, which does not prefetch. Nothing else may use the backend
 * meanwhile. */
void so_prefetch_choose(so_backend *b, const char *cache_dir);

/* Appends the choice in use and where it came from, for people: "blocks of 32: 12 KB ahead into L1,
 * …". Appends nothing for backends other than cpu. */
void so_prefetch_describe(const so_backend *b, so_buf *out);

#endif
