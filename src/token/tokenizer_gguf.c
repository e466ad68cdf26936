/* Loads a tokenizer from GGUF metadata (keys tokenizer.ggml.…); the file may have no tensors.
 *
 *   model "gpt2"    byte-level BPE: tokens, token_type, merges, pre (a name, pretok_names.c)
 *   model "llama"   SentencePiece-style: tokens, token_type, scores; spaces are "▁"
 *   model "t5"      Unigram: the same keys, and precompiled_charsmap
 *
 * Everything in the file is checked: types and lengths of arrays, ids, the tokens of merges. A
 * token that is not UTF-8 keeps its id and bytes but is never produced by encoding. Absent keys
 * have the defaults that converters rely on: SentencePiece-style models add BOS and a leading
 * space, Unigram models EOS and a leading space; others add no space, and BOS only if their `pre`
 * implies it. Loading only; one thread. */
#include <ctype.h>
#include <stdlib.h>

#include "token/tokenizer_impl.h"
#include "token/utf8.h"

#define KEY "tokenizer.ggml."

enum { TYPE_NORMAL = 1, N_TYPES = 7 };

/* Indexed by token_type. The unknown token is also control: text that spells it must not encode to
 * it. */
static const unsigned kinds_of_type[N_TYPES] = {
    0,
    0,
    SO_TOKEN_UNKNOWN | SO_TOKEN_CONTROL,
    SO_TOKEN_CONTROL,
    SO_TOKEN_ADDED,
    SO_TOKEN_UNUSED,
    SO_TOKEN_BYTE,
};

static int array(const so_gguf *g, const char *key, bool strings, const so_gguf_kv **out,
                 so_err *err) {
    const so_gguf_kv *kv = so_gguf_find(g, key);
    if (!kv)
        return so_err_set(err, SO_ENOTFOUND, "%s is missing", key);
    if (kv->type != SO_GGUF_ARRAY || (kv->elem == SO_GGUF_STRING) != strings ||
        kv->elem == SO_GGUF_ARRAY)
        return so_err_set(err, SO_EFORMAT, "%s is not an array of %s", key,
                          strings ? "strings" : "numbers");
    *out = kv;
    return 0;
}

/* An array with one number per token; *out is NULL if the key is absent. */
static int per_token(const so_tokenizer *t, const so_gguf *g, const char *key,
                     const so_gguf_kv **out, so_err *err) {
    *out = NULL;
    if (!so_gguf_find(g, key))
        return 0;
    int rc = array(g, key, false, out, err);
    if (rc == 0 && (*out)->n != (uint64_t)t->n_vocab)
        rc = so_err_set(err, SO_EFORMAT, "%s has %llu entries for %d tokens", key,
                        (unsigned long long)(*out)->n, t->n_vocab);
    return rc;
}

static int read_vocab(so_tokenizer *t, const so_gguf *g, so_err *err) {
    const so_gguf_kv *tokens, *types;
    int rc = array(g, KEY "tokens", true, &tokens, err);
    if (rc)
        return rc;
    if (tokens->n == 0 || tokens->n > SO_TOKENIZER_MAX_VOCAB)
        return so_err_set(err, SO_ERANGE, KEY "tokens has %llu entries (1 to %d)",
                          (unsigned long long)tokens->n, SO_TOKENIZER_MAX_VOCAB);
    size_t n_bytes = 0;
    for (uint64_t i = 0; i < tokens->n; i++)
        n_bytes += tokens->strings[i].len;
    if ((rc = so_vocab_init(t, (size_t)tokens->n, n_bytes, err)) ||
        (rc = per_token(t, g, KEY "token_type", &types, err)))
        return rc;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        int64_t type = TYPE_NORMAL;
        if (types && !so_gguf_elem_i64(types, (uint64_t)id, &type))
            return so_err_set(err, SO_EFORMAT, KEY "token_type[%d] is not an integer", id);
        if (type < 0 || type >= N_TYPES)
            return so_err_set(err, SO_ERANGE, KEY "token_type[%d] is %lld (0 to %d)", id,
                              (long long)type, N_TYPES - 1);
        so_str piece = tokens->strings[id];
        bool usable = piece.len > 0 && so_utf8_valid_len(piece) == piece.len;
        so_vocab_put(t, id, piece, usable ? kinds_of_type[type] : SO_TOKEN_UNUSED);
        if (usable)
            so_map_set(t->by_piece, t->pieces[id], id);
    }
    return 0;
}

