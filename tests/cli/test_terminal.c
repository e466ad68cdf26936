/* What a terminal shows that a pipe does not get: log lines that begin on a line of their own in
 * the middle of an answer. And what is said of damaged weights, of which such a warning tells. */
#include "rig.h"

#include <fcntl.h>
#include <termios.h>

#define SAY "--raw --ignore-eos -s 7 -n 24 "
#define RUN "sooth run -m tiny.gguf " SAY
#define DRAFT "-md sick.gguf --spec model --spec-length 3 "

/* Runs the line with both streams on one terminal; what it shows. */
static so_buf show(const fixture *f, const char *line) {
    char streams[128], part[512];
    so_buf out = {0};
    int fd = posix_openpt(O_RDWR | O_NOCTTY);
    assert_true(fd >= 0 && grantpt(fd) == 0 && unlockpt(fd) == 0);
    int slave = open(ptsname(fd), O_RDWR | O_NOCTTY); /* kept open: what is written stays */
    struct termios t;
    assert_true(slave >= 0 && tcgetattr(slave, &t) == 0);
    t.c_oflag &= ~(tcflag_t)OPOST;
    assert_int_equal(tcsetattr(slave, TCSANOW, &t), 0);
    snprintf(streams, sizeof streams, ">%s 2>&1", ptsname(fd));
    assert_int_equal(shell(f, line, streams), 0);
    assert_int_equal(fcntl(fd, F_SETFL, O_NONBLOCK), 0);
    for (ssize_t n; (n = read(fd, part, sizeof part)) > 0;)
        so_buf_append(&out, part, (size_t)n);
    close(slave);
    close(fd);
    return out;
}

static bool says(json_t *answer, size_t from, size_t to, json_int_t token) {
    json_t *ids = json_object_get(answer, "tokens");
    bool found = false;
    for (size_t i = from; i < SO_MIN(to, json_array_size(ids)); i++)
        found |= json_integer_value(json_array_get(ids, i)) == token;
    return found;
}

/* sick.gguf: the model with NaN for a token that the answer to `the sea` comes to, neither at once
 * nor at its end, and that two other answers do not hold. */
static void make_sick(const fixture *f) {
    json_t *in = json_of(f, RUN "-p in --json"), *hello = json_of(f, RUN "-p hello --json");
    json_t *sea = json_of(f, RUN "-p 'the sea' --json");
    int32_t token = 3; /* bytes: no prompt here holds one */
    while (!says(sea, 5, 20, token) || says(sea, 0, 5, token) || says(in, 0, 24, token) ||
           says(hello, 0, 24, token))
        assert_true(++token < 3 + 256);
    char *path = so_path_join(f->dir, "sick.gguf");
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
    make_sick(f);
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

/* One prompt whose answer comes to the sick token, beside two that do not. */
static void test_sick_tokens_spare_the_others(void **state) {
    fixture *f = *state;
    static const char *const ways[] = {"--no-spec", "--spec ngram", "--spec random"};
    make_sick(f);
    expect(f, 1, "sick.gguf hold NaN or infinity",
           "sooth run -m sick.gguf --json " SAY "-p 'the sea'");
    spill(f, "p.jsonl",
          "{\"prompt\": \"in\"}\n{\"prompt\": \"the sea\"}\n{\"prompt\": \"hello\"}\n");
    for (size_t i = 0; i < SO_LEN(ways); i++) {
        ran r = run(f, "sooth run -m sick.gguf " SAY "--prompts p.jsonl --parallel 3 %s", ways[i]);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_warnings_begin_on_their_own_line),
        cmocka_unit_test(test_sick_tokens_spare_the_others),
    };
    return cmocka_run_group_tests(tests, open_fixture, close_fixture);
}
