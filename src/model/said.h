/* The ids that a draft model can say, where they are fewer than those it can read. */
#ifndef SO_MODEL_SAID_H
#define SO_MODEL_SAID_H

#include "format/gguf.h"

#define SO_SAID_KEY "sooth.draft.output_mask"

/* The ids whose bits are set in a file's mask, ascending: *ids is the caller's, NULL where there is
 * no mask or all bits are set. g may be NULL: no mask. SO_EFORMAT where the mask is of another
 * type or length, empty, or names ids past n_vocab. */
int so_said_read(const so_gguf *g, int n_vocab, int32_t **ids, int *n, so_err *err);

#endif
