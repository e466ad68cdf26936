/* Child programs: exit status, output, and that none is left running. */
#include "so_test.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/process.h"

/* `sh -c LINE` with nothing attached. */
static so_process shell(const char *const *argv) {
    return (so_process){.argv = argv,
                        .role = "runs the tests",
                        .package = "dash",
                        .in = SO_PROCESS_NULL,
                        .out = SO_PROCESS_NULL,
                        .err = SO_PROCESS_NULL};
}

static int status_of(const char *line) {
    const char *const argv[] = {"sh", "-c", line, NULL};
    so_process p = shell(argv);
    so_err err = {0};
    int status = -1;
    SO_OK_OR_FAIL(so_process_run(&p, &status, &err), err);
    return status;
}

static void assert_no_children(void) {
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
}

static void test_exit_status(void **state) {
    (void)state;
    assert_int_equal(status_of("exit 0"), 0);
    assert_int_equal(status_of("exit 7"), 7);
    assert_int_equal(status_of("kill -TERM $$"), 143); /* INT is ignored in a shell's background */
    assert_int_equal(status_of("kill -KILL $$"), 137);
    assert_no_children();
}

static void test_missing_program(void **state) {
    (void)state;
    static const char *const missing[] = {"no-such-program-of-sooth", NULL};
    static const char *const says_so[] = {"sh", "-c", "exit 127", NULL};
    const char *const *const both[] = {missing, says_so};
    for (int i = 0; i < 2; i++) {
        so_process p = shell(both[i]);
        so_err err = {0};
        int status = 0;
        assert_int_equal(so_process_run(&p, &status, &err), SO_ENOTFOUND);
        assert_non_null(strstr(err.msg, both[i][0]));
        assert_non_null(strstr(err.msg, "which runs the tests"));
        assert_non_null(strstr(err.msg, "apt-get install dash"));
    }
    static const char *const folder[] = {"/tmp", NULL};
    so_process p = shell(folder);
    so_err err = {0};
    int status;
    assert_int_equal(so_process_run(&p, &status, &err), SO_EIO);
    assert_non_null(strstr(err.msg, "/tmp"));
    assert_no_children();
}

/* --- output --- */

static int keep(void *user, const void *bytes, size_t n, so_err *err) {
    (void)err;
    so_buf_append(user, bytes, n);
    return SO_OK;
}

static int enough(void *user, const void *bytes, size_t n, so_err *err) {
    (void)bytes;
    size_t *left = user;
    if (n >= *left)
        return so_err_set(err, SO_ELIMIT, "that is enough");
    *left -= n;
    return SO_OK;
}

static void test_output_is_read(void **state) {
    (void)state;
    const char *argv[] = {"sh", "-c", "printf 'a b\\0c'; exit 3", NULL};
    so_process p = shell(argv);
    so_buf out = {0};
    so_err err = {0};
    int status = -1;
    SO_OK_OR_FAIL(so_process_read(&p, keep, &out, &status, &err), err);
    assert_int_equal(status, 3);
    assert_int_equal(out.len, 5);
    assert_memory_equal(out.data, "a b\0c", 5);
    so_buf_clear(&out);
    argv[2] = "head -c 300000 /dev/zero"; /* more than a pipe holds */
    SO_OK_OR_FAIL(so_process_read(&p, keep, &out, &status, &err), err);
    assert_int_equal(status, 0);
    assert_int_equal(out.len, 300000);
    so_buf_clear(&out);
    argv[2] = "true";
    SO_OK_OR_FAIL(so_process_read(&p, keep, &out, &status, &err), err);
    assert_int_equal(out.len, 0);
    argv[0] = "no-such-program-of-sooth";
    assert_int_equal(so_process_read(&p, keep, &out, &status, &err), SO_ENOTFOUND);
    so_buf_free(&out);
    assert_no_children();
}

