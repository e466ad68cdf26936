/* The two ways Python fills a text: "%s of %d" % args, and "{} of {:>4}".format(…).
 *
 * Both parse their little language here and leave numbers to number.c. Fields of str.format
 * reach attributes and items by the template's own rules, as the reference's sandbox does. */
#include <math.h>
#include <stdio.h>

#include "jinja/impl.h"

/* repr() with everything outside ASCII escaped: %a and !a */
static so_jj_val ascii_repr(so_jj *x, so_jj_val v) {
    so_jj_buf r = {0}, b = {0};
    so_jj_write_repr(x, &r, v);
    for (size_t i = 0, n; i < r.len; i += n) {
        char t[16];
        int32_t cp = so_jj_cp_at(r.data + i, r.data + r.len, &n);
        const char *fmt = cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x";
        snprintf(t, sizeof t, fmt, (unsigned)cp);
        so_jj_buf_add(x, &b, cp < 0x80 ? (so_str){r.data + i, 1} : so_str_c(t));
    }
    return so_jj_buf_str(x, &b);
}

static so_jj_val convert(so_jj *x, so_jj_val v, char how) {
    if (how == 'a')
        return ascii_repr(x, v);
    if (how != 'r')
        return so_jj_to_str(x, v);
    so_jj_buf b = {0};
    so_jj_write_repr(x, &b, v);
    return so_jj_buf_str(x, &b);
}

static so_str first_chars(so_jj *x, so_jj_val s, int64_t n) {
    if (n < 0 || (uint64_t)n >= s.s->n_chars)
        return so_jj_bytes(s);
    return so_jj_bytes(so_jj_slice(x, s, so_jj_int(0), so_jj_int(n), SO_JJ_NONE_V));
}

static so_jj_val escaped(so_jj *x, so_jj_val s) {
    so_jj_buf b = {0};
    if (s.s->markup)
        return s;
    so_jj_write_escaped(x, &b, so_jj_bytes(s));
    return so_jj_buf_str(x, &b);
}

/* digits at s[*i]; −1 where there are none */
static int64_t read_number(so_jj *x, so_str s, size_t *i) {
    int64_t v = -1;
    for (; *i < s.len && s.ptr[*i] >= '0' && s.ptr[*i] <= '9'; ++*i) {
        v = (v < 0 ? 0 : v) * 10 + (s.ptr[*i] - '0');
        if (v > INT32_MAX)
            so_jj_fail(x, SO_ELIMIT, "number in a format is too large");
    }
    return v;
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
    size_t from = f->i + 1, depth = 1;
    if (f->i >= f->s.len || f->s.ptr[f->i] != '(')
        return false;
    for (f->i = from; f->i < f->s.len && depth; f->i++)
        depth += f->s.ptr[f->i] == '(' ? 1 : f->s.ptr[f->i] == ')' ? (size_t)-1 : 0;
    if (depth)
        so_jj_fail(f->x, SO_EINVAL, "incomplete format key");
    if (f->arg.kind != SO_JJ_DICT)
        so_jj_fail_type(f->x, "format requires a mapping", f->arg);
    so_str key = {f->s.ptr + from, f->i - 1 - from};
    if (!so_jj_dict_get_str(f->x, f->arg.dict, key, out))
        so_jj_fail(f->x, SO_EINVAL, "format key '%.*s' is missing", SO_JJ_ARG(key));
    f->n_used = 1;
    return true;
}

static int64_t star_or_number(percent *f) {
    int64_t v;
    if (f->i < f->s.len && f->s.ptr[f->i] == '*') {
        f->i++;
        if (!so_jj_is_int(next_arg(f), &v) || v > INT32_MAX || v < -INT32_MAX)
            so_jj_fail(f->x, SO_EINVAL, "* wants an integer");
        return v;
    }
    return read_number(f->x, f->s, &f->i);
}

