/* Subscripts, slices, attributes, the methods of lists, tuples and dicts, and the global functions.
 *
 * a.b looks for an attribute, then for an item; a["b"] for an item, then for an attribute. Neither
 * fails: what does not exist is undefined, with its name for a later error. transformers refuses
 * methods that change a list or dict (append, pop, update, …); here they work, because each render
 * has its own copy of all data and templates written for other engines use them. range() and the
 * methods keys, values and items return lists. */
#include <stdio.h>
#include <time.h>

#include "jinja/impl.h"

/* ---- subscripts ---- */

static bool index_in(int64_t i, size_t n, size_t *at) {
    if (i < 0)
        i += (int64_t)n;
    *at = (size_t)i;
    return i >= 0 && i < (int64_t)n;
}

/* The bytes of the characters [from, to). */
static so_str char_range(so_jj *x, const so_jj_str *s, size_t from, size_t to) {
    if (s->n_chars == s->len)
        return (so_str){s->ptr + from, to - from};
    const char *p = s->ptr, *end = s->ptr + s->len, *start = p;
    size_t n;
    so_jj_tick(x, s->len / 64);
    for (size_t i = 0; i < to; i++, p += n) {
        if (i == from)
            start = p;
        so_jj_cp_at(p, end, &n);
    }
    return from >= to ? (so_str){s->ptr, 0} : (so_str){start, (size_t)(p - start)};
}

static bool item_at(so_jj *x, so_jj_val obj, int64_t i, so_jj_val *out) {
    size_t at;
    switch (obj.kind) {
    case SO_JJ_STR:
        if (!index_in(i, obj.s->n_chars, &at))
            return false;
        *out = so_jj_substr(x, obj, char_range(x, obj.s, at, at + 1));
        return true;
    case SO_JJ_LIST:
    case SO_JJ_TUPLE:
        if (!index_in(i, obj.list->n, &at))
            return false;
        *out = obj.list->v[at];
        return true;
    default:
        return false;
    }
}

static bool hashable(so_jj_val v) {
    if (v.kind == SO_JJ_TUPLE)
        for (size_t i = 0; i < v.list->n; i++)
            if (!hashable(v.list->v[i]))
                return false;
    return v.kind != SO_JJ_LIST && v.kind != SO_JJ_DICT;
}

so_jj_val so_jj_getitem(so_jj *x, so_jj_val obj, so_jj_val key) {
    int64_t i;
    so_jj_val v;
    if (obj.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, obj);
    if (obj.kind == SO_JJ_DICT) {
        if (hashable(key) && so_jj_dict_get(x, obj.dict, key, &v))
            return v;
    } else if (so_jj_is_int(key, &i) && item_at(x, obj, i, &v)) {
        return v;
    }
    if (key.kind == SO_JJ_STR) {
        v = so_jj_attr_only(x, obj, so_jj_bytes(key));
        if (v.kind != SO_JJ_MISSING)
            return v;
    }
    return so_jj_undefined_of(x, obj, key);
}

so_jj_val so_jj_getattr(so_jj *x, so_jj_val obj, so_str name) {
    so_jj_val v;
    if (obj.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, obj);
    v = so_jj_attr_only(x, obj, name);
    if (v.kind != SO_JJ_MISSING)
        return v;
    if (obj.kind == SO_JJ_DICT && so_jj_dict_get_str(x, obj.dict, name, &v))
        return v;
    return so_jj_undefined_of(x, obj, so_jj_str_borrow(x, name));
}

/* ---- slices ---- */

typedef struct span {
    int64_t start, stop, step;
    size_t n;
} span;

static int64_t clamp_index(int64_t i, int64_t n, int64_t low, int64_t high) {
    if (i < 0)
        i = i < -n ? low : i + n;
    return i < low ? low : i > high ? high : i;
}

/* The items of [start:stop:step] in a sequence of len items, by Python's rules. */
static span slice_span(so_jj *x, size_t len, so_jj_val start, so_jj_val stop, so_jj_val step_v) {
    int64_t n = (int64_t)len, step = so_jj_index_arg(x, step_v, 1);
    if (step == 0)
        so_jj_fail(x, SO_EINVAL, "slice step cannot be zero");
    if (step < -INT64_MAX)
        step = -INT64_MAX;
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? n - 1 : n;
    int64_t a = start.kind == SO_JJ_NONE ? (step < 0 ? high : low)
                                         : clamp_index(so_jj_index_arg(x, start, 0), n, low, high);
    int64_t b = stop.kind == SO_JJ_NONE ? (step < 0 ? low : high)
                                        : clamp_index(so_jj_index_arg(x, stop, 0), n, low, high);
    span s = {a, b, step, 0};
    if (step > 0 && a < b)
        s.n = (size_t)((b - a - 1) / step + 1);
    else if (step < 0 && b < a)
        s.n = (size_t)((a - b - 1) / -step + 1);
    return s;
}

