/* The KV cache: which page holds which position of which sequence.
 *
 * This layer owns page numbers, page tables and reference counts. K and V themselves are stored by
 * the backend (so_kv_store). A page holds SO_KV_PAGE positions.
 *
 *   sequence A   len 70     pages [4][9][2]         page 9 is shared: refcount 2
 *   sequence B   len 50     pages [4][9]            fork of A at 50: page 9 is partly filled for B
 *
 * Two layouts behind one interface:
 *
 *   paged     A sequence takes pages as it grows and releases them as it shrinks. Forks and the
 *             prefix tree (prefix.h) share pages.
 *   slotted   A sequence owns a run of neighbouring pages, its page run, from its first begin until
 *             the sequence is cleared. It never runs out of pages half way, and shrinking only
 *             changes a number. In exchange every sequence needs the memory of the longest one,
 *             forks copy, and nothing is shared.
 *
 * A slot is the place of one position: slot s of a sequence is entry s mod SO_KV_PAGE of its page
 * s / SO_KV_PAGE.
 *
 * Every pass writes through a speculation. In this file the word means the slots that a pass
 * reserves (ARCHITECTURE.md, "KV cache"), with guesses or without: some of its nodes are committed
 * after the pass, the others are dropped.
 *
 *   begin(n)       Reserves slots len … len+n-1, after the committed ones. If the last page is
 *                  partly filled and shared, it is copied first: a write never reaches another
 *                  sequence. The forward pass then writes the slots: node i goes to slot len+i.
 *   extend(n)      Reserves n more slots, for another pass over the same speculation: nodes continue
 *                  to be numbered, node i goes to slot len+i. Its rows may follow any node of the
 *                  passes before, which they name by slot; the sequence keeps the slot of each
 *                  node's parent, so that a pass finds the whole path of such a row.
 *   commit(path)   Keeps the accepted nodes. Node path[i] moves from slot len+path[i] to slot
 *                  len+i, in ascending order of i. Since path[i] ≥ i, no move overwrites an entry
 *                  that a later move reads. A chain moves nothing. The new length is len+n_path.
 *   keep(nodes)    Keeps part of the tree, for beam search: the first nodes are a path that is
 *                  committed, the others stay open, and the speculation can be extended. All move
 *                  to the front, in ascending order, as in commit.
 *   abort()        Keeps no node. The length stays len.
 *
 * Commit and abort release the pages past the new length. A prompt chunk is a chain that is
 * committed whole.
 *
 * Pages are never zeroed, so a stale page may hold anything, NaN included. A row only reads slots
 * of its own path.
 *
 * Threads. There are no locks. One thread, the owner, makes all calls for a cache and its
 * sequences; for an engine this is the engine thread. Each group of functions below repeats who
 * may call it. "Owner, with the backend" marks calls that submit operations or create and free
 * buffers: the owner must also have exclusive use of the backend at that time. */
#ifndef SO_KV_KV_H
#define SO_KV_KV_H

#include "backend/backend.h"

typedef struct so_kv so_kv;
typedef struct so_seq so_seq;

/* What the sequences of an encoder-decoder model attend to besides their own positions
 * (model/source.h, which owns it). Sequences only count themselves, and share prefixes only with
 * sequences that have a source of the same serial. */
typedef struct so_source {
    int n_users;
    int64_t serial; /* > 0 */
} so_source;

typedef enum so_kv_layout { SO_KV_PAGED, SO_KV_SLOTTED } so_kv_layout;

/* Create and free: owner, with the backend. */

int so_kv_create(so_backend *b, const so_kv_shape *shape, so_kv **out, so_err *err);
/* Slotted: each page run has room for run_len positions. There are as many page runs as the
 * shape's pages allow, at least one. */
int so_kv_create_slotted(so_backend *b, const so_kv_shape *shape, int run_len, so_kv **out,
                         so_err *err);
void so_kv_free(so_kv *kv); /* all sequences must have been freed */

/* Fixed at creation: any thread. */

so_kv_store *so_kv_backing(so_kv *kv);
const so_kv_shape *so_kv_get_shape(const so_kv *kv);
so_kv_layout so_kv_get_layout(const so_kv *kv);

/* Page counts: owner.
 * free: held by no sequence and not in the prefix tree. idle: held by the prefix tree alone.
 * available: both together: all pages that begin can use, since it evicts idle pages as needed. */
int so_kv_free_pages(const so_kv *kv);
int so_kv_idle_pages(const so_kv *kv);
int so_kv_available_pages(const so_kv *kv);