static so_jj_spec percent_spec(percent *f) {
    so_jj_spec spec = {.precision = -1};
    bool left = false;
    for (; f->i < f->s.len && f->s.ptr[f->i] && strchr("-+ #0", f->s.ptr[f->i]); f->i++) {
        char c = f->s.ptr[f->i];
        left |= c == '-';
        spec.alt |= c == '#';
        spec.zero |= c == '0';
        if (c == '+' || (c == ' ' && spec.sign != '+'))
            spec.sign = c;
    }
    spec.width = star_or_number(f);
    if (spec.width < -1) {
        left = true;
        spec.width = -spec.width;
    }
    if (f->i < f->s.len && f->s.ptr[f->i] == '.') {
        f->i++;
        spec.precision = star_or_number(f);
        spec.precision = SO_MAX(spec.precision, 0);
    }
    while (f->i < f->s.len && f->s.ptr[f->i] && strchr("hlL", f->s.ptr[f->i]))
        f->i++;
    if (f->i >= f->s.len)
        so_jj_fail(f->x, SO_EINVAL, "incomplete format");
    spec.align = left ? '<' : '\0';
    spec.zero &= !left;
    return spec;
}

static so_jj_val integer_arg(percent *f, so_jj_val v, char type) {
    int64_t i;
    if (v.kind == SO_JJ_FLOAT && type == 'd') {
        if (!(fabs(v.f) < 9.2e18))
            so_jj_fail(f->x, SO_ERANGE, "%%d: the float does not fit 64 bits");
        return so_jj_int((int64_t)v.f);
    }
    if (!so_jj_is_int(v, &i))
        so_jj_fail_type(f->x, type == 'd' ? "%d needs a number" : "%x and %o need an integer", v);
    return so_jj_int(i);
}

static void percent_text(percent *f, so_jj_buf *b, so_jj_spec spec, so_jj_val v) {
    so_jj_val s = convert(f->x, v, spec.type);
    if (f->markup)
        s = escaped(f->x, s);
    spec.zero = false;
    so_jj_format_pad(f->x, b, first_chars(f->x, s, spec.precision), &spec, '>');
}

static void percent_int(percent *f, so_jj_buf *b, so_jj_spec spec, so_jj_val v) {
    v = integer_arg(f, v, spec.type);
    if (spec.precision > 0) { /* at least that many digits */
        so_jj_spec digits = {
            .width = spec.precision + (v.i < 0), .precision = -1, .zero = true, .type = spec.type};
        so_jj_buf t = {0};
        if (spec.precision > 100000)
            so_jj_fail(f->x, SO_ELIMIT, "precision in a format is too large");
        so_jj_format_number(f->x, &t, v, &digits);
        so_jj_buf signed_t = {0};
        if (spec.sign && v.i >= 0)
            so_jj_buf_char(f->x, &signed_t, spec.sign);
        so_jj_buf_add(f->x, &signed_t, (so_str){t.data, t.len});
        so_jj_format_pad(f->x, b, (so_str){signed_t.data, signed_t.len}, &spec, '>');
        return;
    }
    spec.precision = -1;
    so_jj_format_number(f->x, b, v, &spec);
}

static void percent_char(percent *f, so_jj_buf *b, so_jj_spec spec, so_jj_val v) {
    int64_t i;
    if (v.kind == SO_JJ_STR && v.s->n_chars == 1) {
        so_jj_format_pad(f->x, b, so_jj_bytes(v), &spec, '>');
        return;
    }
    if (!so_jj_is_int(v, &i))
        so_jj_fail_type(f->x, "%c needs an integer or one character", v);
    spec.align = spec.align ? spec.align : '>';
    so_jj_format_number(f->x, b, so_jj_int(i), &spec);
}

