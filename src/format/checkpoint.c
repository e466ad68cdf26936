/* Opens a model on disk: detects its format from the first bytes, opens its files, and lists every
 * tensor in one table.
 *
 * Each JSON file of a folder has a size limit, because parsed JSON takes up to 16 times the memory
 * of its text. Shard names in the index file are untrusted: a name with a slash is rejected, so an
 * index cannot refer to a file outside its folder. Refuses pickled weights, a single .safetensors
 * file (it has no config), and a GGUF file without tensors if weights are needed. An open
 * checkpoint is read-only and may be used from any thread. */
#include "format/checkpoint.h"

#include <stdlib.h>

#include "base/map.h"
#include "base/mem.h"
#include "format/safetensors.h"

enum { MAX_SHARDS = 1024 };

struct so_checkpoint {
    char *path;
    so_gguf *gguf;
    json_t *config, *generation_config, *tokenizer, *tokenizer_config;
    so_buf template_file;
    so_safetensors **shards; /* [n_shards] */
    size_t n_shards;
    const so_tensor **tensors; /* [n_tensors], borrowed from gguf or shards */
    size_t n_tensors;
    so_map *index;   /* name → index in tensors */
    so_map *skipped; /* name → shard << 32 | index in its list of skipped tensors */
};

static int load_json(const char *path, size_t max_bytes, size_t flags, json_t **out, so_err *err) {
    so_buf text = {.max = max_bytes};
    int rc = so_file_read(path, max_bytes, &text, err);
    json_error_t je;
    if (rc == SO_OK) {
        *out = json_loadb(text.data ? text.data : "", text.len,
                          JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | flags, &je);
        if (!*out)
            rc = so_err_set(err, SO_EFORMAT, "%s: line %d: not valid JSON: %s", path, je.line,
                            je.text);
        else if (!json_is_object(*out))
            rc = so_err_set(err, SO_EFORMAT, "%s: not a JSON object", path);
    }
    so_buf_free(&text);
    return rc;
}

/* Loads one JSON file of a folder; a missing file is not an error. */
static int load_optional(const char *dir, const char *name, size_t max_bytes, size_t flags,
                         json_t **out, so_err *err) {
    char *path = so_path_join(dir, name);
    int rc = so_file_exists(path) ? load_json(path, max_bytes, flags, out, err) : SO_OK;
    free(path);
    return rc;
}

static int load_folder_json(so_checkpoint *c, so_err *err) {
    const struct {
        const char *name;
        size_t max_bytes;
        json_t **out;
        size_t flags;
    } files[] = {
        {"config.json", 4u << 20, &c->config, 0},
        {"generation_config.json", 1u << 20, &c->generation_config, 0},
        {"tokenizer.json", 64u << 20, &c->tokenizer, 0},
        /* model_max_length is often 10^30, meaning "no limit", which overflows an integer */
        {"tokenizer_config.json", 16u << 20, &c->tokenizer_config, JSON_DECODE_INT_AS_REAL},
    };
    int rc = SO_OK;
    for (size_t i = 0; i < SO_LEN(files) && rc == SO_OK; i++)
        rc = load_optional(c->path, files[i].name, files[i].max_bytes, files[i].flags, files[i].out,
                           err);
    char *jinja = so_path_join(c->path, "chat_template.jinja");
    if (rc == SO_OK && so_file_exists(jinja))
        rc = so_file_read(jinja, 1u << 20, &c->template_file, err);
    free(jinja);
    return rc;
}

/* Opens a shard unless it is open already; `shard_index` maps file names to c->shards indices. */
static int open_shard(so_checkpoint *c, so_map *shard_index, so_str name, so_err *err) {
    int64_t seen;
    if (so_map_get(shard_index, name, &seen))
        return SO_OK;
    if (name.len == 0 || name.ptr[0] == '.' || memchr(name.ptr, '/', name.len) ||
        memchr(name.ptr, '\0', name.len))
        return so_err_set(
            err, SO_EFORMAT,
            "%s: model.safetensors.index.json: weight_map names the file '%.*s', which "
            "is not a plain file name",
            c->path, SO_STR_ARG(name));
    if (c->n_shards == MAX_SHARDS)
        return so_err_set(err, SO_ELIMIT, "%s: model.safetensors.index.json: more than %d files",
                          c->path, MAX_SHARDS);
    char *path = so_path_join(c->path, name.ptr);
    int rc = so_safetensors_open(path, &c->shards[c->n_shards], err);
    if (rc == SO_OK)
        so_map_add(shard_index, name, (int64_t)c->n_shards++);
    free(path);
    return rc;
}

