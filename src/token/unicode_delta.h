/* Differences between the Unicode tables of Hugging Face tokenizers and those of our libraries. */
#ifndef SO_TOKEN_UNICODE_DELTA_H
#define SO_TOKEN_UNICODE_DELTA_H

#include <stdbool.h>
#include <stdint.h>

/* A substitute for cp in PCRE2, whose tables are older than those of Hugging Face tokenizers' regex
 * engine: a character with the category of cp and the same length in UTF-8. 0: cp needs none. */
uint32_t so_unicode_stand_in(uint32_t cp);

/* True for characters that utf8proc normalises and Hugging Face tokenizers, with older tables,
 * leaves unchanged. */
bool so_unicode_not_normalized(uint32_t cp);

#endif
