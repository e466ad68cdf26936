/* Kernel tables one by one: the accuracy of exp, and the same bits at every level for numbers that
 * no ordinary model produces (infinities, NaN, subnormals, zeros of both signs, ties). */
#include "so_test.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "backend/cpu/cpu.h"
#include "base/half.h"
#include "base/mem.h"
#include "base/rng.h"

static uint32_t random_u32(uint32_t i) {
    so_rng_key key = {.seed = 77, .purpose = SO_RNG_TEST};
    uint32_t w[4];
    so_rng_block(&key, i, w);
    return w[0];
}

/* Any float, often a special one. */
static float any_float(uint32_t i) {
    static const float special[] = {0.0f,      -0.0f,   INFINITY, -INFINITY, NAN,      0x1p-149f,
                                    0x1p-126f, 1.0f,    -1.0f,    3.4e38f,   -3.4e38f, 88.7f,
                                    -87.4f,    -103.9f, 65504.0f, 65520.0f,  0x1p-25f, 0x1.8p-24f};
    uint32_t w = random_u32(2 * i);
    if (w % 8 == 0)
        return special[w / 8 % SO_LEN(special)];
    if (w % 8 < 3)
        return so_bits_f32(random_u32(2 * i + 1));
    return (float)((double)random_u32(2 * i + 1) / 4294967296.0 * 40 - 20);
}

static float *any_floats(size_t n, uint32_t seed) {
    float *x = SO_NEW_N(float, n);
    for (size_t i = 0; i < n; i++)
        x[i] = any_float(seed + (uint32_t)i);
    return x;
}

static void assert_bits(const char *what, const float *got, const float *want, size_t n) {
    for (size_t i = 0; i < n; i++)
        if (so_f32_bits(got[i]) != so_f32_bits(want[i]) && !(isnan(got[i]) && isnan(want[i])))
            fail_msg("%s: element %zu is %.9g (%08x), not %.9g (%08x)", what, i, (double)got[i],
                     so_f32_bits(got[i]), (double)want[i], so_f32_bits(want[i]));
}

/* Distance in units of the last place of the float nearest to `want`. */
static double ulps(float got, double want) {
    int exponent;
    frexp(want, &exponent);
    double ulp = ldexp(1.0, SO_MAX(exponent - 24, -149));
    return fabs((double)got - want) / ulp;
}

static void exp_accuracy(void **state) {
    (void)state;
    double worst = 0, worst_small = 0;
    for (uint32_t i = 0; i < 400000; i++) {
        float x = (float)(-103.97 + i * (88.72 + 103.97) / 400000), y;
        so_kernels_scalar.exp(&y, &x, 1);
        double gap = ulps(y, exp((double)x));
        if (x > -87.3f)
            worst = fmax(worst, gap);
        else
            worst_small = fmax(worst_small, gap);
    }
    print_message("exp: %.3f ulp, %.3f where the result is subnormal\n", worst, worst_small);
    assert_true(worst <= 1.0);
    assert_true(worst_small <= 1.0);
    const float in[] = {0.0f, -0.0f, 100.0f, INFINITY, -104.5f, -INFINITY, NAN, 88.8f};
    const float want[] = {1.0f, 1.0f, INFINITY, INFINITY, 0.0f, 0.0f, NAN, INFINITY};
    float out[SO_LEN(in)];
    so_kernels_scalar.exp(out, in, SO_LEN(in));
    assert_bits("exp", out, want, SO_LEN(in));
}

static void elements_at(const so_kernels *k) {
    enum { N = 4097 };
    const so_kernels *s = &so_kernels_scalar;
    float *a = any_floats(N, 0), *b = any_floats(N, N);
    float *got = SO_NEW_N(float, N), *want = SO_NEW_N(float, N);
    k->exp(got, a, N), s->exp(want, a, N);
    assert_bits("exp", got, want, N);
    k->gelu(got, a, N), s->gelu(want, a, N);
    assert_bits("gelu", got, want, N);
    k->silu_mul(got, a, b, N), s->silu_mul(want, a, b, N);
    assert_bits("silu_mul", got, want, N);
    k->gelu_mul(got, a, b, N), s->gelu_mul(want, a, b, N);
    assert_bits("gelu_mul", got, want, N);
    k->add(got, a, b, N), s->add(want, a, b, N);
    assert_bits("add", got, want, N);
    k->to_f16((uint16_t *)got, a, N), s->to_f16((uint16_t *)want, a, N);
    assert_memory_equal(got, want, N * sizeof(uint16_t));
    for (int d = 1; d < 70; d++) {
        k->rms_norm(got, a + d, b, d, 1e-6f), s->rms_norm(want, a + d, b, d, 1e-6f);
        assert_bits("rms_norm", got, want, (size_t)d);
        k->layer_norm(got, a + d, b, a, d, 1e-6f), s->layer_norm(want, a + d, b, a, d, 1e-6f);
        assert_bits("layer_norm", got, want, (size_t)d);
        assert_int_equal(k->argmax(a + 3 * d, d), s->argmax(a + 3 * d, d));
    }
    free(a);
    free(b);
    free(got);
    free(want);
}

