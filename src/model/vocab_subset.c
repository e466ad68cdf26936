/* The vocabulary subset of a draft model.
 *
 * A draft of a few million parameters spends most of its time in the output matrix of a large
 * vocabulary, on tokens that hardly ever occur. Its file may select the tokens it has logits for,
 * one bit each. Only those rows of the output matrix are multiplied, and logits rows have that
 * length (model.h). Tokens that the model reads are not limited.
 *
 * The mask comes from outside. Its length must match the vocabulary, so no allocation depends on a
 * number in the file. A bit past the vocabulary is refused, not ignored: such a file was written
 * for another model. Any thread. */
#include "model/vocab_subset.h"

#include "base/mem.h"

static int count_bits(const unsigned char *mask, uint64_t n) {
    int count = 0;
    for (uint64_t i = 0; i < n; i++)
        count += __builtin_popcount(mask[i]);
    return count;
}

static bool has_bit(const unsigned char *mask, int id) { return mask[id / 8] >> (id % 8) & 1; }

static int check(const so_gguf *g, const so_gguf_kv *kv, int n_vocab, so_err *err) {
    const char *path = so_gguf_path(g);
    uint64_t want = ((uint64_t)n_vocab + 7) / 8;
    if (kv->type != SO_GGUF_ARRAY || kv->elem != SO_GGUF_U8)
        return so_err_set(err, SO_EFORMAT,
                          "%s: " SO_VOCAB_SUBSET_KEY " is of type %s; bytes are expected", path,
                          so_gguf_type_name(kv->type == SO_GGUF_ARRAY ? kv->elem : kv->type));
    if (kv->n != want)
        return so_err_set(err, SO_EFORMAT,
                          "%s: " SO_VOCAB_SUBSET_KEY
                          " has %llu bytes; %llu are expected, a bit for each of "
                          "%d tokens",
                          path, (unsigned long long)kv->n, (unsigned long long)want, n_vocab);
    for (int id = n_vocab; id < (int)want * 8; id++)
        if (has_bit(kv->data, id))
            return so_err_set(err, SO_EFORMAT,
                              "%s: " SO_VOCAB_SUBSET_KEY
                              " selects id %d; the vocabulary has ids 0 to %d",
                              path, id, n_vocab - 1);
    if (count_bits(kv->data, kv->n) == 0)
        return so_err_set(err, SO_EFORMAT, "%s: " SO_VOCAB_SUBSET_KEY " selects no token", path);
    return 0;
}

int so_vocab_subset_read(const so_gguf *g, int n_vocab, int32_t **ids, int *n, so_err *err) {
    const so_gguf_kv *kv = g ? so_gguf_find(g, SO_VOCAB_SUBSET_KEY) : NULL;
    *ids = NULL;
    *n = n_vocab;
    if (!kv)
        return 0;
    int rc = check(g, kv, n_vocab, err), count = 0;
    if (rc != 0 || count_bits(kv->data, kv->n) == n_vocab)
        return rc;
    *ids = SO_NEW_N(int32_t, n_vocab);
    for (int id = 0; id < n_vocab; id++)
        if (has_bit(kv->data, id))
            (*ids)[count++] = id;
    *n = count;
    return 0;
}
