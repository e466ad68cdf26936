/* Pre-tokenizing: text into the pieces that merging never crosses, as a chain of stages. A stage
 * either splits every piece or rewrites every piece; each pre-tokenizer of tokenizer.json and each
 * `tokenizer.ggml.pre` name is a short list of stages. Immutable once built; any thread. */
#ifndef SO_TOKEN_PRETOK_H
#define SO_TOKEN_PRETOK_H

#include "token/normalize.h"

/* What becomes of a delimiter when a text is split at it. */
typedef enum so_split {
    SO_SPLIT_REMOVED,
    SO_SPLIT_ISOLATED,
    SO_SPLIT_MERGED_WITH_PREVIOUS,
    SO_SPLIT_MERGED_WITH_NEXT,
    SO_SPLIT_CONTIGUOUS, /* neighbouring delimiters stay together */
} so_split;

typedef struct so_pretok_stage {
    bool rewrites;
    so_text_op op; /* if it rewrites; the rest if it splits */
    so_split behaviour;
    bool invert; /* the delimiters are what the matcher does not match */
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

/* NULL when there are too many already. The caller fills it and owns nothing of it. */
so_pretok_stage *so_pretok_add(so_pretok *p);
/* Split by a pattern with behaviour Isolated; SO_ELIMIT when there are too many stages. */
int so_pretok_add_pattern(so_pretok *p, so_str pattern, so_err *err);
/* ByteLevel's own pattern (GPT-2's), Isolated. */
extern const char so_pretok_gpt2_pattern[];

/* What a GGUF file means by its `tokenizer.ggml.pre`. */
typedef struct so_pretok_traits {
    bool ignore_merges; /* a piece that is a token is that token, merges or not */
    bool adds_bos;      /* where the file says nothing */
    bool nfc;           /* the model's own tokenizer normalises to NFC */
} so_pretok_traits;
int so_pretok_by_name(so_str name, so_pretok *p, so_pretok_traits *traits, so_err *err);

typedef struct so_span {
    uint32_t off, len;
} so_span;

/* Pieces of a text, and the scratch to make them; zero-initialise, reuse, then deinit. */
typedef struct so_pieces {
    so_buf text, next_text;
    so_span *spans, *next;
    size_t n, cap, n_next, next_cap;
    bool first; /* the first piece starts at the beginning of what is encoded */
} so_pieces;
void so_pieces_deinit(so_pieces *p);

/* Fills `out` with the pieces of `text` (valid UTF-8, at most 1 GiB); none of them is empty. */
int so_pretok_run(const so_pretok *p, so_matching *m, so_str text, bool first, so_pieces *out,
                  so_err *err);

#endif
