/* The text operations of normalize.h, with the Unicode data of utf8proc.
 *
 * Each operation appends its whole result to the output, so a chain of them alternates between two
 * buffers. Input is valid UTF-8 (the encoder repairs it first), and so is the output: the strings
 * of REPLACE and PREPEND come from JSON, which is checked. The output is limited by the maximum of
 * the so_buf; the caller checks `full`. */
#include "token/normalize.h"

#include <stdlib.h>
#include <utf8proc.h>

#include "base/mem.h"
#include "token/bytemap.h"
#include "token/unicode_delta.h"
#include "token/utf8.h"

void so_text_op_deinit(so_text_op *op) {
    so_pattern_free(op->pattern);
    so_charsmap_free(op->map);
    free(op->from);
    free(op->to);
    *op = (so_text_op){0};
}

bool so_char_is_space(uint32_t cp) {
    if (cp < 0x80)
        return (cp >= 9 && cp <= 13) || cp == ' ';
    return cp == 0x85 || cp == 0xA0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) ||
           cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

static utf8proc_category_t category(uint32_t cp) { return utf8proc_category((utf8proc_int32_t)cp); }

bool so_char_is_numeric(uint32_t cp) {
    uint32_t known = so_unicode_stand_in(cp);
    utf8proc_category_t c = category(known ? known : cp);
    return c == UTF8PROC_CATEGORY_ND || c == UTF8PROC_CATEGORY_NL || c == UTF8PROC_CATEGORY_NO;
}

bool so_char_is_punct(uint32_t cp) {
    if (cp < 0x80)
        return (cp >= '!' && cp <= '/') || (cp >= ':' && cp <= '@') || (cp >= '[' && cp <= '`') ||
               (cp >= '{' && cp <= '~');
    utf8proc_category_t c = category(cp);
    return c >= UTF8PROC_CATEGORY_PC && c <= UTF8PROC_CATEGORY_PO;
}

static bool is_mark(uint32_t cp) {
    utf8proc_category_t c = category(cp);
    return c == UTF8PROC_CATEGORY_MN || c == UTF8PROC_CATEGORY_MC || c == UTF8PROC_CATEGORY_ME;
}

bool so_char_is_word(uint32_t cp) {
    utf8proc_category_t c = category(cp);
    return (c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO) || is_mark(cp) ||
           c == UTF8PROC_CATEGORY_ND || c == UTF8PROC_CATEGORY_NL || c == UTF8PROC_CATEGORY_PC ||
           cp == 0x200C || cp == 0x200D || (cp >= 0x24B6 && cp <= 0x24E9);
}

/* NFC changes nothing below U+0300; no normalisation form changes anything below U+00A0. */
static size_t unchanged_prefix(so_text_kind kind, so_str text) {
    uint32_t limit = kind == SO_TEXT_NFC ? 0x300 : 0xA0;
    size_t i = 0, len;
    for (; i < text.len; i += len)
        if (so_utf8_at(text.ptr + i, &len) >= limit)
            break;
    if (i == text.len)
        return i;
    while (i > 0 && ((unsigned char)text.ptr[--i] & 0xC0) ==
                        0x80) /* back to the character before: a mark combines with it */
        ;
    return i;
}

