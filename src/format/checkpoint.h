/* A model on disk in any supported format, as one table of tensors plus metadata.
 *
 *   GGUF file (or the first of a split)      so_checkpoint_gguf() is set
 *   Hugging Face folder                      config(), tokenizer(), … are set; weights are in
 *                                            model.safetensors, or in shards named by
 *                                            model.safetensors.index.json
 *
 * Tensor names are those of the file; the model layer maps them. Tensor data of a folder may be
 * unaligned (safetensors guarantees no alignment), so copy elements out. The format is detected
 * from the first bytes, never from the file name. Does not convert weights and does not access the
 * network. */
#ifndef SO_FORMAT_CHECKPOINT_H
#define SO_FORMAT_CHECKPOINT_H

#include <jansson.h>

#include "format/gguf.h"

typedef struct so_checkpoint so_checkpoint;

typedef enum so_checkpoint_need {
    SO_CHECKPOINT_ALL,    /* tensors and, for a folder, config.json are required */
    SO_CHECKPOINT_CONFIG, /* the shape of a model: a GGUF's metadata, or a folder with config.json;
                             tensors are optional */
    SO_CHECKPOINT_TOKENIZER, /* a vocabulary-only GGUF, a folder with only tokenizer.json, or a
                                tokenizer.json file is sufficient */
} so_checkpoint_need;

int so_checkpoint_open(const char *path, so_checkpoint_need need, so_checkpoint **out, so_err *err);
void so_checkpoint_close(so_checkpoint *c);

const char *so_checkpoint_path(const so_checkpoint *c);
size_t so_checkpoint_bytes(const so_checkpoint *c);        /* of all weight files */
const so_gguf *so_checkpoint_gguf(const so_checkpoint *c); /* NULL for a folder */

/* Parsed JSON files of a folder; NULL if the file is absent. For a GGUF file NULL as well, unless
 * it embeds the tokenizer files of the folder that it was converted from. */
const json_t *so_checkpoint_config(const so_checkpoint *c);            /* config.json */
const json_t *so_checkpoint_generation_config(const so_checkpoint *c); /* generation_config.json */
const json_t *so_checkpoint_tokenizer(const so_checkpoint *c);         /* tokenizer.json */
const json_t *so_checkpoint_tokenizer_config(const so_checkpoint *c);  /* tokenizer_config.json */
/* The content of chat_template.jinja in the folder; empty if there is none. */
so_str so_checkpoint_template_file(const so_checkpoint *c);

/* so_file_drop for the file that contains p: releases the memory of bytes that have been copied
 * elsewhere. Does nothing if p is in none of the checkpoint's files. */
void so_checkpoint_drop(const so_checkpoint *c, const void *p, size_t len);

size_t so_checkpoint_n_tensors(const so_checkpoint *c);
const so_tensor *so_checkpoint_tensor_at(const so_checkpoint *c, size_t i);
const so_tensor *so_checkpoint_tensor(const so_checkpoint *c, const char *name);
/* As so_checkpoint_tensor, with an error: SO_ENOTFOUND if the tensor is missing, SO_EUNSUPPORTED if
 * its dtype or shape is not supported, or if its numbers need scales (F8_E4M3). */
int so_checkpoint_require(const so_checkpoint *c, const char *name, const so_tensor **out,
                          so_err *err);

#endif
