/* Two chained hash tables in fixed pools: contexts, and (context, follower) pairs.
 *
 *   contexts   hash of 1..3 tokens → total, best follower, list of followers
 *   pairs      (context, token)    → count, position of the latest occurrence
 *
 * A token adds at most one context and one pair per order, and a token that leaves the window is
 * removed the same way, so pools of (max_order−1)·(window+1) entries never run out. A context is
 * identified by its 64-bit hash alone: a collision would mix the counts of two contexts, which can
 * make a guess worse but never makes the output wrong. Buckets use a remixed hash, because the low
 * bits of FNV-1a depend only on the low bits of the tokens.
 *
 * Invariant: every context in the table has total = Σ counts > 0, and `best` is its pair with the
 * greatest (count, latest). Adding maintains it in constant time; removing an occurrence of the
 * best pair scans the context's list. One thread. */
#include "draft/counts.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { MAX_WINDOW = 1 << 22 };

typedef struct context {
    uint64_t hash;
    int32_t chain; /* next in the bucket or in the free list */
    int32_t first, best;
    int32_t total;
} context;

typedef struct pair {
    int32_t context, token;
    int32_t count;
    int32_t chain;
    int32_t prev, next; /* among the context's followers */
    int64_t latest;
} pair;

struct so_counts {
    int max_order, window, bits;
    int32_t *ring; /* [ring_len]: the latest tokens */
    int ring_len;
    int64_t n; /* tokens ever added */
    context *contexts;
    pair *pairs; /* contexts and pairs are numbered from 1 */
    int32_t *context_buckets, *pair_buckets;
    int32_t free_context, free_pair; /* released entries, linked by chain */
    int32_t n_contexts, n_pairs;     /* entries ever used */
    int32_t pool;                    /* size of each pool */
};

uint64_t so_counts_hash(const int32_t *tokens, int n) {
    uint64_t h = 14695981039346656037u;
    for (int i = 0; i < n; i++) {
        h ^= (uint32_t)tokens[i];
        h *= 1099511628211u;
    }
    return h;
}

static uint32_t mix(uint64_t h, int bits) {
    h = (h ^ h >> 32) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(h >> (64 - bits));
}

static int32_t *context_bucket(const so_counts *c, uint64_t hash) {
    return &c->context_buckets[mix(hash, c->bits)];
}

static int32_t *pair_bucket(const so_counts *c, int32_t ctx, int32_t token) {
    return &c->pair_buckets[mix((uint64_t)(uint32_t)ctx << 32 | (uint32_t)token, c->bits)];
}

static int32_t find_context(const so_counts *c, uint64_t hash) {
    int32_t i = *context_bucket(c, hash);
    while (i && c->contexts[i].hash != hash)
        i = c->contexts[i].chain;
    return i;
}

static int32_t find_pair(const so_counts *c, int32_t ctx, int32_t token) {
    int32_t i = *pair_bucket(c, ctx, token);
    while (i && (c->pairs[i].context != ctx || c->pairs[i].token != token))
        i = c->pairs[i].chain;
    return i;
}

static int32_t new_context(so_counts *c, uint64_t hash) {
    int32_t i = c->free_context, *b = context_bucket(c, hash);
    if (i)
        c->free_context = c->contexts[i].chain;
    else
        i = ++c->n_contexts;
    SO_ASSERT_OP(i, <=, c->pool);
    c->contexts[i] = (context){.hash = hash, .chain = *b};
    return *b = i;
}

static int32_t new_pair(so_counts *c, int32_t ctx, int32_t token) {
    int32_t i = c->free_pair, *b = pair_bucket(c, ctx, token);
    if (i)
        c->free_pair = c->pairs[i].chain;
    else
        i = ++c->n_pairs;
    SO_ASSERT_OP(i, <=, c->pool);
    c->pairs[i] =
        (pair){.context = ctx, .token = token, .chain = *b, .next = c->contexts[ctx].first};
    if (c->contexts[ctx].first)
        c->pairs[c->contexts[ctx].first].prev = i;
    c->contexts[ctx].first = i;
    return *b = i;
}

static void drop_context(so_counts *c, int32_t i) {
    int32_t *at = context_bucket(c, c->contexts[i].hash);
    while (*at != i)
        at = &c->contexts[*at].chain;
    *at = c->contexts[i].chain;
    c->contexts[i].chain = c->free_context;
    c->free_context = i;
}

static void drop_pair(so_counts *c, int32_t i) {
    pair *p = &c->pairs[i];
    int32_t *at = pair_bucket(c, p->context, p->token);
    while (*at != i)
        at = &c->pairs[*at].chain;
    *at = p->chain;
    if (p->prev)
        c->pairs[p->prev].next = p->next;
    else
        c->contexts[p->context].first = p->next;
    if (p->next)
        c->pairs[p->next].prev = p->prev;
    p->chain = c->free_pair;
    c->free_pair = i;
}

static bool better(const pair *a, const pair *b) {
    return a->count != b->count ? a->count > b->count : a->latest > b->latest;
}

