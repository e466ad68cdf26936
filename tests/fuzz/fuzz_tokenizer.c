/* Tokenizers from hostile files: tokenizer.json or GGUF, then text through whatever loads.
 *
 * The last two bytes are the length of the text, which stands before them; the rest is the file. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <stdio.h>

#include "token/tokenizer.h"
#include "token/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

static void encode(const so_tokenizer *t, so_str text, unsigned flags) {
    so_tokens ids = {0};
    so_buf whole = {0}, repaired = {0}, streamed = {0};
    so_err err;
    if (so_tokenizer_encode(t, text, flags, &ids, &err) == 0) {
        so_detok d = {.t = t};
        for (size_t i = 0; i < ids.len; i++) {
            SO_ASSERT(ids.ids[i] >= 0 && ids.ids[i] < so_tokenizer_n_vocab(t));
            so_detok_push(&d, ids.ids[i], &streamed);
        }
        so_detok_finish(&d, &streamed);
        so_tokenizer_decode(t, ids.ids, ids.len, false, &whole);
        so_utf8_repair(so_buf_str(&whole), &repaired);
        SO_ASSERT(so_str_eq(so_buf_str(&streamed), so_buf_str(&repaired)));
    }
    so_tokens_free(&ids);
    so_buf_free(&whole);
    so_buf_free(&repaired);
    so_buf_free(&streamed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len) {
    if (len < 2)
        return 0;
    size_t n_text = (size_t)data[len - 2] | (size_t)data[len - 1] << 8;
    len -= 2;
    n_text = n_text < len ? n_text : len;
    size_t n_file = len - n_text;
    int fd = memfd_create("fuzz", 0);
    if (fd < 0 || write(fd, data, n_file) != (ssize_t)n_file)
        abort();
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    so_checkpoint *ck;
    so_tokenizer *t;
    so_err err;
    if (so_checkpoint_open(path, SO_CHECKPOINT_TOKENIZER, &ck, &err) == 0) {
        if (so_tokenizer_load(ck, &t, &err) == 0) {
            so_str text = {(const char *)data + n_file, n_text};
            encode(t, text, 0);
            encode(t, text, SO_ENCODE_PARSE_SPECIAL | SO_ENCODE_ADD_SPECIAL);
            so_tokenizer_free(t);
        }
        so_checkpoint_close(ck);
    }
    close(fd);
    return 0;
}
