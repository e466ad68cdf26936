/* The KV cache: which page holds which position of which sequence. Entries themselves lie behind
 * the backend (so_kv_store); this layer owns page numbers and reference counts.
 *
 *   sequence A   len 70     pages [4][9][2]         page 9 is shared: refcount 2
 *   sequence B   len 50     pages [4][9]            fork of A at 50: page 9 is partly filled for B
 *
 * Two layouts behind one interface:
 *
 *   paged     pages are taken as a sequence grows and given back as it shrinks; forks and the
 *             prefix tree (prefix.h) share them
 *   slotted   a sequence owns a run of neighbouring pages, its slot, from its first begin until it
 *             is cleared: it can never run out half way and shrinking only changes a number, but
 *             every sequence takes the room of the longest; forks copy, nothing is shared
 *
 * Every pass is a speculation: begin(n) reserves slots len … len+n-1 behind the committed length
 * (and copies a shared, partly filled last page first, so that writes never reach another
 * sequence), the forward pass writes them, then
 *
 *   commit(path)   keeps the accepted nodes: node path[i] moves from slot len+path[i] to slot
 * len+i, in ascending order (path[i] ≥ i, so no move overwrites a source still needed); a chain
 * moves nothing; abort()        keeps none.
 *
 * Both give back the pages past the new length. A prompt chunk is a chain that is committed whole.
 * Pages are never zeroed: stale ones may hold anything, and no row ever looks at a slot it did not
 * get from its own path. One thread owns a cache. */
#ifndef SO_KV_KV_H
#define SO_KV_KV_H

#include "backend/backend.h"

typedef struct so_kv so_kv;
typedef struct so_seq so_seq;

typedef enum so_kv_layout { SO_KV_PAGED, SO_KV_SLOTTED } so_kv_layout;

int so_kv_create(so_backend *b, const so_kv_shape *shape, so_kv **out, so_err *err);
/* Slots of slot_len positions, as many as the shape's pages make; at least one. */
int so_kv_create_slotted(so_backend *b, const so_kv_shape *shape, int slot_len, so_kv **out,
                         so_err *err);
void so_kv_free(so_kv *kv); /* all sequences must be freed */
so_kv_store *so_kv_backing(so_kv *kv);
const so_kv_shape *so_kv_get_shape(const so_kv *kv);
so_kv_layout so_kv_get_layout(const so_kv *kv);
/* Pages that nobody holds; pages that the prefix tree alone holds; and both together, which is what
 * begin may take: it evicts from the tree as it must. */
int so_kv_free_pages(const so_kv *kv);
int so_kv_idle_pages(const so_kv *kv);
int so_kv_available_pages(const so_kv *kv);
/* Bytes one position takes, K and V, all layers: 2·n_layers·n_heads_kv·so_kv_entry_bytes. */
size_t so_kv_bytes_per_token(const so_kv_shape *shape);
/* Pages that hold n positions. */
static inline int so_kv_pages_for(int n) { return (n + SO_KV_PAGE - 1) / SO_KV_PAGE; }

so_seq *so_seq_create(so_kv *kv);
void so_seq_free(so_seq *s); /* NULL is fine; aborts an open speculation */
/* Memory for the page table of n positions, so that growing to them takes none. Takes no pages. */
void so_seq_reserve(so_seq *s, int n);
so_kv *so_seq_kv(const so_seq *s);
int so_seq_len(const so_seq *s);
const int32_t *so_seq_pages(const so_seq *s, int *n_pages); /* reserved ones included */

/* A new sequence with the first `len` positions of s: shared where pages are, copied where slots
 * are, and NULL where no slot is free. s must have no open speculation. */
so_seq *so_seq_fork(so_seq *s, int len);
/* Forgets positions from new_len on; frees pages that start at or past it; never extends. The
 * prefix tree keeps what it holds. s must have no open speculation. */
void so_seq_truncate_to(so_seq *s, int new_len);

/* As when it was created: an open speculation is aborted, all pages and the slot are given back.
 * The memory of its table stays. */
void so_seq_clear(so_seq *s);

/* The pages that begin(n_nodes) would take from the available ones, its copy of a shared last page
 * included. */
int64_t so_seq_need(const so_seq *s, int n_nodes);
/* The most nodes that begin could have with n_pages of them. */
int64_t so_seq_room(const so_seq *s, int64_t n_pages);
/* SO_ELIMIT, nothing changed, when fewer pages are available than needed, or the slot is full. */
int so_seq_begin(so_seq *s, int n_nodes, so_err *err);
int so_seq_open_nodes(const so_seq *s); /* n_nodes of the open speculation, 0 if none */
/* path: strictly ascending node numbers, a parent before its child. Copies are submitted to the
 * backend, in order with the passes around them. */
void so_seq_commit(so_seq *s, const int32_t *path, int n_path);
void so_seq_commit_chain(so_seq *s, int n); /* path 0 … n-1 */
void so_seq_abort(so_seq *s);

/* Walks everything: counts against tables and the prefix tree, free list, ranges. Aborts with both
 * values on a breach. */
void so_kv_check(const so_kv *kv);

#endif
