/* Tracks the origin of each byte of text: the template, or the caller's data.
 *
 * A chat template mixes its own markers ("<|im_end|>") with text from messages. The tokenizer must
 * distinguish them, or a user's "<|im_end|>" would end the turn. With track_origins set, a render
 * has one flag for each byte of text:
 *
 *   1. Text is allocated in chunks that have as many flags as bytes.
 *   2. Strings of the caller's data are copied into a chunk with their flags set.
 *   3. Parts of a string (strip, split, …) point into the same bytes, so they have the same flags.
 *   4. All other text is made by so_jj_buf_add, which copies the flags along with the bytes. Bytes
 *      outside the chunks (literals of the template, numbers) count as the template's.
 *
 * Code that replaces characters (upper, lower, …) sets their flags by so_jj_origin_like. */
#include "jinja/impl.h"

enum { FIRST_CHUNK = 4096 };

struct so_jj_chunk {
    so_jj_chunk *next; /* older and at most half as large, so the list is short */
    char *text;
    uint8_t *from_data; /* [cap] */
    size_t len, cap;
};

char *so_jj_text_alloc(so_jj *x, size_t n) {
    if (!x->track_origins)
        return so_jj_alloc(x, n, 1);
    so_jj_chunk *c = x->chunks;
    if (!c || c->cap - c->len < n) {
        size_t cap = SO_MAX(c ? 2 * c->cap : FIRST_CHUNK, n);
        c = SO_JJ_NEW(x, so_jj_chunk);
        *c = (so_jj_chunk){.next = x->chunks, .cap = cap};
        c->text = so_jj_alloc(x, cap, 1);
        c->from_data = so_jj_alloc(x, cap, 1);
        x->chunks = c;
    }
    char *p = c->text + c->len;
    c->len += n;
    return p;
}

uint8_t *so_jj_origin(const so_jj *x, const char *p) {
    uintptr_t at = (uintptr_t)p;
    for (const so_jj_chunk *c = x->chunks; c; c = c->next)
        if (at >= (uintptr_t)c->text && at - (uintptr_t)c->text < c->cap)
            return c->from_data + (at - (uintptr_t)c->text);
    return NULL;
}

void so_jj_origin_copy(so_jj *x, char *to, const char *from, size_t n) {
    uint8_t *dst = x->track_origins ? so_jj_origin(x, to) : NULL;
    const uint8_t *src = dst ? so_jj_origin(x, from) : NULL;
    if (src)
        memcpy(dst, src, n);
    else if (dst)
        memset(dst, 0, n);
}

void so_jj_origin_like(so_jj *x, so_jj_buf *b, size_t start, const char *source) {
    if (!x->track_origins || start == b->len)
        return;
    const uint8_t *src = so_jj_origin(x, source);
    memset(so_jj_origin(x, b->data + start), src ? *src : 0, b->len - start);
}

so_str so_jj_text_from_data(so_jj *x, so_str s) {
    if (!x->track_origins || !x->reads_data || !s.len)
        return s;
    char *p = so_jj_text_alloc(x, s.len);
    memcpy(p, s.ptr, s.len);
    memset(so_jj_origin(x, p), 1, s.len);
    return (so_str){p, s.len};
}
