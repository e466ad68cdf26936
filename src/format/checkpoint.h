/* A model on disk, whatever its form: one table of tensors and the metadata beside it.
 *
 *   GGUF file (or the first of a split)      so_checkpoint_gguf() is set
 *   Hugging Face folder                      config(), tokenizer(), … are set; weights are in
 *                                            model.safetensors, or in shards named by
 *                                            model.safetensors.index.json
 *
 * Tensor names are the file's own; the model layer maps them. Tensor data of a folder is aligned to
 * one byte only (safetensors promises nothing): copy elements out. Refuses: to convert, to load
 * lazily from a network, to guess a format from its name (the first bytes decide). */
#ifndef SO_FORMAT_CHECKPOINT_H
#define SO_FORMAT_CHECKPOINT_H

#include <jansson.h>

#include "format/gguf.h"

typedef struct so_checkpoint so_checkpoint;

typedef enum so_checkpoint_need {
    SO_CHECKPOINT_ALL,    /* tensors and, for a folder, config.json are required */
    SO_CHECKPOINT_CONFIG, /* the shape of a model: a GGUF's metadata, or a folder with config.json;
                             tensors are there if the files are */
    SO_CHECKPOINT_TOKENIZER, /* a vocabulary-only GGUF, a folder with only tokenizer.json, or a
                                tokenizer.json itself will do */
} so_checkpoint_need;

int so_checkpoint_open(const char *path, so_checkpoint_need need, so_checkpoint **out, so_err *err);
void so_checkpoint_close(so_checkpoint *c);

const char *so_checkpoint_path(const so_checkpoint *c);
size_t so_checkpoint_bytes(const so_checkpoint *c);        /* of all weight files */
const so_gguf *so_checkpoint_gguf(const so_checkpoint *c); /* NULL for a folder */

/* Parsed JSON of a folder, NULL where the file is absent (and for GGUF). */
const json_t *so_checkpoint_config(const so_checkpoint *c);            /* config.json */
const json_t *so_checkpoint_generation_config(const so_checkpoint *c); /* generation_config.json */
const json_t *so_checkpoint_tokenizer(const so_checkpoint *c);         /* tokenizer.json */
const json_t *so_checkpoint_tokenizer_config(const so_checkpoint *c);  /* tokenizer_config.json */
/* chat_template.jinja where it lies beside the config, else empty. */
so_str so_checkpoint_template_file(const so_checkpoint *c);

/* Gives back the memory behind [p, p + len) of a mapped file: the bytes have been copied elsewhere.
 * They can still be read, from the disk. Bytes that lie in no file are left alone. */
void so_checkpoint_drop(const so_checkpoint *c, const void *p, size_t len);

size_t so_checkpoint_n_tensors(const so_checkpoint *c);
const so_tensor *so_checkpoint_tensor_at(const so_checkpoint *c, size_t i);
const so_tensor *so_checkpoint_tensor(const so_checkpoint *c, const char *name);
/* The same with an error that tells a missing tensor from one whose dtype or shape we do not read.
 */
int so_checkpoint_require(const so_checkpoint *c, const char *name, const so_tensor **out,
                          so_err *err);

#endif
