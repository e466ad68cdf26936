/* What goes to a terminal and what to a pipe: colour, the progress bar, log lines that begin on a
 * line of their own in the middle of an answer, control characters of a text. And the messages
 * about damaged weights, since such a warning comes in mid-answer. */
#include "rig.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <termios.h>

#define OPTIONS "--raw --ignore-eos -s 7 -n 24 "
#define RUN "sooth run -m tiny.gguf " OPTIONS
#define DRAFT "-md damaged.gguf --spec model --spec-length 3 "

/* Runs the line with the streams that `which` names (@ is the terminal) on a terminal of
 * `columns` columns and returns what that terminal was sent. */
static so_buf show_on(const fixture *f, const char *line, const char *which, int columns) {
    char streams[128], part[512];
    so_buf out = {0};
    int fd = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(fd >= 0 && grantpt(fd) == 0 && unlockpt(fd) == 0);
    int slave = open(ptsname(fd), O_RDWR | O_NOCTTY); /* kept open, so that output is not lost */
    struct termios t;
    assert_true(slave >= 0 && tcgetattr(slave, &t) == 0);
    t.c_oflag &= ~(tcflag_t)OPOST;
    assert_int_equal(tcsetattr(slave, TCSANOW, &t), 0);
    struct winsize w = {.ws_col = (unsigned short)columns, .ws_row = 24};
    assert_int_equal(ioctl(slave, TIOCSWINSZ, &w), 0);
    so_buf redirect = {0};
    for (const char *p = which; *p; p++)
        if (*p == '@')
            so_buf_append_c(&redirect, ptsname(fd));
        else
            so_buf_append_char(&redirect, *p);
    snprintf(streams, sizeof streams, "%s", redirect.data);
    so_buf_free(&redirect);
    assert_int_equal(shell(f, line, streams), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    for (ssize_t n; (n = read(fd, part, sizeof part)) > 0;)
        so_buf_append(&out, part, (size_t)n);
    close(slave);
    close(fd);
    return out;
}

static so_buf show(const fixture *f, const char *line) { return show_on(f, line, ">@ 2>&1", 80); }

static bool contains(json_t *answer, size_t from, size_t to, json_int_t token) {
    json_t *ids = json_object_get(answer, "tokens");
    bool found = false;
    for (size_t i = from; i < SO_MIN(to, json_array_size(ids)); i++)
        found |= json_integer_value(json_array_get(ids, i)) == token;
    return found;
}

/* damaged.gguf: the model with NaN weights for a token that is in the answer to `the sea`, neither
 * near its beginning nor its end, and not in two other answers. */
static void make_damaged(const fixture *f) {
    json_t *in = json_of(f, RUN "-p in --json"), *hello = json_of(f, RUN "-p hello --json");
    json_t *sea = json_of(f, RUN "-p 'the sea' --json");
    int32_t token = 3; /* tokens of single bytes, which are in no prompt here */
    while (!contains(sea, 5, 20, token) || contains(sea, 0, 5, token) ||
           contains(in, 0, 24, token) || contains(hello, 0, 24, token))
        assert_true(++token < 3 + 256);
    char *path = so_path_join(f->dir, "damaged.gguf");
    so_tiny_write(path, &(so_tiny_opts){.nan_token = token});
    free(path);
    json_decref(in);
    json_decref(hello);
    json_decref(sea);
}

static void test_warnings_begin_on_their_own_line(void **state) {
    fixture *f = *state;
    static const char *const views[] = {"", "--view", "--view=rounds"};
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    make_damaged(f);
    ran plain = run(f, RUN "-p 'the sea'"), piped = run(f, RUN DRAFT "-p 'the sea'");
    assert_string_equal(text_of(&piped.out), text_of(&plain.out));
    assert_int_equal(strncmp(text_of(&piped.err), "sooth: warning: draft model: ", 29), 0);
    for (size_t i = 0; i < SO_LEN(views); i++) {
        char line[256];
        snprintf(line, sizeof line, "NO_COLOR=1 " RUN DRAFT "-p 'the sea' %s", views[i]);
        so_buf out = show(f, line);
        const char *at = strstr(text_of(&out), "sooth: warning: draft model: ");
        assert_true(at && at > text_of(&out) + 2);
        if (at[-1] != '\n' || strstr(at + 1, "sooth: warning: "))
            fail_msg("%s: %s", line, text_of(&out));
        so_buf_free(&out);
    }
    done(&plain);
    done(&piped);
}

/* One prompt whose answer reaches the damaged token, beside two whose answers do not. */
static void test_damaged_token_fails_one_prompt(void **state) {
    fixture *f = *state;
    static const char *const ways[] = {"--no-spec", "--spec ngram", "--spec random"};
    make_damaged(f);
    expect(f, 1, "damaged.gguf hold NaN or infinity",
           "sooth run -m damaged.gguf --json " OPTIONS "-p 'the sea'");
    spill(f, "p.jsonl",
          "{\"prompt\": \"in\"}\n{\"prompt\": \"the sea\"}\n{\"prompt\": \"hello\"}\n");
    for (size_t i = 0; i < SO_LEN(ways); i++) {
        ran r = run(f, "sooth run -m damaged.gguf " OPTIONS "--prompts p.jsonl --parallel 3 %s",
                    ways[i]);
        ran well = run(f, RUN "--prompts p.jsonl --parallel 3 --no-spec");
        const char *second = strstr(text_of(&r.err), "line 2: logits are not finite");
        assert_int_equal(r.status, 1);
        if (!second || strstr(second + 29, "not finite"))
            fail_msg("%s: %s", ways[i], text_of(&r.err));
        assert_null(strstr(text_of(&r.err), "line 1: "));
        const char *third = strstr(text_of(&well.out), "### line 3\n");
        assert_non_null(strstr(text_of(&r.out), third));
        done(&well);
        done(&r);
    }
}

/* Help is wrapped at the terminal's width, at most 100 columns, and at 80 without a terminal. */
static void test_help_is_wrapped(void **state) {
    fixture *f = *state;
    static const int widths[] = {0, 40, 60, 72, 100, 250}; /* 0: no terminal */
    static const char *const topics[] = {"", "run", "serve", "bench", "theory", "quantize"};
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    for (size_t w = 0; w < SO_LEN(widths); w++)
        for (size_t i = 0; i < SO_LEN(topics); i++) {
            char line[64];
            size_t most = 0, wanted = widths[w] == 0 ? 80 : (size_t)SO_MIN(widths[w], 100);
            snprintf(line, sizeof line, "NO_COLOR=1 sooth help %s", topics[i]);
            so_buf out = {0};
            if (widths[w] > 0)
                out = show_on(f, line, ">@ 2>&1", widths[w]);
            else
                assert_int_equal(shell(f, line, ">out.txt 2>err.txt"), 0),
                    slurp(f, "out.txt", &out);
            for (const char *at = text_of(&out); *at; at += strcspn(at, "\n") + 1) {
                size_t len = strcspn(at, "\n"), first = strspn(at, " ");
                if (len > wanted && memchr(at + first, ' ', len - first)) /* else one long word */
                    fail_msg("%s: %zu columns: %.*s", line, wanted, (int)len, at);
                most = SO_MAX(most, len);
            }
            if (i == 1 && most + 12 < wanted)
                fail_msg("%s: only %zu of %zu columns are used", line, most, wanted);
            so_buf_free(&out);
        }
}

static bool has_escape(const so_buf *b) { return b->len > 0 && memchr(b->data, '\033', b->len); }

/* Colour and other control sequences go to a terminal that takes them, and nowhere else. */
static void test_control_sequences(void **state) {
    fixture *f = *state;
    static const struct {
        const char *line, *streams;
        bool wanted;
    } cases[] = {
        {"TERM=xterm " RUN "-p 'the sea' --view", ">@ 2>&1", true},
        {"TERM=dumb " RUN "-p 'the sea' --view", ">@ 2>&1", false},
        {"TERM= " RUN "-p 'the sea' --view", ">@ 2>&1", false},
        {"TERM=xterm NO_COLOR=1 " RUN "-p 'the sea' --view", ">@ 2>err.txt", false},
        {"TERM=xterm " RUN "-p 'the sea' --view --no-color", ">@ 2>err.txt", false},
        {"TERM=xterm sooth help run", ">@ 2>&1", true},
        {"TERM=dumb sooth help run", ">@ 2>&1", false},
        {"TERM=xterm NO_COLOR=1 sooth help run", ">@ 2>&1", false},
        {"TERM=dumb sooth demo -m tiny.gguf -md tiny.gguf -p 'the sea' -n 12", ">@ 2>&1", false},
        {"TERM=dumb sooth bench decode -m tiny.gguf -c 32 -n 4 --repeats 1", ">@ 2>&1", false},
    };
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        so_buf out = show_on(f, cases[i].line, cases[i].streams, 120);
        if (has_escape(&out) != cases[i].wanted)
            fail_msg("%s: %s", cases[i].line, text_of(&out));
        so_buf_free(&out);
    }
}

