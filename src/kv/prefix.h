/* The prefix tree: whole pages of earlier texts, kept for requests that start with the same tokens.
 *
 *            ┌ [12] "…brief." ─ [7] "Why is the …"        A node is a page of SO_KV_PAGE tokens.
 *   root ─ [3]                                             The path from the root gives the tokens
 *            └ [9] "…fully." ─ [1] "def fib(n):…" ─ [20]   before it.
 *
 * A hit changes no token. The K and V of a position depend only on the tokens up to it (row
 * invariance), so a page found by its tokens is bit-identical to the page that would be computed.
 * Lookups compare the tokens; the hash only selects the bucket.
 *
 * A sequence takes pages by reference and offers pages it has filled. Only committed tokens may be
 * offered, never guesses. A page that no sequence holds any more (an idle page) stays in the tree
 * until so_seq_begin needs it. The page that has been idle longest is evicted first, and a page is
 * never evicted before its descendants. Truncating a sequence releases the sequence's reference
 * and keeps the tree's.
 *
 * so_prefix_enable allocates all memory. Thread: the owner of the cache, for all functions. */
#ifndef SO_KV_PREFIX_H
#define SO_KV_PREFIX_H

#include "kv/kv.h"

/* Creates the prefix tree of a cache; no effect if there is one. SO_EUNSUPPORTED for the slotted
 * layout, which shares no pages. */
int so_prefix_enable(so_kv *kv, so_err *err);
bool so_prefix_enabled(const so_kv *kv);

/* Returns how many of the n tokens, in whole pages, so_prefix_take would find. *n_idle: how many of
 * those pages are idle and would stop being available. Returns 0 without a prefix tree. */
int so_prefix_match(const so_kv *kv, const int32_t *tokens, int n, int *n_idle);
/* Extends s, which holds the first positions of `tokens`, by the pages that the tree has for the
 * first n tokens. Returns the number of positions gained; 0 also if s ends within a page. */
int so_prefix_take(so_seq *s, const int32_t *tokens, int n);
/* Adds the whole pages among the first n positions of s to the tree. `tokens` are the tokens of
 * these positions, all committed. If the tree already has an equal page, s switches to it and
 * releases its own. */
void so_prefix_offer(so_seq *s, const int32_t *tokens, int n);
/* Evicts all idle pages. */
void so_prefix_clear(so_kv *kv);

#endif
