/* Text to token ids and back, exactly as the model's own tokenizer does it.
 *
 * Two kinds behind one type: byte-level BPE (merges) and SentencePiece-style BPE (scores, byte
 * fallback, dummy prefix); sources are GGUF metadata or a tokenizer.json. A tokenizer is immutable
 * once loaded; every function here may be called from any thread. */
#ifndef SO_TOKEN_TOKENIZER_H
#define SO_TOKEN_TOKENIZER_H

#include "format/checkpoint.h"

typedef struct so_tokenizer so_tokenizer;

enum { SO_TOKEN_NONE = -1 };

/* What kind of token an id is (bits). */
enum {
    SO_TOKEN_CONTROL = 1, /* special: never printed as text, recognised only with PARSE_SPECIAL */
    SO_TOKEN_ADDED = 2,   /* user-defined: matched before pre-tokenizing, printed as text */
    SO_TOKEN_BYTE = 4,    /* <0x0A>-style byte fallback */
    SO_TOKEN_UNKNOWN = 8,
    SO_TOKEN_UNUSED = 16,
};

enum {
    SO_ENCODE_ADD_SPECIAL = 1,   /* put BOS/EOS around the text where the model wants them */
    SO_ENCODE_PARSE_SPECIAL = 2, /* control tokens written out in the text become their ids */
};

int so_tokenizer_load(const so_checkpoint *ck, so_tokenizer **out, so_err *err);
/* Of a model's file or folder that is opened for nothing else. */
int so_tokenizer_open(const char *path, so_tokenizer **out, so_err *err);
void so_tokenizer_free(so_tokenizer *t);

/* Appends the ids of `text` (any bytes; invalid UTF-8 is encoded as the reference does). */
int so_tokenizer_encode(const so_tokenizer *t, so_str text, unsigned flags, so_tokens *out,
                        so_err *err);
/* As SO_ENCODE_PARSE_SPECIAL, but a control token counts only where none of its bytes is marked:
 * from_data[i] != 0 says that byte i is someone's data. `text` must be valid UTF-8. */
int so_tokenizer_encode_traced(const so_tokenizer *t, so_str text, const uint8_t *from_data,
                               so_tokens *out, so_err *err);

/* Appends the text of ids. Control tokens are left out unless `special`. The result may hold
 * invalid UTF-8 where the ids do. */
void so_tokenizer_decode(const so_tokenizer *t, const int32_t *ids, size_t n, bool special,
                         so_buf *out);

/* The bytes one id prints in the middle of a text, control tokens too; none for ids without. */
so_str so_tokenizer_text(const so_tokenizer *t, int32_t id);

int32_t so_tokenizer_n_vocab(const so_tokenizer *t);
so_str so_tokenizer_piece(const so_tokenizer *t, int32_t id);   /* the vocabulary's own spelling */
unsigned so_tokenizer_kind(const so_tokenizer *t, int32_t id);  /* SO_TOKEN_… bits */
int32_t so_tokenizer_find(const so_tokenizer *t, so_str piece); /* SO_TOKEN_NONE if absent */
int32_t so_tokenizer_bos(const so_tokenizer *t); /* SO_TOKEN_NONE if the model has none */
int32_t so_tokenizer_eos(const so_tokenizer *t);
bool so_tokenizer_adds_bos(const so_tokenizer *t);
/* True for every id that ends a turn (EOS, <|im_end|>, <|eot_id|>, <end_of_turn>, …). */
bool so_tokenizer_is_end(const so_tokenizer *t, int32_t id);
/* Adds ends named by a generation config. */
void so_tokenizer_add_end(so_tokenizer *t, int32_t id);
/* The model's chat template, empty if it has none. */
so_str so_tokenizer_chat_template(const so_tokenizer *t);
/* Hash of all pieces, kinds and merges: equal for tokenizers that give equal ids. */
uint64_t so_tokenizer_hash(const so_tokenizer *t);

/* Streaming: ids in, text out in pieces that never split a UTF-8 sequence. Bytes that can no longer
 * become valid come out as U+FFFD. The concatenation equals decoding all at once with each maximal
 * invalid part replaced. Zero-initialise apart from `t`. */
typedef struct so_detok {
    const so_tokenizer *t;
    bool special; /* also print control tokens */
    bool started; /* a leading dummy space is dropped once */
    unsigned char held[4];
    int n_held;
} so_detok;
void so_detok_push(so_detok *d, int32_t id, so_buf *out); /* appends 0 or more bytes */
void so_detok_finish(so_detok *d, so_buf *out);           /* flushes what is held */

#endif
