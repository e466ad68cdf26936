/* Filters on sequences: selecting, mapping, sorting, grouping, joining.
 *
 * map, select and their kin are lazy as in Jinja: they give something that can be walked once, has
 * no length and is always true. Sorting is a stable merge sort, since Python's is stable; comparing
 * keys of kinds that have no order is an error. */
#include "jinja/impl.h"

#define FILTER(name) \
    static so_jj_val name(so_jj *x, so_jj_val self, const so_jj_args *args, const so_jj_val *p)
#define UNUSED (void)x, (void)self, (void)args, (void)p

static bool flag(so_jj *x, so_jj_val v) { return v.kind != SO_JJ_MISSING && so_jj_truth(x, v); }
static bool given(so_jj_val v) { return v.kind != SO_JJ_MISSING && v.kind != SO_JJ_NONE; }

/* ---- attribute paths: "a.b.0" ---- */

static bool all_digits(so_str s) {
    for (size_t i = 0; i < s.len; i++)
        if (s.ptr[i] < '0' || s.ptr[i] > '9')
            return false;
    return s.len > 0;
}

static void push_path(so_jj *x, so_jj_list *path, so_str s) {
    for (;;) {
        const char *dot = s.len ? memchr(s.ptr, '.', s.len) : NULL;
        so_str part = {s.ptr, dot ? (size_t)(dot - s.ptr) : s.len};
        int64_t i;
        if (all_digits(part) && so_jj_parse_int(x, part, 10, &i))
            so_jj_list_push(x, path, so_jj_int(i));
        else
            so_jj_list_push(x, path, so_jj_str_borrow(x, part));
        if (!dot)
            return;
        s = (so_str){dot + 1, s.len - part.len - 1};
    }
}

static so_jj_list *attr_path(so_jj *x, so_jj_val attr) {
    so_jj_list *path = so_jj_list_new(x, 2);
    if (attr.kind == SO_JJ_STR)
        push_path(x, path, so_jj_bytes(attr));
    else if (given(attr))
        so_jj_list_push(x, path, attr);
    return path;
}

static so_jj_val get_path(so_jj *x, so_jj_val v, const so_jj_list *path, so_jj_val otherwise) {
    for (size_t i = 0; i < path->n; i++) {
        v = so_jj_getitem(x, v, path->v[i]);
        if (v.kind == SO_JJ_UNDEFINED && given(otherwise))
            v = otherwise;
    }
    return v;
}

static so_jj_val fold_case(so_jj *x, so_jj_val v) {
    if (v.kind != SO_JJ_STR)
        return v;
    return so_jj_recase(x, so_jj_bytes(v), SO_JJ_TO_LOWER);
}

/* ---- lazy filters ---- */

static so_jj_gen *gen_new(so_jj *x, so_jj_val src, so_jj_gen_fn *next) {
    so_jj_gen *g = SO_JJ_NEW(x, so_jj_gen);
    g->src.src = src; /* walked from its first use on, as a generator is */
    g->next = next;
    g->type = "generator";
    return g;
}

static bool gen_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    if (!g->started)
        g->src = so_jj_iter_of(x, g->src.src);
    g->started = true;
    return so_jj_iter_next(x, &g->src, out);
}

static so_jj_args rest_args(const so_jj_args *a, size_t skip) {
    so_jj_args r = *a;
    skip = SO_MIN(skip, r.n_pos);
    r.pos += skip;
    r.n_pos -= skip;
    return r;
}

static so_jj_val keyword(const so_jj_args *a, const char *name) {
    for (size_t i = 0; i < a->n_kw; i++)
        if (so_str_eq_c(so_jj_bytes(a->kw[i].key), name))
            return a->kw[i].value;
    return SO_JJ_MISSING_V;
}

/* The filter or test that an argument names; what is unknown fails when it is first used. */
static const so_jj_func *named_func(so_jj *x, so_jj_val name, bool filter) {
    const so_jj_func *f = NULL;
    if (name.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, name);
    if (name.kind == SO_JJ_STR)
        f = filter ? so_jj_find_filter(so_jj_bytes(name)) : so_jj_find_test(so_jj_bytes(name));
    if (!f)
        so_jj_fail(x, SO_EUNSUPPORTED, "unknown %s '%.*s'", filter ? "filter" : "test",
                   SO_JJ_ARG(so_jj_bytes(so_jj_to_str(x, name))));
    return f;
}

