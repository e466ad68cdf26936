/* Where each character of a render came from: the template, or the caller's data.
 *
 * A chat template mixes its own markers ("<|im_end|>") with text from messages. Whoever tokenizes
 * the result must know which is which, or a user's "<|im_end|>" ends the turn. So a render that is
 * asked for origins keeps one flag beside each byte of text it makes:
 *
 *   1. Text lives in chunks; a chunk has as many flags as bytes.
 *   2. Strings of the caller's data are copied into a chunk with their flags set.
 *   3. Slices of a string (strip, split, …) point into the same bytes, and so find the same flags.
 *   4. so_jj_buf_add, through which all other text is made, copies the flags with the bytes. Bytes
 *      outside the chunks (literals of the template, numbers) have none.
 *
 * What rewrites characters one by one calls so_jj_origin_like. */
#include "jinja/impl.h"

enum { FIRST_CHUNK = 4096 };

struct so_jj_chunk {
    so_jj_chunk *next; /* older and at most half as large, so there are few */
    char *text;
    uint8_t *from_data; /* [cap] */
    size_t len, cap;
};

char *so_jj_text_alloc(so_jj *x, size_t n) {
    if (!x->keeps_origins)
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
    uint8_t *dst = x->keeps_origins ? so_jj_origin(x, to) : NULL;
    const uint8_t *src = dst ? so_jj_origin(x, from) : NULL;
    if (src)
        memcpy(dst, src, n);
    else if (dst)
        memset(dst, 0, n);
}

void so_jj_origin_like(so_jj *x, so_jj_buf *b, size_t start, const char *source) {
    if (!x->keeps_origins || start == b->len)
        return;
    const uint8_t *src = so_jj_origin(x, source);
    memset(so_jj_origin(x, b->data + start), src ? *src : 0, b->len - start);
}

so_str so_jj_text_from_data(so_jj *x, so_str s) {
    if (!x->keeps_origins || !x->reads_untrusted || !s.len)
        return s;
    char *p = so_jj_text_alloc(x, s.len);
    memcpy(p, s.ptr, s.len);
    memset(so_jj_origin(x, p), 1, s.len);
    return (so_str){p, s.len};
}
