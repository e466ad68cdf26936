/* Everything around the operations: order in the list, hazards, uploads, reuse of
 * quantised activations, refusals, and the guarantees of the deferred backend. Also run
 * under the thread sanitizer. */
#include "op_cases.h"

#include <malloc.h>
#include <math.h>
#include <signal.h>
#include <unistd.h>

#include "backend/cpu/cpu.h"

static so_backend *cpu(int n_threads) {
    so_backend *b = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open("cpu",
                                  &(so_backend_opts){.n_threads = n_threads, .level = SO_CPU_AUTO},
                                  &b, &err),
                  err);
    return b;
}

static so_backend *deferred(void) {
    so_backend *b = NULL;
    so_err err = {0};
    SO_OK_OR_FAIL(so_backend_open("deferred",
                                  &(so_backend_opts){.n_threads = 2, .level = SO_CPU_AUTO}, &b,
                                  &err),
                  err);
    return b;
}

static void backends_by_name(void **state) {
    (void)state;
    static const char *const given[] = {NULL, "cpu", "deferred"}, *const want[] = {"cpu", "cpu",
                                                                                   "deferred"};
    so_backend_opts o = {.n_threads = 1, .level = SO_CPU_AUTO};
    so_err err = {0};
    for (size_t i = 0; i < SO_LEN(given); i++) {
        so_backend *b = NULL;
        SO_OK_OR_FAIL(so_backend_open(given[i], &o, &b, &err), err);
        assert_string_equal(b->vt->name, want[i]);
        so_backend_free(b);
    }
    so_backend *none = NULL;
    assert_int_equal(so_backend_open("tpu", &o, &none, &err), SO_EINVAL);
    assert_string_equal(err.msg, "unknown backend 'tpu'; use one of cpu, deferred, cuda or cuda:N "
                                 "(N: number of a GPU, from 0)");
    static const char *const BAD[] = {"", "cuda:", "cuda:x", "cuda:1x"};
    for (size_t i = 0; i < SO_LEN(BAD); i++)
        assert_int_equal(so_backend_open(BAD[i], &o, &none, &err), SO_EINVAL);
    assert_int_not_equal(so_backend_open("cuda:4096", &o, &none, &err), SO_OK); /* no such GPU */
    assert_null(none);
}

static void sync_ok(so_backend *b) {
    so_err err = {0};
    SO_OK_OR_FAIL(b->vt->sync(b, &err), err);
}

/* ---- random programs: one list with many threads against one operation at a time ---- */

enum { D = 160, HEAD = 40, ROWS = 5, AREAS = 4, BUFS = 3, STEPS = 600 };

typedef struct machine {
    so_backend *b;
    op_bench bench;
    so_view bufs[BUFS], ids, gains, table;
    so_weight *weights[4];
} machine;

static const so_dtype machine_dtypes[] = {SO_DTYPE_F32, SO_DTYPE_Q4_1, SO_DTYPE_Q8_0,
                                          SO_DTYPE_Q5_0};

/* Area i of AREAS · BUFS: ROWS rows of D floats. */
static so_view area(const machine *m, uint32_t i) {
    i %= AREAS * BUFS;
    return (so_view){m->bufs[i / AREAS].buf, i % AREAS * (ROWS * D * 4)};
}

static machine machine_create(so_backend *b, const op_data *weights, const float *start) {
    static const int32_t ids[ROWS] = {4, 0, 0, 3, 1};
    machine m = {.b = b, .bench = {.b = b}};
    so_err err = {0};
    for (int i = 0; i < BUFS; i++)
        m.bufs[i] = op_buffer(&m.bench, start, AREAS * ROWS * D * 4);
    m.ids = op_buffer(&m.bench, ids, sizeof ids);
    m.gains = op_buffer(&m.bench, start, D * 4);
    m.table = op_buffer(&m.bench, start, ROWS * HEAD * 4);
    for (int i = 0; i < 4; i++)
        SO_OK_OR_FAIL(b->vt->weight_create(b, &weights[i].tensor, &m.weights[i], &err), err);
    return m;
}

