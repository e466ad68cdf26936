/* Memory, two rules: sizes we choose abort when there is none (so_alloc), sizes that the outside
 * chooses are tried and may fail (so_try_alloc). Products and sums of outside numbers go through
 * the checked helpers. An arena owns many small things that die together. */
#ifndef SO_BASE_MEM_H
#define SO_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Aborts on no memory; zero bytes give a valid pointer. */
void *so_alloc(size_t n_bytes);
void *so_calloc(size_t n, size_t size);
void *so_realloc(void *p, size_t n_bytes);
char *so_strdup(const char *s);
char *so_strndup(const char *s, size_t len);

/* n·size zeroed bytes, or NULL on overflow or no memory. */
void *so_try_alloc(size_t n, size_t size);

/* Aligned to 64 bytes and zeroed; NULL on no memory. Freed with free(). */
void *so_try_aligned(size_t n_bytes);

#define SO_NEW(T) ((T *)so_calloc(1, sizeof(T)))
#define SO_NEW_N(T, n) ((T *)so_calloc((size_t)(n), sizeof(T)))
#define SO_LEN(a) (sizeof(a) / sizeof((a)[0]))
#define SO_MIN(a, b) ((a) < (b) ? (a) : (b))
#define SO_MAX(a, b) ((a) > (b) ? (a) : (b))

/* false when the result does not fit. */
static inline bool so_mul_size(size_t a, size_t b, size_t *out) {
    return !__builtin_mul_overflow(a, b, out);
}
static inline bool so_add_size(size_t a, size_t b, size_t *out) {
    return !__builtin_add_overflow(a, b, out);
}

/* [off, off+len) lies within [0, total) */
static inline bool so_in_range(uint64_t off, uint64_t len, uint64_t total) {
    return off <= total && len <= total - off;
}

typedef struct so_arena_block so_arena_block;
typedef struct so_arena {
    so_arena_block *head;
    size_t used; /* bytes handed out */
    size_t max;  /* 0: no limit; past it so_arena_alloc gives NULL */
} so_arena;

/* 16-byte aligned, zeroed; NULL past `max` or on no memory. */
void *so_arena_alloc(so_arena *a, size_t n, size_t size);
char *so_arena_strndup(so_arena *a, const char *s, size_t len);
void so_arena_free(so_arena *a);

#endif
