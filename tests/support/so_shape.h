/* Tiny random Llama models as GGUF files, for tests that need shapes no golden file has. */
#ifndef SO_SHAPE_H
#define SO_SHAPE_H

#include "format/gguf.h"
#include "so_rig.h"

typedef struct so_shape {
    int d_model, n_layers, n_heads, n_heads_kv, head_dim, d_ff, n_vocab, n_ctx;
    int window;    /* 0: none */
    int nan_token; /* > 0: this token's embedding is NaN; the output matrix is finite */
    uint64_t seed;
    int d_state; /* > 0: a draft that reads its target's states */
    /* With d_state = d_model, and the seed of its target: says the likeliest token of the state
     * that it reads, token 0 where it reads none, whatever the text. */
    bool echo;
    /* Harm, by tensor name; NULL: none. */
    const char *drop;    /* left out */
    const char *shorten; /* one element shorter in its first dimension */
    const char *sicken;  /* its last element is infinite */
    const char *extra;   /* added, one element */
    /* What it can say, one bit an id; NULL: everything. Another type than bytes is harm. */
    const void *vocab_mask;
    int n_vocab_mask; /* elements */
    so_gguf_type vocab_mask_type;
} so_shape;

/* The small one that most tests take; they add n_layers, n_vocab, n_ctx and a seed. */
#define SO_SHAPE_SMALL .d_model = 32, .n_heads = 2, .n_heads_kv = 1, .head_dim = 16, .d_ff = 48

/* Writes dir/shape.gguf (float32); the path, to be freed. Fails the test on any error. */
char *so_shape_write(const char *dir, const so_shape *t);
/* Opens such a model; its file is gone afterwards. */
void so_shape_open(so_rig *r, const so_shape *t, const so_rig_opts *o);
/* n tokens below n_vocab, never nan_token. */
void so_shape_tokens(const so_shape *t, uint64_t seed, int32_t *out, int n);

#endif
