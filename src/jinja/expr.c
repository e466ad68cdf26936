/* Parses expressions by recursive descent. From the loosest to the tightest binding:
 *
 *   a if b else c · or · and · not · comparisons, in · + - · ~ · * / // % · |filter, is test
 *   · unary - + · primary with .attr [index] (call)
 *
 * As in Jinja2, `~` binds tighter than +, and filters bind tighter than every binary operator but
 * looser than unary minus: -x|abs is (-x)|abs. Both the recursion of the parser and the depth of the
 * tree are limited, so code that recurses over the tree needs no check. */
#include <stdio.h>

#include "jinja/impl.h"

static so_jj_node *parse_unary(so_jj_parser *p, bool with_filter);
static so_jj_node *parse_primary(so_jj_parser *p, bool with_namespace);
static so_jj_node *parse_postfix(so_jj_parser *p, so_jj_node *n);
static so_jj_node *parse_or(so_jj_parser *p);

bool so_jj_is_constant_name(so_str s) {
    return so_str_eq_c(s, "true") || so_str_eq_c(s, "false") || so_str_eq_c(s, "none") ||
           so_str_eq_c(s, "True") || so_str_eq_c(s, "False") || so_str_eq_c(s, "None");
}

static so_jj_node *node2(so_jj_parser *p, so_jj_node_kind kind, int line, so_jj_node *a,
                         so_jj_node *b) {
    so_jj_node *n = so_jj_node_new(p, kind, line);
    n->a = a;
    n->b = b;
    return so_jj_node_sealed(p, n);
}

static so_jj_node *const_node(so_jj_parser *p, int line, so_jj_val v) {
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_CONST, line);
    n->value = v;
    return n;
}

/* ---- operators ---- */

so_jj_node *so_jj_parse_expr(so_jj_parser *p, bool with_cond) {
    so_jj_parse_enter(p);
    int line = p->cur.line;
    so_jj_node *n = parse_or(p);
    while (with_cond && so_jj_skip_name(p, "if")) {
        so_jj_node *cond = so_jj_node_new(p, SO_JJ_N_COND, line);
        cond->a = n;
        cond->b = parse_or(p);
        if (so_jj_skip_name(p, "else"))
            cond->c = so_jj_parse_expr(p, true);
        n = so_jj_node_sealed(p, cond);
        line = p->cur.line;
    }
    so_jj_parse_leave(p);
    return n;
}

static so_jj_op compare_op(so_jj_parser *p) {
    static const struct {
        const char *text;
        so_jj_op op;
    } OPS[] = {{"==", SO_JJ_OP_EQ}, {"!=", SO_JJ_OP_NE}, {"<", SO_JJ_OP_LT},
               {"<=", SO_JJ_OP_LE}, {">", SO_JJ_OP_GT},  {">=", SO_JJ_OP_GE}};
    for (size_t i = 0; i < SO_LEN(OPS); i++)
        if (so_jj_skip_op(p, OPS[i].text))
            return OPS[i].op;
    if (so_jj_skip_name(p, "in"))
        return SO_JJ_OP_IN;
    if (so_jj_at_name(p, "not")) {
        so_jj_tok next = so_jj_look(p);
        if (next.kind == SO_JJ_T_NAME && so_str_eq_c(next.text, "in")) {
            so_jj_advance(p);
            so_jj_advance(p);
            return SO_JJ_OP_NOTIN;
        }
    }
    return SO_JJ_OP_NONE;
}

typedef struct bin_level {
    struct {
        const char *text;
        so_jj_op op;
    } ops[4];
} bin_level;

static so_jj_op bin_op(so_jj_parser *p, const bin_level *level) {
    for (size_t i = 0; i < SO_LEN(level->ops) && level->ops[i].text; i++)
        if (so_jj_skip_op(p, level->ops[i].text))
            return level->ops[i].op;
    return SO_JJ_OP_NONE;
}

