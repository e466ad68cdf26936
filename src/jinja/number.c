/* Numbers under a format specification, for "%5.2f" and "{:>8,.3f}" alike.
 *
 * A number becomes sign, prefix and digits; digits are grouped, then the whole is padded. Floats go
 * through the C library, which rounds as Python does (correctly, ties to even). Widths and
 * precisions come from the template: they are bounded before anything is allocated. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "jinja/impl.h"

enum { MAX_PRECISION = 100000 };

typedef struct number {
    bool negative;
    const char *prefix; /* 0x and the like */
    so_str digits;      /* before a point, exponent or percent sign */
    so_str rest;
} number;

static void fill_cp(so_jj *x, so_jj_buf *b, int32_t cp, int64_t times) {
    so_jj_buf one = {0};
    so_jj_buf_cp(x, &one, cp);
    if (times > 0)
        so_jj_buf_fill(x, b, (so_str){one.data, one.len}, (size_t)times);
}

static int64_t n_chars(so_str s) {
    int64_t n = 0;
    for (size_t i = 0; i < s.len; i++)
        n += ((unsigned char)s.ptr[i] & 0xC0) != 0x80;
    return n;
}

void so_jj_format_pad(so_jj *x, so_jj_buf *b, so_str s, const so_jj_spec *spec, char def_align) {
    int64_t room = spec->width - n_chars(s), left = 0;
    int32_t fill = spec->fill ? spec->fill : ' ';
    char align = spec->align ? spec->align : def_align;
    if (room > 0)
        left = align == '<' ? 0 : align == '^' ? room / 2 : room;
    fill_cp(x, b, fill, left);
    so_jj_buf_add(x, b, s);
    fill_cp(x, b, fill, room > 0 ? room - left : 0);
}

/* ---- digits ---- */

static so_str printed(so_jj *x, const char *fmt, int precision, double f) {
    int n = snprintf(NULL, 0, fmt, precision, f);
    char *p = so_jj_alloc(x, (size_t)n + 1, 1);
    snprintf(p, (size_t)n + 1, fmt, precision, f);
    return (so_str){p, (size_t)n};
}

/* No type letter but a precision: %g that always shows a point or an exponent. */
static so_str general(so_jj *x, int precision, double f) {
    so_str e = printed(x, "%.*e", precision > 0 ? precision - 1 : 0, f);
    const char *exp = memchr(e.ptr, 'e', e.len);
    int p = SO_MAX(precision, 1);
    if (exp && strtol(exp + 1, NULL, 10) == p - 1) { /* %g would still write it plain */
        so_str g = {e.ptr, (size_t)(exp - e.ptr)};
        if (memchr(g.ptr, '.', g.len))
            while (g.ptr[g.len - 1] == '0' || g.ptr[g.len - 1] == '.')
                if (g.ptr[--g.len] == '.')
                    break;
        so_jj_buf b = {0};
        so_jj_buf_add(x, &b, g);
        so_jj_buf_add(x, &b, so_str_c(exp));
        return (so_str){b.data, b.len};
    }
    so_str g = printed(x, "%.*g", precision, f);
    if (memchr(g.ptr, '.', g.len) || memchr(g.ptr, 'e', g.len))
        return g;
    so_jj_buf b = {0};
    so_jj_buf_add(x, &b, g);
    so_jj_buf_add(x, &b, SO_STR(".0"));
    return (so_str){b.data, b.len};
}

static so_str float_text(so_jj *x, double f, const so_jj_spec *spec) {
    char fmt[8] = "%.*g", repr[SO_JJ_FLOAT_BUF];
    int precision = spec->precision < 0 ? 6 : (int)spec->precision;
    bool upper = spec->type == 'E' || spec->type == 'F' || spec->type == 'G';
    if (isinf(f) || isnan(f)) {
        const char *t = isnan(f) ? (upper ? "NAN" : "nan") : upper ? "INF" : "inf";
        so_jj_buf b = {0};
        so_jj_buf_add(x, &b, so_str_c(t));
        if (spec->type == '%')
            so_jj_buf_char(x, &b, '%');
        return (so_str){b.data, b.len};
    }
    if (!spec->type && spec->precision >= 0)
        return general(x, precision, f);
    if (!spec->type) {
        so_jj_float_repr(f, repr);
        return so_jj_bytes(so_jj_str_printf(x, "%s", repr));
    }
    if (spec->type == '%') {
        so_str s = printed(x, spec->alt ? "%#.*f%%" : "%.*f%%", precision, f * 100);
        return s;
    }
    snprintf(fmt, sizeof fmt, spec->alt ? "%%#.*%c" : "%%.*%c",
             spec->type == 'n' ? 'g' : spec->type);
    return printed(x, fmt, precision, f);
}

static so_str int_digits(so_jj *x, uint64_t v, unsigned base, bool upper) {
    char t[65];
    size_t i = sizeof t;
    do
        t[--i] = (upper ? "0123456789ABCDEF" : "0123456789abcdef")[v % base];
    while (v /= base);
    return so_jj_bytes(so_jj_str_copy(x, (so_str){t + i, sizeof t - i}));
}

