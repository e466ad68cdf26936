/* One name for every tensor: GGUF's. A folder's tensors are found under it through a table of
 * pairs per architecture (arch.h; its first pair is the embedding), together with what separates
 * the two conventions:
 *
 *   ADD_ONE      Gemma's folders store norm weights around 0, GGUF around 1
 *   TRANSPOSED   GPT-2's folders store matrices [inputs][outputs]
 *   ROTATED      Llama's GGUF files have the rows of q and k permuted for adjacent rotary pairs
 *
 * Private to src/model. */
#ifndef SO_MODEL_NAMES_H
#define SO_MODEL_NAMES_H

#include "model/hparams.h"

enum { SO_NAME_ADD_ONE = 1, SO_NAME_TRANSPOSED = 2, SO_NAME_ROTATED = 4 };

typedef struct so_name_pair {
    const char *gguf, *hf; /* within a layer: what follows "blk.N." and "layers.N." */
    unsigned flags;
} so_name_pair;

typedef struct so_names {
    const so_checkpoint *ck;
    const so_name_pair *global, *layer;
    int n_global, n_layer;
    const char *hf_prefix, *hf_layers; /* "model." and "layers."; "" and "h." */
} so_names;

enum { SO_NAME_CAP = 160 };
#define SO_STATE_TENSOR "target_state.weight" /* of drafts that read their target's states */

void so_names_init(so_names *n, const so_checkpoint *ck, const so_hparams *hp);

/* layer −1: a tensor outside the layers. buf gets the file's own name. NULL: the architecture has
 * no such tensor. */
const so_name_pair *so_names_resolve(const so_names *n, const char *gguf, int layer,
                                     char buf[SO_NAME_CAP]);
/* Tensors that carry nothing a forward pass needs: causal masks, stored frequencies, the eyes of a
 * multimodal model. */
bool so_names_ignored(so_str name);

#endif
