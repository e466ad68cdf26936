/* The definition of so_gguf, private to the parser (gguf.c) and the accessors (gguf_get.c). */
#ifndef SO_FORMAT_GGUF_IMPL_H
#define SO_FORMAT_GGUF_IMPL_H

#include "base/map.h"
#include "base/mem.h"
#include "format/gguf.h"

enum { SO_GGUF_MAX_PARTS = 1024 };

struct so_gguf {
    char *path;
    uint32_t version;
    size_t file_bytes;
    so_map_file *maps; /* [n_maps], one per part; none for a file in memory */
    size_t n_maps;
    so_gguf_kv *kv; /* [n_kv], metadata of the first part */
    size_t n_kv;
    so_map *kv_index;   /* key → index in kv; NULL until metadata is read */
    so_tensor *tensors; /* [n_tensors], of all parts in order */
    size_t n_tensors;
    so_map *tensor_index;
    so_arena arena; /* string tables of kv */
};

#endif
