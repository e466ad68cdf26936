/* File access (see file.h).
 *
 * The only shared state is `unfinished`, the paths of temporary files that were neither committed
 * nor aborted. It is a fixed array of atomic pointers, so that a signal handler can read it without
 * locks and without allocating. It has room for MAX_UNFINISHED files; a file opened while it is full
 * is not removed on a signal. */
#include "base/file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/mem.h"

enum { MAX_UNFINISHED = 16 };
static _Atomic(char *) unfinished[MAX_UNFINISHED];

struct so_out_file {
    FILE *f;
    char *path, *tmp; /* tmp is NULL for a file written in place */
    uint64_t n_written;
    int slot; /* in `unfinished`, or -1 */
};

static int check_regular(const struct stat *st, const char *path, so_err *err) {
    if (S_ISDIR(st->st_mode))
        return so_err_set(err, SO_EINVAL, "%s: is a directory, not a file", path);
    if (!S_ISREG(st->st_mode))
        return so_err_set(err, SO_EINVAL, "%s: is not a regular file", path);
    if (st->st_size == 0)
        return so_err_set(err, SO_EFORMAT, "%s: file is empty", path);
    return SO_OK;
}

int so_file_map(const char *path, so_map_file *out, so_err *err) {
    struct stat st;
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc;
    if (fd < 0)
        return so_err_set(err, errno == ENOENT ? SO_ENOTFOUND : SO_EIO, "%s: %s", path,
                          strerror(errno));
    if (fstat(fd, &st) != 0)
        rc = so_err_set(err, SO_EIO, "%s: %s", path, strerror(errno));
    else
        rc = check_regular(&st, path, err);
    if (rc == SO_OK) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (p == MAP_FAILED)
            rc = so_err_set(err, SO_EIO, "%s: cannot map: %s", path, strerror(errno));
        else
            *out = (so_map_file){p, (size_t)st.st_size, so_strdup(path)};
    }
    close(fd);
    return rc;
}

void so_file_unmap(so_map_file *m) {
    if (m->data)
        munmap((void *)(uintptr_t)m->data, m->len);
    free(m->path);
    *m = (so_map_file){0};
}

bool so_file_drop(const so_map_file *m, const void *p, size_t len) {
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), base = (uintptr_t)m->data;
    uintptr_t begin = (uintptr_t)p, end;
    if (!m->data || begin < base || !so_in_range(begin - base, len, m->len))
        return false;
    end = (begin + len) & ~(page - 1);
    begin = (begin + page - 1) & ~(page - 1);
    if (begin < end)
        madvise((void *)begin, end - begin, MADV_DONTNEED);
    return true;
}

int so_file_read(const char *path, size_t max_bytes, so_buf *out, so_err *err) {
    bool is_stdin = strcmp(path, "-") == 0;
    if (!is_stdin && so_file_is_dir(path))
        return so_err_set(err, SO_EINVAL, "%s: is a directory, not a file", path);
    FILE *f = is_stdin ? stdin : fopen(path, "rbe");
    if (!f)
        return so_err_set(err, errno == ENOENT ? SO_ENOTFOUND : SO_EIO, "%s: %s", path,
                          strerror(errno));
    char chunk[65536];
    size_t n, total = 0;
    int rc = SO_OK;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0) {
        if (n > max_bytes - total) {
            rc = so_err_set(err, SO_ELIMIT, "%s: larger than the limit of %zu bytes", path,
                            max_bytes);
            break;
        }
        total += n;
        so_buf_append(out, chunk, n);
    }
    if (rc == SO_OK && ferror(f))
        rc = so_err_set(err, SO_EIO, "%s: %s", path, strerror(errno));
    if (rc == SO_OK && out->full)
        rc = so_err_set(err, SO_ELIMIT, "%s: too large", path);
    if (!is_stdin)
        fclose(f);
    return rc;
}

bool so_file_is_dir(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool so_file_exists(const char *path) {
    struct stat st;
    return stat(path, &st) == 0;
}

size_t so_file_bytes(const char *path) {
    struct stat st;
    return stat(path, &st) == 0 && S_ISREG(st.st_mode) ? (size_t)st.st_size : 0;
}

char *so_path_join(const char *dir, const char *name) {
    so_buf b = {0};
    so_buf_append_c(&b, dir);
    if (b.len && b.data[b.len - 1] != '/')
        so_buf_append_char(&b, '/');
    so_buf_append_c(&b, name);
    return b.data;
}

int so_dir_create(const char *path, so_err *err) {
    char *p = so_strdup(path);
    int rc = SO_OK;
    for (char *s = p + 1; rc == SO_OK; s++) {
        if (*s != '/' && *s != '\0')
            continue;
        char keep = *s;
        *s = '\0';
        if (mkdir(p, 0777) != 0 && errno != EEXIST)
            rc = so_err_set(err, SO_EIO, "%s: cannot create folder: %s", p, strerror(errno));
        *s = keep;
        if (keep == '\0')
            break;
    }
    free(p);
    return rc;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(char *const *)a, *(char *const *)b);
}

