/* The tests behind `is`, each on one value and some with an argument.
 *
 * As in Jinja: undefined is iterable, a sequence and callable; dicts are sequences; booleans are
 * numbers but not integers. */
#include "jinja/impl.h"

#define SIMPLE(name, condition) \
    static SO_JJ_FN(name) { return so_jj_bool(condition); }

static bool mod_is(so_jj *x, so_jj_val v, so_jj_val by, int64_t want) {
    return so_jj_equal(x, so_jj_binary(x, SO_JJ_OP_MOD, v, by), so_jj_int(want));
}

static bool is_sequence(so_jj_val v) {
    return v.kind == SO_JJ_UNDEFINED || v.kind == SO_JJ_STR || v.kind == SO_JJ_LIST ||
           v.kind == SO_JJ_TUPLE || v.kind == SO_JJ_DICT;
}

static bool is_callable(so_jj_val v) {
    return v.kind == SO_JJ_UNDEFINED || v.kind == SO_JJ_MACRO || v.kind == SO_JJ_FUNC ||
           v.kind == SO_JJ_METHOD;
}

/* Python's `is` for what templates compare with it: none, booleans, containers. */
static bool is_same(so_jj *x, so_jj_val a, so_jj_val b) {
    if (a.kind == SO_JJ_LIST || a.kind == SO_JJ_TUPLE || a.kind == SO_JJ_DICT)
        return a.kind == b.kind && a.list == b.list;
    return a.kind == b.kind && so_jj_equal(x, a, b);
}

SIMPLE(t_defined, self.kind != SO_JJ_UNDEFINED)
SIMPLE(t_undefined, self.kind == SO_JJ_UNDEFINED)
SIMPLE(t_none, self.kind == SO_JJ_NONE)
SIMPLE(t_boolean, self.kind == SO_JJ_BOOL)
SIMPLE(t_true, self.kind == SO_JJ_BOOL && self.b)
SIMPLE(t_false, self.kind == SO_JJ_BOOL && !self.b)
SIMPLE(t_integer, self.kind == SO_JJ_INT)
SIMPLE(t_float, self.kind == SO_JJ_FLOAT)
SIMPLE(t_number, so_jj_is_num(self))
SIMPLE(t_string, self.kind == SO_JJ_STR)
SIMPLE(t_mapping, self.kind == SO_JJ_DICT)
SIMPLE(t_iterable, so_jj_iterable(self))
SIMPLE(t_sequence, is_sequence(self))
SIMPLE(t_callable, is_callable(self))
SIMPLE(t_escaped, self.kind == SO_JJ_STR && self.s->markup)
SIMPLE(t_lower, so_jj_is_case(x, so_jj_bytes(so_jj_to_str(x, self)), false))
SIMPLE(t_upper, so_jj_is_case(x, so_jj_bytes(so_jj_to_str(x, self)), true))
SIMPLE(t_odd, mod_is(x, self, so_jj_int(2), 1))
SIMPLE(t_even, mod_is(x, self, so_jj_int(2), 0))
SIMPLE(t_divisibleby, mod_is(x, self, p[0], 0))
SIMPLE(t_sameas, is_same(x, self, p[0]))
SIMPLE(t_in, so_jj_contains(x, p[0], self))
SIMPLE(t_eq, so_jj_equal(x, self, p[0]))
SIMPLE(t_ne, !so_jj_equal(x, self, p[0]))
SIMPLE(t_lt, so_jj_compare(x, SO_JJ_OP_LT, self, p[0]))
SIMPLE(t_le, so_jj_compare(x, SO_JJ_OP_LE, self, p[0]))
SIMPLE(t_gt, so_jj_compare(x, SO_JJ_OP_GT, self, p[0]))
SIMPLE(t_ge, so_jj_compare(x, SO_JJ_OP_GE, self, p[0]))

const so_jj_func *so_jj_find_test(so_str name) {
    static const so_jj_func TESTS[] = {
        {"defined", t_defined, "", 0},
        {"undefined", t_undefined, "", 0},
        {"none", t_none, "", 0},
        {"boolean", t_boolean, "", 0},
        {"true", t_true, "", 0},
        {"false", t_false, "", 0},
        {"integer", t_integer, "", 0},
        {"float", t_float, "", 0},
        {"number", t_number, "", 0},
        {"string", t_string, "", 0},
        {"mapping", t_mapping, "", 0},
        {"iterable", t_iterable, "", 0},
        {"sequence", t_sequence, "", 0},
        {"callable", t_callable, "", 0},
        {"escaped", t_escaped, "", 0},
        {"lower", t_lower, "", 0},
        {"upper", t_upper, "", 0},
        {"odd", t_odd, "", 0},
        {"even", t_even, "", 0},
        {"divisibleby", t_divisibleby, "num", 1},
        {"sameas", t_sameas, "other", 1},
        {"in", t_in, "seq", 1},
        {"==", t_eq, "/b", 1},
        {"eq", t_eq, "/b", 1},
        {"equalto", t_eq, "/b", 1},
        {"!=", t_ne, "/b", 1},
        {"ne", t_ne, "/b", 1},
        {"<", t_lt, "/b", 1},
        {"lt", t_lt, "/b", 1},
        {"lessthan", t_lt, "/b", 1},
        {"<=", t_le, "/b", 1},
        {"le", t_le, "/b", 1},
        {">", t_gt, "/b", 1},
        {"gt", t_gt, "/b", 1},
        {"greaterthan", t_gt, "/b", 1},
        {">=", t_ge, "/b", 1},
        {"ge", t_ge, "/b", 1},
    };
    return so_jj_find_func(TESTS, SO_LEN(TESTS), name);
}
