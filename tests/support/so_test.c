/* Fixtures and scratch folders for tests. */
#include "so_test.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"

void so_test_note_skip(const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    fputs("skip: ", stdout);
    vprintf(fmt, ap);
    fputc('\n', stdout);
    fflush(stdout);
    va_end(ap);
}

static const char *in_dir(const char *env, const char *fallback, const char *name, bool must) {
    static char path[4096];
    const char *dir = getenv(env);
    snprintf(path, sizeof path, "%s/%s", dir && *dir ? dir : fallback, name);
    return !must || so_file_exists(path) ? path : NULL;
}

const char *so_test_shared(const char *name) {
    return in_dir("SOOTH_SHARED", "../shared", name, true);
}
const char *so_test_data(const char *name) { return in_dir("SOOTH_TESTS", "tests", name, false); }

const char *so_test_model(const char *name) {
    char cache[2048], file[256];
    const char *xdg = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (xdg && *xdg)
        snprintf(cache, sizeof cache, "%s/sooth/models", xdg);
    else
        snprintf(cache, sizeof cache, "%s/.cache/sooth/models", home ? home : "");
    snprintf(file, sizeof file, "%s.gguf", name);
    return in_dir("SOOTH_MODELS", cache, file, true);
}

char *so_test_tmp(void) {
    char *dir = so_strdup("/tmp/sooth-test-XXXXXX");
    SO_ASSERT(mkdtemp(dir) != NULL);
    return dir;
}

static void run(const char *cmd) {
    int rc = system(cmd);
    if (rc != 0)
        fprintf(stderr, "%s: status %d\n", cmd, rc);
}

void so_test_tmp_free(char *dir) {
    char cmd[4096];
    SO_ASSERT(strncmp(dir, "/tmp/sooth-test-", 16) == 0);
    snprintf(cmd, sizeof cmd, "rm -rf '%s'", dir);
    run(cmd);
    free(dir);
}

char *so_test_unxz(const char *shared_name, const char *dir) {
    const char *src = so_test_shared(shared_name);
    if (!src)
        return NULL;
    const char *base = strrchr(src, '/') + 1;
    char name[256], cmd[8192];
    snprintf(name, sizeof name, "%.*s", (int)(strlen(base) - 3), base);
    char *out = so_path_join(dir, name);
    snprintf(cmd, sizeof cmd, "xz -dc '%s' > '%s'", src, out);
    run(cmd);
    return out;
}

int so_test_dies_of(void (*fn)(void *user), void *user) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr))
            _exit(3);
        fn(user);
        _exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}