static so_jj_node *parse_math2(so_jj_parser *p) {
    static const bin_level L = {
        {{"*", SO_JJ_OP_MUL}, {"/", SO_JJ_OP_DIV}, {"//", SO_JJ_OP_FLOORDIV}, {"%", SO_JJ_OP_MOD}}};
    int line = p->cur.line;
    so_jj_node *n = parse_unary(p, true);
    for (so_jj_op op; (op = bin_op(p, &L)) != SO_JJ_OP_NONE;) {
        n = node2(p, SO_JJ_N_BIN, line, n, parse_unary(p, true));
        n->op = op;
    }
    return n;
}

static so_jj_node *parse_concat(so_jj_parser *p) {
    so_jj_node *first = parse_math2(p);
    if (!so_jj_at_op(p, "~"))
        return first;
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_CONCAT, first->line);
    so_jj_nodes_push(p->x, &n->kids, first);
    while (so_jj_skip_op(p, "~"))
        so_jj_nodes_push(p->x, &n->kids, parse_math2(p));
    return so_jj_node_sealed(p, n);
}

static so_jj_node *parse_math1(so_jj_parser *p) {
    static const bin_level L = {{{"+", SO_JJ_OP_ADD}, {"-", SO_JJ_OP_SUB}}};
    int line = p->cur.line;
    so_jj_node *n = parse_concat(p);
    for (so_jj_op op; (op = bin_op(p, &L)) != SO_JJ_OP_NONE;) {
        n = node2(p, SO_JJ_N_BIN, line, n, parse_concat(p));
        n->op = op;
    }
    return n;
}

static so_jj_node *parse_compare(so_jj_parser *p) {
    so_jj_node *first = parse_math1(p), *n = NULL;
    for (so_jj_op op; (op = compare_op(p)) != SO_JJ_OP_NONE;) {
        if (!n) {
            n = so_jj_node_new(p, SO_JJ_N_COMPARE, first->line);
            n->a = first;
        }
        so_jj_node *operand = node2(p, SO_JJ_N_OPERAND, p->cur.line, parse_math1(p), NULL);
        operand->op = op;
        so_jj_nodes_push(p->x, &n->kids, operand);
    }
    return n ? so_jj_node_sealed(p, n) : first;
}

static so_jj_node *parse_not(so_jj_parser *p) {
    if (!so_jj_at_name(p, "not"))
        return parse_compare(p);
    int line = p->cur.line;
    so_jj_parse_enter(p);
    so_jj_advance(p);
    so_jj_node *n = node2(p, SO_JJ_N_NOT, line, parse_not(p), NULL);
    so_jj_parse_leave(p);
    return n;
}

static so_jj_node *parse_and(so_jj_parser *p) {
    int line = p->cur.line;
    so_jj_node *n = parse_not(p);
    while (so_jj_skip_name(p, "and"))
        n = node2(p, SO_JJ_N_AND, line, n, parse_not(p));
    return n;
}

static so_jj_node *parse_or(so_jj_parser *p) {
    int line = p->cur.line;
    so_jj_node *n = parse_and(p);
    while (so_jj_skip_name(p, "or"))
        n = node2(p, SO_JJ_N_OR, line, n, parse_and(p));
    return n;
}

/* ---- literals ---- */

/* One expression, or a tuple if commas follow. explicit: in parentheses, where () is a tuple.
 * simplified: 1: only names and literals, 2: also ns.attr (targets of assignments). */
static so_jj_node *tuple_or_one(so_jj_parser *p, bool with_cond, bool explicit, int simplified) {
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_TUPLE, p->cur.line);
    bool is_tuple = false;
    for (;;) {
        if (n->kids.n)
            so_jj_expect_op(p, ",");
        if (p->cur.kind == SO_JJ_T_VAR_END || p->cur.kind == SO_JJ_T_BLOCK_END ||
            so_jj_at_op(p, ")"))
            break;
        so_jj_nodes_push(p->x, &n->kids,
                         simplified ? parse_primary(p, simplified == 2)
                                    : so_jj_parse_expr(p, with_cond));
        if (!so_jj_at_op(p, ","))
            break;
        is_tuple = true;
    }
    if (!is_tuple && n->kids.n)
        return n->kids.v[0];
    if (!is_tuple && !explicit)
        so_jj_fail_token(p, "an expression");
    return so_jj_node_sealed(p, n);
}

