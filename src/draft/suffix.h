/* An index of one growing token text that knows, after every token, the longest suffix that has
 * occurred before, and where. Also read by a cursor: the longest suffix of another text that occurs
 * in this one. Amortised constant time per token; about 100 bytes per token, taken at creation. */
#ifndef SO_DRAFT_SUFFIX_H
#define SO_DRAFT_SUFFIX_H

#include "base/err.h"

#include <stdint.h>

typedef struct so_suffix so_suffix;

/* Room for `cap` tokens, untouched pages until they are used. SO_ENOMEM, SO_ERANGE. */
int so_suffix_create(int cap, so_suffix **out, so_err *err);
void so_suffix_free(so_suffix *s); /* NULL is fine */
void so_suffix_clear(so_suffix *s);
/* What `cap` tokens cost. */
size_t so_suffix_bytes(int cap);

/* false, and nothing changes, when the index is full. Any value may be a token. */
bool so_suffix_add(so_suffix *s, int32_t token);
int so_suffix_len(const so_suffix *s);
int so_suffix_cap(const so_suffix *s);
const int32_t *so_suffix_tokens(const so_suffix *s);

/* Length of the longest suffix of the text that also ends earlier (overlaps count), 0 if none.
 * *end: the index just after its latest earlier occurrence, so that tokens[*end] is what followed.
 * Among equally long matches the latest counts, but for texts whose repeated suffixes nest more
 * than 64 deep (long loops), where an older one may be given. */
int so_suffix_match(const so_suffix *s, int *end);

/* A place in the index reached by another text. Adding to the index makes cursors stale. */
typedef struct so_suffix_cursor {
    int32_t state, len;
} so_suffix_cursor; /* zero: at the start */
void so_suffix_step(const so_suffix *s, so_suffix_cursor *c, int32_t token);
/* Index just after the latest occurrence of the cursor's match; its length is c->len. */
int so_suffix_end(const so_suffix *s, const so_suffix_cursor *c);
/* How many tokens from the start of `tokens` occur in the text, as one run. */
int so_suffix_prefix(const so_suffix *s, const int32_t *tokens, int n);

#endif
