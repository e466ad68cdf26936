/* The GPU backend, where SOOTH_DEVICE names one: every operation of op_cases.h against the CPU, rows
 * alone and in batches with ==, repeats with ==, and operations that share a kernel against the same
 * operations one by one. Elsewhere the tests are skipped. tests/model/test_invariance.c covers
 * attention and the cache. */
#include "op_cases.h"
#include "so_rig.h"

static so_backend *gpu;

static int open_gpu(void **state) {
    (void)state;
    so_err err = {0};
    if (strncmp(so_test_device(), "cuda", 4) == 0 &&
        so_backend_open(so_test_device(), &(so_backend_opts){0}, &gpu, &err) != SO_OK) {
        print_error("%s\n", err.msg);
        return -1;
    }
    return 0;
}

static int close_gpu(void **state) {
    (void)state;
    so_backend_free(gpu);
    gpu = NULL;
    return 0;
}

static void need_gpu(void) {
    if (!gpu)
        SO_SKIP("SOOTH_DEVICE=cuda is not set");
}

/* Activations are rounded to fp16 (2^-11), weights too; sums are float32. The CPU rounds activations
 * of quantised weights to 8 bits, so both are compared with products of the exact numbers. */
static void check_matmul(const op_data *o, const float *got) {
    const op_case *c = &o->c;
    size_t row_bytes = so_dtype_row_bytes(c->dtype, c->d);
    float *w = SO_NEW_N(float, c->d);
    for (int i = 0; i < c->n; i++)
        for (int r = 0; r < c->m; r++) {
            so_dequantize_row(c->dtype, o->weight_bytes + 1 + (size_t)r * row_bytes, w, c->d);
            double sum = c->flag ? (double)o->bias[r] : 0, size = fabs(sum), largest = 0;
            for (int j = 0; j < c->d; j++)
                largest = fmax(largest, fabs((double)w[j]));
            for (int j = 0; j < c->d; j++) {
                double x = (double)o->a[(size_t)i * (size_t)c->d + (size_t)j];
                sum += (double)w[j] * x;
                size += (fabs((double)w[j]) + largest) * fabs(x);
            }
            double gap = fabs((double)got[i * c->m + r] - sum), bound = size * 0x1p-10 + 1e-6;
            if (!(gap <= bound))
                fail_msg("matmul %s d=%d n=%d row %d col %d: %.9g, not %.9g (allowed %.3g)",
                         so_dtype_get((int)c->dtype)->name, c->d, c->n, i, r,
                         (double)got[i * c->m + r], sum, bound);
        }
    free(w);
}

static void check_others(const op_data *o, const float *got) {
    so_backend *cpu = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open("cpu", &(so_backend_opts){.n_threads = 1, .level = SO_CPU_SCALAR},
                                  &cpu, &err),
                  err);
    size_t n = (size_t)o->c.n * (size_t)o->out_width;
    float *want = SO_NEW_N(float, n);
    op_run(cpu, o, 0, o->c.n, want);
    bool bits = o->c.kind == SO_OP_ARGMAX || o->c.kind == SO_OP_GATHER || o->c.kind == SO_OP_ADD;
    for (size_t i = 0; i < n; i++) {
        double gap = fabs((double)got[i] - (double)want[i]);
        if (bits ? so_f32_bits(got[i]) != so_f32_bits(want[i])
                 : !(gap <= 2e-3 * fabs((double)want[i]) + 2e-4))
            fail_msg("%s d=%d n=%d: element %zu is %.9g, not %.9g", op_name(o->c.kind), o->c.d,
                     o->c.n, i, (double)got[i], (double)want[i]);
    }
    free(want);
    so_backend_free(cpu);
}

static void every_operation(void **state) {
    (void)state;
    need_gpu();
    for (size_t i = 0; i < SO_LEN(op_cases); i++) {
        op_data o = op_data_create(&op_cases[i], 1000 + i);
        float *out = SO_NEW_N(float, o.c.n *o.out_width);
        op_run(gpu, &o, 0, o.c.n, out);
        if (o.c.kind == SO_OP_MATMUL)
            check_matmul(&o, out);
        else
            check_others(&o, out);
        free(out);
        op_data_free(&o);
    }
}

/* Computes n rows from `first` on, in `part`, and compares them with those of all rows. */
static void check_window(const op_data *o, int first, int n, const float *all, float *part) {
    size_t w = (size_t)o->out_width;
    op_run(gpu, o, first, n, part);
    assert_same_floats(&o->c, "rows of a window", part, all + (size_t)first * w, (size_t)n * w);
}

