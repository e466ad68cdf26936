/* Operators on values, with Python's rules: arithmetic, comparison, membership.
 *
 * Integers have 64 bits; a result that does not fit is an error (Python's integers are unbounded).
 * // and % round towards minus infinity. Equality never fails; < and > fail for types without an
 * order. */
#include <math.h>

#include "jinja/impl.h"

static const char *op_text(so_jj_op op) {
    static const char *const T[] = {
        [SO_JJ_OP_ADD] = "+", [SO_JJ_OP_SUB] = "-",       [SO_JJ_OP_MUL] = "*",
        [SO_JJ_OP_DIV] = "/", [SO_JJ_OP_FLOORDIV] = "//", [SO_JJ_OP_MOD] = "%",
        [SO_JJ_OP_LT] = "<",  [SO_JJ_OP_LE] = "<=",       [SO_JJ_OP_GT] = ">",
        [SO_JJ_OP_GE] = ">=",
    };
    return T[op];
}

_Noreturn static void fail_operands(so_jj *x, so_jj_op op, so_jj_val a, so_jj_val b) {
    if (a.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, a);
    if (b.kind == SO_JJ_UNDEFINED)
        so_jj_fail_undefined(x, b);
    so_jj_fail(x, SO_EINVAL, "unsupported operand types for %s: '%s' and '%s'", op_text(op),
               so_jj_type(a), so_jj_type(b));
}

_Noreturn static void fail_overflow(so_jj *x, so_jj_op op) {
    so_jj_fail(x, SO_ERANGE, "the result of %s does not fit 64 bits", op_text(op));
}

/* ---- numbers ---- */

static so_jj_val int_divmod(so_jj *x, so_jj_op op, int64_t a, int64_t b) {
    if (b == 0)
        so_jj_fail(x, SO_EINVAL, "division by zero");
    if (op == SO_JJ_OP_DIV)
        return so_jj_float((double)((long double)a / (long double)b));
    if (b == -1) { /* INT64_MIN / -1 traps */
        int64_t r = 0;
        if (op == SO_JJ_OP_FLOORDIV && __builtin_sub_overflow((int64_t)0, a, &r))
            fail_overflow(x, op);
        return so_jj_int(r);
    }
    int64_t q = a / b, r = a % b;
    if (r != 0 && (r < 0) != (b < 0)) {
        q--;
        r += b;
    }
    return so_jj_int(op == SO_JJ_OP_FLOORDIV ? q : r);
}

static so_jj_val int_arith(so_jj *x, so_jj_op op, int64_t a, int64_t b) {
    int64_t r = 0;
    bool over = false;
    switch (op) {
    case SO_JJ_OP_ADD:
        over = __builtin_add_overflow(a, b, &r);
        break;
    case SO_JJ_OP_SUB:
        over = __builtin_sub_overflow(a, b, &r);
        break;
    case SO_JJ_OP_MUL:
        over = __builtin_mul_overflow(a, b, &r);
        break;
    default:
        return int_divmod(x, op, a, b);
    }
    if (over)
        fail_overflow(x, op);
    return so_jj_int(r);
}

static so_jj_val float_arith(so_jj *x, so_jj_op op, double a, double b) {
    if ((op == SO_JJ_OP_DIV || op == SO_JJ_OP_FLOORDIV || op == SO_JJ_OP_MOD) && b == 0)
        so_jj_fail(x, SO_EINVAL, "float division by zero");
    double r = fmod(a, b);
    switch (op) {
    case SO_JJ_OP_ADD:
        return so_jj_float(a + b);
    case SO_JJ_OP_SUB:
        return so_jj_float(a - b);
    case SO_JJ_OP_MUL:
        return so_jj_float(a * b);
    case SO_JJ_OP_DIV:
        return so_jj_float(a / b);
    case SO_JJ_OP_MOD:
        return so_jj_float(r != 0 && (r < 0) != (b < 0) ? r + b : copysign(r, b));
    default:
        return so_jj_float(floor((a - r) / b + ((r < 0) != (b < 0) && r != 0 ? -0.5 : 0.5)));
    }
}

static so_jj_val arith(so_jj *x, so_jj_op op, so_jj_val a, so_jj_val b) {
    int64_t i, j;
    if (so_jj_is_int(a, &i) && so_jj_is_int(b, &j))
        return int_arith(x, op, i, j);
    return float_arith(x, op, so_jj_to_double(a), so_jj_to_double(b));
}

