/* Counts which token follows which context, for the n-grams of a sliding window of text.
 *
 * Orders max_order down to 2: a context is the 1 to 3 preceding tokens. Exactly the n-grams whose
 * last token is among the latest `window` tokens are counted; older ones are removed, which bounds
 * the memory (about 230 bytes per token of the window). One thread. */
#ifndef SO_DRAFT_COUNTS_H
#define SO_DRAFT_COUNTS_H

#include "base/err.h"

#include <stdint.h>

enum { SO_COUNTS_MAX_ORDER = 4 };

typedef struct so_counts so_counts;
int so_counts_create(int max_order, int window, so_counts **out, so_err *err);
void so_counts_free(so_counts *c); /* NULL is fine */
void so_counts_add(so_counts *c, int32_t token);

/* FNV-1a over tokens as 32-bit values. */
uint64_t so_counts_hash(const int32_t *context, int n);

/* What followed a context. */
typedef struct so_follow {
    int order;  /* of the n-gram that was found, 0: none */
    int32_t id; /* of the context, for so_counts_each */
    int32_t best;
    int32_t best_count, total;
} so_follow;

/* Looks up the longest known context at the end of `text`. `best` is its most frequent follower; of
 * equally frequent ones, the one seen last. */
so_follow so_counts_find(const so_counts *c, const int32_t *text, int n);
/* Calls visit for every follower of a context with its count, in a fixed order, until it returns
 * false. */
void so_counts_each(const so_counts *c, int32_t id,
                    bool (*visit)(void *user, int32_t token, int32_t count), void *user);

#endif
