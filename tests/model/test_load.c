/* Loading: the refused files with their messages, rounding at load, and that a failed load leaks
 * nothing (checked by the sanitizers). */
#include "so_test.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "model/weights.h"
#include "so_rig.h"
#include "so_shape.h"

static const so_shape GOOD = {SO_SHAPE_SMALL, .n_layers = 2, .n_vocab = 67, .n_ctx = 512,
                              .seed = 9};

static int load(const char *path, const so_model_opts *opts, so_err *err) {
    so_checkpoint *ck = NULL;
    so_backend *b;
    so_model *m = NULL;
    *err = (so_err){0};
    SO_OK_OR_FAIL(
        so_backend_open("cpu", &(so_backend_opts){.n_threads = 1, .level = SO_CPU_AUTO}, &b, err),
        *err);
    int rc = so_checkpoint_open(path, SO_CHECKPOINT_ALL, &ck, err);
    if (rc == 0)
        rc = so_model_load(ck, b, opts, &m, err);
    assert_true((rc == 0) == (m != NULL));
    so_model_free(m);
    so_backend_free(b);
    so_checkpoint_close(ck);
    return rc;
}

static int load_shape(const so_shape *s, const so_model_opts *opts, so_err *err) {
    char *dir = so_test_tmp(), *path = so_shape_write(dir, s);
    int rc = load(path, opts, err);
    free(path);
    so_test_tmp_free(dir);
    return rc;
}

static void expect(int rc, const so_err *err, int code, const char *message) {
    if (rc != code || !strstr(err->msg, message))
        fail_msg("%d '%s', and not %d '%s'", rc, err->msg, code, message);
}

static void refuses_tensors(void **state) {
    (void)state;
    so_err err;
    so_shape s = GOOD;
    SO_OK_OR_FAIL(load_shape(&s, NULL, &err), err);
    s.drop = "blk.1.ffn_up.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_ENOTFOUND, "tensor blk.1.ffn_up.weight is missing");
    s = GOOD, s.drop = "token_embd.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_ENOTFOUND, "tensor token_embd.weight is missing");
    s = GOOD, s.shorten = "blk.0.attn_k.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_EFORMAT,
           "tensor blk.0.attn_k.weight has shape [31, 16]; [32, 16] is expected");
    s = GOOD, s.shorten = "blk.1.attn_norm.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_EFORMAT, "has shape [31]; [32] is expected");
    s = GOOD, s.shorten = "token_embd.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_EFORMAT, "[31, 67]; [32, 67] is expected");
    s = GOOD, s.extra = "blk.0.attn_q_norm.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_EUNSUPPORTED,
           "tensor blk.0.attn_q_norm.weight is not part of architecture 'llama'");
    s = GOOD, s.extra = "rope_freqs.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_EFORMAT, "rope_freqs.weight has shape [1]; [8]");
}

static void refuses_infinity(void **state) {
    (void)state;
    so_err err;
    so_shape s = GOOD;
    so_model_opts round = {.quantize = true, .dtype = SO_DTYPE_Q8_0};
    s.sicken = "blk.1.ffn_norm.weight";
    expect(load_shape(&s, NULL, &err), &err, SO_EFORMAT,
           "tensor blk.1.ffn_norm.weight holds NaN or infinity at element 31");
    s.sicken = "blk.1.ffn_gate.weight"; /* matrices are not read at load, but rounding reads them */
    SO_OK_OR_FAIL(load_shape(&s, NULL, &err), err);
    expect(load_shape(&s, &round, &err), &err, SO_EFORMAT, "at row 47, column 31");
    assert_non_null(strstr(err.msg, "shape.gguf: tensor blk.1.ffn_gate.weight"));
}

/* The row of a model with an infinite weight, for each kind of result. Hidden states come before
 * the output matrix and may be finite. */
static void expect_sick_row(const char *sicken, bool hidden) {
    so_shape s = GOOD;
    s.sicken = sicken;
    so_rig r;
    so_err err = {0};
    so_shape_open(&r, &s, &(so_rig_opts){.level = SO_CPU_AUTO});
    so_seq *q = so_seq_create(r.kv);
    so_row row = {3, 0, 0, -1, .want_logits = true};
    so_batch batch = {&row, 1, &q, 1};
    SO_OK_OR_FAIL(so_seq_begin(q, 1, &err), err);
    const unsigned wants[] = {SO_PASS_LOGITS, SO_PASS_ARGMAX, SO_PASS_LOGITS | SO_PASS_ARGMAX,
                              SO_PASS_HIDDEN};
    for (int i = 0; i < 3 + hidden; i++) {
        SO_OK_OR_FAIL(so_pass_run(r.p, &batch, wants[i], &err), err);
        expect(so_pass_check(r.p, 0, &err), &err, SO_EFORMAT,
               "logits are not finite; the weights of");
        assert_non_null(strstr(err.msg, "shape.gguf"));
        assert_int_equal(so_pass_check_all(r.p, NULL), SO_EFORMAT);
    }
    so_seq_free(q);
    so_rig_close(&r);
}

