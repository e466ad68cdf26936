/* The prefix tree over pages. prefix.h has the contract.
 *
 * A page is in the tree at most once, so a node is identified by its page number, and all node data
 * is in arrays with one entry per page: nothing is allocated after creation. All edges are in one
 * hash table over (parent, tokens). The hash is keyed by a random number drawn at creation, so that
 * clients cannot choose prompts that collide. Merging chains of nodes into longer edges would gain
 * nothing: each page needs its own node anyway.
 *
 * A page of the tree is idle if no sequence holds it: its reference count is 1.
 *
 * Invariants (so_prefix_check tests them):
 *   1. The tree holds one reference to each of its pages.
 *   2. A sequence that holds a page of the tree holds the page's ancestors too, because
 *      so_prefix_take starts at the root, and so_prefix_offer replaces the sequence's pages with
 *      the tree's equal ones. So all descendants of an idle page are idle.
 *   3. The list of idle pages is ordered from the longest idle to the latest, and a page comes
 *      after its idle descendants, because sequences release their last page first. So the head of
 *      the list is always a leaf, and eviction needs no search.
 *
 * The tree holds only whole pages of committed tokens. Thread: the owner of the cache. */
#include "kv/prefix.h"

#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "kv/impl.h"

enum { NONE = -1 };

typedef struct node {
    int64_t parent;     /* negative: child of the root, see root_of */
    int32_t chain;      /* next node in the same bucket */
    int32_t prev, next; /* in the list of idle pages */
    int n_children;
    bool held; /* this page is in the tree */
} node;

struct so_prefix {
    so_kv *kv;
    node *nodes;      /* [n_pages] */
    int32_t *tokens;  /* [n_pages][SO_KV_PAGE] */
    int32_t *buckets; /* [n_buckets] first node, NONE: empty */
    size_t n_buckets; /* a power of two */
    uint64_t seed;
    int32_t oldest, latest; /* idle pages */
    int n_held, n_idle;
};

int so_prefix_enable(so_kv *kv, so_err *err) {
    size_t n = (size_t)kv->shape.n_pages;
    if (kv->run_pages > 0)
        return so_err_set(err, SO_EUNSUPPORTED, "a slotted KV cache cannot share prefixes");
    if (kv->prefix)
        return SO_OK;
    so_prefix *t = SO_NEW(so_prefix);
    t->kv = kv;
    t->n_buckets = 1;
    while (t->n_buckets < n)
        t->n_buckets *= 2;
    t->nodes = so_try_alloc(n, sizeof *t->nodes);
    t->tokens = so_try_alloc(n, SO_KV_PAGE * sizeof *t->tokens);
    t->buckets = so_try_alloc(t->n_buckets, sizeof *t->buckets);
    if (!t->nodes || !t->tokens || !t->buckets) {
        so_prefix_free(t);
        return so_err_set(err, SO_ENOMEM, "no memory for the prefix tree of %zu pages", n);
    }
    for (size_t i = 0; i < t->n_buckets; i++)
        t->buckets[i] = NONE;
    t->seed = so_rng_system_seed();
    t->oldest = t->latest = NONE;
    kv->prefix = t;
    return SO_OK;
}

bool so_prefix_enabled(const so_kv *kv) { return kv->prefix != NULL; }

void so_prefix_free(so_prefix *t) {
    if (!t)
        return;
    free(t->nodes);
    free(t->tokens);
    free(t->buckets);
    free(t);
}

bool so_prefix_holds(const so_prefix *t, int32_t page) { return t->nodes[page].held; }
int so_prefix_n_idle(const so_prefix *t) { return t->n_idle; }

/* --- edges --- */

static const int32_t *tokens_of(const so_prefix *t, int32_t page) {
    return t->tokens + (size_t)page * SO_KV_PAGE;
}