static bool map_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    if (!g->started && !so_jj_truth(x, g->src.src))
        return false;
    if (!g->started && !g->path) {
        if (!g->args.n_pos)
            so_jj_fail(x, SO_EINVAL, "map requires a filter argument");
        g->func = named_func(x, g->args.pos[0], true);
    }
    if (!gen_next(x, g, out))
        return false;
    so_jj_args rest = rest_args(&g->args, 1);
    *out = g->path ? get_path(x, *out, g->path, g->a) : so_jj_call_func(x, g->func, *out, &rest);
    return true;
}

FILTER(f_map) {
    UNUSED;
    so_jj_gen *g = gen_new(x, self, map_next);
    so_jj_val attr = keyword(args, "attribute");
    g->args = *args;
    if (!args->n_pos && attr.kind != SO_JJ_MISSING) {
        g->path = attr_path(x, attr);
        g->a = keyword(args, "default");
        if (args->n_kw > 1u + (g->a.kind != SO_JJ_MISSING))
            so_jj_fail(x, SO_EINVAL, "map: unexpected keyword argument");
    }
    return so_jj_gen_val(g);
}

/* path: look at this attribute; n: arguments before the test's name */
static bool select_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    if (!g->started && !so_jj_truth(x, g->src.src))
        return false;
    if (!g->started && g->n > (int64_t)g->args.n_pos)
        so_jj_fail(x, SO_EINVAL, "selectattr and rejectattr need the name of an attribute");
    if (!g->started && (int64_t)g->args.n_pos > g->n)
        g->func = named_func(x, g->args.pos[g->n], false);
    so_jj_args rest = rest_args(&g->args, (size_t)g->n + 1);
    while (gen_next(x, g, out)) {
        so_jj_val v = g->path ? get_path(x, *out, g->path, SO_JJ_MISSING_V) : *out;
        bool keep = so_jj_truth(x, g->func ? so_jj_call_func(x, g->func, v, &rest) : v);
        if (keep != g->negate)
            return true;
    }
    return false;
}

static so_jj_val select_or_reject(so_jj *x, so_jj_val self, const so_jj_args *args, bool attr,
                                  bool negate) {
    so_jj_gen *g = gen_new(x, self, select_next);
    g->args = *args;
    g->negate = negate;
    g->n = attr;
    if (attr && args->n_pos)
        g->path = attr_path(x, args->pos[0]);
    return so_jj_gen_val(g);
}

FILTER(f_select) {
    UNUSED;
    return select_or_reject(x, self, args, false, false);
}

FILTER(f_reject) {
    UNUSED;
    return select_or_reject(x, self, args, false, true);
}

FILTER(f_selectattr) {
    UNUSED;
    return select_or_reject(x, self, args, true, false);
}

FILTER(f_rejectattr) {
    UNUSED;
    return select_or_reject(x, self, args, true, true);
}

static bool unique_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    while (gen_next(x, g, out)) {
        so_jj_val key = get_path(x, *out, g->path, SO_JJ_MISSING_V), seen;
        if (!g->negate)
            key = fold_case(x, key);
        if (so_jj_dict_get(x, g->seen, key, &seen))
            continue;
        so_jj_dict_set(x, g->seen, key, SO_JJ_NONE_V);
        return true;
    }
    return false;
}

/* p: case_sensitive, attribute */
FILTER(f_unique) {
    UNUSED;
    so_jj_gen *g = gen_new(x, self, unique_next);
    g->seen = so_jj_dict_new(x);
    g->path = attr_path(x, p[1]);
    g->negate = flag(x, p[0]);
    return so_jj_gen_val(g);
}

static bool items_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    if (!g->started && g->src.src.kind == SO_JJ_UNDEFINED)
        return false;
    if (!g->started) {
        if (g->src.src.kind != SO_JJ_DICT)
            so_jj_fail_type(x, "items needs a mapping", g->src.src);
        so_jj_view *v = SO_JJ_NEW(x, so_jj_view);
        *v = (so_jj_view){g->src.src.dict, SO_JJ_ITEMS};
        g->src.src = (so_jj_val){.kind = SO_JJ_VIEW, .view = v};
    }
    return gen_next(x, g, out);
}

FILTER(f_items) {
    UNUSED;
    return so_jj_gen_val(gen_new(x, self, items_next));
}

/* ---- batch, slice ---- */

