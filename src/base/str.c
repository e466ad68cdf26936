/* Growing buffers (see str.h). They abort if out of memory. A so_buf never grows beyond its
 * maximum, so external text cannot exhaust the memory. One thread at a time per buffer. */
#include "base/str.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/err.h"
#include "base/mem.h"

static const size_t DEFAULT_MAX = (size_t)1 << 30;

uint64_t so_hash_bytes(const void *p, size_t len) {
    const unsigned char *s = p;
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ s[i]) * 0x100000001b3u;
    return h;
}

static bool reserve(so_buf *b, size_t more) {
    size_t max = b->max ? b->max : DEFAULT_MAX;
    if (b->full || more > max || b->len > max - more) {
        b->full = true;
        return false;
    }
    size_t need = b->len + more + 1;
    if (need > b->cap) {
        b->cap = SO_MAX(need, b->cap * 2);
        b->cap = SO_MAX(b->cap, (size_t)64);
        b->data = so_realloc(b->data, b->cap);
    }
    return true;
}

void so_buf_append(so_buf *b, const void *p, size_t len) {
    if (!reserve(b, len))
        return;
    if (len)
        memcpy(b->data + b->len, p, len);
    b->len += len;
    b->data[b->len] = '\0';
}

void so_buf_append_str(so_buf *b, so_str s) { so_buf_append(b, s.ptr, s.len); }
void so_buf_append_c(so_buf *b, const char *s) { so_buf_append(b, s, strlen(s)); }
void so_buf_append_char(so_buf *b, char c) { so_buf_append(b, &c, 1); }

void so_buf_printf(so_buf *b, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(NULL, 0, fmt, ap);
    va_end(ap);
    SO_ASSERT_OP(n, >=, 0);
    if (!reserve(b, (size_t)n))
        return;
    va_start(ap, fmt);
    vsnprintf(b->data + b->len, (size_t)n + 1, fmt, ap);
    va_end(ap);
    b->len += (size_t)n;
}

void so_buf_clear(so_buf *b) {
    b->len = 0;
    b->full = false;
    if (b->data)
        b->data[0] = '\0';
}

void so_buf_free(so_buf *b) {
    free(b->data);
    *b = (so_buf){.max = b->max};
}

void so_tokens_append(so_tokens *t, const int32_t *ids, size_t n) {
    if (t->len + n > t->cap) {
        t->cap = SO_MAX(t->len + n, t->cap * 2);
        t->cap = SO_MAX(t->cap, (size_t)32);
        t->ids = so_realloc(t->ids, t->cap * sizeof *t->ids);
    }
    if (n)
        memcpy(t->ids + t->len, ids, n * sizeof *ids);
    t->len += n;
}

void so_tokens_push(so_tokens *t, int32_t id) { so_tokens_append(t, &id, 1); }

void so_tokens_free(so_tokens *t) {
    free(t->ids);
    *t = (so_tokens){0};
}
