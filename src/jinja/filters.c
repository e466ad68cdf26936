/* Filters on single values: text, numbers, defaults, JSON, escaping. Filters on sequences are in
 * filters_seq.c; so_jj_find_filter knows both.
 *
 * Each does what Jinja 3.1 does with autoescape off, down to which conversions fail and which fall
 * back to a default. Names that Jinja knows and chat templates have no use for are listed without a
 * function: using one is an error that names it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "jinja/impl.h"

#define FILTER(name) \
    static so_jj_val name(so_jj *x, so_jj_val self, const so_jj_args *args, const so_jj_val *p)
#define UNUSED (void)x, (void)self, (void)args, (void)p

static bool flag(so_jj *x, so_jj_val v) { return v.kind != SO_JJ_MISSING && so_jj_truth(x, v); }

static so_jj_val like(so_jj *x, so_jj_val s, so_jj_val v) {
    return s.s->markup ? so_jj_markup(x, v) : v;
}

static so_jj_val must_str(so_jj *x, so_jj_val v) {
    if (v.kind != SO_JJ_STR)
        so_jj_fail_type(x, "expected a string", v);
    return v;
}

/* ---- text ---- */

FILTER(f_upper) {
    UNUSED;
    so_jj_val s = so_jj_to_str(x, self);
    return like(x, s, so_jj_recase(x, so_jj_bytes(s), SO_JJ_TO_UPPER));
}

FILTER(f_lower) {
    UNUSED;
    so_jj_val s = so_jj_to_str(x, self);
    return like(x, s, so_jj_recase(x, so_jj_bytes(s), SO_JJ_TO_LOWER));
}

FILTER(f_capitalize) {
    UNUSED;
    so_jj_val s = so_jj_to_str(x, self);
    return like(x, s, so_jj_capitalize(x, so_jj_bytes(s)));
}

static bool starts_word(int32_t cp) {
    return so_jj_cp_is(cp, SO_JJ_C_SPACE) || cp == '-' || cp == '(' || cp == '{' || cp == '[' ||
           cp == '<';
}

/* Unlike str.title(), only after space and opening brackets: "they're" becomes "They're". */
FILTER(f_title) {
    UNUSED;
    so_str s = so_jj_bytes(so_jj_to_str(x, self));
    so_jj_buf b = {0};
    bool first = true;
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        so_jj_buf_case(x, &b, s, i, first ? SO_JJ_TO_UPPER : SO_JJ_TO_LOWER);
        first = starts_word(cp);
    }
    return so_jj_buf_str(x, &b);
}

FILTER(f_trim) {
    UNUSED;
    so_jj_val s = so_jj_to_str(x, self);
    bool spaces = p[0].kind == SO_JJ_MISSING || p[0].kind == SO_JJ_NONE;
    so_str set = spaces ? (so_str){0} : so_jj_bytes(must_str(x, p[0]));
    so_jj_tick(x, s.s->len / 64 * (set.len / 8 + 1));
    return so_jj_substr(x, s, so_jj_trim(so_jj_bytes(s), spaces ? NULL : &set, true, true));
}

FILTER(f_replace) {
    UNUSED;
    so_str s = so_jj_bytes(so_jj_to_str(x, self));
    so_str from = so_jj_bytes(so_jj_to_str(x, p[0])), to = so_jj_bytes(so_jj_to_str(x, p[1]));
    return so_jj_replace(x, s, from, to, so_jj_index_arg(x, p[2], -1));
}

FILTER(f_string) {
    UNUSED;
    return so_jj_to_str(x, self);
}

FILTER(f_center) {
    UNUSED;
    return so_jj_center(x, so_jj_to_str(x, self), so_jj_int_arg(x, p[0], 80), SO_STR(" "));
}

/* p: width, first, blank */
FILTER(f_indent) {
    UNUSED;
    so_jj_buf pad = {0}, b = {0};
    so_jj_val s = must_str(x, self);
    if (p[0].kind == SO_JJ_STR)
        so_jj_buf_add(x, &pad, so_jj_bytes(p[0]));
    else
        so_jj_buf_fill(x, &pad, SO_STR(" "), (size_t)SO_MAX(so_jj_int_arg(x, p[0], 4), 0));
    so_str indent = {pad.data, pad.len};
    so_jj_list *lines =
        so_jj_split_lines(x, so_jj_concat(x, so_jj_plain(x, s), so_jj_str_c(x, "\n")), false);
    if (flag(x, p[1]))
        so_jj_buf_add(x, &b, indent);
    for (size_t i = 0; i < lines->n; i++) {
        if (i) {
            so_jj_buf_char(x, &b, '\n');
            if (lines->v[i].s->len || flag(x, p[2]))
                so_jj_buf_add(x, &b, indent);
        }
        so_jj_buf_add(x, &b, so_jj_bytes(lines->v[i]));
    }
    return like(x, s, so_jj_buf_str(x, &b));
}

