/* Values of the template interpreter: making and examining them, errors, limits.
 *
 * All memory comes from the arena of the compile or render. Strings are immutable, valid UTF-8,
 * with a count of their characters. Lists and dicts are mutable, but every render converts the
 * variables anew, so a template never changes its caller's data. The limits on steps, bytes and
 * depth are enforced only here. One so_jj belongs to one thread. */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "jinja/impl.h"

int so_jj_clip(so_str s) {
    size_t n = SO_MIN(s.len, (size_t)300);
    while (n < s.len && n && ((unsigned char)s.ptr[n] & 0xC0) == 0x80)
        n--;
    return (int)n;
}

void so_jj_exit(so_jj *x, int code) {
    x->code = code;
    longjmp(x->exit, 1);
}

void so_jj_fail(so_jj *x, int code, const char *fmt, ...) {
    if (x->err) {
        char msg[sizeof x->err->msg];
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(msg, sizeof msg, fmt, ap);
        va_end(ap);
        so_err_set(x->err, code, "chat template line %d: %s", x->line, msg);
    }
    so_jj_exit(x, code);
}

void so_jj_fail_type(so_jj *x, const char *what, so_jj_val v) {
    if (v.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, v);
    so_jj_fail(x, SO_EINVAL, "%s, not '%s'", what, so_jj_type(v));
}

void so_jj_tick(so_jj *x, size_t n) {
    x->steps += n;
    if (x->steps > x->max_steps)
        so_jj_fail(x, SO_ELIMIT, "more than %llu steps", (unsigned long long)x->max_steps);
}

void so_jj_enter(so_jj *x) {
    if (++x->depth > SO_JJ_MAX_DEPTH)
        so_jj_fail(x, SO_ELIMIT, "nested deeper than %d", SO_JJ_MAX_DEPTH);
}

void *so_jj_alloc(so_jj *x, size_t n, size_t size) {
    void *p = so_arena_alloc(x->arena, n, size);
    if (!p)
        so_jj_fail(x, SO_ELIMIT, "needs more than %zu MiB of memory", x->arena->max >> 20);
    so_jj_tick(x, n * size / 256); /* filling memory costs time too */
    return p;
}

/* ---- undefined ---- */

static so_jj_val undefined(so_jj *x, so_jj_undef u) {
    so_jj_undef *p = SO_JJ_NEW(x, so_jj_undef);
    *p = u;
    return (so_jj_val){.kind = SO_JJ_UNDEFINED, .undef = p};
}

so_jj_val so_jj_undefined_hint(so_jj *x, const char *hint) {
    return undefined(x, (so_jj_undef){.hint = hint});
}

so_jj_val so_jj_undefined_var(so_jj *x, so_str name) {
    return undefined(x, (so_jj_undef){.name = so_jj_str_borrow(x, name)});
}

so_jj_val so_jj_undefined_of(so_jj *x, so_jj_val obj, so_jj_val name) {
    return undefined(x, (so_jj_undef){.obj = obj, .name = name});
}

void so_jj_fail_undefined(so_jj *x, so_jj_val v) {
    const so_jj_undef *u = v.undef;
    if (u->hint)
        so_jj_fail(x, SO_EINVAL, "%s", u->hint);
    so_jj_buf b = {0};
    so_jj_write_repr(x, &b, u->name);
    so_str name = {b.data, b.len};
    const char *type = so_jj_type(u->obj), *object = u->obj.kind == SO_JJ_NONE ? "" : " object";
    if (u->obj.kind == SO_JJ_NONE)
        type = "None";
    if (u->obj.kind == SO_JJ_MISSING)
        so_jj_fail(x, SO_EINVAL, "%.*s is undefined", SO_JJ_ARG(name));
    if (u->name.kind == SO_JJ_STR)
        so_jj_fail(x, SO_EINVAL, "'%s%s' has no attribute %.*s", type, object, SO_JJ_ARG(name));
    so_jj_fail(x, SO_EINVAL, "%s%s has no element %.*s", type, object, SO_JJ_ARG(name));
}

/* ---- strings ---- */

