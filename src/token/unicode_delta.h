/* Where the reference's Unicode tables differ from those of the libraries we use. */
#ifndef SO_TOKEN_UNICODE_DELTA_H
#define SO_TOKEN_UNICODE_DELTA_H

#include <stdbool.h>
#include <stdint.h>

/* A character of the category that the reference's regex engine gives cp, which PCRE2's older
 * tables sort the same way and which is as long in UTF-8; 0 where cp will do itself. */
uint32_t so_unicode_stand_in(uint32_t cp);

/* True for characters that the reference's normalizers, with older tables than utf8proc, leave
 * alone though they combine, decompose or compose. */
bool so_unicode_is_inert(uint32_t cp);

#endif
