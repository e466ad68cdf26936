/* Executes the statements of a tree whose names are bound to slots (scope.c).
 *
 * Output is appended to x->out. Macros, set blocks, filter blocks and generation blocks capture it:
 * they replace x->out by a buffer of their own for the time of their body. break and continue are
 * return values that pass through the bodies up to their loop. */
#include "jinja/impl.h"

typedef enum flow { FLOW_NEXT, FLOW_BREAK, FLOW_CONTINUE } flow;

static flow exec_body(so_jj *x, const so_jj_nodes *body);

static void emit(so_jj *x, so_str s) {
    x->out_bytes += s.len;
    if (x->out_bytes > x->max_out)
        so_jj_fail(x, SO_ELIMIT, "more than %zu MiB of output", x->max_out >> 20);
    so_jj_buf_add(x, x->out, s);
}

static so_jj_frame *frame_new(so_jj *x, const so_jj_node *owner, so_jj_frame *up) {
    so_jj_frame *f = so_jj_alloc(x, 1, sizeof *f + owner->n_slots * sizeof f->slots[0]);
    f->up = up;
    return f; /* zeroed: every slot is SO_JJ_MISSING */
}

static so_jj_val *slot_at(so_jj *x, uint32_t hops, uint32_t slot) {
    so_jj_frame *f = x->frame;
    for (uint32_t i = 0; i < hops; i++)
        f = f->up;
    return &f->slots[slot];
}

static so_jj_val lookup(so_jj *x, so_str name) {
    so_jj_val v;
    if (so_jj_dict_get_str(x, x->vars, name, &v))
        return v;
    const so_jj_func *f = so_jj_find_global(name);
    return f ? (so_jj_val){.kind = SO_JJ_FUNC, .func = f} : SO_JJ_MISSING_V;
}

void so_jj_enter_scope(so_jj *x, const so_jj_scope *s) {
    for (size_t i = 0; i < s->n; i++) {
        const so_jj_sym *sym = &s->sym[i];
        so_jj_val *v = &x->frame->slots[sym->slot];
        if (sym->load == SO_JJ_RESOLVE)
            *v = lookup(x, sym->name);
        else if (sym->load == SO_JJ_ALIAS)
            *v = *slot_at(x, sym->from_hops, sym->from_slot);
        else if (sym->load == SO_JJ_UNSET)
            *v = SO_JJ_MISSING_V;
    }
}

/* ---- assignment ---- */

static void assign_namespace(so_jj *x, const so_jj_node *n, so_jj_val v) {
    so_jj_val ns = *slot_at(x, n->hops, n->slot);
    if (ns.kind != SO_JJ_NAMESPACE)
        so_jj_fail(x, SO_EINVAL, "'%.*s.%.*s': only attributes of a namespace can be set",
                   SO_JJ_ARG(n->name), SO_JJ_ARG(n->attr));
    so_jj_dict_set(x, ns.dict, so_jj_str_borrow(x, n->attr), v);
}

static void unpack(so_jj *x, const so_jj_node *target, so_jj_val v) {
    if (!so_jj_iterable(v))
        so_jj_fail(x, SO_EINVAL, "cannot unpack non-iterable '%s' object", so_jj_type(v));
    so_jj_list *l = so_jj_collect(x, v);
    if (l->n != target->kids.n)
        so_jj_fail(x, SO_EINVAL, "%s values to unpack: expected %zu, got %zu",
                   l->n > target->kids.n ? "too many" : "not enough", target->kids.n, l->n);
    for (size_t i = 0; i < l->n; i++)
        so_jj_assign(x, target->kids.v[i], l->v[i]);
}

void so_jj_assign(so_jj *x, const so_jj_node *target, so_jj_val v) {
    x->line = target->line;
    if (target->kind == SO_JJ_N_NAME)
        *slot_at(x, target->hops, target->slot) = v;
    else if (target->kind == SO_JJ_N_NSREF)
        assign_namespace(x, target, v);
    else
        unpack(x, target, v);
}

/* ---- captured output ---- */

static flow capture(so_jj *x, const so_jj_nodes *body, so_jj_val *text) {
    so_jj_buf *outer = x->out, b = {0};
    x->out = &b;
    flow f = exec_body(x, body);
    x->out = outer;
    *text = so_jj_buf_str(x, &b);
    return f;
}

static flow exec_set_block(so_jj *x, const so_jj_node *n) {
    so_jj_val text;
    so_jj_enter_scope(x, n->scope);
    flow f = capture(x, &n->body, &text);
    if (f != FLOW_NEXT)
        return f;
    so_jj_assign(x, n->a, n->b ? so_jj_apply_filter(x, n->b, text) : text);
    return FLOW_NEXT;
}

