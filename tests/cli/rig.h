/* Fixture for tests of the program: a scratch folder with the tiny model, in which the built
 * program is run. */
#ifndef SO_TESTS_CLI_RIG_H
#define SO_TESTS_CLI_RIG_H

#include "so_test.h"

#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "so_tiny.h"

typedef struct fixture {
    char *dir;
    /* preceded by SOOTH_RUNNER where the binary is for another machine */
    char bin[4096], example[4096], mutants[4096];
} fixture;

typedef struct ran {
    int status;
    so_buf out, err;
} ran;

/* build/obj/CONFIG/tests/cli/test_cli: the program is in build/obj/CONFIG or in build. */
static void find_program(const char *name, char *out, size_t cap) {
    char self[3000], path[4000];
    const char *runner = getenv("SOOTH_RUNNER");
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(n > 0);
    self[n] = '\0';
    char *cut = strstr(self, "/tests/cli/");
    assert_non_null(cut);
    *cut = '\0';
    snprintf(path, sizeof path, "%s/%s", self, name);
    if (!so_file_exists(path))
        snprintf(path, sizeof path, "%s/../../%s", self, name);
    if (!so_file_exists(path))
        fail_msg("%s is not built", name);
    snprintf(out, cap, "%s '%s'", runner ? runner : "", path);
}

static int open_fixture(void **state) {
    fixture *f = SO_NEW(fixture);
    f->dir = so_test_tmp();
    find_program("sooth", f->bin, sizeof f->bin);
    find_program("examples/generate", f->example, sizeof f->example);
    find_program("sooth-mutants", f->mutants, sizeof f->mutants);
    char *path = so_path_join(f->dir, "tiny.gguf");
    so_tiny_write(path, NULL);
    free(path);
    *state = f;
    return 0;
}

static int close_fixture(void **state) {
    fixture *f = *state;
    so_test_tmp_free(f->dir);
    free(f);
    return 0;
}

static void slurp(const fixture *f, const char *name, so_buf *out) {
    so_err err = {0};
    char *path = so_path_join(f->dir, name);
    SO_OK_OR_FAIL(so_file_read(path, 1 << 26, out, &err), err);
    free(path);
}

__attribute__((unused)) static void spill(const fixture *f, const char *name, const char *text) {
    char *path = so_path_join(f->dir, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    fclose(file);
    free(path);
}

static inline bool has_terminals(void) {
    int fd = posix_openpt(O_RDWR | O_NOCTTY);
    bool ok = fd >= 0 && grantpt(fd) == 0 && unlockpt(fd) == 0;
    if (fd >= 0)
        close(fd);
    return ok;
}

/* Runs a shell line in the scratch folder; "sooth" in it is the program under test, "mutant
 * NAME" the same program with that fault (base/mutant.h). */
static int shell(const fixture *f, const char *line, const char *streams) {
    so_buf cmd = {0};
    so_buf_printf(&cmd,
                  "cd '%s' && XDG_CACHE_HOME='%s/cache' HOME='%s' SOOTH_MODELS= && export "
                  "XDG_CACHE_HOME HOME SOOTH_MODELS && sooth() { %s \"$@\"; } && "
                  "generate() { %s \"$@\"; } && "
                  "mutant() { SOOTH_DEBUG=mutant=$1; export SOOTH_DEBUG; shift; %s \"$@\"; } && "
                  "{ %s; } %s </dev/null",
                  f->dir, f->dir, f->dir, f->bin, f->example, f->mutants, line, streams);
    int status = system(cmd.data);
    so_buf_free(&cmd);
    return status;
}

static ran run(const fixture *f, const char *fmt, ...) {
    char args[6000];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(args, sizeof args, fmt, ap);
    va_end(ap);
    int status = shell(f, args, ">out.txt 2>err.txt");
    ran r = {.status = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status)};
    slurp(f, "out.txt", &r.out);
    slurp(f, "err.txt", &r.err);
    return r;
}

static void done(ran *r) {
    so_buf_free(&r->out);
    so_buf_free(&r->err);
}

static const char *text_of(const so_buf *b) { return so_buf_str(b).ptr; }

__attribute__((unused)) static void expect(const fixture *f, int status, const char *on_stderr,
                                           const char *args) {
    ran r = run(f, "%s", args);
    if (r.status != status || !strstr(text_of(&r.err), on_stderr))
        fail_msg("%s: status %d, stderr: %s (wanted %d and '%s')", args, r.status, text_of(&r.err),
                 status, on_stderr);
    if (status != 0 && r.out.len != 0)
        fail_msg("%s: failed but wrote to stdout: %s", args, text_of(&r.out));
    done(&r);
}

/* The JSON value on stdout; nothing else may be there. */
__attribute__((unused)) static json_t *json_of(const fixture *f, const char *args) {
    ran r = run(f, "%s", args);
    json_error_t je;
    json_t *o = json_loadb(text_of(&r.out), r.out.len, JSON_ALLOW_NUL, &je);
    if (r.status != 0 || !o)
        fail_msg("%s: status %d, %s; stdout: %s; stderr: %s", args, r.status, je.text,
                 text_of(&r.out), text_of(&r.err));
    done(&r);
    return o;
}

#endif
