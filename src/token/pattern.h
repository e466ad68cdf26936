/* Regular expressions as tokenizer.json states them (Oniguruma, Ruby syntax), run by PCRE2.
 *
 * A pattern is compiled once and used from any thread; what one encoding needs (match data, a time
 * budget, scratch) is in a so_matching. Every match is bounded, so that a pattern that backtracks
 * without end gives SO_ELIMIT instead of a hang. */
#ifndef SO_TOKEN_PATTERN_H
#define SO_TOKEN_PATTERN_H

#include "base/err.h"
#include "base/str.h"

typedef struct so_pattern so_pattern;
typedef struct so_matching so_matching;

/* SO_EUNSUPPORTED names a construct that the two engines read differently; SO_EFORMAT carries the
 * compiler's message. */
int so_pattern_compile(so_str source, so_pattern **out, so_err *err);
void so_pattern_free(so_pattern *p);

/* text_len sizes the time budget. */
so_matching *so_matching_create(size_t text_len);
void so_matching_free(so_matching *m);

/* The text to search in place of `text`: of the same length, with characters that PCRE2's Unicode
 * tables do not know yet exchanged for ones of their category. Valid until the next call. */
so_str so_matching_subject(so_matching *m, so_str text);

/* Successive matches. Zero-initialise apart from pattern, matching and text (valid UTF-8). */
typedef struct so_find {
    const so_pattern *pattern;
    so_matching *matching;
    so_str text;
    size_t pos, last_end;
    bool any;
} so_find;
/* 1: *start and *end are set (they may be equal); 0: no more; negative: error. */
int so_find_next(so_find *f, size_t *start, size_t *end, so_err *err);

#endif
