/* Whether a draft model and its target mean the same by their token ids. */
#include "base/mem.h"
#include "draft/model.h"

/* Start of all messages about a vocabulary: the finding, both sizes, the remedy. */
#define VOCAB_DIFFERS                                                                         \
    "the draft model's vocabulary differs from the target's (%d and %d tokens): use a draft " \
    "model of the target's own family; "

/* Ids past the shorter vocabulary: padding, or tokens that only one of the two has. */
static int check_extra_ids(const so_tokenizer *target, const so_tokenizer *draft, so_err *err) {
    int32_t n_target = so_tokenizer_n_vocab(target), n_draft = so_tokenizer_n_vocab(draft);
    const so_tokenizer *longer = n_target > n_draft ? target : draft;
    for (int32_t id = SO_MIN(n_target, n_draft); id < so_tokenizer_n_vocab(longer); id++)
        if (!(so_tokenizer_kind(longer, id) & (SO_TOKEN_UNUSED | SO_TOKEN_CONTROL)))
            return so_err_set(err, SO_EMISMATCH, VOCAB_DIFFERS "only the %s has token %d ('%.*s')",
                              n_draft, n_target, longer == target ? "target" : "draft", id,
                              SO_STR_ARG(so_tokenizer_piece(longer, id)));
    return SO_OK;
}

int so_draft_check_tokenizers(const so_tokenizer *target, const so_tokenizer *draft, so_err *err) {
    int32_t n_target = so_tokenizer_n_vocab(target), n_draft = so_tokenizer_n_vocab(draft);
    for (int32_t id = 0; id < SO_MIN(n_target, n_draft); id++) {
        so_str a = so_tokenizer_piece(target, id), b = so_tokenizer_piece(draft, id);
        if (!so_str_eq(a, b))
            return so_err_set(err, SO_EMISMATCH,
                              VOCAB_DIFFERS "token %d is '%.*s' in the target and '%.*s' in the "
                                            "draft",
                              n_draft, n_target, id, SO_STR_ARG(a), SO_STR_ARG(b));
    }
    if (so_tokenizer_eos(target) != so_tokenizer_eos(draft))
        return so_err_set(err, SO_EMISMATCH,
                          "the draft model's end token is %d, the target's is %d: use a draft "
                          "model of the target's own family",
                          so_tokenizer_eos(draft), so_tokenizer_eos(target));
    return check_extra_ids(target, draft, err);
}

uint64_t so_draft_vocab_hash(const so_tokenizer *tok) {
    int32_t n = tok ? so_tokenizer_n_vocab(tok) : 0;
    uint64_t h = 0;
    while (n > 0 && (so_tokenizer_kind(tok, n - 1) & (SO_TOKEN_UNUSED | SO_TOKEN_CONTROL)))
        n--;
    for (int32_t id = 0; id < n; id++) {
        so_str piece = so_tokenizer_piece(tok, id);
        const uint64_t row[] = {h, so_hash_bytes(piece.ptr, piece.len)};
        h = so_hash_bytes(row, sizeof row);
    }
    const uint64_t whole[] = {h, (uint64_t)n, tok ? (uint64_t)so_tokenizer_eos(tok) : 0};
    return tok ? so_hash_bytes(whole, sizeof whole) : 0;
}
