/* Filters on single values: text, numbers, defaults, JSON, escaping. Filters on sequences are in
 * filters_seq.c; so_jj_find_filter searches both tables.
 *
 * Each filter does what Jinja 3.1 does with autoescape off, including which conversions fail and
 * which fall back to a default. Jinja's filters for HTML pages and reports (urlize, wordwrap,
 * filesizeformat, groupby, …) do not exist here: using one is an error that names it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "jinja/impl.h"

static so_jj_val must_str(so_jj *x, so_jj_val v) {
    so_jj_str_arg(x, v);
    return v;
}

/* ---- text ---- */

static SO_JJ_FN(f_string) { return so_jj_to_str(x, self); }
static SO_JJ_FN(f_upper) {
    return so_jj_recase(x, so_jj_to_str(x, self), SO_JJ_TO_UPPER, SO_JJ_TO_UPPER);
}
static SO_JJ_FN(f_lower) {
    return so_jj_recase(x, so_jj_to_str(x, self), SO_JJ_TO_LOWER, SO_JJ_TO_LOWER);
}
static SO_JJ_FN(f_capitalize) {
    return so_jj_recase(x, so_jj_to_str(x, self), SO_JJ_TO_TITLE, SO_JJ_TO_LOWER);
}
static SO_JJ_FN(f_trim) { return so_jj_strip(x, so_jj_to_str(x, self), p[0], true, true); }

static bool starts_word(int32_t cp) {
    return so_jj_cp_is(cp, SO_JJ_C_SPACE) || cp == '-' || cp == '(' || cp == '{' || cp == '[' ||
           cp == '<';
}

/* Unlike str.title(), a word starts only after space, '-' and opening brackets: "they're" becomes
 * "They're". */
static SO_JJ_FN(f_title) {
    so_str s = so_jj_bytes(so_jj_to_str(x, self));
    so_jj_buf b = {0};
    bool first = true;
    so_jj_tick(x, s.len / 16);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        so_jj_buf_case(x, &b, s.ptr + i, cp, first ? SO_JJ_TO_UPPER : SO_JJ_TO_LOWER);
        first = starts_word(cp);
    }
    return so_jj_buf_str(x, &b);
}

static SO_JJ_FN(f_replace) {
    so_str s = so_jj_bytes(so_jj_to_str(x, self));
    so_str from = so_jj_bytes(so_jj_to_str(x, p[0])), to = so_jj_bytes(so_jj_to_str(x, p[1]));
    return so_jj_replace(x, s, from, to, so_jj_index_arg(x, p[2], -1));
}

/* p: width, first, blank */
static SO_JJ_FN(f_indent) {
    so_jj_buf pad = {0}, b = {0};
    so_jj_val s = must_str(x, self);
    if (p[0].kind == SO_JJ_STR)
        so_jj_buf_add(x, &pad, so_jj_bytes(p[0]));
    else
        so_jj_buf_fill(x, &pad, SO_STR(" "), (size_t)SO_MAX(so_jj_int_arg(x, p[0], 4), 0));
    so_str indent = {pad.data, pad.len};
    so_jj_list *lines =
        so_jj_split_lines(x, so_jj_concat(x, so_jj_plain(x, s), so_jj_str_c(x, "\n")), false);
    if (so_jj_flag(p[1]))
        so_jj_buf_add(x, &b, indent);
    for (size_t i = 0; i < lines->n; i++) {
        if (i) {
            so_jj_buf_char(x, &b, '\n');
            if (lines->v[i].s->len || so_jj_flag(p[2]))
                so_jj_buf_add(x, &b, indent);
        }
        so_jj_buf_add(x, &b, so_jj_bytes(lines->v[i]));
    }
    return so_jj_like(x, s, so_jj_buf_str(x, &b));
}

/* p: length, killwords, end, leeway. A value that is short enough is returned unchanged. */
static SO_JJ_FN(f_truncate) {
    so_jj_val s = must_str(x, self),
              end = p[2].kind == SO_JJ_MISSING ? so_jj_str_c(x, "...") : p[2];
    int64_t length = so_jj_int_arg(x, p[0], 255), leeway = so_jj_index_arg(x, p[3], 5), limit;
    int64_t n_end = (int64_t)must_str(x, end).s->n_chars;
    if (leeway < 0)
        so_jj_fail(x, SO_EINVAL, "truncate: the leeway must not be negative");
    if (length < n_end)
        so_jj_fail(x, SO_EINVAL,
                   "truncate: the length must be at least %lld, the length of the end",
                   (long long)n_end);
    if (__builtin_add_overflow(length, leeway, &limit) || (int64_t)s.s->n_chars <= limit)
        return s;
    so_jj_val cut = so_jj_slice(x, s, so_jj_int(0), so_jj_int(length - n_end), SO_JJ_NONE_V);
    const char *space = so_jj_flag(p[1]) ? NULL : memrchr(cut.s->ptr, ' ', cut.s->len);
    if (space)
        cut = so_jj_substr(x, s, (so_str){cut.s->ptr, (size_t)(space - cut.s->ptr)});
    return so_jj_binary(x, SO_JJ_OP_ADD, cut, end);
}