static so_op machine_op(const machine *m, noise *z, const float *fresh) {
    so_view out = area(m, noise_u32(z)), x = area(m, noise_u32(z)), y = area(m, noise_u32(z));
    uint32_t what = noise_u32(z) % 11, weight = noise_u32(z) % 4;
    int n = 1 + (int)(noise_u32(z) % ROWS);
    bool same = out.buf == x.buf && out.off == x.off;
    if (what <= 3 && !same)
        return (so_op){
            .kind = SO_OP_MATMUL, .n = n, .matmul = {.out = out, .x = x, .w = m->weights[weight]}};
    if (what == 4)
        return (so_op){.kind = SO_OP_UPLOAD,
                       .n = 1,
                       .upload = {out, fresh + noise_u32(z) % 1000, (size_t)n * D * 4}};
    if (what == 5 && out.buf != x.buf)
        return (so_op){.kind = SO_OP_GATHER, .n = n, .gather = {out, x, m->ids, D}};
    if (what == 6)
        return (so_op){.kind = SO_OP_RMS_NORM,
                       .n = n,
                       .norm = {.out = out, .x = x, .weight = m->gains, .d = D, .eps = 1e-5f}};
    if (what == 7)
        return (so_op){.kind = SO_OP_SILU_MUL, .n = n, .eltwise = {out, x, y, D}};
    if (what == 8)
        return (so_op){.kind = SO_OP_ROPE,
                       .n = n,
                       .rope = {out, m->table, D / HEAD, HEAD, noise_u32(z) % 2 == 0}};
    return (so_op){.kind = SO_OP_ADD, .n = n, .eltwise = {out, x, y, D}};
}

/* Downloads all buffers and frees them. */
static void machine_end(machine *m, float *result) {
    for (int i = 0; i < BUFS; i++)
        so_submit(m->b, &(so_op){.kind = SO_OP_DOWNLOAD,
                                 .n = 1,
                                 .download = {m->bufs[i], result + i * AREAS * ROWS * D,
                                              AREAS * ROWS * D * 4}});
    sync_ok(m->b);
    op_bench_free(&m->bench);
    for (int i = 0; i < 4; i++)
        m->b->vt->weight_free(m->b, m->weights[i]);
}

/* Normalises in place: numbers stay small in programs of any length. */
static void submit_norm(const machine *m, so_view x, int n) {
    so_submit(m->b, &(so_op){.kind = SO_OP_RMS_NORM,
                             .n = n,
                             .norm = {.out = x, .x = x, .weight = m->gains, .d = D, .eps = 1e-3f}});
}

/* Normalises `out` after many steps, so that numbers stay in range. Not after all, so that some
 * results are read with the split with which they were written. */
static void machine_run(machine *m, uint64_t seed, const float *fresh, int sync_every,
                        float *result) {
    noise z = noise_of(seed);
    for (int i = 1; i <= STEPS; i++) {
        so_op op = machine_op(m, &z, fresh);
        so_submit(m->b, &op);
        if ((op.kind == SO_OP_ADD || op.kind == SO_OP_MATMUL) && noise_u32(&z) % 3 != 0)
            submit_norm(m, op.norm.out, op.n);
        if (i % sync_every == 0)
            sync_ok(m->b);
    }
    machine_end(m, result);
}

/* Inputs of all programs of a test, and memory for two results. */
typedef struct programs {
    op_data weights[4];
    float *fresh, *want, *got;
} programs;

static programs programs_open(uint64_t seed) {
    noise z = noise_of(seed);
    programs p = {.fresh = noise_floats(&z, 1000 + AREAS * ROWS * D),
                  .want = SO_NEW_N(float, BUFS *AREAS *ROWS *D),
                  .got = SO_NEW_N(float, BUFS *AREAS *ROWS *D)};
    for (int i = 0; i < 4; i++)
        p.weights[i] = op_data_create(
            &(op_case){SO_OP_MATMUL, machine_dtypes[i], 1, D, D, false, 0}, 50 + (uint64_t)i);
    return p;
}

