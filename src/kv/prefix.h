/* The prefix tree: whole pages of texts that were computed once, kept for whoever begins alike.
 *
 *            ┌ [12] "…brief." ─ [7] "Why is the …"        a node is a page of SO_KV_PAGE tokens,
 *   root ─ [3]                                             and its way from the root says what
 *            └ [9] "…brief." ─ [1] "def fib(n):…" ─ [20]   stands before it
 *
 * Entries of a position depend on the tokens up to it alone (row invariance), so a page found by
 * its tokens is the page that would be computed, bit for bit: a hit changes no token. Tokens are
 * compared, hashes only lead to them.
 *
 * A sequence takes pages by reference and offers those it has filled; only tokens that stand are
 * ever offered, guesses never. Pages that no sequence holds any more stay until so_seq_begin needs
 * them; the longest idle goes first, and a page never before those behind it. Truncating a sequence
 * gives back its own reference and leaves the tree's.
 *
 * Memory is taken once, by so_prefix_enable. One thread, the cache's. */
#ifndef SO_KV_PREFIX_H
#define SO_KV_PREFIX_H

#include "kv/kv.h"

/* From now on prefixes are kept. SO_EUNSUPPORTED for slots, which share nothing. */
int so_prefix_enable(so_kv *kv, so_err *err);
bool so_prefix_enabled(const so_kv *kv);

/* How many of the n tokens, in whole pages, could be taken; *n_idle: how many of those pages are
 * idle, and would not be available afterwards. 0 where prefixes are not kept. */
int so_prefix_match(const so_kv *kv, const int32_t *tokens, int n, int *n_idle);
/* Extends s, which holds the beginning of `tokens`, by what the tree has of the first n. Gives the
 * number of positions gained; 0 also where s ends within a page. */
int so_prefix_take(so_seq *s, const int32_t *tokens, int n);
/* The first n positions of s hold `tokens`, for good: whole pages among them enter the tree. Where
 * it has an equal page already, s goes on with that one and gives its own back. */
void so_prefix_offer(so_seq *s, const int32_t *tokens, int n);
/* Gives up all idle pages. */
void so_prefix_clear(so_kv *kv);

#endif
