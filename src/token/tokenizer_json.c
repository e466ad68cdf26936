/* Loads a tokenizer from a Hugging Face tokenizer.json and the config files in the same folder.
 *
 * The order matters: first the vocabulary and merges of the model (merges refer only to its
 * vocabulary), then the normalizer, then the added tokens (some are normalised), then the other
 * components (json_parts.c). BOS, EOS and the chat template are in tokenizer_config.json, further
 * end tokens in config.json and generation_config.json. Models other than BPE and Unigram
 * (WordPiece, …) and subword prefixes and suffixes are refused; every error names its field. Loading
 * only; one thread. */
#include <stdio.h>
#include <stdlib.h>

#include "token/json_get.h"
#include "token/tokenizer_impl.h"
#include "token/utf8.h"

#define FILE_NAME "tokenizer.json"

/* ---- vocabulary ---- */

typedef struct sizes {
    size_t n_entries, n_bytes;
    json_int_t max_id;
} sizes;

/* Ids may have gaps (padding), but a small file must not require a large table. */
static int check_id(const sizes *s, json_int_t id, const char *where, so_str name, so_err *err) {
    json_int_t limit = (json_int_t)s->n_entries * 4 + 4096;
    limit = SO_MIN(limit, SO_TOKENIZER_MAX_VOCAB);
    if (id >= 0 && id < limit)
        return 0;
    return so_err_set(err, SO_ERANGE, "%s: id %lld of \"%.*s\" is out of range (0 to %lld)", where,
                      (long long)id, SO_STR_ARG(name), (long long)limit - 1);
}

static int measure_words(json_t *vocab, sizes *s, so_err *err) {
    const char *key;
    size_t key_len;
    json_t *value;
    json_object_keylen_foreach(vocab, key, key_len, value) {
        so_str name = {key, key_len};
        if (!json_is_integer(value))
            return so_json_bad(FILE_NAME ": model.vocab", NULL, err, "\"%.*s\" has no integer id",
                               SO_STR_ARG(name));
        int rc = check_id(s, json_integer_value(value), FILE_NAME ": model.vocab", name, err);
        if (rc)
            return rc;
        s->n_bytes += key_len;
        s->max_id = SO_MAX(s->max_id, json_integer_value(value));
    }
    return 0;
}

/* Unigram: [["piece", score], …]; the id is the index. */
static int measure_pieces(const json_t *vocab, sizes *s, so_err *err) {
    size_t n = json_array_size(vocab), i;
    const json_t *entry;
    if (n > SO_TOKENIZER_MAX_VOCAB)
        return so_json_bad(FILE_NAME ": model.vocab", NULL, err, "has %zu entries (at most %d)", n,
                           SO_TOKENIZER_MAX_VOCAB);
    json_array_foreach(vocab, i, entry) {
        const json_t *piece = json_array_get(entry, 0);
        if (!json_is_string(piece) || !json_is_number(json_array_get(entry, 1)))
            return so_json_bad(FILE_NAME ": model.vocab", NULL, err,
                               "entry %zu is not a piece and a score", i);
        s->n_bytes += json_string_length(piece);
        s->max_id = (json_int_t)i;
    }
    return 0;
}

static int measure(json_t *vocab, const json_t *added, sizes *s, so_err *err) {
    size_t i;
    json_t *value;
    s->n_entries = json_object_size(vocab) + json_array_size(vocab) + json_array_size(added);
    int rc = json_is_array(vocab) ? measure_pieces(vocab, s, err) : measure_words(vocab, s, err);
    if (rc)
        return rc;
    json_array_foreach(added, i, value) {
        char path[64];
        so_str content;
        snprintf(path, sizeof path, FILE_NAME ": added_tokens[%zu]", i);
        const json_t *id = json_object_get(value, "id");
        if ((rc = so_json_get_str(value, path, "content", &content, err)))
            return rc;
        if (!json_is_integer(id))
            return so_json_bad(path, "id", err, "must be an integer");
        if ((rc = check_id(s, json_integer_value(id), path, content, err)))
            return rc;
        if (content.len > SO_TOKENIZER_MAX_ADDED_BYTES)
            return so_json_bad(path, "content", err, "has %zu bytes (at most %d)", content.len,
                               SO_TOKENIZER_MAX_ADDED_BYTES);
        s->n_bytes += content.len;
        s->max_id = SO_MAX(s->max_id, json_integer_value(id));
    }
    return 0;
}

