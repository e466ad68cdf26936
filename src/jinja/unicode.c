/* What templates can see of Unicode: Python's character classes, case mapping and UTF-8 itself.
 *
 * utf8proc knows categories and one-to-one case mappings; the rest of Python's rules stand here as
 * tables: which numbers count as digits, which letters have case without being Ll or Lu, and the
 * characters whose upper or title form is longer than one character (SpecialCasing.txt, the lines
 * without a condition). Pure functions, any thread. */
#include <utf8proc.h>

#include "jinja/impl.h"

typedef struct range32 {
    int32_t lo, hi;
} range32;

/* Numeric_Type=Digit without being Nd: superscripts, circled digits and the like. */
static const range32 DIGITS[] = {
    {0xB2, 0xB3},       {0xB9, 0xB9},       {0x1369, 0x1371},   {0x19DA, 0x19DA},
    {0x2070, 0x2070},   {0x2074, 0x2079},   {0x2080, 0x2089},   {0x2460, 0x2468},
    {0x2474, 0x247C},   {0x2488, 0x2490},   {0x24EA, 0x24EA},   {0x24F5, 0x24FD},
    {0x24FF, 0x24FF},   {0x2776, 0x277E},   {0x2780, 0x2788},   {0x278A, 0x2792},
    {0x10A40, 0x10A43}, {0x10E60, 0x10E68}, {0x11052, 0x1105A}, {0x1F100, 0x1F10A},
};

/* Letters that are numbers (CJK). */
static const range32 NUMERALS[] = {
    {0x3405, 0x3405},   {0x3483, 0x3483},   {0x382A, 0x382A},   {0x3B4D, 0x3B4D},
    {0x4E00, 0x4E00},   {0x4E03, 0x4E03},   {0x4E07, 0x4E07},   {0x4E09, 0x4E09},
    {0x4E5D, 0x4E5D},   {0x4E8C, 0x4E8C},   {0x4E94, 0x4E94},   {0x4E96, 0x4E96},
    {0x4EBF, 0x4EC0},   {0x4EDF, 0x4EDF},   {0x4EE8, 0x4EE8},   {0x4F0D, 0x4F0D},
    {0x4F70, 0x4F70},   {0x5104, 0x5104},   {0x5146, 0x5146},   {0x5169, 0x5169},
    {0x516B, 0x516B},   {0x516D, 0x516D},   {0x5341, 0x5341},   {0x5343, 0x5345},
    {0x534C, 0x534C},   {0x53C1, 0x53C4},   {0x56DB, 0x56DB},   {0x58F1, 0x58F1},
    {0x58F9, 0x58F9},   {0x5E7A, 0x5E7A},   {0x5EFE, 0x5EFF},   {0x5F0C, 0x5F0E},
    {0x5F10, 0x5F10},   {0x62FE, 0x62FE},   {0x634C, 0x634C},   {0x67D2, 0x67D2},
    {0x6F06, 0x6F06},   {0x7396, 0x7396},   {0x767E, 0x767E},   {0x8086, 0x8086},
    {0x842C, 0x842C},   {0x8CAE, 0x8CAE},   {0x8CB3, 0x8CB3},   {0x8D30, 0x8D30},
    {0x9621, 0x9621},   {0x9646, 0x9646},   {0x964C, 0x964C},   {0x9678, 0x9678},
    {0x96F6, 0x96F6},   {0xF96B, 0xF96B},   {0xF973, 0xF973},   {0xF978, 0xF978},
    {0xF9B2, 0xF9B2},   {0xF9D1, 0xF9D1},   {0xF9D3, 0xF9D3},   {0xF9FD, 0xF9FD},
    {0x20001, 0x20001}, {0x20064, 0x20064}, {0x200E2, 0x200E2}, {0x20121, 0x20121},
    {0x2092A, 0x2092A}, {0x20983, 0x20983}, {0x2098C, 0x2098C}, {0x2099C, 0x2099C},
    {0x20AEA, 0x20AEA}, {0x20AFD, 0x20AFD}, {0x20B19, 0x20B19}, {0x22390, 0x22390},
    {0x22998, 0x22998}, {0x23B1B, 0x23B1B}, {0x2626D, 0x2626D}, {0x2F890, 0x2F890},
};

