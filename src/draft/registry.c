/* Reading, checking and searching registered drafts (registry.h).
 *
 * The search runs at every start, so it is bounded: at most MAX_OPENED files are opened, each
 * mapped and its header checked as for any model (so_gguf_open), which takes about a millisecond
 * for a vocabulary of fifty thousand tokens; no weight is read. The target's vocabulary is hashed
 * once, when the first file needs it. A folder that cannot be read, a truncated file or a draft of
 * another target leaves a line in the debug log and has no other effect. A file that is reachable
 * by two names is opened once. */
#include "draft/registry.h"

#include <stdlib.h>
#include <sys/stat.h>

#include "base/env.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/sha256.h"
#include "model/heads.h"
#include "model/vocab_subset.h"

enum { MAX_NAMES = 1024, MAX_OPENED = 64, MAX_DIRS = 16 };
enum { SAMPLE = 4096 }; /* bytes of a tensor that are hashed for so_registry_id */

/* --- one draft --- */

#define KEY "sooth.draft.target."

static int read_size(const so_gguf *g, const char *key, int64_t *out, so_err *err) {
    int rc = so_gguf_get_i64(g, key, out, err);
    if (rc == SO_ENOTFOUND)
        return so_err_set(err, SO_EFORMAT, "%s: %s is missing", so_gguf_path(g), key);
    if (rc == SO_OK && (*out < 1 || *out > INT32_MAX))
        return so_err_set(err, SO_EFORMAT, "%s: %s is %lld: must be from 1 to %d", so_gguf_path(g),
                          key, (long long)*out, INT32_MAX);
    return rc;
}

static int read_vocab(const so_gguf *g, char out[65], so_err *err) {
    so_str s;
    int rc = so_gguf_get_str(g, KEY "vocab_sha256", &s, err);
    if (rc != SO_OK)
        return rc;
    if (s.len != 64 || memchr(s.ptr, 0, s.len))
        return so_err_set(err, SO_EFORMAT,
                          "%s: " KEY "vocab_sha256 has %zu characters: must be 64 hexadecimal "
                          "digits",
                          so_gguf_path(g), s.len);
    memcpy(out, s.ptr, 64);
    out[64] = '\0';
    return SO_OK;
}

static void read_name(const so_gguf *g, char *out, size_t cap) {
    so_str s = {"", 0};
    so_buf line = {0};
    so_gguf_get_str(g, KEY "name", &s, NULL);
    for (size_t i = 0; i < s.len && line.len + 1 < cap; i++) /* it is shown on a terminal */
        so_buf_append_char(&line,
                           (unsigned char)s.ptr[i] < 0x20 || s.ptr[i] == 0x7F ? '?' : s.ptr[i]);
    so_str text = so_buf_str(&line);
    memcpy(out, text.ptr, text.len);
    out[text.len] = '\0';
    so_buf_free(&line);
}

static int read_agreement(const so_gguf *g, double *out, so_err *err) {
    static const char *const key = "sooth.draft.agreement";
    int rc = so_gguf_get_f64(g, key, out, err);
    if (rc == SO_ENOTFOUND) {
        *out = 0;
        return SO_OK;
    }
    if (rc == SO_OK && !(*out >= 0 && *out <= 1))
        return so_err_set(err, SO_EFORMAT, "%s: %s is %g: must be from 0 to 1", so_gguf_path(g),
                          key, *out);
    return rc;
}

/* Heads name their kind (model/heads.h); everything else is a draft model. */
static int read_kind(const so_gguf *g, so_registry_kind *out, so_err *err) {
    so_str s = {"", 0};
    *out = SO_REGISTRY_MODEL;
    if (!so_heads_is_gguf(g))
        return SO_OK;
    so_gguf_get_str(g, "sooth.heads.kind", &s, NULL);
    for (int i = 0; i < SO_HEADS_N_KINDS; i++)
        if (so_str_eq_c(s, so_heads_kind_name((so_heads_kind)i))) {
            *out = (so_registry_kind)(SO_REGISTRY_MEDUSA + i);
            return SO_OK;
        }
    return so_err_set(err, SO_EFORMAT, "%s: sooth.heads.kind is unknown", so_gguf_path(g));
}

int so_registry_read(const so_gguf *g, so_draft_target *out, so_err *err) {
    so_draft_target f = {0};
    int rc = read_vocab(g, f.vocab, err);
    if (rc == SO_OK)
        rc = read_kind(g, &f.kind, err);
    if (rc == SO_OK)
        rc = read_agreement(g, &f.agreement, err);
    if (rc == SO_OK)
        rc = read_size(g, KEY "embedding_length", &f.d_model, err);
    if (rc == SO_OK)
        rc = read_size(g, KEY "block_count", &f.n_layers, err);
    if (rc != SO_OK)
        return rc;
    read_name(g, f.name, sizeof f.name);
    *out = f;
    return SO_OK;
}