static int read_vocab(so_tokenizer *t, json_t *vocab, so_err *err) {
    const char *key;
    size_t key_len, i;
    json_t *value;
    json_array_foreach(vocab, i, value) {
        so_str piece = so_json_str(json_array_get(value, 0));
        so_vocab_put(t, (int32_t)i, piece, 0);
        so_map_set(t->by_piece, t->pieces[i], (int64_t)i);
    }
    json_object_keylen_foreach(vocab, key, key_len, value) {
        so_str name = {key, key_len};
        int32_t id = (int32_t)json_integer_value(value);
        if (!(t->kinds[id] & SO_TOKEN_UNUSED))
            return so_json_bad(FILE_NAME ": model.vocab", NULL, err,
                               "\"%.*s\" and \"%.*s\" both have id %d", SO_STR_ARG(t->pieces[id]),
                               SO_STR_ARG(name), id);
        so_vocab_put(t, id, name, 0);
        so_map_add(t->by_piece, t->pieces[id], id);
    }
    return 0;
}

/* ---- merges ---- */

/* "a b" or ["a", "b"]. */
static bool merge_sides(const json_t *j, so_str *left, so_str *right) {
    if (json_is_array(j) && json_array_size(j) == 2 && json_is_string(json_array_get(j, 0)) &&
        json_is_string(json_array_get(j, 1))) {
        *left = so_json_str(json_array_get(j, 0));
        *right = so_json_str(json_array_get(j, 1));
        return true;
    }
    if (!json_is_string(j))
        return false;
    so_str line = so_json_str(j);
    const char *space = memchr(line.ptr, ' ', line.len);
    if (!space)
        return false;
    *left = (so_str){line.ptr, (size_t)(space - line.ptr)};
    *right = (so_str){space + 1, line.len - left->len - 1};
    return !memchr(right->ptr, ' ', right->len);
}

static int add_merge(so_tokenizer *t, const json_t *j, size_t rank, so_buf *joined, so_err *err) {
    so_str left, right;
    if (!merge_sides(j, &left, &right))
        return so_json_bad(FILE_NAME ": model.merges", NULL, err,
                           "entry %zu is not a pair of tokens", rank);
    so_buf_clear(joined);
    so_buf_append_str(joined, left);
    so_buf_append_str(joined, right);
    so_str names[3] = {left, right, so_buf_str(joined)};
    int32_t ids[3];
    for (int i = 0; i < 3; i++) {
        ids[i] = so_tokenizer_find(t, names[i]);
        if (ids[i] == SO_TOKEN_NONE)
            return so_json_bad(FILE_NAME ": model.merges", NULL, err,
                               "entry %zu needs \"%.*s\", which is not in model.vocab", rank,
                               SO_STR_ARG(names[i]));
    }
    so_bpe_add_merge(t->bpe, ids[0], ids[1], (uint32_t)rank, ids[2], t->pieces[ids[2]]);
    return 0;
}

static int read_merges(so_tokenizer *t, const json_t *merges, so_err *err) {
    if (!json_is_array(merges))
        return so_json_bad(FILE_NAME ": model.merges", NULL, err, "must be an array");
    so_buf joined = {0};
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < json_array_size(merges); i++)
        rc = add_merge(t, json_array_get(merges, i), i, &joined, err);
    so_buf_free(&joined);
    return rc;
}

/* ---- model ---- */

static bool empty(const json_t *j) {
    return !j || json_is_null(j) || (json_is_string(j) && json_string_length(j) == 0);
}

static bool is_unigram(const json_t *model) {
    const char *type = json_string_value(json_object_get(model, "type"));
    return type && strcmp(type, "Unigram") == 0;
}

static int check_model(const json_t *model, so_err *err) {
    const json_t *type = json_object_get(model, "type"),
                 *dropout = json_object_get(model, "dropout");
    if (!json_is_object(model))
        return so_json_bad(FILE_NAME ": model", NULL, err, "is missing or not an object");
    if (is_unigram(model))
        return json_is_array(json_object_get(model, "vocab"))
                   ? 0
                   : so_json_bad(FILE_NAME ": model.vocab", NULL, err,
                                 "is missing or not an array");
    if (type ? !json_is_string(type) || strcmp(json_string_value(type), "BPE") != 0
             : !json_object_get(model, "merges"))
        return so_err_set(err, SO_EUNSUPPORTED,
                          FILE_NAME ": model.type \"%s\" is not supported (BPE and Unigram are)",
                          json_is_string(type) ? json_string_value(type) : "?");
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};
    for (size_t i = 0; i < SO_LEN(affixes); i++)
        if (!empty(json_object_get(model, affixes[i])))
            return so_err_set(err, SO_EUNSUPPORTED, FILE_NAME ": model.%s is not supported",
                              affixes[i]);
    if (dropout && !json_is_null(dropout) && json_number_value(dropout) != 0)
        return so_err_set(err, SO_EUNSUPPORTED,
                          FILE_NAME ": model.dropout makes ids random; set it to null");
    if (!json_is_object(json_object_get(model, "vocab")))
        return so_json_bad(FILE_NAME ": model.vocab", NULL, err, "is missing or not an object");
    return 0;
}

