/* Byte-pair merging, see bpe.h.
 *
 * Merging a word of n characters:
 *  1. Each character becomes a symbol in a doubly linked list held in an array.
 *  2. Every adjacent pair that has a rank is pushed on a heap as one 64-bit key, rank << 32 |
 *     position of its left symbol: lowest rank first, then leftmost.
 *  3. Pop. An entry is stale if its left symbol was merged away or the pair there now has another
 *     rank; stale entries are dropped. Otherwise the right symbol is merged into the left one, and
 *     the two new pairs are pushed.
 * An entry needs no copy of its pair: if the pair at that position has the rank of the entry, it is
 * the next pair to merge, whichever push added the entry. Each merge pushes at most two entries, so
 * a word takes O(n log n) time, even one of a megabyte without a space.
 *
 * Cutting. In vocabularies that write a space as "▁" a whole text is one word. Few pieces contain a
 * "▁" after another character; `joins` lists the characters that come before it in those pieces. No
 * merge crosses the boundary before a "▁" unless the character before the boundary is in `joins`,
 * so cutting the word at the other boundaries changes no result. It keeps the heap small and allows
 * words to be cached.
 *
 * A cache in the scratch holds words that were encoded before with the same scratch. The so_bpe is
 * immutable after building; a scratch is used by one thread at a time (tokenizer.c creates one for
 * each text). */
#include "token/bpe.h"

#include <stdlib.h>

#include "base/mem.h"
#include "token/utf8.h"

enum {
    N_DIRECT = 0x300,   /* characters below this are looked up without hashing */
    SEPARATOR = 0x2581, /* ▁ */
    MAX_JOINS = 16,
    MAX_WORD = 64 << 20,
    CACHE_WORD = 64, /* longest cached word in bytes */
    CACHE_MIN = 1 << 9,
    CACHE_MAX = 1 << 16, /* words */
};
static const uint32_t NOWHERE = UINT32_MAX;

typedef struct pair {
    uint32_t left, right; /* ids + 1; left 0: empty */
    uint32_t rank;
    int32_t result;
} pair;

struct so_bpe {
    so_bpe_options o;
    int32_t direct[N_DIRECT];
    so_map64 *chars;
    uint32_t *parts; /* the characters of the ids at and above n_vocab */
    size_t n_parts, parts_cap;
    pair *pairs;
    size_t n_pairs, pairs_cap; /* a power of two, at most half full */
    bool cuts;                 /* some piece contains a "▁" */
    uint32_t joins[MAX_JOINS]; /* characters that some piece has before a "▁" */
    int n_joins;
};

typedef struct symbol {
    int32_t id; /* SO_BPE_NONE: merged into its left neighbour */
    uint32_t prev, next;
} symbol;

typedef struct cached {
    uint64_t hash;
    uint32_t key_off, key_len;
    uint32_t ids_off, n_ids; /* n_ids 0: empty slot */
} cached;

struct so_bpe_scratch {
    symbol *symbols;
    size_t n, cap;
    uint64_t *heap;
    size_t n_heap, heap_cap;
    cached *cache;
    size_t n_cached, cache_cap;
    so_buf keys;
    so_tokens ids;
};

/* ---- building ---- */

so_bpe *so_bpe_create(const so_bpe_options *options, size_t expected_merges) {
    so_bpe *b = SO_NEW(so_bpe);
    b->o = *options;
    for (int i = 0; i < N_DIRECT; i++)
        b->direct[i] = SO_BPE_NONE;
    b->chars = so_map64_create(0);
    b->pairs_cap = 64;
    while (b->pairs_cap < expected_merges * 2)
        b->pairs_cap *= 2;
    b->pairs = SO_NEW_N(pair, b->pairs_cap);
    return b;
}

void so_bpe_free(so_bpe *b) {
    if (!b)
        return;
    so_map64_free(b->chars);
    free(b->parts);
    free(b->pairs);
    free(b);
}

void so_bpe_add_char(so_bpe *b, uint32_t cp, int32_t id) {
    if (cp < N_DIRECT)
        b->direct[cp] = id;
    else
        so_map64_add(b->chars, cp, id);
}

int32_t so_bpe_char(const so_bpe *b, uint32_t cp) {
    int64_t id;
    if (cp < N_DIRECT)
        return b->direct[cp];
    return so_map64_get(b->chars, cp, &id) ? (int32_t)id : SO_BPE_NONE;
}

