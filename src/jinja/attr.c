/* What hangs on values: subscripts, slices, attributes, the methods of lists, tuples and dicts, and
 * the global functions.
 *
 * a.b prefers the attribute and falls back to the item, a["b"] the other way round; neither fails:
 * what is not there is undefined and remembers its name. The reference's sandbox refuses methods
 * that change a list or dict; here they work, because each render has its own copy of all data and
 * some templates in the wild rely on other engines allowing it. */
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

/* The bytes of characters [from, to) */
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
    case SO_JJ_RANGE:
        if (!index_in(i, obj.range->n, &at))
            return false;
        *out = so_jj_int(obj.range->start + (int64_t)at * obj.range->step);
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
    return v.kind != SO_JJ_LIST && v.kind != SO_JJ_DICT && v.kind != SO_JJ_VIEW;
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

/* Python's slice.indices() */
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
    so_jj_val v = so_jj_buf_str(x, &b);
    return str->markup ? so_jj_markup(x, v) : v;
}

/* Unsigned, because the end of an empty slice may lie past what fits. */
static int64_t range_at(const so_jj_range *r, int64_t i) {
    return (int64_t)((uint64_t)r->start + (uint64_t)i * (uint64_t)r->step);
}

static so_jj_val range_val(so_jj *x, so_jj_range r) {
    so_jj_range *p = SO_JJ_NEW(x, so_jj_range);
    *p = r;
    return (so_jj_val){.kind = SO_JJ_RANGE, .range = p};
}

so_jj_val so_jj_slice(so_jj *x, so_jj_val obj, so_jj_val start, so_jj_val stop, so_jj_val step) {
    if (obj.kind != SO_JJ_STR && obj.kind != SO_JJ_LIST && obj.kind != SO_JJ_TUPLE &&
        obj.kind != SO_JJ_RANGE)
        so_jj_fail_type(x, "only strings, lists and ranges can be sliced", obj);
    size_t len = 0;
    so_jj_len(x, obj, &len);
    span s = slice_span(x, len, start, stop, step);
    if (obj.kind == SO_JJ_STR)
        return slice_str(x, obj, s);
    if (obj.kind == SO_JJ_RANGE) {
        const so_jj_range *r = obj.range;
        return range_val(x, (so_jj_range){range_at(r, s.start), range_at(r, s.stop),
                                          (int64_t)((uint64_t)s.step * (uint64_t)r->step), s.n});
    }
    so_jj_list *l = so_jj_list_new(x, s.n);
    for (size_t k = 0; k < s.n; k++)
        so_jj_list_push(x, l, obj.list->v[s.start + (int64_t)k * s.step]);
    return (so_jj_val){.kind = obj.kind, .list = l};
}

/* ---- methods of lists and tuples ---- */

#define METHOD(name) \
    static so_jj_val name(so_jj *x, so_jj_val self, const so_jj_args *args, const so_jj_val *p)
#define UNUSED (void)x, (void)self, (void)args, (void)p

METHOD(list_append) {
    UNUSED;
    so_jj_list_push(x, self.list, p[0]);
    return SO_JJ_NONE_V;
}