static size_t bucket_of(const so_prefix *t, int64_t parent, const int32_t *tokens) {
    uint64_t h = t->seed ^ (uint64_t)parent;
    for (int i = 0; i < SO_KV_PAGE; i++) {
        h = (h ^ (uint32_t)tokens[i]) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
    return (size_t)(h >> 20) & (t->n_buckets - 1);
}

static int32_t find(const so_prefix *t, int64_t parent, const int32_t *tokens) {
    int32_t at = t->buckets[bucket_of(t, parent, tokens)];
    while (at != NONE && (t->nodes[at].parent != parent ||
                          memcmp(tokens_of(t, at), tokens, SO_KV_PAGE * sizeof *tokens) != 0))
        at = t->nodes[at].chain;
    return at;
}

static void insert(so_prefix *t, int32_t page, int64_t parent, const int32_t *tokens) {
    node *n = &t->nodes[page];
    int32_t *bucket = &t->buckets[bucket_of(t, parent, tokens)];
    SO_ASSERT(!n->held);
    so_kv_page_acquire_shared(t->kv, page);
    *n = (node){.parent = parent, .chain = *bucket, .prev = NONE, .next = NONE, .held = true};
    *bucket = page;
    memcpy(t->tokens + (size_t)page * SO_KV_PAGE, tokens, SO_KV_PAGE * sizeof *tokens);
    if (parent >= 0)
        t->nodes[parent].n_children++;
    t->n_held++;
}

/* --- idle pages --- */

void so_prefix_page_idle(so_prefix *t, int32_t page) {
    node *n = &t->nodes[page];
    n->prev = t->latest;
    n->next = NONE;
    *(n->prev == NONE ? &t->oldest : &t->nodes[n->prev].next) = page;
    t->latest = page;
    t->n_idle++;
}

void so_prefix_page_busy(so_prefix *t, int32_t page) {
    const node *n = &t->nodes[page];
    *(n->prev == NONE ? &t->oldest : &t->nodes[n->prev].next) = n->next;
    *(n->next == NONE ? &t->latest : &t->nodes[n->next].prev) = n->prev;
    t->n_idle--;
}

static void evict_one(so_prefix *t) {
    int32_t page = t->oldest;
    node *n = &t->nodes[page];
    int32_t *at = &t->buckets[bucket_of(t, n->parent, tokens_of(t, page))];
    SO_ASSERT_OP(n->n_children, ==, 0);
    while (*at != page)
        at = &t->nodes[*at].chain;
    *at = n->chain;
    so_prefix_page_busy(t, page); /* removes it from the idle list */
    if (n->parent >= 0)
        t->nodes[n->parent].n_children--;
    n->held = false;
    t->n_held--;
    so_kv_page_release(t->kv, page);
}

void so_prefix_evict(so_prefix *t, int n) {
    for (; n > 0 && t->n_idle > 0; n--)
        evict_one(t);
}

void so_prefix_clear(so_kv *kv) {
    if (kv->prefix)
        so_prefix_evict(kv->prefix, kv->prefix->n_idle);
}

/* --- sequences --- */

int so_prefix_match(const so_kv *kv, const int32_t *tokens, int n, int *n_idle) {
    const so_prefix *t = kv->prefix;
    int32_t page = NONE;
    int len = 0;
    *n_idle = 0;
    for (; t && len + SO_KV_PAGE <= n; len += SO_KV_PAGE) {
        page = find(t, page, tokens + len);
        if (page == NONE)
            break;
        *n_idle += kv->refs[page] == 1;
    }
    return len;
}

/* The parent of a first page. Sequences with different sources have different roots: the same
 * tokens give other keys and values there. */
static int64_t root_of(const so_seq *s) { return s->source ? NONE - s->source->serial : NONE; }

static int64_t parent_at(const so_seq *s, int i) { return i > 0 ? s->pages[i - 1] : root_of(s); }

int so_prefix_take(so_seq *s, const int32_t *tokens, int n) {
    const so_prefix *t = s->kv->prefix;
    int before = s->len;
    SO_ASSERT_OP(s->open, ==, 0);
    if (!t || s->len != s->n_shared * SO_KV_PAGE)
        return 0;
    while (s->len + SO_KV_PAGE <= n) {
        int32_t page = find(t, parent_at(s, s->n_shared), tokens + s->len);
        if (page == NONE)
            break;
        so_kv_page_acquire_shared(s->kv, page);
        so_seq_table_reserve(s, s->n_pages + 1);
        s->pages[s->n_pages++] = page;
        s->n_shared++;
        s->len += SO_KV_PAGE;
    }
    return s->len - before;
}

void so_prefix_offer(so_seq *s, const int32_t *tokens, int n) {
    so_prefix *t = s->kv->prefix;
    SO_ASSERT_OP(s->open, ==, 0);
    SO_ASSERT_OP(n, <=, s->len);
    for (; t && (s->n_shared + 1) * SO_KV_PAGE <= n; s->n_shared++) {
        int i = s->n_shared;
        const int32_t *page_tokens = tokens + (size_t)i * SO_KV_PAGE;
        int32_t own = s->pages[i], known = find(t, parent_at(s, i), page_tokens);
        if (known == NONE && s->kv->refs[own] > 1)
            return; /* a fork may hold `own` without its ancestors: would break invariant 2 */
        if (known == NONE) {
            insert(t, own, parent_at(s, i), page_tokens);
            continue;
        }
        so_kv_page_acquire_shared(s->kv, known);
        s->pages[i] = known;
        so_kv_page_release(s->kv, own);
    }
}

/* --- checks --- */

static void check_node(const so_prefix *t, int32_t page, int *n_children) {
    const node *n = &t->nodes[page];
    bool idle = t->kv->refs[page] == 1;
    SO_ASSERT_OP(find(t, n->parent, tokens_of(t, page)), ==, page);
    if (n->parent < 0)
        return;
    SO_ASSERT(t->nodes[n->parent].held);
    SO_ASSERT(idle || t->kv->refs[n->parent] > 1); /* invariant 2 */
    n_children[n->parent]++;
}

/* Invariant 3, and: the list holds exactly the idle pages. */
static void check_idle(const so_prefix *t) {
    bool *seen = SO_NEW_N(bool, t->kv->shape.n_pages);
    int n_idle = 0, n_listed = 0;
    for (int32_t page = 0; page < t->kv->shape.n_pages; page++)
        n_idle += t->nodes[page].held && t->kv->refs[page] == 1;
    for (int32_t page = t->oldest, prev = NONE; page != NONE; page = t->nodes[page].next) {
        const node *n = &t->nodes[page];
        SO_ASSERT(n->held && !seen[page] && (n->parent < 0 || !seen[n->parent]));
        SO_ASSERT_OP(t->kv->refs[page], ==, 1);
        SO_ASSERT_OP(n->prev, ==, prev);
        seen[page] = true;
        prev = page;
        n_listed++;
    }
    SO_ASSERT_OP(n_listed, ==, n_idle);
    SO_ASSERT_OP(t->n_idle, ==, n_idle);
    free(seen);
}

void so_prefix_check(const so_prefix *t, int32_t *counts) {
    int n_pages = t->kv->shape.n_pages, n_held = 0;
    int *n_children = SO_NEW_N(int, n_pages);
    for (int32_t page = 0; page < n_pages; page++)
        if (t->nodes[page].held) {
            n_held++;
            counts[page]++;
            check_node(t, page, n_children);
        }
    for (int32_t page = 0; page < n_pages; page++)
        if (t->nodes[page].held)
            SO_ASSERT_OP(t->nodes[page].n_children, ==, n_children[page]);
    SO_ASSERT_OP(t->n_held, ==, n_held);
    check_idle(t);
    free(n_children);
}