static number int_number(so_jj *x, int64_t v, const so_jj_spec *spec) {
    static const char *const PREFIX[] = {['b'] = "0b", ['o'] = "0o", ['x'] = "0x", ['X'] = "0X"};
    number n = {.negative = v < 0};
    uint64_t u = v < 0 ? (uint64_t)0 - (uint64_t)v : (uint64_t)v;
    char t = spec->type;
    unsigned base = t == 'b' ? 2 : t == 'o' ? 8 : t == 'x' || t == 'X' ? 16 : 10;
    n.digits = int_digits(x, u, base, t == 'X');
    if (spec->alt && base != 10)
        n.prefix = PREFIX[(int)t];
    return n;
}

static number float_number(so_jj *x, double f, const so_jj_spec *spec) {
    number n = {.negative = signbit(f) && !isnan(f)};
    so_str t = float_text(x, fabs(f), spec);
    size_t k = 0;
    while (k < t.len && t.ptr[k] >= '0' && t.ptr[k] <= '9')
        k++;
    n.digits = (so_str){t.ptr, k};
    n.rest = (so_str){t.ptr + k, t.len - k};
    return n;
}

/* ---- putting together ---- */

static size_t grouped_len(size_t n, size_t every) { return n + (n ? (n - 1) / every : 0); }

/* Digits in groups, with leading zeros until `min_len` is reached. */
static so_str grouped(so_jj *x, so_str digits, char sep, size_t every, size_t min_len) {
    size_t n = digits.len;
    if (!sep)
        n = SO_MAX(n, min_len);
    else
        while (grouped_len(n, every) < min_len) {
            so_jj_tick(x, 1);
            n++;
        }
    so_jj_buf b = {0};
    if (!sep)
        so_jj_buf_fill(x, &b, SO_STR("0"), n - digits.len);
    for (size_t i = 0; sep && i < n; i++) {
        if (i && (n - i) % every == 0)
            so_jj_buf_char(x, &b, sep);
        so_jj_buf_char(x, &b, i < n - digits.len ? '0' : digits.ptr[i - (n - digits.len)]);
    }
    if (!sep)
        so_jj_buf_add(x, &b, digits);
    return (so_str){b.data, b.len};
}

static void write_number(so_jj *x, so_jj_buf *out, const number *n, const so_jj_spec *spec) {
    so_jj_buf b = {0};
    char sign = n->negative ? '-' : spec->sign == '+' || spec->sign == ' ' ? spec->sign : '\0';
    if (sign)
        so_jj_buf_char(x, &b, sign);
    if (n->prefix)
        so_jj_buf_add(x, &b, so_str_c(n->prefix));
    char align = spec->align ? spec->align : spec->zero ? '=' : '>';
    int32_t fill = spec->fill ? spec->fill : spec->zero ? '0' : ' ';
    size_t every =
        spec->type == 'x' || spec->type == 'X' || spec->type == 'b' || spec->type == 'o' ? 4 : 3;
    int64_t used = (int64_t)b.len + (int64_t)n->rest.len;
    bool zeros = align == '=' && fill == '0';
    so_str digits = grouped(x, n->digits, spec->group, every,
                            zeros && spec->width > used ? (size_t)(spec->width - used) : 0);
    if (align == '=')
        fill_cp(x, &b, fill, spec->width - used - (int64_t)digits.len);
    so_jj_buf_add(x, &b, digits);
    so_jj_buf_add(x, &b, n->rest);
    so_jj_spec pad = *spec;
    pad.align = align == '=' ? '>' : align;
    pad.fill = fill;
    so_jj_format_pad(x, out, (so_str){b.data, b.len}, &pad, '>');
}

static void format_char(so_jj *x, so_jj_buf *b, int64_t cp, const so_jj_spec *spec) {
    so_jj_buf one = {0};
    if (cp < 0 || cp > 0x10FFFF || (cp >= 0xD800 && cp < 0xE000))
        so_jj_fail(x, SO_ERANGE, "%%c: %lld is no character", (long long)cp);
    so_jj_buf_cp(x, &one, (int32_t)cp);
    so_jj_format_pad(x, b, (so_str){one.data, one.len}, spec, '<');
}

void so_jj_format_number(so_jj *x, so_jj_buf *b, so_jj_val v, const so_jj_spec *spec) {
    int64_t i;
    if (spec->precision > MAX_PRECISION)
        so_jj_fail(x, SO_ELIMIT, "precision %lld is too large", (long long)spec->precision);
    bool whole = so_jj_is_int(v, &i), as_float = spec->type && strchr("eEfFgG%", spec->type);
    if (whole && spec->type == 'c') {
        format_char(x, b, i, spec);
        return;
    }
    if (!whole && spec->type && !strchr("eEfFgGn%", spec->type))
        so_jj_fail(x, SO_EINVAL, "format '%c' does not fit a float", spec->type);
    number n =
        whole && !as_float ? int_number(x, i, spec) : float_number(x, so_jj_to_double(v), spec);
    write_number(x, b, &n, spec);
}
