/* Finds added tokens: the leftmost match, and the longest of those that start there.
 *
 * The tokens are a sorted array. Matching narrows a range of it byte by byte: no trie is needed,
 * and a byte that starts no token costs one lookup. The conditions on a match (single_word, lstrip,
 * rstrip) are those of Hugging Face tokenizers, which tests only the longest match: if that match
 * is refused, no shorter one is tried. Control tokens are matched only with parse_control, and in a
 * conversation only in text that the template wrote (from_data, chat.c). Immutable once sealed; any
 * thread. */
#include "token/added.h"

#include <stdlib.h>

#include "base/mem.h"
#include "token/normalize.h"
#include "token/utf8.h"

void so_added_push(so_added_set *s, so_added item) {
    SO_ASSERT(item.text.len > 0);
    if (s->n == s->cap) {
        s->cap = SO_MAX((size_t)16, s->cap * 2);
        s->items = so_realloc(s->items, s->cap * sizeof *s->items);
    }
    s->items[s->n++] = item;
}

static int by_text(const void *pa, const void *pb) {
    const so_added *a = pa, *b = pb;
    int c = memcmp(a->text.ptr, b->text.ptr, SO_MIN(a->text.len, b->text.len));
    if (c)
        return c;
    if (a->text.len != b->text.len)
        return a->text.len < b->text.len ? -1 : 1;
    return (a->id > b->id) - (a->id < b->id);
}

void so_added_seal(so_added_set *s) {
    if (s->n)
        qsort(s->items, s->n, sizeof *s->items, by_text);
    size_t kept = 0;
    for (size_t i = 0; i < s->n; i++)
        if (kept == 0 || !so_str_eq(s->items[i].text, s->items[kept - 1].text))
            s->items[kept++] = s->items[i];
    s->n = kept;
    size_t i = 0;
    for (unsigned c = 0; c < 256; c++) {
        s->first[c] = (uint32_t)i;
        while (i < s->n && (unsigned char)s->items[i].text.ptr[0] == c)
            i++;
    }
    s->first[256] = (uint32_t)s->n;
}

void so_added_deinit(so_added_set *s) {
    free(s->items);
    *s = (so_added_set){0};
}

/* The first of items [lo, hi), which share their first `depth` bytes, whose next byte is ≥ c. */
static size_t lower_bound(const so_added_set *s, size_t lo, size_t hi, size_t depth, unsigned c) {
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        so_str t = s->items[mid].text;
        if (t.len > depth && (unsigned char)t.ptr[depth] >= c)
            hi = mid;
        else
            lo = mid + 1;
    }
    return lo;
}

/* The longest token that `text` starts with. from_data (or NULL) marks bytes that no control token
 * may contain. */
static const so_added *longest_at(const so_added_set *s, so_str text, const uint8_t *from_data) {
    unsigned c = (unsigned char)text.ptr[0];
    size_t lo = s->first[c], hi = s->first[c + 1];
    const so_added *best = NULL;
    for (size_t depth = 1; lo < hi; depth++) {
        if (s->items[lo].text.len == depth &&
            !(s->items[lo].control && from_data && memchr(from_data, 1, depth)))
            best = &s->items[lo]; /* a token that ends here sorts first in the range */
        if (depth == text.len)
            break;
        c = (unsigned char)text.ptr[depth];
        lo = lower_bound(s, lo, hi, depth, c);
        hi = lower_bound(s, lo, hi, depth, c + 1);
    }
    return best;
}

static size_t char_before(so_str text, size_t end, uint32_t *cp) {
    size_t i = end - 1, len;
    while (i > 0 && ((unsigned char)text.ptr[i] & 0xC0) == 0x80)
        i--;
    *cp = so_utf8_at(text.ptr + i, &len);
    return i;
}

static bool is_whole_word(so_str text, size_t start, size_t end) {
    uint32_t cp;
    size_t len;
    if (start > 0 && (char_before(text, start, &cp), so_char_is_word(cp)))
        return false;
    return end == text.len || !so_char_is_word(so_utf8_at(text.ptr + end, &len));
}

/* [*start, *end) of the next token to cut out, with the white space that belongs to it. */
static const so_added *find(so_added_walk *w, size_t *start, size_t *end) {
    for (size_t i = w->scanned; i < w->text.len; i++) {
        unsigned char c = (unsigned char)w->text.ptr[i];
        if (w->set->first[c] == w->set->first[c + 1])
            continue;
        const so_added *a = longest_at(w->set, (so_str){w->text.ptr + i, w->text.len - i},
                                       w->from_data ? w->from_data + i : NULL);
        if (!a)
            continue;
        w->scanned = *end = i + a->text.len;
        *start = i;
        i = w->scanned - 1;
        if ((a->control && !w->parse_control) ||
            (a->single_word && !is_whole_word(w->text, *start, *end)))
            continue;
        uint32_t cp;
        size_t at;
        while (a->lstrip && *start > w->done &&
               (at = char_before(w->text, *start, &cp), so_char_is_space(cp)))
            *start = at;
        while (a->rstrip && *end < w->text.len &&
               so_char_is_space(so_utf8_at(w->text.ptr + *end, &at)))
            *end += at;
        return a;
    }
    w->scanned = w->text.len;
    return NULL;
}

bool so_added_next(so_added_walk *w, so_added_part *part) {
    if (w->has_pending) {
        w->has_pending = false;
        *part = w->pending;
        return true;
    }
    size_t start, end, from = w->done;
    const so_added *a = w->set->n ? find(w, &start, &end) : NULL;
    if (!a) {
        w->done = w->scanned = w->text.len;
        *part = (so_added_part){{w->text.ptr + from, w->text.len - from}, -1};
        return part->text.len > 0;
    }
    so_added_part token = {{w->text.ptr + start, end - start}, a->id};
    w->done = SO_MAX(from, end);
    if (from >= start) { /* the previous match may already include this one's white space */
        *part = token;
        return true;
    }
    *part = (so_added_part){{w->text.ptr + from, start - from}, -1};
    w->pending = token;
    w->has_pending = true;
    return true;
}