static void programs_close(programs *p) {
    for (int i = 0; i < 4; i++)
        op_data_free(&p->weights[i]);
    free(p->fresh);
    free(p->want);
    free(p->got);
}

static void random_programs(void **state) {
    (void)state;
    programs p = programs_open(99);
    so_backend *one = cpu(1), *team = cpu(4), *late = deferred();
    for (uint64_t seed = 0; seed < 12; seed++) {
        machine m = machine_create(one, p.weights, p.fresh);
        machine_run(&m, seed, p.fresh, 1, p.want);
        for (int i = 0; i < BUFS * AREAS * ROWS * D; i++)
            assert_true(isfinite(p.want[i])); /* with NaN all programs would agree */
        m = machine_create(team, p.weights, p.fresh);
        machine_run(&m, seed, p.fresh, STEPS, p.got);
        op_case c = {.kind = SO_OP_ADD, .n = ROWS, .d = D};
        assert_same_floats(&c, "a whole list, 4 threads", p.got, p.want, BUFS * AREAS * ROWS * D);
        m = machine_create(late, p.weights, p.fresh);
        machine_run(&m, seed, p.fresh, 77, p.got);
        assert_same_floats(&c, "deferred", p.got, p.want, BUFS * AREAS * ROWS * D);
    }
    so_backend_free(one);
    so_backend_free(team);
    so_backend_free(late);
    programs_close(&p);
}

/* Submits lists again: whole, only their beginning, and with another end. */
static void machine_repeat(machine *m, const float *fresh, bool one_by_one, float *result) {
    static const int lengths[] = {30, 30, 12, 30, 31, 12, 1, 30};
    for (int i = 0; i < (int)SO_LEN(lengths); i++)
        for (int seed = 0; seed < 3; seed++) {
            noise z = noise_of(500 + (uint64_t)seed), other = noise_of(600);
            for (int j = 0; j < lengths[i]; j++) {
                so_op op = machine_op(m, i == 3 && j > 20 ? &other : &z, fresh);
                if (op.kind == SO_OP_UPLOAD && i != 5)
                    continue;
                so_submit(m->b, &op);
                submit_norm(m, area(m, (uint32_t)j), ROWS);
                if (one_by_one)
                    sync_ok(m->b);
            }
            sync_ok(m->b);
        }
    machine_end(m, result);
}

static void lists_are_reused(void **state) {
    (void)state;
    programs p = programs_open(98);
    so_backend *one = cpu(1), *team = cpu(3);
    machine m = machine_create(one, p.weights, p.fresh);
    machine_repeat(&m, p.fresh, true, p.want);
    for (int i = 0; i < BUFS * AREAS * ROWS * D; i++)
        assert_true(isfinite(p.want[i]));
    for (int round = 0; round < 3; round++) { /* buffers freed and created anew */
        m = machine_create(team, p.weights, p.fresh);
        machine_repeat(&m, p.fresh, false, p.got);
        op_case c = {.kind = SO_OP_ADD, .n = ROWS, .d = D};
        assert_same_floats(&c, "lists again, 3 threads", p.got, p.want, BUFS * AREAS * ROWS * D);
    }
    so_backend_free(one);
    so_backend_free(team);
    programs_close(&p);
}

/* ---- which lists reuse their tasks ---- */