METHOD(list_extend) {
    UNUSED;
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

METHOD(list_pop) {
    UNUSED;
    size_t at;
    if (!index_in(so_jj_int_arg(x, p[0], -1), self.list->n, &at))
        so_jj_fail(x, SO_EINVAL, "pop index out of range");
    return list_take(x, self.list, at);
}

METHOD(list_insert) {
    UNUSED;
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
        if (so_jj_same(l->v[*at], v) || so_jj_equal(x, l->v[*at], v))
            return true;
    return false;
}

METHOD(list_index) {
    UNUSED;
    int64_t n = (int64_t)self.list->n;
    size_t at, from = (size_t)clamp_index(so_jj_int_arg(x, p[1], 0), n, 0, n),
               to = (size_t)clamp_index(so_jj_int_arg(x, p[2], n), n, 0, n);
    if (!list_find(x, self.list, p[0], from, to, &at))
        so_jj_fail(x, SO_EINVAL, "the value is not in the %s", so_jj_type(self));
    return so_jj_int((int64_t)at);
}

METHOD(list_count) {
    UNUSED;
    int64_t n = 0;
    for (size_t at = 0; list_find(x, self.list, p[0], at, self.list->n, &at); at++)
        n++;
    return so_jj_int(n);
}

METHOD(list_remove) {
    UNUSED;
    size_t at;
    if (!list_find(x, self.list, p[0], 0, self.list->n, &at))
        so_jj_fail(x, SO_EINVAL, "the value is not in the list");
    list_take(x, self.list, at);
    return SO_JJ_NONE_V;
}

METHOD(list_reverse) {
    UNUSED;
    so_jj_list *l = self.list;
    so_jj_tick(x, l->n / 8);
    for (size_t i = 0; i < l->n / 2; i++) {
        so_jj_val v = l->v[i];
        l->v[i] = l->v[l->n - 1 - i];
        l->v[l->n - 1 - i] = v;
    }
    return SO_JJ_NONE_V;
}

METHOD(list_clear) {
    UNUSED;
    self.list->n = 0;
    return SO_JJ_NONE_V;
}

METHOD(list_copy) {
    UNUSED;
    return so_jj_list_val(so_jj_collect(x, self));
}

/* the first two are the methods of tuples too */
static const so_jj_func LIST_METHODS[] = {
    {"index", list_index, "/value,start,stop", 1},
    {"count", list_count, "/value", 1},
    {"append", list_append, "/object", 1},
    {"extend", list_extend, "/iterable", 1},
    {"pop", list_pop, "/index", 0},
    {"insert", list_insert, "/index,object", 2},
    {"remove", list_remove, "/value", 1},
    {"reverse", list_reverse, "", 0},
    {"clear", list_clear, "", 0},
    {"copy", list_copy, "", 0},
};

/* ---- methods of dicts ---- */

static so_jj_val dict_view(so_jj *x, so_jj_val self, int what) {
    so_jj_view *v = SO_JJ_NEW(x, so_jj_view);
    *v = (so_jj_view){self.dict, what};
    return (so_jj_val){.kind = SO_JJ_VIEW, .view = v};
}

METHOD(dict_keys) {
    UNUSED;
    return dict_view(x, self, SO_JJ_KEYS);
}

METHOD(dict_values) {
    UNUSED;
    return dict_view(x, self, SO_JJ_VALUES);
}

METHOD(dict_items) {
    UNUSED;
    return dict_view(x, self, SO_JJ_ITEMS);
}

static so_jj_val or_none(so_jj_val v) { return v.kind == SO_JJ_MISSING ? SO_JJ_NONE_V : v; }

METHOD(dict_get) {
    UNUSED;
    so_jj_val v;
    return so_jj_dict_get(x, self.dict, p[0], &v) ? v : or_none(p[1]);
}

METHOD(dict_setdefault) {
    UNUSED;
    so_jj_val v;
    if (so_jj_dict_get(x, self.dict, p[0], &v))
        return v;
    so_jj_dict_set(x, self.dict, p[0], or_none(p[1]));
    return or_none(p[1]);
}

METHOD(dict_pop) {
    UNUSED;
    so_jj_val v;
    if (so_jj_dict_remove(x, self.dict, p[0], &v))
        return v;
    if (p[1].kind == SO_JJ_MISSING)
        so_jj_fail(x, SO_EINVAL, "pop: no such key");
    return p[1];
}

METHOD(dict_popitem) {
    UNUSED;
    so_jj_val v;
    if (!self.dict->n)
        so_jj_fail(x, SO_EINVAL, "popitem: the dict is empty");
    so_jj_val key = self.dict->e[self.dict->n - 1].key;
    so_jj_dict_remove(x, self.dict, key, &v);
    return so_jj_pair(x, key, v);
}

METHOD(dict_clear) {
    UNUSED;
    *self.dict = (so_jj_dict){0};
    return SO_JJ_NONE_V;
}

METHOD(dict_copy) {
    UNUSED;
    return so_jj_dict_val(so_jj_dict_copy(x, self.dict));
}

static so_jj_val one_or_none(so_jj *x, const so_jj_args *args, const char *what) {
    if (args->n_pos > 1)
        so_jj_fail(x, SO_EINVAL, "%s takes at most one positional argument", what);
    return args->n_pos ? args->pos[0] : SO_JJ_MISSING_V;
}

METHOD(dict_update) {
    UNUSED;
    so_jj_dict_update(x, self.dict, one_or_none(x, args, "update()"), args);
    return SO_JJ_NONE_V;
}

static const so_jj_func DICT_METHODS[] = {
    {"items", dict_items, "", 0},     {"keys", dict_keys, "", 0},
    {"values", dict_values, "", 0},   {"get", dict_get, "/key,default", 1},
    {"update", dict_update, NULL, 0}, {"pop", dict_pop, "/key,default", 1},
    {"popitem", dict_popitem, "", 0}, {"setdefault", dict_setdefault, "/key,default", 1},
    {"clear", dict_clear, "", 0},     {"copy", dict_copy, "", 0},
};

/* ---- methods of cyclers ---- */

METHOD(cycler_next) {
    UNUSED;
    so_jj_cycler *c = self.cycler;
    so_jj_val v = c->items->v[c->pos];
    c->pos = (c->pos + 1) % c->items->n;
    return v;
}

METHOD(cycler_reset) {
    UNUSED;
    self.cycler->pos = 0;
    return SO_JJ_NONE_V;
}

static const so_jj_func CYCLER_METHODS[] = {
    {"next", cycler_next, "", 0},
    {"reset", cycler_reset, "", 0},
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
    case SO_JJ_CYCLER:
        return so_jj_find_func(CYCLER_METHODS, SO_LEN(CYCLER_METHODS), name);
    default:
        return NULL;
    }
}

