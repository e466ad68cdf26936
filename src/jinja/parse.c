/* Parses statements: text, {{ … }} and the tags that chat templates use.
 *
 * Tags of Jinja2 that are not supported (include, import, from, extends, block, autoescape, print)
 * give an error that says so; any other name is an unknown tag. The tree contains no pointer into
 * the caller's source: the lexer makes a copy. */
#include <stdio.h>

#include "jinja/impl.h"

/* ---- the token stream ---- */

void so_jj_advance(so_jj_parser *p) {
    if (p->has_ahead)
        p->cur = p->ahead;
    else
        p->cur = so_jj_lex(&p->lexer);
    p->has_ahead = false;
    p->x->line = p->cur.line;
}

so_jj_tok so_jj_look(so_jj_parser *p) {
    if (!p->has_ahead) {
        p->ahead = so_jj_lex(&p->lexer);
        p->has_ahead = true;
    }
    return p->ahead;
}

bool so_jj_at_op(const so_jj_parser *p, const char *op) {
    return p->cur.kind == SO_JJ_T_OP && so_str_eq_c(p->cur.text, op);
}

bool so_jj_at_name(const so_jj_parser *p, const char *name) {
    return p->cur.kind == SO_JJ_T_NAME && so_str_eq_c(p->cur.text, name);
}

bool so_jj_skip_op(so_jj_parser *p, const char *op) {
    if (!so_jj_at_op(p, op))
        return false;
    so_jj_advance(p);
    return true;
}

bool so_jj_skip_name(so_jj_parser *p, const char *name) {
    if (!so_jj_at_name(p, name))
        return false;
    so_jj_advance(p);
    return true;
}

void so_jj_fail_token(so_jj_parser *p, const char *expected) {
    static const char *const WHAT[] = {
        [SO_JJ_T_EOF] = "the end of the template",
        [SO_JJ_T_DATA] = "text",
        [SO_JJ_T_VAR_BEGIN] = "'{{'",
        [SO_JJ_T_VAR_END] = "'}}'",
        [SO_JJ_T_BLOCK_BEGIN] = "'{%'",
        [SO_JJ_T_BLOCK_END] = "'%}'",
        [SO_JJ_T_STRING] = "a string",
        [SO_JJ_T_INT] = "an integer",
        [SO_JJ_T_FLOAT] = "a float",
    };
    p->x->line = p->cur.line;
    if (p->cur.kind == SO_JJ_T_NAME || p->cur.kind == SO_JJ_T_OP)
        so_jj_fail(p->x, SO_EFORMAT, "expected %s, got '%.*s'", expected, SO_JJ_ARG(p->cur.text));
    so_jj_fail(p->x, SO_EFORMAT, "expected %s, got %s", expected, WHAT[p->cur.kind]);
}

void so_jj_expect_op(so_jj_parser *p, const char *op) {
    char quoted[8];
    if (so_jj_skip_op(p, op))
        return;
    snprintf(quoted, sizeof quoted, "'%s'", op);
    so_jj_fail_token(p, quoted);
}

so_str so_jj_expect_name(so_jj_parser *p) {
    so_str name = p->cur.text;
    if (p->cur.kind != SO_JJ_T_NAME)
        so_jj_fail_token(p, "a name");
    so_jj_advance(p);
    return name;
}

static void expect_block_end(so_jj_parser *p) {
    if (p->cur.kind != SO_JJ_T_BLOCK_END)
        so_jj_fail_token(p, "'%}'");
    so_jj_advance(p);
}

/* ---- nodes ---- */

so_jj_node *so_jj_node_new(so_jj_parser *p, so_jj_node_kind kind, int line) {
    so_jj_node *n = SO_JJ_NEW(p->x, so_jj_node);
    n->kind = kind;
    n->line = line;
    n->depth = 1;
    return n;
}

static int max_depth(const so_jj_nodes *l, int depth) {
    for (size_t i = 0; i < l->n; i++)
        depth = SO_MAX(depth, l->v[i]->depth);
    return depth;
}