/* Other_Lowercase and Other_Uppercase. */
static const range32 LOWERS[] = {
    {0xAA, 0xAA},       {0xBA, 0xBA},       {0x2B0, 0x2B8},     {0x2C0, 0x2C1},
    {0x2E0, 0x2E4},     {0x345, 0x345},     {0x37A, 0x37A},     {0x1D2C, 0x1D6A},
    {0x1D78, 0x1D78},   {0x1D9B, 0x1DBF},   {0x2071, 0x2071},   {0x207F, 0x207F},
    {0x2090, 0x209C},   {0x2170, 0x217F},   {0x24D0, 0x24E9},   {0x2C7C, 0x2C7D},
    {0xA69C, 0xA69D},   {0xA770, 0xA770},   {0xA7F8, 0xA7F9},   {0xAB5C, 0xAB5F},
    {0x10780, 0x10780}, {0x10783, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA},
};
static const range32 UPPERS[] = {
    {0x2160, 0x216F}, {0x24B6, 0x24CF}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189},
};

typedef struct special_case {
    uint16_t cp, upper[3], title[3];
} special_case;

static const special_case SPECIAL[] = {
    {0x00DF, {0x53, 0x53}, {0x53, 0x73}},
    {0x0149, {0x2BC, 0x4E}, {0x2BC, 0x4E}},
    {0x01F0, {0x4A, 0x30C}, {0x4A, 0x30C}},
    {0x0390, {0x399, 0x308, 0x301}, {0x399, 0x308, 0x301}},
    {0x03B0, {0x3A5, 0x308, 0x301}, {0x3A5, 0x308, 0x301}},
    {0x0587, {0x535, 0x552}, {0x535, 0x582}},
    {0x1E96, {0x48, 0x331}, {0x48, 0x331}},
    {0x1E97, {0x54, 0x308}, {0x54, 0x308}},
    {0x1E98, {0x57, 0x30A}, {0x57, 0x30A}},
    {0x1E99, {0x59, 0x30A}, {0x59, 0x30A}},
    {0x1E9A, {0x41, 0x2BE}, {0x41, 0x2BE}},
    {0x1F50, {0x3A5, 0x313}, {0x3A5, 0x313}},
    {0x1F52, {0x3A5, 0x313, 0x300}, {0x3A5, 0x313, 0x300}},
    {0x1F54, {0x3A5, 0x313, 0x301}, {0x3A5, 0x313, 0x301}},
    {0x1F56, {0x3A5, 0x313, 0x342}, {0x3A5, 0x313, 0x342}},
    {0x1F80, {0x1F08, 0x399}, {0x1F88}},
    {0x1F81, {0x1F09, 0x399}, {0x1F89}},
    {0x1F82, {0x1F0A, 0x399}, {0x1F8A}},
    {0x1F83, {0x1F0B, 0x399}, {0x1F8B}},
    {0x1F84, {0x1F0C, 0x399}, {0x1F8C}},
    {0x1F85, {0x1F0D, 0x399}, {0x1F8D}},
    {0x1F86, {0x1F0E, 0x399}, {0x1F8E}},
    {0x1F87, {0x1F0F, 0x399}, {0x1F8F}},
    {0x1F88, {0x1F08, 0x399}, {0x1F88}},
    {0x1F89, {0x1F09, 0x399}, {0x1F89}},
    {0x1F8A, {0x1F0A, 0x399}, {0x1F8A}},
    {0x1F8B, {0x1F0B, 0x399}, {0x1F8B}},
    {0x1F8C, {0x1F0C, 0x399}, {0x1F8C}},
    {0x1F8D, {0x1F0D, 0x399}, {0x1F8D}},
    {0x1F8E, {0x1F0E, 0x399}, {0x1F8E}},
    {0x1F8F, {0x1F0F, 0x399}, {0x1F8F}},
    {0x1F90, {0x1F28, 0x399}, {0x1F98}},
    {0x1F91, {0x1F29, 0x399}, {0x1F99}},
    {0x1F92, {0x1F2A, 0x399}, {0x1F9A}},
    {0x1F93, {0x1F2B, 0x399}, {0x1F9B}},
    {0x1F94, {0x1F2C, 0x399}, {0x1F9C}},
    {0x1F95, {0x1F2D, 0x399}, {0x1F9D}},
    {0x1F96, {0x1F2E, 0x399}, {0x1F9E}},
    {0x1F97, {0x1F2F, 0x399}, {0x1F9F}},
    {0x1F98, {0x1F28, 0x399}, {0x1F98}},
    {0x1F99, {0x1F29, 0x399}, {0x1F99}},
    {0x1F9A, {0x1F2A, 0x399}, {0x1F9A}},
    {0x1F9B, {0x1F2B, 0x399}, {0x1F9B}},
    {0x1F9C, {0x1F2C, 0x399}, {0x1F9C}},
    {0x1F9D, {0x1F2D, 0x399}, {0x1F9D}},
    {0x1F9E, {0x1F2E, 0x399}, {0x1F9E}},
    {0x1F9F, {0x1F2F, 0x399}, {0x1F9F}},
    {0x1FA0, {0x1F68, 0x399}, {0x1FA8}},
    {0x1FA1, {0x1F69, 0x399}, {0x1FA9}},
    {0x1FA2, {0x1F6A, 0x399}, {0x1FAA}},
    {0x1FA3, {0x1F6B, 0x399}, {0x1FAB}},
    {0x1FA4, {0x1F6C, 0x399}, {0x1FAC}},
    {0x1FA5, {0x1F6D, 0x399}, {0x1FAD}},
    {0x1FA6, {0x1F6E, 0x399}, {0x1FAE}},
    {0x1FA7, {0x1F6F, 0x399}, {0x1FAF}},
    {0x1FA8, {0x1F68, 0x399}, {0x1FA8}},
    {0x1FA9, {0x1F69, 0x399}, {0x1FA9}},
    {0x1FAA, {0x1F6A, 0x399}, {0x1FAA}},
    {0x1FAB, {0x1F6B, 0x399}, {0x1FAB}},
    {0x1FAC, {0x1F6C, 0x399}, {0x1FAC}},
    {0x1FAD, {0x1F6D, 0x399}, {0x1FAD}},
    {0x1FAE, {0x1F6E, 0x399}, {0x1FAE}},
    {0x1FAF, {0x1F6F, 0x399}, {0x1FAF}},
    {0x1FB2, {0x1FBA, 0x399}, {0x1FBA, 0x345}},
    {0x1FB3, {0x391, 0x399}, {0x1FBC}},
    {0x1FB4, {0x386, 0x399}, {0x386, 0x345}},
    {0x1FB6, {0x391, 0x342}, {0x391, 0x342}},
    {0x1FB7, {0x391, 0x342, 0x399}, {0x391, 0x342, 0x345}},
    {0x1FBC, {0x391, 0x399}, {0x1FBC}},
    {0x1FC2, {0x1FCA, 0x399}, {0x1FCA, 0x345}},
    {0x1FC3, {0x397, 0x399}, {0x1FCC}},
    {0x1FC4, {0x389, 0x399}, {0x389, 0x345}},
    {0x1FC6, {0x397, 0x342}, {0x397, 0x342}},
    {0x1FC7, {0x397, 0x342, 0x399}, {0x397, 0x342, 0x345}},
    {0x1FCC, {0x397, 0x399}, {0x1FCC}},
    {0x1FD2, {0x399, 0x308, 0x300}, {0x399, 0x308, 0x300}},
    {0x1FD3, {0x399, 0x308, 0x301}, {0x399, 0x308, 0x301}},
    {0x1FD6, {0x399, 0x342}, {0x399, 0x342}},
    {0x1FD7, {0x399, 0x308, 0x342}, {0x399, 0x308, 0x342}},
    {0x1FE2, {0x3A5, 0x308, 0x300}, {0x3A5, 0x308, 0x300}},
    {0x1FE3, {0x3A5, 0x308, 0x301}, {0x3A5, 0x308, 0x301}},
    {0x1FE4, {0x3A1, 0x313}, {0x3A1, 0x313}},
    {0x1FE6, {0x3A5, 0x342}, {0x3A5, 0x342}},
    {0x1FE7, {0x3A5, 0x308, 0x342}, {0x3A5, 0x308, 0x342}},
    {0x1FF2, {0x1FFA, 0x399}, {0x1FFA, 0x345}},
    {0x1FF3, {0x3A9, 0x399}, {0x1FFC}},
    {0x1FF4, {0x38F, 0x399}, {0x38F, 0x345}},
    {0x1FF6, {0x3A9, 0x342}, {0x3A9, 0x342}},
    {0x1FF7, {0x3A9, 0x342, 0x399}, {0x3A9, 0x342, 0x345}},
    {0x1FFC, {0x3A9, 0x399}, {0x1FFC}},
    {0xFB00, {0x46, 0x46}, {0x46, 0x66}},
    {0xFB01, {0x46, 0x49}, {0x46, 0x69}},
    {0xFB02, {0x46, 0x4C}, {0x46, 0x6C}},
    {0xFB03, {0x46, 0x46, 0x49}, {0x46, 0x66, 0x69}},
    {0xFB04, {0x46, 0x46, 0x4C}, {0x46, 0x66, 0x6C}},
    {0xFB05, {0x53, 0x54}, {0x53, 0x74}},
    {0xFB06, {0x53, 0x54}, {0x53, 0x74}},
    {0xFB13, {0x544, 0x546}, {0x544, 0x576}},
    {0xFB14, {0x544, 0x535}, {0x544, 0x565}},
    {0xFB15, {0x544, 0x53B}, {0x544, 0x56B}},
    {0xFB16, {0x54E, 0x546}, {0x54E, 0x576}},
    {0xFB17, {0x544, 0x53D}, {0x544, 0x56D}},
};

