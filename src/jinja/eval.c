/* Evaluates the expressions of a tree whose names are bound to slots (scope.c).
 *
 * Direct recursion over the tree: each node costs one step and one level of depth. Arguments of
 * filters, tests, methods and functions are bound to parameters here (so_jj_call_func), so a wrong
 * call gives the same errors everywhere. */
#include "jinja/impl.h"

/* ---- arguments ---- */

static void push_kw(so_jj *x, so_jj_args *a, size_t *cap, so_jj_val key, so_jj_val value) {
    for (size_t i = 0; i < a->n_kw; i++)
        if (so_jj_equal(x, a->kw[i].key, key))
            so_jj_fail(x, SO_EINVAL, "keyword argument '%.*s' is given twice",
                       SO_JJ_ARG(so_jj_bytes(key)));
    if (a->n_kw == *cap) {
        *cap = *cap ? *cap * 2 : 4;
        so_jj_entry *kw = so_jj_alloc(x, *cap, sizeof *kw);
        if (a->n_kw)
            memcpy(kw, a->kw, a->n_kw * sizeof *kw);
        a->kw = kw;
    }
    a->kw[a->n_kw++] = (so_jj_entry){.key = key, .value = value};
}

static void spread_kw(so_jj *x, so_jj_args *a, size_t *cap, so_jj_val d) {
    if (d.kind != SO_JJ_DICT)
        so_jj_fail_type(x, "the argument after ** must be a mapping", d);
    for (size_t i = 0; i < d.dict->n; i++) {
        if (d.dict->e[i].key.kind != SO_JJ_STR)
            so_jj_fail(x, SO_EINVAL, "keywords must be strings");
        push_kw(x, a, cap, d.dict->e[i].key, d.dict->e[i].value);
    }
}

/* Evaluates kids, extra, *b and **c of a CALL, FILTER or TEST. A call block adds `caller`. */
so_jj_args so_jj_eval_args(so_jj *x, const so_jj_node *n, const so_jj_val *caller) {
    so_jj_args a = {0};
    size_t cap = 0;
    so_jj_list *pos = so_jj_list_new(x, n->kids.n);
    for (size_t i = 0; i < n->kids.n; i++)
        so_jj_list_push(x, pos, so_jj_eval(x, n->kids.v[i]));
    if (n->b) {
        so_jj_iter it = so_jj_iter_of(x, so_jj_eval(x, n->b));
        for (so_jj_val v; so_jj_iter_next(x, &it, &v);)
            so_jj_list_push(x, pos, v);
    }
    for (size_t i = 0; i < n->extra.n; i++)
        push_kw(x, &a, &cap, so_jj_str_borrow(x, n->extra.v[i]->name),
                so_jj_eval(x, n->extra.v[i]->a));
    if (caller)
        push_kw(x, &a, &cap, so_jj_str_c(x, "caller"), *caller);
    if (n->c)
        spread_kw(x, &a, &cap, so_jj_eval(x, n->c));
    a.pos = pos->v;
    a.n_pos = pos->n;
    return a;
}

static so_str next_param(const char **params) {
    const char *start = *params, *comma = strchrnul(start, ',');
    *params = *comma ? comma + 1 : comma;
    return (so_str){start, (size_t)(comma - start)};
}

static bool take_kw(const so_jj_args *a, so_str name, so_jj_val *out) {
    for (size_t i = 0; i < a->n_kw; i++)
        if (so_str_eq(so_jj_bytes(a->kw[i].key), name)) {
            *out = a->kw[i].value;
            return true;
        }
    return false;
}

so_jj_val so_jj_call_func(so_jj *x, const so_jj_func *f, so_jj_val self, const so_jj_args *args) {
    so_jj_val p[SO_JJ_MAX_PARAMS] = {0};
    if (!f->params)
        return f->fn(x, self, args, p);
    const char *params = f->params;
    bool by_name = params[0] != '/';
    params += !by_name;
    size_t used_kw = 0, i = 0;
    for (; *params; i++) {
        so_str name = next_param(&params);
        SO_ASSERT_OP(i, <, SO_JJ_MAX_PARAMS);
        bool named = by_name && take_kw(args, name, &p[i]);
        used_kw += named;
        if (named && i < args->n_pos)
            so_jj_fail(x, SO_EINVAL, "%s() got two values for '%.*s'", f->name, SO_JJ_ARG(name));
        if (i < args->n_pos)
            p[i] = args->pos[i];
        else if (!named && (int)i < f->n_required)
            so_jj_fail(x, SO_EINVAL, "%s() needs the argument '%.*s'", f->name, SO_JJ_ARG(name));
    }
    if (args->n_pos > i)
        so_jj_fail(x, SO_EINVAL, "%s() takes at most %zu arguments, not %zu", f->name, i,
                   args->n_pos);
    if (used_kw < args->n_kw)
        so_jj_fail(x, SO_EINVAL, "%s() got an unexpected keyword argument", f->name);
    return f->fn(x, self, args, p);
}

