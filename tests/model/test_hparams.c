/* The shape of a model from config.json and from GGUF metadata: the values read, the defaults for
 * omitted keys, and the refused files with their messages. */
#include "so_test.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "model/hparams.h"

static const char LLAMA[] =
    "{'model_type':'llama','vocab_size':1000,'hidden_size':64,'intermediate_size':128,"
    "'num_hidden_layers':4,'num_attention_heads':4,'num_key_value_heads':2,"
    "'max_position_embeddings':4096,'rms_norm_eps':1e-5,'rope_theta':500000.0,"
    "'tie_word_embeddings':false,'hidden_act':'silu'}";
static const char GEMMA[] =
    "{'model_type':'gemma3_text','vocab_size':1000,'hidden_size':64,'intermediate_size':128,"
    "'num_hidden_layers':7,'num_attention_heads':4,'num_key_value_heads':1,'head_dim':16,"
    "'sliding_window':512}";
static const char GPT2[] = "{'model_type':'gpt2','vocab_size':1000,'n_embd':64,'n_layer':3,"
                           "'n_head':4,'n_positions':128}";

/* JSON with single quotes, for readability. */
static json_t *parse(const char *text) {
    char *copy = so_strdup(text);
    for (char *c = copy; *c; c++)
        *c = *c == '\'' ? '"' : *c;
    json_error_t e;
    json_t *j = json_loads(copy, 0, &e);
    if (!j)
        fail_msg("%s: %s", copy, e.text);
    free(copy);
    return j;
}

static int read_json(const char *base, const char *patch, so_hparams *hp, so_err *err) {
    json_t *config = parse(base), *p = parse(patch);
    json_object_update(config, p);
    *err = (so_err){0};
    int rc = so_hparams_from_json(config, "m/config.json", hp, err);
    json_decref(config);
    json_decref(p);
    return rc;
}

static void reads_llama(void **state) {
    (void)state;
    so_hparams hp;
    so_err err;
    SO_OK_OR_FAIL(read_json(LLAMA, "{}", &hp, &err), err);
    assert_int_equal(hp.arch, SO_ARCH_LLAMA);
    assert_int_equal(hp.n_layers, 4);
    assert_int_equal(hp.head_dim, 16);
    assert_int_equal(hp.n_heads_kv, 2);
    assert_int_equal(hp.rope_dim, 16);
    assert_true(hp.rope_halves);
    assert_false(hp.tied);
    assert_false(hp.bias_qkv || hp.bias_out || hp.bias_mlp || hp.qk_norm);
    assert_float_equal(hp.attn_scale, 0.25, 0);
    assert_float_equal(hp.embed_scale, 1, 0);
    assert_float_equal(hp.rope_base, 500000, 0);
    assert_int_equal(hp.window, 0);
    assert_int_equal(so_hparams_kv_bytes_per_token(&hp, SO_DTYPE_F16), 2 * 4 * 2 * 16 * 2);

    SO_OK_OR_FAIL(read_json(LLAMA, "{'head_dim':32,'attention_bias':true}", &hp, &err), err);
    assert_int_equal(hp.head_dim, 32);
    assert_true(hp.bias_qkv && hp.bias_out && !hp.bias_mlp);
    SO_OK_OR_FAIL(read_json(LLAMA, "{'num_key_value_heads':null}", &hp, &err), err);
    assert_int_equal(hp.n_heads_kv, 4);
    SO_OK_OR_FAIL(
        read_json(LLAMA, "{'model_type':null,'architectures':['Qwen2ForCausalLM']}", &hp, &err),
        err);
    assert_int_equal(hp.arch, SO_ARCH_QWEN2);
    assert_true(hp.bias_qkv && !hp.bias_out);
}

