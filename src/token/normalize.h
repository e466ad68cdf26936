/* Text to text: the normalizers of tokenizer.json, and the changes that pre-tokenizers and decoders
 * make with the same means. An operation is immutable once built; any thread may apply it. */
#ifndef SO_TOKEN_NORMALIZE_H
#define SO_TOKEN_NORMALIZE_H

#include "token/pattern.h"

typedef enum so_text_kind {
    SO_TEXT_NFC,
    SO_TEXT_NFD,
    SO_TEXT_NFKC,
    SO_TEXT_NFKD,
    SO_TEXT_LOWERCASE,
    SO_TEXT_STRIP,         /* white space at the ends: left, right */
    SO_TEXT_STRIP_ACCENTS, /* drops combining marks */
    SO_TEXT_REPLACE,       /* pattern (or literal `from`) by `to` */
    SO_TEXT_PREPEND,       /* `to`, on text that is not empty; see unless_there and first_only */
    SO_TEXT_SPELL_BYTES,   /* each byte by its byte-level character */
} so_text_kind;

typedef struct so_text_op {
    so_text_kind kind;
    bool left, right;
    bool unless_there;   /* PREPEND: not where the text starts with `to` already */
    bool first_only;     /* PREPEND: only to what starts at the text's beginning */
    so_pattern *pattern; /* REPLACE: owned; NULL means the literal `from` */
    char *from, *to;     /* owned */
    size_t from_len, to_len;
} so_text_op;

void so_text_op_deinit(so_text_op *op);

/* Appends the changed text to out. `text` is valid UTF-8 and not within out; `first`: it starts at
 * the beginning of what is encoded. */
int so_text_op_apply(const so_text_op *op, so_matching *m, so_str text, bool first, so_buf *out,
                     so_err *err);

/* Where needle (not empty) first stands in text, or NULL. */
const char *so_text_find(so_str text, so_str needle);

/* The most that a text of n bytes may grow to: all that Unicode's forms can do, and little more. */
static inline size_t so_text_limit(size_t n) {
    size_t most = (size_t)1 << 30;
    return n > most / 64 ? most : n * 32 + (1 << 20);
}

bool so_char_is_space(uint32_t cp);   /* Unicode's White_Space */
bool so_char_is_word(uint32_t cp);    /* \w of the reference's added-token rules */
bool so_char_is_numeric(uint32_t cp); /* Nd, Nl, No */
bool so_char_is_punct(uint32_t cp);   /* ASCII punctuation or a P category */

#endif