static SO_JJ_FN(f_format) {
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

static SO_JJ_FN(f_escape) { return so_jj_markup(x, so_jj_escaped(x, so_jj_to_str(x, self))); }
static SO_JJ_FN(f_safe) { return so_jj_markup(x, so_jj_to_str(x, self)); }

/* ---- numbers ---- */

static SO_JJ_FN(f_abs) {
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

static SO_JJ_FN(f_int) {
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
    if (so_jj_parse_int(x, so_jj_bytes(self), &i))
        return so_jj_int(i);
    if (so_jj_parse_float(so_jj_bytes(self), &f) && int_of_float(x, f, &i))
        return so_jj_int(i);
    return otherwise;
}

static SO_JJ_FN(f_float) {
    double f;
    if (self.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, self);
    if (so_jj_is_num(self))
        return so_jj_float(so_jj_to_double(self));
    if (self.kind == SO_JJ_STR && so_jj_parse_float(so_jj_bytes(self), &f))
        return so_jj_float(f);
    return or_default(p[0], so_jj_float(0));
}

/* p: precision, method. "common" rounds the exact decimal value, half to even, as Python does. */
static SO_JJ_FN(f_round) {
    int64_t digits = so_jj_int_arg(x, p[0], 0), i;
    so_str method = p[1].kind == SO_JJ_MISSING ? SO_STR("common") : so_jj_str_arg(x, p[1]);
    bool up = so_str_eq_c(method, "ceil"), down = so_str_eq_c(method, "floor");
    if (!up && !down && !so_str_eq_c(method, "common"))
        so_jj_fail(x, SO_EINVAL, "round: the method must be common, ceil or floor");
    if (!so_jj_is_num(self))
        so_jj_fail_type(x, "round needs a number", self);
    if (digits < 0 || digits > 22)
        so_jj_fail(x, SO_EUNSUPPORTED, "round: the precision must be between 0 and 22");
    double f = so_jj_to_double(self);
    if (!up && !down) {
        char t[400];
        if (so_jj_is_int(self, &i))
            return so_jj_int(i);
        if (!isfinite(f))
            return self;
        snprintf(t, sizeof t, "%.*f", (int)digits, f);
        return so_jj_float(strtod(t, NULL));
    }
    double scale = pow(10, (double)digits);
    if (!isfinite(f * scale))
        so_jj_fail(x, SO_ERANGE, "round: the number is too large");
    /* Python's ceil and floor give an integer, so −0.0 must become 0 */
    return so_jj_float(((up ? ceil(f * scale) : floor(f * scale)) + 0.0) / scale);
}

/* ---- defaults ---- */

/* p: default_value, boolean */
static SO_JJ_FN(f_default) {
    if (self.kind == SO_JJ_UNDEFINED || (so_jj_flag(p[1]) && !so_jj_truth(self)))
        return or_default(p[0], so_jj_str_c(x, ""));
    return self;
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
        {"indent", f_indent, "width,first,blank", 0},
        {"truncate", f_truncate, "length,killwords,end,leeway", 0},
        {"format", f_format, NULL, 0},
        {"escape", f_escape, "", 0},
        {"e", f_escape, "", 0},
        {"safe", f_safe, "", 0},
        {"abs", f_abs, "", 0},
        {"int", f_int, "default", 0},
        {"float", f_float, "default", 0},
        {"round", f_round, "precision,method", 0},
        {"default", f_default, "default_value,boolean", 0},
        {"d", f_default, "default_value,boolean", 0},
        {"tojson", so_jj_tojson, "ensure_ascii,indent,separators,sort_keys", 0},
    };
    const so_jj_func *f = so_jj_find_func(FILTERS, SO_LEN(FILTERS), name);
    return f ? f : so_jj_find_func(so_jj_seq_filters, so_jj_n_seq_filters, name);
}
