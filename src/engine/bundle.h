/* Everything that -m stands for, opened in the right order: the files, a backend, the weights, the
 * tokenizer, the chat template, and the sampling the model's authors recommend. Immutable once
 * open; the backend inside takes one thread at a time. */
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
    bool quantize;
    so_dtype dtype;
    bool draft;                                /* may be one that can say only some of its tokens */
    void (*progress)(void *user, double done); /* may be NULL */
    void *user;
    so_backend *backend; /* borrowed, for a second model beside the first; NULL: one of its own */
} so_bundle_opts;

typedef struct so_bundle {
    so_checkpoint *ck;
    so_backend *backend;
    bool shares_backend; /* it belongs to another bundle */
    so_model *model;
    so_tokenizer *tok;
    so_chat *chat;           /* NULL: the model has no template */
    so_sample_params sample; /* defaults, with what the model's generation config sets */
} so_bundle;

void so_bundle_defaults(so_bundle_opts *o);
int so_bundle_open(const char *path, const so_bundle_opts *o, so_bundle *out, so_err *err);
void so_bundle_close(so_bundle *b);

/* Opens a draft that was named, on the target's backend; one that is registered for another target
 * is refused. progress and user of o may be set, nothing else is read. */
int so_bundle_open_draft(const char *path, const so_bundle *target, const so_bundle_opts *o,
                         so_bundle *out, so_err *err);
/* The same for the best of those that are registered for the target (draft/registry.h), by what was
 * measured with this type of cache (plan/choose.h); *out is left alone and false returned where
 * there is none, or none that can be opened. */
bool so_bundle_find_draft(const so_bundle *target, so_dtype kv_dtype, so_bundle *out);

/* The sampling that generation_config.json or GGUF's general.sampling.* recommend, laid over *p.
 * A value out of range is left out with a warning. */
void so_bundle_read_sampling(const so_checkpoint *ck, so_sample_params *p);

#endif
