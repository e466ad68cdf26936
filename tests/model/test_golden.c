/* Tiny models of every architecture against the logits of Hugging Face transformers in float32
 * (tests/golden/models, with the script that made them): max |Δ| ≤ 1e-4 · max |logit| at every
 * position, with the prompt in one pass and token by token, on the scalar and the best CPU
 * level. */
#include "so_test.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "so_rig.h"

typedef struct expect {
    int32_t *tokens;
    float *logits;
    int n, n_vocab;
} expect;

/* Copies the bytes of a tensor of any dtype, also I32, which is not a dtype of weights. The file is
 * trusted. */
static void copy_tensor(const so_map_file *f, const json_t *head, size_t base, const char *name,
                        void *dst, size_t n_bytes) {
    const json_t *off = json_object_get(json_object_get(head, name), "data_offsets");
    size_t begin = (size_t)json_integer_value(json_array_get(off, 0));
    size_t end = (size_t)json_integer_value(json_array_get(off, 1));
    assert_int_equal(end - begin, n_bytes);
    assert_true(base + end <= f->len);
    memcpy(dst, f->data + base + begin, n_bytes);
}

static expect read_expect(const char *folder) {
    expect e = {0};
    so_err err = {0};
    so_map_file f;
    char *path = so_path_join(folder, "expect.safetensors");
    SO_OK_OR_FAIL(so_file_map(path, &f, &err), err);
    free(path);
    uint64_t head_len;
    memcpy(&head_len, f.data, sizeof head_len);
    json_t *head = json_loadb((const char *)f.data + 8, (size_t)head_len, 0, NULL);
    const json_t *shape = json_object_get(json_object_get(head, "logits"), "shape");
    e.n = (int)json_integer_value(json_array_get(shape, 0));
    e.n_vocab = (int)json_integer_value(json_array_get(shape, 1));
    assert_true(e.n > 0 && e.n_vocab > 0);
    e.tokens = SO_NEW_N(int32_t, e.n);
    e.logits = SO_NEW_N(float, e.n *e.n_vocab);
    copy_tensor(&f, head, 8 + head_len, "tokens", e.tokens, (size_t)e.n * 4);
    copy_tensor(&f, head, 8 + head_len, "logits", e.logits, (size_t)e.n * (size_t)e.n_vocab * 4);
    json_decref(head);
    so_file_unmap(&f);
    return e;
}

/* Largest |Δ| over the largest |logit|. */
static double distance(const expect *e, const float *got) {
    double worst = 0, largest = 0;
    for (int i = 0; i < e->n * e->n_vocab; i++) {
        worst = fmax(worst, fabs((double)got[i] - (double)e->logits[i]));
        largest = fmax(largest, fabs((double)e->logits[i]));
    }
    return worst / largest;
}

static void check_model(const char *name, so_cpu_level level, bool deferred) {
    char folder[4096];
    char sub[128];
    snprintf(sub, sizeof sub, "golden/models/%s", name);
    snprintf(folder, sizeof folder, "%s", so_test_data(sub));
    expect e = read_expect(folder);
    so_rig r;
    so_rig_open(&r, folder, &(so_rig_opts){.level = level, .deferred = deferred});
    assert_int_equal(r.n_vocab, e.n_vocab);
    float *got = SO_NEW_N(float, e.n *e.n_vocab);
    const int chunks[] = {0, 1, 7};
    for (size_t c = 0; c < SO_LEN(chunks); c++) {
        so_seq *s = so_seq_create(r.kv);
        so_rig_chunks(&r, s, e.tokens, e.n, chunks[c], got);
        double d = distance(&e, got);
        /* a GPU rounds activations and weights to fp16 */
        if (!(d <= (strcmp(so_test_device(), "cpu") == 0 ? 1e-4 : 5e-3)))
            fail_msg("%s, %s, chunks of %d: distance %g", name, so_cpu_level_name(level), chunks[c],
                     d);
        if (c == 0)
            printf("%-20s %-7s distance %.2e\n", name, so_cpu_level_name(level), d);
        so_seq_free(s);
    }
    so_rig_close(&r);
    free(got);
    free(e.tokens);
    free(e.logits);
}

static void golden(void **state) {
    const char *name = *state;
    check_model(name, SO_CPU_SCALAR, false);
    check_model(name, so_cpu_best_level(), false);
    check_model(name, so_cpu_best_level(), true);
}

int main(void) {
    static const char *const names[] = {"llama",          "llama3_rope", "llama_linear_bias",
                                        "mistral_window", "qwen2",       "qwen2_yarn",
                                        "qwen3",          "gemma3",      "gpt2"};
    struct CMUnitTest tests[SO_LEN(names)];
    for (size_t i = 0; i < SO_LEN(names); i++)
        tests[i] = (struct CMUnitTest){names[i], golden, NULL, NULL, (void *)(uintptr_t)names[i]};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
