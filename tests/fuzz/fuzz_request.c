/* HTTP requests from anybody: bytes to heads and bodies, as net.c reads them, the same bytes whole
 * and in two parts. Checks what must hold of whatever is accepted. */
#include <stdlib.h>

#include "base/mem.h"
#include "server/http_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Content of the body behind the head; false: refused. */
static bool read_body(const so_head *h, so_str rest, size_t cut, so_buf *out) {
    so_body b;
    so_api_error e = {0};
    so_str piece, parts[] = {{rest.ptr, cut}, {rest.ptr + cut, rest.len - cut}};
    so_body_init(&b, h);
    for (int i = 0; i < 2; i++)
        for (size_t at = 0; at < parts[i].len && b.state != SO_BODY_DONE;) {
            if (!so_body_read(&b, parts[i], &at, &piece, &e)) {
                SO_ASSERT(e.status == 400 && e.msg[0]);
                return false;
            }
            SO_ASSERT(piece.len == 0 || (piece.ptr >= parts[i].ptr &&
                                         piece.ptr + piece.len <= parts[i].ptr + parts[i].len));
            so_buf_append_str(out, piece);
        }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char *copy = so_alloc(size); /* of the exact size: reading past its end is seen */
    so_head h;
    so_api_error e = {0};
    memcpy(copy, data, size);
    so_str in = {copy, size};
    size_t n = so_head_find(in, 0);
    SO_ASSERT(n <= size);
    for (size_t seen = 0; seen < n; seen += 1 + n / 16) /* found wherever the search goes on */
        SO_ASSERT(so_head_find(in, seen) == n);
    if (n > 0 && so_head_parse((so_str){copy, n}, &h, &e)) {
        SO_ASSERT(h.method[0] && h.path && (h.minor == 0 || h.minor == 1));
        SO_ASSERT(!(h.chunked && h.length > 0) && so_head_get(&h, "no such header") == NULL);
        so_buf whole = {0}, cut = {0};
        so_str rest = {copy + n, size - n};
        bool ok = read_body(&h, rest, 0, &whole);
        SO_ASSERT(read_body(&h, rest, rest.len / 2, &cut) == ok);
        SO_ASSERT(!ok || so_str_eq(so_buf_str(&whole), so_buf_str(&cut)));
        so_buf_free(&whole);
        so_buf_free(&cut);
        so_head_free(&h);
    } else if (n > 0) {
        SO_ASSERT(e.status >= 400 && e.status < 600 && e.msg[0]);
    }
    free(copy);
    return 0;
}