/* p: length, killwords, end, leeway. What is short enough comes back as it is, text or not. */
FILTER(f_truncate) {
    UNUSED;
    so_jj_val end = p[2].kind == SO_JJ_MISSING ? so_jj_str_c(x, "...") : p[2];
    int64_t length = so_jj_int_arg(x, p[0], 255), leeway = so_jj_index_arg(x, p[3], 5), limit;
    size_t n, n_end_chars;
    if (!so_jj_len(x, self, &n) || !so_jj_len(x, end, &n_end_chars))
        so_jj_fail_type(x, "truncate needs a string", self);
    int64_t n_end = (int64_t)n_end_chars;
    if (length < n_end || leeway < 0)
        so_jj_fail(x, SO_EINVAL, "truncate: the length must hold the %zu characters of the end",
                   n_end_chars);
    if (__builtin_add_overflow(length, leeway, &limit) || (int64_t)n <= limit)
        return self;
    so_jj_val s = must_str(x, self);
    so_jj_val cut = so_jj_slice(x, s, so_jj_int(0), so_jj_int(length - n_end), SO_JJ_NONE_V);
    if (!flag(x, p[1])) {
        const char *space = memrchr(cut.s->ptr, ' ', cut.s->len);
        if (space)
            cut = so_jj_substr(x, s, (so_str){cut.s->ptr, (size_t)(space - cut.s->ptr)});
    }
    return so_jj_binary(x, SO_JJ_OP_ADD, cut, end);
}

FILTER(f_wordcount) {
    UNUSED;
    so_str s = so_jj_bytes(so_jj_to_str(x, self));
    int64_t words = 0;
    bool in_word = false;
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        bool word = cp == '_' || so_jj_cp_is(cp, SO_JJ_C_ALNUM);
        words += word && !in_word;
        in_word = word;
    }
    return so_jj_int(words);
}

FILTER(f_format) {
    UNUSED;
    so_jj_list *pos = so_jj_list_new(x, args->n_pos);
    if (args->n_pos && args->n_kw)
        so_jj_fail(x, SO_EINVAL, "format takes positional or keyword arguments, not both");
    for (size_t i = 0; i < args->n_pos; i++)
        so_jj_list_push(x, pos, args->pos[i]);
    so_jj_val arg = so_jj_tuple_val(pos);
    if (args->n_kw) {
        so_jj_dict *d = so_jj_dict_new(x);
        so_jj_dict_update(x, d, SO_JJ_MISSING_V, args);
        arg = so_jj_dict_val(d);
    }
    return so_jj_percent(x, so_jj_to_str(x, self), arg);
}

/* ---- HTML and URLs ---- */

FILTER(f_escape) {
    UNUSED;
    so_jj_val s = so_jj_to_str(x, self);
    so_jj_buf b = {0};
    if (s.s->markup)
        return s;
    so_jj_write_escaped(x, &b, so_jj_bytes(s));
    return so_jj_markup(x, so_jj_buf_str(x, &b));
}

FILTER(f_forceescape) {
    UNUSED;
    so_jj_buf b = {0};
    so_jj_write_escaped(x, &b, so_jj_bytes(so_jj_to_str(x, self)));
    return so_jj_markup(x, so_jj_buf_str(x, &b));
}

FILTER(f_safe) {
    UNUSED;
    return so_jj_markup(x, so_jj_to_str(x, self));
}

static void quote_url(so_jj *x, so_jj_buf *b, so_jj_val v, bool query) {
    so_str s = so_jj_bytes(so_jj_to_str(x, v));
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0; i < s.len; i++) {
        unsigned char c = (unsigned char)s.ptr[i];
        bool plain = (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || c == '_' ||
                     c == '.' || c == '-' || c == '~' || (c == '/' && !query);
        if (c == ' ' && query) {
            so_jj_buf_char(x, b, '+');
        } else if (plain) {
            so_jj_buf_add(x, b, (so_str){s.ptr + i, 1});
        } else {
            char t[4];
            snprintf(t, sizeof t, "%%%02X", c);
            so_jj_buf_add(x, b, so_str_c(t));
        }
    }
}

