/* Methods of strings, by Python's names and rules: case, stripping, padding, joining, classes.
 * Searching, splitting and replacing are in split.c, formatting in format.c.
 *
 * Positions and widths count characters, never bytes. Markup stays markup where Python's class
 * keeps it, and text put into it is escaped. */
#include <errno.h>
#include <stdlib.h>

#include "jinja/impl.h"

#define METHOD(name) \
    static so_jj_val name(so_jj *x, so_jj_val self, const so_jj_args *args, const so_jj_val *p)
#define UNUSED (void)x, (void)self, (void)args, (void)p

so_jj_val so_jj_substr(so_jj *x, so_jj_val s, so_str part) {
    so_jj_val v = so_jj_str_borrow(x, part);
    return s.s->markup ? so_jj_markup(x, v) : v;
}

static so_jj_val like(so_jj *x, so_jj_val self, so_jj_val v) {
    return self.s->markup ? so_jj_markup(x, v) : v;
}

static so_str str_arg(so_jj *x, so_jj_val v) {
    if (v.kind != SO_JJ_STR)
        so_jj_fail_type(x, "expected a string", v);
    return so_jj_bytes(v);
}

/* ---- case ---- */

so_jj_val so_jj_recase(so_jj *x, so_str s, enum so_jj_case to) {
    so_jj_buf b = {0};
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        so_jj_buf_case(x, &b, s, i, to);
    }
    return so_jj_buf_str(x, &b);
}

so_jj_val so_jj_capitalize(so_jj *x, so_str s) {
    so_jj_buf b = {0};
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        so_jj_buf_case(x, &b, s, i, i ? SO_JJ_TO_LOWER : SO_JJ_TO_TITLE);
    }
    return so_jj_buf_str(x, &b);
}

static bool is_cased(int32_t cp) {
    return so_jj_cp_is(cp, SO_JJ_C_LOWER) || so_jj_cp_is(cp, SO_JJ_C_UPPER) ||
           so_jj_cp_is(cp, SO_JJ_C_TITLE);
}

/* A cased letter after another one is lower, else title: "they're" becomes "They'Re". */
METHOD(str_title) {
    UNUSED;
    so_str s = so_jj_bytes(self);
    so_jj_buf b = {0};
    bool in_word = false;
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        so_jj_buf_case(x, &b, s, i, in_word ? SO_JJ_TO_LOWER : SO_JJ_TO_TITLE);
        in_word = is_cased(cp);
    }
    return like(x, self, so_jj_buf_str(x, &b));
}

METHOD(str_swapcase) {
    UNUSED;
    so_str s = so_jj_bytes(self);
    so_jj_buf b = {0};
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        if (so_jj_cp_is(cp, SO_JJ_C_UPPER))
            so_jj_buf_case(x, &b, s, i, SO_JJ_TO_LOWER);
        else if (so_jj_cp_is(cp, SO_JJ_C_LOWER))
            so_jj_buf_case(x, &b, s, i, SO_JJ_TO_UPPER);
        else
            so_jj_buf_add(x, &b, (so_str){s.ptr + i, n});
    }
    return like(x, self, so_jj_buf_str(x, &b));
}

METHOD(str_upper) {
    UNUSED;
    return like(x, self, so_jj_recase(x, so_jj_bytes(self), SO_JJ_TO_UPPER));
}

METHOD(str_lower) {
    UNUSED;
    return like(x, self, so_jj_recase(x, so_jj_bytes(self), SO_JJ_TO_LOWER));
}

METHOD(str_casefold) {
    UNUSED;
    return like(x, self, so_jj_recase(x, so_jj_bytes(self), SO_JJ_TO_FOLD));
}

METHOD(str_capitalize) {
    UNUSED;
    return like(x, self, so_jj_capitalize(x, so_jj_bytes(self)));
}

/* ---- stripping ---- */

static so_jj_val strip(so_jj *x, so_jj_val self, so_jj_val chars, bool left, bool right) {
    so_str s = so_jj_bytes(self), set;
    bool spaces = chars.kind == SO_JJ_MISSING || chars.kind == SO_JJ_NONE;
    if (!spaces) {
        set = str_arg(x, chars);
        so_jj_tick(x, s.len / 64 * (set.len / 8 + 1));
    }
    return so_jj_substr(x, self, so_jj_trim(s, spaces ? NULL : &set, left, right));
}

METHOD(str_strip) {
    UNUSED;
    return strip(x, self, p[0], true, true);
}

