/* Memory. There are two kinds of allocation:
 *   so_alloc      the program chose the size; out of memory aborts
 *   so_try_alloc  a file or request chose the size; out of memory returns NULL
 * Products and sums of external numbers go through so_mul_size and so_add_size, which detect
 * overflow. An arena holds many small allocations that are freed together. */
#ifndef SO_BASE_MEM_H
#define SO_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Abort if out of memory. A size of 0 returns a valid pointer. */
void *so_alloc(size_t n_bytes);
void *so_calloc(size_t n, size_t size);
void *so_realloc(void *p, size_t n_bytes);
char *so_strdup(const char *s);
char *so_strndup(const char *s, size_t len);

/* n·size zeroed bytes; NULL on overflow or if out of memory. */
void *so_try_alloc(size_t n, size_t size);

/* n_bytes zeroed bytes, aligned to 64; NULL if out of memory. Freed with free(). */
void *so_try_aligned(size_t n_bytes);

#define SO_NEW(T) ((T *)so_calloc(1, sizeof(T)))
#define SO_NEW_N(T, n) ((T *)so_calloc((size_t)(n), sizeof(T)))
#define SO_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define SO_MIN(a, b) ((a) < (b) ? (a) : (b))
#define SO_MAX(a, b) ((a) > (b) ? (a) : (b))

/* Return false if the result overflows. */
static inline bool so_mul_size(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool so_add_size(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

/* Whether [off, off + len) lies within [0, total). */
static inline bool so_in_range(uint64_t off, uint64_t len, uint64_t total) {
    return off <= total && len <= total - off;
}

typedef struct so_arena_block so_arena_block;
typedef struct so_arena {
    so_arena_block *head;
    size_t used; /* bytes allocated */
    size_t max;  /* 0: no limit; an allocation beyond it returns NULL */
} so_arena;

/* n·size zeroed bytes, aligned to 16; NULL beyond `max` or if out of memory. */
void *so_arena_alloc(so_arena *a, size_t n, size_t size);
char *so_arena_strndup(so_arena *a, const char *s, size_t len);
void so_arena_free(so_arena *a);

#endif