/* Pure functions of their arguments: any thread. */

/* Bytes of one position, K and V, all layers: 2·n_layers·n_heads_kv·so_kv_entry_bytes. */
size_t so_kv_bytes_per_token(const so_kv_shape *shape);
/* Pages needed for n positions. */
static inline int so_kv_pages_for(int n) { return (n + SO_KV_PAGE - 1) / SO_KV_PAGE; }

/* Sequences: owner. No backend call unless stated. */

so_seq *so_seq_create(so_kv *kv);
void so_seq_free(so_seq *s); /* NULL is fine; aborts an open speculation */
/* Allocates the page table for n positions, so that growing to n allocates no memory. Takes no
 * pages. */
void so_seq_reserve(so_seq *s, int n);
so_kv *so_seq_kv(const so_seq *s);
int so_seq_len(const so_seq *s);
/* The page table, including pages that an open speculation has reserved. */
const int32_t *so_seq_pages(const so_seq *s, int *n_pages);

/* The source of an empty sequence; NULL: none. so_seq_clear and so_seq_free give it up, a fork gets
 * the same. */
void so_seq_set_source(so_seq *s, so_source *source);
so_source *so_seq_get_source(const so_seq *s);

/* Creates a sequence with the first `len` positions of s. Paged: the pages are shared. Slotted: the
 * entries are copied (owner, with the backend), and NULL is returned if no page run is free. s must
 * have no open speculation. */
so_seq *so_seq_fork(so_seq *s, int len);
/* Drops the positions from new_len on and releases pages that start at or past it. Never extends.
 * Pages in the prefix tree stay there. s must have no open speculation. */
void so_seq_truncate_to(so_seq *s, int new_len);

/* Allocates the table of parents, so that speculations of up to n nodes can be extended. */
void so_seq_reserve_nodes(so_seq *s, int n);

/* Back to the condition after so_seq_create: aborts an open speculation, releases all pages and the
 * page run. The memory of the page table is kept. */
void so_seq_clear(so_seq *s);

/* Speculation: owner. begin, extend and commit: owner, with the backend. */

/* The number of available pages that begin(n_nodes) would take, including the copy of a shared last
 * page; or extend(n_nodes), if a speculation is open. */
int64_t so_seq_pages_needed(const so_seq *s, int n_nodes);
/* The largest n_nodes that begin, or extend, could reserve with n_pages more pages. */
int64_t so_seq_max_nodes(const so_seq *s, int64_t n_pages);
/* SO_ELIMIT if too few pages are available or the page run is full; nothing has changed then. */
int so_seq_begin(so_seq *s, int n_nodes, so_err *err);
/* Adds n_nodes to the open speculation, whose passes so far must have been submitted. The nodes must
 * fit the table of so_seq_reserve_nodes. Fails as begin does. */
int so_seq_extend(so_seq *s, int n_nodes, so_err *err);
int so_seq_open_nodes(const so_seq *s); /* all nodes of the open speculation, 0 if none */
/* The slot of the first node of the latest begin or extend, and the number of its nodes: what the
 * next pass writes. */
int so_seq_next_slot(const so_seq *s);
int so_seq_next_nodes(const so_seq *s);
/* The slot that the open node in `slot` follows; len − 1 if it follows the committed positions. Set
 * by the pass that writes the node, if the speculation can be extended. */
int so_seq_parent(const so_seq *s, int slot);
void so_seq_set_parent(so_seq *s, int slot, int parent);
/* path: node numbers, strictly ascending, each parent before its child. Copies are submitted to the
 * backend, in order with the passes before and after. */
void so_seq_commit(so_seq *s, const int32_t *path, int n_path);
void so_seq_commit_chain(so_seq *s, int n); /* path 0 … n-1; copies nothing */
/* Commits the path nodes[0 … n_path) and keeps nodes[n_path … n) open: node nodes[i] becomes node
 * i − n_path. Other nodes are dropped. nodes: strictly ascending; with each node its parent, or it
 * follows the committed positions. Parents must be known (so_seq_reserve_nodes), so the latest pass
 * must have been submitted. With n == n_path the speculation ends. */
void so_seq_keep(so_seq *s, const int32_t *nodes, int n, int n_path);
void so_seq_abort(so_seq *s);

/* Checks all invariants of kv.c: reference counts against page tables and prefix tree, the free
 * list, ranges. Aborts with both values at the first violation. Thread: owner. */
void so_kv_check(const so_kv *kv);

#endif