/* A stream that is a file gets none, also where the other one is a terminal. */
static void test_no_control_sequences_in_files(void **state) {
    fixture *f = *state;
    static const char *const lines[] = {
        RUN "-p 'the sea' --view",
        "sooth help run",
        "sooth demo -m tiny.gguf -md tiny.gguf -p 'the sea' -n 12",
        "sooth theory --alpha 0.5",
    };
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    for (size_t i = 0; i < SO_LEN(lines); i++)
        for (int stream = 1; stream <= 2; stream++) {
            char line[256];
            so_buf file = {0};
            snprintf(line, sizeof line, "TERM=xterm && export TERM && %s", lines[i]);
            so_buf out = show_on(f, line, stream == 1 ? ">@ 2>file.txt" : ">file.txt 2>@", 120);
            slurp(f, "file.txt", &file);
            if (has_escape(&file))
                fail_msg("%s: stream %d: %s", line, 3 - stream, text_of(&file));
            so_buf_free(&file);
            so_buf_free(&out);
        }
}

/* Texts of --prompts do not control the terminal either: an id with an escape sequence, and answers
 * of a model that writes any byte. */
static void test_answers_do_not_control_the_terminal(void **state) {
    fixture *f = *state;
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    spill(f, "p.jsonl", "{\"id\": \"a\\u001b[31mb\", \"prompt\": \"the sea\"}\n");
    so_buf out = show_on(f, "NO_COLOR=1 " RUN "--prompts p.jsonl", ">@ 2>err.txt", 80);
    assert_non_null(strstr(text_of(&out), "### a\\x1B[31mb\n"));
    for (size_t i = 0; i < out.len; i++)
        assert_true((unsigned char)out.data[i] >= 0x20 || strchr("\n\t", out.data[i]));
    so_buf_free(&out);
    ran r = run(f, RUN "--prompts p.jsonl");
    assert_non_null(strstr(text_of(&r.out), "### a\033[31mb\n"));
    done(&r);
}