/* An optional id within the vocabulary. */
static int read_id(const so_tokenizer *t, const so_gguf *g, const char *key, int32_t *out,
                   so_err *err) {
    int64_t v;
    if (!so_gguf_find(g, key))
        return 0;
    int rc = so_gguf_get_i64(g, key, &v, err);
    if (rc)
        return rc;
    if (v == -1 || v == UINT32_MAX) /* converters write this for "none" */
        return *out = SO_TOKEN_NONE, 0;
    if (v < 0 || v >= t->n_vocab)
        return so_err_set(err, SO_ERANGE, "%s is %lld, the vocabulary has %d tokens", key,
                          (long long)v, t->n_vocab);
    *out = (int32_t)v;
    return 0;
}

static int read_bool(const so_gguf *g, const char *key, bool *out, so_err *err) {
    return so_gguf_find(g, key) ? so_gguf_get_bool(g, key, out, err) : 0;
}

/* ---- special tokens ---- */

static bool strips_right(const so_gguf *g, so_str piece) {
    so_str name;
    if (!so_gguf_find(g, "general.name") || so_gguf_get_str(g, "general.name", &name, NULL) != 0)
        return false;
    char lower[64];
    size_t n = SO_MIN(name.len, sizeof lower - 1);
    for (size_t i = 0; i < n; i++)
        lower[i] = (char)tolower((unsigned char)name.ptr[i]);
    lower[n] = '\0';
    /* The chat tokens of Phi-3 have rstrip in its tokenizer.json; GGUF has no field for it. */
    return (strstr(lower, "phi-3") || strstr(lower, "phi3")) && !so_str_eq_c(piece, "<unk>") &&
           !so_str_eq_c(piece, "<s>") && !so_str_eq_c(piece, "<|endoftext|>");
}

static void collect_added(so_tokenizer *t, const so_gguf *g) {
    for (int32_t id = 0; id < t->n_vocab; id++) {
        so_str piece = t->pieces[id];
        if (!(t->kinds[id] & (SO_TOKEN_CONTROL | SO_TOKEN_ADDED)) || piece.len == 0 ||
            piece.len > SO_TOKENIZER_MAX_ADDED_BYTES)
            continue;
        so_added_push(&t->added, (so_added){.text = piece,
                                            .id = id,
                                            .control = t->kinds[id] & SO_TOKEN_CONTROL,
                                            .rstrip = strips_right(g, piece)});
    }
}

static int read_specials(so_tokenizer *t, const so_gguf *g, bool adds_bos, so_err *err) {
    bool adds_eos = t->unigram != NULL;
    int32_t eot = SO_TOKEN_NONE, eom = SO_TOKEN_NONE;
    int rc;
    if ((rc = read_id(t, g, KEY "bos_token_id", &t->bos, err)) ||
        (rc = read_id(t, g, KEY "eos_token_id", &t->eos, err)) ||
        (rc = read_id(t, g, KEY "eot_token_id", &eot, err)) ||
        (rc = read_id(t, g, KEY "eom_token_id", &eom, err)) ||
        (rc = read_bool(g, KEY "add_bos_token", &adds_bos, err)) ||
        (rc = read_bool(g, KEY "add_eos_token", &adds_eos, err)))
        return rc;
    if (adds_bos && t->bos != SO_TOKEN_NONE)
        so_tokens_push(&t->prefix, t->bos);
    if (adds_eos && t->eos != SO_TOKEN_NONE)
        so_tokens_push(&t->suffix, t->eos);
    so_tokenizer_add_end(t, t->eos);
    so_tokenizer_add_end(t, eot);
    so_tokenizer_add_end(t, eom);
    collect_added(t, g);
    if (!so_gguf_find(g, "tokenizer.chat_template"))
        return 0;
    so_str text;
    rc = so_gguf_get_str(g, "tokenizer.chat_template", &text, err);
    if (rc == 0) {
        t->chat_template = so_strndup(text.ptr, text.len);
        t->chat_template_len = text.len;
    }
    return rc;
}

