/* A Hugging Face folder as a source for so_convert: GGUF's tensor names, row order and metadata.
 *
 * The folder is loaded first, so that a file is written only from a model that runs. The tokenizer
 * is stored as the folder's own JSON (tokenizer.huggingface.json and
 * tokenizer.huggingface.config.json), which so_checkpoint_open reads back, so the token ids are
 * those of the folder. Other engines need tokenizer tables of their own and can read only the
 * weights of such a file. */
#ifndef SO_MODEL_CONVERT_H
#define SO_MODEL_CONVERT_H

#include "format/checkpoint.h"
#include "format/convert.h"

/* Borrows ck until so_model_convert_source_free. */
int so_model_convert_source(so_checkpoint *ck, so_convert_source *out, so_err *err);
void so_model_convert_source_free(so_convert_source *s);

#endif