METHOD(str_lstrip) {
    UNUSED;
    return strip(x, self, p[0], true, false);
}

METHOD(str_rstrip) {
    UNUSED;
    return strip(x, self, p[0], false, true);
}

METHOD(str_removeprefix) {
    UNUSED;
    so_str s = so_jj_bytes(self), prefix = str_arg(x, p[0]);
    if (!so_str_starts(s, prefix))
        return self;
    return so_jj_substr(x, self, (so_str){s.ptr + prefix.len, s.len - prefix.len});
}

METHOD(str_removesuffix) {
    UNUSED;
    so_str s = so_jj_bytes(self), suffix = str_arg(x, p[0]);
    if (s.len < suffix.len || memcmp(s.ptr + s.len - suffix.len, suffix.ptr, suffix.len) != 0)
        return self;
    return so_jj_substr(x, self, (so_str){s.ptr, s.len - suffix.len});
}

/* ---- padding ---- */

static so_jj_val pad(so_jj *x, so_jj_val self, so_str fill, size_t left, size_t right) {
    so_jj_buf b = {0};
    so_jj_buf_fill(x, &b, fill, left);
    so_jj_buf_add(x, &b, so_jj_bytes(self));
    so_jj_buf_fill(x, &b, fill, right);
    return like(x, self, so_jj_buf_str(x, &b));
}

static size_t padding(so_jj *x, so_jj_val self, so_jj_val width) {
    int64_t w = so_jj_int_arg(x, width, 0), n = (int64_t)self.s->n_chars;
    return w > n ? (size_t)(w - n) : 0;
}

static so_str fill_arg(so_jj *x, so_jj_val v) {
    if (v.kind == SO_JJ_MISSING)
        return SO_STR(" ");
    if (v.kind != SO_JJ_STR || v.s->n_chars != 1)
        so_jj_fail_type(x, "the fill character must be exactly one character long", v);
    return so_jj_bytes(v);
}

METHOD(str_ljust) {
    UNUSED;
    return pad(x, self, fill_arg(x, p[1]), 0, padding(x, self, p[0]));
}

METHOD(str_rjust) {
    UNUSED;
    return pad(x, self, fill_arg(x, p[1]), padding(x, self, p[0]), 0);
}

/* The odd blank goes left where the width is odd: CPython's rule. */
so_jj_val so_jj_center(so_jj *x, so_jj_val s, int64_t width, so_str fill) {
    size_t n = padding(x, s, so_jj_int(width)), left = n / 2 + (n & (size_t)width & 1);
    return pad(x, s, fill, left, n - left);
}

METHOD(str_center) {
    UNUSED;
    return so_jj_center(x, self, so_jj_int_arg(x, p[0], 0), fill_arg(x, p[1]));
}

METHOD(str_zfill) {
    UNUSED;
    so_str s = so_jj_bytes(self);
    bool sign = s.len && (s.ptr[0] == '-' || s.ptr[0] == '+');
    so_jj_buf b = {0};
    so_jj_buf_add(x, &b, (so_str){s.ptr, sign});
    so_jj_buf_fill(x, &b, SO_STR("0"), padding(x, self, p[0]));
    so_jj_buf_add(x, &b, (so_str){s.ptr + sign, s.len - sign});
    return like(x, self, so_jj_buf_str(x, &b));
}

METHOD(str_expandtabs) {
    UNUSED;
    int64_t size = so_jj_int_arg(x, p[0], 8), column = 0;
    so_str s = so_jj_bytes(self);
    so_jj_buf b = {0};
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        if (cp == '\t') {
            int64_t k = size > 0 ? size - column % size : 0;
            so_jj_buf_fill(x, &b, SO_STR(" "), (size_t)k);
            column += k;
            continue;
        }
        so_jj_buf_add(x, &b, (so_str){s.ptr + i, n});
        column = cp == '\n' || cp == '\r' ? 0 : column + 1;
    }
    so_jj_tick(x, s.len / 16);
    return like(x, self, so_jj_buf_str(x, &b));
}

/* ---- joining ---- */