so_jj_val so_jj_negate(so_jj *x, so_jj_val v) {
    int64_t i, r;
    if (v.kind == SO_JJ_FLOAT)
        return so_jj_float(-v.f);
    if (!so_jj_is_int(v, &i))
        so_jj_fail_type(x, "unary - and + need a number", v);
    if (__builtin_sub_overflow((int64_t)0, i, &r))
        fail_overflow(x, SO_JJ_OP_SUB);
    return so_jj_int(r);
}

/* ---- sequences ---- */

static so_jj_val add_strings(so_jj *x, so_jj_val a, so_jj_val b) {
    if (!a.s->markup && !b.s->markup)
        return so_jj_concat(x, a, b);
    return so_jj_markup(x, so_jj_concat(x, so_jj_escaped(x, a), so_jj_escaped(x, b)));
}

static so_jj_val add_lists(so_jj *x, so_jj_val a, so_jj_val b) {
    so_jj_list *l = so_jj_list_new(x, a.list->n + b.list->n);
    for (size_t i = 0; i < a.list->n; i++)
        so_jj_list_push(x, l, a.list->v[i]);
    for (size_t i = 0; i < b.list->n; i++)
        so_jj_list_push(x, l, b.list->v[i]);
    return (so_jj_val){.kind = a.kind, .list = l};
}

static so_jj_val repeat(so_jj *x, so_jj_val seq, int64_t times) {
    size_t n = times > 0 ? (size_t)times : 0;
    if (seq.kind == SO_JJ_STR) {
        so_jj_buf b = {0};
        so_jj_buf_fill(x, &b, so_jj_bytes(seq), n);
        return so_jj_like(x, seq, so_jj_buf_str(x, &b));
    }
    size_t total;
    if (!so_mul_size(seq.list->n, n, &total))
        so_jj_fail(x, SO_ELIMIT, "list too long");
    so_jj_list *l = so_jj_list_new(x, total);
    for (size_t i = 0; i < total; i++)
        so_jj_list_push(x, l, seq.list->v[i % seq.list->n]);
    return (so_jj_val){.kind = seq.kind, .list = l};
}

static bool is_seq(so_jj_val v) {
    return v.kind == SO_JJ_STR || v.kind == SO_JJ_LIST || v.kind == SO_JJ_TUPLE;
}

so_jj_val so_jj_binary(so_jj *x, so_jj_op op, so_jj_val a, so_jj_val b) {
    int64_t times;
    if (so_jj_is_num(a) && so_jj_is_num(b))
        return arith(x, op, a, b);
    if (op == SO_JJ_OP_ADD && a.kind == SO_JJ_STR && b.kind == SO_JJ_STR)
        return add_strings(x, a, b);
    if (op == SO_JJ_OP_ADD && a.kind == b.kind && (a.kind == SO_JJ_LIST || a.kind == SO_JJ_TUPLE))
        return add_lists(x, a, b);
    if (op == SO_JJ_OP_MUL && is_seq(a) && so_jj_is_int(b, &times))
        return repeat(x, a, times);
    if (op == SO_JJ_OP_MUL && is_seq(b) && so_jj_is_int(a, &times))
        return repeat(x, b, times);
    if (op == SO_JJ_OP_MOD && a.kind == SO_JJ_STR)
        return so_jj_percent(x, a, b);
    fail_operands(x, op, a, b);
}

/* ---- comparison ---- */

/* −1, 0, 1, or 2 if one is NaN. A long double holds every int64_t and every double exactly. */
static int order_numbers(so_jj_val a, so_jj_val b) {
    int64_t i;
    long double l = so_jj_is_int(a, &i) ? (long double)i : (long double)a.f;
    long double r = so_jj_is_int(b, &i) ? (long double)i : (long double)b.f;
    return isnan(l) || isnan(r) ? 2 : l < r ? -1 : l > r;
}

static int order_bytes(so_jj *x, so_str a, so_str b) {
    size_t n = SO_MIN(a.len, b.len);
    so_jj_tick(x, n / 64);
    int r = n ? memcmp(a.ptr, b.ptr, n) : 0;
    return r ? (r < 0 ? -1 : 1) : a.len < b.len ? -1 : a.len > b.len;
}

static bool equal_lists(so_jj *x, const so_jj_list *a, const so_jj_list *b) {
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++)
        if (!so_jj_equal(x, a->v[i], b->v[i]))
            return false;
    return true;
}

