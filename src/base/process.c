/* Starts programs, waits for them and reads their output (see process.h).
 *
 * Invariant: when a function here returns, every child that it started has been waited for, also
 * after a read error or an interrupted system call. There are no zombies and no programs left
 * running. Ctrl-C reaches the child directly, because it is in the same process group; its status
 * is then 130. If so_process.child is set, the child never receives SIGINT and the caller's signal
 * handler ends it. No handler can run between the start of the child and the setting of *child, and
 * *child is cleared before the process id can be reused.
 *
 * Uses no shell, so arguments need no quoting. Passes on only the three descriptors in so_process;
 * all others are opened with O_CLOEXEC. SIGPIPE is reset to its default action in the child, even
 * if this process ignores it; otherwise a program whose reader is gone would not end. Any thread.
 */
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"

extern char **environ;

enum { CHUNK = 1 << 16, MISSING = 127 /* exit status of env and shells for a missing program */ };

static void set_fd(posix_spawn_file_actions_t *fa, int theirs, int ours) {
    if (ours == SO_PROCESS_NULL)
        posix_spawn_file_actions_addopen(fa, theirs, "/dev/null", theirs ? O_WRONLY : O_RDONLY, 0);
    else
        posix_spawn_file_actions_adddup2(fa, ours, theirs);
}

static int missing(const so_process *p, so_err *err) {
    return so_err_set(err, SO_ENOTFOUND,
                      "%s, which %s, is not installed; on Debian: apt-get install %s", p->argv[0],
                      p->role, p->package);
}

/* Starts the program and stores its id in *p->child with all signals blocked, so that a handler
 * runs either before the program exists or after its id is known. */
static int spawn(const so_process *p, const posix_spawn_file_actions_t *fa, pid_t *pid) {
    posix_spawnattr_t attr;
    sigset_t pipe_signal, all, old, mask;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    mask = old;
    if (p->child)
        sigaddset(&mask, SIGINT);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigdefault(&attr, &pipe_signal);
    posix_spawnattr_setsigmask(&attr, &mask);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETSIGMASK);
    int rc = posix_spawnp(pid, p->argv[0], fa, &attr, (char *const *)(uintptr_t)p->argv, environ);
    if (p->child)
        *p->child = rc == 0 ? *pid : 0;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    posix_spawnattr_destroy(&attr);
    return rc;
}

/* Descriptor 2 is set last: `out` may be our own descriptor 2. */
static int start(const so_process *p, int out, pid_t *pid, so_err *err) {
    posix_spawn_file_actions_t fa;
    posix_spawn_file_actions_init(&fa);
    set_fd(&fa, 0, p->in);
    set_fd(&fa, 1, out);
    set_fd(&fa, 2, p->err);
    int rc = spawn(p, &fa, pid);
    posix_spawn_file_actions_destroy(&fa);
    if (rc == ENOENT)
        return missing(p, err);
    return rc ? so_err_set(err, SO_EIO, "cannot start %s: %s", p->argv[0], strerror(rc)) : SO_OK;
}

static int wait_for(const so_process *p, pid_t pid, int *status, so_err *err) {
    int raw;
    if (p->child) {
        siginfo_t info; /* WNOWAIT: the id stays taken until *child is cleared */
        while (waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT) < 0 && errno == EINTR)
            continue;
        *p->child = 0;
    }
    while (waitpid(pid, &raw, 0) < 0)
        if (errno != EINTR)
            return so_err_set(err, SO_EIO, "cannot wait for %s: %s", p->argv[0], strerror(errno));
    *status = WIFEXITED(raw) ? WEXITSTATUS(raw) : 128 + WTERMSIG(raw);
    return *status == MISSING ? missing(p, err) : SO_OK;
}

int so_process_run(const so_process *p, int *status, so_err *err) {
    pid_t pid;
    int rc = start(p, p->out, &pid, err);
    return rc == SO_OK ? wait_for(p, pid, status, err) : rc;
}

static int drain(const so_process *p, int fd, so_process_sink *sink, void *user, so_err *err) {
    char *chunk = so_alloc(CHUNK);
    int rc = SO_OK;
    ssize_t n = 1;
    while (rc == SO_OK && n != 0) {
        n = read(fd, chunk, CHUNK);
        if (n > 0)
            rc = sink(user, chunk, (size_t)n, err);
        else if (n < 0 && errno != EINTR)
            rc = so_err_set(err, SO_EIO, "reading from %s failed: %s", p->argv[0], strerror(errno));
    }
    free(chunk);
    return rc;
}

int so_process_read(const so_process *p, so_process_sink *sink, void *user, int *status,
                    so_err *err) {
    int fds[2];
    pid_t pid;
    if (pipe2(fds, O_CLOEXEC) != 0)
        return so_err_set(err, SO_EIO, "cannot create a pipe: %s", strerror(errno));
    int rc = start(p, fds[1], &pid, err);
    close(fds[1]);
    if (rc == SO_OK) {
        rc = drain(p, fds[0], sink, user, err);
        if (rc != SO_OK) /* its output is no longer read: without this it would block for ever */
            kill(pid, SIGKILL);
        so_err late = {0};
        int ended = wait_for(p, pid, status, &late);
        if (rc == SO_OK && ended != SO_OK)
            rc = so_err_set(err, ended, "%s", late.msg);
    }
    close(fds[0]);
    return rc;
}