/* size: of a batch; a: the filling; b: the item that began the next one */
static bool batch_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    so_jj_list *l = so_jj_list_new(x, 4);
    so_jj_val v = g->b;
    bool more = v.kind != SO_JJ_MISSING || gen_next(x, g, &v);
    for (g->b = SO_JJ_MISSING_V; more; more = gen_next(x, g, &v)) {
        if (l->n && so_jj_equal(x, so_jj_int((int64_t)l->n), g->size)) {
            g->b = v;
            break;
        }
        so_jj_list_push(x, l, v);
    }
    if (!l->n)
        return false;
    while (!more && given(g->a) && so_jj_less(x, so_jj_int((int64_t)l->n), g->size))
        so_jj_list_push(x, l, g->a);
    *out = so_jj_list_val(l);
    return true;
}

/* p: linecount, fill_with */
FILTER(f_batch) {
    UNUSED;
    so_jj_gen *g = gen_new(x, self, batch_next);
    g->size = p[0];
    g->a = p[1];
    return so_jj_gen_val(g);
}

/* size: number of slices; path: all items; n: slices given so far */
static bool slice_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    if (!g->started)
        g->path = so_jj_collect(x, g->src.src);
    g->started = true;
    int64_t slices = so_jj_int_arg(x, g->size, 0), total = (int64_t)g->path->n, k = g->n++;
    if (slices == 0)
        so_jj_fail(x, SO_EINVAL, "slice: the number of slices must not be 0");
    if (k >= slices)
        return false;
    int64_t each = total / slices, longer = total % slices;
    int64_t start = k * each + SO_MIN(k, longer), end = start + each + (k < longer);
    so_jj_list *l = so_jj_list_new(x, 4);
    for (int64_t i = start; i < end; i++)
        so_jj_list_push(x, l, g->path->v[i]);
    if (given(g->a) && k >= longer)
        so_jj_list_push(x, l, g->a);
    *out = so_jj_list_val(l);
    return true;
}

/* p: slices, fill_with */
FILTER(f_slice) {
    UNUSED;
    so_jj_gen *g = gen_new(x, self, slice_next);
    g->size = p[0];
    g->a = p[1];
    return so_jj_gen_val(g);
}

/* ---- first, last, length, list, reverse, join ---- */

FILTER(f_first) {
    UNUSED;
    so_jj_val v;
    so_jj_iter it = so_jj_iter_of(x, self);
    return so_jj_iter_next(x, &it, &v)
               ? v
               : so_jj_undefined_hint(x, "no first item, sequence was empty");
}

static bool reversible(so_jj_val v) {
    return v.kind == SO_JJ_STR || v.kind == SO_JJ_LIST || v.kind == SO_JJ_TUPLE ||
           v.kind == SO_JJ_DICT || v.kind == SO_JJ_RANGE || v.kind == SO_JJ_VIEW ||
           v.kind == SO_JJ_UNDEFINED;
}

FILTER(f_last) {
    UNUSED;
    if (!reversible(self))
        so_jj_fail(x, SO_EINVAL, "last: '%s' object is not reversible", so_jj_type(self));
    so_jj_list *l = self.kind == SO_JJ_LIST ? self.list : so_jj_collect(x, self);
    return l->n ? l->v[l->n - 1] : so_jj_undefined_hint(x, "no last item, sequence was empty");
}

FILTER(f_length) {
    UNUSED;
    size_t n;
    if (!so_jj_len(x, self, &n))
        so_jj_fail(x, SO_EINVAL, "object of type '%s' has no length", so_jj_type(self));
    return so_jj_int((int64_t)n);
}

FILTER(f_list) {
    UNUSED;
    return so_jj_list_val(so_jj_collect(x, self));
}

FILTER(f_reverse) {
    UNUSED;
    if (self.kind == SO_JJ_STR)
        return so_jj_slice(x, self, SO_JJ_NONE_V, SO_JJ_NONE_V, so_jj_int(-1));
    so_jj_list *l = so_jj_collect(x, self), *r = so_jj_list_new(x, l->n);
    for (size_t i = l->n; i-- > 0;)
        so_jj_list_push(x, r, l->v[i]);
    if (!reversible(self))
        return so_jj_list_val(r);
    so_jj_gen *g = gen_new(x, so_jj_list_val(r), gen_next);
    g->type = "list_reverseiterator";
    return so_jj_gen_val(g);
}

/* p: d, attribute */
FILTER(f_join) {
    UNUSED;
    so_str sep = p[0].kind == SO_JJ_MISSING ? (so_str){0} : so_jj_bytes(so_jj_to_str(x, p[0]));
    so_jj_list *path = attr_path(x, p[1]);
    so_jj_iter it = so_jj_iter_of(x, self);
    so_jj_buf b = {0};
    so_jj_val v;
    for (size_t i = 0; so_jj_iter_next(x, &it, &v); i++) {
        if (i)
            so_jj_buf_add(x, &b, sep);
        so_jj_write_str(x, &b, get_path(x, v, path, SO_JJ_MISSING_V));
    }
    return so_jj_buf_str(x, &b);
}