static bool equal_dicts(so_jj *x, const so_jj_dict *a, const so_jj_dict *b) {
    so_jj_val other;
    if (a->n != b->n)
        return false;
    for (size_t i = 0; i < a->n; i++)
        if (!so_jj_dict_get(x, b, a->e[i].key, &other) || !so_jj_equal(x, a->e[i].value, other))
            return false;
    return true;
}

bool so_jj_equal(so_jj *x, so_jj_val a, so_jj_val b) {
    so_jj_tick(x, 1);
    if (so_jj_is_num(a) && so_jj_is_num(b))
        return order_numbers(a, b) == 0;
    if (a.kind != b.kind)
        return false;
    switch (a.kind) {
    case SO_JJ_UNDEFINED:
    case SO_JJ_NONE:
        return true;
    case SO_JJ_STR:
        return a.s->len == b.s->len && order_bytes(x, so_jj_bytes(a), so_jj_bytes(b)) == 0;
    case SO_JJ_LIST:
    case SO_JJ_TUPLE:
    case SO_JJ_DICT: {
        if (a.list == b.list)
            return true;
        so_jj_enter(x);
        bool eq =
            a.kind == SO_JJ_DICT ? equal_dicts(x, a.dict, b.dict) : equal_lists(x, a.list, b.list);
        so_jj_leave(x);
        return eq;
    }
    default:
        return a.list == b.list;
    }
}

/* Lists are ordered by the first items that differ, then by length. */
static bool compare_lists(so_jj *x, so_jj_op op, so_jj_val a, so_jj_val b) {
    size_t n = SO_MIN(a.list->n, b.list->n), i = 0;
    so_jj_enter(x);
    while (i < n && so_jj_equal(x, a.list->v[i], b.list->v[i]))
        i++;
    bool r;
    if (i < n)
        r = so_jj_compare(x, op, a.list->v[i], b.list->v[i]);
    else
        r = so_jj_compare(x, op, so_jj_int((int64_t)a.list->n), so_jj_int((int64_t)b.list->n));
    so_jj_leave(x);
    return r;
}

bool so_jj_compare(so_jj *x, so_jj_op op, so_jj_val a, so_jj_val b) {
    int r;
    if (op == SO_JJ_OP_EQ || op == SO_JJ_OP_NE)
        return so_jj_equal(x, a, b) == (op == SO_JJ_OP_EQ);
    if (op == SO_JJ_OP_IN || op == SO_JJ_OP_NOTIN)
        return so_jj_contains(x, b, a) == (op == SO_JJ_OP_IN);
    so_jj_tick(x, 1);
    if (so_jj_is_num(a) && so_jj_is_num(b))
        r = order_numbers(a, b);
    else if (a.kind == SO_JJ_STR && b.kind == SO_JJ_STR)
        r = order_bytes(x, so_jj_bytes(a), so_jj_bytes(b));
    else if (a.kind == b.kind && (a.kind == SO_JJ_LIST || a.kind == SO_JJ_TUPLE))
        return compare_lists(x, op, a, b);
    else
        fail_operands(x, op, a, b);
    if (r == 2)
        return false;
    return op == SO_JJ_OP_LT   ? r < 0
           : op == SO_JJ_OP_LE ? r <= 0
           : op == SO_JJ_OP_GT ? r > 0
                               : r >= 0;
}

bool so_jj_less(so_jj *x, so_jj_val a, so_jj_val b) { return so_jj_compare(x, SO_JJ_OP_LT, a, b); }

bool so_jj_contains(so_jj *x, so_jj_val seq, so_jj_val item) {
    so_jj_val v;
    if (seq.kind == SO_JJ_DICT)
        return so_jj_dict_get(x, seq.dict, item, &v);
    if (seq.kind == SO_JJ_STR) {
        if (item.kind != SO_JJ_STR)
            so_jj_fail_type(x, "'in <string>' needs a string on the left", item);
        so_jj_tick(x, seq.s->len / 32);
        return !item.s->len || memmem(seq.s->ptr, seq.s->len, item.s->ptr, item.s->len);
    }
    if (!so_jj_iterable(seq))
        so_jj_fail(x, SO_EINVAL, "argument of type '%s' is not iterable", so_jj_type(seq));
    so_jj_iter it = so_jj_iter_of(x, seq);
    while (so_jj_iter_next(x, &it, &v))
        if (so_jj_equal(x, v, item))
            return true;
    return false;
}
