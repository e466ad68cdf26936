/* Unigram tokenizers (SentencePiece's default model, T5's tokenizer): every piece has a score, the
 * logarithm of a probability, and a text becomes those pieces whose scores have the largest sum.
 *
 * The ids are those of Hugging Face tokenizers, ties and rounding included: sums are doubles, added
 * from left to right; of two paths with equal sums the one whose last piece starts earlier is kept. A character
 * that is no piece costs the smallest score less 10. Adjacent unknown characters become one unknown token, or with
 * byte fallback the tokens of their bytes.
 *
 * Build with so_unigram_create; then any thread may encode. */
#ifndef SO_TOKEN_UNIGRAM_H
#define SO_TOKEN_UNIGRAM_H

#include "base/err.h"
#include "base/str.h"

typedef struct so_unigram so_unigram;

enum { SO_UNIGRAM_MAX_PIECE = 1024 }; /* bytes; bounds the time per character of a text */

typedef struct so_unigram_options {
    int32_t n_vocab;
    const so_str *pieces;   /* [n_vocab]; borrowed during so_unigram_create */
    const double *scores;   /* [n_vocab], finite */
    const uint8_t *skipped; /* [n_vocab] 1: never encoded to (control tokens) */
    int32_t unk;
    bool byte_fallback;
    int32_t byte_ids[256]; /* −1 where absent */
} so_unigram_options;

int so_unigram_create(const so_unigram_options *o, so_unigram **out, so_err *err);
void so_unigram_free(so_unigram *u);
/* Appends the ids of one piece of text (valid UTF-8). */
int so_unigram_encode(const so_unigram *u, so_str text, so_tokens *out, so_err *err);

#endif