static so_jj_val macro_attr(so_jj *x, const so_jj_node *n, so_str name) {
    if (so_str_eq_c(name, "name"))
        return n->name.len ? so_jj_str_borrow(x, n->name) : SO_JJ_NONE_V;
    if (so_str_eq_c(name, "caller"))
        return so_jj_bool(n->uses & SO_JJ_USES_CALLER);
    if (so_str_eq_c(name, "catch_kwargs"))
        return so_jj_bool(n->uses & SO_JJ_USES_KWARGS);
    if (so_str_eq_c(name, "catch_varargs"))
        return so_jj_bool(n->uses & SO_JJ_USES_VARARGS);
    if (!so_str_eq_c(name, "arguments"))
        return SO_JJ_MISSING_V;
    so_jj_list *l = so_jj_list_new(x, n->kids.n);
    for (size_t i = 0; i < n->kids.n; i++)
        so_jj_list_push(x, l, so_jj_str_borrow(x, n->kids.v[i]->name));
    return so_jj_tuple_val(l);
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
    if (obj.kind == SO_JJ_MACRO)
        return macro_attr(x, obj.macro->node, name);
    if (obj.kind == SO_JJ_CYCLER && so_str_eq_c(name, "current"))
        return obj.cycler->items->v[obj.cycler->pos];
    if (obj.kind == SO_JJ_TUPLE && obj.list->group) {
        if (so_str_eq_c(name, "grouper") || so_str_eq_c(name, "list"))
            return obj.list->v[name.ptr[0] == 'l'];
    }
    return SO_JJ_MISSING_V;
}

/* ---- global functions ---- */

METHOD(fn_raise) {
    UNUSED;
    so_str msg = so_jj_bytes(so_jj_to_str(x, p[0]));
    so_err_set(x->err, SO_EINVAL, "%.*s (raised by the template, line %d)", SO_JJ_ARG(msg),
               x->line);
    so_jj_exit(x, SO_EINVAL);
}

METHOD(fn_namespace) {
    UNUSED;
    so_jj_dict *d = so_jj_dict_new(x);
    so_jj_dict_update(x, d, one_or_none(x, args, "namespace()"), args);
    return (so_jj_val){.kind = SO_JJ_NAMESPACE, .dict = d};
}

METHOD(fn_dict) {
    UNUSED;
    so_jj_dict *d = so_jj_dict_new(x);
    so_jj_dict_update(x, d, one_or_none(x, args, "dict()"), args);
    return so_jj_dict_val(d);
}

