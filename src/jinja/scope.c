/* Binds names to slots, by the scope rules of Jinja2's compiler.
 *
 * These have a scope each: the template, the body, else part and filter of a loop, macros, call
 * blocks, set blocks, filter blocks, with and generation blocks. `if` has none. Each scope takes
 * two steps:
 *
 *   1. survey: visit its statements in order, without inner scopes, and define a variable for every
 *      name that is written, or read and not defined in an outer scope. Its initial value depends
 *      on the first use:
 *        read:                                   the render's variable of that name
 *        written, and defined in an outer scope: a copy of the outer variable
 *        written inside an `if`:                 the render's variable (the branch may not run)
 *        written elsewhere:                      none
 *   2. bind: visit them again, give every name its slot, and process the inner scopes.
 *
 * Slots are in the frame of the innermost template, macro, call block or generation block; `hops`
 * is the number of frames outwards. The frame of a macro points to the frame it was defined in, so
 * the macro sees later changes of outer variables, like a closure in Python.
 *
 * Also checked here: unknown filters and tests (inside an `if` or a conditional expression the
 * error is postponed until the filter is evaluated), break and continue outside a loop, assignment
 * to `loop`. */
#include "jinja/impl.h"

typedef struct binder {
    so_jj *x;
    bool in_if;     /* survey: inside a branch of an if */
    bool postpone;  /* bind: an unknown filter is an error only when it is evaluated */
    bool can_break; /* bind: inside a loop of this frame */
    int n_for;      /* bind: number of enclosing loops, in all frames */
} binder;

static void survey(binder *b, so_jj_scope *s, const so_jj_node *n);
static void bind(binder *b, so_jj_scope *s, so_jj_node *n);

/* ---- symbols ---- */

static so_jj_sym *own_sym(so_jj_scope *s, so_str name) {
    for (size_t i = 0; i < s->n; i++)
        if (so_str_eq(s->sym[i].name, name))
            return &s->sym[i];
    return NULL;
}

static so_jj_sym *find_sym(binder *b, so_jj_scope *s, so_str name, uint32_t *hops) {
    *hops = 0;
    for (; s; s = s->parent) {
        so_jj_tick(b->x, 1 + s->n / 16);
        so_jj_sym *sym = own_sym(s, name);
        if (sym)
            return sym;
        *hops += s->parent && s->parent->owner != s->owner;
    }
    return NULL;
}

static so_jj_sym *define(binder *b, so_jj_scope *s, so_str name, so_jj_load load) {
    if (s->n == s->cap) {
        size_t cap = s->cap ? s->cap * 2 : 4;
        so_jj_sym *v = so_jj_alloc(b->x, cap, sizeof *v);
        if (s->n)
            memcpy(v, s->sym, s->n * sizeof *v);
        s->sym = v;
        s->cap = cap;
    }
    s->sym[s->n] = (so_jj_sym){.name = name, .load = load, .slot = s->owner->n_slots++};
    return &s->sym[s->n++];
}

static void note_load(binder *b, so_jj_scope *s, so_str name) {
    uint32_t hops;
    if (find_sym(b, s, name, &hops))
        return;
    if (s->owner->kind == SO_JJ_N_MACRO &&
        (so_str_eq_c(name, "varargs") || so_str_eq_c(name, "kwargs")))
        so_jj_fail(b->x, SO_EUNSUPPORTED, "'%.*s' is not supported in chat templates",
                   SO_JJ_ARG(name));
    define(b, s, name, SO_JJ_RESOLVE);
}

static void note_store(binder *b, so_jj_scope *s, so_str name) {
    uint32_t hops = 0;
    if (own_sym(s, name))
        return;
    so_jj_sym *outer = s->parent ? find_sym(b, s->parent, name, &hops) : NULL;
    so_jj_sym *sym = define(b, s, name,
                            outer      ? SO_JJ_ALIAS
                            : b->in_if ? SO_JJ_RESOLVE
                                       : SO_JJ_UNSET);
    if (outer) {
        sym->from_hops = hops + (s->parent->owner != s->owner);
        sym->from_slot = outer->slot;
    }
}

static void note_param(binder *b, so_jj_scope *s, so_str name) {
    so_jj_sym *sym = own_sym(s, name);
    if (sym)
        sym->load = SO_JJ_PARAM;
    else
        define(b, s, name, SO_JJ_PARAM);
}

static void note_params(binder *b, so_jj_scope *s, const so_jj_node *target) {
    if (target->kind == SO_JJ_N_NAME)
        note_param(b, s, target->name);
    for (size_t i = 0; i < target->kids.n; i++)
        note_params(b, s, target->kids.v[i]);
}

/* ---- survey ---- */

