/* Loading, encoding and properties of a tokenizer.
 *
 * Encoding a text:
 *  1. Repair: each maximal invalid part of the bytes becomes U+FFFD, as in Python's
 *     bytes.decode("utf-8", errors="replace"): Hugging Face tokenizers accepts only Unicode text.
 *  2. Cut out the added tokens that are matched in the raw text.
 *  3. Normalise each remaining part; cut out the added tokens that are matched after normalising.
 *  4. Pre-tokenize each remaining part into pieces.
 *  5. Merge each piece (bpe.c), or divide it into the likeliest tokens (unigram.c).
 *  6. With ADD_SPECIAL, add the model's prefix and suffix.
 *
 * Unknown components, and models other than the two forms of BPE and Unigram, are refused: a wrong tokenizer
 * would give plausible but wrong ids. After loading (which includes so_tokenizer_add_end) a
 * tokenizer is immutable and any thread may encode; scratch belongs to the call. */
#include "token/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>

#include "token/tokenizer_impl.h"
#include "token/utf8.h"

static const size_t MAX_TEXT = (size_t)256 << 20;

/* ---- building blocks of the loaders ---- */

int so_vocab_init(so_tokenizer *t, size_t n, size_t n_bytes, so_err *err) {
    t->n_vocab = (int32_t)n;
    t->pieces = so_try_alloc(n, sizeof *t->pieces);
    t->kinds = so_try_alloc(n, sizeof *t->kinds);
    t->piece_bytes = so_try_alloc(n_bytes, 1);
    t->piece_cap = n_bytes;
    if (!t->pieces || !t->kinds || !t->piece_bytes)
        return so_err_set(err, SO_ENOMEM, "no memory for a vocabulary of %zu tokens", n);
    for (size_t i = 0; i < n; i++) {
        t->pieces[i] = (so_str){"", 0};
        t->kinds[i] = SO_TOKEN_UNUSED;
    }
    t->by_piece = so_map_create(n);
    return 0;
}

void so_vocab_put(so_tokenizer *t, int32_t id, so_str piece, unsigned kind) {
    SO_ASSERT_OP(piece.len, <=, t->piece_cap - t->piece_len);
    char *at = t->piece_bytes + t->piece_len;
    if (piece.len)
        memcpy(at, piece.ptr, piece.len);
    t->piece_len += piece.len;
    t->pieces[id] = (so_str){at, piece.len};
    t->kinds[id] = (uint8_t)kind;
}

void so_vocab_find_bytes(so_tokenizer *t, int32_t byte_ids[256]) {
    for (int b = 0; b < 256; b++) {
        char name[8];
        int64_t id;
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)b);
        byte_ids[b] = SO_BPE_NONE;
        if (so_map_get(t->by_piece, so_str_c(name), &id)) {
            byte_ids[b] = (int32_t)id;
            t->kinds[id] |= SO_TOKEN_BYTE;
        }
    }
}

bool so_vocab_single_char(so_str piece, uint32_t *cp) {
    size_t len;
    return piece.len > 0 && piece.len <= 4 &&
           so_utf8_next(piece.ptr, piece.len, cp, &len) == SO_UTF8_OK && len == piece.len;
}

/* Control tokens are never the result of encoding; nor are tokens that the vocabulary marks as
 * unused, or as unknown. */
int so_tokenizer_make_unigram(so_tokenizer *t, const double *scores, bool byte_fallback,
                              so_err *err) {
    so_unigram_options o = {.n_vocab = t->n_vocab,
                            .pieces = t->pieces,
                            .scores = scores,
                            .unk = t->unk,
                            .byte_fallback = byte_fallback};
    uint8_t *skipped = SO_NEW_N(uint8_t, t->n_vocab);
    for (int32_t id = 0; id < t->n_vocab; id++)
        skipped[id] = (t->kinds[id] & (SO_TOKEN_CONTROL | SO_TOKEN_UNKNOWN | SO_TOKEN_UNUSED)) != 0;
    o.skipped = skipped;
    so_vocab_find_bytes(t, o.byte_ids);
    int rc = so_unigram_create(&o, &t->unigram, err);
    free(skipped);
    return rc;
}

