/* String formatting: "%s of %d" % args, and "{} of {:>4}".format(…).
 *
 * Only the part of Python's format languages that templates use:
 *
 *   %[(key)][-+0][width][.precision]{s,r,d,i,x,f,%}
 *   {[number or name][!r or !s][:[[fill]align][+][0][width][,][.precision]{s,d,x,f,%}]}
 *
 * Anything else is an error that names the format. Floats are printed by the C library, which
 * rounds as Python does (correctly, ties to even). Widths and precisions come from the template:
 * they are bounded before anything is allocated. Text is appended by the so_jj_buf functions,
 * which keep the origin of each byte (origin.c). */
#include <math.h>
#include <stdio.h>

#include "jinja/impl.h"

enum { MAX_PRECISION = 1000 };

typedef struct spec {
    so_str fill; /* one character */
    char align;  /* < > ^; 0: the default, which is > except for strings in str.format() */
    char type;   /* 0: none given */
    bool plus, zero, group;
    int64_t width, precision; /* −1: none */
} spec;

_Noreturn static void fail_format(so_jj *x, so_str text) {
    so_jj_fail(x, SO_EUNSUPPORTED, "unsupported format '%.*s'", SO_JJ_ARG(text));
}

/* Digits at s[*i]; −1 if there are none. */
static int64_t read_number(so_jj *x, so_str s, size_t *i) {
    int64_t v = -1;
    for (; *i < s.len && s.ptr[*i] >= '0' && s.ptr[*i] <= '9'; ++*i) {
        v = (v < 0 ? 0 : v) * 10 + (s.ptr[*i] - '0');
        if (v > INT32_MAX)
            so_jj_fail(x, SO_ELIMIT, "number in a format is too large");
    }
    return v;
}

/* ---- values ---- */

static void pad(so_jj *x, so_jj_buf *b, so_str s, const spec *f, char align) {
    int64_t n = f->width - (int64_t)so_jj_count_chars(s);
    size_t room = n > 0 ? (size_t)n : 0;
    size_t left = align == '<' ? 0 : align == '^' ? room / 2 : room;
    so_str fill = f->fill.len ? f->fill : SO_STR(" ");
    so_jj_buf_fill(x, b, fill, left);
    so_jj_buf_add(x, b, s);
    so_jj_buf_fill(x, b, fill, room - left);
}

static void format_text(so_jj *x, so_jj_buf *b, so_jj_val s, const spec *f, char align) {
    if (f->precision >= 0)
        s = so_jj_slice(x, s, so_jj_int(0), so_jj_int(f->precision), SO_JJ_NONE_V);
    pad(x, b, so_jj_bytes(s), f, f->align ? f->align : align);
}

/* The absolute value as digits; false if the type does not fit the value. */
static bool number_text(so_jj *x, so_jj_val v, const spec *f, char *t, size_t cap) {
    int64_t i;
    if (f->precision > MAX_PRECISION)
        so_jj_fail(x, SO_ELIMIT, "precision %lld in a format is too large",
                   (long long)f->precision);
    int precision = f->precision < 0 ? 6 : (int)f->precision;
    if (f->type == 'f' || f->type == '%') {
        double d = fabs(so_jj_to_double(v)) * (f->type == '%' ? 100 : 1);
        snprintf(t, cap, f->type == '%' ? "%.*f%%" : "%.*f", precision, d);
        return true;
    }
    if (f->precision >= 0 || (f->type && f->type != 'd' && f->type != 'x'))
        return false;
    if (so_jj_is_int(v, &i)) {
        unsigned long long u = i < 0 ? 0 - (unsigned long long)i : (unsigned long long)i;
        snprintf(t, cap, f->type == 'x' ? "%llx" : "%llu", u);
        return true;
    }
    if (f->type)
        return false;
    so_jj_float_repr(fabs(v.f), t);
    return true;
}

