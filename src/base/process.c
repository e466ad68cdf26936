/* Starting programs, waiting for them, reading what they write. See process.h.
 *
 * Invariant: whoever was started has been waited for when a function here returns, also when
 * reading failed or a signal handler ran in between: no zombies, no programs left behind. A
 * Ctrl-C reaches the program by itself (it is in our process group) and shows as status 130.
 *
 * Refuses to use a shell, so no argument is ever quoted, and to pass on descriptors other than the
 * three named: ours are opened with O_CLOEXEC. A SIGPIPE that we ignore is not ignored there, or a
 * program whose reader is gone would not end. Any thread. */
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"

extern char **environ;

enum { CHUNK = 1 << 16, MISSING = 127 /* what a shell, or env, says of a missing program */ };

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

/* err is set last: `out` may name our own 2. */
static int start(const so_process *p, int out, pid_t *pid, so_err *err) {
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    sigset_t pipe_signal;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE);
    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&attr);
    posix_spawnattr_setsigdefault(&attr, &pipe_signal);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGDEF);
    set_fd(&fa, 0, p->in);
    set_fd(&fa, 1, out);
    set_fd(&fa, 2, p->err);
    int rc = posix_spawnp(pid, p->argv[0], &fa, &attr, (char *const *)(uintptr_t)p->argv, environ);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&fa);
    if (rc == ENOENT)
        return missing(p, err);
    return rc ? so_err_set(err, SO_EIO, "cannot start %s: %s", p->argv[0], strerror(rc)) : SO_OK;
}

static int wait_for(const so_process *p, pid_t pid, int *status, so_err *err) {
    int raw;
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
        return so_err_set(err, SO_EIO, "cannot make a pipe: %s", strerror(errno));
    int rc = start(p, fds[1], &pid, err);
    close(fds[1]);
    if (rc == SO_OK) {
        rc = drain(p, fds[0], sink, user, err);
        if (rc != SO_OK) /* it may have more to say than anyone wants to hear */
            kill(pid, SIGKILL);
        so_err late = {0};
        int ended = wait_for(p, pid, status, &late);
        if (rc == SO_OK && ended != SO_OK)
            rc = so_err_set(err, ended, "%s", late.msg);
    }
    close(fds[0]);
    return rc;
}
