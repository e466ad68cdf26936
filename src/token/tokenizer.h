/* Text to token ids and back, with the same ids as the model's original tokenizer.
 *
 * Two kinds of tokenizer have the same interface: byte-level BPE (merges) and SentencePiece-style
 * BPE (scores, byte fallback, dummy prefix). They are loaded from GGUF metadata or from a
 * tokenizer.json. A tokenizer is immutable once loaded; every function here may be called from any
 * thread. */
#ifndef SO_TOKEN_TOKENIZER_H
#define SO_TOKEN_TOKENIZER_H

#include "format/checkpoint.h"

typedef struct so_tokenizer so_tokenizer;

enum { SO_TOKEN_NONE = -1 };

/* The kind of a token (bits). */
enum {
    SO_TOKEN_CONTROL = 1, /* never printed as text, recognised only with PARSE_SPECIAL. Flags and
                             sooth.h call these tokens special */
    SO_TOKEN_ADDED = 2,   /* user-defined: matched before pre-tokenizing, printed as text */
    SO_TOKEN_BYTE = 4,    /* <0x0A>-style byte fallback */
    SO_TOKEN_UNKNOWN = 8,
    SO_TOKEN_UNUSED = 16,
};

enum {
    SO_ENCODE_ADD_SPECIAL = 1,   /* add BOS and EOS if the model requires them */
    SO_ENCODE_PARSE_SPECIAL = 2, /* the text of a control token becomes its id */
};

int so_tokenizer_load(const so_checkpoint *ck, so_tokenizer **out, so_err *err);
/* Loads only the tokenizer of a model file or folder. */
int so_tokenizer_open(const char *path, so_tokenizer **out, so_err *err);
void so_tokenizer_free(so_tokenizer *t);

/* Appends the ids of `text`: any bytes; invalid UTF-8 is encoded as U+FFFD. */
int so_tokenizer_encode(const so_tokenizer *t, so_str text, unsigned flags, so_tokens *out,
                        so_err *err);
/* Like so_tokenizer_encode with SO_ENCODE_PARSE_SPECIAL, but bytes with from_data[i] != 0 are data
 * and never part of a control token. `text` must be valid UTF-8. */
int so_tokenizer_encode_traced(const so_tokenizer *t, so_str text, const uint8_t *from_data,
                               so_tokens *out, so_err *err);

/* Appends the text of ids. Control tokens are omitted unless `special`. The result is invalid UTF-8
 * if the bytes of the tokens are. */
void so_tokenizer_decode(const so_tokenizer *t, const int32_t *ids, size_t n, bool special,
                         so_buf *out);

/* The bytes of one id in the middle of a text, also of control tokens; empty for an invalid id. */
so_str so_tokenizer_text(const so_tokenizer *t, int32_t id);

int32_t so_tokenizer_n_vocab(const so_tokenizer *t);
so_str so_tokenizer_piece(const so_tokenizer *t, int32_t id);   /* as written in the vocabulary */
unsigned so_tokenizer_kind(const so_tokenizer *t, int32_t id);  /* SO_TOKEN_… bits */
int32_t so_tokenizer_find(const so_tokenizer *t, so_str piece); /* SO_TOKEN_NONE if absent */
int32_t so_tokenizer_bos(const so_tokenizer *t); /* SO_TOKEN_NONE if the model has none */
int32_t so_tokenizer_eos(const so_tokenizer *t);
bool so_tokenizer_adds_bos(const so_tokenizer *t);
/* True for every id that ends a turn (EOS, <|im_end|>, <|eot_id|>, <end_of_turn>, …). */
bool so_tokenizer_is_end(const so_tokenizer *t, int32_t id);
/* Adds an end token that a generation config names. Only while loading. */
void so_tokenizer_add_end(so_tokenizer *t, int32_t id);
/* The model's chat template, empty if it has none. */
so_str so_tokenizer_chat_template(const so_tokenizer *t);
/* Hash of all pieces, kinds and merges. Equal hashes mean the same vocabulary: every id has the same
 * piece. Unused ids, normalizer and pre-tokenizer are not part of it. */
uint64_t so_tokenizer_hash(const so_tokenizer *t);

/* Streaming decoder: returns text in parts that never split a UTF-8 sequence. Invalid bytes become
 * U+FFFD. The parts together equal the decoded text with each maximal invalid part replaced.
 * Zero-initialise, except `t`. */
typedef struct so_detok {
    const so_tokenizer *t;
    bool special; /* also print control tokens */
    bool started; /* text was returned: a leading space is no longer dropped */
    unsigned char held[4];
    int n_held;
} so_detok;
void so_detok_push(so_detok *d, int32_t id, so_buf *out); /* appends 0 or more bytes */
void so_detok_finish(so_detok *d, so_buf *out); /* an incomplete character becomes U+FFFD */

#endif
