/* Bytes to byte-level characters and back, computed by the rule of bytemap.h instead of tables.
 * Plain bytes are 33…126, 161…172, 174…255; the other 68 are, in order, 0…32, 127…160 and 173. */
#include "token/bytemap.h"

#include "token/utf8.h"

uint32_t so_byte_char(unsigned char b) {
    if (so_byte_is_plain(b))
        return b;
    if (b <= 32)
        return 0x100u + b;
    return b == 173 ? 0x143u : 0x100u + 33 + (b - 127u);
}

int so_char_byte(uint32_t cp) {
    if (cp < 0x100)
        return so_byte_is_plain(cp) ? (int)cp : -1;
    if (cp <= 0x120)
        return (int)cp - 0x100;
    if (cp <= 0x142)
        return (int)cp - 0x121 + 127;
    return cp == 0x143 ? 173 : -1;
}

void so_bytes_spell(so_str s, so_buf *out) {
    char part[512];
    for (size_t i = 0; i < s.len;) {
        size_t n = 0;
        for (; i < s.len && n + 4 <= sizeof part; i++)
            n += so_utf8_put(so_byte_char((unsigned char)s.ptr[i]), part + n);
        so_buf_append(out, part, n);
    }
}

bool so_bytes_unspell(so_str s, so_buf *out) {
    size_t start = out->len, len;
    for (size_t i = 0; i < s.len; i += len) {
        int b = so_char_byte(so_utf8_at(s.ptr + i, &len));
        if (b < 0) {
            out->len = start;
            return false;
        }
        so_buf_append_char(out, (char)b);
    }
    return true;
}