so_jj_val so_jj_call(so_jj *x, so_jj_val f, const so_jj_args *args) {
    switch (f.kind) {
    case SO_JJ_MACRO:
        return so_jj_call_macro(x, f.macro, args);
    case SO_JJ_FUNC:
        return so_jj_call_func(x, f.func, SO_JJ_NONE_V, args);
    case SO_JJ_METHOD:
        return so_jj_call_func(x, f.method->func, f.method->self, args);
    case SO_JJ_JOINER: {
        bool used = f.joiner->used;
        f.joiner->used = true;
        return used ? f.joiner->sep : so_jj_str_c(x, "");
    }
    case SO_JJ_UNDEFINED:
        so_jj_fail_undefined(x, f);
    default:
        so_jj_fail(x, SO_EINVAL, "'%s' object is not callable", so_jj_type(f));
    }
}

/* ---- nodes ---- */

static so_jj_val eval_name(so_jj *x, const so_jj_node *n) {
    so_jj_frame *f = x->frame;
    for (uint32_t i = 0; i < n->hops; i++)
        f = f->up;
    so_jj_val v = f->slots[n->slot];
    return v.kind == SO_JJ_MISSING ? so_jj_undefined_var(x, n->name) : v;
}

static so_jj_val eval_items(so_jj *x, const so_jj_node *n) {
    so_jj_list *l = so_jj_list_new(x, n->kids.n);
    for (size_t i = 0; i < n->kids.n; i++)
        so_jj_list_push(x, l, so_jj_eval(x, n->kids.v[i]));
    return n->kind == SO_JJ_N_LIST ? so_jj_list_val(l) : so_jj_tuple_val(l);
}

static so_jj_val eval_dict(so_jj *x, const so_jj_node *n) {
    so_jj_dict *d = so_jj_dict_new(x);
    for (size_t i = 0; i < n->kids.n; i++) {
        so_jj_val key = so_jj_eval(x, n->kids.v[i]);
        so_jj_dict_set(x, d, key, so_jj_eval(x, n->extra.v[i]));
    }
    return so_jj_dict_val(d);
}

static so_jj_val eval_concat(so_jj *x, const so_jj_node *n) {
    so_jj_buf b = {0};
    for (size_t i = 0; i < n->kids.n; i++)
        so_jj_write_str(x, &b, so_jj_eval(x, n->kids.v[i]));
    return so_jj_buf_str(x, &b);
}

/* a < b < c evaluates each operand once and stops at the first comparison that is false. */
static so_jj_val eval_compare(so_jj *x, const so_jj_node *n) {
    so_jj_val left = so_jj_eval(x, n->a);
    for (size_t i = 0; i < n->kids.n; i++) {
        so_jj_val right = so_jj_eval(x, n->kids.v[i]->a);
        x->line = n->kids.v[i]->line;
        if (!so_jj_compare(x, n->kids.v[i]->op, left, right))
            return so_jj_bool(false);
        left = right;
    }
    return so_jj_bool(true);
}

static so_jj_val eval_cond(so_jj *x, const so_jj_node *n) {
    if (so_jj_truth(so_jj_eval(x, n->b)))
        return so_jj_eval(x, n->a);
    if (n->c)
        return so_jj_eval(x, n->c);
    so_jj_val hint = so_jj_str_printf(x,
                                      "the inline if-expression on line %d evaluated to false and "
                                      "no else section was defined.",
                                      n->line);
    return so_jj_undefined_hint(x, hint.s->ptr);
}

static so_jj_val eval_getitem(so_jj *x, const so_jj_node *n) {
    so_jj_val obj = so_jj_eval(x, n->a);
    if (n->b->kind != SO_JJ_N_SLICE) {
        so_jj_val key = so_jj_eval(x, n->b);
        x->line = n->line;
        return so_jj_getitem(x, obj, key);
    }
    const so_jj_node *s = n->b;
    so_jj_val start = s->a ? so_jj_eval(x, s->a) : SO_JJ_NONE_V;
    so_jj_val stop = s->b ? so_jj_eval(x, s->b) : SO_JJ_NONE_V;
    so_jj_val step = s->c ? so_jj_eval(x, s->c) : SO_JJ_NONE_V;
    x->line = n->line;
    return so_jj_slice(x, obj, start, stop, step);
}