so_text_op *so_normalizer_add(so_tokenizer *t, so_text_kind kind) {
    if (t->n_normalizer == SO_TOKENIZER_MAX_OPS)
        return NULL;
    so_text_op *op = &t->normalizer[t->n_normalizer++];
    *op = (so_text_op){.kind = kind};
    return op;
}

void so_text_op_set(so_text_op *op, so_str from, so_str to) {
    op->from = so_strndup(from.ptr, from.len);
    op->from_len = from.len;
    op->to = so_strndup(to.ptr, to.len);
    op->to_len = to.len;
}

/* ---- create, free ---- */

static uint64_t hash_all(const so_tokenizer *t) {
    uint64_t h = t->bpe ? so_bpe_hash(t->bpe) : 0;
    for (int32_t id = 0; id < t->n_vocab; id++) {
        if (t->kinds[id] & SO_TOKEN_UNUSED)
            continue; /* padding of the embedding matrix: not a token */
        struct {
            uint64_t piece, before;
            int32_t id;
            uint32_t kind;
        } row = {so_hash_bytes(t->pieces[id].ptr, t->pieces[id].len), h, id, t->kinds[id]};
        h = so_hash_bytes(&row, sizeof row);
    }
    return h;
}

/* Common names of tokens that end a turn or the text. Only control tokens count: an ordinary or
 * added token with such a name does not end a turn. */
static void add_ends_by_name(so_tokenizer *t) {
    static const char *const names[] = {
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "</s>",
        "<eos>",
        "<EOT>",
        "<|END_OF_TURN_TOKEN|>",
        "<|end_of_turn|>",
        "<|eot|>",
        "<end_of_utterance>",
        "<\uFF5Cend\u2581of\u2581sentence\uFF5C>",
        "<|return|>",
    };
    for (size_t i = 0; i < SO_LEN(names); i++) {
        int32_t id = so_tokenizer_find(t, so_str_c(names[i]));
        if (id != SO_TOKEN_NONE && (t->kinds[id] & SO_TOKEN_CONTROL))
            so_tokenizer_add_end(t, id);
    }
}

int so_tokenizer_load(const so_checkpoint *ck, so_tokenizer **out, so_err *err) {
    so_tokenizer *t = SO_NEW(so_tokenizer);
    t->bos = t->eos = t->unk = SO_TOKEN_NONE;
    const so_gguf *g = so_checkpoint_gguf(ck);
    bool own_json =
        so_checkpoint_tokenizer(ck) != NULL; /* also in a GGUF converted from a folder */
    int rc =
        g && !own_json ? so_tokenizer_from_gguf(t, g, err) : so_tokenizer_from_json(t, ck, err);
    if (rc == 0)
        rc = so_decoder_render(t, err);
    if (rc) {
        so_err_prefix(err, "%s", so_checkpoint_path(ck));
        so_tokenizer_free(t);
        return rc;
    }
    add_ends_by_name(t);
    so_added_seal(&t->added);
    so_added_seal(&t->added_normalized);
    t->hash = hash_all(t);
    *out = t;
    return 0;
}

int so_tokenizer_open(const char *path, so_tokenizer **out, so_err *err) {
    so_checkpoint *ck;
    int rc = so_checkpoint_open(path, SO_CHECKPOINT_TOKENIZER, &ck, err);
    if (rc)
        return rc;
    rc = so_tokenizer_load(ck, out, err);
    so_checkpoint_close(ck);
    return rc;
}

void so_tokenizer_free(so_tokenizer *t) {
    if (!t)
        return;
    for (int i = 0; i < t->n_normalizer; i++)
        so_text_op_deinit(&t->normalizer[i]);
    so_decoder_deinit(&t->decoder);
    so_pretok_deinit(&t->pretok);
    so_bpe_free(t->bpe);
    so_unigram_free(t->unigram);
    so_added_deinit(&t->added);
    so_added_deinit(&t->added_normalized);
    so_buf_free(&t->added_bytes);
    so_map_free(t->by_piece);
    so_tokens_free(&t->prefix);
    so_tokens_free(&t->suffix);
    so_tokens_free(&t->ends);
    free(t->pieces);
    free(t->texts);
    free(t->kinds);
    free(t->piece_bytes);
    free(t->text_bytes);
    free(t->chat_template);
    free(t);
}

/* ---- encoding ---- */

