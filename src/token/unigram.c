/* Unigram encoding, see unigram.h.
 *
 * The pieces are a trie. Nodes are numbered breadth first, so the children of a node are
 * neighbours, sorted by their byte. Encoding is one walk over the text (Viterbi):
 *
 *  1. best[i] is the best path that ends at byte i: its sum, its last piece, where that starts.
 *  2. From each character, in ascending order, follow the trie; every piece found there ends a path
 *     that extends best[start]. If no piece is exactly this character, so does the unknown token.
 *  3. Walk back from the end.
 *
 * Every character has a path, so best[] has no gaps at characters. Time is bounded by the length of the text times
 * SO_UNIGRAM_MAX_PIECE. The so_unigram is immutable after building. */
#include "token/unigram.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "token/utf8.h"

enum { NONE = -1, STACK_BEST = 128 };
static const double UNKNOWN_COST = 10; /* below the smallest score */

typedef struct node {
    uint32_t first; /* child */
    int32_t id;     /* of the piece that ends here, or NONE */
    uint16_t n;     /* children */
    uint8_t byte;   /* that leads here */
} node;

struct so_unigram {
    node *nodes; /* [0] is the root */
    size_t n_nodes, cap;
    double *scores; /* [n_vocab] */
    double unknown;
    int32_t unk;
    bool byte_fallback;
    int32_t byte_ids[256];
};

typedef struct best {
    double sum;
    int32_t id;
    uint32_t len; /* of the last piece; 0: no path yet */
} best;

/* Building. */

static int by_bytes(const void *pa, const void *pb, void *user) {
    const so_str *pieces = user;
    int32_t ia = *(const int32_t *)pa, ib = *(const int32_t *)pb;
    so_str a = pieces[ia], b = pieces[ib];
    int c = memcmp(a.ptr, b.ptr, SO_MIN(a.len, b.len));
    if (c == 0)
        c = a.len != b.len ? (a.len > b.len) - (a.len < b.len) : (ia > ib) - (ia < ib);
    return c;
}

/* The pieces sorted[lo … hi) share their first `depth` bytes; they are below one node. */
typedef struct range {
    int32_t lo, hi;
    uint32_t depth;
} range;

static void add_node(so_unigram *u, range **ranges, uint8_t byte, range r) {
    if (u->n_nodes == u->cap) {
        u->cap = SO_MAX(256, u->cap * 2);
        u->nodes = so_realloc(u->nodes, u->cap * sizeof *u->nodes);
        *ranges = so_realloc(*ranges, u->cap * sizeof **ranges);
    }
    u->nodes[u->n_nodes] = (node){.id = NONE, .byte = byte};
    (*ranges)[u->n_nodes++] = r;
}

static void add_children(so_unigram *u, range **ranges, size_t at, const so_str *pieces,
                         const int32_t *sorted) {
    range r = (*ranges)[at];
    for (; r.lo < r.hi && pieces[sorted[r.lo]].len == r.depth; r.lo++)
        u->nodes[at].id = sorted[r.lo]; /* of equal pieces the last one counts */
    u->nodes[at].first = (uint32_t)u->n_nodes;
    while (r.lo < r.hi) {
        uint8_t byte = (uint8_t)pieces[sorted[r.lo]].ptr[r.depth];
        int32_t end = r.lo;
        while (end < r.hi && (uint8_t)pieces[sorted[end]].ptr[r.depth] == byte)
            end++;
        add_node(u, ranges, byte, (range){r.lo, end, r.depth + 1});
        u->nodes[at].n++;
        r.lo = end;
    }
}

static void build_trie(so_unigram *u, const so_unigram_options *o) {
    int32_t *sorted = SO_NEW_N(int32_t, SO_MAX(o->n_vocab, 1)), n = 0;
    range *ranges = NULL;
    for (int32_t id = 0; id < o->n_vocab; id++)
        if (!o->skipped[id] && o->pieces[id].len > 0)
            sorted[n++] = id;
    qsort_r(sorted, (size_t)n, sizeof *sorted, by_bytes, (void *)(uintptr_t)o->pieces);
    add_node(u, &ranges, 0, (range){0, n, 0});
    for (size_t i = 0; i < u->n_nodes; i++)
        add_children(u, &ranges, i, o->pieces, sorted);
    free(ranges);
    free(sorted);
}

static int check(const so_unigram_options *o, so_err *err) {
    if (o->unk < 0)
        return so_err_set(err, SO_EUNSUPPORTED, "a Unigram vocabulary without an unknown token");
    for (int32_t id = 0; id < o->n_vocab; id++) {
        if (!isfinite(o->scores[id]))
            return so_err_set(err, SO_EFORMAT, "the score of token %d is not a finite number", id);
        if (!o->skipped[id] && o->pieces[id].len > SO_UNIGRAM_MAX_PIECE)
            return so_err_set(err, SO_ELIMIT, "token %d has %zu bytes (at most %d)", id,
                              o->pieces[id].len, SO_UNIGRAM_MAX_PIECE);
    }
    return 0;
}

