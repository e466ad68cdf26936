/* Counts a text into a table.
 *
 * Pairs are counted in one open-addressing map from (context, token) to a count, which doubles when
 * it is three quarters full. Then they are sorted, and a bigram table keeps only the most frequent
 * followers of each context. Counts saturate at 2^32 − 1. One thread. */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "draft/table.h"

enum { KEEP = 32, MAX_VOCAB = 1 << 24 };
#define MAX_PAIRS ((size_t)1 << 26) /* the map does not grow beyond 2^27 slots, 2 GiB */

typedef struct slot {
    uint64_t key; /* context << 32 | token, plus one; 0: empty */
    uint32_t count;
} slot;

struct so_table_counter {
    int order, n_vocab;
    uint64_t n_tokens;
    slot *slots;
    size_t n_slots, n_used; /* n_slots is a power of two */
};

int so_table_counter_create(int order, int n_vocab, so_table_counter **out, so_err *err) {
    if (order != 1 && order != 2)
        return so_err_set(err, SO_EINVAL, "table of order %d; 1 (unigram) or 2 (bigram)", order);
    if (n_vocab < 1 || n_vocab > MAX_VOCAB)
        return so_err_set(err, SO_ERANGE, "table for a vocabulary of %d tokens; 1 to %d", n_vocab,
                          MAX_VOCAB);
    so_table_counter *c = SO_NEW(so_table_counter);
    c->order = order;
    c->n_vocab = n_vocab;
    c->n_slots = 1024;
    c->slots = SO_NEW_N(slot, c->n_slots);
    *out = c;
    return 0;
}

void so_table_counter_free(so_table_counter *c) {
    if (!c)
        return;
    free(c->slots);
    free(c);
}

static slot *find(slot *slots, size_t n_slots, uint64_t key) {
    uint64_t h = key * 0x9E3779B97F4A7C15u;
    size_t i = (size_t)(h ^ h >> 32) & (n_slots - 1);
    while (slots[i].key != 0 && slots[i].key != key)
        i = (i + 1) & (n_slots - 1);
    return &slots[i];
}

static int grow(so_table_counter *c, so_err *err) {
    if (c->n_used >= MAX_PAIRS)
        return so_err_set(err, SO_ELIMIT, "more than %zu different pairs; count a shorter text",
                          MAX_PAIRS);
    size_t n = 2 * c->n_slots;
    slot *slots = so_try_alloc(n, sizeof *slots);
    if (!slots)
        return so_err_set(err, SO_ENOMEM, "no memory for %zu pairs", n);
    for (size_t i = 0; i < c->n_slots; i++)
        if (c->slots[i].key != 0)
            *find(slots, n, c->slots[i].key) = c->slots[i];
    free(c->slots);
    c->slots = slots;
    c->n_slots = n;
    return 0;
}

static int count(so_table_counter *c, int32_t context, int32_t token, so_err *err) {
    if (c->n_used >= c->n_slots / 4 * 3) {
        int rc = grow(c, err);
        if (rc != 0)
            return rc;
    }
    slot *s = find(c->slots, c->n_slots, ((uint64_t)(uint32_t)context << 32 | (uint32_t)token) + 1);
    if (s->key == 0) {
        s->key = ((uint64_t)(uint32_t)context << 32 | (uint32_t)token) + 1;
        c->n_used++;
    }
    if (s->count < UINT32_MAX)
        s->count++;
    return 0;
}

int so_table_counter_add(so_table_counter *c, const int32_t *ids, size_t n, so_err *err) {
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= c->n_vocab)
            return so_err_set(err, SO_ERANGE, "token %d at %zu is outside the vocabulary of %d",
                              (int)ids[i], i, c->n_vocab);
    int rc = 0;
    for (size_t i = (size_t)c->order - 1; i < n && rc == 0; i++)
        rc = count(c, c->order == 1 ? 0 : ids[i - 1], ids[i], err);
    c->n_tokens += n;
    return rc;
}

/* Ascending context, descending count, ascending token. */
static int compare(const void *a, const void *b) {
    const slot *x = a, *y = b;
    uint64_t kx = x->key - 1, ky = y->key - 1;
    if (kx >> 32 != ky >> 32)
        return kx >> 32 < ky >> 32 ? -1 : 1;
    if (x->count != y->count)
        return x->count > y->count ? -1 : 1;
    return (kx > ky) - (kx < ky);
}

static void fill(so_table *t, const slot *slots, size_t n, uint32_t keep) {
    uint32_t n_entries = 0, in_context = 0;
    int context = 0;
    for (size_t i = 0; i < n; i++) {
        uint64_t key = slots[i].key - 1;
        int mine = (int)(key >> 32);
        while (context < mine) {
            t->starts[++context] = n_entries;
            in_context = 0;
        }
        if (in_context++ < keep)
            t->entries[n_entries++] = (so_table_entry){(uint32_t)key, slots[i].count};
    }
    while (context < t->n_contexts)
        t->starts[++context] = n_entries;
}

int so_table_counter_finish(so_table_counter *c, uint64_t tokenizer_hash, so_table **out,
                            so_err *err) {
    so_table *t = SO_NEW(so_table);
    int rc = 0;
    t->order = c->order;
    t->n_vocab = c->n_vocab;
    t->n_contexts = c->order == 1 ? 1 : c->n_vocab;
    t->tokenizer_hash = tokenizer_hash;
    t->n_tokens = c->n_tokens;
    size_t n = 0;
    for (size_t i = 0; i < c->n_slots; i++)
        if (c->slots[i].key != 0)
            c->slots[n++] = c->slots[i];
    qsort(c->slots, n, sizeof *c->slots, compare);
    t->starts = so_try_alloc((size_t)t->n_contexts + 1, sizeof *t->starts);
    t->entries = so_try_alloc(n, sizeof *t->entries);
    if (!t->starts || !t->entries) {
        rc = so_err_set(err, SO_ENOMEM, "no memory for a table of %zu entries", n);
        so_table_free(t);
    } else {
        fill(t, c->slots, n, c->order == 1 ? UINT32_MAX : KEEP);
        *out = t;
    }
    so_table_counter_free(c);
    return rc;
}