static so_jj_val str_of(so_jj *x, so_str s, size_t n_chars, so_jj_buf *buf) {
    so_jj_str *p = SO_JJ_NEW(x, so_jj_str);
    *p = (so_jj_str){.ptr = s.ptr, .len = s.len, .n_chars = n_chars, .buf = buf};
    return (so_jj_val){.kind = SO_JJ_STR, .s = p};
}

static size_t count_chars(so_jj *x, so_str s) {
    so_jj_tick(x, s.len / 256);
    return so_jj_count_chars(s);
}

so_jj_val so_jj_str_borrow(so_jj *x, so_str s) { return str_of(x, s, count_chars(x, s), NULL); }

so_jj_val so_jj_str_copy(so_jj *x, so_str s) {
    char *p = so_jj_alloc(x, s.len + 1, 1);
    if (s.len)
        memcpy(p, s.ptr, s.len);
    return so_jj_str_borrow(x, (so_str){p, s.len});
}

so_jj_val so_jj_str_c(so_jj *x, const char *s) { return so_jj_str_borrow(x, so_str_c(s)); }

so_jj_val so_jj_str_printf(so_jj *x, const char *fmt, ...) {
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    int n = vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    SO_ASSERT(n >= 0 && (size_t)n < sizeof text);
    return so_jj_str_copy(x, (so_str){text, (size_t)n});
}

static so_jj_val with_markup(so_jj *x, so_jj_val v, bool markup) {
    if (v.s->markup == markup)
        return v;
    so_jj_str *p = SO_JJ_NEW(x, so_jj_str);
    *p = *v.s;
    p->markup = markup;
    return (so_jj_val){.kind = SO_JJ_STR, .s = p};
}

so_jj_val so_jj_markup(so_jj *x, so_jj_val str) { return with_markup(x, str, true); }
so_jj_val so_jj_plain(so_jj *x, so_jj_val str) { return with_markup(x, str, false); }

/* ---- buffers ---- */

static void reserve(so_jj *x, so_jj_buf *b, size_t more) {
    size_t need;
    if (!so_add_size(b->len, more, &need) || need > SIZE_MAX / 4)
        so_jj_fail(x, SO_ELIMIT, "text too long");
    if (need <= b->cap)
        return;
    size_t cap = SO_MAX(need + need / 2, (size_t)64);
    char *p = so_jj_text_alloc(x, cap);
    if (b->len) {
        memcpy(p, b->data, b->len);
        so_jj_origin_copy(x, p, b->data, b->len);
    }
    b->data = p;
    b->cap = cap;
}

void so_jj_buf_add(so_jj *x, so_jj_buf *b, so_str s) {
    if (!s.len)
        return;
    reserve(x, b, s.len);
    memcpy(b->data + b->len, s.ptr, s.len);
    so_jj_origin_copy(x, b->data + b->len, s.ptr, s.len);
    b->len += s.len;
}

void so_jj_buf_char(so_jj *x, so_jj_buf *b, char c) { so_jj_buf_add(x, b, (so_str){&c, 1}); }

void so_jj_buf_cp(so_jj *x, so_jj_buf *b, int32_t cp) {
    uint32_t c = (uint32_t)cp;
    char s[4];
    size_t n = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const unsigned char LEAD[5] = {0, 0, 0xC0, 0xE0, 0xF0};
    for (size_t i = n; i-- > 1; c >>= 6)
        s[i] = (char)(0x80 | (c & 0x3F));
    s[0] = (char)(LEAD[n] | c);
    so_jj_buf_add(x, b, (so_str){s, n});
}

void so_jj_buf_fill(so_jj *x, so_jj_buf *b, so_str s, size_t times) {
    size_t total;
    if (!so_mul_size(s.len, times, &total))
        so_jj_fail(x, SO_ELIMIT, "text too long");
    if (!total)
        return;
    reserve(x, b, total);
    if (s.len == 1) {
        memset(b->data + b->len, s.ptr[0], times);
        b->len += times;
        so_jj_origin_like(x, b, b->len - times, s.ptr);
        return;
    }
    for (size_t i = 0; i < times; i++)
        so_jj_buf_add(x, b, s);
}

so_jj_val so_jj_buf_str(so_jj *x, so_jj_buf *b) {
    so_jj_buf *owner = SO_JJ_NEW(x, so_jj_buf);
    *owner = *b;
    b->cap = b->len; /* the free space after the text now belongs to the string */
    so_str s = {b->data ? b->data : "", b->len};
    return str_of(x, s, count_chars(x, s), b->data ? owner : NULL);
}

