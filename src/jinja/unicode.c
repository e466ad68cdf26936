/* UTF-8 decoding, character classes and case mapping for templates.
 *
 * Categories and case mappings are those of utf8proc, one character to one character; the only
 * addition is ß, whose upper case is "SS". Python's other special cases (final sigma, ligatures) are
 * not reproduced. Case mapping keeps the origin flag of a character. Any thread. */
#include <utf8proc.h>

#include "jinja/impl.h"

static bool is_space(int32_t cp) {
    if (cp < 0x80)
        return cp == ' ' || (cp >= 9 && cp <= 13) || (cp >= 0x1C && cp <= 0x1F);
    return cp == 0x85 || cp == 0xA0 || cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) ||
           cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F || cp == 0x3000;
}

static bool is_line_end(int32_t cp) {
    return (cp >= 10 && cp <= 13) || (cp >= 0x1C && cp <= 0x1E) || cp == 0x85 || cp == 0x2028 ||
           cp == 0x2029;
}

/* As Python's str.isprintable(). Of the printable characters, repr() escapes only the quote and the
 * backslash. */
static bool is_printable(int32_t cp, int cat) {
    if (cp == ' ')
        return true;
    return cat != UTF8PROC_CATEGORY_CN && cat != UTF8PROC_CATEGORY_CC &&
           cat != UTF8PROC_CATEGORY_CF && cat != UTF8PROC_CATEGORY_CS &&
           cat != UTF8PROC_CATEGORY_CO && cat != UTF8PROC_CATEGORY_ZL &&
           cat != UTF8PROC_CATEGORY_ZP && cat != UTF8PROC_CATEGORY_ZS;
}

bool so_jj_cp_is(int32_t cp, so_jj_class c) {
    if (c == SO_JJ_C_SPACE)
        return is_space(cp);
    if (c == SO_JJ_C_LINE_END)
        return is_line_end(cp);
    int cat = utf8proc_category(cp);
    bool letter = cat >= UTF8PROC_CATEGORY_LU && cat <= UTF8PROC_CATEGORY_LO;
    bool digit = cat == UTF8PROC_CATEGORY_ND;
    switch (c) {
    case SO_JJ_C_ALPHA:
        return letter;
    case SO_JJ_C_DIGIT:
        return digit;
    case SO_JJ_C_ALNUM:
        return letter || digit;
    case SO_JJ_C_PRINTABLE:
        return is_printable(cp, cat);
    case SO_JJ_C_LOWER:
        return cat == UTF8PROC_CATEGORY_LL;
    case SO_JJ_C_UPPER:
        return cat == UTF8PROC_CATEGORY_LU || cat == UTF8PROC_CATEGORY_LT;
    case SO_JJ_C_ID_START:
        return cp == '_' || letter;
    case SO_JJ_C_ID_PART:
        return cp == '_' || letter || digit || cat == UTF8PROC_CATEGORY_MN ||
               cat == UTF8PROC_CATEGORY_MC;
    default:
        return false;
    }
}

int32_t so_jj_cp_at(const char *p, const char *end, size_t *n) {
    const unsigned char *s = (const unsigned char *)p;
    if (s[0] < 0x80) {
        *n = 1;
        return s[0];
    }
    utf8proc_int32_t cp;
    utf8proc_ssize_t k = utf8proc_iterate(s, end - p, &cp);
    SO_ASSERT_OP(k, >, 0);
    *n = (size_t)k;
    return cp;
}

bool so_jj_utf8_check(so_str s, size_t *n_chars, size_t *bad) {
    size_t i = 0, count = 0;
    while (i < s.len) {
        utf8proc_int32_t cp;
        utf8proc_ssize_t k = 1;
        if ((unsigned char)s.ptr[i] >= 0x80)
            k = utf8proc_iterate((const unsigned char *)s.ptr + i, (utf8proc_ssize_t)(s.len - i),
                                 &cp);
        if (k < 1) {
            *bad = i;
            return false;
        }
        i += (size_t)k;
        count++;
    }
    *n_chars = count;
    return true;
}

size_t so_jj_count_chars(so_str s) {
    size_t n = 0;
    for (size_t i = 0; i < s.len; i++)
        n += ((unsigned char)s.ptr[i] & 0xC0) != 0x80;
    return n;
}

static bool in_set(int32_t cp, const so_str *chars) {
    if (!chars)
        return is_space(cp);
    for (size_t i = 0, n; i < chars->len; i += n)
        if (so_jj_cp_at(chars->ptr + i, chars->ptr + chars->len, &n) == cp)
            return true;
    return false;
}

so_str so_jj_trim(so_str s, const so_str *chars, bool left, bool right) {
    const char *p = s.ptr, *end = s.ptr + s.len;
    size_t n;
    while (left && p < end && in_set(so_jj_cp_at(p, end, &n), chars))
        p += n;
    while (right && end > p) {
        const char *q = end - 1;
        while (q > p && ((unsigned char)*q & 0xC0) == 0x80)
            q--;
        if (!in_set(so_jj_cp_at(q, end, &n), chars))
            break;
        end = q;
    }
    return (so_str){p, (size_t)(end - p)};
}

void so_jj_buf_case(so_jj *x, so_jj_buf *b, const char *at, int32_t cp, so_jj_case to) {
    size_t start = b->len;
    if (cp == 0xDF && to != SO_JJ_TO_LOWER)
        so_jj_buf_add(x, b, to == SO_JJ_TO_UPPER ? SO_STR("SS") : SO_STR("Ss"));
    else
        so_jj_buf_cp(x, b,
                     to == SO_JJ_TO_LOWER   ? utf8proc_tolower(cp)
                     : to == SO_JJ_TO_UPPER ? utf8proc_toupper(cp)
                                            : utf8proc_totitle(cp));
    so_jj_origin_like(x, b, start, at);
}