int so_dir_list(const char *path, int cap, so_dir_names *out, so_err *err) {
    DIR *dir = opendir(path);
    if (!dir)
        return so_err_set(err, errno == ENOENT ? SO_ENOTFOUND : SO_EIO, "%s: %s", path,
                          strerror(errno));
    so_dir_names d = {.names = SO_NEW_N(char *, cap)};
    for (const struct dirent *e; d.n < cap && (e = readdir(dir));)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            d.names[d.n++] = so_strdup(e->d_name);
    closedir(dir);
    qsort(d.names, (size_t)d.n, sizeof *d.names, by_name);
    *out = d;
    return SO_OK;
}

void so_dir_names_free(so_dir_names *d) {
    for (int i = 0; i < d->n; i++)
        free(d->names[i]);
    free(d->names);
    *d = (so_dir_names){0};
}

char *so_path_program_dir(void) {
    char path[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", path, sizeof path - 1);
    if (n <= 0)
        return NULL;
    path[n] = '\0';
    char *slash = strrchr(path, '/');
    return slash ? so_strndup(path, SO_MAX((size_t)(slash - path), (size_t)1)) : NULL;
}

static int remember(char *tmp) {
    for (int i = 0; i < MAX_UNFINISHED; i++) {
        char *expected = NULL;
        if (atomic_compare_exchange_strong(&unfinished[i], &expected, tmp))
            return i;
    }
    return -1;
}

static void forget(int slot) {
    if (slot >= 0)
        atomic_store(&unfinished[slot], NULL);
}

/* Devices and pipes are written in place, because a rename would replace them by a regular file. If
 * the path is a symbolic link, the link stays and the file it points to is replaced. */
int so_out_begin(const char *path, so_out_file **out, so_err *err) {
    struct stat st;
    so_buf tmp = {0};
    bool is_there = stat(path, &st) == 0, in_place = is_there && !S_ISREG(st.st_mode);
    if (is_there && S_ISDIR(st.st_mode))
        return so_err_set(err, SO_EINVAL, "%s: is a directory, cannot write a file there", path);
    char *real = in_place ? NULL : realpath(path, NULL);
    if (!in_place)
        so_buf_printf(&tmp, "%s.partial-%ld", real ? real : path, (long)getpid());
    /* remembered before the file is created, so that a signal never misses an existing file */
    int slot = in_place ? -1 : remember(tmp.data);
    FILE *f = fopen(in_place ? path : tmp.data, "wbe");
    int rc = f ? SO_OK : so_err_set(err, SO_EIO, "%s: cannot write: %s", path, strerror(errno));
    if (f) {
        so_out_file *o = SO_NEW(so_out_file);
        o->f = f;
        o->path = so_strdup(real ? real : path);
        o->tmp = tmp.data;
        o->slot = slot;
        *out = o;
    } else {
        forget(slot);
        so_buf_free(&tmp);
    }
    free(real);
    return rc;
}

int so_out_write(so_out_file *o, const void *p, size_t len, so_err *err) {
    if (len && fwrite(p, 1, len, o->f) != len)
        return so_err_set(err, SO_EIO, "%s: write failed: %s", o->path, strerror(errno));
    o->n_written += len;
    return SO_OK;
}

uint64_t so_out_tell(const so_out_file *o) { return o->n_written; }

static void out_free(so_out_file *o) {
    forget(o->slot);
    free(o->path);
    free(o->tmp);
    free(o);
}

int so_out_commit(so_out_file *o, so_err *err) {
    int rc = SO_OK;
    if (fflush(o->f) != 0 || (o->tmp && fsync(fileno(o->f)) != 0))
        rc = so_err_set(err, SO_EIO, "%s: write failed: %s", o->path, strerror(errno));
    if (fclose(o->f) != 0 && rc == SO_OK)
        rc = so_err_set(err, SO_EIO, "%s: write failed: %s", o->path, strerror(errno));
    if (rc == SO_OK && o->tmp && rename(o->tmp, o->path) != 0)
        rc = so_err_set(err, SO_EIO, "%s: cannot rename into place: %s", o->path, strerror(errno));
    if (rc != SO_OK && o->tmp)
        unlink(o->tmp);
    out_free(o);
    return rc;
}

void so_out_abort(so_out_file *o) {
    if (!o)
        return;
    fclose(o->f);
    if (o->tmp)
        unlink(o->tmp);
    out_free(o);
}

int so_out_put(const char *path, const void *p, size_t len, so_err *err) {
    so_out_file *f = NULL;
    int rc = so_out_begin(path, &f, err);
    if (rc != SO_OK)
        return rc;
    rc = so_out_write(f, p, len, err);
    if (rc == SO_OK)
        return so_out_commit(f, err);
    so_out_abort(f);
    return rc;
}

void so_out_cleanup_on_signal(void) {
    for (int i = 0; i < MAX_UNFINISHED; i++) {
        char *tmp = atomic_load(&unfinished[i]);
        if (tmp)
            unlink(tmp);
    }
}