/* Blocks whose largest value is ordinary, tiny, zero, infinite or NaN. */
static void quantize_at(const so_kernels *k) {
    enum { N = 256 * 40 };
    float *x = any_floats(N, 9000);
    int8_t *q = SO_NEW_N(int8_t, N), *q_want = SO_NEW_N(int8_t, N);
    so_q32 *b = SO_NEW_N(so_q32, N / 32), *b_want = SO_NEW_N(so_q32, N / 32);
    so_q256 *c = SO_NEW_N(so_q256, N / 256), *c_want = SO_NEW_N(so_q256, N / 256);
    for (int i = 0; i < N; i++) {
        if (i / 256 % 5 != 4) /* most blocks finite */
            x[i] = isfinite(x[i]) ? x[i] : 1.0f;
        if (i / 256 % 5 == 1)
            x[i] *= 0x1p-140f;
        if (i / 256 % 5 == 2 && fabsf(x[i]) > 100)
            x[i] = 0.5f;
    }
    so_kernels_scalar.quantize32(x, N, q_want, b_want);
    k->quantize32(x, N, q, b);
    assert_memory_equal(q, q_want, N);
    for (int i = 0; i < N / 32; i++) {
        assert_bits("quantize32 d, s", &b[i].d, &b_want[i].d, 2);
        assert_int_equal(b[i].sum, b_want[i].sum);
    }
    so_kernels_scalar.quantize256(x, N, q_want, c_want);
    k->quantize256(x, N, q, c);
    assert_memory_equal(q, q_want, N);
    for (int i = 0; i < N / 256; i++) {
        assert_bits("quantize256 d", &c[i].d, &c_want[i].d, 1);
        assert_memory_equal(c[i].sum16, c_want[i].sum16, sizeof c[i].sum16 + sizeof c[i].sum32);
    }
    for (int i = 0; i < N; i += 32) {
        assert_int_equal(k->entry_q8(x + i, q + i), so_kernels_scalar.entry_q8(x + i, q_want + i));
        assert_memory_equal(q + i, q_want + i, 32);
    }
    for (int i = 0; i < N; i++)
        assert_int_not_equal(q[i], -128);
    free(x);
    free(q);
    free(q_want);
    free(b);
    free(b_want);
    free(c);
    free(c_want);
}

/* Entries of a Q8_0 cache: the scale is rounded to half first, and values are
 * divided by that half. */
static void entry_rules(void **state) {
    (void)state;
    float x[32] = {0};
    int8_t q[32];
    assert_int_equal(so_kernels_scalar.entry_q8(x, q), 0);
    x[0] = 127.0f, x[1] = -2.5f, x[2] = 3.5f;
    assert_int_equal(so_kernels_scalar.entry_q8(x, q), 0x3C00);
    assert_true(q[0] == 127 && q[1] == -2 && q[2] == 4 && q[3] == 0);
    x[0] = 127.04f; /* the scale rounds down: 127.04 is past 127, clamped */
    assert_int_equal(so_kernels_scalar.entry_q8(x, q), 0x3C00);
    assert_int_equal(q[0], 127);
    x[0] = 1e-12f, x[1] = x[2] = 0; /* below the smallest half */
    assert_int_equal(so_kernels_scalar.entry_q8(x, q), 0);
    assert_int_equal(q[0], 0);
    const float bad[] = {9e6f, INFINITY, -INFINITY, NAN}; /* past the largest half, or not finite */
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        x[0] = bad[i], x[1] = 1;
        assert_true(isnan(so_f16_to_f32(so_kernels_scalar.entry_q8(x, q))) && q[1] == 0);
    }
}

