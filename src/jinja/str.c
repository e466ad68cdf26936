/* Methods of strings, with Python's names and rules: case, stripping, joining, classes; and the
 * conversion of text to numbers. Searching, splitting and replacing are in split.c, formatting in
 * format.c.
 *
 * Positions and widths count characters, never bytes. A method of markup returns markup if Python's
 * class Markup does, and text added to markup is escaped. Methods that no chat template uses
 * (swapcase, zfill, center, encode, …) do not exist here: calling one is an error that names it. */
#include <stdlib.h>

#include "jinja/impl.h"

so_jj_val so_jj_like(so_jj *x, so_jj_val like, so_jj_val v) {
    return like.s->markup ? so_jj_markup(x, v) : v;
}

so_jj_val so_jj_substr(so_jj *x, so_jj_val s, so_str part) {
    return so_jj_like(x, s, so_jj_str_borrow(x, part));
}

so_str so_jj_str_arg(so_jj *x, so_jj_val v) {
    if (v.kind != SO_JJ_STR)
        so_jj_fail_type(x, "expected a string", v);
    return so_jj_bytes(v);
}

/* ---- case ---- */

so_jj_val so_jj_recase(so_jj *x, so_jj_val s, so_jj_case first, so_jj_case others) {
    so_jj_buf b = {0};
    const char *p = s.s->ptr, *end = p + s.s->len;
    so_jj_tick(x, s.s->len / 16);
    for (size_t n; p < end; p += n) {
        int32_t cp = so_jj_cp_at(p, end, &n);
        so_jj_buf_case(x, &b, p, cp, p == s.s->ptr ? first : others);
    }
    return so_jj_like(x, s, so_jj_buf_str(x, &b));
}

static bool is_cased(int32_t cp) {
    return so_jj_cp_is(cp, SO_JJ_C_LOWER) || so_jj_cp_is(cp, SO_JJ_C_UPPER);
}

/* A letter after another letter becomes lower case, any other title case: "they're" → "They'Re". */
static SO_JJ_FN(str_title) {
    so_jj_buf b = {0};
    bool in_word = false;
    const char *at = self.s->ptr, *end = at + self.s->len;
    so_jj_tick(x, self.s->len / 16);
    for (size_t n; at < end; at += n) {
        int32_t cp = so_jj_cp_at(at, end, &n);
        so_jj_buf_case(x, &b, at, cp, in_word ? SO_JJ_TO_LOWER : SO_JJ_TO_TITLE);
        in_word = is_cased(cp);
    }
    return so_jj_like(x, self, so_jj_buf_str(x, &b));
}

static SO_JJ_FN(str_upper) { return so_jj_recase(x, self, SO_JJ_TO_UPPER, SO_JJ_TO_UPPER); }
static SO_JJ_FN(str_lower) { return so_jj_recase(x, self, SO_JJ_TO_LOWER, SO_JJ_TO_LOWER); }
static SO_JJ_FN(str_capitalize) { return so_jj_recase(x, self, SO_JJ_TO_TITLE, SO_JJ_TO_LOWER); }

/* ---- stripping ---- */

so_jj_val so_jj_strip(so_jj *x, so_jj_val self, so_jj_val chars, bool left, bool right) {
    so_str s = so_jj_bytes(self), set = {0};
    bool spaces = chars.kind == SO_JJ_MISSING || chars.kind == SO_JJ_NONE;
    if (!spaces)
        set = so_jj_str_arg(x, chars);
    so_jj_tick(x, s.len / 64 * (set.len / 8 + 1));
    return so_jj_substr(x, self, so_jj_trim(s, spaces ? NULL : &set, left, right));
}

static SO_JJ_FN(str_strip) { return so_jj_strip(x, self, p[0], true, true); }
static SO_JJ_FN(str_lstrip) { return so_jj_strip(x, self, p[0], true, false); }
static SO_JJ_FN(str_rstrip) { return so_jj_strip(x, self, p[0], false, true); }

static SO_JJ_FN(str_removeprefix) {
    so_str s = so_jj_bytes(self), prefix = so_jj_str_arg(x, p[0]);
    if (!so_str_starts(s, prefix))
        return self;
    return so_jj_substr(x, self, (so_str){s.ptr + prefix.len, s.len - prefix.len});
}

static SO_JJ_FN(str_removesuffix) {
    so_str s = so_jj_bytes(self), suffix = so_jj_str_arg(x, p[0]);
    if (s.len < suffix.len || memcmp(s.ptr + s.len - suffix.len, suffix.ptr, suffix.len) != 0)
        return self;
    return so_jj_substr(x, self, (so_str){s.ptr, s.len - suffix.len});
}

/* ---- joining ---- */