METHOD(str_join) {
    UNUSED;
    so_jj_iter it = so_jj_iter_of(x, p[0]);
    so_jj_buf b = {0};
    so_jj_val v;
    for (size_t i = 0; so_jj_iter_next(x, &it, &v); i++) {
        if (i)
            so_jj_buf_add(x, &b, so_jj_bytes(self));
        if (self.s->markup) {
            so_jj_val t = so_jj_to_str(x, v);
            if (t.s->markup)
                so_jj_buf_add(x, &b, so_jj_bytes(t));
            else
                so_jj_write_escaped(x, &b, so_jj_bytes(t));
        } else if (v.kind == SO_JJ_STR) {
            so_jj_buf_add(x, &b, so_jj_bytes(v));
        } else {
            so_jj_fail(x, SO_EINVAL, "join(): item %zu must be a string, not '%s'", i,
                       so_jj_type(v));
        }
    }
    return like(x, self, so_jj_buf_str(x, &b));
}

/* ---- classes ---- */

static bool all_are(so_jj *x, so_str s, so_jj_class c) {
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n)
        if (!so_jj_cp_is(so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n), c))
            return false;
    return s.len > 0;
}

#define CLASS_METHOD(name, cls)                                \
    METHOD(name) {                                             \
        UNUSED;                                                \
        return so_jj_bool(all_are(x, so_jj_bytes(self), cls)); \
    }
CLASS_METHOD(str_isspace, SO_JJ_C_SPACE)
CLASS_METHOD(str_isalpha, SO_JJ_C_ALPHA)
CLASS_METHOD(str_isdecimal, SO_JJ_C_DECIMAL)
CLASS_METHOD(str_isdigit, SO_JJ_C_DIGIT)
CLASS_METHOD(str_isnumeric, SO_JJ_C_NUMERIC)
CLASS_METHOD(str_isalnum, SO_JJ_C_ALNUM)

METHOD(str_isprintable) {
    UNUSED;
    return so_jj_bool(!self.s->len || all_are(x, so_jj_bytes(self), SO_JJ_C_PRINTABLE));
}

METHOD(str_isascii) {
    UNUSED;
    return so_jj_bool(self.s->n_chars == self.s->len);
}

METHOD(str_isidentifier) {
    UNUSED;
    so_str s = so_jj_bytes(self);
    size_t n;
    return so_jj_bool(s.len &&
                      so_jj_cp_is(so_jj_cp_at(s.ptr, s.ptr + s.len, &n), SO_JJ_C_ID_START) &&
                      all_are(x, s, SO_JJ_C_ID_PART));
}

/* at least one letter of this case and none of the other */
static bool one_case(so_jj *x, so_str s, bool upper) {
    bool any = false;
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        if (so_jj_cp_is(cp, upper ? SO_JJ_C_LOWER : SO_JJ_C_UPPER) ||
            so_jj_cp_is(cp, SO_JJ_C_TITLE))
            return false;
        any |= so_jj_cp_is(cp, upper ? SO_JJ_C_UPPER : SO_JJ_C_LOWER);
    }
    return any;
}

METHOD(str_islower) {
    UNUSED;
    return so_jj_bool(one_case(x, so_jj_bytes(self), false));
}

METHOD(str_isupper) {
    UNUSED;
    return so_jj_bool(one_case(x, so_jj_bytes(self), true));
}

METHOD(str_istitle) {
    UNUSED;
    so_str s = so_jj_bytes(self);
    bool any = false, in_word = false;
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        bool upper = so_jj_cp_is(cp, SO_JJ_C_UPPER) || so_jj_cp_is(cp, SO_JJ_C_TITLE);
        bool lower = so_jj_cp_is(cp, SO_JJ_C_LOWER);
        if ((upper && in_word) || (lower && !in_word))
            return so_jj_bool(false);
        in_word = upper || lower;
        any |= in_word;
    }
    return so_jj_bool(any);
}

/* ---- numbers in text, for the filters int and float ---- */

static int digit_value(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    return (c | 32) >= 'a' && (c | 32) <= 'z' ? (c | 32) - 'a' + 10 : 99;
}

/* Python's int(s, base): spaces around, a sign, 0x 0o 0b where the base allows, single underscores
 * between digits. */
bool so_jj_parse_int(so_jj *x, so_str s, int64_t base, int64_t *out) {
    s = so_jj_trim(s, NULL, true, true);
    size_t i = s.len && (s.ptr[0] == '-' || s.ptr[0] == '+');
    bool negative = i && s.ptr[0] == '-', under = false;
    int64_t v = 0;
    if (base != 0 && (base < 2 || base > 36))
        return false;
    if (i + 1 < s.len && s.ptr[i] == '0') {
        char c = (char)(s.ptr[i + 1] | 32);
        int64_t prefix = c == 'x' ? 16 : c == 'o' ? 8 : c == 'b' ? 2 : 0;
        if (prefix && (base == prefix || base == 0)) {
            base = prefix;
            i += 2;
            i += i < s.len && s.ptr[i] == '_';
        }
    }
    bool any = false;
    for (; i < s.len; i++) {
        if (s.ptr[i] == '_' && any && !under) {
            under = true;
            continue;
        }
        int d = digit_value(s.ptr[i]);
        if (d >= (base ? base : 10))
            return false;
        if (__builtin_mul_overflow(v, base ? base : 10, &v) ||
            __builtin_add_overflow(v, negative ? -d : d, &v))
            so_jj_fail(x, SO_ERANGE, "integer does not fit 64 bits");
        any = true;
        under = false;
    }
    *out = v;
    return any && !under;
}

