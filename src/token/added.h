/* Added tokens: strings that are cut out of the text before anything else looks at it. */
#ifndef SO_TOKEN_ADDED_H
#define SO_TOKEN_ADDED_H

#include "base/str.h"

typedef struct so_added {
    so_str text; /* borrowed; not empty */
    int32_t id;
    bool control;        /* skipped unless control tokens are parsed */
    bool single_word;    /* only where no word character is next to it */
    bool lstrip, rstrip; /* takes the white space beside it along */
} so_added;

typedef struct so_added_set {
    so_added *items; /* sorted by text once sealed */
    size_t n, cap;
    uint32_t first[257]; /* items whose first byte is c: first[c] … first[c+1] */
} so_added_set;

void so_added_push(so_added_set *s, so_added item);
/* Sorts, and drops all but the first given of items with equal text. Call once, before matching. */
void so_added_seal(so_added_set *s);
void so_added_deinit(so_added_set *s);

/* A stretch of text: an added token, or what lies between two. */
typedef struct so_added_part {
    so_str text;
    int32_t id; /* -1: text to be encoded */
} so_added_part;

/* Walks the parts of a text. Zero-initialise apart from set, text and parse_control. */
typedef struct so_added_walk {
    const so_added_set *set;
    so_str text;
    bool parse_control;
    const uint8_t *from_data; /* [text.len]; no control token has a marked byte; NULL: all clear */
    size_t scanned, done;     /* matching goes on at `scanned`; parts up to `done` are given out */
    so_added_part pending;
    bool has_pending;
} so_added_walk;
bool so_added_next(so_added_walk *w, so_added_part *part); /* false at the end */

#endif
