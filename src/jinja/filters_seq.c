/* Filters on sequences: selecting, mapping, sorting, joining, aggregating.
 *
 * map, select, reject, selectattr, rejectattr, unique and items are lazy as in Jinja: their result
 * can be iterated once, has no length and is always true. Sorting is a stable merge sort, because
 * Python's is stable; comparing keys of types without an order is an error. */
#include "jinja/impl.h"

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
        if (all_digits(part) && so_jj_parse_int(x, part, &i))
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
    return v.kind == SO_JJ_STR ? so_jj_recase(x, v, SO_JJ_TO_LOWER, SO_JJ_TO_LOWER) : v;
}

/* What sort, unique, min and max compare: the value at the path, in lower case if `fold`. */
static so_jj_val path_key(so_jj *x, so_jj_val item, const so_jj_list *path, bool fold) {
    so_jj_val v = get_path(x, item, path, SO_JJ_MISSING_V);
    return fold ? fold_case(x, v) : v;
}

/* ---- lazy filters ---- */

static so_jj_gen *gen_new(so_jj *x, so_jj_val src, so_jj_gen_fn *next) {
    so_jj_gen *g = SO_JJ_NEW(x, so_jj_gen);
    g->src.src = src; /* the iterator is made at the first use, as for a generator */
    g->next = next;
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

/* The filter or test named by an argument. Called at the first item, so that an unknown name fails
 * only then, as in Jinja. */
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
    if (!g->started && !so_jj_truth(g->src.src))
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

static SO_JJ_FN(f_map) {
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

/* g->path: the attribute to test, or NULL for the item itself; g->n: index of the test's name in
 * the arguments. */
static bool select_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    if (!g->started && !so_jj_truth(g->src.src))
        return false;
    if (!g->started && g->n > (int64_t)g->args.n_pos)
        so_jj_fail(x, SO_EINVAL, "selectattr and rejectattr need the name of an attribute");
    if (!g->started && (int64_t)g->args.n_pos > g->n)
        g->func = named_func(x, g->args.pos[g->n], false);
    so_jj_args rest = rest_args(&g->args, (size_t)g->n + 1);
    while (gen_next(x, g, out)) {
        so_jj_val v = g->path ? get_path(x, *out, g->path, SO_JJ_MISSING_V) : *out;
        bool keep = so_jj_truth(g->func ? so_jj_call_func(x, g->func, v, &rest) : v);
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

static SO_JJ_FN(f_select) { return select_or_reject(x, self, args, false, false); }
static SO_JJ_FN(f_reject) { return select_or_reject(x, self, args, false, true); }
static SO_JJ_FN(f_selectattr) { return select_or_reject(x, self, args, true, false); }
static SO_JJ_FN(f_rejectattr) { return select_or_reject(x, self, args, true, true); }

/* g->negate: case_sensitive. */
static bool unique_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    while (gen_next(x, g, out)) {
        so_jj_val key = path_key(x, *out, g->path, !g->negate), seen;
        if (so_jj_dict_get(x, g->seen, key, &seen))
            continue;
        so_jj_dict_set(x, g->seen, key, SO_JJ_NONE_V);
        return true;
    }
    return false;
}

/* p: case_sensitive, attribute */
static SO_JJ_FN(f_unique) {
    so_jj_gen *g = gen_new(x, self, unique_next);
    g->seen = so_jj_dict_new(x);
    g->path = attr_path(x, p[1]);
    g->negate = so_jj_flag(p[0]);
    return so_jj_gen_val(g);
}

static bool items_next(so_jj *x, so_jj_gen *g, so_jj_val *out) {
    if (!g->started && g->src.src.kind == SO_JJ_UNDEFINED)
        return false;
    if (!g->started) {
        if (g->src.src.kind != SO_JJ_DICT)
            so_jj_fail_type(x, "items needs a mapping", g->src.src);
        g->src.src = so_jj_list_val(so_jj_dict_items(x, g->src.src.dict));
    }
    return gen_next(x, g, out);
}

static SO_JJ_FN(f_items) { return so_jj_gen_val(gen_new(x, self, items_next)); }

/* ---- first, last, length, list, reverse, join ---- */

static SO_JJ_FN(f_first) {
    so_jj_val v;
    so_jj_iter it = so_jj_iter_of(x, self);
    return so_jj_iter_next(x, &it, &v)
               ? v
               : so_jj_undefined_hint(x, "no first item, sequence was empty");
}

static bool reversible(so_jj_val v) {
    return v.kind == SO_JJ_STR || v.kind == SO_JJ_LIST || v.kind == SO_JJ_TUPLE ||
           v.kind == SO_JJ_DICT || v.kind == SO_JJ_UNDEFINED;
}

static SO_JJ_FN(f_last) {
    if (!reversible(self))
        so_jj_fail(x, SO_EINVAL, "last: '%s' object is not reversible", so_jj_type(self));
    so_jj_list *l = self.kind == SO_JJ_LIST ? self.list : so_jj_collect(x, self);
    return l->n ? l->v[l->n - 1] : so_jj_undefined_hint(x, "no last item, sequence was empty");
}

static SO_JJ_FN(f_length) {
    size_t n;
    if (!so_jj_len(self, &n))
        so_jj_fail(x, SO_EINVAL, "object of type '%s' has no length", so_jj_type(self));
    return so_jj_int((int64_t)n);
}

static SO_JJ_FN(f_list) { return so_jj_list_val(so_jj_collect(x, self)); }

/* As in Jinja: a string for a string, an iterator if Python's reversed() works, else a list. */
static SO_JJ_FN(f_reverse) {
    if (self.kind == SO_JJ_STR)
        return so_jj_slice(x, self, SO_JJ_NONE_V, SO_JJ_NONE_V, so_jj_int(-1));
    so_jj_list *l = so_jj_collect(x, self), *r = so_jj_list_new(x, l->n);
    for (size_t i = l->n; i-- > 0;)
        so_jj_list_push(x, r, l->v[i]);
    if (!reversible(self))
        return so_jj_list_val(r);
    return so_jj_gen_val(gen_new(x, so_jj_list_val(r), gen_next));
}

/* p: d, attribute */
static SO_JJ_FN(f_join) {
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

/* Tests equality first, because some types have no <: [none, none]|sort works, as in Jinja. */
static bool before(so_jj *x, so_jj_val a, so_jj_val b) {
    return !so_jj_equal(x, a, b) && so_jj_less(x, a, b);
}

/* Stable, also with `reverse`: equal keys keep their order, as in Python. */
static void merge_sort(so_jj *x, keyed *v, keyed *tmp, size_t n, bool reverse) {
    if (n < 2)
        return;
    size_t half = n / 2, i = 0, j = half, k = 0;
    merge_sort(x, v, tmp, half, reverse);
    merge_sort(x, v + half, tmp, n - half, reverse);
    while (i < half && j < n) {
        bool second = reverse ? before(x, v[i].key, v[j].key) : before(x, v[j].key, v[i].key);
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

/* p: reverse, case_sensitive, attribute */
static SO_JJ_FN(f_sort) {
    so_jj_list *l = so_jj_collect(x, self), *path = attr_path(x, p[2]);
    bool fold = !so_jj_flag(p[1]);
    if (p[2].kind == SO_JJ_STR && memchr(p[2].s->ptr, ',', p[2].s->len))
        so_jj_fail(x, SO_EUNSUPPORTED, "sort by more than one attribute is not supported");
    keyed *v = so_jj_alloc(x, l->n, sizeof *v);
    for (size_t i = 0; i < l->n; i++)
        v[i] = (keyed){path_key(x, l->v[i], path, fold), l->v[i]};
    return so_jj_list_val(sorted(x, v, l->n, so_jj_flag(p[0])));
}

/* p: case_sensitive, by, reverse */
static SO_JJ_FN(f_dictsort) {
    so_str by = p[1].kind == SO_JJ_STR ? so_jj_bytes(p[1]) : SO_STR("key");
    bool by_key = so_str_eq_c(by, "key");
    if (!by_key && !so_str_eq_c(by, "value"))
        so_jj_fail(x, SO_EINVAL, "dictsort sorts by \"key\" or \"value\"");
    if (self.kind != SO_JJ_DICT)
        so_jj_fail_type(x, "dictsort needs a mapping", self);
    const so_jj_dict *d = self.dict;
    keyed *v = so_jj_alloc(x, d->n, sizeof *v);
    for (size_t i = 0; i < d->n; i++) {
        so_jj_val key = by_key ? d->e[i].key : d->e[i].value;
        v[i].key = so_jj_flag(p[0]) ? key : fold_case(x, key);
        v[i].value = so_jj_pair(x, d->e[i].key, d->e[i].value);
    }
    return so_jj_list_val(sorted(x, v, d->n, so_jj_flag(p[2])));
}

/* p: case_sensitive, attribute */
static so_jj_val extreme(so_jj *x, so_jj_val self, const so_jj_val *p, bool max) {
    so_jj_list *path = attr_path(x, p[1]);
    so_jj_iter it = so_jj_iter_of(x, self);
    so_jj_val item, best, best_key = SO_JJ_MISSING_V;
    bool fold = !so_jj_flag(p[0]);
    while (so_jj_iter_next(x, &it, &item)) {
        so_jj_val key = path_key(x, item, path, fold);
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

static SO_JJ_FN(f_min) { return extreme(x, self, p, false); }
static SO_JJ_FN(f_max) { return extreme(x, self, p, true); }

/* p: attribute, start */
static SO_JJ_FN(f_sum) {
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
    {"first", f_first, "", 0},
    {"last", f_last, "", 0},
    {"length", f_length, "", 0},
    {"count", f_length, "", 0},
    {"list", f_list, "", 0},
    {"reverse", f_reverse, "", 0},
    {"join", f_join, "d,attribute", 0},
    {"sort", f_sort, "reverse,case_sensitive,attribute", 0},
    {"dictsort", f_dictsort, "case_sensitive,by,reverse", 0},
    {"min", f_min, "case_sensitive,attribute", 0},
    {"max", f_max, "case_sensitive,attribute", 0},
    {"sum", f_sum, "attribute,start", 0},
};
const size_t so_jj_n_seq_filters = SO_LEN(so_jj_seq_filters);
