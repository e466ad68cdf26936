/* How much the type of the cache changes the model's output: not at all for F32, very little for
 * F16, little for Q8_0. The distance is the mean Kullback-Leibler divergence of the distributions
 * of all positions from those with the F32 cache, on the small models of the golden files and on a
 * real one if it is installed. Bounds are four times what was measured when they were set. */
#include "so_test.h"

#include <math.h>
#include <stdlib.h>

#include "base/mem.h"
#include "base/rng.h"
#include "so_rig.h"

enum { N = 120 };

static void run(const char *path, so_dtype cache, const int32_t *tokens, float **logits,
                int *n_vocab) {
    so_rig r;
    so_rig_open(&r, path, &(so_rig_opts){.level = SO_CPU_AUTO, .n_threads = 2, .kv_dtype = cache});
    *n_vocab = r.n_vocab;
    *logits = SO_NEW_N(float, (size_t)N *(size_t)r.n_vocab);
    so_seq *s = so_seq_create(r.kv);
    so_rig_chunks(&r, s, tokens, N, 64, *logits);
    so_seq_free(s);
    so_rig_close(&r);
}

static double log_sum(const float *x, int n) {
    double max = -INFINITY, sum = 0;
    for (int i = 0; i < n; i++)
        max = fmax(max, (double)x[i]);
    for (int i = 0; i < n; i++)
        sum += exp((double)x[i] - max);
    return max + log(sum);
}

static double divergence(const float *p, const float *q, int n) {
    double at_p = log_sum(p, n), at_q = log_sum(q, n), sum = 0;
    for (int i = 0; i < n; i++)
        sum += exp((double)p[i] - at_p) * ((double)p[i] - at_p - (double)q[i] + at_q);
    return sum;
}

/* Mean divergence over positions, for a cache of this type from one of F32. */
static double distance(const char *path, const int32_t *tokens, so_dtype cache) {
    float *want, *got;
    int n_vocab;
    double sum = 0;
    run(path, SO_DTYPE_F32, tokens, &want, &n_vocab);
    run(path, cache, tokens, &got, &n_vocab);
    for (int i = 0; i < N; i++)
        sum += divergence(want + (size_t)i * (size_t)n_vocab, got + (size_t)i * (size_t)n_vocab,
                          n_vocab);
    free(want);
    free(got);
    return sum / N;
}

static void check(const char *name, const char *path, int n_vocab, double most) {
    int32_t tokens[N];
    so_rng_key key = {.seed = 7, .purpose = SO_RNG_TEST};
    for (int i = 0; i < N; i++)
        tokens[i] = (int32_t)(so_rng_uniform(&key, (uint32_t)i) * n_vocab);
    double half = distance(path, tokens, SO_DTYPE_F16), q8 = distance(path, tokens, SO_DTYPE_Q8_0);
    if (!(fabs(half) <= q8 && q8 <= most))
        fail_msg("%s: F16 %.3g, Q8_0 %.3g, and at most %.3g was expected", name, half, q8, most);
}

static void small_models(void **state) {
    (void)state;
    static const char *const names[] = {
        "llama", "llama_linear_bias", "qwen2_yarn", "qwen3", "gemma3", "gpt2", "mistral_window"};
    for (size_t i = 0; i < SO_LEN(names); i++) {
        char sub[64];
        snprintf(sub, sizeof sub, "golden/models/%s", names[i]);
        check(names[i], so_test_data(sub), 131, 8e-4);
    }
}

static void real_model(void **state) {
    (void)state;
    const char *path = so_test_model("smollm2");
    if (!path)
        SO_SKIP("smollm2 is not pulled");
    check("smollm2", path, 49152, 0.03);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(small_models),
        cmocka_unit_test(real_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