static void emit_value(so_jj *x, so_jj_val v) { emit(x, so_jj_bytes(so_jj_to_str(x, v))); }

/* Jinja2 does not convert the result of a filter or call block to a string: other types fail. */
static void emit_text(so_jj *x, so_jj_val v) {
    if (v.kind != SO_JJ_STR)
        so_jj_fail_type(x, "a filter or call block must give a string", v);
    emit(x, so_jj_bytes(v));
}

static flow exec_filter_block(so_jj *x, const so_jj_node *n) {
    so_jj_val text;
    so_jj_enter_scope(x, n->scope);
    flow f = capture(x, &n->body, &text);
    if (f == FLOW_NEXT)
        emit_text(x, so_jj_apply_filter(x, n->a, text));
    return f;
}

/* ---- macros ---- */

static so_jj_val take_kw(so_jj_args *a, so_str name) {
    for (size_t i = 0; i < a->n_kw; i++)
        if (so_str_eq(so_jj_bytes(a->kw[i].key), name)) {
            so_jj_val v = a->kw[i].value;
            memmove(a->kw + i, a->kw + i + 1, (a->n_kw - i - 1) * sizeof *a->kw);
            a->n_kw--;
            return v;
        }
    return SO_JJ_MISSING_V;
}

static so_jj_val *param_slot(const so_jj_node *n, so_jj_frame *f, so_str name) {
    for (size_t i = 0; i < n->scope->n; i++)
        if (so_str_eq(n->scope->sym[i].name, name))
            return &f->slots[n->scope->sym[i].slot];
    so_panic(__FILE__, __LINE__, "macro without its parameter");
}

/* Sets `caller`. Arguments without a parameter are an error. */
static void bind_rest(so_jj *x, const so_jj_node *n, so_jj_frame *f, so_jj_args *a,
                      bool found_caller) {
    if (!found_caller) {
        so_jj_val caller = take_kw(a, SO_STR("caller"));
        if (caller.kind == SO_JJ_MISSING || caller.kind == SO_JJ_NONE)
            caller = so_jj_undefined_hint(x, "No caller defined");
        *param_slot(n, f, SO_STR("caller")) = caller;
    }
    if (a->n_kw)
        so_jj_fail(x, SO_EINVAL, "macro '%.*s' takes no keyword argument '%.*s'",
                   SO_JJ_ARG(n->name), SO_JJ_ARG(so_jj_bytes(a->kw[0].key)));
    if (a->n_pos > n->kids.n)
        so_jj_fail(x, SO_EINVAL, "macro '%.*s' takes at most %zu arguments, not %zu",
                   SO_JJ_ARG(n->name), n->kids.n, a->n_pos);
}

static so_jj_val missing_param(so_jj *x, so_str name) {
    so_jj_buf b = {0};
    so_jj_buf_add(x, &b, SO_STR("parameter '"));
    so_jj_buf_add(x, &b, name);
    so_jj_buf_add(x, &b, (so_str){"' was not provided", sizeof "' was not provided"});
    return so_jj_undefined_hint(x, b.data);
}

static void bind_params(so_jj *x, const so_jj_node *n, so_jj_frame *f, const so_jj_args *args) {
    so_jj_args a = *args;
    bool found_caller = false;
    a.kw = so_jj_alloc(x, args->n_kw, sizeof *a.kw);
    if (args->n_kw)
        memcpy(a.kw, args->kw, args->n_kw * sizeof *a.kw);
    for (size_t i = 0; i < n->kids.n; i++) {
        so_jj_val *v = &f->slots[n->kids.v[i]->slot];
        *v = i < a.n_pos ? a.pos[i] : take_kw(&a, n->kids.v[i]->name);
        found_caller |= so_str_eq_c(n->kids.v[i]->name, "caller");
    }
    if (n->kind != SO_JJ_N_GENERATION)
        bind_rest(x, n, f, &a, found_caller);
}

so_jj_val so_jj_call_macro(so_jj *x, const so_jj_macro *m, const so_jj_args *args) {
    const so_jj_node *n = m->node;
    so_jj_frame *caller = x->frame, *f = frame_new(x, n, m->env);
    so_jj_val text;
    so_jj_enter(x);
    bind_params(x, n, f, args);
    x->frame = f;
    so_jj_enter_scope(x, n->scope);
    for (size_t i = 0; i < n->kids.n; i++) {
        so_jj_val *v = &f->slots[n->kids.v[i]->slot];
        size_t first_default = n->kids.n - n->extra.n;
        if (v->kind == SO_JJ_MISSING)
            *v = i < first_default ? missing_param(x, n->kids.v[i]->name)
                                   : so_jj_eval(x, n->extra.v[i - first_default]);
    }
    capture(x, &n->body, &text);
    x->frame = caller;
    so_jj_leave(x);
    return text;
}

