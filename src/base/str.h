/* Strings: so_str (borrowed bytes with a length) and so_buf (an owned buffer that grows up to a
 * maximum); and so_tokens, a growing list of token ids. */
#ifndef SO_BASE_STR_H
#define SO_BASE_STR_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Borrowed bytes with any content, not NUL-terminated. Print with "%.*s", SO_STR_ARG(s), which
 * prints at most 200 bytes. */
typedef struct so_str {
    const char *ptr;
    size_t len;
} so_str;

#define SO_STR(literal) ((so_str){"" literal, sizeof(literal) - 1})
#define SO_STR_ARG(s) (int)((s).len > 200 ? 200 : (s).len), (s).ptr

static inline so_str so_str_c(const char *s) { return (so_str){s, strlen(s)}; }
static inline bool so_str_eq(so_str a, so_str b) {
    return a.len == b.len && (a.len == 0 || memcmp(a.ptr, b.ptr, a.len) == 0);
}
static inline bool so_str_eq_c(so_str a, const char *b) { return so_str_eq(a, so_str_c(b)); }
static inline bool so_str_starts(so_str s, so_str prefix) {
    return s.len >= prefix.len && (prefix.len == 0 || memcmp(s.ptr, prefix.ptr, prefix.len) == 0);
}

/* FNV-1a, 64 bit. */
uint64_t so_hash_bytes(const void *p, size_t len);

/* A growing buffer. Initialise with zeros; `max` 0 means 1 GiB. An append that would exceed the
 * maximum adds nothing and sets `full`, which stays set, so callers check it once at the end.
 * `data` is NULL until the first append and NUL-terminated afterwards. */
typedef struct so_buf {
    char *data;
    size_t len, cap, max;
    bool full;
} so_buf;

void so_buf_append(so_buf *b, const void *p, size_t len);
void so_buf_append_str(so_buf *b, so_str s);
void so_buf_append_c(so_buf *b, const char *s);
void so_buf_append_char(so_buf *b, char c);
void so_buf_printf(so_buf *b, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void so_buf_clear(so_buf *b); /* keeps the memory */
void so_buf_free(so_buf *b);
static inline so_str so_buf_str(const so_buf *b) {
    return (so_str){b->data ? b->data : "", b->len};
}

/* A growing list of token ids. */
typedef struct so_tokens {
    int32_t *ids;
    size_t len, cap;
} so_tokens;

void so_tokens_push(so_tokens *t, int32_t id);
void so_tokens_append(so_tokens *t, const int32_t *ids, size_t n);
void so_tokens_free(so_tokens *t);

#endif
