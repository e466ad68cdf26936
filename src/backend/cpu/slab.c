/* A list of chunks; allocations come from the newest one. If the next allocation does not fit, the
 * remainder of the chunk stays unused: untouched, it takes address space but no memory. Each chunk
 * counts its allocations and is unmapped when the last one is released; until then, released memory
 * is not reused. One thread at a time. */
#include "backend/cpu/slab.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "base/err.h"
#include "base/mem.h"

enum { HUGE_PAGE = 2 << 20, CHUNK_BYTES = 32 << 20 };

struct so_slab_chunk {
    so_slab_chunk *next;
    unsigned char *map, *data; /* data: first huge-page border in the mapping */
    size_t map_bytes, n_bytes, used;
    int n_parts; /* allocations not yet released */
};

static so_slab_chunk *chunk_create(size_t n_bytes) {
    size_t map_bytes;
    n_bytes = SO_MAX(n_bytes, (size_t)CHUNK_BYTES);
    if (!so_add_size(n_bytes, HUGE_PAGE, &map_bytes))
        return NULL;
    void *map = mmap(NULL, map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED)
        return NULL;
    so_slab_chunk *c = SO_NEW(so_slab_chunk);
    c->map = map;
    c->map_bytes = map_bytes;
    c->n_bytes = n_bytes;
    c->data = c->map + (-(uintptr_t)map & (HUGE_PAGE - 1));
    madvise(c->data, n_bytes, MADV_HUGEPAGE); /* advice only; small pages work too */
    return c;
}

void *so_slab_alloc(so_slab *s, size_t n_bytes, so_slab_chunk **chunk) {
    size_t size;
    if (!so_add_size(n_bytes, 63, &size))
        return NULL;
    size &= ~(size_t)63;
    so_slab_chunk *c = s->chunks;
    if (!c || c->n_bytes - c->used < size) {
        c = chunk_create(size);
        if (!c)
            return NULL;
        c->next = s->chunks;
        s->chunks = c;
    }
    void *p = c->data + c->used;
    c->used += size;
    c->n_parts++;
    *chunk = c;
    return p;
}

void so_slab_release(so_slab *s, so_slab_chunk *chunk) {
    SO_ASSERT(chunk->n_parts > 0);
    if (--chunk->n_parts > 0)
        return;
    so_slab_chunk **at = &s->chunks;
    while (*at != chunk)
        at = &(*at)->next;
    *at = chunk->next;
    munmap(chunk->map, chunk->map_bytes);
    free(chunk);
}

size_t so_slab_bytes(const so_slab *s) {
    size_t n = 0;
    for (const so_slab_chunk *c = s->chunks; c; c = c->next)
        n += c->used;
    return n;
}

size_t so_slab_largest(const so_slab *s) {
    size_t n = 0;
    for (const so_slab_chunk *c = s->chunks; c; c = c->next)
        n = SO_MAX(n, c->used);
    return n;
}

/* *at is a position in the used bytes of all chunks, in list order. If fewer than n_bytes of its
 * chunk are left, the next chunk that has n_bytes is used; after the last, the first. */
const void *so_slab_run(const so_slab *s, size_t *at, size_t n_bytes) {
    SO_ASSERT(n_bytes > 0 && n_bytes <= so_slab_largest(s));
    for (;; *at = 0) {
        size_t before = 0;
        for (const so_slab_chunk *c = s->chunks; c; before += c->used, c = c->next) {
            size_t off = *at > before ? *at - before : 0;
            if (off > c->used || c->used - off < n_bytes)
                continue;
            *at = before + off + n_bytes;
            return c->data + off;
        }
    }
}