/* A rope, a norm and a GELU over one buffer; unused members and padding are set to `fill`. */
enum { SIMPLE_OPS = 3 };
static void simple_ops(so_view x, so_view table, so_view weight, int fill, so_op *ops) {
    memset(ops, fill, SIMPLE_OPS * sizeof *ops);
    ops[0].kind = SO_OP_ROPE;
    ops[0].rope.x = x;
    ops[0].rope.table = table;
    ops[0].rope.n_heads = 2;
    ops[0].rope.head_dim = 8;
    ops[0].rope.halves = true;
    ops[1].kind = SO_OP_RMS_NORM;
    ops[1].norm.out = ops[1].norm.x = x;
    ops[1].norm.weight = weight;
    ops[1].norm.d = 16;
    ops[1].norm.eps = 1e-5f;
    ops[2].kind = SO_OP_GELU;
    ops[2].eltwise.out = ops[2].eltwise.a = x;
    ops[2].eltwise.d = 16;
    for (int i = 0; i < SIMPLE_OPS; i++)
        ops[i].n = 1;
}

/* Whether the tasks of an earlier run are reused. */
static bool reuses_tasks(so_backend *b, const so_op *ops) {
    for (int i = 0; i < SIMPLE_OPS; i++)
        so_submit(b, &ops[i]);
    bool matches = ((so_cpu *)b)->matches;
    sync_ok(b);
    return matches;
}

static void lists_match_by_used_members(void **state) {
    (void)state;
    so_backend *b = cpu(1);
    op_bench bench = {.b = b};
    noise z = noise_of(7);
    float *src = noise_floats(&z, 64);
    so_view x = op_buffer(&bench, src, 64), table = op_buffer(&bench, src, 64);
    so_view weight = op_buffer(&bench, src, 128);
    so_op ops[SIMPLE_OPS];
    sync_ok(b);
    simple_ops(x, table, weight, 0, ops);
    assert_false(reuses_tasks(b, ops));
    assert_true(reuses_tasks(b, ops));
    simple_ops(x, table, weight, 0x5A, ops);
    assert_true(reuses_tasks(b, ops));
    for (int i = 0; i < 5; i++) { /* each differs from the earlier ones in one used member */
        simple_ops(x, table, weight, 0, ops);
        if (i == 0)
            ops[2].kind = SO_OP_ADD, ops[2].eltwise.b = weight;
        if (i == 1)
            ops[2].eltwise.d = 8;
        if (i == 2)
            ops[1].norm.eps = 1e-6f;
        if (i == 3)
            ops[1].norm.weight.off = 64;
        if (i == 4)
            ops[0].rope.halves = false;
        assert_false(reuses_tasks(b, ops));
        assert_true(reuses_tasks(b, ops));
    }
    free(src);
    op_bench_free(&bench);
    so_backend_free(b);
}

/* ---- uploads, long lists, memory ---- */

static void uploads_keep_their_bytes(void **state) {
    (void)state;
    so_backend *all[] = {cpu(2), deferred()};
    for (size_t i = 0; i < SO_LEN(all); i++) {
        so_backend *b = all[i];
        op_bench bench = {.b = b};
        size_t n = 5 << 20; /* four of them exceed the 16 MiB that are kept */
        unsigned char *src = so_alloc(n), *dst = so_alloc(4 * n);
        so_view v[4];
        so_view first = op_buffer(&bench, NULL, 4);
        for (int j = 0; j < 4; j++)
            v[j] = op_buffer(&bench, NULL, n);
        /* an operation before them, so that they cannot be copied to their destination at once */
        so_submit(b, &(so_op){.kind = SO_OP_DOWNLOAD, .n = 1, .download = {first, dst, 4}});
        for (int j = 0; j < 4; j++) {
            memset(src, 17 + j, n);
            so_submit(b, &(so_op){.kind = SO_OP_UPLOAD, .n = 1, .upload = {v[j], src, n}});
        }
        memset(src, 0, n);
        for (int j = 0; j < 4; j++)
            so_submit(b, &(so_op){.kind = SO_OP_DOWNLOAD,
                                  .n = 1,
                                  .download = {v[j], dst + (size_t)j * n, n}});
        sync_ok(b);
        for (int j = 0; j < 4; j++)
            assert_true(dst[(size_t)j * n] == 17 + j && dst[(size_t)(j + 1) * n - 1] == 17 + j);
        op_bench_free(&bench);
        so_backend_free(b);
        free(src);
        free(dst);
    }
}