so_jj_node *so_jj_node_sealed(so_jj_parser *p, so_jj_node *n) {
    int depth = SO_MAX(n->a ? n->a->depth : 0, n->b ? n->b->depth : 0);
    depth = SO_MAX(depth, n->c ? n->c->depth : 0);
    depth = max_depth(&n->body, max_depth(&n->extra, max_depth(&n->kids, depth)));
    n->depth = depth + 1;
    if (n->depth > SO_JJ_MAX_TREE_DEPTH)
        so_jj_fail(p->x, SO_ELIMIT, "nested deeper than %d", SO_JJ_MAX_TREE_DEPTH);
    return n;
}

void so_jj_nodes_push(so_jj *x, so_jj_nodes *l, so_jj_node *n) {
    if (l->n == l->cap) {
        size_t cap = l->cap ? l->cap * 2 : 2;
        so_jj_node **v = so_jj_alloc(x, cap, sizeof *v);
        if (l->n)
            memcpy(v, l->v, l->n * sizeof *v);
        l->v = v;
        l->cap = cap;
    }
    l->v[l->n++] = n;
}

void so_jj_parse_enter(so_jj_parser *p) {
    if (++p->depth > SO_JJ_MAX_TREE_DEPTH)
        so_jj_fail(p->x, SO_ELIMIT, "nested deeper than %d", SO_JJ_MAX_TREE_DEPTH);
}

/* ---- statements ---- */

static so_jj_node *parse_statement(so_jj_parser *p);

static bool at_any(const so_jj_parser *p, const char *const *ends) {
    for (; ends && *ends; ends++)
        if (so_jj_at_name(p, *ends))
            return true;
    return false;
}

static void parse_output(so_jj_parser *p, so_jj_nodes *body) {
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_OUTPUT, p->cur.line);
    so_jj_advance(p);
    n->a = so_jj_parse_tuple(p, true);
    if (p->cur.kind != SO_JJ_T_VAR_END)
        so_jj_fail_token(p, "'}}'");
    so_jj_advance(p);
    so_jj_nodes_push(p->x, body, so_jj_node_sealed(p, n));
}

/* Parses up to a tag named in `ends`, whose name is then the current token, or the end of the
 * template. */
static void parse_body(so_jj_parser *p, const char *const *ends, so_jj_nodes *body) {
    while (p->cur.kind != SO_JJ_T_EOF) {
        if (p->cur.kind == SO_JJ_T_DATA) {
            so_jj_node *n = so_jj_node_new(p, SO_JJ_N_TEXT, p->cur.line);
            n->value = so_jj_str_borrow(p->x, p->cur.text);
            so_jj_nodes_push(p->x, body, n);
            so_jj_advance(p);
        } else if (p->cur.kind == SO_JJ_T_VAR_BEGIN) {
            parse_output(p, body);
        } else {
            so_jj_advance(p);
            if (at_any(p, ends))
                return;
            so_jj_node *n = parse_statement(p);
            if (n)
                so_jj_nodes_push(p->x, body, n);
            expect_block_end(p);
        }
    }
}

/* Parses the body of the tag that began on `line`, up to one of the tags `ends`. */
static void parse_until(so_jj_parser *p, const char *const *ends, so_jj_nodes *body, int line) {
    so_jj_skip_op(p, ":");
    expect_block_end(p);
    so_jj_parse_enter(p);
    parse_body(p, ends, body);
    so_jj_parse_leave(p);
    if (p->cur.kind == SO_JJ_T_EOF) {
        p->x->line = line;
        so_jj_fail(p->x, SO_EFORMAT, "tag without its end: {%% %s %%} is missing", ends[0]);
    }
}