static so_jj_val macro_value(so_jj *x, const so_jj_node *n) {
    so_jj_macro *m = SO_JJ_NEW(x, so_jj_macro);
    *m = (so_jj_macro){n, x->frame};
    return (so_jj_val){.kind = SO_JJ_MACRO, .macro = m};
}

static void exec_call_block(so_jj *x, const so_jj_node *n) {
    so_jj_val caller = macro_value(x, n), f = so_jj_eval(x, n->a->a);
    so_jj_args args = so_jj_eval_args(x, n->a, &caller);
    x->line = n->line;
    emit_text(x, so_jj_call(x, f, &args));
}

static void exec_generation(so_jj *x, const so_jj_node *n) {
    so_jj_macro m = {n, x->frame};
    emit_value(x, so_jj_call_macro(x, &m, &(so_jj_args){0}));
}

/* ---- control ---- */

static flow exec_if(so_jj *x, const so_jj_node *n) {
    for (size_t i = 0; i < n->kids.n; i++) {
        const so_jj_node *branch = n->kids.v[i];
        if (!branch->a || so_jj_truth(so_jj_eval(x, branch->a)))
            return exec_body(x, &branch->body);
    }
    return FLOW_NEXT;
}

/* As in Jinja2, the else part runs if no iteration reached the end of the body: also when every one
 * ended by break or continue. */
static flow exec_for(so_jj *x, const so_jj_node *n) {
    so_jj_loop *loop = so_jj_loop_new(x, n, so_jj_eval(x, n->b));
    so_jj_val item, self = {.kind = SO_JJ_LOOP, .loop = loop};
    uint32_t loop_slot = n->scope->sym[0].slot;
    bool completed = false;
    while (so_jj_loop_next(x, loop, &item)) {
        x->line = n->line;
        so_jj_assign(x, n->a, item);
        x->frame->slots[loop_slot] = self;
        so_jj_enter_scope(x, n->scope);
        flow f = exec_body(x, &n->body);
        if (f == FLOW_BREAK)
            break;
        completed |= f == FLOW_NEXT;
    }
    if (completed || !n->extra.n)
        return FLOW_NEXT;
    so_jj_enter_scope(x, n->else_scope);
    return exec_body(x, &n->extra);
}

static flow exec_with(so_jj *x, const so_jj_node *n) {
    so_jj_enter_scope(x, n->scope);
    for (size_t i = 0; i < n->kids.n; i++)
        so_jj_assign(x, n->kids.v[i], so_jj_eval(x, n->extra.v[i]));
    return exec_body(x, &n->body);
}

static flow exec_node(so_jj *x, const so_jj_node *n) {
    switch (n->kind) {
    case SO_JJ_N_TEXT:
        emit(x, so_jj_bytes(n->value));
        return FLOW_NEXT;
    case SO_JJ_N_OUTPUT:
        emit_value(x, so_jj_eval(x, n->a));
        return FLOW_NEXT;
    case SO_JJ_N_IF:
        return exec_if(x, n);
    case SO_JJ_N_FOR:
        return exec_for(x, n);
    case SO_JJ_N_SET:
        so_jj_assign(x, n->a, so_jj_eval(x, n->b));
        return FLOW_NEXT;
    case SO_JJ_N_SETBLOCK:
        return exec_set_block(x, n);
    case SO_JJ_N_MACRO:
        so_jj_assign(x, n->a, macro_value(x, n));
        return FLOW_NEXT;
    case SO_JJ_N_CALLBLOCK:
        exec_call_block(x, n);
        return FLOW_NEXT;
    case SO_JJ_N_FILTERBLOCK:
        return exec_filter_block(x, n);
    case SO_JJ_N_WITH:
        return exec_with(x, n);
    case SO_JJ_N_GENERATION:
        exec_generation(x, n);
        return FLOW_NEXT;
    case SO_JJ_N_BREAK:
        return FLOW_BREAK;
    case SO_JJ_N_CONTINUE:
        return FLOW_CONTINUE;
    default:
        so_panic(__FILE__, __LINE__, "node kind %d is not a statement", (int)n->kind);
    }
}

static flow exec_body(so_jj *x, const so_jj_nodes *body) {
    flow f = FLOW_NEXT;
    so_jj_enter(x);
    for (size_t i = 0; i < body->n && f == FLOW_NEXT; i++) {
        so_jj_tick(x, 1);
        x->line = body->v[i]->line;
        f = exec_node(x, body->v[i]);
    }
    so_jj_leave(x);
    return f;
}

void so_jj_run(so_jj *x, const so_jj_node *tmpl) {
    x->frame = frame_new(x, tmpl, NULL);
    so_jj_enter_scope(x, tmpl->scope);
    exec_body(x, &tmpl->body);
}
