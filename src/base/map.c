/* The two hash maps of map.h: linear probing, doubled when more than two thirds full. A slot of the
 * string map stores the full hash, so a probe compares bytes only if the hashes are equal. */
#include "base/map.h"

#include <stdlib.h>

#include "base/mem.h"

typedef struct slot {
    so_str key; /* ptr is NULL in an empty slot */
    uint64_t hash;
    int64_t value;
} slot;

struct so_map {
    slot *slots;
    size_t cap, count; /* cap is a power of two */
};

static size_t capacity_for(size_t expected) {
    size_t cap = 16;
    while (cap < expected + expected / 2 + 1)
        cap *= 2;
    return cap;
}

so_map *so_map_create(size_t expected) {
    so_map *m = SO_NEW(so_map);
    m->cap = capacity_for(expected);
    m->slots = SO_NEW_N(slot, m->cap);
    return m;
}

void so_map_free(so_map *m) {
    if (!m)
        return;
    free(m->slots);
    free(m);
}

static slot *probe(const so_map *m, so_str key, uint64_t hash) {
    for (size_t i = hash & (m->cap - 1);; i = (i + 1) & (m->cap - 1)) {
        slot *s = &m->slots[i];
        if (!s->key.ptr || (s->hash == hash && so_str_eq(s->key, key)))
            return s;
    }
}

static void grow(so_map *m) {
    slot *old = m->slots;
    size_t old_cap = m->cap;
    m->cap *= 2;
    m->slots = SO_NEW_N(slot, m->cap);
    for (size_t i = 0; i < old_cap; i++)
        if (old[i].key.ptr)
            *probe(m, old[i].key, old[i].hash) = old[i];
    free(old);
}

/* Finds the key's slot or claims an empty one for it; *fresh is set if it was claimed. */
static slot *claim(so_map *m, so_str key, bool *fresh) {
    if ((m->count + 1) * 3 > m->cap * 2)
        grow(m);
    if (!key.ptr)
        key.ptr = "";
    uint64_t hash = so_hash_bytes(key.ptr, key.len);
    slot *s = probe(m, key, hash);
    *fresh = !s->key.ptr;
    if (*fresh) {
        s->key = key;
        s->hash = hash;
        m->count++;
    }
    return s;
}

bool so_map_add(so_map *m, so_str key, int64_t value) {
    bool fresh;
    slot *s = claim(m, key, &fresh);
    if (fresh)
        s->value = value;
    return fresh;
}

void so_map_set(so_map *m, so_str key, int64_t value) {
    bool fresh;
    claim(m, key, &fresh)->value = value;
}

bool so_map_get(const so_map *m, so_str key, int64_t *value) {
    const slot *s = probe(m, key, so_hash_bytes(key.ptr, key.len));
    if (!s->key.ptr)
        return false;
    *value = s->value;
    return true;
}

size_t so_map_count(const so_map *m) { return m->count; }

typedef struct slot64 {
    uint64_t key;
    int64_t value;
    bool used;
} slot64;

struct so_map64 {
    slot64 *slots;
    size_t cap, count;
};

so_map64 *so_map64_create(size_t expected) {
    so_map64 *m = SO_NEW(so_map64);
    m->cap = capacity_for(expected);
    m->slots = SO_NEW_N(slot64, m->cap);
    return m;
}

void so_map64_free(so_map64 *m) {
    if (!m)
        return;
    free(m->slots);
    free(m);
}

/* The finaliser of splitmix64: every input bit affects every output bit. */
static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static slot64 *probe64(const so_map64 *m, uint64_t key) {
    for (size_t i = mix(key) & (m->cap - 1);; i = (i + 1) & (m->cap - 1))
        if (!m->slots[i].used || m->slots[i].key == key)
            return &m->slots[i];
}

static void grow64(so_map64 *m) {
    slot64 *old = m->slots;
    size_t old_cap = m->cap;
    m->cap *= 2;
    m->slots = SO_NEW_N(slot64, m->cap);
    for (size_t i = 0; i < old_cap; i++)
        if (old[i].used)
            *probe64(m, old[i].key) = old[i];
    free(old);
}

bool so_map64_add(so_map64 *m, uint64_t key, int64_t value) {
    if ((m->count + 1) * 3 > m->cap * 2)
        grow64(m);
    slot64 *s = probe64(m, key);
    if (s->used)
        return false;
    *s = (slot64){key, value, true};
    m->count++;
    return true;
}

bool so_map64_get(const so_map64 *m, uint64_t key, int64_t *value) {
    const slot64 *s = probe64(m, key);
    if (!s->used)
        return false;
    *value = s->value;
    return true;
}