/* Python's float(s): no hexadecimal, inf and nan by name, single underscores between digits. */
bool so_jj_parse_float(so_str s, double *out) {
    char text[512];
    size_t n = 0;
    s = so_jj_trim(s, NULL, true, true);
    for (size_t i = 0; i < s.len; i++) {
        char c = s.ptr[i];
        if (c == '_') {
            if (!i || i + 1 == s.len || digit_value(s.ptr[i - 1]) > 9 ||
                digit_value(s.ptr[i + 1]) > 9)
                return false;
            continue;
        }
        if (n + 1 == sizeof text || (unsigned char)c >= 0x80 || c == '\0' || (c | 32) == 'x' ||
            c == '(')
            return false;
        text[n++] = c;
    }
    text[n] = '\0';
    char *end;
    *out = strtod(text, &end);
    return n && *end == '\0';
}

const so_jj_func *so_jj_find_str_method(so_str name) {
    static const so_jj_func METHODS[] = {
        {"strip", str_strip, "/chars", 0},
        {"lstrip", str_lstrip, "/chars", 0},
        {"rstrip", str_rstrip, "/chars", 0},
        {"split", so_jj_str_split, "sep,maxsplit", 0},
        {"rsplit", so_jj_str_rsplit, "sep,maxsplit", 0},
        {"splitlines", so_jj_str_splitlines, "keepends", 0},
        {"startswith", so_jj_str_startswith, "/prefix,start,end", 1},
        {"endswith", so_jj_str_endswith, "/suffix,start,end", 1},
        {"replace", so_jj_str_replace, "/old,new,count", 2},
        {"lower", str_lower, "", 0},
        {"upper", str_upper, "", 0},
        {"title", str_title, "", 0},
        {"capitalize", str_capitalize, "", 0},
        {"swapcase", str_swapcase, "", 0},
        {"casefold", str_casefold, "", 0},
        {"find", so_jj_str_find, "/sub,start,end", 1},
        {"rfind", so_jj_str_rfind, "/sub,start,end", 1},
        {"index", so_jj_str_index, "/sub,start,end", 1},
        {"rindex", so_jj_str_rindex, "/sub,start,end", 1},
        {"count", so_jj_str_count, "/sub,start,end", 1},
        {"join", str_join, "/iterable", 1},
        {"format", so_jj_str_format, NULL, 0},
        {"format_map", so_jj_str_format_map, "/mapping", 1},
        {"partition", so_jj_str_partition, "/sep", 1},
        {"rpartition", so_jj_str_rpartition, "/sep", 1},
        {"removeprefix", str_removeprefix, "/prefix", 1},
        {"removesuffix", str_removesuffix, "/suffix", 1},
        {"ljust", str_ljust, "/width,fillchar", 1},
        {"rjust", str_rjust, "/width,fillchar", 1},
        {"center", str_center, "/width,fillchar", 1},
        {"zfill", str_zfill, "/width", 1},
        {"expandtabs", str_expandtabs, "tabsize", 0},
        {"isspace", str_isspace, "", 0},
        {"isalpha", str_isalpha, "", 0},
        {"isdecimal", str_isdecimal, "", 0},
        {"isdigit", str_isdigit, "", 0},
        {"isnumeric", str_isnumeric, "", 0},
        {"isalnum", str_isalnum, "", 0},
        {"isprintable", str_isprintable, "", 0},
        {"isascii", str_isascii, "", 0},
        {"isidentifier", str_isidentifier, "", 0},
        {"islower", str_islower, "", 0},
        {"isupper", str_isupper, "", 0},
        {"istitle", str_istitle, "", 0},
        {"encode", NULL, NULL, 0},
        {"translate", NULL, NULL, 0},
        {"maketrans", NULL, NULL, 0},
    };
    return so_jj_find_func(METHODS, SO_LEN(METHODS), name);
}
