/* Byte-pair encoding: the characters of a word are symbols, and the adjacent pair with the lowest
 * rank is merged until no pair has a rank.
 *
 * Used for both kinds of vocabulary. With a list of merges, the rank is the place in the list. With
 * scores (SentencePiece), every split of a piece into two symbols is a merge, ranked by the score
 * of the piece (spm.c). Build with the add functions; then any thread may encode, with a scratch of
 * its own. */
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
    int32_t unk;           /* for a character without a token; SO_BPE_NONE: it is dropped */
    bool fuse_unk;         /* adjacent unknown characters become one token */
    bool byte_fallback;    /* an unknown character becomes the tokens of its bytes, if all exist */
    int32_t byte_ids[256]; /* SO_BPE_NONE where absent */
    /* For ignore_merges, else NULL: a word that is a key here becomes that token without merging,
     * unless the kind of the token has a bit of not_words. Borrowed. */
    const so_map *whole_words;
    const uint8_t *kinds; /* [n_vocab] */
    unsigned not_words;
} so_bpe_options;

so_bpe *so_bpe_create(const so_bpe_options *options, size_t expected_merges);
void so_bpe_free(so_bpe *b);

/* Sets the initial symbol of a character. */
void so_bpe_add_char(so_bpe *b, uint32_t cp, int32_t id);
/* The same for a character that is not a token but occurs in one: if no merge uses it, it is
 * encoded as its bytes or as unk. Returns the id of the symbol, at or above n_vocab. */
int32_t so_bpe_add_part(so_bpe *b, uint32_t cp);
int32_t so_bpe_char(const so_bpe *b, uint32_t cp); /* SO_BPE_NONE if it has none */
/* left + right become `result`, whose text is `piece`. A pair added twice has the later rank, as in
 * Hugging Face tokenizers. */
void so_bpe_add_merge(so_bpe *b, int32_t left, int32_t right, uint32_t rank, int32_t result,
                      so_str piece);
/* A hash of all merges and ranks, independent of the order in which they were added. */
uint64_t so_bpe_hash(const so_bpe *b);

so_bpe_scratch *so_bpe_scratch_create(void);
void so_bpe_scratch_free(so_bpe_scratch *s);

/* Appends the ids of one word (valid UTF-8). Time is O(n log n) in its length. */
int so_bpe_encode(const so_bpe *b, so_bpe_scratch *s, so_str word, so_tokens *out, so_err *err);

#endif
