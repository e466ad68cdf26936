/* The memory budget from headers alone. */
#include "so_test.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "model/budget.h"

static void budget_of_config(const char *config, int64_t ctx, int n_seqs, so_dtype kv,
                             so_budget *b) {
    char *dir = so_test_tmp(), *path = so_path_join(dir, "config.json");
    so_err err;
    so_checkpoint *ck;
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    fputs(config, f);
    fclose(f);
    SO_OK_OR_FAIL(so_checkpoint_open(dir, SO_CHECKPOINT_CONFIG, &ck, &err), err);
    SO_OK_OR_FAIL(so_budget_of(ck, ctx, n_seqs, kv, b, &err), err);
    so_checkpoint_close(ck);
    free(path);
    so_test_tmp_free(dir);
}

#define LLAMA_3_2(d, layers, heads, head_dim)                                                \
    "{\"model_type\":\"llama\",\"architectures\":[\"LlamaForCausalLM\"],\"hidden_size\":" #d \
    ",\"intermediate_size\":8192,\"num_hidden_layers\":" #layers                             \
    ",\"num_attention_heads\":" #heads ",\"num_key_value_heads\":8,\"head_dim\":" #head_dim  \
    ",\"vocab_size\":128256,"                                                                \
    "\"max_position_embeddings\":131072,\"rms_norm_eps\":1e-05,\"rope_theta\":500000.0,"     \
    "\"rope_scaling\":{\"factor\":32.0,\"high_freq_factor\":4.0,\"low_freq_factor\":1.0,"    \
    "\"original_max_position_embeddings\":8192,\"rope_type\":\"llama3\"},"                   \
    "\"hidden_act\":\"silu\",\"tie_word_embeddings\":true,\"torch_dtype\":\"bfloat16\"}"

/* Known sizes: Llama 3.2 1B and 3B, 8 sequences of 4096 tokens. */
static void llama_1b_3b(void **state) {
    (void)state;
    so_budget b;
    budget_of_config(LLAMA_3_2(2048, 16, 32, 64), 4096, 8, SO_DTYPE_F16, &b);
    assert_int_equal(b.kv_bytes_per_token, 32768);
    assert_int_equal(b.kv_bytes_per_seq, 128 << 20);
    assert_int_equal(b.kv_bytes, 1 << 30);
    assert_true(b.estimated);
    assert_int_equal(b.n_params, 1235814400);
    assert_int_equal(b.weight_bytes, 2471628800);

    budget_of_config(LLAMA_3_2(3072, 28, 24, 128), 4096, 8, SO_DTYPE_F16, &b);
    assert_int_equal(b.kv_bytes_per_token, 114688);
    assert_int_equal(b.kv_bytes_per_seq, 448 << 20);
    assert_int_equal(b.kv_bytes, (int64_t)3584 << 20);
    assert_int_equal(b.n_params, 3212749824);
    assert_int_equal(b.weight_bytes, 6425499648);

    budget_of_config(LLAMA_3_2(3072, 28, 24, 128), 0, 1, SO_DTYPE_F32, &b);
    assert_int_equal(b.kv_bytes_per_token, 2 * 114688);
    assert_int_equal(b.ctx, 131072);
    assert_int_equal(b.n_sources, 0);
    assert_int_equal(b.source_bytes, 0);

    budget_of_config(LLAMA_3_2(3072, 28, 24, 128), 4096, 8, SO_DTYPE_Q8_0, &b);
    assert_int_equal(b.kv_bytes_per_token, 114688 / 64 * 34);
}

#define T5_SMALL                                                                  \
    "{\"model_type\":\"t5\",\"architectures\":[\"T5ForConditionalGeneration\"],"  \
    "\"d_model\":512,\"d_kv\":64,\"d_ff\":2048,\"num_layers\":6,\"num_heads\":8," \
    "\"relative_attention_num_buckets\":32,\"vocab_size\":32128,"                 \
    "\"feed_forward_proj\":\"relu\",\"torch_dtype\":\"float32\"}"

/* t5-small, as its authors count it. */
static void t5_small(void **state) {
    (void)state;
    so_budget b;
    budget_of_config(T5_SMALL, 512, 1, SO_DTYPE_F16, &b);
    assert_int_equal(b.n_params, 60506624);
    assert_int_equal(b.weight_bytes, 4 * 60506624);
    /* 6 layers of 8 · 64 keys and as many values; 1 + SO_SOURCES_SPARE texts in whole pages */
    assert_int_equal(b.kv_bytes_per_token, 2 * 6 * 512 * 2);
    assert_int_equal(b.kv_bytes, 512 * 12288);
    assert_int_equal(b.n_sources, 5);
    assert_int_equal(b.source_bytes, 5 * 512 * 12288);
    budget_of_config(T5_SMALL, 33, 3, SO_DTYPE_F32, &b);
    assert_int_equal(b.n_sources, 7);
    assert_int_equal(b.source_bytes, 7 * 64 * 2 * 12288);
}

/* The parameter count from the shape equals the count from the tensors. */
static void counts_agree(void **state) {
    (void)state;
    static const char *const names[] = {"llama",       "llama_linear_bias",
                                        "llama3_rope", "mistral_window",
                                        "qwen2",       "qwen3",
                                        "gemma3",      "gpt2",
                                        "t5_v10",      "t5_v11"};
    for (size_t i = 0; i < SO_LEN(names); i++) {
        char name[128];
        so_err err;
        so_checkpoint *ck;
        so_budget with, without;
        snprintf(name, sizeof name, "golden/models/%s", names[i]);
        SO_OK_OR_FAIL(so_checkpoint_open(so_test_data(name), SO_CHECKPOINT_ALL, &ck, &err), err);
        SO_OK_OR_FAIL(so_budget_of(ck, 0, 1, SO_DTYPE_F16, &with, &err), err);
        assert_false(with.estimated);
        char *text = json_dumps(so_checkpoint_config(ck), 0);
        budget_of_config(text, 0, 1, SO_DTYPE_F16, &without);
        free(text);
        so_checkpoint_close(ck);
        if (with.n_params != without.n_params)
            fail_msg("%s: %lld tensors' elements, %lld counted", names[i], (long long)with.n_params,
                     (long long)without.n_params);
    }
}

static void of_gguf(void **state) {
    (void)state;
    const char *path = so_test_model("smollm2");
    if (!path)
        SO_SKIP("smollm2 is not pulled");
    so_err err;
    so_checkpoint *ck;
    so_budget b;
    SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_CONFIG, &ck, &err), err);
    SO_OK_OR_FAIL(so_budget_of(ck, 1000, 3, SO_DTYPE_F16, &b, &err), err);
    assert_int_equal(b.kv_bytes_per_token, 2 * 30 * 3 * 64 * 2);
    assert_int_equal(b.kv_bytes, 3000 * 23040);
    assert_int_equal(b.weight_bytes, 96576768);
    assert_int_equal(so_budget_of(ck, INT64_MAX, 1, SO_DTYPE_F16, &b, &err), SO_ERANGE);
    so_checkpoint_close(ck);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(llama_1b_3b),
        cmocka_unit_test(t5_small),
        cmocka_unit_test(counts_agree),
        cmocka_unit_test(of_gguf),
    };
    return cmocka_run_group_tests_name("budget", tests, NULL, NULL);
}