static void reads_rope_in_both_forms(void **state) {
    (void)state;
    so_hparams hp;
    so_err err;
    SO_OK_OR_FAIL(read_json(LLAMA,
                            "{'rope_scaling':{'rope_type':'llama3','factor':8.0,"
                            "'low_freq_factor':1.0,'high_freq_factor':4.0,"
                            "'original_max_position_embeddings':1024}}",
                            &hp, &err),
                  err);
    assert_int_equal(hp.rope_scaling, SO_ROPE_SCALING_LLAMA3);
    assert_int_equal(hp.rope_ctx_orig, 1024);
    assert_float_equal(hp.rope_high, 4, 0);
    SO_OK_OR_FAIL(read_json(LLAMA, "{'rope_scaling':{'type':'linear','factor':4}}", &hp, &err),
                  err);
    assert_int_equal(hp.rope_scaling, SO_ROPE_SCALING_LINEAR);
    assert_float_equal(hp.rope_factor, 4, 0);
    SO_OK_OR_FAIL(read_json(LLAMA,
                            "{'rope_theta':null,'rope_parameters':{'rope_type':'yarn','factor':4.0,"
                            "'rope_theta':12345.0,'original_max_position_embeddings':1024}}",
                            &hp, &err),
                  err);
    assert_int_equal(hp.rope_scaling, SO_ROPE_SCALING_YARN);
    assert_float_equal(hp.rope_base, 12345, 0);
    assert_float_equal(hp.rope_attn_factor, (float)(0.1 * log(4) + 1), 1e-6);
    assert_float_equal(hp.rope_beta_fast, 32, 0);
    SO_OK_OR_FAIL(read_json(LLAMA, "{'rope_scaling':null}", &hp, &err), err);
    assert_int_equal(hp.rope_scaling, SO_ROPE_SCALING_NONE);
}

static void reads_windows(void **state) {
    (void)state;
    so_hparams hp;
    so_err err;
    SO_OK_OR_FAIL(read_json(LLAMA, "{'model_type':'mistral','sliding_window':4096}", &hp, &err),
                  err);
    assert_int_equal(hp.window, 4096);
    assert_true(so_hparams_layer_local(&hp, 0) && so_hparams_layer_local(&hp, 3));
    SO_OK_OR_FAIL(read_json(LLAMA, "{'model_type':'qwen2','sliding_window':4096}", &hp, &err), err);
    assert_int_equal(hp.window, 0);
    SO_OK_OR_FAIL(read_json(LLAMA,
                            "{'model_type':'qwen2','sliding_window':4096,'use_sliding_window':true,"
                            "'max_window_layers':4}",
                            &hp, &err),
                  err);
    assert_int_equal(hp.window, 0);
    SO_OK_OR_FAIL(read_json(GEMMA, "{}", &hp, &err), err);
    assert_int_equal(hp.window, 512);
    assert_true(so_hparams_layer_local(&hp, 4) && !so_hparams_layer_local(&hp, 5) &&
                so_hparams_layer_local(&hp, 6));
    SO_OK_OR_FAIL(read_json(GEMMA,
                            "{'num_hidden_layers':2,'layer_types':["
                            "'sliding_attention','full_attention']}",
                            &hp, &err),
                  err);
    assert_int_equal(hp.window_pattern, 2);
    SO_OK_OR_FAIL(read_json(GEMMA,
                            "{'num_hidden_layers':2,'layer_types':["
                            "'full_attention','full_attention']}",
                            &hp, &err),
                  err);
    assert_int_equal(hp.window, 0);
}

static void reads_gemma_and_gpt2(void **state) {
    (void)state;
    so_hparams hp;
    so_err err;
    SO_OK_OR_FAIL(read_json(GEMMA, "{'query_pre_attn_scalar':100}", &hp, &err), err);
    assert_float_equal(hp.attn_scale, 0.1, 1e-7);
    assert_float_equal(hp.embed_scale, 8, 0);
    assert_float_equal(hp.rope_base, 1e6, 0);
    assert_float_equal(hp.rope_base_local, 1e4, 0);
    assert_true(hp.tied && hp.qk_norm);
    /* a multimodal folder states only differences from the class defaults, in text_config */
    json_t *config = parse("{'model_type':'gemma3','vision_config':{},'text_config':{"
                           "'model_type':'gemma3_text','hidden_size':2560,"
                           "'intermediate_size':10240,'num_hidden_layers':34,"
                           "'rope_scaling':{'factor':8.0,'rope_type':'linear'},"
                           "'sliding_window':1024}}");
    SO_OK_OR_FAIL(so_hparams_from_json(config, "x", &hp, &err), err);
    json_decref(config);
    assert_int_equal(hp.n_heads, 8);
    assert_int_equal(hp.head_dim, 256);
    assert_int_equal(hp.n_vocab, 262208);
    assert_int_equal(hp.rope_scaling, SO_ROPE_SCALING_LINEAR);
    SO_OK_OR_FAIL(read_json(GPT2, "{}", &hp, &err), err);
    assert_int_equal(hp.d_ff, 256);
    assert_int_equal(hp.rope_dim, 0);
    assert_true(hp.tied && hp.bias_qkv && hp.bias_out && hp.bias_mlp);
}