/* The progress bar never wraps, at any width, and is erased at the end. */
static void test_progress_fits_the_width(void **state) {
    fixture *f = *state;
    static const int widths[] = {200, 80, 40, 24, 12, 5, 2, 1};
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    for (size_t i = 0; i < SO_LEN(widths); i++) {
        so_buf out =
            show_on(f, "TERM=xterm " RUN "-md tiny.gguf -p 'the sea'", ">out.txt 2>@", widths[i]);
        const char *last = NULL, *end = text_of(&out) + out.len;
        int n = 0;
        for (const char *at = text_of(&out); (at = strstr(at, "\r\033[K")); n++) {
            at += 4;
            size_t len = strcspn(at, "\r");
            if (at + len < end && (int)len >= widths[i])
                fail_msg("%d columns: %.*s", widths[i], (int)len, at);
            last = at;
        }
        assert_true(n >= 4); /* drawn and erased, for the target and for the draft */
        assert_int_equal(strncmp(last, "prompt: ", 8), 0);
        if (widths[i] == 80)
            assert_non_null(
                strstr(text_of(&out), "loading the draft [##############################] 100%"));
        if (widths[i] == 24)
            assert_non_null(strstr(text_of(&out), "loading [########] 100%"));
        if (widths[i] == 12)
            assert_non_null(strstr(text_of(&out), "\033[K100%"));
        so_buf_free(&out);
    }
    ran r = run(f, "TERM=xterm " RUN "-p 'the sea'");
    assert_int_equal(r.err.len, 0);
    done(&r);
}

/* A note reports an answer that ended because the context was full: on a terminal or with -v. */
static void test_full_context_is_noted(void **state) {
    fixture *f = *state;
    static const struct {
        const char *args;
        bool noted;
    } cases[] = {{"-c 40", true}, {"-c 40 -n 20", false}};
    if (!has_terminals())
        SO_SKIP("no pseudo-terminals here");
    for (size_t i = 0; i < SO_LEN(cases); i++) {
        char line[200];
        snprintf(line, sizeof line, "sooth run -m tiny.gguf --raw --ignore-eos -s 7 in %s",
                 cases[i].args);
        so_buf out = show_on(f, line, ">out.txt 2>@", 80);
        const char *note = strstr(text_of(&out), "the context of 40 tokens is full (-n N limits "
                                                 "answers, -c N sets a context of up to 256)\n");
        if ((note != NULL) != cases[i].noted)
            fail_msg("%s: %s", line, text_of(&out));
        so_buf_free(&out);
    }
    ran r = run(f, "sooth run -m tiny.gguf --raw --ignore-eos -s 7 in -c 40");
    assert_int_equal(r.err.len, 0);
    done(&r);
    r = run(f, "sooth run -m tiny.gguf --raw --ignore-eos -s 7 in -c 0 -v");
    assert_non_null(strstr(text_of(&r.err), "the context of 256 tokens is full (-n N limits "
                                            "answers)\n"));
    done(&r);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_warnings_begin_on_their_own_line),
        cmocka_unit_test(test_damaged_token_fails_one_prompt),
        cmocka_unit_test(test_help_is_wrapped),
        cmocka_unit_test(test_full_context_is_noted),
        cmocka_unit_test(test_control_sequences),
        cmocka_unit_test(test_progress_fits_the_width),
        cmocka_unit_test(test_no_control_sequences_in_files),
        cmocka_unit_test(test_answers_do_not_control_the_terminal),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
