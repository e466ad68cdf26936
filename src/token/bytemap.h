/* The 256 characters by which byte-level vocabularies represent bytes: a printable Latin-1 byte is
 * the character of the same number, the others are numbered from U+0100 in order (space: U+0120,
 * "Ġ"). */
#ifndef SO_TOKEN_BYTEMAP_H
#define SO_TOKEN_BYTEMAP_H

#include "base/str.h"

static inline bool so_byte_is_plain(uint32_t b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

/* The character of byte b. */
uint32_t so_byte_char(unsigned char b);
/* The byte of a character, or −1. */
int so_char_byte(uint32_t cp);
/* Appends the character of each byte of s. */
void so_bytes_spell(so_str s, so_buf *out);
/* Appends the bytes of the characters of s (valid UTF-8). Returns false and appends nothing if a
 * character has no byte. */
bool so_bytes_unspell(so_str s, so_buf *out);

#endif
