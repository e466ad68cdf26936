/* Every operation of op_cases.h: against double precision, across CPU levels bit by bit, alone and
 * in a batch, with one to four threads, and on the deferred backend. */
#include "op_cases.h"

static so_backend *cpu(int n_threads, so_cpu_level level) {
    so_backend *b = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open("cpu", &(so_backend_opts){.n_threads = n_threads, .level = level},
                                  &b, &err),
                  err);
    return b;
}

static float *run_all(so_backend *b, const op_data *o) {
    float *out = SO_NEW_N(float, o->c.n * o->out_width);
    op_run(b, o, 0, o->c.n, out);
    return out;
}

/* ---- double precision ---- */

/* The activations after quantisation by the contract of kernels.h, in double. */
static void round_activations(const op_case *c, const float *x, double *out) {
    int len = so_dtype_get((int)c->dtype)->block_len;
    for (int i = 0; i < c->d; i++)
        out[i] = (double)x[i];
    for (int first = 0; len > 1 && first < c->d; first += len) {
        float max = 0;
        for (int i = first; i < first + len; i++)
            max = fmaxf(max, fabsf(x[i]));
        float scale = max / 127.0f;
        for (int i = first; i < first + len; i++)
            out[i] = (double)scale * nearbyint((double)(x[i] * (127.0f / max)));
    }
}

/* Tolerance: each float operation adds an error of 2^-24 of the largest partial sum. `bound`
 * follows from the sum of magnitudes; the largest weight accounts for minima. */
static void check_matmul(const op_data *o, const float *got) {
    const op_case *c = &o->c;
    size_t row_bytes = so_dtype_row_bytes(c->dtype, c->d);
    float *w = SO_NEW_N(float, c->d);
    double *x = SO_NEW_N(double, c->d);
    for (int i = 0; i < c->n; i++) {
        round_activations(c, o->a + (size_t)i * (size_t)c->d, x);
        for (int r = 0; r < c->m; r++) {
            so_dequantize_row(c->dtype, o->weight_bytes + 1 + (size_t)r * row_bytes, w, c->d);
            double sum = c->flag ? (double)o->bias[r] : 0, size = fabs(sum), largest = 0;
            for (int j = 0; j < c->d; j++)
                largest = fmax(largest, fabs((double)w[j]));
            for (int j = 0; j < c->d; j++) {
                sum += (double)w[j] * x[j];
                size += (fabs((double)w[j]) + largest) * fabs(x[j]);
            }
            double bound = size * (c->d / 16 + 8) * 0x1p-24 + 1e-30;
            double gap = fabs((double)got[i * c->m + r] - sum);
            if (!(gap <= bound))
                fail_msg("matmul %s d=%d row %d col %d: %.9g, not %.9g (allowed %.3g)",
                         so_dtype_get((int)c->dtype)->name, c->d, i, r, (double)got[i * c->m + r],
                         sum, bound);
        }
    }
    free(w);
    free(x);
}