static void format_number(so_jj *x, so_jj_buf *b, so_jj_val v, const spec *f, so_str text) {
    char t[MAX_PRECISION + 400]; /* a double has at most 309 digits before the point */
    if (!number_text(x, v, f, t, sizeof t))
        fail_format(x, text);
    so_str digits = so_str_c(t);
    bool negative = v.kind == SO_JJ_FLOAT ? signbit(v.f) && !isnan(v.f) : so_jj_to_double(v) < 0;
    so_jj_buf n = {0};
    if (negative || f->plus)
        so_jj_buf_char(x, &n, negative ? '-' : '+');
    size_t whole = strspn(t, "0123456789"), used = n.len + digits.len;
    if (f->group)
        used += whole ? (whole - 1) / 3 : 0;
    if (f->zero && !f->align && f->group && f->width > (int64_t)used)
        fail_format(x, text);
    if (f->zero && !f->align && f->width > (int64_t)used)
        so_jj_buf_fill(x, &n, SO_STR("0"), (size_t)f->width - used);
    for (size_t i = 0; i < digits.len; i++) {
        if (f->group && i && i < whole && (whole - i) % 3 == 0)
            so_jj_buf_char(x, &n, ',');
        so_jj_buf_char(x, &n, t[i]);
    }
    pad(x, b, (so_str){n.data, n.len}, f, f->align ? f->align : '>');
}

/* ---- % ---- */

typedef struct percent {
    so_jj *x;
    so_str s;
    size_t i;
    so_jj_val arg;
    size_t n_used;
    bool markup;
} percent;

static so_jj_val next_arg(percent *f) {
    bool tuple = f->arg.kind == SO_JJ_TUPLE;
    if (f->n_used >= (tuple ? f->arg.list->n : 1))
        so_jj_fail(f->x, SO_EINVAL, "not enough arguments for format string");
    return tuple ? f->arg.list->v[f->n_used++] : (f->n_used++, f->arg);
}

/* %(key)s */
static bool mapped_arg(percent *f, so_jj_val *out) {
    size_t from = f->i + 1;
    if (f->i >= f->s.len || f->s.ptr[f->i] != '(')
        return false;
    const char *close = memchr(f->s.ptr + from, ')', f->s.len - from);
    if (!close)
        so_jj_fail(f->x, SO_EINVAL, "incomplete format key");
    if (f->arg.kind != SO_JJ_DICT)
        so_jj_fail_type(f->x, "format requires a mapping", f->arg);
    so_str key = {f->s.ptr + from, (size_t)(close - f->s.ptr) - from};
    if (!so_jj_dict_get_str(f->x, f->arg.dict, key, out))
        so_jj_fail(f->x, SO_EINVAL, "format key '%.*s' is missing", SO_JJ_ARG(key));
    f->i = from + key.len + 1;
    f->n_used = 1;
    return true;
}

static spec percent_spec(percent *f) {
    spec sp = {.precision = -1};
    for (; f->i < f->s.len && f->s.ptr[f->i] && strchr("-+0", f->s.ptr[f->i]); f->i++) {
        char c = f->s.ptr[f->i];
        if (c == '-')
            sp.align = '<';
        sp.plus |= c == '+';
        sp.zero |= c == '0';
    }
    sp.width = read_number(f->x, f->s, &f->i);
    if (f->i < f->s.len && f->s.ptr[f->i] == '.') {
        f->i++;
        int64_t precision = read_number(f->x, f->s, &f->i);
        sp.precision = SO_MAX(precision, 0);
    }
    if (f->i >= f->s.len)
        so_jj_fail(f->x, SO_EINVAL, "incomplete format");
    sp.type = f->s.ptr[f->i++];
    return sp;
}

static so_jj_val percent_number(percent *f, so_jj_val v, char type) {
    if (!so_jj_is_num(v) || (v.kind == SO_JJ_FLOAT && type == 'x'))
        so_jj_fail_type(f->x, "the format needs a number", v);
    if (v.kind != SO_JJ_FLOAT || type != 'd')
        return v;
    if (!(fabs(v.f) < 9.2e18))
        so_jj_fail(f->x, SO_ERANGE, "%%d: the float does not fit 64 bits");
    return so_jj_int((int64_t)v.f);
}