int32_t so_bpe_add_part(so_bpe *b, uint32_t cp) {
    if (b->n_parts == b->parts_cap) {
        b->parts_cap = SO_MAX((size_t)16, b->parts_cap * 2);
        b->parts = so_realloc(b->parts, b->parts_cap * sizeof *b->parts);
    }
    b->parts[b->n_parts] = cp;
    int32_t id = b->o.n_vocab + (int32_t)b->n_parts++;
    so_bpe_add_char(b, cp, id);
    return id;
}

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 32) * 0x9e3779b97f4a7c15u;
    return x ^ x >> 29;
}

/* The slot of the pair, or the empty slot for it. */
static pair *pair_slot(const so_bpe *b, int32_t left, int32_t right) {
    uint32_t l = (uint32_t)left + 1, r = (uint32_t)right + 1;
    size_t mask = b->pairs_cap - 1;
    for (size_t i = mix((uint64_t)l << 32 | r) & mask;; i = (i + 1) & mask) {
        pair *p = &b->pairs[i];
        if (p->left == 0 || (p->left == l && p->right == r))
            return p;
    }
}

static void grow_pairs(so_bpe *b) {
    pair *old = b->pairs;
    size_t old_cap = b->pairs_cap;
    b->pairs_cap *= 2;
    b->pairs = SO_NEW_N(pair, b->pairs_cap);
    for (size_t i = 0; i < old_cap; i++)
        if (old[i].left)
            *pair_slot(b, (int32_t)old[i].left - 1, (int32_t)old[i].right - 1) = old[i];
    free(old);
}

/* Adds to `joins` the characters that precede a "▁" in this piece. */
static void note_separators(so_bpe *b, so_str piece) {
    uint32_t before = SEPARATOR;
    for (size_t i = 0, len; i < piece.len && b->n_joins <= MAX_JOINS; i += len) {
        uint32_t cp = so_utf8_at(piece.ptr + i, &len);
        if (cp == SEPARATOR) {
            b->cuts = true;
            int k = 0;
            while (k < b->n_joins && b->joins[k] != before)
                k++;
            if (before != SEPARATOR && k == b->n_joins && b->n_joins++ < MAX_JOINS)
                b->joins[k] = before;
        }
        before = cp;
    }
}

void so_bpe_add_merge(so_bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t result,
                      so_str piece) {
    if (b->n_pairs * 2 >= b->pairs_cap)
        grow_pairs(b);
    pair *p = pair_slot(b, left, right);
    b->n_pairs += p->left == 0;
    *p = (pair){(uint32_t)left + 1, (uint32_t)right + 1, rank, result};
    note_separators(b, piece);
}

uint64_t so_bpe_hash(const so_bpe *b) {
    uint64_t sum = b->n_pairs;
    for (size_t i = 0; i < b->pairs_cap; i++)
        if (b->pairs[i].left) /* without mixing, swapping two ranks could leave the sum unchanged */
            sum += mix(mix(so_hash_bytes(&b->pairs[i], sizeof b->pairs[i])));
    return sum;
}

/* ---- merging ---- */

so_bpe_scratch *so_bpe_scratch_create(void) { return SO_NEW(so_bpe_scratch); }

void so_bpe_scratch_free(so_bpe_scratch *s) {
    if (!s)
        return;
    free(s->symbols);
    free(s->heap);
    free(s->cache);
    so_buf_free(&s->keys);
    so_tokens_free(&s->ids);
    free(s);
}

static void push_symbol(so_bpe_scratch *s, int32_t id) {
    s->symbols[s->n] = (symbol){id, s->n ? (uint32_t)s->n - 1 : NOWHERE, (uint32_t)s->n + 1};
    s->n++;
}

/* Space for n symbols and for the heap: every pair once, and two for each of at most n merges. */
static bool reserve(so_bpe_scratch *s, size_t n) {
    if (n <= s->cap)
        return true;
    size_t cap = SO_MAX(n, s->cap * 2);
    symbol *symbols = realloc(s->symbols, cap * sizeof *symbols);
    if (symbols)
        s->symbols = symbols;
    uint64_t *heap = realloc(s->heap, 3 * cap * sizeof *heap);
    if (heap)
        s->heap = heap;
    if (!symbols || !heap)
        return false;
    s->cap = cap;
    return true;
}

static bool push_bytes(const so_bpe *b, so_bpe_scratch *s, so_str c) {
    for (size_t i = 0; i < c.len; i++)
        if (b->o.byte_ids[(unsigned char)c.ptr[i]] == SO_BPE_NONE)
            return false;
    for (size_t i = 0; i < c.len; i++)
        push_symbol(s, b->o.byte_ids[(unsigned char)c.ptr[i]]);
    return true;
}

