/* Byte-pair merging: a word's characters become symbols, and the neighbouring pair of lowest rank
 * is joined until no pair has a rank.
 *
 * One engine serves both kinds of tokenizer. With merges, ranks are the list's order. With scores
 * (SentencePiece), every way to cut a piece in two is a merge, ranked by the piece's score (spm.c).
 * Build it with the add functions, then encode from any thread, each with its own scratch. */
#ifndef SO_TOKEN_BPE_H
#define SO_TOKEN_BPE_H

#include "base/err.h"
#include "base/map.h"
#include "base/str.h"

typedef struct so_bpe so_bpe;
typedef struct so_bpe_scratch so_bpe_scratch;

enum { SO_BPE_NONE = -1 };

typedef struct so_bpe_options {
    int32_t n_vocab;
    int32_t unk;           /* for a character with no token, or SO_BPE_NONE: it is left out */
    bool fuse_unk;         /* neighbouring unknowns become one */
    bool byte_fallback;    /* an unknown character becomes its bytes' tokens, if all are there */
    int32_t byte_ids[256]; /* SO_BPE_NONE where absent */
    /* Set for ignore_merges: a word that is a key here is that token without merging, unless the
     * token's kind has a bit of not_words. Borrowed. */
    const so_map *whole_words;
    const uint8_t *kinds; /* [n_vocab] */
    unsigned not_words;
} so_bpe_options;

so_bpe *so_bpe_create(const so_bpe_options *options, size_t expected_merges);
void so_bpe_free(so_bpe *b);

/* The symbol that a character starts as. */
void so_bpe_add_char(so_bpe *b, uint32_t cp, int32_t id);
/* The same for a character that is no token but part of one: a symbol of its own, which falls back
 * to bytes if no merge takes it. Gives its id, at or above n_vocab. */
int32_t so_bpe_add_part(so_bpe *b, uint32_t cp);
int32_t so_bpe_char(const so_bpe *b, uint32_t cp); /* SO_BPE_NONE if it has none */
/* left + right become `result` (spelled `piece`). A pair given twice keeps the later rank, as in
 * the reference. */
void so_bpe_add_merge(so_bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t result,
                      so_str piece);
/* Depends on all merges and their ranks, not on the order of adding. */
uint64_t so_bpe_hash(const so_bpe *b);

so_bpe_scratch *so_bpe_scratch_create(void);
void so_bpe_scratch_free(so_bpe_scratch *s);

/* Appends the ids of one word (valid UTF-8). Time is O(n log n) in its length. */
int so_bpe_encode(const so_bpe *b, so_bpe_scratch *s, so_str word, so_tokens *out, so_err *err);

#endif
