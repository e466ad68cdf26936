/* Folders converted to GGUF: the converted file must be the same model. Bits are equal if both
 * forms compute the same sums; the permuted q and k of Llama add up in another order. */
#include "so_test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "model/convert.h"
#include "so_rig.h"
#include "token/tokenizer.h"

enum { N = 60, N_VOCAB = 131 };

static void golden_folder(const char *name, char *out, size_t cap) {
    char sub[128];
    snprintf(sub, sizeof sub, "golden/models/%s", name);
    snprintf(out, cap, "%s", so_test_data(sub));
}

static void convert(const char *folder, const char *out, const char *type) {
    so_err err = {0};
    so_checkpoint *ck;
    so_convert_source src;
    so_recipe recipe;
    SO_OK_OR_FAIL(so_checkpoint_open(folder, SO_CHECKPOINT_ALL, &ck, &err), err);
    SO_OK_OR_FAIL(so_model_convert_source(ck, &src, &err), err);
    assert_true(so_recipe_parse(type, &recipe));
    SO_OK_OR_FAIL(so_convert(&src, &recipe, out, NULL, NULL, &err), err);
    so_model_convert_source_free(&src);
    so_model_convert_source_free(&src); /* an empty source is allowed */
    so_checkpoint_close(ck);
}

static void run(const char *path, float *logits) {
    int32_t tokens[N];
    for (int i = 0; i < N; i++)
        tokens[i] = (i * 37 + 11) % N_VOCAB;
    so_rig r;
    so_rig_open(&r, path, &(so_rig_opts){.level = SO_CPU_AUTO});
    assert_int_equal(r.n_vocab, N_VOCAB);
    so_seq *s = so_seq_create(r.kv);
    so_rig_chain(&r, s, tokens, N, logits);
    so_seq_free(s);
    so_rig_close(&r);
}

static void same_model(void **state) {
    static const char *const names[] = {"llama",          "llama3_rope", "llama_linear_bias",
                                        "mistral_window", "qwen2",       "qwen2_yarn",
                                        "qwen3",          "gemma3",      "gpt2"};
    (void)state;
    char *dir = so_test_tmp(), *out = so_path_join(dir, "m.gguf"), folder[4096];
    float *want = SO_NEW_N(float, N *N_VOCAB), *got = SO_NEW_N(float, N *N_VOCAB);
    for (size_t i = 0; i < SO_LEN(names); i++) {
        golden_folder(names[i], folder, sizeof folder);
        convert(folder, out, "F32");
        run(folder, want);
        run(out, got);
        /* factors of yarn and frequencies of llama3 are divided and multiplied again */
        bool exact = names[i][0] != 'l' && names[i][0] != 'm' && strcmp(names[i], "qwen2_yarn");
        float largest = 0, worst = 0;
        for (int k = 0; k < N * N_VOCAB; k++) {
            largest = fmaxf(largest, fabsf(want[k]));
            worst = fmaxf(worst, fabsf(want[k] - got[k]));
        }
        if (exact ? worst != 0 : worst > (so_test_on_gpu() ? 5e-3f : 1e-5f) * largest)
            fail_msg("%s: logits differ by %g of %g", names[i], (double)worst, (double)largest);
    }
    free(want);
    free(got);
    free(out);
    so_test_tmp_free(dir);
}

static void refuses_what_would_not_run(void **state) {
    (void)state;
    so_err err = {0};
    so_checkpoint *ck;
    so_convert_source src = {0};
    char *dir = so_test_tmp(), *config = so_path_join(dir, "config.json"), folder[4096], cmd[9000];
    golden_folder("qwen2", folder, sizeof folder);
    snprintf(cmd, sizeof cmd,
             "cp '%s/model.safetensors' '%s' && sed 's/: 80/: 96/' '%s/config.json' > '%s'", folder,
             dir, folder, config);
    assert_int_equal(system(cmd), 0);
    SO_OK_OR_FAIL(so_checkpoint_open(dir, SO_CHECKPOINT_ALL, &ck, &err), err);
    assert_int_equal(so_model_convert_source(ck, &src, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "has shape [80, 48]; [96, 48] is expected"));
    so_checkpoint_close(ck);
    free(config);
    so_test_tmp_free(dir);
}

/* The tokenizer is converted too: the same ids from the folder and from the file. */
static void tokenizer_travels(void **state) {
    (void)state;
    static const char text[] =
        "Hello, world! 12345 \xC3\xA4\xC3\xB6 \xE4\xBD\xA0\xE5\xA5\xBD\n\n  x";
    char *dir = so_test_tmp(), *out = so_path_join(dir, "m.gguf"), folder[4096], cmd[9000];
    char *json = so_test_unxz("tokenizers/gpt2/tokenizer.json.xz", dir);
    if (!json) {
        free(out);
        so_test_tmp_free(dir);
        SO_SKIP("shared/tokenizers is not here");
    }
    golden_folder("gpt2", folder, sizeof folder);
    snprintf(cmd, sizeof cmd, "cp '%s/model.safetensors' '%s/config.json' '%s'", folder, folder,
             dir);
    assert_int_equal(system(cmd), 0);
    snprintf(cmd, sizeof cmd,
             "printf '{\"eos_token\":\"<|endoftext|>\",\"chat_template\":\"{{ x }}\"}' > "
             "'%s/tokenizer_config.json'",
             dir);
    assert_int_equal(system(cmd), 0);
    convert(dir, out, "F16");
    so_tokens ids[2] = {{0}, {0}};
    uint64_t hash[2];
    for (int i = 0; i < 2; i++) {
        so_err err = {0};
        so_checkpoint *ck;
        so_tokenizer *t;
        SO_OK_OR_FAIL(so_checkpoint_open(i ? out : dir, SO_CHECKPOINT_TOKENIZER, &ck, &err), err);
        SO_OK_OR_FAIL(so_tokenizer_load(ck, &t, &err), err);
        SO_OK_OR_FAIL(so_tokenizer_encode(t, so_str_c(text), 0, &ids[i], &err), err);
        hash[i] = so_tokenizer_hash(t);
        assert_true(so_str_eq_c(so_tokenizer_chat_template(t), "{{ x }}"));
        so_tokenizer_free(t);
        so_checkpoint_close(ck);
    }
    assert_int_equal(ids[0].len, ids[1].len);
    assert_true(ids[0].len > 10);
    assert_memory_equal(ids[0].ids, ids[1].ids, ids[0].len * sizeof(int32_t));
    assert_int_equal(hash[0], hash[1]);
    so_tokens_free(&ids[0]);
    so_tokens_free(&ids[1]);
    free(json);
    free(out);
    so_test_tmp_free(dir);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_model),
        cmocka_unit_test(refuses_what_would_not_run),
        cmocka_unit_test(tokenizer_travels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