METHOD(fn_range) {
    UNUSED;
    int64_t v[3];
    for (int i = 0; i < 3; i++)
        if (p[i].kind != SO_JJ_MISSING && !so_jj_is_int(p[i], &v[i]))
            so_jj_fail_type(x, "range() takes integers", p[i]);
    bool one = p[1].kind == SO_JJ_MISSING;
    so_jj_range r = {.start = one ? 0 : v[0], .stop = one ? v[0] : v[1], .step = 1};
    if (p[2].kind != SO_JJ_MISSING)
        r.step = v[2];
    if (r.step == 0)
        so_jj_fail(x, SO_EINVAL, "range() step must not be zero");
    uint64_t dist =
        r.step > 0 ? (uint64_t)r.stop - (uint64_t)r.start : (uint64_t)r.start - (uint64_t)r.stop;
    uint64_t step = r.step > 0 ? (uint64_t)r.step : (uint64_t)0 - (uint64_t)r.step;
    bool empty = r.step > 0 ? r.stop <= r.start : r.start <= r.stop;
    uint64_t n = empty ? 0 : (dist - 1) / step + 1;
    if (n > SO_JJ_MAX_RANGE)
        so_jj_fail(x, SO_ELIMIT, "range() of more than %d items", SO_JJ_MAX_RANGE);
    r.n = (size_t)n;
    return range_val(x, r);
}

METHOD(fn_cycler) {
    UNUSED;
    if (!args->n_pos || args->n_kw)
        so_jj_fail(x, SO_EINVAL, "cycler() needs at least one item");
    so_jj_cycler *c = SO_JJ_NEW(x, so_jj_cycler);
    c->items = so_jj_list_new(x, args->n_pos);
    for (size_t i = 0; i < args->n_pos; i++)
        so_jj_list_push(x, c->items, args->pos[i]);
    return (so_jj_val){.kind = SO_JJ_CYCLER, .cycler = c};
}

METHOD(fn_joiner) {
    UNUSED;
    so_jj_joiner *j = SO_JJ_NEW(x, so_jj_joiner);
    j->sep = p[0].kind == SO_JJ_MISSING ? so_jj_str_c(x, ", ") : p[0];
    return (so_jj_val){.kind = SO_JJ_JOINER, .joiner = j};
}

/* The time is naive, as the reference's: %z and %Z are empty, and %f (microseconds) is 0. */
static void date_format(so_jj *x, so_str fmt, so_jj_buf *out) {
    for (size_t i = 0; i < fmt.len; i++) {
        char c = i + 1 < fmt.len ? fmt.ptr[i + 1] : '\0';
        if (fmt.ptr[i] == '%' && c == 'f')
            so_jj_buf_add(x, out, SO_STR("000000"));
        else if (fmt.ptr[i] != '%' || (c != 'z' && c != 'Z')) {
            so_jj_buf_add(x, out, (so_str){fmt.ptr + i, fmt.ptr[i] == '%' && c ? 2 : 1});
            i += fmt.ptr[i] == '%' && c;
            continue;
        }
        i++;
    }
    so_jj_buf_add(x, out, (so_str){"|", 2}); /* so that an empty date is not taken for a failure */
}

METHOD(fn_strftime_now) {
    UNUSED;
    char text[1024];
    struct tm tm;
    time_t now = x->now ? (time_t)x->now : time(NULL);
    if (p[0].kind != SO_JJ_STR || memchr(p[0].s->ptr, '\0', p[0].s->len))
        so_jj_fail(x, SO_EINVAL, "strftime_now() takes a format string");
    if (!localtime_r(&now, &tm))
        so_jj_fail(x, SO_ERANGE, "the time %lld has no date", (long long)now);
    so_jj_buf fmt = {0};
    date_format(x, so_jj_bytes(p[0]), &fmt);
    size_t n = strftime(text, sizeof text, fmt.data, &tm), chars, bad;
    if (!n || !so_jj_utf8_check((so_str){text, n}, &chars, &bad))
        so_jj_fail(x, SO_ELIMIT, "strftime_now(): the date is too long");
    return so_jj_str_copy(x, (so_str){text, n - 1});
}

const so_jj_func *so_jj_find_global(so_str name) {
    static const so_jj_func GLOBALS[] = {
        {"raise_exception", fn_raise, "message", 1},
        {"strftime_now", fn_strftime_now, "format", 1},
        {"namespace", fn_namespace, NULL, 0},
        {"dict", fn_dict, NULL, 0},
        {"range", fn_range, "/start,stop,step", 1},
        {"cycler", fn_cycler, NULL, 0},
        {"joiner", fn_joiner, "sep", 0},
        {"lipsum", NULL, NULL, 0},
    };
    return so_jj_find_func(GLOBALS, SO_LEN(GLOBALS), name);
}