int so_unigram_create(const so_unigram_options *o, so_unigram **out, so_err *err) {
    int rc = check(o, err);
    if (rc)
        return rc;
    so_unigram *u = SO_NEW(so_unigram);
    u->unk = o->unk;
    u->byte_fallback = o->byte_fallback;
    memcpy(u->byte_ids, o->byte_ids, sizeof u->byte_ids);
    u->scores = SO_NEW_N(double, o->n_vocab);
    for (int32_t id = 0; id < o->n_vocab; id++) {
        u->scores[id] = o->scores[id];
        u->unknown = id == 0 ? o->scores[id] : SO_MIN(u->unknown, o->scores[id]);
    }
    u->unknown -= UNKNOWN_COST;
    build_trie(u, o);
    *out = u;
    return 0;
}

void so_unigram_free(so_unigram *u) {
    if (!u)
        return;
    free(u->nodes);
    free(u->scores);
    free(u);
}

/* Encoding. */

static const node *child(const so_unigram *u, const node *at, uint8_t byte) {
    const node *lo = u->nodes + at->first, *end = lo + at->n, *hi = end;
    while (lo < hi) {
        const node *mid = lo + (hi - lo) / 2;
        if (mid->byte < byte)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo < end && lo->byte == byte ? lo : NULL;
}

static void extend(best *to, double sum, int32_t id, size_t len) {
    if (to->len == 0 || sum > to->sum)
        *to = (best){sum, id, (uint32_t)len};
}

static void fill(const so_unigram *u, so_str text, best *b) {
    for (size_t start = 0, len; start < text.len; start += len) {
        const node *at = u->nodes;
        bool alone = false; /* some piece is exactly this character */
        so_utf8_at(text.ptr + start, &len);
        for (size_t i = start; i < text.len; i++) {
            at = child(u, at, (uint8_t)text.ptr[i]);
            if (!at)
                break;
            if (at->id == NONE)
                continue;
            extend(&b[i + 1], b[start].sum + u->scores[at->id], at->id, i + 1 - start);
            alone |= i + 1 - start == len;
        }
        if (!alone)
            extend(&b[start + len], b[start].sum + u->unknown, u->unk, len);
    }
}

static int32_t find(const so_unigram *u, so_str text) {
    const node *at = u->nodes;
    for (size_t i = 0; i < text.len && at; i++)
        at = child(u, at, (uint8_t)text.ptr[i]);
    return at ? at->id : NONE;
}

/* Text without a piece: several unknown characters may together be one. */
static void put_unknown(const so_unigram *u, so_str text, so_tokens *out) {
    int32_t id = find(u, text);
    bool bytes = u->byte_fallback && id == NONE;
    for (size_t i = 0; i < text.len && bytes; i++)
        bytes = u->byte_ids[(uint8_t)text.ptr[i]] >= 0;
    if (!bytes)
        so_tokens_push(out, id == NONE ? u->unk : id);
    for (size_t i = 0; i < text.len && bytes; i++)
        so_tokens_push(out, u->byte_ids[(uint8_t)text.ptr[i]]);
}

/* Reverses the path in place: afterwards the piece that starts at byte i is in b[i]. */
static void reverse(best *b, size_t len) {
    best next = b[len];
    for (size_t end = len; end > 0;) {
        size_t start = end - next.len;
        best before = b[start];
        b[start] = next;
        next = before;
        end = start;
    }
}

static void put_path(const so_unigram *u, so_str text, const best *b, so_tokens *out) {
    for (size_t i = 0; i < text.len;) {
        size_t end = i;
        while (end < text.len && b[end].id == u->unk)
            end += b[end].len;
        if (end > i) {
            put_unknown(u, (so_str){text.ptr + i, end - i}, out);
        } else {
            so_tokens_push(out, b[i].id);
            end = i + b[i].len;
        }
        i = end;
    }
}

int so_unigram_encode(const so_unigram *u, so_str text, so_tokens *out, so_err *err) {
    best few[STACK_BEST] = {{0}}, *b = few;
    if (text.len >= STACK_BEST && !(b = so_try_alloc(text.len + 1, sizeof *b)))
        return so_err_set(err, SO_ENOMEM, "no memory to encode %zu bytes without a space",
                          text.len);
    fill(u, text, b);
    reverse(b, text.len);
    put_path(u, text, b, out);
    if (b != few)
        free(b);
    return 0;
}