FILTER(f_urlencode) {
    UNUSED;
    so_jj_buf b = {0};
    so_jj_val item;
    if (self.kind == SO_JJ_STR || !so_jj_iterable(self)) {
        quote_url(x, &b, self, false);
        return so_jj_buf_str(x, &b);
    }
    so_jj_view items = {self.kind == SO_JJ_DICT ? self.dict : NULL, SO_JJ_ITEMS};
    so_jj_iter it =
        so_jj_iter_of(x, items.dict ? (so_jj_val){.kind = SO_JJ_VIEW, .view = &items} : self);
    for (size_t i = 0; so_jj_iter_next(x, &it, &item); i++) {
        so_jj_list *pair = so_jj_collect(x, item);
        if (pair->n != 2)
            so_jj_fail(x, SO_EINVAL, "urlencode takes a string, a mapping or pairs");
        if (i)
            so_jj_buf_char(x, &b, '&');
        quote_url(x, &b, pair->v[0], true);
        so_jj_buf_char(x, &b, '=');
        quote_url(x, &b, pair->v[1], true);
    }
    return so_jj_buf_str(x, &b);
}

/* ---- numbers ---- */

FILTER(f_abs) {
    UNUSED;
    int64_t i;
    if (self.kind == SO_JJ_FLOAT)
        return so_jj_float(fabs(self.f));
    if (!so_jj_is_int(self, &i))
        so_jj_fail_type(x, "abs needs a number", self);
    return i < 0 ? so_jj_negate(x, self) : so_jj_int(i);
}

static so_jj_val or_default(so_jj_val given, so_jj_val otherwise) {
    return given.kind == SO_JJ_MISSING ? otherwise : given;
}

static bool int_of_float(so_jj *x, double f, int64_t *out) {
    if (isnan(f) || isinf(f))
        return false;
    if (!(fabs(f) < 9.2233720368547748e18))
        so_jj_fail(x, SO_ERANGE, "int: %g does not fit 64 bits", f);
    *out = (int64_t)f;
    return true;
}

/* p: default, base */
FILTER(f_int) {
    UNUSED;
    int64_t i;
    double f;
    so_jj_val otherwise = or_default(p[0], so_jj_int(0));
    if (self.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, self);
    if (so_jj_is_int(self, &i))
        return so_jj_int(i);
    if (self.kind == SO_JJ_FLOAT)
        return int_of_float(x, self.f, &i) ? so_jj_int(i) : otherwise;
    if (self.kind != SO_JJ_STR)
        return otherwise;
    if (so_jj_parse_int(x, so_jj_bytes(self), so_jj_int_arg(x, p[1], 10), &i))
        return so_jj_int(i);
    if (so_jj_parse_float(so_jj_bytes(self), &f) && int_of_float(x, f, &i))
        return so_jj_int(i);
    return otherwise;
}

FILTER(f_float) {
    UNUSED;
    double f;
    if (self.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, self);
    if (so_jj_is_num(self))
        return so_jj_float(so_jj_to_double(self));
    if (self.kind == SO_JJ_STR && so_jj_parse_float(so_jj_bytes(self), &f))
        return so_jj_float(f);
    return or_default(p[0], so_jj_float(0));
}

/* Half to even at the decimal place, as the printed decimal expansion rounds. */
static double round_float(double f, int64_t digits) {
    char t[400];
    if (!isfinite(f) || digits > 22 || digits < -308)
        return digits < -308 ? copysign(0.0, f) : f;
    if (digits >= 0) {
        snprintf(t, sizeof t, "%.*f", (int)digits, f);
        return strtod(t, NULL);
    }
    double scale = pow(10, (double)-digits);
    return nearbyint(f / scale) * scale;
}

static int64_t round_int(so_jj *x, int64_t i, int64_t digits) {
    int64_t scale = 1;
    if (digits >= 0)
        return i;
    for (int64_t k = digits; k < 0; k++)
        if (__builtin_mul_overflow(scale, 10, &scale))
            return 0;
    int64_t rest = i % scale, base = i - rest, half = scale / 2;
    int64_t up = rest < 0 ? -rest : rest;
    bool away = up > half || (up == half && (base / scale) % 2 != 0);
    if (away && __builtin_add_overflow(base, i < 0 ? -scale : scale, &base))
        so_jj_fail(x, SO_ERANGE, "round: the result does not fit 64 bits");
    return base;
}