static int index_shard(so_checkpoint *c, size_t shard, so_err *err) {
    const so_safetensors *s = c->shards[shard];
    for (size_t i = 0; i < s->n_tensors; i++) {
        const so_tensor *t = &s->tensors[i];
        if (!so_map_add(c->index, t->name, (int64_t)c->n_tensors))
            return so_err_set(err, SO_EFORMAT, "%s: tensor %.*s is also in another file", s->path,
                              SO_STR_ARG(t->name));
        c->tensors[c->n_tensors++] = t;
    }
    for (size_t i = 0; i < s->n_skipped; i++)
        so_map_add(c->skipped, s->skipped[i].name, (int64_t)(shard << 32 | i));
    return SO_OK;
}

static int index_shards(so_checkpoint *c, so_err *err) {
    size_t n = 0;
    for (size_t i = 0; i < c->n_shards; i++)
        n += c->shards[i]->n_tensors;
    c->tensors = SO_NEW_N(const so_tensor *, n);
    int rc = SO_OK;
    for (size_t i = 0; i < c->n_shards && rc == SO_OK; i++)
        rc = index_shard(c, i, err);
    return rc;
}

/* Every tensor in the index must be in the file that the index names for it. */
static int check_weight_map(const so_checkpoint *c, const json_t *weight_map,
                            const so_map *shard_index, so_err *err) {
    const char *name;
    json_t *file;
    json_object_foreach((json_t *)(uintptr_t)weight_map, name, file) {
        int64_t want, at;
        so_map_get(shard_index, so_str_c(json_string_value(file)), &want);
        const so_safetensors *s = c->shards[want];
        bool listed = so_map_get(c->index, so_str_c(name), &at) && c->tensors[at] >= s->tensors &&
                      c->tensors[at] < s->tensors + s->n_tensors;
        if (!listed && !(so_map_get(c->skipped, so_str_c(name), &at) && at >> 32 == want))
            return so_err_set(err, SO_EMISMATCH,
                              "%s: tensor %.200s is not in this file, although "
                              "model.safetensors.index.json says it is",
                              s->path, name);
    }
    return SO_OK;
}

static int open_sharded(so_checkpoint *c, const char *index_path, so_err *err) {
    json_t *root = NULL, *weight_map, *file;
    const char *name;
    int rc = load_json(index_path, 32u << 20, 0, &root, err);
    weight_map = json_object_get(root, "weight_map");
    if (rc == SO_OK && json_object_size(weight_map) == 0)
        rc = so_err_set(err, SO_EFORMAT, "%s: weight_map is missing or empty", index_path);
    so_map *shard_index = so_map_create(16);
    c->shards = SO_NEW_N(so_safetensors *, MAX_SHARDS);
    if (rc == SO_OK)
        json_object_foreach(weight_map, name, file) {
            if (!json_is_string(file))
                rc = so_err_set(err, SO_EFORMAT,
                                "%s: weight_map of tensor %.200s is not a file name", index_path,
                                name);
            else
                rc = open_shard(c, shard_index,
                                (so_str){json_string_value(file), json_string_length(file)}, err);
            if (rc != SO_OK)
                break;
        }
    if (rc == SO_OK)
        rc = index_shards(c, err);
    if (rc == SO_OK)
        rc = check_weight_map(c, weight_map, shard_index, err);
    so_map_free(shard_index);
    json_decref(root);
    return rc;
}

static int open_single(so_checkpoint *c, const char *path, so_err *err) {
    c->shards = SO_NEW_N(so_safetensors *, 1);
    int rc = so_safetensors_open(path, &c->shards[0], err);
    if (rc != SO_OK)
        return rc;
    c->n_shards = 1;
    return index_shards(c, err);
}

