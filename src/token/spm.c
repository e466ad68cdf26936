/* Merges for SentencePiece-style vocabularies, which have a score per piece and no merges.
 *
 * At each step SentencePiece looks at all pairs of adjacent symbols whose concatenation is a piece.
 * It merges the pair whose piece has the highest score, the leftmost of equals. This is the same as
 * byte-pair merging with the following list: for every piece and every split of it into two
 * symbols, (left, right) → piece, ranked by the score of the piece; equal scores have the same
 * rank. A symbol is a single character or a piece, so only splits into these can occur. A character
 * that occurs in pieces but is not a piece gets a symbol by so_bpe_add_part.
 *
 * Control, unknown, unused and byte pieces, and those that are not UTF-8, are never the result of a
 * merge: text cannot produce a control token. Added pieces are cut out before merging. Loading
 * only; one thread. */
#include <math.h>
#include <stdlib.h>

#include "token/tokenizer_impl.h"
#include "token/utf8.h"

static bool merges(const so_tokenizer *t, int32_t id) {
    return t->pieces[id].len > 0 &&
           !(t->kinds[id] & (SO_TOKEN_CONTROL | SO_TOKEN_UNKNOWN | SO_TOKEN_BYTE | SO_TOKEN_ADDED |
                             SO_TOKEN_UNUSED));
}

static int higher_first(const void *pa, const void *pb) {
    float a = *(const float *)pa, b = *(const float *)pb;
    return (a < b) - (a > b);
}

/* The distinct scores, highest first; the rank of a score is its index. */
static size_t distinct_scores(const float *scores, size_t n, float *out) {
    memcpy(out, scores, n * sizeof *out);
    qsort(out, n, sizeof *out, higher_first);
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (kept == 0 || out[i] != out[kept - 1])
            out[kept++] = out[i];
    return kept;
}

static uint32_t rank_of(const float *distinct, size_t n, float score) {
    size_t lo = 0, hi = n;
    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        if (distinct[mid] > score)
            lo = mid + 1;
        else
            hi = mid;
    }
    return (uint32_t)lo;
}

static void add_chars(const so_tokenizer *t, so_bpe *b) {
    uint32_t cp;
    for (int32_t id = 0; id < t->n_vocab; id++)
        if (merges(t, id) && so_vocab_single_char(t->pieces[id], &cp))
            so_bpe_add_char(b, cp, id);
    for (int32_t id = 0; id < t->n_vocab; id++) {
        if (!merges(t, id))
            continue;
        so_str s = t->pieces[id];
        for (size_t i = 0, len; i < s.len; i += len) {
            cp = so_utf8_at(s.ptr + i, &len);
            if (so_bpe_char(b, cp) == SO_BPE_NONE)
                so_bpe_add_part(b, cp);
        }
    }
}

/* The symbol with the text s: a piece that merges may use, or a single character. */
static int32_t symbol_of(const so_tokenizer *t, const so_bpe *b, so_str s) {
    uint32_t cp;
    if (so_vocab_single_char(s, &cp))
        return so_bpe_char(b, cp);
    int64_t id;
    return so_map_get(t->by_piece, s, &id) && merges(t, (int32_t)id) ? (int32_t)id : SO_BPE_NONE;
}

int so_spm_add_merges(so_tokenizer *t, so_bpe *b, const float *scores, so_err *err) {
    for (int32_t id = 0; id < t->n_vocab; id++)
        if (!isfinite(scores[id]))
            return so_err_set(err, SO_EFORMAT, "tokenizer.ggml.scores[%d] is not a finite number",
                              id);
    float *distinct = so_try_alloc((size_t)t->n_vocab, sizeof *distinct);
    if (!distinct)
        return so_err_set(err, SO_ENOMEM, "no memory for %d scores", t->n_vocab);
    size_t n_distinct = distinct_scores(scores, (size_t)t->n_vocab, distinct);
    add_chars(t, b);
    for (int32_t id = 0; id < t->n_vocab; id++) {
        so_str s = t->pieces[id];
        if (!merges(t, id))
            continue;
        uint32_t rank = rank_of(distinct, n_distinct, scores[id]);
        size_t len;
        so_utf8_at(s.ptr, &len);
        for (size_t i = len; i < s.len; i += len) {
            int32_t left = symbol_of(t, b, (so_str){s.ptr, i});
            int32_t right =
                left == SO_BPE_NONE ? SO_BPE_NONE : symbol_of(t, b, (so_str){s.ptr + i, s.len - i});
            if (right != SO_BPE_NONE)
                so_bpe_add_merge(b, left, right, rank, id, s);
            so_utf8_at(s.ptr + i, &len);
        }
    }
    free(distinct);
    return 0;
}
