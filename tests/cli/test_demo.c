/* `sooth demo` on wide and narrow terminals, without one, and as JSON. The target is deep and gives
 * the same output as the draft model, so that speculation gains time. */
#include "rig.h"

#include "base/clock.h"

/* Runs a command on a terminal with Python's pty: rows, columns, command. */
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

/* The text may contain a zero byte. */
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

/* Text is flushed while it is generated, also into a pipe: many pieces, the first one early. */
static void test_pieces_are_flushed(void **state) {
    fixture *f = *state;
    static const char *const lines[] = {
        "run -m deep.gguf --ignore-eos --temp 0 -n 150 --no-spec hello",
        "run -m deep.gguf --ignore-eos --temp 0 -n 150 --spec lookup --view hello",
        "chat -m deep.gguf --ignore-eos --temp 0 -n 150 --no-spec",
        "demo -m deep.gguf --spec random -n 100 hello",
    };
    for (size_t i = 0; i < SO_LEN(lines); i++) {
        char cmd[6000], piece[4096];
        int n_pieces = 0;
        double first_ms = 0;
        snprintf(cmd, sizeof cmd, "cd '%s' && echo hello | XDG_CACHE_HOME=cache %s %s 2>/dev/null",
                 f->dir, f->bin, lines[i]);
        int64_t t = so_clock_ns();
        FILE *p = popen(cmd, "r");
        assert_non_null(p);
        while (read(fileno(p), piece, sizeof piece) > 0)
            first_ms = n_pieces++ == 0 ? so_clock_ms_since(t) : first_ms;
        assert_int_equal(pclose(p), 0);
        if (n_pieces < 40 || first_ms > 0.6 * so_clock_ms_since(t))
            fail_msg("%s: %d pieces, the first after %.0f of %.0f ms", lines[i], n_pieces, first_ms,
                     so_clock_ms_since(t));
    }
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

/* Signs of the two columns are the line between them and cursor moves; narrow terminals have
 * neither. */
static void test_wide_and_narrow(void **state) {
    fixture *f = *state;
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    ran r = on_terminal(f, 40, 120, "-n 40 -md tiny.gguf");
    assert_int_equal(r.status, 0);
    has(&r.out, "\xE2\x94\x82");
    has(&r.out,
        "\033[62G"); /* the right column begins after 58 cells and a line between two spaces */
    has(&r.out, "\033[32m"); /* an accepted guess */
    has(&r.out, "identical: yes");
    done(&r);
    r = on_terminal(f, 40, 80, "-n 40 -md tiny.gguf");
    assert_int_equal(r.status, 0);
    assert_null(strstr(text_of(&r.out), "\xE2\x94\x82"));
    has(&r.out, "plain decoding:");
    has(&r.out, "\033[32m");
    has(&r.out, "identical: yes");
    done(&r);
    r = on_terminal(f, 20, 40, "-n 40 -md tiny.gguf"); /* a table of two figures */
    assert_int_equal(r.status, 0);
    has(&r.out, "\n             tokens/s  speed-up\r\nplain ");
    done(&r);
    r = on_terminal(f, 12, 120, "-n 8 -md tiny.gguf"); /* wide, but too low for the table below */
    assert_int_equal(r.status, 0);
    assert_null(strstr(text_of(&r.out), "\xE2\x94\x82"));
    done(&r);
    r = on_terminal(f, 40, 120, "-n 8 -md tiny.gguf --no-color");
    assert_int_equal(r.status, 0);
    assert_null(
        strstr(text_of(&r.out), "\033[3")); /* colours; the progress bar uses other sequences */
    assert_null(strstr(text_of(&r.out), "\033[1m"));
    done(&r);
    r = on_terminal(f, 24, 90, "-n 200 -c 256 -md tiny.gguf"); /* longer than the field */
    assert_int_equal(r.status, 0);
    has(&r.out, "identical: yes");
    done(&r);
}

/* A difference between the answers is reported. */
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
        cmocka_unit_test(test_without_a_terminal),        cmocka_unit_test(test_json),
        cmocka_unit_test(test_pieces_are_flushed),        cmocka_unit_test(test_wide_and_narrow),
        cmocka_unit_test(test_a_difference_is_a_failure), cmocka_unit_test(test_bad_usage),
    };
    return cmocka_run_group_tests(tests, open_models, close_fixture);
}