/* Windows of 1 … 64 rows and the whole, several times each. */
static void rows_alone_and_together(void **state) {
    (void)state;
    need_gpu();
    static const int WIDTHS[] = {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 200};
    for (size_t i = 0; i < SO_LEN(op_cases); i++) {
        op_case c = op_cases[i];
        if (c.kind == SO_OP_GATHER)
            continue; /* its rows are not those of its input */
        c.n = 200;
        op_data o = op_data_create(&c, 2000 + i);
        size_t w = (size_t)o.out_width;
        float *all = SO_NEW_N(float, (size_t)c.n *w), *part = SO_NEW_N(float, (size_t)c.n *w);
        op_run(gpu, &o, 0, c.n, all);
        for (size_t k = 0; k < SO_LEN(WIDTHS); k++)
            for (int turn = 0; turn < 3; turn++) {
                int first = (int)((17 * k + 31 * (size_t)turn) % (size_t)(c.n - WIDTHS[k] + 1));
                check_window(&o, first, WIDTHS[k], all, part);
            }
        free(all);
        free(part);
        op_data_free(&o);
    }
}

/* So many outputs that a GPU's thread blocks do not divide K between them (matmul_wide.cu). */
static void many_outputs(void **state) {
    (void)state;
    need_gpu();
    static const so_dtype TYPES[] = {SO_DTYPE_F32,  SO_DTYPE_BF16, SO_DTYPE_Q8_0,
                                     SO_DTYPE_Q4_K, SO_DTYPE_Q6_K, SO_DTYPE_Q5_1};
    static const int WIDTHS[] = {20, 33, 64, 130};
    for (size_t i = 0; i < SO_LEN(TYPES); i++) {
        op_case c = {SO_OP_MATMUL, TYPES[i], 130, 768, 20011, true, 0};
        op_data o = op_data_create(&c, 3000 + i);
        size_t w = (size_t)o.out_width;
        float *all = SO_NEW_N(float, (size_t)c.n *w), *part = SO_NEW_N(float, (size_t)c.n *w);
        for (int first = 0; first < c.n; first += 10)
            op_run(gpu, &o, first, 10, all + (size_t)first * w);
        for (size_t k = 0; k < SO_LEN(WIDTHS); k++) {
            int first = c.n - WIDTHS[k];
            check_window(&o, first, WIDTHS[k], all, part);
        }
        free(all);
        free(part);
        op_data_free(&o);
    }
}

/* Two gated MLPs with norms and residuals: with a sync after each operation; as one list each, where
 * operations share kernels and results that nobody reads are not stored; and as one list, in which the
 * second norm is a split norm (device.cuh). */
typedef enum mlp_lists { MLP_OPS, MLP_LAYERS, MLP_WHOLE } mlp_lists;
typedef struct mlp {
    int n, d, ff;
    so_dtype dtype;
    so_op_kind gate;
} mlp;

static float *run_mlp(const mlp *m, mlp_lists lists) {
    op_bench w = {.b = gpu};
    so_err err = {0};
    noise z = noise_of(7);
    op_data data[3] = {0};
    so_weight *weights[3];
    for (int i = 0; i < 3; i++) {
        data[i].c = (op_case){
            .kind = SO_OP_MATMUL, .dtype = m->dtype, .n = m->n, .d = i == 2 ? m->ff : m->d};
        op_data_weight(&data[i], &z, i == 2 ? m->d : m->ff);
        SO_OK_OR_FAIL(gpu->vt->weight_create(gpu, &data[i].tensor, &weights[i], &err), err);
    }
    size_t rows = (size_t)m->n * (size_t)m->d;
    float *norm = noise_floats(&z, (size_t)m->d), *x0 = noise_floats(&z, rows);
    so_view x = op_buffer(&w, x0, rows * 4), nw = op_buffer(&w, norm, (size_t)m->d * 4);
    so_view h = op_buffer(&w, NULL, rows * 4), g = op_buffer(&w, NULL, (size_t)(m->n * m->ff) * 4),
            u = op_buffer(&w, NULL, (size_t)(m->n * m->ff) * 4);
    float *out = SO_NEW_N(float, rows);
    for (int layer = 0; layer < 2; layer++) { /* the second makes results of the first unread */
        so_op ops[] = {
            {.kind = SO_OP_RMS_NORM,
             .norm = {.out = h, .x = x, .weight = nw, .d = m->d, .eps = 1e-5f}},
            {.kind = SO_OP_MATMUL, .matmul = {.out = g, .x = h, .w = weights[0]}},
            {.kind = SO_OP_MATMUL, .matmul = {.out = u, .x = h, .w = weights[1]}},
            {.kind = m->gate, .eltwise = {.out = g, .a = g, .b = u, .d = m->ff}},
            {.kind = SO_OP_MATMUL, .matmul = {.out = h, .x = g, .w = weights[2]}},
            {.kind = SO_OP_ADD, .eltwise = {.out = x, .a = x, .b = h, .d = m->d}},
        };
        for (size_t i = 0; i < SO_LEN(ops); i++) {
            ops[i].n = m->n;
            so_submit(gpu, &ops[i]);
            if (lists == MLP_OPS || (lists == MLP_LAYERS && i + 1 == SO_LEN(ops)))
                SO_OK_OR_FAIL(gpu->vt->sync(gpu, &err), err);
        }
    }
    so_submit(gpu, &(so_op){.kind = SO_OP_DOWNLOAD, .n = m->n, .download = {x, out, rows * 4}});
    SO_OK_OR_FAIL(gpu->vt->sync(gpu, &err), err);
    op_bench_free(&w);
    for (int i = 0; i < 3; i++) {
        gpu->vt->weight_free(gpu, weights[i]);
        free(data[i].weight_bytes);
    }
    free(x0);
    free(norm);
    return out;
}