static void long_lists(void **state) {
    (void)state;
    so_backend *b = cpu(2);
    op_bench bench = {.b = b};
    float one[16], sum[16];
    for (int i = 0; i < 16; i++)
        one[i] = 1.0f;
    so_view x = op_buffer(&bench, one, sizeof one), y = op_buffer(&bench, NULL, sizeof sum);
    for (int i = 0; i < 3 * SO_OPS_MAX + 5; i++)
        so_submit(b, &(so_op){.kind = SO_OP_ADD, .n = 1, .eltwise = {y, y, x, 16}});
    so_submit(b, &(so_op){.kind = SO_OP_DOWNLOAD, .n = 1, .download = {y, sum, sizeof sum}});
    sync_ok(b);
    assert_true(sum[0] == 3 * SO_OPS_MAX + 5 && sum[15] == sum[0]);
    op_bench_free(&bench);
    so_backend_free(b);
}

/* After the first pass of a shape, passes allocate nothing. */
static void warm_passes_allocate_nothing(void **state) {
    (void)state;
    if (SO_SANITIZED)
        SO_SKIP("a sanitizer's allocator does not count");
    so_backend *b = cpu(2);
    op_data o = op_data_create(&(op_case){SO_OP_MATMUL, SO_DTYPE_Q4_1, 64, 576, 64, false, 0}, 3);
    op_bench bench = {.b = b};
    so_err err = {0};
    so_weight *w = NULL;
    SO_OK_OR_FAIL(b->vt->weight_create(b, &o.tensor, &w, &err), err);
    so_op op = op_make(&bench, &o, 0, 64, w);
    struct mallinfo2 before = {0};
    for (int pass = 0; pass < 4; pass++) {
        if (pass == 1)
            before = mallinfo2();
        so_submit(b, &op);
        so_submit(b, &(so_op){.kind = SO_OP_UPLOAD,
                              .n = 1,
                              .upload = {op.matmul.x, o.a, 64 * 576 * sizeof(float)}});
        so_submit(b, &op);
        sync_ok(b);
    }
    struct mallinfo2 after = mallinfo2();
    assert_int_equal(after.uordblks, before.uordblks);
    assert_int_equal(after.hblkhd, before.hblkhd);
    op_bench_free(&bench);
    b->vt->weight_free(b, w);
    so_backend_free(b);
    op_data_free(&o);
}

/* ---- refusals ---- */

static void bad_weights(void **state) {
    (void)state;
    so_backend *b = cpu(1);
    so_weight *w = NULL;
    so_err err = {0};
    unsigned char bytes[1024] = {0};
    so_tensor t = {.name = SO_STR("blk.0.w"),
                   .dtype = SO_DTYPE_Q4_K,
                   .n_dims = 2,
                   .dims = {288, 1, 1, 1},
                   .data = bytes,
                   .n_bytes = sizeof bytes};
    assert_int_equal(b->vt->weight_create(b, &t, &w, &err), SO_EFORMAT);
    assert_non_null(strstr(err.msg, "blk.0.w"));
    assert_non_null(strstr(err.msg, "288"));
    t.dims[0] = 256, t.dims[1] = 8; /* 1152 bytes are needed */
    assert_int_equal(b->vt->weight_create(b, &t, &w, &err), SO_EFORMAT);
    t.dims[1] = INT64_MAX / 4;
    assert_int_equal(b->vt->weight_create(b, &t, &w, &err), SO_ERANGE);
    t.dims[1] = 0;
    assert_int_equal(b->vt->weight_create(b, &t, &w, &err), SO_ERANGE);
    t.dtype = (so_dtype)5;
    assert_int_equal(b->vt->weight_create(b, &t, &w, &err), SO_EUNSUPPORTED);
    assert_null(w);
    so_buffer *buf = NULL;
    assert_int_equal(b->vt->buffer_create(b, SIZE_MAX - 5, &buf, &err), SO_ENOMEM);
    assert_int_equal(b->vt->buffer_create(b, SIZE_MAX / 2, &buf, &err), SO_ENOMEM);
    assert_null(buf);
    b->vt->buffer_free(b, NULL);
    b->vt->weight_free(b, NULL);
    b->vt->kv_free(b, NULL);
    so_backend_free(b);
    so_backend_free(NULL);
    assert_int_equal(so_backend_open("cpu",
                                     &(so_backend_opts){.n_threads = 1000, .level = SO_CPU_SCALAR},
                                     &b, &err),
                     SO_ERANGE);
}

