/* The choice of prefetch: it is kept in a file, a file that is not valid is ignored, two measurements
 * that agree end the measuring, and no candidate changes a result. Which candidate is fastest
 * depends on the machine and is not tested. */
#include "op_cases.h"

#include <unistd.h>

#include "backend/cpu/cpu.h"
#include "backend/prefetch.h"
#include "base/file.h"
#include "so_rig.h"

typedef struct fixture {
    char dir[64];
    so_backend *b;
    so_weight *w;
    unsigned char *bytes;
} fixture;

/* n_rows rows of 4096 elements, packed as Q8_0: 4352 bytes each. */
static void setup(fixture *f, so_cpu_level level, int n_rows) {
    so_err err = {0};
    size_t n_bytes = (size_t)n_rows * so_dtype_row_bytes(SO_DTYPE_Q8_0, 4096);
    memset(f, 0, sizeof *f);
    snprintf(f->dir, sizeof f->dir, "/tmp/so_prefetch_XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    f->bytes = so_calloc(n_bytes, 1);
    so_tensor t = {.name = SO_STR("w"),
                   .dtype = SO_DTYPE_Q8_0,
                   .n_dims = 2,
                   .dims = {4096, n_rows, 1, 1},
                   .data = f->bytes,
                   .n_bytes = n_bytes};
    SO_OK_OR_FAIL(
        so_backend_open("cpu", &(so_backend_opts){.n_threads = 2, .level = level}, &f->b, &err),
        err);
    SO_OK_OR_FAIL(f->b->vt->weight_create(f->b, &t, &f->w, &err), err);
    assert_true(f->b->vt->weight_pack(f->b, f->w));
}

/* The path of the only file in the folder of the costs; NULL: there is none. Caller frees. */
static char *kept_path(const fixture *f) {
    so_dir_names names = {0};
    char *costs = so_path_join(f->dir, "costs"), *path = NULL;
    if (so_file_is_dir(costs)) {
        assert_int_equal(so_dir_list(costs, 8, &names, NULL), SO_OK);
        assert_int_equal(names.n, 1);
        path = so_path_join(costs, names.names[0]);
        so_dir_names_free(&names);
    }
    free(costs);
    return path;
}

static void teardown(fixture *f) {
    char *path = kept_path(f), *costs = so_path_join(f->dir, "costs");
    if (path)
        unlink(path);
    rmdir(costs);
    rmdir(f->dir);
    free(path);
    free(costs);
    f->b->vt->weight_free(f->b, f->w);
    so_backend_free(f->b);
    free(f->bytes);
}

static so_prefetch_origin origin(const fixture *f) {
    return ((const so_cpu *)f->b)->prefetch_origin;
}

static void read_text(const char *path, so_buf *out) {
    out->len = 0;
    assert_int_equal(so_file_read(path, 1 << 16, out, NULL), SO_OK);
    so_buf_append_char(out, '\0');
}

static void write_text(const char *path, const char *text) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void assert_described(const fixture *f, const char *want) {
    so_buf text = {0};
    so_prefetch_describe(f->b, &text);
    so_buf_append_char(&text, '\0');
    assert_string_equal(text.data, want);
    so_buf_free(&text);
}

#define ROWS_LINES "blocks32rows 8192 2 2\nblocks256rows 32768 2 2\n"

static const char DEFAULT[] =
    "blocks of 32: 12 KB ahead into L1, several rows 12 KB ahead into L1; "
    "blocks of 256: 4 KB ahead into L1, several rows 4 KB ahead into L1 (default)";

enum { ENOUGH = 9216 }; /* rows: 40 MB */

static bool has_prefetch(void) { return so_cpu_best_level() != SO_CPU_SCALAR; }

static void measures_until_two_agree(void **state) {
    (void)state;
    if (!has_prefetch())
        SO_SKIP("the scalar level does not prefetch");
    fixture f;
    setup(&f, SO_CPU_AUTO, ENOUGH);
    assert_described(&f, DEFAULT);
    so_prefetch_choose(f.b, f.dir);
    assert_int_equal(origin(&f), SO_PREFETCH_MEASURED);
    char *path = kept_path(&f);
    assert_non_null(path);
    int n = 1;
    /* on a busy machine results may differ for a while */
    for (; n < 500 && origin(&f) != SO_PREFETCH_KEPT; n++)
        so_prefetch_choose(f.b, f.dir);
    assert_int_equal(origin(&f), SO_PREFETCH_KEPT);
    assert_true(n > SO_PREFETCH_AGREED);
    free(path);
    teardown(&f);
}

/* Replaces the lines after the key. */
static void rewrite(const char *path, const char *lines) {
    so_buf text = {0};
    read_text(path, &text);
    char *at = strstr(text.data, "blocks32 ");
    assert_non_null(at);
    text.len = (size_t)(at - text.data);
    so_buf_append_c(&text, lines);
    so_buf_append_char(&text, '\0');
    write_text(path, text.data);
    so_buf_free(&text);
}

static void uses_what_was_kept(void **state) {
    (void)state;
    if (!has_prefetch())
        SO_SKIP("the scalar level does not prefetch");
    fixture f;
    setup(&f, SO_CPU_AUTO, ENOUGH);
    so_prefetch_choose(f.b, f.dir);
    char *path = kept_path(&f);
    rewrite(path, "blocks32 0 2 2\nblocks256 4096 1 2\n" ROWS_LINES "end\n");
    so_prefetch_choose(f.b, f.dir);
    assert_described(&f, "blocks of 32: none, several rows 8 KB ahead into L2; "
                         "blocks of 256: 4 KB ahead into L1, several rows 32 KB ahead into L2 "
                         "(measured earlier)");
    const so_prefetch *used = ((const so_cpu *)f.b)->prefetch;
    assert_int_equal(used[so_prefetch_class(32, 1)].lead, 0);
    assert_int_equal(used[so_prefetch_class(256, 1)].lead, 4096);
    assert_int_equal(used[so_prefetch_class(32, 2)].lead, 8192);
    assert_int_equal(used[so_prefetch_class(256, 64)].lead, 32768);
    rewrite(path,
            "blocks32 0 2 1\nblocks256 4096 1 2\n" ROWS_LINES "end\n"); /* measured only once */
    so_prefetch_choose(f.b, f.dir);
    assert_int_equal(origin(&f), SO_PREFETCH_MEASURED);
    so_buf text = {0};
    read_text(path, &text);
    assert_non_null(strstr(text.data, "\nblocks256 4096 1 2\n")); /* was settled */
    so_buf_free(&text);
    free(path);
    teardown(&f);
}

static void ignores_invalid_files(void **state) {
    (void)state;
    if (!has_prefetch())
        SO_SKIP("the scalar level does not prefetch");
    static const char *const bad[] = {
        "",
        "blocks32 0 2 2\nblocks256 4096 1 2\n" ROWS_LINES,               /* no end */
        "blocks32 0 2 2\nblocks256 4096 1 2\n" ROWS_LINES "end\nmore\n", /* text after the end */
        "blocks32 0 2 2\n" ROWS_LINES "end\n",
        "blocks256 4096 1 2\nblocks32 0 2 2\n" ROWS_LINES "end\n",
        "blocks32 0 3 2\nblocks256 4096 1 2\n" ROWS_LINES "end\n",   /* no such cache */
        "blocks32 100 1 2\nblocks256 4096 1 2\n" ROWS_LINES "end\n", /* no candidate */
        "blocks32 99999999 1 2\nblocks256 4096 1 2\n" ROWS_LINES "end\n",
        "blocks32 0 2 2 2\nblocks256 4096 1 2\n" ROWS_LINES "end\n",
        "blocks32 0 2\nblocks256 4096 1 2\n" ROWS_LINES "end\n",
        "blocks32 0 2 2\nblocks256 4096 1 2\nend\n", /* of version 1 */
        "blocks32 0 2 2\nblocks256 4096 1 2\nblocks32rows 8192 2 2\nend\n",
    };
    fixture f;
    setup(&f, SO_CPU_AUTO, ENOUGH);
    so_prefetch_choose(f.b, f.dir);
    char *path = kept_path(&f);
    for (size_t i = 0; i < SO_LEN(bad); i++) {
        rewrite(path, bad[i]);
        so_prefetch_choose(f.b, f.dir);
        assert_int_equal(origin(&f), SO_PREFETCH_MEASURED);
    }
    write_text(path,
               "sooth prefetch 2\nanother machine\nblocks32 0 2 2\nblocks256 0 2 2\n" ROWS_LINES
               "end\n");
    so_prefetch_choose(f.b, f.dir);
    assert_int_equal(origin(&f), SO_PREFETCH_MEASURED);
    free(path);
    so_prefetch_choose(f.b, "/dev/null/no-folder"); /* cannot be kept; used nevertheless */
    assert_int_equal(origin(&f), SO_PREFETCH_MEASURED);
    so_prefetch_choose(f.b, NULL);
    assert_int_equal(origin(&f), SO_PREFETCH_MEASURED);
    teardown(&f);
}

static void small_models_and_the_scalar_level_keep_the_default(void **state) {
    (void)state;
    fixture f;
    setup(&f, SO_CPU_AUTO, 32);
    so_prefetch_choose(f.b, f.dir);
    assert_described(&f, DEFAULT);
    assert_null(kept_path(&f));
    teardown(&f);
    setup(&f, SO_CPU_SCALAR, ENOUGH);
    so_prefetch_choose(f.b, f.dir);
    assert_described(&f, DEFAULT);
    assert_null(kept_path(&f));
    teardown(&f);
}

/* Distances below and above a tile, and past the end of the matrix. */
static void no_choice_changes_a_result(void **state) {
    (void)state;
    static const so_prefetch choices[] = {{0, false},       {64, true},       {4 << 10, true},
                                          {12 << 10, true}, {8 << 10, false}, {32 << 10, false},
                                          {1 << 20, false}, {1 << 20, true}};
    static const so_dtype types[] = {SO_DTYPE_Q4_1, SO_DTYPE_Q8_0, SO_DTYPE_Q4_K, SO_DTYPE_Q6_K};
    for (size_t t = 0; t < SO_LEN(types); t++) {
        op_case c = {SO_OP_MATMUL, types[t], 70, 768, 200, false, 0};
        op_data o = op_data_create(&c, t);
        size_t n = (size_t)c.n * (size_t)c.m;
        float *want = SO_NEW_N(float, n), *got = SO_NEW_N(float, n);
        so_backend *b = NULL;
        so_err err = {0};
        SO_OK_OR_FAIL(so_backend_open("cpu", &(so_backend_opts){.n_threads = 2}, &b, &err), err);
        op_run(b, &o, 0, c.n, want);
        so_weight *w = NULL;
        SO_OK_OR_FAIL(b->vt->weight_create(b, &o.tensor, &w, &err), err);
        assert_true(b->vt->weight_pack(b, w));
        for (size_t i = 0; i < SO_LEN(choices); i++) {
            op_bench bench = {.b = b};
            so_op op = op_make(&bench, &o, 0, c.n, w);
            for (int p = 0; p < SO_PREFETCH_CLASSES; p++)
                ((so_cpu *)b)->prefetch[p] = choices[i];
            so_submit(b, &op);
            so_submit(b, &(so_op){.kind = SO_OP_DOWNLOAD,
                                  .n = c.n,
                                  .download = {op_result(&op), got, n * sizeof *got}});
            SO_OK_OR_FAIL(b->vt->sync(b, &err), err);
            assert_same_floats(&c, "prefetch", got, want, n);
            op_bench_free(&bench);
        }
        b->vt->weight_free(b, w);
        so_backend_free(b);
        op_data_free(&o);
        free(want);
        free(got);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(measures_until_two_agree),
        cmocka_unit_test(uses_what_was_kept),
        cmocka_unit_test(ignores_invalid_files),
        cmocka_unit_test(small_models_and_the_scalar_level_keep_the_default),
        cmocka_unit_test(no_choice_changes_a_result),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
