/* What the files of the cache share: kv.c (pages, sequences) and prefix.c (the tree). Nobody else
 * includes this. */
#ifndef SO_KV_IMPL_H
#define SO_KV_IMPL_H

#include "base/mem.h"
#include "kv/kv.h"

/* Copies per operation: a tree has at most 256 nodes, a partly filled page at most 31 entries. A
 * longer list goes out in several operations, which changes nothing (they run in order). */
enum { SO_KV_COPY_CAP = 256 };

typedef struct so_prefix so_prefix;

struct so_kv {
    so_backend *backend;
    so_kv_shape shape;
    so_kv_store *store;
    so_buffer *copies;   /* so_kv_slot from[SO_KV_COPY_CAP], to[SO_KV_COPY_CAP] */
    int slot_pages;      /* pages of a slot; 0: paged */
    int32_t *refs;       /* [n_pages] */
    int32_t *free_pages; /* [n_pages] a stack of pages, or of slots' first pages */
    int n_free;          /* of the stack */
    so_prefix *prefix;   /* NULL: prefixes are not kept */
    so_seq *seqs;
    int n_pending; /* copies collected and not yet submitted */
    so_kv_slot from[SO_KV_COPY_CAP], to[SO_KV_COPY_CAP];
};

struct so_seq {
    so_kv *kv;
    so_seq *prev, *next;
    int32_t *pages;
    int n_pages, pages_cap;
    int len;
    int open;     /* nodes of the open speculation */
    int n_shared; /* whole pages from the first on that are the prefix tree's */
    int32_t slot; /* slotted: its first page, −1: none yet */
};

/* --- kv.c --- */
void so_kv_page_acquire_shared(so_kv *kv, int32_t page); /* one more holder */
void so_kv_page_release(so_kv *kv, int32_t page);
void so_seq_table_reserve(so_seq *s, int n_pages);

/* --- prefix.c --- */
void so_prefix_free(so_prefix *t); /* NULL is fine */
bool so_prefix_holds(const so_prefix *t, int32_t page);
int so_prefix_n_idle(const so_prefix *t);
/* A page of the tree lost its last other holder, or got its first. */
void so_prefix_page_idle(so_prefix *t, int32_t page);
void so_prefix_page_busy(so_prefix *t, int32_t page);
/* Gives up the n pages that were idle longest, or all there are. */
void so_prefix_evict(so_prefix *t, int n);
/* Adds the tree's holdings to counts[n_pages]. */
void so_prefix_check(const so_prefix *t, int32_t *counts);

#endif
