/* Pre-tokenizing: splits a text into pieces; merges never cross a boundary between pieces. It is a
 * chain of stages, each of which either splits or rewrites every piece. A pre-tokenizer of
 * tokenizer.json or a name in `tokenizer.ggml.pre` is a short list of stages. Immutable once built;
 * any thread. */
#ifndef SO_TOKEN_PRETOK_H
#define SO_TOKEN_PRETOK_H

#include "token/normalize.h"

/* Where a delimiter goes when a text is split at it. */
typedef enum so_split {
    SO_SPLIT_REMOVED,
    SO_SPLIT_ISOLATED,
    SO_SPLIT_MERGED_WITH_PREVIOUS,
    SO_SPLIT_MERGED_WITH_NEXT,
    SO_SPLIT_CONTIGUOUS, /* adjacent delimiters form one piece */
} so_split;

typedef struct so_pretok_stage {
    bool rewrites;
    so_text_op op; /* used if it rewrites; the fields below are used if it splits */
    so_split behaviour;
    bool invert; /* the text between the matches is the delimiter */
    /* the matcher, one of three: a pattern, a literal, a predicate on single characters */
    so_pattern *pattern;
    char *literal;
    size_t literal_len;
    bool (*is_delimiter)(uint32_t cp);
} so_pretok_stage;

enum { SO_PRETOK_MAX_STAGES = 32 };

typedef struct so_pretok {
    so_pretok_stage stages[SO_PRETOK_MAX_STAGES];
    int n_stages;
} so_pretok;

void so_pretok_deinit(so_pretok *p);

/* A new stage to fill in, owned by p; NULL if there are too many. */
so_pretok_stage *so_pretok_add(so_pretok *p);
/* Adds a split by a pattern, with behaviour Isolated; SO_ELIMIT if there are too many stages. */
int so_pretok_add_pattern(so_pretok *p, so_str pattern, so_err *err);
/* GPT-2's pattern, which the ByteLevel pre-tokenizer uses. */
extern const char so_pretok_gpt2_pattern[];

/* Further settings that a name in `tokenizer.ggml.pre` implies, in addition to the stages. */
typedef struct so_pretok_traits {
    bool ignore_merges; /* a piece that is a token becomes that token without merging */
    bool adds_bos;      /* default if the file has no add_bos_token */
    bool nfc;           /* the original tokenizer normalises to NFC */
} so_pretok_traits;
int so_pretok_by_name(so_str name, so_pretok *p, so_pretok_traits *traits, so_err *err);

typedef struct so_span {
    uint32_t off, len;
} so_span;

/* The pieces of a text, and scratch. Zero-initialise; may be reused; deinit at the end. */
typedef struct so_pieces {
    so_buf text, next_text;
    so_span *spans, *next;
    size_t n, cap, n_next, next_cap;
    bool first; /* the first piece is at the start of the encoded text */
} so_pieces;
void so_pieces_deinit(so_pieces *p);

/* Fills `out` with the pieces of `text` (valid UTF-8, at most 1 GiB); none of them is empty. */
int so_pretok_run(const so_pretok *p, so_matching *m, so_str text, bool first, so_pieces *out,
                  so_err *err);

#endif