/* a + b, ignoring markup. If `a` is at the end of its buffer and b fits, b is written after `a` and
 * the result shares a's bytes. So appending many pieces takes linear time. */
so_jj_val so_jj_concat(so_jj *x, so_jj_val a, so_jj_val b) {
    const so_jj_str *l = a.s, *r = b.s;
    if (!r->len)
        return so_jj_plain(x, a);
    so_jj_buf *buf = l->buf;
    if (!buf || l->ptr + l->len != buf->data + buf->len || buf->cap - buf->len < r->len) {
        buf = SO_JJ_NEW(x, so_jj_buf);
        reserve(x, buf, l->len + r->len);
        so_jj_buf_add(x, buf, so_jj_bytes(a));
    }
    so_jj_buf_add(x, buf, so_jj_bytes(b));
    so_jj_tick(x, r->len / 256);
    return str_of(x, (so_str){buf->data, buf->len}, l->n_chars + r->n_chars, buf);
}

/* ---- lists ---- */

so_jj_list *so_jj_list_new(so_jj *x, size_t cap) {
    so_jj_list *l = SO_JJ_NEW(x, so_jj_list);
    l->v = so_jj_alloc(x, cap, sizeof *l->v);
    l->cap = cap;
    return l;
}

void so_jj_list_push(so_jj *x, so_jj_list *l, so_jj_val v) {
    if (l->n == l->cap) {
        size_t cap = SO_MAX(l->cap * 2, (size_t)4);
        so_jj_val *p = so_jj_alloc(x, cap, sizeof *p);
        if (l->n)
            memcpy(p, l->v, l->n * sizeof *p);
        l->v = p;
        l->cap = cap;
    }
    so_jj_tick(x, 1);
    l->v[l->n++] = v;
}

so_jj_val so_jj_list_val(so_jj_list *l) { return (so_jj_val){.kind = SO_JJ_LIST, .list = l}; }
so_jj_val so_jj_tuple_val(so_jj_list *l) { return (so_jj_val){.kind = SO_JJ_TUPLE, .list = l}; }

so_jj_val so_jj_pair(so_jj *x, so_jj_val a, so_jj_val b) {
    so_jj_list *l = so_jj_list_new(x, 2);
    l->v[0] = a;
    l->v[1] = b;
    l->n = 2;
    return so_jj_tuple_val(l);
}

/* ---- properties ---- */

const char *so_jj_type(so_jj_val v) {
    static const char *const NAMES[] = {
        [SO_JJ_MISSING] = "missing", [SO_JJ_UNDEFINED] = "Undefined",
        [SO_JJ_NONE] = "NoneType",   [SO_JJ_BOOL] = "bool",
        [SO_JJ_INT] = "int",         [SO_JJ_FLOAT] = "float",
        [SO_JJ_STR] = "str",         [SO_JJ_LIST] = "list",
        [SO_JJ_TUPLE] = "tuple",     [SO_JJ_DICT] = "dict",

        [SO_JJ_ITER] = "generator",  [SO_JJ_NAMESPACE] = "namespace",
        [SO_JJ_LOOP] = "loop",       [SO_JJ_MACRO] = "macro",
        [SO_JJ_FUNC] = "function",   [SO_JJ_METHOD] = "method",
        [SO_JJ_JOINER] = "joiner",

    };
    return NAMES[v.kind];
}

bool so_jj_len(so_jj_val v, size_t *n) {
    switch (v.kind) {
    case SO_JJ_UNDEFINED:
        *n = 0;
        return true;
    case SO_JJ_STR:
        *n = v.s->n_chars;
        return true;
    case SO_JJ_LIST:
    case SO_JJ_TUPLE:
        *n = v.list->n;
        return true;
    case SO_JJ_DICT:
        *n = v.dict->n;
        return true;
    default:
        return false;
    }
}

bool so_jj_flag(so_jj_val v) { return v.kind != SO_JJ_MISSING && so_jj_truth(v); }

