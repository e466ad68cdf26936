/* Python's dict: insertion-ordered, keyed by anything hashable, with 1 == 1.0 == True as one key.
 *
 * Entries are an array in order of insertion. Up to SCAN_MAX entries a lookup scans them; above
 * that it uses an open-addressing table of entry numbers, at most half full. Removal closes the gap
 * and rebuilds the table: templates rarely remove, and the order stays simple. */
#include <math.h>

#include "jinja/impl.h"

enum { SCAN_MAX = 8 };

so_jj_dict *so_jj_dict_new(so_jj *x) { return SO_JJ_NEW(x, so_jj_dict); }
so_jj_val so_jj_dict_val(so_jj_dict *d) { return (so_jj_val){.kind = SO_JJ_DICT, .dict = d}; }

static uint64_t mix(uint64_t h) {
    h = (h ^ (h >> 32)) * 0x9E3779B97F4A7C15u;
    return h ^ (h >> 29);
}

static uint64_t hash_number(so_jj_val v) {
    int64_t i;
    if (so_jj_is_int(v, &i))
        return mix((uint64_t)i);
    if (v.f == floor(v.f) && fabs(v.f) < 9e18)
        return mix((uint64_t)(int64_t)v.f);
    uint64_t bits;
    memcpy(&bits, &v.f, sizeof bits);
    return mix(bits);
}

uint64_t so_jj_hash(so_jj *x, so_jj_val v) {
    switch (v.kind) {
    case SO_JJ_NONE:
    case SO_JJ_UNDEFINED:
        return mix(v.kind);
    case SO_JJ_BOOL:
    case SO_JJ_INT:
    case SO_JJ_FLOAT:
        return hash_number(v);
    case SO_JJ_STR:
        so_jj_tick(x, v.s->len / 64);
        return so_hash_bytes(v.s->ptr, v.s->len);
    case SO_JJ_TUPLE: {
        uint64_t h = 77;
        so_jj_enter(x);
        for (size_t i = 0; i < v.list->n; i++)
            h = mix(h ^ so_jj_hash(x, v.list->v[i])) + i;
        so_jj_leave(x);
        return h;
    }
    case SO_JJ_LIST:
    case SO_JJ_DICT:
        so_jj_fail(x, SO_EINVAL, "unhashable type: '%s'", so_jj_type(v));
    default:
        return mix((uint64_t)(uintptr_t)v.list);
    }
}

static void index_add(so_jj_dict *d, size_t entry) {
    size_t mask = d->index_cap - 1, at = d->e[entry].hash & mask;
    while (d->index[at])
        at = (at + 1) & mask;
    d->index[at] = (uint32_t)entry + 1;
}

static void reindex(so_jj *x, so_jj_dict *d) {
    if (d->n <= SCAN_MAX) {
        d->index = NULL;
        return;
    }
    if (!d->index || d->index_cap < d->n * 2) {
        d->index_cap = 32;
        while (d->index_cap < d->n * 4)
            d->index_cap *= 2;
        d->index = so_jj_alloc(x, d->index_cap, sizeof *d->index);
    } else {
        memset(d->index, 0, d->index_cap * sizeof *d->index);
    }
    so_jj_tick(x, d->n);
    for (size_t i = 0; i < d->n; i++)
        index_add(d, i);
}

static bool same_key(so_jj *x, const so_jj_entry *e, so_jj_val key, uint64_t hash) {
    return e->hash == hash && so_jj_equal(x, e->key, key);
}

/* The number of the entry, or d->n. */
static size_t find(so_jj *x, const so_jj_dict *d, so_jj_val key, uint64_t hash) {
    so_jj_tick(x, 1);
    if (!d->index) {
        for (size_t i = 0; i < d->n; i++)
            if (same_key(x, &d->e[i], key, hash))
                return i;
        return d->n;
    }
    size_t mask = d->index_cap - 1;
    for (size_t at = hash & mask; d->index[at]; at = (at + 1) & mask) {
        so_jj_tick(x, 1);
        if (same_key(x, &d->e[d->index[at] - 1], key, hash))
            return d->index[at] - 1;
    }
    return d->n;
}

