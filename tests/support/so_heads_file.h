/* Files of random decoding heads for a tiny target, whole or broken on purpose. */
#ifndef SO_HEADS_FILE_H
#define SO_HEADS_FILE_H

#include "draft/registry.h"
#include "model/heads.h"

typedef struct so_heads_file {
    const char *kind; /* "medusa", … */
    int n_heads, n_layers, d, d_hidden;
    int n_output; /* > 0: each head has an output matrix of its own with so many rows */
    bool zero;    /* blocks are 0: every head is the target's own output */
    uint64_t seed;
    const unsigned char *mask; /* vocabulary subset; NULL: none */
    int n_mask;
    const float *accuracy;   /* [n_heads][n_ranks]; NULL: none */
    int n_ranks, n_accuracy; /* n_accuracy: elements written; 0: n_heads · n_ranks */
    const float *embeddings; /* lookahead: [n_heads][d]; NULL: random */
    const char *drop, *extra, *widen, *sicken; /* harm to a tensor, by name */
    const char *no_key;                        /* this key is left out */
    const so_draft_target *registered;         /* keys of its registration; NULL: none */
} so_heads_file;

/* Fails the test on any error. */
void so_heads_write(const char *path, const so_heads_file *f);
/* The same medusa heads as a folder in the published layout. */
void so_heads_write_folder(const char *dir, const so_heads_file *f);

#endif