bool so_jj_truth(so_jj_val v) {
    size_t n;
    switch (v.kind) {
    case SO_JJ_UNDEFINED:
    case SO_JJ_NONE:
        return false;
    case SO_JJ_BOOL:
        return v.b;
    case SO_JJ_INT:
        return v.i != 0;
    case SO_JJ_FLOAT:
        return v.f != 0;
    default:
        return !so_jj_len(v, &n) || n > 0;
    }
}

bool so_jj_is_num(so_jj_val v) {
    return v.kind == SO_JJ_BOOL || v.kind == SO_JJ_INT || v.kind == SO_JJ_FLOAT;
}

bool so_jj_is_int(so_jj_val v, int64_t *i) {
    if (v.kind != SO_JJ_BOOL && v.kind != SO_JJ_INT)
        return false;
    *i = v.kind == SO_JJ_BOOL ? v.b : v.i;
    return true;
}

double so_jj_to_double(so_jj_val v) {
    return v.kind == SO_JJ_FLOAT ? v.f : v.kind == SO_JJ_BOOL ? (double)v.b : (double)v.i;
}

int64_t so_jj_index_arg(so_jj *x, so_jj_val v, int64_t missing) {
    return v.kind == SO_JJ_NONE ? missing : so_jj_int_arg(x, v, missing);
}

int64_t so_jj_int_arg(so_jj *x, so_jj_val v, int64_t missing) {
    int64_t i;
    if (v.kind == SO_JJ_MISSING)
        return missing;
    if (!so_jj_is_int(v, &i))
        so_jj_fail_type(x, "expected an integer", v);
    return i;
}

/* ---- JSON in ---- */

#define WORD_CHARS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"

static so_jj_val str_from_json(so_jj *x, const char *p, size_t len) {
    size_t n_chars, bad;
    so_jj_tick(x, len / 256);
    x->in_bytes += len;
    if (!so_jj_utf8_check((so_str){p, len}, &n_chars, &bad))
        so_jj_fail(x, SO_EFORMAT, "a variable holds invalid UTF-8 at byte %zu of a string", bad);
    return str_of(x, so_jj_text_from_data(x, (so_str){p, len}), n_chars, NULL);
}

/* Templates build markers from a message's role ('<|' + role + '|>'), so a role is not flagged as
 * the caller's data if it has only letters, digits, '_' and '-': it cannot contain a marker. */
static so_jj_val role_from_json(so_jj *x, const json_t *j) {
    bool outer = x->reads_data;
    const char *role = json_string_value(j);
    if (role && strspn(role, WORD_CHARS) == json_string_length(j))
        x->reads_data = false;
    so_jj_val v = so_jj_from_json(x, j);
    x->reads_data = outer;
    return v;
}

/* Strings are borrowed, because the JSON outlives the render; if origins are tracked, they are
 * copied. */
so_jj_val so_jj_from_json(so_jj *x, const json_t *j) {
    so_jj_enter(x);
    so_jj_val v = SO_JJ_NONE_V;
    switch (json_typeof(j)) {
    case JSON_OBJECT: {
        so_jj_dict *d = so_jj_dict_new(x);
        for (void *it = json_object_iter((json_t *)j); it;
             it = json_object_iter_next((json_t *)j, it)) {
            const char *key = json_object_iter_key(it);
            so_jj_val k = str_from_json(x, key, strlen(key));
            const json_t *member = json_object_iter_value(it);
            so_jj_dict_set(x, d, k,
                           strcmp(key, "role") == 0 ? role_from_json(x, member)
                                                    : so_jj_from_json(x, member));
        }
        v = so_jj_dict_val(d);
        break;
    }
    case JSON_ARRAY: {
        so_jj_list *l = so_jj_list_new(x, json_array_size(j));
        for (size_t i = 0; i < json_array_size(j); i++)
            so_jj_list_push(x, l, so_jj_from_json(x, json_array_get(j, i)));
        v = so_jj_list_val(l);
        break;
    }
    case JSON_STRING:
        v = str_from_json(x, json_string_value(j), json_string_length(j));
        break;
    case JSON_INTEGER:
        v = so_jj_int(json_integer_value(j));
        break;
    case JSON_REAL:
        v = so_jj_float(json_real_value(j));
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        v = so_jj_bool(json_is_true(j));
        break;
    case JSON_NULL:
        break;
    }
    so_jj_leave(x);
    return v;
}