static int compose_run(so_text_kind kind, so_str text, so_buf *out, so_err *err) {
    static const unsigned options[] = {
        [SO_TEXT_NFC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE,
        [SO_TEXT_NFD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
        [SO_TEXT_NFKC] = UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
        [SO_TEXT_NFKD] = UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT,
    };
    size_t same = unchanged_prefix(kind, text);
    so_buf_append(out, text.ptr, same);
    if (same == text.len)
        return 0;
    utf8proc_uint8_t *made = NULL;
    utf8proc_ssize_t n =
        utf8proc_map((const utf8proc_uint8_t *)text.ptr + same, (utf8proc_ssize_t)(text.len - same),
                     &made, (utf8proc_option_t)options[kind]);
    if (n < 0)
        return so_err_set(err, SO_ENOMEM, "normalising %zu bytes of text: %s", text.len,
                          utf8proc_errmsg(n));
    so_buf_append(out, made, (size_t)n);
    free(made);
    return 0;
}

/* Characters that HF tokenizers does not normalise split the text: nothing combines across them. */
static int compose(so_text_kind kind, so_str text, so_buf *out, so_err *err) {
    size_t begin = 0, len;
    int rc = 0;
    for (size_t i = 0; i < text.len && rc == 0; i += len) {
        if (!so_unicode_not_normalized(so_utf8_at(text.ptr + i, &len)))
            continue;
        rc = compose_run(kind, (so_str){text.ptr + begin, i - begin}, out, err);
        so_buf_append(out, text.ptr + i, len);
        begin = i + len;
    }
    return rc ? rc : compose_run(kind, (so_str){text.ptr + begin, text.len - begin}, out, err);
}

static void put_char(so_buf *out, uint32_t cp) {
    char c[4];
    so_buf_append(out, c, so_utf8_put(cp, c));
}

static void lowercase(so_str text, so_buf *out) {
    for (size_t i = 0, len; i < text.len; i += len) {
        uint32_t cp = so_utf8_at(text.ptr + i, &len);
        if (cp == 0x130) /* İ, the only letter whose lower case is two characters */
            so_buf_append_c(out, "i\xCC\x87");
        else
            put_char(out, (uint32_t)utf8proc_tolower((utf8proc_int32_t)cp));
    }
}

static void strip(const so_text_op *op, so_str text, so_buf *out) {
    size_t begin = 0, end = text.len, len;
    while (op->left && begin < end && so_char_is_space(so_utf8_at(text.ptr + begin, &len)))
        begin += len;
    while (op->right && begin < end) {
        size_t i = end - 1;
        while (i > begin && ((unsigned char)text.ptr[i] & 0xC0) == 0x80)
            i--;
        if (!so_char_is_space(so_utf8_at(text.ptr + i, &len)))
            break;
        end = i;
    }
    so_buf_append(out, text.ptr + begin, end - begin);
}

static void strip_accents(so_str text, so_buf *out) {
    for (size_t i = 0, len; i < text.len; i += len)
        if (!is_mark(so_utf8_at(text.ptr + i, &len)))
            so_buf_append(out, text.ptr + i, len);
}

/* Most needles are one character and occur often. Short needles use memchr, because under a
 * sanitizer each memmem reads the whole remaining text. Long needles use memmem, which is
 * linear. */
const char *so_text_find(so_str text, so_str needle) {
    if (needle.len > 16)
        return memmem(text.ptr, text.len, needle.ptr, needle.len);
    const char *p = text.ptr, *end = text.ptr + text.len;
    while ((size_t)(end - p) >= needle.len && (p = memchr(p, needle.ptr[0], (size_t)(end - p)))) {
        if ((size_t)(end - p) >= needle.len && memcmp(p, needle.ptr, needle.len) == 0)
            return p;
        p++;
    }
    return NULL;
}

static void replace_literal(const so_text_op *op, so_str text, so_buf *out) {
    while (op->from_len) {
        const char *hit = so_text_find(text, (so_str){op->from, op->from_len});
        if (!hit)
            break;
        size_t before = (size_t)(hit - text.ptr), used = before + op->from_len;
        so_buf_append(out, text.ptr, before);
        so_buf_append(out, op->to, op->to_len);
        text = (so_str){text.ptr + used, text.len - used};
    }
    so_buf_append_str(out, text);
}

static int replace_pattern(const so_text_op *op, so_matching *m, so_str text, so_buf *out,
                           so_err *err) {
    so_find find = {.pattern = op->pattern, .matching = m, .text = so_matching_subject(m, text)};
    size_t done = 0, start, end;
    int rc;
    while (!out->full && (rc = so_find_next(&find, &start, &end, err)) > 0) {
        so_buf_append(out, text.ptr + done, start - done);
        so_buf_append(out, op->to, op->to_len);
        done = end;
    }
    if (out->full)
        return 0;
    so_buf_append(out, text.ptr + done, text.len - done);
    return rc;
}

static void prepend(const so_text_op *op, so_str text, bool first, so_buf *out) {
    bool skip = text.len == 0 || (op->first_only && !first) ||
                (op->unless_there && so_str_starts(text, (so_str){op->to, op->to_len}));
    if (!skip)
        so_buf_append(out, op->to, op->to_len);
    so_buf_append_str(out, text);
}

int so_text_op_apply(const so_text_op *op, so_matching *m, so_str text, bool first, so_buf *out,
                     so_err *err) {
    switch (op->kind) {
    case SO_TEXT_NFC:
    case SO_TEXT_NFD:
    case SO_TEXT_NFKC:
    case SO_TEXT_NFKD:
        return compose(op->kind, text, out, err);
    case SO_TEXT_LOWERCASE:
        lowercase(text, out);
        return 0;
    case SO_TEXT_STRIP:
        strip(op, text, out);
        return 0;
    case SO_TEXT_STRIP_ACCENTS:
        strip_accents(text, out);
        return 0;
    case SO_TEXT_REPLACE:
        if (op->pattern)
            return replace_pattern(op, m, text, out, err);
        replace_literal(op, text, out);
        return 0;
    case SO_TEXT_PREPEND:
        prepend(op, text, first, out);
        return 0;
    case SO_TEXT_SPELL_BYTES:
        so_bytes_spell(text, out);
        return 0;
    case SO_TEXT_CHARSMAP:
        so_charsmap_apply(op->map, text, out);
        return 0;
    }
    so_panic(__FILE__, __LINE__, "text operation %d", (int)op->kind);
}
