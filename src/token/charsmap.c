/* Reads and applies a precompiled charsmap; charsmap.h has the format and the rules.
 *
 * A unit of the double array is 32 bits:
 *
 *   bits 0-7, 31   the label: the byte that leads to this unit; a value has bit 31 set
 *   bit 8          the unit has a value, in the unit at its offset
 *   bits 9-30      the offset: bits 10-30, shifted left by 8 if bit 9 is set
 *
 * A child is at (offset of the parent) XOR (index of the parent) XOR (byte). The bytes come from
 * outside: every index is compared with the number of units, a value with the length of the
 * replacements, and a replacement starts at a character. A walk takes at most as many steps as the
 * text has bytes, so damaged units cannot make it endless. */
#include "token/charsmap.h"

#include <stdlib.h>
#include <utf8proc.h>

#include "base/mem.h"
#include "token/utf8.h"

struct so_charsmap {
    uint32_t *units;
    size_t n_units;
    char *texts; /* ends with NUL */
    size_t n_texts;
};

enum { CLUSTER_MAX = 5 };

static uint32_t little_endian(const unsigned char *p) {
    return p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static int check(so_str bytes, size_t *n_trie, so_err *err) {
    if (bytes.len > SO_CHARSMAP_MAX_BYTES)
        return so_err_set(err, SO_ELIMIT, "precompiled charsmap of %zu bytes (at most %d)",
                          bytes.len, SO_CHARSMAP_MAX_BYTES);
    if (bytes.len < 4)
        return so_err_set(err, SO_EFORMAT, "precompiled charsmap of %zu bytes", bytes.len);
    *n_trie = little_endian((const unsigned char *)bytes.ptr);
    if (*n_trie < 4 || *n_trie % 4 != 0 || *n_trie > bytes.len - 4)
        return so_err_set(err, SO_EFORMAT,
                          "precompiled charsmap of %zu bytes states a trie of %zu bytes", bytes.len,
                          *n_trie);
    so_str texts = {bytes.ptr + 4 + *n_trie, bytes.len - 4 - *n_trie};
    size_t valid = so_utf8_valid_len(texts);
    if (valid != texts.len)
        return so_err_set(err, SO_EFORMAT,
                          "precompiled charsmap: byte %zu of the replacements is not UTF-8", valid);
    return 0;
}

int so_charsmap_read(so_str bytes, so_charsmap **out, so_err *err) {
    size_t n_trie = 0;
    int rc = check(bytes, &n_trie, err);
    if (rc)
        return rc;
    so_charsmap *c = SO_NEW(so_charsmap);
    c->n_units = n_trie / 4;
    c->n_texts = bytes.len - 4 - n_trie;
    c->units = SO_NEW_N(uint32_t, c->n_units);
    c->texts = so_strndup(bytes.ptr + 4 + n_trie, c->n_texts);
    for (size_t i = 0; i < c->n_units; i++)
        c->units[i] = little_endian((const unsigned char *)bytes.ptr + 4 + 4 * i);
    *out = c;
    return 0;
}

void so_charsmap_free(so_charsmap *c) {
    if (!c)
        return;
    free(c->units);
    free(c->texts);
    free(c);
}

static size_t offset_of(uint32_t unit) { return (size_t)(unit >> 10) << ((unit & 0x200) >> 6); }
static bool has_value(uint32_t unit) { return unit >> 8 & 1; }

/* The value of the shortest string of the trie that `text` begins with; false: there is none. */
static bool look_up(const so_charsmap *c, so_str text, size_t *value) {
    size_t at = offset_of(c->units[0]);
    for (size_t i = 0; i < text.len; i++) {
        unsigned char byte = (unsigned char)text.ptr[i];
        at ^= byte;
        if (byte == 0 || at >= c->n_units || (c->units[at] & 0x800000FFu) != byte)
            return false;
        uint32_t unit = c->units[at];
        at ^= offset_of(unit);
        if (has_value(unit) && at < c->n_units) {
            *value = c->units[at] & 0x7FFFFFFFu;
            return true;
        }
    }
    return false;
}

/* Appends the replacement of a chunk; false: it has none. */
static bool replace(const so_charsmap *c, so_str chunk, so_buf *out) {
    size_t at;
    if (!look_up(c, chunk, &at) || at >= c->n_texts || (c->texts[at] & 0xC0) == 0x80)
        return false;
    so_buf_append_c(out, c->texts + at);
    return true;
}

static void replace_cluster(const so_charsmap *c, so_str cluster, so_buf *out) {
    if (cluster.len <= CLUSTER_MAX && replace(c, cluster, out))
        return;
    for (size_t i = 0, len; i < cluster.len && !out->full; i += len) {
        so_utf8_at(cluster.ptr + i, &len);
        so_str part = {cluster.ptr + i, len};
        if (!replace(c, part, out))
            so_buf_append_str(out, part);
    }
}

void so_charsmap_apply(const so_charsmap *c, so_str text, so_buf *out) {
    utf8proc_int32_t state = 0, before = 0;
    size_t start = 0, len;
    for (size_t i = 0; i < text.len && !out->full; i += len) {
        utf8proc_int32_t cp = (utf8proc_int32_t)so_utf8_at(text.ptr + i, &len);
        if (i > 0 && utf8proc_grapheme_break_stateful(before, cp, &state)) {
            replace_cluster(c, (so_str){text.ptr + start, i - start}, out);
            start = i;
        }
        before = cp;
    }
    if (start < text.len && !out->full)
        replace_cluster(c, (so_str){text.ptr + start, text.len - start}, out);
}