static void percent_field(percent *f, so_jj_buf *b) {
    so_jj_val v = SO_JJ_MISSING_V;
    bool mapped = mapped_arg(f, &v);
    so_jj_spec spec = percent_spec(f);
    char type = f->s.ptr[f->i++];
    if (type == '%') {
        so_jj_buf_char(f->x, b, '%');
        return;
    }
    if (!type || !strchr("diuoxXeEfFgGcrsa", type))
        so_jj_fail(f->x, SO_EINVAL, "unsupported format character");
    if (!mapped)
        v = next_arg(f);
    spec.type = type == 'i' || type == 'u' ? 'd' : type;
    if (strchr("rsa", type))
        percent_text(f, b, spec, v);
    else if (strchr("doxX", spec.type))
        percent_int(f, b, spec, v);
    else if (type == 'c')
        percent_char(f, b, spec, v);
    else if (so_jj_is_num(v))
        so_jj_format_number(f->x, b, so_jj_float(so_jj_to_double(v)), &spec);
    else
        so_jj_fail_type(f->x, "the format needs a number", v);
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
        if (f.i >= f.s.len)
            so_jj_fail(x, SO_EINVAL, "incomplete format");
        percent_field(&f, &b);
    }
    /* what can be subscripted may stay unused, as in Python */
    size_t want = arg.kind == SO_JJ_TUPLE ? arg.list->n : 1;
    if (f.n_used < want && arg.kind != SO_JJ_DICT && arg.kind != SO_JJ_LIST &&
        arg.kind != SO_JJ_RANGE && arg.kind != SO_JJ_UNDEFINED)
        so_jj_fail(x, SO_EINVAL, "not all arguments converted during string formatting");
    so_jj_val v = so_jj_buf_str(x, &b);
    return fmt.s->markup ? so_jj_markup(x, v) : v;
}

/* ---- str.format ---- */

typedef struct braces {
    so_jj *x;
    const so_jj_args *args;
    const so_jj_dict *mapping; /* format_map */
    int64_t next;              /* next automatic number; −1 once numbers were given by hand */
    bool automatic, markup;
} braces;

static void format_into(braces *f, so_jj_buf *out, so_str s, int depth);

static so_jj_val positional(braces *f, int64_t i) {
    if (f->mapping || i >= (int64_t)f->args->n_pos)
        so_jj_fail(f->x, SO_EINVAL, "format: there is no argument number %lld", (long long)i);
    return f->args->pos[i];
}

static so_jj_val named(braces *f, so_str name) {
    so_jj_val v;
    if (f->mapping && so_jj_dict_get_str(f->x, f->mapping, name, &v))
        return v;
    for (size_t i = 0; !f->mapping && i < f->args->n_kw; i++)
        if (so_str_eq(so_jj_bytes(f->args->kw[i].key), name))
            return f->args->kw[i].value;
    so_jj_fail(f->x, SO_EINVAL, "format: there is no argument '%.*s'", SO_JJ_ARG(name));
}

static so_jj_val first_value(braces *f, so_str name) {
    size_t i = 0;
    int64_t number = read_number(f->x, name, &i);
    if (name.len && i < name.len)
        return named(f, name);
    if (!name.len && f->next >= 0) {
        f->automatic = true;
        return positional(f, f->next++);
    }
    if (!name.len || f->automatic)
        so_jj_fail(f->x, SO_EINVAL, "format: automatic and manual field numbers are mixed");
    f->next = -1;
    return positional(f, number);
}

/* name, then .attribute and [index] as often as they come */
static so_jj_val field_value(braces *f, so_str s) {
    size_t i = 0;
    while (i < s.len && s.ptr[i] != '.' && s.ptr[i] != '[')
        i++;
    so_jj_val v = first_value(f, (so_str){s.ptr, i});
    while (i < s.len) {
        bool attr = s.ptr[i] == '.';
        size_t from = i + 1;
        if (!attr && s.ptr[i] != '[')
            so_jj_fail(f->x, SO_EINVAL, "format: only '.' or '[' may follow ']'");
        i = from;
        while (i < s.len && (attr ? s.ptr[i] != '.' && s.ptr[i] != '[' : s.ptr[i] != ']'))
            i++;
        so_str key = {s.ptr + from, i - from};
        if (!key.len || (!attr && i == s.len))
            so_jj_fail(f->x, SO_EINVAL, "format: empty or unclosed attribute in a field");
        size_t used = 0;
        int64_t number = read_number(f->x, key, &used);
        if (attr)
            v = so_jj_getattr(f->x, v, key);
        else
            v = so_jj_getitem(f->x, v,
                              used == key.len ? so_jj_int(number) : so_jj_str_borrow(f->x, key));
        i += !attr;
    }
    return v;
}

