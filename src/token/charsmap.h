/* SentencePiece's precompiled normalisation: a trie from short strings to their replacements, in
 * the binary form that both GGUF files and tokenizer.json carry:
 *
 *   uint32      n, bytes of the trie, little-endian
 *   uint32[n/4] the trie, a double array (charsmap.c)
 *   char[]      the replacements, each ended by a NUL byte
 *
 * The rules of replacement are those of Hugging Face tokenizers: the text is divided into grapheme
 * clusters (Unicode TR 29). A cluster of up to 5 bytes is replaced as a whole if the trie has a
 * string that it begins with; otherwise each of its characters is looked up separately. Of several
 * strings that match, the shortest counts. Immutable once read; any thread may apply it. */
#ifndef SO_TOKEN_CHARSMAP_H
#define SO_TOKEN_CHARSMAP_H

#include "base/err.h"
#include "base/str.h"

typedef struct so_charsmap so_charsmap;

enum { SO_CHARSMAP_MAX_BYTES = 16 << 20 };

/* Copies the bytes. An error if they do not have the form above; a trie that leads nowhere is
 * found when it is walked, and replaces nothing. */
int so_charsmap_read(so_str bytes, so_charsmap **out, so_err *err);
void so_charsmap_free(so_charsmap *c);
/* Appends the normalised text; `text` is valid UTF-8, and so is the result. */
void so_charsmap_apply(const so_charsmap *c, so_str text, so_buf *out);

#endif
