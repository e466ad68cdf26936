/* Checking and repairing UTF-8 of any length. Stateless; any thread. */
#include "token/utf8.h"

static size_t ascii_run(so_str s, size_t i) {
    uint64_t w;
    while (i + sizeof w <= s.len) {
        memcpy(&w, s.ptr + i, sizeof w);
        if (w & 0x8080808080808080u)
            break;
        i += sizeof w;
    }
    while (i < s.len && (unsigned char)s.ptr[i] < 0x80)
        i++;
    return i;
}

size_t so_utf8_valid_len(so_str s) {
    uint32_t cp;
    size_t len, i = 0;
    while ((i = ascii_run(s, i)) < s.len) {
        if (so_utf8_next(s.ptr + i, s.len - i, &cp, &len) != SO_UTF8_OK)
            return i;
        i += len;
    }
    return i;
}

void so_utf8_repair(so_str s, so_buf *out) {
    uint32_t cp;
    size_t len;
    while (s.len) {
        size_t ok = so_utf8_valid_len(s);
        so_buf_append(out, s.ptr, ok);
        if (ok == s.len)
            return;
        so_utf8_next(s.ptr + ok, s.len - ok, &cp, &len);
        so_buf_append_c(out, SO_UTF8_REPLACEMENT);
        s = (so_str){s.ptr + ok + len, s.len - ok - len};
    }
}