static int read_unk_id(so_tokenizer *t, const json_t *model, so_err *err) {
    json_int_t unk = SO_TOKEN_NONE;
    const json_t *j = json_object_get(model, "unk_id");
    int rc = 0;
    if (j && !json_is_null(j))
        rc = so_json_get_int(model, FILE_NAME ": model", "unk_id", 0, t->n_vocab - 1, &unk, err);
    if (rc == 0 && unk == SO_TOKEN_NONE)
        rc = so_json_bad(FILE_NAME ": model", "unk_id", err,
                         "is missing: a Unigram model needs an unknown token");
    if (rc == 0) {
        t->unk = (int32_t)unk;
        t->kinds[unk] |= SO_TOKEN_UNKNOWN;
    }
    return rc;
}

/* Called after the added tokens are loaded: control tokens are never the result of encoding. */
static int make_unigram(so_tokenizer *t, const json_t *model, so_err *err) {
    const json_t *entry;
    bool bytes = false;
    size_t i;
    int rc = so_json_get_bool(model, FILE_NAME ": model", "byte_fallback", &bytes, err);
    if (rc)
        return rc;
    double *scores = SO_NEW_N(double, t->n_vocab);
    double least = 0;
    json_array_foreach(json_object_get(model, "vocab"), i, entry) {
        scores[i] = json_number_value(json_array_get(entry, 1));
        least = i == 0 ? scores[i] : SO_MIN(least, scores[i]);
    }
    for (; i < (size_t)t->n_vocab; i++) /* added tokens beyond the vocabulary */
        scores[i] = least;
    rc = so_tokenizer_make_unigram(t, scores, bytes, err);
    free(scores);
    return rc ? so_err_prefix(err, FILE_NAME ": model") : 0;
}

static int read_model(so_tokenizer *t, const json_t *model, so_err *err) {
    const json_t *unk = json_object_get(model, "unk_token"),
                 *merges = json_object_get(model, "merges");
    so_bpe_options o = {.n_vocab = t->n_vocab, .unk = SO_BPE_NONE};
    bool whole_words = false;
    int rc;
    if ((rc = so_json_get_bool(model, FILE_NAME ": model", "fuse_unk", &o.fuse_unk, err)) ||
        (rc = so_json_get_bool(model, FILE_NAME ": model", "byte_fallback", &o.byte_fallback,
                               err)) ||
        (rc = so_json_get_bool(model, FILE_NAME ": model", "ignore_merges", &whole_words, err)))
        return rc;
    if (json_is_string(unk)) {
        o.unk = t->unk = so_tokenizer_find(t, so_json_str(unk));
        if (t->unk == SO_TOKEN_NONE)
            return so_json_bad(FILE_NAME ": model", "unk_token", err,
                               "\"%s\" is not in model.vocab", json_string_value(unk));
        t->kinds[t->unk] |= SO_TOKEN_UNKNOWN;
    }
    if (o.byte_fallback)
        so_vocab_find_bytes(t, o.byte_ids);
    if (whole_words) {
        o.whole_words = t->by_piece;
        o.kinds = t->kinds;
        o.not_words = SO_TOKEN_CONTROL;
    }
    t->bpe = so_bpe_create(&o, json_array_size(merges));
    return read_merges(t, merges, err);
}

/* Only tokens of the model's vocabulary are symbols. Called after the added tokens are loaded, so
 * that a control token of one character is not a symbol. */
static void add_chars(so_tokenizer *t, const json_t *vocab) {
    uint32_t cp;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        so_str piece = t->pieces[id];
        if (!(t->kinds[id] & (SO_TOKEN_CONTROL | SO_TOKEN_UNUSED)) &&
            so_vocab_single_char(piece, &cp) &&
            (!(t->kinds[id] & SO_TOKEN_ADDED) || json_object_getn(vocab, piece.ptr, piece.len)))
            so_bpe_add_char(t->bpe, cp, id);
    }
}