static void hash_vocab(const so_tokenizer *tok, char out[65]) {
    so_sha256 h;
    so_sha256_init(&h);
    for (int32_t id = 0; id < so_tokenizer_n_vocab(tok); id++) {
        so_str piece = so_tokenizer_piece(tok, id);
        if (id > 0)
            so_sha256_add(&h, "", 1); /* a zero byte between tokens */
        so_sha256_add(&h, piece.ptr, piece.len);
    }
    so_sha256_hex(&h, out);
}

static int check_shape(const so_draft_target *f, const so_hparams *hp, so_err *err) {
    if (f->d_model == hp->d_model && f->n_layers == hp->n_layers)
        return SO_OK;
    return so_err_set(err, SO_EMISMATCH,
                      "the draft is registered for '%s' (%lld layers of width %lld); this target "
                      "has %d layers of width %d: give a draft that was trained for it "
                      "(docs/train-your-own.md)",
                      f->name, (long long)f->n_layers, (long long)f->d_model, hp->n_layers,
                      hp->d_model);
}

static int check_vocab(const so_draft_target *f, const char *vocab, so_err *err) {
    if (strcmp(f->vocab, vocab) == 0)
        return SO_OK;
    return so_err_set(err, SO_EMISMATCH,
                      "the draft is registered for '%s', whose vocabulary differs from this "
                      "target's (SHA-256 %.12s… and %.12s…): give a draft that was trained for "
                      "this target (docs/train-your-own.md)",
                      f->name, f->vocab, vocab);
}

int so_registry_check(const so_draft_target *f, const so_hparams *hp, const so_tokenizer *tok,
                      so_err *err) {
    char vocab[65];
    int rc = check_shape(f, hp, err);
    if (rc != SO_OK || !tok)
        return rc;
    hash_vocab(tok, vocab);
    return check_vocab(f, vocab, err);
}

int so_registry_check_file(const so_checkpoint *draft, const so_hparams *hp,
                           const so_tokenizer *tok, so_err *err) {
    const so_gguf *g = so_checkpoint_gguf(draft);
    so_draft_target f;
    so_err local = {0};
    int rc = g ? so_registry_read(g, &f, &local) : SO_ENOTFOUND;
    if (rc == SO_ENOTFOUND)
        return SO_OK;
    if (rc == SO_OK)
        rc = so_registry_check(&f, hp, tok, &local);
    return rc == SO_OK ? rc : so_err_set(err, rc, "%s: %s", so_checkpoint_path(draft), local.msg);
}

double so_registry_agreement(const so_checkpoint *draft) {
    const so_gguf *g = so_checkpoint_gguf(draft);
    so_draft_target f;
    return g && so_registry_read(g, &f, NULL) == SO_OK ? f.agreement : 0;
}

uint64_t so_registry_id(const so_checkpoint *draft) {
    size_t n = so_checkpoint_n_tensors(draft);
    const so_gguf *g = so_checkpoint_gguf(draft);
    const so_gguf_kv *subset = g ? so_gguf_find(g, SO_VOCAB_SUBSET_KEY) : NULL;
    uint64_t id[4] = {so_checkpoint_bytes(draft), 0, 0, 0};
    if (subset)
        id[3] = so_hash_bytes(subset->data, subset->n_bytes);
    for (size_t i = 0; i < 2 && n > 0; i++) { /* the first and the last tensor */
        const so_tensor *t = so_checkpoint_tensor_at(draft, i ? n - 1 : 0);
        id[1 + i] = so_hash_bytes(t->data, SO_MIN(t->n_bytes, (size_t)SAMPLE));
    }
    return so_hash_bytes(id, sizeof id);
}

/* --- the search --- */

/* Identifies a file or folder regardless of its name. */
typedef struct file_id {
    dev_t dev;
    ino_t ino;
} file_id;

typedef struct search {
    const so_checkpoint *target;
    const so_hparams *hp;
    const so_tokenizer *tok;
    char vocab[65]; /* hash of the target's vocabulary; empty: not computed yet */
    file_id opened[MAX_OPENED];
    file_id dirs[MAX_DIRS];
    int n_dirs, n_opened;
    so_registry_kind kind;
    so_registry_found *out;
} search;

static bool ends_in_gguf(const char *name) {
    size_t n = strlen(name);
    return n > 5 && strcmp(name + n - 5, ".gguf") == 0;
}