bool so_jj_dict_get(so_jj *x, const so_jj_dict *d, so_jj_val key, so_jj_val *out) {
    size_t i = find(x, d, key, so_jj_hash(x, key));
    if (i == d->n)
        return false;
    *out = d->e[i].value;
    return true;
}

bool so_jj_dict_get_str(so_jj *x, const so_jj_dict *d, so_str key, so_jj_val *out) {
    so_jj_str s = {.ptr = key.ptr, .len = key.len};
    return so_jj_dict_get(x, d, (so_jj_val){.kind = SO_JJ_STR, .s = &s}, out);
}

void so_jj_dict_set(so_jj *x, so_jj_dict *d, so_jj_val key, so_jj_val value) {
    uint64_t hash = so_jj_hash(x, key);
    size_t i = find(x, d, key, hash);
    if (i < d->n) {
        d->e[i].value = value;
        return;
    }
    if (d->n == d->cap) {
        size_t cap = SO_MAX(d->cap * 2, (size_t)4);
        so_jj_entry *e = so_jj_alloc(x, cap, sizeof *e);
        if (d->n)
            memcpy(e, d->e, d->n * sizeof *e);
        d->e = e;
        d->cap = cap;
    }
    d->e[d->n++] = (so_jj_entry){.key = key, .value = value, .hash = hash};
    if (d->index && d->n * 2 <= d->index_cap)
        index_add(d, d->n - 1);
    else
        reindex(x, d);
}

bool so_jj_dict_remove(so_jj *x, so_jj_dict *d, so_jj_val key, so_jj_val *out) {
    size_t i = find(x, d, key, so_jj_hash(x, key));
    if (i == d->n)
        return false;
    *out = d->e[i].value;
    memmove(d->e + i, d->e + i + 1, (d->n - i - 1) * sizeof *d->e);
    d->n--;
    so_jj_tick(x, d->n / 8);
    reindex(x, d);
    return true;
}

so_jj_dict *so_jj_dict_copy(so_jj *x, const so_jj_dict *d) {
    so_jj_dict *c = so_jj_dict_new(x);
    for (size_t i = 0; i < d->n; i++)
        so_jj_dict_set(x, c, d->e[i].key, d->e[i].value);
    return c;
}

so_jj_list *so_jj_dict_items(so_jj *x, const so_jj_dict *d) {
    so_jj_list *l = so_jj_list_new(x, d->n);
    for (size_t i = 0; i < d->n; i++)
        so_jj_list_push(x, l, so_jj_pair(x, d->e[i].key, d->e[i].value));
    return l;
}

static void add_pairs(so_jj *x, so_jj_dict *d, so_jj_val from) {
    so_jj_iter it = so_jj_iter_of(x, from);
    so_jj_val item;
    while (so_jj_iter_next(x, &it, &item)) {
        if (!so_jj_iterable(item))
            so_jj_fail_type(x, "a dict is made of pairs", item);
        so_jj_list *pair = so_jj_collect(x, item);
        if (pair->n != 2)
            so_jj_fail(x, SO_EINVAL, "a dict is made of pairs; one has length %zu", pair->n);
        so_jj_dict_set(x, d, pair->v[0], pair->v[1]);
    }
}

/* Adds `from` (a mapping, an iterable of pairs, or missing), then the keyword arguments. */
void so_jj_dict_update(so_jj *x, so_jj_dict *d, so_jj_val from, const so_jj_args *kw) {
    if (from.kind == SO_JJ_DICT) {
        for (size_t i = 0; i < from.dict->n; i++)
            so_jj_dict_set(x, d, from.dict->e[i].key, from.dict->e[i].value);
    } else if (from.kind != SO_JJ_MISSING) {
        add_pairs(x, d, from);
    }
    for (size_t i = 0; i < kw->n_kw; i++)
        so_jj_dict_set(x, d, kw->kw[i].key, kw->kw[i].value);
}