static bool in_ranges(const range32 *r, size_t n, int32_t cp) {
    size_t lo = 0, hi = n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (cp > r[mid].hi)
            lo = mid + 1;
        else if (cp < r[mid].lo)
            hi = mid;
        else
            return true;
    }
    return false;
}

static const special_case *find_special(int32_t cp) {
    size_t lo = 0, hi = SO_LEN(SPECIAL);
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (cp > SPECIAL[mid].cp)
            lo = mid + 1;
        else if (cp < SPECIAL[mid].cp)
            hi = mid;
        else
            return &SPECIAL[mid];
    }
    return NULL;
}

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

static bool is_letter(int cat) {
    return cat >= UTF8PROC_CATEGORY_LU && cat <= UTF8PROC_CATEGORY_LO;
}

static bool is_printable(int32_t cp, int cat) {
    if (cp == ' ')
        return true;
    return cat != UTF8PROC_CATEGORY_CN && cat != UTF8PROC_CATEGORY_CC &&
           cat != UTF8PROC_CATEGORY_CF && cat != UTF8PROC_CATEGORY_CS &&
           cat != UTF8PROC_CATEGORY_CO && cat != UTF8PROC_CATEGORY_ZL &&
           cat != UTF8PROC_CATEGORY_ZP && cat != UTF8PROC_CATEGORY_ZS;
}

