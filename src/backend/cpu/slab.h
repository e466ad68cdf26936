/* Memory for packed weights: large chunks, backed by huge pages where the kernel provides them, and
 * allocated from front to back. The weights of one pass are therefore adjacent, so that prefetching
 * continues from one matrix into the next, and reading them causes few TLB misses (under a
 * hypervisor that doubles the bandwidth). A chunk is unmapped when its last allocation is released.
 * One thread. */
#ifndef SO_BACKEND_CPU_SLAB_H
#define SO_BACKEND_CPU_SLAB_H

#include <stddef.h>

typedef struct so_slab_chunk so_slab_chunk;
typedef struct so_slab {
    so_slab_chunk *chunks; /* newest first */
} so_slab;

/* n_bytes aligned to 64; do not rely on their being zeroed. NULL: no memory. *chunk: pass it to
 * so_slab_release. */
void *so_slab_alloc(so_slab *s, size_t n_bytes, so_slab_chunk **chunk);
void so_slab_release(so_slab *s, so_slab_chunk *chunk);

/* For measurements that read what is there: bytes allocated in all chunks, and in the largest. */
size_t so_slab_bytes(const so_slab *s);
size_t so_slab_largest(const so_slab *s);
/* Some n_bytes (a multiple of 64, at most so_slab_largest) of one chunk. Repeated calls walk through
 * all chunks in turn. Set *at to 0 before the first call and do not change it afterwards. */
const void *so_slab_run(const so_slab *s, size_t *at, size_t n_bytes);

#endif