static so_jj_val slice_str(so_jj *x, so_jj_val obj, span s) {
    if (s.n == 0)
        return so_jj_substr(x, obj, (so_str){obj.s->ptr, 0});
    if (s.step == 1)
        return so_jj_substr(x, obj, char_range(x, obj.s, (size_t)s.start, (size_t)s.start + s.n));
    const so_jj_str *str = obj.s;
    const char **at = so_jj_alloc(x, str->n_chars + 1, sizeof *at), *p = str->ptr;
    size_t n;
    for (size_t i = 0; i < str->n_chars; i++, p += n) {
        at[i] = p;
        so_jj_cp_at(p, str->ptr + str->len, &n);
    }
    at[str->n_chars] = p;
    so_jj_buf b = {0};
    so_jj_tick(x, s.n / 8);
    for (size_t k = 0; k < s.n; k++) {
        size_t i = (size_t)(s.start + (int64_t)k * s.step);
        so_jj_buf_add(x, &b, (so_str){at[i], (size_t)(at[i + 1] - at[i])});
    }
    return so_jj_like(x, obj, so_jj_buf_str(x, &b));
}

so_jj_val so_jj_slice(so_jj *x, so_jj_val obj, so_jj_val start, so_jj_val stop, so_jj_val step) {
    if (obj.kind != SO_JJ_STR && obj.kind != SO_JJ_LIST && obj.kind != SO_JJ_TUPLE)
        so_jj_fail_type(x, "only strings and lists can be sliced", obj);
    size_t len = 0;
    so_jj_len(obj, &len);
    span s = slice_span(x, len, start, stop, step);
    if (obj.kind == SO_JJ_STR)
        return slice_str(x, obj, s);
    so_jj_list *l = so_jj_list_new(x, s.n);
    for (size_t k = 0; k < s.n; k++)
        so_jj_list_push(x, l, obj.list->v[s.start + (int64_t)k * s.step]);
    return (so_jj_val){.kind = obj.kind, .list = l};
}

/* ---- methods of lists and tuples ---- */

static SO_JJ_FN(list_append) {
    so_jj_list_push(x, self.list, p[0]);
    return SO_JJ_NONE_V;
}

static SO_JJ_FN(list_extend) {
    so_jj_list *more = so_jj_collect(x, p[0]);
    for (size_t i = 0; i < more->n; i++)
        so_jj_list_push(x, self.list, more->v[i]);
    return SO_JJ_NONE_V;
}

static so_jj_val list_take(so_jj *x, so_jj_list *l, size_t at) {
    so_jj_val v = l->v[at];
    so_jj_tick(x, (l->n - at) / 16);
    memmove(l->v + at, l->v + at + 1, (l->n - at - 1) * sizeof *l->v);
    l->n--;
    return v;
}

static SO_JJ_FN(list_pop) {
    size_t at;
    if (!index_in(so_jj_int_arg(x, p[0], -1), self.list->n, &at))
        so_jj_fail(x, SO_EINVAL, "pop index out of range");
    return list_take(x, self.list, at);
}

static SO_JJ_FN(list_insert) {
    so_jj_list *l = self.list;
    int64_t n = (int64_t)l->n, i = clamp_index(so_jj_int_arg(x, p[0], 0), n, 0, n);
    so_jj_list_push(x, l, p[1]);
    so_jj_tick(x, (size_t)(n - i) / 16);
    memmove(l->v + i + 1, l->v + i, (size_t)(n - i) * sizeof *l->v);
    l->v[i] = p[1];
    return SO_JJ_NONE_V;
}

static bool list_find(so_jj *x, const so_jj_list *l, so_jj_val v, size_t from, size_t to,
                      size_t *at) {
    for (*at = from; *at < to && *at < l->n; ++*at)
        if (so_jj_equal(x, l->v[*at], v))
            return true;
    return false;
}

static SO_JJ_FN(list_index) {
    int64_t n = (int64_t)self.list->n;
    size_t at, from = (size_t)clamp_index(so_jj_int_arg(x, p[1], 0), n, 0, n),
               to = (size_t)clamp_index(so_jj_int_arg(x, p[2], n), n, 0, n);
    if (!list_find(x, self.list, p[0], from, to, &at))
        so_jj_fail(x, SO_EINVAL, "the value is not in the %s", so_jj_type(self));
    return so_jj_int((int64_t)at);
}

