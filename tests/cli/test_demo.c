/* `sooth demo`: the same answer twice, on wide and narrow terminals, without one, and as JSON. The
 * target is deep and says what the draft says, so that there is something to gain. */
#include "rig.h"

/* Python's pty, since a terminal is needed: rows, columns, then the command. */
static const char PTY[] =
    "import os, pty, sys, fcntl, termios, struct\n"
    "rows, cols, cmd = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]\n"
    "pid, fd = pty.fork()\n"
    "if pid == 0:\n"
    "    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', rows, cols, 0, 0))\n"
    "    os.execvp(cmd[0], cmd)\n"
    "while True:\n"
    "    try:\n"
    "        data = os.read(fd, 65536)\n"
    "    except OSError:\n"
    "        break\n"
    "    if not data:\n"
    "        break\n"
    "    os.write(1, data)\n"
    "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n";

#define DEMO "sooth demo -m deep.gguf -p hello -n 40 "

static int open_models(void **state) {
    open_fixture(state);
    const fixture *f = *state;
    char *deep = so_path_join(f->dir, "deep.gguf");
    so_tiny_write(deep, &(so_tiny_opts){.layers = 48, .idle = true});
    free(deep);
    spill(f, "terminal.py", PTY);
    return 0;
}

/* Nonsense may hold a zero byte. */
static void has(const so_buf *b, const char *word) {
    if (b->len == 0 || !memmem(b->data, b->len, word, strlen(word)))
        fail_msg("'%s' is missing in: %s", word, text_of(b));
}

static ran on_terminal(const fixture *f, int rows, int cols, const char *args) {
    return run(f, "TERM=xterm NO_COLOR= python3 terminal.py %d %d %s demo -m deep.gguf -p hello %s",
               rows, cols, f->bin, args);
}

static void test_without_a_terminal(void **state) {
    fixture *f = *state;
    ran r = run(f, DEMO "-md tiny.gguf");
    assert_int_equal(r.status, 0);
    assert_null(strchr(text_of(&r.out), '\033'));
    assert_null(strchr(text_of(&r.out), '{')); /* no marks in the text either */
    has(&r.out, "> hello\n\nplain decoding:\n");
    has(&r.out, "\n\nspeculative decoding:\n");
    has(&r.out, "tokens/s");
    has(&r.out, "\nidentical: yes\n");
    done(&r);
}

static void test_json(void **state) {
    fixture *f = *state;
    json_t *o = json_of(f, DEMO "-md tiny.gguf --spec-length 3 --json --seed 7 --temp 0.9");
    assert_true(json_is_true(json_object_get(o, "identical")));
    assert_true(json_number_value(json_object_get(o, "plain_tps")) > 0);
    assert_true(json_number_value(json_object_get(o, "spec_tps")) > 0);
    assert_true(json_number_value(json_object_get(o, "speedup")) > 0);
    assert_true(json_number_value(json_object_get(o, "tokens_per_pass")) > 1.2);
    assert_int_equal(json_integer_value(json_object_get(o, "seed")), 7);
    json_decref(o);
    o = json_of(f, DEMO "-md tiny.gguf --json --temp 1 --verify reject");
    assert_true(json_is_null(json_object_get(o, "identical"))); /* not promised */
    json_decref(o);
}

/* Marks of the columns: the rule between them, and moves within the field; none of them narrow. */
static void test_wide_and_narrow(void **state) {
    fixture *f = *state;
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    ran r = on_terminal(f, 40, 120, "-n 40 -md tiny.gguf");
    assert_int_equal(r.status, 0);
    has(&r.out, "\xE2\x94\x82");
    has(&r.out, "\033[62G"); /* the right column: 58 cells, two more and a rule */
    has(&r.out, "\033[32m"); /* a guess that stood */
    has(&r.out, "identical: yes");
    done(&r);
    r = on_terminal(f, 40, 80, "-n 40 -md tiny.gguf");
    assert_int_equal(r.status, 0);
    assert_null(strstr(text_of(&r.out), "\xE2\x94\x82"));
    has(&r.out, "plain decoding:");
    has(&r.out, "\033[32m");
    has(&r.out, "identical: yes");
    done(&r);
    r = on_terminal(f, 12, 120, "-n 8 -md tiny.gguf"); /* wide, but no room for a table below */
    assert_int_equal(r.status, 0);
    assert_null(strstr(text_of(&r.out), "\xE2\x94\x82"));
    done(&r);
    r = on_terminal(f, 40, 120, "-n 8 -md tiny.gguf --no-color");
    assert_int_equal(r.status, 0);
    assert_null(strstr(text_of(&r.out), "\033[3")); /* but for the bar's, while it loads */
    assert_null(strstr(text_of(&r.out), "\033[1m"));
    done(&r);
    r = on_terminal(f, 24, 90, "-n 200 -c 256 -md tiny.gguf"); /* longer than the field */
    assert_int_equal(r.status, 0);
    has(&r.out, "identical: yes");
    done(&r);
}

/* A wrong engine is shown as such. */
static void test_a_difference_is_a_failure(void **state) {
    fixture *f = *state;
    ran r =
        run(f, "mutant accept_all demo -m deep.gguf -p hello -n 40 --spec random --spec-length 3");
    assert_int_equal(r.status, 1);
    has(&r.out, "identical: NO");
    done(&r);
}

static void test_bad_usage(void **state) {
    fixture *f = *state;
    expect(f, 2, "--temp", DEMO "--temp hot");
    expect(f, 2, "unknown option", DEMO "--frobnicate");
    expect(f, 2, "must name a drafter", DEMO "--spec none");
    expect(f, 2, "prompt is empty", "sooth demo -m deep.gguf -p ''");
    expect(f, 1, "no such file", "sooth demo -m ./nowhere.gguf");
    expect(f, 1, "no such file", DEMO "-md ./nowhere.gguf");
    expect(f, 2, "--predict", DEMO "-n many");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_without_a_terminal), cmocka_unit_test(test_json),
        cmocka_unit_test(test_wide_and_narrow),    cmocka_unit_test(test_a_difference_is_a_failure),
        cmocka_unit_test(test_bad_usage),
    };
    return cmocka_run_group_tests(tests, open_models, close_fixture);
}