static SO_JJ_FN(str_join) {
    so_jj_iter it = so_jj_iter_of(x, p[0]);
    so_jj_buf b = {0};
    so_jj_val v;
    for (size_t i = 0; so_jj_iter_next(x, &it, &v); i++) {
        if (i)
            so_jj_buf_add(x, &b, so_jj_bytes(self));
        if (self.s->markup)
            so_jj_buf_add(x, &b, so_jj_bytes(so_jj_escaped(x, so_jj_to_str(x, v))));
        else if (v.kind == SO_JJ_STR)
            so_jj_buf_add(x, &b, so_jj_bytes(v));
        else
            so_jj_fail(x, SO_EINVAL, "join(): item %zu must be a string, not '%s'", i,
                       so_jj_type(v));
    }
    return so_jj_like(x, self, so_jj_buf_str(x, &b));
}

/* ---- classes ---- */

static so_jj_val all_are(so_jj *x, so_str s, so_jj_class c) {
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n)
        if (!so_jj_cp_is(so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n), c))
            return so_jj_bool(false);
    return so_jj_bool(s.len > 0);
}

static SO_JJ_FN(str_isspace) { return all_are(x, so_jj_bytes(self), SO_JJ_C_SPACE); }
static SO_JJ_FN(str_isalpha) { return all_are(x, so_jj_bytes(self), SO_JJ_C_ALPHA); }
static SO_JJ_FN(str_isdigit) { return all_are(x, so_jj_bytes(self), SO_JJ_C_DIGIT); }
static SO_JJ_FN(str_isalnum) { return all_are(x, so_jj_bytes(self), SO_JJ_C_ALNUM); }

bool so_jj_is_case(so_jj *x, so_str s, bool upper) {
    bool any = false;
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        if (so_jj_cp_is(cp, upper ? SO_JJ_C_LOWER : SO_JJ_C_UPPER))
            return false;
        any |= is_cased(cp);
    }
    return any;
}

static SO_JJ_FN(str_islower) { return so_jj_bool(so_jj_is_case(x, so_jj_bytes(self), false)); }
static SO_JJ_FN(str_isupper) { return so_jj_bool(so_jj_is_case(x, so_jj_bytes(self), true)); }

/* ---- text to numbers, for the filters int and float ---- */

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Python's int(s): spaces around, a sign, single underscores between digits. */
bool so_jj_parse_int(so_jj *x, so_str s, int64_t *out) {
    s = so_jj_trim(s, NULL, true, true);
    size_t i = s.len && (s.ptr[0] == '-' || s.ptr[0] == '+');
    bool negative = i && s.ptr[0] == '-', after_digit = false;
    int64_t v = 0;
    for (; i < s.len; i++) {
        if (s.ptr[i] == '_' && after_digit) {
            after_digit = false;
            continue;
        }
        if (!is_digit(s.ptr[i]))
            return false;
        int d = s.ptr[i] - '0';
        if (__builtin_mul_overflow(v, 10, &v) || __builtin_add_overflow(v, negative ? -d : d, &v))
            so_jj_fail(x, SO_ERANGE, "integer does not fit 64 bits");
        after_digit = true;
    }
    *out = v;
    return after_digit;
}

/* Python's float(s): no hexadecimal, inf and nan by name, single underscores between digits. */
bool so_jj_parse_float(so_str s, double *out) {
    char text[512];
    size_t n = 0;
    s = so_jj_trim(s, NULL, true, true);
    for (size_t i = 0; i < s.len; i++) {
        char c = s.ptr[i];
        if (c == '_') {
            if (!i || i + 1 == s.len || !is_digit(s.ptr[i - 1]) || !is_digit(s.ptr[i + 1]))
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
        {"find", so_jj_str_find, "/sub,start,end", 1},
        {"rfind", so_jj_str_rfind, "/sub,start,end", 1},
        {"index", so_jj_str_index, "/sub,start,end", 1},
        {"rindex", so_jj_str_rindex, "/sub,start,end", 1},
        {"count", so_jj_str_count, "/sub,start,end", 1},
        {"join", str_join, "/iterable", 1},
        {"format", so_jj_str_format, NULL, 0},
        {"partition", so_jj_str_partition, "/sep", 1},
        {"rpartition", so_jj_str_rpartition, "/sep", 1},
        {"removeprefix", str_removeprefix, "/prefix", 1},
        {"removesuffix", str_removesuffix, "/suffix", 1},
        {"isspace", str_isspace, "", 0},
        {"isalpha", str_isalpha, "", 0},
        {"isdigit", str_isdigit, "", 0},
        {"isalnum", str_isalnum, "", 0},
        {"islower", str_islower, "", 0},
        {"isupper", str_isupper, "", 0},
    };
    return so_jj_find_func(METHODS, SO_LEN(METHODS), name);
}