/* p: precision, method */
FILTER(f_round) {
    UNUSED;
    int64_t digits = so_jj_index_arg(x, p[0], 0), i;
    so_str method = p[1].kind == SO_JJ_MISSING ? SO_STR("common") : so_jj_bytes(must_str(x, p[1]));
    bool up = so_str_eq_c(method, "ceil"), down = so_str_eq_c(method, "floor");
    if (!up && !down && !so_str_eq_c(method, "common"))
        so_jj_fail(x, SO_EINVAL, "round: the method must be common, ceil or floor");
    if (!so_jj_is_num(self))
        so_jj_fail_type(x, "round needs a number", self);
    if (p[0].kind == SO_JJ_NONE && self.kind == SO_JJ_FLOAT && !up && !down) {
        if (!int_of_float(x, round_float(self.f, 0), &i)) /* round(x, None) is an integer */
            so_jj_fail(x, SO_ERANGE, "round: no integer is near");
        return so_jj_int(i);
    }
    if (!up && !down)
        return so_jj_is_int(self, &i) ? so_jj_int(round_int(x, i, digits))
                                      : so_jj_float(round_float(self.f, digits));
    digits = so_jj_int_arg(x, p[0], 0);
    if (digits > 308 || digits < -308)
        so_jj_fail(x, SO_ERANGE, "round: precision out of range");
    double scale = pow(10, (double)digits), v = so_jj_to_double(self) * scale;
    if (!isfinite(v))
        so_jj_fail(x, SO_ERANGE, "round: the number is too large");
    return so_jj_float(((up ? ceil(v) : floor(v)) + 0.0) /
                       scale); /* no -0: Python has an int here */
}

FILTER(f_filesizeformat) {
    UNUSED;
    static const char PREFIX[] = "KMGTPEZY";
    bool binary = flag(x, p[0]);
    double base = binary ? 1024 : 1000, bytes, unit = base * base;
    if (so_jj_is_num(self))
        bytes = so_jj_to_double(self);
    else if (self.kind != SO_JJ_STR || !so_jj_parse_float(so_jj_bytes(self), &bytes))
        so_jj_fail_type(x, "filesizeformat needs a number", self);
    if (bytes == 1)
        return so_jj_str_c(x, "1 Byte");
    if (bytes < base)
        return so_jj_str_printf(x, "%.0f Bytes", trunc(bytes));
    int i = 0;
    for (; i < 7 && bytes >= unit; i++)
        unit *= base;
    char c = !binary && i == 0 ? 'k' : PREFIX[i];
    return so_jj_str_printf(x, "%.1f %c%sB", base * bytes / unit, c, binary ? "i" : "");
}

/* ---- the rest ---- */

/* p: default_value, boolean */
FILTER(f_default) {
    UNUSED;
    if (self.kind == SO_JJ_UNDEFINED || (flag(x, p[1]) && !so_jj_truth(x, self)))
        return p[0].kind == SO_JJ_MISSING ? so_jj_str_c(x, "") : p[0];
    return self;
}

FILTER(f_attr) {
    UNUSED;
    so_str name = so_jj_bytes(must_str(x, p[0]));
    if (self.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, self);
    so_jj_val v = so_jj_attr_only(x, self, name);
    return v.kind == SO_JJ_MISSING ? so_jj_undefined_of(x, self, p[0]) : v;
}

const so_jj_func *so_jj_find_filter(so_str name) {
    static const so_jj_func FILTERS[] = {
        {"upper", f_upper, "", 0},
        {"lower", f_lower, "", 0},
        {"capitalize", f_capitalize, "", 0},
        {"title", f_title, "", 0},
        {"trim", f_trim, "chars", 0},
        {"replace", f_replace, "old,new,count", 2},
        {"string", f_string, "", 0},
        {"center", f_center, "width", 0},
        {"indent", f_indent, "width,first,blank", 0},
        {"truncate", f_truncate, "length,killwords,end,leeway", 0},
        {"wordcount", f_wordcount, "", 0},
        {"format", f_format, NULL, 0},
        {"escape", f_escape, "", 0},
        {"e", f_escape, "", 0},
        {"forceescape", f_forceescape, "", 0},
        {"safe", f_safe, "", 0},
        {"urlencode", f_urlencode, "", 0},
        {"abs", f_abs, "", 0},
        {"int", f_int, "default,base", 0},
        {"float", f_float, "default", 0},
        {"round", f_round, "precision,method", 0},
        {"filesizeformat", f_filesizeformat, "binary", 0},
        {"default", f_default, "default_value,boolean", 0},
        {"d", f_default, "default_value,boolean", 0},
        {"attr", f_attr, "name", 1},
        {"tojson", so_jj_tojson, "ensure_ascii,indent,separators,sort_keys", 0},
        {"pprint", NULL, NULL, 0},
        {"random", NULL, NULL, 0},
        {"striptags", NULL, NULL, 0},
        {"urlize", NULL, NULL, 0},
        {"wordwrap", NULL, NULL, 0},
        {"xmlattr", NULL, NULL, 0},
    };
    const so_jj_func *f = so_jj_find_func(FILTERS, SO_LEN(FILTERS), name);
    return f ? f : so_jj_find_func(so_jj_seq_filters, so_jj_n_seq_filters, name);
}
