/* The 256 characters that byte-level vocabularies use to spell bytes: printable Latin-1 bytes stand
 * for themselves, the others are numbered from U+0100 in order (space becomes U+0120, "Ġ"). */
#ifndef SO_TOKEN_BYTEMAP_H
#define SO_TOKEN_BYTEMAP_H

#include "base/str.h"

static inline bool so_byte_is_plain(uint32_t b) {
    return (b >= 0x21 && b <= 0x7E) || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
}

/* The character that spells byte b. */
uint32_t so_byte_char(unsigned char b);
/* The byte that a character spells, or -1. */
int so_char_byte(uint32_t cp);
/* Appends the spelling of each byte of s. */
void so_bytes_spell(so_str s, so_buf *out);
/* Appends the bytes that s (valid UTF-8) spells; false, and nothing, if a character spells none. */
bool so_bytes_unspell(so_str s, so_buf *out);

#endif
