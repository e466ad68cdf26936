/* Registered drafts: draft model files, and heads, that name the target they were trained for
 * (`sooth.draft.*`, docs/formats.md), and the search for them.
 *
 * A draft fits a target whose vocabulary (token by token), width and number of layers are those
 * stated in the draft's file. Names are not compared: a target keeps its draft when it is quantised
 * or renamed. A draft that the user named must fit or is refused. A draft that the search found and
 * that does not fit is skipped. Files without these keys are unregistered: a user may name them,
 * the search never returns them. */
#ifndef SO_DRAFT_REGISTRY_H
#define SO_DRAFT_REGISTRY_H

#include "model/hparams.h"
#include "token/tokenizer.h"

/* What a registered file is: a draft model, or heads of one kind. */
typedef enum so_registry_kind {
    SO_REGISTRY_MODEL,
    SO_REGISTRY_MEDUSA,
    SO_REGISTRY_BLOCKWISE,
    SO_REGISTRY_LOOKAHEAD,
} so_registry_kind;

/* The target that a draft was trained for. */
typedef struct so_draft_target {
    char name[128];  /* for messages only */
    char vocab[65];  /* SHA-256 of the token strings, separated by zero bytes */
    int64_t d_model; /* width and layers of the target */
    int64_t n_layers;
    double agreement; /* claimed: fraction of positions with the same most likely token; 0: none */
    so_registry_kind kind;
} so_draft_target;

/* SO_ENOTFOUND: the file is unregistered. SO_EFORMAT: its keys are invalid. */
int so_registry_read(const so_gguf *g, so_draft_target *out, so_err *err);
/* SO_EMISMATCH: the message names the draft's target and the difference. tok may be NULL. */
int so_registry_check(const so_draft_target *f, const so_hparams *hp, const so_tokenizer *tok,
                      so_err *err);
/* Reads and checks a draft that the user named: SO_OK also if it is unregistered. */
int so_registry_check_file(const so_checkpoint *draft, const so_hparams *hp,
                           const so_tokenizer *tok, so_err *err);

/* The claimed agreement of a file; 0: none. */
double so_registry_agreement(const so_checkpoint *draft);
/* Identifies a draft among others of its shape: a hash of its size and some of its weights. */
uint64_t so_registry_id(const so_checkpoint *draft);

enum { SO_REGISTRY_MAX = 8 };
typedef struct so_registry_found {
    char *paths[SO_REGISTRY_MAX];
    int n;
} so_registry_found;

/* The registered drafts of one kind for a target, at most SO_REGISTRY_MAX. These places are searched in this
 * order: the target's folder, models/ of the installation or source tree, models/ of the XDG data
 * folder, SOOTH_MODELS, models/ of the cache. In all but the first, folders one level below are
 * searched too. Only headers are read, and only of files at most half as large as the target. Files
 * that do not fit the target are named in the debug log. */
void so_registry_search(const so_checkpoint *target, const so_hparams *hp, const so_tokenizer *tok,
                        so_registry_kind kind, so_registry_found *out);
void so_registry_found_free(so_registry_found *f);

#endif