static void survey_all(binder *b, so_jj_scope *s, const so_jj_nodes *l) {
    for (size_t i = 0; i < l->n; i++)
        survey(b, s, l->v[i]);
}

static void survey_if(binder *b, so_jj_scope *s, const so_jj_node *n) {
    bool outer = b->in_if;
    for (size_t i = 0; i < n->kids.n; i++) {
        const so_jj_node *branch = n->kids.v[i];
        b->in_if = i ? true : outer; /* the first test is always evaluated */
        if (branch->a)
            survey(b, s, branch->a);
        b->in_if = true;
        survey_all(b, s, &branch->body);
    }
    b->in_if = outer;
}

static void survey_children(binder *b, so_jj_scope *s, const so_jj_node *n) {
    if (n->a)
        survey(b, s, n->a);
    if (n->b)
        survey(b, s, n->b);
    if (n->c)
        survey(b, s, n->c);
    survey_all(b, s, &n->kids);
    survey_all(b, s, &n->extra);
}

static void survey(binder *b, so_jj_scope *s, const so_jj_node *n) {
    so_jj_tick(b->x, 1);
    b->x->line = n->line;
    switch (n->kind) {
    case SO_JJ_N_NAME:
        if (n->store)
            note_store(b, s, n->name);
        else
            note_load(b, s, n->name);
        break;
    case SO_JJ_N_NSREF:
        note_load(b, s, n->name);
        break;
    case SO_JJ_N_IF:
        survey_if(b, s, n);
        break;
    case SO_JJ_N_FOR:
        survey(b, s, n->b);
        break;
    case SO_JJ_N_SET:
        survey(b, s, n->b);
        survey(b, s, n->a);
        break;
    case SO_JJ_N_SETBLOCK:
    case SO_JJ_N_MACRO:
    case SO_JJ_N_CALLBLOCK:
    case SO_JJ_N_FILTERBLOCK:
        survey(b, s, n->a);
        break;
    case SO_JJ_N_WITH:
        survey_all(b, s, &n->extra);
        break;
    case SO_JJ_N_GENERATION:
        break;
    default:
        survey_children(b, s, n);
    }
}

/* ---- bind ---- */

static so_jj_scope *scope_new(binder *b, so_jj_scope *parent, so_jj_node *owner) {
    so_jj_scope *s = SO_JJ_NEW(b->x, so_jj_scope);
    s->parent = parent;
    s->owner = owner;
    return s;
}

static void bind_all(binder *b, so_jj_scope *s, so_jj_nodes *l) {
    for (size_t i = 0; i < l->n; i++)
        bind(b, s, l->v[i]);
}

/* Surveys and binds the statements of a scope whose parameters are already defined. */
static void bind_scope(binder *b, so_jj_scope *s, so_jj_nodes *body) {
    binder inner = {.x = b->x, .n_for = b->n_for, .can_break = b->can_break};
    survey_all(&inner, s, body);
    bind_all(&inner, s, body);
}

static so_jj_node *clone_target(so_jj *x, const so_jj_node *n) {
    so_jj_node *c = SO_JJ_NEW(x, so_jj_node);
    *c = *n;
    c->kids = (so_jj_nodes){0};
    for (size_t i = 0; i < n->kids.n; i++)
        so_jj_nodes_push(x, &c->kids, clone_target(x, n->kids.v[i]));
    return c;
}

static void bind_for(binder *b, so_jj_scope *s, so_jj_node *n) {
    bind(b, s, n->b);
    binder inner = {.x = b->x, .n_for = b->n_for + 1, .can_break = true};
    n->scope = scope_new(b, s, s->owner);
    note_param(b, n->scope, SO_STR("loop"));
    note_params(b, n->scope, n->a);
    bind(&inner, n->scope, n->a);
    bind_scope(&inner, n->scope, &n->body);
    if (n->c) {
        n->test_scope = scope_new(b, s, s->owner);
        so_jj_nodes_push(b->x, &n->kids, clone_target(b->x, n->a));
        note_params(b, n->test_scope, n->kids.v[0]);
        binder test = {.x = b->x, .n_for = b->n_for};
        survey(&test, n->test_scope, n->c);
        bind(&test, n->test_scope, n->kids.v[0]);
        bind(&test, n->test_scope, n->c);
    }
    n->else_scope = scope_new(b, s, s->owner);
    inner.can_break = b->can_break;
    bind_scope(&inner, n->else_scope, &n->extra);
}

/* Every macro and call block has `caller` as a parameter. Jinja's `varargs` and `kwargs` do not
 * exist here: reading one inside a macro is an error (note_load). */