static bool is_number(int32_t cp, int cat) {
    return cat == UTF8PROC_CATEGORY_ND || cat == UTF8PROC_CATEGORY_NL ||
           cat == UTF8PROC_CATEGORY_NO || in_ranges(NUMERALS, SO_LEN(NUMERALS), cp);
}

bool so_jj_cp_is(int32_t cp, so_jj_class c) {
    if (c == SO_JJ_C_SPACE)
        return is_space(cp);
    if (c == SO_JJ_C_LINE_END)
        return is_line_end(cp);
    int cat = utf8proc_category(cp);
    switch (c) {
    case SO_JJ_C_ALPHA:
        return is_letter(cat);
    case SO_JJ_C_DECIMAL:
        return cat == UTF8PROC_CATEGORY_ND;
    case SO_JJ_C_DIGIT:
        return cat == UTF8PROC_CATEGORY_ND || in_ranges(DIGITS, SO_LEN(DIGITS), cp);
    case SO_JJ_C_NUMERIC:
        return is_number(cp, cat);
    case SO_JJ_C_ALNUM:
        return is_letter(cat) || is_number(cp, cat);
    case SO_JJ_C_PRINTABLE:
        return is_printable(cp, cat);
    case SO_JJ_C_LOWER:
        return cat == UTF8PROC_CATEGORY_LL || in_ranges(LOWERS, SO_LEN(LOWERS), cp);
    case SO_JJ_C_UPPER:
        return cat == UTF8PROC_CATEGORY_LU || in_ranges(UPPERS, SO_LEN(UPPERS), cp);
    case SO_JJ_C_TITLE:
        return cat == UTF8PROC_CATEGORY_LT;
    case SO_JJ_C_ID_START:
        return cp == '_' || is_letter(cat) || cat == UTF8PROC_CATEGORY_NL;
    case SO_JJ_C_ID_PART:
        return cp == '_' || is_letter(cat) || cat == UTF8PROC_CATEGORY_NL ||
               cat == UTF8PROC_CATEGORY_ND || cat == UTF8PROC_CATEGORY_MN ||
               cat == UTF8PROC_CATEGORY_MC || cat == UTF8PROC_CATEGORY_PC;
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

static bool is_cased(int32_t cp) {
    return so_jj_cp_is(cp, SO_JJ_C_LOWER) || so_jj_cp_is(cp, SO_JJ_C_UPPER) ||
           so_jj_cp_is(cp, SO_JJ_C_TITLE);
}

static bool is_case_ignorable(int32_t cp) {
    int cat = utf8proc_category(cp);
    return cat == UTF8PROC_CATEGORY_MN || cat == UTF8PROC_CATEGORY_ME ||
           cat == UTF8PROC_CATEGORY_CF || cat == UTF8PROC_CATEGORY_LM ||
           cat == UTF8PROC_CATEGORY_SK || cp == '\'' || cp == '.' || cp == ':' || cp == 0xB7 ||
           cp == 0x387 || cp == 0x55F || cp == 0x5F4 || cp == 0x2018 || cp == 0x2019 ||
           cp == 0x2024 || cp == 0x2027 || cp == 0xFE13 || cp == 0xFE52 || cp == 0xFE55 ||
           cp == 0xFF07 || cp == 0xFF0E || cp == 0xFF1A;
}

/* The capital sigma at s[at] ends a word: a cased letter before it and none after it. */
static bool is_final_sigma(so_str s, size_t at) {
    const char *p = s.ptr + at, *end = s.ptr + s.len;
    size_t n;
    bool before = false;
    while (p > s.ptr) {
        do
            p--;
        while (p > s.ptr && ((unsigned char)*p & 0xC0) == 0x80);
        int32_t cp = so_jj_cp_at(p, end, &n);
        if (is_case_ignorable(cp))
            continue;
        before = is_cased(cp);
        break;
    }
    if (!before)
        return false;
    for (p = s.ptr + at + 2; p < end; p += n) {
        int32_t cp = so_jj_cp_at(p, end, &n);
        if (!is_case_ignorable(cp))
            return !is_cased(cp);
    }
    return true;
}

static void add_lower(so_jj *x, so_jj_buf *b, so_str whole, size_t at, int32_t cp) {
    if (cp == 0x130)
        so_jj_buf_add(x, b, SO_STR("i\xCC\x87"));
    else if (cp == 0x3A3)
        so_jj_buf_cp(x, b, is_final_sigma(whole, at) ? 0x3C2 : 0x3C3);
    else
        so_jj_buf_cp(x, b, utf8proc_tolower(cp));
}

static void add_case(so_jj *x, so_jj_buf *b, so_str whole, size_t at, enum so_jj_case to) {
    size_t n;
    int32_t cp = so_jj_cp_at(whole.ptr + at, whole.ptr + whole.len, &n);
    if (to == SO_JJ_TO_LOWER) {
        add_lower(x, b, whole, at, cp);
        return;
    }
    if (to == SO_JJ_TO_FOLD) {
        utf8proc_int32_t fold[8];
        int last_class = 0;
        utf8proc_ssize_t k =
            utf8proc_decompose_char(cp, fold, SO_LEN(fold), UTF8PROC_CASEFOLD, &last_class);
        for (utf8proc_ssize_t i = 0; i < k && i < (utf8proc_ssize_t)SO_LEN(fold); i++)
            so_jj_buf_cp(x, b, fold[i]);
        return;
    }
    const special_case *sp = find_special(cp);
    if (!sp) {
        so_jj_buf_cp(x, b, to == SO_JJ_TO_UPPER ? utf8proc_toupper(cp) : utf8proc_totitle(cp));
        return;
    }
    const uint16_t *seq = to == SO_JJ_TO_UPPER ? sp->upper : sp->title;
    for (int i = 0; i < 3 && seq[i]; i++)
        so_jj_buf_cp(x, b, seq[i]);
}

void so_jj_buf_case(so_jj *x, so_jj_buf *b, so_str whole, size_t at, enum so_jj_case to) {
    size_t start = b->len;
    add_case(x, b, whole, at, to);
    so_jj_origin_like(x, b, start, whole.ptr + at);
}
