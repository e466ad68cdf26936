/* The regular expressions of tokenizer.json (Oniguruma, Ruby syntax), matched by PCRE2.
 *
 * A pattern is compiled once and used from any thread. A so_matching has what one encoding needs:
 * match data, a time budget, scratch. Steps and time are limited, so a pattern that backtracks
 * without end returns SO_ELIMIT. */
#ifndef SO_TOKEN_PATTERN_H
#define SO_TOKEN_PATTERN_H

#include "base/err.h"
#include "base/str.h"

typedef struct so_pattern so_pattern;
typedef struct so_matching so_matching;

/* SO_EUNSUPPORTED: a construct that the two engines interpret differently, named in the message;
 * SO_EFORMAT: the message of PCRE2's compiler. */
int so_pattern_compile(so_str source, so_pattern **out, so_err *err);
void so_pattern_free(so_pattern *p);

/* The time budget is proportional to text_len. */
so_matching *so_matching_create(size_t text_len);
void so_matching_free(so_matching *m);

/* The text to match instead of `text`: of the same length, with characters that PCRE2's Unicode
 * tables lack replaced by characters of the same category. Valid until the next call. */
so_str so_matching_subject(so_matching *m, so_str text);

/* Successive matches. Set pattern, matching and text (valid UTF-8), zero the others. */
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