/* ---- sorting ---- */

typedef struct keyed {
    so_jj_val key, value;
} keyed;

/* Stable; `reverse` keeps the order of equals, as Python's does. */
static void merge_sort(so_jj *x, keyed *v, keyed *tmp, size_t n, bool reverse) {
    if (n < 2)
        return;
    size_t half = n / 2, i = 0, j = half, k = 0;
    merge_sort(x, v, tmp, half, reverse);
    merge_sort(x, v + half, tmp, n - half, reverse);
    while (i < half && j < n) {
        bool second =
            reverse ? so_jj_less(x, v[i].key, v[j].key) : so_jj_less(x, v[j].key, v[i].key);
        tmp[k++] = second ? v[j++] : v[i++];
    }
    while (i < half)
        tmp[k++] = v[i++];
    while (j < n)
        tmp[k++] = v[j++];
    so_jj_tick(x, n);
    memcpy(v, tmp, n * sizeof *v);
}

static so_jj_list *sorted(so_jj *x, keyed *v, size_t n, bool reverse) {
    so_jj_list *l = so_jj_list_new(x, n);
    merge_sort(x, v, so_jj_alloc(x, n, sizeof *v), n, reverse);
    for (size_t i = 0; i < n; i++)
        so_jj_list_push(x, l, v[i].value);
    return l;
}

/* The keys of "a,b.c": a list of values per item, compared in order. */
static so_jj_val multi_key(so_jj *x, so_jj_val item, const so_jj_list *paths, bool fold) {
    so_jj_list *key = so_jj_list_new(x, paths->n);
    for (size_t i = 0; i < paths->n; i++) {
        so_jj_val v = get_path(x, item, paths->v[i].list, SO_JJ_MISSING_V);
        so_jj_list_push(x, key, fold ? fold_case(x, v) : v);
    }
    return so_jj_list_val(key);
}

static so_jj_list *attr_paths(so_jj *x, so_jj_val attr) {
    so_jj_list *paths = so_jj_list_new(x, 2);
    if (attr.kind != SO_JJ_STR) {
        so_jj_list_push(x, paths, so_jj_list_val(attr_path(x, attr)));
        return paths;
    }
    so_str s = so_jj_bytes(attr);
    for (;;) {
        const char *comma = s.len ? memchr(s.ptr, ',', s.len) : NULL;
        so_str part = {s.ptr, comma ? (size_t)(comma - s.ptr) : s.len};
        so_jj_list *path = so_jj_list_new(x, 2);
        push_path(x, path, part);
        so_jj_list_push(x, paths, so_jj_list_val(path));
        if (!comma)
            return paths;
        s = (so_str){comma + 1, s.len - part.len - 1};
    }
}

/* p: reverse, case_sensitive, attribute */
FILTER(f_sort) {
    UNUSED;
    so_jj_list *l = so_jj_collect(x, self), *paths = attr_paths(x, p[2]);
    keyed *v = so_jj_alloc(x, l->n, sizeof *v);
    for (size_t i = 0; i < l->n; i++)
        v[i] = (keyed){multi_key(x, l->v[i], paths, !flag(x, p[1])), l->v[i]};
    return so_jj_list_val(sorted(x, v, l->n, flag(x, p[0])));
}

/* p: case_sensitive, by, reverse */
FILTER(f_dictsort) {
    UNUSED;
    so_str by = p[1].kind == SO_JJ_STR ? so_jj_bytes(p[1]) : SO_STR("key");
    if (!so_str_eq_c(by, "key") && !so_str_eq_c(by, "value"))
        so_jj_fail(x, SO_EINVAL, "dictsort sorts by \"key\" or \"value\"");
    if (self.kind != SO_JJ_DICT)
        so_jj_fail_type(x, "dictsort needs a mapping", self);
    const so_jj_dict *d = self.dict;
    keyed *v = so_jj_alloc(x, d->n, sizeof *v);
    for (size_t i = 0; i < d->n; i++) {
        so_jj_val key = by.len == 3 ? d->e[i].key : d->e[i].value;
        v[i].key = flag(x, p[0]) ? key : fold_case(x, key);
        v[i].value = so_jj_pair(x, d->e[i].key, d->e[i].value);
    }
    return so_jj_list_val(sorted(x, v, d->n, flag(x, p[2])));
}

