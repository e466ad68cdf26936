/* Values as text: Python's str() and repr(), HTML escapes, and `tojson`, which formats as
 * json.dumps with the arguments that transformers passes.
 *
 * A float prints as the shortest decimal that reads back as the same value, laid out as in Python.
 * Data that contains itself fails at the depth limit. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "jinja/impl.h"

/* Finds the shortest precision of %e that reads back as f, then prints as Python does: 123.0, but
 * 1.23e+16 from 1e16 on and below 1e-4. */
void so_jj_float_repr(double f, char out[SO_JJ_FLOAT_BUF]) {
    if (isnan(f) || isinf(f)) {
        snprintf(out, SO_JJ_FLOAT_BUF, "%s", isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    char e[SO_JJ_FLOAT_BUF];
    int p = 0;
    do
        snprintf(e, sizeof e, "%.*e", p, f);
    while (strtod(e, NULL) != f && ++p < 17);
    int exp10 = (int)strtol(strchr(e, 'e') + 1, NULL, 10);
    if (exp10 >= -4 && exp10 < 16) {
        snprintf(out, SO_JJ_FLOAT_BUF, "%.*f", p > exp10 ? p - exp10 : 1, f);
        return;
    }
    snprintf(out, SO_JJ_FLOAT_BUF, "%s", e);
}

void so_jj_write_escaped(so_jj *x, so_jj_buf *b, so_str s) {
    static const char CHARS[] = "&<>'\"";
    static const char *const ENTITIES[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    for (size_t i = 0; i < s.len; i++) {
        const char *special = s.ptr[i] ? strchr(CHARS, s.ptr[i]) : NULL;
        so_jj_buf_add(x, b, special ? so_str_c(ENTITIES[special - CHARS]) : (so_str){s.ptr + i, 1});
    }
    so_jj_tick(x, s.len / 32);
}

so_jj_val so_jj_escaped(so_jj *x, so_jj_val s) {
    so_jj_buf b = {0};
    if (s.s->markup)
        return s;
    so_jj_write_escaped(x, &b, so_jj_bytes(s));
    return so_jj_buf_str(x, &b);
}

static void write_hex(so_jj *x, so_jj_buf *b, int32_t cp) {
    char t[16];
    const char *fmt = cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x";
    int n = snprintf(t, sizeof t, fmt, (unsigned)cp);
    so_jj_buf_add(x, b, (so_str){t, (size_t)n});
}

/* In single quotes, or in double quotes if the text has single quotes only. */
static void repr_str(so_jj *x, so_jj_buf *b, so_str s) {
    bool single = s.len && memchr(s.ptr, '\'', s.len), dbl = s.len && memchr(s.ptr, '"', s.len);
    char quote = single && !dbl ? '"' : '\'';
    so_jj_tick(x, s.len / 16);
    so_jj_buf_char(x, b, quote);
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        if (cp == quote || cp == '\\') {
            so_jj_buf_char(x, b, '\\');
            so_jj_buf_add(x, b, (so_str){s.ptr + i, n});
        } else if (cp == '\n' || cp == '\r' || cp == '\t') {
            so_jj_buf_char(x, b, '\\');
            so_jj_buf_char(x, b, cp == '\n' ? 'n' : cp == '\r' ? 'r' : 't');
        } else if (so_jj_cp_is(cp, SO_JJ_C_PRINTABLE)) {
            so_jj_buf_add(x, b, (so_str){s.ptr + i, n});
        } else {
            write_hex(x, b, cp);
        }
    }
    so_jj_buf_char(x, b, quote);
}

static void repr_items(so_jj *x, so_jj_buf *b, so_jj_val v, const char *open, const char *close) {
    so_jj_iter it = so_jj_iter_of(x, v);
    so_jj_val item;
    so_jj_buf_add(x, b, so_str_c(open));
    for (size_t i = 0; so_jj_iter_next(x, &it, &item); i++) {
        if (i)
            so_jj_buf_add(x, b, SO_STR(", "));
        so_jj_write_repr(x, b, item);
    }
    so_jj_buf_add(x, b, so_str_c(close));
}

static void repr_dict(so_jj *x, so_jj_buf *b, const so_jj_dict *d) {
    so_jj_buf_char(x, b, '{');
    for (size_t i = 0; i < d->n; i++) {
        so_jj_tick(x, 1);
        if (i)
            so_jj_buf_add(x, b, SO_STR(", "));
        so_jj_write_repr(x, b, d->e[i].key);
        so_jj_buf_add(x, b, SO_STR(": "));
        so_jj_write_repr(x, b, d->e[i].value);
    }
    so_jj_buf_char(x, b, '}');
}

static so_jj_val scalar_text(so_jj *x, so_jj_val v) {
    char t[SO_JJ_FLOAT_BUF];
    switch (v.kind) {
    case SO_JJ_NONE:
        return so_jj_str_c(x, "None");
    case SO_JJ_BOOL:
        return so_jj_str_c(x, v.b ? "True" : "False");
    case SO_JJ_INT:
        return so_jj_str_printf(x, "%lld", (long long)v.i);
    case SO_JJ_FLOAT:
        so_jj_float_repr(v.f, t);
        return so_jj_str_printf(x, "%s", t);
    default: /* macros, functions, loops, generators, namespaces */
        return so_jj_str_printf(x, "<%s object>", so_jj_type(v));
    }
}

void so_jj_write_repr(so_jj *x, so_jj_buf *b, so_jj_val v) {
    so_jj_enter(x);
    switch (v.kind) {
    case SO_JJ_UNDEFINED:
        so_jj_buf_add(x, b, SO_STR("Undefined"));
        break;
    case SO_JJ_STR:
        if (v.s->markup)
            so_jj_buf_add(x, b, SO_STR("Markup("));
        repr_str(x, b, so_jj_bytes(v));
        if (v.s->markup)
            so_jj_buf_char(x, b, ')');
        break;
    case SO_JJ_LIST:
        repr_items(x, b, v, "[", "]");
        break;
    case SO_JJ_TUPLE:
        repr_items(x, b, v, "(", v.list->n == 1 ? ",)" : ")");
        break;
    case SO_JJ_DICT:
        repr_dict(x, b, v.dict);
        break;
    default:
        so_jj_buf_add(x, b, so_jj_bytes(scalar_text(x, v)));
    }
    so_jj_leave(x);
}

so_jj_val so_jj_repr(so_jj *x, so_jj_val v) {
    so_jj_buf b = {0};
    so_jj_write_repr(x, &b, v);
    return so_jj_buf_str(x, &b);
}

void so_jj_write_str(so_jj *x, so_jj_buf *b, so_jj_val v) {
    if (v.kind == SO_JJ_STR)
        so_jj_buf_add(x, b, so_jj_bytes(v));
    else if (v.kind != SO_JJ_UNDEFINED)
        so_jj_write_repr(x, b, v);
}

so_jj_val so_jj_to_str(so_jj *x, so_jj_val v) {
    if (v.kind == SO_JJ_STR)
        return v;
    if (v.kind == SO_JJ_UNDEFINED)
        return so_jj_str_c(x, "");
    if (v.kind == SO_JJ_INT || v.kind == SO_JJ_FLOAT || v.kind == SO_JJ_BOOL ||
        v.kind == SO_JJ_NONE)
        return scalar_text(x, v);
    return so_jj_repr(x, v);
}

/* ---- JSON out ---- */

typedef struct dumper {
    so_jj *x;
    so_jj_buf *b;
    bool ascii, sort, pretty;
    so_str indent, item_sep, key_sep;
} dumper;

static void json_escape(dumper *d, int32_t cp, so_str raw) {
    static const char ESC[] = {['\b'] = 'b', ['\t'] = 't', ['\n'] = 'n', ['\f'] = 'f',
                               ['\r'] = 'r', ['"'] = '"',  ['\\'] = '\\'};
    char t[32];
    int n;
    if (cp < (int32_t)sizeof ESC && ESC[cp])
        n = snprintf(t, sizeof t, "\\%c", ESC[cp]);
    else if (cp >= 0x20 && (cp < 0x7F || !d->ascii)) {
        so_jj_buf_add(d->x, d->b, raw);
        return;
    } else if (cp < 0x10000)
        n = snprintf(t, sizeof t, "\\u%04x", (unsigned)cp);
    else
        n = snprintf(t, sizeof t, "\\u%04x\\u%04x", 0xD800u + (((unsigned)cp - 0x10000u) >> 10),
                     0xDC00u + ((unsigned)cp & 0x3FFu));
    so_jj_buf_add(d->x, d->b, (so_str){t, (size_t)n});
}

static void json_str(dumper *d, so_str s) {
    so_jj_tick(d->x, s.len / 32);
    so_jj_buf_char(d->x, d->b, '"');
    for (size_t i = 0, n; i < s.len; i += n) {
        int32_t cp = so_jj_cp_at(s.ptr + i, s.ptr + s.len, &n);
        json_escape(d, cp, (so_str){s.ptr + i, n});
    }
    so_jj_buf_char(d->x, d->b, '"');
}

static so_str json_number(so_jj *x, so_jj_val v) {
    if (v.kind == SO_JJ_BOOL)
        return v.b ? SO_STR("true") : SO_STR("false");
    if (v.kind == SO_JJ_FLOAT && isnan(v.f))
        return SO_STR("NaN");
    if (v.kind == SO_JJ_FLOAT && isinf(v.f))
        return v.f < 0 ? SO_STR("-Infinity") : SO_STR("Infinity");
    return so_jj_bytes(scalar_text(x, v));
}

static void json_newline(dumper *d, int level) {
    if (!d->pretty)
        return;
    so_jj_buf_char(d->x, d->b, '\n');
    so_jj_buf_fill(d->x, d->b, d->indent, (size_t)level);
}

static void json_value(dumper *d, so_jj_val v, int level);

static void json_key(dumper *d, so_jj_val k) {
    if (k.kind == SO_JJ_STR)
        json_str(d, so_jj_bytes(k));
    else if (k.kind == SO_JJ_NONE)
        so_jj_buf_add(d->x, d->b, SO_STR("\"null\""));
    else if (so_jj_is_num(k))
        json_str(d, json_number(d->x, k));
    else
        so_jj_fail_type(d->x, "tojson: keys must be strings, numbers or none", k);
}

/* Insertion sort: objects have few keys, and each move counts as a step (so_jj_tick). */
static so_jj_entry *sorted_entries(so_jj *x, const so_jj_dict *dict) {
    so_jj_entry *e = so_jj_alloc(x, dict->n, sizeof *e);
    for (size_t i = 0; i < dict->n; i++) {
        size_t at = i;
        for (; at > 0 && so_jj_less(x, dict->e[i].key, e[at - 1].key); at--) {
            so_jj_tick(x, 1);
            e[at] = e[at - 1];
        }
        e[at] = dict->e[i];
    }
    return e;
}

static void json_dict(dumper *d, const so_jj_dict *dict, int level) {
    const so_jj_entry *e = d->sort ? sorted_entries(d->x, dict) : dict->e;
    if (!dict->n) {
        so_jj_buf_add(d->x, d->b, SO_STR("{}"));
        return;
    }
    so_jj_buf_char(d->x, d->b, '{');
    for (size_t i = 0; i < dict->n; i++) {
        if (i)
            so_jj_buf_add(d->x, d->b, d->item_sep);
        json_newline(d, level + 1);
        json_key(d, e[i].key);
        so_jj_buf_add(d->x, d->b, d->key_sep);
        json_value(d, e[i].value, level + 1);
    }
    json_newline(d, level);
    so_jj_buf_char(d->x, d->b, '}');
}

static void json_list(dumper *d, const so_jj_list *l, int level) {
    if (!l->n) {
        so_jj_buf_add(d->x, d->b, SO_STR("[]"));
        return;
    }
    so_jj_buf_char(d->x, d->b, '[');
    for (size_t i = 0; i < l->n; i++) {
        if (i)
            so_jj_buf_add(d->x, d->b, d->item_sep);
        json_newline(d, level + 1);
        json_value(d, l->v[i], level + 1);
    }
    json_newline(d, level);
    so_jj_buf_char(d->x, d->b, ']');
}

static void json_value(dumper *d, so_jj_val v, int level) {
    so_jj_enter(d->x);
    so_jj_tick(d->x, 1);
    switch (v.kind) {
    case SO_JJ_NONE:
        so_jj_buf_add(d->x, d->b, SO_STR("null"));
        break;
    case SO_JJ_BOOL:
    case SO_JJ_INT:
    case SO_JJ_FLOAT:
        so_jj_buf_add(d->x, d->b, json_number(d->x, v));
        break;
    case SO_JJ_STR:
        json_str(d, so_jj_bytes(v));
        break;
    case SO_JJ_LIST:
    case SO_JJ_TUPLE:
        json_list(d, v.list, level);
        break;
    case SO_JJ_DICT:
        json_dict(d, v.dict, level);
        break;
    default:
        so_jj_fail(d->x, SO_EINVAL, "object of type %s is not JSON serializable", so_jj_type(v));
    }
    so_jj_leave(d->x);
}

static void set_indent(dumper *d, so_jj_val indent) {
    so_jj_buf b = {0};
    int64_t n;
    if (indent.kind == SO_JJ_STR)
        d->indent = so_jj_bytes(indent);
    else if (so_jj_is_int(indent, &n)) {
        so_jj_buf_fill(d->x, &b, SO_STR(" "), n > 0 ? (size_t)n : 0);
        d->indent = (so_str){b.data, b.len};
    } else
        so_jj_fail_type(d->x, "tojson: indent must be an integer or a string", indent);
    d->pretty = true;
    d->item_sep = SO_STR(",");
}

static void set_separators(dumper *d, so_jj_val sep) {
    so_jj_list *l = so_jj_collect(d->x, sep);
    if (l->n != 2 || l->v[0].kind != SO_JJ_STR || l->v[1].kind != SO_JJ_STR)
        so_jj_fail(d->x, SO_EINVAL, "tojson: separators must be two strings");
    d->item_sep = so_jj_bytes(l->v[0]);
    d->key_sep = so_jj_bytes(l->v[1]);
}

/* p: ensure_ascii, indent, separators, sort_keys */
SO_JJ_FN(so_jj_tojson) {
    so_jj_buf b = {0};
    dumper d = {.x = x, .b = &b, .item_sep = SO_STR(", "), .key_sep = SO_STR(": ")};
    d.ascii = so_jj_flag(p[0]);
    d.sort = so_jj_flag(p[3]);
    if (p[1].kind != SO_JJ_MISSING && p[1].kind != SO_JJ_NONE)
        set_indent(&d, p[1]);
    if (p[2].kind != SO_JJ_MISSING && p[2].kind != SO_JJ_NONE)
        set_separators(&d, p[2]);
    json_value(&d, self, 0);
    return so_jj_buf_str(x, &b);
}