/* ---- byte-level BPE ---- */

static int add_merges(so_tokenizer *t, const so_gguf_kv *merges, so_err *err) {
    so_buf joined = {0};
    int rc = 0;
    for (uint64_t i = 0; i < merges->n && rc == 0; i++) {
        so_str line = merges->strings[i];
        const char *space = line.len > 1 ? memchr(line.ptr + 1, ' ', line.len - 1) : NULL;
        size_t len = space ? (size_t)(space - line.ptr) : line.len;
        so_str left = {line.ptr, len}, right = {line.ptr + len, 0};
        if (space)
            right = (so_str){space + 1, line.len - len - 1};
        so_buf_clear(&joined);
        so_buf_append_str(&joined, left);
        so_buf_append_str(&joined, right);
        int32_t l = so_tokenizer_find(t, left), r = so_tokenizer_find(t, right),
                id = so_tokenizer_find(t, so_buf_str(&joined));
        if (l < 0 || r < 0 || id < 0)
            rc = so_err_set(err, SO_EFORMAT,
                            KEY "merges[%llu] \"%.*s\" names a token that is not in " KEY "tokens",
                            (unsigned long long)i, SO_STR_ARG(line));
        else
            so_bpe_add_merge(t->bpe, l, r, (uint32_t)i, id, t->pieces[id]);
    }
    so_buf_free(&joined);
    return rc;
}

static int read_bpe(so_tokenizer *t, const so_gguf *g, bool *adds_bos, so_err *err) {
    const so_gguf_kv *merges;
    so_str pre = SO_STR("default");
    so_pretok_traits traits;
    int rc = array(g, KEY "merges", true, &merges, err);
    if (rc)
        return rc;
    if (merges->n > UINT32_MAX / 2)
        return so_err_set(err, SO_ERANGE, KEY "merges has %llu entries",
                          (unsigned long long)merges->n);
    if (so_gguf_find(g, KEY "pre") && (rc = so_gguf_get_str(g, KEY "pre", &pre, err)))
        return rc;
    if ((rc = so_pretok_by_name(pre, &t->pretok, &traits, err)))
        return so_err_prefix(err, KEY "pre");
    *adds_bos = traits.adds_bos;
    if (traits.nfc)
        so_normalizer_add(t, SO_TEXT_NFC);
    so_bpe_options o = {.n_vocab = t->n_vocab, .unk = SO_BPE_NONE};
    if (traits.ignore_merges) {
        o.whole_words = t->by_piece;
        o.kinds = t->kinds;
        o.not_words = SO_TOKEN_CONTROL;
    }
    t->bpe = so_bpe_create(&o, (size_t)merges->n);
    uint32_t cp;
    for (int32_t id = 0; id < t->n_vocab; id++)
        if (!(t->kinds[id] & SO_TOKEN_CONTROL) && so_vocab_single_char(t->pieces[id], &cp) &&
            so_tokenizer_find(t, t->pieces[id]) == id)
            so_bpe_add_char(t->bpe, cp, id);
    t->decoder.steps[t->decoder.n_steps++] = (so_decode_step){.kind = SO_DECODE_BYTE_LEVEL};
    return add_merges(t, merges, err);
}

/* ---- SentencePiece ---- */

static int read_scores(so_tokenizer *t, const so_gguf *g, so_err *err) {
    const so_gguf_kv *kv;
    int rc = per_token(t, g, KEY "scores", &kv, err);
    if (rc == 0 && !kv)
        rc = so_err_set(err, SO_ENOTFOUND, KEY "scores is missing");
    if (rc)
        return rc;
    float *scores = so_try_alloc((size_t)t->n_vocab, sizeof *scores);
    if (!scores)
        return so_err_set(err, SO_ENOMEM, "no memory for %d scores", t->n_vocab);
    for (int32_t id = 0; id < t->n_vocab; id++) {
        double v = 0;
        so_gguf_elem_f64(kv, (uint64_t)id, &v);
        scores[id] = (float)v;
    }
    rc = so_spm_add_merges(t, t->bpe, scores, err);
    free(scores);
    return rc;
}