static SO_JJ_FN(list_count) {
    int64_t n = 0;
    for (size_t at = 0; list_find(x, self.list, p[0], at, self.list->n, &at); at++)
        n++;
    return so_jj_int(n);
}

static SO_JJ_FN(list_copy) { return so_jj_list_val(so_jj_collect(x, self)); }

/* The first two are also the methods of tuples. */
static const so_jj_func LIST_METHODS[] = {
    {"index", list_index, "/value,start,stop", 1},
    {"count", list_count, "/value", 1},
    {"append", list_append, "/object", 1},
    {"extend", list_extend, "/iterable", 1},
    {"pop", list_pop, "/index", 0},
    {"insert", list_insert, "/index,object", 2},
    {"copy", list_copy, "", 0},
};

/* ---- methods of dicts ---- */

static SO_JJ_FN(dict_keys) {
    so_jj_list *l = so_jj_list_new(x, self.dict->n);
    for (size_t i = 0; i < self.dict->n; i++)
        so_jj_list_push(x, l, self.dict->e[i].key);
    return so_jj_list_val(l);
}

static SO_JJ_FN(dict_values) {
    so_jj_list *l = so_jj_list_new(x, self.dict->n);
    for (size_t i = 0; i < self.dict->n; i++)
        so_jj_list_push(x, l, self.dict->e[i].value);
    return so_jj_list_val(l);
}

static SO_JJ_FN(dict_items) { return so_jj_list_val(so_jj_dict_items(x, self.dict)); }

static so_jj_val or_none(so_jj_val v) { return v.kind == SO_JJ_MISSING ? SO_JJ_NONE_V : v; }

static SO_JJ_FN(dict_get) {
    so_jj_val v;
    return so_jj_dict_get(x, self.dict, p[0], &v) ? v : or_none(p[1]);
}

static SO_JJ_FN(dict_pop) {
    so_jj_val v;
    if (so_jj_dict_remove(x, self.dict, p[0], &v))
        return v;
    if (p[1].kind == SO_JJ_MISSING)
        so_jj_fail(x, SO_EINVAL, "pop: no such key");
    return p[1];
}

static SO_JJ_FN(dict_copy) { return so_jj_dict_val(so_jj_dict_copy(x, self.dict)); }

static so_jj_val one_or_none(so_jj *x, const so_jj_args *args, const char *what) {
    if (args->n_pos > 1)
        so_jj_fail(x, SO_EINVAL, "%s takes at most one positional argument", what);
    return args->n_pos ? args->pos[0] : SO_JJ_MISSING_V;
}

static SO_JJ_FN(dict_update) {
    so_jj_dict_update(x, self.dict, one_or_none(x, args, "update()"), args);
    return SO_JJ_NONE_V;
}

static const so_jj_func DICT_METHODS[] = {
    {"items", dict_items, "", 0},     {"keys", dict_keys, "", 0},
    {"values", dict_values, "", 0},   {"get", dict_get, "/key,default", 1},
    {"update", dict_update, NULL, 0}, {"pop", dict_pop, "/key,default", 1},
    {"copy", dict_copy, "", 0},
};

/* ---- attributes ---- */

const so_jj_func *so_jj_find_func(const so_jj_func *table, size_t n, so_str name) {
    for (size_t i = 0; i < n; i++)
        if (so_str_eq_c(name, table[i].name))
            return &table[i];
    return NULL;
}

static const so_jj_func *find_method(so_jj_val obj, so_str name) {
    switch (obj.kind) {
    case SO_JJ_STR:
        return so_jj_find_str_method(name);
    case SO_JJ_LIST:
        return so_jj_find_func(LIST_METHODS, SO_LEN(LIST_METHODS), name);
    case SO_JJ_TUPLE:
        return so_jj_find_func(LIST_METHODS, 2, name);
    case SO_JJ_DICT:
        return so_jj_find_func(DICT_METHODS, SO_LEN(DICT_METHODS), name);
    default:
        return NULL;
    }
}

so_jj_val so_jj_attr_only(so_jj *x, so_jj_val obj, so_str name) {
    so_jj_val v;
    const so_jj_func *f = find_method(obj, name);
    if (f) {
        so_jj_method *m = SO_JJ_NEW(x, so_jj_method);
        *m = (so_jj_method){obj, f};
        return (so_jj_val){.kind = SO_JJ_METHOD, .method = m};
    }
    if (obj.kind == SO_JJ_NAMESPACE)
        return so_jj_dict_get_str(x, obj.dict, name, &v) ? v : SO_JJ_MISSING_V;
    if (obj.kind == SO_JJ_LOOP)
        return so_jj_loop_attr(x, obj.loop, name);
    return SO_JJ_MISSING_V;
}