/* ---- added tokens ---- */

typedef struct added_flags {
    bool special, normalized, single_word, lstrip, rstrip;
} added_flags;

static int read_flags(const json_t *j, const char *path, added_flags *f, so_err *err) {
    int rc;
    *f = (added_flags){0};
    if ((rc = so_json_get_bool(j, path, "special", &f->special, err)))
        return rc;
    f->normalized = !f->special;
    if ((rc = so_json_get_bool(j, path, "normalized", &f->normalized, err)) ||
        (rc = so_json_get_bool(j, path, "single_word", &f->single_word, err)) ||
        (rc = so_json_get_bool(j, path, "lstrip", &f->lstrip, err)))
        return rc;
    return so_json_get_bool(j, path, "rstrip", &f->rstrip, err);
}

static int read_added(so_tokenizer *t, const json_t *j, const char *path, added_flags *f,
                      int32_t *out, so_err *err) {
    so_str content = so_json_str(json_object_get(j, "content"));
    int32_t id = (int32_t)json_integer_value(json_object_get(j, "id"));
    int32_t known = so_tokenizer_find(t, content);
    int rc = read_flags(j, path, f, err);
    if (rc)
        return rc;
    if (known != SO_TOKEN_NONE && known != id)
        return so_json_bad(path, "id", err, "is %d, but \"%.*s\" has id %d already", id,
                           SO_STR_ARG(content), known);
    if (known == SO_TOKEN_NONE) {
        if (!(t->kinds[id] & SO_TOKEN_UNUSED))
            return so_json_bad(path, "id", err, "%d belongs to \"%.*s\" already", id,
                               SO_STR_ARG(t->pieces[id]));
        so_vocab_put(t, id, content, 0);
        so_map_add(t->by_piece, t->pieces[id], id);
    }
    t->kinds[id] |= f->special ? SO_TOKEN_CONTROL : SO_TOKEN_ADDED;
    *out = id;
    return 0;
}

/* The text of a token that is matched after normalising is normalised too. */
static int push_added(so_tokenizer *t, int32_t id, const added_flags *f, so_matching *m,
                      so_buf bufs[2], so_err *err) {
    so_added a = {.text = t->pieces[id],
                  .id = id,
                  .control = f->special,
                  .single_word = f->single_word,
                  .lstrip = f->lstrip,
                  .rstrip = f->rstrip};
    if (a.text.len == 0)
        return 0;
    if (!f->normalized) {
        so_added_push(&t->added, a);
        return 0;
    }
    so_str normal;
    int rc = so_normalizer_run(t, m, a.text, true, bufs, &normal, err);
    if (rc || normal.len == 0)
        return rc;
    if (!so_str_eq(normal, a.text)) {
        so_buf_append_str(&t->added_bytes, normal);
        a.text.ptr = NULL; /* set after the last one: the buffer may move */
        a.text.len = normal.len;
    }
    so_added_push(&t->added_normalized, a);
    return 0;
}

static int read_all_added(so_tokenizer *t, const json_t *added, so_err *err) {
    so_buf bufs[2] = {{0}, {0}};
    so_matching *m = so_matching_create(1 << 20);
    size_t i;
    json_t *j;
    int rc = 0;
    json_array_foreach(added, i, j) {
        char path[64];
        added_flags f;
        int32_t id = SO_TOKEN_NONE;
        snprintf(path, sizeof path, FILE_NAME ": added_tokens[%zu]", i);
        if ((rc = read_added(t, j, path, &f, &id, err)) ||
            (rc = push_added(t, id, &f, m, bufs, err)))
            break;
    }
    size_t at = 0;
    for (size_t k = 0; k < t->added_normalized.n; k++) {
        so_str *text = &t->added_normalized.items[k].text;
        if (!text->ptr) {
            text->ptr = t->added_bytes.data + at;
            at += text->len;
        }
    }
    so_buf_free(&bufs[0]);
    so_buf_free(&bufs[1]);
    so_matching_free(m);
    return rc;
}

/* ---- configs ---- */