/* Programs that write for ever; one of them ignores SIGPIPE. */
static void test_refused_output_ends_the_program(void **state) {
    (void)state;
    static const char *const lines[] = {"while :; do echo x; done",
                                        "trap '' PIPE TERM; while :; do echo x; done"};
    for (int i = 0; i < 2; i++) {
        const char *const argv[] = {"sh", "-c", lines[i], NULL};
        so_process p = shell(argv);
        so_err err = {0};
        size_t left = 100000;
        int status;
        assert_int_equal(so_process_read(&p, enough, &left, &status, &err), SO_ELIMIT);
        assert_string_equal(err.msg, "that is enough");
        assert_no_children();
    }
}

static void test_descriptors(void **state) {
    (void)state;
    static const char *const argv[] = {"sh", "-c", "tr a-z A-Z; echo oops >&2", NULL};
    FILE *in = tmpfile(), *out = tmpfile(), *err_file = tmpfile();
    char got[32] = {0};
    so_err err = {0};
    int status;
    assert_true(in && out && err_file);
    fputs("hello", in);
    rewind(in);
    so_process p = shell(argv);
    p.in = fileno(in);
    p.out = fileno(out);
    p.err = fileno(err_file);
    SO_OK_OR_FAIL(so_process_run(&p, &status, &err), err);
    assert_int_equal(status, 0);
    rewind(out);
    assert_non_null(fgets(got, sizeof got, out));
    assert_string_equal(got, "HELLO");
    rewind(err_file);
    assert_non_null(fgets(got, sizeof got, err_file));
    assert_string_equal(got, "oops\n");
    fclose(in);
    fclose(out);
    fclose(err_file);
    assert_int_equal(status_of("read x"), 1); /* end of file on /dev/null */
    int fds[2];
    assert_int_equal(pipe2(fds, O_CLOEXEC), 0);
    char line[64];
    snprintf(line, sizeof line, "test ! -e /proc/self/fd/%d", fds[1]);
    assert_int_equal(status_of(line), 0); /* the child inherited no other descriptor */
    close(fds[0]);
    close(fds[1]);
}

/* --- signals --- */

static volatile sig_atomic_t n_signals;
static void on_signal(int sig) {
    (void)sig;
    n_signals++;
}

/* Signals that interrupt the wait and the reading lose neither the status nor a byte. */
static void test_interrupted_waits(void **state) {
    (void)state;
    struct sigaction act = {.sa_handler = on_signal}, old; /* without SA_RESTART */
    struct itimerval every = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
    sigaction(SIGALRM, &act, &old);
    setitimer(ITIMER_REAL, &every, NULL);
    n_signals = 0;
    assert_int_equal(status_of("sleep 0.3; exit 9"), 9);
    static const char *const argv[] = {"sh", "-c", "echo a; sleep 0.3; echo b", NULL};
    so_process p = shell(argv);
    so_buf out = {0};
    so_err err = {0};
    int status = -1;
    SO_OK_OR_FAIL(so_process_read(&p, keep, &out, &status, &err), err);
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &old, NULL);
    assert_true(n_signals > 2);
    assert_int_equal(status, 0);
    assert_int_equal(out.len, 4);
    assert_memory_equal(out.data, "a\nb\n", 4);
    so_buf_free(&out);
    assert_no_children();
}

/* Ctrl-C goes to the whole process group: the program ends, and its status shows the signal. */
static void test_interrupt_reaches_the_program(void **state) {
    (void)state;
    struct sigaction act = {.sa_handler = on_signal}, old;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        setpgid(0, 0);
        sigaction(SIGINT, &act, &old);
        n_signals = 0;
        _exit(status_of("kill -INT 0; sleep 5") == 130 && n_signals == 1 ? 0 : 1);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void test_ignored_pipe_signal_stays_here(void **state) {
    (void)state;
    void (*old)(int) = signal(SIGPIPE, SIG_IGN);
    assert_int_equal(status_of("kill -PIPE $$; exit 3"), 141);
    signal(SIGPIPE, old);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_exit_status),
        cmocka_unit_test(test_missing_program),
        cmocka_unit_test(test_output_is_read),
        cmocka_unit_test(test_refused_output_ends_the_program),
        cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_interrupted_waits),
        cmocka_unit_test(test_interrupt_reaches_the_program),
        cmocka_unit_test(test_ignored_pipe_signal_stays_here),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
