/* Added tokens: strings that are cut out of the text before it is normalised and split. */
#ifndef SO_TOKEN_ADDED_H
#define SO_TOKEN_ADDED_H

#include "base/str.h"

typedef struct so_added {
    so_str text; /* borrowed; not empty */
    int32_t id;
    bool control;        /* matched only with parse_control */
    bool single_word;    /* matched only if no word character is next to it */
    bool lstrip, rstrip; /* the white space on that side belongs to the match */
} so_added;

typedef struct so_added_set {
    so_added *items; /* sorted by text once sealed */
    size_t n, cap;
    uint32_t first[257]; /* items first[c] … first[c+1] − 1 start with byte c */
} so_added_set;

void so_added_push(so_added_set *s, so_added item);
/* Sorts, and keeps the first of items with equal text. Call once, before matching. */
void so_added_seal(so_added_set *s);
void so_added_deinit(so_added_set *s);

/* A part of a text: an added token, or the text between two of them. */
typedef struct so_added_part {
    so_str text;
    int32_t id; /* -1: text to be encoded */
} so_added_part;

/* Iterates over the parts of a text. Set the first four fields, zero the others. */
typedef struct so_added_walk {
    const so_added_set *set;
    so_str text;
    bool parse_control;
    const uint8_t *from_data; /* [text.len] or NULL; no control token may contain a byte marked 1 */
    size_t scanned, done; /* matching continues at `scanned`; parts up to `done` were returned */
    so_added_part pending;
    bool has_pending;
} so_added_walk;
bool so_added_next(so_added_walk *w, so_added_part *part); /* false at the end */

#endif
