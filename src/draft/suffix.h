/* An index of one growing token text: after every token it has the longest suffix that occurred
 * before, and where. With a cursor it finds the longest suffix of another text that occurs in this
 * one. Amortised constant time per token; about 100 bytes per token, allocated at creation. One
 * thread. */
#ifndef SO_DRAFT_SUFFIX_H
#define SO_DRAFT_SUFFIX_H

#include "base/err.h"

#include <stdint.h>

typedef struct so_suffix so_suffix;

/* Capacity `cap` tokens; pages are touched only when used. SO_ENOMEM, SO_ERANGE. */
int so_suffix_create(int cap, so_suffix **out, so_err *err);
void so_suffix_free(so_suffix *s); /* NULL is fine */
void so_suffix_clear(so_suffix *s);
/* Memory for `cap` tokens. */
size_t so_suffix_bytes(int cap);

/* Returns false, and changes nothing, if the index is full. Any value may be a token. */
bool so_suffix_add(so_suffix *s, int32_t token);
int so_suffix_len(const so_suffix *s);
int so_suffix_cap(const so_suffix *s);
const int32_t *so_suffix_tokens(const so_suffix *s);

/* Length of the longest suffix of the text that also ends earlier (overlaps count), 0 if none.
 * *end: the index just after its latest earlier occurrence, so tokens[*end] is what followed. Among
 * equally long matches the latest is returned, except in texts whose repeated suffixes nest more
 * than 64 deep (long loops), where it may be an older one. */
int so_suffix_match(const so_suffix *s, int *end);

/* A position in the index, reached by another text. Adding to the index invalidates cursors. */
typedef struct so_suffix_cursor {
    int32_t state, len;
} so_suffix_cursor; /* zero: at the start */
void so_suffix_step(const so_suffix *s, so_suffix_cursor *c, int32_t token);
/* Index just after the latest occurrence of the cursor's match; its length is c->len. */
int so_suffix_end(const so_suffix *s, const so_suffix_cursor *c);
/* The number of tokens from the start of `tokens` that occur in the text, as one run. */
int so_suffix_prefix(const so_suffix *s, const int32_t *tokens, int n);

#endif