so_jj_node *so_jj_parse_tuple(so_jj_parser *p, bool with_cond) {
    return tuple_or_one(p, with_cond, false, 0);
}

static so_jj_node *parse_list(so_jj_parser *p) {
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_LIST, p->cur.line);
    so_jj_expect_op(p, "[");
    while (!so_jj_at_op(p, "]")) {
        if (n->kids.n)
            so_jj_expect_op(p, ",");
        if (so_jj_at_op(p, "]"))
            break;
        so_jj_nodes_push(p->x, &n->kids, so_jj_parse_expr(p, true));
    }
    so_jj_expect_op(p, "]");
    return so_jj_node_sealed(p, n);
}

static so_jj_node *parse_dict(so_jj_parser *p) {
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_DICT, p->cur.line);
    so_jj_expect_op(p, "{");
    while (!so_jj_at_op(p, "}")) {
        if (n->kids.n)
            so_jj_expect_op(p, ",");
        if (so_jj_at_op(p, "}"))
            break;
        so_jj_nodes_push(p->x, &n->kids, so_jj_parse_expr(p, true));
        so_jj_expect_op(p, ":");
        so_jj_nodes_push(p->x, &n->extra, so_jj_parse_expr(p, true));
    }
    so_jj_expect_op(p, "}");
    return so_jj_node_sealed(p, n);
}

static so_jj_node *parse_string(so_jj_parser *p) {
    int line = p->cur.line;
    so_jj_val v = so_jj_str_borrow(p->x, p->cur.text);
    for (so_jj_advance(p); p->cur.kind == SO_JJ_T_STRING; so_jj_advance(p))
        v = so_jj_concat(p->x, v, so_jj_str_borrow(p->x, p->cur.text));
    return const_node(p, line, v);
}

static so_jj_node *parse_name(so_jj_parser *p, bool with_namespace) {
    so_jj_tok t = p->cur;
    so_jj_advance(p);
    if (so_jj_is_constant_name(t.text)) {
        char c = (char)(t.text.ptr[0] | 32);
        return const_node(p, t.line, c == 'n' ? SO_JJ_NONE_V : so_jj_bool(c == 't'));
    }
    bool ns = with_namespace && so_jj_skip_op(p, ".");
    so_jj_node *n = so_jj_node_new(p, ns ? SO_JJ_N_NSREF : SO_JJ_N_NAME, t.line);
    n->name = t.text;
    if (ns)
        n->attr = so_jj_expect_name(p);
    return n;
}

static so_jj_node *parse_primary(so_jj_parser *p, bool with_namespace) {
    int line = p->cur.line;
    switch (p->cur.kind) {
    case SO_JJ_T_NAME:
        return parse_name(p, with_namespace);
    case SO_JJ_T_STRING:
        return parse_string(p);
    case SO_JJ_T_INT:
    case SO_JJ_T_FLOAT: {
        so_jj_val v = p->cur.value;
        so_jj_advance(p);
        return const_node(p, line, v);
    }
    default:
        break;
    }
    if (so_jj_at_op(p, "["))
        return parse_list(p);
    if (so_jj_at_op(p, "{"))
        return parse_dict(p);
    if (!so_jj_skip_op(p, "("))
        so_jj_fail_token(p, "an expression");
    so_jj_node *n = tuple_or_one(p, true, true, 0);
    so_jj_expect_op(p, ")");
    return n;
}

/* ---- postfix: attributes, subscripts, calls, filters, tests ---- */