static void bind_macro(binder *b, so_jj_scope *s, so_jj_node *n) {
    if (n->kind != SO_JJ_N_GENERATION)
        bind(b, s, n->a);
    n->scope = scope_new(b, s, n);
    for (size_t i = 0; i < n->kids.n; i++)
        note_param(b, n->scope, n->kids.v[i]->name);
    if (n->kind != SO_JJ_N_GENERATION)
        note_param(b, n->scope, SO_STR("caller"));
    binder inner = {.x = b->x, .n_for = b->n_for};
    survey_all(&inner, n->scope, &n->extra);
    survey_all(&inner, n->scope, &n->body);
    bind_all(&inner, n->scope, &n->kids);
    bind_all(&inner, n->scope, &n->extra);
    bind_all(&inner, n->scope, &n->body);
}

/* Set block, filter block: the arguments of the filter are evaluated in the inner scope. */
static void bind_captured(binder *b, so_jj_scope *s, so_jj_node *n) {
    so_jj_node *filter = n->kind == SO_JJ_N_SETBLOCK ? n->b : n->a;
    if (n->kind == SO_JJ_N_SETBLOCK)
        bind(b, s, n->a);
    n->scope = scope_new(b, s, s->owner);
    if (filter)
        survey(&(binder){.x = b->x}, n->scope, filter);
    bind_scope(b, n->scope, &n->body);
    if (filter)
        bind(&(binder){.x = b->x, .n_for = b->n_for}, n->scope, filter);
}

static void bind_with(binder *b, so_jj_scope *s, so_jj_node *n) {
    bind_all(b, s, &n->extra);
    n->scope = scope_new(b, s, s->owner);
    for (size_t i = 0; i < n->kids.n; i++)
        note_params(b, n->scope, n->kids.v[i]);
    binder targets = {.x = b->x}; /* n_for 0: a target of with may be named loop */
    bind_all(&targets, n->scope, &n->kids);
    bind_scope(b, n->scope, &n->body);
}

static void bind_name(binder *b, so_jj_scope *s, so_jj_node *n) {
    b->x->line = n->line;
    if (n->kind == SO_JJ_N_NAME && n->store && b->n_for && so_str_eq_c(n->name, "loop"))
        so_jj_fail(b->x, SO_EFORMAT, "the special variable 'loop' cannot be assigned to");
    const so_jj_sym *sym = find_sym(b, s, n->name, &n->hops);
    SO_ASSERT(sym);
    n->slot = sym->slot;
}

static void bind_function(binder *b, so_jj_node *n) {
    bool filter = n->kind == SO_JJ_N_FILTER;
    n->func = filter ? so_jj_find_filter(n->name) : so_jj_find_test(n->name);
    b->x->line = n->line;
    if (!n->func && !b->postpone)
        so_jj_fail(b->x, SO_EUNSUPPORTED, "unknown %s '%.*s'", filter ? "filter" : "test",
                   SO_JJ_ARG(n->name));
}

static void bind_children(binder *b, so_jj_scope *s, so_jj_node *n) {
    bool outer = b->postpone;
    b->postpone = outer || n->kind == SO_JJ_N_COND || n->kind == SO_JJ_N_IF;
    if (n->a)
        bind(b, s, n->a);
    if (n->b)
        bind(b, s, n->b);
    if (n->c)
        bind(b, s, n->c);
    bind_all(b, s, &n->kids);
    bind_all(b, s, &n->extra);
    bind_all(b, s, &n->body);
    b->postpone = outer;
}

static void bind(binder *b, so_jj_scope *s, so_jj_node *n) {
    so_jj_tick(b->x, 1);
    switch (n->kind) {
    case SO_JJ_N_NAME:
    case SO_JJ_N_NSREF:
        bind_name(b, s, n);
        break;
    case SO_JJ_N_FOR:
        bind_for(b, s, n);
        break;
    case SO_JJ_N_MACRO:
    case SO_JJ_N_CALLBLOCK:
    case SO_JJ_N_GENERATION:
        bind_macro(b, s, n);
        break;
    case SO_JJ_N_SETBLOCK:
    case SO_JJ_N_FILTERBLOCK:
        bind_captured(b, s, n);
        break;
    case SO_JJ_N_WITH:
        bind_with(b, s, n);
        break;
    case SO_JJ_N_BREAK:
    case SO_JJ_N_CONTINUE:
        b->x->line = n->line;
        if (!b->can_break)
            so_jj_fail(b->x, SO_EFORMAT, "break or continue outside of a loop");
        break;
    case SO_JJ_N_FILTER:
    case SO_JJ_N_TEST:
        bind_function(b, n);
        bind_children(b, s, n);
        break;
    default:
        bind_children(b, s, n);
    }
}

void so_jj_resolve(so_jj *x, so_jj_node *tmpl) {
    binder b = {.x = x};
    tmpl->scope = scope_new(&b, NULL, tmpl);
    bind_scope(&b, tmpl->scope, &tmpl->body);
}