static bool is_align(char c) { return c == '<' || c == '>' || c == '^' || c == '='; }

/* [[fill]align][sign][#][0][width][grouping][.precision][type] */
static so_jj_spec parse_spec(so_jj *x, so_str s) {
    so_jj_spec spec = {.precision = -1};
    size_t i = 0, n = 1;
    if (s.len)
        spec.fill = so_jj_cp_at(s.ptr, s.ptr + s.len, &n);
    if (n < s.len && is_align(s.ptr[n])) {
        spec.align = s.ptr[n];
        i = n + 1;
    } else {
        spec.fill = 0;
        if (s.len && is_align(s.ptr[0]))
            spec.align = s.ptr[i++];
    }
    if (i < s.len && (s.ptr[i] == '+' || s.ptr[i] == '-' || s.ptr[i] == ' '))
        spec.sign = s.ptr[i++];
    if (i < s.len && s.ptr[i] == '#') {
        spec.alt = true;
        i++;
    }
    if (i < s.len && s.ptr[i] == '0') {
        spec.zero = true;
        i++;
    }
    spec.width = read_number(x, s, &i);
    if (i < s.len && (s.ptr[i] == ',' || s.ptr[i] == '_'))
        spec.group = s.ptr[i++];
    if (i < s.len && s.ptr[i] == '.') {
        i++;
        spec.precision = read_number(x, s, &i);
        if (spec.precision < 0)
            so_jj_fail(x, SO_EINVAL, "format: missing precision");
    }
    if (i < s.len)
        spec.type = s.ptr[i++];
    if (i < s.len)
        so_jj_fail(x, SO_EINVAL, "format: invalid specification '%.*s'", SO_JJ_ARG(s));
    return spec;
}

static void format_text(so_jj *x, so_jj_buf *b, so_jj_val v, so_jj_spec spec) {
    if ((spec.type && spec.type != 's') || spec.sign || spec.alt || spec.group || spec.align == '=')
        so_jj_fail(x, SO_EINVAL, "format: the specification does not fit a string");
    if (spec.zero && !spec.fill)
        spec.fill = '0';
    so_jj_format_pad(x, b, first_chars(x, v, spec.precision), &spec, '<');
}

static void check_number_spec(so_jj *x, so_jj_val v, const so_jj_spec *spec) {
    bool whole = v.kind != SO_JJ_FLOAT;
    const char *types = whole ? "bcdoxXneEfFgG%" : "eEfFgGn%";
    if (spec->type && !strchr(types, spec->type))
        so_jj_fail(x, SO_EINVAL, "format: unknown code '%c' for '%s'", spec->type, so_jj_type(v));
    bool as_int = whole && (!spec->type || strchr("bcdoxXn", spec->type));
    if (as_int && spec->precision >= 0)
        so_jj_fail(x, SO_EINVAL, "format: an integer takes no precision");
    if (spec->type == 'c' && (spec->sign || spec->alt))
        so_jj_fail(x, SO_EINVAL, "format: 'c' takes no sign");
    if ((spec->group == ',' && spec->type && strchr("bcoxXn", spec->type)) ||
        (spec->group == '_' && spec->type && strchr("cn", spec->type)))
        so_jj_fail(x, SO_EINVAL, "format: cannot group with '%c'", spec->type);
}

static void format_value(braces *f, so_jj_buf *b, so_jj_val v, so_str spec_text) {
    so_jj *x = f->x;
    so_jj_buf t = {0};
    if (!spec_text.len) {
        so_jj_write_str(x, &t, v);
    } else if (v.kind == SO_JJ_STR) {
        format_text(x, &t, v, parse_spec(x, spec_text));
    } else if (so_jj_is_num(v)) {
        so_jj_spec spec = parse_spec(x, spec_text);
        check_number_spec(x, v, &spec);
        so_jj_format_number(x, &t, v, &spec);
    } else {
        so_jj_fail_type(x, "format: only strings and numbers take a specification", v);
    }
    bool safe = v.kind == SO_JJ_STR && v.s->markup;
    if (f->markup && !safe)
        so_jj_write_escaped(x, b, (so_str){t.data, t.len});
    else
        so_jj_buf_add(x, b, (so_str){t.data, t.len});
}

