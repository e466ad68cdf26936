/* A tiny model that is complete: weights, a SentencePiece-style vocabulary with byte fallback, a
 * chat template. It talks nonsense, always the same, in milliseconds; for tests of what is built on
 * models rather than of models. */
#ifndef SO_TINY_H
#define SO_TINY_H

#include "draft/registry.h"

enum { SO_TINY_CTX = 256 };

typedef struct so_tiny_opts {
    bool no_chat;         /* leave the template out */
    const char *template; /* another template */
    float temp;           /* general.sampling.temp; 0: left out */
    bool other_vocab;     /* the last two tokens have changed places */
    bool other_end;       /* the end token is the first one */
    int layers;           /* 0: two; up to 256, each as slow as the last */
    bool idle;            /* layers behind the second add nothing: the words of the default model,
                             slower; that is the perfect draft for it then */
    const so_draft_target *registered; /* as a draft of that one; what is 0 or empty is left out */
    int nan_token; /* > 0: its embedding is NaN; all else is as in the model without it */
} so_tiny_opts;

/* Fails the test on any error. */
void so_tiny_write(const char *path, const so_tiny_opts *o);

#endif