static int open_weights(so_checkpoint *c, bool required, so_err *err) {
    char *single = so_path_join(c->path, "model.safetensors");
    char *index = so_path_join(c->path, "model.safetensors.index.json");
    int rc = SO_OK;
    if (so_file_exists(single))
        rc = open_single(c, single, err);
    else if (so_file_exists(index))
        rc = open_sharded(c, index, err);
    else if (required)
        rc = so_err_set(err, SO_ENOTFOUND,
                        "%s: folder has neither model.safetensors nor model.safetensors.index.json",
                        c->path);
    if (rc == SO_OK && required && c->n_tensors == 0)
        rc = so_err_set(err, SO_EFORMAT, "%s: holds no tensors", c->path);
    free(single);
    free(index);
    return rc;
}

static int open_folder(so_checkpoint *c, so_checkpoint_need need, so_err *err) {
    int rc = load_folder_json(c, err);
    if (rc != SO_OK)
        return rc;
    if (need == SO_CHECKPOINT_TOKENIZER) {
        if (!c->tokenizer)
            rc = so_err_set(err, SO_ENOTFOUND, "%s: folder has no tokenizer.json", c->path);
        return rc;
    }
    if (!c->config)
        return so_err_set(err, SO_ENOTFOUND,
                          "%s: folder has no config.json; a model is a GGUF file or a Hugging Face "
                          "folder",
                          c->path);
    return open_weights(c, need == SO_CHECKPOINT_ALL, err);
}

/* A GGUF file converted from a folder embeds the folder's tokenizer JSON files instead of GGUF's
 * own vocabulary tables. */
static int unpack_tokenizer(so_checkpoint *c, so_err *err) {
    const struct {
        const char *key;
        size_t flags;
        json_t **out;
    } list[] = {
        {"tokenizer.huggingface.json", 0, &c->tokenizer},
        {"tokenizer.huggingface.config.json", JSON_DECODE_INT_AS_REAL, &c->tokenizer_config},
        {"tokenizer.huggingface.generation_config.json", 0, &c->generation_config},
    };
    if (so_gguf_find(c->gguf, "tokenizer.ggml.model"))
        return SO_OK;
    for (size_t i = 0; i < SO_LEN(list); i++) {
        so_str text;
        json_error_t je;
        if (!so_gguf_find(c->gguf, list[i].key))
            continue;
        int rc = so_gguf_get_str(c->gguf, list[i].key, &text, err);
        if (rc != SO_OK)
            return rc;
        if (text.len <= 64u << 20)
            *list[i].out = json_loadb(text.ptr, text.len,
                                      JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | list[i].flags, &je);
        if (!json_is_object(*list[i].out))
            return so_err_set(err, SO_EFORMAT, "%s: %s (%zu bytes) is not a JSON object", c->path,
                              list[i].key, text.len);
    }
    return SO_OK;
}

static int open_gguf(so_checkpoint *c, so_checkpoint_need need, so_err *err) {
    int rc = so_gguf_open(c->path, &c->gguf, err);
    if (rc != SO_OK)
        return rc;
    size_t n = so_gguf_n_tensors(c->gguf);
    if (n == 0 && need == SO_CHECKPOINT_ALL)
        return so_err_set(err, SO_EFORMAT, "%s: holds a vocabulary but no tensors", c->path);
    c->tensors = SO_NEW_N(const so_tensor *, n);
    for (size_t i = 0; i < n; i++)
        c->tensors[i] = so_gguf_tensor_at(c->gguf, i);
    c->n_tensors = n;
    return unpack_tokenizer(c, err);
}

/* Opens a single file; its first bytes decide the format. */
static int open_file(so_checkpoint *c, so_checkpoint_need need, so_err *err) {
    so_map_file m;
    int rc = so_file_map(c->path, &m, err);
    if (rc != SO_OK)
        return rc;
    size_t i = 0;
    while (i < m.len && i < 4096 && strchr(" \t\r\n", m.data[i]) && m.data[i])
        i++;
    bool is_json = i < m.len && m.data[i] == '{';
    bool is_safetensors = m.len > 9 && m.data[8] == '{' && memcmp(m.data, "GGUF", 4) != 0;
    so_file_unmap(&m);
    if (is_json && need == SO_CHECKPOINT_TOKENIZER)
        return load_json(c->path, 64u << 20, 0, &c->tokenizer, err);
    if (is_json)
        return so_err_set(err, SO_EINVAL,
                          "%s: is a JSON file; give the folder that holds the model", c->path);
    if (is_safetensors)
        return so_err_set(err, SO_EINVAL,
                          "%s: is a single safetensors file; give the folder that also holds its "
                          "config.json",
                          c->path);
    return open_gguf(c, need, err);
}

