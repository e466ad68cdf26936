/* Tensor names. Code uses the GGUF name of a tensor. In a Hugging Face folder the tensor is found
 * through tables of pairs, one table for the layers and one for the other tensors (arch.h; the
 * first pair of the latter is the embedding). Flags state how the stored form differs:
 *
 *   ADD_ONE      folders of Gemma store norm weights around 0, GGUF around 1
 *   TRANSPOSED   folders of GPT-2 store matrices as [inputs][outputs]
 *   ROTATED      GGUF files of Llama have the rows of q and k permuted so that rope pairs are
 *                neighbours
 *
 * Private to src/model. */
#ifndef SO_MODEL_NAMES_H
#define SO_MODEL_NAMES_H

#include "model/hparams.h"

enum { SO_NAME_ADD_ONE = 1, SO_NAME_TRANSPOSED = 2, SO_NAME_ROTATED = 4 };

typedef struct so_name_pair {
    const char *gguf, *hf; /* in layers: the part after "blk.N." and "layers.N." */
    unsigned flags;
} so_name_pair;

typedef struct so_names {
    const so_checkpoint *ck;
    const so_name_pair *global, *layer;
    int n_global, n_layer;
    const char *hf_prefix, *hf_layers; /* "model." and "layers"; "transformer." and "h" */
    bool (*folder_name)(const char *gguf, char *buf, size_t cap); /* so_arch_info */
} so_names;

enum { SO_NAME_CAP = 160 };
/* The matrix of drafts that read their target's hidden states. */
#define SO_TARGET_HIDDEN_TENSOR "target_state.weight"

void so_names_init(so_names *n, const so_checkpoint *ck, const so_hparams *hp);

/* layer −1: a tensor outside the layers. buf receives the name in the file. NULL: the architecture
 * has no such tensor. */
const so_name_pair *so_names_resolve(const so_names *n, const char *gguf, int layer,
                                     char buf[SO_NAME_CAP]);
/* Tensors that a forward pass does not need: causal masks, stored rope frequencies, the vision part
 * of a multimodal model. */
bool so_names_ignored(so_str name);

#endif
