/* A suffix automaton, built online (Blumer et al. 1985), with hashed transitions and, per state,
 * the end of its latest occurrence.
 *
 * A state represents all substrings that end at the same set of positions; `len` is the length of
 * the longest of them, `link` leads to the state of the longest suffix that ends at more positions.
 * After a token is added, the state of the whole text links to its longest repeated suffix: the
 * match, without further work. The textbook algorithm does not keep the latest end of a match:
 * every suffix of the text has just occurred again, so the end of every state on the link path
 * would have to be set. The path is short in real text (about ten states) but as long as the text
 * in a loop such as "a a a a", which models do produce. So at most 64 states of the path are
 * updated, from the longest suffix down; the ends of the other states are still valid, only older.
 * (A link-cut tree would be exact, in O(log n) per token and twice the memory: too much for
 * choosing among equally long matches.)
 *
 * Sizes: n tokens make at most 2n states and 3n transitions, so all memory is allocated at
 * creation, and adding fails only if the index is full. The transitions of a state form a list,
 * because a clone copies them. One thread. */
#include "draft/suffix.h"

#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

enum { PATH_MAX_SET = 64, MAX_CAP = 1 << 26 };

typedef struct state {
    int32_t len, link;
    int32_t end;   /* just after the latest known occurrence */
    int32_t first; /* transition list */
} state;

typedef struct edge { /* numbered from 1; 0 is none */
    int32_t from, token, to;
    int32_t next;  /* of the same state */
    int32_t chain; /* of the same bucket */
} edge;

struct so_suffix {
    int cap, len;
    int32_t *tokens; /* [cap] */
    state *states;   /* [2·cap + 1]; 0 is the empty string */
    edge *edges;     /* [3·cap + 1] */
    int32_t *buckets;
    int bucket_bits;
    int n_states, n_edges;
    int32_t last; /* state of the whole text */
    int match_len, match_end;
};

static int bits_for(int cap) {
    int bits = 4;
    while (bits < 30 && (1 << bits) < 2 * cap)
        bits++;
    return bits;
}

size_t so_suffix_bytes(int cap) {
    size_t n = (size_t)cap;
    return n * sizeof(int32_t) + (2 * n + 1) * sizeof(state) + (3 * n + 1) * sizeof(edge) +
           ((size_t)1 << bits_for(cap)) * sizeof(int32_t);
}

static void reset(so_suffix *s) {
    s->len = 0;
    s->n_states = 1;
    s->n_edges = 0;
    s->last = 0;
    s->match_len = s->match_end = 0;
    s->states[0] = (state){.link = -1};
}

int so_suffix_create(int cap, so_suffix **out, so_err *err) {
    if (cap < 1 || cap > MAX_CAP)
        return so_err_set(err, SO_ERANGE, "suffix index for %d tokens; 1 to %d are possible", cap,
                          MAX_CAP);
    so_suffix *s = SO_NEW(so_suffix);
    size_t n = (size_t)cap;
    s->cap = cap;
    s->bucket_bits = bits_for(cap);
    s->tokens = so_try_alloc(n, sizeof *s->tokens);
    s->states = so_try_alloc(2 * n + 1, sizeof *s->states);
    s->edges = so_try_alloc(3 * n + 1, sizeof *s->edges);
    s->buckets = so_try_alloc((size_t)1 << s->bucket_bits, sizeof *s->buckets);
    if (!s->tokens || !s->states || !s->edges || !s->buckets) {
        so_suffix_free(s);
        return so_err_set(err, SO_ENOMEM, "no memory for a suffix index of %d tokens (%zu bytes)",
                          cap, so_suffix_bytes(cap));
    }
    reset(s);
    *out = s;
    return 0;
}

void so_suffix_free(so_suffix *s) {
    if (!s)
        return;
    free(s->tokens);
    free(s->states);
    free(s->edges);
    free(s->buckets);
    free(s);
}

void so_suffix_clear(so_suffix *s) {
    memset(s->buckets, 0, ((size_t)1 << s->bucket_bits) * sizeof *s->buckets);
    reset(s);
}