/* Step 1. An unknown token is held until the next known character, so that adjacent ones can be
 * fused. Byte tokens are written before a held unknown token, as in Hugging Face tokenizers. */
static void symbolize(const so_bpe *b, so_bpe_scratch *s, so_str word) {
    bool unknown = false;
    s->n = 0;
    for (size_t i = 0, len; i < word.len; i += len) {
        int32_t id = so_bpe_char(b, so_utf8_at(word.ptr + i, &len));
        if (id != SO_BPE_NONE) {
            if (unknown)
                push_symbol(s, b->o.unk);
            unknown = false;
            push_symbol(s, id);
        } else if (!b->o.byte_fallback || !push_bytes(b, s, (so_str){word.ptr + i, len})) {
            if (unknown && !b->o.fuse_unk)
                push_symbol(s, b->o.unk);
            unknown = b->o.unk != SO_BPE_NONE;
        }
    }
    if (unknown)
        push_symbol(s, b->o.unk);
    if (s->n)
        s->symbols[s->n - 1].next = NOWHERE;
}

static const pair *pair_at(const so_bpe *b, const so_bpe_scratch *s, uint32_t pos) {
    uint32_t next = s->symbols[pos].next;
    if (next == NOWHERE)
        return NULL;
    const pair *p = pair_slot(b, s->symbols[pos].id, s->symbols[next].id);
    return p->left ? p : NULL;
}

static void heap_down(uint64_t *heap, size_t n, size_t i) {
    uint64_t item = heap[i];
    for (size_t child; (child = 2 * i + 1) < n; i = child) {
        child += child + 1 < n && heap[child + 1] < heap[child];
        if (heap[child] >= item)
            break;
        heap[i] = heap[child];
    }
    heap[i] = item;
}

