/* Reads GGUF files written by other programs: the pulled models and vocabulary-only files. */
#include "so_test.h"

#include <stdlib.h>

#include "base/mem.h"
#include "format/checkpoint.h"

static void real_model(void **state) {
    (void)state;
    const char *path = so_test_model("smollm2");
    if (!path)
        SO_SKIP("smollm2 is not pulled");
    so_checkpoint *ck;
    so_err err;
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
    const so_gguf *g = so_checkpoint_gguf(ck);
    assert_non_null(g);
    assert_int_equal(so_gguf_version(g), 3);
    assert_int_equal(so_checkpoint_bytes(ck), 98362432);
    assert_int_equal(so_gguf_n_tensors(g), 272);
    so_str arch;
    int64_t n;
    double base;
    SO_OK_OR_FAIL(so_gguf_get_str(g, "general.architecture", &arch, &err), err);
    assert_true(so_str_eq_c(arch, "llama"));
    SO_OK_OR_FAIL(so_gguf_get_i64(g, "llama.block_count", &n, &err), err);
    assert_int_equal(n, 30);
    SO_OK_OR_FAIL(so_gguf_get_f64(g, "llama.rope.freq_base", &base, &err), err);
    assert_true(base == 100000.0);
    assert_int_equal(so_gguf_get_i64(g, "general.architecture", &n, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "general.architecture is of type string"));
    assert_int_equal(so_gguf_get_i64(g, "no.such.key", &n, &err), SO_ENOTFOUND);

    const so_gguf_kv *tokens = so_gguf_find(g, "tokenizer.ggml.tokens");
    assert_non_null(tokens);
    assert_int_equal(tokens->n, 49152);
    assert_true(so_str_eq_c(tokens->strings[0], "<|endoftext|>"));

    const so_tensor *emb;
    SO_OK_OR_FAIL(so_checkpoint_require(ck, "token_embd.weight", &emb, &err), err);
    assert_int_equal(emb->dtype, SO_DTYPE_Q8_0);
    assert_int_equal(emb->dims[0], 576);
    assert_int_equal(emb->dims[1], 49152);
    assert_int_equal(emb->n_bytes, so_dtype_row_bytes(emb->dtype, so_tensor_count(emb)));
    assert_int_equal(so_checkpoint_require(ck, "nope", &emb, &err), SO_ENOTFOUND);
    assert_non_null(strstr(err.msg, "tensor nope is missing"));
    so_checkpoint_close(ck);
}

static void vocabulary_only(void **state) {
    (void)state;
    char *dir = so_test_tmp();
    char *path = so_test_unxz("vocabs/ggml-vocab-llama-spm.gguf.xz", dir);
    if (!path) {
        so_test_tmp_free(dir);
        SO_SKIP("shared vocabularies are absent");
    }
    so_checkpoint *ck;
    so_err err;
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_TOKENIZER, &ck, &err), err);
    const so_gguf_kv *scores = so_gguf_find(so_checkpoint_gguf(ck), "tokenizer.ggml.scores");
    double v;
    assert_non_null(scores);
    assert_int_equal(scores->n, 32000);
    assert_true(so_gguf_elem_f64(scores, 300, &v));
    assert_false(so_gguf_elem_f64(scores, 32000, &v));
    so_checkpoint_close(ck);
    assert_int_equal(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "no tensors"));
    free(path);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(real_model),
                                       cmocka_unit_test(vocabulary_only)};
    return cmocka_run_group_tests_name("gguf", tests, NULL, NULL);
}