/* The token that a config names: "…" or {"content": "…"}. */
static int32_t named_token(const so_tokenizer *t, const json_t *config, const char *key) {
    const json_t *j = json_object_get(config, key);
    if (json_is_object(j))
        j = json_object_get(j, "content");
    return json_is_string(j) ? so_tokenizer_find(t, so_json_str(j)) : SO_TOKEN_NONE;
}

static int32_t numbered_token(const so_tokenizer *t, const json_t *j) {
    json_int_t id = json_is_integer(j) ? json_integer_value(j) : -1;
    return id >= 0 && id < t->n_vocab ? (int32_t)id : SO_TOKEN_NONE;
}

/* eos_token_id: a number or a list of numbers. */
static void add_ends(so_tokenizer *t, const json_t *config) {
    const json_t *j = json_object_get(config, "eos_token_id");
    int32_t first = numbered_token(t, json_is_array(j) ? json_array_get(j, 0) : j);
    if (t->eos == SO_TOKEN_NONE)
        t->eos = first;
    so_tokenizer_add_end(t, first);
    for (size_t i = 1; i < json_array_size(j); i++)
        so_tokenizer_add_end(t, numbered_token(t, json_array_get(j, i)));
}

/* A string, or a list of {"name", "template"}: then the one named "default". */
static so_str template_of(const json_t *j) {
    size_t i;
    json_t *item;
    json_array_foreach(j, i, item) {
        const json_t *name = json_object_get(item, "name");
        if (json_is_string(name) && strcmp(json_string_value(name), "default") == 0)
            j = json_object_get(item, "template");
    }
    return json_is_string(j) ? so_json_str(j) : (so_str){"", 0};
}

static void read_configs(so_tokenizer *t, const so_checkpoint *ck) {
    const json_t *config = so_checkpoint_tokenizer_config(ck), *model = so_checkpoint_config(ck);
    t->bos = named_token(t, config, "bos_token");
    t->eos = named_token(t, config, "eos_token");
    if (!config) {
        t->bos = numbered_token(t, json_object_get(model, "bos_token_id"));
        if (t->bos == SO_TOKEN_NONE && t->prefix.len)
            t->bos = t->prefix.ids[0];
    }
    so_tokenizer_add_end(t, t->eos);
    add_ends(t, so_checkpoint_generation_config(ck));
    add_ends(t, model);
    so_str text = so_checkpoint_template_file(ck);
    if (text.len == 0)
        text = template_of(json_object_get(config, "chat_template"));
    if (text.len) {
        t->chat_template = so_strndup(text.ptr, text.len);
        t->chat_template_len = text.len;
    }
}

int so_tokenizer_from_json(so_tokenizer *t, const so_checkpoint *ck, so_err *err) {
    const json_t *j = so_checkpoint_tokenizer(ck);
    if (!j)
        return so_err_set(err, SO_ENOTFOUND, FILE_NAME " is missing");
    const json_t *model = json_object_get(j, "model"), *added = json_object_get(j, "added_tokens");
    json_t *vocab = json_object_get(model, "vocab");
    sizes s = {0};
    int rc;
    if (added && !json_is_null(added) && !json_is_array(added))
        return so_json_bad(FILE_NAME ": added_tokens", NULL, err, "must be an array");
    if ((rc = check_model(model, err)) || (rc = measure(vocab, added, &s, err)))
        return rc;
    if (s.n_entries == 0)
        return so_json_bad(FILE_NAME ": model.vocab", NULL, err, "is empty");
    if ((rc = so_vocab_init(t, (size_t)s.max_id + 1, s.n_bytes, err)) ||
        (rc = read_vocab(t, vocab, err)) ||
        (rc = is_unigram(model) ? read_unk_id(t, model, err) : read_model(t, model, err)) ||
        (rc = so_json_normalizer(t, json_object_get(j, "normalizer"), FILE_NAME ": normalizer", 0,
                                 err)) ||
        (rc = read_all_added(t, added, err)) ||
        (rc = so_json_pretok(t, json_object_get(j, "pre_tokenizer"), FILE_NAME ": pre_tokenizer", 0,
                             err)) ||
        (rc = so_json_post(t, json_object_get(j, "post_processor"), FILE_NAME ": post_processor", 0,
                           err)) ||
        (rc = so_json_decoder(t, json_object_get(j, "decoder"), FILE_NAME ": decoder", 0, err)))
        return rc;
    if (is_unigram(model))
        rc = make_unigram(t, model, err);
    else
        add_chars(t, vocab);
    if (rc == 0)
        read_configs(t, ck);
    return rc;
}