static void heap_push(so_bpe_scratch *s, uint64_t item) {
    size_t i = s->n_heap++;
    for (; i && s->heap[(i - 1) / 2] > item; i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = item;
}

static uint64_t heap_pop(so_bpe_scratch *s) {
    uint64_t top = s->heap[0];
    s->heap[0] = s->heap[--s->n_heap];
    if (s->n_heap)
        heap_down(s->heap, s->n_heap, 0);
    return top;
}

static void offer(const so_bpe *b, so_bpe_scratch *s, uint32_t pos) {
    const pair *p = pair_at(b, s, pos);
    if (p)
        heap_push(s, (uint64_t)p->rank << 32 | pos);
}

/* Steps 2 and 3. */
static void merge(const so_bpe *b, so_bpe_scratch *s) {
    s->n_heap = 0;
    for (uint32_t pos = 0; pos + 1 < s->n; pos++) {
        const pair *p = pair_at(b, s, pos);
        if (p)
            s->heap[s->n_heap++] = (uint64_t)p->rank << 32 | pos;
    }
    for (size_t i = s->n_heap / 2; i-- > 0;)
        heap_down(s->heap, s->n_heap, i);
    while (s->n_heap) {
        uint64_t top = heap_pop(s);
        uint32_t pos = (uint32_t)top;
        symbol *left = &s->symbols[pos];
        const pair *p = left->id == SO_BPE_NONE ? NULL : pair_at(b, s, pos);
        if (!p || p->rank != top >> 32)
            continue;
        symbol *right = &s->symbols[left->next];
        left->id = p->result;
        left->next = right->next;
        right->id = SO_BPE_NONE;
        if (left->next != NOWHERE)
            s->symbols[left->next].prev = pos;
        if (left->prev != NOWHERE)
            offer(b, s, left->prev);
        offer(b, s, pos);
    }
}

/* A character outside the vocabulary that no merge used. */
static void put_part(const so_bpe *b, int32_t id, so_tokens *out) {
    char c[4];
    size_t len = so_utf8_put(b->parts[id - b->o.n_vocab], c);
    bool bytes = b->o.byte_fallback;
    for (size_t i = 0; i < len && bytes; i++)
        bytes = b->o.byte_ids[(unsigned char)c[i]] != SO_BPE_NONE;
    for (size_t i = 0; i < len && bytes; i++)
        so_tokens_push(out, b->o.byte_ids[(unsigned char)c[i]]);
    if (!bytes && b->o.unk != SO_BPE_NONE)
        so_tokens_push(out, b->o.unk);
}

static int encode_new(const so_bpe *b, so_bpe_scratch *s, so_str word, so_tokens *out,
                      so_err *err) {
    int64_t id;
    if (b->o.whole_words && so_map_get(b->o.whole_words, word, &id) &&
        !(b->o.kinds[id] & b->o.not_words)) {
        so_tokens_push(out, (int32_t)id);
        return 0;
    }
    if (word.len > MAX_WORD)
        return so_err_set(err, SO_ELIMIT, "a word of %zu bytes (at most %d)", word.len, MAX_WORD);
    if (!reserve(s, word.len + 1))
        return so_err_set(err, SO_ENOMEM, "no memory to merge a word of %zu bytes", word.len);
    symbolize(b, s, word);
    merge(b, s);
    for (uint32_t pos = s->n ? 0 : NOWHERE; pos != NOWHERE; pos = s->symbols[pos].next) {
        if (s->symbols[pos].id < b->o.n_vocab)
            so_tokens_push(out, s->symbols[pos].id);
        else
            put_part(b, s->symbols[pos].id, out);
    }
    return 0;
}

/* ---- the cache of words ---- */

static cached *cache_slot(const so_bpe_scratch *s, so_str word, uint64_t hash) {
    for (size_t i = hash & (s->cache_cap - 1);; i = (i + 1) & (s->cache_cap - 1)) {
        cached *c = &s->cache[i];
        if (c->n_ids == 0 || (c->hash == hash && c->key_len == word.len &&
                              memcmp(s->keys.data + c->key_off, word.ptr, word.len) == 0))
            return c;
    }
}

static void cache_grow(so_bpe_scratch *s) {
    cached *old = s->cache;
    size_t old_cap = s->cache_cap;
    s->cache_cap = SO_MAX((size_t)CACHE_MIN, old_cap * 4);
    s->cache = SO_NEW_N(cached, s->cache_cap);
    for (size_t i = 0; i < old_cap; i++)
        if (old[i].n_ids)
            *cache_slot(s, (so_str){s->keys.data + old[i].key_off, old[i].key_len}, old[i].hash) =
                old[i];
    free(old);
}

static int encode_cached(const so_bpe *b, so_bpe_scratch *s, so_str word, so_tokens *out,
                         so_err *err) {
    if (word.len > CACHE_WORD)
        return encode_new(b, s, word, out, err);
    if (s->n_cached * 2 >= s->cache_cap && s->n_cached < CACHE_MAX)
        cache_grow(s);
    uint64_t hash = so_hash_bytes(word.ptr, word.len);
    hash ^= hash >> 32;
    cached *c = cache_slot(s, word, hash);
    if (c->n_ids) {
        so_tokens_append(out, s->ids.ids + c->ids_off, c->n_ids);
        return 0;
    }
    size_t before = out->len;
    int rc = encode_new(b, s, word, out, err);
    size_t n = out->len - before;
    if (rc || n == 0 || s->n_cached >= CACHE_MAX)
        return rc;
    *c = (cached){hash, (uint32_t)s->keys.len, (uint32_t)word.len, (uint32_t)s->ids.len,
                  (uint32_t)n};
    so_buf_append_str(&s->keys, word);
    so_tokens_append(&s->ids, out->ids + before, n);
    s->n_cached++;
    return 0;
}

/* ---- words ---- */

/* Number of bytes of `word` before the first boundary where it may be cut. */
static size_t cut_len(const so_bpe *b, so_str word) {
    static const char sep[] = "\xE2\x96\x81";
    uint32_t before = SEPARATOR;
    for (size_t i = 0, len; i < word.len; i += len) {
        uint32_t cp = so_utf8_at(word.ptr + i, &len);
        if (len == 3 && before != SEPARATOR && memcmp(word.ptr + i, sep, 3) == 0) {
            int k = 0;
            while (k < b->n_joins && b->joins[k] != before)
                k++;
            if (k == b->n_joins)
                return i;
        }
        before = cp;
    }
    return word.len;
}

int so_bpe_encode(const so_bpe *b, so_bpe_scratch *s, so_str word, so_tokens *out, so_err *err) {
    /* if "▁" were an unknown character, a run of unknown characters could cross a cut */
    bool cuts = b->cuts && b->n_joins <= MAX_JOINS && !b->o.whole_words &&
                so_bpe_char(b, SEPARATOR) != SO_BPE_NONE;
    while (word.len) {
        size_t len = cuts ? cut_len(b, word) : word.len;
        int rc = encode_cached(b, s, (so_str){word.ptr, len}, out, err);
        if (rc)
            return rc;
        word = (so_str){word.ptr + len, word.len - len};
    }
    return 0;
}