/* An infinite weight in a matrix appears in the first logits. */
static void infinite_weights_show_in_logits(void **state) {
    (void)state;
    expect_sick_row("blk.1.ffn_down.weight", true);
    expect_sick_row("output.weight", false);
}

/* Folders: a golden model with its config changed. */
static int load_folder(const char *golden, const char *patch, so_err *err) {
    char sub[128], src[4096], *dir = so_test_tmp(), *to;
    json_error_t je;
    snprintf(sub, sizeof sub, "golden/models/%s/config.json", golden);
    json_t *config = json_load_file(so_test_data(sub), 0, &je), *p = json_loads(patch, 0, &je);
    assert_non_null(config);
    assert_non_null(p);
    json_object_update(config, p);
    to = so_path_join(dir, "config.json");
    assert_int_equal(json_dump_file(config, to, 0), 0);
    free(to);
    snprintf(sub, sizeof sub, "golden/models/%s/model.safetensors", golden);
    char *real = realpath(so_test_data(sub), NULL);
    snprintf(src, sizeof src, "%s", real);
    free(real);
    to = so_path_join(dir, "model.safetensors");
    assert_int_equal(symlink(src, to), 0);
    free(to);
    int rc = load(dir, NULL, err);
    json_decref(config);
    json_decref(p);
    so_test_tmp_free(dir);
    return rc;
}

static void refuses_folders(void **state) {
    (void)state;
    so_err err;
    SO_OK_OR_FAIL(load_folder("llama", "{}", &err), err);
    expect(load_folder("llama", "{\"num_hidden_layers\":3}", &err), &err, SO_ENOTFOUND,
           "tensor model.layers.2.input_layernorm.weight is missing");
    expect(load_folder("llama", "{\"num_hidden_layers\":1}", &err), &err, SO_EUNSUPPORTED,
           "tensor model.layers.1.");
    expect(load_folder("llama", "{\"intermediate_size\":81}", &err), &err, SO_EFORMAT,
           "mlp.gate_proj.weight has shape [80, 48]; [81, 48] is expected");
    expect(load_folder("llama", "{\"attention_bias\":true}", &err), &err, SO_ENOTFOUND,
           "self_attn.q_proj.bias is missing");
    expect(load_folder("llama_linear_bias", "{\"attention_bias\":false}", &err), &err,
           SO_EUNSUPPORTED, "self_attn.");
    expect(load_folder("qwen3", "{\"model_type\":\"llama\"}", &err), &err, SO_EUNSUPPORTED,
           "_norm");
    expect(load_folder("llama", "{\"model_type\":\"qwen2\"}", &err), &err, SO_ENOTFOUND,
           "q_proj.bias is missing");
    expect(load_folder("gpt2", "{\"n_positions\":64}", &err), &err, SO_EFORMAT,
           "wpe.weight has shape [128, 48]; [64, 48]");
    /* an lm_head beside tied embeddings is a copy; a missing lm_head without tying is an error */
    SO_OK_OR_FAIL(load_folder("llama", "{\"tie_word_embeddings\":true}", &err), err);
    expect(load_folder("qwen2", "{\"tie_word_embeddings\":false}", &err), &err, SO_ENOTFOUND,
           "lm_head.weight is missing");
}

/* Rounding. */

static void fits_rows(void **state) {
    (void)state;
    assert_int_equal(so_weights_fit(SO_DTYPE_Q4_K, 512), SO_DTYPE_Q4_K);
    assert_int_equal(so_weights_fit(SO_DTYPE_Q4_K, 576), SO_DTYPE_Q8_0);
    assert_int_equal(so_weights_fit(SO_DTYPE_Q4_0, 576), SO_DTYPE_Q4_0);
    assert_int_equal(so_weights_fit(SO_DTYPE_Q4_0, 36), SO_DTYPE_F16);
    assert_int_equal(so_weights_fit(SO_DTYPE_F32, 7), SO_DTYPE_F32);
}

static void first_token_logits(const char *path, const so_model_opts *mo, float *out) {
    so_rig r;
    so_rig_open(&r, path, &(so_rig_opts){.level = SO_CPU_AUTO, .model = *mo});
    so_seq *s = so_seq_create(r.kv);
    int32_t token = 7;
    so_rig_chain(&r, s, &token, 1, out);
    so_seq_free(s);
    so_rig_close(&r);
}

static void note(void *user, double done) {
    double *last = user;
    assert_true(done >= *last && done <= 1);
    *last = done;
}

static void rounds_at_load(void **state) {
    (void)state;
    char *dir = so_test_tmp(), *path = so_shape_write(dir, &GOOD);
    float plain[67], f32[67], k[67], q8[67];
    double progress = 0;
    first_token_logits(path, &(so_model_opts){.progress = note, .user = &progress}, plain);
    assert_true(progress == 1);
    first_token_logits(path, &(so_model_opts){.quantize = true, .dtype = SO_DTYPE_F32}, f32);
    first_token_logits(path, &(so_model_opts){.quantize = true, .dtype = SO_DTYPE_Q8_0}, q8);
    first_token_logits(path, &(so_model_opts){.quantize = true, .dtype = SO_DTYPE_Q6_K}, k);
    assert_memory_equal(plain, f32, sizeof plain);
    assert_memory_not_equal(plain, q8, sizeof plain);
    assert_memory_equal(q8, k, sizeof q8); /* rows of 32 and 48: Q6_K falls back like Q8_0 */
    for (int i = 0; i < 67; i++)
        assert_float_equal(plain[i], q8[i], 0.3);
    free(path);
    so_test_tmp_free(dir);
}

