/* Registered drafts: files that say whom they were trained for (`sooth.draft.*`, docs/formats.md),
 * and where they are looked for.
 *
 * A draft fits a target that has the same vocabulary, token by token, and the same width and number
 * of layers. Names are not compared: a target keeps its draft when it is quantised or renamed. One
 * that is given by name must fit, or is refused; one that is merely found and does not fit is
 * passed over. Files without these keys are nobody's: they can be given, and are never found. */
#ifndef SO_DRAFT_REGISTRY_H
#define SO_DRAFT_REGISTRY_H

#include "model/hparams.h"
#include "token/tokenizer.h"

/* Whom a draft is for. */
typedef struct so_draft_for {
    char name[128];  /* for messages */
    char vocab[65];  /* SHA-256 of the token strings, a zero byte between each two */
    int64_t d_model; /* width and layers of the target */
    int64_t n_layers;
    double
        agreement; /* share of likeliest tokens that are the target's, by its own word; 0: none */
} so_draft_for;

/* SO_ENOTFOUND where the file says nothing; SO_EFORMAT where what it says makes no sense. */
int so_registry_read(const so_gguf *g, so_draft_for *out, so_err *err);
/* SO_EMISMATCH says for whom the draft is and how this target differs. tok may be NULL. */
int so_registry_check(const so_draft_for *f, const so_hparams *hp, const so_tokenizer *tok,
                      so_err *err);
/* Both, for a draft that was named: SO_OK also where it is not registered at all. */
int so_registry_admit(const so_checkpoint *draft, const so_hparams *hp, const so_tokenizer *tok,
                      so_err *err);

/* so_draft_for.agreement of a file. */
double so_registry_agreement(const so_checkpoint *draft);
/* Tells a draft from others of its shape: its size and some of its weights. */
uint64_t so_registry_id(const so_checkpoint *draft);

enum { SO_REGISTRY_MAX = 8 };
typedef struct so_registry_found {
    char *paths[SO_REGISTRY_MAX];
    int n;
} so_registry_found;

/* All registered drafts of a target that lies at `path` (file or folder), nearest first: beside it,
 * under models/ of the installation or source tree, under XDG data, in SOOTH_MODELS, in the cache.
 * In each of them and one folder below; only headers are read, and only of files less than half as
 * large as the target. What is there and does not fit is named in the debug log. */
void so_registry_search(const so_checkpoint *target, const so_hparams *hp, const so_tokenizer *tok,
                        so_registry_found *out);
void so_registry_found_free(so_registry_found *f);

#endif