static so_jj_node *parse_for(so_jj_parser *p, int line) {
    static const char *const ENDS[] = {"endfor", "else", NULL}, *const END[] = {"endfor", NULL};
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_FOR, line);
    n->a = so_jj_parse_target(p, false);
    if (!so_jj_skip_name(p, "in"))
        so_jj_fail_token(p, "'in'");
    n->b = so_jj_parse_tuple(p, false);
    if (so_jj_skip_name(p, "if"))
        n->c = so_jj_parse_expr(p, true);
    if (so_jj_at_name(p, "recursive"))
        so_jj_fail(p->x, SO_EUNSUPPORTED, "recursive loops are not supported in chat templates");
    parse_until(p, ENDS, &n->body, line);
    bool has_else = so_jj_at_name(p, "else");
    so_jj_advance(p);
    if (has_else) {
        parse_until(p, END, &n->extra, line);
        so_jj_advance(p);
    }
    return n;
}

static so_jj_node *parse_if(so_jj_parser *p, int line) {
    static const char *const ENDS[] = {"endif", "else", "elif", NULL}, *const END[] = {"endif",
                                                                                       NULL};
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_IF, line);
    for (;;) {
        so_jj_node *branch = so_jj_node_new(p, SO_JJ_N_BRANCH, p->cur.line);
        branch->a = so_jj_parse_tuple(p, false);
        parse_until(p, ENDS, &branch->body, line);
        so_jj_nodes_push(p->x, &n->kids, so_jj_node_sealed(p, branch));
        if (!so_jj_skip_name(p, "elif"))
            break;
    }
    if (so_jj_skip_name(p, "else")) {
        so_jj_node *branch = so_jj_node_new(p, SO_JJ_N_BRANCH, p->cur.line);
        parse_until(p, END, &branch->body, line);
        so_jj_nodes_push(p->x, &n->kids, so_jj_node_sealed(p, branch));
    }
    so_jj_advance(p);
    return n;
}

static so_jj_node *parse_set(so_jj_parser *p, int line) {
    static const char *const END[] = {"endset", NULL};
    so_jj_node *target = so_jj_parse_target(p, true);
    bool block = !so_jj_skip_op(p, "=");
    so_jj_node *n = so_jj_node_new(p, block ? SO_JJ_N_SETBLOCK : SO_JJ_N_SET, line);
    n->a = target;
    if (!block) {
        n->b = so_jj_parse_tuple(p, true);
        return n;
    }
    n->b = so_jj_parse_filter(p, NULL, false);
    parse_until(p, END, &n->body, line);
    so_jj_advance(p);
    return n;
}

static so_jj_node *parse_param(so_jj_parser *p) {
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_NAME, p->cur.line);
    n->name = so_jj_expect_name(p);
    if (so_jj_is_constant_name(n->name))
        so_jj_fail(p->x, SO_EFORMAT, "'%.*s' cannot be a parameter", SO_JJ_ARG(n->name));
    return n;
}

/* (a, b=1): kids are the parameters, extra the defaults of the last extra.n of them. */
static void parse_signature(so_jj_parser *p, so_jj_node *n) {
    so_jj_expect_op(p, "(");
    while (!so_jj_at_op(p, ")")) {
        if (n->kids.n)
            so_jj_expect_op(p, ",");
        so_jj_node *param = parse_param(p);
        for (size_t i = 0; i < n->kids.n; i++)
            if (so_str_eq(n->kids.v[i]->name, param->name))
                so_jj_fail(p->x, SO_EFORMAT, "parameter '%.*s' appears twice",
                           SO_JJ_ARG(param->name));
        so_jj_nodes_push(p->x, &n->kids, param);
        if (so_jj_skip_op(p, "="))
            so_jj_nodes_push(p->x, &n->extra, so_jj_parse_expr(p, true));
        else if (n->extra.n)
            so_jj_fail(p->x, SO_EFORMAT, "a parameter without a default follows one with");
    }
    so_jj_expect_op(p, ")");
}

static so_jj_node *parse_macro(so_jj_parser *p, int line) {
    static const char *const END[] = {"endmacro", NULL};
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_MACRO, line);
    n->a = parse_param(p);
    n->a->store = true;
    n->name = n->a->name;
    parse_signature(p, n);
    parse_until(p, END, &n->body, line);
    so_jj_advance(p);
    return n;
}