/* ---- global functions ---- */

static SO_JJ_FN(fn_raise) {
    so_str msg = so_jj_bytes(so_jj_to_str(x, p[0]));
    so_err_set(x->err, SO_EINVAL, "%.*s (raised by the template, line %d)", SO_JJ_ARG(msg),
               x->line);
    so_jj_exit(x, SO_EINVAL);
}

static SO_JJ_FN(fn_namespace) {
    so_jj_dict *d = so_jj_dict_new(x);
    so_jj_dict_update(x, d, one_or_none(x, args, "namespace()"), args);
    return (so_jj_val){.kind = SO_JJ_NAMESPACE, .dict = d};
}

static SO_JJ_FN(fn_dict) {
    so_jj_dict *d = so_jj_dict_new(x);
    so_jj_dict_update(x, d, one_or_none(x, args, "dict()"), args);
    return so_jj_dict_val(d);
}

static SO_JJ_FN(fn_range) {
    int64_t v[3];
    for (int i = 0; i < 3; i++)
        if (p[i].kind != SO_JJ_MISSING && !so_jj_is_int(p[i], &v[i]))
            so_jj_fail_type(x, "range() takes integers", p[i]);
    bool one = p[1].kind == SO_JJ_MISSING;
    int64_t start = one ? 0 : v[0], stop = one ? v[0] : v[1];
    int64_t step = p[2].kind == SO_JJ_MISSING ? 1 : v[2];
    if (step == 0)
        so_jj_fail(x, SO_EINVAL, "range() step must not be zero");
    so_jj_list *l = so_jj_list_new(x, 4);
    while (step > 0 ? start < stop : start > stop) {
        if (l->n == SO_JJ_MAX_RANGE)
            so_jj_fail(x, SO_ELIMIT, "range() of more than %d items", SO_JJ_MAX_RANGE);
        so_jj_list_push(x, l, so_jj_int(start));
        if (__builtin_add_overflow(start, step, &start))
            break;
    }
    return so_jj_list_val(l);
}

/* joiner(sep) is a function that returns "" at its first call and sep later. */
static SO_JJ_FN(fn_joiner) {
    so_jj_joiner *j = SO_JJ_NEW(x, so_jj_joiner);
    j->sep = p[0].kind == SO_JJ_MISSING ? so_jj_str_c(x, ", ") : p[0];
    return (so_jj_val){.kind = SO_JJ_JOINER, .joiner = j};
}

/* The local time without a zone, as Python's datetime.now(). */
static SO_JJ_FN(fn_strftime_now) {
    char text[1024];
    struct tm tm;
    time_t now = x->now ? (time_t)x->now : time(NULL);
    if (p[0].kind != SO_JJ_STR || memchr(p[0].s->ptr, '\0', p[0].s->len))
        so_jj_fail(x, SO_EINVAL, "strftime_now() takes a format string");
    if (!localtime_r(&now, &tm))
        so_jj_fail(x, SO_ERANGE, "the time %lld has no date", (long long)now);
    tm.tm_isdst = -1; /* unknown: %z is empty, and %Z is tm_zone */
    tm.tm_zone = "";
    so_str fmt = so_jj_bytes(p[0]);
    if (memmem(fmt.ptr, fmt.len, "%f", 2))
        so_jj_fail(x, SO_EUNSUPPORTED, "strftime_now(): %%f is not supported");
    so_jj_buf f = {0};
    so_jj_buf_add(x, &f, fmt);
    so_jj_buf_add(x, &f, (so_str){"|", 2}); /* so that 0 means failure, not an empty date */
    size_t n = strftime(text, sizeof text, f.data, &tm), chars, bad;
    if (!n || !so_jj_utf8_check((so_str){text, n}, &chars, &bad))
        so_jj_fail(x, SO_ELIMIT, "strftime_now(): the date is too long");
    return so_jj_str_copy(x, (so_str){text, n - 1});
}

const so_jj_func *so_jj_find_global(so_str name) {
    static const so_jj_func GLOBALS[] = {
        {"raise_exception", fn_raise, "message", 1}, {"strftime_now", fn_strftime_now, "format", 1},
        {"namespace", fn_namespace, NULL, 0},        {"dict", fn_dict, NULL, 0},
        {"range", fn_range, "/start,stop,step", 1},  {"joiner", fn_joiner, "sep", 0},
    };
    return so_jj_find_func(GLOBALS, SO_LEN(GLOBALS), name);
}