int so_checkpoint_open(const char *path, so_checkpoint_need need, so_checkpoint **out,
                       so_err *err) {
    so_checkpoint *c = SO_NEW(so_checkpoint);
    c->path = so_strdup(path);
    c->index = so_map_create(64);
    c->skipped = so_map_create(4);
    int rc = so_file_is_dir(path) ? open_folder(c, need, err) : open_file(c, need, err);
    if (rc == SO_OK)
        *out = c;
    else
        so_checkpoint_close(c);
    return rc;
}

void so_checkpoint_close(so_checkpoint *c) {
    if (!c)
        return;
    so_gguf_close(c->gguf);
    for (size_t i = 0; i < c->n_shards; i++)
        so_safetensors_close(c->shards[i]);
    free(c->shards);
    free(c->tensors);
    so_map_free(c->index);
    so_map_free(c->skipped);
    json_decref(c->config);
    json_decref(c->generation_config);
    json_decref(c->tokenizer);
    json_decref(c->tokenizer_config);
    so_buf_free(&c->template_file);
    free(c->path);
    free(c);
}

const char *so_checkpoint_path(const so_checkpoint *c) { return c->path; }
const so_gguf *so_checkpoint_gguf(const so_checkpoint *c) { return c->gguf; }
const json_t *so_checkpoint_config(const so_checkpoint *c) { return c->config; }
const json_t *so_checkpoint_generation_config(const so_checkpoint *c) {
    return c->generation_config;
}
const json_t *so_checkpoint_tokenizer(const so_checkpoint *c) { return c->tokenizer; }
const json_t *so_checkpoint_tokenizer_config(const so_checkpoint *c) { return c->tokenizer_config; }
so_str so_checkpoint_template_file(const so_checkpoint *c) { return so_buf_str(&c->template_file); }
void so_checkpoint_drop(const so_checkpoint *c, const void *p, size_t len) {
    if (c->gguf)
        so_gguf_drop(c->gguf, p, len);
    for (size_t i = 0; i < c->n_shards; i++)
        if (so_file_drop(&c->shards[i]->map, p, len))
            return;
}

size_t so_checkpoint_n_tensors(const so_checkpoint *c) { return c->n_tensors; }

size_t so_checkpoint_bytes(const so_checkpoint *c) {
    size_t n = c->gguf ? so_gguf_file_bytes(c->gguf) : 0;
    for (size_t i = 0; i < c->n_shards; i++)
        n += c->shards[i]->map.len;
    return n;
}

const so_tensor *so_checkpoint_tensor_at(const so_checkpoint *c, size_t i) {
    SO_ASSERT_OP(i, <, c->n_tensors);
    return c->tensors[i];
}

const so_tensor *so_checkpoint_tensor(const so_checkpoint *c, const char *name) {
    int64_t i;
    if (c->gguf)
        return so_gguf_tensor(c->gguf, name);
    return so_map_get(c->index, so_str_c(name), &i) ? c->tensors[i] : NULL;
}

int so_checkpoint_require(const so_checkpoint *c, const char *name, const so_tensor **out,
                          so_err *err) {
    const so_tensor *t = so_checkpoint_tensor(c, name);
    int64_t at;
    if (t && t->dtype == SO_DTYPE_F8_E4M3)
        return so_err_set(err, SO_EUNSUPPORTED,
                          "%s: tensor %s cannot be used: dtype F8_E4M3 is supported only for the "
                          "matrices of a model",
                          c->path, name);
    if (t) {
        *out = t;
        return SO_OK;
    }
    if (!so_map_get(c->skipped, so_str_c(name), &at))
        return so_err_set(err, SO_ENOTFOUND,
                          "%s: tensor %s is missing: the file is not whole, download or convert "
                          "the model again",
                          c->path, name);
    const so_safetensors *s = c->shards[at >> 32];
    return so_err_set(err, SO_EUNSUPPORTED, "%s: tensor %s cannot be used: %s", s->path, name,
                      s->skipped[at & 0xFFFFFFFF].reason);
}