static void spell_spaces(so_tokenizer *t, bool prefix) {
    static const so_str sep = {"\xE2\x96\x81", 3};
    if (prefix)
        so_text_op_set(so_normalizer_add(t, SO_TEXT_PREPEND), SO_STR(""), sep);
    so_text_op_set(so_normalizer_add(t, SO_TEXT_REPLACE), SO_STR(" "), sep);
    so_decode_step *step = &t->decoder.steps[t->decoder.n_steps++];
    *step = (so_decode_step){.kind = SO_DECODE_REPLACE, .op.kind = SO_TEXT_REPLACE};
    so_text_op_set(&step->op, sep, SO_STR(" "));
    t->decoder.steps[t->decoder.n_steps++] = (so_decode_step){.kind = SO_DECODE_BYTE_FALLBACK};
    t->decoder.drops_space = prefix;
}

static int read_spm(so_tokenizer *t, const so_gguf *g, so_err *err) {
    bool prefix = true;
    int rc = read_bool(g, KEY "add_space_prefix", &prefix, err);
    if (rc)
        return rc;
    spell_spaces(t, prefix);
    static const unsigned wanted[3] = {SO_TOKEN_UNKNOWN, SO_TOKEN_CONTROL, SO_TOKEN_CONTROL};
    int32_t *defaults[3] = {&t->unk, &t->bos, &t->eos};
    for (int32_t id = 0; id < 3 && id < t->n_vocab; id++)
        if (t->kinds[id] & wanted[id])
            *defaults[id] = id;
    if ((rc = read_id(t, g, KEY "unknown_token_id", &t->unk, err)))
        return rc;
    so_bpe_options o = {
        .n_vocab = t->n_vocab, .unk = t->unk, .fuse_unk = true, .byte_fallback = true};
    so_vocab_find_bytes(t, o.byte_ids);
    t->bpe = so_bpe_create(&o, (size_t)t->n_vocab * 2);
    return read_scores(t, g, err);
}

/* ---- Unigram ---- */

static int read_charsmap(so_tokenizer *t, const so_gguf *g, so_err *err) {
    const so_gguf_kv *kv;
    if (!so_gguf_find(g, KEY "precompiled_charsmap"))
        return 0;
    int rc = array(g, KEY "precompiled_charsmap", false, &kv, err);
    if (rc)
        return rc;
    if (kv->n > SO_CHARSMAP_MAX_BYTES)
        return so_err_set(err, SO_ELIMIT, KEY "precompiled_charsmap has %llu entries (at most %d)",
                          (unsigned long long)kv->n, SO_CHARSMAP_MAX_BYTES);
    if (kv->n == 0)
        return 0;
    so_buf bytes = {0};
    for (uint64_t i = 0; i < kv->n && rc == 0; i++) {
        int64_t v = 0;
        if (!so_gguf_elem_i64(kv, i, &v) || v < -128 || v > 255)
            rc = so_err_set(err, SO_EFORMAT, KEY "precompiled_charsmap[%llu] is not a byte",
                            (unsigned long long)i);
        so_buf_append_char(&bytes, (char)v);
    }
    so_charsmap *map;
    if (rc == 0 && (rc = so_charsmap_read(so_buf_str(&bytes), &map, err)) == 0)
        so_normalizer_add(t, SO_TEXT_CHARSMAP)->map = map;
    so_buf_free(&bytes);
    return rc;
}

/* Normalising and dividing at spaces as in the tokenizer.json that converters write for the same
 * vocabulary: Precompiled, Strip, Replace, Metaspace. */