static void percent_field(percent *f, so_jj_buf *b) {
    so_jj_val v = SO_JJ_MISSING_V;
    size_t from = f->i - 1;
    bool mapped = mapped_arg(f, &v);
    spec sp = percent_spec(f);
    so_str text = {f->s.ptr + from, f->i - from};
    if (sp.type == '%') {
        so_jj_buf_char(f->x, b, '%');
        return;
    }
    if (!sp.type || !strchr("srdixf", sp.type))
        fail_format(f->x, text);
    if (!mapped)
        v = next_arg(f);
    if (sp.type == 's' || sp.type == 'r') {
        so_jj_val s = sp.type == 's' ? so_jj_to_str(f->x, v) : so_jj_repr(f->x, v);
        format_text(f->x, b, f->markup ? so_jj_escaped(f->x, s) : s, &sp, '>');
        return;
    }
    if (sp.type == 'i')
        sp.type = 'd';
    format_number(f->x, b, percent_number(f, v, sp.type), &sp, text);
}

so_jj_val so_jj_percent(so_jj *x, so_jj_val fmt, so_jj_val arg) {
    percent f = {.x = x, .s = so_jj_bytes(fmt), .arg = arg, .markup = fmt.s->markup};
    so_jj_buf b = {0};
    so_jj_tick(x, f.s.len / 16);
    while (f.i < f.s.len) {
        const char *pc = memchr(f.s.ptr + f.i, '%', f.s.len - f.i);
        size_t n = pc ? (size_t)(pc - f.s.ptr) - f.i : f.s.len - f.i;
        so_jj_buf_add(x, &b, (so_str){f.s.ptr + f.i, n});
        f.i += n;
        if (!pc)
            break;
        so_jj_tick(x, 1);
        f.i++;
        percent_field(&f, &b);
    }
    /* As in Python, an argument that can be subscripted may remain unused, unless it is a tuple or
     * a string. Jinja's undefined values can be subscripted. */
    size_t want = arg.kind == SO_JJ_TUPLE ? arg.list->n : 1;
    if (f.n_used < want && arg.kind != SO_JJ_DICT && arg.kind != SO_JJ_LIST &&
        arg.kind != SO_JJ_UNDEFINED)
        so_jj_fail(x, SO_EINVAL, "not all arguments converted during string formatting");
    return so_jj_like(x, fmt, so_jj_buf_str(x, &b));
}

/* ---- str.format ---- */

typedef struct braces {
    so_jj *x;
    const so_jj_args *args;
    size_t next;            /* number of the next {} */
    bool automatic, manual; /* {} and {0} were seen */
    bool markup;
} braces;

static so_jj_val field_value(braces *f, so_str name) {
    size_t i = 0;
    int64_t number = read_number(f->x, name, &i);
    for (size_t k = 0; i < name.len && k < f->args->n_kw; k++)
        if (so_str_eq(so_jj_bytes(f->args->kw[k].key), name))
            return f->args->kw[k].value;
    if (i < name.len)
        so_jj_fail(f->x, SO_EINVAL, "format: there is no argument '%.*s'", SO_JJ_ARG(name));
    f->manual |= name.len > 0;
    f->automatic |= name.len == 0;
    if (f->automatic && f->manual)
        so_jj_fail(f->x, SO_EINVAL, "format: automatic and manual field numbers are mixed");
    size_t at = name.len ? (size_t)number : f->next++;
    if (at >= f->args->n_pos)
        so_jj_fail(f->x, SO_EINVAL, "format: there is no argument number %zu", at);
    return f->args->pos[at];
}

static bool is_align(char c) { return c == '<' || c == '>' || c == '^'; }