static double gelu_of(double x) {
    return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void norm_of(const op_data *o, const float *x, double *out) {
    int d = o->c.d;
    bool layer = o->c.kind == SO_OP_LAYER_NORM;
    double mean = 0, sum = 0;
    for (int j = 0; layer && j < d; j++)
        mean += (double)x[j] / d;
    for (int j = 0; j < d; j++)
        sum += ((double)x[j] - mean) * ((double)x[j] - mean);
    double r = 1 / sqrt(sum / d + 1e-5);
    for (int j = 0; j < d; j++)
        out[j] =
            ((double)x[j] - mean) * r * (double)o->weight[j] + (layer ? (double)o->bias[j] : 0);
}

static void rope_of(const op_data *o, int row, double *out) {
    int d = o->c.d;
    for (int j = 0; j < o->width; j++) {
        int head = j / d, e = j % d, pair = o->c.flag ? e % (d / 2) : e / 2;
        int lo = head * d + (o->c.flag ? pair : 2 * pair), hi = lo + (o->c.flag ? d / 2 : 1);
        const float *x = o->a + row * o->width, *t = o->table + row * d + 2 * pair;
        out[j] = j == lo ? (double)x[lo] * (double)t[0] - (double)x[hi] * (double)t[1]
                         : (double)x[lo] * (double)t[1] + (double)x[hi] * (double)t[0];
    }
}

static int argmax_of(const float *x, int d) {
    int best = 0;
    for (int j = 0; j < d; j++) {
        if (!isfinite(x[j]))
            return -1;
        if (x[j] > x[best])
            best = j;
    }
    return best;
}

static void row_of(const op_data *o, int row, double *out) {
    const op_case *c = &o->c;
    const float *x = o->a + row * o->width, *y = o->b + row * o->width;
    float *w = SO_NEW_N(float, c->d);
    if (c->kind == SO_OP_EMBED)
        so_dequantize_row(c->dtype,
                          o->weight_bytes + 1 +
                              (size_t)o->ids[row] * so_dtype_row_bytes(c->dtype, c->d),
                          w, c->d);
    if (c->kind == SO_OP_RMS_NORM || c->kind == SO_OP_LAYER_NORM)
        norm_of(o, x, out);
    if (c->kind == SO_OP_ROPE)
        rope_of(o, row, out);
    for (int j = 0; j < o->width; j++) {
        double a = (double)x[j], b = (double)y[j];
        switch (c->kind) {
        case SO_OP_EMBED:
            out[j] = (double)w[j] * 1.5;
            break;
        case SO_OP_GATHER:
            out[j] = o->ids[row] < 0 ? 0 : (double)o->a[o->ids[row] * o->width + j];
            break;
        case SO_OP_ADD:
            out[j] = a + b;
            break;
        case SO_OP_SILU_MUL:
            out[j] = a / (1 + exp(-a)) * b;
            break;
        case SO_OP_GELU_MUL:
            out[j] = gelu_of(a) * b;
            break;
        case SO_OP_GELU:
            out[j] = gelu_of(a);
            break;
        default:
            break;
        }
    }
    free(w);
}

static void check_rows(const op_data *o, const float *got) {
    double *want = SO_NEW_N(double, o->width);
    for (int i = 0; i < o->c.n; i++) {
        if (o->c.kind == SO_OP_ARGMAX) {
            int32_t index;
            memcpy(&index, &got[i], sizeof index);
            assert_int_equal(index, argmax_of(o->a + i * o->width, o->width));
            continue;
        }
        row_of(o, i, want);
        for (int j = 0; j < o->width; j++) {
            double gap = fabs((double)got[i * o->width + j] - want[j]);
            if (!(gap <= 2e-6 * (1 + fabs(want[j]))))
                fail_msg("%s d=%d row %d: element %d is %.9g, not %.9g", op_name(o->c.kind), o->c.d,
                         i, j, (double)got[i * o->width + j], want[j]);
        }
    }
    free(want);
}

static void against_double(void **state) {
    (void)state;
    so_backend *b = cpu(1, SO_CPU_SCALAR);
    for (size_t i = 0; i < SO_LEN(op_cases); i++) {
        op_data o = op_data_create(&op_cases[i], i);
        float *got = run_all(b, &o);
        if (o.c.kind == SO_OP_MATMUL)
            check_matmul(&o, got);
        else
            check_rows(&o, got);
        free(got);
        op_data_free(&o);
    }
    so_backend_free(b);
}

/* ---- the same bits ---- */

static void across_levels(void **state) {
    (void)state;
    so_cpu_level best = so_cpu_best_level();
    if (best == SO_CPU_SCALAR)
        SO_SKIP("this CPU has only the scalar level");
    so_backend *scalar = cpu(1, SO_CPU_SCALAR);
    for (size_t i = 0; i < SO_LEN(op_cases); i++) {
        op_data o = op_data_create(&op_cases[i], i);
        float *want = run_all(scalar, &o);
        for (int level = SO_CPU_AVX2; level <= (int)best; level++) {
            if (!so_cpu_level_usable((so_cpu_level)level))
                continue;
            so_backend *b = cpu(1, (so_cpu_level)level);
            float *got = run_all(b, &o);
            assert_same_floats(&o.c, so_cpu_level_name((so_cpu_level)level), got, want,
                               (size_t)o.c.n * (size_t)o.out_width);
            free(got);
            so_backend_free(b);
        }
        free(want);
        op_data_free(&o);
    }
    so_backend_free(scalar);
}

/* Every row alone, and in groups of all sizes up to the case's, with 1 to 4 threads. */
static void rows_alone(so_cpu_level level) {
    so_backend *team[4];
    for (int t = 0; t < 4; t++)
        team[t] = cpu(t + 1, level);
    for (size_t i = 0; i < SO_LEN(op_cases); i++) {
        op_data o = op_data_create(&op_cases[i], i);
        float *want = run_all(team[0], &o);
        float *got = SO_NEW_N(float, o.c.n *o.out_width);
        for (int t = 0; t < 4; t++)
            for (int group = 1; group <= o.c.n; group += 1 + group / 4) {
                for (int first = 0; first < o.c.n; first += group)
                    op_run(team[t], &o, first, SO_MIN(group, o.c.n - first),
                           got + (size_t)first * (size_t)o.out_width);
                assert_same_floats(&o.c, "in groups", got, want,
                                   (size_t)o.c.n * (size_t)o.out_width);
                if (t > 0)
                    group += 11; /* fewer sizes where only the thread count differs */
            }
        free(got);
        free(want);
        op_data_free(&o);
    }
    for (int t = 0; t < 4; t++)
        so_backend_free(team[t]);
}

static void row_invariance(void **state) {
    (void)state;
    for (int level = SO_CPU_SCALAR; level < SO_CPU_LEVELS; level++)
        if (so_cpu_level_usable((so_cpu_level)level))
            rows_alone((so_cpu_level)level);
}

/* A hash of the scalar level's bits for all cases: the same on every machine and compiler. Only a
 * change of the arithmetic contract may change it. */
static void bits_are_pinned(void **state) {
    (void)state;
    so_backend *b = cpu(1, SO_CPU_SCALAR);
    uint64_t hash = 0;
    for (size_t i = 0; i < SO_LEN(op_cases); i++) {
        op_data o = op_data_create(&op_cases[i], i);
        float *out = run_all(b, &o);
        hash = hash * 31 + so_hash_bytes(out, (size_t)o.c.n * (size_t)o.out_width * 4);
        free(out);
        op_data_free(&o);
    }
    so_backend_free(b);
    assert_true(hash == 0x933f1fed165381aeu);
}

static void deferred_agrees(void **state) {
    (void)state;
    so_err err = {0};
    so_backend *plain = cpu(2, SO_CPU_AUTO), *late = NULL;
    SO_OK_OR_FAIL(so_backend_open("deferred",
                                  &(so_backend_opts){.n_threads = 2, .level = SO_CPU_AUTO}, &late,
                                  &err),
                  err);
    for (size_t i = 0; i < SO_LEN(op_cases); i++) {
        op_data o = op_data_create(&op_cases[i], i);
        float *want = run_all(plain, &o), *got = run_all(late, &o);
        assert_same_floats(&o.c, "deferred", got, want, (size_t)o.c.n * (size_t)o.out_width);
        free(got);
        free(want);
        op_data_free(&o);
    }
    so_backend_free(plain);
    so_backend_free(late);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(against_double),  cmocka_unit_test(across_levels),
        cmocka_unit_test(row_invariance),  cmocka_unit_test(bits_are_pinned),
        cmocka_unit_test(deferred_agrees),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
