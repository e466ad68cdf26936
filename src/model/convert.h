/* A Hugging Face folder as a source of so_convert: GGUF's names, row order and metadata.
 *
 * The folder is loaded first, so that a file is only ever written from a model that would run. The
 * tokenizer travels as the folder's own JSON (tokenizer.huggingface.json and
 * tokenizer.huggingface.config.json), which so_checkpoint_open unpacks again: the ids are the
 * folder's by construction. Other engines, which want their own tables, read the weights only. */
#ifndef SO_MODEL_CONVERT_H
#define SO_MODEL_CONVERT_H

#include "format/checkpoint.h"
#include "format/convert.h"

/* Borrows ck. */
int so_model_convert_source(so_checkpoint *ck, so_convert_source *out, so_err *err);
void so_model_convert_source_free(so_convert_source *s);

#endif