/* The field between braces: name, !conversion, :specification. */
static void format_field(braces *f, so_jj_buf *b, so_str s, int depth) {
    size_t i = 0;
    int brackets = 0;
    while (i < s.len && (brackets || (s.ptr[i] != '!' && s.ptr[i] != ':'))) {
        brackets += s.ptr[i] == '[' ? 1 : s.ptr[i] == ']' && brackets ? -1 : 0;
        i++;
    }
    so_jj_val v = field_value(f, (so_str){s.ptr, i});
    if (i < s.len && s.ptr[i] == '!') {
        char how = i + 1 < s.len ? s.ptr[i + 1] : '\0';
        if ((how != 'r' && how != 's' && how != 'a') || (i + 2 < s.len && s.ptr[i + 2] != ':'))
            so_jj_fail(f->x, SO_EINVAL, "format: bad conversion after '!'");
        v = convert(f->x, v, how);
        i += 2;
    }
    so_jj_buf spec = {0};
    if (i < s.len) {
        bool markup = f->markup;
        f->markup = false;
        format_into(f, &spec, (so_str){s.ptr + i + 1, s.len - i - 1}, depth + 1);
        f->markup = markup;
    }
    format_value(f, b, v, (so_str){spec.data ? spec.data : "", spec.len});
}

static size_t field_end(so_jj *x, so_str s, size_t i) {
    for (int depth = 1; i < s.len; i++) {
        depth += s.ptr[i] == '{' ? 1 : s.ptr[i] == '}' ? -1 : 0;
        if (!depth)
            return i;
    }
    so_jj_fail(x, SO_EINVAL, "format: expected '}' before the end of the string");
}

static void format_into(braces *f, so_jj_buf *out, so_str s, int depth) {
    if (depth > 2)
        so_jj_fail(f->x, SO_EINVAL, "format: fields nested too deeply");
    so_jj_tick(f->x, s.len / 8);
    for (size_t i = 0; i < s.len; i++) {
        char c = s.ptr[i];
        if (c != '{' && c != '}') {
            so_jj_buf_add(f->x, out, (so_str){s.ptr + i, 1});
        } else if (i + 1 < s.len && s.ptr[i + 1] == c) {
            so_jj_buf_add(f->x, out, (so_str){s.ptr + i, 1});
            i++;
        } else if (c == '}') {
            so_jj_fail(f->x, SO_EINVAL, "format: single '}' in the string");
        } else {
            size_t end = field_end(f->x, s, i + 1);
            so_jj_tick(f->x, 1 + (end - i) / 8);
            format_field(f, out, (so_str){s.ptr + i + 1, end - i - 1}, depth);
            i = end;
        }
    }
}

static so_jj_val format(so_jj *x, so_jj_val self, const so_jj_args *args, const so_jj_dict *map) {
    braces f = {.x = x, .args = args, .mapping = map, .markup = self.s->markup};
    so_jj_buf b = {0};
    format_into(&f, &b, so_jj_bytes(self), 1);
    so_jj_val v = so_jj_buf_str(x, &b);
    return self.s->markup ? so_jj_markup(x, v) : v;
}

so_jj_val so_jj_str_format(so_jj *x, so_jj_val self, const so_jj_args *args, const so_jj_val *p) {
    (void)p;
    return format(x, self, args, NULL);
}

so_jj_val so_jj_str_format_map(so_jj *x, so_jj_val self, const so_jj_args *args,
                               const so_jj_val *p) {
    if (p[0].kind != SO_JJ_DICT)
        so_jj_fail_type(x, "format_map() takes a mapping", p[0]);
    return format(x, self, args, p[0].dict);
}