typedef struct encoding {
    const so_tokenizer *t;
    bool parse_control;
    const uint8_t *from_data; /* marks bytes that no control token may contain, or NULL */
    so_tokens *out;
    so_err *err;
    so_matching *matching;
    so_bpe_scratch *merging;
    so_pieces pieces;
    so_buf normal[2];
} encoding;

int so_normalizer_run(const so_tokenizer *t, so_matching *m, so_str text, bool first,
                      so_buf bufs[2], so_str *out, so_err *err) {
    size_t n_bytes = text.len;
    for (int i = 0; i < t->n_normalizer; i++) {
        so_buf *next = &bufs[i & 1];
        so_buf_clear(next);
        next->max = so_text_limit(n_bytes);
        int rc = so_text_op_apply(&t->normalizer[i], m, text, first, next, err);
        if (rc)
            return rc;
        if (next->full)
            return so_err_set(err, SO_ELIMIT,
                              "normalising %zu bytes of text exceeds the size limit", n_bytes);
        text = so_buf_str(next);
    }
    *out = text;
    return 0;
}

/* Step 5. */
static int encode_piece(encoding *e, so_str piece) {
    if (e->t->unigram)
        return so_unigram_encode(e->t->unigram, piece, e->out, e->err);
    return so_bpe_encode(e->t->bpe, e->merging, piece, e->out, e->err);
}

/* Steps 4 and 5. */
static int encode_plain(encoding *e, so_str text, bool first) {
    const so_tokenizer *t = e->t;
    if (t->pretok.n_stages == 0)
        return encode_piece(e, text);
    int rc = so_pretok_run(&t->pretok, e->matching, text, first, &e->pieces, e->err);
    for (size_t i = 0; rc == 0 && i < e->pieces.n; i++) {
        so_span at = e->pieces.spans[i];
        so_str piece = {e->pieces.text.data + at.off, at.len};
        rc = encode_piece(e, piece);
    }
    return rc;
}

/* Step 3. */
static int encode_part(encoding *e, so_str text, bool first) {
    so_str normal;
    int rc = so_normalizer_run(e->t, e->matching, text, first, e->normal, &normal, e->err);
    so_added_walk walk = {
        .set = &e->t->added_normalized, .text = normal, .parse_control = e->parse_control};
    so_added_part part;
    while (rc == 0 && so_added_next(&walk, &part)) {
        if (part.id >= 0)
            so_tokens_push(e->out, part.id);
        else
            rc = encode_plain(e, part.text, first && part.text.ptr == normal.ptr);
    }
    return rc;
}

/* Whether `text` contains a control token of the normalised set with a marked byte. */
static bool data_spells_control(const so_tokenizer *t, so_str text, const uint8_t *from_data) {
    for (size_t i = 0; i < t->added_normalized.n; i++) {
        const so_added *a = &t->added_normalized.items[i];
        so_str piece = t->pieces[a->id];
        const char *p = text.ptr, *end = text.ptr + text.len;
        while (a->control && (p = memmem(p, (size_t)(end - p), piece.ptr, piece.len))) {
            if (memchr(from_data + (p - text.ptr), 1, piece.len))
                return true;
            p++;
        }
    }
    return false;
}

/* Step 3 if data contains the text of a control token of the normalised set. Normalising loses the
 * marks, so data and template text are normalised separately. Rare: special tokens are usually
 * matched in the raw text. */
static int encode_runs(encoding *e, so_str text, const uint8_t *from_data, bool first) {
    int rc = 0;
    for (size_t i = 0, n; rc == 0 && i < text.len; i += n) {
        for (n = 1; i + n < text.len && from_data[i + n] == from_data[i];)
            n++;
        e->parse_control = !from_data[i];
        rc = encode_part(e, (so_str){text.ptr + i, n}, first && i == 0);
    }
    e->parse_control = true;
    return rc;
}

/* Step 2. */
static int encode_text(encoding *e, so_str text) {
    so_added_walk walk = {.set = &e->t->added,
                          .text = text,
                          .parse_control = e->parse_control,
                          .from_data = e->from_data};
    so_added_part part;
    int rc = 0;
    while (rc == 0 && so_added_next(&walk, &part)) {
        size_t at = (size_t)(part.text.ptr - text.ptr);
        if (part.id >= 0)
            so_tokens_push(e->out, part.id);
        else if (e->from_data && data_spells_control(e->t, part.text, e->from_data + at))
            rc = encode_runs(e, part.text, e->from_data + at, at == 0);
        else
            rc = encode_part(e, part.text, at == 0);
    }
    return rc;
}

