/* Iteration: strings by character, lists by item, dicts by key, lazy sequences once; and for loops
 * with their filter and one item of look-ahead.
 *
 * An iterator holds an index, not a copy, so it sees items appended during the iteration, as in
 * Python; a dict that changes its size meanwhile is an error. A loop's filter is evaluated when the
 * next item is needed, not before the loop: the body may change what the filter reads. */
#include "jinja/impl.h"

bool so_jj_iterable(so_jj_val v) {
    switch (v.kind) {
    case SO_JJ_UNDEFINED:
    case SO_JJ_STR:
    case SO_JJ_LIST:
    case SO_JJ_TUPLE:
    case SO_JJ_DICT:
    case SO_JJ_ITER:
        return true;
    default:
        return false;
    }
}

so_jj_iter so_jj_iter_of(so_jj *x, so_jj_val v) {
    if (!so_jj_iterable(v))
        so_jj_fail(x, SO_EINVAL, "'%s' object is not iterable", so_jj_type(v));
    so_jj_iter it = {.src = v};
    if (v.kind == SO_JJ_DICT)
        it.n_at_start = v.dict->n;
    else if (v.kind == SO_JJ_STR)
        it.p = v.s->ptr;
    return it;
}

static bool next_char(so_jj *x, so_jj_iter *it, so_jj_val *out) {
    const char *end = it->src.s->ptr + it->src.s->len;
    if (it->p == end)
        return false;
    size_t n;
    so_jj_cp_at(it->p, end, &n);
    *out = so_jj_str_borrow(x, (so_str){it->p, n});
    it->p += n;
    return true;
}

static bool next_key(so_jj *x, so_jj_iter *it, so_jj_val *out) {
    const so_jj_dict *d = it->src.dict;
    if (d->n != it->n_at_start)
        so_jj_fail(x, SO_EINVAL, "dictionary changed size during iteration");
    if (it->i == d->n)
        return false;
    *out = d->e[it->i++].key;
    return true;
}

bool so_jj_iter_next(so_jj *x, so_jj_iter *it, so_jj_val *out) {
    so_jj_tick(x, 1);
    switch (it->src.kind) {
    case SO_JJ_STR:
        return next_char(x, it, out);
    case SO_JJ_LIST:
    case SO_JJ_TUPLE:
        if (it->i >= it->src.list->n)
            return false;
        *out = it->src.list->v[it->i++];
        return true;
    case SO_JJ_DICT:
        return next_key(x, it, out);
    case SO_JJ_ITER: {
        so_jj_gen *g = it->src.gen;
        so_jj_enter(x);
        bool more = g->next(x, g, out);
        so_jj_leave(x);
        return more;
    }
    default:
        return false;
    }
}

so_jj_list *so_jj_collect(so_jj *x, so_jj_val v) {
    so_jj_list *l = so_jj_list_new(x, 4);
    so_jj_iter it = so_jj_iter_of(x, v);
    so_jj_val item;
    while (so_jj_iter_next(x, &it, &item))
        so_jj_list_push(x, l, item);
    return l;
}

so_jj_val so_jj_gen_val(so_jj_gen *g) { return (so_jj_val){.kind = SO_JJ_ITER, .gen = g}; }

/* ---- for loops ---- */

so_jj_loop *so_jj_loop_new(so_jj *x, const so_jj_node *node, so_jj_val iterable) {
    so_jj_loop *l = SO_JJ_NEW(x, so_jj_loop);
    l->it = so_jj_iter_of(x, iterable);
    l->node = node;
    l->frame = x->frame;
    l->index0 = l->length = -1;
    if (node->c)
        so_jj_enter_scope(x, node->test_scope);
    return l;
}

/* The next item that passes the loop's filter. */
static bool pull(so_jj *x, so_jj_loop *l, so_jj_val *out) {
    while (so_jj_iter_next(x, &l->it, out)) {
        if (!l->node->c || l->rest_stored)
            return true;
        so_jj_frame *frame = x->frame;
        x->frame = l->frame;
        so_jj_assign(x, l->node->kids.v[0], *out);
        bool keep = so_jj_truth(so_jj_eval(x, l->node->c));
        if (keep && l->node->a->kind == SO_JJ_N_TUPLE) /* as in Jinja2, the item becomes a tuple */
            *out = so_jj_eval(x, l->node->kids.v[0]);
        x->frame = frame;
        if (keep)
            return true;
    }
    return false;
}