/* Reads a file's registration and checks whether it fits. */
static int examine(search *s, const char *path, so_err *err) {
    so_gguf *g = NULL;
    so_draft_target f;
    int rc = so_gguf_open(path, &g, err);
    if (rc == SO_OK)
        rc = so_registry_read(g, &f, err);
    if (rc == SO_OK && f.kind != s->kind)
        rc = SO_ENOTFOUND;
    if (rc == SO_OK)
        rc = check_shape(&f, s->hp, err);
    if (rc == SO_OK && !*s->vocab)
        hash_vocab(s->tok, s->vocab);
    if (rc == SO_OK)
        rc = check_vocab(&f, s->vocab, err);
    so_gguf_close(g);
    return rc;
}

/* Adds the file or folder to the list; false: it does not exist, was visited, or the list is
 * full. */
static bool first_visit(const char *path, file_id *list, int *n, int cap) {
    struct stat st;
    if (*n == cap || stat(path, &st) != 0)
        return false;
    for (int i = 0; i < *n; i++)
        if (list[i].dev == st.st_dev && list[i].ino == st.st_ino)
            return false;
    list[(*n)++] = (file_id){st.st_dev, st.st_ino};
    return true;
}

static void try_file(search *s, const char *path) {
    size_t n = so_file_bytes(path);
    so_err err = {0};
    if (n == 0 || n > so_checkpoint_bytes(s->target) / 2 || s->out->n == SO_REGISTRY_MAX ||
        !first_visit(path, s->opened, &s->n_opened, MAX_OPENED))
        return;
    int rc = examine(s, path, &err);
    if (rc == SO_OK) {
        so_log(SO_LOG_DEBUG, "registered draft: %s", path);
        s->out->paths[s->out->n++] = so_strdup(path);
    } else if (rc != SO_ENOTFOUND) {
        so_log(SO_LOG_DEBUG, "%s is skipped: %s", path, err.msg);
    }
}

/* Tries the files of a folder. recurse: then also those of the folders in it, one level down. */
static void walk(search *s, const char *dir, bool recurse) {
    so_dir_names d = {0};
    so_err err = {0};
    if (so_dir_list(dir, MAX_NAMES, &d, &err) != SO_OK) {
        so_log(SO_LOG_DEBUG, "folder not searched for drafts: %s", err.msg);
        return;
    }
    for (int folders = 0; folders <= recurse; folders++)
        for (int i = 0; i < d.n; i++) {
            char *path = so_path_join(dir, d.names[i]);
            if (!folders && ends_in_gguf(d.names[i]))
                try_file(s, path);
            else if (folders && d.names[i][0] != '.' && so_file_is_dir(path))
                walk(s, path, false);
            free(path);
        }
    so_dir_names_free(&d);
}

/* `under` NULL: dir itself. dir NULL: does nothing. */
static void search_dir(search *s, const char *dir, const char *under) {
    char *path = dir && under ? so_path_join(dir, under) : NULL;
    const char *at = path ? path : dir;
    if (at && so_file_is_dir(at) && first_visit(at, s->dirs, &s->n_dirs, MAX_DIRS))
        walk(s, at, true);
    free(path);
}

static void search_target_dir(search *s) {
    const char *path = so_checkpoint_path(s->target), *slash = strrchr(path, '/');
    char *dir = so_file_is_dir(path) ? so_strdup(path)
                : slash              ? so_strndup(path, SO_MAX((size_t)(slash - path), (size_t)1))
                                     : so_strdup(".");
    walk(s, dir, false); /* a user's folder: its subfolders may hold anything */
    free(dir);
}

void so_registry_search(const so_checkpoint *target, const so_hparams *hp, const so_tokenizer *tok,
                        so_registry_kind kind, so_registry_found *out) {
    search s = {.target = target, .hp = hp, .tok = tok, .kind = kind, .out = out};
    char *program = so_path_program_dir(), *data = so_env_data_dir(), *cache = so_env_cache_dir();
    *out = (so_registry_found){0};
    search_target_dir(&s);
    search_dir(&s, program, "models");
    search_dir(&s, program, "../models");
    search_dir(&s, program, "../share/sooth/models");
    search_dir(&s, data, "models");
    search_dir(&s, so_env_models_dir(), NULL);
    search_dir(&s, cache, "models");
    free(program);
    free(data);
    free(cache);
}

void so_registry_found_free(so_registry_found *f) {
    for (int i = 0; i < f->n; i++)
        free(f->paths[i]);
    *f = (so_registry_found){0};
}