static so_jj_val eval_call(so_jj *x, const so_jj_node *n) {
    so_jj_val f = so_jj_eval(x, n->a);
    so_jj_args args = so_jj_eval_args(x, n, NULL);
    x->line = n->line;
    return so_jj_call(x, f, &args);
}

static so_jj_val apply_function(so_jj *x, const so_jj_node *n, so_jj_val v) {
    so_jj_args args = so_jj_eval_args(x, n, NULL);
    x->line = n->line;
    if (!n->func)
        so_jj_fail(x, SO_EUNSUPPORTED, "unknown %s '%.*s'",
                   n->kind == SO_JJ_N_FILTER ? "filter" : "test", SO_JJ_ARG(n->name));
    return so_jj_call_func(x, n->func, v, &args);
}

so_jj_val so_jj_apply_filter(so_jj *x, const so_jj_node *n, so_jj_val v) {
    return apply_function(x, n, n->a ? so_jj_apply_filter(x, n->a, v) : v);
}

static so_jj_val eval_logic(so_jj *x, const so_jj_node *n) {
    so_jj_val left = so_jj_eval(x, n->a);
    if (so_jj_truth(left) == (n->kind == SO_JJ_N_OR))
        return left;
    return so_jj_eval(x, n->b);
}

static so_jj_val eval_binary(so_jj *x, const so_jj_node *n) {
    so_jj_val a = so_jj_eval(x, n->a), b = so_jj_eval(x, n->b);
    x->line = n->line;
    return so_jj_binary(x, n->op, a, b);
}

static so_jj_val eval_sign(so_jj *x, const so_jj_node *n) {
    so_jj_val v = so_jj_eval(x, n->a);
    x->line = n->line;
    if (n->kind == SO_JJ_N_NEG)
        return so_jj_negate(x, v);
    if (!so_jj_is_num(v))
        so_jj_fail_type(x, "unary - and + need a number", v);
    return v.kind == SO_JJ_BOOL ? so_jj_int(v.b) : v;
}

static so_jj_val eval_getattr(so_jj *x, const so_jj_node *n) {
    so_jj_val obj = so_jj_eval(x, n->a);
    x->line = n->line;
    return so_jj_getattr(x, obj, n->name);
}

static so_jj_val eval_node(so_jj *x, const so_jj_node *n) {
    switch (n->kind) {
    case SO_JJ_N_CONST:
        return n->value;
    case SO_JJ_N_NAME:
        return eval_name(x, n);
    case SO_JJ_N_TUPLE:
    case SO_JJ_N_LIST:
        return eval_items(x, n);
    case SO_JJ_N_DICT:
        return eval_dict(x, n);
    case SO_JJ_N_CONCAT:
        return eval_concat(x, n);
    case SO_JJ_N_BIN:
        return eval_binary(x, n);
    case SO_JJ_N_AND:
    case SO_JJ_N_OR:
        return eval_logic(x, n);
    case SO_JJ_N_NOT:
        return so_jj_bool(!so_jj_truth(so_jj_eval(x, n->a)));
    case SO_JJ_N_NEG:
    case SO_JJ_N_POS:
        return eval_sign(x, n);
    case SO_JJ_N_COMPARE:
        return eval_compare(x, n);
    case SO_JJ_N_COND:
        return eval_cond(x, n);
    case SO_JJ_N_GETATTR:
        return eval_getattr(x, n);
    case SO_JJ_N_GETITEM:
        return eval_getitem(x, n);
    case SO_JJ_N_CALL:
        return eval_call(x, n);
    case SO_JJ_N_FILTER:
    case SO_JJ_N_TEST:
        return apply_function(x, n, so_jj_eval(x, n->a));
    default:
        so_panic(__FILE__, __LINE__, "node kind %d is not an expression", (int)n->kind);
    }
}

so_jj_val so_jj_eval(so_jj *x, const so_jj_node *n) {
    so_jj_enter(x);
    so_jj_tick(x, 1);
    x->line = n->line;
    so_jj_val v = eval_node(x, n);
    so_jj_leave(x);
    return v;
}