bool so_jj_loop_next(so_jj *x, so_jj_loop *l, so_jj_val *out) {
    if (l->after.kind != SO_JJ_MISSING)
        *out = l->after;
    else if (!pull(x, l, out))
        return false;
    l->after = SO_JJ_MISSING_V;
    l->index0++;
    l->before = l->current;
    l->current = *out;
    return true;
}

static bool peek(so_jj *x, so_jj_loop *l) {
    return l->after.kind != SO_JJ_MISSING || pull(x, l, &l->after);
}

/* If the length is unknown, the remaining items are computed now and stored for the iteration. */
int64_t so_jj_loop_length(so_jj *x, so_jj_loop *l) {
    size_t n;
    if (l->length >= 0)
        return l->length;
    if (!l->node->c && so_jj_len(l->it.src, &n)) {
        l->length = (int64_t)n;
        return l->length;
    }
    so_jj_list *rest = so_jj_list_new(x, 4);
    so_jj_val v;
    while (pull(x, l, &v))
        so_jj_list_push(x, rest, v);
    l->rest_stored = true;
    l->it = so_jj_iter_of(x, so_jj_list_val(rest));
    l->length = (int64_t)rest->n + l->index0 + 1 + (l->after.kind != SO_JJ_MISSING);
    return l->length;
}

static SO_JJ_FN(loop_cycle) {
    if (!args->n_pos)
        so_jj_fail(x, SO_EINVAL, "no items for cycling given");
    return args->pos[(size_t)self.loop->index0 % args->n_pos];
}

static SO_JJ_FN(loop_changed) {
    so_jj_list *l = so_jj_list_new(x, args->n_pos);
    for (size_t i = 0; i < args->n_pos; i++)
        so_jj_list_push(x, l, args->pos[i]);
    so_jj_val now = so_jj_tuple_val(l), *last = &self.loop->changed;
    if (last->kind != SO_JJ_MISSING && so_jj_equal(x, *last, now))
        return so_jj_bool(false);
    *last = now;
    return so_jj_bool(true);
}

static const so_jj_func LOOP_METHODS[] = {
    {"cycle", loop_cycle, NULL, 0},
    {"changed", loop_changed, NULL, 0},
};

static so_jj_val neighbour(so_jj *x, so_jj_loop *l, bool next) {
    if (next)
        return peek(x, l) ? l->after : so_jj_undefined_hint(x, "there is no next item");
    return l->index0 > 0 ? l->before : so_jj_undefined_hint(x, "there is no previous item");
}

so_jj_val so_jj_loop_attr(so_jj *x, so_jj_loop *l, so_str name) {
    if (so_str_eq_c(name, "index"))
        return so_jj_int(l->index0 + 1);
    if (so_str_eq_c(name, "index0"))
        return so_jj_int(l->index0);
    if (so_str_eq_c(name, "first"))
        return so_jj_bool(l->index0 == 0);
    if (so_str_eq_c(name, "last"))
        return so_jj_bool(!peek(x, l));
    if (so_str_eq_c(name, "length"))
        return so_jj_int(so_jj_loop_length(x, l));
    if (so_str_eq_c(name, "revindex"))
        return so_jj_int(so_jj_loop_length(x, l) - l->index0);
    if (so_str_eq_c(name, "revindex0"))
        return so_jj_int(so_jj_loop_length(x, l) - l->index0 - 1);
    if (so_str_eq_c(name, "previtem") || so_str_eq_c(name, "nextitem"))
        return neighbour(x, l, name.ptr[0] == 'n');
    const so_jj_func *f = so_jj_find_func(LOOP_METHODS, SO_LEN(LOOP_METHODS), name);
    if (!f)
        return SO_JJ_MISSING_V;
    so_jj_method *m = SO_JJ_NEW(x, so_jj_method);
    *m = (so_jj_method){{.kind = SO_JJ_LOOP, .loop = l}, f};
    return (so_jj_val){.kind = SO_JJ_METHOD, .method = m};
}