static so_jj_val group_tuple(so_jj *x, so_jj_val key, so_jj_list *items) {
    so_jj_val t = so_jj_pair(x, key, so_jj_list_val(items));
    t.list->group = true;
    return t;
}

/* p: attribute, default, case_sensitive. The group's key is that of its first item. */
FILTER(f_groupby) {
    UNUSED;
    so_jj_list *l = so_jj_collect(x, self), *path = attr_path(x, p[0]);
    bool fold = !flag(x, p[2]);
    keyed *v = so_jj_alloc(x, l->n, sizeof *v);
    for (size_t i = 0; i < l->n; i++) {
        so_jj_val key = get_path(x, l->v[i], path, p[1]);
        v[i] = (keyed){fold ? fold_case(x, key) : key, l->v[i]};
    }
    sorted(x, v, l->n, false);
    so_jj_list *out = so_jj_list_new(x, 4);
    for (size_t i = 0, j; i < l->n; i = j) {
        so_jj_list *items = so_jj_list_new(x, 4);
        for (j = i; j < l->n && so_jj_equal(x, v[j].key, v[i].key); j++)
            so_jj_list_push(x, items, v[j].value);
        if (j == i) /* a NaN: not even equal to itself */
            so_jj_list_push(x, items, v[j++].value);
        so_jj_list_push(x, out, group_tuple(x, get_path(x, v[i].value, path, p[1]), items));
    }
    return so_jj_list_val(out);
}

/* p: case_sensitive, attribute */
static so_jj_val extreme(so_jj *x, so_jj_val self, const so_jj_val *p, bool max) {
    so_jj_list *path = attr_path(x, p[1]);
    so_jj_iter it = so_jj_iter_of(x, self);
    so_jj_val item, best, best_key = SO_JJ_MISSING_V;
    bool fold = !flag(x, p[0]);
    while (so_jj_iter_next(x, &it, &item)) {
        so_jj_val key = get_path(x, item, path, SO_JJ_MISSING_V);
        key = fold ? fold_case(x, key) : key;
        bool better = best_key.kind == SO_JJ_MISSING ||
                      so_jj_compare(x, max ? SO_JJ_OP_GT : SO_JJ_OP_LT, key, best_key);
        if (better) {
            best = item;
            best_key = key;
        }
    }
    return best_key.kind == SO_JJ_MISSING
               ? so_jj_undefined_hint(x, "no aggregated item, sequence was empty")
               : best;
}

FILTER(f_min) {
    UNUSED;
    return extreme(x, self, p, false);
}

FILTER(f_max) {
    UNUSED;
    return extreme(x, self, p, true);
}

/* p: attribute, start */
FILTER(f_sum) {
    UNUSED;
    so_jj_list *path = attr_path(x, p[0]);
    so_jj_val total = p[1].kind == SO_JJ_MISSING ? so_jj_int(0) : p[1], v;
    if (total.kind == SO_JJ_STR)
        so_jj_fail(x, SO_EINVAL, "sum cannot add strings; use join");
    so_jj_iter it = so_jj_iter_of(x, self);
    while (so_jj_iter_next(x, &it, &v))
        total = so_jj_binary(x, SO_JJ_OP_ADD, total, get_path(x, v, path, SO_JJ_MISSING_V));
    return total;
}

const so_jj_func so_jj_seq_filters[] = {
    {"map", f_map, NULL, 0},
    {"select", f_select, NULL, 0},
    {"reject", f_reject, NULL, 0},
    {"selectattr", f_selectattr, NULL, 0},
    {"rejectattr", f_rejectattr, NULL, 0},
    {"unique", f_unique, "case_sensitive,attribute", 0},
    {"items", f_items, "", 0},
    {"batch", f_batch, "linecount,fill_with", 1},
    {"slice", f_slice, "slices,fill_with", 1},
    {"first", f_first, "", 0},
    {"last", f_last, "", 0},
    {"length", f_length, "", 0},
    {"count", f_length, "", 0},
    {"list", f_list, "", 0},
    {"reverse", f_reverse, "", 0},
    {"join", f_join, "d,attribute", 0},
    {"sort", f_sort, "reverse,case_sensitive,attribute", 0},
    {"dictsort", f_dictsort, "case_sensitive,by,reverse", 0},
    {"groupby", f_groupby, "attribute,default,case_sensitive", 1},
    {"min", f_min, "case_sensitive,attribute", 0},
    {"max", f_max, "case_sensitive,attribute", 0},
    {"sum", f_sum, "attribute,start", 0},
};
const size_t so_jj_n_seq_filters = SO_LEN(so_jj_seq_filters);