static int spell_unigram_spaces(so_tokenizer *t, const so_gguf *g, so_err *err) {
    static const so_str sep = {"\xE2\x96\x81", 3};
    bool prefix = true, collapse = true;
    int rc;
    if ((rc = read_bool(g, KEY "add_space_prefix", &prefix, err)) ||
        (rc = read_bool(g, KEY "remove_extra_whitespaces", &collapse, err)))
        return rc;
    if (collapse) {
        so_normalizer_add(t, SO_TEXT_STRIP)->right = true;
        so_text_op *op = so_normalizer_add(t, SO_TEXT_REPLACE);
        so_text_op_set(op, SO_STR(""), sep);
        if ((rc = so_pattern_compile(SO_STR(" {2,}"), &op->pattern, err)))
            return rc;
    }
    so_pretok_stage *s = so_pretok_add(&t->pretok);
    s->rewrites = true;
    s->op.kind = SO_TEXT_REPLACE;
    so_text_op_set(&s->op, SO_STR(" "), sep);
    if (prefix) {
        s = so_pretok_add(&t->pretok);
        s->rewrites = s->op.unless_there = true;
        s->op.kind = SO_TEXT_PREPEND;
        so_text_op_set(&s->op, SO_STR(""), sep);
    }
    s = so_pretok_add(&t->pretok);
    s->behaviour = SO_SPLIT_MERGED_WITH_NEXT;
    s->literal = so_strndup(sep.ptr, sep.len);
    s->literal_len = sep.len;
    so_decode_step *step = &t->decoder.steps[t->decoder.n_steps++];
    *step = (so_decode_step){.kind = SO_DECODE_REPLACE, .op.kind = SO_TEXT_REPLACE};
    so_text_op_set(&step->op, sep, SO_STR(" "));
    t->decoder.steps[t->decoder.n_steps++] = (so_decode_step){.kind = SO_DECODE_BYTE_FALLBACK};
    t->decoder.drops_space = t->decoder.drops_run = prefix;
    return 0;
}

static int read_unigram(so_tokenizer *t, const so_gguf *g, so_err *err) {
    const so_gguf_kv *kv;
    int rc;
    for (int32_t id = 0; id < t->n_vocab && t->unk == SO_TOKEN_NONE; id++)
        if (t->kinds[id] & SO_TOKEN_UNKNOWN)
            t->unk = id;
    if ((rc = read_id(t, g, KEY "unknown_token_id", &t->unk, err)) ||
        (rc = read_charsmap(t, g, err)) || (rc = spell_unigram_spaces(t, g, err)) ||
        (rc = per_token(t, g, KEY "scores", &kv, err)))
        return rc;
    if (!kv)
        return so_err_set(err, SO_ENOTFOUND, KEY "scores is missing");
    double *scores = SO_NEW_N(double, t->n_vocab);
    bool bytes = false;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        so_gguf_elem_f64(kv, (uint64_t)id, &scores[id]);
        bytes |= (t->kinds[id] & SO_TOKEN_BYTE) != 0;
    }
    rc = so_tokenizer_make_unigram(t, scores, bytes, err);
    free(scores);
    return rc;
}

int so_tokenizer_from_gguf(so_tokenizer *t, const so_gguf *g, so_err *err) {
    so_str model;
    bool adds_bos = false;
    if (!so_gguf_find(g, KEY "model"))
        return so_err_set(err, SO_ENOTFOUND, KEY "model is missing: the file has no tokenizer");
    int rc = so_gguf_get_str(g, KEY "model", &model, err);
    if (rc)
        return rc;
    bool spm = so_str_eq_c(model, "llama"), unigram = so_str_eq_c(model, "t5");
    if (!spm && !unigram && !so_str_eq_c(model, "gpt2"))
        return so_err_set(err, SO_EUNSUPPORTED,
                          KEY "model \"%.*s\" is not supported (gpt2, llama and t5 are)",
                          SO_STR_ARG(model));
    if ((rc = read_vocab(t, g, err)))
        return rc;
    rc = unigram ? read_unigram(t, g, err)
         : spm   ? read_spm(t, g, err)
                 : read_bpe(t, g, &adds_bos, err);
    return rc ? rc : read_specials(t, g, adds_bos || spm, err);
}