/* Packed or in the file's layout: the same logits for every dtype that can be packed. */
static void packing_changes_nothing(void **state) {
    (void)state;
    static const so_dtype types[] = {SO_DTYPE_Q4_0, SO_DTYPE_Q4_1, SO_DTYPE_Q5_0, SO_DTYPE_Q5_1,
                                     SO_DTYPE_Q8_0, SO_DTYPE_Q2_K, SO_DTYPE_Q3_K, SO_DTYPE_Q4_K,
                                     SO_DTYPE_Q5_K, SO_DTYPE_Q6_K};
    so_shape wide = GOOD;
    wide.d_model = 256, wide.d_ff = 512, wide.n_heads = 16;
    char *dir = so_test_tmp(), *path = so_shape_write(dir, &wide);
    for (size_t i = 0; i < SO_LEN(types); i++) {
        float packed[67], borrowed[67];
        so_model_opts o = {.quantize = true, .dtype = types[i]};
        first_token_logits(path, &o, packed);
        o.no_pack = true;
        first_token_logits(path, &o, borrowed);
        assert_memory_equal(packed, borrowed, sizeof packed);
    }
    free(path);
    so_test_tmp_free(dir);
}

/* Too little address space for packed copies: the model still loads. */
static void loads_without_room_to_pack(void **state) {
    (void)state;
    const char *path = so_test_model("smollm2");
    if (SO_SANITIZED)
        SO_SKIP("a sanitizer needs address space of its own");
    if (so_test_on_gpu())
        SO_SKIP("the driver of a GPU needs more address space");
    if (!path)
        SO_SKIP("no pulled model is here (sooth pull smollm2)");
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        so_err err;
        struct rlimit tight = {260 << 20, 260 << 20}; /* the file takes 145 MB of this */
        so_log_set_level(SO_LOG_ERROR);
        _exit(setrlimit(RLIMIT_AS, &tight) == 0 && load(path, NULL, &err) == 0 ? 0 : 1);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* Installed models: wrong norms, rope or scales, or a mix-up of permuted weights (GGUF) and
 * unpermuted ones (folders), would show in the answer. */
static void real_models_answer_paris(void **state) {
    (void)state;
    /* "The capital of France is" in each model's ids, and " Paris" */
    static const struct {
        const char *name;
        int32_t tokens[6];
        int n;
        int32_t paris;
    } list[] = {
        {"smollm2", {504, 3575, 282, 4649, 314}, 5, 7042},
        {"qwen2.5-coder-1.5b", {785, 6722, 315, 9625, 374}, 5, 12095},
        {"gemma3-270m", {2, 818, 5279, 529, 7001, 563}, 6, 9079},
    };
    int n_found = 0;
    for (size_t i = 0; i < SO_LEN(list); i++) {
        const char *path = so_test_model(list[i].name);
        so_rig r;
        so_err err = {0};
        if (!path)
            continue;
        n_found++;
        so_rig_open(
            &r, path,
            &(so_rig_opts){
                .level = SO_CPU_AUTO, .n_threads = 2, .kv_dtype = SO_DTYPE_F16, .max_rows = 8});
        so_seq *s = so_seq_create(r.kv);
        so_row rows[8];
        for (int k = 0; k < list[i].n; k++)
            rows[k] = (so_row){list[i].tokens[k], k, 0, k - 1, .want_logits = k == list[i].n - 1};
        SO_OK_OR_FAIL(so_seq_begin(s, list[i].n, &err), err);
        so_batch batch = {rows, list[i].n, &s, 1};
        SO_OK_OR_FAIL(so_pass_run(r.p, &batch, SO_PASS_ARGMAX | SO_PASS_LOGITS, &err), err);
        const float *l = so_pass_logits(r.p, 0);
        int better = 0;
        for (int v = 0; v < r.n_vocab; v++)
            better += l[v] > l[list[i].paris];
        if (better > 4)
            fail_msg("%s: %d tokens are likelier than Paris", list[i].name, better);
        so_seq_free(s);
        so_rig_close(&r);
    }
    if (n_found == 0)
        SO_SKIP("no pulled model is here (sooth pull smollm2)");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_tensors),
        cmocka_unit_test(refuses_infinity),
        cmocka_unit_test(infinite_weights_show_in_logits),
        cmocka_unit_test(refuses_folders),
        cmocka_unit_test(fits_rows),
        cmocka_unit_test(rounds_at_load),
        cmocka_unit_test(packing_changes_nothing),
        cmocka_unit_test(loads_without_room_to_pack),
        cmocka_unit_test(real_models_answer_paris),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