static int32_t ring_at(const so_counts *c, int64_t pos) { return c->ring[pos % c->ring_len]; }

/* Hash of the order−1 tokens before `pos`. */
static uint64_t hash_before(const so_counts *c, int64_t pos, int order) {
    int32_t ctx[SO_COUNTS_MAX_ORDER - 1];
    for (int i = 0; i < order - 1; i++)
        ctx[i] = ring_at(c, pos - (order - 1) + i);
    return so_counts_hash(ctx, order - 1);
}

static void count_in(so_counts *c, int64_t pos, int order) {
    uint64_t hash = hash_before(c, pos, order);
    int32_t token = ring_at(c, pos), ctx = find_context(c, hash);
    if (!ctx)
        ctx = new_context(c, hash);
    int32_t i = find_pair(c, ctx, token);
    if (!i)
        i = new_pair(c, ctx, token);
    context *x = &c->contexts[ctx];
    c->pairs[i].count++;
    c->pairs[i].latest = pos;
    x->total++;
    if (!x->best || better(&c->pairs[i], &c->pairs[x->best]))
        x->best = i;
}

static void count_out(so_counts *c, int64_t pos, int order) {
    int32_t ctx = find_context(c, hash_before(c, pos, order));
    int32_t i = find_pair(c, ctx, ring_at(c, pos));
    context *x = &c->contexts[ctx];
    SO_ASSERT(ctx && i);
    bool was_best = x->best == i;
    x->total--;
    if (--c->pairs[i].count == 0)
        drop_pair(c, i);
    if (x->total == 0) {
        drop_context(c, ctx);
        return;
    }
    if (!was_best)
        return;
    x->best = x->first;
    for (int32_t k = c->pairs[x->first].next; k; k = c->pairs[k].next)
        if (better(&c->pairs[k], &c->pairs[x->best]))
            x->best = k;
}

void so_counts_add(so_counts *c, int32_t token) {
    int64_t pos = c->n++, out = pos - c->window;
    c->ring[pos % c->ring_len] = token;
    for (int order = 2; order <= c->max_order && order - 1 <= pos; order++)
        count_in(c, pos, order);
    for (int order = 2; order <= c->max_order && order - 1 <= out; order++)
        count_out(c, out, order);
}

so_follow so_counts_find(const so_counts *c, const int32_t *text, int n) {
    for (int order = c->max_order; order >= 2; order--) {
        if (n < order - 1)
            continue;
        int32_t i = find_context(c, so_counts_hash(text + n - (order - 1), order - 1));
        if (!i)
            continue;
        const pair *p = &c->pairs[c->contexts[i].best];
        return (so_follow){order, i, p->token, p->count, c->contexts[i].total};
    }
    return (so_follow){0};
}

void so_counts_each(const so_counts *c, int32_t id,
                    bool (*visit)(void *user, int32_t token, int32_t count), void *user) {
    for (int32_t i = c->contexts[id].first; i; i = c->pairs[i].next)
        if (!visit(user, c->pairs[i].token, c->pairs[i].count))
            return;
}

static int bits_for(int64_t n) {
    int bits = 4;
    while (bits < 30 && ((int64_t)1 << bits) < n)
        bits++;
    return bits;
}

int so_counts_create(int max_order, int window, so_counts **out, so_err *err) {
    if (max_order < 2 || max_order > SO_COUNTS_MAX_ORDER)
        return so_err_set(err, SO_ERANGE, "n-gram order %d; 2 to %d are possible", max_order,
                          SO_COUNTS_MAX_ORDER);
    if (window < 1 || window > MAX_WINDOW)
        return so_err_set(err, SO_ERANGE, "n-gram window of %d tokens; 1 to %d are possible",
                          window, MAX_WINDOW);
    so_counts *c = SO_NEW(so_counts);
    size_t n = (size_t)(max_order - 1) * ((size_t)window + 1); /* a token is added before one is
                                                                * removed: one more */
    c->max_order = max_order;
    c->window = window;
    c->ring_len = window + max_order;
    c->bits = bits_for((int64_t)n);
    c->ring = so_try_alloc((size_t)c->ring_len, sizeof *c->ring);
    c->contexts = so_try_alloc(n + 1, sizeof *c->contexts);
    c->pairs = so_try_alloc(n + 1, sizeof *c->pairs);
    c->context_buckets = so_try_alloc((size_t)1 << c->bits, sizeof *c->context_buckets);
    c->pair_buckets = so_try_alloc((size_t)1 << c->bits, sizeof *c->pair_buckets);
    if (!c->ring || !c->contexts || !c->pairs || !c->context_buckets || !c->pair_buckets) {
        so_counts_free(c);
        return so_err_set(err, SO_ENOMEM, "no memory for n-gram counts of %d tokens", window);
    }
    c->pool = (int32_t)n;
    *out = c;
    return 0;
}

void so_counts_free(so_counts *c) {
    if (!c)
        return;
    free(c->ring);
    free(c->contexts);
    free(c->pairs);
    free(c->context_buckets);
    free(c->pair_buckets);
    free(c);
}