int so_suffix_len(const so_suffix *s) { return s->len; }
int so_suffix_cap(const so_suffix *s) { return s->cap; }
const int32_t *so_suffix_tokens(const so_suffix *s) { return s->tokens; }

int so_suffix_match(const so_suffix *s, int *end) {
    *end = s->match_end;
    return s->match_len;
}

static uint32_t bucket_of(const so_suffix *s, int32_t from, int32_t token) {
    uint64_t key = (uint64_t)(uint32_t)from << 32 | (uint32_t)token;
    key = (key ^ key >> 29) * 0x9E3779B97F4A7C15u; /* folded first, so that the top bits depend
                                                    * on both */
    return (uint32_t)(key >> (64 - s->bucket_bits));
}

static edge *find_edge(const so_suffix *s, int32_t from, int32_t token) {
    int32_t i = s->buckets[bucket_of(s, from, token)];
    while (i != 0 && (s->edges[i].from != from || s->edges[i].token != token))
        i = s->edges[i].chain;
    return i != 0 ? &s->edges[i] : NULL;
}

static void add_edge(so_suffix *s, int32_t from, int32_t token, int32_t to) {
    int32_t i = ++s->n_edges;
    SO_ASSERT_OP(i, <=, 3 * (int64_t)s->cap);
    uint32_t b = bucket_of(s, from, token);
    s->edges[i] = (edge){from, token, to, s->states[from].first, s->buckets[b]};
    s->states[from].first = i;
    s->buckets[b] = i;
}

static int32_t add_state(so_suffix *s, state st) {
    SO_ASSERT_OP(s->n_states, <=, 2 * (int64_t)s->cap);
    s->states[s->n_states] = st;
    return s->n_states++;
}

/* The strings of q up to `len` now end at a position where its longer ones do not. They move to a
 * state of their own, between q and its link, with q's transitions. */
static int32_t split(so_suffix *s, int32_t p, int32_t q, int32_t token, int32_t len) {
    int32_t clone = add_state(s, (state){len, s->states[q].link, s->states[q].end, 0});
    for (int32_t i = s->states[q].first; i != 0; i = s->edges[i].next)
        add_edge(s, clone, s->edges[i].token, s->edges[i].to);
    s->states[q].link = clone;
    for (edge *e; p >= 0 && (e = find_edge(s, p, token)) != NULL && e->to == q;
         p = s->states[p].link)
        e->to = clone;
    return clone;
}

bool so_suffix_add(so_suffix *s, int32_t token) {
    if (s->len == s->cap)
        return false;
    s->tokens[s->len++] = token;
    int32_t cur = add_state(s, (state){.len = s->len, .end = s->len});
    int32_t p = s->last, link = 0;
    edge *e = NULL;
    for (; p >= 0 && (e = find_edge(s, p, token)) == NULL; p = s->states[p].link)
        add_edge(s, p, token, cur);
    if (p >= 0) {
        int32_t len = s->states[p].len + 1;
        link = s->states[e->to].len == len ? e->to : split(s, p, e->to, token, len);
    }
    s->states[cur].link = link;
    s->last = cur;
    s->match_len = s->states[link].len;
    s->match_end = s->states[link].end; /* before this occurrence is recorded */
    for (int i = 0; link > 0 && i < PATH_MAX_SET; i++, link = s->states[link].link)
        s->states[link].end = s->len;
    return true;
}

void so_suffix_step(const so_suffix *s, so_suffix_cursor *c, int32_t token) {
    edge *e;
    while ((e = find_edge(s, c->state, token)) == NULL) {
        if (c->state == 0) {
            c->len = 0;
            return;
        }
        c->state = s->states[c->state].link;
        c->len = s->states[c->state].len;
    }
    c->state = e->to;
    c->len++;
}

int so_suffix_end(const so_suffix *s, const so_suffix_cursor *c) { return s->states[c->state].end; }

int so_suffix_prefix(const so_suffix *s, const int32_t *tokens, int n) {
    int32_t at = 0;
    for (int i = 0; i < n; i++) {
        edge *e = find_edge(s, at, tokens[i]);
        if (!e)
            return i;
        at = e->to;
    }
    return n;
}