static float largest(const float *x, size_t n) {
    float m = 0;
    for (size_t i = 0; i < n; i++)
        m = fmaxf(m, fabsf(x[i]));
    return m;
}

static void shared_kernels(void **state) {
    (void)state;
    need_gpu();
    static const int ROWS[] = {1, 3, 8, 12, 20, 40, 64, 65, 130};
    static const so_dtype TYPES[] = {SO_DTYPE_F32,  SO_DTYPE_BF16, SO_DTYPE_Q8_0,
                                     SO_DTYPE_Q4_K, SO_DTYPE_Q6_K, SO_DTYPE_Q5_1};
    for (size_t t = 0; t < SO_LEN(TYPES); t++)
        for (size_t i = 0; i < SO_LEN(ROWS); i++)
            for (int gelu = 0; gelu < 2; gelu++) {
                mlp m = {.n = ROWS[i],
                         .d = 256,
                         .ff = 768,
                         .dtype = TYPES[t],
                         .gate = gelu ? SO_OP_GELU_MUL : SO_OP_SILU_MUL};
                op_case c = {.kind = m.gate, .dtype = m.dtype, .n = m.n, .d = m.d, .m = m.ff};
                float *apart = run_mlp(&m, MLP_OPS), *layers = run_mlp(&m, MLP_LAYERS),
                      *whole = run_mlp(&m, MLP_WHOLE), *again = run_mlp(&m, MLP_WHOLE);
                size_t n = (size_t)m.n * (size_t)m.d;
                assert_same_floats(&c, "one list per layer", layers, apart, n);
                assert_same_floats(&c, "repeated", again, whole, n);
                float tolerance = 4e-3f * largest(apart, n); /* a split norm rounds elsewhere */
                for (size_t k = 0; k < n; k++)
                    if (fabsf(whole[k] - apart[k]) > tolerance)
                        fail_msg("%d rows: element %zu is %g, not %g", m.n, k, (double)whole[k],
                                 (double)apart[k]);
                mlp one = m;
                one.n = 1;
                float *first = run_mlp(&one, MLP_WHOLE);
                assert_same_floats(&c, "the first row alone", first, whole, (size_t)m.d);
                free(apart);
                free(layers);
                free(whole);
                free(again);
                free(first);
            }
}

/* An operation that was submitted runs before an object that it uses is freed. */
static void objects_freed_before_sync(void **state) {
    (void)state;
    need_gpu();
    so_err err = {0};
    for (int i = 0; i < 20; i++) {
        so_kv_shape shape = {.n_layers = 2,
                             .n_heads_kv = 2,
                             .head_dim = 16,
                             .n_pages = 4 + i,
                             .dtype = SO_DTYPE_F16};
        so_kv_store *store = NULL;
        op_bench w = {.b = gpu};
        so_kv_slot slots[2] = {{0, 1}, {1, 2}};
        SO_OK_OR_FAIL(gpu->vt->kv_create(gpu, &shape, &store, &err), err);
        so_view v = op_buffer(&w, slots, sizeof slots);
        so_submit(gpu, &(so_op){.kind = SO_OP_KV_COPY,
                                .n = 1,
                                .kv_copy = {store, v, {v.buf, sizeof slots[0]}}});
        gpu->vt->kv_free(gpu, store);
        op_bench_free(&w);
        SO_OK_OR_FAIL(gpu->vt->sync(gpu, &err), err);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_operation),
        cmocka_unit_test(rows_alone_and_together),
        cmocka_unit_test(many_outputs),
        cmocka_unit_test(shared_kernels),
        cmocka_unit_test(objects_freed_before_sync),
    };
    return cmocka_run_group_tests(tests, open_gpu, close_gpu);
}
