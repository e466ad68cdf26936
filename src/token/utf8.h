/* UTF-8, one character at a time, with Unicode's rule for invalid bytes: the longest prefix of a
 * well-formed sequence is one error ("maximal subpart"), as in Python's errors="replace" and in
 * browsers. Overlong forms, surrogates and values above U+10FFFF are invalid from their second byte
 * on. Stateless; any thread. */
#ifndef SO_TOKEN_UTF8_H
#define SO_TOKEN_UTF8_H

#include "base/str.h"

typedef enum so_utf8 {
    SO_UTF8_OK,
    SO_UTF8_BAD,   /* the first *len bytes are invalid */
    SO_UTF8_SHORT, /* the n bytes are an incomplete character; at the end of a text: BAD */
} so_utf8;

#define SO_UTF8_REPLACEMENT "\xEF\xBF\xBD"

/* Decodes s[0 … n), n ≥ 1. Sets *len (≥ 1) and, if OK, *cp. */
static inline so_utf8 so_utf8_next(const char *s, size_t n, uint32_t *cp, size_t *len) {
    const unsigned char *p = (const unsigned char *)s;
    uint32_t c = p[0], lo = 0x80, hi = 0xBF;
    *len = 1;
    if (c < 0x80) {
        *cp = c;
        return SO_UTF8_OK;
    }
    if (c < 0xC2 || c > 0xF4)
        return SO_UTF8_BAD;
    size_t need = c < 0xE0 ? 2 : c < 0xF0 ? 3 : 4;
    if (c == 0xE0)
        lo = 0xA0;
    else if (c == 0xED)
        hi = 0x9F;
    else if (c == 0xF0)
        lo = 0x90;
    else if (c == 0xF4)
        hi = 0x8F;
    uint32_t v = c & (0x7Fu >> need);
    for (size_t i = 1; i < need; i++, lo = 0x80, hi = 0xBF) {
        if (i == n)
            return SO_UTF8_SHORT;
        if (p[i] < lo || p[i] > hi)
            return SO_UTF8_BAD;
        v = v << 6 | (p[i] & 0x3Fu);
        *len = i + 1;
    }
    *cp = v;
    return SO_UTF8_OK;
}

/* The character at s, which must be valid. */
static inline uint32_t so_utf8_at(const char *s, size_t *len) {
    const unsigned char *p = (const unsigned char *)s;
    if (p[0] < 0x80)
        return *len = 1, p[0];
    if (p[0] < 0xE0)
        return *len = 2, (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    if (p[0] < 0xF0)
        return *len = 3, (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    return *len = 4,
           (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

/* Writes cp (a scalar value) and returns its length. */
static inline size_t so_utf8_put(uint32_t cp, char out[4]) {
    if (cp < 0x80)
        return out[0] = (char)cp, 1;
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}

/* The length of the valid UTF-8 at the start of s. */
size_t so_utf8_valid_len(so_str s);
/* Appends s with each maximal invalid part replaced by U+FFFD. */
void so_utf8_repair(so_str s, so_buf *out);

#endif
