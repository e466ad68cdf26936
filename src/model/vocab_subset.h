/* The vocabulary subset of a draft model: the tokens it has logits for, if fewer than it can
 * read. */
#ifndef SO_MODEL_VOCAB_SUBSET_H
#define SO_MODEL_VOCAB_SUBSET_H

#include "format/gguf.h"

#define SO_VOCAB_SUBSET_KEY "sooth.draft.output_mask"

/* Reads the ids whose bits are set in the file's mask, ascending. *ids belongs to the caller; NULL
 * if there is no mask or all bits are set, and *n is n_vocab then. g may be NULL: no mask.
 * SO_EFORMAT if the mask has a wrong type or length, is empty, or selects ids past n_vocab. */
int so_vocab_subset_read(const so_gguf *g, int n_vocab, int32_t **ids, int *n, so_err *err);

#endif
