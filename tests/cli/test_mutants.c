/* Tests that `sooth prove` detects a wrong engine. With each fault of base/mutant.h it must exit
 * with 1 and report a difference; without a fault it must exit with 0. The shipped program has no
 * faults. */
#include "rig.h"

#define PROVE "prove -m tiny.gguf -n 12 -t 1 "

/* The part that detects it: comparison with plain decoding, or the chi-square tests of `reject`. */
typedef struct fault {
    const char *name;
    bool text, reject;
} fault;

static const fault FAULTS[] = {
    {"accept_all", true, true},      {"keep_row", true, true},     {"move_tail", true, true},
    {"constant_seed", false, true},  {"drop_choice", false, true}, {"drop_position", false, true},
    {"token_position", false, true}, {"reuse_draft", false, true}, {"reuse_accept", false, true},
};

static void need_noticed(const fixture *f, const fault *x) {
    ran r = run(f, "mutant %s " PROVE "--json", x->name);
    json_t *o = json_loads(text_of(&r.out), 0, NULL);
    int different = (int)json_integer_value(json_object_get(o, "different"));
    int failed = (int)json_integer_value(json_object_get(o, "chi_square_failed"));
    print_message("%s: %d texts different, %d chi-square tests failed\n", x->name, different,
                  failed);
    if (r.status != 1 || !json_is_false(json_object_get(o, "exact")) ||
        (different > 0) != x->text || (failed > 0) != x->reject)
        fail_msg("%s: status %d, %s%s", x->name, r.status, text_of(&r.out), text_of(&r.err));
    json_decref(o);
    done(&r);
}

static void test_faults_are_detected(void **state) {
    for (size_t i = 0; i < SO_LEN(FAULTS); i++)
        need_noticed(*state, &FAULTS[i]);
}

/* The test program with no fault switched on. */
static void test_no_fault_is_exact(void **state) {
    json_t *o = json_of(*state, "mutant none " PROVE "--json");
    assert_true(json_is_true(json_object_get(o, "exact")));
    json_decref(o);
}

static void test_a_fault_is_announced(void **state) {
    expect(*state, 0, "MUTANT keep_row: this program is wrong on purpose",
           "mutant keep_row run -m tiny.gguf -p hello -n 4 -t 1");
    ran r = run(*state, "mutant keep_it run -m tiny.gguf -p hello -n 4 -t 1");
    assert_int_not_equal(r.status, 0);
    assert_non_null(strstr(text_of(&r.err), "no mutant 'keep_it'; there are accept_all"));
    done(&r);
}

/* The shipped program ignores the variable and does not contain the names of faults. */
static void test_not_in_the_shipped_program(void **state) {
    const fixture *f = *state;
    ran r = run(f, "SOOTH_DEBUG=mutant=accept_all; export SOOTH_DEBUG; sooth " PROVE);
    assert_int_equal(r.status, 0);
    done(&r);
    const char *path = strchr(f->bin, '\'');
    assert_non_null(path);
    r = run(f, "grep -c mutant %s", path);
    assert_string_equal(text_of(&r.out), "0\n");
    done(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_faults_are_detected),
        cmocka_unit_test(test_no_fault_is_exact),
        cmocka_unit_test(test_a_fault_is_announced),
        cmocka_unit_test(test_not_in_the_shipped_program),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
