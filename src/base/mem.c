/* Allocation and the arena (see mem.h). Any thread; an arena may be used by one thread at a
 * time. */
#include "base/mem.h"

#include <stdlib.h>
#include <string.h>

#include "base/err.h"

enum { ARENA_BLOCK = 64 * 1024 };

struct so_arena_block {
    so_arena_block *next;
    size_t used, cap;
    _Alignas(16) unsigned char data[];
};

void *so_alloc(size_t n_bytes) {
    void *p = malloc(n_bytes ? n_bytes : 1);
    if (!p)
        so_panic(__FILE__, __LINE__, "out of memory: %zu bytes", n_bytes);
    return p;
}

void *so_calloc(size_t n, size_t size) {
    void *p = calloc(n ? n : 1, size ? size : 1);
    if (!p)
        so_panic(__FILE__, __LINE__, "out of memory: %zu times %zu bytes", n, size);
    return p;
}

void *so_realloc(void *p, size_t n_bytes) {
    void *q = realloc(p, n_bytes ? n_bytes : 1);
    if (!q)
        so_panic(__FILE__, __LINE__, "out of memory: %zu bytes", n_bytes);
    return q;
}

char *so_strndup(const char *s, size_t len) {
    char *p = so_alloc(len + 1);
    if (len)
        memcpy(p, s, len);
    p[len] = '\0';
    return p;
}

char *so_strdup(const char *s) { return so_strndup(s, strlen(s)); }

void *so_try_alloc(size_t n, size_t size) {
    size_t total;
    if (!so_mul_size(n, size, &total))
        return NULL;
    return calloc(total ? total : 1, 1);
}

void *so_try_aligned(size_t n_bytes) {
    size_t padded;
    void *p = NULL;
    if (!so_add_size(n_bytes, 63, &padded))
        return NULL;
    padded &= ~(size_t)63;
    if (posix_memalign(&p, 64, padded ? padded : 64) != 0)
        return NULL;
    memset(p, 0, padded);
    return p;
}

void *so_arena_alloc(so_arena *a, size_t n, size_t size) {
    size_t want;
    if (!so_mul_size(n, size, &want) || !so_add_size(want, 15, &want))
        return NULL;
    want &= ~(size_t)15;
    if (a->max && (want > a->max || a->used > a->max - want))
        return NULL;
    so_arena_block *b = a->head;
    if (!b || b->cap - b->used < want) {
        size_t cap = SO_MAX(want, (size_t)ARENA_BLOCK), total;
        if (!so_add_size(cap, sizeof *b, &total) || !(b = calloc(1, total)))
            return NULL;
        b->cap = cap;
        b->next = a->head;
        a->head = b;
    }
    void *p = b->data + b->used;
    b->used += want;
    a->used += want;
    return p;
}

char *so_arena_strndup(so_arena *a, const char *s, size_t len) {
    char *p = so_arena_alloc(a, len + 1, 1);
    if (p && len)
        memcpy(p, s, len);
    return p;
}

void so_arena_free(so_arena *a) {
    for (so_arena_block *b = a->head, *next; b; b = next) {
        next = b->next;
        free(b);
    }
    a->head = NULL;
    a->used = 0;
}