static spec parse_spec(so_jj *x, so_str s) {
    spec f = {.precision = -1};
    size_t i = 0, n = 1;
    if (s.len)
        so_jj_cp_at(s.ptr, s.ptr + s.len, &n);
    if (n < s.len && is_align(s.ptr[n])) {
        f.fill = (so_str){s.ptr, n};
        i = n;
    }
    if (i < s.len && is_align(s.ptr[i]))
        f.align = s.ptr[i++];
    if (i < s.len && s.ptr[i] == '+')
        f.plus = s.ptr[i++];
    if (i < s.len && s.ptr[i] == '0')
        f.zero = s.ptr[i++];
    f.width = read_number(x, s, &i);
    if (i < s.len && s.ptr[i] == ',')
        f.group = s.ptr[i++];
    if (i < s.len && s.ptr[i] == '.') {
        i++;
        f.precision = read_number(x, s, &i);
        if (f.precision < 0)
            so_jj_fail(x, SO_EINVAL, "format: missing precision");
    }
    if (i < s.len)
        f.type = s.ptr[i++];
    if (i < s.len)
        fail_format(x, s);
    return f;
}

static void format_value(braces *f, so_jj_buf *b, so_jj_val v, so_str text) {
    so_jj *x = f->x;
    so_jj_buf t = {0};
    spec sp = parse_spec(x, text);
    if (!text.len)
        so_jj_write_str(x, &t, v);
    else if (so_jj_is_num(v))
        format_number(x, &t, v, &sp, text);
    else if (v.kind != SO_JJ_STR)
        so_jj_fail_type(x, "format: only strings and numbers take a specification", v);
    else if ((sp.type && sp.type != 's') || sp.plus || sp.zero || sp.group)
        fail_format(x, text);
    else
        format_text(x, &t, v, &sp, '<');
    if (f->markup && !(v.kind == SO_JJ_STR && v.s->markup))
        so_jj_write_escaped(x, b, (so_str){t.data, t.len});
    else
        so_jj_buf_add(x, b, (so_str){t.data, t.len});
}

/* The field between braces: name, !conversion, :specification. */
static void format_field(braces *f, so_jj_buf *b, so_str s) {
    size_t i = 0;
    while (i < s.len && s.ptr[i] != '!' && s.ptr[i] != ':')
        i++;
    so_jj_val v = field_value(f, (so_str){s.ptr, i});
    if (i < s.len && s.ptr[i] == '!') {
        char how = i + 1 < s.len ? s.ptr[i + 1] : '\0';
        if ((how != 'r' && how != 's') || (i + 2 < s.len && s.ptr[i + 2] != ':'))
            fail_format(f->x, s);
        v = how == 's' ? so_jj_to_str(f->x, v) : so_jj_repr(f->x, v);
        i += 2;
    }
    i += i < s.len;
    format_value(f, b, v, (so_str){s.ptr + i, s.len - i});
}

SO_JJ_FN(so_jj_str_format) {
    braces f = {.x = x, .args = args, .markup = self.s->markup};
    so_jj_buf b = {0};
    so_str s = so_jj_bytes(self);
    so_jj_tick(x, s.len / 8);
    for (size_t i = 0; i < s.len; i++) {
        char c = s.ptr[i];
        if (c != '{' && c != '}') {
            so_jj_buf_add(x, &b, (so_str){s.ptr + i, 1});
        } else if (i + 1 < s.len && s.ptr[i + 1] == c) {
            so_jj_buf_add(x, &b, (so_str){s.ptr + i, 1});
            i++;
        } else if (c == '}') {
            so_jj_fail(x, SO_EINVAL, "format: single '}' in the string");
        } else {
            const char *end = memchr(s.ptr + i, '}', s.len - i);
            if (!end)
                so_jj_fail(x, SO_EINVAL, "format: expected '}' before the end of the string");
            so_str field = {s.ptr + i + 1, (size_t)(end - s.ptr) - i - 1};
            so_jj_tick(x, 1 + field.len / 8);
            format_field(&f, &b, field);
            i += field.len + 1;
        }
    }
    return so_jj_like(x, self, so_jj_buf_str(x, &b));
}
