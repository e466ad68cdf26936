/* Memory for packed weights: large chunks of huge pages where the kernel has them, handed out one
 * after the other. Weights of one pass then lie behind each other, so that fetching ahead runs from
 * one matrix into the next, and reading them misses few address translations (under a hypervisor
 * that doubles the bandwidth). A chunk goes back when the last part of it does. One thread. */
#ifndef SO_BACKEND_CPU_SLAB_H
#define SO_BACKEND_CPU_SLAB_H

#include <stddef.h>

typedef struct so_slab_chunk so_slab_chunk;
typedef struct so_slab {
    so_slab_chunk *chunks; /* the newest first */
} so_slab;

/* n_bytes aligned to 64, not zeroed by promise; NULL where there is no memory. *chunk is what
 * so_slab_give takes. */
void *so_slab_take(so_slab *s, size_t n_bytes, so_slab_chunk **chunk);
void so_slab_give(so_slab *s, so_slab_chunk *chunk);

#endif
