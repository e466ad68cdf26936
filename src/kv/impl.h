/* Declarations shared by kv.c (pages, sequences) and prefix.c (the prefix tree). Private to src/kv.
 * All of it runs on the thread that owns the cache. */
#ifndef SO_KV_IMPL_H
#define SO_KV_IMPL_H

#include "base/mem.h"
#include "kv/kv.h"

/* Entries copied per operation. A tree has at most 256 nodes and a partly filled page at most 31
 * entries. A longer list is split into several operations; they run in order, so the result is the
 * same. */
enum { SO_KV_COPY_CAP = 256 };

typedef struct so_prefix so_prefix;

struct so_kv {
    so_backend *backend;
    so_kv_shape shape;
    so_kv_store *store;
    so_buffer *copies;   /* so_kv_slot from[SO_KV_COPY_CAP], to[SO_KV_COPY_CAP] */
    int run_pages;       /* pages per page run; 0: paged layout */
    int32_t *refs;       /* [n_pages] */
    int32_t *free_pages; /* [n_pages] stack: free pages, or first pages of free page runs */
    int n_free;          /* entries of free_pages */
    so_prefix *prefix;   /* NULL: no prefix tree */
    so_seq *seqs;
    int n_pending; /* copies collected in from, to and not yet submitted */
    so_kv_slot from[SO_KV_COPY_CAP], to[SO_KV_COPY_CAP];
};

struct so_seq {
    so_kv *kv;
    so_seq *prev, *next;
    int32_t *pages;
    int n_pages, pages_cap;
    int len;
    int open;          /* nodes of the open speculation, 0: none open */
    int n_computed;    /* those of them that earlier passes wrote: nodes before the latest extend */
    int32_t *parents;  /* [parents_cap] by node: the slot of its parent; NO_PARENT: not known yet */
    int32_t *moved;    /* [parents_cap] the same while nodes move (so_seq_keep) */
    int parents_cap;   /* 0: speculations of this sequence cannot be extended */
    int n_shared;      /* leading pages that are in the prefix tree */
    int32_t run_start; /* slotted: first page of its page run, −1: none yet */
    so_source *source; /* NULL: none */
};

/* --- kv.c --- */
void so_kv_page_acquire_shared(so_kv *kv, int32_t page); /* adds a reference */
void so_kv_page_release(so_kv *kv, int32_t page);
void so_seq_table_reserve(so_seq *s, int n_pages);

/* --- prefix.c --- */
void so_prefix_free(so_prefix *t); /* NULL is fine */
bool so_prefix_holds(const so_prefix *t, int32_t page);
int so_prefix_n_idle(const so_prefix *t);
/* Called when the tree becomes the only holder of a page, and when a page gets another holder
 * again. */
void so_prefix_page_idle(so_prefix *t, int32_t page);
void so_prefix_page_busy(so_prefix *t, int32_t page);
/* Evicts the n pages that have been idle longest, or all idle pages if there are fewer. */
void so_prefix_evict(so_prefix *t, int n);
/* Checks the tree's invariants and adds its references to counts[n_pages]. */
void so_prefix_check(const so_prefix *t, int32_t *counts);

#endif