/* base, patch, code, part of the message */
typedef struct refusal {
    const char *base, *patch;
    int code;
    const char *message;
} refusal;

static void refuses_json(void **state) {
    (void)state;
    static const refusal list[] = {
        {LLAMA, "{'model_type':'falcon'}", SO_EUNSUPPORTED, "'falcon' (model_type)"},
        {LLAMA, "{'model_type':'falcon'}", SO_EUNSUPPORTED,
         "supported are llama, mistral, qwen2, qwen3, gemma3, gpt2"},
        {LLAMA, "{'model_type':null,'architectures':['X']}", SO_EUNSUPPORTED, "(architectures)"},
        {LLAMA, "{'model_type':null}", SO_EFORMAT, "model_type is missing"},
        {LLAMA, "{'model_type':7}", SO_EFORMAT, "model_type is not a string"},
        {LLAMA, "{'num_attention_heads':0}", SO_ERANGE, "num_attention_heads is 0; 1 to 1024"},
        {LLAMA, "{'num_attention_heads':-1}", SO_ERANGE, "is -1"},
        {LLAMA, "{'num_key_value_heads':3}", SO_EFORMAT, "4 attention heads cannot share 3"},
        {LLAMA, "{'num_key_value_heads':8}", SO_ERANGE, "num_key_value_heads is 8; 1 to 4"},
        {LLAMA, "{'hidden_size':66}", SO_EFORMAT, "hidden_size 66 is not a multiple"},
        {LLAMA, "{'num_hidden_layers':2147483648}", SO_ERANGE, "num_hidden_layers is 2147483648"},
        {LLAMA, "{'vocab_size':1000000000000}", SO_ERANGE, "vocab_size is 1000000000000"},
        {LLAMA, "{'vocab_size':'many'}", SO_EFORMAT, "vocab_size is a string"},
        {LLAMA, "{'vocab_size':10.5}", SO_EFORMAT, "a whole number is expected"},
        {LLAMA, "{'vocab_size':null}", SO_EFORMAT, "vocab_size is missing"},
        {LLAMA, "{'head_dim':15}", SO_EFORMAT, "head size 15 is odd"},
        {LLAMA, "{'head_dim':4096}", SO_ERANGE, "head_dim is 4096"},
        {LLAMA, "{'rms_norm_eps':0}", SO_ERANGE, "rms_norm_eps is 0"},
        {LLAMA, "{'rope_theta':0.5}", SO_ERANGE, "rope_theta is 0.5"},
        {LLAMA, "{'rope_scaling':[]}", SO_EFORMAT, "rope_scaling is not an object"},
        {LLAMA, "{'rope_scaling':{'type':'dynamic','factor':2}}", SO_EUNSUPPORTED,
         "rope_type 'dynamic' is not supported"},
        {LLAMA, "{'rope_scaling':{'type':'linear'}}", SO_EFORMAT, "rope_scaling.factor is missing"},
        {LLAMA,
         "{'rope_scaling':{'type':'llama3','factor':2,'low_freq_factor':4,"
         "'high_freq_factor':4}}",
         SO_EFORMAT, "high_freq_factor 4 must be above"},
        {LLAMA, "{'rope_scaling':{'type':'yarn','factor':2,'truncate':false}}", SO_EUNSUPPORTED,
         "truncate"},
        {LLAMA, "{'rope_parameters':{'full_attention':{}}}", SO_EUNSUPPORTED,
         "rope_parameters per kind of layer"},
        {LLAMA, "{'partial_rotary_factor':0.5}", SO_EUNSUPPORTED, "partial rotary"},
        {LLAMA, "{'rope_parameters':{'rope_theta':1e4,'partial_rotary_factor':0.5}}",
         SO_EUNSUPPORTED, "partial rotary"},
        {LLAMA, "{'hidden_act':'relu'}", SO_EUNSUPPORTED, "hidden_act 'relu'"},
        {LLAMA, "{'num_local_experts':8}", SO_EUNSUPPORTED, "num_local_experts is 8: a mixture"},
        {LLAMA, "{'quantization_config':{'quant_method':'gptq'}}", SO_EUNSUPPORTED,
         "quantization_config"},
        {LLAMA, "{'tie_word_embeddings':1}", SO_EFORMAT,
         "tie_word_embeddings is not true or false"},
        {LLAMA, "{'text_config':5}", SO_EFORMAT, "text_config is not an object"},
        {LLAMA,
         "{'model_type':'qwen3','head_dim':16,'use_sliding_window':true,"
         "'sliding_window':8,'max_window_layers':2}",
         SO_EUNSUPPORTED, "breaks the pattern"},
        {GEMMA, "{'attn_logit_softcapping':50.0}", SO_EUNSUPPORTED,
         "attn_logit_softcapping is 50: capping of attention scores"},
        {GEMMA, "{'final_logit_softcapping':30.0}", SO_EUNSUPPORTED, "capping of logits"},
        {GEMMA, "{'use_bidirectional_attention':true}", SO_EUNSUPPORTED, "later tokens"},
        {GEMMA, "{'layer_types':['full_attention']}", SO_EFORMAT, "a list of 7 entries"},
        {GEMMA, "{'num_hidden_layers':1,'layer_types':['chunked_attention']}", SO_EUNSUPPORTED,
         "layer_types[0] is 'chunked_attention'"},
        {GEMMA,
         "{'num_hidden_layers':4,'layer_types':['sliding_attention','full_attention',"
         "'full_attention','sliding_attention']}",
         SO_EUNSUPPORTED, "layer 2 breaks the pattern"},
        {GEMMA, "{'hidden_activation':'gelu'}", SO_EUNSUPPORTED, "hidden_activation 'gelu'"},
        {GPT2, "{'n_head':5}", SO_EFORMAT, "n_embd 64 is not a multiple of n_head 5"},
        {GPT2, "{'activation_function':'relu'}", SO_EUNSUPPORTED, "activation_function 'relu'"},
        {GPT2, "{'scale_attn_weights':false}", SO_EUNSUPPORTED, "scale_attn_weights is false"},
        {GPT2, "{'scale_attn_by_inverse_layer_idx':true}", SO_EUNSUPPORTED, "layer's number"},
        {GPT2, "{'add_cross_attention':true}", SO_EUNSUPPORTED, "cross attention"},
    };
    for (size_t i = 0; i < SO_LEN(list); i++) {
        so_hparams hp;
        so_err err;
        int rc = read_json(list[i].base, list[i].patch, &hp, &err);
        if (rc != list[i].code || !strstr(err.msg, list[i].message) ||
            strncmp(err.msg, "m/config.json: ", 15) != 0)
            fail_msg("%s: %d '%s', and not %d '%s'", list[i].patch, rc, err.msg, list[i].code,
                     list[i].message);
        assert_int_equal(so_hparams_from_json(NULL, "x", &hp, NULL), SO_EFORMAT);
    }
}

