/* Text operations: the normalizers of tokenizer.json, also used by pre-tokenizers and decoders. An
 * operation is immutable once built; any thread may apply it. */
#ifndef SO_TOKEN_NORMALIZE_H
#define SO_TOKEN_NORMALIZE_H

#include "token/charsmap.h"
#include "token/pattern.h"

typedef enum so_text_kind {
    SO_TEXT_NFC,
    SO_TEXT_NFD,
    SO_TEXT_NFKC,
    SO_TEXT_NFKD,
    SO_TEXT_LOWERCASE,
    SO_TEXT_STRIP,         /* removes white space at the ends: left, right */
    SO_TEXT_STRIP_ACCENTS, /* drops combining marks */
    SO_TEXT_REPLACE,       /* pattern (or literal `from`) by `to` */
    SO_TEXT_PREPEND,       /* `to` before a non-empty text; see unless_there and first_only */
    SO_TEXT_SPELL_BYTES,   /* replaces each byte by its byte-level character */
    SO_TEXT_CHARSMAP,      /* charsmap.h */
} so_text_kind;

typedef struct so_text_op {
    so_text_kind kind;
    bool left, right;
    bool unless_there;   /* PREPEND: not if the text already starts with `to` */
    bool first_only;     /* PREPEND: only at the start of the encoded text */
    so_pattern *pattern; /* REPLACE: owned; NULL means the literal `from` */
    char *from, *to;     /* owned */
    so_charsmap *map;    /* CHARSMAP: owned */
    size_t from_len, to_len;
} so_text_op;

void so_text_op_deinit(so_text_op *op);

/* Appends the result to out. `text` is valid UTF-8 and does not point into out; `first`: it is at
 * the start of the text to encode. */
int so_text_op_apply(const so_text_op *op, so_matching *m, so_str text, bool first, so_buf *out,
                     so_err *err);

/* The first occurrence of needle (not empty) in text, or NULL. */
const char *so_text_find(so_str text, so_str needle);

/* Limit for the result of an operation on n bytes, a little above the largest growth of Unicode's
 * normalisation forms. */
static inline size_t so_text_limit(size_t n) {
    size_t most = (size_t)1 << 30;
    return n > most / 64 ? most : n * 32 + (1 << 20);
}

bool so_char_is_space(uint32_t cp);   /* Unicode's White_Space */
bool so_char_is_word(uint32_t cp);    /* \w as in the added-token rules of HF tokenizers */
bool so_char_is_numeric(uint32_t cp); /* Nd, Nl, No */
bool so_char_is_punct(uint32_t cp);   /* ASCII punctuation or a P category */

#endif
