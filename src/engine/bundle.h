/* A model with all that belongs to it: its files, a backend, the weights, the tokenizer, the chat
 * template and the recommended sampling parameters. Immutable once open. The backend may be used by
 * one thread at a time. */
#ifndef SO_ENGINE_BUNDLE_H
#define SO_ENGINE_BUNDLE_H

#include "format/checkpoint.h"
#include "model/model.h"
#include "sample/sample.h"
#include "token/chat.h"
#include "token/tokenizer.h"

typedef struct so_bundle_opts {
    int n_threads; /* 0: all cores */
    so_cpu_level level;
    /* A backend's name (backend.h), or "auto": a GPU if there is one and the model fits, else the
     * CPU; NULL: cpu. */
    const char *device;
    const char *draft_device; /* the same for drafts of this model; NULL: the model's own backend */
    /* > 0: drafts have so many cores of their own, the last ones, and the model the others. < 0: the
     * same, but with one core in all they share it (shares_core is then set when opening). */
    int draft_cores;
    bool shares_core;
    bool quantize;
    so_dtype dtype;
    bool draft; /* the model may have logits for a vocabulary subset only */
    void (*progress)(void *user, double done); /* may be NULL */
    void *user;
    so_backend *backend; /* borrowed, so that a second model uses the same; NULL: open a new one */
} so_bundle_opts;

typedef struct so_bundle {
    so_checkpoint *ck;
    so_backend *backend;
    bool shares_backend;       /* the backend belongs to another bundle */
    so_backend *draft_backend; /* what drafts of this model run on; NULL: its own backend */
    so_model *model;
    so_tokenizer *tok;
    so_chat *chat;           /* NULL: no chat template, or it cannot be compiled */
    so_sample_params sample; /* defaults, overridden by the model's generation config */
} so_bundle;

void so_bundle_defaults(so_bundle_opts *o);
int so_bundle_open(const char *path, const so_bundle_opts *o, so_bundle *out, so_err *err);
void so_bundle_close(so_bundle *b);

/* Opens a draft that the user named, on the target's backend for drafts. Fails with SO_EMISMATCH if
 * it is registered for another target. Of o only progress and user are read; o may be NULL. */
int so_bundle_open_draft(const char *path, const so_bundle *target, const so_bundle_opts *o,
                         so_bundle *out, so_err *err);
/* Opens the best draft that is registered for the target (draft/registry.h), by the measurements
 * with this cache type (plan/choose_draft.h). Returns false and leaves *out unchanged if no draft
 * can be opened. */
bool so_bundle_find_draft(const so_bundle *target, so_dtype kv_dtype, so_bundle *out);

/* Overrides *p with the sampling parameters that generation_config.json or GGUF's
 * general.sampling.* recommend. A value out of range is ignored with a warning. */
void so_bundle_read_sampling(const so_checkpoint *ck, so_sample_params *p);

#endif