static int encode(const so_tokenizer *t, so_str text, unsigned flags, const uint8_t *from_data,
                  so_tokens *out, so_err *err) {
    size_t before = out->len;
    encoding e = {.t = t,
                  .parse_control = flags & SO_ENCODE_PARSE_SPECIAL,
                  .from_data = from_data,
                  .out = out,
                  .err = err,
                  .matching = so_matching_create(text.len),
                  .merging = so_bpe_scratch_create()};
    if (flags & SO_ENCODE_ADD_SPECIAL)
        so_tokens_append(out, t->prefix.ids, t->prefix.len);
    int rc = encode_text(&e, text);
    if (rc)
        out->len = before;
    else if (flags & SO_ENCODE_ADD_SPECIAL)
        so_tokens_append(out, t->suffix.ids, t->suffix.len);
    so_matching_free(e.matching);
    so_bpe_scratch_free(e.merging);
    so_pieces_deinit(&e.pieces);
    so_buf_free(&e.normal[0]);
    so_buf_free(&e.normal[1]);
    return rc;
}

static int check_size(so_str text, so_err *err) {
    if (text.len > MAX_TEXT)
        return so_err_set(err, SO_ELIMIT, "a text of %zu bytes (at most 256 MiB)", text.len);
    return 0;
}

int so_tokenizer_encode(const so_tokenizer *t, so_str text, unsigned flags, so_tokens *out,
                        so_err *err) {
    int rc = check_size(text, err);
    if (rc)
        return rc;
    so_buf repaired = {0};
    if (so_utf8_valid_len(text) != text.len) {
        so_utf8_repair(text,
                       &repaired); /* at most three times as long, below the limit of so_buf */
        text = so_buf_str(&repaired);
    }
    rc = encode(t, text, flags, NULL, out, err);
    so_buf_free(&repaired);
    return rc;
}

int so_tokenizer_encode_traced(const so_tokenizer *t, so_str text, const uint8_t *from_data,
                               so_tokens *out, so_err *err) {
    int rc = check_size(text, err);
    return rc ? rc : encode(t, text, SO_ENCODE_PARSE_SPECIAL, from_data, out, err);
}

/* ---- properties ---- */

static bool in_vocab(const so_tokenizer *t, int32_t id) { return id >= 0 && id < t->n_vocab; }

int32_t so_tokenizer_n_vocab(const so_tokenizer *t) { return t->n_vocab; }

so_str so_tokenizer_piece(const so_tokenizer *t, int32_t id) {
    return in_vocab(t, id) ? t->pieces[id] : (so_str){"", 0};
}

unsigned so_tokenizer_kind(const so_tokenizer *t, int32_t id) {
    return in_vocab(t, id) ? t->kinds[id] : SO_TOKEN_UNUSED;
}

int32_t so_tokenizer_find(const so_tokenizer *t, so_str piece) {
    int64_t id;
    return so_map_get(t->by_piece, piece, &id) ? (int32_t)id : SO_TOKEN_NONE;
}

int32_t so_tokenizer_bos(const so_tokenizer *t) { return t->bos; }
int32_t so_tokenizer_eos(const so_tokenizer *t) { return t->eos; }

bool so_tokenizer_adds_bos(const so_tokenizer *t) {
    for (size_t i = 0; i < t->prefix.len; i++)
        if (t->prefix.ids[i] == t->bos)
            return true;
    return false;
}

bool so_tokenizer_is_end(const so_tokenizer *t, int32_t id) {
    for (size_t i = 0; i < t->ends.len; i++)
        if (t->ends.ids[i] == id)
            return true;
    return false;
}

void so_tokenizer_add_end(so_tokenizer *t, int32_t id) {
    if (in_vocab(t, id) && !so_tokenizer_is_end(t, id))
        so_tokens_push(&t->ends, id);
}

so_str so_tokenizer_chat_template(const so_tokenizer *t) {
    return (so_str){t->chat_template ? t->chat_template : "", t->chat_template_len};
}

uint64_t so_tokenizer_hash(const so_tokenizer *t) { return t->hash; }
