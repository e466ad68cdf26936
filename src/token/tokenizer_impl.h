/* Internals of the tokenizer, shared by its loaders (tokenizer_gguf.c, tokenizer_json.c,
 * json_parts.c, spm.c), the encoder (tokenizer.c) and the decoder (detok.c). Included by no other
 * file. */
#ifndef SO_TOKEN_TOKENIZER_IMPL_H
#define SO_TOKEN_TOKENIZER_IMPL_H

#include "base/map.h"
#include "base/mem.h"
#include "token/added.h"
#include "token/bpe.h"
#include "token/pretok.h"
#include "token/tokenizer.h"
#include "token/unigram.h"

enum {
    SO_TOKENIZER_MAX_OPS = 32,
    SO_TOKENIZER_MAX_ADDED_BYTES = 1024,
    SO_TOKENIZER_MAX_VOCAB = 1 << 22, /* sixteen times the largest known vocabulary */
};

/* One step of decoding a piece to text. */
typedef enum so_decode_kind {
    SO_DECODE_REPLACE,       /* replaces text as `op` states */
    SO_DECODE_BYTE_FALLBACK, /* <0x0A> is byte 10 */
    SO_DECODE_BYTE_LEVEL,    /* byte-level characters to bytes */
    SO_DECODE_STRIP,         /* removes `strip` up to n_start times at the start and n_stop times
                                at the end */
} so_decode_kind;

typedef struct so_decode_step {
    so_decode_kind kind;
    so_text_op op;
    char strip[4];
    size_t strip_len;
    int n_start, n_stop;
} so_decode_step;

typedef struct so_decoder {
    so_decode_step steps[SO_TOKENIZER_MAX_OPS];
    int n_steps;
    bool fused;       /* while loading: a Fuse step was read, which joins all tokens. Of the later
                         steps only a Strip of one leading space is supported */
    bool drops_space; /* one leading space of the whole text is dropped */
    bool drops_run;   /* and all spaces that the first token starts with (Metaspace) */
    bool joins;       /* tokens are joined by spaces (a tokenizer.json without a decoder) */
} so_decoder;

struct so_tokenizer {
    int32_t n_vocab;
    so_str *pieces; /* [n_vocab] as in the vocabulary; empty: no such token */
    so_str *texts;  /* [n_vocab] decoded */
    uint8_t *kinds; /* [n_vocab] SO_TOKEN_… bits */
    char *piece_bytes, *text_bytes;
    size_t piece_len, piece_cap;
    so_map *by_piece;

    so_added_set added;            /* matched in the raw text */
    so_added_set added_normalized; /* matched in the normalised text */
    so_buf added_bytes;            /* the normalised texts of added_normalized */
    so_text_op normalizer[SO_TOKENIZER_MAX_OPS];
    int n_normalizer;
    so_pretok pretok;
    so_bpe *bpe; /* one of bpe and unigram is set */
    so_unigram *unigram;
    so_decoder decoder;

    int32_t bos, eos, unk;
    so_tokens prefix, suffix; /* added with ADD_SPECIAL */
    so_tokens ends;           /* end tokens: EOS and others that end an answer */
    char *chat_template;
    size_t chat_template_len;
    uint64_t hash;
};

/* ---- for the loaders ---- */

/* Allocates arrays for n tokens whose pieces have n_bytes in all. */
int so_vocab_init(so_tokenizer *t, size_t n, size_t n_bytes, so_err *err);
/* Sets the piece and the kind of a token that is not set yet; the bytes are copied. */
void so_vocab_put(so_tokenizer *t, int32_t id, so_str piece, unsigned kind);
/* The ids of <0x00> … <0xFF>, or SO_BPE_NONE; sets their SO_TOKEN_BYTE. */
void so_vocab_find_bytes(so_tokenizer *t, int32_t byte_ids[256]);
/* True if the piece is one character, *cp. */
bool so_vocab_single_char(so_str piece, uint32_t *cp);

so_text_op *so_normalizer_add(so_tokenizer *t, so_text_kind kind); /* NULL: too many */
/* Copies both strings into op: a literal REPLACE, or a PREPEND, which uses only `to`. */
void so_text_op_set(so_text_op *op, so_str from, so_str to);

/* Adds the merges that the scores imply, see spm.c. */
int so_spm_add_merges(so_tokenizer *t, so_bpe *b, const float *scores, so_err *err);

/* Creates t->unigram from a score per token, once the kinds of all tokens are known. */
int so_tokenizer_make_unigram(so_tokenizer *t, const double *scores, bool byte_fallback,
                              so_err *err);

int so_tokenizer_from_gguf(so_tokenizer *t, const so_gguf *g, so_err *err);
int so_tokenizer_from_json(so_tokenizer *t, const so_checkpoint *ck, so_err *err);

/* The components of a tokenizer.json (json_parts.c); j may be NULL or JSON null. */
int so_json_normalizer(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err);
int so_json_pretok(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err);
int so_json_decoder(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err);
int so_json_post(so_tokenizer *t, const json_t *j, const char *path, int depth, so_err *err);

/* Applies the normalizers; *out is text itself or in one of the buffers. first: text is at the
 * start of the text to encode (so_text_op_apply). */
int so_normalizer_run(const so_tokenizer *t, so_matching *m, so_str text, bool first,
                      so_buf bufs[2], so_str *out, so_err *err);

/* Computes t->texts with the decoder. */
int so_decoder_render(so_tokenizer *t, so_err *err);
void so_decoder_deinit(so_decoder *d);

#endif