static so_jj_node *parse_call_block(so_jj_parser *p, int line) {
    static const char *const END[] = {"endcall", NULL};
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_CALLBLOCK, line);
    if (so_jj_at_op(p, "("))
        parse_signature(p, n);
    n->a = so_jj_parse_expr(p, true);
    if (n->a->kind != SO_JJ_N_CALL)
        so_jj_fail(p->x, SO_EFORMAT, "{%% call %%} needs a call");
    parse_until(p, END, &n->body, line);
    so_jj_advance(p);
    return n;
}

static so_jj_node *parse_filter_block(so_jj_parser *p, int line) {
    static const char *const END[] = {"endfilter", NULL};
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_FILTERBLOCK, line);
    n->a = so_jj_parse_filter(p, NULL, true);
    parse_until(p, END, &n->body, line);
    so_jj_advance(p);
    return n;
}

static so_jj_node *parse_with(so_jj_parser *p, int line) {
    static const char *const END[] = {"endwith", NULL};
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_WITH, line);
    while (p->cur.kind != SO_JJ_T_BLOCK_END) {
        if (n->kids.n)
            so_jj_expect_op(p, ",");
        so_jj_nodes_push(p->x, &n->kids, so_jj_parse_target(p, false));
        so_jj_expect_op(p, "=");
        so_jj_nodes_push(p->x, &n->extra, so_jj_parse_expr(p, true));
    }
    parse_until(p, END, &n->body, line);
    so_jj_advance(p);
    return n;
}

/* {% generation %} marks the assistant's text for training; here it only outputs its body. */
static so_jj_node *parse_generation(so_jj_parser *p, int line) {
    static const char *const END[] = {"endgeneration", NULL};
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_GENERATION, line);
    parse_until(p, END, &n->body, line);
    so_jj_advance(p);
    return n;
}

static so_jj_node *parse_break(so_jj_parser *p, int line) {
    return so_jj_node_new(p, SO_JJ_N_BREAK, line);
}

static so_jj_node *parse_continue(so_jj_parser *p, int line) {
    return so_jj_node_new(p, SO_JJ_N_CONTINUE, line);
}

static so_jj_node *parse_statement(so_jj_parser *p) {
    static const struct {
        const char *tag;
        so_jj_node *(*parse)(so_jj_parser *, int line);
    } TAGS[] = {
        {"if", parse_if},
        {"for", parse_for},
        {"set", parse_set},
        {"macro", parse_macro},
        {"call", parse_call_block},
        {"filter", parse_filter_block},
        {"with", parse_with},
        {"generation", parse_generation},
        {"break", parse_break},
        {"continue", parse_continue},
        {"print", NULL},
        {"include", NULL},
        {"import", NULL},
        {"from", NULL},
        {"extends", NULL},
        {"block", NULL},
        {"autoescape", NULL},
    };
    int line = p->cur.line;
    if (p->cur.kind != SO_JJ_T_NAME)
        so_jj_fail_token(p, "the name of a tag");
    for (size_t i = 0; i < SO_LEN(TAGS); i++) {
        if (!so_jj_at_name(p, TAGS[i].tag))
            continue;
        if (!TAGS[i].parse)
            so_jj_fail(p->x, SO_EUNSUPPORTED, "{%% %s %%} is not supported in chat templates",
                       TAGS[i].tag);
        so_jj_advance(p);
        return so_jj_node_sealed(p, TAGS[i].parse(p, line));
    }
    so_jj_fail(p->x, SO_EFORMAT, "unknown tag '%.*s'", SO_JJ_ARG(p->cur.text));
}

so_jj_node *so_jj_parse(so_jj *x, so_str source) {
    so_jj_parser *p = SO_JJ_NEW(x, so_jj_parser);
    p->x = x;
    so_jj_lexer_init(x, &p->lexer, source);
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_TEMPLATE, 1);
    so_jj_advance(p);
    parse_body(p, NULL, &n->body);
    return so_jj_node_sealed(p, n);
}