/* GGUF. A key that is set twice keeps the last value, so a case is a change of the valid file. */

typedef void patch_fn(so_gguf_writer *w);

static void good_gguf(so_gguf_writer *w, const char *arch) {
    char key[64];
    const struct {
        const char *key;
        uint32_t v;
    } numbers[] = {{"block_count", 4},          {"context_length", 4096},
                   {"embedding_length", 64},    {"feed_forward_length", 128},
                   {"attention.head_count", 4}, {"attention.head_count_kv", 2},
                   {"vocab_size", 1000}};
    so_gguf_writer_str(w, "general.architecture", so_str_c(arch));
    for (size_t i = 0; i < SO_LEN(numbers); i++) {
        snprintf(key, sizeof key, "%s.%s", arch, numbers[i].key);
        so_gguf_writer_u32(w, key, numbers[i].v);
    }
    snprintf(key, sizeof key, "%s.attention.layer_norm%s_epsilon", arch,
             strcmp(arch, "gpt2") ? "_rms" : "");
    so_gguf_writer_f32(w, key, 1e-5f);
}

static int read_gguf(const char *arch, patch_fn *patch, so_hparams *hp, so_err *err) {
    char *dir = so_test_tmp(), *path = so_path_join(dir, "m.gguf");
    so_gguf_writer *w = so_gguf_writer_create();
    so_gguf *g;
    *err = (so_err){0};
    good_gguf(w, arch);
    if (patch)
        patch(w);
    SO_OK_OR_FAIL(so_gguf_writer_begin(w, path, err), *err);
    SO_OK_OR_FAIL(so_gguf_writer_commit(w, err), *err);
    so_gguf_writer_free(w);
    SO_OK_OR_FAIL(so_gguf_open(path, &g, err), *err);
    int rc = so_hparams_from_gguf(g, hp, err);
    so_gguf_close(g);
    free(path);
    so_test_tmp_free(dir);
    return rc;
}