static void special_numbers(void **state) {
    (void)state;
    for (int level = SO_CPU_SCALAR; level < SO_CPU_LEVELS; level++) {
        const so_kernels *k = so_cpu_kernels((so_cpu_level)level);
        if (!k)
            continue;
        elements_at(k);
        quantize_at(k);
    }
}

/* What the contract of kernels.h states for single blocks, on the scalar reference. */
static void quantize_rules(void **state) {
    (void)state;
    float x[32] = {0};
    int8_t q[32];
    so_q32 b;
    so_kernels_scalar.quantize32(x, 32, q, &b);
    assert_true(b.d == 0 && b.s == 0 && b.sum == 0);
    x[3] = -2.54f;
    so_kernels_scalar.quantize32(x, 32, q, &b);
    assert_int_equal(q[3], -127);
    assert_true(fabsf(b.d - 0.02f) < 1e-8f);
    x[7] = NAN;
    so_kernels_scalar.quantize32(x, 32, q, &b);
    assert_true(isnan(b.d) && isnan(b.s) && q[3] == 0);
    x[7] = INFINITY;
    so_kernels_scalar.quantize32(x, 32, q, &b);
    assert_true(isnan(b.d) && q[3] == 0);
    for (int i = 0; i < 32; i++)
        x[i] = (float)i - 15.5f;
    x[31] = 127.0f; /* scale 1: everything else is a tie */
    so_kernels_scalar.quantize32(x, 32, q, &b);
    assert_int_equal(q[0], -16); /* −15.5 to even */
    assert_int_equal(q[1], -14); /* −14.5 to even */
    assert_int_equal(q[16], 0);  /* 0.5 to even */
    assert_int_equal(q[17], 2);  /* 1.5 to even */
}

static void argmax_rules(void **state) {
    (void)state;
    for (int level = SO_CPU_SCALAR; level < SO_CPU_LEVELS; level++) {
        const so_kernels *k = so_cpu_kernels((so_cpu_level)level);
        float x[100];
        if (!k)
            continue;
        for (int i = 0; i < 100; i++)
            x[i] = -FLT_MAX;
        assert_int_equal(k->argmax(x, 100), 0);
        x[57] = -FLT_MAX / 2;
        assert_int_equal(k->argmax(x, 100), 57);
        x[99] = x[57];
        assert_int_equal(k->argmax(x, 100), 57);
        x[98] = -1.0f, x[40] = -1.0f;
        assert_int_equal(k->argmax(x, 100), 40);
        x[13] = 0.0f, x[11] = -0.0f;
        assert_int_equal(k->argmax(x, 100), 11);
        x[99] = FLT_MAX;
        assert_int_equal(k->argmax(x, 100), 99);
        assert_int_equal(k->argmax(x + 99, 1), 0);
        const float nonfinite[] = {NAN, INFINITY, -INFINITY};
        for (int i = 0; i < 300; i++) { /* in every place, also beside a larger element */
            float was = x[i % 100];
            x[i % 100] = nonfinite[i / 100];
            assert_int_equal(k->argmax(x, 100), -1);
            x[i % 100] = was;
        }
        assert_int_equal(k->argmax(x, 100), 99);
    }
}

static void levels_by_name(void **state) {
    (void)state;
    so_cpu_level level;
    assert_true(so_cpu_level_parse("avx512", &level) && level == SO_CPU_AVX512);
    assert_true(so_cpu_level_parse("amx", &level) && level == SO_CPU_AMX);
    assert_true(so_cpu_level_parse("auto", &level) && level == SO_CPU_AUTO);
    assert_true(so_cpu_level_parse("scalar", &level) && level == SO_CPU_SCALAR);
    assert_false(so_cpu_level_parse("AVX3", &level));
    assert_false(so_cpu_level_parse("", &level));
    assert_string_equal(so_cpu_level_name(SO_CPU_AVX2), "avx2");
    assert_true(so_cpu_level_parse("avxvnni", &level) && level == SO_CPU_AVXVNNI);
    assert_true(so_cpu_level_usable(SO_CPU_SCALAR));
    assert_true(so_cpu_level_usable(so_cpu_best_level()));
    assert_non_null(so_cpu_kernels(so_cpu_best_level()));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_accuracy),   cmocka_unit_test(special_numbers),
        cmocka_unit_test(quantize_rules), cmocka_unit_test(entry_rules),
        cmocka_unit_test(argmax_rules),   cmocka_unit_test(levels_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