static so_jj_node *slice_part(so_jj_parser *p) {
    if (so_jj_at_op(p, "]") || so_jj_at_op(p, ":"))
        return NULL;
    return so_jj_parse_expr(p, true);
}

static so_jj_node *parse_subscript(so_jj_parser *p) {
    int line = p->cur.line;
    so_jj_node *start = slice_part(p);
    if (!so_jj_skip_op(p, ":")) {
        if (!start)
            so_jj_fail_token(p, "an expression");
        return start;
    }
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_SLICE, line);
    n->a = start;
    n->b = slice_part(p);
    if (so_jj_skip_op(p, ":"))
        n->c = slice_part(p);
    return so_jj_node_sealed(p, n);
}

static so_jj_node *parse_dot(so_jj_parser *p, so_jj_node *obj, int line) {
    so_jj_tok t = p->cur;
    if (t.kind == SO_JJ_T_INT) {
        so_jj_advance(p);
        return node2(p, SO_JJ_N_GETITEM, line, obj, const_node(p, line, t.value));
    }
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_GETATTR, line);
    n->name = so_jj_expect_name(p);
    n->a = obj;
    return so_jj_node_sealed(p, n);
}

static void keyword_arg(so_jj_parser *p, so_jj_node *n) {
    so_jj_node *kw = so_jj_node_new(p, SO_JJ_N_KEYWORD, p->cur.line);
    kw->name = p->cur.text;
    so_jj_advance(p);
    so_jj_advance(p);
    kw->a = so_jj_parse_expr(p, true);
    for (size_t i = 0; i < n->extra.n; i++)
        if (so_str_eq(n->extra.v[i]->name, kw->name))
            so_jj_fail(p->x, SO_EFORMAT, "keyword argument repeated: %.*s", SO_JJ_ARG(kw->name));
    so_jj_nodes_push(p->x, &n->extra, so_jj_node_sealed(p, kw));
}

static void one_arg(so_jj_parser *p, so_jj_node *n) {
    bool star = so_jj_at_op(p, "*"), star2 = so_jj_at_op(p, "**");
    bool keyword = false;
    if (p->cur.kind == SO_JJ_T_NAME) {
        so_jj_tok next = so_jj_look(p);
        keyword = next.kind == SO_JJ_T_OP && so_str_eq_c(next.text, "=");
    }
    if (n->c || (n->b && !keyword && !star2) || (n->extra.n && !keyword && !star && !star2))
        so_jj_fail(p->x, SO_EFORMAT, "arguments out of order");
    if (star || star2) {
        so_jj_advance(p);
        so_jj_node *v = so_jj_parse_expr(p, true);
        if (star)
            n->b = v;
        else
            n->c = v;
    } else if (keyword) {
        keyword_arg(p, n);
    } else {
        so_jj_nodes_push(p->x, &n->kids, so_jj_parse_expr(p, true));
    }
}

static void parse_args(so_jj_parser *p, so_jj_node *n) {
    so_jj_expect_op(p, "(");
    for (bool first = true; !so_jj_at_op(p, ")"); first = false) {
        if (!first) {
            so_jj_expect_op(p, ",");
            if (so_jj_at_op(p, ")"))
                break;
        }
        one_arg(p, n);
    }
    so_jj_expect_op(p, ")");
}

static so_jj_node *parse_call(so_jj_parser *p, so_jj_node *callee) {
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_CALL, p->cur.line);
    n->a = callee;
    parse_args(p, n);
    return so_jj_node_sealed(p, n);
}

static so_jj_node *parse_postfix(so_jj_parser *p, so_jj_node *n) {
    for (;;) {
        int line = p->cur.line;
        if (so_jj_skip_op(p, "."))
            n = parse_dot(p, n, line);
        else if (so_jj_skip_op(p, "[")) {
            n = node2(p, SO_JJ_N_GETITEM, line, n, parse_subscript(p));
            so_jj_expect_op(p, "]");
        } else if (so_jj_at_op(p, "("))
            n = parse_call(p, n);
        else
            return n;
    }
}