static void p_heads(so_gguf_writer *w) { so_gguf_writer_u32(w, "llama.attention.head_count", 0); }
static void p_kv_list(so_gguf_writer *w) {
    so_gguf_writer_i32s(w, "llama.attention.head_count_kv", (int32_t[]){2, 2, 1, 2}, 4);
}
static void p_kv_same(so_gguf_writer *w) {
    so_gguf_writer_i32s(w, "llama.attention.head_count_kv", (int32_t[]){2, 2, 2, 2}, 4);
}
static void p_layers(so_gguf_writer *w) { so_gguf_writer_u32(w, "llama.block_count", 1u << 31); }
static void p_string(so_gguf_writer *w) {
    so_gguf_writer_str(w, "llama.block_count", SO_STR("four"));
}
static void p_rope(so_gguf_writer *w) { so_gguf_writer_u32(w, "llama.rope.dimension_count", 8); }
static void p_value(so_gguf_writer *w) {
    so_gguf_writer_u32(w, "llama.attention.value_length", 32);
}
static void p_experts(so_gguf_writer *w) { so_gguf_writer_u32(w, "llama.expert_count", 8); }
static void p_scaling(so_gguf_writer *w) {
    so_gguf_writer_str(w, "llama.rope.scaling.type", SO_STR("longrope"));
    so_gguf_writer_f32(w, "llama.rope.scaling.factor", 4);
}
static void p_yarn(so_gguf_writer *w) {
    so_gguf_writer_str(w, "llama.rope.scaling.type", SO_STR("yarn"));
    so_gguf_writer_f32(w, "llama.rope.scaling.factor", 4);
    so_gguf_writer_u32(w, "llama.rope.scaling.original_context_length", 1024);
}
static void p_causal(so_gguf_writer *w) { so_gguf_writer_bool(w, "llama.attention.causal", false); }
static void p_softcap(so_gguf_writer *w) {
    so_gguf_writer_f32(w, "gemma3.final_logit_softcapping", 30);
}
static void p_gemma(so_gguf_writer *w) {
    so_gguf_writer_u32(w, "gemma3.attention.sliding_window", 512);
    so_gguf_writer_u32(w, "gemma3.attention.key_length", 32);
    so_gguf_writer_u32(w, "gemma3.attention.value_length", 32);
}
static void p_gemma_list(so_gguf_writer *w) {
    so_gguf_writer_u32(w, "gemma3.attention.sliding_window", 512);
    so_gguf_writer_i32s(w, "gemma3.attention.sliding_window_pattern", (int32_t[]){1, 0, 1, 0}, 4);
}
static void p_falcon(so_gguf_writer *w) {
    so_gguf_writer_str(w, "general.architecture", SO_STR("falcon"));
}

static void reads_gguf(void **state) {
    (void)state;
    so_hparams hp;
    so_err err;
    SO_OK_OR_FAIL(read_gguf("llama", NULL, &hp, &err), err);
    assert_int_equal(hp.n_vocab, 1000);
    assert_int_equal(hp.head_dim, 16);
    assert_false(hp.rope_halves);
    assert_float_equal(hp.rope_base, 1e4, 0);
    SO_OK_OR_FAIL(read_gguf("llama", p_kv_same, &hp, &err), err);
    assert_int_equal(hp.n_heads_kv, 2);
    SO_OK_OR_FAIL(read_gguf("llama", p_yarn, &hp, &err), err);
    assert_int_equal(hp.rope_scaling, SO_ROPE_SCALING_YARN);
    assert_int_equal(hp.rope_ctx_orig, 1024);
    assert_float_equal(hp.rope_attn_factor, (float)(0.1 * log(4) + 1), 1e-6);
    SO_OK_OR_FAIL(read_gguf("qwen2", NULL, &hp, &err), err);
    assert_true(hp.rope_halves && hp.bias_qkv);
    SO_OK_OR_FAIL(read_gguf("gemma3", p_gemma, &hp, &err), err);
    assert_int_equal(hp.window, 512);
    assert_int_equal(hp.window_pattern, 6);
    assert_int_equal(hp.head_dim, 32);
    assert_float_equal(hp.rope_base_local, 1e4, 0);
    SO_OK_OR_FAIL(read_gguf("gemma3", p_gemma_list, &hp, &err), err);
    assert_int_equal(hp.window_pattern, 2);
    SO_OK_OR_FAIL(read_gguf("gpt2", NULL, &hp, &err), err);
    assert_int_equal(hp.rope_dim, 0);
}