static void view_past_the_end(void *user) {
    (void)user;
    so_backend *b = NULL;
    so_buffer *buf = NULL;
    float x[4] = {0};
    if (so_backend_open("cpu", &(so_backend_opts){.n_threads = 1, .level = SO_CPU_SCALAR}, &b,
                        NULL) != 0 ||
        b->vt->buffer_create(b, 12, &buf, NULL) != 0)
        _exit(3);
    so_submit(b, &(so_op){.kind = SO_OP_UPLOAD, .n = 1, .upload = {{buf, 0}, x, 16}});
}

static void locked_buffer_read(void *user) {
    (void)user;
    so_backend *b = NULL;
    so_buffer *buf = NULL;
    if (so_backend_open("deferred", &(so_backend_opts){.n_threads = 1, .level = SO_CPU_SCALAR}, &b,
                        NULL) != 0 ||
        b->vt->buffer_create(b, 12, &buf, NULL) != 0 || b->vt->sync(b, NULL) != 0)
        _exit(3);
    *(volatile unsigned char *)buf->data = 1;
}

static void locked_store_read(void *user) {
    (void)user;
    so_backend *b = NULL;
    so_kv_store *s = NULL;
    so_kv_shape shape = {1, 1, 8, 1, SO_DTYPE_F16};
    if (so_backend_open("deferred", &(so_backend_opts){.n_threads = 1, .level = SO_CPU_SCALAR}, &b,
                        NULL) != 0 ||
        b->vt->kv_create(b, &shape, &s, NULL) != 0)
        _exit(3);
    _exit(*(volatile unsigned char *)s->v.data);
}

static void bugs_abort(void **state) {
    (void)state;
    if (SO_SANITIZED)
        SO_SKIP("a sanitizer handles the signals itself");
    assert_int_equal(so_test_dies_of(view_past_the_end, NULL), SIGABRT);
    assert_int_equal(so_test_dies_of(locked_buffer_read, NULL), SIGSEGV);
    assert_int_equal(so_test_dies_of(locked_store_read, NULL), SIGSEGV);
}

static void downloads_wait_for_sync(void **state) {
    (void)state;
    so_backend *b = deferred();
    op_bench bench = {.b = b};
    uint32_t in = 123, out = 0;
    so_view v = op_buffer(&bench, &in, sizeof in);
    in = 7; /* the upload has copied its bytes */
    so_submit(b, &(so_op){.kind = SO_OP_DOWNLOAD, .n = 1, .download = {v, &out, sizeof out}});
    assert_int_equal(out, 0xA5A5A5A5u);
    sync_ok(b);
    assert_int_equal(out, 123);
    op_bench_free(&bench);
    so_backend_free(b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backends_by_name),
        cmocka_unit_test(random_programs),
        cmocka_unit_test(lists_are_reused),
        cmocka_unit_test(lists_match_by_used_members),
        cmocka_unit_test(uploads_keep_their_bytes),
        cmocka_unit_test(long_lists),
        cmocka_unit_test(warm_passes_allocate_nothing),
        cmocka_unit_test(bad_weights),
        cmocka_unit_test(bugs_abort),
        cmocka_unit_test(downloads_wait_for_sync),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