/* Zero or more `|name(args)`. at_name: the first filter has no bar ({% filter name %}). */
so_jj_node *so_jj_parse_filter(so_jj_parser *p, so_jj_node *value, bool at_name) {
    while (at_name || so_jj_skip_op(p, "|")) {
        so_jj_node *n = so_jj_node_new(p, SO_JJ_N_FILTER, p->cur.line);
        n->name = so_jj_expect_name(p);
        n->a = value;
        if (so_jj_at_op(p, "("))
            parse_args(p, n);
        value = so_jj_node_sealed(p, n);
        at_name = false;
    }
    return value;
}

static bool starts_test_argument(const so_jj_parser *p) {
    if (p->cur.kind == SO_JJ_T_NAME)
        return !so_jj_at_name(p, "else") && !so_jj_at_name(p, "or") && !so_jj_at_name(p, "and");
    return p->cur.kind == SO_JJ_T_STRING || p->cur.kind == SO_JJ_T_INT ||
           p->cur.kind == SO_JJ_T_FLOAT || so_jj_at_op(p, "[") || so_jj_at_op(p, "{");
}

static so_jj_node *parse_test(so_jj_parser *p, so_jj_node *value) {
    int line = p->cur.line;
    so_jj_advance(p);
    bool negated = so_jj_skip_name(p, "not");
    so_jj_node *n = so_jj_node_new(p, SO_JJ_N_TEST, line);
    n->a = value;
    n->name = so_jj_expect_name(p);
    if (so_jj_at_op(p, "(")) {
        parse_args(p, n);
    } else if (starts_test_argument(p)) {
        if (so_jj_at_name(p, "is"))
            so_jj_fail(p->x, SO_EFORMAT, "tests cannot be chained with 'is'");
        so_jj_nodes_push(p->x, &n->kids, parse_postfix(p, parse_primary(p, false)));
    }
    n = so_jj_node_sealed(p, n);
    return negated ? node2(p, SO_JJ_N_NOT, line, n, NULL) : n;
}

static so_jj_node *parse_filter_expr(so_jj_parser *p, so_jj_node *n) {
    for (;;) {
        if (so_jj_at_op(p, "|"))
            n = so_jj_parse_filter(p, n, false);
        else if (so_jj_at_name(p, "is"))
            n = parse_test(p, n);
        else if (so_jj_at_op(p, "("))
            n = parse_call(p, n);
        else
            return n;
    }
}

static so_jj_node *parse_unary(so_jj_parser *p, bool with_filter) {
    int line = p->cur.line;
    so_jj_node *n;
    if (so_jj_at_op(p, "-") || so_jj_at_op(p, "+")) {
        so_jj_node_kind kind = so_jj_at_op(p, "-") ? SO_JJ_N_NEG : SO_JJ_N_POS;
        so_jj_parse_enter(p);
        so_jj_advance(p);
        n = node2(p, kind, line, parse_unary(p, false), NULL);
        so_jj_parse_leave(p);
    } else {
        n = parse_primary(p, false);
    }
    n = parse_postfix(p, n);
    return with_filter ? parse_filter_expr(p, n) : n;
}

/* ---- targets of assignments ---- */

static void make_target(so_jj_parser *p, so_jj_node *n) {
    if (n->kind == SO_JJ_N_TUPLE) {
        for (size_t i = 0; i < n->kids.n; i++)
            make_target(p, n->kids.v[i]);
        return;
    }
    p->x->line = n->line;
    if (n->kind != SO_JJ_N_NAME && n->kind != SO_JJ_N_NSREF)
        so_jj_fail(p->x, SO_EFORMAT, "only names can be assigned to");
    n->store = true;
}

so_jj_node *so_jj_parse_target(so_jj_parser *p, bool with_namespace) {
    so_jj_node *n = tuple_or_one(p, true, false, with_namespace ? 2 : 1);
    make_target(p, n);
    return n;
}