static void refuses_gguf(void **state) {
    (void)state;
    static const struct {
        const char *arch;
        patch_fn *patch;
        int code;
        const char *message;
    } list[] = {
        {"llama", p_falcon, SO_EUNSUPPORTED, "'falcon' (general.architecture) is not supported"},
        {"llama", p_heads, SO_ERANGE, "llama.attention.head_count is 0; 1 to 1024"},
        {"llama", p_kv_list, SO_EUNSUPPORTED, "head_count_kv differs between layers (2 and 1)"},
        {"llama", p_layers, SO_ERANGE, "llama.block_count is 2147483648"},
        {"llama", p_string, SO_EFORMAT, "llama.block_count is"},
        {"llama", p_rope, SO_EUNSUPPORTED, "8 of 16 dimensions"},
        {"llama", p_value, SO_EUNSUPPORTED, "value_length 32 differs"},
        {"llama", p_experts, SO_EUNSUPPORTED, "llama.expert_count is 8: a mixture of experts"},
        {"llama", p_scaling, SO_EUNSUPPORTED, "rope.scaling.type 'longrope'"},
        {"llama", p_causal, SO_EUNSUPPORTED, "attention.causal is false"},
        {"gemma3", p_softcap, SO_EUNSUPPORTED, "final_logit_softcapping is 30"},
    };
    for (size_t i = 0; i < SO_LEN(list); i++) {
        so_hparams hp;
        so_err err;
        int rc = read_gguf(list[i].arch, list[i].patch, &hp, &err);
        if (rc != list[i].code || !strstr(err.msg, list[i].message) || !strstr(err.msg, "m.gguf: "))
            fail_msg("case %zu: %d '%s', and not %d '%s'", i, rc, err.msg, list[i].code,
                     list[i].message);
    }
}

/* Shapes of installed models, as their model cards state them. */
static void reads_real_files(void **state) {
    (void)state;
    static const struct {
        const char *name;
        so_arch arch;
        int n_layers, d_model, n_heads, n_heads_kv, head_dim, d_ff, n_vocab, window;
    } list[] = {
        {"smollm2", SO_ARCH_LLAMA, 30, 576, 9, 3, 64, 1536, 49152, 0},
        {"qwen2.5-coder-1.5b", SO_ARCH_QWEN2, 28, 1536, 12, 2, 128, 8960, 151936, 0},
        {"gemma3-270m", SO_ARCH_GEMMA3, 18, 640, 4, 1, 256, 2048, 262144, 512},
    };
    int n_found = 0;
    for (size_t i = 0; i < SO_LEN(list); i++) {
        const char *path = so_test_model(list[i].name);
        so_checkpoint *ck;
        so_hparams hp;
        so_err err = {0};
        if (!path)
            continue;
        n_found++;
        SO_OK_OR_FAIL(so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, &err), err);
        SO_OK_OR_FAIL(so_hparams_read(ck, &hp, &err), err);
        so_checkpoint_close(ck);
        assert_int_equal(hp.arch, list[i].arch);
        assert_int_equal(hp.n_layers, list[i].n_layers);
        assert_int_equal(hp.d_model, list[i].d_model);
        assert_int_equal(hp.n_heads, list[i].n_heads);
        assert_int_equal(hp.n_heads_kv, list[i].n_heads_kv);
        assert_int_equal(hp.head_dim, list[i].head_dim);
        assert_int_equal(hp.d_ff, list[i].d_ff);
        assert_int_equal(hp.n_vocab, list[i].n_vocab);
        assert_int_equal(hp.window, list[i].window);
    }
    if (n_found == 0)
        SO_SKIP("no pulled model is here (sooth pull smollm2)");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reads_llama),   cmocka_unit_test(reads_rope_in_both_forms),
        cmocka_unit_test(reads_windows), cmocka_unit_test(reads_gemma_and_gpt2),
        cmocka_unit_test(refuses_json),  cmocka_unit_test(reads_gguf),
        cmocka_unit_test(refuses_gguf),  cmocka_unit_test(reads_real_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
